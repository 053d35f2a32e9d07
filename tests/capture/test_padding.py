"""Frames of speech: a row counts where its whole window is a recording, with a mask and without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anisoscope.capture import Capture, Site, find_layout
from anisoscope.capture.padding import REPEATED, convolved, squeezed, trusted
from anisoscope.errors import AnisoscopeError
from support.tiny_media import HONOURING, SAMPLES, SQUEEZED, media, media_inputs, mel_frames, padded_sound, sound, words
from support.tiny_models import Record, captured

STREAM = ["embed", "resid", "final"]
pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")  # of WavLM's own making


def _poisoned(convolutions: list[nn.Module], mask: Tensor) -> Tensor:
    """The rows that read no padding, by letting every padded position be NaN: [B, T'] bool."""
    x = torch.ones(mask.shape).where(mask.bool(), torch.nan)[:, None]
    for convolution in convolutions:
        settings = {"stride": convolution.stride, "padding": convolution.padding}
        x = nn.functional.conv1d(x, torch.ones(1, 1, *convolution.kernel_size), **settings)
    return x[:, 0].isfinite()


def _convolutions(model: Any) -> list[nn.Module]:
    body = getattr(model, "wav2vec2", getattr(model, "model", model))
    body = getattr(body, "feature_extractor", getattr(body, "encoder", body))
    return [part for part in body.modules() if isinstance(part, nn.Conv1d)]


@pytest.mark.parametrize("lengths", [(6000, 4100, 5999), (6000, 895, 894), (6000, 33, 1), (3600, 1279, 1278)])
@pytest.mark.parametrize("name", SAMPLES)
def test_frames_count_only_where_their_whole_window_is_unpadded(name: str, lengths: tuple[int, ...]) -> None:
    model, batch = media(name), padded_sound(sound(*lengths))
    batch |= words(len(lengths)) if name == "moonshine" else {}
    stack = find_layout(model).stacks[0]
    rows = captured(model, batch, [Site(0, "embed", stack.name)]).all[0]
    expected = _poisoned(_convolutions(model), batch["attention_mask"])
    assert expected.shape[1] == rows.index.length
    assert rows.index.keep.tolist() == expected.flatten().nonzero().flatten().tolist()
    assert not expected.all()


@pytest.mark.parametrize("name", SAMPLES)
def test_padding_changes_neither_the_number_of_frames_nor_their_names(name: str) -> None:
    model, clips = media(name), sound(6000, 4100)
    apart = find_layout(model).stacks[0].name
    sites = [site for site in find_layout(model).sites(STREAM) if site.stack == apart]
    extra = words(2) if name == "moonshine" else {}
    together = captured(model, padded_sound(clips) | extra, sites)
    alone = captured(model, {"input_values": clips[1][None]} | {k: v[1:] for k, v in extra.items()}, sites)
    for a, b in zip(together.all, alone.all, strict=True):
        second = a.index.context == b.index.context[0]
        assert int(second.sum()) == b.x.shape[0]
        assert torch.equal(a.index.position[second], b.index.position)
        if name in HONOURING:
            torch.testing.assert_close(a.x[second], b.x, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["wav2vec2-base", "moonshine"])
def test_a_norm_over_time_lets_padding_into_the_values(name: str) -> None:
    model, clips = media(name), sound(6000, 4100)  # why the law above names the models it is true of
    extra = words(2) if name == "moonshine" else {}
    site = [Site(0, "embed", find_layout(model).stacks[0].name)]
    together = captured(model, padded_sound(clips) | extra, site).all[0]
    alone = captured(model, {"input_values": clips[1][None]} | {k: v[1:] for k, v in extra.items()}, site).all[0]
    second = together.index.context == alone.index.context[0]
    assert not torch.allclose(together.x[second], alone.x, atol=1e-2)


@pytest.mark.parametrize("name", ["wav2vec2", "moonshine", "whisper"])
def test_without_the_mask_padding_would_count(name: str) -> None:
    model, batch = media(name), media_inputs(name)
    site = [Site(0, "embed", find_layout(model).stacks[0].name)]
    masked = captured(model, batch, site).all[0]
    noisy = {k: v for k, v in batch.items() if k != "attention_mask"}
    content = next(k for k in ("input_values", "input_features") if k in noisy)
    noisy[content] = noisy[content] + torch.randn_like(noisy[content])
    assert captured(model, noisy, site).all[0].x.shape[0] == 2 * masked.index.length > masked.x.shape[0]


def test_a_clip_shorter_than_one_window_has_no_frame() -> None:
    model, batch = media("wav2vec2"), padded_sound(sound(400, 20))
    rows = captured(model, batch, find_layout(model).sites(["embed"])).all[0]
    assert rows.index.context.unique().numel() == 1
    own = model._get_feature_vector_attention_mask(rows.index.length, batch["attention_mask"], add_adapter=False)
    assert own[1].all()  # the model's own mask would call every frame of it data


def test_an_adapter_has_windows_of_its_own() -> None:
    model, batch = media("wav2vec2-adapter"), padded_sound(sound(6000, 4100))
    record = captured(model, batch)
    resid, final = record.at("3.resid"), record.at("3.final")
    fine = torch.zeros(2, resid.index.length, dtype=torch.bool)
    fine.view(-1)[resid.index.keep] = True
    reads = nn.functional.conv1d((~fine).float()[:, None], torch.ones(1, 1, 3), stride=2, padding=1)[:, 0] == 0
    assert final.index.keep.tolist() == reads.flatten().nonzero().flatten().tolist()


# several frames to a row


@pytest.mark.parametrize("lengths", [(6000, 4100, 5999), (6000, 895, 894), (6000, 33, 1), (3610, 1279, 1278)])
@pytest.mark.parametrize("name", SQUEEZED)
def test_squeezed_rows_count_only_where_all_their_frames_are_unpadded(name: str, lengths: tuple[int, ...]) -> None:
    model, batch = media(name), padded_sound(sound(*lengths))
    record = captured(model, batch, find_layout(model).sites(STREAM))
    frames = _poisoned(_convolutions(model), batch["attention_mask"])
    groups = frames.shape[1] // 2
    pairs = frames[:, : 2 * groups].unflatten(1, (-1, 2)).all(2)
    for site in ("0.embed", "1.resid", "3.resid"):
        assert record.at(site).index.keep.tolist() == pairs.flatten().nonzero().flatten().tolist()
    spread = torch.zeros_like(frames)  # the end that fills an odd number of frames is no row
    spread[:, : 2 * groups] = pairs.repeat_interleave(2, 1)
    assert record.at("3.final").index.length == frames.shape[1]
    assert record.at("3.final").index.keep.tolist() == spread.flatten().nonzero().flatten().tolist()
    assert not pairs.all()


@pytest.mark.parametrize("name", SQUEEZED)
def test_squeezed_padding_changes_neither_the_number_of_rows_nor_the_rows(name: str) -> None:
    model, clips = media(name), sound(6000, 4100)
    sites = find_layout(model).sites(STREAM)  # 299 and 204 frames: one of the first is filled up behind the blocks
    together = captured(model, padded_sound(clips), sites)
    alone = [captured(model, {"input_values": clip[None]}, sites) for clip in clips]
    for a, b, c in zip(together.all, alone[0].all, alone[1].all, strict=True):
        assert len(a.x) == len(b.x) + len(c.x) < 2 * len(b.x)
        second = a.index.context == c.index.context[0]
        if a.site.kind == "embed":  # position convolutions and keys at the edge read what follows
            torch.testing.assert_close(a.x[second][:-8], c.x[:-8], atol=1e-4, rtol=1e-4)


def test_squeezed_windows_of_no_such_length_are_refused() -> None:
    with pytest.raises(AnisoscopeError, match="which no convolution"):
        squeezed(100, 7, [(3, 2, 0)], factor=2)


# masks of the model's own


def test_a_mask_of_the_models_own_that_keeps_padding_is_refused() -> None:
    real = torch.arange(6000) < torch.tensor([6000, 4100])[:, None]
    honest = torch.arange(299) < torch.tensor([299, 204])[:, None]
    assert torch.equal(trusted(honest, real), honest)
    for kept in (299, 250, 206):
        with pytest.raises(AnisoscopeError, match=f"keeps {kept} of 299 frames .* 4100 of 6000 positions are data"):
            trusted(torch.arange(299) < torch.tensor([299, kept])[:, None], real)


def test_sew_without_its_windows_is_refused_rather_than_wrong() -> None:
    model, batch = media("sew"), padded_sound(sound(6000, 4100))
    layout = find_layout(model)
    bare = replace(layout, stacks=(replace(layout.stacks[0], windows=None),))
    own = model._get_feature_vector_attention_mask(149, batch["attention_mask"])
    assert own.all()  # what the model says of rows that it does not have in mind
    with pytest.raises(AnisoscopeError, match="padding would be counted"):
        captured(model, batch, bare.sites(["resid"]), layout=bare)
    full = {"input_values": batch["input_values"], "attention_mask": torch.ones(2, 6000, dtype=torch.long)}
    assert len(captured(model, full, bare.sites(["resid"]), layout=bare).at("1.resid").x) == 2 * 149


@pytest.mark.parametrize("lengths", [(80, 43), (80, 44), (12, 1), (5, 2)])
def test_whisper_rows_count_only_where_every_mel_frame_they_read_is_real(lengths: tuple[int, ...]) -> None:
    model = media("whisper-generating")
    batch = {**mel_frames(*lengths), **words(2)}
    record = captured(model, batch)
    expected = _poisoned(_convolutions(model), batch["attention_mask"])
    for kind in ("0.embed", "2.resid", "2.final"):
        rows = record.at(f"encoder.{kind}")
        assert rows.index.keep.tolist() == expected.flatten().nonzero().flatten().tolist()
    assert record.at("decoder.1.resid").x.shape[0] == 11  # tokens, whatever the audio is padded to


def test_patches_of_a_spectrogram_count_only_where_they_are_real() -> None:
    model, batch = media("ast"), media_inputs("ast")
    batch["input_values"][1, 25:] = 0.3
    mask = torch.ones(2, 40)
    mask[1, 25:] = 0
    record = captured(model, batch)
    x = torch.ones(2, 1, 16, 40).where(mask[:, None, None].bool(), torch.nan)
    expected = nn.functional.conv2d(x, torch.ones(1, 1, 8, 8), stride=4).isfinite().flatten(1)
    rows = record.at("1.resid")
    position = torch.stack([rows.index.keep // rows.index.length, rows.index.keep % rows.index.length - 2], 1)
    assert position.tolist() == expected.nonzero().tolist()
    assert captured(model, batch, find_layout(model).sites(["cls"])).at("1.cls").x.shape[0] == 2


def test_windows_of_frames_that_no_convolution_makes_are_refused() -> None:
    with pytest.raises(AnisoscopeError, match="which no convolution"):
        convolved(100, 7, [(3, 2, 0)])


# padding that no mask speaks of


@pytest.mark.parametrize("value", [0.0, 0.37])  # as it is padded, and after the padded clip was normalised
def test_an_end_of_one_exact_value_is_padding_with_a_note(value: float) -> None:
    model, clips = media("wav2vec2-base"), sound(6000, 4100)
    batch = padded_sound(clips)
    silent = {"input_values": batch["input_values"].where(batch["attention_mask"].bool(), value)}
    sites, record = find_layout(model).sites(["embed"]), Record()
    with Capture(model, sites, record) as capture:
        capture.run(silent)
        capture.run(silent)
    assert capture.notes == [REPEATED]
    assert torch.equal(record.all[0].index.keep, captured(model, batch, sites).all[0].index.keep)


def test_a_short_silence_a_quiet_recording_and_a_mask_are_believed() -> None:
    model = media("wav2vec2-base")
    sites = find_layout(model).sites(["embed"])
    short, quiet = padded_sound(sound(6000, 6000 - 1599)), padded_sound(sound(6000, 4100))
    quiet["input_values"] += 1e-6 * torch.randn(2, 6000)
    given = padded_sound(sound(6000, 4100)) | {"attention_mask": torch.ones(2, 6000, dtype=torch.long)}
    for batch in ({"input_values": short["input_values"]}, {"input_values": quiet["input_values"]}, given):
        record = Record()
        with Capture(model, sites, record) as capture:
            capture.run(batch)
        assert not capture.notes
        assert record.all[0].x.shape[0] == 2 * record.all[0].index.length


def test_mel_frames_at_the_floor_are_padding_with_a_note() -> None:
    model = media("whisper")
    with_mask = {**mel_frames(80, 43), **words(2)}
    without = {k: v for k, v in with_mask.items() if k != "attention_mask"}
    record = Record()
    with Capture(model, find_layout(model).sites(STREAM), record) as capture:
        capture.run(without)
    assert capture.notes == [REPEATED]
    expected = captured(model, with_mask)
    for rows in record.all:
        assert torch.equal(rows.index.keep, expected.at(str(rows.site)).index.keep)
