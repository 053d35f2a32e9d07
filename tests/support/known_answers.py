"""One line per metric: planted rows whose answer is known on paper. A new metric needs one function and one line."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from anisoscope.metrics.attention import row_sharpness
from anisoscope.stats.directions import Attention, Directions, Keys

Rows = np.ndarray


@dataclass(frozen=True)
class Known:
    """`metric(rows())` is `expected` within `tolerance`; `stats` plants statistics where a metric takes no rows."""

    rows: Callable[[], Rows] | None
    expected: float
    tolerance: float = 1e-9
    options: dict[str, Any] = field(default_factory=dict)
    labels: Callable[[], dict[str, Rows]] = dict
    stats: Callable[[], tuple[Any, ...]] | None = None


def spectrum(*sigma: float, n: int = 60) -> Rows:
    """Centred rows with exactly these singular values."""
    noise = np.random.default_rng(0).normal(size=(n, len(sigma) + 1))
    noise[:, 0] = 1.0
    q, _ = np.linalg.qr(noise)
    return q[:, 1:] * np.array(sigma)


PAIRS, TILT, LENGTH = 10, 0.6, 2.0  # a cone of 2·PAIRS rows: cos θ = 0.6 to its axis, norm 2
_N = 2 * PAIRS
_CONE = (_N * TILT**2 - 1) / (_N - 1)  # its average cosine
_SIDE = (1 - TILT**2) / (_N * (_N - 1)) * 2  # what each coordinate across the axis adds to it, with a minus sign


def cone() -> Rows:
    across = np.eye(PAIRS) * math.sqrt(1 - TILT**2)
    sides = np.concatenate([across, -across])
    return LENGTH * np.concatenate([np.full((_N, 1), TILT), sides], axis=1)


def plane(n: int = 2500) -> Rows:
    """A flat square, uniformly filled, turned into ten dimensions."""
    rng = np.random.default_rng(1)
    frame, _ = np.linalg.qr(rng.normal(size=(10, 2)))
    return rng.uniform(size=(n, 2)) @ frame.T


def ring(n: int = 64) -> Rows:
    angle = 2 * np.pi * np.arange(n) / n
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


def outlier() -> Rows:
    rows = np.ones((50, 4)) / 2
    rows[7] = [6.0, 8.0, 0.0, 0.0]
    return rows


def spike() -> Rows:
    rows = np.ones((50, 4)) / 2
    rows[3, 2] = -1000.0
    return rows


def ray() -> Rows:
    return np.array([[0.5, 0.0], [1.0, 0.0]] * 10)


def drifting() -> Rows:
    """Variances 100 : 4, and a mean along the smaller."""
    return spectrum(10.0, 2.0) + np.array([0.0, 7.0])


def types() -> Rows:
    """Two token types, each always the same direction."""
    return np.repeat(np.eye(2), 6, axis=0) * np.arange(1, 13)[:, None]


def bases() -> Rows:
    """Six contexts (or types), each the same five orthonormal rows."""
    return np.tile(np.eye(5), (6, 1))


def lines() -> Rows:
    """Three far clusters, each a line of its own direction."""
    at = np.linspace(-1, 1, 40)[:, None]
    return np.concatenate([at * np.eye(3)[i] + 50 * np.eye(3)[i - 1] for i in range(3)])


def _attention() -> tuple[Any, ...]:
    """Ten keys, one of which gets half of the weight: scores log 9, 0, …, 0."""
    key = torch.zeros(1, 10, 1)
    key[0, 0] = math.log(9.0)
    allowed = torch.ones(1, 4, 10, dtype=torch.bool)
    values = row_sharpness(torch.ones(1, 1, 4, 1), key[None], allowed[None], bias=None, scaling=1.0, first=0)[0]
    return (Attention().update(values.transpose(0, 1)).head(0),)


def _query_key() -> tuple[Any, ...]:
    query = Directions().update(torch.tensor([[1.0, 2.0], [1.0, -2.0]]))
    return query, Keys().update(torch.tensor([[3.0, 3.0], [1.0, 1.0]]))


_P = np.array([10.0, 2.0, 1.0]) / 13
_H = float(-(_P * np.log(_P)).sum())
_PR = 105**2 / (100**2 + 4**2 + 1)
_E = 0.8 * np.array([100.0, 4.0, 1.0]) + 0.2 * 35.0


def _ten_two_one() -> Rows:
    return spectrum(10, 2, 1)


def _sixes() -> dict[str, Rows]:
    return {"contexts": np.repeat(np.arange(6), 5)}


KNOWN: dict[str, Known] = {
    "svd_ratio": Known(_ten_two_one, 10 / 13),
    "svd_ratio_squared": Known(_ten_two_one, 100 / 105),
    "participation_ratio": Known(_ten_two_one, _PR),
    "iso_score": Known(_ten_two_one, (_PR - 1) / 2),
    "iso_score_star": Known(_ten_two_one, (105**2 / (_E**2).sum() - 1) / 2),
    "effective_rank": Known(_ten_two_one, math.exp(_H)),
    "rank_me": Known(_ten_two_one, math.exp(_H), 1e-5),
    "stable_rank": Known(_ten_two_one, 1.05),
    "singular_entropy": Known(_ten_two_one, math.log(3) - _H),
    "average_cosine": Known(cone, _CONE),
    "drift": Known(cone, LENGTH * TILT),
    "relative_drift": Known(cone, TILT),
    "mean_norm": Known(cone, LENGTH),
    "largest_norm": Known(outlier, 10 / math.sqrt((49 + 100) / 50)),
    "rogue_share": Known(cone, (TILT**2 + 2 * _SIDE) / (TILT**2 + PAIRS * _SIDE)),
    "massive_activation": Known(spike, 2000.0),
    "average_cosine_centred": Known(cone, -1 / (_N - 1)),
    "explained_by_drift": Known(cone, 1 + 1 / (_N - 1) / _CONE),
    "partition_isotropy": Known(ray, (math.exp(-0.5) + math.exp(-1)) / (math.exp(0.5) + math.exp(1))),
    "drift_alignment": Known(drifting, 0.04),
    "attention_entropy": Known(None, (0.5 * math.log(2) + 0.5 * math.log(18)) / math.log(10), 1e-6, stats=_attention),
    "attention_sharpness": Known(None, 4 / 9, 1e-6, stats=_attention),
    "attention_max": Known(None, 0.5, 1e-6, stats=_attention),
    "first_key_mass": Known(None, 0.5, 1e-6, stats=_attention),
    "score_spread": Known(None, 0.3 * math.log(9), 1e-6, stats=_attention),
    "qk_cosine": Known(None, math.sqrt(0.5), stats=_query_key),
    "two_nn": Known(plane, 2.0, 0.15),
    "levina_bickel": Known(plane, 2.0, 0.15),
    "gride": Known(plane, 2.0, 0.15),
    "hubness": Known(ring, 0.0),
    "local_anisotropy": Known(lines, 1.0, options={"clusters": 3}),
    "self_similarity": Known(types, 1 - (72 - 12) / (12 * 11), labels=lambda: {"tokens": np.repeat([4, 9], 6)}),
    "context_similarity": Known(bases, math.sqrt(1 / 5) - (6 - 1) / (30 - 1), labels=_sixes),
    "max_explainable_variance": Known(
        bases, 1 / 5, options={"baseline": False}, labels=lambda: {"tokens": np.repeat(np.arange(6), 5)}
    ),
}
