"""Build a model from a source: configuration, class and weights, with an error if weights would stay random.

Files of weights are safetensors, Lightning's `.ckpt` and plain state dicts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import pathlib
import pickle
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.errors import AnisoscopeError
from anisoscope.models import source as sources
from anisoscope.models.attention_variant import refuse_unhonoured, register_models, register_variants
from anisoscope.models.placement import check_fits
from anisoscope.models.source import WEIGHT_PATTERNS, ModelSource, architecture, hub_reachable, parse_model

_INSIDE = ("state_dict", "model_state_dict", "model", "module", "model_state", "weights")  # keys of a trainer's file
_STEPS = ("global_step", "step", "iter_num", "iteration", "steps", "num_updates")
_WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")  # of torch.compile and FSDP
_KNOWN = (argparse.Namespace, pathlib.PosixPath)  # safe to unpickle, and common among hyperparameters
_FOREIGN = ("Unsupported global", "Unsupported class", "GLOBAL", "Trying to call", "add_safe_globals")  # torch's errors
_OF_HEADS = re.compile(r"(?:^|_)heads?$")
_OF_BLOCKS = re.compile(r"layers?$|depths?$|blocks?$")  # fields that count blocks
MOST_BLOCKS = 10_000
_TRIED = 64  # parameter names used to find the prefix of names in a file
_NEXT_TOKEN = re.compile(r"LMHead|CausalLM")
_HEADS = ("AutoModelForSpeechSeq2Seq", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForCausalLM")
# Heads of models that read no text: what they were trained to say of a sound or a picture.
_MEDIA_HEADS = (
    "SpeechSeq2Seq",
    "CTC",
    "ImageClassification",
    "AudioClassification",
    "MaskedImageModeling",
    "PreTraining",
)
# Parts that no site reads: if they are missing, that is noted and no error.
UNUSED = ("pooler", "position_ids", "seq_relationship")
HEADLESS = "the output head is not in the checkpoint; the model was loaded without one"


class DamagedFile(AnisoscopeError):
    """A file of weights that is truncated, damaged or of another format."""


def read_state(path: Path, *, device: str = "cpu") -> dict[str, Tensor]:
    """The weights of a file by name (on `meta` only shapes), read with `weights_only`, without wrappers' names."""
    weights = _weights(_contents(path, device=device)[0])
    if not weights:
        raise AnisoscopeError(f"{str(path)!r} holds no weights by name; expected a state_dict or a Lightning .ckpt.")
    return {_WRAPPERS.sub("", name): value for name, value in weights.items()}


def step_of_file(path: Path) -> int | None:
    """The step stated in a checkpoint file; None if there is none or the file cannot be read."""
    try:
        content, about = _contents(path, device="meta")
        return _step(about) if _weights(content) else None
    except Exception:  # damaged bytes can raise anything; loading the weights reports it
        return None


def damaged_file(folder: Path) -> Path | None:
    """The first damaged or incomplete file of weights in a folder, or None."""
    for path in sorted(p for pattern in WEIGHT_PATTERNS[:2] for p in folder.glob(pattern)):
        try:
            _contents(path, device="meta")
        except DamagedFile:
            return path
        except AnisoscopeError:
            continue  # not damaged, but refused for another reason
    return None


def _contents(path: Path, *, device: str) -> tuple[Any, Mapping[str, Any]]:
    """The content of a file of weights, and its metadata."""
    if path.suffix != ".safetensors":
        found = _unpickled(path, device=device)
        return found, found
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
        warnings.simplefilter("ignore")  # damaged bytes cause warnings about the pickle protocol
        try:
            return torch.load(path, map_location=device, weights_only=True)
        except MemoryError:
            raise  # not a fault of the file
        except Exception as error:  # unpickling arbitrary bytes can raise anything
            if isinstance(error, PermissionError | FileNotFoundError):
                raise AnisoscopeError(f"{str(path)!r} cannot be read ({error.strerror}); check it.") from error
            if isinstance(error, pickle.UnpicklingError) and any(text in str(error) for text in _FOREIGN):
                raise AnisoscopeError(
                    f"{str(path)!r} holds more than weights, and unpickling that would run its code; save its "
                    "state_dict alone."
                ) from error
            raise DamagedFile(f"{str(path)!r} is no file of weights, or only part of one; copy it again.") from error


def _weights(content: Any) -> dict[str, Tensor]:
    """The state dict in the content of a file: the content itself, or an entry of a trainer's checkpoint."""
    if not isinstance(content, Mapping):
        return {}
    inside = next((content[name] for name in _INSIDE if isinstance(content.get(name), Mapping)), None)
    own = {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)}
    return _weights(inside) or own


def _step(about: Mapping[str, Any]) -> int | None:
    for value in map(about.get, _STEPS):
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta and not value.is_floating_point():
            return int(value)
        if (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, str) and value.isdecimal()):
            return int(value)
    return None


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded."""

    device: torch.device
    dtype: torch.dtype | None = None
    seed: int = 0
    trust_remote_code: bool = False
    device_map: str | None = None
    with_head: bool = True
    any_head: bool = False  # also heads without logits over a vocabulary, of models that read sounds or pictures


def hub_options(source: ModelSource, wanted: LoadOptions) -> dict[str, Any]:
    """The keyword arguments of every `from_pretrained` call for a source."""
    local = source.kind != "hub" or not hub_reachable()
    options: dict[str, Any] = {"trust_remote_code": wanted.trust_remote_code, "local_files_only": local}
    options |= {"gguf_file": source.path.name} if source.kind == "gguf" and source.path is not None else {}
    return options | ({"revision": source.revision or "main"} if source.kind == "hub" else {})


def read_config(source: ModelSource, *, options: dict[str, Any], notes: list[str]) -> Any:
    """The configuration of a source, with the overrides applied."""
    from transformers import AutoConfig

    register_variants()
    if source.kind == "config":
        return fresh_config(architecture(source.name), source.overrides)
    if source.kind == "folder" and (inferred := _without_model_type(Path(source.place), notes)):
        return inferred
    config = AutoConfig.from_pretrained(source.place, **options)
    register_models(config)
    refuse_unhonoured(config)
    if not source.overrides:
        return config
    fields = config.to_dict() | _fields(config, source.overrides)
    if "num_hidden_layers" in source.overrides:
        fields.pop("layer_types", None)  # one entry per layer, recomputed for the new number of layers
    return type(config).from_dict(fields)


def fresh_config(model_type: str, overrides: dict[str, Any]) -> Any:
    """The default configuration of an architecture with some fields changed.

    >>> fresh_config("gpt2", {"hidden_size": 32, "n_head": 2}).n_embd
    32
    """
    from transformers import CONFIG_MAPPING

    register_variants()
    kind = CONFIG_MAPPING[model_type]
    config = kind(**_fields(kind(), overrides))
    register_models(config)
    return config


def check_sizes(fields: Mapping[str, Any], largest: float = math.inf) -> None:
    """Raise an error for more blocks than any model has, a number above `largest`, or fewer heads than none."""
    for name, value in fields.items():
        parts = value if isinstance(value, (list, tuple)) else [value]
        whole = [part for part in parts if isinstance(part, (int, float)) and not isinstance(part, bool)]
        most = MOST_BLOCKS if _OF_BLOCKS.search(name) else largest
        if whole and max(max(whole), sum(whole) if most == MOST_BLOCKS else 0) > most:
            raise AnisoscopeError(f"{name} is {str(value)[:40]}; expected at most {most:,}.")
        if whole and min(whole) < 0 and _OF_HEADS.search(name):
            raise AnisoscopeError(f"{name} is {str(value)[:40]}; expected at least 1.")


def _fields(config: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """Overrides by the configuration's own field names; synonyms such as hidden_size are translated."""
    check_sizes(overrides, largest=1 << 40)
    synonyms = getattr(type(config), "attribute_map", {})
    known = {*config.to_dict(), *synonyms}
    for key in overrides:
        if key not in known:
            raise sources.unknown_of_many(f"field of {config.model_type}", key, known, all_of="config.json lists them")
    return {synonyms.get(key, key): value for key, value in overrides.items()}


def _without_model_type(folder: Path, notes: list[str]) -> Any | None:
    """A configuration without model type, which is inferred from its architecture or the names of its weights."""
    from transformers import CONFIG_MAPPING

    file = folder / "config.json"
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise AnisoscopeError(f"{str(file)!r} is not JSON ({error}); copy the model again.") from error
    if isinstance(fields, dict):
        check_sizes(fields)
    if not isinstance(fields, dict) or fields.get("model_type"):
        return None
    kind = _guessed_type(fields, folder)
    if kind is None:
        raise AnisoscopeError(
            f'{str(file)!r} does not say its model type; add a line such as "model_type": "bert" to it.'
        )
    notes.append(f"config.json names no model_type; taken for {kind} by the names of its class, weights or folder")
    return CONFIG_MAPPING[kind].from_dict(fields)


def _guessed_type(fields: dict[str, Any], folder: Path) -> str | None:
    """The model type by the stated class, the first part of most weight names, or the longest in the folder's name."""
    import transformers
    from transformers import CONFIG_MAPPING

    stated = getattr(transformers, (fields.get("architectures") or [""])[0] or "", None)
    if kind := getattr(getattr(stated, "config_class", None), "model_type", None):
        return str(kind)
    files = [file for pattern in WEIGHT_PATTERNS[:2] for file in sorted(folder.glob(pattern))]
    first = [name.partition(".")[0] for name in read_state(files[0], device="meta")] if files else []
    common = max(set(first), key=first.count) if first else ""
    if common in CONFIG_MAPPING:
        return common
    found = [kind for kind in CONFIG_MAPPING if len(kind) > 3 and kind in folder.name.lower().replace("-", "_")]
    return max(found, key=len) if found else None


def classes(config: Any, *, with_head: bool, remote: bool = False, any_head: bool = False) -> list[Any]:
    """Classes to try, in order: those with a head that the checkpoint may contain, then the bare model.

    Heads have logits over a vocabulary; with `any_head` those of sounds and pictures count, too.
    """
    import transformers

    heads = [getattr(transformers, name) for name in _HEADS]
    if remote and getattr(config, "auto_map", None):
        usable = [auto for auto in heads if auto.__name__ in config.auto_map]
        return [*usable, transformers.AutoModel] if with_head else [transformers.AutoModel]
    named = {auto: class_of(auto, config).__name__ for auto in heads if type(config) in auto._model_mapping}
    stated = (getattr(config, "architectures", None) or [""])[0]
    alone = type(config) not in transformers.AutoModel._model_mapping  # such as vision-encoder-decoder
    if (stated.endswith("EncoderModel") or alone) and hasattr(transformers, stated):
        return [getattr(transformers, stated)]
    if not with_head:
        return [transformers.AutoModel]
    if any_head and not alone and (head := _media_head(config, stated)) is not None:
        return [head, transformers.AutoModel]
    exact = [auto for auto, name in named.items() if name == stated]
    order = list(named)[::-1] if getattr(config, "is_decoder", False) else list(named)
    if stated and hasattr(transformers, stated) and not stated.endswith("ForPreTraining"):
        order = []  # the bare model, or a head without logits over a vocabulary
    return [*(exact[:1] or order), transformers.AutoModel]


def _media_head(config: Any, stated: str) -> Any | None:
    """The class with a head for sounds or pictures: as stated, else the first that is known; None for text."""
    import transformers

    bare = class_of(transformers.AutoModel, config)
    if getattr(bare, "main_input_name", "input_ids") == "input_ids":
        return None
    if (named := getattr(transformers, stated, None)) is not None:
        return None if named is bare else named
    autos = [getattr(transformers, f"AutoModelFor{name}") for name in _MEDIA_HEADS]
    return next((auto for auto in autos if type(config) in auto._model_mapping), None)


def class_of(auto: Any, config: Any) -> Any:
    """The class that an auto class resolves to for this configuration; another class is returned unchanged."""
    mapping = getattr(auto, "_model_mapping", None)
    if mapping is None:
        return auto
    if type(config) not in mapping:
        raise AnisoscopeError(f"{auto.__name__} knows no {config.model_type}; give another architecture.")
    kind = mapping[type(config)]
    return kind[0] if isinstance(kind, tuple) else kind


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generator and restore it, so that parts a checkpoint lacks (a pooler) are reproducible."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def fresh_model(config: Any, wanted: LoadOptions) -> nn.Module:
    """A model with random weights determined by the seed; the state of the global generator is restored."""
    auto = classes(config, with_head=wanted.with_head, any_head=wanted.any_head)[0]
    check_fits(_size(auto, config), dtype=wanted.dtype or torch.float32, device=wanted.device)
    with seeded(wanted.seed):
        build = auto.from_config if hasattr(auto, "from_config") else auto._from_config
        model: nn.Module = build(config, dtype=torch.float32)
    return with_own_loss(model)


def with_own_loss(model: Any) -> Any:
    """Set the loss that the model was trained with, by `objective` in the configuration of models trained here.

    It is also set for classes such as GPT2LMHeadModel, from whose names transformers does not derive it.
    """
    if getattr(getattr(model, "config", None), "objective", None) == "masked":
        model.loss_type = "ForMaskedLM"
    elif getattr(model, "loss_type", "") is None and _NEXT_TOKEN.search(type(model).__name__):
        model.loss_type = "ForCausalLM"  # what transformers falls back to, with a warning at every load
    return model


def _size(auto: Any, config: Any, *, remote: bool = False) -> int:
    """Number of parameters, counted on the meta device; 0 if the class cannot be built there."""
    build = auto.from_config if hasattr(auto, "from_config") else auto._from_config
    options = {"trust_remote_code": True} if remote else {}
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            return sum(p.numel() for p in build(config, **options).parameters())
    except (RuntimeError, NotImplementedError, ValueError, ImportError):
        return 0


def stored_model(
    source: ModelSource, config: Any, wanted: LoadOptions, *, options: dict[str, Any], notes: list[str]
) -> nn.Module:
    """The model with the checkpoint's weights, including a stored head; missing weights of blocks are an error."""
    if source.kind == "gguf":
        notes.append("the quantised weights of the GGUF file were expanded to full precision")
    heads = {"with_head": wanted.with_head, "any_head": wanted.any_head}
    candidates = classes(config, **heads, remote=wanted.trust_remote_code)
    if wanted.device_map is None and not getattr(config, "quantization_config", None):
        stored = getattr(config, "dtype", None)
        stored = stored if isinstance(stored, torch.dtype) else torch.float32
        dtype = wanted.dtype or (torch.float32 if wanted.device.type == "cpu" else stored)
        size = _size(candidates[-1], config, remote=wanted.trust_remote_code)
        check_fits(size, dtype=dtype, device=wanted.device)
    extra: dict[str, Any] = {"config": config, "dtype": wanted.dtype or "auto", "output_loading_info": True, **options}
    extra |= {"device_map": wanted.device_map} if wanted.device_map is not None else {}
    for auto in candidates:
        with seeded(wanted.seed):
            model, info = auto.from_pretrained(source.place, **extra)
        absent = sorted(info["missing_keys"])
        missing = [key for key in absent if not any(part in key for part in UNUSED)]
        if not missing:
            notes += [HEADLESS] if auto is not candidates[0] else []
            if absent:
                notes.append(f"{len(absent)} tensors that no site looks at are not in the checkpoint ({absent[0]}, …)")
            surplus = sorted(key for key in info["unexpected_keys"] if not any(part in key for part in UNUSED))
            if surplus:
                shown = ", ".join(surplus[:3]) + (", …" if len(surplus) > 3 else "")
                lost = f"{len(surplus)} tensors of the checkpoint have no place in {type(model).__name__}"
                notes.append(f"{lost}: {shown}")
            return with_own_loss(model)
    total = len(model.state_dict())
    raise AnisoscopeError(
        f"{len(missing)} of {total} weight tensors of {source.spec!r} are not in the checkpoint (first: {missing[0]}) "
        f"and would be random; check that config.json belongs to these weights."
    )


def adapted_model(source: ModelSource, wanted: LoadOptions, notes: list[str]) -> tuple[nn.Module, Any]:
    """The base model that an adapter names, with the adapter merged into its weights."""
    if importlib.util.find_spec("peft") is None:
        raise AnisoscopeError(f"{source.spec!r} is a PEFT adapter, which needs `peft`; install it: pip install peft.")
    from peft import PeftModel

    base = base_source(source)
    for with_head in (wanted.with_head, not wanted.with_head):  # the adapter's names fit one of the two
        trial = replace(wanted, with_head=with_head)
        base_notes: list[str] = []
        options = hub_options(base, trial)
        config = read_config(base, options=options, notes=base_notes)
        model = stored_model(base, config, trial, options=options, notes=base_notes)
        adapted = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with contextlib.suppress(ValueError, KeyError, RuntimeError, AttributeError):
                adapted = PeftModel.from_pretrained(model, source.place)
        # these are signs that the adapter's names are not those of this class
        if adapted is not None and not any("missing adapter keys" in str(w.message) for w in caught):
            merged = hasattr(adapted.base_model, "merge_and_unload")
            how = "was merged into the weights" if merged else "cannot be merged and stays around the model"
            notes.extend([*base_notes, f"adapter {source.name} on {base.name}", f"the adapter {how}"])
            return (adapted.merge_and_unload() if merged else adapted), config
    raise AnisoscopeError(
        f"the adapter {source.spec!r} does not fit its base {base.spec!r}: the weights it changes are not there."
    )


def base_source(source: ModelSource) -> ModelSource:
    """The base model of an adapter: a path relative to the working directory or the adapter's folder, or a hub id."""
    about = json.loads((Path(source.place) / "adapter_config.json").read_text(encoding="utf-8"))
    name = about.get("base_model_name_or_path")
    if not name:
        raise AnisoscopeError(f"the adapter {source.spec!r} does not name its base model in adapter_config.json.")
    beside = Path(source.place) / name
    spec = str(beside) if not Path(name).expanduser().exists() and beside.exists() else name
    try:
        base = parse_model(spec)
    except AnisoscopeError as error:
        raise AnisoscopeError(f"the base model of the adapter {source.spec!r} cannot be found: {error}") from error
    return replace(base, revision=base.revision or about.get("revision")) if base.kind == "hub" else base


def prefix_of(names: Collection[str], wanted: Collection[str]) -> str:
    """The prefix of the model's parameter names in a file: the one with which most of them are found.

    >>> prefix_of(["module.net.a.weight", "module.net.b.weight", "loss.c"], ["a.weight", "b.weight"])
    'module.net.'
    """
    some = sorted(wanted, key=len, reverse=True)[:_TRIED]
    found = [name[: -len(suffix)] for suffix in some for name in names if name.endswith(suffix)]
    prefixes = {prefix for prefix in found if not prefix or prefix.endswith(".")}
    there = set(names)
    return max(sorted(prefixes), key=lambda p: sum(p + name in there for name in wanted), default="")


def model_of_state(source: ModelSource, config: Any, wanted: LoadOptions, *, notes: list[str]) -> nn.Module:
    """A model of the architecture with the weights of a file; names that do not match are an error.

    Heads without logits over a vocabulary (a classifier), and weights outside the model, are left out with a note.
    """
    path = Path(str(source.path))
    tensors = read_state(path)
    misfits: list[tuple[str, list[str], list[str]]] = []
    candidates = classes(config, with_head=wanted.with_head, any_head=wanted.any_head)
    for auto in candidates:
        model, missing, surplus, beside = _fit(class_of(auto, config), tensors, config, wanted)
        if not missing and not surplus:
            if beside:
                notes.append(f"{len(beside)} tensors beside the model were left out ({_some(beside)})")
            if len(candidates) > 1 and auto is candidates[-1]:
                notes.append(HEADLESS)
            return with_own_loss(model)
        misfits.append((type(model).__name__, missing, surplus))
    name, missing, surplus = min(misfits, key=lambda misfit: len(misfit[1]) + len(misfit[2]))
    reasons = [f"the file lacks {_some(missing)}"] if missing else []
    reasons += [f"the architecture has no place for {_some(surplus)}"] if surplus else []
    raise AnisoscopeError(
        f"the weights of {str(path)!r} do not fit {name}: {' and '.join(reasons)}; check --architecture."
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def _fit(
    kind: Any, tensors: Mapping[str, Tensor], config: Any, wanted: LoadOptions
) -> tuple[nn.Module, list[str], list[str], list[str]]:
    """A model of a class with the weights; names that it lacks, that have no place in it, and that are beside it."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        shapes = {name: tuple(value.shape) for name, value in kind(config).state_dict().items()}
    prefix = prefix_of(tensors, shapes)
    weights = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    for name, value in weights.items():
        if name in shapes and shapes[name] != tuple(value.shape) and not _idle(name):
            raise AnisoscopeError(
                f"{name} has the shape {list(value.shape)} in the file and {list(shapes[name])} in {kind.__name__}; "
                "check the sizes of --architecture."
            )
    extra: dict[str, Any] = {} if wanted.device_map is None else {"device_map": wanted.device_map}
    dtype = wanted.dtype or next((t.dtype for t in weights.values() if t.is_floating_point()), torch.float32)
    with seeded(wanted.seed):
        model, info = kind.from_pretrained(
            None, config=config, state_dict=weights, output_loading_info=True, dtype=dtype, **extra
        )
    surplus = [name for name in sorted(info["unexpected_keys"]) if not _idle(name)]
    body = f"{model.base_model_prefix}."
    beside = [name for name in surplus if not name.startswith(body)] if any(n.startswith(body) for n in shapes) else []
    missing = [name for name in sorted(info["missing_keys"]) if not _idle(name)]
    outside = [name for name in tensors if not name.startswith(prefix) and not _idle(name)]
    return model, missing, [name for name in surplus if name not in beside], beside + outside


def _idle(name: str) -> bool:
    """Whether a tensor belongs to a part that no site reads, or is a constant that older versions stored."""
    return any(part in name for part in UNUSED) or name.endswith((".attn.bias", ".attn.masked_bias", "inv_freq"))
