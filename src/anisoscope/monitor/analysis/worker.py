"""The process that analyses measured steps in the background: receives them, and sends back what it found."""

from __future__ import annotations

import os
import pickle
import socket
import time
from typing import Any

import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.monitor.analysis import transport

_PATIENCE = 10.0  # seconds between looks for the training process
_TRIES, _WAIT = 30, 2.0  # how often there may be no room on a GPU, and seconds in between
_KINDNESS = 5  # of 19: the training goes first where cores are few


def serve(file: int) -> None:
    """Answer the messages of one training until it ends; the first one is the analysis, without which there is nothing.

    Signals are for the training, which tells us when to end: those that ask to are ignored from the first line on.
    """
    os.nice(_KINDNESS)
    line, parent = socket.socket(fileno=file), os.getppid()
    line.settimeout(_PATIENCE)
    analysis: Any = None
    answer: Any
    while (message := _next(line, parent)) is not None:
        number, memory, size = message
        try:
            value = _unpacked(memory, size)
            if analysis is None:
                analysis, answer = value, (True, None)
            else:
                answer = True, _answer(analysis, *value)
            value = None  # the rows are not needed any more
        except Exception as error:
            answer = False, _told(error)
        if not _sent(line, number, answer) or analysis is None:
            return
        answer = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the training may need it


def _unpacked(memory: int, size: int) -> Any:
    """What was sent, on the GPU that it was on; on the host if others leave no room there for a while."""
    try:
        for _ in range(_TRIES):
            try:
                return transport.unpack(os.dup(memory), size)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                time.sleep(_WAIT)
        return transport.unpack(os.dup(memory), size, device="cpu")
    finally:
        os.close(memory)


def _sent(line: socket.socket, number: int, answer: Any) -> bool:
    """Whether the training takes answers; one that cannot be sent is replaced by the reason."""
    try:
        transport.send(line, number, transport.Parcel.of(answer))
    except ConnectionError:
        return False
    except Exception as error:  # a card of a tokenizer that gives anything but text
        return answer[0] and _sent(line, number, (False, _told(error)))
    return True


def _next(line: socket.socket, parent: int) -> tuple[int, int, int] | None:
    """The next message; None when the training has ended, of which others that it forked may hold the line open."""
    while True:
        try:
            return transport.receive(line)
        except TimeoutError:
            if os.getppid() != parent:
                return None
        except OSError:
            return None


def _answer(analysis: Any, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The result of a method of the analysis."""
    try:
        return getattr(analysis, name)(*args, **options)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        raise


def _told(error: Exception) -> Exception:
    """The error itself where the other process can read it, else its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return AnisoscopeError(f"{type(error).__name__}: {error}")
    return error
