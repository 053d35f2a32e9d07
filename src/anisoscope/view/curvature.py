"""The page of the curvature study: verdicts, figures, slopes; complete in itself, and the same figures as files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anisoscope.view.curvature_curves import FLAT, SLOPES, Curves, title
from anisoscope.view.curvature_figures import FIGURES, beta_colours
from anisoscope.view.drawn import ROLES, STYLE, inline_svg, open_study, save_drawing, verdicts_of, write_page
from anisoscope.view.palette import blend
from anisoscope.view.records import settings
from anisoscope.view.verdicts import verdict_claims
from anisoscope.view.words import estimate, listed, number

if TYPE_CHECKING:
    pass

_DARK_SEQUENCE = ("#5566c9", "#8f62cf", "#d0628f", "#f0955a", "#f7e29b")
_NEED_CURVATURE = ("frequency", "every-manifold", "local-pca")


def write_curvature_report(folder: str | Path) -> Path:
    """Write `report.html` and `figures/*.pdf|svg` of a finished study into its folder; the path of the page."""
    run = open_study(folder, "curvature")
    about = run.about()
    curves = Curves.of(run.table().records(), about)
    drawings = _write_figures(run.path / "figures", curves)
    context = _context(curves, about, verdicts=verdicts_of(run), drawings=drawings, path=str(run.path))
    return write_page(run, "curvature.html.j2", context)


def _write_figures(folder: Path, curves: Curves) -> dict[str, str]:
    """Every figure as PDF and SVG files; and as markup for the page, by name."""
    import matplotlib

    drawings = {}
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type, unused-ignore]
        for name, draw in FIGURES.items():
            if name in _NEED_CURVATURE and not curves.curved:
                continue
            markup = save_drawing(draw(curves), folder / f"curvature-{name}")
            drawings[name] = inline_svg(markup, prefix=name, colours=_themed(curves))
    return drawings


def _themed(curves: Curves) -> dict[str, str]:
    """The page's names for the colours of a drawing."""
    hues = [hue for beta, hue in beta_colours(curves.betas).items() if beta != 0]
    return ROLES | {hue: f"--q{i}" for i, hue in enumerate(hues)}


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
