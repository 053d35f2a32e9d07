"""Labelled pictures and sounds on disk: read once, brought to one size, split by class into training and held-out.

    examples.json    the options it was made with, and counts
    values.npy       pictures uint8 [N, S, S, 3], or sounds int16 [N, T]
    labels.npy       the class of each, int64 [N]
    held_out.npy     which are held out, bool [N]
    processor/       settings of a transformers processor for such data

Nothing is padded: a picture is cropped to a square and scaled, a recording is cut into windows of equal length and an
incomplete last window is dropped. Files that cannot be read are skipped; `examples.json` names them.
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
from anisoscope.data.media_files import SHOWN, MediaCounts
from anisoscope.data.synthetic import make_clip, make_picture
from anisoscope.data.text import files_in
from anisoscope.errors import AnisoscopeError
from anisoscope.results.modality import IMAGES_DATA, SOUNDS_DATA, Medium
from anisoscope.training.corpus import check_made_of

RATE = 16_000  # samples a second
HELD_OUT = 0.15  # share of every class, at least one example
MADE = {IMAGES_DATA.name: 8192, SOUNDS_DATA.name: 2048}  # most generated examples, which take time and space
MARK = "examples.json"
_SHORTER = ", or several recordings, or a shorter window"
_NAMES = (("images", "labels"), ("x_train", "y_train"), ("X", "y"))  # of the arrays in an .npz
Labelled = Iterator[tuple[np.ndarray, str]]


@dataclass(frozen=True)
class ExampleShape:
    """The shape of an example: a square picture with sides of `size` pixels, or a sound of `seconds`."""

    medium: str  # images or audio
    size: int = 32
    seconds: float = 1.0

    @property
    def samples(self) -> int:
        """Samples of one window of sound."""
        return round(self.seconds * RATE)

    @property
    def processor(self) -> dict[str, Any]:
        """Settings of a transformers processor that prepares data like `MediaStream`."""
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
    """Counts over all classes; a class without a readable file is left out instead of raising an error."""

    classes: list[str] = field(default_factory=list)  # all classes found
    useless: list[str] = field(default_factory=list)  # readable recordings without a whole window

    def refuse_nothing(self, source: str, medium: Medium) -> None:
        """Do nothing: whether enough is left is checked once all classes were read."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Labelled examples on disk."""

    path: Path
    about: dict[str, Any]
    values: np.ndarray
    labels: np.ndarray
    held_out: np.ndarray

    @classmethod
    def open(cls, path: str | Path) -> Examples:
        """Open a folder that `prepare_examples` wrote."""
        path = Path(path)
        try:
            about = json.loads((path / MARK).read_text(encoding="utf-8"))
            # memory-mapped: values may be gigabytes, and the processes of several arms share them
            arrays = [np.load(path / "values.npy", mmap_mode="c")]  # copy-on-write: torch wants writable memory
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
        """Sentences on what was left out on reading."""
        notes = [str(self.about.get("unread", ""))]
        if useless := self.about.get("useless"):
            what = "1 recording holds" if len(useless) == 1 else f"{len(useless)} recordings hold"
            notes.append(f"{what} no whole window of sound: {_first(useless)}")
        if pieces := int(self.about.get("dropped_pieces", 0)):
            what = "1 piece of sound was" if pieces == 1 else f"{pieces} pieces of sound were"
            notes.append(f"{what} dropped, shorter than a window or not finite")
        if left_out := self.about.get("left_out"):
            what = "1 class has" if len(left_out) == 1 else f"{len(left_out)} classes have"
            notes.append(f"{what} fewer than two examples, and no part in it: {_first(left_out)}")
        return [text for text in notes if text]


def prepare_examples(data: str, folder: str | Path, *, shape: ExampleShape, most: int) -> Examples:
    """Read at most `most` labelled examples into `folder`, or open those there if made with the same options.

    Pictures: `embedded`, `digits` (scikit-learn's), a folder with a folder of pictures for each class, MNIST's idx
    files or a folder of them, or an .npz with images and labels. Sounds: `embedded`, a folder with a folder of .wav
    files for each class, or a folder of recordings, each of which is a class of its own.
    """
    folder = Path(folder)
    options = {"data": data, "medium": shape.medium, "most": most}
    options |= {"size": shape.size} if shape.medium == IMAGES_DATA.name else {"seconds": shape.seconds}
    if not (folder / MARK).is_file():
        with whole_folder(folder, MARK) as temporary:
            _make(temporary, options, shape)
    examples = Examples.open(folder)
    check_made_of(examples.about, options, f"the examples in {str(folder)!r} were")
    return examples


def _make(folder: Path, wanted: Mapping[str, Any], shape: ExampleShape) -> None:
    of_images, counts = shape.medium == IMAGES_DATA.name, ClassCounts()
    data, most, read = wanted["data"], int(wanted["most"]), _pictures if of_images else _sounds
    labelled = _generated(shape, most) if data == "embedded" else read(data, shape, most, counts=counts)
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
    """(distinct examples by class, number of duplicates, fingerprint).

    Pictures are sorted by a hash of their content, so that the held-out ones do not depend on file names; windows of
    sound stay in order of time, so that the held-out ones are at the end of a recording.
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


def _generated(shape: ExampleShape, most: int) -> Labelled:
    """Generated examples with their classes."""
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
    """(images, labels) of an .npz or of MNIST's idx files; None if it is neither."""
    if path.suffix == ".npz":
        images, labels = _from_npz(path)
    else:
        files = [path] if path.is_file() else sorted(path.glob("*images*idx3*")) if path.is_dir() else []
        if not files:
            return None
        label_files = [file.with_name(file.name.replace("images", "labels").replace("idx3", "idx1")) for file in files]
        images = np.concatenate([_idx(file) for file in files])
        for file, label_file in zip(files, label_files, strict=True):
            if not label_file.is_file() or label_file == file:
                raise AnisoscopeError(f"{str(file)!r} has no labels beside it; expected {label_file.name!r}.")
        labels = np.concatenate([_idx(file) for file in label_files])
    valid = images.dtype == np.uint8 and (images.ndim == 3 or (images.ndim == 4 and images.shape[3] in (1, 3)))
    if not valid or labels.shape != images.shape[:1]:
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
    """Read an idx file (MNIST): two zeros, type 8, number of dimensions, the dimensions, then the bytes."""
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
    """The central square of a picture, scaled to `size` pixels.

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
    loose = path.is_dir() and any(each.suffix.lower() in SOUNDS_DATA.suffixes for each in path.iterdir())
    classes = _recordings(path) if loose else _class_folders(path, "recordings")  # loose recordings are a class each
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
            else:  # an incomplete last window
                counts.dropped_pieces += 1
        if not count and len(counts.skipped) == skipped:
            counts.useless.append(str(file))


def _integers(samples: np.ndarray) -> np.ndarray:
    """Samples within ±1 as int16."""
    return np.clip(np.rint(samples * 32767), -32768, 32767).astype(np.int16)
