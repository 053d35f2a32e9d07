"""Build report pages from run folders: read them, evaluate claims over several runs, write the HTML.

The package `view` imports no metrics; this module passes it their declarations.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa

from anisoscope.claims.catalogue import evaluate_claims
from anisoscope.claims.engine.claim import verdicts_to_dicts
from anisoscope.claims.engine.correlation import FEWEST_SITES, CorrelationUnit
from anisoscope.claims.inherent.drift import FEWEST_LAYERS, METRICS, NEAR_IDENTITY, correlations, pooled
from anisoscope.claims.inherent.modalities import BEYOND, modality_table
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.compare import run_cka
from anisoscope.metrics.catalogue import registry
from anisoscope.results.folder import RunFolder, slug
from anisoscope.results.query import Query, Table
from anisoscope.studies.catalogue import STUDIES
from anisoscope.view import console, report
from anisoscope.view.report import PAGE, write_page
from anisoscope.view.sections import profiles
from anisoscope.view.sections.drift import Comparison
from anisoscope.view.subjects import RunView
from anisoscope.view.words import finite


def run_view(folder: RunFolder) -> RunView:
    """Everything the report shows of one run: table, spectra, CKA, verdicts and concepts."""
    about, table = folder.about(), folder.table()
    spectra: dict[str, np.ndarray] = {}
    cka = {}
    entries = [entry for entry in about.get("models", []) if entry.get("key")]
    for entry in entries:
        prefix = f"{entry['name']}/" if len(entries) > 1 else ""
        arrays = folder.arrays(entry["key"])
        spectra |= {prefix + k.removesuffix("/spectrum"): v for k, v in arrays.items() if k.endswith("/spectrum")}
        if (found := run_cka(folder, entry["key"])) is not None:
            cka[entry["name"]] = found
    arms = sorted((folder.path / "arms").glob("*/concepts.json"))  # a study shows the concepts of all its arms
    concepts = _read_records(folder.path / "concepts.json") or [
        concept | {"arm": path.parent.name} for path in arms for concept in _read_records(path)
    ]
    verdicts = _read_records(folder.path / "verdicts.json")
    return RunView(table, about, spectra, cka or None, str(folder.path), verdicts, concepts, folder.row_map())


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
    folder: Path, runs: Sequence[RunView], *, catalogue: Mapping[str, Any] | None = None, name: str = PAGE
) -> Path:
    """Write the page of some runs and its figures into the folder; the path of the page."""
    declared = registry() if catalogue is None else catalogue
    return report.write_report(folder, runs, catalogue=declared, comparison=compare(runs), name=name)


def compare(runs: Sequence[RunView]) -> Comparison:
    """Anisotropy and drift of all stacks of all runs; empty where neither was measured."""
    # for speed: a table over training has a hundred times as many rows as these readers need
    narrow = [Query(run.table).where(head=None, metric=METRICS).table(run.about) for run in runs]
    if not any(map(len, narrow)):
        return Comparison()
    table = joint(narrow, [run.path for run in runs])
    constants = {"pooled": pooled(table), "beyond": BEYOND, "fewest": FEWEST_LAYERS, "near_identity": NEAR_IDENTITY}
    found = Comparison.named(correlations(table), modality_table(table), **constants)
    units = []  # ranks of the pooled stacks, computed as in `claims.inherent.drift.pooled`
    for record in (r for r in found.scattered if not r["untrained"]):
        sites = [p for p in record["points"] if p["counted"] and finite(p["drift"]) is not None]
        if len(sites) >= FEWEST_SITES and finite(record["spearman"]) is not None:
            drift, cosine = ([p[name] for p in sites] for name in ("drift", "cosine"))
            unit = CorrelationUnit.of(record["model"], drift, cosine)
            units.append((record, list(unit.one), list(unit.two)))
    return replace(found, units=units)


def report_runs(paths: list[Path], out: Path | None = None) -> Path:
    """Write the page of one or several existing runs; `out` is a folder or the path of the page (`x.html`).

    By default the page of one run goes into its folder, and the page of several into a new folder beside the first, so
    that the page of no run is overwritten.
    """
    folders = open_runs(paths)
    study = str(folders[0].about().get("study") or "") if len(folders) == 1 else ""
    if _figures_of(study) is not None:
        folder = folders[0].path
        if out is not None and out.resolve() != folder.resolve():
            raise AnisoscopeError(
                f"the page of a {study} study stays in its folder {str(folder)!r}, so --out {str(out)!r} cannot be "
                "followed; leave --out away and copy the page."
            )
        return write_study_report(folder, study)
    views = [run_view(folder) for folder in folders]
    if len(views) > 1 and any(view.verdicts for view in views):
        views = _with_joint_verdicts(views)
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


def write_study_report(folder: str | Path, study: str) -> Path:
    """Write the page and the figures of a finished study into its folder; the path of the page."""
    run = RunFolder.open(folder)
    about = run.about()
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
    declared: Any = _figures_of(study)
    arrays = {name: run.arrays(name) for name in (entry.arrays if entry is not None else ())}
    return write_page(run.path, declared.study_page(view, registry(), **arrays))


def _figures_of(study: str) -> ModuleType | None:
    """The `figures` module of a study; None for a study that uses the general report page."""
    folder = f"anisoscope.studies.{study}"
    if study not in STUDIES or getattr(importlib.import_module(folder), "__path__", None) is None:
        return None
    exists = importlib.util.find_spec(f"{folder}.figures") is not None
    return importlib.import_module(f"{folder}.figures") if exists else None


def study_summary(folder: RunFolder, study: str) -> Iterator[Any]:
    """Tables and sentences that the console shows of a study before its verdicts; most have none."""
    shown = getattr(_figures_of(study), "summary", None)
    return iter(()) if shown is None else shown(RunView(folder.table(), folder.about()))


def open_runs(paths: Sequence[Path]) -> list[RunFolder]:
    """The run folders at these paths, without duplicates."""
    return [RunFolder.open(path) for path in {path.resolve(): path for path in paths}.values()]


def _with_joint_verdicts(views: Sequence[RunView]) -> list[RunView]:
    """The runs with claims evaluated on their joint table: verdicts of single runs need not hold for all of them."""
    renamed = []
    for view, names in zip(views, new_names([v.table for v in views], [v.path for v in views]), strict=True):
        about = {**view.about, "models": _renamed(view.about.get("models", []), "name", names)}
        concepts = _renamed(view.concepts, "model", names)
        renamed.append(replace(view, table=renamed_table(view.table, names), about=about, concepts=concepts))
    verdicts = verdicts_to_dicts(evaluate_claims(joined([view.table for view in renamed])))
    return [replace(view, verdicts=verdicts if i == 0 else ()) for i, view in enumerate(renamed)]


def _renamed(records: Iterable[Mapping[str, Any]], key: str, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Copies of the records with the model name under `key` replaced according to `names`."""
    return [{**record, key: names.get(record.get(key) or "", record.get(key))} for record in records]


def joint_table(folders: Sequence[RunFolder]) -> Table:
    """One table of the rows of all runs; models that share a name get their run appended to it."""
    return joint([folder.table() for folder in folders], [str(folder.path) for folder in folders])


def joint(tables: Sequence[Table], paths: Sequence[str]) -> Table:
    """As `joint_table`, from tables and the paths of their runs."""
    renamed = new_names(tables, paths)
    return joined([renamed_table(table, names) for table, names in zip(tables, renamed, strict=True)])


def joined(tables: Sequence[Table]) -> Table:
    """The concatenated tables, with the model entries of all (claims read there which models are encoders)."""
    models = [entry for table in tables for entry in table.about.get("models") or ()]
    return Table(Table.concat(tables).arrow, tables[0].about if len(tables) == 1 else {"models": models})


def new_names(tables: Sequence[Table], paths: Sequence[str]) -> list[dict[str, str]]:
    """For each table the new names of its models, empty when no (model, seed) of it occurs in another table.

    All models of such a run are renamed, because arms are paired by name. Other seeds of a model are its replicates.
    """
    groups = [table.arrow.select(["model", "seed"]).group_by(["model", "seed"]).aggregate([]) for table in tables]
    owned = [{(pair["model"] or "", pair["seed"]) for pair in group.to_pylist()} for group in groups]
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


def renamed_table(table: Table, names: Mapping[str, str]) -> Table:
    """The same table with models renamed, in the rows and in `about`."""
    if not names:
        return table
    entries = _renamed(table.about.get("models") or (), "name", names)
    column = table.arrow["model"].to_pylist()
    models = pa.array([names.get(model or "", model) for model in column], type=pa.string())
    place = table.arrow.schema.get_field_index("model")
    arrow = table.arrow.set_column(place, table.arrow.schema.field(place), models)
    return Table(arrow, {**table.about, "models": entries} if entries else table.about)


# -- views of single tables, with metric titles from the registry: public as `anisoscope.view` and `Table.plot` --------


def profile_figure(table: Table, metric: str | None = None, *, catalogue: Mapping[str, Any] | None = None) -> Any:
    """An interactive figure of one metric (or the main ones) over layers."""
    return profiles.profile_figure(table, metric, catalogue=registry() if catalogue is None else catalogue)


def table_html(table: Table, *, catalogue: Mapping[str, Any] | None = None) -> str:
    """A compact pivot of layers by main metrics."""
    return console.table_html(table, catalogue=registry() if catalogue is None else catalogue)


def short_table(table: Table, *, catalogue: Mapping[str, Any] | None = None) -> Any:
    """What the terminal shows at the end of a run: a row per layer, or per model where that would be too long."""
    return console.short_table(table, catalogue=registry() if catalogue is None else catalogue)
