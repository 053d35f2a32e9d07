"""The floors that pyproject.toml declares are the versions that `make test-floors` installs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"torch": "2.11"}  # tested on a GPU machine: it has no build for CPUs
# extras that the library does without: their floors are the versions of constraints.txt
TOOLS = ("docs", "notebook", "tensorboard", "wandb", "mlflow", "trackio", "trackers")


def _padded(version: str) -> tuple[int, ...]:
    numbers = [int(part) for part in version.split(".")]
    return tuple(numbers + [0] * (3 - len(numbers)))


def test_every_floor_is_a_version_that_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [name for name in project["optional-dependencies"] if name not in ("all", "dev", *TOOLS)]
    wanted = [*project["dependencies"], *(each for name in extras for each in project["optional-dependencies"][name])]
    floors = dict(each.split(">=") for each in wanted)
    lines = (ROOT / "constraints-floors.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert set(floors) == set(tested)
    for name, floor in floors.items():
        if name in ELSEWHERE:
            assert floor == ELSEWHERE[name] and _padded(tested[name]) > _padded(floor)
        else:
            assert _padded(floor) == _padded(tested[name]), name


def test_what_is_tested_together_is_not_below_the_floors() -> None:
    tested = dict(re.findall(r"^([\w.-]+)==([\d.]+)$", (ROOT / "constraints.txt").read_text().lower(), re.MULTILINE))
    floors = dict(re.findall(r"^([\w.-]+)==([\d.]+)$", (ROOT / "constraints-floors.txt").read_text(), re.MULTILINE))
    for name, floor in floors.items():
        newest, oldest = (tuple(map(int, version.split("."))) for version in (tested[name], floor))
        assert newest >= oldest, name


def test_floors_of_tools_are_the_versions_that_are_used() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    used = dict(re.findall(r"^([\w.-]+)==([\d.]+)$", (ROOT / "constraints.txt").read_text().lower(), re.MULTILINE))
    floors = dict(each.split(">=") for name in TOOLS for each in extras[name] if ">=" in each)
    assert floors and floors == {name: used[name] for name in floors}
