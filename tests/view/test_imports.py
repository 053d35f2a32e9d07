"""The view reads results and nothing below them: no torch, no model, no measurement."""

from __future__ import annotations

import ast
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import anisoscope.view

ROOT = Path(anisoscope.view.__file__).parent
FORBIDDEN = ("studies", "measurement", "series", "training", "tangent", "models", "metrics", "capture", "claims")


def modules() -> list[str]:
    names = [m.name for m in pkgutil.walk_packages(anisoscope.view.__path__, "anisoscope.view.")]
    return [name for name in names if "console" not in name]


def loaded(names: list[str]) -> set[str]:
    """What is in sys.modules once these modules are imported in a process of their own."""
    code = f"import importlib, json, sys\n[importlib.import_module(n) for n in {names!r}]\n"
    code += "print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_view_imports_no_torch() -> None:
    if "torch" in loaded(["anisoscope.results.query", "anisoscope.results.quantity"]):
        pytest.skip("the results themselves import torch")
    assert "torch" not in loaded(modules())


def test_the_view_imports_no_room_that_measures_or_judges() -> None:
    for path in ROOT.rglob("*.py"):
        if "console" in path.name:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("anisoscope."):
                assert (node.module or "").split(".")[1] not in FORBIDDEN, f"{path.name} imports {node.module}"
