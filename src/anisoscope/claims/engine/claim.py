"""A claim of the literature = a statement and a test over the results table that ends in a verdict.

Adding one is one function that takes a study (the runs of one seed, by model) and returns a finding for each subject,
under `@claim(...)`. Seeds are this file's business: every seed is judged by itself and, where there are several, all of
them together.

What `Verdict.details` holds: `parts` (each effect with interval, margin, p and status), `aspects` (sub-claims with a
status of their own), `proxy`, `rank`, `fit`, `pooled` (whether it speaks for several seeds), `seed` or `seeds` (then
`per_seed` too), `measured_again` (seeds left out because they are another seed's run, by model), `missing` (the table
has nothing that the claim could be tested on), and what the claim adds for the report (`cells`, `steps`, `layers`, …).
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from anisoscope.claims.engine.evidence import Missing, NotHere, Run, Study, studies
from anisoscope.claims.engine.part import ONE_MODEL, Finding, Part, Status, by_name, judge, pool
from anisoscope.claims.engine.seeds import at_one_step, remark
from anisoscope.errors import unknown_name
from anisoscope.results.table import Table

# in the order in which a reader meets them
_FILES = (
    "revisiting.tangent",
    "revisiting.training",
    "revisiting.frequency",
    "revisiting.comparison",
    "shape.depth",
    "shape.phases",
    "shape.clusters",
    "shape.estimators",
    "shape.ablation",
    "inherent.modalities",
    "inherent.drift",
    "inherent.attention",
    "inherent.untrained",
    "inherent.sharpness",
)
_REGISTRY: dict[str, Claim] = {}
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
    """A declared claim; calling it on a study gives a finding for each subject.

    The first of `metrics` is the one without which there is nothing to test.
    """

    name: str
    statement: str
    source: str
    metrics: tuple[str, ...]
    margin: float
    function: Callable[[Study], dict[str, Finding]]
    description: str


def claim(
    name: str, *, statement: str, source: str, metrics: Iterable[str], margin: float
) -> Callable[[Callable[[Study], dict[str, Finding]]], Claim]:
    """Declare a claim about a whole study: the statement, where it comes from, the metrics it reads, its margin."""

    def declare(function: Callable[[Study], dict[str, Finding]]) -> Claim:
        words = inspect.cleandoc(function.__doc__ or "")
        declared = Claim(name, statement, source, tuple(metrics), margin, function, words)
        _REGISTRY[name] = declared
        return declared

    return declare


def model_claim(name: str, **declaration: Any) -> Callable[[Callable[[Run], Finding]], Claim]:
    """Declare a claim about each model by itself."""

    def declare(function: Callable[[Run], Finding]) -> Claim:
        def every_model(study: Study) -> dict[str, Finding]:
            return {model: attempt(function, run, margin=declaration["margin"]) for model, run in study.items()}

        every_model.__doc__, every_model.__module__ = function.__doc__, function.__module__
        return claim(name, **declaration)(every_model)

    return declare


def attempt(function: Callable[[Any], Finding], given: Any, *, margin: float) -> Finding:
    """What the function found, or a finding that says what is missing."""
    try:
        return function(given)
    except Missing as gap:
        return missing(gap, margin=margin)


def missing(gap: Missing, *, margin: float) -> Finding:
    """A finding without numbers."""
    part = Part.absent("missing", str(gap), margin=margin)
    return Finding((part,), lambda parts, status, part: part.reason, {"missing": isinstance(gap, NotHere)})


def claims() -> dict[str, Claim]:
    """Every declared claim by name, in reading order."""
    for name in _FILES:
        importlib.import_module(f"anisoscope.claims.{name}")
    # whoever imported one of the files first must not change the order
    return dict(sorted(_REGISTRY.items(), key=lambda item: _place(item[1])))


def _place(declared: Claim) -> int:
    home = declared.function.__module__.removeprefix("anisoscope.claims.")
    return _FILES.index(home) if home in _FILES else len(_FILES)


def evaluate_claims(
    table: Table,
    names: Iterable[str] | None = None,
    *,
    proxy: str = "semi_nmf",
    rank: int | None = None,
    fit: str = "refit",
) -> list[Verdict]:
    """Test claims (default: all) on a table; `rank` defaults to the most common one of the table.

    With several seeds of a model the verdict over all of them comes first and then that of each seed.
    """
    chosen = _chosen(names)
    series = studies(table, {m for c in chosen for m in c.metrics}, proxy=proxy, rank=rank, fit=fit)
    return [verdict for declared in chosen for verdict in _verdicts(declared, series)]


def _chosen(names: Iterable[str] | None) -> list[Claim]:
    known = claims()
    if names is None:
        return list(known.values())
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if name not in known:
            raise unknown_name("claim", name, known)
    return [known[name] for name in names]


def _verdicts(declared: Claim, series: list[Study]) -> list[Verdict]:
    found: dict[str, list[tuple[int, Finding]]] = {}
    if not series:
        nothing = missing(NotHere("rows", "measure a model first"), margin=declared.margin)
        return [_verdict(declared, "", nothing, scope=ONE_MODEL, about={})]
    for i, study in enumerate(series):
        for subject, finding in declared.function(study).items():
            runs = _runs(study, subject)
            found.setdefault(subject, []).append((i, _marked(declared, finding, runs)))
    verdicts = []
    for subject, findings in found.items():
        alone = len(findings) == 1
        findings, refusal = _together(findings)
        single = [_of_one(declared, subject, f, study=series[i], alone=alone) for i, f in findings]
        if not alone:
            verdicts.append(_over_seeds(declared, subject, findings, series=series, single=single, refusal=refusal))
        verdicts += single if alone or not findings[0][1].replicate else []
    return verdicts


def _together(findings: list[tuple[int, Finding]]) -> tuple[list[tuple[int, Finding]], str]:
    """The findings that have numbers at one step, and why not where that cannot be."""
    usable = [(i, finding) for i, finding in findings if _has_numbers(finding)]
    if len(usable) < 2:
        return findings, ""
    moved, refusal = at_one_step([finding for _, finding in usable])
    at = dict(zip([i for i, _ in usable], moved, strict=True))
    return [(i, at.get(i, finding)) for i, finding in findings], refusal


def _has_numbers(finding: Finding) -> bool:
    return any(part.measured for part in finding.parts)


def _marked(declared: Claim, finding: Finding, runs: list[Run]) -> Finding:
    """What could not be tested is missing altogether where the metric it rests on was not measured at all."""
    if finding.details.get("missing") is not False or any(run.measured(declared.metrics[0]) for run in runs):
        return finding
    return replace(finding, details={**finding.details, "missing": True})


def _of_one(declared: Claim, subject: str, finding: Finding, *, study: Study, alone: bool) -> Verdict:
    seed = _seed(study, subject)
    scope = finding.scope if alone else f"for seed {seed}"
    about = {**_about(study), "seed": seed, "measured_again": _again([study], subject)}
    return _verdict(declared, subject, finding, scope=scope, about=about)


def _over_seeds(
    declared: Claim,
    subject: str,
    findings: list[tuple[int, Finding]],
    *,
    series: list[Study],
    single: list[Verdict],
    refusal: str,
) -> Verdict:
    """One verdict over the seeds in which the claim could be looked at."""
    kept = ("status", "effect", "low", "high", "p")
    usable = [(i, f) for i, f in findings if _has_numbers(f)] or findings
    seeds = [_seed(series[i], subject) for i, _ in usable]
    scope = f"over {len(usable)} seeds" if len(usable) > 1 else f"for seed {seeds[0]}"
    finding = pool([f for _, f in usable], refusal) if len(usable) > 1 else usable[0][1]
    about = {**_about(series[usable[0][0]]), "pooled": True, "seeds": seeds}
    about["measured_again"] = _again([series[i] for i, _ in findings], subject)
    about["missing"] = all(f.details.get("missing") for _, f in findings)
    about["per_seed"] = [{"seed": v.details["seed"], **{name: getattr(v, name) for name in kept}} for v in single]
    return _verdict(declared, subject, finding, scope=scope, about=about)


def _seed(study: Study, subject: str) -> int | None:
    return _runs(study, subject)[0].seed


def _runs(study: Study, subject: str) -> list[Run]:
    """The model that a verdict is about (or the model of the stack that it is about), or all of them."""
    named = [model for model in study if subject == model or subject.startswith(f"{model}, ")]
    return [study[max(named, key=len)]] if named else list(study.values())


def _again(series: list[Study], subject: str) -> dict[str, list[str]]:
    """What to say of seeds that were left out, by model, for the models that a verdict may rest on."""
    found: dict[str, list[str]] = {}
    for study in series:
        for run in _runs(study, subject):
            if run.again:
                found.setdefault(run.model, []).append(remark(run.seed, run.again))
    return found


def _about(study: Study) -> dict[str, Any]:
    settings = next(iter(study.values())).settings
    return {"proxy": settings.proxy, "rank": settings.rank, "fit": settings.fit}


def _verdict(declared: Claim, subject: str, finding: Finding, *, scope: str, about: dict[str, Any]) -> Verdict:
    parts = finding.settle(by_name(finding.parts))
    needed = [part for part in parts.values() if part.needed]
    status, binding = judge(needed)
    shown = _shown(needed, binding)
    doubt = binding.reason if status == "undecided" else finding.doubt(parts) if status == "holds" else ""
    told = finding.sentence(parts, shown.status, shown) if shown.measured else ""
    told += f"; {finding.note}" if told and finding.note else ""
    details = {"parts": [part.record() for part in parts.values()], "aspects": _aspects(finding, parts)}
    return Verdict(
        claim=declared.name,
        statement=declared.statement,
        status="undecided" if doubt else status,
        effect=shown.effect,
        low=shown.low,
        high=shown.high,
        p=max((part.p for part in needed if math.isfinite(part.p)), default=math.nan),
        margin=shown.margin,
        why=_sentence(told, doubt, scope=scope, again=about.get("measured_again", {})),
        scope=scope,
        subject=subject,
        details={**details, **about, **finding.details},
    )


def _shown(needed: list[Part], binding: Part) -> Part:
    """The part whose numbers are told: the binding one, or the weakest measured one where that has no number."""
    measured = [part for part in needed if part.measured]
    return binding if binding.measured or not measured else judge(measured)[1]


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


def _aspects(finding: Finding, parts: Mapping[str, Part]) -> dict[str, Any]:
    """Sub-claims with an outcome of their own."""
    found = {}
    for name, names in finding.aspects.items():
        there = [parts[n] for n in names if n in parts]
        if there:
            status, binding = judge(there)
            found[name] = {**binding.record(), "status": status}
    return found
