"""Pages of runs that were drawn already, by the version of their files.

A page is drawn again when a run has written something. One of a large table takes long: its first version shows the
main quantities alone (`brief`), and the whole follows as a further version when it is ready.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from anisoscope.serve.shelf import Shelf, version

KEPT = 16  # drawn pages
BRIEF = "-brief"  # end of the version of a page that is not whole yet


class ServedPage(Protocol):
    """A page that can be written as one HTML file and as data."""

    def document(self, version: str) -> str: ...

    def data(self) -> dict[str, Any]: ...


Draw = Callable[[Sequence[Path], bool], ServedPage]  # folders, whether briefly -> page


@dataclass
class _Work:
    version: str
    brief: ServedPage | None
    whole: Future[ServedPage]

    def page(self) -> tuple[str, ServedPage]:
        """The best page that is there, with its version; waits for the whole one if there is no other."""
        if self.brief is None or (self.whole.done() and self.whole.exception() is None):
            return self.version, self.whole.result()
        return self.version + BRIEF, self.brief


class _Hand:
    """A thread that draws page after page; a daemon, so that a server ends at once though a page is half drawn."""

    def __init__(self, name: str) -> None:
        self._asked: SimpleQueue[tuple[Future[ServedPage], Callable[[], ServedPage]]] = SimpleQueue()
        threading.Thread(target=self._draw, name=name, daemon=True).start()

    def submit(self, draw: Callable[[], ServedPage]) -> Future[ServedPage]:
        future: Future[ServedPage] = Future()
        self._asked.put((future, draw))
        return future

    def _draw(self) -> None:
        while True:
            future, draw = self._asked.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(draw())
            except BaseException as error:
                future.set_exception(error)


class Drawn:
    """Draws pages, small ones one at a time and large ones beside them, each once for a version of its runs."""

    def __init__(self, shelf: Shelf, draw: Draw, *, is_large: Callable[[Path], bool]) -> None:
        self.shelf, self._draw, self._is_large = shelf, draw, is_large
        self._works: OrderedDict[tuple[str, ...], _Work] = OrderedDict()
        self._change = threading.Lock()
        self._small, self._large = _Hand("anisoscope-draw"), _Hand("anisoscope-draw-large")

    def version(self, names: tuple[str, ...]) -> str:
        """The version of what is on disk; that of the page in hand while a large one is still being drawn."""
        now = self._stamp(names)
        work = self._works.get(names)
        if work is None or work.version != now:
            return now
        return work.page()[0] if work.brief is not None else now

    def document(self, names: tuple[str, ...]) -> str:
        """The page as one HTML file that listens for changes."""
        version, page = self._work(names).page()
        return page.document(version)

    def data(self, names: tuple[str, ...]) -> str:
        """What the page shows, as JSON, with its version."""
        version, page = self._work(names).page()
        return json.dumps({**page.data(), "version": version}, allow_nan=False, ensure_ascii=False)

    def _stamp(self, names: tuple[str, ...]) -> str:
        return "-".join(version(self.shelf.folder(name), lock=True) for name in names)

    def _work(self, names: tuple[str, ...]) -> _Work:
        with self._change:
            now, work = self._stamp(names), self._works.get(names)
            if work is not None and work.version == now and not (work.whole.done() and work.whole.exception()):
                self._works.move_to_end(names)
                return work
            folders = [self.shelf.folder(name) for name in names]
            brief = self._draw(folders, True) if any(map(self._is_large, folders)) else None
            if work is not None and brief is not None and not work.whole.done():
                work.whole.cancel()  # a run that writes quicker than its page is drawn: only the newest is of use
            hand = self._small if brief is None else self._large  # nobody waits for the whole of a large one
            work = self._works[names] = _Work(now, brief, hand.submit(partial(self._draw, folders, False)))
            while len(self._works) > KEPT:
                self._works.popitem(last=False)
            return work
