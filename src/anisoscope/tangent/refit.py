"""Proxies fitted again without each fold of contexts, so that intervals of energies contain the fit.

A refit is the fit of all rows, from the same start, on the rows that are left: started from the proxy of all rows it
would stop at once and hide how far the directions move. To be cheap it runs in the q = 4r leading components of all
rows, where the fits of all sites and folds are one batch; the last step goes back to the full width, so that every
direction of the space is there to first order. Agreement with a fit of full width: squared cosines above .9999.

Notation: x n×d centred rows, V d×q their leading components, S the scatter of a fold, m the mean of the rows left,
T = (x − m)V with 0 for the rows left out, Z the codes of T, D = (ZᵀZ)⁻¹Zᵀ(x − m).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from anisoscope.capture.sites.site import Site
from anisoscope.numerics import factors, semi_nmf
from anisoscope.numerics.hashing import FOLDS
from anisoscope.numerics.host import each_on_host
from anisoscope.numerics.linalg import orthonormal_columns, small_eigh
from anisoscope.stats.moments import FoldCovariance
from anisoscope.tangent.proxy import RANK_TOLERANCE, Half, Label, Proxy, Scale

WIDER = 4  # components in which proxies are refitted, in multiples of the rank
_ROUNDS = 3  # of subspace iteration for them
_BYTES = {"cpu": 1 << 24, "cuda": 1 << 31}  # of rows and moments of the sites refitted together: one on the host
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
    counts: tuple[int, ...]  # rows of each fold

    @classmethod
    def of(cls, half: Half, most: int | None = None) -> FitRows:
        rows = half if most is None else half.fewer(most)
        return cls.of_rows(rows.x, rows.fold)

    @classmethod
    def of_rows(cls, x: Tensor, fold: Tensor) -> FitRows:
        counts = torch.bincount(fold, minlength=FOLDS).tolist()
        return cls(x, fold.to(x.device), FoldCovariance.of(x, fold), tuple(counts))

    def standardised(self, scale: Scale) -> FitRows:
        """The rows in standardised coordinates, whose standard deviations stay those of all rows."""
        spread = self.spread.rescaled(scale.kept, scale.deviation.reciprocal())
        return FitRows(scale.rows(self.x), self.fold, spread, self.counts)

    @cached_property
    def covariance(self) -> Tensor:
        return self.spread.covariance()

    def live(self, rank: int) -> list[int]:
        """The folds that have rows and without which there are enough to fit on."""
        total = sum(self.counts)
        return [fold for fold, n in enumerate(self.counts) if n and total - n > rank]


@dataclass(frozen=True)
class Reduced:
    """The leading components of S sites of one shape, and everything in them without each of the live folds."""

    x: Tensor  # [S, n, d]
    keep: Tensor  # whether each row stays without each live fold: [S, live, n, 1]
    there: Tensor  # [S, FOLDS]: whether a fold has rows
    rank: int
    axes: Tensor  # V [S, d, q]
    live: list[int]
    means: Tensor  # m [S, live, d], about the mean of all rows
    images: Tensor  # (scatter of the rows left) V [S, live, d, q]

    @classmethod
    def of(cls, fits: Sequence[FitRows], rank: int, *, seed: int) -> Reduced:
        live = fits[0].live(rank)
        C = torch.stack([mine.covariance for mine in fits])
        n, sums, squares = (torch.stack([getattr(f.spread, name) for f in fits]) for name in ("n", "sums", "squares"))
        d, q = C.shape[-1], min(C.shape[-1], WIDER * rank)
        axes = torch.randn(d, q, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(C)
        for _ in range(_ROUNDS):
            axes = torch.linalg.qr(C @ axes)[0]
        left = (n.sum(-1, keepdim=True) - n[:, live]).unsqueeze(-1)
        total = sums.sum(1, keepdim=True) - sums[:, live]
        parts = squares @ axes.unsqueeze(1)
        images = parts.sum(1, keepdim=True) - parts[:, live]
        images = images - (total / left).unsqueeze(-1) * (total @ axes).unsqueeze(-2)
        gone = torch.tensor(live, device=C.device).view(1, -1, 1)
        keep = (torch.stack([mine.fold for mine in fits]).unsqueeze(1) != gone).unsqueeze(-1)
        return cls(torch.stack([mine.x for mine in fits]), keep, n > 0, rank, axes, live, total / left, images)

    @cached_property
    def centred(self) -> Tensor:
        return self.x - self.x.mean(-2, keepdim=True, dtype=torch.float64).to(self.x.dtype)

    def scores(self) -> Tensor:
        """T [S, live, n, q]."""
        here = self.x.dtype
        whole = (self.centred @ self.axes.to(here)).unsqueeze(1)
        return (whole - (self.means @ self.axes).to(here).unsqueeze(-2)) * self.keep

    @cached_property
    def compressed(self) -> Tensor:
        """Vᵀ(scatter of the rows left)V [S, live, q, q]."""
        return self.axes.mT.unsqueeze(1) @ self.images

    @cached_property
    def turns(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues, ascending, and eigenvectors of `compressed`, from which both PCA and semi-NMF start."""
        return small_eigh(self.compressed)

    def leading(self) -> Tensor:
        """Spans of the leading principal components without each fold [S, live, d, r]: those in V, one step further."""
        return orthonormal_columns(self.images @ self.turns[1][..., -self.rank :])

    def following(self, bases: Tensor) -> Tensor:
        """Spans of the principal components after given ones [S, live, d, r], within V.

        NaN where the rows left span too few dimensions: the last of these directions would be any.
        """
        axes = self.axes.unsqueeze(1)
        inside = orthonormal_columns(axes.mT @ bases)
        C = self.compressed
        rest = C - inside @ (inside.mT @ C)
        rest = rest - (rest @ inside) @ inside.mT
        rest = rest - C.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] * (inside @ inside.mT)
        values, vectors = small_eigh(rest)
        r = bases.shape[-1]
        found = axes @ vectors[..., -r:]
        spanned = values[..., -r] > RANK_TOLERANCE * self.turns[0][..., -1]
        return orthonormal_columns(found - bases @ (bases.mT @ found)).where(spanned[..., None, None], torch.nan)

    def spans(self, codes: Tensor) -> Tensor:
        """Spans of the least squares directions of codes [S, live, n, r], in the full width."""
        codes = codes * self.keep
        shift = codes.sum(-2).unsqueeze(-1) * self.means.to(codes.dtype).unsqueeze(-2)
        aside = codes.transpose(1, 2).flatten(2)  # [S, n, live·r]: one product for all folds of a site
        projected = (aside.mT @ self.centred).unflatten(1, (len(self.live), -1)) - shift
        # centroids about their mean span one dimension less than there are: redundant columns come first
        return orthonormal_columns(semi_nmf.least_squares(codes, projected).mT)[..., -self.rank :]

    def refitted(self, proxy: str, concepts: int, *, seed: int) -> Tensor:
        """Refits [S, live, d, r] of a method that finds codes."""
        with factors.exact_products(self.x.device):
            scores = self.scores()
            codes = (
                self._codes(scores, concepts, seed=seed)
                if proxy == "semi_nmf"
                else self._members(scores, concepts, seed=seed)
            )
            return self.spans(codes)

    def _codes(self, scores: Tensor, concepts: int, *, seed: int) -> Tensor:
        """By semi-NMF: a row of zeros has the code zero and no part in the fit, so rows left out may stay."""
        found = semi_nmf.fit(scores.flatten(0, 1), concepts, seed=seed, init="svd", quick=True)
        return found.codes.unflatten(0, scores.shape[:2])

    def _members(self, scores: Tensor, concepts: int, *, seed: int) -> Tensor:
        """By k-means of the rows that stay; the others would be a cluster at zero."""
        out = scores.new_zeros(*scores.shape[:-1], concepts)
        for site, mine in enumerate(scores):
            for fold, rows in enumerate(mine):
                stay = self.keep[site, fold].squeeze(-1)
                found = factors.k_means(rows[stay], concepts, seed=seed)
                out[site, fold, stay] = found.assigned.to(out.dtype)
        return out

    def placed(self, bases: Tensor, whole: Tensor) -> Tensor:
        """Bases [S, FOLDS, d, r]: those of a fold without rows are the proxy's own, NaN where too little is left."""
        own = whole.to(bases).unsqueeze(1).expand(-1, FOLDS, -1, -1)
        out = torch.where(self.there[..., None, None], torch.nan, own)
        out[:, self.live] = bases
        return out


Fitted = tuple[Mapping[Site, FitRows], Mapping[Label, Mapping[Site, Proxy]]]
"""Proxies and the rows that they were fitted on."""
Place = tuple[int, Site]  # which of several such sets, and a site of it


def with_refits(
    fits: Mapping[Site, FitRows], found: Mapping[Label, Mapping[Site, Proxy]], *, seed: int
) -> dict[Label, dict[Site, Proxy]]:
    """The proxies of these rows with their refits; random directions and permuted controls stay as they are."""
    return refits_of([(fits, found)], seed=seed)[0]


def refits_of(sets: Sequence[Fitted], *, seed: int) -> list[dict[Label, dict[Site, Proxy]]]:
    """As `with_refits` of several sets of rows: what has one shape, whatever its coordinates, is one batch."""
    fits: dict[Place, FitRows] = {}
    found: dict[Label, dict[Place, Proxy]] = {}
    for i, (rows, mine) in enumerate(sets):
        fits |= {(i, site): part for site, part in rows.items()}
        for label, proxies in mine.items():
            if _is_refitted(label):
                found.setdefault(_kind(label), {}).update({(i, site): proxy for site, proxy in proxies.items()})
    device = next((mine.x.device for mine in fits.values()), torch.device("cpu"))
    with factors.exact_products(device):  # set once: parallel threads would reset it for each other
        groups = each_on_host(lambda at: _refitted(at, fits, found, seed=seed), _alike(fits, found), device.type)
    done: dict[Label, dict[Place, Proxy]] = {kind: {} for kind in found}
    for group in groups:
        for kind, parts in group.items():
            done[kind] |= parts
    return [
        {
            label: {site: done[_kind(label)][i, site] if _is_refitted(label) else proxy for site, proxy in mine.items()}
            for label, mine in proxies.items()
        }
        for i, (_, proxies) in enumerate(sets)
    ]


def _is_refitted(label: Label) -> bool:
    return label.proxy != "random" and label.control != "permuted"


def _kind(label: Label) -> Label:
    """What of a label decides how a proxy is refitted."""
    return Label(label.proxy, label.rank, control=label.control)


def _refitted(
    places: Sequence[Place],
    fits: Mapping[Place, FitRows],
    found: Mapping[Label, Mapping[Place, Proxy]],
    *,
    seed: int,
) -> dict[Label, dict[Place, Proxy]]:
    """The proxies of places of one shape with their refits; NaN where too little is left without any fold."""
    made: dict[int, Reduced] = {}
    first = fits[places[0]]
    mine = {kind: [proxies[at] for at in places] for kind, proxies in found.items() if places[0] in proxies}
    for kind in sorted(mine, key=lambda kind: bool(kind.control)):  # controls need the refits of their proxies
        proxies = mine[kind]
        rank = proxies[0].basis.shape[1]
        if first.live(rank):
            if rank not in made:
                made[rank] = Reduced.of([fits[at] for at in places], rank, seed=seed)
            before = [proxy.left_out for proxy in mine.get(replace(kind, control=""), ())]
            bases = _bases(made[rank], kind, proxies[0], before, seed=seed)
            left = list(made[rank].placed(bases, torch.stack([proxy.basis for proxy in proxies])))
        else:
            own = [proxy.basis for proxy in proxies]
            left = [torch.stack([torch.full_like(Q, torch.nan) if n else Q for n in first.counts]) for Q in own]
        mine[kind] = [replace(proxy, left_out=one) for proxy, one in zip(proxies, left, strict=True)]
    return {kind: dict(zip(places, proxies, strict=True)) for kind, proxies in mine.items()}


def _bases(space: Reduced, label: Label, proxy: Proxy, before: Sequence[Tensor | None], *, seed: int) -> Tensor:
    """The refits [S, live, d, r] of one kind of proxy; `before` those of the proxy that a control belongs to."""
    if label.control == "next":
        refits = torch.stack([one for one in before if one is not None])
        return space.following(refits[:, space.live])
    if label.proxy in _AXES:
        return space.leading()
    return space.refitted(label.proxy, len(proxy.directions), seed=seed)


def _alike(fits: Mapping[Place, FitRows], found: Mapping[Label, Mapping[Place, Proxy]]) -> list[list[Place]]:
    """Places whose rows and proxies have the same shapes, as many together as memory allows."""
    groups: dict[tuple[object, ...], list[list[Place]]] = {}
    for place in dict.fromkeys(place for proxies in found.values() for place in proxies):
        mine, rank = fits[place], 0
        shapes: list[object] = [tuple(mine.x.shape), mine.x.dtype]
        for kind, proxies in found.items():
            if place in proxies:
                shape = proxies[place].basis.shape[1], len(proxies[place].directions)
                rank = max(rank, shape[0])
                shapes += [kind, shape, tuple(mine.live(shape[0]))]
        n, d = mine.x.shape
        size = mine.x.element_size() * n * (2 * d + FOLDS * min(d, WIDER * rank)) + mine.spread.squares.nbytes
        chunks = groups.setdefault(tuple(shapes), [[]])
        if len(chunks[-1]) >= max(1, _BYTES.get(mine.x.device.type, 0) // size):
            chunks.append([])
        chunks[-1].append(place)
    return [chunk for chunks in groups.values() for chunk in chunks]


def standardised_set(fits: Mapping[Site, FitRows], found: Mapping[Label, Mapping[Site, Proxy]]) -> Fitted:
    """Proxies in standardised coordinates with these rows in them; one scale for all proxies of a site."""
    scales = {site: proxy.scale for proxies in found.values() for site, proxy in proxies.items()}
    return {site: fits[site].standardised(scale) for site, scale in scales.items() if scale is not None}, found
