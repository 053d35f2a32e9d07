"""`anisoscope compare`: two models on the same tokens, differences with intervals, CKA between their layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.estimate import jackknife
from anisoscope.runs.similarity import cka_matrix, sampled
from anisoscope.runs.store import RunFolder
from anisoscope.runs.table import is_missing


@dataclass(frozen=True)
class Side:
    """One model of one run."""

    folder: RunFolder
    entry: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return str(self.entry["name"])

    @classmethod
    def open(cls, word: str) -> Side:
        """`RUN`, or `RUN#MODEL` where a run holds several models."""
        path, _, model = word.partition("#")
        folder = RunFolder.open(path)
        return cls._of(folder, cls._chosen(folder, model))

    @classmethod
    def both(cls, word: str) -> tuple[Side, Side]:
        """The two models of one run."""
        folder = RunFolder.open(word)
        entries = folder.about().get("models", [])
        if len(entries) != 2:
            raise AnisoscopeError(f"run {word!r} holds {len(entries)} models; expected 2, or name a second run.")
        return cls._of(folder, entries[0]), cls._of(folder, entries[1])

    @classmethod
    def _of(cls, folder: RunFolder, entry: dict[str, Any]) -> Side:
        rows = folder.table().where(model=entry["name"], revision=entry.get("revision", "")).records()
        return cls(folder, entry, rows)

    @staticmethod
    def _chosen(folder: RunFolder, model: str) -> dict[str, Any]:
        entries = folder.about().get("models", [])
        names = [entry["name"] for entry in entries]
        found = [e for e in entries if model in (e["name"], Path(e["name"]).name)] if model else entries
        if len(found) != 1:
            raise AnisoscopeError(
                f"run {str(folder.path)!r} holds {len(entries)} models ({', '.join(names)}); "
                f"name one as {folder.path.name}#{names[0] if names else 'MODEL'}."
            )
        return found[0]


@dataclass(frozen=True)
class Comparison:
    """Differences (second − first) and the CKA between all layers."""

    first: str
    second: str
    paired: bool
    rows: list[dict[str, Any]]
    cka: tuple[list[str], list[str], np.ndarray]
    notes: list[str]


def compare(first: str, second: str | None = None) -> Comparison:
    """Compare two runs (or the two models of one run).

    Where both saw the same contexts the difference is paired: its interval leaves out the same fold on both sides.
    Models of different depth are matched at the nearest relative depth.
    """
    one, two = (Side.open(first), Side.open(second)) if second else Side.both(first)
    paired = _same_contexts(one, two)
    notes = [] if paired else ["the two saw different tokens, so differences are not paired and intervals add up"]
    if one.entry.get("layers") != two.entry.get("layers"):
        notes.append("depths differ: layers are matched at the nearest relative depth")
    rows = [_difference(a, b, paired=paired) for a, b in _matched(*_nameless(one, two))]
    if not rows:
        raise AnisoscopeError(f"{one.name} and {two.name} share no metric at any site; profile both alike.")
    cka = cka_matrix(sampled(one.folder.arrays(one.entry["key"])), sampled(two.folder.arrays(two.entry["key"])))
    if cka[2].size == 0 or np.isnan(cka[2]).all():
        notes.append("no CKA: the sampled rows of the two have too few tokens in common")
    return Comparison(one.name, two.name, paired, rows, cka, notes)


def _same_contexts(one: Side, two: Side) -> bool:
    mine, theirs = (side.entry.get("data", {}).get("fingerprint") for side in (one, two))
    return bool(mine) and mine == theirs


def _nameless(one: Side, two: Side) -> tuple[Side, Side]:
    """Files of rows whose tensors have no name in common are matched by their order instead."""
    names = [{row["kind"] for row in side.rows} for side in (one, two)]
    if {one.entry.get("type"), two.entry.get("type")} != {"rows"} or names[0] & names[1]:
        return one, two
    plain = [replace(side, rows=[{**row, "kind": "rows"} for row in side.rows]) for side in (one, two)]
    return plain[0], plain[1]


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("stack", "kind", "head", "group", "metric", "variant"))


def _matched(one: Side, two: Side) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Rows of the first side, each with the row of the second at the same (or nearest relative) depth."""
    there: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in two.rows:
        there.setdefault(_key(row), []).append(row)
    pairs = []
    for row in one.rows:
        near = min(there.get(_key(row), []), key=lambda other: abs(_depth(other) - _depth(row)), default=None)
        if near is not None and not (is_missing(row["value"]) or is_missing(near["value"])):
            pairs.append((row, near))
    return pairs


def _depth(row: dict[str, Any]) -> float:
    return float(row["layer"]) if is_missing(row["depth"]) else float(row["depth"])


def _difference(a: dict[str, Any], b: dict[str, Any], *, paired: bool) -> dict[str, Any]:
    value = b["value"] - a["value"]
    mine, theirs = a["replicates"] or [], b["replicates"] or []
    if paired and len(mine) == len(theirs):
        low, high = jackknife(value, [y - x for x, y in zip(mine, theirs, strict=True)], bounds=(None, None))
    else:
        half = math.hypot((a["high"] - a["low"]) / 2, (b["high"] - b["low"]) / 2)
        low, high = value - half, value + half
    words = {name: a[name] for name in ("stack", "layer", "kind", "head", "group", "metric", "variant")}
    return {
        **words,
        "other_layer": b["layer"],
        "first": a["value"],
        "second": b["value"],
        "difference": value,
        "low": low,
        "high": high,
        "differs": bool(low > 0 or high < 0),
    }
