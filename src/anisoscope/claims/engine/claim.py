"""A claim of the literature = a statement and a test over the results table that ends in a verdict.

A claim rests on parts, each an effect with its interval and the margin it must pass. A part holds when its 95 %
interval lies wholly beyond the margin (and, where random draws test it, p ≤ .05), fails when the interval lies wholly
short of it, and is undecided otherwise. A claim holds when every needed part does, and fails when one does: an
intersection–union test (Berger 1982), which needs no correction for the number of parts. A claim that holds where any
one of several parts does needs one: `looks` of such a part says how many there are.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from anisoscope.claims.engine.evidence import Missing, NotHere, Study, figure
from anisoscope.results.quantity import FEWEST_FOLDS, Quantity, among, no_effect_p, t_quantile, t_tail

Status = Literal["holds", "fails", "undecided"]
ALPHA = 0.05
FEWEST_SEEDS = 3  # for a claim about more than one run
ONE_MODEL = "for this model"
Bounds = tuple[float | None, float | None]
CORRELATION = (-1.0, 1.0)  # bounds of a correlation or a cosine
SHARE = (None, 1.0)  # of what a share explains
ONE_REPLICATE = f"one seed decides nothing: seeds are the replicates here, and {FEWEST_SEEDS} are needed"
TOO_FEW = f"too few contexts were tested: an interval needs them in {FEWEST_FOLDS} of the 8 folds at least"


@dataclass(frozen=True)
class Part:
    """One effect and the margin it is held against; without a margin it only describes.

    >>> Part("normal", 3.0, 2.5, 3.5, margin=0.5).status
    'holds'
    """

    name: str
    effect: float
    low: float = math.nan
    high: float = math.nan
    margin: float = math.nan
    p: float = math.nan
    needed: bool = True
    tested: bool = False  # holds only with p ≤ .05
    guard: bool = False  # a condition of the claim; where all hold, another part tells the effect
    reason: str = ""  # why it stays undecided whatever the interval says
    looks: int = 1  # parts of which the best is chosen; the intervals of all hold at once
    below: bool = False  # it must lie below its margin, not beyond it
    bounds: Bounds = (None, None)  # what is possible; the interval is cut to it, never past the effect itself

    def __post_init__(self) -> None:
        least, most = self.bounds
        if least is not None and self.low < least:
            object.__setattr__(self, "low", min(least, self.effect))
        if most is not None and self.high > most:
            object.__setattr__(self, "high", max(most, self.effect))

    @classmethod
    def of(cls, name: str, quantity: Quantity, *, margin: float = math.nan, **more: Any) -> Part:
        """A part from a quantity; p is that of no effect at all unless another is given."""
        low, high = quantity.interval_among(more.get("looks", 1))
        more.setdefault("p", no_effect_p(quantity) if math.isfinite(margin) else math.nan)
        if math.isfinite(margin) and not math.isfinite(quantity.value):
            more.setdefault("reason", f"{name} has no number here")
        if quantity.thin and math.isfinite(margin):
            more.setdefault("reason", TOO_FEW)
        return cls(name, quantity.value, low, high, margin=margin, **more)

    @classmethod
    def described(cls, name: str, quantity: Quantity | float, *, bounds: Bounds = (None, None)) -> Part:
        """A number that is told, not judged."""
        if not isinstance(quantity, Quantity):
            quantity = Quantity.constant(quantity)
        if quantity.fixed:
            return cls(name, quantity.value, needed=False, bounds=bounds)
        return cls.of(name, quantity, needed=False, bounds=bounds)

    @classmethod
    def told(cls, numbers: Mapping[str, Quantity | float], *, bounds: Bounds = (None, None)) -> list[Part]:
        """Several of them."""
        return [cls.described(name, number, bounds=bounds) for name, number in numbers.items()]

    @classmethod
    def absent(cls, name: str, reason: str | Missing, *, margin: float) -> Part:
        """A part that could not be measured."""
        return cls(name, math.nan, margin=margin, reason=str(reason))

    @property
    def measured(self) -> bool:
        return math.isfinite(self.effect)

    def __neg__(self) -> Part:
        """The same effect, counted in the other direction."""
        return replace(self, effect=-self.effect, low=-self.high, high=-self.low)

    @property
    def lead(self) -> float:
        """How far beyond its margin it lies for sure: at the near end of its interval, or itself without one."""
        near = self.high if self.below else self.low
        near = near if math.isfinite(near) else self.effect
        return self.margin - near if self.below else near - self.margin

    @property
    def reach(self) -> float:
        """How far beyond its margin it may lie at most."""
        return self.margin - self.low if self.below else self.high - self.margin

    @property
    def status(self) -> Status:
        if self.reach < 0:
            return "fails" if not self.reason else "undecided"
        sure = math.isfinite(self.low) and self.lead > 0
        if sure and not self.reason and (not self.tested or self.p <= ALPHA):
            return "holds"
        return "undecided"

    def record(self) -> dict[str, Any]:
        kept = {name: value for name, value in asdict(self).items() if name != "bounds"}
        return {**kept, "status": self.status if math.isfinite(self.margin) else None}


Parts = Mapping[str, Part]


def by_name(parts: Sequence[Part]) -> dict[str, Part]:
    return {part.name: part for part in parts}


@dataclass(frozen=True)
class Finding:
    """What a claim found in one study: its parts, and how to say them in a sentence."""

    parts: Sequence[Part]
    sentence: Callable[[Parts, Status, Part], str]  # parts, the outcome, the part it hangs on
    details: dict[str, Any] = field(default_factory=dict)  # for the verdict's details
    settle: Callable[[dict[str, Part]], dict[str, Part]] = dict  # joins parts before they are judged
    doubt: Callable[[Parts], str] = lambda parts: ""  # a reason not to call it holding
    # groups of parts judged by themselves too; None where the verdict does not list them
    aspects: Mapping[str, tuple[str, ...]] | None = field(default_factory=dict)
    scope: str = ONE_MODEL  # what a single seed speaks for
    until: Callable[[int], Finding] | None = None  # the same with nothing after a step
    note: str = ""  # said at the end of the sentence
    several: Callable[[Sequence[Finding]], Callable[[Parts, Status, Part], str]] | None = None  # sentence over seeds
    replicate: bool = False  # one seed is a sample, not a subject: beside a verdict over all it has none of its own


def judge(parts: Sequence[Part]) -> tuple[Status, Part]:
    """The outcome of parts that must all hold, and the part it hangs on.

    >>> judge([Part("a", 3, 2, 4, margin=0.5), Part("b", 1, 0, 2, margin=0.5)])[0]
    'undecided'
    """
    failing = [part for part in parts if part.status == "fails"]
    if failing:
        return "fails", min(failing, key=lambda part: part.reach)
    open_ones = [part for part in parts if part.status == "undecided"]
    if open_ones:  # those without a reason first, the one furthest from its margin before the others
        order = [(bool(p.reason), p.lead if math.isfinite(p.lead) else math.inf) for p in open_ones]
        return "undecided", open_ones[order.index(min(order))]
    telling = [part for part in parts if not part.guard] or parts
    return "holds", min(telling, key=lambda part: part.lead)


def pool(findings: Sequence[Finding], refusal: str = "") -> Finding:
    """One finding over several seeds: each part's mean over seeds with its t interval (from three seeds on).

    `refusal` says why the seeds cannot be judged together, and leaves the claim open.
    """
    first = findings[0]
    named = [by_name(finding.parts) for finding in findings]
    parts = [_pooled([mine[name] for mine in named]) for name in named[0] if all(name in mine for mine in named)]
    if refusal:
        parts = [replace(part, reason=refusal) if math.isfinite(part.margin) else part for part in parts]
    details = {"step": first.details["step"]} if "step" in first.details and not refusal else {}
    sentence = first.several(findings) if first.several else first.sentence
    return replace(first, parts=parts, sentence=sentence, details=details, scope=ONE_MODEL, until=None)


def _pooled(parts: Sequence[Part]) -> Part:
    """The mean over seeds; a test against random subspaces must be passed by every seed, so its largest p counts."""
    first = parts[0]
    effects = [part.effect for part in parts if math.isfinite(part.effect)]
    if not effects:
        return first
    centre = sum(effects) / len(effects)
    few = len(effects) < FEWEST_SEEDS
    reason = f"it was measured in {len(effects)} seeds and a general claim needs {FEWEST_SEEDS}" if few else ""
    half, p = (math.nan, math.nan) if few else t_interval(effects, looks=first.looks)
    tested = any(part.tested for part in parts)
    if tested:
        tests = [part.p for part in parts if part.tested]
        p = max(tests) if all(math.isfinite(test) for test in tests) else math.nan
    elif first.guard:
        p = math.nan
    low, high = centre - half, centre + half
    if half == 0 and all(math.isfinite(part.low) for part in parts):
        # ranks are coarse: seeds that agree to the last digit say nothing about how far others might lie
        low, high = min(part.low for part in parts), max(part.high for part in parts)
        p = max(part.p for part in parts)
    reason = reason if first.needed else ""
    return replace(first, effect=centre, low=low, high=high, p=p, tested=tested, reason=reason)


def t_interval(values: Sequence[float], *, looks: int = 1) -> tuple[float, float]:
    """Half-width of the 95 % t interval of the mean (of `looks` such means at once), and the one-sided p of a mean ≤ 0.

    >>> half, p = t_interval([1.0, 2.0, 3.0])
    >>> round(half, 3), round(p, 4)
    (2.484, 0.0371)
    """
    n = len(values)
    centre = sum(values) / n
    error = math.sqrt(sum((v - centre) ** 2 for v in values) / (n - 1) / n)
    return t_quantile(n - 1, among(looks)) * error, t_tail(centre, error, degrees=n - 1)


def left_open(parts: dict[str, Part], *, reason: str) -> dict[str, Part]:
    """Parts that decide nothing, over several seeds neither; as they are where there is no reason."""
    return {name: replace(p, reason=reason or p.reason) if p.needed else p for name, p in parts.items()}


def agreement(parts: Sequence[Part], name: str, *, what: str) -> Part:
    """One part for several that should agree: the weakest where all hold or all fail, else undecided with the count.

    `what` names them in the plural.
    """
    statuses = [part.status for part in parts]
    status, binding = judge(parts)
    holding = statuses.count("holds")
    mixed = holding and "fails" in statuses
    reason = binding.reason
    if mixed:
        reason = f"it holds in {holding} and fails in {statuses.count('fails')} of {len(parts)} {what}"
    if status == "fails" and not mixed and "undecided" in statuses:
        reason = f"it is undecided in {statuses.count('undecided')} of {len(parts)} {what}"
    return replace(binding, name=name, reason=reason, needed=True)


def span(part: Part) -> str:
    """A number with its interval, as it is read in a sentence.

    >>> span(Part("", 3.14159, 3.0, 3.3))
    '3.14 [3, 3.3]'
    """
    known = math.isfinite(part.low) and math.isfinite(part.high)
    return figure(part.effect) + (f" [{figure(part.low)}, {figure(part.high)}]" if known else "")


def outcome(status: Status, part: Part) -> str:
    """How an effect lies to its margin, as the end of a sentence.

    >>> outcome("fails", Part("a", 0.1, 0.0, 0.2, margin=0.5))
    'short of the margin of 0.5'
    """
    margin = f"the margin of {figure(part.margin)}"
    if not math.isfinite(part.low):
        return f"without an interval to hold against {margin}"
    if part.low > part.margin:
        lucky = status == "undecided" and part.tested and not part.p <= ALPHA
        doubt = f", but random subspaces do as well too often (p = {figure(part.p)})" if lucky else ""
        return f"beyond {margin}{doubt}"
    return f"short of {margin}" if part.high < part.margin else f"with {margin} inside the interval"


# -- verdicts ----------------------------------------------------------------------------------------------------------

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
    of: Callable[[Study], Mapping[str, Any]],
) -> Callable[[Callable[[Any], Finding]], Claim]:
    """Declare a claim: the statement, where it comes from, the metrics it reads, its margin.

    The function returns a finding about one of what `of` finds in a study, by subject: its `models`, their `stacks`,
    all models together (`whole`). Where that is `Missing`, the finding says so.
    """

    def declare(function: Callable[[Any], Finding]) -> Claim:
        def of_each(study: Study) -> dict[str, Finding]:
            return {subject: judged(function, given, margin=margin) for subject, given in of(study).items()}

        words = inspect.cleandoc(function.__doc__ or "")
        DECLARED[name] = Claim(name, statement, source, tuple(metrics), margin, of_each, words, function.__module__)
        return DECLARED[name]

    return declare


def judged(function: Callable[[Any], Finding], given: Any, *, margin: float) -> Finding:
    """What the function found, or a finding that says what is missing.

    Of evidence that can be `ended` at a step it can be asked for again with nothing after that step.
    """
    try:
        if isinstance(given, Missing):
            raise given
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
    measured = [part for part in needed if part.measured]
    # where the binding part has no number, the weakest of those that have one is told
    shown = binding if binding.measured or not measured else judge(measured)[1]
    doubt = binding.reason if status == "undecided" else finding.doubt(parts) if status == "holds" else ""
    told = finding.sentence(parts, shown.status, shown) if shown.measured or not doubt else ""
    told += f"; {finding.note}" if told and finding.note else ""
    details: dict[str, Any] = {"parts": [part.record() for part in parts.values()]}
    if finding.aspects is not None:
        details["aspects"] = {}
        for aspect, names in finding.aspects.items():
            if there := [parts[n] for n in names if n in parts]:
                decided, part = judge(there)
                details["aspects"][aspect] = {**part.record(), "status": decided}
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
