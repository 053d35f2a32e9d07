"""Other people's trainers on two processes, with copies of the model or with shards, show what one process shows."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]


def trained(host: str, kind: str, out: Path, *checkpoint: Path) -> tuple[str, dict[str, float]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port] if kind != "one" else []
    words = [str(TESTS / "support" / "trainer_ranks.py"), host, kind, str(out), *map(str, checkpoint)]
    path = os.pathsep.join([str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launch, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    name, found = json.loads((out / f"found{len(checkpoint)}.json").read_text())
    return name, found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, float]]:
    return functools.cache(lambda host: trained(host, "one", tmp_path_factory.mktemp(host))[1])


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero2"])
def test_two_processes_show_what_one_shows_also_after_a_restart(
    kind: str, alone: Callable[[str], dict[str, float]], tmp_path: Path
) -> None:
    if kind == "zero2":
        pytest.importorskip("deepspeed")
    name, found = trained("trainer", kind, tmp_path)
    wanted = alone("trainer")
    assert name.startswith("FSDP") == (kind == "fsdp2")
    assert {key.partition("|")[0] for key in wanted} == {"0", "2", "4"}
    assert any("of=update" in key for key in wanted)
    assert any("mean_norm|of=gradient" in key for key in wanted), "the scale of gradients"
    assert_same(found, {key: value for key, value in wanted.items() if kind != "zero2" or ";of=update;" not in key})
    assert {path.name for path in (tmp_path / "checkpoint-3").glob("monitor*")} == {"monitor.pt", "monitor-1.pt"}
    _, resumed = trained("trainer", kind, tmp_path, tmp_path / "checkpoint-3")
    assert_same(resumed, found)


@pytest.mark.parametrize(("host", "kind"), [("accelerate", "ddp"), ("lightning", "ddp"), ("lightning", "fsdp2")])
def test_copies_and_shards(host: str, kind: str, alone: Callable[[str], dict[str, float]], tmp_path: Path) -> None:
    """Also the loss, of which each process has its own."""
    pytest.importorskip(host)
    _, found = trained(host, kind, tmp_path)
    assert {key.partition("|")[0] for key in found if "|loss|" in key} == {"0", "2", "4"}
    known = kind == "ddp"  # the norm of shards would be a collective in a hook, in which one process may be alone
    assert any("gradient_norm" in key for key in found) == (known and host == "lightning")
    assert_same(found, {key: value for key, value in alone(host).items() if known or "gradient_norm" not in key})


@pytest.mark.parametrize("host", ["trainer", "accelerate", "lightning"])
@pytest.mark.parametrize("kind", ["fsdp1", "zero2", "zero3"])
def test_flat_pieces_and_engines(
    host: str, kind: str, alone: Callable[[str], dict[str, float]], tmp_path: Path
) -> None:
    """Of flat pieces no update of the table is known, of engines no weight decay; the rest is that of one process."""
    if host == "trainer" and kind == "zero2":
        pytest.skip("with a restart in the test above")
    pytest.importorskip("lightning" if host == "lightning" else "accelerate")
    if kind != "fsdp1":
        pytest.importorskip("deepspeed")
    name, found = trained(host, kind, tmp_path)
    assert name == ("FullyShardedDataParallel" if kind == "fsdp1" else "DeepSpeedEngine") or host == "trainer"
    unknown = (";of=update;" if kind == "zero2" else "of=update", *(["gradient_norm"] if host == "lightning" else []))
    wanted = {key: value for key, value in alone(host).items() if not any(part in key for part in unknown)}
    assert_same(found, wanted)


def assert_same(found: dict[str, float], wanted: dict[str, float]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        first = key.startswith("0|")  # later the training itself rounds otherwise
        tolerance = 1e-6 if first else 2e-5
        assert found[key] == pytest.approx(value, rel=tolerance, abs=tolerance, nan_ok=True), key
