"""Sites of a model and their activations as rows; names load when first used, as the vocabulary needs no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anisoscope.capture.capture import Capture
    from anisoscope.capture.row import Batch, Index, Rows, Scores, Sink
    from anisoscope.capture.sites.family import list_families
    from anisoscope.capture.sites.layout import Layout, Stack, find_layout, weight_rows
    from anisoscope.capture.sites.site import KINDS, Site, check_kinds
    from anisoscope.capture.verification import verify

_HOMES = {
    "sites.family": ("list_families",),
    "capture": ("Capture",),
    "sites.layout": ("Layout", "Stack", "find_layout", "weight_rows"),
    "row": ("Batch", "Index", "Rows", "Scores", "Sink"),
    "sites.site": ("KINDS", "Site", "check_kinds"),
    "verification": ("verify",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["KINDS", "Batch", "Capture", "Index", "Layout", "Rows", "Scores", "Sink", "Site", "Stack"]
__all__ += ["check_kinds", "find_layout", "list_families", "verify", "weight_rows"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
