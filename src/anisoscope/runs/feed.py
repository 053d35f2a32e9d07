"""The batches of one model, and what was counted on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anisoscope.capture.rows import Batch
from anisoscope.errors import AnisoscopeError

if TYPE_CHECKING:
    from anisoscope.capture.loading import Loaded
    from anisoscope.runs.profile import ProfileConfig

DEFAULT_CONTEXT = 512


@dataclass
class Feed:
    """The batches of one model, the same each time they are asked for, and what was counted on the way."""

    loaded: Loaded
    config: ProfileConfig
    length: int
    tokens: int = 0
    contexts: int = 0
    padding: int = 0
    special: int = 0
    documents: int = 0
    dropped_pieces: int = 0
    unknown: int = 0
    fingerprint: str = ""

    def batches(self) -> Iterator[Batch]:
        from anisoscope.data.text import read_documents
        from anisoscope.data.tokens import DataFingerprint, Tally, batches, contexts

        c, tally, digest = self.config, Tally(), DataFingerprint()
        documents = read_documents(c.data, text_field=c.text_field, group_by=c.group_by)
        pieces = contexts(documents, self.loaded.tokenizer, length=self.length, tokens=c.tokens, tally=tally)

        def watched() -> Iterator[Any]:
            for piece in pieces:
                digest.update(piece)
                yield piece

        self.padding = 0
        settings: dict[str, Any] = {"pad_id": self.loaded.pad_id, "decoder_start": self.loaded.decoder_start}
        for batch in batches(watched(), batch_size=c.batch_size, **settings):
            self.padding += int((batch.inputs["attention_mask"] == 0).sum())
            yield batch if c.group_by else Batch(batch.inputs, batch.special, None)
        self.tokens, self.contexts, self.special = tally.tokens, tally.contexts, tally.special
        self.documents, self.dropped_pieces = tally.documents, tally.dropped_pieces
        self.fingerprint, self.unknown = digest.hexdigest(), tally.unknown

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


def context_length(loaded: Loaded, config: ProfileConfig) -> int:
    """The context asked for, or 512 and what the model takes, whichever is less."""
    if config.context is None:
        return min(DEFAULT_CONTEXT, loaded.max_context)
    if config.context > loaded.max_context:
        raise AnisoscopeError(
            f"--context {config.context} is more than {loaded.name} takes ({loaded.max_context}); give less."
        )
    return config.context
