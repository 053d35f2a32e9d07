"""Imports go one way, and the package costs nothing until it is used."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "anisoscope"
# package -> what it may import of this project; `errors` and the version are everyone's
ALLOWED: dict[str, set[str]] = {
    "numerics": set(),
    "stats": {"numerics"},
    "metrics": {"numerics", "stats"},
    "capture": {"numerics"},
    "data": {"numerics", "capture"},
    "runs": {"numerics", "stats", "metrics", "capture", "data"},
    "claims": {"numerics", "stats", "metrics", "runs"},
    "training": {"numerics", "stats", "metrics", "capture", "data", "runs"},
    "studies": {"numerics", "stats", "metrics", "capture", "data", "runs", "claims", "training"},
    "integrations": {"numerics", "stats", "metrics", "capture", "data", "runs"},
    "view": {"metrics", "runs", "capture", "data", "claims", "training", "studies"},
    "cli": {"runs", "view", "claims", "training", "studies", "integrations"},
}
HEAVY = {"transformers", "plotly", "matplotlib", "datasets", "peft", "pandas", "scipy", "sklearn", "tokenizers"}


def package_of(path: Path) -> str:
    return layer(path.relative_to(ROOT).with_suffix("").parts[0])


def layer(name: str) -> str:
    """The command line may have several files, cli.py and cli_*.py: one layer."""
    return "cli" if name.startswith("cli_") else name


def imports(path: Path, *, lazy: bool) -> set[tuple[str, bool]]:
    """(module, whether it is imported inside a function) of every import outside `if TYPE_CHECKING`."""
    found: set[tuple[str, bool]] = set()

    def walk(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.update((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module == "anisoscope":
                found.update((f"anisoscope.{alias.name}", inside) for alias in node.names)
            else:
                found.add((node.module, inside))
        within = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            walk(child, within)

    walk(ast.parse(path.read_text(encoding="utf-8")), False)
    return {(name, inside) for name, inside in found if lazy or not inside}


FILES = sorted(path for path in ROOT.rglob("*.py") if package_of(path) in ALLOWED)


def test_every_package_is_known_to_the_rule() -> None:
    packages = {p.name for p in ROOT.iterdir() if (p / "__init__.py").is_file()}
    assert packages <= set(ALLOWED), "say in ALLOWED what a new package may import"
    assert len(FILES) > 40


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    package = package_of(path)
    for name, inside in imports(path, lazy=True):
        if not name.startswith("anisoscope."):
            continue
        other = layer(name.split(".")[1])
        if path == ROOT / "runs" / "table.py" and other == "view":
            assert inside, "a table draws itself only when asked"
            continue
        assert other in ALLOWED[package] | {package, "errors", "__version__"}, f"{package} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_packages_are_imported_where_they_are_used(path: Path) -> None:
    top = {name.split(".")[0] for name, _ in imports(path, lazy=False)}
    # a callback subclasses its framework, so an integration imports it; nobody loads the file without wanting that
    assert package_of(path) == "integrations" or not top & HEAVY


def test_the_view_never_sees_a_tensor() -> None:
    for path in (ROOT / "view").rglob("*.py"):
        assert not {name.split(".")[0] for name, _ in imports(path, lazy=True)} & {"torch", "transformers"}, path


def test_the_rule_would_notice_a_wrong_import(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def f():\n    from anisoscope.capture.capture import Capture\nfrom anisoscope.runs import bank\n")
    assert imports(wrong, lazy=True) == {("anisoscope.capture.capture", True), ("anisoscope.runs", False)}
    assert "capture" not in ALLOWED["metrics"]


def _loaded_after(statement: str) -> set[str]:
    code = f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in json.loads(done.stdout)}


def test_importing_the_package_imports_neither_torch_nor_transformers() -> None:
    assert not _loaded_after("import anisoscope") & {"torch", "transformers", "numpy", "pyarrow", *HEAVY}


def test_a_metric_on_an_array_needs_no_transformers() -> None:
    loaded = _loaded_after("import anisoscope, numpy; anisoscope.average_cosine(numpy.eye(9))")
    assert "torch" in loaded, "the counter-test: something is loaded"
    assert not loaded & {"transformers", "plotly", "matplotlib", "pandas", "datasets", "peft"}


def test_the_command_line_can_be_read_without_torch() -> None:
    assert not _loaded_after("import anisoscope.cli") & {"torch", "transformers", "numpy", *HEAVY}
