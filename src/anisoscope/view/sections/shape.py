"""Sections on geometry over training: courses, maps, profiles at one step, rows, and estimators of dimension.

An *arm* is one model with all its seeds (subjects that differ in nothing else). A *measure* is a metric in one variant
at one family of sites: the residual stream, or a kind of site inside the blocks such as attention scores. All figures
refer to the same arrays, measure × arm × site × step, which the page contains once.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from anisoscope.results.row import seeds_mean, step_mean
from anisoscope.view import figure, words
from anisoscope.view.figure import Axis, Depth, Figure, Level, Panel, Ref, Series, Switch, choice, series, value_axis
from anisoscope.view.page import Controls, Hero, Key, Prose, Ramp, Says, Section, Swatch, Swatches, text
from anisoscope.view.sections import gradients
from anisoscope.view.sections.gradients import Gradients, Measure
from anisoscope.view.subjects import DrawnSite, Subject, TrainingRows, in_stream, known
from anisoscope.view.words import LOOP, MOVEMENT, TANGENT, Catalogue, few

SIZE = 1_100_000  # limit of the JSON arrays in characters
# largest numbers of steps, sites and measures; the first entry that fits is used
LEVELS = ((80, 80, 60), (48, 40, 48), (32, 26, 40), (24, 18, 32), (16, 12, 24), (10, 8, 12))
INSIDE = ("scores", "query", "key", "attn_in", "attn_out", "mlp_in", "mlp_out")
FAMILY_WORDS = {
    "query": "queries", "key": "keys", "attn_in": "attention input", "attn_out": "attention output",
    "mlp_in": "MLP input", "mlp_out": "MLP output",
}  # fmt: skip
ELSEWHERE = {*TANGENT, *words.TESTS, *words.FREQUENCY, *LOOP, "amplification", "amplification_p", "checkpoint"}
FIRST = ("svd_ratio", "svd_ratio_squared", "average_cosine", "two_nn")  # candidates for the measure shown initially
IN_FILES = ("svd_ratio", "average_cosine", "two_nn", "attention_sharpness")
FILE_MEASURES, FILE_STEPS, FILE_ARMS = 3, 5, 6
TOLD = 3  # arms that a sentence tells of
LOGGED = 140  # largest number of points of a logged line
STEP = "$shape.1"  # the chosen step
# by metric and variant: name, colour, dash, width
ESTIMATORS: dict[tuple[str, str], tuple[str, int, str, float]] = {
    ("two_nn", ""): ("TwoNN", 0, "solid", 2.0),
    ("two_nn", "calibrated=1"): ("TwoNN, bias taken out", 0, "dash", 2.0),
    ("levina_bickel", ""): ("Levina–Bickel", 2, "solid", 1.8),
    ("gride", "scale=1"): ("GRIDE, scale 1", 3, "dot", 1.4),
    ("gride", ""): ("GRIDE, scale 2", 3, "solid", 1.6),
    ("gride", "scale=4"): ("GRIDE, scale 4", 3, "dashdot", 1.4),
    ("gride", "scale=8"): ("GRIDE, scale 8", 3, "dash", 1.4),
}
Place = tuple[str, float, str]  # name, relative depth, kind of site
PLACES: tuple[Place, ...] = (
    ("embedding", 0.0, "embed"), ("first quarter", 0.25, "resid"), ("middle", 0.5, "resid"),
    ("third quarter", 0.75, "resid"), ("last block", 1.0, "resid"), ("final norm", 1.0, "final"),
)  # fmt: skip
_SIZE = re.compile(r"(?P<arm>.+?)[-_](?P<size>\d+x\d+)")


@dataclass(frozen=True)
class Arm:
    """One model and its seeds; `line` is the index of its entry in the page's legend."""

    index: int
    label: str
    model: str
    role: str
    blocks: int
    subjects: tuple[Subject, ...]

    @property
    def line(self) -> int:
        return self.subjects[0].index

    @property
    def design(self) -> tuple[str, str]:
        """The kind of arm and its size, if the name contains a size.

        >>> Arm(0, "", "causal-next-6x256", "", 6, ()).design, Arm(0, "", "gpt2", "", 12, ()).design
        (('causal-next', '6x256'), ('gpt2', ''))
        """
        match = _SIZE.fullmatch(self.model)
        return (match["arm"], match["size"]) if match else (self.model, "")


def arms_of(rows: TrainingRows) -> list[Arm]:
    """The arms: subjects of one model that differ in their seed; runs of the same seed are separate arms."""
    by_model: dict[tuple[str, str], list[Subject]] = defaultdict(list)
    for subject in rows.subjects:
        by_model[subject.model, subject.stack].append(subject)
    together: list[list[Subject]] = []
    for subjects in by_model.values():
        distinct = len({one.seed for one in subjects}) == len(subjects)
        together += [subjects] if distinct else [[one] for one in subjects]
    arms = []
    for i, subjects in enumerate(together):
        first = subjects[0]
        label = first.label.replace(f" · seed {first.seed}", "") if len(subjects) > 1 else first.label
        blocks = max(one.blocks for one in subjects)
        arms.append(Arm(i, label, first.model, first.role, blocks, tuple(subjects)))
    return arms


def legend_arms(rows: TrainingRows) -> list[Arm]:
    """The entries of the page's legend: arms or, if there are gradient sections, which show each seed, subjects."""
    if rows.metrics().isdisjoint(TANGENT):
        return arms_of(rows)
    return [Arm(one.index, one.label, one.model, one.role, one.blocks, (one,)) for one in rows.subjects]


def measures_of(rows: TrainingRows, catalogue: Catalogue) -> list[Measure]:
    """All measures with values at several sites that do not depend on gradients, in reading order."""
    gradients_of_rows = Gradients(rows, catalogue)
    seen: dict[tuple[str, str, str], None] = {}
    for key in (key for metric in sorted(rows.metrics() - ELSEWHERE) for key in rows.keys[metric]):
        kind = key.site.kind
        # metrics of movement between steps: only the main proxy and rank
        main = key.metric not in MOVEMENT or gradients_of_rows.is_main(key.variant)
        if (in_stream(kind) or kind in INSIDE) and not key.group and main:
            seen[key.metric, key.variant, "stream" if in_stream(kind) else kind] = None
    order = {name: i for i, name in enumerate(catalogue.ordered({metric for metric, *_ in seen}))}
    keys = sorted(seen, key=lambda k: (k[0] in MOVEMENT, k[2] != "stream", order[k[0]], k[1] != "", k[2], k[1]))
    scaled = any(metric == "gride" and "scale=" in variant for metric, variant, _ in keys)
    measures = []
    for metric, variant, family in keys:
        entry, usual = catalogue.entry(metric), "scale 2" if (metric, variant) == ("gride", "") and scaled else ""
        how = "" if metric in MOVEMENT else words.variant_words(variant) or usual
        label = " · ".join(part for part in (entry.title, FAMILY_WORDS.get(family, ""), how) if part)
        measures.append(Measure(metric, variant, label, words.sentences(entry.formula, entry.description), family))
    return measures


def sites_of(rows: TrainingRows, measure: Measure) -> list[DrawnSite]:
    """The sites at which any model has this measure."""
    keys = [key for key in rows.keys.get(measure.metric, []) if key.variant == measure.variant and not key.group]
    return sorted({key.site for key in keys if measure.at(key.site.kind)})


def arm_line(rows: TrainingRows, arm: Arm, measure: Measure, site: DrawnSite) -> Sequence[Any]:
    """The line of an arm: of its only seed, else means with the range over seeds."""
    return seeds_mean([rows.line(one, measure.metric, site, measure.variant) for one in arm.subjects])


@dataclass(frozen=True)
class Shape:
    """The values of all measures as arrays; `there[m, a]`: indices of the sites at which arm a has measure m."""

    arms: list[Arm]
    measures: list[Measure]
    steps: list[int]
    time: figure.Time
    arrays: dict[str, Any]
    sites: list[list[DrawnSite]]
    there: dict[tuple[int, int], list[int]]
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def default(self) -> int:
        """The index of the measure shown initially."""
        plain = {m.metric: i for i, m in self._plain if m.family == "stream"}
        return next((plain[name] for name in FIRST if name in plain), 0)

    @property
    def in_files(self) -> list[int]:
        """The indices of the few measures that have vector files."""
        plain = {m.metric: i for i, m in self._plain}
        names = [name for name in IN_FILES if name in plain and (name != "average_cosine" or "svd_ratio" not in plain)]
        return [plain[name] for name in names][:FILE_MEASURES]

    @property
    def _plain(self) -> list[tuple[int, Measure]]:
        """The measures in their default variant, the first of each metric last."""
        return [(i, measure) for i, measure in reversed(list(enumerate(self.measures))) if not measure.variant]

    @property
    def moments(self) -> list[str]:
        """The names of the steps in hover texts."""
        return [f"step {step:,}" for step in self.steps]

    @property
    def seeds(self) -> int:
        return max(len(arm.subjects) for arm in self.arms)

    @property
    def now(self) -> tuple[Level, ...]:
        """A vertical line at the chosen step."""
        return (Level(Ref("shape/x", (STEP,)), upright=True),)

    def values(self, m: int, arms: Sequence[int] | None = None) -> list[float]:
        """All values and interval ends of a measure, for a common scale."""
        indices = [arm.index for arm in self.arms if arms is None or arm.index in arms]
        names = [f"shape/{m}/{a}/{part}" for a in indices for part in ("mean", "lo", "hi", "seeds")]
        return [v for name in names for v in _leaves(self.arrays.get(name))]

    def when(self, m: int, arm: Arm, step: int | None = None) -> Any:
        """The index of a step (None: the chosen one), or of the last step before it at which an arm was measured."""
        upto = f"shape/{m}/{arm.index}/upto"
        if upto not in self.arrays:
            return STEP if step is None else step
        return f"{STEP}>{upto}" if step is None else self.arrays[upto][step]

    def ends(self, m: int, arm: Arm, at: tuple[Any, ...]) -> dict[str, Any]:
        """Series fields for the ends of intervals, or of the range over seeds."""
        name = f"shape/{m}/{arm.index}"
        if f"{name}/lo" not in self.arrays or f"{name}/hi" not in self.arrays:
            return {}
        reach = "seeds from" if f"{name}/seeds" in self.arrays else "interval"
        return {"low": Ref(f"{name}/lo", at), "high": Ref(f"{name}/hi", at), "reach": reach}

    def line(self, m: int, arm: Arm, at: tuple[Any, ...], **look: Any) -> list[Series]:
        """The mean of an arm at some sites and steps, above thin lines of its seeds if `thin` gives their style."""
        name, thin = f"shape/{m}/{arm.index}", look.pop("thin", {})
        drawn = [Series(y=Ref(f"{name}/mean", at), **look)]
        if thin and len(arm.subjects) > 1:
            every = {"label": "", "x": look["x"], "each": len(arm.subjects), "quiet": True}
            drawn.insert(0, Series(y=Ref(f"{name}/seeds", ("#", *at)), **every, **thin))
        return drawn


def _leaves(value: Any) -> list[float]:
    if isinstance(value, list):
        return [leaf for part in value for leaf in _leaves(part)]
    return [] if value is None else [value]


def make_shape(rows: TrainingRows, catalogue: Catalogue) -> Shape | None:
    """The arrays in as much detail as fits on a page; None if nothing was measured at two steps."""
    every = measures_of(rows, catalogue)
    if not every or len(rows.steps) < 2:
        return None
    for level in LEVELS:
        shape = _shape(rows, every, *level)
        if len(json.dumps(shape.arrays)) <= SIZE:
            break
    return shape


def _shape(rows: TrainingRows, every: list[Measure], most_steps: int, most_sites: int, most: int) -> Shape:
    left_out: dict[str, str] = {}
    arms = arms_of(rows)
    steps = gradients.limited(rows.steps, most_steps, "steps", left_out=left_out)
    measures = gradients.limited(every, most, "measures", left_out=left_out, evenly=False)
    time = figure.Time.of({*rows.steps, *rows.logged_steps})
    arrays: dict[str, Any] = {"shape/x": [time.place(step) for step in steps]}
    drawn_sites, there = [], {}
    for m, measure in enumerate(measures):
        sites = gradients.limited(sites_of(rows, measure), most_sites, "layers", left_out=left_out)
        drawn_sites.append(sites)
        for arm in arms:
            numbers = _numbers(rows, arm, measure, sites, steps)
            arrays |= {f"shape/{m}/{arm.index}/{name}": value for name, value in numbers.items()}
            there[m, arm.index] = [i for i, row in enumerate(numbers.get("mean", [])) if _leaves(row)]
    return Shape(arms, measures, steps, time, arrays, drawn_sites, there, left_out)


def _numbers(
    rows: TrainingRows, arm: Arm, measure: Measure, sites: Sequence[DrawnSite], steps: Sequence[int]
) -> dict[str, Any]:
    """Means over seeds by site and step, with the ends of intervals (or of the range over seeds), seeds and sds."""

    def cells(lines: Iterable[Sequence[Any]], part: str = "value") -> list[list[float | None]]:
        by_step = [{row.step or 0: row for row in line} for line in lines]
        return [figure.column((line.get(step) for step in steps), part, 4) for line in by_step]

    seeds = [[rows.line(one, measure.metric, site, measure.variant) for site in sites] for one in arm.subjects]
    means = [seeds_mean(of_site) for of_site in zip(*seeds, strict=True)]
    parts = {"mean": "value", "lo": "low", "hi": "high", "sd": "sd"}
    found: dict[str, Any] = {name: made for name, part in parts.items() if _leaves(made := cells(means, part))}
    if "mean" not in found:
        return {}
    spread = found.pop("sd", None)
    if len(seeds) > 1:
        found["seeds"] = [cells(lines) for lines in seeds]
    if spread and (measure.metric, measure.variant) in ESTIMATORS:
        for name, sign in (("sd0", -1), ("sd1", 1)):
            pairs = [zip(*both, strict=True) for both in zip(found["mean"], spread, strict=True)]
            moved = [[None if v is None else v + sign * (sd or 0.0) for v, sd in line] for line in pairs]
            found[name] = [[figure.brief(v, 4) for v in line] for line in moved]
    measured = [t for t in range(len(steps)) if any(row[t] is not None for row in found["mean"])]
    if len(measured) < len(steps):  # arms may lack steps
        found["upto"] = [max((s for s in measured if s <= t), default=measured[0]) for t in range(len(steps))]
    return found


def shape_sections(rows: TrainingRows, shape: Shape, row_parts: Sequence[Any]) -> list[Section]:
    """The sections: courses over training, maps, profiles at one step (with `row_parts` below), and dimensions."""
    moments = choice("Step", shape.moments, len(shape.steps) - 1, slider=True)
    switch = Switch("shape", (gradients.measure_choice(shape.measures, shape.default), moments))
    course, grid = _course_section(rows, shape, switch), _grid_section(rows, shape)
    return [course, grid, _moment_section(rows, shape, row_parts), *_dimension_sections(rows, shape)]


def depth_hero(rows: TrainingRows, shape: Shape) -> Hero | None:
    """The measure shown first over depth at the last step, a line for each arm, as the first figure of a page."""
    m = shape.default
    drawn, measure = [], shape.measures[m]
    for arm in (arm for arm in shape.arms if shape.there[m, arm.index]):
        places = [shape.sites[m][i] for i in shape.there[m, arm.index]]
        rows_at = [(site, known(arm_line(rows, arm, measure, site))) for site in places if site.kind != "final"]
        ends = [(site, line[-1]) for site, line in rows_at if line]
        x = [round(site.layer / max(1, arm.blocks), 4) for site, _ in ends]
        where = [site.name for site, _ in ends]
        look: dict[str, Any] = {"colour": series(arm.index), "size": 4.5, "owner": arm.line, "where": where}
        seeds = "seeds from" if len(arm.subjects) > 1 else "interval"
        drawn += [figure.points(arm.label, x, [row for _, row in ends], reach=seeds, **look)] if ends else []
    if not drawn:
        return None
    y = value_axis(figure.numbers_in([Panel(series=tuple(drawn))]), measure.label)
    alt = f"{measure.label} over relative depth at the last step. {gradients.courses(drawn, 6)}"
    panel = Panel(Depth(1, relative=True).axis(), y, tuple(drawn), alt=alt, height=330)
    bands = "Bands run over seeds." if shape.seeds > 1 else "Bands are 95 % intervals over contexts."
    title = f"{measure.label} over depth at the last step"
    return Hero(Figure((panel,), layout="single", files={"hero": {}}), title, [Key()], f"{measure.says} {bands}")


def beside(panels: Sequence[Panel]) -> str:
    return "single" if len(panels) < 2 else "pairs" if len(panels) in (2, 4) else "threes"


def arm_panel(rows: TrainingRows, arm: Arm, panel: Panel, *, seeds: bool = True) -> Panel:
    """A panel linked to the legend entry of its arm; with several arms its title is the label."""
    count = words.plural(len(arm.subjects), "seed") if len(arm.subjects) > 1 and seeds else ""
    return gradients.linked(panel, arm, several=len({one.model for one in rows.subjects}) > 1, aside=count)


def _course_section(rows: TrainingRows, shape: Shape, switch: Switch) -> Section:
    """The section with one line per layer over steps, above loss and gradient norm on the same x axis."""
    panels, default = [], shape.measures[shape.default]
    for arm in shape.arms:
        views = {str(m): _course(shape, m, arm) for m in range(len(shape.measures)) if shape.there[m, arm.index]}
        alt = f"{default.label} of {arm.label} over steps, a line per layer.{_course_words(shape, arm)}"
        panel = Panel(shape.time.axis(), views=views, by=("shape.0",), height=430, alt=alt)
        panels += [arm_panel(rows, arm, replace(panel, below=_loop(rows, shape, arm)))] if views else []
    lead = (
        "One line per layer, from the embedding to the last block. The axis of steps is logarithmic; step 0, the "
        f"initialisation, stands apart from it. {_seed_words(shape, 'Thin lines are seeds, the thick one their mean.')}"
    )
    lead += " All models share one scale." if len(panels) > 1 else ""
    if any(panel.below is not None for panel in panels):
        lead += (
            " Below, on the same axis: the loss on the held-out probe (points), the training loss (pale) and the "
            "gradient norm (dotted), so that phases can be read against them."
        )
    lead += " The dotted upright is the chosen step."
    shown = Figure(tuple(panels), layout=beside(panels), arrays=shape.arrays)
    parts = [Prose(text(lead)), Key(), Says(switch), Ramp("embedding", "last block", final=True), shown]
    bar = Controls(switch, steer=True)
    return Section("shape", "Over training", parts, "Over training", bar=bar, finding=_told(shape, "course"))


def _seed_words(shape: Shape, several: str) -> str:
    return several if shape.seeds > 1 else "Bands are 95&nbsp;% intervals over contexts."


def _course_words(shape: Shape, arm: Arm) -> str:
    """The course in the middle of the model, for readers who do not see the initial view."""
    m = shape.default
    there = shape.there[m, arm.index]
    if not there:
        return ""
    middle = there[len(there) // 2]
    course = gradients.course_words(shape.arrays[f"shape/{m}/{arm.index}/mean"][middle], shape.moments)
    return f" {shape.sites[m][middle].name}: {course}."


def _course(shape: Shape, m: int, arm: Arm) -> Panel:
    sites, there, drawn = shape.sites[m], shape.there[m, arm.index], []
    body = [i for i in there if sites[i].kind != "final"]
    unnamed = {*body} - {*body[:1], *body[-1:], *body[len(body) // 2 :][:1]}
    for i in there:
        look = gradients.depth_look(sites[i], arm.blocks) | {"join": True}
        thin = {"colour": figure.faded(look["colour"], 0.3), "width": 0.8, "join": True, "dash": look["dash"]}
        look |= {"band": 0.0 if len(arm.subjects) > 1 else 0.1, "where": shape.moments, "named": i not in unnamed}
        look |= {"x": shape.arrays["shape/x"], **shape.ends(m, arm, (i, "*"))}
        drawn += shape.line(m, arm, (i, "*"), thin=thin, **look)
    return Panel(shape.time.axis(), value_axis(shape.values(m)), tuple(drawn), levels=shape.now)


def _loop(rows: TrainingRows, shape: Shape, arm: Arm) -> Panel | None:
    """Panel of loss, probe loss and gradient norm of every seed."""
    looks: dict[str, dict[str, Any]] = {
        "loss": {"label": "training loss", "colour": "@ink/0.35", "width": 1.0},
        "probe_loss": {"label": "probe loss", "colour": "@ink", "width": 1.6, "size": 3.0},
        "gradient_norm": {"label": "gradient norm", "colour": "@s2/0.75", "width": 1.2, "dash": "dot", "right": True},
    }
    drawn = []
    for name, look in looks.items():
        for one in arm.subjects:
            label = look["label"] + (f", seed {one.seed}" if len(arm.subjects) > 1 else "")
            if line := rows.logged(one, name):
                drawn.append(logged_series(line, shape.time, LOGGED, **{**look, "label": label, "named": False}))
    if not drawn:
        return None
    logged = {name: [row.value for one in rows.subjects for row in known(rows.logged(one, name))] for name in looks}
    losses, norms = [*logged["loss"], *logged["probe_loss"]], [v for v in logged["gradient_norm"] if v > 0]
    pad = 0.08 * ((max(losses) - min(losses)) or 1.0) if losses else 0.0
    y = Axis("loss", rules=True, bounds=(min(losses) - pad, max(losses) + pad) if losses else None, most=4)
    right = None
    if norms:
        ends = [float(f"{end:.2g}") for end in (min(norms), max(norms))]
        right = Axis("gradient norm", log=True, ticks=(ends, [f"{end:g}" for end in ends]),
                     bounds=(min(norms) / 1.2, max(norms) * 1.2))  # fmt: skip
    return Panel(shape.time.axis(), y, tuple(s for s in drawn if right or not s.right), right=right)


def logged_series(line: Sequence[Any], time: figure.Time, most: int, **look: Any) -> Series:
    """A logged line as a series, averaged within even parts of the axis if it has more than `most` points."""
    parts: dict[int, list[Any]] = {}
    low, high = time.ends
    width = ((high - low) or 1.0) / most
    for n, row in enumerate(known(line)):
        parts.setdefault(int((time.place(row.step or 0) - low) / width) if len(line) > most else n, []).append(row)
    means = [part for _, part in sorted(parts.items())]
    steps = [part[len(part) // 2].step or 0 for part in means]
    values = [figure.brief(step_mean(step, part).value) for step, part in zip(steps, means, strict=True)]
    where = [f"step {step:,}" for step in steps]
    ends: dict[str, Any] = {}
    if look.pop("interval", False) and len(line) <= most:
        ends = {name: figure.column((part[0] for part in means), name) for name in ("low", "high")}
    return Series(look.pop("label"), [time.place(step) for step in steps], values, where=where, **ends, **look)


def _grid_section(rows: TrainingRows, shape: Shape) -> Section:
    panels = []
    for arm in shape.arms:
        views = {}
        for m, measure in enumerate(shape.measures):
            there, values = tuple(shape.there[m, arm.index]), shape.values(m)
            if there:
                at, sites = (there, "*"), [shape.sites[m][i] for i in there]
                z, scale = Ref(f"shape/{m}/{arm.index}/mean", at), (min(values), max(values))
                ends = shape.ends(m, arm, at)
                views[str(m)] = gradients.step_map(shape.steps, sites, z, scale, measure.label, **ends)
        alt, height = gradients.MAP_ALT.format(arm.label), gradients.map_height(max(map(len, shape.sites)))
        panels += [arm_panel(rows, arm, Panel(views=views, by=("shape.0",), height=height, alt=alt))] if views else []
    files = {f"steps-by-layers-{shape.measures[m].metric}": {"shape.0": m} for m in shape.in_files}
    lead = (
        "The same numbers as maps, on one colour scale; of several seeds the means. Columns are measured steps, not "
        "evenly spaced in time."
    )
    maps = Figure(tuple(panels), layout=beside(panels), arrays=shape.arrays, files=files, most=FILE_ARMS)
    found = _told(shape, "peak")
    return Section("grid", "Steps by layers", [Prose(lead), maps], "Steps by layers", under=True, finding=found)


def _moment_section(rows: TrainingRows, shape: Shape, row_parts: Sequence[Any]) -> Section:
    hues = {arm.line: arm.index for arm in legend_arms(rows)}
    looks = {a.index: {"label": a.label, "colour": series(hues[a.line]), "owner": a.line} for a in shape.arms}
    views = {str(m): arms_profile(shape, m, shape.arms, looks) for m in range(len(shape.measures))}
    alt = "Profiles over depth at the chosen step, all models together."
    panel = Panel(views=views, by=("shape.0",), height=340, alt=alt)
    lead = ["The profile over depth at the step that the slider above shows; the scale is that of all steps.",
            _seed_words(shape, "Thin lines are seeds; the band goes from the lowest to the highest."),
            "The final norm stands apart (diamond)."]  # fmt: skip
    parts: list[Any] = [Prose(text(" ".join(lead))), Key(), Figure((panel,), layout="single", arrays=shape.arrays)]
    parts += [_profile_file(shape, m) for m in shape.in_files]
    found = _told(shape, "depth")
    return Section("moment", "At one step", [*parts, *row_parts], "At one step", under=True, finding=found)


def _told(shape: Shape, what: str) -> str:
    """One sentence on the measure shown first: its course over steps, where it is highest, or its course over depth."""
    m, clauses = shape.default, []
    leads = {"course": "in the middle of the model", "peak": "highest", "depth": "from the first layer to the last"}
    for arm in shape.arms[:TOLD]:
        sites = [i for i in shape.there[m, arm.index] if shape.sites[m][i].kind != "final"]
        lines = [[(v, t) for t, v in enumerate(shape.arrays[f"shape/{m}/{arm.index}/mean"][i]) if v is not None]
                 for i in sites]  # fmt: skip
        if not lines or not all(lines):
            continue
        middle = lines[len(lines) // 2]
        ends = (middle[0][0], middle[-1][0]) if what == "course" else (lines[0][-1][0], lines[-1][-1][0])
        numbers = " to ".join(words.number(value, 2) for value in ends)
        if what == "peak":
            (value, step), at = max((max(line), i) for line, i in zip(lines, sites, strict=True))
            numbers = f"{words.number(value, 2)} ({shape.sites[m][at].name}, {shape.moments[step]})"
        clauses.append(f"{numbers} in {arm.label}" if len(shape.arms) > 1 else numbers)
    more = f" and {len(shape.arms) - TOLD} more models" if len(shape.arms) > TOLD else ""
    when = " at the last step" if what == "depth" else ", first step to last" if what == "course" else ""
    return f"{shape.measures[m].label}, {leads[what]}{when}: {'; '.join(clauses)}{more}." if clauses else ""


def arms_profile(
    shape: Shape, m: int, arms: Sequence[Arm], looks: Mapping[int, Mapping[str, Any]], *, step: int | None = None,
    scale: Sequence[int] | None = None,
) -> Panel:  # fmt: skip
    """Arms over depth at one step (None: the chosen one), by relative depth if their depths differ."""
    depth = _depth(shape, m, {arm.blocks for arm in arms})
    drawn = [part for arm in arms for part in _arm_profile(shape, m, arm, depth, step, **looks[arm.index])]
    return Panel(depth.axis(), value_axis(shape.values(m, scale)), tuple(drawn))


def _depth(shape: Shape, m: int, blocks: set[int]) -> Depth:
    sites = shape.sites[m]
    first = 0 if any(site.layer == 0 for site in sites) else 1
    return replace(Depth.of_sites(max(blocks), sites), relative=len(blocks) > 1, first=first)


def _arm_profile(shape: Shape, m: int, arm: Arm, depth: Depth, step: int | None, **look: Any) -> list[Series]:
    """Blocks as a line with a band, the final norm as a separate point, seeds as thin lines."""
    sites, when, drawn = shape.sites[m], shape.when(m, arm, step), []
    line: dict[str, Any] = {"size": 5.0, "width": 2.0}
    apart: dict[str, Any] = {"size": 7.0, "width": 0.0, "marker": "diamond", "bars": "y", "named": False}
    for last in (False, True):
        indices = tuple(i for i in shape.there[m, arm.index] if (sites[i].kind == "final") == last)
        if indices:
            x = [depth.place(sites[i].layer, sites[i].kind, arm.blocks) for i in indices]
            thin = {"width": 0.0 if last else 0.9, "size": 3.0 if last else 0.0, "owner": look.get("owner")}
            style = {**look, **(apart if last else line), "thin": thin | {"colour": figure.faded(look["colour"], 0.4)}}
            where = [sites[i].name for i in indices]
            drawn += shape.line(
                m, arm, (indices, when), x=x, where=where, **style, **shape.ends(m, arm, (indices, when))
            )
    return drawn


def _profile_file(shape: Shape, m: int) -> Figure:
    """A file of a measure over depth at a few steps, darker for later ones, one panel per arm."""
    at = few(range(len(shape.steps)), FILE_STEPS)
    panels, y = [], value_axis(shape.values(m), shape.measures[m].label)
    for arm in [arm for arm in shape.arms if shape.there[m, arm.index]][:FILE_ARMS]:
        depth, drawn = _depth(shape, m, {arm.blocks}), []
        for n, t in enumerate(at):
            look = {"label": f"step {shape.steps[t]:,}", "colour": figure.sequence(n / max(1, len(at) - 1))}
            drawn += [part for part in _arm_profile(shape, m, arm, depth, t, **look) if not part.quiet]
        panels.append(Panel(depth.axis(), y, tuple(drawn), title=arm.label))
    files: dict[str, Mapping[str, int]] = {f"profiles-{shape.measures[m].metric}": {}}
    return Figure(tuple(panels), arrays=shape.arrays, files=files, shown=False, shared=True)


def _dimension_sections(rows: TrainingRows, shape: Shape) -> list[Section]:
    """The section on intrinsic dimension by estimator: over steps at one site, over depth at one step."""
    index = {(m.metric, m.variant): i for i, m in enumerate(shape.measures) if m.family == "stream"}
    measured = {index[key]: look for key, look in ESTIMATORS.items() if key in index}
    if not measured:
        return []
    kinds = {site.kind for m in measured for site in shape.sites[m]}
    places = [place for place in PLACES if place[2] in kinds]
    panels, file_panels = [], []
    for arm in (arm for arm in shape.arms if any(shape.there[m, arm.index] for m in measured)):
        look: dict[str, Any] = {"alt": f"Intrinsic dimension of {arm.label} by estimator.", "height": 300}
        over = {str(p): _dimension(shape, arm, measured, place) for p, place in enumerate(places)}
        views = {at: view for at, view in over.items() if view.series}
        left = arm_panel(rows, arm, Panel(views=views, by=("dimension.0",), **look))
        panels += [left, replace(_dimension(shape, arm, measured), line=arm.line, **look)]
        file_panels.append(replace(left, below=_loop(rows, shape, arm)))
    lead = (
        "Left over steps at one layer, right over layers at the step of the slider. Bars are the standard deviation "
        "over shuffled batches of rows. TwoNN is biased low, the more so the larger the dimension and the fewer the "
        f"rows{_bias(rows)}; <em>bias taken out</em> is the dimension of a flat cloud that gives the same TwoNN value "
        "at the same number of rows. What all estimators show does not hang on one of them."
    )
    key = Swatches([Swatch(name, series(hue), dash) for name, hue, dash, _ in measured.values()])
    switch = Switch("dimension", (choice("Layer", [name for name, *_ in places], min(2, len(places) - 1)),))
    file = Figure(tuple(file_panels[:3]), arrays=shape.arrays, files={"dimension-over-training": {}}, shown=False)
    shown = Figure(tuple(panels), layout="pairs", arrays=shape.arrays)
    parts = [Prose(text(lead)), Controls(switch), key, shown, file]
    return [Section("dimension", "Intrinsic dimension by estimator", parts, "Dimension", under=True)]


def _dimension(
    shape: Shape, arm: Arm, measured: Mapping[int, tuple[str, int, str, float]], place: Place | None = None
) -> Panel:
    """A panel over steps at one place (its relative depth and kind of site), else over layers at the chosen step."""
    depth, drawn, heading = Depth(arm.blocks), [], "over layers, {shape.1}"
    for m, (label, hue, dash, width) in measured.items():
        sites, there = shape.sites[m], shape.there[m, arm.index]
        indices = tuple(i for i in there if sites[i].kind != "final")
        at: tuple[Any, ...] = (indices, shape.when(m, arm))
        x, where = [depth.place(sites[i].layer, sites[i].kind) for i in indices], [sites[i].name for i in indices]
        if place is not None:
            layers = (max(1, round(place[1] * arm.blocks)),) if place[2] == "resid" else range(arm.blocks + 1)
            indices = tuple(i for i in there if sites[i].kind == place[2] and sites[i].layer in layers)
            at, x, where = (*indices[:1], "*"), shape.arrays["shape/x"], shape.moments
            heading = f"over steps, {sites[indices[0]].name}" if indices else heading
        look: dict[str, Any] = {"label": label, "colour": series(hue), "dash": dash, "width": width}
        look |= {"size": 4.0, "join": True}
        if f"shape/{m}/{arm.index}/sd0" in shape.arrays:  # whiskers of one standard deviation
            low, high = (Ref(f"shape/{m}/{arm.index}/{end}", at) for end in ("sd0", "sd1"))
            look |= {"low": low, "high": high, "bars": "y", "reach": "one sd over batches:"}
        drawn += shape.line(m, arm, at, x=x, where=where, **look) if indices else []
    # the embedding of a character model has few distinct rows and is far off: it has a scale of its own
    embed = place is not None and place[2] == "embed"
    cells = [(m, other.index, i) for m in measured for other in shape.arms for i in shape.there[m, other.index]
             if embed or shape.sites[m][i].kind != "embed"]  # fmt: skip
    y = value_axis([v for m, a, i in cells for v in _leaves(shape.arrays[f"shape/{m}/{a}/mean"][i])])
    x_axis, levels = (depth.axis(), ()) if place is None else (shape.time.axis(), shape.now)
    return Panel(x_axis, y, tuple(drawn), levels=levels, heading=heading)


def _bias(rows: TrainingRows) -> str:
    """The range of TwoNN's bias as noted in the table, as text."""
    notes = {row.note for key in rows.keys.get("two_nn", []) for row in rows.lines[key]}
    noted = [value.replace("−", "-") for note in notes for value in re.findall(r"bias about ([+−-]?[\d.]+)", note)]
    biases = sorted({int(float(value)) for value in noted}, reverse=True)
    ends = dict.fromkeys(f"{value:+d} %".replace("-", "−") for value in (*biases[:1], *biases[-1:]))
    return f" (here about {' to '.join(ends)}, as the table says at each value)" if ends else ""
