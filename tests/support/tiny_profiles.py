"""Profiles of tiny models over a short text."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from anisoscope.measurement.config import ProfileConfig
from anisoscope.measurement.profile import Profiler
from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Table

GPT2 = "gpt2:n_layer=2,n_embd=32,n_head=2,vocab_size=300,n_positions=64"


BERT = "bert:num_hidden_layers=2,hidden_size=32,num_attention_heads=2,intermediate_size=64,vocab_size=300"


PHRASE = "the quick brown fox jumps over a lazy dog while seven wizards quietly box up twelve black jugs"


WORDS = PHRASE.split()


@pytest.fixture(scope="session")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("\n\n".join(" ".join(rng.choices(WORDS, k=30)) for _ in range(40)), encoding="utf-8")
    return path


def config(prose: Path, *models: str, **options: Any) -> ProfileConfig:
    plain = {"tokens": 1500, "context": 32, "batch_size": 4, "random_init": True, "device": "cpu"}
    return ProfileConfig(models or (GPT2,), data=str(prose), **{**plain, **options})


def run(wanted: ProfileConfig, out: Path, *, resume: bool = False, progress: Any = None) -> Table:
    folder = RunFolder.create(out, asdict(wanted), resume=resume)
    return Profiler(wanted, folder, progress=progress).run()


def keyed(table: Table) -> dict[tuple[Any, ...], dict[str, Any]]:
    names = ("model", "stack", "layer", "kind", "head", "group", "metric", "variant")
    rows = table.records()
    found = {tuple(row[name] for name in names): row for row in rows}
    assert len(found) == len(rows), "each row of the table has a key of its own"
    return found


def same(one: Table, two: Table, *, rel: float = 1e-12) -> None:
    mine, theirs = keyed(one), keyed(two)
    assert set(mine) == set(theirs)
    for key, row in mine.items():
        for name in ("value", "low", "high"):
            assert theirs[key][name] == pytest.approx(row[name], rel=rel, abs=1e-12, nan_ok=True), (key, name)
        assert [theirs[key][n] for n in ("n", "contexts", "dropped")] == [row[n] for n in ("n", "contexts", "dropped")]


@pytest.fixture(scope="session")
def whole_profile(prose: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    run(config(prose), out)
    return out
