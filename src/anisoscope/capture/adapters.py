"""PEFT adapters: the base model they name, with the adapter merged into its weights."""

from __future__ import annotations

import importlib.util
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from anisoscope.capture.checkpoints import Wish, hub_options, read_config, stored_model
from anisoscope.capture.sources import ModelSource, parse_model
from anisoscope.errors import AnisoscopeError


def adapted_model(source: ModelSource, wish: Wish, notes: list[str]) -> tuple[nn.Module, Any]:
    """The base model that an adapter names, with the adapter merged into its weights."""
    if importlib.util.find_spec("peft") is None:
        raise AnisoscopeError(f"{source.spec!r} is a PEFT adapter, which needs `peft`; install it: pip install peft.")
    base = base_source(source)
    for with_head in (wish.with_head, not wish.with_head):  # the adapter's names are those of one of the two
        trial = replace(wish, with_head=with_head)
        said: list[str] = []
        options = hub_options(base, trial)
        config = read_config(base, options=options, notes=said)
        model = stored_model(base, config, trial, options=options, notes=said)
        adapted = _adapted(model, source)
        if adapted is not None:
            notes.extend([*said, f"adapter {source.name} on {base.name}"])
            return _merged(adapted, notes), config
    raise AnisoscopeError(
        f"the adapter {source.spec!r} does not fit its base {base.spec!r}: the weights it changes are not there."
    )


def base_source(source: ModelSource) -> ModelSource:
    """The base model of an adapter: relative to the working directory, to the adapter's own folder, or a hub id."""
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


def _adapted(model: nn.Module, source: ModelSource) -> Any | None:
    """The model with the adapter on top, or None when the adapter's names are not those of this class."""
    from peft import PeftModel

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            adapted = PeftModel.from_pretrained(model, source.place)
        except (ValueError, KeyError, RuntimeError, AttributeError):
            return None
    return None if any("missing adapter keys" in str(w.message) for w in caught) else adapted


def _merged(adapted: Any, notes: list[str]) -> nn.Module:
    if hasattr(adapted.base_model, "merge_and_unload"):
        notes.append("the adapter was merged into the weights")
        merged: nn.Module = adapted.merge_and_unload()
        return merged
    notes.append("the adapter cannot be merged and stays around the model")
    wrapped: nn.Module = adapted
    return wrapped
