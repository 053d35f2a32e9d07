"""The batches of a held-out probe, its loss and that of the best constant prediction, with intervals over contexts.

A model that learned predicts the held-out targets better than the best *constant* does: the frequencies of tokens or of
classes in the training data, or whatever an objective cannot get below without looking at its input.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from anisoscope.capture.gradient_pass import IGNORED, LabelConvention, LossRule, context_units
from anisoscope.capture.objective import Classes, Objective, PositionClasses, context_count
from anisoscope.capture.row import Batch, original_contexts
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.training import constant_costs, probe_loss, weighted_probe_loss
from anisoscope.models.forward import as_given, input_device, is_plain, named_inputs, unwrapped
from anisoscope.monitor.embedding_watch import weight_of
from anisoscope.numerics.hashing import FOLDS, fold_of
from anisoscope.results.quantity import as_equal_folds, jackknife
from anisoscope.tangent.energy import Record
from anisoscope.tangent.proxy import StepRows

ByContext = tuple[Tensor, Tensor, Tensor]  # of some contexts: hash, summed loss, number of targets, each [B]
Contexts = Iterable[tuple[Mapping[str, Any], Tensor]]  # batches with the hashes of their contexts [B]
Constant = float | Tensor | Callable[[Mapping[str, Any]], Tensor]
"""The best constant prediction: its mean held-out loss; or how often each target occurs in the training data [V]; or a
function of a batch of the probe that returns its loss on each context, summed over targets [B]."""


def output_counts(model: nn.Module, counts: Tensor | None) -> Tensor | None:
    """Frequencies of tokens, one for each output of the model, where its outputs are those tokens."""
    if is_plain(model):  # what its outputs are, its user knows
        return counts
    weight = weight_of(model, "get_output_embeddings")
    outputs = len(weight) if isinstance(weight, Tensor) and weight.dim() == 2 else 0
    if isinstance(weight, Tensor) and not outputs:  # a part of a flat parameter
        outputs = int(getattr(getattr(unwrapped(model), "config", None), "vocab_size", 0) or 0)
    if counts is None or not 0 < len(counts) <= outputs:
        return None
    return torch.nn.functional.pad(counts, (0, outputs - len(counts)))


@dataclass(frozen=True)
class GivenLoss(Objective):
    """A user's own function of (model, batch) that gives the summed loss of a user's own model.

    Random numbers that it draws (noise, time steps) depend on the contexts alone, so that they are the same at every
    step; whoever calls it keeps the random states of the training.
    """

    function: Callable[[nn.Module, Any], Tensor]
    name: ClassVar[str] = "given"
    unit: ClassVar[str] = "context"
    nats: ClassVar[bool] = False

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        device = input_device(model)
        first = int(original_contexts(inputs)[0]) & ((1 << 62) - 1)
        torch.default_generator.manual_seed(first)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(first)
        moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        total = self.function(model, as_given(moved))
        if not isinstance(total, Tensor) or total.numel() != 1:
            shape = f" of shape {tuple(total.shape)}" if isinstance(total, Tensor) else ""
            raise AnisoscopeError(
                f"loss= returned a {type(total).__name__}{shape}; expected the summed loss of its batch as one number "
                "(reduction='sum')."
            )
        return total

    def count(self, inputs: Mapping[str, Any]) -> int:
        return context_count(inputs)


def loss_records(rows: StepRows, constants: Iterable[Record] = ()) -> list[Record]:
    """The held-out loss of a step, weighted too where training weights targets, and those of the best constant."""
    place: Record = {"kind": "training", "step": rows.step, "variant": "", "group": "", "stack": "single"}
    if not rows.tokens:
        return []
    found = [{"metric": "probe_loss", **loss_columns(rows.loss, rows.tokens, rows.by_context)}]
    if rows.weighted_loss is not None:
        mean = weighted_probe_loss(rows.weighted_loss, rows.tokens)
        found.append({"metric": "weighted_probe_loss", "value": mean, "n": rows.tokens})
    found += [{"metric": "constant_loss", **columns} for columns in constants]
    return [{**place, **row} for row in found]


def loss_columns(total: float, tokens: int, parts: Iterable[ByContext]) -> Record:
    """Columns of a mean loss; with the losses of all contexts also its jackknife over folds of them."""
    value = probe_loss(total, tokens)
    columns: Record = {"value": value, "n": tokens}
    given = list(parts)
    if not given:
        return columns
    contexts, losses, counts = (torch.cat(column) for column in zip(*given, strict=True))
    if int(counts.sum()) != tokens:  # some pass did not tell the losses of its contexts
        return columns
    both, fold = torch.stack([losses.double(), counts.double()]), fold_of(contexts)
    sums, numbers = torch.zeros(2, FOLDS, dtype=torch.float64).index_add_(1, fold, both)
    rest = (sums.sum() - sums) / (numbers.sum() - numbers)
    rest = rest + value - float(losses.sum()) / tokens  # a model's own loss differs from that of its logits by rounding
    replicates = rest.masked_fill(numbers == 0, math.nan).tolist()  # an empty fold must not narrow an interval
    present = contexts[counts > 0].unique()
    replicates = as_equal_folds(value, replicates, torch.bincount(fold_of(present), minlength=FOLDS).tolist())
    low, high = jackknife(value, replicates, bounds=(0.0, None))
    return columns | {"low": low, "high": high, "replicates": replicates, "contexts": len(present)}


def constant_columns(
    constant: Constant,
    batches: Contexts,
    reading: LabelConvention | None,
    *,
    loss: LossRule | None = None,
    weights: Tensor | None = None,
) -> Record | None:
    """Columns of the constant's loss on the probe; None where it cannot be known.

    `loss` is None for the model's own cross-entropy, `reading` how it reads its labels. `weights` [V]: of the targets.
    """
    given = list(batches)
    labels = [inputs.get("labels") for inputs, _ in given]
    classes = all(isinstance(each, Tensor) and not each.is_floating_point() for each in labels)
    nats = (loss is None and reading is not None) or (isinstance(loss, Objective) and loss.nats and classes)
    unit: Record = {"variant": "" if nats else "unit=other"}
    if isinstance(constant, int | float):
        return {"value": float(constant), "note": "as given", **unit} if weights is None else None
    if isinstance(constant, Tensor):
        reading = LabelConvention(shifted=False) if isinstance(loss, Classes | PositionClasses) else reading
        if reading is None or not classes:  # which targets the labels are is not known
            return None
        costs = _costs(constant, weights)
        losses = [_of_costs(costs, reading.targets(inputs["labels"]).cpu()) for inputs, _ in given]
    elif weights is None:
        losses = [_of_function(constant, inputs, size=len(contexts)) for inputs, contexts in given]
    else:
        return None
    counts = [context_units(loss, inputs, reading) for inputs, _ in given]
    tokens = sum(int(each.sum()) for each in counts)
    if not tokens:
        return None
    parts = zip((contexts for _, contexts in given), losses, counts, strict=True)
    found = loss_columns(sum(float(each.sum()) for each in losses), tokens, parts)
    return found | (unit if weights is None else {"variant": "weighted=1"})


def _costs(counts: Tensor, weights: Tensor | None) -> Tensor:
    """The loss of every target under the best constant prediction; with weights that of Σ w ℓ, whose best is ∝ w c."""
    if counts.dim() != 1 or not len(counts) or not bool((counts >= 0).all()):
        raise AnisoscopeError(
            f"constant_loss= has shape {tuple(counts.shape)}; expected how often each target occurs in the training "
            "data, one number from 0 on for each, or the loss itself as one number."
        )
    if weights is None:
        return constant_costs(counts.cpu())
    w = weights.double().cpu()[: len(counts)]
    return w * constant_costs(counts.cpu()[: len(w)] * w)


def _of_costs(costs: Tensor, targets: Tensor) -> Tensor:
    if int(targets.max()) >= len(costs):
        raise AnisoscopeError(
            f"constant_loss= (or counts=) has {len(costs)} numbers, but the probe has target {int(targets.max())}; "
            "expected one for every target that the model can predict."
        )
    found = costs[targets.clamp_min(0)].where(targets != IGNORED, 0.0)
    return found.reshape(len(targets), -1).sum(1)


def _of_function(constant: Any, inputs: Mapping[str, Any], *, size: int) -> Tensor:
    found = torch.as_tensor(constant(inputs)).detach().double().cpu()
    if found.shape != (size,):
        raise AnisoscopeError(
            f"constant_loss= returned shape {tuple(found.shape)} for {size} contexts; expected the constant's loss on "
            "each, summed over its targets."
        )
    return found


def batches_of(model: nn.Module, probe: Any) -> list[Any]:
    """The batches of a probe; a tensor, a dict or, for a user's own model, a tuple of tensors is a single one."""
    single = isinstance(probe, Tensor) or hasattr(probe, "keys")
    parts = isinstance(probe, tuple) and len(probe) > 1 and all(isinstance(part, Tensor) for part in probe)
    return [probe] if single or (parts and is_plain(model)) else list(probe)


@contextlib.contextmanager
def explained(model: nn.Module) -> Iterator[None]:
    """Around a first pass over a probe: what the model or a user's loss raises is told with what a probe may be."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
        if "memory" in str(error).lower():
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise AnisoscopeError(
            f"{type(model).__name__} fails on the probe ({reason}); its batches are dicts of "
            "the arguments of its forward, tensors, or pairs of inputs and labels; with loss= they are what that "
            "function takes, and they are run in parts of some contexts each, along their first dimension."
        ) from error


def labelled(model: nn.Module, batch: Any) -> dict[str, Any]:
    """A batch as a dict with labels; for causal models the default labels are the ids, without padding."""
    inputs = named_inputs(model, dict(batch.inputs) if isinstance(batch, Batch) else batch)
    if not isinstance(inputs, Mapping):
        raise AnisoscopeError(
            f"a batch is a {type(batch).__name__}; expected a dict with input_ids and labels, a tensor, or a pair of "
            "inputs and labels; of other forms give loss=, a function of (model, batch) that returns the summed loss."
        )
    inputs = dict(inputs)
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    causal = type(unwrapped(model)).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    if "labels" not in inputs and isinstance(ids, Tensor) and causal:
        inputs["labels"] = ids if mask is None else ids.masked_fill(mask == 0, IGNORED)
    return inputs
