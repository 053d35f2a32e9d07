"""All claims, and their evaluation on a table: every seed is judged by itself and, of several, all together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from anisoscope.claims.engine.claim import DECLARED, Claim, Verdict, missing, verdict_of
from anisoscope.claims.engine.evidence import NotHere, Run, Study, studies
from anisoscope.claims.engine.part import ONE_MODEL, Finding, pool
from anisoscope.claims.engine.seeds import at_one_step, remark
from anisoscope.claims.inherent import attention, drift, modalities, sharpness, untrained
from anisoscope.claims.revisiting import comparison, frequency, tangent, training
from anisoscope.claims.shape import ablation, clusters, depth, estimators, phases
from anisoscope.errors import unknown_name
from anisoscope.results.table import Table

_MODULES = (  # in the order in which a reader meets them
    *(tangent, training, frequency, comparison),
    *(depth, phases, clusters, estimators, ablation),
    *(modalities, drift, attention, untrained, sharpness),
)


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
        return [_verdict(declared, "", nothing, ONE_MODEL, {})]
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
    return _verdict(declared, subject, finding, scope, about)


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
    return _verdict(declared, subject, finding, scope, about)


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
    run = next(iter(study.values()))
    return {"proxy": run.proxy, "rank": run.rank, "fit": run.fit}


def _verdict(declared: Claim, subject: str, finding: Finding, scope: str, about: dict[str, Any]) -> Verdict:
    return verdict_of(declared.name, declared.statement, finding, subject=subject, scope=scope, about=about)
