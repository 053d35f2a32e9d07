"""What the table says about one model trained from one seed: rows by metric, options and group, and its blocks.

A `Run` reads the table through `results.query`; rows come as a dictionary by `Cell` (step and site, and head where the
rows are those of single heads), so that two of them can be paired. A `BlockStack` has the blocks 1 … L of a stack; the
embedding and what comes after the final norm are no blocks. A model with an encoder and a decoder has two stacks, each
judged by itself; `Arms` of an ablation are compared with each other.

A general claim rests on independent trainings. The seed of a table may be that of the measurement alone (random
directions, starts of a fit) on the same weights; such seeds have the same losses, digit by digit, and count as one run.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from anisoscope.errors import AnisoscopeError
from anisoscope.results.quantity import Quantity, mean
from anisoscope.results.query import Query, Row, Table, with_options

T = TypeVar("T")
ROLES = ("encoder", "decoder", "encoder-decoder")
MEASURE = "the monitor's preset 'full' measures it"
LEARNED = 0.1  # share by which the loss of a model that has learned must have fallen
LOSSES = ("probe_loss", "loss")
ENERGY = "gradient_energy"
CLOSE = 1e-12  # two trainings do not agree to so many digits
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

        def undirected(variant: str) -> str:
            return with_options(variant, fit=None, proxy=None, rank=None)

        wanted = self.directions(**options)
        mine = self.of(metric).where(seed=self.seed, group="", head=None).values("variant")
        near = sorted(name for name in mine if undirected(name) == undirected(with_options("", **wanted)))
        where = f" for group {group}" if group else ""
        how = f"it was measured with {' and '.join(near[:3])}" if near else MEASURE
        raise Missing(f"{metric}{where} with {listing(wanted)}", how)

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


Study = dict[str, Run]  # the models of one seed, by name
Numbers = Mapping[Cell, Row | Quantity]


def models(study: Study) -> Study:
    """What a claim about each model by itself is asked of."""
    return study


def whole(subject: str) -> Callable[[Study], dict[str, Study]]:
    """What a claim about all models together is asked of, by what its verdict calls them."""
    return lambda study: {subject: study}


# -- words -------------------------------------------------------------------------------------------------------------


def figure(value: float) -> str:
    """A number for a sentence: three digits that count, four decimals at most.

    >>> figure(-0.00123456), figure(float("nan")), figure(12345.6)
    ('−0.0012', 'unknown', '12346')
    """
    if not math.isfinite(value):
        return "unknown"
    text = f"{value:.0f}" if abs(value) >= 1000 else f"{round(value, 4) + 0.0:.3g}"
    return text.replace("-", "−")


def listing(options: Mapping[str, Any]) -> str:
    """Options as they are read in a sentence.

    >>> listing({"proxy": "pca", "rank": 4})
    'proxy=pca, rank=4'
    """
    return ", ".join(f"{key}={value}" for key, value in options.items())


def listed(names: Iterable[object]) -> str:
    """Names or numbers one after another.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    *before, last = list(map(str, names)) or [""]
    return f"{', '.join(before)} and {last}" if before else last


def at_step(step: int | None) -> str:
    """Words for when; none outside a series."""
    return "" if step is None else f" at step {step}"


# -- readings over steps and sites -------------------------------------------------------------------------------------


def steps_of(cells: Iterable[Cell]) -> list[int]:
    return sorted({cell.step for cell in cells if cell.step is not None})


def last_step(cells: Iterable[Cell]) -> int | None:
    """The last measured step; None outside a series."""
    return max(steps_of(cells), default=None)


def average(numbers: Numbers, cells: Iterable[Cell]) -> Quantity:
    """The mean over those of the cells that have a number."""
    mine = (numbers[cell] for cell in cells if cell in numbers)
    return mean([number.quantity if isinstance(number, Row) else number for number in mine])


def means_by(numbers: Numbers, key: Callable[[Cell], Hashable]) -> dict[Any, Quantity]:
    """The mean of a metric over the cells that share a key."""
    groups: dict[Any, list[Cell]] = {}
    for cell in numbers:
        groups.setdefault(key(cell), []).append(cell)
    return {name: average(numbers, cells) for name, cells in groups.items()}


def block_mean(numbers: Numbers, step: int | None, layers: Iterable[int] | None = None) -> Quantity:
    """The mean over blocks (or some of them) at one step."""
    chosen = None if layers is None else set(layers)
    return average(numbers, [c for c in numbers if c.step == step and (chosen is None or c.layer in chosen)])


def step_records(numbers: Numbers) -> list[dict[str, Any]]:
    """The mean over sites at every step, with its interval."""
    return [{"step": step, **q.record()} for step, q in means_by(numbers, lambda cell: cell.step).items()]


def layer_records(numbers: Numbers) -> list[dict[str, Any]]:
    """The mean over steps after initialisation at every site, with its interval."""
    kept = {cell: number for cell, number in numbers.items() if cell.step != 0}
    return [{**site_record(site), **q.record()} for site, q in means_by(kept, lambda cell: cell.site).items()]


def site_record(site: tuple[str, int, str]) -> dict[str, Any]:
    return dict(zip(("stack", "layer", "kind"), site, strict=True))


def need_series(readings: Iterable[Cell], *, fewest: int = 2) -> None:
    """`Missing` where there are too few measured steps."""
    found = len(steps_of(readings))
    what, how = f"series of {fewest} steps or more", "sweep the checkpoints of a model or watch its training"
    if found < fewest:
        raise Missing(what, f"it has {found}; {how}") if found > 1 else NotHere(what, how)


def shared_steps(courses: Iterable[Iterable[Cell]]) -> tuple[list[int], list[int]]:
    """The blocks measured at the last step in all of them, and the steps at which all of those blocks were.

    A block that has no number at the end is left out at every step, and a step at which one of the others has none is
    left out for all: a mean over other blocks would be another number.
    """
    common = set.intersection(*({(c.step, c.layer) for c in cells if c.step is not None} for cells in courses))
    last = max((step for step, _ in common), default=None)
    layers = sorted(layer for step, layer in common if step == last)
    steps = sorted({step for step, _ in common})
    return layers, [step for step in steps if all((step, layer) in common for layer in layers)]


# -- the blocks of a model ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockStack:
    """One stack of blocks of one model, over all steps."""

    run: Run
    name: str | None = None  # None = the only one
    kind: str = "resid"
    until: int | None = None  # nothing after this step is read

    def ended(self, step: int) -> BlockStack:
        return replace(self, until=step)

    @property
    def role(self) -> str:
        return self.name if self.run.role == "encoder-decoder" and self.name else self.run.role

    def blocks(self, metric: str, group: str = "", **options: Any) -> Readings:
        """A metric at the blocks."""
        found = self.sites(metric, group, **options)
        return {cell: row for cell, row in found.items() if cell.kind == self.kind and cell.layer > 0}

    def sites(self, metric: str, group: str = "", *, heads: bool = False, **options: Any) -> Readings:
        """A metric at all sites of this stack, whatever their kind, with nothing after the step that ends it."""
        found = self.run.rows(metric, group, heads=heads, **options)
        end = math.inf if self.until is None else self.until
        mine = {cell: row for cell, row in found.items() if self.name in (None, cell.stack)}
        return {cell: row for cell, row in mine.items() if cell.step is None or cell.step <= end}

    def needed(self, metric: str, **options: Any) -> Readings:
        """A metric at the blocks, or `Missing`."""
        found = self.blocks(metric, **options)
        if not found:
            raise self.gap(metric, f"{metric} with {listing(options)}" if options else metric)
        return found

    def gap(self, metric: str, words: str = "", *, how: str = "") -> Missing:
        """Why a metric is not there at the blocks: it may have been measured at the ends of stages alone."""
        if any(cell.kind == "stage" for cell in self.sites(metric)):
            stages = "it was measured at the ends of stages; ask for --sites resid too"
            return NotHere(f"{words or metric} after every block", stages)
        return Missing(f"{words or metric} at blocks", how or f"measure it with --metrics {metric}")


def stacks(study: Study) -> dict[str, BlockStack]:
    """The stacks of every model, by what a verdict calls them."""
    found: dict[str, BlockStack] = {}
    for model, run in study.items():
        names = run.stacks()
        if len(names) < 2:
            found[model] = BlockStack(run)
        else:
            found |= {f"{model}, {name} stack": BlockStack(run, name) for name in names}
    return found


@dataclass(frozen=True)
class Arms:
    """Models of one size that differ in one thing, by the name of the arm."""

    runs: Mapping[str, Run]
    until: int | None = None  # nothing after this step is read
    name: str = ""  # the arm that is judged, where it is one of several

    def ended(self, step: int) -> Arms:
        return replace(self, until=step)

    def stack(self, arm: str, kind: str = "resid") -> BlockStack:
        return BlockStack(self.runs[arm], kind=kind, until=self.until)


def arms_of(study: Study, names: Iterable[str], *, needed: Iterable[str]) -> dict[str, Arms]:
    """The arms of an ablation by size, where all that are needed are there."""
    found: dict[str, dict[str, Run]] = {}
    for model, run in study.items():
        if (arm := arm_of(model, names)) is not None:
            found.setdefault(arm[1], {})[arm[0]] = run
    return {size: Arms(runs) for size, runs in found.items() if set(needed) <= set(runs)}


def arm_of(model: str, names: Iterable[str] = tuple(_ARM_ROLES)) -> tuple[str, str] | None:
    """The arm (of the causal ablation, or of these names) that a model's name stands for, and its size.

    >>> arm_of("causal-masked-6x256"), arm_of("gpt2"), arm_of("uniform-2x8 (runs/a)", ["uniform"])
    (('causal-masked', '6x256'), None, ('uniform', '2x8 (runs/a)'))
    """
    found = re.match(rf"({'|'.join(names)})-(\d+x\d+.*)$", model)
    return (found[1], found[2]) if found else None


# -- the runs of a table -----------------------------------------------------------------------------------------------


def studies(
    table: Table, metrics: Iterable[str], *, proxy: str = "semi_nmf", rank: int | None = None, fit: str = "refit"
) -> list[Study]:
    """The runs of a table, one study for each seed, without runs that were measured again under another seed."""
    query = Query(table)
    read = query.where(metric=set(metrics), layer=...)  # the training log belongs to no site
    rows, roles = read.groups("model"), model_roles(table)
    ranks = most_common_ranks(table)  # models of other widths have other ranks
    entries: dict[str, dict[str, Any]] = {}
    for entry in table.about.get("models") or ():  # of several runs of one model, whatever any of them says
        entries[str(entry.get("name"))] = {**entry, **entries.get(str(entry.get("name")), {})}
    losses: dict[tuple[str, int | None], dict[int, float]] = {}
    for metric in LOSSES:  # that of the held-out probe where there is one
        for place, mine in query.where(metric=metric, step=...).known().groups("model", "seed").items():
            losses.setdefault(place, dict(zip(mine.column("step"), mine.column("value"), strict=True)))
    seeds: dict[str, set[int]] = {model: set() for model in query.values("model") if model}
    for model, seed in read.where(head=None).groups("model", "seed"):
        seeds.setdefault(model, set()).update(() if seed is None else (seed,))
    kept = repeats(query, {model: sorted(found) for model, found in seeds.items()})

    def run(model: str, seed: Any) -> Run:
        chosen = ranks.get(model) if rank is None else rank
        again, entry = tuple(kept[model].get(seed, ())), entries.get(model, {})
        course = losses.get((model, seed)) or losses.get((model, None)) or {}
        mine = rows.get(model, Query())
        return Run(mine, model, seed, proxy, chosen, fit, again, roles.get(model, ""), entry, course)

    aligned = _aligned({model: list(found) or [None] for model, found in kept.items()})
    return [{model: run(model, seed) for model, seed in study.items()} for study in aligned]


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
    every = sum(votes.values(), Counter())  # of two that are equally common, the one that other models have, too
    return {model: max(mine, key=lambda rank: (mine[rank], every[rank], -rank)) for model, mine in votes.items()}


def model_roles(table: Table) -> dict[str, str]:
    """Encoder, decoder, encoder-decoder or neither, for every model whose role is known.

    The name of an arm says more than run.json, where both causal arms are decoders; where neither says it, a model
    called `decoder-…`, or one whose only stack is called so, is taken at its word.
    """
    told = {str(entry.get("name")): str(entry.get("type")) for entry in table.about.get("models") or ()}
    stacks: dict[str, set[str]] = {}
    for model, stack in Query(table).groups("model", "stack"):
        stacks.setdefault(model, set()).add(stack)
    found = {}
    for model, own in stacks.items():
        arm, word, only = arm_of(model), _WORD.match(model), sorted(own & {"encoder", "decoder"})
        if arm is not None:
            found[model] = _ARM_ROLES[arm[0]]
        elif told.get(model) in ROLES:
            found[model] = told[model]
        elif word:
            found[model] = word[1]
        elif only:
            found[model] = only[0] if len(only) == 1 else "encoder-decoder"
    return found


Series = dict[tuple[Any, ...], float]  # by step, and by whatever else a value belongs to


def repeats(query: Query, seeds: Mapping[str, Sequence[int]]) -> dict[str, dict[int, list[int]]]:
    """For every model the seeds to keep, each with the later ones that are the same run, measured again."""
    several = [model for model, found in seeds.items() if len(found) > 1]
    # the values that can tell two runs apart: nothing that was drawn at random
    fixed = {"control": None, "proxy": lambda name: not (name or "").startswith("random")}
    rows = query.where(model=several, metric=[*LOSSES, ENERGY], head=None, **fixed).known()
    runs: dict[tuple[str, int], dict[str, Series]] = {}
    for (model, seed, metric), mine in rows.groups("model", "seed", "metric").items():
        places = zip(*map(mine.column, ("step", "stack", "layer", "kind", "group", "variant")), strict=True)
        runs.setdefault((model, seed), {})[metric] = dict(zip(places, mine.column("value"), strict=True))
    kept: dict[str, dict[int, list[int]]] = {model: {} for model in seeds}
    for model, seed in ((model, seed) for model, numbers in seeds.items() for seed in numbers):
        own = runs.get((model, seed), {})
        original = next((k for k in kept[model] if same_run(runs.get((model, k), {}), own)), None)
        kept[model].setdefault(seed, []) if original is None else kept[model][original].append(seed)
    return kept


def same_run(one: Mapping[str, Series], two: Mapping[str, Series]) -> bool:
    """Whether two seeds share a loss at all common steps or, without losses, the gradient energies of one step.

    A loss at step 0 alone proves nothing: an output head that starts at zero gives every seed the same one.

    >>> same_run({"loss": {(0,): 5.6, (9,): 2.1}}, {"loss": {(0,): 5.6, (9,): 2.1}})
    True
    >>> same_run({"loss": {(0,): 5.6, (9,): 2.1}}, {"loss": {(0,): 5.6, (9,): 2.2}})
    False
    """
    equal: dict[str, dict[int | None, bool]] = {name: {} for name in (*LOSSES, ENERGY)}  # by metric and step
    for name, steps in equal.items():
        mine, other = one.get(name, {}), two.get(name, {})
        for key in mine.keys() & other.keys():
            same = math.isclose(mine[key], other[key], rel_tol=CLOSE, abs_tol=CLOSE)
            steps[key[0]] = steps.get(key[0], True) and same
    courses = [equal[name] for name in LOSSES if any(step != 0 for step in equal[name])]
    if courses:
        return any(all(steps.values()) for steps in courses)
    later = {step: same for step, same in equal[ENERGY].items() if step != 0}
    return any((later or equal[ENERGY]).values())
