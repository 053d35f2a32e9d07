"""`anisoscope card`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anisoscope.errors import AnisoscopeError

if TYPE_CHECKING:
    from anisoscope.results.folder import RunFolder

PICTURE = "card.png"  # the figure of a card, beside it
MARK = "card"


def card(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="A Markdown file, such as README.md, in which the section is added or replaced; default: RUN/card.md."
        ),
    ] = None,
) -> None:
    """Write a section for a model card: the finding, a figure, numbers with intervals, verdicts, how to cite."""
    from anisoscope.results.folder import RunFolder, readable_runs
    from anisoscope.view.console import print_state
    from anisoscope.view.terminal.screen import print_path

    with readable_runs(run):
        folder = RunFolder.open(run)
        print_state(folder.path)
        print_path(write_card(folder, out))


def write_card(folder: RunFolder, out: Path | None = None) -> Path:
    """Write the card of a run into its folder, or into a Markdown file between two comments; returns its path."""
    from anisoscope.results.folder import replace_file
    from anisoscope.view.sections.card import placed

    path = folder.path / "card.md" if out is None else out
    if path.is_dir() or (out is not None and path.suffix.lower() not in (".md", ".markdown", ".qmd", ".txt")):
        raise AnisoscopeError(f"--out is {str(path)!r}; expected a Markdown file, such as README.md.")
    try:
        before = path.read_text(encoding="utf-8") if path.is_file() else ""
    except UnicodeDecodeError as error:
        raise AnisoscopeError(f"{str(path)!r} is no text in UTF-8; give another --out.") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = PICTURE if out is None else f"{path.stem}-geometry.png"
    text = placed(before, card_section(folder, path.parent / picture), MARK)
    replace_file(path, lambda draft: draft.write_text(text, encoding="utf-8"))
    return path


def card_section(folder: RunFolder, picture: Path, *, link: str = "", level: int = 2) -> str:
    """The section of a run, whose figure is drawn into the file `picture` and linked by its name, or as `link`."""
    from anisoscope.claims.catalogue import papers
    from anisoscope.commands.drawing import page_of_runs
    from anisoscope.metrics.catalogue import registry
    from anisoscope.results.folder import replace_file
    from anisoscope.view.matplotlib_renderer import write_png
    from anisoscope.view.sections.card import CardSubject, card_text
    from anisoscope.view.words import Catalogue

    page = page_of_runs([folder])
    if page.hero is not None:
        hero, chosen = page.hero.figure, page.chosen()
        replace_file(picture, lambda draft: write_png(hero, chosen, draft))
    subject = CardSubject(page, folder.table(), Catalogue(registry()), papers())
    return card_text(subject, (link or picture.name) if page.hero is not None else "", level=level)
