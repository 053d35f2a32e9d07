"""Labelled pictures and sounds on disk, once: read, brought to one size, split by class into training and held-out.

    examples.json    what it was made of, and what came out
    values.npy       pictures uint8 [N, S, S, 3], or sounds int16 [N, T]
    labels.npy       the class of each, int64 [N]
    held_out.npy     which are held out, bool [N]
    processor/       the settings with which transformers reads such data

Nothing is padded: a picture is cropped to a square and scaled, a recording is cut into windows of equal length and what
is left at its end is dropped. Files that cannot be read are skipped; `examples.json` names them.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from anisoscope.data.audio import read_audio
from anisoscope.data.enwik8 import whole_folder
from anisoscope.data.images import read_images
from anisoscope.data.media import SHOWN, MediaCounts
from anisoscope.data.synthetic import make_clip, make_picture
from anisoscope.data.text import files_in
from anisoscope.errors import AnisoscopeError
from anisoscope.results.modality import IMAGES_DATA, SOUNDS_DATA, Medium
from anisoscope.training.corpus import check_made_of

RATE = 16_000  # samples a second
HELD_OUT = 0.15  # of every class, and at least one example
MADE = {IMAGES_DATA.name: 8192, SOUNDS_DATA.name: 2048}  # at most, where examples are made: it takes time and room
MARK = "examples.json"
_SHORTER = ", or several recordings, or a shorter window"
_NAMES = (("images", "labels"), ("x_train", "y_train"), ("X", "y"))  # of the arrays in an .npz
Labelled = Iterator[tuple[np.ndarray, str]]


@dataclass(frozen=True)
class ExampleShape:
    """What an example is: a square picture of `size` pixels, or a sound of `seconds`."""

    medium: str  # images or audio
    size: int = 32
    seconds: float = 1.0

    @property
    def samples(self) -> int:
        """Samples of one window of sound."""
        return round(self.seconds * RATE)

    @property
    def processor(self) -> dict[str, Any]:
        """The settings with which transformers reads such data: what `MediaStream` does to it."""
        if self.medium == SOUNDS_DATA.name:
            settings: dict[str, Any] = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "do_normalize": True}
            settings |= {"sampling_rate": RATE, "feature_size": 1, "padding_value": 0.0, "return_attention_mask": False}
            return settings
        square = {"height": self.size, "width": self.size}
        settings = {"image_processor_type": "ViTImageProcessor", "do_resize": True, "size": square, "do_rescale": True}
        settings |= {"rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        return settings


@dataclass
class ClassCounts(MediaCounts):
    """What was read of all classes; one without a readable file is left out, and is no reason to stop."""

    classes: list[str] = field(default_factory=list)  # all that there are
    useless: list[str] = field(default_factory=list)  # recordings that were read and hold no whole window

    def refuse_nothing(self, source: str, medium: Medium) -> None:
        """Not for one class: whether enough is left is known once all were read."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Labelled examples as they lie on disk."""

    path: Path
    about: dict[str, Any]
    values: np.ndarray
    labels: np.ndarray
    held_out: np.ndarray

    @classmethod
    def open(cls, path: str | Path) -> Examples:
        """What `prepare_examples` wrote."""
        path = Path(path)
        try:
            about = json.loads((path / MARK).read_text(encoding="utf-8"))
            # the values may be gigabytes, and every arm has a process of its own: they share what the disk has
            arrays = [np.load(path / "values.npy", mmap_mode="c")]  # torch wants writable memory
            arrays += [np.load(path / f"{name}.npy") for name in ("labels", "held_out")]
        except (OSError, ValueError) as error:
            raise AnisoscopeError(
                f"{str(path)!r} holds no readable examples ({error}); delete that folder, and it is made again."
            ) from error
        return cls(path, about, *arrays)

    @property
    def classes(self) -> list[str]:
        """The names of the classes, by label."""
        return list(self.about["classes"])

    @property
    def notes(self) -> list[str]:
        """What was left out on reading, in sentences."""
        found = [str(self.about.get("unread", ""))]
        if useless := self.about.get("useless"):
            what = "1 recording holds" if len(useless) == 1 else f"{len(useless)} recordings hold"
            found.append(f"{what} no whole window of sound: {_first(useless)}")
        if pieces := int(self.about.get("dropped_pieces", 0)):
            what = "1 piece of sound was" if pieces == 1 else f"{pieces} pieces of sound were"
            found.append(f"{what} dropped, shorter than a window or not finite")
        if left := self.about.get("left_out"):
            what = "1 class has" if len(left) == 1 else f"{len(left)} classes have"
            found.append(f"{what} fewer than two examples, and no part in it: {_first(left)}")
        return [text for text in found if text]


def prepare_examples(data: str, folder: str | Path, *, shape: ExampleShape, most: int) -> Examples:
    """Read labelled examples into `folder`, at most `most` of them, or open what lies there if it was made of the same.

    Pictures: `embedded`, `digits` (scikit-learn's), a folder with a folder of pictures for each class, MNIST's idx
    files or a folder of them, or an .npz with images and labels. Sounds: `embedded`, a folder with a folder of .wav
    files for each class, or a folder of recordings, each of which is a class of its own.
    """
    folder = Path(folder)
    wanted = {"data": data, "medium": shape.medium, "most": most}
    wanted |= {"size": shape.size} if shape.medium == IMAGES_DATA.name else {"seconds": shape.seconds}
    if not (folder / MARK).is_file():
        with whole_folder(folder, MARK) as beside:
            _make(beside, wanted, shape)
    found = Examples.open(folder)
    check_made_of(found.about, wanted, f"the examples in {str(folder)!r} were")
    return found


def _make(folder: Path, wanted: Mapping[str, Any], shape: ExampleShape) -> None:
    of_images, counts = shape.medium == IMAGES_DATA.name, ClassCounts()
    data, most, read = wanted["data"], int(wanted["most"]), _pictures if of_images else _sounds
    labelled = _made(shape, most) if data == "embedded" else read(data, shape, most, counts=counts)
    found, repeated, digest = _by_class(labelled, sort=of_images)
    kept = {name: values for name, values in found.items() if len(values) > 1}
    names, every = sorted(kept), sorted({*found, *counts.classes})
    if len(kept) < 2:
        what, more = (IMAGES_DATA.noun, "") if of_images else ("windows of sound", _SHORTER)
        of_all = f"of {len(every)} in all" + (f"; {counts.unread}" if counts.unread else "")
        raise AnisoscopeError(
            f"{data!r} has {len(kept)} classes with two different {what} or more ({of_all}); "
            f"a classifier needs two classes: give a folder with a folder for each{more}."
        )
    counted = [len(kept[name]) for name in names]
    held = np.concatenate([np.arange(n) >= n - max(1, round(HELD_OUT * n)) for n in counted])  # the last of each class
    np.save(folder / "values.npy", np.stack([value for name in names for value in kept[name]]))
    np.save(folder / "labels.npy", np.repeat(np.arange(len(names), dtype=np.int64), counted))
    np.save(folder / "held_out.npy", held)
    (folder / "processor").mkdir()
    text = json.dumps(shape.processor, indent=2) + "\n"
    (folder / "processor" / "preprocessor_config.json").write_text(text, encoding="utf-8")
    about = {"made_of": dict(wanted), "fingerprint": digest, "classes": names, "repeated": repeated}
    about |= {"left_out": sorted(set(every) - set(kept)), "examples": len(held), "held_out": int(held.sum())}
    about |= {"skipped": counts.skipped, "unread": counts.unread}
    about |= {"useless": counts.useless, "dropped_pieces": counts.dropped_pieces}
    (folder / MARK).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _first(names: Sequence[str]) -> str:
    """The first few names of many.

    >>> _first(["a", "b"]), _first(list("abcdefg"))
    ('a, b', 'a, b, c, d, e and 2 more')
    """
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _by_class(examples: Labelled, *, sort: bool) -> tuple[dict[str, list[np.ndarray]], int, str]:
    """Different examples by class, how many were repeated, and a number for all of them.

    Pictures are put in the order of a hash of their content, so that which are held out does not depend on their names;
    windows of sound stay in time, so that what is held out lies at the end of a recording.
    """
    found: dict[str, dict[bytes, np.ndarray]] = {}
    seen: set[bytes] = set()
    repeated = 0
    for value, name in examples:
        key = hashlib.sha256(value.tobytes()).digest()
        repeated += key in seen
        if key not in seen:
            found.setdefault(name, {})[key] = value
        seen.add(key)
    whole = hashlib.sha256(b"".join(sorted(seen))).hexdigest()[:16]
    ordered = {name: sorted(each) if sort else list(each) for name, each in found.items()}
    return {name: [found[name][key] for key in keys] for name, keys in ordered.items()}, repeated, whole


def _made(shape: ExampleShape, most: int) -> Labelled:
    """Examples that are generated, with their classes."""
    for index in range(min(most, MADE[shape.medium])):
        if shape.medium == IMAGES_DATA.name:
            value, label = make_picture(index, size=shape.size)
        else:
            samples, label = make_clip(index, seconds=shape.seconds, rate=RATE)
            value = _integers(samples)
        yield value, f"{label:02d}"


def _pictures(data: str, shape: ExampleShape, most: int, *, counts: ClassCounts) -> Labelled:
    """Pictures of one size with the names of their classes."""
    arrays = _digits() if data == "digits" else _arrays(Path(data))
    if arrays is not None:
        for image, label in islice(zip(*arrays, strict=True), most):
            image = image[:, :, None] if image.ndim == 2 else image
            coloured = image if image.shape[2] == 3 else image.repeat(3, axis=2)
            yield square(coloured, shape.size), str(label)
        return
    classes = _class_folders(Path(data), "pictures")
    counts.classes = [folder.name for folder in classes]
    for folder in classes:
        for picture in islice(read_images(str(folder), counts=counts), -(-most // len(classes))):
            yield square(picture.array, shape.size), folder.name


def _class_folders(path: Path, what: str) -> list[Path]:
    """The folders in a folder, each of which is a class."""
    if not path.is_dir():
        raise AnisoscopeError(f"{str(path)!r} is no folder of {what}; give one, or 'embedded'.")
    found = sorted(each for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))
    if not found and what == "pictures":
        raise AnisoscopeError(
            f"{str(path)!r} holds no folders; expected one for each class of {what}, MNIST's idx files, or an .npz "
            "with images and labels."
        )
    return found


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """The 8 × 8 digits that come with scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise AnisoscopeError("'digits' needs scikit-learn; install it, or give another --images.") from error
    found = load_digits()
    return (found.images * (255 / 16)).round().astype(np.uint8), found.target


def _arrays(path: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """Images and labels of an .npz or of MNIST's own files; None where it is neither."""
    if path.suffix == ".npz":
        images, labels = _from_npz(path)
    else:
        files = [path] if path.is_file() else sorted(path.glob("*images*idx3*")) if path.is_dir() else []
        if not files:
            return None
        beside = [file.with_name(file.name.replace("images", "labels").replace("idx3", "idx1")) for file in files]
        images = np.concatenate([_idx(file) for file in files])
        for file, other in zip(files, beside, strict=True):
            if not other.is_file() or other == file:
                raise AnisoscopeError(f"{str(file)!r} has no labels beside it; expected {other.name!r}.")
        labels = np.concatenate([_idx(file) for file in beside])
    right = images.dtype == np.uint8 and (images.ndim == 3 or (images.ndim == 4 and images.shape[3] in (1, 3)))
    if not right or labels.shape != images.shape[:1]:
        raise AnisoscopeError(
            f"{str(path)!r} has images {images.dtype} {images.shape} and labels {labels.shape}; expected bytes [N, H, "
            "W] or [N, H, W, 3], and one label for each."
        )
    return images, labels


def _from_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            for images, labels in _NAMES:
                if images in file and labels in file:
                    return file[images], file[labels]
            has = ", ".join(file.files)
    except (OSError, ValueError) as error:
        raise AnisoscopeError(f"{str(path)!r} is no readable .npz ({error}); save it again.") from error
    raise AnisoscopeError(f"{str(path)!r} has {has or 'nothing'}; expected arrays called images and labels.")


def _idx(path: Path) -> np.ndarray:
    """An array of bytes in MNIST's format: two zeros, type 8, number of dimensions, these, then the bytes."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if raw[:3] != b"\0\0\x08":
            raise ValueError("not an idx file of bytes")
        shape = np.frombuffer(raw, ">u4", count=raw[3], offset=4).astype(int)
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise AnisoscopeError(
            f"{str(path)!r} cannot be read as pictures ({error}); expected a folder with a folder for each class, "
            "MNIST's idx files, or an .npz with images and labels."
        ) from error


def square(image: np.ndarray, size: int) -> np.ndarray:
    """The middle square of a picture, scaled to `size` pixels: nothing is padded.

    >>> square(np.zeros((40, 60, 3), np.uint8), 32).shape
    (32, 32, 3)
    """
    height, width = image.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    image = image[top : top + side, left : left + side]
    if side == size:
        return image
    from PIL import Image

    scaled = Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(scaled, dtype=np.uint8)


def _sounds(data: str, shape: ExampleShape, most: int, *, counts: ClassCounts) -> Labelled:
    """Windows of sound of one length with the names of their classes."""
    path = Path(data)
    alone = path.is_dir() and any(each.suffix.lower() in SOUNDS_DATA.suffixes for each in path.iterdir())
    classes = _recordings(path) if alone else _class_folders(path, "recordings")  # alone: each is a class of its own
    counts.classes = [os.path.relpath(each, path) for each in classes]
    for each, name in zip(classes, counts.classes, strict=True):
        for samples in islice(_windows(each, shape, counts), -(-most // len(classes))):
            yield _integers(samples), name


def _recordings(path: Path) -> list[Path]:
    """The recordings in a folder and those below it."""
    return [each for each in files_in(path) if each.suffix.lower() in SOUNDS_DATA.suffixes]


def _windows(source: Path, shape: ExampleShape, counts: ClassCounts) -> Iterator[np.ndarray]:
    """The whole windows of a recording, or of all in a folder."""
    for file in [source] if source.is_file() else _recordings(source):
        count, skipped = 0, len(counts.skipped)
        for clip in read_audio(file, rate=RATE, seconds=shape.seconds, counts=counts):
            if len(clip.samples) == shape.samples:
                count += 1
                yield clip.samples
            else:  # the end of a recording
                counts.dropped_pieces += 1
        if not count and len(counts.skipped) == skipped:
            counts.useless.append(str(file))


def _integers(samples: np.ndarray) -> np.ndarray:
    """Samples within ±1 as int16."""
    return np.clip(np.rint(samples * 32767), -32768, 32767).astype(np.int16)
