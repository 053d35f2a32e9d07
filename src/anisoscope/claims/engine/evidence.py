"""Access to the table for claims: `Run` (one model, one seed), its stacks of blocks, arms of ablations, studies.

A `Run` reads the table through `results.query` and returns rows as a dictionary by `Cell` (step and site, and head for
rows of single heads), so that two metrics can be paired. A `BlockStack` is the blocks 1 … L of a stack, without the
embedding and the output of the final norm. A model with an encoder and a decoder has two stacks, each judged
separately; `Arms` of an ablation are compared with each other.

Which seeds of a table are trainings of their own: `claims.engine.seeds`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from anisoscope.claims.engine.alternative import AS_CHOSEN, OUTLIERS, Alternative, differing
from anisoscope.claims.engine.seeds import aligned, repeats
from anisoscope.errors import AnisoscopeError
from anisoscope.results.quantity import Quantity, mean
from anisoscope.results.query import Query, Row, Table, with_options

T = TypeVar("T")
ROLES = ("encoder", "decoder", "encoder-decoder")
MEASURE = "the monitor's preset 'full' measures it"
GATE = {"probe_loss": None, "weighted_probe_loss": "1"}  # held-out losses, with `weighted` of their constant_loss
CLASS_TOKEN = "cls"  # kind of sites
_BLOCKS = ("resid", "stage", "query", "scores")  # kinds of sites that only stacks with blocks have
_ARM_ROLES = {"causal-next": "decoder", "causal-masked": "neither", "bidirectional-masked": "encoder"}
_ROLE_PREFIX = re.compile(r"^(encoder|decoder)(?![a-z])")


class Missing(Exception):
    """Raised where the table lacks something that a claim needs; the message says how to get it."""

    def __init__(self, what: str, how: str = MEASURE) -> None:
        super().__init__(f"the table has no {what} ({how})")


class NotHere(Missing):
    """`Missing` where the claim does not apply to the table at all: no series of steps, no arms to compare."""


class Cell(NamedTuple):
    """One site at one step, and one of its heads for rows of single heads."""

    step: int | None
    stack: str
    layer: int
    kind: str
    head: int | None = None

    @property
    def site(self) -> tuple[str, int, str]:
        return self.stack, self.layer, self.kind

    def order(self) -> tuple[Any, ...]:
        return tuple(-1 if value is None else value for value in self)

    def record(self) -> dict[str, Any]:
        return {name: value for name, value in self._asdict().items() if name != "head" or value is not None}


Readings = dict[Cell, Row]


def by_cell(query: Query) -> Readings:
    """The rows that have a value by cell, sorted; two different values for one cell raise an error."""
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
    """One model trained from one seed, read with one choice of tangent directions (proxy, rank, fit)."""

    query: Query = field(repr=False)  # rows of the model at its sites, for all seeds
    model: str
    seed: int | None
    proxy: str
    rank: int | None
    fit: str | None  # None: refit, but for claims that are judged with frozen directions late in training
    repeats: tuple[int, ...] = ()  # other seeds that are measurements of the same run
    role: str = ""  # encoder | decoder | encoder-decoder | neither; "" = unknown
    entry: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)  # the model in run.json
    # held-out loss and that of the best constant prediction, at the steps that have both
    held_out: Mapping[int | None, tuple[Row, Row]] = field(default_factory=dict, repr=False, compare=False)
    alternative: Alternative = AS_CHOSEN  # other rows to read in place of those that a claim asks for
    touched: set[str] = field(default_factory=set, repr=False, compare=False)  # metrics and directions that it changed
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def under(self, alternative: Alternative) -> Run:
        """The same run read under an alternative."""
        changed = differing(alternative, {"proxy": self.proxy, "rank": self.rank, "fit": self.fit})
        return replace(self, alternative=changed, **changed.directions, touched=set(), _cache={})

    def also(self, other: Alternative) -> Run:
        """The same run, its alternative kept, with rows read under further keys of their variant."""
        joined = replace(self.alternative, options={**self.alternative.options, **other.options})
        return replace(self, alternative=joined, touched=set(), _cache={})

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The cached result of `compute` for this key: several claims read the same rows.

        What the alternative changed in it is cached, too, for claims that find it there.
        """
        if key not in self._cache:
            before = set(self.touched)
            self.touched.clear()
            try:
                self._cache[key] = compute(), frozenset(self.touched)
            finally:
                self.touched.update(before)
        found, touched = self._cache[key]
        self.touched.update(touched)
        return found

    def of(self, metric: str) -> Query:
        """All rows of a metric, for all seeds."""
        return self.once(("metric", metric), lambda: self.query.where(metric=metric))

    def rows(self, metric: str, group: str = "", *, heads: bool = False, **options: Any) -> Readings:
        """The rows of a metric with exactly these options by cell, for whole sites or single heads; may be empty."""

        asked = metric, group, options
        metric, group, options = self.alternative.read(asked, self.of)
        if (metric, group, options) != asked or self.alternative.changes(metric):
            self.touched.add(asked[0])

        def found(options: Mapping[str, Any]) -> Readings:
            rows = self.of(metric).where(group=group, head=... if heads else None).exactly(**options)
            return by_cell(rows.where(seed=self.seed)) or by_cell(rows.where(seed=None))  # rows without a seed

        def find() -> Readings:
            read, plain = found(options), {k: v for k, v in options.items() if k in asked[2] or k not in OUTLIERS}
            read = {**found(plain), **read} if read and plain != options else read
            return self.alternative.halved(metric, read)

        return self.once((metric, group, heads, *sorted(options.items())), find)

    def directions(self, **options: Any) -> dict[str, Any]:
        """The options that select the chosen tangent directions, and `options`, without those that are None."""
        self.touched.update(self.alternative.directions.keys() - options.keys())
        options = {"fit": self.fit or "refit", "proxy": self.proxy, "rank": self.rank, **options}
        return {key: value for key, value in sorted(options.items()) if value is not None}

    def tangent(self, metric: str, group: str = "", **options: Any) -> Readings:
        """The rows of a metric for the chosen tangent directions by cell, without the class token; may be empty."""
        found = self.rows(metric, group, **self.directions(**options))
        return {cell: row for cell, row in found.items() if cell.kind != CLASS_TOKEN}

    def class_token(self, metric: str, group: str = "", **options: Any) -> Readings:
        """As `tangent`, at the class token alone: it has one row per context and is never averaged with patches."""
        found = self.rows(metric, group, **self.directions(**options))
        return {cell: row for cell, row in found.items() if cell.kind == CLASS_TOKEN}

    def needed(self, metric: str, group: str = "", **options: Any) -> Readings:
        """As `tangent`, but raises `Missing` if there are no rows, naming other directions that were measured."""
        if found := self.tangent(metric, group, **options):
            return found
        wanted, choice = self.directions(**options), {"fit": None, "proxy": None, "rank": None}
        variants = self.of(metric).where(seed=self.seed, group="", head=None).values("variant")
        alike = with_options("", **{**wanted, **choice})
        near = sorted(variant for variant in variants if with_options(variant, **choice) == alike)
        where = f" for group {group}" if group else ""
        how = f"it was measured with {' and '.join(near[:3])}" if any(near) else MEASURE
        raise Missing(f"{metric}{where} with {listing(wanted)}", how)

    @property
    def last_step(self) -> int | None:
        """The last step at which anything was measured; None outside a series."""
        of_seed = self.query.where(seed=self.seed).values("step")
        return self.once("last step", lambda: max((step for step in of_seed if step is not None), default=None))

    @property
    def random(self) -> bool:
        """Whether its weights are those of an initialisation, as noted in run.json."""
        return any(str(note).startswith("random weights") for note in self.entry.get("notes") or ())

    @property
    def loaded(self) -> bool:
        """Whether its weights were loaded: only such models have a fingerprint of them, and random ones a note, too."""
        return bool(self.entry.get("fingerprint")) and not self.random

    def stacks(self) -> list[str]:
        """The stacks that have blocks."""
        return self.once("stacks", lambda: sorted(self.query.where(head=None, kind=_BLOCKS).values("stack")))

    def groups(self, metric: str) -> list[str]:
        """The groups for which a metric was measured."""
        return sorted(self.of(metric).where(seed=self.seed, head=None).values("group"))


Study = dict[str, Run]  # the models of one seed, by name
Numbers = Mapping[Cell, Row | Quantity]


def models(study: Study) -> Study:
    """The subjects of a claim about each model: the runs by model (for `claim(of=…)`)."""
    return study


def whole(subject: str) -> Callable[[Study], dict[str, Study]]:
    """The single subject of a claim about all models together, under this name (for `claim(of=…)`)."""
    return lambda study: {subject: study}


# -- words -------------------------------------------------------------------------------------------------------------


def figure(value: float) -> str:
    """A number as text: three significant digits, at most four decimals.

    >>> figure(-0.00123456), figure(float("nan")), figure(12345.6)
    ('−0.0012', 'unknown', '12346')
    """
    if not math.isfinite(value):
        return "unknown"
    text = f"{value:.0f}" if abs(value) >= 1000 else f"{round(value, 4) + 0.0:.3g}"
    return text.replace("-", "−")


def listing(options: Mapping[str, Any]) -> str:
    """Options as text.

    >>> listing({"proxy": "pca", "rank": 4})
    'proxy=pca, rank=4'
    """
    return ", ".join(f"{key}={value}" for key, value in options.items())


def listed(names: Iterable[object]) -> str:
    """Names or numbers as an enumeration.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    *before, last = list(map(str, names)) or [""]
    return f"{', '.join(before)} and {last}" if before else last


def at_step(step: int | None) -> str:
    """The phrase " at step N"; empty outside a series."""
    return "" if step is None else f" at step {step}"


def counted(count: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "block"), counted(2, "block")
    ('1 block', '2 blocks')
    """
    return f"{count} {noun}{'s' if count != 1 else ''}"


# -- readings over steps and sites -------------------------------------------------------------------------------------


def steps_of(cells: Iterable[Cell]) -> list[int]:
    return sorted({cell.step for cell in cells if cell.step is not None})


def last_step(cells: Iterable[Cell]) -> int | None:
    """The last measured step; None outside a series."""
    return max(steps_of(cells), default=None)


def early(steps: Iterable[int | None]) -> Sequence[int | None]:
    """The first third of the measured steps after initialisation; empty where fewer than two were measured.

    >>> early([0, 1, 2, 4, 8, 16, 32]), early([0, 10]), early([None])
    ([1, 2], [], [])
    """
    after = _after_start(steps)
    return after[: _third(after)]


def late(steps: Iterable[int | None]) -> Sequence[int | None]:
    """The last third of the measured steps after initialisation; a model outside a series is late.

    >>> late([0, 1, 2, 4, 8, 16, 32]), late([0, 10]), late([None])
    ([16, 32], [10], [None])
    """
    found = list(steps)
    after = _after_start(found)
    return after[-max(1, _third(after)) :] or ([None] if None in found else [])


def _after_start(steps: Iterable[int | None]) -> list[int]:
    return sorted({step for step in steps if step})


def _third(after: Sequence[int]) -> int:
    """How many of the steps after initialisation are a third; 0 where there is nothing to tell apart."""
    return max(1, len(after) // 3) if len(after) > 1 else 0


def average(numbers: Numbers, cells: Iterable[Cell]) -> Quantity:
    """The mean over those of the cells that have a value."""
    known = (numbers[cell] for cell in cells if cell in numbers)
    return mean([number.quantity if isinstance(number, Row) else number for number in known])


def at(readings: Readings, step: int | None) -> Readings:
    """The rows of one step."""
    return {cell: row for cell, row in readings.items() if cell.step == step}


def differences(one: Readings, two: Readings, *, fixed: bool = False) -> dict[Cell, Quantity]:
    """The first minus the second at every cell that has both, fold by fold unless the second is taken as `fixed`."""
    both = {cell: two[cell] for cell in one if cell in two}
    others = {cell: Quantity.constant(row.value) if fixed else row.quantity for cell, row in both.items()}
    return {cell: one[cell].quantity - other for cell, other in others.items()}


def common_layers(courses: Iterable[Iterable[Cell]], step: int | None) -> list[int]:
    """The layers that all courses have at one step."""
    return sorted(set.intersection(*({cell.layer for cell in cells if cell.step == step} for cells in courses)))


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
    means = means_by(kept, lambda cell: cell.site).items()
    return [{"stack": stack, "layer": layer, "kind": kind, **q.record()} for (stack, layer, kind), q in means]


def course_records(numbers: Numbers) -> dict[str, list[dict[str, Any]]]:
    """Both, for the details of a verdict."""
    return {"steps": step_records(numbers), "layers": layer_records(numbers)}


def need_series(readings: Iterable[Cell], *, fewest: int = 2) -> None:
    """Raise `Missing` where there are too few measured steps."""
    found = len(steps_of(readings))
    what, how = f"series of {fewest} steps or more", "sweep the checkpoints of a model or watch its training"
    if found < fewest:
        raise Missing(what, f"it has {found}; {how}") if found > 1 else NotHere(what, how)


def shared_steps(courses: Iterable[Iterable[Cell]]) -> tuple[list[int], list[int]]:
    """The blocks measured at the last step in all courses, and the steps at which all of these blocks were measured.

    A block without a value at the end is left out at every step, and a step at which one of the others has no value is
    left out altogether, so that all means are over the same blocks.
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
    name: str | None = None  # None: the model has a single stack
    kind: str = "resid"
    until: int | None = None  # nothing after this step is read

    def ended(self, step: int) -> BlockStack:
        return replace(self, until=step)

    @property
    def role(self) -> str:
        return self.name if self.run.role == "encoder-decoder" and self.name else self.run.role

    def blocks(self, metric: str, group: str = "", **options: Any) -> Readings:
        """The rows of a metric at the blocks, by cell."""
        rows = self.sites(metric, group, **options).items()
        return {cell: row for cell, row in rows if cell.kind == self.kind and cell.layer > 0}

    def sites(self, metric: str, group: str = "", *, heads: bool = False, **options: Any) -> Readings:
        """The rows of a metric at all sites of this stack up to step `until`, by cell."""
        rows = self.run.rows(metric, group, heads=heads, **options).items()
        end = math.inf if self.until is None else self.until
        return {c: row for c, row in rows if self.name in (None, c.stack) and (c.step is None or c.step <= end)}

    def needed(self, metric: str, **options: Any) -> Readings:
        """As `blocks`, but raises `Missing` instead of returning nothing."""
        if found := self.blocks(metric, **options):
            return found
        raise self.gap(metric, f"{metric} with {listing(options)}" if options else metric)

    def gap(self, metric: str, words: str = "", *, how: str = "") -> Missing:
        """The `Missing` for a metric without rows at blocks; says so if it was measured only at the ends of stages."""
        if any(cell.kind == "stage" for cell in self.sites(metric)):
            how = "it was measured at the ends of stages; ask for --sites resid too"
            return NotHere(f"{words or metric} after every block", how)
        return Missing(f"{words or metric} at blocks", how or f"measure it with --metrics {metric}")


def stacks(study: Study) -> dict[str, BlockStack]:
    """The stacks of every model, by the subject of their verdicts."""
    found: dict[str, BlockStack] = {}
    for model, run in study.items():
        several = run.stacks() if len(run.stacks()) > 1 else []
        found |= {f"{model}, {name} stack": BlockStack(run, name) for name in several} or {model: BlockStack(run)}
    return found


@dataclass(frozen=True)
class Arms:
    """Models of one size that differ in one factor, by the name of the arm."""

    runs: Mapping[str, Run]
    until: int | None = None  # nothing after this step is read
    name: str = ""  # the arm that is judged, if it is one of several

    def ended(self, step: int) -> Arms:
        return replace(self, until=step)

    def stack(self, arm: str, kind: str = "resid") -> BlockStack:
        return BlockStack(self.runs[arm], kind=kind, until=self.until)


def arms_by_size(study: Study, names: Iterable[str], *, needed: Iterable[str]) -> dict[str, Arms]:
    """The arms of an ablation by size, for sizes that have all needed arms."""
    found: dict[str, dict[str, Run]] = {}
    for model, run in study.items():
        if (arm := arm_of(model, names)) is not None:
            found.setdefault(arm[1], {})[arm[0]] = run
    return {size: Arms(runs) for size, runs in found.items() if set(needed) <= set(runs)}


def arm_of(model: str, names: Iterable[str] = tuple(_ARM_ROLES)) -> tuple[str, str] | None:
    """The arm (one of `names`) and the size in a model's name; None for other models.

    >>> arm_of("causal-masked-6x256"), arm_of("gpt2"), arm_of("uniform-2x8 (runs/a)", ["uniform"])
    (('causal-masked', '6x256'), None, ('uniform', '2x8 (runs/a)'))
    """
    found = re.match(rf"({'|'.join(names)})-(\d+x\d+.*)$", model)
    return (found[1], found[2]) if found else None


# -- the runs of a table -----------------------------------------------------------------------------------------------


def studies_by_seed(
    table: Table, metrics: Iterable[str], *, proxy: str = "semi_nmf", rank: int | None = None, fit: str | None = None
) -> list[Study]:
    """The runs of a table, one study per seed; repeated measurements of a run under another seed are left out."""
    query = Query(table)
    read = query.where(metric=set(metrics), layer=...)  # without the training log, which has no site
    rows, roles, ranks = read.groups("model"), model_roles(table), most_common_ranks(table)
    entries: dict[str, dict[str, Any]] = {}
    for entry in table.about.get("models") or ():  # merge the entries of several runs of one model
        entries[str(entry.get("name"))] = {**entry, **entries.get(str(entry.get("name")), {})}
    held_out = _held_out(query)
    seeds: dict[str, set[int]] = {model: set() for model in query.values("model") if model}
    for model, seed in read.where(head=None).groups("model", "seed"):
        seeds.setdefault(model, set()).update(() if seed is None else (seed,))
    kept = repeats(query, {model: sorted(found) for model, found in seeds.items()})

    def run(model: str, seed: Any) -> Run:
        chosen = ranks.get(model) if rank is None else rank
        copies, entry = tuple(kept[model].get(seed, ())), entries.get(model, {})
        of_model = rows.get(model, Query())
        gate = held_out.get((model, seed)) or held_out.get((model, None)) or {}
        return Run(of_model, model, seed, proxy, chosen, fit, copies, roles.get(model, ""), entry, gate)

    studies = aligned({model: list(found) or [None] for model, found in kept.items()})
    return [{model: run(model, seed) for model, seed in study.items()} for study in studies]


def _held_out(query: Query) -> dict[tuple[str, int | None], dict[int | None, tuple[Row, Row]]]:
    """Held-out loss and loss of the best constant by (model, seed) and step, numbers or not."""
    courses: dict[tuple[str, int | None], dict[int | None, tuple[Row, Row]]] = {}
    places = ("model", "seed", "step")
    for metric, weighted in GATE.items():  # where training weights its targets, the later, weighted losses count
        rows = (query.where(metric=metric), query.where(metric="constant_loss", weighted=weighted))
        loss, constant = (dict(zip(zip(*map(r.column, places), strict=True), r, strict=True)) for r in rows)
        for model, seed, step in loss:
            # a constant that was told once holds for the steps after it
            told = [key for key in constant if key[:2] == (model, seed) and (key[2] or 0) <= (step or 0)]
            if told:
                newest = constant[max(told, key=lambda key: key[2] or 0)]
                courses.setdefault((model, seed), {})[step] = loss[model, seed, step], newest
    return courses


def most_common_ranks(table: Table) -> dict[str, int]:
    """The most common rank in the rows of tangent metrics of each model that has any."""
    votes: dict[str, Counter[int]] = {}
    tangent = Query(table).where(proxy=..., rank=lambda rank: rank is not None and rank.isdigit())
    for (model, rank), rows in tangent.groups("model", "rank").items():
        votes.setdefault(model, Counter())[int(rank)] += len(rows)
    every = sum(votes.values(), Counter())  # breaks ties in favour of the rank of other models
    return {model: max(own, key=lambda rank: (own[rank], every[rank], -rank)) for model, own in votes.items()}


def model_roles(table: Table) -> dict[str, str]:
    """The role of every model where it is known: encoder, decoder, encoder-decoder or neither.

    The name of an arm takes precedence over run.json, which calls both causal arms decoders; then come run.json, a
    model name such as `decoder-…`, and the names of its stacks.
    """
    recorded = {str(entry.get("name")): str(entry.get("type")) for entry in table.about.get("models") or ()}
    stacks: dict[str, set[str]] = {}
    for model, stack in Query(table).groups("model", "stack"):
        stacks.setdefault(model, set()).add(stack)
    roles = {}
    for model, names in stacks.items():
        arm, prefix, known = arm_of(model), _ROLE_PREFIX.match(model), sorted(names & {"encoder", "decoder"})
        stated = recorded[model] if recorded.get(model) in ROLES else ""
        by_name = _ARM_ROLES[arm[0]] if arm else stated or (prefix[1] if prefix else "")
        if role := by_name or ("encoder-decoder" if len(known) > 1 else "".join(known)):
            roles[model] = role
    return roles
