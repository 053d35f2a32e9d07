"""Letters for terminals, pipes and files that have few: near ones for those that an encoding lacks.

Every replacement is one letter wide, so that columns stay where they are. Imported before the first word is printed, so
it imports nothing heavy.
"""

from __future__ import annotations

import codecs
import io
import unicodedata
from typing import Any

NEAR = dict(zip("–—−‐×·…“”‘’„✓✕≤≥→←≈∞\u00a0", '---_x.~""\'\'"+x<><<~8 ', strict=True)) | {"‐": "-", "→": ">"}
HANDLER = "anisoscope-near"


def near(letter: str) -> str:
    """The nearest ASCII letter, or ? where there is none.

    >>> near("–"), near("é"), near("λ"), near("²")
    ('-', 'e', '?', '2')
    """
    plain = NEAR.get(letter) or unicodedata.normalize("NFKD", letter)[:1]
    return plain if plain.isascii() and plain.isprintable() and plain else "?"


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(near(letter) for letter in error.object[error.start : error.end]), error.end


codecs.register_error(HANDLER, _replace)


def tolerant(stream: Any) -> None:
    """Let a stream write every text: letters that its encoding lacks become near ones."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors=HANDLER)
