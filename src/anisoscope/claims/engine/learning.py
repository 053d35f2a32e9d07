"""Whether a model learned: the gate that every claim about training passes through.

A model learned if, at its last step, its held-out loss (`probe_loss`) lies below that of the best constant prediction
fitted on the training data (`constant_loss`): by more than the interval of the difference, which is paired over
contexts, and by at least 0.1 nats, or by 5 % where the loss is not known to be in nats. Weights that were loaded, not
trained under the monitor, count by their provenance; random ones do not. Where the table has no constant it is not
known, and the verdict is given with a note.

Claims declare what they are about (`claim(about=…)`), and `claims.engine.claim` applies the gate to those about
training. A model that did not learn leaves its own verdict undecided, and is left out of those on many models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from anisoscope.claims.engine.evidence import Missing, Run, counted, figure, listed
from anisoscope.results.quantity import Quantity
from anisoscope.results.query import Row

LEAST_NATS = 0.1
LEAST_SHARE = 0.05  # of the constant's loss, for losses that are not in nats
NO_CONSTANT = "the table has no constant_loss, the held-out loss of the best constant prediction"
PRETRAINED = "its weights were loaded, so it counts as trained by provenance"
LearnedStatus = Literal["learned", "did not learn", "unknown"]


@dataclass(frozen=True)
class Learned:
    """Whether one model learned, and why we say so, as a clause."""

    status: LearnedStatus
    why: str
    trained: bool = True  # False: the weights are those of an initialisation

    def record(self) -> dict[str, str]:
        return {"status": self.status, "why": self.why}


def learned(run: Run, until: int | None = None) -> Learned:
    """Whether a model learned by its last step (or by step `until`)."""
    steps = [step for step in run.held_out if until is None or step is None or step <= until]
    if steps:
        last = max(steps, key=lambda step: -1 if step is None else step)
        return compare_with_constant(*run.held_out[last])
    if run.random:
        return Learned("did not learn", "its weights are random", trained=False)
    if run.last_step == 0:
        return Learned("did not learn", "nothing but its initialisation was measured", trained=False)
    if run.loaded:
        return Learned("learned", PRETRAINED)
    return Learned("unknown", NO_CONSTANT)


def compare_with_constant(loss: Row, constant: Row) -> Learned:
    """Whether a held-out loss lies far enough below that of the best constant prediction."""
    in_nats = constant.options.get("unit", "nats") == "nats"
    unit = " nats" if in_nats else ""
    if not (math.isfinite(loss.value) and math.isfinite(constant.value)):
        return Learned("did not learn", "its held-out loss is not a number")
    least = LEAST_NATS if in_nats else LEAST_SHARE * abs(constant.value)
    paired = loss.folds and constant.folds and (loss.n, loss.contexts) == (constant.n, constant.contexts)
    # without common folds the constant is taken as known: its error is far smaller than that of a model's loss
    gain = (constant.quantity if paired else Quantity.constant(constant.value)) - loss.quantity
    low, _ = gain.interval()
    told, side = (gain, "below") if gain.value >= 0 else (-gain, "above")
    ends = [figure(end) for end in told.interval()]
    interval = f" [{', '.join(ends)}]" if math.isfinite(low) else ""
    why = f"its held-out loss, {figure(loss.value)}{unit}, is {figure(told.value)}{interval} {side} that of the best "
    why += f"constant prediction, and learning takes {figure(least)} below"
    good = gain.value >= least and not low <= 0  # a gain without an interval is judged by its value
    return Learned("learned" if good else "did not learn", why)


@dataclass(frozen=True)
class Gate:
    """What the gate says on the models of one finding: why it is left open, and a note for its sentence."""

    reason: str = ""
    note: str = ""
    models: Mapping[str, Learned] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()  # models of a study that do not count

    @classmethod
    def of(cls, given: Any) -> Gate:
        """The gate of a subject: a single model, a few that are compared, or a whole study, which loses some."""
        until = getattr(given, "until", None)
        found = {run.model: learned(run, until) for run in runs_of(given)}
        failed = {model: each for model, each in found.items() if each.status == "did not learn"}
        unknown = [model for model, each in found.items() if each.status == "unknown"]
        notes, reason, left_out = [], "", tuple(failed) if isinstance(given, Mapping) else ()
        if left_out:
            words = [f"{model} did not learn and is left out: {each.why}" for model, each in failed.items()]
            notes += words if len(words) <= 2 else [f"{listed(failed)} did not learn and are left out"]
        elif failed:
            several = len(found) > 1
            clauses = [f"{model if several else 'the model'} did not learn: {e.why}" for model, e in failed.items()]
            reason = "; ".join(clauses)
        if unknown:
            who = listed(unknown) if len(unknown) <= 3 else counted(len(unknown), "model")
            notes.append(f"whether {who if len(found) > 1 else 'it'} learned is not known: {NO_CONSTANT}")
        return cls(reason, "; ".join(notes), found, left_out)

    def open_to(self, given: Any) -> Any:
        """The subject without the models that are left out."""
        return {model: run for model, run in given.items() if model not in self.left_out} if self.left_out else given

    @classmethod
    def merged(cls, gates: Mapping[Any, Gate]) -> Gate:
        """The gate of a finding over several seeds, by seed."""
        reasons, notes = ([g.reason for g in gates.values()], [g.note for g in gates.values()])
        models = {f"{model}, seed {seed}": each for seed, g in gates.items() for model, each in g.models.items()}
        joined = ["; ".join(dict.fromkeys(filter(None, words))) for words in (reasons, notes)]
        left_out = tuple(model for gate in gates.values() for model in gate.left_out)
        return cls(joined[0] if all(reasons) else "", joined[1], models, left_out)

    @property
    def lost(self) -> bool:
        """Whether a model that was trained is left out; random weights are no part of a claim about training."""
        return any(self.models[model].trained for model in self.left_out if model in self.models)

    def records(self) -> dict[str, Any]:
        """For the details of a verdict, by model."""
        return {model: each.record() for model, each in self.models.items()}


def runs_of(given: Any) -> Iterable[Run]:
    """The models that a subject of a claim consists of."""
    if isinstance(given, Run):
        return [given]
    if isinstance(given, Missing):
        return []
    if isinstance(given, Mapping):
        return [run for each in given.values() for run in runs_of(each)]
    if isinstance(given, tuple | list):
        return [run for each in given for run in runs_of(each)]
    return runs_of(given.runs if hasattr(given, "runs") else given.run)
