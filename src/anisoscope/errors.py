"""The exception class whose message is shown to users, and constructors of errors for unknown names and paths."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

_MANY, _SHOWN = 36, 12  # of more known names than this, only the most similar are listed


class AnisoscopeError(Exception):
    """Invalid input; the message is one sentence: what was found, what was expected, what to do.

    The command line prints it without a traceback and exits with 2.
    """


class TooFewRows(AnisoscopeError):
    """There are fewer usable rows than the metric needs."""


class UnusableFolder(AnisoscopeError):
    """A run folder cannot be made, read or written at present: its disk is full or read-only, or rights are missing."""

    @classmethod
    def because(cls, folder: Path, error: OSError) -> UnusableFolder:
        why = error.strerror or str(error)
        return cls(f"run folder {str(folder)!r} cannot be used ({why}); make room or rights, or give another.")


class OccupiedFolder(AnisoscopeError):
    """Another process is writing into a folder; `writer` says which, in words."""

    def __init__(self, folder: Path, writer: str) -> None:
        super().__init__(
            f"run folder {str(folder)!r} is being written by {writer}; wait until it ends or stop it, or give another "
            "folder."
        )
        self.folder, self.writer = folder, writer

    def __reduce__(self) -> tuple[type[OccupiedFolder], tuple[Path, str]]:
        return OccupiedFolder, (self.folder, self.writer)


class Interrupted(KeyboardInterrupt):
    """A signal that ends a command; `code` is its exit code as shells count: 130 for SIGINT, 143 for SIGTERM.

    >>> Interrupted(15).code
    143
    """

    def __init__(self, number: int, text: str = "") -> None:
        super().__init__(text)
        self.code = 128 + number


def named_type(value: object) -> str:
    """The type of a value as a word for messages; None is called None.

    >>> named_type(None), named_type("x")
    ('None', 'str')
    """
    return "None" if value is None else type(value).__name__


def unknown_name(what: str, name: str, known: Iterable[str]) -> AnisoscopeError:
    """An error for a name that is not in `known`; it suggests the most similar known name.

    >>> str(unknown_name("site", "residual", ["resid", "embed"]))
    "unknown site 'residual'; did you mean 'resid'? Known: embed, resid."
    """
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    shown = difflib.get_close_matches(str(name), names, n=_SHOWN, cutoff=0) if len(names) > _MANY else names
    more = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
    return AnisoscopeError(f"unknown {what} {str(name)[:80]!r}{hint} Known: {', '.join(sorted(shown))}{more}.")


def check_known(what: str, name: str, known: Iterable[str]) -> None:
    """Raise `unknown_name` unless `name` is in `known`."""
    if name not in (names := list(known)):
        raise unknown_name(what, name, names)


def missing_path(path: str | Path) -> AnisoscopeError:
    """An error for a path that does not exist; it suggests similar names in the same folder."""
    hint = near_miss(path) or "check the spelling."
    return AnisoscopeError(f"there is no file or folder {str(path)!r}; {hint}")


def refuse_special(path: str | Path) -> None:
    """Raise an error for a pipe, a device or a socket, whose reading may never end."""
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise AnisoscopeError(f"{str(path)!r} is a pipe or a device, whose end nobody knows; save it to a file first.")


def near_miss(path: str | Path) -> str:
    """The question "did you mean …?" with existing paths named almost like `path`; empty where there are none."""
    path = Path(path)
    parent = path.parent
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    depth = len(parent.parts) if str(parent) != "." else 0
    wanted = path.parts[depth] if len(path.parts) > depth else path.name
    others = sorted({p.name for p in parent.iterdir()} - {wanted})  # a link to nowhere is there under its own name
    near = difflib.get_close_matches(wanted, others, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(repr(str(parent / name)) for name in near)}?" if near else ""
