"""Options of the command line, declared on the fields of the configurations that they fill.

    tokens: Annotated[int, Option("Rows to look at.")] = 65_536

is a field of a dataclass and `--tokens` of the command that takes this dataclass; `commands.command` makes the one
from the other. A field without an Option is no option. This module is read before the help is printed: it and the
modules with configurations import no heavy library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from anisoscope.errors import AnisoscopeError


@dataclass(frozen=True)
class Option:
    """How one field is given on the command line."""

    help: str
    name: str = ""  # --memory, where it is not the name of the field
    parse: Callable[[Any, str], Any] | None = None  # (what was typed, name of the option) -> value of the field
    typed: type = str  # what is typed where it is parsed
    least: int | None = None
    argument: bool = False  # by its place, not by a name
    metavar: str | None = None
    preset: str = ""  # "paper": for published models alone, "trained": for arms that are trained; refused elsewhere


def listed(text: str, option: str = "a list") -> tuple[str, ...]:
    """`a,b,a` as words; an option that is given but empty is a slip, not a wish for everything.

    >>> listed("a, b,a")
    ('a', 'b', 'a')
    """
    words = tuple(filter(None, (word.strip() for word in text.split(","))))
    if not words:
        raise AnisoscopeError(f"{option} is empty; name something, or leave it out.")
    return words


def distinct(text: str, option: str = "a list") -> tuple[str, ...]:
    """`a,b,a` as words, each once."""
    return tuple(dict.fromkeys(listed(text, option)))


def listed_or_none(text: str, option: str = "a list") -> tuple[str, ...]:
    """`a,b` as words; `none` is no word at all."""
    return () if text.strip() == "none" else listed(text, option)


def layer_numbers(text: str, option: str = "--layers") -> tuple[int, ...]:
    """`0,3,5-8` as numbers, each once, in their order.

    >>> layer_numbers("3,0-1,0")
    (0, 1, 3)
    """
    return tuple(sorted({number for word in listed(text, option) for number in _span(word, option)}))


def seed_numbers(text: str, option: str = "--seeds") -> tuple[int, ...]:
    """`0,1,2` or `0-2` as numbers; one that is named twice stays twice, and is refused where the runs are known."""
    words = listed(text, option)
    if below := [word for word in words if word.startswith("-")]:
        raise AnisoscopeError(f"{option} has {below[0]!r}; seeds are whole numbers from 0 on, such as 0,1,2.")
    return tuple(number for word in words for number in _span(word, option))


def _span(word: str, option: str) -> range:
    """`5-8` or `5` as numbers."""
    start, _, end = word.partition("-")
    try:
        numbers = range(int(start), int(end or start) + 1)
    except ValueError as error:
        raise AnisoscopeError(f"{option} has {word!r}; expected numbers such as 0,3,5-8.") from error
    if not numbers:
        raise AnisoscopeError(f"{option} has {word!r}, which runs backwards; expected {end}-{start}.")
    return numbers


def numbers(kind: type, example: str) -> Callable[[str, str], tuple[Any, ...]]:
    """A parser of `1e-4,0.01` as numbers of a kind.

    >>> numbers(float, "0,0.5")("0.1,2", "--biases")
    (0.1, 2.0)
    """

    def parse(text: str, option: str) -> tuple[Any, ...]:
        words = listed(text, option)
        try:
            return tuple(kind(word) for word in words)
        except ValueError as error:
            whole = "whole numbers" if kind is int else "numbers"
            raise AnisoscopeError(f"{option} is {text!r}; expected {whole} such as {example}.") from error

    return parse


def check_least(config: Any, least: Mapping[str, int]) -> None:
    """Refuse a configuration with numbers below their least; a number that is None is as the preset has it."""
    for name, bound in least.items():
        value = getattr(config, name)
        if value is not None and value < bound:
            raise AnisoscopeError(f"{name} is {value}; expected at least {bound}.")


# -- options that several commands have --------------------------------------------------------------------------------

Text = Annotated[str, Option("Text file, folder, .gz, .zip, .jsonl, .csv, .parquet, a datasets name, or 'embedded'.")]
Device = Annotated[str, Option("auto, cpu, cuda, cuda:1, mps.")]
DeviceMap = Annotated[str | None, Option("Spread a large model, such as 'auto' (needs accelerate).")]
Seed = Annotated[int, Option("Seed of all randomness.")]
BatchSize = Annotated[int, Option("Contexts in a batch.")]
Layers = Annotated[tuple[int, ...], Option("Layers such as 0,3,5-8; default: all.", parse=layer_numbers)]
Sites = Annotated[
    tuple[str, ...], Option("Places, comma-separated, or 'all'; see `anisoscope list sites`.", parse=distinct)
]
Tokenizer = Annotated[str | None, Option("Folder or hub id of another tokenizer.")]
RandomInit = Annotated[bool, Option("Fresh random weights.")]
TrustRemoteCode = Annotated[bool, Option("Run code of the model.")]
Rank = Annotated[int | None, Option("Directions of the tangent proxy; default: 16, at most a quarter of d.")]
