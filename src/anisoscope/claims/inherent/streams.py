"""What the claims about every modality read: the stream of each stack of each model, at its last measured step.

Blocks are the rows of kind `stage` where a model has stages, and of kind `resid` otherwise; the embedding is a site but
no block, and what comes after the final norm is apart. Which modality a stack belongs to is told by run.json; a run
that does not say is text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from anisoscope.claims.engine.blocks import BlockStack, stacks
from anisoscope.claims.engine.evidence import Cell, Missing, NotHere, Readings, Study, last_step
from anisoscope.results import modality
from anisoscope.results.quantity import Quantity, mean
from anisoscope.results.query import Row

SOURCE = "Godey et al. 2024, Anisotropy Is Inherent to Self-Attention in Transformers, arXiv:2401.12143"
MODALITIES = tuple(modality.MODALITIES)
CONVOLUTION = modality.CONVOLUTION.name
METRICS = ("average_cosine", "drift", "mean_norm", "relative_drift", "explained_by_drift")
UNTRAINED = "has untrained weights"
MOST_NAMED = 4  # in a sentence
_ATTENTION = ("query", "key", "scores")
_NOT_MEASURED = "measure it with --metrics average_cosine,drift,mean_norm,explained_by_drift"


@dataclass(frozen=True)
class Stream(BlockStack):
    """One stack of one model at its last measured step, from the embedding to the final norm."""

    subject: str = ""  # what a verdict calls it
    step: int | None = None

    @classmethod
    def of(cls, subject: str, stack: BlockStack) -> Stream:
        """The stream of a stack; `NotHere` where no block has an average cosine."""
        cells = [cell for cell in stack.sites("average_cosine") if cell.layer > 0]
        kinds = {cell.kind for cell in cells}
        kind = "stage" if "stage" in kinds else "resid"
        if kind not in kinds:
            raise NotHere("average_cosine at blocks", _NOT_MEASURED)
        step = last_step([cell for cell in cells if cell.kind == kind])
        return cls(stack.run, stack.name, kind, stack.until, subject, step)

    def sites(self, metric: str, group: str = "", *, heads: bool = False, **options: Any) -> Readings:
        """A metric at all sites of the stack at the step of the stream; layers count from 0, the embedding."""
        found = super().sites(metric, group, heads=heads, **options)
        return {cell: row for cell, row in found.items() if cell.step == self.step}

    def counted(self, metric: str, **options: Any) -> Readings:
        """A metric at the embedding and the blocks."""
        return {c: row for c, row in self.sites(metric, **options).items() if c.kind in ("embed", self.kind)}

    @property
    def model(self) -> str:
        return self.run.model

    @property
    def stack_name(self) -> str:
        """As the table calls it."""
        return next(cell.stack for cell in self.sites("average_cosine") if cell.kind == self.kind)

    @property
    def modality(self) -> str:
        return modality_of(self.run.entry, self.stack_name)

    def noted(self, words: str) -> bool:
        """Whether a note on the model in run.json begins so."""
        return any(str(note).startswith(words) for note in self.run.entry.get("notes") or ())

    @property
    def untrained(self) -> bool:
        """Whether its weights are those of an initialisation."""
        return self.step == 0 or self.noted("random weights")

    @property
    def doubt(self) -> str:
        """Why it says nothing about what models learn, in words; empty where it may."""
        if self.untrained:
            return UNTRAINED
        if self.noted("WRONG TEXT"):
            return "was shown a text that its tokenizer does not know"
        return self.run.hardly_learned(self.step)

    @property
    def attends(self) -> bool:
        """Whether the model has attention; hybrids that are counted with the convolutions may have it."""
        if self.modality != CONVOLUTION:
            return True
        told = {str(kind) for kind in self.run.entry.get("sites") or ()}
        seen = {cell.kind for metric in METRICS for cell in self.run.rows(metric)}
        return bool((told | seen) & set(_ATTENTION)) or str(self.run.entry.get("architecture", "")).startswith("Cvt")

    def mean(self) -> Quantity:
        """The average cosine, mean over blocks."""
        return mean([row.quantity for row in self.blocks("average_cosine").values()])

    def pairs(self, **options: Any) -> dict[Cell, tuple[Row, Row]]:
        """Drift and average cosine of every counted site that has both."""
        drift, cosine = self.counted("drift", **options), self.counted("average_cosine", **options)
        return {cell: (drift[cell], cosine[cell]) for cell in cosine if cell in drift}


def modality_of(entry: Mapping[str, Any], stack: str) -> str:
    """The modality of a stack, as run.json has it.

    >>> modality_of({"modality": {"encoder": "speech"}}, "encoder"), modality_of({}, "single")
    ('speech', 'text')
    """
    told = entry.get("modality") or {}
    if isinstance(told, str):
        return told
    return str(told.get(stack) or next(iter(told.values()), modality.TEXT.name))


def streams(study: Study) -> dict[str, Stream]:
    """Every stack whose blocks have an average cosine, by what a verdict calls it."""
    found = {}
    for name, stack in stacks(study).items():
        try:
            found[name] = Stream.of(name, stack)
        except NotHere:
            continue
    return found


def trained_streams(study: Study) -> dict[str, Stream]:
    """Those of models that learned, on data they know, copies once.

    What an initialisation is like says nothing about what attention learns.
    """
    found = _trained(study)
    if not found and any(stream.doubt != UNTRAINED for stream in streams(study).values()):
        raise Missing("model that has learned, on data it knows", uncounted_note(study))
    if not found:
        raise NotHere("average_cosine at the blocks of a trained model", _NOT_MEASURED)
    twice = copies(found)
    return {name: stream for name, stream in found.items() if name not in twice}


def _trained(study: Study) -> dict[str, Stream]:
    return {name: stream for name, stream in streams(study).items() if not stream.doubt}


def copies(found: Mapping[str, Stream]) -> dict[str, str]:
    """Streams that have every number of an earlier one, digit by digit, and which: the same model under two names."""
    first: dict[Any, str] = {}
    for name, stream in found.items():
        first.setdefault(_numbers(stream), name)
    return {name: first[_numbers(stream)] for name, stream in found.items() if first[_numbers(stream)] != name}


def _numbers(stream: Stream) -> Any:
    """All numbers of a stream, the leave-one-fold-out values too."""
    cells = {(metric, cell): r for metric in METRICS for cell, r in stream.counted(metric).items()}
    return tuple((metric, c.layer, c.kind, r.value, r.quantity.folds) for (metric, c), r in cells.items())


def uncounted_note(study: Study) -> str:
    """What is said at the end of a sentence where models do not count: untrained ones, doubtful ones and copies."""
    doubts = {name: stream.doubt for name, stream in streams(study).items() if stream.doubt}
    fresh = [name for name, words in doubts.items() if words == UNTRAINED]
    words = "have untrained weights and do not count" if len(fresh) > 1 else f"{UNTRAINED} and does not count"
    told = [f"{listed(fresh) if len(fresh) <= MOST_NAMED else f'{len(fresh)} stacks'} {words}"] if fresh else []
    told += [f"{name} {words} and does not count" for name, words in doubts.items() if words != UNTRAINED]
    told += [
        f"{name} has the same numbers as {other} and counts once" for name, other in copies(_trained(study)).items()
    ]
    return "; ".join(told)


def model_means(found: Iterable[Stream]) -> dict[str, Quantity]:
    """The average cosine over the blocks of each model, mean over its stacks."""
    groups: dict[str, list[Quantity]] = {}
    for stream in found:
        groups.setdefault(stream.model, []).append(stream.mean())
    return {model: mean(parts) for model, parts in groups.items()}


def listed(names: Iterable[str]) -> str:
    """Names one after another.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    *before, last = list(names) or [""]
    return f"{', '.join(before)} and {last}" if before else last
