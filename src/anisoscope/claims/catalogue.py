"""The catalogue of claims, and `evaluate_claims`, which tests them on a table for each seed and over all seeds.

Seeds whose series end at different steps are compared at the last step that all of them have. Pretrained models beside
models that were trained from several seeds are no seed of theirs (`seeds.apart`): a claim on many models is judged
on those that have seeds, and once more, as a subject of its own, on the pretrained ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from anisoscope.claims.engine.alternative import LINEAR, Alternative, alternatives
from anisoscope.claims.engine.claim import DECLARED, Claim, Finding, Verdict, pool, unmeasured, verdict_of
from anisoscope.claims.engine.error_control import corrected
from anisoscope.claims.engine.evidence import NotHere, Run, Study, counted, listed, studies_by_seed
from anisoscope.claims.engine.learning import Gate
from anisoscope.claims.engine.robustness import Place, deciding, late_fit, place, with_badges
from anisoscope.claims.engine.seeds import apart
from anisoscope.claims.inherent import attention, drift, intervention, modalities
from anisoscope.claims.revisiting import comparison, formation, frequency_arm, tangent, theory
from anisoscope.claims.shape import ablation, depth, phases
from anisoscope.errors import AnisoscopeError, check_known, unknown_name
from anisoscope.option import check_values
from anisoscope.results.live import by_training_batches
from anisoscope.results.manifest import PRETRAINED
from anisoscope.results.query import Query, Table

PROXY = "semi_nmf"  # the directions that claims are about unless told

# in the order of pages and documentation
_REVISITING = (tangent, formation, comparison, frequency_arm, theory)
_MODULES = (*_REVISITING, depth, phases, ablation, modalities, drift, attention, intervention)
_ARXIV = re.compile(r"arXiv:\d+\.\d+")
SeedFindings = list[tuple[int, Finding]]  # index of the study (one per seed) and its finding


def claims() -> dict[str, Claim]:
    """Every declared claim by name, in reading order."""
    places = {module.__name__: place for place, module in enumerate(_MODULES)}
    return dict(sorted(DECLARED.items(), key=lambda item: places.get(item[1].module, len(places))))


def check_measured(table: Table, **chosen: str | None) -> None:
    """Raise an error for directions, or a way of fitting them, that the table does not hold."""
    for name, value in chosen.items():
        if value is None:
            continue
        held = {str(one) for one in Query(table).where(metric="gradient_energy").values(name) if one is not None}
        if not held:
            raise AnisoscopeError(f"--{name} chooses among tangent directions, and these runs hold none; leave it out.")
        check_known(f"{name} in these runs", value, held)


def papers() -> dict[str, str]:
    """The paper of each claim that has one: the shortest source of its claims that names its arXiv number.

    >>> papers()["bell_shaped"], "parabola" in papers()
    ('Razzhigaev et al. 2023, The Shape of Learning, arXiv:2311.05928', False)
    """
    numbers = {name: found[0] for name, claim in claims().items() if (found := _ARXIV.findall(claim.source))}
    sources = sorted({claim.source for claim in claims().values()}, key=len)
    return {name: next(source for source in sources if number in source) for name, number in numbers.items()}


def evaluate_claims(
    table: Table,
    names: Iterable[str] | None = None,
    *,
    proxy: str = PROXY,
    rank: int | None = None,
    fit: str | None = None,
    robust: bool = False,
) -> list[Verdict]:
    """Test claims (default: all) on a table; `rank` defaults to the most common one of the table.

    `fit` chooses how directions were fitted, refit or frozen; by default late steps are judged with frozen ones where
    the table has them, as in the paper, and refitted ones stand beside them.

    With several seeds of a model the verdict over all of them comes first and then that of each seed. Every verdict has
    the p of its decision, and that corrected over the grid of claims × models (`error_control`). With `robust` it is
    evaluated again under every alternative that the table offers (`robustness`).
    """
    check_values(evaluate_claims, locals(), {"rank": 1})
    check_measured(table, proxy=None if proxy == PROXY else proxy, fit=fit)
    table, known = by_training_batches(table), claims()
    wanted = list(known) if names is None else [names] if isinstance(names, str) else list(names)
    for name in wanted:
        if name not in known:
            raise unknown_name("claim", name, known)
    chosen = [known[name] for name in wanted]
    series = studies_by_seed(table, {m for c in chosen for m in c.metrics}, proxy=proxy, rank=rank, fit=fit)
    verdicts = corrected([verdict for declared in chosen for verdict in _verdicts(declared, series)])
    if not robust:
        return verdicts
    offered = alternatives(table, proxy=proxy, rank=rank, fit=fit)
    before = {place(verdict): deciding(verdict) for verdict in verdicts}
    others = [(a, verdict) for a in offered for verdict in _changed(chosen, series, a, before)]
    refit = [{model: replace(run, fit="refit", _cache={}) for model, run in study.items()} for study in series]
    lost = {other.claim for alternative, other in others if alternative.kind != "fit" and late_fit(other) == "refit"}
    alike = [v for declared in chosen if declared.name in lost for v in _verdicts(declared, refit)]
    return with_badges(verdicts, others, kinds={c.name: _kinds(c, series) for c in chosen}, refitted=alike)


def _changed(
    chosen: Sequence[Claim], series: list[Study], alternative: Alternative, before: Mapping[Place, Any]
) -> Iterator[Verdict]:
    """The verdicts of claims under an alternative, where it changes what they read; `before`: what decided.

    A reading of something that a claim only describes does not count, unless a number that decides has changed.
    """
    shared = [{model: run.under(alternative) for model, run in study.items()} for study in series]
    for declared in (claim for claim in chosen if alternative.concerns & set(claim.metrics)):
        under = [{model: replace(run, touched=set()) for model, run in study.items()} for study in shared]
        main = {declared.metrics[0], *alternative.directions}
        for verdict in _verdicts(declared, under):
            touched = {name for run in _concerned(under, verdict.subject) for name in run.touched}
            if touched & main or (touched and deciding(verdict) != before.get(place(verdict))):
                yield verdict


def _kinds(declared: Claim, series: list[Study]) -> list[str]:
    """The kinds of alternatives that apply to a claim about tangent directions, whether or not they were measured."""
    main = declared.metrics[0]
    if not any(len(run.of(main).where(proxy=...)) for study in series for run in study.values()):
        return []
    kinds = ["rank", *(["proxy"] if "proxy_overlap" not in declared.metrics else []), "fit"]
    return [*kinds, *(["coordinates", "first position", "half"] if main in LINEAR else []), "split"]


def _verdicts(declared: Claim, series: list[Study]) -> list[Verdict]:
    """The verdicts on a claim; those on pretrained models, of which there is one set of weights each, come last."""
    if not series:
        nothing = unmeasured(NotHere("rows", "measure a model first"), margin=declared.margin)
        return [verdict_of(declared.name, declared.statement, nothing, subject="", about={})]
    trained, pretrained = apart(series)
    found = _of_seeds(declared, trained)
    if not pretrained:
        return found
    beside = _of_seeds(declared, [pretrained])
    missing = {verdict.subject: verdict.details["missing"] for verdict in found}
    both = {v.subject for v in beside if v.subject in missing and not (missing[v.subject] and v.details["missing"])}
    each = "each are" if len(pretrained) > 1 else "is"
    note = f"{counted(len(pretrained), 'pretrained model')} of one set of weights {each} judged apart"
    found = [replace(v, why=f"{v.why[:-1]}; {note}.") if v.subject in both else v for v in found]
    own = [v for v in beside if v.subject in both or v.subject not in missing]
    return found + [replace(v, subject=f"{v.subject}, {PRETRAINED}") if v.subject in both else v for v in own]


def _of_seeds(declared: Claim, series: list[Study]) -> list[Verdict]:
    by_subject: dict[str, SeedFindings] = {}
    for i, study in enumerate(series):
        for subject, finding in declared.function(study).items():
            first = (run.of(declared.metrics[0]).where(head=None) for run in _runs(study, subject))
            if finding.details.get("missing") is False and not any(map(len, first)):
                # the main metric of the claim was not measured at all
                finding = replace(finding, details={**finding.details, "missing": True})
            by_subject.setdefault(subject, []).append((i, finding))
    verdicts = []
    for subject, findings in by_subject.items():
        refusal, usable = "", _counted(findings)
        if len(usable) > 1:
            aligned, refusal = at_one_step([finding for _, finding in usable])
            findings = sorted({**dict(findings), **{i: f for (i, _), f in zip(usable, aligned, strict=True)}}.items())
        single = []
        for i, finding in findings:
            seed = _runs(series[i], subject)[0].seed
            about = {**_about(series[i]), "seed": seed, "measured_again": _repeat_notes([series[i]], subject)}
            scope = finding.scope if len(findings) == 1 else f"for seed {seed}"
            verdict = verdict_of(declared.name, declared.statement, finding, subject=subject, scope=scope, about=about)
            single.append(verdict)
        if len(findings) > 1:
            verdicts.append(_over_seeds(declared, subject, findings, series=series, single=single, refusal=refusal))
        verdicts += single if len(findings) == 1 or not findings[0][1].one_seed else []
    return verdicts


def _has_numbers(finding: Finding) -> bool:
    return any(part.measured for part in finding.parts)


def _counted(findings: SeedFindings) -> SeedFindings:
    """The findings that a verdict over seeds is made of: those with numbers, of models that learned where any did."""
    usable = [(i, finding) for i, finding in findings if _has_numbers(finding)]
    return [(i, finding) for i, finding in usable if not finding.gate.reason] or usable


def _over_seeds(
    declared: Claim, subject: str, findings: SeedFindings, *, series: list[Study], single: list[Verdict], refusal: str
) -> Verdict:
    """The verdict over all seeds that have numbers for the claim."""
    kept = ("status", "effect", "low", "high", "p")
    usable = _counted(findings) or findings
    seeds = [_runs(series[i], subject)[0].seed for i, _ in usable]
    scope = f"over {len(usable)} seed{'s' if len(usable) > 1 else ''}"
    finding = pool([f for _, f in usable], refusal)
    finding = replace(finding, gate=_gate_over_seeds(findings, usable, series=series, subject=subject))
    about = {**_about(series[usable[0][0]]), "pooled": True, "seeds": seeds}
    about["measured_again"] = _repeat_notes([series[i] for i, _ in findings], subject)
    about["missing"] = all(f.details.get("missing") for _, f in findings)
    about["per_seed"] = [{"seed": v.details["seed"], **{name: getattr(v, name) for name in kept}} for v in single]
    return verdict_of(declared.name, declared.statement, finding, subject=subject, scope=scope, about=about)


def _gate_over_seeds(findings: SeedFindings, usable: SeedFindings, *, series: list[Study], subject: str) -> Gate:
    """The gates of all seeds as one, with a note on the seeds that did not learn and are left out."""
    gates = {_runs(series[i], subject)[0].seed: (i, finding.gate) for i, finding in findings}
    counts = {i for i, _ in usable}
    merged = Gate.merged({seed: gate for seed, (i, gate) in gates.items() if i in counts})
    left_out = [
        f"seed {seed} is left out: {g.reason}" for seed, (i, g) in gates.items() if i not in counts and g.reason
    ]
    models = Gate.merged({seed: gate for seed, (_, gate) in gates.items()}).models
    return replace(merged, note="; ".join(filter(None, (merged.note, *left_out))), models=models)


def _runs(study: Study, subject: str) -> list[Run]:
    """The runs of the model named by `subject` (a model, or a stack of one); all runs if it names none."""
    named = _named(study, subject)
    return [study[max(named, key=len)]] if named else list(study.values())


def _named(study: Study, subject: str) -> list[str]:
    return [model for model in study if subject == model or subject.startswith(f"{model}, ")]


def _concerned(series: list[Study], subject: str) -> list[Run]:
    """The runs, of any seed, that verdicts with this subject are made of."""
    trained, pretrained = apart(series)
    beside = subject.endswith(f", {PRETRAINED}") or bool(_named(pretrained, subject))
    return [run for study in ([pretrained] if beside else trained) for run in _runs(study, subject)]


def _repeat_notes(series: list[Study], subject: str) -> dict[str, list[str]]:
    """Notes on seeds that were left out as repeated measurements of one run, by model."""
    notes: dict[str, list[str]] = {}
    for run in (run for study in series for run in _runs(study, subject) if run.repeats):
        seeds = f"seeds {listed(run.repeats)} are" if len(run.repeats) > 1 else f"seed {run.repeats[0]} is"
        notes.setdefault(run.model, []).append(f"{seeds} the same run as seed {run.seed}, measured again")
    return notes


def _about(study: Study) -> dict[str, Any]:
    run = next(iter(study.values()))
    return {"proxy": run.proxy, "rank": run.rank, "fit": run.fit or "refit"}


def at_one_step(findings: Sequence[Finding]) -> tuple[list[Finding], str]:
    """The findings re-evaluated at the last step that all seeds share, and "" or why they cannot be pooled.

    `details["step"]` is the step of a finding and `until` evaluates it at an earlier one; findings without a step are
    returned unchanged. Step 0 does not count as shared if a seed has later steps: it is no result of training. A note
    is added if the step changed, or if models of a claim ended at different steps (`details["ends"]`, by model).
    """
    last_steps, aligned = [_step(finding) for finding in findings], list(findings)
    ends = listed("no step" if step is None else step for step in last_steps)
    apart = f"the seeds end at different steps ({ends}) and share none after step 0 to be compared at"
    while len(steps := {_step(finding) for finding in aligned}) > 1:
        if None in steps:
            return list(findings), apart
        earliest = min(step for step in steps if step is not None)
        aligned = [f if _step(f) == earliest or f.until is None else f.until(earliest) for f in aligned]
        if earliest == 0 or {_step(finding) for finding in aligned} == steps:
            return list(findings), apart
    note = _mixed([finding.details.get("ends", {}) for finding in aligned])
    if [_step(finding) for finding in aligned] != last_steps:
        note = f"step {_step(aligned[0])} is the last that all {len(aligned)} seeds have"
    return [replace(finding, note=note) for finding in aligned] if note else aligned, ""


def _step(finding: Finding) -> int | None:
    return finding.details.get("step")


def _mixed(ends: list[dict[str, Any]]) -> str:
    """A note on models that were evaluated at different steps in different seeds; `ends`: last step by model, per seed.

    >>> _mixed([{"m": 200}, {"m": 100}, {"m": None}])
    'the seeds were judged at different steps, those of m at steps 200, 100 and no step'
    """
    notes = []
    for name in (name for name in ends[0] if all(name in seed for seed in ends)):
        steps = ["no step" if seed[name] is None else seed[name] for seed in ends]
        notes += [f"those of {name} at steps {listed(steps)}"] if len(set(steps)) > 1 else []
    return f"the seeds were judged at different steps, {' and '.join(notes)}" if notes else ""
