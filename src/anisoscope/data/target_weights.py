"""Weights of the training loss by the frequency of the target token: the strong intervention on token frequency.

Notation: f = counts of the types in training, p = f/Σf their shares, w = weight of a target of each type.

    w = min(CAP, c·f^(A−1)),  c such that Σ p w = 1,  so that the targets count as if they were distributed as p·w ∝ f^A

A = 1 is neutral and A = 0 flat: every type then counts alike, however rare. No target counts for more than CAP average
ones, since a single occurrence would else decide an update; types rarer than that stay below their share. Unlike a
resampling of whole contexts, the weights change the objective alone: the texts and their order are the same.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from anisoscope.data.resampling import STEEPEST, parse_exponent, shape
from anisoscope.errors import AnisoscopeError

CAP = 100.0  # largest weight of a target; the mean is 1
NEUTRAL = 1.0  # the exponent that changes nothing


def parse_target_weights(text: str) -> float | None:
    """The exponent A of the effective distribution f^A; None where nothing is weighted.

    >>> parse_target_weights("none"), parse_target_weights("flat"), parse_target_weights("power:1.5")
    (None, 0.0, 1.5)
    >>> parse_target_weights("power:1") is None
    True
    """
    exponent = parse_exponent(text, neutral="none", law="power")
    if exponent is not None and math.isnan(exponent):
        raise AnisoscopeError(
            f"target weights {text!r} are not understood; expected none, flat, or power:A, which makes targets count "
            f"as if they had the frequencies f^A, with A from 0 (flat) to {STEEPEST:g}, such as power:1.5."
        )
    return None if exponent == NEUTRAL else exponent


def weights_by_frequency(counts: np.ndarray, exponent: float, *, cap: float = CAP) -> np.ndarray:
    """The weight of every type as a target, float64 [V]; their mean over the counted tokens is 1.

    A type that was not counted weighs as one that occurs once, and special tokens (the caller's to set) are not known
    here.

    >>> weights_by_frequency(np.array([6, 2, 1]), 0.0).tolist()  # every type counts for a third of 9 tokens
    [0.5, 1.5, 3.0]
    >>> weights_by_frequency(np.array([6, 2, 1]), 0.0, cap=2.0).round(3).tolist()
    [0.583, 1.75, 2.0]
    """
    seen = counts > 0
    shares = np.where(seen, counts, 0) / counts.sum()
    raw = np.where(seen, counts, 1.0) ** (exponent - NEUTRAL)
    raw /= raw[seen].max()
    order = np.argsort(-raw, kind="stable")
    order = order[seen[order]]
    # the k largest weights are at the cap; as many as are needed for the next one to be below it
    taken = np.concatenate([[0.0], np.cumsum(shares[order])[:-1]])
    left = np.cumsum((shares * raw)[order][::-1])[::-1]
    scale = (1 - cap * taken) / left
    k = int(np.flatnonzero(scale * raw[order] <= cap)[0])
    return np.minimum(cap, scale[k] * raw)


def weights_report(counts: np.ndarray, weights: np.ndarray, *, name: str) -> dict[str, Any]:
    """What the weights do to the targets, for run.json: their distribution before and after, and types at the cap.

    `effective_share` is the effective number of targets over their number, 1/Σ p w².
    """
    seen = counts > 0
    shares, weights = counts[seen] / counts.sum(), weights[seen]
    flat, at_cap = np.full(len(shares), 1 / len(shares)), int((weights >= CAP).sum())
    note = f"--target-weights {name}: {at_cap} of {len(shares)} types are so rare that they count for less than they "
    note += f"should, since no target counts for more than {CAP:g} average ones"
    return {
        "target_weights": name,
        "before": shape(shares, flat),
        "after": shape(shares * weights, flat),
        "largest_weight": float(weights.max()),
        "cap": CAP,
        "types_at_cap": at_cap,
        "effective_share": round(1 / float(shares @ weights**2), 4),
        "note": note if at_cap else "",
    }
