"""`anisoscope profile`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from anisoscope.commands import plan as plans
from anisoscope.commands.command import Debug, Out, Resume, Why, configured, fail, requested
from anisoscope.execution.config import ExecutorConfig
from anisoscope.measurement.config import ProfileConfig


@configured(ProfileConfig, also={"jobs": ExecutorConfig})
def profile(
    config: ProfileConfig,
    jobs: ExecutorConfig,
    out: Out = None,
    resume: Resume = False,
    why: Why = False,
    dry_run: plans.DryRun = False,
    calibration: plans.CalibrationFile = None,
    pilot: plans.Pilot = None,
    wanted_width: plans.WantedWidth = None,
    json: plans.AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure the geometry of every layer of one or several models; ends with a report."""
    chosen = plans.dry(dry_run, calibration=calibration, pilot=pilot, wanted_width=wanted_width, json=json)
    if chosen is not None:
        from anisoscope.planning.pilot import with_pilot
        from anisoscope.planning.plans import plan_profile

        make = with_pilot(plan_profile, config, contexts=chosen.pilot, wanted=chosen.wanted_width)
        plans.show_plan(make, chosen, device=config.device)
        return
    from anisoscope.commands.pipeline import run_profile, share_profile
    from anisoscope.measurement.workers.processes import in_all, joined
    from anisoscope.metrics.catalogue import registry
    from anisoscope.view.console import print_profile_end

    name = "_".join(Path(model).name for model in config.models[:2])[:60]
    executor, peers = jobs.make(), joined()
    if peers is not None and not peers.first:
        in_all(peers, lambda: share_profile(config, peers))
        return
    with requested(out, name, resume=resume) as request:
        run = in_all(peers, lambda: run_profile(config, request, peers=peers, executor=executor))
    print_profile_end(run.folder, run.page, registry(), why=why)
    if problem := missing_everywhere(run.folder.table()):
        fail(problem, 3)


def missing_everywhere(table: Any) -> str:
    """An error sentence if a metric has no value at any site, or a site lost all its rows; otherwise empty."""
    from anisoscope.results.query import Query

    query = Query(table)
    for name, rows in query.groups("metric").items():
        if all(map(math.isnan, rows.numbers())):
            note = rows.column("note")[0]
            return f"{name} could not be computed at any site: {note}. Everything else was written."
    lost = {
        f"{model} {layer}.{kind}": rows.column("note")[0] or "no finite value"
        for (model, _, layer, kind), rows in query.groups("model", "stack", "layer", "kind").items()
        if all(math.isnan(row.value) and row.dropped > 0 for row in rows)
    }
    if not lost:
        return ""
    more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    return f"nothing could be computed at {', '.join(list(lost)[:3])}{more}: {next(iter(lost.values()))}."
