"""Rows of one result by short words, and the number that stands for them: a mean with its interval.

A choice is a mapping of fields to values, as `Query.where` takes them, with four rules that keep it short:
- options of a variant that are not named are not there: `{"proxy": "pca"}` takes no rows of its controls;
- rows are of all heads and of all groups unless `head` or `group` is named;
- `site` is "embedding", "first block", "middle block", "last block", "blocks" or "final norm" of each model;
- `step` may be "first" or "last": of each model and seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anisoscope.results.quantity import FEWEST_SEEDS, combine, mean, t_interval
from anisoscope.results.query import SCHEMA, Query, Row
from anisoscope.view.words import estimate, number

Choice = Mapping[str, Any]
BLOCKS = ("resid", "stage")
ENDS = {"embedding": "embed", "final norm": "final"}
WHOLE: Choice = {"head": None, "group": ""}


@dataclass(frozen=True)
class Cell:
    """A number with its 95 % interval (NaN without one), and of how many seeds it is the mean."""

    value: float
    low: float = math.nan
    high: float = math.nan
    seeds: int = 1
    range: bool = False  # whether low and high are the least and the most of several values

    def __str__(self) -> str:
        if self.range:
            ends = [number(end, 4) for end in (self.low, self.high)]
            return ends[0] if ends[0] == ends[1] else " … ".join(ends)
        return estimate(self.value, self.low, self.high)


def chosen(rows: Query, choice: Choice) -> Query:
    """The rows of a choice."""
    fields = {**WHOLE, **choice}
    site, step = fields.pop("site", None), fields.get("step")
    if step in ("first", "last"):
        fields.pop("step")
    found = rows.where(**fields)
    unnamed = {key: None for key in found.fields() if key not in SCHEMA.names and key not in fields}
    found = found.where(**unnamed).known()
    found = found if site is None else at_site(found, site)
    return found if step not in ("first", "last") else at_end(found, step)


def at_site(rows: Query, site: str) -> Query:
    """The rows at a place that every model has, whatever its number of blocks."""
    if site in ENDS:
        return rows.where(kind=ENDS[site])
    blocks = rows.where(kind=BLOCKS, layer=lambda layer: layer is not None and layer > 0)
    if site == "blocks":
        return blocks
    parts = []
    for group in blocks.groups("model", "stack").values():
        layers = sorted(group.values("layer"))
        place = {"first block": layers[0], "middle block": layers[(len(layers) - 1) // 2], "last block": layers[-1]}
        parts.append(group.where(layer=place[site]).positions)
    return joined(rows, parts)


def at_end(rows: Query, end: str) -> Query:
    """The rows of the first or the last step of each model and seed."""
    if end == "last":
        return rows.at_last_step("model", "seed")
    groups = rows.where(step=...).groups("model", "seed").values()
    return joined(rows, [group.where(step=min(group.values("step"))).positions for group in groups])


def joined(rows: Query, parts: Sequence[np.ndarray]) -> Query:
    """The rows of a query at some positions."""
    kept = set(np.concatenate(parts).tolist()) if parts else set()
    return rows._only(np.array([at for at in rows.positions if at in kept], dtype=np.int64))


def cell(rows: Query, *, show: str = "mean") -> Cell | None:
    """The number of some rows; None without rows.

    Three seeds or more give the mean of their means with Student's interval, one seed the mean over its rows with the
    jackknife over contexts; two seeds give no interval. With show="range" the least and the most value, with "size" the
    mean of absolute values.
    """
    if not len(rows):
        return None
    if show == "range":
        values = rows.numbers()
        return Cell(float(values.mean()), float(values.min()), float(values.max()), range=True)
    seeds = [list(group) for group in rows.groups("seed").values()]
    if len(seeds) == 1:
        return _of_one_seed(seeds[0], size=show == "size")
    values = [[abs(row.value) if show == "size" else row.value for row in seed] for seed in seeds]
    means = [sum(seed) / len(seed) for seed in values]
    half = t_interval(means)[0] if len(seeds) >= FEWEST_SEEDS else math.nan
    centre = sum(means) / len(means)
    return Cell(centre, centre - half, centre + half, seeds=len(seeds))


def _of_one_seed(rows: Sequence[Row], *, size: bool = False) -> Cell:
    if len(rows) == 1 and not size:
        return Cell(rows[0].value, rows[0].low, rows[0].high)
    quantities = [row.quantity for row in rows]
    found = combine(quantities, lambda values: sum(map(abs, values)) / len(values)) if size else mean(quantities)
    return Cell(found.value, *found.interval())
