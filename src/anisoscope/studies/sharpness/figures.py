"""The page of the study of sharpness: verdicts; loss, anisotropy, drift and sharpness of every arm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

from anisoscope.errors import AnisoscopeError
from anisoscope.results.quantity import Bounds, Mark, over_seeds
from anisoscope.results.query import Query
from anisoscope.studies.page_parts import data_name, files, hero, judged_section, numeric, page_of, shown, words_of
from anisoscope.view.figure import Axis, Figure, Level, Panel, Series, brief, numbers_in, points, series, value_axis
from anisoscope.view.page import DataTable, Hero, Page, Prose, Section, Swatch, TableCell, text
from anisoscope.view.subjects import RunView
from anisoscope.view.words import Catalogue, number, plural, step_words, strided

ARMS = {
    "softmax": "ordinary softmax",
    "qk-norm": "normed, learned temperature",
    "mean-removed": "means removed",
    "fixed-sharp": "normed, fixed sharp temperature",
    "uniform": "uniform, no scores",
}
HUES = dict(zip(ARMS, (6, 0, 2, 1, 3), strict=True))
MARKERS = dict(zip(ARMS, ("circle", "square", "diamond", "triangle-up", "triangle-down"), strict=True))
RELATIVE = "relative_drift"  # ‖mean‖ / mean ‖·‖, computed from drift and mean norm
LOSS, COSINE = ("training", "probe_loss"), ("resid", "average_cosine")
LAST = (
    ("query", RELATIVE, "Relative drift of queries"),
    ("key", RELATIVE, "Relative drift of keys"),
    ("query", "qk_cosine", "Cosine of mean query and mean key"),
    ("scores", "attention_sharpness", "Sharpness"),
    ("scores", "attention_entropy", "Entropy / log m"),
    ("scores", "score_spread", "Spread of scores"),
)
DRIFTS = (
    *LAST[:2],
    ("query", "qk_cosine", "Cosine of the means"),
    ("query", "average_cosine", "Average cosine of queries"),
    ("key", "average_cosine", "Average cosine of keys"),
    ("query", "mean_norm", "Mean norm of queries"),
)
SCORES = (*LAST[3:], ("scores", "first_key_mass", "Mass on the first key"))


@dataclass(frozen=True)
class ArmNumbers:
    """The numbers of all arms of one size: means over blocks, and over seeds."""

    query: Query
    size: str
    catalogue: Catalogue

    @classmethod
    def all(cls, run: RunView, declared: Mapping[str, Any] | None = None) -> list[ArmNumbers]:
        """One for every size that has arms in the table."""
        query = Query(run.table).where(head=None, variant="", group="")
        names = query.values("model")
        sizes = dict.fromkeys(n.removeprefix(f"{arm}-") for n in names for arm in ARMS if n.startswith(f"{arm}-"))
        models_of = {size: [f"{arm}-{size}" for arm in ARMS] for size in sizes}
        return [cls(query.where(model=models), size, Catalogue(declared)) for size, models in models_of.items()]

    @cached_property
    def values(self) -> dict[tuple[Any, ...], float]:
        """Values by (model, seed, step, kind of site, layer, metric)."""
        return {(row.model, row.seed, row.step, row.kind, row.layer, row.metric): row.value for row in self.query}

    @cached_property
    def arms(self) -> list[str]:
        measured = self.query.values("model")
        return [arm for arm in ARMS if f"{arm}-{self.size}" in measured]

    @cached_property
    def seeds(self) -> list[int]:
        return sorted(self.query.values("seed"))

    @cached_property
    def blocks(self) -> list[int]:
        return sorted(self.query.where(kind="resid").values("layer"))

    @cached_property
    def steps(self) -> list[int]:
        """The steps that every run has, at which arms are compared."""
        runs = self.query.where(kind="resid", step=...).groups("model", "seed")
        return sorted(set.intersection(*(set(rows.values("step")) for rows in runs.values()))) if runs else []

    @cached_property
    def height(self) -> int:
        """The step after the first at which ordinary attention is most anisotropic; the last step without it."""
        later = [step for step in self.steps if step > 0]
        if not later or "softmax" not in self.arms:
            return self.steps[-1]
        return max(later, key=lambda step: self.mark("softmax", step, *COSINE).value)

    def at(self, arm: str, seed: int, step: int, kind: str, metric: str, layer: int | None = None) -> float:
        """A metric at one block, or its mean over blocks; NaN if a value is missing."""
        if metric == RELATIVE:
            above, below = (self.at(arm, seed, step, kind, name, layer) for name in ("drift", "mean_norm"))
            return above / below if below else 0.0  # all queries and keys are zero: no drift
        layers = self.blocks if layer is None and kind != "training" else [layer]
        model = f"{arm}-{self.size}"
        values = [self.values.get((model, seed, step, kind, each, metric), math.nan) for each in layers]
        return sum(values) / len(values) if values else math.nan

    def mark(self, arm: str, step: int, kind: str, metric: str, layer: int | None = None) -> Mark:
        """The mean over seeds with a value, with its interval for three or more seeds."""
        values = [self.at(arm, seed, step, kind, metric, layer) for seed in self.seeds]
        return _mean(values, bounds=(0.0, 1.0) if metric == RELATIVE else self.catalogue.entry(metric).bounds)

    def loss_gaps(self, arm: str, step: int) -> list[float]:
        """Loss minus that of ordinary attention, by seed."""
        return [self.at(arm, seed, step, *LOSS) - self.at("softmax", seed, step, *LOSS) for seed in self.seeds]

    def measured(self, metric: str) -> bool:
        return bool(len(self.query.where(metric=metric).known()))


def _mean(values: Sequence[float], *, bounds: Bounds = (None, None)) -> Mark:
    return over_seeds([value for value in values if math.isfinite(value)], bounds=bounds) or Mark(math.nan)


def loss_sentence(numbers: ArmNumbers) -> str:
    """A sentence on the loss of each kind of attention relative to softmax."""
    last = numbers.steps[-1]
    base = numbers.mark("softmax", last, *LOSS)
    gaps = {arm: _mean(numbers.loss_gaps(arm, last)) for arm in numbers.arms if arm != "softmax"}
    told = [f"{arm} {_signed(gap)}" for arm, gap in gaps.items() if math.isfinite(gap.value)]
    if not math.isfinite(base.value) or not told:
        return ""
    loss = f"{numbers.size}, step {last}: ordinary attention has a held-out loss of {words_of(base)}"
    return f"{loss}; {', '.join(told)}."


def _signed(gap: Mark) -> str:
    """A difference with its sign and interval."""
    sign = "+" if gap.value >= 0 else "−"
    ends = f" [{number(gap.low, 2)}, {number(gap.high, 2)}]" if math.isfinite(gap.low) else ""
    return f"{sign}{number(abs(gap.value), 2)}{ends}"


def _series(arm: str, x: Sequence[float], marks: Sequence[Mark], where: Sequence[str], **look: Any) -> Series:
    """An arm as a series with whiskers for the intervals over seeds."""
    look = {"width": 1.6, "size": 6.0, "colour": series(HUES[arm]), "marker": MARKERS[arm], **look}
    return points(ARMS[arm], x, marks, ends={"bars": "y"}, where=where, reach="95 % over seeds:", **look)


def over_training(numbers: ArmNumbers, place: tuple[str, str], title: str, name: str = "") -> Panel:
    """One line per arm over the measured steps, evenly spaced."""
    steps = numbers.steps
    marks = {arm: [numbers.mark(arm, step, *place) for step in steps] for arm in numbers.arms}
    drawn = _lines(marks, range(len(steps)), [f"step {step:,}" for step in steps], apart=0.07)
    labelled = strided(len(steps), 8)
    ticks = [float(n) for n in labelled], [step_words(steps[n]) for n in labelled]
    x = Axis("step", ticks=ticks, bounds=(-0.4, len(steps) - 0.6))
    return Panel(x, Axis(name, rules=True), drawn, title=title, alt=f"{title} of every arm over training.")


def over_depth(numbers: ArmNumbers, step: int, title: str) -> Panel:
    blocks = numbers.blocks
    marks = {arm: [numbers.mark(arm, step, *COSINE, block) for block in blocks] for arm in numbers.arms}
    drawn = _lines(marks, blocks, [f"block {block}" for block in blocks], apart=0.04)
    x = Axis("block", ticks=([float(block) for block in blocks], [str(block) for block in blocks]))
    return Panel(x, series=drawn, title=title, alt=f"{title}: average cosine by block.")


def _lines(
    marks: Mapping[str, Sequence[Mark]], x: Sequence[int], where: Sequence[str], *, apart: float
) -> tuple[Series, ...]:
    """One line per arm; arms are offset so that whiskers do not overlap."""
    arms = enumerate(marks.items(), start=-2)
    return tuple(_series(arm, [place + apart * i for place in x], line, where) for i, (arm, line) in arms)


def loss_figure(numbers: ArmNumbers, stem: str) -> Figure:
    """Held-out loss over training, and the final difference from ordinary attention by seed."""
    last = numbers.steps[-1]
    panels = [over_training(numbers, LOSS, "(a) Loss of held-out text", "Loss (nats per token)")]
    others = [arm for arm in numbers.arms if arm != "softmax"]
    drawn, seeds = [], [f"seed {seed}" for seed in numbers.seeds]
    for x, arm in enumerate(others):
        gaps = numbers.loss_gaps(arm, last)
        dots: dict[str, Any] = {"colour": series(HUES[arm], 0.6), "width": 0, "size": 4.5, "named": False}
        drawn.append(Series(f"{ARMS[arm]}, seeds", [x - 0.12] * len(gaps), [*map(brief, gaps)], where=seeds, **dots))
        drawn.append(_series(arm, [x + 0.08], [_mean(gaps)], ["all seeds"], width=0, named=False))
    if others:
        title = f"(b) Difference to softmax at step {last}"
        x_axis = Axis(ticks=([float(n) for n in range(len(others))], others), bounds=(-0.5, len(others) - 0.5))
        zero, alt = Level(0.0, "no difference", dash="dash", colour="@ink"), f"{title}, by arm and seed."
        panels.append(Panel(x_axis, Axis(rules=True), tuple(drawn), levels=(zero,), title=title, alt=alt))
    return files(stem, panels, layout="pairs", columns=2, size=2.2)


def anisotropy_figure(numbers: ArmNumbers, stem: str) -> Figure:
    """Average cosine of the blocks over training, and over depth at the step where it is highest and at the end."""
    steps = {"b": numbers.height, "c": numbers.steps[-1]}
    panels = [over_training(numbers, COSINE, "(a) Mean over blocks")]
    panels += [over_depth(numbers, step, f"({letter}) Over depth at step {step}") for letter, step in steps.items()]
    y = Axis("average cosine", rules=True, bounds=(min([0.0, *numbers_in(panels)]), 1.0))
    return files(stem, [replace(panel, y=y) for panel in panels], size=2.1)


def multiples_figure(numbers: ArmNumbers, stem: str, places: Sequence[tuple[str, str, str]], **look: Any) -> Figure:
    return files(stem, [over_training(numbers, (kind, metric), title) for kind, metric, title in places], **look)


def together_figure(numbers: ArmNumbers, stem: str) -> Figure:
    """One marker per block and seed at the last step: sharpness and anisotropy of the stream against drift."""
    last, panels = numbers.steps[-1], []
    places = list(product(numbers.seeds, numbers.blocks))
    where = [f"seed {seed}, block {block}" for seed, block in places]
    for title, place, words in (
        ("(a) Sharpness against drift", ("scores", "attention_sharpness"), "Attention sharpness"),
        ("(b) Anisotropy against drift", COSINE, "Average cosine after the block"),
    ):
        drawn = []
        for arm in numbers.arms:
            drifts = [[numbers.at(arm, s, last, side, RELATIVE, b) for side in ("query", "key")] for s, b in places]
            x, y = [sum(pair) / 2 for pair in drifts], [numbers.at(arm, s, last, *place, b) for s, b in places]
            look: dict[str, Any] = {"width": 0, "size": 6.5, "marker": MARKERS[arm], "where": where}
            drawn.append(Series(ARMS[arm], [*map(brief, x)], [*map(brief, y)], series(HUES[arm], 0.85), **look))
        x_axis = Axis("relative drift of queries and keys (mean)", rules=True)
        y_axis, alt = (
            value_axis([v for s in drawn for v in s.y], words),
            f"{title} at step {last}, a mark for each block.",
        )
        panels.append(Panel(x_axis, y_axis, tuple(drawn), title=title, height=300, alt=alt))
    return files(stem, panels, layout="pairs", columns=2, size=2.3)


def study_page(run: RunView, declared: Mapping[str, Any] | None = None) -> Page:
    """The page of the study: verdicts on the two questions, then table and figures of every size."""
    sizes = [numbers for numbers in ArmNumbers.all(run, declared) if numbers.steps]
    if not sizes:
        raise AnisoscopeError(f"{run.path!r} has no step that all arms were measured at; let the study finish.")
    facts = [f"{each.size}, {plural(len(each.seeds), 'seed')}, {each.steps[-1]} updates" for each in sizes]
    deck = f"One decoder with five kinds of attention: {', '.join(facts)}"
    deck += f"; trained on {data_name(run)}" if data_name(run) else ""
    note = (
        "Arms of one seed have the same initial weights, text and batches, and differences of losses are paired by "
        "seed. Intervals are Student’s over three or more seeds; with fewer both questions stay undecided."
    )
    losses = [Prose(sentence) for numbers in sizes if (sentence := loss_sentence(numbers))]
    sections = [_size_section(numbers, "" if len(sizes) == 1 else f"-{numbers.size}") for numbers in sizes]
    sections.append(judged_section(note, *losses))
    first = _hero(sizes[-1])
    return page_of(run, "Does sharp attention need drift?", deck, sections, terms=TERMS, hero=first)


def _hero(numbers: ArmNumbers) -> Hero:
    """Anisotropy and sharpness of every kind of attention over training."""
    panels = [over_training(numbers, COSINE, "Anisotropy of the blocks", "average cosine")]
    if numbers.measured("attention_sharpness"):
        panels.append(over_training(numbers, ("scores", "attention_sharpness"), "Sharpness of attention"))
    caption = (
        "The same decoder with five kinds of attention. With means removed, queries and keys cannot drift; uniform "
        "attention has no scores at all. Whiskers: 95 % over seeds."
    )
    key = [Swatch(ARMS[arm], series(HUES[arm])) for arm in numbers.arms]
    return hero(panels, f"Five kinds of attention over training, {numbers.size}", caption, key=key)


def _size_section(numbers: ArmNumbers, of: str) -> Section:
    """A table of one size, and its figures; losses and scores only where they were measured."""
    beneath = Prose(
        "Means over blocks and heads, with 95 % intervals over three or more seeds. Drift is relative: ‖mean‖ / mean "
        "‖·‖ of queries and of keys as they meet. In the middle: where ordinary attention is most anisotropic."
    )
    figures: dict[str, tuple[bool, Callable[..., Figure], str]] = {
        "Loss": (
            numbers.measured("probe_loss"),
            loss_figure,
            "(a) Loss of held-out text over training; steps are evenly spaced. (b) At the end, minus ordinary "
            "attention from the same seed: small dots are seeds. Whiskers here and below: 95&nbsp;% over seeds.",
        ),
        "Anisotropy of the stream": (
            True,
            anisotropy_figure,
            "Average cosine of the rows after each block. (a) Mean over blocks, over training. (b) Over depth where "
            "ordinary attention is most anisotropic, and (c) at the end.",
        ),
        "Drift of queries and keys": (
            True,
            partial(multiples_figure, places=DRIFTS, columns=3, size=1.9),
            "Queries and keys as they meet (after rotation and what the arm does to them), means over heads and "
            "blocks. Those of uniform attention are zero, without direction; the cosine of means that are next to "
            "nothing says nothing (means removed).",
        ),
        "Sharpness": (
            numbers.measured("attention_sharpness"),
            partial(multiples_figure, places=SCORES, columns=2, size=1.9),
            "Sharpness is 0 where all allowed keys have the same weight and 1 where one has all; rows that see fewer "
            "than 8 keys are left out.",
        ),
        "Together": (
            numbers.measured("attention_sharpness"),
            together_figure,
            f"At step {numbers.steps[-1]}, a mark for each block of each seed.",
        ),
    }
    key = [Swatch(ARMS[arm], series(HUES[arm])) for arm in numbers.arms]
    parts: list[Any] = [_table(numbers), beneath]
    for title, (measured, draw, caption) in figures.items():
        if measured:
            stem = f"sharpness-{title.split()[0].lower()}{of}"
            parts += shown(draw(numbers, stem), caption, title=title, key=key)
    title = f"The five arms, {numbers.size}"
    return Section(f"size-{numbers.size}", title, parts, numbers.size, finding=loss_sentence(numbers))


def _table(numbers: ArmNumbers) -> DataTable:
    """A table of all arms: loss, anisotropy at three steps, queries, keys and scores at the last step."""
    last, arms = numbers.steps[-1], numbers.arms
    rows = {"Held-out loss": [numbers.mark(arm, last, *LOSS) for arm in arms]}
    rows["Held-out loss minus softmax"] = [_mean(numbers.loss_gaps(arm, last)) for arm in arms]
    for step in sorted({numbers.steps[0], numbers.height, last}):
        rows[f"Average cosine of blocks, step {step}"] = [numbers.mark(arm, step, *COSINE) for arm in arms]
    rows |= {title: [numbers.mark(arm, last, kind, metric) for arm in arms] for kind, metric, title in LAST}
    names = [text("{name}<br><code>{arm}</code>", name=ARMS[arm].capitalize(), arm=arm) for arm in arms]
    body = [[TableCell(name, head=True), *map(words_of, marks)] for name, marks in rows.items()]
    heads = [f"At step {last} unless said", *numeric(*names)]
    return DataTable([heads], [body], "The arms at the last step", "plain wide")


TERMS = """
Ordinary softmax | softmax | p = softmax(q·k / √d)

Normed, learned temperature | qk-norm | p = softmax(τ cos(q, k))
τ is learned by every head of every layer and starts at √d.

Means removed | mean-removed | q_t − mean of q_1 … q_t, k alike
Before rotation. A vector added to all queries or all keys changes nothing, and no position sees a later one.

Normed, fixed sharp temperature | fixed-sharp | p = softmax(4√d cos(q, k))
Sharp from the first step on, and no scale to learn.

Uniform | uniform | p = 1/m
The mean of the values that the mask allows.

Average cosine | average_cosine | (‖Σ h/‖h‖‖² − n) / (n(n−1))

Relative drift | | ‖mean q‖ / mean ‖q‖
From <code>drift</code> and <code>mean_norm</code> of the table, each a mean over heads and blocks.

Sharpness | attention_sharpness | (max p − 1/m) / (1 − 1/m)
"""


def summary(run: RunView) -> Iterator[str]:
    """For the console: the loss of each kind of attention relative to softmax."""
    for numbers in ArmNumbers.all(run):
        if numbers.steps and (sentence := loss_sentence(numbers)):
            yield sentence
