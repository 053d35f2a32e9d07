"""Similarity between layers, from the sampled rows that a run keeps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from anisoscope.errors import TooFewRows
from anisoscope.metrics.similarity import linear_cka
from anisoscope.runs.store import RunFolder

_STREAM = ("embed", "resid", "final")
FEWEST = 64  # rows in common, below which a similarity is not worth a number


Keyed = tuple[np.ndarray, np.ndarray]  # keys, rows


def sampled(arrays: Mapping[str, np.ndarray], *, kinds: tuple[str, ...] = _STREAM) -> dict[str, Keyed]:
    """Site → (keys, rows) for the sites of the residual stream, in the order of the layers."""
    names = [name.removesuffix("/rows") for name in arrays if name.endswith("/rows")]
    chosen = [name for name in names if name.rpartition(".")[2] in kinds]
    return {name: (arrays[f"{name}/keys"], arrays[f"{name}/rows"]) for name in sorted(chosen, key=_order)}


def _order(site: str) -> tuple[str, int, str]:
    stack, _, rest = site.rpartition(".")[0].rpartition(".")
    return stack, int(rest) if rest.isdigit() else 0, site.rpartition(".")[2]


def pair_cka(one: Keyed, two: Keyed) -> float:
    """Debiased linear CKA over the rows that two sites have in common; NaN when there are too few."""
    common, first, second = np.intersect1d(one[0], two[0], return_indices=True)
    if len(common) < FEWEST:
        return float("nan")
    try:
        return linear_cka(one[1][first], two[1][second])
    except TooFewRows:
        return float("nan")


def cka_matrix(first: Mapping[str, Keyed], second: Mapping[str, Keyed]) -> tuple[list[str], list[str], np.ndarray]:
    """CKA between every layer of one model and every layer of another."""
    values = [[pair_cka(one, two) for two in second.values()] for one in first.values()]
    return list(first), list(second), np.array(values).reshape(len(first), len(second))


def run_cka(folder: RunFolder, key: str) -> tuple[list[str], np.ndarray] | None:
    """CKA between the layers of one model of a run."""
    layers = sampled(folder.arrays(key))
    if len(layers) < 2:
        return None
    names, _, matrix = cka_matrix(layers, layers)
    return names, matrix
