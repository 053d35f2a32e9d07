"""The subjects of figures: models of some runs with unique labels, and their rows over depth or over steps.

A *subject* owns one line of a figure: a model in one stack and, where names collide, one seed, run, revision or step.
Rows are those of `results.query` with two additional fields: `subject` (its index) and `place` (the kind of site;
stages count as blocks if no blocks were measured).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from anisoscope.results.folder import MappedSite
from anisoscope.results.modality import modality_in
from anisoscope.results.privacy import name_of
from anisoscope.results.query import Query, Row, Table, options_of
from anisoscope.view.words import LOOP, is_module, site_name

STREAM = ("embed", "resid", "final")


def in_stream(kind: str) -> bool:
    """Whether a site is one of the residual stream, or of the modules that a user named in its place."""
    return kind in STREAM or is_module(kind)


APART = ("model", "revision", "data", "step", "seed", "run", "source", "stack")  # key of a profile's subject
# Last parts of a path that do not identify a model.
BLAND = re.compile(r"(model|models|weights|final|best|last|main|checkpoint.*|ckpt.*|step.*|\d*)", re.IGNORECASE)
MARKERS = {"decoder": "square", "encoder": "circle", "encoder-decoder": "circle", "rows": "diamond"}
About = Mapping[str, Any]


@dataclass(frozen=True)
class RunView:
    """The data of one run for a page, without models or tensors.

    `spectra`: eigenvalues (descending) by site, such as `3.resid` or `encoder.3.resid`, prefixed with `MODEL/` if a run
    has several models. `cka`: for each model the names of its layers and the CKA matrix. `verdicts`, `concepts` and
    `map`: contents of `verdicts.json`, `concepts.json` and `map.parquet`.
    """

    table: Table
    about: dict[str, Any] = field(default_factory=dict)
    spectra: Mapping[str, np.ndarray] = field(default_factory=dict)
    cka: Mapping[str, tuple[Sequence[str], np.ndarray]] | None = None
    path: str = ""
    verdicts: Sequence[Mapping[str, Any]] = ()
    concepts: Sequence[Mapping[str, Any]] = ()
    map: Sequence[MappedSite] = ()


@dataclass(frozen=True)
class Subject:
    """The owner of one line in figures: a model in one stack."""

    index: int
    label: str
    model: str
    stack: str
    role: str  # encoder | decoder | encoder-decoder | convolution | rows | "" = unknown
    blocks: int
    seed: int | None = None
    source: int = 0

    @property
    def line(self) -> int:
        """The index of its entry in the page's legend."""
        return self.index

    @property
    def marker(self) -> str:
        return MARKERS.get(self.role, "circle")


class DrawnSite(NamedTuple):
    """A site in a model, sorted by depth; the final norm comes after the last block."""

    layer: int
    order: int
    kind: str

    @staticmethod
    def of(layer: int | None, kind: str | None) -> DrawnSite:
        return DrawnSite(layer or 0, {"embed": 0, "final": 9}.get(kind or "", 1), kind or "")

    @property
    def name(self) -> str:
        return {"training": "training loop"}.get(self.kind, site_name(self.layer, self.kind))

    @property
    def short(self) -> str:
        plain = {"embed": "embed", "resid": str(self.layer), "stage": str(self.layer), "final": "final"}
        own = self.kind if is_module(self.kind) else f"{self.layer} · {self.kind}"
        return plain.get(self.kind, own)


class LineKey(NamedTuple):
    """The key of one line over steps; `group` and `variant` are as in the table."""

    subject: int
    metric: str
    site: DrawnSite
    group: str
    variant: str


class RunRows:
    """The rows of one or several runs, tagged with their subjects."""

    def __init__(self, runs: Sequence[RunView], *, by: Sequence[str] = APART, **only: Any) -> None:
        self.runs = runs
        self.abouts: list[About] = [run.about for run in runs]
        self.query = Query(*(run.table for run in runs)).where(**only)
        self.by = tuple(by)
        self.subjects = self._subjects()
        # stages count as blocks for subjects without measured blocks
        with_blocks = set(self.query.where(kind="resid", head=None).groups("subject"))
        pairs = [(row.kind, row["subject"]) for row in self.query]
        self.query.tagged("place", ["resid" if k == "stage" and s not in with_blocks else k for k, s in pairs])

    def _subjects(self) -> list[Subject]:
        """Create the subjects of all rows, and tag the rows with their indices."""
        groups = self.query.groups(*self.by)
        merged: dict[tuple[Any, ...], list[Query]] = {}
        for key, rows in groups.items():
            merged.setdefault(self._owner(key, groups), []).append(rows)
        shorten = short_names({key[0] or "" for key in merged})
        subjects, codes = [], np.full(sum(len(run.table) for run in self.runs), -1, dtype=np.int64)
        for i, (key, parts) in enumerate(merged.items()):
            blocks = max((int(x) for rows in parts for x in rows.numbers("layer") if math.isfinite(x)), default=0)
            columns = dict(zip(self.by, key, strict=True))
            stack, role, source = columns["stack"] or "single", columns["stack"], columns["source"]
            if role not in ("encoder", "decoder"):  # a model of one stack: its role is in run.json
                entries = model_entries(self.abouts[source : source + 1])
                role = next((role_of(entry) for entry in entries if entry.get("name") == key[0]), "")
            label = self._label(key, [other for other in merged if other[0] == key[0]], shorten(key[0] or ""))
            subjects.append(Subject(i, label, key[0] or "", stack, role, blocks, columns.get("seed"), source))
            for rows in parts:
                codes[rows.positions] = i
        self.query.tagged("subject", codes[self.query.positions].tolist())
        return subjects

    def _owner(self, key: tuple[Any, ...], groups: Mapping[tuple[Any, ...], Query]) -> tuple[Any, ...]:
        return key

    def _label(self, key: tuple[Any, ...], namesakes: Sequence[tuple[Any, ...]], name: str) -> str:
        """The model's short name, followed by those columns that distinguish it from subjects of the same name."""
        parts = [name or "unnamed"]
        for i, column in enumerate(self.by[1:], start=1):
            differ = len({k[i] for k in namesakes}) > 1 and key[i] not in (None, "")
            # whether this column separates subjects that earlier columns do not
            needed = len({k[: i + 1] for k in namesakes}) > len({k[:i] for k in namesakes})
            if differ and (column == "stack" or needed):
                words = {"step": f"step {key[i]}", "seed": f"seed {key[i]}"}
                if column == "source":
                    words["source"] = self._run_names[key[i]]
                parts.append(words.get(column) or str(key[i]))
        return " · ".join(parts)

    @cached_property
    def _run_names(self) -> list[str]:
        """The last parts of the paths of the runs, numbered where they are not unique or not known."""
        names = [name_of(run.path) if run.path else "" for run in self.runs]
        shared = Counter(names)
        numbered = [f"{name}, run {i}" if name else f"run {i}" for i, name in enumerate(names, start=1)]
        return [name if name and shared[name] == 1 else long for name, long in zip(names, numbered, strict=True)]

    def of(self, subject: Subject, **fields: Any) -> Query:
        """Rows of a subject."""
        return self.query.where(subject=subject.index, **fields)


class ProfileRows(RunRows):
    """Rows of profiles: models at one step, over depth."""

    @cached_property
    def streams(self) -> dict[int, tuple[str, ...]]:
        """The kinds of sites in each subject's main profile; all kinds for a subject without a residual stream."""
        found = {}
        for subject in self.subjects:
            kinds = set(self.of(subject, head=None).values("kind"))
            stream = {"embed", "resid", "final"} if "resid" in kinds else {"embed", "stage", "final"}
            found[subject.index] = tuple(kinds & stream) or tuple(kinds)
        return found

    @cached_property
    def stream(self) -> Query:
        """The rows of the main profiles."""
        return self.query.where(lambda row: row.kind in self.streams[row["subject"]], head=None)

    @cached_property
    def lines(self) -> dict[tuple[int, str, str, str], list[Row]]:
        """Rows of the main profiles by subject, metric, variant and group, in order of depth."""
        found = self.stream.groups("subject", "metric", "variant", "group")
        return {key: by_depth(rows) for key, rows in found.items()}

    def line(self, subject: Subject, metric: str, variant: str = "", group: str = "") -> list[Row]:
        """The profile of one subject; empty where the table has none."""
        return self.lines.get((subject.index, metric, variant, group), [])

    def metrics(self) -> set[str]:
        return set(self.query.values("metric"))

    def default_metrics(self) -> set[str]:
        """Metrics of the main profiles that have a default variant."""
        return {metric for _, metric, variant, group in self.lines if not variant and not group}

    @cached_property
    def headed(self) -> set[tuple[Any, ...]]:
        """(subject, metric, kind, variant) of metrics measured per head."""
        return set(self.query.where(head=...).groups("subject", "metric", "kind", "variant"))


class TrainingRows(RunRows):
    """Rows of models over training steps: one subject for each model, seed and stack of a run."""

    def __init__(self, runs: Sequence[RunView]) -> None:
        super().__init__(runs, by=("model", "seed", "stack", "source"))
        # a model measured at one step has no series, even if it has a training log
        measured = self.query.where(kind=lambda kind: kind != "training", head=None)
        self.dated = bool(len((measured if len(measured) else self.query).where(step=...)))
        self.query = self.query.where(head=None, **({"step": ...} if self.dated else {}))
        self.lines: dict[LineKey, list[Row]] = {}
        self.keys: dict[str, list[LineKey]] = defaultdict(list)
        fields = ("subject", "metric", "layer", "place", "group", "variant")
        for (subject, metric, layer, place, group, variant), rows in self.query.groups(*fields).items():
            key = LineKey(subject, metric, DrawnSite.of(layer, place), group, variant)
            if key not in self.lines:
                self.keys[metric].append(key)
            self.lines[key] = by_step(rows)
        measured_lines = [line for key, line in self.lines.items() if key.site.kind != "training"]
        self.steps = sorted({row.step or 0 for line in measured_lines for row in line})
        loop = [line for key, line in self.lines.items() if key.metric in LOOP]
        self.logged_steps = {row.step or 0 for line in loop for row in line}

    def _owner(self, key: tuple[Any, ...], groups: Mapping[tuple[Any, ...], Query]) -> tuple[Any, ...]:
        """Rows of the training log have no stack or seed and are assigned to their model's first subject."""
        model, seed, _, source = key
        of_model = {k: rows for k, rows in groups.items() if (k[0], k[3]) == (model, source)}
        measured = [k for k, rows in of_model.items() if set(rows.values("kind")) != {"training"}]
        if key not in measured and measured:
            key = next((other for other in measured if other[1] == seed), measured[0])
        return (model, key[1], key[2] or "single", source)

    def line(self, subject: Subject, metric: str, site: DrawnSite, variant: str = "", *, group: str = "") -> list[Row]:
        """The rows of one line, sorted by step; may be empty."""
        return self.lines.get(LineKey(subject.index, metric, site, group, variant), [])

    def logged(self, subject: Subject, metric: str) -> list[Row]:
        """The line of a quantity logged by the training loop."""
        keys = [key for key in self.keys.get(metric, []) if key.subject == subject.index and not key.group]
        return self.lines[min(keys, key=lambda key: len(key.variant))] if keys else []

    def metrics(self) -> set[str]:
        return set(self.keys)

    def sites(self, metrics: Iterable[str]) -> list[DrawnSite]:
        """The sites of the stream that have any of these metrics."""
        keys = [key for metric in metrics for key in self.keys.get(metric, [])]
        return sorted({key.site for key in keys if in_stream(key.site.kind)})

    def middle(self, sites: Sequence[DrawnSite]) -> int:
        """The index in a list of sites that is shown initially: the middle block of the shallowest model."""
        blocks = min((subject.blocks for subject in self.subjects), default=0)
        wanted = DrawnSite.of(max(1, round(blocks / 2)), "resid")
        return list(sites).index(wanted) if wanted in sites else len(sites) // 2


def by_depth(rows: Iterable[Row]) -> list[Row]:
    """Rows sorted by depth, the final norm last."""
    return sorted(rows, key=lambda row: (row.layer or 0, row.kind == "final"))


def by_step(rows: Query) -> list[Row]:
    """Rows sorted by step; the last one if a step occurs several times."""
    steps = np.nan_to_num(rows.numbers("step"), nan=0.0)
    found = list(rows)
    return list({steps[i]: found[i] for i in np.argsort(steps, kind="stable")}.values())


def known(rows: Iterable[Any]) -> list[Any]:
    """The rows that have a value."""
    return [row for row in rows if math.isfinite(row.value)]


def place_of(row: Row) -> str:
    return site_name(row.layer or 0, row.kind)


def without_first(variant: str) -> bool:
    """Whether a variant leaves the first position out; it is drawn dashed beside the default."""
    return options_of(variant).get("first") == "out"


def short_names(models: Iterable[str]) -> Callable[[str], str]:
    """A function that shortens paths and hub ids as far as the names stay unique.

    >>> shorten = short_names(["org/pythia-160m", "runs/a/model", "x/bert", "y/bert"])
    >>> [shorten(n) for n in ("org/pythia-160m", "runs/a/model", "x/bert")]
    ['pythia-160m', 'a/model', 'x/bert']
    """
    brief = {}
    for name in models:
        parts = name.replace("\\", "/").rstrip("/").split("/")
        last = "/".join(parts[-2:]) if BLAND.fullmatch(parts[-1]) else parts[-1]
        brief[name] = name if "<" in name else last  # do not cut a name inside an HTML tag
    taken = Counter(brief.values())
    return lambda name: brief[name] if name in brief and taken[brief[name]] == 1 else name


def model_entries(abouts: Iterable[About]) -> list[Mapping[str, Any]]:
    """The entries of all models in run.json."""
    return [entry for about in abouts for entry in about.get("models") or [] if isinstance(entry, Mapping)]


def role_of(entry: About) -> str:
    """The role of a model in run.json: encoder, decoder, encoder-decoder, or convolution."""
    modality = modality_in(entry, "single")
    return modality.name if modality is not None and not modality.attends else str(entry.get("type") or "")


def by_stack(value: Any) -> dict[str, str]:
    """A value by stack; older runs record one value for all stacks."""
    if isinstance(value, Mapping):
        return {str(stack): str(word) for stack, word in value.items() if word}
    return {"": value} if isinstance(value, str) and value else {}


def random_models(abouts: Sequence[About]) -> tuple[list[str], int]:
    """Names of models whose weights are random, and how many models there are."""
    names, count = [], 0
    for about in abouts:
        entries = about.get("models") or [{}]
        count += len(entries)
        every = bool((about.get("config") or {}).get("random_init"))
        for entry in entries:
            if every or any(str(note).startswith("random weights") for note in entry.get("notes") or ()):
                names.append(str(entry.get("name") or "unnamed"))
    return names, count
