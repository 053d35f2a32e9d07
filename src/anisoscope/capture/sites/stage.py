"""The sites of one stage of a pipeline: a model of which a process holds some of the blocks only.

The number of blocks in its configuration is that of the whole model, and a stage may have one block alone; so its list
of blocks is found by what it is, and layers are numbered as in the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from anisoscope.capture.sites import block as parts
from anisoscope.capture.sites.layout import Layout, make_stack, weight_tables
from anisoscope.errors import AnisoscopeError
from anisoscope.models.forward import CONTENT, original, unwrapped, without_wrappers

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def check_stage(stage: tuple[int, int]) -> None:
    """Raise an error for a stage that no model has."""
    before, total = stage
    if not 0 <= before < total:
        raise AnisoscopeError(
            f"stage is {stage}; expected the number of blocks before this stage and in the whole model, such as "
            "stage=(2, 4) for the last two of four."
        )


def find_stage(model: nn.Module, stage: tuple[int, int]) -> Layout:
    """The layout of a model that has blocks of a larger one: `stage` is how many come before it, and are in all."""
    model = original(model)
    check_stage(stage)
    with without_wrappers(model):
        return _stage_layout(model, stage)


def _stage_layout(model: nn.Module, stage: tuple[int, int]) -> Layout:
    before, total = stage
    called, path = type(unwrapped(model)).__name__, _block_list(model)
    blocks = [f"{path}.{name}" for name, _ in model.get_submodule(path).named_children()]
    end = before + len(blocks)
    if end > total:
        raise AnisoscopeError(
            f"{called} has {len(blocks)} blocks ({path}), of which the first is number {before + 1} of {total} by "
            f"stage={stage}; expected at most {total - before}."
        )
    stack = make_stack(model, "single", blocks)
    places = {(layer + before, kind): place for (layer, kind), place in stack.places.items()}
    held = range(before + 1 if before else 0, end + 1)
    whole: dict[str, Any] = {"before": before, "total": total, "held": held}
    # whether a norm follows the last block is known in the last stage
    stack = replace(stack, places=places, has_norm=stack.has_norm if end == total else True, **whole)
    return Layout(called, (stack,), weight_tables(model))


def _block_list(model: nn.Module) -> str:
    """The path of the one outermost list of blocks of one class, of those with attention if there are several."""
    found: list[str] = []
    for path, module in model.named_modules():
        kinds = {type(child) for child in module.children()}
        listed = isinstance(module, _LISTS) and len(kinds) == 1 and next(module.parameters(), None) is not None
        if path and listed and not any(path.startswith(f"{other}.") for other in found):
            found.append(path)
    attending = [path for path in found if all(map(parts.attention_of, model.get_submodule(path).children()))]
    lists = attending if len(found) > 1 and attending else found
    if len(lists) != 1:
        named = f"several ({', '.join(lists)})" if lists else "none"
        raise AnisoscopeError(
            f"a stage of a pipeline has its blocks in one ModuleList, ModuleDict or Sequential, and "
            f"{type(unwrapped(model)).__name__} has {named}; put them into one."
        )
    return lists[0]


def refuse_nameless(arguments: Mapping[str, Any], before: int) -> None:
    """Raise an error if nothing tells a stage that begins after so many blocks which contexts it is given."""
    if not any(isinstance(arguments.get(name), Tensor) for name in CONTENT if name != "inputs_embeds"):
        raise AnisoscopeError(
            f"a stage that begins after block {before} was not given input_ids, so that nothing says which contexts "
            "its rows are of; hand them to its forward under that name, or give rows=."
        )
