"""Sounds and pictures as batches: contexts of one shape together, so that nothing is padded but by a model's design."""

from __future__ import annotations

import contextlib
import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from anisoscope.capture.rows.row import Batch, Rows, Scores
from anisoscope.capture.sites.site import Site
from anisoscope.data.media import SHOWN, MediaCounts
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.feed.feed import Feed, Tell, forward_failed
from anisoscope.measurement.memory import COUNTED
from anisoscope.models.forward import evaluating, input_device
from anisoscope.models.processor import longest, picture_inputs, sampling_rate, sound_inputs

# What the decoder of a model that hears or sees is given to read: its own greedy text, or the text that is known.


MOST = 64  # tokens that a decoder writes or is given
_PROMPT = 4  # tokens that a decoder may be started with: Whisper's start, language, task and no timestamps
_POSITIONS = ("max_target_positions", "max_position_embeddings", "n_positions")


def spoken(loaded: Any, text: str) -> list[int]:
    """Ids of a known text as a decoder reads them, after its start token and without an end; [] without a tokenizer."""
    if loaded.tokenizer is None:
        return []
    ids = [int(i) for i in loaded.tokenizer(text)["input_ids"]]
    return _from_start(loaded, ids)[: min(MOST + 1, _positions(loaded.model))]


def _positions(model: Any) -> int:
    """Tokens that the decoder of a model takes at most, where its configuration says it."""
    config = getattr(model, "config", None)
    places = (getattr(config, "decoder", None), config)
    found = (getattr(place, name, None) for place in places for name in _POSITIONS)
    return next((size for size in found if isinstance(size, int) and size > 0), MOST + _PROMPT)


def greedy(loaded: Any, inputs: dict[str, Tensor]) -> list[list[int]]:
    """The likeliest text of each context, token by token, at most 64; the start token alone where there is no head."""
    model, contexts = loaded.model, len(next(iter(inputs.values())))
    if not getattr(model, "can_generate", lambda: False)():
        return [[int(loaded.decoder_start or 0)] for _ in range(contexts)]
    device = input_device(model)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    moved = {k: v.to(device, dtype) if v.is_floating_point() else v.to(device) for k, v in inputs.items()}
    with _without_advice(), evaluating(model), torch.inference_mode(), torch.random.fork_rng(devices=[]):
        limit = max(1, min(MOST, _positions(model) - _PROMPT))
        written = model.generate(**moved, max_new_tokens=limit, do_sample=False, num_beams=1)
    return [_from_start(loaded, row) for row in written.cpu().tolist()]


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """What transformers says on standard error of how it is called; errors are raised all the same."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _from_start(loaded: Any, ids: list[int]) -> list[int]:
    """Ids from the start token on, up to the first end: what comes after an end is padding."""
    start = int(loaded.decoder_start or 0)
    ids = ids[1:] if ids and ids[0] == start else ids
    ends = _ends(loaded.model)
    stop = next((place for place, i in enumerate(ids) if i in ends), len(ids))
    return [start, *ids[:stop]]


def _ends(model: Any) -> set[int]:
    places = (getattr(model, "generation_config", None), getattr(model, "config", None))
    found = (getattr(place, "eos_token_id", None) for place in places)
    return {
        int(i) for value in found for i in (value if isinstance(value, (list, tuple)) else [value]) if i is not None
    }


def decoder_inputs(loaded: Any, texts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Ids and mask of a batch of texts, padded on the right."""
    width = max(map(len, texts))
    ids = torch.full((len(texts), width), loaded.pad_id, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
        mask[row, : len(text)] = 1
    return {"decoder_input_ids": ids, "decoder_attention_mask": mask}


_WAITING = 8  # batches' worth of contexts of different shapes that wait for their like


@dataclass(frozen=True, eq=False)
class Ready:
    """One context as the model takes it."""

    inputs: dict[str, Tensor]  # each [1, …]
    digest: bytes  # of its content before the processor
    group: str = ""
    text: str = ""

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple((name, tuple(value.shape)) for name, value in self.inputs.items())

    @property
    def size(self) -> int:
        """How much of it is data, in units of its own: real frames, samples or pixels."""
        mask = self.inputs.get("attention_mask")
        return int(mask.sum()) if mask is not None else next(iter(self.inputs.values())).numel()


@dataclass
class MediaFeed(Feed):
    """What sounds and pictures share."""

    tell: Tell | None = None
    counts: MediaCounts = field(default_factory=MediaCounts)
    ended: bool = False  # all the data was seen
    _unit: tuple[int, int, int] | None = None  # rows, positions and size of one context that was counted
    _texts: dict[bytes, list[int]] | None = None  # what the decoder reads, by digest

    @abstractmethod
    def ready(self) -> Iterator[Ready]:
        """Every context of the data, in the order of its files."""

    def batches(self) -> Iterator[Batch]:
        self.padding = 0
        for chunk in self._chunks():
            inputs = _stacked(chunk)
            if self._texts is not None:
                inputs |= decoder_inputs(self.loaded, [self._texts[one.digest] for one in chunk])
            self.padding += self._unread(chunk)
            groups = tuple(one.group for one in chunk) if self.config.group_by else None
            yield Batch(inputs, _none_special(chunk) if self.config.special == "out" else None, groups)

    def prepared(self) -> Self:
        """The feed, once a first context is counted and a decoder has written its texts.

        Both run the model, which must not happen while something listens to its modules.
        """
        try:
            first = next(iter(self.ready()), None)
            if first is None:
                raise AnisoscopeError(f"no context could be cut from {self.config.data!r}{self._why_none()}.")
            self._unit = (*_count_rows(self.loaded, first, modules=self.config.modules), first.size)
            self.length = self._unit[0]
            self._texts = self._written() if self.loaded.is_encoder_decoder else None
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            raise forward_failed(error, self.loaded) from error
        return self

    def _written(self) -> dict[bytes, list[int]]:
        texts: dict[bytes, list[int]] = {}
        seen = 0
        for chunk in self._chunks():
            given = {one.digest: spoken(self.loaded, one.text) for one in chunk if one.text}
            texts |= {digest: ids for digest, ids in given.items() if ids}
            rest = [one for one in chunk if one.digest not in texts]
            if rest:
                texts |= dict(zip((one.digest for one in rest), greedy(self.loaded, _stacked(rest)), strict=True))
            seen += sum(map(self._rows, chunk))
            if self.tell is not None:
                self.tell("transcribing", min(seen, self.config.tokens), self.config.tokens)
        return texts

    def _chunks(self) -> Iterator[list[Ready]]:
        """Contexts of one shape, at most a batch of them; those that wait too long for others come in smaller ones."""
        from anisoscope.data.tokens import DataFingerprint

        self.counts, digest, rows, contexts, self.ended = MediaCounts(), DataFingerprint(), 0, 0, False
        waiting: dict[tuple[Any, ...], list[Ready]] = {}
        for one in self.ready():
            digest.add(one.digest)
            rows, contexts = rows + self._rows(one), contexts + 1
            alike = waiting.setdefault(one.shape, [])
            alike.append(one)
            if len(alike) == self.config.batch_size or sum(map(len, waiting.values())) > self._room:
                fullest = max(waiting, key=lambda shape: len(waiting[shape]))
                yield waiting.pop(fullest)
            if rows >= self.config.tokens:
                break
        else:
            self.ended = True
        yield from waiting.values()
        self.tokens, self.contexts, self.fingerprint = rows, contexts, digest.hexdigest()
        self.documents, self.dropped_pieces = self.counts.files, self.counts.dropped_pieces

    @property
    def _room(self) -> int:
        return _WAITING * self.config.batch_size

    @property
    def enough(self) -> bool:
        return not self.ended or super().enough

    def recount(self, rows: int) -> None:
        self.padding -= rows - self.tokens if self.padding else 0
        self.tokens = rows

    def _rows(self, one: Ready) -> int:
        """Rows of a context: counted for the first, in proportion for those that are shorter."""
        assert self._unit is not None
        return round(self._unit[0] * one.size / self._unit[2])

    def _unread(self, chunk: list[Ready]) -> int:
        """Positions that a model makes of the padding it reads by design."""
        assert self._unit is not None
        masks = [one.inputs.get("attention_mask") for one in chunk]
        padded = any(mask is not None and not bool(mask.all()) for mask in masks)
        return sum(self._unit[1] - self._rows(one) for one in chunk) if padded else 0

    def _why_none(self) -> str:
        count = self.counts.dropped_pieces
        pieces = "one piece was" if count == 1 else f"{count} pieces were"
        return f" ({pieces} too short or not finite, and dropped)" if count else ""

    def seen(self, batch: Batch) -> int:
        mask = batch.inputs.get("attention_mask")
        assert self._unit is not None
        content = next(iter(batch.inputs.values()))
        return round(self._unit[0] * (int(mask.sum()) if mask is not None else content.numel()) / self._unit[2])

    def few(self, batch: Batch) -> Batch:
        return Batch({name: value[:2] for name, value in batch.inputs.items()})

    def notes(self) -> list[str]:
        found = [*super().notes(), *filter(None, [self.counts.unread])]
        if self._texts is not None:
            found.append("its decoder reads the model's own greedy text, or the text beside a clip where there is one")
        return found

    def about(self) -> dict[str, Any]:
        return {
            "name": self.config.data,
            "fingerprint": self.fingerprint,
            "files": self.documents,
            "skipped_files": len(self.counts.skipped),
            "skipped": self.counts.skipped[:SHOWN],
            "contexts": self.contexts,
            **self._amount(),
            "tokens": self.tokens,
            "dropped_pieces": self.dropped_pieces,
        }

    @abstractmethod
    def _amount(self) -> dict[str, Any]:
        """How much data there was, in its own measure."""

    @property
    def _column(self) -> str | None:
        """The column of a dataset, where one was named."""
        return None if self.config.text_field == "text" else self.config.text_field


@dataclass
class SpeechFeed(MediaFeed):
    """Audio in contexts of equal length."""

    def ready(self) -> Iterator[Ready]:
        from anisoscope.data.audio import read_audio

        processor, c = self.loaded.processor, self.config
        words: dict[str, Any] = {"column": self._column, "group_by": c.group_by, "counts": self.counts}
        for clip in read_audio(c.data, rate=sampling_rate(processor), seconds=self.seconds, **words):
            inputs = sound_inputs(processor, clip.samples, self.loaded.model)
            raw = hashlib.sha256(clip.samples.astype("<f4").tobytes() + clip.text.encode()).digest()
            yield Ready(inputs, raw, clip.group, clip.text)

    @property
    def seconds(self) -> float:
        """The seconds asked for, or 10 and what the model takes, whichever is less."""
        from anisoscope.data.audio import SECONDS

        most, asked = longest(self.loaded.processor), self.config.seconds
        if asked is None:
            return SECONDS if most is None else min(SECONDS, most)
        if most is not None and asked > most + 1e-9:
            raise AnisoscopeError(f"--seconds {asked:g} is more than {self.loaded.name} takes ({most:g}); give less.")
        return asked

    def _amount(self) -> dict[str, Any]:
        return {"seconds": round(self.counts.seconds, 3), "context_seconds": self.seconds}


@dataclass
class ImageFeed(MediaFeed):
    """Pictures, each a context."""

    def ready(self) -> Iterator[Ready]:
        from anisoscope.data.images import read_images

        c = self.config
        for picture in read_images(c.data, column=self._column, group_by=c.group_by, counts=self.counts):
            inputs = picture_inputs(self.loaded.processor, picture.array, self.loaded.model)
            size = repr(picture.array.shape).encode()
            yield Ready(inputs, hashlib.sha256(size + picture.array.tobytes()).digest(), picture.group)

    def _amount(self) -> dict[str, Any]:
        return {"images": self.contexts}


def _stacked(chunk: list[Ready]) -> dict[str, Tensor]:
    return {name: torch.cat([one.inputs[name] for one in chunk]) for name in chunk[0].inputs}


def _none_special(chunk: list[Ready]) -> Tensor:
    """No position of sounds or pictures is a special token: as many flags as there could be positions."""
    content = next(iter(chunk[0].inputs.values()))
    return torch.zeros(len(chunk), content[0].numel(), dtype=torch.bool)


class _Counter:
    """A sink that counts the rows of one context at every site, and the positions they were taken from."""

    def __init__(self) -> None:
        self.found: dict[Site, tuple[int, int]] = {}

    def rows(self, rows: Rows) -> None:
        self.found[rows.site] = rows.index.keep.numel(), rows.index.length

    def scores(self, scores: Scores) -> None: ...


def _count_rows(loaded: Any, one: Ready, *, modules: tuple[str, ...]) -> tuple[int, int]:
    """Rows and positions of one context where the model has the fewest, so that every site sees at least as many."""
    from anisoscope.capture import find_layout
    from anisoscope.capture.capture import Capture

    layout = None if modules else find_layout(loaded.model)
    sites: list[Site] = []
    if layout is not None:
        first = layout.stacks[0].name
        found = layout.sites([kind for kind in COUNTED if kind in layout.kinds])
        sites = [site for site in found if site.stack == first]
    inputs = dict(one.inputs)
    if loaded.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.full((1, 1), int(loaded.decoder_start or 0))
    counter = _Counter()
    with Capture(loaded.model, sites, counter, layout=layout, modules=list(modules) or None) as capture:
        capture.run(inputs)
    if not counter.found:
        raise AnisoscopeError(
            f"{loaded.name} gave no row for its first context; give longer sounds or larger pictures."
        )
    return min(counter.found.values())
