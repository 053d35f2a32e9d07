"""Configuration of the curvature study: when can curvature be seen in a sample, and where do gradients on it go?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from anisoscope.errors import AnisoscopeError, check_known
from anisoscope.option import Device, Option, Seed, Text, Tokenizer, check_least, check_most, listed, refuse_idle

MANIFOLDS = ("sphere", "ellipsoid", "paraboloid", "swiss_roll", "torus", "quadratic", "flat")
SIGNALS = ("constant", "noise", "linear", "network")  # see `gradients.SIGNALS`
PRESETS = ("tiny", "small")
REFERENCE_ZIPF = 1.0
REFERENCE_BETA = 0.25  # assumed if none was measured
_LEAST = {"samples": 16, "replicates": 3, "types": 2, "tokens": 32, "neighbourhoods": 2, "neighbours": 12, "draws": 3}
_LEAST |= {"loop_runs": 3, "loop_steps": 2, "pinned_runs": 3, "pinned_steps": 66, "pinned_types": 8, "text_tokens": 256}
_LEAST |= {"seed": 0}
_RANGES: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
    (("scales", "pca_scales", "base_scale", "fit_limit"), lambda x: x > 0, "a number above 0"),
    (("floor", "noise"), lambda x: x >= 0, "a number of at least 0"),
    (("zipf",), lambda x: 0 <= x <= 10, "exponents from 0 to 10"),
    (("beta",), lambda x: abs(x) <= 5, "exponents from -5 to 5"),
)


def _ladder(first: float, last: float, count: int) -> tuple[float, ...]:
    """Log-spaced scales, rounded to three digits.

    >>> _ladder(0.01, 0.5, 3)
    (0.01, 0.0707, 0.5)
    """
    ratio = (last / first) ** (1 / (count - 1))
    return tuple(float(f"{first * ratio**i:.3g}") for i in range(count))


@dataclass(frozen=True)
class CurvatureConfig:
    """The configuration of the study; lengths are in units of the radius of curvature 1/κ."""

    preset: str = "small"  # the name of the sizes below
    model: Annotated[
        str | None, Option("Model in which β is measured first: a folder, a hub id, or a .gguf file; default: assumed.")
    ] = None
    data: Text = "embedded"  # what the model reads
    tokenizer: Tokenizer = None
    manifolds: Annotated[tuple[str, ...], Option(f"Manifolds: {', '.join(MANIFOLDS)}; default: all.", parse=listed)] = (
        MANIFOLDS
    )
    dim: Annotated[int, Option("Dimension of the manifolds.")] = 2
    ambient: Annotated[int, Option("Dimension of the space around them.")] = 8
    kind: str = "gaussian"
    scales: tuple[float, ...] = _ladder(3e-4, 0.3, 16)
    samples: int = 4096  # rows of one sample of the ladder
    replicates: int = 16  # independent samples of the ladder
    floor: float = 1e-6  # sd of the ambient noise of the ladder
    fit_limit: float = 0.03  # largest fitted scale; above it higher orders of the expansion matter
    zipf: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0)
    betas: tuple[float, ...] = (-0.1, 0.0, 0.1, 0.25, 0.5)
    types: int = 128
    tokens: int = 6144
    base_scale: float = 0.02  # t₀
    noise: float = 0.0015  # sd of the ambient noise of the rows for local PCA
    neighbourhoods: int = 48
    neighbours: int = 96  # rows of one neighbourhood
    pca_scales: tuple[float, ...] = _ladder(0.01, 0.5, 9)
    draws: int = 6  # independent populations of types
    signals: tuple[str, ...] = SIGNALS  # that come back to a layer on the manifold
    loop_runs: int = 8  # trainings of each model on samples of a manifold
    loop_steps: int = 600
    pinned_types: int = 128
    pinned_runs: int = 6  # trainings of the embeddings with each optimiser
    pinned_steps: int = 1500
    text_tokens: int = 16_384  # that a model reads to have its β measured
    device: Device = "auto"  # of the model
    seed: Seed = 0
    beta: Annotated[
        float | None, Option("Exponent of local scale over frequency, measured elsewhere; default: from --model.")
    ] = None

    def __post_init__(self) -> None:
        from anisoscope.numerics.manifolds import KINDS, make_manifold

        if not self.manifolds:
            raise AnisoscopeError(f"no manifold was given; name some of {', '.join(MANIFOLDS)}.")
        for name in self.manifolds:
            check_known("manifold", name, MANIFOLDS)
        check_known("preset", self.preset, PRESETS)
        for name in self.signals:
            check_known("signal", name, SIGNALS)
        if self.model is not None and self.beta is not None:
            raise AnisoscopeError("--beta and --model were both given; β is either measured in a model or given.")
        if self.model is None:
            refuse_idle(self, ("data", "tokenizer", "device"), "without --model, which would read with it")
        check_known("kind of sampling", self.kind, KINDS)
        check_least(self, _LEAST)
        check_most(self, {"dim": 100, "ambient": 10_000})
        for names, good, expected in _RANGES:
            for name in names:
                value = (*self.betas, self.reference[1]) if name == "beta" else getattr(self, name)
                if value == ():
                    raise AnisoscopeError(f"{name} is empty; expected {expected}.")
                for number in value if isinstance(value, tuple) else (value,):
                    if not (math.isfinite(number) and good(number)):
                        raise AnisoscopeError(f"{name} has {number}; expected {expected}.")
        for name in self.manifolds:
            make_manifold(name, dim=self.dim, ambient=self.ambient)

    @classmethod
    def tiny(cls, **changes: Any) -> CurvatureConfig:
        """Small sizes for a trial or a test, which takes seconds."""
        small: dict[str, Any] = {"samples": 1024, "replicates": 6, "types": 64, "tokens": 2048, "draws": 4}
        small |= {"scales": _ladder(1e-3, 0.1, 8), "pca_scales": (0.02, 0.05, 0.2), "zipf": (0.0, 1.0, 2.0)}
        small |= {"betas": (0.0, 0.25), "neighbourhoods": 32, "neighbours": 64, "text_tokens": 4096}
        small |= {"loop_runs": 4, "loop_steps": 200, "pinned_types": 48, "pinned_runs": 3, "pinned_steps": 400}
        return cls(**({"preset": "tiny"} | small | changes))

    @property
    def reference(self) -> tuple[float, float]:
        """(Zipf exponent, β) used for the verdicts."""
        return REFERENCE_ZIPF, REFERENCE_BETA if self.beta is None else self.beta

    @property
    def all_betas(self) -> tuple[float, ...]:
        """The β of the curves, including that of the verdicts and the null, 0."""
        return tuple(sorted({0.0, *self.betas, self.reference[1]}))

    @property
    def all_zipf(self) -> tuple[float, ...]:
        return tuple(sorted({*self.zipf, REFERENCE_ZIPF}))


def curvature_config(
    *,
    preset: Annotated[str, Option("tiny (half a minute) or small (minutes); both on one core.")] = "tiny",
    **options: Any,
) -> CurvatureConfig:
    """The configuration from the options of the command."""
    check_known("preset", preset, PRESETS)
    return CurvatureConfig.tiny(**options) if preset == "tiny" else CurvatureConfig(**options)
