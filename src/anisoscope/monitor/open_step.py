"""One step of a monitored training, from its beginning to its end, and what a monitor refuses to begin or end with."""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from anisoscope.capture.sites.stage import check_stage
from anisoscope.capture.step_capture import LiveGradients
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.bank import Bank
from anisoscope.metrics.tangent import check_rank
from anisoscope.monitor.analysis.analysis import Found
from anisoscope.monitor.embedding_watch import bare_optimizer
from anisoscope.monitor.every_step import EveryStep
from anisoscope.monitor.guard import FaultGuard
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
    parts: list[tuple[str, Future[Found]]] = field(default_factory=list)  # what is analysed, in words, and its results
    measured: bool = False  # whether anything of it was, be it only with a note
    bank: Bank | None = None  # of the geometry of a training batch
    targets: int | None = None  # over which the loss of this process is a mean, if that is known
    state: dict[str, Any] = field(default_factory=dict)  # of the monitor when the step ended, for saving

    def add(self, records: list[Record] | None) -> None:
        """Add what a measurement gave; None if it failed."""
        if records is not None:
            self.records += records
            self.measured = True

    def expect(self, what: str, part: Future[Found] | None) -> None:
        """Add what is analysed, here or elsewhere; None if that failed already."""
        if part is not None:
            self.parts.append((what, part))
            self.measured = True

    @property
    def ready(self) -> bool:
        """Whether everything is analysed."""
        return all(part.done() for _, part in self.parts)

    def wait(self) -> None:
        """Wait until it is."""
        for _, part in self.parts:
            part.exception()


def step_number(step: Any) -> int:
    """The number of a step, be it of numpy or torch or a float without a fraction; an error if it is none.

    >>> step_number(3.0)
    3
    """
    whole = isinstance(step, float) and step.is_integer()
    try:
        number = int(step) if whole else operator.index(step)
    except (TypeError, ValueError, RuntimeError):
        number = -1
    if number < 0:
        raise AnisoscopeError(f"the step is {str(step)[:80]!r}; expected a whole number from 0 on.")
    return number


def part_name(names: Iterable[str], step: int) -> str:
    """The file of numbers that a training logged at a step: by their names, or a hash where those make no file name.

    >>> part_name(["gradient_norm", "loss"], 8), part_name(["val/loss"], 8)
    ('gradient_norm+loss-000000008', 'logged_2f0ae5ab846d65a9-000000008')
    """
    joined = "+".join(names)
    plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9_+]{0,79}", joined)
    digest = hashlib.blake2b(joined.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{joined if plain else f'logged_{digest}'}-{step:09d}"


_LEAST = {"rank": 1, "seed": 0, "batch_size": 1, "total_steps": 1, "every_step": 0}


def check_arguments(function: Any, values: Mapping[str, Any]) -> None:
    """Raise an error for an argument of a monitor of a wrong type or size, or that would do nothing."""
    check_values(function, {name: value for name, value in values.items() if name != "when"}, _LEAST)
    if (probe := values["probe"]) is not None and not isinstance(probe, Iterable):
        raise AnisoscopeError(f"probe is {str(probe)[:80]!r}; expected batches as the model takes them, or None.")
    if (optimizer := values["optimizer"]) is not None and bare_optimizer(optimizer) is None:
        raise AnisoscopeError(
            f"optimizer is {str(optimizer)[:80]!r}; expected an optimizer of torch, or a wrapper with one as its "
            "attribute `optimizer`; else leave it out: updates of the embedding table then keep their weight decay."
        )
    if (out := values["out"]) is not None and (not str(out).strip() or "\0" in str(out)):
        raise AnisoscopeError(f"out is {str(out)[:80]!r}; expected a folder, or None for results in memory alone.")
    if values["modules"] is not None:
        also = {"layers": values["layers"], "stage": values["stage"]}
        refuse_arguments(also, "with modules=, which names the places to look at")
    if values["stage"] is not None:
        check_stage(values["stage"])
        for name in (n for n in ("probe", "every_step") if values[n] is not None and values[n] is not False):
            raise AnisoscopeError(
                f"{name} needs the whole model, and this is one stage of a pipeline; leave it out: the training "
                "batches are measured."
            )
    if values["target_weights"] is None:
        refuse_arguments({"weighted_gradients": values["weighted_gradients"]}, "without target_weights")


def with_splits(
    plan: TangentPlan | None,
    split: int | Sequence[int],
    *,
    seed: int,
    window: str | None,
    named: bool = False,
    **options: Any,
) -> TangentPlan | None:
    """The plan with further splits; where there is none, an error for an option of the tangent study.

    Gradients of embedding tables and of weights are tested at sites of a known model, not at modules that are `named`.
    """
    if plan is None:
        asked = {**options, "split": split, "frozen_window": window}
        refuse_arguments(asked, "without gradients; add 'tangent' to the metrics")
    seeds = seeds_of(split)
    plan = replace(plan, embedding=False, weights=False) if plan is not None and named else plan
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


class HooksLost(AnisoscopeError):
    """Hooks that were removed, and cannot be attached again."""


def attach_again(hooks: LiveGradients | EveryStep, guard: FaultGuard) -> None:
    """Attach hooks that were removed, with a note, or an error if that is wanted. Where it fails they are taken off."""
    lost = hooks.lost()
    if not lost:
        return
    named = ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
    what = f"hooks were removed, or modules replaced, at {named}"
    try:
        hooks.reattach()
    except Exception as error:
        hooks.__exit__()
        raise HooksLost(f"{what}, and the model has changed: {error}; this part is switched off") from error
    if guard.strict:
        raise AnisoscopeError(f"{what}; leave the hooks of a monitored model alone.")
    guard.note(f"{what}; they were attached again")


def nothing_measured(steps: int, due: int, when: Any) -> AnisoscopeError:
    """The error of a monitor that ends without a measured step, of those seen and those that were to be measured."""
    hint = "the other notes of the monitor say why" if due else "measure earlier steps, too"
    hint = hint if steps else "call `with monitor.step(i):` around every update"
    return AnisoscopeError(
        f"not one step was measured: {steps} steps were seen and {due} of them were to be (when={when}); {hint}."
    )
