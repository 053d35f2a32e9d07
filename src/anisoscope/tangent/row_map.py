"""The row map: coordinates of the same few rows through training on fixed axes, written to map.parquet.

At every measured step the rows with the smallest hashes of (context, position) are kept at a few sites; the choice does
not depend on their values, so it is the same at every step. The axes of a site are the first three principal axes of
all its measured steps pooled, each step with equal weight:

    m = mean over steps of the step's own mean,   C = mean over steps of Σ (x − m)(x − m)ᵀ / n,   C v = λ v

and the share of an axis is λ / tr C. Notation: n rows of a step, d width, S steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch
from torch import Tensor

from anisoscope.capture.row import Rows, Scores
from anisoscope.capture.sites.site import Site, flow_order
from anisoscope.metrics.frequency import bin_of, equal_mass_bins
from anisoscope.results.folder import MAP_SCHEMA, map_name, replace_file, write_rows
from anisoscope.stats.sample import Sample
from anisoscope.tangent.concepts import decoder_of
from anisoscope.tangent.proxy import key

KINDS = ("embed", "resid", "stage", "final")
AXES = ("x", "y", "z")
DENSE = 1024  # widths up to this have all their eigenvectors computed
HELD = 64 << 20  # bytes of rows that stay in memory though they are in the folder, should it be deleted
Kept = dict[str, Tensor]  # of one site at one step: rows, scale, hash, position, token, group


class Axes(NamedTuple):
    """The fixed axes of a site, and the share of variance along each."""

    centre: Tensor  # [d]
    directions: Tensor  # [d, 3]
    shares: tuple[float, ...]


def map_sites(sites: Iterable[Site]) -> list[Site]:
    """The embedding, the first, middle and last block, and the final norm of each stack.

    >>> [str(s) for s in map_sites([Site(0, "embed"), *(Site(n, "resid") for n in range(1, 13)), Site(12, "final")])]
    ['0.embed', '1.resid', '6.resid', '12.resid', '12.final']
    """
    stream = sorted((s for s in set(sites) if s.kind in KINDS), key=flow_order)
    chosen: dict[Site, None] = {}
    for stack in dict.fromkeys(site.stack for site in stream):
        in_stack = [s for s in stream if s.stack == stack]
        blocks = [s for s in in_stack if s.kind in ("resid", "stage")]
        few = [blocks[0], blocks[max(0, len(blocks) // 2 - 1)], blocks[-1]] if blocks else []
        chosen |= dict.fromkeys(s for s in in_stack if s.kind not in ("resid", "stage") or s in few)
    return list(chosen)


@dataclass(frozen=True)
class OpenRows:
    """The rows of one step that one process has seen, before those of others are added; `groups` are names."""

    groups: list[str]
    sites: dict[Site, Sample]

    def merge(self, other: OpenRows) -> OpenRows:
        """The rows of both; one that both have, of contexts that they compute together, counts once."""
        groups = list(dict.fromkeys([*self.groups, *other.groups]))
        numbers = torch.tensor([groups.index(name) for name in other.groups], dtype=torch.int64)
        sites = dict(self.sites)
        for site, sample in other.sites.items():
            sample = sample.relabel("group", numbers)
            if site in sites and len(sample):
                sample = sample.select(~torch.isin(sample.label("hash"), sites[site].label("hash")))
            sites[site] = sites[site].merge(sample) if site in sites else sample
        return OpenRows(groups, sites)


class RowMap:
    """A sink that keeps a few rows of a few sites at every step: in `folder` if given, else in memory.

    `rows` is their number at each site and step, `sites` are the candidates (None = all captured ones).
    """

    def __init__(self, rows: int = 400, sites: Iterable[Site] | None = None, *, folder: Path | None = None) -> None:
        self.size, self.folder = rows, folder
        self.wanted = None if sites is None else frozenset(map_sites(sites))
        self.groups: list[str] = []
        self.words: dict[int, str] = {}  # tokens as text
        self._open: dict[Site, Sample] = {}
        self._steps: dict[int, dict[Site, Kept] | None] = {}  # None = in the folder alone
        self._unsaved: set[int] = set()  # steps that are not in the folder yet
        self._axes: dict[Site, Axes] = {}

    @torch.inference_mode(False)  # rows outlive the forward pass, so they must be ordinary tensors
    @torch.no_grad()
    def rows(self, rows: Rows) -> None:
        """Add the rows of one site; rows that are not finite, too, so that the choice does not depend on values."""
        site, index = rows.site, rows.index
        if site.kind not in KINDS or (self.wanted is not None and site not in self.wanted) or rows.x.ndim != 2:
            return
        names = index.group or ("",)
        self.groups += [name for name in dict.fromkeys(names) if name not in self.groups]
        numbers = torch.tensor([self.groups.index(name) for name in names])
        labels = {"context": index.context, "position": index.position, "token": index.token}
        labels["group"] = numbers[(index.keep.cpu() // max(1, index.length)).clamp_max(len(numbers) - 1)]
        on_host: dict[str, Any] = {name: value.cpu() for name, value in labels.items()}
        self._open.setdefault(site, Sample(self.size)).update(rows.x.detach(), **on_host)

    def scores(self, scores: Scores) -> None:
        """Attention has no rows to map."""

    def close(self, step: int, *, tokenizer: Any = None) -> None:
        """End a step: the rows added since the last one become those of `step`, replacing earlier ones."""
        sites = map_sites(self._open)
        kept = {site: _kept(self._open[site]) for site in sites if len(self._open[site])}
        self._open, self._axes = {}, {}
        if not kept:
            return
        if tokenizer is not None:
            decode = decoder_of(tokenizer)
            fresh = {int(t) for found in kept.values() for t in found["token"]} - set(self.words)
            self.words |= {token: decode([token]) if token >= 0 else "" for token in sorted(fresh)}
        self._steps[step] = kept
        self._unsaved.add(step)
        self.save()

    def taken(self) -> OpenRows:
        """The rows since the last step, which `keep` takes, here or in another process."""
        opened, self._open = self._open, {}
        return OpenRows(list(self.groups), opened)

    def keep(self, step: int, opened: OpenRows, *, tokenizer: Any = None) -> None:
        """The same as `close`, of rows that were `taken`."""
        joined = OpenRows(list(self.groups), {}).merge(opened)
        self.groups, self._open = joined.groups, joined.sites
        self.close(step, tokenizer=tokenizer)

    def parts(self, step: int) -> dict[str, Any] | None:
        """The rows of one step, for the map of another process; None if it has none."""
        if (kept := self._steps.get(step)) is None:
            return None
        return {"groups": list(self.groups), "words": dict(self.words), "sites": kept}

    def adopt(self, step: int, parts: Mapping[str, Any] | None) -> None:
        """Take over the `parts` of a step; the rows of a step that has none are forgotten as after `close`."""
        if parts is None:
            return
        names: list[str] = parts["groups"]
        self.groups += [name for name in names if name not in self.groups]
        numbers = torch.tensor([self.groups.index(name) for name in names])
        self._steps[step] = {site: {**kept, "group": numbers[kept["group"]]} for site, kept in parts["sites"].items()}
        self.words |= {token: word for token, word in parts["words"].items() if token not in self.words}
        self._axes = {}
        self._unsaved.add(step)
        self.save()

    def save(self) -> None:
        """Write the steps that are not in the folder yet; what fails is written with the next."""
        if self.folder is None:
            return
        for step in sorted(self._unsaved):
            sites = [(key(site), found) for site, found in (self._steps[step] or {}).items()]
            parts = {"groups": self.groups, "sites": sites}
            replace_file(self._path(step), lambda path, parts=parts: torch.save(parts, path))  # type: ignore[misc]
            self._unsaved.discard(step)
        held = {step: _size(kept) for step, kept in self._steps.items() if kept is not None}
        for step in sorted(held):
            if sum(held.values()) <= HELD:
                break
            self._steps[step] = None
            del held[step]

    def rewrite(self, folder: Path | None) -> int:
        """Go on in this folder, where nothing is yet; returns how many steps are lost, since memory has them no more.

        Without a folder, steps stay in memory.
        """
        self.folder, before = folder, len(self._steps)
        self._steps = {step: kept for step, kept in self._steps.items() if kept is not None or self._is_saved(step)}
        self._unsaved = {step for step, kept in self._steps.items() if kept is not None}
        return before - len(self._steps)

    def _is_saved(self, step: int) -> bool:
        return self.folder is not None and self._path(step).is_file()

    def drop(self) -> None:
        """Forget the rows since the last step: the pass that they came from failed."""
        self._open = {}

    @property
    def steps(self) -> list[int]:
        return sorted(self._steps)

    def state(self, last: int | None = None) -> dict[str, Any]:
        """The state for resuming, after the step `last` if given; rows saved in the folder are not part of it."""
        steps = [step for step in self.steps if last is None or step <= last]
        unsaved = {step: kept for step in steps if step in self._unsaved and (kept := self._steps[step])}
        inside = {step: [(key(s), k) for s, k in kept.items()] for step, kept in unsaved.items()}
        return {"steps": steps, "groups": list(self.groups), "words": dict(self.words), "inside": inside}

    def load(self, state: Mapping[str, Any]) -> RowMap:
        """Restore a state; steps whose rows are missing are left out."""
        inside = state.get("inside", {})
        self.groups, self.words = list(state.get("groups", ())), dict(state.get("words", {}))
        self._open, self._axes, self._steps, self._unsaved = {}, {}, {}, set(inside)
        for step in state["steps"]:
            if step in inside:
                self._steps[step] = {Site(*place): kept for place, kept in inside[step]}
            elif self._is_saved(step):
                self._steps[step] = None
        return self

    def _path(self, step: int) -> Path:
        assert self.folder is not None
        return self.folder / f"map-{step:09d}.pt"

    def _each(self) -> Iterator[tuple[int, dict[Site, Kept]]]:
        """(step, rows by site), loaded one step at a time."""
        for step in self.steps:
            kept = self._steps[step]
            if kept is None:
                parts = torch.load(self._path(step), map_location="cpu", weights_only=True)
                kept = {Site(*place): found for place, found in parts["sites"]}
            yield step, kept

    def axes(self) -> dict[Site, Axes]:
        """The fixed axes of every site, over all steps so far."""
        if not self._axes:
            sites = sorted({site for _, kept in self._each() for site in kept}, key=flow_order)
            self._axes = {site: axes for site in sites if (axes := self._axes_of(site)) is not None}
        return self._axes

    def _axes_of(self, site: Site) -> Axes | None:
        centre, steps = _pooled(self._rows_of(site), lambda x: x.mean(0))
        if not steps:
            return None
        cov, _ = _pooled(self._rows_of(site), lambda x: (x - centre).T @ (x - centre) / len(x))
        total = float(cov.trace())
        values, directions = _leading(cov, min(len(AXES), len(cov)))
        shares = tuple(max(0.0, float(v)) / total if total > 0 else 0.0 for v in values)
        return Axes(centre, directions, shares)

    def _rows_of(self, site: Site) -> Iterator[Tensor]:
        """The finite rows of a site at each step; none for steps with another width than the first."""
        width = None
        for _, kept in self._each():
            if site in kept:
                x = _rows(kept[site])
                width = width or x.shape[1]
                yield x[x.isfinite().all(1)] if x.shape[1] == width else x[:0]

    def about(self) -> dict[str, list[float]]:
        """The share of variance of each axis, by site."""
        return {str(site): [round(share, 6) for share in axes.shares] for site, axes in self.axes().items()}

    def records(self, model: str, seed: int | None, *, counts: Tensor | None = None) -> Iterator[dict[str, Any]]:
        """The rows of map.parquet; `counts` are token frequencies."""
        axes = self.axes()
        bins = None if counts is None or not float(counts.sum()) > 0 else equal_mass_bins(counts)
        hashes = sorted({h for _, kept in self._each() for rows in kept.values() for h in rows["hash"].tolist()})
        row_number = {value: i for i, value in enumerate(hashes)}
        for step, kept in self._each():
            for site in (s for s in kept if s in axes):
                rows, site_axes = kept[site], axes[site]
                if rows["rows"].shape[1] != len(site_axes.centre):
                    continue
                at = (_rows(rows) - site_axes.centre) @ site_axes.directions
                places, finite = at.tolist(), at.isfinite().all(1).tolist()
                common = {"model": model, "seed": seed, "step": step, "stack": site.stack}
                common |= {"layer": site.layer, "kind": site.kind}
                binned = (bin_of(rows["token"], bins) + 1).tolist() if bins is not None else None
                labels = zip(*(rows[n].tolist() for n in ("hash", "token", "position", "group")), strict=True)
                for i, (row_hash, token, position, group) in enumerate(labels):
                    if not finite[i]:
                        continue
                    word = self.words.get(token, str(token) if token >= 0 else "")
                    row = {"row": row_number[row_hash], "token": word, "position": position}
                    row |= dict(zip(AXES, places[i], strict=False))
                    row["frequency"] = (binned[i] or None) if binned is not None else None
                    yield {**common, **row, "group": self.groups[group] if group < len(self.groups) else ""}


def _kept(sample: Sample) -> Kept:
    """The rows in half precision relative to their mean, which is precise enough for a plot."""
    x = sample.rows.double().cpu()
    good = x.isfinite().all(1)
    mean = x[good].mean(0) if bool(good.any()) else torch.zeros(x.shape[1:], dtype=torch.float64)
    x = x - mean
    finite = x[x.isfinite()]
    scale = finite.abs().max() if len(finite) and bool(finite.any()) else torch.tensor(1.0, dtype=torch.float64)
    labels = {name: sample.label(name).clone() for name in ("hash", "position", "token", "group")}
    return {"rows": (x / scale).half(), "mean": mean, "scale": scale.clone(), **labels}


def _size(sites: Mapping[Site, Kept]) -> int:
    return sum(x.numel() * x.element_size() for kept in sites.values() for x in kept.values())


def _rows(kept: Kept) -> Tensor:
    return kept["rows"].double() * kept["scale"] + kept["mean"]


def _pooled(rows: Iterable[Tensor], summary: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
    """The mean of a summary over steps with equal weights, and the number of steps that had rows."""
    total, steps = torch.zeros(()), 0
    for x in rows:
        if len(x):
            total, steps = total + summary(x), steps + 1
    return total / max(1, steps), steps


def _leading(cov: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues and their vectors; each vector's largest entry is positive, so that signs are stable.

    Wide matrices by subspace iteration with a block of 8 × `count` vectors.
    """
    if len(cov) <= DENSE:
        values, vectors = torch.linalg.eigh(cov)
    else:
        block = torch.randn(len(cov), 8 * count, dtype=cov.dtype, generator=torch.Generator().manual_seed(0))
        for _ in range(60):
            block = torch.linalg.qr(cov @ block).Q
        values, inner = torch.linalg.eigh(block.T @ cov @ block)
        vectors = block @ inner
    values, vectors = values.flip(0)[:count], vectors.flip(1)[:, :count]
    sign = vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
    return values, vectors * torch.where(sign == 0, 1.0, sign)


def write_map(
    folder: Path, row_map: RowMap, *, model: str, seed: int | None, counts: Tensor | None = None
) -> dict[str, dict[str, list[float]]]:
    """Write map.parquet into a run folder; returns the entry `map` of run.json."""
    if not row_map.steps:
        return {}
    found = list(row_map.records(model, seed, counts=counts))
    shares = {map_name(model, seed): row_map.about()}
    write_rows(Path(folder), pa.Table.from_pylist(found, schema=MAP_SCHEMA), shares)
    return shares
