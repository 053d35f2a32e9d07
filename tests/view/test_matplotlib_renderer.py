"""Figures drawn into vector files."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from anisoscope.view import matplotlib_renderer
from anisoscope.view.figure import Axis, Figure, Panel, Series
from anisoscope.view.matplotlib_renderer import begin_drawing, draw, end_drawing, write_figures


def drawn(*, right: bool) -> list[list[str]]:
    """Labels of the lines on each axes of a panel with a loss and a norm."""
    lines = (Series("loss", [0.0, 1.0], [1.0, 2.0]), Series("norm", [0.0, 1.0], [100.0, 200.0], right=right))
    panel = Panel(series=lines, right=Axis("norm") if right else None)
    drawing = draw(Figure((panel,)), (panel,), {})
    return [[str(line.get_label()) for line in axes.get_lines()] for axes in drawing.axes]


def test_a_series_of_the_right_axis_is_drawn_there_and_nowhere_else() -> None:
    assert drawn(right=True) == [["loss"], ["norm"]]


def test_without_a_right_axis_all_series_share_one() -> None:
    assert drawn(right=False) == [["loss", "norm"]]


def figures(count: int = 3) -> list[Figure]:
    panels = [Panel(series=(Series("loss", [0.0, 1.0], [1.0, 2.0 + i]),), title=f"loss {i}") for i in range(count)]
    return [Figure((panel,), files={panel.title: {}}) for panel in panels]


def contents(paths: list[Path]) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in paths}


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> list[matplotlib_renderer.DrawingProcess]:
    """Two processes that draw beside this one, also where it has one core."""
    monkeypatch.setattr(matplotlib_renderer, "MOST_HELPERS", 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(3), raising=False)
    begin_drawing()
    return list(matplotlib_renderer._helpers)


def test_figures_of_several_processes_are_those_of_one(
    helpers: list[matplotlib_renderer.DrawingProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, main = matplotlib_renderer._next, threading.current_thread()
    monkeypatch.setattr(
        matplotlib_renderer, "_next", lambda waiting: None if threading.current_thread() is main else taken(waiting)
    )
    beside = contents(write_figures(tmp_path / "beside", figures(), {}))
    assert len(helpers) == 2 and all(helper.process.returncode is not None for helper in helpers)
    assert not any(helper.failed for helper in helpers)
    monkeypatch.setattr(matplotlib_renderer, "_next", taken)
    assert beside == contents(write_figures(tmp_path / "alone", figures(), {})) and len(beside) == 6


def test_a_process_that_died_leaves_its_files_to_this_one(
    helpers: list[matplotlib_renderer.DrawingProcess], tmp_path: Path
) -> None:
    for helper in helpers:
        helper.process.kill()
        helper.process.wait()
    assert len(contents(write_figures(tmp_path, figures(), {}))) == 6


def test_what_cannot_be_drawn_is_told_as_without_helpers(
    helpers: list[matplotlib_renderer.DrawingProcess], tmp_path: Path
) -> None:
    broken = Figure((Panel(series=(Series("loss", [0.0, 1.0], ["one", "two"]),)),), files={"broken": {}})
    with pytest.raises(ValueError, match="one"):
        write_figures(tmp_path, [*figures(), broken], {})
    assert not matplotlib_renderer._helpers


def test_processes_that_are_not_needed_end(helpers: list[matplotlib_renderer.DrawingProcess]) -> None:
    begin_drawing()
    assert len(matplotlib_renderer._helpers) == 2  # begun once
    end_drawing()
    assert not matplotlib_renderer._helpers and all(helper.process.returncode is not None for helper in helpers)


def test_what_is_being_drawn_becomes_whole_when_the_page_fails(
    helpers: list[matplotlib_renderer.DrawingProcess], tmp_path: Path
) -> None:
    def page(paths: Sequence[Path]) -> None:
        while not any(path.exists() for path in paths):  # a helper draws
            time.sleep(0.001)
        raise LookupError("no page")

    with pytest.raises(LookupError):
        write_figures(tmp_path, figures(6), {}, meanwhile=page)
    for path in tmp_path.iterdir():
        assert path.read_bytes().rstrip().endswith(b"%%EOF" if path.suffix == ".pdf" else b"</svg>"), path
    assert all(helper.process.returncode is not None for helper in helpers)
