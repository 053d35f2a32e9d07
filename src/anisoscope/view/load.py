"""Run folders as the report wants them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

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
    return RunView(table, about, spectra, cka or None, str(folder.path))


def report_runs(paths: list[Path], out: Path | None = None) -> Path:
    """Make the page of one or several runs again."""
    folders = [RunFolder.open(path) for path in paths]
    return write_report(out or folders[0].path, [run_view(folder) for folder in folders])
