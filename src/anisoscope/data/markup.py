"""Converting a MediaWiki export such as enwik8 from XML with wiki markup to plain articles, one at a time.

All markup is removed: no templates, tables, media, references, formulas, code, tags, entities or addresses.
For speed most patterns begin with a character that is rare in prose (a line feed, a bracket), and a substring test
comes before each regular expression.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from anisoscope.data.text import BLOCK, Document, entries, readable
from anisoscope.errors import AnisoscopeError, missing_path

HEAD = 4 << 20  # bytes within which the first page of an export must begin

# Code points whose UTF-8 holds a byte that is no symbol of enwik8 (see `enwik8.SYMBOLS`): controls, Thaana, NKo and
# others, private use, the planes from 4 on.
OUTSIDE = re.compile("[\x00-\x08\x0b-\x1f\x7f\u0740-\u077f\u07c0-\u07ff\ue000-\uefff\U00040000-\U0010ffff]")
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
    """The complete <page> elements; a page without its end is counted as truncated."""
    rest, offset = b"", 0  # offset: of `rest` in the stream
    for block in blocks:
        rest += block
        end = 0
        while (begin := rest.find(b"<page>", end)) >= 0 and (close := rest.find(b"</page>", begin)) >= 0:
            end = close + len(b"</page>")
            stats.pages += 1
            try:
                page = rest[begin:end].decode("utf-8")
            except UnicodeDecodeError as error:
                raise AnisoscopeError(
                    "the export holds bytes that are not UTF-8 (the first at byte offset "
                    f"{offset + begin + error.start}); it is damaged or was re-encoded: copy or download it again."
                ) from error
            yield page
        if begin < 0:  # no page is open: keep only what may be the beginning of its tag
            end = max(end, len(rest) - len(b"<page>"))
            if not stats.pages and offset + end > HEAD:
                raise AnisoscopeError(
                    f"no <page> was found in the first {HEAD >> 20} MB; expected a MediaWiki XML export such as enwik8."
                )
        offset, rest = offset + end, rest[end:]
    stats.truncated += rest.count(b"<page>")


def _article(page: str, stats: CleaningStats) -> Document | None:
    title, text = _TITLE.search(page), _TEXT.search(page)
    wiki = text[1] if text else ""
    # undo one level of escaping; `&` last, so that a doubly escaped entity is decoded later
    for entity, character in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&")):
        wiki = wiki.replace(entity, character)
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


@dataclass
class CleaningStats:
    """Counts of what the cleaning kept and removed."""

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
    entities: int = 0  # decoded
    emphasis: int = 0
    lists: int = 0  # marks of lists, rules and magic words
    headings: int = 0  # unwrapped; those with nothing under them are `empty_headings`
    empty_headings: int = 0
    symbols: int = 0  # invisible ones, and those outside of the vocabulary
    characters_in: int = 0  # of the wiki text of articles
    characters_out: int = 0
    removed: dict[str, int] = field(default_factory=dict)  # characters by kind; sum: characters_in − characters_out

    def note(self, kind: str, count: int, characters: int) -> None:
        """Add to the counts of what was removed; `spaces` (white space, and text left by removals) has no count."""
        if kind != "spaces":
            setattr(self, kind, getattr(self, kind) + count)
        self.removed[kind] = self.removed.get(kind, 0) + characters


SENTENCE = 8  # a preformatted line with as many words is kept
DEPTH = 32  # levels of nested links that are resolved

_I, _S = re.IGNORECASE, re.DOTALL
_WORD = re.compile(r"\b[A-Za-z]{2,}\b")
_MARKS = ("", *"*#:;=|!<[{")  # a line that begins so, after spaces, is a list, a heading, a link or a table

_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", _S)
_REFERENCE = re.compile(r"<ref\b[^<>]*/>|<ref\b[^<>]*>.*?</ref\s*>", _I | _S)
_FORMULA = re.compile(r"<(math|hiero|chem|score)\b[^<>]*>.*?</\1\s*>", _I | _S)
_CODE = re.compile(r"<(code|source|pre|syntaxhighlight)\b[^<>]*>.*?</\1\s*>", _I | _S)
_GALLERY = re.compile(r"<(gallery|timeline|imagemap|inputbox)\b[^<>]*>.*?</\1\s*>", _I | _S)
_HTML_TABLE = re.compile(r"<table\b(?:(?!<table\b).)*?</table\s*>", _I | _S)
_HIDDEN = ((_REFERENCE, "references"), (_FORMULA, "formulas"), (_CODE, "code"), (_GALLERY, "media"))
_NESTING = re.compile(r"\{\{|\}\}(?!\}(?!\}))|\{\||\|\}(?!\})")
_INDENT = frozenset(" \t:*#")

_BREAK = re.compile(r"<(?:br|/?p|/?div|/?center|/?blockquote|/?li|/?[uod]l|hr|/?d[td])\b[^<>]*>", _I)
_HTML = (
    "abbr|acronym|address|applet|area|base|big|blink|body|button|caption|cite|code|col|colgroup|del|dfn|em|embed|font|"
    "form|frame|frameset|gallery|h[1-6]|head|html|iframe|img|includeonly|input|ins|kbd|label|link|map|math|meta|nobr|"
    "noinclude|nowiki|object|onlyinclude|option|param|pre|ref|references|samp|script|select|small|span|strike|strong|"
    "style|sub|sup|t[dhr]|table|tbody|textarea|tfoot|thead|title|tt|var"
)
# Names of one letter and unknown names only within a line and when short: "a<b and c>d" takes no paragraph with it.
_TAG = re.compile(rf"<[/!?]?(?:{_HTML})\b[^<>]*>|<[/!?]?[a-z][^<>\n]{{0,80}}>", _I)
_LESS = re.compile(r"<(?=[a-zA-Z/!?])")  # not a tag, but looks like one

_SCHEME = r"(?:https?|ftp|gopher|irc|news|mailto|telnet|nntp)"
_EXTERNAL = re.compile(rf"\[(?:{_SCHEME}:|//)[^\s\[\]]*[ \t]*((?:[^\[\]\n]|\[\[[^\[\]]*\]\])*)\]", _I)
_END = r"[^\s<>\[\]|]*[^\s<>\[\]|.,;:!?)\"']"  # of an address: not the punctuation after it
_ADDRESS = re.compile(rf"\b(?:[a-z][a-z0-9+.-]{{0,15}}://|https?:(?=\w)|mailto:|www\.(?=\w)){_END}", _I)
_DOMAIN = r"(?:com|org|net|edu|gov|mil|info|co\.[a-z]{2}|ac\.uk)"
_PATH = re.compile(rf"\b[a-z0-9][\w.-]{{0,80}}\.{_DOMAIN}/(?:{_END})?", _I)
_ADDRESSES = ("://", "http", "mailto:", "www.")
_PATHS = (".com/", ".org/", ".net/", ".edu/", ".gov/", ".mil/", ".info/", ".uk/", ".co.")

_LOOSE_LINK = re.compile(r"\[\[((?:[^\[\]]|\[[^\[\]]*\]){0,2000})\]\]")  # one whose label holds [brackets]
_OPEN_MEDIA = re.compile(r"\[\[\s*(?:Image|File|Media)\s*:[^\n]*", _I)
_MEDIA = re.compile(r"\s*:?\s*(?:Image|File|Media)\s*:", _I)
_CATEGORY = re.compile(r"\s*Category\s*:", _I)
_LANGUAGE = re.compile(
    r"\s*(?:[a-z]{2,3}|simple|zh-[a-z-]+|[a-z]{2,3}-[a-z]{2,8}|roa-[a-z]+|be-x-old|tokipona)\s*:(?!:)"
)
_PREFIX = re.compile(r"^:?(?:[\w -]+:)*")
_SHOWN = re.compile(r"\s*:\s*(?:Category|[a-z]{2,3})\s*:\s*", _I)  # [[:Category:Birds]] is a visible link
_PARENTHESIS = re.compile(r"\s*\([^()]*\)$")

_HEADING = re.compile(r"\n[ \t]*(={2,6})[ \t]*([^\n]*?)[ \t]*\1=*[ \t]*|\n[ \t]*(=)[ \t]*([^=\n]*)=[ \t]*(?=\n)")
_HALF_HEADING = re.compile(r"\n[ \t]*={2,}[ \t]*|[ \t]*={2,}[ \t]*(?=\n)")
_BULLET = re.compile(r"\n[ \t]*[*#:;]+[ \t]*")
_LEADING = re.compile(r"\n[*#:;,]+ ?")  # the same, or a comma, that removals left at the beginning of a line
_RULE = re.compile(r"\n[ \t]*-{4,}")
_TABLE_LINE = re.compile(r"\n[ \t]*(?:\|[^\n]*|![^\n]*\|[^\n]*|\{\|[^\n]*)")
_NAMELESS = re.compile(r"&(#?\w+);")  # looks like an entity, but is unknown
_MAGIC = re.compile(r"__[A-Z]+__|~~~+")
_QUOTES = re.compile(r"'''*")
_STRAYS = ("[[", "]]", "{{", "}}", "{|", "|}")
_STRAY = re.compile(r"\[\[|\]\]|\{\{+|\}\}+|\{\||\|\}")
_INVISIBLE = re.compile(
    "[\u00ad\u200b-\u200f\u2028-\u202e\u2060\ue000-\uf8ff\ufeff\ufffd-\uffff\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
_ODD_SPACES = re.compile("[\t\u00a0\u2000-\u200a\u202f\u3000]")
_BEFORE = tuple((f" {mark}", re.compile(rf" {re.escape(mark)}(?=\s)"), mark) for mark in ";.:!?")
_HOLLOW = re.compile(r"\((?<!\w\()(?:see|see also|sources?|e\.g\.|i\.e\.|cf\.)?[\s,;:]*\.?\)")  # f() is a function
_NO_BRACKET = re.compile(r"\[\s*\]")
_NO_QUOTE = re.compile(r"\"\s*\"(?=\s*[,;)])")
_NO_SOUND = re.compile(r"(?<![/\w])//(?![\w/])")  # what is left of a pronunciation
_COMMAS = re.compile(r",(?: ?,)+")
_NO_WORDS = re.compile(r"\n[ ,;.:()|\"'-]+(?=\n)")
_SECTION = "\x01"  # marks a heading and its level until it is known whether its section has text


def clean_article(wiki: str, stats: CleaningStats | None = None) -> str:
    """One article's wiki text as plain text.

    >>> clean_article("The '''cat''' is a [[mammal|small mammal]].{{stub}}")
    'The cat is a small mammal.'
    """
    stats = stats if stats is not None else CleaningStats()
    before = sum(stats.removed.values())
    text = _without_hidden(wiki, stats)
    text = _without_nested(text, stats)
    text = _without_preformatted(text, stats)
    text = _drop(text, _QUOTES, "emphasis", stats, by=_apostrophe) if "''" in text else text
    text = _without_links(text, stats)
    text = _without_tags(text, stats)
    text = _plain_lines(text, stats)
    stats.note("spaces", 0, len(wiki) - len(text) - (sum(stats.removed.values()) - before))
    return text


def _drop(text: str, pattern: re.Pattern[str], kind: str, stats: CleaningStats, *, by: object = "") -> str:
    """Replace all matches and count what was removed."""
    kept, count = pattern.subn(by, text)  # type: ignore[call-overload]
    if count:
        stats.note(kind, count, len(text) - len(kept))
    return str(kept)


def _apostrophe(match: re.Match[str]) -> str:
    """Replacement of quotes that mark emphasis; four of them are three and an apostrophe."""
    return "'" if len(match.group()) == 4 else ""


def _without_hidden(text: str, stats: CleaningStats) -> str:
    """Remove comments, references, formulas, code, galleries and HTML tables."""
    if "<" not in text:
        return text
    text = _drop(text, _COMMENT, "comments", stats)
    for pattern, kind in _HIDDEN:
        text = _drop(text, pattern, kind, stats)
    before = -1
    while stats.tables != before and "<table" in text.lower():
        before = stats.tables
        text = _drop(text, _HTML_TABLE, "tables", stats)
    return text


def _without_nested(text: str, stats: CleaningStats) -> str:
    """Remove templates {{…}} and tables {|…|}, nested in each other to any depth, in one linear pass."""
    opened: list[tuple[str, int]] = []  # opening token, and its position
    closed: list[tuple[int, int, str]] = []
    for match in _NESTING.finditer(text):
        token, begin = match.group(), match.start()
        if "|" in token:  # belongs to a table only at the beginning of a line, after spaces and marks of lists
            while begin and text[begin - 1] in _INDENT:
                begin -= 1
            inside = begin > 0 and text[begin - 1] != "\n"
            if inside or (token == "|}" and text[begin : match.start()].strip(" \t")):
                continue
        if token in ("{{", "{|"):
            opened.append((token, begin))
            continue
        opening, kind = ("{{", "templates") if token == "}}" else ("{|", "tables")
        partner = next((i for i in range(len(opened) - 1, -1, -1) if opened[i][0] == opening), None)
        if partner is not None:  # the innermost opening of its kind
            closed.append((opened[partner][1], match.end(), kind))
            del opened[partner:]
            stats.note(kind, 1, 0)
    kept, start = [], 0
    for begin, end, kind in sorted(closed):
        if begin >= start:  # otherwise it lies inside one that is cut out already
            kept.append(text[start:begin])
            stats.note(kind, 0, end - begin)
            start = end
    return "".join([*kept, text[start:]])


def _without_preformatted(text: str, stats: CleaningStats) -> str:
    """Remove preformatted lines, which begin with a space (code, drawings, tables), unless they hold a sentence."""
    if "\n " not in text and not text.startswith(" "):
        return text
    kept = []
    for line in text.split("\n"):
        preformatted = line.startswith(" ") and line.lstrip()[:1] not in _MARKS
        if preformatted and len(_WORD.findall(line)) < SENTENCE:
            stats.note("preformatted", 1, len(line) + 1)
        else:
            kept.append(line)
    if not kept:
        stats.removed["preformatted"] -= 1  # the text had one line feed fewer than lines
    return "\n".join(kept)


def _without_links(text: str, stats: CleaningStats) -> str:
    """Replace links by their labels, innermost first; remove media, categories and links to other languages."""
    if "[" in text:
        text = _drop(text, _EXTERNAL, "external_links", stats, by=r"\1")
        for _ in range(DEPTH):
            if "[[" not in text:
                break
            text, count = _unwrapped(text, stats)
            if not count:  # links whose label holds single brackets: [[Image:a.jpg|at 20 [°C]]]
                text, count = _LOOSE_LINK.subn(partial(_unwrapped_loosely, stats=stats), text)
            if not count:
                break
        text = _drop(text, _OPEN_MEDIA, "media", stats) if "[[" in text else text
        text = _drop(text, _EXTERNAL, "external_links", stats, by=r"\1")
    return _without_addresses(text, stats)


def _unwrapped(text: str, stats: CleaningStats) -> tuple[str, int]:
    """(the text with all links without inner brackets replaced by their labels, the number of links)"""
    first, *pieces = text.split("[[")
    kept, count, hidden, size = [first], 0, 0, 0
    for piece in pieces:
        body, closed, rest = piece.partition("]]")
        inner = body.lstrip("[")
        if not closed or "[" in inner or "]" in inner:
            kept += "[[", piece
            continue
        count += 1
        kept.append(body[: len(body) - len(inner)])
        if ":" in inner and (kind := _hidden_kind(inner)):
            stats.note(kind, 1, len(inner) + 4)
            hidden, size = hidden + 1, size + len(inner) + 4
            kept.append(rest)
        else:
            kept += _label(inner), rest
    joined = "".join(kept)
    stats.note("links", count - hidden, len(text) - len(joined) - size)
    return joined, count


def _unwrapped_loosely(match: re.Match[str], stats: CleaningStats) -> str:
    kind = _hidden_kind(match[1])
    label = "" if kind else _label(match[1])
    stats.note(kind or "links", 1, len(match.group()) - len(label))
    return label


def _hidden_kind(body: str) -> str:
    """The kind of a link that shows no text (media, categories, interlanguage), else ""."""
    target, piped, _ = body.partition("|")
    if _MEDIA.match(target) and not (piped and target.lstrip().startswith(":")):
        return "media"
    if _CATEGORY.match(target):
        return "categories"
    return "interlanguage" if not piped and _LANGUAGE.match(target) else ""


def _label(body: str) -> str:
    target, piped, label = body.partition("|")
    if not piped:
        return _SHOWN.sub("", target, count=1).lstrip(":# ") if target[:1] in ":# " else target
    if label and not label.isspace():
        return label.rpartition("|")[2]
    return _PARENTHESIS.sub("", _PREFIX.sub("", target))


def _without_addresses(text: str, stats: CleaningStats) -> str:
    lower = text.lower()
    if any(mark in lower for mark in _ADDRESSES):
        text = _drop(text, _ADDRESS, "addresses", stats)
    if any(mark in lower for mark in _PATHS):
        text = _drop(text, _PATH, "addresses", stats)
    return text


def _without_tags(text: str, stats: CleaningStats) -> str:
    """Remove tags and decode entities, also those that were escaped several times."""
    for _ in range(4):
        if "<" in text:
            text = _drop(text, _BREAK, "tags", stats, by="\n")
            text = _drop(text, _TAG, "tags", stats)
        if "&" not in text:
            return text
        decoded = html.unescape(text)
        if decoded == text:
            return text
        stats.note("entities", max(0, text.count("&") - decoded.count("&")), len(text) - len(decoded))
        text = decoded
    return text


def _plain_lines(text: str, stats: CleaningStats) -> str:
    """Unwrap headings and lists, remove remains of tables, then tidy white space and the gaps that removals left."""
    text = f"\n{text}\n"
    text = _drop(text, _INVISIBLE, "symbols", stats)
    text = text if text.isascii() else _drop(text, OUTSIDE, "symbols", stats)
    text = _drop(text, _TABLE_LINE, "tables", stats, by="\n") if "|" in text else text
    text = _drop(text, _MAGIC, "lists", stats) if "__" in text or "~~~" in text else text
    if "=" in text:
        text = _drop(text, _HEADING, "headings", stats, by=_marked_heading)
        text = _drop(text, _HALF_HEADING, "headings", stats, by="\n") if "==" in text else text
    text = _drop(text, _BULLET, "lists", stats, by="\n")
    text = _drop(text, _RULE, "lists", stats, by="\n") if "----" in text else text
    text = _drop(text, _QUOTES, "emphasis", stats) if "''" in text else text  # from entities
    text = _drop(text, _NAMELESS, "entities", stats, by=r"\1") if "&" in text else text
    text = _drop(text, _TAG, "tags", stats) if "<" in text else text
    text = _LESS.sub("< ", text) if "<" in text else text
    if any(mark in text for mark in _STRAYS):
        text = _drop(text, _STRAY, "links", stats)
    text = _without_addresses(text, stats)
    return _without_empty_sections(_without_holes(text), stats)


def _marked_heading(match: re.Match[str]) -> str:
    level, heading = (match[1], match[2]) if match[1] else (match[3], match[4])
    return f"\n{_SECTION}{len(level)}{heading}\n"


def _without_holes(text: str) -> str:
    """Tidy what removals left: repeated spaces, blank lines and commas, and empty brackets."""
    text = _ODD_SPACES.sub(" ", text)
    for _ in range(4):  # removing an empty bracket may leave another
        before = text
        while "  " in text:
            text = text.replace("  ", " ")
        text = text.replace(" \n", "\n").replace("\n ", "\n").replace(" )", ")").replace("( ", "(").replace(" ,", ",")
        text = text.replace("(, ", "(").replace("(; ", "(").replace("(: ", "(")
        for spaced_mark, pattern, mark in _BEFORE:
            text = pattern.sub(mark, text) if spaced_mark in text else text
        text = _HOLLOW.sub("", text) if "(" in text else text
        text = _NO_BRACKET.sub("", text) if "[" in text else text
        text = _NO_QUOTE.sub("", text) if '""' in text or '" "' in text else text
        text = _NO_SOUND.sub("", text) if "//" in text else text
        text = _COMMAS.sub(",", text) if ",," in text or ", ," in text else text
        text = _LEADING.sub("\n", text)
        if text == before:
            break
    text = _NO_WORDS.sub("\n", text)
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text


def _without_empty_sections(text: str, stats: CleaningStats) -> str:
    """Put headings on lines of their own; drop those without text before the next heading of the same level."""
    first, *sections = text.split(_SECTION)
    kept: list[str] = []
    below = 0  # level of the section kept last, which comes after this one
    for section in reversed(sections):
        level = int(section[0])
        heading, _, body = section[1:].partition("\n")
        body = body.strip()
        if not body and below <= level:
            stats.empty_headings += 1
            continue
        kept.append("\n\n".join(filter(None, (heading.strip(), body))))
        below = level
    return "\n\n".join(filter(None, (first.strip(), *reversed(kept))))
