"""What a job of the suite works with: sizes, rows, measurements in processes of their own, tables and bars."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from alone import Way
from sources import MEAN, Source, real_rows, saved

HERE = Path(__file__).parent
PEERS = HERE.parent / ".venv-peers" / "bin" / "python"
COLUMNS = ("tool", "seconds", "× ours", "peak MB", "relative error")
_FEWEST = 256  # rows, whatever the scale


@dataclass(frozen=True)
class Found:
    """What one way gave on one source, or why it gave nothing."""

    title: str
    seconds: float = float("nan")
    peak_mb: float = float("nan")
    timings: int = 0
    result: dict[str, Any] = field(default_factory=dict)
    missing: str = ""

    @property
    def value(self) -> float:
        return float(self.result.get("value", float("nan")))

    def array(self, name: str) -> Any:
        """An array that the way returned, or None."""
        import numpy as np

        return np.load(self.result[name]) if isinstance(self.result.get(name), str) else None


@dataclass
class Table:
    """One table of a job: rows of words and numbers under their columns."""

    title: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    columns: Sequence[str] = COLUMNS

    def add(self, found: Found, *, ours: Found, error: float | None = None, **more: Any) -> None:
        """A tool's row, beside ours."""
        if found.missing:
            self.rows.append({"tool": f"{found.title} – {found.missing}"})
            return
        row = {"tool": found.title, "seconds": found.seconds, "× ours": found.seconds / ours.seconds}
        self.rows.append(row | {"peak MB": found.peak_mb, "relative error": error} | more)


@dataclass
class Entry:
    """What a job has found out: an explanation, tables, and which bars were met."""

    title: str
    about: str
    tables: list[Table] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    series: list[dict[str, Any]] = field(default_factory=list)  # what the plots draw

    def check(self, what: str, value: float, *, most: float | None = None, least: float | None = None) -> None:
        """A bar: `value` at most or at least so much; without one, a figure to be shown. NaN: a peer was not there."""
        bar = f"≤ {most:g}" if most is not None else f"≥ {least:g}" if least is not None else ""
        met = value <= most if most is not None else value >= least if least is not None else None
        known = value == value
        self.checks.append({"what": what, "value": value if known else None, "bar": bar, "met": met if known else None})


@dataclass
class Bench:
    """One run of the suite."""

    folder: Path  # of scratch files
    out: Path  # where results.json goes
    device: str = "cpu"
    scale: float = 1.0
    threads: int = 2
    full: bool = False
    stretch: bool = False
    peers: bool = True
    serial: int = 0
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    def rows(self, n: int) -> int:
        return max(_FEWEST, int(n * self.scale))

    def cloud(self, n: int, d: int, *, mean: float = MEAN) -> Source:
        """A source of about n·scale rows; in a file on the host, made on the device elsewhere."""
        source = Source(self.rows(n), d, mean=mean)
        return source if self.cuda else saved(source, self.folder)

    @cached_property
    def real(self) -> Source | None:
        return real_rows(self.folder, tokens=self.rows(16_384)) if not self.cuda else None

    @cached_property
    def limits(self) -> dict[str, float]:
        """GEMM rates in GFLOP/s and bandwidths in GB/s of this machine, measured in this run."""
        side = 8192 if self.cuda else 2048 if self.scale > 0.01 else 256
        found = self.sweep("limits", "rates", [self.cloud(100_000, 768)], once=True, side=side)[0]
        return {name: round(float(value), 1) for name, value in found.result.items()}

    def time(self, job: str, way: str, source: Source, *, once: bool = False, **options: Any) -> Found:
        return self.sweep(job, way, [source], once=once, **options)[0]

    def sweep(
        self, job: str, way: str, sources: Sequence[Source], *, once: bool = False, limit: float = 900, **options: Any
    ) -> list[Found]:
        """One way on several sources, one after the other in one process of its own."""
        import importlib

        declared: Way = importlib.import_module(f"jobs.{job}").WAYS[way]
        if declared.peer and not self.peers:
            return [Found(declared.title, missing="left out")] * len(sources)
        self.serial += 1
        names = ("folder", "device", "threads", "serial")
        spec = {name: getattr(self, name) for name in names} | {"folder": str(self.folder), "once": once}
        spec |= {"job": job, "way": way, "options": options, "sources": [source.spec() for source in sources]}
        out = self._alone(declared, spec, limit)
        self.versions |= out.get("versions", {})
        if "missing" in out:
            print(f"  {declared.title}: {out['missing']}", flush=True)
            if not declared.peer and not out["missing"].startswith("not installed"):
                raise RuntimeError(f"{declared.title}: {out['missing']}")  # ours, or what it is held against
            return [Found(declared.title, missing=out["missing"])] * len(sources)
        found = [_found(declared.title, one) for one in out["runs"]]
        for one, source in zip(found, sources, strict=True):
            print(f"  {declared.title}, {source.n:,} × {source.d}: {one.seconds:.4g} s", flush=True)
        return found

    def _alone(self, way: Way, spec: dict[str, Any], limit: float) -> dict[str, Any]:
        path = self.folder / f"spec-{self.serial}.json"
        path.write_text(json.dumps(spec))
        python = str(PEERS) if way.peer and PEERS.exists() else sys.executable
        try:
            done = subprocess.run(
                [python, str(HERE / "alone.py"), str(path)],
                capture_output=True, text=True, env=self.environment(), timeout=limit,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"missing": f"took more than {limit:g} s"}
        if done.returncode:
            return {"missing": "failed: " + (done.stderr.strip().splitlines() or ["no message"])[-1][:200]}
        return dict(json.loads(done.stdout.splitlines()[-1]))

    def environment(self) -> dict[str, str]:
        """The same number of threads for everyone."""
        names = ("OMP", "MKL", "OPENBLAS", "NUMBA", "NUMEXPR")
        threads = {f"{name}_NUM_THREADS": str(self.threads) for name in names}
        paths = [str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
        more = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "ANISOSCOPE_BENCH": str(self.out)}
        return {**os.environ, **threads, **more, "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}

    def script(self, name: str, *arguments: str) -> None:
        """A benchmark that is a script of its own, and records its figures itself."""
        if not (HERE / name).exists():
            print(f"  {name} is not there: left out", flush=True)
            return
        print(f"  {name} {' '.join(arguments)}", flush=True)
        subprocess.run([sys.executable, str(HERE / name), *arguments], check=True, env=self.environment())


def _found(title: str, one: dict[str, Any]) -> Found:
    rest = {name: value for name, value in one.items() if name not in ("seconds", "peak_mb", "timings")}
    return Found(title, one["seconds"], one["peak_mb"], one["timings"], rest)


def relative(value: float, truth: float) -> float:
    return abs(value - truth) / abs(truth)


def size(source: Source) -> str:
    return f"{source.n:,} × {source.d}"
