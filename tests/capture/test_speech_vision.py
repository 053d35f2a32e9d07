"""Speech and vision: rows are the model's own frames and patches, padding is no frame, class tokens are apart."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anisoscope
from anisoscope.capture import Capture, Site, find_layout
from anisoscope.capture.verification import verify
from anisoscope.errors import AnisoscopeError
from support.tiny_media import IMAGES, MEDIA, PREFIX, media, media_inputs, words
from support.tiny_models import FAMILIES, Record, captured, padded, tiny

ALL = sorted(MEDIA)
POST_NORM = {"wav2vec2-base", "hubert-base", "wavlm-base", "data2vec-audio", "sew", "sew-d"}
STREAM = ["embed", "resid", "final"]
pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")  # of WavLM's own making


def _own(output: Any, stack: str, what: str) -> Any:
    return getattr(output, what if stack == "single" else f"{stack}_{what}")


def _kept(x: Tensor, index: Any) -> Tensor:
    return x.flatten(0, 1)[index.keep]


def _at(stack: str, layer: int, kind: str) -> str:
    return str(Site(layer, kind, stack))


# the rows are the model's own


@pytest.mark.parametrize("name", ALL)
def test_rows_equal_the_models_own_hidden_states(name: str) -> None:
    model, batch = media(name), media_inputs(name)
    layout = find_layout(model)
    record = captured(model, batch)
    with torch.inference_mode():
        output = model(**batch, output_hidden_states=True)
    for stack in layout.stacks:
        hidden = _own(output, stack.name, "hidden_states")
        assert len(hidden) == stack.depth + 1
        for layer, theirs in enumerate(hidden[:-1]):
            ours = record.at(_at(stack.name, layer, "resid" if layer else "embed"))
            torch.testing.assert_close(ours.x, _kept(theirs, ours.index), atol=1e-5, rtol=1e-5)
        finals = [record.at(_at(stack.name, stack.depth, kind)) for kind in ("resid", "final") if _has(stack, kind)]
        assert any(_equals(rows, hidden[-1]) for rows in finals)


def _has(stack: Any, kind: str) -> bool:
    return kind != "final" or bool(stack.has_norm)


def _equals(rows: Any, theirs: Tensor) -> bool:
    return theirs.shape[1] == rows.index.length and torch.allclose(rows.x, _kept(theirs, rows.index), atol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_verify_accepts_what_was_found(name: str) -> None:
    model = media(name)
    notes = verify(model, find_layout(model), media_inputs(name))
    assert not any("not verified" in note or "rest on their names" in note for note in notes)


@pytest.mark.parametrize("name", sorted(set(ALL) - POST_NORM))
def test_what_sublayers_add_sums_to_the_stream(name: str) -> None:
    model = media(name)
    layout = find_layout(model)
    stack = layout.stacks[0]
    record = captured(model, media_inputs(name), layout.sites(["embed", "resid", "attn_out", "mlp_out"]))
    for layer in range(1, stack.depth + 1):
        before = record.at(_at(stack.name, layer - 1, "resid" if layer > 1 else "embed")).x
        added = [record.at(_at(stack.name, layer, kind)).x for kind in ("attn_out", "mlp_out")]
        after = record.at(_at(stack.name, layer, "resid")).x
        torch.testing.assert_close(before + sum(added), after, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(before, after, atol=1e-2)


def test_weights_that_scale_a_sublayer_are_part_of_what_it_adds() -> None:
    model = media("beit")  # without its scales the sum above would not hold
    layout = find_layout(model)
    record = captured(model, media_inputs("beit"), layout.sites(["attn_out"]), modules=["layers.0.attention"])
    with torch.inference_mode():
        scaled = record.at("0.layers.0.attention").x * model.layers[0].lambda_1
    assert not torch.allclose(model.layers[0].lambda_1, torch.ones(32))
    torch.testing.assert_close(record.at("1.attn_out").x, scaled[[i for i in range(30) if i % 10]])


# patches, and what is no patch


@pytest.mark.parametrize("name", sorted(PREFIX))
def test_class_tokens_are_rows_of_their_own_and_no_patches(name: str) -> None:
    model, batch = media(name), media_inputs(name)
    layout = find_layout(model)
    sites = layout.sites(["embed", "resid", "cls"])
    record = captured(model, batch, sites)
    with torch.inference_mode():
        hidden = model(**batch, output_hidden_states=True).hidden_states
    assert layout.stacks[0].prefix == PREFIX[name]
    for layer, whole in enumerate(hidden[:-1]):
        patches = record.at(f"{layer}.{'resid' if layer else 'embed'}")
        torch.testing.assert_close(patches.x, whole[:, PREFIX[name] :].flatten(0, 1), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(record.at(f"{layer}.cls").x, whole[:, 0], atol=1e-5, rtol=1e-5)
        assert patches.index.position.max() == whole.shape[1] - PREFIX[name] - 1
    if name in IMAGES:
        assert patches.x.shape[0] == 3 * 9


def test_a_prefix_that_is_not_known_would_be_counted() -> None:
    model = media("deit")  # so that the law above is not empty
    layout = find_layout(model)
    bare = replace(layout, stacks=(replace(layout.stacks[0], prefix=0),))
    rows = captured(model, media_inputs("deit"), bare.sites(["resid"]), layout=bare).at("1.resid")
    assert rows.x.shape[0] == 3 * (9 + 2)


@pytest.mark.parametrize("name", ["vit", "dinov2-registers"])
def test_queries_of_class_tokens_are_left_out_and_their_keys_stay(name: str) -> None:
    model = media(name)
    record = captured(model, media_inputs(name), find_layout(model).sites(["query", "key", "scores"]))
    assert record.at("2.query").x.shape[0] == record.at("2.key").x.shape[0] == 3 * 9
    for call in record.calls:
        assert call.key.shape[2] == 9 + PREFIX[name]  # a patch attends to the class token, too
        assert (call.index.keep % call.index.length).min() == PREFIX[name]


def test_images_of_other_sizes_give_other_numbers_of_patches() -> None:
    model, record = media("vit"), Record()
    with Capture(model, find_layout(model).sites(["resid", "cls"]), record) as capture:
        for size in (24, 32):
            capture.run({"pixel_values": torch.randn(2, 3, size, size), "interpolate_pos_encoding": True})
    counts = [rows.x.shape[0] for rows in record.all if str(rows.site) == "1.resid"]
    assert counts == [2 * 9, 2 * 16]
    assert {rows.x.shape[0] for rows in record.all if rows.site.kind == "cls"} == {2}


def test_special_tokens_cannot_be_among_patches_and_frames() -> None:
    for name in ("vit", "wav2vec2"):
        model, batch = media(name), media_inputs(name)
        sites = find_layout(model).sites(["resid"])
        plain, out = (captured(model, batch, sites, special=special).at("1.resid") for special in ("in", "out"))
        assert torch.equal(plain.x, out.x)
    model = tiny("bert")
    with pytest.raises(AnisoscopeError, match="nothing says which"):  # tokens must be told apart by someone
        captured(model, padded([torch.arange(6, 12)]), special="out")


# two sides


def _two(kind: str) -> tuple[Any, dict[str, Tensor]]:
    import transformers

    side = {"vision": "vit", "speech": "wav2vec2"}[kind]
    decoder = transformers.BertConfig(**FAMILIES["bert"][1], is_decoder=True, add_cross_attention=True)
    encoder = getattr(transformers, MEDIA[side][0])(**MEDIA[side][1])
    name = f"{kind.title()}EncoderDecoder"
    config = getattr(transformers, f"{name}Config").from_encoder_decoder_configs(encoder, decoder)
    torch.manual_seed(0)
    batch = media_inputs(side)
    return getattr(transformers, f"{name}Model")(config=config).eval(), batch | words(len(next(iter(batch.values()))))


@pytest.mark.parametrize("kind", ["vision", "speech"])
def test_two_models_in_one_have_their_sides_apart(kind: str) -> None:
    model, batch = _two(kind)
    layout = find_layout(model)
    verify(model, layout, batch)
    record = captured(model, batch)
    assert [(stack.name, stack.prefix) for stack in layout.stacks] == [
        ("encoder", int(kind == "vision")),
        ("decoder", 0),
    ]
    alone = captured(model.encoder, {k: v for k, v in batch.items() if not k.startswith("decoder")})
    torch.testing.assert_close(record.at("encoder.2.resid").x, alone.at("2.resid").x, atol=1e-5, rtol=1e-5)
    assert record.at("decoder.2.resid").x.shape[0] == int(batch["decoder_attention_mask"].sum())


@pytest.mark.parametrize("name", ["whisper", "moonshine"])
def test_without_tokens_for_the_decoder_the_encoder_is_measured_and_that_is_said(name: str) -> None:
    model, batch = media(name), media_inputs(name)
    heard = {k: v for k, v in batch.items() if not k.startswith("decoder")}
    layout, record = find_layout(model), Record()
    with Capture(model, layout.sites(), record) as capture:
        capture.run(heard)
        assert {rows.site.stack for rows in record.all} == {"encoder"}
        capture.run(batch)
        assert {rows.site.stack for rows in record.all} == {"encoder", "decoder"}
    assert [note for note in capture.notes if "its encoder alone was measured" in note] == capture.notes
    first, second = (rows for rows in record.all if str(rows.site) == "encoder.1.resid")
    torch.testing.assert_close(first.x, second.x)
    decoder = [site for site in layout.sites() if site.stack == "decoder"]
    with pytest.raises(AnisoscopeError, match=r"no decoder_input_ids .* start token alone"):
        captured(model, heard, decoder)


# measuring


@pytest.mark.parametrize("name", ALL)
def test_measuring_needs_no_options(name: str) -> None:
    model = media(name)
    metrics = None if name in ("vit", "whisper") else ["average_cosine", "drift", "attention_entropy"]
    table = anisoscope.measure(model, [media_inputs(name)], metrics=metrics)
    for stack in find_layout(model).stacks:
        found = [r for r in table.records() if r["metric"] == "average_cosine" and r["stack"] == stack.name]
        assert {r["layer"] for r in found if r["kind"] in ("embed", "resid")} == set(range(stack.depth + 1))
        assert all(r["value"] is not None for r in found if r["kind"] in ("embed", "resid"))


# real weights and real speech


def _real(name: str) -> Path:
    places = [Path(os.environ["ANISOSCOPE_REAL"])] if "ANISOSCOPE_REAL" in os.environ else []
    places.append(Path(__file__).resolve().parents[3] / "shared" / "models")
    found = [place / name for place in places if (place / name).exists()]
    return found[0] if found else pytest.skip(f"the weights of {name} are not here (ANISOSCOPE_REAL=folder of models)")


def _recording(name: str) -> Tensor:
    """A recording of the optional package as 16,000 samples a second."""
    soundfile, signal = pytest.importorskip("soundfile"), pytest.importorskip("scipy.signal")
    package = importlib.util.find_spec("moonshine_voice")
    if package is None or package.origin is None:
        pytest.skip("the optional package moonshine_voice is not installed")
    x, rate = soundfile.read(Path(package.origin).parent / "assets" / name)
    common = gcd(16_000, rate)
    return torch.tensor(signal.resample_poly(x, 16_000 // common, rate // common), dtype=torch.float32)


def _brute(x: Tensor) -> float:
    """The mean cosine over all pairs of distinct rows, written out."""
    unit = nn.functional.normalize(x.double(), dim=1)
    pairs = unit @ unit.T
    return float((pairs.sum() - pairs.diagonal().sum()) / (len(x) * (len(x) - 1)))


@pytest.mark.slow
def test_real_whisper_on_real_speech_equals_brute_force() -> None:
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    folder = _real("whisper-tiny-en")
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    extract = WhisperFeatureExtractor.from_pretrained(folder)
    clips = [_recording("two_cities.wav")[: 30 * 16_000].numpy(), _recording("beckett.wav").numpy()]
    batch = dict(extract(clips, sampling_rate=16_000, return_tensors="pt", return_attention_mask=True))
    batch["decoder_input_ids"] = torch.tensor([[50257, 50362]]).expand(2, -1)
    layout = find_layout(model)
    first = {k: v[:1] for k, v in batch.items()}
    verify(model, layout, first)
    table = anisoscope.measure(model, [first], sites=STREAM, metrics=["average_cosine"])
    whole = [r for r in table.records() if r["stack"] == "encoder" and r["head"] is None and not r["variant"]]
    values = {(r["layer"], r["kind"]): r["value"] for r in whole}
    published = {(0, "embed"): 0.447, (1, "resid"): 0.661, (2, "resid"): 0.642, (3, "resid"): 0.559,
                 (4, "final"): 0.089}  # fmt: skip
    assert {at: values[at] for at in published} == pytest.approx(published, abs=2e-3)
    with torch.inference_mode():
        alone = model.model.encoder(first["input_features"], output_hidden_states=True).hidden_states
        hidden = model.model.encoder(batch["input_features"], output_hidden_states=True).hidden_states
    for site, x in zip(published, alone, strict=True):  # 30 s without padding: all 1,500 frames are rows
        assert values[site] == pytest.approx(_brute(x[0]), abs=1e-9)
    record = captured(model, batch, layout.sites(STREAM))
    frames = int(batch["attention_mask"][1].sum())
    rows = record.at("encoder.4.final")
    assert rows.x.shape[0] == 1500 + (frames - 1) // 2  # the last of 9.96 s reads beyond the end
    torch.testing.assert_close(rows.x[1500:], hidden[-1][1, : (frames - 1) // 2], atol=1e-4, rtol=1e-4)
    assert abs(_brute(rows.x[1500:]) - _brute(hidden[-1][1])) > 0.05  # padding would have moved the number
