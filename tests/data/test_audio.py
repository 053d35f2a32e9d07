"""Audio of any rate, width and container gives the same contexts; nothing is lost or padded in silence."""

from __future__ import annotations

import builtins
import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.io import wavfile

from anisoscope.data.audio import EMBEDDED, Clip, read_audio, resampled
from anisoscope.data.media_files import MediaCounts
from anisoscope.data.synthetic import CLASSES, make_clip
from anisoscope.errors import AnisoscopeError

RATE = 16_000


def tone(seconds: float, rate: int = RATE, hertz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def write(path: Path, samples: np.ndarray, rate: int = RATE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    wavfile.write(path, rate, samples)
    return path


def clips(source: object, **options: Any) -> list[Clip]:
    return list(read_audio(source, **options))  # type: ignore[arg-type]


def test_clips_that_are_made_are_the_same_each_time_and_tell_their_class() -> None:
    one, label = make_clip(7, seconds=1.0)
    again, _ = make_clip(7, seconds=1.0)
    other, _ = make_clip(7, seconds=1.0, seed=1)
    assert (one == again).all() and not (one == other).all()
    assert label == 7 % CLASSES and CLASSES >= 10
    assert one.dtype == np.float32 and 0.3 < np.abs(one).max() <= 1.0
    assert len(make_clip(0, seconds=1e-9)[0]) == 1


def test_a_class_of_clips_sounds_like_itself() -> None:
    """Its long-term spectrum is nearer to that of its own class than to the others' mean."""
    spectra: dict[int, list[np.ndarray]] = {}
    for index in range(40):
        samples, label = make_clip(index, seconds=2.0)
        power = np.abs(np.fft.rfft(samples[:32000])) ** 2
        bands = np.log(power[: len(power) // 160 * 160].reshape(-1, 160).sum(1))
        spectra.setdefault(label, []).append(bands - bands.mean())
    right = 0
    for label, mine in spectra.items():
        others = {k: np.mean(v[1:] if k == label else v, axis=0) for k, v in spectra.items()}
        right += min(others, key=lambda k: float(((mine[0] - others[k]) ** 2).sum())) == label
    assert right >= 7, "of ten; one is chance"


def test_the_embedded_clips_are_cut_and_counted() -> None:
    counts = MediaCounts()
    found = clips(None, seconds=3.0, counts=counts)
    assert len(found) == EMBEDDED[0] * 3 and {c.source for c in found} == {"embedded"}
    assert [len(c.samples) for c in found[:3]] == [48000, 48000, 32000], "8 s in pieces of 3: the last has 2"
    assert counts.files == EMBEDDED[0] and counts.seconds == pytest.approx(EMBEDDED[0] * EMBEDDED[1])
    assert {c.group for c in clips("embedded", group_by="folder")} == {f"vowel-{i}" for i in range(CLASSES)}


def test_a_last_piece_below_a_second_is_dropped_and_counted(tmp_path: Path) -> None:
    write(tmp_path / "a.wav", tone(2.9))
    counts = MediaCounts()
    assert [len(c.samples) for c in clips(tmp_path, seconds=2.0, counts=counts)] == [32000]
    assert (counts.dropped_pieces, counts.seconds) == (1, 2.0)
    write(tmp_path / "a.wav", tone(3.0))
    assert [len(c.samples) for c in clips(tmp_path, seconds=2.0)] == [32000, 16000], "one of a second stays"
    assert [len(c.samples) for c in clips(tmp_path, seconds=0.5)] == [8000] * 6, "short contexts are wanted ones"


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000])
def test_other_rates_become_the_models(tmp_path: Path, rate: int) -> None:
    write(tmp_path / "a.wav", tone(2.0, rate), rate)
    (clip,) = clips(tmp_path)
    middle = slice(4000, 28000)  # the filter needs a little room at the ends
    assert clip.rate == RATE and len(clip.samples) == 32000
    assert np.abs(clip.samples[middle] - tone(2.0)[middle]).max() < 5e-3


def test_what_lies_above_half_the_new_rate_does_not_come_back_as_another_tone() -> None:
    high = tone(1.0, 48_000, hertz=12_000.0)
    assert np.abs(resampled(high, 48_000, RATE)[1000:-1000]).max() < 1e-2
    assert np.abs(high[::3]).max() > 0.4, "leaving samples out would fold it to 4 kHz"


def test_channels_are_mixed(tmp_path: Path) -> None:
    eight = np.stack([tone(1.5) * (i + 1) / 8 for i in range(8)], axis=1).astype(np.float32)
    write(tmp_path / "eight.wav", eight)
    (clip,) = clips(tmp_path)
    assert np.abs(clip.samples - eight.mean(1)).max() < 1e-6


@pytest.mark.parametrize(
    ("dtype", "scale", "offset"), [("int16", 32767, 0), ("int32", 2147483647, 0), ("uint8", 127, 128)]
)
@pytest.mark.parametrize("library", [True, False])
def test_integers_of_any_width_are_read_alike_with_and_without_soundfile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, scale: int, offset: int, library: bool
) -> None:
    write(tmp_path / "a.wav", (tone(1.2).astype(np.float64) * scale + offset).astype(dtype))
    if not library:
        hide(monkeypatch, "soundfile")
    (clip,) = clips(tmp_path)
    assert np.abs(clip.samples - tone(1.2)).max() < (2e-2 if dtype == "uint8" else 1e-3)


def hide(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    original = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == module:
            raise ImportError(name)
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)


def test_other_containers_need_soundfile_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soundfile = pytest.importorskip("soundfile")
    soundfile.write(tmp_path / "a.flac", tone(1.5), RATE)
    soundfile.write(tmp_path / "b.ogg", tone(1.5), RATE)
    soundfile.write(tmp_path / "c.mp3", tone(1.5), RATE)
    found = clips(tmp_path)
    assert [Path(c.source).name for c in found] == ["a.flac", "b.ogg", "c.mp3"]
    assert np.abs(found[0].samples - tone(1.5)).max() < 1e-3
    hide(monkeypatch, "soundfile")
    with pytest.raises(AnisoscopeError, match=r"needs `soundfile`; install it: pip install 'anisoscope\[media\]'"):
        clips(tmp_path)


def test_samples_that_are_not_finite_are_dropped_with_their_piece(tmp_path: Path) -> None:
    bad = tone(6.0)
    bad[20_000] = np.nan
    bad[70_000] = np.inf
    write(tmp_path / "a.wav", bad)
    counts = MediaCounts()
    found = clips(tmp_path, seconds=2.0, counts=counts)
    assert len(found) == 1 and counts.dropped_pieces == 2
    assert all(np.isfinite(c.samples).all() for c in found)


def test_silence_one_sample_and_nothing_at_all(tmp_path: Path) -> None:
    write(tmp_path / "silence.wav", np.zeros(20_000, np.float32))
    write(tmp_path / "one.wav", np.ones(1, np.float32))
    write(tmp_path / "none.wav", np.ones(0, np.float32))
    counts = MediaCounts()
    (clip,) = clips(tmp_path, counts=counts)
    assert Path(clip.source).name == "silence.wav" and not clip.samples.any()
    assert (counts.files, counts.dropped_pieces, counts.skipped) == (3, 2, [])


def test_a_long_recording_comes_in_parts_without_a_seam_in_the_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("soundfile")
    whole = tone(9.0)
    write(tmp_path / "a.wav", whole)
    expected = [c.samples for c in clips(tmp_path, seconds=2.0)]
    monkeypatch.setattr("anisoscope.data.audio.PART", 4.5)
    found = [c.samples for c in clips(tmp_path, seconds=2.0)]
    assert [len(x) for x in found] == [len(x) for x in expected] == [32000] * 4 + [16000]
    assert all((a == b).all() for a, b in zip(found, expected, strict=True))


def test_folders_files_and_archives_give_the_same_clips(tmp_path: Path) -> None:
    for name in ("cats/ä b.wav", "cats/二.wav", "dogs/c.WAV"):
        write(tmp_path / "folder" / name, tone(1.5, hertz=300.0 + len(name)))
    (tmp_path / "folder" / "notes.txt").write_text("not audio")
    (tmp_path / "folder" / ".hidden.wav").write_bytes(b"no")
    packed = tmp_path / "all.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for path in sorted((tmp_path / "folder").rglob("*.[wW][aA][vV]")):
            archive.write(path, path.relative_to(tmp_path / "folder").as_posix())
    one, two = clips(tmp_path / "folder", group_by="folder"), clips(packed, group_by="folder")
    assert [c.group for c in one] == [c.group for c in two] == ["cats", "cats", "dogs"]
    assert all((a.samples == b.samples).all() for a, b in zip(one, two, strict=True))
    (alone,) = clips(tmp_path / "folder" / "cats" / "二.wav", group_by="file")
    assert alone.group == "cats/二.wav" and not alone.text


def test_text_beside_a_clip_belongs_to_the_whole_clip_only(tmp_path: Path) -> None:
    write(tmp_path / "a.wav", tone(3.0))
    (tmp_path / "a.txt").write_text("hello there\n")
    assert [c.text for c in clips(tmp_path)] == ["hello there"]
    assert [c.text for c in clips(tmp_path, seconds=1.5)] == ["", ""]


def test_broken_files_are_named_and_skipped_unless_all_are(tmp_path: Path) -> None:
    (tmp_path / "bad.wav").write_bytes(b"RIFF nothing of a kind")
    said = r"holds no audio \(one file, not readable; the first, [^<]*bad.wav: [^<]*\); give"
    with pytest.raises(AnisoscopeError, match=said):
        clips(tmp_path)
    write(tmp_path / "good.wav", tone(1.5))
    counts = MediaCounts()
    assert len(clips(tmp_path, counts=counts)) == 1
    assert counts.files == 1 and len(counts.skipped) == 1 and "bad.wav" in counts.skipped[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("empty", "holds no files; expected"),
        ("pictures", "holds 1 file with suffix .png, none that is audio"),
        ("notes.txt", "is no file of audio"),
        ("missing.wav", "there is no file or folder"),
        ("hollow.zip", "holds no files; expected"),
    ],
)
def test_what_is_not_audio_is_refused_in_a_sentence(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("text")
    zipfile.ZipFile(tmp_path / "hollow.zip", "w").close()
    with pytest.raises(AnisoscopeError, match=words):
        clips(tmp_path / name)


def test_a_column_of_bytes_is_read_from_a_table_and_from_a_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    raw = io.BytesIO()
    wavfile.write(raw, RATE, tone(1.5))
    values = [{"bytes": raw.getvalue(), "path": None}] * 2
    pq.write_table(pa.table({"audio": values, "speaker": ["x", "y"]}), tmp_path / "t.parquet")
    found = clips(tmp_path / "t.parquet", group_by="speaker")
    assert [c.group for c in found] == ["x", "y"] and len(found[0].samples) == 24000
    made = datasets.Dataset.from_dict({"clip": values, "n": [1, 2]}).cast_column("clip", datasets.Audio())
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made)
    assert [(c.samples == found[0].samples).all() for c in clips("some/name")] == [True, True]
    with pytest.raises(AnisoscopeError, match=r"has no column 'nope'; its columns are: clip, n"):
        clips("some/name", column="nope")


def test_contexts_without_a_sample_are_refused() -> None:
    with pytest.raises(AnisoscopeError, match="hold no sample"):
        clips(None, seconds=1e-6)
