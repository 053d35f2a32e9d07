"""What `--dry-run` and `calibrate` print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Column as RichColumn
from rich.text import Text

from anisoscope.view.terminal import screen
from anisoscope.view.terminal.screen import bare_table, print_line, print_note, print_table
from anisoscope.view.words import sized, spoken

SHOWN = 12  # metrics of a pilot


def print_plan(found: Mapping[str, Any]) -> None:
    """Print a plan: the three amounts, what they are of, and what the time goes into."""
    print_line(f"{found['plan']}: nothing is run", style="bold")
    table = bare_table("", RichColumn("", overflow="fold"))
    device = found["calibration"]["title"]
    table.add_row("time", Text(f"about {spoken(found['seconds'])}"))
    table.add_row("memory", Text(_memory(found, device)))
    table.add_row("disk", Text(f"about {sized(found['disk'])}"))
    for name, words in found["facts"].items():
        table.add_row(screen.elided(name, 24), Text(words))
    print_table(table)
    _print_parts(found["parts"], found["seconds"])
    if found.get("pilot"):
        _print_pilot(found["pilot"])
    for note in found["notes"]:
        print_note(f"note: {note}", style="yellow")
    print_note(_source(found["calibration"]))


def _memory(found: Mapping[str, Any], device: str) -> str:
    host = f"about {sized(found['host'])} of the host"
    return f"{host}, {sized(found['device'])} of the device ({device})" if found["device"] else host


def _source(about: Mapping[str, Any]) -> str:
    """What the plan rests on."""
    if about["published"]:
        return (
            f"from published rates of one {about['title']} beside this host: a rough figure; `anisoscope calibrate "
            "--out FILE` on that machine, and --calibration FILE here, make it within 30 %"
        )
    made = f", {about['made'][:10]}" if about["made"] else ""
    return f"from the calibration of {about['title']}{made}; within 30 % on a machine that does nothing else"


def _print_parts(parts: Mapping[str, float], total: float) -> None:
    """What the time goes into, most first; what is below a hundredth is left out."""
    table = bare_table("time goes into", RichColumn("", justify="right"), RichColumn("share", justify="right"))
    for name, seconds in sorted(parts.items(), key=lambda part: -part[1]):
        if seconds >= 0.01 * total:
            table.add_row(name, spoken(seconds), f"{seconds / total:.0%}")
    print_line("")
    print_table(table)


def _print_pilot(found: Mapping[str, Any]) -> None:
    """How wide intervals are after a pilot, and how many contexts a wanted width needs."""
    wanted = found["wanted"]
    print_line("")
    told = f"contexts until the 95 % half-width is {wanted}, at the median site and at the worst:"
    print_line(f"pilot of {found['contexts']} contexts; {told}")
    numbers = [RichColumn(name, justify="right", no_wrap=True) for name in ("value", "half-width", "contexts", "worst")]
    table = bare_table("metric", *numbers)
    for row in found["metrics"][:SHOWN]:
        cells = (f"{row['value']:.3g}", f"{row['half_width']:.2g}", f"{row['contexts']:,}", f"{row['worst']:,}")
        table.add_row(screen.elided(row["metric"], 34), *cells)
    print_table(table)
    if (rest := len(found["metrics"]) - SHOWN) > 0:
        print_line(f"and {rest} metrics that need fewer; --json has them")
    print_line(found["sentence"])


def print_calibration(found: Mapping[str, Any]) -> None:
    """Print the plain rates of a calibration."""
    table = bare_table(f"calibration of {found['title']}", RichColumn("", justify="right"))
    for name, rate in found["rates"].items():
        unit = f"{sized(rate)}/s" if name in ("copy", "disk") else f"{rate / 1e9:,.0f} GFLOP/s"
        table.add_row(f"{name}{' products' if name not in ('copy', 'disk') else ''}", unit)
    for width, seconds in found["eigen"]:
        table.add_row(f"eigenvalues of width {width:,}", spoken(seconds))
    table.add_row("start of a command", spoken(found["stages"]["start"]["runs"]))
    print_table(table)
