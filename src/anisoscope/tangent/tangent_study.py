"""The tangent study of one model: do directions fitted on activations alone contain the true gradients?

At each measured step, proxies are fitted on the fit half (`refit`) and tested on the gradients of the test half against
matched-rank controls. Second moments are kept so that a proxy fitted once (`frozen`) can be tested at every step: it is
fitted on activations pooled over a window, the first three tenths of the measured steps, and the steps inside it are
tested afterwards and marked in-sample. Where it is not known in advance which steps will be measured, all moments are
kept until the end, when the window is known.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from anisoscope.capture.sites.site import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.evaluation import far_apart
from anisoscope.metrics import frequency, tangent
from anisoscope.numerics.hashing import FOLDS
from anisoscope.numerics.host import each_on_host
from anisoscope.results.query import FIRST_OUTLIER, options_of, variant_name, with_options
from anisoscope.stats.moments import FoldCovariance, GradientMoments
from anisoscope.tangent import change, energy
from anisoscope.tangent import proxy as fitting
from anisoscope.tangent.change import DRAW_SEED, Kept, SiteAlone, StepAlone, StepChange
from anisoscope.tangent.energy import Asked, EnergyRows, Grouping, Record, SubspaceTest
from anisoscope.tangent.frozen import MOST_OPEN, STANDARDISED, FrozenProxies
from anisoscope.tangent.plan import TangentPlan
from anisoscope.tangent.proxy import Half, Label, Proxy, Scale, StepRows
from anisoscope.tangent.refit import FitRows, Fitted, refits_of, standardised_set
from anisoscope.tangent.together import Found, on_host

DEFAULT_RANK = 16
ONE_PER_CONTEXT = ("cls", "stage_mean")  # kinds of sites


EVERY = 1 << 20  # controls of all targets
TOGETHER = 1 << 30  # bytes of rows of the sites that are measured together
_SQUARES = {"cpu": 1 << 30, "cuda": 1 << 32}  # bytes of their second moments
_FITTED = 1 << 31  # bytes of rows, moments and copies of the sites whose proxies are fitted together
_COPIES = 3  # of the rows that are fitted on: as they are, balanced or without the first position, standardised


@dataclass(frozen=True)
class Reading:
    """The test rows of one site as they are read: without the first position or not, and in which coordinates."""

    site: Site
    first: str
    space: str
    test: Half
    proxies: Mapping[Label, Proxy]

    @property
    def scale(self) -> Scale | None:
        return next(iter(self.proxies.values())).scale  # of the same rows, so one for all


@dataclass
class StepShared:
    """What the sites of one step have in common, when they are measured in groups."""

    labels: dict[Any, dict[str, Any]] = field(default_factory=dict)  # of rows, which are the same at most sites
    apart: dict[Site, bool] = field(default_factory=dict)  # whether the first position is an outlier
    later: set[Site] = field(default_factory=set)  # sites with rows at other positions, too
    widths: set[int] = field(default_factory=set)
    like: EnergyRows | None = None  # those of the site before, whose groups of rows are the same at most sites
    spreads: dict[Site, frequency.TypeSpread] = field(default_factory=dict)

    def look_at(self, halves: Halves) -> None:
        """Take in some of the sites."""
        self.apart |= first_apart(halves)
        for site, both in halves.items():
            self.widths.add(both[0].x.shape[1])
            self.later |= {site} if all(bool((half.position > 0).any()) for half in both) else set()

    def outlying(self, site: Site) -> bool:
        """Whether a site is read without the first position as well: if that is an outlier anywhere in its stack."""
        return site in self.later and any(far for other, far in self.apart.items() if other.stack == site.stack)


@dataclass
class StepFits:
    """The rows of some sites that proxies are fitted on, and these proxies."""

    rows: dict[str, dict[Site, FitRows]] = field(
        default_factory=lambda: {"": {}, "out": {}}
    )  # "out": without the first
    even: dict[Site, FitRows | None] = field(default_factory=dict)  # balanced over frequency bins, if there are enough
    proxies: Mapping[Label, Mapping[Site, Proxy]] = field(default_factory=dict)
    other: Mapping[Site, Readings] = field(default_factory=dict)  # of other rows and coordinates


Halves = dict[Site, tuple[Half, Half]]
Readings = dict[tuple[str, str], dict[Label, Proxy]]
"""Proxies of one site by which rows they were fitted on ("out": without the first position) and coordinates."""


@dataclass
class TangentStudy:
    """The study of one model over its steps; `counts` [V] are token frequencies of the training corpus."""

    plan: TangentPlan
    counts: Tensor | None = None
    total_steps: int | None = None
    source: str = ""  # "live" for rows of training batches
    single: bool = False  # one model, no series of steps
    measured_steps: Sequence[int] | None = None  # all that will be measured, where they are known in advance
    previous: dict[Site, Kept] = field(default_factory=dict)
    fitted: dict[str, dict[Site, Proxy]] = field(default_factory=dict)  # the proxies of the last step
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bins = None if self.counts is None else frequency.equal_mass_bins(self.counts, bins=self.plan.bins)
        wanted = self.plan.frozen and not self.single
        known = (self.total_steps, self.source, self.measured_steps)
        self.frozen = FrozenProxies(self.plan, *known) if wanted else None
        self.main_rank = 0

    def measure(self, rows: StepRows) -> list[Record]:
        """Records of one step; when the window closes, also those of frozen proxies at earlier steps."""
        return self.compared(self.alone(rows))

    def alone(self, rows: StepRows) -> StepAlone:
        """What one step gives by itself, whatever was measured before it."""
        groups, shared, halves = rows.site_groups(TOGETHER, _SQUARES), StepShared(), Halves()
        for sites in groups:
            halves = self._halves(rows, sites, shared)
            shared.look_at(halves)
        found: dict[Site, SiteAlone] = {}
        self.fitted = {}

        def halves_of(sites: Sequence[Site]) -> Halves:
            return halves if len(groups) == 1 else self._halves(rows, sites, shared)

        for batch in self._batches(groups, max(shared.widths, default=1)):
            fits = StepFits()
            for sites in batch:
                self._choose_rows(halves_of(sites), fits, shared)
            if fits.rows[""]:
                self._fit_together(fits, width=min(shared.widths))
            for sites in batch:
                found |= self._sites_alone(rows.step, halves_of(sites), fits, shared)
        typed = [site for site in found if site in shared.spreads]
        spreads = spread_records([shared.spreads[site] for site in typed], over="context", seed=self.plan.seed)
        for site, records in zip(typed, spreads, strict=True):
            found[site].spread = records
        splits = list(self._at_splits(rows))
        return StepAlone(rows.step, self.main_rank, found, splits, list(self.notes))

    def _halves(self, rows: StepRows, sites: Sequence[Site], shared: StepShared) -> Halves:
        found = rows.halves(sites, shared.labels)
        return {site: (fit, test) for site, fit, test in found if self._spans(site, fit)}

    def _batches(self, groups: Sequence[list[Site]], width: int) -> list[list[list[Site]]]:
        """Groups of sites whose proxies are fitted together: fits need few rows, and many are quicker at once."""
        one = _COPIES * (4 * self.plan.fit_rows * width + 8 * FOLDS * width**2)
        found: list[list[list[Site]]] = []
        for sites in groups:
            if not found or one * (sum(map(len, found[-1])) + len(sites)) > _FITTED:
                found.append([])
            found[-1].append(sites)
        return found

    def _choose_rows(self, halves: Halves, fits: StepFits, shared: StepShared) -> None:
        """Add the rows of some sites that proxies are fitted on."""
        fits.rows[""] |= self._fit_rows({site: fit for site, (fit, _) in halves.items()})
        later = {site: fit.without_first() for site, (fit, _) in halves.items() if shared.outlying(site)}
        fits.rows["out"] |= self._fit_rows(later)
        if self.plan.balanced and self.bins is not None:
            for site, (fit, _) in halves.items():
                even = fitting.balanced_rows(fit, self.bins, most=self.plan.fit_rows)
                fits.even[site] = None if even is None else FitRows.of(even)

    def _fit_together(self, fits: StepFits, *, width: int) -> None:
        fits.proxies, fits.other = self._refitted(fits, width=width)
        for label in filter(self._is_main, fits.proxies):
            self.fitted.setdefault(label.proxy, {}).update(fits.proxies[label])

    def _sites_alone(self, step: int, halves: Halves, fits: StepFits, shared: StepShared) -> dict[Site, SiteAlone]:
        """What one step gives by itself at some of its sites, but for the spread of types."""
        if not halves:
            return {}
        apart, proxies, other = shared.apart, fits.proxies, fits.other
        device = next((test.x.device.type for _, test in halves.values()), "cpu")
        spreads = each_on_host(lambda both: FoldCovariance.of(both[1].x, both[1].fold), list(halves.values()), device)
        folds = dict(zip(halves, spreads, strict=True))
        readings = [
            Reading(site, first, space, test.without_first() if first else test, mine)
            for site, (_, test) in halves.items()
            for (first, space), mine in other[site].items()
            if mine or not first  # all rows as they are: `_fit` has fitted on them
        ]
        plainly = [one for one in readings if not one.space]
        summed = each_on_host(lambda one: self._moments(one.test), plainly, device)
        moments = {(one.site, one.first): mine for one, mine in zip(plainly, summed, strict=True)}
        energies = self._energies(readings, moments, proxies, shared)
        beside = [(fits.rows[first][site].spread, mine) for (site, first), mine in moments.items()]
        numbers = each_on_host(lambda both: energy.alignment_numbers(*both), beside, device)
        aligned = dict(zip(moments, on_host(numbers), strict=True))
        compared = each_on_host(lambda site: self._beside(site, *halves[site]), list(halves), device)
        besides = dict(zip(halves, on_host(compared), strict=True))

        def measure_site(site: Site) -> SiteAlone:
            fit, test = halves[site]
            found = list(energies[site, "main"])
            for first in ("", *(["out"] if (site, "out") in moments else [])):
                moment = moments[site, first]
                note = self._note_of(moment, outlier=bool(first and apart[site]))
                how: dict[str, Any] = {"first": first, "batch": self.source, "note": note}
                found += energy.alignment_records(aligned[site, first], moment, **how)
                found += energies[site, first]
            main = {name: mine[site] for name, mine in self.fitted.items() if site in mine}
            bases = {name: proxy.basis for name, proxy in main.items()}
            kept = Kept(step, bases, main[self.plan.proxies[0]].directions, folds[site])
            overlap = float(besides[site]["overlap"]) if "overlap" in besides[site] else None
            if (types := self._types(fit, test)) is not None:
                shared.spreads[site] = frequency.TypeSpread(types[0], *torch.from_numpy(besides[site]["spread"]))
            window = self.frozen.rows_of(fit) if self.frozen is not None and self.frozen.takes(step) else None
            sizes = len(test), test.contexts
            return SiteAlone(found, [], kept, moments[site, ""], *sizes, overlap, window)

        with tangent.full_float32():  # set once: sites in parallel threads would reset it for each other
            by_site = each_on_host(measure_site, list(halves), device)
        return dict(zip(halves, by_site, strict=True))

    def compared(self, alone: StepAlone) -> list[Record]:
        """The records of a step, also those that refer to earlier ones; the next is compared with this one."""
        self.main_rank = alone.rank
        for text in alone.notes:
            self._note(text)
        changed = StepChange(self.plan, self.source, self.previous)
        with tangent.full_float32():
            changes = changed.records(alone)
        records: list[Record] = []
        variant = variant_name({"rank": alone.rank})
        for site, one in alone.sites.items():
            overlap = {"metric": "proxy_overlap", "variant": variant, "value": one.overlap}
            found = [*one.energies, *([] if one.overlap is None else [overlap]), *changes.get(site, ()), *one.spread]
            live = [row | {"variant": _of_batch(row["variant"], self.source)} for row in found]
            records += energy.placed(site, alone.step, live)
            self.previous[site] = one.kept
        records += energy.holm_records(records)
        records += self._offered(alone)
        return [*records, *alone.splits]

    def _refitted(self, fits: StepFits, *, width: int) -> tuple[dict[Label, dict[Site, Proxy]], dict[Site, Readings]]:
        """All proxies with their refits: on all rows as they are, and by site those of other rows and coordinates."""
        sets = self._fit(fits, width=width)
        plain, others = len(sets), self._readings(fits.rows)
        refitted = refits_of([*sets, *(mine for *_, mine in others)], seed=self.plan.seed)
        proxies = {label: found for mine in refitted[:plain] for label, found in mine.items()}
        other: dict[Site, Readings] = {site: {("", ""): {}} for site in fits.rows[""]}
        for (first, space, _), mine in zip(others, refitted[plain:], strict=True):
            for label, found in mine.items():
                for site, proxy in found.items():
                    other[site].setdefault((first, space), {})[label] = proxy
        return proxies, other

    def _offered(self, alone: StepAlone) -> list[Record]:
        """Records of frozen proxies, which are told of this step; none where they are left out, with a note."""
        if self.frozen is not None and self.frozen.missed(alone.step):
            self._note(
                f"no step inside the window (up to step {self.frozen.closes:.0f}) was measured, so no frozen proxy"
            )
            self.frozen = None
        if self.frozen is not None and self.frozen.overfull:
            self._note(
                f"the frozen proxy is left out: more than {MOST_OPEN} steps were measured without it being known in "
                "advance which; give total_steps, and when= as a schedule or a list of steps"
            )
            self.frozen = None
        if self.frozen is None:
            return []
        rows = {site: one.window for site, one in alone.sites.items() if one.window is not None}
        moments = {site: one.moments for site, one in alone.sites.items()}
        return self.frozen.offer(alone.step, rows, moments, rank=alone.rank)

    def _at_splits(self, rows: StepRows) -> Iterator[Record]:
        """Energies of proxies fitted and tested on other halves of the same contexts, as rows with `split`.

        Only what one step gives by itself: no frozen proxies, no growth since earlier steps, no further coordinates.
        """
        alone: dict[str, Any] = {"splits": (), "frozen": False, "standardised": False, "ranks": ()}
        plan = replace(self.plan, **alone, rank=self.main_rank, proxies=self.plan.proxies[:2])
        for split in self.plan.splits:
            other = rows.at_split(split)
            if reason := other.lacking():
                self._note(f"{reason} of split {split}, which was left out")
                continue
            found = TangentStudy(plan, self.counts, source=self.source, single=True).measure(other)
            for row in found:
                options = options_of(row["variant"])
                if "proxy" in options and "first" not in options:
                    yield {**row, "variant": with_options(row["variant"], split=split)}

    def _spans(self, site: Site, fit: Half) -> bool:
        """Whether there is something to fit at a site with one row per context; too few rows, or equal ones, are noted.

        The class token that enters the first block is the same in every context.
        """
        if site.kind not in ONE_PER_CONTEXT:
            return True
        wanted = self.plan.rank if self.plan.rank is not None else DEFAULT_RANK
        if len(fit) <= wanted:
            self._note(f"{site} has {len(fit)} rows to fit on, one per context, too few for rank {wanted}: left out")
        return len(fit) > wanted and bool((fit.x != fit.x[:1]).any())

    def _fit_rows(self, halves: Mapping[Site, Half]) -> dict[Site, FitRows]:
        device = next((half.x.device.type for half in halves.values()), "cpu")
        found = each_on_host(lambda half: FitRows.of(half, self.plan.fit_rows), list(halves.values()), device)
        return dict(zip(halves, found, strict=True))

    def _readings(self, fits: Mapping[str, Mapping[Site, FitRows]]) -> list[tuple[str, str, Fitted]]:
        """Proxies in standardised coordinates, and of rows without the first position where that is an outlier.

        With which rows they were fitted on ("out": without the first position), and the coordinates.
        """
        spaces = ("", STANDARDISED) if self.plan.standardised else ("",)
        found = []
        for (first, chosen), space in product(fits.items(), spaces):
            labels = [
                Label(proxy, self.main_rank, batch=self.source, coordinates=space, first=first)
                for proxy in self.plan.proxies[:2]
            ]
            rows = {site: mine for site, mine in chosen.items() if len(mine.x) > self.main_rank}
            if not rows or not (first or space):  # `_fit` has fitted on all rows as they are
                continue
            try:
                found.append((first, space, self._fit_both(rows, labels)))
            except AnisoscopeError as error:
                self._note(f"energies {energy_words(labels[0])} are left out: {error}")
        return found

    def _fit_both(self, fits: Mapping[Site, FitRows], labels: list[Label]) -> Fitted:
        """Both main proxies and the fitted controls of the first."""
        seed, rows = self.plan.seed, {site: mine.x for site, mine in fits.items()}
        how: dict[str, Any] = {"seed": seed, "covariances": {s: f.covariance for s, f in fits.items()}}
        if labels[0].coordinates:
            return standardised_set(fits, fitting.fit_standardised(rows, labels, **how))
        found = {label: fitting.fit_proxies(rows, label, seed=seed) for label in labels}
        return fits, found | fitting.fit_controls(rows, labels[0], found[labels[0]], **how, permuted=self.plan.permuted)

    def _energies(
        self,
        readings: Sequence[Reading],
        moments: Mapping[tuple[Site, str], GradientMoments],
        proxies: Mapping[Label, Mapping[Site, Proxy]],
        shared: StepShared,
    ) -> dict[tuple[Site, str], list[Record]]:
        """Records of energies by site and whether the first position is out; "main" are those of `_fit`."""
        places, tests, asked, like = [], [], [], shared.like
        sizes: dict[str, Any] = {"draws": self.plan.draws, "seed": self.plan.seed + DRAW_SEED}
        for one in readings:
            test, moment = one.test, moments[one.site, one.first]
            groupings = self.groupings(test)
            if one.proxies:
                scale, note = one.scale, self._note_of(moment, outlier=bool(one.first and shared.apart[one.site]))
                assert test.g is not None
                g = test.g if scale is None else scale.gradients(test.g)
                scaled = moment if scale is None else scale.moments(replace(moment, groups={}, parts={}))  # of all rows
                like = EnergyRows(replace(test, g=g), groupings, like=like)
                tests.append(SubspaceTest(scaled, like, **sizes, note=note))
                places.append((one.site, one.first))
                asked.append([_asked(how, proxy, controls=int(not how.control)) for how, proxy in one.proxies.items()])
            if not one.first and not one.space:
                plain = [name for name in moment.groups if ":" not in name]  # masked or not: these get controls
                like = EnergyRows(test, groupings, like=like)
                few = energy.few_rows(moment.n - moment.still, test.x.shape[1])
                tests.append(SubspaceTest(moment, like, groups=plain, **sizes, note=few))
                places.append((one.site, "main"))
                mine = {label: found[one.site] for label, found in proxies.items() if one.site in found}
                asked.append([self._asked_of(label, proxy) for label, proxy in mine.items()])
        shared.like = like
        found: dict[tuple[Site, str], list[Record]] = defaultdict(list)
        for place, records in zip(places, energy.records_of(tests, asked), strict=True):
            found[place] += records
        return found

    def _note_of(self, moment: GradientMoments, *, outlier: bool) -> str:
        few = energy.few_rows(moment.n - moment.still, moment.folds.shape[-1])
        return "; ".join(filter(None, (few, FIRST_OUTLIER if outlier else "")))

    def _asked_of(self, label: Label, proxy: Proxy) -> Asked:
        main = self._is_main(label)
        controls = 1 if main and label.proxy in self.plan.proxies[:2] else 0  # of all rows
        controls = EVERY if main and label.proxy == self.plan.proxies[0] else controls
        return _asked(label, proxy, controls=controls, shares=main or bool(label.control))

    def _moments(self, test: Half) -> GradientMoments:
        """The second moments of a site's gradients, by fold and in groups."""
        assert test.g is not None
        groups = {name: mask for grouping in self.groupings(test) for name, mask in grouping.masks().items()}
        groups = {name: mask for name, mask in groups.items() if not name.startswith("target")}
        # masked or not: frozen proxies are tested on these as on all rows
        parts = {name: mask for name, mask in groups.items() if ":" not in name and self.frozen is not None}
        return GradientMoments().update(test.g, context=test.context, fold=test.fold, groups=groups, parts=parts)

    def finish(self) -> list[Record]:
        """Records of the frozen proxy of a run that ended inside its window."""
        return self.frozen.finish() if self.frozen is not None else []

    def groupings(self, test: Half) -> list[Grouping]:
        """Groupings of rows: masked or not; frequency bins of the original and of the target token."""

        def made() -> list[Grouping]:
            found = []
            if bool((test.masked >= 0).any()):
                found.append(Grouping(["unmasked", "masked"], test.masked))
            if self.bins is not None:
                for name, token in (("frequency", test.token), ("target", test.target)):
                    names = [f"{name}:{b + 1}" for b in range(self.plan.bins)]
                    found.append(Grouping(names, frequency.bin_of(token, self.bins)))
            return found

        groupings: list[Grouping] = test.once("groupings", made)
        return groupings

    def state(self) -> dict[str, Any]:
        """What the next step needs of the last one, as plain values and tensors."""
        frozen = self.frozen.state() if self.frozen is not None else None
        previous = change.kept_state(self.previous)
        return {"previous": previous, "frozen": frozen, "rank": self.main_rank, "notes": list(self.notes)}

    def load(self, state: Mapping[str, Any], window: Mapping[int, Any]) -> None:
        self.previous = change.load_kept(state["previous"])
        self.main_rank, self.notes = state["rank"], list(state["notes"])
        if self.frozen is not None and state["frozen"] is not None:
            self.frozen.load(state["frozen"], window)

    def _is_main(self, label: Label) -> bool:
        return not label.control and not label.balanced and label.rank == self.main_rank

    def _fit(self, chosen: StepFits, *, width: int) -> list[Fitted]:
        """Proxies and fitted controls of all rows as they are, and those balanced over frequency bins."""
        plan, fits = self.plan, chosen.rows[""]
        rows = {site: mine.x for site, mine in fits.items()}
        self.main_rank = rank = plan.rank if plan.rank is not None else max(1, min(DEFAULT_RANK, width // 4))
        labels = [Label(proxy, rank, batch=self.source) for proxy in plan.proxies]
        ranks = [r for r in plan.ranks if r != rank and 4 * r <= width]
        labels += [Label(proxy, r, batch=self.source) for proxy in plan.proxies[:2] for r in ranks]
        found: dict[Label, dict[Site, Proxy]] = {}
        main = labels[0]  # fitted controls are made for the main proxy only
        shuffled: dict[Label, dict[Site, Proxy]] = {}
        for label in labels:
            both = [label, replace(label, control="permuted")] if label == main and plan.permuted else [label]
            try:
                fitted = fitting.fit_alike(rows, both, seed=plan.seed)
                found[label], shuffled = fitted.pop(label), shuffled | fitted
            except AnisoscopeError as error:
                if label.proxy in plan.proxies[:2] and label.rank == rank:
                    raise
                self._note(f"{label.proxy} of rank {label.rank} is left out: {error}")
        how: dict[str, Any] = {"seed": plan.seed, "covariances": {site: mine.covariance for site, mine in fits.items()}}
        found |= shuffled | fitting.fit_controls(rows, main, found[main], **how, permuted=False)
        sets: list[Fitted] = [(fits, found)]
        if chosen.even:
            enough = {s: mine for s, mine in chosen.even.items() if mine is not None and len(mine.x) > 2 * rank}
            if len(enough) < len(chosen.even):
                self._note("a frequency bin has too few rows for a balanced fit; give more contexts")
            if enough:
                balanced = replace(main, balanced=True)
                even_fits = fitting.fit_proxies({s: mine.x for s, mine in enough.items()}, balanced, seed=plan.seed)
                sets.append((enough, {balanced: even_fits}))
        return sets

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def basis(self, site: Site, *, proxy: str = "semi_nmf", fit: str = "refit") -> Tensor:
        """The orthonormal basis d×r of a proxy at a site, as last fitted."""
        found = self.fitted.get(proxy, {})
        if fit == "frozen":
            found = self.frozen.proxies.get(self.frozen.label(proxy), {}) if self.frozen is not None else {}
        if site not in found:
            when = "its window is still open" if fit == "frozen" and self.fitted else "no step has been measured yet"
            raise AnisoscopeError(
                f"there is no {fit} proxy {proxy!r} at {site} yet ({when}); measure a step first, or ask later."
            )
        return found[site].basis

    def _beside(self, site: Site, fit: Half, test: Half) -> Found:
        """The overlap of both proxies and the spread of types, on the device of the site."""
        main = {name: found[site] for name, found in self.fitted.items() if site in found}
        found: Found = {}
        if {"semi_nmf", "pca"} <= main.keys():
            inside = main["semi_nmf"].basis.mT @ main["pca"].basis
            found["overlap"] = inside.square().sum() / min(inside.shape)
        if (types := self._types(fit, test)) is not None:
            found["spread"] = frequency.type_distances(torch.cat([half.x for half in (fit, test)]), types[1])
        return found

    def _types(self, fit: Half, test: Half) -> tuple[Tensor, Tensor] | None:
        """Log frequencies of types and their rows in both halves, unmasked ones; None without tokens."""

        def made() -> tuple[Tensor, Tensor] | None:
            if self.counts is None or test.token.max() < 0:
                return None
            order = torch.cat([fit.order(), test.order()])
            masked = torch.cat([fit.masked, test.masked]) == 1  # these rows show [MASK], not their own type
            tokens = torch.cat([fit.token, test.token]).masked_fill(masked, -1)
            return frequency.rows_of_types(tokens, self.counts, order=order)

        if fit.shared is None:  # some rows were not finite
            return made()
        found: tuple[Tensor, Tensor] | None = test.once(("types", id(fit.shared)), made)
        return found


@lru_cache(maxsize=4096)  # of thousands of rows, which have few variants
def _of_batch(variant: str, source: str) -> str:
    return with_options(variant, batch=source or None)


def _asked(label: Label, proxy: Proxy, *, controls: int, shares: bool = True) -> Asked:
    return Asked(proxy.basis, label, shares, controls, proxy.left_out)


def first_apart(halves: Halves) -> dict[Site, bool]:
    """Whether rows at the first position have a far larger or smaller mean squared norm, as in profiles, by site."""
    found = []
    for both in halves.values():
        squares = torch.cat([half.x.double().square().sum(1) for half in both])
        first = (torch.cat([half.position for half in both]) == 0).to(squares.device, torch.float64)
        found.append({"": torch.stack([(squares * first).sum(), squares.sum(), first.sum()])})
    means = {}
    for site, sums in zip(halves, on_host(found), strict=True):
        (inside, total, count), n = sums[""].tolist(), sum(len(half) for half in halves[site])
        pair = [top / bottom if bottom else math.nan for top, bottom in ((inside, count), (total - inside, n - count))]
        means[site] = far_apart(*pair)
    return means


def energy_words(label: Label) -> str:
    """How energies were read, as text.

    >>> energy_words(Label(coordinates="standardised", first="out"))
    'in standardised coordinates, without the first position'
    """
    words = [f"in {label.coordinates} coordinates"] if label.coordinates else []
    return ", ".join([*words, *(["without the first position"] if label.first else [])])


_SPREADS = tuple(product((False, True), ("pearson", "spearman")))  # over the mean norm or not, and the correlation


def spread_records(spreads: Sequence[frequency.TypeSpread], *, over: str, seed: int) -> list[list[Record]]:
    """Records of each: correlations of log frequency with the spread of types, plain and divided by the mean norm."""
    points = [
        [
            *(frequency.spread_points(found, method=how, normalised=n) for n, how in _SPREADS),
            frequency.beta_points(found),
        ]
        for found in spreads
    ]
    done = iter(frequency.resampled([one for mine in points for one in mine], seed=seed))
    return [_spread_records([next(done) for _ in mine], over=over) for mine in points]


def _spread_records(found: Sequence[frequency.Correlation], *, over: str) -> list[Record]:
    *correlations, beta = found
    records: list[Record] = []
    for (normalised, method), c in zip(_SPREADS, correlations, strict=True):
        options: dict[str, Any] = {"correlation": method, "over": over} | ({"normalised": 1} if normalised else {})
        note = f"{c.types} types" + ("" if c.value == c.value else "; too few for a correlation")
        base = {"variant": variant_name(options), "n": c.types, "note": note}
        records.append({"metric": "frequency_spread", "value": c.value, "low": c.low, "high": c.high, **base})
        records.append({"metric": "frequency_spread_p", "value": frequency.frequency_spread_p(c), **base})
    about = {"variant": variant_name({"over": over}), "n": beta.types, "note": f"{beta.types} types"}
    return [*records, {"metric": "frequency_beta", "value": beta.value, "low": beta.low, "high": beta.high, **about}]
