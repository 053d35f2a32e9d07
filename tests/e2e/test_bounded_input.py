"""Input without end or measure: one sentence, before time or memory is spent on it; rows of any kind give a page."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anisoscope.results.folder import RunFolder

GPT = "gpt2:n_layer=1,n_embd=16,n_head=2,vocab_size=300"
SMALL = ("--tokens", "300", "--context", "16")
Command = Callable[..., Any]


def refused(done: Any, words: str, code: int = 2) -> None:
    assert done.code == code, done.err
    assert words in done.sentence and "Traceback" not in done.err and "--debug" not in done.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("profile", "--random-init", GPT, "--layers", "0-999999999999"), "at most 100,000 numbers"),
        (("study", "shape", "--seeds", "0-99999999999"), "at most 100,000 numbers"),
        (("profile", "--random-init", "gpt2:n_layer=1000000000"), "n_layer is 1000000000; expected at most 10,000"),
        (("profile", "--random-init", "llama:num_hidden_layers=1000000000"), "expected at most 10,000"),
        (("profile", "--random-init", "resnet:depths=[9999,9999]"), "expected at most 10,000"),
        (("profile", "--random-init", "gpt2:vocab_size=99999999999999"), "expected at most 1,099,511,627,776"),
        (("train", "--tokens", "bpe:999999999", "--steps", "1"), "expected at most 1,000,000 entries"),
        (("train", "--tokens", f"bpe:{'9' * 5000}", "--steps", "1"), "expected at most 1,000,000 entries"),
        (("train", "--layers", "1000000000"), "layers is 1000000000; expected at most 10,000"),
        (("train", "--steps", "99999999999999999"), "expected at most 1,000,000,000"),
        (("tangent", "--random-init", GPT, "--draws", "999999999999"), "expected at most 100,000"),
        (("profile", "--random-init", GPT, "--data", ""), "the argument after '--data' is empty"),
        (("profile", "a" * 5000), "File name too long"),
        (("show", "a" * 5000), "File name too long"),
        (("profile", "--random-init", GPT, "--data", "/dev/zero"), "is a pipe or a device"),
        (("train", "--data", "/dev/zero", "--steps", "1"), "is a pipe or a device"),
        (("data", "enwik8", "/dev/zero"), "is a pipe or a device"),
        (("profile", "/dev/zero"), "is a pipe or a device"),
    ],
)
def test_sizes_beyond_measure_are_refused_before_anything_is_made(
    command: Command, tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    out = () if words[0] == "show" else ("--out", tmp_path / "run")
    done = command(*words, *out)
    refused(done, sentence, code=1 if "too long" in sentence else 2)


def test_an_argument_that_is_no_text_is_refused(command: Command, tmp_path: Path) -> None:
    name = os.fsdecode(bytes(tmp_path) + b"/\xff.npy")
    refused(command("profile", name, "--out", tmp_path / "run"), "is not UTF-8 and cannot be recorded")


def test_a_configuration_with_a_billion_blocks_is_refused(command: Command, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 10**9}))
    refused(command("profile", tmp_path / "m", "--out", tmp_path / "run"), "n_layer is 1000000000")


@pytest.mark.parametrize("name", ["pipe", "pipe.txt", "pipe.gz", "pipe.npy"])
def test_a_pipe_is_no_data_and_no_model(command: Command, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    if name.endswith(".npy"):
        refused(command("profile", tmp_path / name, "--out", tmp_path / "run"), "is a pipe or a device")
        return
    words = ("profile", "--random-init", GPT, *SMALL, "--data", tmp_path / name)
    refused(command(*words, "--out", tmp_path / "run"), "is a pipe or a device")


def test_files_that_unpack_to_far_more_than_their_size_are_refused(command: Command, tmp_path: Path) -> None:
    (tmp_path / "bomb.txt.gz").write_bytes(gzip.compress(b"a" * (100 << 20), 9))
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", b"a" * (100 << 20))
    for name in ("bomb.txt.gz", "bomb.zip"):
        words = ("train", "--data", tmp_path / name, "--steps", "1", "--monitor", "none", "--out", tmp_path / name[:6])
        refused(command(*words), "unpacks to more than 200 times its size")


def test_an_enormous_picture_is_refused_by_its_size(command: Command, tmp_path: Path) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    for side in (12_000, 60_000):
        header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        whole = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
        (tmp_path / f"{side}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + whole)
        sizes = "image_size=16,patch_size=8,hidden_size=16,num_hidden_layers=1,num_attention_heads=2"
        words = ("profile", "--random-init", f"vit:{sizes},intermediate_size=16", "--tokens", "50")
        done = command(*words, "--data", tmp_path / f"{side}.png", "--out", tmp_path / str(side))
        refused(done, "expected at most 100,000,000")


X = np.random.default_rng(0).standard_normal((120, 8))
ROWS = {
    "constant": np.ones((100, 8)),
    "zero": np.zeros((100, 8)),
    "one": X[:1],
    "huge": X * 1e300,
    "tiny": X * 1e-300,
    "mixed": np.where(np.arange(120)[:, None] % 2, X * 1e300, X * 1e-300),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_any_kind_give_a_table_and_a_page_with_reasons(command: Command, tmp_path: Path, name: str) -> None:
    np.save(tmp_path / "rows.npy", ROWS[name])
    done = command("profile", tmp_path / "rows.npy", "--out", tmp_path / "run")
    refused(done, "could not be computed at any site", code=3)
    table = RunFolder.open(tmp_path / "run").table()
    assert (tmp_path / "run" / "report.html").is_file()
    assert all(row["note"] for row in table.records() if not np.isfinite(row["value"]))
    assert not any(np.isinf(row["value"]) for row in table.records())


def test_one_row_beyond_measure_is_left_out_and_counted(command: Command, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.vstack([X, np.full((1, 8), 1e308)]))
    assert command("profile", tmp_path / "rows.npy", "--out", tmp_path / "run").code == 0
    run = RunFolder.open(tmp_path / "run")
    assert run.table().value(metric="mean_norm") < 10 and run.about()["models"][0]["dropped"]["non_finite"] == 1


class Evil:
    def __reduce__(self) -> Any:
        return os.getpid, ()


def test_pickled_code_is_refused_in_our_own_words(command: Command, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 300}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    torch.save({"x": Evil()}, tmp_path / "m" / "pytorch_model.bin")
    done = command("profile", tmp_path / "m", "--tokenizer", "bytes", *SMALL, "--out", tmp_path / "run")
    refused(done, "holds more than weights")
    assert "weights_only" not in done.err


@pytest.fixture(scope="module")
def measured(command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("measured")
    np.save(place / "rows.npy", X)
    assert command("profile", place / "rows.npy", "--out", place / "run").code == 0
    return place / "run"


RECORDS: dict[str, Any] = {"models": ["x", 5, [3], [{"name": 3}], [{"name": "a", "layers": "z"}]]}
RECORDS |= {"config": [[1]], "command": [9, [None], [["a"]]]}
RECORDS |= {"warnings": ["oops", {"a": 1}, [4]], "versions": [3], "wall_seconds": ["long"]}


@pytest.mark.parametrize(("entry", "value"), [(name, value) for name, values in RECORDS.items() for value in values])
def test_wrong_types_in_run_json_are_named(
    command: Command, tmp_path: Path, measured: Path, entry: str, value: Any
) -> None:
    shutil.copytree(measured, tmp_path / "run")
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps(about | {entry: value}))
    for verb in ("report", "claims", "show", "compare"):
        refused(command(verb, tmp_path / "run"), f"run.json' has {entry}")


def test_damaged_arrays_comparisons_and_foreign_columns_are_named(
    command: Command, tmp_path: Path, measured: Path
) -> None:
    import pyarrow.parquet as pq

    shutil.copytree(measured, tmp_path / "run")
    file = next((tmp_path / "run" / "arrays").iterdir())
    whole = file.read_bytes()
    for damaged in (b"garbage", whole[:-9]):
        file.write_bytes(damaged)
        refused(command("report", tmp_path / "run"), "/arrays' is damaged")
    file.write_bytes(whole)
    for text in ("{", "3", '{"cka": 3, "drift": 4}'):
        (tmp_path / "run" / "comparison.json").write_text(text)
        refused(command("report", tmp_path / "run"), "comparison.json' is damaged")
    (tmp_path / "run" / "comparison.json").unlink()
    path = tmp_path / "run" / "table.parquet"
    table = pq.read_table(path)
    pq.write_table(table.append_column("zebra", table["metric"]), path)
    refused(command("show", tmp_path / "run"), "it has a foreign column 'zebra'")
    pq.write_table(table.drop_columns(["metric"]), path)
    refused(command("show", tmp_path / "run"), "it has no column 'metric'")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("claims", "RUN", "--proxy", "nope"), "--proxy chooses among tangent directions, and these runs hold none"),
        (("claims", "RUN", "--fit", "frozen"), "--fit chooses among tangent directions"),
        (("show", "RUN", "--heads"), "--heads does nothing here"),
        (("show", "RUN", "--heads", "--format", "csv"), "--heads does nothing with --format csv"),
        (("profile", "ROWS", "--layers", "1"), "--layers does nothing for a file of rows"),
        (("profile", "ROWS", "--skip-first"), "--skip-first does nothing for a file of rows"),
        (("profile", "ROWS", "--tokens", "65536"), "--tokens does nothing for a file of rows"),  # its default value
        (("report", "RUN", "--share", "--out", "RUN/inside"), "is inside the run"),
        (("profile", "ROWS", "--random-init"), "--random-init does nothing for a file of rows"),
        (("sweep", "RUN", "--metrics", "drift", "--rank", "4"), "--rank does nothing without gradients"),
        (("sweep", "RUN", "--preset", "shape", "--split", "1"), "--split does nothing without gradients"),
        (("study", "curvature", "--tokenizer", "bytes"), "--tokenizer does nothing without --model"),
        (("study", "performance", "--label-field", "x"), "--label-field does nothing without --labels"),
        (("train", "--monitor", "none", "--rank", "4"), "--rank does nothing with --monitor none"),
    ],
)
def test_options_that_do_nothing_are_refused(
    command: Command, tmp_path: Path, measured: Path, words: tuple[str, ...], sentence: str
) -> None:
    known = {"RUN": measured, "ROWS": measured.parent / "rows.npy", "RUN/inside": measured / "inside"}
    out = ("--out", tmp_path / "run") if words[0] in ("profile", "sweep", "study", "train") else ()
    refused(command(*(known.get(word, word) for word in words), *out), sentence)
