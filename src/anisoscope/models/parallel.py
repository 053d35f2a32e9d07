"""How a model is spread over processes: by FSDP2, whose processes read different contexts, or tensor-parallel.

Of processes that compute the same contexts together each has either the whole of an activation or, if it is sequence-
parallel, some of the positions of every context.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anisoscope.errors import AnisoscopeError
from anisoscope.models.forward import FSDP


def sharded(model: nn.Module) -> bool:
    """Whether processes hold parts of its parameters (FSDP, tensor parallel), so that a forward pass communicates."""
    if not _several():
        return False
    return flattened(model) or any(hasattr(parameter, "to_local") for parameter in model.parameters())


def _several() -> bool:
    """Whether there are processes that a model may be spread over; if not, its modules need not be looked through."""
    return dist.is_available() and dist.is_initialized()


def flattened(model: nn.Module) -> bool:
    """Whether a parameter is a part of a flat one, so that between passes it has no rows (FSDP's first, ZeRO-3)."""
    if not _several():
        return False
    if any(type(module).__name__ == FSDP for module in model.modules()):
        return True
    return any(hasattr(p, "ds_id") or getattr(p, "_fsdp_flattened", False) for p in model.parameters())


def refuse_uncallable(model: nn.Module) -> None:
    """Raise an error for a module inside the first FSDP: called without its wrapper it has no parameters."""
    if type(model).__name__ != FSDP and any(getattr(p, "_fsdp_flattened", False) for p in model.parameters()):
        raise AnisoscopeError(
            f"{type(model).__name__} is inside FullyShardedDataParallel, which has its parameters, so that a probe "
            "cannot be run through it; give the monitor the wrapper."
        )


def class_name(model: nn.Module) -> str:
    """The name of a model's class, as it was before FSDP2 derived another one from it."""
    name = type(model).__name__
    plain = name.removeprefix("FSDP")
    return plain if any(base.__name__ == plain for base in type(model).__mro__) else name


def without_gradients(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """The mode for passes without gradients; what FSDP keeps of an inference mode cannot be used in training."""
    return torch.no_grad() if sharded(model) else torch.inference_mode()


def shard_again(model: nn.Module) -> None:
    """Have FSDP2 free the whole parameters that it keeps from a forward pass for a backward pass that does not come."""
    for module in _fsdp_modules(model) if _several() else ():
        module.reshard()


@dataclass(frozen=True)
class Together:
    """The processes that compute the same contexts together, in their order, and the place of this one among them."""

    ranks: tuple[int, ...]
    place: int
    known: bool = True  # whether it is known how they split activations: along one dimension of a mesh
    sequences: bool = False  # whether a parameter has a copy in each, as those of sequence-parallel norms do


@dataclass(frozen=True)
class HeldPositions:
    """The positions of every context, from `start` to before `stop` of `length`, that one of several processes has."""

    start: int
    stop: int
    length: int
    of: int  # processes that have the pieces


def together(model: nn.Module) -> Together | None:
    """The processes that compute the same contexts together with this one; None if each has its own.

    Those are the processes along the dimensions of a mesh by which parameters are split, but for FSDP's.
    """
    apart = {key for module in _fsdp_modules(model) for key in _dimensions(_fsdp_mesh(module))}
    meshes = {id(p.device_mesh): p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")}.values()
    lines: dict[Any, tuple[int, tuple[int, ...]]] = {}
    for mesh in meshes:
        for number, key in enumerate(_dimensions(mesh)):
            if key not in apart and mesh.size(number) > 1:
                lines[key] = mesh.get_local_rank(number), tuple(dist.get_process_group_ranks(mesh.get_group(number)))
    if not lines:
        return None
    copied = any(_copied(p, set(lines)) for p in model.parameters() if hasattr(p, "device_mesh"))
    ranks = sorted({rank for _, line in lines.values() for rank in line})
    same = {line for _, line in lines.values()}
    return Together(tuple(ranks), max(place for place, _ in lines.values()), len(same) == 1, copied)


def _copied(parameter: Any, lines: set[Any]) -> bool:
    pairs = zip(_dimensions(parameter.device_mesh), parameter.placements, strict=True)
    return any(key in lines and placement.is_replicate() for key, placement in pairs)


def averaged_over(model: nn.Module) -> float:
    """The number of losses that a wrapper averages: one of each process that reads contexts of its own; 1 without one.

    The gradient of an activation is that of the loss of its own process, and so larger by this factor than in one
    process that averages over all contexts.
    """
    wrappers = ("DistributedDataParallel", "FullyShardedDataParallel")
    wrapper = next((m for m in model.modules() if type(m).__name__ in wrappers), None)
    if wrapper is not None:
        return float(dist.get_world_size(wrapper.process_group))  # type: ignore[arg-type]
    for module in _fsdp_modules(model):
        group = module._get_fsdp_state()._fsdp_param_group
        if group is not None:
            return float(getattr(group, "gradient_divide_factor", None) or group.mesh_info.mesh.size())
    return 1.0


def tensor_rank(model: nn.Module) -> int | None:
    """The place of this process among those that compute the same contexts together; None if each has its own."""
    found = together(model)
    return None if found is None else found.place


def piece_of(x: Tensor, group: Together | None, *, length: int | None, batch: int, what: str) -> HeldPositions | None:
    """Which positions of an activation this process has; None if all. An error if that cannot be known.

    `length` are the positions of its contexts, if they are known, and `batch` their number.
    """
    if hasattr(x, "placements"):
        return _placed_piece(x, length=length, what=what)
    if group is None or x.dim() != 3 or length is None:
        if group is not None and group.sequences and length is None:
            raise _unknown(what, "how many positions its contexts have is not known: give rows= or input_ids")
        return None
    places = len(group.ranks)
    if x.shape[0] == batch and (x.shape[1] == length or (x.shape[1] == 1 < places < length)):
        return None
    if x.shape[0] == batch and group.known and x.shape[1] * places == length:
        size = x.shape[1]
        return HeldPositions(group.place * size, (group.place + 1) * size, length, places)
    if (x.shape[0] == batch and x.shape[1] < length) or (x.shape[1] == batch and x.shape[0] < length):
        raise _unknown(
            what, f"one has shape {tuple(x.shape)} of {batch} contexts of {length} positions, not 1/{places} of each"
        )
    return None


def _placed_piece(x: Any, *, length: int | None, what: str) -> HeldPositions | None:
    """The piece of a DTensor, which says how it is split."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    split = [(n, placement) for n, placement in enumerate(x.placements) if not placement.is_replicate()]
    if not split:
        return None
    number, placement = split[0]
    if len(split) > 1 or not placement.is_shard(1) or x.dim() != 3 or length not in (None, x.shape[1]):
        named = ", ".join(map(str, x.placements))
        raise _unknown(what, f"one has placements {named} of shape {tuple(x.shape)}, not positions of every context")
    shape, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return HeldPositions(offset[1], offset[1] + shape[1], int(x.shape[1]), x.device_mesh.size(number))


def _unknown(what: str, why: str) -> AnisoscopeError:
    return AnisoscopeError(
        f"the activations of {what} are split over processes, and {why}; split them evenly by positions, or measure "
        "checkpoints with `anisoscope sweep`."
    )


def refuse_split_module(piece: HeldPositions | None, name: str) -> None:
    """Raise an error if other processes have some of the positions of a module that was named."""
    if piece is not None:
        raise AnisoscopeError(
            f"the activations of {name} are split over processes by positions, which can be joined at the layers of a "
            "transformer, not at modules that were named; leave modules= out, or train without the split."
        )


def plain(x: Any, *, shape: torch.Size | None = None, what: str) -> Tensor:
    """What this process has of an activation, or of its gradient, for which `shape` is that of the activation here."""
    if any(placement.is_partial() for placement in getattr(x, "placements", ())):
        raise _unknown(what, "one has a summand of every row")
    local: Tensor = x.to_local() if hasattr(x, "to_local") else x
    if shape is not None and local.shape != shape:
        raise _unknown(what, f"their gradients otherwise, {tuple(local.shape)} where they are {tuple(shape)}")
    return local


def training_ranks(model: nn.Module) -> list[int]:
    """The processes that train a model: those of its wrapper or of the meshes of its parameters, else all there are."""
    meshes = {id(p.device_mesh): p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")}.values()
    if any(True for _ in _fsdp_modules(model)):
        return sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
    wrapper: Any = next((m for m in model.modules() if type(m).__name__ in (FSDP, "DistributedDataParallel")), None)
    hybrid = "HYBRID" in str(getattr(wrapper, "sharding_strategy", ""))  # its group is a part of the processes
    if wrapper is not None and not meshes and not hybrid:
        return sorted(dist.get_process_group_ranks(wrapper.process_group))
    return list(range(dist.get_world_size()))


_CONTEXT_PARALLEL = "torch.distributed.tensor.experimental"


def refuse_context_parallel() -> None:
    """Raise an error inside `context_parallel` of torch: each process gets some positions as if they were all."""
    if not {f"{_CONTEXT_PARALLEL}._attention", f"{_CONTEXT_PARALLEL}._context_parallel"} & sys.modules.keys():
        return
    from torch.distributed.tensor import DTensor

    handlers = getattr(DTensor._op_dispatcher, "_custom_op_handlers", {}).values()
    acting = (torch.nn.functional.scaled_dot_product_attention, *handlers)
    if any(str(getattr(act, "__module__", "")).startswith(_CONTEXT_PARALLEL) for act in acting):
        raise AnisoscopeError(
            "the contexts are split over processes by context_parallel, so that none of them knows whole ones; train "
            "the measured steps without it, or measure checkpoints with `anisoscope sweep`."
        )


_REHEARSALS = {"_forward_metadata_inference", "_shape_inference"}


def rehearsing() -> bool:
    """Whether a stage of torch.distributed.pipelining runs on tensors without content, to learn the shapes it sends."""
    if "torch.distributed.pipelining.stage" not in sys.modules:
        return False
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name in _REHEARSALS and frame.f_globals.get("__name__", "").startswith("torch.distributed"):
            return True
    return False


def shapes_of(model: nn.Module) -> str:
    """A fingerprint of the shapes of all parameters, the same in all processes that train one model; "" if unknown."""
    if flattened(model):
        return ""
    text = ",".join(f"{tuple(parameter.shape)}" for parameter in model.parameters())
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _fsdp_modules(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if type(module).__name__.startswith("FSDP") and _is_two(module))


def _is_two(module: nn.Module) -> bool:
    """Whether it is of FSDP2, not of the first FSDP."""
    return callable(getattr(module, "reshard", None)) and hasattr(module, "_get_fsdp_state")


def _fsdp_mesh(module: Any) -> Any:
    group = module._get_fsdp_state()._fsdp_param_group
    return None if group is None else group.mesh_info.mesh


def _dimensions(mesh: Any) -> list[Any]:
    """What tells each dimension of a mesh from others: its name, or else the processes of the mesh."""
    if mesh is None:
        return []
    names = mesh.mesh_dim_names
    return list(names) if names else [(number, *mesh.mesh.flatten().tolist()) for number in range(mesh.ndim)]
