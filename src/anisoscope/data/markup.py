"""Converting a MediaWiki export such as enwik8 from XML with wiki markup to plain articles, one at a time.

All markup is removed: no templates, tables, media, references, formulas, code, tags, entities or addresses.
For speed most patterns begin with a character that is rare in prose (a line feed, a bracket), and a substring test
comes before each regular expression.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from anisoscope.data.text import BLOCK, Document, entries, readable
from anisoscope.errors import AnisoscopeError, missing_path, refuse_special

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
    refuse_special(path)
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


@dataclass(frozen=True)
class Rule:
    """What is replaced, by what, and the kind under which it is counted; skipped where no mark is in the text."""

    kind: str
    pattern: re.Pattern[str]
    by: str | Callable[[re.Match[str]], str] = ""
    marks: tuple[str, ...] = ()


def _apply(text: str, stats: CleaningStats, *rules: Rule) -> str:
    for rule in rules:
        if rule.marks and not any(mark in text for mark in rule.marks):
            continue
        kept, count = rule.pattern.subn(rule.by, text)
        if count:
            stats.note(rule.kind, count, len(text) - len(kept))
        text = kept
    return text


_I, _S = re.IGNORECASE, re.DOTALL
_WORD = re.compile(r"\b[A-Za-z]{2,}\b")
_MARKS = ("", *"*#:;=|!<[{")  # a line that begins so, after spaces, is a list, a heading, a link or a table
_HIDDEN = (
    Rule("comments", re.compile(r"<!--.*?(?:-->|\Z)", _S)),
    Rule("references", re.compile(r"<ref\b[^<>]*/>|<ref\b[^<>]*>.*?</ref\s*>", _I | _S)),
    Rule("formulas", re.compile(r"<(math|hiero|chem|score)\b[^<>]*>.*?</\1\s*>", _I | _S)),
    Rule("code", re.compile(r"<(code|source|pre|syntaxhighlight)\b[^<>]*>.*?</\1\s*>", _I | _S)),
    Rule("media", re.compile(r"<(gallery|timeline|imagemap|inputbox)\b[^<>]*>.*?</\1\s*>", _I | _S)),
)
_HTML_TABLE = Rule("tables", re.compile(r"<table\b(?:(?!<table\b).)*?</table\s*>", _I | _S))
_NESTING = re.compile(r"\{\{|\}\}(?!\}(?!\}))|\{\||\|\}(?!\})")
_INDENT = frozenset(" \t:*#")
_QUOTES = re.compile(r"'''*")
# four quotes are the three of bold type and an apostrophe
_EMPHASIS = Rule("emphasis", _QUOTES, lambda match: "'" if len(match.group()) == 4 else "", marks=("''",))

_BREAK = re.compile(r"<(?:br|/?p|/?div|/?center|/?blockquote|/?li|/?[uod]l|hr|/?d[td])\b[^<>]*>", _I)
_HTML = (
    "abbr|acronym|address|applet|area|base|big|blink|body|button|caption|cite|code|col|colgroup|del|dfn|em|embed|font|"
    "form|frame|frameset|gallery|h[1-6]|head|html|iframe|img|includeonly|input|ins|kbd|label|link|map|math|meta|nobr|"
    "noinclude|nowiki|object|onlyinclude|option|param|pre|ref|references|samp|script|select|small|span|strike|strong|"
    "style|sub|sup|t[dhr]|table|tbody|textarea|tfoot|thead|title|tt|var"
)
# Names of one letter and unknown names only within a line and when short: "a<b and c>d" takes no paragraph with it.
_TAG = re.compile(rf"<[/!?]?(?:{_HTML})\b[^<>]*>|<[/!?]?[a-z][^<>\n]{{0,80}}>", _I)
_TAGS = (Rule("tags", _BREAK, "\n", marks=("<",)), Rule("tags", _TAG, marks=("<",)))

_SCHEME = r"(?:https?|ftp|gopher|irc|news|mailto|telnet|nntp)"
_EXTERNAL = Rule(
    "external_links",
    re.compile(rf"\[(?:{_SCHEME}:|//)[^\s\[\]]*[ \t]*((?:[^\[\]\n]|\[\[[^\[\]]*\]\])*)\]", _I),
    r"\1",
    marks=("[",),
)
_END = r"[^\s<>\[\]|]*[^\s<>\[\]|.,;:!?)\"']"  # of an address: not the punctuation after it
_ADDRESS = re.compile(rf"\b(?:[a-z][a-z0-9+.-]{{0,15}}://|https?:(?=\w)|mailto:|www\.(?=\w)){_END}", _I)
_DOMAIN = r"(?:com|org|net|edu|gov|mil|info|co\.[a-z]{2}|ac\.uk)"
_PATH = re.compile(rf"\b[a-z0-9][\w.-]{{0,80}}\.{_DOMAIN}/(?:{_END})?", _I)
_ADDRESSES = (  # with marks of which one is in the text in lower case
    (("://", "http", "mailto:", "www."), Rule("addresses", _ADDRESS)),
    ((".com/", ".org/", ".net/", ".edu/", ".gov/", ".mil/", ".info/", ".uk/", ".co."), Rule("addresses", _PATH)),
)

_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
_LOOSE_LINK = re.compile(r"\[\[((?:[^\[\]]|\[[^\[\]]*\]){0,2000})\]\]")  # the label holds brackets: at 20 [°C]
_OPEN_MEDIA = Rule("media", re.compile(r"\[\[\s*(?:Image|File|Media)\s*:[^\n]*", _I), marks=("[[",))
_MEDIA = re.compile(r"\s*:?\s*(?:Image|File|Media)\s*:", _I)
_CATEGORY = re.compile(r"\s*Category\s*:", _I)
_LANGUAGE = re.compile(
    r"\s*(?:[a-z]{2,3}|simple|zh-[a-z-]+|[a-z]{2,3}-[a-z]{2,8}|roa-[a-z]+|be-x-old|tokipona)\s*:(?!:)"
)
_PREFIX = re.compile(r"^:?(?:[\w -]+:)*")
_SHOWN = re.compile(r"\s*:\s*(?:Category|[a-z]{2,3})\s*:\s*", _I)  # [[:Category:Birds]] is a visible link
_PARENTHESIS = re.compile(r"\s*\([^()]*\)$")

_SECTION = "\x01"  # marks a heading and its level until it is known whether its section has text
_HEADING = re.compile(r"\n[ \t]*(={2,6})[ \t]*([^\n]*?)[ \t]*\1=*[ \t]*|\n[ \t]*(=)[ \t]*([^=\n]*)=[ \t]*(?=\n)")
_INVISIBLE = "\u00ad\u200b-\u200f\u2028-\u202e\u2060\ue000-\uf8ff\ufeff\ufffd-\uffff\x00-\x08\x0b-\x1f\x7f-\x9f"


def _marked_heading(match: re.Match[str]) -> str:
    level, heading = (match[1], match[2]) if match[1] else (match[3], match[4])
    return f"\n{_SECTION}{len(level)}{heading}\n"


_LINES = (  # headings and lists are unwrapped, remains of tables and of other markup removed
    Rule("symbols", re.compile(f"[{_INVISIBLE}{OUTSIDE.pattern[1:-1]}]")),
    Rule("tables", re.compile(r"\n[ \t]*(?:\|[^\n]*|![^\n]*\|[^\n]*|\{\|[^\n]*)"), "\n", marks=("|",)),
    Rule("lists", re.compile(r"__[A-Z]+__|~~~+"), marks=("__", "~~~")),  # magic words, signatures
    Rule("headings", _HEADING, _marked_heading, marks=("=",)),
    Rule("headings", re.compile(r"\n[ \t]*={2,}[ \t]*|[ \t]*={2,}[ \t]*(?=\n)"), "\n", marks=("==",)),
    Rule("lists", re.compile(r"\n[ \t]*[*#:;]+[ \t]*"), "\n"),
    Rule("lists", re.compile(r"\n[ \t]*-{4,}"), "\n", marks=("----",)),
    Rule("emphasis", _QUOTES, marks=("''",)),  # from entities
    Rule("entities", re.compile(r"&(#?\w+);"), r"\1", marks=("&",)),  # unknown ones
    _TAGS[1],
    Rule("spaces", re.compile(r"<(?=[a-zA-Z/!?])"), "< ", marks=("<",)),  # not a tag, but looks like one
    Rule("links", re.compile(r"\[\[|\]\]|\{\{+|\}\}+|\{\||\|\}"), marks=("[[", "]]", "{{", "}}", "{|", "|}")),
)
_ODD_SPACES = re.compile("[\t\u00a0\u2000-\u200a\u202f\u3000]")
_HOLES = (  # what removals leave
    *(Rule("spaces", re.compile(rf" {re.escape(mark)}(?=\s)"), mark, marks=(f" {mark}",)) for mark in ";.:!?"),
    Rule(  # f() is a function
        "spaces",
        re.compile(r"\((?<!\w\()(?:see|see also|sources?|e\.g\.|i\.e\.|cf\.)?[\s,;:]*\.?\)"),
        marks=("(",),
    ),
    Rule("spaces", re.compile(r"\[\s*\]"), marks=("[",)),
    Rule("spaces", re.compile(r"\"\s*\"(?=\s*[,;)])"), marks=('""', '" "')),
    Rule("spaces", re.compile(r"(?<![/\w])//(?![\w/])"), marks=("//",)),  # of a pronunciation
    Rule("spaces", re.compile(r",(?: ?,)+"), ",", marks=(",,", ", ,")),
    Rule("spaces", re.compile(r"\n[*#:;,]+ ?"), "\n"),
)
_NO_WORDS = re.compile(r"\n[ ,;.:()|\"'-]+(?=\n)")


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
    text = _apply(text, stats, _EMPHASIS)
    text = _without_links(text, stats)
    text = _without_tags(text, stats)
    text = _without_addresses(_apply(f"\n{text}\n", stats, *_LINES), stats)
    text = _without_empty_sections(_without_holes(text, stats), stats)
    stats.note("spaces", 0, len(wiki) - len(text) - (sum(stats.removed.values()) - before))
    return text


def _without_hidden(text: str, stats: CleaningStats) -> str:
    """Remove comments, references, formulas, code, galleries and HTML tables."""
    if "<" not in text:
        return text
    text, before = _apply(text, stats, *_HIDDEN), -1
    while stats.tables != before and "<table" in text.lower():
        before = stats.tables
        text = _apply(text, stats, _HTML_TABLE)
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
    text, unwrap = _apply(text, stats, _EXTERNAL), partial(_link_text, stats=stats)
    for _ in range(DEPTH):
        text, count = _LINK.subn(unwrap, text)
        if not count and "[[" in text:
            text, count = _LOOSE_LINK.subn(unwrap, text)
        if not count:
            break
    return _without_addresses(_apply(text, stats, _OPEN_MEDIA, _EXTERNAL), stats)


def _link_text(match: re.Match[str], stats: CleaningStats) -> str:
    kind = _hidden_kind(match[1]) if ":" in match[1] else ""
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
    return _apply(text, stats, *(rule for marks, rule in _ADDRESSES if any(mark in lower for mark in marks)))


def _without_tags(text: str, stats: CleaningStats) -> str:
    """Remove tags and decode entities, also those that were escaped several times."""
    for _ in range(4):
        text = _apply(text, stats, *_TAGS)
        decoded = html.unescape(text)
        if decoded == text:
            break
        stats.note("entities", max(0, text.count("&") - decoded.count("&")), len(text) - len(decoded))
        text = decoded
    return text


def _without_holes(text: str, stats: CleaningStats) -> str:
    """Tidy what removals left: repeated spaces, blank lines and commas, and empty brackets."""
    text = _ODD_SPACES.sub(" ", text)
    for _ in range(4):  # removing an empty bracket may leave another
        before = text
        while "  " in text:
            text = text.replace("  ", " ")
        text = text.replace(" \n", "\n").replace("\n ", "\n").replace(" )", ")").replace("( ", "(").replace(" ,", ",")
        text = text.replace("(, ", "(").replace("(; ", "(").replace("(: ", "(")
        text = _apply(text, stats, *_HOLES)
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
