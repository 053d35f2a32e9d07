"""What `--dry-run` says beside what runs take, at three sizes each of profile, train, sweep and a study.

None of these sizes is one that the calibration measures. Every run is a command in a process of its own on one thread;
seconds are those of the processor, so that other work on the machine does not count. Memory is the peak of the process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import Bench, Entry, Table

_GPT2 = "gpt2:n_layer={},n_embd={},n_head={},n_positions=256"
_PROFILES = ((2, 96, 4, 6144), (4, 192, 6, 16_384), (6, 384, 6, 32_768))
_TRAININGS = (
    ("--layers", "2", "--width", "48", "--steps", "60", "--monitor", "light", "--contexts", "24", "--context", "64"),
    ("--layers", "3", "--width", "80", "--steps", "150", "--contexts", "32", "--context", "64"),
    ("--layers", "4", "--width", "160", "--steps", "250", "--contexts", "40", "--context", "96", "--when", "log:5"),
)
_SWEEPS = (  # of the checkpoints of the first training, and of the second
    (0, ("--preset", "light", "--tokens", "2048")),
    (1, ("--preset", "attention", "--tokens", "4096")),
    (1, ("--tokens", "3072")),
)
_STUDIES = (
    ("--arms", "decoder", "--steps", "40", "--width", "48", "--layers", "2", "--metrics", "light", "--contexts", "24"),
    ("--arms", "decoder,encoder", "--steps", "60", "--width", "64", "--layers", "3", "--metrics", "light"),
    ("--arms", "decoder", "--steps", "80", "--width", "64", "--layers", "3", "--contexts", "32"),
)


def command(words: list[str], cache: Path) -> tuple[str, float, float]:
    """What a command prints, processor seconds of it and of what it starts, and its peak memory in MB."""
    extra = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1", "COLUMNS": "80"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        started = subprocess.Popen([sys.executable, "-m", "anisoscope", *words], stdout=out, stderr=err,
                                   env={**os.environ, **extra})  # fmt: skip
        _, status, used = os.wait4(started.pid, 0)
        started.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if started.returncode:
            raise RuntimeError(f"anisoscope {' '.join(words)}: {err.read()[-500:]}")
        return out.read(), used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6


def compared(words: list[str], out: Path, cache: Path) -> dict[str, Any]:
    """A row: predicted and measured seconds, memory and disk of one command."""
    said = json.loads(command([*words, "--dry-run", "--json"], cache)[0])
    _, seconds, peak = command([*words, "--out", str(out)], cache)
    written = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
    shown = [Path(word).name if word.startswith("/") else word for word in words]
    row = {"command": " ".join(shown), "predicted s": said["seconds"], "measured s": seconds}
    row |= {"ratio": said["seconds"] / seconds, "predicted MB": said["host"] / 1e6, "peak MB": peak}
    return row | {"predicted disk MB": said["disk"] / 1e6, "disk MB": written / 1e6}


def cases(folder: Path) -> list[tuple[str, list[str]]]:
    """Every command, with the kind of run that it is; sweeps read what trainings before them wrote."""
    found = [
        ("profile", ["profile", _GPT2.format(layers, width, heads), "--random-init", "--tokens", str(tokens)])
        for layers, width, heads, tokens in _PROFILES
    ]
    found += [("train", ["train", *words]) for words in _TRAININGS]
    found += [("sweep", ["sweep", str(folder / f"train-{at}" / "checkpoints"), *words]) for at, words in _SWEEPS]
    return found + [("study", ["study", "revisiting", *words]) for words in _STUDIES]


def run(bench: Bench) -> Entry:
    entry = Entry("Scaling", __doc__ or "")
    cache, folder = bench.folder / "cache", bench.folder
    command(["calibrate"], cache)
    names = ("command", "predicted s", "measured s", "ratio", "predicted MB", "peak MB", "predicted disk MB", "disk MB")
    tables: dict[str, Table] = {}
    for kind, words in cases(folder):
        table = tables.setdefault(kind, Table(f"{kind}, predicted and measured", columns=names))
        out = folder / f"{kind}-{len(table.rows)}"
        shutil.rmtree(out, ignore_errors=True)
        row = compared(words, out, cache)
        print("   ", row["command"], f"{row['predicted s']:.1f} {row['measured s']:.1f}", flush=True)
        table.rows.append(row)
    for kind, table in tables.items():
        entry.tables.append(table)
        worst = max(table.rows, key=lambda row: max(row["ratio"], 1 / row["ratio"]))
        entry.check(f"predicted over measured seconds of {kind}, the worst off by", abs(worst["ratio"] - 1), most=0.3)
        heavy = max(abs(row["predicted MB"] / row["peak MB"] - 1) for row in table.rows)
        entry.check(f"memory of {kind} off by, the worst", heavy, most=0.15)
    return entry
