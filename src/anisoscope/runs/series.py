"""A series of checkpoints: local folders or hub revisions, in the order of training, and what is wrong with them."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anisoscope.errors import AnisoscopeError

_STEP = re.compile(r"(?:checkpoint|step|global_step|iter|ckpt)[-_=]?(\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"(\d+)(?!.*\d)")


@dataclass(frozen=True)
class Checkpoint:
    """One model of a series."""

    spec: str  # what load_model takes
    step: int | None
    label: str


def step_of(name: str) -> int | None:
    """The training step that a folder or revision is called after.

    >>> step_of("checkpoint-500"), step_of("step3000-tokens6B"), step_of("main")
    (500, 3000, None)
    """
    match = _STEP.search(name) or _NUMBER.search(name)
    return int(match[1]) if match else None


def find_series(model: str, revisions: Sequence[str] = ()) -> list[Checkpoint]:
    """The checkpoints of a folder by their numbers, or a hub model's revisions in the order of training."""
    path = Path(model).expanduser()
    if revisions:
        if path.exists():
            raise AnisoscopeError(f"{model!r} is a folder, which has no revisions; leave --revisions out.")
        found = [Checkpoint(f"{model}@{name}", step_of(name), name) for name in revisions]
        return _ordered(found, model)
    if not path.is_dir():
        raise AnisoscopeError(
            f"{model!r} is no folder here; give a folder of checkpoint-N folders, or a hub id with --revisions "
            "step0,step1000,…."
        )
    for place in (path, path / "checkpoints"):
        folders = (
            [p for p in sorted(place.iterdir()) if p.is_dir() and _STEP.fullmatch(p.name)] if place.is_dir() else []
        )
        if folders:
            return _ordered([Checkpoint(str(p), step_of(p.name), p.name) for p in folders], model)
    inside = ", ".join(sorted(p.name for p in path.iterdir())[:4]) or "nothing"
    raise AnisoscopeError(f"{model!r} holds no checkpoint-N folders (found: {inside}); give the folder that does.")


def _ordered(found: list[Checkpoint], model: str) -> list[Checkpoint]:
    nameless = [c.label for c in found if c.step is None]
    if nameless:
        raise AnisoscopeError(
            f"{nameless[0]!r} of {model!r} names no training step; expected names such as step1000 or checkpoint-1000."
        )
    steps = [c.step for c in found]
    if len(set(steps)) < len(steps):
        twice = next(s for s in steps if steps.count(s) > 1)
        raise AnisoscopeError(f"step {twice} is named twice in the series of {model!r}; name each checkpoint once.")
    return sorted(found, key=lambda c: c.step or 0)


def flags(fingerprint: str, earlier: dict[str, str], *, finite: bool, asked_in_order: bool) -> list[str]:
    """What is wrong with a checkpoint: the same weights as another, weights that are not finite, named out of order."""
    out = []
    if fingerprint in earlier:
        out.append(f"repeated: the same weights as {earlier[fingerprint]}")
    if not finite:
        out.append("non-finite weights")
    if not asked_in_order:
        out.append("out of order: it was named after a later one")
    return out


def refuse_training_run(model: str) -> None:
    """The folder of a training run is no model, though it holds some."""
    path = Path(model).expanduser()
    if (path / "checkpoints").is_dir() and not (path / "config.json").is_file():
        raise AnisoscopeError(
            f"{model!r} is the folder of a training run, not a model; use `anisoscope sweep {model}` for all its "
            f"checkpoints, or give one: {path / 'checkpoints' / 'checkpoint-N'}."
        )


def refuse_lossless(loaded: Any, spec: str) -> None:
    """A model that reads no text or has no language-model head has no loss to take gradients of."""
    model = loaded.model
    if loaded.main_input != "input_ids":
        raise AnisoscopeError(
            f"{spec!r} reads {loaded.main_input}, not token ids; `tangent` and `sweep` take text models (a Monitor in "
            "your own loop takes any model)."
        )
    if "labels" in inspect.signature(model.forward).parameters or _head(model) is not None:
        return
    raise AnisoscopeError(
        f"{spec!r} was loaded as {type(model).__name__}, without a language-model head, so it has no loss and no "
        "gradients; give a checkpoint that holds its head (…ForCausalLM or …ForMaskedLM)."
    )


def _head(model: Any) -> Any:
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """What tells a tokenizer from another: its tokens, and the ids it gives a text."""
    vocabulary = sorted(tokenizer.get_vocab().items()) if hasattr(tokenizer, "get_vocab") else len(tokenizer)
    ids = [int(i) for i in tokenizer('The 2 élèves said: "go on".')["input_ids"]]
    return hashlib.sha256(json.dumps([vocabulary, ids]).encode()).hexdigest()
