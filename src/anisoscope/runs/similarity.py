"""Similarity between layers, from the sampled rows that a run keeps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import numpy as np
from torch import Tensor

from anisoscope.errors import TooFewRows
from anisoscope.metrics.similarity import hollow_kernel, kernel_cka
from anisoscope.runs.store import RunFolder

_STREAM = ("embed", "resid", "final")
FEWEST = 64  # rows in common, below which a similarity is not worth a number


Keyed = tuple[np.ndarray, np.ndarray]  # keys, rows


def sampled(arrays: Mapping[str, np.ndarray], *, kinds: tuple[str, ...] = _STREAM) -> dict[str, Keyed]:
    """Site → (keys, rows) for the sites of the residual stream, in the order of the layers."""
    names = [name.removesuffix("/rows") for name in arrays if name.endswith("/rows")]
    chosen = [name for name in names if name.rpartition(".")[2] in kinds]
    return {name: (arrays[f"{name}/keys"], arrays[f"{name}/rows"]) for name in sorted(chosen, key=_order)}


def _order(site: str) -> tuple[str, int, int]:
    stack, _, rest = site.rpartition(".")[0].rpartition(".")
    return stack, int(rest) if rest.isdigit() else 0, _STREAM.index(site.rpartition(".")[2])


def cka_matrix(first: Mapping[str, Keyed], second: Mapping[str, Keyed]) -> tuple[list[str], list[str], np.ndarray]:
    """CKA between every layer of one model and every layer of another, over the rows that all of them have.

    NaN where there are too few rows in common, or where a layer has no structure beyond noise.
    """
    keys = [keys for keys, _ in (*first.values(), *second.values())]
    common = reduce(np.intersect1d, keys) if keys else np.empty(0)
    empty = np.full((len(first), len(second)), np.nan)
    if len(common) < FEWEST:
        return list(first), list(second), empty
    ours = [_kernel(site, common) for site in first.values()]
    theirs = ours if first is second else [_kernel(site, common) for site in second.values()]
    values = [[_cka(one, two) for two in theirs] for one in ours]
    return list(first), list(second), np.array(values).reshape(empty.shape)


def _kernel(site: Keyed, common: np.ndarray) -> Tensor:
    _, mine, _ = np.intersect1d(site[0], common, return_indices=True)
    return hollow_kernel(site[1][mine])


def _cka(one: Tensor, two: Tensor) -> float:
    try:
        return kernel_cka(one, two)
    except TooFewRows:
        return float("nan")


def run_cka(folder: RunFolder, key: str) -> tuple[list[str], np.ndarray] | None:
    """CKA between the layers of one model of a run."""
    layers = sampled(folder.arrays(key))
    if len(layers) < 2:
        return None
    names, _, matrix = cka_matrix(layers, layers)
    return names, matrix
