"""Levels on the page: across the whole panel, and without a say in the range of an axis."""

from __future__ import annotations

from anisoscope.view.figure import Axis, Level, Panel, Series
from anisoscope.view.plotly_renderer import panel_spec

LINE = Series("a", [100.0, 200.0], [3.0, 4.0])


def drawn(panel: Panel) -> tuple[list[dict], list[dict]]:
    spec = panel_spec(panel)
    return spec["data"][1:], spec["layout"]["shapes"]


def test_a_named_level_on_an_axis_without_bounds_spans_the_panel_and_keeps_its_name() -> None:
    traces, shapes = drawn(Panel(series=(LINE,), levels=(Level(3.5, "chance"),)))
    assert traces == []  # a trace from 0 to 1 would stretch an axis from 100 to 200
    assert [(s["xref"], s["x0"], s["x1"], s["y0"], s["y1"]) for s in shapes] == [("paper", 0, 1, 3.5, 3.5)]
    assert shapes[0]["label"]["text"] == "chance"


def test_a_named_level_on_an_axis_with_bounds_has_hover_text_from_end_to_end() -> None:
    traces, shapes = drawn(Panel(x=Axis(bounds=(90.0, 210.0)), series=(LINE,), levels=(Level(3.5, "chance"),)))
    assert [(t["name"], t["x"], t["y"]) for t in traces] == [("chance", [90.0, 210.0], [3.5, 3.5])]
    assert shapes == []


def test_an_upright_level_looks_at_the_other_axis() -> None:
    panel = Panel(x=Axis(bounds=(90.0, 210.0)), series=(LINE,), levels=(Level(150.0, "now", upright=True),))
    traces, shapes = drawn(panel)
    assert traces == [] and [(s["yref"], s["y0"], s["y1"]) for s in shapes] == [("paper", 0, 1)]
