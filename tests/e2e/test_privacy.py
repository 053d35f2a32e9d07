"""Nothing of a user's machine in what may be shared: every file of a run names files, never where they lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from anisoscope.data.tokens import make_vocabulary, save_tokenizer
from anisoscope.results.privacy import placeless
from support.tiny_series import gpt

Command = Callable[..., Any]
LOOK = ("--tokens", "640", "--context", "16")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a series and a text in a folder whose path is nobody's business."""
    folder = tmp_path_factory.mktemp("private")
    words = make_vocabulary("char", [bytes(range(253))])
    for step in (0, 10, 20):
        model = gpt(vocab_size=300)
        with torch.no_grad():
            for number, p in enumerate(model.parameters()):
                p.add_(step * 1e-3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number)))
        model.save_pretrained(folder / "series" / f"checkpoint-{step}")
        save_tokenizer(words, folder / "series" / f"checkpoint-{step}")
    (folder / "text").mkdir()
    for i in range(24):
        lines = [f"word {(i * 37 + j * j) % 211} and the number {j} of document {i}" for j in range(60)]
        (folder / "text" / f"doc {i}.txt").write_text("\n".join(lines))
    np.save(folder / "rows.npy", np.random.default_rng(0).standard_normal((120, 8)))
    return folder


def content(path: Path) -> str:
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        return f"{table.to_pydict()} {table.schema.metadata}"
    if path.name == "run.json":
        about = json.loads(path.read_text())
        about.pop("command", None)
        return json.dumps(about)
    return path.read_bytes().decode("latin-1")


def leaks(run: Path, place: Path) -> list[str]:
    return [str(p.relative_to(run)) for p in run.rglob("*") if p.is_file() and str(place) in content(p)]


COMMANDS = {
    "profile": ("profile", "P/series/checkpoint-10", "--data", "P/text", "--group-by", "file", *LOOK),
    "rows": ("profile", "P/rows.npy"),
    "tangent": ("tangent", "P/series/checkpoint-10", "--data", "P/text", "--preset", "light", "--draws", "19", *LOOK),
    "sweep": ("sweep", "P/series", "--data", "P/text", "--metrics", "average_cosine", *LOOK),
    "train": ("train", "--data", "P/text", "--steps", "3", "--layers", "1", "--width", "16", "--heads", "2",
              "--context", "16", "--contexts", "32", "--monitor", "light"),
    "curvature": ("study", "curvature", "--model", "P/series/checkpoint-10", "--data", "P/text", "--manifolds",
                  "sphere"),
}  # fmt: skip
FIVE = [name for name in COMMANDS if name != "curvature"]


@pytest.mark.parametrize("name", [*FIVE, pytest.param("curvature", marks=pytest.mark.slow)])
def test_no_file_of_a_run_says_where_the_user_keeps_their_files(command: Command, place: Path, name: str) -> None:
    out = place / f"out-{name}"
    done = command(*(word.replace("P/", f"{place}/") for word in COMMANDS[name]), "--out", out)
    assert done.code == 0, done.err
    assert leaks(out, place) == []
    about = json.loads((out / "run.json").read_text())
    assert any(str(place) in str(word) for word in about["command"]), "the command is as typed"
    shared = place / f"given-{name}"
    assert command("report", out, "--share", "--out", shared).code == 0
    assert leaks(shared, place) == [] and str(place) not in (shared / "run.json").read_text()
    assert (shared / "report.html").is_file() and not (shared / "arrays").exists()
    resumed = command(*(word.replace("P/", f"{place}/") for word in COMMANDS[name]), "--out", out, "--resume")
    assert resumed.code == 0, "the same places are known again"


def test_another_place_of_the_same_name_is_not_resumed(command: Command, place: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert command("profile", place / "rows.npy", "--out", out).code == 0
    np.save(tmp_path / "rows.npy", np.zeros((3, 2)))
    done = command("profile", tmp_path / "rows.npy", "--out", out, "--resume")
    assert done.code == 2 and "--resume found a run with models" in done.sentence


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("/home/ada/a b/c.txt", "c.txt"),
        ("checkpoint-3: '/home/ada/x y/m' is cut off; copy it again", "checkpoint-3: 'm' is cut off; copy it again"),
        ("r/d by chance, and/or org/name", "r/d by chance, and/or org/name"),
        ("merged:/data/c4,/data/wiki", "merged:c4,wiki"),
        ("see https://arxiv.org/abs/1909.00512", "see https://arxiv.org/abs/1909.00512"),
    ],
)
def test_only_absolute_paths_are_shortened(text: str, kept: str) -> None:
    assert placeless(text) == kept
