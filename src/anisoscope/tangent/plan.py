"""What the tangent study and the geometry metrics measure at a step: plans and presets by cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.catalogue import parse_requests
from anisoscope.metrics.engine.metric import Request


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
    standardised: bool = True  # energies also in standardised coordinates
    window: str = "checkpoints:0.3"  # first share of the measured steps, or of all steps, the frozen proxy is fitted on
    weights: bool = False
    embedding: bool = True
    fit_rows: int = 8192
    bins: int = 5
    seed: int = 0
    splits: tuple[int, ...] = ()  # further splits of the contexts into halves to fit and to test, by seed

    def __post_init__(self) -> None:
        if any(split < 1 for split in self.splits) or len(set(self.splits)) < len(self.splits):
            given = ",".join(map(str, self.splits))
            raise AnisoscopeError(
                f"the further splits are {given}; expected different whole numbers from 1 on, such as 1,2 "
                "(split 0 is always measured)."
            )


def parse_window(text: str) -> tuple[str, float]:
    """What the window of the frozen proxy is a share of, and the share.

    >>> parse_window("checkpoints:0.3"), parse_window("steps:0.25")
    (('checkpoints', 0.3), ('steps', 0.25))
    """
    unit, _, share = text.partition(":")
    try:
        value = float(share)
    except ValueError:
        value = math.nan
    if unit not in ("checkpoints", "steps") or not 0 < value < 1:
        raise AnisoscopeError(
            f"frozen window {text!r} is not understood; expected a share of the measured steps such as "
            "checkpoints:0.3, or of all steps such as steps:0.3."
        )
    return unit, value


PLANS = {
    "light": TangentPlan(
        permuted=False, balanced=False, frozen=False, standardised=False, embedding=False, fit_rows=2048
    ),
    "standard": TangentPlan(),
    "full": TangentPlan(
        ranks=(4, 8, 32, 64), proxies=("semi_nmf", "pca", "svd", "ica", "kmeans", "random"), weights=True
    ),
}
# metrics of "The Shape of Learning" over depth and training; no gradients, so no tangent plan
_SHAPE = (
    "svd_ratio svd_ratio:batches=1 svd_ratio_squared svd_ratio_squared:batches=1 average_cosine drift two_nn "
    "two_nn:calibrated=1 levina_bickel gride:scale=1 gride gride:scale=4 gride:scale=8 local_anisotropy "
    "local_anisotropy:partition=random local_anisotropy:partition=none attention_entropy attention_sharpness "
    "score_spread"
)
# queries, keys and scores over training, as in "Is Anisotropy Inherent to Transformers?", and the stream
_ATTENTION = (
    "average_cosine drift mean_norm explained_by_drift qk_cosine attention_entropy attention_sharpness attention_max "
    "first_key_mass score_spread"
)
SHAPE, ATTENTION = tuple(_SHAPE.split()), tuple(_ATTENTION.split())
GEOMETRY = {  # spectra cost an eigenvalue problem per layer and fold, so only `full` has them
    "light": ("average_cosine",),
    "standard": ("average_cosine", "drift", "mean_norm"),
    "full": ("average_cosine", "drift", "mean_norm", "svd_ratio", "participation_ratio", "effective_rank", "two_nn"),
    "shape": SHAPE,
    "attention": ATTENTION,
}
_MORE_SITES = {"attention": ("query_unrotated", "key_unrotated")}


def more_sites(metrics: str | Sequence[str]) -> tuple[str, ...]:
    """Kinds of sites that a preset measures in addition to the default ones, if the model has them.

    >>> more_sites("attention"), more_sites("shape")
    (('query_unrotated', 'key_unrotated'), ())
    """
    return _MORE_SITES.get(leading_preset(metrics), ())


def leading_preset(metrics: str | Sequence[str]) -> str:
    """The preset that stands alone, or before further metrics; empty where there is none.

    >>> leading_preset("standard"), leading_preset("standard,two_nn"), leading_preset("two_nn,drift")
    ('standard', 'standard', '')
    """
    words = metrics.split(",") if isinstance(metrics, str) else [*metrics]
    return words[0] if words and words[0] in GEOMETRY else ""


def choose_plan(
    metrics: str | Sequence[str],
    plan: TangentPlan | None,
    *,
    rank: int | None,
    seed: int,
    window: str | None = None,
    standardised: bool | None = None,
) -> tuple[TangentPlan | None, list[Request]]:
    """(tangent plan, or None for geometry alone; requests for geometry metrics) of the option `metrics`.

    Metrics of a preset, and those that follow it, are measured only at the sites each declares; metrics without a
    preset wherever possible.
    """
    chosen: TangentPlan | None
    given = metrics.split(",") if isinstance(metrics, str) else list(metrics)
    if preset := leading_preset(metrics):
        chosen = plan or PLANS.get(preset)
        names = list(dict.fromkeys([*GEOMETRY[preset], *given[1:]]))
        requests = [replace(request, named=False) for request in parse_requests(names)]
    else:
        wanted = "tangent" in given or plan is not None
        chosen, names = (plan or PLANS["standard"]) if wanted else None, [w for w in given if w != "tangent"]
        requests = parse_requests(names) if names else []
    if chosen is not None:
        standardised = chosen.standardised if standardised is None else standardised
        chosen = replace(chosen, seed=seed, rank=rank if rank is not None else chosen.rank, standardised=standardised)
        chosen = replace(chosen, window=window or chosen.window)
        parse_window(chosen.window)
    return chosen, requests
