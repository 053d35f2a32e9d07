"""Per-head numbers of queries, keys and attention over steps, as arrays: what the views of attention draw from.

Notation
    q̄, k̄   mean query and mean key of a head; their norms are the drift at query and key, their cosine is qk_cosine
    S, L, H  measured steps, layers, heads; a layer may have fewer heads than another, and what is missing is NaN
No vectors are stored: two norms and a cosine are all there is of q̄ and k̄ within the plane they span.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.view.series import Source, short_names

PAIRS = {"query": "key", "query_unrotated": "key_unrotated", "cross_query": "cross_key"}
PAIR_WORDS = {"query": "self-attention", "query_unrotated": "self-attention, before rotation",
              "cross_query": "cross-attention"}  # fmt: skip
SCORES = {"scores": "self-attention", "cross_scores": "cross-attention"}
MEASURES = ("attention_entropy", "attention_sharpness", "attention_max", "first_key_mass", "score_spread")
_COLUMNS = ("model", "stack", "seed", "step", "layer", "head", "kind", "metric", "value")
Owner = tuple[int, str, str, int | None]  # run, model, stack, seed
Place = tuple[int | None, int, int]  # step, layer, head


@dataclass(frozen=True)
class Plane:
    """Norms of the mean query and the mean key of every head, and the cosine between them: [S, L, H]."""

    kind: str
    layers: tuple[int, ...]
    query: np.ndarray
    key: np.ndarray
    cosine: np.ndarray

    def tips(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the mean query ends in the plane in which the mean key lies along the first axis."""
        cosine = np.clip(self.cosine, -1.0, 1.0)
        return self.query * cosine, self.query * np.sqrt(1 - cosine**2)


@dataclass(frozen=True)
class Spread:
    """A measure of attention over the heads of each layer: mean, least, quartiles and greatest, [S, L, 5]."""

    metric: str
    kind: str
    layers: tuple[int, ...]
    values: np.ndarray


@dataclass(frozen=True)
class Heads:
    """All per-head numbers of one stack of one model and seed."""

    label: str
    steps: tuple[int | None, ...]
    numbers: dict[tuple[str, str], dict[Place, float]]  # (metric, kind)
    turn: int = 0  # which repetition of its model this is: another seed, or another run

    @functools.cached_property
    def planes(self) -> list[Plane]:
        """The planes of queries and keys that were measured whole."""
        found = (self._plane(kind) for kind in PAIRS)
        return [plane for plane in found if plane is not None]

    def _plane(self, kind: str) -> Plane | None:
        parts = [self.numbers.get(name, {}) for name in (("drift", kind), ("drift", PAIRS[kind]), ("qk_cosine", kind))]
        if not all(parts):
            return None
        layers = tuple(sorted({layer for _, layer, _ in parts[2]}))
        width = 1 + max(head for _, _, head in parts[2])
        query, key, cosine = (self._array(part, layers, width) for part in parts)
        return Plane(kind, layers, query, _shared_keys(key, cosine), cosine)

    @functools.cached_property
    def spreads(self) -> list[Spread]:
        """Every measure of attention that was measured by head."""
        found = []
        for kind in SCORES:
            for metric in MEASURES:
                part = self.numbers.get((metric, kind), {})
                layers = tuple(sorted({layer for _, layer, _ in part}))
                if part:
                    values = self._array(part, layers, 1 + max(head for _, _, head in part))
                    found.append(Spread(metric, kind, layers, _five(values)))
        return found

    def _array(self, part: dict[Place, float], layers: Sequence[int], width: int) -> np.ndarray:
        rows = {layer: i for i, layer in enumerate(layers)}
        times = {step: i for i, step in enumerate(self.steps)}
        array = np.full((len(self.steps), len(layers), width), np.nan)
        for (step, layer, head), value in part.items():
            if layer in rows and head < width:
                array[times[step], rows[layer], head] = value
        return array


def _shared_keys(key: np.ndarray, cosine: np.ndarray) -> np.ndarray:
    """Keys by query head: of grouped heads, several queries meet one key."""
    spread = np.full(cosine.shape, np.nan)
    for i in range(cosine.shape[1]):
        keys, queries = (int(np.isfinite(a[:, i]).any(0).sum()) for a in (key, cosine))
        if keys and queries:
            spread[:, i, :queries] = key[:, i, np.arange(queries) * keys // queries]
    return spread


def _five(values: np.ndarray) -> np.ndarray:
    """Mean, least, lower and upper quartile, greatest over the last axis; NaN where there is none."""
    known = np.isfinite(values).any(-1)
    found = np.full((*values.shape[:-1], 5), np.nan)
    rows = values[known]
    if len(rows):
        low, first, third, high = np.nanquantile(rows, [0, 0.25, 0.75, 1], axis=-1)
        found[known] = np.stack([np.nanmean(rows, axis=-1), low, first, third, high], axis=-1)
    return found


def head_numbers(sources: Sequence[Source]) -> list[Heads]:
    """The heads of every stack of every model and seed, of each model the first seed before any second."""
    found: dict[Owner, dict[tuple[str, str], dict[Place, float]]] = defaultdict(lambda: defaultdict(dict))
    for i, source in enumerate(sources):
        columns = (_kept(source.table.arrow)[name].to_pylist() for name in _COLUMNS)
        for model, stack, seed, step, layer, head, kind, metric, value in zip(*columns, strict=True):
            found[i, model or "", stack or "single", seed][metric, kind][step, layer, head] = value
    labels, order = _labels(list(found)), _turns(list(found))
    return [_heads(labels[owner], found[owner], order[owner][0]) for owner in sorted(found, key=order.__getitem__)]


def _turns(owners: Sequence[Owner]) -> dict[Owner, tuple[int, int]]:
    """Which repetition of its model an owner is, and its place."""
    return {owner: (sum(other[1:3] == owner[1:3] for other in owners[:i]), i) for i, owner in enumerate(owners)}


def _heads(label: str, numbers: dict[tuple[str, str], dict[Place, float]], turn: int) -> Heads:
    steps = {step for part in numbers.values() for step, _, _ in part}
    dated = sorted(step for step in steps if step is not None)
    return Heads(label, tuple(dated) or (None,), {k: _at(part, dated) for k, part in numbers.items()}, turn)


def _at(part: dict[Place, float], dated: Sequence[int]) -> dict[Place, float]:
    """Without rows of no step where others have one."""
    return {place: value for place, value in part.items() if place[0] is not None or not dated}


def _kept(arrow: pa.Table) -> pa.Table:
    """Rows of one head, of what is drawn, in the plain variant, with a value."""
    kinds = {*PAIRS, *PAIRS.values(), *SCORES}
    masks = [
        pc.is_valid(arrow["head"]),
        pc.is_in(arrow["metric"], value_set=pa.array(["drift", "qk_cosine", *MEASURES], pa.string())),
        pc.is_in(arrow["kind"], value_set=pa.array(sorted(kinds), pa.string())),
        pc.equal(pc.fill_null(arrow["variant"], ""), ""),
        pc.equal(pc.fill_null(arrow["group"], ""), ""),
        pc.fill_null(pc.is_finite(arrow["value"]), False),
    ]
    kept = masks[0]
    for mask in masks[1:]:
        kept = pc.and_(kept, mask)
    return arrow.filter(kept)


def _labels(owners: Sequence[Owner]) -> dict[Owner, str]:
    """The model's short name, and of seed, stack and run only what tells it from a namesake."""
    shorten = short_names({owner[1] for owner in owners})
    found = {}
    for run, model, stack, seed in owners:
        namesakes = [owner for owner in owners if owner[1] == model]
        parts = [shorten(model) or "unnamed"]
        parts += [stack] if len({owner[2] for owner in namesakes}) > 1 else []
        parts += [f"seed {seed}"] if len({owner[3] for owner in namesakes}) > 1 else []
        parts += [f"run {run + 1}"] if len([o for o in namesakes if o[2:] == (stack, seed)]) > 1 else []
        found[run, model, stack, seed] = " · ".join(parts)
    return found
