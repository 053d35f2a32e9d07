"""Spectra, and maps of heads by layers or of layers against layers, as plain plotly dictionaries."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from anisoscope.view.palette import Palette
from anisoscope.view.traces import LOG_FONT, Spec, base_layout
from anisoscope.view.words import number, site_name

# "encoder.3.resid", or "some/model/3.resid" where one run holds several models
SITE = re.compile(
    r"(?:(?P<model>.+?)[/|:# ]+)?(?:(?P<stack>encoder|decoder|single)\.)?(?P<layer>\d+)\.(?P<kind>[A-Za-z_][\w.]*)"
)


def parse_site(name: str) -> tuple[str, str, int, str]:
    """Model (empty where the name has none), stack, layer and kind of a site's name.

    >>> parse_site("encoder.3.resid"), parse_site("org/m-0.5B/3.resid")
    (('', 'encoder', 3, 'resid'), ('org/m-0.5B', 'single', 3, 'resid'))
    """
    match = SITE.fullmatch(name)
    if match is None:
        return "", "single", 0, name
    return match["model"] or "", match["stack"] or "single", int(match["layer"]), match["kind"]


def spectra_spec(spectra: Mapping[str, np.ndarray], palette: Palette) -> Spec:
    """Eigenvalues as shares of the variance, λ_k / Σλ against k, both logarithmic, coloured by depth."""
    order = sorted(spectra, key=lambda name: (parse_site(name)[2], parse_site(name)[3] == "final"))
    deepest = max((parse_site(name)[2] for name in order), default=1) or 1
    traces = [spectrum_trace(name, spectra[name], deepest=deepest, palette=palette) for name in order]
    rule = {
        "gridcolor": palette.role("rule"),
        "zeroline": False,
        "type": "log",
        "exponentformat": "power",
        "tickfont": {"size": LOG_FONT},
    }
    axes = {
        "xaxis": rule | {"title": {"text": "rank k", "font": {"size": 11}}, "dtick": 1, "showgrid": False},
        "yaxis": rule | {"title": {"text": "share of variance", "font": {"size": 11}}, "dtick": 1, "automargin": True},
    }
    return {"data": [t for t in traces if t], "layout": base_layout(palette) | axes}


def spectrum_trace(name: str, values: np.ndarray, *, deepest: int, palette: Palette) -> Spec | None:
    _, _, layer, kind = parse_site(name)
    ranks, shares = thin_spectrum(values)
    if not ranks:
        return None
    final = kind == "final"
    line = {"color": palette.role("accent") if final else palette.sequence(layer / deepest), "width": 1.5}
    place = html.escape(site_name(layer, kind))
    return {
        "type": "scatter",
        "mode": "lines",
        "name": place,
        "x": ranks,
        "y": shares,
        "line": line | ({"dash": "dash"} if final else {}),
        "hovertemplate": f"<b>{place}</b><br>λ<sub>%{{x}}</sub> / Σλ = %{{y:.3~g}}<extra></extra>",
    }


def thin_spectrum(values: np.ndarray, *, keep: int = 160) -> tuple[list[int], list[float]]:
    """Ranks (log-spaced when many) and the share of variance at each; what is not positive cannot be drawn."""
    values = np.asarray(values, dtype=np.float64).ravel()
    values = values[np.isfinite(values)]
    total = values[values > 0].sum()
    if total <= 0:
        return [], []
    at = np.unique(np.round(np.geomspace(1, len(values), keep)).astype(int)) if len(values) > keep else None
    ranks = np.arange(1, len(values) + 1) if at is None else at
    shares = values[ranks - 1] / total
    # Below float precision of the largest one an eigenvalue is rounding, and would only stretch the axis.
    good = shares > max(1e-12, 1e-9 * float(shares.max()))
    return [int(k) for k in ranks[good]], [float(f"{s:.5g}") for s in shares[good]]


def map_spec(
    z: Sequence[Sequence[float | None]],
    *,
    x: Sequence[str],
    y: Sequence[str],
    palette: Palette,
    titles: tuple[str, str],
    span: tuple[float | None, float | None] = (None, None),
    square: bool = False,
) -> Spec:
    """A heat map; cells without a value stay empty."""
    text = [[number(v) if v is not None else "not computed" for v in row] for row in z]
    xs, ys = [html.escape(v) for v in x], [html.escape(v) for v in y]
    trace: Spec = {"type": "heatmap", "z": [list(row) for row in z], "text": text, "hoverongaps": True}
    trace |= {"x": list(range(len(x))), "y": list(range(len(y))), "colorscale": palette.heat(), "xgap": 1, "ygap": 1}
    trace |= {"customdata": [[f"{b} · {a}" for a in xs] for b in ys]}
    trace |= {"hovertemplate": "%{customdata}<br><b>%{text}</b><extra></extra>"}
    trace["colorbar"] = {"thickness": 9, "outlinewidth": 0, "nticks": 5, "len": 1.0, "tickfont": {"size": 10}}
    if span[0] is not None and span[1] is not None:
        trace |= {"zmin": span[0], "zmax": span[1]}
    quiet = {"showgrid": False, "zeroline": False, "ticks": "", "automargin": True}
    axes = {
        "xaxis": quiet
        | _map_ticks(xs, 8)
        | {"title": {"text": titles[0], "standoff": 6, "font": {"size": 11}}, "tickangle": 0},
        "yaxis": quiet
        | _map_ticks(ys, 12)
        | {"title": {"text": titles[1], "font": {"size": 11}}, "autorange": "reversed"},
    }
    if square:
        axes["yaxis"] |= {"scaleanchor": "x", "constrain": "domain"}
        axes["xaxis"] |= {"constrain": "domain", "constraintoward": "right"}
    return {"data": [trace], "layout": base_layout(palette) | axes}


def _map_ticks(names: Sequence[str], most: int) -> Spec:
    step = max(1, math.ceil(len(names) / most))
    at = list(range(0, len(names), step))
    return {"tickvals": at, "ticktext": [names[i] for i in at]}


def spectra_by_owner(
    sources: Sequence[tuple[Mapping[str, Any], Mapping[str, np.ndarray], str]],
) -> dict[str, dict[str, np.ndarray]]:
    """Spectra of all runs (about, spectra, path), apart by model and stack.

    A site's name may begin with its model; where it does not, the run's only model owns it.
    """
    found: dict[str, dict[str, np.ndarray]] = {}
    for about, spectra, path in sources:
        mine: dict[str, dict[str, np.ndarray]] = {}
        models = [str(m.get("name", "")) for m in about.get("models") or []]
        for name, values in spectra.items():
            model, stack, _, _ = parse_site(name)
            owner = model or (models[0] if len(models) == 1 else "")
            label = " · ".join(part for part in (owner, stack if stack != "single" else "") if part)
            mine.setdefault(label, {})[name] = values
        found |= {f"{label} · {path}" if label in found else label: sites for label, sites in mine.items()}
    return found
