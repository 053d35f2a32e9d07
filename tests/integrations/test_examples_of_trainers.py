"""The examples of other people's trainers run as they are, and several processes show what one shows."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def run(example: str, *words: str, needs: str, processes: int = 0) -> list[tuple[str, float]]:
    """The steps and energies that an example prints; with `processes` it is started by torchrun."""
    pytest.importorskip(needs)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", port]
    command = [sys.executable, *(launch if processes else []), str(ROOT / "examples" / example), *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "MASTER_PORT": port}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"^(.*step +\d+):.*tangent energy (\d\.\d+)", done.stdout, re.MULTILINE)
    assert found and len(set(found)) == len(found), "one process prints"
    return [(step, float(value)) for step, value in found]


def test_a_trainer_of_transformers() -> None:
    alone = run("monitor_hf_trainer.py", needs="accelerate")
    assert [step for step, _ in alone] == ["step  0", "step  8", "step 16", "step 24", "step 32"]
    assert_close(run("monitor_hf_trainer.py", needs="accelerate", processes=2), alone)


def test_a_loop_of_accelerate() -> None:
    alone = run("trainers/monitor_accelerate.py", needs="accelerate")
    assert alone[-1][1] > 2 * alone[0][1], "it learns"
    assert_close(run("trainers/monitor_accelerate.py", needs="accelerate", processes=2), alone)


@pytest.mark.parametrize("kind", ["ddp", "sharded"])
def test_a_trainer_of_lightning(kind: str) -> None:
    """Lightning deals the contexts in another order to two processes, so that only the first step can be the same."""
    alone, several = (
        run("trainers/monitor_lightning.py", needs="lightning"),
        run("trainers/monitor_lightning.py", kind, needs="lightning"),
    )
    assert [step for step, _ in several] == [step for step, _ in alone]
    assert several[-1][1] > 2 * several[0][1], "it learns"


@pytest.mark.parametrize(
    ("processes", "words"),
    [(2, []), (2, ["--tensor", "2"]), (4, ["--tensor", "2"]), (2, ["--compile", "aot_eager"])],
    ids=["sharded", "split", "both", "compiled"],
)
def test_a_loop_on_a_device_mesh(processes: int, words: list[str]) -> None:
    assert_close(
        run("trainers/monitor_device_mesh.py", *words, needs="transformers", processes=processes),
        run("trainers/monitor_device_mesh.py", needs="transformers"),
    )


def test_post_training() -> None:
    pytest.importorskip("peft")
    found = run("trainers/post_training.py", needs="trl")
    assert [step for step, _ in found] == [f"{stage} step {i:2d}" for stage in ("sft", "dpo") for i in (0, 8, 16)]


def assert_close(found: list[tuple[str, float]], wanted: list[tuple[str, float]]) -> None:
    assert [step for step, _ in found] == [step for step, _ in wanted]
    assert [value for _, value in found] == pytest.approx([value for _, value in wanted], abs=0.011)
