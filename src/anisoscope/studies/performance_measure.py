"""One model: at every site the geometry of raw and repaired rows, and what can be done with them.

Everything that is fitted (repairs, readouts, probes) is fitted on the fit half of the contexts; every number in the
table is about the test half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from anisoscope.capture.layout import Layout, find_layout
from anisoscope.capture.losses import Reading
from anisoscope.capture.sites import Site
from anisoscope.capture.tokenizers import special_ids
from anisoscope.data.tasks import NONE
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.estimate import Estimate
from anisoscope.metrics.metric import registry
from anisoscope.numerics.hashing import fold_of, half_of
from anisoscope.numerics.probes import LinearProbe, choose_probe, fit_centroids, fit_probe
from anisoscope.numerics.repairs import Repair, fit_repairs
from anisoscope.runs.table import variant_name
from anisoscope.studies.performance_config import PerformanceConfig
from anisoscope.studies.performance_patch import patching, token_losses
from anisoscope.studies.performance_rows import (
    FOLDS,
    VALIDATION,
    Material,
    Piece,
    RowSet,
    collect_rows,
    pooled,
    read_reading,
)
from anisoscope.studies.performance_scores import FREE, LOSS, SHARE, Bounds, Scores, metric_estimate

GEOMETRY = ("svd_ratio", "average_cosine", "two_nn", "iso_score", "participation_ratio")
MEMORY = 1 << 29  # bytes of rows that are held at a time
AS_RAW = "the same fit as raw: the intercept is free, so a shift changes nothing"
Found = tuple[str, dict[str, Any], Estimate]  # metric, variant, estimate
Tell = Callable[[str, int, int], None]


@dataclass
class Measurement:
    """One model under the study."""

    config: PerformanceConfig
    loaded: Any
    material: Material
    tell: Tell | None = None
    label: str = ""
    notes: list[str] = field(default_factory=list)

    @cached_property
    def layout(self) -> Layout:
        return find_layout(self.loaded.model)

    @cached_property
    def sites(self) -> list[Site]:
        kinds: list[str] = [kind for kind in ("embed", "resid", "final") if kind in self.layout.kinds]
        found = self.layout.sites(kinds, self.config.layers or None)
        return [site for site in found if site.stack != "encoder"]  # an encoder's rows have no tokens to predict

    @cached_property
    def reading(self) -> Reading:
        return read_reading(self.loaded.model, self.material.asked)

    @cached_property
    def tested(self) -> list[Piece]:
        """The test contexts of the loss."""
        return [piece for piece in map(_test_part, self.material.asked) if len(piece.key)]

    @cached_property
    def own(self) -> Scores:
        """The model's own loss, nothing replaced."""
        return Scores(*token_losses(self.loaded.model, self.tested, reading=self.reading))

    def records(self) -> Iterator[dict[str, Any]]:
        """Rows of the table, site by site."""
        done, depths = 0, {stack.name: stack.depth for stack in self.layout.stacks}
        for group in self._groups():
            asked = collect_rows(
                self.loaded.model,
                self.material.asked,
                group,
                layout=self.layout,
                reading=self.reading,
                special=self._special,
            )
            shown = collect_rows(
                self.loaded.model, self.material.pieces, group, layout=self.layout, special=self._special
            )
            for site in group:
                for metric, variant, found in self._site(site, asked.pop(site), shown.pop(site)):
                    yield _record(site, depths[site.stack], metric, variant, found)
                done += 1
                if self.tell is not None:
                    self.tell(self.label, done, len(self.sites))

    def _groups(self) -> Iterator[list[Site]]:
        """As many sites at a time as fit into memory."""
        rows = sum(int((p.inputs["attention_mask"] != 0).sum()) for p in (*self.material.asked, *self.material.pieces))
        width = int(getattr(getattr(self.loaded.model, "config", None), "hidden_size", 1024) or 1024)
        size = max(1, MEMORY // max(1, 4 * rows * width))
        for start in range(0, len(self.sites), size):
            yield self.sites[start : start + size]

    def _special(self, token: Tensor) -> Tensor:
        return torch.isin(token, torch.tensor(sorted(special_ids(self.loaded.tokenizer)), dtype=torch.int64))

    # one site

    def _site(self, site: Site, asked: RowSet, shown: RowSet) -> Iterator[Found]:
        c = self.config
        repair = partial(fit_repairs, directions=c.directions, shrinkage=c.shrinkage)
        mine = repair(asked.keep(~asked.test).x)
        yield from self._patched(site, mine)
        yield from self._readout(asked, mine)
        natural = shown.keep(torch.tensor([unit.natural for unit in self.material.units])[shown.unit])
        repairs = repair(natural.keep(~natural.test).x)
        yield from self._geometry(natural, repairs)
        for name, task in self.material.tasks.items():
            if task.level == "token":
                label = self.material.token_labels(name, natural)
                yield from self._token_task(name, natural.keep(label != NONE), label[label != NONE], repairs)
            else:
                yield from self._context_task(name, shown, repairs)

    def _geometry(self, rows: RowSet, repairs: dict[str, Repair]) -> Iterator[Found]:
        test = rows.keep(rows.test).at_most(self.config.size["rows"], seed=self.config.seed)
        kept: dict[str, Estimate] = {}
        for name, repair in repairs.items():
            x = repair(test.x) if name != "raw" else test.x
            for metric in GEOMETRY:
                if metric == "two_nn" and name == "mean":  # a shift changes no distance
                    found = kept[metric]
                else:
                    found = metric_estimate(registry()[metric], x, test.key, seed=self.config.seed)
                kept.setdefault(metric, found)
                yield metric, {"repair": name}, found

    def _patched(self, site: Site, repairs: dict[str, Repair]) -> Iterator[Found]:
        """The model's own loss with the rows of this site repaired and given their usual mean norm back."""
        model, base = self.loaded.model, self.own
        for name, repair in repairs.items():
            if name == "raw":
                scores = base
            else:
                change = partial(repair, rescaled=True)
                patch = partial(_patch, model, self.layout, site, change)
                scores = Scores(*token_losses(model, self.tested, reading=self.reading, patch=patch))
            yield from _with_gain("lm_loss", {"reading": "patched", "repair": name}, scores, base, LOSS)

    def _readout(self, rows: RowSet, repairs: dict[str, Repair]) -> Iterator[Found]:
        """The loss of a fresh softmax readout of what the model predicts at these rows."""
        rows = rows.keep(rows.target != NONE)
        target, kept = _frequent(rows.target, rows.test, most=self.config.classes)
        lost = int((rows.test & (target == NONE)).sum())
        rows, target = rows.keep(target != NONE), target[target != NONE]
        fit, answers = self._fit_rows(rows, target)
        test, wanted = rows.keep(rows.test), target[rows.test]
        note = f"{kept} classes" + (f"; {lost} test tokens are not among them" if lost else "")
        if kept < 2 or not len(test):
            self._note(f"no readout: {len(fit)} rows with {kept} classes to fit on, {len(test)} to test on")
            return
        base: Scores | None = None
        for name, repair in repairs.items():
            if name == "mean" and base is not None:
                scores = base
            else:
                probe = self._choose(repair(fit.x), answers, fit.key, classes=kept)
                scores = Scores(probe.losses(repair(test.x), wanted).cpu(), test.key)
            base = base or scores
            words = AS_RAW if name == "mean" else note
            variant = {"reading": "readout", "repair": name}
            yield from _with_gain("lm_loss", variant, scores, base, LOSS, note=words, dropped=lost)

    # tasks

    def _token_task(self, name: str, rows: RowSet, label: Tensor, repairs: dict[str, Repair]) -> Iterator[Found]:
        fit, answers = self._fit_rows(rows, label)
        test = rows.keep(rows.test)
        clouds = {r: (repair(fit.x), repair(test.x)) for r, repair in repairs.items()}
        yield from self._task(name, clouds, answers, fit.key, label[rows.test], test.key)

    def _context_task(self, name: str, rows: RowSet, repairs: dict[str, Repair]) -> Iterator[Found]:
        label = self.material.labels(name)
        pool, unit = pooled(rows, self.config.pool, units=len(self.material.units))
        used = label[unit] != NONE
        pool, unit = pool[used.to(pool.device)], unit[used]
        key = self.material.key[unit]
        test = half_of(key).bool()
        clouds = {
            r: (repair(pool[(~test).to(pool.device)]), repair(pool[test.to(pool.device)]))
            for r, repair in repairs.items()
        }
        yield from self._task(name, clouds, label[unit][~test], key[~test], label[unit][test], key[test])

    def _task(
        self,
        name: str,
        clouds: dict[str, tuple[Tensor, Tensor]],
        fit_label: Tensor,
        fit_key: Tensor,
        label: Tensor,
        key: Tensor,
    ) -> Iterator[Found]:
        """Accuracy of the probes on one task, the shuffled control and the most frequent class beside it."""
        present, answers = fit_label.unique(return_inverse=True)
        if len(present) < 2 or len(label) < 2:
            self._note(f"task {name} is left out: its contexts to fit on show {len(present)} classes")
            return
        wanted = torch.full_like(label, -2)  # a class that was never seen is never right
        for number, value in enumerate(present.tolist()):
            wanted[label == value] = number
        most = int(answers.bincount().argmax())
        chance = Scores((wanted == most).double(), key)
        yield "probe_accuracy", {"task": name, "control": "majority"}, chance.estimate(SHARE)
        mixed, mixed_wanted = _mixed(answers, seed=self.config.seed), _mixed(wanted, seed=self.config.seed + 1)
        base: dict[str, Scores] = {}
        kept: tuple[Scores, Scores, str] | None = None
        for repair, (fit, test) in clouds.items():
            if repair == "mean" and kept is not None:
                hits, control, note = kept[0], kept[1], AS_RAW
            else:
                probe = self._choose(fit, answers, fit_key, classes=len(present))
                hits, note = Scores(probe.hits(test, wanted).cpu(), key), f"penalty {probe.penalty:g}"
                other = fit_probe(fit, mixed, classes=len(present), penalty=probe.penalty)
                control = Scores(other.hits(test, mixed_wanted).cpu(), key)
                kept = kept or (hits, control, note)
            where = {"task": name, "repair": repair}
            yield from _with_gain("probe_accuracy", where, hits, base.setdefault("linear", hits), SHARE, note=note)
            yield "probe_accuracy", {**where, "control": "shuffled"}, control.estimate(SHARE)
            yield "probe_selectivity", where, hits.minus(control).estimate(FREE)
            near = Scores(fit_centroids(fit, answers, classes=len(present)).hits(test, wanted).cpu(), key)
            where = {**where, "probe": "cosine"}
            yield from _with_gain("probe_accuracy", where, near, base.setdefault("cosine", near), SHARE)

    def _fit_rows(self, rows: RowSet, label: Tensor) -> tuple[RowSet, Tensor]:
        """Rows to fit on, at most so many, with their labels."""
        fit = rows.keep(~rows.test)
        order = torch.arange(len(rows))[~rows.test]
        marked = RowSet(fit.x, fit.key, order, fit.position, fit.target, fit.special)  # `unit` carries their numbers
        chosen = marked.at_most(self.config.size["rows"], seed=self.config.seed)
        return chosen, label[chosen.unit]

    def _choose(self, x: Tensor, y: Tensor, key: Tensor, *, classes: int) -> LinearProbe:
        held = fold_of(key) >= FOLDS - VALIDATION
        return choose_probe(x, y, held, classes=classes, grid=self.config.penalties)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _patch(model: Any, layout: Layout, site: Site, change: Callable[[Tensor], Tensor], real: Tensor) -> Any:
    return patching(model, layout, site, change, real=real)


def _test_part(piece: Piece) -> Piece:
    """The test contexts of a piece."""
    at = half_of(piece.key).bool().nonzero().squeeze(1)
    size = len(piece.key)
    inputs = {k: v[at] if isinstance(v, Tensor) and v.dim() and len(v) == size else v for k, v in piece.inputs.items()}
    return Piece(inputs, piece.units[at], piece.key[at])


def _with_gain(
    metric: str, variant: dict[str, Any], scores: Scores, base: Scores, bounds: Bounds, **more: Any
) -> Iterator[Found]:
    """The number, and what it is more than that of raw rows, test row by test row."""
    yield metric, variant, scores.estimate(bounds, **more)
    if variant["repair"] != "raw":
        yield metric, {**variant, "against": "raw"}, scores.minus(base).estimate(FREE, **more)


def _frequent(target: Tensor, test: Tensor, *, most: int) -> tuple[Tensor, int]:
    """Targets as classes: the most frequent ones of the fit half, the others NONE; and how many classes."""
    if not bool((~test).any()):
        raise AnisoscopeError("no token is predicted in the contexts to fit on; give more --tokens.")
    values, counts = target[~test].unique(return_counts=True)
    kept = values[(-counts).argsort(stable=True)[:most]]
    out = torch.full_like(target, NONE)
    place = torch.full((int(max(target.max(), kept.max())) + 1,), NONE, dtype=torch.int64)
    place[kept] = torch.arange(len(kept))
    out = place[target]
    return out, len(kept)


def _mixed(label: Tensor, *, seed: int) -> Tensor:
    """The same labels in a random order."""
    return label[torch.randperm(len(label), generator=torch.Generator().manual_seed(seed))]


def _record(site: Site, depth: int, metric: str, variant: dict[str, Any], found: Estimate) -> dict[str, Any]:
    place = {"stack": site.stack, "layer": site.layer, "kind": site.kind, "group": "", "depth": site.layer / depth}
    names = ("value", "low", "high", "sd", "n", "contexts", "dropped", "note")
    numbers = {name: getattr(found, name) for name in names}
    return {
        **place,
        "metric": metric,
        "variant": variant_name(variant),
        **numbers,
        "replicates": list(found.replicates),
    }
