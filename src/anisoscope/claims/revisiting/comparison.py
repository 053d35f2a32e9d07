"""Claims that compare: encoders with decoders, semi-NMF with PCA, training on natural text with resampled text."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from anisoscope.claims.engine.claim import claim, judged, missing
from anisoscope.claims.engine.evidence import (
    Missing,
    NotHere,
    Readings,
    Run,
    Study,
    layer_records,
    models,
    step_records,
)
from anisoscope.claims.engine.part import Finding, Part, Parts, Status, agreement, figure, judge, outcome, span
from anisoscope.claims.revisiting.controls import MARGIN, average, control_parts, trained
from anisoscope.claims.revisiting.frequency import RATIO_MARGIN
from anisoscope.claims.revisiting.tangent import ENERGY_METRICS, SOURCE
from anisoscope.results.quantity import Quantity, mean

ENERGY_MARGIN = 0.02
_ARM = re.compile(r"-(?:flat|zipf:?(?P<exponent>\d+(?:\.\d+)?))(?=$| \()")  # a run may stand behind: "decoder-flat (a)"
NATURAL_EXPONENT = 1.0  # of Zipf's law in natural text


@claim(
    "encoder_and_decoder",
    statement="Tangent directions hold more gradient energy than every control in an encoder and in a decoder.",
    source=SOURCE,
    metrics=ENERGY_METRICS,
    margin=MARGIN,
)
def encoder_and_decoder(study: Study) -> dict[str, Finding]:
    """`tangent_energy` in both kinds of model; masked and unmasked rows of an encoder are judged apart."""
    return {"encoder and decoder": judged(_both_kinds, study, margin=MARGIN)}


def _both_kinds(study: Study) -> Finding:
    natural = {model: run for model, run in study.items() if not _ARM.search(model)}
    kinds = {"encoder": [r for r in natural.values() if is_encoder(r)]}
    kinds["decoder"] = [r for r in natural.values() if r.tangent("gradient_energy") and not is_encoder(r)]
    for kind, runs in kinds.items():
        if not runs:
            raise Missing(f"{kind} with gradient_energy", f"train one with --arch {kind} and put both into one table")
    parts = [part for kind, runs in kinds.items() for run in runs for part in _of_model(run, kind)]
    details = {"models": {kind: [run.model for run in runs] for kind, runs in kinds.items()}}
    return Finding(tuple(parts), _kinds_sentence, details, settle=_settled, scope="for these models")


def is_encoder(run: Run) -> bool:
    """Only a masked language model has masked rows."""
    return bool(run.tangent("gradient_energy", "masked") or run.tangent("gradient_energy", "unmasked"))


def _of_model(run: Run, kind: str) -> list[Part]:
    """The weakest comparison of each kind of row; its name begins with the kind of model.

    Where only all rows together have controls, as with a frozen proxy, they are judged together.
    """
    kinds = ("masked", "unmasked") if kind == "encoder" else ()
    groups = [g for g in kinds if run.tangent("gradient_energy", g, control="random")] or [""]
    parts = []
    for group in groups:
        controls = control_parts(run, group)
        _, part = judge(controls)
        p = max((c.p for c in controls if math.isfinite(c.p)), default=math.nan)
        rows = f" ({group or 'masked and unmasked'} rows)" if kinds else ""
        tested = any(c.tested for c in controls)
        parts.append(replace(part, name=f"{kind}: {run.model}{rows}", p=p, tested=tested))
    return parts


def _settled(parts: dict[str, Part]) -> dict[str, Part]:
    """One part for each kind of model, in front of those it is made of, which only describe."""
    made = {}
    for kind, what in (("encoder", "encoders and kinds of rows"), ("decoder", "decoders")):
        members = [part for name, part in parts.items() if name.startswith(f"{kind}: ")]
        if members:
            made[kind] = agreement(members, kind, what=what)
    told = {name: replace(part, needed=False) for name, part in parts.items()}
    return {**made, **(told if made else parts)}


def _kinds_sentence(parts: Parts, status: Status, part: Part) -> str:
    told = [f"{span(p)} in {name.split(': ', 1)[1]}" for name, p in parts.items() if ": " in name and p.measured]
    text = "the lead of the tangent directions over the control that comes closest is, in units of what chance would "
    text += f"give of the gradients' energy, {', '.join(told)}; what decides is the {part.name} with {span(part)}, "
    return text + outcome(status, part)


@claim(
    "semi_nmf_beats_pca",
    of=models,
    statement="Semi-NMF directions hold more gradient energy than principal components of the same rank.",
    source="not in the paper: the comparison it leaves out",
    metrics=("gradient_energy", "proxy_overlap"),
    margin=ENERGY_MARGIN,
)
def semi_nmf_beats_pca(run: Run) -> Finding:
    """Mean over sites and steps of energy(semi-NMF) − energy(PCA), paired fold by fold."""
    ours, theirs = (run.needed("gradient_energy", proxy=proxy) for proxy in ("semi_nmf", "pca"))
    cells = [cell for cell in trained(ours) if cell in theirs]
    if not cells:
        raise Missing("gradient_energy of semi-NMF and PCA at the same site and step")
    gaps = {cell: ours[cell].quantity - theirs[cell].quantity for cell in ours if cell in theirs}
    parts = [
        Part.of("difference", mean([gaps[cell] for cell in cells]), margin=ENERGY_MARGIN),
        Part.described("semi-NMF", average(ours, cells)),
        Part.described("PCA", average(theirs, cells)),
    ]
    overlap = run.rows("proxy_overlap", rank=run.rank)
    if overlap:
        values = [overlap[cell].value for cell in trained(overlap)]
        parts.append(Part.described("overlap of the spans", Quantity.constant(sum(values) / len(values))))
    details = {"steps": step_records(gaps), "layers": layer_records(gaps)}
    return Finding(tuple(parts), _pca_sentence, details)


def _pca_sentence(parts: Parts, status: Status, part: Part) -> str:
    text = f"semi-NMF holds {figure(parts['semi-NMF'].effect)} of the gradient energy and PCA of the same rank "
    text += f"{figure(parts['PCA'].effect)}; the difference is {span(part)}, {outcome(status, part)}"
    if status != "fails":
        return text
    if part.high < -part.margin:
        return f"{text}, so PCA is the better of the two"
    return f"{text}, so " + ("the two are as good as equal" if part.low > -part.margin else "semi-NMF is no better")


@claim(
    "frequency_intervention",
    statement="Training on text with a stronger frequency bias makes gradients more tangent-aligned.",
    source=f"{SOURCE}, named there as future work",
    metrics=("gradient_enrichment", "average_cosine", "unigram_entropy"),
    margin=RATIO_MARGIN,
)
def frequency_intervention(study: Study) -> dict[str, Finding]:
    """Enrichment of the arm with more frequency bias over that with less, minus 1, on the same held-out contexts."""
    pairs = _arm_pairs(study)
    if not pairs:
        gap = NotHere(
            "pair of models that differ only in the frequency of their training tokens, as decoder and decoder-flat do",
            "train a second arm with --frequency flat or --frequency zipf:S",
        )
        return {"frequency arms": missing(gap, margin=RATIO_MARGIN)}
    return {
        f"{more.model} over {less.model}": judged(_between_arms, (more, less), margin=RATIO_MARGIN)
        for more, less in pairs
    }


def _arm_pairs(study: Study) -> list[tuple[Run, Run]]:
    """(more, less) frequency bias: every resampled arm with the natural one, or with each other where there is none."""
    families: dict[str, list[Run]] = {}
    for model, run in study.items():
        families.setdefault(_ARM.sub("", model), []).append(run)
    pairs = []
    for stem, runs in families.items():
        base = study.get(stem) or min(runs, key=bias_of)
        for run in runs:
            if bias_of(run) != bias_of(base):
                pairs.append((run, base) if bias_of(run) > bias_of(base) else (base, run))
    return pairs


def bias_of(run: Run) -> float:
    """How uneven an arm's training tokens were: minus their entropy as sampled; by its name where that is not known.

    Whole contexts are resampled, so a target is not always approached from the side that its name says.
    """
    entropy = run.rows("unigram_entropy")
    return -next(iter(entropy.values())).quantity.value if entropy else bias(run.model)


def bias(model: str) -> float:
    """The Zipf exponent of an arm's training tokens, from its name.

    >>> bias("decoder"), bias("decoder-flat"), bias("decoder-zipf1.5")
    (1.0, 0.0, 1.5)
    """
    arm = _ARM.search(model)
    if arm is None:
        return NATURAL_EXPONENT
    return float(arm["exponent"]) if arm["exponent"] else 0.0


def _between_arms(arms: tuple[Run, Run]) -> Finding:
    more, less = arms
    high, low, paired = _averages(*(run.needed("gradient_enrichment") for run in arms))
    parts = [
        Part.of("enrichment", high.over(low) - Quantity.constant(1.0), margin=RATIO_MARGIN),
        Part.described("more bias", high),
        Part.described("less bias", low),
    ]
    cosines = [run.rows("average_cosine") for run in arms]
    if all(cosines):
        two = _averages(*cosines)
        parts.append(Part.of("average cosine", two[0] - two[1], margin=0.0, needed=False))
    details = {
        "more": more.model,
        "less": less.model,
        "paired": paired,
        "steps": {run.model: step_records(run.tangent("gradient_enrichment")) for run in arms},
    }
    aspects = {"enrichment": ("enrichment",), "average cosine": ("average cosine",)}
    # contexts are resampled, trainings are not: one run of each arm speaks for these two runs alone
    return Finding(tuple(parts), _arms_sentence, details, aspects=aspects, scope="for these two runs only")


def _averages(one: Readings, two: Readings) -> tuple[Quantity, Quantity, bool]:
    """Both arms over their common cells; without the same contexts the folds of the two do not belong together."""
    cells = [cell for cell in trained(one) if cell in two]
    if not cells:
        raise Missing("site and step that both arms were measured at", "use the same schedule for both")
    sizes = [[(rows[c].n, rows[c].contexts) for c in cells] for rows in (one, two)]
    paired = sizes[0] == sizes[1] and all(None not in size for size in sizes[0])
    means = [average(readings, cells) for readings in (one, two)]
    if not paired:
        means = [quantity.unpaired() for quantity in means]
    return means[0], means[1], paired


def _arms_sentence(parts: Parts, status: Status, part: Part) -> str:
    text = "the tangent directions hold of the gradients' energy, after training on text with more frequency bias, "
    text += (
        f"{span(parts['more bias'])} times what chance would give and, with less, {span(parts['less bias'])} times: "
    )
    text += f"the relative lead of the former is {span(part)}, {outcome(status, part)}"
    cosine = parts.get("average cosine")
    return text + (f" (the activations' average cosine differs by {span(cosine)})" if cosine else "")
