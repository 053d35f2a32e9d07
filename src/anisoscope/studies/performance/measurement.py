"""One model: at every site the geometry of raw and repaired rows, and what can be done with them.

Everything that is fitted (repairs, readouts, probes) is fitted on the fit half of the contexts; every number in the
table is about the test half.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from anisoscope.capture.gradients.loss import LabelConvention
from anisoscope.capture.sites.layout import Layout, find_layout
from anisoscope.capture.sites.site import Site
from anisoscope.data.tasks import NONE
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.catalogue import registry
from anisoscope.metrics.engine.estimate import Estimate
from anisoscope.metrics.engine.metric import Metric
from anisoscope.models.tokenizer import special_ids
from anisoscope.numerics.hashing import FOLDS, fold_of, half_of
from anisoscope.numerics.linear_probes import LinearProbe, choose_probe, fit_centroids, fit_probe
from anisoscope.numerics.repairs import Repair, fit_repairs
from anisoscope.results.quantity import jackknife
from anisoscope.results.schema import variant_name
from anisoscope.studies.performance.config import PerformanceConfig
from anisoscope.studies.performance.rows import (
    VALIDATION,
    Material,
    RowSet,
    TextPiece,
    collect_rows,
    patching,
    pooled,
    read_reading,
    token_losses,
)

# Scores of rows, with intervals over context folds: a loss or a hit for every test row.
#
# The interval leaves out one fold of test contexts at a time. It says how far another sample of test contexts might
# have moved the number; the repair and the probe stay as they were fitted, so their own chance is not in it.


Bounds = tuple[float | None, float | None]
SHARE: Bounds = (0.0, 1.0)
LOSS: Bounds = (0.0, None)
FREE: Bounds = (None, None)


@dataclass(frozen=True, eq=False)
class ProbeScores:
    """One number for each test row, and the context each belongs to."""

    value: Tensor  # [n] float64, on the host
    key: Tensor  # [n]

    def estimate(self, bounds: Bounds, *, note: str = "", dropped: int = 0) -> Estimate:
        """The mean over rows; replicates in the order of the folds, NaN for a fold without contexts.

        >>> ProbeScores(torch.ones(100), torch.arange(100)).estimate((0.0, 1.0)).value
        1.0
        """
        n, fold = len(self.value), fold_of(self.key)
        if not n:
            return Estimate(math.nan, note="no test row", dropped=dropped)
        sums = torch.zeros(FOLDS, dtype=torch.float64).index_add_(0, fold, self.value.double())
        counts = torch.bincount(fold, minlength=FOLDS).double()
        total, size = float(sums.sum()), float(counts.sum())
        left = [
            float((total - s) / (size - c)) if c and size > c else math.nan
            for s, c in zip(sums.tolist(), counts.tolist(), strict=True)
        ]
        low, high = jackknife(total / size, left, bounds=bounds)
        found = int(self.key.unique().numel())
        return Estimate(
            total / size, low, high, n=n, contexts=found, note=note, dropped=dropped, replicates=tuple(left)
        )

    def minus(self, other: ProbeScores) -> ProbeScores:
        """Row by row: both must score the same rows."""
        return ProbeScores(self.value - other.value, self.key)


def metric_estimate(metric: Metric, x: Tensor, key: Tensor, *, seed: int = 0) -> Estimate:
    """A geometry metric of rows, its replicates in the order of the folds."""
    from dataclasses import replace

    from anisoscope.errors import AnisoscopeError

    try:
        found = metric(x, contexts=key, seed=seed)
    except AnisoscopeError as error:  # too few distinct rows, say: a row without a number and with the reason
        return Estimate(math.nan, n=len(x), contexts=int(key.unique().numel()), note=str(error))
    present = sorted(set(fold_of(key).tolist()))
    return replace(found, replicates=aligned(found.replicates, present))


def aligned(replicates: Sequence[float], folds: Sequence[int]) -> tuple[float, ...]:
    """Leave-one-out values of the folds that are there, at the places of all folds.

    >>> aligned([1.0, 2.0], [0, 3])[:4]
    (1.0, nan, nan, 2.0)
    """
    out = [math.nan] * FOLDS
    if len(replicates) == len(folds):
        for fold, value in zip(folds, replicates, strict=True):
            out[fold] = value
    return tuple(out)


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
    def reading(self) -> LabelConvention:
        return read_reading(self.loaded.model, self.material.asked)

    @cached_property
    def tested(self) -> list[TextPiece]:
        """The test contexts of the loss."""
        return [piece for piece in map(_test_part, self.material.asked) if len(piece.key)]

    @cached_property
    def own(self) -> ProbeScores:
        """The model's own loss, nothing replaced."""
        return ProbeScores(*token_losses(self.loaded.model, self.tested, reading=self.reading))

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
                scores = ProbeScores(*token_losses(model, self.tested, reading=self.reading, patch=patch))
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
        base: ProbeScores | None = None
        for name, repair in repairs.items():
            if name == "mean" and base is not None:
                scores = base
            else:
                probe = self._choose(repair(fit.x), answers, fit.key, classes=kept)
                scores = ProbeScores(probe.losses(repair(test.x), wanted).cpu(), test.key)
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
        chance = ProbeScores((wanted == most).double(), key)
        yield "probe_accuracy", {"task": name, "control": "majority"}, chance.estimate(SHARE)
        mixed, mixed_wanted = _mixed(answers, seed=self.config.seed), _mixed(wanted, seed=self.config.seed + 1)
        base: dict[str, ProbeScores] = {}
        kept: tuple[ProbeScores, ProbeScores, str] | None = None
        for repair, (fit, test) in clouds.items():
            if repair == "mean" and kept is not None:
                hits, control, note = kept[0], kept[1], AS_RAW
            else:
                probe = self._choose(fit, answers, fit_key, classes=len(present))
                hits, note = ProbeScores(probe.hits(test, wanted).cpu(), key), f"penalty {probe.penalty:g}"
                other = fit_probe(fit, mixed, classes=len(present), penalty=probe.penalty)
                control = ProbeScores(other.hits(test, mixed_wanted).cpu(), key)
                kept = kept or (hits, control, note)
            where = {"task": name, "repair": repair}
            yield from _with_gain("probe_accuracy", where, hits, base.setdefault("linear", hits), SHARE, note=note)
            yield "probe_accuracy", {**where, "control": "shuffled"}, control.estimate(SHARE)
            yield "probe_selectivity", where, hits.minus(control).estimate(FREE)
            near = ProbeScores(fit_centroids(fit, answers, classes=len(present)).hits(test, wanted).cpu(), key)
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


def _test_part(piece: TextPiece) -> TextPiece:
    """The test contexts of a piece."""
    at = half_of(piece.key).bool().nonzero().squeeze(1)
    size = len(piece.key)
    inputs = {k: v[at] if isinstance(v, Tensor) and v.dim() and len(v) == size else v for k, v in piece.inputs.items()}
    return TextPiece(inputs, piece.units[at], piece.key[at])


def _with_gain(
    metric: str, variant: dict[str, Any], scores: ProbeScores, base: ProbeScores, bounds: Bounds, **more: Any
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
