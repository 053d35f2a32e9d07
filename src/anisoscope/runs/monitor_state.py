"""What a monitor must remember to go on after an interruption as if there had been none."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from anisoscope.metrics.frequency import TemporalSpread

if TYPE_CHECKING:
    from anisoscope.runs.monitor import Monitor


def window_of(monitor: Monitor, step: int) -> dict[str, Any]:
    """What an open window keeps of a step, for each of the studies."""
    frozen = {name: study.frozen for name, study in monitor.studies().items()}
    return {name: f.window_state(step) if f is not None else None for name, f in frozen.items()}


def state_of(monitor: Monitor, step: int) -> dict[str, Any]:
    """Everything that later steps build on."""
    studies = {name: study.state() for name, study in monitor.studies().items()}
    return {
        "step": step,
        "done": sorted(monitor.done),
        "study": studies.get("study"),
        "live": studies.get("live"),
        "watch": {name: value.cpu() for name, value in monitor.watch.state().items()},
        "watched": monitor.watch.step,
        "temporal": asdict(monitor.temporal),
        "map": monitor.map.state() if monitor.map is not None else None,
        "seconds": monitor.seconds,
    }


def restore(monitor: Monitor, state: dict[str, Any]) -> None:
    """Go back to a state; tables of steps that came after it are forgotten."""
    monitor.done = set(state["done"])
    monitor.tables = monitor.store.tables(monitor.done)
    logs = [row for table in monitor.tables for row in table.where(kind="training").records()]
    monitor.logged = {(row["step"], row["metric"]) for row in logs}
    for name, study in monitor.studies().items():
        if state[name] is not None:
            frozen = state[name]["frozen"]
            window = monitor.store.window(frozen["window"] if frozen else [])
            study.load(state[name], {step: found[name] for step, found in window.items()})
    monitor.watch.load(state["watch"], state["watched"])
    monitor.temporal = TemporalSpread(**state["temporal"])
    if monitor.map is not None and state.get("map") is not None:
        monitor.map.load(state["map"])
    monitor.seconds = state["seconds"]
