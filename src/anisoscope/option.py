"""Command-line options, declared as annotations on the dataclass fields that they set, and parsers of their values.

    tokens: Annotated[int, Option("Rows to look at.")] = 65_536

declares a dataclass field and the option `--tokens` of the command that takes this dataclass; `commands.command` builds
the option from the field. A field without an Option is not settable from the command line. This module is imported
before the help is printed, so it and the modules with configurations import no heavy library.
"""

from __future__ import annotations

import contextlib
import functools
import math
import numbers as numeric
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ParamSpec, TypeVar, get_type_hints

from anisoscope.errors import AnisoscopeError, unknown_name

MOST_NUMBERS = 100_000  # in a span such as 0-8
MOST = 10**12  # the largest size that any option may have
MOST_SEED = (1 << 63) - 1
P = ParamSpec("P")
R = TypeVar("R")
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


def seeds_of(given: int | Sequence[int]) -> tuple[int, ...]:
    """One seed or several.

    >>> seeds_of(1), seeds_of([1, 2]), seeds_of(())
    ((1,), (1, 2), ())
    """
    return (given,) if isinstance(given, int) else tuple(given)


# -- values ------------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A number of numpy, or a list of such, as Python's own: those overflow and are neither hashed nor written alike.

    >>> import numpy as np
    >>> plain(np.int64(3)), plain([np.int64(3), 4]), plain("3")
    (3, [3, 4], '3')
    """
    if type(value) in (list, tuple):
        inside = [plain(one) for one in value]
        return value if all(a is b for a, b in zip(inside, value, strict=True)) else type(value)(inside)
    if isinstance(value, numeric.Integral):
        return value if isinstance(value, int) else int(value)
    return float(value) if isinstance(value, numeric.Real) and not isinstance(value, float) else value


def takes_plain(function: Callable[P, R]) -> Callable[P, R]:
    """Have the keyword arguments of a function made `plain`."""

    @functools.wraps(function)
    def act(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **{name: plain(value) for name, value in kwargs.items()})

    return act


_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", NoneType: "None"}


@functools.cache
def _hints(source: Any) -> dict[str, Any]:
    return typing.get_type_hints(source)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type, as far as that can be told without running anything."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(one, inner[0]) for one in value)
    if origin in (Iterable, Sequence):
        inside = value if isinstance(value, list | tuple) else ()
        letters = isinstance(value, str) and inner[0] is not str
        return isinstance(value, origin) and not letters and all(_fits(one, inner[0]) for one in inside)
    if origin is Callable:
        return callable(value)
    if hint is int:
        return isinstance(value, numeric.Integral) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, numeric.Real) and not isinstance(value, bool) and math.isfinite(value)
    plain = isinstance(hint, type) and hint is not Any and not getattr(hint, "_is_protocol", False)
    return isinstance(value, hint) if plain else True


def _words(hint: Any) -> str:
    """A type in words: "a whole number or None"."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        return " or ".join(dict.fromkeys(map(_words, inner)))
    if origin in (tuple, Iterable, Sequence):
        return f"a list (each {_words(inner[0])})" if inner[0] in _WORDS else "a list"
    if origin is Callable:
        return "a function"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def _as_tuple(value: Any, hint: Any) -> Any:
    """A list, a text with commas or a single number as the tuple that a field holds; anything else as it is."""
    kinds = [one for one in (hint, *typing.get_args(hint)) if typing.get_origin(one) is tuple]
    inner = typing.get_args(kinds[0])[0] if kinds else None
    if not kinds or value is None or isinstance(value, tuple):
        return value
    if isinstance(value, str):
        return listed(value, "a list") if inner is str else value
    return (
        tuple(value)
        if isinstance(value, list | set | frozenset | range)
        else (value,)
        if _fits(value, inner)
        else value
    )


def check_values(source: Any, values: Mapping[str, Any], least: Mapping[str, float] | None = None) -> None:
    """Raise an error for a value of another type than `source` (a class or a function) declares, or of no size.

    No number is NaN or infinite, none is beyond what any machine could hold, and none is below its `least`.
    """
    hints = _hints(source)
    for name, value in values.items():
        if name in hints and not _fits(value, hints[name]):
            raise AnisoscopeError(f"{name} is {str(value)[:80]!r}; expected {_words(hints[name])}.")
        most = MOST_SEED if name == "seed" else MOST
        if isinstance(value, int) and value > most:
            shown = str(value) if value < 10**40 else f"{str(value)[:40]}…"
            raise AnisoscopeError(
                f"{name} is {shown}; expected {'less than 2**63' if name == 'seed' else f'at most {most:,}'}."
            )
        bound = (least or {}).get(name)
        if bound is not None and value is not None and not value >= bound:
            raise AnisoscopeError(f"{name} is {value}; expected at least {bound}.")


def check_least(config: Any, least: Mapping[str, float]) -> None:
    """Raise an error if a field of `config` is of a wrong type or below its minimum; None is the preset's value.

    Lists become the tuples that the fields are declared as.
    """
    source: Any = type(config)
    hints = _hints(source)
    for field in fields(config):
        given = getattr(config, field.name)
        if (value := _as_tuple(plain(given), hints[field.name])) is not given:
            object.__setattr__(config, field.name, value)
    check_values(source, {field.name: getattr(config, field.name) for field in fields(config)}, least)


def check_most(config: Any, most: Mapping[str, float]) -> None:
    """Raise an error if a field of `config` is above what any machine could do; None is always accepted."""
    for name, bound in most.items():
        value = getattr(config, name)
        if value is not None and not value <= bound:
            raise AnisoscopeError(f"{name} is {value}; expected at most {bound:,}.")


# -- options that do nothing -------------------------------------------------------------------------------------------

_FLAGS = {"special": "--skip-special", "first": "--skip-first", "memory_mb": "--memory"}
_typed: ContextVar[tuple[Any, frozenset[str]]] = ContextVar("typed", default=(None, frozenset()))


@contextlib.contextmanager
def typed_options(config: Any, names: Iterable[str]) -> Iterator[None]:
    """Around a command: these options of a configuration, or of its class while it is made, were typed.

    Be it with their default values.
    """
    token = _typed.set((config, frozenset(names)))
    try:
        yield
    finally:
        _typed.reset(token)


def was_typed(name: str, config: Any = None) -> bool:
    """Whether an option was typed on the command line that is running, into this configuration if one is given."""
    of, names = _typed.get()
    return name in names and (config is None or of is config or of is type(config))


def refuse_idle(config: Any, names: Collection[str], why: str) -> None:
    """Raise an error if one of these fields was given, since it would do nothing: `why`, such as "without --model"."""
    defaults = {field.name: field.default for field in fields(config)}
    refuse_typed([n for n in names if getattr(config, n) != defaults[n] or was_typed(n, config)], why)


def refuse_typed(names: Iterable[str], why: str) -> None:
    """Raise an error for the first of these options, which were given and would do nothing."""
    for name in names:
        flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
        raise AnisoscopeError(f"{flag} does nothing {why}; leave it out.")


def refuse_arguments(values: Mapping[str, Any], why: str) -> None:
    """As `refuse_idle`, for arguments of a function: raise an error for the first that is neither None nor empty."""
    for name, value in values.items():
        if value:
            raise AnisoscopeError(f"{name} does nothing {why}, or leave it out.")


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
