"""Proxies fitted again without each fold of contexts, so that intervals of energies contain the fit.

A refit is the fit of all rows, from the same start, on the rows that are left: started from the proxy of all rows it
would stop at once and hide how far the directions move. To be cheap it runs in the q = 4r leading components of all
rows, where the fits of all sites and folds are one batch; the last step goes back to the full width, so that every
direction of the space is there to first order. Agreement with a fit of full width: squared cosines above .9999.

Notation: x n×d centred rows, V d×q their leading components, S the scatter of a fold, m the mean of the rows left,
T = (x − m)V with 0 for the rows left out, Z the codes of T, D = (ZᵀZ)⁻¹Zᵀ(x − m).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from anisoscope.capture.sites.site import Site
from anisoscope.numerics import factors, semi_nmf
from anisoscope.numerics.hashing import FOLDS
from anisoscope.numerics.linalg import orthonormal_columns
from anisoscope.stats.moments import FoldCovariance
from anisoscope.tangent.proxy import Half, Label, Proxy, Scale

WIDER = 4  # components in which proxies are refitted, in multiples of the rank
_ROUNDS = 3  # of subspace iteration for them
_BYTES = 1 << 28  # of rows fitted together
_AXES = ("pca", "svd", "ica")  # their span is that of the leading components


@dataclass(frozen=True)
class FitRows:
    """The rows of one site that proxies are fitted on, by fold, and their covariance, which fits and alignments share.

    >>> FitRows.of_rows(torch.randn(64, 3), torch.arange(64) % 8).covariance.shape
    torch.Size([3, 3])
    """

    x: Tensor  # [n, d]
    fold: Tensor  # [n], on the device of the rows
    spread: FoldCovariance

    @classmethod
    def of(cls, half: Half, most: int | None = None) -> FitRows:
        rows = half if most is None else half.fewer(most)
        return cls.of_rows(rows.x, rows.fold)

    @classmethod
    def of_rows(cls, x: Tensor, fold: Tensor) -> FitRows:
        return cls(x, fold.to(x.device), FoldCovariance.of(x, fold))

    def standardised(self, scale: Scale) -> FitRows:
        """The rows in standardised coordinates, whose standard deviations stay those of all rows."""
        return FitRows(scale.rows(self.x), self.fold, self.spread.rescaled(scale.kept, scale.deviation.reciprocal()))

    @cached_property
    def covariance(self) -> Tensor:
        return self.spread.covariance()

    def live(self, rank: int) -> list[int]:
        """The folds that have rows and without which there are enough to fit on."""
        n = self.spread.n
        return ((n > 0) & (n.sum() - n > rank)).nonzero().squeeze(1).tolist()


@dataclass(frozen=True)
class Reduced:
    """The leading components of one site, and everything in them without each of the live folds."""

    rows: FitRows
    rank: int
    axes: Tensor  # V [d, q]
    live: list[int]
    means: Tensor  # m [live, d], about the mean of all rows
    images: Tensor  # (scatter of the rows left) V [live, d, q]

    @classmethod
    def of(cls, rows: FitRows, rank: int, *, seed: int) -> Reduced:
        spread, live = rows.spread, rows.live(rank)
        C = rows.covariance
        q = min(len(C), WIDER * rank)
        axes = torch.randn(len(C), q, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(C)
        for _ in range(_ROUNDS):
            axes = torch.linalg.qr(C @ axes)[0]
        left = (spread.n.sum() - spread.n[live]).unsqueeze(-1)
        total = spread.sums.sum(0) - spread.sums[live]
        parts = spread.squares @ axes
        images = parts.sum(0) - parts[live] - (total / left).unsqueeze(-1) * (total @ axes).unsqueeze(-2)
        return cls(rows, rank, axes, live, total / left, images)

    @cached_property
    def centred(self) -> Tensor:
        return self.rows.x - self.rows.x.mean(0, dtype=torch.float64).to(self.rows.x.dtype)

    @cached_property
    def keep(self) -> Tensor:
        """Whether each row stays without each live fold: [live, n, 1]."""
        gone = torch.tensor(self.live, device=self.rows.fold.device)
        return (self.rows.fold != gone.unsqueeze(-1)).unsqueeze(-1)

    def scores(self) -> Tensor:
        """T [live, n, q]."""
        here = self.rows.x.dtype
        whole = self.centred @ self.axes.to(here)
        return (whole - (self.means @ self.axes).to(here).unsqueeze(-2)) * self.keep

    def compressed(self) -> Tensor:
        """Vᵀ(scatter of the rows left)V [live, q, q]."""
        return self.axes.mT @ self.images

    def leading(self) -> Tensor:
        """Spans of the leading principal components without each fold [live, d, r]: those in V, one step further."""
        _, turn = torch.linalg.eigh(self.compressed())
        return orthonormal_columns(self.images @ turn[..., -self.rank :])

    def following(self, bases: Tensor) -> Tensor:
        """Spans of the principal components after given ones [live, d, r], within V."""
        inside = orthonormal_columns(self.axes.mT @ bases)
        C = self.compressed()
        rest = C - inside @ (inside.mT @ C)
        rest = rest - (rest @ inside) @ inside.mT
        rest = rest - C.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None] * (inside @ inside.mT)
        found = self.axes @ torch.linalg.eigh(rest)[1][..., -bases.shape[-1] :]
        return orthonormal_columns(found - bases @ (bases.mT @ found))

    def spans(self, codes: Tensor) -> Tensor:
        """Spans of the least squares directions of codes [live, n, r], in the full width."""
        codes = codes * self.keep
        projected = codes.mT @ self.centred - codes.sum(-2).unsqueeze(-1) * self.means.to(codes.dtype).unsqueeze(-2)
        # centroids about their mean span one dimension less than there are: redundant columns come first
        return orthonormal_columns(semi_nmf.least_squares(codes, projected).mT)[..., -self.rank :]

    def placed(self, bases: Tensor, whole: Tensor) -> Tensor:
        """Bases [FOLDS, d, r]: those of a fold without rows are the proxy's own, NaN where too little is left."""
        there = (self.rows.spread.n > 0)[:, None, None]
        out = torch.where(there, torch.nan, whole.to(bases).expand(FOLDS, *whole.shape))
        out[self.live] = bases
        return out


def with_refits(
    fits: Mapping[Site, FitRows], found: Mapping[Label, Mapping[Site, Proxy]], *, seed: int
) -> dict[Label, dict[Site, Proxy]]:
    """The proxies of these rows with their refits; random directions and permuted controls stay as they are."""
    made: dict[tuple[Site, int], Reduced] = {}
    out: dict[Label, dict[Site, Proxy]] = {}

    def reduced(site: Site, proxy: Proxy) -> Reduced:
        key = site, proxy.basis.shape[1]
        if key not in made:
            made[key] = Reduced.of(fits[site], key[1], seed=seed)
        return made[key]

    for label in sorted(found, key=lambda label: bool(label.control)):  # controls need the refits of their proxies
        proxies = found[label]
        spaces = {site: reduced(site, proxy) for site, proxy in proxies.items()}
        if label.control == "next":
            mine = out[replace(label, control="")]
            bases = {site: _following(space, mine[site]) for site, space in spaces.items()}
        elif label.control or label.proxy == "random":
            bases = {}
        elif label.proxy in _AXES:
            bases = {site: space.leading() for site, space in spaces.items()}
        else:
            concepts = {site: len(proxy.directions) for site, proxy in proxies.items()}
            bases = _by_codes(spaces, _CODES[label.proxy], concepts, seed=seed)
        out[label] = {
            site: replace(proxy, left_out=spaces[site].placed(bases[site], proxy.basis)) if site in bases else proxy
            for site, proxy in proxies.items()
        }
    return {label: out[label] for label in found}


def standardised_refits(
    fits: Mapping[Site, FitRows], found: Mapping[Label, Mapping[Site, Proxy]], *, seed: int
) -> dict[Label, dict[Site, Proxy]]:
    """As `with_refits`, for proxies in standardised coordinates of these rows; one scale for all proxies of a site."""
    scales = {site: proxy.scale for proxies in found.values() for site, proxy in proxies.items()}
    scaled = {site: fits[site].standardised(scale) for site, scale in scales.items() if scale is not None}
    return with_refits(scaled, found, seed=seed)


def _following(space: Reduced, proxy: Proxy) -> Tensor:
    assert proxy.left_out is not None
    return space.following(proxy.left_out[space.live])


Codes = Callable[[Tensor, Tensor, int, int], Tensor]  # scores [b, n, q], which rows stay, k, seed -> [b, n, k]


def _by_codes(
    spaces: Mapping[Site, Reduced], codes_of: Codes, concepts: Mapping[Site, int], *, seed: int
) -> dict[Site, Tensor]:
    """Refits of a method that finds codes, for sites of one shape together as memory allows."""
    alike: dict[tuple[int, ...], list[list[Site]]] = {}
    for site, space in spaces.items():
        size = len(space.live) * len(space.rows.x) * space.axes.shape[1] * space.rows.x.element_size()
        shape = len(space.rows.x), *space.axes.shape, space.rank, concepts[site], len(space.live)
        chunks = alike.setdefault(shape, [[]])
        if len(chunks[-1]) >= max(1, _BYTES // max(1, size)):
            chunks.append([])
        chunks[-1].append(site)
    found: dict[Site, Tensor] = {}
    for group in (group for chunks in alike.values() for group in chunks):
        found |= _fit_together({site: spaces[site] for site in group}, codes_of, concepts[group[0]], seed=seed)
    return found


def _fit_together(spaces: Mapping[Site, Reduced], codes_of: Codes, concepts: int, *, seed: int) -> dict[Site, Tensor]:
    first = next(iter(spaces.values()))
    if not first.live:
        return {site: space.axes.new_zeros(0, len(space.axes), space.rank) for site, space in spaces.items()}
    with factors.exact_products(first.rows.x.device):
        scores = torch.cat([space.scores() for space in spaces.values()])
        keep = torch.cat([space.keep for space in spaces.values()])
        codes = codes_of(scores, keep, concepts, seed).split(len(first.live))
        return {site: space.spans(mine) for (site, space), mine in zip(spaces.items(), codes, strict=True)}


def _semi_nmf_codes(scores: Tensor, keep: Tensor, concepts: int, seed: int) -> Tensor:
    """A row of zeros has the code zero and no part in the fit, so rows left out need not be taken away."""
    return semi_nmf.fit(scores, concepts, seed=seed, init="svd").codes


def _memberships(scores: Tensor, keep: Tensor, concepts: int, seed: int) -> Tensor:
    """Clusters of the rows that stay; the others would be a cluster at zero."""
    out = scores.new_zeros(*scores.shape[:2], concepts)
    for codes, rows, stay in zip(out, scores, keep.squeeze(-1), strict=True):
        codes[stay] = factors.k_means(rows[stay], concepts, seed=seed).assigned.to(codes.dtype)
    return out


_CODES: dict[str, Codes] = {"semi_nmf": _semi_nmf_codes, "kmeans": _memberships}
