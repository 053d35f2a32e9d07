"""Tangent proxies: subspaces fitted on activations alone, for all sites of a model at once.

A proxy is the span of a few concepts of the centred activations of the fit half; what it was fitted on and how is its
label, and the label is the variant in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anisoscope.capture.sites.site import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.frequency import bin_of
from anisoscope.metrics.tangent import check_rank
from anisoscope.numerics.factorisation.decompositions import fit_directions
from anisoscope.numerics.linalg import orthonormal_bases
from anisoscope.tangent.step_rows import Half

RANK_TOLERANCE = 1e-10  # of squared singular values: rounding of float32 rows lies far below
_BYTES = 1 << 28  # of stacked activations fitted together


@dataclass(frozen=True)
class Label:
    """How a subspace came about; only what is not the default is named in the table."""

    proxy: str = "semi_nmf"
    rank: int = 16
    fit: str = "refit"
    balanced: bool = False
    control: str = ""  # next, permuted (normal and random are draws, not fits)
    of: str = ""  # embedding_in, update, weight …: what is tested, where that is not the gradient of the rows
    batch: str = ""  # live where the rows are those of training batches

    def options(self, **more: Any) -> dict[str, Any]:
        """The variant in the table."""
        found: dict[str, Any] = {"fit": self.fit, "proxy": self.proxy, "rank": self.rank}
        found |= {"balanced": 1} if self.balanced else {}
        found |= {name: value for name in ("control", "of", "batch") if (value := getattr(self, name))}
        return found | {k: v for k, v in more.items() if v}


@dataclass(frozen=True)
class Proxy:
    """A subspace with its concepts: `basis` d×r orthonormal, `directions` k×d, both about `centre`, the mean."""

    basis: Tensor
    directions: Tensor
    centre: Tensor


def fit_proxies(rows: Mapping[Site, Tensor], label: Label, *, seed: int) -> dict[Site, Proxy]:
    """The same kind of proxy at every site, from its rows [n, d]; sites of one shape are fitted together."""
    found: dict[Site, Proxy] = {}
    for group in _alike(rows):
        stacked = torch.stack([rows[site] for site in group])
        check_rank(label.rank, width=stacked.shape[-1], rows=stacked.shape[-2])
        centre = stacked.mean(-2, keepdim=True)
        centred = stacked - centre
        _refuse_flat(centred, group)
        ranks = spanned(centred, label.rank)
        if label.control == "permuted":
            centred = permute_columns(centred, seed=seed)
        for rank in sorted(set(ranks)):  # rows that span fewer dimensions give a proxy, and controls, of fewer
            mine = [i for i, r in enumerate(ranks) if r == rank]
            directions = fit_directions(centred[mine], rank, method=label.proxy, seed=seed)
            for i, part, basis in zip(mine, directions, orthonormal_bases(directions), strict=True):
                found[group[i]] = Proxy(basis, part, centre[i, 0])
    return {site: found[site] for site in rows}


def spanned(centred: Tensor, most: int) -> list[int]:
    """Of each matrix [b, n, d] the dimensions that its rows span, up to `most`: seen by most + 1 random directions.

    >>> spanned(torch.eye(6)[None, :2] - torch.eye(6)[None, :2].mean(1, keepdim=True), 3)
    [1]
    """
    generator = torch.Generator().manual_seed(0)
    d = centred.shape[-1]
    probes = torch.randn(d, min(d, most + 1), generator=generator, dtype=torch.float64).to(
        centred.device, centred.dtype
    )
    seen = (centred @ probes).double()
    values = torch.linalg.eigvalsh(seen.mT @ seen)
    alive = (values > RANK_TOLERANCE * values[:, -1:]).sum(1)
    return [max(1, min(most, int(number))) for number in alive]


def _alike(rows: Mapping[Site, Tensor]) -> list[list[Site]]:
    """Sites of one shape, as many together as memory allows."""
    groups: dict[tuple[int, ...], list[list[Site]]] = {}
    for site, x in rows.items():
        most = max(1, _BYTES // max(1, x.numel() * x.element_size()))
        chunks = groups.setdefault(tuple(x.shape), [[]])
        if len(chunks[-1]) >= most:
            chunks.append([])
        chunks[-1].append(site)
    return [chunk for chunks in groups.values() for chunk in chunks]


def _refuse_flat(centred: Tensor, group: list[Site]) -> None:
    for i, site in enumerate(group):
        if not bool(centred[i].any()):
            raise AnisoscopeError(
                f"all {centred.shape[1]} rows at {site} are equal, so they span no tangent; give more, or other, data."
            )


def permute_columns(x: Tensor, *, seed: int) -> Tensor:
    """Every column in an order of its own: means and variances of the coordinates stay, everything joint goes."""
    generator = torch.Generator().manual_seed(seed + 7919)
    order = torch.rand(x.shape[-2], x.shape[-1], generator=generator).argsort(0).to(x.device)
    return x.gather(-2, order.expand_as(x))


def rows_to_fit(half: Half, *, most: int) -> Tensor:
    """The rows to fit on: all of them, or the `most` with the smallest hashes."""
    if len(half) <= most:
        return half.x
    return half.x[half.order().argsort()[:most].sort().values.to(half.x.device)]


def balanced_rows(half: Half, bins: Tensor, *, most: int) -> Tensor | None:
    """Equal rows per frequency bin (those with the smallest hashes); None where a bin has none."""
    label = bin_of(half.token, bins)
    order = half.order().argsort()
    number = int(bins.max()) + 1
    mine = [order[label[order] == b] for b in range(number)]
    mine = [rows for b, rows in enumerate(mine) if bool((bins == b).any())]
    least = min((len(rows) for rows in mine), default=0)
    least = min(least, most // max(1, len(mine)))
    if least < 2:
        return None
    chosen = torch.cat([rows[:least] for rows in mine]).sort().values
    return half.x[chosen.to(half.x.device)]


def key(site: Site) -> tuple[int, str, str, str]:
    """A site as a plain value, for what is saved."""
    return site.layer, site.kind, site.stack, site.name


def proxy_state(proxies: Mapping[Site, Proxy]) -> dict[Any, dict[str, Tensor]]:
    parts = ("basis", "directions", "centre")
    return {key(site): {name: getattr(proxy, name).cpu() for name in parts} for site, proxy in proxies.items()}


def load_proxies(state: Mapping[Any, Mapping[str, Tensor]]) -> dict[Site, Proxy]:
    return {Site(*k): Proxy(**parts) for k, parts in state.items()}
