"""The built wheel works in an empty environment, outside the checkout: commands, templates, data, a page."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def call(*words: str | Path, cwd: Path, **more: str) -> str:
    """Run a program without this checkout on its path; what it printed."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    found = subprocess.run(
        [str(word) for word in words], cwd=cwd, env={**environment, **more}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, f"{words}: {found.stdout[-1500:]}{found.stderr[-1500:]}"
    return found.stdout


def fetched(*words: str | Path, cwd: Path) -> None:
    """Run pip, which needs a package index; the test is skipped where there is none."""
    pip = [sys.executable if words[0] == "here" else words[0], "-m", "pip", "--disable-pip-version-check", *words[1:]]
    try:
        call(*pip, cwd=cwd, PIP_CONSTRAINT=str(ROOT / "constraints.txt"), PIP_RETRIES="1")
    except AssertionError as error:
        if "No matching distribution found" in str(error) or "connection" in str(error).lower():
            pytest.skip("no package index can be reached")
        raise


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    fetched("here", "wheel", "-q", "--no-deps", "-w", folder, ROOT, cwd=folder)
    [found] = folder.glob("anisoscope-*.whl")
    return found


@pytest.mark.slow
def test_a_wheel_holds_the_package_its_data_and_licences(wheel: Path) -> None:
    from anisoscope import __version__

    assert wheel.name == f"anisoscope-{__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "anisoscope"
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {f"anisoscope/{path.relative_to(package).as_posix()}" for path in files} <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "tools/"))]
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("LICENSE-corpus.md") and "licenses" in name for name in names)


@pytest.mark.slow
def test_a_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    call(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    binaries = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin")
    fetched(binaries / "python", "install", "-q", wheel, cwd=tmp_path)
    program = binaries / "anisoscope"
    assert "profile" in call(program, "--help", cwd=tmp_path)
    assert "two_nn" in call(program, "list", "metrics", cwd=tmp_path)
    words = ["profile", "--random-init", "gpt2:n_layer=2,n_embd=32,n_head=2", "--tokens", "1024", "--context", "32"]
    call(program, *words, "--device", "cpu", "--out", "run", cwd=tmp_path, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "cosine" in page.lower() and "<script" in page
    where = call(binaries / "python", "-c", "import anisoscope; print(anisoscope.__file__)", cwd=tmp_path)
    assert str(tmp_path) in where and "site-packages" in where
