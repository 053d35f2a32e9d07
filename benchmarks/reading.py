"""Reading and showing: a table of a million rows on the terminal and on a page, a live update, and wide arrays.

    python benchmarks/reading.py

Seconds are of processor time in processes of their own, memory is what a process held at most beyond an import of the
package; the bare reading of the same file by pyarrow stands beside them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import record

ROWS = 1_000_000
WIDE = (3_000, 20_000)
_IMPORT = "import anisoscope.cli, anisoscope.commands.profile, anisoscope.measurement.profile, transformers"
_COMMAND = "import sys; sys.argv = ['anisoscope', {words}]; from anisoscope.cli import main; main()"
_BARE = "import pyarrow.parquet as pq; pq.read_table({run!r} + '/table.parquet')"
_PAGE = """
from pathlib import Path
import time, anisoscope.commands.drawing
from anisoscope.serve.run import draw_page
start = time.process_time()
draw_page([Path({run!r})], True).document("v")
print("seconds", time.process_time() - start, file=__import__("sys").stderr)
"""


def command(*words: str) -> str:
    return _COMMAND.format(words=", ".join(map(repr, words)))


def spent(code: str) -> tuple[float, float]:
    """Seconds of processor time (those that the code tells, if it does) and MiB at most of a process."""
    # the peak of the address space: that of getrusage would count what the parent held when it started the process
    ended = "import resource, sys; u = resource.getrusage(resource.RUSAGE_SELF)\n"
    ended += "peak = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
    ended += "print('spent', u.ru_utime + u.ru_stime, int(peak) / 1024, file=sys.stderr)"
    whole = f"try:\n    exec({code!r})\nexcept SystemExit:\n    pass\n{ended}"
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=True)
    said = {
        line.split()[0]: line.split()[1:] for line in done.stderr.splitlines() if line.startswith(("spent", "seconds"))
    }
    seconds = float(said["seconds"][0]) if "seconds" in said else float(said["spent"][0])
    return seconds, float(said["spent"][1])


def large_run(folder: Path) -> str:
    """A run of a million rows: 4 layers, 5 metrics and many steps, with intervals and replicates."""
    from anisoscope.results.folder import RunFolder
    from anisoscope.results.query import Table

    metrics = ("gradient_enrichment", "gradient_energy", "average_cosine", "two_nn", "svd_ratio")
    places = [(metric, layer) for metric in metrics for layer in range(1, 5)]
    steps = ROWS // len(places)
    generator = np.random.default_rng(0)
    value = generator.random(ROWS)
    columns: dict[str, Any] = {"schema": np.ones(ROWS, np.int32), "step": np.repeat(np.arange(steps), len(places))}
    columns |= {
        "layer": np.tile([layer for _, layer in places], steps),
        "depth": np.tile([p[1] / 4 for p in places], steps),
    }
    columns |= {
        "metric": [metric for metric, _ in places] * steps,
        "value": value,
        "low": value - 0.1,
        "high": value + 0.1,
    }
    columns |= {"model": ["large"] * ROWS, "stack": ["single"] * ROWS, "kind": ["resid"] * ROWS, "group": [""] * ROWS}
    variants = ["proxy=semi_nmf;rank=16" if metric.startswith("gradient") else "" for metric, _ in places]
    columns |= {"variant": variants * steps, "replicates": list(np.repeat(value[:, None], 8, 1))}
    run = RunFolder(folder)
    run.write_about(
        {"status": "complete", "kind": "training", "warnings": [], "models": [{"name": "large", "layers": 4}]}
    )
    run.write_table(Table.from_columns(columns, ROWS))
    return str(folder)


def main() -> None:
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        run = large_run(Path(place) / "run")
        start = spent("import anisoscope.cli")[0]
        figures["bare reading by pyarrow, s"] = spent(_BARE.format(run=run))[0]
        for form in ("table", "csv", "json"):
            seconds, memory = spent(command("show", run, "--format", form))
            figures |= {f"show --format {form}, s": seconds - start, f"show --format {form}, MiB": memory}
        figures["first page of serve, s"] = spent(_PAGE.format(run=run))[0]
        held = spent(_IMPORT)[1]
        for kind in ("float32", "float64"):
            rows = Path(place) / f"{kind}.npy"
            np.save(rows, np.random.default_rng(0).standard_normal(WIDE).astype(kind))
            memory = spent(command("profile", str(rows), "--out", str(Path(place) / kind)))[1]
            figures[f"profile of 3,000 × 20,000 {kind}, memory over its data"] = (
                (memory - held) * 2**20 / rows.stat().st_size
            )
            estimate = json.loads((Path(place) / kind / "run.json").read_text())["memory_estimate_mb"]
            figures[f"its memory estimate over the peak, {kind}"] = estimate / memory
    bars = {"first page of serve, s": "≤ 3"}
    bars |= {f"profile of 3,000 × 20,000 {kind}, memory over its data": "≤ 3" for kind in ("float32", "float64")}
    bars |= {f"its memory estimate over the peak, {kind}": "0.75 to 1.25" for kind in ("float32", "float64")}
    record.record(
        "reading",
        about=(__doc__ or "").partition("\n")[0],
        command="python benchmarks/reading.py",
        figures=figures,
        bars=bars,
    )


if __name__ == "__main__":
    main()
