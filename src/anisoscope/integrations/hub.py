"""Datasets of results: on the Hugging Face hub, or in a folder of the same form.

    hub:organisation/dataset      all runs of a dataset of the hub       hub:organisation/dataset/RUN    one of them
    folder:results, results       a folder in place of the hub           …@revision                      a branch or tag

A dataset has a folder for each run (table.parquet, run.json, verdicts.json, report.html, figures/) and a README.md.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from anisoscope.errors import AnisoscopeError

HUB, FOLDER = "hub:", "folder:"
_FORM = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<run>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?")
_READ = ("README.md", "*/run.json", "*/table.parquet")


class HubName(NamedTuple):
    """A place on the hub: a dataset, one run of it or all, and a revision or the newest."""

    repo: str
    run: str
    revision: str | None


def hub_name(word: str) -> HubName:
    """The parts of `hub:organisation/dataset/run@revision`.

    >>> hub_name("hub:org/geometry/run-1@v2")
    HubName(repo='org/geometry', run='run-1', revision='v2')
    """
    found = _FORM.fullmatch(word.removeprefix(HUB))
    if found is None:
        raise AnisoscopeError(
            f"{word!r} is no dataset of the hub; expected hub:ORGANISATION/DATASET, with /RUN for one run."
        )
    return HubName(found["repo"], found["run"] or "", found["revision"])


def downloaded(word: str) -> Path:
    """The folder of a dataset of the hub, or of one run in it, in the hub's cache."""
    from huggingface_hub import snapshot_download

    name = hub_name(word)
    wanted = [pattern.replace("*", name.run) for pattern in _READ] if name.run else list(_READ)
    try:
        place = snapshot_download(name.repo, repo_type="dataset", revision=name.revision, allow_patterns=wanted)
    except Exception as error:  # the client raises many types: offline, private, removed, or misspelt
        raise AnisoscopeError(
            f"{word!r} is not in the cache and could not be downloaded ({_reason(error)}); check the name and the "
            "connection, log in with `hf auth login` if it is private, or read a folder."
        ) from error
    if name.run and not (Path(place) / name.run / "run.json").is_file():
        raise AnisoscopeError(
            f"the dataset {name.repo!r} holds no run {name.run!r}; see hub:{name.repo} for all of them."
        )
    return Path(place) / name.run


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).split(". ")[0].rstrip(".")[:200]


class ResultDataset(Protocol):
    """Where runs are pushed to."""

    def read(self, path: str) -> bytes | None:
        """The content of a file; None if it is not there."""

    def runs(self) -> list[str]:
        """The names of the runs that it holds."""

    def put(self, tree: Path, runs: Iterable[str], *, private: bool) -> str:
        """Store everything in a folder, in place of what it holds of these runs; returns where that is."""


@dataclass(frozen=True)
class FolderDataset:
    """A folder in place of the hub."""

    path: Path

    def read(self, path: str) -> bytes | None:
        found = self.path / path
        return found.read_bytes() if found.is_file() else None

    def runs(self) -> list[str]:
        return sorted(path.parent.name for path in self.path.glob("*/run.json"))

    def put(self, tree: Path, runs: Iterable[str], *, private: bool) -> str:
        self.path.mkdir(parents=True, exist_ok=True)
        for run in runs:
            shutil.rmtree(self.path / run, ignore_errors=True)
        shutil.copytree(tree, self.path, dirs_exist_ok=True)
        return str(self.path)


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the hub."""

    repo: str

    def read(self, path: str) -> bytes | None:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError

        try:
            return Path(hf_hub_download(self.repo, path, repo_type="dataset")).read_bytes()
        except LocalEntryNotFoundError:  # the hub could not be reached
            raise
        except (EntryNotFoundError, RepositoryNotFoundError):
            return None

    def runs(self) -> list[str]:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            files = HfApi().list_repo_files(self.repo, repo_type="dataset")
        except RepositoryNotFoundError:
            return []
        return sorted(path.split("/")[0] for path in files if re.fullmatch(r"[^/]+/run\.json", path))

    def put(self, tree: Path, runs: Iterable[str], *, private: bool) -> str:
        from huggingface_hub import HfApi

        api, names = HfApi(), sorted(runs)
        api.create_repo(self.repo, repo_type="dataset", private=private or None, exist_ok=True)
        words: dict[str, Any] = {"repo_id": self.repo, "repo_type": "dataset", "folder_path": tree}
        gone = [f"{name}/*" for name in names]  # files of an earlier push that are no more
        api.upload_folder(**words, commit_message=f"Results of {', '.join(names)}", delete_patterns=gone)
        return f"{HUB}{self.repo}"


def dataset_at(word: str) -> ResultDataset:
    """The dataset that a word names: `hub:organisation/dataset`, `folder:PATH` or a plain path."""
    if word.startswith(HUB):
        name = hub_name(word)
        if name.run or name.revision:
            raise AnisoscopeError(
                f"{word!r} names more than a dataset; expected {HUB}{name.repo}, and --name for the run."
            )
        return HubDataset(name.repo)
    path = Path(word.removeprefix(FOLDER))
    if not str(word.removeprefix(FOLDER)).strip() or (path.exists() and not path.is_dir()):
        raise AnisoscopeError(f"{word!r} is no folder; give one, or hub:ORGANISATION/DATASET.")
    return FolderDataset(path)


def reached(word: str, error: Exception) -> AnisoscopeError:
    """The error for a hub that cannot be reached or refuses."""
    return AnisoscopeError(
        f"{word!r} could not be written ({_reason(error)}); log in with `hf auth login`, check name and connection, or "
        f"push into a folder ({FOLDER}PATH) and upload that later."
    )
