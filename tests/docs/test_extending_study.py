"""A study with a figure is one folder and one row: command, options, run folder, page and vector files follow."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from anisoscope import studies
from anisoscope.commands import study as commands
from anisoscope.results.folder import RunFolder
from anisoscope.studies.catalogue import STUDIES, StudyEntry

CONFIG = '''
from dataclasses import dataclass
from typing import Annotated

from anisoscope.option import Option, Seed


@dataclass(frozen=True)
class TossingConfig:
    """How often coins are tossed."""

    tosses: Annotated[int, Option("Tosses of each coin.")] = 100
    seed: Seed = 0
'''
PROTOCOL = '''
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from anisoscope.results.query import Table
from anisoscope.studies.study_run import Study


@dataclass
class Tossing(Study):
    """Three coins, and how often each shows heads."""

    name: ClassVar[str] = "tossing"

    def measure(self):
        seen = np.random.default_rng(self.config.seed).random((3, self.config.tosses)) < 0.5
        place = {"model": "coin", "kind": "rows", "metric": "heads", "n": self.config.tosses}
        rows = [{**place, "layer": i, "value": row.mean()} for i, row in enumerate(seen)]
        self.folder.write_table(Table.from_records(rows))
        self.folder.write_json("verdicts.json", [])
'''
FIGURES = """
from anisoscope.results.query import Query
from anisoscope.view.figure import Axis, Figure, Panel, Series
from anisoscope.view.page import Page, Prose, Section, text


def study_page(run, declared=None):
    rows = sorted(Query(run.table).where(metric="heads"), key=lambda row: row.layer)
    series = Series("heads", [row.layer for row in rows], [row.value for row in rows], size=6.0)
    panel = Panel(Axis("coin"), Axis("share of heads"), (series,), title="Heads", alt="Heads by coin")
    section = Section("heads", "How often heads", [Prose(text("Three coins.")), Figure((panel,), files={"heads": {}})])
    return Page("Tossing", "Tossing coins", [section])


def summary(run):
    yield f"{len(run.table)} coins were tossed"
"""


@pytest.fixture
def tossing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StudyEntry]:
    """A study in a folder of its own, which exists for one test only."""
    folder = tmp_path / "more" / "tossing"
    folder.mkdir(parents=True)
    files = {"__init__": CONFIG, "protocol": PROTOCOL, "figures": FIGURES}
    for name, words in files.items():
        (folder / f"{name}.py").write_text(words)
    monkeypatch.setattr(studies, "__path__", [*studies.__path__, str(folder.parent)])
    from anisoscope.studies.tossing import TossingConfig

    entry = StudyEntry("tossing", "Toss three coins.", TossingConfig, "anisoscope.studies.tossing.protocol:Tossing")
    monkeypatch.setitem(STUDIES, "tossing", entry)
    yield entry
    for name in [name for name in sys.modules if name.startswith("anisoscope.studies.tossing")]:
        del sys.modules[name]


@pytest.mark.usefixtures("vector_figures")
def test_a_study_is_a_command_with_a_page_and_figures(tossing: StudyEntry, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(commands.studies()["tossing"])
    help_ = CliRunner().invoke(app, ["--help"]).output
    assert "--tosses" in help_ and "Tosses of each coin." in help_ and "--resume" in help_
    done = CliRunner().invoke(app, ["--tosses", "40", "--out", str(tmp_path / "run")], catch_exceptions=False)
    assert done.exit_code == 0 and "3 coins were tossed" in done.output
    folder = RunFolder.open(tmp_path / "run")
    assert folder.about()["status"] == "complete" and folder.about()["config"]["tosses"] == 40
    assert len(folder.table().where(metric="heads")) == 3
    page = (folder.path / "report.html").read_text(encoding="utf-8")
    assert "Tossing coins" in page and "How often heads" in page
    assert (folder.path / "figures" / "heads.pdf").is_file() and (folder.path / "figures" / "heads.svg").is_file()
    assert json.loads((folder.path / "verdicts.json").read_text()) == []


def test_without_its_row_a_study_is_unknown() -> None:
    assert "tossing" not in commands.studies()
