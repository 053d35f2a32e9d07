"""What the commands about data show: progress, what was kept and removed, and the folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable

from anisoscope.view.console import _terminated_as_interrupt, console, errors, progress_bars

_NAMES = {
    "comments": "comments",
    "references": "references",
    "formulas": "formulas",
    "code": "code",
    "preformatted": "preformatted lines",
    "templates": "templates",
    "tables": "tables",
    "media": "images and media",
    "categories": "categories",
    "interlanguage": "links to other languages",
    "links": "brackets and targets of links (the label stays)",
    "external_links": "addresses of links (the label stays)",
    "addresses": "bare addresses",
    "tags": "HTML tags",
    "entities": "entities (decoded)",
    "emphasis": "marks of emphasis",
    "lists": "marks of lists, rules",
    "headings": "marks of headings",
    "symbols": "invisible characters, and those outside of the 205",
    "spaces": "white space, empty headings and brackets",
}


def run_enwik8(path: str, *, out: Path, limit: float | None) -> None:
    """Prepare enwik8 and say what came out."""
    from anisoscope.data.enwik8.folder import prepare_enwik8

    with _terminated_as_interrupt(), progress_bars() as tell:
        prepared = prepare_enwik8(path, out, limit=limit, progress=tell)
    if not prepared.made:
        errors.print(f"{out} was made of the same before; nothing was done again.", style="yellow", highlight=False)
    print_prepared(prepared.stats)
    console.print(str(prepared.path), soft_wrap=True, highlight=False)


def print_prepared(stats: Mapping[str, Any]) -> None:
    """What was read, kept and removed, in a few lines that explain themselves."""
    raw, cleaning, kept = stats["raw"], stats["cleaning"], stats["kept"]
    if raw is not None:
        _line(f"read: {raw['bytes']:,} bytes; {stats['note']}", style="green" if raw["is_enwik8"] else "yellow")
        _print_removed(cleaning)
    else:
        _line(f"source: the embedded corpus; {stats['note']}")
    _line(f"kept: {kept['articles']:,} articles, {kept['characters']:,} characters ({kept['bytes']:,} bytes of UTF-8)")
    if cleaning is not None:
        whole = kept["bytes"] / max(1, raw["bytes"])
        _line(f"that is {cleaning['kept_share']:.1%} of the characters of the articles, {whole:.1%} of all bytes read")
    _line(f"symbols: {kept['symbols_used']} of the 205 of enwik8 are used; ids are 0 to 204 in any case")
    _line(f"fingerprint (SHA-256 of enwik8.txt): {kept['sha256']}")
    if raw is not None and raw.get("as_expected") is False:
        _line("note: the true enwik8 should give another fingerprint; please report this.", style="red")
    _line(f"{stats['seconds']:.0f} s")


def _print_removed(cleaning: Mapping[str, Any]) -> None:
    pages = cleaning["pages"]
    words = f"{pages['redirects']:,} redirects, {pages['other_namespaces']:,} pages that are no articles"
    _line(f"pages: {pages['pages']:,}, without {words}, {pages['empty']:,} empty and {pages['truncated']:,} cut off")
    table = RichTable(header_style="bold", title="removed from the articles", title_justify="left")
    table.add_column("what")
    table.add_column("how many", justify="right")
    table.add_column("characters", justify="right")
    table.add_column("share", justify="right")
    total = max(1, cleaning["characters_in"])
    for kind, figures in sorted(cleaning["removed"].items(), key=lambda item: -item[1]["characters"]):
        count = "" if figures["count"] is None else f"{figures['count']:,}"
        size = figures["characters"]
        table.add_row(_NAMES.get(kind, kind), count, f"{size:,}", f"{size / total:.2%}")
    console.print(table)


def _line(words: str, *, style: str | None = None) -> None:
    console.print(words, style=style, highlight=False, soft_wrap=True)
