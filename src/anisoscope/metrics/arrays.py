"""Metrics of plain rows: an n×d array in, an Estimate out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, TooFewRows
from anisoscope.metrics.estimate import Estimate
from anisoscope.metrics.evaluate import ON_SAMPLE, View, by_fold, context_cosines, evaluate
from anisoscope.metrics.graphs import sample_graphs
from anisoscope.metrics.metric import Metric
from anisoscope.metrics.neighbourhoods import Neighbours
from anisoscope.numerics.hashing import FOLDS, fold_of
from anisoscope.stats.directions import Coordinates, Directions
from anisoscope.stats.means import Coherence
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample


def evaluate_array(
    metric: Metric, x: Any, *, contexts: Any, tokens: Any, seed: int, options: dict[str, Any]
) -> Estimate:
    """A metric of the rows of an array; rows that are not finite are left out and counted."""
    rows = as_rows(x)
    labels = _labels(contexts, len(rows), "contexts")
    kinds = _labels(tokens, len(rows), "tokens") if tokens is not None else torch.full((len(rows),), -1)
    finite = rows.isfinite().all(1)
    dropped = len(rows) - int(finite.sum())
    if dropped:
        chosen = finite.cpu()
        rows, labels, kinds = rows[finite], labels[chosen], kinds[chosen]
    if not len(rows):
        raise TooFewRows(f"{metric.name} was given no row of finite numbers ({dropped} dropped); check the array")
    _check_scale(rows)
    view = array_view(metric, rows, labels, tokens=kinds, seed=seed, sampled=Sample in metric.reads(options))
    view.dropped = dropped
    return evaluate(metric, view, options)


def array_view(
    metric: Metric, rows: Tensor, contexts: Tensor, *, tokens: Tensor, seed: int, sampled: bool = False
) -> View:
    """The statistics that one metric needs of plain rows; `sampled` where it also draws batches from them."""
    known: set[type] = {Moments, Directions, Coordinates, Sample, Neighbours, Coherence, *ON_SAMPLE}
    if not known.issuperset(metric.needs):
        raise AnisoscopeError(f"{metric.name} reads attention, not plain rows; use anisoscope.measure on a model")
    fold = fold_of(contexts)
    folds: list[dict[type, Any]] = [{} for _ in range(FOLDS)]
    for need in metric.needs:
        if need in (Moments, Directions, Coordinates):
            for mine, found in zip(folds, by_fold(need, rows, fold), strict=True):
                mine |= found
        elif need is Coherence:
            for j in set(fold.tolist()):
                mine = (fold == j).nonzero().squeeze(1)
                folds[j][need] = Coherence().update(context_cosines(rows[mine.to(rows.device)], contexts[mine]))
    sample = None
    if sampled or {Sample, Neighbours, *ON_SAMPLE} & set(metric.needs):
        sample = Sample(len(rows), seed).update(rows, context=contexts, position=torch.arange(len(rows)), token=tokens)
    graphs = None if sample is None else lambda wanted: sample_graphs(sample, wanted=wanted, batch=None)
    return View(folds, sample, graphs, contexts=len(contexts.unique()))


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
    return (
        rows
        if rows.dtype in (torch.float32, torch.float64)
        else rows.float()
        if rows.is_floating_point()
        else rows.double()
    )


def _native(x: Any) -> Any:
    """A NumPy array that torch can read: contiguous, in this machine's byte order, masked entries NaN."""
    import numpy as np

    if isinstance(x, np.ma.MaskedArray):
        x = np.ma.filled(x.astype(np.float64), np.nan)
    array = np.ascontiguousarray(x) if np.ndim(x) else np.asarray(x)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _check_scale(rows: Tensor) -> None:
    """Squares of squares must fit into float64."""
    top = float(rows.abs().max())
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
