"""transformers without its messages, and its failures as one sentence."""

from __future__ import annotations

import contextlib
import difflib
import io
import pickle
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from anisoscope.errors import AnisoscopeError, near_miss
from anisoscope.models.source import ALIASES, ModelSource, hub_reachable
from anisoscope.models.state_file import damaged_file

_LIBRARIES = ("safetensors", "safetensors_rust", "huggingface_hub")  # whose own errors are failures of a model, too
_FAILURES = (
    OSError,
    ValueError,
    RuntimeError,
    ImportError,
    AttributeError,
    TypeError,
    # what reading damaged bytes as a pickle can end in
    pickle.UnpicklingError,
    EOFError,
    AssertionError,
    ArithmeticError,
    LookupError,
    SyntaxError,
    struct.error,
)


@contextlib.contextmanager
def quiet(source: ModelSource) -> Iterator[None]:
    """transformers without log lines and progress bars, for as long as this lasts; downloads keep their own bars."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), contextlib.ExitStack() as stack:
            warnings.simplefilter("ignore")
            if source.kind == "gguf":  # its converter draws a bar that cannot be switched off
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def readable_errors(source: ModelSource) -> Iterator[None]:
    """Whatever goes wrong inside transformers becomes an `AnisoscopeError`; the cause stays attached."""
    try:
        yield
    except AnisoscopeError:
        raise
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        raise AnisoscopeError(
            f"{source.spec!r} does not fit into memory; use --dtype bfloat16, --device-map auto, or a smaller model."
        ) from error
    except Exception as error:
        if isinstance(error, _FAILURES) or type(error).__module__.partition(".")[0] in _LIBRARIES:
            raise _failure(source, error) from error
        raise


def _failure(source: ModelSource, error: BaseException) -> AnisoscopeError:
    text = " ".join(str(error).split())
    reason = (text[:240] + "…") if len(text) > 240 else text or type(error).__name__
    if "trust_remote_code" in text or "custom code" in text:
        return AnisoscopeError(f"{source.spec!r} needs its own code to be run; allow it with --trust-remote-code.")
    if source.kind == "hub" and isinstance(error, OSError):
        return _hub_failure(source, text)
    if source.kind == "config" or source.overrides:
        return AnisoscopeError(f"no model can be built from {source.spec!r}: {reason}")
    if "no file named" in text or "does not appear to have a file" in text:
        return AnisoscopeError(
            f"the folder {source.place!r} has a config.json but no weights; expected model.safetensors or "
            f"pytorch_model.bin (for fresh weights add --random-init)."
        )
    if source.kind in ("folder", "peft") and (file := damaged_file(Path(source.place))) is not None:
        shown = f" ({reason})" if " " in reason else ""
        return AnisoscopeError(
            f"{source.spec!r} could not be loaded: {file.name} is cut off or damaged{shown}; copy it again."
        )
    return AnisoscopeError(f"{source.spec!r} could not be loaded: {reason}")


def _hub_failure(source: ModelSource, text: str) -> AnisoscopeError:
    hint = _architecture_hint(source)
    if near := near_miss(source.spec):
        return AnisoscopeError(f"there is no folder {source.spec!r}, and no such model on the hub could be had; {near}")
    if not hub_reachable():
        return AnisoscopeError(
            f"{source.spec!r} is no folder here, it is not in the hub's cache, and the hub cannot be reached; "
            f"give a local folder{f', go online{hint}' if hint else ' or go online'}."
        )
    if "gated" in text or "401" in text or "403" in text:
        return AnisoscopeError(f"{source.spec!r} is private or gated, or does not exist; log in with `hf auth login`.")
    at = f" at revision {source.revision!r}" if source.revision else ""
    return AnisoscopeError(
        f"the hub has no model {source.name!r}{at} that can be loaded; check the spelling, give a local folder{hint}."
    )


def _architecture_hint(source: ModelSource) -> str:
    """What to say when the name is, or nearly is, an architecture that could be built afresh."""
    from transformers import CONFIG_MAPPING

    if "/" in source.name:
        return ""
    if source.name in CONFIG_MAPPING:
        return f", or add --random-init for fresh weights of {source.name}"
    near = difflib.get_close_matches(source.name, [*CONFIG_MAPPING, *ALIASES], n=3, cutoff=0.6)
    return f"; architectures with a similar name: {', '.join(near)}" if near else ""
