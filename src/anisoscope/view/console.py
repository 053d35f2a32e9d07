"""What the command line shows: progress, tables, lists."""

from __future__ import annotations

import csv
import datetime
import json
import math
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as RichTable

from anisoscope.errors import AnisoscopeError, unknown_name

_LABELS = {"load": "loading the model", "forward": "rows", "metrics": "metrics (sites)", "rows": "reading rows"}
_FORMS = ("table", "csv", "json")
console = Console(width=None if sys.stdout.isatty() else 160)  # a pipe or a file has no width of its own
errors = Console(stderr=True)


@contextmanager
def progress_bars() -> Iterator[Any]:
    """A callable (what, done, total) that draws one bar for each kind of work, on standard error."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors, transient=not errors.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what in tasks and bars.tasks[tasks[what]].finished and done < total:
                del tasks[what]  # the next model starts the same work again
            if what not in tasks:
                tasks[what] = bars.add_task(_LABELS.get(what, what), total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield tell


@contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end a run the way Ctrl-C does: with everything finished on disk."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def run_profile(config: Any, *, out: Path | None, resume: bool, command: Sequence[str]) -> str:
    """Profile, print the short table and the path of the report; a sentence when a metric could not be had at all."""
    from anisoscope.measurement.profile import Profiler
    from anisoscope.results.folder import RunFolder

    if resume and out is None:
        raise AnisoscopeError("--resume needs --out, the folder of the interrupted run.")
    folder = RunFolder.create(out or _new_folder(config.models), asdict(config), resume=resume)
    profiler = Profiler(config, folder, command=command)
    try:
        with _terminated_as_interrupt(), progress_bars() as tell:
            profiler.progress = _with_estimate(tell, profiler)
            profiler.run()
    except BaseException:
        if profiler.tables:
            _report_unfinished(folder.path)
        raise
    page = _drawn(folder.path)
    table = folder.table()
    print_short(table)
    for warning in profiler.about["warnings"]:
        errors.print(f"note: {warning}", style="yellow", highlight=False, soft_wrap=True)
    errors.print(_memory_line(profiler.about), highlight=False)
    console.print(str(page), soft_wrap=True, highlight=False)
    return missing_everywhere(table)


def _drawn(folder: Path) -> Path:
    """The report of a finished run; where it cannot be drawn the numbers are there all the same."""
    from anisoscope.commands.report import report_runs

    try:
        with errors.status("drawing the report"):
            return report_runs([folder])
    except Exception as error:
        raise AnisoscopeError(
            f"the run is complete and its table is in {str(folder)!r}, but its report could not be drawn "
            f"({type(error).__name__}: {error}); mend that, then `anisoscope report {folder}`."
        ) from error


def _report_unfinished(folder: Path) -> None:
    """Draw what there is of a run that failed; what goes wrong here must not hide why it failed."""
    from anisoscope.commands.report import report_runs

    try:
        words = f"unfinished; what was measured is in {report_runs([folder])}"
    except Exception as error:
        words = f"unfinished; what was measured is in {folder}, without a report ({type(error).__name__}: {error})"
    errors.print(words, style="yellow", highlight=False, soft_wrap=True)


def _with_estimate(tell: Any, profiler: Any) -> Any:
    """Say the memory estimate once it is known, before the first rows run."""
    said: set[str] = set()

    def told(what: str, done: int, total: int) -> None:
        note = profiler.estimate
        if note and note not in said:
            said.add(note)
            errors.print(note, highlight=False)
        tell(what, done, total)

    return told


def _memory_line(about: Mapping[str, Any]) -> str:
    took = f"{about['wall_seconds']:.0f} s, peak memory {about['peak_memory_mb']} MiB"
    return f"{took} (estimated {about['memory_estimate_mb']} MiB)" if about.get("memory_estimate_mb") else took


def _new_folder(models: Sequence[str]) -> Path:
    from anisoscope.results.folder import slug

    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    names = "_".join(slug(Path(model).name) for model in models[:2])[:60]
    return Path("runs") / f"{names}-{stamp}"


def missing_everywhere(table: Any) -> str:
    """A sentence when some metric has no value at any site, or some site lost all its rows; empty when all is well."""
    values: dict[str, list[dict[str, Any]]] = {}
    for row in table.records():
        values.setdefault(row["metric"], []).append(row)
    for name, rows in values.items():
        if all(math.isnan(row["value"]) for row in rows):
            return f"{name} could not be computed at any site: {rows[0]['note']}. Everything else was written."
    empty = _lost_sites(table)
    if empty:
        more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
        return f"nothing could be computed at {', '.join(list(empty)[:3])}{more}: {next(iter(empty.values()))}."
    return ""


def _lost_sites(table: Any) -> dict[str, str]:
    """Sites (model, layer, kind) where every value is missing because rows were not finite, with the first reason."""
    values: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in table.records():
        values.setdefault((row["model"], row["stack"], row["layer"], row["kind"]), []).append(row)
    return {
        f"{model} {layer}.{kind}": rows[0]["note"] or "no finite value"
        for (model, _, layer, kind), rows in values.items()
        if all(math.isnan(row["value"]) and row["dropped"] for row in rows)
    }


def print_short(table: Any) -> None:
    from anisoscope.metrics.engine.metric import registry
    from anisoscope.view.tables import short_tables

    for shown in short_tables(table, catalogue=registry()):
        console.print(shown)


def print_run(run: Path, *, form: str, metrics: Sequence[str], kinds: Sequence[str], heads: bool) -> None:
    """The long table of a run."""
    from anisoscope.results.folder import RunFolder

    folder = RunFolder.open(run)
    table, about = folder.table(), folder.about()
    for name, wanted in (("metric", metrics), ("kind", kinds)):
        known = set(table.arrow[name].to_pylist())
        for word in wanted:
            if word not in known:
                raise unknown_name(f"{name} in this run", word, known)
        table = table.where(**{name: list(wanted)}) if wanted else table
    rows = table.records()
    if form == "table" and not heads:
        rows = [row for row in rows if row["head"] is None]
    names = [n for n in table.arrow.column_names if n not in ("schema", "replicates")] if form == "csv" else None
    if about.get("status") != "complete":
        errors.print(
            f"this run is {about.get('status', 'unfinished')}; the table holds what was finished", style="yellow"
        )
    _print_rows(rows, form, names or ["model", "stack", "layer", "kind", "head", "group", *_NUMBERS])


_NUMBERS = ("metric", "variant", "value", "low", "high", "sd", "n", "contexts", "dropped", "note")


def _print_rows(rows: Iterable[Mapping[str, Any]], form: str, columns: Sequence[str]) -> None:
    if form not in _FORMS:
        raise unknown_name("format", form, _FORMS)
    if form == "json":
        plain = [{k: _plain(v) for k, v in row.items()} for row in rows]
        sys.stdout.write(json.dumps(plain, indent=1, ensure_ascii=False) + "\n")
        return
    if form == "csv":
        writer = csv.writer(sys.stdout)
        writer.writerow(columns)
        writer.writerows([_blank(row.get(name)) for name in columns] for row in rows)
        return
    rows = list(rows)
    used = [name for name in columns if any(_blank(row.get(name)) != "" for row in rows)]
    table = RichTable(box=None, pad_edge=False)
    for name in used:
        table.add_column(name, overflow="fold", no_wrap=name != "note")
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in used))
    console.print(table)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _blank(value: Any) -> Any:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value


def _cell(value: Any) -> str:
    value = _blank(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_comparison(first: str, second: str | None, *, form: str, metrics: Sequence[str]) -> None:
    """Differences, then CKA between the layers."""
    from anisoscope.measurement.compare import compare

    found = compare(first, second)
    rows = [row for row in found.rows if not metrics or row["metric"] in metrics]
    if metrics and not rows:
        raise unknown_name("metric of this comparison", metrics[0], {row["metric"] for row in found.rows})
    names, others, matrix = found.cka
    if form == "json":
        cka = {"first": names, "second": others, "values": [[_plain(float(v)) for v in line] for line in matrix]}
        words = {"first": found.first, "second": found.second, "paired": found.paired, "notes": found.notes, "cka": cka}
        words["differences"] = [{k: _plain(v) for k, v in row.items()} for row in rows]
        sys.stdout.write(json.dumps(words, indent=1, ensure_ascii=False) + "\n")
        return
    columns = ["stack", "layer", "other_layer", "kind", "head", "group", "metric", "variant", "first", "second"]
    columns += ["difference", "low", "high", "differs"]
    if form == "table":
        rows = [row for row in rows if row["head"] is None]
        console.print(f"{found.second} − {found.first}{' (paired)' if found.paired else ''}", highlight=False)
    _print_rows(rows, form, columns)
    for note in found.notes:
        errors.print(f"note: {note}", style="yellow", highlight=False)
    if form == "table" and matrix.size and not all(math.isnan(v) for v in matrix.flat):
        _print_matrix(names, others, matrix)


def _print_matrix(names: Sequence[str], others: Sequence[str], matrix: Any) -> None:
    table = RichTable(title="linear CKA (debiased); rows: first, columns: second", box=None, title_justify="left")
    table.add_column("")
    for name in others:
        table.add_column(name)
    for name, line in zip(names, matrix, strict=True):
        table.add_row(name, *("" if math.isnan(v) else f"{v:.2f}" for v in line))
    console.print(table)


def print_list(what: str) -> None:
    """Metrics, model families, sites or claims, each explained."""
    from anisoscope.capture.sites.site import KINDS

    if what == "metrics":
        _list_metrics()
    elif what == "sites":
        _two_columns([(name, words) for name, words in KINDS.items()])
    elif what == "models":
        from anisoscope.capture import list_families

        _two_columns(_family_lines(list_families()))
    elif what == "claims":
        from anisoscope.claims.engine.claim import claims

        _two_columns([(name, f"{claim.statement} ({claim.source})") for name, claim in claims().items()])
    else:
        raise unknown_name("list", what, ("metrics", "models", "sites", "claims"))


def _family_lines(families: Iterable[Any]) -> list[tuple[str, str]]:
    lines = []
    for family in families:
        words = family if isinstance(family, Mapping) else asdict(family)
        rest = [str(v) for k, v in words.items() if k != "name" and v]
        lines.append((str(words["name"]), "; ".join(rest)))
    return lines


def _two_columns(lines: Iterable[tuple[str, str]]) -> None:
    table = RichTable(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, words in lines:
        table.add_row(name, words)
    console.print(table)


def _list_metrics() -> None:
    from anisoscope.metrics.engine.metric import registry

    for name, metric in sorted(registry().items()):
        options = ", ".join(f"{key}={value}" for key, value in metric.options.items())
        star = " (default)" if metric.default else ""
        console.print(f"[bold]{name}[/bold]{star}  {metric.title}", highlight=False)
        for label, words in (
            ("", metric.description),
            ("formula", metric.formula),
            ("convention", metric.convention),
            ("options", options),
            ("measured at", ", ".join(sorted(metric.kinds))),
            ("reference", metric.reference),
        ):
            if words:
                console.print(f"    {label + ': ' if label else ''}{words}", highlight=False, markup=False)


def print_selftest(device: str, seed: int) -> int:
    """PASS or FAIL for each control; how many failed."""
    from anisoscope.measurement.selftest import run_selftest

    failed = 0
    for result in run_selftest(device, seed=seed):
        colour = "green" if result.passed else "red"
        failed += not result.passed
        words = f"{result.metric:<26} {result.control:<34} {result.seen}"
        console.print(
            f"[{colour}]{'PASS' if result.passed else 'FAIL'}[/{colour}]  {words}", highlight=False, soft_wrap=True
        )
    return failed
