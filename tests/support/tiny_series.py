"""Small series of checkpoints with known weights, and a hub that is a folder."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anisoscope.results.query import Table

SIZES = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 258, "bos_token_id": 1, "eos_token_id": 2}
ARCHITECTURE = "gpt2:" + ",".join(f"{name}={value}" for name, value in SIZES.items())
TEXT = str(Path(__file__).parents[2] / "LICENSE")  # short, and never changed
LOOK: dict[str, Any] = {
    "data": TEXT,
    "tokens": 320,
    "context": 16,
    "metrics": ("average_cosine",),
    "device": "cpu",
    "tokenizer": "bytes",
}


def gpt(seed: int = 0, **sizes: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT2LMHeadModel(GPT2Config(**(SIZES | sizes))).eval()


def moved(model: Any, steps: Sequence[int]) -> list[dict[str, torch.Tensor]]:
    """Weights on a path like that of training: a drift, and a random walk whose variance grows with the steps."""
    generator = torch.Generator().manual_seed(1)

    def noise() -> dict[str, torch.Tensor]:
        return {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}

    drift, here, at, path = noise(), {n: p.detach().clone() for n, p in model.named_parameters()}, 0, []
    for step in steps:
        walk, share = noise(), (step - at) / max(steps)
        here = {n: p + 0.05 * share * drift[n] + 0.05 * share**0.5 * walk[n] for n, p in here.items()}
        path.append(here)
        at = step
    return path


def put(model: Any, weights: dict[str, torch.Tensor]) -> Any:
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    return model


def make_series(folder: Path, steps: Sequence[int] = (0, 10, 20, 30, 40)) -> Path:
    """checkpoint-N folders of a small decoder, read as bytes."""
    model = gpt()
    for step, weights in zip(steps, moved(model, steps), strict=True):
        put(model, weights).save_pretrained(folder / f"checkpoint-{step}")
    return folder


def letters() -> Any:
    """A tokenizer of the visible letters of ASCII, one token each, for the models of `gpt`."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {"[UNK]": 0} | {chr(code): code for code in range(32, 127)}
    words = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")


def swap(folder: Path, one: str, other: str) -> None:
    (folder / one).rename(folder / "between")
    (folder / other).rename(folder / one)
    (folder / "between").rename(folder / other)


def flags(out: Path) -> dict[int, list[str]]:
    about = json.loads((out / "run.json").read_text())
    return {entry["step"]: entry["flags"] for entry in about["checkpoints"]}


FORKS = hasattr(os, "fork") and not torch.cuda.is_available()


def killed(act: Callable[[], Any], after: int) -> bool:
    """Run in a child that is killed once so many files were renamed into place; whether it came to that."""
    child = os.fork()
    if child == 0:
        seen, replace = [0], Path.replace

        def count(self: Path, target: Any) -> Any:
            if seen[0] == after:
                os.kill(os.getpid(), signal.SIGKILL)
            seen[0] += 1
            return replace(self, target)

        try:
            Path.replace = count  # type: ignore[method-assign,assignment]
            act()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def same(one: Table, other: Table) -> None:
    """Equal value for value, in the same order."""
    assert len(one) == len(other) and one.arrow.schema.equals(other.arrow.schema)
    for name in one.arrow.column_names:
        mine, theirs = one.arrow[name].to_pylist(), other.arrow[name].to_pylist()
        assert repr(mine) == repr(theirs), name  # NaN is like NaN here, and every digit counts


class Hub:
    """A hub whose repository is a folder of revisions; it counts, and can fail."""

    def __init__(self, source: Path, cache: Path, *, name: str = "org/tiny") -> None:
        self.source, self.cache, self.name, self.fetched, self.deleted = source, cache, name, [], []
        self.broken: set[str] = set()
        self.folder = cache / f"models--{name.replace('/', '--')}"

    def snapshot_download(self, repo_id: str, *, revision: str, **_: Any) -> str:
        assert repo_id == self.name
        if revision in self.broken:
            raise OSError("the connection broke")
        self.fetched.append(revision)
        target = self.folder / "snapshots" / f"commit-{revision}"
        if not target.exists():
            shutil.copytree(self.source / revision, target)
        ref = self.folder / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(f"commit-{revision}")
        return str(target)

    def list_repo_refs(self, repo_id: str) -> Any:
        names = [SimpleNamespace(name=p.name) for p in self.source.iterdir()]
        return SimpleNamespace(branches=[SimpleNamespace(name="main")], tags=names)

    def list_repo_files(self, repo_id: str, *, revision: str) -> list[str]:
        place = self.source / revision
        if not place.is_dir():
            raise OSError(f"no revision {revision}")
        return [p.name for p in place.iterdir()]

    def scan_cache_dir(self) -> Any:
        def delete(commit: str) -> Any:
            return SimpleNamespace(execute=lambda: self._delete(commit))

        return SimpleNamespace(delete_revisions=delete)

    def _delete(self, commit: str) -> None:
        self.deleted.append(commit.removeprefix("commit-"))
        shutil.rmtree(self.folder / "snapshots" / commit)
        (self.folder / "refs" / commit.removeprefix("commit-")).unlink()

    def install(self, patch: pytest.MonkeyPatch) -> Hub:
        import huggingface_hub
        from huggingface_hub import constants

        from anisoscope.models import source as sources

        patch.setattr(constants, "HF_HUB_CACHE", str(self.cache))
        patch.setattr(sources, "hub_reachable", lambda *_: True)
        patch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)
        patch.setattr(huggingface_hub, "scan_cache_dir", self.scan_cache_dir)
        patch.setattr(huggingface_hub, "HfApi", lambda: self)
        return self
