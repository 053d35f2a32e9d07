"""Runs that never were: tables of the shape real models give, with everything that can go wrong in them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from anisoscope.results.query import Table
from anisoscope.view.subjects import RunView

HOSTILE = "<script>alert('x')</script>&\"[bold]$\\frac$"
FOLDS = 8


@dataclass(frozen=True)
class Fake:
    """A model that never was: its name, role, depth and width."""

    name: str
    role: str
    blocks: int
    width: int = 384
    heads: int = 6
    first_out: bool = False
    stack: str = "single"


@dataclass(frozen=True)
class Declared:
    """A metric's declaration, as the registry gives it."""

    name: str
    title: str
    formula: str = ""
    reference: str = ""
    description: str = ""
    bounds: tuple[float | None, float | None] | None = None
    default: bool = True


CATALOGUE = {
    m.name: m
    for m in (
        Declared("average_cosine", "Average cosine", "A = (‖Σ hᵢ/‖hᵢ‖‖² − n) / (n(n−1))", "Ethayarajh 2019",
                 "Mean cosine over all pairs of rows; 0 = directions spread evenly.", (-1, 1)),
        Declared("svd_ratio", "SVD ratio", "σ₁ / Σσ, centred", "Razzhigaev et al. 2023",
                 "Weight of the largest singular value.", (0, 1)),
        Declared("two_nn", "Intrinsic dimension (TwoNN)", "slope of −log(1−F) on log(r₂/r₁)", "Facco et al. 2017",
                 "Dimension from the ratio of the two nearest distances.", (0, None)),
        Declared("participation_ratio", "Participation ratio", "(Σλ)² / Σλ²", "",
                 "How many directions share the variance.", (1, None)),
        Declared("iso_score", "IsoScore", "(PR − 1)/(d − 1)", "Rudman et al. 2022", "", (0, 1)),
        Declared("drift", "Drift", "‖mean(h)‖", "Godey et al. 2024", "Norm of the common mean.", (0, None)),
        Declared("attention_entropy", "Attention entropy", "H / log m", "", "1 = even attention.", (0, 1)),
    )
}  # fmt: skip


def curves(fake: Fake, layer: int) -> dict[str, float]:
    """Values of the shape real models have: encoders bend up, decoders swell in the middle."""
    t = layer / fake.blocks
    swell = math.sin(math.pi * t) * (1 - fake.blocks % 7 / 20)
    decoder = fake.role == "decoder"
    cosine = 0.08 + 0.5 * swell if decoder else 0.07 + 0.24 * t**1.7
    ratio = 0.05 + (0.22 * swell if decoder else 0.06 * t)
    rank = fake.width * (0.42 - 0.25 * swell) if decoder else fake.width * (0.4 - 0.12 * t)
    return {
        "average_cosine": cosine,
        "svd_ratio": ratio,
        "svd_ratio_squared": min(0.95, ratio * 2.2),
        "two_nn": 9 + 7 * swell if decoder else 11 + 4 * t,
        "levina_bickel": 10 + 6 * swell,
        "participation_ratio": rank * 0.4,
        "iso_score": (rank * 0.4 - 1) / (fake.width - 1),
        "effective_rank": rank,
        "stable_rank": 1 / min(0.95, ratio * 2.2),
        "drift": 2.0 + (300 * swell if decoder else 6 * t),
        "mean_norm": 11.0 + (320 * swell if decoder else 3 * t),
        "hubness": 1.2 + 2 * t,
        "rogue_share": 0.1 + 0.5 * t,
    }


class Scribe:
    """Writes rows of the long table with intervals and replicates around given values."""

    def __init__(self, seed: int = 0, contexts: int = 128) -> None:
        self.random = np.random.default_rng(seed)
        self.contexts = contexts
        self.rows: list[dict[str, Any]] = []

    def row(self, fake: Fake, layer: int, kind: str, metric: str, about: float, **more: Any) -> None:
        sd = abs(about) * 0.02 + 1e-3
        value = about + self.random.normal() * sd * 0.5
        folds = value + self.random.normal(size=FOLDS) * sd / math.sqrt(FOLDS - 1)
        base = {"run": "r", "model": fake.name, "revision": "main", "data": "embedded", "stack": fake.stack}
        base |= {
            "layer": layer,
            "depth": layer / fake.blocks,
            "kind": kind,
            "group": "",
            "metric": metric,
            "variant": "",
        }
        base |= {"value": value, "low": value - 2 * sd, "high": value + 2 * sd, "sd": sd, "n": 65536, "seed": 0}
        base |= {"contexts": self.contexts, "dropped": 12, "note": "", "replicates": folds.tolist()}
        self.rows.append(base | more)

    def model(self, fake: Fake, *, groups: tuple[str, ...] = (), heads: bool = False, gaps: bool = False) -> None:
        sites = [(0, "embed"), *((n, "resid") for n in range(1, fake.blocks + 1)), (fake.blocks, "final")]
        for layer, kind in sites:
            for metric, value in curves(fake, layer).items():
                value = value * 0.45 if kind == "final" else value
                self.row(fake, layer, kind, metric, value)
                if (
                    fake.first_out
                    and kind == "resid"
                    and metric in ("average_cosine", "svd_ratio", "drift", "mean_norm")
                ):
                    self.row(fake, layer, kind, metric, value * 0.6, variant="first=out")
                for i, group in enumerate(groups):
                    if metric in ("average_cosine", "two_nn"):
                        self.row(fake, layer, kind, metric, value * (1 + 0.1 * i), group=group, contexts=20)
            self.row(fake, layer, kind, "average_cosine", 0.001, variant="centred=1")
            for scale in (1, 2, 4):
                self.row(fake, layer, kind, "gride", 10 + scale + layer / 10, variant=f"scale={scale}")
        if gaps:
            note = "371 of 4,096 rows differ, at least 1,024 are needed: not computed"
            self.row(fake, 0, "embed", "two_nn_mle", 0.0, value=math.nan, low=None, high=None, note=note)
            self.row(fake, 1, "resid", "two_nn_mle", 9.0, note="212 duplicates removed")
            self.row(
                fake, 2, "resid", "two_nn_mle", 9.0, value=math.inf, low=math.nan, high=math.inf, note="no neighbours"
            )
        if heads:
            self.heads(fake)

    def heads(self, fake: Fake) -> None:
        for layer in range(1, fake.blocks + 1):
            for head in range(fake.heads):
                u = self.random.beta(2, 2 + layer / 3)
                for metric, value in (
                    ("attention_entropy", 1 - u),
                    ("attention_sharpness", u),
                    ("first_key_mass", u * 0.8),
                ):
                    self.row(fake, layer, "scores", metric, value, head=head)
                self.row(fake, layer, "query", "average_cosine", 0.2 + 0.5 * u, head=head)


def about(fakes: list[Fake], **more: Any) -> dict[str, Any]:
    models = [
        {"name": f.name, "revision": "main", "fingerprint": "9f2c41d0", "parameters": 22_713_216, "layers": f.blocks,
         "width": f.width, "architecture": "BertModel", "type": f.role, "notes": [], "rows": 65536, "contexts": 128,
         "dropped": {"padding": 1024, "non_finite": 3, "special": 256}}
        for f in fakes
    ]  # fmt: skip
    base = {"schema": 1, "anisoscope": "0.1.0", "command": ["anisoscope", "profile", *(f.name for f in fakes)]}
    base |= {
        "config": {"tokens": 65536, "context": 512, "pool": "none"},
        "versions": {"python": "3.11.9", "torch": "2.13"},
    }
    base |= {"seed": 0, "device": "cpu", "status": "complete", "started": "2026-03-01T10:00:00", "wall_seconds": 12.3}
    base |= {"peak_memory_mb": 812, "memory_estimate_mb": 700, "models": models, "warnings": []}
    base |= {"data": {"name": "embedded", "fingerprint": "77aa", "contexts": 128, "tokens": 65536}}
    return base | more


def spectra(fakes: list[Fake]) -> dict[str, np.ndarray]:
    found = {}
    for fake in fakes:
        prefix = f"{fake.name}/" if len(fakes) > 1 else ""
        for layer in range(fake.blocks + 1):
            values = np.arange(1, fake.width + 1) ** -(0.6 + 0.9 * layer / fake.blocks)
            found[f"{prefix}{layer}.{'resid' if layer else 'embed'}"] = values
        found[f"{prefix}{fake.blocks}.final"] = np.arange(1, fake.width + 1) ** -0.5
    return found


def cka(fakes: list[Fake]) -> dict[str, tuple[list[str], np.ndarray]]:
    found = {}
    for fake in fakes:
        labels = ["0.embed", *(f"{n}.resid" for n in range(1, fake.blocks + 1)), f"{fake.blocks}.final"]
        at = np.arange(len(labels))
        found[fake.name] = (labels, np.exp(-np.abs(at[:, None] - at) / len(at) * 2))
    return found


def run_view(fakes: list[Fake], *, rich: bool = True, path: str = "runs/demo", **more: Any) -> RunView:
    scribe = Scribe()
    for i, fake in enumerate(fakes):
        scribe.model(fake, groups=("news", "code") if rich and i == 0 else (), heads=rich, gaps=rich)
    record = about(fakes, **more)
    return RunView(Table.from_records(scribe.rows, record), record, spectra(fakes), cka(fakes) if rich else None, path)


ENCODER = Fake("all-MiniLM-L6-v2", "encoder", 6)
DECODER = Fake("org/SmolLM2-135M", "decoder", 30, width=576, heads=9, first_out=True)
NASTY = Fake(HOSTILE, "decoder", 3, width=32, heads=2, first_out=True)
