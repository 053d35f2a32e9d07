"""Labelled pictures and sounds on disk: read once, brought to one size, split by class into training and held-out.

    examples.json    the options it was made with, and counts
    values.npy       pictures uint8 [N, S, S, 3], or sounds int16 [N, T]
    labels.npy       the class of each, int64 [N]
    held_out.npy     which are held out, bool [N]
    processor/       settings of a transformers processor for such data

Nothing is padded: a picture is cropped to a square and scaled, a recording is cut into windows of equal length and an
incomplete last window is dropped. Files that cannot be read are skipped; `examples.json` names them.

A modality that can be trained is one file with an `ExampleKind`, which says how its examples are generated, read and
normalised, and with a `MediaModelKind` for each architecture, which `training.classifier` lists.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from anisoscope.data.enwik8 import whole_folder
from anisoscope.data.media_files import SHOWN, MediaCounts
from anisoscope.data.text import data_version
from anisoscope.errors import AnisoscopeError
from anisoscope.results.modality import Medium, Modality
from anisoscope.results.privacy import marked
from anisoscope.training.config import ClassifierConfig
from anisoscope.training.corpus import check_made_of

HELD_OUT = 0.15  # share of every class, at least one example
MARK = "examples.json"
Labelled = Iterator[tuple[np.ndarray, str]]  # examples with the names of their classes


@dataclass
class ClassCounts(MediaCounts):
    """Counts over all classes; a class without a readable file is left out instead of raising an error."""

    classes: list[str] = field(default_factory=list)  # all classes found
    useless: list[str] = field(default_factory=list)  # readable recordings without a whole window
    needed: ClassVar[bool] = False  # whether enough is left is checked once all classes were read


@dataclass(frozen=True)
class ExampleKind:
    """Examples of one medium; the option named `extent` (pixels of a side, or seconds) gives their size."""

    medium: Medium
    extent: str
    noun: str  # what examples are called in sentences
    unit: str  # what the first axis of an example counts
    most_generated: int  # generated examples take time and space
    generate: Callable[..., tuple[np.ndarray, int]]  # (number, the extent by its name) -> example and its class
    read: Callable[..., Labelled]  # (data, extent, *, most, counts) -> about equally many examples of each class
    inputs: Callable[[Tensor], dict[str, Tensor]]  # stored examples as floats -> inputs of a model
    processor: Callable[[Any], dict[str, Any]]  # extent -> settings of a transformers processor that does the same
    in_time: bool = False  # whether the examples of a class have an order in time
    remedy: str = ""  # what else helps against too few examples


@dataclass(frozen=True)
class MediaModelKind:
    """One architecture of classifiers: what it reads, and its configuration at some sizes."""

    name: str  # also transformers' model type
    architecture: str  # its class with a classifier on top
    modality: Modality
    examples: ExampleKind
    positions: Callable[[ClassifierConfig], int]  # patches or frames of an example; too few are an error
    fields: Callable[[ClassifierConfig], dict[str, Any]]
    halvings: int | None = None  # times that it halves the sides of a picture after the first patches
    others: Mapping[str, str] = field(default_factory=dict)  # its classes for objectives other than `classes`


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


def _first(names: Sequence[str]) -> str:
    """The first few names of many.

    >>> _first(["a", "b"]), _first(list("abcdefg"))
    ('a, b', 'a, b, c, d, e and 2 more')
    """
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def prepare_examples(data: str, folder: str | Path, *, kind: ExampleKind, extent: float, most: int) -> Examples:
    """Read at most `most` labelled examples into `folder`, or open those there if made with the same options.

    `data` is `embedded` (generated examples), or a source that `kind.read` reads.
    """
    folder = Path(folder)
    options = {"data": data, "medium": kind.medium.name, "most": most, kind.extent: extent}
    if not (folder / MARK).is_file():
        with whole_folder(folder, MARK) as temporary:
            _make(temporary, options, kind)
    examples = Examples.open(folder)
    check_made_of(examples.about, options, f"the examples in {str(folder)!r} were")
    return examples


def _make(folder: Path, options: Mapping[str, Any], kind: ExampleKind) -> None:
    data, most, extent, counts = options["data"], options["most"], options[kind.extent], ClassCounts()
    if data == "embedded":
        generated = (kind.generate(index, **{kind.extent: extent}) for index in range(min(most, kind.most_generated)))
        labelled: Labelled = ((value, f"{label:02d}") for value, label in generated)
    else:
        labelled = kind.read(data, extent, most=most, counts=counts)
    by_class, repeated, fingerprint = _by_class(labelled, in_time=kind.in_time)
    kept = {name: values for name, values in sorted(by_class.items()) if len(values) > 1}
    every = sorted({*by_class, *counts.classes})
    if len(kept) < 2:
        of_all = f"of {len(every)} in all" + (f"; {counts.unread}" if counts.unread else "")
        raise AnisoscopeError(
            f"{data!r} has {len(kept)} classes with two different {kind.noun} or more ({of_all}); "
            f"a classifier needs two classes: give a folder with a folder for each{kind.remedy}."
        )
    counted = [len(values) for values in kept.values()]
    held = np.concatenate([np.arange(n) >= n - max(1, round(HELD_OUT * n)) for n in counted])  # the last of each class
    np.save(folder / "values.npy", np.stack([value for values in kept.values() for value in values]))
    np.save(folder / "labels.npy", np.repeat(np.arange(len(kept), dtype=np.int64), counted))
    np.save(folder / "held_out.npy", held)
    about: dict[str, Any] = {"made_of": marked(dict(options)), "of": data_version(data) if data == "embedded" else {}}
    about |= {"fingerprint": fingerprint, "classes": list(kept), "repeated": repeated}
    about |= {"left_out": sorted(set(every) - set(kept)), "examples": len(held), "held_out": int(held.sum())}
    about |= {"skipped": counts.skipped, "unread": counts.unread}
    about |= {"useless": counts.useless, "dropped_pieces": counts.dropped_pieces}
    (folder / "processor").mkdir()
    for file, content in (("processor/preprocessor_config.json", kind.processor(extent)), (MARK, about)):
        (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _by_class(examples: Labelled, *, in_time: bool) -> tuple[dict[str, list[np.ndarray]], int, str]:
    """(distinct examples by class, number of duplicates, fingerprint).

    Pictures are sorted by a hash of their content, so that the held-out ones do not depend on file names; windows of
    sound stay in order of time, so that the held-out ones are at the end of a recording.
    """
    digests: dict[str, dict[bytes, np.ndarray]] = {}
    seen: set[bytes] = set()
    repeated = 0
    for value, name in examples:
        digest = hashlib.sha256(value.tobytes()).digest()
        repeated += digest in seen
        if digest not in seen:
            digests.setdefault(name, {})[digest] = value
        seen.add(digest)
    fingerprint = hashlib.sha256(b"".join(sorted(seen))).hexdigest()[:16]
    by_class = {name: list((of if in_time else dict(sorted(of.items()))).values()) for name, of in digests.items()}
    return by_class, repeated, fingerprint


def class_folders(path: Path, what: str) -> list[Path]:
    """The folders in a folder, each of which is a class."""
    if not path.is_dir():
        raise AnisoscopeError(f"{str(path)!r} is no folder of {what}; give one, or 'embedded'.")
    return sorted(each for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))
