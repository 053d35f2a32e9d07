"""Resampling of a corpus: weights of its windows that move the unigram distribution towards a target.

Notation: N windows of T tokens, aᵢ(v) = share of type v in window i, w = window weights (Σ w = 1), u = equal weights,
p_w(v) = Σᵢ wᵢ aᵢ(v) = unigram distribution that training sees, q = target over the observed types.

The weights minimise  KL(p_w ‖ q) + μ KL(w ‖ u),  a convex problem (the flat target maximises the entropy of p_w). Its
solution is an exponential (maximum-entropy) tilt, wᵢ ∝ exp(Σᵥ θᵥ aᵢ(v)), with p_w ∝ q e^{−μθ}, found in the dual,
which is smooth, concave and without constraints:

    maximise  −log Σᵥ qᵥ e^{−μθᵥ} − μ log( (1/N) Σᵢ exp(Σᵥ θᵥ aᵢ(v)) ).

μ is made as small as the effective sample size 1/Σw² allows. A context is kept whole, so that its words stay in their
sentences: the target is approached, not reached.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from anisoscope.errors import AnisoscopeError

LEAST_SAMPLE = 0.1  # lower bound of the effective number of windows over their number
STEEPEST = 10.0  # largest exponent of Zipf's law allowed
ROWS = 1 << 13  # windows counted together
_FIRST = 64.0  # first μ: the weights are nearly equal there
_FACTOR = 4.0  # ratio of one μ to the next smaller one
_LAST = 1e-7  # smallest μ tried
_HALVINGS = 6  # bisection steps of log μ once the bound is crossed
_SETTLED = 1e-3  # relative change of the divergence below which μ is not lowered further
NOTE = "contexts are drawn whole, so the target distribution is approached, not reached"


def parse_exponent(text: str, *, neutral: str, law: str) -> float | None:
    """The exponent in `law:A`: 0 for `flat`, None for the neutral word, NaN for a text that is none of these.

    >>> [parse_exponent(text, neutral="none", law="power") for text in ("none", "flat", "power:2", "power:-1", "2")]
    [None, 0.0, 2.0, nan, nan]
    """
    if text in (neutral, "flat"):
        return None if text == neutral else 0.0
    kind, _, number = text.partition(":")
    try:
        exponent = float(number)
    except ValueError:
        return math.nan
    return exponent if kind == law and 0 <= exponent <= STEEPEST else math.nan


def parse_frequency(frequency: str) -> float | None:
    """The exponent of the target: None for natural, 0 for flat, S for `zipf:S`.

    >>> parse_frequency("natural"), parse_frequency("flat"), parse_frequency("zipf:1.5")
    (None, 0.0, 1.5)
    """
    exponent = parse_exponent(frequency, neutral="natural", law="zipf")
    if exponent is not None and math.isnan(exponent):
        raise AnisoscopeError(
            f"frequency {frequency!r} is not understood; expected natural, flat, or zipf:S with an exponent S from "
            f"0 to {STEEPEST:g}, such as zipf:1.5."
        )
    return exponent


def resample(
    tokens: np.ndarray,
    starts: np.ndarray,
    *,
    context: int,
    vocab_size: int,
    specials: int,
    frequency: str,
    least: float = LEAST_SAMPLE,
) -> tuple[np.ndarray, dict[str, Any]]:
    """Weights of the windows that bring the unigram distribution as near to the target as the sample size allows.

    Returns the weights [N], which sum to 1, and a report of what they achieve. Ids below `specials` are special tokens
    and are not counted.
    """
    exponent = parse_frequency(frequency)
    counts = count_matrix(tokens, starts, context=context, vocab_size=vocab_size, specials=specials)
    natural = np.asarray(counts.sum(axis=0)).ravel()
    shares = counts[:, np.flatnonzero(natural)]  # over the number of ordinary tokens of the window
    totals = np.asarray(shares.sum(axis=1)).ravel()
    shares.data /= np.repeat(np.maximum(totals, 1), np.diff(shares.indptr))
    weights = np.full(len(starts), 1 / len(starts))
    before = shares.T @ weights
    target = before if exponent is None else zipf_target(before, exponent)
    if exponent is not None:
        weights = tilted(shares, target, least=least)
    after = shares.T @ weights
    shapes = {"before": shape(before, target), "after": shape(after, target), "target": shape(target, target)}
    return weights, {
        "frequency": frequency,
        "windows": len(weights),
        **shapes,
        "effective_windows": round(sample_share(weights) * len(weights), 1),
        "effective_share": round(sample_share(weights), 4),
        "least_share": least,
        "note": "" if frequency == "natural" else _note(**shapes),
    }


def count_matrix(tokens: np.ndarray, starts: np.ndarray, *, context: int, vocab_size: int, specials: int) -> Any:
    """Occurrences of each ordinary type in each window, sparse float64 [N, vocab]; special tokens are left out."""
    from scipy import sparse

    blocks = []
    for at in range(0, len(starts), ROWS):
        ids = tokens[starts[at : at + ROWS, None] + np.arange(context)].astype(np.int32)
        pointers = np.arange(0, ids.size + 1, context)
        block = sparse.csr_array(((ids >= specials).ravel().astype(np.float64), ids.ravel(), pointers))
        block.resize(len(ids), vocab_size)
        block.sum_duplicates()
        block.eliminate_zeros()
        blocks.append(block)
    return sparse.vstack(blocks, format="csr")


def zipf_target(frequencies: np.ndarray, exponent: float) -> np.ndarray:
    """Zipf's law over the same types in the order of their frequency; exponent 0 is flat.

    >>> zipf_target(np.array([0.2, 0.5, 0.3]), 1.0).round(3).tolist()
    [0.182, 0.545, 0.273]
    """
    ranks = np.empty(len(frequencies))
    ranks[np.argsort(-frequencies, kind="stable")] = np.arange(1, len(frequencies) + 1)
    return _normalised(ranks**-exponent)


def zipf_exponent(frequencies: np.ndarray) -> float:
    """The exponent whose Zipf law over the ranks is nearest in KL divergence: E_s[log rank] = E[log rank].

    >>> round(zipf_exponent(np.arange(1.0, 500) ** -1.3), 6)
    1.3
    """
    from scipy.optimize import brentq

    present = np.sort(_normalised(frequencies[frequencies > 0]))[::-1]
    logs = np.log(np.arange(1, len(present) + 1))
    if len(present) < 2:
        return 0.0
    mean_log_rank = float(present @ logs)
    if mean_log_rank >= logs.mean():  # no steeper than a flat distribution
        return 0.0
    return float(brentq(lambda s: _normalised(np.exp(-s * logs)) @ logs - mean_log_rank, 0.0, 64.0, xtol=1e-12))


def _normalised(values: np.ndarray) -> np.ndarray:
    return values / values.sum()


def tilted(shares: Any, target: np.ndarray, *, least: float = LEAST_SAMPLE) -> np.ndarray:
    """The weights at the smallest μ that keeps 1/Σw² at `least`·N or above."""
    solve = _Dual(shares, target)
    mu, before = _FIRST, math.inf
    theta = np.log(target / solve.natural) / mu  # the solution while the tilt is slight
    weights = np.full(shares.shape[0], 1 / shares.shape[0])
    while mu > _LAST:
        trial_theta, trial_weights = solve(mu, theta)
        if sample_share(trial_weights) < least:
            break
        weights, now = trial_weights, divergence(solve.across @ trial_weights, target)
        if sample_share(weights) < 0.99 and before - now <= _SETTLED * now:
            return weights  # a smaller μ brings the distribution no nearer
        # μθ = log(q/p_w) changes slowly with μ, so the next solution is near θ times the factor
        theta, mu, before = trial_theta * _FACTOR, mu / _FACTOR, now
    else:
        return weights
    low, high, theta = mu, mu * _FACTOR, theta / _FACTOR  # `low` violates the bound; θ solves `high`, which does not
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        trial_theta, trial_weights = solve(middle, theta * (high / middle))
        if sample_share(trial_weights) < least:
            low = middle
        else:
            high, theta, weights = middle, trial_theta, trial_weights
    return weights


class _Dual:
    """Solver of the dual problem: called with μ and a start, it returns θ [types] and the weights [N]."""

    def __init__(self, shares: Any, target: np.ndarray) -> None:
        self.shares, self.across = shares, shares.T.tocsr()
        self.logs = np.log(target)
        equal = np.full(shares.shape[0], 1 / shares.shape[0])
        self.natural = self.across @ equal
        self.variance = self.across.power(2) @ equal - self.natural**2

    def __call__(self, mu: float, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        from scipy.optimize import minimize

        # preconditioned by the root of the Hessian's diagonal under equal weights: a few dozen steps are enough
        scale = np.sqrt(mu * (mu * self.natural + self.variance))
        result = minimize(
            lambda x: self._value(x / scale, mu, scale),
            start * scale,
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 300, "maxcor": 30, "gtol": 1e-6, "ftol": 1e-8},
        )
        theta = result.x / scale
        return theta, _weights(self.shares @ theta)[0]

    def _value(self, theta: np.ndarray, mu: float, scale: np.ndarray) -> tuple[float, np.ndarray]:
        """The negative dual and its gradient with respect to the scaled variable."""
        weights, log_mean = _weights(self.shares @ theta)
        target, log_sum = _weights(self.logs - mu * theta)
        value = log_sum + math.log(len(theta)) + mu * log_mean
        return value, mu * (self.across @ weights - target) / scale


def _weights(scores: np.ndarray) -> tuple[np.ndarray, float]:
    """Softmax of the scores, and the logarithm of the mean of their exponentials."""
    top = float(scores.max())
    raised = np.exp(scores - top)
    total = float(raised.sum())
    return raised / total, top + math.log(total / len(scores))


def sample_share(weights: np.ndarray) -> float:
    """Effective sample size 1/Σw² over the number of windows."""
    return float(1 / (weights @ weights) / len(weights))


def divergence(frequencies: np.ndarray, target: np.ndarray) -> float:
    """KL(frequencies ‖ target) in bits."""
    present = frequencies > 0
    return float(frequencies[present] @ np.log2(frequencies[present] / target[present]))


def shape(frequencies: np.ndarray, target: np.ndarray) -> dict[str, float]:
    """Zipf exponent, entropy and number of types of a unigram distribution, and its divergence from the target."""
    present = frequencies[frequencies > 0]
    entropy, far = float(-(present @ np.log2(present))), max(0.0, divergence(frequencies, target))
    exponent = zipf_exponent(frequencies)
    return {"zipf_exponent": exponent, "entropy_bits": entropy, "kl_bits": far, "types": len(present)}


def _note(before: dict[str, float], after: dict[str, float], target: dict[str, float]) -> str:
    """The note of the report; says so where the divergence fell but the exponent moved away from the target's."""
    first, last, goal = (values["zipf_exponent"] for values in (before, after, target))
    if (goal - first) * (last - first) >= 0:
        return NOTE
    return (
        f"{NOTE}; the divergence from it fell ({before['kl_bits']:.3f} to {after['kl_bits']:.3f} bits), yet the fitted "
        f"exponent moved the other way ({first:.3f} to {last:.3f}): these frequencies follow no power law"
    )
