"""The long table, indexed once: what one model trained from one seed says about a metric.

A table may hold a million rows. The rows of the metrics that claims read are sorted once into series (model, seed,
metric, variant, group); a series is turned into readings when it is first asked for.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.claims.engine.seeds import LOSSES, repeats
from anisoscope.errors import AnisoscopeError
from anisoscope.results.quantity import Quantity
from anisoscope.results.table import Table, variant_name

# Which models of a table are encoders and which decoders, and which arm of the causal ablation a name stands for.


ROLES = ("encoder", "decoder", "encoder-decoder")
# a run may stand behind: "causal-next-12x512 (runs/a)"
_ARM = re.compile(r"^(?P<name>causal-next|causal-masked|bidirectional-masked)-(?P<size>\d+x\d+.*)$")
_ARM_ROLES = {"causal-next": "decoder", "causal-masked": "neither", "bidirectional-masked": "encoder"}
_WORD = re.compile(r"^(encoder|decoder)(?![a-z])")


class AblationArm(NamedTuple):
    """One arm of the causal ablation, and what it shares with the others."""

    name: str
    size: str


def arm_of(model: str) -> AblationArm | None:
    """The arm that a model's name stands for.

    >>> arm_of("causal-masked-6x256"), arm_of("gpt2")
    (AblationArm(name='causal-masked', size='6x256'), None)
    """
    found = _ARM.match(model)
    return AblationArm(found["name"], found["size"]) if found else None


def model_entries(table: Table) -> dict[str, dict[str, Any]]:
    """What run.json says of each model; of several runs of one, whatever any of them says."""
    found: dict[str, dict[str, Any]] = {}
    for entry in table.about.get("models") or ():
        name = str(entry.get("name"))
        found[name] = {**entry, **found.get(name, {})}
    return found


def model_roles(table: Table) -> dict[str, str]:
    """Encoder, decoder, encoder-decoder or neither, for every model whose role is known.

    The name of an arm says more than run.json, where both causal arms are decoders; where neither says it, a model
    called `decoder-…`, or one whose only stack is called so, is taken at its word.
    """
    told = {str(entry.get("name")): str(entry.get("type")) for entry in table.about.get("models") or ()}
    stacks: dict[str, set[str]] = {}
    pairs = table.arrow.select(["model", "stack"]).group_by(["model", "stack"]).aggregate([])
    for pair in pairs.to_pylist():
        stacks.setdefault(pair["model"] or "", set()).update((pair["stack"],) if pair["stack"] else ())
    found = {model: _role(model, told.get(model, ""), own) for model, own in stacks.items()}
    return {model: role for model, role in found.items() if role}


def _role(model: str, told: str, stacks: set[str]) -> str:
    arm, word = arm_of(model), _WORD.match(model)
    if arm is not None:
        return _ARM_ROLES[arm.name]
    if told in ROLES:
        return told
    if word:
        return word[1]
    if {"encoder", "decoder"} <= stacks:
        return "encoder-decoder"
    only = stacks & {"encoder", "decoder"}
    return next(iter(only)) if len(only) == 1 else ""


SERIES = ("model", "seed", "metric", "variant", "group")
T = TypeVar("T")
_NUMBERS = ("value", "low", "high", "sd", "n", "contexts", "depth")
_BLOCKS = ("resid", "stage", "query", "scores")  # a stack that has one of these has blocks


MEASURE = "the monitor's preset 'full' measures it"


class Missing(Exception):
    """What a claim needs and the table does not hold, and how to get it."""

    def __init__(self, what: str, how: str = MEASURE) -> None:
        super().__init__(f"the table has no {what} ({how})")


class NotHere(Missing):
    """A question that does not arise for a table: no series of steps, no arms to compare."""


class Cell(NamedTuple):
    """One site at one step, and one of its heads where the rows are those of single heads."""

    step: int | None
    stack: str
    layer: int
    kind: str
    head: int | None = None

    @property
    def site(self) -> tuple[str, int, str]:
        return self.stack, self.layer, self.kind

    def order(self) -> tuple[int, str, int, str, int]:
        head = -1 if self.head is None else self.head
        return -1 if self.step is None else self.step, self.stack, self.layer, self.kind, head

    def record(self) -> dict[str, Any]:
        return {name: value for name, value in self._asdict().items() if name != "head" or value is not None}


@dataclass(frozen=True)
class Reading:
    """One row of the table."""

    quantity: Quantity
    low: float
    high: float
    sd: float
    n: float
    contexts: float
    depth: float  # layer / number of blocks
    note: str

    @property
    def value(self) -> float:
        return self.quantity.value


Readings = dict[Cell, Reading]


class TableIndex:
    """The rows of a table by series: those of whole sites, or (`heads`) those of single heads."""

    def __init__(self, table: Table, metrics: Iterable[str], *, heads: bool = False) -> None:
        self.table, self.metrics = table, tuple(metrics)
        wanted = pc.is_in(table.arrow["metric"], value_set=pa.array(sorted(self.metrics), type=pa.string()))
        # heads and the training log belong to no site of the stream
        mine = pc.is_valid(table.arrow["head"]) if heads else pc.is_null(table.arrow["head"])
        wanted = pc.and_(wanted, pc.and_(mine, pc.is_valid(table.arrow["layer"])))
        self.arrow = table.arrow.filter(wanted).combine_chunks()
        self.order, self.slices = _sorted_series(self.arrow)
        self.columns = {name: _floats(self.arrow[name]) for name in _NUMBERS}
        self.steps, self.layers, self.heads = (_floats(self.arrow[name]) for name in ("step", "layer", "head"))
        self.words = {name: _words(self.arrow[name]) for name in ("stack", "kind", "note")}
        self.flat, self.offsets = _lists(self.arrow["replicates"])
        self.stacks = _stacks(self.arrow)

    @functools.cached_property
    def by_head(self) -> TableIndex:
        """The rows of single heads, sorted when a claim first asks for one."""
        return TableIndex(self.table, self.metrics, heads=True)

    @functools.cached_property
    def losses(self) -> dict[tuple[str, int | None], dict[str, dict[int, float]]]:
        """The losses of the training log by model and seed, then by metric and step."""
        found: dict[tuple[str, int | None], dict[str, dict[int, float]]] = {}
        rows = self.table.where(metric=list(LOSSES)).arrow.select(["model", "seed", "metric", "step", "value"])
        for model, seed, metric, step, value in zip(*(column.to_pylist() for column in rows.columns), strict=True):
            if step is not None and value is not None and math.isfinite(value):
                found.setdefault((model, seed), {}).setdefault(metric, {})[step] = value
        return found

    def readings(self, series: tuple[Any, ...]) -> Readings:
        """The readings of a series that have a number, by cell."""
        found: Readings = {}
        for i in self.order[self.slices.get(series, slice(0, 0))]:
            cell = self._cell(i)
            value = self.columns["value"][i]
            if not math.isfinite(value):
                continue
            if cell in found and found[cell].value != value:
                raise AnisoscopeError(
                    f"the table holds two different rows of {series[2]} for model {series[0]!r} at {cell}; expected "
                    "one: choose a run first, with table.where(run=…), table.where(data=…) or table.where(revision=…)."
                )
            found[cell] = self._reading(i)
        return dict(sorted(found.items(), key=lambda item: item[0].order()))

    def _cell(self, i: int) -> Cell:
        step, head = (None if math.isnan(column[i]) else int(column[i]) for column in (self.steps, self.heads))
        place = {name: words[codes[i]] for name, (codes, words) in self.words.items() if name != "note"}
        return Cell(step, place["stack"], int(self.layers[i]), place["kind"], head)

    def _reading(self, i: int) -> Reading:
        numbers = {name: float(column[i]) for name, column in self.columns.items()}
        folds = tuple(float(f) for f in self.flat[self.offsets[i] : self.offsets[i + 1]])
        value = numbers.pop("value")
        codes, words = self.words["note"]
        half = (numbers["high"] - numbers["low"]) / 2
        return Reading(Quantity(value, folds, half), **numbers, note=words[codes[i]])


def _stacks(arrow: pa.Table) -> dict[str, list[str]]:
    """For each model the stacks that have blocks."""
    blocks = arrow.filter(pc.is_in(arrow["kind"], value_set=pa.array(_BLOCKS))).select(["model", "stack"])
    found: dict[str, list[str]] = {}
    for pair in blocks.group_by(["model", "stack"]).aggregate([]).to_pylist():
        found.setdefault(pair["model"], []).append(pair["stack"] or "")
    return {model: sorted(names) for model, names in found.items()}


def _sorted_series(arrow: pa.Table) -> tuple[np.ndarray, dict[tuple[Any, ...], slice]]:
    """An order of the rows in which each series lies together, and where each lies."""
    key = np.zeros(arrow.num_rows, dtype=np.int64)
    names: list[list[Any]] = []
    for column in SERIES:
        codes, words = _words(arrow[column])
        key = key * len(words) + codes
        names.append(words)
    order = np.argsort(key, kind="stable")
    keys, starts = np.unique(key[order], return_index=True)
    bounds = [*starts.tolist(), arrow.num_rows]
    slices = {_decoded(key, names): slice(bounds[i], bounds[i + 1]) for i, key in enumerate(keys.tolist())}
    return order, slices


def _decoded(number: int, names: list[list[Any]]) -> tuple[Any, ...]:
    found = []
    for words in reversed(names):
        number, code = divmod(number, len(words))
        found.append(words[code])
    return tuple(reversed(found))


def _words(column: pa.ChunkedArray) -> tuple[np.ndarray, list[Any]]:
    """Codes of a column and what they stand for; null is a word like any other (strings: the empty one)."""
    if pa.types.is_string(column.type):
        column = pc.fill_null(column, "")
    encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
    return np.asarray(encoded.indices, dtype=np.int64), encoded.dictionary.to_pylist() or [None]


def _floats(column: pa.ChunkedArray) -> np.ndarray:
    return np.asarray(pc.fill_null(pc.cast(column, pa.float64(), safe=False), math.nan))


def _lists(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """The values of a list column end to end, and where each row's begin."""
    lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0), dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return np.asarray(pc.fill_null(pc.list_flatten(column), math.nan)), offsets


@dataclass(frozen=True)
class Settings:
    """Which directions a claim is about."""

    proxy: str
    rank: int | None
    fit: str

    def variant(self, **options: Any) -> str:
        """The variant of a tangent metric; options that are None are left out.

        >>> Settings("pca", 16, "refit").variant(control="next", of=None)
        'control=next;fit=refit;proxy=pca;rank=16'
        """
        full = {"fit": self.fit, "proxy": self.proxy, "rank": self.rank, **options}
        return variant_name({key: value for key, value in full.items() if value is not None})


@dataclass(frozen=True)
class Run:
    """One model trained from one seed, seen through one choice of directions."""

    index: TableIndex
    model: str
    seed: int | None
    settings: Settings
    again: tuple[int, ...] = ()  # seeds under which the same run was measured again
    role: str = ""  # encoder | decoder | encoder-decoder | neither; "" where it is not known
    entry: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)  # of the model in run.json
    _seen: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def readings(self, metric: str, group: str = "", **options: Any) -> Readings:
        """A tangent metric by cell; empty where the table has none."""
        return self.plain(metric, self.settings.variant(**options), group=group)

    def plain(self, metric: str, variant: str, *, group: str = "") -> Readings:
        """Any metric by cell, its variant written out."""
        key = (metric, variant, group)
        return self.once(key, lambda: self._found(self.index, key))

    def heads(self, metric: str, variant: str = "") -> Readings:
        """The same for every head by itself."""
        key = (metric, variant, "")
        return self.once(("heads", *key), lambda: self._found(self.index.by_head, key))

    def _found(self, index: TableIndex, key: tuple[str, str, str]) -> Readings:
        found = index.readings((self.model, self.seed, *key))
        return found or index.readings((self.model, None, *key))  # rows that name no seed

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """What several claims ask for is computed once."""
        if key not in self._seen:
            self._seen[key] = compute()
        return self._seen[key]

    def needed(self, metric: str, group: str = "", **options: Any) -> Readings:
        """The same, or `Missing` with what was looked for."""
        found = self.readings(metric, group, **options)
        if not found:
            where = f" for group {group}" if group else ""
            variant = self.settings.variant(**options)
            raise Missing(f"{metric}{where} with {variant.replace(';', ', ')}", self._instead(metric, variant))
        return found

    def _instead(self, metric: str, variant: str) -> str:
        """How to get a variant: choose directions that were measured, or measure it."""
        plain = re.compile(r"(?:^|;)(?:fit|proxy|rank)=[^;]*")
        others = [v for m, s, name, v, g in self.index.slices if (m, s, name, g) == (self.model, self.seed, metric, "")]
        near = sorted(other for other in others if plain.sub("", other) == plain.sub("", variant))
        return f"it was measured with {' and '.join(near[:3])}" if near else MEASURE

    def measured(self, metric: str) -> bool:
        """Whether the table has any row of a metric for this model."""
        found = self.once("metrics", lambda: {key[2] for key in self.index.slices if key[0] == self.model})
        return metric in found

    def stacks(self) -> list[str]:
        """The stacks that have blocks."""
        return self.index.stacks.get(self.model, [])

    def groups(self, metric: str) -> list[str]:
        """The groups for which a metric was measured."""
        found = {key[4] for key in self.index.slices if key[:3] == (self.model, self.seed, metric)}
        return sorted(found)


Study = dict[str, Run]  # the models of one seed, by name


def studies(table: Table, metrics: Iterable[str], *, proxy: str, rank: int | None, fit: str) -> list[Study]:
    """The runs of a table, one study for each seed, without runs that were measured again under another seed."""
    index = TableIndex(table, metrics)
    roles, entries = model_roles(table), model_entries(table)
    ranks = most_common_ranks(table)  # models of other widths have other ranks

    def settings(model: str) -> Settings:
        return Settings(proxy, ranks.get(model) if rank is None else rank, fit)

    seeds: dict[str, set[int]] = {name: set() for name in table.arrow["model"].unique().to_pylist() if name}
    for model, seed, *_ in index.slices:
        seeds.setdefault(model, set()).update(() if seed is None else (seed,))
    kept = repeats(table, {model: sorted(found) for model, found in seeds.items()})

    def run(model: str, seed: int | None) -> Run:
        again = tuple(kept[model].get(seed, ()))  # type: ignore[arg-type]
        return Run(index, model, seed, settings(model), again, roles.get(model, ""), entries.get(model, {}))

    return [
        {model: run(model, seed) for model, seed in study.items()}
        for study in _aligned({model: list(found) or [None] for model, found in kept.items()})
    ]


def _aligned(seeds: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """The seed of every model in every study: the same one where all models share some, else the i-th of each.

    >>> _aligned({"a": [0, 2], "b": [0, 1, 2]})
    [{'a': 0, 'b': 0}, {'b': 1}, {'a': 2, 'b': 2}]
    >>> _aligned({"a": [0, 1], "b": [7]})
    [{'a': 0, 'b': 7}, {'a': 1}]
    """
    if seeds and set.intersection(*map(set, seeds.values())):
        every = sorted(
            {seed for found in seeds.values() for seed in found}, key=lambda seed: -1 if seed is None else seed
        )
        return [{model: seed for model, found in seeds.items() if seed in found} for seed in every]
    count = max((len(found) for found in seeds.values()), default=0)
    return [{model: found[i] for model, found in seeds.items() if i < len(found)} for i in range(count)]


def most_common_ranks(table: Table) -> dict[str, int]:
    """For each model the rank that most of its rows of tangent metrics have; none where it has no such rows."""
    votes: dict[str, Counter[int]] = {}
    pairs = table.arrow.select(["model", "variant"]).group_by(["model", "variant"]).aggregate([([], "count_all")])
    for counted in pairs.to_pylist():
        variant = counted["variant"] or ""
        found = re.search(r"(?:^|;)rank=(\d+)", variant)
        if found and "proxy=" in variant:
            votes.setdefault(counted["model"], Counter())[int(found[1])] += counted["count_all"]
    whole = sum(votes.values(), Counter())  # of two that are equally common, the one that other models have, too
    return {model: max(mine, key=lambda rank: (mine[rank], whole[rank], -rank)) for model, mine in votes.items()}
