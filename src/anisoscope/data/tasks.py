"""Classification tasks for linear probes: derived from plain text without any download, or read from labelled texts.

A *unit* is one context with its labels: one class for the whole context, or one per token (−1 = none). A unit and the
shuffled copy derived from it share a key, so that both lie on the same side of a train–test split.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anisoscope.capture.row import content_hash
from anisoscope.data.text import RECORD_SUFFIXES, Document, entries, read_records
from anisoscope.data.tokens import FEWEST, Context, contexts, framed
from anisoscope.errors import AnisoscopeError, missing_path, refuse_special, unknown_name
from anisoscope.models.tokenizer import plain_ids, special_frame

NONE = -1  # the label of a token that has none
PLACES = 4  # classes of the position in a word; the last one is open-ended
MOST_CLASSES = 1000
_VOWELS = frozenset("aeiouyàâäæéèêëíîïóôöœúûü")
Label = int | np.ndarray


@dataclass(frozen=True)
class Task:
    """A classification task for a linear probe."""

    name: str
    level: str  # token | context
    classes: tuple[str, ...]
    question: str


_SPACES = ("Ġ", "▁")  # at the beginning of tokens, in byte-level vocabularies and in those of SentencePiece
_BEGINNINGS = ("vowel", "consonant", "upper", "digit", "space", "other")
TASKS = {
    task.name: task
    for task in (
        Task("space_next", "token", ("no", "yes"), "does the next token begin after a space, or is it one?"),
        Task("token_class", "token", _BEGINNINGS, "what does the token begin with?"),
        Task("place_in_word", "token", ("1", "2", "3", "4+"), "which token of its word is it?"),
        Task("article", "context", (), "which article is the context from?"),
        Task("order", "context", ("natural", "shuffled"), "are its words in their own order?"),
    )
}


@dataclass(frozen=True, eq=False)
class Unit:
    """One context and its labels by task."""

    context: Context
    key: int
    labels: Mapping[str, Label] = field(default_factory=dict)
    natural: bool = True  # False for a shuffled copy, which serves the task `order` only


def check_tasks(names: Sequence[str]) -> tuple[str, ...]:
    """The names as a tuple; an unknown one is an error that suggests the nearest task."""
    for name in names:
        if name not in TASKS:
            raise unknown_name("task", name, TASKS)
    return tuple(names)


def key_of(context: Context) -> int:
    return content_hash(torch.as_tensor(context.ids))


def spread_contexts(
    documents: Iterable[Document], tokenizer: Any, *, length: int, tokens: int, articles: int
) -> list[Context]:
    """Contexts of at most `length` tokens from several documents, about equally many of each; none twice."""
    wanted = max(1, -(-tokens // length))
    each = max(1, -(-wanted // articles))
    chosen: dict[int, Context] = {}
    for number, document in enumerate(documents):
        count = 0
        for piece in contexts([document], tokenizer, length=length):
            if len(piece) < length // 2 and count:  # the short rest of a long document
                continue
            before = len(chosen)
            chosen.setdefault(key_of(piece), Context(piece.ids, piece.special, str(number)))
            count += len(chosen) - before
            if count >= each or len(chosen) >= wanted:
                break
        if len(chosen) >= wanted:
            break
    return list(chosen.values())


def embedded_units(
    pieces: Sequence[Context], tokenizer: Any, *, names: Sequence[str] = tuple(TASKS), articles: int = 8, seed: int = 0
) -> tuple[list[Unit], dict[str, Task]]:
    """Units with the labels of the derived tasks, and the tasks; `article` is left out with fewer than two articles."""
    names = check_tasks(names)
    texts = PieceTexts(tokenizer)
    tasks = {name: TASKS[name] for name in names}
    # the first documents that have enough contexts for training and testing
    counts = Counter(piece.group for piece in pieces if "article" in names)
    groups = [group for group, n in counts.items() if n >= 6][:articles]
    if len(groups) < 2:
        tasks.pop("article", None)
    else:
        tasks["article"] = replace(TASKS["article"], classes=tuple(groups))
    units = []
    for piece in pieces:
        by_task = token_labels([texts.text(i) for i in piece.ids.tolist()], piece.special)
        labels: dict[str, Label] = {name: label for name, label in by_task.items() if name in tasks}
        if "article" in tasks and piece.group in groups:
            labels["article"] = groups.index(piece.group)
        if "order" in tasks:
            labels["order"] = 0
        units.append(Unit(piece, key_of(piece), labels))
    if "order" in tasks:
        units += [_shuffled_copy(unit, texts, seed=seed) for unit in list(units)]
    return units, tasks


class PieceTexts:
    """The text of single token ids, with a leading space where a token begins a word."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
        # WordPiece; vocabularies that mark spaces may have headings of Markdown, such as "###"
        spaced = any(token[:1] in _SPACES and len(token) > 1 for token in vocabulary)
        self.pieces = not spaced and any(token.startswith("##") and len(token) > 2 for token in vocabulary)
        self.special = set(tokenizer.all_special_ids)

        self.text = functools.cache(self._text)

    def _text(self, token: int) -> str:
        if token in self.special:
            return ""
        if not hasattr(self.tokenizer, "convert_ids_to_tokens"):
            return str(self.tokenizer.decode([token]))
        piece = str(self.tokenizer.convert_ids_to_tokens(token) or "")
        if self.pieces:
            return piece[2:] if piece.startswith("##") and len(piece) > 2 else f" {piece}"
        if piece.startswith("<0x") and piece.endswith(">") and len(piece) == 6:  # byte fallback of SentencePiece
            return chr(int(piece[3:5], 16))
        return piece.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n").replace("ĉ", "\t")


def token_labels(texts: Sequence[str], special: np.ndarray) -> dict[str, np.ndarray]:
    """The labels of the token tasks for the tokens of one context.

    >>> found = token_labels(list("On it"), np.zeros(5, dtype=bool))
    >>> found["token_class"].tolist(), found["place_in_word"].tolist(), found["space_next"].tolist()
    ([2, 1, 4, 0, 1], [0, 1, -1, 0, 1], [0, 1, 0, 0, -1])
    """
    n = len(texts)
    usable = np.array([bool(text) for text in texts]) & ~special
    after_space = np.array([text[:1].isspace() for text in texts])
    kind, place, space_next = (np.full(n, NONE, dtype=np.int64) for _ in range(3))
    position, new_word = 0, True
    for t in range(n):
        if not usable[t]:
            position, new_word = 0, True
            continue
        kind[t] = _class_of(texts[t])
        if texts[t].isspace():
            new_word = True
        else:
            position = 0 if new_word or after_space[t] else position + 1
            place[t], new_word = min(position, PLACES - 1), texts[t][-1:].isspace()
        if t + 1 < n and usable[t + 1]:
            space_next[t] = int(after_space[t + 1])
    return {"space_next": space_next, "token_class": kind, "place_in_word": place}


def _class_of(text: str) -> int:
    first = text.strip()[:1]
    if not first:
        return 4
    if first.isdigit():
        return 3
    if not first.isalpha():
        return 5
    return 2 if first.isupper() else 0 if first in _VOWELS else 1


def _shuffled_copy(unit: Unit, texts: PieceTexts, *, seed: int) -> Unit:
    """A copy of the context with its words, each with the space before it, in random order.

    Special tokens and the first word, which has no space before it, stay in place.
    """
    context = unit.context
    plain = np.flatnonzero(~context.special)
    ids = context.ids[plain]
    starts = [t for t in range(1, len(ids)) if texts.text(int(ids[t]))[:1].isspace()]
    first, *words = np.split(ids, starts)
    order = np.random.default_rng([seed, unit.key % (1 << 32)]).permutation(len(words))
    shuffled = context.ids.copy()
    shuffled[plain] = np.concatenate([first, *(words[i] for i in order)])
    return Unit(Context(shuffled, context.special, context.group), unit.key, {"order": 1}, natural=False)


def labelled_units(
    path: str | Path, tokenizer: Any, *, length: int, text_field: str = "text", label_field: str = "label"
) -> tuple[list[Unit], dict[str, Task]]:
    """Units of labelled texts: one label per text, or a list with one per word (or token)."""
    records = list(_records(Path(path).expanduser(), text_field, label_field))
    lists = [isinstance(label, list | tuple | np.ndarray) for _, label in records]
    if any(lists) != all(lists):
        raise AnisoscopeError(
            f"{str(path)!r} has lists in some fields {label_field!r} and single labels in others; expected one kind."
        )
    many = any(lists)
    names = _class_names(records, path=str(path), many=many)
    task = Task("labels", "token" if many else "context", tuple(names), f"which {label_field}?")
    classes, frame = {name: i for i, name in enumerate(names)}, special_frame(tokenizer)
    room = length - len(frame)
    # WordPiece ignores the space before a word; other tokenizers make it part of the word
    gap = "" if PieceTexts(tokenizer).pieces else " "
    units: dict[int, Unit] = {}
    for number, (text, label) in enumerate(records, start=1):
        where = f"record {number} of {str(path)!r}"
        given: list[int] = []
        if many:
            ids, given = _token_ids(text, [classes[_name(value)] for value in label], tokenizer, gap=gap, where=where)
        elif isinstance(text, str):
            ids = plain_ids(tokenizer, text)
        else:
            raise AnisoscopeError(f"the text of {where} is a {type(text).__name__}; expected text.")
        if len(ids[:room]) < FEWEST:  # too short to be a context
            continue
        context = framed(frame, ids[:room])
        each = np.full(len(context), NONE, dtype=np.int64)
        each[~context.special] = given[:room] if many else NONE
        unit = Unit(context, key_of(context), {"labels": each if many else classes[_name(label)]})
        units.setdefault(unit.key, unit)
    return list(units.values()), {"labels": task}


def _token_ids(text: Any, labels: list[int], tokenizer: Any, *, gap: str, where: str) -> tuple[list[int], list[int]]:
    """(ids, label of each id) from labels given per word or per token."""
    words = text.split() if isinstance(text, str) else [str(word) for word in text]
    if len(words) == len(labels):
        parts = [plain_ids(tokenizer, (gap if i else "") + word) for i, word in enumerate(words)]
        given = [label for part, label in zip(parts, labels, strict=True) for _ in part]
        return [token for part in parts for token in part], given
    whole = plain_ids(tokenizer, text) if isinstance(text, str) else []
    if len(whole) == len(labels):
        return whole, labels
    raise AnisoscopeError(
        f"{where} has {len(labels)} labels for {len(words)} words{f' and {len(whole)} tokens' if whole else ''}; "
        "expected one for each word, or one for each token."
    )


def _records(path: Path, text_field: str, label_field: str) -> Iterator[tuple[Any, Any]]:
    refuse_special(path)
    if not path.exists():
        raise missing_path(path)
    for entry in entries(path):
        if entry.suffix not in RECORD_SUFFIXES:
            raise AnisoscopeError(f"labels {entry.name!r} have no fields; give records: {', '.join(RECORD_SUFFIXES)}.")
        for number, record in enumerate(read_records(entry, [text_field, label_field]), start=1):
            for name, option in ((text_field, "--text-field"), (label_field, "--label-field")):
                if name not in record:
                    known = ", ".join(sorted(map(str, getattr(record, "fields", record)))) or "none"
                    raise AnisoscopeError(
                        f"record {number} of {entry.name!r} has no field {name!r}; its fields are: {known}. Name one "
                        f"with {option}."
                    )
            if record[text_field] not in (None, "") and record[label_field] is not None:
                yield record[text_field], record[label_field]


def _class_names(records: Sequence[tuple[Any, Any]], *, path: str, many: bool) -> list[str]:
    labels = [value for _, label in records for value in (label if many else [label])]
    if any(isinstance(value, float) and value != int(value) for value in labels):
        raise AnisoscopeError(f"{path!r} has labels with fractions; expected classes (words or whole numbers).")
    names = sorted({_name(value) for value in labels})
    if len(names) < 2:
        raise AnisoscopeError(
            f"{path!r} holds {len(records)} labelled texts of {len(names)} class{'es' if len(names) != 1 else ''}; "
            "expected at least two classes."
        )
    if len(names) > min(MOST_CLASSES, max(2, len(labels) // 2)):
        raise AnisoscopeError(
            f"{path!r} has {len(names)} different labels on {len(labels)} {'tokens' if many else 'texts'}; expected "
            "classes that repeat: name another field with --label-field."
        )
    return names


def _name(label: Any) -> str:
    return str(int(label)) if isinstance(label, float) else str(label)
