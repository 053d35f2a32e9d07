"""Models that hear or see where they are unlike models of text: pools, short decoders, counts, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anisoscope
from anisoscope import profile, sweep
from anisoscope.capture import find_layout
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.compare import compare
from anisoscope.measurement.profile import PeakMemory
from anisoscope.models.load import load_model
from support.tiny_images import tiny_images
from support.tiny_listeners import feed_of, loaded, make_model, make_pictures, make_sounds

QUICK: dict[str, Any] = {"metrics": ("drift", "average_cosine"), "device": "cpu", "tokens": 300, "report": False}
TINY = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=48"


def fresh(spec: str) -> Any:
    return load_model(spec, random_init=True, device="cpu")


# pools


def drift(table: Any, layer: int) -> float:
    (row,) = table.where(metric="drift", kind="resid", layer=layer, variant="", group="").records()
    return float(row["value"])


@pytest.mark.parametrize("name", ["vit", "dinov2"])
def test_the_pool_of_the_class_token_takes_its_very_row(tmp_path: Path, name: str) -> None:
    path = make_model(tmp_path / name, name)
    table = profile(str(path), out=tmp_path / "run", sites=("resid",), pool="cls", **QUICK)
    model = loaded(path)
    batches = [dict(b.inputs) for b in feed_of(model, tokens=300).batches()]
    with torch.no_grad():
        hidden = [model.model(**batch, output_hidden_states=True).hidden_states for batch in batches]
    for layer in (1, 2):
        rows = torch.cat([states[layer] for states in hidden]).double()
        assert drift(table, layer) == pytest.approx(float(rows[:, 0].mean(0).norm()), rel=1e-5)
        assert drift(table, layer) != pytest.approx(float(rows[:, 1].mean(0).norm()), rel=1e-3)
    own = anisoscope.measure(model.model, batches, sites="resid", metrics="drift", pool="cls")
    assert drift(own, 2) == pytest.approx(drift(table, 2), rel=1e-6)


@pytest.mark.parametrize(("spec", "pool", "why"), [
    (f"siglip_vision_model:{TINY},image_size=32,patch_size=8", "cls", "it has no class token"),
    ("resnet:embedding_size=8,hidden_sizes=[8,16],depths=[1,1],layer_type=basic", "cls", "it has no class token"),
    (f"vit:{TINY},image_size=32,patch_size=8", "last", "no position is the last of a text"),
])  # fmt: skip
def test_a_pool_that_takes_no_row_of_its_own_is_refused(spec: str, pool: str, why: str) -> None:
    model = fresh(spec).model
    pixels = [{"pixel_values": torch.rand(2, 3, 32, 32)}]
    with pytest.raises(AnisoscopeError, match=f"pool='{pool}' means nothing for .*: {why}"):
        anisoscope.measure(model, pixels, metrics="drift", pool=pool)
    assert anisoscope.measure(model, pixels, metrics="drift", pool="mean").records()


def test_layers_before_the_class_token_are_left_out_of_its_pool() -> None:
    model, pixels = tiny_images("cvt"), torch.rand(3, 3, 64, 64)
    table = anisoscope.measure(model, [{"pixel_values": pixels}], sites="resid", metrics="drift", pool="cls")
    assert {row["layer"] for row in table.records()} == {4, 5, 6}
    with torch.no_grad():
        token = model(pixels).cls_token_value[:, 0].double()
    assert drift(table, 6) == pytest.approx(float(token.mean(0).norm()), rel=1e-5)
    assert any("without a class token are left out" in note for note in table.about["models"][0]["notes"])


def test_pools_of_text_are_as_ever() -> None:
    model = fresh("gpt2:n_layer=1,n_embd=16,n_head=2,vocab_size=300").model
    ids = torch.randint(0, 300, (4, 8))
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states[0].double()
    for pool, at in (("cls", 0), ("last", -1)):
        table = anisoscope.measure(model, [ids], sites="embed", metrics="drift", pool=pool)
        (row,) = table.where(metric="drift", variant="").records()
        assert row["value"] == pytest.approx(float(states[:, at].mean(0).norm()), rel=1e-5)


# short decoders


@pytest.mark.parametrize("positions", [32, 6])
def test_a_whisper_with_few_positions_is_profiled_and_swept(tmp_path: Path, positions: int) -> None:
    path = make_model(tmp_path / "series" / "checkpoint-1", "whisper", max_target_positions=positions)
    sounds = make_sounds(tmp_path / "sounds", (1.5, 2.0))
    words = {**QUICK, "data": str(sounds), "seconds": 1.5}
    table = profile(str(path), out=tmp_path / "run", **words)
    decoded = table.where(metric="drift", stack="decoder", kind="resid", layer=2).records()
    assert decoded and 2 <= decoded[0]["n"] <= 2 * positions
    assert sweep(str(tmp_path / "series"), out=tmp_path / "swept", **words).records()


# counts


@pytest.mark.parametrize("name", ["whisper", "wav2vec2", "moonshine"])
def test_rows_are_counted_alike_everywhere(tmp_path: Path, name: str) -> None:
    path = make_model(tmp_path / "series" / "checkpoint-1", name)
    sounds = make_sounds(tmp_path / "sounds", (1.9, 0.61, 1.23, 0.777, 1.111))
    words = {**QUICK, "tokens": 100_000, "data": str(sounds), "seconds": 1.9}
    table = profile(str(path), out=tmp_path / "run", **words)
    (entry,) = table.about["models"]
    counted = {
        r["n"] for r in table.where(metric="drift", kind="resid", variant="").records() if r["stack"] != "decoder"
    }
    assert counted == {entry["row_count"]} == {entry["data"]["tokens"]}
    assert any(f"ended after {entry['row_count']:,} of the 100,000 frames" in note for note in entry["notes"])
    swept = sweep(str(tmp_path / "series"), out=tmp_path / "swept", **words).about
    assert any(f"ended after {entry['row_count']:,} of" in note for note in swept["warnings"])


def test_enough_data_is_not_said_to_have_ended(tmp_path: Path) -> None:
    path = make_model(tmp_path / "whisper", "whisper")
    sounds = make_sounds(tmp_path / "sounds", (0.61, 1.9, 1.23, 0.777, 1.9, 1.9, 1.9))
    table = profile(str(path), out=tmp_path / "run", **{**QUICK, "tokens": 150, "data": str(sounds), "seconds": 1.9})
    (entry,) = table.about["models"]
    assert entry["data"]["contexts"] < 7
    assert not any("the data ended" in note for note in entry["notes"])


def test_the_peak_of_memory_is_known_between_two_looks() -> None:
    peak = PeakMemory()
    held = peak.process.memory_info().rss
    size = max(0, peak._before - held) + (256 << 20)  # more than the process ever held
    large: np.ndarray | None = np.ones(size, np.uint8)
    large = None
    assert large is None and peak.process.memory_info().rss < held + size - (64 << 20)
    assert peak.look() >= held + size - (64 << 20)
    later = PeakMemory()
    assert later.look() < held + size - (64 << 20), "what was held before does not count"


def test_the_peak_of_memory_is_that_of_the_process_and_not_of_the_one_that_started_it() -> None:
    code = """if True:
        import numpy
        from anisoscope.measurement.profile import PeakMemory
        peak = PeakMemory()
        held = peak.process.memory_info().rss
        numpy.ones(256 << 20, numpy.uint8)
        print(peak.look() - held)"""
    large = np.ones(2 << 30, np.uint8)  # more than the other process ever holds
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    del large
    assert (192 << 20) < int(found.stdout) < (512 << 20)


# compared


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    sounds, pictures = make_sounds(folder / "sounds"), make_pictures(folder / "pictures")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    words = {"vit": pictures, "resnet": pictures, "wav2vec2": sounds, "whisper": sounds}
    for name, data in words.items():
        make_model(folder / "models" / name, name)
        profile(str(folder / "models" / name), out=folder / name, **{**QUICK, "data": str(data)})
    text = {**QUICK, "data": str(folder / "text.txt"), "random_init": True}
    t5 = "t5:d_model=32,d_kv=8,d_ff=48,num_layers=2,num_decoder_layers=2,num_heads=4,vocab_size=300"
    profile(t5, out=folder / "t5", **text)
    profile(f"bert:{TINY},vocab_size=300", out=folder / "bert", **text)
    profile("gpt2:n_layer=2,n_embd=32,n_head=2,vocab_size=300", out=folder / "gpt2", **text)
    return folder


@pytest.mark.parametrize(("first", "second", "words"), [
    ("vit", "wav2vec2", "vit reads images and wav2vec2 reads audio, so their rows cannot be compared"),
    ("whisper", "bert", "whisper reads audio and bert reads text, so their rows cannot be compared"),
    ("wav2vec2", "t5", "wav2vec2 reads audio and t5 reads text, so their rows cannot be compared"),
])  # fmt: skip
def test_rows_of_different_data_are_not_compared(runs: Path, first: str, second: str, words: str) -> None:
    with pytest.raises(AnisoscopeError, match=words):
        compare(str(runs / first), str(runs / second))


@pytest.mark.parametrize(("first", "second", "stack"), [
    ("t5", "bert", "encoder"), ("gpt2", "t5", "decoder"), ("whisper", "wav2vec2", "encoder"),
    ("whisper", "gpt2", "decoder"), ("whisper", "t5", "decoder"),
])  # fmt: skip
def test_a_plain_model_is_compared_with_the_side_that_does_the_same(
    runs: Path, first: str, second: str, stack: str
) -> None:
    found = compare(str(runs / first), str(runs / second))
    assert {row["stack"] for row in found.rows} == {stack}
    if "t5" in (first, second) and "whisper" in (first, second):
        assert found.notes[0] == "no encoder: that of whisper reads audio, that of t5 text"
    else:
        assert f"is compared with the {stack} of" in found.notes[0]


def test_patches_and_positions_of_a_map_are_told_apart(runs: Path) -> None:
    found = compare(str(runs / "vit"), str(runs / "resnet"))
    said = "rows are of different kinds: one patch of an image of vit, one position of a feature map of resnet"
    assert found.notes[0] == said
    assert not any("kinds" in note for note in compare(str(runs / "vit"), str(runs / "vit")).notes)


def test_a_run_of_one_model_is_called_so(runs: Path) -> None:
    with pytest.raises(AnisoscopeError, match=r"holds 1 model; expected 2, or name a second run"):
        compare(str(runs / "whisper"))


# refused


def test_models_whose_attention_reads_parts_of_a_map_have_their_stages_and_refuse_queries_with_the_reason() -> None:
    model = fresh("mobilevit:hidden_sizes=[32,48,64],num_attention_heads=2,image_size=64").model
    with pytest.raises(AnisoscopeError, match=r"MobileViTModel has no site 'query' .*a patch apart.*; it has embed, "):
        find_layout(model).sites(["query"])
    pixels = [{"pixel_values": torch.rand(2, 3, 64, 64)}]
    assert anisoscope.measure(model, pixels, sites="stage", metrics="drift").records()


def test_two_models_side_by_side_are_named() -> None:
    with pytest.raises(AnisoscopeError, match="--random-init takes clip_vision_model or clip_text_model"):
        fresh("clip")
    assert fresh(f"clip_vision_model:{TINY},image_size=32,patch_size=8").modality.name == "vision"


def test_a_model_of_videos_is_refused_as_such() -> None:
    with pytest.raises(AnisoscopeError, match="videomae reads videos, which are not supported as data"):
        feed_of(fresh(f"videomae:{TINY},image_size=32"))
    feed_of(fresh(f"vit:{TINY},image_size=32"))
