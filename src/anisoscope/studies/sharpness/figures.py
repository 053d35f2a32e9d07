"""The page of the study of sharpness: verdicts; loss, anisotropy, drift and sharpness of every arm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

from anisoscope.claims.engine.claim import Bounds
from anisoscope.errors import AnisoscopeError
from anisoscope.results.query import Query
from anisoscope.studies.page_parts import Mark, caption, files, numeric, over_seeds, page_of, prose, verdict_section
from anisoscope.view import page
from anisoscope.view.figure import Axis, Figure, Level, Panel, Series, brief, points, series, value_axis
from anisoscope.view.page import DataTable, Fold, Heading, Page, Prose, Section, Swatch, Swatches, TableCell, text
from anisoscope.view.sections.findings import common_scope, verdict_claims
from anisoscope.view.subjects import RunView
from anisoscope.view.words import Catalogue, listed, neat, number, plural, step_words

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
QUESTIONS = ("anisotropy_without_drift", "sharpness_needs_drift")  # the claims that the study tests
LAST = (
    ("query", RELATIVE, "Relative drift of queries"),
    ("key", RELATIVE, "Relative drift of keys"),
    ("query", "qk_cosine", "Cosine of mean query and mean key"),
    ("scores", "attention_sharpness", "Sharpness"),
    ("scores", "attention_entropy", "Entropy / log m"),
    ("scores", "score_spread", "Spread of scores"),
)
DRIFTS = (
    ("query", RELATIVE, "Relative drift of queries"),
    ("key", RELATIVE, "Relative drift of keys"),
    ("query", "qk_cosine", "Cosine of the means"),
    ("query", "average_cosine", "Average cosine of queries"),
    ("key", "average_cosine", "Average cosine of keys"),
    ("query", "mean_norm", "Mean norm of queries"),
)
SCORES = (
    ("scores", "attention_sharpness", "Sharpness"),
    ("scores", "attention_entropy", "Entropy / log m"),
    ("scores", "score_spread", "Spread of scores"),
    ("scores", "first_key_mass", "Mass on the first key"),
)


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
        rows = self.query
        return {(row.model, row.seed, row.step, row.kind, row.layer, row.metric): row.value for row in rows}

    @cached_property
    def arms(self) -> list[str]:
        there = self.query.values("model")
        return [arm for arm in ARMS if f"{arm}-{self.size}" in there]

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

    def at(self, arm: str, seed: int, step: int, kind: str, metric: str, layer: int | None = None) -> float:
        """A metric at one block, or its mean over blocks; NaN if a value is missing."""
        if metric == RELATIVE:
            above, below = (self.at(arm, seed, step, kind, name, layer) for name in ("drift", "mean_norm"))
            return above / below if below else 0.0  # all queries and keys are zero: no drift
        layers = self.blocks if layer is None else [layer]
        model = f"{arm}-{self.size}"
        values = [self.values.get((model, seed, step, kind, each, metric), math.nan) for each in layers]
        return sum(values) / len(values) if values else math.nan

    def loss(self, arm: str, seed: int, step: int) -> float:
        return self.values.get((f"{arm}-{self.size}", seed, step, "training", None, "probe_loss"), math.nan)

    def over_seeds(self, value: Callable[[int], float], *, bounds: Bounds = (None, None)) -> Mark:
        """The mean over seeds with a value, with its interval for three or more seeds, clipped to `bounds`."""
        values = [found for found in map(value, self.seeds) if math.isfinite(found)]
        return over_seeds(values, bounds=bounds) or Mark(math.nan)

    def mark(self, arm: str, step: int, kind: str, metric: str, layer: int | None = None) -> Mark:
        bounds = (0.0, 1.0) if metric == RELATIVE else self.catalogue.entry(metric).bounds
        return self.over_seeds(lambda seed: self.at(arm, seed, step, kind, metric, layer), bounds=bounds)

    def loss_mark(self, arm: str, step: int) -> Mark:
        return self.over_seeds(lambda seed: self.loss(arm, seed, step), bounds=(0.0, None))

    def loss_difference(self, arm: str, step: int) -> Mark:
        """Loss minus that of ordinary attention with the same seed, over seeds."""
        return self.over_seeds(lambda seed: self.loss(arm, seed, step) - self.loss("softmax", seed, step))

    @cached_property
    def height(self) -> int | None:
        """The step after the first at which ordinary attention is most anisotropic, over all seeds."""
        later = [step for step in self.steps if step > 0]
        if not later or "softmax" not in self.arms:
            return None
        return max(later, key=lambda step: self.mark("softmax", step, "resid", "average_cosine").value)

    def measured(self, metric: str) -> bool:
        return bool(len(self.query.where(metric=metric).known()))


def loss_sentence(found: ArmNumbers) -> str:
    """A sentence on the loss of each kind of attention relative to softmax."""
    last = found.steps[-1]
    base = found.loss_mark("softmax", last) if "softmax" in found.arms else Mark(math.nan)
    others = [(arm, found.loss_difference(arm, last)) for arm in found.arms if arm != "softmax"]
    gaps = [f"{arm} {_signed(gap)}" for arm, gap in others if math.isfinite(gap.value)]
    if not math.isfinite(base.value) or not gaps:
        return ""
    return f"{found.size}, step {last}: ordinary attention has a held-out loss of {base.words}; {', '.join(gaps)}."


def _signed(gap: Mark) -> str:
    """A difference with its sign and interval."""
    sign = "+" if gap.value >= 0 else "−"
    ends = f" [{number(gap.low, 2)}, {number(gap.high, 2)}]" if math.isfinite(gap.low) else ""
    return f"{sign}{number(abs(gap.value), 2)}{ends}"


def _series(arm: str, x: Sequence[float], marks: Sequence[Mark], where: Sequence[str], **look: Any) -> Series:
    """An arm as a series with whiskers for the intervals over seeds."""
    look = {"width": 1.6, "size": 6.0, "colour": series(HUES[arm]), "marker": MARKERS[arm], **look}
    return points(ARMS[arm], x, marks, ends={"bars": "y"}, where=where, reach="95 % over seeds:", **look)


def over_training(found: ArmNumbers, mark: Callable[[str, int], Mark], title: str, name: str = "") -> Panel:
    """One line per arm over the measured steps, evenly spaced; arms are offset so that whiskers do not overlap."""
    places = range(len(found.steps))
    drawn = []
    for i, arm in enumerate(found.arms):
        across, marks = [n + 0.07 * (i - 2) for n in places], [mark(arm, step) for step in found.steps]
        drawn.append(_series(arm, across, marks, [f"step {step:,}" for step in found.steps]))
    shown = places[:: max(1, math.ceil(len(places) / 8))]
    ticks = [float(n) for n in shown], [step_words(found.steps[n]) for n in shown]
    x = Axis("step", ticks=ticks, bounds=(-0.4, len(places) - 0.6))
    return Panel(x, Axis(name, rules=True), tuple(drawn), title=title, alt=f"{title} of every arm over training.")


def over_depth(found: ArmNumbers, step: int, title: str) -> Panel:
    where = [f"block {block}" for block in found.blocks]
    drawn = [_series(arm, [block + 0.04 * (i - 2) for block in found.blocks],
                     [found.mark(arm, step, "resid", "average_cosine", block) for block in found.blocks], where)
             for i, arm in enumerate(found.arms)]  # fmt: skip
    x = Axis("block", ticks=([float(b) for b in found.blocks], [str(b) for b in found.blocks]))
    y, alt = Axis("average cosine", rules=True), f"{title}: average cosine by block."
    return Panel(x, y, tuple(drawn), title=title, alt=alt)


def loss_figure(found: ArmNumbers, stem: str) -> Figure:
    """Held-out loss over training, and the final difference from ordinary attention by seed."""
    last = found.steps[-1]
    panels = [over_training(found, found.loss_mark, "(a) Loss of held-out text", "Loss (nats per token)")]
    others = [arm for arm in found.arms if arm != "softmax"]
    drawn, seeds = [], [f"seed {seed}" for seed in found.seeds]
    for place, arm in enumerate(others):
        gaps = [brief(found.loss(arm, seed, last) - found.loss("softmax", seed, last)) for seed in found.seeds]
        dots: dict[str, Any] = {"colour": series(HUES[arm], 0.6), "width": 0, "size": 4.5, "named": False}
        drawn.append(Series(f"{ARMS[arm]}, seeds", [place - 0.12] * len(gaps), gaps, where=seeds, **dots))
        mean = [found.loss_difference(arm, last)]
        drawn.append(_series(arm, [place + 0.08], mean, ["all seeds"], width=0, named=False))
    if others:
        title = f"(b) Difference to softmax at step {last}"
        x = Axis(ticks=([float(n) for n in range(len(others))], others), bounds=(-0.5, len(others) - 0.5))
        zero, alt = Level(0.0, "no difference", dash="dash", colour="@ink"), f"{title}, by arm and seed."
        panels.append(Panel(x, Axis(rules=True), tuple(drawn), levels=(zero,), title=title, alt=alt))
    return files(stem, panels, layout="pairs", columns=2, size=2.2)


def anisotropy_figure(found: ArmNumbers, stem: str) -> Figure:
    """Average cosine of the blocks over training, and over depth at the step where it is highest and at the end."""
    height, last = found.height or found.steps[-1], found.steps[-1]
    cosine = partial(found.mark, kind="resid", metric="average_cosine")
    panels = [over_training(found, cosine, "(a) Mean over blocks", "average cosine")]
    panels += [over_depth(found, step, f"({n}) Over depth at step {step}") for n, step in (("b", height), ("c", last))]
    values = [v for panel in panels for s in panel.series for part in (s.y, s.low or ()) for v in part if v is not None]
    y = Axis("average cosine", rules=True, bounds=(min([0.0, *values]), 1.0))
    return files(stem, [replace(panel, y=y) for panel in panels], size=2.1)


def multiples_figure(found: ArmNumbers, stem: str, shown: Sequence[tuple[str, str, str]], *, columns: int) -> Figure:
    panels = [
        over_training(found, partial(found.mark, kind=kind, metric=metric), words) for kind, metric, words in shown
    ]
    return files(stem, panels, columns=columns, size=1.9)


def together_figure(found: ArmNumbers, stem: str) -> Figure:
    """One marker per block and seed at the last step: sharpness and anisotropy of the stream against drift."""
    last, panels = found.steps[-1], []
    places = list(product(found.seeds, found.blocks))
    where = [f"seed {s}, block {b}" for s, b in places]
    for title, kind, metric, words in (
        ("(a) Sharpness against drift", "scores", "attention_sharpness", "Attention sharpness"),
        ("(b) Anisotropy against drift", "resid", "average_cosine", "Average cosine after the block"),
    ):
        drawn = []
        for arm in found.arms:
            x = [sum(found.at(arm, s, last, side, RELATIVE, b) for side in ("query", "key")) / 2 for s, b in places]
            y = [found.at(arm, s, last, kind, metric, b) for s, b in places]
            look: dict[str, Any] = {"width": 0, "size": 6.5, "marker": MARKERS[arm], "where": where}
            drawn.append(Series(ARMS[arm], [*map(brief, x)], [*map(brief, y)], series(HUES[arm], 0.85), **look))
        axes = (Axis("relative drift of queries and keys (mean)", rules=True),
                value_axis([v for s in drawn for v in s.y], words))  # fmt: skip
        alt = f"{title} at step {last}, a mark for each block."
        panels.append(Panel(*axes, tuple(drawn), title=title, height=300, alt=alt))
    return files(stem, panels, layout="pairs", columns=2, size=2.3)


def study_page(run: RunView, declared: Mapping[str, Any] | None = None) -> Page:
    """The page of the study: verdicts on the two questions, then table and figures of every size."""
    sizes = [found for found in ArmNumbers.all(run, declared) if found.steps]
    if not sizes:
        raise AnisoscopeError(f"{run.path!r} has no step that all arms were measured at; let the study finish.")
    facts = [f"{found.size.replace('x', ' × ')}, {plural(len(found.seeds), 'seed')}, {found.steps[-1]} updates"
            for found in sizes]  # fmt: skip
    name = (run.about.get("data") or {}).get("name")
    name = "the embedded corpus" if name == "embedded" else name
    deck = f"One decoder with five kinds of attention: {', '.join(facts)}" + (f"; trained on {name}" if name else "")
    claims = [_with_seeds(each, run.verdicts) for each in verdict_claims(run.verdicts)]
    sections = [_verdicts(sizes, [c for c in claims if c["name"] in QUESTIONS])]
    sections += [_size_section(found, alone=len(sizes) == 1) for found in sizes]
    others = [claim for claim in claims if claim["name"] not in QUESTIONS]
    if others:
        table = page.Verdicts(others, "Arms", common_scope(others), first="Statement", parts=False)
        lead, fold = (
            Prose("Told for each arm by itself, whatever its attention."),
            Fold(f"{len(others)} claims", [table]),
        )
        sections.append(Section("others", "Other claims about the same runs", [lead, fold]))
    return page_of(run, "Sharpness and drift", deck, sections, terms=TERMS, heading="Does sharp attention need drift?")


def _with_seeds(claim: dict[str, Any], verdicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A claim whose rows also list the result of each seed, and whether an effect has vanished at the last step."""
    for row in claim["rows"]:
        verdict = next(v for v in verdicts if (v["claim"], v["subject"]) == (claim["name"], row["subject"]))
        details = verdict.get("details") or {}
        row["by_seed"] = "" if row["seeds"] else listed([neat(each["effect"]) for each in details.get("per_seed", [])])
        last = details.get("aspects", {}).get("at the end", {})
        transient = row["status"] == "holds" and last.get("status") == "fails"
        row["under"] = ["transient: not left at the last step"] if transient else []
        statuses = [f"{seed['scope'].replace('for ', '')}: {seed['status']}" for seed in row["seeds"]]
        row["under"] += [", ".join(statuses)] if statuses else []
    return claim


def _verdicts(sizes: Sequence[ArmNumbers], claims: Sequence[Mapping[str, Any]]) -> Section:
    lead = prose(
        "A statement <em>holds</em> where the 95&nbsp;% interval of its effect lies beyond its margin, <em>fails</em> "
        "where it lies short of it, and is <em>undecided</em> otherwise. Arms of one seed have the same initial "
        "weights, the same text and the same batches. Seeds are the replicates: intervals are over three or more of "
        "them (Student’s t), and with fewer both questions stay undecided."
    )
    losses = []
    for found in sizes:
        if told := loss_sentence(found):
            more = ", 95&nbsp;% over seeds" if len(found.seeds) > 2 else ""
            aside = f" Differences are paired by seed{more}." if found is sizes[0] else ""
            losses.append(prose("{told}" + aside, told=told))
    return verdict_section(lead, claims, "Arms", *losses, first="Statement")


def _size_section(found: ArmNumbers, *, alone: bool) -> Section:
    of, name = "" if alone else f"-{found.size}", found.size.replace("x", " × ")
    many = f", ± 95&nbsp;% over {len(found.seeds)} seeds" if len(found.seeds) > 2 else ""
    beneath = prose(
        f"Means over blocks and heads{many}. Drift is relative: ‖mean‖ / mean ‖·‖ of queries and of keys as they meet. "
        "The step in the middle is the one at which ordinary attention is most anisotropic."
    )
    shown = {
        "Anisotropy of the stream": (
            anisotropy_figure(found, f"sharpness-anisotropy{of}"),
            "Average cosine of the rows after each block. (a) Mean over blocks, over training. (b) Over depth where "
            "ordinary attention is most anisotropic, and (c) at the end.",
        ),
        "Drift of queries and keys": (
            multiples_figure(found, f"sharpness-drift{of}", DRIFTS, columns=3),
            "Queries and keys as they meet (after rotation and whatever the arm does to them), means over heads and "
            "blocks. Uniform attention has neither: its queries and keys are zero, which have no direction. The cosine "
            "of two means that are next to nothing says nothing (means removed).",
        ),
    }
    if found.measured("probe_loss"):
        words = (
            "(a) Loss of held-out text over training; steps are evenly spaced. (b) At the end, minus ordinary "
            "attention from the same seed: small dots are seeds. Whiskers here and below: 95&nbsp;% over seeds."
        )
        shown = {"Loss": (loss_figure(found, f"sharpness-loss{of}"), words), **shown}
    if found.measured("attention_sharpness"):
        words = (
            "Sharpness is 0 where all allowed keys have the same weight and 1 where one has all; rows that see "
            "fewer than 8 keys are left out."
        )
        shown["Sharpness"] = multiples_figure(found, f"sharpness-sharpness{of}", SCORES, columns=2), words
        words = f"At step {found.steps[-1]}, a mark for each block of each seed."
        shown["Together"] = together_figure(found, f"sharpness-together{of}"), words
    key = Swatches([Swatch(ARMS[arm], series(HUES[arm])) for arm in found.arms])
    parts = [p for title, (figure, words) in shown.items() for p in (Heading(title), key, figure, caption(words))]
    return Section(f"size-{found.size}", name, [_table(found), beneath, *parts], name)


def _table(found: ArmNumbers) -> DataTable:
    """A table of all arms: loss, anisotropy at three steps, queries, keys and scores at the last step."""
    last = found.steps[-1]
    rows: dict[str, Callable[[str], Mark]] = {
        "Held-out loss": partial(found.loss_mark, step=last),
        "Held-out loss minus softmax": partial(found.loss_difference, step=last),
    }
    for step in sorted({found.steps[0], found.height or last, last}):
        cosine = partial(found.mark, step=step, kind="resid", metric="average_cosine")
        rows[f"Average cosine of blocks, step {step}"] = cosine
    rows |= {words: partial(found.mark, step=last, kind=kind, metric=metric) for kind, metric, words in LAST}
    names = [text("{name}<br><code>{arm}</code>", name=ARMS[arm].capitalize(), arm=arm) for arm in found.arms]
    body = [[TableCell(name, head=True), *(mark(arm).words for arm in found.arms)] for name, mark in rows.items()]
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
    for found in ArmNumbers.all(run):
        if found.steps and (words := loss_sentence(found)):
            yield words
