"""Where semi-NMF starts: cones that hold the rows.

X ≈ Z D with Z ≥ 0 says that the rows lie near the cone of r directions. How well the best such cone can do depends
on one thing only: the columns of Z span a space S of n-vectors, the error is that of projecting X on S, and S has a
non-negative basis as soon as it holds *one* positive vector w (any basis, shifted along w, is non-negative; Gillis
and Kumar 2015, arXiv:1410.7220). So the best error is that of one non-negative vector beside a free space of r − 1:
at or below the SVD of rank r − 1, and that of rank r where the rows lie in a half-space. On centred rows
w = max(0, Xy) for the best y. Both are found here from the leading scores alone, so that the iteration proper starts
near its end.

- the *wide* cone: w by fixed-point iteration, then the shift along w that makes the scores non-negative. In which
  basis? In that of a regular simplex in the whitened scores, turned until its corners point along their heavy tails.
- the *tight* cone: where each concept has rows of its own, the extreme rows are the concepts (successive projections,
  Araújo et al. 2001; Gillis and Vavasis 2014, arXiv:1208.1237). It is preferred where it fits, for the factors
  are then determined and not only their span.

Notation: T n×q leading scores of the rows, θ their energies, w n ≥ 0, E q×(r−1) the free directions, W whitened scores
n×(r−1), S r×(r−1) corners of the simplex, R its rotation, P = W R Sᵀ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anisoscope.numerics.factorisation.krylov import Leading, leading
from anisoscope.numerics.factorisation.nnls import descend

_W_STEPS = 12
_TURNS = 12
_SHIFTS = (
    1.0,
    1.5,
    2.5,
    4.0,
    6.5,
    10.0,
    16.0,
)  # how far along w the scores are shifted, in units of its root mean square
_WORSE = 0.05  # of what w gains over the SVD of rank r − 1: what a smaller shift may cost
_FITS = 0.1  # of the energy of the r-th singular vector: what the tight cone may miss
_CLEAR = 5.0  # deviations of the noise above which a row may be a corner
_STEPS = 100  # of projected gradient for the codes of the tight cone
_POINTED = 0.99  # of the energy in one half-space, below which no tight cone is looked for


def start_codes(X: Tensor, rank: int, *, seed: int) -> tuple[Tensor, int]:
    """Non-negative codes [..., n, r] to start from, for rows [..., n, d], and the passes over the rows they took.

    Their least squares error is near the best.

    >>> codes, passes = start_codes(torch.eye(3), 2, seed=0)
    >>> codes.shape, passes
    (torch.Size([3, 2]), 1)
    """
    found = leading(X, rank, keep=2 * rank, seed=seed, cycles=1)
    scale = found.energies.sum(-1).rsqrt() * X.shape[-2] ** 0.5
    scores = found.scores * scale.to(X.dtype)[..., None, None]
    unit = Leading(found.directions, scores, found.energies * scale.square().unsqueeze(-1))
    wide = _wide(unit, rank, seed=seed)
    height, inside, steepness = _half_space(unit, rank)
    if not bool((inside > _POINTED).any()):
        return wide, found.passes
    noise = _noise(X, found, rank) * scale.square()
    tight, missed = _tight(unit, rank, height=height, steepness=steepness, noise=noise)
    chosen = (inside > _POINTED) & (missed <= _FITS)
    return torch.where(chosen[..., None, None], tight, wide), found.passes


def _noise(X: Tensor, found: Leading, rank: int) -> Tensor:
    """The mean square of a row in each direction beyond the r leading ones."""
    n, d = X.shape[-2:]
    return (squares(X) - found.energies[..., :rank].sum(-1)).clamp_min(0.0) / (n * max(1, d - rank))


# the wide cone


def _wide(found: Leading, rank: int, *, seed: int) -> Tensor:
    w, free, error = positive_vector(found, rank)
    signed = found.scores @ free.to(w.dtype)
    signed = signed - w.unsqueeze(-1) * (signed.sum(-2, keepdim=True) / w.sum(-1)[..., None, None])
    corners = _corners(signed, rank, seed=seed)
    return _shifted(found, corners, w, error, rank)


def positive_vector(found: Leading, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """w [..., n] ≥ 0 with root mean square 1, the free directions E [..., q, r−1] and the error of both together.

    min over w ≥ 0 of the energy of X outside w and the r − 1 leading directions of what w leaves: in turn, E by
    eigenvectors and w by one step of the power method on what E leaves, cut at 0. Neither raises the error.
    """
    T, theta = found.scores, found.energies
    w = _first_w(T, theta, rank)
    best = free = error = None
    for _ in range(_W_STEPS):
        pulled = (T.mT @ w.unsqueeze(-1)).squeeze(-1).double()
        value, directions = _beside(theta, pulled, rank)
        better = torch.ones_like(value, dtype=torch.bool) if error is None else value < error
        best = w if best is None else torch.where(better.unsqueeze(-1), w, best)
        free = directions if free is None else torch.where(better[..., None, None], directions, free)
        error = value if error is None else torch.where(better, value, error)
        outside = pulled - (directions @ (directions.mT @ pulled.unsqueeze(-1))).squeeze(-1)
        moved = _unit((T @ outside.to(T.dtype).unsqueeze(-1)).squeeze(-1).clamp_min(0.0))
        w = torch.where(moved.any(-1, keepdim=True), moved, w)
    assert best is not None and free is not None and error is not None
    return best * T.shape[-2] ** 0.5, free, error


def _first_w(T: Tensor, theta: Tensor, rank: int) -> Tensor:
    """The best of: each leading score cut at 0 on its lighter side, and what of a constant lies in their span."""
    lead = T[..., :rank]
    sides = torch.where((lead.square() * lead).sum(-2, keepdim=True) < 0, -lead, lead)
    floor = 1e-9 * theta[..., :1]
    level = lead @ (lead.sum(-2).double() / theta[..., :rank].clamp_min(floor)).to(T.dtype).unsqueeze(-1)
    tried = _unit(torch.cat([sides, level], -1).clamp_min(0.0), dim=-2)
    pulled = (T.mT @ tried).double().mT
    value, _ = _beside(theta.unsqueeze(-2), pulled, rank)
    value = torch.where(tried.any(-2), value, torch.inf)
    return tried.gather(-1, value.argmin(-1)[..., None, None].expand(*tried.shape[:-1], 1)).squeeze(-1)


def _beside(theta: Tensor, pulled: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The energy outside w and the r − 1 leading directions beside it, and these; `pulled` = Tᵀw, ‖w‖ = 1."""
    left = torch.diag_embed(theta.expand(pulled.shape)) - pulled.unsqueeze(-1) * pulled.unsqueeze(-2)
    values, vectors = torch.linalg.eigh(left)
    others = values.shape[-1] - (rank - 1)
    return values[..., :others].sum(-1), vectors[..., others:]


def _unit(x: Tensor, *, dim: int = -1) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=dim, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)


def _corners(signed: Tensor, rank: int, *, seed: int) -> Tensor:
    """P [..., n, r]: how far each row lies towards each corner of the simplex; Σ over corners is 0."""
    if rank == 1:
        return signed.new_zeros(*signed.shape[:-1], 1)
    wide = signed.double()
    values, vectors = torch.linalg.eigh(wide.mT @ wide / wide.shape[-2])
    alive = values > 1e-9 * values[..., -1:]
    whiten = vectors * torch.where(alive, values.clamp_min(torch.finfo(values.dtype).tiny).rsqrt(), 0.0).unsqueeze(-2)
    W = signed @ whiten.to(signed.dtype)
    simplex = _simplex(rank).to(signed)
    return W @ _turned(W, simplex, seed=seed) @ simplex.mT * ((rank - 1) / rank)


def _simplex(rank: int) -> Tensor:
    """r unit vectors in r − 1 dimensions, all at the same angle."""
    centred = torch.eye(rank, dtype=torch.float64) - 1.0 / rank
    corners = torch.linalg.eigh(centred)[1][:, 1:]
    return corners / torch.linalg.vector_norm(corners, dim=1, keepdim=True)


def _turned(W: Tensor, simplex: Tensor, *, seed: int) -> Tensor:
    """The rotation R for which Σ max(0, W R Sᵀ)³ is large: a convex function, so that each polar step raises it."""
    size = simplex.shape[1]
    generator = torch.Generator().manual_seed(seed)
    R = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0].to(W)
    R = R.expand(*W.shape[:-2], size, size)
    for _ in range(_TURNS):
        slope = (W @ (R @ simplex.mT)).clamp_(0.0, 7.0).square_()  # beyond 7 deviations one row would decide alone
        left, _, right = torch.linalg.svd((W.mT @ slope @ simplex).double())
        R = (left @ right).to(W.dtype)
    return R


def _shifted(found: Leading, corners: Tensor, w: Tensor, error: Tensor, rank: int) -> Tensor:
    """The corners shifted along w, by the least shift that is nearly as good as an endless one.

    Rows in which w is too small for the shift get as much of it as they need.
    """
    T, theta = found.scores, found.energies
    needed = -corners.amin(-1)
    allowed = error + _WORSE * (theta[..., rank - 1 :].sum(-1) - error)
    chosen, settled = corners, torch.zeros_like(error, dtype=torch.bool)
    for shift in _SHIFTS:
        codes = corners + torch.maximum(shift * w, needed).unsqueeze(-1)
        chosen = torch.where(settled[..., None, None], chosen, codes)
        settled = settled | (theta.sum(-1) - _explained(codes, T) <= allowed)
    return chosen.clamp_min(0.0)


def _explained(codes: Tensor, T: Tensor) -> Tensor:
    """The energy of T in the span of the codes."""
    pulled = (codes.mT @ T).double()
    return (least_squares(codes, pulled) * pulled).sum((-2, -1))


def squares(X: Tensor) -> Tensor:
    """‖X‖² of each matrix, in float64."""
    return torch.linalg.vector_norm(X, dim=-1).double().square().sum(-1)


def least_squares(codes: Tensor, pulled: Tensor) -> Tensor:
    """D = argmin ‖X − Z D‖² in float64, from ZᵀX; codes that are all zero, or double, get the smaller directions."""
    wide = codes.double()
    norms = torch.linalg.vector_norm(wide, dim=-2).unsqueeze(-1)
    norms = torch.where(norms > 0, norms, 1.0)
    gram = (wide.mT @ wide) / norms / norms.mT
    gram.diagonal(dim1=-2, dim2=-1).add_(1e-11)
    return torch.cholesky_solve(pulled.double() / norms, torch.linalg.cholesky_ex(gram)[0]) / norms


# the tight cone


def _half_space(found: Leading, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """How far each row lies along the normal of the best half-space, the share of energy inside it, and ‖normal‖."""
    lead, theta = found.scores[..., :rank], found.energies[..., :rank]
    normal = lead.sum(-2).double() / theta.clamp_min(1e-9 * theta[..., :1])  # the least squares fit of a constant
    height = (lead @ normal.to(lead.dtype).unsqueeze(-1)).squeeze(-1)
    energy = lead.square().sum(-1)
    inside = torch.where(height > 0, energy, 0.0).sum(-1) / energy.sum(-1)
    return height, inside, torch.linalg.vector_norm(normal, dim=-1)


def _tight(found: Leading, rank: int, *, height: Tensor, steepness: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Codes in the cone of the extreme rows, and what it misses in units of the energy of the r-th direction."""
    lead = found.scores[..., :rank]
    lowest = torch.maximum(_CLEAR * noise.sqrt() * steepness, 1e-3 * height.square().mean(-1).sqrt())
    high = height > lowest.unsqueeze(-1)
    seen = torch.where(high.unsqueeze(-1), lead / height.unsqueeze(-1), 0.0)
    spread = rank + seen.square().sum(-1) * steepness.unsqueeze(-1).square()
    blur = (torch.where(high, noise.unsqueeze(-1) / height.square() * spread, 0.0)).to(lead.dtype)
    rays = _unit(_extreme(lead, seen, blur, high))
    codes = descend(rays.double() @ rays.double().mT, lead @ rays.mT, torch.zeros_like(lead), steps=_STEPS)
    missed = squares(lead - codes @ least_squares(codes, codes.mT @ lead).to(lead.dtype))
    return codes, missed / found.energies[..., rank - 1].clamp_min(torch.finfo(torch.float64).tiny)


def _extreme(lead: Tensor, seen: Tensor, blur: Tensor, high: Tensor) -> Tensor:
    """The corners [..., r, r] of rows seen from the apex: each the farthest from the span of those before it.

    Farthest beyond doubt: twice the deviation that noise gives to a row is taken off. Rows that noise cannot tell
    from the one picked are averaged with it.
    """
    rest, corners = seen, []
    for _ in range(lead.shape[-1]):
        far = torch.linalg.vector_norm(rest, dim=-1) - 2.0 * blur.sqrt()
        pick = torch.where(high, far, -torch.inf).argmax(-1, keepdim=True)
        corner = seen.gather(-2, pick.unsqueeze(-1).expand(*pick.shape, lead.shape[-1]))
        alike = high & ((seen - corner).square().sum(-1) <= 1.5 * (blur + blur.gather(-1, pick)))
        alike = alike | (torch.arange(lead.shape[-2], device=lead.device) == pick)
        corners.append((lead * alike.unsqueeze(-1)).sum(-2))
        known = torch.linalg.qr(torch.stack(corners, -1).double())[0].to(lead.dtype)
        rest = seen - seen @ known @ known.mT
    return torch.stack(corners, -2)
