"""Metrics of plain rows: an n×d array in, an Estimate out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, TooFewRows
from anisoscope.metrics.engine.declaration import Declaration
from anisoscope.metrics.engine.estimate import Estimate
from anisoscope.metrics.engine.estimation import ON_SAMPLE, View, context_cosines, evaluate, neighbours_read
from anisoscope.metrics.engine.neighbourhoods import Graph, Neighbours, sample_graphs, spared
from anisoscope.numerics.factorisation.factors import as_floats
from anisoscope.numerics.hashing import FOLDS, fold_of
from anisoscope.numerics.host import room, together
from anisoscope.stats.directions import Coordinates, Directions, Sums
from anisoscope.stats.means import Coherence
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample


@dataclass(frozen=True)
class ArrayRows:
    """Finite rows with their labels; how many were left out."""

    rows: Tensor
    contexts: Tensor
    tokens: Tensor
    dropped: int
    interval: bool = True  # else all rows are one fold, which cannot be left out

    @property
    def fold(self) -> Tensor:
        return fold_of(self.contexts) if self.interval else torch.zeros_like(self.contexts)


@torch.inference_mode(False)  # threads of the pool know nothing of the caller's mode
@torch.no_grad()
def evaluate_array(
    metric: Declaration,
    x: Any,
    *,
    contexts: Any,
    tokens: Any,
    seed: int,
    options: dict[str, Any],
    interval: bool = True,
) -> Estimate:
    """A metric of the rows of an array; rows that are not finite are left out and counted."""
    given = read_array(x, metric.name, contexts, tokens, interval=interval)
    return evaluate(metric, array_view([(metric, options)], given, seed), options)


def read_array(x: Any, name: str, contexts: Any, tokens: Any, *, interval: bool) -> ArrayRows:
    rows = as_rows(x)
    labels = _labels(contexts, len(rows), "contexts")
    kinds = (
        _labels(tokens, len(rows), "tokens") if tokens is not None else torch.full((len(rows),), -1, dtype=torch.int64)
    )
    bad = _bad_rows(rows)
    if len(bad):
        chosen = torch.ones(len(rows), dtype=torch.bool).index_fill_(0, bad, False)
        rows, labels, kinds = rows[chosen.to(rows.device)], labels[chosen], kinds[chosen]
    if not len(rows):
        raise TooFewRows(f"{name} was given no row of finite numbers ({len(bad)} dropped); check the array")
    _check_scale(rows)
    return ArrayRows(rows, labels, kinds, len(bad), interval)


def _bad_rows(rows: Tensor) -> Tensor:
    """The numbers of the rows that are not finite.

    The sum of a row that is not finite is not finite: only rows whose sum is not are looked at number by number.
    """
    suspects = (~rows.sum(1).isfinite()).nonzero().squeeze(1)
    return suspects[~rows[suspects].isfinite().all(1)].cpu()


def is_of_rows(metric: Declaration) -> bool:
    """Whether plain rows are enough to compute it."""
    known: set[type] = {Moments, Directions, Coordinates, Sample, Neighbours, Coherence, *ON_SAMPLE}
    return not metric.measured_by and known.issuperset(metric.needs)


def array_view(wanted: Sequence[tuple[Declaration, dict[str, Any]]], given: ArrayRows, seed: int) -> View:
    """The statistics that some metrics, with their options, need of plain rows, each taken once."""
    for metric, _ in wanted:
        if metric.measured_by:
            raise metric.refusal()
        if not is_of_rows(metric):
            raise AnisoscopeError(f"{metric.name} reads attention, not plain rows; use anisoscope.measure on a model")
    needs = {need for metric, options in wanted for need in metric.reads(options)}
    folds: list[dict[type, Any]] = [{} for _ in range(FOLDS)]
    for need in needs & {Moments, Directions, Coordinates, Coherence}:
        for j, found in _by_fold(need, given).items():
            folds[j][need] = found
    sample = _sample(given, seed) if needs & {Sample, Neighbours, *ON_SAMPLE} else None
    most = max([neighbours_read(*request) for request in wanted if Neighbours in request[0].needs], default=0)
    graphs = None if sample is None else _graph_maker(sample, most, spare=given.interval)
    counts: dict[str, Any] = {"contexts": len(given.contexts.unique()), "dropped": given.dropped}
    return View(folds, sample, graphs, interval=given.interval, **counts)


def _by_fold(need: type, given: ArrayRows) -> dict[int, Any]:
    """One statistic of the rows of each fold that has any."""
    fold = given.fold
    if issubclass(need, Sums):
        parts = need.split(given.rows, fold, FOLDS if given.interval else 1)
        return {j: part for j, part in enumerate(parts) if part.n}
    if need is Moments:
        return _moments_by_fold(given.rows, fold)
    index = {j: (fold == j).nonzero().squeeze(1) for j in fold.unique().tolist()}
    chosen = {j: (given.rows[mine.to(given.rows.device)], given.contexts[mine]) for j, mine in index.items()}
    return {j: Coherence().update(context_cosines(*part)) for j, part in chosen.items()}


def _moments_by_fold(rows: Tensor, fold: Tensor) -> dict[int, Moments]:
    """The moments of each fold; every core works on its own part of a fold, or on folds of its own."""
    index = {j: (fold == j).nonzero().squeeze(1).to(rows.device) for j in fold.unique().tolist()}
    shares = -(-torch.get_num_threads() // len(index)) if rows.device.type == "cpu" else 1
    parts = [(j, part) for j, mine in index.items() for part in mine.chunk(shares)]
    found: dict[int, Moments] = {}
    for (j, _), part in zip(parts, together(lambda item: _moments(rows, item[1]), parts), strict=True):
        found[j] = found[j].merge(part) if j in found else part
    return found


def _moments(rows: Tensor, index: Tensor) -> Moments:
    """The moments of some of the rows, gathered a block at a time so that no copy of the array is made."""
    out = Moments()
    first, last = int(index[0]), int(index[-1])
    if last - first + 1 == len(index):
        return out.update(rows[first : last + 1])
    for part in index.split(out.block_rows(rows)):
        if rows.device.type == "cpu":
            gathered = room("rows", (len(part), rows.shape[1]), rows.dtype)
            out.update(torch.index_select(rows, 0, part, out=gathered))
        else:
            out.update(rows[part])
    return out


def _sample(given: ArrayRows, seed: int) -> Sample:
    labels = {"context": given.contexts, "position": torch.arange(len(given.rows)), "token": given.tokens}
    return Sample(len(given.rows), seed).update(given.rows, **labels)


def _graph_maker(sample: Sample, most: int, *, spare: bool) -> Callable[[int], list[Graph]]:
    """Neighbour graphs from one search for as many neighbours as any metric reads, made when one first asks."""

    @cache
    def found() -> list[Graph]:
        return sample_graphs(sample, wanted=most, batch=None, spare=spare)

    @cache
    def cut(wanted: int) -> list[Graph]:
        return [replace(graph, neighbours=_cut(graph.neighbours, wanted), _left={}) for graph in found()]

    return lambda wanted: found() if wanted == most else cut(wanted)


def _cut(graph: Neighbours, wanted: int) -> Neighbours:
    """What a search for fewer neighbours would have found."""
    held = spared(wanted)
    return replace(graph, distance=graph.distance[:, :held], index=graph.index[:, :held], wanted=wanted)


def as_rows(x: Any) -> Tensor:
    """An n×d float tensor from a NumPy or torch array, half precision promoted; or an error that names the shape."""
    try:
        rows = (x if isinstance(x, Tensor) else torch.as_tensor(_native(x))).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise AnisoscopeError(f"seen {type(x).__name__}, expected an n×d array of numbers; convert it first") from error
    if rows.layout is not torch.strided or rows.device.type == "meta":
        raise AnisoscopeError("the tensor is sparse or has no data; expected a dense n×d array, convert it first")
    if rows.ndim != 2 or 0 in rows.shape:
        raise AnisoscopeError(
            f"the array has shape {tuple(rows.shape)}; expected n rows × d columns, both at least 1; reshape it first"
        )
    if rows.is_complex():
        raise AnisoscopeError("the array is complex; expected real numbers, take its real part or its modulus first")
    return as_floats(rows)


def _native(x: Any) -> Any:
    """A NumPy array that torch can read: contiguous, in this machine's byte order, masked entries NaN."""
    import numpy as np

    if isinstance(x, np.ma.MaskedArray):
        x = np.ma.filled(x.astype(np.float64), np.nan)
    array = np.ascontiguousarray(x) if np.ndim(x) else np.asarray(x)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _check_scale(rows: Tensor) -> None:
    """Squares of squares must fit into float64; those of float32 always do."""
    if rows.dtype is torch.float32:
        return
    low, high = torch.aminmax(rows)
    top = max(-float(low), float(high))
    if top > 1e60 or 0.0 < top < 1e-60:
        raise AnisoscopeError(f"the largest number of the array is {top:.0e}; expected 1e-60 to 1e60, rescale it first")


def _labels(labels: Any, n: int, name: str) -> Tensor:
    """One int64 per row; words are numbered in alphabetical order."""
    if labels is None:
        return torch.arange(n)
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        out = labels.detach().cpu().to(torch.int64)
    else:
        import numpy as np

        try:
            values = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels)
            numbers = values if values.dtype.kind in "iu" else np.unique(values, return_inverse=True)[1]
            out = torch.as_tensor(numbers.astype(np.int64))
        except (TypeError, ValueError) as error:
            raise AnisoscopeError(
                f"{name} holds labels that cannot be told apart ({error}); expected one number or word for each row"
            ) from error
    if out.shape != (n,):
        raise AnisoscopeError(f"{name} has shape {tuple(out.shape)}; expected one label for each of the {n} rows")
    return out
