"""Concept cards: what each concept of a layer fires on, in context, and which concept it was a step before."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from anisoscope.view.page import Cards, Prose, Section, text
from anisoscope.view.subjects import DrawnSite, short_names
from anisoscope.view.words import finite

BUDGET = 2_500_000  # characters of JSON


class Room(NamedTuple):
    """How much a card may hold: tokens, examples, and characters on either side of one."""

    tokens: int
    examples: int
    context: int


FULL, SHORT = Room(10, 5, 48), Room(6, 3, 30)  # the last step, and those before it
SIGNS = str.maketrans({" ": "␣", "\n": "⏎", "\r": "⏎", "\t": "⇥", "\u00a0": "⍽"})
SIGNS_IN_TEXT = {code: sign for code, sign in SIGNS.items() if code != ord(" ")}
EMPTY = "∅"

Card = dict[str, Any]
Place = tuple[int, int]  # index of the site, step


def visible(text: str, *, spaces: bool = True) -> str:
    """Text in which what cannot be seen can be.

    >>> visible(" the\\n"), visible("a b\\n", spaces=False), visible("")
    ('␣the⏎', 'a b⏎', '∅')
    """
    if not text:
        return EMPTY if spaces else ""
    shown = text.translate(SIGNS if spaces else SIGNS_IN_TEXT)
    return shown if shown.isprintable() else "".join(map(_sign, shown))


def _sign(character: str) -> str:
    return character if character.isprintable() else f"⟨{ord(character):x}⟩"


def concept_cards(concepts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the page embeds: for each model its places, its steps, and the cards of as many of them as fit."""
    owners: dict[tuple[str, str, str], dict[tuple[DrawnSite, int], list[Mapping[str, Any]]]] = {}
    for concept in concepts:
        owner = tuple(str(concept.get(name) or "") for name in ("model", "stack", "arm"))
        place = DrawnSite.of(concept.get("layer"), concept.get("kind")), int(concept.get("step") or 0)
        owners.setdefault(owner, defaultdict(list))[place].append(concept)  # type: ignore[arg-type]
    labels = _labels(list(owners))
    share = BUDGET // max(1, len(owners))
    models = [_model(label, places, share) for label, places in zip(labels, owners.values(), strict=True)]
    return {"models": models, "cut": any(m["kept"] < m["measured"] for m in models)} if models else {}


def _labels(owners: Sequence[tuple[str, str, str]]) -> list[str]:
    """The model's short name, and its stack or arm where that tells it from a namesake."""
    shorten = short_names({model for model, _, _ in owners})
    labels = []
    for model, stack, arm in owners:
        namesakes = [o for o in owners if o[0] == model]
        parts = [shorten(model) or "unnamed"]
        parts += [stack] if len({o[1] for o in namesakes}) > 1 else []
        parts += [arm] if len({o[2] for o in namesakes}) > 1 else []
        labels.append(" · ".join(part for part in parts if part))
    return labels


def _model(
    label: str, places: Mapping[tuple[DrawnSite, int], Sequence[Mapping[str, Any]]], budget: int
) -> dict[str, Any]:
    sites = sorted({site for site, _ in places})
    steps = sorted({step for _, step in places})
    kept: list[int] = []
    cards: dict[str, list[Card]] = {}
    for step in by_importance(steps):
        room = FULL if step == steps[-1] else SHORT
        mine = {(site, at): [_card(c, room) for c in found] for (site, at), found in places.items() if at == step}
        cost = len(json.dumps(list(mine.values()), ensure_ascii=False))
        if kept and cost > budget:
            continue
        budget -= cost
        kept.append(step)
        cards |= {f"{sites.index(site)}|{at}": found for (site, at), found in mine.items()}
    return {
        "label": label,
        "places": [site.name for site in sites],
        "middle": _middle(sites),
        "steps": sorted(kept),
        "kept": len(kept),
        "measured": len(steps),
        "cards": cards,
    }


def _middle(sites: Sequence[DrawnSite]) -> int:
    """The place that the page opens with: the middle block."""
    wanted = DrawnSite.of(max(1, round(max(site.layer for site in sites) / 2)), "resid")
    return sites.index(wanted) if wanted in sites else len(sites) // 2


def by_importance(steps: Sequence[int]) -> list[int]:
    """The last step, the first, then those that halve the gaps: any beginning of the list covers the whole.

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


def _card(concept: Mapping[str, Any], room: Room) -> Card:
    """One concept, no longer than a card can show."""
    examples = [e for e in concept.get("examples") or [] if isinstance(e, Mapping)]
    tokens = list(concept.get("tokens") or [])[: room.tokens]
    return {
        "concept": int(concept.get("concept") or 0),
        "share": _brief(concept.get("share")),
        "tokens": [[visible(str(token)), _brief(share)] for token, share in tokens],
        "examples": [_example(example, room.context) for example in examples[: room.examples]],
        "from": _origin(concept.get("from")),
    }


def _example(example: Mapping[str, Any], context: int) -> list[Any]:
    before, after = str(example.get("before") or ""), str(example.get("after") or "")
    cut = ("… " if len(before) > context else "", " …" if len(after) > context else "")
    return [
        cut[0] + visible(before[-context:], spaces=False),
        visible(str(example.get("token") or "")),
        visible(after[:context], spaces=False) + cut[1],
        _brief(example.get("code")),
    ]


def _origin(origin: Mapping[str, Any] | None) -> list[Any] | None:
    if not origin:
        return None
    return [int(origin.get("step") or 0), int(origin.get("concept") or 0), _brief(origin.get("cosine"))]


def _brief(value: Any) -> float | None:
    good = finite(value) if isinstance(value, int | float) else None
    return None if good is None else float(f"{good:.3g}")


def concepts_section(concepts: Iterable[Mapping[str, Any]]) -> Section | None:
    """Cards of the directions that the proxy of a layer is made of; none where there are none."""
    found = concept_cards(concepts)
    if not found:
        return None
    words = (
        "The directions that the proxy of a layer is made of, largest first: the tokens whose rows hold most of a "
        "concept, and the rows where it is strongest, in context. Spaces are shown as ␣, line ends as ⏎. <em>From</em> "
        "names the concept of the measured step before that matches best, by cosine."
    )
    cut = (
        " The page carries the cards of some steps; <code>concepts.json</code> of the run has all."
        if found["cut"]
        else ""
    )
    return Section("concepts", "Concepts", [Prose(text(words + cut)), Cards(found["models"])], "Concepts")
