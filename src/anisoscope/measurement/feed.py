"""Feeds: the batches of one model, with counts of what was read; one class each for text, audio and images.

Audio and images are batched by shape, so that only processors that pad by design give padded inputs.
"""

from __future__ import annotations

import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from anisoscope.capture.capture import Capture
from anisoscope.capture.row import Batch, Rows, Scores
from anisoscope.capture.sites.layout import find_layout, pool_fits
from anisoscope.capture.sites.site import Site
from anisoscope.data.audio import SECONDS, SHORTEST, read_audio
from anisoscope.data.images import read_images
from anisoscope.data.media_files import SHOWN, MediaCounts, class_names, has_columns, medium_of
from anisoscope.data.synthetic import CLASSES, SHAPES
from anisoscope.data.text import SUPPORTED, data_version, read_documents, suffix_of
from anisoscope.data.tokens import DataFingerprint, TextCounts, batches, contexts
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.bank import COUNTED
from anisoscope.measurement.config import ProfileConfig
from anisoscope.models.forward import evaluating, input_device
from anisoscope.models.load import Loaded
from anisoscope.models.processor import longest, picture_inputs, sampling_rate, sound_inputs
from anisoscope.option import Progress
from anisoscope.results.manifest import WRONG_TEXT
from anisoscope.results.modality import IMAGES_DATA, SOUNDS_DATA, TEXT_DATA
from anisoscope.results.privacy import placeless

DEFAULT_CONTEXT = 512
_OPTIONS = {"special": "--skip-special", "first": "--skip-first", "text_field": "--text-field"}
_FILMS = ("num_frames", "frames_per_clip", "tubelet_size")  # configuration fields that only video models have
EMBEDDED_CLASSES = {SOUNDS_DATA: [f"vowel-{i}" for i in range(CLASSES)], IMAGES_DATA: sorted(SHAPES)}
_MANY_UNKNOWN = 0.1  # share of unknown tokens above which the text is probably not the model's
_MOSTLY_UNKNOWN = 0.5  # above which the rows are mostly one token at different positions
_WAITING = 8  # batches' worth of contexts that may be held back to be batched with others of their shape


@dataclass
class Feed(ABC):
    """The batches of one model, the same at every iteration, and counts of what was read."""

    loaded: Loaded
    config: ProfileConfig
    length: int  # rows of a whole context
    tokens: int = 0  # rows, special tokens included
    contexts: int = 0
    padding: int = 0
    special: int = 0
    documents: int = 0
    dropped_pieces: int = 0
    unknown: int = 0
    fingerprint: str = ""
    _unit: tuple[int, int, int] = (1, 1, 1)  # rows, positions and size of the first context; a token of text
    off: ClassVar[dict[str, Any]]  # options that do not apply to such data, each with its neutral value

    @classmethod
    @abstractmethod
    def of(cls, loaded: Loaded, config: ProfileConfig, *, tell: Progress | None) -> Self:
        """Make the feed of a model; an error if the model cannot read the data."""

    @abstractmethod
    def batches(self) -> Iterator[Batch]:
        """All batches, from the first on; the counts are complete after the last."""

    def rows_of(self, inputs: Mapping[str, Tensor]) -> int:
        """Rows of some inputs, of media estimated in proportion to the size of the first context."""
        return round(self._unit[0] * _size(inputs) / self._unit[2])

    def few(self, batch: Batch) -> Batch:
        """A small part of a batch, for verification."""
        return Batch({name: value[:2] for name, value in batch.inputs.items()})

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """The entry `data` of run.json."""

    def class_names(self) -> list[str]:
        """The classes that the data is sorted into, [] if it is not; text has none."""
        return []

    def recount(self, rows: int) -> None:  # noqa: B027 – the counts of text are exact
        """Replace an estimated number of rows by the number that the sites gave."""

    def notes(self) -> list[str]:
        """Warnings about the data, once all of it was read."""
        if self.tokens >= self.config.tokens:
            return []
        units = self.loaded.modality.units
        return [f"the data ended after {self.tokens:,} of the {self.config.tokens:,} {units} asked for"]

    def unknown_notes(self) -> list[str]:
        """The warning about tokens that the tokenizer has no word for, where they are many."""
        share = self.unknown / self.tokens if self.tokens else 0.0
        if share > _MOSTLY_UNKNOWN:  # the most important note
            return [
                f"{WRONG_TEXT}its tokenizer has no word for {share:.0%} of the tokens, so these numbers describe the "
                "unknown token and not a text; give what the model was made for with --data"
            ]
        many = share > _MANY_UNKNOWN
        return [f"the tokenizer has no word for {share:.0%} of the tokens: is this the right text?"] if many else []


@dataclass
class TextFeed(Feed):
    """Text in contexts of at most `length` tokens."""

    off = {"seconds": None}  # noqa: RUF012

    @classmethod
    def of(cls, loaded: Loaded, config: ProfileConfig, *, tell: Progress | None) -> Self:
        if loaded.main_input != "input_ids":
            raise AnisoscopeError(
                f"{loaded.name} reads {loaded.main_input}, and how to make that of text, sounds or pictures is not "
                "known; anisoscope.measure takes any batches."
            )
        path = Path(config.data).expanduser()
        plain = config.data == "embedded" or not path.is_file() or suffix_of(path.name) in set(SUPPORTED) - {".zip"}
        if not plain and (kind := medium_of(config.data)) is not None:
            raise AnisoscopeError(f"{loaded.name} reads text, but {config.data!r} holds {kind.name}; give it text.")
        if config.context is not None and config.context > loaded.max_context:
            raise AnisoscopeError(
                f"--context {config.context} is more than {loaded.name} takes ({loaded.max_context}); give less."
            )
        return cls(loaded, config, config.context or min(DEFAULT_CONTEXT, loaded.max_context))

    def batches(self) -> Iterator[Batch]:
        c, counts, digest = self.config, TextCounts(), DataFingerprint()
        documents = read_documents(c.data, text_field=c.text_field, group_by=c.group_by)
        pieces = contexts(documents, self.loaded.tokenizer, length=self.length, tokens=c.tokens, counts=counts)

        def hashed() -> Iterator[Any]:
            for piece in pieces:
                digest.update(piece)
                yield piece

        self.padding = 0
        settings: dict[str, Any] = {"pad_id": self.loaded.pad_id, "decoder_start": self.loaded.decoder_start}
        for batch in batches(hashed(), batch_size=c.batch_size, **settings):
            self.padding += int((batch.inputs["attention_mask"] == 0).sum())
            yield batch if c.group_by else Batch(batch.inputs, batch.special, None)
        for name in ("tokens", "contexts", "special", "documents", "dropped_pieces", "unknown"):
            setattr(self, name, getattr(counts, name))
        self.fingerprint = digest.hexdigest()

    def few(self, batch: Batch) -> Batch:
        return Batch({name: value[:2, :32] for name, value in batch.inputs.items()})

    def about(self) -> dict[str, Any]:
        counted = {name: getattr(self, name) for name in ("fingerprint", "documents", "contexts", "tokens")}
        sizes = {"context_length": self.length, "dropped_pieces": self.dropped_pieces}
        return {"name": placeless(self.config.data), **data_version(self.config.data), **counted, **sizes}


def no_text(loaded: Loaded, data: str) -> AnisoscopeError:
    """The error for data without a context of text; says if it holds audio or images instead."""
    kind = None if data == "embedded" else medium_of(data)
    beside = "" if kind is None else f" (it holds {kind.name}, which {loaded.name} does not read)"
    return AnisoscopeError(f"no context could be cut from {data!r}{beside}; give more text.")


@dataclass(frozen=True, eq=False)
class MediaContext:
    """One context of audio or images as inputs of the model."""

    inputs: dict[str, Tensor]  # each [1, …]
    digest: bytes  # hash of the content before the processor
    group: str = ""
    text: str = ""


def _size(inputs: Mapping[str, Tensor]) -> int:
    """The number of unpadded frames, samples or pixels of some inputs."""
    mask = inputs.get("attention_mask")
    return int(mask.sum()) if mask is not None else next(iter(inputs.values())).numel()


def _stacked(chunk: list[MediaContext]) -> dict[str, Tensor]:
    return {name: torch.cat([context.inputs[name] for context in chunk]) for name in chunk[0].inputs}


@dataclass
class MediaFeed(Feed):
    """The common part of feeds of audio and images."""

    remedy: ClassVar[str] = "; give readable files"
    tell: Progress | None = None
    counts: MediaCounts = field(default_factory=MediaCounts)
    ended: bool = False  # whether the data ended before enough rows were read
    _texts: dict[bytes, list[int]] | None = None  # decoder input ids by digest of the context

    @abstractmethod
    def media(self) -> Iterator[MediaContext]:
        """Every context of the data, in the order of its files."""

    @abstractmethod
    def _amount(self) -> dict[str, Any]:
        """Entries of run.json on the amount of data in units of its medium."""

    @classmethod
    def of(cls, loaded: Loaded, config: ProfileConfig, *, tell: Progress | None) -> Self:
        """Make the feed, count the rows of its first context, and generate the texts that a decoder reads.

        Both run the model and so must happen before hooks are attached.
        """
        feed = cls(loaded, config, 0, tell=tell)
        try:
            first = next(iter(feed.media()), None)
            if first is None:
                count = feed.counts.dropped_pieces
                pieces = "one piece was" if count == 1 else f"{count} pieces were"
                why = f" ({pieces} too short or not finite, and dropped)" if count else ""
                raise AnisoscopeError(f"no context could be cut from {config.data!r}{why}{feed.remedy}.")
            feed._unit = (*_count_rows(loaded, first, modules=config.modules), _size(first.inputs))
            feed.length = feed._unit[0]
            feed._texts = feed._decoder_texts() if loaded.is_encoder_decoder else None
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            raise forward_failed(error, loaded) from error
        return feed

    def batches(self) -> Iterator[Batch]:
        self.padding = 0
        for chunk in self._chunks():
            inputs = _stacked(chunk)
            mask = inputs.get("attention_mask")
            if mask is not None and not bool(mask.all()):  # padding that the model reads by design
                self.padding += sum(self._unit[1] - self.rows_of(context.inputs) for context in chunk)
            if self._texts is not None:
                inputs |= decoder_inputs(self.loaded, [self._texts[context.digest] for context in chunk])
            groups = tuple(context.group for context in chunk) if self.config.group_by else None
            special = None
            if self.config.special == "out":  # no position is one; the mask is as long as positions could be
                special = torch.zeros(len(chunk), next(iter(inputs.values()))[0].numel(), dtype=torch.bool)
            yield Batch(inputs, special, groups, tuple(context.text for context in chunk))

    def _chunks(self) -> Iterator[list[MediaContext]]:
        """Batches of contexts of one shape; smaller ones once too many contexts of different shapes are held back."""
        self.counts, digest, rows, count, self.ended = MediaCounts(), DataFingerprint(), 0, 0, False
        waiting: dict[Any, list[MediaContext]] = {}
        size = self.config.batch_size
        for context in self.media():
            digest.add(context.digest)
            rows, count = rows + self.rows_of(context.inputs), count + 1
            same_shape = waiting.setdefault(tuple((name, x.shape) for name, x in context.inputs.items()), [])
            same_shape.append(context)
            if len(same_shape) == size or sum(map(len, waiting.values())) > _WAITING * size:
                yield waiting.pop(max(waiting, key=lambda shape: len(waiting[shape])))
            if rows >= self.config.tokens:
                break
        else:
            self.ended = True
        yield from waiting.values()
        self.tokens, self.contexts, self.fingerprint = rows, count, digest.hexdigest()
        self.documents, self.dropped_pieces = self.counts.files, self.counts.dropped_pieces

    def _decoder_texts(self) -> dict[bytes, list[int]]:
        """Decoder input ids by context digest: of the known transcript, else of the text that the model generates."""
        texts: dict[bytes, list[int]] = {}
        seen = 0
        for chunk in self._chunks():
            known = {context.digest: known_ids(self.loaded, context.text) for context in chunk if context.text}
            texts |= {digest: ids for digest, ids in known.items() if ids}
            if untranscribed := [context for context in chunk if context.digest not in texts]:
                generated = greedy_ids(self.loaded, _stacked(untranscribed))
                texts |= {context.digest: ids for context, ids in zip(untranscribed, generated, strict=True)}
            seen += sum(self.rows_of(context.inputs) for context in chunk)
            if self.tell is not None:
                self.tell("transcribing", min(seen, self.config.tokens), self.config.tokens)
        return texts

    def class_names(self) -> list[str]:
        medium = self.loaded.modality.medium
        if self.config.data == "embedded":
            return EMBEDDED_CLASSES[medium]
        return class_names(self.config.data, medium, column=self._reading()["column"])

    def recount(self, rows: int) -> None:
        self.padding -= rows - self.tokens if self.padding else 0
        self.tokens = rows

    def notes(self) -> list[str]:
        notes = [*(super().notes() if self.ended else []), *filter(None, [self.counts.unread])]
        if self._texts is not None:
            notes.append("its decoder reads the model's own greedy text, or the text beside a clip where there is one")
        return notes

    def about(self) -> dict[str, Any]:
        skipped = {"skipped_files": len(self.counts.skipped), "skipped": self.counts.skipped[:SHOWN]}
        entry = {"name": placeless(self.config.data), **data_version(self.config.data), "fingerprint": self.fingerprint}
        entry |= {"files": self.documents, **skipped}
        entry |= {"contexts": self.contexts, **self._amount()}
        return {**entry, "tokens": self.tokens, "dropped_pieces": self.dropped_pieces}

    def _reading(self) -> dict[str, Any]:
        """Arguments of the reader; `column` if --text-field was given."""
        c = self.config
        column = None if c.text_field == type(c).text_field else c.text_field
        return {"column": column, "group_by": c.group_by, "counts": self.counts}


@dataclass
class SpeechFeed(MediaFeed):
    """Audio in contexts of equal length."""

    remedy = f"; give recordings of {SHORTEST:g} s or more, or name shorter contexts with --seconds"
    off = {"context": None, "special": "in", "first": "in"}  # noqa: RUF012

    def media(self) -> Iterator[MediaContext]:
        processor = self.loaded.processor
        clips = read_audio(self.config.data, rate=sampling_rate(processor), seconds=self.seconds, **self._reading())
        for clip in clips:
            inputs = sound_inputs(processor, clip.samples, self.loaded.model)
            raw = hashlib.sha256(clip.samples.astype("<f4").tobytes() + clip.text.encode()).digest()
            yield MediaContext(inputs, raw, clip.group, clip.text)

    @property
    def seconds(self) -> float:
        """Seconds of a context: as configured, else the smaller of 10 and the model's maximum."""
        most, wanted = longest(self.loaded.processor), self.config.seconds
        if wanted is None:
            return SECONDS if most is None else min(SECONDS, most)
        if most is not None and wanted > most + 1e-9:
            raise AnisoscopeError(f"--seconds {wanted:g} is more than {self.loaded.name} takes ({most:g}); give less.")
        return wanted

    def _amount(self) -> dict[str, Any]:
        return {"seconds": round(self.counts.seconds, 3), "context_seconds": self.seconds}


@dataclass
class ImageFeed(MediaFeed):
    """Pictures, each a context."""

    off = {**SpeechFeed.off, "seconds": None}  # noqa: RUF012

    @classmethod
    def of(cls, loaded: Loaded, config: ProfileConfig, *, tell: Progress | None) -> Self:
        if any(hasattr(getattr(loaded.model, "config", None), name) for name in _FILMS):
            raise AnisoscopeError(
                f"{loaded.name} reads videos, which are not supported as data; anisoscope.measure takes any batches."
            )
        return super().of(loaded, config, tell=tell)

    def media(self) -> Iterator[MediaContext]:
        for picture in read_images(self.config.data, **self._reading()):
            inputs = picture_inputs(self.loaded.processor, picture.array, self.loaded.model)
            size = repr(picture.array.shape).encode()
            yield MediaContext(inputs, hashlib.sha256(size + picture.array.tobytes()).digest(), picture.group)

    def _amount(self) -> dict[str, Any]:
        return {"images": self.contexts}


@dataclass(frozen=True)
class SiteShape:
    """The shape of the rows that some contexts give at a site."""

    positions: int  # of one context
    width: int
    heads: int = 1
    rows: int = 0  # of all of them


class ShapeReader:
    """A sink that keeps only the shape of the rows of each site."""

    def __init__(self) -> None:
        self.shapes: dict[Site, SiteShape] = {}

    def rows(self, rows: Rows) -> None:
        heads = rows.x.shape[1] if rows.x.dim() == 3 else 1
        self.shapes[rows.site] = SiteShape(rows.index.length, rows.x.shape[-1], heads, rows.index.keep.numel())

    def scores(self, scores: Scores) -> None:
        self.shapes[scores.site] = SiteShape(scores.query.shape[2], 1, scores.query.shape[1])


def _count_rows(loaded: Loaded, context: MediaContext, *, modules: tuple[str, ...]) -> tuple[int, int]:
    """(rows, positions) of one context at the site with fewest rows, so that every site gets at least as many."""
    layout = None if modules else find_layout(loaded.model)
    sites: list[Site] = []
    if layout is not None:
        found = layout.sites([kind for kind in COUNTED if kind in layout.kinds])
        sites = [site for site in found if site.stack == layout.stacks[0].name]
    inputs = dict(context.inputs)
    if loaded.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.full((1, 1), int(loaded.decoder_start or 0))
    reader = ShapeReader()
    with Capture(loaded.model, sites, reader, layout=layout, modules=list(modules) or None) as capture:
        capture.run(inputs)
    if not reader.shapes:
        raise AnisoscopeError(
            f"{loaded.name} gave no row for its first context; give longer sounds or larger pictures."
        )
    return min((shape.rows, shape.positions) for shape in reader.shapes.values())


FEEDS: dict[Any, type[Feed]] = {TEXT_DATA: TextFeed, SOUNDS_DATA: SpeechFeed, IMAGES_DATA: ImageFeed}


def make_feed(loaded: Loaded, config: ProfileConfig, *, tell: Progress | None = None) -> Feed:
    """The feed for the medium that a model reads."""
    return FEEDS[loaded.modality.medium].of(loaded, config, tell=tell)


def fitting(loaded: Loaded, config: ProfileConfig) -> tuple[ProfileConfig, list[str]]:
    """The configuration without options that do not apply to the medium that a model reads, and notes on them.

    For a single model they are an error; among several models, which may read other media, a note.
    """
    neutral = dict(FEEDS[loaded.modality.medium].off)
    if not loaded.reads_text:
        if not config.modules and not pool_fits(loaded.model, config.pool):
            neutral["pool"] = "none"
        if not has_columns(config.data):
            neutral["text_field"] = type(config).text_field
        if not loaded.is_encoder_decoder:  # whose decoder reads words
            neutral["tokenizer"] = None
    inapplicable = {name: value for name, value in neutral.items() if getattr(config, name) != value}
    if not inapplicable:
        return config, []
    reads = loaded.modality.medium.name
    named = [f"--pool {config.pool}" if name == "pool" else _OPTIONS.get(name, f"--{name}") for name in inapplicable]
    why = f"{reads} and has no class token" if list(inapplicable) == ["pool"] and config.pool == "cls" else reads
    if len(config.models) == 1:
        raise AnisoscopeError(f"{named[0]} means nothing for {loaded.name}, which reads {why}; leave it out.")
    return replace(config, **inapplicable), [f"{', '.join(named)} left out: it reads {why}"]


def forward_failed(error: Exception, loaded: Loaded) -> Exception:
    """The error for a model that fails on its first context; out-of-memory errors are passed on."""
    if "memory" in str(error).lower():
        return error
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if not loaded.reads_text:
        return AnisoscopeError(
            f"{loaded.name} fails on its first context ({reason}); check that its processor and the sizes in its "
            "configuration fit together, such as image_size or num_mel_bins."
        )
    return AnisoscopeError(
        f"{loaded.name} fails on its first tokens ({reason}); check that it takes plain token ids and that the sizes "
        "in its configuration fit together, such as num_key_value_heads and num_attention_heads."
    )


MOST = 64  # tokens that a decoder generates or is given
_PROMPT = 4  # tokens that a decoder may be started with: Whisper's start, language, task and no timestamps
_POSITIONS = ("max_target_positions", "max_position_embeddings", "n_positions")


def known_ids(loaded: Loaded, text: str) -> list[int]:
    """Decoder input ids of a known text: start token first, no end token; [] without a tokenizer."""
    if loaded.tokenizer is None:
        return []
    ids = [int(i) for i in loaded.tokenizer(text)["input_ids"]]
    return _from_start(loaded, ids)[: min(MOST + 1, _positions(loaded.model))]


def greedy_ids(loaded: Loaded, inputs: dict[str, Tensor]) -> list[list[int]]:
    """Greedily generated ids of each context, at most 64; the start token alone if the model cannot generate."""
    from transformers.utils import logging

    model: Any = loaded.model
    if not getattr(model, "can_generate", lambda: False)():
        return [[int(loaded.decoder_start or 0)] for _ in range(len(next(iter(inputs.values()))))]
    device = input_device(model)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    moved = {k: v.to(device, dtype) if v.is_floating_point() else v.to(device) for k, v in inputs.items()}
    limit = max(1, min(MOST, _positions(model) - _PROMPT))
    with contextlib.ExitStack() as stack, evaluating(model), torch.inference_mode(), torch.random.fork_rng(devices=[]):
        # silence the warnings of `generate`; errors are still raised
        stack.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity_error()
        written = model.generate(**moved, max_new_tokens=limit, do_sample=False, num_beams=1)
    return [_from_start(loaded, row) for row in written.cpu().tolist()]


def _positions(model: Any) -> int:
    """The largest number of tokens that the decoder takes, according to its configuration."""
    config = getattr(model, "config", None)
    places = (getattr(config, "decoder", None), config)
    found = (getattr(place, name, None) for place in places for name in _POSITIONS)
    return next((size for size in found if isinstance(size, int) and size > 0), MOST + _PROMPT)


def _from_start(loaded: Loaded, ids: list[int]) -> list[int]:
    """Ids from the start token up to the first end token, after which there is padding."""
    start = int(loaded.decoder_start or 0)
    ids = ids[1:] if ids and ids[0] == start else ids
    ends: set[int] = set()
    for place in (getattr(loaded.model, "generation_config", None), getattr(loaded.model, "config", None)):
        value = getattr(place, "eos_token_id", None)
        ends |= {int(i) for i in (value if isinstance(value, (list, tuple)) else [value]) if i is not None}
    stop = next((place for place, i in enumerate(ids) if i in ends), len(ids))
    return [start, *ids[:stop]]


def decoder_inputs(loaded: Loaded, texts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Ids and mask of a batch of texts, padded on the right."""
    rows = [torch.tensor(text, dtype=torch.int64) for text in texts]
    ids = pad_sequence(rows, batch_first=True, padding_value=loaded.pad_id)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"decoder_input_ids": ids, "decoder_attention_mask": mask}
