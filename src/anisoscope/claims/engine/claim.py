"""A claim of the literature = a statement and a test over the results table that ends in a verdict.

Adding one is one function under `@claim(...)` that returns a finding, in a module that `claims.catalogue` lists. The
catalogue evaluates them, each seed by itself and all of them together.

What `Verdict.details` holds: `parts` (each effect with interval, margin, p and status), `aspects` (sub-claims with a
status of their own), `proxy`, `rank`, `fit`, `pooled` (whether it speaks for several seeds), `seed` or `seeds` (then
`per_seed` too), `measured_again` (seeds left out because they are another seed's run, by model), `missing` (the table
has nothing that the claim could be tested on), and what the claim adds for the report (`cells`, `steps`, `layers`, …).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from anisoscope.claims.engine.evidence import Missing, NotHere, Study
from anisoscope.claims.engine.part import ONE_MODEL, Finding, Part, Status, by_name, judge

DECLARED: dict[str, Claim] = {}  # by name
_NUMBERS = ("effect", "low", "high", "p", "margin")


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds, by how much, and why, in one sentence."""

    claim: str
    statement: str
    status: Status
    effect: float
    low: float
    high: float
    p: float
    margin: float
    why: str
    scope: str = ONE_MODEL
    subject: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "details", json_safe({"pooled": False, "missing": False, **self.details}))

    def to_dict(self) -> dict[str, Any]:
        """A dictionary for JSON: what is not a number is null."""
        return json_safe(asdict(self))

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Verdict:
        """The verdict that `to_dict` wrote down."""
        numbers = {name: math.nan if record[name] is None else float(record[name]) for name in _NUMBERS}
        return cls(**{**record, **numbers})


def verdicts_to_dicts(verdicts: Iterable[Verdict]) -> list[dict[str, Any]]:
    """Verdicts as they lie in verdicts.json."""
    return [verdict.to_dict() for verdict in verdicts]


def verdicts_from_dicts(records: Iterable[Mapping[str, Any]]) -> list[Verdict]:
    """Verdicts read back from verdicts.json."""
    return [Verdict.from_dict(record) for record in records]


def json_safe(value: Any) -> Any:
    """The same value with NaN and infinities as None, tuples as lists, keys as text, numbers to eight digits.

    >>> json_safe({1: (0.5, float("nan"))})
    {'1': [0.5, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [json_safe(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.8g}") if math.isfinite(value) else None
    return value


@dataclass(frozen=True)
class Claim:
    """A declared claim; calling `function` on a study gives a finding for each subject.

    The first of `metrics` is the one without which there is nothing to test.
    """

    name: str
    statement: str
    source: str
    metrics: tuple[str, ...]
    margin: float
    function: Callable[[Study], dict[str, Finding]]
    description: str
    module: str  # where it is declared


def claim(
    name: str,
    *,
    statement: str,
    source: str,
    metrics: Iterable[str],
    margin: float,
    of: Callable[[Study], Mapping[str, Any]] | None = None,
) -> Callable[[Callable[[Any], Any]], Claim]:
    """Declare a claim: the statement, where it comes from, the metrics it reads, its margin.

    The function returns a finding about one of what `of` finds in a study (its `models`, their `stacks`); without `of`
    it takes the whole study and returns findings by subject.
    """

    def declare(function: Callable[[Any], Any]) -> Claim:
        def of_each(study: Study) -> dict[str, Finding]:
            found = of(study) if of is not None else {}
            return {subject: judged(function, given, margin=margin) for subject, given in found.items()}

        words = inspect.cleandoc(function.__doc__ or "")
        whole = function if of is None else of_each
        declared = Claim(name, statement, source, tuple(metrics), margin, whole, words, function.__module__)
        DECLARED[name] = declared
        return declared

    return declare


def judged(function: Callable[[Any], Finding], given: Any, *, margin: float) -> Finding:
    """What the function found, or a finding that says what is missing.

    Of evidence that can be `ended` at a step it can be asked for again with nothing after that step.
    """
    try:
        finding = function(given)
    except Missing as gap:
        finding = missing(gap, margin=margin)
    if not hasattr(given, "ended"):
        return finding
    return replace(finding, until=lambda step: judged(function, given.ended(step), margin=margin))


def missing(gap: Missing, *, margin: float) -> Finding:
    """A finding without numbers."""
    part = Part.absent("missing", str(gap), margin=margin)
    return Finding((part,), lambda parts, status, part: part.reason, {"missing": isinstance(gap, NotHere)})


def verdict_of(
    name: str,
    statement: str,
    finding: Finding,
    *,
    subject: str,
    scope: str = ONE_MODEL,
    about: Mapping[str, Any] | None = None,
) -> Verdict:
    """A finding judged and told in one sentence; `about` goes into the details."""
    parts = finding.settle(by_name(finding.parts))
    needed = [part for part in parts.values() if part.needed]
    status, binding = judge(needed)
    measured = [
        part for part in needed if part.measured
    ]  # tell the weakest of them where the binding one has no number
    shown = binding if binding.measured or not measured else judge(measured)[1]
    doubt = binding.reason if status == "undecided" else finding.doubt(parts) if status == "holds" else ""
    told = finding.sentence(parts, shown.status, shown) if shown.measured or not doubt else ""
    told += f"; {finding.note}" if told and finding.note else ""
    details: dict[str, Any] = {"parts": [part.record() for part in parts.values()]}
    details |= {} if finding.aspects is None else {"aspects": _aspects(finding.aspects, parts)}
    return Verdict(
        claim=name,
        statement=statement,
        status="undecided" if doubt else status,
        effect=shown.effect,
        low=shown.low,
        high=shown.high,
        p=max((part.p for part in needed if math.isfinite(part.p)), default=math.nan),
        margin=shown.margin,
        why=_sentence(told, doubt, scope=scope, again=(about or {}).get("measured_again", {})),
        scope=scope,
        subject=subject,
        details={**details, **(about or {}), **finding.details},
    )


def _sentence(text: str, doubt: str, *, scope: str, again: Mapping[str, list[str]]) -> str:
    """One sentence: what was found, a doubt that leaves it undecided, over which seeds, and which were left out."""
    text = "; undecided because ".join(words for words in (text, doubt) if words)
    remarks = {model: "; ".join(found) for model, found in again.items()}
    different = list(dict.fromkeys(remarks.values()))
    for words in different:
        models = " and ".join(model for model, said in remarks.items() if said == words)
        text += f"; {words}" if len(different) == 1 else f"; in {models} {words}"
    text = f"{scope}: {text}" if "seed" in scope else text
    return text[0].upper() + text[1:].rstrip(".") + "."


def _aspects(aspects: Mapping[str, tuple[str, ...]], parts: Mapping[str, Part]) -> dict[str, Any]:
    """Sub-claims with an outcome of their own."""
    found = {}
    for name, names in aspects.items():
        there = [parts[n] for n in names if n in parts]
        if there:
            status, binding = judge(there)
            found[name] = {**binding.record(), "status": status}
    return found
