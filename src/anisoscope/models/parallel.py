"""How a model is spread over processes: by FSDP2, whose processes read different contexts, or tensor-parallel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anisoscope.errors import AnisoscopeError


def sharded(model: nn.Module) -> bool:
    """Whether processes hold parts of its parameters (FSDP2, tensor parallel), so that a forward pass communicates."""
    return any(hasattr(parameter, "to_local") for parameter in model.parameters())


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
    for module in _fsdp_modules(model):
        module.reshard()


def tensor_rank(model: nn.Module) -> int | None:
    """The place of this process among those that compute the same contexts together; None if each has its own.

    Those are the processes along the dimensions of a mesh by which parameters are split, but for FSDP's.
    """
    known = {key for module in _fsdp_modules(model) for key in _dimensions(_fsdp_mesh(module))}
    ranks = {
        key: mesh.get_local_rank(number)
        for mesh in {id(p.device_mesh): p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")}.values()
        for number, key in enumerate(_dimensions(mesh))
        if key not in known and mesh.size(number) > 1
    }
    return max(ranks.values()) if ranks else None


def context_ranks(model: nn.Module) -> list[int]:
    """The processes that compute the same contexts together (tensor parallel), this one among them."""
    known = {key for module in _fsdp_modules(model) for key in _dimensions(_fsdp_mesh(module))}
    found = {dist.get_rank()}
    for mesh in {id(p.device_mesh): p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")}.values():
        for number, key in enumerate(_dimensions(mesh)):
            if key not in known and mesh.size(number) > 1:
                found |= set(dist.get_process_group_ranks(mesh.get_group(number)))
    return sorted(found)


def averaged_over(model: nn.Module) -> float:
    """The number of losses that a wrapper averages: one of each process that reads contexts of its own; 1 without one.

    The gradient of an activation is that of the loss of its own process, and so larger by this factor than in one
    process that averages over all contexts.
    """
    wrapper = next((m for m in model.modules() if type(m).__name__ == "DistributedDataParallel"), None)
    if wrapper is not None:
        return float(dist.get_world_size(wrapper.process_group))  # type: ignore[arg-type]
    for module in _fsdp_modules(model):
        group = module._get_fsdp_state()._fsdp_param_group
        if group is not None:
            return float(getattr(group, "gradient_divide_factor", None) or group.mesh_info.mesh.size())
    return 1.0


def whole_activation(x: Tensor, *, length: int | None, together: bool, what: str) -> Tensor:
    """An activation as a plain tensor; an error if this process has only a part of it.

    `length` are the positions of its contexts, if they are known, and `together` whether processes share contexts.
    """
    parts = [placement for placement in getattr(x, "placements", ()) if not placement.is_replicate()]
    fewer = together and length is not None and x.dim() == 3 and 1 < x.shape[1] < length and not length % x.shape[1]
    if parts or fewer:
        raise AnisoscopeError(
            f"the activations of {what} are split over processes (sequence parallel), so that a process has parts of "
            "contexts; train without it to monitor, or measure checkpoints with `anisoscope sweep`."
        )
    return x.to_local() if hasattr(x, "to_local") else x


def training_ranks(model: nn.Module) -> list[int]:
    """The processes that train a model: those of its wrapper or of the meshes of its parameters, else all there are."""
    meshes = {id(p.device_mesh): p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")}.values()
    if any(True for _ in _fsdp_modules(model)):
        return sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
    wrapper = next((m for m in model.modules() if type(m).__name__ == "DistributedDataParallel"), None)
    if wrapper is not None and not meshes:
        return sorted(dist.get_process_group_ranks(wrapper.process_group))  # type: ignore[arg-type]
    return list(range(dist.get_world_size()))


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
