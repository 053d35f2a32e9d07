"""Files of weights: safetensors, Lightning's `.ckpt` and plain state dicts, read by name or found damaged."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError
from anisoscope.models.source import WEIGHT_PATTERNS

_INSIDE = ("state_dict", "model_state_dict", "model", "module", "model_state", "weights")  # where trainers put weights
_STEPS = ("global_step", "step", "iter_num", "iteration", "steps", "num_updates")
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")  # of torch.compile and FSDP
_KNOWN = (argparse.Namespace, pathlib.PosixPath)  # harmless, and common among hyperparameters
_FOREIGN = ("Unsupported global", "Unsupported class", "GLOBAL", "Trying to call", "add_safe_globals")  # torch's words


class DamagedFile(AnisoscopeError):
    """A file of weights that is cut off, or something else altogether."""


@dataclass(frozen=True)
class StateFile:
    """The weights of a file by name, and the step that it says it was written at."""

    tensors: dict[str, Tensor]
    step: int | None


def read_state(path: Path, *, device: str = "cpu") -> StateFile:
    """A file's weights, without the names of wrappers; a pickle is read with `weights_only` or not at all.

    On the device `meta` only names, shapes and the step are read.
    """
    if path.suffix == ".safetensors":
        found, about = _safetensors(path, device=device)
    else:
        found = about = _unpickled(path, device=device)
    weights = _weights(found)
    if not weights:
        raise AnisoscopeError(f"{str(path)!r} holds no weights by name; expected a state_dict or a Lightning .ckpt.")
    return StateFile({_unwrapped(name): value for name, value in weights.items()}, _step(about))


def recorded_step(path: Path) -> int | None:
    """The step inside a checkpoint file; None where it says none, or cannot be read."""
    try:
        return read_state(path, device="meta").step
    except Exception:  # whatever damaged bytes lead to: it is said when the weights are wanted
        return None


def damaged_file(folder: Path) -> Path | None:
    """The first file of weights in a folder that is damaged or incomplete; None where all are whole."""
    for path in sorted(p for pattern in WEIGHT_PATTERNS[:2] for p in folder.glob(pattern)):
        try:
            _safetensors(path, device="meta") if path.suffix == ".safetensors" else _unpickled(path, device="meta")
        except DamagedFile:
            return path
        except AnisoscopeError:
            continue  # whole, but refused for another reason
    return None


def _safetensors(path: Path, *, device: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            about = file.metadata() or {}
            if device == "meta":
                return {name: torch.empty(file.get_slice(name).get_shape(), device="meta") for name in names}, about
            return {name: file.get_tensor(name) for name in names}, about
    except SafetensorError as error:
        raise DamagedFile(f"{str(path)!r} is cut off or damaged ({error}); copy it again.") from error


def _unpickled(path: Path, *, device: str) -> Any:
    allowed: Any = getattr(torch.serialization, "safe_globals", None)  # torch 2.5 and later
    with allowed(list(_KNOWN)) if allowed is not None else contextlib.nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the protocol that damaged bytes seem to be of
        try:
            return torch.load(path, map_location=device, weights_only=True)
        except MemoryError:
            raise  # of the machine, not of the file
        except Exception as error:  # bytes that are no pickle can lead to any: KeyError, IndexError, struct.error, …
            if isinstance(error, PermissionError | FileNotFoundError):
                raise AnisoscopeError(f"{str(path)!r} cannot be read ({error.strerror}); check it.") from error
            if isinstance(error, pickle.UnpicklingError) and any(words in str(error) for words in _FOREIGN):
                raise AnisoscopeError(
                    f"{str(path)!r} holds more than weights, and unpickling that would run its code; save its "
                    "state_dict alone."
                ) from error
            raise DamagedFile(f"{str(path)!r} is no file of weights, or only part of one; copy it again.") from error


def _weights(found: Any) -> dict[str, Tensor]:
    """The state dict itself, or the one inside of what a trainer saved."""
    if not isinstance(found, Mapping):
        return {}
    for name in _INSIDE:
        if isinstance(found.get(name), Mapping):
            return _weights(found[name]) or _tensors(found)
    return _tensors(found)


def _tensors(found: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in found.items() if isinstance(name, str) and isinstance(value, Tensor)}


def _step(about: Mapping[str, Any]) -> int | None:
    for name in _STEPS:
        value = about.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str) and value.isdecimal():
            return int(value)
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta and not value.is_floating_point():
            return int(value)
    return None


def _unwrapped(name: str) -> str:
    """A name without what torch.compile and FSDP put into it.

    >>> _unwrapped("model._orig_mod.h.0.weight")
    'model.h.0.weight'
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
