"""Training runs that never were: long tables of the shape a monitored run gives, with every effect planted or absent.

A measured value is the mean of 8 fold values, and its replicates leave one fold out: the jackknife is then exact, so
that an interval computed from the table covers the planted truth as often as it says.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from anisoscope.results.quantity import jackknife
from anisoscope.results.query import Table, variant_name

FOLDS = 8
BINS = 5
DRAWS = 999
FEW_STEPS = (0, 1, 64, 256, 1000)
STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
CONTROLS = ("normal", "random", "next", "permuted")


@dataclass(frozen=True)
class Effects:
    """What is planted; `NULL` (below) has nothing in it."""

    strength: float = 1.0  # of the excess of tangent energy over chance; 0 = isotropic gradients
    onset: float = 0.5  # steps after which 63 % of the excess is there
    decline: float = 0.65  # part of the excess that the middle layers lose again by the end
    fade: float = 0.0  # part of the excess that every layer loses by the end
    start: float = 0.0  # part of the excess already there at step 0
    next: float = 0.2  # part of the excess that the next r components hold
    permuted: float = 0.25  # part of the excess that a column-permuted fit keeps
    pca: float = -0.005  # energy of PCA minus that of semi-NMF
    share: float = 0.55  # spectral share of the tangent directions at full excess
    below: bool = False  # the gradient lies below average in the tangent directions
    gain: float = 0.03  # ΔIsoScore* at full excess
    frequency: float = 0.5  # relative excess of the most frequent bin over the rarest
    balanced: float | None = None  # the same with a balanced proxy; None = as `frequency`
    update: float = 0.35  # excess energy of embedding updates
    amplification: float = 0.3  # excess share of the growth of activations in the earlier directions
    spread: float = -0.4  # correlation of log frequency with contextual spread
    spread_time: float = -0.3  # … and with spread over training
    spread_normalised: float | None = None  # of both, divided by the norm; None = as they are
    masked: float = 0.5  # strength on masked rows, and unmasked, of masked language models
    unmasked: float = 1.2
    flat: float = 0.4  # strength of a `-flat` arm; `-zipfS` arms follow the line through (0, flat) and (1, 1)
    flatloss: float | None = None  # strength of a `-flatloss` arm; None = as `flat`
    entropies: bool = False  # rows of the effective entropy of the targets, by the name of the arm
    cosine: float = 0.35  # average cosine of the activations at the end of training
    constant: float = 4.2  # held-out loss of the best constant prediction; that of the model ends at about 1.7
    noise: float = 0.01  # sd of a fold's energy
    tails: bool = False  # heavy ones: the noise of a fold is Student's t with three degrees of freedom
    scatter: float = 0.15  # sd of the energy of random subspaces, relative to chance
    width: int = 256
    ranks: tuple[int, ...] = (16,)
    proxies: tuple[str, ...] = ("semi_nmf", "pca", "random")
    fits: tuple[str, ...] = ("refit", "frozen")
    seeds: tuple[int, ...] | None = None  # of the column `seed`; several = several runs of each model
    seed_sd: float = 0.05  # relative scatter of the strength over those
    replicates: bool = True
    bins: bool = True  # rows of the frequency bins
    only: tuple[str, ...] | None = None  # metrics to write; None = all
    without: tuple[str, ...] = ()  # metrics, or "key=value" of a variant, to leave out
    masked_models: tuple[str, ...] = ("encoder",)  # names that begin so are masked language models
    stepless: bool = False  # step is null, as when one given model is measured


NULL: dict[str, Any] = {
    "strength": 0.0, "pca": 0.0, "gain": 0.0, "frequency": 0.0, "update": 0.0, "amplification": 0.0, "spread": 0.0,
    "spread_time": 0.0, "flat": 1.0,
}  # fmt: skip


def training_table(
    *,
    models: Iterable[str] = ("decoder", "encoder"),
    steps: Iterable[int] = STEPS,
    layers: int = 6,
    seed: int = 0,
    **effects: Any,
) -> Table:
    """The long table of a study that never was; `effects` are the fields of `Effects`."""
    given = Effects(**effects)
    models, steps = tuple(models), tuple(steps)
    rows: list[dict[str, Any]] = []
    for i, model in enumerate(models):
        for number in given.seeds or (seed,):
            rows += FakeRun(given, model, steps, layers=layers, number=number, entropy=(seed, i, number)).rows()
    return Table.from_records(rows, about(models, given, layers=layers))


@functools.cache
def table(**effects: Any) -> Table:
    """A small study of a decoder; made once for the same effects."""
    return training_table(**{"models": ("decoder",), "steps": FEW_STEPS, "layers": 2, **effects})


def edited(original: Table, change: Any) -> Table:
    """The same table with a function applied to every record; None drops it."""
    return Table.from_records(r for r in map(change, original.records()) if r is not None)


def about(models: tuple[str, ...], effects: Effects, *, layers: int) -> dict[str, Any]:
    entries = [
        {"name": name, "revision": "", "type": "encoder" if name.startswith(effects.masked_models) else "decoder",
         "layers": layers, "width": effects.width}
        for name in models
    ]  # fmt: skip
    return {"schema": 1, "command": ["anisoscope", "study", "revisiting", "--preset", "tiny"], "models": entries}


class FakeRun:
    """One model trained from one seed."""

    def __init__(
        self, effects: Effects, model: str, steps: tuple[int, ...], *, layers: int, number: int, entropy: Any
    ) -> None:
        self.random = np.random.default_rng(entropy)
        self.effects, self.model, self.steps, self.layers, self.number = effects, model, steps, layers, number
        self.masked = model.startswith(effects.masked_models)
        self.strength = effects.strength * self._arm() * (1 + effects.seed_sd * self.random.normal())
        # the same held-out contexts at every layer and step, and in every run of the study
        self.shared = np.random.default_rng(entropy[0]).normal(size=FOLDS)
        self.sites = [(0, "embed"), *((n, "resid") for n in range(1, layers + 1)), (layers, "final")]
        self.luck = {site: self.random.normal() for site in self.sites}

    def _arm(self) -> float:
        flat = self.effects.flat
        if self.model.endswith("-flatloss"):
            return flat if self.effects.flatloss is None else self.effects.flatloss
        zipf = re.search(r"-zipf([\d.]+)$", self.model)
        bias = 0.0 if self.model.endswith("-flat") else float(zipf[1]) if zipf else 1.0
        return flat + (1 - flat) * bias

    # what is true

    def chance(self, rank: int) -> float:
        return rank / self.effects.width

    def progress(self, step: int, depth: float) -> float:
        """0 at the start, towards 1, then a fall in the middle layers."""
        e = self.effects
        up = e.start + (1 - e.start) * (1 - math.exp(-step / e.onset))
        late = math.log1p(step) / math.log1p(max(self.steps[-1], 1))
        return up * (1 - e.decline * math.sin(math.pi * depth) * late**3) * (1 - e.fade * late**8)

    def excess(self, step: int, depth: float) -> float:
        return 0.5 * self.strength * self.progress(step, depth) * (0.8 + 0.4 * abs(depth - 0.5))

    # rows

    def rows(self) -> Iterator[dict[str, Any]]:
        for step in self.steps:
            for record in (*self._site_rows(step), *self._tests(step)):
                if self._wanted(record):
                    yield record
        yield from filter(self._wanted, self._log_rows())

    def _wanted(self, record: dict[str, Any]) -> bool:
        only, without = self.effects.only, self.effects.without
        named = {record["metric"], *record["variant"].split(";")}
        return (only is None or record["metric"] in only) and not named & set(without)

    def _site_rows(self, step: int) -> Iterator[dict[str, Any]]:
        self.tests: list[tuple[dict[str, Any], float]] = []
        for layer, kind in self.sites:
            site = {"step": None if self.effects.stepless else step, "layer": layer, "kind": kind}
            site["depth"] = layer / self.layers
            extra = self.excess(step, site["depth"])
            if self._any("gradient_"):
                yield from self._tangent_rows(site, step, extra)
                yield from self._update_rows(site) if kind == "embed" and step else ()
            if self.effects.bins and self._any("gradient_energy", "gradient_enrichment"):
                yield from self._frequency_rows(site, step, extra)
            if self._any("amplification", "concept_"):
                yield from self._drift_rows(site, step)
            if self._any("average_cosine", "svd_ratio", "proxy_overlap", "frequency_spread"):
                yield from self._geometry_rows(site, step)

    def _any(self, *beginnings: str) -> bool:
        """Whether a metric that begins so is wanted: what is not is not drawn."""
        return self.effects.only is None or any(name.startswith(beginnings) for name in self.effects.only)

    def _options(self) -> Iterator[dict[str, Any]]:
        for fit in self.effects.fits:
            for proxy in self.effects.proxies if fit == "refit" else self.effects.proxies[:2]:
                for rank in self.effects.ranks:
                    yield {"fit": fit, "proxy": proxy, "rank": rank}

    def _tangent_rows(self, site: dict[str, Any], step: int, extra: float) -> Iterator[dict[str, Any]]:
        e = self.effects
        luck = e.scatter * (0.6 * self.luck[(site["layer"], site["kind"])] + 0.8 * self.random.normal())
        groups = {"": 1.0}
        if self.masked:
            groups = {"": 0.7 * e.unmasked + 0.3 * e.masked, "masked": e.masked, "unmasked": e.unmasked}
        own = self._noise()  # shared by the proxies: they see the same gradients
        for options in self._options():
            chance = self.chance(options["rank"])
            kept = {"semi_nmf": 1.0, "random": 0.0}.get(options["proxy"], 1.0) * (
                0.9 if options["fit"] == "frozen" else 1
            )
            gap = e.pca if options["proxy"] == "pca" else 0.0
            early = options["fit"] == "frozen" and step in self.steps[: max(1, int(0.3 * len(self.steps)))]
            note = {"note": "in-sample"} if early else {}
            for group, scale in groups.items():
                energy = chance * (1 + luck) + kept * extra * scale + gap
                folds = self._folds(energy, own=own + 0.1 * self.random.normal(size=FOLDS))
                yield from self._energy_rows({**site, "group": group, **note}, options, folds)
                if options["proxy"] != "random":
                    yield from self._share_rows({**site, "group": group}, options, extra * scale)

    def _energy_rows(
        self, site: dict[str, Any], options: dict[str, Any], folds: np.ndarray
    ) -> Iterator[dict[str, Any]]:
        chance = self.chance(options["rank"])
        energy = float(folds.mean())
        extra = energy - chance
        yield self._row(site, "gradient_energy", options, folds=folds)
        yield self._row(site, "gradient_energy", {**options, "average": "row"}, folds=0.9 * folds + 0.1 * chance)
        yield self._row(site, "gradient_enrichment", options, folds=folds / chance)
        normal = chance * (1 - energy) / (1 - chance)
        sd = self.effects.scatter * chance
        yield self._drawn(site, "gradient_energy", {**options, "control": "normal"}, mean=normal, sd=0.8 * sd)
        yield self._drawn(site, "gradient_energy", {**options, "control": "random"}, mean=chance, sd=sd)
        for control in ("next", "permuted"):
            kept = self._folds(getattr(self.effects, control) * max(extra, 0.0) + chance, scale=0.5)
            frozen = options["fit"] == "frozen"  # from second moments that know no folds
            numbers = {"value": float(kept.mean())} if frozen else {"folds": kept}
            yield self._row(site, "gradient_energy", {**options, "control": control}, **numbers)
        ratio = energy / normal
        yield self._row(site, "gradient_ratio", options, value=ratio, low=0.8 * ratio, high=1.2 * ratio)
        self.tests.append((self._row(site, "gradient_p", options, value=_p_value(extra / sd)), _p_value(extra / sd)))

    def _tests(self, step: int) -> Iterator[dict[str, Any]]:
        """p over the layers of this step, plain and after Holm."""
        families: dict[tuple[str, str], list[tuple[dict[str, Any], float]]] = {}
        for row, p in self.tests:
            families.setdefault((row["group"], row["variant"]), []).append((row, p))
        for family in families.values():
            for (row, _), adjusted in zip(family, holm([p for _, p in family]), strict=True):
                yield row
                yield {**row, "metric": "gradient_p_holm", "value": adjusted}

    def _share_rows(self, site: dict[str, Any], options: dict[str, Any], extra: float) -> Iterator[dict[str, Any]]:
        chance = options["rank"] * (options["rank"] + 1) / self.effects.width**2
        full = extra / 0.5
        side = "below" if self.effects.below else "above"
        note = f"{side} tr(C)/d; chance {chance:.4f}"
        folds = self._folds(chance + self.effects.share * full)
        yield self._row({**site, "note": note}, "gradient_share", options, folds=folds)
        for control, kept in (("normal", 0.0), ("random", 0.02), ("next", 0.15), ("permuted", 0.2)):
            mean = chance + kept * self.effects.share * full
            yield self._drawn(site, "gradient_share", {**options, "control": control}, mean=mean, sd=0.3 * chance)
        yield self._row(site, "gradient_isoscore_gain", options, folds=self._folds(self.effects.gain * full, scale=0.1))
        for control in ("normal", "random"):
            yield self._drawn(site, "gradient_isoscore_gain", {**options, "control": control}, mean=0.0, sd=0.001)

    def _frequency_rows(self, site: dict[str, Any], step: int, extra: float) -> Iterator[dict[str, Any]]:
        e = self.effects
        balanced = e.frequency if e.balanced is None else e.balanced
        for proxy in ("semi_nmf", "pca"):
            for options, slope in (({}, e.frequency), ({"balanced": 1}, balanced)):
                for rank in e.ranks:
                    full = {"fit": "refit", "proxy": proxy, "rank": rank, **options}
                    chance = self.chance(rank)
                    if options:
                        yield self._row(site, "gradient_enrichment", full, folds=self._folds(chance + extra) / chance)
                    for bins in range(1, BINS + 1):
                        tilt = 1 + slope * (0.5 - (bins - 1) / (BINS - 1))
                        folds = self._folds(chance + tilt * extra, scale=1.5)
                        for group, shrink in (("frequency", 1.0), ("target", 0.9)):
                            place = {**site, "group": f"{group}:{bins}", "n": 2400 // bins}
                            yield self._row(place, "gradient_energy", full, folds=folds * shrink)
                            yield self._row(place, "gradient_enrichment", full, folds=folds * shrink / chance)

    def _drift_rows(self, site: dict[str, Any], step: int) -> Iterator[dict[str, Any]]:
        """Between steps: amplification, and how concepts move."""
        before = max((s for s in self.steps if s < step), default=None)
        if before is None:
            return
        for rank in self.effects.ranks:
            options = {"fit": "refit", "proxy": "semi_nmf", "rank": rank}
            chance = self.chance(rank)
            growth = {**site, "note": f"since step {before}"}
            folds = self._folds(chance + self.effects.amplification)
            yield self._row(growth, "amplification", options, folds=folds)
            p = _p_value((float(folds.mean()) - chance) / (0.2 * chance))
            yield self._row(growth, "amplification_p", options, value=p)
            for control in ("normal", "random"):
                yield self._drawn(
                    growth, "amplification", {**options, "control": control}, mean=chance, sd=0.2 * chance
                )
            late = math.log1p(step) / math.log1p(self.steps[-1])
            yield self._row(growth, "concept_turn", options, value=70 - 55 * late + self.random.normal())
            yield self._row(growth, "concept_match", options, value=0.3 + 0.6 * late)

    def _geometry_rows(self, site: dict[str, Any], step: int) -> Iterator[dict[str, Any]]:
        e = self.effects
        late = math.log1p(step) / math.log1p(max(self.steps[-1], 1))
        cosine = e.cosine * late * self._arm() * (0.6 + 0.4 * math.sin(math.pi * site["depth"]))
        yield self._row(site, "average_cosine", {}, folds=self._folds(cosine, scale=0.5))
        yield self._row(site, "svd_ratio", {}, folds=self._folds(0.05 + 0.4 * cosine, scale=0.2))
        for rank in e.ranks:
            yield self._row(site, "proxy_overlap", {"rank": rank}, value=0.9 + 0.05 * math.sin(step))
        for over, truth in (("context", e.spread), ("time", e.spread_time)):
            if over == "time" and (site["kind"] != "embed" or step != self.steps[-1]):
                continue
            for correlation in ("pearson", "spearman"):
                for more in ({}, {"normalised": 1}):
                    options = {"correlation": correlation, "over": over, **more}
                    planted = truth if e.spread_normalised is None or not more else e.spread_normalised
                    value = planted + 3 * e.noise * self.random.normal()
                    band = {"low": value - 6 * e.noise, "high": value + 6 * e.noise, "n": 300}
                    yield self._row(site, "frequency_spread", options, value=value, **band)
                    p = _p_value(abs(value) / (3 * e.noise) - 1)
                    yield self._row(site, "frequency_spread_p", options, value=p, n=300)

    def _update_rows(self, site: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for of in ("embedding_in", "embedding_out", "update", "update_raw"):
            for rank in self.effects.ranks:
                options = {"fit": "refit", "proxy": "semi_nmf", "rank": rank, "of": of}
                truth = self.chance(rank) * (1 + self.effects.scatter * self.random.normal()) + self.effects.update
                yield from self._energy_rows(site, options, self._folds(truth))

    def _log_rows(self) -> Iterator[dict[str, Any]]:
        """The training log, closer together than the measured steps."""
        last = self.steps[-1]
        for step in sorted({*self.steps, *np.linspace(0, last, 60).astype(int).tolist()}):
            place = {"step": step, "layer": None, "depth": None, "kind": "training"}
            done = step / max(last, 1)
            loss = 1.4 + 4 * math.exp(-0.4 * math.log1p(step)) + 0.02 * self.random.normal()
            yield self._row(place, "loss", {}, value=loss)
            yield self._row(place, "gradient_norm", {}, value=0.4 + 2 / (1 + step) ** 0.3)
            yield self._row(place, "learning_rate", {}, value=3e-4 * 0.5 * (1 + math.cos(math.pi * done)))
            if step in self.steps and self.effects.entropies:
                yield self._row({**place, "layer": 0}, "target_entropy", {}, value=_entropy(self.model))
            if step in self.steps:
                yield self._row(place, "probe_loss", {}, folds=self._folds(loss + 0.05))
                yield self._row(place, "constant_loss", {}, folds=self._folds(self.effects.constant))

    # how a number is written down

    def _noise(self) -> np.ndarray:
        """One number of unit variance for each fold."""
        heavy = self.effects.tails
        return self.random.standard_t(3, size=FOLDS) / math.sqrt(3) if heavy else self.random.normal(size=FOLDS)

    def _folds(self, truth: float, *, own: np.ndarray | None = None, scale: float = 1.0) -> np.ndarray:
        own = self._noise() if own is None else own
        return truth + scale * self.effects.noise * (0.7 * self.shared + 0.7 * own)

    def _row(
        self, site: dict[str, Any], metric: str, options: dict[str, Any], folds: np.ndarray | None = None, **more: Any
    ) -> dict[str, Any]:
        if self.effects.only is not None and metric not in (*self.effects.only, "gradient_p"):
            return {"metric": metric, "variant": ""}  # not wanted, as `rows` finds
        row = {"run": "r", "model": self.model, "revision": "", "data": "embedded", "stack": "single", "group": ""}
        row |= {"metric": metric, "variant": _variant(*options.items()), "low": math.nan, "high": math.nan}
        row["sd"] = math.nan
        row |= {"n": 12000, "contexts": 128, "dropped": 0, "seed": self.number, "note": "", **site}
        if folds is not None:
            value, replicates = float(folds.mean()), ((folds.sum() - folds) / (FOLDS - 1)).tolist()
            low, high = jackknife(value, replicates, bounds=(None, None))
            row |= {"value": value, "low": low, "high": high}
            row["replicates"] = replicates if self.effects.replicates else None
        return row | more

    def _drawn(
        self, site: dict[str, Any], metric: str, options: dict[str, Any], *, mean: float, sd: float
    ) -> dict[str, Any]:
        value = mean + sd / math.sqrt(DRAWS) * self.random.normal()
        low, high = max(value - 1.96 * sd, 0.0 if mean > 0 else -math.inf), value + 1.96 * sd
        return self._row(site, metric, options, value=value, low=low, high=high, sd=sd)


@functools.cache
def _variant(*options: tuple[str, Any]) -> str:
    return variant_name(dict(options))


def _entropy(model: str) -> float:
    """Bits: whole contexts move them little, weights of the loss much."""
    return next((bits for end, bits in {"-flat": 9.3, "-flatloss": 12.5}.items() if model.endswith(end)), 9.0)


def _p_value(z: float) -> float:
    return max(1 / (DRAWS + 1), 0.5 * math.erfc(z / math.sqrt(2)))


def holm(values: list[float]) -> list[float]:
    """Holm's step-down adjustment, the obvious way.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    adjusted, worst = [0.0] * len(values), 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, (len(values) - rank) * values[i]))
        adjusted[i] = worst
    return adjusted
