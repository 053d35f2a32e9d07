"""One step of a monitored training, from its beginning to its end, and what a monitor refuses to begin or end with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.bank import Bank
from anisoscope.metrics.tangent import check_rank
from anisoscope.option import check_values, refuse_arguments, seeds_of
from anisoscope.tangent.energy import Record
from anisoscope.tangent.plan import TangentPlan

_NO_WIDTH = 1 << 30  # stands for an unknown width


@dataclass
class OpenStep:
    """A step between its beginning and its end."""

    step: int
    due: bool = False  # whether it is measured
    records: list[Record] = field(default_factory=list)
    measured: bool = False  # whether anything of it was, be it only with a note
    bank: Bank | None = None  # of the geometry of a training batch

    def add(self, records: list[Record] | None) -> None:
        """Add what a measurement gave; None if it failed."""
        if records is not None:
            self.records += records
            self.measured = True


_LEAST = {"rank": 1, "seed": 0, "batch_size": 1, "total_steps": 1, "every_step": 0}


def check_arguments(function: Any, values: Mapping[str, Any]) -> None:
    """Raise an error for an argument of a monitor of a wrong type or size, or that would do nothing."""
    check_values(function, {name: value for name, value in values.items() if name != "when"}, _LEAST)
    if (probe := values["probe"]) is not None and not isinstance(probe, Iterable):
        raise AnisoscopeError(f"probe is {str(probe)[:80]!r}; expected batches as the model takes them, or None.")
    if values["target_weights"] is None:
        refuse_arguments({"weighted_gradients": values["weighted_gradients"]}, "without target_weights")


def with_splits(
    plan: TangentPlan | None, split: int | Sequence[int], *, seed: int, window: str | None, **options: Any
) -> TangentPlan | None:
    """The plan with further splits; where there is none, an error for an option of the tangent study."""
    if plan is None:
        asked = {**options, "split": split, "frozen_window": window}
        refuse_arguments(asked, "without gradients; add 'tangent' to the metrics")
    seeds = seeds_of(split)
    return plan if plan is None or not seeds else replace(plan, splits=seeds)


def refuse_unlearnable(model: nn.Module, plan: TangentPlan | None, *, learns: bool) -> None:
    """Raise an error if gradients are needed and all parameters are frozen, or if the rank is too large."""
    if learns and not any(p.requires_grad for p in model.parameters()):
        raise AnisoscopeError(
            f"every parameter of {type(model).__name__} is frozen, so nothing learns and there are no gradients; "
            "unfreeze some (parameter.requires_grad_(True)), or use `profile` for its geometry."
        )
    if plan is not None and plan.rank is not None:
        config = getattr(model, "config", None)
        width = getattr(config, "hidden_size", None) or getattr(config, "d_model", None)
        check_rank(plan.rank, width=int(width or _NO_WIDTH))


def nothing_measured(steps: int, due: int, when: Any) -> AnisoscopeError:
    """The error of a monitor that ends without a measured step, of those seen and those that were to be measured."""
    hint = "the other notes of the monitor say why" if due else "measure earlier steps, too"
    hint = hint if steps else "call `with monitor.step(i):` around every update"
    return AnisoscopeError(
        f"not one step was measured: {steps} steps were seen and {due} of them were to be (when={when}); {hint}."
    )
