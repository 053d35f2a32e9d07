"""Run folders as the report wants them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.compare import run_cka
from anisoscope.results.folder import RunFolder, slug
from anisoscope.results.table import Table
from anisoscope.view.joining import joined, joint, new_names, renamed_table
from anisoscope.view.report import PAGE, RunView, write_report

STUDIES = ("curvature", "performance", "untrained", "sharpness")  # view/STUDY.py draws their pages


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
    """Make the page of one or several runs again; `out` is a folder, or a page by its name (`x.html`).

    By default one run has its page in its folder; several have theirs in a folder of their own beside the first, so
    that no run loses its page.
    """
    folders = open_runs(paths)
    study = str(folders[0].about().get("study") or "") if len(folders) == 1 else ""
    if study in STUDIES:
        return _study_page(folders[0], study, out)
    views = [run_view(folder) for folder in folders]
    if len(views) > 1 and any(view.verdicts for view in views):
        views = _judged_together(views)
    page = _page_path(folders, out)
    return write_report(page.parent, views, name=page.name)


def _page_path(folders: Sequence[RunFolder], out: Path | None) -> Path:
    if out is not None and out.suffix.lower() in (".html", ".htm") and not out.is_dir():
        return out
    if out is not None and out.is_file():
        raise AnisoscopeError(
            f"output {str(out)!r} is a file and no page; give a folder, or a name that ends in .html."
        )
    if out is None and len(folders) > 1:
        name = "-".join(["comparison", *(slug(folder.path.resolve().name) for folder in folders[:3])])
        more = f"-and-{len(folders) - 3}-more" if len(folders) > 3 else ""
        out = folders[0].path.resolve().parent / f"{name[:80]}{more}"
    return (out or folders[0].path) / PAGE


def _study_page(folder: RunFolder, study: str, out: Path | None) -> Path:
    """The page of a study that has a form of its own, which stays with its figures in its folder."""
    if out is not None and out.resolve() != folder.path.resolve():
        raise AnisoscopeError(
            f"the page of a {study} study stays in its folder {str(folder.path)!r}, so --out {str(out)!r} cannot be "
            "followed; leave --out away and copy the page."
        )
    module = importlib.import_module(f"anisoscope.view.{study}")
    return Path(getattr(module, f"write_{study}_report")(folder.path))


def open_runs(paths: Sequence[Path]) -> list[RunFolder]:
    """The run folders, each once."""
    return [RunFolder.open(path) for path in {path.resolve(): path for path in paths}.values()]


# -- several runs ------------------------------------------------------------------------------------------------------


def _judged_together(views: Sequence[RunView]) -> list[RunView]:
    """The claims asked of all runs at once: what each run said by itself may be false of them together."""
    from anisoscope.claims.catalogue import evaluate_claims
    from anisoscope.claims.engine.claim import verdicts_to_dicts

    tables = [view.table for view in views]
    renamed = new_names(tables, [view.path for view in views])
    views = [_renamed_view(view, names) for view, names in zip(views, renamed, strict=True)]
    verdicts = verdicts_to_dicts(evaluate_claims(joined([view.table for view in views])))
    return [replace(view, verdicts=verdicts if i == 0 else ()) for i, view in enumerate(views)]


def _renamed_view(view: RunView, names: Mapping[str, str]) -> RunView:
    def told(record: Mapping[str, Any], key: str) -> dict[str, Any]:
        return {**record, key: names.get(record.get(key) or "", record.get(key))}

    about = {**view.about, "models": [told(entry, "name") for entry in view.about.get("models", [])]}
    concepts = [told(concept, "model") for concept in view.concepts]
    return replace(view, table=renamed_table(view.table, names), about=about, concepts=concepts)


def joint_table(folders: Sequence[RunFolder]) -> Table:
    """The tables of some runs as one, in which models of the same name are told apart."""
    return joint([folder.table() for folder in folders], [str(folder.path) for folder in folders])
