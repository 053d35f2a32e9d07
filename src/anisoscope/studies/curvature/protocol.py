"""`anisoscope study curvature`: when can the curvature of a manifold be seen in a sample of it?

Four parts on manifolds whose second fundamental form is known: (1) variance against scale, (2) visibility of curvature
against frequency bias, (3) what local PCA recovers, (4) the parabola, where the gradient is normal although every row
is almost tangent. This is the numerical side of the theory in Revisiting Anisotropy (arXiv 2604.08764); `samples` has
the definitions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from anisoscope.claims.dynamics.curvature import EXPECTED_SLOPES, curvature_verdicts
from anisoscope.claims.engine.claim import verdicts_to_dicts
from anisoscope.metrics.curvature import curvature_attenuation, curvature_constant, curvature_error, local_pca_angle
from anisoscope.metrics.engine.estimation import Estimate
from anisoscope.numerics.host import one_thread
from anisoscope.numerics.manifolds import MANIFOLDS, Manifold, make_manifold
from anisoscope.results.query import options_of
from anisoscope.results.schema import variant_name
from anisoscope.results.table import Table
from anisoscope.studies.curvature.config import REFERENCE_ZIPF
from anisoscope.studies.curvature.config import CurvatureConfig as CurvatureConfig
from anisoscope.studies.curvature.samples import (
    FrequencyLook,
    Ladder,
    Population,
    draw_rows,
    fit_neighbourhoods,
    over_replicates,
    parabola_gradient,
    sample_ladder,
    see_neighbourhoods,
    see_tokens,
    true_visibility,
    zipf_frequencies,
)
from anisoscope.studies.study import Study

_RATIOS = ("curvature_visibility", "curvature_visibility_expected", "curvature_attenuation", "curvature_error")


@dataclass
class Curvature(Study):
    """One run of the study: records gather here until all manifolds are done."""

    config: CurvatureConfig
    records: list[dict[str, Any]] = field(default_factory=list)
    name: ClassVar[str] = "curvature"

    def manifest_fields(self) -> dict[str, Any]:
        """With the Zipf exponent and β that the verdicts are about."""
        zipf, beta = self.config.reference
        reference = {"zipf": zipf, "beta": beta, "given": self.config.beta is not None}
        return {"study": self.name, "reference": reference, "device": "cpu"}

    def measure(self) -> None:
        """Every manifold, then the parabola and the verdicts."""
        with one_thread():
            for number, name in enumerate(self.config.manifolds):
                self._manifold(name)
                self.tell("manifolds", number + 1, len(self.config.manifolds))
            self._parabola()
        rows = ({"run": self.folder.path.name, **row} for row in self.records)
        table = Table.from_records(rows, self.about)
        self.folder.write_table(table)
        self.folder.write_json("verdicts.json", verdicts_to_dicts(curvature_verdicts(table)))

    def _manifold(self, name: str) -> None:
        manifold = make_manifold(name, dim=self.config.dim, ambient=self.config.ambient, seed=self.config.seed)
        self._scales(manifold)
        self._frequency(manifold)
        self._local_pca(manifold)

    def _add(self, model: str, metric: str, found: Estimate, **variant: Any) -> None:
        plain = {k: f"{v:g}" if isinstance(v, float) else v for k, v in variant.items()}
        columns = {k: getattr(found, k) for k in ("value", "low", "high", "sd", "n", "contexts", "note")}
        row = {"model": model, "metric": metric, "variant": variant_name(plain), "seed": self.config.seed}
        place = {"data": "synthetic", "stack": "single", "kind": "manifold", "group": "", "dropped": 0}
        self.records.append({**place, **row, **columns, "replicates": list(found.replicates)})

    def _scales(self, manifold: Manifold) -> None:
        """Part 1: variance against scale."""
        c = self.config
        ladder = sample_ladder(
            manifold,
            manifold.centre,
            scales=c.scales,
            samples=c.samples,
            replicates=c.replicates,
            noise=c.floor,
            kind=c.kind,
            seed=c.seed + _salt(manifold),
        )
        for of in EXPECTED_SLOPES:
            if of != "visibility":
                floor = over_replicates(ladder.floor[of].tolist(), n=c.samples)
                self._add(manifold.name, "curvature_floor", floor, of=of, sampling=c.kind)
            self._curve(manifold.name, ladder, of)
            self._slope(manifold.name, ladder, of)

    def _curve(self, name: str, ladder: Ladder, of: str) -> None:
        raw = ladder.variance["normal"] / ladder.variance["tangent"] if of == "visibility" else ladder.variance[of]
        for i, scale in enumerate(ladder.scales.tolist()):
            where = {"of": of, "sampling": self.config.kind, "scale": scale}
            seen = over_replicates(raw[:, i].tolist(), n=self.config.samples)
            self._add(name, "curvature_variance", seen, **where)
            self._add(name, "curvature_variance", Estimate(float(ladder.leading(of)[i])), expected=1, **where)

    def _slope(self, name: str, ladder: Ladder, of: str) -> None:
        slopes, kept = ladder.slopes(of, limit=self.config.fit_limit)
        few = f"{int(kept.sum())} of {len(kept)} scales are above the noise floor and ≤ {self.config.fit_limit:g}/κ"
        n = self.config.samples * int(kept.sum())
        self._add(
            name, "curvature_slope", over_replicates(slopes.tolist(), n=n, note=few), of=of, sampling=self.config.kind
        )
        if np.isfinite(slopes).all():
            ratio = curvature_constant(ladder.excess(of)[:, kept], ladder.leading(of)[kept])
            constant = over_replicates(ratio.tolist(), n=n, log=True)
            self._add(name, "curvature_constant", constant, of=of, sampling=self.config.kind)

    def _frequency(self, manifold: Manifold) -> None:
        """Parts 2 and 3: every (s, β), by frequency and uniformly, in several populations."""
        c = self.config
        found: dict[tuple[str, str, float, float], list[float]] = {}
        for draw in range(c.draws):
            population = Population.draw(manifold, c.types, seed=c.seed + _salt(manifold, draw + 1))
            generator = torch.Generator().manual_seed(c.seed + _salt(manifold, draw + 1) + 1)
            for key, value in _see_everything(population, c, generator):
                found.setdefault(key, []).append(value)
        arrays = {key: np.array(values) for key, values in found.items()}
        for (metric, variant, zipf, beta), values in arrays.items():
            log = metric in _RATIOS and bool((values > 0).all())
            estimate = over_replicates(values.tolist(), n=c.tokens, log=log)
            self._add(manifold.name, metric, estimate, beta=beta, zipf=zipf, **options_of(variant))

    def _local_pca(self, manifold: Manifold) -> None:
        """Part 3, uniform sampling: what local PCA recovers at one scale for all."""
        c = self.config
        found: dict[tuple[str, float], list[float]] = {}
        for draw in range(c.draws):
            population = Population.draw(manifold, c.neighbourhoods, seed=c.seed + _salt(manifold, draw + 1) + 2)
            generator = torch.Generator().manual_seed(c.seed + _salt(manifold, draw + 1) + 3)
            everyone = torch.arange(c.neighbourhoods)
            for scale in c.pca_scales:
                width = torch.full((c.neighbourhoods,), scale * population.unit, dtype=torch.float64)
                angle, error = fit_neighbourhoods(population, width, everyone, look=_look(c), generator=generator)
                once = torch.ones(len(angle))
                found.setdefault(("local_pca_angle", scale), []).append(local_pca_angle(angle, once))
                found.setdefault(("curvature_error", scale), []).append(curvature_error(error, once))
        n = c.neighbourhoods * c.neighbours
        for (metric, scale), medians in found.items():
            estimate = over_replicates(medians, n=n, log=not np.isnan(medians).any())
            self._add(manifold.name, metric, estimate, scale=scale)

    def _parabola(self) -> None:
        c = self.config
        for scale in c.scales:
            found = [parabola_gradient(scale, n=c.samples, seed=c.seed + r) for r in range(c.replicates)]
            row = over_replicates([p.row_tangent for p in found], n=c.samples)
            mean = over_replicates([p.mean_share for p in found], n=c.samples)
            self._add("parabola", "parabola_tangent", row, per="row", scale=scale)
            self._add("parabola", "parabola_tangent", mean, per="gradient", scale=scale)


def _look(config: CurvatureConfig) -> FrequencyLook:
    return FrequencyLook(config.tokens, config.neighbourhoods, config.neighbours, config.noise, config.kind)


def _salt(manifold: Manifold, part: int = 0) -> int:
    """Added to the seed, so that manifolds and populations do not share their chance."""
    return 100_000 * (1 + list(MANIFOLDS).index(manifold.name)) + 100 * part


def _see_everything(
    population: Population, config: CurvatureConfig, generator: torch.Generator
) -> Iterator[tuple[tuple[str, str, float, float], float]]:
    """(metric, variant, s, β) and its value, for one population of types."""
    for zipf in config.all_zipf:
        frequency = zipf_frequencies(config.types, zipf)
        known: dict[tuple[str, str], float] = {}
        for beta in config.all_betas:
            if zipf > 0 or not known:  # with s = 0 all types are equally frequent and wide, whatever β is
                known = _see_both(population, config, frequency, beta=beta, generator=generator)
            yield from (((metric, variant, zipf, beta), value) for (metric, variant), value in known.items())
    for beta in config.all_betas:
        for zipf, ratio in _fixed_attenuation(population, config, beta=beta, generator=generator):
            yield ("curvature_attenuation", "estimate=true;scales=fixed", zipf, beta), ratio


def _see_both(
    population: Population,
    config: CurvatureConfig,
    frequency: torch.Tensor,
    *,
    beta: float,
    generator: torch.Generator,
) -> dict[tuple[str, str], float]:
    """One (s, β): what a draw by frequency and a uniform draw of the same types show, and their ratio."""
    scales = population.scales(frequency, beta, base=config.base_scale)
    uniform = torch.full_like(frequency, 1 / len(frequency))
    found: dict[tuple[str, str], float] = {}
    for name, weights in (("zipf", frequency), ("uniform", uniform)):
        side = see_tokens(population, scales, weights, look=_look(config), generator=generator)
        side |= see_neighbourhoods(population, scales, weights, look=_look(config), generator=generator)
        for key, value in side.items():
            metric, variant = key.split("|")
            found[metric, f"{variant};sampling={name}".lstrip(";")] = value
    for estimate in ("estimate=true", "estimate=pca"):
        top, bottom = (found["curvature_visibility", f"{estimate};sampling={n}"] for n in ("zipf", "uniform"))
        found["curvature_attenuation", estimate] = curvature_attenuation(top, bottom)
    return found


def _fixed_attenuation(
    population: Population, config: CurvatureConfig, *, beta: float, generator: torch.Generator
) -> Iterator[tuple[float, float]]:
    """(s, visibility by frequency over that of a uniform draw), the scales kept as at s = 1: only the draw changes."""
    reference = zipf_frequencies(config.types, REFERENCE_ZIPF)
    scales = population.scales(reference, beta, base=config.base_scale)

    def visible(weights: torch.Tensor) -> float:
        group = torch.multinomial(weights, config.tokens, replacement=True, generator=generator)
        rows = draw_rows(population, scales, group, kind=config.kind, generator=generator)
        return true_visibility(rows, group, population)

    uniform = visible(torch.ones_like(reference))
    for zipf in config.all_zipf:
        yield zipf, curvature_attenuation(visible(zipf_frequencies(config.types, zipf)), uniform)
