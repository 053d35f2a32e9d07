"""The summary in sentences. Each is made from numbers and their intervals, and says no more than they do.

Two values are called different only where their intervals do not meet; layers of one model are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from anisoscope.results.quantity import Quantity, jackknife, mean
from anisoscope.results.schema import FIRST_OUTLIER
from anisoscope.view.heads import HeadMap, head_maps
from anisoscope.view.inputs import random_models
from anisoscope.view.series import Line, Point, Sheet, Subject, short_names
from anisoscope.view.words import estimate, finite, listed, number, plural, site_phrase, spans

BIASED_ABOVE = 15  # TwoNN at 4096 rows: true 20 reads 17.6, true 50 reads 33.7
FEW_CONTEXTS = 30
NEAR_COPIES = "near-copies or noise decide"  # in the note of metrics/engine/estimation.py
COMPARED = ("average_cosine", "two_nn", "participation_ratio")
TELL_EACH = 3  # with more subjects than this the page compares instead of telling each one's story


@dataclass(frozen=True)
class Finding:
    """A topic and what is said of it, a paragraph each."""

    topic: str
    texts: tuple[str, ...]


def find(sheet: Sheet, abouts: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """All sentences the table supports, most important first."""
    said = {
        "Direction": _each(
            sheet, _cosine, "An average cosine of 0 means directions spread evenly, 1 a single direction."
        ),
        "Spread": _each(sheet, _dominance),
        "Dimension": _each(sheet, _dimension) or _dimension_overall(sheet),
        "Comparison": _comparison(sheet),
        "First position": _first_position(sheet),
        "Attention": _attention(sheet),
        "Weights": _random_weights(abouts),
        "Caution": _caution(sheet, abouts),
    }
    # A line must not break between a value and its interval.
    whole = {topic: tuple(text.replace(" ± ", "\u00a0±\u00a0") for text in texts) for topic, texts in said.items()}
    return [Finding(topic, texts) for topic, texts in whole.items() if texts]


def _each(sheet: Sheet, tell_one: Callable[[Sheet, Subject], str], closing: str = "") -> list[str]:
    """What is to say of each subject, with its name before it where there are several; nothing of many."""
    if len(sheet.subjects) > TELL_EACH:
        return []
    told = [(subject, text) for subject in sheet.subjects if (text := tell_one(sheet, subject))]
    if len(sheet.subjects) > 1:
        texts = [f"{subject.label}: {text}" for subject, text in told]
    else:
        texts = [text[:1].upper() + text[1:] for _, text in told]
    return [*texts[:-1], f"{texts[-1]} {closing}".strip()] if texts else []


def apart(a: Point, b: Point) -> bool:
    """Whether the intervals of two points do not meet; without intervals nothing is claimed."""
    return bool(a.interval and b.interval and (a.interval[1] < b.interval[0] or b.interval[1] < a.interval[0]))


def tell(point: Point) -> str:
    """A value with its interval and place."""
    return f"{estimate(point.value, point.low, point.high)} {site_phrase(point.layer, point.kind)}"


def _value(point: Point) -> float:
    return math.nan if point.value is None else point.value


def _body(line: Line | None) -> list[Point]:
    return [p for p in line.body if p.value is not None] if line else []


def course(points: Sequence[Point]) -> str:
    """How a line goes from its first point to its last: rising, falling, by way of a peak or a trough, or level."""
    first, last = points[0], points[-1]
    high, low = max(points, key=_value), min(points, key=_value)
    if not apart(high, low):
        return (
            f"stays between {number(low.value)} and {number(high.value)} over the layers, "
            "a range that the intervals cannot tell from no change"
        )
    if high not in (first, last) and apart(high, first) and apart(high, last):
        return f"goes from {tell(first)} up to {tell(high)} and down to {tell(last)}"
    if low not in (first, last) and apart(low, first) and apart(low, last):
        return f"goes from {tell(first)} down to {tell(low)} and up to {tell(last)}"
    verb = "rises" if _value(last) > _value(first) else "falls"
    extreme = high if verb == "rises" else low
    if not apart(first, last):
        return (
            f"runs from {tell(first)} to {tell(last)}, with its lowest value {tell(low)} and its highest {tell(high)}"
        )
    aside = "" if extreme is last else f" ({'highest' if verb == 'rises' else 'lowest'}: {tell(extreme)})"
    return f"{verb} from {tell(first)} to {tell(last)}{aside}"


def _cosine(sheet: Sheet, subject: Subject) -> str:
    line = sheet.line(subject, "average_cosine")
    points = _body(line)
    if not line or not points:
        return ""
    text = f"average cosine {course(points)}." if len(points) > 1 else f"the average cosine is {tell(points[0])}."
    final = [p for p in line.final if p.value is not None]
    if final and apart(final[0], points[-1]):
        text += f" The final norm changes it to {estimate(final[0].value, final[0].low, final[0].high)}."
    return text


def _dominance(sheet: Sheet, subject: Subject) -> str:
    ratio, spread = (_body(sheet.line(subject, m)) for m in ("svd_ratio", "participation_ratio"))
    if not ratio:
        return ""
    top = max(ratio, key=_value)
    size, where = estimate(top.value, top.low, top.high), site_phrase(top.layer, top.kind)
    text = f"the largest singular value of the centred rows is at most {size} of the sum of all ({where})"
    if len(spread) > 1:
        low, high = min(spread, key=_value), max(spread, key=_value)
        text += f"; the participation ratio lies between {tell(low)} and {tell(high)}"
        width = _width(sheet, subject)
        text += f", of {width:,} possible directions" if width else ""
    return text + "."


def _width(sheet: Sheet, subject: Subject) -> int | None:
    about: Mapping[str, Any] = next((r["about"] for r in sheet.records if sheet.subject(r) is subject), {})
    widths = [m.get("width") for m in about.get("models") or [] if m.get("name") == subject.model]
    return int(widths[0]) if widths and widths[0] else None


def doubtful(point: Point) -> bool:
    """Whether near-copies or noise decide a dimension, as the table notes where two scales give different ones."""
    return NEAR_COPIES in (point.record.get("note") or "")


def _dimensions(sheet: Sheet, subject: Subject) -> tuple[list[Point], str]:
    """The dimensions that can be told, and what is said of those that cannot."""
    points = _body(sheet.line(subject, "two_nn"))
    left = [point for point in points if doubtful(point)]
    told = [point for point in points if point not in left]
    if not left:
        return told, ""
    layers = [point.layer for point in left if point.kind != "embed"]
    places = ["the embedding"] if len(layers) < len(left) else []
    places += [f"block{'s' if len(layers) > 1 else ''} {spans(layers)}"] if layers else []
    return told, f" Not counted: {listed(places)}, where two scales disagree: near-copies or noise decide."


def _dimension(sheet: Sheet, subject: Subject) -> str:
    points, aside = _dimensions(sheet, subject)
    if not points:
        return f"no intrinsic dimension (TwoNN) can be told.{aside}" if aside else ""
    low, high = min(points, key=_value), max(points, key=_value)
    if low is high:
        text = f"the intrinsic dimension (TwoNN) is {tell(low)}."
    elif apart(low, high):
        text = f"the intrinsic dimension (TwoNN) lies between {tell(low)} and {tell(high)}."
    else:
        text = (
            f"the intrinsic dimension (TwoNN) lies between {number(low.value)} and {number(high.value)}; "
            "the intervals do not tell the layers apart."
        )
    return text + _bias(high) + aside


def _bias(high: Point) -> str:
    if _value(high) <= BIASED_ABOVE - 3:
        return ""
    return f" TwoNN is biased low above about {BIASED_ABOVE} at 4,096 rows, so the larger values understate."


def _dimension_overall(sheet: Sheet) -> list[str]:
    every = {s.label: (s, *_dimensions(sheet, s)) for s in sheet.subjects}
    spots = [(p, s) for s, points, _ in every.values() for p in points]
    if len(spots) < 2 or len(sheet.subjects) <= TELL_EACH:
        return []
    (low, lower), (high, higher) = min(spots, key=lambda x: _value(x[0])), max(spots, key=lambda x: _value(x[0]))
    text = f"Intrinsic dimension (TwoNN) lies between {tell(low)} ({lower.label}) and {tell(high)} ({higher.label})."
    left = [label for label, (_, _, aside) in every.items() if aside]
    aside = f" Not counted: places of {listed(left)} where two scales disagree: near-copies or noise decide."
    return [text + _bias(high) + (aside if left else "")]


@dataclass(frozen=True)
class Mean:
    """A mean over the blocks of one subject, with a jackknife interval where the table carries its replicates."""

    subject: Subject
    value: float
    low: float | None
    high: float | None
    doubtful: bool = False  # whether one of the blocks is

    @property
    def text(self) -> str:
        return estimate(self.value, self.low, self.high) + (" ?" if self.doubtful else "")


def block_mean(line: Line | None, bounds: tuple[float | None, float | None]) -> Mean | None:
    """The mean over blocks 1..L with its jackknife interval, cut to the metric's bounds: that of the claims."""
    if line is None or not line.blocks:
        return None
    whole = mean([_quantity(point) for point in line.blocks])
    low, high = jackknife(whole.value, () if whole.thin else whole.live, bounds=bounds)
    return Mean(line.subject, whole.value, finite(low), finite(high), any(map(doubtful, line.blocks)))


def _quantity(point: Point) -> Quantity:
    folds = [math.nan if fold is None else fold for fold in point.record.get("replicates") or ()]
    return Quantity(_value(point), tuple(folds))


def mean_over_blocks(sheet: Sheet, subject: Subject, metric: str, *, without: bool = False) -> Mean | None:
    """A metric's mean over the blocks of a subject, with or without the first position."""
    line = without_first_line(sheet, subject, metric) if without else sheet.line(subject, metric)
    return block_mean(line, sheet.catalogue.entry(metric).bounds)


def without_first_line(sheet: Sheet, subject: Subject, metric: str) -> Line | None:
    """The line that leaves the first position out wherever the table has it so, else None."""
    kept, left = sheet.line(subject, metric), sheet.line(subject, metric, "first=out")
    if kept is None or left is None:
        return None
    better = {(p.layer, p.kind): p for p in left.known}
    return Line(subject, tuple(better.get((p.layer, p.kind), p) for p in kept.points), left.variant)


def _comparison(sheet: Sheet) -> list[str]:
    if len(sheet.subjects) < 2:
        return []
    texts = []
    for metric in COMPARED:
        means = [m for s in sheet.subjects if (m := mean_over_blocks(sheet, s, metric)) and not m.doubtful]
        if len(means) > 1:
            texts.append(_compare(sheet, metric, means))
    roles = {s.role for s in sheet.subjects}
    if texts and {"encoder", "decoder"} <= roles:
        texts.append(
            "A difference between these models is not one between encoders and decoders: that takes several of each."
        )
    return texts


def _compare(sheet: Sheet, metric: str, means: list[Mean]) -> str:
    title = sheet.catalogue.entry(metric).title
    ranked = sorted(means, key=lambda m: -m.value)
    each = [f"{m.text} in {_named(sheet, metric, m.subject)}" for m in ranked]
    top, bottom = ranked[0], ranked[-1]
    if len(each) > TELL_EACH:
        text = f"{title}, averaged over blocks, runs from {each[-1]} to {each[0]}"
    else:
        text = f"{title}, averaged over blocks, is {listed(each)}"
    if top.low is None or bottom.high is None:
        return f"{text} (no interval for this average)."
    return f"{text}." if top.low > bottom.high else f"{text}; the intervals overlap."


def _named(sheet: Sheet, metric: str, subject: Subject) -> str:
    """A subject with its role, and with its mean without the first position where the table has that."""
    known = subject.role in ("encoder", "decoder") and not subject.label.endswith(subject.role)
    without = mean_over_blocks(sheet, subject, metric, without=True)
    parts = [subject.role if known else "", f"{without.text} without the first position" if without else ""]
    aside = "; ".join(part for part in parts if part)
    return f"{subject.label} ({aside})" if aside else subject.label


def _first_position(sheet: Sheet) -> list[str]:
    told = []
    for subject in sheet.subjects:
        without = sheet.line(subject, "average_cosine", "first=out") or _any_without(sheet, subject)
        if without is None or not without.points:
            continue
        # both ways are given at all layers of a stack; only where the note says so is it an outlier
        points = [p for p in without.points if FIRST_OUTLIER in (p.record.get("note") or "")] or without.points
        layers = [p.layer for p in points if p.kind == "resid"]
        places = [f"block{'s' if len(layers) > 1 else ''} {spans(layers)}" if layers else ""]
        places += ["the embedding"] if any(p.kind == "embed" for p in points) else []
        places += ["the final norm"] if any(p.kind == "final" for p in points) else []
        told.append(f"in {subject.label} at {listed([p for p in places if p])}{_effect(sheet, subject)}")
    if not told:
        return []
    text = f"The first position is an outlier {'; '.join(told)}."
    return [text + " Numbers are given with it (solid) and without it (dashed)."]


def _any_without(sheet: Sheet, subject: Subject) -> Line | None:
    lines = (sheet.line(subject, metric, "first=out") for metric in sheet.metrics())
    return next((line for line in lines if line), None)


def _effect(sheet: Sheet, subject: Subject) -> str:
    """The largest change that leaving the first position out makes, for the measure that feels it most."""
    for metric in ("svd_ratio", "average_cosine"):
        kept, left = sheet.line(subject, metric), sheet.line(subject, metric, "first=out")
        if kept and left:
            twins = {(p.layer, p.kind): p for p in kept.known}
            pairs = [(twins[p.layer, p.kind], p) for p in left.known if (p.layer, p.kind) in twins]
            if pairs:
                a, b = max(pairs, key=lambda pair: abs(_value(pair[0]) - _value(pair[1])))
                title = sheet.catalogue.entry(metric).title
                where = site_phrase(a.layer, a.kind)
                return f" ({title} {where}: {number(a.value)} with it, {number(b.value)} without)"
    return ""


def _attention(sheet: Sheet) -> list[str]:
    """How many heads are sharp, and where the first key takes most; of many models only the two ends."""
    maps = {
        (g[0].entry.name, m.subject.index): m
        for g in head_maps(sheet)
        for m in g
        if m.kind == "scores" and not m.variant
    }
    texts = {}
    for subject in sheet.subjects:
        clauses = [_sharp(maps.get(("attention_sharpness", subject.index)))]
        clauses += [_first_key(maps.get(("first_key_mass", subject.index)))]
        if any(clauses):
            texts[subject.label] = ", and ".join(c for c in clauses if c) + "."
    if len(texts) > TELL_EACH:
        return []
    if len(sheet.subjects) == 1:
        return [text[:1].upper() + text[1:] for text in texts.values()]
    return [f"{label}: {text}" for label, text in texts.items()]


def _sharp(found: HeadMap | None) -> str:
    values = [v for v in found.values.values() if v is not None] if found else []
    return f"{sum(v > 0.5 for v in values)} of {len(values)} heads have a sharpness above 0.5" if values else ""


def _first_key(found: HeadMap | None) -> str:
    layer, mass = _peak_layer(found) if found else (0, None)
    if mass is None:
        return ""
    return f"the first key takes up to {number(mass, 2)} of the attention (block {layer}, mean over heads)"


def _peak_layer(found: HeadMap) -> tuple[int, float | None]:
    means = {}
    for layer in found.layers:
        values = [v for (_, at), v in found.values.items() if at == layer and v is not None]
        if values:
            means[layer] = fmean(values)
    best = max(means, key=lambda layer: means[layer], default=0)
    return best, means.get(best)


def _random_weights(abouts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which models have learned nothing: all of them, or some by name."""
    names, count = random_models(abouts)
    if not names:
        return []
    if len(names) == count:
        return ["The weights are random: this is the geometry of the architecture, not of anything learned."]
    shorten = short_names(dict.fromkeys(names))
    whose = listed([shorten(name) for name in dict.fromkeys(names)])
    return [
        f"The weights of {whose} are random: there it is the geometry of the architecture, not of anything learned."
    ]


def _caution(sheet: Sheet, abouts: Sequence[Mapping[str, Any]]) -> list[str]:
    sentences = []
    counts = [r["contexts"] for r in sheet.records if r["contexts"] and not r["group"]]
    if counts and min(counts) < FEW_CONTEXTS:
        sentences.append(
            f"Intervals resample contexts, and the fewest here are {min(counts)}: they are rough themselves."
        )
    sentences += [s for about in abouts for m in about.get("models") or [] if (s := _thin(m))]
    missing = sum(value is None or not math.isfinite(value) for value in (r["value"] for r in sheet.records))
    if missing:
        sentences.append(
            f"{plural(missing, 'value')} of {len(sheet.records):,} could not be computed; "
            "the reasons are listed under “Dropped, warned about, not computed”."
        )
    return [" ".join(sentences)] if sentences else []


def _thin(model: Mapping[str, Any]) -> str:
    rows, width = model.get("row_count", model.get("rows")), model.get("width")
    if not isinstance(rows, int) or not rows or not width or rows >= 10 * width:
        return ""
    name = model.get("name", "one model")
    return (
        f"{name} gave {plural(rows, 'row')} for width {width:,}: below ten rows per dimension spectra are not settled."
    )
