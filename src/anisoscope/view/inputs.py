"""What the models of a page were given, in words: which data, how many rows, and what a row is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from anisoscope.results.modality import TEXT, modality_in
from anisoscope.view.words import listed

About = Mapping[str, Any]


def row_noun(words: str, count: int = 2) -> str:
    """What `run.json` says of one row as a noun.

    >>> row_noun("one frame of audio"), row_noun("one patch of an image; class tokens are apart", 1)
    ('frames of audio', 'patch of an image')
    >>> row_noun("one character (or byte) of text"), row_noun("")
    ('characters of text', 'rows')
    """
    plain = re.sub(r"\s*\([^)]*\)", "", words.split(";")[0]).strip().removeprefix("one ") or "row"
    noun, _, rest = plain.partition(" ")
    many = noun if count == 1 else f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"
    return f"{many} {rest}".strip()


def row_nouns(abouts: Sequence[About]) -> list[str]:
    """What the rows of all these runs are, each once; empty where no run says."""
    entries = [entry for about in abouts for entry in about.get("models") or []]
    words = [str(word) for entry in entries for word in _told(entry.get("rows")).values()]
    return list(dict.fromkeys(row_noun(word) for word in words))


def data_phrase(abouts: Sequence[About]) -> str:
    """Which data, and how much of it; models of one run that saw different amounts share the name alone."""
    phrases: dict[str, None] = {}
    for about in abouts:
        entries = about.get("models") or [{}]
        seen = list(dict.fromkeys(_seen(entry, entry.get("data") or about.get("data") or {}) for entry in entries))
        names = dict.fromkeys(name for name, _ in seen)
        whole = [f"{name} ({size})" if name and size else name for name, size in seen]
        phrases |= dict.fromkeys(whole if len(seen) == len(names) else names)
    return listed([phrase for phrase in phrases if phrase])


def _seen(entry: About, data: About) -> tuple[str, str]:
    """The name of what a model read, and how many rows of its first stack in how many contexts that gave."""
    shipped = (modality_in(entry, "") or TEXT).medium.shipped
    name = str(data.get("name") or "").replace("\\", "/").rstrip("/").split("/")[-1]
    name = shipped if data.get("name") == "embedded" else name
    rows, contexts = entry.get("row_count") or data.get("tokens"), data.get("contexts") or entry.get("contexts")
    word = next(iter(_told(entry.get("rows")).values()), "one token")
    size = [f"{int(rows):,} {row_noun(word, int(rows))}"] if rows else []
    size += [f"{int(contexts):,} context{'s' if int(contexts) != 1 else ''}"] if contexts else []
    return name, " in ".join(size)


def kind_told(entry: About) -> str:
    """Encoder, decoder or both, as the run says; a model of convolutions is neither."""
    modality = modality_in(entry, "single")
    return str(entry.get("type") or "") if modality is None or modality.attends else modality.name


def random_models(abouts: Sequence[About]) -> tuple[list[str], int]:
    """Names of models whose weights are random, and how many models there are."""
    names, count = [], 0
    for about in abouts:
        entries = about.get("models") or [{}]
        count += len(entries)
        every = bool((about.get("config") or {}).get("random_init"))
        names += [str(entry.get("name") or "unnamed") for entry in entries if every or _says_random(entry)]
    return names, count


def _says_random(entry: About) -> bool:
    return any(str(note).startswith("random weights") for note in entry.get("notes") or ())


def _told(value: Any) -> dict[str, str]:
    """By stack; older runs have one word, or a count, for all."""
    if isinstance(value, Mapping):
        return {str(stack): str(word) for stack, word in value.items() if word}
    return {"": value} if isinstance(value, str) and value else {}
