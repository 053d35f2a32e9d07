"""Pages of studies whose figures are drawn by matplotlib: opened, drawn in the page's colours, written; complete."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anisoscope.errors import AnisoscopeError
from anisoscope.results.folder import RunFolder, replace_file
from anisoscope.view.figures import RULES
from anisoscope.view.palette import LIGHT
from anisoscope.view.report import TEMPLATES, environment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, SOFT, RULE = "#1d1b18", "#625d55", "#ddd7ca"  # the page's own, so that it can put its dark ones in their place
STYLE: dict[str, Any] = {
    **RULES,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
}
# colours of paper and the page's names for them, so that the page can be dark
ROLES = {INK: "--ink", SOFT: "--soft", RULE: "--rule", "#ffffff": "--paper", "#000000": "--ink"}
ROLES |= {hue: f"--s{i + 1}" for i, hue in enumerate(LIGHT)}


def open_study(folder: str | Path, study: str) -> RunFolder:
    """The folder of a finished study of this name, or a sentence about what it is instead."""
    run = RunFolder.open(folder)
    about = run.about()
    if about.get("study") != study or about.get("status") != "complete":
        raise AnisoscopeError(
            f"{str(folder)!r} holds no finished {study} study (study: {about.get('study')!r}, "
            f"status: {about.get('status')!r}); give the folder that `anisoscope study {study}` wrote."
        )
    return run


def verdicts_of(run: RunFolder) -> list[dict[str, Any]]:
    """What the study judged."""
    path = run.path / "verdicts.json"
    try:
        return list(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise AnisoscopeError(f"{str(path)!r} cannot be read ({error}); run the study again.") from error


def write_page(run: RunFolder, template: str, context: Mapping[str, Any]) -> Path:
    """Write `report.html`: styles and figures inside, no script library."""
    from markupsafe import Markup

    css = "".join((TEMPLATES / f"{name}.css").read_text(encoding="utf-8") for name in ("report", "training"))
    page = environment().get_template(template).render(context, css=Markup(css))
    target = run.path / "report.html"
    replace_file(target, lambda p: p.write_text(page, encoding="utf-8"))
    return target


def save_drawing(figure: Figure, stem: Path) -> str:
    """Write a figure as PDF and SVG; the markup of the SVG.

    Each by its own canvas: `savefig` draws a figure that has a layout twice.
    """
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    def write_pdf(path: Path) -> None:
        FigureCanvasPdf(figure).print_pdf(path, metadata={"CreationDate": None})

    def write_svg(path: Path) -> None:
        FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})

    replace_file(stem.with_name(stem.name + ".pdf"), write_pdf)
    figure.set_layout_engine("none")  # the places are found: finding them again takes longer than drawing
    replace_file(stem.with_name(stem.name + ".svg"), write_svg)
    return stem.with_name(stem.name + ".svg").read_text(encoding="utf-8")


def write_drawings(
    folder: Path, figures: Mapping[str, Callable[[Any], Figure]], data: Any, *, named: str, of: str = ""
) -> dict[str, dict[str, Any]]:
    """Draw every figure of some data into files NAMED-FIGURE[-OF]; for the page, each one's file and markup."""
    import matplotlib
    from markupsafe import Markup

    drawings = {}
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type, unused-ignore]
        for name, draw in figures.items():
            stem = "-".join(filter(None, (named, name, of)))
            markup = inline_svg(save_drawing(draw(data), folder / stem), prefix=stem, colours=ROLES)
            drawings[name] = {"file": f"figures/{stem}", "svg": Markup(markup)}
    return drawings


def inline_svg(text: str, *, prefix: str, colours: Mapping[str, str]) -> str:
    """An SVG file as an element: no size of its own, names that cannot clash with another's, colours by role.

    >>> made = '<?xml?><svg width="9" height="9"><g id="a" style="fill: #FFF000"/></svg>'
    >>> inline_svg(made, prefix="p", colours={"#fff000": "--s1"})
    '<svg><g id="p-a" style="fill: var(--s1)"/></svg>'
    """
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    for hue, role in colours.items():
        text = re.sub(rf"{hue}\b", f"var({role})", text, flags=re.IGNORECASE)
    return text
