"""Sinks of a monitor receive every row once, and none of them can stop a training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from anisoscope.integrations.follower import Follower
from anisoscope.monitor.schedule import at
from anisoscope.monitor.sink import in_order
from anisoscope.results.query import Table
from support.monitored import PLAN, probe_of, trained


class Counting:
    """A tracker that counts what it is given."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.rows: list[tuple[int, Table]] = []
        self.manifests: list[Mapping[str, Any]] = []

    def start(self, manifest: Mapping[str, Any]) -> None:
        self.calls.append("start")
        self.manifests.append(manifest)

    def write(self, rows: Table, step: int) -> None:
        self.calls.append("write")
        self.rows.append((step, rows))

    def finish(self, manifest: Mapping[str, Any]) -> None:
        self.calls.append("finish")
        self.manifests.append(manifest)


class Failing(Counting):
    """A tracker that loses its connection in one of its methods."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def write(self, rows: Table, step: int) -> None:
        super().write(rows, step)
        self._fail("write")

    def start(self, manifest: Mapping[str, Any]) -> None:
        super().start(manifest)
        self._fail("start")

    def finish(self, manifest: Mapping[str, Any]) -> None:
        super().finish(manifest)
        self._fail("finish")

    def _fail(self, method: str) -> None:
        if method == self.method:
            raise ConnectionError("the server does not answer")


def _options(**more: Any) -> dict[str, Any]:
    return {"probe": probe_of("gpt2"), "plan": PLAN, "when": at([0, 2]), "metrics": "average_cosine", **more}


def test_a_sink_receives_every_row_of_the_table_once() -> None:
    sink = Counting()
    _, _, monitor = trained("gpt2", _options(sinks=[sink]))
    assert sink.calls[0] == "start"
    assert sink.calls[-1] == "finish"
    assert {step for step, _ in sink.rows} == {0, 2}
    assert all(set(rows.arrow["step"].to_pylist()) == {step} for step, rows in sink.rows)
    sent = in_order(Table.concat(rows for _, rows in sink.rows)).finite()
    names = ["step", "layer", "kind", "head", "metric", "variant", "value"]
    assert sent.arrow.select(names).equals(monitor.table.finite().arrow.select(names))
    assert len(Table.concat(rows for _, rows in sink.rows)) == len(monitor.table)
    begun, ended = sink.manifests
    assert begun["models"][0]["architecture"] == "GPT2LMHeadModel"
    assert begun["config"]["seed"] == 0
    assert ended["status"] == "complete"


@pytest.mark.parametrize("method", ["start", "write", "finish"])
def test_a_sink_that_raises_is_dropped_and_noted_once_and_the_training_goes_on(method: str, tmp_path: Path) -> None:
    failing, counting = Failing(method), Counting()
    losses, _, monitor = trained("gpt2", _options(sinks=[failing, counting], out=tmp_path / "run"))
    plain, _, _ = trained("gpt2", None)
    assert losses == plain
    assert failing.calls.count(method) == 1
    assert failing.calls[-1] == method, "it is not called again"
    assert counting.calls.count("write") == 4  # two steps, and what was logged of each
    words = [note for note in monitor.notes if "the sink Failing failed" in note]
    said = f"the sink Failing failed in {method} and was dropped (ConnectionError: the server does not answer)"
    assert len(words) == 1 and words[0].endswith(said)
    assert words[0] in json.loads((tmp_path / "run" / "run.json").read_text())["warnings"]


def test_a_sink_of_an_interrupted_training_is_told_so() -> None:
    sink = Counting()

    def interrupt(step: int) -> bool:
        if step == 1:
            raise KeyboardInterrupt
        return True

    with pytest.raises(KeyboardInterrupt):
        trained("gpt2", _options(sinks=[sink], when=interrupt))
    assert sink.manifests[-1]["status"] == "interrupted"


def test_callbacks_of_frameworks_take_sinks_too() -> None:
    sink = Counting()
    assert Follower({"sinks": [sink]}).options["sinks"] == [sink]
