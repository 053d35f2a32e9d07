"""The shape of a profile over depth: where it peaks, whether it rises once and falls once, how much it varies.

Notation
    y      a profile: one number for each block 1 … L, measured on all contexts
    y₍ⱼ₎   the same without context fold j, for the G folds that are live at every block
    ȳ₍·₎   the mean of y₍ⱼ₎ over folds
    S      the jackknife covariance between blocks, (G−1)/G Σⱼ (y₍ⱼ₎ − ȳ₍·₎)(y₍ⱼ₎ − ȳ₍·₎)ᵀ: blocks share their contexts
Draws of the profile for the interval of the peak are y + multivariate t with G − 1 degrees of freedom and scale S.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from anisoscope.results.quantity import FEWEST_FOLDS, THIN, Quantity

DRAWS = 4000
NORMAL_95 = 1.959964  # a half-width without folds is that of a normal interval


@dataclass(frozen=True)
class Curve:
    """A profile over blocks with its leave-one-fold-out profiles; without those, the half-width at each block."""

    layers: tuple[int, ...]
    depths: np.ndarray  # [L], layer / number of blocks
    values: np.ndarray  # [L]
    folds: np.ndarray  # [G, L]; G = 0 without live folds
    halves: np.ndarray  # [L]
    thin: bool = False  # there are folds, but too few of them are live

    @classmethod
    def of(cls, layers: Sequence[int], depths: Sequence[float], numbers: Sequence[Quantity]) -> Curve:
        """A curve from the numbers of its blocks; only folds that are live at every block count."""
        counts = {len(number.folds) for number in numbers}
        folds = np.array([number.folds for number in numbers]).T if len(counts) == 1 else np.empty((0, len(numbers)))
        folds = folds.reshape(-1, len(numbers))
        live = folds[np.isfinite(folds).all(1)]
        halves = np.array([(high - low) / 2 for low, high in (number.interval() for number in numbers)])
        thin = bool(len(folds)) and len(live) < FEWEST_FOLDS
        values = np.array([number.value for number in numbers])
        return cls(tuple(layers), np.array(depths), values, live, halves, thin or any(n.thin for n in numbers))

    def __len__(self) -> int:
        return len(self.values)

    @property
    def peak(self) -> int:
        return int(self.values.argmax())

    def draws(self, count: int = DRAWS, *, seed: int = 0) -> np.ndarray:
        """Profiles as they may have come out on other contexts, [count, L]; none where there are no intervals."""
        random = np.random.default_rng(seed)
        if self.thin or not (len(self.folds) or np.isfinite(self.halves).all()):
            return np.empty((0, len(self)))
        if not len(self.folds):
            return self.values + random.normal(size=(count, len(self))) * self.halves / NORMAL_95
        g = len(self.folds)
        steps = math.sqrt((g - 1) / g) * (self.folds - self.folds.mean(0))
        scale = np.sqrt(random.chisquare(g - 1, size=(count, 1)) / (g - 1))
        return self.values + random.normal(size=(count, g)) @ steps / scale

    def quantity(self, function: Callable[[np.ndarray], float]) -> Quantity:
        """A number that a profile has, with its jackknife."""
        value = function(self.values)
        if self.thin:
            return Quantity(value, THIN)
        if len(self.folds):
            return Quantity(value, tuple(function(fold) for fold in self.folds))
        drawn = self.draws(400)
        spread = float(np.std([function(row) for row in drawn])) if len(drawn) else math.nan
        return Quantity(value, half=NORMAL_95 * spread)

    def above(self, block: int) -> Quantity:
        """The peak minus one block (an index); the peak is chosen without the fold that it is then measured on.

        The largest of many noisy numbers is too large. With z₍ⱼ₎ = y + (G−1)(ȳ₍·₎ − y₍ⱼ₎), which is what fold j itself
        says, the effect is the mean over j of z₍ⱼ₎[argmax y₍ⱼ₎] − z₍ⱼ₎[block]; where all folds choose the same block it
        is the plain difference with its jackknife interval.
        """
        plain = float(self.values[self.peak] - self.values[block])
        if self.thin:
            return Quantity(plain, THIN)
        g = len(self.folds)
        if not g:
            return Quantity(plain, half=float(math.hypot(self.halves[self.peak], self.halves[block])))
        own = self.values + (g - 1) * (self.folds.mean(0) - self.folds)
        gaps = own[np.arange(g), self.folds.argmax(1)] - own[:, block]
        return Quantity(float(gaps.mean()), tuple(((gaps.sum() - gaps) / (g - 1)).tolist()))


def quantiles(values: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of draws; NaN without any."""
    if not len(values):
        return math.nan, math.nan
    low, high = np.quantile(values, [0.025, 0.975], method="inverted_cdf")
    return float(low), float(high)


def roughness(profile: np.ndarray) -> float:
    """The largest distance from the best up–down curve, in units of the profile's range; 0 for a constant one.

    >>> roughness(np.array([0.0, 1.0, 2.0, 1.0])), roughness(np.array([2.0, 0.0, 2.0]))
    (0.0, 0.5)
    """
    reach = float(np.ptp(profile))
    return float(np.abs(profile - up_down(profile)).max()) / reach if reach else 0.0


def up_down(profile: np.ndarray) -> np.ndarray:
    """The least-squares curve that rises to some block and falls after it (either part may be empty).

    Rising then falling pieces joined anywhere make such a curve, so every place of the join is tried.
    """
    fits = [np.concatenate([isotonic(profile[:k]), isotonic(profile[k:][::-1])[::-1]]) for k in range(len(profile) + 1)]
    return min(fits, key=lambda fit: float(np.square(profile - fit).sum()))


def isotonic(values: np.ndarray) -> np.ndarray:
    """The least-squares rising sequence, by pooling neighbours that are out of order (Ayer et al. 1955).

    >>> isotonic(np.array([1.0, 3.0, 2.0, 4.0])).tolist()
    [1.0, 2.5, 2.5, 4.0]
    """
    pools: list[tuple[float, int]] = []
    for value in values.tolist():
        mean, size = value, 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        pools.append((mean, size))
    return np.repeat([mean for mean, _ in pools], [size for _, size in pools]) if pools else values


def spread(profile: np.ndarray) -> float:
    """(max − min) / mean."""
    mean = float(profile.mean())
    return float(np.ptp(profile)) / mean if mean else math.nan
