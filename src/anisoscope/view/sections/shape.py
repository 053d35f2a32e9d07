"""Sections on geometry over training: courses, maps, profiles at one step, rows, and estimators of dimension.

An *arm* is one model with all its seeds (subjects that differ in nothing else). A *measure* is a metric in one variant
at one family of sites: the residual stream, or a kind of site inside the blocks such as attention scores. All figures
refer to the same arrays, measure × arm × site × step, which the page contains once.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from anisoscope.results.query import seeds_mean, step_mean
from anisoscope.view import figure, words
from anisoscope.view.figure import Axis, Depth, Figure, Level, Panel, Ref, Series, Switch, choice, series, value_axis
from anisoscope.view.page import Controls, Key, Prose, Ramp, Says, Section, Swatch, Swatches, text
from anisoscope.view.sections import gradients
from anisoscope.view.sections.gradients import Gradients, Measure
from anisoscope.view.subjects import STREAM, DrawnSite, Subject, TrainingRows, known
from anisoscope.view.words import LOOP, MOVEMENT, TANGENT, Catalogue, few

SIZE = 2_600_000  # limit of the JSON arrays in characters
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
LOGGED = 140  # largest number of points of a logged line
STEP = "$shape.1"  # the chosen step
# estimator: metric, variant, name, colour, dash, width
ESTIMATORS = (
    ("two_nn", "", "TwoNN", 0, "solid", 2.0),
    ("two_nn", "calibrated=1", "TwoNN, bias taken out", 0, "dash", 2.0),
    ("levina_bickel", "", "Levina–Bickel", 2, "solid", 1.8),
    ("gride", "scale=1", "GRIDE, scale 1", 3, "dot", 1.4),
    ("gride", "", "GRIDE, scale 2", 3, "solid", 1.6),
    ("gride", "scale=4", "GRIDE, scale 4", 3, "dashdot", 1.4),
    ("gride", "scale=8", "GRIDE, scale 8", 3, "dash", 1.4),
)
PLACES = (
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
    found: dict[tuple[str, str], list[Subject]] = defaultdict(list)
    for subject in rows.subjects:
        found[subject.model, subject.stack].append(subject)
    together: list[list[Subject]] = []
    for subjects in found.values():
        distinct = len({one.seed for one in subjects}) == len(subjects)
        together += [subjects] if distinct else [[one] for one in subjects]
    arms = []
    for i, (first, *others) in enumerate(together):
        label = first.label.replace(f" · seed {first.seed}", "") if others else first.label
        blocks = max(one.blocks for one in (first, *others))
        arms.append(Arm(i, label, first.model, first.role, blocks, (first, *others)))
    return arms


def arm_hue(rows: TrainingRows, arm: Arm) -> int:
    """The colour of an arm in the page's legend; by subject if there are gradient sections, which show each."""
    return arm.index if rows.metrics().isdisjoint(TANGENT) else arm.line


def measures_of(rows: TrainingRows, catalogue: Catalogue) -> list[Measure]:
    """All measures with values at several sites that do not depend on gradients, in reading order."""
    lines = Gradients(rows, catalogue)
    seen: dict[tuple[str, str, str], None] = {}
    for metric in sorted(rows.metrics() - ELSEWHERE):
        for _, _, site, group, variant in rows.keys[metric]:
            family = "stream" if site.kind in STREAM else site.kind if site.kind in INSIDE else ""
            # metrics of movement between steps: only the main proxy and rank
            if family and not group and (metric not in MOVEMENT or lines.is_main(variant)):
                seen[metric, variant, family] = None
    order = {name: i for i, name in enumerate(catalogue.ordered({key[0] for key in seen}))}
    keys = sorted(seen, key=lambda k: (k[0] in MOVEMENT, k[2] != "stream", order[k[0]], k[1] != "", k[2], k[1]))
    scaled = any(metric == "gride" and "scale=" in variant for metric, variant, _ in keys)
    measures = []
    for metric, variant, family in keys:
        entry, usual = catalogue.entry(metric), "scale 2" if (metric, variant) == ("gride", "") and scaled else ""
        how = "" if metric in MOVEMENT else words.variant_words(variant) or usual
        label = " · ".join(part for part in (entry.title, FAMILY_WORDS.get(family, ""), how) if part)
        description = words.sentences(entry.formula, entry.description)
        measures.append(Measure(metric, variant, label, description, family))
    return measures


def sites_of(rows: TrainingRows, measure: Measure) -> list[DrawnSite]:
    """The sites at which any model has this measure."""
    keys = rows.keys.get(measure.metric, [])
    return sorted({k[2] for k in keys if k[2].kind in measure.kinds and k[4] == measure.variant and not k[3]})


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
        there = [(i, m.metric) for i, m in enumerate(self.measures) if not m.variant and m.family == "stream"]
        found = {metric: i for i, metric in reversed(there)}
        return next((found[name] for name in FIRST if name in found), 0)

    @property
    def in_files(self) -> list[int]:
        """The indices of the few measures that have vector files."""
        found = {m.metric: i for i, m in reversed(list(enumerate(self.measures))) if not m.variant}
        if "svd_ratio" in found:
            found.pop("average_cosine", None)
        return [found[name] for name in IN_FILES if name in found][:FILE_MEASURES]

    @property
    def seeds(self) -> int:
        return max(len(arm.subjects) for arm in self.arms)

    @property
    def now(self) -> tuple[Level, ...]:
        """A vertical line at the chosen step."""
        return (Level(Ref("shape/x", (STEP,)), upright=True),)

    def values(self, m: int, arms: Sequence[int] | None = None) -> list[float]:
        """All values and interval ends of a measure, for a common scale."""
        names = [f"shape/{m}/{a.index}/{part}" for a in self.arms for part in ("mean", "lo", "hi", "seeds")
                 if arms is None or a.index in arms]  # fmt: skip
        return [v for name in names if name in self.arrays for v in _leaves(self.arrays[name])]

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

    def spread(self, m: int, arm: Arm, at: tuple[Any, ...]) -> dict[str, Any]:
        """Series fields for whiskers of one standard deviation of an estimator."""
        low, high = (f"shape/{m}/{arm.index}/{end}" for end in ("sd0", "sd1"))
        ends = {"low": Ref(low, at), "high": Ref(high, at), "bars": "y", "reach": "one sd over batches:"}
        return ends if low in self.arrays else {}

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
    found = None
    for level in LEVELS:
        found = _shape(rows, arms_of(rows), every, level)
        if len(json.dumps(found.arrays)) <= SIZE:
            break
    return found


def _shape(rows: TrainingRows, arms: list[Arm], every: list[Measure], level: tuple[int, int, int]) -> Shape:
    most_steps, most_places, most = level
    left_out: dict[str, str] = {}
    steps, measures = few(rows.steps, most_steps), every[:most]
    if len(steps) < len(rows.steps):
        left_out["shape steps"] = f"{len(steps)} of {len(rows.steps)} steps"
    if len(measures) < len(every):
        left_out["shape measures"] = f"{most} of {len(every)} measures"
    logs = [row.step or 0 for name in LOOP for key in rows.keys.get(name, []) for row in rows.lines[key]]
    time = figure.Time.of([*rows.steps, *logs])
    arrays: dict[str, Any] = {"shape/x": [time.place(step) for step in steps]}
    places, there = [], {}
    for m, measure in enumerate(measures):
        found = sites_of(rows, measure)
        sites = [found[i] for i in few(range(len(found)), most_places)]
        if len(sites) < len(found):
            left_out["shape places"] = f"{most_places} of {len(found)} layers"
        places.append(sites)
        for arm in arms:
            numbers = _numbers(rows, arm, measure, sites, steps)
            arrays |= {f"shape/{m}/{arm.index}/{name}": value for name, value in numbers.items()}
            there[m, arm.index] = [
                i for i, row in enumerate(numbers.get("mean", [])) if any(v is not None for v in row)
            ]
    return Shape(arms, measures, steps, time, arrays, places, there, left_out)


def _numbers(
    rows: TrainingRows, arm: Arm, measure: Measure, sites: Sequence[DrawnSite], steps: Sequence[int]
) -> dict[str, Any]:
    """Means over seeds by site and step, with the ends of intervals (or of the range over seeds), seeds and sds."""
    lines = [[rows.line(one, measure.metric, site, measure.variant) for site in sites] for one in arm.subjects]
    means = [_by_step(seeds_mean([seed[i] for seed in lines])) for i in range(len(sites))]
    found: dict[str, Any] = {"mean": [_cells(line, "value", steps) for line in means]}
    if not _leaves(found["mean"]):
        return {}
    for name, part in (("lo", "low"), ("hi", "high")):
        cells = [_cells(line, part, steps) for line in means]
        found |= {name: cells} if _leaves(cells) else {}
    if len(lines) > 1:
        found["seeds"] = [[_cells(_by_step(line), "value", steps) for line in seed] for seed in lines]
    spread = [_cells(line, "sd", steps) for line in means]
    if _leaves(spread) and any((measure.metric, measure.variant) == e[:2] for e in ESTIMATORS):
        for name, sign in (("sd0", -1), ("sd1", 1)):
            pairs = [zip(*both, strict=True) for both in zip(found["mean"], spread, strict=True)]
            moved = [[None if v is None else v + sign * (sd or 0.0) for v, sd in line] for line in pairs]
            found[name] = [[figure.brief(v, 4) for v in line] for line in moved]
    if any(all(row[t] is None for row in found["mean"]) for t in range(len(steps))):  # arms may lack steps
        measured = [t for t in range(len(steps)) if any(row[t] is not None for row in found["mean"])]
        found["upto"] = [max((s for s in measured if s <= t), default=measured[0]) for t in range(len(steps))]
    return found


def _by_step(line: Sequence[Any]) -> dict[int, Any]:
    return {row.step or 0: row for row in line}


def _cells(line: Mapping[int, Any], name: str, steps: Sequence[int]) -> list[float | None]:
    return figure.column((line.get(step) for step in steps), name, 4)


def shape_sections(rows: TrainingRows, shape: Shape, row_parts: Sequence[Any]) -> list[Section]:
    """The sections: courses over training, maps, profiles at one step (with `row_parts` below), and dimensions."""
    moments = choice("Step", [f"step {step:,}" for step in shape.steps], len(shape.steps) - 1, slider=True)
    switch = Switch("shape", (gradients.measure_choice(shape.measures, shape.default), moments))
    course, grid = _course_section(rows, shape, switch), _grid_section(rows, shape)
    return [course, grid, _moment_section(rows, shape, row_parts), *_dimension_sections(rows, shape)]


def beside(panels: Sequence[Panel]) -> str:
    return "single" if len(panels) < 2 else "pairs" if len(panels) in (2, 4) else "threes"


def arm_panel(rows: TrainingRows, arm: Arm, panel: Panel, *, seeds: bool = True) -> Panel:
    """A panel linked to the legend entry of its arm; with several arms its title is the label."""
    several = len({one.model for one in rows.subjects}) > 1
    role = arm.role if several and arm.role not in arm.label else ""
    count = words.plural(len(arm.subjects), "seed") if len(arm.subjects) > 1 and seeds else ""
    owner = ", ".join(part for part in (role, count) if part)
    return replace(panel, title=arm.label if several or count else "", owner=owner, line=arm.line)


def _course_section(rows: TrainingRows, shape: Shape, switch: Switch) -> Section:
    """The section with one line per layer over steps, above loss and gradient norm on the same x axis."""
    panels = []
    for arm in shape.arms:
        views = {str(m): _course(shape, m, arm) for m in range(len(shape.measures)) if shape.there[m, arm.index]}
        panel = Panel(shape.time.axis(), views=views, by=("shape.0",), height=430, alt=_course_alt(rows, shape, arm))
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
    return Section("shape", "Over training", parts, "Over training", bar=Controls(switch, steer=True))


def _seed_words(shape: Shape, several: str) -> str:
    return several if shape.seeds > 1 else "Bands are 95&nbsp;% intervals over contexts."


def _course(shape: Shape, m: int, arm: Arm) -> Panel:
    sites, there, drawn = shape.sites[m], shape.there[m, arm.index], []
    body = [i for i in there if sites[i].kind != "final"]
    hidden = {*body} - {*body[:1], *body[-1:], *body[len(body) // 2 :][:1]}
    x, where, several = shape.arrays["shape/x"], [f"step {step:,}" for step in shape.steps], len(arm.subjects) > 1
    for i in there:
        colour = gradients.depth_colour(sites[i], arm.blocks)
        look: dict[str, Any] = {"dash": "solid" if i in body else "dash", "join": True}
        thin = {"colour": figure.faded(colour, 0.3), "width": 0.8, **look}
        look |= {"colour": colour, "size": 3.5, "width": 1.5, "band": 0.0 if several else 0.1, "where": where}
        look |= {"label": sites[i].name, "named": i not in hidden, **shape.ends(m, arm, (i, "*"))}
        drawn += shape.line(m, arm, (i, "*"), x=x, thin=thin, **look)
    return Panel(shape.time.axis(), value_axis(shape.values(m)), tuple(drawn), levels=shape.now)


def _course_alt(rows: TrainingRows, shape: Shape, arm: Arm) -> str:
    """Alternative text of the initial view, for the middle of the model."""
    measure = shape.measures[shape.default]
    sites = rows.sites([measure.metric], measure.kinds)
    if not sites:
        return f"{measure.label} of {arm.label} over steps."
    site = sites[rows.middle(sites)]
    line = known(arm_line(rows, arm, measure, site))
    course = f" {site.name}: {gradients.course_words(line)}." if line else ""
    return f"{measure.label} of {arm.label} over steps, a line per layer.{course}"


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


# -- maps of steps by layers -------------------------------------------------------------------------------------------


def _grid_section(rows: TrainingRows, shape: Shape) -> Section:
    panels = []
    for arm in shape.arms:
        views = {}
        for m, measure in enumerate(shape.measures):
            there, values = tuple(shape.there[m, arm.index]), shape.values(m)
            if there:
                at, sites = (there, "*"), [shape.sites[m][i] for i in there]
                z, scale = Ref(f"shape/{m}/{arm.index}/mean", at), (min(values), max(values))
                views[str(m)] = gradients.step_map(
                    shape.steps, sites, z, scale, measure.label, **shape.ends(m, arm, at)
                )
        most = max(map(len, shape.sites))
        panels += [arm_panel(rows, arm, gradients.map_panel(views, "shape.0", arm.label, most))] if views else []
    files = {f"steps-by-layers-{shape.measures[m].metric}": {"shape.0": m} for m in shape.in_files}
    lead = "The same numbers as maps" + (", on one colour scale" if len(panels) > 1 else "")
    lead += "; means over seeds" if shape.seeds > 1 else ""
    lead += ". Columns are measured steps, not evenly spaced in time."
    maps = Figure(tuple(panels), layout=beside(panels), arrays=shape.arrays, files=files, most=FILE_ARMS)
    return Section("grid", "Steps by layers", [Prose(lead), maps], "Steps by layers", under=True)


# -- profiles at one step ----------------------------------------------------------------------------------------------


def _moment_section(rows: TrainingRows, shape: Shape, row_parts: Sequence[Any]) -> Section:
    looks = {a.index: {"label": a.label, "colour": series(arm_hue(rows, a)), "owner": a.line} for a in shape.arms}
    views = {str(m): arms_profile(shape, m, shape.arms, looks) for m in range(len(shape.measures))}
    alt = "Profiles over depth at the chosen step, all models together."
    panel = Panel(views=views, by=("shape.0",), height=340, alt=alt)
    lead = ["The profile over depth at the step that the slider above shows; the scale is that of all steps.",
            _seed_words(shape, "Thin lines are seeds; the band goes from the lowest to the highest."),
            "The final norm stands apart (diamond)."]  # fmt: skip
    parts: list[Any] = [Prose(text(" ".join(lead))), Key(), Figure((panel,), layout="single", arrays=shape.arrays)]
    parts += [_profile_file(shape, m) for m in shape.in_files]
    return Section("moment", "At one step", [*parts, *row_parts], "At one step", under=True)


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
    final = any(site.kind == "final" for site in sites)
    return Depth(max(blocks), len(blocks) > 1, final, first=0 if any(site.layer == 0 for site in sites) else 1)


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


# -- dimension by estimator --------------------------------------------------------------------------------------------


def _dimension_sections(rows: TrainingRows, shape: Shape) -> list[Section]:
    """The section on intrinsic dimension by estimator: over steps at one site, over depth at one step."""
    index = {(m.metric, m.variant): i for i, m in enumerate(shape.measures) if m.family == "stream"}
    lines = [(index[e[:2]], e) for e in ESTIMATORS if e[:2] in index]
    if not lines:
        return []
    kinds = {site.kind for m, _ in lines for site in shape.sites[m]}
    places = [(name, at, kind) for name, at, kind in PLACES if kind in kinds]
    panels, file_panels = [], []
    for arm in shape.arms:
        if any(shape.there[m, arm.index] for m, _ in lines):
            alt = f"Intrinsic dimension of {arm.label} by estimator, over steps and over layers."
            over = {str(p): _dimension_over(shape, arm, lines, place) for p, place in enumerate(places)}
            views = {at: view for at, view in over.items() if view is not None}
            left = arm_panel(rows, arm, Panel(views=views, by=("dimension.0",), alt=alt, height=300))
            panels += [left, replace(_dimension_at(shape, arm, lines), line=arm.line, alt=alt, height=300)]
            file_panels.append(replace(left, below=_loop(rows, shape, arm)))
    bias = _bias(rows)
    lead = (
        "Left over steps at one layer, right over layers at the step of the slider. Bars are the standard deviation "
        "over shuffled batches of rows. TwoNN is biased low, the more so the larger the dimension and the fewer the "
        "rows"
        + (f" ({bias}, as the table says at each value)" if bias else "")
        + "; <em>bias taken out</em> is the dimension of a flat cloud that gives the same TwoNN value at the same "
        "number of rows."
    )
    lead += " What all estimators show does not hang on one of them." if len({e[0] for _, e in lines}) > 1 else ""
    key = Swatches([Swatch(name, series(hue), dash) for _, (_, _, name, hue, dash, _) in lines])
    switch = Switch("dimension", (choice("Layer", [name for name, *_ in places], min(2, len(places) - 1)),))
    file = Figure(tuple(file_panels[:3]), arrays=shape.arrays, files={"dimension-over-training": {}}, shown=False)
    shown = Figure(tuple(panels), layout="pairs", arrays=shape.arrays)
    parts = [Prose(text(lead)), Controls(switch), key, shown, file]
    return [Section("dimension", "Intrinsic dimension by estimator", parts, "Dimension", under=True)]


Estimator = tuple[int, tuple[str, str, str, int, str, float]]


def _dimension_scale(shape: Shape, lines: Sequence[Estimator], *, embed: bool) -> Axis:
    """The scale of the blocks without the embedding, which in character models has few distinct rows and is far off."""
    places = [(m, arm.index, i) for m, _ in lines for arm in shape.arms for i in shape.there[m, arm.index]
              if embed or shape.sites[m][i].kind != "embed"]  # fmt: skip
    return value_axis([v for m, a, i in places for v in _leaves(shape.arrays[f"shape/{m}/{a}/mean"][i])])


def _estimator(shape: Shape, arm: Arm, line: Estimator, at: tuple[Any, ...], **more: Any) -> list[Series]:
    m, (_, _, name, hue, dash, width) = line
    look = {"label": name, "colour": series(hue), "dash": dash, "width": width, "size": 4.0, "join": True}
    return shape.line(m, arm, at, **look, **more, **shape.spread(m, arm, at))


def _dimension_over(shape: Shape, arm: Arm, lines: Sequence[Estimator], place: tuple[str, float, str]) -> Panel | None:
    """A panel over steps at one place, given by relative depth and kind of site."""
    _, at, kind = place
    x, where = shape.arrays["shape/x"], [f"step {step:,}" for step in shape.steps]
    drawn, site, layer = [], None, max(1, round(at * arm.blocks))
    for line in lines:
        sites = shape.sites[line[0]]
        here = [i for i in shape.there[line[0], arm.index]
                if sites[i].kind == kind and (kind != "resid" or sites[i].layer == layer)]  # fmt: skip
        if here:
            site = sites[here[0]]
            drawn += _estimator(shape, arm, line, (here[0], "*"), x=x, where=where)
    if site is None:
        return None
    y = _dimension_scale(shape, lines, embed=kind == "embed")
    return Panel(shape.time.axis(), y, tuple(drawn), levels=shape.now, heading=f"over steps, {site.name}")


def _dimension_at(shape: Shape, arm: Arm, lines: Sequence[Estimator]) -> Panel:
    depth, drawn = Depth(arm.blocks), []
    for line in lines:
        sites = shape.sites[line[0]]
        indices = tuple(i for i in shape.there[line[0], arm.index] if sites[i].kind != "final")
        x, where = [depth.place(sites[i].layer, sites[i].kind) for i in indices], [sites[i].name for i in indices]
        drawn += _estimator(shape, arm, line, (indices, shape.when(line[0], arm)), x=x, where=where) if indices else []
    y = _dimension_scale(shape, lines, embed=False)
    return Panel(depth.axis(), y, tuple(drawn), heading="over layers, {shape.1}")


def _bias(rows: TrainingRows) -> str:
    """The range of TwoNN's bias as noted in the table, as text."""
    lines = [rows.lines[key] for key in rows.keys.get("two_nn", [])]
    parts = [part.strip() for line in lines for row in line for part in row.note.split(";")]
    notes = [part.removeprefix("bias about").split("%")[0].strip() for part in parts if part.startswith("bias about")]
    found = sorted({int(float(note.replace("−", "-"))) for note in notes if note}, reverse=True)
    if not found:
        return ""
    ends = [f"{value:+d} %".replace("-", "−") for value in (found[0], found[-1])]
    return f"here about {ends[0]}" if ends[0] == ends[1] else f"here between about {ends[0]} and {ends[1]}"
