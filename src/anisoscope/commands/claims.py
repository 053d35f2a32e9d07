"""`anisoscope claims`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from anisoscope.commands.command import Why
from anisoscope.errors import check_known
from anisoscope.option import distinct, refuse_typed

_FORMS = ("table", "json")
PERFORMANCE = "performance"
_SHOWN = 8  # flagged checkpoints listed by name


def claims(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders with a table.")],
    names: Annotated[str | None, typer.Option("--claims", help="Only these, comma-separated.")] = None,
    proxy: Annotated[str | None, typer.Option(help="Directions that were measured: semi_nmf (default), pca, …")] = None,
    fit: Annotated[
        str | None, typer.Option(help="refit or frozen; default: frozen late in training, as in the paper, else refit.")
    ] = None,
    robust: Annotated[
        bool,
        typer.Option("--robust", help="Each verdict again under other ranks, proxies, halves, … that were measured."),
    ] = False,
    why: Why = False,
    format: Annotated[str, typer.Option(help="table or json.")] = "table",
    out: Annotated[
        Path | None, typer.Option(help="Also write a page of these verdicts: a folder or an .html file.")
    ] = None,
) -> None:
    """Which claims of the literature hold in these runs: verdict, effect, interval; with --why p and the reasons.

    Below them: how many are left after correction over the grid of claims × models.
    """
    from anisoscope.claims.catalogue import PROXY, check_measured, evaluate_claims, papers
    from anisoscope.claims.dynamics import performance_of_models
    from anisoscope.claims.engine.claim import verdicts_to_dicts
    from anisoscope.commands.drawing import joint_table, open_runs, write_claimed
    from anisoscope.results.folder import readable_runs
    from anisoscope.view.console import print_state
    from anisoscope.view.terminal.screen import print_json, print_line
    from anisoscope.view.terminal.verdicts import print_robustness, print_verdicts

    wanted = distinct(names, "--claims") if names is not None else None
    check_known("format", format, _FORMS)
    with readable_runs(*runs):
        folders = open_runs(runs)
        table = joint_table(folders)
        for folder in folders:
            print_state(folder.path, name=len(folders) > 1)
        if {folder.about().get("study") for folder in folders} == {PERFORMANCE}:  # which has verdicts of its own
            given = {"claims": wanted, "proxy": proxy, "fit": fit, "robust": robust}
            refuse_typed([name for name, value in given.items() if value], f"with runs of the study {PERFORMANCE}")
            verdicts = verdicts_to_dicts(performance_of_models(table))
        else:
            check_measured(table, proxy=proxy, fit=fit)
            chosen: dict[str, Any] = {"proxy": proxy or PROXY, "fit": fit, "robust": robust}
            verdicts = verdicts_to_dicts(evaluate_claims(table, wanted, **chosen))
    if flagged := _flagged(table):
        print_line(flagged, error=format == "json")
    if format == "json":
        print_json(verdicts)
    else:
        print_verdicts(verdicts, every=wanted is not None, why=why, papers=papers())
        if robust:
            print_robustness(verdicts)
    if out is not None:
        print_line(str(write_claimed(open_runs(runs), verdicts, out)), error=format == "json")


def _flagged(table: Any) -> str:
    """One line that names the flagged checkpoints of a series; empty when there are none."""
    from anisoscope.results.query import Query

    rows = [row for row in Query(table).where(metric="checkpoint", kind="training") if row.value == 0]
    names = [f"{row.revision} ({re.split('[:,]', row.note)[0]})" for row in rows]
    if not names:
        return ""
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return f"checkpoints flagged: {shown}; verdicts over steps rest on them"
