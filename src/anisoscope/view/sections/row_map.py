"""The map of rows: the same rows of a model at every step, on axes that do not move."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from anisoscope.errors import AnisoscopeError
from anisoscope.view.figure import Axis, Figure, Panel, Ref, Series, Switch, brief, choice
from anisoscope.view.page import Controls, Heading, Prose, Ramp
from anisoscope.view.palette import series
from anisoscope.view.sections.concepts import visible
from anisoscope.view.sections.record import row_nouns
from anisoscope.view.sections.shape import STEP, Arm, Shape, arm_panel, beside
from anisoscope.view.subjects import DrawnSite, RunView, TrainingRows
from anisoscope.view.words import listed

MAP_NUMBERS = 360_000  # coordinates of rows that the page carries
COLOURS = {"frequency": "token frequency", "position": "position", "group": "group"}
MAP_FILE = "map.parquet"
BY = ("model", "seed", "stack", "layer", "kind")
COLUMNS = [*BY, "step", "row", "x", "y", "token", "frequency", "position", "group"]


def map_of(run: RunView) -> pa.Table | None:
    """The map of a run: as it was given, or from its folder."""
    if run.map is not None:
        return run.map
    path = Path(run.path) / MAP_FILE if run.path else None
    if path is None or not path.is_file():
        return None
    try:
        found = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise AnisoscopeError(f"{str(path)!r} is not a readable map ({error}); delete it or run again.") from error
    missing = [name for name in COLUMNS if name not in found.column_names]
    if missing:
        raise AnisoscopeError(f"{str(path)!r} has no column {missing[0]!r}; delete it or run again.")
    return found


def _shares_in(table: pa.Table, about: Mapping[str, Any]) -> Mapping[str, Any]:
    """The share of variance of each axis by model and site, as the file of a map or the record of its run has it."""
    words = (table.schema.metadata or {}).get(b"shares")
    return dict(json.loads(words)) if words else about.get("map") or {}


@dataclass(frozen=True)
class RowMapFrames:
    """The rows of one arm at one place: what each is, and where it stands at each step."""

    arm: int
    place: str
    site: DrawnSite
    shares: list[float]
    token: list[str]
    frequency: list[int | None]
    position: list[int]
    group: list[str]
    at: dict[int, list[list[float | None]]]  # by step: all x, all y


def row_maps(runs: Sequence[RunView], arms: Sequence[Arm], steps: Sequence[int]) -> list[RowMapFrames]:
    """For each arm and site the rows of its first seed that has any, step by step; none where there is no map."""
    found: dict[int, list[RowMapFrames]] = {}
    for run in runs:
        table = map_of(run)
        if table is not None and len(table):
            by: dict[tuple[Any, ...], dict[int, dict[int, tuple[Any, ...]]]] = {}
            for values in zip(*(table[name].to_pylist() for name in COLUMNS), strict=True):
                if values[5] in steps:
                    by.setdefault(values[:5], {}).setdefault(values[5], {})[values[6]] = values[7:]
            total = sum(len(rows) for marks in by.values() for rows in marks.values())
            keep = max(0.05, min(1.0, MAP_NUMBERS / (2 * max(1, total))))
            for arm in (arm for arm in arms if arm.index not in found):
                own = _of_arm(by, arm)
                shares = _shares_in(table, run.about)
                maps = [_row_map(key, by[key], arm, own, shares=shares, keep=keep) for key in own]
                found |= {arm.index: maps} if maps else {}
    return [one for maps in found.values() for one in maps]


def _of_arm(by: Mapping[tuple[Any, ...], Any], arm: Arm) -> list[tuple[Any, ...]]:
    mine = [key for key in by if key[0] == arm.model and key[2] in (arm.subjects[0].stack, "single")]
    seeds = [one.seed for one in arm.subjects if any(key[1] in (one.seed, None) for key in mine)]
    return [key for key in mine if key[1] in (seeds[0], None)] if seeds else []


def _row_map(
    key: tuple[Any, ...],
    marks: Mapping[int, Mapping[int, tuple[Any, ...]]],
    arm: Arm,
    own: Sequence[tuple[Any, ...]],
    *,
    shares: Mapping[str, Any],
    keep: float,
) -> RowMapFrames:
    model, seed, stack, layer, kind = key
    first = min((other[3] for other in own if other[4] == "stage"), default=0)
    if kind not in (
        "resid",
        "stage",
    ):  # models of other depths have other last blocks: places are named by what they are
        place = DrawnSite.of(layer, kind).name
    elif layer == 1 or (kind == "stage" and layer == first < arm.blocks):
        place = "first block"
    else:
        place = "last block" if layer == arm.blocks else "middle block"
    rows = sorted({row for at in marks.values() for row in at})
    rows = rows[: max(8, int(len(rows) * keep))]
    labels = {row: values[2:] for at in marks.values() for row, values in at.items()}
    told = [labels[row] for row in rows]
    name = f"{layer}.{kind}" if stack == "single" else f"{stack}.{layer}.{kind}"
    told_shares = [(shares.get(n) or {}).get(name) for n in (f"{model}-seed{seed}", model)]
    share: Sequence[float] = next((s for s in told_shares if s), [])
    at = {step: [[brief(found[row][c], 4) if row in found else None for row in rows] for c in (0, 1)]
          for step, found in sorted(marks.items())}  # fmt: skip
    return RowMapFrames(arm.index, place, DrawnSite.of(layer, kind), [round(float(s), 4) for s in share],
                  [visible(str(t[0] or "")) for t in told], [t[1] for t in told], [t[2] for t in told],
                  [t[3] or "" for t in told], at)  # fmt: skip


def row_parts(rows: TrainingRows, shape: Shape, runs: Sequence[RunView]) -> list[Any]:
    """The same rows at every step, on axes that do not move."""
    maps = row_maps(runs, shape.arms, shape.steps)
    if not maps:
        return []
    order = {one.place: one.site for one in maps}
    places = sorted(order, key=lambda name: order[name])
    colours = [c for c in COLOURS if any(len({v for v in getattr(one, c) if v not in (None, "")}) > 1 for one in maps)]
    middle = places.index("middle block") if "middle block" in places else len(places) // 2
    switch = Switch(
        "rows", (choice("Layer", places, middle), choice("Colour", [COLOURS[c] for c in colours] or ["one"]))
    )
    arrays: dict[str, Any] = {}
    panels = []
    for arm in shape.arms:
        own = [one for one in maps if one.arm == arm.index]
        views = {}
        for one in own:
            p, name = places.index(one.place), f"rows/{arm.index}/{places.index(one.place)}"
            steps = list(one.at)
            upto = [max((i for i, s in enumerate(steps) if s <= step), default=0) for step in shape.steps]
            arrays |= {f"{name}/at": list(one.at.values()), f"{name}/upto": upto, f"{name}/text": _row_texts(one)}
            for c, colour in enumerate(colours or [""]):
                views[f"{p}|{c}"] = _rows_view(one, name, colour)
        alt = f"Map of rows of {arm.label} on two axes."
        panel = Panel(views=views, by=("rows.0", "rows.1"), height=380, alt=alt)
        panels += [arm_panel(rows, arm, panel, seeds=False)] if views else []
    counts, nouns = {len(one.token) for one in maps}, row_nouns([run.about for run in runs])
    size = f"{max(counts):,}" if len(counts) == 1 else f"{min(counts):,} to {max(counts):,}"
    lead = f"{size} {nouns[0] if len(nouns) == 1 else 'rows'}" + (
        f" of each model ({listed(nouns)})" if len(nouns) > 1 else ""
    )
    lead += (
        ", the same at every step. The axes of a layer are the principal axes of all its measured steps together, each "
        "step weighted alike, and do not move; what moves is the rows."
    )
    lead += " Of each model the first seed." if shape.seeds > 1 else ""
    ways = [
        ends
        for c, ends in (("frequency", ("most frequent", "rarest")), ("position", ("first position", "last position")))
        if c in colours
    ]
    ramp = [Ramp(", or ".join(a for a, _ in ways), ", or ".join(b for _, b in ways))] if ways else []
    return [
        Heading("Rows on fixed axes", id="rows-map", menu="Rows"),
        Prose(f"{lead} Axes of two layers or two models are not the same."),
        Controls(switch),
        *ramp,
        Figure(tuple(panels), id="rows", layout=beside(panels), arrays=arrays),
    ]


def _row_texts(one: RowMapFrames) -> list[str]:
    found = []
    for token, frequency, position, group in zip(one.token, one.frequency, one.position, one.group, strict=True):
        parts = [f"<b>{html.escape(token)}</b>" if token else "", f"position {position}"]
        parts += [f"frequency bin {frequency}"] if frequency is not None else []
        found.append("<br>".join(part for part in (*parts, html.escape(group)) if part))
    return found


def _rows_view(one: RowMapFrames, name: str, wanted: str) -> Panel:
    """Rows coloured by frequency, position or group; frames and patches have no frequency."""
    by = "position" if wanted == "frequency" and all(f is None for f in one.frequency) else wanted
    step = f"{STEP}>{name}/upto"
    groups = sorted(set(one.group)) if by == "group" else [""]
    drawn = []
    for g, group in enumerate(groups):
        mine = tuple(i for i in range(len(one.token)) if by != "group" or one.group[i] == group)
        x, y = (Ref(f"{name}/at", (step, c, mine)) for c in (0, 1))
        look: dict[str, Any] = {"colour": series(g, 0.8)}
        if by == "frequency":
            look["shade"] = [None if one.frequency[i] is None else round((one.frequency[i] - 1) / 4, 3) for i in mine]  # type: ignore[operator]
        elif by == "position":
            far = max([*one.position, 1])
            look["shade"] = [round(one.position[i] / far, 3) for i in mine]
        drawn.append(Series(group or "rows", x, y, width=0, size=5.5, text=Ref(f"{name}/text", (mine,)), **look))
    axes = []
    for c in (0, 1):
        values = [v for at in one.at.values() for v in at[c] if v is not None]
        pad = 0.06 * ((max(values) - min(values)) or 1.0) if values else 0.0
        share = f" ({100 * one.shares[c]:.3g} % of variance)" if len(one.shares) > c else ""
        axes.append(Axis(f"axis {c + 1}{share}", rules=True, most=5, bounds=(min(values) - pad, max(values) + pad)))
    aside = ", by position" if by != wanted else ""
    return Panel(axes[0], axes[1], tuple(drawn), heading=f"{one.site.name}, {{shape.1}}{aside}", legend=len(groups) > 1)
