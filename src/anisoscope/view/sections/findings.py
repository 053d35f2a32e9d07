"""The summary in sentences. Each is made from numbers and their intervals, and says no more than they do.

Two values are called different only where their intervals do not meet; layers of one model are not independent.

Verdicts on claims as a page shows them: a table of claims, and how many hold, in sentences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from anisoscope.results.quantity import Quantity, mean
from anisoscope.results.query import Row
from anisoscope.results.schema import FIRST_OUTLIER
from anisoscope.view.page import PageFinding
from anisoscope.view.subjects import About, ProfileRows, Subject, known, random_models, short_names
from anisoscope.view.words import (
    Catalogue,
    estimate,
    finite,
    listed,
    neat,
    number,
    p_words,
    plural,
    shortened,
    site_phrase,
    spans,
    title_of,
)

BIASED_ABOVE = 15  # TwoNN at 4096 rows: true 20 reads 17.6, true 50 reads 33.7
FEW_CONTEXTS = 30
NEAR_COPIES = "near-copies or noise decide"  # in the note of metrics/engine/estimation.py
COMPARED = ("average_cosine", "two_nn", "participation_ratio")
TELL_EACH = 3  # with more subjects than this the page compares instead of telling each one's story


def find(rows: ProfileRows, catalogue: Catalogue) -> list[PageFinding]:
    """All sentences the table supports, most important first."""
    said = {
        "Direction": _each(
            rows, _cosine, "An average cosine of 0 means directions spread evenly, 1 a single direction."
        ),
        "Spread": _each(rows, _dominance),
        "Dimension": _each(rows, _dimension) or _dimension_overall(rows),
        "Comparison": _comparison(rows, catalogue),
        "First position": _first_position(rows, catalogue),
        "Attention": _attention(rows),
        "Weights": _random_weights(rows.abouts),
        "Caution": _caution(rows),
    }
    # A line must not break between a value and its interval.
    whole = {topic: tuple(text.replace(" ± ", "\u00a0±\u00a0") for text in texts) for topic, texts in said.items()}
    return [PageFinding(topic, texts) for topic, texts in whole.items() if texts]


def _each(rows: ProfileRows, tell_one: Callable[[ProfileRows, Subject], str], closing: str = "") -> list[str]:
    """What is to say of each subject, with its name before it where there are several; nothing of many."""
    if len(rows.subjects) > TELL_EACH:
        return []
    told = [(subject, text) for subject in rows.subjects if (text := tell_one(rows, subject))]
    if len(rows.subjects) > 1:
        texts = [f"{subject.label}: {text}" for subject, text in told]
    else:
        texts = [text[:1].upper() + text[1:] for _, text in told]
    return [*texts[:-1], f"{texts[-1]} {closing}".strip()] if texts else []


def apart(a: Row, b: Row) -> bool:
    """Whether the intervals of two points do not meet; without intervals nothing is claimed."""
    return bool(a.interval and b.interval and (a.interval[1] < b.interval[0] or b.interval[1] < a.interval[0]))


def tell(point: Row) -> str:
    """A value with its interval and place."""
    return f"{estimate(point.value, point.low, point.high)} {site_phrase(point.layer, point.kind)}"


def _value(point: Row) -> float:
    return float(point.value)


def _body(line: Sequence[Row]) -> list[Row]:
    """What was computed before the final norm."""
    return [row for row in known(line) if row.kind != "final"]


def block_rows(line: Sequence[Row]) -> list[Row]:
    """What was computed after a block: what a statement about depth may rest on."""
    return [row for row in known(line) if row.kind in ("resid", "stage") and (row.layer or 0) > 0]


def course(points: Sequence[Row]) -> str:
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


def _cosine(rows: ProfileRows, subject: Subject) -> str:
    line = rows.line(subject, "average_cosine")
    points = _body(line)
    if not points:
        return ""
    text = f"average cosine {course(points)}." if len(points) > 1 else f"the average cosine is {tell(points[0])}."
    final = [row for row in known(line) if row.kind == "final"]
    if final and apart(final[0], points[-1]):
        text += f" The final norm changes it to {estimate(final[0].value, final[0].low, final[0].high)}."
    return text


def _dominance(rows: ProfileRows, subject: Subject) -> str:
    ratio, spread = (_body(rows.line(subject, m)) for m in ("svd_ratio", "participation_ratio"))
    if not ratio:
        return ""
    top = max(ratio, key=_value)
    size, where = estimate(top.value, top.low, top.high), site_phrase(top.layer, top.kind)
    text = f"the largest singular value of the centred rows is at most {size} of the sum of all ({where})"
    if len(spread) > 1:
        low, high = min(spread, key=_value), max(spread, key=_value)
        text += f"; the participation ratio lies between {tell(low)} and {tell(high)}"
        width = _width(rows, subject)
        text += f", of {width:,} possible directions" if width else ""
    return text + "."


def _width(rows: ProfileRows, subject: Subject) -> int | None:
    entries = rows.abouts[subject.source].get("models") or []
    widths = [m.get("width") for m in entries if m.get("name") == subject.model]
    return int(widths[0]) if widths and widths[0] else None


def doubtful(point: Row) -> bool:
    """Whether near-copies or noise decide a dimension, as the table notes where two scales give different ones."""
    return NEAR_COPIES in point.note


def _dimensions(rows: ProfileRows, subject: Subject) -> tuple[list[Row], str]:
    """The dimensions that can be told, and what is said of those that cannot."""
    points = _body(rows.line(subject, "two_nn"))
    left = [point for point in points if doubtful(point)]
    told = [point for point in points if point not in left]
    if not left:
        return told, ""
    layers = [point.layer for point in left if point.kind != "embed"]
    places = ["the embedding"] if len(layers) < len(left) else []
    places += [f"block{'s' if len(layers) > 1 else ''} {spans(layers)}"] if layers else []
    return told, f" Not counted: {listed(places)}, where two scales disagree: near-copies or noise decide."


def _dimension(rows: ProfileRows, subject: Subject) -> str:
    points, aside = _dimensions(rows, subject)
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


def _bias(high: Row) -> str:
    if _value(high) <= BIASED_ABOVE - 3:
        return ""
    return f" TwoNN is biased low above about {BIASED_ABOVE} at 4,096 rows, so the larger values understate."


def _dimension_overall(rows: ProfileRows) -> list[str]:
    every = {s.label: (s, *_dimensions(rows, s)) for s in rows.subjects}
    spots = [(p, s) for s, points, _ in every.values() for p in points]
    if len(spots) < 2 or len(rows.subjects) <= TELL_EACH:
        return []
    (low, lower), (high, higher) = min(spots, key=lambda x: _value(x[0])), max(spots, key=lambda x: _value(x[0]))
    text = f"Intrinsic dimension (TwoNN) lies between {tell(low)} ({lower.label}) and {tell(high)} ({higher.label})."
    left = [label for label, (_, _, aside) in every.items() if aside]
    aside = f" Not counted: places of {listed(left)} where two scales disagree: near-copies or noise decide."
    return [text + _bias(high) + (aside if left else "")]


@dataclass(frozen=True)
class BlockMean:
    """A mean over the blocks of one subject, with a jackknife interval where the table carries its replicates."""

    subject: Subject
    value: float
    low: float | None
    high: float | None
    doubtful: bool = False  # whether one of the blocks is

    @property
    def text(self) -> str:
        return estimate(self.value, self.low, self.high) + (" ?" if self.doubtful else "")


def block_mean(subject: Subject, line: Sequence[Row], bounds: tuple[float | None, float | None]) -> BlockMean | None:
    """The mean over blocks 1..L with its jackknife interval, cut to the metric's bounds: that of the claims."""
    blocks = block_rows(line)
    if not blocks:
        return None
    whole = mean([Quantity(row.value, row.folds) for row in blocks])
    low, high = (finite(end) for end in whole.interval())
    if low is not None and bounds[0] is not None:
        low = max(low, bounds[0])
    if high is not None and bounds[1] is not None:
        high = min(high, bounds[1])
    return BlockMean(subject, whole.value, low, high, any(map(doubtful, blocks)))


def mean_over_blocks(
    rows: ProfileRows, catalogue: Catalogue, subject: Subject, metric: str, *, without: bool = False
) -> BlockMean | None:
    """A metric's mean over the blocks of a subject, with or without the first position."""
    line = without_first_line(rows, subject, metric) if without else rows.line(subject, metric)
    return block_mean(subject, line, catalogue.entry(metric).bounds)


def without_first_line(rows: ProfileRows, subject: Subject, metric: str) -> list[Row]:
    """The line that leaves the first position out wherever the table has it so; empty where it has none."""
    kept, left = rows.line(subject, metric), rows.line(subject, metric, "first=out")
    better = {(row.layer, row.kind): row for row in known(left)}
    return [better.get((row.layer, row.kind), row) for row in kept] if left else []


def _comparison(rows: ProfileRows, catalogue: Catalogue) -> list[str]:
    if len(rows.subjects) < 2:
        return []
    texts = []
    for metric in COMPARED:
        means = [m for s in rows.subjects if (m := mean_over_blocks(rows, catalogue, s, metric)) and not m.doubtful]
        if len(means) > 1:
            texts.append(_compare(rows, catalogue, metric, means))
    roles = {s.role for s in rows.subjects}
    if texts and {"encoder", "decoder"} <= roles:
        texts.append(
            "A difference between these models is not one between encoders and decoders: that takes several of each."
        )
    return texts


def _compare(rows: ProfileRows, catalogue: Catalogue, metric: str, means: list[BlockMean]) -> str:
    title = catalogue.entry(metric).title
    ranked = sorted(means, key=lambda m: -m.value)
    each = [f"{m.text} in {_named(rows, catalogue, metric, m.subject)}" for m in ranked]
    top, bottom = ranked[0], ranked[-1]
    if len(each) > TELL_EACH:
        text = f"{title}, averaged over blocks, runs from {each[-1]} to {each[0]}"
    else:
        text = f"{title}, averaged over blocks, is {listed(each)}"
    if top.low is None or bottom.high is None:
        return f"{text} (no interval for this average)."
    return f"{text}." if top.low > bottom.high else f"{text}; the intervals overlap."


def _named(rows: ProfileRows, catalogue: Catalogue, metric: str, subject: Subject) -> str:
    """A subject with its role, and with its mean without the first position where the table has that."""
    known = subject.role in ("encoder", "decoder") and not subject.label.endswith(subject.role)
    without = mean_over_blocks(rows, catalogue, subject, metric, without=True)
    parts = [subject.role if known else "", f"{without.text} without the first position" if without else ""]
    aside = "; ".join(part for part in parts if part)
    return f"{subject.label} ({aside})" if aside else subject.label


def _first_position(rows: ProfileRows, catalogue: Catalogue) -> list[str]:
    told = []
    for subject in rows.subjects:
        without = rows.line(subject, "average_cosine", "first=out") or _any_without(rows, subject, catalogue)
        if not without:
            continue
        # both ways are given at all layers of a stack; only where the note says so is it an outlier
        found = [row for row in without if FIRST_OUTLIER in row.note] or without
        layers = [row.layer for row in found if row.kind == "resid"]
        places = [f"block{'s' if len(layers) > 1 else ''} {spans(layers)}" if layers else ""]
        places += ["the embedding"] if any(row.kind == "embed" for row in found) else []
        places += ["the final norm"] if any(row.kind == "final" for row in found) else []
        told.append(f"in {subject.label} at {listed([p for p in places if p])}{_effect(rows, catalogue, subject)}")
    if not told:
        return []
    text = f"The first position is an outlier {'; '.join(told)}."
    return [text + " Numbers are given with it (solid) and without it (dashed)."]


def _any_without(rows: ProfileRows, subject: Subject, catalogue: Catalogue) -> list[Row]:
    lines = (rows.line(subject, metric, "first=out") for metric in catalogue.ordered(rows.metrics()))
    return next((line for line in lines if line), [])


def _effect(rows: ProfileRows, catalogue: Catalogue, subject: Subject) -> str:
    """The largest change that leaving the first position out makes, for the measure that feels it most."""
    for metric in ("svd_ratio", "average_cosine"):
        kept = {(row.layer, row.kind): row for row in known(rows.line(subject, metric))}
        left = known(rows.line(subject, metric, "first=out"))
        pairs = [(kept[row.layer, row.kind], row) for row in left if (row.layer, row.kind) in kept]
        if pairs:
            a, b = max(pairs, key=lambda pair: abs(pair[0].value - pair[1].value))
            title, where = catalogue.entry(metric).title, site_phrase(a.layer, a.kind)
            return f" ({title} {where}: {number(a.value)} with it, {number(b.value)} without)"
    return ""


def _attention(rows: ProfileRows) -> list[str]:
    """How many heads are sharp, and where the first key takes most; nothing of many models."""
    texts = {}
    for subject in rows.subjects:
        heads = rows.of(subject, kind="scores", variant="", group="", head=...).known()
        clauses = [_sharp(list(heads.where(metric="attention_sharpness")))]
        clauses += [_first_key(list(heads.where(metric="first_key_mass")))]
        if any(clauses):
            texts[subject.label] = ", and ".join(c for c in clauses if c) + "."
    if len(texts) > TELL_EACH:
        return []
    if len(rows.subjects) == 1:
        return [text[:1].upper() + text[1:] for text in texts.values()]
    return [f"{label}: {text}" for label, text in texts.items()]


def _sharp(heads: Sequence[Row]) -> str:
    sharp = sum(row.value > 0.5 for row in heads)
    return f"{sharp} of {len(heads)} heads have a sharpness above 0.5" if heads else ""


def _first_key(heads: Sequence[Row]) -> str:
    layers: dict[int, list[float]] = {}
    for row in heads:
        layers.setdefault(row.layer, []).append(row.value)
    if not layers:
        return ""
    mass, layer = max((fmean(values), -layer) for layer, values in layers.items())
    return f"the first key takes up to {number(mass, 2)} of the attention (block {-layer}, mean over heads)"


def _random_weights(abouts: Sequence[About]) -> list[str]:
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


def _caution(rows: ProfileRows) -> list[str]:
    sentences = []
    counts = [n for n in rows.query.where(group="").values("contexts") if n]
    if counts and min(counts) < FEW_CONTEXTS:
        sentences.append(
            f"Intervals resample contexts, and the fewest here are {min(counts)}: they are rough themselves."
        )
    sentences += [s for about in rows.abouts for m in about.get("models") or [] if (s := _thin(m))]
    missing = len(rows.query) - len(rows.query.known())
    if missing:
        sentences.append(
            f"{plural(missing, 'value')} of {len(rows.query):,} could not be computed; "
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


MARKS = {"holds": "✓", "fails": "✕", "undecided": "?"}  # a sign beside the word, so that colour is never alone
TELL_SUBJECTS = 6  # of more subjects than this only totals are told
COUNTED = {"holds": ("holds", "hold"), "fails": ("fails", "fail"), "undecided": ("is undecided", "are undecided")}


def verdict_claims(verdicts: Sequence[Mapping[str, Any]], random: Collection[str] = ()) -> list[dict[str, Any]]:
    """Claims in their order, each with a row for every model it was tested on; none for what was not measured.

    Rows of models whose weights are `random` stand apart, unless a claim has no others.
    """
    claims: dict[str, dict[str, Any]] = {}
    tested = measured(verdicts)
    for verdict in leading(tested):
        name = str(verdict.get("claim") or "")
        statement = str(verdict.get("statement") or title_of(name))
        claims.setdefault(name, {"name": name, "statement": statement, "rows": []})["rows"].append(_row(verdict))
        claims[name]["rows"][-1]["seeds"] = [_row(v) for v in tested if v is not verdict and _same(v, verdict)]
    for claim in claims.values():
        claim["rows"], claim["random"] = _apart(claim["rows"], random)
        claim["random_words"] = _random_words(claim["random"])
    return list(claims.values())


def _apart(rows: list[dict[str, Any]], random: Collection[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of trained models, and those of models with random weights; together where there is no other."""
    drawn = [row for row in rows if is_random(row["subject"], random)]
    if len(drawn) in (0, len(rows)):
        return rows, []
    return [row for row in rows if row not in drawn], drawn


def _random_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many models have random weights, and what was found of them."""
    models = len({row["subject"].partition(", ")[0] for row in rows})
    stacks = f", {len(rows)} stacks" if len(rows) > models else ""
    return f"{plural(models, 'model')} with random weights{stacks}: {status_counts(rows)}" if rows else ""


def is_random(subject: str, random: Collection[str]) -> bool:
    """Whether a verdict is on a model with random weights, or on one of its stacks.

    >>> is_random("t5, decoder stack", ["t5"]), is_random("t5-small", ["t5"])
    (True, False)
    """
    return any(subject == name or subject.startswith(f"{name}, ") for name in random)


def status_counts(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many hold, fail and are undecided.

    >>> status_counts([{"status": "holds"}, {"status": "undecided"}, {"status": "undecided"}])
    '1 holds and 2 are undecided'
    """
    counts = Counter(str(row.get("status") or "undecided") for row in rows)
    return listed([f"{counts[s]} {words[counts[s] != 1]}" for s, words in COUNTED.items() if counts[s]])


def leading(verdicts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Verdicts over all seeds, and those of single seeds where there is none over all.

    >>> over = {"claim": "a", "subject": "x", "details": {"pooled": True}}
    >>> leading([over, {"claim": "a", "subject": "x"}, {"claim": "a", "subject": "y"}])[1:]
    [{'claim': 'a', 'subject': 'y'}]
    """
    pooled = [verdict for verdict in verdicts if _is_pooled(verdict)]
    return [v for v in verdicts if _is_pooled(v) or not any(_same(v, over) for over in pooled)]


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return (one.get("claim"), one.get("subject")) == (other.get("claim"), other.get("subject"))


def _is_pooled(verdict: Mapping[str, Any]) -> bool:
    details = verdict.get("details")
    return bool(isinstance(details, Mapping) and details.get("pooled"))


def measured(verdicts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The verdicts on claims that the table has something to say about."""
    return [verdict for verdict in verdicts if not _is_missing(verdict)]


def _is_missing(verdict: Mapping[str, Any]) -> bool:
    details = verdict.get("details")
    return bool(isinstance(details, Mapping) and details.get("missing"))


def unmeasured(verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The claims that the table has nothing to say about; of one that was tested on some models only, a few others.

    >>> unmeasured([{"claim": "a", "subject": "x", "details": {"missing": True}}, {"claim": "a", "subject": "y"}])
    ['a (x)']
    """
    tested = {str(verdict.get("claim")) for verdict in measured(verdicts)}
    found: dict[str, dict[str, None]] = {}
    for verdict in verdicts:
        if _is_missing(verdict):
            found.setdefault(str(verdict.get("claim")), {})[str(verdict.get("subject") or "")] = None
    return [f"{claim} ({shortened(list(who))})" if claim in tested else claim for claim, who in found.items()]


def _row(verdict: Mapping[str, Any]) -> dict[str, Any]:
    status = str(verdict.get("status") or "undecided")
    p, margin = finite(verdict.get("p")), finite(verdict.get("margin"))
    return {
        "subject": str(verdict.get("subject") or ""),
        "status": status,
        "look": status if status in MARKS else "undecided",
        "mark": MARKS.get(status, "?"),
        "effect": neat(verdict.get("effect")),
        "interval": _interval(verdict),
        "margin": "" if margin is None else neat(margin),
        "p": "" if p is None else p_words(p),
        "why": str(verdict.get("why") or ""),
        "scope": str(verdict.get("scope") or ""),
        "parts": _parts(verdict.get("details")),
        "seeds": [],
        "under": [],
        "by_seed": "",
    }


def _parts(details: Any) -> list[dict[str, str]]:
    """What a verdict was made from, where it says so: each part with its own effect and status."""
    found = details.get("parts") if isinstance(details, Mapping) else None
    parts = [part for part in found or [] if isinstance(part, Mapping) and finite(part.get("effect")) is not None]
    return [
        {
            "name": str(p.get("name") or ""),
            "effect": neat(p["effect"]),
            "interval": _interval(p),
            "status": str(p.get("status") or ""),
        }
        for p in parts
    ]


def _interval(part: Mapping[str, Any]) -> str:
    low, high = finite(part.get("low")), finite(part.get("high"))
    return "" if low is None or high is None else f"{neat(low)} to {neat(high)}"


def common_scope(claims: Sequence[Mapping[str, Any]]) -> str:
    """What most verdicts are about: it is said once, and beside a verdict only where that is about something else."""
    scopes = Counter(row["scope"] for claim in claims for row in claim["rows"] if row["scope"])
    return scopes.most_common(1)[0][0] if scopes else ""


def verdict_counts(verdicts: Sequence[Mapping[str, Any]], random: Collection[str] = ()) -> str:
    """How many claims hold, in a sentence, and in another which could not be asked; of many subjects only in total.

    >>> verdict_counts([{"subject": "a", "status": "holds"}, {"subject": "a", "status": "fails"}])
    'Of 2 claims, 1 holds and 1 fails.'
    >>> verdict_counts([{"subject": name, "status": "holds"} for name in "abcdefg"], random=["g"])
    'Of 7 verdicts, 7 hold; without 1 on models with random weights, 6 hold.'
    """
    tested, absent = leading(measured(verdicts)), unmeasured(verdicts)
    subjects = dict.fromkeys(str(v.get("subject") or "") for v in tested)
    text = _in_total(tested, random) if len(subjects) > TELL_SUBJECTS else _by_subject(tested, list(subjects))
    sentences = [f"{text[:1].upper()}{text[1:]}."] if text else []
    return " ".join([*sentences, *([f"Not measured here: {listed(absent)}."] if absent else [])])


def _by_subject(tested: Sequence[Mapping[str, Any]], subjects: Sequence[str]) -> str:
    told = []
    for subject in subjects:
        mine = [v for v in tested if str(v.get("subject") or "") == subject]
        whose = f"for {subject}, of" if len(subjects) > 1 else "of"
        told.append(f"{whose} {plural(len(mine), 'claim')}, {status_counts(mine)}")
    return "; ".join(told)


def _in_total(tested: Sequence[Mapping[str, Any]], random: Collection[str]) -> str:
    trained = [v for v in tested if not is_random(str(v.get("subject") or ""), random)]
    text = f"of {plural(len(tested), 'verdict')}, {status_counts(tested)}"
    if not 0 < len(trained) < len(tested):
        return text
    return f"{text}; without {len(tested) - len(trained)} on models with random weights, {status_counts(trained)}"
