"""An image that has a dark twin beside it (`x.svg`, `x-dark.svg`) is shown in the one that fits the theme.

Pages name the light one alone, so that they read the same on GitHub.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes


def show_twins(app: Any, doctree: nodes.document) -> None:
    """Put the dark twin after every image that has one; furo shows one of the two."""
    folder = Path(app.env.doc2path(app.env.docname)).parent
    for image in list(doctree.findall(nodes.image)):
        light = Path(image["uri"])
        twin = light.with_name(f"{light.stem}-dark{light.suffix}")
        if (folder / twin).is_file() and "only-light" not in image["classes"]:
            dark = image.deepcopy()
            image["classes"].append("only-light")
            dark["classes"].append("only-dark")
            dark["uri"] = str(twin)
            image.parent.insert(image.parent.index(image) + 1, dark)


def setup(app: Any) -> dict[str, bool]:
    app.connect("doctree-read", show_twins, priority=100)  # before Sphinx collects the files of images
    return {"parallel_read_safe": True}
