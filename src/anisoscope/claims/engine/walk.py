"""Whether a course over steps, or a profile over layers, can be told from a walk that has no direction.

Neighbouring steps of a training are alike, and so are neighbouring layers of a model. Values that move up and down by
chance then stay up or down for a while: a walk of ten steps ends on one side of its first half more often than ten
independent values would, and two unrelated walks correlate. An interval over contexts knows nothing of it.

    x      the values in order; Δ their changes from one to the next
    walk   x₁ + Σ ±Δ, for any choice of the signs: without a direction each is as likely as what was seen
    p      the share of walks whose statistic is at least as large as that of x
Values that scatter around a constant turn back more often than a walk does, for which p is too large, never too small.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import numpy as np

from anisoscope.claims.engine.evidence import figure

MOST_CHANGES = 12  # up to which every choice of signs is tried: 4,096
DRAWS = 1999
ALPHA = 0.05


def walk_p(values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]) -> float:
    """p of a statistic against walks with the same changes in directions of their own.

    `values` are the courses in order, [courses, n], which turn together; `statistic` gives one number for each of some
    sets of courses [sets, courses, n].

    >>> walk_p(np.array([[1.0, 2.0, 4.0, 5.0]]), lambda walks: walks[:, 0, -1])  # one of eight is as high
    0.125
    """
    changes = np.diff(values, axis=-1)
    signs = _signs(changes.shape[-1])
    moved = np.cumsum(signs[:, None, :] * changes, axis=-1)
    start = np.broadcast_to(values[:, :1], (len(signs), *values[:, :1].shape))
    found = statistic(np.concatenate([start, start + moved], axis=-1))
    seen = float(statistic(values[None])[0])
    slack = 1e-9 * float(np.ptp(found)) if np.isfinite(found).all() else 0.0
    return float(np.mean(found >= seen - slack))


def walk_doubt(p: float, what: str) -> str:
    """Why a course is left open, if walks do as well too often; `what` its points are, in the plural.

    >>> walk_doubt(0.01, "steps"), walk_doubt(0.25, "steps")
    ('', 'steps whose changes go up or down by chance do as well too often (p = 0.25)')
    """
    return f"{what} whose changes go up or down by chance do as well too often (p = {figure(p)})" if p > ALPHA else ""


@functools.cache
def _signs(changes: int) -> np.ndarray:
    """Choices of signs [choices, changes]; the first is that of the values themselves."""
    if changes <= MOST_CHANGES:
        return np.array(list(itertools.product((1, -1), repeat=changes)), dtype=np.int8)
    drawn = np.random.default_rng(0).choice(np.array([1, -1], dtype=np.int8), size=(DRAWS, changes))
    return np.concatenate([np.ones((1, changes), dtype=np.int8), drawn])


def rank_correlations(one: np.ndarray, walks: np.ndarray) -> np.ndarray:
    """Spearman's correlation of values [n] with courses [sets, courses, n], mean over courses; ties share a rank."""
    below = (walks[..., None, :] < walks[..., :, None]).sum(-1)
    ties = (walks[..., None, :] == walks[..., :, None]).sum(-1)
    y = below + (ties - 1) / 2
    x = (one[:, None] > one).sum(-1) + ((one[:, None] == one).sum(-1) - 1) / 2
    x, y = x - x.mean(), y - y.mean(-1, keepdims=True)
    below_line = np.sqrt((x**2).sum() * (y**2).sum(-1))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below_line > 0, (y @ x) / below_line, 0.0).mean(-1)
