"""Objects with large tensors from one process to another, through shared memory.

The tensors of an object are copied into one block for each device, which takes no time on a GPU, so that whoever owns
them may go on; a block is then copied into memory that both processes map, beside the rest of the object, which is
pickled. The file of that memory has no name, so that a process that is killed leaves nothing behind, and belongs to no
file system whose size is limited, as that of /dev/shm is in many containers.
"""

from __future__ import annotations

import io
import itertools
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
_STAGE = 32 << 20  # bytes of pinned memory that a block of a GPU passes through
_HEAD = struct.Struct("<QQ")  # number of the message, bytes of its memory
_ENDS = struct.Struct("<QQ")  # bytes of the blocks, and of blocks and pickle


class _Writer(pickle.Pickler):
    """Pickles everything but tensors, which are collected with their places in the block of their device."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: dict[int, tuple[Tensor, str, int]] = {}  # by id; kept, so that ids stay their own
        self.sizes: dict[str, int] = {}  # of the blocks, by device
        self.packages: set[str] = set()  # that the other process imports for it

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType):
            self.packages.add(str(value.__module__).partition(".")[0])
            if value.__module__ == "__main__":
                raise pickle.PicklingError(f"{value.__qualname__} is defined in the script itself")
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return None
        if id(value) not in self.tensors:
            device, place = str(value.device), self.sizes.get(str(value.device), 0)
            self.tensors[id(value)] = value, device, place
            self.sizes[device] = place + _padded(value.numel() * value.element_size())
        _, device, place = self.tensors[id(value)]
        return device, place, value.dtype, tuple(value.shape)


class _Reader(pickle.Unpickler):
    def __init__(self, text: bytes, memory: mmap.mmap | bytearray, sizes: dict[str, int], device: str) -> None:
        super().__init__(io.BytesIO(text))
        self.memory, self.known = memory, dict[Any, Tensor]()
        self.starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
        there = {d: (start, start + sizes[d]) for d, start in self.starts.items() if _HOST not in (d, device)}
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self.blocks = {d: whole[slice(*ends)].to(device or d) for d, ends in there.items()}

    def persistent_load(self, key: Any) -> Tensor:
        if key not in self.known:
            device, place, dtype, shape = key
            if device in self.blocks:
                self.known[key] = _view(self.blocks[device], place, dtype, shape)
            else:
                self.known[key] = self._on_host(self.starts[device] + place, dtype, shape)
        return self.known[key]

    def _on_host(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """A view with a storage of its own: `torch.save` would write the whole block, and not in several types."""
        number = torch.Size(shape).numel()
        if not number:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.memory, dtype=dtype, count=number, offset=start).view(shape)


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _view(block: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return block[start : start + size].view(dtype).view(shape)


@dataclass
class Parcel:
    """An object that is ready to be copied into shared memory; its tensors may change or go."""

    text: bytes
    blocks: dict[str, Tensor]
    copied: list[torch.cuda.Event]  # when the blocks are complete
    packages: set[str]  # that the other process imports for it

    @classmethod
    @torch.no_grad()
    def of(cls, value: Any) -> Parcel:
        """The parcel of an object; an error of `pickle` if something in it belongs to this process alone."""
        file = io.BytesIO()
        writer = _Writer(file)
        writer.dump(value)
        blocks = {device: _block(device, size) for device, size in writer.sizes.items()}
        for tensor, device, place in writer.tensors.values():
            _view(blocks[device], place, tensor.dtype, tuple(tensor.shape)).copy_(tensor)
        cuda = [block.device for block in blocks.values() if block.is_cuda]
        copied = [torch.cuda.current_stream(device).record_event() for device in cuda]
        return cls(pickle.dumps((writer.sizes, file.getvalue())), blocks, copied, writer.packages)

    @property
    def size(self) -> int:
        """Bytes of shared memory."""
        return sum(map(len, self.blocks.values())) + len(self.text) + _ENDS.size

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
            for block in self.blocks.values():
                _copy(block, memory[place : place + len(block)])
                place += len(block)
            end = place + len(self.text)
            memory[place:] = torch.frombuffer(bytearray(self.text + _ENDS.pack(place, end)), dtype=torch.uint8)
        except BaseException:
            os.close(file)
            raise


def _block(device: str, size: int) -> Tensor:
    """Bytes on a device, or on the host where there is no room for them."""
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return torch.empty(size, dtype=torch.uint8)


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
