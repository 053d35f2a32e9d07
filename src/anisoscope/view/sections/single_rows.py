"""Sections on single rows of a model: a map of rows on fixed axes, and cards of concepts with their top rows.

The map shows the same rows at every step. A card shows the tokens and contexts that activate a concept of a layer, and
the matching concept of the previous step.
"""

from __future__ import annotations

import html
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from anisoscope.results.folder import MappedSite
from anisoscope.view.figure import Axis, Figure, Panel, Ref, Series, Switch, brief, choice, series
from anisoscope.view.page import Controls, Heading, Piece, Prose, Ramp, Section, text
from anisoscope.view.sections.provenance import row_nouns
from anisoscope.view.sections.shape import STEP, Arm, Shape, arm_panel, beside
from anisoscope.view.subjects import DrawnSite, RunView, TrainingRows, short_names
from anisoscope.view.words import listed

MAP_NUMBERS = 360_000  # limit of row coordinates on the page
COLOURS = {"frequency": "token frequency", "position": "position", "group": "group"}


def row_maps(runs: Sequence[RunView], arms: Sequence[Arm], steps: Sequence[int]) -> dict[int, dict[str, MappedSite]]:
    """The mapped sites by arm and place, from the first seed that has a map; as many rows as fit on a page."""
    maps: dict[int, dict[str, MappedSite]] = {}
    for run in runs:
        total = sum(len(site.token) * len({*site.at} & {*steps}) for site in run.map)
        share = max(0.05, min(1.0, MAP_NUMBERS / (2 * max(1, total))))
        for arm in (arm for arm in arms if arm.index not in maps):
            sites = [s for s in run.map if s.model == arm.model and s.stack in (arm.subjects[0].stack, "single")]
            seeds = [one.seed for one in arm.subjects if any(site.seed in (one.seed, None) for site in sites)]
            sites = [site for site in sites if seeds and site.seed in (seeds[0], None)]
            first = min((site.layer for site in sites if site.kind == "stage"), default=1)
            by_place = {_place(site, arm, first): _cut(site, steps, share) for site in sites}
            maps |= {arm.index: by_place} if by_place else {}
    return maps


def _place(site: MappedSite, arm: Arm, first: int) -> str:
    """A name for the same place in models of different depths; sites outside the blocks have their own names."""
    if site.kind not in ("resid", "stage"):
        return DrawnSite.of(site.layer, site.kind).name
    if site.layer == 1 or (site.kind == "stage" and site.layer == first < arm.blocks):
        return "first block"
    return "last block" if site.layer == arm.blocks else "middle block"


def _cut(site: MappedSite, steps: Sequence[int], share: float) -> MappedSite:
    """A share of the rows, at the steps of the page."""
    most = max(8, int(len(site.token) * share))
    shown = {step: axes for step, axes in site.at.items() if step in steps}
    at = {step: [[brief(value, 4) for value in axis[:most]] for axis in both] for step, both in shown.items()}
    labels: dict[str, Any] = {n: getattr(site, n)[:most] for n in ("token", "frequency", "position", "group")}
    return site._replace(at=at, **labels)


def row_parts(rows: TrainingRows, shape: Shape, runs: Sequence[RunView]) -> list[Any]:
    """The parts of the row map: the same rows at every step, on fixed axes."""
    maps = row_maps(runs, shape.arms, shape.steps)
    every = {place: site for by_place in maps.values() for place, site in by_place.items()}
    if not every:
        return []
    sites = [site for by_place in maps.values() for site in by_place.values()]
    places = sorted(every, key=lambda place: DrawnSite.of(every[place].layer, every[place].kind))
    colours = [c for c in COLOURS if any(len({*getattr(site, c)} - {None, ""}) > 1 for site in sites)]
    middle = places.index("middle block") if "middle block" in places else len(places) // 2
    colour_choice = choice("Colour", [COLOURS[c] for c in colours] or ["one"])
    switch = Switch("rows", (choice("Layer", places, middle), colour_choice))
    arrays: dict[str, Any] = {}
    panels = []
    for arm in (arm for arm in shape.arms if arm.index in maps):
        views: dict[str, Panel] = {}
        for place, site in maps[arm.index].items():
            p = places.index(place)
            name = f"rows/{arm.index}/{p}"
            upto = [max((i for i, s in enumerate(site.at) if s <= step), default=0) for step in shape.steps]
            arrays |= {f"{name}/at": list(site.at.values()), f"{name}/upto": upto, f"{name}/text": _texts(site)}
            views |= {f"{p}|{c}": _rows_view(site, name, colour) for c, colour in enumerate(colours or [""])}
        alt = f"Map of rows of {arm.label} on two axes."
        panel = Panel(views=views, by=("rows.0", "rows.1"), height=380, alt=alt)
        panels.append(arm_panel(rows, arm, panel, seeds=False))
    counts, nouns = sorted({len(site.token) for site in sites}), row_nouns([run.about for run in runs])
    size = " to ".join(dict.fromkeys(f"{count:,}" for count in (counts[0], counts[-1])))
    lead = (
        f"{size} {listed(nouns) or 'rows'}, the same at every step. The axes of a layer are the principal axes of all "
        "its measured steps together, each step weighted alike, and do not move; what moves is the rows. Axes of two "
        f"layers or two models are not the same.{' Of each model the first seed.' if shape.seeds > 1 else ''}"
    )
    ways = {"frequency": ("most frequent", "rarest"), "position": ("first position", "last position")}
    ends = [", or ".join(both[i] for c, both in ways.items() if c in colours) for i in (0, 1)]
    drawn = Figure(tuple(panels), id="rows", layout=beside(panels), arrays=arrays)
    parts = [Heading("Rows on fixed axes", id="rows-map", menu="Rows"), Prose(lead), Controls(switch)]
    return [*parts, *([Ramp(ends[0], ends[1])] if ends[0] else []), drawn]


def _texts(site: MappedSite) -> list[str]:
    """The hover text of each row."""
    texts = []
    for token, frequency, position, group in zip(site.token, site.frequency, site.position, site.group, strict=True):
        parts = [f"<b>{html.escape(visible(token))}</b>", f"position {position}"]
        parts += [f"frequency bin {frequency}"] if frequency is not None else []
        texts.append("<br>".join([*parts, *([html.escape(group)] if group else [])]))
    return texts


def _rows_view(site: MappedSite, name: str, wanted: str) -> Panel:
    """A view of rows coloured by frequency, position or group; frames and patches have no frequency."""
    by = "position" if wanted == "frequency" and all(f is None for f in site.frequency) else wanted
    groups = sorted(set(site.group)) if by == "group" else [""]
    far = max([*site.position, 1])
    shades: dict[str, list[float | None]] = {"position": [round(p / far, 3) for p in site.position]}
    shades["frequency"] = [None if f is None else round((f - 1) / 4, 3) for f in site.frequency]
    drawn = []
    for g, group in enumerate(groups):
        indices = tuple(i for i in range(len(site.token)) if by != "group" or site.group[i] == group)
        x, y = (Ref(f"{name}/at", (f"{STEP}>{name}/upto", c, indices)) for c in (0, 1))
        look: dict[str, Any] = {"shade": [shades[by][i] for i in indices]} if by in shades else {}
        look |= {"colour": series(g, 0.8), "width": 0, "size": 5.5, "text": Ref(f"{name}/text", (indices,))}
        drawn.append(Series(group or "rows", x, y, **look))
    axes = []
    for c in (0, 1):
        values = [v for at in site.at.values() for v in at[c] if v is not None]
        pad = 0.06 * ((max(values) - min(values)) or 1.0) if values else 0.0
        share = f" ({100 * round(site.shares[c], 4):.3g} % of variance)" if len(site.shares) > c else ""
        axes.append(Axis(f"axis {c + 1}{share}", rules=True, most=5, bounds=(min(values) - pad, max(values) + pad)))
    heading = f"{DrawnSite.of(site.layer, site.kind).name}, {{shape.1}}{', by position' if by != wanted else ''}"
    return Panel(axes[0], axes[1], tuple(drawn), heading=heading, legend=len(groups) > 1)


BUDGET = 2_500_000  # limit of the JSON of all cards in characters


Room = tuple[int, int, int]  # the size of a card: tokens, examples, and characters of context on either side
FULL, SHORT = (10, 5, 48), (6, 3, 30)  # for the last step, and for earlier ones
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
    owners: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for concept in concepts:
        owners.setdefault(tuple(str(concept.get(name) or "") for name in ("model", "stack", "arm")), []).append(concept)
    shorten = short_names({owner[0] for owner in owners})
    models = []
    for owner, owned in owners.items():
        # the model's short name, with stack or arm where names collide
        namesakes = [other for other in owners if other[0] == owner[0]]
        aside = [owner[i] for i in (1, 2) if len({other[i] for other in namesakes}) > 1]
        label = " · ".join(part for part in (shorten(owner[0]) or "unnamed", *aside) if part)
        models.append({"label": label, **_model(owned, BUDGET // len(owners))})
    return {"models": models, "cut": any(m["kept"] < m["measured"] for m in models)} if models else {}


def _model(concepts: Sequence[Mapping[str, Any]], budget: int) -> dict[str, Any]:
    by_step: dict[int, dict[DrawnSite, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for concept in concepts:
        site = DrawnSite.of(concept.get("layer"), concept.get("kind"))
        by_step[int(concept.get("step") or 0)][site].append(concept)
    sites, steps = sorted({site for of_step in by_step.values() for site in of_step}), sorted(by_step)
    kept: list[int] = []
    cards: dict[str, list[dict[str, Any]]] = {}
    for step in by_importance(steps):
        room = FULL if step == steps[-1] else SHORT
        made = {f"{sites.index(site)}|{step}": [_card(c, room) for c in found] for site, found in by_step[step].items()}
        cost = len(json.dumps(list(made.values()), ensure_ascii=False))
        if cost <= budget or not kept:
            budget -= cost
            kept.append(step)
            cards |= made
    wanted = DrawnSite.of(max(1, round(max(site.layer for site in sites) / 2)), "resid")
    middle = sites.index(wanted) if wanted in sites else len(sites) // 2  # the site shown initially
    counts = {"steps": sorted(kept), "kept": len(kept), "measured": len(steps)}
    return {"places": [site.name for site in sites], "middle": middle, **counts, "cards": cards}


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
    most_tokens, most_examples, most = room
    examples = []
    for example in [e for e in concept.get("examples") or [] if isinstance(e, Mapping)][:most_examples]:
        before, token, after = (str(example.get(name) or "") for name in ("before", "token", "after"))
        left = "… " * (len(before) > most) + visible(before[-most:], spaces=False)
        right = visible(after[:most], spaces=False) + " …" * (len(after) > most)
        examples.append([left, visible(token), right, _brief(example.get("code"))])
    tokens = [[visible(str(token)), _brief(share)] for token, share in list(concept.get("tokens") or [])[:most_tokens]]
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
