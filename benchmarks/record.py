"""Keeps the figures of every benchmark in results.json and shows them in RESULTS.md.

Jobs that were not run again keep their entries. ANISOSCOPE_BENCH names another folder to write to.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
INTRODUCTION = """# Results

Written by the benchmarks themselves; `make bench` measures again, `make bench-gpu` on CUDA. Times are of one run on one
machine: compare ratios, not seconds. A measurement is the median of one to seven timings in a process of its own, after
a warm-up, with the same number of threads for every tool; peak memory is what was held at most beyond the loaded rows;
the relative error is against a float64 twin.
"""


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


def folder() -> Path:
    """Where results are kept."""
    return Path(os.environ.get("ANISOSCOPE_BENCH") or HERE)


def load(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def keep(entries: Mapping[str, Any], where: Path | None = None) -> dict[str, Any]:
    """Put entries beside those that are there, write both files again, and return all of them."""
    where = where or folder()
    where.mkdir(parents=True, exist_ok=True)
    results = load(where / "results.json") | dict(entries)
    (where / "results.json").write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (where / "RESULTS.md").write_text(page(results), encoding="utf-8")
    return results


def record(job: str, *, about: str, command: str, figures: Mapping[str, float], bars: Mapping[str, str]) -> None:
    """Put the figures of one job into results.json, write RESULTS.md again, and print them."""
    rounded = {name: round(value, 3) for name, value in figures.items()}
    keep({job: {"about": about, "command": command, "figures": rounded, "bars": dict(bars), "machine": machine()}})
    print(json.dumps(rounded))


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """RESULTS.md."""
    lines = [*INTRODUCTION.splitlines(), ""]
    for job, result in sorted(results.items()):
        lines += [f"## {job}", "", *" ".join(result["about"].split()).splitlines(), ""]
        lines += ["```", result["command"].strip(), "```", ""]
        for table in result.get("tables", []):
            lines += [f"**{table['title']}**", "", *drawn(table["columns"], table["rows"]), ""]
        if "figures" in result:
            cells = [{"figure": k, "value": v, "bar": result["bars"].get(k)} for k, v in result["figures"].items()]
            lines += [*drawn(("figure", "value", "bar"), cells), ""]
        if result.get("checks"):
            lines += [*drawn(("reached", "value", "bar", "met"), [checked(one) for one in result["checks"]]), ""]
        lines += [measured_on(result), ""]
    return "\n".join(lines)


def measured_on(result: Mapping[str, Any]) -> str:
    """The machine, its limits and the peers' versions in a line each."""
    parts = ["Machine: " + ", ".join(f"{k} {v}" for k, v in result["machine"].items() if v)]
    if result.get("limits"):
        unit = {"copy": "GB/s", "read": "GB/s"}
        rates = (f"{name} {shown(rate)} {unit.get(name, 'GFLOP/s')}" for name, rate in result["limits"].items())
        parts.append("limits: " + ", ".join(rates) + f"; {result['threads']} threads")
    if result.get("versions"):
        parts.append("peers: " + ", ".join(f"{k} {v}" for k, v in sorted(result["versions"].items())))
    return ". ".join(parts) + "."


def checked(check: Mapping[str, Any]) -> dict[str, Any]:
    value = "not measured" if check["value"] is None else check["value"]
    met = {True: "met", False: "**missed**", None: ""}[check["met"]]
    return {"reached": check["what"], "value": value, "bar": check["bar"], "met": met}


def drawn(columns: Any, rows: Any) -> list[str]:
    """A Markdown table; columns of numbers stand to the right."""
    rows = list(rows)
    marks = ["---:" if any(isinstance(row.get(name), int | float) for row in rows) else "---" for name in columns]
    lines = ["| " + " | ".join(columns) + " |", "|" + "|".join(marks) + "|"]
    return lines + ["| " + " | ".join(shown(row.get(name)) for name in columns) + " |" for row in rows]


def shown(value: Any) -> str:
    """A cell: three significant digits, small errors as powers of ten.

    >>> shown(0.012345), shown(1234.5), shown(3.2e-9), shown(None), shown("met")
    ('0.0123', '1,234', '3.2e-09', '', 'met')
    """
    if value is None or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    size = abs(value)
    if size >= 100 or value == 0 or isinstance(value, int):
        return f"{value:,.0f}"
    return f"{value:.1e}" if size < 1e-4 else f"{value:.3g}"
