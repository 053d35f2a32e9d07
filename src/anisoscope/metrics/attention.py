"""Metrics of attention: how sharp it is, and how queries and keys lie to each other, per head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anisoscope.errors import TooFewRows
from anisoscope.metrics.engine.centring import without_direction
from anisoscope.metrics.engine.lines import unless
from anisoscope.metrics.engine.metric import measured, metric
from anisoscope.numerics.attention_rows import QUANTITIES, SMALLEST_ROW
from anisoscope.stats.directions import Directions, Keys
from anisoscope.stats.means import Attention

_ROWS = f"mean over sampled query rows that see at least {SMALLEST_ROW} keys; the others are counted as dropped"
_GODEY = "Godey et al. 2024, arXiv:2401.12143"
_SCORES = ("scores", "cross_scores")
_scored = partial(metric, Attention, default=True, kinds=_SCORES, batched=True)
PAIRS = {"query": "key", "query_unrotated": "key_unrotated", "cross_query": "cross_key"}
"""Queries, and the keys that belong to them."""


def _rows_left_out(quantity: str, without: str = "") -> Callable[[Attention, dict[str, Any]], Tensor]:
    """Query rows that a metric of this quantity (`without` what its option switches off) is not computed from."""

    def left_out(attention: Attention, options: dict[str, Any]) -> Tensor:
        assert attention.count is not None
        return attention.n - attention.count[..., QUANTITIES.index(quantity if all(options.values()) else without)]

    return left_out


def _mean(attention: Attention, quantity: str) -> Tensor:
    index = QUANTITIES.index(quantity)
    assert attention.count is not None
    words = f"no query row sees {SMALLEST_ROW} keys or more; give longer contexts"
    return unless(attention.count[..., index] == 0, attention.mean()[..., index], lambda: TooFewRows(words))


@_scored(
    title="Attention entropy",
    formula="H(p) / log m, m keys allowed",
    reference=_GODEY,
    convention=_ROWS + "; first=0 takes out the first key",
    bounds=(0.0, 1.0),
    left_out=_rows_left_out("entropy", "entropy_rest"),
)
def attention_entropy(attention: Attention, *, first: bool = True) -> Tensor:
    """1 when every allowed key gets the same weight, 0 when one key gets all."""
    return _mean(attention, "entropy" if first else "entropy_rest")


@_scored(
    title="Attention sharpness",
    formula="(max p − 1/m) / (1 − 1/m)",
    reference=_GODEY,
    convention=_ROWS + "; first=0 takes out the first key",
    bounds=(0.0, 1.0),
    left_out=_rows_left_out("sharpness", "sharpness_rest"),
)
def attention_sharpness(attention: Attention, *, first: bool = True) -> Tensor:
    """0 when every allowed key gets the same weight, 1 when one key gets all."""
    return _mean(attention, "sharpness" if first else "sharpness_rest")


@_scored(
    title="Largest attention weight",
    formula="max p",
    reference=_GODEY,
    convention=_ROWS + "; at least 1/m, which attention_sharpness takes out",
    bounds=(0.0, 1.0),
    left_out=_rows_left_out("largest"),
)
def attention_max(attention: Attention) -> Tensor:
    """The mean row maximum: how much of its attention a query gives to the one key it looks at most."""
    return _mean(attention, "largest")


@_scored(
    title="Mass on the first key",
    formula="p of the first key of the context",
    reference="Xiao et al. 2023, arXiv:2309.17453 (attention sinks)",
    convention=_ROWS,
    bounds=(0.0, 1.0),
    left_out=_rows_left_out("first_mass"),
)
def first_key_mass(attention: Attention) -> Tensor:
    """Attention that goes to the first position: large when it serves as a sink."""
    return _mean(attention, "first_mass")


@_scored(
    title="Spread of scores",
    formula="standard deviation of s over the allowed keys of a row",
    reference=_GODEY,
    convention=_ROWS + "; scores as fed to softmax, bias=0 without additive position bias",
    bounds=(0.0, None),
    left_out=_rows_left_out("spread", "spread_unbiased"),
)
def score_spread(attention: Attention, *, bias: bool = True) -> Tensor:
    """How far the scores of one query differ before softmax."""
    return _mean(attention, "spread" if bias else "spread_unbiased")


_UNTRAINED = "mean over heads and sampled query rows of a block as it is made; allowed: which keys a query may see"
_untrained = partial(measured, "study untrained", reference=_GODEY, convention=_UNTRAINED)


@_untrained(title="Size of scores", formula="mean |s| over the allowed keys", bounds=(0.0, None))
def score_magnitude(scores: Tensor, allowed: Tensor) -> Tensor:
    """How large the scores of one query are as they are fed to softmax, of every row [..., keys]."""
    return scores.abs().masked_fill(~allowed, 0.0).sum(-1) / allowed.sum(-1)


@_untrained(title="Median attention weight", formula="median p of a row", bounds=(0.0, 1.0))
def attention_median(p: Tensor, allowed: Tensor) -> Tensor:
    """The middle weight of every row; of an even number of keys the mean of the two in the middle.

    >>> attention_median(torch.tensor([4.0, 1.0, 9.0, 2.0]), torch.tensor([True, True, True, True]))
    tensor(3.)
    """
    ascending = p.masked_fill(~allowed, torch.inf).sort(-1).values
    m = allowed.sum(-1, keepdim=True).expand(*p.shape[:-1], 1)
    both = [ascending.gather(-1, at) for at in (((m - 1).clamp(min=0)) // 2, (m // 2).clamp(max=p.shape[-1] - 1))]
    return (0.5 * (both[0] + both[1])).squeeze(-1)


@_untrained(title="Smallest attention weight", formula="min p of a row", bounds=(0.0, 1.0))
def attention_min(p: Tensor, allowed: Tensor) -> Tensor:
    """The smallest weight of every row: how much attention the key gets that a query looks at least."""
    return p.masked_fill(~allowed, torch.inf).amin(-1)


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
    left_out=without_direction,
    batched=True,
)
def qk_cosine(query: Directions, key: Keys) -> Tensor:
    """Whether the mean query and the mean key drift the same way: parallel (1), opposed (−1) or neither (0)."""
    one, two = query.total, key.total  # their angle is that of the means
    assert one is not None and two is not None
    below = torch.linalg.vector_norm(one, dim=-1) * torch.linalg.vector_norm(two, dim=-1)
    words = "the mean query or the mean key is zero, so they have no angle; look at the model"
    return unless(below == 0.0, (one * two).sum(-1) / below, lambda: TooFewRows(words))
