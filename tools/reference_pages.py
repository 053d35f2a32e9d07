"""Write the reference pages docs/metrics.md, sites.md, claims.md and cli.md from the declarations in the code.

python tools/reference_pages.py docs
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from anisoscope.capture.sites.site import KINDS
from anisoscope.claims.catalogue import claims
from anisoscope.claims.changes import RULE_CHANGES
from anisoscope.cli import app
from anisoscope.metrics.catalogue import registry
from anisoscope.metrics.engine.metric import Metric


def metrics_page() -> str:
    """Every metric with its formula, convention, options and reference, grouped by what measures it."""
    lines = ["# Metrics", "", "Written by `make docs` from the declarations in `src/anisoscope/metrics`.", ""]
    lines += ["Every number that can stand in a table is one of these. Those of the first part are functions of rows: "
              "`profile`, `sweep`, `train` and `anisoscope.measure` take them with `--metrics`.", ""]  # fmt: skip
    lines += ["## Functions of rows", ""]
    groups: dict[tuple[str, ...], list[Metric]] = {}
    for _, metric in sorted(registry().items()):
        groups.setdefault(metric.measured_by, []).append(metric)
    for commands in sorted(groups, key=lambda names: (len(names) > 0, names[-1:] != ("train",), names)):
        if commands:
            lines += [f"## Measured by {', '.join(f'`{name}`' for name in commands)}", ""]
        for metric in groups[commands]:
            lines += _entry(metric)
    return "\n".join(lines)


def _entry(metric: Metric) -> Iterator[str]:
    yield from (f"### `{metric.name}`{' (default)' if metric.default else ''}", "")
    yield from (f"**{metric.title}.** {metric.description}", "")
    low, high = ("" if end is None else f"{end:g}" for end in metric.bounds)
    facts = {
        "Formula": metric.formula,
        "Convention": metric.convention,
        "Options": ", ".join(f"`{key}={value}`" for key, value in metric.options.items()),
        "By default also": ", ".join(f"`{key}={int(v) if v is True else v}`" for key, v in metric.beside.items()),
        "Unchanged by": ", ".join(sorted(metric.invariant)),
        "Range": f"{low or '−∞'} to {high or '∞'}" if low or high else "",
        "Measured at": ", ".join(sorted(metric.kinds)),
        "Reference": metric.reference,
    }
    yield from (f"- {label}: {words}" for label, words in facts.items() if words)
    yield ""


def sites_page() -> str:
    """Every kind of site."""
    rows = [f"| `{name}` | {words} |" for name, words in KINDS.items()]
    return "\n".join(["# Sites", "", "| kind | what it is |", "|---|---|", *rows, ""])


def claims_page() -> str:
    """Every claim with its statement, its margin and how it is tested."""
    lines = ["# Claims", "", "Written by `make docs` from the declarations in `src/anisoscope/claims`.", ""]
    lines += [
        "*Holds* when the 95 % interval of the effect lies wholly beyond the margin, *fails* when it lies short of"
    ]
    lines += ["it, else *undecided*. One run speaks for itself; a general claim needs three seeds. What a verdict says"]
    lines += [
        "under other choices, and how many stand when all are counted: [robust.md](robust.md). Pretrained models,"
    ]
    lines += ["of which there is one set of weights each, are judged apart from models with several seeds.", ""]
    for name, claim in claims().items():
        lines += [f"## `{name}`", "", f"**{claim.statement}**", "", claim.description, ""]
        lines += [f"- Margin: {claim.margin:g}", f"- Reads: {', '.join(f'`{m}`' for m in claim.metrics)}"]
        lines += [f"- Source: {claim.source}", ""]
    lines += ["## Rules that were changed after a result was seen", ""]
    lines += ["Margins are declared before a result is looked at. These were not, or had to be mended later"]
    lines += ["(`src/anisoscope/claims/changes.py`); tables that were there before are judged by the rules as they are"]
    lines += ["now.", "", "| date | claims | before | now | reason |", "|---|---|---|---|---|"]
    for date, names, *words in RULE_CHANGES:
        named = ", ".join(f"`{name}`" if name in claims() else name for name in names)
        lines.append(f"| {date} | {named} | {' | '.join(words)} |")
    lines.append("")
    return "\n".join(lines)


def cli_page() -> str:
    """Every command with its arguments, options and defaults."""
    lines = [
        "# Commands",
        "",
        "Written by `make docs` from the declared options; `anisoscope COMMAND --help` says the same.",
        "",
    ]
    lines += [
        "Exit codes: 0 done; 2 a wrong option or input, said in one sentence; 3 a metric of `profile` could not be"
    ]
    lines += ["computed anywhere; 130 and 143 interrupted; 1 anything else. `--debug` shows the traceback.", ""]
    for name, command in _commands("", typer.main.get_command(app)):
        lines += [f"## `{name}`", "", *(command.help or "").strip().splitlines(), ""]
        lines += _parameters(
            name, [each for each in command.params if not each.hidden and each.name not in ("help", "debug")]
        )
    return "\n".join(lines)


def _commands(before: str, group: Any) -> Iterator[tuple[str, Any]]:
    """The verbs with their full names; groups (`study`) stand before their members."""
    for name, command in group.commands.items():
        yield f"{before}{name}", command
        if hasattr(command, "commands"):
            yield from _commands(f"{before}{name} ", command)


def _parameters(name: str, parameters: list[Any]) -> Iterator[str]:
    arguments = [each for each in parameters if not each.opts[0].startswith("-")]
    options = [each for each in parameters if each.opts[0].startswith("-")]
    if arguments:
        yield from ("```text", " ".join(["anisoscope", name, *map(_argument, arguments), "[OPTIONS]"]), "```", "")
        if told := [f"- {_argument(each)}: {_cell(each.help)}" for each in arguments if each.help]:
            yield from (*told, "")
    if options:
        yield from ("| option | what it does | default |", "|---|---|---|")
        yield from (f"| `{'`, `'.join(each.opts)}` | {_cell(each.help)} | {_default(each)} |" for each in options)
        yield ""


def _argument(parameter: Any) -> str:
    word = parameter.metavar or parameter.name.upper()
    return word if parameter.required else f"[{word}]"


def _default(option: Any) -> str:
    if option.required:
        return "required"
    if option.default is None or option.default is False or option.default in ((), ""):
        return ""
    return f"`{option.default}`"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("<", "\\<").replace("*", "\\*")


def pages() -> Iterator[tuple[str, str]]:
    yield "metrics.md", metrics_page()
    yield "sites.md", sites_page()
    yield "claims.md", claims_page()
    yield "cli.md", cli_page()


if __name__ == "__main__":
    for name, text in pages():
        (Path(sys.argv[1]) / name).write_text(text, encoding="utf-8")
