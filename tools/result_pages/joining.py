"""One result from several runs, and from models of another result that are declared to stand beside them.

Runs count in their order: a place, metric and variant of a model has the row of the first that has it, so that a model
may be profiled and its gradients studied apart, and a committed result may come last, which keeps what was not measured
again. Rows of one model and seed are never mixed where runs looked at different data: the first alone counts then.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import anisoscope
from anisoscope.commands.drawing import open_runs
from anisoscope.errors import AnisoscopeError
from anisoscope.results.folder import RunFolder
from anisoscope.results.privacy import without_places
from anisoscope.results.query import Table
from result_pages.declared import RESULTS, Beside
from result_pages.judging import is_robust, redraw, write_verdicts
from result_pages.result import COMMITTED, Result, judged_again, performance_judged

PLACE = ("model", "seed", "step", "stack", "layer", "kind", "head", "group", "metric", "variant")
RUN = ("command", "started", "wall_seconds", "code", "versions")  # what a record keeps of each run
FEW = 4  # more runs of one folder are told as all of it
TOOL = ("python", "tools/results.py", "join")
Key = tuple[str, Any]  # name and seed of a model
Record = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A run, or a part of one: its rows, its record, and the entries of its models."""

    name: str
    arrow: pa.Table
    about: Record

    @classmethod
    def of(cls, folder: RunFolder) -> Part:
        return cls(folder.path.name, folder.table().arrow, without_places(folder.about(), share=True))

    @property
    def models(self) -> dict[Key, Record]:
        return {key_of(entry): entry for entry in self.about.get("models") or []}

    def only(self, names: Sequence[str], metrics: Sequence[str] = ()) -> Part:
        """The part of some models, and of some metrics where any are named."""
        columns = [self.arrow[name].to_pylist() for name in ("model", "metric")]
        kept = [model in names and (not metrics or metric in metrics) for model, metric in zip(*columns, strict=True)]
        about = {**self.about, "models": [entry for entry in self.models.values() if entry["name"] in names]}
        about["skipped"] = [item for item in about.get("skipped") or [] if _of(item, names)]
        about["runs"] = [run for run in about.get("runs") or [] if run["name"].rpartition("-")[0] in names]
        about["warnings"] = [words for words in about.get("warnings") or [] if _told_of(words, names)]
        return Part(self.name, self.arrow.filter(pa.array(kept, pa.bool_())), about)

    def without(self, keys: Sequence[Key]) -> Part:
        """The part without some models of some seeds."""
        pairs = zip(self.arrow["model"].to_pylist(), self.arrow["seed"].to_pylist(), strict=True)
        left = {(name, seed) for name, seed in keys} | {(name, 0) for name, seed in keys if seed is None}
        kept = pa.array([pair not in left for pair in pairs], pa.bool_())
        models = [entry for key, entry in self.models.items() if key not in keys]
        return Part(self.name, self.arrow.filter(kept), {**self.about, "models": models})


def key_of(entry: Mapping[str, Any]) -> Key:
    return str(entry.get("name")), entry.get("seed")


def _of(item: Any, names: Sequence[str]) -> bool:
    return not isinstance(item, dict) or item.get("model") in names


def _told_of(words: str, names: Sequence[str]) -> bool:
    """Whether a warning is of one of these models; those of a whole run begin with no name of a model."""
    return words.partition(": ")[0] in names


def join(out: Path, runs: Sequence[Path]) -> None:
    """Write one folder from several runs: their tables under each other, their records, verdicts and a page.

    A folder that is there keeps what people wrote into it; of its rows only what it is named for among the runs.
    """
    parts = [Part.of(folder) for folder in open_runs(runs)]
    beside = RESULTS[out.name].beside if out.name in RESULTS else ()
    others = [part_beside(each) for each in beside]
    taken = [name for each in beside for name in each.models]
    parts = [part.only([name for name, _ in part.models if name not in taken]) if taken else part for part in parts]
    record = record_of(parts, others) | {"command": said(out, runs)}
    record["commands"] = [*record["commands"], record["command"]]
    table, target = Table(rows_of([*parts, *others]), record), RunFolder(out)
    verdicts = verdicts_of(table, runs)
    out.mkdir(parents=True, exist_ok=True)
    target.write_table(table)
    target.write_about(record)
    write_verdicts(out, verdicts)
    redraw(out)


def said(out: Path, runs: Sequence[Path]) -> list[str]:
    """The command of a join, with one pattern for many runs of a folder."""
    parents = {run.parent: sum(other.parent == run.parent for other in runs) for run in runs}
    words = [str(run.parent / "*") if parents[run.parent] > FEW else str(run) for run in runs]
    return [*TOOL, str(out), *dict.fromkeys(words)]


def part_beside(beside: Beside) -> Part:
    """The models of another result that stand beside the runs of this one, each with where it is from."""
    part = Part.of(RunFolder.open(COMMITTED / beside.result)).only(beside.models, beside.metrics)
    if lacking := sorted(set(beside.models) - {name for name, _ in part.models}):
        raise AnisoscopeError(
            f"results/{beside.result} has no {', '.join(lacking)}, which tools/result_pages/declared.py wants beside "
            "another result; measure them, or change what is declared."
        )
    entries = [{**entry, "result": beside.result} for entry in part.models.values()]
    return Part(part.name, part.arrow, {**part.about, "models": entries})


def verdicts_of(table: Table, runs: Sequence[Path]) -> list[Record]:
    """The verdicts of now on the claims that the runs were asked; on all claims where none was asked any."""
    if table.about.get("study") == "performance":
        return performance_judged(table)
    results = [Result(run) for run in runs]
    asked = [verdict for result in results for verdict in result.verdicts]
    return judged_again(table, asked, robust=any(map(is_robust, results)))


# -- rows --------------------------------------------------------------------------------------------------------------


def rows_of(parts: Sequence[Part]) -> pa.Table:
    """The rows of all parts, the first of each place; models that read other data than before are left out later."""
    return without_repeats(Table.concat([Table(part.arrow, {}) for part in agreeing(parts)]).arrow)


def agreeing(parts: Sequence[Part]) -> list[Part]:
    """The parts, each without models of which an earlier part looked at other data."""
    return [part.without(_disagreeing(part, parts[:at])) for at, part in enumerate(parts)]


def _disagreeing(part: Part, before: Sequence[Part]) -> list[Key]:
    first = {key: mark for other in reversed(before) for key, mark in _marks(other)}
    return [key for key, mark in _marks(part) if first.get(key, mark) != mark]


def _marks(part: Part) -> Iterator[tuple[Key, str]]:
    """The fingerprint of the data that each model looked at, where it is known."""
    for key, entry in part.models.items():
        data = entry.get("data") or part.about.get("data")
        if isinstance(data, dict) and data.get("fingerprint"):
            yield key, str(data["fingerprint"])


def without_repeats(arrow: pa.Table) -> pa.Table:
    """The first row of each place, metric and variant."""
    seen: set[tuple[Any, ...]] = set()
    kept = []
    for at, key in enumerate(zip(*(arrow[name].to_pylist() for name in PLACE), strict=True)):
        if key not in seen:
            seen.add(key)
            kept.append(at)
    return arrow.take(pa.array(np.array(kept, dtype=np.int64)))


# -- the record --------------------------------------------------------------------------------------------------------


def record_of(parts: Sequence[Part], others: Sequence[Part] = ()) -> Record:
    """The record of a joined folder: what the runs share is that of the first; `others` add models and commands."""
    abouts = [part.about for part in parts]
    first, every = abouts[0], [*abouts, *(part.about for part in others)]
    shared = {key: first[key] for key in ("schema", "versions", "seed", "data", "map") if key in first}
    shared = {key: value for key, value in shared.items() if all(each.get(key) == value for each in abouts)}
    studies = {about.get("study") for about in abouts}
    shared |= {"study": studies.pop()} if len(studies) == 1 and None not in studies else {}
    configs = [about.get("config") or {} for about in abouts]
    alike = {key: value for key, value in configs[0].items() if all(value == each.get(key) for each in configs)}
    thinned = dict.fromkeys(words for about in abouts if (words := (about.get("thinned") or {}).get("words")))
    shared |= {"thinned": {"words": " ".join(thinned)}} if thinned else {}
    return shared | {
        "anisoscope": first.get("anisoscope", anisoscope.__version__),
        "kind": first.get("kind"),
        "commands": commands_of(every),
        "runs": [run for part in [*parts, *others] for run in _runs(part)],
        "config": alike,
        "models": [{**entry, "key": ""} for entry in models_of([*parts, *others])],  # arrays are not kept
        "device": ", ".join(sorted({str(about["device"]) for about in abouts if about.get("device")})),
        "started": min((about["started"] for about in abouts if about.get("started")), default=None),
        "wall_seconds": round(sum(float(about.get("wall_seconds") or 0) for about in abouts), 1),
        "status": "complete" if all(about.get("status") == "complete" for about in abouts) else "interrupted",
        "warnings": list(dict.fromkeys(words for about in every for words in about.get("warnings") or [])),
        "skipped": [item for about in every for item in about.get("skipped") or []],
    }


def commands_of(abouts: Sequence[Record]) -> list[Any]:
    """The commands of all runs, each once; a join of before is told by those of its runs."""
    told = [command for about in abouts for command in about.get("commands") or [about.get("command")]]
    once = {shlex.join(command): command for command in told if command}
    return [command for command in once.values() if tuple(command[: len(TOOL)]) != TOOL]


def models_of(parts: Sequence[Part]) -> list[Record]:
    """The entries of all models and seeds; what a later run adds to an entry is added."""
    found: dict[Key, Record] = {}
    for part in agreeing(parts):
        for key, entry in part.models.items():
            entry = entry if entry.get("data") else {**entry, "data": part.about.get("data")}
            known = {name: value for name, value in found.get(key, {}).items() if value not in (None, "", [])}
            found[key] = {**entry, **known}
    return list(found.values())


def _runs(part: Part) -> list[Record]:
    """The runs that a part is made of; a committed result tells its own."""
    own = {"name": part.name, **{name: part.about.get(name) for name in RUN}}
    return part.about.get("runs") or [own]
