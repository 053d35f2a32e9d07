"""Runs over sounds and pictures: interrupted, described, refused, swept and watched as those over text are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import wavfile

from anisoscope import profile
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.config import ProfileConfig
from anisoscope.measurement.feed import fitting
from anisoscope.models.load import load_model
from anisoscope.results.folder import RunFolder
from support.tiny_listeners import Fixed, feed_of, loaded, make_model, make_shelf, make_sounds, rows_of

METRICS = ("average_cosine", "drift")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_shelf(tmp_path_factory.mktemp("shelf"))


class Interrupt:
    """A progress callback that presses Ctrl-C at one call."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self, what: str, done: int, total: int) -> None:
        self.calls += what == "forward"
        if what == "forward" and self.calls == self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("name", "data"), [("vit", "embedded"), ("whisper", "sounds")])
def test_an_interrupted_run_goes_on_to_the_same_table(
    shelf: dict[str, Path], tmp_path: Path, name: str, data: str
) -> None:
    words: dict[str, Any] = {"metrics": METRICS, "sites": ("embed", "resid"), "device": "cpu", "batch_size": 2}
    words |= {"report": False}
    words |= {"data": str(shelf.get(data, data)), "tokens": 300} | ({"seconds": 1.0} if name == "whisper" else {})
    whole = profile(str(shelf[name]), out=tmp_path / "whole", **words)
    with pytest.raises(KeyboardInterrupt):
        profile(str(shelf[name]), out=tmp_path / "run", progress=Interrupt(2), **words)
    assert RunFolder.open(tmp_path / "run").about()["status"] == "interrupted"
    again = profile(str(shelf[name]), out=tmp_path / "run", resume=True, **words)
    one, two = ({(r["stack"], r["layer"], r["kind"], r["metric"], r["variant"]): r["value"] for r in t.records()}
                for t in (whole, again))  # fmt: skip
    assert one == pytest.approx(two, rel=1e-9, nan_ok=True)
    mine, theirs = (RunFolder.open(tmp_path / n).about()["models"][0] for n in ("whole", "run"))
    assert mine["data"] == theirs["data"] and mine["row_count"] == theirs["row_count"]


def test_run_json_says_what_was_read(shelf: dict[str, Path], tmp_path: Path) -> None:
    data = make_sounds(tmp_path / "sounds", (1.5, 2.3))
    (data / "bad.wav").write_bytes(b"RIFF")
    words: dict[str, Any] = {"metrics": METRICS, "sites": ("resid",), "device": "cpu", "seconds": 1.5, "report": False}
    table = profile(str(shelf["whisper"]), out=tmp_path / "run", data=str(data), **words)
    (model,) = table.about["models"]
    assert model["modality"] == {"encoder": "speech", "decoder": "text"}
    assert model["rows"] == {"encoder": "one frame of audio", "decoder": "one token"}
    about = model["data"]
    assert (about["contexts"], about["seconds"], about["files"], about["skipped_files"]) == (2, 3.0, 2, 1)
    assert about["dropped_pieces"] == 1 and "bad.wav" in about["skipped"][0]
    assert model["dropped"]["padding"] == 400 - about["tokens"]
    assert any("1 file could not be read and was skipped" in note for note in model["notes"])


def test_wrong_data_is_told_in_a_sentence(shelf: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("some text")
    text = load_model("gpt2:n_layer=1,n_embd=16,n_head=2,vocab_size=300", random_init=True, device="cpu")
    picture = next(shelf["pictures"].rglob("*.png"))
    with pytest.raises(AnisoscopeError, match=r"gpt2 reads text, but '.*png' holds images; give it text"):
        feed_of(text, picture)
    with pytest.raises(AnisoscopeError, match="none that can be read as text"):
        list(feed_of(text, shelf["sounds"]).batches())
    with pytest.raises(AnisoscopeError, match="is no file of images"):
        list(feed_of(loaded(shelf["vit"]), tmp_path / "notes.txt").batches())
    with pytest.raises(AnisoscopeError, match=r"suffix \.png, none that is audio"):
        list(feed_of(loaded(shelf["wav2vec2"]), shelf["pictures"]).batches())
    wavfile.write(tmp_path / "short.wav", 16_000, np.ones(9, np.int16))
    with pytest.raises(AnisoscopeError, match=r"one piece was too short .* recordings of 1 s or more, or .* --seconds"):
        list(feed_of(loaded(shelf["wav2vec2"]), tmp_path / "short.wav").batches())


def test_pictures_beside_too_little_text_are_named(shelf: dict[str, Path], tmp_path: Path) -> None:
    from anisoscope.measurement.feed import no_text

    text = load_model("gpt2:n_layer=1,n_embd=16,n_head=2,vocab_size=300", random_init=True, device="cpu")
    said = str(no_text(text, str(shelf["pictures"])))
    assert "it holds images, which gpt2 does not read" in said
    (tmp_path / "notes.txt").write_text("a")
    assert str(no_text(text, str(tmp_path))) == f"no context could be cut from {str(tmp_path)!r}; give more text."


IDLE = [
    ("vit", {"first": "out"}, "--skip-first means nothing for vit, which reads images; leave it out"),
    ("vit", {"special": "out"}, "--skip-special"),
    ("vit", {"context": 5}, "--context"),
    ("vit", {"seconds": 3.0}, "--seconds"),
    ("vit", {"text_field": "body"}, "--text-field"),
    ("vit", {"tokenizer": "bytes"}, "--tokenizer means nothing for vit, which reads images; leave it out"),
    ("wav2vec2", {"tokenizer": "bytes"}, "--tokenizer means nothing for wav2vec2, which reads audio"),
    ("vit", {"pool": "last"}, "--pool last means nothing for vit, which reads images; leave it out"),
    ("resnet", {"pool": "cls"}, "--pool cls means nothing for resnet, which reads images and has no class token"),
    ("wav2vec2", {"pool": "cls"}, "--pool cls means nothing for wav2vec2, which reads audio and has no class token"),
    ("wav2vec2", {"first": "out"}, "--skip-first means nothing for wav2vec2, which reads audio"),
    ("gpt2", {"seconds": 3.0}, "--seconds means nothing for gpt2, which reads text"),
]


@pytest.mark.parametrize(("name", "option", "words"), IDLE)
def test_options_that_mean_nothing_are_refused_or_beside_other_models_left_out(
    shelf: dict[str, Path], name: str, option: dict[str, Any], words: str
) -> None:
    fresh = "gpt2:n_layer=1,n_embd=16,n_head=2,vocab_size=300"
    model = load_model(fresh, random_init=True, device="cpu") if name == "gpt2" else loaded(shelf[name])
    with pytest.raises(AnisoscopeError, match=words):
        fitting(model, ProfileConfig(models=("x",), **option))
    config, notes = fitting(model, ProfileConfig(models=("x", "y"), **option))
    assert notes and config == ProfileConfig(models=("x", "y"))
    kept = {"seconds": 3.0} if name == "wav2vec2" else {"text_field": "body"} if name == "gpt2" else {"pool": "mean"}
    config, notes = fitting(model, ProfileConfig(models=("x",), **kept))
    assert not notes and config == ProfileConfig(models=("x",), **kept)


def test_the_column_of_a_table_of_pictures_is_no_idle_option(shelf: dict[str, Path]) -> None:
    words = ProfileConfig(models=("x",), data="faces.parquet", text_field="face")
    assert fitting(loaded(shelf["vit"]), words) == (words, [])


def test_the_tokenizer_of_a_decoder_that_reads_words_is_no_idle_option(shelf: dict[str, Path]) -> None:
    words = ProfileConfig(models=("x",), tokenizer="bytes")
    assert fitting(loaded(shelf["whisper"]), words) == (words, [])


def test_fewer_rows_than_asked_for_are_told(shelf: dict[str, Path]) -> None:
    model = loaded(shelf["vit"])
    feed = feed_of(model, shelf["pictures"], tokens=1000)
    list(feed.batches())
    assert feed.notes() == ["the data ended after 27 of the 1,000 patches asked for"]
    enough = feed_of(model, shelf["pictures"], tokens=27)
    list(enough.batches())
    assert enough.notes() == []


def test_a_sweep_measures_checkpoints_that_see_and_leaves_gradients_out(tmp_path: Path) -> None:
    from anisoscope import sweep

    for step in (0, 10):
        make_model(tmp_path / "series" / f"checkpoint-{step}", "vit", seed=step)
    table = sweep(str(tmp_path / "series"), tokens=200, device="cpu", out=tmp_path / "run")
    assert set(table.where(metric="average_cosine").arrow["step"].to_pylist()) == {0, 10}
    assert "gradient_energy" not in table.metrics
    assert any("gradients were left out" in words for words in table.about["warnings"])
    assert table.about["models"][0]["modality"] == {"single": "vision"}


def test_a_checkpoint_with_another_processor_is_flagged(tmp_path: Path) -> None:
    from anisoscope import sweep

    for step, size in ((0, 24), (10, 32)):
        make_model(tmp_path / "series" / f"checkpoint-{step}", "vit", image_size=size)
    table = sweep(str(tmp_path / "series"), tokens=200, device="cpu", metrics=("drift",), out=tmp_path / "run")
    flags = [c["flags"] for c in table.about["checkpoints"]]
    assert not flags[0] and "another processor than" in flags[1][0]


@pytest.mark.parametrize(("name", "modality"), [("vit", "vision"), ("resnet", "convolution"), ("wav2vec2", "speech")])
def test_run_json_of_a_monitor_says_what_was_read_as_that_of_a_profile_does(
    shelf: dict[str, Path], tmp_path: Path, name: str, modality: str
) -> None:
    import anisoscope

    model = loaded(shelf[name])
    words: dict[str, Any] = {"seconds": 1.0} if modality == "speech" else {}
    batches = [dict(b.inputs) for b in feed_of(model, tokens=100, **words).batches()]
    watched = anisoscope.Monitor(model.model, when=[0], metrics="drift", probe=batches, out=tmp_path / "run")
    with watched as monitor, monitor.step(0):
        pass
    (entry,) = RunFolder.open(tmp_path / "run").about()["models"]
    table = profile(str(shelf[name]), out=tmp_path / "own", tokens=100, metrics=("drift",), device="cpu", **words)
    (own,) = table.about["models"]
    assert entry["modality"] == {"single": modality}
    for field in ("modality", "rows", "row_count", "layers", "stacks"):
        assert entry[field] == own[field], field


@pytest.mark.parametrize("name", ["vit", "wav2vec2"])
def test_a_monitor_takes_the_batches_of_a_feed_as_its_probe(shelf: dict[str, Path], name: str) -> None:
    import anisoscope

    model = loaded(shelf[name])
    batches = [dict(b.inputs) for b in feed_of(model, tokens=100, seconds=1.0).batches()]
    with anisoscope.Monitor(model.model, when=lambda _: True, metrics="drift", probe=batches) as monitor:
        for step in range(2):
            with monitor.step(step):
                model.model(**batches[0])[0].square().mean().backward()
    found = monitor.table.where(metric="drift", kind="resid", layer=2, group="").records()
    expected = rows_of(model, Fixed(batches)).mean(0)  # type: ignore[arg-type]
    assert [row["value"] for row in found if not row["variant"]] == pytest.approx(
        [np.linalg.norm(expected)] * 2, rel=1e-5
    )
