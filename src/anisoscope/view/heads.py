"""Per-head numbers: a map of heads by layers, and their mean over heads as a line."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean

from anisoscope.view.catalogue import Entry
from anisoscope.view.maps import map_spec
from anisoscope.view.palette import Palette
from anisoscope.view.series import Line, Panel, Point, Record, Sheet, Subject, make_point
from anisoscope.view.traces import Spec
from anisoscope.view.words import finite

SCORES = {"scores": "", "cross_scores": "cross-attention"}  # titles of what is read from attention itself


@dataclass(frozen=True)
class HeadMap:
    """One metric over the heads and layers of one subject."""

    entry: Entry
    kind: str
    variant: str
    subject: Subject
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    values: dict[tuple[int, int], float | None]  # (head, layer)
    mean: tuple[Record, ...] = ()  # the table's own mean over heads, with its interval

    @property
    def title(self) -> str:
        parts = (self.entry.title, SCORES.get(self.kind, self.kind), self.variant)
        return " · ".join(part for part in parts if part)

    def spec(self, palette: Palette, span: tuple[float | None, float | None]) -> Spec:
        z = [[self.values.get((head, layer)) for layer in self.layers] for head in self.heads]
        x = [f"block {layer}" for layer in self.layers]
        drawn = map_spec(
            z, x=x, y=[f"head {h}" for h in self.heads], palette=palette, titles=("block", "head"), span=span
        )
        for axis, names in (("xaxis", self.layers), ("yaxis", self.heads)):
            at = drawn["layout"][axis]["tickvals"]
            drawn["layout"][axis]["ticktext"] = [str(names[i]) for i in at]
        return drawn


def head_maps(sheet: Sheet) -> list[list[HeadMap]]:
    """Maps grouped by metric, kind and variant; a group has one map per subject."""
    parts: dict[tuple[str, str, str], dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in sheet.records:
        if sheet.per_head(record) and not record["group"]:
            key = (record["metric"], record["kind"], record["variant"] or "")
            parts[key][sheet.subject(record).index].append(record)
    order = {metric: i for i, metric in enumerate(sheet.metrics())}
    keys = sorted(parts, key=lambda key: (key[1] not in SCORES, key[1] != "scores", order[key[0]], key[1:]))
    return [[_head_map(sheet, key, sheet.subjects[i], rows) for i, rows in parts[key].items()] for key in keys]


def _head_map(sheet: Sheet, key: tuple[str, str, str], subject: Subject, rows: list[Record]) -> HeadMap:
    values = {(r["head"], r["layer"]): finite(r["value"]) for r in rows if r["head"] is not None}
    mean = sorted((r for r in rows if r["head"] is None), key=lambda r: r["layer"])
    layers = tuple(sorted({layer for _, layer in values}))
    heads = tuple(sorted({head for head, _ in values}))
    return HeadMap(sheet.catalogue.entry(key[0]), key[1], key[2], subject, layers, heads, values, tuple(mean))


def shared_span(maps: list[HeadMap]) -> tuple[float | None, float | None]:
    """One colour scale for all subjects, so that their maps can be compared."""
    values = [v for m in maps for v in m.values.values() if v is not None]
    return (min(values), max(values)) if values else (None, None)


def head_mean_panels(sheet: Sheet) -> list[Panel]:
    """Mean over heads per layer, with a band from the lowest head to the highest."""
    return [head_mean_panel(maps) for maps in head_maps(sheet)]


def head_mean_panel(maps: list[HeadMap]) -> Panel:
    """One metric's mean over heads: the table's own with its interval, else ours with the range of heads as band."""
    banded = len(maps) <= 2  # more than two ranges would hide each other
    lines = tuple(Line(m.subject, _mean_points(m, banded=banded)) for m in maps)
    kind = maps[0].kind if maps[0].kind != "scores" else ""
    return Panel(maps[0].entry.name, maps[0].entry, lines, variant=maps[0].variant, kind=kind)


def _mean_points(found: HeadMap, *, banded: bool) -> tuple[Point, ...]:
    if found.mean:
        return tuple(make_point(record, blocks=found.subject.blocks) for record in found.mean)
    return tuple(_mean_point(found, layer, banded=banded) for layer in found.layers)


def _mean_point(found: HeadMap, layer: int, *, banded: bool) -> Point:
    values = [v for (_, at), v in found.values.items() if at == layer and v is not None]
    record: Record = {"layer": layer, "kind": "resid", "note": f"mean over {len(values)} heads", "band": "heads from"}
    record |= {"value": fmean(values) if values else None}
    record |= {
        "low": min(values, default=None) if banded else None,
        "high": max(values, default=None) if banded else None,
    }
    return make_point(record, blocks=found.subject.blocks)
