"""Shape studies that never were: three arms whose profiles are planted, with intrinsic dimension in two phases.

Causal arms have a bell over depth, the bidirectional one is flat; dimension first grows, then falls; the loss falls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from anisoscope.results.folder import MAP_SCHEMA
from anisoscope.results.query import Table

ARMS = ("causal-next", "causal-masked", "bidirectional-masked")
STEPS = (0, 1, 4, 16, 64, 256, 1000, 4000)
GROUPS = ("", "half:1", "half:2")
BELL = {"causal-next": 0.5, "causal-masked": 0.3, "bidirectional-masked": 0.0}  # height of the bell at the end
SHARP = {"causal-next": 0.6, "causal-masked": 0.5, "bidirectional-masked": 0.3}
ESTIMATORS = {
    ("two_nn", ""): 0.9, ("two_nn", "calibrated=1"): 1.0, ("levina_bickel", ""): 0.95, ("gride", "scale=1"): 1.05,
    ("gride", ""): 1.0, ("gride", "scale=4"): 0.93, ("gride", "scale=8"): 0.85,
}  # fmt: skip
FLAGS = {
    64: "repeated: the same weights as checkpoint-16", 256: "non-finite weights",
    1000: "out of order: it was named after a later one",
}  # fmt: skip


def late(step: int, last: int) -> float:
    return math.log1p(step) / math.log1p(max(last, 1))


def anisotropy(arm: str, step: int, depth: float, *, last: int = STEPS[-1]) -> float:
    """A bell over depth that grows in training, or nothing."""
    return 0.12 + late(step, last) * (0.05 + BELL[arm] * math.sin(math.pi * depth))


def dimension(arm: str, step: int, depth: float) -> float:
    """Expansion until step 64, then compression."""
    phase = math.exp(-((math.log1p(step) - math.log1p(64)) ** 2) / 6)
    return 2.4 + 11 * phase * (0.6 + 0.4 * math.sin(math.pi * depth)) * (1.0 if arm.startswith("causal") else 1.3)


def shape_table(
    *,
    arms: Iterable[str] = ARMS,
    sizes: Iterable[tuple[int, int]] = ((6, 256),),
    seeds: Iterable[int] = (0,),
    steps: tuple[int, ...] = STEPS,
    heads: int = 2,
    flags: bool = False,
) -> Table:
    """The long table of a shape study; the last of the sizes is as wide as it is."""
    rows: list[dict[str, Any]] = []
    models = []
    for layers, width in sizes:
        for arm in arms:
            name = f"{arm}-{layers}x{width}"
            kind = "encoder" if arm.startswith("bidirectional") else "decoder"
            models.append({"name": name, "type": kind, "layers": layers, "width": width})
            for seed in seeds:
                found = _rows(arm, steps, layers=layers, heads=heads, seed=seed, flags=flags)
                rows += [{**PLACE, **row, "model": name, "seed": seed} for row in found]
    about = {"kind": "study", "study": "shape", "models": models, "command": ["anisoscope", "study", "shape"]}
    return Table.from_records(rows, about)


PLACE: dict[str, Any] = {
    "run": "r", "revision": "", "data": "enwik8", "stack": "single", "group": "", "variant": "", "low": math.nan,
    "high": math.nan, "sd": math.nan, "n": 4096, "contexts": 128, "dropped": 0, "note": "",
}  # fmt: skip


def _rows(
    arm: str, steps: tuple[int, ...], *, layers: int, heads: int, seed: int, flags: bool
) -> Iterator[dict[str, Any]]:
    luck = np.random.default_rng((seed, len(arm), layers))
    sites = [(0, "embed"), *((n, "resid") for n in range(1, layers + 1)), (layers, "final")]
    for step in steps:
        for layer, kind in sites:
            for row in _stream(arm, step, layer / layers, last=steps[-1], luck=luck):
                yield {"step": step, "layer": layer, "kind": kind, "depth": layer / layers, **row}
        for layer in range(1, layers + 1):
            yield from _attention(arm, step, layer, last=steps[-1], layers=layers, heads=heads, luck=luck)
        yield from _loop(step, luck, flags=flags)


def _stream(arm: str, step: int, depth: float, *, last: int, luck: np.random.Generator) -> Iterator[dict[str, Any]]:
    ratio = anisotropy(arm, step, depth, last=last) + 0.01 * luck.normal()
    true = dimension(arm, step, depth) * (1 + 0.02 * luck.normal())
    values = {
        ("svd_ratio", ""): (ratio, 0.01), ("svd_ratio", "batches=1"): (1.1 * ratio, 0.01),
        ("svd_ratio_squared", ""): (ratio**1.5, 0.01), ("svd_ratio_squared", "batches=1"): (ratio**1.5, 0.01),
        ("average_cosine", ""): (0.9 * ratio - 0.05, 0.02), ("drift", ""): (ratio / 2, 0.01),
        ("local_anisotropy", ""): (0.4 * ratio, 0.01), ("local_anisotropy", "partition=random"): (0.9 * ratio, 0.01),
        ("local_anisotropy", "partition=none"): (ratio, 0.01),
    }  # fmt: skip
    values |= {key: (true * scale, 0.4) for key, scale in ESTIMATORS.items()}
    for (metric, variant), (value, half) in values.items():
        for group in GROUPS:
            row = {"metric": metric, "variant": variant, "group": group, "value": value + (0.3 * half if group else 0)}
            row |= {"low": value - half, "high": value + half}
            row |= {"sd": half / 2} if (metric, variant) in ESTIMATORS or variant == "batches=1" else {}
            yield row | ({"note": "bias about -9 % at this n"} if (metric, variant) == ("two_nn", "") else {})


def _attention(
    arm: str, step: int, layer: int, *, last: int, layers: int, heads: int, luck: np.random.Generator
) -> Iterator[dict[str, Any]]:
    sharp = 0.1 + SHARP[arm] * late(step, last) * layer / layers
    for metric, value in (
        ("attention_sharpness", sharp),
        ("attention_entropy", 4 - 4 * sharp),
        ("score_spread", sharp),
    ):
        place = {"step": step, "layer": layer, "kind": "scores", "depth": layer / layers, "metric": metric}
        yield {**place, "value": value, "low": value - 0.02, "high": value + 0.02, "note": "mean over heads"}
        for head in range(heads):
            yield {**place, "head": head, "value": value + 0.05 * luck.normal()}


def _loop(step: int, luck: np.random.Generator, *, flags: bool) -> Iterator[dict[str, Any]]:
    place = {"step": step, "layer": None, "kind": "training", "depth": None}
    loss = 1.5 + 4 * math.exp(-0.4 * math.log1p(step)) + 0.02 * luck.normal()
    for metric, value in (("loss", loss), ("probe_loss", loss + 0.05), ("gradient_norm", 0.4 + 2 / (1 + step) ** 0.3)):
        yield {**place, "metric": metric, "value": value}
    if flags:
        yield {**place, "metric": "checkpoint", "value": float(step not in FLAGS), "note": FLAGS.get(step, "")}


def shape_map(models: Iterable[str], *, steps: tuple[int, ...] = STEPS, rows: int = 60, layers: int = 6) -> pa.Table:
    """A map of rows that leave the origin step by step, the frequent ones first."""
    random = np.random.default_rng(0)
    towards = random.normal(size=(rows, 3)) * [3, 1.5, 1]
    frequency = np.arange(rows) % 5 + 1
    found = []
    for model in models:
        for layer, kind in ((0, "embed"), (1, "resid"), (layers // 2, "resid"), (layers, "resid"), (layers, "final")):
            for step in steps:
                at = towards * (0.15 + late(step, steps[-1])) + np.outer(frequency - 3, [late(step, steps[-1]), 0, 0])
                for row in range(rows):
                    labels = {"token": f"w{row} ", "frequency": int(frequency[row]), "position": row % 32}
                    place = {"model": model, "seed": 0, "step": step, "stack": "single", "layer": layer, "kind": kind}
                    numbers = dict(zip("xyz", map(float, at[row]), strict=True))
                    found.append({**place, **labels, **numbers, "row": row, "group": "news" if row % 3 else "wiki"})
    return pa.Table.from_pylist(found, schema=MAP_SCHEMA)


def write_study(folder: Path, table: Table, **more: Any) -> dict[str, Any]:
    """The map of a study in its folder; what its run.json says."""
    folder.mkdir(parents=True, exist_ok=True)
    models = list(dict.fromkeys(entry["name"] for entry in table.about["models"]))
    pq.write_table(shape_map(models, **more), folder / "map.parquet")
    sites = ("0.embed", "1.resid", "3.resid", "6.resid", "6.final")
    shares = {site: [0.6, 0.2, 0.1] for site in sites}
    return table.about | {"map": {f"{name}-seed0": shares for name in models}}
