"""Runs of a few updates, watched and killed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from anisoscope.training.config import TrainConfig
from anisoscope.training.corpus import prepare_corpus
from anisoscope.training.run_files import read_log

TINY: dict[str, Any] = {
    "layers": 1,
    "width": 16,
    "heads": 2,
    "context": 16,
    "batch_size": 4,
    "steps": 12,
    "lr": 3e-3,
    "limit": 0.1,
    "device": "cpu",
    "checkpoints": "0,every:5",
}


@pytest.fixture(scope="session")
def tokenised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenised") / "corpus"
    prepare_corpus("embedded", folder, limit=TINY["limit"])
    return folder


def tiny(**more: Any) -> TrainConfig:
    return TrainConfig(**TINY | more)


def losses(out: Path) -> list[float]:
    lines = read_log(out / "log.jsonl")
    assert [line["step"] for line in lines] == list(range(len(lines))), "each step once, in order"
    return [line["loss"] for line in lines]


def weights(out: Path, step: int = 12) -> dict[str, torch.Tensor]:
    return load_file(out / "checkpoints" / f"checkpoint-{step}" / "model.safetensors")


def about(out: Path) -> dict[str, Any]:
    return json.loads((out / "run.json").read_text())


class Seen:
    """A monitor that only notes what it saw, and can go back."""

    def __init__(self, trouble: Callable[[int], None] | None = None) -> None:
        self.steps: list[int] = []
        self.numbers: dict[int, dict[str, float]] = {}
        self.trouble = trouble

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        self.steps.append(step)
        if self.trouble is not None:
            self.trouble(step)
        yield

    def log(self, step: int, **numbers: float) -> None:
        assert step not in self.numbers, "each step is logged once"
        self.numbers[step] = numbers
