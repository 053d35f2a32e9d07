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
from torch import Tensor

from anisoscope.claims.dynamics import EXPECTED_SLOPES, curvature_verdicts
from anisoscope.claims.engine.claim import verdicts_to_dicts
from anisoscope.metrics.curvature import curvature_attenuation, curvature_constant, curvature_error, local_pca_angle
from anisoscope.metrics.engine.estimation import Estimate
from anisoscope.numerics.host import one_thread
from anisoscope.numerics.manifolds import MANIFOLDS, Manifold, make_manifold
from anisoscope.results.query import options_of, variant_name
from anisoscope.results.table import Table
from anisoscope.studies.curvature import REFERENCE_ZIPF, CurvatureConfig, samples
from anisoscope.studies.curvature.samples import Population, over_replicates, zipf_frequencies
from anisoscope.studies.study import Study

_RATIOS = ("curvature_visibility", "curvature_visibility_expected", "curvature_attenuation", "curvature_error")
Seen = dict[tuple[str, str], float]  # (metric, variant) and its value


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
                manifold = make_manifold(name, dim=self.config.dim, ambient=self.config.ambient, seed=self.config.seed)
                self._scales(manifold)
                self._frequency(manifold)
                self._local_pca(manifold)
                self.tell("manifolds", number + 1, len(self.config.manifolds))
            self._parabola()
        rows = ({"run": self.folder.path.name, **row} for row in self.records)
        table = Table.from_records(rows, self.about)
        self.folder.write_table(table)
        self.folder.write_json("verdicts.json", verdicts_to_dicts(curvature_verdicts(table)))

    def _add(self, model: str, metric: str, found: Estimate, **variant: Any) -> None:
        plain = {k: f"{v:g}" if isinstance(v, float) else v for k, v in variant.items()}
        columns = {k: getattr(found, k) for k in ("value", "low", "high", "sd", "n", "contexts", "note")}
        row = {"model": model, "metric": metric, "variant": variant_name(plain), "seed": self.config.seed}
        place = {"data": "synthetic", "stack": "single", "kind": "manifold", "group": "", "dropped": 0}
        self.records.append({**place, **row, **columns, "replicates": list(found.replicates)})

    def _scales(self, manifold: Manifold) -> None:
        """Part 1: variance against scale."""
        c, name = self.config, manifold.name
        ladder = samples.sample_ladder(manifold, c, seed=c.seed + _salt(manifold))
        for of in EXPECTED_SLOPES:
            where = {"of": of, "sampling": c.kind}
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
                ratio = curvature_constant(ladder.excess(of)[:, kept], leading[kept])
                self._add(name, "curvature_constant", over_replicates(ratio.tolist(), n=n, log=True), **where)

    def _draws(self, manifold: Manifold, types: int, *, salt: int) -> Iterator[tuple[Population, torch.Generator]]:
        """Independent populations of types, each with chance of its own."""
        for draw in range(self.config.draws):
            seed = self.config.seed + _salt(manifold, draw + 1) + salt
            yield Population.draw(manifold, types, seed=seed), torch.Generator().manual_seed(seed + 1)

    def _frequency(self, manifold: Manifold) -> None:
        """Parts 2 and 3: every (s, β), by frequency and uniformly, in several populations."""
        c = self.config
        found: dict[tuple[str, str, float, float], list[float]] = {}
        for population, generator in self._draws(manifold, c.types, salt=0):
            for key, value in _see_everything(population, c, generator):
                found.setdefault(key, []).append(value)
        for (metric, variant, zipf, beta), values in found.items():
            log = metric in _RATIOS and all(value > 0 for value in values)
            estimate = over_replicates(values, n=c.tokens, log=log)
            self._add(manifold.name, metric, estimate, beta=beta, zipf=zipf, **options_of(variant))

    def _local_pca(self, manifold: Manifold) -> None:
        """Part 3, uniform sampling: what local PCA recovers at one scale for all."""
        c = self.config
        found: dict[tuple[str, float], list[float]] = {}
        everyone, once = torch.arange(c.neighbourhoods), torch.ones(c.neighbourhoods)
        for population, generator in self._draws(manifold, c.neighbourhoods, salt=2):
            for scale in c.pca_scales:
                width = torch.full((c.neighbourhoods,), scale * population.unit, dtype=torch.float64)
                angle, error = samples.fit_neighbourhoods(population, width, everyone, look=c, generator=generator)
                found.setdefault(("local_pca_angle", scale), []).append(local_pca_angle(angle, once))
                found.setdefault(("curvature_error", scale), []).append(curvature_error(error, once))
        n = c.neighbourhoods * c.neighbours
        for (metric, scale), medians in found.items():
            estimate = over_replicates(medians, n=n, log=not np.isnan(medians).any())
            self._add(manifold.name, metric, estimate, scale=scale)

    def _parabola(self) -> None:
        c = self.config
        for scale in c.scales:
            found = [samples.parabola_gradient(scale, n=c.samples, seed=c.seed + r) for r in range(c.replicates)]
            row = over_replicates([p.row_tangent for p in found], n=c.samples)
            mean = over_replicates([p.mean_share for p in found], n=c.samples)
            self._add("parabola", "parabola_tangent", row, per="row", scale=scale)
            self._add("parabola", "parabola_tangent", mean, per="gradient", scale=scale)


def _salt(manifold: Manifold, part: int = 0) -> int:
    """Added to the seed, so that manifolds and populations do not share their chance."""
    return 100_000 * (1 + list(MANIFOLDS).index(manifold.name)) + 100 * part


def _see_everything(
    population: Population, config: CurvatureConfig, generator: torch.Generator
) -> Iterator[tuple[tuple[str, str, float, float], float]]:
    """(metric, variant, s, β) and its value, for one population of types."""
    for zipf in config.all_zipf:
        frequency = zipf_frequencies(config.types, zipf)
        known: Seen = {}
        for beta in config.all_betas:
            if zipf > 0 or not known:  # with s = 0 all types are equally frequent and wide, whatever β is
                scales = population.scales(frequency, beta, base=config.base_scale)
                known = _see_both(population, config, frequency, scales, generator)
            yield from (((metric, variant, zipf, beta), value) for (metric, variant), value in known.items())
    reference = zipf_frequencies(config.types, REFERENCE_ZIPF)
    for beta in config.all_betas:  # the scales kept as at s = 1: only the draw changes
        scales = population.scales(reference, beta, base=config.base_scale)

        def visible(weights: Tensor, scales: Tensor = scales) -> float:
            group = torch.multinomial(weights, config.tokens, replacement=True, generator=generator)
            rows = samples.draw_rows(population, scales, group, kind=config.kind, generator=generator)
            return samples.true_visibility(rows, group, population)

        uniform = visible(torch.ones_like(reference))
        for zipf in config.all_zipf:
            ratio = curvature_attenuation(visible(zipf_frequencies(config.types, zipf)), uniform)
            yield ("curvature_attenuation", "estimate=true;scales=fixed", zipf, beta), ratio


def _see_both(
    population: Population, look: CurvatureConfig, frequency: Tensor, scales: Tensor, generator: torch.Generator
) -> Seen:
    """One (s, β): what a draw by frequency and a uniform draw of the same types show, and their ratio."""
    uniform = torch.full_like(frequency, 1 / len(frequency))
    found: Seen = {}
    for name, weights in (("zipf", frequency), ("uniform", uniform)):
        for see in (samples.see_tokens, samples.see_neighbourhoods):
            for key, value in see(population, scales, weights, look=look, generator=generator).items():
                metric, variant = key.split("|")
                found[metric, f"{variant};sampling={name}".lstrip(";")] = value
    for estimate in ("estimate=true", "estimate=pca"):
        top, bottom = (found["curvature_visibility", f"{estimate};sampling={n}"] for n in ("zipf", "uniform"))
        found["curvature_attenuation", estimate] = curvature_attenuation(top, bottom)
    return found
