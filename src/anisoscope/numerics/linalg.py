"""Linear algebra for statistics: spectra, subspaces, and leading directions by Krylov iteration.

Block Krylov iteration with restarts (Randomized Block Krylov Methods for Stronger and Faster Approximate Singular Value
Decomposition, arXiv:1504.05477) needs few passes over the rows. Small problems are solved exactly.
Notation: S d×d scatter of rows, λ its eigenvalues in descending order, σ = √λ the singular values of the rows; X n×d
rows (leading dimensions are carried along), V d×q orthonormal, T = XV, θ = the squared norms of the columns of T,
descending; V are the leading right singular vectors, θ the squared singular values. In `largest_directions`, which
forms no covariance: W n×r zeros and ones (which rows belong to each of r sets), C_j the scatter of set j about its own
mean, Q the Krylov basis, T its tridiagonal matrix, θ the largest eigenvalue of T.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, named_type
from anisoscope.numerics.host import float64_copy, one_blas_thread, room, together

_WIDE = 2048  # columns from which several threads make a spectrum faster
_NARROW = 64  # columns below which NumPy's faster LAPACK does not make up for the call
_WIDENED, _ON_DEVICE = 3 << 18, 1 << 24  # elements converted to float64 at a time; on the host they fit into a cache
_SMALL, _SERIAL = 160, 1 << 20  # columns from which a GPU is faster; k³ of all matrices for which one core is enough
_EMPTY = 1e-6  # singular values below this share of the largest count as 0
_SPARE = 4  # oversampling: columns of a block beyond the wanted ones
_DEPTH = 6  # blocks of one cycle; narrower problems are solved exactly
_CYCLES = 12
_PRECISE = {torch.float32: 2e-4, torch.float64: 1e-7}  # ‖XᵀXv − θv‖ / θ below which a direction has converged
_BLOCK = 16  # Lanczos steps between two convergence tests
_STILL = 1e-7  # relative change of θ in a block of steps that counts as converged, even if its vector has not settled
_SQUARINGS = 16  # T to the power 65536: eigenvalues within 1e-5 of the largest are not separated
# relative residual at convergence; the relative error of θ was 1e-8 in trials, 1e-5 on flat spectra
_CLOSE = 1e-4


def has_float64(device: torch.device) -> bool:
    return device.type != "mps"


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Disable TF32 matrix products, whatever the surrounding training loop has set."""
    chosen = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = chosen


def as_float64(x: Tensor) -> Tensor:
    """x in float64; moved to the host if its device has no float64."""
    return x.double() if has_float64(x.device) else x.cpu().double()


def widened(rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slices of rows [n, …] with their float64 copies, which the caller may overwrite and the next one does.

    >>> [(part, wide.tolist()) for part, wide in widened(torch.ones(2, 1))]
    [(slice(0, 786432, None), [[1.0], [1.0]])]
    """
    size = max(1, (_WIDENED if rows.device.type == "cpu" else _ON_DEVICE) // max(1, rows.shape[1:].numel()))
    for part in (slice(start, start + size) for start in range(0, len(rows), size)):
        yield part, float64_copy(rows[part]) if has_float64(rows.device) else rows[part].cpu().double()


def row_norms(rows: Tensor) -> Tensor:
    """Norms [n] of rows [n, d] in float64, which are converted a few at a time.

    >>> row_norms(torch.tensor([[3.0, 4.0]])).tolist()
    [5.0]
    """
    return torch.cat([lengths(wide) for _, wide in widened(rows)] or [torch.empty(0, dtype=torch.float64)])


def lengths(rows: Tensor) -> Tensor:
    """‖x‖ of float64 rows [..., d]; on the host NumPy's dot products take half the time of a norm.

    >>> lengths(torch.tensor([[3.0, 4.0]]).double()).tolist()
    [5.0]
    """
    if rows.device.type != "cpu" or not hasattr(np, "vecdot"):
        return torch.linalg.vector_norm(rows, dim=-1)
    wide = rows.numpy()
    return torch.from_numpy(np.sqrt(np.vecdot(wide, wide)))


def norms_of(rows: Tensor) -> Tensor:
    """Norms [..., n, 1] by which rows [..., n, d] can be divided: 1 where a row is zero."""
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return torch.where(norms > 0, norms, 1.0)


def add_gram(out: Tensor, x: Tensor) -> None:
    """Add XᵀX of float64 rows […, n, d] to `out` in place; on the host its symmetry saves up to half of the work."""
    half = x.shape[-1] // 2
    if x.device.type != "cpu" or x.ndim > 2 or half < _NARROW // 2:
        out += x.mT @ x
    elif torch.get_num_threads() == 1:  # NumPy recognises xᵀx and calls the symmetric product (syrk)
        product = room("product", out.shape, torch.float64)
        with one_blas_thread():
            np.matmul(x.numpy().T, x.numpy(), out=product.numpy())
        out += product
    else:  # NumPy's threads and torch's would block each other; by symmetry one off-diagonal quarter is copied
        left, right = x[:, :half], x[:, half:]
        out[:half, :half].addmm_(left.T, left)
        out[half:, half:].addmm_(right.T, right)
        corner = left.T @ right
        out[:half, half:] += corner
        out[half:, :half] += corner.T


def eigenvalues(scatter: Tensor) -> Tensor:
    """Eigenvalues of a positive semi-definite matrix, descending; those that are rounding noise are set to 0.

    Below d·ε·λ₁ (ε = 2.2e-16) an eigenvalue is noise of the float64 sums: σ below √(d·ε)·σ₁, 4e-7·σ₁ at d = 768, has
    no correct digit but would still add to Σσ (a layer norm leaves one direction exactly empty).
    """
    if scatter.device.type != "cpu" or scatter.shape[-1] < _NARROW:
        ascending = torch.linalg.eigvalsh(scatter)
    else:  # NumPy's LAPACK is faster than torch's on most processors
        with one_blas_thread() if scatter.shape[-1] <= _WIDE else contextlib.nullcontext():
            ascending = torch.from_numpy(np.linalg.eigvalsh(scatter.numpy()))
    return clean_eigenvalues(ascending)


def clean_eigenvalues(ascending: Tensor) -> Tensor:
    """Eigenvalues of a positive semi-definite matrix, descending, with 0 for those that are rounding noise."""
    values = ascending.flip(-1).clamp_min(0.0)
    noise = values.shape[-1] * torch.finfo(torch.float64).eps * values[..., :1]
    return torch.where(values > noise, values, 0.0)


def small_eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.linalg.eigh` of matrices [..., k, k]; small ones are solved on the host."""
    values, vectors = solve_small(torch.linalg.eigh, matrices)
    return values, vectors


def small_eigenvalues(matrices: Tensor) -> Tensor:
    """`torch.linalg.eigvalsh` of matrices [..., k, k]; small ones are solved on the host."""
    return solve_small(lambda some: (torch.linalg.eigvalsh(some),), matrices)[0]


def solve_small(solve: Callable[[Tensor], Sequence[Tensor]], matrices: Tensor) -> Sequence[Tensor]:
    """What `solve` finds of square matrices [..., k, k] of any device; small ones are solved on the cores of the host.

    A GPU takes a millisecond for one of 16 columns, which a core has in a fiftieth of that, and a training that shares
    the GPU waits meanwhile.
    """
    if matrices.device.type == "cpu" or matrices.shape[-1] > _SMALL:
        return solve(matrices)
    return [found.to(matrices.device) for found in _by_cores(solve, matrices.cpu())]


def _by_cores(solve: Callable[[Tensor], Sequence[Tensor]], matrices: Tensor) -> list[Tensor]:
    k, lead = matrices.shape[-1], matrices.shape[:-2]
    flat = matrices.flatten(0, -3) if lead else matrices.unsqueeze(0)
    cores = torch.get_num_threads() if len(flat) * k**3 > _SERIAL else 1
    parts = together(solve, flat.chunk(min(cores, max(1, len(flat)))))
    return [torch.cat(part).unflatten(0, lead) if lead else part[0][0] for part in zip(*parts, strict=True)]


def leading_eigenvectors(matrix: Tensor, count: int) -> Tensor:
    """Eigenvectors d×count of the largest eigenvalues of a symmetric matrix, largest first.

    On the host only these are computed, at a third of the cost of all of them.

    >>> leading_eigenvectors(torch.diag(torch.arange(100.0).double()), 2).abs().argmax(0).tolist()
    [99, 98]
    """
    d = len(matrix)
    if matrix.device.type != "cpu" or d < _NARROW or 2 * count > d:
        return torch.linalg.eigh(matrix)[1][:, -count:].flip(-1)
    from scipy.linalg import eigh

    with one_blas_thread() if d <= _WIDE else contextlib.nullcontext():
        _, found = eigh(matrix.double().numpy(), subset_by_index=(d - count, d - 1), driver="evr", check_finite=False)
    return torch.from_numpy(found[:, ::-1].copy()).to(matrix.dtype)


def orthonormal_basis(rows: Tensor) -> Tensor:
    """A d×r orthonormal basis of the row space, r the numerical rank.

    >>> orthonormal_basis(torch.tensor([[1.0, 0.0, 0.0], [2.0, 0.0, 0.0]])).shape
    torch.Size([3, 1])
    """
    try:
        rows = torch.as_tensor(rows).double()
    except (TypeError, ValueError, RuntimeError) as error:
        raise AnisoscopeError(f"seen {named_type(rows)}; expected a k×d array of numbers.") from error
    if rows.ndim != 2 or not bool(rows.isfinite().all()) or not bool(rows.any()):
        raise AnisoscopeError(
            f"a matrix of shape {tuple(rows.shape)} spans no subspace; expected finite rows × width, not all zero"
        )
    _, sigma, right = torch.linalg.svd(rows, full_matrices=False)
    return right[: int((sigma > _EMPTY * sigma[0]).sum())].T.contiguous()


def orthonormal_bases(rows: Tensor) -> list[Tensor]:
    """A d×r orthonormal basis of the row space of each of several matrices [b, k, d], batched."""
    rows = rows.double()
    values, vectors = small_eigh(rows @ rows.mT)
    if bool((values[:, 0] <= (100 * _EMPTY) ** 2 * values[:, -1]).any()):  # Gram matrices are too inaccurate
        return [orthonormal_basis(part) for part in rows]
    basis, _ = torch.linalg.qr(rows.mT @ (vectors / values.sqrt().unsqueeze(-2)))
    return list(basis)


def _bases(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    Q1, Q2 = orthonormal_basis(first), orthonormal_basis(second)
    if len(Q1) != len(Q2):
        widths = f"{len(Q1)} and {len(Q2)}"
        raise AnisoscopeError(f"the rows have widths {widths}; expected the same space, align them first")
    return Q1, Q2


def principal_angles(first: Tensor, second: Tensor) -> Tensor:
    """Angles in radians, ascending, between the row spaces of two matrices of the same width."""
    narrow, wide = sorted(_bases(first, second), key=lambda basis: basis.shape[1])
    cosines = torch.linalg.svdvals(wide.T @ narrow).clamp(0.0, 1.0)
    # arccos loses half of the digits near 1; small angles come from the sines of the residual instead
    sines = torch.linalg.svdvals(narrow - wide @ (wide.T @ narrow)).flip(0)[: len(cosines)].clamp(0.0, 1.0)
    return torch.where(cosines > 0.7, torch.arcsin(sines), torch.arccos(cosines))


def subspace_overlap(first: Tensor, second: Tensor) -> float:
    """‖Q₁ᵀQ₂‖_F² / min(r₁, r₂): 1 when one row space contains the other; chance level r/d, r the larger rank.

    >>> subspace_overlap(torch.eye(4)[:2], torch.eye(4)[1:3])
    0.5
    """
    Q1, Q2 = _bases(first, second)
    return float((Q1.T @ Q2).square().sum() / min(Q1.shape[1], Q2.shape[1]))


@dataclass(frozen=True)
class Leading:
    """The q leading directions V [..., d, q] in float64, the scores T = XV [..., n, q], and θ [..., q]."""

    directions: Tensor
    scores: Tensor
    energies: Tensor
    passes: int = 1  # passes over the rows: products with X and its transpose


def leading_axes(X: Tensor, count: int, *, keep: int | None = None, seed: int = 0, cycles: int = _CYCLES) -> Leading:
    """The `count` leading directions of X [..., n, d] and, less accurately, those after them up to `keep`.

    With one cycle the result is an approximation; with more, each of the `count` directions satisfies XᵀXv = θv.

    >>> found = leading_axes(torch.diag(torch.tensor([3.0, 2.0, 1.0])), 2)
    >>> found.energies.tolist()
    [9.0, 4.0]
    """
    n, d = X.shape[-2:]
    keep = min(keep or count, n, d)
    width = min(d, count + _SPARE)
    if min(n, d) <= _DEPTH * width:
        return _exact(X, keep)
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(d, width, generator=generator, dtype=torch.float64).to(X.device)
    basis = torch.linalg.qr(first)[0].expand(*X.shape[:-2], d, width)
    scores = X @ basis.to(X.dtype)
    passes = 0
    for _ in range(cycles):
        spaces, images = [basis], [scores]
        for _ in range(_DEPTH - 1):
            spaces.append(_orthogonal((X.mT @ images[-1]).double(), torch.cat(spaces, -1)))
            images.append(X @ spaces[-1].to(X.dtype))
        found = _best(torch.cat(spaces, -1), torch.cat(images, -1), keep=max(keep, width))
        passes += _DEPTH - 1
        basis, scores = found.directions[..., :width], found.scores[..., :width]
        if cycles > 1 and bool((_residuals(X, found, count) <= _PRECISE[X.dtype]).all()):
            break
    else:
        if cycles > 1:  # no convergence: the spectrum is flat
            return _exact(X, keep)
    return Leading(found.directions[..., :keep], found.scores[..., :keep], found.energies[..., :keep], passes)


def orthonormal_columns(block: Tensor) -> Tensor:
    """An orthonormal basis of the columns of each [..., d, r], as many as there are; a redundant column is 0.

    >>> orthonormal_columns(torch.tensor([[2.0, 0.0], [0.0, 0.0]])).abs().sum(0).tolist()
    [0.0, 1.0]
    """
    block = block.double()
    return _orthogonal(block / norms_of(block.mT).mT, block[..., :0])


def _orthogonal(block: Tensor, against: Tensor) -> Tensor:
    """An orthonormal basis of the part of `block` that is orthogonal to `against`; a redundant column is 0."""
    for _ in range(2):  # the second round removes rounding errors
        block = block - against @ (against.mT @ block)
        values, vectors = small_eigh(block.mT @ block)
        alive = values > 1e-14 * values[..., -1:].clamp_min(torch.finfo(values.dtype).tiny)
        block = block @ (vectors * torch.where(alive, values, torch.inf).rsqrt().unsqueeze(-2))
    return block


def _best(space: Tensor, image: Tensor, *, keep: int) -> Leading:
    """Rayleigh–Ritz: the `keep` directions of largest energy within a space [..., d, m] with image X·space."""
    wide = image.double()
    values, turn = small_eigh(wide.mT @ wide)
    turn = turn.flip(-1)[..., :keep]
    return Leading(space @ turn, image @ turn.to(image.dtype), values.flip(-1)[..., :keep].clamp_min(0.0))


def _residuals(X: Tensor, found: Leading, count: int) -> Tensor:
    theta = found.energies[..., None, :count]
    gap = (X.mT @ found.scores[..., :count]).double() - found.directions[..., :count] * theta
    noise = 1e-12 * theta[..., :1].squeeze(-2)  # directions without energy are arbitrary and count as converged
    return torch.linalg.vector_norm(gap, dim=-2) / theta.squeeze(-2).clamp_min(noise)


def _exact(X: Tensor, keep: int) -> Leading:
    """The leading directions by the smaller of the two Gram matrices, in float64."""
    wide = X.double()
    if X.shape[-2] >= X.shape[-1]:
        turn = small_eigh(wide.mT @ wide)[1].flip(-1)[..., :keep]
    else:
        left = small_eigh(wide @ wide.mT)[1].flip(-1)[..., :keep]
        turn = torch.linalg.qr(wide.mT @ left)[0]
    scores = wide @ turn
    return Leading(turn, scores.to(X.dtype), scores.square().sum(-2))


def largest_directions(x: Tensor, member: Tensor) -> tuple[Tensor, Tensor]:
    """The largest eigenvalue of each C_j [r] and its unit eigenvectors [r, d], by Lanczos with reorthogonalisation.

    `member` is W [n, r].

    >>> rows = torch.tensor([[-2.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, -1.0]], dtype=torch.float64)
    >>> top, _ = largest_directions(rows, torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [1.0, 1.0]]))
    >>> [round(value, 6) for value in top.tolist()]
    [8.0, 2.0]
    """
    member = member.to(x).T.contiguous()  # [r, n]
    mean = member @ x / member.sum(1, keepdim=True).clamp_min(1.0)

    def scatter(v: Tensor) -> Tensor:
        along = (v @ x.T - (mean * v).sum(1, keepdim=True)) * member
        return along @ x  # `along` sums to 0 over each set, so subtracting the mean from x would change nothing

    spread = torch.linspace(-1.0, 1.0, len(x), dtype=x.dtype, device=x.device).add(0.37).cos()  # an arbitrary start
    basis = x.new_zeros(len(member), _BLOCK + 1, x.shape[1])
    basis[:, 0], _ = _unit(scatter((member * spread) @ x))
    diagonal, beside, before = x.new_zeros(0, len(member)), x.new_zeros(0, len(member)), torch.zeros_like(member[:, 0])
    while True:
        more_diagonal, more_beside = _extend(scatter, basis, diagonal)
        diagonal, beside = torch.cat([diagonal, more_diagonal]), torch.cat([beside, more_beside])
        top, weight = _ritz(diagonal, beside)
        settled = (beside[-1] * weight[-1].abs() <= _CLOSE * top) | ((top - before).abs() <= _STILL * top)
        if bool(settled.all()) or len(diagonal) >= x.shape[1]:  # after d steps the Krylov space is complete
            return top.clamp_min(0.0), torch.einsum("rmd,mr->rd", basis[:, :-1], weight)
        before = top
        basis = torch.cat([basis, basis.new_zeros(len(member), _BLOCK, x.shape[1])], 1)


def _extend(scatter: Callable[[Tensor], Tensor], basis: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """_BLOCK Lanczos steps: extends the basis in place and returns the new diagonal and off-diagonal entries of T."""
    diagonal, beside = [], []
    scale = known.amax(0) if len(known) else torch.zeros_like(known.sum(0))
    for step in range(len(known), len(known) + _BLOCK):
        ahead = scatter(basis[:, step])
        diagonal.append((ahead * basis[:, step]).sum(1))
        scale = torch.maximum(scale, diagonal[-1])
        so_far = basis[:, : step + 1]
        for _ in range(2):  # two rounds of reorthogonalisation suffice (Parlett, The Symmetric Eigenvalue Problem)
            along = torch.bmm(so_far, ahead.unsqueeze(2))
            ahead = torch.baddbmm(ahead.unsqueeze(1), along.mT, so_far, alpha=-1.0).squeeze(1)
        basis[:, step + 1], length = _unit(ahead, floor=scale)
        beside.append(length)
    return torch.stack(diagonal), torch.stack(beside)


def _unit(vectors: Tensor, *, floor: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """Unit rows and their lengths; a row that is rounding noise relative to `floor` becomes 0, with length 0."""
    length = torch.linalg.vector_norm(vectors, dim=1)
    there = length > 1e-12 * floor
    return torch.where(there.unsqueeze(1), vectors / length.unsqueeze(1), 0.0), torch.where(there, length, 0.0)


def _ritz(diagonal: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
    """θ [r] and the coefficients of its eigenvector in the basis [m, r], from the entries of T."""
    off = beside[:-1].T
    band = power = torch.diag_embed(diagonal.T) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    for _ in range(_SQUARINGS):  # batched small products are faster than batched small eigenvalue problems
        power = power / power.diagonal(dim1=1, dim2=2).sum(1).clamp_min(1e-300)[:, None, None]
        power = power @ power
    best = power.diagonal(dim1=1, dim2=2).argmax(1)
    weight, _ = _unit(power[torch.arange(len(power), device=power.device), :, best])
    return ((band @ weight.unsqueeze(2)).squeeze(2) * weight).sum(1), weight.T
