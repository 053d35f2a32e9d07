"""Where in a model, and how rows flow out of it.

The names are loaded when first used, so that the vocabulary of places costs no import of torch.
`verify` is called from its own module: `from anisoscope.capture.verify import verify`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anisoscope.capture.families import list_families
    from anisoscope.capture.hooks import Capture
    from anisoscope.capture.layout import Layout, Stack, find_layout
    from anisoscope.capture.rows import Batch, Index, Rows, Scores, Sink
    from anisoscope.capture.sites import KINDS, Site, check_kinds
    from anisoscope.capture.weights import weight_rows

_HOMES = {
    "families": ("list_families",),
    "hooks": ("Capture",),
    "layout": ("Layout", "Stack", "find_layout"),
    "rows": ("Batch", "Index", "Rows", "Scores", "Sink"),
    "sites": ("KINDS", "Site", "check_kinds"),
    "weights": ("weight_rows",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "KINDS",
    "Batch",
    "Capture",
    "Index",
    "Layout",
    "Rows",
    "Scores",
    "Sink",
    "Site",
    "Stack",
    "check_kinds",
    "find_layout",
    "list_families",
    "weight_rows",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
