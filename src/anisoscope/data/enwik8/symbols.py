"""The 205 symbols of enwik8: the distinct values of its bytes, fixed here so that every text has the same ids.

    id        0  1  2 … 96   97 … 160   161 … 187   188   189 … 202   203 204
    byte      9 10 32 … 126  128 … 191  194 … 220   222   224 … 237   239 240

Ids are in the order of the bytes. A byte outside of them is an error that says how many there are and where.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from anisoscope.errors import AnisoscopeError

SYMBOLS = (9, 10, *range(32, 127), *range(128, 192), *range(194, 221), 222, *range(224, 238), 239, 240)
NO_SYMBOL = 255  # in `ID_OF_BYTE`, where a byte has no id
# Code points whose UTF-8 holds another byte: controls, Thaana, NKo and others, private use, the planes from 4 on.
OUTSIDE = re.compile("[\x00-\x08\x0b-\x1f\x7f\u0740-\u077f\u07c0-\u07ff\ue000-\uefff\U00040000-\U0010ffff]")

BYTE_OF_ID = np.array(SYMBOLS, dtype=np.uint8)
ID_OF_BYTE = np.full(256, NO_SYMBOL, dtype=np.uint8)
ID_OF_BYTE[BYTE_OF_ID] = np.arange(len(SYMBOLS), dtype=np.uint8)
BYTE_OF_ID.flags.writeable = ID_OF_BYTE.flags.writeable = False


def encode(text: str | bytes) -> np.ndarray:
    """The ids 0…204 of a text's UTF-8 bytes, uint8.

    >>> encode("a cat").tolist()
    [67, 2, 69, 67, 86]
    >>> decode(encode("naïve 漢字"))
    'naïve 漢字'
    """
    ids = ID_OF_BYTE[np.frombuffer(_utf8(text), dtype=np.uint8)]
    if len(ids) and int(ids.max()) == NO_SYMBOL:
        raise _outside(_utf8(text), np.flatnonzero(ids == NO_SYMBOL))
    return ids


def decode(ids: Any, *, errors: str = "strict") -> str:
    """The text of some ids; `errors="replace"` for a piece that was cut inside a character."""
    raw = decode_bytes(ids)
    try:
        return raw.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise AnisoscopeError(
            f"these {len(raw)} ids are no whole UTF-8 text (at place {error.start}): perhaps a piece that was cut "
            f"inside a character; use errors='replace', or decode_bytes."
        ) from error


def decode_bytes(ids: Any) -> bytes:
    """The bytes of some ids, whether or not they are a whole UTF-8 text."""
    array = np.asarray(ids)
    if array.size == 0:
        return b""
    if array.dtype.kind not in "iu":
        raise AnisoscopeError(
            f"ids of the type {array.dtype} are no ids; expected integers from 0 to {len(SYMBOLS) - 1}."
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= len(SYMBOLS):
        raise AnisoscopeError(
            f"the ids reach from {low} to {high}; expected 0 to {len(SYMBOLS) - 1}, the symbols of enwik8."
        )
    return BYTE_OF_ID[array].tobytes()


def _utf8(text: str | bytes) -> bytes:
    if not isinstance(text, str):
        return bytes(text)
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise AnisoscopeError(
            f"the text holds half a surrogate pair at character {error.start}, which is no UTF-8; remove it first."
        ) from error


def _outside(raw: bytes, places: np.ndarray) -> AnisoscopeError:
    first, values = int(places[0]), sorted({raw[place] for place in places.tolist()})
    shown = ", ".join(f"0x{value:02x}" for value in values[:4]) + (", …" if len(values) > 4 else "")
    amount = "1 byte that is" if len(places) == 1 else f"{len(places)} bytes that are"
    return AnisoscopeError(
        f"the text holds {amount} not among the {len(SYMBOLS)} symbols of enwik8 ({shown}; the first at byte offset "
        f"{first}); remove such characters, or use another vocabulary."
    )


def vocabulary() -> dict[str, Any]:
    """What `vocabulary.json` holds: the byte of each id, and how it is written."""
    shown = [chr(byte) if 32 < byte < 127 else f"0x{byte:02x}" for byte in SYMBOLS]
    return {"name": "enwik8", "size": len(SYMBOLS), "unit": "byte of UTF-8", "bytes": list(SYMBOLS), "shown": shown}
