"""Load a model for measurement: weights, tokenizer or processor, and notes on decisions made.

Messages of transformers are silenced meanwhile, and its exceptions become one-sentence errors.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import io
import pickle
import re
import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anisoscope.errors import AnisoscopeError, near_miss
from anisoscope.models import checkpoint as checkpoints
from anisoscope.models import source as sources
from anisoscope.models import tokenizer as tokenizers
from anisoscope.models.checkpoint import LoadOptions, adapted_model, base_source, damaged_file
from anisoscope.models.forward import modality_of
from anisoscope.models.placement import choose_device, choose_dtype, parameter_count, place, weight_fingerprint
from anisoscope.models.processor import PROCESSORS, load_processor
from anisoscope.models.source import ModelSource, hub_reachable, is_checkpoint, parse_model
from anisoscope.results.modality import TEXT, Medium, Modality

_LIBRARIES = ("safetensors", "safetensors_rust", "huggingface_hub")  # their exceptions are load failures, too
_FAILURES = (OSError, ValueError, RuntimeError, ImportError, AttributeError, TypeError)
# exceptions of unpickling damaged bytes
_DAMAGE = (pickle.UnpicklingError, EOFError, AssertionError, ArithmeticError, LookupError, SyntaxError, struct.error)
_TWO_SIDES = (("vision_model", "vision_config"), ("text_model", "text_config"))  # of CLIP and its relatives
UNLIMITED = 1 << 20  # positions, for a model that states no limit
_TWO_SIDED = ("xlnet",)  # registered as causal, yet every position sees all others
_LIMITS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")


@contextlib.contextmanager
def quiet(source: ModelSource | None = None) -> Iterator[None]:
    """Silence the log lines and progress bars of transformers, except for downloads."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), contextlib.ExitStack() as stack:
            warnings.simplefilter("ignore")
            if source is not None and source.kind == "gguf":  # the progress bar of its converter cannot be disabled
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def readable_errors(source: ModelSource) -> Iterator[None]:
    """Turn exceptions inside transformers into an `AnisoscopeError` with the original as its cause."""
    try:
        yield
    except AnisoscopeError:
        raise
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        raise AnisoscopeError(
            f"{source.spec!r} does not fit into memory; use --dtype bfloat16, --device-map auto, or a smaller model."
        ) from error
    except Exception as error:
        if isinstance(error, _FAILURES + _DAMAGE) or type(error).__module__.partition(".")[0] in _LIBRARIES:
            raise AnisoscopeError(_failure(source, error)) from error
        raise


_VALIDATED = re.compile(r"(?:Class validation|Validation) error for (?:field|validator) '\w+': (?:\w+Error: )?")
_OF_THE_CODE = (TypeError, AttributeError, KeyError, IndexError, ZeroDivisionError, RecursionError, AssertionError)


def _plain_reason(error: BaseException, text: str) -> str:
    """Why a model could not be made, in words of its configuration and not of the code that reads it."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"it names {Path(str(error.filename)).name!r}, which cannot be read ({error.strerror.lower()})"
    told = _VALIDATED.sub("", text).replace("NoneType", "null").partition(" with value ")
    if told[1]:  # Field 'depths' with value 1 doesn't match any type in (…)
        return f"{told[0]} is {told[2].partition(' doesn')[0]}, which it cannot be"
    if isinstance(error, _OF_THE_CODE) and not _VALIDATED.search(text):
        return "its configuration or its files hold a value of a kind that no model of this type takes; compare them with another model's"  # noqa: E501
    return told[0] or type(error).__name__


def _failure(source: ModelSource, error: BaseException) -> str:
    text = " ".join(str(error).split())
    plain = _plain_reason(error, text)
    reason = (plain[:240] + "…") if len(plain) > 240 else plain
    if "trust_remote_code" in text or "custom code" in text:
        return f"{source.spec!r} needs its own code to be run; allow it with --trust-remote-code."
    if "weights_only" in text or (isinstance(error, pickle.UnpicklingError) and "pickle" in text.lower()):
        return (
            f"{source.spec!r} holds more than weights, and unpickling that would run its code, which is never done; "
            "get its weights as safetensors, or save its state_dict alone."
        )
    if source.kind == "hub" and isinstance(error, OSError):
        return _hub_failure(source, text)
    if source.kind == "config" or source.overrides:
        return f"no model can be built from {source.spec!r}: {reason}"
    if "no file named" in text or "does not appear to have a file" in text:
        wanted = "model.safetensors or pytorch_model.bin (for fresh weights add --random-init)"
        return f"the folder {source.place!r} has a config.json but no weights; expected {wanted}."
    if source.kind in ("folder", "peft") and (file := damaged_file(Path(source.place))) is not None:
        shown = f" ({reason})" if " " in reason else ""
        return f"{source.spec!r} could not be loaded: {file.name} is cut off or damaged{shown}; copy it again."
    return f"{source.spec!r} could not be loaded: {reason}"


def _hub_failure(source: ModelSource, text: str) -> str:
    from transformers import CONFIG_MAPPING

    hint = ""  # for a name that is, or resembles, an architecture that --random-init can build
    if source.name in CONFIG_MAPPING:
        hint = f", or add --random-init for fresh weights of {source.name}"
    elif "/" not in source.name:
        near = difflib.get_close_matches(source.name, [*CONFIG_MAPPING, *sources.ALIASES], n=3, cutoff=0.6)
        hint = f"; architectures with a similar name: {', '.join(near)}" if near else ""
    if miss := near_miss(source.spec):
        return f"there is no folder {source.spec!r}, and no such model on the hub could be had; {miss}"
    if not hub_reachable():
        where = f"{source.spec!r} is no folder here, it is not in the hub's cache, and the hub cannot be reached"
        return f"{where}; give a local folder{f', go online{hint}' if hint else ' or go online'}."
    if "gated" in text or "401" in text or "403" in text:
        return f"{source.spec!r} is private or gated, or does not exist; log in with `hf auth login`."
    name = repr(source.name) + (f" at revision {source.revision!r}" if source.revision else "")
    return f"the hub has no model {name} that can be loaded; check the spelling, give a local folder{hint}."


@dataclass
class Loaded:
    """A model in evaluation mode, with everything that measuring it needs."""

    model: nn.Module
    tokenizer: Any
    name: str
    revision: str
    fingerprint: str
    max_context: int
    is_decoder: bool  # causal: a position sees only those before it
    is_encoder_decoder: bool
    pad_id: int
    decoder_start: int | None
    parameters: int
    device: torch.device
    main_input: str = "input_ids"  # name of the main argument of its forward; `input_features` for speech
    notes: list[str] = field(default_factory=list)
    processor: Any = None  # feature extractor or image processor of a model of sounds or pictures
    modality: Modality = TEXT  # of the main input; a decoder after it reads tokens
    vocabulary: int | None = None  # rows of the input embedding table

    @property
    def reads_text(self) -> bool:
        """Whether the model's input are tokens, not sounds or pictures."""
        return self.modality.is_text

    @property
    def predicts_next(self) -> bool:
        """Whether its loss is next-token prediction; a causal model may have been trained on masked tokens."""
        masked = getattr(getattr(self.model, "config", None), "objective", None) == "masked"
        return (self.is_decoder or self.is_encoder_decoder) and not masked


def load_model(
    spec: str,
    *,
    random_init: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    seed: int = 0,
    trust_remote_code: bool = False,
    tokenizer: str | None = None,
    device_map: str | None = None,
    with_head: bool = True,
    need_tokenizer: bool = True,
    architecture: str | None = None,
    any_head: bool = False,
) -> Loaded:
    """Load MODEL: a folder, a hub id (`org/name@revision`), a `.gguf` file, a PEFT adapter, or a fresh architecture.

    Refuses a checkpoint that would leave weights random. `with_head=False` leaves the output head out; `any_head`
    loads one for classes, CTC or masked patches, too, of a model that reads sounds or pictures. A file of
    weights (`.ckpt`, `.pt`, …) is one of the `architecture`: a folder with config.json, or `bert:hidden_size=64,…`.
    """
    source = parse_model(spec, random_init=random_init, state=architecture is not None)
    plan = parse_model(architecture, random_init=True) if architecture and source.kind == "state" else source
    place_ = choose_device(device)
    wanted = LoadOptions(place_, choose_dtype(dtype, place_), seed, trust_remote_code, device_map, with_head, any_head)
    _check_options(source, wanted, random_init=random_init)
    notes: list[str] = []
    with quiet(source), readable_errors(source):
        if source.kind == "peft":
            model, config = adapted_model(source, wanted, notes)
        else:
            options = checkpoints.hub_options(plan, wanted)
            config = checkpoints.read_config(plan, options=options, notes=notes)
            if source.kind == "state":
                model = checkpoints.model_of_state(source, config, wanted, notes=notes)
            elif random_init:
                notes.append(f"random weights (seed {wanted.seed})")
                model = checkpoints.fresh_model(config, wanted)
            else:
                model = checkpoints.stored_model(source, config, wanted, options=options, notes=notes)
        _refuse_two(model, config, source)
        if device_map is None:
            model = place(model, device=wanted.device, dtype=wanted.dtype, notes=notes)
        beside = _Companions(_places(source, plan), config, wanted, notes, fresh=random_init)
        used = beside.tokenizer(model, given=tokenizer, needed=need_tokenizer)
        loaded = _described(model.eval(), used, source, config, wanted=wanted, notes=notes)
        if not loaded.reads_text:
            loaded.processor = beside.processor(loaded.modality.medium)
        return loaded


def _check_options(source: ModelSource, wanted: LoadOptions, *, random_init: bool) -> None:
    if source.kind == "rows":
        raise AnisoscopeError(f"{source.spec!r} is a file of rows, not a model; read it with load_rows.")
    if source.kind == "gguf" and importlib.util.find_spec("gguf") is None:
        raise AnisoscopeError(f"{source.spec!r} is a GGUF file, which needs `gguf`; install it: pip install gguf.")
    if wanted.device_map is not None and importlib.util.find_spec("accelerate") is None:
        raise AnisoscopeError("--device-map needs `accelerate`; install it: pip install accelerate.")
    if random_init and source.kind in ("peft", "gguf"):
        raise AnisoscopeError(f"{source.spec!r} cannot be initialised afresh; give its base model with --random-init.")
    if random_init and wanted.device_map is not None:
        raise AnisoscopeError("--random-init and --device-map do not go together; choose a --device.")


def _places(source: ModelSource, plan: ModelSource) -> list[ModelSource]:
    """Where the tokenizer of a model may be: its folder, its base or architecture, or the folder above a checkpoint."""
    if source.kind == "peft":
        return [source, base_source(source)]
    places = [plan] if plan is source else [plan, replace(source, kind="folder")]
    if source.path is not None and (source.kind == "state" or is_checkpoint(source.path.name)):
        folder = Path(source.place).resolve()
        above = [folder.parent, *([folder.parent.parent] if folder.parent.name == "checkpoints" else [])]
        places += [replace(source, kind="folder", path=path) for path in above]
    return places


@dataclass(frozen=True)
class _Companions:
    """Finds the tokenizer and the processor of a model in `places`."""

    places: list[ModelSource]
    config: Any
    wanted: LoadOptions
    notes: list[str]
    fresh: bool = False  # random weights, to which every text is the same

    def tokenizer(self, model: nn.Module, *, given: str | None, needed: bool) -> Any:
        """The tokenizer named by the user, else the model's own; UTF-8 bytes if named, or for random weights."""
        rows = _vocabulary(model, self.config)
        if given == tokenizers.BYTES:
            self.notes.append("UTF-8 bytes are used as token ids, as asked with --tokenizer bytes")
            return tokenizers.ByteTokenizer(rows or 256)
        found = self._found(given)
        if found is not None:
            if rows is not None and len(found) > rows:
                frame = tokenizers.special_frame(found)
                if found.vocab_size > rows or any(i >= rows for i in (*frame.before, *frame.after)):
                    raise AnisoscopeError(
                        f"the tokenizer has {len(found)} tokens but the model's embedding table {rows} rows; "
                        f"they do not belong together: name the right one with --tokenizer."
                    )
                surplus = f"{len(found) - rows} added tokens of the tokenizer"
                self.notes.append(f"{surplus} have no row in the embedding table")
            return found
        if given is not None:
            raise AnisoscopeError(
                f"no tokenizer could be loaded from {given!r}; give a folder, a hub id or a tokenizer.json."
            )
        if not needed or getattr(model, "main_input_name", "input_ids") != "input_ids":  # measured without text
            return None
        if (above := self._above(rows)) is not None:
            return above
        if self.fresh and rows is not None:
            self.notes.append("no tokenizer found: UTF-8 bytes are used as token ids, which random weights allow")
            return tokenizers.ByteTokenizer(rows)
        raise tokenizers.NoTokenizer(
            f"{self.places[0].spec!r} reads text but comes without a tokenizer, and ids of another one would give "
            "numbers of no text; name its own with --tokenizer FOLDER or HUB_ID (--tokenizer bytes if it was trained "
            "on UTF-8 bytes)."
        )

    def _found(self, given: str | None) -> Any | None:
        if given is not None:
            trusted = self.wanted.trust_remote_code
            return tokenizers.named_tokenizer(given, notes=self.notes, trust_remote_code=trusted)
        for where in self.places:
            if where.kind == "config":
                found = tokenizers.architecture_tokenizer(where.name)
            else:
                options = checkpoints.hub_options(where, self.wanted)
                found = tokenizers.load_tokenizer(where.place, config=self.config, notes=self.notes, **options)
            if found is not None:
                return found
        return self._final()

    def _final(self) -> Any | None:
        """The tokenizer of the final model, for repositories of intermediate checkpoints that have none."""
        name = tokenizers.FINAL.get(self.places[0].name)
        found = None if name is None else tokenizers.named_tokenizer(name, notes=self.notes)
        if found is not None:
            self.notes.append(f"the tokenizer is that of {name}")
        return found

    def _above(self, rows: int | None) -> Any | None:
        """The tokenizer in the folder above, shared by several models, if its size equals the embedding table's."""
        source = self.places[0]
        if source.kind != "folder" or source.path is None:
            return None
        above = Path(source.place).resolve().parent
        notes: list[str] = []
        found = tokenizers.load_tokenizer(str(above), config=None, notes=notes, local_files_only=True)
        if found is None or len(found) != rows:
            return None
        self.notes.extend([*notes, f"the tokenizer is that of the folder above, {above.name!r}"])
        return found

    def processor(self, medium: Medium) -> Any:
        """The model's processor of sounds or pictures, or one built from the sizes in its configuration."""
        for where in (where for where in self.places if where.kind in ("folder", "hub")):
            options = checkpoints.hub_options(where, self.wanted)
            if (found := load_processor(where.place, medium=medium, notes=self.notes, **options)) is not None:
                return found
        made = PROCESSORS[medium].make(self.config)
        self.notes.append(f"no processor found: {type(made).__name__} by the sizes of its configuration is used")
        return made


def _refuse_two(model: nn.Module, config: Any, source: ModelSource) -> None:
    """Raise an error for two parallel encoders (as in CLIP), whose layers do not form one model."""
    if all(hasattr(model, model_) and hasattr(config, config_) for model_, config_ in _TWO_SIDES):
        names = [getattr(config, name).model_type for _, name in _TWO_SIDES]
        raise AnisoscopeError(
            f"{source.spec!r} holds two models; give one of them: --random-init takes {' or '.join(names)}, and "
            "anisoscope.measure takes model.vision_model or model.text_model."
        )


def _vocabulary(model: nn.Module, config: Any) -> int | None:
    """Rows of the input embedding table; None if there is none (CANINE hashes ids)."""
    try:
        table = model.get_input_embeddings()  # type: ignore[operator]
    except (NotImplementedError, AttributeError):
        return None
    if getattr(config, "model_type", "") == "canine":
        return None
    weight = getattr(table, "weight", None)  # of a vision model it may be a convolution's
    return int(weight.shape[0]) if isinstance(weight, torch.Tensor) and weight.dim() == 2 else None


def _described(
    model: nn.Module, tokenizer: Any, source: ModelSource, config: Any, *, wanted: LoadOptions, notes: list[str]
) -> Loaded:
    decodes = any(name.rpartition(".")[2] == "decoder" for name, _ in model.named_modules())
    both = bool(getattr(config, "is_encoder_decoder", False)) and decodes
    revision = ""
    if source.kind == "hub":  # the commit, because a branch or tag may move
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(source.name, "config.json", revision=source.revision or "main")
        revision = Path(file).parent.name if isinstance(file, str) else source.revision or ""
    pad, rows = getattr(tokenizer, "pad_token_id", None), _vocabulary(model, config)
    pad = pad if pad is not None else getattr(config, "pad_token_id", None)
    if not isinstance(pad, int) or pad < 0 or (rows is not None and pad >= rows):
        pad = 0
        if tokenizer is not None:
            notes.append("the tokenizer has no pad token: id 0 fills the batches and is masked")
    # what the decoder begins with: as configured, else the pad token (T5), else the first of the text
    names, holders = ("decoder_start", "pad", "bos", "eos"), (config, getattr(model, "generation_config", None))
    starts = (getattr(holder, f"{name}_token_id", None) for name in names for holder in holders)
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        name=source.name,
        revision=revision,
        fingerprint=weight_fingerprint(model),
        max_context=max_context(model, config, tokenizer),
        is_decoder=not both and is_causal(config),
        is_encoder_decoder=both,
        pad_id=pad,
        decoder_start=next((i for i in starts if isinstance(i, int) and i >= 0), 0) if both else None,
        parameters=parameter_count(model),
        device=next((p.device for p in model.parameters()), wanted.device),
        main_input=str(getattr(model, "main_input_name", "input_ids")),
        notes=notes,
        modality=modality_of(model, tokenizer),
        vocabulary=rows,
    )


def is_causal(config: Any) -> bool:
    """Whether positions attend only to earlier ones: a causal architecture without a masked-language-model class."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    if getattr(config, "is_decoder", False):
        return True
    if config.model_type in _TWO_SIDED or getattr(config, "is_causal", True) is False:
        return False
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    causal = remote or type(config) in AutoModelForCausalLM._model_mapping
    return causal and type(config) not in AutoModelForMaskedLM._model_mapping


def max_context(model: nn.Module, config: Any, tokenizer: Any = None) -> int:
    """The maximum number of positions of a model, including special tokens."""
    for name, module in model.named_modules():
        # RoBERTa and its kin count positions from the padding index on, so the table holds fewer than it has rows.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            rows, offset = module.num_embeddings, module.padding_idx
            return int(rows) - int(offset) - 1
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for limit in _LIMITS:
        value = getattr(text, limit, None)
        if isinstance(value, int) and value > 0:
            return value
    stated = getattr(tokenizer, "model_max_length", UNLIMITED)
    return int(stated) if 0 < stated < UNLIMITED else UNLIMITED


def check_architecture(spec: str, *, trust_remote_code: bool = False) -> None:
    """Raise an error unless `spec` is a folder with config.json, a hub id, or a known architecture with valid fields.

    A local configuration is read, so that an error in it is reported once and not at every checkpoint.
    """
    source = parse_model(spec, random_init=True)
    if source.kind == "hub" and "/" not in source.name:
        sources.architecture(source.name)
    if source.kind not in ("hub", "config", "folder"):
        raise AnisoscopeError(
            f"--architecture {spec!r} is no folder with config.json; expected one, or such as bert:hidden_size=256."
        )
    if source.kind != "hub":
        with quiet(source), readable_errors(source):
            options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
            checkpoints.read_config(source, options=options, notes=[])
