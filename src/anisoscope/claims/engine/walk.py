"""Whether a course over steps, or a profile over layers, can be told from a walk that has no direction.

Neighbouring steps of a training are alike, and so are neighbouring layers of a model. Values that move up and down by
chance then stay up or down for a while: a walk of ten steps ends on one side of its first half more often than ten
independent values would, and two unrelated walks correlate. An interval over contexts knows nothing of it.

    x      the values in order; Δ their changes from one to the next
    walk   x₁ + Σ ±Δ, for any choice of the signs: without a direction each is as likely as what was seen
    p      the share of walks whose statistic is at least as large as that of x
Beyond twelve changes neighbouring ones share a sign, which lets them be alike and keeps every choice countable. Values
that scatter around a constant turn back more often than a walk does, for which p is too large, never too small.

Courses that are tested together turn together: layers of a model, and, where two profiles are related that may be
those of an architecture (`shared`), its seeds and other models. Then a coincidence that all of them have counts once;
if they have nothing in common, p is as exact. A course over training that three seeds have in common is no coincidence
but what the training does: there seeds answer by themselves. Changes that go on in their direction for a while (smooth
courses) are not walks: p is too small for them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from anisoscope.claims.engine.evidence import figure

MOST_SIGNS = 12  # choices of signs are all tried: 4,096
LUCK = 0.02  # of walks may do as well; a 95 % interval beyond a margin errs in 2.5 %
Statistic = Callable[[np.ndarray], np.ndarray]  # of walks [sets, n], one number for each


@dataclass(frozen=True)
class Walk:
    """Courses [n] with the statistic of each; their mean is tested."""

    courses: tuple[np.ndarray, ...]
    statistics: tuple[Statistic, ...]
    what: str  # the points of a course, in the plural
    shared: bool = False  # seeds are tested together

    @classmethod
    def of(cls, courses: Iterable[np.ndarray], statistic: Statistic, what: str, *, shared: bool = False) -> Walk:
        """Courses that have the same statistic."""
        found = tuple(np.asarray(course, dtype=float) for course in courses)
        return cls(found, (statistic,) * len(found), what, shared)

    @classmethod
    def joined(cls, walks: Iterable[Walk]) -> Walk:
        """Several tests as one, in which all courses turn together."""
        first, *rest = walks
        courses = [course for walk in (first, *rest) for course in walk.courses]
        statistics = [statistic for walk in (first, *rest) for statistic in walk.statistics]
        return replace(first, courses=tuple(courses), statistics=tuple(statistics))

    @functools.cached_property
    def p(self) -> float:
        """The share of walks that do as well.

        >>> Walk.of([np.array([1.0, 2.0, 4.0, 5.0])], lambda walks: walks[:, -1], "steps").p  # one of eight
        0.125
        """
        count = min(MOST_SIGNS, max(len(course) - 1 for course in self.courses))
        both = zip(self.courses, self.statistics, strict=True)
        found = np.sum([statistic(walks_of(course, count)) for course, statistic in both], axis=0)
        slack = 1e-9 * float(np.ptp(found)) if np.isfinite(found).all() else 0.0
        return float(np.mean(found >= found[0] - slack))

    @property
    def doubt(self) -> str:
        """Why a course is left open if walks do as well too often; else empty."""
        return walk_doubt(self.p, self.what)


def walk_doubt(p: float, what: str, *, luck: float = LUCK) -> str:
    """Why a course is left open if more than `luck` of the walks do as well; `what` its points are, in the plural.

    >>> walk_doubt(0.01, "steps"), walk_doubt(0.25, "steps")
    ('', 'steps whose changes go up or down by chance do as well too often (p = 0.25)')
    """
    return f"{what} whose changes go up or down by chance do as well too often (p = {figure(p)})" if p > luck else ""


def walks_of(course: np.ndarray, count: int) -> np.ndarray:
    """The course under every choice of `count` signs [2^count, n]; the first is the course itself."""
    changes = np.diff(course)
    places = ((np.arange(len(changes)) + 0.5) * count / max(len(changes), 1)).astype(int)
    moved = np.cumsum(_signs(count)[:, places] * changes, axis=-1)
    start = np.full((len(moved), 1), course[0])
    return np.concatenate([start, start + moved], axis=-1)


@functools.cache
def _signs(count: int) -> np.ndarray:
    return np.array(list(itertools.product((1, -1), repeat=count)), dtype=np.int8)


def rank_correlations(one: np.ndarray, walks: np.ndarray) -> np.ndarray:
    """Spearman's correlation of values [n] with each of some walks [sets, n]; ties share a rank.

    >>> rank_correlations(np.array([1.0, 2.0, 4.0]), np.array([[0.0, 1.0, 5.0], [3.0, 2.0, 1.0]])).tolist()
    [1.0, -1.0]
    """
    below = (walks[..., None, :] < walks[..., :, None]).sum(-1)
    ties = (walks[..., None, :] == walks[..., :, None]).sum(-1)
    y = below + (ties - 1) / 2
    x = (one[:, None] > one).sum(-1) + ((one[:, None] == one).sum(-1) - 1) / 2
    x, y = x - x.mean(), y - y.mean(-1, keepdims=True)
    below_line = np.sqrt((x**2).sum() * (y**2).sum(-1))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below_line > 0, (y @ x) / below_line, 0.0)
