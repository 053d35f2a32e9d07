"""Join the runs of `real_models.py` into one result: table, record, verdicts, page."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from anisoscope.claims.catalogue import claims, evaluate_claims
from anisoscope.claims.engine.claim import verdicts_to_dicts
from anisoscope.commands.drawing import report_runs
from anisoscope.results.folder import RunFolder
from anisoscope.results.manifest import new_manifest
from anisoscope.results.query import Table

RUN, DIGITS = "real", 7
COARSE = 5  # digits of replicates, from which intervals of differences are made
UNREAD = ("average=row", "batches=", "split=")  # variants that neither a claim nor a figure nor a key table reads
BINS = ("frequency:", "target:")  # groups by frequencies of the probe, which are not those of the training
KINDS = ("query", "key")  # sites, and metrics, that no claim of this result reads
UNASKED = ("rogue_share", "effective_rank", "stable_rank")
BOTH = ("gradient_energy", "gradient_enrichment", "gradient_p", "gradient_p_holm", "proxy_stability")  # of PCA, too
LEAN = (*BOTH, "probe_loss", "average_cosine", "svd_ratio", "svd_ratio_squared", "drift", "explained_by_drift")
# energies in another unit, which have the replicates themselves, and what no claim compares
ALIKE = ("gradient_enrichment", "gradient_ratio", "relative_drift", "mean_norm", "iso_score", "participation_ratio")
SHOWN = ("hero",)  # figures that stay as SVG
Records = list[dict[str, Any]]


def join(out: Path, target: Path, models: Sequence[Any]) -> None:
    """Write the result of all complete runs under `out` into the folder `target`."""
    found = {model.name: arms(out, model.name) for model in models}
    there = [model for model in models if found[model.name]]
    table = Table.from_records(row for model in there for row in thinned(rows_of(found[model.name]), model))
    about = record_of(there, found, skipped=skipped_of(out, models, found))
    target.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(target)
    table = Table(table.arrow, about)
    pq.write_table(table.arrow, target / "table.parquet", compression="zstd", compression_level=19)
    folder.write_about(about)
    folder.write_json("verdicts.json", judged(folder.table()))
    shutil.rmtree(target / "figures", ignore_errors=True)  # of an earlier join
    report_runs([target])
    for drawn in target.glob("figures/*.svg"):  # each is a PDF, too, and on the page
        if drawn.stem not in SHOWN:
            drawn.unlink()


def judged(table: Table) -> Records:
    """Verdicts on every claim for which some model of the table has what it needs."""
    names = [name for name, each in claims().items() if each.metrics[0] in table.metrics]
    verdicts = verdicts_to_dicts(evaluate_claims(table, names))
    asked = {each["claim"] for each in verdicts if each["effect"] is not None}
    return [_shortened(each) for each in verdicts if each["claim"] in asked]


def _shortened(value: Any) -> Any:
    """Numbers of nested records with as many digits as the table has."""
    if isinstance(value, dict):
        return {name: _shortened(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shortened(each) for each in value]
    return _short(value) if isinstance(value, float) else value


def arms(out: Path, name: str) -> list[RunFolder]:
    """The complete runs of a model: its profile first."""
    folders = [RunFolder(out / "arms" / f"{name}-{kind}") for kind in ("profile", "tangent")]
    return [each for each in folders if (each.path / "run.json").is_file() and each.about()["status"] == "complete"]


def rows_of(folders: Sequence[RunFolder]) -> Records:
    """Rows of a profile, and of a tangent study those of other metrics: both measure the same contexts."""
    records: Records = []
    for folder in folders:
        before = {row["metric"] for row in records}
        fresh = [row for row in folder.table().records() if row["metric"] not in before]
        records += [{**row, "run": RUN, "revision": ""} for row in fresh]
    return records


def thinned(records: Iterable[Mapping[str, Any]], model: Any) -> Records:
    """Rows that are read, rounded, under the names of the model and its data."""
    kept = [row for row in records if _read(row) and (not model.lean or row["metric"] in LEAN)]
    return [{**_rounded(row), "model": model.name, "data": model.data} for row in kept]


def _read(row: Mapping[str, Any]) -> bool:
    variant, group = row["variant"] or "", row["group"] or ""
    if row["head"] is not None or any(word in variant for word in UNREAD) or group.startswith(BINS):
        return False
    if row["kind"] in KINDS or row["metric"] in UNASKED:
        return False
    return "proxy=pca" not in variant or row["metric"] in BOTH


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {name: _short(row[name]) for name in ("value", "low", "high", "sd")}
    parts = row.get("replicates")
    if parts is not None:
        parts = None if row["metric"] in ALIKE else [_short(each, COARSE) for each in parts]
    return {**row, **numbers, "replicates": parts}


def _short(value: float | None, digits: int = DIGITS) -> float | None:
    return value if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def record_of(models: Sequence[Any], found: Mapping[str, list[RunFolder]], *, skipped: Records) -> dict[str, Any]:
    """run.json of the result: where each model is from, what it read, how long it took, and what was noted."""
    config = {"models": [model.name for model in models]}
    command = ["python", "tools/real_models.py", "runs/real", "--join", "docs/results/real"]
    about = new_manifest(config, command=command, seed=0, old={}, kind="study", study=RUN)
    about |= {"status": "complete", "skipped": skipped, "runs": []}
    for model in models:
        abouts = [folder.about() for folder in found[model.name]]
        about["models"].append(_entry(model, abouts))
        about["runs"] += [_run(folder) for folder in found[model.name]]
        said = [text.removeprefix(f"{model.name}: ") for each in abouts for text in each.get("warnings", [])]
        about["warnings"] += [f"{model.name}: {text}" for text in dict.fromkeys(said)]
    about["wall_seconds"] = round(sum(run["wall_seconds"] for run in about["runs"]), 1)
    about["started"] = min(run["started"] for run in about["runs"])
    return about | {"device": "cpu"}


def _entry(model: Any, abouts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A model in the record: the entry of its profile, what its gradients are of, and its source."""
    entry: dict[str, Any] = {}
    for about in reversed(abouts):
        entry |= {name: value for name, value in (about.get("models") or [{}])[0].items() if value not in (None, "")}
    data = next((each["data"] for each in reversed(abouts) if isinstance(each.get("data"), dict)), {})
    data = entry.get("data") or data
    entry.setdefault("fingerprint", model.source)  # which tells that weights were loaded
    kept = {"name": model.name, "key": "", "source": model.source, "loss": model.loss}
    return entry | kept | {"data": {**data, "name": model.data}, "notes": []}  # notes are warnings of the result


def _run(folder: RunFolder) -> dict[str, Any]:
    about = folder.about()
    names = ("command", "started", "wall_seconds", "code", "versions")
    return {"name": folder.path.name, **{name: about.get(name) for name in names}}


def skipped_of(out: Path, models: Sequence[Any], found: Mapping[str, list[RunFolder]]) -> Records:
    """Models without a run, or without gradients though they have a loss, with the reason that was noted."""
    path = out / "skipped.json"
    reasons = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    absent = [model.name for model in models if len(found[model.name]) < (2 if model.loss else 1)]
    return [{"model": name, "reason": reasons.get(name, "not measured")} for name in absent]
