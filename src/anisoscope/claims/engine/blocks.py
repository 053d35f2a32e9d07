"""What the claims about depth read: the blocks 1 … L of a stack (kind resid), at one step or over all of them.

The embedding and what comes after the final norm are no blocks. A model with an encoder and a decoder has two stacks,
and each is judged by itself; arms of an ablation are compared with each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from anisoscope.claims.engine.curve import Curve
from anisoscope.claims.engine.evidence import (
    Cell,
    Missing,
    NotHere,
    Numbers,
    Readings,
    Run,
    Study,
    arm_of,
    listing,
    steps_of,
)
from anisoscope.results.quantity import Quantity, mean
from anisoscope.results.query import Row

FEWEST_BLOCKS = 5  # fewer have no middle
SOURCE = "Razzhigaev et al. 2023, The Shape of Learning, arXiv:2311.05928"


@dataclass(frozen=True)
class BlockStack:
    """One stack of blocks of one model, over all steps."""

    run: Run
    name: str | None = None  # None = the only one
    kind: str = "resid"
    until: int | None = None  # nothing after this step is read

    def ended(self, step: int) -> BlockStack:
        return replace(self, until=step)

    @property
    def role(self) -> str:
        return self.name if self.run.role == "encoder-decoder" and self.name else self.run.role

    def blocks(self, metric: str, group: str = "", **options: Any) -> Readings:
        """A metric at the blocks."""
        found = self.sites(metric, group, **options)
        return {cell: row for cell, row in found.items() if cell.kind == self.kind and cell.layer > 0}

    def sites(self, metric: str, group: str = "", *, heads: bool = False, **options: Any) -> Readings:
        """A metric at all sites of this stack, whatever their kind, with nothing after the step that ends it."""
        found = self.run.rows(metric, group, heads=heads, **options)
        end = math.inf if self.until is None else self.until
        mine = {cell: row for cell, row in found.items() if self.name in (None, cell.stack)}
        return {cell: row for cell, row in mine.items() if cell.step is None or cell.step <= end}

    def needed(self, metric: str, **options: Any) -> Readings:
        """A metric at the blocks, or `Missing`."""
        found = self.blocks(metric, **options)
        if not found:
            raise self.gap(metric, f"{metric} with {listing(options)}" if options else metric)
        return found

    def gap(self, metric: str, words: str = "", *, how: str = "") -> Missing:
        """Why a metric is not there at the blocks: it may have been measured at the ends of stages alone."""
        if any(cell.kind == "stage" for cell in self.sites(metric)):
            stages = "it was measured at the ends of stages; ask for --sites resid too"
            return NotHere(f"{words or metric} after every block", stages)
        return Missing(f"{words or metric} at blocks", how or f"measure it with --metrics {metric}")


def stacks(study: Study) -> dict[str, BlockStack]:
    """The stacks of every model, by what a verdict calls them."""
    found: dict[str, BlockStack] = {}
    for model, run in study.items():
        names = run.stacks()
        if len(names) < 2:
            found[model] = BlockStack(run)
        else:
            found |= {f"{model}, {name} stack": BlockStack(run, name) for name in names}
    return found


@dataclass(frozen=True)
class Arms:
    """Models of one size that differ in one thing, by the name of the arm."""

    runs: Mapping[str, Run]
    until: int | None = None  # nothing after this step is read

    def ended(self, step: int) -> Arms:
        return replace(self, until=step)

    def stack(self, arm: str, kind: str = "resid") -> BlockStack:
        return BlockStack(self.runs[arm], kind=kind, until=self.until)


def arms_of(study: Study, names: Iterable[str]) -> dict[str, Arms]:
    """The arms of an ablation by size."""
    found: dict[str, dict[str, Run]] = {}
    for model, run in study.items():
        if (arm := arm_of(model, names)) is not None:
            found.setdefault(arm[1], {})[arm[0]] = run
    return {size: Arms(runs) for size, runs in found.items()}


def series_of(readings: Iterable[Cell], *, fewest: int = 2) -> list[int]:
    """The measured steps, of which there must be some."""
    found = steps_of(readings)
    if len(found) < fewest:
        how = "sweep the checkpoints of a model or watch its training"
        if len(found) > 1:  # a series, if a short one
            raise Missing(f"series of {fewest} steps or more", f"it has {len(found)}; {how}")
        raise NotHere(f"series of {fewest} steps or more", how)
    return found


def curve(readings: Readings, step: int | None) -> Curve:
    """The profile over the blocks at one step; refused where there are too few or an end is missing."""
    cells = sorted((cell for cell in readings if cell.step == step), key=lambda cell: cell.layer)
    told = [round(cell.layer / readings[cell].depth) for cell in cells if readings[cell].depth > 0]
    blocks = max([*told, *(cell.layer for cell in cells)])
    if len(cells) < FEWEST_BLOCKS:
        raise Missing(f"profile of {FEWEST_BLOCKS} blocks", f"{len(cells)} of {blocks} have a number")
    missing = [end for end in (1, blocks) if end not in {cell.layer for cell in cells}]
    if missing:
        raise Missing(f"number at block {missing[0]}", "a shape over depth needs both ends; measure all layers")
    layers = [cell.layer for cell in cells]
    return Curve.of(layers, [layer / blocks for layer in layers], [readings[cell].quantity for cell in cells])


def block_mean(numbers: Numbers, step: int | None, layers: Iterable[int] | None = None) -> Quantity:
    """The mean over blocks (or some of them) at one step."""
    chosen = None if layers is None else set(layers)
    mine = [n for c, n in numbers.items() if c.step == step and (chosen is None or c.layer in chosen)]
    return mean([number.quantity if isinstance(number, Row) else number for number in mine])


def shared_steps(courses: Iterable[Iterable[Cell]]) -> tuple[list[int], list[int]]:
    """The blocks measured at the last step in all of them, and the steps at which all of those blocks were.

    A block that has no number at the end is left out at every step, and a step at which one of the others has none is
    left out for all: a mean over other blocks would be another number.
    """
    common = set.intersection(*({(c.step, c.layer) for c in cells if c.step is not None} for cells in courses))
    last = max((step for step, _ in common), default=None)
    layers = sorted(layer for step, layer in common if step == last)
    steps = sorted({step for step, _ in common})
    return layers, [step for step in steps if all((step, layer) in common for layer in layers)]


def curve_records(profile: Curve) -> list[dict[str, Any]]:
    """A profile for the report."""
    records = []
    for i, layer in enumerate(profile.layers):
        value, half = float(profile.values[i]), float(profile.halves[i])
        bounds = {"low": value - half, "high": value + half} if math.isfinite(half) else {}
        records.append({"layer": layer, "depth": float(profile.depths[i]), "value": value, **bounds})
    return records


def at_step(step: int | None) -> str:
    """Words for when; none outside a series."""
    return "" if step is None else f" at step {step}"
