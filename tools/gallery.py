"""Draw the gallery from the tables of docs/results, and write docs/gallery.md with captions whose numbers they hold.

python tools/gallery.py docs
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from anisoscope.claims.inherent.modalities import ANISOTROPIC
from anisoscope.results.query import Query, Table
from anisoscope.view.words import few, listed
from drawing_style import Look, draw_both, label_ends, step_axis
from result_pages.chosen_rows import Cell, cell, chosen
from result_pages.declared import AT_THE_END, ENRICHMENT
from result_pages.key_table import KeyTable, filled, in_order
from result_pages.result import Result

DOCS = Path(__file__).parents[1] / "docs"
CONVOLUTIONS = ("convolution", "convolution-resnet", "convolution-efficientnet")
MODALITIES = ("text-decoder", "text-encoder", "characters", "speech-masked", "vision", *CONVOLUTIONS)
LEAST_TOKENS = 1000  # entries of a vocabulary that is not one of characters
Steps = dict[int, float]


@cache
def results(name: str) -> Query:
    """The table of one committed result."""
    return Query(Table.read(DOCS / "results" / name / "table.parquet"))


def mean_by(rows: Query, field: str) -> dict[Any, float]:
    """The mean of the values for each value of a field, in its order."""
    found: dict[Any, list[float]] = {}
    for row in rows:
        if np.isfinite(row.value):
            found.setdefault(row[field], []).append(row.value)
    return {key: fmean(values) for key, values in sorted(found.items())}


# -- Revisiting Anisotropy: where gradients go -------------------------------------------------------------------------


def tangent(metric: str, **more: Any) -> Query:
    """Rows of the decoder's tangent proxy, refitted at every step, in plain coordinates."""
    choice = {"model": "decoder", "metric": metric, "proxy": "semi_nmf", "rank": ..., "fit": "refit", **more}
    return chosen(results("revisiting"), choice)


def decoder() -> Mapping[str, Any]:
    """What run.json says of the decoder, and the rank of its proxy."""
    about = json.loads((DOCS / "results" / "revisiting" / "run.json").read_text(encoding="utf-8"))
    entry = next(model for model in about["models"] if model["name"] == "decoder")
    seeds = len(tangent("gradient_enrichment").values("seed"))
    rank = int(tangent("gradient_enrichment").values("rank")[0])
    reads = "tokens" if (about.get("data") or {}).get("vocab_size", 0) >= LEAST_TOKENS else "characters"
    return {**entry, "rank": rank, "chance": rank / entry["width"], "seeds": seeds, "reads": reads}


def enrichment_map() -> tuple[list[int], np.ndarray]:
    """Gradient enrichment of the decoder, mean over seeds, [layers, steps]; layer 0 is the embedding."""
    rows = tangent("gradient_enrichment", kind=["embed", "resid"])
    steps, layers = sorted(set(rows.column("step"))), sorted(set(rows.column("layer")))
    grid = np.full((len(layers), len(steps)), np.nan)
    for (layer, step), group in rows.groups("layer", "step").items():
        grid[layers.index(layer), steps.index(step)] = float(group.numbers().mean())
    return steps, grid


def draw_map(figure: Figure, look: Look) -> None:
    steps, grid = enrichment_map()
    axes = figure.subplots()
    image = axes.imshow(grid, origin="lower", aspect="auto", cmap=look.heat, vmin=1)
    axes.grid(False)
    shown = [steps.index(step) for step in few(steps, 14)]
    axes.set_xticks(shown, [f"{steps[place]:,}" for place in shown])
    axes.set_yticks(range(0, len(grid), 2), ["embedding", *map(str, range(2, len(grid), 2))])
    axes.set_xlabel("training step")
    axes.set_ylabel("layer")
    axes.set_title(f"Gradient energy in {decoder()['rank']} directions fitted on activations alone")
    bar = figure.colorbar(image, ax=axes, pad=0.015)
    bar.set_label("times chance (random directions: 1)")
    bar.outline.set_visible(False)


def tell_map() -> str:
    (steps, grid), about = enrichment_map(), decoder()
    layer, step = np.unravel_index(np.nanargmax(grid), grid.shape)
    return (
        f"A decoder of {about['layers']} blocks learns to predict {about['reads']}. Colour: how much of the true "
        f"gradient lies in {about['rank']} directions fitted on the activations alone, against chance. At the start "
        f"every layer is at chance ({grid[:, 0].min():.1f} to {grid[:, 0].max():.1f}); the most is "
        f"{grid[layer, step]:.0f} times chance, {'at the embedding' if layer == 0 else f'after block {layer}'} at step "
        f"{steps[step]:,}."
    )


def energies(control: str | None) -> Steps:
    return mean_by(tangent("gradient_energy", control=control, site="middle block"), "step")


CONTROLS: Mapping[str | None, str] = {
    None: "tangent proxy",
    "next": "next components",
    "permuted": "permuted columns",
    "normal": "normal directions",
}


def draw_energy(figure: Figure, look: Look) -> None:
    axes, ends = figure.subplots(), []
    for (control, name), color in zip(CONTROLS.items(), look.lines, strict=False):
        if not (line := energies(control)):
            continue
        axes.plot(*zip(*line.items(), strict=True), color=color, marker="o", ms=3.5, lw=2.4 if control is None else 1.5)
        ends.append((max(line), line[max(line)], name, color))
    axes.axhline(decoder()["chance"], color=look.faint, ls=":", lw=1)
    step_axis(axes, energies(None))
    axes.set_ylabel("share of gradient energy")
    axes.set_title("Middle block of the decoder; dotted: chance")
    label_ends(axes, ends)


def tell_energy() -> str:
    line, normal, about = energies(None), energies("normal"), decoder()
    peak = max(line, key=line.__getitem__)
    seeds = "One seed." if about["seeds"] == 1 else f"Mean of {about['seeds']} seeds."
    most = ", early most" if 2 * peak < max(line) else ""
    return (
        f"**Once a model learns, its gradients go where activations already point{most}.** In the middle block of a "
        f"{about['layers']}-block decoder the tangent proxy holds {line[0]:.3f} of the gradient's energy at step 0 "
        f"(chance is {about['chance']:.3f}), {line[peak]:.2f} at step {peak:,} and {line[max(line)]:.2f} at step "
        f"{max(line):,}. Directions normal to it hold {min(normal.values()):.3f} to {max(normal.values()):.3f}. "
        f"{seeds}{_judged()}"
    )


def _judged() -> str:
    """The verdict on the claim, which asks for more than the picture shows."""
    verdict = Result(DOCS / "results" / "revisiting").verdict("tangent_energy", "decoder")
    if verdict is None or verdict["status"] == "holds":
        return ""
    words = {"fails": "fails", "undecided": "stays undecided"}[verdict["status"]]
    return f" The claim as declared, which also asks for the first measured steps and for frozen directions, {words}."


# -- The long training beside a finished model -------------------------------------------------------------------------

FINISHED = "SmolLM2-135M"
LONG_STEPS = (1000, 4000, 20000)
COORDINATES: Mapping[str, Mapping[str, Any]] = {
    "plain coordinates": {},
    "standardised coordinates without the first position": {"coordinates": "standardised", "first": "out"},
}


def by_depth(result: str, model: str, **reading: Any) -> dict[float, float]:
    """Enrichment of the blocks by depth, 0 to 1; where the first position is no outlier it is not apart."""
    choice = {"model": model, "metric": "gradient_enrichment", "proxy": "semi_nmf", "rank": ..., "fit": "refit"}
    rows = chosen(results(result), {**choice, "site": "blocks", **reading})
    return (
        mean_by(rows, "depth")
        if len(rows) or "first" not in reading
        else by_depth(result, model, **{key: value for key, value in reading.items() if key != "first"})
    )


def draw_long(figure: Figure, look: Look) -> None:
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (title, reading) in zip(panels, COORDINATES.items(), strict=True):
        ends = []
        for step, color in zip(LONG_STEPS, look.lines, strict=False):
            line = by_depth("long", "decoder", step=step, **reading)
            axes.plot(list(line), list(line.values()), color=color, marker="o", ms=3.5)
            ends.append((max(line), line[max(line)], f"step {step:,}", color))
        line, color = by_depth("real", FINISHED, **reading), look.lines[len(LONG_STEPS)]
        axes.plot(list(line), list(line.values()), color=color, marker="o", ms=2.5, ls="--")
        ends.append((max(line), line[max(line)], "SmolLM2", color))
        axes.axhline(1, color=look.faint, ls=":", lw=1)
        axes.set_yscale("log")
        axes.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
        axes.set_xlabel("depth (1: last block)")
        axes.set_title(title.partition(" ")[0].capitalize() + (", first position out" if reading else ""))
        label_ends(axes, ends)
    panels[0].set_ylabel("enrichment, times chance")


def tell_long() -> str:
    means = {
        label: (
            fmean(by_depth("long", "decoder", step=LONG_STEPS[0], **reading).values()),
            fmean(by_depth("long", "decoder", step=LONG_STEPS[-1], **reading).values()),
            fmean(by_depth("real", FINISHED, **reading).values()),
        )
        for label, reading in COORDINATES.items()
    }
    told = "; ".join(
        f"in {label} {first:.1f} times chance at step {LONG_STEPS[0]:,}, {last:.1f} at step {LONG_STEPS[-1]:,} and "
        f"{finished:.1f} in SmolLM2"
        for label, (first, last, finished) in means.items()
    )
    end = [value for _, value in sorted(by_depth("long", "decoder", step=LONG_STEPS[-1]).items())]
    return (
        f"**Enrichment decays, least after the middle blocks, and stays above chance.** Mean over blocks: {told}. The "
        f"long training ends at {end[0]:.1f} after its first block, {end[(len(end) - 1) // 2]:.1f} after its middle "
        f"one and {end[-1]:.1f} after its last."
    )


# -- Inherent to attention? --------------------------------------------------------------------------------------------


def cosines(model: str) -> Steps:
    kind = "stage" if model in CONVOLUTIONS else "resid"
    return mean_by(results("inherent").where(model=model, metric="average_cosine", variant="", group="", head=None,
                                             kind=kind), "step")  # fmt: skip


DASHES = dict(zip(CONVOLUTIONS, ("--", ":", "-."), strict=True))  # of models without attention


def _styled(look: Look) -> dict[str, dict[str, Any]]:
    """How the line of each model is drawn: convolutions have one colour."""
    colors = dict(zip((m for m in MODALITIES if m not in DASHES), look.lines, strict=False))
    return {model: {"color": colors.get(model, look.lines[-1]), "ls": DASHES.get(model, "-")} for model in MODALITIES}


def draw_lines(axes: Axes, look: Look, lines: Mapping[str, Steps]) -> list[tuple[float, float, str, str]]:
    """A line over steps for each model; what their names need to be written at the ends."""
    styles, ends = _styled(look), []
    for model, line in lines.items():
        axes.plot(*zip(*line.items(), strict=True), **styles[model])
        ends.append((max(line), line[max(line)], model, styles[model]["color"]))
    step_axis(axes, next(iter(lines.values())))
    return ends


def draw_cosine(figure: Figure, look: Look) -> None:
    axes = figure.subplots()
    ends = draw_lines(axes, look, {model: cosines(model) for model in MODALITIES})
    axes.set_ylim(-0.04, 1)
    axes.set_ylabel("average cosine of two rows")
    axes.set_title("Mean over blocks and three seeds; broken lines: no attention")
    label_ends(axes, ends)


def tell_cosine() -> str:
    words = []
    for model in ("text-decoder", "characters", "speech-masked", "vision", "convolution"):
        line = cosines(model)
        peak, last = max(line, key=line.__getitem__), max(line)
        between = "" if peak in (0, last) else f", {line[peak]:.2f} at step {peak:,}"
        words.append(f"{model} {line[0]:.2f}{between}, {line[last]:.2f}")
    still = [cosines(model) for model in CONVOLUTIONS[1:]]
    return (
        "**Text passes through a narrow cone within the first updates, speech begins and ends in one, pictures come to "
        "none.** Average cosine of small models, mean over blocks and three seeds, at step 0, at the highest of the "
        f"measured steps where that lies between, and at the end: {'; '.join(words)}. ConvNeXt (convolution), "
        "which has no attention, ends higher than it began, as the vision transformer does, and loses part of its "
        "peak; two other convolutional networks keep what they have "
        f"({' and '.join(f'{line[max(line)]:.2f}' for line in still)})."
    )


SEEN = {"speech-masked": "masked speech", "vision": "the vision transformer", "convolution": "ConvNeXt",
        "convolution-resnet": "ResNet", "convolution-efficientnet": "EfficientNet"}  # fmt: skip


def media_enrichment(fit: str = "refit") -> dict[str, Steps]:
    """Enrichment of gradients over steps, of the arms that hear and see."""
    rows = chosen(results("inherent"), {**ENRICHMENT, "fit": fit, "site": "blocks"})
    return {model: mean_by(rows.where(model=model), "step") for model in MODALITIES if len(rows.where(model=model))}


def draw_media(figure: Figure, look: Look) -> None:
    axes = figure.subplots()
    ends = draw_lines(axes, look, media_enrichment())
    axes.axhline(1, color=look.faint, lw=1)
    axes.set_ylim(0, None)
    axes.set_ylabel("energy of tangent directions, times chance")
    axes.set_title("Refitted at every step; mean over blocks and three seeds; broken lines: no attention; grey: chance")
    label_ends(axes, ends)


def tell_media() -> str:
    lines, frozen = media_enrichment(), media_enrichment("frozen")
    begun = " to ".join(dict.fromkeys(f"{act(line[0] for line in lines.values()):.1f}" for act in (min, max)))
    told = [f"{model} {line[max(line)]:.1f} ({frozen[model][max(line)]:.1f})" for model, line in lines.items()]
    verdicts = [v for v in Result(DOCS / "results" / "inherent").told if v["claim"] == "tangent_energy"]
    found = {status: [SEEN[v["subject"]] for v in verdicts if v["subject"] in SEEN and v["status"] == status]
             for status in ("holds", "undecided", "fails")}  # fmt: skip
    clauses = [f"Gradients come to go where activations point in {listed(found['holds'])}"] if found["holds"] else []
    clauses += [f"in {listed(found['undecided'])} it is open"] if found["undecided"] else []
    clauses += [f"in {listed(found['fails'])} only with directions refitted at every step"] if found["fails"] else []
    return (
        f"**{'; '.join(clauses)}.** Energy in directions fitted on the rows (16, EfficientNet 12), mean over blocks "
        f"and three seeds: {begun} times chance at step 0, and at the last step "
        f"{'; '.join(told)}, in brackets in the directions of the first measured steps. Where 16 of 256 directions are "
        "held, 16 times chance is all there is."
    )


WEIGHTS = {"trained here": "o", "pretrained": "D", "random": "|"}


def by_modality() -> list[tuple[str, str, str, Cell]]:
    """(modality, weights, model, average cosine at the last step) of every stack; random ones have no name."""
    declared = KeyTable("", {"step": "last"}, {"": AT_THE_END["average cosine"]}, by=("model", "stack"))
    lines = in_order(filled(declared, results("inherent"))[1], Result(DOCS / "results" / "inherent").about["models"])
    stacks = Counter(words[2] for words, _ in lines)
    return [(modality, weights, f"{model}, {stack}" if stacks[model] > 1 else model, cells[0])
            for (modality, weights, model, stack), cells in lines if cells[0] is not None]  # fmt: skip


def draw_modalities(figure: Figure, look: Look) -> None:
    axes, places, bounds = figure.subplots(), [], []
    for modality in dict.fromkeys(modality for modality, *_ in by_modality()):
        found = [rest for one, *rest in by_modality() if one == modality]
        bounds.append(len(places) - 0.5)
        for weights, model, one in (each for each in found if each[0] != "random"):
            color = look.lines[list(WEIGHTS).index(weights)]
            axes.errorbar(one.value, len(places), xerr=_ends(one), color=color, marker=WEIGHTS[weights], ms=5.5, lw=1.4)
            places.append((modality, model))
        if random := [one.value for weights, _, one in found if weights == "random"]:
            axes.plot(random, [len(places)] * len(random), look.faint, marker=WEIGHTS["random"], ls="", ms=9)
            places.append((modality, "random weights"))
    axes.axvline(ANISOTROPIC, color=look.faint, ls=":", lw=1)
    for bound in bounds[1:]:
        axes.axhline(bound, color=look.grid, lw=0.8)
    for at, modality in zip([*bounds], dict.fromkeys(modality for modality, _ in places), strict=True):
        axes.text(1.0, at + 0.6, modality, ha="right", va="center", fontweight="bold", color=look.ink)
    axes.set_yticks(range(len(places)), [model for _, model in places])
    axes.grid(False, axis="y")
    axes.set_ylim(len(places) - 0.5, -0.5)
    axes.set_xlim(-0.05, 1.02)
    axes.set_xlabel("average cosine, mean over blocks at the last step; dotted: from here on a model is anisotropic")
    axes.set_title("Circles: trained here, three seeds. Diamonds: pretrained, one set of weights")


def _ends(one: Cell) -> list[list[float]] | None:
    return [[one.value - one.low], [one.high - one.value]] if np.isfinite(one.low) else None


def tell_modalities() -> str:
    found = [(modality, weights, model, one.value) for modality, weights, model, one in by_modality()]
    spans, widths = [], []
    for weights in ("trained here", "pretrained"):
        values = {model: value for _, which, model, value in found if which == weights}
        (low, least), (high, most) = (pick((v, m) for m, v in values.items()) for pick in (min, max))
        spans.append(f"from {low:.2f} ({least}) to {high:.2f} ({most})")
        widths.append(high - low)
    missing = sorted({m for m, *_ in found} - {m for m, which, *_ in found if which == "pretrained"})
    lacking = f" Of {listed(missing)} (transformers that see) none could be had." if missing else ""
    without = [value for modality, which, _, value in found if (modality, which) == ("convolution", "pretrained")]
    beside = f" Pretrained convolutions have {min(without):.2f} to {max(without):.2f}." if without else ""
    seen = "more" if widths[1] > widths[0] else "less"
    return (
        f"**Pretrained models differ {seen} among each other than the small ones do.** Average cosine, mean over "
        f"blocks: the small models end {spans[0]}, the pretrained ones lie {spans[1]}.{beside}{lacking} Of a "
        "pretrained model there is one set of weights, and its interval is over contexts."
    )


def random_families() -> dict[str, float]:
    rows = results("inherent").where(metric="average_cosine", variant="", group="", head=None, kind=["resid", "stage"])
    means = {
        model: mean_by(group, "stack") for model, group in rows.groups("model").items() if model.endswith("-random")
    }
    named = {f"{model[:-7]}{f', {stack}' if len(stacks) > 1 else ''}": value
             for model, stacks in means.items() for stack, value in stacks.items()}  # fmt: skip
    return dict(sorted(named.items(), key=lambda item: item[1]))


def draw_families(figure: Figure, look: Look) -> None:
    axes = figure.subplots()
    values = random_families()
    axes.barh(list(values), list(values.values()), color=look.lines[0], height=0.65)
    axes.grid(False, axis="y")
    axes.set_xlim(0, 1)
    axes.set_xlabel("average cosine, mean over blocks and three initialisations")
    axes.set_title("Architectures with random weights")


def tell_families() -> str:
    values = random_families()
    values.pop("whisper, decoder", None)  # it reads what the random model itself says
    least, most = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    low, high = values[least], values[most]
    return (
        f"Before any training the architecture already decides much: from {low:.2f} ({least}) to {high:.2f} ({most})."
    )


# -- The shape of learning ---------------------------------------------------------------------------------------------

ARMS = {"causal-next": "causal, next token", "causal-masked": "causal, masked",
        "bidirectional-masked": "bidirectional, masked"}  # fmt: skip


def dimensions(arm: str) -> dict[int, Steps]:
    """TwoNN after the middle block, by seed and step."""
    rows = results("shape").where(model=f"{arm}-12x512", metric="two_nn", variant="", group="", kind="resid", layer=6)
    return {seed: mean_by(group, "step") for seed, group in rows.groups("seed").items()}


def mean_dimension(arm: str) -> Steps:
    seeds = dimensions(arm).values()
    shared = sorted(set.intersection(*(set(line) for line in seeds)))
    return {step: fmean(line[step] for line in seeds) for step in shared}


def draw_dimension(figure: Figure, look: Look) -> None:
    axes, ends = figure.subplots(), []
    for (arm, name), color in zip(ARMS.items(), look.lines, strict=False):
        for line in dimensions(arm).values():
            axes.plot(*zip(*line.items(), strict=True), color=color, lw=0.8, alpha=0.45)
        mean = mean_dimension(arm)
        axes.plot(*zip(*mean.items(), strict=True), color=color)
        ends.append((max(mean), mean[max(mean)], name, color))
    step_axis(axes, mean_dimension("causal-next"))
    axes.set_ylim(0, None)
    axes.set_ylabel("intrinsic dimension (TwoNN)")
    axes.set_title("After the middle block; thin: three seeds")
    label_ends(axes, ends)


def tell_dimension() -> str:
    mean = mean_dimension("causal-next")
    peak = max(mean, key=mean.__getitem__)
    masked = {name: mean_dimension(arm) for arm, name in ARMS.items() if arm != "causal-next"}
    others = " and ".join(f"{line[max(line)]:.1f} ({name})" for name, line in masked.items())
    return (
        f"TwoNN after the middle block of a 12-block model, mean of three seeds. Next-token prediction: {mean[0]:.1f} "
        f"at step 0, {mean[peak]:.1f} at most (step {peak:,}), {mean[max(mean)]:.1f} at step {max(mean):,}; models "
        f"that predict masked tokens end at {others}."
    )


def depth_profile(arm: str) -> dict[float, float]:
    rows = results("shape").where(
        model=f"{arm}-12x512", metric="svd_ratio", variant="", group="", kind=["embed", "resid"]
    )
    return mean_by(rows.at_last_step("model"), "layer")


def draw_depth(figure: Figure, look: Look) -> None:
    axes, ends = figure.subplots(), []
    for (arm, name), color in zip(ARMS.items(), look.lines, strict=False):
        line = depth_profile(arm)
        axes.plot(*zip(*line.items(), strict=True), color=color, marker="o", ms=3.5)
        ends.append((max(line), line[max(line)], name, color))
    axes.set_ylim(0, None)
    axes.set_xlabel("layer (0: embedding)")
    axes.set_ylabel("σ₁ / Σσ")
    axes.set_title("Anisotropy over depth at the last step, 12 blocks")
    label_ends(axes, ends)


def tell_depth() -> str:
    ends = {name: depth_profile(arm) for arm, name in ARMS.items()}
    last = ", ".join(f"{line[max(line)]:.3f} ({name})" for name, line in ends.items())
    return (
        f"The share of the largest singular value, layer by layer. After the last block: {last}. No profile is a bell."
    )


# -- Sharpness and drift -----------------------------------------------------------------------------------------------

KINDS = {"softmax": "softmax", "qk-norm": "normed queries, keys", "mean-removed": "means removed",
         "fixed-sharp": "fixed sharp", "uniform": "no scores"}  # fmt: skip


def arm_cosines(kind: str) -> Steps:
    rows = results("sharpness").where(
        model=f"{kind}-12x512", metric="average_cosine", variant="", group="", kind="resid"
    )
    return mean_by(rows, "step")


def draw_sharpness(figure: Figure, look: Look) -> None:
    axes, ends = figure.subplots(), []
    for (kind, name), color in zip(KINDS.items(), look.lines, strict=False):
        line = arm_cosines(kind)
        axes.plot(*zip(*line.items(), strict=True), color=color)
        ends.append((max(line), line[max(line)], name, color))
    step_axis(axes, arm_cosines("softmax"))
    axes.set_ylim(0, 1)
    axes.set_ylabel("average cosine of two rows")
    axes.set_title("Five kinds of attention, mean over blocks and seeds")
    label_ends(axes, ends)


def tell_sharpness() -> str:
    soft, none = arm_cosines("softmax"), arm_cosines("uniform")
    return (
        f"Attention that may not drift, or has no scores at all, becomes as anisotropic: in 16 updates from "
        f"{soft[0]:.2f} to {soft[16]:.2f} with softmax and from {none[0]:.2f} to {none[16]:.2f} without scores. It "
        f"does not last: {soft[max(soft)]:.2f} and {none[max(none)]:.2f} at step {max(soft):,}."
    )


# -- Blocks before any training ----------------------------------------------------------------------------------------


def entropies(model: str) -> dict[float, float]:
    rows = results("untrained").where(
        model=model, metric="attention_entropy", width="768", init="normal", input_norm="1"
    )
    return {float(bias): mean_by(group, "metric")["attention_entropy"] for bias, group in rows.groups("bias").items()}


def draw_untrained(figure: Figure, look: Look) -> None:
    axes, ends = figure.subplots(), []
    for model, name, color in zip(("bert", "prenorm"), ("post-norm block", "pre-norm block"), look.lines, strict=False):
        line = dict(sorted(entropies(model).items()))
        axes.plot(list(line), list(line.values()), color=color, marker="o", ms=3.5)
        ends.append((max(line), line[max(line)], name, color))
    axes.set_xlabel("bias shared by all inputs, N")
    axes.set_ylabel("entropy of attention / log length")
    axes.set_ylim(0, 1.03)
    axes.set_title("A block that never learned, width 768, five seeds")
    label_ends(axes, ends)


def tell_untrained() -> str:
    post, pre = entropies("bert"), entropies("prenorm")
    top = max(post)
    return (
        f"A bias in the inputs makes attention sharp only where nothing normalises what attention reads: at N = "
        f"{top:g} the entropy is {post[top]:.2f} in a post-norm block and {pre[top]:.2f} in a pre-norm one (1 is "
        f"uniform)."
    )


# -- Theory on known manifolds -----------------------------------------------------------------------------------------


def variances(part: str) -> dict[float, float]:
    rows = results("curvature").where(model="sphere", metric="curvature_variance", of=part, sampling="gaussian")
    return {
        float(scale): mean_by(group, "metric")["curvature_variance"] for scale, group in rows.groups("scale").items()
    }


def draw_curvature(figure: Figure, look: Look) -> None:
    axes, ends = figure.subplots(), []
    for part, name, color in zip(("tangent", "normal"), ("tangent: t²", "normal: t⁴"), look.lines, strict=False):
        line = dict(sorted(variances(part).items()))
        axes.loglog(list(line), list(line.values()), color=color, marker="o", ms=3.5)
        ends.append((max(line), line[max(line)], name, color))
    axes.set_xlabel("size t of the neighbourhood")
    axes.set_ylabel("variance")
    axes.set_title("A sphere, seen from one of its points")
    label_ends(axes, ends)


def slopes(part: str) -> float:
    return mean_by(
        results("curvature").where(model="sphere", metric="curvature_slope", of=part, sampling="gaussian"), "of"
    )[part]


def tell_curvature() -> str:
    return (
        f"Why tangent directions carry most: near a point, variance along the surface falls with t² (slope "
        f"{slopes('tangent'):.3f}), variance across it with t⁴ (slope {slopes('normal'):.3f}, above the floor of "
        f"rounding at the left end)."
    )


# -- Performance: what a repair of the geometry changes ----------------------------------------------------------------

MENDED = {"mean": "mean removed", "all_but_top": "all but the top", "whitened": "whitened"}
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "own loss, rows repaired inside (nats)": {"metric": "lm_loss", "reading": "patched"},
    "loss of a fresh readout (nats)": {"metric": "lm_loss", "reading": "readout"},
    "accuracy of linear probes": {"metric": "probe_accuracy", "task": ...},
}


def changes(what: str, repair: str) -> dict[str, Cell]:
    """What a repair changes against raw rows in each model, mean over sites and tasks, at the last checkpoint."""
    rows, choice = results("performance"), {**CHANGES[what], "repair": repair, "against": "raw", "step": "last"}
    found = {str(model): cell(chosen(rows.where(model=model), choice)) for model in rows.values("model")}
    return {model: one for model, one in found.items() if one is not None}


def draw_repairs(figure: Figure, look: Look) -> None:
    panels = figure.subplots(1, len(CHANGES), sharey=True)
    models = list(changes(next(iter(CHANGES)), "mean"))
    for axes, what in zip(panels, CHANGES, strict=True):
        axes.axvline(0, color=look.faint, lw=1)
        for i, ((repair, name), color) in enumerate(zip(MENDED.items(), look.lines, strict=False)):
            found = changes(what, repair)
            heights = [models.index(model) + 0.22 * (i - 1) for model in found]
            middle = [one.value for one in found.values()]
            ends = [[abs(end - one.value) for one in found.values() for end in [getattr(one, side)]]
                    for side in ("low", "high")]  # fmt: skip
            axes.errorbar(middle, heights, xerr=ends, fmt="o", ms=4.5, lw=1.4, color=color, label=name)
        axes.set_title(what, fontsize=9.5)
    panels[0].set_yticks(range(len(models)), models)
    panels[0].invert_yaxis()
    panels[0].set_xlabel("change against raw rows; to the right is worse", fontsize=8.5)
    panels[1].set_xlabel("to the right is worse", fontsize=8.5)
    panels[2].set_xlabel("to the right is better", fontsize=8.5)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


def tell_repairs() -> str:
    own, fresh, probes = ([one.value for one in changes(what, "whitened").values()] for what in CHANGES)
    raised = sum(value > 0 for value in own)
    return (
        f"Rows that are whitened inside a network raise its own loss in {raised} of {len(own)} models, by "
        f"{min(own):+.2f} to {max(own):+.2f} nats; a fresh linear readout of the same rows changes by "
        f"{min(fresh):+.2f} to {max(fresh):+.2f} nats and linear probes by {min(probes):+.3f} to {max(probes):+.3f} of "
        f"accuracy. Means over sites and tasks at the last checkpoint; whiskers: 95 % over contexts."
    ).replace("-", "−")


# -- the page ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Picture:
    """One figure of the gallery: its file, what it is drawn from, how, and what there is to see."""

    name: str
    title: str
    result: str
    draw: Callable[[Figure, Look], None]
    tell: Callable[[], str]
    alt: str
    size: tuple[float, float] = (8.2, 3.6)


PICTURES = (
    Picture("gradient-map", "Where gradients go, layer by layer", "revisiting", draw_map, tell_map,
            "Map of layers by training steps: enrichment is 1 at step 0 and highest early in training",
            (9.2, 4.0)),
    Picture("gradient-energy", "The tangent proxy beside its controls", "revisiting", draw_energy, tell_energy,
            "Energy of the tangent proxy over training rises above all controls and falls again"),
    Picture("long-depth", "A long training beside a finished model", "long", draw_long, tell_long,
            "Enrichment over depth at three steps of a long training and in SmolLM2, in two coordinates"),
    Picture("average-cosine", "Anisotropy over training, by modality", "inherent", draw_cosine, tell_cosine,
            "Average cosine over training in eight small models: text peaks early and falls, speech rises again",
            (8.2, 4.6)),
    Picture("media-gradients", "Gradients of sounds and pictures", "inherent", draw_media, tell_media,
            "Enrichment of gradients over training in five small models that hear or see: from chance up", (8.2, 4.2)),
    Picture("modalities", "Trained here, pretrained, and random, by modality", "inherent", draw_modalities,
            tell_modalities, "Dots: average cosine of small, pretrained and random models of five modalities",
            (8.2, 6.4)),
    Picture("random-families", "Architectures before training", "inherent", draw_families, tell_families,
            "Bars: average cosine of architectures with random weights", (8.2, 5.0)),
    Picture("dimension", "Intrinsic dimension over training", "shape", draw_dimension, tell_dimension,
            "TwoNN over training for three arms and three seeds"),
    Picture("depth-profile", "Anisotropy over depth", "shape", draw_depth, tell_depth,
            "Singular value share over layers for three arms"),
    Picture("attention-kinds", "Anisotropy without drift", "sharpness", draw_sharpness, tell_sharpness,
            "Average cosine over training for five kinds of attention: the same early rise"),
    Picture("untrained-entropy", "Attention before training", "untrained", draw_untrained, tell_untrained,
            "Entropy of attention against a bias of the inputs: falls in a post-norm block only"),
    Picture("sphere", "Tangent and normal variance", "curvature", draw_curvature, tell_curvature,
            "Variance against scale on a sphere: slopes 2 and 4"),
    Picture("repairs", "What a repair of the geometry changes", "performance", draw_repairs, tell_repairs,
            "Change of loss, of a readout and of probes by three repairs, model by model", (10.2, 4.2)),
)  # fmt: skip


def page() -> str:
    """docs/gallery.md: every picture with the sentence that its table gives."""
    lines = ["# Gallery", "", "Written by `make results` from the tables in `docs/results`, figures and numbers. Each",
             "result page says how the run was made and what to hold against it.", ""]  # fmt: skip
    for picture in PICTURES:
        lines += [f"## {picture.title}", "", f"![{picture.alt}](figures/gallery/{picture.name}.svg)", ""]
        lines += [picture.tell(), "", f"From [results/{picture.result}](results/{picture.result}/README.md).", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    for picture in PICTURES:
        draw_both(picture.draw, target / "figures" / "gallery" / picture.name, picture.size)
    (target / "gallery.md").write_text(page(), encoding="utf-8")
