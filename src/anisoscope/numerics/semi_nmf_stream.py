"""Semi-NMF of rows that come in batches, from sums that do not grow.

For fixed codes the best directions depend on two sums only: A = ΣZᵀZ and B = ΣZᵀX, D = A⁻¹B; with s = Σ‖x‖² the error
is s − 2⟨B, D⟩ + ⟨A, DDᵀ⟩. A batch is coded against the directions known so far (the *reference*), its sums are added,
and the directions are solved again (Mairal et al. 2010, arXiv:0908.0050). Codes are never kept.

- One batch: the fit of `semi_nmf` on it.
- With a given reference and `refresh=False` the sums do not depend on how the rows are cut into batches, nor on their
  order, and streams merge exactly: update, merge and the empty stream are a commutative monoid. A pass over the
  data and `refreshed()` is then one exact iteration of the whole fit: the error never increases from pass to pass.
- With `refresh=True` (the default) the reference follows the data; a `forgetting` below 1 lets old batches fade, for
  rows whose geometry drifts, as in training. Streams with different references merge by matching concepts, which is
  an approximation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError
from anisoscope.numerics.cones import squares
from anisoscope.numerics.factors import Factors, as_rows, exact_products, relative_error
from anisoscope.numerics.nnls import nonnegative_codes
from anisoscope.numerics.semi_nmf import semi_nmf, unit_rows

_ENOUGH = 8  # rows per concept before the first directions are fitted


class SemiNMFStream:
    """Semi-NMF by `update(rows)`, `merge(other)`, then `directions`, `error`, `factors(rows)`.

    >>> stream = SemiNMFStream(2).update(torch.eye(4)[:, :3].repeat(8, 1))
    >>> stream.n, stream.directions.shape
    (32, torch.Size([2, 3]))
    """

    def __init__(
        self, rank: int, *, seed: int = 0, init: Any = None, forgetting: float = 1.0, refresh: bool = True
    ) -> None:
        if not 0.0 < forgetting <= 1.0:
            raise AnisoscopeError(f"forgetting is {forgetting}; expected above 0 and at most 1 (nothing is forgotten).")
        self.rank, self.seed, self.forgetting, self.refresh = rank, seed, forgetting, refresh
        self.n = 0
        self._pending: list[Tensor] = []
        self._reference: Tensor | None = None
        if init is not None:
            given = init.directions if isinstance(init, Factors) else init
            self._reference = unit_rows(as_rows(given).double())
            if len(self._reference) != rank:
                raise AnisoscopeError(f"init has {len(self._reference)} directions; expected {rank}, the rank.")
        self._codes_sum: Tensor | None = None  # A
        self._rows_sum: Tensor | None = None  # B
        self._energy = 0.0  # s

    def update(self, rows: Any) -> SemiNMFStream:
        """Add a batch of rows [n, d]."""
        x = as_rows(rows, width=None if self._reference is None else self._reference.shape[1])
        bad = int((~x.isfinite().all(1)).sum())
        if bad:
            raise AnisoscopeError(f"{bad} of {len(x)} rows are not finite; drop them first.")
        self.n += len(x)
        with exact_products(x.device):
            if self._reference is None:
                self._wait(x)
            else:
                self._add(x, self._reference.to(x.device))
        return self

    def merge(self, other: SemiNMFStream) -> SemiNMFStream:
        """The stream of both sets of rows; neither is changed."""
        if self.rank != other.rank:
            raise AnisoscopeError(f"streams of rank {self.rank} and {other.rank} cannot be merged; use one rank.")
        first, second = (self, other) if self._codes_sum is not None else (other, self)
        out = first._copy()
        out.n = self.n + other.n
        if second._codes_sum is not None and second._rows_sum is not None:
            order = _matching(first, second)
            assert out._codes_sum is not None and out._rows_sum is not None
            out._codes_sum = out._codes_sum + second._codes_sum[order][:, order]
            out._rows_sum = out._rows_sum + second._rows_sum[order]
            out._energy += second._energy
            if out.refresh:
                out._reference = out._solved()
        for rows in second._pending:
            out.n -= len(rows)
            out.update(rows)
        return out

    @property
    def directions(self) -> Tensor:
        """D = A⁻¹B with rows of norm 1, in float64; a concept that no row has used keeps its reference."""
        self._settle()
        return unit_rows(self._solved())

    @property
    def error(self) -> float:
        """Of all rows so far with the codes they were given, relative to their energy."""
        self._settle()
        assert self._codes_sum is not None and self._rows_sum is not None
        D = self._solved()
        left = self._energy - 2.0 * (self._rows_sum * D).sum() + (self._codes_sum * (D @ D.mT)).sum()
        return max(0.0, float(left)) / self._energy

    def factors(self, rows: Any) -> Factors:
        """The directions with the codes and the error of these rows."""
        x, found = as_rows(rows), self.directions
        directions = found.to(x)
        with exact_products(x.device):
            codes = nonnegative_codes(x, directions).to(x.dtype)
            error = relative_error(x, codes, directions, total=float(squares(x)))
        return Factors(codes, directions, x.new_zeros(x.shape[1]), error, (error,), "semi_nmf", self.seed)

    def refreshed(self) -> SemiNMFStream:
        """An empty stream that starts from the directions of this one: the next pass over the data."""
        return SemiNMFStream(
            self.rank, seed=self.seed, init=self.directions, forgetting=self.forgetting, refresh=self.refresh
        )

    def _wait(self, x: Tensor) -> None:
        """The first directions are fitted once there are enough rows."""
        self._pending.append(x.clone())
        if sum(map(len, self._pending)) >= max(_ENOUGH * self.rank, self.rank):
            self._settle()

    def _settle(self) -> None:
        if self._reference is None and self._pending:
            rows = torch.cat(self._pending)
            found = semi_nmf(rows, self.rank, seed=self.seed)
            self._pending = []
            self._reference = found.directions.double()
            self._take(found.codes.double(), rows)
        if self._codes_sum is None:
            raise AnisoscopeError("the stream has seen no rows; update it first.")

    def _add(self, x: Tensor, reference: Tensor) -> None:
        self._take(nonnegative_codes(x, reference), x)
        if self.refresh:
            self._reference = self._solved()  # not scaled: the codes summed so far belong to this scale

    def _take(self, codes: Tensor, rows: Tensor) -> None:
        wide, keep = rows.double(), self.forgetting
        A, B, s = codes.mT @ codes, codes.mT @ wide, float(squares(wide))
        if self._codes_sum is not None and self._rows_sum is not None:
            A, B, s = keep * self._codes_sum + A, keep * self._rows_sum + B, keep * self._energy + s
        self._codes_sum, self._rows_sum, self._energy = A, B, s

    def _solved(self) -> Tensor:
        """A⁻¹B; what A does not determine stays as in the reference."""
        assert self._codes_sum is not None and self._rows_sum is not None and self._reference is not None
        A, D = self._codes_sum, self._reference.to(self._codes_sum.device)
        return D + torch.linalg.pinv(A, rtol=1e-12, hermitian=True) @ (self._rows_sum - A @ D)

    def _copy(self) -> SemiNMFStream:
        out = SemiNMFStream(self.rank, seed=self.seed, forgetting=self.forgetting, refresh=self.refresh)
        out.n, out._pending = self.n, list(self._pending)
        out._reference, out._energy = self._reference, self._energy
        out._codes_sum, out._rows_sum = self._codes_sum, self._rows_sum
        return out


def _matching(first: SemiNMFStream, second: SemiNMFStream) -> Tensor:
    """Which concept of the second each concept of the first is; the same order where they share a reference."""
    one, two = first._reference, second._reference
    assert one is not None and two is not None
    if torch.equal(one, two.to(one.device)):
        return torch.arange(first.rank, device=one.device)
    from scipy.optimize import linear_sum_assignment

    cosines = unit_rows(first.directions) @ unit_rows(second.directions).to(one.device).mT
    return torch.as_tensor(linear_sum_assignment(-cosines.cpu().numpy())[1], device=one.device)
