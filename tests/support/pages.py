"""A page read back: its text, its numbers, and what it would fetch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from anisoscope.view.document import unpacked
from anisoscope.view.figure import Figure
from anisoscope.view.matplotlib_renderer import write_figures


class Page(HTMLParser):
    """What a browser would see: elements with their attributes, and text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: dict[str, str] = {}
        self._inside: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.elements.append((tag, found))
        self._inside = found.get("id") or tag if tag in ("script", "style") else self._inside
        self.text += str(found.get("label") or "") if tag == "option" else ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = None if tag in ("script", "style") else self._inside

    def handle_data(self, data: str) -> None:
        if self._inside is None:
            self.text += data
        else:
            self.scripts[self._inside] = self.scripts.get(self._inside, "") + data

    def fetched(self) -> list[str]:
        """Addresses the page would load or lead away to."""
        names = ("src", "href", "srcset", "action", "poster")
        found = [v for _, attrs in self.elements for n, v in attrs.items() if n in names and v]
        return [v for v in found if not v.startswith(("#", "data:", "figures/"))]

    @cached_property
    def data(self) -> dict[str, Any]:
        """What the page carries for its scripts: figures, arrays, table, cards."""
        return unpacked(self.scripts["data"])

    def specs(self) -> dict[str, Any]:
        return self.data["specs"]


def page_of(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


Meanwhile = Callable[[Sequence[Path]], object]


def no_figures(folder: Path, figures: Iterable[Figure], chosen: Mapping[str, int], *, meanwhile: Meanwhile) -> None:
    meanwhile([])


@contextmanager
def pages_alone() -> Iterator[None]:
    """Pages are written without their vector figures, which are nine tenths of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anisoscope.view.report.write_figures", no_figures)
        yield


@contextmanager
def figures_too(*only: str) -> Iterator[None]:
    """Inside of `pages_alone`: figures are written, as for a user, or those with a file of some name."""

    def write(folder: Path, figures: Iterable[Figure], chosen: Mapping[str, int], *, meanwhile: Meanwhile) -> None:
        wanted = [figure for figure in figures if not only or set(only) & set(figure.files)]
        write_figures(folder, wanted, chosen, meanwhile=meanwhile)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anisoscope.view.report.write_figures", write)
        yield


@contextmanager
def figures_once(*only: str) -> Iterator[None]:
    """Inside of `pages_alone`: every figure is laid out and drawn, as SVG; the PDF, as dear again, is left empty."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    def save(drawing: Any, paths: list[Path]) -> None:
        pdf, svg = paths
        pdf.touch()
        FigureCanvasSVG(drawing).print_svg(svg)

    with figures_too(*only), pytest.MonkeyPatch.context() as patch:
        patch.setattr("anisoscope.view.matplotlib_renderer._save", save)
        yield


@contextmanager
def figure_names() -> Iterator[None]:
    """Inside of `pages_alone`: the files of figures have their names and are empty."""

    def touch(_: None, paths: list[Path]) -> None:
        for path in paths:
            path.touch()

    with figures_too(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("anisoscope.view.matplotlib_renderer.draw", lambda *_: None)
        patch.setattr("anisoscope.view.matplotlib_renderer._save", touch)
        yield
