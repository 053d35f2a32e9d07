"""Proxies that are fitted once, on activations pooled over a window of early steps, and tested at every step.

Second moments of the gradients are kept until the window closes; the steps inside it are tested afterwards and marked
in-sample. Where it is not known in advance which steps will be measured, all moments are kept until the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from anisoscope.capture.sites.site import Site
from anisoscope.stats.moments import GradientMoments
from anisoscope.tangent import energy
from anisoscope.tangent import proxy as fitting
from anisoscope.tangent.energy import Asked, Record, SubspaceTest
from anisoscope.tangent.plan import TangentPlan, parse_window
from anisoscope.tangent.proxy import Half, Label, Proxy
from anisoscope.tangent.refit import FitRows, refits_of, standardised_set

WINDOW_ROWS = 1024  # rows of each site and step that the frozen proxy is fitted on
IN_SAMPLE = "in-sample"
MOST_OPEN = 64  # steps whose moments are kept where the window is known at the end only
STANDARDISED = "standardised"


@dataclass
class FrozenProxies:
    """The frozen proxies: collects rows and moments while the window is open, then fits and tests."""

    plan: TangentPlan
    total_steps: int | None
    source: str = ""
    measured_steps: Sequence[int] | None = None  # all that will be measured, where they are known
    rank: int = 0
    window: dict[int, dict[Any, Any]] = field(default_factory=dict)  # moments by site, packed, on the host
    pool: dict[Site, list[Tensor]] = field(default_factory=dict)  # rows of each step
    folds: dict[Site, list[Tensor]] = field(default_factory=dict)  # their folds
    proxies: dict[Label, dict[Site, Proxy]] = field(default_factory=dict)  # and their fitted controls
    device: torch.device | None = None

    @property
    def closes(self) -> float:
        """The last step of the window; infinite where it is known at the end only."""
        unit, share = parse_window(self.plan.window)
        if unit == "steps":
            return math.inf if self.total_steps is None else share * self.total_steps
        if not self.measured_steps:
            return math.inf
        return sorted(self.measured_steps)[self._inside(len(self.measured_steps)) - 1]

    def _inside(self, count: int) -> int:
        """How many of so many measured steps are inside the window."""
        return max(1, int(parse_window(self.plan.window)[1] * count + 1e-9))

    @property
    def overfull(self) -> bool:
        """Whether more moments would have to wait for the end than there is room for."""
        return math.isinf(self.closes) and len(self.window) >= MOST_OPEN

    def missed(self, step: int) -> bool:
        """Whether the window ended without a measured step, so that there is nothing to fit on."""
        return not self.proxies and not self.pool and step > self.closes

    def takes(self, step: int) -> bool:
        """Whether the rows of a step will be fitted on."""
        return not self.proxies and step <= self.closes

    def rows_of(self, fit: Half) -> tuple[Tensor, Tensor]:
        """What the frozen proxy is fitted on of one site and step, on the host: some rows and their folds."""
        few = fit.fewer(WINDOW_ROWS)
        return few.x.cpu(), few.fold

    def offer(
        self,
        step: int,
        rows: Mapping[Site, tuple[Tensor, Tensor]],
        moments: Mapping[Site, GradientMoments],
        *,
        rank: int,
    ) -> list[Record]:
        """Add a step to the window, with its `rows_of` each site, or test the frozen proxies on it; returns records."""
        self.rank, self.device = rank, next(iter(moments.values())).total.device
        if self.takes(step):
            self.window[step] = {fitting.key(site): moment.state() for site, moment in moments.items()}
            for site, (x, fold) in rows.items():
                self.pool.setdefault(site, []).append(x)
                self.folds.setdefault(site, []).append(fold)
            return []
        earlier = [] if self.proxies else self._fit(self.device)
        return earlier + self._test(step, moments, note=IN_SAMPLE if step <= self.closes else "")

    def label(self, proxy: str, control: str = "", coordinates: str = "") -> Label:
        return Label(proxy, self.rank, "frozen", control=control, batch=self.source, coordinates=coordinates)

    def _fit(self, device: torch.device) -> list[Record]:
        """Fit on the rows of the window and test the steps that were kept: those inside it, or all at the end."""
        steps, closes = sorted(self.window), self.closes
        if math.isinf(closes):
            closes = steps[self._inside(len(steps)) - 1]
            self.pool = {site: parts for site, parts in self.pool.items() if len(parts) == len(steps)}
        inside = sum(step <= closes for step in steps)
        fits = {
            site: FitRows.of_rows(torch.cat(parts[:inside]).to(device), torch.cat(self.folds[site][:inside]))
            for site, parts in self.pool.items()
        }
        rows = {site: mine.x for site, mine in fits.items()}
        seed, labels = self.plan.seed, [self.label(proxy) for proxy in self.plan.proxies[:2]]
        how: dict[str, Any] = {"seed": seed, "covariances": {site: mine.covariance for site, mine in fits.items()}}
        fitted = [fitting.fit_with_controls(rows, label, **how) for label in labels]
        self.proxies = {label: mine[label] for label, mine in zip(labels, fitted, strict=True)}
        for mine in fitted:
            self.proxies |= mine
        scaled = [replace(label, coordinates=STANDARDISED) for label in labels] if self.plan.standardised else []
        others = [standardised_set(fits, fitting.fit_standardised(rows, scaled, **how))] if scaled else []
        self.proxies, *more = refits_of([(fits, self.proxies), *others], seed=seed)
        for mine in more:
            self.proxies |= mine
        records: list[Record] = []
        for step, state in sorted(self.window.items()):
            moments = {Site(*k): GradientMoments.load(m).to(device) for k, m in state.items()}
            records += self._test(step, moments, note=IN_SAMPLE if step <= closes else "")
        self.window, self.pool, self.folds = {}, {}, {}
        return records

    def _test(self, step: int, moments: Mapping[Site, GradientMoments], *, note: str) -> list[Record]:
        places, tests, asked = [], [], []
        for site, moment in moments.items():
            mine = {label: proxies[site] for label, proxies in self.proxies.items() if site in proxies}
            for group, part in (("", moment), *moment.parts.items()):
                for test, one in self._tests(part, mine):
                    places.append((site, group))
                    tests.append(test)
                    asked.append(one)
        records: list[Record] = []
        for (site, group), found in zip(places, energy.records_of(tests, asked), strict=True):
            lives = not group or any(
                row["metric"] == "gradient_energy" and row["value"] == row["value"] for row in found
            )
            own = ({**row, "group": group} for row in found if row["metric"] != "proxy_stability")
            records += energy.placed(site, step, found if not group else own if lives else ())
        records = [{**row, "note": "; ".join(filter(None, (row.get("note"), note)))} for row in records]
        return records + energy.holm_records(records)

    def _tests(
        self, moment: GradientMoments, proxies: Mapping[Label, Proxy]
    ) -> Iterator[tuple[SubspaceTest, list[Asked]]]:
        """Tests of the proxies of a site for one second moment, that of all rows or of a group, by coordinates."""
        draws: dict[str, Any] = {"draws": self.plan.draws, "seed": self.plan.seed}
        for space in dict.fromkeys(label.coordinates for label in proxies):
            mine = {label: proxy for label, proxy in proxies.items() if label.coordinates == space}
            scale = next(iter(mine.values())).scale  # one scale for all proxies of a site
            scaled = moment if scale is None else scale.to(moment.folds.device).moments(moment)
            wanted = [Asked(p.basis, label, True, int(not label.control), p.left_out) for label, p in mine.items()]
            yield SubspaceTest(scaled, **draws), wanted

    def state(self) -> dict[str, Any]:
        """The state for saving, as plain values and tensors."""
        saved = {label: fitting.proxy_state(found) for label, found in self.proxies.items()}
        return {
            "rank": self.rank,
            "window": sorted(self.window),  # their moments are large and are saved in separate files
            "pool": {fitting.key(site): list(parts) for site, parts in self.pool.items()},
            "folds": {fitting.key(site): list(parts) for site, parts in self.folds.items()},
            **{
                f"{coordinates}{name}": {
                    self._saved_name(label): found
                    for label, found in saved.items()
                    if label.coordinates == coordinates and bool(label.control) == (name == "controls")
                }
                for coordinates in ("", STANDARDISED)
                for name in ("proxies", "controls")
            },
        }

    def _saved_name(self, label: Label) -> str:
        """The name of a proxy or a control in the state; controls of the first proxy have none of a proxy."""
        of = "" if label.proxy == self.plan.proxies[0] else f" {label.proxy}"
        return f"{label.control}{of}" if label.control else label.proxy

    def load(self, state: Mapping[str, Any], window: Mapping[int, Any]) -> None:
        self.rank = state["rank"]
        self.window = {step: dict(window[step]) for step in state["window"]}
        self.pool = {Site(*k): list(parts) for k, parts in state["pool"].items()}
        nothing = {k: [torch.zeros(len(x), dtype=torch.int64) for x in parts] for k, parts in state["pool"].items()}
        self.folds = {Site(*k): list(parts) for k, parts in state.get("folds", nothing).items()}  # older states
        main, saved = self.plan.proxies[0], {}
        for space in ("", STANDARDISED):
            for proxy, found in state.get(f"{space}proxies", {}).items():
                saved[self.label(proxy, coordinates=space)] = found
            for name, found in state.get(f"{space}controls", {}).items():
                control, _, proxy = name.partition(" ")
                saved[self.label(proxy or main, control, space)] = found
        self.proxies = {label: fitting.load_proxies(found) for label, found in saved.items()}

    def window_state(self, step: int) -> dict[Any, Any] | None:
        """The moments of one step inside the open window."""
        return self.window.get(step)

    def finish(self) -> list[Record]:
        """Fit and test now if the run ended inside the window, or if it is known only now; returns records."""
        if self.proxies or not self.window:
            return []
        return self._fit(torch.device("cpu") if self.device is None else self.device)
