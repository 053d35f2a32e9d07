"""A run as a section of a model card, and the card of a dataset of runs, in Markdown.

A section stands between two comments that name it, so that it can be replaced without touching what is around it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from anisoscope.errors import AnisoscopeError
from anisoscope.results.manifest import gravest_first, is_grave
from anisoscope.results.privacy import placeless
from anisoscope.results.query import Query, Row, Table
from anisoscope.view.headline import words_of_claim
from anisoscope.view.page import Page
from anisoscope.view.sections.findings import leading, measured, stands
from anisoscope.view.subjects import STREAM
from anisoscope.view.table_plot import plainness
from anisoscope.view.words import OF_TRAINING, Catalogue, estimate, site_name

TITLE = "Representation geometry"
MOST_ROWS, MOST_VERDICTS, MOST_OPEN = 12, 16, 4
ENRICHMENT = "gradient_enrichment"
_ENRICHMENT_TITLE = "Gradient energy in tangent directions, times chance"
_CITED = """@software{{anisoscope,
  title   = {{anisoscope: the geometry of a network's representations as it learns}},
  author  = {{{{The anisoscope maintainers}}}},
  version = {{{version}}},
  year    = {{2026}}
}}"""


@dataclass(frozen=True)
class CardSubject:
    """What a card is about: the page of a run, its table, and the papers of its claims by claim."""

    page: Page
    table: Table
    catalogue: Catalogue
    papers: Mapping[str, str]

    @property
    def about(self) -> dict[str, Any]:
        return self.table.about


def card_text(subject: CardSubject, figure: str = "", *, level: int = 2) -> str:
    """The section of one run: what was found, a figure, numbers with intervals, verdicts, its command, how to cite."""
    page, about, mark = subject.page, subject.about, "#" * level
    parts = [f"{mark} {TITLE}", f"**{plain(page.heading)}**", plain(page.deck), *_cautions(about)]
    if figure and page.hero is not None:
        parts += [f"![{plain(page.hero.title)}]({figure})", f"*{plain(' '.join(filter(None, _told(page))))}*"]
    numbers = number_lines(subject.table, subject.catalogue)
    parts += ["95 % intervals over contexts; all numbers are in the table of the run.", "\n".join(numbers)] * bool(
        numbers
    )
    verdicts = leading(measured(page.verdicts))
    parts += [*verdict_parts(verdicts), _made(about), *_cite(about, verdicts, subject.papers)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _told(page: Page) -> list[str]:
    hero = page.hero
    return [] if hero is None else [f"{str(hero.title).rstrip('.')}.", str(hero.caption)]


def _cautions(about: Mapping[str, Any]) -> list[str]:
    """What must be read before any number, and that a run is not done."""
    unfinished = [str(about["reading"])] if about.get("reading") else []
    grave = [words for words in gravest_first(about.get("warnings") or []) if is_grave(words)]
    return [f"> **Caution:** {plain(words)}" for words in (*unfinished, *grave)]


# -- numbers -----------------------------------------------------------------------------------------------------------


def number_lines(table: Table, catalogue: Catalogue) -> list[str]:
    """The main numbers at the first site, the middle block and the last one of each model, at its last step."""
    rows = Query(table).where(kind=STREAM, head=None, group="").known().at_last_step("model", "seed")
    subjects = rows.groups("model", "seed", "stack")
    found: list[tuple[list[str], list[Row]]] = []
    for (model, seed, stack), part in subjects.items():
        named = " · ".join(filter(None, (model, f"seed {seed}" if seed else "", "" if stack == "single" else stack)))
        found += [([named, title], _places(line)) for title, line in _lines(part, catalogue)]
    if not found:
        return []
    names = [[site_name(row.layer or 0, row.kind or "") for row in sites] for _, sites in found]
    same = all(each == names[0] for each in names)
    several = len(subjects) > 1
    heads = names[0] if same else ["first", "middle", "last"]
    lines = [_row([*(["model"] if several else []), "", *heads]), _row(["---"] * (1 + several + len(heads)))]
    for (words, sites), called in list(zip(found, names, strict=True))[:MOST_ROWS]:
        cells = [_cell(row, "" if same else name) for row, name in zip(sites, called, strict=True)]
        lines.append(_row([*(words if several else words[1:]), *cells, *[""] * (len(heads) - len(cells))]))
    return lines


def _lines(rows: Query, catalogue: Catalogue) -> Iterable[tuple[str, list[Row]]]:
    """Metrics of the geometry in their default variant, and how much gradient energy tangent directions hold."""
    usual = rows.where(variant="", metric=lambda metric: metric not in OF_TRAINING)
    for metric in catalogue.main(usual.values("metric")):
        yield catalogue.entry(metric).title, _by_depth(usual.where(metric=metric))
    energy = rows.where(metric=ENRICHMENT)
    if len(energy):
        variant = min(energy.values("variant"), key=lambda variant: plainness(variant, energy))
        yield _ENRICHMENT_TITLE, _by_depth(energy.where(variant=variant))


def _by_depth(rows: Query) -> list[Row]:
    return sorted(rows, key=lambda row: (row.layer or 0, row.kind == "final"))


def _places(line: Sequence[Row]) -> list[Row]:
    """The first site, the middle block and the last block; of a line without blocks its first, middle and last."""
    blocks = [row for row in line if row.kind in ("resid", "stage")] or list(line)
    chosen = [line[0], blocks[(len(blocks) - 1) // 2], blocks[-1]]
    return [row for i, row in enumerate(chosen) if (row.layer, row.kind) not in [(r.layer, r.kind) for r in chosen[:i]]]


def _cell(row: Row, place: str) -> str:
    told = estimate(row.value, row.low, row.high).replace(" ± ", "\u00a0±\u00a0")
    return f"{told} ({place})" if place else told


# -- verdicts ----------------------------------------------------------------------------------------------------------


def verdict_parts(verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of what was decided, with effects and intervals, and a sentence on what was not."""
    decided = [verdict for verdict in verdicts if verdict.get("status") in ("holds", "fails")]
    shown = decided[:MOST_VERDICTS]
    lines = [_row(["claim", "model", "verdict", "effect"]), _row(["---"] * 4)]
    for verdict in shown:
        effect = estimate(verdict.get("effect"), verdict.get("low"), verdict.get("high"))
        status = str(verdict.get("status")) + (" (†)" if stands(verdict) is False else "")
        lines.append(_row([_clause(verdict), str(verdict.get("subject") or ""), status, effect]))
    parts = ["Claims of the literature, tested on this run:", "\n".join(lines)] if decided else []
    parts += [f"{len(decided) - len(shown)} more are in verdicts.json."] * (len(decided) > len(shown))
    parts += ["† not after correction over all claims and models that were tested."] * ("(†)" in "".join(lines))
    left = list(dict.fromkeys(_clause(v) for v in verdicts if v not in decided))
    named = "; ".join(left[:MOST_OPEN]) + (f"; and {len(left) - MOST_OPEN} more" if len(left) > MOST_OPEN else "")
    return [*parts, f"Undecided: {plain(named)}."] if left else parts


def _clause(verdict: Mapping[str, Any]) -> str:
    """What a claim says, as a clause that needs no others."""
    return words_of_claim(str(verdict.get("claim")), str(verdict.get("statement") or "")).yes


# -- how it was made, and how to cite it -------------------------------------------------------------------------------


def _made(about: Mapping[str, Any]) -> str:
    version = str(about.get("anisoscope") or "")
    with_what = f"anisoscope {version}".strip()
    command = [str(placeless(word)) for word in about.get("command") or ()]
    if not command:
        return f"Measured with {with_what} (`anisoscope.Monitor`, or from Python)."
    return f"Measured with {with_what}:\n\n```\n{_fenced(shlex.join(command))}\n```"


def _cite(about: Mapping[str, Any], verdicts: Sequence[Mapping[str, Any]], papers: Mapping[str, str]) -> list[str]:
    decided = [str(v.get("claim")) for v in verdicts]
    sources = list(dict.fromkeys(papers[name] for name in decided if name in papers))
    lines = [
        "How to cite:\n\n```bibtex\n" + _CITED.format(version=_fenced(str(about.get("anisoscope") or ""))) + "\n```"
    ]
    return lines + ["\n".join(["The claims are those of:", "", *(f"- {plain(source)}" for source in sources)])] * bool(
        sources
    )


def _fenced(text: str) -> str:
    """A text inside a block of code, which it cannot end."""
    return text.replace("```", "'''").replace("\n", " ")


def plain(text: Any) -> str:
    """A text that is no Markdown and no HTML, in one line.

    >>> plain("a <b>c</b> | d")
    'a &lt;b&gt;c&lt;/b&gt; \\\\| d'
    """
    if isinstance(text, Markup):  # of a page, whose links lead into it
        text = Markup(re.sub(r"<a [^>]*>.*?</a>[.,;]?", "", text)).striptags()
    said = " ".join(str(text).split())
    for letter, safe in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|"), ("`", "'"), ("*", "\\*")):
        said = said.replace(letter, safe)
    return said.replace("[", "\\[").replace("](", "\\](")


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell if set(cell) == {"-"} else _in_table(cell) for cell in cells) + " |"


def _in_table(text: str) -> str:
    return plain(text).replace("\\[", "[")  # intervals stay readable, and nothing follows that would make them links


# -- sections in a file ------------------------------------------------------------------------------------------------


def placed(text: str, section: str, name: str) -> str:
    """A text in which the section of this name is replaced, or added at the end if it has none.

    >>> placed(placed("# Mine\\n", "old\\n", "card"), "new\\n", "card").splitlines()[2:5]
    ['<!-- anisoscope card: begin -->', 'new', '<!-- anisoscope card: end -->']
    """
    begin, end = (f"<!-- anisoscope {name}: {word} -->" for word in ("begin", "end"))
    block = f"{begin}\n{section.rstrip()}\n{end}\n"
    marks = re.findall(f"{re.escape(begin)}|{re.escape(end)}", text)
    if marks not in ([], [begin, end]):
        raise AnisoscopeError(
            f"the text has the marks {begin} and {end} {marks.count(begin)} and {marks.count(end)} times, so it is not "
            "clear what lies between them; leave one pair in order, or none."
        )
    found = re.search(f"{re.escape(begin)}.*?{re.escape(end)}\n?", text, flags=re.DOTALL)
    if found is not None:
        return text[: found.start()] + block + text[found.end() :]
    return f"{text.rstrip()}\n\n{block}" if text.strip() else block


DATASET = "dataset"  # the mark of a dataset of runs


def dataset_card(text: str, sections: Mapping[str, str], *, runs: Iterable[str], where: str) -> str:
    """The README of a dataset of runs: `sections` are replaced or added; `runs` are all that it then holds.

    The header names a table for each run, and `default`, all of them; its other entries, and everything outside of our
    comments, stay. `where` is how the dataset is read.
    """
    names = sorted(runs)
    body = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    files = {"default": "*/table.parquet"} | {name: f"{name}/table.parquet" for name in names}
    header = ["---", *(_kept_header(text) or _HEADER), "configs:"]
    header += [line for name, path in files.items() for line in (f'- config_name: "{name}"', f'  data_files: "{path}"')]
    lines = ["# Results of anisoscope", "", "A folder for each run: its table, verdicts, record, page and figures.", ""]
    lines += ["```python", "import anisoscope", "", f'everything = anisoscope.Table.read("{where}")']
    lines += [f'run = anisoscope.Table.read("{where}/{name}")' for name in names[:1]] + ["```"]
    body = placed(body, "\n".join(lines), DATASET)
    for name, section in sections.items():
        body = placed(body, section, f"run {name}")
    return "\n".join([*header, "---", "", body.lstrip()])


_HEADER = ["pretty_name: Representation geometry, measured with anisoscope", "tags:", "- anisoscope"]


def _kept_header(text: str) -> list[str]:
    """The lines of a header that are not about configurations."""
    found = re.match(r"---\n(.*?)\n---\n", text, flags=re.DOTALL)
    kept, skipping = [], False
    for line in found[1].split("\n") if found is not None else ():
        if not line.startswith((" ", "-")):
            skipping = line.startswith("configs:")
        if not skipping:
            kept.append(line)
    return kept
