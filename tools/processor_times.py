"""A plugin of pytest: processor seconds of every test and of every room, children included. `make test-times`.

The wall clock of a shared machine tells who else was there; this tells what the tests themselves cost."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SHOWN = 60
_spent: dict[str, float] = {}  # by phase of the test that is under way in this process
_reports: list[tuple[str, str, float]] = []  # test, phase, seconds: in the process that prints


def _now() -> float:
    """User and system time of this process and of all children that it waited for."""
    return sum(os.times()[:4])


def _timed(phase: str) -> Iterator[None]:
    began = _now()
    try:
        return (yield)
    finally:
        _spent[phase] = _now() - began


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup() -> Iterator[None]:
    return (yield from _timed("setup"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call() -> Iterator[None]:
    return (yield from _timed("call"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Iterator[None]:
    return (yield from _timed("teardown"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo) -> Iterator[Any]:
    report = yield
    report.processor_s = _spent.pop(call.when, 0.0)  # travels with the report where workers of xdist run the tests
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _reports.append((report.nodeid, report.when, getattr(report, "processor_s", 0.0)))


def _room(test: str) -> str:
    return "/".join(Path(test.split("::")[0]).parts[:2])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Rooms first, then files, then the dearest tests; the rest of the process is imports and collection."""
    rooms: dict[str, float] = defaultdict(float)
    files: dict[str, float] = defaultdict(float)
    for test, _, seconds in _reports:
        rooms[_room(test)] += seconds
        files[test.split("::")[0]] += seconds
    write = terminalreporter.write_line
    tests = sum(rooms.values())
    write(f"processor seconds: {tests:.1f} in tests, {_now():.1f} in this process and its children")
    for heading, table in (("room", rooms), ("file", files)):
        for name, seconds in sorted(table.items(), key=lambda pair: -pair[1])[:SHOWN]:
            write(f"{seconds:8.1f}  {heading}  {name}")
    for test, phase, seconds in sorted(_reports, key=lambda one: -one[2])[: 2 * SHOWN]:
        if seconds >= 0.1:
            write(f"{seconds:8.2f}  {phase:8s}  {test}")
