"""Reading images one at a time as RGB arrays: from files, folders, archives, datasets, or synthetic pictures."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from anisoscope.data.media_files import Item, MediaCounts, embedded_media, read_media
from anisoscope.data.synthetic import SHAPES, make_picture
from anisoscope.errors import AnisoscopeError
from anisoscope.results.modality import IMAGES_DATA

MOST_PIXELS = 100_000_000  # of one picture: 300 MB as an array
EMBEDDED = (60, 128)  # number of synthetic pictures, and pixels of a side


@dataclass(frozen=True, eq=False)
class Picture:
    """One context: an RGB image, values 0 to 255."""

    array: np.ndarray  # [H, W, 3] uint8
    group: str = ""
    source: str = ""


def read_images(
    source: str | Path | None = None,
    *,
    column: str | None = None,
    group_by: str | None = None,
    counts: MediaCounts | None = None,
) -> Iterator[Picture]:
    """Pictures of any size and mode as RGB, read lazily; None or "embedded" are made by `synthetic.make_picture`.

    Files that cannot be read are skipped and named in `counts`.

    >>> picture = next(read_images(None))
    >>> picture.array.shape, picture.source
    ((128, 128, 3), 'embedded')
    """
    counts = counts if counts is not None else MediaCounts()
    if source is None or source == "embedded":
        made = (make_picture(index, size=EMBEDDED[1]) for index in range(EMBEDDED[0]))
        labelled = ((array, SHAPES[label]) for array, label in made)
        pictures = embedded_media("picture", labelled, group_by=group_by, counts=counts)
    else:
        pictures = read_media(str(source), IMAGES_DATA, _decoded, column=column, group_by=group_by, counts=counts)
    for array, item in pictures:
        yield Picture(array, item.group, item.name)


def _decoded(item: Item) -> Iterator[np.ndarray]:
    if item.value is not None:  # decoded by the `datasets` library
        yield as_rgb(item.value)
        return
    try:
        from PIL import Image
    except ImportError as error:
        raise AnisoscopeError(
            f"reading {item.name!r} needs `pillow`; install it: pip install 'anisoscope[media]'."
        ) from error
    with item.open() as stream, warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # it is weighed here
        try:
            image = Image.open(stream)
        except Image.DecompressionBombError as error:
            raise ValueError(f"its pixels are too many; expected at most {MOST_PIXELS:,}") from error
        if image.width * image.height > MOST_PIXELS:
            raise ValueError(f"{image.width} × {image.height} pixels are too many; expected at most {MOST_PIXELS:,}")
        yield as_rgb(image)


def as_rgb(image: Any) -> np.ndarray:
    """The pixels [H, W, 3] of a Pillow image (its first frame) or an array of any mode.

    Sixteen bits are scaled to 0 … 255, floats by their largest value where that is above one. Transparent
    pixels are blended onto white.

    >>> as_rgb(np.array([[0, 65535]], dtype=np.uint16))[0, :, 0].tolist()
    [0, 255]
    """
    if hasattr(image, "convert"):
        if image.mode in ("I", "F") or image.mode.startswith("I;16"):
            return as_rgb(np.asarray(image))
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in getattr(image, "info", {}):
            return _on_white(np.asarray(image.convert("RGBA")))
        return np.asarray(image.convert("RGB"))
    array = np.asarray(image)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        raise ValueError(f"an array of shape {array.shape} is no image; expected [H, W], [H, W, 3] or [H, W, 4]")
    array = _eight_bits(array)
    if array.ndim == 3 and array.shape[2] == 4:
        return _on_white(array)
    return np.ascontiguousarray(np.broadcast_to(array.reshape(*array.shape[:2], -1), (*array.shape[:2], 3)))


def _eight_bits(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    if np.issubdtype(array.dtype, np.floating):
        if not np.isfinite(array).all():
            raise ValueError("its pixels are not all finite")
        top = float(array.max(initial=0.0))
        return np.clip(array * (255.0 if top <= 1.0 else 255.0 / top), 0, 255).astype(np.uint8)
    # Pillow reads 16-bit images as int32, too, where only the values tell them from 8-bit ones.
    top = 65535 if array.dtype == np.uint16 or array.max(initial=0) > 255 else 255
    return np.clip(array.astype(np.float64) * (255.0 / top), 0, 255).astype(np.uint8)


def _on_white(array: np.ndarray) -> np.ndarray:
    alpha = array[:, :, 3:].astype(np.float32) / 255.0
    return np.rint(array[:, :, :3] * alpha + 255.0 * (1.0 - alpha)).astype(np.uint8)
