"""Run folders as the report wants them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from anisoscope.errors import AnisoscopeError
from anisoscope.runs.similarity import run_cka
from anisoscope.runs.store import RunFolder
from anisoscope.view.report import RunView, write_report


def run_view(folder: RunFolder) -> RunView:
    """Everything the report shows of one run."""
    about, table = folder.about(), folder.table()
    spectra: dict[str, np.ndarray] = {}
    cka = {}
    entries = [entry for entry in about.get("models", []) if entry.get("key")]
    for entry in entries:
        prefix = f"{entry['name']}/" if len(entries) > 1 else ""
        arrays = folder.arrays(entry["key"])
        spectra |= {prefix + k.removesuffix("/spectrum"): v for k, v in arrays.items() if k.endswith("/spectrum")}
        found = run_cka(folder, entry["key"])
        if found is not None:
            cka[entry["name"]] = found
    told = {"verdicts": _listed(folder.path / "verdicts.json"), "concepts": _concepts(folder.path)}
    return RunView(table, about, spectra, cka or None, str(folder.path), **told)


def _concepts(folder: Path) -> list[dict[str, Any]]:
    """The concepts of a run; of a study, those of all its arms."""
    own = _listed(folder / "concepts.json")
    if own:
        return own
    arms = sorted((folder / "arms").glob("*/concepts.json"))
    return [concept | {"arm": path.parent.name} for path in arms for concept in _listed(path)]


def _listed(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON file; none where there is no such file."""
    if not path.is_file():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise AnisoscopeError(f"{str(path)!r} is not readable JSON ({error}); restore or delete it.") from error
    if not isinstance(found, list) or not all(isinstance(record, dict) for record in found):
        raise AnisoscopeError(f"{str(path)!r} holds no list of records; restore or delete it.")
    return found


def report_runs(paths: list[Path], out: Path | None = None) -> Path:
    """Make the page of one or several runs again."""
    folders = [RunFolder.open(path) for path in paths]
    if len(folders) == 1 and folders[0].about().get("study") == "curvature":
        from anisoscope.view.curvature import write_curvature_report

        return write_curvature_report(folders[0].path)
    return write_report(out or folders[0].path, [run_view(folder) for folder in folders])
