"""Logits that nobody reads are not computed: of a large vocabulary they are wider than all else in a pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from anisoscope.capture.layout import unwrapped


@contextlib.contextmanager
def few_logits(model: nn.Module) -> Iterator[None]:
    """While this lasts the output layer of a model is given the last position of each context alone.

    For models that take no `logits_to_keep`. Hooks that were there before still see what all positions bring.
    """
    find = getattr(unwrapped(model), "get_output_embeddings", None)
    head = find() if callable(find) else None
    if not isinstance(head, nn.Module):
        yield
        return
    handle = head.register_forward_pre_hook(_last)
    try:
        yield
    finally:
        handle.remove()


def _last(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    whole = args and isinstance(args[0], Tensor) and args[0].dim() == 3
    return (args[0][:, -1:], *args[1:]) if whole else None
