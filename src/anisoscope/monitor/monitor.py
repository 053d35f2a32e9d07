"""Monitor: measures the geometry and the gradients of a model during training, in any training loop.

    with Monitor(model, when=log_spaced(1000), out="runs/mine") as monitor:
        for step, batch in enumerate(loader):
            with monitor.step(step):
                model(**batch).loss.backward()
            optimizer.step(); optimizer.zero_grad()

A step is measured before its update: step 0 is the initialisation. With `probe=` a fixed held-out batch is measured in
separate passes; without it, or with `live=True`, the training batch itself, by hooks that do not affect training.

Arguments that cannot work are refused when the monitor is made or entered. From then on nothing of ours stops the
training (`monitor.guard`): what fails is noted, and the next step is measured again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.gradient_pass import LossRule, TargetWeights
from anisoscope.capture.row import PositionChoice, Rule
from anisoscope.capture.sites.layout import find_layout, refuse_unhookable
from anisoscope.capture.sites.site import Site
from anisoscope.capture.sites.stage import find_stage
from anisoscope.capture.step_capture import LiveGradients, LossScale, hash_sum, targets_of, trace_top
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.bank import Bank, prepare
from anisoscope.measurement.measure import joined_sinks, leave_split_out
from anisoscope.metrics.frequency import TemporalSpread
from anisoscope.models.forward import trained_module, unwrapped
from anisoscope.monitor import saved_state
from anisoscope.monitor.analysis.analysis import Found
from anisoscope.monitor.analysis.desk import Desk
from anisoscope.monitor.analysis.ranks import Ranks
from anisoscope.monitor.analysis.results import StepResults
from anisoscope.monitor.description import data_entry, model_entry, shared_options
from anisoscope.monitor.embedding_watch import EmbeddingWatch, bare_optimizer
from anisoscope.monitor.every_step import ROWS, EveryStep
from anisoscope.monitor.files import WRITE, MonitorFiles
from anisoscope.monitor.guard import FaultGuard
from anisoscope.monitor.held_out import Constant, output_counts
from anisoscope.monitor.instruments import Instruments, Probe, stream_kinds
from anisoscope.monitor.open_step import (
    HooksLost,
    OpenStep,
    attach_again,
    check_arguments,
    nothing_measured,
    refuse_unlearnable,
    step_number,
    with_splits,
)
from anisoscope.monitor.saved_state import SAVE
from anisoscope.monitor.schedule import Schedule, as_schedule, log_spaced
from anisoscope.monitor.sink import LogTo, MonitorStore, ResultSink, all_sinks, in_order, send
from anisoscope.option import Progress, takes_plain
from anisoscope.results.query import Table
from anisoscope.tangent.energy import Record
from anisoscope.tangent.plan import PLANS, TangentPlan, choose_plan, leading_preset, more_sites
from anisoscope.tangent.proxy import StepRows
from anisoscope.tangent.row_map import RowMap
from anisoscope.tangent.tangent_study import TangentStudy, spread_records


class Monitor:
    """Measures a model in training; see the module's docstring for an example.

    `metrics` is a preset by cost (light, standard, full), `shape` (geometry of stream and attention) or `attention`
    (queries, keys and scores by head), both without gradients, or names of metrics, where `tangent` is the tangent
    study. `halves` adds the dimensions of two disjoint halves of the contexts (groups half:1 and half:2),
    for claims that choose on one half and test on the other.
    `frozen_window` is what the frozen proxy is fitted on: `checkpoints:0.3`, the first three tenths of the measured
    steps, or `steps:0.3`, those of all steps. If it is not known in advance which steps are measured (no `total_steps`,
    or `when` is a function), moments of all of them are kept until the end, of 64 at most.
    `split=1`, or several as (1, 2): energies also for other splits of the contexts to fit and to test, by seed.
    `constant_loss` is what a model that learned must beat on the probe (`monitor.held_out`): the loss of the best
    constant prediction as a number, or how often each target occurs in the training data [V], or a function of a batch
    of the probe that returns the constant's loss on each context; default: `counts`, where the outputs are tokens.
    `counts` are token frequencies of the training corpus [V], for bins; with `optimizer`, weight decay is subtracted
    from embedding updates; `loss` is a function of (model, inputs) returning the *summed* loss, for models without one.
    `target_weights` [V], if the training loss is weighted by target token: the probe's loss and gradients stay those of
    the plain loss, and the weighted loss is measured beside it; with `weighted_gradients` gradients are of the latter.
    `modules` are names of modules to look at in place of the residual stream, such as ["encoder.*", "head"], of any
    model: one row for each example, position or pixel of their outputs.
    `rows` is for models whose forward takes no mask or ids: a function of the (args, kwargs) of a forward that returns
    which positions are data, bool [contexts, positions], or a dict of the arguments that are missing, such as
    `attention_mask`, `input_ids` and `labels`.
    `skip_first` and `skip_special` leave the rows at the first position, or at special tokens (those of `tokenizer`, or
    of the model's configuration), out of everything but the loss. `standardised` asks for energies in standardised
    coordinates (True) or not; by default the preset decides: all but `light` have them.
    `stage` is for pipelines, where each process holds some of the blocks and has a monitor of them: how many blocks
    come before its own, and are in the whole model, such as (2, 4).
    `row_map` keeps a few rows of the probe at every measured step for `map.parquet`, if there is a folder.
    `every_step` records moments of activations and gradients at all steps, from 2,048 rows of each training batch (or
    the number given), without device–host synchronisation: `trace`, and `every_step.parquet` in the folder.
    `strict` raises what otherwise is noted with a warning: a full disk, a step in which nothing was seen.
    `log_to` sends a few numbers of every measured step to experiment trackers: "tensorboard", "tensorboard:FOLDER",
    "wandb", "mlflow", "trackio", objects with the methods of a sink, or several of them. `sinks` receive every row:
    see `monitor.sink`. `progress` is called with
    ("metrics", sites done, sites in all) while the metrics of a measured step are computed in this process.
    `background` analyses steps in a process of its own while the training goes on: results come some steps later, all
    of them by the end of the `with` block. By default (None) that is done on a GPU with cores and memory to spare.
    """

    @takes_plain
    def __init__(
        self,
        model: nn.Module,
        *,
        when: Schedule | Callable[[int], bool] | Sequence[int] | None = None,
        metrics: str | Sequence[str] = "standard",
        out: str | Path | None = None,
        probe: Any = None,
        live: bool | None = None,
        plan: TangentPlan | None = None,
        rank: int | None = None,
        frozen_window: str | None = None,
        split: int | Sequence[int] = (),
        layers: Sequence[int] | None = None,
        modules: Sequence[str] | str | None = None,
        counts: Tensor | None = None,
        tokenizer: Any = None,
        optimizer: Any = None,
        loss: LossRule | None = None,
        constant_loss: Constant | None = None,
        target_weights: Tensor | None = None,
        weighted_gradients: bool = False,
        total_steps: int | None = None,
        rows: Rule | None = None,
        skip_first: bool = False,
        skip_special: bool = False,
        standardised: bool | None = None,
        name: str = "",
        seed: int = 0,
        batch_size: int = 16,
        halves: bool = False,
        row_map: bool = True,
        every_step: bool | int = False,
        sinks: Sequence[ResultSink] = (),
        log_to: LogTo = (),
        resume: bool = False,
        strict: bool = False,
        progress: Progress | None = None,
        background: bool | None = None,
        stage: tuple[int, int] | None = None,
    ) -> None:
        check_arguments(Monitor.__init__, locals())
        sinks = all_sinks(sinks, log_to)
        self.guard = FaultGuard(strict)
        self.live_wanted = live if live is not None else probe is None
        if self.live_wanted or every_step:
            refuse_unhookable(model)
            trace_top(model)
        self.model = trained_module(model)
        self.when = as_schedule(when) if when is not None else log_spaced(total_steps)
        self.total_steps = total_steps if total_steps is not None else getattr(self.when, "total", None)
        self.name = name or type(unwrapped(self.model)).__name__
        self.seed, self.tokenizer, self.counts = seed, tokenizer, counts
        self.ranks = Ranks.here(self.name, self.guard, model, stage)
        row_map = row_map and out is not None and probe is not None
        if self.ranks is not None and not self.ranks.first:  # the first process has the results of all
            out, sinks, every_step = None, (), every_step if self.ranks.leads else False
        if self.ranks is not None:
            self.ranks.following = bool(every_step)
        sizes: dict[str, Any] = {"rank": rank, "seed": seed, "window": frozen_window, "standardised": standardised}
        self.plan, requests = choose_plan(metrics, plan, **sizes)
        self.plan = with_splits(self.plan, split, named=modules is not None, **sizes)
        self.layout = find_layout(self.model, modules) if stage is None else find_stage(self.model, stage)
        self.depths = self.layout.depths
        refuse_unlearnable(self.model, self.plan, learns=self.plan is not None or self.live_wanted or bool(every_step))
        # metrics requested by name are measured wherever possible; those of a preset in the residual stream only
        stream = stream_kinds(self.layout) if leading_preset(metrics) in PLANS else None
        where: dict[str, Any] = {"layers": layers, "more": more_sites(metrics), "layout": self.layout}
        setup = prepare(self.model, requests, sites=stream, **where)
        if self.ranks is not None and self.ranks.together is not None:
            leave_split_out(setup)
        self.watch = EmbeddingWatch(self.model, bare_optimizer(optimizer), model, shield=self._shield)
        study = self._study("" if probe is not None else "live")
        words: dict[str, Any] = {"layers": layers, "halves": halves, "rows": rows, "progress": progress}
        skips = {"skip_first": skip_first, "skip_special": skip_special}
        self.skipped = {name: True for name, wanted in skips.items() if wanted}
        words["kept"] = PositionChoice.of(self.model, tokenizer, **skips) if self.skipped else None
        words["targets"] = None if target_weights is None else TargetWeights(target_weights, weighted_gradients)
        self.instruments = Instruments(self.model, setup, requests, study, self.watch, seed, **words)
        constant = output_counts(self.model, counts) if constant_loss is None else constant_loss
        self._choose_passes(probe, loss=loss, batch_size=batch_size, constant=constant)
        if self.ranks is not None and self.probe is not None:
            self.probe.deal(*self.ranks.dealt)
        rows_taken = ROWS if every_step is True else int(every_step)
        with self._in_all():
            self._open(out, resume=resume, row_map=row_map, rows_taken=rows_taken)
        self.sinks, self.background, self.temporal = list(sinks), background, TemporalSpread()
        self.results = StepResults(self.files, self.instruments, self.studies, self._send, self._columns, self.depths)
        self.desk.results = self.results
        self.tables, self.concepts, self.done = self.results.tables, self.results.concepts, self.results.done
        self.resumed, self.next, self._resuming = -1, -1, resume
        self.seconds = 0.0
        self._entered, self._fresh, self._ended, self._owner = False, True, False, 0  # the process that entered it
        self._steps = self._due = 0  # seen by this process, and those of them that were to be measured

    def _in_all(self) -> contextlib.AbstractContextManager[Any]:
        """Around what may fail in the first of several processes: then it fails in all of them."""
        return contextlib.nullcontext() if self.ranks is None else self.ranks.beginning()

    def _shield(self, act: Callable[..., Any]) -> Callable[..., Any]:
        return self.guard.hook("follow the embedding table", act)

    def _study(self, source: str) -> TangentStudy | None:
        if self.plan is None:
            return None
        known = self.when.known(self.total_steps) if isinstance(self.when, Schedule) else None
        return TangentStudy(self.plan, self.counts, self.total_steps, source, measured_steps=known)

    def _choose_passes(self, probe: Any, **options: Any) -> None:
        """Where rows come from: passes over the probe (with `options`), hooks in those of the training, or both."""
        i = self.instruments
        self.probe = None if probe is None else Probe(i, probe, **options)
        self.live = None
        self.studies = {} if i.study is None else {"study": i.study}  # `live`: of the training batch beside a probe
        if self.live_wanted:
            extra = [s for s in i.setup.captured if s not in i.sites] if i.requests and probe is None else []
            words: dict[str, Any] = {"extra": extra, "scaled": i.study is not None, "rows": i.rows, "kept": i.kept}
            words["report"] = partial(self.guard.caught, "read the training batch")
            self.live = LiveGradients(self.model, i.sites, layout=self.layout, **words)
            if probe is not None and (study := self._study("live")) is not None:
                self.studies["live"] = study

    def _open(self, out: str | Path | None, *, resume: bool, row_map: bool, rows_taken: int) -> None:
        """The run folder, if there is one, and what is written into it beside the table."""
        options = {"when": str(self.when), "total_steps": self.total_steps, "name": self.name, "seed": self.seed}
        options |= {"architecture": type(unwrapped(self.model)).__name__}
        options |= {"modules": [site.name for site in self.layout.modules]} if self.layout.modules else {}
        more: dict[str, Any] = {"probe": self.probe, "live": self.live_wanted, "skipped": self.skipped}
        more |= {"halves": self.instruments.halves, "rows_taken": rows_taken}
        self.options = shared_options(options, self.plan, **more)
        words: dict[str, Any] = {"layout": self.layout, "tokenizer": self.tokenizer, "probed": self.probe is not None}
        self.entry = model_entry(self.model, self.instruments, name=self.name, **words)
        store = None
        if out is not None:
            store = MonitorStore(out, resume=resume, about=self.options, waits=not self.guard.strict)
            if store.unusable is not None:
                self.guard.caught(WRITE, store.unusable)
        folder = store.folder.path / "state" if store is not None else None
        run, data = folder.parent.name if folder is not None else "", "live" if self.probe is None else "probe"
        self._columns: dict[str, Any] = {"run": run, "model": self.name, "seed": self.seed, "data": data}
        sites, self.every, self.map = self.instruments.sites, None, None
        if rows_taken:
            i = self.instruments
            words = {"folder": folder, "resume": resume, "rows": i.rows, "kept": i.kept, "ranks": self.ranks}
            words["report"] = partial(self.guard.caught, "follow every step")
            with self.guard.reaching("read the steps recorded before"):
                self.every = EveryStep(self.model, sites, layout=self.layout, taken=rows_taken, **words)
        if row_map:  # other processes give their rows to the first
            self.map = RowMap(sites=sites, folder=folder)
        self._hooks = [hooks for hooks in (self.live, self.every) if hooks is not None]
        parts: dict[str, Any] = {"store": store, "every": self.every, "map": self.map}
        analysis = self.instruments.analysis(self.studies, tokenizer=self.tokenizer)
        self.desk = Desk(analysis, self.guard, self.ranks)
        self.files = MonitorFiles(self.guard, partial(self.desk.ask, "windows"), self._describe, **parts)

    def __enter__(self) -> Monitor:
        if self._entered or self._ended:
            raise AnisoscopeError("this monitor was entered before; it follows one training: make one for each.")
        try:
            with self._in_all():
                self._begin()
        except BaseException:
            for hooks in self._hooks:
                hooks.__exit__()
            self.guard.call("end the analysis", self.desk.end)
            self.files.end()
            raise
        self._entered = True
        return self

    def _begin(self) -> None:
        self._owner, device = os.getpid(), next((p.device for p in self.model.parameters()), torch.device("cpu"))
        where: dict[str, Any] = {"folder": None if self.store is None else self.store.folder.path / "state"}
        where["options"] = {} if self.store is None else self.store.options
        self.desk.begin(device, background=self.background, **where)
        with self.guard.reaching("read the run in its folder, which is left alone"):
            self._resume()
        if note := self.files.begin():
            self.instruments.note(note)
        with self.guard.reaching("write run.json"):
            self._describe("running")
        self._send("start", self._manifest())
        self.guard.call("go on with what a killed run left", saved_state.finish_left, self)
        if self._resuming:
            self.resumed = self.desk.agree(self.done, self.resumed)
        self.watch.attach()
        for hooks in self._hooks:
            hooks.__enter__()

    def _resume(self) -> None:
        """Go on from the newest state of the folder."""
        try:
            state = self.store.newest() if self.store is not None else None
            if state is not None:
                saved_state.restore(self, state)
                self.resumed = state["step"]
        except OSError:
            self.files.give_up()  # its results must not be replaced
            raise

    @property
    def store(self) -> MonitorStore | None:
        return self.files.store

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if self._owner not in (0, os.getpid()):  # a process that the training forked leaves the block, too
            return
        self._entered, self._ended, self.guard.place = False, True, "the end"
        self.guard.strict &= kind is None  # an error of the training is not replaced by one of ours
        try:
            self.guard.call("tell the other processes", self.desk.closing)
            for detach in (self.watch.detach, *(hooks.__exit__ for hooks in self._hooks)):
                self.guard.call("take its hooks off", detach)
            self.collect(wait=True)
            if kind is None and self.desk.first:
                self.guard.call("finish", self._finish)
            status = "complete" if kind is None else "interrupted"
            self.guard.call("end the analysis", self.desk.end)
            entries: dict[str, Any] = {"monitor_seconds": round(self.seconds, 3)}
            self.entry["row_count"] = self.results.row_count
            self.files.write_end(lambda: self.table, self._trace, done=self.done)
            if kind is None:
                entries |= self.files.write_map(model=self.name, seed=self.seed, counts=self.counts)
            if kind is None and not self.done and not (self.every is not None and self.every.seen):
                self.guard.caught("end with results", nothing_measured(self._steps, self._due, self.when))
            self._send("finish", {**self._manifest(), **entries, "status": status, "warnings": self.notes})
            self.guard.call("write run.json", self._describe, status, **entries)
        finally:
            self.desk.close(self._last)  # also if an error or a second interruption came before its end
            self.files.end()

    def _describe(self, status: str, **entries: Any) -> None:
        self.guard.fresh = False
        if self.store is not None and self.store.lock is not None:
            data = data_entry(self.probe, self.desk.shown)
            self.store.describe(status, self.entry, warnings=self.notes, **entries, **data)

    def _manifest(self) -> dict[str, Any]:
        folder = str(self.store.folder.path) if self.store is not None else None
        about = {"name": self.name, "config": self.options, "models": [self.entry], "seed": self.seed}
        return about | {"folder": folder, "resumed": self.resumed}

    def _send(self, method: str, *args: Any) -> None:
        for note in send(self.sinks, method, *args):
            self.guard.note(note)

    def _finish(self) -> None:
        """Add records that need the whole training: frozen proxies of an open window, the spread over time."""
        last = max(self.done, default=0)
        records, still_open = self.desk.ask("finish")
        if not still_open:  # otherwise the last state still refers to these files
            self.files.drop_window()
        counts, temporal = self.counts if self.plan is not None else None, self.temporal
        if self.ranks is not None and self.watch.sharded:
            temporal = TemporalSpread.joined(self.ranks.last_of_all(self._last()))
        if self.watch.table is not None and temporal.n > 1 and counts is not None:
            (found,) = spread_records([temporal.spread(counts)], over="time", seed=self.seed)
            place = {"stack": "single", "layer": 0, "kind": "embed_weight", "step": last}
            records += [{**place, **row} for row in found]
        if records:
            self.results.keep(last, records, "finish")

    def _last(self) -> tuple[int, TemporalSpread] | None:
        """What other processes need at the end: the spread over time of the rows that this one holds of the table."""
        held = self.watch.held if self.watch.sharded else None
        return None if held is None else (held[1], self.temporal)

    @contextlib.contextmanager
    def step(
        self, step: int, *, loss: str = "auto", tokens: int | None = None, scale: float = 1.0
    ) -> Iterator[Monitor]:
        """Around the forward and backward passes of one step (all micro-batches); measures when it is scheduled.

        The scale of a cross-entropy of tokens is read from its gradients, also if it is computed outside the model. Of
        another loss give `loss="mean"` with the number of `tokens` that one micro-batch averages over, `loss="sum"`, or
        `loss="own"` to take it as it is, with all micro-batches scaled alike; `scale` is what it is multiplied by.
        """
        if not self._entered and not self._ended:
            raise AnisoscopeError("monitor.step was called outside `with Monitor(…)`; enter the monitor first.")
        self.guard.place = f"step {str(step)[:80]}"
        number = self.guard.call("measure it", step_number, step)
        if self._ended:
            self.guard.note("not measured: the monitor has ended")
        elif number is not None:
            self._follow(number)
        if self._ended or number is None or number <= self.resumed:
            unfollowed = not self._ended and number is not None and self.watch.before is None
            if unfollowed:
                self.guard.call("look at the step", self._snapshot, number)
            yield self
            if unfollowed and number == self.resumed:  # another process than the first, whose state was not kept
                self.guard.call("follow the embedding table", self.watch.remember, number)
            return
        opened = self._begin_step(number)
        try:
            yield self
        except BaseException:
            for hooks in self._hooks:
                self.guard.call("drop the step", hooks.drop)
            raise
        self._end_step(opened, LossScale(loss, tokens, scale))

    def _follow(self, step: int) -> None:
        """Keep track of what was seen, also at steps that are repeated after an interruption."""
        if self._fresh and 0 <= self.resumed < step:  # updates of the table in between were not observed
            self.watch.before = None
        self._fresh = False
        self.next = step + 1
        self.watch.paused = step < self.resumed  # steps measured before an interruption are repeated without measuring

    def _begin_step(self, step: int) -> OpenStep:
        """Everything before the passes of a step: is it measured, the probe, and hooks that begin to record."""
        opened, guard = OpenStep(step), self.guard
        self._steps += 1
        with guard.catching("look at the step"):
            self._snapshot(step)
            opened.due = bool(self.when(step)) and step not in self.done
        self._due += opened.due
        if opened.due:
            self.files.reach()
            guard.call("close the interval of the embedding table", self.watch.close)
            if self.probe is not None:
                what = "measure the probe"
                opened.expect(what, guard.call(what, self._timed, self._measure_probe, step))
        for hooks in [hooks for hooks in self._hooks if opened.due or hooks is self.every]:
            guard.call("go on reading the training", self._mend, hooks)
        with guard.catching("record the training batch"):
            if opened.due and self.live is not None and self.live in self._hooks:
                opened.bank = self.instruments.bank() if self.probe is None else None
                self.live.begin(geometry=opened.bank is not None)
        if self.every is not None and self.every in self._hooks:
            guard.call("follow every step", self.every.begin, step)
        return opened

    def _snapshot(self, step: int) -> None:
        if self.total_steps is not None:
            self.watch.snapshot(step, self.total_steps, self.temporal)

    def _end_step(self, opened: OpenStep, scale: LossScale) -> None:
        """Everything after the passes of a step."""
        step, guard = opened.step, self.guard
        if self.every is not None and self.every in self._hooks:
            guard.call("follow every step", self.every.end, step, scale=scale.scale, measured=opened.due)
        if opened.due and self.live in self._hooks and not self.live.failed:
            what = "measure the training batch"
            opened.expect(what, guard.call(what, self._timed, self._measure_live, opened, scale))
        if opened.due and self.every is not None and self.ranks is None:
            opened.add(guard.call("follow every step", self._timed, self._trace_records, step))
        elif opened.due and self.every in self._hooks:
            opened.expect("follow every step", guard.call("send it", self.every.asked, step, self._trace_records))
        if opened.measured:
            guard.call("keep its results", self._timed, self._close, opened)
        if opened.due and not opened.parts and self.ranks is not None:
            guard.call("tell the other processes", self.ranks.missed, step)
        self.collect()
        if guard.fresh:
            guard.call("write run.json", self._describe, "running")

    def _mend(self, hooks: LiveGradients | EveryStep) -> None:
        """Attach hooks again that somebody removed, or whose module was replaced; without them nothing is seen."""
        try:
            attach_again(hooks, self.guard)
        except HooksLost:
            self._hooks.remove(hooks)
            raise

    def _timed(self, function: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args)
        finally:
            self.seconds += time.perf_counter() - start

    def _analyse(self, rows: StepRows, bank: Bank | None, study: str = "study", **told: Any) -> Future[Found]:
        """Have a step analysed; `told` are more fields of `Seen`."""
        seen = self.instruments.seen(rows, bank, study)
        return self.desk.analyse(replace(seen, saved=self.store is not None, **told))

    def _measure_probe(self, step: int) -> Future[Found]:
        assert self.probe is not None
        bank = self.instruments.bank()
        self.watch.paused = True
        try:
            rows = self.probe.run(step, others=joined_sinks(bank, self.map))
        except BaseException:
            if self.map is not None:
                self.map.drop()
            raise
        finally:
            self.watch.paused = False
        return self._analyse(rows, bank, described=True, mapped=None if self.map is None else self.map.taken())

    def _measure_live(self, opened: OpenStep, scale: LossScale) -> Future[Found] | None:
        assert self.live is not None
        step, seen = opened.step, self.live.end()
        for note in self.live.notes:
            self.instruments.note(note)
        if not seen and self.probe is not None and self.done:  # an empty step after the last update
            return None
        rows = self.instruments.live_rows(step, seen, opened.bank, scale, alone=self.ranks is None)
        opened.targets, shown = targets_of(seen, scale), hash_sum(seen)
        if self.probe is None:
            return self._analyse(rows, opened.bank, shown=shown)
        return self._analyse(rows, None, "live", shown=shown) if "live" in self.studies else None

    def _trace_records(self, step: int) -> list[Record]:
        return [{n: value for n, value in row.items() if value is not None} for row in self._trace(step).records()]

    def log(self, step: int, **numbers: float) -> None:
        """Record numbers of the training itself (loss, gradient_norm, learning_rate); kept for measured steps only.

        Of several processes that each log `loss` the mean over all targets is kept; of other numbers, the first's.
        A loop without a probe may give `probe_loss` and `constant_loss`, from which claims tell whether it learned.
        """
        self.guard.place = f"step {str(step)[:80]}"
        with self.guard.catching("log numbers"):
            self.desk.log(step_number(step), numbers)

    def _close(self, opened: OpenStep) -> None:
        """End a measured step for the training; its results may come later."""
        self.done.add(opened.step)
        self.watch.remember(opened.step)
        opened.state = saved_state.state_of(self, opened.step) if self.store is not None else {}
        self.desk.close_step(opened.step, opened.state, targets=opened.targets)
        self.results.expect(opened)

    def collect(self, *, wait: bool = False) -> None:
        """Keep the results that have come, or all."""
        self._timed(partial(self.desk.collect, wait=wait))

    def basis(self, site: Site, *, proxy: str = "semi_nmf", fit: str = "refit") -> Tensor:
        """The orthonormal basis d×r of a proxy at a site, as last fitted (or frozen)."""
        if self.instruments.study is None:
            raise AnisoscopeError("this monitor has no tangent study, so no proxies; add tangent to its metrics.")
        found: Tensor = self.desk.ask("basis", site, proxy=proxy, fit=fit)
        return found

    @property
    def table(self) -> Table:
        """Everything measured so far; waits for steps that are being analysed."""
        self.collect(wait=True)
        about = {"monitor_seconds": round(self.seconds, 3), "notes": self.notes}
        return in_order(Table.concat(self.tables, about))

    @property
    def trace(self) -> Table:
        """What `every_step` recorded so far, at all steps; reading it synchronises with the device."""
        if self.every is None and not self.desk.first:  # the results of several processes are with the first
            return Table.concat([])
        if self.every is None:
            raise AnisoscopeError("this monitor follows measured steps alone; say every_step=True for all of them.")
        return self._trace()

    def _trace(self, step: int | None = None) -> Table:
        assert self.every is not None
        return self.every.table(self._columns | {"data": "live"}, self.depths, step=step)

    @property
    def notes(self) -> list[str]:
        """What was left out, and why."""
        study = self.instruments.study
        beside = [*(study.notes if study is not None else ()), *self.instruments.setup.notes]
        beside += self.every.notes if self.every is not None else []
        return [*self.guard.notes, *self.instruments.notes, *beside]

    def save(self, folder: Path, *, wait: bool = True) -> None:
        """Write the state into a folder, for training loops that store it with their own checkpoints.

        Without `wait` it is written when all steps so far have been analysed, unless the folder is gone by then.
        """
        with self.guard.catching(SAVE):
            saved_state.save(self, Path(folder), wait=wait)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote; later steps are measured again, but for one with the weights of the checkpoint."""
        saved_state.load(self, Path(folder))
