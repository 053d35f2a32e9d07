"""`anisoscope push`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anisoscope.commands.card import PICTURE
from anisoscope.errors import AnisoscopeError

if TYPE_CHECKING:
    from anisoscope.integrations.hub import ResultDataset
    from anisoscope.results.folder import RunFolder

_SAME = ("started", "seed", "kind", "study")  # entries of run.json by which a run is known again


def push(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="hub:ORGANISATION/DATASET, or a folder of the same form.")
    ],
    name: Annotated[
        str | None, typer.Option(help="Name of the run in the dataset; default: that of its folder.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="A new dataset of the hub is private.")] = False,
) -> None:
    """Publish runs as a dataset that `Table.read` opens: tables, verdicts, records, pages; no path in it."""
    from anisoscope.integrations.hub import HUB
    from anisoscope.option import refuse_typed
    from anisoscope.results.folder import readable_runs
    from anisoscope.view.terminal.screen import print_line

    if private and not target.startswith(HUB):
        refuse_typed(["private"], "for a folder")
    with readable_runs(*runs):
        print_line(push_runs(runs, target, name=name, private=private))


def push_runs(runs: Sequence[Path], target: str, *, name: str | None = None, private: bool = False) -> str:
    """Write runs into a dataset, one folder each, in place of what it holds of them; returns where that is."""
    from anisoscope.commands.drawing import open_runs
    from anisoscope.integrations.hub import HUB, dataset_at, reached

    folders, dataset = _named(open_runs(runs), name), dataset_at(target)
    try:
        _refuse_others(folders, dataset)
        with tempfile.TemporaryDirectory() as place:
            tree = Path(place)
            write_tree(folders, tree, dataset, where=target if target.startswith(HUB) else ".")
            return dataset.put(tree, folders, private=private)
    except AnisoscopeError:
        raise
    except Exception as error:
        if not target.startswith(HUB):
            raise
        raise reached(target, error) from error


def _named(folders: Sequence[RunFolder], name: str | None) -> dict[str, RunFolder]:
    """The runs by their names in the dataset."""
    from anisoscope.results.folder import slug

    if name is not None and len(folders) > 1:
        raise AnisoscopeError(
            f"--name is for one run, and these are {len(folders)}; push them one by one, or leave it out."
        )
    if name is not None and (slug(name) != name or name == "default"):
        raise AnisoscopeError(f"--name is {name!r}; expected letters, digits, '.', '_' and '-', and not 'default'.")
    found: dict[str, RunFolder] = {}
    for folder in folders:
        called = name or slug(folder.path.resolve().name)
        called = f"{called}-run" if called == "default" else called
        if called in found:
            raise AnisoscopeError(f"two runs are called {called!r}; push them one by one, one with --name.")
        found[called] = folder
    return found


def _refuse_others(folders: Mapping[str, RunFolder], dataset: ResultDataset) -> None:
    """Raise an error if the dataset holds another run under a name: nothing is overwritten but the run itself."""
    for called, folder in folders.items():
        try:
            there = json.loads(dataset.read(f"{called}/run.json") or b"null")
        except ValueError:
            there = {}
        mine = folder.about()
        if there is not None and any(_entry(there, key) != _entry(mine, key) for key in _SAME):
            raise AnisoscopeError(f"the dataset holds another run called {called!r}; give yours another --name.")


def _entry(about: Any, key: str) -> Any:
    return about.get(key) if isinstance(about, dict) else None


def write_tree(folders: Mapping[str, RunFolder], tree: Path, dataset: ResultDataset, *, where: str) -> None:
    """Write what is pushed: a folder for each run, and the README of a dataset that then holds these runs, too.

    `where` is how the README says to read it.
    """
    from anisoscope.commands.card import card_section
    from anisoscope.commands.drawing import share_runs
    from anisoscope.results.folder import RunFolder
    from anisoscope.view.sections.card import dataset_card

    sections = {}
    for called, folder in folders.items():
        share_runs([folder.path], tree / called)
        shown = RunFolder.open(tree / called)
        section = card_section(shown, shown.path / PICTURE, link=f"{called}/{PICTURE}", level=3)
        sections[called] = f"## {called}\n\n{section}"
    before = (dataset.read("README.md") or b"").decode("utf-8", "replace")
    text = dataset_card(before, sections, runs={*dataset.runs(), *folders}, where=where)
    (tree / "README.md").write_text(text, encoding="utf-8")
