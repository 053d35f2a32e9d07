"""Keeps the figures of every benchmark in results.json and shows them in RESULTS.md."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import psutil
    import torch
    import transformers

    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "processor": platform.machine(),
        "gpu": cuda,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def record(job: str, *, about: str, command: str, figures: Mapping[str, float], bars: Mapping[str, str]) -> None:
    """Put the figures of one job into results.json, write RESULTS.md again, and print them."""
    path = HERE / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    rounded = {name: round(value, 3) for name, value in figures.items()}
    results[job] = {"about": about, "command": command, "figures": rounded, "bars": dict(bars), "machine": machine()}
    path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    (HERE / "RESULTS.md").write_text(page(results), encoding="utf-8")
    print(json.dumps(rounded))


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """RESULTS.md."""
    lines = [
        "# Results",
        "",
        "Written by the benchmarks themselves; `make bench` measures again. Times are of one run on",
        "one machine: compare ratios, not seconds.",
        "",
    ]
    for job, result in sorted(results.items()):
        lines += [f"## {job}", "", result["about"], "", "```", result["command"], "```", ""]
        lines += ["| figure | value | bar |", "|---|---|---|"]
        lines += [f"| {name} | {value} | {result['bars'].get(name, '')} |" for name, value in result["figures"].items()]
        lines += ["", "Machine: " + ", ".join(f"{k} {v}" for k, v in result["machine"].items() if v), ""]
    return "\n".join(lines)
