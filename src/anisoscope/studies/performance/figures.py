"""The page of the performance study: loss, probes and geometry by repair over depth; geometry with performance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.table import Table as RichTable

from anisoscope.results.quantity import Quantity, mean
from anisoscope.results.query import Query
from anisoscope.results.schema import variant_name
from anisoscope.view.console import new_table
from anisoscope.view.figure import Axis, Figure, Level, Panel, Series, brief, sequence, series
from anisoscope.view.matplotlib_renderer import slug
from anisoscope.view.page import (
    DataTable,
    Fold,
    Heading,
    Page,
    Prose,
    Section,
    Swatch,
    Swatches,
    TableCell,
    Verdicts,
    text,
)
from anisoscope.view.sections.findings import common_scope, verdict_claims
from anisoscope.view.sections.record import record_section, terms_section
from anisoscope.view.subjects import DrawnSite, RunView
from anisoscope.view.words import estimate, number, step_words

REPAIRS = {"raw": "raw", "mean": "mean removed", "all_but_top": "all but the top", "whitened": "whitened"}
READINGS = {"patched": "patched into the model", "readout": "fresh readout"}
GEOMETRY = {
    "svd_ratio": "Anisotropy σ₁/Σσ",
    "average_cosine": "Average cosine",
    "two_nn": "Intrinsic dimension (TwoNN)",
    "iso_score": "IsoScore",
}
PERFORMANCES = {"loss": "the model’s own loss", "readout": "loss of a fresh readout", "probe": "mean probe accuracy"}
HUES = dict(zip(REPAIRS, (6, 0, 2, 1), strict=True))
MARKERS = dict(zip(REPAIRS, ("circle", "square", "diamond", "triangle-up"), strict=True))
SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star")
Step = int | None


@dataclass(frozen=True)
class Reading:
    """One number with its interval."""

    value: float
    low: float
    high: float
    n: int = 0
    contexts: int = 0
    note: str = ""

    @property
    def words(self) -> str:
        return estimate(self.value, self.low, self.high) if math.isfinite(self.value) else "–"


def words_of(mark: Reading | None) -> str:
    return "–" if mark is None else mark.words


@dataclass(frozen=True)
class ModelNumbers:
    """The numbers of one model by metric, variant, step and site."""

    query: Query
    model: str

    @classmethod
    def all(cls, run: RunView) -> list[ModelNumbers]:
        query = Query(run.table)
        return [cls(query.where(model=model), str(model)) for model in query.values("model")]

    @cached_property
    def rows(self) -> dict[tuple[str, str, Step, DrawnSite | None, str], Any]:
        return {(r.metric, r.variant, r.step, None if r.layer is None else DrawnSite.of(r.layer, r.kind), r.stack): r
                for r in self.query}  # fmt: skip

    @cached_property
    def places(self) -> list[tuple[str, DrawnSite]]:
        """Stack and site, in order of depth."""
        return sorted({(key[4], key[3]) for key in self.rows if key[3] and key[0] != "performance_correlation"})

    @cached_property
    def steps(self) -> list[Step]:
        found = {key[2] for key in self.rows if key[3] is not None and key[0] != "performance_correlation"}
        return sorted(found, key=lambda step: -1 if step is None else step)

    @cached_property
    def tasks(self) -> list[str]:
        return [str(task) for task in self.query.where(metric="probe_selectivity").values("task")]

    @property
    def last(self) -> Step:
        return self.steps[-1]

    def row(self, metric: str, step: Step, place: tuple[str, DrawnSite] | None, **variant: Any) -> Any:
        name = variant_name(variant)
        if place is not None:
            return self.rows.get((metric, name, step, place[1], place[0]))
        return next((row for key, row in self.rows.items() if key[:3] == (metric, name, step) and key[3] is None), None)

    def value(self, metric: str, step: Step, place: tuple[str, DrawnSite] | None, **variant: Any) -> Reading | None:
        row = self.row(metric, step, place, **variant)
        return None if row is None else Reading(row.value, row.low, row.high, row.n or 0, row.contexts or 0, row.note)

    def accuracy(self, step: Step, place: tuple[str, DrawnSite], repair: str, **variant: Any) -> Reading | None:
        """The mean accuracy over tasks; its interval from the means of what is left when a fold is left out."""
        rows = [self.row("probe_accuracy", step, place, task=task, repair=repair, **variant) for task in self.tasks]
        found = [row for row in rows if row is not None and row.known]
        if not found or len(found) < len(rows):
            return None
        whole = mean([Quantity(row.value, row.folds) for row in found])
        low, high = whole.interval()
        ends = (low if math.isnan(low) else max(low, 0.0)), (high if math.isnan(high) else min(high, 1.0))
        return Reading(whole.value, *ends, min(r.n or 0 for r in found), min(r.contexts or 0 for r in found))


# figures


def _points(
    label: str, x: Sequence[float], marks: Sequence[Reading | None], where: Sequence[str], **look: Any
) -> Series:
    """A line through the values with whiskers for their intervals; what is missing leaves a gap."""
    values = [None if m is None else brief(m.value) for m in marks]
    ends: dict[str, Any] = {n: [None if m is None else brief(getattr(m, n)) for m in marks] for n in ("low", "high")}
    ends = ends | {"bars": "y", "reach": "95 % over contexts:"} if any(v is not None for v in ends["low"]) else {}
    return Series(label, x, values, where=where, **({} if look.pop("plain", False) else ends), **look)


def depth_axis(found: ModelNumbers) -> Axis:
    names = [{"embed": "emb", "final": "fin"}.get(site.kind, str(site.layer)) for _, site in found.places]
    every = max(1, math.ceil(len(names) / 14))
    shown = [i for i in range(len(names)) if i % every == 0 or i == len(names) - 1]
    return Axis(
        "block", ticks=([float(i) for i in shown], [names[i] for i in shown]), bounds=(-0.35, len(names) - 0.65)
    )


def by_repair(found: ModelNumbers, mark: Callable[[tuple[str, DrawnSite], str], Reading | None]) -> list[Series]:
    """Over depth, a line for each repair, a little apart so that whiskers show; raw on top."""
    where = [site.name for _, site in found.places]
    drawn = []
    for i, (repair, name) in enumerate(REPAIRS.items()):
        x = [n + 0.05 * (i - 1.5) for n in range(len(found.places))]
        marks = [mark(place, repair) for place in found.places]
        drawn.append(_points(name, x, marks, where, colour=series(HUES[repair]), marker=MARKERS[repair], size=6.0))
    return [*drawn[1:], drawn[0]]


def loss_figure(found: ModelNumbers, stem: str) -> Figure:
    """Loss over depth: of the model that goes on from repaired rows, and of a fresh readout."""
    panels = []
    own = found.value("lm_loss", found.last, found.places[-1], reading="patched", repair="raw")
    levels = () if own is None else (Level(own.value, "the model itself", dash="dash", colour="@ink"),)
    titles = ("(a) Rows repaired inside the model", "(b) A fresh linear readout")
    for name, reading in zip(titles, READINGS, strict=True):

        def mark(place: tuple[str, DrawnSite], repair: str, reading: str = reading) -> Reading | None:
            return found.value("lm_loss", found.last, place, reading=reading, repair=repair)

        drawn = by_repair(found, mark)
        panels.append(Panel(depth_axis(found), Axis("Loss (nats per token)", rules=True), tuple(drawn), levels=levels,
                            title=name, height=280, alt=f"{name}: loss over depth by repair."))  # fmt: skip
    return Figure(tuple(panels), layout="pairs", files={stem: {}}, columns=2, size=2.2)


def probe_figure(found: ModelNumbers, stem: str, **variant: Any) -> Figure:
    """Accuracy of probes over depth, task by task, with the most frequent class and the shuffled control."""
    panels, x = [], [float(n) for n in range(len(found.places))]
    where = [site.name for _, site in found.places]
    for task in found.tasks:

        def mark(place: tuple[str, DrawnSite], repair: str, task: str = task) -> Reading | None:
            return found.value("probe_accuracy", found.last, place, task=task, repair=repair, **variant)

        drawn = by_repair(found, mark)
        grey: dict[str, Any] = {"colour": "@soft", "width": 1.2, "plain": True}
        chance = [found.value("probe_accuracy", found.last, p, task=task, control="majority") for p in found.places]
        drawn.append(_points("most frequent class", x, chance, where, dash="dash", **grey))
        if not variant:
            mixed = [
                found.value("probe_accuracy", found.last, p, task=task, repair="raw", control="shuffled")
                for p in found.places
            ]
            drawn.append(_points("shuffled labels", x, mixed, where, dash="dot", **grey))
        words = task.replace("_", " ")
        panels.append(Panel(depth_axis(found), Axis("Accuracy", rules=True), tuple(drawn), title=words,
                            alt=f"Accuracy in {words} over depth by repair."))  # fmt: skip
    return Figure(tuple(panels), files={stem: {}}, most=99, size=1.9)


def geometry_figure(found: ModelNumbers, stem: str) -> Figure:
    """The geometry of the same rows, raw and repaired."""
    panels = []
    for metric, name in GEOMETRY.items():
        drawn = by_repair(found, lambda p, r, metric=metric: found.value(metric, found.last, p, repair=r))  # type: ignore[misc]
        panels.append(
            Panel(depth_axis(found), Axis(rules=True), tuple(drawn), title=name, alt=f"{name} over depth by repair.")
        )
    return Figure(tuple(panels), layout="pairs", files={stem: {}}, columns=2, size=1.9)


def _site_look(found: ModelNumbers, i: int) -> dict[str, Any]:
    return {"colour": sequence(i / max(1, len(found.places) - 1)), "marker": SHAPES[i % len(SHAPES)]}


def course_figure(found: ModelNumbers, stem: str) -> Figure:
    """Over checkpoints: anisotropy, the model's own loss and the probes, each layer a line."""
    x = [float(n) for n in range(len(found.steps))]  # steps are close to log-spaced anyway, and 0 has no logarithm
    names = ["–" if step is None else step_words(step) for step in found.steps]
    where = [f"step {name}" for name in names]
    columns: tuple[list[Series], list[Series], list[Series]] = ([], [], [])
    for i, place in enumerate(found.places):
        look = _site_look(found, i) | {"size": 5.0, "named": i in (0, len(found.places) // 2, len(found.places) - 1)}
        marks = (
            [found.value("svd_ratio", step, place, repair="raw") for step in found.steps],
            [found.value("lm_loss", step, place, reading="readout", repair="raw") for step in found.steps],
            [found.accuracy(step, place, "raw") for step in found.steps],
        )
        for column, line in zip(columns, marks, strict=True):
            column.append(_points(place[1].name, x, line, where, **look))
    own = [found.value("lm_loss", step, found.places[-1], reading="patched", repair="raw") for step in found.steps]
    columns[1].append(_points("the model itself", x, own, where, colour="@ink", dash="dash", plain=True))
    titles = (f"(a) {GEOMETRY['svd_ratio']}", "(b) Loss (nats per token)", "(c) Mean probe accuracy")
    axis = Axis("step", ticks=(x, names))
    panels = [Panel(axis, Axis(rules=True), tuple(drawn), title=name, alt=f"{name} over checkpoints, by site.")
              for name, drawn in zip(titles, columns, strict=True) if drawn]  # fmt: skip
    return Figure(tuple(panels), files={stem: {}}, size=2.1)


def together_figure(found: ModelNumbers, stem: str) -> Figure:
    """Geometry against performance: a point for each layer (shape) and checkpoint (colour)."""
    panels, several = [], len(found.steps) > 1
    for row, y_name in enumerate(("Readout loss (nats)", "Mean probe accuracy")):
        for metric, name in GEOMETRY.items():
            drawn = []
            for i, place in enumerate(found.places):
                pairs = [
                    (
                        found.value(metric, step, place, repair="raw"),
                        found.accuracy(step, place, "raw")
                        if row
                        else found.value("lm_loss", step, place, reading="readout", repair="raw"),
                    )
                    for step in found.steps
                ]
                there = [(n, a, b) for n, (a, b) in enumerate(pairs) if a and b and math.isfinite(a.value + b.value)]
                if there:
                    shade = [n / max(1, len(found.steps) - 1) for n, *_ in there] if several else None
                    where = [place[1].name + (f", step {found.steps[n]:,}" if several else "") for n, *_ in there]
                    drawn.append(
                        Series(
                            place[1].name,
                            [brief(a.value) for _, a, _ in there],
                            [brief(b.value) for *_, b in there],
                            "@s1",
                            width=0,
                            size=6.5,
                            marker=SHAPES[i % len(SHAPES)],
                            shade=shade,
                            where=where,
                            named=i < 6,
                        )
                    )
            panels.append(
                Panel(
                    Axis(name, rules=True),
                    Axis(y_name, rules=True),
                    tuple(drawn),
                    height=250,
                    alt=f"{y_name} against {name}, a mark for each site.",
                )
            )
    return Figure(tuple(panels), files={stem: {}}, most=8, columns=4, size=2.0)


# the page


def study_page(run: RunView, declared: Mapping[str, Any] | None = None) -> Page:
    """Verdicts, then everything about each model."""
    models, about = ModelNumbers.all(run), run.about
    data, started = about.get("data") or {}, str(about.get("started", ""))[:10]
    named = str(data.get("name") or "")
    read = "the embedded corpus" if named == "embedded" else f"the {named}" if named.startswith("held-out") else named
    deck = ", ".join(found.model for found in models) + (
        f", {data.get('contexts')} contexts of {read}" if named else ""
    )
    sections = [
        _verdict_section(run, len(models)),
        *(_model_section(found, alone=len(models) == 1) for found in models),
    ]
    lead = (
        "What is needed to run it again. All numbers are in <code>table.parquet</code>, the verdicts in "
        "<code>verdicts.json</code>."
    )
    record = record_section([run], text(lead))
    warned = [Prose(str(words)) for words in about.get("warnings") or []]
    sections += [
        Section("record", "Record", [*warned, *record.parts], "Record"),
        terms_section(_terms(about["config"])),
    ]
    return Page(
        "Does the geometry matter",
        "Does the geometry matter?",
        sections,
        deck=f"{deck}{', ' + started if started else ''}.",
        version=str(about.get("anisoscope", "")),
    )


def _verdict_section(run: RunView, models: int) -> Section:
    lead = (
        "A statement <em>holds</em> where the 95&nbsp;% interval of its effect lies beyond its margin, <em>fails</em> "
        "where it lies short of it, and is <em>undecided</em> otherwise. Repairs, readouts and probes are fitted on "
        "one half of the contexts; every number is about the other half, and its interval leaves out one of eight "
        "folds of those contexts at a time. Effects of repairs are paired with raw rows, token by token, at the last "
        "checkpoint, and averaged over sites. "
        "Everything is said of " + ("this model" if models == 1 else "these models") + " alone."
    )
    claims = verdict_claims(run.verdicts)
    table = Verdicts(claims, "Model" if models > 1 else "", common_scope(claims), first="Statement", parts=False)
    return Section("summary", "Verdicts", [Prose(text(lead)), table], "Verdicts")


def _caption(words: str) -> Prose:
    return Prose(text(words), css="says")


def _repairs(*more: Swatch) -> Swatches:
    return Swatches([*(Swatch(name, series(HUES[repair])) for repair, name in REPAIRS.items()), *more])


def _model_section(found: ModelNumbers, *, alone: bool) -> Section:
    of = "" if alone else f"-{slug(found.model)}"
    itself = Swatch("the model itself", "@ink", "dash")
    parts: list[Any] = [
        Heading("Loss"),
        _repairs(itself),
        loss_figure(found, f"performance-loss{of}"),
        _caption(
            "(a) The rows of one site are repaired, given their usual mean norm back, and the rest of the network runs "
            "on: what the network itself relies on. (b) A fresh softmax readout from the rows to the token that the "
            "model predicts there: what is linearly there to be read. Dashed: the model as it is. Whiskers: 95&nbsp;% "
            "over contexts."
        ),
        Fold("Numbers", [_loss_table(found)]),
    ]
    if found.tasks:
        parts += _probe_parts(found, of)
    parts += [
        Heading("Geometry"),
        _repairs(),
        geometry_figure(found, f"performance-geometry{of}"),
        _caption("The geometry of the test rows, raw and repaired; the repairs were fitted on other contexts."),
        Heading("Geometry and performance"),
    ]
    if len(found.steps) > 1:
        parts += [course_figure(found, f"performance-course{of}"), _caption(
            "Over checkpoints, raw rows, a line for each site; dashed in (b): the model’s own loss.")]  # fmt: skip
    more = " (shape) and checkpoint (colour, light to dark)" if len(found.steps) > 1 else ""
    parts += [together_figure(found, f"performance-together{of}"), _caption(
        f"Raw rows, a mark for each site{more}. Above: loss of a fresh readout. Below: mean accuracy of the "
        f"linear probes.")]  # fmt: skip
    name = found.model + (f" at step {found.last:,}" if found.last is not None else "")
    return Section(f"model-{slug(found.model)}", name, [*parts, *_correlation_parts(found)], found.model)


def _loss_table(found: ModelNumbers) -> DataTable:
    """Loss by site and repair, both readings, and how many tokens it is about."""
    heads = [
        [
            TableCell("Site", rows=2),
            *(TableCell(r.capitalize(), columns=len(REPAIRS), css="num") for r in READINGS.values()),
            TableCell("Test tokens", rows=2, css="num"),
        ],
        [TableCell(name, css="num") for _ in READINGS for name in REPAIRS.values()],
    ]
    body = []
    for place in found.places:
        cells = {
            reading: [found.value("lm_loss", found.last, place, reading=reading, repair=repair) for repair in REPAIRS]
            for reading in READINGS
        }
        counts = [next((m.n for m in marks if m is not None), 0) for marks in cells.values()]
        told = [words_of(mark) for marks in cells.values() for mark in marks]
        body.append([TableCell(place[1].name, head=True), *told, " / ".join(f"{count:,}" for count in counts)])
    return DataTable(heads, [body], "Loss by site and repair", "plain wide")


def _probe_parts(found: ModelNumbers, of: str) -> list[Any]:
    lead = (
        "With a free intercept a shift changes nothing, so mean-removed rows give the very same linear probe as raw "
        "ones. Without a penalty no invertible affine map would: what whitening changes here, it changes through the "
        "penalty, which is chosen on held contexts of the fit half for every repair from the same grid. The nearest "
        "class mean by cosine has no such invariance."
    )
    controls = Swatch("most frequent class", "@soft", "dash"), Swatch("shuffled labels", "@soft", "dot")
    parts: list[Any] = [
        Heading("Probes"),
        Prose(lead),
        _repairs(*controls),
        probe_figure(found, f"performance-probes{of}"),
        _caption(
            "Linear probes (multinomial logistic regression). Grey: always the most frequent class (dashed), and the "
            "same probe on shuffled labels (dotted). Mean removed lies on raw by construction."
        ),
        _repairs(controls[0]),
        probe_figure(found, f"performance-cosine{of}", probe="cosine"),
        _caption("The nearest class mean by cosine, for the same tasks and rows."),
    ]
    return [*parts, *(_task_fold(found, task) for task in found.tasks)]


def _task_fold(found: ModelNumbers, task: str) -> Fold:
    """Accuracy by site and repair, linear and by cosine, with chance and the shuffled control."""
    body, n, contexts = [], 0, 0
    for place in found.places:
        at: dict[str, Any] = {"task": task}
        linear = [found.value("probe_accuracy", found.last, place, **at, repair=r) for r in REPAIRS]
        near = [found.value("probe_accuracy", found.last, place, **at, repair=r, probe="cosine") for r in REPAIRS]
        chance = found.value("probe_accuracy", found.last, place, **at, control="majority")
        mixed = found.value("probe_accuracy", found.last, place, **at, repair="raw", control="shuffled")
        if chance is not None:
            n, contexts = chance.n, chance.contexts
        body.append([TableCell(place[1].name, head=True), *(words_of(m) for m in (*linear, mixed, chance, *near))])
    wide = len(REPAIRS)
    heads = [
        [
            TableCell("Site", rows=2),
            TableCell("Linear probe", columns=wide, css="num"),
            TableCell("Controls", columns=2, css="num"),
            TableCell("Nearest class mean by cosine", columns=wide, css="num"),
        ],
        [
            TableCell(name, css="num")
            for name in (*REPAIRS.values(), "shuffled labels", "most frequent", *REPAIRS.values())
        ],
    ]
    words = f"{task.replace('_', ' ').capitalize()}: {n:,} test rows in {contexts:,} contexts"
    return Fold(words, [DataTable(heads, [body], f"Accuracy in {task}", "plain wide")])


def _correlation_parts(found: ModelNumbers) -> list[Any]:
    """Rank correlations over checkpoints (mean over sites) and over layers (last checkpoint)."""
    body = []
    for over, step, more in (("checkpoints", None, {"sites": "mean"}), ("layers", found.last, {})):
        for geometry, name in GEOMETRY.items():
            for performance, words in PERFORMANCES.items():
                where = {"geometry": geometry, "performance": performance, "over": over, "method": "spearman", **more}
                contexts, points = (found.value("performance_correlation", step, None, **where, interval=kind)
                                    for kind in ("contexts", over))  # fmt: skip
                if contexts is None or points is None or not math.isfinite(contexts.value):
                    continue
                linear = found.value(
                    "performance_correlation", step, None, **{**where, "method": "pearson"}, interval="contexts"
                )
                ends = [
                    f"{number(m.low, 2)} to {number(m.high, 2)}" if math.isfinite(m.low) else "–"
                    for m in (contexts, points)
                ]
                cells = [number(contexts.value), *ends, number(linear.value) if linear else "–"]
                body.append([TableCell(name, head=True), TableCell(words), TableCell(f"{contexts.n} {over}"), *cells])
    if not body:
        return []
    lead = (
        "Spearman’s correlation with two intervals: over contexts (measurement noise), and over the points (each "
        "checkpoint or layer left out once). Checkpoints of one run share their history and layers of one model their "
        "weights: they are no independent samples, both quantities may simply move with time or depth, and a p-value "
        "only describes."
    )
    heads = [
        "Geometry of raw rows",
        TableCell("Performance"),
        TableCell("Over"),
        "Spearman",
        "Over contexts",
        "Over the points",
        "Pearson",
    ]
    table = DataTable([heads], [body], "Rank correlations", "plain wide")
    return [Prose(lead), Fold("Rank correlations", [table], open=len(body) <= 24)]


def _terms(config: Mapping[str, Any]) -> list[tuple[str, Sequence[str], str, Sequence[str]]]:
    directions = config.get("directions") or "a hundredth of the width, at least 1"
    shrinkage = config["shrinkage"] if config.get("shrinkage") is not None else "d/(n + d)"
    return [
        ("Mean removed", ["repair=mean"], "x − μ", ["μ the mean of the fit rows of the site."]),
        (
            "All but the top",
            ["repair=all_but_top"],
            "(I − U_D U_Dᵀ)(x − μ)",
            [f"U_D the first D principal directions of the fit rows, D = {directions}."],
        ),
        (
            "Whitened",
            ["repair=whitened"],
            "U Λ^(−½) Uᵀ (x − μ)",
            [
                f"ZCA; Λ the eigenvalues of the covariance, shrunk towards their median (share {shrinkage}). "
                f"Directions without "
                "variance are mapped to 0."
            ],
        ),
        (
            "Loss",
            ["lm_loss"],
            "",
            [
                text(
                    "Cross-entropy in nats per token that the model predicts. <code>reading=patched</code>: its own, "
                    "with the rows of one site repaired and multiplied by one number that gives the fit rows their "
                    "mean norm back. <code>reading=readout</code>: of a fresh softmax regression from the rows, over "
                    "the {n} most frequent tokens at most. <code>against=raw</code>: the difference to raw rows.",
                    n=config.get("classes"),
                )
            ],
        ),
        (
            "Accuracy",
            ["probe_accuracy"],
            "",
            [
                text(
                    "Share of test rows whose class is found. <code>control=shuffled</code>: the same probe fitted "
                    "and tested on shuffled labels; <code>control=majority</code>: always the most frequent class of "
                    "the fit rows; <code>probe=cosine</code>: the class whose mean direction is nearest. Labels of "
                    "whole contexts use the {pool} row.",
                    pool=config.get("pool"),
                )
            ],
        ),
        ("Selectivity", ["probe_selectivity"], "", ["Accuracy minus that of the shuffled control."]),
        (
            "Correlation",
            ["performance_correlation"],
            "",
            [
                text(
                    "Of geometry with performance, over layers or checkpoints; <code>of=changes</code>: of the "
                    "differences between neighbouring checkpoints."
                )
            ],
        ),
    ]


def summary(run: RunView) -> Iterator[RichTable]:
    """What the console shows: loss and mean accuracy by site and repair, at the last checkpoint of each model."""
    for found in ModelNumbers.all(run):
        step = found.last
        when = "" if step is None else f" at step {step:,}"
        columns = (*(f"loss, {name}" for name in READINGS), "linear probes", "nearest class mean")
        table = new_table(f"{found.model}{when}, test contexts", ("site", "repair"), columns)
        for site in found.places:
            for i, repair in enumerate(REPAIRS):
                loss = [found.value("lm_loss", step, site, reading=reading, repair=repair) for reading in READINGS]
                marks = [*loss, found.accuracy(step, site, repair), found.accuracy(step, site, repair, probe="cosine")]
                table.add_row(site[1].name if not i else "", repair, *map(words_of, marks))
        yield table
