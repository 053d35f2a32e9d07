"""What attention shows, and what models themselves say of it, for the tests of queries, keys and scores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture import Capture, Scores, find_layout
from anisoscope.capture.sites.site import CALLED_KINDS
from support.tiny_models import Record

CLOSE = {"atol": 1e-5, "rtol": 1e-4}


def attending(model: nn.Module, batch: Any, **options: Any) -> tuple[Record, list[str]]:
    """What a capture of all attention sites of a model sees, and its notes."""
    layout, record = find_layout(model), Record()
    sites = layout.sites([kind for kind in layout.kinds if kind in CALLED_KINDS])
    with Capture(model, sites, record, **options) as capture:
        capture.run(batch)
    return record, capture.notes


def of_rows(p: Tensor, call: Scores) -> Tensor:
    """Probabilities of the rows that count, heads apart."""
    return p.transpose(1, 2).flatten(0, 1)[call.index.keep]


@contextlib.contextmanager
def softmaxes() -> Iterator[list[Tensor]]:
    """The probabilities of every softmax over keys, in order, noted without the program."""
    seen: list[Tensor] = []
    function = nn.functional.softmax

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(function(*args, **kwargs))
        return seen[-1]

    nn.functional.softmax = torch.nn.functional.softmax = noted  # type: ignore[assignment]
    try:
        yield seen
    finally:
        nn.functional.softmax = torch.nn.functional.softmax = function
