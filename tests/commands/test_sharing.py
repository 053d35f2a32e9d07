"""Runs that are given away: as a section of a card, and as datasets that are read again as they were."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anisoscope.claims.catalogue import evaluate_claims
from anisoscope.claims.engine.claim import verdicts_to_dicts
from anisoscope.commands.card import write_card
from anisoscope.commands.push import push_runs
from anisoscope.errors import AnisoscopeError
from anisoscope.integrations.hub import hub_name
from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Table
from anisoscope.view.sections.card import card_text, dataset_card, placed, plain
from support.fake_training import table as fake_table
from support.loopback_hub import REPO, loopback_hub

SECRET = "/home/ada/secret place"


def _run(path: Path, **about: Any) -> Path:
    """The folder of a training that never was, with verdicts."""
    path.mkdir(parents=True)
    table, folder = fake_table(), RunFolder(path)
    record = {"kind": "training", "status": "complete", "started": path.name, "seed": 0, "anisoscope": "0.2.0"}
    command = ["anisoscope", "train", "--data", f"{SECRET}/text.txt", "--out", f"{SECRET}/run"]
    folder.write_table(table)
    folder.write_about({**table.about, **record, "command": command, "warnings": [f"read from '{SECRET}/x'"], **about})
    folder.write_json("verdicts.json", verdicts_to_dicts(evaluate_claims(table, ["tangent_energy", "amplified"])))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _run(tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture(scope="module")
def pushed(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of two runs, pushed one after the other."""
    target = tmp_path_factory.mktemp("pushed") / "dataset"
    assert push_runs([run], str(target)) == str(target)
    second = _run(run.with_name("second"))
    push_runs([second], f"folder:{target}")
    return target


# -- cards -------------------------------------------------------------------------------------------------------------


def test_a_card_has_the_finding_a_figure_numbers_verdicts_and_how_to_cite(run: Path, tmp_path: Path) -> None:
    path = write_card(RunFolder.open(run), tmp_path / "README.md")
    text = path.read_text()
    verdicts = {v["claim"]: v for v in json.loads((run / "verdicts.json").read_text())}
    assert "gradients go where the activations already point" in text
    assert f"| decoder | {verdicts['tangent_energy']['status']} |" in text
    (picture,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    assert re.search(r"\| Gradient energy in tangent directions, times chance \| [\d.]+.±.[\d.]+ \|", text)
    assert "@software{anisoscope," in text and "arXiv:2604.08764" in text
    assert "anisoscope train --data text.txt --out run" in text and "secret" not in text and "/home" not in text


def test_a_card_replaces_itself_and_nothing_else(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("# Mine\n\nBefore.\n")
    write_card(RunFolder.open(run), path)
    path.write_text(path.read_text() + "\nAfter.\n")
    first = path.read_text()
    assert write_card(RunFolder.open(run), path).read_text() == first
    assert first.startswith("# Mine\n\nBefore.\n\n<!-- anisoscope card: begin -->") and first.endswith("\nAfter.\n")
    assert placed(first, "x", "other").count("begin -->") == 2, "the counter-test"


def test_the_citation_of_a_card_is_that_of_the_package() -> None:
    cff = (Path(__file__).parents[2] / "CITATION.cff").read_text()
    cited = card_text.__globals__["_CITED"]
    (title,) = re.findall(r'^title: "(.*)"$', cff, flags=re.MULTILINE)
    (author,) = re.findall(r"- name: (.*)$", cff, flags=re.MULTILINE)
    (year,) = re.findall(r'date-released: "(\d+)-', cff)
    assert f"{{{title}}}" in cited.format(version="1") and author in cited and f"{{{{{year}}}}}" in cited


def test_a_caution_stands_before_the_numbers(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", warnings=["decoder: WRONG TEXT: its loss is 9 nats <b>"])
    text = write_card(RunFolder.open(run)).read_text()
    assert text.index("**Caution:** decoder: WRONG TEXT: its loss is 9 nats &lt;b&gt;") < text.index("95 % intervals")


def test_names_cannot_break_a_card() -> None:
    assert plain("a|b\n<script>*x* [y](z)`") == "a\\|b &lt;script&gt;\\*x\\* \\[y\\](z)'"


@pytest.mark.parametrize("wrong", ["README", "card.html"])
def test_a_card_goes_into_markdown_alone(run: Path, tmp_path: Path, wrong: str) -> None:
    with pytest.raises(AnisoscopeError, match="expected a Markdown file"):
        write_card(RunFolder.open(run), tmp_path / wrong)
    assert list(tmp_path.iterdir()) == []


# -- datasets ----------------------------------------------------------------------------------------------------------


def _same_rows(a: Table, b: Table) -> bool:
    return len(a) > 0 and str(a.records()) == str(b.records())


def test_what_was_pushed_is_read_again_as_it_was(pushed: Path, run: Path) -> None:
    one, all_of_them = Table.read(pushed / "first"), Table.read(pushed)
    assert _same_rows(one, Table.read(run))
    assert len(all_of_them) == 2 * len(one) and set(all_of_them.about["runs"]) == {"first", "second"}
    assert one.about["seed"] == 0 and len(all_of_them.about["models"]) == 2
    there = {path.name for path in (pushed / "first").iterdir()}
    assert there - {"figures"} == {"run.json", "table.parquet", "verdicts.json", "report.html", "card.png"}


def test_a_folder_of_runs_that_nobody_pushed_is_no_dataset(run: Path) -> None:
    with pytest.raises(AnisoscopeError, match=r"holds no run\.json"):
        Table.read(run.parent)


def test_nothing_that_is_pushed_says_where_the_user_keeps_their_files(pushed: Path, run: Path) -> None:
    files = [path for path in pushed.rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        content = path.read_bytes().decode("latin-1")
        assert "secret place" not in content and str(run.parent) not in content, path
    assert "secret place" in (run / "run.json").read_text(), "the counter-test: the command of the run itself"


def test_the_readme_of_a_dataset_names_all_runs_and_keeps_what_others_wrote(pushed: Path) -> None:
    text = (pushed / "README.md").read_text()
    assert text.index("<!-- anisoscope run first: begin -->") < text.index("<!-- anisoscope run second: begin -->")
    assert "(first/card.png)" in text and 'data_files: "*/table.parquet"' in text
    edited = text.replace("tags:", "license: cc-by-4.0\ntags:") + "\nOf mine.\n"
    again = dataset_card(edited, {"first": "new"}, runs=["first", "second"], where=".")
    assert "license: cc-by-4.0\n" in again and again.endswith("\nOf mine.\n") and again.count("configs:") == 1
    assert dataset_card(again, {"first": "new"}, runs=["first", "second"], where=".") == again


def test_datasets_loads_each_run_and_all_of_them(pushed: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    words = {"cache_dir": str(tmp_path)}
    every = datasets.load_dataset(str(pushed), **words)["train"]
    assert every.num_rows == 2 * datasets.load_dataset(str(pushed), "first", **words)["train"].num_rows > 0
    assert set(Table.read(pushed)["metric"]) == set(every.unique("metric"))


def test_a_run_that_is_pushed_again_replaces_itself_and_never_another(pushed: Path, run: Path, tmp_path: Path) -> None:
    stale = pushed / "first" / "stale.txt"
    stale.write_text("")
    push_runs([run], str(pushed))
    assert not stale.exists() and (pushed / "second" / "run.json").is_file()
    other = _run(tmp_path / "first", started="another time")
    with pytest.raises(AnisoscopeError, match="holds another run called 'first'"):
        push_runs([other], str(pushed))
    assert json.loads((pushed / "first" / "run.json").read_text())["started"] == "first"


@pytest.mark.parametrize(
    ("target", "name", "said"),
    [
        ("hub:nobody", None, "no dataset of the hub"),
        ("hub:org/data/run", None, "names more than a dataset"),
        ("folder:", None, "is no folder"),
        ("{run}/run.json", None, "is no folder"),
        ("x", "a b", "--name is"),
        ("x", "../up", "--name is"),
        ("x", "default", "--name is"),
    ],
)
def test_a_place_or_a_name_that_cannot_be_is_refused(run: Path, target: str, name: str | None, said: str) -> None:
    with pytest.raises(AnisoscopeError, match=said):
        push_runs([run], target.format(run=run), name=name)


def test_places_on_the_hub_are_taken_apart() -> None:
    assert hub_name("hub:org/data") == ("org/data", "", None)
    assert hub_name("hub:org/data/run@v1") == ("org/data", "run", "v1")


def test_a_hub_that_cannot_be_reached_is_told_in_a_sentence(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(AnisoscopeError, match="push into a folder"):
        push_runs([run], "hub:org/nowhere")
    with pytest.raises(AnisoscopeError, match="is not in the cache and could not be downloaded"):
        Table.read("hub:org/nowhere")


_CLIENT = """
import sys
from pathlib import Path
from anisoscope import Table
from anisoscope.commands.push import push_runs
first, second, copy = map(Path, sys.argv[1:])
print(push_runs([first], "hub:org/geometry", private=True))
push_runs([first, second], "hub:org/geometry")
Table.read("hub:org/geometry/first").write(copy)
print(len(Table.read("hub:org/geometry")), sorted(Table.read("hub:org/geometry").about["runs"]))
try:
    Table.read("hub:org/geometry/third")
except Exception as error:
    print(error)
"""


@pytest.mark.slow
def test_the_client_of_the_hub_uploads_and_downloads_a_dataset(run: Path, pushed: Path, tmp_path: Path) -> None:
    second, copy = run.with_name("second"), tmp_path / "copy.parquet"
    with loopback_hub() as hub:
        env = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
        env |= {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_none", "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        env |= {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        words = [sys.executable, "-c", _CLIENT, *map(str, (run, second, copy))]
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"hub:{REPO}" and hub.private == [True, False]
    assert _same_rows(Table.read(copy), Table.read(run))
    assert lines[1] == f"{2 * len(Table.read(run))} ['first', 'second']"
    assert "holds no run 'third'" in lines[2]
    assert hub.messages == ["Results of first", "Results of first, second"]
    assert hub.files is not None and {
        "README.md",
        "first/table.parquet",
        "first/figures/hero.svg",
        "second/report.html",
    } <= set(hub.files)
    assert f'Table.read("hub:{REPO}")' in hub.files["README.md"].decode()


@pytest.mark.parametrize("marks", ["begin", "end", "end begin", "begin begin end"])
def test_marks_that_are_no_pair_are_refused_and_no_text_is_lost(marks: str) -> None:
    text = "".join(f"<!-- anisoscope card: {word} -->\nmine\n" for word in marks.split())
    with pytest.raises(AnisoscopeError, match="leave one pair in order, or none"):
        placed(text, "new", "card")
