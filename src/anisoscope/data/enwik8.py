"""enwik8, the first 10⁸ bytes of the English Wikipedia of March 2006: from XML to plain articles, one at a time.

Nothing of the markup stays: no templates, tables, media, references, formulas, code, tags, entities or addresses.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from anisoscope.capture.sources import missing_path
from anisoscope.data.files import BLOCK, entries, readable
from anisoscope.data.text import Document
from anisoscope.errors import AnisoscopeError

SENTENCE = 8  # words that make a preformatted line worth keeping
MD5 = "a1fa5ffddb56f4953e226637dabbb36a"  # of the plain 100,000,000 bytes

_I, _S, _M = re.IGNORECASE, re.DOTALL, re.MULTILINE
_PAGE = re.compile(rb"<page>.*?</page>", _S)
_WORD = re.compile(r"\b[A-Za-z]{2,}\b")
_MARKS = ("", *"*#:;=|!<[{")  # a line that begins so, after spaces, is a list, a heading, a link or a table
_TITLE = re.compile(r"<title>(.*?)</title>", _S)
_TEXT = re.compile(r"<text\b[^>]*>(.*?)</text>", _S)
_NAMESPACES = (
    "Media|Special|Talk|User|User talk|Wikipedia|Wikipedia talk|Image|Image talk|MediaWiki|MediaWiki talk|Template|"
    "Template talk|Help|Help talk|Category|Category talk|Portal|Portal talk"
)
_OTHER_NAMESPACE = re.compile(rf"(?:{_NAMESPACES}):")
_REDIRECT = re.compile(r"\s*#\s*redirect", _I)

_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", _S)
_REFERENCE = re.compile(r"<ref\b[^<>]*/>|<ref\b[^<>]*>.*?</ref\s*>", _I | _S)
_FORMULA = re.compile(r"<(math|hiero|chem|score)\b[^<>]*>.*?</\1\s*>", _I | _S)
_CODE = re.compile(r"<(code|source|pre|syntaxhighlight)\b[^<>]*>.*?</\1\s*>", _I | _S)
_GALLERY = re.compile(r"<(gallery|timeline|imagemap|inputbox)\b[^<>]*>.*?</\1\s*>", _I | _S)
_HTML_TABLE = re.compile(r"<table\b(?:(?!<table\b).)*?</table\s*>", _I | _S)
_BREAK = re.compile(r"<(?:br|/?p|/?div|/?center|/?blockquote|/?li|/?[uod]l|hr|/?d[td])\b[^<>]*>", _I)
_HTML = (
    "a|abbr|b|big|caption|center|cite|code|dd|del|div|dl|dt|em|font|gallery|h[1-6]|hr|i|includeonly|ins|li|math|noinclude|"
    "nowiki|ol|p|pre|q|ref|references|s|small|span|strike|strong|sub|sup|t[dhr]|table|tbody|tt|u|ul|var"
)
# Unknown names only within a line and when short: "a<b and c>d" must not take a paragraph with it.
_TAG = re.compile(rf"</?(?:{_HTML})\b[^<>]*>|</?[a-zA-Z][^<>\n]{{0,40}}>", _I)
_NESTING = re.compile(r"\{\{|\}\}(?!\}(?!\}))|^[ \t:*#]*\{\||^[ \t]*\|\}(?!\})", _M)

_SCHEME = r"(?:https?|ftp|gopher|irc|news|mailto|telnet|nntp)"
_EXTERNAL = re.compile(rf"\[(?:{_SCHEME}:|//)[^\s\[\]]*[ \t]*((?:[^\[\]\n]|\[\[[^\[\]]*\]\])*)\]", _I)
_ADDRESS = re.compile(rf"\b(?:{_SCHEME}://|https?:(?=\w)|mailto:|www\.(?=\w))[^\s<>\[\]|]*[^\s<>\[\]|.,;:!?)\"']", _I)
_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
_MEDIA = re.compile(r"\s*(?:Image|File|Media)\s*:", _I)
_CATEGORY = re.compile(r"\s*Category\s*:", _I)
_LANGUAGE = re.compile(
    r"\s*(?:[a-z]{2,3}|simple|zh-[a-z-]+|[a-z]{2,3}-[a-z]{2,8}|roa-[a-z]+|be-x-old|tokipona)\s*:(?!:)"
)
_PREFIX = re.compile(r"^:?(?:[\w -]+:)*")
_PARENTHESIS = re.compile(r"\s*\([^()]*\)$")

_HEADING = re.compile(r"^[ \t]*(={2,6})[ \t]*(.*?)[ \t]*\1=*[ \t]*|^[ \t]*=[ \t]*([^=\n]*)=[ \t]*$", _M)
_BULLET = re.compile(r"^[ \t]*[*#:;]+[ \t]*", _M)
_RULE = re.compile(r"^[ \t]*-{4,}", _M)
_TABLE_LINE = re.compile(r"^[ \t]*(?:\|.*|!.*\|.*|\{\|.*)$", _M)
_NAMELESS = re.compile(r"&(#?\w+);")  # looks like an entity, is none
_MAGIC = re.compile(r"__[A-Z]+__|~~~+")
_QUOTES = re.compile(r"'{2,}")
_STRAY = re.compile(r"\[\[|\]\]|\{\{+|\}\}+|\{\||\|\}")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2028-\u202e\u2060\ufeff\ufffe\uffff\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SPACES = re.compile("[ \t\u00a0\u2000-\u200a\u202f\u3000]+")
_HOLLOW = re.compile(r"(?<!\w)\(\s*[,;:.]*\s*\)|\[\s*\]|\"\s*\"(?=\s*[,;)])")
_BEFORE = re.compile(r"[ ]+(?=[,;.:!?)](?:\s|$))|(?<=\()[ ]*[,;:]?[ ]+")
_EDGES = re.compile(r"[ ]*\n[ ]*")
_BLANK = re.compile(r"\n{3,}")


@dataclass
class CleaningStats:
    """What was kept and what was removed."""

    pages: int = 0
    articles: int = 0
    redirects: int = 0
    other_namespaces: int = 0
    truncated: int = 0
    empty: int = 0
    comments: int = 0
    references: int = 0
    formulas: int = 0
    code: int = 0
    preformatted: int = 0  # lines
    templates: int = 0
    tables: int = 0
    media: int = 0
    categories: int = 0
    interlanguage: int = 0
    links: int = 0  # unwrapped: their label stays
    external_links: int = 0  # unwrapped as well
    addresses: int = 0
    tags: int = 0
    entities: int = 0
    headings: int = 0
    characters_in: int = 0
    characters_out: int = 0


def read_raw(path: str | Path) -> Iterator[bytes]:
    """The bytes of enwik8 from a plain, `.gz` or `.zip` file, in blocks."""
    path = Path(path).expanduser()
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
        raise AnisoscopeError("no <page> was found; expected a MediaWiki XML export such as enwik8.")


def _pages(blocks: Iterable[bytes], stats: CleaningStats) -> Iterator[str]:
    rest = b""
    for block in blocks:
        rest += block
        if b"</page>" not in rest:
            continue
        end = 0
        for match in _PAGE.finditer(rest):
            stats.pages += 1
            end = match.end()
            yield match.group().decode("utf-8")
        rest = rest[end:]
    stats.truncated += rest.count(b"<page>")


def _article(page: str, stats: CleaningStats) -> Document | None:
    title, text = _TITLE.search(page), _TEXT.search(page)
    if not title or not text:
        stats.empty += 1
        return None
    name, wiki = html.unescape(title[1]), _xml_unescaped(text[1])
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


def clean_article(wiki: str, stats: CleaningStats | None = None) -> str:
    """One article's wiki text as plain text."""
    stats = stats if stats is not None else CleaningStats()
    text = _without_hidden(wiki, stats)
    text = _without_nested(text, stats)
    text = _QUOTES.sub(_apostrophe, _without_preformatted(text, stats))
    text = _without_links(text, stats)
    text = _without_tags(text, stats)
    return _plain_lines(text, stats)


def _without_hidden(text: str, stats: CleaningStats) -> str:
    """Comments, references, formulas, code, galleries and HTML tables."""
    text, n = _COMMENT.subn("", text)
    stats.comments += n
    if "<" not in text:
        return text
    text, n = _REFERENCE.subn("", text)
    stats.references += n
    text, n = _FORMULA.subn("", text)
    stats.formulas += n
    text, n = _CODE.subn("", text)
    stats.code += n
    text, n = _GALLERY.subn("", text)
    stats.media += n
    n = 1
    while n and "<table" in text.lower():
        text, n = _HTML_TABLE.subn("", text)
        stats.tables += n
    return text


def _without_nested(text: str, stats: CleaningStats) -> str:
    """Templates {{…}} and tables {|…|}, nested in each other to any depth; one pass, linear in the text."""
    opened: list[tuple[str, int]] = []  # kind, and where its opening stands
    closed: list[tuple[int, int]] = []
    for match in _NESTING.finditer(text):
        token = match.group().strip(" \t:*#")
        if token in ("{{", "{|"):
            opened.append((token, match.start()))
        elif (partner := _partner(token, opened)) is not None:
            kind, begin = opened[partner]
            del opened[partner:]
            closed.append((begin, match.end()))
            stats.templates += kind == "{{"
            stats.tables += kind == "{|"
    return _cut(text, sorted(closed))


def _partner(token: str, opened: list[tuple[str, int]]) -> int | None:
    """The innermost opening that a closing token belongs to."""
    wanted = "{{" if token == "}}" else "{|"
    return next((i for i in range(len(opened) - 1, -1, -1) if opened[i][0] == wanted), None)


def _cut(text: str, spans: list[tuple[int, int]]) -> str:
    """The text without some spans, which may lie inside each other."""
    kept, start = [], 0
    for begin, end in spans:
        if begin >= start:
            kept.append(text[start:begin])
            start = end
    return "".join([*kept, text[start:]])


def _without_preformatted(text: str, stats: CleaningStats) -> str:
    """Lines that begin with a space are shown as typed: code, drawings, tables – unless they hold a whole sentence."""
    if "\n " not in text and not text.startswith(" "):
        return text
    kept = []
    for line in text.split("\n"):
        typed = line.startswith(" ") and line.lstrip()[:1] not in _MARKS
        if typed and len(_WORD.findall(line)) < SENTENCE:
            stats.preformatted += 1
        else:
            kept.append(line)
    return "\n".join(kept)


def _without_links(text: str, stats: CleaningStats) -> str:
    """Links become their labels, from the inside out; media, categories and other languages disappear."""
    text, n = _EXTERNAL.subn(r"\1", text)
    stats.external_links += n
    unwrap = _unwrapper(stats)
    found = 1
    while found:
        text, found = _LINK.subn(unwrap, text)
    text, n = _EXTERNAL.subn(r"\1", text)
    stats.external_links += n
    text, n = _ADDRESS.subn("", text)
    stats.addresses += n
    return text


def _unwrapper(stats: CleaningStats) -> Callable[[re.Match[str]], str]:
    def unwrap(match: re.Match[str]) -> str:
        target, piped, label = match[1].partition("|")
        if _MEDIA.match(target):
            stats.media += 1
            return ""
        if _CATEGORY.match(target):
            stats.categories += 1
            return ""
        if _LANGUAGE.match(target) and not piped:
            stats.interlanguage += 1
            return ""
        stats.links += 1
        if label.strip():
            return label.rpartition("|")[2]
        return _PARENTHESIS.sub("", _PREFIX.sub("", target)) if piped else target.lstrip(": ")

    return unwrap


def _without_tags(text: str, stats: CleaningStats) -> str:
    """Tags and entities, also those that were escaped twice or more."""
    for _ in range(4):
        if "<" in text:
            text, n = _BREAK.subn("\n", text)
            text, m = _TAG.subn("", text)
            stats.tags += n + m
        if "&" not in text:
            return text
        decoded = html.unescape(text)
        if decoded == text:
            return text
        stats.entities += max(0, text.count("&") - decoded.count("&"))
        text = decoded
    return text


def _plain_lines(text: str, stats: CleaningStats) -> str:
    """Headings, lists, emphasis and what is left of tables; then white space and the holes that removals leave."""
    text = _TABLE_LINE.sub("", _MAGIC.sub("", text))
    text, n = _HEADING.subn(r"\n\2\3\n", text)
    stats.headings += n
    text = _BULLET.sub("", _RULE.sub("", text))
    text = _NAMELESS.sub(r"\1", _TAG.sub("", text))
    text, n = _ADDRESS.subn("", _STRAY.sub("", text))
    stats.addresses += n
    text = _SPACES.sub(" ", _INVISIBLE.sub("", text))
    text = _BULLET.sub("", text)
    text = _BEFORE.sub("", _HOLLOW.sub("", _BEFORE.sub("", text)))
    text = _SPACES.sub(" ", text)
    return _BLANK.sub("\n\n", _EDGES.sub("\n", text)).strip()


def _apostrophe(match: re.Match[str]) -> str:
    """Marks of emphasis; four quotes are three of them and an apostrophe."""
    return "'" if len(match.group()) == 4 else ""
