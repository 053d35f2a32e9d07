"""What a tangent study measures; the presets differ in cost only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from anisoscope.metrics.metric import parse_requests

DEFAULT_RANK = 16


@dataclass(frozen=True)
class TangentPlan:
    """What the study measures; the presets differ in cost only."""

    rank: int | None = None  # 16, or a quarter of a narrower width
    ranks: tuple[int, ...] = ()  # further ranks, for the curve
    proxies: tuple[str, ...] = ("semi_nmf", "pca")
    draws: int = 999
    permuted: bool = True
    balanced: bool = True
    frozen: bool = True
    window: float = 0.3  # the frozen proxy is fitted on this first part of training
    weights: bool = False
    embedding: bool = True
    fit_rows: int = 8192
    bins: int = 5
    seed: int = 0


PLANS = {
    "light": TangentPlan(permuted=False, balanced=False, frozen=False, embedding=False, fit_rows=2048),
    "standard": TangentPlan(),
    "full": TangentPlan(
        ranks=(4, 8, 32, 64), proxies=("semi_nmf", "pca", "svd", "ica", "kmeans", "random"), weights=True
    ),
}
GEOMETRY = {  # spectra cost an eigenvalue problem per layer and fold, so only the dearest preset has them
    "light": ("average_cosine",),
    "standard": ("average_cosine", "drift", "mean_norm"),
    "full": ("average_cosine", "drift", "mean_norm", "svd_ratio", "participation_ratio", "effective_rank", "two_nn"),
}


def choose_plan(
    metrics: str | Sequence[str], plan: TangentPlan | None, *, rank: int | None, seed: int
) -> tuple[TangentPlan | None, list[Any]]:
    """The tangent plan and the geometry metrics that `metrics` names."""
    chosen: TangentPlan | None
    if isinstance(metrics, str) and metrics in PLANS:
        chosen, names = plan or PLANS[metrics], GEOMETRY[metrics]
    else:
        words = metrics.split(",") if isinstance(metrics, str) else list(metrics)
        wanted = "tangent" in words or plan is not None
        chosen, names = (plan or PLANS["standard"]) if wanted else None, tuple(w for w in words if w != "tangent")
    if chosen is not None:
        chosen = replace(chosen, seed=seed, rank=rank if rank is not None else chosen.rank)
    return chosen, list(parse_requests(list(names))) if names else []
