"""What the commands about learning show: progress, verdicts, and the path of the report."""

from __future__ import annotations

import datetime
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.view.console import _drawn, _report_unfinished, _terminated_as_interrupt, console, errors, progress_bars

_SHOWN = 8  # flagged checkpoints that are named
_COLOURS = {"holds": "green", "fails": "red", "undecided": "yellow"}


def _new_folder(name: str) -> Path:
    from anisoscope.results.folder import slug

    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{slug(name)}-{stamp}"


def _folder(out: Path | None, name: str, *, resume: bool) -> Path:
    if resume and out is None:
        raise AnisoscopeError("--resume needs --out, the folder of the interrupted run.")
    return out or _new_folder(name)


def _guarded(folder: Path, act: Any) -> None:
    """Run with bars; what was finished is drawn also when the rest fails."""
    try:
        with _terminated_as_interrupt(), progress_bars() as tell:
            act(tell)
    except BaseException:
        if (folder / "table.parquet").is_file():
            _report_unfinished(folder)
        raise


def _end(folder: Path) -> None:
    """Verdicts, notes and the page of a finished run."""
    from anisoscope.results.folder import RunFolder

    about = RunFolder.open(folder).about()
    started = time.monotonic()
    page, drawing = _drawn(folder), time.monotonic() - started
    path = folder / "verdicts.json"
    if path.is_file():
        print_verdicts(json.loads(path.read_text(encoding="utf-8")))
    for warning in about.get("warnings", []):
        errors.print(f"note: {warning}", style="yellow", highlight=False, soft_wrap=True)
    errors.print(f"{about.get('wall_seconds', 0):.0f} s, and {drawing:.0f} s for the page", highlight=False)
    console.print(str(page), soft_wrap=True, highlight=False)


def run_train(
    options: Mapping[str, Any], watch: Mapping[str, Any], *, out: Path | None, resume: bool, command: Sequence[str]
) -> None:
    """Train, measure on the way, judge the claims, draw the report."""
    from anisoscope.results.folder import RunFolder
    from anisoscope.studies.revisiting import judge_run, schedule_of, training_monitor
    from anisoscope.training.loop import TrainConfig, train
    from anisoscope.training.record import options_of

    config = TrainConfig(**options)
    schedule_of(watch["when"], config.steps)
    folder = _folder(out, f"train-{config.arm}", resume=resume)
    RunFolder.create(folder, options_of(config, watch), resume=resume)  # refused before anything is drawn again

    def attach(model: Any, stream: Any, optimizer: Any, training: Any, path: Path) -> Any:
        return training_monitor(model, stream, optimizer, training, path, **watch)

    monitor = None if watch["monitor"] == "none" else attach
    settings: dict[str, Any] = {"monitor": monitor, "resume": resume, "command": command, "watch": watch}
    _guarded(folder, lambda tell: train(config, folder, progress=tell, **settings))
    if monitor is None:
        console.print(str(folder), soft_wrap=True, highlight=False)
        return
    judge_run(folder)
    _end(folder)


def run_sweep(options: Mapping[str, Any], *, out: Path | None, resume: bool, command: Sequence[str]) -> None:
    """Measure given models, judge the claims, draw the report."""
    from anisoscope.claims.engine.claim import evaluate_claims, verdicts_to_dicts
    from anisoscope.results.folder import RunFolder
    from anisoscope.series.config import SweepConfig
    from anisoscope.series.sweep import Sweeper

    config = SweepConfig(**options)
    kind = "sweep" if config.series else "tangent"
    path = _folder(out, f"{kind}-{config.model.rstrip('/').split('/')[-1]}", resume=resume)
    sweeper = Sweeper.at(config, path, resume=resume, command=command)
    _guarded(path, lambda tell: replace(sweeper, progress=tell).run())
    folder = RunFolder.open(path)
    folder.write_json("verdicts.json", verdicts_to_dicts(evaluate_claims(folder.table())))  # all, as `claims` has them
    _end(path)


def run_revisiting(options: Mapping[str, Any], *, out: Path | None, resume: bool, command: Sequence[str]) -> None:
    """The study of seed A."""
    from anisoscope.results.folder import RunFolder
    from anisoscope.studies.revisiting import Revisiting, RevisitingConfig

    config = RevisitingConfig(**options)
    path = _folder(out, f"revisiting-{config.preset}", resume=resume)
    folder = RunFolder.create(path, asdict(config), resume=resume)
    _guarded(path, lambda tell: Revisiting(config, folder, command=command, progress=tell).run())
    _end(path)


def run_curvature_study(
    *, seed: int, beta: float | None, quick: bool, out: Path | None, command: Sequence[str]
) -> None:
    """The geometry behind it."""
    from anisoscope.commands.report import write_study_report
    from anisoscope.studies.curvature.protocol import CurvatureConfig, run_curvature

    options: dict[str, Any] = {"seed": seed, "beta": beta}
    config = CurvatureConfig.quick(**options) if quick else CurvatureConfig(**options)
    path = out or _new_folder("curvature")
    with progress_bars() as tell:
        folder = run_curvature(config, path, progress=tell, command=command)
    page = write_study_report(folder, "curvature")
    print_verdicts(json.loads((folder / "verdicts.json").read_text(encoding="utf-8")))
    console.print(str(page), soft_wrap=True, highlight=False)


def print_claims(runs: Sequence[Path], names: Sequence[str] | None, *, proxy: str, fit: str, form: str) -> None:
    """Judge claims on the tables of some runs."""
    from anisoscope.claims.engine.claim import evaluate_claims, verdicts_to_dicts
    from anisoscope.commands.report import joint_table, open_runs

    if form not in ("table", "json"):
        raise unknown_name("format", form, ("table", "json"))
    table = joint_table(open_runs(runs))
    found = verdicts_to_dicts(evaluate_claims(table, names, proxy=proxy, fit=fit))
    if flagged := _flagged(table):
        (errors if form == "json" else console).print(flagged, highlight=False, soft_wrap=True, markup=False)
    if form == "json":
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    print_verdicts(found, every=names is not None)


def _flagged(table: Any) -> str:
    """A line about the checkpoints with which something is wrong, or nothing."""
    rows = [row for row in table.where(metric="checkpoint", kind="training").records() if row["value"] == 0]
    found = [f"{row['revision']} ({re.split('[:,]', row['note'])[0]})" for row in rows]
    if not found:
        return ""
    shown = ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
    return f"checkpoints flagged: {shown}; verdicts over steps rest on them"


def print_verdicts(verdicts: Sequence[Mapping[str, Any]], *, every: bool = False) -> None:
    """A table of verdicts, each with its one sentence; claims that were not measured share a line, unless asked for."""
    from anisoscope.view.sections.verdicts import measured, unmeasured

    absent = [] if every else unmeasured(verdicts)
    shown = verdicts if every else measured(verdicts)
    if shown:
        _print_table(shown)
    if absent:
        console.print(f"not measured here: {', '.join(absent)}", highlight=False, soft_wrap=True, markup=False)


def _print_table(verdicts: Sequence[Mapping[str, Any]]) -> None:
    table = RichTable(show_lines=True, header_style="bold")
    table.add_column("claim", overflow="fold", max_width=30)
    table.add_column("verdict")
    table.add_column("effect [95 %]", justify="right", no_wrap=True)
    table.add_column("p", justify="right")
    table.add_column("why", overflow="fold")
    for row in verdicts:
        colour = _COLOURS.get(str(row["status"]), "white")
        subject = f" ({row['subject']})" if row.get("subject") else ""
        effect = f"{_number(row['effect'])} [{_number(row['low'])}, {_number(row['high'])}]"
        status = f"[{colour}]{row['status']}[/{colour}]"
        table.add_row(f"{row['claim']}{subject}", status, effect, _number(row["p"]), str(row["why"]))
    console.print(table)


def _number(value: Any) -> str:
    return "–" if value is None or (isinstance(value, float) and math.isnan(value)) else f"{float(value):.3g}"
