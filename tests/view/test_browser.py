"""The page in a real browser: what is seen first on a screen and on a phone; what can be opened, moved and saved."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anisoscope.claims.catalogue import claims
from anisoscope.commands.drawing import write_report
from anisoscope.results.query import Table
from anisoscope.view.document import page_data
from anisoscope.view.report import report_page
from anisoscope.view.sections.drift import Comparison
from anisoscope.view.subjects import RunView
from anisoscope.view.words import Catalogue
from support.fake_training import training_table

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the page; `pip install playwright`")
BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")
pytestmark = pytest.mark.skipif(not BROWSER, reason="no chromium on this machine: the page is not looked at")
SCREEN, PHONE = {"width": 1400, "height": 900}, {"width": 390, "height": 844}
STEPS = (0, 1, 8, 64)
WORDS = "document.body.innerText.split(/\\s+/).filter(Boolean).length"
EFFECTS = {"holds": (0.9, 0.8, 1.0), "fails": (0.1, 0.0, 0.2), "undecided": (0.5, 0.3, 0.7)}


def verdict(claim: str, subject: str, status: str) -> dict[str, Any]:
    effect, low, high = EFFECTS[status]
    numbers = {"effect": effect, "low": low, "high": high, "margin": 0.5}
    part = {"name": "lead", "status": status, "needed": True, **numbers}
    said = {"statement": claims()[claim].statement, "why": f"The lead of {subject} is {effect}.", "p": None}
    return {"claim": claim, "subject": subject, "status": status, "details": {"parts": [part]}, **numbers, **said}


def view(steps: tuple[int, ...] = STEPS) -> RunView:
    """A training run of two models with verdicts on each."""
    table = training_table(steps=steps, layers=3)
    both = {
        "tangent_energy": ("holds", "fails"),
        "bell_shaped": ("fails", "undecided"),
        "amplified": ("holds", "holds"),
    }
    models = ("decoder", "encoder")
    verdicts = [verdict(name, *pair) for name, found in both.items() for pair in zip(models, found, strict=True)]
    return RunView(table, table.about, verdicts=verdicts)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("browser"), [view()])


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page in the browser, with its errors and every address that it asked for."""

    def __init__(self, browser: Any, path: Path, size: dict[str, int], **more: Any) -> None:
        self.context = browser.new_context(viewport=size, **more)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("#hero-1 .main-svg")

    def box(self, selector: str) -> dict[str, float]:
        return self.page.locator(selector).first.bounding_box()

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *error: object) -> None:
        self.context.close()


@pytest.mark.parametrize("size", [SCREEN, PHONE], ids=["screen", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_finding_and_its_figure_are_seen_first(
    chromium: Any, report: Path, tmp_path: Path, size: dict[str, int], scheme: str
) -> None:
    phone = size is PHONE
    with Opened(chromium, report, size, color_scheme=scheme, is_mobile=phone, has_touch=phone) as opened:
        page = opened.page
        assert "gradients go where the activations already point" in page.locator("h1").inner_text()
        hero = opened.box("#hero-1")
        assert hero["y"] > 0 and hero["y"] + hero["height"] < size["height"], "the hero is on the first screen"
        if not phone:
            assert opened.box(".verdict-grid")["y"] < size["height"], "and so is the grid"
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], "nothing to scroll sideways"
        assert page.evaluate(WORDS) <= 1200
        assert not opened.errors
        assert {address.split(":")[0] for address in opened.asked} <= {"file", "data", "blob"}
        shots = Path(os.environ.get("ANISOSCOPE_SHOTS", tmp_path))
        page.screenshot(path=shots / f"page-{'phone' if phone else 'screen'}-{scheme}.png")
    assert report.stat().st_size <= 3_000_000


def test_a_verdict_opens_by_mouse_and_by_keyboard(chromium: Any, report: Path) -> None:
    with Opened(chromium, report, SCREEN) as opened:
        first, second = opened.page.locator(".verdict-grid button.badge").all()[:2]
        told = opened.page.locator(".verdict-grid article")
        assert first.inner_text() == "✓ holds" and second.inner_text() == "✕ fails", "a sign and a word"
        assert not told.first.is_visible()
        first.click()
        assert told.first.is_visible() and first.get_attribute("aria-expanded") == "true"
        assert "The lead of decoder is 0.9." in told.first.inner_text()
        assert told.first.locator("svg.interval").first.is_visible(), "the interval against its margin"
        second.focus()
        opened.page.keyboard.press("Enter")
        assert told.nth(1).is_visible() and not told.first.is_visible()
        opened.page.keyboard.press("Enter")
        assert not told.nth(1).is_visible()


def test_the_slider_moves_figures_and_the_theme_their_colours(chromium: Any, report: Path) -> None:
    with Opened(chromium, report, SCREEN) as opened:
        page = opened.page
        page.locator("#moment").scroll_into_view_if_needed()
        page.wait_for_selector("#moment .main-svg")
        shown = "JSON.stringify(document.querySelector('#moment .plot').data.map(t => t.y))"
        before = page.evaluate(shown)
        slider = page.locator("input[type=range]").first
        slider.focus()
        page.keyboard.press("ArrowLeft")
        assert page.evaluate(shown) != before
        assert "step 8" in slider.locator("xpath=..").inner_text()
        paper = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(paper)
        page.locator("#theme").click()
        assert page.evaluate(paper) != light


def test_the_table_is_found_and_saved_and_a_figure_too(chromium: Any, report: Path) -> None:
    with Opened(chromium, report, SCREEN, accept_downloads=True) as opened:
        page = opened.page
        page.locator("#table summary").first.click()
        page.locator("#by-text").fill("gradient_energy")
        assert "gradient_energy" in page.locator("#rows tbody tr").first.inner_text()
        with page.expect_download() as saved:
            page.locator("#csv").click()
        lines = Path(saved.value.path()).read_text().splitlines()
        assert lines[0].startswith("model,") and len(lines) > 100
        page.locator("#hero-1").hover()
        with page.expect_download() as saved:
            page.locator("#hero-1 [data-title*='SVG']").first.click()
        assert Path(saved.value.path()).read_text().startswith("<svg")
        page.evaluate("location.hash = '#term-gradient-energy'")
        page.wait_for_selector("#term-gradient-energy", state="visible")
        assert not opened.errors


def test_new_data_changes_the_page_in_place(chromium: Any, report: Path) -> None:
    """What was opened, chosen and looked at stays; the figures have the new step."""
    page = report_page([view((*STEPS, 512))], Catalogue(), Comparison())
    fresh = json.dumps(page_data(page, claims=claims()))
    with Opened(chromium, report, SCREEN) as opened:
        told = opened.page
        told.locator(".verdict-grid button.badge").nth(1).click()
        told.locator("#energy summary").first.click()
        told.locator("#energy select").nth(1).select_option(label="block 2")
        told.locator("#maps").scroll_into_view_if_needed()
        told.wait_for_selector("#maps .main-svg")
        place = opened.box("#maps h2")["y"]
        told.evaluate(
            "data => { document.getElementById('hero-1').kept = true; window.anisoscope.update(data); }",
            json.loads(fresh),
        )
        assert "from 0 to 512" in told.locator(".deck").inner_text()
        steps = told.evaluate("document.getElementById('hero-1').data.find(t => t.name === 'embedding').x.length")
        assert steps == len(STEPS) + 1 and told.evaluate("document.getElementById('hero-1').kept")
        assert told.locator(".verdict-grid article").nth(1).is_visible()
        assert told.locator("#energy details").first.evaluate("fold => fold.open")
        assert told.locator("#energy select").nth(1).evaluate("box => box.selectedOptions[0].label") == "block 2"
        assert abs(opened.box("#maps h2")["y"] - place) < 3, "the reader's place is kept"
        assert not opened.errors


def test_a_page_of_nothing_but_a_loop_is_drawn(chromium: Any, tmp_path: Path) -> None:
    """A run that has only begun: no empty charts."""
    table = training_table(steps=(0, 8), layers=1, models=("decoder",), only=("loss", "learning_rate"))
    path = write_report(tmp_path, [RunView(Table.from_records(table.records()), {"status": "running"})])
    context = chromium.new_context(viewport=SCREEN)
    page = context.new_page()
    page.goto(path.as_uri())
    page.wait_for_selector(".main-svg")
    assert "still going" in page.locator(".deck").inner_text()
    empty = "[...document.querySelectorAll('.plot')].filter(p => p.data && !p.data.length).length"
    assert page.evaluate(empty) == 0
    context.close()


def page_of_models(chromium: Any, folder: Path, models: int, viewport: Any) -> Any:
    """A page with two verdicts on each of some models, opened."""
    names, subjects = ("tangent_energy", "bell_shaped"), [f"Family-{number}35M" for number in range(models)]
    verdicts = [verdict(name, subject, "undecided") for name in names for subject in subjects]
    table = training_table(steps=STEPS, layers=3)
    path = write_report(folder, [RunView(table, table.about, verdicts=verdicts)])
    page = chromium.new_page(viewport=viewport)
    page.goto(path.as_uri())
    return page


@pytest.mark.parametrize("models", [4, 5, 16])
def test_verdicts_of_several_models_stay_inside_the_page(chromium: Any, tmp_path: Path, models: int) -> None:
    page = page_of_models(chromium, tmp_path, models, SCREEN)
    inside = "(() => { const a = document.querySelector('.verdict-grid'), b = a.parentElement;"
    width = page.evaluate(f"{inside} return [a.scrollWidth, b.clientWidth] }})()")
    page.close()
    assert width[0] <= width[1], "the last column is cut off"


@pytest.mark.parametrize("models", [4, 16])
def test_on_a_phone_every_badge_has_the_name_of_its_model(chromium: Any, tmp_path: Path, models: int) -> None:
    page = page_of_models(chromium, tmp_path, models, PHONE)
    shown = "[...document.querySelectorAll('.verdict-grid td[data-who]')].filter(td => td.offsetParent)"
    before = page.evaluate(f"{shown}.map(td => getComputedStyle(td, '::before').content)")
    page.close()
    assert len(before) == 2 * models and all("Family-" in name for name in before)
