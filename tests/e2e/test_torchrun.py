"""`torchrun -m anisoscope profile`: the contexts are dealt to the processes, and the run is that of one process."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anisoscope
from anisoscope.measurement import profile as profiling
from anisoscope.measurement.workers import processes
from anisoscope.results.query import Table
from support.forked import command_line
from support.ranks import assert_same, in_ranks

MODEL = "gpt2:n_layer=1,n_embd=16,n_head=2,n_positions=32,vocab_size=300"
OPTIONS: dict[str, Any] = {"random_init": True, "device": "cpu", "tokens": 640, "context": 32, "batch_size": 3}
METRICS = "average_cosine,drift,participation_ratio,two_nn,attention_entropy"


def words(*more: object, metrics: str = METRICS) -> list[str]:
    sizes = ["--random-init", "--device", "cpu", "--tokens", 640, "--context", 32, "--batch-size", 3]
    return [str(word) for word in ("profile", *sizes, "--metrics", metrics, *more)]


def started(
    size: int, folder: Path, *line: object, before: Callable[[int], None] | None = None
) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of a command in as many processes, as torchrun starts it."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]

    def act(rank: int) -> tuple[int, str, str]:
        about = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {name: str(value) for name, value in about.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if before is not None:
            before(rank)
        paths = [folder / f"{name}.{rank}" for name in ("out", "err")]
        for number, path in enumerate(paths, 1):
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1) for number in (1, 2))  # noqa: SIM115
        code = 0
        try:
            command_line(*line)()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        return code, *(path.read_text() for path in paths)  # type: ignore[return-value]

    return in_ranks(act, size, folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    anisoscope.profile(MODEL, out=out, report=False, metrics=METRICS, **OPTIONS)
    return out


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_run_is_that_of_one_process_and_the_first_one_prints(size: int, alone: Path, tmp_path: Path) -> None:
    """There are seven batches: one process has one more than others."""
    out = tmp_path / "run"
    (code, said, _), *others = started(size, tmp_path, *words(MODEL, "--out", out))
    assert code == 0 and "block 1" in said
    assert others == [(0, "", "")] * (size - 1)
    found, expected = Table.read(out), Table.read(alone)
    assert_same(found, expected, tolerance=1e-12, least=20)
    run, other = (json.loads((path / "run.json").read_text()) for path in (out, alone))
    for name in ("status", "config", "warnings", "data"):
        assert run[name] == other[name], name
    assert run["processes"] == size
    (entry,), (expected_entry,) = run["models"], other["models"]
    assert {**entry, "memory_estimate_mb": 0} == {**expected_entry, "memory_estimate_mb": 0}
    assert (out / "report.html").is_file()
    kept = [np.sort(list(path.glob("arrays/*"))) for path in (out, alone)]
    assert [path.name for path in kept[0]] == [path.name for path in kept[1]]


def test_groups_keep_their_order_and_every_process_has_the_table(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{name} of some words {number}" * 9, "kind": name})
             for number in range(8) for name in ("b", "a", "c")]  # fmt: skip
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    options = {**OPTIONS, "data": str(tmp_path / "corpus.jsonl"), "group_by": "kind", "metrics": METRICS}
    expected = anisoscope.profile(MODEL, **options)
    first, second = in_ranks(lambda _: anisoscope.profile(MODEL, **options), 2, tmp_path)
    assert_same(first, expected, tolerance=1e-12)
    assert_same(second, expected, tolerance=1e-12)
    assert [row["group"] for row in first.records()] == [row["group"] for row in expected.records()]
    named, _ = in_ranks(lambda _: anisoscope.measure(MODEL, **options), 2, tmp_path)
    assert_same(named, expected, tolerance=1e-12)


@pytest.mark.slow
def test_several_passes_and_several_models(tmp_path: Path) -> None:
    """A file of rows is read by the first process; memory for one layer at a time."""
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32))
    options = {**OPTIONS, "memory": 1, "metrics": "average_cosine,participation_ratio"}
    wide = MODEL.replace("n_embd=16", "n_embd=128").replace("n_layer=1", "n_layer=2")
    models = (wide, str(tmp_path / "rows.npy"), MODEL)
    expected = anisoscope.profile(*models, **options)
    first, _ = in_ranks(lambda _: anisoscope.profile(*models, **options), 2, tmp_path)
    assert any("passes" in note for note in expected.about["warnings"]), "the counter-test: there were several"
    assert_same(first, expected, tolerance=1e-12, least=20)


@pytest.mark.slow
def test_an_interrupted_run_of_one_process_goes_on_in_several(alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"

    def interrupted(rank: int) -> None:
        batches, whole = iter(range(3)), profiling._whole_batch

        def stop(work: Any) -> Any:
            if next(batches, None) is None:
                raise KeyboardInterrupt
            return whole(work)

        profiling._whole_batch = stop
        with pytest.raises(KeyboardInterrupt):
            anisoscope.profile(MODEL, out=out, report=False, metrics=METRICS, alone=True, **OPTIONS)

    in_ranks(lambda rank: interrupted(rank) if not rank else None, 2, tmp_path)
    assert list((out / "partial").iterdir()), "the counter-test: something was saved"
    (code, *_), _ = started(2, tmp_path, *words(MODEL, "--out", out, "--resume"))
    assert code == 0
    assert_same(Table.read(out), Table.read(alone), tolerance=1e-12, least=20)
    assert [code for code, *_ in started(2, tmp_path, *words(MODEL, "--out", out, "--resume"))] == [0, 0]


def test_a_failure_of_one_process_is_told_by_the_first(tmp_path: Path) -> None:
    def fails(rank: int) -> None:
        if rank == 1:
            profiling.load_model = lambda *_, **__: 1 / 0  # type: ignore[assignment]

    (code, _, said), (other, *silent) = started(2, tmp_path, *words(MODEL, "--out", tmp_path / "run"), before=fails)
    assert code and other and silent == ["", ""]
    assert "anisoscope: rank 1 failed, and with it all 2 processes: ZeroDivisionError: division by zero" in said


def test_mistakes_are_told_once(tmp_path: Path) -> None:
    for line, sentence in (
        (words(MODEL, metrics="nonsense"), "nonsense"),
        (words(MODEL, "--save-rows", "--out", tmp_path / "run"), "in several processes; run it without torchrun"),
        (words(tmp_path / "nowhere", "--out", tmp_path / "other"), "nowhere"),
    ):
        (code, _, said), (other, *silent) = started(2, tmp_path, *line)
        assert code and other and silent == ["", ""]
        assert said.count("anisoscope: ") == 1 and sentence in said


def test_a_variable_that_another_launcher_left_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_ARRIVAL", 1.0)
    ((code, _, said),) = started(1, tmp_path, *words(MODEL), before=lambda _: os.environ.update(WORLD_SIZE="2"))
    assert code == 2
    assert "say that this is one of 2 processes, which did not meet within 1 s; start all of them with torchrun" in said
