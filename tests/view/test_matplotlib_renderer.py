"""Figures drawn into vector files."""

from __future__ import annotations

from anisoscope.view.figure import Axis, Figure, Panel, Series
from anisoscope.view.matplotlib_renderer import draw


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
