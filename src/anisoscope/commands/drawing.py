"""Report pages from run folders: read them, evaluate claims over several runs, write the HTML.

The package `view` imports no metrics; this module passes it their declarations.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from anisoscope.claims.catalogue import claims, evaluate_claims
from anisoscope.claims.engine.claim import json_safe, verdicts_to_dicts
from anisoscope.claims.engine.correlation import FEWEST_SITES, CorrelationUnit
from anisoscope.claims.inherent.drift import (
    FEWEST_LAYERS,
    METRICS,
    NEAR_IDENTITY,
    drift_correlations,
    pooled_correlations,
)
from anisoscope.claims.inherent.modalities import BEYOND, modality_table
from anisoscope.errors import AnisoscopeError, check_known
from anisoscope.measurement.compare import run_cka
from anisoscope.metrics.catalogue import registry
from anisoscope.results.folder import RunFolder, slug
from anisoscope.results.live import by_training_batches
from anisoscope.results.privacy import without_places
from anisoscope.results.query import Query, Table
from anisoscope.studies.catalogue import STUDIES
from anisoscope.view import console
from anisoscope.view.matplotlib_renderer import notebook_axes
from anisoscope.view.page import Page
from anisoscope.view.plotly_renderer import notebook_figure
from anisoscope.view.report import PAGE, comparison_page, is_training, report_page, write_page
from anisoscope.view.sections.drift import Comparison
from anisoscope.view.subjects import RunView
from anisoscope.view.table_plot import table_panels
from anisoscope.view.words import Catalogue, finite

COMPARISON = "comparison.json"


def run_view(folder: RunFolder) -> RunView:
    """Everything the report shows of one run: table, spectra, CKA, verdicts and concepts."""
    table, stored = by_training_batches(folder.table()), _stored(folder)
    about = table.about
    if words := about.get("reading"):  # what is read of a run that is not done stands on its page
        about = {**about, "warnings": [f"{words[:1].upper()}{words[1:]}.", *about.get("warnings", [])]}
    spectra: dict[str, Any] = {}
    cka = stored.get("cka", {})
    entries = [entry for entry in about.get("models", []) if entry.get("key")]
    for entry in entries:
        prefix = f"{entry['name']}/" if len(entries) > 1 else ""
        arrays = folder.arrays(entry["key"])
        spectra |= {prefix + k.removesuffix("/spectrum"): v for k, v in arrays.items() if k.endswith("/spectrum")}
        if not stored and (found := run_cka(folder, entry["key"])) is not None:
            cka[entry["name"]] = found
    arms = sorted((folder.path / "arms").glob("*/concepts.json"))  # a study shows the concepts of all its arms
    concepts = _read_records(folder.path / "concepts.json") or [
        concept | {"arm": path.parent.name} for path in arms for concept in _read_records(path)
    ]
    verdicts = _read_records(folder.path / "verdicts.json")
    return RunView(table, about, spectra, cka or None, str(folder.path), verdicts, concepts, folder.row_map())


def write_comparison(folder: RunFolder) -> None:
    """Store what the page of a finished run compares (layers by CKA, drift with cosine); drawing then only reads."""
    if _figures_of(str(folder.about().get("study") or "")) is not None:
        return  # this study has a page of its own
    view = run_view(folder)
    cka = {model: (layers, np.asarray(matrix).tolist()) for model, (layers, matrix) in (view.cka or {}).items()}
    folder.write_json(COMPARISON, json_safe({"cka": cka, "drift": asdict(compare([view]))}))


def _stored(folder: RunFolder) -> dict[str, Any]:
    """What `write_comparison` stored; empty for a run without it."""
    path = folder.path / COMPARISON
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        Comparison(**found["drift"])
        return {"cka": dict(found["cka"]), "drift": found["drift"]}
    except (ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())[:80]
        raise AnisoscopeError(f"{str(path)!r} is damaged ({reason}); delete it: it is made again.") from error


def _read_records(path: Path) -> list[dict[str, Any]]:
    """The list of records in a JSON file; empty when the file does not exist."""
    if not path.is_file():
        return []
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise AnisoscopeError(f"{str(path)!r} is not readable JSON ({error}); restore or delete it.") from error
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise AnisoscopeError(f"{str(path)!r} holds no list of records; restore or delete it.")
    return records


def write_report(
    folder: Path,
    runs: Sequence[RunView],
    *,
    catalogue: Mapping[str, Any] | None = None,
    comparison: Comparison | None = None,
    name: str = PAGE,
) -> Path:
    """Write the page of some runs and its figures (`figures/*.pdf|svg`) into the folder; the path of the page."""
    page = _report_page(runs, catalogue=catalogue, comparison=comparison)
    return write_page(folder, page, name=name, claims=claims())


def _report_page(
    runs: Sequence[RunView], *, catalogue: Mapping[str, Any] | None = None, comparison: Comparison | None = None
) -> Page:
    if not any(len(run.table) for run in runs):
        raise AnisoscopeError("no run with results was given, expected at least one row; profile a model first.")
    declared = Catalogue(registry() if catalogue is None else catalogue)
    return report_page(runs, declared, comparison or compare(runs))


def compare(runs: Sequence[RunView]) -> Comparison:
    """Anisotropy and drift of all stacks of all runs; empty where neither was measured."""
    # for speed: a table over training has a hundred times as many rows as these readers need
    narrow = [Query(run.table).where(head=None, metric=METRICS).table(run.about) for run in runs]
    if not any(map(len, narrow)):
        return Comparison()
    table = joint(narrow, [run.path for run in runs])
    constants = {"beyond": BEYOND, "fewest": FEWEST_LAYERS, "near_identity": NEAR_IDENTITY}
    constants["pooled"] = pooled_correlations(table)
    found = Comparison.named(drift_correlations(table), modality_table(table), **constants)
    units = []  # ranks of the pooled stacks, computed as in `pooled_correlations`
    for record in (r for r in found.scattered if not r["untrained"]):
        sites = [p for p in record["points"] if p["counted"] and finite(p["drift"]) is not None]
        if len(sites) >= FEWEST_SITES and finite(record["spearman"]) is not None:
            drift, cosine = ([p[name] for p in sites] for name in ("drift", "cosine"))
            unit = CorrelationUnit.of(record["model"], drift, cosine)
            units.append((record, list(unit.one), list(unit.two)))
    return replace(found, units=units)


def report_runs(paths: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of one or several existing runs; `out` is a folder or the path of the page (`x.html`).

    By default the page of one run goes into its folder, and the page of several into a new folder beside the first, so
    that the page of no run is overwritten.
    """
    folders = open_runs(paths)
    place = page_path(folders, out)
    return write_page(place.parent, page_of_runs(folders), name=place.name, claims=claims())


def page_of_runs(folders: Sequence[RunFolder], *, judge: bool = True) -> Page:
    """The page of one or several runs as plain data: `page_document` makes a file of it, `page_data` what is served.

    A training without verdicts of its own, such as that of a `Monitor`, is judged here, unless `judge` is off.
    """
    study = str(folders[0].about().get("study") or "") if len(folders) == 1 else ""
    if _figures_of(study) is not None and _is_judged(folders[0]):
        return _study_page(folders[0], study)
    views = [run_view(folder) for folder in folders]
    trained = judge and any(is_training(view.table) for view in views)
    if len(views) > 1 and (trained or any(view.verdicts for view in views)):
        views = _with_joint_verdicts(views)
    elif trained and not views[0].verdicts:
        views = [replace(views[0], verdicts=verdicts_to_dicts(evaluate_claims(views[0].table)))]
    stored = _stored(folders[0]) if len(folders) == 1 else {}
    return _report_page(views, comparison=Comparison(**stored["drift"]) if stored else None)


def write_compared(found: Any, words: Sequence[str], out: Path | None = None) -> Path:
    """Write the page of two compared models; by default into a folder beside the first run, or as a file in the only.

    `words` are the paths of their runs.
    """
    folders = open_runs([Path(word) for word in words])
    place = page_path(folders, out, "compare")
    if out is None and len(folders) == 1:
        place = folders[0].path / "compare.html"  # its own page stays
    page = comparison_page(found, Catalogue(registry()))
    return write_page(place.parent, page, name=place.name)


def write_claimed(folders: Sequence[RunFolder], verdicts: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Write the page of some runs with these verdicts on all of them together."""
    views = _with_joint_verdicts([run_view(folder) for folder in folders], verdicts)
    place = page_path(folders, out)
    return write_page(place.parent, _report_page(views), name=place.name, claims=claims())


SHARED = ("verdicts.json", COMPARISON)  # beside page, figures, table and record; never rows, texts or weights


def share_runs(paths: Sequence[Path], out: Path | None = None) -> Path:
    """Write a folder to give away: the page and its figures, and of every run the table, verdicts and record.

    The record names no path, not even in the command; sampled rows, concepts with their texts, and weights stay.
    """
    folders = open_runs(paths)
    first = folders[0].path.resolve()
    target = out if out is not None else first.with_name(f"{first.name}-share")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise AnisoscopeError(f"output {str(target)!r} is there already; give an empty folder with --out.")
    if inside := [folder.path for folder in folders if target.resolve().is_relative_to(folder.path.resolve())]:
        raise AnisoscopeError(f"output {str(target)!r} is inside the run {str(inside[0])!r}; give a folder beside it.")
    for number, folder in enumerate(folders):
        name = folder.path.resolve().name
        place = target if len(folders) == 1 else target / f"{number}-{name}"
        copy = RunFolder(place)
        place.mkdir(parents=True, exist_ok=True)
        copy.write_table(Table(Table.from_records(folder.table().records()).arrow))
        about = without_places(folder.about(), share=True)
        copy.write_about(about | {"warnings": about.get("warnings", [])})
        for file in SHARED:
            if (folder.path / file).is_file():
                copy.write_json(file, json.loads((folder.path / file).read_text(encoding="utf-8")))
    copies = [target] if len(folders) == 1 else [p for p in sorted(target.iterdir()) if (p / "run.json").is_file()]
    return report_runs(copies, None if len(copies) == 1 else target)


def page_path(folders: Sequence[RunFolder], out: Path | None, name: str = "comparison") -> Path:
    """Where the page of some runs goes: `out`, the folder of the only run, or a new folder beside the first."""
    if out is not None and out.suffix.lower() in (".html", ".htm") and not out.is_dir():
        return out
    if out is not None and out.is_file():
        raise AnisoscopeError(
            f"output {str(out)!r} is a file and no page; give a folder, or a name that ends in .html."
        )
    if out is None and len(folders) > 1:
        name = "-".join([name, *(slug(folder.path.resolve().name) for folder in folders[:3])])
        more = f"-and-{len(folders) - 3}-more" if len(folders) > 3 else ""
        out = folders[0].path.resolve().parent / f"{name[:80]}{more}"
    return (out or folders[0].path) / PAGE


def write_study_report(folder: str | Path, study: str) -> Path:
    """Write the page and the figures of a finished study into its folder; the path of the page."""
    run = RunFolder.open(folder)
    return write_page(run.path, _study_page(run, study), claims=claims())


def _study_page(run: RunFolder, study: str) -> Page:
    folder, about = run.path, run.about()
    entry = STUDIES.get(study)
    finished = about.get("status") == "complete" or (entry is not None and entry.partial)
    if about.get("study") != study or not finished:
        raise AnisoscopeError(
            f"{str(folder)!r} holds no finished {study} study (study: {about.get('study')!r}, "
            f"status: {about.get('status')!r}); give the folder that `anisoscope study {study}` wrote."
        )
    verdicts = run.path / "verdicts.json"
    if not verdicts.is_file():
        raise AnisoscopeError(f"{str(verdicts)!r} cannot be read (it is not there); run the study again.")
    view = RunView(run.table(), about, path=str(run.path), verdicts=_read_records(verdicts))
    arrays = {name: run.arrays(name) for name in (entry.arrays if entry is not None else ())}
    return _figures_of(study).study_page(view, registry(), **arrays)


def _is_judged(folder: RunFolder) -> bool:
    """Whether a study has got as far as its own page needs; until then it has the page of any run."""
    about = folder.about()
    entry, status = STUDIES[str(about.get("study"))], about.get("status")
    ended = entry.partial and status != "running" and (folder.path / "verdicts.json").is_file()
    return status == "complete" or ended


def _figures_of(study: str) -> Any:
    """The `figures` module of a study; None for a study that uses the general report page."""
    home = f"anisoscope.studies.{study}"
    folders = getattr(importlib.import_module(home), "__path__", ()) if study in STUDIES else ()
    exists = any((Path(folder) / "figures.py").is_file() for folder in folders)
    return importlib.import_module(f"{home}.figures") if exists else None


def study_summary(folder: RunFolder, study: str) -> Iterator[Any]:
    """Tables and sentences that the console shows of a study before its verdicts; most have none."""
    shown = getattr(_figures_of(study), "summary", None)
    return iter(()) if shown is None else shown(RunView(folder.table(), folder.about()))


def open_runs(paths: Sequence[Path]) -> list[RunFolder]:
    """The run folders at these paths, without duplicates."""
    return [RunFolder.open(path) for path in {path.resolve(): path for path in paths}.values()]


def _with_joint_verdicts(
    views: Sequence[RunView], verdicts: Sequence[Mapping[str, Any]] | None = None
) -> list[RunView]:
    """The runs with claims evaluated on their joint table: verdicts of single runs need not hold for all of them."""
    paths, renamed = [view.path for view in views], []
    for view, names in zip(views, new_names([v.table for v in views], paths), strict=True):
        table = view.table.renamed(names)
        concepts = [{**c, "model": names.get(c.get("model") or "", c.get("model"))} for c in view.concepts]
        renamed.append(replace(view, table=table, about=table.about, concepts=concepts))
    if verdicts is None:
        verdicts = verdicts_to_dicts(evaluate_claims(joint([view.table for view in renamed], paths), robust=True))
    return [replace(view, verdicts=verdicts if i == 0 else ()) for i, view in enumerate(renamed)]


def joint_table(folders: Sequence[RunFolder]) -> Table:
    """One table of the rows of all runs; models that share a name get their run appended to it."""
    return joint([folder.table() for folder in folders], [str(folder.path) for folder in folders])


def joint(tables: Sequence[Table], paths: Sequence[str]) -> Table:
    """As `joint_table`, from tables and the paths of their runs."""
    renamed = [table.renamed(names) for table, names in zip(tables, new_names(tables, paths), strict=True)]
    # claims read the model entries of all runs, which say which models are encoders
    models = [entry for table in renamed for entry in table.about.get("models") or ()]
    return Table.concat(renamed, None if len(renamed) == 1 else {"models": models})


def new_names(tables: Sequence[Table], paths: Sequence[str]) -> list[dict[str, str]]:
    """For each table the new names of its models, empty when no (model, seed) of it occurs in another table.

    All models of such a run are renamed, because arms are paired by name. Other seeds of a model are its replicates.
    """
    owned = [set(Query(table).groups("model", "seed")) for table in tables]
    counts = Counter(owner for owners in owned for owner in owners)
    return [
        {model: f"{model} ({run})" for model, _ in sorted(owners, key=str) if any(counts[o] > 1 for o in owners)}
        for owners, run in zip(owned, _run_names(paths), strict=True)
    ]


def _run_names(paths: Sequence[str]) -> list[str]:
    """The last component of each path, or as many components as make the names unique.

    >>> _run_names(["runs/a", "runs/b"]), _run_names(["x/run", "y/run"])
    (['a', 'b'], ['x/run', 'y/run'])
    """
    parts = [Path(path).resolve().parts for path in paths]
    for length in range(1, max(map(len, parts), default=1)):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)


# -- views of single tables, with metric titles from the registry: public as `anisoscope.view` and `Table.plot` --------


def plot(
    table: Table,
    metric: str | None = None,
    *,
    over: str | None = None,
    backend: str = "plotly",
    ax: Any = None,
    where: Mapping[str, Any] | None = None,
    catalogue: Mapping[str, Any] | None = None,
) -> Any:
    """The figure of `Table.plot`: of plotly, or with backend="matplotlib" the axes (an array of them for several)."""
    check_known("backend", backend, ("plotly", "matplotlib"))
    if ax is not None and backend != "matplotlib":
        raise AnisoscopeError('ax is of matplotlib; say backend="matplotlib" as well.')
    declared = registry() if catalogue is None else catalogue
    panels = table_panels(table, metric, over=over, where=where, catalogue=declared)
    if backend == "matplotlib":
        return notebook_axes(panels, ax=ax)
    import plotly.graph_objects as go

    return go.Figure(notebook_figure(panels))


def profile_figure(table: Table, metric: str | None = None, *, catalogue: Mapping[str, Any] | None = None) -> Any:
    """An interactive figure of one metric (or the main ones) over layers."""
    return plot(table, metric, over=None if len(table.steps) < 2 else "layer", catalogue=catalogue)


def table_html(table: Table, *, catalogue: Mapping[str, Any] | None = None) -> str:
    """A compact pivot of layers by main metrics."""
    return console.table_html(table, catalogue=registry() if catalogue is None else catalogue)


def short_table(table: Table, *, catalogue: Mapping[str, Any] | None = None) -> Any:
    """What the terminal shows at the end of a run: a row per layer, or per model where that would be too long."""
    return console.short_table(table, catalogue=registry() if catalogue is None else catalogue)
