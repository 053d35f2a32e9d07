"""A Trainer on two processes, with copies of the model or with shards (FSDP2), shows what one process shows."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]


def trained(kind: str, out: Path, *checkpoint: Path) -> tuple[str, dict[str, float]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port] if kind != "one" else []
    words = [str(TESTS / "support" / "trainer_ranks.py"), kind, str(out), *map(str, checkpoint)]
    path = os.pathsep.join([str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launch, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    name, found = json.loads((out / f"found{len(checkpoint)}.json").read_text())
    return name, found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    return trained("one", tmp_path_factory.mktemp("one"))[1]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_show_what_one_shows_also_after_a_restart(
    kind: str, alone: dict[str, float], tmp_path: Path
) -> None:
    name, found = trained(kind, tmp_path)
    assert name.startswith("FSDP") == (kind == "fsdp2")
    assert {key.partition("|")[0] for key in alone} == {"0", "2", "4"}
    assert any("of=update" in key for key in alone)
    assert_same(found, alone)
    assert {path.name for path in (tmp_path / "checkpoint-3").glob("monitor*")} == {"monitor.pt", "monitor-1.pt"}
    _, resumed = trained(kind, tmp_path, tmp_path / "checkpoint-3")
    assert_same(resumed, found)


def assert_same(found: dict[str, float], wanted: dict[str, float]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        first = key.startswith("0|")  # later the training itself rounds otherwise
        tolerance = 1e-6 if first else 2e-3
        assert found[key] == pytest.approx(value, rel=tolerance, abs=tolerance, nan_ok=True), key
