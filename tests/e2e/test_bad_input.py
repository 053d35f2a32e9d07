"""Bad input: one clear sentence, a non-zero exit, no traceback, nothing lost."""

from __future__ import annotations

import errno
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from anisoscope.results.folder import RunFolder

GPT = "gpt2:n_layer=2,n_embd=32,n_head=2,vocab_size=300"
SMALL = ("--tokens", "600", "--context", "32")
Command = Callable[..., Any]

# what is typed after `profile --random-init GPT --tokens 600 --context 32` -> words of the sentence
OPTIONS = {
    "--metrics two_n": "did you mean 'two_nn'",
    "--metrics two_nn:metod=ml": "did you mean 'method'",
    "--metrics two_nn:method=mll": "did you mean 'ml'",
    "--metrics two_nn:keep=x": "two_nn:keep is 'x'",
    "--metrics svd_ratio:centred=perhaps": "expected a bool",
    "--metrics iso_score_star:zeta=3": "zeta",
    "--metrics ,": "--metrics is empty",
    "--sites residual": "did you mean 'resid'",
    "--sites rows": "has no site 'rows'",
    "--sites scores --metrics two_nn": "none of the metrics asked for (two_nn)",
    "--modules transformer.k.0": "did you mean 'transformer.h.0'",
    "--pool max": "did you mean 'mean'",
    "--dtype float31": "did you mean 'float32'",
    "--device gpu": "did you mean 'cpu'",
    "--layers 7": "its layers are 0 to 2",
    "--layers 2-1": "runs backwards",
    "--layers two": "expected numbers such as 0,3,5-8",
    "--layers 0 --sites attn_out": "no site of kind attn_out at layers [0]",
    "--context 0": "context is 0",
    "--context -3": "context is -3",
    "--context 100000": "more than gpt2 takes (1024)",
    "--tokens 0": "tokens is 0",
    "--tokens many": "--tokens",
    "--batch-size 0": "batch_size is 0",
    "--memory 0": "memory_mb is 0",
    "--seed -1": "seed is -1",
    "--seed 99999999999999999999": "expected less than 2**63",
    "--sample-size 3": "sample_size is 3",
    "--attention-rows -1": "attention_rows is -1",
    "--tokenizer ./nowhere": "no file or folder",
    "--group-by language": "the embedded corpus has no field 'language'",
    "--device-map auto": "do not go together",
    "--metric two_nn": "No such option: --metric",
}

# --data -> words of the sentence
DATA = {
    "missing.txt": "there is no file or folder",
    "plane.txt": "did you mean",
    "empty.txt": "holds no text",
    "white.txt": "holds no text",
    "latin1.txt": "not UTF-8",
    "nothing": "no files",
    "records.jsonl --text-field txt": "its fields are: body, id, language, text",
    "records.jsonl --group-by lang": "its fields are: body, id, language, text",
    "plain.txt --group-by language": "plain text without fields",
    "records.jsonl --group-by id --tokens 9000": "more than 32 groups",
}

# MODEL -> words of the sentence
MODELS = {
    "mode": "did you mean",
    "nowhere/model": "there is no file or folder",
    "nothing": "is not a model: it holds nothing",
    "texts": "is not a model: it holds a.txt, b.txt",
    "plain.txt": "which is no model",
    "cut": "could not be loaded",
    "unreadable": "is not JSON",
    "weightless": "no weights",
    "flat.npy": "has 1 dimensions",
    "cube.npy": "has 3 dimensions",
    "whole.npy": "holds int64",
    "none.npy": "is empty",
    "objects.npy": "pickled objects",
    "short.npy": "cannot be read",
    "ids.safetensors": "holds no rows",
    "broken.safetensors": "is not a safetensors file",
    "rows.npy --metrics attention_entropy": "none of the metrics asked for",
}


def refused(done: Any, words: str, code: int = 2) -> None:
    assert done.code == code, done.err
    assert words in done.sentence
    assert "Traceback" not in done.err
    assert done.sentence.count("\n") == 0


@pytest.mark.parametrize("line", OPTIONS)
def test_a_bad_option_is_told_in_one_sentence(command: Command, tmp_path: Path, line: str) -> None:
    done = command("profile", "--random-init", GPT, *SMALL, *line.split(), "--out", tmp_path / "run")
    refused(done, OPTIONS[line])
    assert not (tmp_path / "run" / "table.parquet").exists()


@pytest.mark.parametrize("line", DATA)
def test_bad_text_is_told_in_one_sentence(command: Command, tmp_path: Path, shelf: Path, line: str) -> None:
    name, *more = line.split()
    done = command("profile", "--random-init", GPT, *SMALL, "--data", shelf / name, *more, "--out", tmp_path / "run")
    refused(done, DATA[line])


@pytest.mark.parametrize("line", MODELS)
def test_a_bad_model_is_told_in_one_sentence(command: Command, tmp_path: Path, shelf: Path, line: str) -> None:
    name, *more = line.split()
    refused(command("profile", shelf / name, *more, "--out", tmp_path / "run"), MODELS[line])


def test_a_model_of_which_nothing_is_measured_ends_with_the_reason(
    command: Command, tmp_path: Path, shelf: Path
) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(shelf / "model", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    save_file({name: value * torch.nan for name, value in load_file(path).items()}, path, metadata={"format": "pt"})
    words = ("--tokens", 256, "--context", 16, "--draws", 19, "--preset", "light", "--out", tmp_path / "run")
    refused(command("tangent", tmp_path / "model", *words), "nothing could be computed: non-finite weights", code=3)


def test_options_without_use_are_refused_where_all_is_rows_and_after_bad_files(
    command: Command, tmp_path: Path, shelf: Path
) -> None:
    out = ("--out", tmp_path / "run")
    refused(command("profile", shelf / "rows.npy", *SMALL, *out), "--tokens does nothing for a file of rows")
    refused(command("profile", shelf / "rows.npy", shelf / "flat.npy", *SMALL, *out), "has 1 dimensions")
    refused(command("profile", shelf / "broken.safetensors", *SMALL, *out), "is not a safetensors file")
    done = command("profile", shelf / "rows.npy", shelf / "model", *SMALL, "--metrics", "drift", *out)
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["prfile", "x"], "Did you mean 'profile'"),
        (["profile"], "MODEL"),
        (["profile", "org/some-model"], "the hub cannot be reached"),
        (["profile", "gpt2"], "add --random-init"),
        (["profile", "--random-init", "gpt3"], "similar name"),
        (["profile", "--random-init", "gpt2:n_layers=2"], "did you mean 'n_layer'"),
        (["profile", "--random-init", "gpt2:n_embd=33,n_head=2"], "divisible"),
        (["profile", "a b"], "is no model"),
        (["list", "metric"], "did you mean 'metrics'"),
        (["show", "nowhere"], "does not exist"),
        (["report", "nowhere"], "does not exist"),
        (["compare", "nowhere"], "does not exist"),
        (["selftest", "--device", "gpu"], "did you mean 'cpu'"),
    ],
)
def test_a_bad_command_is_told_in_one_sentence(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused(command(*words), sentence)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_device_that_is_not_there_is_refused(command: Command, tmp_path: Path) -> None:
    done = command("profile", "--random-init", GPT, *SMALL, "--device", "cuda", "--out", tmp_path / "run")
    refused(done, "not available here")


def test_sizes_that_do_not_fit_together_are_blamed_on_the_model(command: Command, tmp_path: Path) -> None:
    sizes = "hidden_size=32,num_hidden_layers=1,num_attention_heads=4,num_key_value_heads=3,intermediate_size=32"
    done = command("profile", "--random-init", f"llama:{sizes},vocab_size=300", *SMALL, "--out", tmp_path / "run")
    refused(done, "fails on its first tokens")


# --- what could be had is kept ---------------------------------------------------------------------------------------


def test_too_few_rows_for_one_metric_leave_the_others(command: Command, tmp_path: Path) -> None:
    words = ("profile", "--random-init", GPT, "--tokens", 64, "--context", 16, "--pool", "mean")
    done = command(*words, "--out", tmp_path / "run")
    refused(done, "two_nn could not be computed at any site", code=3)
    run = RunFolder.open(tmp_path / "run")
    assert run.about()["status"] == "complete"
    assert (run.path / "report.html").is_file()
    assert run.table().value(layer=1, kind="resid", metric="drift", variant="") > 0


def test_nan_weights_are_named_and_never_give_a_number(command: Command, tmp_path: Path, shelf: Path) -> None:
    refused(command("profile", shelf / "nan-late", *SMALL, "--out", tmp_path / "late"), "2.resid", code=3)
    table = RunFolder.open(tmp_path / "late").table()
    assert not len(table.where(layer=2, kind=["resid", "final"]).finite())
    assert len(table.where(layer=1, kind="resid").finite())  # what is sound is there
    assert all(row["dropped"] for row in table.where(layer=2, kind="resid").records())
    refused(command("profile", shelf / "nan-early", *SMALL, "--out", tmp_path / "early"), "no finite row", code=3)
    assert not len(RunFolder.open(tmp_path / "early").table().where(kind=["embed", "resid"]).finite())


def test_a_tokenizer_without_a_pad_token_works(command: Command, tmp_path: Path, shelf: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(shelf / "model", tmp_path / "model")
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "the": 1, "fox": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(tmp_path / "model")
    done = command("profile", tmp_path / "model", *SMALL, "--data", shelf / "records.jsonl", "--out", tmp_path / "run")
    assert done.code == 0, done.err
    assert "no pad token" in done.notes
    run = RunFolder.open(tmp_path / "run")
    rows = run.table().where(kind="embed", metric="drift", variant="").records()
    assert rows[0]["n"] == run.about()["data"]["tokens"]  # padding was there, and was not counted
    assert run.about()["models"][0]["dropped"]["padding"] > 0


def test_the_first_model_survives_the_failure_of_the_second(command: Command, tmp_path: Path, shelf: Path) -> None:
    words = ("profile", shelf / "model", shelf / "cut", *SMALL, "--out", tmp_path / "run")
    refused(command(*words), "could not be loaded")
    run = RunFolder.open(tmp_path / "run")
    assert run.about()["status"] == "failed"
    assert "could not be loaded" in run.about()["error"]
    assert len(run.table().finite())
    assert (run.path / "report.html").is_file()
    shown = command("show", run.path, "--format", "json")
    assert shown.code == 0
    assert len(json.loads(shown.out)) == len(run.table())
    assert "this run is failed" in shown.notes
    refused(command("profile", shelf / "model", *SMALL, "--out", run.path), "holds a run (failed)")
    assert len(run.table().finite())


def test_a_misspelt_second_model_is_known_before_the_first_is_measured(
    command: Command, tmp_path: Path, shelf: Path
) -> None:
    done = command("profile", shelf / "model", shelf / "modle", *SMALL, "--out", tmp_path / "run")
    refused(done, "did you mean")
    assert not list((tmp_path / "run").iterdir())


def test_a_run_that_came_to_nothing_does_not_block_its_folder(command: Command, tmp_path: Path, shelf: Path) -> None:
    out = ("--out", tmp_path / "run", "--metrics", "drift")
    refused(command("profile", shelf / "cut", *SMALL, *out), "could not be loaded")
    assert RunFolder.open(tmp_path / "run").about()["status"] == "failed"
    assert command("profile", shelf / "model", *SMALL, *out).code == 0


def test_out_never_overwrites_what_is_not_a_run(command: Command, tmp_path: Path, plain: RunFolder) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("mine")
    words = ("profile", "--random-init", GPT, *SMALL, "--out")
    refused(command(*words, tmp_path / "file"), "is a file")
    refused(command(*words, tmp_path / "folder"), "holds other files (thesis.tex)")
    refused(command(*words, tmp_path / "file" / "below"), "cannot be made")
    refused(command("report", plain.path, "--out", tmp_path / "file"), "is a file")
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "thesis.tex").read_text() == "mine"


# --- runs that are damaged -------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(plain: RunFolder, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain.path, tmp_path / "run"))


def test_a_damaged_run_is_told_in_one_sentence(command: Command, damaged: Path, tmp_path: Path) -> None:
    assert command("show", damaged, "--metric", "drift").code == 0
    (damaged / "table.parquet").write_bytes(b"PAR1 but not for long")
    refused(command("show", damaged), "is not a readable table")
    refused(command("report", damaged), "is not a readable table")
    (damaged / "table.parquet").unlink()
    refused(command("show", damaged), "has no table yet")
    (damaged / "run.json").write_text("{")
    refused(command("compare", damaged), "is not readable JSON")
    (damaged / "run.json").write_text("[]")
    refused(command("compare", damaged), "no record of a run")
    (damaged / "run.json").unlink()
    refused(command("show", damaged), "holds no run.json")
    (tmp_path / "file").write_text("x")
    refused(command("show", tmp_path / "file"), "holds no run.json")


def test_a_bad_choice_of_what_to_show_is_told_in_one_sentence(command: Command, plain: RunFolder) -> None:
    refused(command("show", plain.path, "--format", "xml"), "unknown format 'xml'")
    refused(command("show", plain.path, "--metric", "drif"), "did you mean 'drift'")
    refused(command("show", plain.path, "--kind", "residual"), "did you mean 'resid'")
    refused(command("compare", plain.path), "holds 1 model;")
    refused(command("compare", f"{plain.path}#bert", plain.path), "name one as")
    refused(command("compare", plain.path, plain.path, "--metric", "drif"), "did you mean 'drift'")
    refused(command("compare", plain.path, plain.path, "--format", "xml"), "unknown format 'xml'")


def test_a_damaged_save_is_told_in_one_sentence(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anisoscope.capture.capture import Capture

    real = Capture.run

    def run(self: Any, batch: Any) -> None:
        signal.raise_signal(signal.SIGINT)  # Ctrl-C in the first batch
        real(self, batch)

    words = ("profile", "--random-init", GPT, *SMALL, "--batch-size", "4", "--out", tmp_path / "run")
    monkeypatch.setattr(Capture, "run", run)
    assert command(*words).code == 130
    monkeypatch.undo()
    (save,) = (tmp_path / "run" / "partial").iterdir()
    save.write_bytes(save.read_bytes()[:100])
    refused(command(*words, "--resume"), "cannot be read")
    save.unlink()
    assert command(*words, "--resume").code == 0


# --- failures of the machine -----------------------------------------------------------------------------------------


def test_a_full_disk_is_told_in_one_sentence_and_the_first_model_is_kept(
    command: Command, tmp_path: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RunFolder.write_arrays

    def write(self: RunFolder, name: str, arrays: Any) -> None:
        if name.startswith("1-"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, name, arrays)

    monkeypatch.setattr(RunFolder, "write_arrays", write)
    words = ("profile", shelf / "rows.npy", shelf / "several.safetensors", "--out", tmp_path / "run")
    refused(command(*words), "No space left on device", code=1)
    run = RunFolder.open(tmp_path / "run")
    assert run.about()["status"] == "failed"
    assert {row["model"] for row in run.table().records()} == {"rows.npy"}
    assert not [path for path in run.path.rglob("*") if path.name.startswith(".")]  # no half-written file is left
    monkeypatch.undo()
    assert command(*words, "--resume").code == 0
    assert len({row["model"] for row in run.table().records()}) == 2


@pytest.mark.parametrize(
    ("words", "place", "resumes"),
    [
        (("data", "enwik8"), "anisoscope.data.enwik8.prepare_enwik8", False),
        (("study", "curvature"), "anisoscope.commands.pipeline.run_study", True),
        (("train", "--data", "enwik8"), "anisoscope.commands.pipeline.run_train", True),
        (("study", "shape"), "anisoscope.commands.pipeline.run_study", True),
    ],
)
@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (OSError(errno.ENOSPC, "No space left on device"), 1)]
)
def test_resuming_is_proposed_by_commands_that_can(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    place: str,
    resumes: bool,
    error: BaseException,
    code: int,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(place, fail)
    done = command(*words)
    refused(done, "with --resume goes on" if resumes else "nothing was written: run the same command again", code)
    assert ("--resume" in done.sentence) is resumes


@pytest.mark.parametrize(("seeds", "words"), [("a", "--seeds has 'a'"), ("-1", "from 0 on"), ("0,0", "named twice")])
def test_bad_seeds_of_revisiting_are_named(command: Command, tmp_path: Path, seeds: str, words: str) -> None:
    refused(command("study", "revisiting", "--seeds", seeds, "--out", tmp_path / "run"), words)


@pytest.mark.parametrize(("width", "words"), [(6, "such as 4 or 8."), (3, "such as 4.")])
def test_a_width_that_does_not_fit_names_its_neighbours(
    command: Command, tmp_path: Path, width: int, words: str
) -> None:
    sizes = ("--width", width, "--heads", 2, "--family", "prenorm")
    refused(command("train", *sizes, "--out", tmp_path / "run"), words)


def test_a_report_that_cannot_be_drawn_does_not_lose_the_numbers(
    command: Command, tmp_path: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("no paper")

    monkeypatch.setattr("anisoscope.commands.drawing.write_page", broken)
    refused(command("profile", shelf / "rows.npy", "--out", tmp_path / "run"), "its table is in")
    assert RunFolder.open(tmp_path / "run").about()["status"] == "complete"
    assert len(RunFolder.open(tmp_path / "run").table())
    both = ("profile", shelf / "rows.npy", shelf / "flat.npy", "--out", tmp_path / "two")
    refused(command(*both), "has 1 dimensions")  # and the reason of a failure is not hidden by another


@pytest.mark.parametrize("error", [RuntimeError("boom\nmore"), AssertionError(), IndexError("7"), ZeroDivisionError()])
def test_even_an_unforeseen_error_is_one_sentence_unless_debugging(
    command: Command, plain: RunFolder, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("anisoscope.view.console.print_run", fail)
    refused(command("show", plain.path), f"{type(error).__name__}: ", code=1)
    with pytest.raises(type(error)):
        command("--debug", "show", plain.path)


def test_an_error_before_any_work_is_one_line(command: Command) -> None:
    assert len(command("sweep", "/nope").err.splitlines()) == 1
