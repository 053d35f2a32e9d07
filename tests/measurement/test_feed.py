"""Sounds, pictures and text through the same feed: nothing padded enters, nothing depends on how batches are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import wavfile

from anisoscope import profile
from anisoscope.capture import find_layout
from anisoscope.capture.capture import Capture
from anisoscope.data.synthetic import make_clip
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.config import ProfileConfig
from anisoscope.measurement.feed import MOST, ImageFeed, SpeechFeed, TextFeed
from anisoscope.measurement.inspection import Amount, SiteShape, activation_bytes, amount_of, bank_bytes
from anisoscope.models.load import load_model
from anisoscope.models.processor import sound_inputs
from support.tiny_listeners import Fixed, feed_of, loaded, make_model, make_pictures, make_shelf, make_sounds, rows_of

METRICS = ("average_cosine", "drift")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_shelf(tmp_path_factory.mktemp("shelf"))


def test_the_modality_chooses_the_feed(shelf: dict[str, Path]) -> None:
    text = load_model("gpt2:n_layer=1,n_embd=16,n_head=2,vocab_size=300", random_init=True, device="cpu")
    kinds = {"wav2vec2": SpeechFeed, "whisper": SpeechFeed, "vit": ImageFeed, "resnet": ImageFeed}
    for name, kind in kinds.items():
        model = loaded(shelf[name])
        assert type(feed_of(model)) is kind and not model.reads_text
    assert type(feed_of(text)) is TextFeed and text.reads_text and text.processor is None


# -- sounds -----------------------------------------------------------------------------------------------------------


def test_contexts_of_one_length_go_together_so_that_nothing_is_padded(shelf: dict[str, Path]) -> None:
    feed = feed_of(loaded(shelf["wav2vec2"]), shelf["sounds"], seconds=1.5, batch_size=2)
    batches = list(feed.batches())
    lengths = [tuple(b.inputs["input_values"].shape) for b in batches]
    assert lengths == [(2, 24000), (2, 24000)], "of 1.5 + 1.5 and 1.5 + 1.5 s; 0.5 and 0.2 s are dropped"
    assert all(bool(b.inputs["attention_mask"].all()) for b in batches)
    assert (feed.contexts, feed.dropped_pieces, feed.padding, feed.documents) == (4, 2, 0, 3)
    assert feed.about()["seconds"] == 6.0
    feed = feed_of(loaded(shelf["wav2vec2"]), shelf["sounds"], seconds=2.0, batch_size=2)
    assert sorted(b.inputs["input_values"].shape for b in feed.batches()) == [(1, 19200), (1, 24000), (2, 32000)]


def test_rows_and_fingerprint_do_not_depend_on_the_batches(shelf: dict[str, Path]) -> None:
    model = loaded(shelf["wav2vec2"])
    one, many = (feed_of(model, shelf["sounds"], seconds=1.2, batch_size=n) for n in (1, 5))
    first, second = rows_of(model, one), rows_of(model, many)
    assert first.shape == second.shape and np.abs(first - second).max() < 1e-4 * np.abs(first).max()
    assert one.fingerprint == many.fingerprint and one.about() == many.about()
    other = feed_of(model, shelf["sounds"], seconds=1.1, batch_size=1)
    list(other.batches())
    assert other.fingerprint != one.fingerprint


def test_rows_are_counted_where_they_come_from(shelf: dict[str, Path]) -> None:
    for name in ("wav2vec2", "whisper", "vit", "resnet"):
        model = loaded(shelf[name])
        data = shelf["sounds"] if model.modality.name == "speech" else shelf["pictures"]
        feed = feed_of(model, data, **({"seconds": 1.0} if model.modality.name == "speech" else {}))
        kind, stack = ("stage" if name == "resnet" else "resid"), find_layout(model.model).stacks[0].name
        rows = rows_of(model, feed, kind, stack)
        assert len(rows) == feed.tokens, name
        assert sum(feed.rows_of(batch.inputs) for batch in feed.batches()) == feed.tokens


def test_tokens_end_the_data_after_a_whole_context(shelf: dict[str, Path]) -> None:
    model = loaded(shelf["vit"])
    feed = feed_of(model, tokens=20, batch_size=2)
    assert sum(len(b.inputs["pixel_values"]) for b in feed.batches()) == 3, "nine patches each"
    assert feed.tokens == 27 and feed.length == 9


def test_padding_that_whisper_reads_by_design_is_no_row(shelf: dict[str, Path]) -> None:
    model = loaded(shelf["whisper"])
    feed = feed_of(model, shelf["sounds"], seconds=2.0)
    masks = torch.cat([b.inputs["attention_mask"] for b in feed.batches()])
    assert masks.shape[1] == 400 and {int(m.sum()) for m in masks} == {119, 149, 199}, "frames of 10 ms, whole ones"
    rows = rows_of(model, feed, stack="encoder")
    assert len(rows) < 0.5 * 200 * feed.contexts
    assert feed.padding == 200 * feed.contexts - feed.tokens
    bare = [{k: v for k, v in b.inputs.items() if k != "attention_mask"} for b in feed.batches()]
    for batch in bare:  # the features of silence repeat, which is noticed too: so they get a little noise
        batch["input_features"] = batch["input_features"] + 1e-4 * torch.randn_like(batch["input_features"])
    unmasked = rows_of(model, Fixed(bare), stack="encoder")  # type: ignore[arg-type]
    assert len(unmasked) == 200 * feed.contexts, "without a mask all of it would count"


def test_a_frame_counts_only_with_its_whole_window(shelf: dict[str, Path]) -> None:
    """What comes after the samples changes no real frame; what comes within them does."""
    model = loaded(shelf["whisper"])
    samples = make_clip(0, seconds=2.0)[0]
    inputs = sound_inputs(model.processor, samples, model.model)
    longer = np.concatenate([samples, 0.3 * np.ones(8000, np.float32)])
    changed = model.processor(longer, sampling_rate=16_000, return_tensors="pt")["input_features"]
    real = inputs["attention_mask"][0].bool()
    floor = float(inputs["input_features"].max()) - 1.99  # eight decades below the loudest are cut off
    loud = (inputs["input_features"][0] > floor) & (changed[0] > floor)
    same = ((inputs["input_features"] - changed)[0].abs() < 1e-4) | ~loud
    assert bool(same[:, real].all()) and not bool(same[:, ~real].all())


def test_silence_other_rates_and_single_samples_give_finite_rows(shelf: dict[str, Path], tmp_path: Path) -> None:
    wavfile.write(tmp_path / "silence.wav", 16_000, np.zeros(32_000, np.int16))
    wavfile.write(tmp_path / "one.wav", 16_000, np.ones(1, np.int16))
    wavfile.write(
        tmp_path / "eight.wav", 44_100, np.stack([make_clip(i, seconds=1.5, rate=44_100)[0] for i in range(8)], 1)
    )
    for name in ("wav2vec2", "whisper"):
        model = loaded(shelf[name])
        feed = feed_of(model, tmp_path)
        assert np.isfinite(rows_of(model, feed, stack=find_layout(model.model).stacks[0].name)).all(), name
        assert (feed.contexts, feed.dropped_pieces) == (2, 1)


def test_more_seconds_than_a_model_takes_are_refused(shelf: dict[str, Path]) -> None:
    model = loaded(shelf["whisper"])
    assert feed_of(model, shelf["sounds"]).about()["context_seconds"] == 4.0, (
        "its 200 positions of 20 ms, not the usual ten seconds"
    )
    with pytest.raises(AnisoscopeError, match=r"--seconds 5 is more than whisper takes \(4\)"):
        list(feed_of(model, seconds=5.0).batches())
    with pytest.raises(AnisoscopeError, match=r"seconds is 0; expected at least 0\.1"):
        ProfileConfig(models=("x",), seconds=0.0)
    with pytest.raises(AnisoscopeError, match="seconds is 'nan'"):
        ProfileConfig(models=("x",), seconds=float("nan"))


# -- decoders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["whisper", "moonshine"])
def test_the_decoder_reads_the_models_own_greedy_text(shelf: dict[str, Path], name: str) -> None:
    model = loaded(shelf[name])
    feed = feed_of(model, shelf["sounds"], seconds=1.5)
    for batch in feed.batches():
        ids, mask = batch.inputs["decoder_input_ids"], batch.inputs["decoder_attention_mask"].bool()
        assert (ids[:, 0] == model.decoder_start).all() and ids.shape[1] <= MOST + 1
        with torch.inference_mode():
            logits = model.model(**batch.inputs).logits
        follows = (logits.argmax(-1)[:, :-1] == ids[:, 1:])[mask[:, 1:]]
        assert follows.float().mean() > 0.9, "each token is the likeliest after those before it"
        assert 3 not in ids[mask].tolist(), "what comes after an end is padding"
    again = feed_of(model, shelf["sounds"], seconds=1.5)
    for one, two in zip(feed.batches(), again.batches(), strict=True):
        assert torch.equal(one.inputs["decoder_input_ids"], two.inputs["decoder_input_ids"])
    assert any("greedy" in note for note in feed.notes())


def test_writing_the_text_adds_no_row(shelf: dict[str, Path]) -> None:
    """The texts are written before anything listens: rows of the decoder are the tokens that it reads, no more."""
    model = loaded(shelf["whisper"])
    feed = feed_of(model, shelf["sounds"], seconds=1.5, batch_size=2)
    expected = sum(int(b.inputs["decoder_attention_mask"].sum()) for b in feed.batches())
    fresh = feed_of(model, shelf["sounds"], seconds=1.5, batch_size=2)
    assert len(rows_of(model, fresh, stack="decoder")) == expected


def test_text_beside_a_clip_is_what_the_decoder_reads(shelf: dict[str, Path], tmp_path: Path) -> None:
    model = loaded(shelf["whisper"])
    make_sounds(tmp_path / "said", (1.5, 1.5))
    (tmp_path / "said" / "clip0.txt").write_text("abc")

    class Letters:
        pad_token_id = 1

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [4, *(10 + ord(letter) - ord("a") for letter in text), 3]}

    model.tokenizer = Letters()
    (batch,) = feed_of(model, tmp_path / "said").batches()
    ids, mask = batch.inputs["decoder_input_ids"], batch.inputs["decoder_attention_mask"]
    assert ids[0][mask[0].bool()].tolist() == [4, 10, 11, 12]
    assert ids[1][mask[1].bool()].tolist() != [4, 10, 11, 12]


# -- pictures ---------------------------------------------------------------------------------------------------------


def test_pictures_of_different_sizes_are_resized_or_kept_apart_but_never_padded(
    shelf: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import BitImageProcessorPil

    feed = feed_of(loaded(shelf["vit"]), shelf["pictures"])
    assert [tuple(b.inputs["pixel_values"].shape) for b in feed.batches()] == [(3, 3, 24, 24)]
    folder = make_model(tmp_path / "dinov2", "dinov2")
    keeps = BitImageProcessorPil(size={"shortest_edge": 28}, do_center_crop=False)
    keeps.save_pretrained(folder)
    model = loaded(folder)
    assert type(model.processor) is BitImageProcessorPil and "no processor found" not in " ".join(model.notes)
    make_pictures(tmp_path / "pictures", ((28, 56), (28, 28), (56, 112)))
    feed = feed_of(model, tmp_path / "pictures")
    shapes = sorted(tuple(b.inputs["pixel_values"].shape) for b in feed.batches())
    assert shapes == [(1, 3, 28, 28), (2, 3, 28, 56)]
    assert len(rows_of(model, feed)) == feed.tokens == 16 + 32 + 32


def test_pictures_that_wait_for_their_like_do_not_wait_for_ever(shelf: dict[str, Path], tmp_path: Path) -> None:
    model = loaded(shelf["resnet"])
    make_pictures(tmp_path, tuple((32, 32 + 2 * i) for i in range(20)))

    class AsTheyAre:
        def __call__(self, images: list[np.ndarray], **_: Any) -> dict[str, torch.Tensor]:
            return {"pixel_values": torch.from_numpy(images[0].copy()).permute(2, 0, 1)[None] / 255.0}

    model.processor = AsTheyAre()
    feed = feed_of(model, tmp_path, batch_size=2)
    assert [len(b.inputs["pixel_values"]) for b in feed.batches()] == [1] * 20
    assert feed.contexts == 20


def test_groups_come_from_folders(shelf: dict[str, Path], tmp_path: Path) -> None:
    words: dict[str, Any] = {"metrics": METRICS, "sites": ("resid",), "device": "cpu"}
    table = profile(str(shelf["vit"]), out=tmp_path / "run", data=str(shelf["pictures"]), group_by="folder", **words)
    assert set(table.where(metric="drift").arrow["group"].to_pylist()) == {"", "class0", "class1"}


def test_special_tokens_are_none_of_the_rows_of_sounds_and_pictures(shelf: dict[str, Path]) -> None:
    for name, data in (("vit", "pictures"), ("wav2vec2", "sounds"), ("resnet", "pictures")):
        model = loaded(shelf[name])
        layout = find_layout(model.model)
        kind = "stage" if name == "resnet" else "resid"
        counts = []
        for special in ("in", "out"):
            found: list[int] = []

            class Count:
                def __init__(self, found: list[int]) -> None:
                    self.found = found

                def rows(self, rows: Any) -> None:
                    self.found.append(len(rows.x))

                def scores(self, scores: Any) -> None: ...

            with Capture(model.model, layout.sites([kind]), Count(found), layout=layout, special=special) as capture:
                for batch in feed_of(model, shelf[data], special=special).batches():
                    capture.run(batch)
            counts.append(sum(found))
        assert counts[0] == counts[1] > 0, name


# -- memory -----------------------------------------------------------------------------------------------------------


def test_folds_of_few_rows_are_estimated_as_rows() -> None:
    from anisoscope.capture.sites.site import Site
    from anisoscope.measurement.bank import Plan
    from anisoscope.stats.moments import Moments

    plan, site, width = Plan({"resid": frozenset({Moments})}), Site(1, "resid"), 2000
    sums = 128 * width * 8
    few, many = (
        bank_bytes([site], {site: SiteShape(512, width)}, plan, amount=Amount(contexts)) - sums for contexts in (4, 64)
    )
    assert few == 4 * 512 * width * 4, "four folds of 512 rows each have no matrix of 2000 × 2000"
    assert many >= 8 * width**2 * 8


def test_stages_of_several_widths_are_estimated_one_by_one() -> None:
    from anisoscope.capture.sites.site import Site
    from anisoscope.measurement.bank import Plan
    from anisoscope.stats.moments import Moments

    plan = Plan({"stage": frozenset({Moments})})
    shapes = {Site(1, "stage"): SiteShape(64, 8), Site(2, "stage"): SiteShape(16, 32)}
    amount = amount_of(list(shapes), shapes, tokens=1000, length=None)
    assert amount.contexts == 63 and amount.rows(shapes[Site(1, "stage")]) == 63 * 64
    alone = [bank_bytes([site], shapes, plan, amount=amount) for site in shapes]
    assert bank_bytes(list(shapes), shapes, plan, amount=amount) == sum(alone) and alone[1] > 7 * alone[0]
    maps = activation_bytes(shapes, 4, heads=1)
    assert maps == 4 * 8 * 512 * 4, "both maps hold 512 numbers, and nothing attends"
    text = activation_bytes(
        {Site(0, "embed"): SiteShape(32, 16), Site(1, "query"): SiteShape(32, 4, heads=4)}, 2, longer=4.0, heads=4
    )
    assert text == 2 * (44 * 16 * 128 + 9 * 128**2) * 4
