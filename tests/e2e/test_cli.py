"""Every option of the command line does what it says, on models small enough to run in a moment."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anisoscope.results.folder import RunFolder
from support.clouds import METRICS
from support.command_lines import ALBERT, GPT, Profiled, same, saved, values

T5 = "t5:d_model=32,d_kv=8,d_ff=48,num_layers=2,num_decoder_layers=3,num_heads=4,vocab_size=300"


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


def test_special_tokens_are_left_out_only_when_asked(profiled: Profiled, tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = words_of("[UNK]", "[CLS]", "[SEP]", "the")
    around = [("[CLS]", 1), ("[SEP]", 2)]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    tokenizer.add_special_tokens([word for word, _ in around])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    few = ("--tokenizer", tmp_path, "--metrics", "drift", "--sites", "resid", "--layers", "1")
    whole, rest = (profiled(*few, *more).table().where(variant="").records()[0] for more in ((), ("--skip-special",)))
    assert rest["n"] == whole["n"] - 2 * whole["contexts"]  # [CLS] and [SEP]


def test_tokens_and_context_bound_what_is_read(profiled: Profiled) -> None:
    about = profiled("--tokens", 200, "--context", 20, "--sites", "resid").about()["data"]
    assert about["context_length"] == 20
    assert 200 <= about["tokens"] < 220
    assert about["contexts"] == 10


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


def test_options_of_a_metric_become_its_variant(profiled: Profiled) -> None:
    words = "svd_ratio,svd_ratio:centred=0,two_nn:method=ml:keep=0.8"
    table = profiled("--metrics", words, "--sites", "resid").table()
    found = {(row["metric"], row["variant"]) for row in table.records()}
    assert found == {("svd_ratio", ""), ("svd_ratio", "centred=0"), ("two_nn", "keep=0.8;method=ml")}


def test_all_metrics_are_measured_and_each_once(profiled: Profiled) -> None:
    table = profiled("--metrics", "all,two_nn,two_nn", "--sites", "resid,query,key,scores,unembed").table()
    assert set(table.metrics) == set(METRICS)
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


def words_of(*words: str) -> Any:
    """A tokenizer of these words; the first one stands for all others."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer


def test_a_tokenizer_of_another_folder_is_used(profiled: Profiled, tmp_path: Path) -> None:
    words = ("[UNK]", "the", "of", "and", "in", "to", "a", "is", "was")
    words_of(*words).save(str(tmp_path / "tokenizer.json"))
    run = profiled("--tokenizer", tmp_path, "--save-rows", "--sites", "resid", "--layers", 1)
    assert set(saved(run, "1.resid", "token").tolist()) <= set(map(float, range(len(words))))


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
        if name in table.metrics:
            assert table.value(metric=name, kind="rows") == pytest.approx(expected, rel=1e-9)
    sizes = {(row["kind"], row["n"]) for row in table.where(metric="average_cosine").records()}
    assert sizes == {("rows", 500), ("early", 200), ("late", 300)}


def test_the_help_calls_the_command_by_its_name(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from anisoscope import cli

    assert "Usage: anisoscope profile" in command("profile", "--help").out
    monkeypatch.setattr(sys, "argv", ["/usr/bin/anisoscope", "list"])
    assert cli._program_name() == {"prog_name": "anisoscope"}
    monkeypatch.setattr(sys, "argv", ["/lib/anisoscope/__main__.py", "list"])
    assert cli._program_name() == {}, "python -m anisoscope is called so"
