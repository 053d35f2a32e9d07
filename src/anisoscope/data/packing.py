"""Packed files: streams and archives that unpack to far more than any honest data are refused, not read."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

from anisoscope.errors import AnisoscopeError

BOMB, LEAST_BOMB = 200, 64 << 20  # times the packed size, and bytes, from which a file is no honest one


class UnpackedStream(io.RawIOBase):
    """An unpacked stream that ends with an error once it is far longer than any text that was packed."""

    def __init__(self, packed: BinaryIO, unpack: Callable[..., Any], name: str) -> None:
        self.packed, self.inner, self.name, self.count = packed, unpack(packed), name, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self.inner.read(len(buffer))
        self.count += len(block)
        refuse_bomb(self.name, self.count, self.packed.tell())
        buffer[: len(block)] = block
        return len(block)

    def close(self) -> None:
        self.inner.close()
        self.packed.close()
        super().close()


def refuse_bomb(name: str, unpacked: int, packed: int) -> None:
    """Raise an error for a file that unpacks to far more than any text, sound or picture does."""
    if unpacked > LEAST_BOMB and unpacked > BOMB * max(1, packed):
        raise AnisoscopeError(
            f"{name!r} unpacks to more than {BOMB} times its size, as no real data does; unpack it and look first."
        )


def refuse_bombs(archive: zipfile.ZipFile, members: Iterable[str]) -> None:
    """Raise an error if one of these members of an archive unpacks to far more than it should."""
    for info in map(archive.getinfo, members):
        refuse_bomb(f"{archive.filename}:{info.filename}", info.file_size, info.compress_size)
