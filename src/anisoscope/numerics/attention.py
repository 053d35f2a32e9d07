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
    rest = count - allowed[..., first].to(count.dtype)
    (entropy, sharp), (entropy_rest, sharp_rest), mass = _softmax_rows(masked, count, rest, first=first)
    return torch.stack([entropy, sharp, mass, entropy_rest, sharp_rest, spread, plain_spread], dim=-1)


def _softmax_rows(
    masked: Tensor, count: Tensor, rest: Tensor, *, first: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """Entropy and sharpness with the first key and without it, and its mass; a forbidden key has score −∞."""
    shifted, weights = _weights(masked)
    total, mean = weights.sum(-1), (weights * shifted).sum(-1)
    sink = weights[..., first].clone()
    mass = torch.where(count >= SMALLEST_ROW, sink / total, torch.nan)
    whole = _entropy_and_sharpness(total, mean, weights.amax(-1), count)
    if bool((sink > 0.5 * total).any()):  # too little would be left of the sums: take the softmax of the rest again
        masked[..., first] = -torch.inf
        shifted, weights = _weights(masked)
        return whole, _entropy_and_sharpness(weights.sum(-1), (weights * shifted).sum(-1), weights.amax(-1), rest), mass
    weights[..., first] = 0.0
    mean = mean - sink * shifted[..., first]
    return whole, _entropy_and_sharpness(total - sink, mean, weights.amax(-1), rest), mass


def _weights(masked: Tensor) -> tuple[Tensor, Tensor]:
    """Scores shifted so that the largest is 0, and their exponentials."""
    peak = masked.amax(-1, keepdim=True)
    shifted = masked - torch.where(peak.isfinite(), peak, 0.0)
    weights = shifted.exp()
    return shifted.clamp_min_(-1e4), weights  # −1e4 stands in for −∞, since 0 · −∞ is not 0


def _entropy_and_sharpness(total: Tensor, mean: Tensor, top: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """(log Σe^s − Σ p s) / log m and (max p − 1/m) / (1 − 1/m)."""
    m = count.to(total.dtype)
    entropy = (total.log() - mean / total) / m.log()
    sharp = (top / total - 1.0 / m) / (1.0 - 1.0 / m)
    enough = count >= SMALLEST_ROW
    return torch.where(enough, entropy, torch.nan), torch.where(enough, sharp, torch.nan)


def _spread(scores: Tensor, allowed: Tensor, count: Tensor) -> Tensor:
    m = count.to(scores.dtype)
    # filled, not multiplied: a forbidden key may hold NaN or infinity
    mean = scores.masked_fill(~allowed, 0.0).sum(-1, keepdim=True) / m.unsqueeze(-1)
    gap = (scores - mean).masked_fill_(~allowed, 0.0)
    return torch.where(count >= SMALLEST_ROW, torch.linalg.vector_norm(gap, dim=-1) / m.sqrt(), torch.nan)
