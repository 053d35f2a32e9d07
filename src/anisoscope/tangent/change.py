"""What one measured step gives by itself, and its comparison with the step before: turns, matches, amplification.

`StepAlone` needs the rows of its own step only, so that the checkpoints of a series can be measured in any order, by
several processes; what refers to another step is made from two of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anisoscope.capture.sites.site import Site
from anisoscope.metrics import tangent
from anisoscope.numerics.hashing import FOLDS
from anisoscope.numerics.host import each_on_host
from anisoscope.results.quantity import jackknife
from anisoscope.results.query import variant_name
from anisoscope.stats.moments import FoldCovariance, GradientMoments
from anisoscope.tangent import energy
from anisoscope.tangent.energy import Record
from anisoscope.tangent.plan import TangentPlan
from anisoscope.tangent.proxy import Label
from anisoscope.tangent.together import Found, Targets, on_host

STILL = 1e-6  # share of the variance below which growth is rounding
DRAW_SEED = 104_729  # offset: control draws have a separate random stream


@dataclass
class Kept:
    """What the next measured step needs of this one at one site."""

    step: int
    bases: dict[str, Tensor]  # by proxy
    directions: Tensor  # of semi-NMF
    folds: FoldCovariance  # of the test half


@dataclass
class SiteAlone:
    """What one step gives by itself at one site."""

    energies: list[Record]  # of its own proxies
    spread: list[Record]  # of types
    kept: Kept
    moments: GradientMoments
    rows: int  # of the test half
    contexts: int
    overlap: float | None = None  # of both proxies
    window: tuple[Tensor, Tensor] | None = None  # rows and their folds for an open window of the frozen proxy


@dataclass
class StepAlone:
    """What one step gives by itself."""

    step: int
    rank: int
    sites: dict[Site, SiteAlone] = field(default_factory=dict)
    splits: list[Record] = field(default_factory=list)  # energies of other halves of the contexts
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StepChange:
    """The comparison of a step with what was kept of the last one."""

    plan: TangentPlan
    source: str
    previous: Mapping[Site, Kept]

    def records(self, alone: StepAlone) -> dict[Site, list[Record]]:
        """Rotation, matching and amplification at each site that has an earlier step."""
        device = next((one.moments.folds.device.type for one in alone.sites.values()), "cpu")
        grown = self._growth(alone)
        known = [site for site in alone.sites if site in grown]
        changed = each_on_host(lambda site: self._change(site, alone, *grown[site]), known, device)
        numbers = dict(zip(known, on_host(changed), strict=True))
        found = each_on_host(lambda site: list(self._records(site, alone, numbers[site])), known, device)
        return dict(zip(known, found, strict=True))

    def _growth(self, alone: StepAlone) -> dict[Site, tuple[Tensor, ...]]:
        """Growth of the covariance of the test half since the last measured step, and the directions that span it."""
        now = {site: one.kept.folds for site, one in alone.sites.items()}
        known = {s: k.folds for s in now if (k := self.previous.get(s)) is not None and k.step < alone.step}
        problems = [(old.to(now[s].n.device).covariance(), now[s].covariance()) for s, old in known.items()]
        return dict(zip(known, tangent.each_decomposed(tangent.growth, problems), strict=True))

    def _change(self, site: Site, alone: StepAlone, grown: Tensor, grew: Tensor) -> Found:
        """What the records are made of, on the device of the site."""
        kept, before, main = alone.sites[site].kept, self.previous[site], self.plan.proxies[0]
        basis = kept.bases[main]
        found = {"basis": basis, "earlier basis": before.bases[main].to(basis)}
        found |= {"concepts": kept.directions, "earlier concepts": before.directions.to(kept.directions)}
        return found | self._amplified(before, kept.folds, grown, grew)

    def _amplified(self, before: Kept, after: FoldCovariance, grown: Tensor, grew: Tensor) -> Found:
        """The share of new variance inside each earlier proxy, without each fold, and beside drawn controls.

        The jackknife keeps the directions of growth fixed.
        """
        older = before.folds.to(after.n.device)
        found: Found = {"used": after.n, "traces": torch.stack([grown.trace(), after.covariance().trace()])}
        bases = [before.bases[proxy].to(grown) for proxy in self.plan.proxies[:2]]
        inside = [grew @ (grew.mT @ Q) for Q in bases]
        weights = torch.stack([grew @ grew.mT, *(B @ B.mT for B in inside)])
        change = after.weighted(weights) - older.weighted(weights)
        values = torch.stack([tangent.amplification(grown, Q) for Q in bases])
        found["amplified"] = torch.cat([values.unsqueeze(1), change[1:] / change[0]], 1)
        drawn = Targets([[grown]], draws=self.plan.draws, seed=self.plan.seed + DRAW_SEED)
        asked = [(Q[None], values[i : i + 1]) for i, Q in enumerate(bases)]
        for i, mine in enumerate(drawn.of(0, asked, shares=False)):
            found |= {f"{name} of {i}": x for name, x in mine.items()}
        return found

    def _records(self, site: Site, alone: StepAlone, numbers: Mapping[str, np.ndarray]) -> Iterator[Record]:
        before = self.previous[site]
        since = {"variant": variant_name({"rank": alone.rank}), "note": f"since step {before.step}"}
        bases, concepts = (
            [torch.from_numpy(numbers[f"{when}{what}"]) for when in ("earlier ", "")] for what in ("basis", "concepts")
        )
        yield {"metric": "concept_turn", "value": tangent.concept_turn(*bases), **since}
        yield {"metric": "concept_match", "value": tangent.concept_match(*concepts), **since}
        yield from self._amplification(alone.sites[site], before.step, numbers, rank=alone.rank)

    def _amplification(
        self, now: SiteAlone, since: int, numbers: Mapping[str, np.ndarray], *, rank: int
    ) -> Iterator[Record]:
        labels = [Label(proxy, rank, batch=self.source) for proxy in self.plan.proxies[:2]]
        more: Record = {"n": now.rows, "contexts": now.contexts, "note": f"since step {since}"}
        gained, whole = numbers["traces"].tolist()
        if not gained > STILL * whole:
            more["note"] = f"since step {since}; the activations have not changed beyond rounding"
            for label in labels:
                yield energy.record("amplification", {"value": math.nan} | more, label)
            return
        used = (numbers["used"] > 0).tolist()
        for i, (label, (value, *leave_one_out)) in enumerate(zip(labels, numbers["amplified"].tolist(), strict=True)):
            rest = [part for part, lives in zip(leave_one_out, used, strict=True) if lives]
            low, high = jackknife(value, rest, bounds=(0.0, 1.0))
            columns = {"value": value, "low": low, "high": high, "replicates": rest if len(rest) == FOLDS else []}
            yield energy.record("amplification", columns | more, label)
            p = (1 + int(numbers[f"reached 0 of {i}"][0])) / (self.plan.draws + 1) if value == value else value
            yield energy.record("amplification_p", {"value": p} | more, label)
            for name, row in zip(("random", "normal"), numbers[f"bands 0 of {i}"][0].tolist(), strict=True):
                yield energy.record("amplification", energy.band(row) | more, label, control=name)


def kept_state(previous: Mapping[Site, Kept]) -> dict[Any, dict[str, Any]]:
    """What was kept of a step, as plain values and tensors."""
    return {
        (site.layer, site.kind, site.stack, site.name): {
            "step": k.step,
            "bases": {name: basis.cpu() for name, basis in k.bases.items()},
            "directions": k.directions.cpu(),
            "folds": k.folds.state(),
        }
        for site, k in previous.items()
    }


def load_kept(state: Mapping[Any, Mapping[str, Any]]) -> dict[Site, Kept]:
    """Restore what `kept_state` returned."""
    return {
        Site(*k): Kept(parts["step"], parts["bases"], parts["directions"], FoldCovariance.load(parts["folds"]))
        for k, parts in state.items()
    }
