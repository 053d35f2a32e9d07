"""The grid of claims × models: one badge for each verdict, and behind it sentence, interval, parts and definition."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anisoscope.results.manifest import PRETRAINED
from anisoscope.view.headline import words_of_claim
from anisoscope.view.sections.findings import (
    ALONE,
    MARKS,
    badge_groups,
    grid_words,
    is_random,
    leading,
    measured,
    robust_words,
    stands,
    status_counts,
)
from anisoscope.view.words import finite, neat, p_words, plural

Verdict = Mapping[str, Any]
PAPERS = {
    "2604.08764": "Revisiting Anisotropy",
    "2311.05928": "The Shape of Learning",
    "2401.12143": "Anisotropy Is Inherent to Self-Attention",
}
OTHERS = "Beside the papers"
TOGETHER = "together"  # the column of subjects that only one claim speaks of
WORDED, BESIDE = 4, 14  # columns with which a badge has its word; columns of a grid that fits beside the hero
MISSING = ("not measured", "–")
ARXIV = re.compile(r"\d{4}\.\d{5}")


@dataclass(frozen=True)
class Bar:
    """An interval against its margin on a scale of 0 to 100: what must be passed lies between `from_` and `to`."""

    at: float
    low: float
    high: float
    margin: float
    from_: float
    to: float
    zero: float | None

    @classmethod
    def of(cls, effect: Any, low: Any, high: Any, margin: Any, *, below: bool) -> Bar | None:
        """The bar of an effect; None without numbers, or where the margin is so far that nothing could be seen."""
        numbers = [finite(value) for value in (effect, low, high, margin)]
        at, least, most, edge = (math.nan if v is None else v for v in numbers)
        if math.isnan(at) or math.isnan(edge):
            return None
        least, most = (at if math.isnan(end) else end for end in (least, most))
        ends = [at, least, most, edge, *([0.0] if abs(min(at, edge, key=abs)) < 3 * abs(at - edge) else [])]
        first, reach = min(ends), (max(ends) - min(ends)) or 1.0
        first, reach = first - 0.12 * reach, 1.24 * reach

        def place(value: float) -> float:
            return round(100 * (value - first) / reach, 1)

        zero = place(0.0) if 0.0 in ends and edge != 0 else None
        side = (0.0, place(edge)) if below else (place(edge), 100.0)
        return cls(place(at), place(least), place(most), place(edge), *side, zero)


@dataclass(frozen=True)
class GridCell:
    """One badge of the grid and what it opens."""

    id: str
    subject: str
    status: str
    mark: str
    look: str
    alone: str = ""
    why: str = ""
    facts: Sequence[tuple[str, str]] = ()
    bar: Bar | None = None
    parts: Sequence[Mapping[str, Any]] = ()
    described: Sequence[Mapping[str, Any]] = ()
    seeds: Sequence[Mapping[str, str]] = ()
    robust: Sequence[Any] = ()
    robust_words: str = ""


@dataclass(frozen=True)
class GridRow:
    """One claim: its label, its definition, and the badges of each column."""

    name: str
    label: str
    statement: str
    columns: Sequence[tuple[str, Sequence[GridCell]]]
    text: str = ""
    margin: str = ""
    metrics: Sequence[str] = ()
    source: str = ""


@dataclass(frozen=True)
class VerdictGrid:
    """All verdicts of a page by paper; those of random weights, and claims that were not measured, stand apart."""

    columns: Sequence[str]
    papers: Sequence[tuple[str, str, Sequence[GridRow]]]  # title, arXiv id, claims
    tally: str
    together: str
    missing: Sequence[tuple[str, str]] = ()
    random: VerdictGrid | None = None

    @property
    def worded(self) -> bool:
        return len(self.columns) <= WORDED

    @property
    def wide(self) -> bool:
        return len(self.columns) > BESIDE


def verdict_grid(
    verdicts: Sequence[Verdict], claims: Mapping[str, Any] | None = None, random: Collection[str] = ()
) -> VerdictGrid | None:
    """The grid of all measured verdicts; `claims` are their declarations. None without verdicts."""
    tested = measured(verdicts)
    names = {str(verdict.get("claim")) for verdict in tested}
    shown = [v for v in leading(verdicts) if str(v.get("claim")) in names]
    drawn = [v for v in shown if is_random(str(v.get("subject") or ""), random)]
    if len(drawn) == len(shown):
        drawn = []
    kept = [v for v in shown if v not in drawn]
    if not kept:
        return None
    made = _grid(kept, verdicts, claims or {}, "v")
    apart = _grid(drawn, verdicts, claims or {}, "r") if measured(drawn) else None
    absent: dict[str, str] = {}
    for verdict in verdicts:
        if (name := str(verdict.get("claim"))) not in names:
            label = words_of_claim(name, str(verdict.get("statement") or "")).label
            absent.setdefault(label, str(verdict.get("why") or ""))
    return VerdictGrid(made.columns, made.papers, made.tally, grid_words(verdicts), list(absent.items()), random=apart)


def _grid(shown: Sequence[Verdict], every: Sequence[Verdict], claims: Mapping[str, Any], prefix: str) -> VerdictGrid:
    known = {str(v.get("subject") or "") for v in measured(shown)}
    counts = Counter(subject for v in shown if (subject := str(v.get("subject") or "")) in known)
    columns = [subject for subject, count in counts.items() if count > 1] or list(counts)[:WORDED]
    rows: dict[str, dict[str, list[GridCell]]] = {}
    statements: dict[str, str] = {}
    for number, verdict in enumerate(shown):
        name, subject = str(verdict.get("claim")), str(verdict.get("subject") or "")
        if subject not in counts:
            continue  # a subject on which nothing was measured has no column
        beside = PRETRAINED if subject.endswith(f", {PRETRAINED}") else TOGETHER
        place = subject if subject in columns else beside
        seeds = [v for v in every if v is not verdict and (v.get("claim"), v.get("subject")) == (name, subject)]
        rows.setdefault(name, {}).setdefault(place, []).append(_cell(verdict, f"{prefix}{number}", measured(seeds)))
        statements.setdefault(name, str(verdict.get("statement") or ""))
    ends = (TOGETHER, PRETRAINED)
    columns += [end for end in ends if end not in columns and any(end in row for row in rows.values())]
    papers: dict[tuple[str, str], list[GridRow]] = {}
    for name, cells in rows.items():
        row = _row(name, statements[name], [(column, cells.get(column, ())) for column in columns], claims.get(name))
        papers.setdefault(_paper(row.source), []).append(row)
    tested = measured(shown)
    many = f"Of {plural(len(tested), 'verdict')}" if len(tested) > 1 else "The verdict"
    tally = f"{many}, {status_counts(tested)}." if len(tested) > 1 else f"{many}: {status_counts(tested)[2:]}."
    return VerdictGrid(columns, [(*paper, found) for paper, found in papers.items()], tally, "")


def _row(name: str, statement: str, columns: Sequence[tuple[str, Sequence[GridCell]]], declared: Any) -> GridRow:
    label = words_of_claim(name, statement).label
    if declared is None:
        return GridRow(name, label, statement, columns)
    text, metrics = str(declared.description or ""), tuple(declared.metrics)
    return GridRow(name, label, statement, columns, text, neat(declared.margin), metrics, str(declared.source))


def _paper(source: str) -> tuple[str, str]:
    found = ARXIV.search(source)
    return (PAPERS.get(found[0], source), found[0]) if found else (OTHERS, "")


def _cell(verdict: Verdict, name: str, seeds: Sequence[Verdict]) -> GridCell:
    """The badge of a verdict and all that is known of it; numbers have the sign of the verdict's sentence."""
    details, subject = verdict.get("details") or {}, str(verdict.get("subject") or "")
    why = str(verdict.get("why") or "")
    if details.get("missing"):
        return GridCell(name, subject, *MISSING, "absent", why=why)
    status = str(verdict.get("status") or "undecided")
    fall = words_of_claim(str(verdict.get("claim"))).fall
    parts = [_part(part, fall=fall) for part in details.get("parts") or [] if finite(part.get("effect")) is not None]
    main = _part(verdict, fall=fall)
    bar = main["bar"] if main["status"] in ("", status) or status == "undecided" else None
    facts = [("Effect", main["effect"]), ("95 % interval", main["interval"]), ("Margin", main["margin"])]
    p = finite(verdict.get("p"))
    # where the interval already lies short of the margin, p decides nothing
    facts += [("p of random directions", p_words(p))] if p is not None and status != "fails" else []
    aspects = {str(name): str(each.get("status")) for name, each in (details.get("aspects") or {}).items()}
    facts += [("Apart", ", ".join(f"{name} {status}" for name, status in aspects.items()))] if len(aspects) > 1 else []
    facts += [("Speaks", str(verdict.get("scope") or ""))]
    return GridCell(
        name,
        subject,
        status,
        MARKS.get(status, "?"),
        status if status in MARKS else "undecided",
        ALONE if stands(verdict) is False else "",
        why,
        [(key, value) for key, value in facts if value],
        bar,
        [part for part in parts if part["status"]],
        [part for part in parts if not part["status"]],
        [_seed(seed, fall=fall) for seed in seeds or details.get("per_seed") or ()],
        [{"kind": kind, "badges": badges} for kind, badges in badge_groups(verdict)],
        robust_words(verdict),
    )


def _part(part: Mapping[str, Any], *, fall: bool) -> dict[str, Any]:
    """An effect with its interval and margin as words and as a bar, and what they alone would say."""
    effect, low, high, margin = (finite(part.get(name)) for name in ("effect", "low", "high", "margin"))
    below = bool(part.get("below"))
    if fall:
        effect, low, high, margin = (None if v is None else -v for v in (effect, high, low, margin))
        below = not below
    ends = "" if low is None or high is None else f"{neat(low)} to {neat(high)}"
    side = "" if margin is None else f"{'below' if below else 'above'} {neat(margin)}"
    status = str(part.get("status") or "")
    if low is not None and high is not None and margin is not None and not part.get("name"):
        beyond, short = (high < margin, low > margin) if below else (low > margin, high < margin)
        status = "holds" if beyond else "fails" if short else "undecided"
    made = {"name": str(part.get("name") or ""), "effect": neat(effect), "interval": ends, "margin": side}
    bar = Bar.of(effect, low, high, margin, below=below) if part.get("needed", True) else None  # of what decides
    return made | {"status": status, "bar": bar}


def _seed(verdict: Verdict, *, fall: bool) -> dict[str, str]:
    part = _part(verdict, fall=fall)
    name = str(verdict.get("scope") or f"seed {verdict.get('seed')}").replace("for ", "")
    return {"name": name, "status": str(verdict.get("status")), "effect": part["effect"], "interval": part["interval"]}
