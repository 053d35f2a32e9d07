"""A file of weights is the model that its architecture says, or is refused in a sentence, whatever bytes it holds."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.models.checkpoint import HEADLESS, prefix_of, read_state
from anisoscope.models.load import load_model
from anisoscope.series import SweepConfig
from anisoscope.series.discovery import recorded_step
from support.tiny_series import ARCHITECTURE, gpt

PLAIN: dict[str, Any] = {"device": "cpu", "need_tokenizer": False}


@pytest.mark.parametrize("prefix", ["", "model.", "module.", "_orig_mod.", "model._orig_mod.", "net.body."])
@pytest.mark.parametrize("suffix", [".ckpt", ".pt", ".safetensors"])
def test_a_file_of_weights_is_the_model_whatever_its_names_begin_with(tmp_path: Path, prefix: str, suffix: str) -> None:
    from safetensors.torch import save_file

    model, path = gpt(), tmp_path / f"step=5{suffix}"
    state = {f"{prefix}{name}": value.clone() for name, value in model.state_dict().items()}
    if suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save({"state_dict": state, "global_step": 5} if suffix == ".ckpt" else state, path)
    loaded = load_model(str(path), architecture=ARCHITECTURE, **PLAIN)
    mine = loaded.model.state_dict()
    assert all(torch.equal(mine[name], value) for name, value in model.state_dict().items())
    assert type(loaded.model).__name__ == "GPT2LMHeadModel"


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    state = dict(gpt().state_dict())
    path = tmp_path / "w.pt"
    for change, words in (
        ({"transformer.h.1.mlp.c_fc.weight": None}, "lacks transformer.h.1.mlp.c_fc.weight"),
        ({"transformer.h.2.ln_1.weight": torch.zeros(16)}, "no place for transformer.h.2.ln_1.weight"),
        ({"transformer.wpe.weight": torch.zeros(3, 16)}, r"transformer.wpe.weight has the shape \[3, 16\]"),
    ):
        torch.save({k: v for k, v in (state | change).items() if v is not None}, path)
        with pytest.raises(AnisoscopeError, match=words):
            load_model(str(path), architecture=ARCHITECTURE, **PLAIN)
    for prefix in ("", "model."):
        torch.save({f"{prefix}{k}": v for k, v in state.items()} | {"criterion.weight": torch.zeros(3)}, path)
        beside = load_model(str(path), architecture=ARCHITECTURE, **PLAIN)
        assert any("criterion.weight" in note for note in beside.notes), "beside the model it is left out, and said"
        assert type(beside.model).__name__ == "GPT2LMHeadModel", "and the head is kept"


def test_an_encoder_of_a_classifier_is_loaded_without_its_head(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(**sizes, vocab_size=300))
    torch.save({f"model.{k}": v for k, v in model.state_dict().items()}, tmp_path / "w.pt")
    words = ",".join(f"{k}={v}" for k, v in sizes.items())
    loaded = load_model(
        str(tmp_path / "w.pt"), architecture=f"bert:{words},vocab_size=300", device="cpu", need_tokenizer=False
    )
    assert type(loaded.model).__name__ == "BertModel" and any("classifier" in note for note in loaded.notes)


def test_a_pickle_that_would_run_code_and_half_a_file_are_refused(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (print, ("ran",))

    path = tmp_path / "w.ckpt"
    torch.save({"state_dict": {"a": torch.zeros(2)}, "callbacks": Trap()}, path)
    with pytest.raises(AnisoscopeError, match="would run its code"):
        read_state(path)
    torch.save({"state_dict": dict(gpt().state_dict())}, path)
    assert len(read_state(path)) > 20
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(AnisoscopeError, match="part of one; copy it again"):
        read_state(path)
    assert recorded_step(str(path)) is None


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_whatever_bytes_a_file_holds_it_is_read_or_refused(tmp_path: Path, suffix: str) -> None:
    from safetensors.torch import save_file

    chance, path = random.Random(0), tmp_path / f"step=5{suffix}"
    weights = {"a.weight": torch.arange(40.0), "b.weight": torch.ones(3, 3)}
    save_file(weights, path) if suffix == ".safetensors" else torch.save({"model": weights, "step": 5}, path)
    good, accepted = path.read_bytes(), 0
    assert read_state(path).keys() == weights.keys()
    cases = [b"", b"hello", *(chance.randbytes(chance.randrange(1, 200)) for _ in range(300))]
    cases += [b"\x80\x02" + chance.randbytes(chance.randrange(1, 60)) for _ in range(100)]
    cases += [good[: chance.randrange(len(good))] for _ in range(100)]
    for k in (chance.randrange(len(good)) for _ in range(200)):
        cases.append(good[:k] + bytes([chance.randrange(256)]) + good[k + 1 :])
    for case in cases:
        path.write_bytes(case)
        recorded_step(str(path))
        with contextlib.suppress(AnisoscopeError):
            read_state(path)
            accepted += 1
    assert accepted < 250, "only some of those with one byte changed"


def test_a_damaged_file_of_a_folder_is_named(tmp_path: Path) -> None:
    gpt().save_pretrained(tmp_path)
    file, binary = tmp_path / "model.safetensors", tmp_path / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(AnisoscopeError, match=r"model.safetensors is cut off or damaged \(.*\); copy it again.$"):
        load_model(str(tmp_path), **PLAIN)
    file.unlink()
    torch.save(gpt().state_dict(), binary)
    whole = binary.read_bytes()
    for case in (b"hello", b"", whole[:5000], whole[:-10]):
        binary.write_bytes(case)
        with pytest.raises(AnisoscopeError, match=r"pytorch_model.bin is cut off or damaged.*; copy it again.$"):
            load_model(str(tmp_path), **PLAIN)
    binary.write_bytes(whole)
    load_model(str(tmp_path), **PLAIN)


def test_a_file_without_its_head_is_said_and_one_with_it_is_not(tmp_path: Path) -> None:
    state, path = dict(gpt().state_dict()), tmp_path / "w.pt"
    torch.save(state, path)
    whole = load_model(
        str(path), architecture=f"{ARCHITECTURE},tie_word_embeddings=false", device="cpu", need_tokenizer=False
    )
    assert HEADLESS not in whole.notes and whole.model.loss_type == "ForCausalLM"
    del state["lm_head.weight"]
    torch.save(state, path)
    bare = load_model(
        str(path), architecture=f"{ARCHITECTURE},tie_word_embeddings=false", device="cpu", need_tokenizer=False
    )
    assert HEADLESS in bare.notes and type(bare.model).__name__ == "GPT2Model"


def test_a_wrong_architecture_names_the_nearest_and_a_wrong_field_too() -> None:
    for spec, words in (("berd:hidden_size=3", "bert"), ("bert:hiden_size=3", "hidden_size"), ("foo:x=1", "Nearest")):
        with pytest.raises(AnisoscopeError, match=words) as caught:
            SweepConfig("series", architecture=spec)
        assert len(str(caught.value)) < 250
    SweepConfig("series", architecture="bert:hidden_size=24,num_attention_heads=2")


def test_the_prefix_of_most_names_wins() -> None:
    names = ["student.a.w", "student.b.w", "teacher.a.w", "teacher.b.w", "student.c.w"]
    assert prefix_of(names, ["a.w", "b.w", "c.w"]) == "student."
    assert prefix_of(["model.layers.0.w", "lm_head.w"], ["model.layers.0.w", "lm_head.w"]) == ""


def test_a_head_for_the_next_token_knows_its_loss_however_it_is_loaded(tmp_path: Path) -> None:
    assert gpt().loss_type is None, "transformers would warn at every load"
    gpt().save_pretrained(tmp_path / "next")
    assert load_model(str(tmp_path / "next"), **PLAIN).model.loss_type == "ForCausalLM"
    model = gpt()
    model.config.objective = "masked"
    model.save_pretrained(tmp_path / "masked")
    assert load_model(str(tmp_path / "masked"), **PLAIN).model.loss_type == "ForMaskedLM"
    torch.save(model.state_dict(), tmp_path / "w.pt")
    plan = str(tmp_path / "masked")
    assert load_model(str(tmp_path / "w.pt"), architecture=plan, **PLAIN).model.loss_type == "ForMaskedLM"
    assert load_model(ARCHITECTURE, random_init=True, **PLAIN).model.loss_type == "ForCausalLM"
