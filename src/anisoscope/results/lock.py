"""One writer at a time: the lock of a run folder, held by a process while it writes; reading needs none."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import platform
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import psutil

from anisoscope.errors import AnisoscopeError, OccupiedFolder, UnusableFolder

LOCK = "lock.json"
BEAT = 20.0  # seconds between signs of life of a writer
SILENT = 600.0  # seconds without one after which a writer on another machine counts as gone
_COMMAND = 120  # characters of a command that a sentence shows


class _Held:
    """The locks of this process: how many of its objects share each, by folder; and the thread that shows it alive."""

    counts: ClassVar[dict[Path, int]] = {}
    process: ClassVar[int] = 0  # a forked child holds none of its parent's
    change: ClassVar[threading.RLock] = threading.RLock()
    thread: ClassVar[threading.Thread | None] = None

    @classmethod
    def of_this_process(cls) -> dict[Path, int]:
        if cls.process != os.getpid():
            cls.process, cls.thread = os.getpid(), None
            cls.counts.clear()
        return cls.counts

    @classmethod
    def beat(cls) -> None:
        """Begin to touch every lock from time to time, in a thread of its own."""

        def live(pause: threading.Event) -> None:
            while not pause.wait(BEAT):
                for folder in tuple(cls.counts):
                    with contextlib.suppress(OSError):
                        os.utime(folder / LOCK)

        if cls.thread is None:
            cls.thread = threading.Thread(target=live, args=(threading.Event(),), name="anisoscope-lock", daemon=True)
            cls.thread.start()


class WriterLock:
    """The right of this process to write into a run folder, until `release` or the end of the process.

    Everything in one process shares it. Another process that writes is told of by an error; a lock whose process is
    gone – none of that number, or one that began at another time; on another machine, one without a sign of life for
    ten minutes – is taken over, which `note` tells.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.note = Path(os.path.realpath(folder)), ""
        with _Held.change:
            held = _Held.of_this_process()
            if self.folder not in held:
                self.note = _claim(self.folder)
            held[self.folder] = held.get(self.folder, 0) + 1
            _Held.beat()
        self.release = weakref.finalize(self, _release, self.folder, os.getpid())

    def renew(self) -> bool:
        """Take the lock again if it was deleted, such as with its folder; whether that was so."""
        if _is_mine(_owner(self.folder)):
            return False
        _claim(self.folder)
        return True


def refuse_other_writer(folder: Path) -> None:
    """Raise an error if another process is writing into a folder."""
    owner = _owner(folder)
    if owner is not None and not _is_mine(owner) and not _gone(owner, folder):
        raise OccupiedFolder(folder, _words(owner))


def abandon(folder: Path) -> None:
    """Remove the lock of a writer that is said to be gone, such as a lost job on another machine.

    Not of one that is there: what ran on this machine may have outlived whoever watched it.
    """
    if has_ended(_owner(folder) or {}) is False:
        return
    with contextlib.suppress(OSError):
        (folder / LOCK).unlink()


def is_written(folder: Path) -> bool:
    """Whether a process, this one or another, is writing into a folder."""
    owner = _owner(folder)
    return owner is not None and not _gone(owner, folder)


def this_process() -> dict[str, Any]:
    """What tells this process from every other, for `has_ended`."""
    return _identity(os.getpid())


def has_ended(process: Mapping[str, Any]) -> bool | None:
    """Whether a process has ended; None if it is, or was, on another machine, where that cannot be known."""
    mine = this_process()
    near = (process.get("host"), process.get("space")) == (mine["host"], mine["space"])
    if not near or not isinstance(process.get("pid"), int):
        return None
    began = _began(process["pid"])
    return began is None or abs(began - float(process.get("began") or 0)) >= 2.0


@functools.cache
def _identity(pid: int) -> dict[str, Any]:
    """What tells this process from every other: its number alone may be given again, on this machine or another."""
    try:
        space = os.readlink("/proc/self/ns/pid")  # containers have numbers of their own
    except OSError:
        space = ""
    return {"pid": pid, "host": platform.node(), "space": space, "began": _began(pid)}


def _began(pid: int) -> float | None:
    """When a process began, in seconds; None if there is none, or it has ended and nobody asked for how."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time(), 2)
    except psutil.NoSuchProcess:
        return None


def _owner(folder: Path) -> dict[str, Any] | None:
    """Who wrote the lock of a folder; empty if that cannot be read, None if there is no lock."""
    return _read_owner(folder / LOCK)


def _read_owner(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):
        return {}


def _is_mine(owner: Mapping[str, Any] | None) -> bool:
    mine = this_process()
    return owner is not None and all(owner.get(name) == mine[name] for name in mine)


def _gone(owner: Mapping[str, Any], folder: Path) -> str:
    """Why the writer that holds a lock counts as gone; empty if it is there."""
    if (ended := has_ended(owner)) is not None:
        return "its process is gone" if ended else ""
    with contextlib.suppress(OSError):
        silent = _clock(folder) - (folder / LOCK).stat().st_mtime
        return "" if silent < SILENT else f"no sign of life for {silent / 60:.0f} minutes"
    return ""


def _clock(folder: Path) -> float:
    """The time by the clock of the folder's disk; by ours where nothing may be written there."""
    try:
        with tempfile.TemporaryFile(dir=folder) as now:
            return os.fstat(now.fileno()).st_mtime
    except OSError:
        return time.time()


def _words(owner: Mapping[str, Any]) -> str:
    """A writer in words.

    >>> _words({"pid": 7, "host": "here", "command": "anisoscope train", "since": "2026-01-01T10:00:00"})
    "process 7 on here ('anisoscope train') since 2026-01-01T10:00:00"
    """
    if not owner:
        return f"somebody else (its {LOCK} cannot be read)"
    told = f"process {owner.get('pid')} on {owner.get('host')} ({str(owner.get('command'))[:_COMMAND]!r})"
    return f"{told} since {owner.get('since')}"


def _claim(folder: Path) -> str:
    """Write the lock of a folder; returns a note where one that was left behind had to be taken over."""
    path, since = folder / LOCK, datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv else ""
    mine = json.dumps({**this_process(), "command": command, "since": since})
    note = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for _ in range(8):
            if _created(path, mine):
                return note
            owner = _owner(folder)
            if owner is None:  # just released
                continue
            if not (why := _gone(owner, folder)):
                raise OccupiedFolder(folder, _words(owner))
            if _put_aside(path, owner):
                note = f"the lock of {_words(owner)} was taken over: {why}"
    except OSError as error:
        raise UnusableFolder.because(folder, error) from error
    raise AnisoscopeError(f"several processes want to write into {str(folder)!r}; give each a folder of its own.")


def _put_aside(path: Path, owner: Mapping[str, Any]) -> bool:
    """Delete the lock of a writer that is gone; False if somebody else was quicker and it is theirs now."""
    aside = path.with_name(f".{LOCK}.{os.getpid()}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return False
    found = _read_owner(aside)
    if found != owner:
        aside.replace(path)
        return False
    aside.unlink()
    return True


def _created(path: Path, text: str) -> bool:
    """Make a file with its content in one step, unless it exists."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        beside.write_text(text, encoding="utf-8")
        try:
            os.link(beside, path)
        except FileExistsError:
            return False
        except (OSError, NotImplementedError):  # a file system without links
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        return True
    except FileExistsError:
        return False
    finally:
        beside.unlink(missing_ok=True)


def _release(folder: Path, process: int) -> None:
    """Give up one share of a lock; the last one removes it."""
    with _Held.change:
        held = _Held.of_this_process()
        if process != os.getpid() or folder not in held:
            return
        held[folder] -= 1
        if held[folder] <= 0:
            del held[folder]
            with contextlib.suppress(OSError):
                if _is_mine(_owner(folder)):
                    (folder / LOCK).unlink()


@contextlib.contextmanager
def writing(folder: Path, note: Callable[[str], None] | None = None) -> Iterator[None]:
    """Around everything that a command writes into a run folder; `note` is told what was taken over."""
    lock = WriterLock(folder)
    if lock.note and note is not None:
        note(lock.note)
    try:
        yield
    finally:
        lock.release()
