"""A run that grows while its page is open: in a browser through the server, and in a notebook through the widget."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anisoscope.errors import AnisoscopeError
from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Table
from anisoscope.serve import widget
from anisoscope.serve.brief import brief_table, read_without
from anisoscope.serve.run import draw_page, is_large, listed, serve_runs
from anisoscope.serve.server import MOST_TOGETHER
from anisoscope.serve.shelf import Shelf
from support.fake_training import training_table

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")


def begin(folder: Path, *, status: str = "running") -> RunFolder:
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    table = training_table(steps=(0,), layers=3)
    run.write_about({**table.about, "status": status, "kind": "training", "config": {"steps": 100}, "warnings": []})
    return run


def measure_step(run: RunFolder, step: int) -> None:
    run.write_part(f"step-{step:08d}", training_table(steps=(step,), layers=3))


def wait_for(happened: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The link of a server in a thread of its own."""
    links: list[str] = []
    thread = threading.Thread(
        target=serve_runs,
        args=([folder],),
        kwargs={"port": 0, "ready": lambda link, number: links.append(link)},
        daemon=True,
    )
    thread.start()
    wait_for(lambda: bool(links))
    yield links[0]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the page")
    if not BROWSER:
        pytest.skip("no chromium on this machine: the page is not looked at")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


def test_a_new_step_comes_onto_the_open_page(chromium: Any, tmp_path: Path) -> None:
    run = begin(tmp_path / "runs" / "mine")
    measure_step(run, 0)
    with served(tmp_path / "runs") as link:
        page = chromium.new_page(viewport={"width": 1400, "height": 900})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.goto(link)
        assert "token" not in page.url  # the token is in a cookie now, not in the address
        page.locator("li a").click()
        page.wait_for_selector("#first")
        before = page.locator("#masthead").inner_text()
        fold = page.locator("details", has_text="How verdicts are made")
        fold.locator("summary").click()
        measure_step(run, 8)
        page.wait_for_function("words => document.getElementById('masthead').innerText !== words", arg=before)
        assert "2 steps" in page.locator("#masthead").inner_text()
        assert fold.get_attribute("open") is not None  # what was opened stays open
        assert page.locator("#hero-1 .main-svg").count()
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert not errors
        page.close()


def test_a_run_that_measured_nothing_yet_says_so_and_then_shows_what_came(chromium: Any, tmp_path: Path) -> None:
    run = begin(tmp_path / "runs" / "mine")
    with served(tmp_path / "runs") as link:
        page = chromium.new_page()
        page.goto(link.replace("/?", "/page?run=mine&"))
        assert "nothing to show" in page.locator("h1").inner_text()
        assert str(tmp_path) not in page.content()
        measure_step(run, 0)
        page.wait_for_selector("#hero-1 .main-svg")
        page.close()


def test_the_list_offers_only_as_many_runs_together_as_are_drawn(chromium: Any, tmp_path: Path) -> None:
    for number in range(MOST_TOGETHER + 1):
        begin(tmp_path / "runs" / f"run-{number:02}")
    with served(tmp_path / "runs") as link:
        page = chromium.new_page()
        page.goto(link)
        boxes, button = page.locator("input[type=checkbox]"), page.locator("button")
        assert button.is_disabled()
        for number in range(MOST_TOGETHER):
            boxes.nth(number).check()
        assert button.is_enabled() and button.inner_text() == f"Show {MOST_TOGETHER} together"
        boxes.nth(MOST_TOGETHER).check()
        assert button.is_disabled() and f"at most {MOST_TOGETHER}" in button.inner_text()
        page.close()


def test_the_strip_of_a_live_page_stands_above_its_header(chromium: Any, tmp_path: Path) -> None:
    measure_step(begin(tmp_path / "runs" / "mine"), 0)
    with served(tmp_path / "runs") as link:
        page = chromium.new_page(viewport={"width": 390, "height": 844})
        page.goto(link.replace("/?", "/page?run=mine&"))
        strip, header = page.locator("p.live").bounding_box(), page.locator("#masthead .kicker").bounding_box()
        assert strip["y"] + strip["height"] <= header["y"]
        page.close()


def test_the_list_tells_state_and_progress(tmp_path: Path) -> None:
    run = begin(tmp_path / "runs" / "mine", status="interrupted")
    measure_step(run, 8)
    (found,) = listed(Shelf([tmp_path / "runs"]))
    assert found["name"] == "mine" and found["state"] == "stopped" and found["ago"] >= 0
    assert "training" in found["about"] and str(tmp_path) not in json.dumps(found)


def test_several_runs_are_on_one_page(tmp_path: Path) -> None:
    for name in ("one", "two"):
        measure_step(begin(tmp_path / name), 0)
    words = json.dumps(draw_page([tmp_path / "one", tmp_path / "two"], False).data()["blocks"])
    assert "(one)" in words and "(two)" in words


def test_a_brief_page_has_the_main_quantities_of_a_large_run(tmp_path: Path) -> None:
    run = begin(tmp_path / "mine", status="complete")
    table = training_table(steps=tuple(range(0, 4000, 100)), layers=3)
    run.write_table(table)
    brief = brief_table(Table(read_without(run.path / "table.parquet", "replicates")), most=2000)
    assert len(brief) <= 4000 < len(table)
    assert {0, 3900} <= set(brief.steps) and "gradient_enrichment" in brief.metrics
    assert is_large(run.path)
    page = draw_page([run.path], True)
    assert "A first look at a large run" in json.dumps(page.data()["blocks"])


def test_a_small_table_is_not_made_smaller() -> None:
    table = training_table(steps=(0, 1), layers=2)
    assert len(brief_table(table)) == len(table)


def test_a_widget_follows_a_run(tmp_path: Path) -> None:
    pytest.importorskip("anywidget", reason="the widget needs anywidget")
    run = begin(tmp_path / "mine")
    shown = widget.watch(tmp_path / "mine", height=500)
    wait_for(lambda: "nothing to show" in shown.document)
    assert shown.height == 500 and "EventSource" not in shown.document  # nothing is asked of a server
    measure_step(run, 0)
    wait_for(lambda: "hero-1" in shown.data.get("specs", {}))
    measure_step(run, 8)
    wait_for(lambda: "2 steps" in json.dumps(shown.data["blocks"]))
    shown.close()
    assert shown.watching.stopped


def test_the_widget_in_a_browser_takes_new_data_in_place(chromium: Any, tmp_path: Path) -> None:
    run = begin(tmp_path / "mine")
    measure_step(run, 0)
    first = draw_page([run.path], False)
    measure_step(run, 8)
    script = widget.SCRIPT.replace("export default", "window.widget =")
    page = chromium.new_page()
    page.set_content("<div id='here'></div>")
    page.add_script_tag(content=script)
    page.evaluate(
        """given => {
            const heard = {}, state = { document: given.document, data: {}, words: "", height: 600 };
            window.model = { get: name => state[name], on: (name, act) => { heard[name] = act; },
                             set: (name, value) => { state[name] = value; heard["change:" + name](); } };
            window.widget.render({ model: window.model, el: document.getElementById("here") });
        }""",
        {"document": first.document("")},
    )
    frame = page.frame_locator("iframe")
    frame.locator("#hero-1 .main-svg").first.wait_for()
    page.evaluate("data => window.model.set('data', data)", draw_page([run.path], False).data())
    frame.locator("#masthead", has_text="2 steps").wait_for()
    page.close()


def test_what_has_no_folder_cannot_be_watched() -> None:
    pytest.importorskip("anywidget", reason="the widget needs anywidget")
    with pytest.raises(AnisoscopeError, match="has no folder"):
        widget.watch(object())
