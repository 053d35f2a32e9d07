"""The rates of a machine: coefficients of the cost model by stage, how they are fitted, and the file that keeps them.

A stage is a piece of our own code (a forward pass, collecting statistics, a measured step, …). Its seconds are a sum of
features – amounts of work that a plan can count – each times a coefficient that is not negative.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from anisoscope.errors import AnisoscopeError, missing_path, unknown_name
from anisoscope.results.folder import replace_file

Features = Mapping[str, float]
SCHEMA = 1


@dataclass(frozen=True)
class Known:
    """Published figures of a device: products a second by type, bytes a second, bytes of memory, eigenvalue times.

    `reached` is the share of the published products that models reach.
    """

    title: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: float
    eigen: tuple[tuple[int, float], ...] = ((768, 0.007), (2048, 0.025), (4096, 0.1))
    launch: float = 6e-6
    reached: float = 0.4


def _known(title: str, half: float, single: float, double: float, *, bandwidth: float, memory: float) -> Known:
    flops = {"bfloat16": half, "float16": half, "float32": single, "float64": double}
    return Known(title, flops, bandwidth, memory)


KNOWN = {
    "a100": _known("A100 80 GB", 312e12, 19.5e12, 19.5e12, bandwidth=2.0e12, memory=80e9),
    "h100": _known("H100 SXM", 990e12, 67e12, 67e12, bandwidth=3.35e12, memory=80e9),
    "h200": _known("H200", 990e12, 67e12, 67e12, bandwidth=4.8e12, memory=141e9),
    "b200": _known("B200", 2250e12, 75e12, 37e12, bandwidth=8.0e12, memory=180e9),
    "l4": _known("L4", 121e12, 30e12, 0.5e12, bandwidth=0.3e12, memory=24e9),
    "rtx4090": _known("RTX 4090", 165e12, 82e12, 1.3e12, bandwidth=1.0e12, memory=24e9),
}
BESIDE = 256e9  # bytes of a host beside a device of published rates
USUAL = "h100"  # where a GPU is asked for that is not here, and nothing is said about it

# what a feature is made of: it decides how a coefficient of the host becomes one of a device with other rates
_MADE_OF = {
    "flops": "single",
    "products": "double",
    "pairs": "single",
    "cubes": "eigen",
    "head_cubes": "eigen",
    "bytes": "bytes",
    "row_values": "bytes",
    "values": "bytes",
    "fits": "single",
    "draws": "single",
    "sampled": "bytes",
    "parameters": "bytes",
    "operations": "launch",
}


@dataclass(frozen=True)
class Calibration:
    """Rates of one machine and device."""

    device: str  # cpu, cuda
    title: str  # in words
    threads: int
    stages: Mapping[str, Features] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)  # products by type, copy, disk; a second
    eigen: tuple[tuple[int, float], ...] = ()  # (width, seconds) of a float64 eigenvalue problem
    base: float = 0.0  # bytes of a process that has measured something small
    memory: float = 0.0  # bytes of the device
    host: float = 0.0  # bytes of the host
    versions: Mapping[str, str] = field(default_factory=dict)
    made: str = ""
    published: bool = False  # rates are published ones, not measured

    def seconds(self, stage: str, features: Features) -> float:
        """What a stage takes for this much work."""
        if stage not in self.stages:
            raise AnisoscopeError(
                f"the calibration ({self.title}) does not know {stage!r}; make it again with `anisoscope calibrate`."
            )
        parts = {name: self.stages[stage].get(name, 0.0) * amount for name, amount in features.items()}
        if self.device != "cpu" and "operations" in parts:  # launched while the device works on earlier ones
            launched = parts.pop("operations")
            return max(launched, sum(parts.values()))
        return sum(parts.values())

    def speed(self, dtype: str) -> float:
        """How many times quicker products of a type are than those of float32."""
        return self.rates.get(dtype, self.rates["float32"]) / self.rates["float32"]

    def with_stage(self, name: str, coefficients: Features) -> Calibration:
        return replace(self, stages={**self.stages, name: dict(coefficients)})

    def on(self, known: Known) -> Calibration:
        """Another device beside the same host: what is arithmetic there goes at its published rates."""
        width, seconds = known.eigen[-1]
        half = {name: rate * known.reached for name, rate in known.flops.items()}
        factor = {
            "single": self.rates["float32"] / half["float32"],
            "double": self.rates["float64"] / half["float64"],
            "bytes": self.rates["copy"] / (0.7 * known.bandwidth),
            "eigen": seconds / eigen_seconds(self.eigen, width),
        }
        host = ("start", "load", "claims", "page", "corpus", "records")
        stages = {
            name: dict(found) if name.partition(":")[0] in host else _moved(found, factor, known.launch)
            for name, found in self.stages.items()
        }
        rates = {**self.rates, **half, "copy": 0.7 * known.bandwidth}
        words: dict[str, Any] = {"eigen": known.eigen, "memory": known.memory, "host": BESIDE, "published": True}
        return replace(self, device="cuda", title=known.title, stages=stages, rates=rates, **words)


def _moved(found: Features, factor: Mapping[str, float], launch: float) -> dict[str, float]:
    kinds = {name: _MADE_OF.get(name, "") for name in found}
    return {
        name: launch if kinds[name] == "launch" else value * factor.get(kinds[name], 1.0)
        for name, value in found.items()
    }


def eigen_seconds(points: Sequence[tuple[int, float]], width: float) -> float:
    """Seconds of one eigenvalue problem, between and beyond the measured widths by their last slopes.

    >>> eigen_seconds([(256, 0.01), (512, 0.08)], 1024)
    0.64
    """
    (a, s), (b, t) = points[-2:]
    slope = np.log(t / s) / np.log(b / a)
    return round(float(t * (width / b) ** slope), 12)


def fitted(
    rows: Sequence[Features], seconds: Sequence[float], likely: Features | None = None, *, trust: float = 0.1
) -> dict[str, float]:
    """Coefficients that are not negative and give the seconds of all rows with the least relative error.

    Small sizes say little about what matters at large ones only. There `likely` coefficients, from plain rates of the
    machine, decide: each counts as a measurement with the weight `trust`.

    >>> fitted([{"a": 1, "b": 0}, {"a": 1, "b": 10}, {"a": 2, "b": 0}], [1.0, 6.0, 2.0])
    {'a': 1.0, 'b': 0.5}
    >>> fitted([{"a": 1, "b": 0}, {"a": 2, "b": 0}], [1.0, 2.0], likely={"b": 3.0})
    {'a': 1.0, 'b': 3.0}
    """
    from scipy.optimize import nnls

    names = list(dict.fromkeys([*(name for row in rows for name in row), *(likely or {})]))
    y = np.maximum(np.asarray(seconds, float), 1e-9)
    x = np.array([[row.get(name, 0.0) for name in names] for row in rows], float) / y[:, None]
    target = np.ones(len(y))
    for name, value in (likely or {}).items():
        x = np.vstack([x, [trust / value if each == name else 0.0 for each in names]])
        target = np.append(target, trust)
    size = np.abs(x).max(0)
    size[size == 0] = 1.0
    found = nnls(x / size, target)[0] / size
    return {name: float(f"{value:.6g}") for name, value in zip(names, found, strict=True)}


# -- the file ----------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """The user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anisoscope"


def calibration_path(device: str, title: str, threads: int) -> Path:
    """Where the calibration of this machine is kept, by what changes it: machine, device, threads, versions."""
    import torch

    from anisoscope import __version__

    told = [platform.node(), platform.machine(), os.cpu_count(), device, title, threads, torch.__version__, __version__]
    digest = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]
    return cache_folder() / f"calibration-{device}-{digest}.json"


def write_calibration(found: Calibration, path: Path) -> None:
    """Keep a calibration."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stamped = replace(found, made=found.made or datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    text = json.dumps({"schema": SCHEMA, **asdict(stamped)}, indent=1)
    replace_file(path, lambda p: p.write_text(text + "\n", encoding="utf-8"))


def read_calibration(path: str | Path) -> Calibration:
    """A calibration from its file."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise missing_path(path)
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if told.pop("schema") != SCHEMA:
            raise AnisoscopeError(f"{str(path)!r} is of another version; make it again with `anisoscope calibrate`.")
        told["eigen"] = tuple((int(a), float(b)) for a, b in told["eigen"])
        return Calibration(**told)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AnisoscopeError(
            f"{str(path)!r} is no calibration; expected a file written by `anisoscope calibrate --out FILE`."
        ) from error


def known_device(name: str) -> Known:
    """A device of published rates."""
    if name.lower() not in KNOWN:
        raise unknown_name("device", name, KNOWN)
    return KNOWN[name.lower()]
