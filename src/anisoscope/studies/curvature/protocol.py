"""`anisoscope study curvature`: the theory of Revisiting Anisotropy (arXiv 2604.08764), measured on known manifolds.

Before anything else β, how the spread of a type falls with its frequency, is measured in a model (`exponent`), if one
is given. Then, on manifolds whose second fundamental form is known: (1) variance against scale, (2) visibility of
curvature against frequency bias with that β, (3) what local PCA recovers, (4) the parts of gradients, Eq. 9, 10 and 11,
(5) the self-reinforcing loop; and on their own (6) pinning, (7) the parabola, where the gradient is normal although
every row is almost tangent. Parts 4 to 6 are in `gradients`. Every manifold and every other part is a file of `parts/`,
so that an interrupted run goes on.

Variance against scale. Notation: t scale, in units of the radius of curvature 1/κ; C_T and C_N covariance of a centred
sample in the tangent and the normal space; visibility = tr C_N / tr C_T. To leading order tr C_T ~ t², tr C_N ~ t⁴,
visibility ~ t² (numerics.manifolds.expected_variances has the constants).

Tokens by frequency: how much curvature is visible when rare types are spread more widely. Notation: types i = 1 … V,
frequency f_i ∝ i^(−s), each a point of the manifold with tokens scattered around it on the scale
t_i = t₀ (f_i / f_max)^(−β), at most 0.5/κ_i. β = 0: every type has the same scale, so frequency cannot matter; β > 0:
rare types are wider; β < 0: frequent types are. Lengths are in units of 1/κ at the manifold's centre. Two samplings of
the *same* types are compared: by frequency (`zipf`) and every type equally often (`uniform`). With s both the draw and,
through f_i, the scales change, so visibility alone need not be monotone in s; the ratio of the two samplings isolates
the effect of frequency.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anisoscope.claims.catalogue import evaluate_claims
from anisoscope.claims.engine.claim import verdicts_to_dicts
from anisoscope.claims.revisiting.theory import EXPECTED_SLOPES, theory_claims
from anisoscope.metrics import curvature as metrics
from anisoscope.metrics.engine.estimation import Estimate
from anisoscope.numerics import manifolds
from anisoscope.numerics.host import one_thread
from anisoscope.numerics.manifolds import Frames, Manifold, displace, expected_variances, unit_sample
from anisoscope.results.query import Table, with_options
from anisoscope.studies.curvature import REFERENCE_ZIPF, CurvatureConfig, gradients
from anisoscope.studies.curvature.exponent import measure_exponent
from anisoscope.studies.curvature.gradients import length_unit, over_replicates
from anisoscope.studies.study_run import Study

FEWEST_SCALES = 3
LOOPS = (("tangent", "all"), ("tangent", "random"), ("noise", "all"), ("normal", "all"))  # labels, update
CLIP = 0.5  # the largest scale of a type, in units of 1/κ at its point
SeenItem = tuple[tuple[str, str], float]
Seen = dict[tuple[str, str], float]  # values by metric and variant
See = Callable[["Population", CurvatureConfig, torch.Generator], Iterator[SeenItem]]


@dataclass(frozen=True)
class Ladder:
    """Variances of repeated samples at a ladder of scales, [repetitions, scales], noise floor included."""

    scales: np.ndarray  # [scales] in units of 1/κ
    variance: dict[str, np.ndarray]  # tangent, normal
    floor: dict[str, np.ndarray]  # [repetitions]: variances of a sample of scale 0
    expected: dict[str, np.ndarray]  # [scales] to leading order
    rounding: float  # variance due to float64 rounding

    def excess(self, of: str) -> np.ndarray:
        """Variance above the floor, [repetitions, scales]; for `visibility` the ratio normal / tangent."""
        if of == "visibility":
            with np.errstate(divide="ignore", invalid="ignore"):
                return self.excess("normal") / self.excess("tangent")
        return self.variance[of] - self.floor[of][:, None]

    def leading(self, of: str) -> np.ndarray:
        """The expected value of `excess` to leading order, [scales]."""
        return self.expected["normal"] / self.expected["tangent"] if of == "visibility" else self.expected[of]

    def slopes(self, of: str, *, limit: float) -> tuple[np.ndarray, np.ndarray]:
        """Log–log slope of every repetition over scales above the floor, and their mask; NaN with fewer than 3.

        A scale t ≤ limit is used if its mean excess is at least the floor and no repetition has an excess ≤ 0.
        """
        kept = self.scales <= limit * (1 + 1e-9)
        for part in ("tangent", "normal") if of == "visibility" else (of,):
            signal = self.excess(part)
            kept &= (signal.mean(0) >= self.floor[part].mean() + self.rounding) & (signal > 0).all(0)
        if kept.sum() < FEWEST_SCALES:
            return np.full(len(self.floor["tangent"]), np.nan), kept
        return metrics.curvature_slope(self.scales[kept], self.excess(of)[:, kept]), kept


def sample_ladder(manifold: Manifold, look: CurvatureConfig, *, seed: int) -> Ladder:
    """Independent samples for every scale and repetition around the centre; scales and floor in units of 1/κ."""
    frames, unit = manifold.frames(manifold.centre), length_unit(manifold.curvature(manifold.centre))
    generator = torch.Generator().manual_seed(seed)
    found = np.zeros((2, look.replicates, len(look.scales) + 1))
    for r in range(look.replicates):
        for i, t in enumerate((0.0, *look.scales)):
            u = t * unit * unit_sample(look.samples, dim=manifold.dim, kind=look.kind, generator=generator)
            x = displace(manifold, frames, u)
            x = x + look.floor * unit * torch.randn(x.shape, dtype=x.dtype, generator=generator)
            found[:, r, i] = [metrics.curvature_variance(x, basis) for basis in (frames.tangent, frames.normal)]
    reach = float(frames.position.norm()) + max(look.scales) * unit
    scales = unit * torch.tensor(look.scales, dtype=torch.float64)
    expected = [e.numpy() for e in expected_variances(frames.form, scale=scales, kind=look.kind)]
    variance, floor, leading = (
        dict(zip(("tangent", "normal"), part, strict=True)) for part in (found[:, :, 1:], found[:, :, 0], expected)
    )
    rounding = manifold.ambient * (4 * np.finfo(float).eps * reach) ** 2
    return Ladder(np.array(look.scales), variance, floor, leading, rounding)


class Parabola(NamedTuple):
    """Tangent and normal parts, at the apex, of the gradient of a linear map on the parabola (u, u²)."""

    row_tangent: float  # share of Σ‖g x‖² along the tangent (1, 0)
    mean_tangent: float  # |tangent part| of the mean gradient
    mean_normal: float  # |normal part| of the mean gradient
    mean_share: float  # tangent share of the squared mean gradient


def parabola_gradient(scale: float, *, n: int = 4096, seed: int = 0) -> Parabola:
    """The counter-example to the O(t) argument: x = (u, u²), u symmetric, g = 1 for every row, dL/dW = Σ g xᵀ.

    Every u comes with −u. Row by row almost all energy is tangent, 1 − O(t²); the tangent parts cancel in the sum, so
    the gradient that training sees is exactly normal at every scale.

    >>> found = parabola_gradient(0.1)
    >>> found.mean_share, found.row_tangent > 0.95
    (0.0, True)
    """
    half = scale * torch.randn(n // 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).abs()
    u = torch.stack([half, -half], 1)  # adjacent pairs, so that the tangent parts cancel exactly
    tangent, normal = abs(float(u.sum(1).sum() / n)), abs(float(u.square().sum() / n))
    rows = metrics.parabola_tangent(float(u.square().sum()), float(u.pow(4).sum()))
    return Parabola(rows, tangent, normal, metrics.parabola_tangent(tangent**2, normal**2))


@dataclass(frozen=True)
class Population:
    """Types as points of a manifold."""

    manifold: Manifold
    frames: Frames  # of the V types
    unit: float  # length unit: 1/κ at the manifold's centre
    widest: Tensor  # [V] largest scales, 0.5/κ_i
    bend: Tensor  # [V] ‖II_i‖² over its mean; 1 where nothing is curved

    @classmethod
    def draw(cls, manifold: Manifold, types: int, *, seed: int) -> Population:
        frames = manifold.frames(manifold.points(types, seed=seed))
        unit = length_unit(manifold.curvature(manifold.centre))
        curvature = manifolds.largest_curvature(frames.form)
        widest = torch.where(curvature > 0, CLIP / curvature.clamp_min(1e-12), CLIP * unit)
        squares = frames.form.square().sum((1, 2, 3))
        bend = squares / squares.mean() if bool((squares > 0).all()) else torch.ones_like(squares)
        return cls(manifold, frames, unit, widest, bend)

    def scales(self, frequency: Tensor, beta: float, *, base: float) -> Tensor:
        """t_i = t₀ (f_i / f_max)^(−β), clipped at 0.5/κ_i."""
        return torch.minimum(base * self.unit * (frequency / frequency.max()) ** -beta, self.widest)


READING: dict[str, Any] = {"model": None, "data": "embedded", "tokenizer": None, "device": "auto"}  # no more is read


def zipf_frequencies(types: int, exponent: float) -> Tensor:
    """f_i ∝ i^(−s), normalised to sum 1, [types].

    >>> zipf_frequencies(2, 1.0)
    tensor([0.6667, 0.3333], dtype=torch.float64)
    """
    weights = torch.arange(1, types + 1, dtype=torch.float64) ** -exponent
    return weights / weights.sum()


def draw_rows(
    population: Population, scales: Tensor, group: Tensor, *, kind: str, generator: torch.Generator
) -> Tensor:
    """For each token a random point of the manifold around its type, [n, D]."""
    u = unit_sample(len(group), 1, dim=population.manifold.dim, kind=kind, generator=generator)
    frames = population.frames.take(group, bases=False)
    return displace(population.manifold, frames, scales[group, None, None] * u)[:, 0]


def true_visibility(rows: Tensor, group: Tensor, population: Population) -> float:
    """Σ normal / Σ tangent squares about each type's centroid, in the true spaces of its point.

    The normal squares of a type are divided by its ‖II‖² relative to the mean of the population, so that the result
    does not depend on the local curvature at the few frequent types.
    """
    frames = population.frames
    centred, _ = manifolds.centre_groups(rows, group, len(frames.chart))
    tangent, normal = (
        torch.einsum("nD,nDk->nk", centred, basis[group]).square().sum(1) for basis in (frames.tangent, frames.normal)
    )
    return metrics.curvature_visibility(normal / population.bend[group], tangent)


def see_tokens(
    population: Population, scales: Tensor, weights: Tensor, *, look: CurvatureConfig, generator: torch.Generator
) -> Seen:
    """Draw tokens by these weights and measure the curvature they show.

    Expected values are to leading order; centring removes one degree of freedom for every type that occurs.
    """
    frames = population.frames
    group = torch.multinomial(weights, look.tokens, replacement=True, generator=generator)
    rows = draw_rows(population, scales, group, kind=look.kind, generator=generator)
    seen = {("curvature_visibility", "estimate=true"): true_visibility(rows, group, population)}
    tangent, normal = expected_variances(frames.form, scale=scales, kind=look.kind)
    expected = metrics.curvature_visibility_expected(normal / population.bend, tangent, weights, look.tokens)
    seen["curvature_visibility_expected", ""] = expected
    noisy = rows + look.noise * population.unit * torch.randn(rows.shape, dtype=rows.dtype, generator=generator)
    fits = manifolds.fit_groups(noisy, group, groups=len(weights), dim=population.manifold.dim)
    share = torch.where(fits.usable, fits.count, 0).double()
    pooled = [torch.nan_to_num(v * share) for v in (fits.normal_variance, fits.tangent_variance)]
    seen["curvature_visibility", "estimate=pca"] = metrics.curvature_visibility(*pooled)
    angle, error = manifolds.tangent_angle(fits, frames), manifolds.form_error(fits, frames)
    return seen | _summary(angle, error, fits.count, variant="count=natural")


def see_neighbourhoods(
    population: Population, scales: Tensor, weights: Tensor, *, look: CurvatureConfig, generator: torch.Generator
) -> Seen:
    """Local PCA on neighbourhoods of equally many rows around types drawn by these weights: only scales differ."""
    chosen = torch.multinomial(weights, look.neighbourhoods, replacement=True, generator=generator)
    angle, error = fit_neighbourhoods(population, scales[chosen], chosen, look=look, generator=generator)
    return _summary(angle, error, torch.ones(len(chosen)), variant="count=equal")


def fit_neighbourhoods(
    population: Population, scales: Tensor, chosen: Tensor, *, look: CurvatureConfig, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Angle and relative error of the curvature from local PCA around the chosen types, each at its scale."""
    frames = population.frames.take(chosen)
    u = unit_sample(len(chosen), look.neighbours, dim=population.manifold.dim, kind=look.kind, generator=generator)
    rows = displace(population.manifold, frames, scales[:, None, None] * u).flatten(0, 1)
    noisy = rows + look.noise * population.unit * torch.randn(rows.shape, dtype=rows.dtype, generator=generator)
    group = torch.arange(len(chosen)).repeat_interleave(look.neighbours)
    fits = manifolds.fit_groups(noisy, group, groups=len(chosen), dim=population.manifold.dim)
    return manifolds.tangent_angle(fits, frames), manifolds.form_error(fits, frames)


def _summary(angle: Tensor, error: Tensor, weight: Tensor, *, variant: str) -> Seen:
    """Weighted medians over tokens, and the share of recovered curvatures (unmeasured ones count as not recovered)."""
    values = {
        "local_pca_angle": metrics.local_pca_angle(angle, weight),
        "curvature_error": metrics.curvature_error(error, weight),
        "curvature_recovered": metrics.curvature_recovered(error, weight),
        "curvature_unmeasured": metrics.curvature_unmeasured(angle, weight),
    }
    return {(metric, variant): value for metric, value in values.items()}


_RATIOS = ("curvature_visibility", "curvature_visibility_expected", "curvature_attenuation", "curvature_error")


@dataclass
class Curvature(Study):
    """One run of the study; the records of a part are collected until it is written."""

    config: CurvatureConfig
    records: list[dict[str, Any]] = field(default_factory=list)
    look: CurvatureConfig = field(init=False)  # the configuration with the β that was measured
    name: ClassVar[str] = "curvature"

    def measure(self) -> None:
        """Measure β, every manifold, pinning and the parabola, and write the verdicts."""
        c = self.look = self.config
        self.about |= {"device": "cpu"}
        exponent = self.part("exponent", self._exponent)
        self._use(exponent.about)
        tables = [exponent]
        with one_thread():
            for number, name in enumerate(c.manifolds):
                tables.append(self.part(f"manifold-{name}", partial(self._collected, partial(self._manifold, name))))
                self.tell("manifolds", number + 1, len(c.manifolds))
            tables.append(self.part("pinning", partial(self._collected, self._pinning)))
            tables.append(self.part("parabola", partial(self._collected, self._parabola)))
        table = Table.concat(tables, self.about)
        self.folder.write_table(table)
        self.folder.write_json("verdicts.json", verdicts_to_dicts(evaluate_claims(table, theory_claims())))

    def run(self) -> Path:
        """As in the base class; then removes the intermediate files of a complete run."""
        path = super().run()
        self.folder.tidy()
        return path

    def _collected(self, measure: Callable[[], None]) -> Table:
        """The table of what a part adds to the records."""
        self.records = []
        measure()
        return Table.from_records(self.records)

    def _exponent(self) -> Table:
        """β: measured in a model, given, or assumed; the table has its rows, and its `about` the value to use."""
        c, (zipf, beta) = self.config, self.config.reference
        self.records = []
        reference: dict[str, Any] = {"zipf": zipf, "beta": beta, "from": "assumed" if c.beta is None else "given"}
        used, model, about = Estimate(beta), "β", {}
        if c.model is not None:
            sizes: dict[str, Any] = {"data": c.data, "tokens": c.text_tokens, "device": c.device, "seed": c.seed}
            sizes["tokenizer"] = c.tokenizer
            found = measure_exponent(c.model, **sizes, progress=self.progress)
            used, model = Estimate(found.used.value, found.used.low, found.used.high, n=found.used.types), c.model
            model, about = found.entry["name"], {"model": found.entry}
            rounded = {key: round(getattr(used, key), 3) + 0.0 for key in ("low", "high")}
            reference |= {"beta": round(used.value, 3) + 0.0, "from": "measured", "model": model, **rounded}
            columns = {"model": model, "data": c.data, "seed": c.seed, "group": "", "run": self.folder.path.name}
            self.records += [{**columns, **row} for row in found.records]
        self._add(model, "frequency_beta", used, _variant(used=1, **{"from": reference["from"]}))
        return Table.from_records(self.records, {"reference": reference, **about})

    def _use(self, about: Mapping[str, Any]) -> None:
        """Take over the β of the first part: as the one of the verdicts, with the ends of its interval beside it."""
        reference = about["reference"]
        self.about["reference"] = {**reference, "given": reference["from"] != "assumed"}
        ends = [reference[end] for end in ("low", "high") if end in reference]
        self.look = replace(self.config, beta=reference["beta"], betas=(*self.config.betas, *ends), **READING)
        if "model" in about:
            self.add_model(about["model"])
            self.about["data"] = about["model"]["data"]
            self.about["warnings"] += [f"{about['model']['name']}: {note}" for note in about["model"]["notes"]]
        if reference["beta"] < 0:
            self.about["warnings"].append(
                f"β is {reference['beta']:g}, below 0: frequent types spread more widely than rare ones, so curvature "
                "is more visible for frequent tokens, not less."
            )

    def _add(
        self, model: str, metric: str, found: Estimate, variant: str = "", *, step: int | None = None, **options: Any
    ) -> None:
        row = {"model": model, "metric": metric, "variant": _variant(variant, **options), "seed": self.config.seed}
        row |= {} if step is None else {"step": step}
        place = {"data": "synthetic", "stack": "single", "layer": 0, "kind": "manifold", "group": ""}
        self.records.append({"run": self.folder.path.name, **place, **row, **vars(found)})

    def _manifold(self, name: str) -> None:
        """Parts 1 to 5 on one manifold."""
        c = self.look
        manifold = manifolds.make_manifold(name, dim=c.dim, ambient=c.ambient, seed=c.seed)
        self._scales(manifold)
        self._populations(manifold, see_frequencies, c.types, n=c.tokens, ratios=_RATIOS)
        rows, medians = c.neighbourhoods * c.neighbours, ("local_pca_angle", "curvature_error")
        self._populations(manifold, see_scales, c.neighbourhoods, n=rows, ratios=medians, salt=2)
        self._gradients(manifold)
        self._loop(manifold)

    def _scales(self, manifold: Manifold) -> None:
        """Part 1: variance against scale."""
        c, name = self.look, manifold.name
        ladder = sample_ladder(manifold, c, seed=c.seed + _salt(manifold))
        for of in EXPECTED_SLOPES:
            where: dict[str, Any] = {"of": of, "sampling": c.kind}
            if of == "visibility":
                raw = ladder.variance["normal"] / ladder.variance["tangent"]
            else:
                raw = ladder.variance[of]
                self._add(name, "curvature_floor", over_replicates(ladder.floor[of].tolist(), n=c.samples), **where)
            leading = ladder.leading(of)
            for i, scale in enumerate(ladder.scales.tolist()):
                seen = over_replicates(raw[:, i].tolist(), n=c.samples)
                self._add(name, "curvature_variance", seen, scale=scale, **where)
                self._add(name, "curvature_variance", Estimate(float(leading[i])), expected=1, scale=scale, **where)
            slopes, kept = ladder.slopes(of, limit=c.fit_limit)
            few = f"{int(kept.sum())} of {len(kept)} scales are above the noise floor and ≤ {c.fit_limit:g}/κ"
            n = c.samples * int(kept.sum())
            self._add(name, "curvature_slope", over_replicates(slopes.tolist(), n=n, note=few), **where)
            if np.isfinite(slopes).all():
                ratio = metrics.curvature_constant(ladder.excess(of)[:, kept], leading[kept])
                self._add(name, "curvature_constant", over_replicates(ratio.tolist(), n=n, log=True), **where)

    def _populations(
        self, manifold: Manifold, see: See, types: int, *, n: int, ratios: Collection[str], salt: int = 0
    ) -> None:
        """Parts 2 and 3: what `see` yields for independent populations of types; `ratios` have geometric means."""
        found: dict[tuple[str, str], list[float]] = {}
        for draw in range(self.look.draws):
            seed = self.look.seed + _salt(manifold, draw + 1) + salt
            population, generator = Population.draw(manifold, types, seed=seed), torch.Generator().manual_seed(seed + 1)
            for key, value in see(population, self.look, generator):
                found.setdefault(key, []).append(value)
        for (metric, variant), values in found.items():
            log = metric in ratios and all(value > 0 for value in values)
            self._add(manifold.name, metric, over_replicates(values, n=n, log=log), variant)

    def _gradients(self, manifold: Manifold) -> None:
        """Part 4: Eq. 9, 10 and 11."""
        c, name = self.look, manifold.name
        sizes: dict[str, Any] = {"scales": c.scales, "samples": c.samples, "replicates": c.replicates, "kind": c.kind}
        signals = {signal: gradients.SIGNALS[signal] for signal in c.signals}
        ladders = gradients.gradient_ladders(manifold, signals, **sizes, seed=c.seed + _salt(manifold) + 50)
        for signal, ladder in ladders.items():
            for of, per in product(gradients.ORDERS, ("mean", "rows")):
                where: dict[str, Any] = {"of": of, "per": per, "signal": signal}
                found = ladder.order(of, per, limit=c.fit_limit)
                remark = "vanishes to leading order; " if found.vanishes else ""
                remark += "sampling error only; " if found.sampled else ""
                slope = replace(found.slope, note=remark + found.slope.note)
                self._add(name, "manifold_gradient_slope", slope, **where)
                if of == "ratio":
                    continue
                if per == "mean":
                    highest = over_replicates(ladder.highest(of, limit=c.fit_limit).tolist(), n=c.samples)
                    self._add(name, "manifold_gradient_tightness", found.tightness, of=of, signal=signal)
                    self._add(name, "manifold_gradient_tightness", highest, highest=1, of=of, signal=signal)
                for i, scale in enumerate(ladder.scales.tolist()):
                    seen = over_replicates(ladder.part(of, per)[:, i].tolist(), n=c.samples)
                    self._add(name, "manifold_gradient", seen, scale=scale, **where)
        for of, (i, scale) in product(gradients.PARTS, enumerate(ladder.scales.tolist())):
            bound = Estimate(float(ladder.bound[of][:, i].mean()))
            self._add(name, "manifold_gradient", bound, bound=1, of=of, scale=scale)

    def _loop(self, manifold: Manifold) -> None:
        """Part 5: the self-reinforcing loop, its control and its null."""
        c = self.look
        for layers, (labels, update) in product((1, 2), LOOPS):
            sizes: dict[str, Any] = {
                "steps": c.loop_steps,
                "runs": c.loop_runs,
                "seed": c.seed + _salt(manifold) + 60 + layers,
            }
            found = gradients.loop_courses(manifold, layers=layers, labels=labels, update=update, **sizes)
            for i, step in enumerate(found.steps):
                share = over_replicates(found.shares[:, i].tolist(), n=gradients.PROBE)
                where: dict[str, Any] = {"labels": labels, "layers": layers, "update": update}
                self._add(manifold.name, "tangent_variance_share", share, step=step, **where)

    def _pinning(self) -> None:
        """Part 6: how far the embeddings of types move, against their frequency."""
        c = self.look
        for number, optimiser in enumerate(gradients.OPTIMISERS):
            sizes: dict[str, Any] = {
                "zipf": REFERENCE_ZIPF,
                "steps": c.pinned_steps,
                "runs": c.pinned_runs,
                "seed": c.seed,
            }
            found = gradients.pinned_embeddings(c.pinned_types, optimiser=optimiser, **sizes)
            for window in gradients.WINDOWS:
                where: dict[str, Any] = {"optimiser": optimiser, "window": window}
                slope = over_replicates(found.slopes(window), n=c.pinned_types)
                self._add("pinning", "pinning_slope", slope, **where)
                for rank, distances in enumerate(found.distance[window].T.tolist(), start=1):
                    seen = over_replicates(distances, log=True, n=c.pinned_runs)
                    self._add("pinning", "pinning_distance", seen, rank=rank, **where)
            self.tell("pinning", number + 1, len(gradients.OPTIMISERS))

    def _parabola(self) -> None:
        c = self.look
        for scale in c.scales:
            found = [parabola_gradient(scale, n=c.samples, seed=c.seed + r) for r in range(c.replicates)]
            shares = {"row": [p.row_tangent for p in found], "gradient": [p.mean_share for p in found]}
            for per, values in shares.items():
                self._add("parabola", "parabola_tangent", over_replicates(values, n=c.samples), per=per, scale=scale)


def _salt(manifold: Manifold, part: int = 0) -> int:
    """An offset of the seed, so that manifolds and populations have different random numbers."""
    return 100_000 * (1 + list(manifolds.MANIFOLDS).index(manifold.name)) + 100 * part


def _variant(variant: str = "", **options: Any) -> str:
    """A variant with further options, numbers in short form."""
    return with_options(variant, **{k: f"{v:g}" if isinstance(v, float) else v for k, v in options.items()})


def see_scales(population: Population, config: CurvatureConfig, generator: torch.Generator) -> Iterator[SeenItem]:
    """Part 3, uniform sampling: what local PCA recovers at one scale for all."""
    everyone, once = torch.arange(config.neighbourhoods), torch.ones(config.neighbourhoods)
    for scale in config.pca_scales:
        width = torch.full((config.neighbourhoods,), scale * population.unit, dtype=torch.float64)
        angle, error = fit_neighbourhoods(population, width, everyone, look=config, generator=generator)
        yield ("local_pca_angle", _variant(scale=scale)), metrics.local_pca_angle(angle, once)
        yield ("curvature_error", _variant(scale=scale)), metrics.curvature_error(error, once)


def see_frequencies(population: Population, config: CurvatureConfig, generator: torch.Generator) -> Iterator[SeenItem]:
    """Parts 2 and 3: every (s, β), by frequency and uniformly, for one population of types."""
    for zipf in config.all_zipf:
        frequency = zipf_frequencies(config.types, zipf)
        known: Seen = {}
        for beta in config.all_betas:
            if zipf > 0 or not known:  # with s = 0 the result does not depend on β
                scales = population.scales(frequency, beta, base=config.base_scale)
                known = _see_both(population, config, frequency, scales, generator)
            for (metric, variant), value in known.items():
                yield (metric, _variant(variant, beta=beta, zipf=zipf)), value
    reference = zipf_frequencies(config.types, REFERENCE_ZIPF)
    for beta in config.all_betas:  # scales fixed at those of s = 1: only the draw changes
        scales = population.scales(reference, beta, base=config.base_scale)

        def visible(weights: Tensor, scales: Tensor = scales) -> float:
            group = torch.multinomial(weights, config.tokens, replacement=True, generator=generator)
            rows = draw_rows(population, scales, group, kind=config.kind, generator=generator)
            return true_visibility(rows, group, population)

        uniform = visible(torch.ones_like(reference))
        for zipf in config.all_zipf:
            ratio = metrics.curvature_attenuation(visible(zipf_frequencies(config.types, zipf)), uniform)
            yield ("curvature_attenuation", _variant("estimate=true;scales=fixed", beta=beta, zipf=zipf)), ratio


def _see_both(
    population: Population, look: CurvatureConfig, frequency: Tensor, scales: Tensor, generator: torch.Generator
) -> Seen:
    """For one (s, β): measurements of a draw by frequency and of a uniform draw of the same types, and their ratio."""
    uniform = torch.full_like(frequency, 1 / len(frequency))
    found: Seen = {}
    for name, weights in (("zipf", frequency), ("uniform", uniform)):
        for see in (see_tokens, see_neighbourhoods):
            seen = see(population, scales, weights, look=look, generator=generator)
            found |= {(metric, _variant(variant, sampling=name)): value for (metric, variant), value in seen.items()}
    for estimate in ("estimate=true", "estimate=pca"):
        top, bottom = (found["curvature_visibility", f"{estimate};sampling={n}"] for n in ("zipf", "uniform"))
        found["curvature_attenuation", estimate] = metrics.curvature_attenuation(top, bottom)
    return found
