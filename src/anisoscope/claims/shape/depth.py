"""Claims about anisotropy over depth: bell-shaped in decoders, more uniform in encoders.

Notation
    y      a profile: one number for each block 1 … L, measured on all contexts: anisotropy (svd_ratio) at the last step
    d      relative depth of a block, l/L; d* that of the block where y is largest
    bell   min(d*, 1 − d*) ≥ .2, y[d*] − y[1] and y[d*] − y[L] ≥ .05, and the largest distance of y from the best
           up–down curve ≤ 10 % of max y − min y
    spread (max y − min y) / mean y; *uniform* compares that of an encoder with that of a decoder of the same size, as
           the paper does, since no bound on a single profile says what is uniform; below .2 is told as a description
    y₍ⱼ₎   the same without context fold j, for the G folds that have contexts at every block
    ȳ₍·₎   the mean of y₍ⱼ₎ over folds
    S      the jackknife covariance between blocks, (G−1)/G Σⱼ (y₍ⱼ₎ − ȳ₍·₎)(y₍ⱼ₎ − ȳ₍·₎)ᵀ: blocks share their contexts
Draws of the profile for the interval of the peak are y + multivariate t with G − 1 degrees of freedom and scale S.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from anisoscope.claims.engine import evidence
from anisoscope.claims.engine.claim import TOO_FEW, Finding, Part, Parts, Sentence, claim, judge
from anisoscope.claims.engine.evidence import BlockStack, Missing, NotHere, Readings, Run, Study, figure, stacks, whole
from anisoscope.claims.engine.walk import Walk, walk_doubt
from anisoscope.results.quantity import FEWEST_FOLDS, FEWEST_SEEDS, THIN, Quantity

SOURCE = "Razzhigaev et al. 2023, The Shape of Learning, arXiv:2311.05928"
FEWEST_BLOCKS = 6  # of five every sixteenth order of ups and downs is a bell
DRAWS = 4000
NORMAL_95 = 1.959964  # half-widths without folds are those of normal intervals
END_MARGIN = 0.05
LEAST_DISTANCE = 0.2 - 1e-9  # tolerance: a peak at exactly .2 counts
SMOOTH = 0.9
BELL_LUCK = 0.05  # of walks may be as high a bell; the place of the peak, the ends and the smoothness exclude most
ALONE = 0.2  # a peak is one block alone if the next highest has less of its height
MOST_SPREAD = 1 / 1.5  # of the decoder's spread, that an encoder may have at most to be called more uniform
REPEATED = 0.5  # part of a spread that must be found again where other contexts locate its ends
UNIFORM = 0.2  # spread below which a single profile is described as uniform
METRICS = ("svd_ratio", "svd_ratio_squared")
_WALK, _SECOND = "walks that look like it", "height of the second highest block"
_SIZE = re.compile(r"(\d+)x(\d+)")  # layers and width in the name of an arm
_FIRST, _LAST, _PEAK, _SHAPE = ("above the first block", "above the last block", "peak from the ends", "up and down")
_BELL = {  # the parts of a bell, and whether they decide
    _FIRST: "the height above the first block",
    _LAST: "the height above the last block",
    _PEAK: "the distance of the peak from the nearer end",
    _SHAPE: "one minus the largest distance from an up–down curve",
}
_FORMULAS: dict[str, tuple[str, dict[str, str], str]] = {  # the first measured one decides, the others are described
    "svd_ratio": ("svd_ratio", {}, "σ₁/Σσ"),
    "squared": ("svd_ratio_squared", {}, "σ₁²/Σσ²"),
    "without the first position": ("svd_ratio", {"first": "out"}, "σ₁/Σσ without the first position"),
}


@dataclass(frozen=True)
class Curve:
    """A profile over blocks with its leave-one-fold-out profiles; without folds, with half-widths at each block."""

    layers: tuple[int, ...]
    depths: np.ndarray  # [L], layer / number of blocks
    values: np.ndarray  # [L]
    folds: np.ndarray  # [G, L]; G = 0 without folds that have contexts at every block
    halves: np.ndarray  # [L]
    thin: bool = False  # there are folds, but too few of them have contexts

    @classmethod
    def of(cls, layers: Sequence[int], depths: Sequence[float], numbers: Sequence[Quantity]) -> Curve:
        """A curve from the values of its blocks; only folds that have contexts at every block are used."""
        counts = {len(number.folds) for number in numbers}
        folds = np.array([number.folds for number in numbers]).T if len(counts) == 1 else np.empty((0, len(numbers)))
        folds = folds.reshape(-1, len(numbers))
        live = folds[np.isfinite(folds).all(1)]
        halves = np.array([(high - low) / 2 for low, high in (number.interval() for number in numbers)])
        thin = bool(len(folds)) and len(live) < FEWEST_FOLDS
        values = np.array([number.value for number in numbers])
        return cls(tuple(layers), np.array(depths), values, live, halves, thin or any(n.thin for n in numbers))

    def __len__(self) -> int:
        return len(self.values)

    @property
    def peak(self) -> int:
        return int(self.values.argmax())

    def draws(self, count: int = DRAWS) -> np.ndarray:
        """Random profiles as expected for other contexts, [count, L]; empty without intervals."""
        random = np.random.default_rng(0)
        if self.thin or not (len(self.folds) or np.isfinite(self.halves).all()):
            return np.empty((0, len(self)))
        if not len(self.folds):
            return self.values + random.normal(size=(count, len(self))) * self.halves / NORMAL_95
        g = len(self.folds)
        steps = math.sqrt((g - 1) / g) * (self.folds - self.folds.mean(0))
        scale = np.sqrt(random.chisquare(g - 1, size=(count, 1)) / (g - 1))
        return self.values + random.normal(size=(count, g)) @ steps / scale

    def records(self) -> list[dict[str, Any]]:
        """The profile as records for the report, one per block."""
        columns = zip(self.layers, self.depths.tolist(), self.values.tolist(), self.halves.tolist(), strict=True)
        return [
            {"layer": layer, "depth": depth, "value": value}
            | ({"low": value - half, "high": value + half} if math.isfinite(half) else {})
            for layer, depth, value, half in columns
        ]

    def quantity(self, function: Callable[[np.ndarray], float]) -> Quantity:
        """A function of the profile, with its jackknife values."""
        value = function(self.values)
        if self.thin:
            return Quantity(value, THIN)
        if len(self.folds):
            return Quantity(value, tuple(function(fold) for fold in self.folds))
        drawn = self.draws(400)
        spread = float(np.std([function(row) for row in drawn])) if len(drawn) else math.nan
        return Quantity(value, half=NORMAL_95 * spread)

    def above(self, block: int) -> Quantity:
        """The peak minus the value at index `block`; the peak is located without the fold on which it is measured.

        The maximum of noisy values is biased upwards. With z₍ⱼ₎ = y + (G−1)(ȳ₍·₎ − y₍ⱼ₎), the estimate of fold j alone,
        the effect is the mean over j of z₍ⱼ₎[argmax y₍ⱼ₎] − z₍ⱼ₎[block]; if all folds have the same peak block, it is
        the plain difference with its jackknife interval.
        """
        plain = float(self.values[self.peak] - self.values[block])
        if self.thin:
            return Quantity(plain, THIN)
        g = len(self.folds)
        if not g:
            return Quantity(plain, half=float(math.hypot(self.halves[self.peak], self.halves[block])))
        single = self.values + (g - 1) * (self.folds.mean(0) - self.folds)
        gaps = single[np.arange(g), self.folds.argmax(1)] - single[:, block]
        return Quantity(float(gaps.mean()), tuple(((gaps.sum() - gaps) / (g - 1)).tolist()))

    def span(self) -> Quantity:
        """The largest value minus the smallest, both located without the fold on which they are measured (`above`).

        The plain difference is positive for any noise; this one is 0 on average where all blocks are alike.
        """
        plain = float(np.ptp(self.values))
        if self.thin:
            return Quantity(plain, THIN)
        if not len(self.folds):
            return self.quantity(lambda y: float(np.ptp(y)))
        g, rows = len(self.folds), np.arange(len(self.folds))
        single = self.values + (g - 1) * (self.folds.mean(0) - self.folds)
        gaps = single[rows, self.folds.argmax(1)] - single[rows, self.folds.argmin(1)]
        return Quantity(float(gaps.mean()), tuple(((gaps.sum() - gaps) / (g - 1)).tolist()))


def _quantiles(values: np.ndarray) -> tuple[float, float]:
    """The central 95 % interval of draws."""
    low, high = np.quantile(values, [0.025, 0.975], method="inverted_cdf") if len(values) else (math.nan, math.nan)
    return float(low), float(high)


def roughness(profile: np.ndarray) -> float:
    """The largest distance from the best up–down curve, in units of the profile's range; 0 for a constant one.

    >>> roughness(np.array([0.0, 1.0, 2.0, 1.0])), roughness(np.array([2.0, 0.0, 2.0]))
    (0.0, 0.5)
    """
    reach = float(np.ptp(profile))
    return float(np.abs(profile - up_down(profile)).max()) / reach if reach else 0.0


def up_down(profile: np.ndarray) -> np.ndarray:
    """The least-squares curve that rises to some block and falls after it (either part may be empty).

    Every position of the peak is tried, with an isotonic fit on either side.
    """
    fits = [np.concatenate([isotonic(profile[:k]), isotonic(profile[k:][::-1])[::-1]]) for k in range(len(profile) + 1)]
    return min(fits, key=lambda fit: float(np.square(profile - fit).sum()))


def isotonic(values: np.ndarray) -> np.ndarray:
    """The least-squares non-decreasing sequence, by pooling adjacent violators (Ayer et al. 1955).

    >>> isotonic(np.array([1.0, 3.0, 2.0, 4.0])).tolist()
    [1.0, 2.5, 2.5, 4.0]
    """
    pools: list[tuple[float, int]] = []
    for value in values.tolist():
        mean, size = value, 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        pools.append((mean, size))
    return np.repeat([mean for mean, _ in pools], [size for _, size in pools]) if pools else values


def _block_profile(readings: Readings) -> Curve:
    """The profile over the blocks at the last step; raises `Missing` with too few blocks or without an end."""
    rows = {cell.layer: row for cell, row in evidence.at(readings, evidence.last_step(readings)).items()}
    blocks = max([*rows, *(round(layer / row.depth) for layer, row in rows.items() if row.depth > 0)])
    if len(rows) < FEWEST_BLOCKS:
        raise Missing(f"profile of {FEWEST_BLOCKS} blocks", f"{len(rows)} of {blocks} have a number")
    missing = [end for end in (1, blocks) if end not in rows]
    if missing:
        raise Missing(f"number at block {missing[0]}", "a shape over depth needs both ends; measure all layers")
    return Curve.of(list(rows), [layer / blocks for layer in rows], [row.quantity for row in rows.values()])


def _first(stack: BlockStack) -> Readings:
    """The first formula that was measured at the stack."""
    return next((found for found in map(stack.blocks, METRICS) if found), {})


def _profiles(stack: BlockStack) -> dict[str, Curve]:
    """The profile for each measured formula."""
    profiles: dict[str, Curve] = {}
    if not _first(stack):
        raise stack.gap("svd_ratio")
    for name, (metric, options, _) in _FORMULAS.items():
        try:
            if readings := stack.blocks(metric, **options):
                profiles[name] = _block_profile(readings)
        except Missing:
            if not profiles:  # the deciding formula must be complete, the descriptive ones may have gaps
                raise
    return profiles


def _by_formula(
    stack: BlockStack, parts_of: Callable[[Curve], list[Part]], *, names: Sequence[str], sentence: Sentence
) -> Finding:
    """The finding from the parts of the deciding formula and, as descriptive parts named after it, of each other one.

    Each of the others also gets an aspect made of its parts in `names`, and a clause in the sentence.
    """
    profiles = _profiles(stack)
    (decides, profile), *others = profiles.items()
    metric, options, symbol = _FORMULAS[decides]
    step = evidence.last_step(stack.blocks(metric, **options))
    parts = parts_of(profile)
    for name, other in others:
        parts += [replace(p, name=f"{name}: {p.name}", needed=False) for p in parts_of(other)]
    records = {name: other.records() for name, other in profiles.items()}
    details = {"formula": metric, "step": step, "profile": records[decides], "profiles": records}
    aspects = {name: tuple(f"{name}: {part}" for part in names) for name, _ in others}

    def with_others(parts: Parts, part: Part) -> str:
        clauses = []
        for name, members in aspects.items():
            if known := [parts[member] for member in members if member in parts]:
                status = judge(known)[0]
                clauses.append(f"{'is ' if status == 'undecided' else ''}{status} by {_FORMULAS[name][2]}")
        beside = f" (it {' and '.join(clauses)})" if clauses else ""
        return f"over {len(profile)} blocks{evidence.at_step(step)} {symbol} {sentence(parts, part)}{beside}"

    return Finding(parts, with_others, details, aspects=aspects)


@claim(of=stacks, source=SOURCE, metrics=METRICS, margin=END_MARGIN, about="training")
def bell_shaped(stack: BlockStack) -> Finding:
    """Anisotropy over depth is bell-shaped: highest in the middle blocks and lower at both ends.

    The peak of svd_ratio over blocks 1 … L minus the first and the last block, at the last measured step.

    The peak must lie at a relative depth of .2 to .8 (its interval: 4000 draws of the profile from a multivariate t
    with the jackknife covariance between blocks, which share their contexts), both ends .05 below it (it is chosen
    without the context fold on which its height is measured), and the profile must not leave the best up–down curve by
    more than a tenth of its range. Neighbouring blocks are alike: a bell that as many blocks give too often whose
    changes go up or down by chance (p > .05 of all choices of their signs), or that is one block alone, stays open.
    `svd_ratio_squared`, and svd_ratio without the first position, are told beside it.
    """
    return replace(_by_formula(stack, bell_parts, names=list(_BELL), sentence=_bell_sentence), doubt=_like_a_walk)


def bell_parts(profile: Curve) -> list[Part]:
    """The parts of a bell for one profile."""
    smooth = profile.quantity(lambda y: 1 - roughness(y))
    depths, peaks = profile.depths, profile.draws().argmax(1)
    near = np.minimum(depths, 1 - depths)  # relative distance of each block from the nearer end
    away = {"margin": LEAST_DISTANCE, "guard": True, "reason": TOO_FEW if profile.thin else ""}
    return [
        Part.of(_FIRST, profile.above(0), margin=END_MARGIN),
        Part.of(_LAST, profile.above(len(profile) - 1), margin=END_MARGIN),
        Part(_PEAK, float(near[profile.peak]), *_quantiles(near[peaks]), **away),  # type: ignore[arg-type]
        Part.of(_SHAPE, smooth, margin=SMOOTH, guard=True),
        Part("peak depth", float(depths[profile.peak]), *_quantiles(depths[peaks]), needed=False),
        *Part.describe_all({"peak": float(profile.values.max()), _SECOND: _second(profile.values)}),
        *Part.describe_all({_WALK: Walk.of([profile.values], _height, "blocks").p}),
    ]


def _second(profile: np.ndarray) -> float:
    """The height of the second highest block above the higher end, as a share of that of the highest."""
    end = max(profile[0], profile[-1])
    return float((np.sort(profile)[-2] - end) / (profile.max() - end)) if profile.max() > end else 0.0


def _height(walks: np.ndarray) -> np.ndarray:
    """The height of profiles [sets, L] above the higher of their ends."""
    return walks.max(-1) - np.maximum(walks[:, 0], walks[:, -1])


def _like_a_walk(parts: Parts) -> str:
    """Why a bell may be none: one block alone, or a walk over the blocks; empty if neither."""
    if parts[_SECOND].effect < ALONE:
        return f"it is one block alone: the next highest has {parts[_SECOND].number} of its height above the ends"
    return walk_doubt(parts[_WALK].effect, "blocks", luck=BELL_LUCK)


def _bell_sentence(parts: Parts, part: Part) -> str:
    text = f"peaks at relative depth {parts['peak depth']} with {parts['peak'].number}, {parts[_FIRST]} above the "
    text += f"first block and {parts[_LAST]} above the last, and leaves the best up–down curve by "
    text += f"{figure(100 * (1 - parts[_SHAPE].effect))} % of its range; what decides is "
    return f"{text}{_BELL[part.name]} with {part}, {part.outcome}"


@dataclass(frozen=True)
class SameSize:
    """The encoders and decoders of one size, by the subject of their verdicts."""

    encoders: Mapping[str, BlockStack]
    decoders: Mapping[str, BlockStack]
    until: int | None = None

    def ended(self, step: int) -> SameSize:
        one, two = ({n: stack.ended(step) for n, stack in side.items()} for side in (self.encoders, self.decoders))
        return SameSize(one, two, step)

    @property
    def runs(self) -> dict[str, Run]:
        return {stack.run.model: stack.run for stack in (*self.encoders.values(), *self.decoders.values())}

    def pairs(self) -> list[tuple[str, str]]:
        return [(encoder, decoder) for encoder in self.encoders for decoder in self.decoders]


def _sizes(study: Study) -> Mapping[str, SameSize | Missing]:
    """Encoders and decoders by size, for sizes that have both."""
    sides: dict[str, dict[str, dict[str, BlockStack]]] = {}
    for name, stack in stacks(study).items():
        if stack.role in ("encoder", "decoder") and (size := _size(stack)):
            sides.setdefault(size, {"encoder": {}, "decoder": {}})[stack.role][name] = stack
    found = {size: SameSize(s["encoder"], s["decoder"]) for size, s in sides.items() if s["encoder"] and s["decoder"]}
    gap = NotHere("encoder and decoder of the same size with svd_ratio at blocks", _SIZES_HOW)
    return {f"encoders and decoders of {size}": each for size, each in found.items()} or {"encoder and decoder": gap}


_SIZES_HOW = "measure both and give all run folders to `anisoscope claims`; run.json says what a model is"


def _size(stack: BlockStack) -> str:
    """Blocks and width of a stack, as text; empty without a profile."""
    rows = _first(stack)
    if not rows:
        return ""
    blocks = max(max(c.layer, round(c.layer / row.depth) if row.depth > 0 else 0) for c, row in rows.items())
    named, width = _SIZE.search(stack.run.model), stack.run.entry.get("width")
    width = width if isinstance(width, int) else named[2] if named else None
    return f"{blocks} blocks" + (f" and width {width}" if width else "")


@claim(of=_sizes, source=SOURCE, metrics=METRICS, margin=MOST_SPREAD, about="training")
def encoders_more_uniform(models: SameSize) -> Finding:
    """Anisotropy is more uniform over depth in an encoder than in a decoder of the same size.

    Spread (max − min)/mean of svd_ratio over blocks 1 … L: that of the encoder over that of the decoder, below 1/1.5.

    At the last measured step, for every encoder with every decoder that has as many blocks of the same width; the
    interval leaves out the same folds of contexts in both. The spread of any noise is positive, so half of the
    decoder's must be found again where other contexts locate its ends than measure it. Two trainings differ by more
    than contexts say: it takes three seeds, or three encoders and three decoders. A spread below .2 is told as a
    uniform profile, which decides nothing. `svd_ratio_squared` and svd_ratio without the first position are told
    beside it.
    """
    profiles = {name: _profiles(stack) for name, stack in (*models.encoders.items(), *models.decoders.items())}
    first = {name: next(iter(found.values())) for name, found in profiles.items()}
    parts: list[Part] = []
    for encoder, decoder in models.pairs():
        parts += uniform_parts(first[encoder], first[decoder], f"{encoder} beside {decoder}")
    parts += Part.describe_all({f"spread: {name}": profile.quantity(_spread) for name, profile in first.items()})
    others = [f for f in _FORMULAS if all(f in found for found in profiles.values())][1:]
    aspects: dict[str, tuple[str, ...]] = {}
    for formula in others:
        made = [
            replace(part, name=f"{formula}: {part.name}", needed=False)
            for encoder, decoder in models.pairs()
            for part in uniform_parts(
                profiles[encoder][formula], profiles[decoder][formula], f"{encoder} beside {decoder}"
            )
        ]
        parts += made
        aspects[formula] = tuple(part.name for part in made)
    both = {**models.encoders, **models.decoders}
    ends = {name: evidence.last_step(_first(stack)) for name, stack in both.items()}
    steps = set(ends.values())
    details: dict[str, Any] = {"profiles": {name: profile.records() for name, profile in first.items()}, "ends": ends}
    details |= {"step": steps.pop()} if len(steps) == 1 else {}
    details["encoders"], details["decoders"] = list(models.encoders), list(models.decoders)

    def sentence(parts: Parts, part: Part) -> str:
        spreads = [f"{parts[f'spread: {name}']} in {name}" for name in both]
        text = f"the spread of σ₁/Σσ over blocks, (max − min)/mean, is {evidence.listed(spreads)}"
        flat = [name for name in both if parts[f"spread: {name}"].high < UNIFORM]
        text += f" (below {UNIFORM}, uniform by itself, in {evidence.listed(flat)})" if flat else ""
        return f"{text}; what decides is {part.name} with {part}, {part.outcome}"

    alone = _alone(models.encoders, models.decoders)
    return Finding(parts, sentence, details, aspects=aspects, scope="for these models", one_seed=alone)


def _alone(encoders: Collection[str], decoders: Collection[str]) -> str:
    """Why one seed of these models decides nothing: two trainings differ by luck; empty from three of each on.

    If encoders and decoders do not differ, three encoders all lie below three decoders in one of twenty cases at most.
    """
    if min(len(encoders), len(decoders)) >= FEWEST_SEEDS:
        return ""
    have = f"{evidence.counted(len(encoders), 'encoder')} and {evidence.counted(len(decoders), 'decoder')}"
    return f"two trainings differ by luck: it takes {FEWEST_SEEDS} seeds, or as many models of each kind, not {have}"


def _spread(profile: np.ndarray) -> float:
    mean = float(profile.mean())
    return float(np.ptp(profile)) / mean if mean else math.nan


def uniform_parts(encoder: Curve, decoder: Curve, name: str) -> list[Part]:
    """The parts of one encoder beside one decoder: the ratio of their spreads, and that the decoder has one at all."""
    one, two = (curve.quantity(_spread) for curve in (encoder, decoder))
    plain = float(np.ptp(decoder.values))
    there = decoder.span() / plain if plain else Quantity(math.nan)
    return [
        Part.of(name, one.over(two), margin=MOST_SPREAD, below=True, ratio=True),
        Part.of(f"{name}, spread of the decoder on other contexts", there, margin=REPEATED, guard=True),
    ]


@claim(of=whole("decoders and encoders"), source=SOURCE, metrics=METRICS, margin=END_MARGIN, about="training")
def decoders_bell_encoders_flat(study: Study) -> Finding:
    """Every decoder has a bell-shaped profile of anisotropy and every encoder a more uniform one.

    `bell_shaped` of every decoder and `encoders_more_uniform` of every encoder; one that is not refutes it.

    An encoder is compared with every decoder of its size, and is undecided where there is none.

    Which is which is told by run.json, or by the names of the arms of the causal ablation, of which causal + masked LM
    is neither.
    """
    found = stacks(study)
    kinds = {role: [n for n, s in found.items() if s.role == role and _first(s)] for role in ("decoder", "encoder")}
    unknown = [name for name, stack in found.items() if not stack.role and _first(stack)]
    unknown_words = f"it is not known what {' and '.join(unknown)} are" if unknown else ""
    for role, names in kinds.items():
        if not names:
            how = f"measure {'an' if role == 'encoder' else 'a'} {role} too and give both runs to `anisoscope claims`"
            how = f"{unknown_words}: give the run folders, whose run.json says it" if unknown else how
            raise evidence.NotHere(f"{role} with svd_ratio at blocks", how)
    parts: list[Part] = []
    curves: dict[str, Curve] = {}
    for role, name in ((role, name) for role, names in kinds.items() for name in names):
        try:
            curves[name] = next(iter(_profiles(found[name]).values()))
        except Missing as gap:  # too few blocks: this model is undecided, the others are judged
            parts.append(Part.absent(f"{role} {name}: profile", f"of {role} {name} {gap}", margin=END_MARGIN))
    for name in filter(curves.__contains__, kinds["decoder"]):
        kept = [p for p in bell_parts(curves[name]) if math.isfinite(p.margin) or p.name in (_WALK, _SECOND)]
        parts += [replace(p, name=f"decoder {name}: {p.name}") for p in kept]
    alone = _alone(kinds["encoder"], kinds["decoder"])  # of seeds, parts are pooled without it
    for name in filter(curves.__contains__, kinds["encoder"]):
        same = [other for other in kinds["decoder"] if _size(found[other]) == _size(found[name]) and other in curves]
        for other in same:
            made = uniform_parts(curves[name], curves[other], f"beside {other}")
            parts += [replace(p, name=f"encoder {name}: {p.name}", reason=p.reason or alone) for p in made]
        if not same:
            no_decoder = Missing(f"decoder of {_size(found[name])} beside {name}", _SIZES_HOW)
            parts.append(Part.absent(f"encoder {name}: size", no_decoder, margin=MOST_SPREAD))
    ends = {name: evidence.last_step(_first(found[name])) for names in kinds.values() for name in names}
    details = {"models": kinds, "unknown": unknown, "ends": ends}

    def sentence(parts: Parts, part: Part) -> str:
        clauses = [_kind_clause(parts, role, shape) for role, shape in (("decoder", "a bell"), ("encoder", "uniform"))]
        text = f"the profile is {' and '.join(clauses)}; what decides is {part.name} with {part}, {part.outcome}"
        return text + (f"; {unknown_words}" if unknown else "")

    def doubt(parts: Parts) -> str:
        judged = [name for name in kinds["decoder"] if f"decoder {name}: {_WALK}" in parts]
        named = ({part: parts[f"decoder {name}: {part}"] for part in (_WALK, _SECOND)} for name in judged)
        return next(filter(None, map(_like_a_walk, named)), "")

    return Finding(parts, sentence, details, scope="for these models", doubt=doubt)


def _kind_clause(parts: Parts, role: str, shape: str) -> str:
    members: dict[str, list[Part]] = {}
    for name, part in parts.items():
        if name.startswith(f"{role} ") and not name.endswith((_WALK, _SECOND)):
            members.setdefault(name.removeprefix(f"{role} ").rsplit(": ", 1)[0], []).append(part)
    statuses = {name: judge(of_model)[0] for name, of_model in members.items()}
    rest = [f"{name} {'is open' if s == 'undecided' else 'is not'}" for name, s in statuses.items() if s != "holds"]
    holding = sum(status == "holds" for status in statuses.values())
    text = f"{shape} in {holding} of {evidence.counted(len(statuses), role)}"
    return text + (f" ({', '.join(rest)})" if rest else "")
