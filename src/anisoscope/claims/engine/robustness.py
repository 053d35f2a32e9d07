"""Each verdict again under the alternatives that a table offers: badges, and what a verdict depends on.

`details["robust"]` of a verdict: `badges` (one record for each alternative: kind, name, phrase, status, numbers, and
the parts that it lacks), `same` of `of` alternatives with the same status, `missing` (kinds of alternatives that apply
to the claim and were not measured for it), `words` (the summary). An alternative that lacks some of the parts that
decide, such as a control, is judged by the others and says so; one that changes nothing of what decides is not listed.
Only one choice changes at a time: where a verdict is on frozen directions and an alternative, such as another rank, has
refitted ones only, its badge says so and is compared with the verdict on refitted directions (`against`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from anisoscope.claims.engine.alternative import Alternative
from anisoscope.claims.engine.claim import Verdict
from anisoscope.claims.engine.evidence import listed

_OPPOSITE = {"holds": "fails", "fails": "holds"}
Place = tuple[str, str, bool, Any]
_Other = tuple[Alternative, Verdict, Verdict]  # an alternative, its verdict, and the one that it is compared with


def place(verdict: Verdict) -> Place:
    """What identifies a verdict of a table: claim, subject, and which seed it is about."""
    details = verdict.details
    return verdict.claim, verdict.subject, bool(details["pooled"]), details.get("seed")


def late_fit(verdict: Verdict) -> Any:
    """How the directions late in training were fitted."""
    return verdict.details.get("fit")


def deciding(verdict: Verdict) -> list[tuple[Any, ...]]:
    """The numbers that decide a verdict."""
    return [tuple(part.get(name) for name in ("name", "effect", "low", "high", "p")) for part in _needed(verdict)]


def _needed(verdict: Verdict) -> list[Mapping[str, Any]]:
    return [part for part in verdict.details.get("parts", ()) if part.get("needed")]


def with_badges(
    verdicts: Sequence[Verdict],
    others: Iterable[tuple[Alternative, Verdict]],
    *,
    kinds: Mapping[str, Sequence[str]],
    refitted: Iterable[Verdict] = (),
) -> list[Verdict]:
    """The verdicts with `details["robust"]`; `kinds` are those that apply to each claim, measured or not.

    `refitted`: verdicts on refitted directions, for alternatives that have no frozen ones.
    """
    found: dict[Place, list[_Other]] = {}
    chosen, alike = ({place(v): v for v in each} for each in (verdicts, refitted))
    for alternative, verdict in others:
        where = place(verdict)
        against = chosen.get(where, verdict)
        lost = alternative.kind != "fit" and (late_fit(against), late_fit(verdict)) == ("frozen", "refit")
        if lost and where in alike:
            words: dict[str, Any] = {name: f"{getattr(alternative, name)}, refitted" for name in ("name", "phrase")}
            alternative, against = replace(alternative, **words), alike[where]
        found.setdefault(where, []).append((alternative, verdict, against))
    return [v if v.details["missing"] else _badged(v, found.get(place(v), []), kinds[v.claim]) for v in verdicts]


def _badged(verdict: Verdict, others: Sequence[_Other], kinds: Sequence[str]) -> Verdict:
    found = [(other[0], badge) for other in others if (badge := _badge(*other))]
    badges = [badge for _, badge in found]
    record: dict[str, Any] = {"badges": badges, "of": len(badges)}
    record["same"] = sum(badge["status"] == badge["against"] for badge in badges)
    record["missing"] = [kind for kind in kinds if all(badge["kind"] != kind for badge in badges)]
    record["words"] = summary(verdict.status, badges)
    turned = dependence(verdict.status, [(a, b["status"]) for a, b in found if b["against"] == verdict.status])
    why = f"{verdict.why.removesuffix('.')}; {turned}." if turned else verdict.why
    return replace(verdict, why=why, details={**verdict.details, "robust": record})


def _badge(alternative: Alternative, verdict: Verdict, chosen: Verdict) -> dict[str, Any] | None:
    """The record of an alternative to the `chosen` verdict; None where none of the parts that decide was measured."""
    needed = _needed(verdict)
    measured = [part for part in needed if part["effect"] is not None]
    if not measured:
        return None
    status: str = verdict.status
    lacking = [part["name"] for part in needed if part["effect"] is None]
    if lacking and status == "undecided" and all(part["effect"] is not None for part in _needed(chosen)):
        statuses = {part["status"] for part in measured}
        status = statuses.pop() if len(statuses) == 1 else "fails" if "fails" in statuses else "undecided"
    words = {name: getattr(alternative, name) for name in ("kind", "name", "phrase")}
    numbers = {name: getattr(verdict, name) for name in ("effect", "low", "high")}
    words["against"] = chosen.status
    return {**words, "status": status, **numbers, "lacking": lacking, "parts": len(needed)}


def summary(status: str, badges: Sequence[Mapping[str, Any]]) -> str:
    """How many alternatives give the same verdict, and what the others give.

    >>> summary("holds", [{"status": "holds", "phrase": "with pca"}, {"status": "fails", "phrase": "with rank 4"}])
    'same verdict in 1 of 2; fails with rank 4'
    """
    if not badges:
        return "no other reading was measured"
    differing = [badge for badge in badges if badge["status"] != badge.get("against", status)]
    same = len(badges) - len(differing)
    clauses = [f"same verdict in {same} of {len(badges)}"]
    for other, verb in (("holds", "holds"), ("fails", "fails"), ("undecided", "undecided")):
        phrases = [badge["phrase"] for badge in differing if badge["status"] == other]
        clauses += [f"{verb} {listed(phrases)}"] if phrases else []
    return "; ".join(clauses)


def dependence(status: str, others: Sequence[tuple[Alternative, str]]) -> str:
    """What a verdict depends on, as a clause: the choices under which it is the opposite; empty if there are none."""
    turned = [alternative for alternative, other in others if other == _OPPOSITE.get(status)]
    if not turned:
        return ""
    nouns = listed(dict.fromkeys(alternative.noun for alternative in turned))
    return f"it depends on {nouns}: it {_OPPOSITE[status]} {listed([alternative.phrase for alternative in turned])}"
