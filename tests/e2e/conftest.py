"""The command line called in this process, and a shelf of small things to point it at."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import shutil
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

GPT = "gpt2:n_layer=2,n_embd=32,n_head=2,vocab_size=300"
SMALL = ("--tokens", "600", "--context", "32")


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def notes(self) -> str:
        """What was said on standard error, without line breaks."""
        return " ".join(self.err.split())

    @property
    def sentence(self) -> str:
        """The one line that says what went wrong."""
        found = [line for line in self.err.splitlines() if line.startswith("anisoscope: ")]
        assert len(found) == 1, self.err
        return found[0].removeprefix("anisoscope: ")


def _last_of_each(words: list[str]) -> list[str]:
    """The words with the last of each option alone: tests say after the settings they share what is different."""
    kept: list[str] = []
    for at, word in enumerate(words):
        repeated = word.startswith("--") and word in words[at + 1 :]
        after = at and words[at - 1].startswith("--") and words[at - 1] in words[at:] and not word.startswith("--")
        kept += [] if repeated or after else [word]
    return kept


def execute(*words: object) -> Outcome:
    """One command, in this process."""
    from anisoscope import cli

    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["anisoscope", *_last_of_each([str(word) for word in words])])
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                cli.main()
        except SystemExit as end:
            code = end.code
    return Outcome(int(code or 0), out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def command() -> Callable[..., Outcome]:
    return execute


@pytest.fixture(scope="session")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Profile into a new folder, a model with small settings; the run folder, after a check that it went well."""
    from anisoscope.results.folder import RunFolder

    def run(*words: object, model: str | Path = GPT, fresh: bool = True) -> RunFolder:
        folder = tmp_path_factory.mktemp("run") / "out"
        first = ("--random-init",) if fresh else ()
        tables = not {"unembed,embed_weight", "unembed", "embed_weight"}.isdisjoint(
            words
        )  # neither these nor a file of rows read any data
        small = () if tables or str(model).endswith(".npy") else SMALL
        done = execute("profile", *first, model, *small, *words, "--out", folder)
        assert done.code == 0, done.err
        return RunFolder.open(folder)

    return run


@pytest.fixture(scope="session")
def plain(profiled: Callable[..., Any]) -> Any:
    """One ordinary run, for tests that only read."""
    return profiled()


SENTENCE = "The quick brown fox number {} jumps over the lazy dog and then sleeps in the sun for a while. "
TEXT = "".join(SENTENCE.format(i) for i in range(40))
RECORDS = [{"text": SENTENCE.format(i) * 2, "body": f"body {i} " * 9, "language": ("en", "fr")[i % 2], "id": str(i)}
           for i in range(48)]  # fmt: skip


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, rows and models, good and bad."""
    folder = tmp_path_factory.mktemp("shelf")
    _texts(folder)
    _rows(folder)
    _models(folder)
    return folder


def _texts(folder: Path) -> None:
    (folder / "plain.txt").write_text(TEXT)
    with gzip.open(folder / "packed.txt.gz", "wt") as file:
        file.write(TEXT)
    (folder / "texts").mkdir()
    with zipfile.ZipFile(folder / "packed.zip", "w") as archive:
        for name in ("a.txt", "b.txt"):
            archive.writestr(name, TEXT)
            (folder / "texts" / name).write_text(TEXT)
    _records(folder)
    (folder / "empty.txt").write_text("")
    (folder / "white.txt").write_text(" \n\t" * 50)
    (folder / "latin1.txt").write_bytes("élève à Noël ".encode("latin-1") * 20)
    (folder / "nothing").mkdir()


def _records(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    pq.write_table(pa.Table.from_pylist(RECORDS), folder / "records.parquet")
    with (folder / "records.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(RECORDS[0]))
        writer.writeheader()
        writer.writerows(RECORDS)


def _rows(folder: Path) -> None:
    from safetensors.torch import save_file

    random = np.random.default_rng(0)
    arrays = {
        "rows": random.normal(size=(500, 16)),
        "flat": np.zeros(10),
        "cube": np.zeros((2, 3, 4)),
        "whole": np.arange(20).reshape(4, 5),
        "none": np.zeros((0, 5)),
        "holes": np.full((60, 5), np.nan),
        "single": random.normal(size=(1, 5)),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    np.save(folder / "objects.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    (folder / "short.npy").write_bytes((folder / "rows.npy").read_bytes()[:500])
    save_file({"early": torch.randn(200, 8), "late": torch.randn(300, 12)}, folder / "several.safetensors")
    save_file({"ids": torch.arange(4)}, folder / "ids.safetensors")
    (folder / "broken.safetensors").write_bytes(b"no such thing" * 9)


def _models(folder: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    from anisoscope.data.tokens import make_vocabulary, save_tokenizer

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=300, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(folder / "model")
    save_tokenizer(make_vocabulary("char", [bytes(range(256))]), folder / "model")
    for name in ("nan-early", "nan-late", "cut", "unreadable", "weightless"):
        shutil.copytree(folder / "model", folder / name)
    for name, part in (("nan-early", "wte.weight"), ("nan-late", "h.1.mlp.c_proj.weight")):
        path = folder / name / "model.safetensors"
        weights = load_file(path)
        weights[next(key for key in weights if key.endswith(part))].fill_(float("nan"))
        save_file(weights, path, metadata={"format": "pt"})
    with (folder / "cut" / "model.safetensors").open("r+b") as file:
        file.truncate(3000)
    (folder / "unreadable" / "config.json").write_text("{")
    (folder / "weightless" / "model.safetensors").unlink()
