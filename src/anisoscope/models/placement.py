"""Device and precision of a model, whether it fits into memory, and a fingerprint of its weights."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from anisoscope.errors import AnisoscopeError, unknown_name

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
HALF = (torch.float16, torch.bfloat16)
HASHED_WHOLE = 256 << 20  # bytes of weights up to which every byte enters the fingerprint
SAMPLE = 1 << 14  # elements of each tensor that enter the fingerprint of larger models


_DEVICES = ("cpu", "cuda", "mps")
_elsewhere: ContextVar[bool] = ContextVar("elsewhere", default=False)


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """Around the making of a plan: a device may be one of another machine."""
    token = _elsewhere.set(True)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def choose_device(name: str = "auto") -> torch.device:
    """The device of that name; `auto` is CUDA, else MPS, else the CPU."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise unknown_name("device", name, ["auto", *_DEVICES]) from error
    if device.type not in _DEVICES or (device.type != "cuda" and device.index):
        raise unknown_name("device", name, ["auto", *_DEVICES])
    if _elsewhere.get():
        return device
    if (device.type == "cuda" and not cuda) or (device.type == "mps" and not mps):
        raise AnisoscopeError(f"device {name!r} is not available here; use --device auto or --device cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise AnisoscopeError(f"device {name!r} does not exist: there are {torch.cuda.device_count()} CUDA devices.")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """The dtype of that name; None for that of the checkpoint."""
    if name == "auto":
        return None
    if name not in DTYPES:
        raise unknown_name("dtype", name, ["auto", *DTYPES])
    if name == "float64" and device.type == "mps":
        raise AnisoscopeError("MPS has no float64; use --dtype float32, or --device cpu.")
    return DTYPES[name]


def place(model: nn.Module, *, device: torch.device, dtype: torch.dtype | None, notes: list[str]) -> nn.Module:
    """Move the model to its device; half precision becomes float32 on a CPU unless `dtype` requests it."""
    stored = next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.float32)
    if dtype is None and device.type == "cpu" and stored in HALF:
        notes.append(f"the checkpoint is {str(stored).removeprefix('torch.')}; computed in float32 on the CPU")
        dtype = torch.float32
    needed, free = parameter_count(model) * (dtype or stored).itemsize, free_memory(device)
    try:
        model = model.to(dtype) if dtype is not None and dtype != stored else model
        return model.to(device)
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        raise _does_not_fit(needed, free, device) from error


def parameter_count(model: nn.Module) -> int:
    """Number of parameters, shared ones once."""
    return sum(p.numel() for p in model.parameters())


def check_fits(parameters: int, *, dtype: torch.dtype, device: torch.device) -> None:
    """Raise an error, before anything is read, if the weights alone exceed the free memory of the device."""
    free, needed = free_memory(device), parameters * dtype.itemsize
    if needed > free:
        raise _does_not_fit(needed, free, device)


def _does_not_fit(needed: int, free: int, device: torch.device) -> AnisoscopeError:
    return AnisoscopeError(
        f"the model does not fit: its weights need {needed / 2**30:.1f} GiB, and {device} has {free / 2**30:.1f} GiB "
        f"free; use --dtype bfloat16, --device-map auto, or a smaller model."
    )


def device_entry(device: torch.device) -> dict[str, str]:
    """The entries of run.json that tell a device; a GPU by its name, too.

    >>> device_entry(torch.device("cpu"))
    {'device': 'cpu'}
    """
    named = {"device_name": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {"device": str(device), **named}


def free_memory(device: torch.device) -> int:
    """Free bytes on a device; for MPS and the CPU those of the host."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    folder = Path("/sys/fs/cgroup")  # a container may have a lower limit (cgroup v2)
    try:
        limit, used = (folder / "memory.max").read_text().strip(), (folder / "memory.current").read_text().strip()
    except OSError:
        return available
    if limit == "max":
        return available
    stat: dict[str, str] = {}
    with contextlib.suppress(OSError):
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))  # counted as used, freed on demand
    return min(available, int(limit) - int(used) + cached)


def weight_fingerprint(model: nn.Module) -> str:
    """Digest of the names, shapes, types and bytes of all weights, as loaded.

    `sha256:` when every byte went in; `sha256-sampled:` above 256 MiB, where each tensor gives evenly spaced elements.
    """
    state = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    whole = sum(t.numel() * t.element_size() for t in state.values()) <= HASHED_WHOLE
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach()
        digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}\n".encode())
        if tensor.numel() and not tensor.is_meta:  # offloaded weights are known by name and shape only
            flat = tensor.reshape(-1)
            if not whole and flat.numel() > SAMPLE:
                flat = flat[torch.linspace(0, flat.numel() - 1, SAMPLE, dtype=torch.float64).long().to(flat.device)]
            digest.update(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return f"{'sha256' if whole else 'sha256-sampled'}:{digest.hexdigest()}"
