"""`anisoscope compare`: differences of metrics between two models with intervals, and CKA between their layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.similarity import hollow_kernel, kernel_ckas
from anisoscope.option import check_values
from anisoscope.results.folder import RunFolder
from anisoscope.results.modality import MODALITIES
from anisoscope.results.quantity import jackknife

_STREAM = ("embed", "resid", "final")
FEWEST = 64  # rows in common that a CKA needs at least
Keyed = tuple[np.ndarray, np.ndarray]  # keys, rows


def is_missing(value: float | None) -> bool:
    return value is None or math.isnan(value)


def sampled(arrays: Mapping[str, np.ndarray]) -> dict[str, Keyed]:
    """Site → (keys, rows) of the sampled rows in a run's arrays, for sites of the stream in order of layers."""
    names = [name.removesuffix("/rows") for name in arrays if name.endswith("/rows")]
    stream = [name for name in names if name.rpartition(".")[2] in _STREAM]
    return {name: (arrays[f"{name}/keys"], arrays[f"{name}/rows"]) for name in sorted(stream, key=_order)}


def _order(site: str) -> tuple[str, int, int]:
    stack, _, rest = site.rpartition(".")[0].rpartition(".")
    return stack, int(rest) if rest.isdigit() else 0, _STREAM.index(site.rpartition(".")[2])


def cka_matrix(first: Mapping[str, Keyed], second: Mapping[str, Keyed]) -> tuple[list[str], list[str], np.ndarray]:
    """(names of first, names of second, CKA [first, second]) over the rows that all layers of both have.

    NaN where there are too few rows in common, or where a layer has no structure beyond noise.
    """
    keys = [keys for keys, _ in (*first.values(), *second.values())]
    common = reduce(np.intersect1d, keys) if keys else np.empty(0)
    matrix = np.full((len(first), len(second)), np.nan)
    if len(common) < FEWEST:
        return list(first), list(second), matrix
    first_kernels = _kernels(first, common)
    second_kernels = first_kernels if first is second else _kernels(second, common)
    return list(first), list(second), kernel_ckas(first_kernels, second_kernels).numpy()


def _kernels(sites: Mapping[str, Keyed], common: np.ndarray) -> Tensor:
    """The kernels [sites, n, n] of the common rows."""
    places = [np.intersect1d(keys, common, return_indices=True)[1] for keys, _ in sites.values()]
    kernels = (hollow_kernel(rows[at]) for at, (_, rows) in zip(places, sites.values(), strict=True))
    return torch.stack(list(kernels))


def run_cka(folder: RunFolder, key: str) -> tuple[list[str], np.ndarray] | None:
    """(layers, CKA [layers, layers]) within one model of a run; None with fewer than two layers."""
    layers = sampled(folder.arrays(key))
    if len(layers) < 2:
        return None
    names, _, matrix = cka_matrix(layers, layers)
    return names, matrix


@dataclass(frozen=True)
class ComparedModel:
    """One model of one run: its entry in run.json and its rows of the table."""

    folder: RunFolder
    entry: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return str(self.entry["name"])

    @property
    def stacks(self) -> set[str]:
        return {row["stack"] for row in self.rows}

    @classmethod
    def of(cls, folder: RunFolder, entry: dict[str, Any]) -> ComparedModel:
        rows = folder.table().where(model=entry["name"], revision=entry.get("revision", "")).records()
        return cls(folder, entry, rows)

    @classmethod
    def open(cls, word: str) -> ComparedModel:
        """`RUN`, or `RUN#MODEL` where a run holds several models."""
        path, _, model = word.partition("#")
        folder = RunFolder.open(path)
        entries = folder.about().get("models", [])
        names = [entry["name"] for entry in entries]
        found = [e for e in entries if model in (e["name"], Path(e["name"]).name)] if model else entries
        if len(found) != 1:
            raise AnisoscopeError(
                f"run {str(folder.path)!r} holds {len(entries)} models ({', '.join(names)}); "
                f"name one as {folder.path.name}#{names[0] if names else 'MODEL'}."
            )
        return cls.of(folder, found[0])

    @classmethod
    def both(cls, word: str) -> tuple[ComparedModel, ComparedModel]:
        """The two models of one run."""
        folder = RunFolder.open(word)
        entries = folder.about().get("models", [])
        if len(entries) != 2:
            held = "1 model" if len(entries) == 1 else f"{len(entries)} models"
            raise AnisoscopeError(f"run {word!r} holds {held}; expected 2, or name a second run.")
        return cls.of(folder, entries[0]), cls.of(folder, entries[1])

    def as_stack(self, stack: str) -> ComparedModel:
        """A copy with all rows assigned to the stack of that name."""
        modality = self.entry.get("modality")
        renamed = {"modality": {stack: next(iter(modality.values()))}} if modality else {}
        return replace(self, entry=self.entry | renamed, rows=[{**row, "stack": stack} for row in self.rows])


@dataclass(frozen=True)
class ModelComparison:
    """Differences (second − first) and the CKA between all layers."""

    first: str
    second: str
    paired: bool
    rows: list[dict[str, Any]]
    cka: tuple[list[str], list[str], np.ndarray]
    notes: list[str]


def compare(first: str, second: str | None = None) -> ModelComparison:
    """Compare two runs (or the two models of one run).

    Where both saw the same contexts the difference is paired: its interval leaves out the same fold on both sides.
    Models of different depth are matched at the nearest relative depth.
    """
    check_values(compare, {"first": first, "second": second})
    one, two = (ComparedModel.open(first), ComparedModel.open(second)) if second else ComparedModel.both(first)
    notes: list[str] = []
    sides = [one, two]
    for number, (side, other) in enumerate(((one, two), (two, one))):  # match a lone encoder with an encoder
        kind = side.entry.get("type")
        if side.stacks == {"single"} and "single" not in other.stacks and kind in other.stacks:
            sides[number] = side.as_stack(str(kind))
            notes.append(f"{side.name} is compared with the {kind} of {other.name}")
    one, two, more = _comparable(*sides)
    notes += more
    prints = [side.entry.get("data", {}).get("fingerprint") for side in (one, two)]
    paired = bool(prints[0]) and prints[0] == prints[1]  # both saw the same contexts
    if not paired:
        notes.append("the two saw different data, so differences are not paired and intervals add up")
    if one.entry.get("layers") != two.entry.get("layers"):
        notes.append("depths differ: layers are matched at the nearest relative depth")
    rows = [_difference(a, b, paired=paired) for a, b in _matched(one, two)]
    if not rows and one.stacks and two.stacks and not one.stacks & two.stacks:
        mine, theirs = (" and ".join(sorted(side.stacks)) for side in (one, two))
        raise AnisoscopeError(
            f"{one.name} has the stack {mine} and {two.name} {theirs}, and which belong together is not known; compare "
            "models with the same stacks."
        )
    if not rows:
        raise AnisoscopeError(f"{one.name} and {two.name} share no metric at any site; profile both alike.")
    cka = cka_matrix(sampled(one.folder.arrays(one.entry["key"])), sampled(two.folder.arrays(two.entry["key"])))
    if cka[2].size == 0 or np.isnan(cka[2]).all():
        notes.append("no CKA: the sampled rows of the two have too few tokens in common")
    return ModelComparison(*_names(one, two), paired, rows, cka, notes)


def _names(one: ComparedModel, two: ComparedModel) -> tuple[str, str]:
    """What the two are called: models of the same name by their runs as well, or by their order."""
    if one.name != two.name:
        return one.name, two.name
    runs = [side.folder.path.resolve().name for side in (one, two)]
    first, second = runs if runs[0] != runs[1] else ("first", "second")
    return f"{one.name} ({first})", f"{two.name} ({second})"


def _comparable(one: ComparedModel, two: ComparedModel) -> tuple[ComparedModel, ComparedModel, list[str]]:
    """Both models without the stacks that read different kinds of data, and notes; an error if no stack is left."""
    mine, theirs = (side.entry.get("modality") or {} for side in (one, two))
    modalities = {stack: (mine[stack], theirs[stack]) for stack in mine if stack in theirs}
    read = {stack: tuple(MODALITIES[name].medium.name for name in pair) for stack, pair in modalities.items()}
    apart = {stack: pair for stack, pair in read.items() if pair[0] != pair[1]}
    if apart and len(apart) == len(read):
        reads = next(iter(apart.values()))
        raise AnisoscopeError(
            f"{one.name} reads {reads[0]} and {two.name} reads {reads[1]}, so their rows cannot be compared; give "
            "two models that read the same kind of data."
        )
    notes = [f"no {stack}: that of {one.name} reads {a}, that of {two.name} {b}" for stack, (a, b) in apart.items()]
    for a, b in (pair for stack, pair in modalities.items() if stack not in apart):
        if a != b:
            rows = (MODALITIES[a].row, MODALITIES[b].row)
            notes.append(f"rows are of different kinds: {rows[0]} of {one.name}, {rows[1]} of {two.name}")
    first, second = (replace(m, rows=[row for row in m.rows if row["stack"] not in apart]) for m in (one, two))
    return first, second, notes


def _matched(one: ComparedModel, two: ComparedModel) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of table rows of both models at the same (or nearest relative) depth.

    Files of rows whose tensors have no name in common are matched by their order instead.
    """
    files = {one.entry.get("type"), two.entry.get("type")} == {"rows"}
    nameless = files and not {row["kind"] for row in one.rows} & {row["kind"] for row in two.rows}
    columns = itemgetter("stack", *(() if nameless else ("kind",)), "head", "group", "metric", "variant")

    def depth(row: dict[str, Any]) -> float:
        return float(row["layer"] if is_missing(row["depth"]) else row["depth"])

    candidates: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in two.rows:
        candidates.setdefault(columns(row), []).append(row)
    pairs = []
    for row in (row for row in one.rows if columns(row) in candidates):
        same_columns, wanted_depth = candidates[columns(row)], depth(row)
        nearest = same_columns[int(np.argmin([abs(depth(candidate) - wanted_depth) for candidate in same_columns]))]
        if not (is_missing(row["value"]) or is_missing(nearest["value"])):
            pairs.append(({**row, "kind": "rows"} if nameless else row, nearest))
    return pairs


def _difference(a: dict[str, Any], b: dict[str, Any], *, paired: bool) -> dict[str, Any]:
    value = b["value"] - a["value"]
    first, second = a["replicates"] or [], b["replicates"] or []
    if paired and len(first) == len(second):
        low, high = jackknife(value, [y - x for x, y in zip(first, second, strict=True)], bounds=(None, None))
    else:
        half = math.hypot((a["high"] - a["low"]) / 2, (b["high"] - b["low"]) / 2)
        low, high = value - half, value + half
    columns = {name: a[name] for name in ("stack", "layer", "kind", "head", "group", "metric", "variant")}
    columns |= {"other_layer": b["layer"], "first": a["value"], "second": b["value"], "difference": value}
    return {**columns, "low": low, "high": high, "differs": bool(low > 0 or high < 0)}
