"""Verdicts on a terminal: a line for each claim and model, or a grid of claims × models; sentences on request.

Statuses are words, or marks with a key: colour never decides alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Column as RichColumn
from rich.table import Table as RichTable
from rich.text import Text

from anisoscope.view.headline import headline
from anisoscope.view.sections.findings import (
    MARKS,
    badge_line,
    grid_words,
    leading,
    measured,
    not_measured,
    robust_words,
    stands,
    status_counts,
    unmeasured,
)
from anisoscope.view.terminal import screen
from anisoscope.view.terminal.screen import elided, print_line
from anisoscope.view.verdict_grid import TOGETHER
from anisoscope.view.words import finite, plural

Verdict = Mapping[str, Any]
LINES = 24  # verdicts up to which each has a line; more become a grid
LONGEST = max(map(len, MARKS))  # of the words for a status
MARK = 2  # columns of a mark with its star
LEAST_NAME, MOST_CLAIM = LONGEST + 1, 30
STAR = "*"  # after a verdict that does not stand when the whole grid is counted
ABSENT = "-"  # no verdict on this model
NARROW = 72  # columns below which intervals are left to --why
PRECISE = 110  # columns from which numbers have three digits and margins are shown
_COLOURS = {"holds": "green", "fails": "red", "undecided": "yellow"}
OURS = "not from a paper"


def print_verdicts(
    verdicts: Sequence[Verdict],
    *,
    every: bool = False,
    why: bool = False,
    papers: Mapping[str, str] | None = None,
    hint: str = "--why",
    study: str = "",
) -> None:
    """Print what was found of each claim, by paper; with `why` the sentences of all verdicts before it.

    Claims that were not measured are counted, and named with `every` or `why`. `hint` says how to see the sentences.
    The first line is the finding, as on the page of a `study`.
    """
    if why:
        _print_sentences(verdicts if every else measured(verdicts))
    shown = leading(verdicts if every else measured(verdicts))
    if len(shown) > 1 and (words := headline(shown, study)):
        print_line(words, style="bold")
    if not shown:
        print_line("no claim could be tested on what was measured")
    elif len(shown) <= LINES:
        _print_lines(shown, papers or {})
    else:
        _print_grid(shown, papers or {})
    _print_counts(verdicts, shown)
    _print_absent(verdicts, every=every, why=why)
    if shown and not why:
        print_line(f"Why, verdict by verdict: {hint}")


# -- one by one --------------------------------------------------------------------------------------------------------


def _print_sentences(verdicts: Sequence[Verdict]) -> None:
    for row in verdicts:
        subject = f" ({row['subject']})" if row.get("subject") else ""
        told = ("" if (p := finite(row["p"])) is None else f", p {p:.3g}") + (", alone" if stands(row) is False else "")
        head = Text.assemble((f"{row['claim']}{subject}", "bold"), "  ", _status(row), f"  {_effect(row, 3)}{told}")
        screen.console.print(head)
        print_line(str(row["why"]), indent=2)
        print_line("")


def _print_lines(verdicts: Sequence[Verdict], papers: Mapping[str, str]) -> None:
    """Print a line for each verdict: claim, model, status, effect with its interval; with room its margin, too."""
    precise, narrow = screen.width() >= PRECISE, screen.width() < NARROW
    several = len({row.get("subject") for row in verdicts}) > 1
    names = {"claim": [str(row["claim"]) for row in verdicts]}
    names |= {"model": [str(row.get("subject") or "all") for row in verdicts]} if several else {}
    numbers = {"verdict": [_status(row).plain + STAR for row in verdicts]}
    effects = [_effect(row, 3 if precise else 2) for row in verdicts]
    numbers |= {"effect": [words.split()[0] for words in effects]} if narrow else {"effect [95 %]": effects}
    numbers |= {"margin": [_number(row.get("margin"), 3) for row in verdicts]} if precise else {}
    rest = [_longest(cells, head) for head, cells in numbers.items()]
    room = screen.width() - sum(rest) - screen.GAP * len(rest)
    widths = [*_name_widths(names, room), *rest]
    cells = {id(row): line for row, *line in zip(verdicts, *names.values(), *numbers.values(), strict=True)}
    for table, rows in _tables(verdicts, papers, [*names, *numbers], widths):
        for row in rows:
            words = [Text(elided(cell, width)) for cell, width in zip(cells[id(row)], widths, strict=True)]
            words[len(names)] = _status(row, starred=True)
            table.add_row(*words)
        screen.console.print(table)


def _tables(
    verdicts: Sequence[Verdict], papers: Mapping[str, str], heads: Sequence[str], widths: Sequence[int]
) -> Iterator[tuple[RichTable, list[Verdict]]]:
    """An empty table for the verdicts of each paper, below its name; all have the same columns, and one head."""

    def empty(**words: bool) -> RichTable:
        columns = [RichColumn(head, no_wrap=True, width=width) for head, width in zip(heads, widths, strict=True)]
        return screen.bare_table(*columns, **words)

    screen.console.print(empty())
    for paper, rows in _by_paper(verdicts, papers):
        if paper:
            print_line(elided(paper, screen.width()), style="dim")
        yield empty(show_header=False), rows


def _name_widths(names: Mapping[str, Sequence[str]], room: int) -> list[int]:
    """Widths of the columns of names: models give way before claims, as long as all can be told apart."""
    natural = [_longest(cells, head) for head, cells in names.items()]
    if len(natural) == 2:
        both = room - screen.GAP
        for model in range(max(LEAST_NAME, both - natural[0]), natural[1]):
            widths = [both - model, model]
            if widths[0] >= LEAST_NAME and all(map(_apart, names.values(), widths)):
                return widths
    return screen.narrowed(natural, room, LEAST_NAME)


def _apart(names: Sequence[str], width: int) -> bool:
    """Whether elided names are as many as there are names."""
    return len({elided(name, width) for name in names}) == len(set(names))


def _longest(words: Iterable[str], head: str) -> int:
    return max(map(len, (*words, head)))


def _status(row: Verdict, *, starred: bool = False) -> Text:
    status = str(row.get("status") or "undecided")
    star = STAR if starred and stands(row) is False else ""
    return Text(f"{status}{star}", style=_COLOURS.get(status, ""))


def _effect(row: Verdict, digits: int) -> str:
    value, low, high = (_number(row.get(name), digits) for name in ("effect", "low", "high"))
    return f"{value} [{low}, {high}]" if low and high else value or "–"


def _number(value: Any, digits: int) -> str:
    return "" if (known := finite(value)) is None else f"{known:.{digits}g}"


def _by_paper(verdicts: Sequence[Verdict], papers: Mapping[str, str]) -> list[tuple[str, list[Verdict]]]:
    """The verdicts of each paper, in the order of the first; one group without a heading where papers are not known."""
    groups: dict[str, list[Verdict]] = {}
    for row in verdicts:
        groups.setdefault(papers.get(str(row["claim"]), OURS) if papers else "", []).append(row)
    ordered = sorted(groups.items(), key=lambda group: group[0] == OURS)
    return ordered if len(groups) > 1 else [("", list(verdicts))]


# -- the grid ----------------------------------------------------------------------------------------------------------


def _print_grid(verdicts: Sequence[Verdict], papers: Mapping[str, str]) -> None:
    """Print a row for each claim and a column for each model, words where they fit and marks where not.

    More models than fit even as marks make further grids below the first.
    """
    counts = Counter(str(row.get("subject") or "") for row in verdicts)
    models = [subject for subject, count in counts.items() if count > 1] or list(counts)
    grid = TerminalGrid(verdicts, papers, {subject: subject if subject in models else TOGETHER for subject in counts})
    names = list(dict.fromkeys([*models, *grid.places.values()]))
    room = screen.width() - grid.claim - screen.GAP
    widths = screen.narrowed([max(LEAST_NAME, len(name)) for name in names], room, LEAST_NAME)
    short = [elided(name or "all", width) for name, width in zip(names, widths, strict=True)]
    if sum(widths) + screen.GAP * (len(widths) - 1) <= room and len(set(short)) == len(names):
        grid.print(dict(zip(names, short, strict=True)), widths)
        return
    heads = dict(zip(names, map(str, range(1, len(names) + 1)), strict=True))
    most = max(1, (room + screen.GAP) // (screen.GAP + MARK))
    for start in range(0, len(names), most):
        part = {name: heads[name] for name in names[start : start + most]}
        spare = room + screen.GAP - (screen.GAP + MARK) * len(part)
        grid.print(part, [MARK + (spare if name == TOGETHER else 0) for name in part], marks=True)
    print_line("; ".join(f"{head} {name or 'all'}" for name, head in heads.items()))


@dataclass(frozen=True)
class TerminalGrid:
    """Verdicts by claim and column; `places` has the column of each subject."""

    verdicts: Sequence[Verdict]
    papers: Mapping[str, str]
    places: Mapping[str, str]

    @property
    def claim(self) -> int:
        """Columns of the names of claims."""
        return min(MOST_CLAIM, _longest((str(row["claim"]) for row in self.verdicts), "claim"))

    def print(self, heads: Mapping[str, str], widths: Sequence[int], *, marks: bool = False) -> None:
        """Print the columns named in `heads`, with what stands above each."""
        several = False
        for table, rows in _tables(self.verdicts, self.papers, ["claim", *heads.values()], [self.claim, *widths]):
            cells: dict[tuple[str, str], list[Verdict]] = {}
            for row in rows:
                cells.setdefault((str(row["claim"]), self.places[str(row.get("subject") or "")]), []).append(row)
            several = several or any(len(found) > 1 for found in cells.values())
            for claim in dict.fromkeys(name for name, _ in cells):
                words = [_cell(cells.get((claim, name), []), marks=marks) for name in heads]
                table.add_row(Text(elided(claim, self.claim)), *words)
            screen.console.print(table)
        if marks or several:
            print_line(f"{', '.join(f'{_mark(status)} {status}' for status in MARKS)}, {ABSENT} not measured")


def _cell(verdicts: Sequence[Verdict], *, marks: bool) -> Text:
    """The status of a claim in a model; of several, how many of each."""
    if not verdicts:
        return Text(ABSENT, style="dim")
    if len(verdicts) > 1:
        counts = Counter(str(row.get("status") or "undecided") for row in verdicts)
        return Text(" ".join(f"{counts[status]}{_mark(status)}" for status in MARKS if counts[status]))
    status = _status(verdicts[0], starred=True)
    if marks:
        word = status.plain.removesuffix(STAR)
        status.plain = status.plain.replace(word, _mark(word))
    return status


def _mark(status: str) -> str:
    """One letter for a status; first letters where the terminal lacks the marks."""
    return MARKS.get(status, "?") if screen.takes_every_letter() or status not in MARKS else status[0]


# -- below -------------------------------------------------------------------------------------------------------------


def _print_counts(verdicts: Sequence[Verdict], shown: Sequence[Verdict]) -> None:
    counted = measured(shown)
    if len(counted) > 1:
        print_line(f"Of {plural(len(counted), 'verdict')}, {status_counts(counted)}.")
    if words := grid_words(verdicts):
        star = f" {STAR} not after that correction." if any(stands(row) is False for row in verdicts) else ""
        print_line(f"{words}{star}")


def _print_absent(verdicts: Sequence[Verdict], *, every: bool, why: bool) -> None:
    """Print how many claims were not measured; their names with `why`."""
    absent = [] if every else unmeasured(verdicts)
    if absent and why:
        print_line(f"Not measured here: {', '.join(absent)}.")
    elif absent:
        tested, claims = ({str(row["claim"]) for row in rows} for rows in (measured(verdicts), verdicts))
        partly = len(absent) - len(claims - tested)
        rest = f", and {partly} in some models only" if partly else ""
        print_line(f"Not measured here: {len(claims - tested)} of {plural(len(claims), 'claim')}{rest}.")


def print_robustness(verdicts: Sequence[Verdict]) -> None:
    """Print the verdicts again with a line of badges, one for each other choice that was measured."""
    rows = [row for row in leading(measured(verdicts)) if badge_line(row)]
    if not rows:
        print_line("no other choice was measured under which these verdicts could be had again")
        return
    for row in rows:
        subject = f" ({row['subject']})" if row.get("subject") else ""
        screen.console.print(Text.assemble((f"{row['claim']}{subject}", "bold"), "  ", _status(row, starred=True)))
        print_line(badge_line(row), indent=2)
        print_line(robust_words(row), indent=2)
    absent = not_measured(rows)
    rest = f"; not measured for some: {', '.join(absent)}" if absent else ""
    print_line(f"✓ holds, ✕ fails, ? undecided, (3/4) by 3 of its 4 parts; one choice changes at a time{rest}")
