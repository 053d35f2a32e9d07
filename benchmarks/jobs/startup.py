"""What it costs to begin: the command's help, and the import of the package beyond torch itself; medians of runs."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from bench import Bench, Entry, Table

_IMPORT = "import time; {first}; start = time.perf_counter(); {second}; print(time.perf_counter() - start)"


def runs_of(bench: Bench) -> int:
    return 7 if bench.scale == 1 else 1


def imported(bench: Bench, first: str, second: str) -> float:
    """Median seconds of an import in a fresh interpreter, after another one."""
    code = _IMPORT.format(first=first, second=second)
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True, env=bench.environment()).stdout
            for _ in range(runs_of(bench))]  # fmt: skip
    return statistics.median(map(float, runs))


def helped(bench: Bench) -> float:
    """Median wall seconds of `anisoscope --help`."""
    times = []
    for _ in range(runs_of(bench)):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "anisoscope", "--help"], capture_output=True, check=True,
                       env=bench.environment())  # fmt: skip
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def run(bench: Bench) -> Entry:
    entry = Entry("Start-up", __doc__ or "")
    found = {
        "anisoscope --help": helped(bench),
        "import torch": imported(bench, "pass", "import torch"),
        "import anisoscope, after torch": imported(bench, "import torch", "import anisoscope"),
        "import anisoscope and one metric, after torch": imported(
            bench, "import torch", "import anisoscope; anisoscope.svd_ratio"
        ),
    }
    table = Table("A fresh interpreter", columns=("what", "seconds"))
    table.rows = [{"what": name, "seconds": seconds} for name, seconds in found.items()]
    entry.tables.append(table)
    entry.check("seconds of anisoscope --help", found["anisoscope --help"], most=0.5)
    entry.check("seconds of import anisoscope beyond torch", found["import anisoscope, after torch"], most=0.2)
    return entry
