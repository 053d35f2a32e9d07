"""The batches of one model, whatever it reads, and what was counted on the way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anisoscope.capture.rows.row import Batch
from anisoscope.capture.sites.layout import pool_fits
from anisoscope.errors import AnisoscopeError
from anisoscope.results.modality import IMAGES_DATA, SOUNDS_DATA, SPEECH, Medium

if TYPE_CHECKING:
    from anisoscope.measurement.profile import ProfileConfig
    from anisoscope.models.load import Loaded

DEFAULT_CONTEXT = 512
_TOKENS_ONLY = {"context": None, "special": "in", "first": "in"}  # options that mean tokens, and when they are off
_OPTIONS = {"special": "--skip-special", "first": "--skip-first", "text_field": "--text-field"}
_FILMS = ("num_frames", "frames_per_clip", "tubelet_size")  # sizes that a configuration of images has none of
Tell = Callable[[str, int, int], None]


@dataclass
class Feed(ABC):
    """The batches of one model, the same each time they are asked for, and what was counted on the way."""

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

    @abstractmethod
    def batches(self) -> Iterator[Batch]:
        """Every batch, from the first on; what was counted is known after the last."""

    @abstractmethod
    def seen(self, batch: Batch) -> int:
        """Rows' worth of progress of one batch."""

    @abstractmethod
    def few(self, batch: Batch) -> Batch:
        """As little of a batch as shows everything."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """What run.json says of the data."""

    def recount(self, rows: int) -> None:  # noqa: B027 – tokens of text are counted as they are cut
        """The rows that sites really gave, where those of the feed are counted in proportion."""

    @property
    def enough(self) -> bool:
        """Whether there were as many rows as asked for."""
        return self.tokens >= self.config.tokens

    def notes(self) -> list[str]:
        """What a reader of the numbers should know of the data, once all of it was seen."""
        if self.enough:
            return []
        return [f"the data ended after {self.tokens:,} of the {self.config.tokens:,} {self._unit_words} asked for"]

    @property
    def _unit_words(self) -> str:
        return self.loaded.modality.units


@dataclass
class TextFeed(Feed):
    """Text in contexts of at most `length` tokens."""

    def batches(self) -> Iterator[Batch]:
        from anisoscope.data.text import read_documents
        from anisoscope.data.tokens import DataFingerprint, TextCounts, batches, contexts

        c, counts, digest = self.config, TextCounts(), DataFingerprint()
        documents = read_documents(c.data, text_field=c.text_field, group_by=c.group_by)
        pieces = contexts(documents, self.loaded.tokenizer, length=self.length, tokens=c.tokens, counts=counts)

        def watched() -> Iterator[Any]:
            for piece in pieces:
                digest.update(piece)
                yield piece

        self.padding = 0
        settings: dict[str, Any] = {"pad_id": self.loaded.pad_id, "decoder_start": self.loaded.decoder_start}
        for batch in batches(watched(), batch_size=c.batch_size, **settings):
            self.padding += int((batch.inputs["attention_mask"] == 0).sum())
            yield batch if c.group_by else Batch(batch.inputs, batch.special, None)
        self.tokens, self.contexts, self.special = counts.tokens, counts.contexts, counts.special
        self.documents, self.dropped_pieces = counts.documents, counts.dropped_pieces
        self.fingerprint, self.unknown = digest.hexdigest(), counts.unknown

    def seen(self, batch: Batch) -> int:
        return int(batch.inputs["attention_mask"].sum())

    def few(self, batch: Batch) -> Batch:
        return Batch({name: value[:2, :32] for name, value in batch.inputs.items()})

    def about(self) -> dict[str, Any]:
        return {
            "name": self.config.data,
            "fingerprint": self.fingerprint,
            "documents": self.documents,
            "contexts": self.contexts,
            "tokens": self.tokens,
            "context_length": self.length,
            "dropped_pieces": self.dropped_pieces,
        }


def make_feed(loaded: Loaded, config: ProfileConfig, *, tell: Tell | None = None) -> Feed:
    """The feed of what a model reads: text, sounds or pictures."""
    from anisoscope.measurement.feed.media import ImageFeed, MediaFeed, SpeechFeed

    if not loaded.reads_text:
        _refuse_videos(loaded)
        feeds: dict[Medium, type[MediaFeed]] = {SOUNDS_DATA: SpeechFeed, IMAGES_DATA: ImageFeed}
        return feeds[loaded.modality.medium](loaded, config, 0, tell=tell).prepared()
    if loaded.main_input != "input_ids":
        raise AnisoscopeError(
            f"{loaded.name} reads {loaded.main_input}, and how to make that of text, sounds or pictures is not known; "
            "anisoscope.measure takes any batches."
        )
    _refuse_media(loaded, config.data)
    return TextFeed(loaded, config, context_length(loaded, config))


def fitting(loaded: Loaded, config: ProfileConfig) -> tuple[ProfileConfig, list[str]]:
    """The options without those that mean nothing for what a model reads.

    Where it is the only model they are refused, as the user cannot have meant them; beside others, which may read
    something else, a note says so.
    """
    idle = {name: off for name, off in _without_meaning(loaded, config).items() if getattr(config, name) != off}
    if not idle:
        return config, []
    reads = loaded.modality.medium.name
    named = [f"--pool {config.pool}" if name == "pool" else _OPTIONS.get(name, f"--{name}") for name in idle]
    why = f"{reads} and has no class token" if list(idle) == ["pool"] and config.pool == "cls" else reads
    if len(config.models) == 1:
        raise AnisoscopeError(f"{named[0]} means nothing for {loaded.name}, which reads {why}; leave it out.")
    return replace(config, **idle), [f"{', '.join(named)} left out: it reads {why}"]


def _without_meaning(loaded: Loaded, config: ProfileConfig) -> dict[str, Any]:
    """Options that do nothing for a model, or harm, each with its value when off."""
    from anisoscope.data.media import has_columns

    if loaded.reads_text:
        return {"seconds": None}
    idle: dict[str, Any] = {**_TOKENS_ONLY} if loaded.modality is SPEECH else {**_TOKENS_ONLY, "seconds": None}
    if not config.modules and not pool_fits(loaded.model, config.pool):
        idle["pool"] = "none"
    return idle if has_columns(config.data) else {**idle, "text_field": type(config).text_field}


def no_text(loaded: Loaded, data: str) -> AnisoscopeError:
    """The sentence for data of which no context of text could be cut; sounds and pictures among it are named."""
    from anisoscope.data.media import medium_of

    kind = None if data == "embedded" else medium_of(data)
    beside = "" if kind is None else f" (it holds {kind.name}, which {loaded.name} does not read)"
    return AnisoscopeError(f"no context could be cut from {data!r}{beside}; give more text.")


def _refuse_media(loaded: Loaded, data: str) -> None:
    """A sentence for sounds or pictures that are given to a model of text."""
    from anisoscope.data.files import SUPPORTED, suffix_of
    from anisoscope.data.media import medium_of

    path = Path(data).expanduser()
    if data == "embedded" or not path.is_file() or suffix_of(path.name) in set(SUPPORTED) - {".zip"}:
        return
    kind = medium_of(data)
    if kind is not None:
        raise AnisoscopeError(f"{loaded.name} reads text, but {data!r} holds {kind.name}; give it text.")


def _refuse_videos(loaded: Loaded) -> None:
    config = getattr(loaded.model, "config", None)
    if loaded.modality is not SPEECH and any(hasattr(config, name) for name in _FILMS):
        raise AnisoscopeError(
            f"{loaded.name} reads videos, which are not supported as data; anisoscope.measure takes any batches."
        )


def forward_failed(error: Exception, loaded: Loaded) -> Exception:
    """The sentence for a model that cannot read its first context; running out of memory has its own."""
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


def context_length(loaded: Loaded, config: ProfileConfig) -> int:
    """The context asked for, or 512 and what the model takes, whichever is less."""
    if config.context is None:
        return min(DEFAULT_CONTEXT, loaded.max_context)
    if config.context > loaded.max_context:
        raise AnisoscopeError(
            f"--context {config.context} is more than {loaded.name} takes ({loaded.max_context}); give less."
        )
    return config.context
