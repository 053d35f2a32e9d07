"""Which weights read the residual stream: found by what they are given, not by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.capture import Capture
from anisoscope.capture.gradients.gradient_pass import Collector, untouched
from anisoscope.capture.rows.argument import forward
from anisoscope.capture.sites.layout import Layout
from anisoscope.capture.sites.site import Site
from anisoscope.errors import AnisoscopeError

# Weight tables as rows: the input embedding and the output head.


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
    from anisoscope.capture.sites.layout import unwrapped

    if kind not in _READERS:
        raise AnisoscopeError(f"{kind!r} is no weight table; expected {' or '.join(_READERS)}.")
    reader = getattr(unwrapped(model), _READERS[kind], None)
    try:
        module = reader() if reader is not None else None
    except (NotImplementedError, AttributeError):  # how transformers says that a model has no such table
        return None
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, Tensor) and weight.dim() == 2 else None


READ_KINDS = ("attn_in", "mlp_in")


def stream_readers(
    model: nn.Module, layout: Layout, inputs: Mapping[str, Any], *, rows: Any = None
) -> dict[Site, list[str]]:
    """The weights (parameter names) of the linears that read `attn_in` and `mlp_in` of each layer.

    A linear reads a site when it is handed the very same memory. A weight that several layers share belongs to none.
    """
    kinds = [kind for kind in READ_KINDS if kind in layout.kinds]
    if not kinds:
        return {}
    sites = layout.sites(kinds)
    given: list[tuple[str, Tensor]] = []
    collector = Collector()
    handles = [
        module.register_forward_pre_hook(_keeper(f"{path}.weight", given))
        for path, module in model.named_modules()
        if _is_linear(module)
    ]
    try:
        capture = Capture(model, sites, collector, layout=layout, watch=collector.watch, rows=rows)
        with untouched(model), torch.no_grad(), capture:
            forward(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    found = {site: [name for name, x in given if _same(x, collector.live[site][0])] for site in collector.live}
    uses = [name for names in found.values() for name in names]
    return {s: names for s, names in found.items() if names and all(uses.count(name) == 1 for name in names)}


def _keeper(name: str, given: list[tuple[str, Tensor]]) -> Any:
    def keep(_: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            given.append((name, args[0]))

    return keep


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _same(x: Tensor, y: Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.shape[-1] == y.shape[-1] and x.numel() == y.numel()


def as_rows(model: nn.Module, name: str, gradient: Tensor) -> Tensor:
    """A weight's gradient as rows in the space of its input [out, in]; Conv1D keeps it the other way round."""
    module = model.get_submodule(name.rpartition(".")[0])
    return gradient.T if type(module).__name__ == "Conv1D" else gradient


def joined(model: nn.Module, names: Sequence[str], gradients: Mapping[str, Tensor]) -> Tensor | None:
    """The rows of all weights that read one site."""
    parts = [as_rows(model, name, gradients[name]) for name in names if name in gradients]
    if not parts:
        return None
    whole = torch.cat(parts)
    return whole if whole.dtype == torch.float64 else whole.float()
