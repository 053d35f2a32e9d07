"""From statistics to an Estimate: the value, its leave-one-fold-out replicates, its interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from anisoscope.errors import TooFewRows
from anisoscope.metrics.attention import rows_used
from anisoscope.metrics.centring import Centred
from anisoscope.metrics.clusters import Clusters
from anisoscope.metrics.estimate import Estimate, jackknife
from anisoscope.metrics.graphs import Graph, batch_masks, sample_graphs
from anisoscope.metrics.metric import Metric
from anisoscope.metrics.neighbourhoods import Neighbours
from anisoscope.numerics.hashing import FOLDS
from anisoscope.numerics.threads import together
from anisoscope.stats.directions import Directions
from anisoscope.stats.means import Attention
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample

NEIGHBOUR_BATCH = 4096
ON_SAMPLE: tuple[Any, ...] = (Clusters, Centred)  # found once on all sampled rows, and kept when folds are left out
_WIDE = 128  # columns from which a spectrum takes longer than handing it to another core


@dataclass
class View:
    """The statistics of one selection of rows, by context fold."""

    folds: list[dict[type, Any]]  # FOLDS of them, empty where a fold saw nothing
    sample: Sample | None = None
    graphs: Callable[[int], list[Graph]] | None = None  # wanted neighbours -> graphs
    without_first: bool = False
    contexts: int = 0
    dropped: int = 0
    _merged: dict[Any, Any] = field(default_factory=dict)
    _parts: list[View] = field(default_factory=list)

    def present(self) -> list[int]:
        """Folds that saw rows."""
        if any(self.folds):
            return [i for i, fold in enumerate(self.folds) if fold]
        return sorted(set(self.sample.fold.tolist())) if self.sample is not None else []

    def stat(self, need: type, *, without: int = -1) -> Any:
        """A statistic over all folds, or all but one."""
        if need is Sample:
            assert self.sample is not None
            return self.sample if without < 0 else self.sample.select(self.sample.fold != without)
        if need in ON_SAMPLE and without >= 0:
            return self.stat(need).without(without)
        key = (need, without)
        if need in ON_SAMPLE and key not in self._merged:
            self._merged[key] = need.of(self.stat(Sample))  # type: ignore[attr-defined]
        if key not in self._merged:
            parts = [fold[need] for i, fold in enumerate(self.folds) if i != without and need in fold]
            merged = reduce(lambda a, b: a.merge(b), parts) if parts else need()
            self._merged[key] = merged.on_host() if hasattr(merged, "on_host") else merged
        return self._merged[key]

    def parts(self) -> list[View]:
        """Views of the moments of consecutive batches of the (shuffled) sample, made once."""
        if not self._parts and self.sample is not None:
            for mask in batch_masks(len(self.sample), NEIGHBOUR_BATCH):
                batch = self.sample.select(mask)
                folds = by_fold(Moments, batch.rows.flatten(1), batch.fold)
                self._parts.append(View(folds, batch, contexts=self.contexts, dropped=self.dropped))
        return self._parts


def evaluate(metric: Metric, view: View, options: dict[str, Any]) -> Estimate:
    """The metric of a view; raises TooFewRows when it cannot be computed."""
    if Neighbours in metric.needs:
        return _evaluate_graphs(metric, view, options)
    if options.get("batches"):
        return _evaluate_batches(metric, view, options)
    if any(not len(s) if isinstance(s, Sample) else not s.n for s in map(view.stat, metric.needs)):
        raise TooFewRows(f"{metric.name} was given no finite row ({view.dropped} were not finite); look at the model")
    folds = view.present()
    if Moments in metric.needs:
        find_spectra([(view, options)])
    value = metric.function(*(view.stat(need) for need in metric.needs), **options)
    replicates = [
        _attempt(metric, [view.stat(need, without=j) for need in metric.needs], options)
        for j in folds
        if len(folds) > 1
    ]
    low, high = jackknife(value, replicates, bounds=metric.bounds)
    lead = view.stat(metric.needs[0])
    seen = len(lead) if isinstance(lead, Sample) else lead.n
    left_out = _left_out(metric, lead, options)
    n, dropped = seen - left_out, view.dropped + left_out
    return Estimate(
        value, low, high, n=n, contexts=view.contexts, dropped=dropped, note=_note(lead), replicates=tuple(replicates)
    )


def _evaluate_batches(metric: Metric, view: View, options: dict[str, Any]) -> Estimate:
    """The mean over the batches of the sample and their standard deviation; the interval stands at the value of all
    rows, and leaving folds out of every batch would cost as many spectra again as there are batches and folds.
    """
    parts = view.parts()
    if not parts:
        raise TooFewRows(f"{metric.name} was given no finite row ({view.dropped} were not finite); look at the model")
    values = [metric.function(*map(part.stat, metric.needs), **options) for part in parts]
    words = [f"mean over {len(parts)} batches", _note(parts[0].stat(metric.needs[0]))]
    return Estimate(
        sum(values) / len(values),
        n=sum(len(part.stat(Sample)) for part in parts),
        sd=_sd(values),
        contexts=view.contexts,
        dropped=view.dropped,
        note="; ".join(filter(None, words)),
    )


def find_spectra(wanted: Iterable[tuple[View, dict[str, Any]]]) -> None:
    """The spectra that metrics of moments will ask for, several at a time; each is kept by its own moments."""
    found: dict[tuple[int, bool], Moments] = {}
    for view, options in wanted:
        centred = options.get("centred", True)
        for part in view.parts() if options.get("batches") else [view]:
            folds = part.present() if part is view else []
            for j in [-1, *folds] if (centred, "spectra") not in part._merged else []:
                moments = part.stat(Moments, without=j)
                if moments.n and moments.width >= _WIDE and moments.mean.device.type == "cpu":
                    found[id(moments), centred] = moments
            part._merged[centred, "spectra"] = True
    together(lambda item: item[1].eigenvalues(centred=item[0][1]), list(found.items()))


def _sd(values: list[float]) -> float:
    """Over batches; none where there is one batch only."""
    return float(torch.tensor(values, dtype=torch.float64).std()) if len(values) > 1 else math.nan


def _attempt(metric: Metric, stats: list[Any], options: dict[str, Any]) -> float:
    try:
        return metric.function(*stats, **options)
    except TooFewRows:
        return math.nan


def _left_out(metric: Metric, lead: Any, options: dict[str, Any]) -> int:
    """Rows that this metric had to leave out beyond those that were not finite."""
    if isinstance(lead, Directions) and lead.zeros is not None and "cosine" in metric.name:
        return int(lead.zeros)
    if isinstance(lead, Attention):
        return lead.n - rows_used(lead, metric.name, options)
    return 0


def _note(lead: Any) -> str:
    if isinstance(lead, Moments) and lead.n <= lead.width:
        return f"{lead.n} rows in {lead.width} dimensions: the spectrum is limited by the rows"
    return ""


def neighbours_read(metric: Metric, options: dict[str, Any]) -> int:
    """How many neighbours the metric reads with these options."""
    chosen = {**metric.options, **options}
    return max(metric.neighbours, chosen.get("largest", 0), chosen.get("k", 0), 2 * chosen.get("scale", 0))


def _evaluate_graphs(metric: Metric, view: View, options: dict[str, Any]) -> Estimate:
    assert view.graphs is not None
    graphs = view.graphs(neighbours_read(metric, options))
    if options.get("per_context") and view.sample is not None:
        graphs = sample_graphs(view.sample.one_per_context(), wanted=neighbours_read(metric, options), batch=None)
    if not graphs:
        raise TooFewRows(f"{metric.name} needs rows, seen none; give more tokens")
    rest = view.without_first
    everyone = [metric.function(g.left(without_first=rest), **options) for g in graphs]
    value = sum(everyone) / len(everyone)
    folds = sorted(set(torch.cat([g.fold for g in graphs]).tolist()))
    replicates = []
    for j in folds if len(folds) > 1 else []:
        try:
            parts = [metric.function(g.left(without_first=rest, fold=j), **options) for g in graphs]
            replicates.append(sum(parts) / len(parts))
        except TooFewRows:
            replicates.append(math.nan)
    shaky = _unstable(value, replicates)
    low, high = (math.nan, math.nan) if shaky else jackknife(value, replicates, bounds=metric.bounds)
    duplicates = sum(g.duplicates(without_first=rest) for g in graphs)
    used = sum(len(g.left(without_first=rest)) for g in graphs)
    said = [f"{duplicates} duplicates removed" if duplicates else "", shaky]
    said += [metric.remark(value, used // len(graphs), options)] if metric.remark is not None else []
    said += [_next_scale(value, graphs, without_first=rest)] if metric.name == "two_nn" else []
    return Estimate(
        value,
        low,
        high,
        n=used,
        sd=_sd(everyone),
        contexts=view.contexts,
        dropped=view.dropped + duplicates,
        note="; ".join(filter(None, said)),
        replicates=tuple(replicates),
    )


def _next_scale(value: float, graphs: list[Graph], *, without_first: bool) -> str:
    """A word of warning where neighbours 2 and 4 tell another dimension than neighbours 1 and 2.

    A near-copy of every tenth row is enough to bring TwoNN from 14 down to 0.2, with a narrow interval.
    """
    from anisoscope.metrics.dimension import gride

    try:
        wider = [gride.function(g.left(without_first=without_first), scale=2) for g in graphs]
    except TooFewRows:
        return ""
    other = sum(wider) / len(wider)
    if 0.5 <= value / other <= 2.0:
        return ""
    return f"the next scale (GRIDE, k = 2) gives {other:.3g}: near-copies or noise decide one of the two"


def _unstable(value: float, replicates: list[float]) -> str:
    """What to say of a value that no set of contexts with one fold left out comes near to; "" where all is well.

    Near-copies of rows do that to TwoNN: once a tenth of the rows have one, their huge r₂/r₁ pass its cut.
    """
    live = [r for r in replicates if math.isfinite(r)]
    if len(live) < 3:
        return ""
    gap = max(min(live) - value, value - max(live))
    if gap <= max(max(live) - min(live), 0.25 * abs(value)):
        return ""
    ends = f"{min(live):.3g} to {max(live):.3g}"
    return f"unstable: leaving out any fold of contexts gives {ends}, so there is no interval; look at gride"


def by_fold(need: type, rows: Tensor, fold: Tensor) -> list[dict[type, Any]]:
    """One statistic of the rows of each fold, where it has any."""
    found: list[dict[type, Any]] = []
    for j in range(FOLDS):
        mine = (fold == j).nonzero().squeeze(1).to(rows.device)
        found.append({need: need().update(rows[mine])} if len(mine) else {})
    return found


def context_cosines(x: Tensor, context: Tensor) -> Tensor:
    """For each context, the mean cosine of its rows with its mean row: [contexts]; zero rows have no cosine."""
    _, inverse = torch.unique(context.to(x.device), return_inverse=True)
    count = int(inverse.max()) + 1
    rows = x.double() if x.device.type != "mps" else x.cpu().double()
    inverse = inverse.to(rows.device)
    sums = torch.zeros(count, rows.shape[1], dtype=torch.float64, device=rows.device).index_add_(0, inverse, rows)
    lengths = torch.linalg.vector_norm(rows, dim=1)
    below = lengths * torch.linalg.vector_norm(sums, dim=1)[inverse]
    cosine = torch.where(below > 0, (rows * sums[inverse]).sum(1) / below, 0.0)
    sizes = torch.bincount(inverse[lengths > 0], minlength=count)  # a context of zero rows is 0/0: NaN, left out
    return torch.zeros(count, dtype=torch.float64, device=rows.device).index_add_(0, inverse, cosine) / sizes
