"""What the estimators of intrinsic dimension give on clouds of known dimension, and TwoNN with its bias taken out.

The reference cloud is flat: independent Gaussian rows. calibration.json, which benchmarks/calibrate_dimension.py makes,
has means and standard deviations over many clouds, one line for each dimension, one column for each number of rows.
Between its cells log E is taken to be linear in log d and in log n.
Notation: d the true dimension, n the rows, E the mean of the estimate, b = E − d its bias.
"""

from __future__ import annotations

import importlib.resources
import json
from functools import cache
from typing import Any

import numpy as np

from anisoscope.errors import AnisoscopeError, unknown_name

DEFAULT_KEEP = 0.9
DIMENSIONS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 18, 22, 27, 33, 40, 50, 60, 75, 100, 140, 200)
SIZES = (256, 1024, 4096, 16_384, 65_536)
ESTIMATORS = ("two_nn", "two_nn:method=ml", "levina_bickel", "gride:scale=2", "gride:scale=4", "gride:scale=8")
SHAPE_ERROR = 0.08
_WELL_DRAWN = 3  # sizes
_SAME = {"gride": "gride:scale=2", "gride:scale=1": "two_nn:method=ml"}  # the same formula under another name


def expected_dimension(dimension: float, n: int, *, estimator: str = "two_nn") -> float:
    """E: what an estimator gives on average on a flat cloud of a dimension.

    >>> round(expected_dimension(20, 4096)), round(expected_dimension(50, 4096))
    (17, 33)
    """
    _check(dimension, n)
    means = _means(n, estimator)
    # below the table, neighbours are so near that no edge is seen and the ratio stays what it is at 1
    inside = min(max(dimension, DIMENSIONS[0]), DIMENSIONS[-1])
    ratio = np.interp(np.log(inside), np.log(DIMENSIONS), np.log(means / DIMENSIONS))
    return float(dimension * np.exp(ratio))


def two_nn_bias(dimension: float, n: int, *, method: str = "slope") -> float:
    """b = E − d of TwoNN at a true dimension and a number of rows.

    >>> -18 < two_nn_bias(50, 4096) < -15
    True
    """
    return expected_dimension(dimension, n, estimator=_of_method(method)) - dimension


def dimension_spread(dimension: float, n: int, *, estimator: str = "two_nn") -> float:
    """The standard deviation of an estimate between flat clouds of n independent rows.

    >>> 0.1 < dimension_spread(20, 4096) < 0.5
    True
    """
    _check(dimension, n)
    shares = (_columns("sd", estimator) / _columns("mean", estimator))[:, :_WELL_DRAWN]
    # the relative spread is c/√n: c is pooled over the sizes of which the table has many clouds
    pooled = np.sqrt((np.square(shares) * SIZES[:_WELL_DRAWN]).mean(1))
    share = float(np.interp(np.log(dimension), np.log(DIMENSIONS), pooled)) / np.sqrt(n)
    return float(share * expected_dimension(dimension, n, estimator=estimator))


def stated_error(dimension: float, n: int, *, estimator: str = "two_nn") -> float:
    """How far from E an estimate may lie on a smooth cloud, flat or gently curved: 8 % of E and three spreads.

    Closed surfaces and Gaussian tails differ in their edges, which is what the 8 % are for; a cloud with hard edges (a
    cube) may lie 15 % lower.
    """
    expected = expected_dimension(dimension, n, estimator=estimator)
    return SHAPE_ERROR * expected + 3.0 * dimension_spread(dimension, n, estimator=estimator)


def calibrated_dimension(value: float, n: int, *, method: str = "slope") -> float:
    """The dimension of the flat cloud of n rows that gives a TwoNN value on average; the table's edge beyond it.

    >>> round(calibrated_dimension(expected_dimension(37.0, 3000), 3000), 6)
    37.0
    """
    _check(value, n)
    means = np.maximum.accumulate(_means(n, _of_method(method)))
    if value < means[0]:
        return float(value * DIMENSIONS[0] / means[0])
    if value >= means[-1]:
        return float(DIMENSIONS[-1])
    return float(np.exp(np.interp(np.log(value), np.log(means), np.log(DIMENSIONS))))


def in_table(dimension: float, n: int) -> bool:
    """Whether the table reaches as far as a true dimension and a number of rows; below 1 it is flat and needs none.

    >>> in_table(20.0, 4096), in_table(20.0, 50), in_table(200.0, 4096)
    (True, False, False)
    """
    return SIZES[0] <= n <= SIZES[-1] and dimension < DIMENSIONS[-1]


def _of_method(method: str) -> str:
    return "two_nn" if method == "slope" else f"two_nn:method={method}"


def _means(n: int, estimator: str) -> np.ndarray:
    """E of every dimension of the table at a number of rows."""
    at = np.log(min(max(n, SIZES[0]), SIZES[-1]))
    return np.exp([np.interp(at, np.log(SIZES), np.log(row)) for row in _columns("mean", estimator)])


def _columns(part: str, estimator: str) -> np.ndarray:
    """[dimensions, sizes] of one estimator."""
    name = _SAME.get(estimator, estimator)
    if name not in ESTIMATORS:
        raise unknown_name("estimator of a dimension", estimator, (*ESTIMATORS, *_SAME))
    return np.array(_table()[part][name])


@cache
def _table() -> dict[str, Any]:
    text = importlib.resources.files("anisoscope.metrics.engine").joinpath("calibration.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def _check(dimension: float, n: int) -> None:
    if not dimension > 0 or n < 2:
        raise AnisoscopeError(f"seen dimension {dimension} of {n} rows; expected more than 0, and at least 2 rows")
