"""A server for run folders: what it lists and draws, and the process that answers."""

from __future__ import annotations

import errno
import importlib
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from anisoscope.claims.catalogue import claims
from anisoscope.errors import AnisoscopeError
from anisoscope.results.folder import MappedSite, RunFolder, readable_runs
from anisoscope.results.privacy import placeless
from anisoscope.results.query import Table
from anisoscope.results.state import record_of, run_state
from anisoscope.serve.brief import LARGE, brief_table, read_without
from anisoscope.serve.drawn import Drawn
from anisoscope.serve.server import MOST_TOGETHER, application
from anisoscope.serve.shelf import Shelf
from anisoscope.view.document import page_data, page_document, runs_document
from anisoscope.view.page import Page, Prose

DRAWING = "anisoscope.commands.drawing"  # which draws pages; it is above this room
LOCAL = ("127.0.0.1", "localhost", "[::1]")
BYTES = 60  # of a row of a table on disk, about


def serve_runs(
    runs: Sequence[Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8642,
    names: Sequence[str] = (),
    ready: Callable[[str, int], None] = lambda link, number: None,
) -> None:
    """Answer requests until the process is interrupted; `ready` is told the link and the number of runs."""
    import uvicorn

    shelf, token = Shelf(runs), secrets.token_urlsafe(24)
    shown = f"[{host}]" if ":" in host else host  # as a link and a Host header write it
    hosts = [*LOCAL, shown, *filter(None, (name.strip() for name in names))]
    listening = _listen(host, port)
    app = application(
        shelf, pages_of(shelf), listed=lambda: listed(shelf), front=lambda: front(shelf), token=token, hosts=hosts
    )
    ready(f"http://{shown}:{listening.getsockname()[1]}/?token={token}", len(shelf.runs()))
    threading.Thread(target=importlib.import_module, args=(DRAWING,), daemon=True).start()  # takes a second or two
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, server_header=False
    )
    uvicorn.Server(settings).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AnisoscopeError(f"port {port} is in use; give another with --port, or --port 0 for any.") from error
        raise AnisoscopeError(
            f"cannot listen on {host!r}, port {port} ({error.strerror or error}); give another --host."
        ) from error


# -- what the server draws ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BriefFolder(RunFolder):
    """A run of which only a small part of the table is read, and no arrays."""

    def table(self) -> Table:
        path, about = self.path / "table.parquet", self.about()
        if about.get("status") == "complete" and path.is_file():
            return brief_table(Table(read_without(path, "replicates"), about))
        return brief_table(super().table())

    def arrays(self, name: str) -> dict[str, Any]:
        return {}

    def row_map(self) -> list[MappedSite]:
        return []


@dataclass(frozen=True)
class LivePage:
    """A page for a browser that listens for changes, and for a notebook."""

    page: Page

    def document(self, version: str = "") -> str:
        return page_document(self.page, claims=claims(), live=version)

    @cached_property
    def _data(self) -> dict[str, Any]:
        return page_data(self.page, claims=claims())

    def data(self) -> dict[str, Any]:
        return self._data


def draw_page(folders: Sequence[Path], brief: bool) -> LivePage:
    """The page of some runs; of a run that has nothing to show, a page that says so."""
    kind = BriefFolder if brief else RunFolder
    try:
        with readable_runs(*folders):
            page_of_runs = importlib.import_module(DRAWING).page_of_runs
            page = page_of_runs([kind.open(folder) for folder in folders], judge=not brief)
    except AnisoscopeError as error:
        words = f"{', '.join(folder.name for folder in folders)}: nothing to show"
        return LivePage(Page(words, words, [], deck=_placeless(error)))
    if brief:
        first = Prose("A first look at a large run: its main quantities. The whole page follows in a moment.", "brief")
        page = replace(page, notes=[first, *page.notes])
    return LivePage(page)


def _placeless(error: AnisoscopeError) -> str:
    """The words of an error without the places of this machine."""
    return str(placeless(str(error)))


def is_large(folder: Path) -> bool:
    """Whether a run's table is too large to be drawn at once; told from the sizes of files alone."""
    try:
        return int(pq.read_metadata(folder / "table.parquet").num_rows) > LARGE
    except (OSError, ValueError):
        parts = [*folder.glob("parts/*.parquet"), *folder.glob("arms/*/parts/*.parquet")]
        return sum(path.stat().st_size for path in parts if path.exists()) > LARGE * BYTES


def pages_of(shelf: Shelf) -> Drawn:
    """The pages of the runs on a shelf."""
    return Drawn(shelf, draw_page, is_large=is_large)


def listed(shelf: Shelf) -> list[dict[str, Any]]:
    """The runs as records for the list: name, state, how far, how long ago, and what it is about; newest first."""
    found = [_line(name, folder) for name, folder in shelf.runs().items()]
    return sorted(found, key=lambda run: (run["ago"] is None, run["ago"]))


def _line(name: str, folder: Path) -> dict[str, Any]:
    state = run_state(folder)
    about = record_of(folder)
    kind = str(about.get("study") or about.get("kind") or "profile")
    entries = about.get("models")
    models = (
        [str(entry.get("name")) for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    )
    words = [kind, *dict.fromkeys(models[:3]), f"{len(models) - 3} more" if len(models) > 3 else "", _data_name(about)]
    shown = {
        "name": name,
        "state": state.state,
        "at": state.progress(),
        "ago": state.since() if state.written else None,
    }
    return shown | {"about": " · ".join(str(placeless(word)) for word in words if word)}


def _data_name(about: Mapping[str, Any]) -> str:
    data = about.get("data")
    return str(data.get("name") or "") if isinstance(data, dict) else ""


def front(shelf: Shelf) -> str:
    """The page with the list of runs."""
    return runs_document(listed(shelf), most=MOST_TOGETHER)
