"""A link that shows the name of a file, as GitHub readers expect (`[tangent.md](tangent.md)`), shows the title here."""

from __future__ import annotations

import posixpath
import re
from typing import Any

from docutils import nodes

FILE = re.compile(r"^[\w./-]+\.(md|ipynb)$")


def show_titles(app: Any, doctree: nodes.document, docname: str) -> None:
    """Replace names of files by titles of pages, in links inside the site."""
    for link in doctree.findall(nodes.reference):
        address = str(link.get("refuri", "")).partition("#")[0]
        if not FILE.match(link.astext()) or not address.endswith(".html"):
            continue
        page = posixpath.normpath(posixpath.join(posixpath.dirname(docname), address)).removesuffix(".html")
        if page in app.env.titles:
            link.children = [nodes.Text(app.env.titles[page].astext())]


def setup(app: Any) -> dict[str, bool]:
    app.connect("doctree-resolved", show_titles)
    return {"parallel_read_safe": True}
