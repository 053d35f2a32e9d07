"""The initial content of run.json: command, configuration, versions, code, seed and start time of a run."""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anisoscope import __version__

# each begins warnings that stand above all others: the numbers are of no text, or of a model that learned none
WRONG_TEXT, DIVERGED = "WRONG TEXT: ", "WORSE THAN GUESSING: "
PRETRAINED = "pretrained models"  # ends the subject of a verdict on them that stands beside one on models with seeds
SEEDED = "models trained from several seeds"  # beside pretrained ones


def wrong_loss(loss: float, vocabulary: int | None) -> list[str]:
    """The warning for a loss in nats above that of guessing among `vocabulary` tokens; [] if it is below.

    >>> wrong_loss(3.1, 512)
    []
    """
    told = _above_guessing(loss, vocabulary)
    why = "so these numbers describe no text that it knows; check --tokenizer and --data"
    return [f"{WRONG_TEXT}its loss is {told}, {why}"] if told else []


def diverged_loss(loss: float, vocabulary: int | None, *, low: float, step: int) -> list[str]:
    """As `wrong_loss`, for the held-out loss after the `step` updates of a training; `low` ends its interval.

    >>> diverged_loss(9.0, 512, low=8.7, step=40)[0][:72]
    'WORSE THAN GUESSING: at step 40 its held-out loss is 9 nats, above the 6'
    """
    told = _above_guessing(loss, vocabulary) if _above_guessing(low, vocabulary) else ""
    why = "so it diverged or has hardly begun, and these numbers are of no trained model; lower --lr, or train longer"
    return [f"{DIVERGED}at step {step} its held-out loss is {told}, {why}"] if told else []


def _above_guessing(loss: float, vocabulary: int | None) -> str:
    """A loss in nats beside that of guessing, as a phrase; empty if it is not above."""
    if not vocabulary or not loss > math.log(vocabulary):
        return ""
    return f"{loss:.3g} nats, above the {math.log(vocabulary):.3g} of guessing among its {vocabulary:,} tokens"


def is_grave(warning: str) -> bool:
    """Whether a warning must be read before any number.

    >>> is_grave("a: WRONG TEXT: …"), is_grave("a: odd")
    (True, False)
    """
    return WRONG_TEXT in warning or DIVERGED in warning


def gravest_first(warnings: Sequence[str]) -> list[str]:
    """Those warnings first that must be read before any number, the others in their order.

    >>> gravest_first(["a: odd", "a: WRONG TEXT: …"])
    ['a: WRONG TEXT: …', 'a: odd']
    """
    return sorted(warnings, key=lambda words: not is_grave(words))


def new_manifest(
    config: Mapping[str, Any], *, command: Sequence[str], seed: int, old: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """The manifest of a new run, or of one resumed from an `old` manifest; `more` are further entries."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {
        "schema": 1,
        "anisoscope": __version__,
        "code": code(),
        **_earlier(old),
        **{name: more.pop(name) for name in ("kind", "study") if name in more},
        "command": list(command),
        "config": dict(config),
        "versions": versions(),
        "seed": seed,
        "status": "running",
        "started": old.get("started") or now,
        "wall_seconds": float(old.get("wall_seconds", 0.0)),
        "models": [],
        "warnings": [],
        **more,
    }


def _earlier(old: Mapping[str, Any]) -> dict[str, Any]:
    """The entry on other code that parts of a resumed run were made with; empty where there is none."""
    before = [*old.get("earlier_code", ()), *([old["code"]] if "code" in old else [])]
    others = [each for number, each in enumerate(before) if each != code() and each not in before[:number]]
    return {"earlier_code": others} if others else {}


@functools.cache
def code() -> dict[str, Any]:
    """Version of this package, its commit where that is known, and whether a checkout differs from its commit.

    A package that was installed from a repository tells its commit in its metadata (PEP 610). Where none is known
    `source`, a hash of its files, tells installations of one version apart.
    """
    found: dict[str, Any] = {"version": __version__}
    package = Path(__file__).parents[1]
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None:  # not a copy inside a user's repository
        commit, changes = _git(package, "rev-parse", "HEAD"), _git(package, "status", "--porcelain", "--", ".")
        return found | ({"commit": commit, "modified": bool(changes)} if commit else {})
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError, TypeError, AttributeError):
        origin = json.loads(importlib.metadata.distribution("anisoscope").read_text("direct_url.json") or "{}")
        if commit := origin.get("vcs_info", {}).get("commit_id"):
            return found | {"commit": commit}
    return found | {"source": source_hash(package)}


def source_hash(package: Path) -> str:
    """A hash of names and contents of the Python files in a folder."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None if there is no git, or it fails."""
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, env=quiet, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def outcome(error: BaseException | None = None) -> dict[str, str]:
    """The entries `status` and `error` of a run that has ended.

    >>> outcome(KeyboardInterrupt()), outcome(ValueError("no data\\n…"))
    ({'status': 'interrupted'}, {'status': 'failed', 'error': 'no data'})
    """
    if error is None:
        return {"status": "complete"}
    status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    return {"status": status} | ({"error": str(error).splitlines()[0]} if str(error) else {})


def versions() -> dict[str, str]:
    """Versions of the software that results may depend on, read without importing the packages."""
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")},
        "platform": f"{platform.system()} {platform.machine()}",
        "executable": Path(sys.executable).name,
    }
