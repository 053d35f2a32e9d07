"""`log_to` takes words and objects; a wrong one, or a package that is missing, is refused when it is given."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from anisoscope.errors import AnisoscopeError
from anisoscope.integrations.follower import Follower
from anisoscope.integrations.trackers.catalogue import TRACKERS, trackers
from anisoscope.integrations.trackers.host import HostTracker
from anisoscope.integrations.trackers.tensorboard import TensorBoardTracker
from anisoscope.monitor.schedule import at
from support.monitored import PLAN, probe_of, trained
from support.tracked import NAMES


class Nothing:
    """A sink that does nothing."""

    def start(self, manifest: Any) -> None: ...

    def write(self, rows: Any, step: int) -> None: ...

    def finish(self, manifest: Any) -> None: ...


@pytest.mark.parametrize("word", [*TRACKERS])
def test_a_missing_package_is_told_with_what_to_install(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AnisoscopeError, match=rf'which is not installed here; pip install "anisoscope\[{word}\]"\.'):
        trackers(word)


def test_words_objects_and_lists_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    own = Nothing()
    assert trackers(own) == [own]
    found = trackers(["tensorboard:runs/tb", own, "wandb:project"])
    assert [type(one).__name__ for one in found] == ["TensorBoardTracker", "Nothing", "WandbTracker"]
    assert found[0].place == str(Path("runs/tb").absolute()) and found[2].place == "project"
    assert [one.word for one in trackers("mlflow:a/b,trackio")] == ["mlflow", "trackio"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("tensorbord", "did you mean 'tensorboard'"),
        ("tensorboard:", "nothing after the colon"),
        ("", "log_to is empty"),
        (["tensorboard", "tensorboard"], "twice"),
        (3, "no method start"),
        ([object()], "no method start"),
        ("trainer", "no trainer runs here"),
        (None, "no method start"),
    ],
)
def test_what_is_no_tracker_is_refused(wrong: Any, said: str) -> None:
    with pytest.raises(AnisoscopeError, match=said):
        trackers(wrong)


def test_the_word_trainer_is_for_callbacks() -> None:
    follower = Follower({"log_to": "trainer"})
    assert follower.logs_to_host and isinstance(follower.options["log_to"][0], HostTracker)
    assert not Follower({"log_to": Nothing()}).logs_to_host
    with pytest.raises(AnisoscopeError, match="'trainer' alone"):
        Follower({"log_to": "trainer:here"})


def test_a_monitor_sends_what_its_table_has_and_the_training_is_the_same(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options = {"probe": probe_of("gpt2"), "plan": PLAN, "when": at([0, 2]), "metrics": "average_cosine"}
    own = TensorBoardTracker(tmp_path / "own", scalars=["average_cosine"], figures=False)
    more = {"out": tmp_path / "run", "log_to": ["tensorboard", own], "background": False}
    losses, _, monitor = trained("gpt2", options | more)
    assert losses == trained("gpt2", None)[0]
    assert monitor.notes == []
    found = reader.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert set(found.Tags()["scalars"]) == {name for name in NAMES if "attention" not in name}
    for layer in (1, 2, 3):
        sent = {e.step: e.value for e in found.Scalars(f"anisoscope/average_cosine/layer_0{layer}")}
        rows = monitor.table.where(metric="average_cosine", kind="resid", layer=layer, variant="", group="")
        assert sent == pytest.approx({row.step: row.value for row in rows}, rel=1e-6)
    chosen = reader.EventAccumulator(str(tmp_path / "own")).Reload().Tags()
    assert chosen["images"] == [] and {n.split("/")[1] for n in chosen["scalars"]} == {"average_cosine"}


def test_a_tracker_that_cannot_write_is_noted_once_and_stops_nothing(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    options = {"probe": probe_of("gpt2"), "plan": PLAN, "when": at([0, 1, 2]), "metrics": "average_cosine"}
    losses, _, monitor = trained("gpt2", options | {"log_to": f"tensorboard:{tmp_path / 'file' / 'tb'}"})
    assert losses == trained("gpt2", None)[0]
    assert sum("the sink TensorBoardTracker failed in write and was dropped" in note for note in monitor.notes) == 1
