"""`anisoscope tangent` and `anisoscope sweep`: measure existing checkpoints with the instruments of the monitor.

The results of a checkpoint are saved before the next begins: its rows (`parts/`), its sketch and the state after it
(`state/`). Table, flags and warnings are made from these alone, so that a sweep that was killed and resumed gives the
same results as an uninterrupted one.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.execution.crew import Crew
from anisoscope.execution.job import DONE, REFUSED, Executor, Outcome, arrived
from anisoscope.measurement.inspection import other_reading
from anisoscope.metrics.training import checkpoint as checkpoint_intact
from anisoscope.models.checkpoint import HEADLESS
from anisoscope.models.downloads import Downloads
from anisoscope.models.placement import choose_device
from anisoscope.models.source import parse_model
from anisoscope.monitor.sink import MonitorStore, ResultSink, in_order, send
from anisoscope.option import Progress
from anisoscope.results.folder import RunFolder, replace_file
from anisoscope.results.manifest import gravest_first, new_manifest, outcome, wrong_loss
from anisoscope.results.privacy import placeless
from anisoscope.results.query import Table
from anisoscope.series import SweepConfig, discovery, integrity
from anisoscope.series.discovery import Checkpoint, CheckpointSeries
from anisoscope.series.examination import (
    CheckpointTask,
    Examination,
    describe,
    examine,
    open_checkpoint,
    read_examination,
)
from anisoscope.series.integrity import NON_FINITE, REPEATED, Entry
from anisoscope.series.measurer import CheckpointAlone, CheckpointMeasurer, CheckpointResult
from anisoscope.tangent.row_map import RowMap, write_map

JOBS = "jobs"  # the folder of what jobs write
LARGE = 50_000_000  # parameters from which memory is freed explicitly


@dataclass
class Sweeper:
    """One run over a series of checkpoints."""

    config: SweepConfig
    folder: RunFolder
    command: Sequence[str] = ()
    progress: Progress | None = None
    sinks: list[ResultSink] = field(default_factory=list)
    lasting: bool = True  # whether the folder stays when the sweep is done
    about: dict[str, Any] = field(default_factory=dict)
    entries: dict[int, Entry] = field(default_factory=dict)
    tables: dict[int, Table] = field(default_factory=dict)
    words: tuple[str, str] | None = None  # fingerprint of the series' tokenizer, and the checkpoint it came with
    late: dict[int, list[str]] = field(default_factory=dict)  # flags by key, known once all are measured
    kept: int = 0  # number of states written
    plan: CheckpointSeries | None = None  # the series, if found before the folder was made
    executor: Executor | None = None  # has checkpoints measured elsewhere; in this process without one

    @classmethod
    def at(cls, config: SweepConfig, place: str | Path, *, resume: bool, **words: Any) -> Sweeper:
        """A sweep into a folder, which is created only if checkpoints are found."""
        if words.get("executor") is not None and config.remove_downloads:
            raise AnisoscopeError(
                "--remove-downloads cannot go with --executor: jobs share the hub's cache, and one would delete what "
                "another reads; leave one of them out."
            )
        plan = None if (Path(place) / "run.json").is_file() else _series_of(config)
        return cls(config, RunFolder.create(place, asdict(config), resume=resume), plan=plan, **words)

    def run(self) -> Table:
        """Measure every checkpoint in order; those that cannot be loaded are flagged and skipped."""
        old = self.folder.about()
        known = old.get("revisions", ()) if old.get("config") else ()
        self.series = self.plan or _series_of(self.config, known)
        if known:  # how they were chosen is known from when the sweep began
            self.series.notes.extend(old.get("revision_notes", ()))
        self.store = MonitorStore(self.folder.path, resume=True, about={})
        try:
            return self._run(old)
        finally:
            self.store.end()

    def _run(self, old: dict[str, Any]) -> Table:
        rows = RowMap(folder=self.folder.path / "state") if self.config.series else None
        steps = [checkpoint.step for checkpoint in self.series.checkpoints if checkpoint.step is not None]
        self.measurer = CheckpointMeasurer(self.config, steps, row_map=rows)
        state = self._restore()
        if old.get("status") == "complete" and not self._to_do():
            return self.folder.table()
        if state is not None:
            self.measurer.load(state["examiner"], self.store.window)
        options: dict[str, Any] = {"command": self.command, "seed": self.config.seed, "old": old}
        self.about = new_manifest(asdict(self.config), kind="sweep" if self.config.series else "tangent", **options)
        if self.config.revisions:
            self.about["revisions"] = [c.revision for c in self.series.checkpoints]
            self.about["revision_notes"] = list(self.series.notes)
        self._write_about()
        self.resumed = max(self.tables, default=-1)
        self._send("start", self._manifest())
        started = time.monotonic()
        try:
            self._measure_all()
            study = self.measurer.study
            still_open = study is not None and study.frozen is not None and bool(study.frozen.window)
            last = [] if study is None else study.finish()  # the frozen proxy of a series that ended in its window
        except BaseException as error:
            self._finish(started, error=error)
            raise
        table = self._finish(started, last=last)
        if not still_open:  # otherwise the newest state still refers to these files
            self.store.drop_window()
        return table

    def _measure_all(self) -> None:
        if self.executor is None:
            self._measure_here()
        else:
            self._measure_elsewhere(self.executor)
        series = self.series.checkpoints
        self._tell("checkpoints", len(series), len(series))
        if not self.tables:
            reasons = [flag for entry in self.entries.values() for flag in entry["flags"]]
            first = integrity.reason(reasons[0]).rstrip(".").removesuffix(integrity.RESUME)
            raise AnisoscopeError(
                f"none of the {len(series)} checkpoints of {self.config.model!r} could be loaded (the first: {first}); "
                "mend that, and the same command with --resume goes on."
            )
        shutil.rmtree(self.folder.path / JOBS, ignore_errors=True)

    def _measure_here(self) -> None:
        c, series = self.config, self.series.checkpoints
        wanted = [checkpoint.revision for checkpoint in self._to_do() if checkpoint.revision]
        journal = self.folder.path / "state" / "downloads.json"
        downloads = Downloads(c.model, wanted, journal, c.remove_downloads, c.trust_remote_code) if wanted else None
        for number, checkpoint in enumerate(series):
            self._tell("checkpoints", number, len(series))
            if checkpoint.key not in self.tables:
                self._checkpoint(checkpoint, downloads)
                if self.entries[checkpoint.key].get("described", {}).get("parameters", 0) > LARGE:
                    gc.collect()  # the memory of a large model is given back before the next one
                    torch.cuda.empty_cache()  # does nothing without CUDA

    def _measure_elsewhere(self, executor: Executor) -> None:
        """One job for each checkpoint; their results are taken in the order of the series."""
        todo, series = self._to_do(), self.series.checkpoints
        with Crew(executor, self.folder.path / JOBS, self.progress) as crew:
            tasks = {checkpoint.key: self._task(checkpoint, crew.folder) for checkpoint in todo}
            jobs = {key: crew.job(f"checkpoint-{key}", examine, task) for key, task in tasks.items()}
            fresh = {key for key in jobs if self._stored(tasks[key]) is None}
            outcomes = crew.in_order([jobs[key] for key in jobs if key in fresh])
            self.about["executor"] = {"kind": type(executor).__name__, "workers": executor.workers}
            for checkpoint in todo:
                self._tell("checkpoints", len(series) - len(todo) + todo.index(checkpoint), len(series))
                task = tasks[checkpoint.key]
                outcome = next(outcomes)[1] if checkpoint.key in fresh else Outcome(DONE)
                self._outcome(checkpoint, task, outcome, crew)
                task.result.unlink(missing_ok=True)
                if crew.notes:
                    self.about["executor"]["retried"] = list(crew.notes)

    def _task(self, checkpoint: Checkpoint, folder: Path) -> CheckpointTask:
        steps, known = self.measurer.steps or [], self.measurer.counts
        late = self._is_late(checkpoint)
        first = self.measurer.table_before is None and checkpoint == self._to_do()[0]
        counts = folder / "counts.pt" if known is not None else None
        if counts is not None:
            replace_file(counts, lambda path: torch.save(known, path))
        words: dict[str, Any] = {"timed": self.series.timed, "types": not late and not first, "counts": counts}
        return CheckpointTask(
            self.config, checkpoint, steps, result=folder / f"checkpoint-{checkpoint.key}.pt", **words
        )

    def _stored(self, task: CheckpointTask) -> Examination | None:
        """What a job has written, of the files that are there now."""
        found = read_examination(task.result, choose_device(self.config.device)) if task.result.is_file() else None
        return found if found is not None and found.stamp == discovery.stamp(task.checkpoint.spec) else None

    def _outcome(self, checkpoint: Checkpoint, task: CheckpointTask, outcome: Outcome, crew: Crew) -> None:
        """Take the results of one job, or record why there are none."""
        if outcome.kind == REFUSED:
            raise AnisoscopeError(outcome.reason)
        found = self._stored(task) if outcome.kind == DONE and arrived(task.result) else None
        if found is not None and self._counted_otherwise(found):
            again = self._task(checkpoint, crew.folder)
            outcome = crew.run(crew.job(f"checkpoint-{checkpoint.key}", examine, again))
            found = self._stored(again) if outcome.kind == DONE and arrived(again.result) else None
        if found is None:
            reason = outcome.reason or "its job ended without results"
            entry: Entry = {"key": checkpoint.key, "label": checkpoint.label, "step": checkpoint.step}
            self.entries[checkpoint.key] = entry | {"flags": [f"{integrity.FAILED}{reason}"]}
            return
        self._take(checkpoint, found, lambda: self._adopted(checkpoint, found))

    def _counted_otherwise(self, found: Examination) -> bool:
        """Whether other token frequencies were used than those of the first checkpoint, which are used for all."""
        known, counts = self.measurer.counts, None if found.alone is None else found.alone.counts
        return known is not None and counts is not None and not torch.equal(known, counts)

    def _adopted(self, checkpoint: Checkpoint, found: Examination) -> CheckpointAlone:
        if found.refusal or found.alone is None:
            raise AnisoscopeError(found.refusal)
        self.measurer.adopt(found.alone, checkpoint.step)
        return found.alone

    def _to_do(self) -> list[Checkpoint]:
        return [c for c in self.series.checkpoints if c.key not in self.tables]

    def _flagged(self) -> list[Entry]:
        """The entries of all checkpoints in order, with all their flags."""
        entries = [self.entries[key] for key in sorted(self.entries)]
        return [entry | {"flags": [*entry["flags"], *self.late.get(entry["key"], ())]} for entry in entries]

    def _write_about(self) -> None:
        """Write run.json from the entries of all checkpoints."""
        entries, hidden = self._flagged(), ("key", "notes", "described", "device", "data", "unmeasured", "loss")
        done = [entry for entry in entries if "described" in entry]
        self.about["checkpoints"] = [{k: v for k, v in entry.items() if k not in hidden} for entry in entries]
        self.about["warnings"] = list(dict.fromkeys([*self.series.notes, *integrity.warnings_of(entries)]))
        if done:
            learned = not self.config.random_init and done[-1]["step"] != 0
            wrong = wrong_loss(*done[-1]["loss"]) if learned and "loss" in done[-1] else []
            warnings = [*(f"{done[-1]['label']}: {words}" for words in wrong), *self.about["warnings"]]
            self.about["warnings"] = gravest_first(warnings)
            described = done[0]["described"]
            self.about["models"] = [described | {"notes": [*wrong, *described["notes"]]}]
            self.about["device"] = done[-1]["device"]
            self.about |= next(({"data": entry["data"]} for entry in reversed(done) if entry["data"]), {})
        self.folder.write_about(self.about)

    def _restore(self) -> dict[str, Any] | None:
        """Restore finished checkpoints; returns the newest state or None."""
        state = self.store.newest()
        if state is not None:
            self.entries, self.words = dict(state["entries"]), state["words"]
            done = sorted(state["done"])
            self.tables = dict(zip(done, self.store.tables(set(done)), strict=True))
            self.kept = state.get("kept", len(done))
            for checkpoint in self.series.checkpoints:  # files of an unmeasured checkpoint have changed: try again
                before = self.entries.get(checkpoint.key, {}).get("unmeasured")
                if checkpoint.key in self.tables and before is not None and before != discovery.stamp(checkpoint.spec):
                    del self.tables[checkpoint.key]
        return state

    def _finish(self, started: float, *, error: BaseException | None = None, last: Sequence[Any] = ()) -> Table:
        self.about |= outcome(error)
        self.about["wall_seconds"] = round(self.about["wall_seconds"] + time.monotonic() - started, 2)
        columns = {"model": self._name(), "revision": ""}
        in_time = [self.tables[key] for key in sorted(self.tables)]  # not as they came: some are measured again
        measured = [*in_time, self._table(last, columns)]
        table = in_order(Table.concat([*measured, self._flag_rows()]))
        if self.tables:
            self.store.write_table(table, done=set(self.tables))
        self.late = self._out_of_order() if error is None else {}  # what was measured is safe by now
        if self.late:
            table = in_order(Table.concat([*measured, self._flag_rows()]))
            self.store.write_table(table, done=set(self.tables))
        if error is None and self.measurer.row_map is not None:
            options: dict[str, Any] = {"seed": self.config.seed, "counts": self.measurer.counts}
            self.about["map"] = write_map(self.folder.path, self.measurer.row_map, model=self._name(), **options)
        if len(measured[-1]):
            self._send("write", measured[-1], max(self.tables))
        ended = {"status": self.about["status"], "warnings": self.about["warnings"]}
        self._send("finish", self._manifest() | ended)
        self._write_about()
        return replace(table, about=self.about)

    def _manifest(self) -> dict[str, Any]:
        """What sinks are told of the sweep."""
        about = {"name": self._name(), "config": asdict(self.config), "models": self.about["models"]}
        folder = str(self.folder.path.absolute()) if self.lasting else None
        return about | {"seed": self.config.seed, "folder": folder, "resumed": self.resumed}

    def _send(self, method: str, *args: Any) -> None:
        self.series.notes.extend(send(self.sinks, method, *args))

    def _flag_rows(self) -> Table:
        rows = []
        for entry in self._flagged():
            place = {"metric": "checkpoint", "variant": "", "group": "", "kind": "training", "stack": "single"}
            remarks = [*entry["flags"], *(note for note in entry.get("notes", []) if note == HEADLESS)]
            columns = {"revision": self._revision(entry), "step": entry["step"], "note": "; ".join(remarks)}
            rows.append({**place, **columns, "value": checkpoint_intact(entry["flags"])})
        return self._table(rows, {"model": self._name()})

    def _table(self, records: Sequence[dict[str, Any]], columns: dict[str, Any]) -> Table:
        fixed = {"run": self.folder.path.name, "data": self.config.data, "seed": self.config.seed, **columns}
        return Table.from_records({**fixed, **row} for row in records)

    def _revision(self, entry: Entry) -> str:
        """The label of a checkpoint of a series; one model alone has the revision that a profile gives it."""
        return str(entry["label"] if self.config.series else entry.get("described", {}).get("revision") or "")

    def _name(self) -> str:
        """The model's name in the table."""
        described = next((e["described"] for e in self.entries.values() if "described" in e), {"name": ""})
        return self.series.name or str(described["name"])

    def _tell(self, what: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(what, done, total)

    def _checkpoint(self, checkpoint: Checkpoint, downloads: Downloads | None) -> None:
        """Load and measure one checkpoint in this process."""
        found, loaded = open_checkpoint(self.config, checkpoint, downloads, self._tell)
        types = not self._is_late(checkpoint) and self.measurer.table_before is not None
        timed = self.series.timed

        def measured() -> CheckpointAlone:
            return self.measurer.alone(loaded, checkpoint.step, types=types, tell=self._tell)

        taken = self._take(checkpoint, found, measured, lambda: describe(found, loaded, timed=timed))
        if taken and downloads is not None:
            downloads.finished(checkpoint.revision)

    def _is_late(self, checkpoint: Checkpoint) -> bool:
        """Whether later steps are measured already, as where a sweep is resumed."""
        return checkpoint.step is not None and any(key > checkpoint.step for key in self.tables)

    def _take(
        self,
        checkpoint: Checkpoint,
        found: Examination,
        measured: Callable[[], CheckpointAlone],
        described: Callable[[], None] = lambda: None,
    ) -> bool:
        """Flag a checkpoint and save its results; False if it could not be loaded."""
        entry: Entry = {"key": checkpoint.key, "label": checkpoint.label, "step": checkpoint.step, "flags": []}
        entry |= {"commit": found.commit} if found.commit else {}
        if found.error:
            entry["flags"] = [self._unloaded(found)]
        self.entries[checkpoint.key] = entry
        if found.error:
            return False
        entry["flags"] = self._flags(checkpoint, found.fingerprint, entry, finite=found.finite)
        self.words = self.words or (found.reading, checkpoint.label)
        if found.reading != self.words[0]:
            entry["flags"].append(other_reading(self.words[1], reads_text=found.reads_text))
        result = CheckpointResult()  # stays empty if not measured
        if found.finite and found.reading == self.words[0]:
            late = self._is_late(checkpoint)
            result = self.measurer.conclude(measured(), checkpoint.step, late=late)
        else:
            entry["unmeasured"] = discovery.stamp(checkpoint.spec)
        described()
        self._keep(checkpoint, entry, found, result)
        return True

    def _unloaded(self, found: Examination) -> str:
        """The flag of a checkpoint that could not be loaded; an error if there is no other, or no tokenizer at all."""
        if found.no_tokenizer and not self.words:  # the series has none
            raise AnisoscopeError(found.error)
        message = integrity.resumable(found.error)
        if len(self.series.checkpoints) == 1:
            raise AnisoscopeError(message if self.config.series else found.error)
        return f"{found.lost}{message}"

    def _flags(self, checkpoint: Checkpoint, fingerprint: str, entry: Entry, *, finite: bool) -> list[str]:
        """Flags of one checkpoint: repeated, not finite, out of order."""
        flags = []
        done = [e for k, e in sorted(self.entries.items()) if k in self.tables]
        same = next((e["label"] for e in done if e.get("fingerprint") == fingerprint), None)
        if same is not None:
            flags.append(f"{REPEATED}the same weights as {same}")
        if not finite:
            flags.append(NON_FINITE)
        if checkpoint.late:
            flags.append("out of order: it was named after a later one")
        recorded = discovery.recorded_step(checkpoint.spec) if self.series.timed and not flags else None
        if recorded is not None and discovery.named_step(checkpoint.label) == checkpoint.step != recorded:
            flags.append(f"out of order: it says inside that it is of step {recorded}")
            entry["recorded"] = recorded
        return flags

    def _keep(self, checkpoint: Checkpoint, entry: Entry, seen: Examination, found: CheckpointResult) -> None:
        """Save the results of a checkpoint and the state after it."""
        key, name = checkpoint.key, self.series.name or seen.name
        entry |= {"commit": seen.commit} if seen.commit else {}
        entry |= {"fingerprint": seen.fingerprint, "device": seen.device, "data": found.data}
        entry["described"] = {"name": name, **seen.described, **found.read, "fingerprint": seen.fingerprint}
        entry["notes"] = list(dict.fromkeys([*seen.notes, *found.notes]))
        if (loss := next((row for row in found.records if row["metric"] == "probe_loss"), None)) is not None:
            entry["loss"] = loss.get("low", loss["value"]), seen.vocabulary
        self.tables[key] = self._table(found.records, {"model": name, "revision": self._revision(entry)})
        if seen.sketch is not None:
            replace_file(self._sketch(key), lambda path: torch.save(seen.sketch, path))
        self.kept += 1
        done = {k: e for k, e in self.entries.items() if not any(map(integrity.is_lost, e["flags"]))}
        state = {"step": key, "done": sorted(self.tables), "entries": done, "words": self.words}
        state |= {"kept": self.kept, "examiner": self.measurer.state()}
        self.store.put_concepts(key, [{"model": name, **card} for card in found.cards])
        self.store.write_step(key, self.tables[key], state, self.measurer.window(key), number=self.kept)
        self._send("write", self.tables[key], key)
        self._write_about()

    def _sketch(self, key: int) -> Path:
        return self.folder.path / "state" / f"sketch-{key:09d}.pt"

    def _out_of_order(self) -> dict[int, list[str]]:
        """Flags, by key, of checkpoints that seem swapped with another by their weights."""
        entries = [self.entries[key] for key in self.tables]
        entries.sort(key=lambda e: int(e["recorded"] if "recorded" in e else e["key"]))  # by the step recorded inside
        usable = [e for e in entries if not any(f.startswith((REPEATED, NON_FINITE)) for f in e["flags"])]
        usable = [e for e in usable if self._sketch(e["key"]).is_file()]

        def read(number: int) -> dict[str, torch.Tensor]:
            stored: dict[str, torch.Tensor] = torch.load(self._sketch(usable[number]["key"]), weights_only=True)
            return stored

        path = integrity.distances_of(len(usable), read)
        late: dict[int, list[str]] = {}
        for pair in integrity.exchanges(path.d, path.margin) if path is not None else ():
            first, second = usable[pair.first], usable[pair.second]
            for entry, other in ((first, second), (second, first)):
                if not any(flag.startswith("out of order") for flag in entry["flags"]):
                    late.setdefault(entry["key"], []).append(
                        f"looks out of order: by its weights it is in the place of {other['label']} (exchanging the "
                        f"two saves {pair.saved:.0%} of the detour that they could make)"
                    )
        return late


def _series_of(config: SweepConfig, known: Sequence[str] = ()) -> CheckpointSeries:
    c = config
    if c.series:
        words: dict[str, Any] = {"architecture": c.architecture, "name": c.name, "inner": c.stage_checkpoints}
        return discovery.find_series(c.models, c.revisions, known=known, **words)
    parse_model(c.model, random_init=c.random_init, state=c.architecture is not None)  # raises if it is no model
    return CheckpointSeries(c.name or "", [Checkpoint(c.model, None, placeless(c.model))], timed=False)
