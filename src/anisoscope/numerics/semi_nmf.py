"""Semi-non-negative matrix factorisation: X ≈ Z D with Z ≥ 0 (Ding, Li and Jordan 2010, doi:10.1109/TPAMI.2008.277).

Alternates between the directions, by least squares, and the codes, by accelerated projected gradient on the r×r Gram
matrix; no step raises the objective. With the initialisation below a few iterations suffice, where the multiplicative
updates of the paper need thousands.

Initialisation: X ≈ Z D with Z ≥ 0 means that the rows lie near the cone of r directions. The columns of Z span a space
S of n-vectors, and the error is that of projecting X on S. S has a non-negative basis if it holds *one* positive vector
w, because any basis shifted along w is non-negative (Exact and Heuristic Algorithms for Semi-Nonnegative Matrix
Factorization, arXiv:1410.7220). So the best error is that of one non-negative vector and a free space of r − 1: at most
that of the SVD of rank r − 1, and equal to that of rank r where the rows lie in a half-space. On centred rows
w = max(0, Xy) for the best y. Two initial cones are computed from the leading scores alone:

- the *wide* cone: w by fixed-point iteration, then a shift along w that makes the scores non-negative. Their basis is
  a regular simplex in the whitened scores, rotated so that its corners point along their heavy tails.
- the *tight* cone: if each concept has rows that no other concept contributes to, the extreme rows are the concepts
  (Fast and Robust Recursive Algorithms for Separable Nonnegative Matrix Factorization, arXiv:1208.1237). It is
  preferred where it fits, because then the factors are determined and not only their span. Noise moves rows outside,
  so it is opened until they are inside (`init="corners"` leaves it as it is: a higher error, nearer to the concepts).

Iterations on the leading scores follow, which cost far less than on the rows.

Notation: X n×d rows, Z n×r codes, D r×d directions, ‖R‖² = ‖X − Z D‖² the error, with leading dimensions for batches
of fits. T n×q leading scores of the rows, θ their energies, w n ≥ 0, E q×(r−1) the free directions, W whitened scores
n×(r−1), S r×(r−1) corners of the simplex, R its rotation, P = W R Sᵀ."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.numerics import factors
from anisoscope.numerics.factors import Factors, descent, squares
from anisoscope.numerics.linalg import Leading, leading_axes, norms_of, small_eigenvalues, small_eigh, solve_small

NEAR = ("svd", "corners")  # starts near a solution
INITS = (*NEAR, "random", "kmeans")
MAX_ITER = 200
TOL_NEAR, TOL_FAR = 1e-3, 1e-5  # relative decrease of the error that ends a fit, from a good start and from others
_INNER = 20  # gradient steps on the codes per update of the directions
_CARRY, _FASTER, _MOST_CARRY = 0.5, 1.05, 0.98  # extrapolation of the codes: first factor, its growth, its maximum
_W_STEPS = 12
_LEVEL = 1e-6  # share of a constant within the span of the scores from which it is tried as w
_TURNS = 12
_SHIFTS = (1.0, 1.5, 2.5, 4.0, 6.5, 10.0, 16.0)  # of the scores along w, in units of its root mean square
_WORSE = 0.05  # share of the gain of w over the SVD of rank r − 1 that a small shift may give up
_FITS = 0.1  # largest error of an accepted tight cone, in units of the energy of the r-th singular vector
_CLEAR = 5.0  # standard deviations above the noise from which a row may be a corner
_POLISH = 60  # most iterations on the leading scores
_POLISHED, _CLOSER = 1e-3, 0.02  # decreases that end them: of the error, and of its excess over that of the SVD
_QUICK = 5  # gradient steps on the codes in each of them
_OPENED = (0.0, 0.5, 0.9, 0.99, 0.999, 1.0)  # shares of the rows for which a tight cone is opened
_STEPS = 100  # projected gradient steps for the codes of the tight cone
_POINTED = 0.99  # share of the energy in one half-space below which no tight cone is tried


def semi_nmf(
    X: Any,
    rank: int,
    *,
    seed: int = 0,
    init: Any = "svd",
    max_iter: int = MAX_ITER,
    tol: float | None = None,
    mask: Any = None,
) -> Any:
    """Fit X ≈ Z D with Z ≥ 0; rows are not centred here.

    Returns `Factors` for rows [n, d], and a list of them, fitted in one batch, for [layers, n, d].

    `init` is `svd` (the lowest error), `corners` (if each concept has rows of its own, these: nearer to the concepts,
    at an error that noise makes up to some percent higher), `random`, `kmeans`, an earlier fit, or r×d directions (for
    layers: a list of fits, or layers×r×d); from the last two the concepts keep their order, otherwise the one with the
    most energy comes first. The fit ends when an iteration would lower the error by less than the relative `tol`;
    default: 1e-5 for `random` and `kmeans`, 1e-3 for the others, which start near the solution. Directions have norm 1.
    `mask` selects the rows that are fitted (the same in each layer); codes are returned for these rows.

    On centred rows the factors are not unique: the codes of all concepts share a common part, the non-negative vector
    w that the factorisation needs (`tangent.concepts` computes codes without it).

    >>> fit = semi_nmf(torch.eye(3)[[0, 1, 2, 0, 1, 2]], 3)
    >>> round(fit.error, 6), fit.directions.shape, fit.codes.shape
    (0.0, torch.Size([3, 3]), torch.Size([6, 3]))
    >>> [fit.codes.shape for fit in semi_nmf(torch.eye(4).expand(2, 4, 4), 2)]
    [torch.Size([4, 2]), torch.Size([4, 2])]
    """
    rows = factors.matrix_to_fit(X, rank, mask, layers=True)
    top = float(rows.abs().max())
    # rows whose squares would overflow or underflow are divided by a power of two, which is exact
    scale = 1.0 if 1e-12 < top < 1e12 else 2.0 ** math.frexp(top)[1]
    with factors.exact_products(rows.device):
        start, guess = start_directions(rows, rank, init), _earlier_codes(rows, rank, init)
        flat = rows if rows.ndim == 3 else rows.unsqueeze(0)
        if scale != 1.0:
            flat, guess = flat / scale, None
        if isinstance(start, Tensor):
            start = start.reshape(len(flat), rank, -1)
        state = fit(flat, rank, seed=seed, init=start, guess=guess, max_iter=max_iter, tol=tol)
        fits = _finish(flat, state, seed=seed)
        fits = fits if scale == 1.0 else [replace(fit, codes=fit.codes * scale) for fit in fits]
    return fits if rows.ndim == 3 else fits[0]


def _earlier_codes(rows: Tensor, rank: int, init: Any) -> Tensor | None:
    """The codes [b, n, r] if `init` is one or several earlier fits of as many rows, else None."""
    fits = [init] if isinstance(init, Factors) else init
    if isinstance(fits, str | Tensor) or not all(isinstance(fit, Factors) for fit in fits):
        return None
    same = all(fit.codes.shape == (rows.shape[-2], rank) for fit in fits)
    return torch.stack([fit.codes.to(rows) for fit in fits]) if same else None


def _finish(rows: Tensor, state: State, *, seed: int) -> list[Factors]:
    """The results for rows [b, n, d], with exact codes and the error computed from the residual."""
    codes = factors.nonnegative_codes(rows, state.directions, start=state.codes).to(rows.dtype)
    total = squares(rows)
    errors = (factors.squared_error(rows, codes, state.directions) / total).tolist()
    running = (torch.stack(state.history) / total).T.tolist()
    centre = rows.new_zeros(rows.shape[-1])
    fits = []
    for z, D, error, past, passes in zip(codes, state.directions, errors, running, state.passes, strict=True):
        # rounding of the running values must not make them smaller than the final error
        history = (*(max(value, error) for value in _without_repeats(past)), error)
        fits.append(Factors(z, D, centre, error, history, "semi_nmf", seed, passes))
    return fits


def _without_repeats(past: list[float]) -> list[float]:
    """The history of a fit without the repeated last value, which it has while others of its batch continue."""
    while len(past) > 1 and past[-1] == past[-2]:
        past = past[:-1]
    return past


def start_directions(rows: Tensor, rank: int, init: Any) -> str | Tensor:
    """`init`, checked: the name of an initialisation, or directions [..., r, d] in the type of the rows."""
    if isinstance(init, str):
        if init not in INITS:
            raise unknown_name("init", init, INITS)
        return init
    if isinstance(init, list | tuple) and all(isinstance(fit, Factors) for fit in init):
        init = torch.stack([fit.directions for fit in init])
    given = torch.as_tensor(init.directions if isinstance(init, Factors) else init)
    wanted = (*rows.shape[:-2], rank, rows.shape[-1])
    if tuple(given.shape) != wanted:
        raise AnisoscopeError(f"init has shape {tuple(given.shape)}; expected directions of shape {wanted}.")
    given = given.detach().to(rows)
    if not bool(given.isfinite().all()):
        raise AnisoscopeError("init holds directions that are not finite; give others, or a name.")
    return given


@dataclass
class State:
    """A batch of fits in progress: codes [b, n, r], directions [b, r, d], ‖R‖² [b] and its earlier values."""

    codes: Tensor
    directions: Tensor
    value: Tensor
    history: list[Tensor]
    passes: list[int]  # passes over the rows that the initialisation of each fit took


def fit(
    X: Tensor,
    rank: int,
    *,
    seed: int,
    init: str | Tensor,
    max_iter: int = MAX_ITER,
    tol: float | None = None,
    guess: Tensor | None = None,
    quick: bool = False,
) -> State:
    """Fit each of X [b, n, d] until it has converged; directions have norm 1.

    Concepts are sorted by energy, largest first, unless `init` is directions, whose order is kept. `guess` holds codes
    of nearly the same rows for these directions: a few steps from there replace the exact codes. `quick`: as in
    `positive_vector`.
    """
    codes, passes = _first_codes(X, rank, seed=seed, init=init, guess=guess, quick=quick)
    directions = least_squares(codes, codes.mT @ X).to(X.dtype)
    norms = norms_of(directions)
    codes, directions = codes * norms.mT, directions / norms
    value = factors.squared_error(X, codes, directions)
    state = State(codes, directions, value, [value], passes)
    if isinstance(init, str) and init not in NEAR:
        _iterate(X, state, max_iter=max_iter, tol=TOL_FAR if tol is None else tol)
    else:
        _refine(X, state, max_iter=max_iter, tol=TOL_NEAR if tol is None else tol)
    if isinstance(init, str):
        order = torch.argsort(factors.energy_shares(state.codes, state.directions), descending=True, stable=True)
        state.codes = state.codes.gather(-1, order.unsqueeze(-2).expand_as(state.codes))
        state.directions = state.directions.gather(-2, order.unsqueeze(-1).expand_as(state.directions))
    return state


def _refine(X: Tensor, state: State, *, max_iter: int, tol: float) -> None:
    """Iterate from a good start; a fit ends when the update of the codes shows that an iteration gains less than `tol`.

    The gains of half-iterations decrease, so twice the gain of the codes bounds that of an iteration.
    """
    floor = _rounding(X)
    done = state.value <= floor
    for _ in range(max_iter):
        going = ~done
        codes, gain = _improve_codes(X, state.directions, state.codes)
        state.codes = torch.where(going[:, None, None], codes, state.codes)
        done = done | (2.0 * gain <= tol * state.value)
        if bool(done.all()):
            break
        before = state.value
        better = _improve_directions(X, state, ~done)
        # the gain of the codes is mostly rounding if the fit is good, so the gain of the iteration is tested as well
        done = done | ~better | (before - state.value <= tol * before) | (state.value <= floor)


def _improve_codes(X: Tensor, directions: Tensor, start: Tensor, *, inner: int = _INNER) -> tuple[Tensor, Tensor]:
    """Codes after a few gradient steps from `start` at fixed directions, and the decrease of ‖R‖² [b]."""
    wide = directions.double()
    return descent(wide @ wide.mT, X @ directions.mT, start, steps=inner)


def _improve_directions(X: Tensor, state: State, going: Tensor) -> Tensor:
    """Set the least squares directions of the fits that are `going`; returns which fits [b] have a lower error."""
    value, projected = factors.error_and_gradient(X, state.codes, state.directions)
    change = least_squares(state.codes, projected)  # a correction from the residual loses no digits
    value = value - (change * projected).sum((-2, -1))
    better = going & (value < state.value)
    directions = (state.directions.double() - change).to(X.dtype)
    norms = norms_of(directions)
    take = better[:, None, None]
    state.codes = torch.where(take, state.codes * norms.mT, state.codes)
    state.directions = torch.where(take, directions / norms, state.directions)
    state.value = torch.where(better, value, state.value)
    state.history.append(state.value)
    return better


def _iterate(
    X: Tensor, state: State, *, max_iter: int, tol: float, inner: int = _INNER, least: Tensor | None = None
) -> None:
    """Iterate from a random or k-means start until an iteration lowers the error by less than the relative `tol`.

    Codes are extrapolated along their last change (Accelerating Nonnegative Matrix Factorization Algorithms Using
    Extrapolation, arXiv:1805.06604); a step that raises the error is rejected, and the next is not extrapolated.
    Above the error `least`, which no fit can have less of, smaller decreases count as well.
    """
    floor = _rounding(X)
    done = state.value <= floor
    last, carry = state.codes, torch.full_like(state.value, _CARRY)
    for _ in range(max_iter):
        if bool(done.all()):
            break
        before, codes = state.value, state.codes
        ahead = torch.lerp(last, codes, 1.0 + carry.to(codes.dtype)[:, None, None]).clamp_(min=0.0)
        tried = State(_improve_codes(X, state.directions, ahead, inner=inner)[0], state.directions, state.value, [], [])
        better = _improve_directions(X, tried, ~done)
        small = before - tried.value <= tol * before
        if least is not None:
            small = small & (before - tried.value <= _CLOSER * (before - least))
        small = small | (tried.value <= floor)
        done = done | torch.where(better, small, carry == 0)
        carry = torch.where(better, (carry * _FASTER).clamp(_CARRY / 2, _MOST_CARRY), 0.0)
        take = better[:, None, None]
        last = codes
        state.codes = torch.where(take, tried.codes, codes)
        state.directions, state.value = tried.directions, tried.value
        state.history.append(state.value)


def _rounding(X: Tensor) -> Tensor:
    """‖R‖² [b] that rounding of the rows alone would give."""
    return 4.0 * torch.finfo(X.dtype).eps ** 2 * squares(X)


def _first_codes(
    X: Tensor, rank: int, *, seed: int, init: str | Tensor, guess: Tensor | None, quick: bool
) -> tuple[Tensor, list[int]]:
    """Initial codes [b, n, r], and the passes over the rows that they took in each fit."""
    none = [0] * len(X)
    if isinstance(init, Tensor) and guess is not None:
        return _improve_codes(X, init, guess)[0], none
    if isinstance(init, Tensor):
        return factors.nonnegative_codes(X, init).to(X.dtype), none
    if init in NEAR:
        codes, passes = start_codes(X, rank, seed=seed, corners=init == "corners", quick=quick)
        return codes, [passes] * len(X)
    generator = torch.Generator().manual_seed(seed)
    if init == "random":
        return torch.rand(X.shape[-2], rank, generator=generator).to(X).expand(*X.shape[:-1], rank), none
    found = factors.k_means(X, rank, seed=seed, max_iter=20)
    steps = [len(_without_repeats(past)) for past in torch.stack(found.history, -1).tolist()]
    return found.assigned.to(X.dtype) + 0.2, steps  # 0.2 as in the paper


def start_codes(X: Tensor, rank: int, *, seed: int, corners: bool = False, quick: bool = False) -> tuple[Tensor, int]:
    """Initial non-negative codes [..., n, r] of rows [..., n, d], and the passes over the rows that they took.

    The error of the least squares directions for them is near the minimum, but with `corners` where the extreme rows
    are the concepts: then these are not moved to lower it.

    >>> codes, passes = start_codes(torch.eye(3), 2, seed=0)
    >>> codes.shape, passes
    (torch.Size([3, 2]), 1)
    """
    found = leading_axes(X, rank, keep=2 * rank, seed=seed, cycles=1)
    scale = found.energies.sum(-1).rsqrt() * X.shape[-2] ** 0.5
    scores = found.scores * scale.to(X.dtype)[..., None, None]
    unit = Leading(found.directions, scores, found.energies * scale.square().unsqueeze(-1))
    w, free, error = positive_vector(unit, rank, quick=quick)
    signed = unit.scores @ free.to(w.dtype)
    signed = signed - w.unsqueeze(-1) * (signed.sum(-2, keepdim=True) / w.sum(-1)[..., None, None])
    corner_codes = _corners(signed, found.directions @ free, rank, seed=seed)
    wide = _shifted(unit, corner_codes, w, error, rank)
    height, inside, steepness = _half_space(unit, rank)
    if not bool((inside > _POINTED).any()):
        return _polished(unit, wide), found.passes
    n, d = X.shape[-2:]  # noise: the mean square of a row in each direction beyond the r leading ones
    left = (squares(X) - found.energies[..., :rank].sum(-1)).clamp_min(0.0)
    noise = left / (n * max(1, d - rank)) * scale.square()
    tight, missed = _tight(unit, rank, height=height, steepness=steepness, noise=noise, opened=not corners)
    chosen = ((inside > _POINTED) & (missed <= _FITS))[..., None, None]
    start = torch.where(chosen, tight, wide)
    polished = _polished(unit, start)
    return torch.where(chosen, start, polished) if corners else polished, found.passes


def _polished(found: Leading, codes: Tensor) -> Tensor:
    """Codes after iterations on the leading scores, which cost far less than iterations on the rows."""
    T, energies = found.scores, found.energies
    flat, start = T.reshape(-1, *T.shape[-2:]), codes.reshape(-1, *codes.shape[-2:])
    directions = least_squares(start, start.mT @ flat).to(T.dtype)
    norms = norms_of(directions)
    start, directions = start * norms.mT, directions / norms
    state = State(start, directions, factors.squared_error(flat, start, directions), [], [])
    least = energies[..., codes.shape[-1] :].sum(-1).reshape(-1)
    _iterate(flat, state, max_iter=_POLISH, tol=_POLISHED, inner=_QUICK, least=least)
    return state.codes.reshape(codes.shape)


def positive_vector(found: Leading, rank: int, *, quick: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """w [..., n] ≥ 0 with root mean square 1, the free directions E [..., q, r−1], and the energy of X outside both.

    Alternates between E, the leading eigenvectors of what w leaves, and w, one power step on what E leaves, clipped at
    0. Neither step raises the error. `quick`: vectors are rows of the products, which takes a tenth of the time on the
    host and rounds otherwise.
    """
    T, theta = found.scores, found.energies
    w = _first_w(T, theta, rank)
    best, free, error = w, theta.new_zeros(()), torch.full_like(theta[..., 0], torch.inf)
    for left in reversed(range(_W_STEPS)):
        along = (w.unsqueeze(-2) @ T).squeeze(-2) if quick else (T.mT @ w.unsqueeze(-1)).squeeze(-1)
        projected = along.double()
        value, directions = _free_directions(theta, projected, rank)
        better = value < error
        best = torch.where(better.unsqueeze(-1), w, best)
        free = torch.where(better[..., None, None], directions, free)
        error = torch.where(better, value, error)
        if not left:
            break
        outside = projected - (directions @ (directions.mT @ projected.unsqueeze(-1))).squeeze(-1)
        y = outside.to(T.dtype)
        moved = (y.unsqueeze(-2) @ T.mT).squeeze(-2) if quick else (T @ y.unsqueeze(-1)).squeeze(-1)
        moved = _unit(moved.clamp_min(0.0))
        w = torch.where(moved.any(-1, keepdim=True), moved, w)
    return best * T.shape[-2] ** 0.5, free, error


def _first_w(T: Tensor, theta: Tensor, rank: int) -> Tensor:
    """The first w: the best of the leading scores and of a constant projected on their span, clipped at 0."""
    lead = T[..., :rank]
    sides = torch.where((lead.square() * lead).sum(-2, keepdim=True) < 0, -lead, lead)
    floor = 1e-9 * theta[..., :1]
    level = lead @ (lead.sum(-2).double() / theta[..., :rank].clamp_min(floor)).to(T.dtype).unsqueeze(-1)
    inside = level.square().mean(-2, keepdim=True) > _LEVEL  # in centred rows there is only rounding of it
    tried = _unit(torch.cat([sides, level * inside], -1).clamp_min(0.0), dim=-2)
    projected = (T.mT @ tried).double().mT
    values = small_eigenvalues(_without(theta.unsqueeze(-2), projected))
    value = torch.where(tried.any(-2), values[..., : values.shape[-1] - rank + 1].sum(-1), torch.inf)
    return tried.gather(-1, value.argmin(-1)[..., None, None].expand(*tried.shape[:-1], 1)).squeeze(-1)


def _free_directions(theta: Tensor, projected: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The energy outside w and the r − 1 leading directions orthogonal to it, and these; `projected` = Tᵀw, ‖w‖ = 1."""
    values, vectors = small_eigh(_without(theta, projected))
    others = values.shape[-1] - (rank - 1)
    return values[..., :others].sum(-1), vectors[..., others:]


def _without(theta: Tensor, projected: Tensor) -> Tensor:
    """The Gram matrix of the scores without their part along w."""
    return torch.diag_embed(theta.expand(projected.shape)) - projected.unsqueeze(-1) * projected.unsqueeze(-2)


def _unit(x: Tensor, *, dim: int = -1) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=dim, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)


def _corners(signed: Tensor, axes: Tensor, rank: int, *, seed: int) -> Tensor:
    """P [..., n, r]: the coordinate of each row along each corner of the simplex; corners sum to 0.

    `axes` [..., d, r−1] are the directions of the columns of `signed` in the space of the rows.
    """
    if rank == 1:
        return signed.new_zeros(*signed.shape[:-1], 1)
    wide = signed.double()
    values, vectors = small_eigh(wide.mT @ wide / wide.shape[-2])
    alive = values > 1e-9 * values[..., -1:]
    whiten = vectors * torch.where(alive, values.clamp_min(torch.finfo(values.dtype).tiny).rsqrt(), 0.0).unsqueeze(-2)
    W = signed @ whiten.to(signed.dtype)
    # r unit vectors in r − 1 dimensions, all at the same angle
    simplex = torch.linalg.eigh(torch.eye(rank, dtype=torch.float64) - 1.0 / rank)[1][:, 1:]
    simplex = (simplex / torch.linalg.vector_norm(simplex, dim=1, keepdim=True)).to(signed)
    return W @ _rotation_to_tails(W, axes @ vectors, simplex, seed=seed) @ simplex.mT * ((rank - 1) / rank)


def _rotation_to_tails(W: Tensor, axes: Tensor, simplex: Tensor, *, seed: int) -> Tensor:
    """The rotation R that (locally) maximises Σ max(0, W R Sᵀ)³, a convex function that no polar step lowers.

    Its start is random in the space of the rows and not in the coordinates W, whose signs are those of eigenvectors and
    change with rounding: with them R would end at another maximum.
    """
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(axes.shape[-2], simplex.shape[1], generator=generator, dtype=torch.float64).to(axes.device)
    R = _polar(axes.mT @ random).to(W.dtype)
    for _ in range(_TURNS):
        slope = (W @ (R @ simplex.mT)).clamp_(0.0, 7.0).square_()  # clipped so that one outlier does not dominate
        R = _polar((W.mT @ slope @ simplex).double()).to(W.dtype)
    return R


def _polar(matrix: Tensor) -> Tensor:
    """The orthogonal matrix nearest to a square one."""
    left, _, right = solve_small(torch.linalg.svd, matrix)
    return left @ right


def _shifted(found: Leading, corners: Tensor, w: Tensor, error: Tensor, rank: int) -> Tensor:
    """Non-negative codes: the corner coordinates plus the smallest multiple of w with an error near that of w → ∞.

    Rows in which that is not enough are shifted until they are non-negative.
    """
    T, theta = found.scores, found.energies
    allowed = error + _WORSE * (theta[..., rank - 1 :].sum(-1) - error)
    steps = torch.tensor(_SHIFTS, dtype=w.dtype, device=w.device).unsqueeze(-1)
    shifts = torch.maximum(steps * w.unsqueeze(-2), -corners.amin(-1).unsqueeze(-2))  # [..., shifts, n]
    # a shift m is the same for all corners: (P + m1ᵀ)ᵀ(P + m1ᵀ) and (P + m1ᵀ)ᵀT need no further pass over P
    wide, far = corners.double(), shifts.double()
    along = far @ wide
    gram = (wide.mT @ wide).unsqueeze(-3) + along.unsqueeze(-1) + along.unsqueeze(-2)
    gram = gram + far.square().sum(-1)[..., None, None]
    projected = (corners.mT @ T).double().unsqueeze(-3) + (shifts @ T).double().unsqueeze(-2)
    norms = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    explained = (_solved(gram, projected, norms) * projected).sum((-2, -1))  # energy of T in the span of the codes
    settled = theta.sum(-1, keepdim=True) - explained <= allowed.unsqueeze(-1)
    first = torch.where(settled.any(-1), settled.to(torch.int8).argmax(-1), len(_SHIFTS) - 1)
    shift = shifts.gather(-2, first[..., None, None].expand(*shifts.shape[:-2], 1, shifts.shape[-1])).squeeze(-2)
    return (corners + shift.unsqueeze(-1)).clamp_min(0.0)


def least_squares(codes: Tensor, projected: Tensor) -> Tensor:
    """D = argmin ‖X − Z D‖² in float64 from Z and `projected` = ZᵀX; a small ridge makes it unique."""
    wide = codes.double()
    return _solved(wide.mT @ wide, projected.double(), torch.linalg.vector_norm(wide, dim=-2))


def _solved(gram: Tensor, projected: Tensor, norms: Tensor) -> Tensor:
    """The same from ZᵀZ and the norms of the columns of Z."""
    norms = torch.where(norms > 0, norms, 1.0).unsqueeze(-1)
    gram = gram / norms / norms.mT
    gram.diagonal(dim1=-2, dim2=-1).add_(1e-11)
    return torch.cholesky_solve(projected / norms, torch.linalg.cholesky_ex(gram)[0]) / norms


def _half_space(found: Leading, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The height of each row along the normal of the best half-space, the share of energy inside it, and ‖normal‖."""
    lead, theta = found.scores[..., :rank], found.energies[..., :rank]
    normal = lead.sum(-2).double() / theta.clamp_min(1e-9 * theta[..., :1])  # the least squares fit of a constant
    height = (lead @ normal.to(lead.dtype).unsqueeze(-1)).squeeze(-1)
    energy = lead.square().sum(-1)
    inside = torch.where(height > 0, energy, 0.0).sum(-1) / energy.sum(-1)
    return height, inside, torch.linalg.vector_norm(normal, dim=-1)


def _tight(
    found: Leading, rank: int, *, height: Tensor, steepness: Tensor, noise: Tensor, opened: bool
) -> tuple[Tensor, Tensor]:
    """Codes in the cone of the extreme rows, and their error in units of the energy of the r-th direction."""
    lead = found.scores[..., :rank]
    lowest = torch.maximum(_CLEAR * noise.sqrt() * steepness, 1e-3 * height.square().mean(-1).sqrt())
    high = height > lowest.unsqueeze(-1)
    seen = torch.where(high.unsqueeze(-1), lead / height.unsqueeze(-1), 0.0)
    spread = rank + seen.square().sum(-1) * steepness.unsqueeze(-1).square()
    blur = (torch.where(high, noise.unsqueeze(-1) / height.square() * spread, 0.0)).to(lead.dtype)
    rays = _unit(_extreme(lead, seen, blur, high))
    wide = rays.double()
    codes, _ = descent(wide @ wide.mT, lead @ rays.mT, torch.zeros_like(lead), steps=_STEPS)
    codes, missed = _opened(lead, rays, codes) if opened else (codes, _missed(lead, codes))
    return codes, missed / found.energies[..., rank - 1].clamp_min(torch.finfo(torch.float64).tiny)


def _opened(lead: Tensor, rays: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of the cone that is opened as little as possible until it holds the rows that noise moved outside.

    Codes plus δ times their sum are those of directions from each of which the same small multiple of their sum is
    taken. Returns codes and their error.
    """
    eye = torch.eye(rays.shape[-1], dtype=torch.float64, device=rays.device)
    free = (lead.double() @ torch.linalg.pinv(rays.double() + 1e-12 * eye)).to(lead.dtype)
    sums = free.sum(-1, keepdim=True).clamp_min(0.0)
    best, error = codes, _missed(lead, codes)
    floor = 1e-12 * squares(lead)
    needed = torch.where(sums > 0, -free.amin(-1, keepdim=True) / sums, 0.0).clamp(0.0, 1.0).squeeze(-1)
    shares = needed.sort(-1).values
    for share in _OPENED:
        shift = shares[..., round(share * (shares.shape[-1] - 1))][..., None, None]
        tried = (free + shift * sums).clamp_min(0.0)
        value = _missed(lead, tried)
        better = value < error - floor
        best, error = torch.where(better[..., None, None], tried, best), torch.where(better, value, error)
    return best, error


def _missed(lead: Tensor, codes: Tensor) -> Tensor:
    return squares(lead - codes @ least_squares(codes, codes.mT @ lead).to(lead.dtype))


def _extreme(lead: Tensor, seen: Tensor, blur: Tensor, high: Tensor) -> Tensor:
    """The corners [..., r, r] of the cone by successive projection: each is the row farthest from the span of the last.

    `seen` are the rows divided by their height. From each distance twice its standard deviation by noise is
    subtracted, and rows within noise of the chosen one are averaged with it.
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
