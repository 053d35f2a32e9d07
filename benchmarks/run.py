"""The benchmark suite: each job beside the tools that a user would pick instead, and beside the machine's limits.

    python benchmarks/run.py                         # every job of the host, as `make bench`
    python benchmarks/run.py spectral two_nn         # some
    python benchmarks/run.py --scale 0.05 two_nn     # small: written to .bench/, not to benchmarks/
    python benchmarks/run.py --device cuda --out DIR # on a GPU, as `make bench-gpu`
    python benchmarks/run.py --merge DIR/results.json

Writes results.json and RESULTS.md, and the table and the plots of docs/performance.md and docs/scaling.md.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import record
from bench import HERE, Bench, Entry
from jobs import CPU, CUDA


def options(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", help=f"some of {', '.join(dict.fromkeys(CPU + CUDA))}; default: all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of rows; below 1 to try the suite")
    parser.add_argument("--threads", type=int, help="of the host; default: 2, and beside a GPU all of them")
    parser.add_argument("--out", type=Path, help="folder of results.json (default: benchmarks, or .bench if scaled)")
    parser.add_argument("--merge", type=Path, help="take the entries of another results.json, and measure nothing")
    parser.add_argument("--full", action="store_true", help="the n² cosines on all rows")
    parser.add_argument("--stretch", action="store_true", help="neighbours of 1,000,000 × 4,096 on a GPU")
    parser.add_argument("--no-peers", action="store_true", help="without the tools of other environments")
    return parser.parse_args(words)


def entry_of(entry: Entry, bench: Bench, chosen: argparse.Namespace, job: str) -> dict[str, Any]:
    """What results.json keeps of a job."""
    words = ["--device", bench.device] if bench.cuda else []
    words += ["--scale", f"{bench.scale:g}"] if bench.scale != 1 else []
    words += ["--threads", str(bench.threads)] if chosen.threads else []
    words += ["--full"] * chosen.full + ["--stretch"] * chosen.stretch
    found = asdict(entry)
    return {
        "about": found["about"],
        "command": " ".join(["python benchmarks/run.py", job, *words]),
        "tables": found["tables"],
        "checks": found["checks"],
        "series": found["series"],
        "machine": record.machine(),
        "limits": bench.limits,
        "threads": bench.threads,
        "versions": dict(bench.versions),
    }


def run_job(job: str, bench: Bench, chosen: argparse.Namespace) -> bool:
    """Run one job and keep what it found; a failure is told, and the others go on."""
    if job not in CPU + CUDA:
        print(f"unknown job {job!r}; expected some of {', '.join(dict.fromkeys(CPU + CUDA))}.", flush=True)
        return False
    start, bench.versions = time.perf_counter(), {}
    print(f"{job} …", flush=True)
    try:
        entry = importlib.import_module(f"jobs.{job}").run(bench)
        if entry is not None:
            title = entry.title + (", GPU" if bench.cuda else "")
            record.keep({title: entry_of(entry, bench, chosen, job)}, bench.out)
            for check in entry.checks:
                print("   ", " | ".join(record.shown(cell) for cell in record.checked(check).values()), flush=True)
    except Exception:
        traceback.print_exc()
        return False
    print(f"{job}: {time.perf_counter() - start:.0f} s", flush=True)
    return True


def jobs_of(chosen: argparse.Namespace) -> list[str]:
    """The jobs that are asked for, else all of the device."""
    return list(chosen.jobs or (CPU if chosen.device == "cpu" else CUDA))


def threads_of(chosen: argparse.Namespace) -> int:
    """Two cores are what the bars are for; beside a GPU the host has all of its own."""
    return chosen.threads or (2 if chosen.device == "cpu" else os.cpu_count() or 1)


def main(words: list[str] | None = None) -> int:
    chosen = options(words)
    where = chosen.out or (HERE if chosen.scale == 1 else HERE.parent / ".bench")
    if chosen.merge:
        record.keep(record.load(chosen.merge), where)
    else:
        where.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(
                Path(folder), where.resolve(), chosen.device, chosen.scale, threads_of(chosen), chosen.full,
                chosen.stretch,
                peers=not chosen.no_peers,
            )  # fmt: skip
            failed = [job for job in jobs_of(chosen) if not run_job(job, bench, chosen)]
        if failed:
            print(f"failed: {', '.join(failed)}", flush=True)
            return 1
    if where == HERE:
        from performance_page import write_page

        write_page(record.load(where / "results.json"))
        if not chosen.merge and {"run_growth", "scaling"} & set(jobs_of(chosen)):
            import scaling_page

            scaling_page.write_page(record.load(where / "results.json"))
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    raise SystemExit(main())
