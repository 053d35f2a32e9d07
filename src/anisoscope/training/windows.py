"""Batches as a pure function of (seed, step, micro-batch): a resumed run needs no loader state.

Notation: T = context length, N = windows, B = contexts of a micro-batch.

A *segment* is a document of at least T tokens, or a run of neighbouring shorter ones, joined by [SEP]; a run that is
itself shorter than T is lengthened with the text beside it. *Windows* of T tokens lie in a segment every T/2 tokens,
the last flush with its end: no window crosses the ends of a document that is long enough, none needs padding.
Windows are drawn with replacement, with equal weights or those of a resampling: arms that differ in `--frequency`
differ in the weights alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anisoscope.data.vocabulary import MASK, SPECIALS
from anisoscope.errors import AnisoscopeError
from anisoscope.numerics.hashing import mix, row_hash
from anisoscope.training.corpus import Corpus, CorpusPart

IGNORED = -100  # label of a position that is not predicted
MICRO = 1 << 20  # micro-batches of a step at most
BLOCK = 1 << 22  # tokens counted at a time
_RANGE = 62  # bits of a draw
_PROBE_SEED = 0x9806E  # of the probe's masks: every arm and seed is probed alike
_CPU = torch.device("cpu")
Batch = dict[str, Tensor]


def segments(part: CorpusPart, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Begin and end of every stretch that windows may lie in.

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
    """Inputs and labels of a masked language model: of rate·T positions 80 % [MASK], 10 % random, 10 % as they are.

    The same number of positions is chosen in every context, so that micro-batches weigh the same; special tokens come
    last. `keys` int64 [B] decide everything.
    """
    place = torch.arange(ids.shape[1], device=ids.device)
    chance = _draw(row_hash(keys[:, None], place, seed=seed))
    chance = chance + (ids < len(SPECIALS)).long() * (1 << _RANGE)
    count = max(1, round(rate * ids.shape[1]))
    drawn = torch.topk(chance, count, dim=1, largest=False, sorted=True)
    was, other = ids.gather(1, drawn.indices), _draw(mix(drawn.values + 1))
    noise = len(SPECIALS) + (other // 10) % (vocab_size - len(SPECIALS))
    shown = torch.where(other % 10 == 8, noise, was).masked_fill(other % 10 < 8, MASK)
    labels = torch.full_like(ids, IGNORED).scatter(1, drawn.indices, was)
    return {"input_ids": ids.scatter(1, drawn.indices, shown), "labels": labels}


def _draw(hashed: Tensor) -> Tensor:
    """62 bits of a hash, as a number from 0."""
    return (hashed >> 2) & ((1 << _RANGE) - 1)


@dataclass(frozen=True, eq=False)
class WindowStream:
    """The training batches of one run, and the held-out contexts it is probed with.

    On CUDA the tokens live on the device and a batch is made there without waiting for it; elsewhere they are read
    from the disk as they are needed.
    """

    corpus: Corpus
    context: int
    objective: str = "next"  # or masked
    batch_size: int = 16
    mask_rate: float = 0.15
    seed: int = 0
    device: torch.device = _CPU
    weights: np.ndarray | None = None  # [N] of the windows; None = equal
    report: dict[str, Any] | None = None  # how the weights were found

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer of the text."""
        return self.corpus.tokenizer

    @property
    def files(self) -> Path:
        """The folder of the tokenizer's files."""
        return self.corpus.path / "tokenizer"

    def about(self) -> dict[str, Any]:
        """What the text is, for run.json; with the resampling, where there is one."""
        kept = ("fingerprint", "bytes", "parts", "vocab_size")
        words = {name: self.corpus.about[name] for name in kept}
        words |= {"types": int((self.counts > 0).sum()), "windows": len(self.starts), "context_length": self.context}
        return words if self.report is None else {**words, "sampling": self.report}

    @cached_property
    def starts(self) -> np.ndarray:
        """First positions of the training windows."""
        return training_windows(self.corpus, self.context)

    @cached_property
    def counts(self) -> np.ndarray:
        """Occurrences of every id, int64 [vocab], as a pass over the training part samples them (specials are 0).

        The expected counts under the window weights, scaled to the size of the part; at least 1 for a type that occurs.
        """
        settings: dict[str, Any] = {"context": self.context, "weights": self.weights, "size": self.corpus.vocab_size}
        seen = window_counts(self.corpus.train.tokens, self.starts, **settings)
        seen[: len(SPECIALS)] = 0
        scaled = np.rint(seen / seen.sum() * self.corpus.about["parts"]["train"]["tokens"])
        return np.where(seen > 0, np.maximum(scaled, 1), 0).astype(np.int64)

    @cached_property
    def _resident(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens, window starts, cumulative weights and offsets, where batches are made."""
        where = self.device if self.device.type == "cuda" else torch.device("cpu")
        edges = draw_edges(self.weights, len(self.starts))
        tokens = torch.from_numpy(self.corpus.train.tokens)
        parts = (tokens, torch.from_numpy(self.starts), torch.from_numpy(edges), torch.arange(self.context))
        return parts[0].to(where), parts[1].to(where), parts[2].to(where), parts[3].to(where)

    def batch(self, step: int, micro: int = 0) -> Batch:
        """The contexts of one micro-batch: `input_ids` and `labels`, int64 [B, T]."""
        tokens, starts, edges, offsets = self._resident
        key = torch.full((self.batch_size,), step * MICRO + micro, dtype=torch.int64, device=tokens.device)
        rows = row_hash(key, torch.arange(self.batch_size, device=tokens.device), seed=self.seed)
        window = torch.searchsorted(edges, _draw(rows), right=True)
        ids = tokens[starts[window, None] + offsets].long()
        return self._on_device(self._with_labels(ids, rows, seed=self.seed))

    def _with_labels(self, ids: Tensor, keys: Tensor, *, seed: int) -> Batch:
        if self.objective != "masked":
            return {"input_ids": ids, "labels": ids}  # the models shift the labels themselves
        return mask_tokens(ids, keys, vocab_size=self.corpus.vocab_size, rate=self.mask_rate, seed=seed)

    def _on_device(self, batch: Batch) -> Batch:
        return {name: value.to(self.device) for name, value in batch.items()}

    def probe_batches(self, contexts: int = 64, *, batch_size: int = 16) -> list[Batch]:
        """Fixed contexts of the held-out part, no two alike, with labels (and masks) that no seed changes.

        They do not overlap; fewer come back where the held-out text has no more.
        """
        ids = torch.from_numpy(self.probe_ids(contexts))
        keys = row_hash(torch.arange(len(ids)), torch.zeros(len(ids), dtype=torch.int64), seed=_PROBE_SEED)
        whole = self._with_labels(ids, keys, seed=_PROBE_SEED)
        parts = [
            {name: value[at : at + batch_size] for name, value in whole.items()}
            for at in range(0, len(ids), batch_size)
        ]
        return [self._on_device(part) for part in parts]

    def probe_ids(self, contexts: int) -> np.ndarray:
        """The ids of the probe's contexts, int64 [contexts, T]: those with the smallest hashes of their content."""
        part = self.corpus.held_out
        starts = window_starts(part, self.context, stride=self.context)
        starts = starts[np.concatenate([[True], np.diff(starts) >= self.context])]
        found = {_content(part.tokens[at : at + self.context]): at for at in starts.tolist()}
        chosen = [found[digest] for digest in sorted(found)[:contexts]]
        return part.tokens[np.array(chosen)[:, None] + np.arange(self.context)].astype(np.int64)


def training_windows(corpus: Corpus, context: int) -> np.ndarray:
    """The windows that training draws from: two for every context's length of text."""
    return window_starts(corpus.train, context, stride=max(1, context // 2))


def _content(ids: np.ndarray) -> bytes:
    return hashlib.sha256(ids.astype("<i8").tobytes()).digest()
