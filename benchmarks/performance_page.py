"""The table and the two plots of docs/performance.md, from results.json.

    python benchmarks/performance_page.py

The prose of the page is written by hand; only what stands between its two markers is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from record import HERE, drawn, load, shown

DOCS = HERE.parent / "docs"
BEGIN, END = "<!-- table: written by benchmarks/performance_page.py -->", "<!-- end of table -->"
TITLES = {"spectral": "Spectral anisotropy", "average_cosine": "Average cosine", "two_nn": "TwoNN"}
AXES = {"n": "rows n", "d": "width d"}
OURS = "#c1432e"
OTHERS = ("#1f4e79", "#4f8a5b", "#8c6bb1", "#7f7f7f")


def rows_of(results: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """One row for each tool table: ours, the peers in multiples of it, the error and the peak."""
    for job, result in sorted(results.items()):
        for table in result.get("tables", []):
            tools = [row for row in table["rows"] if row.get("seconds") and "× ours" in row]
            if not tools:
                continue
            mine, *others = tools
            others = [row for row in others if not row["tool"].startswith(("anisoscope", "one read", "TF32"))]
            peers = ", ".join(f"{row['tool']} {shown(row['× ours'])}×" for row in others)
            # a fit has an error of its own, which is no distance from a twin
            error = mine.get("relative error")
            yield {"job": job, "rows": table["title"], "seconds": mine["seconds"], "peers take": peers,
                   "error": error, "peak MB": mine["peak MB"]}  # fmt: skip


def bars_of(results: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """One row for each bar."""
    for job, result in sorted(results.items()):
        for check in result.get("checks", []):
            if check["bar"] and check["value"] is not None:
                met = "met" if check["met"] else "**missed**"
                yield {"job": job, "what": check["what"], "reached": check["value"], "bar": check["bar"], "": met}
        for name, bar in result.get("bars", {}).items():
            yield {"job": job, "what": name, "reached": result["figures"][name], "bar": bar, "": ""}


def summary(results: Mapping[str, Any]) -> str:
    """What stands between the markers."""
    tools = list(rows_of(results))
    lines = [*drawn(("job", "rows", "seconds", "peers take", "error", "peak MB"), tools), ""] if tools else []
    lines += [*drawn(("job", "what", "reached", "bar", ""), bars_of(results))]
    for axis, name in AXES.items():
        if series_of(results, axis):
            lines += ["", f"![Cost against {name}](figures/cost_against_{axis}.svg)"]
    return "\n".join(lines)


def with_summary(text: str, results: Mapping[str, Any]) -> str:
    """The page with a new table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{summary(results)}\n\n{END}{after}"


def series_of(results: Mapping[str, Any], axis: str) -> dict[str, list[dict[str, Any]]]:
    """The curves of one plot, by job, ours first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in results.get("Growth", {}).get("series", []):
        if line["axis"] == axis:
            found.setdefault(line["job"], []).append(line)
    return {
        job: sorted(lines, key=lambda line: not line["tool"].startswith("anisoscope")) for job, lines in found.items()
    }


def draw(results: Mapping[str, Any], axis: str, path: Path) -> None:
    """Cost against one size, a panel for each job: seconds on log-log axes, ours in red."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    curves = series_of(results, axis)
    with plt.rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "0"}):
        figure, panels = plt.subplots(1, len(curves), figsize=(2.9 * len(curves), 2.9), squeeze=False)
        for panel, (job, lines) in zip(panels[0], curves.items(), strict=True):
            _panel(panel, lines, axis)
            panel.set_title(f"{TITLES.get(job, job)} ({lines[0]['fixed']})", fontsize=8, loc="left")
        panels[0][0].set_ylabel("seconds")
        figure.tight_layout(w_pad=1.5)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def apart(values: Iterable[float]) -> list[float]:
    """The largest value and those below it that leave room for their names on a log axis.

    >>> apart([100.0, 50.0, 45.0, 20.0])
    [20.0, 50.0, 100.0]
    """
    chosen: list[float] = []
    for value in sorted(set(values), reverse=True):
        if not chosen or chosen[-1] / value >= 1.8:
            chosen.append(value)
    return chosen[::-1]


def _panel(panel: Any, lines: list[dict[str, Any]], axis: str) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    for number, line in enumerate(lines):
        mine = line["tool"].startswith("anisoscope")
        colour = OURS if mine else OTHERS[(number - 1) % len(OTHERS)]
        where = "" if line["fixed"] == lines[0]["fixed"] else f", {line['fixed']}"
        label = f"{line['tool']} ({axis}$^{{{line['exponent']:.1f}}}${where})"
        panel.plot(line["at"], line["seconds"], "o-", color=colour, lw=2.0 if mine else 1.1, ms=4 if mine else 3,
                   label=label, zorder=3 if mine else 2)  # fmt: skip
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel(AXES[axis])
    panel.xaxis.set_major_locator(FixedLocator(apart([value for line in lines for value in line["at"]])))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:g}" if value < 1e4 else f"{value / 1e3:g}k")
    )
    panel.grid(True, axis="y", lw=0.3, color="#cccccc")
    panel.set_ylim(top=panel.get_ylim()[1] * 30)  # room for the names
    panel.legend(frameon=False, fontsize=6, loc="upper left", handlelength=1.5)


def write_page(results: Mapping[str, Any], docs: Path = DOCS) -> None:
    """The table and both plots again."""
    page = docs / "performance.md"
    page.write_text(with_summary(page.read_text(encoding="utf-8"), results), encoding="utf-8")
    for axis in AXES:
        if series_of(results, axis):
            (docs / "figures").mkdir(exist_ok=True)
            draw(results, axis, docs / "figures" / f"cost_against_{axis}.svg")


if __name__ == "__main__":
    write_page(load(HERE / "results.json"))
