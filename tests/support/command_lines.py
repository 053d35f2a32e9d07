"""Tables and saved rows of runs, for the tests of the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Table

GPT = "gpt2:n_layer=2,n_embd=32,n_head=2,vocab_size=300"
SIZES = "num_hidden_layers=3,hidden_size=32,num_attention_heads=2,intermediate_size=48,vocab_size=300"
ALBERT = f"albert:{SIZES},embedding_size=16"
Profiled = Callable[..., RunFolder]
Command = Callable[..., Any]


def values(table: Table, **columns: Any) -> dict[tuple[Any, ...], float]:
    """Values by everything that tells rows apart."""
    names = ("model", "stack", "layer", "kind", "head", "group", "metric", "variant")
    return {tuple(row[n] for n in names): row["value"] for row in table.where(**columns).records()}


# A LayerNorm makes one singular value zero; its square is rounding noise of 1e-16 λ₁, itself therefore of 1e-8 σ₁.
SUMS_OF_SIGMA = {"svd_ratio", "effective_rank"}


def same(one: Table, two: Table, tolerance: float) -> None:
    mine, theirs = values(one), values(two)
    assert mine.keys() == theirs.keys()
    assert mine
    for key, value in mine.items():
        near = 1e-7 if tolerance and SUMS_OF_SIGMA & set(key) else tolerance
        assert value == pytest.approx(theirs[key], rel=near, abs=near, nan_ok=True), key


def saved(run: RunFolder, site: str, part: str = "rows") -> np.ndarray:
    (folder,) = (run.path / "rows").iterdir()
    return load_file(folder / f"{site}.safetensors")[part].double().numpy()


def process(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "anisoscope.cli", *map(str, words)]
    return subprocess.run(run, capture_output=True, text=True, timeout=120, check=False, **options)
