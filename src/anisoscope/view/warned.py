"""What a run warned about: each thing once, with the models and stacks that it is true of."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from anisoscope.view.words import listed, shortened, spans

STACK = re.compile(r"(encoder|decoder): ")
SEED = re.compile(r" \(seed (\d+)\)$")


def warnings(abouts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each warning once, in order; a model's own notes carry its name.

    >>> notes = {"name": "b", "notes": ["decoder: odd", "random weights (seed 1)"]}
    >>> warnings([{"warnings": ["a: encoder: odd"], "models": [{"name": "a"}, notes]}])
    ['a (encoder) and b (decoder): odd', 'b: random weights (seed 1)']
    """
    entries = [entry for about in abouts for entry in about.get("models") or []]
    names = {str(entry.get("name")) for entry in entries}
    found: dict[str, dict[str, set[str]]] = {}
    seeds: dict[str, set[int]] = {}
    for whole in _said(abouts):
        owners, text = _parted(whole, names)
        stack = STACK.match(text) if owners else None
        text = text[stack.end() :] if stack else text
        seed = SEED.search(text) if owners else None
        text = text[: seed.start()] if seed else text
        seeds.setdefault(text, set()).update([int(seed[1])] if seed else [])
        mine = found.setdefault(text, {})
        for owner in owners:
            mine.setdefault(owner, set()).update([stack[1]] if stack else [])
    return [_sentence(text, owners, seeds[text]) for text, owners in found.items()]


def _said(abouts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for about in abouts:
        yield from (str(text) for text in about.get("warnings") or [])
    for about in abouts:
        for model in about.get("models") or []:
            yield from (f"{model.get('name', 'model')}: {note}" for note in model.get("notes") or [])


def _parted(text: str, names: Collection[str]) -> tuple[list[str], str]:
    """The models that a warning names at its beginning, without their seeds, and what it says of them.

    >>> _parted("a-seed1, b: odd", {"a", "b"}), _parted("c: odd", {"a"})
    ((['a', 'b'], 'odd'), ([], 'c: odd'))
    """
    for end in (match.start() for match in re.finditer(": ", text)):
        owners = [word if word in names else re.sub(r"-seed\d+$", "", word) for word in text[:end].split(", ")]
        if all(owner in names for owner in owners):
            return owners, text[end + 2 :]
    return [], text


def _sentence(text: str, owners: Mapping[str, Collection[str]], seeds: Collection[int]) -> str:
    if seeds:
        text += f" (seed{'s' if len(seeds) > 1 else ''} {spans(seeds)})"
    whose = [f"{name} ({listed(sorted(stacks))})" if stacks else name for name, stacks in owners.items()]
    return f"{shortened(whose)}: {text}" if whose else text
