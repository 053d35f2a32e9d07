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

from anisoscope.results.folder import MappedRows
from anisoscope.results.modality import modality_in
from anisoscope.results.query import Query, Row, Table, options_of
from anisoscope.view.words import site_name

STREAM = ("embed", "resid", "final")
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
    map: MappedRows | None = None


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
        return plain.get(self.kind, f"{self.layer} · {self.kind}")


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
        owned = self.query.groups(*self.by)
        merged: dict[tuple[Any, ...], list[Query]] = {}
        for key, rows in owned.items():
            merged.setdefault(self._owner(key, owned), []).append(rows)
        keys = list(merged)
        shorten = short_names({key[0] or "" for key in keys})
        found, codes = [], np.full(sum(len(run.table) for run in self.runs), -1, dtype=np.int64)
        for i, key in enumerate(keys):
            blocks = max((int(x) for rows in merged[key] for x in rows.numbers("layer") if math.isfinite(x)), default=0)
            columns = dict(zip(self.by, key, strict=True))
            about = self.abouts[columns["source"]] if self.abouts else {}
            stack, role = columns["stack"] or "single", columns["stack"]
            if role not in ("encoder", "decoder"):  # a model of one stack: its role is in run.json
                entries = [entry for entry in about.get("models") or [] if isinstance(entry, Mapping)]
                role = next((role_of(entry) for entry in entries if entry.get("name") == key[0]), "")
            label = self._label(key, keys, shorten)
            found.append(Subject(i, label, key[0] or "", stack, role, blocks, columns.get("seed"), columns["source"]))
            for rows in merged[key]:
                codes[rows.positions] = i
        self.query.tagged("subject", codes[self.query.positions].tolist())
        return found

    def _owner(self, key: tuple[Any, ...], owned: Mapping[tuple[Any, ...], Query]) -> tuple[Any, ...]:
        return key

    def _label(self, key: tuple[Any, ...], keys: Sequence[tuple[Any, ...]], shorten: Callable[[str], str]) -> str:
        """The model's short name, followed by those columns that distinguish it from subjects of the same name."""
        namesakes = [k for k in keys if k[0] == key[0]]
        parts = [shorten(key[0] or "") or "unnamed"]
        for i, name in enumerate(self.by[1:], start=1):
            differ = len({k[i] for k in namesakes}) > 1 and key[i] not in (None, "")
            # whether this column separates subjects that earlier columns do not
            needed = len({k[: i + 1] for k in namesakes}) > len({k[:i] for k in namesakes})
            if differ and (name == "stack" or needed):
                words = {"step": f"step {key[i]}", "seed": f"seed {key[i]}"}
                path = self.runs[key[i]].path if name == "source" else ""
                parts.append(path or words.get(name) or str(key[i]))
        return " · ".join(part for part in parts if part)

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
        entries = [e for run in runs for e in run.about.get("models") or [] if isinstance(e, Mapping)]
        self._widths = {str(e.get("name")): int(e["width"]) for e in entries if e.get("width")}
        super().__init__(runs, by=("model", "source", "seed", "stack"))
        # a model measured at one step has no series, even if it has a training log
        measured = self.query.where(kind=lambda kind: kind != "training", head=None)
        self.dated = bool(len((measured if len(measured) else self.query).where(step=...)))
        if self.dated:
            self.query = self.query.where(step=...)
        self.query = self.query.where(head=None)
        self.lines: dict[tuple[int, str, DrawnSite, str, str], list[Row]] = {}
        self.keys: dict[str, list[tuple[int, str, DrawnSite, str, str]]] = defaultdict(list)
        for key, rows in self.query.groups("subject", "metric", "layer", "place", "group", "variant").items():
            place = (key[0], key[1], DrawnSite.of(key[2], key[3]), key[4], key[5])
            if place not in self.lines:
                self.keys[key[1]].append(place)
            self.lines[place] = by_step(rows)
        measured_lines = [line for place, line in self.lines.items() if place[2].kind != "training"]
        self.steps = sorted({row.step or 0 for line in measured_lines for row in line})

    def _owner(self, key: tuple[Any, ...], owned: Mapping[tuple[Any, ...], Query]) -> tuple[Any, ...]:
        """Rows of the training log have no stack or seed and are assigned to their model's first subject."""
        measured = [k for k, rows in owned.items() if k[:2] == key[:2] and set(rows.values("kind")) != {"training"}]
        if key in measured or not measured:
            return (*key[:3], key[3] or "single")
        home = next((other for other in measured if other[2] == key[2]), measured[0])
        return (*home[:3], home[3] or "single")

    def _label(self, key: tuple[Any, ...], keys: Sequence[tuple[Any, ...]], shorten: Callable[[str], str]) -> str:
        """The model's short name, followed by seed, stack and run where they distinguish it from others."""
        namesakes = [k for k in keys if k[0] == key[0]]
        parts = [shorten(key[0] or "") or "unnamed"]
        parts += [f"seed {key[2]}"] if len({k[2] for k in namesakes}) > 1 else []
        parts += [key[3]] if len({k[3] for k in namesakes}) > 1 else []
        parts += [f"run {key[1] + 1}"] if len([k for k in namesakes if k[2:] == key[2:]]) > 1 else []
        return " · ".join(parts)

    def line(self, subject: Subject, metric: str, site: DrawnSite, variant: str = "", *, group: str = "") -> list[Row]:
        """The rows of one line, sorted by step; may be empty."""
        return self.lines.get((subject.index, metric, site, group, variant), [])

    def logged(self, subject: Subject, metric: str) -> list[Row]:
        """The line of a quantity logged by the training loop."""
        keys = [key for key in self.keys.get(metric, []) if key[0] == subject.index and not key[3]]
        return self.lines[min(keys, key=lambda key: len(key[4]))] if keys else []

    def metrics(self) -> set[str]:
        return set(self.keys)

    def sites(self, metrics: Iterable[str], kinds: Sequence[str] = STREAM) -> list[DrawnSite]:
        return sorted({key[2] for metric in metrics for key in self.keys.get(metric, []) if key[2].kind in kinds})

    def middle(self, sites: Sequence[DrawnSite]) -> int:
        """The index in a list of sites that is shown initially: the middle block of the shallowest model."""
        blocks = min((subject.blocks for subject in self.subjects), default=0)
        wanted = DrawnSite.of(max(1, round(blocks / 2)), "resid")
        return list(sites).index(wanted) if wanted in sites else len(sites) // 2

    def width(self, subject: Subject) -> int | None:
        return self._widths.get(subject.model)


def by_depth(rows: Iterable[Row]) -> list[Row]:
    """Rows sorted by depth, the final norm last."""
    return sorted(rows, key=lambda row: (row.layer or 0, row.kind == "final"))


def by_step(rows: Query) -> list[Row]:
    """Rows sorted by step; the last one if a step occurs several times."""
    steps = np.nan_to_num(rows.numbers("step"), nan=0.0)
    found = list(rows)
    return list({steps[i]: found[i] for i in np.argsort(steps, kind="stable")}.values())


def known(rows: Iterable[Any]) -> list[Any]:
    """Rows or dots that have a value."""
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
