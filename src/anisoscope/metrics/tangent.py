"""The energy of gradients in a subspace, random subspaces as a control, and how fitted subspaces change over steps.

Notation: G n×d gradients of the summed loss, M = GᵀG their second moment, C = M / tr(M), Q d×r an orthonormal basis (of
a tangent proxy), e = ‖GQ‖²/‖G‖² the energy of Q, A d×(J·r) Gaussian columns, r at a time a uniformly random subspace.
Everything about gradients is a function of M.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.engine.metric import measured
from anisoscope.numerics.host import together
from anisoscope.numerics.linalg import full_float32, leading_eigenvectors, norms_of, principal_angles

STEPS, SERIES = ("tangent", "sweep", "train"), ("sweep", "train")  # what measures a step, and a change between two
_ARTICLE = "Revisiting Anisotropy, arXiv:2604.08764"
_RIGID = ("rotation", "scale")
_UNIT = (0.0, 1.0)
_share = partial(measured, *STEPS, reference=_ARTICLE, invariant=_RIGID, bounds=_UNIT)
_ratio = partial(measured, *STEPS, reference=_ARTICLE, invariant=("scale",), bounds=_UNIT)
_change = partial(measured, *SERIES, invariant=_RIGID, bounds=_UNIT)
ZETA = 0.2  # shrinkage of IsoScore* (Rudman and Eickhoff 2024)
MOST_OF_WIDTH = 4  # a proxy of more than d/4 directions is no low-rank tangent
_WIDE = 1024  # columns from which an eigenproblem is worth a GPU
TIE = 1e-5  # relative: draws this close to the proxy's energy count as equal (they are float32)


def check_rank(rank: int, *, width: int, rows: int | None = None) -> int:
    """The rank, if it is valid for this width and number of rows; else an error.

    >>> check_rank(16, width=64)
    16
    """
    if rank < 1:
        raise AnisoscopeError(f"rank {rank} spans nothing; expected at least 1.")
    if rank > width // MOST_OF_WIDTH:
        raise AnisoscopeError(
            f"rank {rank} is more than a quarter of the width {width}, no low-rank tangent; expected at most "
            f"{max(1, width // MOST_OF_WIDTH)}: give a smaller rank."
        )
    if rows is not None and rank > rows:
        raise AnisoscopeError(f"rank {rank} is more than the {rows} rows to fit on; give more data or a smaller rank.")
    return rank


def second_moment(G: Tensor) -> Tensor:
    """M = GᵀG in float64 [..., d, d]."""
    rows = G.double()
    return rows.mT @ rows


def row_energies(G: Tensor, Q: Tensor, *, blocks: int = 1) -> Tensor:
    """‖gᵢQ‖² of every row in each of several subspaces side by side in Q [d, blocks·r], in float64 [blocks, n].

    >>> row_energies(torch.tensor([[3.0, 4.0]]), torch.eye(2), blocks=2).tolist()
    [[9.0], [16.0]]
    """
    with full_float32():
        return (G @ Q.to(G.dtype)).double().square().unflatten(1, (blocks, -1)).sum(-1).T


@_share(
    title="Gradient energy",
    formula="‖GQ‖² / ‖G‖²",
    convention="G the gradients of the summed loss at the test rows, pooled (average=row: the mean of row ratios); Q "
    "fitted on other contexts; with control=… of a subspace of the same rank",
)
def gradient_energy(M: Tensor, Q: Tensor) -> Tensor:
    """Share of the gradients' energy that lies in the span of the proxy; r/d by chance.

    >>> Q = torch.eye(4, dtype=torch.float64)[:, :2]
    >>> float(gradient_energy(torch.diag(torch.tensor([3.0, 0.0, 1.0, 0.0], dtype=torch.float64)), Q))
    0.75
    """
    inside = ((M @ Q.to(M.dtype)) * Q.to(M.dtype)).sum((-2, -1))
    return inside / _trace(M)


@_share(
    title="Enrichment",
    formula="energy / (r/d)",
    convention="of the proxy alone: controls have none",
    bounds=(0.0, None),
)
def gradient_enrichment(energy: float, width: int, rank: int) -> float:
    """Energy in units of chance: 1 where gradients know nothing of the proxy.

    >>> gradient_enrichment(0.75, 4, 2)
    1.5
    """
    return energy * (width / rank)


@_ratio(
    title="Ratio to the normal control",
    formula="energy(Q_T) / mean energy(Q_N)",
    convention="Q_N random subspaces of the orthogonal complement of Q_T; the interval is their 95 % band",
    bounds=(0.0, None),
)
def gradient_ratio(energy: float, control: float) -> float:
    """Energy of the proxy over the mean energy of subspaces orthogonal to it.

    >>> gradient_ratio(0.6, 0.2), gradient_ratio(0.6, 0.0)
    (2.9999999999999996, inf)
    """
    if control > 0:
        return energy / control
    return math.inf if control == 0 and energy > 0 else math.nan


@_share(
    title="Anisotropy share",
    formula="‖Qᵀ(C − tr(C)/d·I)Q‖² / ‖C − tr(C)/d·I‖²",
    convention="C the second moment of the gradients, not centred; the note says whether tr(QᵀCQ)/r lies above tr(C)/d",
)
def gradient_share(C: Tensor, Q: Tensor) -> Tensor:
    """Share of the gradients' departure from isotropy that lies in the proxy; r(r+1)/d² by chance."""
    return Anisotropy(C).held(Q)[0]


@_share(
    title="IsoScore* gain",
    formula="IsoScore*(C outside Q) − IsoScore*(C)",
    reference="IsoScore* of Rudman & Eickhoff 2024, arXiv:2305.19358",
    convention="ζ = 0.2; C compressed to the orthogonal complement of Q; 0 for an isotropic C",
    bounds=(-1.0, 1.0),
)
def gradient_isoscore_gain(C: Tensor, Q: Tensor) -> Tensor:
    """How much more isotropic the gradients are without the proxy's directions."""
    return Anisotropy(C).held(Q)[2]


class Anisotropy:
    """The anisotropy of second moments C [..., d, d], and its share in given subspaces (NaN if C is isotropic)."""

    def __init__(self, C: Tensor) -> None:
        self.C, self.level = C, _trace(C) / C.shape[-1]
        self.whole = _deviation(C, self.level)
        self.squares = self.whole + C.shape[-1] * self.level**2  # ‖C‖², because C − level·I has no trace

    def held(self, Q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """gradient_share of Q, tr(QᵀCQ)/r over tr(C)/d (above 1 the share is excess energy), gradient_isoscore_gain.

        Q is one subspace [d, r], or one for each C.
        """
        return self.held_each([Q])[0]

    def held_each(self, subspaces: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """As `held`, of several subspaces in one product with C."""
        bases = [Q.to(self.C.dtype).expand(*self.C.shape[:-1], Q.shape[-1]) for Q in subspaces]
        images = (self.C @ torch.cat(bases, -1)).split([Q.shape[-1] for Q in bases], -1)
        return [self._held(Q, image) for Q, image in zip(bases, images, strict=True)]

    def _held(self, Q: Tensor, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        d, r = Q.shape[-2:]
        inside = Q.mT @ image
        nothing = self.whole <= (1e-12 * self.level) ** 2 * d
        share = torch.where(nothing, torch.nan, _deviation(inside, self.level) / self.whole)
        sums = (_trace(inside), inside.square().sum((-2, -1)), image.square().sum((-2, -1)))
        gain = _gain(_trace(self.C), self.squares, *sums, width=d, rank=r)
        return share, _trace(inside) / r / self.level, gain


def _deviation(C: Tensor, level: Tensor) -> Tensor:
    """‖C − level·I‖_F²."""
    beside = C - torch.diag_embed(level.unsqueeze(-1).expand(C.shape[:-1]))
    return torch.linalg.vector_norm(beside, dim=(-2, -1)).square()


def _gain(
    trace: Tensor, squares: Tensor, inside: Tensor, own: Tensor, images: Tensor, *, width: int, rank: int
) -> Tensor:
    """The gain from tr C, ‖C‖², tr(QᵀCQ), ‖QᵀCQ‖², ‖CQ‖²: with P = I − QQᵀ, ‖PCP‖² = ‖C‖² − 2‖CQ‖² + ‖QᵀCQ‖².

    IsoScore* is (PR − 1)/(d − 1) of (1−ζ)C + ζ tr(C)/d·I, from tr(C) and ‖C‖_F².
    """

    def iso_score_star(trace: Tensor, squares: Tensor, d: int) -> Tensor:
        shrunk = (1 - ZETA) ** 2 * squares + (2 * (1 - ZETA) * ZETA + ZETA**2) * trace**2 / d
        return (trace**2 / shrunk - 1) / (d - 1)

    rest = squares - 2 * images + own
    return iso_score_star(trace - inside, rest, width - rank) - iso_score_star(trace, squares, width)


def _trace(C: Tensor) -> Tensor:
    return C.diagonal(dim1=-2, dim2=-1).sum(-1)


@dataclass(frozen=True)
class Control:
    """The energy in random subspaces of the same rank, one value per draw; shares and gains only if requested."""

    energy: Tensor  # [..., J]
    share: Tensor | None = None
    gain: Tensor | None = None

    def by_metric(self) -> dict[str, Tensor]:
        named = {"gradient_energy": self.energy, "gradient_share": self.share, "gradient_isoscore_gain": self.gain}
        return {metric: values for metric, values in named.items() if values is not None}


@lru_cache(maxsize=16)
def _gaussian(d: int, r: int, draws: int, seed: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Gaussian columns as rows Aᵀ [J·r, d], the Gram matrix of each block of r [J, r, r], and its inverse."""
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(d, draws * r, generator=generator).to(device)
    rows = A.mT.contiguous()  # a block lies together in memory
    blocks = rows.unflatten(0, (-1, r))
    gram = blocks @ blocks.mT
    return rows, gram, _inverse(gram)


def _inverse(gram: Tensor) -> Tensor:
    """Of positive definite matrices, without a check, for which a device would wait."""
    return torch.cholesky_inverse(torch.linalg.cholesky_ex(gram)[0])


class Draws:
    """Uniformly random subspaces of rank r, in the whole space and in the complement of a proxy.

    With A Gaussian, the columns A(AᵀA)^(−½) span a uniformly random subspace, so only AᵀMA and AᵀA are needed; in the
    complement of Q the same holds for A − QQᵀA. One product MA serves every proxy.
    """

    def __init__(self, width: int, rank: int, *, draws: int = 999, seed: int = 0, device: str = "cpu") -> None:
        self.rank, self.draws = rank, draws
        self.rows, self.gram, self.inverse = _gaussian(width, rank, draws, seed, device)
        self._beyond: list[tuple[Tensor, Tensor]] = []

    @full_float32()
    def of(self, M: Tensor, along: Sequence[Tensor] = (), *, shares: bool = True) -> Measured:
        """The draws against a second moment [d, d], or one of each of several sites [S, d, d].

        `along` are the proxies whose complements will be asked for, each [d, r] or [S, d, r]: their products are made
        in the same pass over the draws. Without `shares` there are energies alone.
        """
        C = M / _trace(M)[..., None, None]
        sides = [_sides(C, Q, shares=shares) for Q in along]
        products = self._products(torch.cat([C.float(), *sides], -1), squares=shares)
        inside, rest = products[0], products[-1].split([side.shape[-1] for side in sides], -1)
        known = list(zip(along, rest, strict=True))
        return Measured(self, C, inside, products[1] if shares else None, known)

    def _products(self, columns: Tensor, *, squares: bool) -> list[Tensor]:
        """AᵀCA, AᵀC²A and AᵀB by blocks for `columns` [C, B], in one pass over some draws at a time."""
        d, r, found = columns.shape[-2], self.rank, list[tuple[Tensor, ...]]()
        halves = [] if squares else _triangle(columns[..., :d])
        for part in self.rows.split(self._at_once(columns) * r):
            rows, blocks = part.expand(*columns.shape[:-2], *part.shape), part.unflatten(0, (-1, r))
            if squares:
                wide = (rows @ columns).unflatten(-2, (-1, r))
                image = wide[..., :d]
                found.append((blocks @ image.mT, image @ image.mT, wide[..., d:]))
            else:
                image = torch.cat([rows[..., : half.shape[-2]] @ half for half in halves], -1).unflatten(-2, (-1, r))
                inside = blocks @ image.mT
                found.append((inside + inside.mT, (rows @ columns[..., d:]).unflatten(-2, (-1, r))))
        return [torch.cat(parts, -3) if len(parts) > 1 else parts[0] for parts in zip(*found, strict=True)]

    def _at_once(self, columns: Tensor) -> int:
        """Draws of one product: on the host what the cache holds, on a device all."""
        if columns.device.type != "cpu":
            return self.draws
        size = 4 * self.rank * (columns.shape[-1] * columns.shape[:-2].numel() + columns.shape[-2])
        return max(1, _CACHE // size)

    def beyond(self, Q: Tensor, T: Tensor) -> Tensor:
        """The inverse Gram of A − QQᵀA from T = AᵀQ by blocks; the last ones are kept, as several moments need them."""
        for known, inverse in self._beyond:
            if known is Q:
                return inverse
        inverse = _inverse(self.gram - T @ T.mT)
        self._beyond = [*self._beyond[-3:], (Q, inverse)]
        return inverse


_NARROWEST = 32  # columns of a product on the host
_CACHE = 3 << 19  # bytes of draws and their products that are held at a time on the host


def _triangle(C: Tensor) -> list[Tensor]:
    """Columns of the U with C = U + Uᵀ, without their zeros: on the host AᵀUA costs little more than half of AᵀCA."""
    upper, d = C.triu(), C.shape[-1]
    upper.diagonal(dim1=-2, dim2=-1).mul_(0.5)
    step = max(_NARROWEST, -(-d // 4)) if C.device.type == "cpu" else d
    return [upper[..., : i + step, i : i + step].contiguous() for i in range(0, d, step)]


def _sides(C: Tensor, Q: Tensor, *, shares: bool) -> Tensor:
    """[Q, K − ½QQᵀK] of K = CQ, with `shares` also CK − ½QKᵀK, in float32: what `Measured.normal` needs of a proxy."""
    Q = Q.to(C.dtype)
    K = C @ Q
    found = [Q, K - Q @ (Q.mT @ K) / 2]
    return torch.cat([*found, *([C @ K - Q @ (K.mT @ K) / 2] if shares else [])], -1).float()


@dataclass(frozen=True)
class Measured:
    """Draws against a normalised second moment C (trace 1), or several with leading dimensions.

    In the complement of Q everything follows from blocks: with T = AᵀQ, K = CQ and H = QᵀK, the Gram of A − QTᵀ is
    AᵀA − TTᵀ, and its second moment AᵀCA − Y − Yᵀ with Y = T(AᵀK − ½TH)ᵀ = T(Aᵀ(K − ½QH))ᵀ; that of C² likewise.
    """

    draws: Draws
    C: Tensor
    inside: Tensor  # AᵀCA by blocks
    squares: Tensor | None  # AᵀC²A by blocks
    along: list[tuple[Tensor, Tensor]]  # proxies, and Aᵀ times their sides by blocks

    @cached_property
    def _random(self) -> Control:
        return self._control(self.inside, self.squares, self.draws.inverse)

    def random(self) -> Control:
        """The control by subspaces of the whole space: the exact null distribution of a uniformly random proxy."""
        return self._random

    @full_float32()
    def normal(self, Q: Tensor, *, shares: bool = True) -> Control:
        """The control by subspaces of the orthogonal complement of Q, or of one for each C."""
        known = [product for mine, product in self.along if mine is Q]
        T, *others = (known[0] if known else self._along(Q)).split(self.draws.rank, -1)
        mixed = [T @ side.mT for side in others]
        squares = self.squares - mixed[1] - mixed[1].mT if shares and self.squares is not None else None
        return self._control(self.inside - mixed[0] - mixed[0].mT, squares, self.draws.beyond(Q, T))

    def _along(self, Q: Tensor) -> Tensor:
        side = _sides(self.C, Q, shares=self.squares is not None)
        rows = self.draws.rows
        return (rows.expand(*side.shape[:-2], *rows.shape) @ side).unflatten(-2, (-1, self.draws.rank))

    def _control(self, inside: Tensor, squares: Tensor | None, inverse: Tensor) -> Control:
        """With G the Gram of the draws and N = G⁻¹ inside: tr N is the energy, tr N² = ‖QᵀCQ‖², tr G⁻¹squares ‖CQ‖²."""
        if squares is None:
            return Control((inside * inverse).sum((-2, -1)).double().clamp_min(0.0))  # float32 rounds 0 to either side
        d, r, size = self.C.shape[-1], self.draws.rank, self.C.double().square().sum((-2, -1)).unsqueeze(-1)
        compressed = inverse @ inside
        trace = _trace(compressed.double())
        own = (compressed.double() * compressed.mT).sum((-2, -1))
        deviation = own - 2 * trace / d + r / d**2  # ‖QᵀCQ − I/d‖², tr C = 1
        whole = size - 1.0 / d
        share = torch.where(whole > 1e-12 / d, deviation / whole, torch.nan)
        images = (squares * inverse).sum((-2, -1)).double()
        gain = _gain(_trace(self.C.double()).unsqueeze(-1), size, trace, own, images, width=d, rank=r)
        return Control(trace.clamp_min(0.0), share, gain)


@_ratio(
    title="p against random subspaces",
    formula="(1 + #{energy(Q_R) ≥ energy(Q_T)}) / (draws + 1)",
    convention="exact when the proxy is a uniformly random subspace; ties count as larger",
)
def gradient_p(value: float, draws: Tensor) -> float:
    """How often a random subspace of the same rank holds as much energy.

    >>> gradient_p(1.0, torch.zeros(999))
    0.001
    """
    if value != value:
        return value
    return (1 + int((draws >= value * (1 - TIE)).sum())) / (len(draws) + 1)


@_share(
    title="p, Holm over layers",
    formula="Holm over the layers of a step",
    reference="Holm 1979",
    convention="one family for each variant and group; layers without a p do not count",
    invariant=(),
)
def gradient_p_holm(p: Sequence[float]) -> list[float]:
    """The same p after Holm's correction over the layers of that step.

    >>> gradient_p_holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted((i for i, value in enumerate(p) if value == value), key=lambda i: p[i])
    scaled = [min(1.0, (len(order) - rank) * p[i]) for rank, i in enumerate(order)]
    adjusted = dict(zip(order, accumulate(scaled, max), strict=True))
    return [adjusted.get(i, math.nan) for i in range(len(p))]


@measured(
    *STEPS,
    title="Alignment",
    formula="d·tr(C_G C_X) / (tr C_G · tr C_X)",
    reference="ours, after Revisiting Anisotropy, arXiv:2604.08764",
    convention="C_X the covariance of the rows that the proxy is fitted on, C_G the second moment of the gradients of "
    "the test half, not centred; no rank; coordinates=standardised: rows divided by the standard deviations of C_X, "
    "gradients multiplied by them; of=update: of updates of the embedding table, divided by them; of groups without an "
    "interval",
    invariant=_RIGID,
    bounds=(0.0, None),
)
def gradient_alignment(C: Tensor, M: Tensor, *, standardised: bool = False) -> Tensor:
    """How much more the gradients vary where the activations vary: 1 when unrelated, d where both have one direction.

    In standardised coordinates the numerator is the same, because scales cancel in it, and what it is divided by is
    Σᵢ C_ii M_ii: a constant coordinate counts in neither.

    >>> C, M = torch.diag(torch.tensor([4.0, 1.0])), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> float(gradient_alignment(C, M)), float(gradient_alignment(C, C)), float(gradient_alignment(C, C + 1.0))
    (1.0, 1.3600000143051147, 1.2571429014205933)
    >>> float(gradient_alignment(C, C + 1.0, standardised=True))
    1.0
    """
    shared = (C * M).sum((-2, -1))
    if standardised:
        return shared / (C.diagonal(dim1=-2, dim2=-1) * M.diagonal(dim1=-2, dim2=-1)).sum(-1)
    return C.shape[-1] * shared / (_trace(C) * _trace(M))


def update_alignment(C: Tensor, M: Tensor, *, standardised: bool = False) -> Tensor:
    """The same for updates of rows, M their second moment: standardised they are divided by standard deviations.

    An update u has the standardised coordinates u/s, those of a gradient u/s²: scales do not cancel here.

    >>> C, M = torch.diag(torch.tensor([4.0, 1.0])), torch.tensor([[4.0, 0.0], [0.0, 1.0]])
    >>> float(update_alignment(C, M)), float(update_alignment(C, M, standardised=True))
    (1.3600000143051147, 1.0)
    """
    if standardised:
        variance = C.diagonal(dim1=-2, dim2=-1)
        inverse = torch.where(variance > 0, variance.reciprocal(), 0.0)  # a constant coordinate counts in neither
        M = M * inverse.unsqueeze(-1) * inverse.unsqueeze(-2)
    return gradient_alignment(C, M, standardised=standardised)


@measured(
    "train",
    title="Cosine with gradients",
    formula="⟨C, G⟩ / (‖C‖ ‖G‖)",
    reference="ours, after Revisiting Anisotropy, arXiv:2604.08764; cosine of two covariances: Herdin et al. 2005",
    convention="C the covariance of the sampled activations of a training batch, G the second moment of their "
    "gradients, not centred; at every step of a monitored training",
    invariant=_RIGID,
    bounds=_UNIT,
)
def gradient_cosine(first: Tensor, second: Tensor) -> Tensor:
    """Cosine of the covariance of the activations and the second moment of their gradients, as matrices: 1 where both
    have one shape.

    >>> gradient_cosine(torch.eye(2)[None], torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])).tolist()
    [0.7071067690849304]
    """
    sizes = torch.linalg.vector_norm(first.flatten(1), dim=-1) * torch.linalg.vector_norm(second.flatten(1), dim=-1)
    return (first * second).flatten(1).sum(-1) / sizes


def next_components(covariance: Tensor, Q: Tensor) -> Tensor:
    """The top r principal components after Q has been projected out: d×r."""
    C, Q = covariance.double(), Q.double()
    inside = Q.T @ C
    rest = C - Q @ inside - inside.T @ Q.T + Q @ (inside @ Q) @ Q.T
    rest = rest - _trace(C) * (Q @ Q.T)  # gives Q the lowest eigenvalues, so that it is never chosen again
    return leading_eigenvectors(rest, Q.shape[1])


def each_decomposed(
    act: Callable[..., tuple[Tensor, ...]], problems: Sequence[tuple[Tensor, ...]]
) -> list[tuple[Tensor, ...]]:
    """`act(*problem)` for several eigenproblems of float64 matrices, returned on their devices.

    On the host one core each. On a GPU only very narrow ones go there: threads that prepare many small operations wait
    for each other longer than the GPU takes to solve one problem after the other (4 ms each at 512 columns).
    """
    if not problems or problems[0][0].shape[-1] > _WIDE or problems[0][0].device.type == "cuda":
        return [act(*problem) for problem in problems]
    found = together(lambda problem: act(*problem), [tuple(part.cpu() for part in problem) for problem in problems])
    return [tuple(x.to(problem[0].device) for x in result) for problem, result in zip(problems, found, strict=True)]


def growth(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """The positive part of C_after − C_before (the variance gained), and the directions d×m that span it."""
    values, vectors = torch.linalg.eigh((after - before).double())
    grew = vectors[:, values > 0]
    return (grew * values[values > 0]) @ grew.mT, grew


@_change(
    title="Amplification",
    formula="share of (ΔC_X)₊ in the earlier Q_T",
    reference=_ARTICLE,
    convention="(ΔC_X)₊ the positive part of the change of the activations' covariance since the measured step before",
)
def amplification(grown: Tensor, Q: Tensor) -> Tensor:
    """Share of the variance gained since the previous measured step that lies in the proxy fitted at that step."""
    return gradient_energy(grown, Q)


@_change(
    title="Amplification, p",
    formula="p against random subspaces",
    reference=_ARTICLE,
    convention="as gradient_p",
    invariant=("scale",),
)
def amplification_p(value: float, draws: Tensor) -> float:
    """How often a random subspace holds as much of the variance gained."""
    return gradient_p(value, draws)


@_share(
    title="Overlap with PCA",
    formula="‖Q_TᵀQ_PCA‖² / r",
    convention="both of rank r; over the smaller rank where the rows span fewer dimensions",
    reference="Björck & Golub 1973",
)
def proxy_overlap(first: Tensor, second: Tensor) -> float:
    """How much of the proxy's span PCA of the same rank shares; 1 = the same span."""
    inside = first.T @ second
    return float(inside.square().sum() / min(inside.shape))


@_share(
    title="Stability of the proxy",
    formula="mean over folds of ‖QᵀQ₍ⱼ₎‖² / r",
    convention="Q₍ⱼ₎ the proxy fitted again without one of eight folds of the contexts: the mean squared cosine of the "
    "principal angles; below .97 the directions of a claim are not determined at this rank",
    reference="ours; principal angles: Björck & Golub 1973",
)
def proxy_stability(Q: Tensor, left_out: Tensor) -> float:
    """How much of the proxy stays when an eighth of the contexts it is fitted on is left out; 1 = all of it.

    >>> Q = torch.eye(4)[:, :2]
    >>> proxy_stability(Q, torch.stack([Q, torch.eye(4)[:, 1:3]]))
    0.75
    """
    values = (Q.mT @ left_out).square().sum((-2, -1)) / Q.shape[-1]
    return float(values[values.isfinite()].mean())


@_change(
    title="Turn of the span",
    formula="mean principal angle, degrees",
    convention="between the refitted spans of two measured steps",
    reference="Björck & Golub 1973",
    bounds=(0.0, 90.0),
)
def concept_turn(first: Tensor, second: Tensor) -> float:
    """Angle between the spans of this measured step and the one before.

    >>> round(concept_turn(torch.eye(4)[:, :2], torch.eye(4)[:, 1:3]), 6)
    45.0
    """
    return float(torch.rad2deg(principal_angles(first.mT, second.mT).mean()))


@_change(
    title="Match of concepts",
    formula="mean |cos| after optimal assignment",
    convention="one to one, with the largest sum of cosines",
    reference="Kuhn 1955",
)
def concept_match(first: Tensor, second: Tensor) -> float:
    """How alike the concepts are to those of the measured step before, each to its partner."""
    return float(match_concepts(first, second)[1].abs().mean())


def match_concepts(first: Any, second: Any, *, signed: bool = True) -> tuple[Tensor, Tensor]:
    """The one-to-one pairs [m, 2] of concepts of two fits with the largest sum of cosines, and these cosines [m].

    Codes are non-negative, so a direction and its opposite are different concepts; `signed=False` for components
    whose sign means nothing.

    >>> pairs, cosines = match_concepts(torch.eye(3)[:2], torch.eye(3)[[1, 0]])
    >>> pairs.tolist(), cosines.tolist()
    ([[0, 1], [1, 0]], [1.0, 1.0])
    """
    from scipy.optimize import linear_sum_assignment

    a, b = _units(first), _units(second)
    if a.shape[1] != b.shape[1]:
        raise AnisoscopeError(f"the directions have widths {a.shape[1]} and {b.shape[1]}; expected the same space.")
    cosines = a @ b.T
    if not signed:
        cosines = cosines.abs()
    pairs = torch.stack([torch.as_tensor(index) for index in linear_sum_assignment(-cosines.numpy())], 1)
    return pairs, cosines[pairs[:, 0], pairs[:, 1]]


def _units(directions: Any) -> Tensor:
    rows = torch.as_tensor(directions).detach().cpu().double()
    if rows.ndim != 2 or 0 in rows.shape or not bool(rows.isfinite().all()):
        raise AnisoscopeError(
            f"the directions have shape {tuple(rows.shape)} or are not finite; expected concepts × width, finite."
        )
    return rows / norms_of(rows)
