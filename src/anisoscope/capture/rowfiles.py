"""Rows that were saved before: `.npy` and `.safetensors` files."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from anisoscope.capture.sources import ROW_SUFFIXES, missing_path
from anisoscope.errors import AnisoscopeError

_PICKLED = re.compile("pickle|Python objects")
_EXPECTED = "expected floating-point rows of shape (rows, width)"


def load_rows(path: str | Path) -> dict[str, Tensor]:
    """Named 2-D floating-point tensors of a file; `.npy` is mapped, not read; NaN is left for the statistics."""
    path = Path(path).expanduser()
    if not path.exists():
        raise missing_path(path)
    if path.suffix == ".npy":
        return {path.stem: _numpy_rows(path)}
    if path.suffix == ".safetensors":
        return _safetensors_rows(path)
    raise AnisoscopeError(f"{str(path)!r} is no file of rows; expected one of {', '.join(ROW_SUFFIXES)}.")


def _numpy_rows(path: Path) -> Tensor:
    try:
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        reason = "it holds pickled objects" if _PICKLED.search(str(error)) else str(error).splitlines()[0]
        raise AnisoscopeError(f"{str(path)!r} cannot be read as rows ({reason}); {_EXPECTED}.") from error
    _check(array.shape, str(array.dtype), floating=array.dtype.kind == "f", name=str(path))
    if array.dtype.byteorder == ">" or array.dtype not in (np.float16, np.float32, np.float64):
        array = array.astype(np.float64)
    return torch.from_numpy(array)


def _safetensors_rows(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    rows: dict[str, Tensor] = {}
    seen: list[str] = []
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a handle, not a mapping
                shape, kind = tuple(file.get_slice(name).get_shape()), file.get_slice(name).get_dtype()
                seen.append(f"{name} {kind}{list(shape)}")
                if len(shape) == 2 and min(shape) and kind in ("F16", "BF16", "F32", "F64"):
                    rows[name] = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise AnisoscopeError(f"{str(path)!r} is not a safetensors file ({error}); write it again.") from error
    if not rows:
        shown = ", ".join(seen[:6]) or "nothing"
        raise AnisoscopeError(f"{str(path)!r} holds no rows: found {shown}; {_EXPECTED}.")
    return rows


def _check(shape: tuple[int, ...], dtype: str, *, floating: bool, name: str) -> None:
    if len(shape) != 2:
        raise AnisoscopeError(f"{name!r} has {len(shape)} dimensions {shape}; {_EXPECTED}; reshape it first.")
    if not floating:
        raise AnisoscopeError(f"{name!r} holds {dtype}; {_EXPECTED}; convert it first.")
    if 0 in shape:
        raise AnisoscopeError(f"{name!r} is empty, of shape {shape}; {_EXPECTED}.")
