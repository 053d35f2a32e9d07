"""The table of modalities: the input of a model, what one row of it is, and the terms for both in texts.

A new modality is one row in `MODALITIES`. Where its data is of a new kind, it also needs a `Medium` below and one file
with a processor (`models.processor.PROCESSORS`) and a feed of batches (`measurement.feed`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Medium:
    """One kind of data: `name` stands in options and run.json, `noun` and `shipped` in sentences."""

    name: str
    noun: str
    shipped: str  # what the data that comes with the package is called
    inputs: tuple[str, ...]  # names under which a model's forward takes it
    suffixes: tuple[str, ...] = ()  # file name suffixes
    columns: tuple[str, ...] = ()  # usual names of its column in a table or dataset
    feature: str = ""  # class of such a column in the `datasets` library

    def __str__(self) -> str:
        return self.name


TEXT_DATA = Medium("text", "text", "the embedded corpus", ("input_ids", "inputs_embeds"))
SOUNDS_DATA = Medium(
    "audio",
    "sound",
    "the embedded sounds",
    inputs=("input_values", "input_features"),
    suffixes=(".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".aiff", ".aif", ".au"),
    columns=("audio", "speech", "sound", "wav", "file"),
    feature="Audio",
)
IMAGES_DATA = Medium(
    "images",
    "pictures",
    "the embedded images",
    inputs=("pixel_values",),
    suffixes=(".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"),
    columns=("image", "img", "picture", "pixel_values", "jpg", "png"),
    feature="Image",
)
MEDIA = {medium.name: medium for medium in (TEXT_DATA, SOUNDS_DATA, IMAGES_DATA)}


@dataclass(frozen=True)
class Modality:
    """The kind of input of a stack of a model, and what one row of it is."""

    name: str
    medium: Medium
    row: str  # what one row is
    units: str  # what rows are counted in
    hue: int  # colour in figures
    attends: bool = True  # False: positions are mixed by convolutions

    @property
    def is_text(self) -> bool:
        """Whether it reads tokens; only then are the first and the last position special."""
        return self.medium is TEXT_DATA


TEXT = Modality("text", TEXT_DATA, "one token", "tokens", hue=0)
CHARACTERS = Modality("characters", TEXT_DATA, "one character (or byte) of text", "characters", hue=4)
SPEECH = Modality("speech", SOUNDS_DATA, "one frame of audio", "frames", hue=1)
VISION = Modality("vision", IMAGES_DATA, "one patch of an image", "patches", hue=2)
CONVOLUTION = Modality("convolution", IMAGES_DATA, "one position of a feature map", "positions", hue=3, attends=False)
MODALITIES = {found.name: found for found in (TEXT, CHARACTERS, SPEECH, VISION, CONVOLUTION)}
APART = "; class and register tokens are apart"


def row_words(modalities: Mapping[str, str], apart: Collection[str] = ()) -> dict[str, str]:
    """What a row is, by stack; stacks in `apart` have class or register tokens, which are separate rows.

    >>> row_words({"encoder": "speech"})
    {'encoder': 'one frame of audio'}
    """
    return {stack: MODALITIES[name].row + (APART if stack in apart else "") for stack, name in modalities.items()}


def attends(name: str) -> bool:
    """Whether models of a modality have attention; those of an unknown one count as such.

    >>> attends("speech"), attends("convolution")
    (True, False)
    """
    return name not in MODALITIES or MODALITIES[name].attends


def modality_name(entry: Mapping[str, object], stack: str) -> str:
    """The name of the modality of a stack by a model's entry in run.json; empty if it is not stated.

    Runs of earlier versions have one modality for all stacks.
    """
    stated = entry.get("modality")
    by_stack = stated if isinstance(stated, Mapping) else {"": stated}
    return str(by_stack.get(stack) or next(filter(None, by_stack.values()), ""))


def modality_in(entry: Mapping[str, object], stack: str) -> Modality | None:
    """The modality of a stack by a model's entry in run.json; None if it is not stated.

    >>> modality_in({"modality": {"encoder": "speech"}}, "encoder").name, modality_in({}, "single")
    ('speech', None)
    """
    return MODALITIES.get(modality_name(entry, stack))
