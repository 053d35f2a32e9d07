"""A page of docs/ that no list of the index names stands at the end of the navigation, instead of nowhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LIST = re.compile(r"^```\{toctree\}\n(.*?)^```", re.DOTALL | re.MULTILINE)


def add_further(app: Any, docname: str, source: list[str]) -> None:
    """Append a list of the pages that the index does not name."""
    if docname != "index":
        return
    named = {line.strip() for block in LIST.findall(source[0]) for line in block.splitlines()}
    further = sorted(page.stem for page in Path(app.srcdir).glob("*.md") if page.stem not in {"index", *named})
    if further:
        lines = ["", "```{toctree}", ":hidden:", ":caption: Further pages", "", *further, "```", ""]
        source[0] += "\n".join(lines)


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", add_further)
    return {"parallel_read_safe": True}
