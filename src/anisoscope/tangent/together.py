"""Subspaces of several sites of one shape tested together: sums on their device, one copy to the host for all of them.

A measured step tests some twenty subspaces at every site. One by one that is thousands of small operations, each of
which a device waits for; sites have rows of one shape, so they are lines of one operation (S sites below).
Notation: Q d×r a subspace, Q₍ⱼ₎ its refit without fold j, g the gradients, M their second moments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from anisoscope.metrics import tangent
from anisoscope.metrics.tangent import Draws, Measured
from anisoscope.numerics.hashing import FOLDS
from anisoscope.results.quantity import jackknives
from anisoscope.stats.moments import GradientMoments
from anisoscope.tangent.ties import Planes, opened, swings_of

Found = dict[str, Tensor]  # numbers of one subspace at every site, [S, ...] each
_ROOM = {"cpu": 1 << 24, "cuda": 1 << 29}  # bytes of the images of draws that are held for a target
_ROWS = 1 << 16  # rows of every site whose products are held at a time


def chunk_size(width: int, rank: int, draws: int, device: str) -> int:
    """The number of sites tested together: on a device as many as there is room for, on the host as the cache holds."""
    return max(1, _ROOM.get(device, _ROOM["cpu"]) // max(1, 4 * width * rank * draws))


@dataclass(frozen=True)
class Subspaces:
    """The same kind of subspace at every site; `planes` where there are refits."""

    Q: Tensor  # [S, d, r]
    left_out: Tensor | None = None  # [S, FOLDS, d, r], NaN where there is no refit
    planes: Planes | None = None

    @property
    def refits(self) -> Tensor:
        assert self.left_out is not None
        return torch.where(self.left_out.isfinite(), self.left_out, 0.0)

    def found(self) -> Found:
        """What intervals need of the refits themselves."""
        if self.left_out is None or self.planes is None:
            return {}
        alike = (self.Q.mT.unsqueeze(1) @ self.left_out).square().sum((-2, -1)) / self.Q.shape[-1]
        return {"alike": alike, "errors": self.planes.errors, "turns": self.planes.turns}


def with_planes(given: Sequence[tuple[Tensor, Tensor | None]]) -> list[Subspaces]:
    """Subspaces with their planes, those of one rank in one batch."""
    found = [Subspaces(*pair) for pair in given]
    for rank in dict.fromkeys(mine.Q.shape[-1] for mine in found):
        at = [i for i, mine in enumerate(found) if mine.left_out is not None and mine.Q.shape[-1] == rank]
        if not at:
            continue
        refits = [part for i in at if (part := found[i].left_out) is not None]
        whole = Planes.of(torch.cat([found[i].Q for i in at]), torch.cat(refits))
        parts = zip(*(t.chunk(len(at)) for t in (whole.directions, whole.errors, whole.turns)), strict=True)
        for i, mine in zip(at, parts, strict=True):
            found[i] = Subspaces(found[i].Q, found[i].left_out, Planes(*mine))
    return found


@dataclass(frozen=True)
class RowSums:
    """Sums over the test rows of each site, by group and fold."""

    g: Tensor  # [S, n, d]
    member: Tensor  # [n, groups·FOLDS] in float64: 1 where a row is in a group and fold

    @cached_property
    def norms(self) -> Tensor:
        return torch.cat([part.double().square().sum(-1) for part in self.g.split(_ROWS, 1)], 1)

    @cached_property
    def inverse(self) -> Tensor:
        """1/‖g‖² [S, n, 1], 0 for a row without gradient."""
        return torch.where(self.norms > 0, self.norms.reciprocal(), 0.0).unsqueeze(-1)

    @cached_property
    def sizes(self) -> Tensor:
        """Σ‖g‖², rows with a gradient and rows, by group and fold [S, groups, FOLDS, 3]."""
        columns = torch.stack([self.norms, (self.norms > 0).double(), torch.ones_like(self.norms)], -1)
        return (self.member.mT @ columns).unflatten(1, (-1, FOLDS))

    def each(self, subspaces: Sequence[Subspaces]) -> list[Found]:
        return [self._of(mine) for mine in subspaces]

    def _of(self, given: Subspaces) -> Found:
        """Energies by group and fold, pooled and of unit rows [S, groups, FOLDS, 1 or 1 + FOLDS].

        Of refits also the products along both directions of every plane, by group [S, groups, 3, r].
        """
        S, d, r = given.Q.shape
        blocks = [given.Q.unsqueeze(1)] if given.left_out is None else [given.Q.unsqueeze(1), given.refits]
        columns = torch.cat(blocks, 1).movedim(1, -2)  # [S, d, lines, r]
        lines = columns.shape[-2]
        columns = columns.reshape(S, d, lines * r)
        if given.planes is not None:
            columns = torch.cat([columns, given.planes.directions], -1)
        columns, found = columns.to(self.g.dtype), Found()
        parts = zip(self.g.split(_ROWS, 1), self.inverse.split(_ROWS, 1), self.member.split(_ROWS), strict=True)
        for g, inverse, member in parts:
            some = _energies(g, inverse, member, columns, lines=lines, rank=r)
            found = {name: found[name] + x if found else x for name, x in some.items()}
        return found


def _energies(g: Tensor, inverse: Tensor, member: Tensor, columns: Tensor, *, lines: int, rank: int) -> Found:
    """The sums of `RowSums` over some rows; columns after those of subspaces are directions of planes."""
    with tangent.full_float32():
        inside = (g @ columns).double()
    energy = inside[..., : lines * rank].square().unflatten(-1, (lines, rank)).sum(-1)
    both = member.mT @ torch.cat([energy, energy * inverse], -1)
    found = dict(zip(("energy", "energy row"), both.unflatten(1, (-1, FOLDS)).chunk(2, -1), strict=True))
    if inside.shape[-1] > lines * rank:
        u, v = inside[..., lines * rank :].chunk(2, -1)
        products = torch.cat([u.square(), v.square(), u * v], -1)
        groups = member.unflatten(1, (-1, FOLDS)).sum(-1)
        both = groups.mT @ torch.cat([products, products * inverse], -1)
        found |= dict(zip(("planes", "planes row"), both.unflatten(-1, (6, rank)).chunk(2, -2), strict=True))
    return found


@dataclass(frozen=True)
class MomentSums:
    """The same from second moments alone, of one group: all rows."""

    folds: Tensor  # [S, FOLDS, d, d]

    @cached_property
    def total(self) -> Tensor:
        return self.folds.sum(1)

    @cached_property
    def sizes(self) -> Tensor:
        traces = self.folds.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, :, None]
        return traces.expand(-1, -1, -1, 3)

    def each(self, subspaces: Sequence[Subspaces]) -> list[Found]:
        """As of rows; of refits only the energies in all folds and in their own [S, 1, FOLDS] are made.

        The moments of the folds, and their sum, are read once for all subspaces.
        """
        own = [self._in_folds(mine) for mine in subspaces]
        widths = [part.shape[-1] for part in own]
        images = (self.folds @ torch.cat(own, -1)).split(widths, -1)
        found = []
        for mine, inside, image in zip(subspaces, own, images, strict=True):
            energy = (inside * image).sum(-2).unflatten(-1, (-1, mine.Q.shape[-1])).sum(-1)  # [S, FOLDS, 1 or 2]
            found.append({"energy": energy[..., :1].unsqueeze(1)})
            if mine.planes is not None:
                found[-1] |= {"own": energy[..., 1].unsqueeze(1)} | self._of_all(mine, mine.planes)
        return found

    def _in_folds(self, given: Subspaces) -> Tensor:
        """The subspace, and beside it the refit without each fold [S, FOLDS, d, r or 2r]."""
        Q = given.Q.unsqueeze(1).expand(-1, FOLDS, -1, -1)
        return Q if given.planes is None else torch.cat([Q, given.refits], -1)

    def _of_all(self, given: Subspaces, planes: Planes) -> Found:
        """The energy of each refit in all folds, and products along both directions of every plane."""
        r = given.Q.shape[-1]
        refits = given.refits.movedim(1, -2).flatten(-2)  # [S, d, FOLDS·r]
        image, along = (self.total @ torch.cat([refits, planes.directions], -1)).split([FOLDS * r, 2 * r], -1)
        every = (image * refits).sum(-2).unflatten(-1, (FOLDS, r)).sum(-1)
        u, v = planes.directions.chunk(2, -1)
        one, two = along.chunk(2, -1)
        products = torch.stack([(one * u).sum(-2), (two * v).sum(-2), (one * v).sum(-2)], 1)
        return {"every": every.unsqueeze(1), "planes": products.unsqueeze(1)}


class Targets:
    """Second moments of several sites that get drawn controls, one line of each per target."""

    def __init__(self, moments: Sequence[Sequence[Tensor]], *, draws: int, seed: int) -> None:
        self.moments, self.sizes = moments, {"draws": draws, "seed": seed}
        self._drawn: dict[int, Draws] = {}

    def of(self, target: int, asked: Sequence[tuple[Tensor, Tensor]], *, shares: bool) -> list[Found]:
        """Of each (Q, its energy): summaries of both controls [S, metrics, 4], and how many random draws reach it.

        Subspaces of one rank share their draws and the products of these with the target.
        """
        M, found = torch.stack([mine[target] for mine in self.moments]), dict[int, Found]()
        for rank in dict.fromkeys(Q.shape[-1] for Q, _ in asked):
            mine = [i for i, (Q, _) in enumerate(asked) if Q.shape[-1] == rank]
            if rank not in self._drawn:
                self._drawn[rank] = Draws(M.shape[-1], rank, **self.sizes, device=str(M.device))
            measured = self._drawn[rank].of(M, [asked[i][0] for i in mine], shares=shares)
            found |= {i: _summary(measured, target, *asked[i]) for i in mine}
        return [found[i] for i in range(len(asked))]


def _summary(measured: Measured, target: int, Q: Tensor, value: Tensor) -> Found:
    random, normal = measured.random(), measured.normal(Q)
    drawn = torch.stack([*random.by_metric().values(), *normal.by_metric().values()], 1)
    reached = (random.energy >= value.unsqueeze(-1) * (1 - tangent.TIE)).sum(-1).double()
    return {f"bands {target}": bands_of(drawn), f"reached {target}": reached}


def bands_of(draws: Tensor) -> Tensor:
    """Mean, 95 % band and standard deviation of sets of draws [..., J]: [..., 4], NaN where a draw is not finite."""
    values = torch.where(draws.isfinite().all(-1, keepdim=True), draws, torch.nan)
    ends = torch.tensor([0.025, 0.975], dtype=values.dtype, device=values.device)
    low, high = torch.quantile(values, ends, dim=-1)
    return torch.stack([values.mean(-1), low, high, values.std(-1)], -1)


def anisotropy_of(moments: Sequence[GradientMoments], used: Sequence[int], groups: Sequence[str]) -> tangent.Anisotropy:
    """Of all rows, without each of some folds in turn, and of groups, at every site [S, lines, d, d]."""
    folds = torch.stack([mine.folds for mine in moments])
    stacked = folds.new_empty(len(folds), 1 + len(used) + len(groups), *folds.shape[-2:])
    whole = torch.sum(folds, 1, out=stacked[:, 0])
    for line, fold in enumerate(used, 1):
        torch.sub(whole, folds[:, fold], out=stacked[:, line])
    for line, group in enumerate(groups, 1 + len(used)):
        torch.stack([mine.groups[group] for mine in moments], out=stacked[:, line])
    return tangent.Anisotropy(stacked.div_(stacked.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]))


def on_host(found: Sequence[Mapping[str, Tensor]]) -> list[dict[str, np.ndarray]]:
    """Many small tensors in one copy, in float64.

    >>> on_host([{"a": torch.ones(2)}, {"b": torch.zeros(1, 1)}])[0]["a"].tolist()
    [1.0, 1.0]
    """
    tensors = [x for part in found for x in part.values()]
    if not tensors:
        return [{} for _ in found]
    here = tensors[0].device  # sites of one model may be on several
    flat = torch.cat([x.detach().to(here, torch.float64).reshape(-1) for x in tensors]).cpu().numpy()
    ends = np.cumsum([0, *(x.numel() for x in tensors)])
    arrays = iter(flat[i:j].reshape(tuple(x.shape)) for x, i, j in zip(tensors, ends[:-1], ends[1:], strict=True))
    return [{name: next(arrays) for name in part} for part in found]


def ratio_columns(found: Mapping[str, np.ndarray], sizes: np.ndarray, *, row: bool = False) -> dict[str, np.ndarray]:
    """Σ energy / Σ size of every site and group [S, groups] with its jackknife.

    Leaving out a fold takes its rows away, and the refit without it in the place of the proxy.
    """
    after = " row" if row else ""
    energy, bottom = found[f"energy{after}"], sizes[..., 1 if row else 0]
    whole = energy[..., 0]
    every, own = whole.sum(-1, keepdims=True), whole
    if "own" in found:
        every, own = found["every"], found["own"]
    elif energy.shape[-1] > 1:
        every = energy[..., 1:].sum(-2)
        own = np.diagonal(energy[..., 1:], axis1=-2, axis2=-1)
    total = bottom.sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = whole.sum(-1) / total
        rest = (every - own) / (total[..., None] - bottom)
        rest = np.where(bottom > 0, rest, np.nan)  # a fold without rows must not narrow an interval
        if "turns" in found:
            rest = np.where(np.isfinite(found["turns"][:, None, 0]), rest, np.nan)
            swings = swings_of(*np.moveaxis(found[f"planes{after}"], -2, 0)) / total[..., None]
            shape = swings.shape[:2]
            errors = np.broadcast_to(found["errors"][:, None], (*shape, swings.shape[-1]))
            turns = np.broadcast_to(found["turns"][:, None], (*shape, *found["turns"].shape[1:]))
            rest = opened(rest, swings=swings, errors=errors, turns=turns)
    low, high = jackknives(value, rest, bounds=(0.0, 1.0))
    return {"value": value, "low": low, "high": high, "replicates": rest}
