"""One article: from wiki markup to plain text.

Nothing of the markup stays: no templates, tables, media, references, formulas, code, tags, entities or addresses.
For speed most patterns begin with a character that is rare in prose (a line feed, a bracket), and a plain search tells
first whether an article holds a mark at all.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field

from anisoscope.data.enwik8.symbols import OUTSIDE


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
    entities: int = 0  # decoded
    emphasis: int = 0
    lists: int = 0  # marks of lists, rules and magic words
    headings: int = 0  # unwrapped; those with nothing under them are `empty_headings`
    empty_headings: int = 0
    symbols: int = 0  # invisible ones, and those outside of the vocabulary
    characters_in: int = 0  # of the wiki text of articles
    characters_out: int = 0
    removed: dict[str, int] = field(default_factory=dict)  # characters by kind; with `characters_out` they sum to `_in`

    def note(self, kind: str, count: int, characters: int) -> None:
        """Add to what was removed; `spaces` (white space, and what holes leave) has no count."""
        if kind != "spaces":
            setattr(self, kind, getattr(self, kind) + count)
        self.removed[kind] = self.removed.get(kind, 0) + characters


SENTENCE = 8  # words that make a preformatted line worth keeping
DEPTH = 32  # links inside of links that are followed

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
_LESS = re.compile(r"<(?=[a-zA-Z/!?])")  # no tag, but would look like one

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
_SHOWN = re.compile(r"\s*:\s*(?:Category|[a-z]{2,3})\s*:\s*", _I)  # [[:Category:Birds]] is a link to it
_PARENTHESIS = re.compile(r"\s*\([^()]*\)$")

_HEADING = re.compile(r"\n[ \t]*(={2,6})[ \t]*([^\n]*?)[ \t]*\1=*[ \t]*|\n[ \t]*(=)[ \t]*([^=\n]*)=[ \t]*(?=\n)")
_HALF_HEADING = re.compile(r"\n[ \t]*={2,}[ \t]*|[ \t]*={2,}[ \t]*(?=\n)")
_BULLET = re.compile(r"\n[ \t]*[*#:;]+[ \t]*")
_LEADING = re.compile(r"\n[*#:;,]+ ?")  # the same when removals have brought it, or a comma, to the beginning
_RULE = re.compile(r"\n[ \t]*-{4,}")
_TABLE_LINE = re.compile(r"\n[ \t]*(?:\|[^\n]*|![^\n]*\|[^\n]*|\{\|[^\n]*)")
_NAMELESS = re.compile(r"&(#?\w+);")  # looks like an entity, is none
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
_SECTION = "\x01"  # marks a heading, with its level, until it is known whether anything stands under it


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
    """Marks of emphasis; four quotes are three of them and an apostrophe."""
    return "'" if len(match.group()) == 4 else ""


# -- what is not text --------------------------------------------------------------------------------------------------


def _without_hidden(text: str, stats: CleaningStats) -> str:
    """Comments, references, formulas, code, galleries and HTML tables."""
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
    """Templates {{…}} and tables {|…|}, nested in each other to any depth; one pass, linear in the text."""
    opened: list[tuple[str, int]] = []  # kind, and where its opening stands
    closed: list[tuple[int, int, str]] = []
    for match in _NESTING.finditer(text):
        token, begin = match.group(), match.start()
        if "|" in token:
            begin = _line_start(text, begin)
            if begin < 0 or (token == "|}" and text[begin : match.start()].strip(" \t")):
                continue  # only at the beginning of a line does a bar belong to a table
        if token in ("{{", "{|"):
            opened.append((token, begin))
        elif (partner := _partner(token, opened)) is not None:
            kind = "templates" if opened[partner][0] == "{{" else "tables"
            closed.append((opened[partner][1], match.end(), kind))
            del opened[partner:]
            stats.note(kind, 1, 0)
    return _cut(text, sorted(closed), stats)


def _line_start(text: str, place: int) -> int:
    """Where the line of `place` begins when only spaces and marks of lists stand before it, else −1."""
    begin = place
    while begin and text[begin - 1] in _INDENT:
        begin -= 1
    return begin if begin == 0 or text[begin - 1] == "\n" else -1


def _partner(token: str, opened: list[tuple[str, int]]) -> int | None:
    """The innermost opening that a closing token belongs to."""
    wanted = "{{" if token == "}}" else "{|"
    return next((i for i in range(len(opened) - 1, -1, -1) if opened[i][0] == wanted), None)


def _cut(text: str, spans: list[tuple[int, int, str]], stats: CleaningStats) -> str:
    """The text without some spans, which may lie inside each other."""
    kept, start = [], 0
    for begin, end, kind in spans:
        if begin >= start:
            kept.append(text[start:begin])
            stats.note(kind, 0, end - begin)
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
            stats.note("preformatted", 1, len(line) + 1)
        else:
            kept.append(line)
    if not kept:
        stats.removed["preformatted"] -= 1  # as many line feeds as there were
    return "\n".join(kept)


# -- links -------------------------------------------------------------------------------------------------------------


def _without_links(text: str, stats: CleaningStats) -> str:
    """Links become their labels, from the inside out; media, categories and other languages disappear."""
    if "[" in text:
        text = _drop(text, _EXTERNAL, "external_links", stats, by=r"\1")
        for _ in range(DEPTH):
            text, found = _unwrapped(text, stats)
            if not found:
                text, found = _unwrapped_loosely(text, stats)
            if not found:
                break
        text = _drop(text, _OPEN_MEDIA, "media", stats) if "[[" in text else text
        text = _drop(text, _EXTERNAL, "external_links", stats, by=r"\1")
    return _without_addresses(text, stats)


def _unwrapped(text: str, stats: CleaningStats) -> tuple[str, bool]:
    """All links without brackets inside; whether there was one."""
    if "[[" not in text:
        return text, False
    first, *pieces = text.split("[[")
    kept, found, hidden, size = [first], 0, 0, 0
    for piece in pieces:
        body, closed, rest = piece.partition("]]")
        inner = body.lstrip("[")
        if not closed or "[" in inner or "]" in inner:
            kept += "[[", piece
            continue
        found += 1
        kept.append(body[: len(body) - len(inner)])
        if ":" in inner and (kind := _hidden_kind(inner)):
            stats.note(kind, 1, len(inner) + 4)
            hidden, size = hidden + 1, size + len(inner) + 4
            kept.append(rest)
        else:
            kept += _label(inner), rest
    joined = "".join(kept)
    stats.note("links", found - hidden, len(text) - len(joined) - size)
    return joined, found > 0


def _unwrapped_loosely(text: str, stats: CleaningStats) -> tuple[str, bool]:
    """Links whose label holds single brackets: [[Image:a.jpg|at 20 [°C]]]."""

    def unwrap(match: re.Match[str]) -> str:
        kind = _hidden_kind(match[1])
        label = "" if kind else _label(match[1])
        stats.note(kind or "links", 1, len(match.group()) - len(label))
        return label

    text, count = _LOOSE_LINK.subn(unwrap, text) if "[[" in text else (text, 0)
    return text, count > 0


def _hidden_kind(body: str) -> str:
    """The kind of a link of which nothing is shown in the text, else ""."""
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


# -- what is left of the marks -----------------------------------------------------------------------------------------


def _without_tags(text: str, stats: CleaningStats) -> str:
    """Tags and entities, also those that were escaped twice or more."""
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
    """Clean headings, lists and remains of tables; then white space and the gaps that removals leave."""
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
    level, words = (match[1], match[2]) if match[1] else (match[3], match[4])
    return f"\n{_SECTION}{len(level)}{words}\n"


def _without_holes(text: str) -> str:
    """Single spaces, at most one blank line, no empty brackets, no repeated commas."""
    text = _ODD_SPACES.sub(" ", text)
    for _ in range(4):  # a hole may be filled with holes
        before = text
        text = _without_spaces(text)
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


def _without_spaces(text: str) -> str:
    while "  " in text:
        text = text.replace("  ", " ")
    text = text.replace(" \n", "\n").replace("\n ", "\n").replace(" )", ")").replace("( ", "(").replace(" ,", ",")
    for opening in ("(, ", "(; ", "(: "):
        text = text.replace(opening, "(")
    for found, pattern, mark in _BEFORE:
        text = pattern.sub(mark, text) if found in text else text
    return text


def _without_empty_sections(text: str, stats: CleaningStats) -> str:
    """Put headings on lines of their own; drop those without text before the next heading of the same level."""
    first, *sections = text.split(_SECTION)
    kept: list[str] = []
    below = 0  # level of the section kept last, which comes after this one
    for section in reversed(sections):
        level = int(section[0])
        words, _, body = section[1:].partition("\n")
        body = body.strip()
        if not body and below <= level:
            stats.empty_headings += 1
            continue
        kept.append("\n\n".join(filter(None, (words.strip(), body))))
        below = level
    return "\n\n".join(filter(None, (first.strip(), *reversed(kept))))
