"""Paragraphs of the repository's README that tell what a picture of the gallery shows, with the numbers of now.

A picture's paragraph stands beside it, in its section: after the picture at the top of the page, before it in a section
that ends with a link to the result.
"""

from __future__ import annotations

import re

LINK = re.compile(r"^.*(?= \[How it was made\]\(docs/results/([a-z]+)/README\.md\)$)", re.MULTILINE)
PICTURE = re.compile(r'src="docs/figures/gallery/([a-z-]+)\.svg"')  # not that of the dark theme


def front_page(text: str) -> str:
    """README.md with what the tables say now."""
    from gallery import PICTURES

    told = {picture.name: picture.tell for picture in PICTURES}
    parts = re.split(r"(?=^#)", text, flags=re.MULTILINE)
    return "".join(_section(part, told) for part in parts)


def _section(part: str, told: dict[str, object]) -> str:
    found = PICTURE.search(part)
    if found is None or found[1] not in told:
        return part
    words = str(told[found[1]]())  # type: ignore[operator]
    if LINK.search(part):
        return LINK.sub(lambda _: words, part, count=1)
    before, end, after = part.partition("</picture>\n\n")
    return f"{before}{end}{words}{after[after.index(chr(10)) :]}"
