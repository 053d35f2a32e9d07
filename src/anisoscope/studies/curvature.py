"""`anisoscope study curvature`: when can the curvature of a manifold be seen in a sample of it?

Four parts on manifolds whose second fundamental form is known: (1) variance against scale, (2) visibility of curvature
against frequency bias, (3) what local PCA recovers, (4) the parabola, where the gradient is normal although every row
is almost tangent. METHODS: Seed A (2604.08764), the numerical side of its theory. See curvature_scales and
curvature_frequency for the definitions.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anisoscope import __version__
from anisoscope.claims.claim import verdicts_to_dicts
from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.metrics.estimate import Estimate
from anisoscope.numerics.manifolds import KINDS, MANIFOLDS, Manifold, make_manifold
from anisoscope.runs.store import RunFolder, replace_file
from anisoscope.runs.table import Table, variant_name
from anisoscope.studies.curvature_frequency import (
    Look,
    Population,
    draw_rows,
    fit_neighbourhoods,
    see_neighbourhoods,
    see_tokens,
    true_visibility,
    weighted_median,
    zipf_frequencies,
)
from anisoscope.studies.curvature_scales import EXPECTED_SLOPES, Ladder, parabola_gradient, sample_ladder
from anisoscope.studies.replicates import over_replicates

Progress = Callable[[str, int, int], None]
Record = dict[str, Any]

REFERENCE_ZIPF = 1.0
REFERENCE_BETA = 0.25  # assumed where none was measured
_RATIOS = ("curvature_visibility", "curvature_visibility_expected", "curvature_attenuation", "curvature_error")


def _ladder(first: float, last: float, count: int) -> tuple[float, ...]:
    return tuple(float(f"{t:.3g}") for t in np.geomspace(first, last, count))


@dataclass(frozen=True)
class CurvatureConfig:
    """Everything that decides the numbers of the study; lengths are in units of the radius of curvature 1/κ."""

    manifolds: tuple[str, ...] = tuple(MANIFOLDS)
    dim: int = 2
    ambient: int = 8
    kind: str = "gaussian"
    scales: tuple[float, ...] = _ladder(3e-4, 0.3, 16)
    samples: int = 4096  # rows of one sample of the ladder
    replicates: int = 16  # independent samples of the ladder
    floor: float = 1e-6  # ambient noise of the ladder
    fit_limit: float = 0.03  # above it the next order of the expansion begins to count
    zipf: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0)
    betas: tuple[float, ...] = (-0.1, 0.0, 0.1, 0.25, 0.5)
    beta: float | None = None  # measured in a real model: added to `betas`, and the one the verdicts are about
    types: int = 128
    tokens: int = 6144
    base_scale: float = 0.02  # t₀
    noise: float = 0.0015  # ambient noise of what local PCA is given
    neighbourhoods: int = 48
    neighbours: int = 96  # rows of one neighbourhood
    pca_scales: tuple[float, ...] = _ladder(0.01, 0.5, 9)
    draws: int = 6  # independent populations of types
    seed: int = 0

    def __post_init__(self) -> None:
        _check_names(self)
        _check_numbers(self)
        for name in self.manifolds:
            make_manifold(name, dim=self.dim, ambient=self.ambient)

    @classmethod
    def quick(cls, **changes: Any) -> CurvatureConfig:
        """Sizes for a look or a test: a few seconds."""
        small: dict[str, Any] = {
            "samples": 1024,
            "replicates": 6,
            "scales": _ladder(1e-3, 0.1, 8),
            "zipf": (0.0, 1.0, 2.0),
            "betas": (0.0, 0.25),
            "types": 64,
            "tokens": 2048,
            "neighbourhoods": 32,
            "neighbours": 64,
            "pca_scales": (0.02, 0.05, 0.2),
            "draws": 4,
        }
        return cls(**(small | changes))

    @property
    def reference(self) -> tuple[float, float]:
        """(Zipf exponent, β) that the verdicts are about."""
        return REFERENCE_ZIPF, REFERENCE_BETA if self.beta is None else self.beta

    @property
    def all_betas(self) -> tuple[float, ...]:
        """The β of the curves, with that of the verdicts and the null among them."""
        return tuple(sorted({0.0, *self.betas, self.reference[1]}))

    @property
    def all_zipf(self) -> tuple[float, ...]:
        return tuple(sorted({*self.zipf, REFERENCE_ZIPF}))

    @property
    def look(self) -> Look:
        return Look(self.tokens, self.neighbourhoods, self.neighbours, self.noise, self.kind)


_LEAST = {"samples": 16, "replicates": 3, "types": 2, "tokens": 32, "neighbourhoods": 2, "neighbours": 12, "draws": 3}


def _check_names(config: CurvatureConfig) -> None:
    if not config.manifolds:
        raise AnisoscopeError(f"no manifold was given; name some of {', '.join(MANIFOLDS)}.")
    for name in config.manifolds:
        if name not in MANIFOLDS:
            raise unknown_name("manifold", name, MANIFOLDS)
    if config.kind not in KINDS:
        raise unknown_name("kind of sampling", config.kind, KINDS)


def _check_numbers(config: CurvatureConfig) -> None:
    for name, least in (_LEAST | {"seed": 0}).items():
        if getattr(config, name) < least:
            raise AnisoscopeError(f"{name} is {getattr(config, name)}; expected at least {least}.")
    for name in ("scales", "pca_scales", "base_scale", "fit_limit"):
        value = getattr(config, name)
        _require(name, value if isinstance(value, tuple) else (value,), lambda x: x > 0, "a number above 0")
    for name in ("floor", "noise"):
        _require(name, (getattr(config, name),), lambda x: x >= 0, "a number of at least 0")
    _require("zipf", config.zipf, lambda x: 0 <= x <= 10, "exponents from 0 to 10")
    _require("beta", (*config.betas, *config.reference[1:]), lambda x: abs(x) <= 5, "exponents from -5 to 5")


def _require(name: str, values: Sequence[float], good: Callable[[float], bool], expected: str) -> None:
    if not values:
        raise AnisoscopeError(f"{name} is empty; expected {expected}.")
    for value in values:
        if not (math.isfinite(value) and good(value)):
            raise AnisoscopeError(f"{name} has {value}; expected {expected}.")


@dataclass
class _Study:
    """One run: records gather here."""

    config: CurvatureConfig
    progress: Progress | None = None
    records: list[Record] = field(default_factory=list)
    slopes: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)  # manifold → of → repetitions
    seen: dict[str, dict[tuple[str, str, float, float], np.ndarray]] = field(default_factory=dict)
    done: int = 0

    def run(self) -> None:
        for number, name in enumerate(self.config.manifolds):
            manifold = make_manifold(name, dim=self.config.dim, ambient=self.config.ambient, seed=self.config.seed)
            self._scales(manifold)
            self._frequency(manifold)
            self._local_pca(manifold)
            self._tell(number + 1, len(self.config.manifolds))
        self._parabola()

    def _tell(self, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress("manifolds", done, total)

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
        self.slopes.setdefault(name, {})[of] = slopes
        few = f"{int(kept.sum())} of {len(kept)} scales are above the noise floor and ≤ {self.config.fit_limit:g}/κ"
        n = self.config.samples * int(kept.sum())
        self._add(
            name, "curvature_slope", over_replicates(slopes.tolist(), n=n, note=few), of=of, sampling=self.config.kind
        )
        if np.isfinite(slopes).all():
            ratio = np.log(ladder.excess(of)[:, kept] / ladder.leading(of)[kept]).mean(1)
            constant = over_replicates(np.exp(ratio).tolist(), n=n, log=True)
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
        self.seen[manifold.name] = arrays
        for (metric, variant, zipf, beta), values in arrays.items():
            words = dict(word.split("=") for word in variant.split(";") if word)
            log = metric in _RATIOS and bool((values > 0).all())
            estimate = over_replicates(values.tolist(), n=c.tokens, log=log)
            self._add(manifold.name, metric, estimate, beta=beta, zipf=zipf, **words)

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
                angle, error = fit_neighbourhoods(population, width, everyone, look=c.look, generator=generator)
                for metric, values in (("local_pca_angle", angle), ("curvature_error", error)):
                    found.setdefault((metric, scale), []).append(weighted_median(values, torch.ones(len(values))))
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
        side = see_tokens(population, scales, weights, look=config.look, generator=generator)
        side |= see_neighbourhoods(population, scales, weights, look=config.look, generator=generator)
        for key, value in side.items():
            metric, variant = key.split("|")
            found[metric, f"{variant};sampling={name}".lstrip(";")] = value
    for estimate in ("estimate=true", "estimate=pca"):
        top, bottom = (found["curvature_visibility", f"{estimate};sampling={n}"] for n in ("zipf", "uniform"))
        found["curvature_attenuation", estimate] = top / bottom if bottom else math.nan
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
        yield zipf, visible(zipf_frequencies(config.types, zipf)) / uniform if uniform else math.nan


def run_curvature(
    config: CurvatureConfig, out: Path, *, progress: Progress | None = None, command: Sequence[str] = ()
) -> Path:
    """Run the study into a new run folder: run.json, table.parquet, verdicts.json; the folder.

    >>> run_curvature(CurvatureConfig.quick(), Path("runs/curvature"))  # doctest: +SKIP
    """
    from anisoscope.studies.curvature_verdicts import judge

    folder = RunFolder.create(out, asdict(config), resume=False)
    about, started = _about(config, command), time.monotonic()
    folder.write_about(about)
    study = _Study(config, progress)
    try:
        with _one_thread():
            study.run()
        verdicts = judge(config, slopes=study.slopes, seen=study.seen)
        folder.write_table(Table.from_records({"run": folder.path.name, **record} for record in study.records))
        text = json.dumps(verdicts_to_dicts(verdicts), indent=2, ensure_ascii=False)
        replace_file(folder.path / "verdicts.json", lambda p: p.write_text(text + "\n", encoding="utf-8"))
        about["status"] = "complete"
    except BaseException as error:
        about["status"] = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        about["error"] = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise
    finally:
        about["wall_seconds"] = round(time.monotonic() - started, 2)
        folder.write_about(about)
    return folder.path


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Thousands of small operations: handing each to several threads costs many times what it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _about(config: CurvatureConfig, command: Sequence[str]) -> dict[str, Any]:
    return {
        "schema": 1,
        "anisoscope": __version__,
        "study": "curvature",
        "command": list(command),
        "config": asdict(config),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "platform": f"{platform.system()} {platform.machine()}",
        },
        "reference": dict(zip(("zipf", "beta"), config.reference, strict=True)) | {"given": config.beta is not None},
        "seed": config.seed,
        "device": "cpu",
        "status": "running",
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "wall_seconds": 0.0,
        "warnings": [],
    }
