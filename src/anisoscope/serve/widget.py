"""The page of a run inside a notebook, kept up to date while a cell trains.

from anisoscope import Monitor, watch

monitor = Monitor(model, out="runs/mine")
watch(monitor)          # in a cell of its own, or before the loop of the same cell
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anisoscope.errors import AnisoscopeError
from anisoscope.serve.shelf import version

PAUSE = 1.0  # seconds between two looks at the files
SCRIPT = """
function render({ model, el }) {
  const frame = document.createElement("iframe");
  frame.title = "anisoscope";
  frame.style.cssText = "width:100%;border:0;height:" + model.get("height") + "px";
  function fresh() {
    const quiet = document.createElement("p");
    quiet.style.cssText = "font:16px sans-serif;color:gray";
    quiet.textContent = model.get("words");
    frame.srcdoc = model.get("document") || quiet.outerHTML;
  }
  function changed() {
    const inside = frame.contentWindow && frame.contentWindow.anisoscope, data = model.get("data");
    if (inside && inside.update && data && data.blocks) inside.update(data);
  }
  model.on("change:document", fresh);
  model.on("change:words", function () { if (!model.get("document")) fresh(); });
  model.on("change:data", changed);
  model.on("change:height", function () { frame.style.height = model.get("height") + "px"; });
  frame.addEventListener("load", changed);
  fresh();
  el.appendChild(frame);
}
export default { render };
"""


def watch(run: Any, *, height: int = 900) -> Any:
    """The page of a run as a widget: give a `Monitor`, or a run folder that any process writes."""
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise AnisoscopeError(
            "watching a run in a notebook needs the package anywidget, which is not installed; "
            "pip install 'anisoscope[notebook]', or run `anisoscope serve` beside the notebook."
        ) from error

    class RunWidget(anywidget.AnyWidget):
        _esm = SCRIPT
        document = traitlets.Unicode("").tag(sync=True)
        data = traitlets.Dict({}).tag(sync=True)
        words = traitlets.Unicode("nothing is measured yet").tag(sync=True)
        height = traitlets.Int(900).tag(sync=True)

        def close(self) -> None:
            self.watching.stop()
            super().close()

    folder = _folder_of(run)
    widget = RunWidget(height=height)
    widget.watching = FolderWatch(folder, _shown_by(widget))
    widget.watching.start()
    return widget


def _folder_of(run: Any) -> Path:
    store = getattr(run, "store", None)  # of a Monitor
    place = run if store is None else store.folder.path
    if isinstance(place, str | Path):
        return Path(place)
    raise AnisoscopeError(
        f"a run of type {type(run).__name__} has no folder; give a Monitor with out=…, or a run folder."
    )


def _shown_by(widget: Any) -> Callable[[Any, str], None]:
    """What is done with a drawn page, or with the words that say why there is none."""

    def show(page: Any, words: str) -> None:
        if page is None:
            widget.words = words
        elif not widget.document:
            widget.document = page.document("")
        else:
            widget.data = page.data()

    return show


class FolderWatch(threading.Thread):
    """Looks at a run folder every second and draws its page when something was written."""

    def __init__(
        self, folder: Path, show: Callable[[Any, str], None], draw: Callable[[Path], Any] | None = None
    ) -> None:
        super().__init__(name="anisoscope-watch", daemon=True)
        self.folder, self._show, self._draw = folder, show, draw or _page_of
        self._ended = threading.Event()

    @property
    def stopped(self) -> bool:
        return self._ended.is_set()

    def stop(self) -> None:
        self._ended.set()

    def run(self) -> None:
        seen = ""
        while not self._ended.is_set():
            with contextlib.suppress(OSError):
                now = version(self.folder, lock=True)
                if now != seen:
                    seen = now
                    self._look()
            self._ended.wait(PAUSE)

    def _look(self) -> None:
        try:
            self._show(self._draw(self.folder), "")
        except AnisoscopeError as error:  # nothing measured yet, or a file that is being replaced
            self._show(None, str(error))
        except Exception as error:  # a notebook is never disturbed by what cannot be drawn
            self._show(None, f"the page could not be drawn ({type(error).__name__}: {error})")


def _page_of(folder: Path) -> Any:
    from anisoscope.serve.run import draw_page

    return draw_page([folder], False)
