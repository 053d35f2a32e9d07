"""Every option of the command line does what it says, on models small enough to run in a moment."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from anisoscope.runs.store import RunFolder
from anisoscope.runs.table import Table

GPT = "gpt2:n_layer=2,n_embd=32,n_head=2,vocab_size=300"
SIZES = "num_hidden_layers=3,hidden_size=32,num_attention_heads=2,intermediate_size=48,vocab_size=300"
ALBERT = f"albert:{SIZES},embedding_size=16"
T5 = "t5:d_model=32,d_kv=8,d_ff=48,num_layers=2,num_decoder_layers=3,num_heads=4,vocab_size=300"
CANINE = "canine:hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=48"
Profiled = Callable[..., RunFolder]
Command = Callable[..., Any]


def values(table: Table, **columns: Any) -> dict[tuple[Any, ...], float]:
    """Values by everything that tells rows apart."""
    names = ("model", "stack", "layer", "kind", "head", "group", "metric", "variant")
    return {tuple(row[n] for n in names): row["value"] for row in table.where(**columns).records()}


# A LayerNorm makes one singular value zero; its square is rounding noise of 1e-16 λ₁, itself therefore of 1e-8 σ₁.
SUMS_OF_SIGMA = {"svd_ratio", "effective_rank"}


def same(one: Table, two: Table, tolerance: float) -> None:
    mine, theirs = values(one), values(two)
    assert mine.keys() == theirs.keys()
    assert mine
    for key, value in mine.items():
        near = 1e-7 if tolerance and SUMS_OF_SIGMA & set(key) else tolerance
        assert value == pytest.approx(theirs[key], rel=near, abs=near, nan_ok=True), key


def saved(run: RunFolder, site: str, part: str = "rows") -> np.ndarray:
    (folder,) = (run.path / "rows").iterdir()
    return load_file(folder / f"{site}.safetensors")[part].double().numpy()


# --- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["plain.txt", "packed.txt.gz", "packed.zip", "texts", "records.jsonl", "records.parquet", "records.csv"],
)
def test_text_is_read_from_every_kind_of_file(profiled: Profiled, shelf: Path, name: str) -> None:
    run = profiled("--data", shelf / name, "--metrics", "average_cosine", "--sites", "resid")
    assert run.about()["data"]["tokens"] >= 600
    assert run.table().value(layer=1, metric="average_cosine") < 1


def test_the_packing_of_a_text_does_not_change_its_numbers(profiled: Profiled, shelf: Path) -> None:
    few = ("--metrics", "average_cosine,drift", "--sites", "resid")
    one, two = (profiled("--data", shelf / name, *few) for name in ("plain.txt", "packed.txt.gz"))
    assert one.about()["data"]["fingerprint"] == two.about()["data"]["fingerprint"]
    same(one.table(), two.table(), 0.0)
    other = profiled("--data", shelf / "records.jsonl", *few)
    assert other.about()["data"]["fingerprint"] != one.about()["data"]["fingerprint"]


@pytest.mark.parametrize("name", ["records.jsonl", "records.parquet", "records.csv"])
def test_a_field_is_read_and_another_makes_groups(profiled: Profiled, shelf: Path, name: str) -> None:
    options = ("--data", shelf / name, "--text-field", "body", "--group-by", "language")
    table = profiled(*options, "--metrics", "drift", "--sites", "resid").table()
    counts = {row["group"]: row["n"] for row in table.where(layer=1, metric="drift").records()}
    assert set(counts) == {"", "en", "fr"}
    assert counts[""] == counts["en"] + counts["fr"]


def test_files_of_a_folder_are_groups_of_their_own(profiled: Profiled, shelf: Path) -> None:
    table = profiled("--data", shelf / "texts", "--group-by", "file", "--tokens", 8000, "--sites", "resid").table()
    assert {row["group"] for row in table.records()} == {"", "a.txt", "b.txt"}


# --- which rows ------------------------------------------------------------------------------------------------------


def test_pooled_rows_are_one_for_each_context(profiled: Profiled) -> None:
    few = ("--save-rows", "--sites", "resid", "--layers", "2", "--metrics", "drift")
    tokens = profiled(*few)
    rows, context = saved(tokens, "2.resid"), saved(tokens, "2.resid", "context")
    names = list(dict.fromkeys(context.tolist()))
    pieces = [rows[context == name] for name in names]
    for how, expected in (
        ("mean", [piece.mean(0) for piece in pieces]),
        ("cls", [piece[0] for piece in pieces]),
        ("last", [piece[-1] for piece in pieces]),
    ):
        run = profiled("--pool", how, *few)
        mine = dict(zip(saved(run, "2.resid", "context").tolist(), saved(run, "2.resid"), strict=True))
        assert len(mine) == len(names)
        np.testing.assert_allclose([mine[name] for name in names], expected, rtol=1e-5, atol=1e-6)
        assert run.table().where(metric="drift").records()[0]["n"] == len(names)


def test_the_first_position_is_left_out_only_when_asked(profiled: Profiled) -> None:
    few = ("--metrics", "drift", "--sites", "resid", "--layers", "1")
    whole, rest = (profiled(*few, *more).table().where(variant="").records()[0] for more in ((), ("--skip-first",)))
    assert rest["n"] == whole["n"] - whole["contexts"]


def test_special_tokens_are_left_out_only_when_asked(profiled: Profiled) -> None:
    few = ("--metrics", "drift", "--sites", "resid", "--layers", "1")
    whole, rest = (
        profiled(*few, *more, model=CANINE).table().where(variant="").records()[0] for more in ((), ("--skip-special",))
    )
    assert rest["n"] == whole["n"] - 2 * whole["contexts"]  # [CLS] and [SEP]


def test_tokens_and_context_bound_what_is_read(profiled: Profiled) -> None:
    about = profiled("--tokens", 200, "--context", 20, "--sites", "resid").about()["data"]
    assert about["context_length"] == 20
    assert 200 <= about["tokens"] < 220
    assert about["contexts"] == 10


# --- where -----------------------------------------------------------------------------------------------------------

KINDS = ["embed", "resid", "final", "attn_in", "attn_out", "mlp_in", "mlp_out", "query", "key", "scores"]


def test_each_kind_of_site_can_be_asked_for(profiled: Profiled) -> None:
    for kind in [*KINDS, "unembed", "embed_weight"]:
        records = profiled("--sites", kind).table().records()
        # queries bring the keys that some of their metrics read
        assert {row["kind"] for row in records} == ({"query", "key"} if kind == "query" else {kind})
        assert any(math.isfinite(row["value"]) for row in records), kind


def test_weight_tables_are_rows_of_the_vocabulary(profiled: Profiled) -> None:
    records = profiled("--sites", "unembed,embed_weight", "--metrics", "drift").table().records()
    assert {(row["kind"], row["layer"], row["n"]) for row in records} == {("unembed", 2, 300), ("embed_weight", 0, 300)}


def test_only_the_layers_asked_for_are_measured(profiled: Profiled, plain: RunFolder) -> None:
    assert {row["layer"] for row in plain.table().records()} == {0, 1, 2}
    assert {row["layer"] for row in profiled("--layers", "0,2-2").table().records()} == {0, 2}


def test_modules_are_looked_at_by_name(profiled: Profiled) -> None:
    records = profiled("--modules", "transformer.h.0.mlp,transformer.ln_f", "--metrics", "drift").table().records()
    assert {row["kind"] for row in records} == {"transformer.h.0.mlp", "transformer.ln_f"}


def test_queries_without_keys_can_be_asked_for(profiled: Profiled) -> None:
    table = profiled("--sites", "query", "--metrics", "qk_cosine").table()
    assert {row["kind"] for row in table.records()} == {"query"}
    assert all(math.isfinite(row["value"]) for row in table.records())


# --- what ------------------------------------------------------------------------------------------------------------


def test_options_of_a_metric_become_its_variant(profiled: Profiled) -> None:
    words = "svd_ratio,svd_ratio:centred=0,two_nn:method=ml:keep=0.8"
    table = profiled("--metrics", words, "--sites", "resid").table()
    found = {(row["metric"], row["variant"]) for row in table.records()}
    assert found == {("svd_ratio", ""), ("svd_ratio", "centred=0"), ("two_nn", "keep=0.8;method=ml")}


def test_all_metrics_are_measured_and_each_once(profiled: Profiled) -> None:
    from anisoscope.metrics.metric import registry

    table = profiled("--metrics", "all,two_nn,two_nn", "--sites", "resid,query,key,scores,unembed").table()
    assert set(table.metrics()) == set(registry())
    assert len(values(table)) == len(table)  # nothing twice


def test_the_table_agrees_with_brute_force_on_the_saved_rows(profiled: Profiled) -> None:
    metrics = "average_cosine,svd_ratio,svd_ratio_squared,participation_ratio,iso_score,drift,mean_norm"
    run = profiled("--save-rows", "--metrics", metrics, "--sites", "embed,resid,mlp_out")
    table = run.table()
    for site in ("0.embed", "1.resid", "2.resid", "2.mlp_out"):
        layer, kind = site.split(".")
        for name, expected in brute(saved(run, site)).items():
            found = table.value(layer=int(layer), kind=kind, metric=name, variant="")
            assert found == pytest.approx(expected, rel=1e-6), (site, name)


def brute(x: np.ndarray) -> dict[str, float]:
    """The plain definitions, in float64."""
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    cosines = unit @ unit.T
    sigma = np.linalg.svd(x - x.mean(0), compute_uv=False)
    ratio = (sigma**2).sum() ** 2 / (sigma**4).sum()
    return {
        "average_cosine": float(cosines[~np.eye(len(x), dtype=bool)].mean()),
        "svd_ratio": float(sigma[0] / sigma.sum()),
        "svd_ratio_squared": float(sigma[0] ** 2 / (sigma**2).sum()),
        "participation_ratio": float(ratio),
        "iso_score": float((ratio - 1) / (x.shape[1] - 1)),
        "drift": float(np.linalg.norm(x.mean(0))),
        "mean_norm": float(np.linalg.norm(x, axis=1).mean()),
    }


# --- how -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-4), ("bfloat16", 0.1), ("float16", 0.02)])
def test_a_model_runs_in_the_precision_asked_for(
    profiled: Profiled, plain: RunFolder, dtype: str, tolerance: float
) -> None:
    run = profiled("--dtype", dtype)
    assert run.about()["models"][0]["dtype"] == dtype
    want = {"layer": 2, "kind": "resid", "metric": "participation_ratio", "variant": ""}
    assert run.table().value(**want) == pytest.approx(plain.table().value(**want), rel=tolerance)


def test_batch_size_and_passes_do_not_change_the_numbers(profiled: Profiled) -> None:
    few = ("--dtype", "float64", "--data", "embedded")
    whole = profiled(*few)
    same(whole.table(), profiled(*few, "--batch-size", 1).table(), 1e-9)
    wide = GPT.replace("n_embd=32", "n_embd=128")
    one, several = profiled(*few, model=wide), profiled(*few, "--memory", 1, model=wide)
    assert any("passes" in note for note in several.about()["warnings"])
    assert not any("passes" in note for note in one.about()["warnings"])
    same(one.table(), several.table(), 1e-9)


def test_the_seed_decides_random_weights(profiled: Profiled, plain: RunFolder) -> None:
    same(plain.table(), profiled().table(), 0.0)
    other = profiled("--seed", 1)
    assert other.about()["models"][0]["fingerprint"] != plain.about()["models"][0]["fingerprint"]


def test_a_tokenizer_of_another_folder_is_used(profiled: Profiled, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {word: i for i, word in enumerate(["[UNK]", "the", "of", "and", "in", "to", "a", "is", "was"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    run = profiled("--tokenizer", tmp_path, "--save-rows", "--sites", "resid", "--layers", 1)
    assert set(saved(run, "1.resid", "token").tolist()) <= set(map(float, words.values()))


# --- models ----------------------------------------------------------------------------------------------------------


def test_an_encoder_and_its_decoder_are_two_stacks(profiled: Profiled) -> None:
    table = profiled("--metrics", "drift", model=T5).table()
    layers = {(row["stack"], row["layer"]) for row in table.where(kind=["embed", "resid"]).records()}
    assert layers == {("encoder", i) for i in range(3)} | {("decoder", i) for i in range(4)}


def test_one_shared_layer_gives_a_site_for_each_application(profiled: Profiled) -> None:
    table = profiled("--metrics", "drift", model=ALBERT).table()
    drifts = [table.value(layer=i, kind="resid", metric="drift", variant="") for i in (1, 2, 3)]
    assert len(set(drifts)) == 3


def test_models_come_out_side_by_side_and_one_name_stays_two_models(profiled: Profiled) -> None:
    run = profiled(GPT, ALBERT, "--metrics", "drift")
    assert [m["name"] for m in run.about()["models"]] == ["gpt2", "gpt2 (2)", "albert"]
    table = run.table()
    assert {row["model"] for row in table.records()} == {"gpt2", "gpt2 (2)", "albert"}
    assert table.value(model="gpt2", layer=1, kind="resid", variant="") == table.value(
        model="gpt2 (2)", layer=1, kind="resid", variant=""
    )
    page = (run.path / "report.html").read_text()
    assert "gpt2 (2)" in page
    assert "albert" in page


def test_a_saved_model_and_its_adapter_are_profiled(profiled: Profiled, shelf: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    peft.get_peft_model(GPT2LMHeadModel.from_pretrained(shelf / "model"), config).save_pretrained(tmp_path / "lora")
    run = profiled(tmp_path / "lora", "--metrics", "drift", model=shelf / "model", fresh=False)
    table = run.table()
    names = [m["name"] for m in run.about()["models"]]
    assert names[1] == "lora"
    both = [table.value(model=name, layer=2, kind="resid", variant="") for name in names]
    assert both[0] != pytest.approx(both[1], rel=1e-3)
    embed = [table.value(model=name, layer=0, kind="embed", variant="") for name in names]
    assert embed[0] == embed[1]  # the adapter changes attention only


def test_files_of_rows_are_profiled_as_they_are(profiled: Profiled, shelf: Path) -> None:
    run = profiled(shelf / "several.safetensors", model=shelf / "rows.npy", fresh=False)
    table = run.table()
    x = np.load(shelf / "rows.npy")
    for name, expected in brute(x).items():
        if len(table.where(metric=name)):
            assert table.value(metric=name, kind="rows") == pytest.approx(expected, rel=1e-9)
    sizes = {(row["kind"], row["n"]) for row in table.where(metric="average_cosine").records()}
    assert sizes == {("rows", 500), ("early", 200), ("late", 300)}


# --- interruption ----------------------------------------------------------------------------------------------------


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the forward pass end after some batches: with an error in the next one, or with Ctrl-C in the last."""
    from anisoscope.capture.hooks import Capture

    real = Capture.run

    def arrange(after: int, error: type[BaseException] | None = None) -> None:
        left = [after]

        def run(self: Any, batch: Any) -> None:
            if not left[0] and error is not None:
                raise error
            left[0] -= 1
            if not left[0] and error is None:
                signal.raise_signal(signal.SIGINT)
            real(self, batch)

        monkeypatch.setattr(Capture, "run", run)

    return arrange


LONG = ("--batch-size", "2", "--save-rows", "--dtype", "float64")


def test_a_resumed_run_equals_an_undisturbed_one(
    profiled: Profiled, command: Command, stops: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = profiled(*LONG)
    words = ("profile", "--random-init", GPT, "--tokens", "600", "--context", "32", *LONG, "--out", tmp_path / "run")
    stops(5)
    broken = command(*words)
    assert broken.code == 130
    assert "--resume" in broken.sentence
    run = RunFolder.open(tmp_path / "run")
    assert run.about()["status"] == "interrupted"
    assert all("interrupted after 5 batches" in row["note"] for row in run.table().records())
    assert (run.path / "report.html").is_file()
    monkeypatch.undo()
    assert "add --resume" in command(*words).sentence  # the same command alone overwrites nothing
    done = command(*words, "--resume")
    assert done.code == 0, done.err
    assert run.about()["status"] == "complete"
    same(whole.table(), run.table(), 1e-12)
    np.testing.assert_array_equal(saved(whole, "2.resid"), saved(run, "2.resid"))
    assert not (run.path / "partial").exists()


def test_rows_of_a_run_that_died_are_not_counted_twice(
    profiled: Profiled, command: Command, stops: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("profile", "--random-init", GPT, "--tokens", "600", "--context", "32", *LONG, "--out", tmp_path / "run")
    stops(3, MemoryError)
    assert "out of memory" in command(*words).sentence
    monkeypatch.undo()
    assert command(*words, "--resume").code == 0
    np.testing.assert_array_equal(saved(profiled(*LONG), "1.resid"), saved(RunFolder.open(tmp_path / "run"), "1.resid"))


def test_a_finished_model_is_not_measured_again(
    command: Command, stops: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("profile", "--random-init", GPT, ALBERT, "--tokens", "600", "--context", "32", "--batch-size", "32")
    words = (*words, "--out", tmp_path / "run")
    stops(1, KeyboardInterrupt)  # one batch is the whole first model
    assert command(*words).code == 130
    run = RunFolder.open(tmp_path / "run")
    first = run.table().where(model="gpt2")
    assert len(first) == len(run.table())
    monkeypatch.undo()
    stops(1, KeyboardInterrupt)  # enough for the second model alone
    assert command(*words, "--resume").code == 0
    same(first, run.table().where(model="gpt2"), 0.0)
    assert [m["name"] for m in run.about()["models"]] == ["gpt2", "albert"]


def test_a_run_is_resumed_only_by_the_same_command(command: Command, plain: RunFolder) -> None:
    words = ("profile", "--random-init", GPT, "--context", "32", "--out", plain.path)
    assert "holds a run (complete)" in command(*words, "--tokens", "600").sentence
    assert "tokens = 600, not 700" in command(*words, "--tokens", "700", "--resume").sentence
    assert plain.about()["status"] == "complete"
    assert command(*words, "--tokens", "600", "--resume").code == 0
    assert "--resume needs --out" in command("profile", "--random-init", GPT, "--resume").sentence


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_what_was_finished(tmp_path: Path, how: signal.Signals) -> None:
    words = ["profile", "--random-init", GPT, "--context", "32", "--tokens", "2000000", "--out", str(tmp_path / "run")]
    process = subprocess.Popen([sys.executable, "-m", "anisoscope.cli", *words], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "run" / "run.json").exists():
        time.sleep(0.1)
    time.sleep(6)
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "--resume" in err
    run = RunFolder.open(tmp_path / "run")
    assert run.about()["status"] == "interrupted"
    assert len(run.table())


# --- reading runs ----------------------------------------------------------------------------------------------------


def test_the_long_table_is_printed_in_each_format(command: Command, tmp_path: Path) -> None:
    words = ("profile", "--random-init", GPT, "--tokens", 64, "--context", 8, "--metrics", "two_nn,drift")
    done = command(*words, "--pool", "mean", "--out", tmp_path / "run")
    assert "two_nn" in done.sentence  # 8 rows are too few for neighbours
    run = RunFolder.open(tmp_path / "run")
    table = run.table()
    assert {math.isnan(row["value"]) for row in table.records()} == {True, False}
    rows = list(csv.DictReader(io.StringIO(command("show", run.path, "--format", "csv").out)))
    found = json.loads(command("show", run.path, "--format", "json").out, parse_constant=pytest.fail)
    assert len(rows) == len(found) == len(table)
    for row, plain, record in zip(rows, found, table.records(), strict=True):
        if math.isnan(record["value"]):
            assert row["value"] == ""
            assert plain["value"] is None
            assert plain["note"] == record["note"] != ""
        else:
            assert float(row["value"]) == plain["value"] == record["value"]
    words = command("show", run.path).out
    assert "drift" in words
    assert "nan" not in words


def test_the_long_table_is_narrowed(command: Command, plain: RunFolder) -> None:
    words = ("show", plain.path, "--format", "json")
    found = json.loads(command(*words, "--metric", "drift,two_nn", "--kind", "resid").out)
    assert {(row["metric"], row["kind"]) for row in found} == {("drift", "resid"), ("two_nn", "resid")}
    heads = command("show", plain.path, "--kind", "query", "--heads").out
    assert len(heads.splitlines()) > len(command("show", plain.path, "--kind", "query").out.splitlines())


def test_a_model_compared_with_itself_differs_nowhere(command: Command, plain: RunFolder, profiled: Profiled) -> None:
    found = json.loads(command("compare", plain.path, profiled().path, "--format", "json").out)
    assert found["paired"]
    assert all(row["difference"] == 0 and not row["differs"] for row in found["differences"])
    for i, name in enumerate(found["cka"]["first"]):
        assert found["cka"]["values"][i][found["cka"]["second"].index(name)] == pytest.approx(1, abs=1e-6)


def test_two_models_of_one_run_are_compared(command: Command, profiled: Profiled) -> None:
    run = profiled(ALBERT)
    found = json.loads(command("compare", run.path, "--format", "json").out)
    assert (found["first"], found["second"]) == ("gpt2", "albert")
    assert any(row["difference"] for row in found["differences"])
    named = command("compare", f"{run.path}#gpt2", f"{run.path}#albert", "--metric", "drift")
    assert "drift" in named.out
    assert "two_nn" not in named.out
    assert "holds 2 models" in command("compare", run.path, run.path).sentence
    rows = list(csv.DictReader(io.StringIO(command("compare", run.path, "--format", "csv").out)))
    assert float(rows[0]["difference"]) == pytest.approx(float(rows[0]["second"]) - float(rows[0]["first"]))


def test_two_files_of_rows_are_compared_whatever_their_names(
    command: Command, profiled: Profiled, tmp_path: Path
) -> None:
    rows = np.random.default_rng(0).normal(size=(300, 8))
    np.save(tmp_path / "before.npy", rows)
    np.save(tmp_path / "after.npy", rows + 5)
    one, two = (profiled(model=tmp_path / name, fresh=False) for name in ("before.npy", "after.npy"))
    words = ("compare", one.path, two.path, "--metric", "average_cosine", "--format", "json")
    (found,) = json.loads(command(*words).out)["differences"]
    assert found["difference"] > 0.8
    assert found["differs"]


def test_other_tokens_are_not_paired(command: Command, plain: RunFolder, profiled: Profiled, shelf: Path) -> None:
    done = command("compare", plain.path, profiled("--data", shelf / "plain.txt").path)
    assert done.code == 0
    assert "not paired" in " ".join(done.err.split())


def test_a_report_is_made_again_for_one_run_or_several(
    command: Command, plain: RunFolder, profiled: Profiled, tmp_path: Path
) -> None:
    (plain.path / "report.html").unlink()
    assert command("report", plain.path).out.strip() == str(plain.path / "report.html")
    assert (plain.path / "report.html").is_file()
    other = profiled(model=ALBERT)
    done = command("report", plain.path, other.path, "--out", tmp_path / "both")
    page = (tmp_path / "both" / "report.html").read_text()
    assert done.code == 0
    assert "gpt2" in page
    assert "albert" in page


@pytest.mark.parametrize(
    ("what", "words"),
    [("metrics", ["two_nn", "formula", "reference"]), ("sites", ["resid", "unembed"]), ("models", ["albert", "t5"])],
)
def test_lists_explain_what_there_is(command: Command, what: str, words: list[str]) -> None:
    done = command("list", what)
    assert done.code == 0
    assert all(word in done.out.lower() for word in words)


def test_the_selftest_passes_here_and_can_fail(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    done = command("selftest", "--device", "cpu", "--seed", 7)  # any seed will do
    assert done.code == 0, done.out
    assert done.out.count("PASS") > 20
    assert "FAIL" not in done.out
    from anisoscope.runs import selftest

    wrong = type("Result", (), {"metric": "two_nn", "control": "plane", "passed": False, "seen": "9"})()
    monkeypatch.setattr(selftest, "run_selftest", lambda *_, **__: [wrong])
    failed = command("selftest")
    assert failed.code == 1
    assert "1 controls failed" in failed.sentence
    assert "FAIL" in failed.out


# --- the record ------------------------------------------------------------------------------------------------------


def test_the_record_says_what_was_run_and_with_what(plain: RunFolder) -> None:
    about = plain.about()
    assert about["command"][:3] == ["anisoscope", "profile", "--random-init"]
    assert about["config"]["tokens"] == 600
    assert {"python", "torch", "transformers", "numpy"} <= set(about["versions"])
    assert about["device"] == "cpu"
    assert about["models"][0]["fingerprint"].startswith("sha256:")
    assert len(about["data"]["fingerprint"]) == 64
    assert about["wall_seconds"] > 0
    assert about["peak_memory_mb"] > 0
    assert (plain.path / "table.parquet").is_file()
    assert list((plain.path / "arrays").glob("*.safetensors"))
    assert not {p.name for p in plain.path.iterdir()} & {"partial", "parts"}


def test_a_run_without_out_lands_under_runs(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = command("profile", "--random-init", GPT, "--tokens", "100", "--context", "32")
    assert done.code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert str(Path("runs") / folder.name / "report.html") in done.out
    assert "about" in done.err
    assert "MiB" in done.err


# --- the real process ------------------------------------------------------------------------------------------------


def process(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "anisoscope.cli", *map(str, words)]
    return subprocess.run(run, capture_output=True, text=True, timeout=120, check=False, **options)


def test_help_needs_no_heavy_library() -> None:
    words = "import sys; sys.argv = ['anisoscope', 'profile', '--help']; from anisoscope import cli\n"
    words += "try: cli.main()\nfinally: print(sorted({'torch', 'transformers', 'plotly'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=60, check=False)
    assert "--save-rows" in done.stdout
    assert done.stdout.rstrip().endswith("[]")


def test_a_whole_run_in_a_process_of_its_own(tmp_path: Path) -> None:
    done = process("profile", "--random-init", GPT, "--tokens", 100, "--context", 32, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("report.html")
    assert "Traceback" not in done.stderr
    made = {path.suffix for path in (tmp_path / "run" / "figures").iterdir()}
    assert made == {".pdf", ".svg"}
    listed = process("show", tmp_path / "run", "--format", "csv")
    assert listed.stdout.startswith("run,model,revision")


def test_a_reader_that_leaves_early_is_no_error(plain: RunFolder) -> None:
    env = {**os.environ, "A": sys.executable, "R": str(plain.path)}
    line = '"$A" -m anisoscope.cli show "$R" --format csv | head -n 1'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False, env=env)
    assert re.match("run,model", done.stdout)
    assert "Traceback" not in done.stderr
