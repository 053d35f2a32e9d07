"""The house: imports go one way, files and names keep to its rules, and the package costs nothing until it is used.

Every import counts, wherever it stands: inside functions and under `if TYPE_CHECKING`, too.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "anisoscope"
_MEASURED = {"numerics", "stats", "metrics", "models", "capture", "data", "results"}
_TRAINED = _MEASURED | {"execution", "measurement", "tangent", "monitor", "series", "training"}
# room -> the rooms it may import; modules outside rooms (`errors`, `option`) are everyone's
ALLOWED: dict[str, set[str]] = {
    "numerics": set(),
    "stats": {"numerics"},
    "metrics": {"numerics", "stats", "results"},
    "models": {"numerics", "results"},
    "capture": {"numerics", "models", "results"},
    "data": {"numerics", "models", "capture", "results"},
    "results": set(),
    "execution": {"results"},
    "measurement": _MEASURED | {"execution"},
    "tangent": _MEASURED | {"measurement"},
    "monitor": _MEASURED | {"measurement", "tangent"},
    "series": _MEASURED | {"execution", "measurement", "tangent", "monitor"},
    "training": _MEASURED | {"measurement", "tangent", "monitor", "series"},
    "integrations": _MEASURED | {"execution", "measurement", "tangent", "monitor", "view"},
    "claims": {"results"},
    "studies": _TRAINED | {"claims", "view"},
    "view": {"results"},
    "serve": {"results", "claims", "view"},
    "planning": _TRAINED | {"claims", "studies", "view"},
    "commands": _TRAINED | {"claims", "studies", "planning", "integrations", "view", "serve"},
    "cli": _TRAINED | {"claims", "studies", "planning", "integrations", "view", "serve", "commands"},
}
EVERYONES = {"errors", "option", "moved", "anisoscope"}
TORCHLESS = ("results", "claims", "view", "serve")
MANY_FILES = {"commands", "integrations"}  # one file per verb or framework
MOST_FILES, MOST_LINES = 12, 600
HEAVY = {"transformers", "plotly", "matplotlib", "datasets", "peft", "pandas", "scipy", "sklearn", "tokenizers"}


@dataclass(frozen=True)
class Known:
    """Exceptions that are to go: each list can only become shorter."""

    cycles: frozenset[str] = frozenset()  # rooms whose files may still import each other in a circle
    imports: frozenset[tuple[str, str]] = frozenset()  # room, room it may still import
    torch: frozenset[str] = frozenset()  # rooms that still reach torch
    classes: frozenset[str] = frozenset()  # names that still mean several things
    folders: frozenset[str] = frozenset()  # folders that still hold too many files
    files: frozenset[str] = frozenset()  # files that are still too long


KNOWN = Known()

# -- the import graph --------------------------------------------------------------------------------------------------

Graph = Mapping[str, frozenset[str]]  # module -> modules and packages that it imports, ours and others'


def graph_of(root: Path) -> Graph:
    """Every module of a package with what it imports; `from a import b` means a.b where that is a module."""
    paths = {module_name(path, root): path for path in root.rglob("*.py")}
    return {name: frozenset(_imported(path, paths)) for name, path in paths.items()}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_name(path: Path, root: Path) -> str:
    parts = (root.name, *path.relative_to(root).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def _imported(path: Path, modules: Mapping[str, Path]) -> Iterable[str]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else node.module for name in whole)


def reached(graph: Graph, start: str) -> dict[str, str]:
    """Everything that a module imports, directly or by others, with who imports it; packages around a module count."""
    found, waiting = {start: ""}, [start]
    while waiting:
        module = waiting.pop()
        if "." not in module and module in graph:
            continue  # the package itself names its public classes, for type checkers alone
        parents = [module.rsplit(".", i)[0] for i in range(1, module.count(".") + 1)]
        for name in (*graph.get(module, ()), *(p for p in parents if p in graph)):
            if name not in found:
                found[name] = module
                waiting.append(name)
    return found


def cycles(graph: Graph) -> list[set[str]]:
    """Sets of modules that import each other in a circle."""
    ours = {module: reached_by_imports(graph, module) for module in graph}
    found: list[set[str]] = []
    for module in graph:
        circle = {other for other in ours[module] if module in ours.get(other, ())}
        if circle and circle not in found:
            found.append(circle)
    return found


def reached_by_imports(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        fresh = {name for name in graph[waiting.pop()] if name in graph} - found
        found |= fresh
        waiting += fresh
    return found


def room_of(module: str) -> str:
    """The room of a module; the command line may have several files, cli.py and cli_*.py."""
    name = module.split(".")[1] if "." in module else module
    return "cli" if name.startswith("cli_") or name == "__main__" else name


def wrong_imports(graph: Graph) -> set[tuple[str, str]]:
    """(module, module) where a room imports one that it may not."""
    pairs = {(module, name) for module, names in graph.items() for name in names if name in graph}
    return {(one, two) for one, two in pairs if not _may_import(room_of(one), room_of(two))}


def _may_import(room: str, other: str) -> bool:
    return room in ("anisoscope", other) or other in EVERYONES | ALLOWED.get(room, set())


@cache
def house() -> Graph:
    return graph_of(ROOT)


def test_every_room_is_known_to_the_rule() -> None:
    rooms = {p.name for p in ROOT.iterdir() if p.is_dir() and any(p.rglob("*.py"))}
    assert rooms <= set(ALLOWED), "say in ALLOWED what a new room may import"
    assert len(house()) > 150


def test_no_files_import_each_other_in_a_circle() -> None:
    assert not [sorted(circle) for circle in cycles(house()) if not KNOWN.cycles & set(map(room_of, circle))]


def test_rooms_import_one_way() -> None:
    found = wrong_imports(house())
    assert not {pair for pair in found if (room_of(pair[0]), room_of(pair[1])) not in KNOWN.imports}


@pytest.mark.parametrize("room", TORCHLESS)
def test_what_reads_results_reaches_no_torch(room: str) -> None:
    if room in KNOWN.torch:
        pytest.xfail(f"{room} still reaches torch")
    for module in (name for name in house() if room_of(name) == room):
        found = reached(house(), module)
        heavy = next((name for name in found if name.split(".")[0] in ("torch", "transformers")), "")
        assert not heavy, f"{module} reaches {heavy} by {found[heavy]}"


@pytest.mark.parametrize("room", TORCHLESS)
def test_what_reads_results_loads_no_torch(room: str) -> None:
    if room in KNOWN.torch:
        pytest.xfail(f"{room} still reaches torch")
    modules = sorted(name for name in house() if room_of(name) == room)
    assert not _loaded_after("import " + ", ".join(modules)) & {"torch", "transformers"}


def test_heavy_packages_are_imported_where_they_are_used() -> None:
    for path in ROOT.rglob("*.py"):
        # a callback subclasses its framework, so an integration imports it; nobody loads the file without wanting that
        if "integrations" not in path.parts:
            top = parsed(path).body
            names = {a.name for node in top if isinstance(node, ast.Import) for a in node.names}
            names |= {node.module or "" for node in top if isinstance(node, ast.ImportFrom)}
            assert not {name.split(".")[0] for name in names} & HEAVY, path


# -- files and names ---------------------------------------------------------------------------------------------------


def classes_of(root: Path) -> dict[str, list[str]]:
    """Public classes by name, with the modules that define them."""
    found: dict[str, list[str]] = {}
    for path in sorted(root.rglob("*.py")):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module_name(path, root))
    return found


def crowded(root: Path) -> dict[str, int]:
    """Folders with more files than a newcomer keeps in mind."""
    folders = [p for p in (root, *root.rglob("*")) if p.is_dir() and p.name not in MANY_FILES]
    sizes = {str(p.relative_to(root)): len([f for f in p.glob("*.py") if f.name != "__init__.py"]) for p in folders}
    return {name: size for name, size in sizes.items() if size > MOST_FILES}


def long_files(root: Path) -> dict[str, int]:
    lengths = {str(p.relative_to(root)): len(p.read_text(encoding="utf-8").splitlines()) for p in root.rglob("*.py")}
    return {name: length for name, length in lengths.items() if length > MOST_LINES}


def test_a_public_class_name_means_one_thing() -> None:
    twice = {name: where for name, where in classes_of(ROOT).items() if len(where) > 1}
    assert not {name: where for name, where in twice.items() if name not in KNOWN.classes}


def test_no_folder_is_crowded_and_no_file_too_long() -> None:
    assert not {name: size for name, size in crowded(ROOT).items() if name not in KNOWN.folders}
    assert not {name: size for name, size in long_files(ROOT).items() if name not in KNOWN.files}


# -- counter-tests: each rule notices what it forbids ------------------------------------------------------------------


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A package that breaks every rule once."""
    files = {
        "metrics/one.py": "import typing\nif typing.TYPE_CHECKING:\n    from anisoscope.metrics.two import B\n",
        "metrics/two.py": "def f():\n    from anisoscope.metrics import one\nclass B: ...\n",
        "view/page.py": "from anisoscope.view.table import read\nclass B: ...\n",
        "view/table.py": "def read():\n    import anisoscope.results.table\n",
        "results/table.py": "x = 1\n",
        "results/__init__.py": "import torch\n",
        "stats/wrong.py": "def f():\n    from anisoscope.metrics.one import x\n" + "\n" * MOST_LINES,
    }
    files |= {f"numerics/n{i}.py": "" for i in range(MOST_FILES + 1)}
    for name, text in files.items():
        path = tmp_path / "anisoscope" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "anisoscope"


def test_a_planted_violation_of_each_rule_is_noticed(planted: Path) -> None:
    graph = graph_of(planted)
    assert cycles(graph) == [{"anisoscope.metrics.one", "anisoscope.metrics.two"}]
    assert wrong_imports(graph) == {("anisoscope.stats.wrong", "anisoscope.metrics.one")}
    assert reached(graph, "anisoscope.view.page")["torch"] == "anisoscope.results"
    assert {name for name, where in classes_of(planted).items() if len(where) > 1} == {"B"}
    assert crowded(planted) == {"numerics": MOST_FILES + 1}
    assert list(long_files(planted)) == ["stats/wrong.py"]


# -- what is loaded when -----------------------------------------------------------------------------------------------


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
