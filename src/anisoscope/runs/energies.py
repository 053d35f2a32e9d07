"""Energies of subspaces with intervals: rows of the table for one site and one step.

Sums by (group, fold) of ‖gᵢQ‖² and ‖gᵢ‖² give every pooled energy, its mean over rows and their leave-one-fold-out
values; the proxy stays as fitted, so an interval is about the test contexts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anisoscope.capture.sites import Site
from anisoscope.metrics.estimate import jackknife
from anisoscope.metrics.tangent import Measured, energy, holm, isoscore_gain, p_value, row_energies, spectral_share
from anisoscope.numerics.hashing import FOLDS
from anisoscope.runs.proxies import Label
from anisoscope.runs.steprows import Half
from anisoscope.runs.table import variant_name
from anisoscope.stats.gradients import GradientMoments

Record = dict[str, Any]
FEW = 10  # rows per dimension below which a second moment is flagged


@dataclass(frozen=True)
class Grouping:
    """A way to sort rows into groups: a name for each label; rows labelled −1 belong to none."""

    names: Sequence[str]
    label: Tensor  # [n] on the host

    def masks(self) -> dict[str, Tensor]:
        return {name: self.label == i for i, name in enumerate(self.names) if bool((self.label == i).any())}


class EnergyRows:
    """The test rows of one site, ready to be asked for the energy of any subspace."""

    def __init__(self, half: Half, groupings: Sequence[Grouping]) -> None:
        assert half.g is not None
        self.half = half
        self.names = [name for grouping in groupings for name in grouping.names]
        self.norms = half.g.double().square().sum(1)
        self.contexts = half.contexts
        fold, codes, offset = half.fold, [], 0
        nowhere = len(self.names) * FOLDS
        for grouping in groupings:
            codes.append(torch.where(grouping.label >= 0, (offset + grouping.label) * FOLDS + fold, nowhere))
            offset += len(grouping.names)
        self.codes = torch.stack(codes).to(half.g.device)  # [groupings, n]

    def sums(self, Q: Tensor) -> np.ndarray:
        """[5, groups, FOLDS]: sums of ‖gQ‖², ‖g‖², ‖gQ‖²/‖g‖², rows with a gradient, rows."""
        assert self.half.g is not None
        inside = row_energies(self.half.g, Q.to(self.half.g.device))
        moving = self.norms > 0
        ratio = torch.where(moving, inside / self.norms.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
        columns = torch.stack([inside, self.norms, ratio, moving.double(), torch.ones_like(inside)])
        total = columns.new_zeros(5, len(self.names) * FOLDS + 1)
        for code in self.codes:
            total.index_add_(1, code, columns)
        found: np.ndarray = total[:, :-1].unflatten(1, (-1, FOLDS)).cpu().numpy()
        return found

    def of(self, Q: Tensor) -> Iterator[tuple[str, str, Record]]:
        """(group, average, columns of the energy) for every group that has rows."""
        inside, whole, ratio, moving, n = self.sums(Q)
        pooled, by_row = _ratios(inside, whole), _ratios(ratio, moving)
        for i, name in enumerate(self.names):
            if not n[i].any():
                continue
            more = {"n": int(n[i].sum()), "contexts": self.contexts, "dropped": self.half.dropped}
            yield name, "", pooled[i] | more
            yield name, "row", by_row[i] | more


def _ratios(top: np.ndarray, bottom: np.ndarray) -> list[Record]:
    """Σtop / Σbottom of every line [groups, FOLDS] with its jackknife over folds."""
    used = bottom > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        value = top.sum(1) / bottom.sum(1)
        rest = (top.sum(1, keepdims=True) - top) / (bottom.sum(1, keepdims=True) - bottom)
    rest = np.where(used, rest, np.nan)  # a fold without rows has no value: it must not narrow an interval
    found = []
    for mine, replicates in zip(value.tolist(), rest.tolist(), strict=True):
        low, high = jackknife(mine, replicates, bounds=(0.0, 1.0))
        found.append({"value": mine, "low": low, "high": high, "replicates": replicates})
    return found


def scaled(columns: Record, factor: float) -> Record:
    """The same estimate times a number: an enrichment from an energy."""
    out = dict(columns)
    for name in ("value", "low", "high"):
        out[name] = columns[name] * factor
    out["replicates"] = [value * factor for value in columns["replicates"]]
    return out


def band(draws: Tensor) -> Record:
    """Mean, 95 % band and standard deviation of control draws."""
    draws = draws.double().cpu()
    if not bool(draws.isfinite().all()):
        return {"value": math.nan, "low": math.nan, "high": math.nan, "sd": math.nan}
    low, high = torch.quantile(draws, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {"value": float(draws.mean()), "low": low, "high": high, "sd": float(draws.std())}


def record(metric: str, columns: Record, label: Label, *, group: str = "", **more: Any) -> Record:
    """One row of the table."""
    return {"metric": metric, "group": group, "variant": _variant(label, tuple(more.items())), **columns}


@lru_cache(maxsize=4096)
def _variant(label: Label, more: tuple[tuple[str, Any], ...]) -> str:
    return variant_name(label.options(**dict(more)))


def proxy_records(
    rows: EnergyRows, Q: Tensor, label: Label, *, few: str = "", plain: bool = True, source: str = ""
) -> Iterator[Record]:
    """Energy and enrichment of one proxy in every group; means over rows where there are no bins."""
    d, r = Q.shape
    for group, average, columns in rows.of(Q):
        if average and ":" in group:
            continue
        columns = columns | {"note": few if columns["value"] == columns["value"] else "no gradient reaches these rows"}
        yield record("gradient_energy", columns, label, group=group, average=average, batch=source)
        if plain and not label.control:
            yield record(
                "gradient_enrichment", scaled(columns, d / r), label, group=group, average=average, batch=source
            )


def control_records(
    measured: Measured,
    Q: Tensor,
    label: Label,
    columns: Record,
    *,
    group: str = "",
    average: str = "",
    source: str = "",
) -> Iterator[Record]:
    """Random and normal controls of one proxy against one second moment; ratio and p."""
    more = {"n": columns["n"], "contexts": columns["contexts"], "dropped": columns.get("dropped", 0)}
    words: dict[str, Any] = {"group": group, "average": average, "batch": source}
    random, normal = measured.random(), measured.normal(Q, shares=not average)
    for name, control in (("random", random), ("normal", normal)):
        yield record("gradient_energy", band(control.energy) | more, label, control=name, **words)
        if control.share is not None and control.gain is not None and not average:
            yield record("gradient_share", band(control.share) | more, label, control=name, **words)
            yield record("gradient_isoscore_gain", band(control.gain) | more, label, control=name, **words)
    value = columns["value"]
    mean = float(normal.energy.mean())
    edges = band(normal.energy)
    ratio = {"value": _over(value, mean), "low": _over(value, edges["high"]), "high": _over(value, edges["low"])}
    yield record("gradient_ratio", ratio | more, label, **words)
    yield record("gradient_p", {"value": p_value(value, random.energy.cpu())} | more, label, **words)


def _over(value: float, level: float) -> float:
    """value / level, infinite over nothing."""
    return value / level if level > 0 else math.inf if level == 0 and value > 0 else math.nan


def share_records(
    moments: GradientMoments, Q: Tensor, label: Label, *, source: str = "", groups: Sequence[str] = ()
) -> Iterator[Record]:
    """Both anisotropy shares of one proxy (or fitted control), with their jackknife; of groups without one."""
    assert moments.folds is not None
    d, r = Q.shape
    Q = Q.to(moments.folds.device)
    whole = moments.total
    used = [f for f in range(FOLDS) if float(moments.folds[f].trace()) > 0]
    stacked = torch.stack([whole, *(whole - moments.folds[f] for f in used)]) if len(used) > 1 else whole[None]
    stacked = stacked / stacked.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    share, level = spectral_share(stacked, Q)
    note = f"{'above' if float(level[0]) >= 1 else 'below'} tr(C)/d; chance is about {r * (r + 1) / d**2:.3g}"
    few = few_rows(moments.n - moments.still, d)
    notes = "; ".join(filter(None, (note, few)))
    gains = isoscore_gain(stacked, Q)
    more = {"n": moments.n, "contexts": moments.contexts}
    for metric, values, text in (
        ("gradient_share", share, notes),
        ("gradient_isoscore_gain", gains, few),
    ):
        yield record(metric, _folded(values, used) | more | {"note": text}, label, batch=source)
    for group in groups:
        C = moments.groups[group]
        if float(C.trace()) > 0:
            mine = {"n": moments.counts[group], "contexts": moments.contexts}
            part = float(spectral_share(C / C.trace(), Q)[0])
            yield record("gradient_share", {"value": part} | mine, label, group=group, batch=source)
            gain = float(isoscore_gain(C / C.trace(), Q))
            yield record("gradient_isoscore_gain", {"value": gain} | mine, label, group=group, batch=source)


def _folded(values: Tensor, used: Sequence[int]) -> Record:
    found = values.cpu().tolist()
    low, high = jackknife(found[0], found[1:], bounds=(None, None))
    by_fold = dict(zip(used, found[1:], strict=False))
    return {"value": found[0], "low": low, "high": high, "replicates": [by_fold.get(f, math.nan) for f in range(FOLDS)]}


def few_rows(n: int, d: int) -> str:
    return "" if n >= FEW * d else f"fewer than {FEW} d rows ({n} of {FEW * d})"


def moment_records(
    moments: GradientMoments, Q: Tensor, label: Label, measured: Measured, *, note: str = "", source: str = ""
) -> Iterator[Record]:
    """Everything about one proxy from second moments alone: for a proxy that was fitted at another step."""
    assert moments.folds is not None and moments.unit is not None
    d, r = Q.shape
    Q = Q.to(moments.folds.device)
    inside = ((moments.folds @ Q) * Q).sum((-2, -1)).cpu()
    whole = moments.folds.diagonal(dim1=-2, dim2=-1).sum(-1).cpu()
    more = {"n": moments.n, "contexts": moments.contexts, "note": note}
    columns = _ratios(inside[None].numpy(), whole[None].numpy())[0] | more
    yield record("gradient_energy", columns, label, batch=source)
    yield record("gradient_enrichment", scaled(columns, d / r), label, batch=source)
    mean = float(energy(moments.unit, Q))
    yield record("gradient_energy", {"value": mean} | more, label, average="row", batch=source)
    for group, moment in moments.groups.items():
        if not float(moment.trace()) > 0:
            continue
        value: Record = {"value": float(energy(moment, Q))} | more | {"n": moments.counts[group]}
        yield record("gradient_energy", value, label, group=group, batch=source)
        yield record(
            "gradient_enrichment", {**value, "value": value["value"] * d / r}, label, group=group, batch=source
        )
    for row in (
        *control_records(measured, Q, label, columns, source=source),
        *share_records(moments, Q, label, source=source),
    ):
        yield {**row, "note": "; ".join(filter(None, (row.get("note", ""), note)))}


def fitted_control_records(
    moments: GradientMoments, Q: Tensor, label: Label, *, note: str = "", source: str = ""
) -> Iterator[Record]:
    """Energy and shares of a fitted control (next, permuted) from second moments alone."""
    assert moments.folds is not None
    more = {"n": moments.n, "contexts": moments.contexts, "note": note}
    value = {"value": float(energy(moments.total, Q.to(moments.folds.device)))}
    yield record("gradient_energy", value | more, label, batch=source)
    for row in share_records(moments, Q, label, source=source):
        yield {**row, "note": "; ".join(filter(None, (row.get("note", ""), note)))}


def placed(site: Site, step: int, records: Iterable[Record]) -> list[Record]:
    """Records with the place and the step they belong to."""
    place = {"stack": site.stack, "layer": site.layer, "kind": site.name or site.kind, "step": step}
    return [{**place, **row} for row in records]


def holm_records(records: Iterable[Record]) -> list[Record]:
    """Holm over the layers of one step, for each variant and group."""
    families: dict[tuple[str, str], list[Record]] = {}
    for row in records:
        if row["metric"] == "gradient_p":
            families.setdefault((row["variant"], row["group"]), []).append(row)
    out = []
    for rows in families.values():
        for row, value in zip(rows, holm([r["value"] for r in rows]), strict=True):
            out.append({**row, "metric": "gradient_p_holm", "value": value, "note": f"Holm over {len(rows)} layers"})
    return out
