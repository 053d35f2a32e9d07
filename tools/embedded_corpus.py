"""Builds the corpus that ships with the package: `python tools/embedded_corpus.py PATH_TO_ENWIK8`.

Articles spread evenly over enwik8, reduced to their paragraphs of prose; the same input and the same cleaning rules
give the same text. The slice that ships was cut with the rules numbered 1 (230 articles). Those of today, numbered
`enwik8.RULES`, choose a few articles otherwise (the rules numbered 2 take 228), so they do not give that very slice;
it stays as it is, because results were computed on it.
"""

from __future__ import annotations

import argparse
import gzip
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from anisoscope.data.enwik8 import RULES
from anisoscope.data.markup import CleaningStats, clean, read_raw
from anisoscope.data.text import SEPARATOR, Document

PACKAGE = Path(__file__).parents[1] / "src/anisoscope/data/embedded"
TARGET = 1_500_000  # characters
SHORTEST, LONGEST = 1_500, 20_000  # characters of an article's prose
PARAGRAPH = 120  # characters of the shortest paragraph kept

_LAST_SECTIONS = re.compile(
    r"\n(?:see also|external links?|references?|notes?|further reading|bibliography|sources?|discography|filmography|"
    r"works|trivia|quotes|quotations|footnotes|literature)[^\n]{0,20}\n",
    re.IGNORECASE,
)
_WRAP = re.compile(r"(?<=[\w,;])\n(?=[a-z(])")  # a line broken inside a sentence
_ENDS = re.compile(r"[.!?][\"')”’]?$")
_BEGINS = re.compile(r"[\"'(“‘]?[A-Z0-9]")
_LISTS = re.compile(
    r"(?:January|February|March|April|May|June|July|August|September|October|November|December)\b.* \d|\d|Lists? of|"
    r"Timeline|.*\((?:disambiguation|number|year)\)"
)  # titles of articles that are lists
_NOTE = re.compile(r"This article (?:is about|describes|refers)|For other (?:uses|meanings)|See also")
# gaps left by a removed formula, table or template
_HOLE = re.compile(r",\s*[,.;)]|\(\s|\s\)|\s[,.;:]|\(\)|\b(?:by|of|is|the|and|in|for|as)[.,]|[|{}<>\\=]|\[\]|:\s*$")


def prose(text: str) -> str:
    """The paragraphs of prose of an article, up to its lists of links and sources."""
    body = _LAST_SECTIONS.split("\n" + text + "\n", maxsplit=1)[0]
    lines = (line.strip() for line in _WRAP.sub(" ", body).split("\n"))
    return "\n\n".join(line for line in lines if _is_prose(line))


def _is_prose(line: str) -> bool:
    if len(line) < PARAGRAPH or not _ENDS.search(line) or not _BEGINS.match(line):
        return False
    if _HOLE.search(line) or _NOTE.match(line):
        return False
    letters = sum(character.isalpha() or character == " " for character in line)
    return letters > 0.88 * len(line)


def eligible(raw: Iterable[bytes]) -> Iterator[Document]:
    """The prose of articles of suitable length, without those that lost a formula or code to the cleaning."""
    stats, before = CleaningStats(), 0
    for article in clean(raw, stats=stats):
        removed = stats.formulas + stats.code + stats.preformatted
        lost, before = removed - before, removed
        text = prose(article.text)
        if not lost and not _LISTS.match(article.source) and SHORTEST <= len(text) <= LONGEST:
            yield Document(text, source=article.source)


def spread(articles: list[Document], *, target: int = TARGET) -> list[Document]:
    """Articles taken evenly over the list until `target` characters are reached."""
    chosen: list[Document] = []
    size = 0
    for place, article in enumerate(articles, start=1):
        if size < target * place / len(articles) and size + len(article.text) <= target * 1.02:
            chosen.append(article)
            size += len(article.text)
    return chosen


def pack(articles: list[Document]) -> bytes:
    """The corpus as gzip without name and time, so that equal text gives equal bytes."""
    text = SEPARATOR.join(article.text for article in articles) + "\n"
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, compresslevel=9, mtime=0) as file:
        file.write(text.encode("utf-8"))
    return buffer.getvalue()


def notice(articles: list[Document]) -> str:
    """The licence notice, with the titles of all articles used."""
    size = sum(len(article.text) for article in articles)
    titles = "; ".join(article.source for article in articles)
    return NOTICE.format(count=len(articles), size=size, rules=RULES, titles=titles)


NOTICE = """# Licence of the embedded corpus

`corpus.txt.gz` is **not** covered by the licence of this package's code: it is a changed excerpt of the English
Wikipedia.

- **Authors:** the contributors to the English Wikipedia. Each article's authors are listed in its page history, at
  `https://en.wikipedia.org/wiki/TITLE?action=history`.
- **Source:** enwik8, the first 100,000,000 bytes of the English Wikipedia dump of 3 March 2006
  (`enwiki-20060303-pages-articles.xml`), by way of Matt Mahoney's *Large Text Compression Benchmark*.
- **Licence:** Creative Commons Attribution-ShareAlike (<https://creativecommons.org/licenses/by-sa/3.0/>), and the GNU
  Free Documentation License (<https://www.gnu.org/licenses/fdl-1.3.html>), under which the text was first published.
  Whoever passes the corpus on, changed or not, does so under the same licence and with this notice.
- **Changes made:** {count} articles ({size:,} characters) were taken at even distances over enwik8. Markup, templates,
  tables, media, references, formulas, code, HTML, the targets of links, categories and links to other languages were
  removed, and entities decoded. Headings, lists, closing sections of links and sources, and paragraphs in which a
  removal left a hole were left out. Nothing was added. `tools/embedded_corpus.py` in the sources of this package does
  all of this; the cleaning rules were those numbered {rules}, and later ones may choose a few articles otherwise.

The text comes without any warranty; Wikipedia's general disclaimer holds.

## Articles

{titles}
"""


def main() -> None:
    """Write `corpus.txt.gz` and `LICENSE-corpus.md` into the package, or into the folder `--out`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("enwik8", help="enwik8, plain or as .gz or .zip")
    parser.add_argument("--out", type=Path, default=PACKAGE, help="folder to write to")
    options = parser.parse_args()
    articles = spread(list(eligible(read_raw(options.enwik8))))
    (options.out / "corpus.txt.gz").write_bytes(pack(articles))
    (options.out / "LICENSE-corpus.md").write_text(notice(articles), encoding="utf-8")
    print(f"{len(articles)} articles, {sum(len(a.text) for a in articles):,} characters")


if __name__ == "__main__":
    main()
