"""Claims tested by interventions: a bias added to the inputs of untrained blocks, and attention without drift.

Notation, for blocks at initialisation
    N        size of the bias; A average cosine. An arm is one initialisation, width and kind of inputs; a claim about a
             family holds where it does in every arm, and is open where some arms hold and others fail
    odds     A/(1 − A): for inputs x + N·b/‖b‖ they are N²/‖x‖², what is shared over what is not. They grow by the same
             factor wherever a block adds the same, while A itself can add nothing near 1

Notation, for arms that differ in their attention alone
    A(s)     average cosine at step s, the mean over blocks 1 … L
    rise     the mean of A over the early or the late steps (the first and the last third after initialisation) − A(0)
    drift    ‖mean q‖ / mean ‖q‖ of queries as used in the scores, numerator and denominator averaged over heads and
             blocks; k alike. Below 0.1 it counts as none (an average cosine of about 0.01)
    fall     (a − b)/a, a and b the sharpness of attention with softmax and with the means removed, late in training

Seeds are the replicates (each with its own tokens, directions and weights), and arms of the same seed are compared:
verdicts use the t interval over three or more seeds. A single seed is undecided, however narrow its interval over
contexts, and is reported only in the details of the pooled verdict.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from anisoscope.claims.engine import evidence
from anisoscope.claims.engine.claim import (
    CORRELATION,
    ONE_SEED,
    SHARE,
    Finding,
    Part,
    Parts,
    agreement,
    claim,
    descriptive,
    judge,
)
from anisoscope.claims.engine.evidence import Arms, Missing, NotHere, Readings, Run, Study, block_mean, figure, models
from anisoscope.results.quantity import Bounds, Quantity, combine, correlate, mean, relative_fall

SOURCE = "Godey et al. 2024, arXiv:2401.12143"
OPEN_QUESTION = "an open question of Godey et al. 2024, Anisotropy Is Inherent to Self-Attention, arXiv:2401.12143"
ADDED_MARGIN = 0.2  # relative growth of the odds
BETWEEN = (
    0.25,
    0.99,
)  # average cosines of inputs: below, what a block adds without a bias weighs in; above, noise does
SHARPER_MARGIN = 0.05  # a twentieth of the way from even attention to a single key
RANK_MARGIN = 0.8
FEWEST_BIASES = 4
_HOW = "`anisoscope study untrained` measures it"
ORDINARY, CENTRED, FLAT = "softmax", "mean-removed", "uniform"
RISE_MARGIN = 0.05
FALL_MARGIN = 0.2  # relative to the sharpness with ordinary attention
NO_DRIFT = 0.1
UNIT: Bounds = (0.0, 1.0)
_OTHERS = ("qk-norm", "fixed-sharp")
_SCOPE = "for these runs only"
_NAMES = (ORDINARY, CENTRED, FLAT, *_OTHERS)
_ENTROPY, _SPREAD = "entropy", "spread of scores"
_SIZE = ": size of the rise"
_SIDES = {"query": "drift of queries", "key": "drift of keys"}


# -- blocks at initialisation ------------------------------------------------------------------------------------------


class UntrainedArm(NamedTuple):
    """One initialisation, width and kind of inputs."""

    init: str
    width: int
    norm: bool

    def __str__(self) -> str:
        return f"{self.init}, width {self.width}, {'normed' if self.norm else 'plain'} inputs"


Biased = dict[float, Quantity]  # by bias N, ascending


@claim(of=models, source=SOURCE, metrics=("average_cosine",), margin=ADDED_MARGIN, about="initialisation")
def anisotropic_at_initialisation(run: Run) -> Finding:
    """A block at initialisation makes rows that share a bias more anisotropic than they came: the odds of their average
    cosine, A/(1 − A), grow by more than a fifth.

    odds(outputs)/odds(inputs) − 1, geometric mean over the biases whose inputs lie between 0.25 and 0.99.

    Outputs that are as anisotropic as their inputs say nothing about a block: the identity has them, too. So what it
    adds is judged, on the scale of the odds: inputs with a bias N have N²/‖x‖², which has no ceiling, while differences
    of cosines vanish near 1 and depend on the bias at which they are taken. The margin is a fifth, as for every
    quantity without a unit. Below 0.25 little is shared and what a block has without any bias weighs in; it is told
    beside.
    """
    inputs, outputs = (_arms(run, "average_cosine", kind) for kind in ("embed", "resid"))
    parts: list[Part] = []
    biases: dict[str, float] = {}
    for arm, there in outputs.items():
        known = {bias: inputs[arm][bias] for bias in there if bias > 0 and bias in inputs.get(arm, {})}
        if not known:
            continue
        judged = [bias for bias, cosine in known.items() if BETWEEN[0] <= cosine.value <= BETWEEN[1]]
        if not judged:
            parts.append(Part.absent(str(arm), _out_of_reach(arm, known), margin=ADDED_MARGIN))
            continue
        biases[str(arm)] = shown = min(judged, key=lambda n: abs(known[n].value - 0.5))
        described = {f"{arm}: inputs": known[shown], f"{arm}: outputs": there[shown]}
        described |= {f"{arm}: without bias": there[0.0]} if 0 in there else {}
        grown = combine([q for bias in judged for q in (known[bias], there[bias])], _odds_growth)
        parts.append(Part.of(str(arm), grown, margin=ADDED_MARGIN, bounds=(-1.0, None)))
        parts += Part.describe_all(described, bounds=CORRELATION)
    if not parts:
        raise NotHere("block at initialisation with a bias of its inputs", _HOW)

    def sentence(parts: Parts, part: Part) -> str:
        text = f"what decides of {len(biases)} arms is {part.name}: the odds of the average cosine grow by {part} of "
        text += f"their value, {part.outcome}; at a bias of {figure(biases[part.name])} the outputs have an average "
        text += f"cosine of {parts[f'{part.name}: outputs']}, their inputs {parts[f'{part.name}: inputs']}"
        text += ": the anisotropy is that of its inputs" if part.high < part.margin else ""
        more = sum(parts[arm].low > ADDED_MARGIN for arm in biases)
        text += f"; it adds more than the margin in {more} of {len(biases)} arms"
        alone = parts.get(f"{part.name}: without bias")
        return text + (f"; without a bias the outputs there have {alone}" if alone is not None else "")

    arms = {part.name: [part.name] for part in parts if math.isfinite(part.margin)}
    settle = functools.partial(_arms_agree, arms=arms)
    return Finding(parts, sentence, {"biases": biases}, settle=settle, one_seed=ONE_SEED)


def _odds_growth(cosines: Sequence[float]) -> float:
    """The relative growth of the odds A/(1 − A), geometric mean over pairs (inputs, outputs) given one after another.

    >>> round(_odds_growth([0.5, 0.75, 0.8, 12 / 13]), 6)  # odds 1 to 3 and 4 to 12
    2.0
    """
    if not all(map(math.isfinite, cosines)):
        return math.nan
    inside = [min(max(cosine, 1e-6), 1 - 1e-6) for cosine in cosines]  # a table may round 1 − 1e-8 to 1
    logs = [math.log(a / (1 - a)) for a in inside]
    return math.exp(sum(logs[1::2]) / len(logs[1::2]) - sum(logs[::2]) / len(logs[::2])) - 1


def _arms_agree(parts: dict[str, Part], *, arms: Mapping[str, Sequence[str]]) -> dict[str, Part]:
    """Where some arms hold and others fail, leave the part that decides open; `arms`: the parts of each, by name."""
    weakest = [judge([parts[name] for name in names])[1] for names in arms.values()]
    if not {"holds", "fails"} <= {part.status for part in weakest}:
        return parts
    name = judge(weakest)[1].name
    return {**descriptive(parts), name: agreement(weakest, name, what="arms")}


def _out_of_reach(arm: UntrainedArm, known: Biased) -> str:
    """Why an arm has no bias within `BETWEEN`, and which bias to add: A = N²/(N² + ‖x‖²) is ½ at N = ‖x‖."""
    values = [quantity.value for quantity in known.values()]
    text = f"in {arm} no bias brings the inputs to an average cosine between {BETWEEN[0]} and {BETWEEN[1]} (they have "
    text += f"{' and '.join(map(figure, dict.fromkeys((min(values), max(values)))))})"
    lengths = [n * math.sqrt(1 / q.value - 1) for n, q in known.items() if 0.01 < q.value < 0.999]
    return text + (f"; a bias of about {lengths[0]:.2g} would" if lengths else "")


@claim(of=models, source=SOURCE, metrics=("average_cosine",), margin=RANK_MARGIN, about="initialisation")
def anisotropy_grows_with_bias(run: Run) -> Finding:
    """The larger the bias of its inputs, the more anisotropic are the outputs of a block at initialisation.

    Rank correlation over biases of N with the average cosine of the outputs, and a rise by more than .05.

    The rise is that from the smallest to the largest bias: an order can be perfect where nothing happens. The claim is
    true of anything that lets its inputs pass, and false of a block that undoes their bias; what the inputs do is told
    beside it, and what a block adds is another claim (`anisotropic_at_initialisation`).
    """
    outputs, inputs = (_arms(run, "average_cosine", kind) for kind in ("resid", "embed"))
    return _growth(outputs, "the average cosine of the outputs", rise=RISE_MARGIN, inputs=inputs)


@claim(of=models, source=SOURCE, metrics=("attention_sharpness",), margin=RANK_MARGIN, about="initialisation")
def sharpness_grows_with_bias(run: Run) -> Finding:
    """The larger the bias of its inputs, the sharper is the attention of a block at initialisation.

    Rank correlation over biases of N with attention sharpness, (max p − 1/m)/(1 − 1/m), and a rise by more than .05.

    Mean over heads; the rise is that from the smallest to the largest bias, a twentieth of the way from even attention
    to a single key. An order can be perfect where nothing happens (.0000 to .0003 on plain inputs is such a course).
    What makes attention uneven is the product of the bias with what rows do not share, so short inputs need a far
    larger bias than normed ones: where some arms rise and others do not, the claim stays open and says in how many.
    """
    sharp = _arms(run, "attention_sharpness", "scores")
    return _growth(sharp, "the sharpness of attention", rise=SHARPER_MARGIN, inputs={})


def _growth(
    arms: dict[UntrainedArm, Biased], what: str, *, rise: float, inputs: Mapping[UntrainedArm, Biased]
) -> Finding:
    long = {arm: there for arm, there in arms.items() if len(there) >= FEWEST_BIASES}
    if not long:
        raise NotHere(f"block at initialisation with {FEWEST_BIASES} biases of its inputs or more", _HOW)
    parts = []
    for arm, there in long.items():
        trend = combine(list(there.values()), functools.partial(correlate, list(there), method="spearman"))
        parts.append(Part.of(str(arm), trend, margin=RANK_MARGIN, bounds=CORRELATION))
        size = there[max(there)] - there[min(there)]
        parts.append(Part.of(f"{arm}{_SIZE}", size, margin=rise, bounds=CORRELATION))
    for arm, there in long.items():
        for end, words in ((min(there), "smallest"), (max(there), "largest")):
            described = {f"{arm}: at the {words} bias": there[end]}
            described |= {f"{arm}: inputs at the {words} bias": inputs[arm][end]} if end in inputs.get(arm, {}) else {}
            parts += Part.describe_all(described, bounds=CORRELATION)
    reach = max(max(there) for there in long.values())

    def sentence(parts: Parts, part: Part) -> str:
        rising = sum(parts[str(arm)].low > RANK_MARGIN and parts[f"{arm}{_SIZE}"].low > rise for arm in long)
        arm = part.name.removesuffix(_SIZE)
        text = f"{what} rises with the bias in {rising} of {len(long)} arms; what decides is {arm}, where the "
        text += f"{'rank correlation' if arm == part.name else 'rise'} is {part}, {part.outcome} "
        (low, high), given = (
            [parts[name].number for end in ("smallest", "largest") if (name := f"{of} the {end} bias") in parts]
            for of in (f"{arm}: at", f"{arm}: inputs at")
        )
        text += f"(from {low} at the smallest bias to {high} at {figure(reach)}"
        return text + (f"; the inputs themselves go from {' to '.join(given)})" if given else ")")

    settle = functools.partial(_arms_agree, arms={str(arm): [str(arm), f"{arm}{_SIZE}"] for arm in long})
    return Finding(parts, sentence, {"arms": len(long)}, settle=settle, one_seed=ONE_SEED)


def _arms(run: Run, metric: str, kind: str) -> dict[UntrainedArm, Biased]:
    """The values of a metric by arm and bias."""
    found: dict[UntrainedArm, Biased] = {}
    rows = run.of(metric).where(kind=kind, group="", head=None)
    for same in (rows.where(seed=run.seed) or rows.where(seed=None)).groups("variant").values():
        for row in evidence.by_cell(same).values():
            if set(row.options) == {"bias", "init", "input_norm", "width"}:
                arm = UntrainedArm(row["init"], int(row["width"]), row["input_norm"] == "1")
                found.setdefault(arm, {})[float(row["bias"])] = row.quantity
    order = {arm: dict(sorted(there.items())) for arm, there in found.items()}
    return dict(sorted(order.items(), key=lambda item: (item[0].init, item[0].width, not item[0].norm)))


# -- attention without drift -------------------------------------------------------------------------------------------


def _pairs(study: Study) -> Mapping[str, Arms | Missing]:
    """The arms of every size that has both ordinary attention and attention with the means removed."""
    models = f"models {ORDINARY}-LxW and {CENTRED}-LxW of one size"
    gap = NotHere(models, "`anisoscope study sharpness` trains them")
    return evidence.arms_by_size(study, _NAMES, needed=(ORDINARY, CENTRED)) or {f"{ORDINARY} and {CENTRED}": gap}


def _each_without_drift(study: Study) -> Mapping[str, Arms | Missing]:
    """Every arm without drift, paired with ordinary attention of the same size, by model."""
    sizes = evidence.arms_by_size(study, _NAMES, needed=[ORDINARY]).values()
    named = [(arms, name) for arms in sizes for name in (CENTRED, FLAT) if name in arms.runs]
    return {arms.runs[name].model: replace(arms, name=name) for arms, name in named} or _pairs(study)


@claim(
    of=_each_without_drift,
    source=OPEN_QUESTION,
    metrics=("average_cosine", "drift", "mean_norm"),
    margin=RISE_MARGIN,
    about="training",
)
def anisotropy_without_drift(arms: Arms) -> Finding:
    """Anisotropy emerges and stays without drift of queries and keys: their means removed, or without scores at all,
    the average cosine of the blocks still rises by more than 0.05, early in training and late.

    Mean of A(s) over the early and over the late steps minus A(0), of the arms mean-removed and uniform.

    Early and late are the first and the last third of the measured steps after initialisation; no step is chosen by its
    result, since the highest of some steps lies above the first whatever happens. A rise early that is gone late is
    told as transient and decides nothing for the late one. Undecided where drift was not removed after all (‖mean q‖ /
    mean ‖q‖ or that of keys not below 0.1), where the arm softmax has no drift (not beyond 0.1), and, early and late
    apart, where it does not rise either: then there is nothing that drift could have been needed for. Margins are ours.
    """
    ordinary, driftless = (arms.stack(arm).needed("average_cosine") for arm in (ORDINARY, arms.name))
    layers, steps = evidence.shared_steps([ordinary, driftless])
    thirds = {"early": evidence.early(steps), "late": evidence.late(steps)}
    if not steps or steps[0] != 0 or not thirds["early"]:
        words = "average_cosine of both arms at step 0 and at two later steps"
        raise Missing(words, "watch the training from its first step on")
    moments = {"at step 0": [0], **thirds}
    at, usual = (
        {when: mean([block_mean(of, step, layers) for step in chosen]) for when, chosen in moments.items()}
        for of in (driftless, ordinary)
    )
    more: dict[str, Any] = {"margin": RISE_MARGIN, "needed": False, "bounds": CORRELATION}
    parts = [Part.of(f"rise {when}", at[when] - at["at step 0"], **{**more, "needed": True}) for when in thirds]
    parts += [Part.of(f"softmax: rise {when}", usual[when] - usual["at step 0"], **more) for when in thirds]
    described = {**at, **{f"softmax {when}": cosine for when, cosine in usual.items()}}
    parts += Part.describe_all(described, bounds=CORRELATION)
    for when, chosen in thirds.items():
        parts += _drift_parts(arms, arms.name, chosen, prefix=f"{when}: ")
        parts += _drift_parts(arms, ORDINARY, chosen, prefix=f"{when}: softmax: ")
    details = {"step": steps[-1], "early": thirds["early"], "late": thirds["late"], "blocks": len(layers)}
    sentence = functools.partial(_rise_sentence, name=arms.name)
    aspects = {when: (f"rise {when}",) for when in thirds}
    return Finding(parts, sentence, details, settle=_settle_rise, aspects=aspects, scope=_SCOPE, one_seed=ONE_SEED)


def _drift_parts(arms: Arms, name: str, steps: Sequence[int | None], prefix: str = "") -> list[Part]:
    """Descriptive parts: relative drift of queries and keys, ‖mean‖ / mean ‖·‖ over blocks and steps; 0 of zeros."""
    drifts = {}
    for kind, words in _SIDES.items():
        stack = arms.stack(name, kind)
        readings = [stack.needed(metric) for metric in ("drift", "mean_norm")]
        above, below = (mean([block_mean(rows, step) for step in steps]) for rows in readings)
        drifts[f"{prefix}{words}"] = above.over(below) if below.value else Quantity.constant(0.0)
    return Part.describe_all(drifts, bounds=UNIT)


def _settle_rise(parts: dict[str, Part]) -> dict[str, Part]:
    """Leave a rise open, early and late apart, if the arm still drifts, or softmax does not drift or rise there."""
    settled = dict(parts)
    for when in ("early", "late"):
        reason, usual = _drift_doubt(parts, f"{when}: "), parts[f"softmax: rise {when}"]
        part = parts[f"rise {when}"]
        if not reason and usual.status != "holds" and part.status != "holds":
            reason = f"with ordinary attention it does not rise beyond the margin {when} either (by {usual})"
        settled[part.name] = replace(part, reason=part.reason or reason)
    return settled


def _settle_fall(parts: dict[str, Part]) -> dict[str, Part]:
    """Leave the fall open if the arm still drifts, or softmax does not drift or has no sharp attention to lose."""
    reason, sharp = _drift_doubt(parts), parts[ORDINARY]
    if not reason and not (sharp.low if math.isfinite(sharp.low) else sharp.effect) > SHARPER_MARGIN:
        reason = f"ordinary attention is not sharp: {sharp}, not beyond {figure(SHARPER_MARGIN)}"
    return parts | ({"fall": replace(parts["fall"], reason=parts["fall"].reason or reason)} if reason else {})


def _drift_doubt(parts: Parts, prefix: str = "") -> str:
    """Why the arms cannot be compared: the arm still drifts, or ordinary attention has no drift; else empty."""
    left = [(words, parts[f"{prefix}{words}"]) for words in _SIDES.values()]
    over = [(w, part) for w, part in left if not (part.high if math.isfinite(part.high) else part.effect) < NO_DRIFT]
    if over:
        words, worst = max(over, key=lambda item: item[1].effect)
        return f"the relative {words} is still {worst}, not below {figure(NO_DRIFT)}"
    usual = [parts[f"{prefix}softmax: {words}"] for words in _SIDES.values()]
    if any((part.low if math.isfinite(part.low) else part.effect) > NO_DRIFT for part in usual):
        return ""
    both = " and ".join(map(str, usual))
    return f"ordinary attention has no relative drift beyond {figure(NO_DRIFT)} there either ({both})"


def _drifts(parts: Parts, prefix: str = "") -> str:
    return " and ".join(str(parts[f"{prefix}{words}"]) for words in _SIDES.values())


def _rise_sentence(parts: Parts, part: Part, *, name: str) -> str:
    early, late = parts["rise early"], parts["rise late"]
    transient = early.low > RISE_MARGIN > late.high
    text = "without any scores (uniform attention)" if name == FLAT else ""
    text = text or f"with a relative drift of queries and keys of {_drifts(parts, 'late: ')} late ({name})"
    text += f" the average cosine of the blocks goes from {parts['at step 0']} at step 0 to {parts['early']} early and "
    text += f"{parts['late']} late (softmax {parts['softmax early']} and {parts['softmax late']}, at a drift of "
    text += f"{_drifts(parts, 'late: softmax: ')} late): a {'transient ' if transient else ''}rise of {early} early, "
    text += f"{early.outcome}, and of {late} late, {late.outcome}"
    return text


@claim(
    of=_pairs,
    source=OPEN_QUESTION,
    metrics=("attention_sharpness", "attention_entropy", "score_spread", "drift", "mean_norm"),
    margin=FALL_MARGIN,
    about="training",
)
def sharpness_needs_drift(arms: Arms) -> Finding:
    """Sharp attention needs drift of queries and keys: with their means removed attention is less sharp by more than a
    fifth.

    The relative fall of attention sharpness from the arm softmax to the arm mean-removed, late in training.

    Sharpness is (max p − 1/m)/(1 − 1/m), mean over rows, heads, blocks and the last third of the measured steps; early,
    the first third, is told as an aspect. Undecided where the means were not removed after all (relative drift not
    below 0.1), where the arm softmax has no drift (not beyond 0.1) that could be needed, and where its attention is not
    sharp (not beyond .05): a fifth of nothing is nothing. Entropy, the spread of scores, and the arms qk-norm and
    fixed-sharp are told beside it. Margins are ours.
    """
    found = {name: arms.stack(name, "scores").blocks("attention_sharpness") for name in arms.runs}
    if not found[ORDINARY] or not found[CENTRED]:
        raise Missing("attention_sharpness at blocks of both arms", "measure it with --metrics attention")
    layers, steps = evidence.shared_steps([found[ORDINARY], found[CENTRED]])
    if not steps or steps[-1] == 0:
        raise Missing("step after the first with attention_sharpness of both arms", "measure both at the same steps")
    early, late = evidence.early(steps), evidence.late(steps)

    def over(rows: Readings, chosen: Sequence[int | None] = late) -> Quantity:
        return mean([block_mean(rows, step, layers) for step in chosen])

    a, b = (over(found[name]) for name in (ORDINARY, CENTRED))
    parts = [
        Part.of("fall", relative_fall(a, b), margin=FALL_MARGIN, bounds=SHARE),
        *Part.describe_all({ORDINARY: a, CENTRED: b}, bounds=UNIT),
    ]
    if early:
        first = relative_fall(*(over(found[name], early) for name in (ORDINARY, CENTRED)))
        parts.append(Part.of("fall early", first, margin=FALL_MARGIN, needed=False, bounds=SHARE))
    least: Bounds = (0.0, None)
    for metric, words, bounds in (("attention_entropy", _ENTROPY, UNIT), ("score_spread", _SPREAD, least)):
        measured = {name: arms.stack(name, "scores").blocks(metric) for name in (ORDINARY, CENTRED)}
        described = {f"{name}: {words}": over(rows) for name, rows in measured.items() if rows}
        parts += Part.describe_all(described, bounds=bounds)
    parts += [*_drift_parts(arms, CENTRED, late), *_drift_parts(arms, ORDINARY, late, prefix="softmax: ")]
    for name in _OTHERS:  # arms with normalised queries and keys, if measured at these steps
        if name in arms.runs and set(late) <= {cell.step for cell in found[name]}:
            parts += Part.describe_all({name: mean([block_mean(found[name], step) for step in late])}, bounds=UNIT)
            parts += _drift_parts(arms, name, late, prefix=f"{name}: ")
    sentence = functools.partial(_fall_sentence, last=steps[-1])
    details, aspects = {"step": steps[-1], "late": late, "blocks": len(layers)}, {"early": ("fall early",)}
    more: dict[str, Any] = {"settle": _settle_fall, "scope": _SCOPE, "one_seed": ONE_SEED, "aspects": aspects}
    return Finding(parts, sentence, details, **more)


def _fall_sentence(parts: Parts, part: Part, *, last: int) -> str:
    text = f"late in training, up to step {last}, attention has a sharpness of {parts[CENTRED]} with the means of "
    text += f"queries and keys removed and of {parts[ORDINARY]} with ordinary attention, whose relative drift is "
    text += f"{_drifts(parts, 'softmax: ')}: a relative fall of {parts['fall']}, {parts['fall'].outcome}"
    for words in (_ENTROPY, _SPREAD):
        both = [str(parts[of]) for name in (CENTRED, ORDINARY) if (of := f"{name}: {words}") in parts]
        text += f"; {words} {' against '.join(both)}" if len(both) == 2 else ""
    for name in _OTHERS:
        if name in parts:
            text += f"; {name} has {parts[name]} at a drift of {_drifts(parts, f'{name}: ')}"
    return text
