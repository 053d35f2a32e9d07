"""Parse a MODEL argument: a folder, a hub id, a GGUF file, an architecture, an adapter, or a file of rows."""

from __future__ import annotations

import difflib
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

import numpy as np
import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, missing_path, refuse_special

Kind = Literal["folder", "hub", "gguf", "config", "rows", "peft", "state"]
ROW_SUFFIXES = (".npy", ".safetensors")
STATE_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin", "*.pt", "*.pth")
_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")
_OVERRIDES = re.compile(r"(?P<name>.+?):(?P<values>\w+=.*)")
SHAPE = "shape:"  # a model of which sizes alone are known, for `--dry-run`
_EXAMPLE = "name=value pairs, such as resnet:embedding_size=16,depths=[1,2]"
_SAYS_LITTLE = re.compile(r"(hf_?)?models?|final|best|last|latest|base|output|(checkpoint|step|epoch)?[-_]?\d+")
CHECKPOINT = re.compile(
    r"(?:checkpoint|ckpt|global[-_]?step|step|iter(?:ation)?|update|epoch)[-_=]?\d+[kKM]?", re.IGNORECASE
)
_PICKLED = re.compile("pickle|Python objects")
_EXPECTED = "expected floating-point rows of shape (rows, width)"
# files that a trainer writes beside the weights of a model
TRAINER_FILES = re.compile(r"(optimi[sz]er|scheduler|scaler|training_args|rng_state|random_states|monitor(-\d+)?$).*")
# Common names of architectures that have another name in transformers.
ALIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "byt5": ("t5", {"vocab_size": 384, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "gpt-j": ("gptj", {}),
    "pythia": ("gpt_neox", {}),
    "llama2": ("llama", {}),
    "tinyllama": ("llama", {}),
    "smollm2": ("llama", {}),
}


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from; `overrides` change the configuration of a model with random weights."""

    spec: str
    kind: Kind
    name: str
    path: Path | None = None
    revision: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """The first argument of `from_pretrained`: a folder or a hub id."""
        if self.path is None:
            return self.spec.partition("@")[0] if self.kind == "hub" else self.name
        return str(self.path.parent if self.path.is_file() else self.path)


def parse_model(spec: str, *, random_init: bool = False, state: bool = False) -> ModelSource:
    """The source that `spec` names: an existing path, else an architecture (with `random_init`), else a hub id.

    With `state` it may be a file of weights, whose architecture is given separately.

    >>> parse_model("org/name@step1000").revision
    'step1000'
    >>> parse_model("resnet:depths=[1,2],embedding_size=16", random_init=True).overrides
    {'depths': [1, 2], 'embedding_size': 16}
    """
    if not spec.strip():
        raise AnisoscopeError("the name of the model is empty; give a folder, a hub id, or a file of rows.")
    if spec.startswith(SHAPE):
        raise AnisoscopeError(f"{spec!r} is a shape without weights, of which a plan alone can be made; add --dry-run.")
    name, overrides = _split_overrides(spec) if random_init else (spec, {})
    path = Path(name).expanduser()
    if random_init and (known := _architecture(name)) and not (path / "config.json").exists():
        return ModelSource(spec, "config", name, overrides={**known[1], **overrides})
    if state and path.is_file() and path.suffix in STATE_SUFFIXES:
        return ModelSource(spec, "state", short_name(path), path=path)
    refuse_special(path)
    if path.exists():
        return _local_source(path, spec, overrides)
    if looks_like_path(name):
        raise missing_path(path)
    if not _HUB.fullmatch(name):
        raise AnisoscopeError(
            f"{spec!r} is no model: expected a folder, a hub id (org/name or org/name@revision), a .gguf, .npy or "
            f".safetensors file, or an architecture such as gpt2 with --random-init."
        )
    hub, _, revision = name.partition("@")
    return ModelSource(name, "hub", hub, revision=revision or None, overrides=overrides)


def _split_overrides(spec: str) -> tuple[str, dict[str, Any]]:
    match = _OVERRIDES.fullmatch(spec)
    if not match:
        name, colon, rest = spec.partition(":")
        if colon and not Path(spec).expanduser().exists() and _architecture(name) is not None:
            raise AnisoscopeError(f"{spec!r} has {rest!r} after {name!r}; expected {_EXAMPLE}.")
        return spec, {}
    pairs = [piece.partition("=") for piece in _pieces(match["values"], spec)]
    for key, sign, text in pairs:
        if not (key.strip().isidentifier() and sign and text.strip()):
            raise AnisoscopeError(f"{spec!r} has {key + sign + text!r}; expected {_EXAMPLE}.")
    names = [key.strip() for key, _, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise AnisoscopeError(f"{spec!r} has {twice[0]} twice; give it once.")
    return match["name"], {key.strip(): _value(text.strip(), spec) for key, _, text in pairs}


def _pieces(text: str, spec: str) -> list[str]:
    """Split at commas outside brackets."""
    pieces, depth = [""], 0
    for letter in text:
        depth += (letter in "[(") - (letter in "])")
        if depth < 0:
            break
        if letter == "," and not depth:
            pieces.append("")
        else:
            pieces[-1] += letter
    if depth:
        raise AnisoscopeError(f"{spec!r} has brackets that do not match; expected {_EXAMPLE}.")
    return pieces


def _value(text: str, spec: str = "") -> Any:
    """The value of an override, converted to the type it looks like.

    >>> [_value(t) for t in ("4", "1e-3", "true", "none", "relu", "[1,[2,3]]")]
    [4, 0.001, True, None, 'relu', [1, [2, 3]]]
    """
    if text[:1] + text[-1:] in ("[]", "()"):
        return [_value(piece.strip(), spec) for piece in _pieces(text[1:-1], spec) if piece.strip()]
    constants = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in constants:
        return constants[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _architecture(name: str) -> tuple[str, dict[str, Any]] | None:
    """The transformers model type of a name, and the overrides that the name implies; None if it is unknown."""
    from transformers import CONFIG_MAPPING

    if name in CONFIG_MAPPING:
        return name, {}
    if name.lower() in ALIASES:
        return ALIASES[name.lower()]
    spelled = name.lower().replace("-", "_")
    return (spelled, {}) if spelled in CONFIG_MAPPING else None


def architecture(name: str) -> str:
    """The transformers model type of a name; an unknown one is an error that suggests similar names."""
    known = _architecture(name)
    if known is None:
        from transformers import CONFIG_MAPPING

        names = [*CONFIG_MAPPING, *ALIASES]
        raise unknown_of_many("architecture", name, names, all_of="they are the model types of transformers")
    return known[0]


def unknown_of_many(what: str, name: str, known: Iterable[str], *, all_of: str) -> AnisoscopeError:
    """An error for a name that is not in a long list: similar names, and where the whole list is found.

    >>> str(unknown_of_many("field", "widht", ["width", "depth"], all_of="config.json lists them"))
    "unknown field 'widht'; did you mean 'width'? Nearest: width, depth (2 in all: config.json lists them)."
    """
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, n=5, cutoff=0.0)
    hint = f"; did you mean {near[0]!r}?" if difflib.get_close_matches(name, near[:1], cutoff=0.5) else "."
    return AnisoscopeError(f"unknown {what} {name!r}{hint} Nearest: {', '.join(near)} ({len(names)} in all: {all_of}).")


def looks_like_path(name: str) -> bool:
    """Whether a name that is not an existing file was probably meant as a path."""
    suffixes = (*ROW_SUFFIXES, *STATE_SUFFIXES, ".gguf", ".json", ".npz")
    parent = Path(name).parent
    return (
        name.startswith((".", "/", "~"))
        or "\\" in name
        or name.endswith((*suffixes, "/"))
        or (name.count("/") > 1 and "@" not in name)
        or (str(parent) != "." and parent.is_dir())
    )


def _local_source(path: Path, spec: str, overrides: dict[str, Any]) -> ModelSource:
    name = short_name(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return ModelSource(spec, "gguf", name, path=path)
        if path.suffix == ".safetensors" and (path.parent / "config.json").exists():
            raise AnisoscopeError(
                f"{spec!r} is the weight file of a model, not rows; give its folder {str(path.parent)!r} "
                "(its tables: --sites embed_weight,unembed)."
            )
        if path.suffix in ROW_SUFFIXES:
            return ModelSource(spec, "rows", name, path=path)
        if path.name == "config.json":
            return ModelSource(spec, "folder", short_name(path.parent), path=path.parent, overrides=overrides)
        if path.suffix in STATE_SUFFIXES:
            raise AnisoscopeError(
                f"{spec!r} is a file of weights, which does not say what model it is of; give its folder with "
                "config.json, `anisoscope sweep` with --architecture, or the built module to anisoscope.measure."
            )
        raise AnisoscopeError(
            f"{spec!r} is a {path.suffix or 'suffixless'} file, which is no model; expected a model folder, a .gguf "
            f"file, or rows as .npy or .safetensors."
        )
    files = [file for pattern in WEIGHT_PATTERNS for file in path.glob(pattern)]
    weights = {file.name for file in files if not TRAINER_FILES.fullmatch(file.stem)}
    adapted = any(name.startswith("adapter_") for name in weights) and not (path / "config.json").exists()
    adapted |= all(name.startswith("adapter_") for name in weights)
    if (path / "adapter_config.json").exists() and adapted:
        return ModelSource(spec, "peft", name, path=path)
    if (path / "config.json").exists():
        return ModelSource(spec, "folder", name, path=path, overrides=overrides)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelSource(spec, "gguf", short_name(ggufs[0]), path=ggufs[0])
    found = sorted(p.name + ("/" if p.is_dir() else "") for p in path.iterdir())
    shown = ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "") if found else "nothing"
    inside = sorted(p.parent for p in path.glob("*/config.json"))
    hint = f" A model lies in {str(inside[0])!r}." if inside else ""
    if sum(name.endswith(".gguf") for name in found) > 1:
        hint = " Name one of the .gguf files."
    elif not hint and any(name.endswith(STATE_SUFFIXES) for name in found):
        hint = " A module of no library cannot be loaded from its weights: build it and call anisoscope.measure."
    raise AnisoscopeError(
        f"the folder {str(path)!r} is not a model: it holds {shown}, but no config.json, no adapter_config.json with "
        f"its weights, and no single .gguf file.{hint}"
    )


def is_checkpoint(name: str) -> bool:
    """Whether a folder's name is that of a training checkpoint, such as checkpoint-500.

    >>> is_checkpoint("checkpoint-500"), is_checkpoint("step1000"), is_checkpoint("bert-2")
    (True, True, False)
    """
    return CHECKPOINT.fullmatch(name) is not None


def short_name(path: Path) -> str:
    """A display name of a local model; the parent folder is added if the last part is not specific.

    >>> short_name(Path("runs/tiny/checkpoint-500")), short_name(Path("bert_ft")), short_name(Path("m/model"))
    ('tiny/checkpoint-500', 'bert_ft', 'm/model')
    """
    parts = path.resolve().parts
    for part in reversed(parts):
        if part.startswith("models--"):  # a snapshot inside the hub's cache
            return part.removeprefix("models--").replace("--", "/")
    last = path.stem if path.suffix == ".gguf" else parts[-1]
    says_little = _SAYS_LITTLE.fullmatch(last)
    return f"{parts[-2]}/{last}" if says_little and len(parts) > 2 else last


def hub_reachable(timeout: float = 4.0) -> bool:
    """Whether the hub can be reached; tested once, so that a machine without network does not wait for retries."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    target = urlparse(proxy or os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    answers: list[bool] = []

    def connect() -> None:
        try:
            port = target.port or (80 if target.scheme == "http" else 443)
            socket.create_connection((target.hostname or "", port), timeout=timeout).close()
            answers.append(True)
        except OSError:
            answers.append(False)

    # in a thread, because a DNS lookup can hang far longer than the timeout of the connection
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout)
    return bool(answers and answers[0])


@dataclass(frozen=True)
class StoredRows:
    """A 2-D array of a file; slices of its rows are read as float32 or float64 when they are asked for.

    Nothing stays mapped: pages of a memory map count as memory of the process as soon as they were read.
    """

    shape: tuple[int, int]
    dtype: torch.dtype  # of the rows as they are read
    _read: Callable[[slice], Tensor]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: slice) -> Tensor:
        return self._read(part).to(self.dtype)


def load_rows(path: str | Path) -> dict[str, Tensor]:
    """The 2-D floating-point arrays of a file by name; NaN values are kept."""
    return {name: rows[:] for name, rows in stored_rows(path).items()}


def stored_rows(path: str | Path) -> dict[str, StoredRows]:
    """As `load_rows`, before anything is read but shapes and types."""
    path = Path(path).expanduser()
    refuse_special(path)
    if not path.exists():
        raise missing_path(path)
    if path.suffix == ".safetensors":
        return _safetensors_rows(path)
    if path.suffix != ".npy":
        raise AnisoscopeError(f"{str(path)!r} is no file of rows; expected one of {', '.join(ROW_SUFFIXES)}.")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError, OverflowError) as error:
        reason = "it holds pickled objects" if _PICKLED.search(str(error)) else str(error).splitlines()[0]
        if isinstance(error, OverflowError) or "<ast." in reason:  # an impossible shape; an object of the parser
            reason = "its header is damaged"
        raise AnisoscopeError(f"{str(path)!r} cannot be read as rows ({reason}); {_EXPECTED}.") from error
    shape, kind = array.shape, array.dtype
    if len(shape) != 2:
        raise AnisoscopeError(f"{str(path)!r} has {len(shape)} dimensions {shape}; {_EXPECTED}; reshape it first.")
    if kind.kind != "f":
        raise AnisoscopeError(f"{str(path)!r} holds {kind}; {_EXPECTED}; convert it first.")
    if 0 in shape:
        raise AnisoscopeError(f"{str(path)!r} is empty, of shape {shape}; {_EXPECTED}.")
    read_as: Any = np.float32 if kind.itemsize <= 4 else np.float64

    def read(part: slice) -> Tensor:
        return torch.from_numpy(np.load(path, mmap_mode="r")[part].astype(read_as, order="C"))

    return {path.stem: StoredRows(shape, torch.float32 if kind.itemsize <= 4 else torch.float64, read)}


def _safetensors_rows(path: Path) -> dict[str, StoredRows]:
    from safetensors import SafetensorError, safe_open

    rows: dict[str, StoredRows] = {}
    seen: list[str] = []

    def read(part: slice, name: str) -> Tensor:
        with safe_open(path, framework="pt") as file:
            return file.get_slice(name)[part].clone()  # of its own, not a view of the file

    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a handle, not a mapping
                shape, kind = tuple(file.get_slice(name).get_shape()), file.get_slice(name).get_dtype()
                seen.append(f"{name} {kind}{list(shape)}")
                if len(shape) == 2 and min(shape) and kind in ("F16", "BF16", "F32", "F64"):
                    dtype = torch.float64 if kind == "F64" else torch.float32
                    rows[name] = StoredRows(shape, dtype, partial(read, name=name))
    except (SafetensorError, OSError) as error:
        raise AnisoscopeError(f"{str(path)!r} is not a safetensors file ({error}); write it again.") from error
    if not rows:
        shown = ", ".join(seen[:6]) or "nothing"
        raise AnisoscopeError(f"{str(path)!r} holds no rows: found {shown}; {_EXPECTED}.")
    return rows
