"""Docstrings are plain text with `code` in backticks; this makes reStructuredText of them for autodoc.

Words between single backticks become literal; |, single * and trailing _ outside of them mean themselves. Indented
blocks are shown as they are, and so are doctests. A line that begins with `code` after a full stop, as docstrings tell
their arguments, begins a paragraph.
"""

from __future__ import annotations

import re
from typing import Any

CODE = re.compile(r"(``?[^`\n]+``?)")
STRESSED = re.compile(r"(?<![\w*])\*\w[^*\n]*\w\*(?![\w*])")


def plain_line(line: str) -> str:
    """One line of prose as reStructuredText."""
    parts = CODE.split(line)
    return "".join(f"``{part.strip('`')}``" if i % 2 else _escaped(part) for i, part in enumerate(parts))


def _escaped(text: str) -> str:
    kept = STRESSED.findall(text)
    plain = [re.sub(r"(?<!\\)([*|])", r"\\\1", part) for part in STRESSED.split(text)]
    text = "".join(part for pair in zip(plain, [*kept, ""], strict=True) for part in pair)
    return re.sub(r"(\w)_(?=\W|$)", r"\1\\_", text)


def rewrite(lines: list[str]) -> list[str]:
    """A docstring as reStructuredText: prose escaped, examples and indented blocks as literal blocks."""
    found: list[str] = []
    block = False
    for i, line in enumerate(lines):
        indented = line.startswith("    ")
        if indented and not block and not (found and found[-1].strip()):
            found += ["::", ""]
        block = indented or (block and not line.strip())
        if line.startswith("`") and found and found[-1].rstrip().endswith("."):
            found.append("")
        found.append(line if indented or line.startswith(">>>") or _in_example(lines, i) else plain_line(line))
    return found


def _in_example(lines: list[str], at: int) -> bool:
    """Whether a line is the output of a doctest: no empty line since its `>>>`."""
    while at >= 0 and lines[at].strip():
        if lines[at].startswith(">>>"):
            return True
        at -= 1
    return False


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = rewrite(lines)


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True}
