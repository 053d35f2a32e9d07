"""The one exception that a user is meant to read, and errors for names and paths that are not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class AnisoscopeError(Exception):
    """Bad input, told in one sentence: what was seen, what was expected, what to do.

    The command line prints it without a traceback and exits with 2.
    """


class TooFewRows(AnisoscopeError):
    """A metric was asked of fewer usable rows than it can be computed from."""


def unknown_name(what: str, name: str, known: Iterable[str]) -> AnisoscopeError:
    """An error for a name that is not in a vocabulary, with the nearest one suggested.

    >>> str(unknown_name("site", "residual", ["resid", "embed"]))
    "unknown site 'residual'; did you mean 'resid'? Known: embed, resid."
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return AnisoscopeError(f"unknown {what} {name!r}{hint} Known: {', '.join(names)}.")


def check_known(what: str, name: str, known: Iterable[str]) -> None:
    """Refuse a name that is not in a vocabulary."""
    if name not in (names := list(known)):
        raise unknown_name(what, name, names)


def missing_path(path: str | Path) -> AnisoscopeError:
    """An error for a path that is not there, with the nearest names beside it suggested."""
    hint = near_miss(path) or "check the spelling."
    return AnisoscopeError(f"there is no file or folder {str(path)!r}; {hint}")


def near_miss(path: str | Path) -> str:
    """A question that names files or folders spelled almost like a path that is not there, or nothing."""
    path = Path(path)
    parent = path.parent
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    depth = len(parent.parts) if str(parent) != "." else 0
    wanted = path.parts[depth] if len(path.parts) > depth else path.name
    near = difflib.get_close_matches(wanted, sorted(p.name for p in parent.iterdir()), n=3, cutoff=0.6)
    return f"did you mean {' or '.join(repr(str(parent / name)) for name in near)}?" if near else ""
