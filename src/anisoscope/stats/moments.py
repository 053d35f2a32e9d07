"""Mergeable first and second moments of rows, in float64 (`Trace`: float32 where a device has no float64).

Notation: n rows x of width d, m their mean, Σ (x−m)(x−m)ᵀ their scatter; leading dimensions (heads) are carried along.
Of gradients g: Σ ggᵀ (uncentred) and Σ ggᵀ/‖g‖² (each row with equal weight), which give the energy in any subspace and
in its complement; both merge by addition. Of the rows h of many sites at once: S sites, k rows of each, u = h/‖h‖.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from anisoscope.numerics.hashing import FOLDS, fold_of
from anisoscope.numerics.host import float64_copy, together
from anisoscope.numerics.linalg import add_gram, eigenvalues, has_float64
from anisoscope.stats.directions import UNSET, Additive
from anisoscope.stats.left_out import LeftOutSpectra, enough_rows
from anisoscope.stats.spectra import DeviceSpectra, Spectrum

_NARROW = 384  # columns below which spectra are faster on the host
_COLUMNS, _FEWEST_COLUMNS = 1 << 21, 256  # elements, and least columns, of wide rows that are read at a time
# elements at a time; on the host their float64 copy fits into the cache, on a device it takes little memory
_BLOCK, _BLOCK_ON_DEVICE = 3 << 19, 1 << 22
_BLOCK_ROWS = 1024  # minimum rows of a block, because every block updates the whole d×d matrix


@dataclass(frozen=True)
class HeldRows:
    """Rows that wait to be added: a tensor, or those at some places of one that others hold as well."""

    source: Tensor  # never changed
    at: Tensor | None = None  # None: all of them

    def __len__(self) -> int:
        return len(self.source if self.at is None else self.at)

    def gathered(self, columns: slice | None = None) -> Tensor:
        """The rows; of few columns, only these are copied."""
        rows = self.source if columns is None else self.source[..., columns]
        return rows if self.at is None else rows.index_select(0, self.at.to(rows.device))


class Moments:
    """(n, mean, scatter) of rows [n, …, d]; n may be a tensor of counts where the leading dimension are several sets.

    Rows are buffered until there are as many as the width. The buffer never takes more memory than the scatter, makes
    few large products out of many small ones, and spares streams of few rows the d×d matrix.

    >>> m = Moments().update(torch.tensor([[0.0, 1.0], [2.0, 1.0]]))
    >>> m.n, m.mean.tolist(), m.scatter.tolist()
    (2, [1.0, 1.0], [[2.0, 0.0], [0.0, 0.0]])
    """

    def __init__(self, n: Any = 0, mean: Tensor = UNSET, scatter: Tensor = UNSET) -> None:
        self._n, self._mean, self._scatter = n, mean, scatter
        self._pending: list[HeldRows] = []
        self.spectra: dict[bool, Tensor] = {}  # eigenvalues of all lines, by whether rows are centred
        self._sums: dict[tuple[bool, bool], Spectrum] = {}  # by whether rows are centred, and an entropy is wanted
        self._left_out: dict[bool, LeftOutSpectra | DeviceSpectra] = {}

    def update(self, x: Tensor) -> Moments:
        if not len(x):
            return self
        self._forget()
        enough = max(x.shape[-1], 64)
        if not self._pending and len(x) >= enough:
            self._take(x)
        else:  # a copy, because x may be a view of a batch, which would be kept alive or overwritten
            self._wait(HeldRows(x.clone()))
        return self

    def hold(self, x: Tensor, at: Tensor) -> Moments:
        """Add the rows at some places of a tensor that nobody will change; they are not copied while they wait."""
        self._forget()
        self._wait(HeldRows(x, at))
        return self

    def _forget(self) -> None:
        for known in (self.spectra, self._sums, self._left_out):
            known.clear()

    def _wait(self, rows: HeldRows) -> None:
        self._pending.append(rows)
        if sum(map(len, self._pending)) >= max(rows.source.shape[-1], 64):
            self._fold()

    def merge(self, other: Moments) -> Moments:
        """The moments of both sets of rows; neither is changed."""
        out = Moments()
        if self.thin and other.thin and self.n + other.n <= max(self.width, other.width):
            out._pending = [*self._pending, *other._pending]  # shared: rows are never changed
            return out
        for part in (self, other):
            part._fold()
            if part._mean is not None:
                out._add(part._n, part._mean, part._scatter)
        return out

    @property
    def n(self) -> Any:
        return self._n + sum(map(len, self._pending))

    @property
    def thin(self) -> bool:
        """Whether only rows are held, no more than the width (or none), and no d×d matrix."""
        rows = self._pending
        return self._mean is None and (not rows or (rows[0].source.ndim == 2 and self.n <= self.width))

    @property
    def rows(self) -> list[HeldRows]:
        """The rows that are held, of thin moments."""
        return self._pending

    @property
    def energy(self) -> float:
        """Σ‖x‖² over all rows and heads; makes no d×d matrix."""
        if self.thin:
            parts = column_blocks(self.n, self.width)
            return sum(float(rows.gathered(part).double().square().sum()) for part in parts for rows in self.rows)
        return float(self.scatter.diagonal(dim1=-2, dim2=-1).sum() + self.n * self.mean.square().sum())

    @property
    def trace(self) -> Tensor:
        """tr of the scatter: the variance times n."""
        return self.scatter.diagonal(dim1=-2, dim2=-1).sum(-1)

    @property
    def along_mean(self) -> Tensor:
        """mᵀSm: the variance along the mean row, times n‖m‖²."""
        return (self.mean * (self.scatter @ self.mean.unsqueeze(-1)).squeeze(-1)).sum(-1)

    @property
    def mean(self) -> Tensor:
        self._fold()
        assert self._mean is not None, "moments of no rows"
        return self._mean

    @property
    def scatter(self) -> Tensor:
        self._fold()
        return self._scatter

    @property
    def width(self) -> int:
        held = self._pending[0].source if self._pending else self._mean
        return 0 if held is None else held.shape[-1]

    def matrix(self, *, centred: bool) -> Tensor:
        """The scatter, or the uncentred Σ x xᵀ."""
        n = self.n[..., None, None] if isinstance(self.n, Tensor) else self.n
        return self.scatter if centred else self.scatter + n * self.mean.unsqueeze(-1) * self.mean.unsqueeze(-2)

    def eigenvalues(self, *, centred: bool = True) -> Tensor:
        """Squared singular values of the rows, descending; cached."""
        if centred not in self.spectra:
            matrix = self.matrix(centred=centred)
            wide = matrix.ndim == 3 and self.width >= _NARROW and matrix.device.type == "cpu"
            self.spectra[centred] = torch.stack(together(eigenvalues, list(matrix))) if wide else eigenvalues(matrix)
        return self.spectra[centred]

    def spectrum(self, *, centred: bool = True, entropy: bool = False) -> Spectrum:
        """Sums over the eigenvalues, those of logarithms where an `entropy` is wanted; cached.

        Of many rows, lines without a fold need no eigenvalue problem each.
        """
        if (centred, entropy) not in self._sums:
            if entropy:
                self.spectrum(centred=centred)  # so that what is asked first changes nothing
            self._sums[centred, entropy] = self._summed(centred, entropy=entropy)
        return self._sums[centred, entropy]

    def whole_spectrum(self, *, centred: bool = True) -> Tensor:
        """The eigenvalues [d] of the first line."""
        if centred in self._left_out and centred not in self.spectra:
            return self._left_out[centred].values
        values = self.eigenvalues(centred=centred)
        return values if values.ndim == 1 else values[0]

    def solved(self, *, centred: bool) -> bool:
        """Whether the eigenvalues of the first line are there."""
        return centred in self.spectra or centred in self._left_out

    def spares_spectra(self, *, centred: bool) -> bool:
        """Whether these are lines whose spectra without a fold need not be solved one by one."""
        if self.mean.ndim != 2 or self.width < _NARROW or len(self.mean) <= 2 or centred in self.spectra:
            return False
        return self.mean.device.type != "cpu" or enough_rows(self.n.flatten(), self.width)

    def _summed(self, centred: bool, *, entropy: bool) -> Spectrum:
        if centred not in self._left_out and self.spares_spectra(centred=centred):
            kind = LeftOutSpectra if self.mean.device.type == "cpu" else DeviceSpectra
            self._left_out[centred] = kind(self.matrix(centred=centred))
        found = self._left_out[centred].spectrum(entropy=entropy) if centred in self._left_out else None
        return Spectrum.of(self.eigenvalues(centred=centred)) if found is None else found

    def head(self, index: int) -> Moments:
        return Moments(self.n, self.mean[index], self.scatter[index])

    def on_host(self) -> Moments:
        """The same moments on the host, except wide ones, whose spectra are faster on the device."""
        if self.thin or (self.width >= _NARROW and self.mean.ndim == 1):
            return self
        return Moments(self.n, self.mean.cpu(), self.scatter.cpu())

    def state(self) -> dict[str, Tensor]:
        """Tensors by name; rows that wait are kept as rows: what goes on from here adds them with those that follow.

        So the last digits do not depend on when it was saved, and a save makes no d×d matrix of few rows.
        """
        waiting = {"rows": torch.cat([rows.gathered() for rows in self._pending])} if self._pending else {}
        added = {} if self._mean is None else {"mean": self._mean, "scatter": self._scatter}
        return {"n": torch.tensor(self._n), **added, **waiting}

    @classmethod
    def load(cls, state: dict[str, Tensor]) -> Moments:
        found = cls(int(state["n"]), state["mean"], state["scatter"]) if "mean" in state else cls()
        return found.update(state["rows"]) if "rows" in state else found

    def _fold(self) -> None:
        """Add the moments of the buffered rows."""
        if self._pending:
            x, self._pending = torch.cat([rows.gathered() for rows in self._pending]), []
            self._take(x)

    @staticmethod
    def block_rows(x: Tensor) -> int:
        """The number of rows [n, …, d] per block."""
        size = _BLOCK if x.device.type == "cpu" else _BLOCK_ON_DEVICE
        return max(_BLOCK_ROWS, size // max(1, x.shape[1:].numel()))

    def _take(self, x: Tensor) -> None:
        """Add the moments of blocks of rows, centred on their own mean so that a large common mean costs no digits."""
        for block in x.split(self.block_rows(x)):
            rows = block.movedim(0, -2)  # heads first: [..., n, d]
            if has_float64(x.device):
                centred = float64_copy(rows)
                mean = centred.mean(-2)
                centred -= mean.unsqueeze(-2)
                self._merge_mean(len(block), mean)
                add_gram(self._scatter, centred.to(self._scatter.device))
            else:  # centred float32 products, summed on the host
                shift = rows.mean(-2, keepdim=True)
                centred = rows - shift
                rest = centred.mean(-2).cpu().double()
                scatter = (centred.mT @ centred).cpu().double() - len(block) * rest.unsqueeze(-1) * rest.unsqueeze(-2)
                self._add(len(block), shift.squeeze(-2).cpu().double() + rest, scatter)

    def _add(self, n: int, mean: Tensor, scatter: Tensor) -> None:
        self._merge_mean(n, mean)
        self._scatter += scatter.to(self._scatter.device)  # statistics of a resumed run are on the host

    def _merge_mean(self, n: int, mean: Tensor) -> None:
        """The pairwise update of Chan, Golub and LeVeque (1983), except for adding the scatter of the other part."""
        if self._mean is None:
            self._n, self._mean, self._scatter = n, mean, mean.new_zeros(*mean.shape, mean.shape[-1])
            return
        total, gap = self._n + n, mean.to(self._mean.device) - self._mean
        if gap.ndim == 1:
            self._scatter.addr_(gap, gap, alpha=self._n * n / total)
        else:
            self._scatter += (self._n * n / total * gap).unsqueeze(-1) * gap.unsqueeze(-2)
        self._n, self._mean = total, self._mean + gap * (n / total)


def column_blocks(n: int, width: int) -> Iterator[slice]:
    """Slices of the columns of n rows of which few elements are read at a time."""
    step = max(_FEWEST_COLUMNS, _COLUMNS // max(1, n))
    yield from (slice(start, start + step) for start in range(0, width, step))


@dataclass(frozen=True)
class FoldCovariance:
    """n, Σ(x−s) and Σ(x−s)(x−s)ᵀ by context fold, s the mean of all rows: covariances with and without each fold.

    >>> x = torch.randn(100, 3, dtype=torch.float64)
    >>> torch.allclose(FoldCovariance.of(x, torch.arange(100) % 8).covariance(), torch.cov(x.T))
    True
    """

    n: Tensor  # [FOLDS]
    sums: Tensor  # [FOLDS, d]
    squares: Tensor  # [FOLDS, d, d]

    @classmethod
    def of(cls, x: Tensor, fold: Tensor) -> FoldCovariance:
        fold = fold.cpu()
        rows = float64_copy(x[fold.argsort(stable=True).to(x.device)])
        rows -= rows.mean(0)
        sizes = torch.bincount(fold, minlength=FOLDS)
        parts = rows.split(sizes.tolist())
        n = sizes.to(x.device, torch.float64)
        squares = _grams(parts)
        upper = squares.triu()  # made exactly symmetric, as after a round trip through `packed`
        return cls(n, torch.stack([p.sum(0) for p in parts]), upper + upper.triu(1).mT)

    def covariance(self, without: int | None = None) -> Tensor:
        """The covariance of all rows, or of all but those of one fold."""
        if without is not None:
            return self.covariances([without])[0]
        n, total = self.n.sum(), self.sums.sum(0)
        return (self.squares.sum(0) - torch.outer(total, total) / n) / (n - 1)

    def covariances(self, folds: Sequence[int]) -> Tensor:
        """The covariances without each of some folds [folds, d, d]."""
        at = torch.tensor(folds, device=self.n.device)
        n, total = self.n.sum() - self.n[at], self.sums.sum(0) - self.sums[at]
        scatter = self.squares.sum(0) - self.squares[at] - total.unsqueeze(-1) * (total / n[:, None]).unsqueeze(-2)
        return scatter / (n - 1)[:, None, None]

    def weighted(self, W: Tensor) -> Tensor:
        """tr(CW) of the covariances without each fold in turn, for several symmetric W [k, d, d]: [k, FOLDS].

        >>> x = torch.randn(100, 3, dtype=torch.float64)
        >>> folds, W = FoldCovariance.of(x, torch.arange(100) % 8), torch.diag(torch.arange(3.0).double())
        >>> torch.allclose(folds.weighted(W[None])[0, 2], (folds.covariance(2) @ W).trace())
        True
        """
        rest = 1.0 - torch.eye(FOLDS, dtype=torch.float64, device=self.n.device)
        n, sums = rest @ self.n, rest @ self.sums
        within = W.flatten(1) @ self.squares.flatten(1).mT @ rest
        return (within - ((sums @ W) * sums).sum(-1) / n) / (n - 1)

    def state(self) -> dict[str, Tensor]:
        """Tensors by name, in float64, so that a resumed run equals an uninterrupted one."""
        return {"n": self.n.cpu(), "sums": self.sums.cpu(), "squares": packed(self.squares, torch.float64)}

    @classmethod
    def load(cls, state: dict[str, Tensor]) -> FoldCovariance:
        return cls(state["n"].double(), state["sums"].double(), unpacked(state["squares"]))

    def rescaled(self, kept: Tensor, scale: Tensor) -> FoldCovariance:
        """That of x·scale at some of the coordinates [d']."""
        every = len(kept) == self.sums.shape[-1]
        squares, sums = (
            (self.squares, self.sums) if every else (self.squares[:, kept[:, None], kept], self.sums[:, kept])
        )
        return FoldCovariance(self.n, sums * scale, squares * (scale[:, None] * scale))

    def to(self, device: torch.device) -> FoldCovariance:
        return FoldCovariance(self.n.to(device), self.sums.to(device), self.squares.to(device))


@dataclass
class GradientMoments(Additive):
    """Second moments of the gradients at one site: by context fold, of unit rows, and by group of rows.

    >>> one = GradientMoments().update(torch.eye(4), context=torch.arange(4))
    >>> two = one.merge(one)
    >>> float(two.total.trace()), two.n
    (8.0, 8)
    """

    folds: Tensor = UNSET  # [FOLDS, d, d]
    unit: Tensor = UNSET  # [d, d]
    groups: dict[str, Tensor] = field(default_factory=dict)  # [d, d] each
    counts: dict[str, int] = field(default_factory=dict)  # rows of each group
    still: int = 0  # rows whose gradient is zero
    contexts: int = 0
    parts: dict[str, GradientMoments] = field(default_factory=dict)  # groups that are tested as all rows are

    @property
    def total(self) -> Tensor:
        return self.folds.sum(0)

    def update(
        self,
        g: Tensor,
        *,
        context: Tensor,
        groups: Mapping[str, Tensor] | None = None,
        parts: Mapping[str, Tensor] | None = None,
        fold: Tensor | None = None,
    ) -> GradientMoments:
        """Add gradients [n, d]; `groups` and `parts` are masks [n] on the host. A context in two calls counts twice.

        `fold`: the folds of the rows, on the host, if they are not those of their hashes.
        """
        rows, masks, fold = g.double(), groups or {}, fold_of(context.cpu()) if fold is None else fold
        by_fold = fold.argsort(stable=True).to(rows.device)
        sizes = torch.bincount(fold, minlength=FOLDS).tolist()
        folds = _grams(rows[by_fold].split(sizes))
        norms = rows.norm(dim=1)
        unit = rows / norms.clamp_min(torch.finfo(torch.float64).tiny).unsqueeze(1)
        moments = {name: _moment(rows, mask) for name, mask in masks.items()}
        counts = {name: int(mask.sum()) for name, mask in masks.items()}
        still, contexts = int((norms == 0).sum()), int(context.unique().numel())
        alone = {
            name: GradientMoments().update(rows[mask.to(rows.device)], context=context[mask], fold=fold[mask])
            for name, mask in (parts or {}).items()
        }
        self._add(GradientMoments(len(rows), folds, _grams([unit])[0], moments, counts, still, contexts, alone))
        return self

    def _add(self, other: GradientMoments) -> None:
        super()._add(other)
        for name, moment in other.groups.items():
            self.groups[name] = self.groups[name] + moment if name in self.groups else moment
            self.counts[name] = self.counts.get(name, 0) + other.counts[name]
        for name, part in other.parts.items():
            self.parts[name] = self.parts[name].merge(part) if name in self.parts else part
        self.still, self.contexts = self.still + other.still, self.contexts + other.contexts

    def rescaled(self, kept: Tensor, scale: Tensor) -> GradientMoments:
        """The moments of g·scale at some of the coordinates [d']; those of unit rows are no function of sums."""

        def of(moment: Tensor) -> Tensor:
            inside = moment if len(kept) == moment.shape[-1] else moment[..., kept[:, None], kept]
            return inside * (scale[:, None] * scale)

        groups = {name: of(moment) for name, moment in self.groups.items()}
        parts = {name: part.rescaled(kept, scale) for name, part in self.parts.items()}
        return replace(self, folds=of(self.folds), unit=UNSET, groups=groups, counts=dict(self.counts), parts=parts)

    def to(self, device: torch.device) -> GradientMoments:
        moved: dict[str, Any] = {name: value.to(device) for name, value in self.tensors().items()}
        groups = {name: moment.to(device) for name, moment in self.groups.items()}
        parts = {name: part.to(device) for name, part in self.parts.items()}
        return replace(self, **moved, groups=groups, counts=dict(self.counts), parts=parts)

    def state(self) -> dict[str, Tensor]:
        """Tensors by name: upper triangles in float32, whose rounding (6e-8) is far below the sampling error."""
        if self.folds is None:
            return {}
        sizes = torch.tensor([self.n, self.still, self.contexts])
        groups = {f"group:{name}": packed(moment) for name, moment in self.groups.items()}
        counts = {f"count:{name}": torch.tensor(self.counts[name]) for name in self.groups}
        parts = {f"part:{name}:{key}": x for name, part in self.parts.items() for key, x in part.state().items()}
        return {"folds": packed(self.folds), "unit": packed(self.unit), "sizes": sizes, **groups, **counts, **parts}

    @classmethod
    def load(cls, state: Mapping[str, Tensor]) -> GradientMoments:
        if "folds" not in state:
            return cls()
        names = [name.removeprefix("group:") for name in state if name.startswith("group:")]
        groups = {name: unpacked(state[f"group:{name}"]) for name in names}
        counts = {name: int(state[f"count:{name}"]) for name in names}
        n, still, contexts = state["sizes"].tolist()
        nested: dict[str, dict[str, Tensor]] = {}
        for name in (name for name in state if name.startswith("part:")):
            _, part, key = name.split(":", 2)
            nested.setdefault(part, {})[key] = state[name]
        parts = {name: cls.load(part) for name, part in nested.items()}
        return cls(n, unpacked(state["folds"]), unpacked(state["unit"]), groups, counts, still, contexts, parts)


def _moment(rows: Tensor, mask: Tensor) -> Tensor:
    return _grams([rows[mask.nonzero().squeeze(1).to(rows.device)]])[0]


def _grams(parts: Sequence[Tensor]) -> Tensor:
    """XᵀX of each of some float64 rows [n, d]: [parts, d, d]."""
    if parts[0].device.type != "cpu":
        return torch.stack([rows.mT @ rows for rows in parts])
    out = parts[0].new_zeros(len(parts), parts[0].shape[1], parts[0].shape[1])
    for total, rows in zip(out, parts, strict=True):
        if len(rows):
            add_gram(total, rows.contiguous())
    return out


def packed(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The upper triangle of symmetric matrices [..., d, d], on the host; in float32 by default.

    >>> torch.equal(unpacked(packed(torch.eye(3))), torch.eye(3, dtype=torch.float64))
    True
    """
    d = matrix.shape[-1]
    rows, columns = torch.triu_indices(d, d, device=matrix.device)
    return matrix[..., rows, columns].to(dtype).cpu()


def unpacked(triangle: Tensor) -> Tensor:
    """Symmetric matrices in float64 from their upper triangles."""
    d = int(((8 * triangle.shape[-1] + 1) ** 0.5 - 1) / 2 + 0.5)
    rows, columns = torch.triu_indices(d, d)
    out = torch.zeros(*triangle.shape[:-1], d, d, dtype=torch.float64)
    out[..., rows, columns] = triangle.double()
    return out + out.triu(1).mT


QUANTITIES = ("n", "dropped", "average_cosine", "drift", "mean_norm", "participation_ratio")


@dataclass(frozen=True)
class Trace:
    """Sums over the rows of S sites; `merge` adds those of other rows of the same sites.

    They are taken at every step of trainings that may wait for their host, and so with few operations.
    """

    centred: int  # the first `centred` sites have their scatter about the mean, the others about 0
    counts: Tensor  # [S, 5]: rows kept, Σ1/‖h‖, rows that are not finite, those kept that are not zero, Σ‖h‖
    sums: Tensor  # [S, 2, d]: Σh and Σu
    scatter: Tensor  # [S, d, d]

    @classmethod
    def of(cls, rows: Tensor, valid: Tensor | None = None, *, centred: int) -> Trace:
        """The sums of rows [S, k, d]; rows that are not `valid` [S or 1, k] are padding and ignored.

        >>> rows = torch.tensor([[[0.0, 1.0], [2.0, 1.0], [9.0, 9.0]]])
        >>> found = Trace.of(rows, torch.tensor([[True, True, False]]), centred=1)
        >>> found.n.tolist(), found.sums[:, 0].tolist(), found.scatter.tolist()
        ([2.0], [[2.0, 2.0]], [[[2.0, 0.0], [0.0, 0.0]]])
        """
        norm = torch.linalg.vector_norm(rows, dim=-1, dtype=wide(rows.device))
        finite = norm < torch.inf  # a row that is not finite has no finite norm
        kept = finite if valid is None else finite & valid
        rest = kept.logical_not()
        dropped = rest if valid is None else finite < valid
        x = rows.masked_fill(rest.unsqueeze(-1), 0.0).to(norm.dtype)  # converted last, to halve the memory traffic
        norm.masked_fill_(rest, 0.0)
        inverse = norm.reciprocal().nan_to_num_(posinf=0.0)
        table = torch.stack((kept, inverse, dropped, norm > 0, norm), dim=1)
        sums, counts = table[:, :2] @ x, table.sum(-1)  # one product for both sums, of rows and of unit rows
        about = sums[:centred, :1] / counts[:centred, :1].clamp(min=1).unsqueeze(-1)
        x[:centred].addcmul_(table[:centred, 0].unsqueeze(-1), about, value=-1)
        return cls(centred, counts, sums, x.mT @ x)

    def merge(self, other: Trace) -> Trace:
        """The sums of both sets of rows (Chan, Golub and LeVeque 1983)."""
        gap = (other.mean - self.mean)[: self.centred]
        weight = (self.n * other.n / (self.n + other.n).clamp(min=1))[: self.centred]
        scatter = self.scatter + other.scatter
        scatter[: self.centred] += (weight.unsqueeze(-1) * gap).unsqueeze(-1) * gap.unsqueeze(-2)
        return Trace(self.centred, self.counts + other.counts, self.sums + other.sums, scatter)

    @property
    def n(self) -> Tensor:
        """The rows kept [S]."""
        return self.counts[:, 0]

    @property
    def mean(self) -> Tensor:
        """The mean rows [S, d]; 0 for a site without rows."""
        return self.sums[:, 0] / self.n.clamp(min=1).unsqueeze(-1)

    def quantities(self) -> Tensor:
        """The values of QUANTITIES [S, 6], which need no eigenvalues; NaN where there are too few rows."""
        n, _, dropped, directed, norms = self.counts.unbind(-1)
        drift, units = torch.linalg.vector_norm(self.sums, dim=-1).unbind(-1)
        pairs = directed * (directed - 1)
        cosine = (units.square() - directed) / pairs
        variance = self.scatter.diagonal(dim1=-2, dim2=-1).sum(-1)
        size = torch.linalg.vector_norm(self.scatter.flatten(1), dim=-1)
        found = (n, dropped, cosine.where(pairs > 0, torch.nan), drift / n, norms / n)
        return torch.stack((*found, (variance / size).square()), dim=-1)


def wide(device: torch.device) -> torch.dtype:
    """The most precise floating-point type that a device supports."""
    return torch.float64 if has_float64(device) else torch.float32
