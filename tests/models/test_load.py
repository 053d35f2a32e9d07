"""Loading: every kind of source, never random weights in silence, and one sentence when it cannot be done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.models import placement
from anisoscope.models import source as sources
from anisoscope.models.load import load_model
from anisoscope.models.source import parse_model
from anisoscope.models.tokenizer import special_frame
from support.loaded import BERT, GPT2, load, same_weights, saved


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


# -- what a MODEL means -----------------------------------------------------------------------------------------------


def test_specs_are_told_apart(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    np.save(tmp_path / "r.npy", np.ones((3, 2)))
    (tmp_path / "ad").mkdir()
    (tmp_path / "ad" / "adapter_config.json").write_text("{}")
    kinds = {folder: "folder", tmp_path / "x.gguf": "gguf", tmp_path / "r.npy": "rows", tmp_path / "ad": "peft"}
    assert {path: parse_model(str(path)).kind for path in kinds} == kinds
    assert parse_model("org/name@v1").revision == "v1" and parse_model("org/name@v1").place == "org/name"
    assert parse_model("gpt2").kind == "hub" and parse_model("gpt2", random_init=True).kind == "config"
    fields = parse_model("bert:hidden_size=8,layer_norm_eps=1e-6,hidden_act=relu,tie=true", random_init=True).overrides
    assert fields == {"hidden_size": 8, "layer_norm_eps": 1e-6, "hidden_act": "relu", "tie": True}


BAD = {
    "./no/such/model": "there is no file or folder",
    "model.gguf": "there is no file or folder",
    "two words": "is no model",
    "surely/not-there": "the hub cannot be reached",
    "surely/not-there@v2": "the hub cannot be reached",
    "gpt2": "add --random-init",
}


@pytest.mark.parametrize("spec", BAD)
def test_what_cannot_be_found_is_told_at_once(spec: str) -> None:
    start = time.monotonic()
    with pytest.raises(AnisoscopeError, match=BAD[spec]) as caught:
        load(spec)
    assert time.monotonic() - start < 10 and "\n" not in str(caught.value)


def test_an_unreachable_hub_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HTTPS_PROXY", raising=False)
    monkeypatch.delenv("https_proxy", raising=False)
    start = time.monotonic()
    assert not sources.hub_reachable()
    assert time.monotonic() - start < 5


def test_folders_that_are_no_model_say_what_they_hold(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(AnisoscopeError, match=r"it holds notes\.txt, but no config\.json"):
        load(tmp_path)
    saved(tmp_path / "inner")
    with pytest.raises(AnisoscopeError, match=r"A model lies in .*inner"):
        load(tmp_path)
    with pytest.raises(AnisoscopeError, match=r"did you mean .*inner"):
        load(tmp_path / "iner")


def test_a_config_without_weights_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2}))
    with pytest.raises(AnisoscopeError, match=r"no weights.*--random-init"):
        load(tmp_path)
    assert load(tmp_path, random_init=True).model.config.n_layer == 1
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(AnisoscopeError, match="is not JSON"):
        load(tmp_path)


HUB = """
import sys
from anisoscope.models.load import load_model
for spec in ("org/tiny", "org/tiny@step7"):
    loaded = load_model(spec, device="cpu", tokenizer="bytes")
    print(loaded.name, loaded.revision, loaded.fingerprint)
try:
    load_model("org/tiny@step8", device="cpu")
except Exception as error:
    print(type(error).__name__, error)
"""


def test_hub_ids_and_revisions_come_from_the_cache_without_network(tmp_path: Path) -> None:
    commits = {"main": "a" * 40, "step7": "b" * 40}
    cached = tmp_path / "models--org--tiny"
    for seed, (name, commit) in enumerate(commits.items()):
        saved(cached / "snapshots" / commit, seed=seed)
        (cached / "refs").mkdir(exist_ok=True)
        (cached / "refs" / name).write_text(commit)
    environment = os.environ | {
        "HF_HUB_CACHE": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run([sys.executable, "-c", HUB], env=environment, capture_output=True, text=True, check=True)
    first, second, third = done.stdout.splitlines()
    assert first.split() == ["org/tiny", commits["main"], load(GPT2, random_init=True, seed=0).fingerprint]
    assert second.split() == ["org/tiny", commits["step7"], load(GPT2, random_init=True, seed=1).fingerprint]
    assert third.startswith("AnisoscopeError 'org/tiny@step8'") and done.stderr == ""


# -- fresh models -----------------------------------------------------------------------------------------------------


def test_fresh_weights_follow_the_seed_and_leave_the_global_generator_alone() -> None:
    state = torch.random.get_rng_state()
    a, b, c = (load(GPT2, random_init=True, seed=s) for s in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert same_weights(a.model, b.model) and a.fingerprint == b.fingerprint
    assert not same_weights(a.model, c.model) and a.fingerprint != c.fingerprint
    assert any("random weights (seed 0)" in note for note in a.notes)


def test_a_fresh_model_is_described() -> None:
    decoder, encoder = load(GPT2, random_init=True), load(BERT, random_init=True)
    assert type(decoder.model).__name__ == "GPT2LMHeadModel" and type(encoder.model).__name__ == "BertForMaskedLM"
    assert (decoder.is_decoder, encoder.is_decoder, decoder.is_encoder_decoder) == (True, False, False)
    assert (decoder.max_context, encoder.max_context) == (64, 512)
    assert not decoder.model.training and decoder.parameters == sum(p.numel() for p in decoder.model.parameters())
    assert type(load(GPT2, random_init=True, with_head=False).model).__name__ == "GPT2Model"


def test_unknown_fields_and_impossible_shapes_are_told() -> None:
    with pytest.raises(AnisoscopeError, match="did you mean 'num_hidden_layers'"):
        load("bert:num_hiden_layers=2", random_init=True)
    with pytest.raises(AnisoscopeError, match="no model can be built"):
        load("gpt2:n_embd=33,n_head=2,n_layer=1", random_init=True)
    with pytest.raises(AnisoscopeError, match="architectures with a similar name"):
        load("gpt3", random_init=True)


@pytest.mark.parametrize(
    ("spec", "tokenizer", "length"),
    [
        ("canine:num_hidden_layers=1,hidden_size=48,num_attention_heads=4", "CanineTokenizer", 16384),
        ("byt5:num_layers=1,d_model=32,num_heads=2,d_kv=16,d_ff=64", "ByT5Tokenizer", None),
        ("roberta:num_hidden_layers=1,hidden_size=32,num_attention_heads=2,max_position_embeddings=66", None, 64),
        ("bloom:n_layer=1,hidden_size=32,n_head=2,vocab_size=300", None, None),
        ("opt:num_hidden_layers=1,hidden_size=32,num_attention_heads=2,ffn_dim=64,word_embed_proj_dim=32", None, 2048),
    ],
)
def test_limits_and_tokenizers_of_other_families(spec: str, tokenizer: str | None, length: int | None) -> None:
    loaded = load(spec, random_init=True)
    assert type(loaded.tokenizer).__name__ == (tokenizer or "ByteTokenizer")
    assert loaded.max_context == length if length else loaded.max_context >= 512
    frame = special_frame(loaded.tokenizer)
    room = min(loaded.max_context, 64) - len(frame)
    ids = torch.tensor([[*frame.before, *[40] * room, *frame.after]])
    extra = {"decoder_input_ids": ids} if loaded.is_encoder_decoder else {}
    with torch.no_grad():
        assert loaded.model(input_ids=ids, **extra) is not None
    assert (loaded.decoder_start is not None) == loaded.is_encoder_decoder


def test_a_model_that_does_not_fit_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AnisoscopeError, match=r"need .* GiB, and cpu has .* GiB free; use --dtype bfloat16"):
        load("llama:hidden_size=65536,num_attention_heads=512,num_key_value_heads=512", random_init=True)
    monkeypatch.setattr(placement, "free_memory", lambda device: 1000)
    with pytest.raises(AnisoscopeError, match="does not fit"):
        load(GPT2, random_init=True)


# -- overrides --------------------------------------------------------------------------------------------------------


def test_lists_are_values_of_a_configuration() -> None:
    resnet = load_model("resnet:hidden_sizes=[8,16],depths=[1,2],embedding_size=8", random_init=True, device="cpu")
    config: Any = resnet.model.config
    assert (config.hidden_sizes, config.depths, config.embedding_size) == ([8, 16], [1, 2], 8)
    assert parse_model("swin:depths=(1,1), num_heads=[2, 2]", random_init=True).overrides == {
        "depths": [1, 1], "num_heads": [2, 2],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("resnet:depths=[1,1", "has brackets that do not match"),
        ("resnet:depths=1]", "has brackets that do not match"),
        ("resnet:depths", "has 'depths' after 'resnet'; expected name=value pairs"),
        ("resnet:depths=", "has 'depths='; expected name=value pairs"),
        ("gpt2:n_layer=2,3", "has '3'; expected name=value pairs, such as"),
        ("vit:hidden_size=abc", "hidden_size"),
        ("resnet:depths=3", "depths"),
    ],
)
def test_bad_overrides_are_one_sentence(spec: str, words: str) -> None:
    with pytest.raises(AnisoscopeError) as told:
        load_model(spec, random_init=True, device="cpu")
    assert words in str(told.value) and "\n" not in str(told.value)


def test_a_tokenizer_one_folder_up_is_found_where_it_has_a_word_for_each_id(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"ACDEFGHIKLMNPQRSTVWY"]
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    for name, rows in (("fits", len(words)), ("other", len(words) + 1)):
        BertForMaskedLM(BertConfig(vocab_size=rows, **sizes)).save_pretrained(tmp_path / "models" / name)
    with pytest.raises(AnisoscopeError, match="comes without a tokenizer"):
        load_model(str(tmp_path / "models" / "fits"), device="cpu")
    (tmp_path / "models" / "vocab.txt").write_text("\n".join(words))
    found = load_model(str(tmp_path / "models" / "fits"), device="cpu")
    assert found.tokenizer("QVQL", add_special_tokens=False)["input_ids"] == [words.index(c) for c in "QVQL"]
    assert found.modality.name == "characters" and any("folder above, 'models'" in note for note in found.notes)
    with pytest.raises(AnisoscopeError, match="comes without a tokenizer"):
        load_model(str(tmp_path / "models" / "other"), device="cpu")


def test_a_vocabulary_of_letters_beside_the_weights_gives_a_token_for_each_letter(tmp_path: Path) -> None:
    saved(tmp_path / "protein", BERT)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"ACDEFGHIKLMNPQRSTVWY"]
    (tmp_path / "protein" / "vocab.txt").write_text("\n".join(words))
    tokenizer = load(tmp_path / "protein", tokenizer=None).tokenizer
    assert tokenizer("EVQL", add_special_tokens=False)["input_ids"] == [words.index(letter) for letter in "EVQL"]


def test_a_vocabulary_beside_the_weights_that_is_no_text_is_told_in_a_sentence(tmp_path: Path) -> None:
    saved(tmp_path / "protein", BERT)
    (tmp_path / "protein" / "vocab.txt").write_bytes(b"[PAD]\n\xff\xfe\n")
    with pytest.raises(AnisoscopeError, match="is not text in UTF-8"):
        load(tmp_path / "protein", tokenizer=None)
