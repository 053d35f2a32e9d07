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
    spread = _spread(scores, allowed, count)
    plain_spread = spread if bias is None else _spread(plain, allowed, count)
    masked = scores.masked_fill(~allowed, -torch.inf)
    entropy, sharp, mass = _softmax_row(masked, count, first=first)
    # the softmax is taken again, shifted by its own largest score: where the first key takes nearly all, a difference
    # of the two sums would have no digits left
    masked[..., first] = -torch.inf
    entropy_rest, sharp_rest, _ = _softmax_row(masked, count - allowed[..., first].to(count.dtype), first=first)
    return torch.stack([entropy, sharp, mass, entropy_rest, sharp_rest, spread, plain_spread], dim=-1)


def _softmax_row(masked: Tensor, count: Tensor, *, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised entropy, sharpness and the mass of the first key; a forbidden key has score −∞."""
    peak = masked.amax(-1, keepdim=True)
    shifted = masked - torch.where(peak.isfinite(), peak, 0.0)
    weights = shifted.exp()
    total = weights.sum(-1)
    mass = weights[..., first] / total
    # H = log Σe^s − Σ p s with s shifted so that its largest is 0; −1e4 stands in for −∞, where the weight is 0 anyway
    mean = weights.mul_(shifted.clamp_min_(-1e4)).sum(-1) / total
    entropy = total.log() - mean
    m = count.to(masked.dtype)
    enough = count >= SMALLEST_ROW
    sharp = (1.0 / total - 1.0 / m) / (1.0 - 1.0 / m)
    values = (entropy / m.log(), sharp, mass)
    return tuple(torch.where(enough, value, torch.nan) for value in values)  # type: ignore[return-value]


def _spread(scores: Tensor, allowed: Tensor, count: Tensor) -> Tensor:
    m = count.to(scores.dtype)
    mean = (scores * allowed).sum(-1, keepdim=True) / m.unsqueeze(-1)
    gap = (scores - mean).mul_(allowed)
    return torch.where(count >= SMALLEST_ROW, torch.linalg.vector_norm(gap, dim=-1) / m.sqrt(), torch.nan)
