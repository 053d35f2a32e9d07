"""From statistics to an Estimate: the value, its leave-one-fold-out replicates, its interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anisoscope.errors import TooFewRows
from anisoscope.metrics.engine.centring import Centred
from anisoscope.metrics.engine.clusters import Clusters
from anisoscope.metrics.engine.declaration import Declaration
from anisoscope.metrics.engine.estimate import Estimate
from anisoscope.metrics.engine.lines import MomentLines, Part, line_of, stack_lines, tensors_of
from anisoscope.metrics.engine.neighbourhoods import Graph, Neighbours, batches, sample_graphs
from anisoscope.numerics.host import together
from anisoscope.numerics.linalg import eigenvalues
from anisoscope.results.quantity import jackknife
from anisoscope.stats.directions import Keys
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample

NEIGHBOUR_BATCH = 4096
ON_SAMPLE: tuple[Any, ...] = (Clusters, Centred)  # found once on all sampled rows, and kept when folds are left out
_STARVED = 0.2  # of the rows, that may lack neighbours when a fold is left out
_WIDE = 128  # columns from which a spectrum takes longer than handing it to another core


@dataclass
class View:
    """The statistics of one selection of rows, by context fold."""

    folds: list[dict[type, Any]]  # FOLDS of them, empty where a fold saw nothing; a statistic or a list of its parts
    sample: Sample | None = None
    graphs: Callable[[int], list[Graph]] | None = None  # wanted neighbours -> graphs
    without_first: bool = False
    contexts: int = 0
    dropped: int = 0
    interval: bool = True  # else no fold is left out
    _merged: dict[Any, Any] = field(default_factory=dict)
    _parts: list[View] = field(default_factory=list)

    def present(self) -> list[int]:
        """Folds that saw rows; one that stands for all where there is no interval."""
        if not self.interval:
            return [0]
        if any(self.folds):
            return [i for i, fold in enumerate(self.folds) if fold]
        return sorted(set(self.sample.fold.tolist())) if self.sample is not None else []

    def pieces(self, need: type) -> list[Part]:
        """A statistic's parts that saw rows, with their folds."""
        found = [(i, fold.get(need, [])) for i, fold in enumerate(self.folds)]
        return [(i, part) for i, parts in found for part in (parts if isinstance(parts, list) else [parts]) if part.n]

    def lines(self, need: type) -> Any:
        """A statistic over all folds, and over all folds but each that is present, as one; None where nothing is."""
        if (need, "lines") not in self._merged:
            folds = self.present() if len(self.present()) > 1 else []
            if need in ON_SAMPLE:
                found = self.stat(need).without(-1, *folds)
            else:
                pieces = self.pieces(need)
                found = stack_lines(pieces, folds) if pieces else None
            self._merged[need, "lines"] = found
        return self._merged[need, "lines"]

    def stat(self, need: type, *, without: int = -1) -> Any:
        """A statistic over all folds, or all but one."""
        if need is Sample:
            assert self.sample is not None
            return self.sample if without < 0 else self.sample.select(self.sample.fold != without)
        if need in ON_SAMPLE and without >= 0:
            return self.stat(need).without(without)
        key = (need, without)
        if key not in self._merged:
            self._merged[key] = need.of(self.stat(Sample)) if need in ON_SAMPLE else self._line(*key)  # type: ignore[attr-defined]
        return self._merged[key]

    def _line(self, need: type, without: int) -> Any:
        lines = self.lines(need)
        place = [-1, *self.present()].index(without)
        return line_of(lines, place) if lines is not None and lines.n.flatten()[place] > 0 else need()

    def parts(self) -> list[View]:
        """Views of the moments of consecutive batches of the (shuffled) sample, made once; they have no folds."""
        if not self._parts and self.sample is not None:
            for batch in batches(self.sample, NEIGHBOUR_BATCH):
                moments = Moments().update(batch.rows.flatten(1))
                self._parts.append(View([{Moments: moments}], batch, contexts=self.contexts, dropped=self.dropped))
        return self._parts


def evaluate(metric: Declaration, view: View, options: dict[str, Any]) -> Estimate:
    """The metric of a view; raises TooFewRows when it cannot be computed."""
    if Neighbours in metric.needs:
        return _evaluate_graphs(metric, view, options)
    if options.get("batches"):
        return _evaluate_batches(metric, view, options)
    _refuse_nothing(metric, view)
    value, *replicates = _all_lines(metric, view, options)
    lead = view.stat(metric.needs[0])
    return _estimate(
        metric,
        view,
        value,
        replicates,
        seen=len(lead) if isinstance(lead, Sample) else lead.n,
        left_out=int(_left_out(metric, lead, options)),
        note=_note(lead),
    )


def _all_lines(metric: Declaration, view: View, options: dict[str, Any]) -> list[float]:
    """The value, and the values without each fold where there are several."""
    if metric.batch is not None:
        find_spectra([(view, {**options, "batches": False})] if Moments in metric.needs else [])
        found: list[float] = metric.batch(*map(view.lines, metric.needs), **options).tolist()
        if math.isnan(found[0]):
            metric.function(*map(view.stat, metric.needs), **options)  # says why
        return found
    folds = view.present()
    value = metric.function(*map(view.stat, metric.needs), **options)
    rest = [[view.stat(need, without=j) for need in metric.needs] for j in folds if len(folds) > 1]
    return [value, *(_attempt(metric, stats, options) for stats in rest)]


def by_head(metric: Declaration, options: dict[str, Any]) -> bool:
    """Whether all heads of a site can be evaluated in one go."""
    return (
        metric.batch is not None
        and not options.get("batches")
        and not {Sample, Neighbours, *ON_SAMPLE} & set(metric.needs)
    )


def evaluate_heads(
    metric: Declaration, view: View, options: dict[str, Any], *, heads: int, share: int = 1
) -> list[Estimate]:
    """One estimate for each head, in one go; `share` query heads have one key. A missing one's note says why."""
    assert metric.batch is not None
    try:
        _refuse_nothing(metric, view)
    except TooFewRows as error:
        return [missing(view, error)] * heads
    shares = [share if need is Keys else 1 for need in metric.needs]
    stats = [_spread(view.lines(need), times) for need, times in zip(metric.needs, shares, strict=True)]
    values = metric.batch(*stats, **options).T.tolist()
    whole = [view.stat(need) for need in metric.needs]
    left_out = _left_out(metric, whole[0], options).expand(heads).tolist()
    found = []
    for head, (value, *replicates) in enumerate(values):
        try:
            if math.isnan(value):
                metric.function(
                    *(stat.head(head // times) for stat, times in zip(whole, shares, strict=True)), **options
                )
            gone, note = int(left_out[head]), _note(whole[0])
            found.append(_estimate(metric, view, value, replicates, seen=whole[0].n, left_out=gone, note=note))
        except TooFewRows as error:
            found.append(missing(view, error))
    return found


def _spread(lines: Any, times: int) -> Any:
    """The same statistic with every head (the second dimension) there several times."""
    if times == 1:
        return lines
    values = {name: value.repeat_interleave(times, 1) for name, value in tensors_of(lines).items()}
    return type(lines)(n=lines.n, **values)


def missing(view: View, error: TooFewRows) -> Estimate:
    """A missing value whose note says why."""
    return Estimate(math.nan, n=0, contexts=view.contexts, dropped=view.dropped, note=str(error))


def _refuse_nothing(metric: Declaration, view: View) -> None:
    if any(not len(s) if isinstance(s, Sample) else not s.n for s in map(view.stat, metric.needs)):
        raise TooFewRows(f"{metric.name} was given no finite row ({view.dropped} were not finite); look at the model")


def _estimate(
    metric: Declaration, view: View, value: float, replicates: list[float], *, seen: int, left_out: int, note: str
) -> Estimate:
    low, high = jackknife(value, replicates, bounds=metric.bounds)
    words: dict[str, Any] = {"contexts": view.contexts, "dropped": view.dropped + left_out, "note": note}
    return Estimate(value, low, high, n=seen - left_out, **words, replicates=tuple(replicates))


def _evaluate_batches(metric: Declaration, view: View, options: dict[str, Any]) -> Estimate:
    """The mean over the batches of the sample and their standard deviation; the interval stands at the value of all
    rows, and leaving folds out of every batch would cost as many spectra again as there are batches and folds.
    """
    parts = view.parts()
    if not parts:
        raise TooFewRows(f"{metric.name} was given no finite row ({view.dropped} were not finite); look at the model")
    find_spectra([(view, options)] if Moments in metric.needs else [])
    values = [_all_lines(metric, part, options)[0] for part in parts]
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
    found: dict[tuple[int, bool], MomentLines] = {}
    for view, options in wanted:
        centred = options.get("centred", True)
        for part in view.parts() if options.get("batches") else [view]:
            lines = part.lines(Moments)
            if lines is not None and centred not in lines.spectra and lines.width >= _WIDE:
                found[id(lines), centred] = lines
    hosted = [(centred, lines) for (_, centred), lines in found.items() if lines.mean.device.type == "cpu"]
    matrices = [matrix for centred, lines in hosted for matrix in lines.matrix(centred=centred)]
    values = iter(together(eigenvalues, matrices))
    for centred, lines in hosted:
        lines.spectra[centred] = torch.stack([next(values) for _ in lines.mean])


def _sd(values: list[float]) -> float:
    """Over batches; none where there is one batch only."""
    return float(torch.tensor(values, dtype=torch.float64).std()) if len(values) > 1 else math.nan


def _attempt(metric: Declaration, stats: list[Any], options: dict[str, Any]) -> float:
    try:
        return metric.function(*stats, **options)
    except TooFewRows:
        return math.nan


def _left_out(metric: Declaration, lead: Any, options: dict[str, Any]) -> Tensor:
    """Rows that this metric had to leave out beyond those that were not finite, by head where there are heads."""
    return torch.zeros(()) if metric.left_out is None else metric.left_out(lead, options)


def _note(lead: Any) -> str:
    if isinstance(lead, Moments) and lead.n <= lead.width:
        return f"{lead.n} rows in {lead.width} dimensions: the spectrum is limited by the rows"
    return ""


def neighbours_read(metric: Declaration, options: dict[str, Any]) -> int:
    """How many neighbours the metric reads with these options."""
    chosen = {**metric.options, **options}
    return max(metric.neighbours, chosen.get("largest", 0), chosen.get("k", 0), 2 * chosen.get("scale", 0))


def _evaluate_graphs(metric: Declaration, view: View, options: dict[str, Any]) -> Estimate:
    assert view.graphs is not None
    graphs = view.graphs(neighbours_read(metric, options))
    if options.get("per_context") and view.sample is not None:
        graphs = sample_graphs(view.sample.one_per_context(), wanted=neighbours_read(metric, options), batch=None)
    if not graphs:
        raise TooFewRows(f"{metric.name} needs rows, seen none; give more tokens")
    rest = view.without_first
    folds = torch.cat([g.fold for g in graphs]).unique().tolist() if view.interval else []
    found = [_graph_lines(metric, g, options, rest, [-1, *(folds if len(folds) > 1 else [])]) for g in graphs]
    everyone = [value for value, *_ in found]
    value, *replicates = (sum(line) / len(line) for line in zip(*found, strict=True))
    shaky = _unstable(value, replicates) or _starved(metric, graphs, options, rest, folds)
    low, high = (math.nan, math.nan) if shaky else jackknife(value, replicates, bounds=metric.bounds)
    used, duplicates = map(sum, zip(*(g.rows(without_first=rest) for g in graphs), strict=True))
    said = [f"{duplicates} duplicates removed" if duplicates else "", shaky]
    if metric.remark is not None:
        said.append(metric.remark(value, used // len(graphs), options, [g.left(without_first=rest) for g in graphs]))
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


def _graph_lines(
    metric: Declaration, graph: Graph, options: dict[str, Any], without_first: bool, folds: list[int]
) -> list[float]:
    """The metric of one graph without each of these folds, of which the first is −1; NaN where there is too little."""
    assert metric.batch is not None
    lines = graph.lines(without_first=without_first, folds=folds)
    values: list[float] = torch.cat([metric.batch(part, **options) for part in lines]).tolist()
    if math.isnan(values[0]):
        metric.function(graph.left(without_first=without_first), **options)  # says why
    return values


def _starved(metric: Declaration, graphs: list[Graph], options: dict[str, Any], rest: bool, folds: list[int]) -> str:
    """What to say where leaving out a fold, a very large one, leaves many rows without the neighbours they need.

    A graph holds a few neighbours to spare, which is enough for folds of about the same size.
    """
    most = 0.0
    for graph in graphs if len(folds) > 1 else []:
        for part in graph.lines(without_first=rest, folds=[-1, *folds]):
            _, enough = part.near(neighbours_read(metric, options))
            there = torch.ones_like(enough) if part.there is None else part.there
            most = max(most, float(((there & ~enough).sum(-1) / there.sum(-1).clamp_min(1)).max()))
    if most <= _STARVED:
        return ""
    return (
        f"no interval: without one fold of contexts {most:.0%} of the rows lack neighbours; give contexts of like size"
    )


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
