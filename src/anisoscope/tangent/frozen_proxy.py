"""The frozen proxy: fitted once, on activations pooled over the first part of training, then kept.

Second moments of the gradients of every step inside the window are kept until the proxy exists; those steps are marked
in-sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from anisoscope.capture.sites.site import Site
from anisoscope.metrics.tangent import Draws, next_components
from anisoscope.stats.gradient_moments import GradientMoments
from anisoscope.tangent.energy import Record, Shares, fitted_control_records, holm_records, moment_records, placed
from anisoscope.tangent.plan import TangentPlan
from anisoscope.tangent.proxy import Label, Proxy, fit_proxies, key, load_proxies, proxy_state, rows_to_fit
from anisoscope.tangent.step_rows import Half

WINDOW_ROWS = 1024  # rows of each site and step that the frozen proxy is fitted on
IN_SAMPLE = "in-sample"


@dataclass
class FrozenProxies:
    """The window while it is open, the proxies afterwards."""

    plan: TangentPlan
    total_steps: int
    source: str = ""
    rank: int = 0
    window: dict[int, dict[Any, Any]] = field(default_factory=dict)  # moments by site, packed, on the host
    pool: dict[Site, list[Tensor]] = field(default_factory=dict)
    proxies: dict[str, dict[Site, Proxy]] = field(default_factory=dict)
    controls: dict[str, dict[Site, Proxy]] = field(default_factory=dict)
    device: torch.device | None = None

    @property
    def closes(self) -> float:
        """The last step of the window."""
        return self.plan.window * self.total_steps

    def missed(self, step: int) -> bool:
        """Whether the window went by without a measured step: there is nothing to fit on."""
        return not self.proxies and not self.pool and step > self.closes

    def offer(
        self, step: int, fits: Mapping[Site, Half], moments: dict[Site, GradientMoments], *, rank: int
    ) -> list[Record]:
        """Take a step into the window, or test the frozen proxies on it."""
        self.rank, self.device = rank, next(iter(moments.values())).total.device
        if not self.proxies and step <= self.closes:
            self.window[step] = {key(site): moment.state() for site, moment in moments.items()}
            for site, fit in fits.items():
                self.pool.setdefault(site, []).append(rows_to_fit(fit, most=WINDOW_ROWS).cpu())
            return []
        earlier = [] if self.proxies else self._fit(self.device)
        return earlier + self._test(step, moments, note="")

    def _fit(self, device: torch.device) -> list[Record]:
        """Fit on what the window gathered, and go back to the steps inside it."""
        rows = {site: torch.cat(parts).to(device) for site, parts in self.pool.items()}
        for proxy in self.plan.proxies[:2]:
            label = Label(proxy, self.rank, fit="frozen", batch=self.source)
            self.proxies[proxy] = fit_proxies(rows, label, seed=self.plan.seed)
        self._fit_controls(rows)
        records: list[Record] = []
        for step, state in sorted(self.window.items()):
            records += self._test(step, load_moments(state, device), note=IN_SAMPLE)
        self.window, self.pool = {}, {}
        return records

    def _fit_controls(self, rows: Mapping[Site, Tensor]) -> None:
        """The next components, and a proxy of shuffled columns, of the same pooled activations."""
        label = Label(self.plan.proxies[0], self.rank, fit="frozen", batch=self.source)
        main = self.proxies[label.proxy]
        self.controls["permuted"] = fit_proxies(rows, replace(label, control="permuted"), seed=self.plan.seed)
        self.controls["next"] = {}
        for site, x in rows.items():
            beyond = next_components(torch.cov(x.double().T), main[site].basis.to(x.device))
            self.controls["next"][site] = Proxy(beyond, beyond.T, main[site].centre)

    def _test(self, step: int, moments: Mapping[Site, GradientMoments], *, note: str) -> list[Record]:
        records: list[Record] = []
        for site, moment in moments.items():
            total, shares = moment.total, Shares(moment)
            options: dict[str, Any] = {"draws": self.plan.draws, "seed": self.plan.seed, "device": str(total.device)}
            bases = {p: found[site].basis.to(total.device) for p, found in self.proxies.items() if site in found}
            drawn = {r: Draws(len(total), r, **options).of(total) for r in {Q.shape[1] for Q in bases.values()}}
            for proxy, Q in bases.items():
                label, measured = Label(proxy, self.rank, fit="frozen", batch=self.source), drawn[Q.shape[1]]
                mine = moment_records(shares, Q, label, measured, note=note)
                records += placed(site, step, mine)
            for control, found in self.controls.items():
                if site in found:
                    label = Label(self.plan.proxies[0], self.rank, fit="frozen", control=control, batch=self.source)
                    basis = found[site].basis.to(total.device)
                    fitted = fitted_control_records(shares, basis, label, note=note)
                    records += placed(site, step, fitted)
        return records + holm_records(records)

    def state(self) -> dict[str, Any]:
        """Plain values and tensors, from which the window or the proxies come back."""
        return {
            "rank": self.rank,
            "window": sorted(self.window),  # their moments are large and lie in files of their own
            "pool": {key(site): parts for site, parts in self.pool.items()},
            "proxies": {name: proxy_state(found) for name, found in self.proxies.items()},
            "controls": {name: proxy_state(found) for name, found in self.controls.items()},
        }

    def load(self, state: Mapping[str, Any], window: Mapping[int, Any]) -> None:
        self.rank = state["rank"]
        self.window = {step: dict(window[step]) for step in state["window"]}
        self.pool = {Site(*k): list(parts) for k, parts in state["pool"].items()}
        self.proxies = {name: load_proxies(found) for name, found in state["proxies"].items()}
        self.controls = {name: load_proxies(found) for name, found in state["controls"].items()}

    def window_state(self, step: int) -> dict[Any, Any] | None:
        """The moments of one step inside the open window."""
        return self.window.get(step)

    def finish(self) -> list[Record]:
        """The proxies of a run that ended inside its window."""
        if self.proxies or not self.window:
            return []
        return self._fit(torch.device("cpu") if self.device is None else self.device)


def load_moments(state: Mapping[Any, Mapping[str, Tensor]], device: torch.device) -> dict[Site, GradientMoments]:
    return {Site(*k): GradientMoments.load(m).to(device) for k, m in state.items()}
