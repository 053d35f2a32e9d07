"""What the table says about one model trained from one seed: rows by metric, options and group.

A `Run` reads the table through `results.query`; rows come as a dictionary by `Cell` (step and site, and head where the
rows are those of single heads), so that two of them can be paired.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from anisoscope.claims.engine.part import figure
from anisoscope.claims.engine.seeds import LOSSES, repeats
from anisoscope.errors import AnisoscopeError
from anisoscope.results.quantity import Quantity, mean
from anisoscope.results.query import Query, Row, with_options
from anisoscope.results.table import Table

T = TypeVar("T")
ROLES = ("encoder", "decoder", "encoder-decoder")
MEASURE = "the monitor's preset 'full' measures it"
LEARNED = 0.1  # share by which the loss of a model that has learned must have fallen
_BLOCKS = ("resid", "stage", "query", "scores")  # a stack that has one of these has blocks
_ARM_ROLES = {"causal-next": "decoder", "causal-masked": "neither", "bidirectional-masked": "encoder"}
_WORD = re.compile(r"^(encoder|decoder)(?![a-z])")


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


Readings = dict[Cell, Row]


def by_cell(query: Query) -> Readings:
    """The rows that have a number, by cell and in order; two different numbers for one cell are an error."""
    known = query.known()
    found: Readings = {}
    for row, *place in zip(known, *map(known.column, Cell._fields), strict=True):
        cell = Cell(*place)
        if cell in found and found[cell].value != row.value:
            raise AnisoscopeError(
                f"the table holds two different rows of {row.metric} for model {row.model!r} at {cell}; expected "
                "one: choose a run first, with table.where(run=…), table.where(data=…) or table.where(revision=…)."
            )
        found[cell] = row
    return dict(sorted(found.items(), key=lambda item: item[0].order()))


@dataclass(frozen=True)
class Run:
    """One model trained from one seed, seen through one choice of tangent directions (proxy, rank, fit)."""

    query: Query = field(repr=False)  # rows of the model at its sites, of all its seeds
    model: str
    seed: int | None
    proxy: str
    rank: int | None
    fit: str
    again: tuple[int, ...] = ()  # seeds under which the same run was measured again
    role: str = ""  # encoder | decoder | encoder-decoder | neither; "" where it is not known
    entry: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)  # of the model in run.json
    losses: Mapping[int, float] = field(default_factory=dict, repr=False, compare=False)  # of the training, by step
    _seen: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """What several claims ask for is computed once."""
        if key not in self._seen:
            self._seen[key] = compute()
        return self._seen[key]

    def of(self, metric: str) -> Query:
        """All rows of a metric."""
        return self.once(("metric", metric), lambda: self.query.where(metric=metric))

    def rows(self, metric: str, group: str = "", *, heads: bool = False, **options: Any) -> Readings:
        """A metric with exactly these options by cell, of whole sites or of single heads; empty where there is none."""

        def find() -> Readings:
            found = self.of(metric).where(group=group, head=... if heads else None).exactly(**options)
            return by_cell(found.where(seed=self.seed)) or by_cell(found.where(seed=None))  # rows that name no seed

        return self.once((metric, group, heads, *sorted(options.items())), find)

    def directions(self, **options: Any) -> dict[str, Any]:
        """The options of a metric about the chosen directions, without those that are None."""
        options = {"fit": self.fit, "proxy": self.proxy, "rank": self.rank, **options}
        return {key: value for key, value in sorted(options.items()) if value is not None}

    def tangent(self, metric: str, group: str = "", **options: Any) -> Readings:
        """A metric about the chosen directions by cell; empty where the table has none."""
        return self.rows(metric, group, **self.directions(**options))

    def needed(self, metric: str, group: str = "", **options: Any) -> Readings:
        """The same, or `Missing` with what was looked for and how to get it: other directions that were measured."""
        found = self.tangent(metric, group, **options)
        if found:
            return found
        wanted = self.directions(**options)
        mine = self.of(metric).where(seed=self.seed, group="", head=None).values("variant")
        near = sorted(name for name in mine if _undirected(name) == _undirected(with_options("", **wanted)))
        where = f" for group {group}" if group else ""
        how = f"it was measured with {' and '.join(near[:3])}" if near else MEASURE
        raise Missing(f"{metric}{where} with {listing(wanted)}", how)

    def measured(self, metric: str) -> bool:
        """Whether the table has any row of a metric for this model."""
        return len(self.of(metric).where(head=None)) > 0

    def stacks(self) -> list[str]:
        """The stacks that have blocks."""
        return self.once("stacks", lambda: sorted(self.query.where(head=None, kind=_BLOCKS).values("stack")))

    def groups(self, metric: str) -> list[str]:
        """The groups for which a metric was measured."""
        return sorted(self.of(metric).where(seed=self.seed, head=None).values("group"))

    def fall(self, step: int | None) -> tuple[int, float, float] | None:
        """The first step with a loss, that loss, and the last one until the step that is judged."""
        course = {at: loss for at, loss in self.losses.items() if step is None or at <= step}
        return (min(course), course[min(course)], course[max(course)]) if len(course) > 1 else None

    def learned(self, step: int | None) -> bool:
        """Whether the loss is known to have fallen by a tenth or more."""
        found = self.fall(step)
        return found is not None and found[2] < (1 - LEARNED) * found[1]

    def hardly_learned(self, step: int | None) -> str:
        """Words for a model whose loss has hardly fallen since step 0; empty where it has, or where nobody knows."""
        found = self.fall(step)
        if found is None or found[0] > 0 or self.learned(step):
            return ""
        return f"hardly learned (loss from {figure(found[1])} to {figure(found[2])})"


def _undirected(variant: str) -> str:
    return with_options(variant, fit=None, proxy=None, rank=None)


def listing(options: Mapping[str, Any]) -> str:
    """Options as they are read in a sentence.

    >>> listing({"proxy": "pca", "rank": 4})
    'proxy=pca, rank=4'
    """
    return ", ".join(f"{key}={value}" for key, value in options.items())


Study = dict[str, Run]  # the models of one seed, by name
Numbers = Mapping[Cell, Row | Quantity]


def models(study: Study) -> Study:
    """What a claim about each model by itself is asked of."""
    return study


# readings over steps and sites


def steps_of(cells: Iterable[Cell]) -> list[int]:
    return sorted({cell.step for cell in cells if cell.step is not None})


def last_step(cells: Iterable[Cell]) -> int | None:
    """The last measured step; None outside a series."""
    return max(steps_of(cells), default=None)


def at_last(readings: Readings) -> Readings:
    """Those of the last step."""
    last = last_step(readings)
    return {cell: row for cell, row in readings.items() if cell.step == last}


def means_by(numbers: Numbers, key: Callable[[Cell], Hashable]) -> dict[Any, Quantity]:
    """The mean of a metric over the cells that share a key."""
    groups: dict[Any, list[Quantity]] = {}
    for cell, number in numbers.items():
        groups.setdefault(key(cell), []).append(number.quantity if isinstance(number, Row) else number)
    return {name: mean(parts) for name, parts in groups.items()}


def step_records(numbers: Numbers) -> list[dict[str, Any]]:
    """The mean over sites at every step, with its interval."""
    return [{"step": step, **q.record()} for step, q in means_by(numbers, lambda cell: cell.step).items()]


def layer_records(numbers: Numbers) -> list[dict[str, Any]]:
    """The mean over steps after initialisation at every site, with its interval."""
    kept = {cell: number for cell, number in numbers.items() if cell.step != 0}
    return [{**site_record(site), **q.record()} for site, q in means_by(kept, lambda cell: cell.site).items()]


def site_record(site: tuple[str, int, str]) -> dict[str, Any]:
    return dict(zip(("stack", "layer", "kind"), site, strict=True))


# the runs of a table


def studies(
    table: Table, metrics: Iterable[str], *, proxy: str = "semi_nmf", rank: int | None = None, fit: str = "refit"
) -> list[Study]:
    """The runs of a table, one study for each seed, without runs that were measured again under another seed."""
    query = Query(table)
    read = query.where(metric=set(metrics), layer=...)  # the training log belongs to no site
    sites = read.where(head=None)
    roles, entries, losses = model_roles(table), model_entries(table), _losses(query)
    ranks = most_common_ranks(table)  # models of other widths have other ranks
    rows = read.groups("model")
    seeds: dict[str, set[int]] = {model: set() for model in query.values("model") if model}
    for model, seed in sites.groups("model", "seed"):
        seeds.setdefault(model, set()).update(() if seed is None else (seed,))
    kept = repeats(query, {model: sorted(found) for model, found in seeds.items()})

    def run(model: str, seed: int | None) -> Run:
        return Run(
            query=rows.get(model, Query()),
            model=model,
            seed=seed,
            proxy=proxy,
            rank=ranks.get(model) if rank is None else rank,
            fit=fit,
            again=tuple(kept[model].get(seed, ())),  # type: ignore[arg-type]
            role=roles.get(model, ""),
            entry=entries.get(model, {}),
            losses=losses.get((model, seed)) or losses.get((model, None)) or {},
        )

    return [
        {model: run(model, seed) for model, seed in study.items()}
        for study in _aligned({model: list(found) or [None] for model, found in kept.items()})
    ]


def _losses(query: Query) -> dict[tuple[str, int | None], dict[int, float]]:
    """The loss by step of every model and seed: that of the held-out probe where there is one."""
    found: dict[tuple[str, int | None], dict[int, float]] = {}
    for metric in LOSSES:
        for place, rows in query.where(metric=metric, step=...).known().groups("model", "seed").items():
            found.setdefault(place, dict(zip(rows.column("step"), rows.column("value"), strict=True)))
    return found


def _aligned(seeds: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """The seed of every model in every study: the same one where all models share some, else the i-th of each.

    >>> _aligned({"a": [0, 2], "b": [0, 1, 2]})
    [{'a': 0, 'b': 0}, {'b': 1}, {'a': 2, 'b': 2}]
    >>> _aligned({"a": [0, 1], "b": [7]})
    [{'a': 0, 'b': 7}, {'a': 1}]
    """
    if seeds and set.intersection(*map(set, seeds.values())):
        every = sorted(set().union(*seeds.values()), key=lambda seed: -1 if seed is None else seed)
        return [{model: seed for model, found in seeds.items() if seed in found} for seed in every]
    count = max((len(found) for found in seeds.values()), default=0)
    return [{model: found[i] for model, found in seeds.items() if i < len(found)} for i in range(count)]


def most_common_ranks(table: Table) -> dict[str, int]:
    """For each model the rank that most of its rows of tangent metrics have; none where it has no such rows."""
    votes: dict[str, Counter[int]] = {}
    tangent = Query(table).where(proxy=..., rank=lambda rank: rank is not None and rank.isdigit())
    for (model, rank), rows in tangent.groups("model", "rank").items():
        votes.setdefault(model, Counter())[int(rank)] += len(rows)
    whole = sum(votes.values(), Counter())  # of two that are equally common, the one that other models have, too
    return {model: max(mine, key=lambda rank: (mine[rank], whole[rank], -rank)) for model, mine in votes.items()}


# what run.json and the names of models say: encoder or decoder, and which arm of an ablation


def arm_of(model: str, names: Iterable[str] = tuple(_ARM_ROLES)) -> tuple[str, str] | None:
    """The arm (of the causal ablation, or of these names) that a model's name stands for, and its size.

    >>> arm_of("causal-masked-6x256"), arm_of("gpt2"), arm_of("uniform-2x8 (runs/a)", ["uniform"])
    (('causal-masked', '6x256'), None, ('uniform', '2x8 (runs/a)'))
    """
    found = re.match(rf"({'|'.join(names)})-(\d+x\d+.*)$", model)
    return (found[1], found[2]) if found else None


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
    for model, stack in Query(table).groups("model", "stack"):
        stacks.setdefault(model, set()).add(stack)
    found = {model: _role(model, told.get(model, ""), own) for model, own in stacks.items()}
    return {model: role for model, role in found.items() if role}


def _role(model: str, told: str, stacks: set[str]) -> str:
    arm, word = arm_of(model), _WORD.match(model)
    if arm is not None:
        return _ARM_ROLES[arm[0]]
    if told in ROLES:
        return told
    if word:
        return word[1]
    only = sorted(stacks & {"encoder", "decoder"})
    return {0: "", 1: "".join(only)}.get(len(only), "encoder-decoder")
