"""Tables and lines on a terminal: within its width, and nothing that tells rows apart is lost."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anisoscope.capture import list_families
from anisoscope.claims.catalogue import claims
from anisoscope.measurement.selftest import ControlResult
from anisoscope.metrics.catalogue import registry
from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Table
from anisoscope.view.console import (
    print_comparison,
    print_control,
    print_metric,
    print_run,
    print_two_columns,
    print_warnings,
)
from anisoscope.view.terminal import screen
from anisoscope.view.terminal.letters import near
from anisoscope.view.terminal.screen import elided, new_table, print_line, print_note, print_path

WIDTHS = (60, 61, 72, 80, 100, 160, 200)
Resize = Callable[[int], None]


@pytest.fixture
def resize(monkeypatch: pytest.MonkeyPatch) -> Resize:
    """Sets the width that commands print for."""

    def to(width: int) -> None:
        monkeypatch.setenv("COLUMNS", str(width))
        for one in (screen.console, screen.errors):
            monkeypatch.setattr(one, "_width", None)

    return to


def long_table() -> Table:
    variants = ("fit=refit;proxy=semi_nmf;rank=8", "average=all;fit=refit;proxy=semi_nmf;rank=8", "")
    places = itertools.product(("gradient_energy", "average_cosine"), variants, (0, 16), (0, 1))
    return Table.from_records(
        {
            "model": "decoder", "seed": 0, "step": step, "stack": "single", "layer": layer, "kind": "resid",
            "group": f"frequency:{layer + 1}", "metric": metric, "variant": variant, "value": 0.28361234 + number,
            "low": 0.2707, "high": 0.2966, "n": 320, "contexts": 10, "note": f"note number {layer}, of some length" * 3,
        }
        for number, (metric, variant, step, layer) in enumerate(places)
    )  # fmt: skip


def stored(folder: Path) -> RunFolder:
    run = RunFolder(folder)
    run.write_table(long_table())
    run.write_about({"status": "complete"})
    return run


@pytest.mark.parametrize("width", WIDTHS)
def test_the_long_table_fits_and_every_row_can_be_told_apart(
    width: int, resize: Resize, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    resize(width)
    print_run(stored(tmp_path), form="table", wanted={}, heads=False)
    printed = capsys.readouterr()
    lines = [line.rstrip() for line in printed.out.splitlines()]
    assert max(map(len, lines)) <= width and "model decoder" in lines[0]
    numbers = [f"{0.28361234 + number:.4g}" for number in range(24)]
    rows = [next(line for line in lines if re.search(rf"(^| ){re.escape(number)}( |$)", line)) for number in numbers]
    heading, seen = "", set()
    for line in lines:
        heading = line if line.startswith(("gradient_energy", "average_cosine")) else heading
        seen.update([(heading, *line.split())] if line in rows else [])
    assert len(seen) == 24
    assert "note number 0" in " ".join(lines) and "note number 1" in " ".join(lines)
    left = re.findall(r"no room for: (.*);", " ".join(printed.err.split()))
    assert not left or width < 80


def test_a_pipe_takes_a_table_as_wide_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(screen.console, "_width", None)
    print_run(stored(tmp_path), form="table", wanted={}, heads=False)
    head, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 24 and head.split()[:3] == ["model", "step", "stack"]
    assert all("…" not in row for row in rows)
    assert sum("average=all;fit=refit;proxy=semi_nmf;rank=8" in row for row in rows) == 8


@pytest.mark.parametrize("width", WIDTHS)
def test_a_comparison_fits(width: int, resize: Resize, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"{layer}.resid" for layer in range(30)]
    row: dict[str, Any] = {"stack": "single", "kind": "resid", "head": None, "group": "", "metric": "average_cosine"}
    row |= {"variant": "", "first": 0.05598, "second": 0.04, "difference": -0.001292, "low": -0.0042961}
    rows = [{**row, "layer": i, "other_layer": i, "high": 0.001712, "differs": False} for i in range(30)]
    matrix = np.full((30, 30), 0.5)
    found = SimpleNamespace(
        rows=rows, cka=(names, names, matrix), first="a", second="b", paired=True, notes=["x " * 90]
    )
    resize(width)
    print_comparison(found, form="table", metrics=())
    printed = capsys.readouterr()
    lines = [line.rstrip() for line in (printed.out + printed.err).splitlines()]
    assert max(map(len, lines)) <= width
    assert sum("-0.001292" in line for line in lines) == 30 and not any("0.0…" in line for line in lines)
    matrix_lines = [line for name in names for line in lines if line.split()[:1] == [name]]
    assert len(matrix_lines) == 1 + 30, "the head and all rows of the matrix"


@pytest.mark.parametrize("width", WIDTHS)
def test_lists_controls_and_notes_fit(width: int, resize: Resize, capsys: pytest.CaptureFixture[str]) -> None:
    resize(width)
    print_two_columns((name, f"{claim.statement} ({claim.source})") for name, claim in claims().items())
    print_two_columns((row["name"], f"{row['about']}; {row['verified']}") for row in list_families())
    for name, metric in registry().items():
        print_metric(name, metric)
    print_control(
        ControlResult("gradient_enrichment_of_something", "knows nothing of it", "0.1 ± 0.2, expected 1", True)
    )
    print_line("a sentence that is much longer than the width of any terminal here " * 5)
    print_note("[bold]no markup[/bold] is read in a note " * 9)
    printed = capsys.readouterr()
    lines = [line.rstrip() for line in (printed.out + printed.err).splitlines()]
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert all(name in text for name in claims()) and "[bold]no markup[/bold]" in text
    assert all(" ".join(claim.statement.split()) in text for claim in claims().values())


def test_a_path_is_never_broken(resize: Resize, capsys: pytest.CaptureFixture[str]) -> None:
    resize(60)
    path = Path("runs") / ("a very long name with spaces " * 5).strip() / "[report].html"
    print_path(path)
    assert capsys.readouterr().out == f"{path}\n"


def test_texts_of_a_foreign_run_command_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "a\x1b[2J\x1b]0;title\x07\u202eb\x9b1m"
    for one in (screen.console, screen.errors):
        monkeypatch.setattr(one, "_force_terminal", True)
    table = new_table(hostile, (hostile,), ())
    table.add_row(hostile)
    screen.print_table(table)
    print_line(hostile)
    print_note(hostile)
    said = "".join(capsys.readouterr())
    assert "a\ufffd[2J" in said and not re.search("[\x07\x9b\u202e]|\x1b(?!\\[[0-9;]*m)", said)


def test_warnings_of_one_kind_are_counted(capsys: pytest.CaptureFixture[str], resize: Resize) -> None:
    resize(200)
    models = [{"name": f"arm{i}"} for i in range(4)]
    alike = [f"arm{i}: unfinished, after {100 * i} of 4000 updates" for i in range(4)]
    others = [f"something else, of kind {letter * 3}" for letter in "abcdefg"]
    print_warnings({"warnings": [*alike, *others, "x" * 900], "models": models})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "note: arm0: unfinished, after 0 of 4000 updates (also arm1, arm2 and arm3)"
    assert lines[-1].startswith("4 other notes") and len(lines) == 6
    print_warnings({"warnings": [*alike, *others, "x" * 900], "models": models}, why=True)
    assert capsys.readouterr().err.count("note: ") == 12


def test_elided_names_keep_both_ends_and_the_width() -> None:
    for width in range(1, 40):
        assert len(elided("bidirectional-masked-6x256", width)) <= width
    assert elided("语言模型语言模型", 7).startswith("语")
    assert elided("", 3) == "" and elided("abc", 3) == "abc"


def test_letters_that_an_encoding_lacks_are_as_wide() -> None:
    assert all(len(near(letter)) == 1 for letter in "–−×…“”✓✕≤→é²λ语\u0301")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_tables_of_studies_lose_no_digit(width: int, resize: Resize, capsys: pytest.CaptureFixture[str]) -> None:
    resize(width)
    table = new_table("bert, plain inputs", ("site", "repair"), tuple(f"loss, reading {i}" for i in range(4)))
    table.add_row("embedding", "all_but_top", *(f"{i}.623 ± 0.0{i}9" for i in range(4)))
    screen.print_table(table)
    lines = capsys.readouterr().out.splitlines()
    text = " ".join(" ".join(lines).split())
    assert max(len(line.rstrip()) for line in lines) <= width and "…" not in text
    assert all(f"{i}.623 ±" in text and f"0.0{i}9" in text for i in range(4)) and "all_but_top" in text
