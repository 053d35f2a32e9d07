"""The page of the performance study: loss, probes and geometry by repair over depth; geometry with performance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from rich.table import Table as RichTable

from anisoscope.results.quantity import Quantity, mean
from anisoscope.results.query import Query, variant_name
from anisoscope.studies.page_parts import Mark, caption, files, numeric, page_of, prose, verdict_section, words_of
from anisoscope.view.console import new_table
from anisoscope.view.figure import Axis, Figure, Level, Panel, Series, column, points, sequence, series
from anisoscope.view.matplotlib_renderer import slug
from anisoscope.view.page import DataTable, Fold, Heading, Page, Prose, Section, Swatch, Swatches, TableCell
from anisoscope.view.sections.findings import verdict_claims
from anisoscope.view.subjects import DrawnSite, RunView
from anisoscope.view.words import number, step_words

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
WHISKERS = {"bars": "y", "reach": "95 % over contexts:"}
Step = int | None
Place = tuple[str, DrawnSite]  # stack and site


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
    def places(self) -> list[Place]:
        """All (stack, site), in order of depth."""
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

    def row(self, metric: str, step: Step, place: Place | None, **variant: Any) -> Any:
        name = variant_name(variant)
        if place is not None:
            return self.rows.get((metric, name, step, place[1], place[0]))
        return next((row for key, row in self.rows.items() if key[:3] == (metric, name, step) and key[3] is None), None)

    def value(self, metric: str, step: Step, place: Place | None, **variant: Any) -> Mark | None:
        row = self.row(metric, step, place, **variant)
        return None if row is None else Mark(row.value, row.low, row.high, row.n or 0, row.contexts or 0)

    def readout(self, step: Step, place: Place) -> Mark | None:
        """The loss of a fresh readout from raw rows."""
        return self.value("lm_loss", step, place, reading="readout", repair="raw")

    def accuracy(self, step: Step, place: Place, repair: str, **variant: Any) -> Mark | None:
        """The mean accuracy over tasks, with its jackknife interval over folds."""
        rows = [self.row("probe_accuracy", step, place, task=task, repair=repair, **variant) for task in self.tasks]
        found = [row for row in rows if row is not None and row.known]
        if not found or len(found) < len(rows):
            return None
        whole = mean([Quantity(row.value, row.folds) for row in found])
        low, high = whole.interval()
        ends = (low if math.isnan(low) else max(low, 0.0)), (high if math.isnan(high) else min(high, 1.0))
        return Mark(whole.value, *ends, min(r.n or 0 for r in found), min(r.contexts or 0 for r in found))


def depth_axis(found: ModelNumbers) -> Axis:
    names = [{"embed": "emb", "final": "fin"}.get(site.kind, str(site.layer)) for _, site in found.places]
    every = max(1, math.ceil(len(names) / 14))
    shown = [i for i in range(len(names)) if i % every == 0 or i == len(names) - 1]
    ticks = [float(i) for i in shown], [names[i] for i in shown]
    return Axis("block", ticks=ticks, bounds=(-0.35, len(names) - 0.65))


def by_repair(found: ModelNumbers, title: str, metric: str, variant: Mapping[str, str], **look: Any) -> Panel:
    """A metric over depth, one line per repair, slightly offset so that whiskers do not overlap; raw on top."""
    where, drawn = [site.name for _, site in found.places], []
    for i, (repair, name) in enumerate(REPAIRS.items()):
        x = [n + 0.05 * (i - 1.5) for n in range(len(found.places))]
        marks = [found.value(metric, found.last, place, repair=repair, **variant) for place in found.places]
        style: dict[str, Any] = {"colour": series(HUES[repair]), "marker": MARKERS[repair], "size": 6.0}
        drawn.append(points(name, x, marks, ends=WHISKERS, where=where, **style))
    y, more = Axis(look.pop("y", ""), rules=True), look.pop("more", ())
    return Panel(depth_axis(found), y, (*drawn[1:], drawn[0], *more), title=title, **look)


def loss_figure(found: ModelNumbers, stem: str) -> Figure:
    """Loss over depth: of the model continued from repaired rows, and of a fresh readout."""
    model_loss = found.value("lm_loss", found.last, found.places[-1], reading="patched", repair="raw")
    levels = () if model_loss is None else (Level(model_loss.value, "the model itself", dash="dash", colour="@ink"),)
    look: dict[str, Any] = {"y": "Loss (nats per token)", "levels": levels, "height": 280}
    titles = {"patched": "(a) Rows repaired inside the model", "readout": "(b) A fresh linear readout"}
    panels = [by_repair(found, name, "lm_loss", {"reading": reading}, **look, alt=f"{name}: loss over depth by repair.")
              for reading, name in titles.items()]  # fmt: skip
    return files(stem, panels, layout="pairs", columns=2, size=2.2)


def probe_figure(found: ModelNumbers, stem: str, **variant: str) -> Figure:
    """Accuracy of probes over depth, task by task, with the most frequent class and the shuffled control."""
    panels = []
    controls = {"most frequent class": ("dash", {"control": "majority"})}
    if not variant:
        controls["shuffled labels"] = ("dot", {"repair": "raw", "control": "shuffled"})
    for task in found.tasks:
        grey = []
        for name, (dash, control) in controls.items():
            marks = [found.value("probe_accuracy", found.last, p, task=task, **control) for p in found.places]
            x, where = [float(n) for n in range(len(marks))], [site.name for _, site in found.places]
            grey.append(Series(name, x, column(marks), "@soft", where=where, dash=dash, width=1.2))
        title = task.replace("_", " ")
        look: dict[str, Any] = {"y": "Accuracy", "more": grey, "alt": f"Accuracy in {title} over depth by repair."}
        panels.append(by_repair(found, title, "probe_accuracy", {"task": task, **variant}, **look))
    return files(stem, panels, most=99, size=1.9)


def geometry_figure(found: ModelNumbers, stem: str) -> Figure:
    """The geometry of the same rows, raw and repaired."""
    panels = [
        by_repair(found, name, metric, {}, alt=f"{name} over depth by repair.") for metric, name in GEOMETRY.items()
    ]
    return files(stem, panels, layout="pairs", columns=2, size=1.9)


def course_figure(found: ModelNumbers, stem: str) -> Figure:
    """Anisotropy, the model's own loss and probe accuracy over checkpoints, one line per layer."""
    x = [float(n) for n in range(len(found.steps))]  # steps are roughly log-spaced, with step 0
    names = ["–" if step is None else step_words(step) for step in found.steps]
    where, last = [f"step {name}" for name in names], len(found.places) - 1
    columns: tuple[list[Series], list[Series], list[Series]] = ([], [], [])
    for i, place in enumerate(found.places):
        look: dict[str, Any] = {"colour": sequence(i / max(1, last)), "marker": SHAPES[i % len(SHAPES)], "size": 5.0}
        marks = (
            [found.value("svd_ratio", step, place, repair="raw") for step in found.steps],
            [found.readout(step, place) for step in found.steps],
            [found.accuracy(step, place, "raw") for step in found.steps],
        )
        named = i in (0, len(found.places) // 2, last)
        for line, values in zip(columns, marks, strict=True):
            line.append(points(place[1].name, x, values, ends=WHISKERS, where=where, named=named, **look))
    losses = [found.value("lm_loss", step, found.places[-1], reading="patched", repair="raw") for step in found.steps]
    columns[1].append(Series("the model itself", x, column(losses), "@ink", where=where, dash="dash"))
    titles = (f"(a) {GEOMETRY['svd_ratio']}", "(b) Loss (nats per token)", "(c) Mean probe accuracy")
    axes = Axis("step", ticks=(x, names)), Axis(rules=True)
    panels = [Panel(*axes, tuple(drawn), title=name, alt=f"{name} over checkpoints, by site.")
              for name, drawn in zip(titles, columns, strict=True) if drawn]  # fmt: skip
    return files(stem, panels, size=2.1)


def together_figure(found: ModelNumbers, stem: str) -> Figure:
    """Geometry against performance: one point per layer (marker) and checkpoint (colour)."""
    panels, several = [], len(found.steps) > 1
    for y_name, performance in (
        ("Readout loss (nats)", found.readout),
        ("Mean probe accuracy", lambda step, place: found.accuracy(step, place, "raw")),
    ):
        for metric, name in GEOMETRY.items():
            drawn = []
            for i, place in enumerate(found.places):
                pairs = [
                    (found.value(metric, step, place, repair="raw"), performance(step, place)) for step in found.steps
                ]
                there = [(n, a, b) for n, (a, b) in enumerate(pairs) if a and b and math.isfinite(a.value + b.value)]
                shade = [n / max(1, len(found.steps) - 1) for n, *_ in there] if several else None
                where = [place[1].name + (f", step {found.steps[n]:,}" if several else "") for n, *_ in there]
                look: dict[str, Any] = {"width": 0, "size": 6.5, "marker": SHAPES[i % len(SHAPES)], "named": i < 6}
                x, y = column(a for _, a, _ in there), column(b for *_, b in there)
                drawn += [Series(place[1].name, x, y, "@s1", shade=shade, where=where, **look)] if there else []
            axes, alt = (
                (Axis(name, rules=True), Axis(y_name, rules=True)),
                f"{y_name} against {name}, a mark for each site.",
            )
            panels.append(Panel(*axes, tuple(drawn), height=250, alt=alt))
    return files(stem, panels, most=8, columns=4, size=2.0)


def study_page(run: RunView, declared: Mapping[str, Any] | None = None) -> Page:
    """The page of the study: verdicts, then the sections of each model."""
    models, data = ModelNumbers.all(run), run.about.get("data") or {}
    named = str(data.get("name") or "")
    read = "the embedded corpus" if named == "embedded" else f"the {named}" if named.startswith("held-out") else named
    deck = ", ".join(found.model for found in models) + (
        f", {data.get('contexts')} contexts of {read}" if named else ""
    )
    sections = [_verdicts(run, len(models)), *(_model_section(found, alone=len(models) == 1) for found in models)]
    heading, terms = "Does the geometry matter?", _terms(run.about["config"])
    return page_of(run, "Does the geometry matter", deck, sections, terms=terms, heading=heading)


def _verdicts(run: RunView, models: int) -> Section:
    lead = prose(
        "A statement <em>holds</em> where the 95&nbsp;% interval of its effect lies beyond its margin, <em>fails</em> "
        "where it lies short of it, and is <em>undecided</em> otherwise. Repairs, readouts and probes are fitted on "
        "one half of the contexts; every number is about the other half, and its interval leaves out one of eight "
        "folds of those contexts at a time. Effects of repairs are paired with raw rows, token by token, at the last "
        "checkpoint, and averaged over sites. "
        "Everything is said of " + ("this model" if models == 1 else "these models") + " alone."
    )
    return verdict_section(lead, verdict_claims(run.verdicts), "Model" if models > 1 else "", first="Statement")


def _repairs(*more: Swatch) -> Swatches:
    return Swatches([*(Swatch(name, series(HUES[repair])) for repair, name in REPAIRS.items()), *more])


def _model_section(found: ModelNumbers, *, alone: bool) -> Section:
    of = "" if alone else f"-{slug(found.model)}"
    losses = caption(
        "(a) The rows of one site are repaired, given their usual mean norm back, and the rest of the network runs "
        "on: what the network itself relies on. (b) A fresh softmax readout from the rows to the token that the "
        "model predicts there: what is linearly there to be read. Dashed: the model as it is. Whiskers: 95&nbsp;% "
        "over contexts."
    )
    figure = loss_figure(found, f"performance-loss{of}")
    parts: list[Any] = [Heading("Loss"), _repairs(Swatch("the model itself", "@ink", "dash")), figure, losses]
    parts += [Fold("Numbers", [_loss_table(found)]), *(_probe_parts(found, of) if found.tasks else [])]
    fitted = caption("The geometry of the test rows, raw and repaired; the repairs were fitted on other contexts.")
    parts += [Heading("Geometry"), _repairs(), geometry_figure(found, f"performance-geometry{of}"), fitted]
    parts += [Heading("Geometry and performance")]
    several = len(found.steps) > 1
    if several:
        lines = caption("Over checkpoints, raw rows, a line for each site; dashed in (b): the model’s own loss.")
        parts += [course_figure(found, f"performance-course{of}"), lines]
    more = " (shape) and checkpoint (colour, light to dark)" if several else ""
    marks = caption(
        f"Raw rows, a mark for each site{more}. Above: loss of a fresh readout. Below: mean accuracy of the linear "
        "probes."
    )
    parts += [together_figure(found, f"performance-together{of}"), marks, *_correlation_parts(found)]
    name = found.model + (f" at step {found.last:,}" if found.last is not None else "")
    return Section(f"model-{slug(found.model)}", name, parts, found.model)


def _loss_table(found: ModelNumbers) -> DataTable:
    """Loss by site and repair for both readings, with the number of tokens."""
    over = numeric(*(reading.capitalize() for reading in READINGS.values()), columns=len(REPAIRS))
    first = [TableCell("Site", rows=2), *over, *numeric("Test tokens", rows=2)]
    body = []
    for place in found.places:
        marks = [[found.value("lm_loss", found.last, place, reading=reading, repair=repair) for repair in REPAIRS]
                 for reading in READINGS]  # fmt: skip
        counts = [next((mark.n for mark in pair if mark is not None), 0) for pair in marks]
        cells = [words_of(mark) for pair in marks for mark in pair]
        body.append([TableCell(place[1].name, head=True), *cells, " / ".join(f"{count:,}" for count in counts)])
    heads = [first, numeric(*[*REPAIRS.values()] * len(READINGS))]
    return DataTable(heads, [body], "Loss by site and repair", "plain wide")


def _probe_parts(found: ModelNumbers, of: str) -> list[Any]:
    lead = (
        "With a free intercept a shift changes nothing, so mean-removed rows give the very same linear probe as raw "
        "ones. Without a penalty no invertible affine map would: what whitening changes here, it changes through the "
        "penalty, which is chosen on held contexts of the fit half for every repair from the same grid. The nearest "
        "class mean by cosine has no such invariance."
    )
    controls = Swatch("most frequent class", "@soft", "dash"), Swatch("shuffled labels", "@soft", "dot")
    linear = caption(
        "Linear probes (multinomial logistic regression). Grey: always the most frequent class (dashed), and the "
        "same probe on shuffled labels (dotted). Mean removed lies on raw by construction."
    )
    near = caption("The nearest class mean by cosine, for the same tasks and rows.")
    figure = probe_figure(found, f"performance-probes{of}")
    parts = [Heading("Probes"), Prose(lead), _repairs(*controls), figure, linear]
    parts += [_repairs(controls[0]), probe_figure(found, f"performance-cosine{of}", probe="cosine"), near]
    return [*parts, *(_task_fold(found, task) for task in found.tasks)]


def _task_fold(found: ModelNumbers, task: str) -> Fold:
    """Accuracy by site and repair, linear and by cosine, with chance and the shuffled control."""
    chance = {"control": "majority"}
    cells: list[dict[str, Any]] = [{"repair": repair} for repair in REPAIRS]
    cells += [{"repair": "raw", "control": "shuffled"}, chance]
    cells += [{"repair": repair, "probe": "cosine"} for repair in REPAIRS]
    body, n, contexts = [], 0, 0
    for place in found.places:
        marks = [found.value("probe_accuracy", found.last, place, task=task, **cell) for cell in cells]
        body.append([TableCell(place[1].name, head=True), *map(words_of, marks)])
        if (mark := marks[cells.index(chance)]) is not None:
            n, contexts = mark.n, mark.contexts
    first = [TableCell("Site", rows=2), *numeric("Linear probe", columns=len(REPAIRS)), *numeric("Controls", columns=2)]
    first += numeric("Nearest class mean by cosine", columns=len(REPAIRS))
    heads = [first, numeric(*REPAIRS.values(), "shuffled labels", "most frequent", *REPAIRS.values())]
    words = f"{task.replace('_', ' ').capitalize()}: {n:,} test rows in {contexts:,} contexts"
    return Fold(words, [DataTable(heads, [body], f"Accuracy in {task}", "plain wide")])


def _correlation_parts(found: ModelNumbers) -> list[Any]:
    """Rank correlations over checkpoints (mean over sites) and over layers (last checkpoint)."""
    body = []
    kinds: tuple[tuple[str, Step, dict[str, str]], ...] = (
        ("checkpoints", None, {"sites": "mean"}),
        ("layers", found.last, {}),
    )
    for (over, step, more), (geometry, name), (performance, words) in product(
        kinds, GEOMETRY.items(), PERFORMANCES.items()
    ):
        where: dict[str, Any] = {"geometry": geometry, "performance": performance, "over": over, **more}
        contexts, leaving, linear = (
            found.value("performance_correlation", step, None, **where, method=method, interval=kind)
            for method, kind in (("spearman", "contexts"), ("spearman", over), ("pearson", "contexts"))
        )
        if contexts is None or leaving is None or not math.isfinite(contexts.value):
            continue
        ends = [
            f"{number(m.low, 2)} to {number(m.high, 2)}" if math.isfinite(m.low) else "–" for m in (contexts, leaving)
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
    heads: list[Any] = ["Geometry of raw rows", TableCell("Performance"), TableCell("Over")]
    heads += ["Spearman", "Over contexts", "Over the points", "Pearson"]
    table = DataTable([heads], [body], "Rank correlations", "plain wide")
    return [Prose(lead), Fold("Rank correlations", [table], open=len(body) <= 24)]


def _terms(config: Mapping[str, Any]) -> str:
    directions = config.get("directions") or "a hundredth of the width, at least 1"
    shrinkage = config["shrinkage"] if config.get("shrinkage") is not None else "d/(n + d)"
    return f"""
Mean removed | repair=mean | x − μ
μ the mean of the fit rows of the site.

All but the top | repair=all_but_top | (I − U_D U_Dᵀ)(x − μ)
U_D the first D principal directions of the fit rows, D = {directions}.

Whitened | repair=whitened | U Λ^(−½) Uᵀ (x − μ)
ZCA; Λ the eigenvalues of the covariance, shrunk towards their median (share {shrinkage}). Directions without variance
are mapped to 0.

Loss | lm_loss |
Cross-entropy in nats per token that the model predicts. <code>reading=patched</code>: its own, with the rows of one
site repaired and multiplied by one number that gives the fit rows their mean norm back. <code>reading=readout</code>:
of a fresh softmax regression from the rows, over the {config.get("classes")} most frequent tokens at most.
<code>against=raw</code>: the difference to raw rows.

Accuracy | probe_accuracy |
Share of test rows whose class is found. <code>control=shuffled</code>: the same probe fitted and tested on shuffled
labels; <code>control=majority</code>: always the most frequent class of the fit rows; <code>probe=cosine</code>: the
class whose mean direction is nearest. Labels of whole contexts use the {config.get("pool")} row.

Selectivity | probe_selectivity |
Accuracy minus that of the shuffled control.

Correlation | performance_correlation |
Of geometry with performance, over layers or checkpoints; <code>of=changes</code>: of the differences between
neighbouring checkpoints.
"""


def summary(run: RunView) -> Iterator[RichTable]:
    """For the console: loss and mean accuracy by site and repair, at the last checkpoint of each model."""
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
