"""Run, evaluate claims, write the report: what each command does, and the Python functions of the same name.

Both write the same run folder. The command line calls `run_profile`, `run_sweep`, `run_train` and `run_study` with a
configuration and a `RunRequest`; `profile`, `sweep` and `train` are called from Python with plain values.
"""

from __future__ import annotations

import datetime
import importlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from anisoscope.claims.catalogue import evaluate_claims
from anisoscope.claims.engine.claim import verdicts_to_dicts
from anisoscope.errors import AnisoscopeError
from anisoscope.execution.config import ExecutorConfig, chosen
from anisoscope.execution.job import Executor
from anisoscope.measurement.config import ProfileConfig
from anisoscope.measurement.profile import Profiler
from anisoscope.measurement.workers.processes import Processes, in_all
from anisoscope.option import Progress, check_values, python_options, refuse_arguments
from anisoscope.results.folder import RunFolder, slug
from anisoscope.results.lock import writing
from anisoscope.results.query import Table
from anisoscope.series import SweepConfig
from anisoscope.studies.catalogue import StudyEntry
from anisoscope.studies.config import check_watch
from anisoscope.training.config import CommonTrainConfig
from anisoscope.view.matplotlib_renderer import begin_drawing, end_drawing

if TYPE_CHECKING:  # imported by the commands that need it: a profile does not
    from anisoscope.training import loop


LogTo = Any  # words such as "tensorboard", objects with the methods of a sink, or a list of such


@dataclass(frozen=True)
class RunRequest:
    """Where and how a run is executed; nothing here affects its numbers."""

    out: Path
    resume: bool = False
    command: Sequence[str] = ()
    progress: Progress | None = None
    note: Callable[[str], None] = field(default=lambda text: None)  # receives messages for the user during the run
    report: bool = True
    log_to: LogTo = ()  # experiment trackers


@dataclass(frozen=True)
class FinishedRun:
    """A completed run folder with its verdicts and, where requested, its page."""

    folder: RunFolder
    page: Path | None = None
    drawing_seconds: float = 0.0


def trackers_of(log_to: LogTo) -> list[Any]:
    """The trackers of a run; none is opened before it begins."""
    from anisoscope.integrations.trackers.catalogue import trackers

    return trackers(log_to) if isinstance(log_to, str) or log_to else []


def run_path(out: str | Path | None, name: str, *, resume: bool) -> Path:
    """Where a run goes: `out`, or a new folder under runs/ with this name and the time."""
    if resume and out is None:
        raise AnisoscopeError("--resume needs --out, the folder of the interrupted run.")
    return Path(out) if out is not None else Path("runs") / f"{slug(name)}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def _carry_out(
    request: RunRequest, run: Callable[[], Any], judge: Callable[[RunFolder], None] | None = None
) -> FinishedRun:
    """Run, evaluate claims, write the page; a run that fails still gets a page of what it had finished."""
    with writing(request.out, request.note):
        try:
            return _locked(request, run, judge)
        finally:
            end_drawing()


def _locked(
    request: RunRequest, run: Callable[[], Any], judge: Callable[[RunFolder], None] | None = None
) -> FinishedRun:
    from anisoscope.commands.drawing import report_runs, write_comparison

    folder, page, tell = request.out, None, request.progress or (lambda what, done, total: None)
    try:
        run()
    except BaseException:
        if request.report and (folder / "table.parquet").is_file():
            try:  # an error here must not replace the error of the run
                request.note(f"unfinished; what was measured is in {report_runs([folder])}")
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                request.note(f"unfinished; what was measured is in {folder}, without a report ({why})")
        raise
    for text in (RunFolder.open(folder).about().get("executor") or {}).get("retried", ()):
        request.note(text)
    if request.report:
        begin_drawing()
    if judge is not None:
        tell("claims", 0, 1)
        judge(RunFolder.open(folder))
        tell("claims", 1, 1)
    started = time.monotonic()
    if request.report:
        tell("report", 0, 1)
        try:
            write_comparison(RunFolder.open(folder))
            page = report_runs([folder])
        except Exception as error:  # the table is complete, only the page is missing
            raise AnisoscopeError(
                f"the run is complete and its table is in {str(folder)!r}, but its report could not be drawn "
                f"({type(error).__name__}: {error}); mend that, then `anisoscope report {folder}`."
            ) from error
        tell("report", 1, 1)
    return FinishedRun(RunFolder.open(folder), page, time.monotonic() - started)


# -- profile -----------------------------------------------------------------------------------------------------------


def run_profile(
    config: ProfileConfig,
    request: RunRequest,
    *,
    peers: Processes | None = None,
    executor: Executor | None = None,
) -> FinishedRun:
    """Measure every model of a profile and draw the page, of several processes in the first."""
    folder = RunFolder.create(request.out, asdict(config), resume=request.resume)
    profiler = Profiler(config, folder, command=request.command, peers=peers, executor=executor)
    noted: set[str] = set()

    def tell(what: str, done: int, total: int) -> None:
        if profiler.estimate and profiler.estimate not in noted:  # of memory; known before the first rows
            noted.add(profiler.estimate)
            request.note(profiler.estimate)
        if what == "metrics" and request.report:  # the page follows soon
            begin_drawing()
        if request.progress is not None:
            request.progress(what, done, total)

    profiler.progress = tell
    return _carry_out(request, profiler.run)


def share_profile(config: ProfileConfig, peers: Processes) -> None:
    """Measure a share of the contexts of a profile that another process writes."""
    with tempfile.TemporaryDirectory() as place:  # the folder of the first process has the results
        Profiler(config, RunFolder(Path(place)), peers=peers).run()


def profile(
    *models: str | Path,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    report: bool = True,
    alone: bool = False,
    executor: str | Executor | None = None,
    **options: Any,
) -> Table:
    """Profile models, as the command does, and return the table; `out` keeps the run folder with its page.

    Models and `options` are those of the command: folders, hub ids, .gguf files, adapters, files of rows, and with
    `random_init=True` architectures; `data="corpus.jsonl"`, `sites=["resid"]` or `"resid,attn_out"`, `layers="0-3"`,
    `skip_first=True`. `report=False` leaves the page out. Under torch.distributed all processes call it: contexts are
    dealt to them, the first writes the run folder, and each returns the table; `alone` is for one process only.
    `executor` (local, ray, slurm, or an object) has each model measured by a job, with options such as `workers=4`.

    >>> profile("gpt2", "bert-base-uncased", out="runs/both", tokens=32_768)  # doctest: +SKIP
    """
    check_values(profile, {"out": out, "resume": resume})
    named = tuple(str(model) if isinstance(model, Path) else model for model in models)
    elsewhere, options = _elsewhere(executor, options)
    config = ProfileConfig(models=named, **python_options(ProfileConfig, options))
    peers = Processes.here(alone=alone)
    how: dict[str, Any] = {"peers": peers, "executor": elsewhere}

    def run() -> Table:
        if peers is not None and not peers.first:
            share_profile(config, peers)
            return peers.agree(Table.from_records([]))
        if out is not None:
            request = RunRequest(Path(out), resume, progress=progress, report=report)
            table = run_profile(config, request, **how).folder.table()
        else:
            table = profile_table(config, **how, resume=resume, progress=progress)
        return table if peers is None else peers.agree(table)

    return in_all(peers, run)


def profile_table(
    config: ProfileConfig, *, peers: Processes | None = None, executor: Executor | None = None, **words: Any
) -> Table:
    """The table of a profile that leaves no run folder."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / (slug("_".join(Path(model).name for model in config.models[:2])) or "profile")
        request = RunRequest(folder, report=False, **words)
        return run_profile(config, request, peers=peers, executor=executor).folder.table()


def _elsewhere(executor: str | Executor | None, options: Mapping[str, Any]) -> tuple[Executor | None, dict[str, Any]]:
    """The executor of a Python call, and the options that are not its own."""
    own = {each.name for each in fields(ExecutorConfig)} - {"executor"}
    mine = python_options(ExecutorConfig, {name: value for name, value in options.items() if name in own})
    if mine and executor is not None and not isinstance(executor, str):
        raise AnisoscopeError(f"{next(iter(mine))} belongs to an executor by name; set it in the executor object.")
    return chosen(executor, **mine), {name: value for name, value in options.items() if name not in own}


# -- sweep and tangent -------------------------------------------------------------------------------------------------


def run_sweep(config: SweepConfig, request: RunRequest, executor: Executor | None = None) -> FinishedRun:
    """Measure a series of checkpoints or one model, evaluate all claims, write the page."""
    from anisoscope.series.sweep import Sweeper

    how: dict[str, Any] = {"resume": request.resume, "command": request.command, "progress": request.progress}
    how["sinks"] = trackers_of(request.log_to)
    sweeper = Sweeper.at(config, request.out, **how, executor=executor)

    def judge_all(folder: RunFolder) -> None:
        folder.write_json("verdicts.json", verdicts_to_dicts(evaluate_claims(folder.table(), robust=True)))

    return _carry_out(request, sweeper.run, judge_all)


def sweep(
    model: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    report: bool = True,
    executor: str | Executor | None = None,
    log_to: LogTo = (),
    **options: Any,
) -> Table:
    """Measure a series of checkpoints and return the table; `out` keeps the run folder, `options` as in SweepConfig.

    `model` is a folder of checkpoints, a hub id with `revisions`, or several models in the order of training. The
    folder gets its verdicts and its page, as from the command; `report=False` leaves the page out. `executor` (local,
    ray, slurm, or an object) has each checkpoint measured by a job, with options such as `workers=4, job_gpus=1`.
    `log_to` are trackers, as of `Monitor`, that are sent a few numbers of every checkpoint.

    >>> sweep("EleutherAI/pythia-160m", revisions=("step0", "step1000"), out="runs/pythia")  # doctest: +SKIP
    """
    from anisoscope.series.sweep import Sweeper

    check_values(sweep, {"model": model, "out": out, "resume": resume})
    models = [str(one) for one in (model if isinstance(model, list | tuple) else [model])]
    if not models:
        raise AnisoscopeError("no model was given; name a folder of checkpoints, a hub id, or several models.")
    elsewhere, options = _elsewhere(executor, options)
    config = SweepConfig(models[0], others=tuple(models[1:]), **python_options(SweepConfig, options))
    if out is None:
        with tempfile.TemporaryDirectory() as place:
            more: dict[str, Any] = {"sinks": trackers_of(log_to), "lasting": False, "executor": elsewhere}
            return Sweeper.at(config, place, resume=resume, progress=progress, **more).run()
    request = RunRequest(Path(out), resume, progress=progress, report=report, log_to=log_to)
    return run_sweep(config, request, elsewhere).folder.table()


# -- train -------------------------------------------------------------------------------------------------------------


def run_train(config: CommonTrainConfig, watch: Mapping[str, Any], request: RunRequest, **options: Any) -> FinishedRun:
    """Train under a monitor with the options `watch`, evaluate the claims, write the page."""
    from anisoscope.studies.arms import training_monitor
    from anisoscope.studies.study_run import judge
    from anisoscope.training import loop
    from anisoscope.training.run_files import options_of

    check_watch(watch, config)
    sinks = trackers_of(request.log_to)
    RunFolder.create(request.out, options_of(config, watch), resume=request.resume)  # a foreign folder fails here
    watched = watch["monitor"] != "none"

    def attach(model: Any, stream: Any, optimizer: Any, training: Any, path: Path) -> Any:
        return training_monitor(model, stream, optimizer, training, path, **watch, log_to=sinks)

    def run() -> Path:
        more = {"resume": request.resume, "command": request.command, "progress": request.progress, **options}
        return loop.train(config, request.out, monitor=attach if watched else None, watch=watch, **more)

    request = request if watched else replace(request, report=False)
    return _carry_out(request, run, (lambda folder: judge(folder, folder.table())) if watched else None)


class TrainCall(NamedTuple):
    """The arguments of `train` that are checked."""

    config: CommonTrainConfig
    out: str | Path


def train(
    config: CommonTrainConfig,
    out: str | Path,
    *,
    monitor: loop.StepMonitor | loop.MonitorFactory | str | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    command: Sequence[str] = (),
    corpus: str | Path | None = None,
    watch: Mapping[str, Any] | None = None,
    recipe: loop.Recipe | None = None,
    report: bool = True,
    log_to: LogTo = (),
) -> Path:
    """Train a model into a run folder and return that folder; see `training.loop.train`.

    `monitor` may also be the name of what the command's own monitor measures (light, standard, full, or metrics), with
    its options in `watch`. Such a run gets its verdicts and, unless `report=False`, its page; `log_to` are trackers, as
    of `Monitor`, that it sends a few numbers of every measured step.
    """
    from anisoscope.training import loop

    check_values(TrainCall, {"config": config, "out": out})
    if not isinstance(monitor, str):
        refuse_arguments({"log_to": log_to}, "here: give it to the monitor itself, or say monitor='standard'")
        options: dict[str, Any] = {"resume": resume, "progress": progress, "command": command, "corpus": corpus}
        return loop.train(config, out, monitor=monitor, watch=watch, recipe=recipe, **options)
    watch = {"contexts": 96, "when": "log", "rank": None, **(watch or {}), "monitor": monitor}
    request = RunRequest(Path(out), resume, command, progress, report=report, log_to=log_to)
    return run_train(config, watch, request, corpus=corpus, recipe=recipe).folder.path


# -- studies -----------------------------------------------------------------------------------------------------------


def run_study(entry: StudyEntry, config: Any, request: RunRequest, **options: Any) -> FinishedRun:
    """Run a study, which evaluates its claims itself, and write its page; `options` go to its class (such as jobs)."""
    if request.log_to:
        trackers_of(request.log_to)  # a wrong one ends the command before anything is made
        options["log_to"] = tuple(request.log_to)
    folder = RunFolder.create(request.out, asdict(config), resume=request.resume)
    module, _, name = entry.protocol.partition(":")
    study = getattr(importlib.import_module(module), name)
    made = study(config, folder, command=request.command, progress=request.progress, **options)
    return _carry_out(request, made.run)
