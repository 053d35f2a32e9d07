"""Sections on single rows of a model: a map of rows on fixed axes, and cards of concepts with their top rows.

The map shows the same rows at every step. A card shows the tokens and contexts that activate a concept of a layer, and
the matching concept of the previous step.
"""

from __future__ import annotations

import html
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from anisoscope.view.figure import Axis, Figure, Panel, Ref, Series, Switch, brief, choice, series
from anisoscope.view.page import Controls, Heading, Piece, Prose, Ramp, Section, text
from anisoscope.view.sections.provenance import row_nouns
from anisoscope.view.sections.shape import STEP, Arm, Shape, arm_panel, beside
from anisoscope.view.subjects import DrawnSite, RunView, TrainingRows, short_names
from anisoscope.view.words import listed

MAP_NUMBERS = 360_000  # limit of row coordinates on the page
COLOURS = {"frequency": "token frequency", "position": "position", "group": "group"}


@dataclass(frozen=True)
class RowMapFrames:
    """The mapped rows of one arm at one site: their descriptions, and their coordinates at each step."""

    arm: int
    place: str
    site: DrawnSite
    shares: list[float]
    token: list[str]
    frequency: list[int | None]
    position: list[int]
    group: list[str]
    at: dict[int, list[list[float | None]]]  # by step: [all x, all y]


def row_maps(runs: Sequence[RunView], arms: Sequence[Arm], steps: Sequence[int]) -> list[RowMapFrames]:
    """The mapped rows for each arm and site, from the first seed that has a map; empty without maps."""
    found: dict[int, list[RowMapFrames]] = {}
    for run in runs:
        if run.map is None:
            continue
        by: dict[tuple[Any, ...], dict[int, dict[int, tuple[Any, ...]]]] = {}
        for values in run.map.rows:
            if values[5] in steps:
                by.setdefault(values[:5], {}).setdefault(values[5], {})[values[6]] = values[7:]
        total = sum(len(rows) for marks in by.values() for rows in marks.values())
        keep = max(0.05, min(1.0, MAP_NUMBERS / (2 * max(1, total))))
        # the share of variance of each axis by model and site, from the map file or run.json
        shares = run.map.shares or run.about.get("map") or {}
        for arm in (arm for arm in arms if arm.index not in found):
            keys = [key for key in by if key[0] == arm.model and key[2] in (arm.subjects[0].stack, "single")]
            seeds = [one.seed for one in arm.subjects if any(key[1] in (one.seed, None) for key in keys)]
            chosen = {key: by[key] for key in keys if seeds and key[1] in (seeds[0], None)}
            maps = [_row_map(key, chosen, arm, shares=shares, keep=keep) for key in chosen]
            found |= {arm.index: maps} if maps else {}
    return [one for maps in found.values() for one in maps]


def _row_map(
    key: tuple[Any, ...], rows_by: Mapping[tuple[Any, ...], Any], arm: Arm, *, shares: Mapping[str, Any], keep: float
) -> RowMapFrames:
    (model, seed, stack, layer, kind), marks = key, rows_by[key]
    site = DrawnSite.of(layer, kind)
    first = min((other[3] for other in rows_by if other[4] == "stage"), default=0)
    place = "last block" if layer == arm.blocks else "middle block"
    if kind not in (
        "resid",
        "stage",
    ):  # models of different depths have different last blocks, so sites are shown by name
        place = site.name
    elif layer == 1 or (kind == "stage" and layer == first < arm.blocks):
        place = "first block"
    labels = {row: values[2:] for at in marks.values() for row, values in at.items()}
    rows = sorted(labels)[: max(8, int(len(labels) * keep))]
    token, frequency, position, group = (list(part) for part in zip(*(labels[row] for row in rows), strict=True))
    name = f"{layer}.{kind}" if stack == "single" else f"{stack}.{layer}.{kind}"
    recorded = [(shares.get(n) or {}).get(name) for n in (f"{model}-seed{seed}", model)]
    share = [round(float(s), 4) for s in next((s for s in recorded if s), [])]
    at = {
        step: [[brief(found[row][c], 4) if row in found else None for row in rows] for c in (0, 1)]
        for step, found in sorted(marks.items())
    }
    words = [visible(str(t or "")) for t in token], frequency, position, [g or "" for g in group]
    return RowMapFrames(arm.index, place, site, share, *words, at)


def row_parts(rows: TrainingRows, shape: Shape, runs: Sequence[RunView]) -> list[Any]:
    """The parts of the row map: the same rows at every step, on fixed axes."""
    maps = row_maps(runs, shape.arms, shape.steps)
    if not maps:
        return []
    order = {one.place: one.site for one in maps}
    places = sorted(order, key=lambda name: order[name])
    colours = [c for c in COLOURS if any(len({v for v in getattr(one, c) if v not in (None, "")}) > 1 for one in maps)]
    middle = places.index("middle block") if "middle block" in places else len(places) // 2
    colour_choice = choice("Colour", [COLOURS[c] for c in colours] or ["one"])
    switch = Switch("rows", (choice("Layer", places, middle), colour_choice))
    arrays: dict[str, Any] = {}
    panels = []
    for arm in shape.arms:
        views: dict[str, Panel] = {}
        for one in (one for one in maps if one.arm == arm.index):
            p, name = places.index(one.place), f"rows/{arm.index}/{places.index(one.place)}"
            upto = [max((i for i, s in enumerate(one.at) if s <= step), default=0) for step in shape.steps]
            arrays |= {f"{name}/at": list(one.at.values()), f"{name}/upto": upto, f"{name}/text": _row_texts(one)}
            views |= {f"{p}|{c}": _rows_view(one, name, colour) for c, colour in enumerate(colours or [""])}
        alt = f"Map of rows of {arm.label} on two axes."
        panel = Panel(views=views, by=("rows.0", "rows.1"), height=380, alt=alt)
        panels += [arm_panel(rows, arm, panel, seeds=False)] if views else []
    counts, nouns = {len(one.token) for one in maps}, row_nouns([run.about for run in runs])
    size = f"{max(counts):,}" if len(counts) == 1 else f"{min(counts):,} to {max(counts):,}"
    each = f" of each model ({listed(nouns)})" if len(nouns) > 1 else ""
    lead = (
        f"{size} {nouns[0] if len(nouns) == 1 else 'rows'}{each}, the same at every step. The axes of a layer are the "
        "principal axes of all its measured steps together, each step weighted alike, and do not move; what moves is "
        f"the rows.{' Of each model the first seed.' if shape.seeds > 1 else ''} Axes of two layers or two models are "
        "not the same."
    )
    ways = {"frequency": ("most frequent", "rarest"), "position": ("first position", "last position")}
    ends = [", or ".join(both[i] for c, both in ways.items() if c in colours) for i in (0, 1)]
    drawn = Figure(tuple(panels), id="rows", layout=beside(panels), arrays=arrays)
    parts = [Heading("Rows on fixed axes", id="rows-map", menu="Rows"), Prose(lead), Controls(switch)]
    return [*parts, *([Ramp(ends[0], ends[1])] if ends[0] else []), drawn]


def _row_texts(one: RowMapFrames) -> list[str]:
    found = []
    for token, frequency, position, group in zip(one.token, one.frequency, one.position, one.group, strict=True):
        parts = [f"<b>{html.escape(token)}</b>" if token else "", f"position {position}"]
        parts += [f"frequency bin {frequency}"] if frequency is not None else []
        found.append("<br>".join(part for part in (*parts, html.escape(group)) if part))
    return found


def _rows_view(one: RowMapFrames, name: str, wanted: str) -> Panel:
    """A view of rows coloured by frequency, position or group; frames and patches have no frequency."""
    by = "position" if wanted == "frequency" and all(f is None for f in one.frequency) else wanted
    groups = sorted(set(one.group)) if by == "group" else [""]
    far = max([*one.position, 1])
    shades: dict[str, list[float | None]] = {"position": [round(p / far, 3) for p in one.position]}
    shades["frequency"] = [None if f is None else round((f - 1) / 4, 3) for f in one.frequency]
    drawn = []
    for g, group in enumerate(groups):
        indices = tuple(i for i in range(len(one.token)) if by != "group" or one.group[i] == group)
        x, y = (Ref(f"{name}/at", (f"{STEP}>{name}/upto", c, indices)) for c in (0, 1))
        look: dict[str, Any] = {"shade": [shades[by][i] for i in indices]} if by in shades else {}
        look |= {"colour": series(g, 0.8), "width": 0, "size": 5.5, "text": Ref(f"{name}/text", (indices,))}
        drawn.append(Series(group or "rows", x, y, **look))
    axes = []
    for c in (0, 1):
        values = [v for at in one.at.values() for v in at[c] if v is not None]
        pad = 0.06 * ((max(values) - min(values)) or 1.0) if values else 0.0
        share = f" ({100 * one.shares[c]:.3g} % of variance)" if len(one.shares) > c else ""
        axes.append(Axis(f"axis {c + 1}{share}", rules=True, most=5, bounds=(min(values) - pad, max(values) + pad)))
    aside = ", by position" if by != wanted else ""
    return Panel(axes[0], axes[1], tuple(drawn), heading=f"{one.site.name}, {{shape.1}}{aside}", legend=len(groups) > 1)


BUDGET = 2_500_000  # limit of the JSON of all cards in characters


class Room(NamedTuple):
    """The size of a card: numbers of tokens, of examples, and of context characters on either side."""

    tokens: int
    examples: int
    context: int


FULL, SHORT = Room(10, 5, 48), Room(6, 3, 30)  # for the last step, and for earlier ones
SIGNS = str.maketrans({" ": "␣", "\n": "⏎", "\r": "⏎", "\t": "⇥", "\u00a0": "⍽"})
SIGNS_IN_TEXT = {code: sign for code, sign in SIGNS.items() if code != ord(" ")}
EMPTY = "∅"


def visible(text: str, *, spaces: bool = True) -> str:
    """Text with visible symbols for white space.

    >>> visible(" the\\n"), visible("a b\\n", spaces=False), visible("")
    ('␣the⏎', 'a b⏎', '∅')
    """
    if not text:
        return EMPTY if spaces else ""
    shown = text.translate(SIGNS if spaces else SIGNS_IN_TEXT)
    return "".join(c if c.isprintable() else f"⟨{ord(c):x}⟩" for c in shown)


def concept_cards(concepts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The data of the cards: for each model its sites, its steps, and the cards of as many steps as fit."""
    owners: dict[tuple[str, ...], dict[tuple[DrawnSite, int], list[Mapping[str, Any]]]] = {}
    for concept in concepts:
        owner = tuple(str(concept.get(name) or "") for name in ("model", "stack", "arm"))
        place = DrawnSite.of(concept.get("layer"), concept.get("kind")), int(concept.get("step") or 0)
        owners.setdefault(owner, defaultdict(list))[place].append(concept)
    shorten = short_names({owner[0] for owner in owners})
    models = []
    for owner, places in owners.items():
        # the model's short name, with stack or arm where names collide
        namesakes = [other for other in owners if other[0] == owner[0]]
        aside = [owner[i] for i in (1, 2) if len({other[i] for other in namesakes}) > 1]
        label = " · ".join(part for part in (shorten(owner[0]) or "unnamed", *aside) if part)
        models.append(_model(label, places, BUDGET // len(owners)))
    return {"models": models, "cut": any(m["kept"] < m["measured"] for m in models)} if models else {}


def _model(
    label: str, places: Mapping[tuple[DrawnSite, int], Sequence[Mapping[str, Any]]], budget: int
) -> dict[str, Any]:
    sites = sorted({site for site, _ in places})
    steps = sorted({step for _, step in places})
    kept: list[int] = []
    cards: dict[str, list[dict[str, Any]]] = {}
    for step in by_importance(steps):
        room = FULL if step == steps[-1] else SHORT
        at_step = {(site, at): [_card(c, room) for c in found] for (site, at), found in places.items() if at == step}
        cost = len(json.dumps(list(at_step.values()), ensure_ascii=False))
        if kept and cost > budget:
            continue
        budget -= cost
        kept.append(step)
        cards |= {f"{sites.index(site)}|{at}": found for (site, at), found in at_step.items()}
    wanted = DrawnSite.of(max(1, round(max(site.layer for site in sites) / 2)), "resid")
    middle = sites.index(wanted) if wanted in sites else len(sites) // 2  # the site shown initially
    counts = {"steps": sorted(kept), "kept": len(kept), "measured": len(steps)}
    return {"label": label, "places": [site.name for site in sites], "middle": middle, **counts, "cards": cards}


def by_importance(steps: Sequence[int]) -> list[int]:
    """The steps sorted as last, first, then those that halve the gaps, so that every prefix covers the whole range.

    >>> by_importance([0, 1, 2, 4, 8])
    [8, 0, 2, 1, 4]
    """
    if len(steps) < 3:
        return list(reversed(steps))
    order, gaps = [steps[-1], steps[0]], [(0, len(steps) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        middle = (low + high) // 2
        if low < middle < high:
            order.append(steps[middle])
            gaps += [(low, middle), (middle, high)]
    return order


def _card(concept: Mapping[str, Any], room: Room) -> dict[str, Any]:
    """The record of one concept, shortened to the size of a card."""
    examples = []
    for example in [e for e in concept.get("examples") or [] if isinstance(e, Mapping)][: room.examples]:
        before, token, after = (str(example.get(name) or "") for name in ("before", "token", "after"))
        left = "… " * (len(before) > room.context) + visible(before[-room.context :], spaces=False)
        right = visible(after[: room.context], spaces=False) + " …" * (len(after) > room.context)
        examples.append([left, visible(token), right, _brief(example.get("code"))])
    tokens = [[visible(str(token)), _brief(share)] for token, share in list(concept.get("tokens") or [])[: room.tokens]]
    card = {"concept": int(concept.get("concept") or 0), "share": _brief(concept.get("share")), "tokens": tokens}
    origin = concept.get("from") or {}
    steps = [int(origin.get("step") or 0), int(origin.get("concept") or 0), _brief(origin.get("cosine"))]
    return card | {"examples": examples, "from": steps if origin else None}


def _brief(value: Any) -> float | None:
    return brief(value, 3) if isinstance(value, int | float) else None


def concepts_section(concepts: Iterable[Mapping[str, Any]]) -> Section | None:
    """The section with cards of the directions of the tangent proxy of each layer; None without concepts."""
    found = concept_cards(concepts)
    if not found:
        return None
    words = (
        "The directions that the proxy of a layer is made of, largest first: the tokens whose rows hold most of a "
        "concept, and the rows where it is strongest, in context. Spaces are shown as ␣, line ends as ⏎. <em>From</em> "
        "names the concept of the measured step before that matches best, by cosine."
    )
    cut = " The page carries the cards of some steps; <code>concepts.json</code> of the run has all."
    lead = text(words + (cut if found["cut"] else ""))
    return Section("concepts", "Concepts", [Prose(lead), Piece("cards", found["models"])], "Concepts")
