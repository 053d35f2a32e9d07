"""Energies of subspaces with jackknife intervals, as records of the table for one site and one step.

Sums by (group, fold) of ‖gᵢQ‖² and ‖gᵢ‖² give every pooled energy, its mean over rows and their leave-one-fold-out
values. Leaving out fold j takes its contexts away from both halves: the rows tested, and those that the proxy was
fitted on, whose refit is `left_out[j]` (`tangent.refit`); where a tie of eigenvalues leaves directions open, intervals
contain what it does to the energy (`tangent.ties`). Without refits the directions stay as they are, and intervals
reflect the variation of test contexts only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anisoscope.capture.sites.site import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics import tangent
from anisoscope.metrics.engine.estimation import Estimate
from anisoscope.numerics.factors import as_matrix
from anisoscope.numerics.hashing import FOLDS
from anisoscope.numerics.host import each_on_host
from anisoscope.numerics.linalg import orthonormal_basis
from anisoscope.results.quantity import jackknife, jackknives
from anisoscope.results.query import options_of, variant_name
from anisoscope.stats.moments import FoldCovariance, GradientMoments
from anisoscope.tangent.proxy import Half, Label
from anisoscope.tangent.together import (
    Found,
    MomentSums,
    RowSums,
    Subspaces,
    Targets,
    anisotropy_of,
    chunk_size,
    on_host,
    ratio_columns,
    with_planes,
)

Record = dict[str, Any]
_ENDS = ("value", "low", "high")
FEW = 10  # rows per dimension below which a second moment is flagged


@dataclass(frozen=True)
class Grouping:
    """A partition of rows into groups: `names[label]` of each row; rows labelled −1 belong to none."""

    names: Sequence[str]
    label: Tensor  # [n] on the host

    def masks(self) -> dict[str, Tensor]:
        return {name: self.label == i for i, name in enumerate(self.names) if bool((self.label == i).any())}


class EnergyRows:
    """Energies of any subspace over the test rows of one site: of all rows, and of groups."""

    def __init__(self, half: Half, groupings: Sequence[Grouping] = (), *, like: EnergyRows | None = None) -> None:
        assert half.g is not None
        self.g, self.dropped, self.contexts = half.g, half.dropped, half.contexts
        self.labels = (half.fold, *(grouping.label for grouping in groupings))
        self.names = ["", *(name for grouping in groupings for name in grouping.names)]
        self.member: Tensor = (
            like.member if like is not None and self._alike(like) else self._members(half.fold, groupings)
        )

    def _alike(self, other: EnergyRows) -> bool:
        """Whether the rows of another site are in the same groups and folds, as they are unless some are not finite."""
        pairs = zip(self.labels, other.labels, strict=True)
        same = self.names == other.names and self.g.device == other.g.device
        return same and all(mine is theirs or torch.equal(mine, theirs) for mine, theirs in pairs)

    def _members(self, fold: Tensor, groupings: Sequence[Grouping]) -> Tensor:
        """[n, groups·FOLDS]: 1 where a row is in a group and fold."""
        found = torch.zeros(len(fold), len(self.names) * FOLDS + 1, dtype=torch.float64)
        offset, nowhere = 1, len(self.names) * FOLDS
        found.scatter_(1, fold.unsqueeze(1), 1.0)
        for grouping in groupings:
            place = torch.where(grouping.label >= 0, (offset + grouping.label) * FOLDS + fold, nowhere)
            found.scatter_(1, place.unsqueeze(1), 1.0)
            offset += len(grouping.names)
        return found[:, :-1].to(self.g.device)

    def of(self, Q: Tensor, left_out: Tensor | None = None) -> Iterator[tuple[str, str, Record]]:
        """(group, average, columns of the energy) for every group that has rows."""
        sums, mine = RowSums(self.g[None], self.member), None if left_out is None else left_out.to(Q)[None]
        (given,) = with_planes([(Q.to(self.g.device)[None], mine)])
        found, sizes = on_host([sums.each([given])[0] | given.found(), {"sizes": sums.sizes}])
        columns = EnergyColumns.of(found, sizes["sizes"], rows=True)
        for i, name in enumerate(self.names):
            if columns.counts[0][i]:
                for average in ("", "row"):
                    yield (
                        name,
                        average,
                        columns.at(0, i, average) | {"contexts": self.contexts, "dropped": self.dropped},
                    )


@dataclass(frozen=True)
class EnergyColumns:
    """Energies of one kind of subspace with their intervals, by site and group, on the host."""

    by_average: dict[str, dict[str, list[Any]]]
    counts: list[list[int]]  # rows of every site and group

    @classmethod
    def of(cls, found: Mapping[str, np.ndarray], sizes: np.ndarray, *, rows: bool) -> EnergyColumns:
        averages = {"": ratio_columns(found, sizes)} | ({"row": ratio_columns(found, sizes, row=True)} if rows else {})
        listed = {average: {k: v.tolist() for k, v in mine.items()} for average, mine in averages.items()}
        counts = sizes[..., 2].sum(-1) if rows else np.zeros(sizes.shape[:2])
        return cls(listed, counts.astype(int).tolist())

    def at(self, site: int, group: int, average: str) -> Record:
        mine = {name: values[site][group] for name, values in self.by_average[average].items()}
        return mine | {"n": self.counts[site][group]}


def band(row: Sequence[float]) -> Record:
    """Columns of a set of control draws: mean, 95 % band and standard deviation."""
    return dict(zip(("value", "low", "high", "sd"), row, strict=True))


def record(metric: str, columns: Record, label: Label, *, group: str = "", **more: Any) -> Record:
    """One row of the table."""
    return {"metric": metric, "group": group, "variant": _variant(label, tuple(more.items())), **columns}


_UNREACHED = "no gradient reaches these rows"


@lru_cache(maxsize=4096)
def _variant(label: Label, more: tuple[tuple[str, Any], ...]) -> str:
    return variant_name(label.options(**dict(more)))


def energy_records(columns: Record, Q: Tensor, label: Label, **where: str) -> Iterator[Record]:
    """The energy of a subspace, and its enrichment where it is no control."""
    yield record("gradient_energy", columns, label, **where)
    if not label.control:
        unit = tangent.gradient_enrichment(1.0, *Q.shape)
        rich: Record = {k: columns[k] * unit for k in _ENDS if k in columns}
        if "replicates" in columns:
            rich["replicates"] = [value * unit for value in columns["replicates"]]
        yield record("gradient_enrichment", columns | rich, label, **where)


_DRAWN = ("gradient_energy", "gradient_share", "gradient_isoscore_gain")


def control_records(
    bands: Sequence[Sequence[float]],
    reached: float,
    label: Label,
    columns: Record,
    *,
    draws: int,
    group: str = "",
    average: str = "",
) -> Iterator[Record]:
    """Records of random and normal controls of one proxy for one second moment, of the ratio and of p.

    `bands` are those of the random draws and then of the normal ones, `reached` how many random ones reach the value.
    """
    more = {"n": columns["n"], "contexts": columns["contexts"], "dropped": columns.get("dropped", 0)}
    where: dict[str, Any] = {"group": group, "average": average}
    metrics = _DRAWN[: len(bands) // 2]
    names = [(name, metric) for name in ("random", "normal") for metric in metrics]
    summaries = {name: band(row) for name, row in zip(names, bands, strict=True)}
    for (name, metric), columns_of in summaries.items():
        yield record(metric, columns_of | more, label, control=name, **where)
    value, edges = columns["value"], summaries["normal", "gradient_energy"]
    ends = {"value": edges["value"], "low": edges["high"], "high": edges["low"]}
    ratio = {end: tangent.gradient_ratio(value, level) for end, level in ends.items()}
    yield record("gradient_ratio", ratio | more, label, **where)
    p = (1 + int(reached)) / (draws + 1) if value == value else value  # as `tangent.gradient_p`, on the device
    yield record("gradient_p", {"value": p} | more, label, **where)


def few_rows(n: int, d: int) -> str:
    return "" if n >= FEW * d else f"fewer than {FEW} d rows ({n} of {FEW * d})"


@dataclass(frozen=True)
class Asked:
    """What is to be known of one subspace: shares, and drawn controls of so many of the targets.

    A fitted control has no enrichment, and no shares of groups. `left_out` are the refits of the subspace.
    """

    Q: Tensor
    label: Label
    shares: bool
    controls: int = 0
    left_out: Tensor | None = None

    def kind(self) -> tuple[Any, ...]:
        return tuple(self.Q.shape), self.left_out is None, self.shares, self.controls, bool(self.label.control)


class SubspaceTest:
    """Tests subspaces on the gradients of one site: their energies, anisotropy shares and drawn controls.

    Energies come from `rows`, or from the second moments alone where the rows are of an earlier step. `groups` get
    shares and controls of their own, and so do unit-norm rows; None: all rows alone. `note` is that of energies.
    """

    def __init__(
        self,
        moments: GradientMoments,
        rows: EnergyRows | None = None,
        *,
        draws: int,
        seed: int,
        groups: Sequence[str] | None = None,
        note: str = "",
    ) -> None:
        assert moments.folds is not None
        self.moments, self.rows, self.note = moments, rows, note
        self.sizes = {"n": moments.n, "contexts": moments.contexts}
        self.drawn: dict[str, int] = {"draws": draws, "seed": seed}
        self.asked_groups = groups

    def traces(self) -> Tensor:
        """Of all rows, of each fold and of the groups that get controls."""
        folds = self.moments.folds.diagonal(dim1=-2, dim2=-1).sum(-1)
        groups = [self.moments.groups[g].diagonal().sum() for g in self.asked_groups or ()]
        return torch.cat([folds.sum(0, keepdim=True), folds, *([torch.stack(groups)] if groups else [])])

    def know(self, traces: np.ndarray) -> None:
        """Take in which folds and groups have a gradient, from `traces` on the host."""
        alive, wanted = (traces > 0).tolist(), self.asked_groups
        self.used = [f for f in range(FOLDS) if alive[1 + f]]
        self.groups = [g for g, lives in zip(wanted or (), alive[1 + FOLDS :], strict=True) if lives]
        self.targets = [("", "")] if alive[0] or self.rows is None else []  # second moments that get controls
        if wanted is not None and alive[0]:
            self.targets += [("", "row"), *((group, "") for group in self.groups)]
        self.lines = 1 + (len(self.used) if len(self.used) > 1 else 0)

    def target(self, group: str, average: str) -> Tensor:
        moments = self.moments
        return moments.groups[group] if group else moments.unit if average else moments.total

    def others(self) -> list[tuple[str, str]]:
        """(group, average) of further energies that come from moments alone: without intervals."""
        moments = self.moments
        if self.rows is not None:
            return []
        found = [("", "row")] if moments.unit is not None else []  # not in other coordinates
        return found + [(group, "") for group in moments.groups if group not in moments.parts]

    def kind(self) -> tuple[Any, ...]:
        """What tests that are done together have in common."""
        rows, moments = self.rows, self.moments
        of_rows = () if rows is None else (id(rows.member), tuple(rows.g.shape), rows.g.dtype)
        alike = (tuple(self.used), tuple(self.groups), tuple(self.targets), tuple(self.others()))
        return of_rows, tuple(moments.folds.shape), str(moments.folds.device), alike, tuple(self.drawn.items())

    def records(
        self, Q: Tensor, label: Label, *, shares: bool, controls: int = 0, left_out: Tensor | None = None
    ) -> Iterator[Record]:
        """Energy and enrichment in every group; where asked, shares, and drawn controls of so many of the targets."""
        yield from records_of([self], [[Asked(Q, label, shares, controls, left_out)]])[0]


def records_of(tests: Sequence[SubspaceTest], asked: Sequence[Sequence[Asked]]) -> list[list[Record]]:
    """The records of each test for what is asked of it; tests of one kind are done together."""
    if not tests:
        return []
    for test, traces in zip(tests, on_host([{"": test.traces()} for test in tests]), strict=True):
        test.know(traces[""])
    alike: dict[Any, list[list[int]]] = {}
    device = tests[0].moments.folds.device.type
    for i, (test, mine) in enumerate(zip(tests, asked, strict=True)):
        rank = max((one.Q.shape[1] for one in mine), default=1)
        most = chunk_size(test.moments.folds.shape[-1], rank, test.drawn["draws"], device)
        chunks = alike.setdefault((test.kind(), tuple(one.kind() for one in mine)), [[]])
        if len(chunks[-1]) >= most:
            chunks.append([])
        chunks[-1].append(i)
    work = [chunk for chunks in alike.values() for chunk in chunks]
    with tangent.full_float32():  # set once: parallel threads would reset it for each other
        sums = each_on_host(lambda at: _sums([tests[i] for i in at], [asked[i] for i in at]), work, device)
    arrays = iter(on_host([part for parts in sums for part in parts]))
    read = iter([[next(arrays) for _ in parts] for parts in sums])
    found: list[list[Record]] = [[] for _ in tests]
    for chunks in alike.values():
        joined = [_joined(parts) for parts in zip(*(next(read) for _ in chunks), strict=True)]
        sizes, *numbers = joined
        for place, columns in enumerate(numbers):
            lines = [(i, tests[i], asked[i][place]) for at in chunks for i in at]
            _add_records(found, lines, columns, sizes["sizes"])
    return found


def _joined(parts: Sequence[Mapping[str, np.ndarray]]) -> Mapping[str, np.ndarray]:
    """Numbers of more sites of one kind, whose intervals are worked out together."""
    return parts[0] if len(parts) == 1 else {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _sums(tests: Sequence[SubspaceTest], asked: Sequence[Sequence[Asked]]) -> list[Found]:
    """The sizes of tests of one kind, and the numbers of each subspace that is asked for."""
    first, device = tests[0], tests[0].moments.folds.device
    rows = [test.rows for test in tests if test.rows is not None]
    sums: RowSums | MomentSums = (
        RowSums(torch.stack([mine.g for mine in rows]) if len(rows) > 1 else rows[0].g[None], rows[0].member)
        if rows
        else MomentSums(torch.stack([test.moments.folds for test in tests]))
    )
    targets = Targets([[test.target(*t) for t in first.targets] for test in tests], **first.drawn)
    lines = zip(*asked, strict=True)  # what is asked of every test in turn
    given = [[(one.Q, one.left_out) for one in line] for line in lines]
    subspaces = with_planes([_stacked(line, device) for line in given])
    others = first.others()
    found: list[Found] = [numbers | mine.found() for numbers, mine in zip(sums.each(subspaces), subspaces, strict=True)]
    for i, (group, average) in enumerate(first.targets):
        at = [k for k, one in enumerate(asked[0]) if i < one.controls]
        energies = [(subspaces[k].Q, _value(found[k], sums, first, group, average)) for k in at]
        drawn = targets.of(i, energies, shares=not average and any(asked[0][k].shares for k in at)) if at else []
        for k, numbers in zip(at, drawn, strict=True):
            found[k] |= numbers
    shared = [k for k, one in enumerate(asked[0]) if one.shares]
    if shared:
        used = first.used if first.lines > 1 else []
        spread = anisotropy_of([test.moments for test in tests], used, first.groups)
        for k, held in zip(shared, spread.held_each([_lines(subspaces[k], first) for k in shared]), strict=True):
            found[k]["shares"] = torch.stack(held, 1)
    for one, mine, numbers in zip(asked[0], subspaces, found, strict=True):
        if others and not one.label.control:
            others_of = torch.stack([torch.stack([test.target(*other) for other in others]) for test in tests])
            numbers["others"] = tangent.gradient_energy(others_of, mine.Q.unsqueeze(1))
    return [{"sizes": sums.sizes}, *found]


def _stacked(line: Sequence[tuple[Tensor, Tensor | None]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    Q = torch.stack([basis.to(device, torch.float64) for basis, _ in line])
    refits = [left_out.to(device, torch.float64) for _, left_out in line if left_out is not None]
    return Q, torch.stack(refits) if refits else None


def _value(numbers: Found, sums: RowSums | MomentSums, test: SubspaceTest, group: str, average: str) -> Tensor:
    """The energy [S] of a target, on the device."""
    at = test.rows.names.index(group) if test.rows is not None else 0
    energy = numbers["energy row" if average else "energy"][:, at, :, 0].sum(-1)
    return energy / sums.sizes[:, at, :, 1 if average else 0].sum(-1)


def _lines(given: Subspaces, test: SubspaceTest) -> Tensor:
    """The subspace of every line of `anisotropy_of`: without a fold the refit, where there is one."""
    if given.left_out is None:
        return given.Q.unsqueeze(1)
    refits = given.left_out[:, test.used] if test.lines > 1 else given.left_out[:, :0]
    groups = [given.Q.unsqueeze(1)] * len(test.groups)
    return torch.cat([given.Q.unsqueeze(1), refits, *groups], 1)


def _add_records(
    found: list[list[Record]],
    lines: Sequence[tuple[int, SubspaceTest, Asked]],
    numbers: Mapping[str, np.ndarray],
    sizes: np.ndarray,
) -> None:
    """Add the records of one kind of subspace to those of every site."""
    columns = EnergyColumns.of(numbers, sizes, rows=lines[0][1].rows is not None)
    shares = _share_columns(numbers["shares"], lines[0][1]) if "shares" in numbers else None
    listed = {name: x.tolist() for name, x in numbers.items() if name.startswith(("bands", "reached", "others"))}
    for site, (i, test, one) in enumerate(lines):
        out, label = found[i], one.label
        energies = _energies_at(site, test, one, columns, listed)
        for (group, average), mine in energies.items():
            if average and test.rows is None:
                out.append(record("gradient_energy", mine, label, average=average))
            else:
                out += energy_records(mine, one.Q, label, group=group, average=average)
        for place, (group, average) in enumerate(test.targets[: one.controls]):
            drawn = listed[f"bands {place}"][site], listed[f"reached {place}"][site]
            where: dict[str, Any] = {"group": group, "average": average, "draws": test.drawn["draws"]}
            out += control_records(*drawn, label, energies[group, average], **where)
        if shares is not None:
            out += _share_records(shares, site, test, one)
        if one.left_out is not None and not label.control:
            alike = numbers["alike"][site]
            value = float(alike[np.isfinite(alike)].mean()) if np.isfinite(alike).any() else math.nan
            out.append(record("proxy_stability", {"value": value} | test.sizes, label))
        if energies["", ""]["value"] != energies["", ""]["value"]:
            for row in out:
                note = row.get("note") or ""
                if row["value"] != row["value"] and _UNREACHED not in note:
                    note = "; ".join(filter(None, (_UNREACHED, note)))
                row["note"] = note


def _energies_at(
    site: int, test: SubspaceTest, one: Asked, columns: EnergyColumns, listed: Mapping[str, Any]
) -> dict[tuple[str, str], Record]:
    """Columns of energies by (group, average); means over rows except in frequency bins."""
    rows, found = test.rows, {}
    if rows is None:
        mine = columns.at(site, 0, "") | test.sizes
        if one.label.control and one.left_out is None:
            mine = {"value": mine["value"]} | test.sizes
        found["", ""] = mine
        values = listed["others"][site] if "others" in listed else ()
        for (group, average), part in zip(test.others(), values, strict=False):
            if average or part == part:  # NaN if no gradient reaches the group
                n = test.moments.counts[group] if group else test.moments.n
                found[group, average] = test.sizes | {"value": part, "n": n}
        return found
    about = {"contexts": rows.contexts, "dropped": rows.dropped}
    for place, (group, average) in ((i, key) for i, g in enumerate(rows.names) for key in ((g, ""), (g, "row"))):
        if columns.counts[site][place] and not (average and ":" in group):
            mine = columns.at(site, place, average) | about
            note = test.note if mine["value"] == mine["value"] else _UNREACHED
            found[group, average] = mine | {"note": note}
    return found


def _share_columns(shares: np.ndarray, test: SubspaceTest) -> dict[str, list[Any]]:
    """Both anisotropy shares of every site with jackknife intervals, the level of the first, and all lines."""
    found: dict[str, list[Any]] = {"level": shares[:, 1, 0].tolist()}
    for metric, values in (("gradient_share", shares[:, 0]), ("gradient_isoscore_gain", shares[:, 2])):
        replicates = np.full((len(values), FOLDS), math.nan)
        if test.lines > 1:
            replicates[:, test.used] = values[:, 1 : test.lines]
        low, high = jackknives(values[:, 0], replicates, bounds=(None, None))
        ends = (values[:, 0], low, high, replicates, values[:, test.lines :])
        found[metric] = list(zip(*(x.tolist() for x in ends), strict=True))
    return found


def _share_records(shares: Mapping[str, list[Any]], site: int, test: SubspaceTest, one: Asked) -> Iterator[Record]:
    """Both anisotropy shares with jackknife intervals; of groups without."""
    moments, (d, r) = test.moments, one.Q.shape
    few = few_rows(moments.n - moments.still, d)
    note = f"{'above' if shares['level'][site] >= 1 else 'below'} tr(C)/d; chance is about {r * (r + 1) / d**2:.3g}"
    notes = {"gradient_share": "; ".join(filter(None, (note, few))), "gradient_isoscore_gain": few}
    for metric, text in notes.items():
        value, low, high, replicates, _ = shares[metric][site]
        columns = {"value": value, "low": low, "high": high, "replicates": replicates, "note": text}
        yield record(metric, columns | test.sizes, one.label)
    for place, group in enumerate(test.groups if not one.label.control else ()):
        counts = {"n": moments.counts[group], "contexts": moments.contexts}
        for metric in notes:
            yield record(metric, {"value": shares[metric][site][-1][place]} | counts, one.label, group=group)


_AT_ONCE = 1 << 27  # bytes of the covariances without a fold that are held at a time


def alignment_numbers(spread: FoldCovariance, moments: GradientMoments, *, moved: bool = False) -> Found:
    """Alignments of gradients with the covariance of the rows fitted on, as they are and standardised.

    [1 + FOLDS + groups] each: of all rows, without each fold of contexts in both halves, of groups. `moved`: the
    moments are of updates, which move as rows do and are divided by standard deviations where gradients are multiplied.
    """
    align = tangent.update_alignment if moved else tangent.gradient_alignment
    M, groups = moments.total, list(moments.groups.values())
    lines: list[tuple[Tensor, Tensor]] = [(spread.covariance().unsqueeze(0), M.unsqueeze(0))]
    found: dict[bool, list[Tensor]] = {False: [], True: []}
    step = max(1, _AT_ONCE // max(1, 8 * M.numel()))
    for part in (range(FOLDS)[i : i + step] for i in range(0, FOLDS, step)):
        lines.append((spread.covariances(list(part)), M - moments.folds[part.start : part.stop]))
    lines += [(lines[0][0], torch.stack(groups[i : i + step])) for i in range(0, len(groups), step)]
    for C, mine in lines:
        for standardised, values in found.items():
            values.append(align(C, mine, standardised=standardised))
    tested = moments.folds.diagonal(dim1=-2, dim2=-1).sum(-1)
    used = ((spread.n > 0) | (tested > 0)).double()  # a fold without rows must not narrow an interval
    return {"plain": torch.cat(found[False]), "standardised": torch.cat(found[True]), "used": used}


def alignment_records(
    numbers: Mapping[str, np.ndarray], moments: GradientMoments, *, note: str = "", **options: str
) -> Iterator[Record]:
    """Records of `alignment_numbers` on the host; of groups without an interval."""
    for coordinates in ("", "standardised"):
        named = {k: v for k, v in (options | {"coordinates": coordinates}).items() if v}
        where = {"metric": "gradient_alignment", "variant": variant_name(named)}
        value, *others = numbers[coordinates or "plain"].tolist()
        rest = [x if lives else math.nan for x, lives in zip(others[:FOLDS], numbers["used"].tolist(), strict=True)]
        low, high = jackknife(value, rest, bounds=(0.0, None))
        columns = {"value": value, "low": low, "high": high, "replicates": rest, "n": moments.n, "note": note}
        yield {**where, "group": "", "contexts": moments.contexts, **columns}
        for group, part in zip(moments.groups, others[FOLDS:], strict=True):
            counts = {"n": moments.counts[group], "contexts": moments.contexts}
            if part == part:  # NaN if no gradient reaches the group
                yield {**where, "group": group, "value": part, **counts}


def placed(site: Site, step: int, records: Iterable[Record]) -> list[Record]:
    """Add the columns of the site and the step to records."""
    place = {"stack": site.stack, "layer": site.layer, "kind": site.name or site.kind, "step": step}
    return [{**place, **row} for row in records]


def holm_records(records: Iterable[Record]) -> list[Record]:
    """Holm-corrected p-values over the layers of one step, for each variant and group."""
    families: dict[tuple[str, str], list[Record]] = {}
    for row in records:
        if row["metric"] == "gradient_p":
            families.setdefault((row["variant"], row["group"]), []).append(row)
    return [
        {**row, "metric": "gradient_p_holm", "value": value, "note": _holm_note(row, len(rows))}
        for rows in families.values()
        for row, value in zip(rows, tangent.gradient_p_holm([r["value"] for r in rows]), strict=True)
    ]


def _holm_note(row: Record, layers: int) -> str:
    reason = row.get("note") if row["value"] != row["value"] else ""
    return "; ".join(filter(None, (reason, f"Holm over {layers} layers")))


@dataclass(frozen=True)
class TangentTest:
    """Result of `tangent_test`: how much of the gradients lies in a subspace, against random ones of its rank."""

    energy: Estimate  # ‖GQ‖²/‖G‖²
    energy_by_row: Estimate  # the mean of ‖gQ‖²/‖g‖²
    enrichment: Estimate  # energy / (r/d): 1 for isotropic gradients
    ratio: Estimate  # energy / mean energy of normal controls
    p: float  # against uniformly random subspaces
    share: Estimate  # of the spectral anisotropy
    isoscore_gain: Estimate
    normal: Estimate  # control energies: mean, 95 % band
    random: Estimate
    rank: int


_FIELDS = {  # metric, control and average of the row that gives a field
    "energy": ("gradient_energy", "", ""),
    "energy_by_row": ("gradient_energy", "", "row"),
    "enrichment": ("gradient_enrichment", "", ""),
    "ratio": ("gradient_ratio", "", ""),
    "share": ("gradient_share", "", ""),
    "isoscore_gain": ("gradient_isoscore_gain", "", ""),
    "normal": ("gradient_energy", "normal", ""),
    "random": ("gradient_energy", "random", ""),
}


def tangent_test(G: Any, directions: Any, *, contexts: Any = None, draws: int = 999, seed: int = 0) -> TangentTest:
    """Test gradients G (n×d) against the span of `directions` (k×d rows, need not be orthogonal).

    `contexts` are integer labels of the rows: rows of one context are dependent, so intervals leave out whole contexts.

    >>> Q = torch.eye(40, dtype=torch.float64)[:4]
    >>> inside = torch.randn(200, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) @ Q
    >>> found = tangent_test(inside, Q)
    >>> round(found.energy.value, 9), found.p
    (1.0, 0.001)
    """
    rows = as_matrix(G)
    finite = rows.isfinite().all(1)
    if not bool(rows.any()) or not bool(finite.any()):
        raise AnisoscopeError("the gradients are all zero or not finite, so they have no direction; check the loss.")
    Q = orthonormal_basis(torch.as_tensor(directions)).to(rows.device)
    if Q.shape[0] != rows.shape[1]:
        raise AnisoscopeError(f"gradients have width {rows.shape[1]}, the directions {Q.shape[0]}; expected the same.")
    rank = tangent.check_rank(Q.shape[1], width=rows.shape[1])
    number = torch.arange(len(rows)) if contexts is None else torch.as_tensor(contexts).long().cpu()
    if number.shape != (len(rows),):
        raise AnisoscopeError(f"contexts have shape {tuple(number.shape)} for {len(rows)} rows; expected one for each.")
    half = Half.plain(rows[finite], number[finite.cpu()], dropped=int((~finite).sum()))
    label = Label("given", rank)
    moments = GradientMoments().update(half.x, context=half.context, fold=half.fold)
    test = SubspaceTest(moments, EnergyRows(half), draws=draws, seed=seed)
    by_name: dict[tuple[str, ...], Record] = {}
    for row in test.records(Q, label, shares=True, controls=1):
        options = options_of(row["variant"])
        by_name[row["metric"], options.get("control", ""), options.get("average", "")] = row
    columns = ("value", "low", "high", "n", "contexts", "dropped", "note", "sd")
    estimates = {
        field: Estimate(**{name: by_name[key][name] for name in columns if name in by_name[key]})
        for field, key in _FIELDS.items()
    }
    return TangentTest(**estimates, p=by_name["gradient_p", "", ""]["value"], rank=rank)
