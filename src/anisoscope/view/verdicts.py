"""Verdicts on claims as the table at the top of the page shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from anisoscope.view.catalogue import title_of
from anisoscope.view.words import finite, listed, number

MARKS = {"holds": "✓", "fails": "✕", "undecided": "?"}  # a sign beside the word, so that colour is never alone
COUNTED = {"holds": ("holds", "hold"), "fails": ("fails", "fail"), "undecided": ("is undecided", "are undecided")}


def verdict_claims(verdicts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Claims in their order, each with a row for every model it was tested on; none for what was not measured."""
    claims: dict[str, dict[str, Any]] = {}
    tested = measured(verdicts)
    for verdict in leading(tested):
        name = str(verdict.get("claim") or "")
        statement = str(verdict.get("statement") or title_of(name))
        claims.setdefault(name, {"name": name, "statement": statement, "rows": []})["rows"].append(_row(verdict))
        claims[name]["rows"][-1]["seeds"] = [_row(v) for v in tested if v is not verdict and _same(v, verdict)]
    return list(claims.values())


def leading(verdicts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Verdicts over all seeds, and those of single seeds where there is none over all.

    >>> over = {"claim": "a", "subject": "x", "details": {"pooled": True}}
    >>> leading([over, {"claim": "a", "subject": "x"}, {"claim": "a", "subject": "y"}])[1:]
    [{'claim': 'a', 'subject': 'y'}]
    """
    pooled = [verdict for verdict in verdicts if _is_pooled(verdict)]
    return [v for v in verdicts if _is_pooled(v) or not any(_same(v, over) for over in pooled)]


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return (one.get("claim"), one.get("subject")) == (other.get("claim"), other.get("subject"))


def _is_pooled(verdict: Mapping[str, Any]) -> bool:
    details = verdict.get("details")
    return bool(isinstance(details, Mapping) and details.get("pooled"))


def measured(verdicts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The verdicts on claims that the table has something to say about."""
    return [verdict for verdict in verdicts if not _is_missing(verdict)]


def _is_missing(verdict: Mapping[str, Any]) -> bool:
    details = verdict.get("details")
    return bool(isinstance(details, Mapping) and details.get("missing"))


def unmeasured(verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The claims that the table has nothing to say about; of one that was tested on some models only, the others.

    >>> unmeasured([{"claim": "a", "subject": "x", "details": {"missing": True}}, {"claim": "a", "subject": "y"}])
    ['a (x)']
    """
    tested = {str(verdict.get("claim")) for verdict in measured(verdicts)}
    found: dict[str, dict[str, None]] = {}
    for verdict in verdicts:
        if _is_missing(verdict):
            found.setdefault(str(verdict.get("claim")), {})[str(verdict.get("subject") or "")] = None
    return [f"{claim} ({listed(list(who))})" if claim in tested else claim for claim, who in found.items()]


def _row(verdict: Mapping[str, Any]) -> dict[str, Any]:
    status = str(verdict.get("status") or "undecided")
    p, margin = finite(verdict.get("p")), finite(verdict.get("margin"))
    return {
        "subject": str(verdict.get("subject") or ""),
        "status": status,
        "look": status if status in MARKS else "undecided",
        "mark": MARKS.get(status, "?"),
        "effect": neat(verdict.get("effect")),
        "interval": _interval(verdict),
        "margin": "" if margin is None else neat(margin),
        "p": "" if p is None else "< 0.0001" if p < 1e-4 else neat(p, 2),
        "why": str(verdict.get("why") or ""),
        "scope": str(verdict.get("scope") or ""),
        "parts": _parts(verdict.get("details")),
    }


def _parts(details: Any) -> list[dict[str, str]]:
    """What a verdict was made from, where it says so: each part with its own effect and status."""
    found = details.get("parts") if isinstance(details, Mapping) else None
    parts = [part for part in found or [] if isinstance(part, Mapping) and finite(part.get("effect")) is not None]
    return [
        {"name": str(p.get("name") or ""), "effect": neat(p["effect"]), "interval": _interval(p), "status": _status(p)}
        for p in parts
    ]


def _interval(part: Mapping[str, Any]) -> str:
    low, high = finite(part.get("low")), finite(part.get("high"))
    return "" if low is None or high is None else f"{neat(low)} to {neat(high)}"


def _status(part: Mapping[str, Any]) -> str:
    return str(part.get("status") or "")


def neat(value: float | None, digits: int = 3) -> str:
    """A number without zeros at its end.

    >>> neat(0.005), neat(120.0), neat(0.31)
    ('0.005', '120', '0.31')
    """
    text = number(value, digits)
    return text.rstrip("0").rstrip(".") if "." in text and "×" not in text else text


def common_scope(claims: Sequence[Mapping[str, Any]]) -> str:
    """What most verdicts are about: it is said once, and beside a verdict only where that is about something else."""
    scopes = Counter(row["scope"] for claim in claims for row in claim["rows"] if row["scope"])
    return scopes.most_common(1)[0][0] if scopes else ""


def verdict_counts(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """How many claims hold, in a sentence, and in another which could not be asked.

    >>> verdict_counts([{"subject": "a", "status": "holds"}, {"subject": "a", "status": "fails"}])
    'Of 2 claims, 1 holds and 1 fails.'
    """
    tested, absent = leading(measured(verdicts)), unmeasured(verdicts)
    subjects = dict.fromkeys(str(v.get("subject") or "") for v in tested)
    told = []
    for subject in subjects:
        mine = [v for v in tested if str(v.get("subject") or "") == subject]
        counts = Counter(str(v.get("status") or "undecided") for v in mine)
        parts = [f"{counts[s]} {words[counts[s] != 1]}" for s, words in COUNTED.items() if counts[s]]
        claims = f"{len(mine)} claim{'s' if len(mine) != 1 else ''}"
        told.append(f"{f'for {subject}, of' if len(subjects) > 1 else 'of'} {claims}, {listed(parts)}")
    text = "; ".join(told)
    sentences = [f"{text[:1].upper()}{text[1:]}."] if text else []
    return " ".join([*sentences, *([f"Not measured here: {listed(absent)}."] if absent else [])])
