"""Gradients whose place against the activations is known."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from anisoscope.capture.gradient_pass import GradientPass, RowTokens, SiteRows
from anisoscope.capture.row import Index
from anisoscope.capture.sites.site import Site
from anisoscope.numerics.hashing import half_of, mix
from anisoscope.tangent.plan import TangentPlan
from anisoscope.tangent.proxy import Half, StepRows
from support.gradients import noise, subspace

D, R = 24, 4


SITE, OTHER = Site(1, "resid"), Site(2, "resid")


PLAN = TangentPlan(rank=R, draws=99, proxies=("pca", "svd"), frozen=False)


def hashes(n: int, seed: int = 0) -> Tensor:
    return mix(torch.arange(n) + 1_000_003 * (seed + 1))


def half(g: Tensor, context: Tensor, x: Tensor | None = None, token: Tensor | None = None) -> Half:
    nothing = torch.full((len(g),), -1)
    x = g if x is None else x
    token = nothing if token is None else token
    return Half(x, g, context, torch.arange(len(g)), token, nothing, nothing)


def site_rows(x: Tensor, g: Tensor | None, context: Tensor, token: Tensor, masked: Tensor | None = None) -> SiteRows:
    n = len(x)
    index = Index(n, 1, torch.arange(n), context, torch.arange(n), token)
    return SiteRows(x, g, index, RowTokens(token, torch.full((n,), -1), masked))


def planted(
    step: int,
    *,
    contexts: int = 80,
    per: int = 10,
    q: Tensor | None = None,
    share: float = 1.0,
    seed: int = 0,
    **more: Any,
) -> StepRows:
    """Rows whose activations live in span(q), and gradients with a given share of energy there; two sites."""
    q = subspace(D, R) if q is None else q
    rows = StepRows(step)
    owner = hashes(contexts).repeat_interleave(per)
    n = len(owner)
    token = torch.arange(n) % 12
    for site in (SITE, OTHER):
        x = noise(n, R, seed=seed + site.layer) @ q.T * 3 + 0.01 * noise(n, D, seed=seed + 5) + 1.0
        inside = noise(n, R, seed=seed + 10 + site.layer) @ q.T / math.sqrt(R)
        out = noise(n, D, seed=seed + 20 + site.layer)
        out = (out - out @ q @ q.T) / math.sqrt(D - R)
        g = math.sqrt(share) * inside + math.sqrt(1 - share) * out
        for name, value in more.items():
            if name == "spoiled":
                g[value] = math.nan
        fit, test = half_of(owner) == 0, half_of(owner) == 1
        masked = (torch.arange(n) % 2 == 0) if more.get("masked") else None
        rows.add_fit(GradientPass({site: site_rows(x[fit], None, owner[fit], token[fit])}))
        chosen = None if masked is None else masked[test]
        rows.add_test(GradientPass({site: site_rows(x[test], g[test], owner[test], token[test], chosen)}))
    return rows


def found(records: list[dict[str, Any]], metric: str, **columns: Any) -> dict[str, Any]:
    """The one record with this metric and these columns; its variant by its parts."""
    wanted = {"layer": 1, "group": "", "variant": "fit=refit;proxy=pca;rank=4", **columns}
    hits = [r for r in records if r["metric"] == metric and all(r.get(k, "") == v for k, v in wanted.items())]
    assert len(hits) == 1, (metric, wanted, [r["variant"] for r in records if r["metric"] == metric][:20])
    return hits[0]


def variant(**more: Any) -> str:
    from anisoscope.results.query import variant_name

    return variant_name({"fit": "refit", "proxy": "pca", "rank": R, **more})
