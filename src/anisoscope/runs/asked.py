"""What a user asked to look at, in words: names of sites, modules and layers."""

from __future__ import annotations

from collections.abc import Sequence

EVERY = "all"  # in place of the names of sites: all that a model has


def names_of(words: Sequence[str] | str | None) -> list[str] | None:
    """Names as a list, also where one string holds several.

    >>> names_of("resid, cls"), names_of(("embed",)), names_of(None)
    (['resid', 'cls'], ['embed'], None)
    """
    if isinstance(words, str):
        return [word.strip() for word in words.split(",")]
    return None if words is None else list(words)


def too_deep(layers: set[int] | None, depth: int) -> list[str]:
    """A note where some of the layers asked for are not there; where none is, they are refused.

    >>> too_deep({1, 2, 3, 4}, 2), too_deep({2}, 2)
    (['layers 3, 4 are not there: the last one is 2'], [])
    """
    beyond = sorted(layer for layer in layers or () if layer > depth)
    if not beyond:
        return []
    words = ", ".join(map(str, beyond)) if len(beyond) < 4 else f"{beyond[0]} to {beyond[-1]}"
    verb = "layers {} are" if len(beyond) > 1 else "layer {} is"
    return [f"{verb.format(words)} not there: the last one is {depth}"]
