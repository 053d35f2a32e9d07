"""`measure` and `profile` take models and data by name and path, as the command line does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from anisoscope import AnisoscopeError, Table, measure, profile
from anisoscope.data.tokens import make_vocabulary, save_tokenizer
from support.tiny_models import tiny

SMALL: dict[str, Any] = {"tokens": 300, "context": 32, "metrics": ["average_cosine", "drift"]}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer in a folder, and a text beside it."""
    folder = tmp_path_factory.mktemp("named")
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=300, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(folder / "model")
    save_tokenizer(make_vocabulary("char", [bytes(range(256))]), folder / "model")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40, encoding="utf-8")
    return folder / "model"


def values(table: Table) -> list[float]:
    return [row.value for row in table.where(metric="average_cosine", variant="")]


def test_a_folder_is_measured_on_a_text_of_a_name(stored: Path, tmp_path: Path) -> None:
    text = stored.parent / "text.txt"
    by_path = measure(stored, text, **SMALL)
    assert by_path.metrics == ["average_cosine", "drift"] and len(by_path.models) == 1
    kept = profile(stored, data=text, out=tmp_path / "run", report=False, **SMALL)
    assert values(by_path) == values(kept) == values(Table.read(tmp_path / "run"))
    assert values(profile(stored, data=str(text), **SMALL)) == values(kept), "without a folder nothing is kept"
    assert measure(str(stored), **SMALL, name="mine").models == ["mine"], "the embedded text"


def test_options_are_those_of_the_command_line_as_python_has_them(stored: Path) -> None:
    listed = measure(stored, sites="resid,embed", layers="0-1", skip_first=True, **SMALL)
    assert listed.layers == [0, 1] and set(listed.unique("kind")) == {"resid", "embed"}
    same = measure(stored, sites=["resid", "embed"], layers=[0, 1], first="out", **SMALL)
    assert values(listed) == values(same)
    assert measure("gpt2:n_layer=1,n_embd=16,n_head=2", random_init=True, layers=1, **SMALL).layers == [1]
    with pytest.raises(AnisoscopeError, match="did you mean 'tokens'"):
        measure(stored, token=300)


def test_a_model_of_a_name_takes_batches_and_files_of_rows_are_models(stored: Path, tmp_path: Path) -> None:
    ids = torch.arange(128).reshape(4, 32)
    table = measure(stored, [ids], metrics="drift")
    model = GPT2LMHeadModel.from_pretrained(stored)
    assert table.value(metric="drift", kind="resid", layer=1) == pytest.approx(
        measure(model, [ids], metrics="drift").value(metric="drift", kind="resid", layer=1)
    )
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(64, 8)))
    assert measure(tmp_path / "rows.npy", metrics="drift").unique("kind") == ["rows"]


def test_a_module_needs_batches() -> None:
    with pytest.raises(AnisoscopeError, match="data by name is for models given by name"):
        measure(tiny("gpt2"), "corpus.txt")
    with pytest.raises(AnisoscopeError, match="'tokens' is for models given by name"):
        measure(tiny("gpt2"), [torch.arange(9)[None]], tokens=9)
    with pytest.raises(AnisoscopeError, match="anywhere-here"):
        measure("no/such/folder/anywhere-here")
