"""Words that people wrote, with numbers that are looked up: `{{metric=probe_loss model=encoder step=last}}`.

A placeholder chooses rows as key tables do (`chosen_rows`) and becomes their mean. Values: `none`, `any`, and several
with commas. After a bar stands how it is told: a number of digits, `interval`, `peak` (the largest over steps), `peak
step` (when that was), `least` or `most` (over the rows). In quotes: `subject="encoder and decoder"`. Besides numbers:

    {{verdict claim=tangent_energy subject=decoder}}     holds, fails or undecided
    {{effect claim=tangent_energy subject=decoder}}      the effect with its interval
    {{count claim=tangent_energy status=holds}}          subjects with that verdict
    {{run data.vocab_size}}                              an entry of run.json

In sentences on several results the name of one comes first: `{{shape metric=two_nn step=last | 2}}`. Digits outside of
placeholders are refused, so that no measured number is copied by hand; names (`SmolLM2`, GPT-2) may have them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from anisoscope.errors import AnisoscopeError
from anisoscope.view.words import estimate, number
from result_pages.chosen_rows import Choice, cell, chosen
from result_pages.result import Result

PLACEHOLDER = re.compile(r"\{\{(.+?)\}\}", re.DOTALL)
NAMES = re.compile(r"`[^`]*`|\]\([^)]*\)|\b[A-Za-zβ²]+[\w.]*-?\d[\w.-]*")  # code, targets of links, names with digits
KINDS = ("verdict", "effect", "count", "run")
WHOLE_NUMBERS = ("step", "layer", "head", "seed")
FORMS = ("interval", "peak", "peak step", "least", "most")


class NotInTable(AnisoscopeError):
    """A placeholder asks for what the result does not have."""


def filled_in(text: str, results: Result | Mapping[str, Result]) -> str:
    """The text with its placeholders looked up; NotInTable where there is nothing to look up."""
    refuse_numbers(text)
    return PLACEHOLDER.sub(lambda found: _looked_up(found[1], results), text)


def refuse_numbers(text: str) -> None:
    """Raise an error for a number outside of placeholders, code and names.

    >>> refuse_numbers("SmolLM2 has {{run data.types}} types, `12x512`")
    >>> refuse_numbers("the loss is 2.95")
    Traceback (most recent call last):
    anisoscope.errors.AnisoscopeError: '2.95' in 'the loss is 2.95' is written by hand; look it up with a placeholder.
    """
    for line in PLACEHOLDER.sub("", text).splitlines():
        if found := re.search(r"\d[\d.,]*", NAMES.sub("", line)):
            raise AnisoscopeError(f"{found[0]!r} in {line!r} is written by hand; look it up with a placeholder.")


def _looked_up(inside: str, results: Result | Mapping[str, Result]) -> str:
    asked, _, form = (part.strip() for part in inside.partition("|"))
    words = shlex.split(asked)
    result = results if isinstance(results, Result) else results.get(words.pop(0))
    if result is None:
        raise NotInTable(f"{{{{{inside}}}}} names no result that is there.")
    kind = words.pop(0) if words and words[0] in KINDS else ""
    found = _entry(result, words[0]) if kind == "run" else _told(result, kind, _choice(words), form)
    if found is None:
        raise NotInTable(f"{result.name} has nothing for {{{{{inside}}}}}; change the words, or the placeholder.")
    return found


def _choice(words: list[str]) -> Choice:
    pairs = [word.partition("=")[::2] for word in words]
    return {key: _value(key, value) for key, value in pairs}


def _value(key: str, word: str) -> Any:
    if "," in word:
        return [_value(key, one) for one in word.split(",")]
    if word in ("none", "any"):
        return None if word == "none" else ...
    return int(word) if key in WHOLE_NUMBERS and word.isdigit() else word


def _told(result: Result, kind: str, choice: Choice, form: str) -> str | None:
    if kind == "count":
        same = [v for v in result.told if (v["claim"], v["status"]) == (choice["claim"], choice["status"])]
        return str(len(same))
    if kind:
        verdict = result.verdict(choice["claim"], choice["subject"])
        if verdict is None:
            return None
        return str(verdict["status"]) if kind == "verdict" else effect_words(verdict)
    return _number(result, choice, form)


def effect_words(verdict: Mapping[str, Any]) -> str:
    """The effect of a verdict with its interval, as in `0.61 [0.60, 0.62]`; "" without one."""
    if verdict.get("effect") is None:
        return ""
    ends = [verdict.get(name) for name in ("low", "high")]
    shown = ", ".join(number(end) for end in ends)
    return number(verdict["effect"]) + ("" if None in ends else f" [{shown}]")


def _number(result: Result, choice: Choice, form: str) -> str | None:
    rows = chosen(result.rows, choice)
    if form in ("peak", "peak step"):
        by_step = {step: cell(group) for step, group in rows.where(step=...).groups("step").items()}
        if not by_step:
            return None
        peak = max(by_step, key=lambda step: by_step[step].value)  # type: ignore[union-attr]
        return f"{peak:,}" if form == "peak step" else number(by_step[peak].value)  # type: ignore[union-attr]
    found = cell(rows, show="range" if form in ("least", "most") else "mean")
    if found is None:
        return None
    if form in ("least", "most"):
        return number(found.low if form == "least" else found.high)
    if form == "interval":
        return estimate(found.value, found.low, found.high)
    return number(found.value, int(form) if form else 3)


def _entry(result: Result, path: str) -> str | None:
    """An entry of run.json by its path: `data.vocab_size`."""
    found: Any = result.about
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return None if found is None else f"{found:,}" if isinstance(found, int) else str(found)
