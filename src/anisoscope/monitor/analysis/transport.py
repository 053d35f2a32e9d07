"""Objects with large tensors from one process to another, through shared memory.

The tensors of an object are copied into one block for each device and dtype, which takes no time on a GPU, so that
whoever owns them may go on; a block is then copied into memory that both processes map, beside the rest of the object,
which is pickled. The file of that memory has no name, so that a process that is killed leaves nothing behind, and
belongs to no file system whose size is limited, as that of /dev/shm is in many containers.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import mmap
import os
import pickle
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

_HOST = "cpu"
_ALIGN = 256  # bytes
_Place = tuple[str, torch.dtype]  # device and dtype of a block
_STAGE = 32 << 20  # bytes of pinned memory that a block of a GPU passes through
_HEAD = struct.Struct("<QQ")  # number of the message, bytes of its memory
_ENDS = struct.Struct("<QQ")  # bytes of the blocks, and of blocks and pickle


class _Writer(pickle.Pickler):
    """Pickles everything but tensors, which are collected for the blocks of their devices."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: dict[_Place, list[Tensor]] = {}
        self.sizes: dict[_Place, int] = {}  # elements of the blocks
        self._known: dict[int, tuple[_Place, int]] = {}  # by the id of a tensor, which is its own while that is kept
        self.packages: set[str] = set()  # that the other process imports for it

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType):
            self.packages.add(str(value.__module__).partition(".")[0])
            if value.__module__ == "__main__":
                raise pickle.PicklingError(f"{value.__qualname__} is defined in the script itself")
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return None
        if id(value) not in self._known:
            block = str(value.device), value.dtype
            self._known[id(value)] = block, self.sizes.get(block, 0)
            self.sizes[block] = self.sizes.get(block, 0) + value.numel()
            self.tensors.setdefault(block, []).append(value)
        return *self._known[id(value)], tuple(value.shape)


class _Reader(pickle.Unpickler):
    def __init__(self, text: bytes, memory: mmap.mmap | bytearray, sizes: dict[_Place, int], device: str) -> None:
        super().__init__(io.BytesIO(text))
        self.memory, self.known = memory, dict[Any, Tensor]()
        self.starts = dict(zip(sizes, itertools.accumulate(map(_bytes, sizes.items()), initial=0), strict=False))
        self.blocks = {
            block: self._on_host(block, 0, (size,)).to(device or block[0])
            for block, size in sizes.items()
            if _HOST not in (block[0], device)
        }

    def persistent_load(self, key: Any) -> Tensor:
        if key not in self.known:
            block, place, shape = key
            if block in self.blocks:
                self.known[key] = self.blocks[block][place : place + math.prod(shape)].view(shape)
            else:
                self.known[key] = self._on_host(block, place, shape)
        return self.known[key]

    def _on_host(self, block: _Place, place: int, shape: tuple[int, ...]) -> Tensor:
        """A view with a storage of its own: `torch.save` would write the whole block, and not in several types."""
        number, dtype = math.prod(shape), block[1]
        if not number:
            return torch.empty(shape, dtype=dtype)
        start = self.starts[block] + place * dtype.itemsize
        return torch.frombuffer(self.memory, dtype=dtype, count=number, offset=start).view(shape)


def _bytes(block: tuple[_Place, int]) -> int:
    """The room of a block of so many elements."""
    (_, dtype), size = block
    return _padded(size * dtype.itemsize)


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


@dataclass
class Parcel:
    """An object that is ready to be copied into shared memory; its tensors may change or go."""

    text: bytes
    blocks: list[Tensor]  # one-dimensional
    room: int  # bytes that the blocks take
    copied: list[torch.cuda.Event]  # when the blocks are complete
    packages: set[str]  # that the other process imports for it

    @classmethod
    @torch.no_grad()
    def of(cls, value: Any) -> Parcel:
        """The parcel of an object; an error of `pickle` if something in it belongs to this process alone."""
        file = io.BytesIO()
        writer = _Writer(file)
        writer.dump(value)
        blocks = [_block(tensors) for tensors in writer.tensors.values()]
        cuda = {block.device for block in blocks if block.is_cuda}
        copied = [torch.cuda.current_stream(device).record_event() for device in cuda]
        text, room = pickle.dumps((writer.sizes, file.getvalue())), sum(map(_bytes, writer.sizes.items()))
        return cls(text, blocks, room, copied, writer.packages)

    @property
    def size(self) -> int:
        """Bytes of shared memory."""
        return self.room + len(self.text) + _ENDS.size

    def written(self) -> int:
        """An open file of shared memory that holds it; whoever called closes the file."""
        file = os.memfd_create("anisoscope")
        self._write(file)
        return file

    def save(self, path: Path) -> None:
        """Write it to disk for a process that shares no memory with this one; the file is there only when whole."""
        hidden = path.with_name(f".{path.name}")
        file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self._write(file)
        os.close(file)
        hidden.replace(path)

    def _write(self, file: int) -> None:
        """Write it to an open file, which is closed if that fails."""
        try:
            for event in self.copied:
                event.synchronize()
            os.posix_fallocate(file, 0, self.size)  # an error here if there is no memory, and none when it is written
            memory, place = torch.frombuffer(mmap.mmap(file, self.size), dtype=torch.uint8), 0
            for block in self.blocks:
                _copy(block.view(torch.uint8), memory[place : place + block.nbytes])
                place += _padded(block.nbytes)
            end = place + len(self.text)
            memory[place:] = torch.frombuffer(bytearray(self.text + _ENDS.pack(place, end)), dtype=torch.uint8)
        except BaseException:
            os.close(file)
            raise


def _block(tensors: list[Tensor]) -> Tensor:
    """A copy of tensors of one device and dtype, one after the other; on the host where there is no room for it."""
    kind = tensors[0].device.type
    half = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # it would refuse other dtypes
    with torch.autocast(kind, enabled=False) if half else contextlib.nullcontext():
        try:
            return torch.cat([tensor.reshape(-1) for tensor in tensors])
        except torch.OutOfMemoryError:
            return torch.cat([tensor.reshape(-1).cpu() for tensor in tensors])


def _copy(block: Tensor, memory: Tensor) -> None:
    """Copy a block of a device; by a stream of its own through pinned memory, so that others' work does not wait."""
    if block.device.type != "cuda":
        memory.copy_(block)
        return
    stage = torch.empty(min(_STAGE, len(block)), dtype=torch.uint8, pin_memory=True)
    with torch.cuda.device(block.device):
        stream = torch.cuda.Stream()
        for part, there in zip(block.split(len(stage)), memory.split(len(stage)), strict=True):
            with torch.cuda.stream(stream):
                stage[: len(part)].copy_(part, non_blocking=True)
            stream.synchronize()
            there.copy_(stage[: len(part)])


def unpack(file: int, size: int, *, copied: bool = False, device: str = "") -> Any:
    """The object in a file of shared memory; tensors are views of that memory, or on the device that they were on.

    Those of any other device go to this `device`, if one is given. The file stays open as long as one of the views is
    held, unless the memory is `copied`.

    >>> parcel = Parcel.of({"x": torch.arange(3), "name": "rows"})
    >>> unpack(parcel.written(), parcel.size)
    {'x': tensor([0, 1, 2]), 'name': 'rows'}
    """
    with open(file, "rb") as held:  # closes it
        memory: mmap.mmap | bytearray = bytearray(held.read()) if copied else mmap.mmap(file, size)
    start, end = _ENDS.unpack(memory[-_ENDS.size :])
    sizes, text = pickle.loads(memory[start:end])
    return _Reader(text, memory, sizes, device).load()


def send(line: socket.socket, number: int, parcel: Parcel) -> None:
    """Write and send an object."""
    file = parcel.written()
    try:
        socket.send_fds(line, [_HEAD.pack(number, parcel.size)], [file])
    finally:
        os.close(file)


def receive(line: socket.socket) -> tuple[int, int, int] | None:
    """(number, file, size) of the next object; None when the other side has ended."""
    text, files, _, _ = socket.recv_fds(line, _HEAD.size, 1)
    if len(text) < _HEAD.size or not files:
        return None
    number, size = _HEAD.unpack(text)
    return number, files[0], size
