"""Metrics of attention, per head: the sharpness of attention rows, and the relative drift of queries and keys.

The whole attention matrix is never held in memory. Notation: s the scores of one query as fed to softmax,
p = softmax(s), m the number of keys the mask allows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anisoscope.metrics.anisotropy import without_direction
from anisoscope.metrics.engine.folds import unless
from anisoscope.metrics.engine.metric import measured, metric
from anisoscope.numerics.host import each_on_host
from anisoscope.stats.directions import Attention, Directions, Keys

QUANTITIES = (
    "entropy",  # H(p) / log m
    "sharpness",  # (max p − 1/m) / (1 − 1/m)
    "first_mass",  # p of the context's first key
    "entropy_rest",  # both again with the first key taken out and p renormalised
    "sharpness_rest",
    "spread",  # standard deviation of s over the allowed keys
    "spread_unbiased",  # the same without additive bias
    "largest",  # max p
)
SMALLEST_ROW = 8  # queries with fewer allowed keys are left out
_BLOCK, _BLOCK_ON_HOST = 2 << 20, 1 << 18  # elements of scores computed at a time; on the host they fit into the cache
PAIRS = {"query": "key", "query_unrotated": "key_unrotated", "cross_query": "cross_key"}
"""Queries, and the keys that belong to them."""
_ROWS = f"mean over sampled query rows that see at least {SMALLEST_ROW} keys; the others are counted as dropped"
_GODEY = "Godey et al. 2024, arXiv:2401.12143"
_SCORES = ("scores", "cross_scores")
_scored = partial(metric, Attention, default=True, kinds=_SCORES, reference=_GODEY, bounds=(0.0, 1.0), batched=True)
_UNTRAINED = "mean over heads and sampled query rows of a block as it is made; allowed: which keys a query may see"
_untrained = partial(measured, "study untrained", reference=_GODEY, convention=_UNTRAINED)


def row_sharpness(
    query: Tensor, key: Tensor, allowed: Tensor, *, bias: Tensor | None, scaling: float | Tensor, first: Tensor | int
) -> Tensor:
    """The quantities above for each head and query row: [B, H, R, 8], NaN where m is too small.

    `query` [B, H, R, d], `key` [B, H_kv, S, d], `allowed` [B, 1 or H, R, S] bool, `bias` alike or None, `scaling` a
    number or [H, 1, 1], `first` the position of each context's first key.
    """
    contexts, heads, rows, _ = query.shape
    per_head = rows * key.shape[2]
    first = torch.as_tensor(first, device=query.device).expand(contexts).view(-1, 1, 1, 1)
    owner = torch.arange(heads, device=query.device) // (heads // key.shape[1])  # the key head of each query head
    block = _BLOCK if query.device.type != "cpu" else _BLOCK_ON_HOST
    some = max(1, block // (per_head * heads))  # contexts at a time; if one is too large, some of its heads
    few = heads if some > 1 else max(1, min(heads, block // per_head))

    @torch.no_grad()  # other threads have modes of their own
    def of_contexts(start: int) -> Tensor:
        mine, parts = slice(start, start + some), []
        for chosen in (slice(h, h + few) for h in range(0, heads, few)):
            keys = key[mine, chosen] if key.shape[1] == heads else key[mine][:, owner[chosen]]
            scale = scaling[chosen].to(query.device) if isinstance(scaling, Tensor) else scaling
            plain = scale * _promoted(query[mine, chosen]) @ _promoted(keys).mT
            extra = None if bias is None else _promoted(_of_heads(bias[mine], chosen))
            parts.append(_quantities(plain, extra, _of_heads(allowed[mine], chosen), first=first[mine]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    return torch.cat(each_on_host(of_contexts, range(0, contexts, some), query.device.type))


def _promoted(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _of_heads(x: Tensor, heads: slice) -> Tensor:
    """The part of a mask or bias for some heads; one with a single head applies to all."""
    return x[:, heads] if x.shape[1] > 1 else x


def _at(x: Tensor, first: Tensor) -> Tensor:
    """The entries of x [B, h, R, S] at each context's first key: [B, h, R]."""
    return x.gather(-1, first.expand(*x.shape[:-1], 1)).squeeze(-1)


def _quantities(plain: Tensor, bias: Tensor | None, allowed: Tensor, *, first: Tensor) -> Tensor:
    """The quantities of a block of heads, with the first key and without it; a masked key has score −∞."""
    count = allowed.sum(-1)
    scores = plain if bias is None else plain + bias
    spread = _spread(scores, allowed, count)
    plain_spread = spread if bias is None else _spread(plain, allowed, count)
    masked = scores.masked_fill(~allowed, -torch.inf)
    shifted, weights = _weights(masked)
    total, mean = weights.sum(-1), torch.linalg.vecdot(weights, shifted)
    sink = _at(weights, first)
    mass = torch.where(count >= SMALLEST_ROW, sink / total, torch.nan)
    entropy, sharp, largest = _row(total, mean, weights.amax(-1), count)
    column = first.expand(*masked.shape[:-1], 1)
    if _retaken(sink, total):
        shifted, weights = _weights(masked.scatter_(-1, column, -torch.inf))
        left, mean = weights.sum(-1), torch.linalg.vecdot(weights, shifted)
    else:
        left, mean = total - sink, mean - sink * _at(shifted, first)
        weights.scatter_(-1, column, 0.0)
    rest = count - _at(allowed, first).to(count.dtype)
    entropy_rest, sharp_rest, _ = _row(left, mean, weights.amax(-1), rest)
    return torch.stack([entropy, sharp, mass, entropy_rest, sharp_rest, spread, plain_spread, largest], dim=-1)


def _retaken(sink: Tensor, total: Tensor) -> bool:
    """Whether the softmax without the first key is recomputed: on a GPU, or if subtraction would lose digits."""
    return total.device.type != "cpu" or bool((sink > 0.5 * total).any())


def _weights(masked: Tensor) -> tuple[Tensor, Tensor]:
    """Scores shifted so that the largest is 0, and their exponentials."""
    peak = masked.amax(-1, keepdim=True)
    shifted = masked - torch.where(peak.isfinite(), peak, 0.0)
    weights = shifted.exp()
    return shifted.clamp_min_(-1e4), weights  # −1e4 instead of −∞, because 0 · −∞ is NaN


def _row(total: Tensor, mean: Tensor, top: Tensor, count: Tensor) -> list[Tensor]:
    """(log Σe^s − Σ p s) / log m, (max p − 1/m) / (1 − 1/m) and max p."""
    m = count.to(total.dtype)
    entropy = (total.log() - mean / total) / m.log()
    largest = top / total
    sharp = (largest - 1.0 / m) / (1.0 - 1.0 / m)
    return [torch.where(count >= SMALLEST_ROW, x, torch.nan) for x in (entropy, sharp, largest)]


def _spread(scores: Tensor, allowed: Tensor, count: Tensor) -> Tensor:
    m = count.to(scores.dtype)
    # filled, not multiplied by 0: a masked key may hold NaN or infinity
    mean = scores.masked_fill(~allowed, 0.0).sum(-1, keepdim=True) / m.unsqueeze(-1)
    gap = (scores - mean).masked_fill_(~allowed, 0.0)
    return torch.where(count >= SMALLEST_ROW, torch.linalg.vector_norm(gap, dim=-1) / m.sqrt(), torch.nan)


def _rows_left_out(quantity: str, without: str = "") -> Callable[[Attention, dict[str, Any]], Tensor]:
    """A function that counts the query rows without a value of a quantity (`without`: if its option is off)."""

    def left_out(attention: Attention, options: dict[str, Any]) -> Tensor:
        return attention.n - attention.count[..., QUANTITIES.index(quantity if all(options.values()) else without)]

    return left_out


def _mean(attention: Attention, quantity: str) -> Tensor:
    index = QUANTITIES.index(quantity)
    words = f"no query row sees {SMALLEST_ROW} keys or more; give longer contexts"
    return unless(attention.count[..., index] == 0, attention.mean()[..., index], words)


@_scored(
    title="Attention entropy",
    formula="H(p) / log m, m keys allowed",
    convention=_ROWS + "; first=0 takes out the first key",
    left_out=_rows_left_out("entropy", "entropy_rest"),
)
def attention_entropy(attention: Attention, *, first: bool = True) -> Tensor:
    """1 when every allowed key gets the same weight, 0 when one key gets all."""
    return _mean(attention, "entropy" if first else "entropy_rest")


@_scored(
    title="Attention sharpness",
    formula="(max p − 1/m) / (1 − 1/m)",
    convention=_ROWS + "; first=0 takes out the first key",
    left_out=_rows_left_out("sharpness", "sharpness_rest"),
)
def attention_sharpness(attention: Attention, *, first: bool = True) -> Tensor:
    """0 when every allowed key gets the same weight, 1 when one key gets all."""
    return _mean(attention, "sharpness" if first else "sharpness_rest")


@_scored(
    title="Largest attention weight",
    formula="max p",
    convention=_ROWS + "; at least 1/m, which attention_sharpness takes out",
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
    left_out=_rows_left_out("first_mass"),
)
def first_key_mass(attention: Attention) -> Tensor:
    """Attention that goes to the first position: large when it serves as a sink."""
    return _mean(attention, "first_mass")


@_scored(
    title="Spread of scores",
    formula="standard deviation of s over the allowed keys of a row",
    convention=_ROWS + "; scores as fed to softmax, bias=0 without additive position bias",
    bounds=(0.0, None),
    left_out=_rows_left_out("spread", "spread_unbiased"),
)
def score_spread(attention: Attention, *, bias: bool = True) -> Tensor:
    """How far the scores of one query differ before softmax."""
    return _mean(attention, "spread" if bias else "spread_unbiased")


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
    one, two = query.total, key.total  # sums have the same angle as means
    below = torch.linalg.vector_norm(one, dim=-1) * torch.linalg.vector_norm(two, dim=-1)
    words = "the mean query or the mean key is zero, so they have no angle; look at the model"
    return unless(below == 0.0, (one * two).sum(-1) / below, words)
