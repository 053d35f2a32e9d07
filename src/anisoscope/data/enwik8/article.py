"""enwik8, the first 10⁸ bytes of the English Wikipedia of March 2006: from XML to plain articles, one at a time."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from anisoscope.data.enwik8.markup import CleaningStats, clean_article
from anisoscope.data.files import BLOCK, entries, readable
from anisoscope.data.text import Document
from anisoscope.errors import AnisoscopeError, missing_path

MD5 = "a1fa5ffddb56f4953e226637dabbb36a"  # of the plain 100,000,000 bytes
SIZE = 100_000_000
HEAD = 4 << 20  # bytes within which an export shows its first page

_TEXT = re.compile(r"<text[^>]*>(.*?)</text>", re.DOTALL)
_TITLE = re.compile(r"<title>([^<]*)</title>")
_NAMESPACES = (
    "Media|Special|Talk|User|User talk|Wikipedia|Wikipedia talk|Image|Image talk|MediaWiki|MediaWiki talk|Template|"
    "Template talk|Help|Help talk|Category|Category talk|Portal|Portal talk"
)
_OTHER_NAMESPACE = re.compile(rf"(?:{_NAMESPACES}):")
_REDIRECT = re.compile(r"\s*#\s*redirect", re.IGNORECASE)


def read_raw(path: str | Path) -> Iterator[bytes]:
    """The bytes of enwik8 from a plain, `.gz` or `.zip` file, in blocks."""
    path = Path(path).expanduser()
    if path.is_dir():
        raise AnisoscopeError(f"{str(path)!r} is a folder; expected the file enwik8, plain or as .gz or .zip.")
    if not path.is_file():
        raise missing_path(path)
    for entry in entries(path):
        with readable(entry.name), entry.open() as stream:
            while block := stream.read(BLOCK):
                yield block


def clean(raw: str | bytes | Iterable[bytes], *, stats: CleaningStats | None = None) -> Iterator[Document]:
    """Articles of a MediaWiki export as plain text, in their order; `source` is the title.

    >>> page = "<page><title>Cat</title><text>The '''cat''' is a [[mammal|small mammal]].{{stub}}</text></page>"
    >>> next(clean(page)).text
    'The cat is a small mammal.'
    """
    stats = stats if stats is not None else CleaningStats()
    blocks = [raw.encode()] if isinstance(raw, str) else [raw] if isinstance(raw, bytes) else raw
    for page in _pages(blocks, stats):
        document = _article(page, stats)
        if document is not None:
            stats.articles += 1
            stats.characters_out += len(document.text)
            yield document
    if not stats.pages:
        raise AnisoscopeError("no whole <page> was found; expected a MediaWiki XML export such as enwik8.")


def _pages(blocks: Iterable[bytes], stats: CleaningStats) -> Iterator[str]:
    """Whole pages; what stands between them is skipped, and a page without its end is counted as truncated."""
    rest, offset = b"", 0  # offset: of `rest` in the stream
    for block in blocks:
        rest += block
        end = 0
        while (begin := rest.find(b"<page>", end)) >= 0 and (close := rest.find(b"</page>", begin)) >= 0:
            end = close + len(b"</page>")
            stats.pages += 1
            yield _decoded(rest[begin:end], offset + begin)
        if begin < 0:  # no page is open: only the beginning of its mark can matter
            end = max(end, len(rest) - len(b"<page>"))
            if not stats.pages and offset + end > HEAD:
                raise AnisoscopeError(
                    f"no <page> was found in the first {HEAD >> 20} MB; expected a MediaWiki XML export such as enwik8."
                )
        offset, rest = offset + end, rest[end:]
    stats.truncated += rest.count(b"<page>")


def _decoded(page: bytes, offset: int) -> str:
    try:
        return page.decode("utf-8")
    except UnicodeDecodeError as error:
        raise AnisoscopeError(
            f"the export holds bytes that are not UTF-8 (the first at byte offset {offset + error.start}); it is "
            f"damaged or was re-encoded: copy or download it again."
        ) from error


def _article(page: str, stats: CleaningStats) -> Document | None:
    title, text = _TITLE.search(page), _TEXT.search(page)
    wiki = _xml_unescaped(text[1]) if text else ""
    if not title or not wiki:
        stats.empty += 1
        return None
    name = html.unescape(title[1])
    if _OTHER_NAMESPACE.match(name):
        stats.other_namespaces += 1
        return None
    if _REDIRECT.match(wiki):
        stats.redirects += 1
        return None
    stats.characters_in += len(wiki)
    plain = clean_article(wiki, stats)
    if not plain:
        stats.empty += 1
        return None
    return Document(plain, source=name)


def _xml_unescaped(text: str) -> str:
    """One level of escaping removed; `&` last, so that a doubly escaped entity stays an entity for later."""
    for entity, character in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&")):
        text = text.replace(entity, character)
    return text
