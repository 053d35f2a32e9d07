"""Language models: the training batches, cut from a tokenised corpus, and a new model for its vocabulary.

Batches are a pure function of (seed, step, micro-batch), so a resumed run needs no loader state.

Notation: T = context length, N = windows, B = contexts of a micro-batch.

A *segment* is a document of at least T tokens, or a run of adjacent shorter ones, joined by [SEP]; a run shorter than T
is extended into adjacent text. *Windows* of T tokens begin every T/2 tokens of a segment, and the last one ends with
it: no window crosses the ends of a document that is long enough, and none needs padding. Windows are drawn with
replacement, with equal weights or those of a resampling: arms that differ in `--frequency` differ only in the weights.
Arms that differ in `--target-weights` see the same batches; targets count in the loss by their frequency.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anisoscope.capture.gradient_pass import LabelConvention
from anisoscope.data.resampling import resample
from anisoscope.data.target_weights import parse_target_weights, weights_by_frequency, weights_report
from anisoscope.data.tokens import IGNORED, MASK, PAD, SEP, SPECIALS
from anisoscope.errors import AnisoscopeError
from anisoscope.models.attention_variant import MODEL_TYPE, VARIANTS
from anisoscope.models.checkpoint import LoadOptions, fresh_config, fresh_model
from anisoscope.models.load import quiet
from anisoscope.models.placement import choose_device
from anisoscope.numerics.hashing import mix, row_hash
from anisoscope.option import Progress
from anisoscope.results.folder import replace_file
from anisoscope.training.config import TrainConfig, choose_family
from anisoscope.training.corpus import Corpus, CorpusPart, prepare_corpus

MICRO = 1 << 20  # upper bound of micro-batches per step
BLOCK = 1 << 22  # tokens counted at a time
_RANGE = 62  # bits of a random draw
_PROBE_SEED = 0x9806E  # of the probe's masks: the same for all arms and seeds
_CPU = torch.device("cpu")
Batch = dict[str, Tensor]


def make_stream(
    config: TrainConfig, out: Path, *, corpus: str | Path | None = None, progress: Progress | None = None
) -> WindowStream:
    """The batches of a run; tokenised text and window weights are computed once and then read from the folder."""
    tell = progress or (lambda what, done, of: None)
    tell("corpus", 0, 1)
    folder = corpus if corpus is not None else out / "corpus"
    options: dict[str, Any] = {name: getattr(config, name) for name in ("tokens", "limit", "text_field")}
    text = prepare_corpus(config.data, folder, **options)
    tell("corpus", 1, 1)
    natural = config.frequency == "natural"
    weights, report = (None, None) if natural else _window_weights(config, text, out / "sampling.npz")
    settings: dict[str, Any] = {name: getattr(config, name) for name in ("batch_size", "mask_rate", "seed")}
    settings |= {"device": choose_device(config.device), "weights": weights, "report": report}
    settings |= {"loss_weights": config.target_weights}
    return WindowStream(text, config.context, objective=config.task, **settings)


def _window_weights(config: TrainConfig, corpus: Corpus, path: Path) -> tuple[np.ndarray, dict[str, Any]]:
    if not path.is_file():
        words: dict[str, Any] = {"context": config.context, "frequency": config.frequency, "specials": len(SPECIALS)}
        starts = training_windows(corpus, config.context)
        weights, report = resample(corpus.train.tokens, starts, vocab_size=corpus.vocab_size, **words)

        def write(beside: Path) -> None:
            with beside.open("wb") as file:  # np.savez would change the suffix of a path
                np.savez(file, weights=weights, report=np.array(json.dumps(report)))

        replace_file(path, write)
    with np.load(path) as stored:
        return stored["weights"], json.loads(str(stored["report"]))


def build_model(config: TrainConfig, *, vocab_size: int) -> nn.Module:
    """A new model with its head, whose forward returns a loss; the same weights for the same sizes and seed.

    In a family of both architectures the weights do not depend on mask and objective either.
    The initial weights come from a separate generator; the global one is not changed.
    """
    from transformers import CONFIG_MAPPING

    family = choose_family(config.arch, config.family)
    inner = int(-(-family.inner * config.width // 8) * 8)  # rounded up to a multiple of eight for tensor cores
    # defaults of published models that do not fit here: special tokens, generation cache
    fixed = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id"))
    fixed |= {"sep_token_id": SEP, "mask_token_id": MASK, "use_cache": False}
    known = CONFIG_MAPPING[family.model_type]().to_dict()
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "max_position_embeddings": config.context,
        family.inner_field: inner,
        "pad_token_id": PAD,
        "tie_word_embeddings": config.tied,
        **dict.fromkeys(family.dropout, config.dropout),
        **{name: value for name, value in fixed.items() if name in known},
        **family.options,
    }
    varied = config.attention is not None and VARIANTS[config.attention] is not None
    with quiet():
        built = fresh_config(MODEL_TYPE if varied else family.model_type, fields)
        if varied:
            built.attention_variant = config.attention
        if len(family.archs) > 1:
            built.is_causal = config.arch == "decoder"  # a field of transformers
            built.objective = config.task  # our own field: see models.checkpoint.with_own_loss
        built._attn_implementation = "sdpa"
        model = fresh_model(built, LoadOptions(torch.device("cpu"), seed=config.seed))
    return model.double() if config.dtype == "float64" else model


def segments(part: CorpusPart, context: int) -> tuple[np.ndarray, np.ndarray]:
    """(begin, end) of every segment, sorted.

    >>> tokens, ends = np.zeros(14), np.array([6, 9, 14])  # documents of 6, 2 and 4 tokens
    >>> segments(CorpusPart(tokens, ends), 5)
    (array([0, 7]), array([ 6, 14]))
    """
    starts, ends = part.starts, part.ends
    short = ends - starts < context
    edge = np.diff(np.concatenate([[0], short.astype(np.int8), [0]]))
    first, last = np.flatnonzero(edge == 1), np.flatnonzero(edge == -1) - 1
    begin = np.minimum(starts[first], len(part.tokens) - context)
    end = np.maximum(ends[last], begin + context)
    begin, end = np.concatenate([starts[~short], begin]), np.concatenate([ends[~short], end])
    order = np.lexsort((end, begin))
    return begin[order], end[order]


def window_starts(part: CorpusPart, context: int, *, stride: int) -> np.ndarray:
    """The first position of every window, int64 [N], ascending and without repetition."""
    if len(part.tokens) < context:
        raise AnisoscopeError(
            f"a part of the corpus holds {len(part.tokens)} tokens, fewer than one context of {context}; "
            f"give more text or a shorter --context."
        )
    begin, end = segments(part, context)
    steps = (end - begin - context) // stride + 1
    number = np.arange(int(steps.sum())) - np.repeat(np.cumsum(steps) - steps, steps)
    return np.unique(np.concatenate([np.repeat(begin, steps) + number * stride, end - context]))


def window_counts(
    tokens: np.ndarray, starts: np.ndarray, *, context: int, weights: np.ndarray | None, size: int
) -> np.ndarray:
    """Σᵢ wᵢ · (occurrences of each id in window i), float64 [size]; weights sum to 1 (None = equal)."""
    total = np.zeros(size)
    rows = max(1, BLOCK // context)
    for at in range(0, len(starts), rows):
        ids = tokens[starts[at : at + rows, None] + np.arange(context)].ravel()
        mine = None if weights is None else np.repeat(weights[at : at + rows], context)
        total += np.bincount(ids, weights=mine, minlength=size)
    return total / len(starts) if weights is None else total


def draw_edges(weights: np.ndarray | None, count: int) -> np.ndarray:
    """Cumulative weights as integers below 2⁶², so that a draw is the same on every device.

    >>> draw_edges(None, 4).tolist() == [k << 60 for k in (1, 2, 3, 4)]
    True
    """
    parts = np.full(count, 1 / count) if weights is None else weights / weights.sum()
    share = np.minimum(np.cumsum(parts), 1.0)
    share[-1] = 1.0
    return (share * float(1 << _RANGE)).astype(np.int64)


def mask_tokens(ids: Tensor, keys: Tensor, *, vocab_size: int, rate: float, seed: int) -> Batch:
    """Inputs and labels of a masked language model: of rate·T positions 80 % [MASK], 10 % random, 10 % unchanged.

    The same number of positions is chosen in every context, so that micro-batches have equal weight; special tokens
    are chosen last. `keys` int64 [B] determine all choices.
    """
    place = torch.arange(ids.shape[1], device=ids.device)
    chance = _draw(row_hash(keys[:, None], place, seed=seed))
    chance = chance + (ids < len(SPECIALS)).long() * (1 << _RANGE)
    count = max(1, round(rate * ids.shape[1]))
    drawn = torch.topk(chance, count, dim=1, largest=False, sorted=True)
    original, second_draw = ids.gather(1, drawn.indices), _draw(mix(drawn.values + 1))
    noise = len(SPECIALS) + (second_draw // 10) % (vocab_size - len(SPECIALS))
    replacement = torch.where(second_draw % 10 == 8, noise, original).masked_fill(second_draw % 10 < 8, MASK)
    labels = torch.full_like(ids, IGNORED).scatter(1, drawn.indices, original)
    return {"input_ids": ids.scatter(1, drawn.indices, replacement), "labels": labels}


def _draw(hashed: Tensor) -> Tensor:
    """62 bits of a hash as a non-negative integer."""
    return (hashed >> 2) & ((1 << _RANGE) - 1)


@dataclass(frozen=True, eq=False)
class WindowStream:
    """The training batches of one run, and the held-out contexts of its probe.

    On CUDA the tokens are on the device and batches are cut there without synchronisation; otherwise they are
    memory-mapped from disk.
    """

    corpus: Corpus
    context: int
    objective: str = "next"  # or masked
    batch_size: int = 16
    mask_rate: float = 0.15
    seed: int = 0
    device: torch.device = _CPU
    weights: np.ndarray | None = None  # [N] of the windows; None = equal
    report: dict[str, Any] | None = None  # of the resampling that gave the weights
    loss_weights: str = "none"  # of the targets: none, flat or power:A

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer of the text."""
        return self.corpus.tokenizer

    @property
    def files(self) -> Path:
        """The folder of the tokenizer's files."""
        return self.corpus.path / "tokenizer"

    def about(self) -> dict[str, Any]:
        """The entry `data` of run.json, with the report of the resampling if there is one."""
        kept = ("fingerprint", "bytes", "parts", "vocab_size")
        entry = {**self.corpus.about.get("of", {}), **{name: self.corpus.about[name] for name in kept}}
        entry |= {"types": int((self.counts > 0).sum()), "windows": len(self.starts), "context_length": self.context}
        entry |= {} if self.report is None else {"sampling": self.report}
        if self.target_weights is None:
            return entry
        weights = self.target_weights.double().cpu().numpy()
        return {**entry, "target_weights": weights_report(self.counts, weights, name=self.loss_weights)}

    @cached_property
    def starts(self) -> np.ndarray:
        """First positions of the training windows."""
        return training_windows(self.corpus, self.context)

    @cached_property
    def counts(self) -> np.ndarray:
        """Token counts int64 [vocab] as training samples them (0 for special tokens).

        The expected counts under the window weights, scaled to the size of the part; at least 1 for a type that occurs.
        """
        settings: dict[str, Any] = {"context": self.context, "weights": self.weights, "size": self.corpus.vocab_size}
        seen = window_counts(self.corpus.train.tokens, self.starts, **settings)
        seen[: len(SPECIALS)] = 0
        scaled = np.rint(seen / seen.sum() * self.corpus.about["parts"]["train"]["tokens"])
        return np.where(seen > 0, np.maximum(scaled, 1), 0).astype(np.int64)

    @cached_property
    def target_weights(self) -> Tensor | None:
        """The weight of each token as a target of the loss, float64 [vocab]; None if all count alike.

        A function of the counts, so a resumed run computes the same. Special tokens, which are not counted, weigh 1.
        """
        exponent = parse_target_weights(self.loss_weights)
        if exponent is None:
            return None
        weights = weights_by_frequency(self.counts, exponent)
        weights[: len(SPECIALS)] = 1.0
        return torch.from_numpy(weights).to(self.device)

    def loss(self, forward: Callable[..., Any], batch: Batch) -> Tensor:
        """The loss of a batch: the model's own, or, with weights, Σ w ℓ / n over its n targets.

        It is divided by the number of targets, not by their weights: the mean of the weights over the corpus is 1, and
        so the gradients of all batches count alike.
        """
        if self.target_weights is None:
            return forward(**batch).loss
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits, reading = forward(**inputs).logits, LabelConvention(self.objective == "next")
        logits = logits if logits.dtype == torch.float64 else logits.float()
        number = (reading.targets(batch["labels"]) != IGNORED).sum()  # a tensor: no synchronisation
        return reading.summed(logits, batch["labels"], weights=self.target_weights) / number

    @cached_property
    def constant(self) -> Tensor:
        """How often each id is a target in training [vocab], in expectation, as `counts`; for the constant's loss.

        Next tokens are all but the first of a window, separators included; masked ones are no special tokens.
        """
        if self.objective == "masked":
            return torch.from_numpy(self.counts)
        settings: dict[str, Any] = {"weights": self.weights, "size": self.corpus.vocab_size}
        seen = window_counts(self.corpus.train.tokens, self.starts + 1, context=self.context - 1, **settings)
        return torch.from_numpy(seen / seen.sum() * self.corpus.about["parts"]["train"]["tokens"])

    @cached_property
    def _resident(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens and offsets where batches are made; window starts and cumulative weights on the host."""
        where = self.device if self.device.type == "cuda" else _CPU
        arrays = (self.corpus.train.tokens, self.starts, draw_edges(self.weights, len(self.starts)))
        tokens, starts, edges = (torch.from_numpy(array) for array in arrays)
        return tokens.to(where), torch.arange(self.context, device=where), starts, edges

    def batch(self, step: int, micro: int = 0) -> Batch:
        """The contexts of one micro-batch: `input_ids` and `labels`, int64 [B, T]."""
        tokens, offsets, starts, edges = self._resident
        # a few numbers for each context: drawn on the host, where that is one launch on the device and not forty
        key = torch.full((self.batch_size,), step * MICRO + micro, dtype=torch.int64)
        rows = row_hash(key, torch.arange(self.batch_size), seed=self.seed)
        first = starts[torch.searchsorted(edges, _draw(rows), right=True)].to(tokens.device, non_blocking=True)
        ids = tokens[first[:, None] + offsets].long()
        return self._with_labels(ids, rows.to(tokens.device, non_blocking=True), seed=self.seed)

    def _with_labels(self, ids: Tensor, keys: Tensor, *, seed: int) -> Batch:
        batch = {"input_ids": ids, "labels": ids}  # the models shift the labels themselves
        if self.objective == "masked":
            batch = mask_tokens(ids, keys, vocab_size=self.corpus.vocab_size, rate=self.mask_rate, seed=seed)
        return {name: value.to(self.device) for name, value in batch.items()}

    def probe_batches(self, contexts: int = 64, *, batch_size: int = 16) -> list[Batch]:
        """Fixed distinct contexts of the held-out part with labels (and masks), the same for all seeds.

        They do not overlap; fewer than `contexts` if the held-out text is short.
        """
        ids = torch.from_numpy(self.probe_ids(contexts))
        keys = row_hash(torch.arange(len(ids)), torch.zeros(len(ids), dtype=torch.int64), seed=_PROBE_SEED)
        whole = self._with_labels(ids, keys, seed=_PROBE_SEED)
        starts = range(0, len(ids), batch_size)
        return [{name: value[at : at + batch_size] for name, value in whole.items()} for at in starts]

    def probe_ids(self, contexts: int) -> np.ndarray:
        """The ids of the probe's contexts, int64 [contexts, T]: those with the smallest hashes of their content."""
        part = self.corpus.held_out
        starts = window_starts(part, self.context, stride=self.context)
        starts = starts[np.concatenate([[True], np.diff(starts) >= self.context])]
        texts = ((at, part.tokens[at : at + self.context].astype("<i8").tobytes()) for at in starts.tolist())
        by_digest = {hashlib.sha256(text).digest(): at for at, text in texts}
        chosen = [by_digest[digest] for digest in sorted(by_digest)[:contexts]]
        return part.tokens[np.array(chosen)[:, None] + np.arange(self.context)].astype(np.int64)


def training_windows(corpus: Corpus, context: int) -> np.ndarray:
    """Starts of the windows that training draws from, one every half context."""
    return window_starts(corpus.train, context, stride=max(1, context // 2))
