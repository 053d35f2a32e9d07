"""Trackers from the words of `log_to`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.integrations.trackers.host import HostTracker, Log
from anisoscope.option import listed

HOST = "trainer"
TRACKERS = {  # word -> its class
    "tensorboard": "tensorboard:TensorBoardTracker",
    "wandb": "wandb:WandbTracker",
    "mlflow": "mlflow:MlflowTracker",
    "trackio": "trackio:TrackioTracker",
}
_METHODS = ("start", "write", "finish")


def trackers(log_to: Any, *, host: Log | None = None) -> list[Any]:
    """The sinks that `log_to` names: words, objects with the methods of a sink, or a list of such.

    `host` is how the trainer that runs a callback logs, for the word `trainer`.
    """
    if isinstance(log_to, str):
        log_to = listed(log_to, "log_to")
    items = list(log_to) if isinstance(log_to, Sequence) else [log_to]
    for number, item in enumerate(items):
        if isinstance(item, str) and item in items[:number]:
            raise AnisoscopeError(f"log_to names {item!r} twice; name it once.")
    return [_tracker(item, host) for item in items]


def _tracker(item: Any, host: Log | None) -> Any:
    if not isinstance(item, str):
        if missing := [name for name in _METHODS if not callable(getattr(item, name, None))]:
            raise AnisoscopeError(
                f"log_to has {str(item)[:80]!r}, which has no method {missing[0]}; expected one of "
                f"{', '.join((*TRACKERS, HOST))}, or an object with {', '.join(_METHODS)}."
            )
        return item
    word, _, place = (part.strip() for part in item.partition(":"))
    if word == HOST:
        return _host_tracker(place, host)
    if word not in TRACKERS:
        raise unknown_name("tracker", word, (*TRACKERS, HOST))
    if ":" in item and not place:
        raise AnisoscopeError(f"log_to is {item!r}, with nothing after the colon; name a folder or a project there.")
    module, _, name = TRACKERS[word].partition(":")
    return getattr(importlib.import_module(f"anisoscope.integrations.trackers.{module}"), name)(place)


def _host_tracker(place: str, host: Log | None) -> HostTracker:
    if host is None:
        raise AnisoscopeError(
            "log_to names 'trainer', and no trainer runs here; that word is for callbacks of anisoscope.integrations, "
            f"elsewhere name one of {', '.join(TRACKERS)}."
        )
    if place:
        raise AnisoscopeError(
            f"log_to is 'trainer:{place}'; expected 'trainer' alone, which logs where the trainer does."
        )
    return HostTracker(host)
