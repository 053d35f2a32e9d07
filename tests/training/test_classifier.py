"""Models of pictures and sounds: they learn, they are interrupted without loss, and nothing of their data is padded."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anisoscope.data.synthetic import make_clip, make_picture
from anisoscope.errors import AnisoscopeError
from anisoscope.results.folder import RunFolder
from anisoscope.results.modality import Medium
from anisoscope.training import classifier
from anisoscope.training.classifier import (
    KINDS,
    MediaConfig,
    MediaStream,
    media_model,
    media_stream,
    train_media,
)
from anisoscope.training.examples import Examples, prepare_examples
from anisoscope.training.pictures import PICTURES, square
from anisoscope.training.sounds import RATE, SOUNDS, frames
from support.tiny_runs import Seen, losses, weights

SIZES: dict[str, Any] = {"layers": 3, "width": 16, "heads": 2, "size": 16, "patch": 4, "seconds": 0.25}
TINY: dict[str, Any] = {**SIZES, "steps": 6, "batch_size": 4, "examples": 60, "device": "cpu", "checkpoints": "every:2"}
KIND: dict[str, dict[str, Any]] = {
    "images": {"kind": PICTURES, "extent": 16},
    "audio": {"kind": SOUNDS, "extent": 0.25},
}
_MODALITIES = {"vit": "vision", "wav2vec2": "speech"}
_MODALITIES |= dict.fromkeys(("convnext", "resnet", "efficientnet"), "convolution")
SAMPLES = round(0.25 * RATE)


def tiny(arch: str = "vit", **more: Any) -> MediaConfig:
    return MediaConfig(**{**TINY, "arch": arch, **more})


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Examples of both kinds, made once."""
    folder = tmp_path_factory.mktemp("examples")
    for medium, kind in KIND.items():
        prepare_examples("embedded", folder / medium, **kind, most=60)
    return {arch: folder / kind.modality.medium.name for arch, kind in KINDS.items()}


def examples(folder: Path, medium: str = "images", data: str = "embedded", most: int = 60) -> Examples:
    return prepare_examples(data, folder, **KIND[medium], most=most)


# -- data --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("medium", ["images", "audio"])
def test_every_class_is_split_and_no_example_is_on_both_sides(tmp_path: Path, medium: str) -> None:
    found = examples(tmp_path / "e", medium)
    assert len(found.classes) == 10 and len(found.labels) == 60
    for label in range(10):
        mine = found.held_out[found.labels == label]
        assert mine.any() and not mine.all()
    seen = [value.tobytes() for value in found.values]
    assert len(set(seen)) == len(seen)
    value, label = (make_picture(7, size=16) if medium == "images" else make_clip(7, seconds=0.25))[:2]
    value = value if medium == "images" else np.rint(value * 32767).astype(np.int16)
    mine = [found.classes[found.labels[i]] for i, raw in enumerate(seen) if raw == value.tobytes()]
    assert mine == [f"{label:02d}"], "each keeps its class"


def test_repeated_pictures_count_once_and_are_told(tmp_path: Path) -> None:
    images = np.stack([make_picture(index, size=16)[0] for index in (0, 1, 2, 3, 0, 1)])
    np.savez(tmp_path / "six.npz", images=images, labels=np.array([0, 1, 0, 1, 0, 1]))
    found = examples(tmp_path / "e", data=str(tmp_path / "six.npz"))
    assert len(found.labels) == 4 and found.about["repeated"] == 2
    np.savez(tmp_path / "four.npz", images=images[:4], labels=np.array([0, 1, 0, 1]))
    assert examples(tmp_path / "f", data=str(tmp_path / "four.npz")).about["repeated"] == 0


def write_idx(path: Path, array: np.ndarray) -> None:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    raw = head + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnists_files_are_read(tmp_path: Path, suffix: str) -> None:
    images = np.random.default_rng(0).integers(0, 256, (12, 28, 28))
    write_idx(tmp_path / f"train-images-idx3-ubyte{suffix}", images)
    write_idx(tmp_path / f"train-labels-idx1-ubyte{suffix}", np.arange(12) % 3)
    found = prepare_examples(str(tmp_path), tmp_path / "e", kind=PICTURES, extent=28, most=99)
    assert found.classes == ["0", "1", "2"]
    stored = {value[:, :, 0].tobytes() for value in found.values}
    assert stored == {image.astype(np.uint8).tobytes() for image in images}


def test_folders_of_pictures_are_classes_and_sizes_may_differ(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name, size in (("cat", (20, 31)), ("dog", (40, 16))):
        (tmp_path / "in" / name).mkdir(parents=True)
        for index in range(4):
            pixels = make_picture(index, size=max(size))[0][: size[0], : size[1]]
            image.fromarray(pixels).save(tmp_path / "in" / name / f"{index}.png")
    found = examples(tmp_path / "e", data=str(tmp_path / "in"))
    assert found.classes == ["cat", "dog"] and found.values.shape == (8, 16, 16, 3)


def test_a_square_is_cut_from_the_middle_and_nothing_is_added() -> None:
    image = np.full((16, 30, 3), 7, np.uint8)
    image[:, :7], image[:, -7:] = 0, 255
    assert (square(image, 16) == 7).all()


def write_wave(path: Path, samples: np.ndarray) -> None:
    from scipy.io import wavfile

    wavfile.write(path, RATE, np.rint(samples * 32767).astype(np.int16))


def test_recordings_are_cut_into_whole_windows_and_their_ends_held_out(tmp_path: Path) -> None:
    """Two recordings of 8½ windows each: 16 windows, the last of each held out, the halves dropped."""
    (tmp_path / "in").mkdir()
    made = [make_clip(index, seconds=8.5 * 0.25)[0] for index in (0, 1)]
    for index, samples in enumerate(made):
        write_wave(tmp_path / "in" / f"{index}.wav", samples)
    found = examples(tmp_path / "e", "audio", data=str(tmp_path / "in"))
    assert found.values.shape == (16, SAMPLES) and found.classes == ["0.wav", "1.wav"]
    held = found.values[found.held_out]
    for index, samples in enumerate(made):
        last = samples[7 * SAMPLES : 8 * SAMPLES]
        assert np.abs(held[index] / 32767 - last).max() < 1e-3
    assert not (np.abs(found.values).max(1) < 10).any(), "no window is silence that was added"


def test_sounds_in_folders_are_classes(tmp_path: Path) -> None:
    for index in range(6):
        folder = tmp_path / "in" / ("yes", "no")[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        write_wave(folder / f"{index}.wav", make_clip(index, seconds=0.25)[0])
    assert examples(tmp_path / "e", "audio", data=str(tmp_path / "in")).classes == ["no", "yes"]


def test_files_that_cannot_be_used_are_named_counted_and_skipped(tmp_path: Path) -> None:
    """Also where one is the only file of its class: that class has no part in it, the others have."""
    for name in ("a", "b", "c"):
        (tmp_path / "in" / name).mkdir(parents=True)
    for index in range(8):
        write_wave(tmp_path / "in" / "ab"[index % 2] / f"{index}.wav", make_clip(index, seconds=0.25)[0])
    whole = train_media(tiny("wav2vec2", steps=1, data=str(_without(tmp_path / "in", "c"))), tmp_path / "whole")
    assert not RunFolder.open(whole).about()["warnings"], "the counter-test: nothing to say"
    (tmp_path / "in" / "a" / "broken.wav").write_bytes(b"RIFF")
    (tmp_path / "in" / "c" / "alone.wav").write_bytes(b"RIFF")
    write_wave(tmp_path / "in" / "b" / "short.wav", make_clip(9, seconds=0.1)[0])
    about = RunFolder.open(train_media(tiny("wav2vec2", steps=1, data=str(tmp_path / "in")), tmp_path / "run")).about()
    text = "\n".join(about["warnings"])
    assert "2 files could not be read and were skipped" in text and "broken.wav" in text and "alone.wav" in text
    assert "1 recording holds no whole window of sound" in text and "short.wav" in text
    assert "1 piece of sound was dropped" in text and "1 class has fewer than two examples" in text
    assert about["data"]["classes"] == ["a", "b"] and about["data"]["left_out"] == ["c"]
    assert len(about["data"]["skipped"]) == 2 and about["data"]["examples"] == 8


def _without(folder: Path, name: str) -> Path:
    """A copy of a folder that lacks one of its folders."""
    copy = folder.with_name(f"{folder.name}-without")
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(name))
    return copy


def test_a_broken_picture_is_named_and_skipped(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for index in range(8):
        (tmp_path / "in" / "ab"[index % 2]).mkdir(parents=True, exist_ok=True)
        image.fromarray(make_picture(index, size=16)[0]).save(tmp_path / "in" / "ab"[index % 2] / f"{index}.png")
    assert not examples(tmp_path / "whole", data=str(tmp_path / "in")).notes
    (tmp_path / "in" / "a" / "bad.jpg").write_bytes(b"no picture")
    found = examples(tmp_path / "e", data=str(tmp_path / "in"))
    assert len(found.labels) == 8 and "bad.jpg" in found.about["skipped"][0]
    assert found.notes[0].startswith("1 file could not be read and was skipped: ")


def test_many_recordings_all_have_a_part_in_few_examples(tmp_path: Path) -> None:
    """Each is a class: were they read one after the other, the last would have none."""
    (tmp_path / "in").mkdir()
    for index in range(3):
        write_wave(tmp_path / "in" / f"{index}.wav", make_clip(index, seconds=2.0)[0])
    found = examples(tmp_path / "e", "audio", data=str(tmp_path / "in"), most=9)
    assert np.bincount(found.labels).tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda folder: folder / "nowhere", "is no folder of pictures"),
        (lambda folder: _made(folder / "empty"), "holds no folders; expected one for each class"),
        (lambda folder: _npz(folder / "a.npz", pictures=np.zeros(3)), "has pictures; expected arrays called images"),
        (lambda folder: _npz(folder / "b.npz", images=np.zeros((3, 8, 8)), labels=np.zeros(3)), "has images float64"),
        (
            lambda folder: _npz(folder / "c.npz", images=np.zeros((3, 8, 8), np.uint8), labels=np.zeros(3)),
            "has 0 classes with two different pictures or more",
        ),
        (lambda folder: _file(folder / "d.npz"), "is no readable .npz"),
        (lambda folder: _file(folder / "e.txt"), "cannot be read as pictures"),
    ],
)
def test_what_is_no_labelled_data_is_refused_in_a_sentence(
    make: Callable[[Path], Path], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(AnisoscopeError, match=sentence):
        examples(tmp_path / "e", data=str(make(tmp_path)))
    assert not (tmp_path / "e").exists(), "nothing half made is left"


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def _npz(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def _file(path: Path) -> Path:
    path.write_text("no data")
    return path


def test_examples_of_another_kind_are_not_taken_for_these(tmp_path: Path) -> None:
    examples(tmp_path / "e")
    with pytest.raises(AnisoscopeError, match="were made with most = 60, not 50"):
        examples(tmp_path / "e", most=50)


def test_inputs_are_what_the_stored_processor_makes_of_the_data(corpora: dict[str, Path]) -> None:
    """A checkpoint read by transformers must see what the model was trained on."""
    from transformers import AutoFeatureExtractor

    stream = MediaStream(Examples.open(corpora["wav2vec2"]))
    batch = stream.probe_batches(3)[0]["input_values"]
    extractor = AutoFeatureExtractor.from_pretrained(str(stream.files))
    held = stream.examples.values[stream.examples.held_out]
    own = [extractor(value / 32767, sampling_rate=RATE).input_values[0] for value in held]
    for row in batch:
        assert min(float(np.abs(np.asarray(each) - row.numpy()).max()) for each in own) < 1e-4
    stream = MediaStream(Examples.open(corpora["vit"]))
    settings = json.loads((stream.files / "preprocessor_config.json").read_text())
    value = torch.from_numpy(stream.examples.values[:2]).permute(0, 3, 1, 2)
    wanted = (value * settings["rescale_factor"] - settings["image_mean"][0]) / settings["image_std"][0]
    made = stream._inputs(torch.from_numpy(stream.examples.values[:2]), torch.zeros(2))["pixel_values"]
    torch.testing.assert_close(made, wanted.float())


# -- batches and models ------------------------------------------------------------------------------------------------


def test_batches_are_functions_of_seed_and_step_and_never_of_what_is_held_out(corpora: dict[str, Path]) -> None:
    stream = MediaStream(Examples.open(corpora["vit"]), batch_size=8)
    one, again, later = stream.batch(3), stream.batch(3), stream.batch(4)
    other = MediaStream(stream.examples, batch_size=8, seed=1).batch(3)
    assert torch.equal(one["pixel_values"], again["pixel_values"])
    assert not torch.equal(one["pixel_values"], later["pixel_values"])
    assert not torch.equal(one["pixel_values"], other["pixel_values"])
    probe = {row.numpy().tobytes() for batch in stream.probe_batches(99) for row in batch["pixel_values"]}
    drawn = [row.numpy().tobytes() for step in range(20) for row in stream.batch(step)["pixel_values"]]
    assert len(probe) == int(stream.examples.held_out.sum()) and not probe & set(drawn)
    assert len(set(drawn)) > 30, "most of the training part is seen"


@pytest.mark.parametrize("arch", list(KINDS))
def test_positions_are_those_of_the_model(arch: str, corpora: dict[str, Path]) -> None:
    config = tiny(arch)
    stream = MediaStream(Examples.open(corpora[arch]))
    model = media_model(config, classes=len(stream.examples.classes)).eval()
    with torch.no_grad():
        output = model(**stream.probe_batches(2)[0], output_hidden_states=True)
    first = output.hidden_states[0]
    count = first.shape[1] - 1 if arch == "vit" else first.shape[1] if first.dim() == 3 else first[0, 0].numel()
    assert count == config.positions
    assert output.logits.shape == (2, 10) and bool(output.loss > 0)


def test_a_seed_gives_its_weights_and_the_global_generator_stays() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (media_model(tiny(seed=seed), classes=3).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_the_twins_have_about_as_many_parameters() -> None:
    count = {
        arch: sum(p.numel() for p in media_model(MediaConfig(arch=arch, width=64), classes=10).parameters())
        for arch in ("vit", "convnext")
    }
    assert 2 / 3 < count["convnext"] / count["vit"] < 3 / 2, count


@pytest.mark.parametrize("arch", ["resnet", "efficientnet"])
def test_batch_norms_know_the_first_batch_before_the_first_update(arch: str, corpora: dict[str, Path]) -> None:
    """Measured at step 0 as in training: a fresh norm would do nothing, and one that sees the batch agrees with it."""
    stream = MediaStream(Examples.open(corpora[arch]), batch_size=8)
    fresh, known = media_model(tiny(arch), classes=10), classifier.MEDIA.model(tiny(arch), stream)
    batch = stream.batch(0)
    with torch.no_grad():
        wanted = media_model(tiny(arch), classes=10).train()(**batch).logits
        assert not torch.allclose(fresh.eval()(**batch).logits, wanted, atol=1e-2), "the counter-test"
        # running variances are those of a sample (n − 1), batches are normed by n
        torch.testing.assert_close(known.eval()(**batch).logits, wanted, rtol=0.1, atol=0.1)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), known.parameters(), strict=True))
    norms = [module for module in known.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert norms and {norm.momentum for norm in norms} == {0.1}


def test_a_modality_costs_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kind of examples and an architecture that reads them are trained like those of the package."""

    def stripes(index: int, *, size: int) -> tuple[np.ndarray, int]:
        drawn = np.random.default_rng(index).integers(0, 256, (size, 1, 3), dtype=np.uint8).repeat(size, 1)
        return drawn if index % 2 else drawn.transpose(1, 0, 2), index % 2

    medium = Medium("stripes", "stripes", "made stripes", ("pixel_values",))
    made = replace(PICTURES, medium=medium, generate=stripes, unit="lines")
    monkeypatch.setitem(classifier.EXAMPLES, "stripes", made)
    monkeypatch.setitem(KINDS, "striped", replace(KINDS["vit"], examples=made))
    data = RunFolder.open(train_media(tiny("striped", steps=1), tmp_path / "run")).about()["data"]
    assert (data["medium"], data["lines"], data["classes"], data["examples"]) == ("stripes", 16, ["00", "01"], 60)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"arch": "resnt"}, "unknown architecture 'resnt'"),
        ({"width": 30, "heads": 4}, "width is 30; a vit here needs a multiple of 8"),
        ({"size": 18}, "size is 18; a vit here needs a multiple of 4"),
        ({"arch": "convnext", "size": 20}, "size is 20; a convnext here needs a multiple of 16"),
        ({"arch": "wav2vec2", "seconds": 0.05}, "seconds is 0.05; expected at least 0.16"),
        ({"examples": 1}, "examples is 1; expected at least 4"),
        ({"lr": 0.0}, "learning rate is 0.0"),
        ({"checkpoints": "sometimes"}, "checkpoints 'sometimes' is not understood"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_read(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(AnisoscopeError, match=sentence):
        tiny(**wrong)


def test_no_frame_reads_beyond_the_sound() -> None:
    """The last sample that the last frame reads, found by changing samples one by one, is within the sound."""
    model = media_model(tiny("wav2vec2"), classes=2).double().eval()
    sound = torch.randn(1, 1200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain = model.wav2vec2.feature_extractor(sound)  # type: ignore[operator, union-attr]
    assert plain.shape[2] == frames(1200)
    longer = torch.cat([sound, torch.randn(1, 100, dtype=torch.float64)], 1)
    after = model.wav2vec2.feature_extractor(longer)  # type: ignore[operator, union-attr]
    torch.testing.assert_close(after[:, :, : plain.shape[2]], plain)
    changed = sound.clone()
    changed[0, 900] += 1
    assert not torch.allclose(model.wav2vec2.feature_extractor(changed), plain), "the counter-test"  # type: ignore[operator, union-attr]


# -- training ----------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


def kill_at(wanted: int) -> Callable[[int], None]:
    def trouble(step: int) -> None:
        if step == wanted:
            raise Killed

    return trouble


@pytest.mark.parametrize(
    "arch", [n if n in ("vit", "wav2vec2") else pytest.param(n, marks=pytest.mark.slow) for n in KINDS]
)
def test_a_run_killed_in_the_middle_goes_on_bit_for_bit(arch: str, corpora: dict[str, Path], tmp_path: Path) -> None:
    config = tiny(arch, dropout=0.1)
    whole = train_media(config, tmp_path / "whole", corpus=corpora[arch])
    with pytest.raises(Killed):
        train_media(config, tmp_path / "run", corpus=corpora[arch], monitor=Seen(kill_at(3)))
    torch.manual_seed(9)
    np.random.seed(9)  # a library might draw from it
    again = train_media(config, tmp_path / "run", corpus=corpora[arch], resume=True)
    assert losses(again) == losses(whole)
    mine, theirs = weights(again, 6), weights(whole, 6)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    other = train_media(tiny(arch, dropout=0.1, seed=1), tmp_path / "other", corpus=corpora[arch])
    assert losses(other) != losses(whole), "the counter-test: they could differ"


def test_run_json_says_what_was_trained_on_what(corpora: dict[str, Path], tmp_path: Path) -> None:
    for arch, modality in _MODALITIES.items():
        about = RunFolder.open(train_media(tiny(arch, steps=1), tmp_path / arch, corpus=corpora[arch])).about()
        model = about["models"][0]
        assert model["modality"] == {"single": modality} and "one " in model["rows"]["single"]
        assert (model["family"], model["objective"]) == (arch, "classes")
        assert model["type"] == ("convolution" if modality == "convolution" else "encoder")
        assert about["data"]["examples"] == 60 and len(about["data"]["classes"]) == 10
        assert about["status"] == "complete"


def test_a_checkpoint_loads_like_any_model_with_its_processor(corpora: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForImageClassification

    out = train_media(tiny(steps=2), tmp_path / "run", corpus=corpora["vit"])
    folder = out / "checkpoints" / "checkpoint-2"
    assert (folder / "preprocessor_config.json").is_file()
    loaded = AutoModelForImageClassification.from_pretrained(str(folder)).eval()
    stream = media_stream(tiny(), tmp_path, corpus=corpora["vit"])
    with torch.no_grad():
        assert loaded(**stream.probe_batches(4)[0]).logits.shape == (4, 10)


@pytest.mark.slow
@pytest.mark.parametrize("arch", list(KINDS))
def test_they_learn(arch: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"layers": 4, "width": 32, "heads": 4, "size": 16, "patch": 4, "seconds": 0.5}
    config = MediaConfig(arch=arch, **sizes, steps=250, examples=1000, lr=2e-3, device="cpu", checkpoints="none")
    found = losses(train_media(config, tmp_path / "run"))
    assert np.mean(found[-30:]) < 0.93 * np.mean(found[:10]), np.mean(found[-30:])
