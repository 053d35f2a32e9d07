"""Rows of measured steps, and a run that is told to a tracker, for tests of trackers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anisoscope.results.query import Table

MANIFEST: dict[str, Any] = {
    "name": "tiny", "seed": 0, "config": {"when": "every(4)"}, "models": [{"architecture": "Tiny", "layers": 3}],
    "folder": None, "resumed": -1,
}  # fmt: skip
MAIN = "fit=refit;proxy=semi_nmf;rank=4"


def cosine(step: int, layer: int) -> float:
    return round(0.1 * layer + 0.01 * step, 6)


def rows_at(step: int) -> Table:
    """What a monitor measures at a step: two numbers over layers, one by head, and variants that nobody is sent."""
    place = {"model": "tiny", "run": "r", "stack": "single", "step": step, "group": "", "seed": 0, "variant": ""}
    sites = [(0, "embed"), (1, "resid"), (2, "resid"), (3, "resid"), (3, "final")]
    rows: list[dict[str, Any]] = []
    for layer, kind in sites:
        at = {**place, "layer": layer, "kind": kind, "depth": layer / 3}
        rows.append({**at, "metric": "average_cosine", "value": cosine(step, layer), "low": 0.0, "high": 1.0})
        rows.append({**at, "metric": "average_cosine", "variant": "first=out", "value": 9.0})
        for variant, value in (
            (MAIN, 2.0 + layer),
            (f"control=normal;{MAIN}", 1.0),
            ("fit=refit;proxy=pca;rank=4", 7.0),
        ):
            rows.append({**at, "metric": "gradient_enrichment", "variant": variant, "value": value})
    for layer in (1, 2, 3):
        at = {**place, "layer": layer, "kind": "scores", "metric": "attention_sharpness"}
        rows += [{**at, "head": head, "value": 0.1 * head + layer} for head in range(4)]
        rows.append({**at, "value": 0.15 + layer})
    rows.append({**place, "layer": 2, "kind": "resid", "metric": "drift", "value": float("nan"), "note": "too few"})
    rows.append({**place, "kind": "training", "metric": "probe_loss", "value": 3.0 - 0.1 * step})
    return Table.from_records(rows)


def logged_at(step: int) -> Table:
    """What a training logs of a step, which comes in a later call."""
    place = {"model": "tiny", "run": "r", "stack": "single", "step": step, "group": "", "seed": 0, "variant": ""}
    return Table.from_records([{**place, "kind": "training", "metric": "loss", "value": 4.0 - 0.1 * step}])


def tell(tracker: Any, steps: Sequence[int], *, folder: Path | None = None, resumed: int = -1) -> None:
    """A run from its start to its end, as a monitor tells it."""
    manifest = MANIFEST | {"folder": str(folder) if folder is not None else None, "resumed": resumed}
    tracker.start(manifest)
    for step in steps:
        tracker.write(rows_at(step), step)
        tracker.write(logged_at(step), step)
    tracker.finish({**manifest, "status": "complete", "warnings": []})


NAMES = {
    *(f"anisoscope/average_cosine/{place}" for place in ("embedding", "layer_01", "layer_02", "layer_03", "final")),
    *(f"anisoscope/tangent_enrichment/{place}" for place in ("embedding", "layer_01", "layer_02", "layer_03", "final")),
    *(f"anisoscope/attention_sharpness/layer_0{layer}_scores" for layer in (1, 2, 3)),
    *("anisoscope/probe_loss", "anisoscope/loss"),
}
