"""Command-line options, declared as annotations on the dataclass fields that they set, and parsers of their values.

    tokens: Annotated[int, Option("Rows to look at.")] = 65_536

declares a dataclass field and the option `--tokens` of the command that takes this dataclass; `commands.command` builds
the option from the field. A field without an Option is not settable from the command line. This module is imported
before the help is printed, so it and the modules with configurations import no heavy library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from anisoscope.errors import AnisoscopeError, unknown_name

MOST_NUMBERS = 100_000  # in a span such as 0-8
Progress = Callable[[str, int, int], None]  # reports the progress of a run: (phase, number done, total)


@dataclass(frozen=True)
class Option:
    """How one dataclass field is set on the command line."""

    help: str
    name: str = ""  # such as --memory, if it differs from the field's name
    parse: Callable[[Any, str], Any] | None = None  # (value as typed, name of the option) -> value of the field
    typed: type = str  # type of the argument of `parse`
    least: int | None = None
    argument: bool = False  # positional instead of named
    metavar: str | None = None
    preset: str = ""  # the only preset it is valid with: "paper" (published models) or "trained" (models trained here)


def listed(text: str, option: str = "a list") -> tuple[str, ...]:
    """The items of a comma-separated list; an empty list is an error, since it is more likely a typo than "everything".

    >>> listed("a, b,a")
    ('a', 'b', 'a')
    """
    items = tuple(filter(None, (item.strip() for item in text.split(","))))
    if not items:
        raise AnisoscopeError(f"{option} is empty; name something, or leave it out.")
    return items


def distinct(text: str, option: str = "a list") -> tuple[str, ...]:
    """The items of a comma-separated list, without repetitions."""
    return tuple(dict.fromkeys(listed(text, option)))


def listed_or_none(text: str, option: str = "a list") -> tuple[str, ...]:
    """The items of a comma-separated list; `none` is the empty list."""
    return () if text.strip() == "none" else listed(text, option)


def layer_numbers(text: str, option: str = "--layers") -> tuple[int, ...]:
    """The numbers of a list such as `0,3,5-8`, ascending and without repetitions.

    >>> layer_numbers("3,0-1,0")
    (0, 1, 3)
    """
    return tuple(sorted({number for item in listed(text, option) for number in _span(item, option)}))


def seed_numbers(text: str, option: str = "--seeds") -> tuple[int, ...]:
    """The numbers of a list such as `0,1,2` or `0-2`; repetitions are kept and rejected later, with the runs named."""
    items = listed(text, option)
    if negative := [item for item in items if item.startswith("-")]:
        raise AnisoscopeError(f"{option} has {negative[0]!r}; seeds are whole numbers from 0 on, such as 0,1,2.")
    return tuple(number for item in items for number in _span(item, option))


def _span(item: str, option: str) -> range:
    """The numbers of a range `5-8` or of a single `5`."""
    start, _, end = item.partition("-")
    try:
        numbers = range(int(start), int(end or start) + 1)
    except ValueError as error:
        raise AnisoscopeError(f"{option} has {item!r}; expected numbers such as 0,3,5-8.") from error
    if not numbers:
        raise AnisoscopeError(f"{option} has {item!r}, which runs backwards; expected {end}-{start}.")
    if numbers.stop - numbers.start > MOST_NUMBERS:
        raise AnisoscopeError(f"{option} has {item[:40]!r}; expected at most {MOST_NUMBERS:,} numbers.")
    return numbers


def numbers(kind: type, example: str) -> Callable[[str, str], tuple[Any, ...]]:
    """A parser of comma-separated numbers of a type (int or float); `example` is shown in its error.

    >>> numbers(float, "0,0.5")("0.1,2", "--biases")
    (0.1, 2.0)
    """

    def parse(text: str, option: str) -> tuple[Any, ...]:
        items = listed(text, option)
        try:
            return tuple(kind(item) for item in items)
        except ValueError as error:
            expected = "whole numbers" if kind is int else "numbers"
            raise AnisoscopeError(f"{option} is {text!r}; expected {expected} such as {example}.") from error

    return parse


def check_least(config: Any, least: Mapping[str, float]) -> None:
    """Raise an error if a field of `config` is below its minimum; None (the preset's value) is always accepted."""
    for name, bound in least.items():
        value = getattr(config, name)
        if value is not None and not value >= bound:
            raise AnisoscopeError(f"{name} is {value}; expected at least {bound}.")


def check_most(config: Any, most: Mapping[str, float]) -> None:
    """Raise an error if a field of `config` is above what any machine could do; None is always accepted."""
    for name, bound in most.items():
        value = getattr(config, name)
        if value is not None and not value <= bound:
            raise AnisoscopeError(f"{name} is {value}; expected at most {bound:,}.")


_FLAGS = {"special": "--skip-special", "first": "--skip-first", "memory_mb": "--memory"}


def refuse_idle(config: Any, names: Iterable[str], why: str) -> None:
    """Raise an error if one of these fields was given, since it would do nothing: `why`, such as "without --model"."""
    defaults = {field.name: field.default for field in fields(config)}
    for name in names:
        if getattr(config, name) != defaults[name]:
            flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
            raise AnisoscopeError(f"{flag} does nothing {why}; leave it out.")


def given(config: Any, *names: str) -> dict[str, Any]:
    """The fields of `config` with these names that were given: all that are not None."""
    return {name: value for name in names if (value := getattr(config, name)) is not None}


def python_options(config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a Python call gives them: by the name of the field or of the flag, lists as lists or with commas.

    >>> @dataclass
    ... class Config:
    ...     layers: Annotated[tuple[int, ...], Option("Layers.", parse=layer_numbers)] = ()
    ...     memory_mb: Annotated[int, Option("MiB.", name="--memory")] = 9
    >>> python_options(Config, {"layers": "0,2-3", "memory": 4}), python_options(Config, {"layers": 3})
    ({'layers': (0, 2, 3), 'memory_mb': 4}, {'layers': (3,)})
    """
    hints = get_type_hints(config, include_extras=True)
    notes = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    declared = {name: note for name, every in notes.items() for note in every if isinstance(note, Option)}
    flags = {option.name[2:].replace("-", "_"): name for name, option in declared.items() if option.name}
    defaults = {each.name: each.default for each in fields(config)}
    found: dict[str, Any] = {}
    for name, value in given.items():
        field = flags.get(name, name)
        if field not in declared:
            raise unknown_name("option", name, {*declared, *flags})
        option = declared[field]
        if option.parse is not None and isinstance(value, option.typed) and (option.typed is str or name in flags):
            value = option.parse(value, name)
        elif isinstance(defaults[field], tuple) and not isinstance(value, tuple):
            value = () if value is None else tuple(value) if isinstance(value, Iterable) else (value,)
        found[field] = str(value) if isinstance(value, Path) else value
    return found


# Options that several commands share

Text = Annotated[
    str, Option("Text file, folder, .gz, .zip, .jsonl, .csv, .parquet, a datasets name, 'merged' or 'embedded'.")
]
Device = Annotated[str, Option("auto, cpu, cuda, cuda:1, mps.")]
DeviceMap = Annotated[str | None, Option("Spread a large model, such as 'auto' (needs accelerate).")]
Seed = Annotated[int, Option("Seed of all randomness.")]
BatchSize = Annotated[int, Option("Contexts in a batch.")]
Layers = Annotated[tuple[int, ...], Option("Layers such as 0,3,5-8; default: all.", parse=layer_numbers)]
Sites = Annotated[
    tuple[str, ...], Option("Places, comma-separated, or 'all'; see `anisoscope list sites`.", parse=distinct)
]
Tokenizer = Annotated[
    str | None, Option("Folder or hub id of a tokenizer, where the model has none or another is meant; or 'bytes'.")
]
RandomInit = Annotated[bool, Option("Fresh random weights.")]
TrustRemoteCode = Annotated[bool, Option("Run code of the model.")]


def _out_in(flag: bool, _: str) -> str:
    return "out" if flag else "in"


SkipFirst = Annotated[str, Option("Leave the first position out.", name="--skip-first", parse=_out_in, typed=bool)]
SkipSpecial = Annotated[str, Option("Leave special tokens out.", name="--skip-special", parse=_out_in, typed=bool)]
Split = Annotated[
    tuple[int, ...],
    Option("Energies also for other splits of the contexts to fit and to test: 1,2.", parse=numbers(int, "1,2")),
]
Rank = Annotated[int | None, Option("Directions of the tangent proxy; default: 16, at most a quarter of d.")]
