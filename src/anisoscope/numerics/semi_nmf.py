"""Semi-non-negative matrix factorisation: X ≈ Z D with Z ≥ 0 (Ding, Li and Jordan 2010, doi:10.1109/TPAMI.2008.277).

In turn: the codes by accelerated projected gradient on the r×r Gram matrix, no row ever getting worse, and the
directions by least squares. The objective never increases. The start decides nearly everything (see `cones`): from
there a handful of steps suffice, where the multiplicative updates of the paper need thousands.
Notation: X n×d rows, Z n×r codes, D r×d directions, R = X − Z D, all with leading dimensions: many fits in one go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.numerics.cones import least_squares, squares, start_codes
from anisoscope.numerics.factors import (
    Factors,
    energy_shares,
    exact_products,
    relative_error,
    rows_to_fit,
)
from anisoscope.numerics.nnls import descend, nonnegative_codes

Init = Literal["svd", "random", "kmeans"] | Factors | Tensor
INITS = ("svd", "random", "kmeans")
MAX_ITER, TOL = 200, 1e-5
_INNER = 20  # steps on the codes for each of the directions
_CARRY, _FASTER, _MOST_CARRY = 0.5, 1.05, 0.98  # how far codes are carried on, its growth while that helps, its bound


def semi_nmf(
    X: Any,
    rank: int,
    *,
    seed: int = 0,
    init: Any = "svd",
    max_iter: int = MAX_ITER,
    tol: float = TOL,
    mask: Any = None,
) -> Factors:
    """X ≈ Z D with Z ≥ 0, of the rows as they are: whoever wants them centred centres them before.

    `init` is `svd`, `random`, `kmeans`, an earlier fit, or r×d directions; from the last two the concepts keep their
    order, otherwise the one with the most energy comes first. The fit ends when an iteration lowers the error by less
    than `tol` of itself. Directions have norm 1. `mask` chooses the rows that count; the codes are those of these rows.

    On centred rows the error is nearly the only thing that is determined: the codes of all concepts share a common
    part, the non-negative vector that the factorisation cannot do without (see `cones`, and `metrics.concepts` for
    codes without it).

    >>> fit = semi_nmf(torch.eye(3)[[0, 1, 2, 0, 1, 2]], 3)
    >>> round(fit.error, 6), fit.directions.shape, fit.codes.shape
    (0.0, torch.Size([3, 3]), torch.Size([6, 3]))
    """
    rows = rows_to_fit(X, rank, mask)
    with exact_products(rows.device):
        start = start_directions(rows, rank, init)
        same = isinstance(init, Factors) and init.codes.shape == (len(rows), rank)
        guess = init.codes.to(rows).unsqueeze(0) if same else None
        state = fit(rows.unsqueeze(0), rank, seed=seed, init=start, guess=guess, max_iter=max_iter, tol=tol)
        return _finish(rows, state, seed=seed)


def _finish(rows: Tensor, state: State, *, seed: int) -> Factors:
    """Exact codes, and the error from the residual itself."""
    total = float(squares(rows))
    directions = state.directions[0]
    codes = nonnegative_codes(rows, directions, start=state.codes[0]).to(rows.dtype)
    error = relative_error(rows, codes, directions, total=total)
    # the running values are exact up to rounding; what was found in the end bounds them all
    history = (*(max(float(value[0]) / total, error) for value in state.history), error)
    return Factors(codes, directions, rows.new_zeros(rows.shape[1]), error, history, "semi_nmf", seed)


def unit_rows(directions: Tensor) -> Tensor:
    norms = torch.linalg.vector_norm(directions, dim=-1, keepdim=True)
    return directions / torch.where(norms > 0, norms, 1.0)


def start_directions(rows: Tensor, rank: int, init: Any) -> str | Tensor:
    """A name of a start, or r×d directions that fit the rows."""
    if isinstance(init, str):
        if init not in INITS:
            raise unknown_name("init", init, INITS)
        return init
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
    memory: Tensor  # for R [b, n, d], used again: fresh pages cost as much as the product


def fit(
    X: Tensor, rank: int, *, seed: int, init: str | Tensor, max_iter: int, tol: float, guess: Tensor | None = None
) -> State:
    """Fits of X [b, n, d], each until it has converged; directions have norm 1, the concept with most energy first.

    Only where directions were given do the concepts keep their order. From a plain start each step goes on from codes
    that are carried a little farther the way they went (Ang and Gillis 2019, arXiv:1805.06604); where that raises the
    error the step is not taken, and the next one goes from where it was. From a good start it would only go on
    for long towards ever flatter cones, for less than a hundredth of the error. `guess` holds codes of nearly the
    same rows for given directions; only time depends on it.
    """
    plain = isinstance(init, str) and init != "svd"
    state = _started(X, _first_codes(X, rank, seed=seed, init=init, guess=guess))
    floor = 4.0 * torch.finfo(X.dtype).eps ** 2 * squares(X)  # the error of rows that were only rounded
    done = state.value <= floor
    last, carry = state.codes, torch.full_like(state.value, _CARRY if plain else 0.0)
    for _ in range(max_iter):
        if bool(done.all()):
            break
        codes, directions, value = _iterate(X, state, _carried(last, state.codes, carry) if plain else state.codes)
        better = ~done & (value < state.value)
        small = (state.value - value <= tol * state.value) | (value <= floor)
        done = done | torch.where(better, small, carry == 0)
        carry = torch.where(better, (carry * _FASTER).clamp(_CARRY / 2, _MOST_CARRY), 0.0) if plain else carry
        take = better[:, None, None]
        last = state.codes
        state.codes = torch.where(take, codes, state.codes)
        state.directions = torch.where(take, directions, state.directions)
        state.value = torch.where(better, value, state.value)
        state.history.append(state.value)
    return _ordered(state, sort=isinstance(init, str))


def _carried(last: Tensor, codes: Tensor, carry: Tensor) -> Tensor:
    return torch.lerp(last, codes, 1.0 + carry.to(codes.dtype)[:, None, None]).clamp_(min=0.0)


def _ordered(state: State, *, sort: bool) -> State:
    codes, directions = state.codes, state.directions
    if sort:
        order = torch.argsort(energy_shares(codes, directions), dim=-1, descending=True, stable=True)
        codes = codes.gather(-1, order.unsqueeze(-2).expand_as(codes))
        directions = directions.gather(-2, order.unsqueeze(-1).expand_as(directions))
    norms = torch.linalg.vector_norm(directions, dim=-1, keepdim=True)
    return State(codes * norms.mT, unit_rows(directions), state.value, state.history, state.memory)


def _first_codes(X: Tensor, rank: int, *, seed: int, init: str | Tensor, guess: Tensor | None) -> Tensor:
    if isinstance(init, Tensor):
        return nonnegative_codes(X, init, start=guess).to(X.dtype)
    if init == "svd":
        return start_codes(X, rank, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    if init == "random":
        return torch.rand(X.shape[-2], rank, generator=generator).to(X).expand(*X.shape[:-1], rank)
    from anisoscope.numerics.clusters import k_means

    return k_means(X, rank, seed=seed, max_iter=20).assigned.to(X.dtype) + 0.2  # as Ding et al. start


def _started(X: Tensor, codes: Tensor) -> State:
    directions = least_squares(codes, codes.mT @ X).to(X.dtype)
    memory = torch.empty_like(X)
    value = squares(torch.bmm(codes, directions, out=memory).sub_(X))
    return State(codes, directions, value, [value], memory)


def _iterate(X: Tensor, state: State, codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes better than these, then the best directions for them, and ‖R‖² with both."""
    norms = torch.linalg.vector_norm(state.directions, dim=-1, keepdim=True)
    norms = torch.where(norms > 0, norms, 1.0)
    unit = state.directions / norms
    wide = unit.double()
    codes = descend(wide @ wide.mT, X @ unit.mT, codes * norms.mT, steps=_INNER)
    surplus = torch.bmm(codes, unit, out=state.memory).sub_(X)  # −R
    pulled = (codes.mT @ surplus).double()
    change = least_squares(codes, pulled)  # of the directions: from the residual, which loses no digits
    value = squares(surplus) - (change * pulled).sum((-2, -1))
    return codes, (wide - change).to(X.dtype), value
