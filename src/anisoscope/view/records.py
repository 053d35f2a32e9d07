"""The report's bookkeeping: what was run, on what, what was dropped, and what could not be computed."""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from anisoscope.view.findings import Mean, mean_over_blocks
from anisoscope.view.inputs import kind_told
from anisoscope.view.series import Sheet
from anisoscope.view.tables import default_metrics
from anisoscope.view.words import number, plural, shortened, site_name, spans

COLUMNS = (
    "model", "revision", "data", "step", "stack", "layer", "kind", "group", "metric", "variant",
    "value", "low", "high", "sd", "n", "contexts", "dropped", "seed", "note",
)  # fmt: skip


def model_facts(sheet: Sheet, abouts: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """What each model is and how much of it was seen; whatever a run did not record is left out."""
    facts = []
    for about in abouts:
        for model in about.get("models") or []:
            facts.append(_facts(model))
    if not facts:
        facts = [{"Model": s.label, "Blocks": str(s.blocks)} for s in sheet.subjects]
    return facts


def block_means(sheet: Sheet) -> dict[str, Any]:
    """Where several subjects have blocks: each main metric's mean over them, with and without the first position."""
    metrics = sheet.catalogue.main(default_metrics(sheet))
    rows = []
    for subject in sheet.subjects:
        rows.append((subject.label, [_mean_text(mean_over_blocks(sheet, subject, m)) for m in metrics]))
        twins = [_mean_text(mean_over_blocks(sheet, subject, m, without=True)) for m in metrics]
        if any(twins):
            rows.append((f"{subject.label}, without first position", twins))
    filled = [row for row in rows if any(row[1])]
    heads = [sheet.catalogue.entry(m).title for m in metrics]
    return {"heads": heads, "rows": filled} if len(sheet.subjects) > 1 and filled else {}


def _mean_text(mean: Mean | None) -> str:
    return mean.text if mean else ""


def _facts(model: Mapping[str, Any]) -> dict[str, str]:
    shape = [plural(int(model["layers"]), "block") if model.get("layers") else ""]
    shape += [f"width {int(model['width']):,}" if model.get("width") else ""]
    found = {
        "Model": str(model.get("name") or "unnamed"),
        "Revision": str(model.get("revision") or ""),
        "Kind": kind_told(model),
        "Architecture": str(model.get("architecture") or ""),
        "Shape": ", ".join(part for part in shape if part),
        "Parameters": _millions(model.get("parameters")),
        "A row is": _row_words(model.get("rows")),
        "Rows": _count(model.get("row_count", model.get("rows"))),
        "Contexts": _count(model.get("contexts")),
    }
    return {name: text for name, text in found.items() if text}


def _count(value: Any) -> str:
    return f"{int(value):,}" if value and not isinstance(value, Mapping) else ""


def _row_words(rows: Any) -> str:
    """What one row is, by stack where the stacks differ.

    >>> _row_words({"encoder": "one frame of audio", "decoder": "one token"}), _row_words({"single": "one token"})
    ('one frame of audio (encoder), one token (decoder)', 'one token')
    """
    words = {str(k): str(v) for k, v in rows.items()} if isinstance(rows, Mapping) else {}
    if len(set(words.values())) < 2:
        return next(iter(words.values()), "")
    return ", ".join(f"{word} ({stack})" for stack, word in words.items())


def _millions(value: Any) -> str:
    if not value:
        return ""
    for size, unit in ((1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{number(value / size)} {unit}"
    return f"{int(value):,}"


def dropped(abouts: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Rows that were left out, by model and reason; models that lost the same, as seeds of one do, share a line."""
    found: dict[tuple[tuple[str, str], ...], dict[str, None]] = {}
    for about in abouts:
        for model in about.get("models") or []:
            reasons = [
                (str(k).replace("_", " "), f"{v:,}") for k, v in (model.get("dropped") or {}).items() if v is not None
            ]
            if reasons:
                found.setdefault(tuple(reasons), {})[str(model.get("name") or "unnamed")] = None
    return [(shortened(list(names)), list(reasons)) for reasons, names in found.items()]


def notes(sheet: Sheet) -> dict[str, list[dict[str, str]]]:
    """Notes of the table, once each with the places they hold for: values that are missing apart from remarks."""
    missing: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    remarks: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for record in sheet.records:
        lost = record["value"] is None or not math.isfinite(record["value"])
        if lost or record["note"]:
            key = (sheet.subject(record).label, record["metric"], record["variant"] or "", record["group"] or "")
            book = missing if lost else remarks
            book[(*key, record["note"] or "no reason was recorded")].append(record)
    return {"missing": _noted(sheet, missing), "remarks": _noted(sheet, remarks)}


def _noted(sheet: Sheet, book: Mapping[tuple[str, ...], list[dict[str, Any]]]) -> list[dict[str, str]]:
    return [
        {
            "model": model,
            "metric": " · ".join(p for p in (sheet.catalogue.entry(metric).title, variant, group) if p),
            "where": _where(rows),
            "note": note,
        }
        for (model, metric, variant, group, note), rows in book.items()
    ]


def _where(rows: Sequence[Mapping[str, Any]]) -> str:
    """Places in a few words: layers as ranges, kinds and heads named."""
    kinds: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        kinds[row["kind"]].append(row["layer"] or 0)
    parts = []
    for kind, layers in kinds.items():
        if len(set(layers)) == 1:
            parts.append(site_name(layers[0], kind))
        else:
            parts.append(f"blocks {spans(layers)}" + ("" if kind == "resid" else f" · {kind}"))
    heads = {row["head"] for row in rows if row["head"] is not None}
    return ", ".join(parts) + (f" ({plural(len(heads), 'head')})" if heads else "")


def settings(about: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Everything needed to run it again."""
    command = about.get("command") or []
    groups = [
        ("Run", _run_facts(about)),
        ("Settings", flat(about.get("config") or {})),
        ("Versions", flat({"anisoscope": about.get("anisoscope"), **(about.get("versions") or {})})),
        ("Data", flat(about.get("data") or {})),
    ]
    models = []
    for model in about.get("models") or []:
        shown = {k: v for k, v in model.items() if k not in ("notes", "dropped")}
        models.append((f"Model: {model.get('name', 'unnamed')}", flat(shown)))
    return {
        "command": command if isinstance(command, str) else _shell(command),
        "path": path,
        "groups": [(name, pairs) for name, pairs in [*groups, *models] if pairs],
        "facts": [(name, pairs) for name, pairs in groups if pairs],
        "models": [(name, pairs) for name, pairs in models if pairs],
    }


def _shell(command: Sequence[Any]) -> str:
    import shlex

    return shlex.join(map(str, command))


def _run_facts(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = {k: about.get(k) for k in ("status", "started", "device", "seed", "schema")}
    found = [(k, str(v)) for k, v in facts.items() if v is not None]
    if about.get("wall_seconds") is not None:
        spent = about.get("monitor_seconds")
        measuring = f", of which {number(spent)} s measuring" if spent is not None else ""
        found.append(("wall time", f"{number(about['wall_seconds'])} s{measuring}"))
    peak, guess = about.get("peak_memory_mb"), about.get("memory_estimate_mb")
    if peak is not None:
        found.append(("peak memory", f"{number(peak)} MB" + (f" (estimated {number(guess)} MB)" if guess else "")))
    elif guess is not None:
        found.append(("estimated memory", f"{number(guess)} MB"))
    return found


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as name and text.

    >>> flat({"a": {"b": 1}, "c": ["x", "y"], "d": None})
    [('a.b', '1'), ('c', 'x, y')]
    """
    pairs: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            pairs += flat(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple):
            pairs += [(f"{prefix}{key}", ", ".join(map(str, value)))] if value else []
        elif value is not None and value != "":
            pairs.append((f"{prefix}{key}", f"{value:,}" if type(value) is int and value > 9999 else str(value)))
    return pairs


def glossary(sheet: Sheet) -> list[Any]:
    return [sheet.catalogue.entry(metric) for metric in sheet.metrics()]


def csv_link(sheet: Sheet) -> dict[str, Any]:
    """All rows that are not per head as a data URI; the page's own table is read back from it."""
    rows = [r for r in sheet.records if r["head"] is None]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([_plain(r.get(c)) for c in COLUMNS] for r in rows)
    heads = len(sheet.records) - len(rows)
    return {
        "href": "data:text/csv;charset=utf-8," + quote(text.getvalue(), safe=",;=:/()"),
        "rows": len(rows),
        "heads": heads,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.9g}" if math.isfinite(value) else ""
    return "" if value is None else value
