"""run.json says with what code a run was made: the version, the commit, and whether the checkout was changed."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import anisoscope
from anisoscope.results import manifest
from anisoscope.results.folder import RunFolder

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    manifest.code.cache_clear()
    yield
    manifest.code.cache_clear()


def git(folder: Path, *arguments: str) -> str:
    named = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(folder), *named, *arguments], check=True, capture_output=True
    ).stdout.decode()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the package in it, which the module believes to be its own."""
    package = tmp_path / "src" / "anisoscope"
    (package / "results").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    monkeypatch.setattr(manifest, "__file__", str(package / "results" / "manifest.py"))
    return package


def test_a_checkout_tells_its_commit_and_whether_it_was_changed(checkout: Path) -> None:
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "first")
    wanted = {
        "version": anisoscope.__version__,
        "commit": git(checkout, "rev-parse", "HEAD").strip(),
        "modified": False,
    }
    assert manifest.code() == wanted
    manifest.code.cache_clear()
    (checkout / "new.py").write_text("1")
    assert manifest.code() == wanted | {"modified": True}


def test_a_copy_inside_another_repository_does_not_tell_that_ones_commit(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout.parent / "other.py").write_text("")
    git(checkout.parent, "add", "other.py")
    git(checkout.parent, "commit", "-qm", "of the user")
    monkeypatch.setattr(manifest.importlib.metadata, "distribution", lambda name: _installed("{}"))
    plain = {"version": anisoscope.__version__, "source": manifest.source_hash(checkout)}
    assert manifest.code() == plain
    manifest.code.cache_clear()
    (checkout / "results" / "other.py").write_text("1")
    assert manifest.code()["source"] != plain["source"], "installations of one version are told apart"
    manifest.code.cache_clear()
    origin = '{"url": "https://x/y", "vcs_info": {"vcs": "git", "commit_id": "abc"}}'
    monkeypatch.setattr(manifest.importlib.metadata, "distribution", lambda name: _installed(origin))
    assert manifest.code() == {"version": anisoscope.__version__, "commit": "abc"}, "of pip install git+https://…"


def _installed(text: str) -> Any:
    return SimpleNamespace(read_text=lambda name: text)


def test_without_git_the_version_and_a_hash_are_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(manifest.importlib.metadata, "distribution", lambda name: _installed("broken"))
    package = Path(anisoscope.__file__).parent
    assert manifest.code() == {"version": anisoscope.__version__, "source": manifest.source_hash(package)}


def test_a_resumed_run_keeps_the_code_that_it_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"command": [], "seed": 0}
    monkeypatch.setattr(manifest, "code", lambda: {"version": "1"})
    first = manifest.new_manifest({}, old={}, **options)
    assert "earlier_code" not in first and "earlier_code" not in manifest.new_manifest({}, old=first, **options)
    monkeypatch.setattr(manifest, "code", lambda: {"version": "2"})
    second = manifest.new_manifest({}, old=first, **options)
    assert (second["code"], second["earlier_code"]) == ({"version": "2"}, [{"version": "1"}])
    again = manifest.new_manifest({}, old=second, **options)
    assert again["earlier_code"] == [{"version": "1"}]


def test_the_page_shows_code_and_data() -> None:
    from anisoscope.view.sections.provenance import settings

    about = {
        "anisoscope": "0.1",
        "code": {"version": "0.1", "commit": "abc", "modified": True},
        "versions": {"torch": "2"},
    }
    about |= {"earlier_code": [{"version": "0.0", "commit": "old"}], "data": {"name": "x/y", "commit": "def"}}
    facts = dict(settings(about, "run")["facts"])
    assert ("anisoscope's code.commit", "abc") in facts["Versions"] and ("earlier code", "0.0 old") in facts["Versions"]
    assert ("anisoscope's code.modified", "True") in facts["Versions"] and ("commit", "def") in facts["Data"]


def test_null_entries_are_as_missing_ones(tmp_path: Path) -> None:
    nulls: dict[str, Any] = dict.fromkeys(("models", "warnings", "config", "seed", "error"))
    (tmp_path / "run.json").write_text(json.dumps(nulls))
    assert RunFolder(tmp_path).about() == {"seed": None, "error": None}
    (tmp_path / "run.json").write_text(json.dumps({"models": [None, {"name": "a", "notes": None}]}))
    assert RunFolder(tmp_path).about() == {"models": [{}, {"name": "a"}]}
