"""A key table of a result: rows × columns of choices, and its Markdown. What the table lacks is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anisoscope.results.modality import MODALITIES, TEXT, modality_name
from anisoscope.results.quantity import FEWEST_SEEDS
from anisoscope.results.query import Query
from anisoscope.view.words import few, plural
from result_pages.chosen_rows import Cell, Choice, cell, chosen

ABSENT = "–"


@dataclass(frozen=True)
class KeyTable:
    """One table of a README.

    `where` is common to all cells. There is a row for each value of the fields `by`, times `rows` (label: choice), and
    a column for each value of a field, or for each of some choices (label: choice). Of many values of a field the ends
    and some between are shown, `most` in all. `show`: "mean", the mean "size" whatever the sign, or "range" of the
    values of a cell; a column may have its own. With `modalities` rows are in the order of modalities, with where the
    weights of each model are from; they are `by` model and stack.
    """

    title: str
    where: Choice
    columns: str | Mapping[str, Choice]
    rows: Mapping[str, Choice] = field(default_factory=lambda: {"": {}})
    by: tuple[str, ...] = ("model",)
    most: int = 9
    show: str = "mean"
    note: str = ""
    of: str = ""  # another result, whose rows stand beside those of this one
    modalities: bool = False


Line = tuple[list[str], list[Cell | None]]


def markdown(declared: KeyTable, table: Query, entries: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """The lines of a key table; none if the table has nothing of it. `entries`: the models in run.json."""
    heads, lines = filled(declared, table)
    if not lines:
        return []
    labelled = any(label for label in declared.rows)
    names = [*declared.by, *([""] if labelled else [])]
    if declared.modalities:
        names, lines = ["modality", "weights", *names], in_order(lines, entries)
    grid = [[*words, *(ABSENT if one is None else str(one) for one in cells)] for words, cells in lines]
    title = [f"### {declared.title}", "", *([declared.note, ""] if declared.note else [])]
    return [*title, *pipes([*names, *heads], grid), "", f"*{_intervals(lines)}*", ""]


WEIGHTS = ("trained here", "pretrained", "random")


def weights_of(entry: Mapping[str, Any]) -> str:
    """Where the weights of a model are from: they are random, or have a fingerprint because they were loaded."""
    if any(str(note).startswith("random weights") for note in entry.get("notes") or ()):
        return "random"
    return "pretrained" if entry.get("fingerprint") else "trained here"


def in_order(lines: Sequence[Line], entries: Sequence[Mapping[str, Any]]) -> list[Line]:
    """The lines in the order of modalities and of where weights are from, which begin them."""
    known = {str(entry.get("name")): entry for entry in entries}
    found = []
    for words, cells in lines:
        entry = known.get(words[0], {})
        modality, weights = modality_name(entry, words[1]) or TEXT.name, weights_of(entry)
        found.append(((list(MODALITIES).index(modality), WEIGHTS.index(weights)), ([modality, weights, *words], cells)))
    return [line for _, line in sorted(found, key=lambda item: item[0])]


def pipes(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown; its empty columns are left out."""
    kept = [i for i in range(len(heads)) if any(row[i] not in ("", ABSENT) for row in rows)]
    lines = [[heads[i] for i in kept], ["---"] * len(kept), *([row[i] for i in kept] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def filled(declared: KeyTable, table: Query) -> tuple[list[str], list[Line]]:
    """The heads of the columns, and the lines that have a number."""
    columns = _columns(declared, table)
    shows = {head: str(column.get("show", declared.show)) for head, column in columns.items()}
    columns = {head: {key: value for key, value in c.items() if key != "show"} for head, c in columns.items()}
    lines = []
    for words, choice in _rows(declared, table):
        found = [(head, chosen(table, {**choice, **column})) for head, column in columns.items()]
        cells = [cell(rows, show=shows[head]) for head, rows in found]
        lines += [(words, cells)] if any(one is not None for one in cells) else []
    return list(columns), lines


def _columns(declared: KeyTable, table: Query) -> dict[str, Choice]:
    if not isinstance(declared.columns, str):
        return dict(declared.columns)
    name = declared.columns
    values: dict[Any, None] = {}
    ends: set[Any] = set()  # the last of each model is shown, wherever the others end
    for choice in declared.rows.values():
        found = chosen(table, {name: ..., **dict.fromkeys(declared.by, ...), **declared.where, **choice})
        values |= dict.fromkeys(found.values(name))
        ends |= {max(rows.values(name)) for rows in found.groups("model").values()} if name == "step" else set()
    ordered = sorted(values, key=_order)  # words stay in the order of the table
    picked = {*few(ordered, declared.most), *ends}
    return {_head(name, value): {name: value} for value in ordered if value in picked}


def _order(value: Any) -> float:
    """Numbers by size, also where they are text, before words."""
    try:
        return float(value)
    except ValueError:
        return float("inf")


def _head(name: str, value: Any) -> str:
    return f"{name} {value:,}" if isinstance(value, int) else str(value)


def _rows(declared: KeyTable, table: Query) -> Iterator[tuple[list[str], Choice]]:
    fixed = {**declared.where, **{key: ... for key in declared.by if key not in declared.where}}
    values: dict[Any, None] = {}
    for choice in declared.rows.values():
        for column in (
            declared.columns.values() if not isinstance(declared.columns, str) else ({declared.columns: ...},)
        ):
            column = {key: value for key, value in column.items() if key != "show"}
            found = chosen(table, {**column, **fixed, **choice})
            values |= dict.fromkeys(found.groups(*declared.by)) if declared.by else {(): None}
    for value in values:
        each = value if isinstance(value, tuple) else (value,)
        for label, choice in declared.rows.items():
            words = [ABSENT if one is None else str(one) for one in each]
            labels = [label] if any(declared.rows) else []
            yield [*words, *labels], {**fixed, **choice, **dict(zip(declared.by, each, strict=True))}


def _intervals(lines: Sequence[Line]) -> str:
    """What ± and brackets are."""
    cells = [one for _, found in lines for one in found if one is not None]
    if any(one.range for one in cells):
        return "Least and most value."
    seeds = {one.seeds for one in cells}
    words = []
    if several := [count for count in seeds if count >= FEWEST_SEEDS]:
        counts = plural(several[0], "seed") if len(several) == 1 else f"{min(several)} to {max(several)} seeds"
        words.append(f"mean over {counts} with Student's 95 % interval")
    if 1 in seeds:
        words.append("one seed: the 95 % interval within the run, where ± or brackets stand")
    words += ["two seeds: their mean"] if 2 in seeds else []
    text = "; ".join(words)
    return f"{text[:1].upper()}{text[1:]}."
