"""The claim about interventions on token frequency, and the arms of a training study that it compares.

The text of an arm is resampled (`-flat`, `-zipf1.5`: whole contexts are drawn with other weights, which moves
frequencies little) or its loss is weighted by the frequency of the target (`-flatloss`, `-powerloss1.5`: the strong
form). How strong an intervention was is measured: by the effective entropy of the targets. Of several in one direction
the strongest decides and the weaker ones are reported beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anisoscope.claims.engine import evidence
from anisoscope.claims.engine.claim import ONE_SEED, Finding, Part, Parts, claim
from anisoscope.claims.engine.evidence import Missing, Readings, Run, Study, average, figure, listed, step_records
from anisoscope.claims.engine.learning import learned
from anisoscope.claims.revisiting.determined import METRIC, undetermined
from anisoscope.claims.revisiting.period import REFIT
from anisoscope.claims.revisiting.reading import Read, depends_on_readings, reading_parts
from anisoscope.claims.revisiting.tangent import SOURCE, trained
from anisoscope.results.quantity import Quantity

RATIO_MARGIN = 0.1  # relative difference
NATURAL_EXPONENT = 1.0  # exponent of Zipf's law in natural text
_NUMBER = r"\d+(?:\.\d+)?"
ARM = re.compile(  # the run may follow: "decoder-flat (a)"
    rf"(?=-(?:flat|zipf|powerloss))(?:-(?P<text>flat|zipf:?(?P<zipf>{_NUMBER}))(?![a-z]))?"
    rf"(?:-(?P<loss>flatloss|powerloss(?P<power>{_NUMBER})))?(?=$| \()"
)
_ENTROPIES = ("target_entropy", "unigram_entropy")  # the second alone in tables of runs without weights
_WEAKER, _EARLY, _COSINE = "weaker: ", "early", "average cosine"
Steps = Callable[[Iterable[int | None]], Sequence[int | None]]


@dataclass(frozen=True)
class FrequencyArms:
    """Two models that differ only in the frequency of their training targets, and weaker interventions beside them."""

    natural: Run
    changed: Run  # the strongest intervention in its direction
    weaker: tuple[Run, ...] = ()  # others in the same direction
    until: int | None = None  # nothing after this step is read

    @property
    def runs(self) -> list[Run]:
        """The two that the claim is judged on, which must have learned."""
        return [self.natural, self.changed]

    def ended(self, step: int) -> FrequencyArms:
        return replace(self, until=step)

    def ordered(self, changed: Run) -> tuple[Run, Run]:
        """The natural arm and another, the one with more frequency bias first."""
        biases = biases_of([self.natural, changed])
        pair = (self.natural, changed)
        return pair if biases[self.natural.model] > biases[changed.model] else (changed, self.natural)


def frequency_arms(study: Study) -> dict[str, FrequencyArms | Missing]:
    """Every pair that is judged: for each natural arm the strongest intervention towards more bias and towards less."""
    families: dict[str, list[Run]] = {}
    for model, run in study.items():
        families.setdefault(ARM.sub("", model), []).append(run)
    found: dict[str, FrequencyArms | Missing] = {}
    for stem, runs in families.items():
        biases = biases_of(runs)
        natural = study.get(stem) or min(runs, key=lambda run: biases[run.model])
        change = {run.model: biases[run.model] - biases[natural.model] for run in runs}
        for sign in (-1, 1):
            chosen = sorted((r for r in runs if sign * change[r.model] > 0), key=lambda r: -abs(change[r.model]))
            if chosen:
                arms = FrequencyArms(natural, chosen[0], tuple(chosen[1:]))
                more, less = arms.ordered(chosen[0])
                found[f"{more.model} over {less.model}"] = arms
    what = "pair of models that differ only in the frequency of their targets, as decoder and decoder-flatloss do"
    gap = evidence.NotHere(what, "train a second arm with --target-weights flat, or with --frequency flat")
    return found or {"frequency arms": gap}


def biases_of(runs: Sequence[Run]) -> dict[str, float]:
    """How uneven the training targets of each arm were: minus their effective entropy, from the names where unknown.

    Resampling whole contexts reaches other frequencies than the name says, so the name is the last resort, and then
    for all of them.
    """
    entropies = {run.model: entropy_of(run) for run in runs}
    known = {model: -entropy for model, entropy in entropies.items() if entropy is not None}
    return known if len(known) == len(entropies) else {run.model: bias(run.model) for run in runs}


def entropy_of(run: Run) -> float | None:
    """The effective entropy of the training targets in bits; None where it was not measured."""
    for metric in _ENTROPIES:
        if rows := run.rows(metric):
            return next(iter(rows.values())).quantity.value
    return None


def bias(model: str) -> float:
    """The exponent of an arm's training targets, from its name: that of Zipf's law, times that of the weights.

    >>> bias("decoder"), bias("decoder-flat"), bias("decoder-zipf1.5"), bias("encoder-flatloss")
    (1.0, 0.0, 1.5, 0.0)
    """
    arm = ARM.search(model)
    if arm is None:
        return NATURAL_EXPONENT
    text = float(arm["zipf"] or 0.0) if arm["text"] else NATURAL_EXPONENT
    return text * (float(arm["power"] or 0.0) if arm["loss"] else 1.0)


@claim(
    of=frequency_arms,
    source=f"{SOURCE}, named there as future work",
    metrics=("gradient_enrichment", "average_cosine", METRIC, *_ENTROPIES),
    margin=RATIO_MARGIN,
    about="training",
)
def frequency_intervention(arms: FrequencyArms) -> Finding:
    """Training with a stronger frequency bias makes gradients more tangent-aligned.

    Enrichment of the arm with more frequency bias over that with less, minus 1, on the same held-out contexts and for
    the same loss, in which every target counts alike; late, in the last third of the measured steps.

    Which arm has more bias, and how much, is the effective entropy of the training targets. Each direction is judged by
    its strongest intervention: a loss weighted by target frequency, where there is one. Weaker ones (a corpus resampled
    by whole contexts), and the first third of the steps, in which arms have hardly parted, stand beside it.
    """
    more, less = arms.ordered(arms.changed)
    late = _late_lead(arms)
    parts = [
        Part.of("enrichment", late.lead, margin=RATIO_MARGIN, **(_open(more) or _open(less))),
        *_in_readings(arms),
        *Part.describe_all({"more bias": late.more, "less bias": late.less}),
    ]
    if (early := _lead(arms, arms.changed, evidence.early)) is not None:
        parts.append(Part.of(_EARLY, early.lead, margin=RATIO_MARGIN, needed=False))
    weaker = [run for run in arms.weaker if learned(run, arms.until).status != "did not learn"]
    for run in weaker:
        if (found := _lead(arms, run, evidence.late)) is not None:
            parts.append(Part.of(f"{_WEAKER}{run.model}", found.lead, margin=RATIO_MARGIN, needed=False))
    if (cosine := _lead(arms, arms.changed, evidence.late, metric="average_cosine")) is not None:
        parts.append(Part.of(_COSINE, cosine.more - cosine.less, margin=0.0, needed=False))
    bits = {run.model: entropy_of(run) for run in (more, less, *weaker)}
    details: dict[str, Any] = {"more": more.model, "less": less.model, "paired": late.paired, "entropy_bits": bits}
    details["steps"] = {run.model: step_records(run.tangent("gradient_enrichment")) for run in arms.runs}
    details |= {"step": late.step} if late.step is not None else {}
    aspects: dict[str, tuple[str, ...]] = {"enrichment": ("enrichment",), _EARLY: (_EARLY,), _COSINE: (_COSINE,)}
    aspects["weaker interventions"] = tuple(f"{_WEAKER}{run.model}" for run in weaker)
    # the interval is over contexts, and two trainings differ by more than that
    how: dict[str, Any] = {
        "scope": "for these two runs only",
        "one_seed": ONE_SEED,
        "left_open": _other_loss(arms.runs),
    }
    return Finding(parts, _sentence_of(details), details, aspects=aspects, settle=depends_on_readings(), **how)


def _open(run: Run) -> dict[str, str]:
    """Why the directions of an arm leave it open late in training."""
    cells = run.tangent("gradient_enrichment", fit=REFIT)
    late = evidence.late(cell.step for cell in cells)
    return undetermined(run, [cell for cell in cells if cell.step in late], fit=REFIT)


def _in_readings(arms: FrequencyArms) -> list[Part]:
    """The lead late in training in other readings of the rows."""

    def needed(read: Read) -> list[Part]:
        other = replace(arms, natural=read(arms.natural), changed=read(arms.changed))
        doubt = _open(other.natural) or _open(other.changed)
        return [Part.of("enrichment", _late_lead(other).lead, margin=RATIO_MARGIN, **doubt)]

    return reading_parts(needed, arms.runs, metric="gradient_enrichment", fit=REFIT)


@dataclass(frozen=True)
class _Lead:
    """A metric of two arms over the same cells."""

    more: Quantity
    less: Quantity
    paired: bool  # tested on the same contexts, so that folds can be paired
    step: int | None  # the last one

    @property
    def lead(self) -> Quantity:
        """The first over the second, minus 1."""
        return self.more.over(self.less) - Quantity.constant(1.0)


def _late_lead(arms: FrequencyArms) -> _Lead:
    found = _lead(arms, arms.changed, evidence.late)
    if found is None:
        raise Missing("site and step that both arms were measured at", "use the same schedule for both")
    return found


def _lead(arms: FrequencyArms, changed: Run, steps: Steps, *, metric: str = "gradient_enrichment") -> _Lead | None:
    """Means of the natural and another arm over the cells of these steps; None if they have none in common."""
    tangent = metric == "gradient_enrichment"
    one, two = (run.needed(metric) if tangent else run.rows(metric) for run in arms.ordered(changed))
    if not one or not two:
        return None
    cells = [cell for cell in trained(one) if cell in two and not _after(cell.step, arms.until)]
    chosen = set(steps(cell.step for cell in cells))
    cells = [cell for cell in cells if cell.step in chosen]
    if not cells:
        return None
    more, less, paired = _averages(one, two, cells)
    return _Lead(more, less, paired, evidence.last_step(cells))


def _after(step: int | None, until: int | None) -> bool:
    return step is not None and until is not None and step > until


def _averages(one: Readings, two: Readings, cells: Sequence[evidence.Cell]) -> tuple[Quantity, Quantity, bool]:
    """Means of both arms over these cells, and whether their folds can be paired (tested on the same contexts)."""
    sizes = [[(rows[c].n, rows[c].contexts) for c in cells] for rows in (one, two)]
    paired = sizes[0] == sizes[1] and all(None not in size for size in sizes[0])
    first, second = average(one, cells), average(two, cells)
    return (first, second, True) if paired else (first.unpaired(), second.unpaired(), False)


def _other_loss(runs: Sequence[Run]) -> str:
    """Why two arms cannot be compared whose gradients are those of different losses; else empty."""
    weighted = [run.model for run in runs if run.entry.get("gradients_of")]
    if not weighted:
        return ""
    return (
        f"the gradients of {listed(weighted)} are those of the weighted loss, so the arms were not measured alike; "
        "train without --weighted-gradients"
    )


def _sentence_of(details: dict[str, Any]) -> Callable[[Parts, Part], str]:
    bits = details["entropy_bits"]

    def strength(model: str) -> str:
        return "" if bits[model] is None else f" (effective entropy of its targets {figure(bits[model])} bits)"

    def sentence(parts: Parts, part: Part) -> str:
        more, less = details["more"], details["less"]
        text = "in the last third of the measured steps the tangent directions hold, in the arm with more frequency "
        text += f"bias, {more}{strength(more)}, {parts['more bias']} times the gradient energy that chance would give "
        text += f"and, with less, {less}{strength(less)}, {parts['less bias']} times: the relative lead of the former "
        text += f"is {part}, {part.outcome}"
        beside = [f"early it is {parts[_EARLY]}"] if _EARLY in parts else []
        for name, each in parts.items():
            if name.startswith(_WEAKER):
                model = name.removeprefix(_WEAKER)
                beside.append(f"with the weaker intervention {model}{strength(model)} it is {each}")
        beside += [f"the activations' average cosine differs by {parts[_COSINE]}"] if _COSINE in parts else []
        return f"{text} ({'; '.join(beside)})" if beside else text

    return sentence
