"""Metrics of attention: how sharp it is, and how queries and keys lie to each other, per head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from anisoscope.errors import TooFewRows
from anisoscope.metrics.metric import metric
from anisoscope.numerics.attention import QUANTITIES, SMALLEST_ROW
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


def rows_used(attention: Attention, metric: str, options: dict[str, Any]) -> int:
    """Query rows that a metric of attention was computed from."""
    return 0 if attention.count is None else int(attention.count[QUANTITIES.index(_quantity(metric, options))])


def _mean(attention: Attention, metric: str, **options: Any) -> float:
    index = QUANTITIES.index(_quantity(metric, options))
    assert attention.count is not None
    if float(attention.count[index]) == 0:
        raise TooFewRows(f"no query row sees {SMALLEST_ROW} keys or more; give longer contexts")
    return float(attention.mean()[index])


@metric(
    Attention,
    title="Attention entropy",
    formula="H(p) / log m, m keys allowed",
    reference=_GODEY,
    convention=_ROWS + "; first=0 takes out the first key",
    bounds=(0.0, 1.0),
    default=True,
    kinds=_SCORES,
)
def attention_entropy(attention: Attention, *, first: bool = True) -> float:
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
)
def attention_sharpness(attention: Attention, *, first: bool = True) -> float:
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
)
def attention_max(attention: Attention) -> float:
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
)
def first_key_mass(attention: Attention) -> float:
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
)
def score_spread(attention: Attention, *, bias: bool = True) -> float:
    """How far the scores of one query differ before softmax."""
    return _mean(attention, "score_spread", bias=bias)


def _centre(directions: Directions) -> Tensor:
    assert directions.total is not None
    return directions.total / directions.n


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
)
def qk_cosine(query: Directions, key: Keys) -> float:
    """Whether the mean query and the mean key drift the same way: parallel (1), opposed (−1) or neither (0)."""
    one, two = _centre(query), _centre(key)
    below = float(one.norm() * two.norm())
    if below == 0.0:
        raise TooFewRows("the mean query or the mean key is zero, so they have no angle; look at the model")
    return float(one @ two) / below
