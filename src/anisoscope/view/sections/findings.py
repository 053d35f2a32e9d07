"""Findings as sentences: the summary of a profile, and verdicts on claims as tables and counts.

Sentences are made from values and their intervals: two values are called different only if their intervals do not
overlap; layers of one model are not independent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from anisoscope.results.quantity import Quantity, mean, mean_of
from anisoscope.results.query import FIRST_OUTLIER, Row
from anisoscope.view.page import PageFinding
from anisoscope.view.subjects import About, ProfileRows, Subject, known, random_models, short_names
from anisoscope.view.words import (
    Catalogue,
    estimate,
    finite,
    listed,
    neat,
    number,
    plural,
    shortened,
    site_phrase,
    spans,
)

BIASED_ABOVE = 15  # TwoNN at 4096 rows: true 20 reads 17.6, true 50 reads 33.7
FEW_CONTEXTS = 30
NEAR_COPIES = "near-copies or noise decide"  # the note of metrics/engine/estimation.py
COMPARED = ("average_cosine", "two_nn", "participation_ratio")
TELL_EACH = 3  # with more subjects the page compares them instead of describing each


def find(rows: ProfileRows, catalogue: Catalogue) -> list[PageFinding]:
    """All findings of a profile, most important first."""
    direction, scale = (
        _each(rows, _cosine),
        "An average cosine of 0 means directions spread evenly, 1 a single direction.",
    )
    findings = {
        "Direction": [*direction, scale] if direction else [],
        "Spread": _each(rows, _dominance),
        "Dimension": _each(rows, _dimension),
        "Comparison": _comparison(rows, catalogue),
        "First position": _first_position(rows, catalogue),
        "Attention": _each(rows, _attention),
        "Weights": _random_weights(rows.abouts),
        "Caution": _caution(rows),
    }
    # No line break between a value and its interval.
    whole = {topic: tuple(text.replace(" ± ", "\u00a0±\u00a0") for text in texts) for topic, texts in findings.items()}
    return [PageFinding(topic, texts) for topic, texts in whole.items() if texts]


def profile_headline(rows: ProfileRows, catalogue: Catalogue) -> str:
    """The finding of a profile in one sentence: how alike the directions of rows are over depth, or between models."""
    first = rows.subjects[0] if rows.subjects else None
    if len(rows.subjects) > 1:
        told = _comparison(rows, catalogue)
        return told[0] if told else ""
    line = _body(rows.line(first, "average_cosine")) if first else []
    if len(line) < 2:
        told = [text for finding in find(rows, catalogue) for text in finding.texts if finding.topic != "Caution"]
        return told[0] if told else ""
    low, high = min(line, key=VALUE), max(line, key=VALUE)
    spread = f"{number(line[0].value, 2)} {site_phrase(line[0].layer, line[0].kind)}"
    if not apart(low, high):
        alike = f"are equally alike in direction at every layer: average cosine {number(low.value, 2)}"
        return f"Rows of {first.label} {alike} to {number(high.value, 2)}." if first else ""
    end = line[-1] if high in (line[0], line[-1]) else high
    way = "ever more" if end.value > line[0].value else "ever less"
    peak = "" if end is line[-1] else " up to a peak"
    where = f"{number(end.value, 2)} {site_phrase(end.layer, end.kind)}"
    return f"Rows of {first.label} point {way} the same way{peak}: average cosine {spread}, {where}." if first else ""


def _each(rows: ProfileRows, tell_one: Callable[[ProfileRows, Subject], str]) -> list[str]:
    """A text for each subject, after its name if there are several; none if they would be too many."""
    texts = {subject.label: text for subject in rows.subjects if (text := tell_one(rows, subject))}
    if len(rows.subjects) == 1:
        return [text[:1].upper() + text[1:] for text in texts.values()]
    return [f"{label}: {text}" for label, text in texts.items()] if len(texts) <= TELL_EACH else []


def apart(a: Row, b: Row) -> bool:
    """Whether the intervals of two points do not overlap; False without intervals."""
    return bool(a.interval and b.interval and (a.interval[1] < b.interval[0] or b.interval[1] < a.interval[0]))


def tell(point: Row) -> str:
    """A value with its interval and site as text."""
    return f"{estimate(point.value, point.low, point.high)} {site_phrase(point.layer, point.kind)}"


VALUE = attrgetter("value")


def _body(line: Sequence[Row]) -> list[Row]:
    """The points before the final norm."""
    return [row for row in known(line) if row.kind != "final"]


def block_rows(line: Sequence[Row]) -> list[Row]:
    """The points after a block, on which statements about depth are based."""
    return [row for row in known(line) if row.kind in ("resid", "stage") and (row.layer or 0) > 0]


def course(points: Sequence[Row]) -> str:
    """The course of a line as text: rising, falling, with a peak or a trough, or level."""
    first, last = points[0], points[-1]
    high, low = max(points, key=VALUE), min(points, key=VALUE)
    if not apart(high, low):
        ends = f"between {number(low.value)} and {number(high.value)}"
        return f"stays {ends} over the layers, a range that the intervals cannot tell from no change"
    for extreme, there, back in ((high, "up", "down"), (low, "down", "up")):
        if extreme not in (first, last) and apart(extreme, first) and apart(extreme, last):
            return f"goes from {tell(first)} {there} to {tell(extreme)} and {back} to {tell(last)}"
    between = f"from {tell(first)} to {tell(last)}"
    if not apart(first, last):
        return f"runs {between}, with its lowest value {tell(low)} and its highest {tell(high)}"
    verb, word, extreme = ("rises", "highest", high) if last.value > first.value else ("falls", "lowest", low)
    return f"{verb} {between}" + ("" if extreme is last else f" ({word}: {tell(extreme)})")


def _cosine(rows: ProfileRows, subject: Subject) -> str:
    line = rows.line(subject, "average_cosine")
    points = _body(line)
    if not points:
        return ""
    text = f"average cosine {course(points) if len(points) > 1 else f'is {tell(points[0])}'}."
    final = [row for row in known(line) if row.kind == "final" and apart(row, points[-1])]
    return text + "".join(f" The final norm changes it to {estimate(row.value, row.low, row.high)}." for row in final)


def _dominance(rows: ProfileRows, subject: Subject) -> str:
    ratio, spread = (_body(rows.line(subject, m)) for m in ("svd_ratio", "participation_ratio"))
    if not ratio:
        return ""
    top = max(ratio, key=VALUE)
    size, where = estimate(top.value, top.low, top.high), site_phrase(top.layer, top.kind)
    text = f"the largest singular value of the centred rows is at most {size} of the sum of all ({where})"
    if len(spread) > 1:
        low, high = min(spread, key=VALUE), max(spread, key=VALUE)
        text += f"; the participation ratio lies between {tell(low)} and {tell(high)}"
        entries = rows.abouts[subject.source].get("models") or []
        width = next((m.get("width") for m in entries if m.get("name") == subject.model), None)
        text += f", of {int(width):,} possible directions" if width else ""
    return text + "."


def doubtful(point: Row) -> bool:
    """Whether the table notes that near-copies or noise dominate a dimension (two scales give different estimates)."""
    return NEAR_COPIES in point.note


def _dimension(rows: ProfileRows, subject: Subject) -> str:
    """A sentence on the reliable dimensions, and one on the places of the unreliable ones."""
    line = _body(rows.line(subject, "two_nn"))
    points, left = ([point for point in line if doubtful(point) is doubt] for doubt in (False, True))
    places = [*(["the embedding"] if any(point.kind == "embed" for point in left) else [])]
    places += _blocks([point.layer for point in left if point.kind != "embed"])
    aside = f" Not counted: {listed(places)}, where two scales disagree: near-copies or noise decide." if left else ""
    if not points:
        return f"no intrinsic dimension (TwoNN) can be told.{aside}" if left else ""
    low, high = min(points, key=VALUE), max(points, key=VALUE)
    text = f"is {tell(low)}." if low is high else f"lies between {tell(low)} and {tell(high)}."
    if low is not high and not apart(low, high):
        ends = f"{number(low.value)} and {number(high.value)}"
        text = f"lies between {ends}; the intervals do not tell the layers apart."
    bias = f" TwoNN is biased low above about {BIASED_ABOVE} at 4,096 rows, so the larger values understate."
    return f"the intrinsic dimension (TwoNN) {text}{bias if high.value > BIASED_ABOVE - 3 else ''}{aside}"


def _blocks(layers: Sequence[int]) -> list[str]:
    return [f"block{'s' if len(layers) > 1 else ''} {spans(layers)}"] if layers else []


@dataclass(frozen=True)
class BlockMean:
    """A mean over the blocks of one subject, with a jackknife interval if the table has replicates."""

    subject: Subject
    value: float
    low: float | None
    high: float | None
    doubtful: bool = False  # whether the value of a block is

    @property
    def text(self) -> str:
        return estimate(self.value, self.low, self.high) + (" ?" if self.doubtful else "")


def mean_over_blocks(
    rows: ProfileRows, catalogue: Catalogue, subject: Subject, metric: str, *, without: bool = False
) -> BlockMean | None:
    """A metric's mean over blocks 1..L with its jackknife interval, clipped to the metric's bounds, as in the claims.

    `without`: leave out the first position where that was measured. None if the table has no such line or no blocks.
    """
    line = rows.line(subject, metric)
    if without:
        left = rows.line(subject, metric, "first=out")
        better = {(row.layer, row.kind): row for row in known(left)}
        line = [better.get((row.layer, row.kind), row) for row in line] if left else []
    blocks = block_rows(line)
    if not blocks:
        return None
    whole = mean([Quantity(row.value, row.folds) for row in blocks])
    (low, high), (least, most) = map(finite, whole.interval()), catalogue.entry(metric).bounds
    low = max(low, least) if low is not None and least is not None else low
    high = min(high, most) if high is not None and most is not None else high
    return BlockMean(subject, whole.value, low, high, any(map(doubtful, blocks)))


def _comparison(rows: ProfileRows, catalogue: Catalogue) -> list[str]:
    texts = []
    for metric in COMPARED if len(rows.subjects) > 1 else ():
        means = [m for s in rows.subjects if (m := mean_over_blocks(rows, catalogue, s, metric)) and not m.doubtful]
        if len(means) < 2:
            continue
        ranked = sorted(means, key=lambda m: -m.value)
        owners = [(m.subject.label, m.subject.role) for m in ranked]
        named = [f"{label} ({role})" if role and not label.endswith(role) else label for label, role in owners]
        each = [f"{m.text} in {name}" for m, name in zip(ranked, named, strict=True)]
        values = f"runs from {each[-1]} to {each[0]}" if len(each) > TELL_EACH else f"is {listed(each)}"
        least, most = ranked[0].low, ranked[-1].high
        overlap = "" if least is not None and most is not None and least > most else "; the intervals overlap"
        aside = " (no interval for this average)" if least is None or most is None else overlap
        texts.append(f"{catalogue.entry(metric).title}, averaged over blocks, {values}{aside}.")
    if texts and {"encoder", "decoder"} <= {s.role for s in rows.subjects}:
        texts.append(
            "A difference between these models is not one between encoders and decoders: that takes several of each."
        )
    return texts


def _first_position(rows: ProfileRows, catalogue: Catalogue) -> list[str]:
    clauses = []
    metrics = ["average_cosine", *catalogue.ordered(rows.metrics())]
    for subject in rows.subjects:
        without = next((line for metric in metrics if (line := rows.line(subject, metric, "first=out"))), [])
        if not without:
            continue
        # both variants are in the table for all layers of a stack; only the note marks an outlier
        found = [row for row in without if FIRST_OUTLIER in row.note] or without
        places = _blocks([row.layer for row in found if row.kind == "resid"])
        ends = {"embed": "the embedding", "final": "the final norm"}
        places += [words for kind, words in ends.items() if any(row.kind == kind for row in found)]
        clauses.append(f"in {subject.label} at {listed(places)}{_effect(rows, catalogue, subject)}")
    text = f"The first position is an outlier {'; '.join(clauses)}."
    return [text + " Numbers are given with it (solid) and without it (dashed)."] if clauses else []


def _effect(rows: ProfileRows, catalogue: Catalogue, subject: Subject) -> str:
    """A sentence on the largest effect of leaving the first position out, over measures and layers."""
    for metric in ("svd_ratio", "average_cosine"):
        kept = {(row.layer, row.kind): row for row in known(rows.line(subject, metric))}
        left = known(rows.line(subject, metric, "first=out"))
        pairs = [(kept[row.layer, row.kind], row) for row in left if (row.layer, row.kind) in kept]
        if pairs:
            a, b = max(pairs, key=lambda pair: abs(pair[0].value - pair[1].value))
            title, where = catalogue.entry(metric).title, site_phrase(a.layer, a.kind)
            return f" ({title} {where}: {number(a.value)} with it, {number(b.value)} without)"
    return ""


def _attention(rows: ProfileRows, subject: Subject) -> str:
    """A sentence on how many heads are sharp, and where the first key has the most weight."""
    heads = rows.of(subject, kind="scores", variant="", group="", head=...).known()
    sharpness, clauses = heads.where(metric="attention_sharpness").numbers(), []
    if len(sharpness):
        clauses.append(f"{(sharpness > 0.5).sum()} of {len(sharpness)} heads have a sharpness above 0.5")
    layers = heads.where(metric="first_key_mass").groups("layer")
    if layers:
        mass, layer = max((mean_of(part.numbers()), -layer) for layer, part in layers.items())
        size = number(mass, 2)
        clauses.append(f"the first key takes up to {size} of the attention (block {-layer}, mean over heads)")
    return ", and ".join(clauses) + "." if clauses else ""


def _random_weights(abouts: Sequence[About]) -> list[str]:
    """A sentence on models with random weights: all of them, or some by name."""
    names, count = random_models(abouts)
    shorten = short_names(dict.fromkeys(names))
    owners = f" of {listed([shorten(name) for name in dict.fromkeys(names)])}" if len(names) < count else ""
    text = f"The weights{owners} are random: this is the geometry of the architecture, not of anything learned."
    return [text] if names else []


def _caution(rows: ProfileRows) -> list[str]:
    sentences = []
    counts = [n for n in rows.query.where(group="").values("contexts") if n]
    if counts and min(counts) < FEW_CONTEXTS:
        sentences.append(f"Intervals resample contexts; the fewest here are {min(counts)}: they are rough themselves.")
    for model in (model for about in rows.abouts for model in about.get("models") or []):
        count, width = model.get("row_count", model.get("rows")), model.get("width")
        if isinstance(count, int) and width and 0 < count < 10 * width:
            gave = f"{model.get('name', 'one model')} gave {plural(count, 'row')} for width {width:,}"
            sentences.append(f"{gave}: below ten rows per dimension spectra are not settled.")
    if missing := len(rows.query) - len(rows.query.known()):
        reasons = "the reasons are listed under “Dropped, warned about, not computed”."
        sentences.append(f"{plural(missing, 'value')} of {len(rows.query):,} could not be computed; {reasons}")
    return [" ".join(sentences)] if sentences else []


MARKS = {"holds": "✓", "fails": "✕", "undecided": "?"}  # beside the word, so that colour is not needed
COUNTED = {"holds": ("holds", "hold"), "fails": ("fails", "fail"), "undecided": ("is undecided", "are undecided")}


def is_random(subject: str, random: Collection[str]) -> bool:
    """Whether the subject of a verdict is a model with random weights, or one of its stacks.

    >>> is_random("t5, decoder stack", ["t5"]), is_random("t5-small", ["t5"])
    (True, False)
    """
    return any(subject == name or subject.startswith(f"{name}, ") for name in random)


def status_counts(rows: Sequence[Mapping[str, Any]]) -> str:
    """The numbers of verdicts that hold, fail and are undecided, as text.

    >>> status_counts([{"status": "holds"}, {"status": "undecided"}, {"status": "undecided"}])
    '1 holds and 2 are undecided'
    """
    counts = Counter(str(row.get("status") or "undecided") for row in rows)
    return listed([f"{counts[s]} {words[counts[s] != 1]}" for s, words in COUNTED.items() if counts[s]])


def leading(verdicts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Verdicts over all seeds, and single-seed verdicts where there is none over all seeds.

    >>> over = {"claim": "a", "subject": "x", "details": {"pooled": True}}
    >>> leading([over, {"claim": "a", "subject": "x"}, {"claim": "a", "subject": "y"}])[1:]
    [{'claim': 'a', 'subject': 'y'}]
    """
    pooled = [verdict for verdict in verdicts if _detail(verdict, "pooled")]
    return [v for v in verdicts if _detail(v, "pooled") or not any(_same(v, over) for over in pooled)]


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return (one.get("claim"), one.get("subject")) == (other.get("claim"), other.get("subject"))


def _detail(verdict: Mapping[str, Any], name: str) -> Any:
    return (verdict.get("details") or {}).get(name)


def measured(verdicts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The verdicts on claims that were measured."""
    return [verdict for verdict in verdicts if not _detail(verdict, "missing")]


def unmeasured(verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The claims that were not measured; for a claim tested on some subjects only, with a few of the others.

    >>> unmeasured([{"claim": "a", "subject": "x", "details": {"missing": True}}, {"claim": "a", "subject": "y"}])
    ['a (x)']
    """
    tested = {str(verdict.get("claim")) for verdict in measured(verdicts)}
    found: dict[str, dict[str, None]] = {}
    for verdict in verdicts:
        if _detail(verdict, "missing"):
            found.setdefault(str(verdict.get("claim")), {})[str(verdict.get("subject") or "")] = None
    return [f"{claim} ({shortened(list(who))})" if claim in tested else claim for claim, who in found.items()]


def _interval(part: Mapping[str, Any]) -> str:
    low, high = finite(part.get("low")), finite(part.get("high"))
    return "" if low is None or high is None else f"{neat(low)} to {neat(high)}"


# -- the grid of claims × models ---------------------------------------------------------------------------------------

LEVEL = 0.05  # of the error over the whole grid
ALONE = "alone, not over the grid"


def stands(verdict: Mapping[str, Any]) -> bool | None:
    """Whether a decided verdict stands when all of the grid are counted; None outside of it and where it is open.

    >>> stands({"status": "holds", "p_holm": 0.2}), stands({"status": "undecided", "p_holm": 1.0})
    (False, None)
    """
    p = finite(verdict.get("p_holm"))
    return None if p is None or verdict.get("status") == "undecided" else p <= LEVEL


def grid_words(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """A sentence on how many verdicts stand after correction over the grid; empty without corrected ones.

    >>> grid_words([{"status": "holds", "p_holm": 0.01, "q": 0.02}, {"status": "undecided", "p_holm": 1.0, "q": 1.0}])
    'The 1 decided verdict stands after correction over the grid of 2 (Holm).'
    """
    grid = [v for v in verdicts if finite(v.get("p_holm")) is not None]
    decided = [v for v in grid if stands(v) is not None]
    if len(grid) < 2 or not decided:
        return ""
    standing = sum(stands(v) is True for v in decided)
    over = f"after correction over the grid of {len(grid)} (Holm)"
    if standing == len(decided):
        every = "The 1 decided verdict stands" if standing == 1 else f"All {standing} decided verdicts stand"
        return f"{every} {over}."
    rate = sum((finite(v.get("q")) or 0.0) <= LEVEL for v in decided)
    verb = "stands" if standing == 1 else "stand"
    at_rate = f"{rate} at a false discovery rate of 5 % (Benjamini–Yekutieli)"
    return f"Of {plural(len(decided), 'decided verdict')} {standing} {verb} {over}, {at_rate}."


# -- the same verdicts under other choices -----------------------------------------------------------------------------

NAMED_KINDS = ("rank", "half", "split")  # their badges are numbers and need the name of what they are


def badge_groups(verdict: Mapping[str, Any]) -> list[tuple[str, list[dict[str, str]]]]:
    """The badges of a verdict by kind: (name of the kind where its badges need one, badges)."""
    groups: dict[str, list[dict[str, str]]] = {}
    for badge in (_detail(verdict, "robust") or {}).get("badges") or []:
        status = str(badge.get("status") or "undecided")
        known = int(badge.get("parts") or 0) - len(badge.get("lacking") or ())
        part = f" ({known}/{badge['parts']})" if badge.get("lacking") else ""
        words = {"name": f"{badge['name']}{part}", "status": status, "mark": MARKS.get(status, "?")}
        words["title"] = (
            f"{status} {badge['phrase']}: {neat(badge.get('effect'))} ({_interval(badge) or 'no interval'})"
        )
        groups.setdefault(str(badge["kind"]), []).append(words)
    return [(kind if kind in NAMED_KINDS else "", badges) for kind, badges in groups.items()]


def badge_line(verdict: Mapping[str, Any]) -> str:
    """The badges of a verdict as one line, which breaks only between badges.

    >>> badge = {"kind": "rank", "name": "8", "status": "holds", "phrase": "with rank 8"}
    >>> badge_line({"details": {"robust": {"badges": [badge]}}}).replace("\u00a0", " ")
    'rank 8 ✓'
    """
    lines = []
    for kind, badges in badge_groups(verdict):
        marks = [f"{badge['name']} {badge['mark']}".replace(" ", "\u00a0") for badge in badges]
        lines.append(f"{kind}\u00a0{' '.join(marks)}" if kind else " ".join(marks))
    return " · ".join(lines)


def robust_words(verdict: Mapping[str, Any]) -> str:
    """The summary of the badges, and how many kinds of alternatives were not measured."""
    found = _detail(verdict, "robust") or {}
    missing = len(found.get("missing") or ())
    return str(found.get("words") or "") + (f" ({missing} not measured)" if missing else "")


def not_measured(verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The kinds of alternatives that were not measured for some verdict."""
    kinds = [kind for verdict in verdicts for kind in (_detail(verdict, "robust") or {}).get("missing") or ()]
    return list(dict.fromkeys(kinds))
