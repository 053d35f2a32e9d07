"""The page of the curvature study: verdicts, figures, slopes; complete in itself, and the same figures as files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anisoscope.errors import AnisoscopeError
from anisoscope.runs.store import RunFolder, replace_file
from anisoscope.view.curvature_curves import FLAT, SLOPES, Curves, title
from anisoscope.view.curvature_figures import FIGURES, INK, RULE, SOFT, STYLE, beta_colours
from anisoscope.view.palette import LIGHT, blend
from anisoscope.view.records import settings
from anisoscope.view.report import plain_page
from anisoscope.view.verdicts import verdict_claims
from anisoscope.view.words import estimate, listed, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DARK_SEQUENCE = ("#5566c9", "#8f62cf", "#d0628f", "#f0955a", "#f7e29b")
_NEED_CURVATURE = ("frequency", "every-manifold", "local-pca")


def write_curvature_report(folder: str | Path) -> Path:
    """Write `report.html` and `figures/*.pdf|svg` of a finished study into its folder; the path of the page."""
    run = RunFolder.open(folder)
    about = run.about()
    if about.get("study") != "curvature" or about.get("status") != "complete":
        raise AnisoscopeError(
            f"{str(folder)!r} holds no finished curvature study (study: {about.get('study')!r}, "
            f"status: {about.get('status')!r}); give the folder that `anisoscope study curvature` wrote."
        )
    curves = Curves.of(run.table().records(), about)
    drawings = _write_figures(run.path / "figures", curves)
    page = plain_page(
        "curvature.html.j2",
        _context(curves, about, verdicts=_verdicts(run.path), drawings=drawings, path=str(run.path)),
    )
    target = run.path / "report.html"
    replace_file(target, lambda p: p.write_text(page, encoding="utf-8"))
    return target


def _verdicts(folder: Path) -> list[dict[str, Any]]:
    path = folder / "verdicts.json"
    try:
        return list(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise AnisoscopeError(f"{str(path)!r} cannot be read ({error}); run the study again.") from error


def _write_figures(folder: Path, curves: Curves) -> dict[str, str]:
    """Every figure as PDF and SVG files; and as markup for the page, by name."""
    import matplotlib

    drawings = {}
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type, unused-ignore]
        for name, draw in FIGURES.items():
            if name in _NEED_CURVATURE and not curves.curved:
                continue
            _save(draw(curves), folder / f"curvature-{name}")
            markup = (folder / f"curvature-{name}.svg").read_text(encoding="utf-8")
            drawings[name] = inline_svg(markup, prefix=name, colours=_themed(curves))
    return drawings


def _save(figure: Figure, stem: Path) -> None:
    def write_pdf(path: Path) -> None:
        figure.savefig(path, format="pdf", metadata={"CreationDate": None})

    def write_svg(path: Path) -> None:
        figure.savefig(path, format="svg", metadata={"Date": None})

    replace_file(stem.with_name(stem.name + ".pdf"), write_pdf)
    figure.set_layout_engine("none")  # the places are found: finding them again takes longer than drawing
    replace_file(stem.with_name(stem.name + ".svg"), write_svg)


def _themed(curves: Curves) -> dict[str, str]:
    """Colours of paper and the page's names for them, so that the page can be dark."""
    roles = {INK: "--ink", SOFT: "--soft", RULE: "--rule", "#ffffff": "--paper", "#000000": "--ink"}
    roles |= {hue: f"--s{i + 1}" for i, hue in enumerate(LIGHT)}
    hues = [hue for beta, hue in beta_colours(curves.betas).items() if beta != 0]
    return roles | {hue: f"--q{i}" for i, hue in enumerate(hues)}


def inline_svg(text: str, *, prefix: str, colours: Mapping[str, str]) -> str:
    """An SVG file as an element: no size of its own, names that cannot clash with another's, colours by role.

    >>> made = '<?xml?><svg width="9" height="9"><g id="a" style="fill: #FFF000"/></svg>'
    >>> inline_svg(made, prefix="p", colours={"#fff000": "--s1"})
    '<svg><g id="p-a" style="fill: var(--s1)"/></svg>'
    """
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    for hue, role in colours.items():
        text = re.sub(rf"{hue}\b", f"var({role})", text, flags=re.IGNORECASE)
    return text


def _context(
    curves: Curves, about: Mapping[str, Any], *, verdicts: list[dict[str, Any]], drawings: Mapping[str, str], path: str
) -> dict[str, Any]:
    from markupsafe import Markup

    config = about["config"]
    zipf, beta = curves.reference
    return {
        "version": about.get("anisoscope", ""),
        "started": str(about.get("started", ""))[:10],
        "config": config,
        "floor": number(config["floor"]),
        "manifolds": listed([title(m) for m in curves.curved]),
        "flat": FLAT in curves.models,
        "shown": title(curves.curved[0]) if curves.curved else "",
        "zipf": f"{zipf:g}",
        "beta": f"{beta:g}".replace("-", "−"),
        "given": bool(about["reference"].get("given")),
        "claims": verdict_claims(verdicts),
        "subjects": len({str(v.get("subject")) for v in verdicts}),
        "drawings": {name: Markup(text) for name, text in drawings.items()},
        "slopes": _slope_rows(curves),
        "expected": SLOPES,
        "betas": _beta_shades(curves),
        "settings": settings(about, path),
        "files": sorted(f"figures/curvature-{name}" for name in drawings),
    }


def _slope_rows(curves: Curves) -> list[dict[str, Any]]:
    """For each manifold the slopes, and measured over expected variance."""
    kind = str(curves.config.get("kind"))
    rows = []
    for model in curves.models:
        cells = []
        for metric in ("curvature_slope", "curvature_constant"):
            for of in SLOPES:
                point = curves.value(model, metric, of=of, sampling=kind)
                known = point is not None and math.isfinite(point.value)
                cells.append(estimate(point.value, point.low, point.high) if point is not None and known else "–")
        rows.append({"name": title(model), "cells": cells})
    return rows


def _beta_shades(curves: Curves) -> list[tuple[str, str]]:
    """The shade of each β on a light and on a dark page."""
    hues = [hue for beta, hue in beta_colours(curves.betas).items() if beta != 0]
    return [(hue, blend(_DARK_SEQUENCE, i / max(1, len(hues) - 1))) for i, hue in enumerate(hues)]
