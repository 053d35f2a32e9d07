"""A table over training steps as lines that can be drawn.

A *learner* is what one line follows through time: a model (of one seed, in one stack). A *mark* is one row of the table
at one step. A *reading* is how the proxy was fitted and the energies averaged: every option of a variant that does not
say which proxy, rank, control or kind of gradient it is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.view.series import role_told, short_names
from anisoscope.view.words import finite, site_name

if TYPE_CHECKING:
    from anisoscope.results.table import Table
    from anisoscope.view.series import Source

STREAM = ("embed", "resid", "final")
SUBJECT_OPTIONS = ("proxy", "rank", "control", "of")  # what is measured; the other options say how
IN_SAMPLE = "in-sample"
TANGENT = ("gradient_energy", "gradient_enrichment", "gradient_ratio", "gradient_share", "gradient_isoscore_gain")
TESTS = ("gradient_p", "gradient_p_holm")
FREQUENCY = ("frequency_spread", "frequency_spread_p")
MOVEMENT = ("amplification", "proxy_overlap", "concept_turn", "concept_match")
LOOP = ("loss", "probe_loss", "gradient_norm", "learning_rate")
OWN = frozenset((*TANGENT, *TESTS, *FREQUENCY, *MOVEMENT, *LOOP))


class Site(NamedTuple):
    """A place in a model, ordered by depth; the final norm after the last block."""

    layer: int
    order: int
    kind: str

    @staticmethod
    @cache
    def of(layer: int | None, kind: str | None) -> Site:
        return Site(layer or 0, {"embed": 0, "final": 9}.get(kind or "", 1), kind or "")

    @property
    def name(self) -> str:
        return {"training": "training loop"}.get(self.kind, site_name(self.layer, self.kind))

    @property
    def short(self) -> str:
        plain = {"embed": "embed", "resid": str(self.layer), "final": "final"}
        return plain.get(self.kind, f"{self.layer} · {self.kind}")


class Mark(NamedTuple):
    """One row of the table at one step; what is not finite is None."""

    step: int
    value: float | None
    low: float | None
    high: float | None
    n: int | None
    note: str
    sd: float | None = None  # over batches, or whatever the metric says

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def inside(self) -> bool:
        """Whether the frozen proxy was fitted on a window that holds this step."""
        return IN_SAMPLE in self.note


Line = tuple[Mark, ...]


@dataclass(frozen=True)
class Learner:
    """One model as it learns."""

    index: int
    label: str
    model: str
    seed: int | None
    stack: str
    role: str  # encoder | decoder | encoder-decoder | "" where it is not known
    blocks: int


@cache
def options_of(variant: str) -> Mapping[str, str]:
    """The options of a variant.

    >>> dict(options_of("fit=refit;rank=16"))
    {'fit': 'refit', 'rank': '16'}
    """
    pairs = (part.partition("=") for part in variant.split(";") if part)
    return {key: value for key, _, value in pairs}


def variant_of(options: Mapping[str, str]) -> str:
    """The canonical string of options.

    >>> variant_of({"rank": "16", "fit": "refit"})
    'fit=refit;rank=16'
    """
    return ";".join(f"{key}={options[key]}" for key in sorted(options))


@cache
def reading_of(variant: str) -> str:
    """How a number was made, without which proxy, rank, control or gradient it is of.

    >>> reading_of("control=normal;fit=frozen;proxy=semi_nmf;rank=16")
    'fit=frozen'
    """
    return variant_of({k: v for k, v in options_of(variant).items() if k not in SUBJECT_OPTIONS})


def is_training(table: Table) -> bool:
    """Whether a table is a series over steps, or measures gradients: the training page shows it better.

    >>> from anisoscope.results.table import Table
    >>> is_training(Table.from_records([{"metric": "two_nn"}])), is_training(Table.from_records([{"step": 0}]))
    (False, True)
    """
    steps = table.arrow["step"]
    return steps.null_count < len(steps) or not OWN.isdisjoint(table.metrics())


Key = tuple[int, str, Site, str, str]  # learner, metric, site, group, variant


@dataclass
class Facets:
    """What the lines of one metric differ in."""

    keys: list[Key] = field(default_factory=list)
    sites: set[Site] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    readings: set[str] = field(default_factory=set)
    proxies: set[str] = field(default_factory=set)

    def add(self, key: Key) -> None:
        self.keys.append(key)
        self.sites.add(key[2])
        self.groups.add(key[3])
        self.readings.add(reading_of(key[4]))
        self.proxies.add(options_of(key[4]).get("proxy", ""))


class History:
    """All rows of one or several runs as lines over steps, with their learners named apart."""

    def __init__(self, sources: Sequence[Source]) -> None:
        rows = _with_stages([row for i, source in enumerate(sources) for row in _rows(source, i)])
        # one model at one moment has no steps, whatever its training log says
        measured = [row for row in rows if row.kind != "training"] or rows
        self.dated = any(row.step is not None for row in measured)
        if self.dated:
            rows = [row for row in rows if row.step is not None]
        owners = _owners(rows)
        self.learners = _learners(rows, owners, sources)
        self._of = {key: i for i, key in enumerate(dict.fromkeys(owners))}
        lines: dict[Key, dict[int, Mark]] = defaultdict(dict)
        for row, owner in zip(rows, owners, strict=True):
            key = (self._of[owner], row.metric, Site.of(row.layer, row.kind), row.group, row.variant)
            lines[key][row.step or 0] = _mark(row)
        self._lines: dict[Key, Line] = {k: tuple(m[s] for s in sorted(m)) for k, m in lines.items()}
        self._steps = sorted({m.step for key, line in self._lines.items() if key[2].kind != "training" for m in line})
        self._facets: dict[str, Facets] = defaultdict(Facets)
        for key in self._lines:
            self._facets[key[1]].add(key)
        self.rank, self.proxy = self._main("rank", ("16",)), self._main("proxy", ("semi_nmf", "pca"))
        self._chances = {learner.index: self._chance(learner) for learner in self.learners}
        self._widths = _widths(sources)

    def line(self, learner: Learner, metric: str, site: Site, variant: str = "", *, group: str = "") -> Line:
        """The marks of one line in order of steps; empty where the table has none."""
        return self._lines.get((learner.index, metric, site, group, variant), ())

    def tangent(
        self,
        learner: Learner,
        metric: str,
        site: Site,
        *,
        reading: str = "fit=refit",
        group: str = "",
        proxy: str = "",
        **also: str,
    ) -> Line:
        """A line of a tangent metric: of the main proxy at the main rank, unless another or a control is named."""
        options = {**options_of(reading), "proxy": proxy or self.proxy, "rank": self.rank, **also}
        return self.line(learner, metric, site, variant_of(options), group=group)

    def facets(self, metric: str) -> Facets:
        """What the lines of a metric differ in."""
        return self._facets[metric] if metric in self._facets else Facets()

    def keys(self, metrics: Iterable[str]) -> list[Key]:
        """Keys of all lines of these metrics."""
        return [key for metric in dict.fromkeys(metrics) for key in self.facets(metric).keys]

    def line_at(self, key: Key) -> Line:
        return self._lines[key]

    def metrics(self) -> set[str]:
        return set(self._facets)

    def geometry(self) -> set[str]:
        """Metrics that know nothing of training: what a profile shows too."""
        return {key[1] for key in self._lines if key[1] not in OWN and key[2].kind in STREAM}

    def steps(self) -> list[int]:
        """Steps at which a model was measured, beside what the loop logs at every step."""
        return self._steps

    def sites(self, metrics: Iterable[str], kinds: Sequence[str] = STREAM) -> list[Site]:
        return sorted({site for metric in metrics for site in self.facets(metric).sites if site.kind in kinds})

    def middle(self, sites: Sequence[Site]) -> int:
        """The place in a list of sites that the page opens with: the middle block of the shallowest model."""
        blocks = min((learner.blocks for learner in self.learners), default=0)
        wanted = Site.of(max(1, round(blocks / 2)), "resid")
        return list(sites).index(wanted) if wanted in sites else len(sites) // 2

    def readings(self, metrics: Iterable[str]) -> list[str]:
        """Ways in which these metrics were read off, the plainest first."""
        found = {reading for metric in metrics for reading in self.facets(metric).readings}
        return sorted(found, key=lambda r: (r.count(";"), not r.startswith("fit=refit"), r))

    def chance(self, learner: Learner) -> float | None:
        """r/d: the share of energy in a random subspace, from the table, or from the model's recorded width."""
        known = self._chances[learner.index]
        if known is not None:
            return known
        width = self._widths.get(learner.model)
        return int(self.rank) / width if width and self.rank.isdigit() else None

    def _chance(self, learner: Learner) -> float | None:
        """Energy over enrichment."""
        ratios = []
        for key in self.keys(["gradient_enrichment"]):
            if key[0] == learner.index and options_of(key[4]).get("rank") == self.rank:
                energy = self._lines.get((key[0], "gradient_energy", *key[2:]), ())
                pairs = zip(energy, self._lines[key], strict=False)
                ratios += [e.value / r.value for e, r in pairs if e.value and r.value and e.step == r.step]
        return median(ratios) if ratios else None

    def _main(self, option: str, preferred: Sequence[str]) -> str:
        """The value of an option that most rows have, or one of those that are preferred."""
        found = [options_of(key[4]) for key in self.keys(["gradient_energy"]) or self.keys([*TANGENT, "amplification"])]
        counts = Counter(options[option] for options in found if option in options and "of" not in options)
        best = counts.most_common(1)[0][0] if counts else preferred[0]
        return next((value for value in preferred if value in counts), best)


class Row(NamedTuple):
    """The columns that a page reads."""

    model: str
    step: int | None
    stack: str
    layer: int | None
    kind: str
    group: str
    metric: str
    variant: str
    value: float | None
    low: float | None
    high: float | None
    n: int | None
    seed: int | None
    note: str
    sd: float | None
    source: int


def _rows(source: Source, index: int) -> list[Row]:
    """Rows that are not per head."""
    arrow = source.table.arrow
    arrow = arrow.filter(pc.is_null(arrow["head"]))
    columns = [_column(arrow[name]) for name in Row._fields[:-1]]
    return [Row._make((*values, index)) for values in zip(*columns, strict=True)]


def _with_stages(rows: Sequence[Row]) -> list[Row]:
    """The ends of the stages of a model as its blocks, where the blocks themselves were not looked at."""
    looked = {(row.source, row.model) for row in rows if row.kind == "resid"}
    return [
        row._replace(kind="resid") if row.kind == "stage" and (row.source, row.model) not in looked else row
        for row in rows
    ]


def _column(column: pa.ChunkedArray) -> list[Any]:
    """A column as a list; strings, which repeat, by way of a dictionary."""
    if not pa.types.is_string(column.type):
        return column.to_pylist()
    encoded = column.combine_chunks().dictionary_encode()
    words = encoded.dictionary.to_pylist()
    return ["" if i is None else words[i] for i in encoded.indices.to_pylist()]


Owner = tuple[int, str, int | None, str]  # source, model, seed, stack


def _owners(rows: Sequence[Row]) -> list[Owner]:
    """Whose each row is; rows of the loop, which know neither stack nor seed, go to their model's first."""
    raw = [(r.source, r.model, r.seed, r.stack or "single") for r in rows]
    measured: dict[tuple[int, str], dict[Owner, None]] = defaultdict(dict)
    for row, owner in zip(rows, raw, strict=True):
        if row.kind != "training":
            measured[owner[:2]][owner] = None
    homes = {owner: _adopted(owner, list(measured[owner[:2]])) for owner in dict.fromkeys(raw)}
    return [homes[owner] for owner in raw]


def _adopted(owner: Owner, measured: Sequence[Owner]) -> Owner:
    if owner in measured or not measured:
        return owner
    return next((other for other in measured if other[2] == owner[2]), measured[0])


def _learners(rows: Sequence[Row], owners: Sequence[Owner], sources: Sequence[Source]) -> list[Learner]:
    depth: dict[Owner, int] = {}
    for row, owner in zip(rows, owners, strict=True):
        depth[owner] = max(depth.get(owner, 0), row.layer or 0)
    shorten = short_names({owner[1] for owner in depth})
    return [
        Learner(i, _label(key, list(depth), shorten(key[1])), key[1], key[2], key[3], _role(key, sources), blocks)
        for i, (key, blocks) in enumerate(depth.items())
    ]


def _label(key: Owner, keys: Sequence[Owner], short: str) -> str:
    """The model's short name, and of seed, stack and run only what tells it from a namesake."""
    namesakes = [k for k in keys if k[1] == key[1]]
    parts = [short or "unnamed"]
    parts += [f"seed {key[2]}"] if len({k[2] for k in namesakes}) > 1 else []
    parts += [key[3]] if len({k[3] for k in namesakes}) > 1 else []
    parts += [f"run {key[0] + 1}"] if len([k for k in namesakes if k[2:] == key[2:]]) > 1 else []
    return " · ".join(parts)


def _role(key: Owner, sources: Sequence[Source]) -> str:
    if key[3] in ("encoder", "decoder"):
        return key[3]
    return role_told(sources[key[0]].about.get("models") or [], key[1])


def _widths(sources: Sequence[Source]) -> dict[str, int]:
    entries = [e for s in sources for e in s.about.get("models") or [] if isinstance(e, Mapping)]
    return {str(e.get("name")): int(e["width"]) for e in entries if e.get("width")}


def _mark(row: Row) -> Mark:
    value = finite(row.value)
    if value is None:
        return Mark(row.step or 0, None, None, None, row.n, row.note)
    return Mark(row.step or 0, value, finite(row.low), finite(row.high), row.n, row.note, finite(row.sd))


def known(line: Iterable[Mark]) -> list[Mark]:
    """Marks that have a value."""
    return [mark for mark in line if mark.value is not None]


def last(line: Iterable[Mark]) -> Mark | None:
    """The last mark that has a value."""
    found = known(line)
    return found[-1] if found else None
