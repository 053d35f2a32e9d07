"""The documentation says what is so: reference pages, commands, links."""

from __future__ import annotations

import ast
import functools
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer

ROOT = Path(__file__).parents[2]
DOCS = [page for page in (ROOT / "docs").rglob("*.md") if not {"_build", "results"} & set(page.parts)]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS])
LONGEST = 150  # lines of the README
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def blocks(page: Path, language: str) -> Iterator[str]:
    return (text for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language)


def commands() -> list[str]:
    """Lines that begin with `anisoscope`, in blocks and in running text."""
    found: list[str] = []
    for page in PAGES:
        if page.name == "cli.md":  # written from the declarations; names commands without their arguments
            continue
        text = page.read_text(encoding="utf-8")
        found += [line.partition("  #")[0].strip() for kind in ("", "sh") for block in blocks(page, kind)
                  for line in block.splitlines() if line.startswith("anisoscope ")]  # fmt: skip
        found += re.findall(r"`(anisoscope [a-z]+ [^`]*)`", BLOCK.sub("", text))
    return list(dict.fromkeys(found))


def test_commands_that_are_only_named_exist() -> None:
    """In running text a command may stand without its arguments."""
    named = {name for page in PAGES for name in re.findall(r"`anisoscope ([a-z]+)`", page.read_text("utf-8"))}
    assert named <= set(command_line().commands)


@functools.cache
def command_line() -> Any:
    from anisoscope.cli import app

    return typer.main.get_command(app)


def parse(words: list[str]) -> Any:
    """Parse a command as the command line would, without running it."""
    command, context, rest = command_line(), None, words
    while hasattr(command, "commands"):  # a group leaves the words after the name of one of its commands unread
        name, *rest = rest
        command = command.commands[name]
        context = command.make_context(name, rest, parent=context, resilient_parsing=False)
        rest = [*getattr(context, "_protected_args", ()), *context.args]
    return context


@pytest.mark.parametrize("line", commands())
def test_every_command_of_the_documentation_parses(line: str) -> None:
    _, *words = shlex.split(line.replace("…", "x").replace("RUN [RUN x]", "RUN"))
    context = parse(words)
    assert context.info_name in words[:2] and not context.args, "words that no parameter took"
    if words[0] == "profile":
        from anisoscope.metrics.catalogue import parse_requests
        from anisoscope.option import distinct, layer_numbers

        if (metrics := context.params["metrics"]) is not None:
            assert parse_requests(distinct(metrics))
        if (layers := context.params["layers"]) is not None:
            assert layer_numbers(layers)


def test_there_are_commands_and_a_wrong_one_would_not_parse() -> None:
    assert len(commands()) > 8
    with pytest.raises(Exception, match="No such option"):
        parse(["profile", "x", "--no-such-option"])
    with pytest.raises(Exception, match="No such option"):
        parse(["study", "curvature", "--no-such-option"])
    with pytest.raises(KeyError):
        parse(["no-such-command"])


def test_reference_pages_are_what_the_declarations_say() -> None:
    from reference_pages import pages

    for name, text in pages():
        written = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert written == text, f"docs/{name} is not what the declarations say; write it again with `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_the_documentation_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_source_files_named_in_the_documentation_exist(page: Path) -> None:
    for name in re.findall(r"`((?:src|tests|benchmarks|tools)/[\w/]+\.\w+|[\w]+/[\w/]+\.py)`", page.read_text("utf-8")):
        assert any((base / name).exists() for base in (ROOT, ROOT / "src" / "anisoscope")), f"{page.name} names {name}"


def test_python_of_the_documentation_uses_names_that_exist() -> None:
    import anisoscope

    names: set[str] = set()
    for page in PAGES:
        for block in (text for kind in ("python", "py") for text in blocks(page, kind)):
            tree = ast.parse(block)
            names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
                      and node.module == "anisoscope" for alias in node.names}  # fmt: skip
            names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
                      and isinstance(node.value, ast.Name) and node.value.id == "anisoscope"}  # fmt: skip
    assert names
    for name in names:
        assert hasattr(anisoscope, name), name


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With two steps where one trains for more; tests/e2e/test_examples.py runs them as they stand."""
    from anisoscope.metrics.engine.metric import REGISTRY

    short = tmp_path / path.name
    short.write_text(re.sub(r"^(STEPS\b.*? = )\d+", r"\g<1>2", path.read_text("utf-8"), flags=re.MULTILINE), "utf-8")
    with patch.dict(REGISTRY):  # one example declares a metric
        runpy.run_path(str(short), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) > 2


def test_sites_named_in_the_documentation_exist() -> None:
    from anisoscope.capture.sites.site import KINDS

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for found in re.findall(r"--sites (\S+)", text):
        assert set(found.split(",")) <= set(KINDS), found


def shown_pictures() -> list[Any]:
    """Pictures of the gallery that the README shows."""
    from gallery import PICTURES

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return [picture for picture in PICTURES if f"docs/figures/gallery/{picture.name}.svg" in text]


def test_the_readme_is_short_and_has_one_picture_and_three_results() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < LONGEST
    assert len(shown_pictures()) == 4


@pytest.mark.slow
def test_numbers_of_the_readme_are_those_of_the_tables() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for picture in shown_pictures():
        assert picture.tell() in text, f"the README says other than the table of {picture.result}; see docs/gallery.md"


@pytest.mark.slow
def test_the_gallery_is_what_the_tables_say() -> None:
    from gallery import page

    assert (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8") == page(), "write it again with `make results`"


def test_every_picture_of_the_gallery_is_there_in_light_and_dark() -> None:
    from gallery import PICTURES

    for picture in PICTURES:
        for end in ("", "-dark"):
            assert (ROOT / "docs" / "figures" / "gallery" / f"{picture.name}{end}.svg").is_file()


@pytest.mark.slow
def test_pictures_are_drawn_again_to_the_same_bytes(tmp_path: Path) -> None:
    import matplotlib

    from drawing_style import draw_both
    from gallery import PICTURES

    if f"matplotlib=={matplotlib.__version__}\n" not in (ROOT / "constraints.txt").read_text(encoding="utf-8"):
        pytest.skip("another matplotlib than the one that drew them")
    picture = PICTURES[1]
    for path in draw_both(picture.draw, tmp_path / picture.name, picture.size):
        kept = ROOT / "docs" / "figures" / "gallery" / path.name
        assert path.read_bytes() == kept.read_bytes(), "draw it again with `make gallery`"


def test_the_version_is_the_same_everywhere() -> None:
    from anisoscope import __version__

    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
