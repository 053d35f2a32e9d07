"""Links of pages to files of the repository work in the site, too.

`[a](../src/anisoscope/cli.py)` or `[page](report.html)` leads to the file on GitHub. For the site such a file is copied
into it: files under docs/ to the same place, others under `files/`, where source is a text that browsers show. A folder
becomes its README where it has one, else plain words.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import download_reference, pending_xref

SHOWN = {".html", ".pdf", ".svg", ".png", ".json", ".parquet", ".txt"}  # copied under their own names
URL = re.compile(r"[a-z]+:|#")


def place(app: Any, path: Path) -> str:
    """Where the file lies in the site, as a path from its root; remembered, so that it is copied there."""
    docs, root = Path(app.srcdir), Path(app.srcdir).parent
    inside = path.is_relative_to(docs)
    name = path.relative_to(docs).as_posix() if inside else f"files/{path.relative_to(root).as_posix()}"
    name = name if path.suffix in SHOWN else f"{name}.txt"
    app.env.repository_files = {**getattr(app.env, "repository_files", {}), name: str(path)}
    return name


def lead_to_files(app: Any, doctree: nodes.document) -> None:
    """Turn links to files into links to their copies, before Sphinx looks for pages of these names."""
    page = Path(app.env.doc2path(app.env.docname))
    for link in [*doctree.findall(pending_xref), *doctree.findall(download_reference)]:
        target = str(link.get("reftarget", ""))
        path = _file(page.parent / target.partition("#")[0])
        if not target or URL.match(target) or not path.exists() or not path.is_relative_to(Path(app.srcdir).parent):
            continue
        if path.is_dir():
            _lead_to_folder(app, link, path)
        elif path.suffix not in (".md", ".ipynb") or not path.is_relative_to(Path(app.srcdir)):
            here = posixpath.dirname(app.env.docname)
            address = posixpath.relpath(place(app, path), here or ".")
            words = [child.deepcopy() for child in link.children] or [nodes.Text(target)]
            link.replace_self(nodes.reference("", "", *words, refuri=address, internal=True))


def _file(path: Path) -> Path:
    """The file that is meant; MyST leaves the ending of Markdown out."""
    markdown = path.with_name(f"{path.name}.md")
    return (markdown if not path.exists() and markdown.is_file() else path).resolve()


def _lead_to_folder(app: Any, link: nodes.Element, folder: Path) -> None:
    readme = folder / "README.md"
    words = [child.deepcopy() for child in link.children]
    if not readme.is_file():
        link.replace_self(words or [nodes.Text(folder.name)])
        return
    here = posixpath.dirname(app.env.docname)
    name = readme.relative_to(app.srcdir).with_suffix(".html").as_posix()
    link.replace_self(nodes.reference("", "", *words, refuri=posixpath.relpath(name, here or "."), internal=True))


def copy_files(app: Any, error: Exception | None) -> None:
    """Copy what pages link to into the finished site."""
    if error is None and app.builder.format == "html":
        for name, source in getattr(app.env, "repository_files", {}).items():
            target = Path(app.outdir) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def setup(app: Any) -> dict[str, bool]:
    app.connect("doctree-read", lead_to_files, priority=100)
    app.connect("build-finished", copy_files)
    return {"parallel_read_safe": False}
