"""What a decomposition of rows is, and what it can be asked for.

Notation: X n×d rows, m their centre (0 unless the method centres), Z n×k codes, D k×d directions, X ≈ Z D + m.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError
from anisoscope.numerics.factorisation.nnls import nonnegative_codes, wide_products
from anisoscope.numerics.linalg import orthonormal_basis

_BLOCK = 1 << 18  # elements of a residual at a time


@dataclass(frozen=True, eq=False)
class Factors:
    """Codes and directions of a fit, `error` = ‖X − decode(codes)‖² / ‖X‖² of the rows used, and how it came about.

    >>> import anisoscope.numerics.factorisation.semi_nmf as s
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
        """How often the rows were gone through both ways: `passes` of the start, then one for each improvement.

        The start counts because each of its passes is such an improvement too, only without the sign of the codes.
        """
        return self.passes + len(self.history) - 1

    @property
    def shares(self) -> Tensor:
        """The part of each concept in the explained energy: ‖z_j‖²‖d_j‖², summing to 1."""
        return energy_shares(self.codes, self.directions)

    def encode(self, Y: Any) -> Tensor:
        """The codes of other rows: the least squares ones (non-negative for semi-NMF), or the nearest centroid."""
        rows = as_rows(Y, width=self.directions.shape[1])
        if rows.device != self.directions.device:
            raise AnisoscopeError(
                f"the rows lie on {rows.device} and the directions on {self.directions.device}; move them together."
            )
        with exact_products(rows.device):
            return encode_rows(rows - self.mean.to(rows.dtype), self.directions, method=self.method).to(rows.dtype)

    def decode(self, Z: Any) -> Tensor:
        """The rows that codes stand for: Z D + m."""
        codes = as_rows(Z, width=self.directions.shape[0]).to(self.directions.device)
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


def relative_error(rows: Tensor, codes: Tensor, directions: Tensor, *, total: float) -> float:
    """‖X − Z D‖² / total."""
    return float(squared_error(rows, codes, directions)) / total


def squared_error(rows: Tensor, codes: Tensor, directions: Tensor) -> Tensor:
    """‖X − Z D‖² [...] in float64, from the residual itself: a difference of squares would lose its digits."""
    return sum((_squares(surplus) for _, surplus in _surpluses(rows, codes, directions)), rows.new_zeros(()).double())


def missed(rows: Tensor, codes: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """‖R‖² [...] and −ZᵀR [..., k, d] of R = X − Z D, in float64."""
    value = pulled = rows.new_zeros(()).double()
    for z, surplus in _surpluses(rows, codes, directions):
        value, pulled = value + _squares(surplus), pulled + (z.mT @ surplus).double()
    return value, pulled


def _surpluses(rows: Tensor, codes: Tensor, directions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Z and Z D − X, on the host by blocks of rows: they stay in the cache, where fresh memory would cost as much."""
    n = rows.shape[-2]
    step = max(16, _BLOCK * n // rows.numel()) if rows.device.type == "cpu" else n
    for i in range(0, n, step):
        z = codes[..., i : i + step, :]
        yield z, (z @ directions).sub_(rows[..., i : i + step, :])


def _squares(surplus: Tensor) -> Tensor:
    return torch.linalg.vector_norm(surplus, dim=-1).double().square().sum(-1)


@contextlib.contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """No gradients, no autocast and no TF32 inside, whatever the training loop around has chosen."""
    chosen = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    half = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    full = torch.autocast(device.type, enabled=False) if half else contextlib.nullcontext()
    try:
        with torch.no_grad(), full:
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = chosen


# input


def as_rows(x: Any, *, width: int | None = None, layers: bool = False) -> Tensor:
    """An n×d float tensor, float32 or float64, from a NumPy or torch array; or an error that names what is wrong.

    With `layers`, one of three dimensions is taken too.
    """
    try:
        rows = torch.as_tensor(x).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise AnisoscopeError(f"seen {type(x).__name__}; expected an n×d array of numbers.") from error
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
    """Half precision and whole numbers promoted; complex ones refused."""
    if rows.is_complex():
        raise AnisoscopeError("the array is complex; expected real numbers, take its real part or its modulus first.")
    if rows.dtype in (torch.float32, torch.float64):
        return rows
    return rows.float() if rows.is_floating_point() else rows.double()


def rows_to_fit(x: Any, rank: int, mask: Any = None, *, layers: bool = False) -> Tensor:
    """The chosen rows, checked: finite, not all zero, and enough of them for the rank.

    With `layers` they may be [layers, n, d], the mask then choosing the same rows of each.
    """
    rows = as_rows(x, layers=layers)
    if mask is not None:
        rows = rows[..., as_mask(mask, rows.shape[-2]).to(rows.device), :]
    check_fit(rows, rank)
    return rows.contiguous()


def as_mask(mask: Any, n: int) -> Tensor:
    chosen = torch.as_tensor(mask)
    if chosen.dtype != torch.bool or tuple(chosen.shape) != (n,):
        raise AnisoscopeError(
            f"the mask has shape {tuple(chosen.shape)} and type {chosen.dtype}; expected one bool for each of {n} rows."
        )
    if not bool(chosen.any()):
        raise AnisoscopeError(f"the mask leaves none of the {n} rows; expected at least one True.")
    return chosen


def check_fit(rows: Tensor, rank: int) -> None:
    """Refuse rows [..., n, d] that no fit of this rank can be made of."""
    n, d = rows.shape[-2:]
    if isinstance(rank, bool) or not isinstance(rank, numbers.Integral) or rank < 1:
        raise AnisoscopeError(f"rank is {rank!r}; expected a whole number of at least 1.")
    if rank > min(n, d):
        what = f"the {n} rows" if n < d else f"the width {d}"
        raise AnisoscopeError(f"rank {rank} is larger than {what}; expected at most {min(n, d)}, give a smaller rank.")
    energy = torch.linalg.vector_norm(rows, dim=(-2, -1))
    if bool((energy.isfinite() & (energy > 0)).all()):
        return  # one look at the rows; only where something is odd, what it is
    finite = rows.isfinite().all(-1)
    if not bool(finite.all()):
        raise AnisoscopeError(f"{int((~finite).sum())} of {finite.numel()} rows are not finite; drop or mask them.")
    if not bool(rows.flatten(-2).any(-1).all()):
        raise AnisoscopeError(f"all {n} rows are zero, so they have no directions; give other rows.")
