"""Verdicts on claims as a page shows them: a table of claims, and how many hold, in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from anisoscope.view.catalogue import title_of
from anisoscope.view.words import finite, listed, neat, p_words, plural, shortened

MARKS = {"holds": "✓", "fails": "✕", "undecided": "?"}  # a sign beside the word, so that colour is never alone
TELL_EACH = 6  # of more subjects than this only totals are told
COUNTED = {"holds": ("holds", "hold"), "fails": ("fails", "fail"), "undecided": ("is undecided", "are undecided")}


def verdict_claims(verdicts: Sequence[Mapping[str, Any]], random: Collection[str] = ()) -> list[dict[str, Any]]:
    """Claims in their order, each with a row for every model it was tested on; none for what was not measured.

    Rows of models whose weights are `random` stand apart, unless a claim has no others.
    """
    claims: dict[str, dict[str, Any]] = {}
    tested = measured(verdicts)
    for verdict in leading(tested):
        name = str(verdict.get("claim") or "")
        statement = str(verdict.get("statement") or title_of(name))
        claims.setdefault(name, {"name": name, "statement": statement, "rows": []})["rows"].append(_row(verdict))
        claims[name]["rows"][-1]["seeds"] = [_row(v) for v in tested if v is not verdict and _same(v, verdict)]
    for claim in claims.values():
        claim["rows"], claim["random"] = _apart(claim["rows"], random)
        claim["random_words"] = _random_words(claim["random"])
    return list(claims.values())


def _apart(rows: list[dict[str, Any]], random: Collection[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of trained models, and those of models with random weights; together where there is no other."""
    drawn = [row for row in rows if is_random(row["subject"], random)]
    if len(drawn) in (0, len(rows)):
        return rows, []
    return [row for row in rows if row not in drawn], drawn


def _random_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many models have random weights, and what was found of them."""
    models = len({row["subject"].partition(", ")[0] for row in rows})
    stacks = f", {len(rows)} stacks" if len(rows) > models else ""
    return f"{plural(models, 'model')} with random weights{stacks}: {status_counts(rows)}" if rows else ""


def is_random(subject: str, random: Collection[str]) -> bool:
    """Whether a verdict is on a model with random weights, or on one of its stacks.

    >>> is_random("t5, decoder stack", ["t5"]), is_random("t5-small", ["t5"])
    (True, False)
    """
    return any(subject == name or subject.startswith(f"{name}, ") for name in random)


def status_counts(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many hold, fail and are undecided.

    >>> status_counts([{"status": "holds"}, {"status": "undecided"}, {"status": "undecided"}])
    '1 holds and 2 are undecided'
    """
    counts = Counter(str(row.get("status") or "undecided") for row in rows)
    return listed([f"{counts[s]} {words[counts[s] != 1]}" for s, words in COUNTED.items() if counts[s]])


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
    """The claims that the table has nothing to say about; of one that was tested on some models only, a few others.

    >>> unmeasured([{"claim": "a", "subject": "x", "details": {"missing": True}}, {"claim": "a", "subject": "y"}])
    ['a (x)']
    """
    tested = {str(verdict.get("claim")) for verdict in measured(verdicts)}
    found: dict[str, dict[str, None]] = {}
    for verdict in verdicts:
        if _is_missing(verdict):
            found.setdefault(str(verdict.get("claim")), {})[str(verdict.get("subject") or "")] = None
    return [f"{claim} ({shortened(list(who))})" if claim in tested else claim for claim, who in found.items()]


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
        "p": "" if p is None else p_words(p),
        "why": str(verdict.get("why") or ""),
        "scope": str(verdict.get("scope") or ""),
        "parts": _parts(verdict.get("details")),
        "seeds": [],
        "under": [],
        "by_seed": "",
    }


def _parts(details: Any) -> list[dict[str, str]]:
    """What a verdict was made from, where it says so: each part with its own effect and status."""
    found = details.get("parts") if isinstance(details, Mapping) else None
    parts = [part for part in found or [] if isinstance(part, Mapping) and finite(part.get("effect")) is not None]
    return [
        {
            "name": str(p.get("name") or ""),
            "effect": neat(p["effect"]),
            "interval": _interval(p),
            "status": str(p.get("status") or ""),
        }
        for p in parts
    ]


def _interval(part: Mapping[str, Any]) -> str:
    low, high = finite(part.get("low")), finite(part.get("high"))
    return "" if low is None or high is None else f"{neat(low)} to {neat(high)}"


def common_scope(claims: Sequence[Mapping[str, Any]]) -> str:
    """What most verdicts are about: it is said once, and beside a verdict only where that is about something else."""
    scopes = Counter(row["scope"] for claim in claims for row in claim["rows"] if row["scope"])
    return scopes.most_common(1)[0][0] if scopes else ""


def verdict_counts(verdicts: Sequence[Mapping[str, Any]], random: Collection[str] = ()) -> str:
    """How many claims hold, in a sentence, and in another which could not be asked; of many subjects only in total.

    >>> verdict_counts([{"subject": "a", "status": "holds"}, {"subject": "a", "status": "fails"}])
    'Of 2 claims, 1 holds and 1 fails.'
    >>> verdict_counts([{"subject": name, "status": "holds"} for name in "abcdefg"], random=["g"])
    'Of 7 verdicts, 7 hold; without 1 on models with random weights, 6 hold.'
    """
    tested, absent = leading(measured(verdicts)), unmeasured(verdicts)
    subjects = dict.fromkeys(str(v.get("subject") or "") for v in tested)
    text = _in_total(tested, random) if len(subjects) > TELL_EACH else _by_subject(tested, list(subjects))
    sentences = [f"{text[:1].upper()}{text[1:]}."] if text else []
    return " ".join([*sentences, *([f"Not measured here: {listed(absent)}."] if absent else [])])


def _by_subject(tested: Sequence[Mapping[str, Any]], subjects: Sequence[str]) -> str:
    told = []
    for subject in subjects:
        mine = [v for v in tested if str(v.get("subject") or "") == subject]
        whose = f"for {subject}, of" if len(subjects) > 1 else "of"
        told.append(f"{whose} {plural(len(mine), 'claim')}, {status_counts(mine)}")
    return "; ".join(told)


def _in_total(tested: Sequence[Mapping[str, Any]], random: Collection[str]) -> str:
    trained = [v for v in tested if not is_random(str(v.get("subject") or ""), random)]
    text = f"of {plural(len(tested), 'verdict')}, {status_counts(tested)}"
    if not 0 < len(trained) < len(tested):
        return text
    return f"{text}; without {len(tested) - len(trained)} on models with random weights, {status_counts(trained)}"
