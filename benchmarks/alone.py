"""One measurement in a process of its own: time, peak memory and result of one way of doing a job.

    python benchmarks/alone.py spec.json

Runs in our environment or in that of the peers, so nothing but torch and NumPy is imported here. The last line that is
printed is JSON: one entry for each of the sources.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sources import Source
from torch import Tensor

_WARM, _WARM_ON_DEVICE = 512, 16384  # rows of the warm-up: imports, thread pools and kernels, not the job itself
_SHORTEST = 0.05  # seconds of one timing; quicker calls are repeated within it


@dataclass(frozen=True)
class Way:
    """One tool's way of doing a job: a function of the rows, and the package that it comes from."""

    function: Callable[..., Any]
    title: str
    package: str = ""  # of a peer; it is looked for in the peers' environment

    @property
    def peer(self) -> bool:
        return bool(self.package)


class Peak:
    """The most memory held since the start, over what was held then, in MB."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = float(torch.cuda.memory_allocated())
            return
        with contextlib.suppress(OSError):  # Linux: count anew, else what was held before would hide what comes
            Path("/proc/self/clear_refs").write_text("5")
        self.before = self._highest()

    def _highest(self) -> float:
        status = Path("/proc/self/status")
        if status.exists():  # ru_maxrss would begin with what the parent held
            line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
            return float(line.split()[1]) * 1024
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

    def mb(self) -> float:
        now = float(torch.cuda.max_memory_allocated()) if self.cuda else self._highest()
        return max(0.0, now - self.before) / 1e6


def repeats_for(seconds: float) -> int:
    """How often a call of this cost is timed: seven times where it is cheap, once where it is dear."""
    return 7 if seconds < 0.5 else 3 if seconds < 5 else 1


def timed(call: Callable[[], Any], device: str) -> tuple[Any, float, int]:
    """The result, the median seconds of a call, and of how many timings."""

    def once(number: int) -> tuple[Any, float]:
        start = time.perf_counter()
        for _ in range(number):
            found = call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return found, (time.perf_counter() - start) / number

    found, first = once(1)
    count, number = repeats_for(first), max(1, round(_SHORTEST / max(first, 1e-6)))
    times = [first] if count == 1 else [once(min(number, 1000))[1] for _ in range(count)]
    return found, statistics.median(times), count


def plain(found: Any, folder: Path, name: str) -> dict[str, Any]:
    """A result as JSON: numbers as they are, arrays as files."""
    out: dict[str, Any] = {}
    for key, value in (found if isinstance(found, dict) else {"value": found}).items():
        if isinstance(value, Tensor | np.ndarray):
            path = folder / f"{name}-{key}.npy"
            np.save(path, value.detach().cpu().numpy() if isinstance(value, Tensor) else value)
            out[key] = str(path)
        else:
            out[key] = float(value)
    return out


def measured(way: Way, source: Source, spec: dict[str, Any], *, number: int) -> dict[str, Any]:
    """Time, memory and result on one source."""
    device, options = spec["device"], spec["options"]
    x = source.load(device)
    if not spec["once"]:
        enough = _WARM_ON_DEVICE if device.startswith("cuda") else _WARM  # kernels are made for many rows only
        way.function(x[: max(enough, options.get("rank", 0))], **options)
    peak = Peak(device)
    if spec["once"]:  # a way that takes its own times
        start = time.perf_counter()
        found, seconds, count = way.function(x, **options), time.perf_counter() - start, 1
    else:
        found, seconds, count = timed(lambda: way.function(x, **options), device)
    mb = peak.mb()
    name = f"{spec['job']}-{spec['way']}-{spec['serial']}-{number}"
    return {"seconds": seconds, "timings": count, "peak_mb": mb, **plain(found, Path(spec["folder"]), name)}


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def main(path: str) -> None:
    warnings.simplefilter("ignore")
    spec = json.loads(Path(path).read_text())
    torch.set_num_threads(spec["threads"])
    way: Way = importlib.import_module(f"jobs.{spec['job']}").WAYS[spec["way"]]
    try:
        runs = [measured(way, Source(**one), spec, number=i) for i, one in enumerate(spec["sources"])]
        out = {"runs": runs, "versions": {way.package: version(way.package)} if way.package else {}}
    except ImportError as error:
        out = {"missing": f"not installed: {error}"}
    print(json.dumps(out))


if __name__ == "__main__":
    sys.modules["alone"] = sys.modules["__main__"]  # jobs import Way from here: one class, not two
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    main(sys.argv[1])
