"""Rows of activations without padding, and who takes them.

Shapes: B contexts, T positions, n kept rows, d width, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

from torch import Tensor

from anisoscope.capture.sites.site import Site


@dataclass(frozen=True)
class Batch:
    """Model inputs, and what the model does not take: special-token flags and a group per context."""

    inputs: Mapping[str, Any]
    special: Tensor | None = None  # [B, T] bool, True at special tokens
    groups: tuple[str, ...] | None = None  # B names


@dataclass(frozen=True)
class Index:
    """Which of the B·T positions are data, and what they are; the same for every site of one stack and resolution.

    It is on the host whatever the device of the rows, so reading it needs no device–host synchronisation.

    `context` is a hash of the context's own unpadded content, so it does not depend on batch, order or padding side.
    `position` counts real positions from 0.
    """

    batch: int
    length: int
    keep: Tensor  # [n] int64 into the flattened B·T positions, ascending
    context: Tensor  # [n] int64
    position: Tensor  # [n] int64
    token: Tensor  # [n] int64, -1 where there is no token
    group: tuple[str, ...] | None = None  # name per *context* of the batch (B of them)
    first: Tensor | None = None  # [n] bool, True at the first real position of a context; None for pooled rows

    def taken(self, at: Tensor) -> Self:
        """The index of some of the rows, in the order of `at` [m]."""
        names = ("keep", "context", "position", "token", "first")
        found = {name: x[at] for name in names if (x := getattr(self, name)) is not None}
        return replace(self, **found)


@dataclass(frozen=True)
class Rows:
    """Kept rows of one site: `x` is [n, d], or [n, H, d] for queries and keys; float32 or float64."""

    site: Site
    x: Tensor
    index: Index


@dataclass(frozen=True)
class Scores:
    """What one attention call was given, so that statistics of its scores can be taken block by block.

    Scores of head h are `scaling * query[:, h] @ key[:, h // groups].T + bias`, masked where `allowed` is False.
    """

    site: Site
    query: Tensor  # [B, H, T, d]
    key: Tensor  # [B, H_kv, S, d]
    allowed: Tensor  # [B or 1, 1, T, S] bool
    bias: Tensor | None  # additive scores that are no mask (ALiBi, T5 relative bias), broadcastable to [B, H, T, S]
    scaling: float | Tensor  # a number, or one per head [H, 1, 1]
    index: Index  # of the query positions; keys are masked by `allowed`
    windows: int = 1  # of a context; B above counts windows then, and the index runs through the windows of a context
    chunk: int = 0  # positions of a chunk, where attention within chunks was put together


class Sink(Protocol):
    """Takes the rows and scores; called once per site and forward pass, while the pass is running."""

    def rows(self, rows: Rows) -> None: ...

    def scores(self, scores: Scores) -> None: ...
