"""Figures, console tables and the report page, made from the results table; imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "RunView": "view.subjects",
    "profile_figure": "commands.drawing",
    "short_table": "commands.drawing",
    "table_html": "commands.drawing",
    "write_report": "commands.drawing",
}
__all__ = ["RunView", "profile_figure", "short_table", "table_html", "write_report"]


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that importing the package imports nothing else."""
    if name in _HOMES:
        return getattr(import_module(f"anisoscope.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
