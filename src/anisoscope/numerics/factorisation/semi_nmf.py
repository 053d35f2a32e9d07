"""Semi-non-negative matrix factorisation: X ≈ Z D with Z ≥ 0 (Ding, Li and Jordan 2010, doi:10.1109/TPAMI.2008.277).

In turn: the directions by least squares, and the codes by accelerated projected gradient on the r×r Gram matrix, no row
ever getting worse. The objective never increases. The start decides nearly everything (see `cones`): from
there a handful of steps suffice, where the multiplicative updates of the paper need thousands.
Notation: X n×d rows, Z n×r codes, D r×d directions, R = X − Z D, all with leading dimensions: many fits in one go.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.numerics.factorisation.cones import least_squares, squares, start_codes
from anisoscope.numerics.factorisation.factors import (
    Factors,
    energy_shares,
    exact_products,
    missed,
    rows_to_fit,
    squared_error,
)
from anisoscope.numerics.factorisation.nnls import descend, descent, nonnegative_codes

Init = Literal["svd", "random", "kmeans"] | Factors | Tensor
INITS = ("svd", "random", "kmeans")
MAX_ITER = 200
TOL_NEAR, TOL_FAR = 1e-3, 1e-5  # of the error: what an iteration must gain, from a good start and from a plain one
_INNER = 20  # steps on the codes for each of the directions
_CARRY, _FASTER, _MOST_CARRY = 0.5, 1.05, 0.98  # how far codes are carried on, its growth while that helps, its bound


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
    """X ≈ Z D with Z ≥ 0, of the rows as they are: whoever wants them centred centres them before.

    For rows [n, d] the `Factors` of a fit; for [layers, n, d] the list of those of every layer, all fitted in one go.

    `init` is `svd`, `random`, `kmeans`, an earlier fit, or r×d directions (for layers: a list of fits, or
    layers×r×d); from the last two the concepts keep their order, otherwise the one with the most energy comes first.
    The fit ends when an iteration would lower the error by less than `tol` of itself: 1e-3 unless told from `svd` and
    earlier fits, which start near the end, 1e-5 from the others. Directions have norm 1. `mask` chooses the rows that
    count (of each layer the same); the codes are those of these rows.

    On centred rows the error is nearly the only thing that is determined: the codes of all concepts share a common
    part, the non-negative vector that the factorisation cannot do without (see `cones`, and `metrics.concepts` for
    codes without it).

    >>> fit = semi_nmf(torch.eye(3)[[0, 1, 2, 0, 1, 2]], 3)
    >>> round(fit.error, 6), fit.directions.shape, fit.codes.shape
    (0.0, torch.Size([3, 3]), torch.Size([6, 3]))
    >>> [fit.codes.shape for fit in semi_nmf(torch.eye(4).expand(2, 4, 4), 2)]
    [torch.Size([4, 2]), torch.Size([4, 2])]
    """
    rows = rows_to_fit(X, rank, mask, layers=True)
    scale = _scale(rows)
    with exact_products(rows.device):
        start, guess = start_directions(rows, rank, init), _guessed(rows, rank, init)
        flat = rows if rows.ndim == 3 else rows.unsqueeze(0)
        if scale != 1.0:
            flat, guess = flat / scale, None
        if isinstance(start, Tensor):
            start = start.reshape(len(flat), rank, -1)
        state = fit(flat, rank, seed=seed, init=start, guess=guess, max_iter=max_iter, tol=tol)
        fits = _finish(flat, state, seed=seed)
        fits = fits if scale == 1.0 else [replace(fit, codes=fit.codes * scale) for fit in fits]
    return fits if rows.ndim == 3 else fits[0]


def _scale(rows: Tensor) -> float:
    """A power of two, which changes no digit, to divide rows by whose squares would leave the range of their type."""
    top = float(rows.abs().max())
    return 1.0 if 1e-12 < top < 1e12 else 2.0 ** math.frexp(top)[1]


def _guessed(rows: Tensor, rank: int, init: Any) -> Tensor | None:
    """The codes [b, n, r] of earlier fits, where they are of as many rows."""
    fits = [init] if isinstance(init, Factors) else init
    if isinstance(fits, str | Tensor) or not all(isinstance(fit, Factors) for fit in fits):
        return None
    same = all(fit.codes.shape == (rows.shape[-2], rank) for fit in fits)
    return torch.stack([fit.codes.to(rows) for fit in fits]) if same else None


def _finish(rows: Tensor, state: State, *, seed: int) -> list[Factors]:
    """Exact codes, and the error from the residual itself, of each of [b, n, d]."""
    codes = nonnegative_codes(rows, state.directions, start=state.codes).to(rows.dtype)
    total = squares(rows)
    errors = (squared_error(rows, codes, state.directions) / total).tolist()
    running = (torch.stack(state.history) / total).T.tolist()
    centre = rows.new_zeros(rows.shape[-1])
    fits = []
    for z, D, error, past, passes in zip(codes, state.directions, errors, running, state.passes, strict=True):
        # the running values are exact up to rounding; what was found in the end bounds them all
        history = (*(max(value, error) for value in _own(past)), error)
        fits.append(Factors(z, D, centre, error, history, "semi_nmf", seed, passes))
    return fits


def _own(past: list[float]) -> list[float]:
    """The values of a fit without those at the end at which only the others of its batch went on."""
    while len(past) > 1 and past[-1] == past[-2]:
        past = past[:-1]
    return past


def unit_rows(directions: Tensor) -> Tensor:
    return directions / _norms(directions)


def _norms(directions: Tensor) -> Tensor:
    norms = torch.linalg.vector_norm(directions, dim=-1, keepdim=True)
    return torch.where(norms > 0, norms, 1.0)


def start_directions(rows: Tensor, rank: int, init: Any) -> str | Tensor:
    """A name of a start, or r×d directions that fit the rows."""
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
    """Codes [b, n, r] and directions [b, r, d] of fits in progress, ‖R‖² of each, and what it was before."""

    codes: Tensor
    directions: Tensor
    value: Tensor
    history: list[Tensor]
    passes: list[int]  # of each fit: over the rows, both ways, that its start took


def fit(
    X: Tensor,
    rank: int,
    *,
    seed: int,
    init: str | Tensor,
    max_iter: int,
    tol: float | None = None,
    guess: Tensor | None = None,
) -> State:
    """Fits of X [b, n, d], each until it has converged; directions have norm 1, the concept with most energy first.

    Only where directions were given do the concepts keep their order. `guess` holds codes of nearly the same rows for
    given directions: a few steps from there stand for the exact codes.
    """
    codes, passes = _first_codes(X, rank, seed=seed, init=init, guess=guess)
    state = _started(X, codes, passes)
    if isinstance(init, str) and init != "svd":
        _go_far(X, state, max_iter=max_iter, tol=TOL_FAR if tol is None else tol)
    else:
        _go_near(X, state, max_iter=max_iter, tol=TOL_NEAR if tol is None else tol)
    return _ordered(state, sort=isinstance(init, str))


def _go_near(X: Tensor, state: State, *, max_iter: int, tol: float) -> None:
    """From a good start: ended once better codes gain so little that an iteration would gain less than `tol`.

    Half an iteration tells, since the gains of its halves fall in turn. Going on would take long, towards ever flatter
    cones, for little: less than a hundredth of the error on activations, up to a few hundredths where noise is low.
    """
    floor = _rounding(X)
    done = state.value <= floor
    for _ in range(max_iter):
        going = ~done
        wide = state.directions.double()
        codes, gain = descent(wide @ wide.mT, X @ state.directions.mT, state.codes, steps=_INNER)
        state.codes = torch.where(going[:, None, None], codes, state.codes)  # no row is worse
        done = done | (2.0 * gain <= tol * state.value)
        if bool(done.all()):
            break
        before = state.value
        better = _turn(X, state, ~done)
        # the gain of codes of rows that fit well is mostly rounding: what the whole iteration gained tells as well
        done = done | ~better | (before - state.value <= tol * before) | (state.value <= floor)


def _turn(X: Tensor, state: State, going: Tensor) -> Tensor:
    """The best directions for the codes, in those fits that are going on; whether that lowered the error."""
    value, pulled = missed(X, state.codes, state.directions)
    change = least_squares(state.codes, pulled)  # from the residual, which loses no digits
    value = value - (change * pulled).sum((-2, -1))
    better = going & (value < state.value)
    directions = (state.directions.double() - change).to(X.dtype)
    norms = _norms(directions)
    take = better[:, None, None]
    state.codes = torch.where(take, state.codes * norms.mT, state.codes)
    state.directions = torch.where(take, directions / norms, state.directions)
    state.value = torch.where(better, value, state.value)
    state.history.append(state.value)
    return better


def _go_far(X: Tensor, state: State, *, max_iter: int, tol: float) -> None:
    """From a plain start: ended once an iteration lowers the error by less than `tol` of itself.

    Each step goes on from codes that are carried a little farther the way they went (Ang and Gillis 2019,
    arXiv:1805.06604); where that raises the error the step is not taken, and the next one goes from where it was.
    """
    floor = _rounding(X)
    done = state.value <= floor
    last, carry = state.codes, torch.full_like(state.value, _CARRY)
    for _ in range(max_iter):
        if bool(done.all()):
            break
        before, codes = state.value, state.codes
        ahead = torch.lerp(last, codes, 1.0 + carry.to(codes.dtype)[:, None, None]).clamp_(min=0.0)
        tried = State(ahead, state.directions, state.value, [], [])
        wide = state.directions.double()
        tried.codes = descend(wide @ wide.mT, X @ state.directions.mT, tried.codes, steps=_INNER)
        better = _turn(X, tried, ~done)
        small = (before - tried.value <= tol * before) | (tried.value <= floor)
        done = done | torch.where(better, small, carry == 0)
        carry = torch.where(better, (carry * _FASTER).clamp(_CARRY / 2, _MOST_CARRY), 0.0)
        take = better[:, None, None]
        last = codes
        state.codes = torch.where(take, tried.codes, codes)
        state.directions, state.value = tried.directions, tried.value
        state.history.append(state.value)


def _rounding(X: Tensor) -> Tensor:
    """The error of rows that were only rounded."""
    return 4.0 * torch.finfo(X.dtype).eps ** 2 * squares(X)


def _ordered(state: State, *, sort: bool) -> State:
    codes, directions = state.codes, state.directions
    if sort:
        order = torch.argsort(energy_shares(codes, directions), dim=-1, descending=True, stable=True)
        codes = codes.gather(-1, order.unsqueeze(-2).expand_as(codes))
        directions = directions.gather(-2, order.unsqueeze(-1).expand_as(directions))
    return replace(state, codes=codes, directions=directions)


def _first_codes(
    X: Tensor, rank: int, *, seed: int, init: str | Tensor, guess: Tensor | None
) -> tuple[Tensor, list[int]]:
    """Codes to start from, and the passes over the rows that they took in each fit."""
    none = [0] * len(X)
    if isinstance(init, Tensor) and guess is not None:
        wide = init.double()
        return descend(wide @ wide.mT, X @ init.mT, guess, steps=_INNER), none
    if isinstance(init, Tensor):
        return nonnegative_codes(X, init).to(X.dtype), none
    if init == "svd":
        codes, passes = start_codes(X, rank, seed=seed)
        return codes, [passes] * len(X)
    generator = torch.Generator().manual_seed(seed)
    if init == "random":
        return torch.rand(X.shape[-2], rank, generator=generator).to(X).expand(*X.shape[:-1], rank), none
    from anisoscope.numerics.factorisation.k_means import k_means

    found = k_means(X, rank, seed=seed, max_iter=20)
    steps = [len(_own(past)) for past in torch.stack(found.history, -1).tolist()]
    return found.assigned.to(X.dtype) + 0.2, steps  # as Ding et al. start


def _started(X: Tensor, codes: Tensor, passes: list[int]) -> State:
    directions = least_squares(codes, codes.mT @ X).to(X.dtype)
    norms = _norms(directions)
    codes, directions = codes * norms.mT, directions / norms
    value = squared_error(X, codes, directions)
    return State(codes, directions, value, [value], passes)
