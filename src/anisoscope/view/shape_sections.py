"""The sections on the shape of learning: figures that the page's script makes from one set of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anisoscope.view.inputs import row_nouns
from anisoscope.view.palette import Tokens
from anisoscope.view.shape_ablation import (
    ARM_WORDS,
    EFFECTS,
    ablation_measures,
    designs,
    effect_chart,
    effect_rows,
    effect_words,
    effects_of,
)
from anisoscope.view.shape_arms import Arm, arm_line
from anisoscope.view.shape_cube import Cube, make_cube
from anisoscope.view.shape_rows import rows_data
from anisoscope.view.traces import Spec, base_layout
from anisoscope.view.training import History, known
from anisoscope.view.training_board import Board, Choice, LearnerChart, Option, Switch
from anisoscope.view.training_energy import course_words
from anisoscope.view.words import listed, plural

if TYPE_CHECKING:
    from anisoscope.view.report import RunView

# estimator: metric, variant, name, colour, dash, width
ESTIMATORS = (
    ("two_nn", "", "TwoNN", 1, "solid", 2.0),
    ("two_nn", "calibrated=1", "TwoNN, bias taken out", 1, "dash", 2.0),
    ("levina_bickel", "", "Levina–Bickel", 3, "solid", 1.8),
    ("gride", "scale=1", "GRIDE, scale 1", 4, "dot", 1.4),
    ("gride", "", "GRIDE, scale 2", 4, "solid", 1.6),
    ("gride", "scale=4", "GRIDE, scale 4", 4, "dashdot", 1.4),
    ("gride", "scale=8", "GRIDE, scale 8", 4, "dash", 1.4),
)
STROKES = {"dash": "6 4", "dot": "2 2.5", "dashdot": "6 3 2 3"}
PLACES = (
    ("embedding", 0.0, "embed"), ("first quarter", 0.25, "resid"), ("middle", 0.5, "resid"),
    ("third quarter", 0.75, "resid"), ("last block", 1.0, "resid"), ("final norm", 1.0, "final"),
)  # fmt: skip
_TOKENS = Tokens()
COLOUR_WORDS = {"frequency": "token frequency", "position": "position", "group": "group"}


def shape_section(board: Board, runs: Sequence[RunView]) -> dict[str, Any]:
    """Everything about the course of geometry; empty where nothing was measured at two steps."""
    cube = make_cube(board.history, board.catalogue)
    if cube is None:
        return {}
    board.left_out |= cube.left_out
    drawn = {**cube.data, "rows": rows_data(runs, cube.arms, cube.steps), "dimension": _dimension_data(cube)}
    verdicts = [verdict for run in runs for verdict in run.verdicts]
    ablation = _ablation(board, cube, verdicts)
    drawn["ablation"] = ablation.pop("measures", [])
    switch = Switch("shape", (Choice("Measure", tuple(Option(m.label, m.says) for m in cube.measures), cube.default),))
    rows = max(len(m["sites"]) for m in cube.data["measures"])
    return {
        "data": drawn,
        "switch": switch,
        "steps": [f"{step:,}" for step in cube.steps],
        "seeds": max(len(arm.learners) for arm in cube.arms),
        "loop": any(cube.data["loop"]),
        "course": [_made(board, arm, "course", reads=["shape0"], height=430, alt=_course_alt(board, cube, arm))
                   for arm in cube.arms],
        "grid": [_made(board, arm, "grid", reads=["shape0"], height=max(220, min(420, 90 + 19 * rows)),
                       alt=f"Map of steps by layers of {arm.label}; the table below holds its numbers.")
                 for arm in cube.arms],
        "profile": board.keep(_spec("profile", ["shape"]), "", height=340,
                              alt="Profiles over depth at the chosen step, all models together."),
        "rows": _rows(board, cube, drawn["rows"], nouns=row_nouns([run.about for run in runs])),
        "dimension": _dimension(board, cube, drawn["dimension"]),
        "ablation": ablation,
    }  # fmt: skip


def _spec(maker: str, reads: list[str], **more: Any) -> Spec:
    return {"make": maker, "reads": reads, "data": [], "layout": base_layout(_TOKENS), **more}


def _made(board: Board, arm: Arm, maker: str, *, reads: list[str], height: int, alt: str) -> LearnerChart:
    """A figure of one arm that the script makes; its name is the title where there are several."""
    spec = _spec(maker, reads, arm=arm.index)
    if maker == "course":
        spec["layout"] |= {"margin": {"l": 46, "r": 44, "t": 10, "b": 40}}
    several = len({one.model for one in board.history.learners}) > 1
    role = arm.role if several and arm.role not in arm.label else ""
    seeds = plural(len(arm.learners), "seed") if len(arm.learners) > 1 and maker != "rows" else ""
    owner = ", ".join(part for part in (role, seeds) if part)
    chart = board.keep(spec, "", alt=alt, height=height)
    title = arm.label if several or seeds else ""
    return LearnerChart(chart.id, title, alt, height, owner=owner, line=arm.line)


def _course_alt(board: Board, cube: Cube, arm: Arm) -> str:
    """The first view in words, in the middle of the model."""
    measure = cube.measures[cube.default]
    sites = board.history.sites([measure.metric], measure.kinds)
    if not sites:
        return f"{measure.label} of {arm.label} over steps."
    site = sites[board.history.middle(sites)]
    line = known(arm_line(board.history, arm, measure, site))
    words = f" {site.name}: {course_words(line)}." if line else ""
    return f"{measure.label} of {arm.label} over steps, a line per layer.{words}"


# rows


def _rows(board: Board, cube: Cube, data: Mapping[str, Any], *, nouns: Sequence[str]) -> dict[str, Any]:
    if not data:
        return {}
    places = Choice("Layer", tuple(Option(name) for name in data["places"]), _middle(data["places"]))
    colours = Choice("Colour", tuple(Option(COLOUR_WORDS[name]) for name in data["colours"]) or (Option("one"),))
    charts = [
        _made(board, arm, "rows", reads=["shape1", "rows"], height=380, alt=f"Map of rows of {arm.label} on two axes.")
        for arm in cube.arms
        if str(arm.index) in data["arms"]
    ]
    counts = {len(entry["token"]) for entries in data["arms"].values() for entry in entries.values()}
    few, most = min(counts), max(counts)
    size = f"{most:,}" if few == most else f"{few:,} to {most:,}"
    seeds = any(len(arm.learners) > 1 for arm in cube.arms)
    rows = {
        "size": f"{size} {nouns[0] if len(nouns) == 1 else 'rows'}",
        "nouns": listed(nouns) if len(nouns) > 1 else "",
    }
    return {"switch": Switch("rows", (places, colours)), "charts": charts, "seeds": seeds, **rows,
            "frequency": "frequency" in data["colours"], "position": "position" in data["colours"]}  # fmt: skip


def _middle(places: Sequence[str]) -> int:
    return list(places).index("middle block") if "middle block" in places else len(places) // 2


# dimension


def _dimension_data(cube: Cube) -> dict[str, Any]:
    """The estimators that were measured, and the places to choose from."""
    index = {(m.metric, m.variant): i for i, m in enumerate(cube.measures) if m.family == "stream"}
    lines = [
        {"measure": index[metric, variant], "name": name, "colour": f"@s{hue}", "dash": dash, "width": width}
        for metric, variant, name, hue, dash, width in ESTIMATORS
        if (metric, variant) in index
    ]
    kinds = {site[1] for line in lines for site in cube.data["measures"][line["measure"]]["sites"]}
    return {"lines": lines, "places": [[at, kind, name] for name, at, kind in PLACES if kind in kinds]}


def _dimension(board: Board, cube: Cube, data: Mapping[str, Any]) -> dict[str, Any]:
    lines = data["lines"]
    if not lines:
        return {}
    places = Choice("Layer", tuple(Option(name) for _, _, name in data["places"]), min(2, len(data["places"]) - 1))
    charts = [
        _made(board, arm, "dimension", reads=["shape1", "dimension"], height=300,
              alt=f"Intrinsic dimension of {arm.label} by estimator, over steps and over layers.")
        for arm in cube.arms
        if any(cube.data["numbers"][line["measure"]][arm.index] for line in lines)
    ]  # fmt: skip
    looks = [_swatch(line["name"], f"var(--{line['colour'][1:]})", STROKES.get(line["dash"], "")) for line in lines]
    switch = Switch("dimension", (places,))
    several = len({cube.measures[line["measure"]].metric for line in lines}) > 1
    return {"switch": switch, "charts": charts, "looks": looks, "bias": _bias(board.history), "several": several}


def _swatch(name: str, colour: str, stroke: str = "") -> dict[str, str]:
    return {"name": name, "colour": colour, "stroke": stroke, "band": ""}


def _bias(history: History) -> str:
    """What the table itself says about TwoNN's bias: from the smallest to the largest."""
    notes = [
        part.strip().removeprefix("bias about").split("%")[0].strip()
        for key in history.keys(["two_nn"])
        for mark in history.line_at(key)
        for part in mark.note.split(";")
        if part.strip().startswith("bias about")
    ]
    found = sorted({int(float(text.replace("−", "-"))) for text in notes if text}, reverse=True)
    if not found:
        return ""
    ends = [f"{value:+d} %".replace("-", "−") for value in (found[0], found[-1])]
    return f"here about {ends[0]}" if ends[0] == ends[1] else f"here between about {ends[0]} and {ends[1]}"


# ablation


def _ablation(board: Board, cube: Cube, verdicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The three arms at the last step, and what mask and objective do; empty where there are no such arms."""
    sizes = designs(cube.arms)
    if not sizes:
        return {}
    index = {(m.metric, m.variant, m.family): i for i, m in enumerate(cube.measures)}
    shown = [m for m in ablation_measures(board.history, board.catalogue) if (m.metric, "", m.family) in index]
    effects = effects_of(board.history, cube.arms, board.catalogue, verdicts)
    if not shown:
        return {}
    everyone = [arm.index for three in sizes.values() for arm in three if arm is not None]
    charts = []
    for size, three in sizes.items():
        arms = [arm.index for arm in three if arm is not None]
        spec = _spec("ablation", ["ablation"], arms=arms, all=everyone)
        alt = f"Profiles over depth of the arms of size {size} at the last step."
        charts.append(board.keep(spec, size.replace("x", " × "), alt=alt, height=290))
    named = [arm.design[0] for three in sizes.values() for arm in three if arm is not None]
    return {
        "measures": [index[m.metric, "", m.family] for m in shown],
        "switch": Switch("ablation", (Choice("Measure", tuple(Option(m.label, m.says) for m in shown)),)),
        "charts": charts,
        "key": [_swatch(ARM_WORDS[a], f"var(--s{i + 1})")
                for i, a in enumerate(ARM_WORDS) if a in named],
        "effects": [board.keep(effect_chart(effects, m, board.palette), board.entry(m).title, height=150,
                               alt=effect_words(effects, m)) for m in dict.fromkeys(e.metric for e in effects)],
        "sizes": [_swatch(size.replace("x", " × "), f"var(--s{i + 1})")
                  for i, size in enumerate(dict.fromkeys(e.size for e in effects))],
        "rows": effect_rows(effects, board.catalogue),
        "names": {name: words for name, (words, *_) in EFFECTS.items()},
    }  # fmt: skip


# checkpoints that are not what they should be


def checkpoint_flags(history: History, abouts: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """What is wrong with checkpoints of a series: repeated, missing, out of order, not finite; each thing once."""
    found: dict[tuple[str, str, str], None] = {}
    for key in history.keys(["checkpoint"]):
        label = history.learners[key[0]].label if len(history.learners) > 1 else ""
        for mark in history.line_at(key):
            if mark.value == 0.0 or mark.value is None:
                found[label, f"{mark.step:,}", _sentence(mark.note or "no reason was recorded")] = None
    told = {(step, note) for _, step, note in found}
    for entry in (e for about in abouts for e in about.get("checkpoints") or [] if e.get("flags")):
        step = "–" if entry.get("step") is None else f"{entry['step']:,}"
        note = _sentence("; ".join(map(str, entry["flags"])))
        if (step, note) not in told:
            found["", step, note] = None
    order = sorted(found, key=lambda f: (f[0], int(f[1].replace(",", "")) if f[1] != "–" else -1))
    return [{"model": model, "step": step, "note": note} for model, step, note in order]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
