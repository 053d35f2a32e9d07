"""Reading audio as contexts of equal length: from files, folders, archives, datasets, or synthetic clips."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import gcd
from pathlib import Path
from typing import BinaryIO

import numpy as np

from anisoscope.data.media_files import Item, MediaCounts, embedded_media, read_media
from anisoscope.data.synthetic import make_clip
from anisoscope.errors import AnisoscopeError
from anisoscope.results.modality import SOUNDS_DATA

RATE = 16_000
SECONDS = 10.0
_RATES = (1_000, 1_000_000)  # samples per second of any recording
SHORTEST = 1.0  # seconds; a shorter last piece of a recording is dropped and counted
PART = 600.0  # seconds decoded at a time, so that memory does not grow with a recording
EMBEDDED = (36, 8.0)  # number of synthetic clips, and seconds of each


@dataclass(frozen=True, eq=False)
class Clip:
    """One context: mono samples within about ±1 at `rate` per second."""

    samples: np.ndarray  # [T] float32
    rate: int
    group: str = ""
    source: str = ""
    text: str = ""  # transcript, where the clip is a whole recording that has one


def read_audio(
    source: str | Path | None = None,
    *,
    rate: int = RATE,
    seconds: float = SECONDS,
    column: str | None = None,
    group_by: str | None = None,
    counts: MediaCounts | None = None,
) -> Iterator[Clip]:
    """Contexts of `seconds` at `rate`, mono, read lazily; None or "embedded": clips of `synthetic.make_clip`.

    A last piece below a second (or below `seconds` where that is less) and pieces whose samples are not all finite are
    dropped, files that cannot be read are skipped; both are counted in `counts`.

    >>> clip = next(read_audio(None, seconds=2.0))
    >>> clip.samples.shape, clip.rate, clip.source
    ((32000,), 16000, 'embedded')
    """
    counts = counts if counts is not None else MediaCounts()
    cut = round(seconds * rate)
    if cut < 1:
        raise AnisoscopeError(f"contexts of {seconds} s hold no sample at {rate} per second; ask for longer ones.")
    if source is None or source == "embedded":
        made = (make_clip(index, seconds=EMBEDDED[1], rate=rate) for index in range(EMBEDDED[0]))
        labelled = (((samples, rate), f"vowel-{label}") for samples, label in made)
        sounds = embedded_media("clip", labelled, group_by=group_by, counts=counts)
    else:
        decode = partial(_decoded, most=max(1, int(PART // seconds)) * seconds)
        sounds = read_media(str(source), SOUNDS_DATA, decode, column=column, group_by=group_by, counts=counts)
    least = min(cut, round(SHORTEST * rate))
    for (samples, own_rate), item in sounds:
        samples = resampled(samples, own_rate, rate)
        for start in range(0, max(len(samples), 1), cut):
            piece = samples[start : start + cut]
            if len(piece) < least or not np.isfinite(piece).all():
                counts.dropped_pieces += 1
                continue
            counts.seconds += len(piece) / rate
            # the transcript is of the whole recording, so a part of it has none
            text = item.text if len(piece) == len(samples) else ""
            yield Clip(np.ascontiguousarray(piece, dtype=np.float32), rate, item.group, item.name, text)


def resampled(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """The mean over channels of samples [T] or [T, channels], resampled from `rate` to `wanted` per second: [T'].

    A polyphase filter avoids aliasing.

    >>> resampled(np.array([[1.0, 3.0], [0.0, 4.0]]), 16_000, 16_000).tolist()
    [2.0, 2.0]
    """
    samples = samples if samples.ndim == 1 else samples.mean(1)
    if rate == wanted or not len(samples):
        return samples.astype(np.float32, copy=False)
    from scipy.signal import resample_poly

    shared = gcd(rate, wanted)
    return np.asarray(resample_poly(samples, wanted // shared, rate // shared), dtype=np.float32)


def _decoded(item: Item, *, most: float) -> Iterator[tuple[np.ndarray, int]]:
    """Samples [T, channels] in blocks of `most` seconds, with their rate."""
    value = item.value
    if value is not None:  # decoded by the `datasets` library: {array, sampling_rate}
        if not isinstance(value, dict) or value.get("array") is None:
            raise ValueError(f"a {type(value).__name__} is no audio")
        samples = np.asarray(value["array"], dtype=np.float32)
        channels_first = samples.ndim == 2 and samples.shape[0] < samples.shape[1]
        yield samples.T if channels_first else samples, int(value["sampling_rate"])
        return
    with item.open() as stream:
        try:
            import soundfile
        except (ImportError, OSError):  # OSError: libsndfile is absent
            yield _plain_wav(stream, item.name)
            return
        with soundfile.SoundFile(stream) as file:
            if not _RATES[0] <= file.samplerate <= _RATES[1]:
                raise AnisoscopeError(
                    f"{item.name!r} says that it has {file.samplerate:,} samples per second; expected "
                    f"{_RATES[0]:,} to {_RATES[1]:,}: convert it, or leave it out."
                )
            while len(block := file.read(round(most * file.samplerate), dtype="float32", always_2d=True)):
                yield block, int(file.samplerate)


def _plain_wav(stream: BinaryIO, name: str) -> tuple[np.ndarray, int]:
    """(samples, rate) of a .wav file without soundfile; unlike the standard library scipy reads floats and 24 bits."""
    raw = stream.read()
    if raw[:4] not in (b"RIFF", b"RIFX", b"RF64"):
        raise AnisoscopeError(
            f"{name!r} is no .wav file, and reading it needs `soundfile`; install it: pip install 'anisoscope[media]'."
        )
    from scipy.io import wavfile

    rate, samples = wavfile.read(io.BytesIO(raw))
    scaled = samples.astype(np.float32)
    if samples.dtype == np.uint8:  # eight bits are unsigned
        scaled = (scaled - 128.0) / 128.0
    elif np.issubdtype(samples.dtype, np.integer):
        scaled /= float(-np.iinfo(samples.dtype).min)
    return scaled, int(rate)
