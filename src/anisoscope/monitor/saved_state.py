"""The state of a monitor that later steps need: kept in its folder, and with the checkpoints of a training."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from anisoscope.metrics.frequency import TemporalSpread
from anisoscope.monitor.analysis.parts import left_steps, remove_left
from anisoscope.monitor.open_step import OpenStep

Monitor = Any  # that of monitor.monitor, which uses these functions

SAVE = "save its state with a checkpoint"


def state_of(monitor: Monitor, step: int) -> dict[str, Any]:
    """The state after a step; that of the studies comes from the analysis."""
    return {
        "step": step,
        "done": sorted(monitor.done),
        "watch": {name: value.cpu() for name, value in monitor.watch.state().items()},
        "watched": monitor.watch.step,
        "temporal": asdict(monitor.temporal),
        "map": monitor.map.state() if monitor.map is not None else None,
        "seconds": monitor.seconds,
        "shown": monitor.desk.shown,
    }


def restore(monitor: Monitor, state: dict[str, Any]) -> None:
    """Restore a state; tables of later steps are dropped."""
    done, store = set(state["done"]), monitor.store
    monitor.results.restore(done, store.tables(done) if store is not None else [])
    states = {name: state[name] for name in monitor.studies if state.get(name) is not None}
    inside = {step for saved in states.values() if saved["frozen"] for step in saved["frozen"]["window"]}
    windows = store.window(sorted(inside)) if store is not None else {}
    monitor.desk.ask("load", states, windows)
    monitor.results.newest = (states, windows) if store is not None else None
    for name, saved in states.items():
        monitor.studies[name].notes = list(saved["notes"])
    monitor.watch.load(state["watch"], state["watched"])
    monitor.temporal = TemporalSpread(**state["temporal"])
    monitor.desk.shown = state.get("shown", 0)
    if monitor.map is not None and state.get("map") is not None:
        monitor.map.load(state["map"])
    monitor.seconds = state["seconds"]


def finish_left(monitor: Monitor) -> None:
    """Have the steps analysed that a killed run left to be, and go on after them; of a new run they are deleted."""
    store = monitor.store
    if store is None or not monitor.desk.first:
        return
    folder, found = store.folder.path / "state", list[int]()
    for left in left_steps(folder, store.options) if store.resume else ():
        if left.step in monitor.done or left.step <= monitor.resumed:
            continue
        monitor.desk.at_work()
        opened = OpenStep(left.step, due=True, state=left.state)
        for part in monitor.desk.go_on(left):
            opened.expect("analyse a step that was left", part)
        monitor.done.add(left.step)
        monitor.results.expect(opened)
        monitor.results.collect(wait=True)
        found.append(left.step)
    if found and monitor.files.saved:
        state = store.newest()
        restore(monitor, state)
        monitor.resumed = state["step"]
        named = ", ".join(map(str, found))
        monitor.instruments.note(f"step {named}: analysed after a restart from what a killed run had left")
    if monitor.files.saved:
        remove_left(folder)
    monitor.collect()


def save(monitor: Monitor, folder: Path, *, wait: bool) -> None:
    """Write the state into a folder; see `Monitor.save`."""
    if monitor.every is not None:
        monitor.every.flush()
    if wait or monitor.store is None:  # only a store has the states of the studies after each step
        monitor.collect(wait=True)
    state = state_of(monitor, max(monitor.done, default=-1)) | {"next": monitor.next}
    desk = monitor.desk
    write = desk.write_own if not desk.first else partial(monitor.results.write_state, ask=desk.ask)
    monitor.results.then(partial(monitor.guard.call, SAVE, write, folder, state))
    monitor.collect()


def load(monitor: Monitor, folder: Path) -> None:
    """Restore what `save` wrote; see `Monitor.load`."""
    state = monitor.desk.read_state(folder)
    monitor.collect(wait=True)  # steps from before it
    newest = monitor.store.newest() if monitor.store is not None else None
    following, monitor.resumed = {*state["done"], state.get("next")}, -1
    if newest is not None and newest["step"] == state.get("next") and set(newest["done"]) == following:
        state, monitor.resumed = newest, newest["step"]
    if monitor.store is not None:
        monitor.store.rewind(set(state["done"]))
    restore(monitor, state)
    monitor.resumed = monitor.desk.agree(monitor.done, monitor.resumed)
