"""What a metric is called and means: read from its declaration, or guessed from its name when it has none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# The order in which a reader wants them; anything else follows alphabetically.
ORDER = (
    "average_cosine",
    "svd_ratio",
    "two_nn",
    "participation_ratio",
    "iso_score",
    "drift",
    "effective_rank",
    "mean_norm",
    "relative_drift",
    "svd_ratio_squared",
    "stable_rank",
    "levina_bickel",
    "gride",
    "hubness",
    "partition_isotropy",
    "rogue_share",
    "self_similarity",
)
MAIN = 6
ACRONYMS = {"svd": "SVD", "qk": "QK", "nn": "NN", "cka": "CKA", "iso": "Iso", "mle": "MLE"}


@dataclass(frozen=True)
class Entry:
    """What the page says about one metric."""

    name: str
    title: str
    formula: str = ""
    reference: str = ""
    description: str = ""
    convention: str = ""
    bounds: tuple[float | None, float | None] = (None, None)


class Catalogue:
    """Entries by metric name; a metric nobody declared still gets a readable title."""

    def __init__(self, declared: Mapping[str, Any] | None = None) -> None:
        self._declared = _registered() if declared is None else declared

    def entry(self, name: str) -> Entry:
        found = self._declared.get(name)
        if found is None:
            return Entry(name, title_of(name))
        text = {f: str(getattr(found, f, "") or "") for f in ("formula", "reference", "description", "convention")}
        return Entry(name, str(getattr(found, "title", "") or title_of(name)), bounds=_bounds(found), **text)

    def ordered(self, names: Iterable[str]) -> list[str]:
        """Names in reading order."""
        place = {name: i for i, name in enumerate(ORDER)}
        return sorted(set(names), key=lambda name: (place.get(name, len(ORDER)), name))

    def main(self, names: Iterable[str]) -> list[str]:
        """The few that come first: the best known, then whatever else was measured."""
        return self.ordered(names)[:MAIN]


def title_of(name: str) -> str:
    """A title made from a name.

    >>> title_of("svd_ratio"), title_of("first_key_mass")
    ('SVD ratio', 'First key mass')
    """
    words = [ACRONYMS.get(word, word) for word in name.split("_") if word]
    text = " ".join(words)
    return text[:1].upper() + text[1:]


def _registered() -> Mapping[str, Any]:
    """The declared metrics."""
    from anisoscope.metrics.catalogue import registry

    return registry()


def _bounds(found: Any) -> tuple[float | None, float | None]:
    bounds = getattr(found, "bounds", None)
    return (bounds[0], bounds[1]) if bounds else (None, None)
