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
    "largest",  # max p
)
SMALLEST_ROW = 8  # rows that see fewer keys say nothing about sharpness
_BLOCK = 2 << 20  # elements of scores held at a time
Row = tuple[Tensor, Tensor, Tensor]


def row_sharpness(
    query: Tensor, key: Tensor, allowed: Tensor, *, bias: Tensor | None, scaling: float | Tensor, first: Tensor | int
) -> Tensor:
    """The quantities above for each head and query row: [B, H, R, 8], NaN where m is too small.

    `query` [B, H, R, d], `key` [B, H_kv, S, d], `allowed` [B, 1 or H, R, S] bool, `bias` alike or None, `scaling` a
    number or [H, 1, 1], `first` the position of each context's first key. One context may be given without its leading
    dimension.
    """
    if query.ndim == 3:
        more = None if bias is None else bias.unsqueeze(0)
        one = (query.unsqueeze(0), key.unsqueeze(0), allowed.unsqueeze(0))
        return row_sharpness(*one, bias=more, scaling=scaling, first=first)[0]
    contexts, heads, rows, _ = query.shape
    per_head = rows * key.shape[2]
    first = torch.as_tensor(first, device=query.device).expand(contexts)
    some = max(1, _BLOCK // (per_head * heads))  # contexts at a time; if one is too large, some of its heads
    few = heads if some > 1 else max(1, min(heads, _BLOCK // per_head))
    out = []
    for start in range(0, contexts, some):
        mine = slice(start, start + some)
        more = None if bias is None else bias[mine]
        some_contexts = (query[mine], key[mine], allowed[mine], more, scaling, first[mine])
        parts = [_block(*some_contexts, slice(h, h + few)) for h in range(0, heads, few)]
        out.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))
    return torch.cat(out)


def _block(
    query: Tensor,
    key: Tensor,
    allowed: Tensor,
    bias: Tensor | None,
    scaling: float | Tensor,
    first: Tensor,
    heads: slice,
) -> Tensor:
    """The quantities of a block of heads."""
    share = torch.arange(query.shape[1], device=query.device)[heads] // (query.shape[1] // key.shape[1])
    keys = key[:, heads] if key.shape[1] == query.shape[1] else key[:, share]
    scale = scaling[heads].to(query.device) if isinstance(scaling, Tensor) else scaling
    plain = scale * _promoted(query[:, heads]) @ _promoted(keys).mT
    extra = None if bias is None else _promoted(bias[:, heads] if bias.shape[1] > 1 else bias)
    mask = allowed[:, heads] if allowed.shape[1] > 1 else allowed
    return _quantities(plain, extra, mask, first=first.view(-1, 1, 1, 1))


def _promoted(x: Tensor) -> Tensor:
    """Half precision as float32; float32 and float64 as they are."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _at(x: Tensor, first: Tensor) -> Tensor:
    """The column of each context's first key: [B, h, R] of [B, h, R, S]."""
    return x.gather(-1, first.expand(*x.shape[:-1], 1)).squeeze(-1)


def _quantities(plain: Tensor, bias: Tensor | None, allowed: Tensor, *, first: Tensor) -> Tensor:
    count = allowed.sum(-1)
    scores = plain if bias is None else plain + bias
    spread = _spread(scores, allowed, count)
    plain_spread = spread if bias is None else _spread(plain, allowed, count)
    masked = scores.masked_fill(~allowed, -torch.inf)
    rest = count - _at(allowed, first).to(count.dtype)
    (entropy, sharp, largest), (entropy_rest, sharp_rest, _), mass = _softmax_rows(masked, count, rest, first=first)
    return torch.stack([entropy, sharp, mass, entropy_rest, sharp_rest, spread, plain_spread, largest], dim=-1)


def _softmax_rows(masked: Tensor, count: Tensor, rest: Tensor, *, first: Tensor) -> tuple[Row, Row, Tensor]:
    """Entropy, sharpness and max p with the first key and without it, and its mass; a forbidden key has score −∞."""
    shifted, weights = _weights(masked)
    total, mean = weights.sum(-1), torch.linalg.vecdot(weights, shifted)
    sink = _at(weights, first)
    mass = torch.where(count >= SMALLEST_ROW, sink / total, torch.nan)
    whole = _row(total, mean, weights.amax(-1), count)
    column = first.expand(*masked.shape[:-1], 1)
    if _retaken(sink, total):
        shifted, weights = _weights(masked.scatter_(-1, column, -torch.inf))
        left, mean = weights.sum(-1), torch.linalg.vecdot(weights, shifted)
        return whole, _row(left, mean, weights.amax(-1), rest), mass
    mean = mean - sink * _at(shifted, first)
    weights.scatter_(-1, column, 0.0)
    return whole, _row(total - sink, mean, weights.amax(-1), rest), mass


def _retaken(sink: Tensor, total: Tensor) -> bool:
    """Whether the softmax of the rest is computed again: where too little of the sums is left, and on a device."""
    return total.device.type != "cpu" or bool((sink > 0.5 * total).any())


def _weights(masked: Tensor) -> tuple[Tensor, Tensor]:
    """Scores shifted so that the largest is 0, and their exponentials."""
    peak = masked.amax(-1, keepdim=True)
    shifted = masked - torch.where(peak.isfinite(), peak, 0.0)
    weights = shifted.exp()
    return shifted.clamp_min_(-1e4), weights  # −1e4 stands in for −∞, since 0 · −∞ is not 0


def _row(total: Tensor, mean: Tensor, top: Tensor, count: Tensor) -> Row:
    """(log Σe^s − Σ p s) / log m, (max p − 1/m) / (1 − 1/m) and max p."""
    m = count.to(total.dtype)
    entropy = (total.log() - mean / total) / m.log()
    largest = top / total
    sharp = (largest - 1.0 / m) / (1.0 - 1.0 / m)
    enough = count >= SMALLEST_ROW
    entropy, sharp, largest = (torch.where(enough, x, torch.nan) for x in (entropy, sharp, largest))
    return entropy, sharp, largest


def _spread(scores: Tensor, allowed: Tensor, count: Tensor) -> Tensor:
    m = count.to(scores.dtype)
    # filled, not multiplied: a forbidden key may hold NaN or infinity
    mean = scores.masked_fill(~allowed, 0.0).sum(-1, keepdim=True) / m.unsqueeze(-1)
    gap = (scores - mean).masked_fill_(~allowed, 0.0)
    return torch.where(count >= SMALLEST_ROW, torch.linalg.vector_norm(gap, dim=-1) / m.sqrt(), torch.nan)
