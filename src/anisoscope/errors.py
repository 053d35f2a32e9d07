"""The one exception that a user is meant to read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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
