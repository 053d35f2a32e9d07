"""From statistics to an Estimate: metric declarations, and the evaluation of values and leave-one-fold-out replicates.

`engine.metric` has the decorators that declare a metric, and calls of a metric on an array.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, TooFewRows, unknown_name
from anisoscope.metrics.engine import folds
from anisoscope.metrics.engine.folds import Graph, Neighbours, Part, SampleLines, on_sample, once
from anisoscope.numerics.host import single_steps, together
from anisoscope.numerics.linalg import as_float64, eigenvalues
from anisoscope.results.quantity import as_equal_folds, jackknife
from anisoscope.stats.directions import Keys
from anisoscope.stats.gram import GramMoments
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample

NEIGHBOUR_BATCH = 4096
FEW_CONTEXTS = 32  # below, intervals of values that lean contain the population's value in 75 to 87 of 100 cases
_WIDE = 128  # columns from which a spectrum is worth a thread
Bounds = tuple[float | None, float | None]
Remark = Callable[[float, int, dict[str, Any], list[Neighbours]], str]  # value, rows of one batch, options, graphs


@dataclass(frozen=True)
class Estimate:
    """A value, its 95 % interval over context folds (by `jackknife`), and what it was computed from.

    >>> Estimate(0.5, 0.4, 0.6, n=100)
    Estimate(0.5 [0.4, 0.6], n=100)
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    n: int = 0
    sd: float = math.nan  # over the batches of a batched estimator
    contexts: int = 0
    dropped: int = 0
    note: str = ""
    replicates: tuple[float, ...] = field(default=(), repr=False)  # leave-one-fold-out values

    def __float__(self) -> float:
        return self.value

    def __repr__(self) -> str:
        extra = f", sd={self.sd:.3g}" if not math.isnan(self.sd) else ""
        extra += f", dropped={self.dropped}" if self.dropped else ""
        extra += f", note={self.note!r}" if self.note else ""
        return f"Estimate({self.value:.6g} [{self.low:.4g}, {self.high:.4g}], n={self.n}{extra})"


@dataclass(frozen=True)
class Declaration:
    """A metric: a named function of statistics, or of what a command measures, with its documentation."""

    name: str
    function: Callable[..., Any]
    description: str
    title: str
    formula: str
    reference: str = ""
    convention: str = ""
    invariant: frozenset[str] = frozenset()
    bounds: Bounds = (None, None)
    needs: tuple[type, ...] = ()
    instead: Mapping[tuple[str, Any], tuple[type, ...]] = field(default_factory=dict)  # needs with a value of an option
    sums: frozenset[str] | None = None  # of the costly sums of its statistics those that it reads; None: all
    default: bool = False
    beside: Mapping[str, Any] = field(default_factory=dict)  # options of a variant measured beside it by default
    kinds: frozenset[str] = frozenset()  # kinds of sites where it is measured unless it is requested by name
    options: dict[str, Any] = field(default_factory=dict)
    neighbours: int = 0  # number of nearest neighbours it reads
    remark: Remark | None = None  # text for the note of an estimate, such as its bias
    batch: Callable[..., Tensor] | None = None  # the function for statistics with leading dimensions; NaN if undefined
    left_out: Callable[[Any, dict[str, Any]], Tensor] | None = None  # counts rows of its first statistic it cannot use
    leans: bool = False  # whether few contexts bias it, unless an option takes other statistics instead
    contributions: Callable[[Neighbours, dict[str, Any]], Tensor] | None = None  # of rows to an estimate of neighbours
    measured_by: tuple[str, ...] = ()  # commands that measure it, if it is not a function of statistics

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options with values of the right type; an unknown option is an error that suggests a similar one."""
        for key in options:
            if key not in self.options:
                raise unknown_name(f"option of {self.name}", key, self.options)
        return {key: _cast(value, self.options[key], f"{self.name}:{key}") for key, value in options.items()}

    def given(self, options: dict[str, Any]) -> tuple[type, ...]:
        """The statistics that its function is given with these options."""
        chosen = {**self.options, **options}
        return next((needs for (key, value), needs in self.instead.items() if chosen.get(key) == value), self.needs)

    def reads(self, options: dict[str, Any]) -> tuple[type, ...]:
        """The statistics it needs with these options; with batches, also the sample they are drawn from."""
        needs = self.given(options)
        return (*needs, Sample) if options.get("batches") and Sample not in needs else needs

    def variant(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options that differ from the defaults."""
        return {key: value for key, value in options.items() if value != self.options[key]}

    def refusal(self) -> AnisoscopeError:
        """The error for requesting it of rows or in a profile; it names the commands that measure it."""
        commands = " or ".join(f"`anisoscope {command}`" for command in self.measured_by)
        return AnisoscopeError(f"{self.name} is not a metric of rows; it is measured by {commands}, use that.")


def _cast(value: Any, default: Any, what: str) -> Any:
    """A value converted to the type of the default; values from the command line are strings."""
    kind, whole = type(default), numbers.Integral
    allowed: dict[type, tuple[type, ...]] = {bool: (whole, np.bool_), int: (whole,), float: (numbers.Real,), str: ()}
    try:
        if isinstance(value, str) and kind is bool:
            return {"1": True, "true": True, "0": False, "false": False}[value.lower()]
        if not isinstance(value, (str, *allowed[kind])):
            raise ValueError(value)
        return kind(value)
    except (KeyError, ValueError) as error:
        raise AnisoscopeError(f"{what} is {value!r}; expected a {kind.__name__} such as {default!r}.") from error


@dataclass
class View:
    """The statistics of one selection of rows, by context fold."""

    folds: list[dict[type, Any]]  # by fold: statistics (or lists of their parts) by type; empty if it has no rows
    sample: Sample | None = None
    graphs: Callable[[int], list[Graph]] | None = None  # wanted neighbours -> graphs
    without_first: bool = False
    contexts: int = 0
    sizes: Mapping[int, int] = field(default_factory=dict)  # contexts of each fold; {}: folds of equal size
    dropped: int = 0
    interval: bool = True  # False: no replicates are computed
    _known: dict[Any, Any] = field(default_factory=dict)

    def present(self) -> list[int]:
        """Folds that have rows; [0] if no interval is wanted."""
        if not self.interval:
            return [0]
        if any(self.folds):
            return [i for i, fold in enumerate(self.folds) if fold]
        return sorted(set(self.sample.fold.tolist())) if self.sample is not None else []

    def pieces(self, need: type) -> list[Part]:
        """The (fold, part) pairs of a statistic that have rows."""
        found = [(i, fold.get(need, [])) for i, fold in enumerate(self.folds)]
        return [(i, part) for i, parts in found for part in (parts if isinstance(parts, list) else [parts]) if part.n]

    def lines(self, need: type) -> Any:
        """A statistic with one line for all folds and one without each fold; None if there are no rows."""

        def build() -> Any:
            left_out = self.present() if len(self.present()) > 1 else []
            if issubclass(need, SampleLines):
                return self.stat(need).without(-1, *left_out)
            pieces = self.pieces(need)
            return folds.stack_lines(pieces, left_out) if pieces else None

        return once(self._known, (need, "lines"), build)

    def stat(self, need: type, *, without: int = -1) -> Any:
        """A statistic over all folds, or over all but one."""
        if need is Sample:
            assert self.sample is not None
            return self.sample if without < 0 else self.sample.select(self.sample.fold != without)
        if issubclass(need, SampleLines):
            return once(self._known, need, lambda: need.of(self.stat(Sample)))

        def build() -> Any:
            lines, place = self.lines(need), [-1, *self.present()].index(without)
            return folds.line_of(lines, place) if lines is not None and lines.n.flatten()[place] > 0 else need()

        return once(self._known, (need, without), build)

    def let_go(self, need: type) -> None:
        """Forget the parts of a statistic, once its lines are known: with one matrix for each fold they are large."""
        if (need, "lines") in self._known:
            self.folds = [{**fold, need: []} if need in fold else fold for fold in self.folds]

    def parts(self) -> list[View]:
        """Views of the moments of consecutive batches of the (shuffled) sample, without folds; cached."""

        def build() -> list[View]:
            batches = folds.sample_batches(self.sample, NEIGHBOUR_BATCH) if self.sample is not None else []
            return [View([{Moments: Moments().update(batch.rows.flatten(1))}], batch) for batch in batches]

        return once(self._known, "parts", build)


def evaluate(metric: Declaration, view: View, options: dict[str, Any]) -> Estimate:
    """The metric of a view; raises TooFewRows when it cannot be computed."""
    if Neighbours in metric.needs:
        with single_steps():
            return _evaluate_graphs(metric, view, options)
    if options.get("batches"):
        return _evaluate_batches(metric, view, options)
    if _is_empty(metric, view, options):
        raise _no_rows(metric, view)
    values, lead = _all_lines(metric, view, options), view.stat(metric.given(options)[0])
    left_out = 0 if metric.left_out is None else int(metric.left_out(lead, options))
    seen = len(lead) if isinstance(lead, Sample) else lead.n
    note = _join(_note(lead), _few(metric, view, options))
    return _estimate(view, values, bounds=metric.bounds, n=seen - left_out, left_out=left_out, note=note)


def _is_empty(metric: Declaration, view: View, options: dict[str, Any]) -> bool:
    return any(not len(s) if isinstance(s, Sample) else not s.n for s in map(view.stat, metric.given(options)))


def _no_rows(metric: Declaration, view: View) -> TooFewRows:
    return TooFewRows(
        f"{metric.name} was given no finite row ({view.dropped} were not finite, or beyond 1e±60); look at them"
    )


def _all_lines(metric: Declaration, view: View, options: dict[str, Any]) -> list[float]:
    """The value, and the replicate without each fold if there are several folds."""
    needs = metric.given(options)
    if metric.batch is not None:
        find_spectra([(view, {**options, "batches": False})] if Moments in needs else [])
        found: list[float] = metric.batch(*map(view.lines, needs), **options).tolist()
        if math.isnan(found[0]):
            metric.function(*map(view.stat, needs), **options)  # raises the error that explains the NaN
        return found
    present = view.present()
    found = [metric.function(*map(view.stat, needs), **options)]
    for j in present if len(present) > 1 else []:
        try:
            found.append(metric.function(*(view.stat(need, without=j) for need in needs), **options))
        except TooFewRows:
            found.append(math.nan)
    return found


def by_head(metric: Declaration, options: dict[str, Any]) -> bool:
    """Whether all heads of a site can be evaluated in one batch."""
    return metric.batch is not None and not options.get("batches") and not any(map(on_sample, metric.given(options)))


def evaluate_heads(
    metric: Declaration, view: View, options: dict[str, Any], *, heads: int, share: int = 1
) -> list[Estimate]:
    """An estimate for each head, or NaN with a note that says why; `share` query heads share one key head."""
    assert metric.batch is not None
    if _is_empty(metric, view, options):
        return [missing_estimate(view, _no_rows(metric, view))] * heads
    needs = metric.given(options)
    shares = [share if need is Keys else 1 for need in needs]
    stats = [_spread(view.lines(need), times) for need, times in zip(needs, shares, strict=True)]
    values = metric.batch(*stats, **options).T.tolist()
    whole = [view.stat(need) for need in needs]
    left_out = torch.zeros(()) if metric.left_out is None else metric.left_out(whole[0], options)
    found = []
    about: dict[str, Any] = {"bounds": metric.bounds, "note": _join(_note(whole[0]), _few(metric, view, options))}
    for head, (lines, gone) in enumerate(zip(values, map(int, left_out.expand(heads).tolist()), strict=True)):
        try:
            if math.isnan(lines[0]):
                of_head = [stat.head(head // times) for stat, times in zip(whole, shares, strict=True)]
                metric.function(*of_head, **options)  # raises the error that explains the NaN
            found.append(_estimate(view, lines, n=whole[0].n - gone, left_out=gone, **about))
        except TooFewRows as error:
            found.append(missing_estimate(view, error))
    return found


def _spread(lines: Any, times: int) -> Any:
    """The same statistic with every head (the second dimension) repeated."""
    if times == 1:
        return lines
    return replace(lines, **{name: value.repeat_interleave(times, 1) for name, value in lines.tensors().items()})


def missing_estimate(view: View, error: TooFewRows) -> Estimate:
    """A NaN estimate with the error as its note."""
    return _estimate(view, [math.nan], bounds=None, left_out=0, note=str(error))


def _estimate(
    view: View,
    values: list[float],
    *,
    bounds: Bounds | None,
    left_out: int,
    folds: Sequence[int] | None = None,
    **about: Any,
) -> Estimate:
    """The estimate from a value and what is left without each fold (no interval if `bounds` is None).

    `left_out` rows were not used; `folds` are those left out, if they are not those of the view.
    """
    value, *replicates = values
    if math.isinf(value):
        raise TooFewRows("the value is infinite for these rows; look at them, or rescale them")
    folds = view.present() if folds is None else folds
    if view.sizes and len(folds) == len(replicates):
        replicates = as_equal_folds(value, replicates, [view.sizes.get(fold, 0) for fold in folds])
    low, high = (math.nan, math.nan) if bounds is None else jackknife(value, replicates, bounds=bounds)
    about |= {"contexts": view.contexts, "dropped": view.dropped + left_out}
    return Estimate(value, low, high, replicates=tuple(replicates), **about)


def _note(lead: Any) -> str:
    if isinstance(lead, Moments) and lead.n <= lead.width:
        return f"{lead.n} rows in {lead.width} dimensions: the spectrum is limited by the rows"
    return ""


def _few(metric: Declaration, view: View, options: dict[str, Any]) -> str:
    """A warning where contexts are so few that what their rows share biases the value."""
    if not metric.leans or metric.given(options) != metric.needs or not 1 < view.contexts < FEW_CONTEXTS:
        return ""
    words = f"only {view.contexts} contexts: biased by what their rows share"
    return words + "".join(f", {key}={int(v) if v is True else v} is not" for key, v in metric.beside.items())


def _join(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def _evaluate_batches(metric: Declaration, view: View, options: dict[str, Any]) -> Estimate:
    """The mean over the batches of the sample and their standard deviation.

    No interval: leaving folds out of every batch would cost batches × folds more spectra.
    """
    parts = view.parts()
    if not parts:
        raise _no_rows(metric, view)
    find_spectra([(view, options)] if Moments in metric.needs else [])
    values = [_all_lines(metric, part, options)[0] for part in parts]
    about = _note(parts[0].stat(metric.needs[0]))
    note = _join(f"mean over {len(parts)} batches", about, _few(metric, view, options))
    n, mean = sum(len(part.stat(Sample)) for part in parts), sum(values) / len(values)
    return _estimate(view, [mean], bounds=None, n=n, left_out=0, sd=_sd(values), note=note)


def find_spectra(wanted: Iterable[tuple[View, dict[str, Any]]]) -> None:
    """Compute the spectra that metrics of moments will need, in parallel, and cache them in the moments."""
    found: dict[tuple[int, bool], Moments] = {}
    for view, options in wanted:
        centred = options.get("centred", True)
        for part in view.parts() if options.get("batches") else [view]:
            lines = part.lines(Moments)
            part.let_go(Moments)
            if isinstance(lines, GramMoments):
                lines.eigenvalues(centred=centred)
            elif lines is not None and centred not in lines.spectra and lines.width >= _WIDE:
                found[id(lines), centred] = lines
    hosted = [(centred, lines) for (_, centred), lines in found.items() if lines.mean.device.type == "cpu"]
    spared = [pair for pair in hosted if pair[1].spares_spectra(centred=pair[0])]
    with single_steps():  # of one array: its folds side by side, not each small operation on all cores
        together(lambda pair: pair[1].spectrum(centred=pair[0]), spared)
    hosted = [pair for pair in hosted if pair not in spared]
    matrices = [matrix for centred, lines in hosted for matrix in lines.matrix(centred=centred)]
    values = iter(together(eigenvalues, matrices))
    for centred, lines in hosted:
        lines.spectra[centred] = torch.stack([next(values) for _ in lines.mean])


def _sd(values: list[float]) -> float:
    """The standard deviation over batches; NaN with fewer than two."""
    return float(torch.tensor(values, dtype=torch.float64).std()) if len(values) > 1 else math.nan


def neighbours_read(metric: Declaration, options: dict[str, Any]) -> int:
    """The number of neighbours that the metric reads with these options."""
    chosen = {**metric.options, **options}
    return max(metric.neighbours, chosen.get("largest", 0), chosen.get("k", 0), 2 * chosen.get("scale", 0))


def _evaluate_graphs(metric: Declaration, view: View, options: dict[str, Any]) -> Estimate:
    assert view.graphs is not None
    read, rest = neighbours_read(metric, options), view.without_first
    graphs = view.graphs(read)
    if options.get("per_context") and view.sample is not None:
        graphs = folds.sample_graphs(view.sample.one_per_context(), wanted=read, batch=None)
    if not graphs:
        raise TooFewRows(f"{metric.name} needs rows, seen none; give more tokens")
    present = torch.cat([g.fold for g in graphs]).unique().tolist() if view.interval else []
    present = present if len(present) > 1 else []
    assert metric.batch is not None
    lines = [g.lines(without_first=rest, folds=[-1, *present]) for g in graphs]
    found = [metric.batch(part, **options).tolist() for part in lines]
    whole = [g.left(without_first=rest) for g in graphs]
    for graph, values in zip(whole, found, strict=True):
        if math.isnan(values[0]):
            metric.function(graph, **options)  # raises the error that explains the NaN
    value, *left = [sum(line) / len(line) for line in zip(*found, strict=True)]
    if left and metric.contributions is not None:
        parts = [_contributions(metric, options, graph, of) for graph, of in zip(whole, graphs, strict=True)]
        wider = folds.widening([(psi, contexts, index[:, :read]) for psi, contexts, index in parts])
        left = [value + wider * (replicate - value) for replicate in left]
    used, duplicates = map(sum, zip(*(g.rows(without_first=rest) for g in graphs), strict=True))
    notes = [f"{duplicates} duplicates removed" if duplicates else "", _wide(read, used, view) if left else ""]
    if metric.remark is not None:
        notes.append(metric.remark(value, used // len(graphs), options, whole))
    about: dict[str, Any] = {"note": _join(*notes), "sd": _sd([value for value, *_ in found])}
    return _estimate(view, [value, *left], bounds=metric.bounds, folds=present, n=used, left_out=duplicates, **about)


def _wide(read: int, rows: int, view: View) -> str:
    """A warning where an estimate reads more neighbours than a context has rows: whole contexts then depend on others.

    What intervals contain in such cases is simulated in docs/intervals.md.
    """
    per = rows / max(1, view.contexts)
    if per < 2 or read <= per:  # rows that are a context each depend on no siblings
        return ""
    return f"reads {read} neighbours, and a context has {per:.3g} rows: its interval may hold .86 to .99, not .95"


def _contributions(
    metric: Declaration, options: dict[str, Any], graph: Neighbours, of: Graph
) -> tuple[Tensor, Tensor, Tensor]:
    """What each distinct row of a batch contributes, its context, and its neighbours, on the host."""
    assert metric.contributions is not None
    return metric.contributions(graph, options).cpu(), of.contexts(), graph.index.cpu()


def context_cosines(x: Tensor, context: Tensor) -> Tensor:
    """For each context, the mean cosine of its rows with its mean row: [contexts]; zero rows have no cosine."""
    _, inverse = torch.unique(context.to(x.device), return_inverse=True)
    count = int(inverse.max()) + 1
    rows = as_float64(x)
    inverse = inverse.to(rows.device)
    sums = torch.zeros(count, rows.shape[1], dtype=torch.float64, device=rows.device).index_add_(0, inverse, rows)
    lengths = torch.linalg.vector_norm(rows, dim=1)
    below = lengths * torch.linalg.vector_norm(sums, dim=1)[inverse]
    cosine = torch.where(below > 0, (rows * sums[inverse]).sum(1) / below, 0.0)
    sizes = torch.bincount(inverse[lengths > 0], minlength=count)  # a context of zero rows only gives 0/0 = NaN
    return torch.zeros(count, dtype=torch.float64, device=rows.device).index_add_(0, inverse, cosine) / sizes
