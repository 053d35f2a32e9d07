"""Metrics of the performance study: losses and probe accuracies, and their correlation with metrics of geometry."""

from __future__ import annotations

from functools import partial

import numpy as np
from torch import Tensor

from anisoscope.metrics.engine.metric import measured
from anisoscope.results.quantity import correlate

_ROWS = "over the test contexts; what is fitted is fitted on the others; against=raw: minus the value of the raw rows"
_performance = partial(measured, "study performance")


@_performance(
    title="Language-model loss",
    formula="mean −log p(token)",
    reference="ours: the loss that the model is trained on",
    convention="reading=patched: of the model itself, the rows of one site repaired; reading=readout: of a fresh "
    "linear readout of them; " + _ROWS,
    bounds=(0.0, None),
)
def lm_loss(losses: Tensor) -> float:
    """Loss of predicting the tokens from the rows of one site, in nats."""
    return float(losses.double().mean())


@_performance(
    title="Probe accuracy",
    formula="mean [ŷ = y]",
    reference="Alain & Bengio 2016, arXiv:1610.01644",
    convention="a linear probe (probe=cosine: nearest centroid); control=…: what chance gives; " + _ROWS,
    bounds=(0.0, 1.0),
)
def probe_accuracy(hits: Tensor) -> float:
    """Share of the test rows (or contexts) whose class a probe predicts."""
    return float(hits.double().mean())


@_performance(
    title="Probe selectivity",
    formula="accuracy − accuracy on shuffled labels",
    reference="Hewitt & Liang 2019, arXiv:1909.03368",
    convention="the same probe and penalty on the same rows; " + _ROWS,
    bounds=(-1.0, 1.0),
)
def probe_selectivity(hits: Tensor, control: Tensor) -> float:
    """How much better a probe is than the same probe fitted on shuffled labels."""
    return float((hits - control).double().mean())


@_performance(
    title="Geometry and performance",
    formula="corr(geometry, performance)",
    reference="ours; Pearson 1895, Spearman 1904",
    convention="over layers or checkpoints, Spearman or Pearson; points of one run are not independent",
    bounds=(-1.0, 1.0),
)
def performance_correlation(x: np.ndarray, y: np.ndarray, method: str) -> float:
    """Correlation of a metric with a performance; none where one of the two does not vary.

    >>> performance_correlation(np.array([1.0, 2.0, 3.0]), np.array([1.0, 8.0, 27.0]), "spearman")
    1.0
    """
    return correlate(x, y, method)
