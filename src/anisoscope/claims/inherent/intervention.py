"""Claims tested by interventions: a bias added to the inputs of untrained blocks, and attention without drift.

Notation, for blocks at initialisation: N the size of the bias, A the average cosine. An arm is one initialisation,
width and kind of inputs; a claim about a family must hold in every arm.

Notation, for arms that differ in their attention alone
    A(s)     average cosine at step s, the mean over blocks 1 … L
    rise     A(s) − A(0); s is the step at which the arm with ordinary attention (softmax) is most anisotropic, so it
             is chosen on a run other than the one judged
    drift    ‖mean q‖ / mean ‖q‖ of queries as used in the scores, numerator and denominator averaged over heads and
             blocks; k alike. Below 0.1 it counts as none (an average cosine of about 0.01)
    fall     (a − b)/a, a and b the sharpness of attention with softmax and with the means removed, at the last step

Seeds are the replicates (each with its own tokens, directions and weights), and arms of the same seed are compared:
verdicts use the t interval over three or more seeds. A single seed is undecided, however narrow its interval over
contexts, and is reported only in the details of the pooled verdict.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from anisoscope.claims.engine import claim as engine
from anisoscope.claims.engine import evidence
from anisoscope.claims.engine.claim import CORRELATION, Finding, Part, Parts, claim
from anisoscope.claims.engine.evidence import Arms, Missing, NotHere, Run, Study, block_mean, figure, models
from anisoscope.results.quantity import Bounds, Quantity, combine, correlate, relative_fall

SOURCE = "Godey et al. 2024, arXiv:2401.12143"
OPEN_QUESTION = "an open question of Godey et al. 2024, Anisotropy Is Inherent to Self-Attention, arXiv:2401.12143"
ADDED_MARGIN = 0.05
BETWEEN = (0.25, 0.75)  # average cosines of inputs that leave room for a rise and a fall
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
_SIDES = {"query": "drift of queries", "key": "drift of keys"}
_LASTS = {
    "holds": "still beyond the start by more than the margin",
    "fails": "no longer beyond the start by the margin",
    "undecided": "which may or may not be beyond the start by the margin",
}


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
    """A block at initialisation makes rows that share a bias more anisotropic than they came: the average cosine of its
    outputs lies more than 0.05 above that of its inputs.

    A(outputs) − A(inputs) at the bias whose inputs come nearest to an average cosine of ½.

    Outputs that are as anisotropic as their inputs say nothing about a block: the identity has them, too. So what it
    adds is judged, and only at a bias whose inputs lie between 0.25 and 0.75: nearer to 0 nothing is shared, nearer to
    1 nothing can be added. What the outputs have, and what they have without a bias, is told beside it. The margin is
    ours, set when results were known; in those of docs/results/untrained any from 0.007 on gives the same verdicts.
    """
    inputs, outputs = (_arms(run, "average_cosine", kind) for kind in ("embed", "resid"))
    parts: list[Part] = []
    biases: dict[str, float] = {}
    for arm, there in outputs.items():
        known = {bias: inputs[arm][bias] for bias in there if bias > 0 and bias in inputs.get(arm, {})}
        if not known:
            continue
        bias = min(known, key=lambda n: abs(known[n].value - 0.5))
        if not BETWEEN[0] <= known[bias].value <= BETWEEN[1]:
            parts.append(Part.absent(str(arm), _out_of_reach(arm, known), margin=ADDED_MARGIN))
            continue
        biases[str(arm)] = bias
        described = {f"{arm}: inputs": known[bias], f"{arm}: outputs": there[bias]}
        described |= {f"{arm}: without bias": there[0.0]} if 0 in there else {}
        parts.append(_judged(str(arm), there[bias] - known[bias], margin=ADDED_MARGIN))
        parts += Part.describe_all(described, bounds=CORRELATION)
    if not parts:
        raise NotHere("block at initialisation with a bias of its inputs", _HOW)

    def sentence(parts: Parts, part: Part) -> str:
        text = f"what decides of {len(biases)} arms is {part.name}: at a bias of {figure(biases[part.name])} the "
        text += f"outputs have an average cosine of {parts[f'{part.name}: outputs']}, their inputs "
        text += f"{parts[f'{part.name}: inputs']}, so the block adds {part}, {part.outcome}"
        text += ": the anisotropy is that of its inputs" if part.high < part.margin else ""
        more = sum(parts[arm].low > ADDED_MARGIN for arm in biases)
        text += f"; it adds more than the margin in {more} of {len(biases)} arms"
        alone = parts.get(f"{part.name}: without bias")
        return text + (f"; without a bias the outputs there have {alone}" if alone is not None else "")

    return Finding(parts, sentence, {"biases": biases}, replicate=True)


def _judged(name: str, quantity: Quantity, *, margin: float, bounds: Bounds = CORRELATION) -> Part:
    """A part measured in one seed, undecided until pooled over seeds: a correlation, or a difference of cosines."""
    return Part.of(name, quantity, margin=margin, reason=engine.ONE_REPLICATE, bounds=bounds)


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

    Rank correlation over biases of N with the average cosine of the outputs.

    It is true of anything that lets its inputs pass, and false of a block that undoes their bias; what the inputs do is
    told beside it, and what a block adds is another claim (`anisotropic_at_initialisation`).
    """
    outputs, inputs = (_arms(run, "average_cosine", kind) for kind in ("resid", "embed"))
    return _growth(outputs, "the average cosine of the outputs", inputs=inputs)


@claim(of=models, source=SOURCE, metrics=("attention_sharpness",), margin=RANK_MARGIN, about="initialisation")
def sharpness_grows_with_bias(run: Run) -> Finding:
    """The larger the bias of its inputs, the sharper is the attention of a block at initialisation.

    Rank correlation over biases of N with attention sharpness, (max p − 1/m)/(1 − 1/m), mean over heads.
    """
    return _growth(_arms(run, "attention_sharpness", "scores"), "the sharpness of attention", inputs={})


def _growth(arms: dict[UntrainedArm, Biased], what: str, *, inputs: Mapping[UntrainedArm, Biased]) -> Finding:
    long = {arm: there for arm, there in arms.items() if len(there) >= FEWEST_BIASES}
    if not long:
        raise NotHere(f"block at initialisation with {FEWEST_BIASES} biases of its inputs or more", _HOW)
    parts = []
    for arm, there in long.items():
        trend = combine(list(there.values()), functools.partial(correlate, list(there), method="spearman"))
        parts.append(_judged(str(arm), trend, margin=RANK_MARGIN))
    for arm, there in long.items():
        for end, words in ((min(there), "smallest"), (max(there), "largest")):
            described = {f"{arm}: at the {words} bias": there[end]}
            described |= {f"{arm}: inputs at the {words} bias": inputs[arm][end]} if end in inputs.get(arm, {}) else {}
            parts += Part.describe_all(described, bounds=CORRELATION)
    reach = max(max(there) for there in long.values())

    def sentence(parts: Parts, part: Part) -> str:
        rising = sum(parts[str(arm)].low > RANK_MARGIN for arm in long)
        text = f"{what} rises with the bias in {rising} of {len(long)} arms; what decides is {part.name}, where the "
        text += f"rank correlation is {part}, {part.outcome} "
        (low, high), given = (
            [parts[name].number for end in ("smallest", "largest") if (name := f"{of} the {end} bias") in parts]
            for of in (f"{part.name}: at", f"{part.name}: inputs at")
        )
        text += f"(from {low} at the smallest bias to {high} at {figure(reach)}"
        return text + (f"; the inputs themselves go from {' to '.join(given)})" if given else ")")

    return Finding(parts, sentence, {"arms": len(long)}, replicate=True)


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
    """Anisotropy emerges without drift of queries and keys: their means removed, or without scores at all, the average
    cosine of the blocks still rises by more than 0.05 where that of ordinary attention is highest.

    A(s) − A(0) of the arms mean-removed and uniform, at the step where the arm softmax is most anisotropic.

    The step is chosen on the arm softmax of the same seed, so that its choice does not favour the arm that is judged;
    the rise at the last step is told as an aspect of its own, and a rise that is gone by then is called transient.
    Undecided where drift was not removed after all (‖mean q‖ / mean ‖q‖ or that of keys not below 0.1), where the arm
    softmax has no drift at that step (not beyond 0.1), and where it does not rise either: then there is nothing that
    drift could have been needed for. The margins are ours.
    """
    ordinary, driftless = (arms.stack(arm).needed("average_cosine") for arm in (ORDINARY, arms.name))
    layers, steps = evidence.shared_steps([ordinary, driftless])
    if not steps or steps[0] != 0 or len(steps) < 2:
        raise Missing("average_cosine of both arms at step 0 and later", "watch the training from its first step on")
    height = max(steps[1:], key=lambda step: block_mean(ordinary, step, layers).value)
    moments = {"before": 0, "then": height, "at the end": steps[-1]}
    at = {when: block_mean(driftless, step, layers) for when, step in moments.items()}
    usual = {when: block_mean(ordinary, step, layers) for when, step in moments.items()}
    more: dict[str, Any] = {"margin": RISE_MARGIN, "needed": False, "bounds": CORRELATION}
    parts = [
        _judged("rise", at["then"] - at["before"], margin=RISE_MARGIN),
        Part.of("rise at the end", at["at the end"] - at["before"], **more),
        Part.of("rise of softmax", usual["then"] - usual["before"], **more),
        *Part.describe_all({**at, **{f"softmax {when}": cosine for when, cosine in usual.items()}}, bounds=CORRELATION),
        *_drift_parts(arms, arms.name, height),
        *_drift_parts(arms, ORDINARY, height, prefix="softmax: "),
        *Part.describe_all({"height": height}),
    ]
    details = {"step": steps[-1], "height": height, "blocks": len(layers)}
    sentence = functools.partial(_rise_sentence, last=steps[-1], name=arms.name)
    aspects = {"at the end": ("rise at the end",)}
    return Finding(parts, sentence, details, settle=_settle, aspects=aspects, scope=_SCOPE, replicate=True)


def _drift_parts(arms: Arms, name: str, step: int | None, prefix: str = "") -> list[Part]:
    """Descriptive parts: relative drift of queries and keys, ‖mean‖ / mean ‖·‖ over blocks; 0 if all are zero."""
    drifts = {}
    for kind, words in _SIDES.items():
        stack = arms.stack(name, kind)
        above, below = (block_mean(stack.needed(metric), step) for metric in ("drift", "mean_norm"))
        drifts[f"{prefix}{words}"] = above.over(below) if below.value else Quantity.constant(0.0)
    return Part.describe_all(drifts, bounds=UNIT)


def _settle(parts: dict[str, Part]) -> dict[str, Part]:
    """Make the parts undecided if the arm still drifts, softmax does not drift, or softmax does not rise."""
    reason = _drift_doubt(parts)
    usual = parts.get("rise of softmax")
    if not reason and usual is not None and usual.status != "holds" and parts["rise"].status != "holds":
        reason = f"with ordinary attention it does not rise beyond the margin either (by {usual})"
    names = ("rise", "rise at the end", "fall")
    return parts | {n: replace(parts[n], reason=parts[n].reason or reason) for n in names if reason and n in parts}


def _drift_doubt(parts: Parts) -> str:
    """Why the arms cannot be compared: the arm still drifts, or ordinary attention has no drift; else empty."""
    left = [parts[words] for words in _SIDES.values() if words in parts]
    over = [part for part in left if not (part.high if math.isfinite(part.high) else part.effect) < NO_DRIFT]
    if over:
        worst = max(over, key=lambda part: part.effect)
        return f"the relative {worst.name} is still {worst}, not below {figure(NO_DRIFT)}"
    usual = [parts[name] for words in _SIDES.values() if (name := f"softmax: {words}") in parts]
    if not usual or any((part.low if math.isfinite(part.low) else part.effect) > NO_DRIFT for part in usual):
        return ""
    both = " and ".join(map(str, usual))
    return f"ordinary attention has no relative drift beyond {figure(NO_DRIFT)} there either ({both})"


def _drifts(parts: Parts, prefix: str = "") -> str:
    return " and ".join(str(parts[f"{prefix}{words}"]) for words in _SIDES.values())


def _rise_sentence(parts: Parts, part: Part, *, last: int, name: str) -> str:
    rise, later = parts["rise"], parts["rise at the end"]
    transient = rise.low > RISE_MARGIN > later.high  # a rise at s that is back below the margin at the last step
    text = "without any scores (uniform attention)" if name == FLAT else ""
    text = text or f"with a relative drift of queries and keys of {_drifts(parts)} ({name})"
    text += f" the average cosine of the blocks goes from {parts['before']} at step 0 to {parts['then']} "
    text += f"at step {parts['height'].number}, where ordinary attention is most anisotropic "
    text += f"({parts['softmax then']}, at a drift of {_drifts(parts, 'softmax: ')}): a "
    text += f"{'transient ' if transient else ''}rise of {rise}, {rise.outcome}"
    if parts["height"].effect != last:
        text += f"; at the last step, {last}, it is {parts['at the end']} (softmax "
        text += f"{parts['softmax at the end']}), {_LASTS[later.status]}"
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

    The relative fall of attention sharpness from the arm softmax to the arm mean-removed, at the last step.

    Sharpness is (max p − 1/m)/(1 − 1/m), mean over rows, heads and blocks. Undecided where the means were not removed
    after all (relative drift not below 0.1), and where the arm softmax has no drift (not beyond 0.1) that could be
    needed. Entropy, the spread of scores, and the arms qk-norm and fixed-sharp are told beside it. Margins are ours.
    """
    found = {name: arms.stack(name, "scores").blocks("attention_sharpness") for name in arms.runs}
    if not found[ORDINARY] or not found[CENTRED]:
        raise Missing("attention_sharpness at blocks of both arms", "measure it with --metrics attention")
    layers, steps = evidence.shared_steps([found[ORDINARY], found[CENTRED]])
    if not steps or steps[-1] == 0:
        raise Missing("step after the first with attention_sharpness of both arms", "measure both at the same steps")
    last = steps[-1]
    a, b = (block_mean(found[name], last, layers) for name in (ORDINARY, CENTRED))
    parts = [
        _judged("fall", relative_fall(a, b), margin=FALL_MARGIN, bounds=engine.SHARE),
        *Part.describe_all({ORDINARY: a, CENTRED: b}, bounds=UNIT),
    ]
    least: Bounds = (0.0, None)
    for metric, words, bounds in (("attention_entropy", _ENTROPY, UNIT), ("score_spread", _SPREAD, least)):
        measured = {name: arms.stack(name, "scores").blocks(metric) for name in (ORDINARY, CENTRED)}
        described = {f"{name}: {words}": block_mean(rows, last, layers) for name, rows in measured.items() if rows}
        parts += Part.describe_all(described, bounds=bounds)
    parts += [*_drift_parts(arms, CENTRED, last), *_drift_parts(arms, ORDINARY, last, prefix="softmax: ")]
    for name in _OTHERS:  # arms with normalised queries and keys, if measured at this step
        if name in arms.runs and any(cell.step == last for cell in found[name]):
            parts += Part.describe_all({name: block_mean(found[name], last)}, bounds=UNIT)
            parts += _drift_parts(arms, name, last, prefix=f"{name}: ")
    sentence, details = functools.partial(_fall_sentence, last=last), {"step": last, "blocks": len(layers)}
    return Finding(parts, sentence, details, settle=_settle, scope=_SCOPE, replicate=True)


def _fall_sentence(parts: Parts, part: Part, *, last: int) -> str:
    text = f"at step {last} attention has a sharpness of {parts[CENTRED]} with the means of queries and keys "
    text += f"removed and of {parts[ORDINARY]} with ordinary attention, whose relative drift is "
    text += f"{_drifts(parts, 'softmax: ')}: a relative fall of {parts['fall']}, {parts['fall'].outcome}"
    for words in (_ENTROPY, _SPREAD):
        both = [str(parts[of]) for name in (CENTRED, ORDINARY) if (of := f"{name}: {words}") in parts]
        text += f"; {words} {' against '.join(both)}" if len(both) == 2 else ""
    for name in _OTHERS:
        if name in parts:
            text += f"; {name} has {parts[name]} at a drift of {_drifts(parts, f'{name}: ')}"
    return text
