"""The report's charts: what each section shows, with its caption and its words for who cannot see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from anisoscope.view.findings import doubtful
from anisoscope.view.heads import SCORES, HeadMap, head_maps, head_mean_panel, shared_span
from anisoscope.view.maps import map_spec, parse_site, spectra_spec
from anisoscope.view.palette import Tokens
from anisoscope.view.plots import needs_legend, panel_spec
from anisoscope.view.series import Panel, Sheet, short_names, without_first
from anisoscope.view.tables import default_metrics, pivot
from anisoscope.view.traces import MARKERS, Axis, Spec, wants_log
from anisoscope.view.words import estimate, finite, number, site_name

LARGE_MAP = 14


@dataclass(frozen=True)
class Chart:
    """One figure of the page; its drawing waits in the page's specs under the same id."""

    id: str
    title: str
    alt: str
    height: int  # pixels; 0 = as high as wide
    formula: str = ""
    caption: str = ""
    owner: str = ""


class Desk:
    """Draws the sections of one report, collecting the specs under running ids."""

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet
        self.palette = Tokens()
        self.specs: dict[str, Spec] = {}

    def _keep(self, spec: Spec, title: str, **rest: Any) -> Chart:
        name = f"chart-{len(self.specs) + 1}"
        self.specs[name] = spec
        return Chart(id=name, title=title, **rest)

    def _panel(self, panel: Panel, *, title: str = "", owner: str = "", caption: str = "") -> Chart:
        legend = needs_legend(panel)
        rest = {"formula": panel.entry.formula, "caption": caption or panel_caption(panel), "owner": owner}
        height = 280 if legend else 240
        return self._keep(
            panel_spec(panel, self.palette), title or panel.title, alt=panel_alt(panel), height=height, **rest
        )

    def profiles(self) -> dict[str, Any]:
        """The residual stream first; variants and other sites after it."""
        panels = [p for p in self.sheet.panels() if p.values]
        main = self.sheet.catalogue.main({p.metric for p in panels if not p.variant})
        first = [self._panel(p) for p in panels if not p.variant and p.metric in main]
        more = [self._panel(p) for p in panels if not p.variant and p.metric not in main]
        variants = [self._panel(p) for p in panels if p.variant]
        away = groupby((p for p in self.sheet.panels_elsewhere() if p.values), key=lambda p: p.kind)
        elsewhere = [(kind, [self._panel(p) for p in found]) for kind, found in away]
        relative = any(Axis.of(p.lines).relative for p in panels)
        dashed = any(without_first(line.variant) for p in panels for line in p.lines)
        final = any(line.final for p in panels for line in p.lines)
        found = {"main": first, "more": more, "variants": variants, "elsewhere": elsewhere}
        return found | {"relative": relative, "dashed": dashed, "final": final}

    def legend(self) -> list[dict[str, Any]]:
        """Colour, marker and role of each subject; empty for a single one, which needs none."""
        subjects = self.sheet.subjects
        if len(subjects) < 2:
            return []
        return [
            {
                "index": s.index,
                "colour": s.index % 8 + 1,
                "label": s.label,
                "role": s.role,
                "mark": MARKERS.get(s.role, "circle"),
            }
            for s in subjects
        ]

    def spectra(self, spectra: Mapping[str, Mapping[str, np.ndarray]]) -> list[Chart]:
        charts = []
        for owner, found in spectra.items():
            layers = [parse_site(name)[2] for name in found]
            alt = f"Eigenvalue spectra of {len(layers)} sites, layers {min(layers)} to {max(layers)}, logarithmic."
            charts.append(
                self._keep(
                    spectra_spec(found, self.palette),
                    self._short(owner) if len(spectra) > 1 else "",
                    alt=alt,
                    height=360,
                )
            )
        return [chart for chart in charts if self.specs[chart.id]["data"]]

    def heat(self) -> dict[str, Any]:
        """A table per subject whose cells are shaded within each metric's own range, the same for all subjects."""
        metrics = default_metrics(self.sheet)
        found = pivot(self.sheet, metrics)
        shade = {m: _shader([c[m].value for rows in found.values() for c in rows.values() if m in c]) for m in metrics}
        columns = [self.sheet.catalogue.entry(m) for m in metrics]
        maps = []
        for index, places in found.items():
            rows = [
                {"place": next(iter(c.values())).place, "cells": [_heat_cell(c.get(m), shade[m]) for m in metrics]}
                for c in places.values()
            ]
            maps.append({"owner": self.sheet.subjects[index].label, "rows": rows})
        return {"columns": columns, "maps": maps}

    def attention(self) -> list[dict[str, Any]]:
        """Per metric: the mean over heads, and a map of heads by blocks for each subject."""
        sections = []
        for maps in head_maps(self.sheet):
            panel = head_mean_panel(maps)
            mean = self._panel(
                panel,
                title="Mean over heads",
                caption=mean_caption(maps),
            )
            span = shared_span(maps)
            charts = [
                self._keep(
                    found.spec(self.palette, span),
                    f"Heads of {found.subject.label}" if len(maps) > 1 else "Each head",
                    alt=f"Map of {found.title} over {len(found.heads)} heads and {len(found.layers)} blocks, "
                    f"from {number(span[0])} to {number(span[1])}.",
                    height=240 if len(found.heads) <= LARGE_MAP else 340,
                )
                for found in maps
            ]
            scores = maps[0].kind in SCORES
            sections.append({"title": maps[0].title, "scores": scores, "mean": mean, "maps": charts})
        return sections

    def cka(self, found: Sequence[tuple[str, Sequence[str], np.ndarray]]) -> list[Chart]:
        charts = []
        for model, labels, matrix in found:
            z = [[finite(v) for v in row] for row in np.asarray(matrix, dtype=float)]
            names = [_site_label(label) for label in labels]
            spec = map_spec(z, x=names, y=names, palette=self.palette, titles=("", ""), span=(0.0, 1.0), square=True)
            alt = f"Map of linear CKA between {len(names)} layers of {model}."
            charts.append(self._keep(spec, self._short(model) if len(found) > 1 else "", alt=alt, height=0))
        return charts

    def _short(self, owner: str) -> str:
        """A model's name as the legend has it."""
        models = {s.model for s in self.sheet.subjects}
        model = next((m for m in models if owner == m or owner.startswith(f"{m} · ")), owner)
        return short_names(models)(model) + owner[len(model) :]

    def groups(self) -> list[Chart]:
        several = len(self.sheet.subjects) > 1
        panels = [p for p in self.sheet.group_panels() if p.values]
        return [self._panel(p, owner=p.lines[0].subject.label if several else "") for p in panels]


def _site_label(label: str) -> str:
    _, stack, layer, kind = parse_site(str(label))
    plain = {"embed": "embed", "resid": str(layer), "stage": str(layer), "final": "final"}
    short = plain.get(kind, site_name(layer, kind))
    return short if stack == "single" else f"{stack} {short}"


def panel_caption(panel: Panel) -> str:
    """What the metric means, and what is unusual about this drawing."""
    convention = panel.entry.convention.strip()
    parts = [panel.entry.description.strip(), convention[:1].upper() + convention[1:]]
    if wants_log(panel.values):
        parts.append("Logarithmic axis.")
    if any(without_first(line.variant) for line in panel.lines):
        parts.append("Dashed: without the first position.")
    if panel.metric == "two_nn" and max(panel.values) > 12 and "biased" not in convention:
        parts.append("Biased low above about 15 at 4,096 rows.")
    return " ".join(part if part.endswith(".") else f"{part}." for part in parts if part)


def mean_caption(maps: Sequence[HeadMap]) -> str:
    """What the metric means, and what the band around its mean over heads is."""
    if all(found.mean for found in maps):
        band = "The band is the interval of the mean."
    else:
        band = "The band runs from the lowest head to the highest." if len(maps) <= 2 else ""
    return f"{maps[0].entry.description} {band}".strip()


def panel_alt(panel: Panel) -> str:
    """The chart in words: where each line starts, ends, and peaks."""
    told = []
    for line in panel.lines[:6]:
        known = line.known
        if known:
            peak = max(known, key=lambda p: p.value or 0.0)
            owner = line.group or line.subject.label
            ends = f"{number(known[0].value)} at {known[0].place} to {number(known[-1].value)} at {known[-1].place}"
            told.append(
                f"{owner}{' without first position' if without_first(line.variant) else ''}: {ends}, "
                f"highest {number(peak.value)} at {peak.place}"
            )
    return f"Line chart of {panel.title} by depth. {'; '.join(told)}."


def _shader(values: Sequence[float | None]) -> Any:
    """A function from value to [0, 1] over the range of these values, logarithmic where they span orders."""
    good = [v for v in values if v is not None]
    log = wants_log(good)
    ends = (min(good), max(good)) if good else (0.0, 0.0)
    low, high = (np.log(ends[0]), np.log(ends[1])) if log else ends
    reach = high - low

    def shade(value: float) -> float:
        place = np.log(value) if log else value
        return float((place - low) / reach) if reach > 0 else 0.5

    return shade


def _heat_cell(point: Any, shade: Any) -> dict[str, Any]:
    if point is None:
        return {"text": "", "shade": None, "hover": ""}
    if point.value is None:
        return {"text": "–", "shade": None, "hover": point.record.get("note") or "not computed"}
    hover = f"{point.value!r} · {estimate(point.value, point.low, point.high)} · n {point.record.get('n')}"
    hover += f" · {point.record['note']}" if doubtful(point) else ""
    return {
        "text": number(point.value) + ("?" if doubtful(point) else ""),
        "shade": f"{shade(point.value):.3f}",
        "hover": hover,
    }
