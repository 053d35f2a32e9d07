"""Decompositions of rows into directions and codes by six methods with one interface, so that they can be compared.

Notation: X n×d rows, Z n×k codes, D k×d directions, m the mean for the methods that centre; X ≈ Z D + m.

| method | directions | codes |
|---|---|---|
| semi_nmf | free, of norm 1 | non-negative |
| pca | principal components of the centred rows | scores |
| svd | right singular vectors of the rows as they are | scores |
| ica | of norm 1, from independent components in the space of the PCA | sources |
| kmeans | centroids | one-hot |
| random | orthonormalised Gaussian | projections |"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.numerics import factors
from anisoscope.numerics.factors import Factors
from anisoscope.numerics.linalg import leading_axes, norms_of, solve_small
from anisoscope.numerics.semi_nmf import MAX_ITER, TOL_FAR, fit, semi_nmf, start_directions

Fitted = tuple[Tensor, Tensor | None, list[Tensor]]  # directions [b, k, d], their mean [b, d], the objective by step
Fit = Callable[..., Fitted]
_ICA_TOL = 1e-8  # 1 − cosine between successive components at convergence: an angle of about 1e-4


def decompose(
    X: Any,
    rank: int,
    *,
    method: str = "semi_nmf",
    seed: int = 0,
    init: Any = "svd",
    max_iter: int = MAX_ITER,
    tol: float | None = None,
    mask: Any = None,
) -> Factors:
    """`rank` directions of the rows, with codes, by one of METHODS; `init` is valid only for semi-NMF.

    >>> x = torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.5]))
    >>> decompose(x, 2, method="svd").directions.abs().round(decimals=4).tolist()
    [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
    """
    if method == "semi_nmf":
        rows = factors.as_matrix(X)
        return semi_nmf(rows, rank, seed=seed, init=init, max_iter=max_iter, tol=tol, mask=mask)
    fitted_by = _fit_of(method, init)
    rows = factors.matrix_to_fit(X, rank, mask)
    how: dict[str, Any] = {"seed": seed, "max_iter": max_iter, "tol": TOL_FAR if tol is None else tol}
    with factors.exact_products(rows.device):
        directions, means, past = fitted_by(rows.unsqueeze(0), rank, **how)
        mean, directions = rows.new_zeros(rows.shape[1]) if means is None else means[0], directions[0]
        centred = rows - mean
        codes = factors.encode_rows(centred, directions, method=method).to(rows.dtype)
        total = float(factors.squares(rows))
        error = float(factors.squared_error(centred, codes, directions)) / total
    history = (*(max(float(value[0]) / total, error) for value in past), error)
    return Factors(codes, directions, mean, error, history, method, seed)


def fit_directions(
    X: Tensor, rank: int, *, method: str = "semi_nmf", seed: int = 0, init: Tensor | None = None
) -> Tensor:
    """The directions [..., k, d] of each matrix of X [..., n, d], as by `decompose`, but batched and without codes.

    On a GPU many small fits, such as one for each site of a model, cost hardly more than one.

    >>> fit_directions(torch.randn(3, 40, 8, generator=torch.Generator().manual_seed(0)), 2, method="pca").shape
    torch.Size([3, 2, 8])
    """
    if X.ndim < 2 or 0 in X.shape:
        raise AnisoscopeError(f"the array has shape {tuple(X.shape)}; expected [..., rows, width], all at least 1.")
    rows = factors.as_floats(X.detach())
    factors.check_fit(rows, rank)
    flat = rows.reshape(-1, *rows.shape[-2:])
    with factors.exact_products(rows.device):
        if method == "semi_nmf":
            start = start_directions(rows, rank, "svd" if init is None else init)
            start = start.reshape(-1, rank, rows.shape[-1]) if isinstance(start, Tensor) else start
            found = fit(flat, rank, seed=seed, init=start).directions
        else:
            found, _, _ = _fit_of(method, init)(flat, rank, seed=seed, max_iter=MAX_ITER, tol=TOL_FAR)
    return found.reshape(*rows.shape[:-2], rank, rows.shape[-1])


def _fit_of(method: str, init: Any) -> Fit:
    if method not in _FITS:
        raise unknown_name("method", method, METHODS)
    if not (init is None or (isinstance(init, str) and init == "svd")):
        raise AnisoscopeError(f"init was given for {method}; expected it only with semi_nmf, leave it out.")
    return _FITS[method]


def _fit_svd(X: Tensor, rank: int, *, seed: int, **_: Any) -> Fitted:
    """The leading right singular vectors, with signs that make the entry of largest magnitude positive."""
    found = leading_axes(X, rank, seed=seed).directions[..., :rank].mT
    largest = found.gather(-1, found.abs().argmax(-1, keepdim=True))
    return torch.where(largest < 0, -found, found).to(X.dtype), None, []


def _fit_pca(X: Tensor, rank: int, *, seed: int, **_: Any) -> Fitted:
    mean = X.mean(-2, dtype=torch.float64).to(X.dtype)
    return _fit_svd(X - mean.unsqueeze(-2), rank, seed=seed)[0], mean, []


def _fit_ica(X: Tensor, rank: int, *, seed: int, max_iter: int, **_: Any) -> Fitted:
    """Symmetric FastICA with tanh (Hyvärinen 1999, doi:10.1109/72.761722) on the whitened scores of the PCA.

    Signs of sources are chosen so that their third moment is positive; sources are ordered by explained energy.
    """
    mean = X.mean(-2, dtype=torch.float64).to(X.dtype)
    found = leading_axes(X - mean.unsqueeze(-2), rank, seed=seed)
    theta = found.energies[..., :rank] / X.shape[-2]
    spanned = int((theta > 1e-10 * theta[..., :1]).sum(-1).min())
    if spanned < rank:
        raise AnisoscopeError(
            f"the centred rows span only {spanned} dimensions, so they have no {rank} independent components; "
            "give a smaller rank."
        )
    deviation = theta.sqrt()
    white = found.scores[..., :rank] / deviation.unsqueeze(-2).to(X.dtype)
    turn = _independent(white, seed=seed, max_iter=max_iter)
    sources = white @ turn.mT.to(X.dtype)
    sign = torch.where((sources.square() * sources).sum(-2) < 0, -1.0, 1.0).double().unsqueeze(-1)
    mixing = sign * turn * deviation.unsqueeze(-2) @ found.directions[..., :rank].mT
    order = torch.argsort(mixing.square().sum(-1), dim=-1, descending=True, stable=True)
    directions = mixing.gather(-2, order.unsqueeze(-1).expand_as(mixing))
    return (directions / norms_of(directions)).to(X.dtype), mean, []


def _independent(white: Tensor, *, seed: int, max_iter: int) -> Tensor:
    """The rotation [b, k, k], in float64, of whitened scores to independent sources."""
    n, k = white.shape[-2:]
    generator = torch.Generator().manual_seed(seed)
    first = torch.linalg.qr(torch.randn(k, k, generator=generator, dtype=torch.float64))[0]
    turn = first.to(white.device).expand(white.shape[0], k, k)
    done = torch.zeros(white.shape[0], dtype=torch.bool, device=white.device)
    for _ in range(max_iter):
        bent = (white @ turn.mT.to(white.dtype)).tanh_()
        slope = 1.0 - bent.square().mean(-2).double()
        step = (bent.mT @ white).double() / n - slope.unsqueeze(-1) * turn
        left, _, right = solve_small(torch.linalg.svd, step)
        before, turn = turn, torch.where(done[:, None, None], turn, left @ right)
        done = done | ((turn * before).sum(-1).abs() > 1.0 - _ICA_TOL).all(-1)
        if bool(done.all()):
            break
    return turn


def _fit_kmeans(X: Tensor, rank: int, **how: Any) -> Fitted:
    found = factors.k_means(X, rank, **how)
    return found.centroids, None, found.history


def _fit_drawn(X: Tensor, rank: int, *, seed: int, **_: Any) -> Fitted:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(X.shape[-1], rank, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(drawn)[0].mT.to(X).expand(X.shape[0], -1, -1), None, []


_FITS: dict[str, Fit] = {"pca": _fit_pca, "svd": _fit_svd, "ica": _fit_ica, "kmeans": _fit_kmeans, "random": _fit_drawn}
METHODS = ("semi_nmf", *_FITS)
