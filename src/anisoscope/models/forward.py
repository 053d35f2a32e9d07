"""Calling a model: the arguments of its forward by name, wrappers around it, a pass over inputs, and its modality."""

from __future__ import annotations

import contextlib
import inspect
import re
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from anisoscope.errors import AnisoscopeError
from anisoscope.results.modality import CHARACTERS, MODALITIES, SPEECH, TEXT, Modality

# Argument names of model inputs; the first one that is given identifies a context.
CONTENT = tuple(dict.fromkeys(name for modality in MODALITIES.values() for name in modality.medium.inputs))
MEDIA = tuple(name for name in CONTENT if name not in TEXT.medium.inputs)
SOUND = SPEECH.medium.inputs
PIXEL_MASK = "pixel_mask"  # [B, H, W], nonzero where a pixel belongs to the image
# Additive masks hide positions at or below this value in every precision (the smallest float16 is -65504).
MASKED = -9999.0
_FLOATS = CONTENT[1:]  # all but token ids
# Names of query and key projections; the name "attention" alone is ambiguous, since channel gates have it, too.
_PROJECTIONS = re.compile(
    r"^((to_|c_|W|projection_)?(q|k|qk|kv|qkv|query|key|query_key_value|attn)(_proj|_lin)?|queries_.*)$"
)
_CHARACTER_FAMILIES = ("canine", "byt5")
_CONVOLUTION_FAMILIES = ("cvt",)  # has attention between convolutions; the literature counts it as convolutional
_CHARACTER_TOKENIZERS = ("ByteTokenizer", "ByT5Tokenizer", "CanineTokenizer")
_BYT5_WORDS = 384  # three special tokens, 256 bytes, 125 sentinels
_TARGETS = ("y", "label", "target", "targets")  # what a user's own forward may call its labels
_PAIRS = re.compile(r"edge|adj|mask")
_PLACED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_signatures: weakref.WeakKeyDictionary[types.FunctionType, inspect.Signature] = weakref.WeakKeyDictionary()
_PLACEHOLDERS = re.compile(r"\[(PAD|UNK|CLS|SEP|MASK|BOS|EOS|unused\d+)\]|<[^<>]+>")


FSDP = "FullyShardedDataParallel"  # the first version of FSDP
ENGINE = "DeepSpeedEngine"


def original(model: nn.Module) -> nn.Module:
    """The module that torch.compile wraps, or the model itself."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile made something of a model or of a part of it."""
    return any(original(part) is not part or part._compiled_call_impl is not None for part in model.modules())


@contextlib.contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run a model and its parts as they are, also where they were compiled; what was compiled stays."""
    with torch.compiler.set_stance("force_eager") if is_compiled(model) else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def without_wrappers(model: nn.Module) -> Iterator[None]:
    """Put the parts of a model in the places of what torch.compile wrapped around them, for a while."""
    wrapped = [
        (parent._modules, name, part)
        for parent in model.modules()
        for name, part in parent._modules.items()
        if part is not None and original(part) is not part
    ]
    try:
        for parts, name, part in wrapped:
            parts[name] = original(part)
        yield
    finally:
        for parts, name, part in wrapped:
            parts[name] = part


def _parallel_part(model: nn.Module) -> nn.Module | None:
    """The module inside a data-parallel wrapper, or inside an engine of DeepSpeed; None for any other model."""
    inner, name = getattr(model, "module", None), type(model).__name__
    return inner if isinstance(inner, nn.Module) and ("Parallel" in name or name == ENGINE) else None


def trained_module(model: nn.Module) -> nn.Module:
    """The module inside wrappers of torch.compile and of data-parallel training, whose forward communicates.

    The first FSDP stays, without which the module has no parameters.
    """
    model = original(model)
    inner = _parallel_part(model)
    return model if inner is None or type(model).__name__ == FSDP else trained_module(inner)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside wrappers of torch.compile, of data-parallel training and of adapters."""
    while True:
        if (inner := _parallel_part(model)) is not None:
            model = inner
        elif (inside := original(model)) is not model:
            model = inside
        elif hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
            model = model.get_base_model()  # type: ignore[operator]
        else:
            return model


def attends(module: nn.Module) -> bool:
    """Whether any part of a module computes queries and keys."""
    if any(isinstance(part, nn.MultiheadAttention) for part in module.modules()):
        return True
    return any(_PROJECTIONS.match(path.rpartition(".")[2]) for path, _ in module.named_modules())


def forward(model: nn.Module, inputs: Mapping[str, Any], **extra: Any) -> Any:
    """Call a model on inputs moved to its device and precision, without a cache and with as few logits as it allows."""
    device = input_device(model)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    moved = {
        name: value.to(device, dtype if name in _FLOATS else None) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    accepted = inspect.signature(unwrapped(model).forward).parameters
    if "use_cache" in accepted:
        moved.setdefault("use_cache", False)
    if "logits_to_keep" in accepted and moved.get("labels") is None and "logits_to_keep" not in extra:
        moved.setdefault("logits_to_keep", 1)
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()):
        # a plain module may have another name for images and no pixel mask
        if "pixel_values" in moved and "pixel_values" not in accepted and "" not in moved:
            moved[""] = moved.pop("pixel_values")
        if PIXEL_MASK not in accepted:
            moved.pop(PIXEL_MASK, None)
        moved = _as_taken(moved, list(accepted))
    plain = moved.pop("", None)
    if plain is not None and "input_ids" in accepted:
        moved["input_ids"], plain = plain, None
    return model(**moved, **extra) if plain is None else model(plain, **moved, **extra)


def few_logits(model: nn.Module) -> contextlib.ExitStack:
    """Compute logits only for the last position of each context, since those of a large vocabulary are costly.

    For models without the argument `logits_to_keep`. Hooks attached earlier still see all positions.
    """
    find = getattr(unwrapped(model), "get_output_embeddings", None)
    head = find() if callable(find) else None
    stack = contextlib.ExitStack()

    def last(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        whole = args and isinstance(args[0], Tensor) and args[0].dim() == 3
        return (args[0][:, -1:], *args[1:]) if whole else None

    if isinstance(head, nn.Module):
        stack.callback(head.register_forward_pre_hook(last).remove)
    return stack


def all_logits(model: nn.Module) -> dict[str, int]:
    """What makes a model compute logits at all positions, as a named output head needs, if it can be told."""
    return {"logits_to_keep": 0} if "logits_to_keep" in inspect.signature(unwrapped(model).forward).parameters else {}


def _as_taken(moved: dict[str, Any], accepted: list[str]) -> dict[str, Any]:
    """Ids and labels under the names that a user's own forward has for them."""
    if "input_ids" in moved and "input_ids" not in accepted and "" not in moved:
        moved = {"": moved.pop("input_ids"), **moved}
    if "labels" in moved and "labels" not in accepted:
        own = next((name for name in _TARGETS if name in accepted and name not in moved), None)
        moved |= {} if own is None else {own: moved.pop("labels")}
    return moved


def named_inputs(model: nn.Module, batch: Any) -> Any:
    """A batch as a dict: a tensor is the first argument of the model's forward, of a pair the second is its labels.

    Other batches are returned as they are.
    """
    pair = isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch)
    if pair:
        return {**named_inputs(model, batch[0]), "labels": batch[1]}
    if not isinstance(batch, Tensor):
        return batch
    return {"" if is_plain(model) and batch.is_floating_point() else "input_ids": batch}


def own_batch(batch: Any) -> dict[str, Any]:
    """A batch of any form as a dict; `as_given` is the inverse.

    >>> own_batch((1, 2)), as_given(own_batch((1, 2))), as_given(own_batch({"x": 1}))
    ({'0': 1, '1': 2}, (1, 2), {'x': 1})
    """
    if isinstance(batch, Mapping):
        return dict(batch)
    return {str(i): part for i, part in enumerate(batch)} if isinstance(batch, (tuple, list)) else {"": batch}


def as_given(inputs: Mapping[str, Any]) -> Any:
    """The batch that `own_batch` made a dict of."""
    if set(inputs) == {""}:
        return inputs[""]
    return tuple(inputs.values()) if all(name.isdecimal() for name in inputs) else inputs


def input_device(model: nn.Module) -> torch.device:
    """The device of a model's inputs: that of its embedding, or of its first parameter that is not offloaded."""
    with contextlib.suppress(AttributeError, NotImplementedError):
        device = unwrapped(model).get_input_embeddings().weight.device  # type: ignore[operator]
        if device.type != "meta":
            return torch.device(device)
    devices = (parameter.device for parameter in model.parameters())
    return next((device for device in devices if device.type != "meta"), torch.device("cpu"))


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout); every module's own mode is restored afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def is_plain(model: nn.Module) -> bool:
    """Whether a model is a user's own module, of no library that says what it reads and returns."""
    return not hasattr(getattr(unwrapped(model), "config", None), "model_type")


def takes_labels(model: nn.Module) -> bool:
    """Whether a model's forward has an argument for labels, by one of its usual names."""
    return takes(model, "labels", *_TARGETS)


def takes(model: nn.Module, *names: str) -> bool:
    """Whether a model's forward has an argument of one of these names."""
    accepted = inspect.signature(unwrapped(model).forward).parameters
    return any(name in accepted for name in names)


def by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward call by name, including those passed as *args and **kwargs.

    Those of a user's own module stand there under the usual names as well: ids of tokens [B, T] as `input_ids`, whole
    numbers called targets or y as `labels`; packed sequences are padded, with their `attention_mask`.
    """
    named = _by_name(module, args, kwargs)
    return named | _usual_names(named) if named and not any(name in named for name in CONTENT) else named


def _usual_names(named: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    first = next((value for value in named.values() if isinstance(value, (Tensor, PackedSequence))), None)
    if isinstance(first, PackedSequence):
        padded, lengths = pad_packed_sequence(first, batch_first=True)
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        found = {"inputs_embeds" if padded.is_floating_point() else "input_ids": padded, "attention_mask": mask}
    elif first is not None and first.dim() == 2 and _whole(first) and not _PAIRS.search(next(iter(named))):
        found["input_ids"] = first
    if not isinstance(named.get("labels"), Tensor):
        given = [named[name] for name in _TARGETS if isinstance(named.get(name), Tensor) and named[name] is not first]
        found |= {"labels": given[0]} if given and _whole(given[0]) else {}
    return found


def _whole(x: Tensor) -> bool:
    return x.dim() > 0 and not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool


def _by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    signature = _signature((_parallel_part(module) or module).forward)  # a wrapper takes whatever the module takes
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    placed = [name for name, kind in kinds.items() if kind in _PLACED]
    if len(args) <= len(placed):  # the rule; to bind them takes long where it is asked at every training step
        given = dict(zip(placed, args, strict=False)) | kwargs
        return {name: given.pop(name) for name in kinds if name in given} | given
    named: dict[str, Any] = {}
    for name, value in signature.bind_partial(*args, **kwargs).arguments.items():
        if kinds[name] is inspect.Parameter.VAR_KEYWORD:
            named |= value
        elif kinds[name] is inspect.Parameter.VAR_POSITIONAL:
            named |= {f"{name}{i}": item for i, item in enumerate(value)}
        else:
            named[name] = value
    return named


def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    """The signature of a bound method, read once for each function: it is asked for at every training step."""
    function = getattr(forward, "__func__", None)
    if not isinstance(function, types.FunctionType):
        return inspect.signature(forward)
    if function not in _signatures:
        _signatures[function] = inspect.signature(forward)
    return _signatures[function]


def first_tensor(path: str, *values: Any) -> Tensor:
    """The first floating-point tensor among values, also inside tuples and mappings."""
    found = find_tensor(values)
    if found is None:
        raise AnisoscopeError(f"module {path!r} handled no floating tensor; name another one.")
    return found


def find_tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor in a value, tuple or mapping; None where there is none."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    if hasattr(value, "__dataclass_fields__"):
        items = vars(value).values()
    for item in items:  # plain, because torch.compile traces it
        found = find_tensor(item)
        if found is not None:
            return found
    return None


def modality_of(model: nn.Module, tokenizer: Any = None) -> Modality:
    """The modality of a model's input (of its encoder, if it has one)."""
    whole = unwrapped(model)
    # from the outermost part that names its input, since a user's module may wrap such a model
    named = (part for part in whole.modules() if hasattr(part, "main_input_name") and hasattr(part, "config"))
    inner = next(named, whole)
    encoder = getattr(inner, "encoder", None)  # it may not name its input
    if isinstance(encoder, nn.Module) and _reading(getattr(encoder, "main_input_name", "")):
        inner = encoder
    config, found = getattr(inner, "config", None), _reading(_main_input(inner))
    if not found:
        return _token_modality(config, tokenizer)
    mixes = getattr(config, "model_type", "") not in _CONVOLUTION_FAMILIES and attends(inner)
    return next((modality for modality in found if modality.attends == mixes), found[0])


def _reading(name: str) -> list[Modality]:
    """The modalities other than text whose input a forward takes under this argument name."""
    return [modality for modality in MODALITIES.values() if name in modality.medium.inputs and not modality.is_text]


def modalities_of(model: nn.Module, stacks: Iterable[str], tokenizer: Any = None) -> dict[str, str]:
    """The name of the modality of every stack: a decoder under a speech or image encoder reads tokens."""
    whole = modality_of(model, tokenizer)
    decoder = getattr(unwrapped(model), "decoder", None)
    below = whole if whole.is_text else _token_modality(getattr(decoder, "config", None), tokenizer)
    return {stack: (below if stack == "decoder" else whole).name for stack in stacks}


def _main_input(model: nn.Module) -> str:
    """The name of a model's main input; for a plain module inferred from its first layers."""
    if (name := getattr(model, "main_input_name", None)) is not None:
        return str(name)
    takes_ids = "input_ids" in inspect.signature(model.forward).parameters
    parts = [part for part in model.modules() if isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Embedding))]
    if takes_ids or not parts:
        return "input_ids"
    if any(isinstance(part, nn.Conv2d) for part in parts):
        return "pixel_values"
    return "input_values" if isinstance(parts[0], nn.Conv1d) else "input_ids"


def _token_modality(config: Any, tokenizer: Any) -> Modality:
    """CHARACTERS if tokens are single characters or bytes, by the family or the tokenizer; else TEXT."""
    family = str(getattr(config, "model_type", ""))
    named = str(getattr(config, "tokenizer_class", "") or "")
    byt5 = family == "t5" and getattr(config, "vocab_size", None) == _BYT5_WORDS
    if family in _CHARACTER_FAMILIES or byt5 or {named, type(tokenizer).__name__} & set(_CHARACTER_TOKENIZERS):
        return CHARACTERS
    special = set(getattr(tokenizer, "all_special_tokens", ()))
    vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    words = [word for word in vocabulary if word not in special and not _PLACEHOLDERS.fullmatch(word)]
    return CHARACTERS if words and sum(len(word) == 1 for word in words) > 0.9 * len(words) else TEXT


def module_at(model: nn.Module, path: str) -> nn.Module | None:
    """The module at a path; None where there is none any more."""
    try:
        return original(model.get_submodule(path))
    except AttributeError:
        return None
