"""Which models of a table are encoders and which decoders, and which arm of the causal ablation a name stands for."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from anisoscope.runs.table import Table

ROLES = ("encoder", "decoder", "encoder-decoder")
# a run may stand behind: "causal-next-12x512 (runs/a)"
_ARM = re.compile(r"^(?P<name>causal-next|causal-masked|bidirectional-masked)-(?P<size>\d+x\d+.*)$")
_ARM_ROLES = {"causal-next": "decoder", "causal-masked": "neither", "bidirectional-masked": "encoder"}
_WORD = re.compile(r"^(encoder|decoder)(?![a-z])")


class Arm(NamedTuple):
    """One arm of the causal ablation, and what it shares with the others."""

    name: str
    size: str


def arm_of(model: str) -> Arm | None:
    """The arm that a model's name stands for.

    >>> arm_of("causal-masked-6x256"), arm_of("gpt2")
    (Arm(name='causal-masked', size='6x256'), None)
    """
    found = _ARM.match(model)
    return Arm(found["name"], found["size"]) if found else None


def model_entries(table: Table) -> dict[str, dict[str, Any]]:
    """What run.json says of each model; of several runs of one, whatever any of them says."""
    found: dict[str, dict[str, Any]] = {}
    for entry in table.about.get("models") or ():
        name = str(entry.get("name"))
        found[name] = {**entry, **found.get(name, {})}
    return found


def model_roles(table: Table) -> dict[str, str]:
    """Encoder, decoder, encoder-decoder or neither, for every model whose role is known.

    The name of an arm says more than run.json, where both causal arms are decoders; where neither says it, a model
    called `decoder-…`, or one whose only stack is called so, is taken at its word.
    """
    told = {str(entry.get("name")): str(entry.get("type")) for entry in table.about.get("models") or ()}
    stacks: dict[str, set[str]] = {}
    pairs = table.arrow.select(["model", "stack"]).group_by(["model", "stack"]).aggregate([])
    for pair in pairs.to_pylist():
        stacks.setdefault(pair["model"] or "", set()).update((pair["stack"],) if pair["stack"] else ())
    found = {model: _role(model, told.get(model, ""), own) for model, own in stacks.items()}
    return {model: role for model, role in found.items() if role}


def _role(model: str, told: str, stacks: set[str]) -> str:
    arm, word = arm_of(model), _WORD.match(model)
    if arm is not None:
        return _ARM_ROLES[arm.name]
    if told in ROLES:
        return told
    if word:
        return word[1]
    if {"encoder", "decoder"} <= stacks:
        return "encoder-decoder"
    only = stacks & {"encoder", "decoder"}
    return next(iter(only)) if len(only) == 1 else ""
