"""The result of a decomposition of rows (`Factors`), and the solvers of its codes: non-negative least squares, k-means.

Exact non-negative least squares for many rows at once is block principal pivoting in float64 (Fast Nonnegative Matrix
Factorization: An Active-Set-Like Method and Comparisons, doi:10.1137/110821172): guess which codes are positive, solve
for these alone, exchange all that violate the optimality conditions, or only one where exchanging all would cycle.
Notation: X n×d rows, m their centre (0 unless the method centres), Z n×k codes, D k×d directions, X ≈ Z D + m; G = DDᵀ,
b = Dx of a row, z ≥ 0 its code, y = Gz − b the gradient; at the optimum z ≥ 0, y ≥ 0, zᵀy = 0. For k-means D are the
centroids and Z the one-hot memberships."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, named_type
from anisoscope.numerics.linalg import full_float32, norms_of, orthonormal_basis

_BLOCK = 1 << 18  # elements of the residual computed at a time
_INVERSES = {"cpu": 1 << 22, "cuda": 1 << 25}  # elements of the k×k inverses held at a time
_WIDENED = 1 << 17  # elements of rows converted to float64 at a time
_RIDGE = 1e-11  # added to the Gram matrix of unit directions, so that it is invertible with duplicate directions
_REFINED = 2  # steps of iterative refinement, which remove the effect of the ridge
_SLACK = 1e-10  # relative tolerance of the optimality conditions
_GUESSES = 30  # gradient steps towards the first guess
_FULL = 3  # full exchanges without improvement before only one is exchanged
_ROUNDS = 50  # pivoting rounds, plus 5 per direction; rows not solved by then are solved one by one


@dataclass(frozen=True, eq=False)
class Factors:
    """Codes [n, k] and directions [k, d] of a fit, and `error` = ‖X − decode(codes)‖² / ‖X‖² of the rows used.

    >>> import anisoscope.numerics.semi_nmf as s
    >>> fit = s.semi_nmf(torch.eye(4)[[0, 0, 1, 2, 3, 1]] * 2, 4)
    >>> fit.codes.shape, bool((fit.codes >= 0).all()), round(fit.error, 6), fit.basis().shape
    (torch.Size([6, 4]), True, 0.0, torch.Size([4, 4]))
    """

    codes: Tensor
    directions: Tensor
    mean: Tensor
    error: float
    history: tuple[float, ...]
    method: str
    seed: int
    passes: int = 0

    @property
    def iterations(self) -> int:
        """Passes over the rows (products with X and Xᵀ): `passes` of the initialisation, then one per iteration."""
        return self.passes + len(self.history) - 1

    @property
    def shares(self) -> Tensor:
        """The share of each concept in the explained energy [k]: ‖z_j‖²‖d_j‖², normalised to sum 1."""
        return energy_shares(self.codes, self.directions)

    def encode(self, Y: Any) -> Tensor:
        """The codes of new rows: least squares (non-negative for semi-NMF), or one-hot of the nearest centroid."""
        rows = as_matrix(Y, width=self.directions.shape[1])
        here, there = rows.device, self.directions.device
        if here != there:
            raise AnisoscopeError(f"the rows lie on {here} and the directions on {there}; move them together.")
        with exact_products(rows.device):
            return encode_rows(rows - self.mean.to(rows.dtype), self.directions, method=self.method).to(rows.dtype)

    def decode(self, Z: Any) -> Tensor:
        """The rows reconstructed from codes: Z D + m."""
        codes = as_matrix(Z, width=self.directions.shape[0]).to(self.directions.device)
        dtype = torch.promote_types(codes.dtype, self.directions.dtype)
        with exact_products(codes.device):
            return codes.to(dtype) @ self.directions.to(dtype) + self.mean.to(dtype)

    def basis(self) -> Tensor:
        """A d×r orthonormal basis of the span of the directions, r their numerical rank."""
        return orthonormal_basis(self.directions)


def encode_rows(rows: Tensor, directions: Tensor, *, method: str) -> Tensor:
    """Codes of centred rows, in float64 except for k-means."""
    if method == "semi_nmf":
        return nonnegative_codes(rows, directions)
    if method == "kmeans":
        return nearest_centroid(rows, directions).to(rows.dtype)
    return wide_products(rows, torch.linalg.pinv(directions.double()).mT)


def nearest_centroid(rows: Tensor, centroids: Tensor) -> Tensor:
    """One-hot [..., n, k]: the first centroid with the smallest distance."""
    gaps = centroids.square().sum(-1).unsqueeze(-2) - rows @ (2.0 * centroids.to(rows.dtype)).mT
    return gaps.argmin(-1, keepdim=True) == torch.arange(centroids.shape[-2], device=rows.device)


def energy_shares(codes: Tensor, directions: Tensor) -> Tensor:
    energies = codes.double().square().sum(-2) * directions.double().square().sum(-1)
    return energies / energies.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)


def squared_error(rows: Tensor, codes: Tensor, directions: Tensor) -> Tensor:
    """‖X − Z D‖² [...] in float64, from the residual, because a difference of squares would lose its digits."""
    return sum((squares(residual) for _, residual in _residuals(rows, codes, directions)), rows.new_zeros(()).double())


def error_and_gradient(rows: Tensor, codes: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """‖R‖² [...] and −ZᵀR [..., k, d], half its gradient in D, of R = X − Z D, in float64."""
    value = gradient = rows.new_zeros(()).double()
    for z, residual in _residuals(rows, codes, directions):
        value, gradient = value + squares(residual), gradient + (z.mT @ residual).double()
    return value, gradient


def _residuals(rows: Tensor, codes: Tensor, directions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Z and Z D − X, on the host in blocks of rows that fit into the cache."""
    n = rows.shape[-2]
    step = max(16, _BLOCK * n // rows.numel()) if rows.device.type == "cpu" else n
    for i in range(0, n, step):
        z = codes[..., i : i + step, :]
        yield z, (z @ directions).sub_(rows[..., i : i + step, :])


def squares(X: Tensor) -> Tensor:
    """‖X‖² of each matrix, in float64."""
    return torch.linalg.vector_norm(X, dim=-1).double().square().sum(-1)


@contextlib.contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Disable gradients, autocast and TF32, whatever the surrounding training loop has set."""
    half = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    full = torch.autocast(device.type, enabled=False) if half else contextlib.nullcontext()
    with torch.no_grad(), full_float32(), full:
        yield


def as_matrix(x: Any, *, width: int | None = None, layers: bool = False) -> Tensor:
    """A NumPy or torch array as a float32 or float64 tensor [n, d], with `layers` also [layers, n, d]; or an error."""
    try:
        rows = torch.as_tensor(x).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise AnisoscopeError(f"seen {named_type(x)}; expected an n×d array of numbers.") from error
    if rows.ndim not in ((2, 3) if layers else (2,)) or 0 in rows.shape:
        also = ", or layers × n × d" if layers else ""
        raise AnisoscopeError(
            f"the array has shape {tuple(rows.shape)}; expected n rows × d columns{also}, all at least 1; "
            "reshape it first."
        )
    if width is not None and rows.shape[1] != width:
        raise AnisoscopeError(f"the array has {rows.shape[1]} columns; expected {width}, as in the fit.")
    return as_floats(rows)


def as_floats(rows: Tensor) -> Tensor:
    """Rows in float32 or float64: other real types are converted, complex ones are an error."""
    if rows.is_complex():
        raise AnisoscopeError("the array is complex; expected real numbers, take its real part or its modulus first.")
    if rows.dtype in (torch.float32, torch.float64):
        return rows
    return rows.float() if rows.is_floating_point() else rows.double()


def matrix_to_fit(x: Any, rank: int, mask: Any = None, *, layers: bool = False) -> Tensor:
    """The rows chosen by `mask`, checked: finite, not all zero, and enough of them for the rank.

    With `layers` they may be [layers, n, d]; the mask then selects the same rows of each layer.
    """
    rows = as_matrix(x, layers=layers)
    if mask is not None:
        n, chosen = rows.shape[-2], torch.as_tensor(mask)
        if chosen.dtype != torch.bool or chosen.shape != (n,):
            seen = f"the mask has shape {tuple(chosen.shape)} and type {chosen.dtype}"
            raise AnisoscopeError(f"{seen}; expected one bool for each of {n} rows.")
        if not bool(chosen.any()):
            raise AnisoscopeError(f"the mask leaves none of the {n} rows; expected at least one True.")
        rows = rows[..., chosen.to(rows.device), :]
    check_fit(rows, rank)
    return rows.contiguous()


def check_fit(rows: Tensor, rank: int) -> None:
    """Raise an error if no fit of this rank is possible for rows [..., n, d]."""
    n, d = rows.shape[-2:]
    if isinstance(rank, bool) or not isinstance(rank, numbers.Integral) or rank < 1:
        raise AnisoscopeError(f"rank is {rank!r}; expected a whole number of at least 1.")
    if rank > min(n, d):
        what = f"the {n} rows" if n < d else f"the width {d}"
        raise AnisoscopeError(f"rank {rank} is larger than {what}; expected at most {min(n, d)}, give a smaller rank.")
    energy = torch.linalg.vector_norm(rows, dim=(-2, -1))
    if bool((energy.isfinite() & (energy > 0)).all()):
        return  # one reduction suffices for valid rows; the cause of a failure is looked for below
    finite = rows.isfinite().all(-1)
    if not bool(finite.all()):
        raise AnisoscopeError(f"{int((~finite).sum())} of {finite.numel()} rows are not finite; drop or mask them.")
    if not bool(rows.flatten(-2).any(-1).all()):
        raise AnisoscopeError(f"all {n} rows are zero, so they have no directions; give other rows.")


def nonnegative_codes(rows: Tensor, directions: Tensor, *, start: Tensor | None = None) -> Tensor:
    """argmin over z ≥ 0 of ‖x − zD‖² for each row of [..., n, d], in float64 [..., n, k].

    `start` holds codes near the solution; their positive entries are the first guess, which only affects the run time.

    >>> nonnegative_codes(torch.tensor([[3.0, -1.0]]), torch.eye(2)).tolist()
    [[3.0, 0.0]]
    """
    wide = directions.double()
    norms = norms_of(wide)
    unit = wide / norms
    gram = unit @ unit.mT
    target = wide_products(rows, unit)
    if start is None:  # a few gradient steps from the unconstrained codes, clipped at 0
        ridge = _RIDGE * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        free = torch.cholesky_solve(target.mT, torch.linalg.cholesky_ex(gram + ridge)[0]).mT.clamp_min(0.0)
        start, _ = descent(gram, target.to(rows.dtype), free.to(rows.dtype), steps=_GUESSES)
    n, k = target.shape[-2:]
    passive, flat, grams = (start > 0).reshape(-1, k), target.reshape(-1, k), gram.reshape(-1, k, k)
    owner = torch.arange(len(grams), device=gram.device).repeat_interleave(n)
    step = max(256, _INVERSES.get(gram.device.type, 1 << 22) // (k * k))  # rows at a time, as memory allows
    mine = [slice(i, i + step) for i in range(0, len(flat), step)]
    codes = torch.cat([_pivot(grams, owner[some], flat[some], passive[some]) for some in mine])
    return codes.reshape(target.shape) / norms.mT


def descent(gram: Tensor, target: Tensor, start: Tensor, *, steps: int) -> tuple[Tensor, Tensor]:
    """Codes [..., n, k] ≥ 0 with an error not above that of `start`, and the decrease of ‖R‖² [...].

    Accelerated projected gradient: Nesterov's steps of length 1/λ, λ ≥ the largest eigenvalue of G. In float64: what
    codes have in common is many times what tells them apart, of which float32 would round the third digit.
    """
    dtype, target, start = start.dtype, target.double(), start.double()
    bound = _largest_eigenvalue(gram)[..., None, None]
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    step, pull = eye - gram / bound, target / bound
    codes = ahead = start
    t = 1.0
    for _ in range(steps):
        moved = (ahead @ step).add_(pull).clamp_(min=0.0)
        t, before = (1.0 + math.sqrt(1.0 + 4.0 * t * t)) / 2.0, t
        ahead = torch.lerp(codes, moved, 1.0 + (before - 1.0) / t)
        codes = moved
    fall = _objective(start, gram, target) - _objective(codes, gram, target)
    return torch.where((fall < 0).unsqueeze(-1), start, codes).to(dtype), 2.0 * fall.clamp_min(0.0).sum(-1)


def _objective(codes: Tensor, gram: Tensor, target: Tensor) -> Tensor:
    """½ zᵀGz − zᵀb of each row [..., n], which the codes minimise."""
    return ((codes @ gram).mul_(0.5).sub_(target).mul_(codes)).sum(-1)


def _largest_eigenvalue(gram: Tensor) -> Tensor:
    """‖G¹⁶‖^(1/16): 1 to k^(1/32) times the largest eigenvalue, without device–host synchronisation."""
    bound, power = 1.0, gram
    for doubling in range(5):
        norm = torch.linalg.matrix_norm(power).clamp_min(torch.finfo(gram.dtype).tiny)
        bound = bound * norm ** (0.5**doubling)
        power = power / norm[..., None, None]
        power = power @ power
    return torch.as_tensor(bound)


def wide_products(rows: Tensor, unit: Tensor) -> Tensor:
    """X Dᵀ in float64; rows of lower precision are converted in blocks that fit into the cache."""
    if rows.dtype == torch.float64 or rows.device.type != "cpu":
        return rows.double() @ unit.mT
    step = max(1, _WIDENED // rows.shape[-1])
    n = rows.shape[-2]
    return torch.cat([rows[..., i : i + step, :].double() @ unit.mT for i in range(0, n, step)], -2)


def _pivot(gram: Tensor, owner: Tensor, target: Tensor, passive: Tensor) -> Tensor:
    """Codes by block principal pivoting; `owner` is the index of each row's Gram matrix, `passive` the first guess."""
    k = gram.shape[-1]
    codes = torch.zeros_like(target)
    left = torch.arange(len(target), device=target.device)
    patience = torch.full_like(left, _FULL)
    fewest = torch.full_like(left, k + 1)
    for _ in range(_ROUNDS + 5 * k):
        z, y = _solve(gram, owner, target, passive)
        slack = _SLACK * target.abs().amax(1, keepdim=True)
        wrong = torch.where(passive, z < -_SLACK * z.abs().amax(1, keepdim=True), y < -slack)
        count = wrong.sum(1)
        codes[left] = torch.where(passive, z.clamp_min(0.0), 0.0)
        improved = count < fewest
        last = wrong & (wrong.flip(1).cumsum(1).flip(1) == 1)  # only the last True of each row
        change = torch.where((improved | (patience > 0)).unsqueeze(1), wrong, last)
        patience = torch.where(improved, _FULL, patience - 1)
        fewest = torch.minimum(fewest, count)
        going = (count > 0).nonzero().squeeze(1)
        if not len(going):
            return codes
        passive = (passive ^ change)[going]
        left, owner, target, patience, fewest = (v[going] for v in (left, owner, target, patience, fewest))
    codes[left] = _one_by_one(gram, owner, target)
    return codes


def _solve(gram: Tensor, owner: Tensor, target: Tensor, passive: Tensor) -> tuple[Tensor, Tensor]:
    """z of the passive set and the gradient y; iterative refinement removes the effect of the ridge."""
    first, tile_of, place = _tiles(owner, passive)
    m = passive[first].to(target.dtype)
    masked = gram[owner[first]] * m.unsqueeze(1) * m.unsqueeze(2)
    masked.diagonal(dim1=-2, dim2=-1).add_(1.0 - m + _RIDGE)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky_ex(masked)[0])[tile_of]
    inside, tile_gram = m[tile_of].unsqueeze(1), gram[owner[first][tile_of]] if len(gram) > 1 else gram[0]
    k = target.shape[1]
    tiled = target.new_zeros(len(tile_of) * place[1], k).index_copy_(0, place[0], target).view(-1, place[1], k)
    z = (tiled * inside) @ inverse  # the matrices are symmetric
    for _ in range(_REFINED):
        z = z + ((tiled - z @ tile_gram) * inside) @ inverse
    y = z @ tile_gram - tiled
    return z.reshape(-1, k)[place[0]], y.reshape(-1, k)[place[0]]


def _tiles(owner: Tensor, passive: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, int]]:
    """Group the rows by (owner, passive set), in tiles of the mean size of a group: rows of a group share one inverse.

    Returns the first row of each group, the group of each tile, and the place of each row with the rows per tile.
    """
    # groups are told apart by random 64-bit hashes; a collision would only make the optimality test fail
    random = torch.Generator().manual_seed(0)
    weights = torch.randint(-(2**62), 2**62, (passive.shape[1] + 1,), generator=random).to(owner.device)
    order = ((passive * weights[1:]).sum(1) + owner * weights[0]).sort(stable=True)
    _, counts = torch.unique_consecutive(order.values, return_counts=True)
    size = max(1, len(owner) // len(counts))
    before, tiles = counts.cumsum(0) - counts, (counts + size - 1) // size
    shift = (tiles.cumsum(0) - tiles) * size - before  # from the index of a sorted row to its place in the tiles
    place = torch.empty_like(order.indices)
    place[order.indices] = torch.arange(len(owner), device=owner.device) + shift.repeat_interleave(counts)
    sets = torch.arange(len(counts), device=owner.device)
    return order.indices[before], sets.repeat_interleave(tiles), (place, size)


def _one_by_one(gram: Tensor, owner: Tensor, target: Tensor) -> Tensor:
    """Codes by Lawson and Hanson's active set method, for the rows on which pivoting did not converge."""
    from scipy.optimize import nnls

    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    factors = torch.linalg.cholesky_ex(gram + _RIDGE * eye)[0].mT.cpu()  # ‖Rz − R⁻ᵀb‖² has the same minimum, G = RᵀR
    found = []
    for i, b in zip(owner.tolist(), target.cpu(), strict=True):
        right = torch.linalg.solve_triangular(factors[i].mT, b.unsqueeze(1), upper=False).squeeze(1)
        found.append(torch.from_numpy(nnls(factors[i].numpy(), right.numpy(), maxiter=100 * len(b))[0]))
    return torch.stack(found).to(target.device)


class KMeansFit(NamedTuple):
    """Centroids [..., k, d], one-hot memberships [..., n, k], and the inertia after each step."""

    centroids: Tensor
    assigned: Tensor
    history: list[Tensor]


def k_means(X: Tensor, rank: int, *, seed: int, max_iter: int = 100, tol: float = 1e-5) -> KMeansFit:
    """Lloyd's iteration from k-means++ (Arthur and Vassilvitskii 2007); an empty cluster keeps its centroid.

    >>> k_means(torch.tensor([[0.0], [1.0], [9.0], [10.0]]), 2, seed=0).centroids.sort(0).values.tolist()
    [[0.5], [9.5]]
    """
    shift = X.mean(-2, keepdim=True)  # a large common mean would cost the distances their digits
    rows = X - shift
    centroids = _spread(rows, rank, seed=seed)
    assigned = nearest_centroid(rows, centroids)
    history: list[Tensor] = []
    done = torch.zeros(X.shape[:-2], dtype=torch.bool, device=X.device)
    for _ in range(max_iter):
        members = assigned.to(rows.dtype)
        count = members.sum(-2).unsqueeze(-1)
        moved = (count > 0) & ~done[..., None, None]
        centroids = torch.where(moved, members.mT @ rows / count.clamp_min(1.0), centroids)
        assigned = nearest_centroid(rows, centroids)
        history.append(squared_error(rows, assigned.to(rows.dtype), centroids))
        if len(history) > 1:
            done = done | (history[-2] - history[-1] <= tol * history[-2])
        if bool(done.all()):
            break
    return KMeansFit(centroids + shift, assigned, history)


def _spread(rows: Tensor, rank: int, *, seed: int) -> Tensor:
    """Initial centroids by k-means++: each is a row drawn with probability proportional to its squared distance."""
    generator = torch.Generator().manual_seed(seed)
    n = rows.shape[-2]
    waits = torch.empty(rank, n, dtype=torch.float64).exponential_(generator=generator).to(rows.device)
    chosen: list[Tensor] = []
    gaps = torch.ones(rows.shape[:-1], dtype=torch.float64, device=rows.device)
    for wait in waits:
        # the argmin of exponential variables with rates `gaps` is a draw with probabilities proportional to them
        pick = (wait / gaps.clamp_min(torch.finfo(torch.float64).tiny)).argmin(-1, keepdim=True)
        chosen.append(rows.gather(-2, pick.unsqueeze(-1).expand(*pick.shape, rows.shape[-1])))
        gap = torch.linalg.vector_norm(rows - chosen[-1], dim=-1).double().square()
        gaps = gap if len(chosen) == 1 else torch.minimum(gaps, gap)
    return torch.cat(chosen, -2)
