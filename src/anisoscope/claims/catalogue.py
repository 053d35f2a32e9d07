"""All claims, and their evaluation on a table: every seed is judged by itself and, of several, all together.

A mean over seeds that end at different steps is taken at the last step that all of them have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from anisoscope.claims.engine.claim import DECLARED, Claim, Finding, Verdict, missing, pool, verdict_of
from anisoscope.claims.engine.evidence import NotHere, Run, Study, listed, studies
from anisoscope.claims.inherent import attention, drift, intervention, modalities
from anisoscope.claims.revisiting import comparison, tangent, training
from anisoscope.claims.shape import ablation, depth, phases
from anisoscope.errors import unknown_name
from anisoscope.results.query import Table

# in the order in which a reader meets them
_MODULES = (tangent, training, comparison, depth, phases, ablation, modalities, drift, attention, intervention)
Found = list[tuple[int, Finding]]  # by the number of the study


def claims() -> dict[str, Claim]:
    """Every declared claim by name, in reading order."""
    places = {module.__name__: place for place, module in enumerate(_MODULES)}
    return dict(sorted(DECLARED.items(), key=lambda item: places.get(item[1].module, len(places))))


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
    known = claims()
    wanted = list(known) if names is None else [names] if isinstance(names, str) else list(names)
    for name in wanted:
        if name not in known:
            raise unknown_name("claim", name, known)
    chosen = [known[name] for name in wanted]
    series = studies(table, {m for c in chosen for m in c.metrics}, proxy=proxy, rank=rank, fit=fit)
    return [verdict for declared in chosen for verdict in _verdicts(declared, series)]


def _verdicts(declared: Claim, series: list[Study]) -> list[Verdict]:
    if not series:
        nothing = missing(NotHere("rows", "measure a model first"), margin=declared.margin)
        return [verdict_of(declared.name, declared.statement, nothing, subject="", about={})]
    found: dict[str, Found] = {}
    for i, study in enumerate(series):
        for subject, finding in declared.function(study).items():
            first = (run.of(declared.metrics[0]).where(head=None) for run in _runs(study, subject))
            if finding.details.get("missing") is False and not any(map(len, first)):
                # what it rests on was not measured at all
                finding = replace(finding, details={**finding.details, "missing": True})
            found.setdefault(subject, []).append((i, finding))
    verdicts = []
    for subject, findings in found.items():
        alone, refusal = len(findings) == 1, ""
        usable = [(i, finding) for i, finding in findings if _has_numbers(finding)]
        if len(usable) > 1:
            moved, refusal = at_one_step([finding for _, finding in usable])
            at = dict(zip([i for i, _ in usable], moved, strict=True))
            findings = [(i, at.get(i, finding)) for i, finding in findings]
        single = []
        for i, finding in findings:
            seed = _runs(series[i], subject)[0].seed
            about = {**_about(series[i]), "seed": seed, "measured_again": _again([series[i]], subject)}
            scope = finding.scope if alone else f"for seed {seed}"
            words = declared.name, declared.statement, finding
            single.append(verdict_of(*words, subject=subject, scope=scope, about=about))
        if not alone:
            verdicts.append(_over_seeds(declared, subject, findings, series=series, single=single, refusal=refusal))
        verdicts += single if alone or not findings[0][1].replicate else []
    return verdicts


def _has_numbers(finding: Finding) -> bool:
    return any(part.measured for part in finding.parts)


def _over_seeds(
    declared: Claim, subject: str, findings: Found, *, series: list[Study], single: list[Verdict], refusal: str
) -> Verdict:
    """One verdict over the seeds in which the claim could be looked at."""
    kept = ("status", "effect", "low", "high", "p")
    usable = [(i, f) for i, f in findings if _has_numbers(f)] or findings
    seeds = [_runs(series[i], subject)[0].seed for i, _ in usable]
    scope = f"over {len(usable)} seeds" if len(usable) > 1 else f"for seed {seeds[0]}"
    finding = pool([f for _, f in usable], refusal) if len(usable) > 1 else usable[0][1]
    about = {**_about(series[usable[0][0]]), "pooled": True, "seeds": seeds}
    about["measured_again"] = _again([series[i] for i, _ in findings], subject)
    about["missing"] = all(f.details.get("missing") for _, f in findings)
    about["per_seed"] = [{"seed": v.details["seed"], **{name: getattr(v, name) for name in kept}} for v in single]
    return verdict_of(declared.name, declared.statement, finding, subject=subject, scope=scope, about=about)


def _runs(study: Study, subject: str) -> list[Run]:
    """The model that a verdict is about (or the model of the stack that it is about), or all of them."""
    named = [model for model in study if subject == model or subject.startswith(f"{model}, ")]
    return [study[max(named, key=len)]] if named else list(study.values())


def _again(series: list[Study], subject: str) -> dict[str, list[str]]:
    """What to say of seeds that were left out, by model, for the models that a verdict may rest on."""
    found: dict[str, list[str]] = {}
    for run in (run for study in series for run in _runs(study, subject) if run.again):
        named = f"seeds {listed(run.again)} are" if len(run.again) > 1 else f"seed {run.again[0]} is"
        found.setdefault(run.model, []).append(f"{named} the same run as seed {run.seed}, measured again")
    return found


def _about(study: Study) -> dict[str, Any]:
    run = next(iter(study.values()))
    return {"proxy": run.proxy, "rank": run.rank, "fit": run.fit}


def at_one_step(findings: Sequence[Finding]) -> tuple[list[Finding], str]:
    """The findings of the seeds, all at the last step that they share; where there is none, why they cannot be pooled.

    A finding says its step in `details["step"]` and can be asked for again with `until`; those that say none are left
    alone. Step 0 does not count as shared where a seed went on: it is no result of training. A finding at another step
    than the last says so, and so does one whose models ended apart (`details["ends"]`, by model).
    """
    own, found = [_step(finding) for finding in findings], list(findings)
    ends = listed("no step" if step is None else step for step in own)
    apart = f"the seeds end at different steps ({ends}) and share none after step 0 to be compared at"
    while len(steps := {_step(finding) for finding in found}) > 1:
        if None in steps:
            return list(findings), apart
        nearest = min(step for step in steps if step is not None)
        found = [f if _step(f) == nearest or f.until is None else f.until(nearest) for f in found]
        if nearest == 0 or {_step(finding) for finding in found} == steps:
            return list(findings), apart
    note = _mixed([finding.details.get("ends", {}) for finding in found])
    if [_step(finding) for finding in found] != own:
        note = f"step {_step(found[0])} is the last that all {len(found)} seeds have"
    return [replace(finding, note=note) for finding in found] if note else found, ""


def _step(finding: Finding) -> int | None:
    return finding.details.get("step")


def _mixed(ends: list[dict[str, Any]]) -> str:
    """Which models of a claim about several were judged at different steps.

    >>> _mixed([{"m": 200}, {"m": 100}, {"m": None}])
    'the seeds were judged at different steps, those of m at steps 200, 100 and no step'
    """
    told = []
    for name in (name for name in ends[0] if all(name in one for one in ends)):
        steps = ["no step" if one[name] is None else one[name] for one in ends]
        told += [f"those of {name} at steps {listed(steps)}"] if len(set(steps)) > 1 else []
    return f"the seeds were judged at different steps, {' and '.join(told)}" if told else ""
