"""The page of the performance study: loss, probes and geometry by repair over depth; geometry with performance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

from rich.table import Table as RichTable

from anisoscope.results.quantity import Mark, mean
from anisoscope.results.query import Query, Row, variant_name
from anisoscope.studies.page_parts import (
    data_name,
    files,
    hero,
    judged_section,
    numeric,
    page_of,
    shown,
    words_of,
)
from anisoscope.view.figure import Axis, Figure, Level, Panel, Series, column, points, sequence, series
from anisoscope.view.matplotlib_renderer import slug
from anisoscope.view.page import DataTable, Fold, Heading, Hero, Page, Prose, Section, Swatch, TableCell
from anisoscope.view.subjects import DrawnSite, RunView
from anisoscope.view.terminal.screen import new_table
from anisoscope.view.words import number, step_words, strided

REPAIRS = {"raw": "raw", "mean": "mean removed", "all_but_top": "all but the top", "whitened": "whitened"}
READINGS = {"patched": "patched into the model", "readout": "fresh readout"}
GEOMETRY = {
    "svd_ratio": "Anisotropy σ₁/Σσ",
    "average_cosine": "Average cosine",
    "two_nn": "Intrinsic dimension (TwoNN)",
    "iso_score": "IsoScore",
}
PERFORMANCES = {"loss": "the model’s own loss", "readout": "loss of a fresh readout", "probe": "mean probe accuracy"}
CORRELATION = "performance_correlation"
HUES = dict(zip(REPAIRS, (6, 0, 2, 1), strict=True))
MARKERS = dict(zip(REPAIRS, ("circle", "square", "diamond", "triangle-up"), strict=True))
SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star")
WHISKERS = {"bars": "y", "reach": "95 % over contexts:"}
KEY = [Swatch(name, series(HUES[repair])) for repair, name in REPAIRS.items()]
LEVELS = [Swatch("the model itself", "@ink", "dash"), Swatch("frequencies alone", "@soft", "dot")]
TOLD = ("whitened_harms_model", "whitened_improves_probe")
Step = int | None
Place = tuple[str, DrawnSite]  # stack and site
ALL_SITES: Place = ("single", DrawnSite.of(None, "study"))  # of correlations that are not about one site


@dataclass(frozen=True)
class ModelNumbers:
    """The rows of one model by metric, variant, step and place."""

    query: Query
    name: str

    @classmethod
    def all(cls, run: RunView) -> list[ModelNumbers]:
        query = Query(run.table)
        return [cls(query.where(model=model), str(model)) for model in query.values("model")]

    @cached_property
    def rows(self) -> dict[tuple[str, str, Step, Place], Row]:
        return {(r.metric, r.variant, r.step, (r.stack, DrawnSite.of(r.layer, r.kind))): r for r in self.query}

    @cached_property
    def places(self) -> list[Place]:
        """All (stack, site), in order of depth."""
        return sorted({place for metric, _, _, place in self.rows if metric != CORRELATION})

    @cached_property
    def steps(self) -> list[Step]:
        steps = {step for metric, _, step, _ in self.rows if metric != CORRELATION}
        return sorted(steps, key=lambda step: -1 if step is None else step)

    @cached_property
    def tasks(self) -> list[str]:
        return [str(task) for task in self.query.where(metric="probe_accuracy").values("task")]

    @property
    def last(self) -> Step:
        return self.steps[-1]

    def row(self, metric: str, step: Step, place: Place, **variant: Any) -> Row | None:
        return self.rows.get((metric, variant_name(variant), step, place))

    def readout(self, step: Step, place: Place) -> Row | None:
        """The loss of a fresh readout from raw rows."""
        return self.row("lm_loss", step, place, reading="readout", repair="raw")

    def own_loss(self, step: Step) -> Row | None:
        return self.row("lm_loss", step, self.places[-1], reading="patched", repair="raw")

    def accuracy(self, step: Step, place: Place, repair: str = "raw", **variant: Any) -> Mark | None:
        """The mean accuracy over tasks, with its jackknife interval over folds."""
        rows = [self.row("probe_accuracy", step, place, task=task, repair=repair, **variant) for task in self.tasks]
        known = [row for row in rows if row is not None and row.known]
        if not known or len(known) < len(rows):
            return None
        whole = mean([row.quantity for row in known])
        low, high = whole.interval()
        return Mark(
            whole.value, low if math.isnan(low) else max(low, 0.0), high if math.isnan(high) else min(high, 1.0)
        )


def by_repair(
    model: ModelNumbers, title: str, metric: str, *, y: str = "", more: tuple[Series, ...] = (), **look: Any
) -> Panel:
    """A metric over depth, one line per repair, slightly offset so that whiskers do not overlap; raw on top."""
    variant, where, lines = look.pop("variant", {}), [site.name for _, site in model.places], []
    for i, (repair, name) in enumerate(REPAIRS.items()):
        x = [n + 0.05 * (i - 1.5) for n in range(len(where))]
        marks = [model.row(metric, model.last, place, repair=repair, **variant) for place in model.places]
        style: dict[str, Any] = {"colour": series(HUES[repair]), "marker": MARKERS[repair], "size": 6.0}
        lines.append(points(name, x, marks, ends=WHISKERS, where=where, **style))
    names = [{"embed": "emb", "final": "fin"}.get(site.kind, str(site.layer)) for _, site in model.places]
    labelled = sorted({*strided(len(names), 14), len(names) - 1})
    ticks = [float(i) for i in labelled], [names[i] for i in labelled]
    depth = Axis("block", ticks=ticks, bounds=(-0.35, len(names) - 0.65))
    return Panel(depth, Axis(y, rules=True), (*lines[1:], lines[0], *more), title=title, **look)


def loss_figure(model: ModelNumbers, stem: str) -> Figure:
    """Loss over depth: of the model continued from repaired rows, and of a fresh readout."""
    own = model.own_loss(model.last)
    level = () if own is None else (Level(own.value, "the model itself", dash="dash", colour="@ink"),)
    look: dict[str, Any] = {"y": "Loss (nats per token)", "height": 280}
    titles = {"patched": "(a) Rows repaired inside the model", "readout": "(b) A fresh linear readout"}
    panels = []
    constant = model.row("lm_loss", model.last, model.places[0], reading="readout", control="constant")
    blind = () if constant is None else (Level(constant.value, "frequencies alone", dash="dot", colour="@soft"),)
    for reading, title in titles.items():
        look["levels"] = level + (blind if reading == "readout" else ())
        alt = f"{title}: loss over depth by repair."
        panels.append(by_repair(model, title, "lm_loss", variant={"reading": reading}, alt=alt, **look))
    return files(stem, panels, layout="pairs", columns=2, size=2.2)


def probe_figure(model: ModelNumbers, stem: str, **variant: str) -> Figure:
    """Accuracy of probes over depth, task by task, with the most frequent class and the shuffled control."""
    panels = []
    controls = {"most frequent class": ("dash", {"control": "majority"})}
    if not variant:
        controls["shuffled labels"] = ("dot", {"repair": "raw", "control": "shuffled"})
    x, where = [float(n) for n in range(len(model.places))], [site.name for _, site in model.places]
    for task in model.tasks:
        grey = []
        for name, (dash, control) in controls.items():
            marks = [model.row("probe_accuracy", model.last, place, task=task, **control) for place in model.places]
            grey.append(Series(name, x, column(marks), "@soft", where=where, dash=dash, width=1.2))
        title = task.replace("_", " ")
        look: dict[str, Any] = {"y": "Accuracy", "alt": f"Accuracy in {title} over depth by repair."}
        options = {"task": task, **variant}
        panels.append(by_repair(model, title, "probe_accuracy", variant=options, more=tuple(grey), **look))
    return files(stem, panels, most=99, size=1.9)


def course_figure(model: ModelNumbers, stem: str) -> Figure:
    """Anisotropy, the loss of a readout and probe accuracy over checkpoints, one line per layer."""
    x = [float(n) for n in range(len(model.steps))]  # steps are roughly log-spaced, with step 0
    names = ["–" if step is None else step_words(step) for step in model.steps]
    where, last, panels = [f"step {name}" for name in names], len(model.places) - 1, []
    values: dict[str, Callable[..., Row | Mark | None]] = {
        f"(a) {GEOMETRY['svd_ratio']}": partial(model.row, "svd_ratio", repair="raw"),
        "(b) Loss (nats per token)": model.readout,
        "(c) Mean probe accuracy": model.accuracy,
    }
    for title, value in values.items():
        lines = []
        for i, place in enumerate(model.places):
            look: dict[str, Any] = {"colour": sequence(i / max(1, last)), "marker": SHAPES[i % len(SHAPES)]}
            look |= {"size": 5.0, "named": i in (0, len(model.places) // 2, last)}
            marks = [value(step=step, place=place) for step in model.steps]
            lines.append(points(place[1].name, x, marks, ends=WHISKERS, where=where, **look))
        if value == model.readout:
            losses = column(model.own_loss(step) for step in model.steps)
            lines.append(Series("the model itself", x, losses, "@ink", where=where, dash="dash"))
        axes, alt = (Axis("step", ticks=(x, names)), Axis(rules=True)), f"{title} over checkpoints, by site."
        panels.append(Panel(*axes, tuple(lines), title=title, alt=alt))
    return files(stem, panels, size=2.1)


def together_figure(model: ModelNumbers, stem: str) -> Figure:
    """Geometry against performance: one point per layer (marker) and checkpoint (colour)."""
    panels, several = [], len(model.steps) > 1
    performances: dict[str, Callable[..., Row | Mark | None]] = {"Readout loss (nats)": model.readout}
    performances["Mean probe accuracy"] = model.accuracy
    for (y_name, performance), (metric, name) in product(performances.items(), GEOMETRY.items()):
        drawn = []
        for i, place in enumerate(model.places):
            pairs = [(model.row(metric, step, place, repair="raw"), performance(step, place)) for step in model.steps]
            known = [(n, a, b) for n, (a, b) in enumerate(pairs) if a and b and math.isfinite(a.value + b.value)]
            shade = [n / max(1, len(model.steps) - 1) for n, *_ in known] if several else None
            where = [place[1].name + (f", step {model.steps[n]:,}" if several else "") for n, *_ in known]
            look: dict[str, Any] = {"width": 0, "size": 6.5, "marker": SHAPES[i % len(SHAPES)], "named": i < 6}
            x, y = column(a for _, a, _ in known), column(b for *_, b in known)
            drawn += [Series(place[1].name, x, y, "@s1", shade=shade, where=where, **look)] if known else []
        alt = f"{y_name} against {name}, a mark for each site."
        panels.append(Panel(Axis(name, rules=True), Axis(y_name, rules=True), tuple(drawn), height=250, alt=alt))
    return files(stem, panels, most=8, columns=4, size=2.0)


def study_page(run: RunView, declared: Mapping[str, Any] | None = None) -> Page:
    """The page of the study: verdicts, then the sections of each model."""
    models, data = ModelNumbers.all(run), data_name(run)
    deck = ", ".join(model.name for model in models)
    deck += f", {run.about['data'].get('contexts')} contexts ({data})" if data else ""
    note = (
        "Repairs, readouts and probes are fitted on one half of the contexts; every number is about the other half, "
        "its interval over eight folds of them. Effects of repairs are paired with raw rows, token by token, at the "
        "last checkpoint, and averaged over sites. A verdict is about its model alone."
    )
    sections = []
    for model in models:
        own = [verdict for verdict in run.verdicts if verdict.get("subject") == model.name]
        section = _model_section(model, "" if len(models) == 1 else f"-{slug(model.name)}")
        sections.append(replace(section, finding=_told(own)))
    sections.append(judged_section(note))
    terms = _terms(run.about["config"])
    first = _hero(models[0]) if models else None
    return page_of(run, "Does the geometry matter?", deck, sections, terms=terms, hero=first)


def _told(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """What was found on one model in a sentence or two: of the repair that changes the geometry most."""
    known = {str(verdict.get("claim")): verdict for verdict in verdicts if verdict.get("why")}
    chosen = [known[claim] for claim in TOLD if claim in known] or [*known.values()][:1]
    claimed = (f"{one.get('statement')} ({one.get('status')})" for one in chosen)
    parts = zip(claimed, (str(one["why"]).partition("; ")[0].rstrip(".") for one in chosen), strict=True)
    return " ".join(f"{what}: {why[:1].lower()}{why[1:]}." for what, why in parts)


def _hero(model: ModelNumbers) -> Hero:
    """Loss over depth of raw and repaired rows."""
    caption = (
        "Loss when the rows of one block are repaired (made more isotropic): inside the running model, and read by a "
        "fresh linear readout. Where the lines coincide, the geometry does not matter for the loss."
    )
    key = [*KEY, *LEVELS]
    return hero(loss_figure(model, "").panels, f"Loss of raw and repaired rows, {model.name}", caption, key=key)


def _model_section(model: ModelNumbers, of: str) -> Section:
    losses = (
        "(a) The rows of one site are repaired, given their mean norm back, and the rest of the network runs on: what "
        "the network relies on. (b) A fresh softmax readout from the rows to the token that the model predicts there: "
        "what can be read linearly. Dashed: the model as it is; dotted in (b): the frequencies of the tokens, without "
        "any row. Whiskers: 95&nbsp;% over contexts."
    )
    key = [*KEY, *LEVELS]
    parts = shown(loss_figure(model, f"performance-loss{of}"), losses, title="Loss", key=key)
    parts += [Fold("Numbers", [_loss_table(model)]), *(_probe_parts(model, of) if model.tasks else [])]
    fitted = "The geometry of the test rows, raw and repaired; the repairs were fitted on other contexts."
    panels = [by_repair(model, name, metric, alt=f"{name} over depth by repair.") for metric, name in GEOMETRY.items()]
    figure = files(f"performance-geometry{of}", panels, layout="pairs", columns=2, size=1.9)
    parts += shown(figure, fitted, title="Geometry", key=KEY)
    parts += [Heading("Geometry and performance")]
    if len(model.steps) > 1:
        lines = "Over checkpoints, raw rows, a line for each site; dashed in (b): the model’s own loss."
        parts += shown(course_figure(model, f"performance-course{of}"), lines)
    marks = (
        "Raw rows, a mark for each site (shape) and checkpoint (colour, light to dark). Above: loss of a fresh "
        "readout. Below: mean accuracy of the linear probes."
    )
    parts += [*shown(together_figure(model, f"performance-together{of}"), marks), *_correlation_parts(model)]
    name = model.name + (f" at step {model.last:,}" if model.last is not None else "")
    return Section(f"model-{slug(model.name)}", name, parts, model.name)


def _loss_table(model: ModelNumbers) -> DataTable:
    """Loss by site and repair for both readings, with the number of tokens."""
    over = numeric(*(reading.capitalize() for reading in READINGS.values()), columns=len(REPAIRS))
    first = [TableCell("Site", rows=2), *over, *numeric("Test tokens", rows=2)]
    body = []
    for place in model.places:
        rows = {reading: [model.row("lm_loss", model.last, place, reading=reading, repair=repair) for repair in REPAIRS]
                for reading in READINGS}  # fmt: skip
        counts = [next((row.n for row in losses if row is not None), 0) for losses in rows.values()]
        cells = [words_of(row) for losses in rows.values() for row in losses]
        body.append([TableCell(place[1].name, head=True), *cells, " / ".join(f"{count:,}" for count in counts)])
    heads = [first, numeric(*[*REPAIRS.values()] * len(READINGS))]
    return DataTable(heads, [body], "Loss by site and repair", "plain wide")


def _probe_parts(model: ModelNumbers, of: str) -> list[Any]:
    lead = (
        "With a free intercept a shift changes nothing: mean-removed rows give the same linear probe as raw ones. "
        "Whitening acts through the penalty alone, which is chosen for every repair on held contexts of the fit half. "
        "The nearest class mean by cosine has no such invariance."
    )
    linear = (
        "Linear probes (multinomial logistic regression). Grey: always the most frequent class (dashed), the same "
        "probe on shuffled labels (dotted). Mean removed lies on raw by construction."
    )
    near = "The nearest class mean by cosine, for the same tasks and rows."
    key = [*KEY, Swatch("most frequent class", "@soft", "dash"), Swatch("shuffled labels", "@soft", "dot")]
    parts = [Heading("Probes"), Prose(lead)]
    parts += shown(probe_figure(model, f"performance-probes{of}"), linear, key=key)
    parts += shown(probe_figure(model, f"performance-cosine{of}", probe="cosine"), near, key=key[:-1])
    return [*parts, *(_task_fold(model, task) for task in model.tasks)]


def _task_fold(model: ModelNumbers, task: str) -> Fold:
    """Accuracy by site and repair, linear and by cosine, with chance and the shuffled control."""
    variants: list[dict[str, Any]] = [{"repair": repair} for repair in REPAIRS]
    variants += [{"repair": "raw", "control": "shuffled"}, {"control": "majority"}]
    variants += [{"repair": repair, "probe": "cosine"} for repair in REPAIRS]
    body, n, contexts = [], 0, 0
    for place in model.places:
        rows = [model.row("probe_accuracy", model.last, place, task=task, **variant) for variant in variants]
        body.append([TableCell(place[1].name, head=True), *map(words_of, rows)])
        if (chance := model.row("probe_accuracy", model.last, place, task=task, control="majority")) is not None:
            n, contexts = chance.n, chance.contexts
    first = [TableCell("Site", rows=2), *numeric("Linear probe", columns=len(REPAIRS)), *numeric("Controls", columns=2)]
    first += numeric("Nearest class mean by cosine", columns=len(REPAIRS))
    heads = [first, numeric(*REPAIRS.values(), "shuffled labels", "most frequent", *REPAIRS.values())]
    words = f"{task.replace('_', ' ').capitalize()}: {n:,} test rows in {contexts:,} contexts"
    return Fold(words, [DataTable(heads, [body], f"Accuracy in {task}", "plain wide")])


def _correlation_parts(model: ModelNumbers) -> list[Any]:
    """Rank correlations over checkpoints (mean over sites) and over layers (last checkpoint)."""
    body = []
    for over, geometry, performance in product(("checkpoints", "layers"), GEOMETRY, PERFORMANCES):
        step, sites = (None, {"sites": "mean"}) if over == "checkpoints" else (model.last, {})
        where: dict[str, Any] = {"geometry": geometry, "performance": performance, "over": over, **sites}
        contexts, leaving, linear = (
            model.row(CORRELATION, step, ALL_SITES, **where, method=method, interval=interval)
            for method, interval in (("spearman", "contexts"), ("spearman", over), ("pearson", "contexts"))
        )
        if contexts is None or leaving is None or not contexts.known:
            continue
        ends = [f"{number(r.low, 2)} to {number(r.high, 2)}" if r.interval else "–" for r in (contexts, leaving)]
        cells = [number(contexts.value), *ends, number(linear.value) if linear else "–"]
        names = [TableCell(PERFORMANCES[performance]), TableCell(f"{contexts.n} {over}")]
        body.append([TableCell(GEOMETRY[geometry], head=True), *names, *cells])
    if not body:
        return []
    lead = (
        "Spearman’s correlation with two intervals: over contexts (measurement noise), and over the points (each "
        "checkpoint or layer left out once). Checkpoints of one run and layers of one model are not independent: both "
        "quantities may simply move with time or depth, and a p-value only describes."
    )
    heads = ["Geometry of raw rows", TableCell("Performance"), TableCell("Over"), "Spearman", "Over contexts"]
    heads += ["Over the points", "Pearson"]
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
<code>control=constant</code>: of the frequencies of those tokens in the fit half, whatever the row.
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
    for model in ModelNumbers.all(run):
        step = model.last
        when = "" if step is None else f" at step {step:,}"
        columns = (*(f"loss, {name}" for name in READINGS), "linear probes", "nearest class mean")
        table = new_table(f"{model.name}{when}, test contexts", ("site", "repair"), columns)
        for place, (i, repair) in product(model.places, enumerate(REPAIRS)):
            losses = [model.row("lm_loss", step, place, reading=reading, repair=repair) for reading in READINGS]
            accuracies = model.accuracy(step, place, repair), model.accuracy(step, place, repair, probe="cosine")
            table.add_row(place[1].name if not i else "", repair, *map(words_of, (*losses, *accuracies)))
        yield table
