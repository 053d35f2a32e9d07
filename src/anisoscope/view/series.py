"""The long table as lines that can be drawn.

A *subject* is what one line follows through depth: a model (in one stack, run, revision, step). A *point* is one row
of the table. A *panel* is one metric: the lines that share its axes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anisoscope.view.catalogue import Catalogue, Entry
from anisoscope.view.inputs import kind_told
from anisoscope.view.words import finite, site_name

if TYPE_CHECKING:
    from anisoscope.results.table import Table

STREAM = ("embed", "resid", "final")
IDENTITY = ("model", "revision", "data", "step", "seed", "run", "path", "stack")
# Last parts of a path that say nothing about which model it is.
BLAND = re.compile(r"(model|models|weights|final|best|last|main|checkpoint.*|ckpt.*|step.*|\d*)", re.IGNORECASE)

Record = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """One line's owner."""

    index: int
    label: str
    model: str
    stack: str
    role: str  # encoder | decoder | encoder-decoder | convolution | rows | "" where it is not known
    blocks: int


@dataclass(frozen=True)
class Point:
    """One row of the table at one place."""

    layer: int
    depth: float
    kind: str
    value: float | None
    low: float | None
    high: float | None
    record: Record

    @property
    def place(self) -> str:
        return site_name(self.layer, self.kind)

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if self.low is None or self.high is None else (self.low, self.high)


@dataclass(frozen=True)
class Line:
    """Points of one subject in order of depth, `final` last."""

    subject: Subject
    points: tuple[Point, ...]
    variant: str = ""
    group: str = ""

    @property
    def body(self) -> tuple[Point, ...]:
        return tuple(p for p in self.points if p.kind != "final")

    @property
    def final(self) -> tuple[Point, ...]:
        return tuple(p for p in self.points if p.kind == "final")

    @property
    def known(self) -> tuple[Point, ...]:
        return tuple(p for p in self.points if p.value is not None)

    @property
    def blocks(self) -> tuple[Point, ...]:
        """Computed points after a block: what a statement about depth may rest on."""
        return tuple(p for p in self.known if p.kind in ("resid", "stage") and p.layer > 0)


@dataclass(frozen=True)
class Panel:
    """One metric (in one variant, at one kind of place) and its lines."""

    metric: str
    entry: Entry
    lines: tuple[Line, ...]
    variant: str = ""
    kind: str = ""  # "" = the residual stream

    @property
    def title(self) -> str:
        return " · ".join(part for part in (self.entry.title, self.kind, self.variant) if part)

    @property
    def values(self) -> list[float]:
        return [p.value for line in self.lines for p in line.known if p.value is not None]


@dataclass(frozen=True)
class Source:
    """A table with the record of the run that made it."""

    table: Table
    about: Mapping[str, Any]
    path: str = ""


class Sheet:
    """All rows of one or several runs, with their subjects named apart."""

    def __init__(self, sources: Sequence[Source], catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.records = [r | {"path": s.path, "about": s.about} for s in sources for r in s.table.records()]
        self.subjects, self._of = _name_subjects(self.records)
        self._headed = {self._head_key(r) for r in self.records if r["head"] is not None}
        self._kinds: dict[int, set[str]] = defaultdict(set)
        for record in self.records:
            if record["head"] is None:
                self._kinds[self.subject(record).index].add(record["kind"])
        self._stream: dict[tuple[int, str, str], list[Record]] = defaultdict(list)
        for record in self.stream():
            key = (self.subject(record).index, record["metric"], record["variant"] or "")
            self._stream[key].append(record)

    def subject(self, record: Record) -> Subject:
        return self.subjects[self._of[_identity(record)]]

    def _head_key(self, record: Record) -> tuple[int, str, str, str]:
        return self.subject(record).index, record["metric"], record["kind"], record["variant"] or ""

    def per_head(self, record: Record) -> bool:
        """Whether a row is of one head, or is the mean over heads of such rows."""
        return record["head"] is not None or self._head_key(record) in self._headed

    def in_stream(self, record: Record) -> bool:
        """Whether a row belongs to the main profile; a source without a residual stream is all profile."""
        if record["head"] is not None:
            return False
        kinds = self._kinds[self.subject(record).index]
        if record["kind"] == "stage":  # stages stand for the blocks where those were not looked at
            return "resid" not in kinds
        return record["kind"] in STREAM or not kinds.intersection(STREAM)

    def stream(self, group: str = "") -> list[Record]:
        return [r for r in self.records if (r["group"] or "") == group and self.in_stream(r)]

    def metrics(self) -> list[str]:
        return self.catalogue.ordered({r["metric"] for r in self.records})

    def panels(self) -> list[Panel]:
        """One panel per metric of the residual stream, the main ones first."""
        return self._panels(self.stream())

    def panels_elsewhere(self) -> list[Panel]:
        """Panels of the other sites that are not per head, by kind."""
        rows = [r for r in self.records if not r["group"] and not self.per_head(r)]
        away = [r for r in rows if not self.in_stream(r)]
        kinds = dict.fromkeys(r["kind"] for r in away)
        return [p for kind in kinds for p in self._panels([r for r in away if r["kind"] == kind], kind=kind)]

    def group_panels(self) -> list[Panel]:
        """For each subject and metric: a line per group of contexts."""
        rows = [r for r in self.records if r["group"] and self.in_stream(r) and not (r["variant"] or "")]
        found = []
        for metric in self.catalogue.ordered({r["metric"] for r in rows}):
            for subject in self.subjects:
                mine = [r for r in rows if r["metric"] == metric and self.subject(r) is subject]
                lines = [self._line(subject, part, group=name) for name, part in _split(mine, "group").items()]
                if lines:
                    found.append(Panel(metric, self.catalogue.entry(metric), tuple(lines)))
        return found

    def line(self, subject: Subject, metric: str, variant: str = "") -> Line | None:
        """The residual-stream line of one subject, or None where the table has none."""
        mine = self._stream.get((subject.index, metric, variant))
        return self._line(subject, mine, variant=variant) if mine else None

    def _panels(self, rows: list[Record], kind: str = "") -> list[Panel]:
        by_metric = _split(rows, "metric")
        found = []
        for metric in self.catalogue.ordered(by_metric):
            found += self._metric_panels(metric, by_metric[metric], kind)
        return found

    def _metric_panels(self, metric: str, rows: list[Record], kind: str) -> list[Panel]:
        """The default and its dashed twin share a panel; other variants have a scale, so a panel, of their own."""
        entry = self.catalogue.entry(metric)
        variants = dict.fromkeys(_base(r["variant"]) for r in rows)
        owners = {self.subject(r).index for r in rows}
        if "" not in variants and len(owners) == 1:
            return [Panel(metric, entry, self._lines(rows), kind=kind)]
        return [
            Panel(metric, entry, self._lines([r for r in rows if _base(r["variant"]) == v]), variant=v, kind=kind)
            for v in variants
        ]

    def _lines(self, rows: list[Record]) -> tuple[Line, ...]:
        parts: dict[tuple[int, str], list[Record]] = defaultdict(list)
        for row in rows:
            parts[self.subject(row).index, row["variant"] or ""].append(row)
        return tuple(self._line(self.subjects[i], part, variant=v) for (i, v), part in sorted(parts.items()))

    def _line(self, subject: Subject, rows: Iterable[Record], *, variant: str = "", group: str = "") -> Line:
        points = [make_point(r, blocks=subject.blocks) for r in rows]
        points.sort(key=lambda p: (p.layer, p.kind == "final"))
        return Line(subject, tuple(points), variant, group)


def make_point(record: Record, *, blocks: int) -> Point:
    """A row of the table as a point; what is not finite becomes None."""
    layer = record["layer"] or 0
    depth = finite(record.get("depth"))
    value = finite(record["value"])
    return Point(
        layer=layer,
        depth=layer / max(1, blocks) if depth is None else depth,
        kind=record["kind"] or "",
        value=value,
        low=finite(record["low"]) if value is not None else None,
        high=finite(record["high"]) if value is not None else None,
        record=record,
    )


def without_first(variant: str | None) -> bool:
    """Whether a variant leaves the first position out: drawn dashed, beside the line that keeps it."""
    return "first=out" in (variant or "").split(";")


def _base(variant: str | None) -> str:
    return ";".join(part for part in (variant or "").split(";") if part and part != "first=out")


def _split(rows: Iterable[Record], column: str) -> dict[str, list[Record]]:
    parts: dict[str, list[Record]] = defaultdict(list)
    for row in rows:
        parts[row[column] or ""].append(row)
    return dict(parts)


def _identity(record: Record) -> tuple[Any, ...]:
    return tuple(record.get(column) for column in IDENTITY)


def _name_subjects(records: Sequence[Record]) -> tuple[list[Subject], dict[tuple[Any, ...], int]]:
    depth: dict[tuple[Any, ...], int] = {}
    about: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for record in records:
        key = _identity(record)
        depth[key] = max(depth.get(key, 0), record["layer"] or 0)
        about.setdefault(key, record["about"])
    keys = list(depth)
    shorten = short_names({key[0] or "" for key in keys})
    subjects = [
        Subject(i, _label(key, keys, shorten), key[0] or "", key[-1] or "single", _role(key, about[key]), depth[key])
        for i, key in enumerate(keys)
    ]
    return subjects, {key: i for i, key in enumerate(keys)}


def _label(key: tuple[Any, ...], keys: Sequence[tuple[Any, ...]], shorten: Callable[[str], str]) -> str:
    """The model's short name, and of the other columns only those that tell it from a namesake."""
    namesakes = [k for k in keys if k[0] == key[0]]
    parts = [shorten(key[0] or "") or "unnamed"]
    for i, column in enumerate(IDENTITY[1:], start=1):
        if len({k[i] for k in namesakes}) > 1 and key[i] not in (None, "") and not _told_apart(namesakes, i):
            parts.append(f"{column} {key[i]}" if column in ("step", "seed") else str(key[i]))
    return " · ".join(parts)


def _told_apart(keys: Sequence[tuple[Any, ...]], i: int) -> bool:
    """Whether earlier columns already separate these keys wherever column i differs."""
    if IDENTITY[i] == "stack":
        return False
    heads: dict[tuple[Any, ...], set[Any]] = defaultdict(set)
    for key in keys:
        heads[key[:i]].add(key[i])
    return all(len(values) == 1 for values in heads.values())


def short_names(models: Iterable[str]) -> Callable[[str], str]:
    """A function that shortens paths and hub ids, as far as the names stay apart.

    >>> shorten = short_names(["org/pythia-160m", "runs/a/model", "x/bert", "y/bert"])
    >>> [shorten(n) for n in ("org/pythia-160m", "runs/a/model", "x/bert")]
    ['pythia-160m', 'a/model', 'x/bert']
    """
    names = list(models)
    brief = {name: _last_part(name) for name in names}
    taken = list(brief.values())
    return lambda name: brief[name] if name in brief and taken.count(brief[name]) == 1 else name


def _last_part(name: str) -> str:
    if "<" in name:  # no path; showing half of a tag would be worse than showing all of it
        return name
    parts = name.replace("\\", "/").rstrip("/").split("/")
    return "/".join(parts[-2:]) if BLAND.fullmatch(parts[-1]) else parts[-1]


def _role(key: tuple[Any, ...], about: Mapping[str, Any]) -> str:
    if key[-1] in ("encoder", "decoder"):
        return str(key[-1])
    return role_told(about.get("models") or [], key[0])


def role_told(entries: Iterable[Any], model: str) -> str:
    """What a run says of a model of one stack: encoder, decoder, or convolution, which is neither."""
    mine = [entry for entry in entries if isinstance(entry, Mapping) and entry.get("name") == model]
    return kind_told(mine[0]) if mine else ""
