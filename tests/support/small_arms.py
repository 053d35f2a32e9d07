"""Arms of the study of all modalities that have one block or so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from anisoscope.studies.inherent import ARMS, PRESETS


@contextmanager
def small_arms(**more: Any) -> Iterator[None]:
    """The preset `tiny` is smaller inside: the laws are about the study, not about its models."""
    with pytest.MonkeyPatch.context() as patch:
        arms = {name: _shrunk(name, own) for name, own in PRESETS["tiny"].arms.items()}
        patch.setitem(PRESETS, "tiny", replace(PRESETS["tiny"], arms=arms, **more))
        yield


def _shrunk(name: str, own: Mapping[str, Any]) -> dict[str, Any]:
    medium = ARMS[name].medium.name
    sizes: dict[str, Any] = {"layers": 3 if medium == "images" else 2, "width": 16, "heads": 2, "batch_size": 4}
    more: dict[str, dict[str, Any]] = {"text": {"context": 16}, "audio": {"seconds": 0.3}, "images": {"size": 16}}
    if name.startswith("text"):
        sizes["tokens"] = "bpe:300"
    return {**own, **sizes, **more[medium]}
