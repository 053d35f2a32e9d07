"""More than a thousand bad inputs, each in a process with bounded time and memory: one sentence, no traceback.

The lists are in tests/support: bad_options (every option of every command), bad_lines.txt and bad_inputs (files,
models, damaged runs), bad_calls (the library).
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.bad_files import build_shelf
from support.bad_inputs import GPT, BadInput, bad_inputs
from support.bad_options import OptionCase, option_cases
from support.forked import command_line, complaints, in_fork, python_call

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")]
_TRAIN = "train --steps 4 --layers 1 --width 16 --heads 2 --context 16 --batch-size 4 --contexts 32 --limit 0.1"
_MADE = {
    "run": "profile {s}/rows.npy",
    "net": "profile {s}/model --tokens 512 --context 16 --metrics drift,mean_norm,two_nn",
    "trained": f"{_TRAIN} --monitor light --when 0,4",
}


def _load_everything() -> None:
    """Import all modules once, so that a fork need not."""
    import anisoscope

    for module in pkgutil.walk_packages(anisoscope.__path__, "anisoscope."):
        if not any(part in module.name for part in ("triton", "integrations", "__main__")):
            importlib.import_module(module.name)


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shelf of bad files, with three good runs."""
    _load_everything()
    shelf = tmp_path_factory.mktemp("things")
    build_shelf(shelf)
    for name, line in _MADE.items():
        words = [*line.replace("{s}", str(shelf)).split(), "--out", str(shelf / name)]
        done = in_fork(command_line(*words), seconds=300, memory=8 << 30)
        assert done.code == 0, done.err
    return shelf


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "place"
    shutil.rmtree(tmp_path, ignore_errors=True)  # a thousand runs would fill the disk


def _stamps(shelf: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in shelf.rglob("*") if not path.is_dir()}


def _drawn_again(path: Path) -> bool:
    """Whether a file belongs to a page, which `report` draws again."""
    return "figures" in path.parts or path.name in ("report.html", "comparison.json")


@pytest.mark.parametrize("case", bad_inputs(), ids=lambda case: case.id[:150])
def test_a_bad_input_ends_with_one_sentence_and_nothing_is_lost(case: BadInput, things: Path, place: Path) -> None:
    before = _stamps(things)
    if case.prepare is not None:
        place.mkdir()
        case.prepare(things, place)
    if case.call is not None:
        call = case.call
        ended = in_fork(python_call(lambda: call(things, place)))
    else:
        words = [word.replace("{s}", str(things)).replace("{o}", str(place)) for word in case.line.split()]
        ended = in_fork(command_line(*words))
    assert not complaints(ended, legal=case.legal), ended.err
    after = _stamps(things)
    assert not [path for path in before if before[path] != after.get(path) and not _drawn_again(path)]
    assert not list(things.glob("evil-*")), "pickled code was run"


@pytest.mark.parametrize("case", list(option_cases()), ids=lambda case: case.id[:150])
def test_a_bad_value_of_any_option_ends_with_one_sentence(
    case: OptionCase, things: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.parent)  # `--out nan` is a folder of that name
    known = {"{gpt}": GPT, "{s}": str(things), "{out}": str(place), "{file}": str(things / "plain.txt")}
    words = list(case.line)
    for mark, text in known.items():
        words = [word.replace(mark, text) for word in words]
    ended = in_fork(command_line(*words))
    assert not complaints(ended, legal=case.legal), ended.err


def test_nothing_is_left_where_the_tests_were_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    in_fork(python_call(lambda: Path("-1").write_text("a page")))
    assert not list(tmp_path.iterdir())


def test_there_are_more_than_five_hundred() -> None:
    assert len(bad_inputs()) > 1000 and len(list(option_cases())) > 500
