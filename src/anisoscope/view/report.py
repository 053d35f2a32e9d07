"""The report: one HTML file that opens offline, and vector figures beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anisoscope.errors import AnisoscopeError
from anisoscope.view.catalogue import Catalogue
from anisoscope.view.charts import Desk
from anisoscope.view.figures import write_figures
from anisoscope.view.findings import find
from anisoscope.view.inputs import data_phrase
from anisoscope.view.maps import spectra_by_owner
from anisoscope.view.modalities import modality_findings
from anisoscope.view.records import block_means, csv_link, dropped, glossary, model_facts, notes, settings
from anisoscope.view.sections import Sections, shared_sections, write_section_figures
from anisoscope.view.series import Sheet, Source, short_names
from anisoscope.view.tables import table_html
from anisoscope.view.training import is_training
from anisoscope.view.warned import warnings
from anisoscope.view.words import listed

if TYPE_CHECKING:
    import pyarrow as pa

    from anisoscope.results.table import Table

__all__ = ["RunView", "table_html", "write_report"]

TEMPLATES = Path(__file__).parent / "templates"
PAGE = "report.html"


@dataclass(frozen=True)
class RunView:
    """What the report is given of one run: never a model, never a tensor.

    `spectra`: eigenvalues (descending) by site, as `3.resid` or `encoder.3.resid`, after `MODEL/` where a run holds
    several models. `cka`: for each model the names of its layers and the matrix between them. `verdicts`, `concepts`
    and `map`: what `verdicts.json`, `concepts.json` and `map.parquet` of a training run or study hold; a map that is
    not given is read from `path`.
    """

    table: Table
    about: dict[str, Any] = field(default_factory=dict)
    spectra: Mapping[str, np.ndarray] = field(default_factory=dict)
    cka: Mapping[str, tuple[Sequence[str], np.ndarray]] | None = None
    path: str = ""
    verdicts: Sequence[Mapping[str, Any]] = ()
    concepts: Sequence[Mapping[str, Any]] = ()
    map: pa.Table | None = None


def write_report(
    folder: Path, runs: list[RunView], *, catalogue: Mapping[str, Any] | None = None, name: str = PAGE
) -> Path:
    """Write the page and its figures (`figures/*.pdf|svg`) into the folder; the path of the page.

    A page of another name has a folder of figures of that name, so that two pages can lie side by side.
    """
    if not any(len(run.table) for run in runs):
        raise AnisoscopeError("no run with results was given, expected at least one row; profile a model first.")
    page = Path(folder) / name
    page.parent.mkdir(parents=True, exist_ok=True)
    figures = page.with_name("figures" if name == PAGE else f"{page.stem}-figures")
    if any(is_training(run.table) for run in runs):
        return _replace(page, _training_page(figures, runs, Catalogue(catalogue)))
    sources = [Source(run.table, run.about, run.path) for run in runs]
    sheet, shared = Sheet(sources, Catalogue(catalogue)), shared_sections(sources, Catalogue(catalogue))
    spectra = spectra_by_owner([(run.about, run.spectra, run.path) for run in runs])
    # of several runs, what shows one model alone lies among the figures of its own run
    drawn = write_figures(figures, sheet, spectra=spectra, compared=len(runs) > 1)
    drawn += write_section_figures(figures, shared)
    return _replace(page, _render(_context(sheet, runs, spectra=spectra, figures=drawn, shared=shared)))


def _training_page(figures: Path, runs: Sequence[RunView], catalogue: Catalogue) -> str:
    """The page of a series over steps."""
    from anisoscope.view.training_page import training_context

    context = training_context(figures, runs, catalogue)
    names = dict.fromkeys(str(name or "") for run in runs for name in run.table.arrow["model"].unique().to_pylist())
    masthead = _masthead(list(names), [run.about for run in runs])
    return _render(masthead | context, "training.html.j2")


def _replace(path: Path, text: str) -> Path:
    """Write beside, then rename, so that a reader never finds half a page."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def environment() -> Any:
    """How every page is filled: text is escaped, and a name that is not there is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )


def _render(context: Mapping[str, Any], template: str = "report.html.j2") -> str:
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    made = environment()
    made.filters["json"] = lambda value: Markup(script_json(value))
    files = {"css": "report.css", "js": "report.js", "training_css": "training.css", "training_js": "training.js"}
    files |= {"shape_js": "shape.js", "attention_js": "attention.js"}
    own = {name: Markup((TEMPLATES / file).read_text(encoding="utf-8")) for name, file in files.items()}
    library = Markup(get_plotlyjs()) if context["specs"] else ""
    return made.get_template(template).render(context, **own, plotly=library)


def script_json(value: Any) -> str:
    """JSON that may stand inside a script element: no NaN, and no character that could end the element.

    >>> script_json(["</script>"])
    '["\\\\u003c/script\\\\u003e"]'
    """
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    unsafe: dict[str, str | int | None] = {
        "<": "\\u003c",
        ">": "\\u003e",
        "&": "\\u0026",
        "\u2028": "\\u2028",
        "\u2029": "\\u2029",
    }
    return text.translate(str.maketrans(unsafe))


def _context(
    sheet: Sheet,
    runs: Sequence[RunView],
    *,
    spectra: Mapping[str, Mapping[str, np.ndarray]],
    figures: Sequence[Path],
    shared: Sections,
) -> dict[str, Any]:
    desk = Desk(sheet)
    abouts = [run.about for run in runs]
    cka = [(f"{model}", labels, matrix) for run in runs for model, (labels, matrix) in (run.cka or {}).items()]
    sections = {
        "profiles": desk.profiles(),
        "spectra": desk.spectra(spectra),
        "heat": desk.heat(),
        "attention": desk.attention(),
        "cka": desk.cka(cka),
        "groups": desk.groups(),
    }
    return {
        **sections,
        **shared.sections,
        **_masthead(list(dict.fromkeys(s.model for s in sheet.subjects)), abouts),
        "legend": desk.legend(),
        "findings": [*modality_findings(shared.comparison), *find(sheet, abouts)],
        "models": model_facts(sheet, abouts),
        "random_facts": [],
        "means": block_means(sheet),
        "warnings": warnings(abouts),
        "dropped": dropped(abouts),
        "notes": notes(sheet),
        "settings": [settings(run.about, run.path) for run in runs],
        "glossary": glossary(sheet),
        "csv": csv_link(sheet),
        "figures": sorted({f"{path.parent.name}/{path.name.rsplit('.', 1)[0]}" for path in figures}),
        "specs": desk.specs | shared.specs,
    }


def _masthead(names: Sequence[str], abouts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    shorten = short_names(names)
    shown = [shorten(name) or "unnamed" for name in names]
    title = listed(shown) if len(shown) <= 3 else f"{', '.join(shown[:2])} and {len(shown) - 2} more"
    partial = [a for a in abouts if a.get("status", "complete") != "complete"]
    versions = dict.fromkeys(str(a["anisoscope"]) for a in abouts if a.get("anisoscope"))
    return {
        "title": title,
        "names": shown if len(shown) <= 3 else shown[:2],
        "others": max(0, len(shown) - 2) if len(shown) > 3 else 0,
        "data": data_phrase(abouts),
        "partial": len(partial),
        "runs": len(abouts),
        "version": ", ".join(versions),
        "started": listed(list(dict.fromkeys(_day(a["started"]) for a in abouts if a.get("started")))),
    }


def _day(started: Any) -> str:
    try:
        moment = datetime.fromisoformat(str(started))
    except ValueError:
        return str(started)
    return f"{moment.day} {moment:%B %Y}"
