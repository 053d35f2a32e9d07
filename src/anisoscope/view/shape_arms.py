"""What the views over training show: arms, and measures to choose from.

An *arm* is one model with all its seeds (learners that differ in nothing else). A *measure* is a metric in one variant
at one family of places: the residual stream, or a kind of place inside the blocks such as attention scores.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from anisoscope.view.catalogue import Catalogue
from anisoscope.view.training import (
    FREQUENCY,
    LOOP,
    MOVEMENT,
    STREAM,
    TANGENT,
    TESTS,
    History,
    Learner,
    Line,
    Mark,
    Site,
    known,
    options_of,
)
from anisoscope.view.training_words import entry_of, variant_words

INSIDE = ("scores", "query", "key", "attn_in", "attn_out", "mlp_in", "mlp_out")
FAMILY_WORDS = {
    "query": "queries", "key": "keys", "attn_in": "attention input", "attn_out": "attention output",
    "mlp_in": "MLP input", "mlp_out": "MLP output",
}  # fmt: skip
ELSEWHERE = frozenset((*TANGENT, *TESTS, *FREQUENCY, *LOOP, "amplification", "amplification_p", "checkpoint"))
FIRST = ("svd_ratio", "svd_ratio_squared", "average_cosine", "two_nn")  # what a reader opens with
_SIZE = re.compile(r"(?P<arm>.+?)[-_](?P<size>\d+x\d+)")


@dataclass(frozen=True)
class Arm:
    """One model and its seeds; `line` is the number under which the page's legend shows and hides it."""

    index: int
    label: str
    model: str
    role: str
    blocks: int
    learners: tuple[Learner, ...]

    @property
    def line(self) -> int:
        return self.learners[0].index

    @property
    def design(self) -> tuple[str, str]:
        """What it is, and its size, where its name says so.

        >>> Arm(0, "", "causal-next-6x256", "", 6, ()).design, Arm(0, "", "gpt2", "", 12, ()).design
        (('causal-next', '6x256'), ('gpt2', ''))
        """
        match = _SIZE.fullmatch(self.model)
        return (match["arm"], match["size"]) if match else (self.model, "")


def arms_of(history: History) -> list[Arm]:
    """Learners of one model side by side in one arm; apart where only the run tells them apart."""
    found: dict[tuple[str, str], list[Learner]] = defaultdict(list)
    for learner in history.learners:
        found[learner.model, learner.stack].append(learner)
    arms: list[tuple[Learner, ...]] = []
    for learners in found.values():
        distinct = len({one.seed for one in learners}) == len(learners)
        arms += [tuple(learners)] if distinct else [(one,) for one in learners]
    return [_arm(i, learners) for i, learners in enumerate(arms)]


def _arm(index: int, learners: tuple[Learner, ...]) -> Arm:
    first = learners[0]
    label = first.label.replace(f" · seed {first.seed}", "") if len(learners) > 1 else first.label
    return Arm(index, label, first.model, first.role, max(one.blocks for one in learners), learners)


@dataclass(frozen=True)
class ShapeMeasure:
    """A metric in one variant at one family of places."""

    metric: str
    variant: str
    family: str  # "stream", or a kind
    label: str
    says: str

    @property
    def kinds(self) -> tuple[str, ...]:
        return STREAM if self.family == "stream" else (self.family,)


def measures_of(history: History, catalogue: Catalogue) -> list[ShapeMeasure]:
    """Everything that has a value at several places and knows nothing of gradients, in reading order."""
    seen: dict[tuple[str, str, str], None] = {}
    for _, metric, site, group, variant in history.keys(sorted(history.metrics() - ELSEWHERE)):
        family = "stream" if site.kind in STREAM else site.kind if site.kind in INSIDE else ""
        if family and not group and _plain(history, metric, variant):
            seen[metric, variant, family] = None
    order = {name: i for i, name in enumerate(catalogue.ordered({key[0] for key in seen}))}
    keys = sorted(seen, key=lambda k: (k[0] in MOVEMENT, k[2] != "stream", order[k[0]], k[1] != "", k[2], k[1]))
    return [_measure(catalogue, *key, usual=_usual(key, seen)) for key in keys]


def _plain(history: History, metric: str, variant: str) -> bool:
    """Of what moves between steps only the main proxy and rank."""
    options = options_of(variant)
    same = options.get("rank", history.rank) == history.rank and options.get("proxy", history.proxy) == history.proxy
    return metric not in MOVEMENT or (same and "control" not in options)


def _usual(key: tuple[str, str, str], seen: dict[tuple[str, str, str], None]) -> str:
    """The plain variant's name where others have a name of their own: GRIDE's usual scale."""
    scales = any(k[0] == key[0] and "scale=" in k[1] for k in seen)
    return "scale 2" if key[0] == "gride" and not key[1] and scales else ""


def _measure(catalogue: Catalogue, metric: str, variant: str, family: str, *, usual: str) -> ShapeMeasure:
    entry = entry_of(catalogue, metric)
    words = "" if metric in MOVEMENT else variant_words(variant) or usual
    label = " · ".join(part for part in (entry.title, FAMILY_WORDS.get(family, ""), words) if part)
    told = (entry.formula, entry.description)
    says = " ".join(part if part.endswith(".") else f"{part}." for part in told if part)
    return ShapeMeasure(metric, variant, family, label, says)


def first_of(measures: Sequence[ShapeMeasure]) -> int:
    """The measure that the page opens with."""
    plain = {m.metric: i for i, m in reversed(list(enumerate(measures))) if not m.variant and m.family == "stream"}
    return next((plain[name] for name in FIRST if name in plain), 0)


def sites_of(history: History, measure: ShapeMeasure, arms: Sequence[Arm]) -> list[Site]:
    """The places at which any of the arms has this measure."""
    learners = {one.index for arm in arms for one in arm.learners}
    keys = history.facets(measure.metric).keys
    found = {k[2] for k in keys if k[0] in learners and k[2].kind in measure.kinds and k[4] == measure.variant}
    return sorted(found)


def arm_line(history: History, arm: Arm, measure: ShapeMeasure, site: Site) -> Line:
    """The line of an arm: its own where it has one seed; else means over seeds, from the lowest to the highest."""
    return seeds_mean([history.line(one, measure.metric, site, measure.variant) for one in arm.learners])


def seeds_mean(lines: Sequence[Line]) -> Line:
    """One line as it is; of several the means at each step, from the lowest to the highest."""
    if len(lines) == 1:
        return lines[0]
    steps: dict[int, list[Mark]] = defaultdict(list)
    for line in lines:
        for mark in known(line):
            steps[mark.step].append(mark)
    return tuple(_over_seeds(step, marks) for step, marks in sorted(steps.items()))


def _over_seeds(step: int, marks: Sequence[Mark]) -> Mark:
    values = [mark.value for mark in marks if mark.value is not None]
    spreads = [mark.sd for mark in marks if mark.sd is not None]
    low, high = (min(values), max(values)) if len(values) > 1 else (None, None)
    return Mark(step, fmean(values), low, high, marks[0].n, marks[0].note, fmean(spreads) if spreads else None)


def at_step(line: Line, step: int) -> Mark | None:
    """The mark of a step that has a value."""
    return next((mark for mark in known(line) if mark.step == step), None)
