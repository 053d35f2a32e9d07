"""How sharp the rows of an attention matrix are, without ever holding the whole matrix.

Notation: s the scores of one query as fed to softmax, p = softmax(s), m the number of keys the mask allows.
"""

from __future__ import annotations

import torch
from torch import Tensor

QUANTITIES = (
    "entropy",  # H(p) / log m
    "sharpness",  # (max p − 1/m) / (1 − 1/m)
    "first_mass",  # p of the context's first key
    "entropy_rest",  # both again with the first key taken out and p renormalised
    "sharpness_rest",
    "spread",  # standard deviation of s over the allowed keys
    "spread_unbiased",  # the same without additive bias
)
SMALLEST_ROW = 8  # rows that see fewer keys say nothing about sharpness
_BLOCK = 8 << 20  # elements of scores held at a time


def row_sharpness(
    query: Tensor, key: Tensor, allowed: Tensor, *, bias: Tensor | None, scaling: float, first: int
) -> Tensor:
    """The quantities above for each head and query row of one context: [H, R, 7], NaN where m is too small.

    `query` [H, R, d], `key` [H_kv, S, d], `allowed` [1 or H, R, S] bool, `bias` [1 or H, R, S] or None.
    """
    heads, rows, _ = query.shape
    group = heads // key.shape[0]
    step = max(1, _BLOCK // (rows * key.shape[1]))
    parts = []
    for start in range(0, heads, step):
        chosen = torch.arange(start, min(start + step, heads), device=query.device)
        plain = scaling * query[chosen].float() @ key[chosen // group].float().mT
        extra = None if bias is None else bias[chosen if bias.shape[0] > 1 else slice(0, 1)].float()
        mask = allowed[chosen if allowed.shape[0] > 1 else slice(0, 1)]
        parts.append(_quantities(plain, extra, mask, first=first))
    return torch.cat(parts)


def _quantities(plain: Tensor, bias: Tensor | None, allowed: Tensor, *, first: int) -> Tensor:
    count = allowed.sum(-1)
    scores = plain if bias is None else plain + bias
    entropy, top, mass = _softmax_row(scores, allowed, count, first=first)
    rest = allowed.clone()
    rest[..., first] = False
    entropy_rest, top_rest, _ = _softmax_row(scores, rest, rest.sum(-1), first=first)
    spread = _spread(scores, allowed, count)
    plain_spread = spread if bias is None else _spread(plain, allowed, count)
    return torch.stack([entropy, top, mass, entropy_rest, top_rest, spread, plain_spread], dim=-1)


def _softmax_row(scores: Tensor, allowed: Tensor, count: Tensor, *, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised entropy, sharpness and the mass of the first key."""
    masked = scores.masked_fill(~allowed, -torch.inf)
    peak = masked.amax(-1, keepdim=True)
    shifted = masked - torch.where(peak.isfinite(), peak, 0.0)
    weights = shifted.exp()
    total = weights.sum(-1)
    # H = log Σe^s − Σ p s, with s shifted so that its largest value is 0; a forbidden key has weight 0 and counts 0
    entropy = total.log() - (weights * shifted.masked_fill(~allowed, 0.0)).sum(-1) / total
    m = count.to(scores.dtype)
    enough = count >= SMALLEST_ROW
    sharp = (1.0 / total - 1.0 / m) / (1.0 - 1.0 / m)
    values = (entropy / m.log(), sharp, weights[..., first] / total)
    return tuple(torch.where(enough, value, torch.nan) for value in values)  # type: ignore[return-value]


def _spread(scores: Tensor, allowed: Tensor, count: Tensor) -> Tensor:
    m = count.to(scores.dtype)
    mean = scores.masked_fill(~allowed, 0.0).sum(-1) / m
    gap = (scores - mean.unsqueeze(-1)).masked_fill(~allowed, 0.0)
    return torch.where(count >= SMALLEST_ROW, (gap.square().sum(-1) / m).sqrt(), torch.nan)
