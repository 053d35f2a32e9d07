"""The tables, the plots and the worked examples of docs/scaling.md, from results.json and the commands themselves.

    python benchmarks/scaling_page.py

The prose of the page is written by hand; only what stands between its markers is replaced.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from record import HERE, drawn, load

DOCS = HERE.parent / "docs"
FIGURE = "figures/cost_of_runs.svg"
MARKS = {name: (f"<!-- {name}: written by benchmarks/scaling_page.py -->", f"<!-- end of {name} -->")
         for name in ("check", "growth", "examples")}  # fmt: skip
_LARGE = "shape:layers=80,width=8192,heads=64,kv_heads=8,ffn=28672,vocab=128256"
_SMALL = "shape:layers=12,width=768,heads=12,vocab=50304"
EXAMPLES = (
    ("profile", _LARGE, "--tokens", "65536", "--device", "cuda", "--dtype", "bfloat16", "--calibration", "h200",
     "--dry-run"),
    ("sweep", _SMALL, "--preset", "shape", "--device", "cuda", "--dtype", "bfloat16", "--calibration", "h100",
     "--checkpoints", "1000", "--dry-run"),
)  # fmt: skip


def replaced(text: str, name: str, body: str) -> str:
    """The page with another body between two markers."""
    begin, end = MARKS[name]
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{body}\n\n{end}{after}"


def check(results: Mapping[str, Any]) -> str:
    """What was predicted beside what was measured."""
    found = results.get("Scaling")
    if not found:
        return "Not measured yet."
    lines: list[str] = []
    for table in found["tables"]:
        shown = [{**row, "command": f"`{row['command']}`"} for row in table["rows"]]
        lines += [f"**{table['title']}**", "", *drawn(table["columns"], shown), ""]
    cells = [{"what": c["what"], "reached": c["value"], "bar": c["bar"]} for c in found["checks"]]
    return "\n".join([*lines, *drawn(("what", "reached", "bar"), cells)])


def growth(results: Mapping[str, Any]) -> str:
    found = results.get("Growth of runs")
    if not found:
        return "Not measured yet."
    lines = drawn(found["tables"][0]["columns"], found["tables"][0]["rows"])
    return "\n".join([*lines, "", f"![Cost of runs against their sizes]({FIGURE})"])


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Seconds against every size on log-log axes, with the slope over the three largest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    lines = results["Growth of runs"]["series"]
    style = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "0"}
    with plt.rc_context(style):
        figure, panels = plt.subplots(2, 3, figsize=(8.4, 4.8))
        for panel, line in zip(panels.flat, lines, strict=False):
            panel.plot(line["at"], line["seconds"], "o-", color="#c1432e", lw=1.8, ms=4)
            top = line["seconds"][-1] / line["at"][-1] ** line["exponent"]
            fit = [top * at ** line["exponent"] for at in line["at"][-3:]]
            panel.plot(line["at"][-3:], fit, "--", color="#1f4e79", lw=1.0)
            panel.set_xscale("log")
            panel.set_yscale("log")
            low, high = min(line["seconds"]), max(line["seconds"])
            panel.set_ylim(low / 1.6, max(high, 4 * low) * 1.6)  # a flat line stays flat
            panel.set_title(f"{line['axis']}: slope {line['exponent']:.2f}", fontsize=9, loc="left")
            panel.set_xlabel(line["fixed"], fontsize=7)
            panel.xaxis.set_major_locator(FixedLocator(line["at"]))
            panel.xaxis.set_minor_locator(NullLocator())
            panel.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}" if v < 1e4 else f"{v / 1024:g}k"))
            panel.yaxis.set_minor_formatter(FuncFormatter(lambda v, _: ""))
            panel.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
            panel.grid(True, axis="y", which="both", lw=0.3, color="#cccccc")
        for panel in panels[:, 0]:
            panel.set_ylabel("processor seconds")
        figure.tight_layout(w_pad=1.5, h_pad=1.5)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def examples() -> str:
    """What the worked examples print."""
    env = {**os.environ, "COLUMNS": "80", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    parts: list[str] = []
    for words in EXAMPLES:
        done = subprocess.run([sys.executable, "-m", "anisoscope", *words], capture_output=True, text=True, env=env,
                              check=True)  # fmt: skip
        said = [line.rstrip() for line in (done.stdout + done.stderr).splitlines() if "calibration " not in line[:20]]
        parts += ["```text", f"$ anisoscope {' '.join(words)}", *said, "```", ""]
    return "\n".join(parts).strip()


def write_page(results: Mapping[str, Any], docs: Path = DOCS) -> None:
    page = docs / "scaling.md"
    text = page.read_text(encoding="utf-8")
    bodies = {"check": check(results), "growth": growth(results), "examples": examples()}
    for name, body in bodies.items():
        text = replaced(text, name, body)
    page.write_text(text, encoding="utf-8")
    if "Growth of runs" in results:
        draw(results, docs / FIGURE)


if __name__ == "__main__":
    write_page(load(HERE / "results.json"))
