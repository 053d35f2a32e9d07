"""Manifolds in R^D with known tangent spaces and second fundamental forms, and local PCA fits to compare with them.

Notation: m dimension, D width of the ambient space, c = D − m codimension; w chart coordinates [m], x = embed(w) [D];
J = ∂x/∂w [D, m] and H = ∂²x/∂w² [D, m, m], by exact differentiation of the chart in float64; G = JᵀJ the metric;
T = J G^(−1/2) [D, m] orthonormal tangent basis, N [D, c] orthonormal normal basis;
II(a, b) = Nᵀ H(G^(−1/2) a, G^(−1/2) b) [c, m, m] the second fundamental form in these bases;
κ = max ‖II(a, a)‖ over unit a;
u tangent coordinates in units of length: the point is x + T u + ½ N II(u, u) + O(‖u‖³).

Local PCA and quadratic fits, of many groups at once: rows x [n, D], each of one of g groups with n_g rows; T̂ [g, D, m]
the top m principal directions of a group, λ its eigenvalues; v = T̂ᵀ(x − x̄) tangent coordinates of a row;
S [g, D, m, m] the estimated second fundamental form, from x ≈ a + L v + ½ S(v, v) with S projected off T̂. Groups have
unequal sizes, so sums over groups are scatter-adds of rows, without a loop over groups and without padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, unknown_name

KINDS = ("gaussian", "ball", "shell")
Embed = Callable[[Tensor], Tensor]
Draw = Callable[[int, torch.Generator], Tensor]


@dataclass(frozen=True)
class Frames:
    """Position, bases and curvature at one point, or at a batch of points in the leading dimension."""

    chart: Tensor  # [..., m] chart coordinates
    position: Tensor  # [..., D]
    tangent: Tensor  # [..., D, m] orthonormal
    normal: Tensor  # [..., D, c] orthonormal
    form: Tensor  # [..., c, m, m] second fundamental form
    root: Tensor  # [..., m, m] G^(−1/2): unit lengths to chart coordinates
    connection: Tensor  # [..., m, m, m] Christoffel symbols in the orthonormal basis

    def take(self, index: Tensor | int, *, bases: bool = True) -> Frames:
        """The frames at these batch indices; `bases=False` keeps only what `displace` needs, to save memory."""
        bulky = () if bases else ("position", "tangent", "normal", "form")
        return Frames(**{name: value[:0] if name in bulky else value[index] for name, value in vars(self).items()})


@dataclass(frozen=True)
class Manifold:
    """A chart [m] → [width], and an isometric placement of its image in R^D.

    >>> earth = sphere(2, radius=2.0).rotated(10)
    >>> earth.dim, earth.ambient, round(earth.curvature(earth.centre), 9)
    (2, 10, 0.5)
    """

    name: str
    dim: int
    map: Embed  # [..., m] to [..., width]
    placement: Tensor  # [D, width], orthonormal columns
    centre: Tensor  # [m] a typical point, in chart coordinates
    draw: Draw  # samples n points of the manifold, in chart coordinates

    @property
    def ambient(self) -> int:
        return len(self.placement)

    def embed(self, chart: Tensor) -> Tensor:
        """Points of R^D from chart coordinates [..., m]."""
        return self.map(torch.as_tensor(chart).double()) @ self.placement.T

    def frames(self, chart: Tensor) -> Frames:
        """The frames at the points with these chart coordinates [m] or [points, m]."""
        chart = torch.as_tensor(chart).double()
        if chart.ndim == 1:
            return self.frames(chart[None]).take(0)
        if chart.shape[-1] != self.dim or not bool(chart.isfinite().all()):
            raise AnisoscopeError(
                f"chart coordinates of shape {tuple(chart.shape)} do not name points of a {self.name} of dimension "
                f"{self.dim}; expected {self.dim} finite numbers for each point."
            )
        first = torch.func.jacfwd(self.map)
        J = self.placement @ torch.func.vmap(first)(chart)
        H = torch.einsum("Dw,nwij->nDij", self.placement, torch.func.vmap(torch.func.jacfwd(first))(chart))
        values, vectors = torch.linalg.eigh(J.mT @ J)
        root = vectors @ (values.rsqrt()[..., None] * vectors.mT)
        tangent = J @ root
        normal = torch.linalg.qr(J, mode="complete")[0][..., self.dim :]
        second = torch.einsum("nDij,nia,njb->nDab", H, root, root)
        form = torch.einsum("nDc,nDab->ncab", normal, second)
        # subtracting ½ of this makes u normal coordinates to second order: no ‖u‖² term is left in the tangent space
        connection = torch.einsum("nij,nDj,nDab->niab", root, tangent, second)
        return Frames(chart, self.embed(chart), tangent, normal, form, root, connection)

    def curvature(self, chart: Tensor) -> float:
        """κ, the largest normal curvature at a point."""
        return float(largest_curvature(self.frames(chart).form))

    def points(self, n: int, *, seed: int = 0) -> Tensor:
        """Chart coordinates of n points spread over the manifold, [n, m]."""
        return self.draw(n, torch.Generator().manual_seed(seed))

    def rotated(self, ambient: int, *, seed: int = 0) -> Manifold:
        """The same manifold under a random rotation in R^ambient."""
        width = self.placement.shape[1]
        if ambient < width:
            raise AnisoscopeError(
                f"a {self.name} of dimension {self.dim} needs {width} ambient dimensions, "
                f"but {ambient} were given; raise the ambient dimension or lower the dimension."
            )
        noise = torch.randn(ambient, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return replace(self, placement=torch.linalg.qr(noise)[0])


def largest_curvature(form: Tensor) -> Tensor:
    """κ = max over unit a of ‖II(a, a)‖ for second fundamental forms [..., c, m, m].

    By alternating maximisation over the direction a and the normal; neither step can lower the value.

    >>> largest_curvature(torch.diag(torch.tensor([1.0, -3.0]))[None])
    tensor(3., dtype=torch.float64)
    """
    form = form.double()
    dim = form.shape[-1]
    generator = torch.Generator().manual_seed(0)
    starts = torch.cat([torch.eye(dim), torch.randn(6, dim, generator=generator)]).double()
    starts = torch.nn.functional.normalize(starts, dim=-1).expand(*form.shape[:-3], -1, -1)
    best = torch.zeros(starts.shape[:-1], dtype=torch.float64)
    for _ in range(50):
        bent = torch.einsum("...cab,...sa,...sb->...sc", form, starts, starts)
        norms = bent.norm(dim=-1)
        if bool((norms <= best * (1 + 1e-10)).all()):
            break
        best = norms
        along = torch.einsum("...sc,...cab->...sab", torch.nn.functional.normalize(bent, dim=-1), form)
        values, vectors = torch.linalg.eigh(along)
        top = values.abs().argmax(-1, keepdim=True)
        starts = torch.take_along_dim(vectors, top[..., None, :], dim=-1)[..., 0]
    return torch.maximum(norms, best).amax(-1)


def unit_sample(*shape: int, dim: int, kind: str = "gaussian", generator: torch.Generator) -> Tensor:
    """Tangent coordinates [*shape, m] of scale 1: standard normal, uniform in the unit ball, or on the unit shell."""
    if kind not in KINDS:
        raise unknown_name("kind of sampling", kind, KINDS)
    normal = torch.randn(*shape, dim, dtype=torch.float64, generator=generator)
    if kind == "gaussian":
        return normal
    radius = torch.rand(*shape, 1, dtype=torch.float64, generator=generator) ** (1 / dim) if kind == "ball" else 1.0
    return torch.nn.functional.normalize(normal, dim=-1) * radius


def displace(manifold: Manifold, frames: Frames, u: Tensor) -> Tensor:
    """The points of the manifold at tangent coordinates u from the frames' points.

    One frame takes u [n, m], a batch of frames u [points, n, m]; x + T u + ½ N II(u, u) + O(‖u‖³), never off the
    manifold.
    """
    straight = torch.einsum("...ij,...nj->...ni", frames.root, u)
    bend = torch.einsum("...iab,...na,...nb->...ni", frames.connection, u, u)
    return manifold.embed(frames.chart[..., None, :] + straight - bend / 2)


def expected_variances(form: Tensor, *, scale: float | Tensor, kind: str = "gaussian") -> tuple[Tensor, Tensor]:
    """Tangent and normal variance (tr C_T, tr C_N) of a sample of this scale, to leading order in the scale.

    Var of ½ uᵀBu for each normal direction B, with F = Σ‖B‖_F² and S = Σ(tr B)² over the normal directions:
    gaussian    m t²          t⁴ F / 2
    ball        m t²/(m+2)    t⁴ (F − S/(m+2)) / (2 (m+2)(m+4))
    shell       t²            t⁴ (F − S/m) / (2 m (m+2))      (0 on a sphere, where every B is a multiple of I)
    Exact for a quadratic patch around its apex.

    >>> expected_variances(torch.eye(2)[None], scale=0.1)
    (tensor(0.0200, dtype=torch.float64), tensor(0.0001, dtype=torch.float64))
    """
    if kind not in KINDS:
        raise unknown_name("kind of sampling", kind, KINDS)
    m, t = form.shape[-1], torch.as_tensor(scale, dtype=torch.float64)
    F = form.double().square().sum((-3, -2, -1))
    S = form.double().diagonal(dim1=-2, dim2=-1).sum(-1).square().sum(-1)
    if kind == "gaussian":
        return m * t**2 + 0 * F, t**4 * F / 2
    if kind == "ball":
        return m * t**2 / (m + 2) + 0 * F, t**4 * (F - S / (m + 2)) / (2 * (m + 2) * (m + 4))
    return t**2 + 0 * F, t**4 * (F - S / m) / (2 * m * (m + 2))


def _draw_normal(dim: int, scale: float) -> Draw:
    return lambda n, generator: scale * torch.randn(n, dim, dtype=torch.float64, generator=generator)


def _draw_box(low: Tensor, high: Tensor) -> Draw:
    return lambda n, generator: low + (high - low) * torch.rand(n, len(low), dtype=torch.float64, generator=generator)


def _ramp(first: float, last: float, count: int) -> Tensor:
    return torch.linspace(first, last, count, dtype=torch.float64)


def chart_manifold(embed: Embed, centre: Tensor, *, name: str = "chart", draw: Draw | None = None) -> Manifold:
    """The manifold of a smooth chart [..., m] → [..., width] around a point, in the space that the chart maps to.

    `embed` may be any function that torch can differentiate; `draw` samples points (default: around the centre).

    >>> saddle = chart_manifold(lambda w: torch.cat([w, (w[..., :1] * w[..., 1:])], -1), torch.zeros(2))
    >>> round(saddle.curvature(saddle.centre), 9)
    1.0
    """
    centre = torch.as_tensor(centre).double()
    position = embed(centre)
    if centre.ndim != 1 or position.ndim != 1 or len(position) < len(centre):
        raise AnisoscopeError(
            f"the chart {name} takes a point of shape {tuple(centre.shape)} to one of shape {tuple(position.shape)}; "
            "expected m coordinates [m] and at least as many of the space around, [width]."
        )
    rank = int(torch.linalg.matrix_rank(torch.func.jacfwd(embed)(centre), rtol=1e-9))
    if rank < len(centre):
        raise AnisoscopeError(
            f"the chart {name} has {rank} independent directions at its point instead of {len(centre)}, so it has no "
            "tangent space there; choose another point, or a chart without the directions that move nothing."
        )
    width = len(position)
    around = _draw_normal(len(centre), 0.3)
    drawn = draw or (lambda n, generator: centre + around(n, generator))
    return Manifold(name, len(centre), embed, torch.eye(width, dtype=torch.float64), centre, drawn)


def _stretched_sphere(name: str, dim: int, axes: Tensor | float) -> Manifold:
    """The unit sphere in R^(m+1) by stereographic projection, each coordinate multiplied by its half axis."""

    def embed(w: Tensor) -> Tensor:
        square = w.square().sum(-1, keepdim=True)
        return axes * (torch.cat([2 * w, 1 - square], -1) / (1 + square))

    def draw(n: int, generator: torch.Generator) -> Tensor:
        x = torch.nn.functional.normalize(torch.randn(n, dim + 1, dtype=torch.float64, generator=generator), dim=-1)
        return x[:, :dim] / (1 + x[:, dim:].abs())  # one hemisphere: the chart is singular at the other pole

    return chart_manifold(embed, 0.3 * _ramp(1.0, -1.0, dim), name=name, draw=draw)


def sphere(dim: int, *, radius: float = 1.0) -> Manifold:
    """The sphere of this radius in R^(m+1): II = −I/radius everywhere."""
    return _stretched_sphere("sphere", dim, radius)


def ellipsoid(dim: int, *, axes: Tensor | None = None) -> Manifold:
    """The ellipsoid with these m+1 half axes (default: from 1.3 down to 0.7)."""
    halves = _ramp(1.3, 0.7, dim + 1) if axes is None else torch.as_tensor(axes).double()
    return _stretched_sphere("ellipsoid", dim, halves)


def paraboloid(dim: int, *, curvatures: Tensor | None = None) -> Manifold:
    """The graph of ½ Σ kᵢ wᵢ² (default: k from 1 down to 0.5): II = diag(k) at the apex."""
    k = _ramp(1.0, 0.5, dim) if curvatures is None else torch.as_tensor(curvatures).double()

    def embed(w: Tensor) -> Tensor:
        return torch.cat([w, (k * w.square()).sum(-1, keepdim=True) / 2], -1)

    return chart_manifold(embed, 0.2 * torch.ones_like(k), name="paraboloid", draw=_draw_normal(dim, 0.5))


def swiss_roll(dim: int, *, pitch: float = 1 / (2.5 * math.pi)) -> Manifold:
    """The spiral (pitch·θ·cos θ, pitch·θ·sin θ) times R^(m−1): one principal curvature, (θ²+2)/(pitch·(θ²+1)^1.5)."""

    def embed(w: Tensor) -> Tensor:
        angle = w[..., :1]
        return torch.cat([pitch * angle * angle.cos(), pitch * angle * angle.sin(), w[..., 1:]], -1)

    low, high = torch.zeros(dim, dtype=torch.float64), torch.ones(dim, dtype=torch.float64)
    low[0], high[0] = 1.5 * math.pi, 4.5 * math.pi
    centre = 0.4 * high
    centre[0] = 2.5 * math.pi
    return chart_manifold(embed, centre, name="swiss_roll", draw=_draw_box(low, high))


def torus(dim: int, *, radii: Tensor | None = None) -> Manifold:
    """The product of m circles in R^(2m) (default radii from 1 to 1.5): codimension m, II_k = e_k e_kᵀ / radius_k."""
    r = _ramp(1.0, 1.5, dim) if radii is None else torch.as_tensor(radii).double()

    def embed(w: Tensor) -> Tensor:
        return torch.cat([r * w.cos(), r * w.sin()], -1)

    draw = _draw_box(torch.zeros_like(r), 2 * math.pi * torch.ones_like(r))
    return chart_manifold(embed, _ramp(0.4, 1.1, dim), name="torus", draw=draw)


def quadratic_patch(dim: int, *, codim: int = 3, curvature: float = 1.0, seed: int = 0) -> Manifold:
    """The graph of c random quadratic forms, w ↦ (w, ½ B_k(w, w)), κ at the apex as given: II = B there."""
    noise = torch.randn(codim, dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    B = noise + noise.mT
    B = B * curvature / largest_curvature(B)

    def embed(w: Tensor) -> Tensor:
        return torch.cat([w, torch.einsum("cab,...a,...b->...c", B, w, w) / 2], -1)

    return chart_manifold(embed, torch.zeros(dim, dtype=torch.float64), name="quadratic", draw=_draw_normal(dim, 0.3))


def flat_space(dim: int) -> Manifold:
    """R^m: the control without curvature."""
    return chart_manifold(lambda w: w * 1.0, 0.2 * torch.ones(dim).double(), name="flat", draw=_draw_normal(dim, 1))


MANIFOLDS: dict[str, Callable[[int], Manifold]] = {
    "sphere": sphere,
    "ellipsoid": ellipsoid,
    "paraboloid": paraboloid,
    "swiss_roll": swiss_roll,
    "torus": torus,
    "quadratic": quadratic_patch,
    "flat": flat_space,
}


def make_manifold(name: str, *, dim: int = 2, ambient: int | None = None, seed: int = 0) -> Manifold:
    """A manifold by name, randomly rotated in R^ambient (default: the space its chart maps to).

    >>> make_manifold("torus", dim=3, ambient=20).embed(torch.zeros(3)).shape
    torch.Size([20])
    """
    if name not in MANIFOLDS:
        raise unknown_name("manifold", name, MANIFOLDS)
    if dim < 1:
        raise AnisoscopeError(f"the dimension of a manifold is {dim}; expected at least 1.")
    if ambient is not None and dim >= ambient:
        raise AnisoscopeError(
            f"a {name} of dimension {dim} does not fit into {ambient} ambient dimensions with room to bend; "
            "raise the ambient dimension or lower the dimension."
        )
    if name == "quadratic" and ambient is not None:  # the only one whose codimension can be chosen
        made = quadratic_patch(dim, codim=min(3, ambient - dim))
    else:
        made = MANIFOLDS[name](dim)
    return made if ambient is None else made.rotated(ambient, seed=seed)


@dataclass(frozen=True)
class LocalFits:
    """The estimates of each group; NaN for groups with fewer than `fewest_rows(m)` rows."""

    count: Tensor  # [g] rows
    tangent: Tensor  # [g, D, m]
    tangent_variance: Tensor  # [g] sum of the m largest eigenvalues of the covariance
    normal_variance: Tensor  # [g] sum of the others
    form: Tensor  # [g, D, m, m]

    @property
    def usable(self) -> Tensor:
        return self.count >= fewest_rows(self.tangent.shape[-1])


def fewest_rows(dim: int) -> int:
    """The minimum number of rows of a group: twice the coefficients of the quadratic fit, and at least ten.

    >>> fewest_rows(2), fewest_rows(4)
    (12, 30)
    """
    return max(10, 2 * (1 + dim + dim * (dim + 1) // 2))


def scatter_sum(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Sums of values [n, ...] over the rows of each group, [groups, ...]."""
    return torch.zeros(groups, *values.shape[1:], dtype=values.dtype).index_add_(0, group, values)


def centre_groups(rows: Tensor, group: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Rows minus the mean of their group, and the number of rows of each group."""
    count = torch.bincount(group, minlength=groups)
    mean = scatter_sum(rows, group, groups) / count.clamp_min(1)[:, None]
    return rows - mean[group], count


def fit_groups(rows: Tensor, group: Tensor, *, groups: int, dim: int) -> LocalFits:
    """Local PCA, then the quadratic fit, of every group."""
    rows = rows.double()
    if dim < 1 or dim >= rows.shape[1]:
        raise AnisoscopeError(
            f"a tangent space of dimension {dim} was requested for rows of width {rows.shape[1]}; "
            f"expected 1 to {rows.shape[1] - 1}."
        )
    centred, count = centre_groups(rows, group, groups)
    scatter = scatter_sum(centred[:, :, None] * centred[:, None, :], group, groups)
    values, vectors = torch.linalg.eigh(scatter / (count - 1).clamp_min(1)[:, None, None])
    tangent, values = vectors[..., -dim:], values.clamp_min(0.0)
    form = _quadratic(centred, group, tangent, values[:, -dim:].clamp_min(1e-300).sqrt())
    few = count < fewest_rows(dim)
    form[few], values[few] = torch.nan, torch.nan
    return LocalFits(count, tangent, values[:, -dim:].sum(1), values[:, :-dim].sum(1), form)


def _quadratic(centred: Tensor, group: Tensor, tangent: Tensor, spread: Tensor) -> Tensor:
    """S of each group by least squares; tangent coordinates are in units of their spread for better conditioning."""
    groups, _, dim = tangent.shape
    v = torch.einsum("nD,nDm->nm", centred, tangent[group]) / spread[group]
    i, j = torch.triu_indices(dim, dim)
    design = torch.cat([torch.ones(len(v), 1, dtype=v.dtype), v, v[:, i] * v[:, j]], 1)
    gram = scatter_sum(design[:, :, None] * design[:, None, :], group, groups)
    target = scatter_sum(design[:, :, None] * centred[:, None, :], group, groups)
    # a pseudo-inverse, because on a shell the squares add up to a constant and the fit is not unique
    solved = torch.linalg.pinv(gram, rtol=1e-12, hermitian=True) @ target
    S = torch.zeros(groups, centred.shape[1], dim, dim, dtype=v.dtype)
    S[:, :, i, j] = solved[:, 1 + dim :].mT
    S = (S + S.mT) / (spread[:, None, :, None] * spread[:, None, None, :])
    return S - torch.einsum("gDm,gEm,gEab->gDab", tangent, tangent, S)


def tangent_angle(fits: LocalFits, frames: Frames) -> Tensor:
    """The largest principal angle, in degrees, between the estimated and the true tangent space of each group."""
    off = fits.tangent - frames.tangent @ (frames.tangent.mT @ fits.tangent)
    return torch.linalg.matrix_norm(off, ord=2).clamp(0.0, 1.0).arcsin().rad2deg().masked_fill(~fits.usable, torch.nan)


def form_error(fits: LocalFits, frames: Frames) -> Tensor:
    """‖Ŝ − II‖_F / ‖II‖_F for each group, the estimate expressed in the true bases; NaN where nothing is curved."""
    turn = fits.tangent.mT @ frames.tangent
    found = torch.einsum("gDc,gDij,gia,gjb->gcab", frames.normal, fits.form, turn, turn)
    size = frames.form.square().sum((1, 2, 3)).sqrt()
    error = (found - frames.form).square().sum((1, 2, 3)).sqrt()
    return torch.where(size > 0, error / size.clamp_min(1e-300), torch.nan)
