"""`anisoscope profile`: measures models and writes a run folder; every finished part is saved before the next begins.

A model is measured in passes over its data, as few as memory allows. A pass collects the rows of some sites in a bank,
batch by batch, saves it from time to time, and finally evaluates the metrics on it.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import torch

from anisoscope.capture.row import Batch
from anisoscope.capture.sites.site import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.execution.crew import Crew
from anisoscope.execution.job import Executor
from anisoscope.measurement import bank as banks
from anisoscope.measurement.bank import ATTENTION_KINDS, Bank, Plan, Setup, applies, make_plan, prepare
from anisoscope.measurement.config import ProfileConfig as ProfileConfig
from anisoscope.measurement.evaluation import Records, evaluate_bank, evaluate_pass
from anisoscope.measurement.feed import Feed, fitting, make_feed
from anisoscope.measurement.inspection import MIB, Entry, PassPlan, available, describe, plan_passes, rows_bytes
from anisoscope.measurement.measure import LOADING, Tee, capture_batches, feed_rows, feed_tables
from anisoscope.measurement.saved_rows import RowWriter, save_arrays
from anisoscope.measurement.targets import wrong_text
from anisoscope.measurement.workers.model_job import ModelTask, refuse_failed, results_of
from anisoscope.measurement.workers.processes import Processes, Value, placed
from anisoscope.metrics.catalogue import parse_requests
from anisoscope.metrics.engine.metric import HEAD_KINDS, WEIGHT_KINDS, Request
from anisoscope.models.load import Loaded, load_model
from anisoscope.models.source import parse_model, stored_rows
from anisoscope.numerics.neighbours import nearest
from anisoscope.option import Progress, refuse_idle
from anisoscope.results.folder import RunFolder, slug
from anisoscope.results.manifest import gravest_first, new_manifest, outcome
from anisoscope.results.query import Table

LONGEST = 100  # characters of a model's name in file names, whose length file systems limit
# options that a file of rows has no use for
OF_MODELS = (
    *("data", "tokens", "context", "seconds", "batch_size", "layers", "sites", "modules", "text_field"),
    *("group_by", "pool", "special", "first", "tokenizer", "save_rows", "device_map", "dtype", "halves"),
    *("attention_rows", "trust_remote_code", "random_init", "device", "memory_mb"),
)
_SAVE_EVERY = 30.0  # least seconds between saves of an unfinished pass


def _highest() -> int:
    """Peak resident memory of the process in bytes according to the operating system; 0 where unavailable."""
    with contextlib.suppress(OSError, StopIteration):  # Linux: what getrusage says contains the process that started it
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)


class PeakMemory:
    """Peak resident memory of the process since this object was made.

    The system's own peak, which includes memory between two calls of `look`, counts only if it rose since then.
    """

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.peak = self.process.memory_info().rss
        self._before = _highest()

    def look(self) -> int:
        highest = _highest()
        self.peak = max(self.peak, self.process.memory_info().rss, highest if highest > self._before else 0)
        return self.peak

    def about(self) -> dict[str, int]:
        """The entries of run.json on peak memory, in MiB."""
        cuda = {"peak_cuda_memory_mb": torch.cuda.max_memory_allocated()} if torch.cuda.is_available() else {}
        return {name: round(size / MIB) for name, size in {"peak_memory_mb": self.look(), **cuda}.items()}


@dataclass
class Profiler:
    """One run of `profile`."""

    config: ProfileConfig
    folder: RunFolder
    command: Sequence[str] = ()
    progress: Progress | None = None
    about: dict[str, Any] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    peak: PeakMemory = field(default_factory=PeakMemory)
    started: float = field(default_factory=time.monotonic)
    estimate: str = ""  # a sentence on the memory that the current model will need
    peers: Processes | None = None  # this process among several, of which the first has the results
    executor: Executor | None = None  # has models measured elsewhere; in this process without one
    _ready: threading.Thread | None = None  # makes the device ready

    def run(self) -> Table:
        """Measure every model; finished models are kept if a later one fails or the run is interrupted."""
        old = self.folder.about()
        if self.agreed(old.get("status") == "complete"):  # resumed, but complete already
            self.about, self.tables = old, [self.folder.table()] if self.first else []
            return Table.concat(self.tables, old)
        if self.peers is not None and self.executor is not None:
            raise AnisoscopeError("--executor gives models to jobs of its own; leave it out, or run without torchrun.")
        if self.peers is not None:
            refuse_idle(self.config, ("save_rows", "device_map"), "in several processes; run it without torchrun")
        requests = parse_requests(self.config.metrics)
        self._ready = make_ready(self.device)
        # a misspelt name fails before anything is measured
        kinds = {parse_model(spec, random_init=self.config.random_init).kind for spec in self.config.models}
        if kinds == {"rows"}:
            self._refuse_options_of_models()
        self.about = new_manifest(asdict(self.config), command=self.command, seed=self.config.seed, old=old)
        self.about["wall_seconds"] = 0.0
        if self.peers is not None:
            self.about["processes"] = self.peers.size
        self._before = float(old.get("wall_seconds", 0.0))
        self._known = {model["key"]: model for model in old.get("models", []) if "key" in model}
        self.folder.write_about(self.about)
        try:
            keys = {f"{number}-{slug(spec)[:LONGEST]}": spec for number, spec in enumerate(self.config.models)}
            if self.executor is None:
                for key, spec in keys.items():
                    self._model(key, spec, requests)
            else:
                self._elsewhere(self.executor, keys)
        except BaseException as error:
            self._finish(error)
            raise
        self._finish()
        self.folder.tidy()
        return Table.concat(self.tables, self.about)

    @property
    def first(self) -> bool:
        """Whether the results are here: in the only process, or in the first of several."""
        return self.peers is None or self.peers.first

    @property
    def device(self) -> str:
        return self.config.device if self.peers is None else placed(self.config.device)

    def agreed(self, mine: Value) -> Value:
        """What the first process says, whose run folder decides what is to be measured."""
        return mine if self.peers is None else self.peers.agree(mine)

    def _refuse_options_of_models(self) -> None:
        try:
            refuse_idle(self.config, OF_MODELS, "for a file of rows, which is read as it is")
        except AnisoscopeError:
            for spec in self.config.models:
                stored_rows(spec)  # a file that cannot be read is told first: no option mends it
            raise

    def _finish(self, error: BaseException | None = None) -> None:
        self.about |= outcome(error)
        self.about["wall_seconds"] = round(self._before + time.monotonic() - self.started, 2)
        peaks = self.peak.about()
        self.about |= {name: max(size, self.about.get(name, 0)) for name, size in peaks.items()}
        if self.tables:
            self.folder.write_table(Table.concat(self.tables))
        self.folder.write_about(self.about)

    def _model(self, key: str, spec: str, requests: list[Request]) -> None:
        done = self.folder.part(key)
        if self.agreed(done is not None and key in self._known):  # finished before an interruption
            if done is not None:
                self.tables.append(done)
                self._describe(self._known[key])
            return
        if self._is_rows(spec) and not self.first:  # a file is read by one process
            return
        self._keep(key, *self.measured(key, spec, requests))

    def _is_rows(self, spec: str) -> bool:
        return parse_model(spec, random_init=self.config.random_init).kind == "rows"

    def measured(self, key: str, spec: str, requests: list[Request]) -> tuple[Records, Entry]:
        """The records of one model and its entry in run.json."""
        return (self._rows_file if self._is_rows(spec) else self._network)(key, spec, requests)

    def _keep(self, key: str, records: Records, entry: Entry) -> None:
        self.folder.write_part(key, self.add(records, entry))
        self.folder.write_table(Table.concat(self.tables))
        self.folder.write_about(self.about)
        self.folder.drop_partial(key)

    def _elsewhere(self, executor: Executor, keys: Mapping[str, str]) -> None:
        """One job for each model; what fails is told once all others are measured."""
        failed: dict[str, str] = {}
        folder = self.folder.path.absolute()
        done = {key: part for key in keys if key in self._known and (part := self.folder.part(key)) is not None}
        tasks = [ModelTask(self.config, folder, key, spec) for key, spec in keys.items() if key not in done]
        jobs = self.about["executor"] = {"kind": type(executor).__name__, "workers": executor.workers}
        with Crew(executor, folder / "jobs", self.progress) as crew:
            found = results_of(crew, tasks, profile_model)
            for number, (key, spec) in enumerate(keys.items()):
                self.tell("models", number, len(keys))
                if key in done:
                    self.tables.append(done[key])
                    self._describe(self._known[key])
                    continue
                _, mine = next(found)
                if isinstance(mine, str):
                    failed[spec] = mine
                else:
                    self._keep(key, mine["records"], mine["entry"])
                    self.about |= {name: max(size, self.about.get(name, 0)) for name, size in mine["peaks"].items()}
                jobs |= {"retried": list(crew.notes)} if crew.notes else {}
        self.tell("models", len(keys), len(keys))
        refuse_failed(failed, len(keys), some=bool(self.tables))
        shutil.rmtree(folder / "jobs", ignore_errors=True)

    def add(self, records: Records, entry: Entry) -> Table:
        """Make the table of one model and add it to those of the run."""
        same = sum(entry["name"] == model.get("alike", model["name"]) for model in self.about["models"])
        if same:  # equal names must stay distinguishable in the table
            entry["alike"], entry["name"] = entry["name"], f"{entry['name']} ({same + 1})"
        columns = {"run": self.folder.path.name, "model": entry["name"], "revision": entry.get("revision", "")}
        columns |= {"data": entry.get("data", {}).get("name", ""), "seed": self.config.seed}
        self.tables.append(Table.from_records({**columns, **record} for record in records))
        self._describe(entry)
        return self.tables[-1]

    def _describe(self, entry: Entry) -> None:
        self.about["models"].append(entry)
        self.about["device"] = entry.get("device", "cpu")
        if entry.get("data"):
            self.about["data"] = entry["data"]
        self.about["warnings"] += [f"{entry['name']}: {note}" for note in entry.get("notes", [])]
        sizes = [about.get("memory_estimate_mb", 0) for about in (self.about, entry)]
        self.about["memory_estimate_mb"] = max(sizes)

    def _rows_file(self, key: str, spec: str, requests: list[Request]) -> tuple[Records, Entry]:
        arrays = stored_rows(spec)
        if not any(applies(request, "rows") for request in requests):
            names = ", ".join(request.metric.name for request in requests)
            raise AnisoscopeError(f"none of the metrics asked for ({names}) is measured on rows of a file.")
        sizes = [rows_bytes(rows, sample_size=self.config.sample_size) for rows in arrays.values()]
        needed = sum(held for held, _ in sizes) + max(work for _, work in sizes)
        now = self.peak.process.memory_info().rss
        self.estimate = (
            f"{Path(spec).name}: about {(now + needed) // MIB} MiB of memory in all, {available() // MIB} MiB are free"
        )
        if needed > available():
            raise AnisoscopeError(f"{self.estimate}; give fewer columns, or a part of the rows.")
        self.tell("rows", 0, len(arrays))
        bank = Bank(make_plan(requests, ["rows"], seed=self.config.seed, sample_size=self.config.sample_size))
        for number, (name, rows) in enumerate(arrays.items()):
            feed_rows(bank, Site(number, "rows", name=name), rows)
            self.tell("rows", number + 1, len(arrays))
        setup = Setup(None, [], [], ["rows"], {"single": max(1, len(arrays) - 1)})
        records, counts = evaluate_pass(bank, requests, setup, progress=self.progress)
        del counts["given"]  # a file has no data beside its rows
        save_arrays(self.folder, key, bank)
        width = next(iter(arrays.values())).shape[1]
        entry = {"key": key, "name": Path(spec).name, "type": "rows", "width": int(width), "layers": len(arrays)}
        return records, entry | counts | {"memory_estimate_mb": round((now + needed) / MIB)}

    def _network(self, key: str, spec: str, requests: list[Request]) -> tuple[Records, Entry]:
        c = self.config
        self.tell("load", 0, 1)
        reads = not c.sites or bool(set(c.sites) - WEIGHT_KINDS)  # weight tables are measured without a text
        options = {name: getattr(c, name) for name in LOADING} | {"device": self.device}
        loaded = load_model(spec, **options, need_tokenizer=reads)
        self.tell("load", 1, 1)
        if self._ready is not None:
            self._ready.join()  # it sets numbers of threads and precisions, and sets them back
        named: dict[str, Any] = {name: getattr(c, name) or None for name in ("sites", "layers", "modules")}
        return ModelPasses(self, loaded, prepare(loaded.model, requests, **named), requests, key).run()

    def tell(self, what: str, done: int, total: int) -> None:
        self.peak.look()
        if self.peers is not None:
            self.peers.sign()
        if self.progress is not None:
            self.progress(what, done, total)


def profile_model(task: ModelTask, tell: Progress) -> None:
    """The work of a job: measure one model into the run folder of all."""
    profiler = Profiler(task.config, RunFolder(task.folder), progress=tell, about={"models": [], "warnings": []})
    records, entry = profiler.measured(task.key, task.spec, parse_requests(task.config.metrics))
    task.write(records, entry, profiler.peak.about())


def make_ready(device: str) -> threading.Thread | None:
    """Have a CUDA device do what it does at first use, while the host still imports and loads; None without one."""
    name = "cuda" if device == "auto" else device
    if not name.startswith("cuda") or not torch.cuda.is_available():
        return None
    thread = threading.Thread(target=first_use, args=(name,), daemon=True)
    thread.start()
    return thread


@torch.no_grad()
def first_use(device: str) -> None:
    """Use what a profile will: the context of the device, libraries of products and of eigenvalues, a search."""
    with contextlib.suppress(Exception):  # whatever is wrong is told where results depend on it
        x = torch.arange(16_384.0, device=device).view(4096, 4).cos()
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            x.to(dtype).T @ x.to(dtype)
        square = torch.eye(64, dtype=torch.float64, device=device)
        torch.linalg.eigh(square)
        torch.linalg.cholesky(square)
        nearest(x, 2)


@dataclass
class _Pass:
    """One pass over the data for some of the sites."""

    number: int
    sites: list[Site]
    bank: Bank
    done: int = 0  # batches
    seen: int = 0  # rows of these
    clean: int = 0  # calls of the bank after the last whole batch; within a batch sites are out of step
    complete: bool = False  # all data was read, metrics are being computed
    writer: RowWriter | None = None
    due: float = field(default_factory=lambda: time.monotonic() + _SAVE_EVERY)  # when it is to be saved


class ModelPasses:
    """All passes of one model."""

    def __init__(self, owner: Profiler, loaded: Loaded, setup: Setup, requests: list[Request], key: str) -> None:
        self.owner, self.loaded, self.setup, self.requests, self.key = owner, loaded, setup, requests, key
        self.folder, self.tell, self.peers = owner.folder, owner.tell, owner.peers
        self.config, notes = fitting(loaded, owner.config)
        self.feed: Feed = make_feed(loaded, self.config, tell=self.tell)
        self.entry = describe(loaded, setup, key)
        self.entry["notes"] += notes

    def run(self) -> tuple[Records, Entry]:
        """Run all passes; returns the records of the table and the model's entry in run.json."""
        planned, entry = self._plan(), self.entry
        records: Records = []
        for number, sites in enumerate(self.owner.agreed(planned.groups)):  # memory may differ between machines
            done = self.folder.part(f"{self.key}.{number}")
            if self.owner.agreed(done is not None) and done is None:
                continue
            if done is not None:  # a pass that was finished before an interruption
                counts = done.about
                records += [{k: v for k, v in row.items() if k != "schema" and v is not None} for row in done.records()]
            else:
                fresh, counts = self._measure(self._resumed(number, sites, planned.plan), records)
                records += fresh
            given = [n for n in (entry.get("given"), counts.get("given")) if n is not None]
            together = {"row_count": max(entry["row_count"], counts["row_count"]), "given": min(given, default=None)}
            entry |= {**counts, **together, "notes": [*entry["notes"], *counts["notes"]]}
        if self.owner.first:
            self._conclude()
        return records, entry

    def _plan(self) -> PassPlan:
        """Verify the sites and plan the passes; completes the model's entry with sizes."""
        owner, entry, name = self.owner, self.entry, self.loaded.name
        if self.loaded.reads_text and self.setup.captured and (first := next(self.feed.batches(), None)) is not None:
            entry["notes"] += wrong_text(self.loaded, first)
        options: dict[str, Any] = {"feed": self.feed, "entry": entry, "reached": owner.peak.look()}
        planned = plan_passes(self.loaded, self.setup, self.requests, **options)
        shapes = planned.shapes.items()
        streams = [s.width for site, s in shapes if s.heads == 1 and site.kind not in ATTENTION_KINDS]
        entry["width"] = entry["width"] or max(streams, default=0)
        if heads := [shape.width for site, shape in shapes if site.kind in HEAD_KINDS]:
            entry["head_width"] = max(heads)
        entry["memory_estimate_mb"] = size = round(planned.peak / MIB)
        owner.estimate = f"{name}: about {size} MiB of memory in all, {available() // MIB} MiB are free"
        if (passes := len(planned.groups)) > 1:
            entry["notes"].append(f"statistics of all sites would not fit into memory at once: {passes} passes")
        return planned

    def _conclude(self) -> None:
        """Complete the model's entry with counts and notes on the data, once all of it was read."""
        feed, entry = self.feed, self.entry
        if not self.setup.captured and not self.config.modules:  # weight tables alone: no data was read
            entry.pop("given", None)
            entry["notes"] = list(dict.fromkeys([*entry["notes"], *self.setup.notes]))
            return
        if not feed.fingerprint:  # every pass had been finished: read the data only to count it
            for _ in feed.batches():
                pass
        given = entry.pop("given", None)
        if given is not None and self.config.pool == "none":
            feed.recount(given)
        entry["data"] = feed.about()
        entry["dropped"] |= {"padding": feed.padding}
        if self.config.special == "out":
            entry["dropped"] |= {"special": feed.special}
        notes = [*feed.unknown_notes(), *entry["notes"], *feed.notes(), *self.setup.notes]
        entry["notes"] = gravest_first(list(dict.fromkeys(notes)))

    def _measure(self, work: _Pass, before: Records) -> tuple[Records, dict[str, Any]]:
        """Run one pass and save its records and counts; if interrupted, save and keep the partial results."""
        key = f"{self.key}.{work.number}"
        try:
            self._capture(work)
            if not self._joined(work):
                return [], {"row_count": 0, "notes": []}
            if work.number == 0:
                feed_tables(work.bank, self.loaded.model, self.setup)
            work.clean, work.complete = work.bank.calls, True
            records, counts = evaluate_pass(work.bank, self.requests, self.setup, progress=self.tell)
            save_arrays(self.folder, self.key if work.number == 0 else key, work.bank)
            if work.writer is not None:
                work.writer.finish()
            self.folder.write_part(key, Table.from_records(records, counts))
            self.folder.drop_partial(key)
            return records, counts
        except KeyboardInterrupt:
            if self.peers is None and (rescued := [*before, *self._rescued(work)]):
                self.owner.add(rescued, {**self.entry, "key": "", "partial": True})
            raise

    def _capture(self, work: _Pass) -> None:
        """Stream the rows of the pass into its bank, and to disk with --save-rows."""
        c = self.config
        if not work.sites and not c.modules:
            return
        if c.save_rows and work.writer is None:
            work.writer = RowWriter(self.folder.path / "rows" / self.key)
        rest = self._remaining(work)
        first = next(rest, None)
        if first is None:  # an interrupted pass may have read everything already
            return

        def after(*_: Any) -> None:
            self.tell("forward", min(work.seen, c.tokens), c.tokens)
            if self.peers is None and time.monotonic() > work.due:  # of several processes each has a part only
                self._save(work)

        sink = work.bank if work.writer is None else Tee([work.bank, work.writer])
        options: dict[str, Any] = {"special": c.special, "first": c.first, "pool": c.pool, "modules": c.modules or None}
        options |= {"around": lambda _: _whole_batch(work), "after": after}
        capture_batches(self.loaded.model, self.setup, work.sites, sink, chain([first], rest), **options)
        self.tell("forward", c.tokens, c.tokens)

    def _joined(self, work: _Pass) -> bool:
        """Whether the bank is complete here: that of the only process, or of all in the first of several."""
        if self.peers is None:
            return True
        found = self.peers.merged(work.bank, self.setup.notes)
        if found is None:
            return False
        work.bank, self.setup.notes[:] = found
        return True

    def _remaining(self, work: _Pass) -> Iterator[Batch]:
        """The batches that the pass has not processed yet; of several processes each takes its share of them."""
        done = self.owner.agreed(work.done)
        for number, batch in enumerate(self.feed.batches()):
            work.seen += self.feed.rows_of(batch.inputs)
            if number >= done and (self.peers is None or self.peers.mine(number)):
                yield batch
            elif number >= done:
                work.bank.foresee(batch.groups)

    def _resumed(self, number: int, sites: list[Site], plan: Plan) -> _Pass:
        """The pass, with its state before an interruption if there was one."""
        path = self.folder.partial_path(f"{self.key}.{number}")
        bank, progress = banks.load_bank(path, plan) or (Bank(plan), {"batches": 0})
        writer = None
        if progress.get("writer"):
            try:
                writer = RowWriter.resume(self.folder.path / "rows" / self.key, progress["writer"])
            except FileNotFoundError:  # its rows are missing: restart the pass
                return _Pass(number, sites, Bank(plan))
        return _Pass(number, sites, bank, done=progress["batches"], writer=writer)

    def _rescued(self, work: _Pass) -> Records:
        """Save an interrupted pass; returns its partial records, [] if it was interrupted while computing metrics."""
        if not work.done or work.bank.calls != work.clean:
            return []
        self._save(work)
        if work.complete:
            return []
        note = f"interrupted after {work.done} batches"
        records = evaluate_bank(work.bank, self.requests, self.setup)
        return [{**row, "note": f"{note}; {row['note']}".rstrip("; ")} for row in records]

    def _save(self, work: _Pass) -> None:
        """Save a pass; again in 30 seconds, or later, so that at most a twentieth of the time is spent on saving."""
        start = time.monotonic()
        progress = {"batches": work.done, "writer": work.writer.state() if work.writer is not None else None}
        banks.save_bank(self.folder.partial_path(f"{self.key}.{work.number}"), work.bank, progress)
        end = time.monotonic()
        work.due = end + max(_SAVE_EVERY, 20.0 * (end - start))


@contextlib.contextmanager
def _whole_batch(work: _Pass) -> Iterator[None]:
    """Around one batch: delay SIGINT and SIGTERM until the batch is done (a second signal is not delayed)."""
    received: list[int] = []

    def delay(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    delayed = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, delay) for number in delayed}
    work.clean = work.bank.calls
    try:
        yield
        work.done, work.clean = work.done + 1, work.bank.calls
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        if received:  # also where the batch failed
            signal.raise_signal(received[0])
