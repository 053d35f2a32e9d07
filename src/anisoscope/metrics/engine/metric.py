"""Decorators that declare metrics, and calling a metric on an n×d array to get an Estimate.

`@metric` declares a pure function of statistics, which a profile evaluates and which can be called on arrays;
`@measured` declares a function of something else (a subspace and gradients, a training log) that a command computes.
Either takes one line in tests/support (known_answers.py, known_measured.py); the command line, the documentation, the
report and the contract tests read the declaration.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pickle import PicklingError
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, TooFewRows, named_type
from anisoscope.metrics.engine import estimation
from anisoscope.metrics.engine.estimation import Declaration, Estimate, View, evaluate
from anisoscope.metrics.engine.folds import Graph, Neighbours, on_sample, sample_graphs
from anisoscope.numerics.factors import as_floats
from anisoscope.numerics.hashing import FOLDS, fold_of
from anisoscope.numerics.host import cores, each_on_host, room, single_steps
from anisoscope.stats.directions import Coherence, ContextPairs, Coordinates, Directions, Sums
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample

REGISTRY: dict[str, Metric] = {}
"""What has been declared so far; `metrics.catalogue.registry` holds everything."""
_WIDE = 2048  # columns from which several threads make a single spectrum faster
_INNER = frozenset({"attn_in", "attn_out", "mlp_in", "mlp_out"})
STREAM_KINDS = frozenset({"embed", "resid", "stage", "stage_mean", "cls", "final", "module", "rows"}) | _INNER
GREATEST = 1e60  # of numbers whose fourth powers do not overflow float64
WEIGHT_KINDS = frozenset({"unembed", "embed_weight"})
HEAD_KINDS = frozenset({"query", "key", "query_unrotated", "key_unrotated", "cross_query", "cross_key"})
_BY_FOLD = {
    Moments,
    Directions,
    Coordinates,
    ContextPairs,
    Coherence,
}  # statistics of plain rows that are computed by fold
FiniteRows = tuple[Tensor, Tensor, Tensor, int]  # rows, their contexts and tokens, and the number of rows dropped
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Metric(Declaration):
    """A declared metric; call it on an n×d array to get an Estimate."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process finds it where it was declared."""
        home = (self.batch or self.function).__module__
        if home == "__main__":
            raise PicklingError(f"the metric {self.name} is declared in the script itself")
        return _declared, (home, self.name)

    @torch.inference_mode(False)  # threads of the pool know nothing of the caller's mode
    @torch.no_grad()
    def __call__(
        self, x: Any, *, contexts: Any = None, tokens: Any = None, seed: int = 0, interval: bool = True, **options: Any
    ) -> Estimate:
        """The metric of the rows of an n×d NumPy or torch array, with an interval over contexts (default: one per row).

        `interval=False` skips the interval, which is faster. Rows that are not finite are left out and counted.
        """
        chosen, rows = self.check(options), array_rows(x)
        with single_steps():
            view = self._view(rows, chosen, (contexts, tokens), seed=seed, interval=interval)
        with small_steps(rows):
            return evaluate(self, view, chosen)

    def _view(self, rows: Tensor, options: dict[str, Any], labels: tuple[Any, Any], **how: Any) -> View:
        """The statistics of an array's finite rows.

        Sums of float32 rows are finite where all rows are, and only there: such rows need not be read twice.
        """
        tell = rows.dtype is torch.float32 and all(issubclass(need, Sums) for need in self.given(options))
        view = array_view([(self, options)], finite_rows(rows, self.name, *labels, trusted=tell), **how)
        if tell and not all(stat.is_finite() for fold in view.folds for stat in fold.values()):
            view = array_view([(self, options)], finite_rows(rows, self.name, *labels), **how)
        return view


@dataclass(frozen=True)
class Request:
    """A metric to compute, with its options; `named` if the user requested it by name."""

    metric: Metric
    options: dict[str, Any] = field(default_factory=dict)
    named: bool = False
    beside: bool = False  # a variant that stands beside a default metric


def metric(*needs: type, batched: bool = False, **about: Any) -> Callable[[Callable[..., Any]], Metric]:
    """Declare a metric with the fields of a `Declaration`.

    The keyword-only arguments of the function become its options, its docstring its description. A `batched` function
    takes statistics with leading dimensions (lines, heads) and returns a tensor of that shape.
    """

    def declare(function: Callable[..., Any]) -> Metric:
        parameters = inspect.signature(function).parameters.values()
        options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        how = {"batch": function, "function": lambda *stats, **chosen: float(function(*stats, **chosen))}
        kinds = {"kinds": STREAM_KINDS | WEIGHT_KINDS, **about, **(how if batched else {"function": function})}
        return _register(function, needs=needs, options=options, **kinds)

    return declare


def measured(*commands: str, **about: Any) -> Callable[[Function], Function]:
    """Declare a number that these commands measure by calling the function, which is returned unchanged."""

    def declare(function: Function) -> Function:
        _register(function, function=function, measured_by=commands, **about)
        return function

    return declare


def _declared(module: str, name: str) -> Metric:
    """The metric of that name, which a module declares."""
    importlib.import_module(module)
    return REGISTRY[name]


def _register(declared: Callable[..., Any], **fields: Any) -> Metric:
    """Add a metric with the name of its function and the docstring as description to the registry."""
    description = " ".join((inspect.getdoc(declared) or "").partition(">>>")[0].split())
    fields |= {name: frozenset(fields.get(name, ())) for name in ("invariant", "kinds")}
    made = Metric(name=declared.__name__, description=description, **fields)
    object.__setattr__(made, "__doc__", made.description)
    REGISTRY[made.name] = made
    return made


def small_steps(rows: Tensor) -> AbstractContextManager[None]:
    """One thread for each operation of an evaluation, unless a wide spectrum gains by several."""
    return single_steps() if rows.shape[1] <= _WIDE else nullcontext()


def finite_rows(x: Any, name: str, contexts: Any = None, tokens: Any = None, *, trusted: bool = False) -> FiniteRows:
    """The finite rows of an array; an error that names the metric if there are none. `trusted` rows are not read."""
    rows = array_rows(x)
    n = len(rows)
    labels = torch.arange(n) if contexts is None else _labels(contexts, n, "contexts")
    kinds = torch.full((n,), -1, dtype=torch.int64) if tokens is None else _labels(tokens, n, "tokens")
    if trusted:
        return rows, labels, kinds, 0
    # a row that is not finite has a sum that is not finite, so only rows with such a sum are checked entry by entry
    suspects = (~rows.sum(1).isfinite()).nonzero().squeeze(1)
    bad = suspects[~rows[suspects].isfinite().all(1)].cpu()
    if len(bad):
        chosen = torch.ones(n, dtype=torch.bool).index_fill_(0, bad, False)
        rows, labels, kinds = rows[chosen.to(rows.device)], labels[chosen], kinds[chosen]
    if not len(rows):
        raise TooFewRows(f"{name} was given no row of finite numbers ({len(bad)} dropped); check the array")
    if rows.dtype is not torch.float32:  # fourth powers must not overflow float64; those of float32 never do
        top = max(abs(float(end)) for end in torch.aminmax(rows))
        if top > GREATEST or 0.0 < top < 1 / GREATEST:
            raise AnisoscopeError(
                f"the largest number of the array is {top:.0e}; expected 1e-60 to 1e60, rescale it first"
            )
    return rows, labels, kinds, len(bad)


def usable_rows(rows: Tensor) -> Tensor:
    """Which rows [n, d] have only finite numbers, whose fourth powers stay within float64 (float32 always does)."""
    low, high = torch.aminmax(rows, dim=1)  # NaN where a row has one; a copy of the absolute values would be as large
    top = torch.maximum(low.abs(), high.abs())
    return torch.isfinite(top) & ((top == 0) | ((top <= GREATEST) & (top >= 1 / GREATEST)))


def is_of_rows(metric: Declaration) -> bool:
    """Whether a metric can be computed from plain rows."""
    return not metric.measured_by and all(on_sample(need) or need in _BY_FOLD for need in metric.needs)


def array_view(
    wanted: Sequence[tuple[Declaration, dict[str, Any]]], given: FiniteRows, *, seed: int, interval: bool
) -> View:
    """The statistics that the wanted metrics need with their options, each computed once; one fold if no interval."""
    rows, contexts, tokens, dropped = given
    for metric, _ in wanted:
        if metric.measured_by:
            raise metric.refusal()
        if not is_of_rows(metric):
            raise AnisoscopeError(f"{metric.name} reads attention, not plain rows; use anisoscope.measure on a model")
    needs = {need for metric, options in wanted for need in metric.reads(options)}
    folds: list[dict[type, Any]] = [{} for _ in range(FOLDS)]
    home = fold_of(contexts)
    fold = home if interval else torch.zeros_like(contexts)
    for need in needs & _BY_FOLD:
        for j, found in _by_fold(need, rows, fold, contexts, read=_sums_read(wanted)).items():
            folds[j][need] = found
    sample = graphs = None
    if any(map(on_sample, needs)):
        place = torch.arange(len(rows))
        sample = Sample(len(rows), seed).update(rows, context=contexts, position=place, token=tokens, lasting=True)
        read = [estimation.neighbours_read(*request) for request in wanted if Neighbours in request[0].needs]
        # one graph of all rows, which is the same in any order; taken before another metric sorts them
        graphs = _graph_maker(sample.as_given(), max(read, default=0))
    # numbers in rising order, as of rows that are a context each, need no sorting
    kinds = home if bool((contexts[1:] > contexts[:-1]).all()) else fold_of(contexts.unique())
    counts: dict[str, Any] = {"contexts": len(kinds), "dropped": dropped, "interval": interval}
    sizes = dict(enumerate(torch.bincount(kinds, minlength=FOLDS).tolist()))
    return View(folds, sample, graphs, sizes=sizes, **counts)


def _sums_read(wanted: Sequence[tuple[Declaration, dict[str, Any]]]) -> frozenset[str] | None:
    """The costly sums that these metrics read; None: all."""
    found: set[str] = set()
    for metric, _ in wanted:
        if metric.sums is None:
            return None
        found |= metric.sums
    return frozenset(found)


def _by_fold(
    need: type, rows: Tensor, fold: Tensor, contexts: Tensor, *, read: frozenset[str] | None = None
) -> dict[int, Any]:
    """One statistic for each fold that has rows; of costly sums those that are read."""
    if issubclass(need, Sums):
        return {j: part for j, part in enumerate(need.split(rows, fold, int(fold.max()) + 1, read=read)) if part.n}
    index = {j: (fold == j).nonzero().squeeze(1) for j in fold.unique().tolist()}
    if need is Moments:
        return _moments_by_fold(rows, {j: members.to(rows.device) for j, members in index.items()})
    chosen = {j: (rows[members.to(rows.device)], contexts[members]) for j, members in index.items()}
    if need is ContextPairs:
        return {j: ContextPairs().update(*part) for j, part in chosen.items()}
    return {j: Coherence().update(estimation.context_cosines(*part)) for j, part in chosen.items()}


def _moments_by_fold(rows: Tensor, index: dict[int, Tensor]) -> dict[int, Moments]:
    """The moments of each fold, in parallel over folds and, if there are more cores, over parts of folds."""
    shares = -(-cores() // len(index)) if rows.device.type == "cpu" else 1
    parts = [(j, part) for j, members in index.items() for part in members.chunk(shares)]
    found: dict[int, Moments] = {}

    def moments_at(item: tuple[int, Tensor]) -> Moments:
        return _moments(rows, item[1])

    for (j, _), part in zip(parts, each_on_host(moments_at, parts, rows.device.type), strict=True):
        found[j] = found[j].merge(part) if j in found else part
    return found


def _moments(rows: Tensor, index: Tensor) -> Moments:
    """The moments of the rows at `index`, gathered in blocks so that the array is not copied."""
    out = Moments()
    first, last = int(index[0]), int(index[-1])
    if last - first + 1 == len(index):
        return out.update(rows[first : last + 1])
    for part in index.split(out.block_rows(rows)):
        gathered = room("rows", (len(part), rows.shape[1]), rows.dtype) if rows.device.type == "cpu" else None
        out.update(torch.index_select(rows, 0, part, out=gathered))
    return out


def _graph_maker(sample: Sample, most: int) -> Callable[[int], list[Graph]]:
    """A function from a number of neighbours to graphs, from one search for the most that any metric reads."""

    @cache
    def graphs(wanted: int) -> list[Graph]:
        if wanted == most:
            return sample_graphs(sample, wanted=most, batch=None, spare=False)  # no first positions to take out
        return [replace(graph, neighbours=graph.neighbours.cut(wanted), _known={}) for graph in graphs(most)]

    return graphs


def array_rows(x: Any) -> Tensor:
    """A NumPy or torch array as a float32 or float64 tensor [n, d]; otherwise an error that names the shape."""
    try:
        if not isinstance(x, Tensor):  # torch needs arrays that are contiguous and in native byte order
            filled = np.ma.filled(x.astype(np.float64), np.nan) if isinstance(x, np.ma.MaskedArray) else x
            array = np.ascontiguousarray(filled) if np.ndim(filled) else np.asarray(filled)
            x = torch.as_tensor(array.astype(array.dtype.newbyteorder("="), copy=False))
        rows: Tensor = x.detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise AnisoscopeError(f"seen {named_type(x)}, expected an n×d array of numbers; convert it first") from error
    if rows.layout is not torch.strided or rows.device.type == "meta":
        raise AnisoscopeError("the tensor is sparse or has no data; expected a dense n×d array, convert it first")
    if rows.ndim != 2 or 0 in rows.shape:
        raise AnisoscopeError(
            f"the array has shape {tuple(rows.shape)}; expected n rows × d columns, both at least 1; reshape it first"
        )
    return as_floats(rows)


def _labels(labels: Any, n: int, name: str) -> Tensor:
    """Labels as int64 [n]; labels that are not integers are numbered in sorted order."""
    try:
        values = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels)
        whole = values.dtype.kind in ("iub" if isinstance(labels, Tensor) else "iu")
        numbers = values if whole else np.unique(values, return_inverse=True)[1]
        out = torch.as_tensor(numbers.astype(np.int64))
    except (TypeError, ValueError) as error:
        raise AnisoscopeError(
            f"{name} holds labels that cannot be told apart ({error}); expected one number or word for each row"
        ) from error
    if out.shape != (n,):
        raise AnisoscopeError(f"{name} has shape {tuple(out.shape)}; expected one label for each of the {n} rows")
    return out
