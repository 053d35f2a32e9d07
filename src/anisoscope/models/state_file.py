"""Checkpoints that are single files: Lightning's `.ckpt` and plain state dicts, of an architecture that is given."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import pickle
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.errors import AnisoscopeError
from anisoscope.models.checkpoint import HEADLESS, UNUSED, Wish, class_of, classes, seeded, with_own_loss
from anisoscope.models.source import STATE_SUFFIXES as STATE_SUFFIXES
from anisoscope.models.source import WEIGHT_PATTERNS

_INSIDE = ("state_dict", "model_state_dict", "model", "module", "model_state", "weights")  # where trainers put weights
_STEPS = ("global_step", "step", "iter_num", "iteration", "steps", "num_updates")
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")  # of torch.compile and FSDP
_KNOWN = (argparse.Namespace, pathlib.PosixPath)  # harmless, and common among hyperparameters
_FOREIGN = ("Unsupported global", "Unsupported class", "GLOBAL", "Trying to call", "add_safe_globals")  # torch's words
_TRIED = 64  # names of the model that its prefix in the file is looked for with


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
    """The first file of weights of a model's folder that is no such file, or only part of one."""
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


def prefix_of(names: Collection[str], wanted: Collection[str]) -> str:
    """What stands before the model's own names in a file: the prefix that most of them are found with.

    >>> prefix_of(["module.net.a.weight", "module.net.b.weight", "loss.c"], ["a.weight", "b.weight"])
    'module.net.'
    """
    some = sorted(wanted, key=len, reverse=True)[:_TRIED]
    found = [name[: -len(mine)] for mine in some for name in names if name.endswith(mine)]
    prefixes = {prefix for prefix in found if not prefix or prefix.endswith(".")}
    there = set(names)
    return max(sorted(prefixes), key=lambda p: sum(p + mine in there for mine in wanted), default="")


@dataclass(frozen=True)
class _Fit:
    """One class with the weights of a file."""

    model: nn.Module
    missing: list[str]
    surplus: list[str]
    beside: list[str]  # names of the file that lie beside the body of the model


def model_of_state(path: Path, config: Any, wish: Wish, *, notes: list[str]) -> nn.Module:
    """A model of the architecture with the weights of a file; what does not match is named and refused.

    Heads that give no words (a classifier), and whatever else lies beside the model, are left out with a note.
    """
    state = read_state(path)
    fits: list[_Fit] = []
    candidates = classes(config, with_head=wish.with_head)
    for auto in candidates:
        fit = _fit(class_of(auto, config), state.tensors, config, wish)
        if not fit.missing and not fit.surplus:
            if fit.beside:
                notes.append(f"{len(fit.beside)} tensors beside the model were left out ({_some(fit.beside)})")
            if len(candidates) > 1 and auto is candidates[-1]:
                notes.append(HEADLESS)
            return with_own_loss(fit.model)
        fits.append(fit)
    best = min(fits, key=lambda fit: len(fit.missing) + len(fit.surplus))
    words = [f"the file lacks {_some(best.missing)}"] if best.missing else []
    words += [f"the architecture has no place for {_some(best.surplus)}"] if best.surplus else []
    raise AnisoscopeError(
        f"the weights of {str(path)!r} do not fit {type(best.model).__name__}: {' and '.join(words)}; check "
        "--architecture."
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def _fit(kind: Any, tensors: Mapping[str, Tensor], config: Any, wish: Wish) -> _Fit:
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        shapes = {name: tuple(value.shape) for name, value in kind(config).state_dict().items()}
    prefix = prefix_of(tensors, shapes)
    mine = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    _check_shapes(mine, shapes, kind)
    extra: dict[str, Any] = {} if wish.device_map is None else {"device_map": wish.device_map}
    dtype = wish.dtype or next((t.dtype for t in mine.values() if t.is_floating_point()), torch.float32)
    with seeded(wish.seed):
        model, info = kind.from_pretrained(
            None, config=config, state_dict=mine, output_loading_info=True, dtype=dtype, **extra
        )
    surplus = [name for name in sorted(info["unexpected_keys"]) if not _idle(name)]
    body = f"{model.base_model_prefix}."
    beside = [name for name in surplus if not name.startswith(body)] if any(n.startswith(body) for n in shapes) else []
    return _Fit(
        model,
        [name for name in sorted(info["missing_keys"]) if not _idle(name)],
        [name for name in surplus if name not in beside],
        beside + [name for name in tensors if not name.startswith(prefix) and not _idle(name)],
    )


def _idle(name: str) -> bool:
    """Whether a tensor is a part that no site looks at, or a constant that older versions stored."""
    return any(part in name for part in UNUSED) or name.endswith((".attn.bias", ".attn.masked_bias", "inv_freq"))


def _check_shapes(mine: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], kind: Any) -> None:
    for name, value in mine.items():
        if name in shapes and shapes[name] != tuple(value.shape) and not _idle(name):
            raise AnisoscopeError(
                f"{name} has the shape {list(value.shape)} in the file and {list(shapes[name])} in {kind.__name__}; "
                "check the sizes of --architecture."
            )
