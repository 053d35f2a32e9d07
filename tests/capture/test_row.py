"""Rows: which positions are data, what they are called, and what is done with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from anisoscope.capture import Batch, Capture, Site, find_layout
from anisoscope.capture.verification import verify
from anisoscope.errors import AnisoscopeError
from support.tiny_models import PAD, Record, captured, contexts, inputs, padded, tiny

# what is a row


def test_padding_is_no_data() -> None:
    model = tiny("bert")
    rows = captured(model, inputs(model, 9, 4)).at("1.resid")
    assert rows.x.shape == (13, 32)
    assert not (rows.index.token == PAD).any()
    assert rows.index.position.tolist() == [*range(9), *range(4)]
    assert rows.index.first.nonzero().flatten().tolist() == [0, 9]


def test_padding_would_be_data_without_a_mask_and_a_pad_id() -> None:
    model = tiny("gpt2")  # its configuration names no pad token
    rows = captured(model, {"input_ids": inputs(model, 9, 4)["input_ids"]}).at("1.resid")
    assert rows.x.shape[0] == 18


@pytest.mark.parametrize("side", ["left", "right"])
def test_unmasked_runs_of_the_pad_token_are_padding_and_noted(side: str) -> None:
    model = tiny("llama")
    record = Record()
    with Capture(model, find_layout(model).sites(), record) as capture:
        capture.run({"input_ids": inputs(model, 9, 4, side=side)["input_ids"]})
    assert record.at("1.resid").x.shape[0] == 13
    assert "pad_token_id" in capture.notes[0]


def test_a_pad_token_inside_the_text_is_data() -> None:
    model = tiny("llama")
    ids = inputs(model, 9, 9)["input_ids"]
    ids[0, 4] = ids[1, 8] = PAD
    assert captured(model, ids).at("1.resid").x.shape[0] == 18


def test_empty_contexts_are_skipped() -> None:
    model = tiny("llama")
    batch = inputs(model, 6, 5, 4)
    batch["attention_mask"][1] = 0
    rows = captured(model, batch).at("2.resid")
    assert (rows.index.keep // rows.index.length).unique().tolist() == [0, 2]
    batch["attention_mask"][:] = 0
    assert captured(model, batch).all == []


def test_keys_depend_on_content_alone() -> None:
    model = tiny("llama")
    texts = contexts(7, 5, 9)
    together = captured(model, padded(texts)).at("1.resid").index
    names = {int(c) for c in together.context}
    alone = [captured(model, padded([text])).at("1.resid").index.context.unique().item() for text in reversed(texts)]
    assert set(alone) == names
    assert len(names) == 3
    changed = texts[0].clone()
    changed[3] += 1
    assert captured(model, padded([changed])).at("1.resid").index.context[0].item() not in names


def test_a_context_is_hashed_by_blake2b_of_its_ids() -> None:
    import hashlib

    ids = torch.tensor([[8, 9, 10]])
    digest = hashlib.blake2b(ids.numpy().tobytes(), digest_size=8).digest()
    index = captured(tiny("llama"), ids).at("0.embed").index
    assert index.context.tolist() == [int.from_bytes(digest, "little", signed=True)] * 3


def test_masks_of_four_dimensions_are_understood() -> None:
    model = tiny("llama", attention="eager")
    batch = inputs(model, 8, 5)
    mask = batch["attention_mask"].bool()
    full = (torch.ones(8, 8).tril().bool() & mask[:, None, None, :]).expand(2, 1, 8, 8)
    for form in (full, torch.zeros(full.shape).masked_fill(~full, torch.finfo(torch.float32).min)):
        rows = captured(model, {"input_ids": batch["input_ids"], "attention_mask": form}).at("1.resid")
        assert torch.equal(rows.index.keep, mask.flatten().nonzero().flatten())


def test_embeddings_may_be_given_for_ids() -> None:
    model: Any = tiny("llama")
    batch = inputs(model, 8, 5)
    embeds = model.get_input_embeddings()(batch["input_ids"]).detach()
    by_ids = captured(model, batch).at("2.resid")
    rows = captured(model, {"inputs_embeds": embeds, "attention_mask": batch["attention_mask"]}).at("2.resid")
    torch.testing.assert_close(rows.x, by_ids.x)
    assert set(rows.index.token.tolist()) == {-1}
    assert rows.index.context.unique().numel() == 2


def test_special_tokens_and_the_first_position_can_be_left_out() -> None:
    model = tiny("bert")
    inside = inputs(model, 6, 4)
    special = torch.zeros_like(inside["input_ids"]).bool()
    special[:, 0] = special[0, 5] = special[1, 3] = True
    batch = Batch(inside, special=special, groups=("a", "b"))
    assert captured(model, batch).at("1.resid").x.shape[0] == 10
    out = captured(model, batch, special="out").at("1.resid").index
    assert out.position.tolist() == [1, 2, 3, 4, 1, 2]
    assert not out.first.any()
    first = captured(model, batch, first="out").at("1.resid").index
    assert first.position.tolist() == [1, 2, 3, 4, 5, 1, 2, 3]
    assert first.group == ("a", "b")


def test_special_out_without_flags_raises() -> None:
    with pytest.raises(AnisoscopeError, match="Batch with `special`"):
        captured(tiny("bert"), inputs(tiny("bert"), 5), special="out")
    with pytest.raises(AnisoscopeError, match="pool='median'"):
        captured(tiny("bert"), inputs(tiny("bert"), 5), pool="median")


@pytest.mark.parametrize("side", ["left", "right"])
def test_pooled_rows_are_one_per_context(side: str) -> None:
    model = tiny("llama")
    batch = Batch(inputs(model, 6, 4, side=side), groups=("a", "b"))
    rows = captured(model, batch).at("2.resid").x.split([6, 4])
    expected = {
        "mean": torch.stack([part.mean(0) for part in rows]),
        "cls": torch.stack([part[0] for part in rows]),
        "last": torch.stack([part[-1] for part in rows]),
    }
    for pool, value in expected.items():
        pooled = captured(model, batch, pool=pool).at("2.resid")
        torch.testing.assert_close(pooled.x, value)
        assert pooled.index.first is None
        assert (pooled.index.keep.tolist(), pooled.index.length) == ([0, 1], 1)
        assert pooled.index.position.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
)
def test_half_precision_is_promoted_and_double_kept(dtype: torch.dtype, kept: torch.dtype) -> None:
    model = tiny("llama", dtype=dtype)
    record = captured(model, inputs(model, 5, 4), find_layout(model).sites(["resid", "query"]))
    assert {rows.x.dtype for rows in record.all} == {kept}
    verify(model, find_layout(model), inputs(model, 5, 4))


def test_rows_belong_to_the_sink() -> None:
    model = tiny("falcon-7b")  # adds to its feed-forward output in place
    record = captured(model, inputs(model, 6, 6), find_layout(model).sites(["mlp_out", "attn_out"]))
    assert not record.at("1.mlp_out").x.is_inference()
    assert not torch.allclose(record.at("1.mlp_out").x, record.at("1.mlp_out").x + record.at("1.attn_out").x)
    verify(model, find_layout(model), inputs(model, 6, 6))


# encoder and decoder


def test_encoder_and_decoder_have_their_own_index() -> None:
    model = tiny("t5")
    batch = inputs(model, 9, 5)
    record = captured(model, batch)
    assert record.at("encoder.3.final").x.shape[0] == 14
    assert record.at("decoder.2.final").x.shape[0] == 5 + 3
    found = [record.at(f"{side}.1.resid").index.context for side in ("encoder", "decoder")]
    assert not set(found[0].tolist()) & set(found[1].tolist())
    alone = captured(model, batch, [Site(1, "resid", "decoder")]).at("decoder.1.resid")
    assert torch.equal(alone.index.context, found[1])
    batch["input_ids"] = batch["input_ids"].flip(1).where(batch["input_ids"] > 0, 0)
    changed = captured(model, batch).at("decoder.1.resid").index.context  # the same ids, after another text
    assert not set(changed.tolist()) & set(found[1].tolist())


def test_decoder_ids_made_from_labels_are_read_where_the_decoder_gets_them() -> None:
    model = tiny("byt5")
    batch = {name: value for name, value in inputs(model, 9, 5).items() if "decoder" not in name}
    labels = torch.tensor([[7, 8, 9, 10], [7, 8, -100, -100]])
    rows = captured(model, {**batch, "labels": labels}).at("decoder.1.resid")
    assert rows.index.token.tolist() == [0, 7, 8, 9, 0, 7, 8]  # the start token is a pad token, and data
    out = captured(model, Batch({**batch, "labels": labels}, special=torch.zeros(2, 9)), special="out")
    assert out.at("decoder.1.resid").index.token.tolist() == [7, 8, 9, 7, 8]


# other inputs than text


def _other(name: str, **options: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**options)
    return getattr(transformers, f"{name}Model")(config).eval()  # type: ignore[no-any-return]


_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_SPEECH = {
    **_SMALL, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("name", ["Wav2Vec2", "Hubert"])
@pytest.mark.parametrize("stable", [False, True])
def test_speech_frames_count_where_their_whole_window_is_unpadded(name: str, stable: bool) -> None:
    norm = {"do_stable_layer_norm": stable, "feat_extract_norm": "layer" if stable else "group"}
    model = _other(name, **_SPEECH, **norm)
    mask = torch.ones(2, 200).long()
    mask[1, 120:] = 0
    batch = {"input_values": torch.randn(2, 200), "attention_mask": mask}
    rows = captured(model, batch).at("1.resid")
    frames = [((length - 10) // 5 + 1 - 3) // 2 + 1 for length in (200, 120)]
    assert rows.x.shape[0] == sum(frames)
    assert ("final" in find_layout(model).kinds) == stable
    verify(model, find_layout(model), batch)


def test_images_speech_spectra_and_state_spaces_are_verified() -> None:
    vision = _other("ViT", **_SMALL, image_size=16, patch_size=4)
    pixels = {"pixel_values": torch.randn(2, 3, 16, 16)}
    verify(vision, find_layout(vision), pixels)
    assert captured(vision, pixels).at("2.final").x.shape == (32, 32)  # the class tokens are apart
    sizes = {f"{s}_{k}": v for s in ("encoder", "decoder") for k, v in
             (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip
    ids = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3}
    whisper = _other("Whisper", vocab_size=60, d_model=32, max_source_positions=20, num_mel_bins=8, **sizes, **ids)
    spectra = {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": torch.randint(6, 60, (2, 5))}
    verify(whisper, find_layout(whisper), spectra)
    assert captured(whisper, spectra).at("encoder.1.resid").x.shape[0] == 40
    mamba = _other("Mamba", vocab_size=60, hidden_size=32, num_hidden_layers=2, state_size=4)
    verify(mamba, find_layout(mamba), {"input_ids": torch.randint(6, 60, (2, 5))})


@pytest.mark.parametrize("name", ["Deberta", "Longformer"])
def test_unusual_encoders_are_verified(name: str) -> None:
    options = {"attention_window": 4} if name == "Longformer" else {"relative_attention": True, "pos_att_type": ["c2p"]}
    model = _other(name, vocab_size=60, pad_token_id=1, max_position_embeddings=64, **_SMALL, **options)
    batch = inputs(model, 11, 7)
    verify(model, find_layout(model), batch)
    assert captured(model, batch).at("1.resid").x.shape[0] == 18
