"""The site builds without a warning and without a network, and the tutorials run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from plain_docstrings import plain_line, rewrite

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
ELSEWHERE = re.compile(r"""<(?:script|link|img|iframe)[^>]+(?:src|href)=["']?(?:https?:)?//""")


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("the `loss` of a step", "the ``loss`` of a step"),
        ("the *summed* loss, d * r", "the *summed* loss, d \\* r"),
        ("|x| and trailing_ words", "\\|x\\| and trailing\\_ words"),
        ("a `a|b*c_` stays", "a ``a|b*c_`` stays"),
    ],
)
def test_prose_of_docstrings_means_itself(line: str, written: str) -> None:
    assert plain_line(line) == written


def test_examples_and_indented_blocks_of_docstrings_stay_as_they_are() -> None:
    lines = ["One `x`.", "`y` is another.", "", "    with f(x) as y:", "        g(*y)", "", ">>> f(1)", "a_"]
    expected = ["One ``x``.", "", "``y`` is another.", "", "::", "", *lines[3:]]
    assert rewrite(lines) == expected


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx", reason="pip install '.[docs]'")
    pytest.importorskip("myst_nb")
    out = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(out / "trees")]
    done = subprocess.run([*words, "docs", str(out / "html")], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return out / "html"


@pytest.mark.slow
def test_every_page_of_the_documentation_is_in_the_site(site: Path) -> None:
    taken_in = ("limits.md", "finding.md")  # words of a result, which its README has
    sources = [*(p for p in (ROOT / "docs").rglob("*.md") if p.name not in taken_in), *NOTEBOOKS]
    pages = [source.relative_to(ROOT / "docs") for source in sources if "_build" not in source.parts]
    assert len(pages) > 40
    assert not [page for page in pages if not (site / page.with_suffix(".html")).is_file()]


@pytest.mark.slow
def test_pages_ask_no_other_machine_for_anything(site: Path) -> None:
    for page in site.rglob("*.html"):
        if page.name != "report.html":  # pages of runs, which have tests of their own
            found = ELSEWHERE.search(page.read_text(encoding="utf-8"))
            assert found is None, f"{page.relative_to(site)}: {found.group()}"


@pytest.mark.slow
def test_links_of_the_site_lead_somewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        if page.name == "report.html":
            continue
        for target in re.findall(r'href="([^"#]+)', page.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", target):
                assert (page.parent / target.partition("?")[0]).exists(), f"{page.relative_to(site)} links to {target}"


@pytest.mark.slow
def test_pictures_have_a_twin_for_the_dark(site: Path) -> None:
    text = (site / "concepts.html").read_text(encoding="utf-8")
    assert text.count("only-light") == text.count("only-dark") == 6


@pytest.mark.slow
def test_the_api_has_every_public_name(site: Path) -> None:
    import anisoscope

    text = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    metrics = (site / "metrics.html").read_text(encoding="utf-8")
    for name in anisoscope.__all__:
        assert name == "__version__" or f'id="anisoscope.{name}"' in text or f">{name}<" in metrics, name


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_tutorial_runs(path: Path) -> None:
    pytest.importorskip("nbclient", reason="pip install '.[docs]'")
    pytest.importorskip("ipykernel")
    from notebooks import executed

    cells = [cell for cell in executed(path).cells if cell.cell_type == "code" and cell.source.strip()]
    assert cells and all(cell.execution_count for cell in cells), "a cell was left out"
    assert not [each for cell in cells for each in cell.outputs if each.output_type == "error"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_tutorial_keeps_small_outputs_that_name_no_place(path: Path) -> None:
    assert len(NOTEBOOKS) == 4
    assert path.stat().st_size < 120_000
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", ()):
            words = json.dumps({key: text for key, text in output.items() if key != "data"} | {
                key: text for key, text in output.get("data", {}).items() if key.startswith("text")})  # fmt: skip
            assert output["output_type"] != "error" and "/tmp/" not in words and "/home/" not in words
