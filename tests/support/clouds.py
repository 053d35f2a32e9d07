"""Clouds that the tests of metrics measure."""

from __future__ import annotations

import numpy as np

from anisoscope.metrics.catalogue import registry
from anisoscope.stats.directions import Attention, Keys

METRICS = {name: m for name, m in registry().items() if not m.measured_by}


ON_ROWS = sorted(name for name, m in METRICS.items() if not {Attention, Keys} & set(m.needs))


def cloud(seed: int = 0, *, n: int = 300, d: int = 7, mean: float = 0.7) -> np.ndarray:
    """Rows of unequal variances about a mean of the given norm."""
    rng = np.random.default_rng(seed)
    centre = rng.normal(size=d)
    return rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) * 0.4 + mean * centre / np.linalg.norm(centre)
