"""Attention of speech and image models, in chunks, in windows and with reduced keys, as the model itself attends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anisoscope import measure
from anisoscope.capture import Capture, find_layout
from anisoscope.capture.attention_reader import partition
from anisoscope.capture.sites.site import CALLED_KINDS
from anisoscope.capture.verification import probabilities, verify
from support import references
from support.attending import CLOSE, attending, of_rows, softmaxes
from support.tiny_images import IMAGES, images
from support.tiny_media import MEDIA, PREFIX, media, media_inputs
from support.tiny_models import Record, captured, inputs, tiny

WINDOWED = {"image_size": 48, "patch_size": 4, "embed_dim": 8, "depths": [2, 2, 1], "num_heads": [2, 2, 4],
            "window_size": 3}  # fmt: skip


# speech and images; tests/capture/test_family.py has the text families
SCORED = sorted(set(MEDIA) - {"sew-d"})  # its scores are a sum of content and position products


@pytest.mark.parametrize("name", SCORED)
def test_scores_give_the_probabilities_of_speech_and_image_models(name: str) -> None:
    model, batch = media(name, attention="eager"), media_inputs(name)
    record, _ = attending(model, batch)
    with torch.inference_mode():
        output = model(**batch, output_attentions=True)
    stacks = find_layout(model).stacks
    assert len(record.calls) == sum(len(list(stack.sites(["scores", "cross_scores"]))) for stack in stacks) > 0
    for call in record.calls:
        kind = "cross_attentions" if call.site.kind == "cross_scores" else "attentions"
        prefix = "" if call.site.stack == "single" or "cross" in kind else f"{call.site.stack}_"
        theirs = getattr(output, prefix + kind)[call.site.layer - 1]
        ours = probabilities(call)
        if name.startswith("wavlm"):  # torch hands out the mean over heads
            ours = ours.mean(1, keepdim=True).expand_as(theirs)
        torch.testing.assert_close(of_rows(ours, call), of_rows(theirs, call), **CLOSE)


@pytest.mark.parametrize("name", SCORED)
def test_capturing_attention_changes_no_output_of_speech_and_image_models(name: str) -> None:
    model, batch = media(name), media_inputs(name)
    layout = find_layout(model)
    with torch.inference_mode():
        bare = model(**batch)[0]
        with Capture(model, layout.sites([k for k in layout.kinds if k in CALLED_KINDS]), Record()):
            seen = model(**batch)[0]
    assert torch.equal(bare, seen)


def test_gated_relative_bias_is_a_bias_and_no_part_of_queries_and_keys() -> None:
    model = media("wavlm")
    record, _ = attending(model, media_inputs("wavlm"))
    first = record.calls[0]
    assert first.bias is not None and float(first.bias.abs().max()) > 0.1
    table = measure(model, [media_inputs("wavlm")], sites=["scores"], metrics=["score_spread", "score_spread:bias=0"])
    one, two = (table.where(layer=1, head=0, variant=v).value(metric="score_spread") for v in ("", "bias=0"))
    assert one != pytest.approx(two, rel=1e-3)


@pytest.mark.parametrize("name", ["vit", "deit", "dinov2-registers"])
def test_class_tokens_are_keys_and_no_queries(name: str) -> None:
    record, _ = attending(media(name), media_inputs(name))
    query, call = record.at("1.query"), record.calls[0]
    assert query.x.shape[0] == record.at("1.key").x.shape[0] == 3 * 9
    assert call.key.shape[2] == 9 + PREFIX[name] and bool(call.allowed.all())
    assert int((call.index.keep % call.index.length).min()) == PREFIX[name]


# chunks, windows, reduced keys


@pytest.mark.parametrize("length", [21, 16, 6])
def test_chunks_of_characters_are_put_together(length: int) -> None:
    model = tiny("canine")  # chunks of 8 characters
    batch = inputs(model, length, max(5, length - 9))
    with softmaxes() as seen, torch.inference_mode():
        model(**batch)
    record, notes = attending(model, batch)
    call = next(call for call in record.calls if call.site.layer == 1)
    total = call.query.shape[2]
    blocks = [seen[i] for i in range(-(-total // 8))]
    theirs = torch.stack([torch.block_diag(*(b[i, h] for b in blocks)) for i in range(2) for h in range(4)])
    torch.testing.assert_close(of_rows(probabilities(call), call), of_rows(theirs.unflatten(0, (2, 4)), call), **CLOSE)
    assert record.at("1.query").x.shape[0] == int(batch["attention_mask"].sum())
    told = [note for note in notes if "chunks of 8 positions" in note]
    assert len(told) == (length > 8)
    assert not bool((call.allowed[1, 0] & (batch["attention_mask"][1] == 0)[None, :]).any())


def windowed(kind: str, **options: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**WINDOWED, **options})
    config._attn_implementation = "eager"
    model: nn.Module = getattr(transformers, f"{kind}Model")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize("size", [(48, 48), (44, 52)])
@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("kind", ["Swin", "Swinv2"])
def test_scores_within_windows_give_the_models_probabilities(kind: str, window: int, size: tuple[int, int]) -> None:
    model, batch = windowed(kind, window_size=window), {"pixel_values": images(2, size)}
    with softmaxes() as seen, torch.inference_mode():
        bare = model(**batch)[0]
    record, notes = attending(model, batch)
    with torch.inference_mode():
        assert torch.equal(bare, model(**batch)[0])
    assert len(record.calls) == len(seen) == 5
    for call, theirs in zip(record.calls, seen, strict=True):
        torch.testing.assert_close(of_rows(probabilities(call), call), of_rows(theirs, call), **CLOSE)
        assert call.query.shape[0] == 2 * call.windows
    assert any(f"windows of {window * window} positions" in note for note in notes)
    assert any("padding at the edge" in note for note in notes) == (size != (48, 48) or window == 2)
    assert any("temperature" in note for note in notes) == (kind == "Swinv2")
    assert not any("not verified" in note for note in verify(model, find_layout(model), batch, kinds=["scores"]))


@pytest.mark.parametrize("kind", ["Swin", "Swinv2"])
def test_queries_of_windows_are_put_back_where_they_belong_and_padding_is_left_out(kind: str) -> None:
    model: Any = windowed(kind)
    batch = {"pixel_values": images(2, (44, 52))}  # 11×13 positions in windows of 3×3, the second block shifted
    sites = find_layout(model).sites(["embed", "resid", "query", "key"], layers=[0, 1, 2])
    record = captured(model, batch, sites)
    for layer, before in ((1, "0.embed"), (2, "1.resid")):
        block = model.encoder.layers[0].blocks[layer - 1]
        x = record.at(before).x
        with torch.inference_mode():
            if kind == "Swin":
                theirs = block.attention.q_proj(block.layernorm_before(x)).unflatten(-1, (2, -1))
            else:  # cosine attention: of length 1, the temperature apart
                theirs = nn.functional.normalize(block.attention.self.query(x).unflatten(-1, (2, -1)), dim=-1)
        assert block.shift_size == layer - 1
        rows = record.at(f"{layer}.query")
        torch.testing.assert_close(rows.x, theirs, **CLOSE)
        assert rows.x.shape[0] == record.at(f"{layer}.key").x.shape[0] == 2 * 11 * 13
    assert partition(11, 13, size=3, shift=1).padded and not partition(12, 9, size=3, shift=1).padded


def test_rows_of_windows_count_as_rows_of_their_image() -> None:
    model, batch = windowed("Swin"), {"pixel_values": images(3, (48, 48))}
    metrics = ["attention_max", "attention_entropy", "first_key_mass"]
    table = measure(model, [batch], sites=["scores"], metrics=metrics, attention_rows=0)
    record, _ = attending(model, batch)
    call = record.calls[0]
    scores = call.scaling * call.query.double() @ call.key.double().mT + call.bias
    allowed = call.allowed.expand(len(scores), -1, *scores.shape[2:])
    places = [(i // 9, i % 9) for i in call.index.keep.tolist()]
    for head in range(2):
        rows = [references.attention_row(scores[w, head, i].numpy(), allowed[w, 0, i].numpy(), 0) for w, i in places]
        mean = np.nanmean(np.array(rows), axis=0)
        for metric, column in zip(metrics, (7, 0, 2), strict=True):
            (row,) = table.where(layer=1, head=head, metric=metric).records()
            assert row["value"] == pytest.approx(mean[column], rel=1e-5)
            assert (row["contexts"], row["n"]) == (3, 3 * 144)
    few = measure(model, [batch], sites=["scores"], metrics=metrics, attention_rows=5).where(layer=1, head=0)
    assert {row["n"] for row in few.records()} == {15}


def test_reduced_keys_are_said_to_be() -> None:
    import transformers

    kind, options, name = IMAGES["segformer"]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**options)
    config._attn_implementation = "eager"
    model, batch = getattr(transformers, name)(config).eval(), {"pixel_values": images(2, (128, 96))}
    record, notes = attending(model, batch)
    with torch.inference_mode():
        theirs = model(**batch, output_attentions=True).attentions
    for call, own in zip(record.calls, theirs, strict=True):
        torch.testing.assert_close(probabilities(call), own, **CLOSE)
    assert [len(record.at(f"1.{k}").x) for k in ("query", "key")] == [2 * 32 * 24, 2 * 4 * 3]
    assert "from layer 1 on 12 keys meet 768 queries: the model reduces its keys 8×8" in notes


def test_convolved_queries_and_keys_and_a_class_token_of_the_last_stage() -> None:
    import transformers

    kind, options, name = IMAGES["cvt"]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, kind)(**options)).eval()
    batch = {"pixel_values": images(2, (64, 48))}
    with softmaxes() as seen, torch.inference_mode():
        model(**batch)
    record, notes = attending(model, batch)
    assert len(record.calls) == len(seen) == 6
    for call, theirs in zip(record.calls, seen, strict=True):
        torch.testing.assert_close(probabilities(call), theirs, **CLOSE)
    assert call.bias is None  # the scaling is that of the whole width, and found
    assert call.scaling == pytest.approx(options["embed_dim"][-1] ** -0.5)
    last = record.at("6.query").x.shape[0]
    assert (call.query.shape[2], last) == (4 * 3 + 1, 2 * 4 * 3)
    assert "from layer 1 on 48 keys meet 192 queries: the model reduces its keys 2×2" in notes
