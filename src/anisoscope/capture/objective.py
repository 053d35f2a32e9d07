"""Objectives of models that do not predict tokens: classes, transcripts (CTC), masked patches and frames, any own loss.

An objective is a `LossRule` that can count: called with (model, inputs) it gives the loss *summed* over what is
predicted (its units), with its graph. A sum does not depend on the batching, a mean does. How a model means its own
loss is found by numbers, not by its class: the reading of its logits that gives the loss it returns.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from anisoscope.capture.row import FRAME_RULES, original_contexts
from anisoscope.errors import AnisoscopeError
from anisoscope.models.forward import CONTENT, SOUND, forward, unwrapped
from anisoscope.numerics.hashing import fold_of, row_hash

IGNORED = -100
HIDES = ("bool_masked_pos", "mask_time_indices")  # arguments that say what is hidden; without them nothing is
CLOSE = 5e-3  # relative difference of losses that half precision may cause
SAME = 1e-5  # relative distance of two codes that are the same
NEGATIVES = 100  # distractors of a contrastive loss whose configuration states no number
_BLANKS = ("blank_token_id", "ctc_blank_id", "blank_id", "pad_token_id")
_REDUCTIONS = ("sum", "mean")


def output_part(output: Any, name: str) -> Any:
    """A field of a model's output, or None; the loss of a tuple is its only number, logits its first larger tensor."""
    if isinstance(output, Mapping):
        return output.get(name)
    if isinstance(output, (tuple, list)) and name in ("loss", "logits") and not hasattr(output, name):
        floats = [x for x in output if isinstance(x, Tensor) and x.is_floating_point()]
        found = [x for x in floats if (x.numel() == 1 and x.dim() < 2) == (name == "loss")]
        return found[0] if found and (name == "logits" or len(found) == 1) else None
    return getattr(output, name, None)


def logits_of(output: Any) -> Tensor | None:
    """The logits of an output; a plain module may return nothing else."""
    found = output if isinstance(output, Tensor) else output_part(output, "logits")
    return found if isinstance(found, Tensor) else None


def hidden_positions(inputs: Mapping[str, Any]) -> Any:
    """The argument that says which patches or frames a model does not see, or None."""
    return next((inputs[name] for name in HIDES if name in inputs), None)


class Objective(ABC):
    """The loss of a model summed over its units."""

    name: ClassVar[str]
    unit: ClassVar[str]  # what is predicted, in the singular
    nats: ClassVar[bool] = True  # whether the loss of a unit is a negative log-likelihood

    @abstractmethod
    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """The summed loss of some contexts."""

    @abstractmethod
    def count(self, inputs: Mapping[str, Any]) -> int:
        """The number of units of some contexts."""

    def own_constant(self, model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> list[Tensor] | None:
        """The losses of the best constant answer on the contexts of each batch [B], where targets are the model's own.

        None where they are given with the data, whose training part then says what the best constant is.
        """
        return None


class ContextObjective(Objective):
    """An objective that knows the loss of each context."""

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        return self.by_context(model, inputs).sum()

    @abstractmethod
    def by_context(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """The summed loss of each context [B], from one forward pass."""


class LabelledObjective(ContextObjective):
    """An objective that reads logits and labels; labels are hidden from the model, which may read them otherwise."""

    def by_context(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        output = forward(model, without_labels(inputs))
        logits = logits_of(output)
        if logits is None:
            raise AnisoscopeError(f"{type(unwrapped(model)).__name__} returned no logits for its labels; give loss=.")
        return self.losses(logits, inputs, model)

    @abstractmethod
    def losses(self, logits: Tensor, inputs: Mapping[str, Any], model: nn.Module) -> Tensor:
        """The summed loss of each context [B]."""


def without_labels(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs but for their labels."""
    return {name: value for name, value in inputs.items() if name != "labels"}


@dataclass(frozen=True)
class Classes(LabelledObjective):
    """Cross-entropy of one label per context; of several (floats [B, C]) the binary one, of numbers squared errors."""

    name: ClassVar[str] = "classes"
    unit: ClassVar[str] = "context"

    def losses(self, logits: Tensor, inputs: Mapping[str, Any], model: nn.Module) -> Tensor:
        labels, plain = inputs["labels"].to(logits.device), nn.functional
        if not labels.is_floating_point():
            return plain.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        if labels.shape == logits.shape and logits.shape[-1] > 1:
            wanted = labels.to(logits.dtype)
            return plain.binary_cross_entropy_with_logits(logits, wanted, reduction="none").sum(-1)
        return (logits.squeeze(-1) - labels.to(logits.dtype).reshape(len(logits))).square()

    def count(self, inputs: Mapping[str, Any]) -> int:
        labels = inputs["labels"]
        return len(labels) if labels.is_floating_point() else int((labels != IGNORED).sum())


@dataclass(frozen=True)
class PositionClasses(LabelledObjective):
    """Cross-entropy of a label at some positions [B, T] (masked patches, frames); the others are −100."""

    name: ClassVar[str] = "masked"
    unit: ClassVar[str] = "labelled position"

    def losses(self, logits: Tensor, inputs: Mapping[str, Any], model: nn.Module) -> Tensor:
        labels = inputs["labels"].to(logits.device)
        found = nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
        return found.sum(1)

    def count(self, inputs: Mapping[str, Any]) -> int:
        return int((inputs["labels"] != IGNORED).sum())


@dataclass(frozen=True)
class Transcripts(LabelledObjective):
    """CTC: −log p(transcript | sound), summed over contexts; a unit is one symbol of a transcript.

    Labels are filled up with −100 or, as some models want it, with the blank, which no transcript holds. A transcript
    that is longer than its frames can spell has no probability: it gives no loss and no gradient.
    """

    blank: int
    name: ClassVar[str] = "ctc"
    unit: ClassVar[str] = "symbol of a transcript"

    def losses(self, logits: Tensor, inputs: Mapping[str, Any], model: nn.Module) -> Tensor:
        labels = inputs["labels"].to(logits.device)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        frames = frame_counts(model, inputs.get("attention_mask"), logits)
        symbols = self.symbols(labels)
        scores = wide.log_softmax(-1).transpose(0, 1)
        options: dict[str, Any] = {"blank": self.blank, "reduction": "none", "zero_infinity": True}
        with torch.backends.cudnn.flags(enabled=False):  # its kernel wants other types and is not deterministic
            return nn.functional.ctc_loss(scores, labels[symbols], frames.cpu(), symbols.sum(1).cpu(), **options)

    def symbols(self, labels: Tensor) -> Tensor:
        """Which labels [B, S] belong to a transcript."""
        return (labels >= 0) & (labels != self.blank)

    def count(self, inputs: Mapping[str, Any]) -> int:
        return int(self.symbols(inputs["labels"]).sum())

    def decoded(self, logits: Tensor, frames: Tensor) -> list[list[int]]:
        """The model's own reading of each context: best symbols without repetitions and blanks.

        Where every frame is blank it is the symbol that is most probable beside the blank, so that there is one.
        """
        found: list[list[int]] = []
        for scores, count in zip(logits.detach().cpu(), frames.tolist(), strict=True):
            best = scores[:count].argmax(-1).unique_consecutive()
            symbols = best[best != self.blank].tolist()
            if not symbols:
                beside = scores[:count].clone()
                beside[:, self.blank] = -torch.inf
                symbols = [int(beside.max(0).values.argmax())]
            found.append(symbols)
        return found


def frame_counts(model: nn.Module, mask: Any, logits: Tensor) -> Tensor:
    """The frames of each context [B] that are data, by the model's own function; all of them without padding."""
    batch, length = logits.shape[:2]
    whole = torch.full((batch,), length, device=logits.device)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or bool((mask != 0).all()):
        return whole
    counts = (mask != 0).sum(1)
    for part in unwrapped(model).modules():
        for name in FRAME_RULES:
            with contextlib.suppress(TypeError, NotImplementedError):
                if (rule := getattr(part, name, None)) is not None:
                    return rule(counts).to(logits.device).long().clamp(max=length)
    raise AnisoscopeError(
        f"the sounds are padded, and {type(unwrapped(model)).__name__} does not tell how many of its {length} frames "
        "are data; give contexts of equal length."
    )


@dataclass(frozen=True)
class OwnLoss(Objective):
    """The loss that the model returns, times what it was averaged over.

    `reduction` is `sum`, `mean` (over contexts that weigh alike), or `alone`: neither is true of it, and it is taken
    for each context by itself, so that it does not depend on the batch. `masked` is the argument that marks what is
    predicted [B, T]; without one a context is one unit.
    """

    reduction: str = "mean"
    masked: str = ""
    name: ClassVar[str] = "own"
    unit: ClassVar[str] = "context"
    nats: ClassVar[bool] = False

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        if self.reduction != "alone":
            return _own_loss(model, inputs) * (1 if self.reduction == "sum" else self.count(inputs))
        each = [_own_loss(model, part) * self.count(part) for part in one_by_one(inputs)]
        return torch.stack(each).sum()

    def count(self, inputs: Mapping[str, Any]) -> int:
        if self.masked:
            return int(inputs[self.masked].sum())
        return context_count(inputs)


class MaskedPatches(OwnLoss):
    """The error of reconstructed patches, as the model states it, times the number of hidden patches."""

    name: ClassVar[str] = "masked"
    unit: ClassVar[str] = "masked patch"


@dataclass(frozen=True)
class HiddenPatches(MaskedPatches):
    """The same for a model that shuffles patches by `noise` and hides a fixed share of them."""

    share: float = 0.75

    def count(self, inputs: Mapping[str, Any]) -> int:
        batch, patches = inputs["noise"].shape
        return int(batch * (patches - int(patches * (1 - self.share))))


@dataclass(frozen=True)
class FrameChoice:
    """What masked frames are chosen among: their place in the B·T frames [M], codes, and distractors [M, N]."""

    said: Tensor  # [M, width], the model's answers
    known: Tensor  # [B·T, width], the codes
    place: Tensor
    drawn: Tensor
    length: int  # T


@dataclass(frozen=True)
class MaskedFrames(ContextObjective):
    """The contrastive loss of wav2vec 2.0, summed over masked frames; distractors are masked frames of the same sound.

    They are drawn by a hash of the sound, so that the loss depends neither on the batch nor on a random state; those
    with the code of the frame itself do not count. The diversity of codes, a number of the whole batch without a
    gradient in evaluation mode, is left out.
    """

    negatives: int = NEGATIVES
    temperature: float = 0.1
    name: ClassVar[str] = "masked"
    unit: ClassVar[str] = "masked frame"

    def by_context(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        choice = self._choice(model, inputs)
        own, others = choice.known[choice.place].unsqueeze(1), choice.known[choice.drawn]  # [M, N, width]
        scores = torch.cosine_similarity(choice.said.unsqueeze(1), torch.cat([own, others], 1), dim=-1)
        same = (others - own).norm(dim=-1) <= SAME * own.norm(dim=-1)  # products of equal codes may round differently
        away = nn.functional.pad(same, (1, 0), value=False)
        losses = -(scores / self.temperature).masked_fill(away, -torch.inf).log_softmax(-1)[:, 0]
        return losses.new_zeros(context_count(inputs)).index_add(0, choice.place // choice.length, losses)

    def _choice(self, model: nn.Module, inputs: Mapping[str, Any]) -> FrameChoice:
        output = forward(model, {name: value for name, value in inputs.items() if name != "sampled_negative_indices"})
        said, codes = (output_part(output, f"projected_{name}states") for name in ("", "quantized_"))
        if not isinstance(said, Tensor) or not isinstance(codes, Tensor):
            raise AnisoscopeError(
                f"{type(unwrapped(model)).__name__} masks frames but returned no projected states and codes; give "
                "loss=, a function of (model, inputs) that returns the summed loss."
            )
        masked = inputs["mask_time_indices"].cpu().bool()
        drawn = distractors(masked, original_contexts(inputs), number=self.negatives)
        place = masked.flatten().nonzero().squeeze(1).to(said.device)
        wide = said if said.dtype == torch.float64 else said.float()
        known, drawn = codes.to(wide.dtype).flatten(0, 1), drawn.flatten(0, 1).to(said.device)[place]
        return FrameChoice(wide.flatten(0, 1)[place], known, place, drawn, masked.shape[1])

    def own_constant(self, model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> list[Tensor] | None:
        """One score for each code, the same at every frame; where all codes are one, as after a collapse, it is right.

        Scores of a constant answer are cosines; here they are free, so that no constant answer is better. They are
        fitted on all folds of the contexts but that of the frame.
        """
        with torch.no_grad():
            choices = [self._choice(model, inputs) for inputs in batches]
        codes = code_numbers(torch.cat([choice.known[choice.place] for choice in choices]).double().cpu())
        own, others, frames, at = [], [], [], 0
        for choice, inputs in zip(choices, batches, strict=True):
            numbers = torch.full((len(choice.known),), -1)
            numbers[choice.place.cpu()] = own_codes = codes[at : at + len(choice.place)]
            at += len(choice.place)
            own.append(own_codes)
            others.append(numbers[choice.drawn.cpu()])
            frames.append(fold_of(original_contexts(inputs))[choice.place.cpu() // choice.length])
        losses = constant_choice(torch.cat(own), torch.cat(others), torch.cat(frames))
        sums = []
        for choice, part, inputs in zip(choices, losses.split([len(each) for each in own]), batches, strict=True):
            zeros = torch.zeros(context_count(inputs), dtype=torch.float64)
            sums.append(zeros.index_add(0, choice.place.cpu() // choice.length, part))
        return sums

    def count(self, inputs: Mapping[str, Any]) -> int:
        return int(inputs["mask_time_indices"].sum())


@dataclass(frozen=True)
class NextTokens(PositionClasses):
    """Cross-entropy of the next token, where the labels are the ids moved by one position."""

    name: ClassVar[str] = "next"
    unit: ClassVar[str] = "token"


def code_numbers(codes: Tensor) -> Tensor:
    """A number for each row [M, width] that equal rows share, though they may differ by rounding.

    >>> code_numbers(torch.tensor([[1.0, 2.0], [0.0, 1.0], [1.0, 2.0 + 1e-9]])).tolist()
    [1, 0, 1]
    """
    random = torch.Generator().manual_seed(0)
    ways = nn.functional.normalize(torch.randn(codes.shape[1], 4, generator=random, dtype=codes.dtype), dim=0)
    groups = []
    for along in (codes @ ways).T:
        values, order = along.sort()
        jumps = values.diff(prepend=values[:1]) > SAME * codes.norm(dim=1).max()
        groups.append(torch.empty_like(order).scatter(0, order, jumps.cumsum(0)))
    return torch.stack(groups, 1).unique(dim=0, return_inverse=True)[1]


def constant_choice(own: Tensor, others: Tensor, fold: Tensor) -> Tensor:
    """Losses [M] of choosing `own` [M] codes among themselves and `others` [M, N] by one score for each code.

    Others of the same code do not count. Scores are fitted on the other folds, with a ridge that leaves those of
    unseen codes at 0; with a single fold on all frames.
    """
    away = others == own[:, None]

    def losses(scores: Tensor, rows: Tensor) -> Tensor:
        beside = (scores[others[rows]] - scores[own[rows], None]).masked_fill(away[rows], -torch.inf)
        return nn.functional.pad(beside, (1, 0)).logsumexp(1)

    def fitted(scores: Tensor, rows: Tensor) -> Tensor:
        scores = scores.clone().requires_grad_()
        optimizer = torch.optim.LBFGS(  # the tolerances are of a sum over hundreds of frames
            [scores], max_iter=50, tolerance_grad=1e-2, tolerance_change=1e-6, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            with torch.enable_grad():
                total = losses(scores, rows).sum() + scores.square().sum() / 2
                total.backward()
            return total

        optimizer.step(closure)
        return scores.detach()

    whole = fitted(torch.zeros(int(own.max()) + 1, dtype=torch.float64), torch.arange(len(own)))
    found = torch.zeros(len(own), dtype=torch.float64)
    for held in (folds := fold.unique()):
        mine = (fold == held).nonzero().squeeze(1)
        scores = fitted(whole, (fold != held).nonzero().squeeze(1)) if len(folds) > 1 else whole
        found[mine] = losses(scores, mine)
    return found


def distractors(masked: Tensor, contexts: Tensor, *, number: int) -> Tensor:
    """Indices [B, T, number] into the B·T frames: for each masked frame other masked frames of its context."""
    batch, length = masked.shape
    count = masked.sum(1)[:, None, None]
    rank = (masked.cumsum(1) - 1).clamp(min=0)[:, :, None]  # of a frame among the masked ones of its context
    draw = rank * number + torch.arange(number, device=masked.device)
    hashed = row_hash(contexts.to(masked.device)[:, None, None], draw, seed=1)
    shift = 1 + ((hashed >> 2) & ((1 << 61) - 1)) % (count - 1).clamp(min=1)
    places = (~masked).int().argsort(dim=1, stable=True)  # masked frames first, in their order
    other = places[:, :, None].expand(-1, -1, number).gather(1, (rank + shift) % count.clamp(min=1))
    drawn = other.where(masked[:, :, None] & (count > 1), 0)
    return drawn + torch.arange(batch, device=masked.device)[:, None, None] * length


def context_count(inputs: Mapping[str, Any]) -> int:
    """The number of contexts of some inputs."""
    named = [inputs[name] for name in CONTENT if isinstance(inputs.get(name), Tensor)]
    others = [value for value in inputs.values() if isinstance(value, Tensor) and value.dim()]
    if not named and not others:
        kinds = ", ".join(f"{name}: {type(value).__name__}" for name, value in inputs.items())
        raise AnisoscopeError(f"a batch holds no tensor ({kinds[:200]}); give tensors, such as torch.as_tensor(…).")
    return len([*named, *others][0])


def one_by_one(inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The inputs of each context."""
    size = context_count(inputs)
    for b in range(size):
        yield {
            name: value[b : b + 1] if isinstance(value, Tensor) and value.shape[:1] == (size,) else value
            for name, value in inputs.items()
        }


def _own_loss(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    found = output_part(forward(model, inputs), "loss")
    if not isinstance(found, Tensor):
        raise AnisoscopeError(
            f"{type(unwrapped(model)).__name__} returned no loss for its batch; add what it predicts (labels: pairs "
            "of inputs and labels will do; a mask of patches or frames), or give loss=, a function of (model, inputs) "
            "that returns the summed loss."
        )
    return found.sum()


def find_objective(model: nn.Module, inputs: Mapping[str, Any]) -> Objective:
    """The objective of a model on batches with their targets; call it without hooks and gradients.

    `inputs` should be two contexts or more. An error says what is missing.
    """
    takes, labels = inspect.signature(unwrapped(model).forward).parameters, inputs.get("labels")
    if "mask_time_indices" in inputs and "sampled_negative_indices" in takes:
        config = getattr(unwrapped(model), "config", None)
        if getattr(config, "apply_spec_augment", True) is False:
            raise AnisoscopeError(
                f"{type(unwrapped(model)).__name__} reads the frames that it is asked to guess: its configuration has "
                "apply_spec_augment=False, with which transformers does not apply mask_time_indices; set it to True, "
                "before training as well."
            )
        number, warmth = (getattr(config, name, None) for name in ("num_negatives", "contrastive_logits_temperature"))
        return MaskedFrames(int(number or NEGATIVES), float(warmth or MaskedFrames.temperature))
    if isinstance(labels, Tensor):
        try:
            logits = logits_of(forward(model, without_labels(inputs)))
        except TypeError:  # a user's own forward may ask for its labels
            logits = None
        if logits is not None and logits.dim() == 2 and len(logits) == len(labels) and _fits(logits, labels):
            return Classes()
        if logits is not None and logits.dim() == 3:
            if "bool_masked_pos" in inputs and labels.shape == logits.shape[:2]:
                return PositionClasses()
            if any(name in inputs for name in SOUND) and (found := _transcripts(model, inputs, logits)) is not None:
                return found
            if labels.shape == logits.shape[:2]:
                return NextTokens() if moved_by_one(inputs.get("input_ids"), labels) else PositionClasses()
    hidden = "bool_masked_pos" if "bool_masked_pos" in inputs else ""
    share = getattr(getattr(model, "config", None), "mask_ratio", None)
    if "noise" in inputs and isinstance(share, float):
        return HiddenPatches(_reduction(model, inputs), share=share)
    reduction = _reduction(model, inputs)
    return MaskedPatches(reduction, hidden) if hidden else OwnLoss(reduction)


def refuse_labels(labels: Any, classes: int) -> None:
    """Raise an error for labels of classes that a model does not have, before a device is asked for their loss.

    >>> refuse_labels(torch.tensor([0, 4, -100]), 5)
    """
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return
    counted = labels[labels != IGNORED]
    wrong = counted[(counted < 0) | (counted >= classes)]
    if len(wrong):
        raise AnisoscopeError(
            f"a label of the probe is {int(wrong[0])}, and the model has {classes} outputs; expected labels from 0 to "
            f"{classes - 1}, or {IGNORED} for what does not count."
        )


def moved_by_one(ids: Any, labels: Tensor) -> bool:
    """Whether labels [B, T] are the ids of the next positions.

    >>> moved_by_one(torch.tensor([[5, 6, 7]]), torch.tensor([[6, 7, 8]]))
    True
    """
    if not isinstance(ids, Tensor) or ids.shape != labels.shape or ids.dim() != 2 or ids.shape[1] < 2:
        return False
    before, after = labels[:, :-1].cpu(), ids[:, 1:].cpu()
    return bool(((before == after) | (before == IGNORED)).all() and (before != IGNORED).any())


def _fits(logits: Tensor, labels: Tensor) -> bool:
    if labels.is_floating_point():
        return labels.shape == logits.shape or (logits.shape[1] == 1 and labels.numel() == len(logits))
    return labels.dim() == 1


def _reduction(model: nn.Module, inputs: Mapping[str, Any]) -> str:
    """Whether the model's loss of two contexts is the mean or the sum of their own ones, or neither (`alone`)."""
    size = context_count(inputs)
    each = [float(_own_loss(model, part)) for part in itertools.islice(one_by_one(inputs), 2)]
    if size < 2:
        return "alone"
    both = {
        name: value[:2] if isinstance(value, Tensor) and value.shape[:1] == (size,) else value
        for name, value in inputs.items()
    }
    whole = float(_own_loss(model, both))
    for reduction, wanted in (("mean", sum(each) / 2), ("sum", sum(each))):
        if abs(whole - wanted) <= 1e-4 * max(abs(wanted), 1e-12):
            return reduction
    return "alone"


def _transcripts(model: nn.Module, inputs: Mapping[str, Any], logits: Tensor) -> Transcripts | None:
    """The CTC reading of labels that gives the model's own loss; None if there is none.

    It is asked for the longest transcript without its padding: Parakeet takes −100 for a symbol in some versions of
    transformers, and reads memory that is not its own.
    """
    labels = inputs["labels"]
    if labels.dim() != 2 or "labels" not in inspect.signature(unwrapped(model).forward).parameters:
        return None
    longest = int((labels >= 0).sum(1).argmax())
    alone = next(itertools.islice(one_by_one(inputs), longest, None))
    alone["labels"] = alone["labels"][alone["labels"] >= 0][None]
    try:
        stated = output_part(forward(model, alone), "loss")
    except (RuntimeError, ValueError, IndexError):
        return None
    found = _spelling(model, alone, logits[longest : longest + 1], stated)
    return None if found is None else found[0]


def _spelling(
    model: nn.Module, inputs: Mapping[str, Any], logits: Tensor, stated: Any
) -> tuple[Transcripts, str] | None:
    """The CTC reading and the reduction (`sum`, or `mean` of losses per symbol) that give the loss a model states."""
    if not isinstance(stated, Tensor) or inputs["labels"].dim() != 2:
        return None
    config = getattr(unwrapped(model), "config", None)
    own, last = float(stated.detach()), logits.shape[-1] - 1
    named = [getattr(config, name, None) for name in _BLANKS]
    blanks = [blank for blank in dict.fromkeys([*named, 0, last]) if isinstance(blank, int) and 0 <= blank <= last]
    for blank, reduction in itertools.product(blanks, _REDUCTIONS):
        reading = Transcripts(blank)
        each = reading.losses(logits, inputs, model).double().cpu()
        sizes = reading.symbols(inputs["labels"]).sum(1).clamp(min=1).cpu()
        total = float(each.sum() if reduction == "sum" else (each / sizes).mean())
        if abs(total - own) <= CLOSE * max(abs(total), 1e-6):
            return reading, reduction
    return None


@dataclass(frozen=True)
class LossReading:
    """What turns the gradients of a loss that a model returned in training into those of the summed loss."""

    units: int
    factor: float = 1.0
    by_context: Tensor | None = None  # [B], of each context, if they weigh differently
    note: str = ""


UNREAD = "how the model reduces its loss is not known; it was taken as a mean over the contexts of a micro-batch"


def read_loss(model: nn.Module, output: Any, inputs: Mapping[str, Any]) -> LossReading:
    """How a model that reads no tokens reduced the loss of a training pass, from its output alone."""
    size, labels, logits = context_count(inputs), inputs.get("labels"), logits_of(output)
    if inputs.get("sampled_negative_indices") is not None:
        return LossReading(int(inputs["mask_time_indices"].sum()))
    if isinstance(labels, Tensor) and logits is not None and logits.dim() == 3:
        with torch.no_grad():
            found = _spelling(model, inputs, logits.detach(), output_part(output, "loss"))
        if found is not None:
            sizes = found[0].symbols(labels).sum(1).cpu().double()
            weights = None if found[1] == "sum" else sizes.clamp(min=1) * size
            return LossReading(int(sizes.sum()), by_context=weights)
    if isinstance(hidden := inputs.get("bool_masked_pos"), Tensor):
        number = int(hidden.sum())
        return LossReading(number, number)
    if isinstance(hidden := output_part(output, "mask"), Tensor) and "pixel_values" in inputs:
        number = int(hidden.sum())
        return LossReading(number, number)
    return LossReading(size, size, note=UNREAD)
