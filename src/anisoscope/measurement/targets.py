"""What models of sounds and pictures are to predict: labels and masks for batches, from the data or a stand-in.

Everything is a function of a context alone: masks are drawn by a hash of its content, so that neither the batch nor a
random state decides what is predicted. Where the data states no label, the model's own answer is one, and a note says
so: the gradient then says where the model would sharpen, not where the data would pull it.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from anisoscope.capture.gradient_pass import untouched
from anisoscope.capture.objective import (
    HIDES,
    IGNORED,
    Transcripts,
    context_count,
    find_objective,
    frame_counts,
    logits_of,
    output_part,
)
from anisoscope.capture.row import Batch, original_contexts
from anisoscope.data.tokens import mask_batch
from anisoscope.errors import AnisoscopeError
from anisoscope.models.forward import SOUND, forward, unwrapped
from anisoscope.models.load import Loaded
from anisoscope.numerics.hashing import row_hash
from anisoscope.results.manifest import wrong_loss

HIDDEN = 0.5  # share of patches that are hidden, where the configuration states none
SPAN, SPANNED = 10, 0.5  # frames of a masked span, and the share of frames in spans; wav2vec 2.0 masks about half
_MASK_SEED, _NOISE_SEED = 11, 12
_LAST = torch.iinfo(torch.int64).max  # behind every hash
PREDICTED = ("loss", "logits", "reconstruction", "projected_states")  # what outputs with a head have
MASKS = (*HIDES, "noise")  # arguments that say what is hidden
_PLAIN_LABEL = re.compile(r"LABEL_\d+")

OWN_CLASS = "the data names no classes that the model knows: its own best class of each context is the label"
NUMBERED = "the model names no classes: those of the data, in alphabetical order, are its labels 0, 1, …"
OWN_TEXT = "no transcripts: the model's own greedy reading of each sound is its label"
SOME_TEXT = "sounds without a transcript have the model's own greedy reading as label"
OWN_CODES = "its patches have no labels: the model's own best code of each, seeing the whole picture, is the label"
OWN_FRAMES = "its frames have no labels: the model's own best class of each frame is the label"
OWN_WORDS = "the decoder predicts the text beside a clip where there is one, else the model's own greedy text"


def hidden_patches(inputs: Mapping[str, Any], number: int, *, share: float = HIDDEN) -> Tensor:
    """Which of `number` patches are hidden [B, number]: the same number in each picture, those of smallest hashes."""
    return chosen_patches(_keys(inputs), number, share=share)


def chosen_patches(keys: Tensor, number: int, *, share: float = HIDDEN) -> Tensor:
    """The same share of `number` patches for each key, bool [B, number]."""
    order = _hashes(keys, number, seed=_MASK_SEED).argsort(1)
    chosen = torch.zeros(order.shape, dtype=torch.bool, device=keys.device)
    return chosen.scatter_(1, order[:, : max(1, round(share * number))], value=True)


def shuffling_noise(inputs: Mapping[str, Any], number: int) -> Tensor:
    """Uniform noise [B, number] for models that hide the patches where it is largest."""
    return ((_hashes(_keys(inputs), number, seed=_NOISE_SEED) >> 11) & ((1 << 52) - 1)).double() / (1 << 52)


def hidden_spans(inputs: Mapping[str, Any], real: Tensor, *, span: int = SPAN, share: float = SPANNED) -> Tensor:
    """Which frames are masked [B, T]: spans of `span` frames of data, at the places of smallest hashes."""
    return chosen_spans(_keys(inputs), real, span=span, share=share)


def chosen_spans(keys: Tensor, real: Tensor, *, span: int = SPAN, share: float = SPANNED) -> Tensor:
    """The same for a key of each context [B]; no device–host synchronisation."""
    place = torch.arange(real.shape[1], device=real.device)[None]  # [1, T]
    count = real.sum(1, keepdim=True)
    width = (count // 4).clamp(1, span)
    starts = real & (real.cumsum(1) <= (count - width + 1).clamp(min=1))  # where a whole span has room
    # −log(1 − share) spans per span length leave that share of the frames in some span
    number = (-math.log(1 - share) * count / width).double().round().clamp(min=1)
    hashed = _hashes(keys.to(real.device), real.shape[1], seed=_MASK_SEED).masked_fill(~starts, _LAST)
    starts &= hashed.argsort(1).argsort(1) < number
    begun = starts.cumsum(1)  # spans that begin here or before
    ended = begun.gather(1, (place - width).clamp(min=0)).where(place >= width, 0)  # and those of them that are over
    return (begun > ended) & real


def _keys(inputs: Mapping[str, Any]) -> Tensor:
    """A hash of each context [B]."""
    return original_contexts({name: value for name, value in inputs.items() if name != "labels"})


def _hashes(keys: Tensor, number: int, *, seed: int) -> Tensor:
    """A uniform number for each position of each context [B, number]."""
    return row_hash(keys[:, None], torch.arange(number, device=keys.device)[None], seed=seed)


def patch_count(model: nn.Module, pixels: Tensor) -> int:
    """Patches of a picture by the patch size in the configuration."""
    config = getattr(unwrapped(model), "config", None)
    size = getattr(config, "patch_size", None)
    size = (size, size) if isinstance(size, int) else tuple(size or ())
    if len(size) != 2:
        raise AnisoscopeError(
            f"{type(unwrapped(model)).__name__} hides patches, but its configuration states no patch_size; give "
            "batches with their masks to a Monitor instead."
        )
    return (pixels.shape[-2] // size[0]) * (pixels.shape[-1] // size[1])


def with_masks(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A batch with the mask of patches or frames that the model's own objective needs, unless it has one."""
    takes = inspect.signature(unwrapped(model).forward).parameters
    config, found = getattr(unwrapped(model), "config", None), dict(inputs)
    pixels = inputs.get("pixel_values")
    if isinstance(pixels, Tensor) and "bool_masked_pos" in takes and "bool_masked_pos" not in inputs:
        found["bool_masked_pos"] = hidden_patches(inputs, patch_count(model, pixels))
    if isinstance(pixels, Tensor) and "noise" in takes and "noise" not in inputs and hasattr(config, "mask_ratio"):
        found["noise"] = shuffling_noise(inputs, patch_count(model, pixels))
    if "mask_time_indices" in takes and "sampled_negative_indices" in takes and "mask_time_indices" not in inputs:
        real = _real_frames(model, inputs)
        span = int(getattr(config, "mask_time_length", None) or SPAN)
        found["mask_time_indices"] = hidden_spans(inputs, real, span=span)
    return found


def with_own_targets(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A batch without labels, with the masks by which its model makes its own targets, if it is such a model."""
    if "labels" in inputs:
        return dict(inputs)
    with untouched(model), torch.no_grad():
        output = forward(model, inputs)
    predicts = isinstance(output, Tensor) or any(output_part(output, name) is not None for name in PREDICTED)
    return with_masks(model, inputs) if predicts else dict(inputs)


def _real_frames(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Which frames are data [B, T], by a pass without targets."""
    with untouched(model), torch.no_grad():
        output = forward(model, {name: value for name, value in inputs.items() if name != "labels"})
    states = getattr(output, "projected_states", None)
    states = states if isinstance(states, Tensor) else logits_of(output)
    if states is None:
        raise AnisoscopeError(
            f"{type(unwrapped(model)).__name__} masks frames, but hands out no frames to count; give batches with "
            "mask_time_indices to a Monitor instead."
        )
    counts = frame_counts(model, inputs.get("attention_mask"), states).cpu()
    return torch.arange(states.shape[1]) < counts[:, None]


@dataclass
class MediaTargets:
    """Adds to the batches of one model what it is to predict, and keeps notes on where labels came from."""

    loaded: Loaded
    classes: Sequence[str] = ()  # names of all classes of the data, sorted
    notes: list[str] = field(default_factory=list)
    source: str = ""  # of the labels, for run.json: data, own or input
    _kind: str = ""
    _ctc: Transcripts | None = None

    def labelled(self, batch: Batch) -> dict[str, Any]:
        """The inputs of a batch with labels or masks."""
        model, inputs = self.loaded.model, dict(batch.inputs)
        if self.loaded.is_encoder_decoder:
            return self._teacher_forced(inputs)
        plain = self._forward(inputs)
        if all(getattr(plain, name, None) is None for name in PREDICTED):
            raise no_objective(self.loaded)
        inputs = with_masks(model, inputs)
        output = self._forward(inputs)
        logits, loss = logits_of(output), getattr(output, "loss", None)
        if "mask_time_indices" in inputs or isinstance(loss, Tensor):
            self.source = "input"
            return inputs
        if logits is None:
            raise no_objective(self.loaded)
        if logits.dim() == 2:
            return inputs | {"labels": self._class_labels(logits, batch.groups)}
        if logits.dim() == 3 and "bool_masked_pos" in inputs:
            return inputs | {"labels": self._codes(batch.inputs, inputs["bool_masked_pos"])}
        if logits.dim() == 3 and any(name in inputs for name in SOUND):
            return self._spelled(inputs, logits, texts=batch.texts, groups=batch.groups)
        raise no_objective(self.loaded)

    def _forward(self, inputs: Mapping[str, Any]) -> Any:
        try:
            with untouched(self.loaded.model), torch.no_grad():
                return forward(self.loaded.model, inputs)
        except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            hidden = " and ".join(name for name in MASKS if name in inputs)
            raise AnisoscopeError(
                f"{self.loaded.name} fails on its first contexts{f' with {hidden}' if hidden else ''} ({reason}); "
                "check that its configuration and its head fit together, such as use_mask_token or encoder_stride."
            ) from error

    def _note(self, text: str, *, source: str = "own") -> None:
        self.source = source if self.source in ("", source) else "data and own"
        if text and text not in self.notes:
            self.notes.append(text)

    def _class_labels(self, logits: Tensor, groups: Sequence[str] | None) -> Tensor:
        """The classes of the data by name or number; where they do not fit the model, its own best class."""
        known = self._known(logits.shape[1])
        if groups is not None and known and all(name in known for name in groups):
            self._note("" if len(known) > len(self.classes) or self._named else NUMBERED, source="data")
            return torch.tensor([known[name] for name in groups])
        self._note(OWN_CLASS)
        return logits.argmax(-1).cpu()

    @property
    def _named(self) -> bool:
        """Whether the model names its classes."""
        words = getattr(unwrapped(self.loaded.model).config, "id2label", None) or {}
        return any(not _PLAIN_LABEL.fullmatch(str(word)) for word in words.values())

    def _known(self, number: int) -> dict[str, int]:
        """The label of each class of the data; empty if they do not fit."""
        words = getattr(unwrapped(self.loaded.model).config, "id2label", None) or {}
        by_name = {_plain(part): int(i) for i, word in words.items() for part in (str(word), *str(word).split(","))}
        if self._named:
            found = {name: by_name.get(_plain(name), -1) for name in self.classes}
            return found if self.classes and min(found.values()) >= 0 else {}
        return {name: i for i, name in enumerate(self.classes)} if 1 < len(self.classes) <= number else {}

    def _codes(self, whole: Mapping[str, Any], hidden: Tensor) -> Tensor:
        """Codes of hidden patches that the model itself gives them when nothing is hidden."""
        nothing = {"bool_masked_pos": torch.zeros_like(hidden)}
        logits = logits_of(self._forward({**whole, **nothing}))
        assert logits is not None
        self._note(OWN_CODES)
        return logits.argmax(-1).cpu().where(hidden, IGNORED)

    def _spelt_classes(self, groups: Sequence[str] | None, number: int) -> list[list[int]]:
        """Transcripts of models trained here to spell classes: one symbol, after the blank."""
        known = self._known(number - 1)
        if groups is None or not known or any(name not in known for name in groups):
            return []
        self._note("", source="data")
        return [[known[name] + 1] for name in groups]

    def _spelled(
        self,
        inputs: dict[str, Any],
        logits: Tensor,
        *,
        texts: Sequence[str] | None,
        groups: Sequence[str] | None,
    ) -> dict[str, Any]:
        """CTC labels: known transcripts in the model's symbols, else its own reading; or classes of frames."""
        model = self.loaded.model
        frames = frame_counts(model, inputs.get("attention_mask"), logits)
        if not self._kind:
            trial = pad_sequence([torch.tensor([1, 2, 1])] * context_count(inputs), batch_first=True)
            with untouched(model), torch.no_grad():
                found = find_objective(model, {**inputs, "labels": trial % logits.shape[-1]})
            self._kind, self._ctc = found.name, found if isinstance(found, Transcripts) else None
        if self._ctc is None:
            real = torch.arange(logits.shape[1]) < frames.cpu()[:, None]
            self._note(OWN_FRAMES)
            return inputs | {"labels": logits.argmax(-1).cpu().where(real, IGNORED)}
        if getattr(model.config, "objective", "") == "ctc" and (spelt := self._spelt_classes(groups, logits.shape[-1])):
            return inputs | {"labels": torch.tensor(spelt)}
        read = self._ctc.decoded(logits, frames)
        spelled = [self._symbols(text, logits.shape[-1]) for text in texts or [""] * len(read)]
        rows = [torch.tensor(known or own) for known, own in zip(spelled, read, strict=True)]
        if any(spelled):
            self._note(SOME_TEXT if not all(spelled) else "", source="data and own" if not all(spelled) else "data")
        else:
            self._note(OWN_TEXT)
        return inputs | {"labels": pad_sequence(rows, batch_first=True, padding_value=IGNORED)}

    def _symbols(self, text: str, number: int) -> list[int]:
        """A transcript in the model's symbols; none without a tokenizer, or with symbols the model does not have."""
        if not text or self.loaded.tokenizer is None or self._ctc is None:
            return []
        ids = [int(i) for i in self.loaded.tokenizer(text, add_special_tokens=False)["input_ids"]]
        return ids if ids and max(ids) < number and self._ctc.blank not in ids else []

    def _teacher_forced(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Labels of a decoder: at each position the token after it; the end token after the last."""
        ids, mask = inputs["decoder_input_ids"], inputs["decoder_attention_mask"]
        config = getattr(self.loaded.model, "generation_config", None) or self.loaded.model.config
        end = getattr(config, "eos_token_id", None)
        end = end[0] if isinstance(end, (list, tuple)) else end
        labels = torch.full_like(ids, IGNORED)
        labels[:, :-1] = ids[:, 1:].masked_fill(mask[:, 1:] == 0, IGNORED)
        if isinstance(end, int):
            labels.scatter_(1, (mask.sum(1, keepdim=True) - 1), end)
        self._note(OWN_WORDS, source="data and own")
        return inputs | {"labels": labels}


def _plain(name: str) -> str:
    """A class name without case, hyphens and underscores.

    >>> _plain("Tabby_cat "), _plain("tabby-cat")
    ('tabby cat', 'tabby cat')
    """
    return re.sub(r"[\s_-]+", " ", name).strip().lower()


def no_objective(loaded: Loaded) -> AnisoscopeError:
    """The error for a model without a head to predict anything with."""
    return AnisoscopeError(
        f"{loaded.name} was loaded as {type(unwrapped(loaded.model)).__name__}, which predicts nothing that a loss "
        "could be taken of; give a checkpoint that holds its head (classes, CTC, masked patches or frames, a decoder), "
        "or a Monitor with loss=."
    )


def labelled_batch(loaded: Any, batch: Batch, *, seed: int, following: bool | None = None) -> dict[str, Tensor]:
    """A batch with the labels of the model's training objective: next tokens, or masked ones.

    If `following` is None, the model's attention decides; padding is never a label.
    """
    inputs = dict(batch.inputs)
    mask = inputs["attention_mask"]
    if loaded.predicts_next if following is None else following:
        return {**inputs, "labels": inputs["input_ids"].masked_fill(mask == 0, -100)}
    special = batch.special if batch.special is not None else torch.zeros_like(mask, dtype=torch.bool)
    found: dict[str, Tensor] = mask_batch(inputs, special, loaded.tokenizer, seed=seed)
    return found


def wrong_text(loaded: Loaded, batch: Batch, *, seed: int = 0) -> list[str]:
    """The warning for a model whose loss on the first tokens is above that of guessing, by two standard errors.

    Only where a loss can be had from its logits; random weights know no text.
    """
    known = loaded.is_encoder_decoder or not loaded.reads_text or any("random weights" in n for n in loaded.notes)
    if known or loaded.tokenizer is None:
        return []
    masked = not loaded.predicts_next
    if masked and getattr(loaded.tokenizer, "mask_token_id", None) is None:
        return []
    few = (slice(0, 4), slice(0, 128)) if masked else (slice(0, 2), slice(0, 64))
    part = Batch({k: v[few] for k, v in batch.inputs.items()}, None if batch.special is None else batch.special[few])
    inputs = labelled_batch(loaded, part, seed=seed)
    labels = inputs.pop("labels")
    every = {"logits_to_keep": 0} if "logits_to_keep" in inspect.signature(loaded.model.forward).parameters else {}
    with torch.inference_mode():
        logits = getattr(forward(loaded.model, inputs, **every), "logits", None)
    if logits is None or logits.shape[:2] != labels.shape or logits.shape[2] < 2:
        return []
    logits, labels = (logits, labels) if masked else (logits[:, :-1], labels[:, 1:])
    chosen = labels != IGNORED
    losses = nn.functional.cross_entropy(
        logits[chosen.to(logits.device)].float(), labels[chosen].to(logits.device), reduction="none"
    )
    if len(losses) < 2:
        return []
    return wrong_loss(float(losses.mean() - 2 * losses.std() / len(losses) ** 0.5), logits.shape[2])
