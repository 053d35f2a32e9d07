"""What a claim is: a statement of the literature and a test on the results table that returns a verdict.

A claim consists of parts, each an effect with its interval and a margin to exceed. A part holds when its 95 %
interval lies wholly beyond the margin (and, where random draws test it, p ≤ .05), fails when the interval lies wholly
short of it, and is undecided otherwise. A claim holds when every needed part does, and fails when one does: an
intersection–union test (Berger 1982), which needs no correction for the number of parts. A claim that holds when any
one of several parts does needs that correction: `looks` of such a part is the number of parts.

To add a claim, write a function under `@claim(...)` that returns a `Finding`, in a module listed in
`claims.catalogue`, which evaluates all claims, for each seed and over all seeds.

Keys of `Verdict.details`: `parts` (each effect with interval, margin, p and status), `aspects` (sub-claims with a
status of their own), `proxy`, `rank`, `fit`, `pooled` (whether it is over several seeds), `seed` or `seeds` (then
`per_seed` too), `learned` (by model: whether it did, see `claims.engine.learning`), `measured_again` (by model: seeds
left out because they repeat the run of another seed), `missing` (the table has no rows to test the claim on), and what
a claim adds for the report (`cells`, `steps`, `layers`, …).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from anisoscope.claims.engine.evidence import Missing, NotHere, Study, figure
from anisoscope.claims.engine.learning import Gate
from anisoscope.claims.engine.walk import Walk
from anisoscope.results.quantity import FEWEST_FOLDS, FEWEST_SEEDS, Bounds, Quantity, t_interval

Status = Literal["holds", "fails", "undecided"]
About = Literal["training", "initialisation", "measurement"]  # what a claim is about; training has a gate
ALPHA = 0.05
ONE_MODEL = "for this model"
CORRELATION = (-1.0, 1.0)  # bounds of a correlation or a cosine
SHARE = (None, 1.0)  # bounds of an explained share
ONE_SEED = f"one seed decides nothing: seeds are the replicates here, and {FEWEST_SEEDS} are needed"
UNDETERMINED = "the proxy is not determined at this rank"
TOO_FEW = f"too few contexts were tested: an interval needs them in {FEWEST_FOLDS} of the 8 folds at least"


@dataclass(frozen=True)
class Part:
    """One effect and the margin it is compared with; a part without a margin is descriptive.

    >>> Part("normal", 3.0, 2.5, 3.5, margin=0.5).status
    'holds'
    """

    name: str
    effect: float
    low: float = math.nan
    high: float = math.nan
    margin: float = math.nan
    p: float = math.nan  # describes, unless the part is `tested`
    needed: bool = True
    tested: bool = False  # holds only if also p ≤ .05
    guard: bool = False  # a precondition of the claim: when all parts hold, the verdict reports another one
    reason: str = ""  # if not empty, why the part stays undecided whatever its interval
    looks: int = 1  # number of parts from which the best is chosen; widens the interval (Bonferroni)
    below: bool = False  # whether the effect must lie below its margin instead of beyond it
    bounds: Bounds = (None, None)  # possible values; the interval is clipped to them but keeps the effect
    degrees: float = math.nan  # of freedom of the interval, for error control; NaN: not known
    ratio: bool = False  # seeds are pooled as logarithms
    walk: Walk | None = field(default=None, repr=False, compare=False)  # what it was held against, see `against`

    def __post_init__(self) -> None:
        least, most = self.bounds
        if least is not None and self.low < least:
            object.__setattr__(self, "low", min(least, self.effect))
        if most is not None and self.high > most:
            object.__setattr__(self, "high", max(most, self.effect))

    @classmethod
    def of(cls, name: str, quantity: Quantity, *, margin: float = math.nan, **more: Any) -> Part:
        """A part from a quantity; it has a p only where a test is given, because else the interval decides alone."""
        low, high = quantity.interval_among(more.get("looks", 1))
        if math.isfinite(margin) and not math.isfinite(quantity.value):
            more.setdefault("reason", f"{name} has no number here")
        if quantity.thin and math.isfinite(margin):
            more.setdefault("reason", TOO_FEW)
        more.setdefault("degrees", float(len(quantity.live) - 1) if quantity.live else math.nan)
        return cls(name, quantity.value, low, high, margin=margin, **more)

    @classmethod
    def describe_all(cls, numbers: Mapping[str, Quantity | float], *, bounds: Bounds = (None, None)) -> list[Part]:
        """Descriptive parts, by name: reported, not tested."""
        parts = []
        for name, number in numbers.items():
            quantity = number if isinstance(number, Quantity) else Quantity.constant(number)
            ends = (math.nan, math.nan) if quantity.fixed else quantity.interval()
            parts.append(cls(name, quantity.value, *ends, needed=False, bounds=bounds))
        return parts

    @classmethod
    def absent(cls, name: str, reason: str | Missing, *, margin: float) -> Part:
        """A part that could not be measured, undecided for this reason."""
        return cls(name, math.nan, margin=margin, reason=str(reason))

    @property
    def measured(self) -> bool:
        return math.isfinite(self.effect)

    def against(self, walk: Walk) -> Part:
        """The part, left open if it lies beyond its margin and walks without a direction do as well too often."""
        return replace(self, walk=walk, reason=self.reason or (walk.doubt if self.lead > 0 else ""))

    def __neg__(self) -> Part:
        """The part with the sign of its effect reversed."""
        return replace(self, effect=-self.effect, low=-self.high, high=-self.low)

    @property
    def lead(self) -> float:
        """Distance beyond the margin of the nearer end of the interval; of the effect where there is no interval."""
        near = self.high if self.below else self.low
        near = near if math.isfinite(near) else self.effect
        return self.margin - near if self.below else near - self.margin

    @property
    def standing(self) -> tuple[int, float]:
        """The order of parts of which the best counts: by status, then by the lead over the margin."""
        return ("fails", "undecided", "holds").index(self.status), self.lead if math.isfinite(self.lead) else -math.inf

    @property
    def reach(self) -> float:
        """Distance beyond the margin of the farther end of the interval."""
        return self.margin - self.low if self.below else self.high - self.margin

    @property
    def status(self) -> Status:
        if self.reach < 0:
            return "fails" if not self.reason else "undecided"
        sure = math.isfinite(self.low) and self.lead > 0
        if sure and not self.reason and (not self.tested or self.p <= ALPHA):
            return "holds"
        return "undecided"

    def __str__(self) -> str:
        """The effect with its interval.

        >>> str(Part("", 3.14159, 3.0, 3.3))
        '3.14 [3, 3.3]'
        """
        known = math.isfinite(self.low) and math.isfinite(self.high)
        return self.number + (f" [{figure(self.low)}, {figure(self.high)}]" if known else "")

    @property
    def number(self) -> str:
        """The effect as text."""
        return figure(self.effect)

    @property
    def outcome(self) -> str:
        """How the effect compares with its margin, as the end of a sentence.

        >>> Part("a", 0.1, 0.0, 0.2, margin=0.5).outcome
        'short of the margin of 0.5'
        """
        margin = f"the margin of {figure(self.margin)}"
        if not math.isfinite(self.low):
            return f"without an interval to hold against {margin}"
        if self.low > self.margin:
            lucky = self.status == "undecided" and self.tested and not self.p <= ALPHA
            doubt = f", but random subspaces do as well too often (p = {figure(self.p)})" if lucky else ""
            return f"beyond {margin}{doubt}"
        return f"short of {margin}" if self.high < self.margin else f"with {margin} inside the interval"

    def record(self) -> dict[str, Any]:
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("bounds", "walk")}
        return {**kept, "status": self.status if math.isfinite(self.margin) else None}


Parts = Mapping[str, Part]
Sentence = Callable[[Parts, Part], str]


def _by_name(parts: Sequence[Part]) -> dict[str, Part]:
    return {part.name: part for part in parts}


@dataclass(frozen=True)
class Finding:
    """The result of a claim on one subject: its parts, and functions that word and judge them."""

    parts: Sequence[Part]
    sentence: Sentence  # of all parts and the binding one
    details: dict[str, Any] = field(default_factory=dict)  # for the verdict's details
    settle: Callable[[dict[str, Part]], dict[str, Part]] = dict  # combines or amends parts before they are judged
    doubt: Callable[[Parts], str] = lambda parts: ""  # a reason that turns "holds" into "undecided"
    left_open: str = ""  # a reason that leaves all needed parts undecided, also when pooled
    # groups of parts that also get a status of their own; None: the verdict has no key `aspects`
    aspects: Mapping[str, tuple[str, ...]] | None = field(default_factory=dict)
    scope: str = ONE_MODEL  # what a verdict on a single seed is about
    until: Callable[[int], Finding] | None = None  # evaluates again without data after a step
    note: str = ""  # appended to the sentence
    several: Callable[[Sequence[Finding]], Sentence] | None = None  # sentence over seeds
    one_seed: str = ""  # why a single seed stays open, whatever its interval over contexts: trainings are the samples
    gate: Gate = field(default_factory=Gate)  # whether the models learned, for claims about training


def judge(parts: Sequence[Part]) -> tuple[Status, Part]:
    """The status of parts that must all hold, and the part that decides it (the binding part).

    >>> judge([Part("a", 3, 2, 4, margin=0.5), Part("b", 1, 0, 2, margin=0.5)])[0]
    'undecided'
    """

    def urgency(part: Part) -> tuple[bool, float]:
        """Parts without a reason first, then the one that leads its margin least."""
        return bool(part.reason), part.lead if math.isfinite(part.lead) else math.inf

    failing = [part for part in parts if part.status == "fails"]
    if failing:
        return "fails", min(failing, key=lambda part: part.reach)
    undecided = [part for part in parts if part.status == "undecided"]
    if undecided:
        return "undecided", min(undecided, key=urgency)
    effects = [part for part in parts if not part.guard] or parts
    return "holds", min(effects, key=lambda part: part.lead)


def pool(findings: Sequence[Finding], refusal: str = "") -> Finding:
    """One finding over several seeds: each part's mean over seeds with its t interval (from three seeds on).

    `refusal`, if not empty, is the reason why the seeds cannot be pooled; all parts are then undecided.
    """
    first = findings[0]
    named = [_by_name(finding.parts) for finding in findings]
    parts = [_pooled([seed[name] for seed in named]) for name in named[0] if all(name in seed for seed in named)]
    if refusal:
        parts = [replace(part, reason=refusal) if math.isfinite(part.margin) else part for part in parts]
    shared = (name for name, value in first.details.items() if all(f.details.get(name) == value for f in findings))
    details = {name: first.details[name] for name in shared if name != "missing" and not (refusal and name == "step")}
    sentence = first.several(findings) if first.several else first.sentence
    return replace(first, parts=parts, sentence=sentence, details=details, scope=ONE_MODEL, until=None, one_seed="")


def _pooled(parts: Sequence[Part]) -> Part:
    """The mean of a part over seeds; every seed must pass a test against random subspaces, so the largest p is kept."""
    first = parts[0]
    effects = [part.effect for part in parts if math.isfinite(part.effect)]
    if not effects:
        return first
    if first.ratio and all(part.effect > 0 for part in parts):
        logs = _pooled([_mapped(replace(part, ratio=False), math.log) for part in parts])
        return replace(_mapped(logs, math.exp), ratio=True, p=math.nan)
    centre = sum(effects) / len(effects)
    few = len(effects) < FEWEST_SEEDS
    reason = f"it was measured in {len(effects)} seeds and a general claim needs {FEWEST_SEEDS}" if few else ""
    if not few and all(part.reason.startswith(UNDETERMINED) for part in parts):
        reason = first.reason  # seeds are fitted on the same contexts
    half, p = (math.nan, math.nan) if few else t_interval(effects, looks=first.looks)
    tested = any(part.tested for part in parts)
    if tested:
        tests = [part.p for part in parts if part.tested]
        p = max(tests) if all(math.isfinite(test) for test in tests) else math.nan
    elif first.guard or all(math.isnan(part.p) for part in parts):
        p = math.nan
    low, high, degrees = centre - half, centre + half, float(len(effects) - 1)
    if half == 0 and all(math.isfinite(part.low) for part in parts):
        # rank correlations are coarse: seeds may be exactly equal, which would give an interval of width 0
        low, high = min(part.low for part in parts), max(part.high for part in parts)
        p, degrees = max(part.p for part in parts), first.degrees
    reason = reason if first.needed else ""
    made = replace(first, effect=centre, low=low, high=high, p=p, tested=tested, reason=reason, degrees=degrees)
    walks = [part.walk for part in parts if part.walk is not None and part.walk.shared]
    return made.against(Walk.joined(walks)) if walks else made


def _mapped(part: Part, function: Callable[[float], float]) -> Part:
    """The part with its effect and interval on another scale; an end outside of that scale is not known."""

    def end(value: float) -> float:
        return function(value) if function is math.exp or value > 0 else math.nan

    return replace(part, effect=end(part.effect), low=end(part.low), high=end(part.high))


def agreement(parts: Sequence[Part], name: str, *, what: str) -> Part:
    """One part for several that should agree: the binding one if all hold or all fail, else undecided with the counts.

    `what` is a plural noun for the parts.
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


def agreements(kinds: Mapping[str, str], parts: Parts) -> dict[str, Part]:
    """The agreement of the parts named "kind: …" for each kind (with its plural noun), in front of all described."""
    made = {}
    for kind, what in kinds.items():
        if members := [part for name, part in parts.items() if name.startswith(f"{kind}: ")]:
            made[kind] = agreement(members, kind, what=what)
    return {**made, **descriptive(parts)}


def descriptive(parts: Parts) -> dict[str, Part]:
    """The parts as descriptive ones."""
    return {name: replace(part, needed=False) for name, part in parts.items()}


# -- verdicts ----------------------------------------------------------------------------------------------------------

DECLARED: dict[str, Claim] = {}  # by name
_NUMBERS = ("effect", "low", "high", "p", "margin", "p_decision", "p_holm", "q")


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
    p_decision: float = math.nan  # of the decision itself; NaN where it is undecided (see error_control)
    p_holm: float = math.nan  # adjusted over the grid of claims × models, family-wise (Holm)
    q: float = math.nan  # the same by false discovery rate (Benjamini–Yekutieli)
    below: bool = False  # whether the effect must lie below its margin

    def __post_init__(self) -> None:
        object.__setattr__(self, "details", json_safe({"pooled": False, "missing": False, **self.details}))

    def to_dict(self) -> dict[str, Any]:
        """A dictionary for JSON; NaN and infinities become null."""
        return json_safe(asdict(self))


def verdicts_to_dicts(verdicts: Iterable[Verdict]) -> list[dict[str, Any]]:
    """Verdicts as dictionaries for verdicts.json."""
    return [verdict.to_dict() for verdict in verdicts]


def verdicts_from_dicts(records: Iterable[Mapping[str, Any]]) -> list[Verdict]:
    """Verdicts read back from verdicts.json."""

    def number(value: float | None) -> float:
        return math.nan if value is None else float(value)

    return [Verdict(**{**record, **{name: number(record.get(name)) for name in _NUMBERS}}) for record in records]


def json_safe(value: Any) -> Any:
    """A value for JSON: NaN and infinities become None, tuples lists, keys strings, floats eight significant digits.

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
    """A declared claim; `function` maps a study to a finding for each subject.

    Without rows of the first of `metrics` the claim counts as not measured.
    """

    name: str
    statement: str
    source: str
    metrics: tuple[str, ...]
    margin: float
    function: Callable[[Study], dict[str, Finding]]
    description: str
    module: str  # where the claim is declared
    about: About


def claim(
    *, of: Callable[[Study], Mapping[str, Any]], source: str, metrics: Iterable[str], margin: float, about: About
) -> Callable[[Callable[[Any], Finding]], Claim]:
    """Declare a claim under the name of its function: its source, the metrics it reads, its margin, its subject.

    A claim about `training` counts only models that learned (`claims.engine.learning`); one about `initialisation`
    (untrained blocks too) or about the `measurement` itself counts any. The first paragraph of the function's docstring
    is the statement, the rest is the description on pages. `of` splits a study into subjects (`models`, their `stacks`,
    or the `whole` study), and the function is called for each. If it raises `Missing`, the finding reports what is
    missing.
    """

    def declare(function: Callable[[Any], Finding]) -> Claim:
        def of_each(study: Study) -> dict[str, Finding]:
            gated = about == "training"
            return {name: judged(function, given, margin=margin, gated=gated) for name, given in of(study).items()}

        name, (statement, _, words) = function.__name__, inspect.cleandoc(function.__doc__ or "").partition("\n\n")
        words_of = (name, " ".join(statement.split()), source, tuple(metrics), margin)
        DECLARED[name] = Claim(*words_of, of_each, words, function.__module__, about)
        return DECLARED[name]

    return declare


def judged(function: Callable[[Any], Finding], given: Any, *, margin: float, gated: bool = False) -> Finding:
    """The finding of the function, or one that reports what is missing; `gated`: only of models that learned.

    Evidence with a method `ended(step)` gives a finding with `until`, which evaluates again without later steps.
    """
    gate = Gate.of(given) if gated else Gate()
    try:
        if isinstance(given, Missing):
            raise given
        finding = function(gate.open_to(given) if gated else given)
    except Missing as gap:
        finding = unmeasured(gap, margin=margin)
        if gate.lost:  # the table has such models, but they did not learn
            finding = replace(finding, details={**finding.details, "missing": False})
    finding = replace(finding, gate=gate) if gated else finding
    if not hasattr(given, "ended"):
        return finding
    return replace(finding, until=lambda step: judged(function, given.ended(step), margin=margin, gated=gated))


def unmeasured(gap: Missing, *, margin: float) -> Finding:
    """A finding without numbers, which reports what the table lacks."""
    part = Part.absent("missing", str(gap), margin=margin)
    return Finding((part,), lambda parts, part: part.reason, {"missing": isinstance(gap, NotHere)})


def verdict_of(
    name: str,
    statement: str,
    finding: Finding,
    *,
    subject: str,
    scope: str = ONE_MODEL,
    about: Mapping[str, Any] | None = None,
) -> Verdict:
    """The verdict on a finding, with its sentence; `about` is added to the details."""
    parts = finding.settle(_by_name(finding.parts))
    if left_open := finding.gate.reason or finding.left_open or finding.one_seed:
        parts = {name: replace(p, reason=left_open) if p.needed and p.measured else p for name, p in parts.items()}
    needed = [part for part in parts.values() if part.needed]
    status, binding = judge(needed)
    measured = [part for part in needed if part.measured]
    # if the binding part has no number, report the weakest part that has one
    shown = binding if binding.measured or not measured else judge(measured)[1]
    doubt = binding.reason if status == "undecided" else finding.doubt(parts) if status == "holds" else ""
    text = finding.sentence(parts, shown) if shown.measured or not doubt else ""
    notes = "; ".join(filter(None, (finding.note, finding.gate.note)))
    text += f"; {notes}" if text and notes else ""
    doubt += f"; {finding.gate.note}" if not text and finding.gate.left_out else ""
    details: dict[str, Any] = {"parts": [part.record() for part in parts.values()]}
    if finding.aspects is not None:
        groups = {aspect: [parts[n] for n in names if n in parts] for aspect, names in finding.aspects.items()}
        judged_groups = {aspect: judge(members) for aspect, members in groups.items() if members}
        details["aspects"] = {aspect: {**p.record(), "status": s} for aspect, (s, p) in judged_groups.items()}
    details |= {"learned": finding.gate.records()} if finding.gate.models else {}
    details |= {**(about or {}), **finding.details}
    why = _sentence(text, doubt, scope=scope, repeats=(about or {}).get("measured_again", {}))
    shown_of = ("effect", "low", "high", "margin", "below")
    numbers: dict[str, Any] = {number: getattr(shown, number) for number in shown_of}
    numbers["p"] = max((part.p for part in needed if part.tested and math.isfinite(part.p)), default=math.nan)
    decided: Status = "undecided" if doubt else status
    return Verdict(name, statement, decided, **numbers, why=why, scope=scope, subject=subject, details=details)


def _sentence(text: str, doubt: str, *, scope: str, repeats: Mapping[str, list[str]]) -> str:
    """One sentence: scope, result, the doubt that leaves it undecided, and notes by model on repeated seeds."""
    text = "; undecided because ".join(clause.rstrip(".") for clause in (text, doubt) if clause)
    remarks = {model: "; ".join(notes) for model, notes in repeats.items()}
    different = list(dict.fromkeys(remarks.values()))
    for note in different:
        models = " and ".join(model for model, remark in remarks.items() if remark == note)
        text += f"; {note}" if len(different) == 1 else f"; in {models} {note}"
    text = f"{scope}: {text}" if "seed" in scope else text
    return text[0].upper() + text[1:].rstrip(".") + "."
