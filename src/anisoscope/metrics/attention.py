"""Metrics of attention: how sharp it is, and how queries and keys lie to each other, per head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anisoscope.errors import TooFewRows
from anisoscope.metrics.engine.lines import unless
from anisoscope.metrics.engine.metric import metric
from anisoscope.numerics.attention_rows import QUANTITIES, SMALLEST_ROW
from anisoscope.stats.directions import Directions
from anisoscope.stats.means import Attention

_ROWS = f"mean over sampled query rows that see at least {SMALLEST_ROW} keys; the others are counted as dropped"
_GODEY = "Godey et al. 2024, arXiv:2401.12143"
_SCORES = ("scores", "cross_scores")
PAIRS = {"query": "key", "query_unrotated": "key_unrotated", "cross_query": "cross_key"}
"""Queries, and the keys that belong to them."""


class Keys(Directions):
    """The key side of a query/key pair."""


def _quantity(metric: str, options: dict[str, Any]) -> str:
    """Which of the quantities a metric of attention reads."""
    first, bias = options.get("first", True), options.get("bias", True)
    return {
        "attention_entropy": "entropy" if first else "entropy_rest",
        "attention_sharpness": "sharpness" if first else "sharpness_rest",
        "attention_max": "largest",
        "first_key_mass": "first_mass",
        "score_spread": "spread" if bias else "spread_unbiased",
    }.get(metric, QUANTITIES[0])


def rows_used(attention: Attention, metric: str, options: dict[str, Any]) -> Tensor:
    """Query rows that a metric of attention was computed from, by head where there are heads."""
    assert attention.count is not None
    return attention.count[..., QUANTITIES.index(_quantity(metric, options))]


def _mean(attention: Attention, metric: str, **options: Any) -> Tensor:
    index = QUANTITIES.index(_quantity(metric, options))
    assert attention.count is not None
    words = f"no query row sees {SMALLEST_ROW} keys or more; give longer contexts"
    return unless(attention.count[..., index] == 0, attention.mean()[..., index], lambda: TooFewRows(words))


@metric(
    Attention,
    title="Attention entropy",
    formula="H(p) / log m, m keys allowed",
    reference=_GODEY,
    convention=_ROWS + "; first=0 takes out the first key",
    bounds=(0.0, 1.0),
    default=True,
    kinds=_SCORES,
    batched=True,
)
def attention_entropy(attention: Attention, *, first: bool = True) -> Tensor:
    """1 when every allowed key gets the same weight, 0 when one key gets all."""
    return _mean(attention, "attention_entropy", first=first)


@metric(
    Attention,
    title="Attention sharpness",
    formula="(max p − 1/m) / (1 − 1/m)",
    reference=_GODEY,
    convention=_ROWS + "; first=0 takes out the first key",
    bounds=(0.0, 1.0),
    default=True,
    kinds=_SCORES,
    batched=True,
)
def attention_sharpness(attention: Attention, *, first: bool = True) -> Tensor:
    """0 when every allowed key gets the same weight, 1 when one key gets all."""
    return _mean(attention, "attention_sharpness", first=first)


@metric(
    Attention,
    title="Largest attention weight",
    formula="max p",
    reference=_GODEY,
    convention=_ROWS + "; at least 1/m, which attention_sharpness takes out",
    bounds=(0.0, 1.0),
    default=True,
    kinds=_SCORES,
    batched=True,
)
def attention_max(attention: Attention) -> Tensor:
    """The mean row maximum: how much of its attention a query gives to the one key it looks at most."""
    return _mean(attention, "attention_max")


@metric(
    Attention,
    title="Mass on the first key",
    formula="p of the first key of the context",
    reference="Xiao et al. 2023, arXiv:2309.17453 (attention sinks)",
    convention=_ROWS,
    bounds=(0.0, 1.0),
    default=True,
    kinds=_SCORES,
    batched=True,
)
def first_key_mass(attention: Attention) -> Tensor:
    """Attention that goes to the first position: large when it serves as a sink."""
    return _mean(attention, "first_key_mass")


@metric(
    Attention,
    title="Spread of scores",
    formula="standard deviation of s over the allowed keys of a row",
    reference=_GODEY,
    convention=_ROWS + "; scores as fed to softmax, bias=0 without additive position bias",
    bounds=(0.0, None),
    default=True,
    kinds=_SCORES,
    batched=True,
)
def score_spread(attention: Attention, *, bias: bool = True) -> Tensor:
    """How far the scores of one query differ before softmax."""
    return _mean(attention, "score_spread", bias=bias)


@metric(
    Directions,
    Keys,
    title="Query–key cosine",
    formula="cos(mean q, mean k)",
    reference=_GODEY,
    convention="q and k as they meet (after rotation), or both before rotation; grouped heads share their key",
    invariant=("scale",),
    bounds=(-1.0, 1.0),
    default=True,
    kinds=tuple(PAIRS),
    batched=True,
)
def qk_cosine(query: Directions, key: Keys) -> Tensor:
    """Whether the mean query and the mean key drift the same way: parallel (1), opposed (−1) or neither (0)."""
    one, two = query.total, key.total  # their angle is that of the means
    assert one is not None and two is not None
    below = torch.linalg.vector_norm(one, dim=-1) * torch.linalg.vector_norm(two, dim=-1)
    words = "the mean query or the mean key is zero, so they have no angle; look at the model"
    return unless(below == 0.0, (one * two).sum(-1) / below, lambda: TooFewRows(words))
