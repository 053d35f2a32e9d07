"""The page of the study of untrained blocks: verdicts, reference values, panels of curves; complete in itself."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anisoscope.results.folder import RunFolder, slug
from anisoscope.view.drawn import ROLES, STYLE, inline_svg, open_study, save_drawing, verdicts_of, write_page
from anisoscope.view.palette import SEQUENCE, blend
from anisoscope.view.records import settings
from anisoscope.view.untrained_curves import INITS, Arm, Curves, inputs, reference_rows
from anisoscope.view.untrained_figures import figures
from anisoscope.view.verdicts import verdict_claims
from anisoscope.view.words import estimate, listed

_DARK_SEQUENCE = ("#5566c9", "#8f62cf", "#d0628f", "#f0955a", "#f7e29b")
_COLUMNS = {
    "Cosine in": ("embed", "average_cosine"),
    "out": ("resid", "average_cosine"),
    "Norm in": ("embed", "mean_norm"),
    "out ": ("resid", "mean_norm"),
    "Norm of the mean, out": ("resid", "drift"),
    "cos(q̄, k̄)": ("query", "qk_cosine"),
    "Mean |score|": ("scores", "score_magnitude"),
    "Spread": ("scores", "score_spread"),
    "Entropy / log m": ("scores", "attention_entropy"),
    "Largest p": ("scores", "attention_max"),
}


def write_untrained_report(folder: str | Path) -> Path:
    """Write `report.html` and `figures/*.pdf|svg` of a finished study into its folder; the path of the page."""
    run = open_study(folder, "untrained")
    about = run.about()
    curves = Curves.of(run.table().records(), about)
    drawings = _write_figures(run, curves)
    return write_page(run, "untrained.html.j2", _context(run, curves, about, drawings))


def _write_figures(run: RunFolder, curves: Curves) -> dict[str, dict[str, Any]]:
    """Every figure as PDF and SVG files; and as markup for the page, by name."""
    import matplotlib
    from markupsafe import Markup

    drawings = {}
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type, unused-ignore]
        for name, figure in figures(curves, run.arrays("histograms")).items():
            file = f"untrained-{slug(name)}"
            markup = save_drawing(figure, run.path / "figures" / file)
            svg = inline_svg(markup, prefix=slug(name), colours=ROLES | _shades(curves))
            drawings[name] = {"svg": Markup(_slimmed(svg)), "file": f"figures/{file}"}
    return drawings


def _slimmed(svg: str) -> str:
    """The same drawing without indentation, paths to a hundredth of a point: a smaller page that looks the same.

    >>> _slimmed('<g>\\n <path d="M 1.234567 2\\nL 3 4" style="stroke-width: 0.123456"/>\\n</g>')
    '<g><path d="M 1.23 2 L 3 4" style="stroke-width: 0.123456"/></g>'
    """

    def shorter(path: re.Match[str]) -> str:
        return re.sub(r"\d+\.\d{3,}", lambda x: f"{float(x[0]):.2f}", path[0].replace("\n", " "))

    return re.sub(r">\s+<", "><", re.sub(r' d="[^"]*"', shorter, svg))


def _positions(curves: Curves) -> list[float]:
    """Where on the scale of colours the figures of these curves take theirs."""
    widths, biases = len(curves.of_axis("width")), min(5, len(curves.biases))
    return sorted({i / max(1, count - 1) for count in (widths, biases) for i in range(count)})


def _shades(curves: Curves) -> dict[str, str]:
    """The page's names for the colours of widths and biases."""
    return {blend(SEQUENCE, t): f"--q{i}" for i, t in enumerate(_positions(curves))}


def _context(run: RunFolder, curves: Curves, about: Mapping[str, Any], drawings: Mapping[str, Any]) -> dict[str, Any]:
    verdicts = verdicts_of(run)
    places = _positions(curves)
    return {
        "version": about.get("anisoscope", ""),
        "started": str(about.get("started", ""))[:10],
        "size": about.get("size", {}),
        "families": [_family(curves, about, name, drawings) for name in curves.families],
        "lengths": lengths_in_words(curves),
        "biases": listed([f"{bias:g}" for bias in curves.biases]),
        "seeds": curves.seeds,
        "inits": listed([INITS.get(init, init) for init in curves.of_axis("init")]),
        "widths": listed([str(width) for width in curves.of_axis("width")]),
        "claims": verdict_claims(verdicts),
        "reference": [_reference(row) for row in reference_rows(curves)],
        "growth": _growth(curves),
        "shades": [(blend(SEQUENCE, t), blend(_DARK_SEQUENCE, t)) for t in places],
        "settings": settings(about, str(run.path)),
    }


def lengths_in_words(curves: Curves) -> str:
    """How plain inputs compare to normed ones: some families begin with embeddings as long as a norm makes them."""
    words = {family: f"{ratio:.2g} times shorter" if ratio > 1.1 else "as long as normed ones" if ratio > 0.9
             else f"{1 / ratio:.2g} times longer" for family, ratio in curves.lengths().items()}  # fmt: skip
    told = {word: listed([family for family in words if words[family] == word]) for word in words.values()}
    return "; ".join(f"{word} for {who}" for word, who in told.items())


def _family(curves: Curves, about: Mapping[str, Any], name: str, drawings: Mapping[str, Any]) -> dict[str, Any]:
    told: Mapping[str, Any] = next((entry for entry in about.get("models", []) if entry.get("name") == name), {})
    shown = [arm for arm in curves.leading_arms() if arm.family == name]
    panels = [{"words": str(arm), **drawings[f"panel-{name}-{inputs(arm.norm).split()[0]}"]} for arm in shown]
    multiples = [{"words": inputs(norm), **drawings[key]} for norm in curves.of_axis("norm")
                 if (key := f"variants-{name}-{inputs(norm).split()[0]}") in drawings]  # fmt: skip
    tables = [{"words": str(arm), "rows": _numbers(curves, arm)} for arm in shown]
    words = {"name": name, "key": slug(name), "about": told.get("about", ""), "block": told.get("block", "")}
    fixed = curves.fixed_norm(name)
    return words | {"rows": told.get("rows", ""), "fixed": fixed, "panels": panels, "multiples": multiples,
                    "tables": tables, "columns": list(_COLUMNS)}  # fmt: skip


def _numbers(curves: Curves, arm: Arm) -> list[dict[str, Any]]:
    rows = []
    for bias in curves.biases:
        marks = [curves.at(arm, bias, *place) for place in _COLUMNS.values()]
        cells = ["–" if m is None else estimate(m.value, m.low, m.high) for m in marks]
        rows.append({"bias": f"{bias:g}", "cells": cells})
    return rows


def _reference(row: Mapping[str, Any]) -> dict[str, Any]:
    cells = []
    for cell in row["cells"]:
        mark, expected = cell["mark"], cell["expected"]
        ours = "–" if mark is None else f"{mark.value:.3f}"
        known = not math.isnan(cell["low"])
        cells.append({
            "expected": "" if expected is None else f"{expected:.3f}",
            "ours": ours,
            "span": f"{_three(cell['low'])} to {_three(cell['high'])}" if known else "",
            "sign": {True: "✓", False: "✕", None: ""}[cell["inside"]],
        })  # fmt: skip
    return {"inputs": inputs(row["norm"]), "bias": f"{row['bias']:g}", "cells": cells}


def _three(value: float) -> str:
    """Three decimals, and no sign before a zero."""
    return f"{round(value, 3) + 0.0:.3f}".replace("-", "−")


def _growth(curves: Curves) -> list[dict[str, str]]:
    """The exponent of mean |score| over the bias, for the arm of each family that is shown in full."""
    rows = []
    for arm in curves.leading_arms():
        mark, biases = curves.exponent(arm)
        if mark is not None:
            span = f"{biases[0]:g} to {biases[-1]:g}"
            rows.append({"arm": f"{arm.family}, {arm}", "over": span, "value": estimate(*mark)})
    return rows
