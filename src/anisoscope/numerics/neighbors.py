"""Exact nearest neighbours.

A float32 product on centred rows *finds* candidates; their distances are computed again in float64 from differences.
The candidate list is proved long enough for each row, or that row is redone in full.
Notation: n rows, k neighbours, u = 2⁻²⁴ the float32 rounding unit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anisoscope.numerics.factors import exact_products
from anisoscope.numerics.linalg import has_float64

_BLOCK_BYTES = 16 << 20  # of one block of squared distances
_DEVICE_BYTES = 128 << 20  # the same on a GPU, where few large blocks are quicker
_CACHE_BYTES = 2 << 20  # of one block of differences: they are read three times, so they should stay in the cache
_SIDE = 2048  # rows of a square block of distances on the host: the selection of a few of less than 64 k is slower
_SPARE = 6  # candidates beyond k


def first_equal(x: Tensor) -> Tensor:
    """For every row the index of the first one that equals it, which is its own where it is the first.

    >>> first_equal(torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 0.0]])).tolist()
    [0, 0, 2]
    """
    candidates = _equal_candidates(x)
    found = torch.arange(len(x), device=x.device)
    if len(candidates):
        _, inverse = torch.unique(x[candidates], dim=0, return_inverse=True)
        first = torch.full((int(inverse.max()) + 1,), len(x), dtype=torch.int64, device=x.device)
        first.scatter_reduce_(0, inverse, candidates, reduce="amin")
        found[candidates] = first[inverse]
    return found


def _equal_candidates(x: Tensor) -> Tensor:
    """Rows that share a projection with another row: equal rows are among them, and seldom others."""
    weights = torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device).sqrt()
    # a row sum in a fixed order per row: equal rows get equal projections, whatever the batch
    projection = (x * weights).sum(1)
    _, inverse, counts = torch.unique(projection, return_inverse=True, return_counts=True)
    return (counts[inverse] > 1).nonzero().squeeze(1)


def nearest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Distances (n×k, float64, ascending) and indices of the k nearest other rows, exact.

    >>> d, i = nearest(torch.tensor([[0.0], [1.0], [3.0]]), 2)
    >>> d.tolist(), i.tolist()
    ([[1.0, 3.0], [1.0, 2.0], [2.0, 3.0]], [[1, 2], [0, 2], [1, 0]])
    """
    with exact_products(x.device):  # the proof below is for float32: TF32 would find other candidates
        return _nearest(x, min(k, len(x) - 1))


def _nearest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    n = len(x)
    exact = x.double() if has_float64(x.device) else x.cpu().double()
    exact = exact - exact.mean(0)  # a common mean would drown the differences in float32
    everyone = torch.arange(n, device=exact.device)
    wanted = min(k + _SPARE, n - 1)
    candidates, reach = _all_candidates(exact.to(x.device, torch.float32), wanted)
    candidates, reach = candidates.to(exact.device), reach.to(exact.device).double()
    distances, indices = _exact(exact, everyone, candidates, k=k)
    if wanted < n - 1:
        unsure = _unsure(distances[:, -1], reach, exact).nonzero().squeeze(1)
        if len(unsure):
            again, _ = _candidates(exact, unsure, wanted)
            distances[unsure], indices[unsure] = _exact(exact, unsure, again, k=k)
    return distances, indices


def _all_candidates(x: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
    """What `_candidates` gives for all rows, with each block of products serving its rows and its columns."""
    n = len(x)
    side = max(wanted + 1, _SIDE if x.device.type == "cpu" else min(n, int((_DEVICE_BYTES / 4) ** 0.5)))
    starts = list(range(0, n, side))
    squares = x.square().sum(1)
    value = torch.full((n, wanted), torch.inf, dtype=x.dtype, device=x.device)
    index = torch.zeros(n, wanted, dtype=torch.int64, device=x.device)

    def take(squared: Tensor, row: int, column: int) -> None:
        """Merge a block of squared distances into the best so far of its rows."""
        near, where = squared.topk(min(wanted, squared.shape[1]), dim=1, largest=False)
        mine = slice(row, row + len(squared))
        both, place = torch.cat([value[mine], near], 1), torch.cat([index[mine], where + column], 1)
        value[mine], order = both.topk(wanted, dim=1, largest=False)
        index[mine] = place.gather(1, order)

    for number, row in enumerate(starts):
        for column in starts[number:]:
            one, two = slice(row, row + side), slice(column, column + side)
            squared = torch.addmm(squares[two].unsqueeze(0), x[one], x[two].T, alpha=-2.0)
            squared += squares[one].unsqueeze(1)
            if row == column:
                squared.fill_diagonal_(torch.inf)
            else:
                take(squared.T.contiguous(), column, row)
            take(squared, row, column)
    return index, value[:, -1]


def _candidates(x: Tensor, rows: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
    """Indices of the `wanted` nearest to each of `rows` by a product in x's precision, and how far the list reaches."""
    squares = x.square().sum(1)
    step = max(1, _BLOCK_BYTES // (x.element_size() * len(x)))
    indices, reach = [], []
    for mine in rows.split(step):
        squared = torch.addmm(squares.unsqueeze(0), x[mine], x.T, alpha=-2.0)
        squared[torch.arange(len(mine), device=x.device), mine] = torch.inf
        value, index = squared.topk(wanted, dim=1, largest=False)
        indices.append(index)
        reach.append(value[:, -1] + squares[mine])
    return torch.cat(indices), torch.cat(reach)


def _exact(x: Tensor, rows: Tensor, candidates: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """Distances from differences in float64, the k smallest of each row's candidates."""
    most = _CACHE_BYTES if x.device.type == "cpu" else _DEVICE_BYTES
    step = max(1, most // (8 * x.shape[1] * candidates.shape[1]))
    distances, indices = [], []
    for mine, chosen in zip(rows.split(step), candidates.split(step), strict=True):
        gap = torch.linalg.vector_norm(x[chosen] - x[mine].unsqueeze(1), dim=2)
        value, order = gap.sort(dim=1, stable=True)
        distances.append(value[:, :k])
        indices.append(chosen.gather(1, order[:, :k]))
    return torch.cat(distances), torch.cat(indices)


def _unsure(kth: Tensor, reach: Tensor, x: Tensor) -> Tensor:
    """Rows for which the float32 product may have missed a neighbour; they are redone in float64.

    |fl(‖x−y‖²) − ‖x−y‖²| ≤ (d+4)·u·(‖x‖+‖y‖)² covers the rounding to float32, both squares and the product. A row y
    outside the list is at least `reach` away by that product; one with ‖y‖ ≥ ‖x‖ + kth is too far anyway, so
    ‖y‖ < ‖x‖ + kth bounds the error (an outlier elsewhere in the cloud costs nothing).
    """
    bound = (x.shape[1] + 4) * 2.0**-24 * (2.0 * torch.linalg.vector_norm(x, dim=1) + kth).square()
    return reach - bound < kth.square()
