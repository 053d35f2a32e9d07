"""Weight tables as rows: the input embedding and the output head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from anisoscope.errors import AnisoscopeError

_READERS = {"embed_weight": "get_input_embeddings", "unembed": "get_output_embeddings"}


def weight_rows(model: nn.Module, kind: str) -> Tensor:
    """Rows of `embed_weight` or `unembed` [V, d], one per token, in float32 or float64."""
    table = _table(model, kind)
    if table is None:
        want = "an embedding table" if kind == "embed_weight" else "an output head (…ForCausalLM or …ForMaskedLM)"
        raise AnisoscopeError(f"{type(model).__name__} has no weight table {kind!r}; expected a model with {want}.")
    weight = table.detach()
    return weight if weight.dtype == torch.float64 else weight.float()


def table_kinds(model: nn.Module) -> list[str]:
    """The weight tables a model has."""
    return [kind for kind in _READERS if _table(model, kind) is not None]


def _table(model: nn.Module, kind: str) -> Tensor | None:
    from anisoscope.capture.layout import unwrapped

    if kind not in _READERS:
        raise AnisoscopeError(f"{kind!r} is no weight table; expected {' or '.join(_READERS)}.")
    reader = getattr(unwrapped(model), _READERS[kind], None)
    try:
        module = reader() if reader is not None else None
    except (NotImplementedError, AttributeError):  # how transformers says that a model has no such table
        return None
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, Tensor) and weight.dim() == 2 else None
