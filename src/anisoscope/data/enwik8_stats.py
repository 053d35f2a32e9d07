"""What the cleaning of enwik8 counts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class CleaningStats:
    """What was kept and what was removed."""

    pages: int = 0
    articles: int = 0
    redirects: int = 0
    other_namespaces: int = 0
    truncated: int = 0
    empty: int = 0
    comments: int = 0
    references: int = 0
    formulas: int = 0
    code: int = 0
    preformatted: int = 0  # lines
    templates: int = 0
    tables: int = 0
    media: int = 0
    categories: int = 0
    interlanguage: int = 0
    links: int = 0  # unwrapped: their label stays
    external_links: int = 0  # unwrapped as well
    addresses: int = 0
    tags: int = 0
    entities: int = 0  # decoded
    emphasis: int = 0
    lists: int = 0  # marks of lists, rules and magic words
    headings: int = 0  # unwrapped; those with nothing under them are `empty_headings`
    empty_headings: int = 0
    symbols: int = 0  # invisible ones, and those outside of the vocabulary
    characters_in: int = 0  # of the wiki text of articles
    characters_out: int = 0
    removed: dict[str, int] = field(default_factory=dict)  # characters by kind; with `characters_out` they sum to `_in`

    def note(self, kind: str, count: int, characters: int) -> None:
        """Add to what was removed; `spaces` (white space, and what holes leave) has no count."""
        if kind != "spaces":
            setattr(self, kind, getattr(self, kind) + count)
        self.removed[kind] = self.removed.get(kind, 0) + characters
