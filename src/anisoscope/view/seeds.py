"""Seeds of one model drawn and told together: bundles of the claims' records, trained models in front."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from anisoscope.view.words import finite, number, plural

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Bundle:
    """One stack of one model with the records of all its seeds."""

    label: str
    modality: str
    untrained: bool
    members: tuple[Record, ...]

    @property
    def first(self) -> Record:
        return self.members[0]

    @property
    def doubt(self) -> str:
        """Why the claims leave it out, in words; empty where some seed counts."""
        return str(self.first.get("doubt", "")) if all(member.get("doubt") for member in self.members) else ""

    @property
    def seeds(self) -> str:
        """How many seeds, where there are several."""
        return plural(len(self.members), "seed") if len(self.members) > 1 else ""

    def values(self, name: str) -> list[float]:
        """What the seeds have under a name, without what is no number."""
        return [value for member in self.members if (value := finite(member.get(name))) is not None]

    def mean(self, name: str) -> float | None:
        found = self.values(name)
        return fmean(found) if found else None

    def counts(self, state_of: Callable[[Record], str]) -> dict[str, int]:
        """In how many seeds each state was found, the commonest first."""
        return dict(Counter(map(state_of, self.members)).most_common())


def bundles_of(records: Sequence[Record]) -> list[Bundle]:
    """The records of one stack together, those of trained models first, else in their order."""
    found: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        found.setdefault((record["model"], record["stack"], record["modality"]), []).append(record)
    made = [Bundle(m[0]["name"], m[0]["modality"], all(r["untrained"] for r in m), tuple(m)) for m in found.values()]
    return sorted(made, key=lambda bundle: bundle.untrained)


def in_front(bundles: Sequence[Bundle]) -> tuple[list[Bundle], list[Bundle]]:
    """What is shown at once, and what stands behind it: models with untrained weights, where there are others."""
    trained = [bundle for bundle in bundles if not bundle.untrained]
    return (trained, [b for b in bundles if b.untrained]) if trained else (list(bundles), [])


def in_seeds(bundles: Sequence[Bundle], state_of: Callable[[Record], str], state: str) -> list[str]:
    """The models that are in a state, with the number of seeds where it is not so in all.

    >>> two = [{"status": "fails"}, {"status": "holds"}]
    >>> in_seeds([Bundle("m", "text", False, tuple(two))], lambda r: r["status"], "fails")
    ['m in 1 of 2 seeds']
    """
    told = []
    for bundle in bundles:
        count = bundle.counts(state_of).get(state, 0)
        whole = count == len(bundle.members)
        told += [bundle.label if whole else f"{bundle.label} in {count} of {bundle.seeds}"] if count else []
    return told


def size_words(bundles: Sequence[Bundle]) -> str:
    """How many models, or stacks of models, and how many seeds of each.

    >>> one = {"model": "m", "status": ""}
    >>> size_words([Bundle("m", "text", False, (one, one, one))] * 2)
    '2 stacks × 3 seeds'
    """
    models = {bundle.first["model"] for bundle in bundles}
    size = plural(len(bundles), "model" if len(models) == len(bundles) else "stack")
    seeds = {len(bundle.members) for bundle in bundles}
    if len(seeds) == 1:
        return f"{size} × {bundles[0].seeds}" if bundles[0].seeds else size
    return f"{size}, {min(seeds)} to {max(seeds)} seeds each"


def range_words(values: Sequence[float], tell: Callable[[float], str] = number) -> str:
    """From the lowest to the highest of several values; nothing of one."""
    return f"{tell(min(values))} to {tell(max(values))}" if len(values) > 1 else ""
