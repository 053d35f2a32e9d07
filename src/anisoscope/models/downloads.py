"""Revisions on the hub: list them, download each while the previous one is in use, and optionally remove them."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from anisoscope.errors import AnisoscopeError
from anisoscope.models import source as sources
from anisoscope.results.folder import replace_file

LOG_REVISIONS = 16
_NEVER = ("*.h5", "*.msgpack", "*.onnx", "*.ot", "*.tflite", "*.pdf", "*.png", "optimizer*", "onnx/*", "coreml/*")


def cache_folder(name: str, kind: str = "model") -> Path:
    """The folder of a model, or a dataset, in the hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}"


def dataset_commit(name: str, *, online: bool) -> str:
    """The commit of a dataset: that of the hub, or of the local cache if not `online`; empty if it is not known."""
    from huggingface_hub import HfApi

    try:
        if online:
            return str(HfApi().dataset_info(name).sha or "")
        return (cache_folder(name, "dataset") / "refs" / "main").read_text(encoding="utf-8").strip()
    except Exception:  # the client raises many types; that the commit is not known stops nothing
        return ""


def revisions_of(model: str, *, online: bool) -> list[str]:
    """The branches and tags of a hub model; those in the local cache if not `online`."""
    if not online:
        refs = cache_folder(model) / "refs"
        return sorted(str(path.relative_to(refs)) for path in refs.rglob("*") if path.is_file())
    from huggingface_hub import HfApi

    try:
        found = HfApi().list_repo_refs(model)
    except Exception as error:  # the client raises many types: the model is private, removed, or misspelt
        raise AnisoscopeError(
            f"the revisions of {model!r} cannot be listed ({_reason(error)}); check the name, or name them with "
            "--revisions step0,step1000,…."
        ) from error
    return sorted({ref.name for ref in [*found.branches, *found.tags]})


def log_spaced_steps(steps: Sequence[int], most: int = LOG_REVISIONS) -> list[int]:
    """About `most` of the steps: those nearest to log-spaced values, including the first and the last.

    >>> log_spaced_steps([0, *range(1000, 17000, 1000)], 5)
    [0, 1000, 3000, 6000, 16000]
    """
    ordered = sorted(set(steps))
    if len(ordered) <= most:
        return ordered
    early, rest = [s for s in ordered if s <= 0], [s for s in ordered if s > 0]
    count = max(2, most - len(early))
    low, high = math.log(rest[0]), math.log(rest[-1])
    targets = [low + (high - low) * k / (count - 1) for k in range(count)]
    return sorted({*early, *(min(rest, key=lambda s: abs(math.log(s) - target)) for target in targets)})


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")[:200]


@dataclass
class Downloads:
    """The revisions of one model in the order of their use; while one is used, the next is downloaded.

    The file `journal` records which revisions this run downloaded, also before an interruption; only those are removed.
    """

    model: str
    revisions: list[str]
    journal: Path
    remove: bool = False
    trust_remote_code: bool = False
    fetches: dict[str, Future[Path]] = field(default_factory=dict)

    def ready(self, revision: str) -> Path | None:
        """Wait for a revision and start the next download; returns its folder, or None if the hub is unreachable."""
        if not self._online:
            return None
        fetch = self._begin(revision)
        error = fetch.exception()  # waits until it is done
        after = self.revisions[self.revisions.index(revision) + 1 :]
        if after:
            self._begin(after[0])
        if error is not None:
            self.fetches.pop(revision)
            raise AnisoscopeError(
                f"{self.model}@{revision} could not be downloaded ({_reason(error)}); try again with --resume."
            ) from error
        return fetch.result()

    def finished(self, revision: str) -> None:
        """Remove a used revision from the cache, if `remove` is set and this run downloaded it."""
        fetch = self.fetches.pop(revision, None)
        ours = self._ours()
        if not self.remove or revision not in ours or fetch is None or not fetch.done() or fetch.exception():
            return
        from huggingface_hub import scan_cache_dir

        scan_cache_dir().delete_revisions(fetch.result().name).execute()
        self._note([name for name in ours if name != revision])

    @cached_property
    def _online(self) -> bool:
        """Whether the hub can be reached; tested once, to avoid a timeout at every checkpoint."""
        return sources.hub_reachable()

    def _begin(self, revision: str) -> Future[Path]:
        if revision not in self.fetches:
            fetch = self.fetches[revision] = Future()

            def run() -> None:
                try:
                    fetch.set_result(self._fetch(revision))
                except Exception as error:  # raised by `ready`
                    fetch.set_exception(error)

            threading.Thread(target=run, daemon=True).start()  # a pool would wait for its threads at an interrupt
        return self.fetches[revision]

    def _fetch(self, revision: str) -> Path:
        from huggingface_hub import HfApi, snapshot_download

        folder = cache_folder(self.model)
        there = {p.name for p in (folder / "snapshots").glob("*")}
        new = not (folder / "refs" / revision).is_file() and revision not in there
        if new:
            self._note([*self._ours(), revision])  # before the download, in case the run is killed
        # files of other frameworks are not needed, nor pickled weights beside safetensors
        safe = any(name.endswith(".safetensors") for name in HfApi().list_repo_files(self.model, revision=revision))
        code = [] if self.trust_remote_code else ["*.py"]
        unwanted = [*_NEVER, *code, *(["*.bin", "*.pt", "*.pth", "*.ckpt"] if safe else [])]
        path = Path(snapshot_download(self.model, revision=revision, ignore_patterns=unwanted))
        if new and path.name in there:  # the same commit as a revision that the user already had
            self._note([name for name in self._ours() if name != revision])
        return path

    def _ours(self) -> list[str]:
        """The revisions that this run downloaded, from its journal."""
        try:
            found = json.loads(self.journal.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            return []
        return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []

    def _note(self, ours: list[str]) -> None:
        if self.remove:
            text = json.dumps(list(dict.fromkeys(ours)))
            replace_file(self.journal, lambda path: path.write_text(text, encoding="utf-8"))
