"""Join the runs of `real_models.py` into one result: table, record, verdicts, page.

A model of which there are no new runs keeps what the target folder has of it, so that one can be measured again on a
machine that has no run of the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anisoscope.claims.catalogue import claims, evaluate_claims
from anisoscope.claims.engine.claim import verdicts_to_dicts
from anisoscope.results.folder import RunFolder
from anisoscope.results.manifest import new_manifest
from anisoscope.results.query import Table
from result_pages.judging import write_verdicts
from result_pages.thinning import thin

RUN = "real"
UNREAD = ("average=row", "batches=", "split=")  # variants that neither a claim nor a figure nor a key table reads
BINS = ("frequency:", "target:")  # groups by frequencies of the probe, which are not those of the training
KINDS = ("query", "key")  # sites, and metrics, that no claim of this result reads
UNASKED = ("rogue_share", "effective_rank", "stable_rank")
BOTH = ("gradient_energy", "gradient_enrichment", "gradient_p", "gradient_p_holm", "proxy_stability")  # of PCA, too
# energies in another unit, which have the replicates themselves, and what no claim compares
ALIKE = ("gradient_enrichment", "gradient_ratio", "relative_drift", "mean_norm", "iso_score", "participation_ratio")
LEAN = (*BOTH, "probe_loss", "average_cosine", "svd_ratio", "svd_ratio_squared", "drift", "explained_by_drift")
_TOOL = ("python", "tools/real_models.py", "runs/real")
COMMANDS = (
    (*_TOOL, "--archives", "downloads", "--weights", "models", "--enwik8", "enwik8.gz"),
    (*_TOOL, "--join", "docs/results/real"),
)
Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """One model of the result: its rows, its entry of the record, the runs they are from, and what was noted."""

    rows: Records
    entry: dict[str, Any]
    runs: Records
    warnings: list[str]
    skipped: Records


def join(out: Path, target: Path, models: Sequence[Any]) -> None:
    """Write the result of all complete runs under `out` into the folder `target`, beside what is there of others."""
    parts, absent = joined(out, models, former(target))
    table = Table.from_records(row for part in parts.values() for row in part.rows)
    about = record_of(parts, absent)
    target.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(target)
    folder.write_table(Table(table.arrow, about))
    folder.write_about(about)
    write_verdicts(target, judged(folder.table()))
    thin(target)


def joined(out: Path, models: Sequence[Any], before: Mapping[str, Part]) -> tuple[dict[str, Part], Records]:
    """The parts of the result by model, and the models of which there is nothing.

    What a folder has of a model is replaced by at least as many runs: a profile alone does not replace gradients.
    """
    fresh, parts, absent = {}, dict(before), []
    for model in models:
        found = arms(out, model.name)
        whole = len(found) == (2 if model.loss else 1)
        if found and (model.name not in before or len(found) >= len(before[model.name].runs)):
            fresh[model.name] = measured(model, found, skipped=[] if whole else [_skipped(out, model)])
        elif model.name not in before:
            absent.append(_skipped(out, model))
    return parts | fresh, absent


def measured(model: Any, found: Sequence[RunFolder], *, skipped: Records) -> Part:
    """A model of the result from its runs."""
    abouts = [folder.about() for folder in found]
    said = [text.removeprefix(f"{model.name}: ") for about in abouts for text in about.get("warnings", [])]
    warnings = [f"{model.name}: {text}" for text in dict.fromkeys(said)]
    runs = [_run(folder) for folder in found]
    return Part(thinned(rows_of(found), model), _entry(model, abouts), runs, warnings, skipped)


def former(target: Path) -> dict[str, Part]:
    """What a folder has of each model; nothing where there is no result yet."""
    if not (target / "run.json").is_file():
        return {}
    folder = RunFolder(target)
    about, rows = folder.about(), list(folder.table().records())
    parts = {}
    for entry in about["models"]:
        name = entry["name"]
        parts[name] = Part(
            rows=[row for row in rows if row["model"] == name],
            entry=entry,
            runs=[run for run in about["runs"] if run["name"].rpartition("-")[0] == name],
            warnings=[text for text in about["warnings"] if text.startswith(f"{name}: ")],
            skipped=[each for each in about["skipped"] if each["model"] == name],
        )
    return parts


def judged(table: Table) -> Records:
    """Verdicts on every claim for which some model of the table has what it needs."""
    names = [name for name, each in claims().items() if each.metrics[0] in table.metrics]
    verdicts = verdicts_to_dicts(evaluate_claims(table, names))
    asked = {each["claim"] for each in verdicts if each["effect"] is not None}
    return [each for each in verdicts if each["claim"] in asked]


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
    """Rows that are of the result, under the names of the model and its data."""
    kept = [row for row in records if _read(row) and (not model.lean or row["metric"] in LEAN)]
    return [{**row, "model": model.name, "data": model.data, "replicates": _folds(row)} for row in kept]


def _folds(row: Mapping[str, Any]) -> list[float] | None:
    return None if row["metric"] in ALIKE else row.get("replicates")


def _read(row: Mapping[str, Any]) -> bool:
    variant, group = row["variant"] or "", row["group"] or ""
    if row["head"] is not None or any(word in variant for word in UNREAD) or group.startswith(BINS):
        return False
    if row["kind"] in KINDS or row["metric"] in UNASKED:
        return False
    return "proxy=pca" not in variant or row["metric"] in BOTH


def record_of(parts: Mapping[str, Part], absent: Records) -> dict[str, Any]:
    """run.json of the result: where each model is from, what it read, how long it took, and what was noted."""
    about = new_manifest({"models": list(parts)}, command=COMMANDS[-1], seed=0, old={}, kind="study", study=RUN)
    about |= {"commands": [list(command) for command in COMMANDS], "status": "complete", "device": "cpu"}
    about["models"] = [part.entry for part in parts.values()]
    for name in ("runs", "warnings", "skipped"):
        about[name] = [each for part in parts.values() for each in getattr(part, name)]
    about["skipped"] += absent
    about["wall_seconds"] = round(sum(run["wall_seconds"] for run in about["runs"]), 1)
    about["started"] = min(run["started"] for run in about["runs"])
    return about


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


def _skipped(out: Path, model: Any) -> dict[str, Any]:
    """That a model was not measured, or without its gradients, with the reason that was noted."""
    path = out / "skipped.json"
    reasons = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {"model": model.name, "reason": reasons.get(model.name, "not measured")}
