"""The four traps of the field, each with the counter-test that shows it can be fallen into."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import anisoscope
from anisoscope import Capture, measure
from anisoscope.capture import find_layout
from anisoscope.errors import AnisoscopeError
from support import references
from support.tiny_models import captured, contexts, padded, tiny


def plane(n: int = 800, d: int = 6, width: int = 40, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)) @ np.linalg.qr(rng.normal(size=(width, d)))[0].T


# 1. padding


def _lopsided() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = tiny("bert", dtype=torch.float64)
    return model, padded(contexts(40, 4, 5, 3, 6, 4))


def test_padding_is_never_data() -> None:
    model, batch = _lopsided()
    seen = measure(model, [batch], sites=["resid"], layers=[3], metrics=["average_cosine"])
    with torch.inference_mode():
        states = model(**batch).last_hidden_state
    honest = references.average_cosine(states[batch["attention_mask"].bool()].numpy())
    assert seen.value(metric="average_cosine") == pytest.approx(honest, rel=1e-9)
    assert seen.records()[0]["n"] == 62


def test_padding_counted_as_data_would_change_the_average_cosine() -> None:
    model, batch = _lopsided()
    with torch.inference_mode():
        states = model(**batch).last_hidden_state
    honest = references.average_cosine(states[batch["attention_mask"].bool()].numpy())
    fooled = references.average_cosine(states.flatten(0, 1).numpy())
    assert fooled - honest > 0.1


# 2. duplicates


def test_exact_duplicates_change_no_dimension_and_are_counted() -> None:
    x = plane()
    doubled = np.concatenate([x, x[:40], x[:40]])
    for name in ("two_nn", "gride", "levina_bickel", "hubness"):
        metric = getattr(anisoscope, name)
        assert metric(doubled).value == pytest.approx(metric(x).value, rel=1e-9), name
    seen = anisoscope.two_nn(doubled)
    assert seen.dropped == 80
    assert "80 duplicates removed" in seen.note
    assert seen.n == 800


def test_duplicates_kept_would_ruin_the_dimension() -> None:
    x = plane()
    doubled = np.concatenate([x, x[:40] + 1e-9])
    full = np.sqrt(((doubled[:, None] - doubled[None]) ** 2).sum(-1))
    np.fill_diagonal(full, np.inf)
    r = np.sort(full, axis=1)
    ruined = len(r) / np.log(r[:, 1] / r[:, 0]).sum()
    assert anisoscope.two_nn(x, method="ml").value == pytest.approx(6, rel=0.1)
    assert ruined < 2.0


def test_the_embedding_of_a_few_letters_is_refused_instead_of_given_a_dimension() -> None:
    table = measure(tiny("llama"), [padded(contexts(60, 60, 60))], sites=["embed"], metrics=["two_nn"])
    (row,) = table.records()
    assert row["dropped"] + row["n"] == 180
    assert row["dropped"] > 100
    letters = contexts(60, 60, 60)
    few = measure(tiny("llama"), [padded([row % 9 + 6 for row in letters])], sites=["embed"], metrics=["two_nn"])
    assert math.isnan(few.value(metric="two_nn"))
    assert "distinct" in few.records()[0]["note"]


# 3. a common mean


def test_a_common_mean_of_norm_3000_changes_nothing() -> None:
    x = plane(d=12)
    far = (x + 3000 / math.sqrt(40)).astype(np.float32)
    for name in ("two_nn", "svd_ratio", "participation_ratio", "levina_bickel"):
        near = getattr(anisoscope, name)(far.astype(np.float64) - far.astype(np.float64).mean(0)).value
        assert getattr(anisoscope, name)(far).value == pytest.approx(near, rel=1e-6), name
    assert anisoscope.two_nn(far).value == pytest.approx(references.two_nn(far), rel=1e-9)


def test_float32_distances_under_a_common_mean_are_wrong() -> None:
    far = torch.as_tensor(plane(d=12) + 3000 / math.sqrt(40)).float()
    distance = torch.cdist(far, far, compute_mode="use_mm_for_euclid_dist").fill_diagonal_(torch.inf)
    r = distance.sort(1).values[:, :2].double()
    usable = r[:, 0] > 0
    naive = float(usable.sum() / (r[usable, 1] / r[usable, 0]).log().sum())
    truth = references.two_nn_ml(far.numpy())
    assert abs(naive / truth - 1) > 0.2
    assert anisoscope.two_nn(far, method="ml").value == pytest.approx(truth, rel=1e-9)


def test_float32_spectra_under_a_common_mean_are_wrong() -> None:
    far = torch.as_tensor(0.05 * plane(d=12) + 3000.0).float()
    gram = far.T @ far - len(far) * far.mean(0)[:, None] * far.mean(0)[None]
    values = torch.linalg.eigvalsh(gram.double()).clamp_min(0)
    naive = float(values[-1] / values.sum())
    truth = references.svd_ratio_squared(far.double().numpy())
    assert abs(naive / truth - 1) > 0.2
    assert anisoscope.svd_ratio_squared(far).value == pytest.approx(truth, rel=1e-6)


# 4. hooks that see nothing


class Bypassed(nn.Module):
    """A model whose second block is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x)


def test_a_module_that_is_never_called_raises_with_its_name() -> None:
    with pytest.raises(AnisoscopeError, match=r"blocks\.1"):
        measure(Bypassed(), [torch.randn(3, 5, 4)], modules=["blocks.*"])


def test_a_module_that_is_called_is_seen() -> None:
    table = measure(Bypassed(), [torch.randn(3, 50, 4)], modules=["blocks.0"], metrics=["svd_ratio"])
    assert table.records()[0]["n"] == 150


def test_a_capture_that_saw_no_pass_raises() -> None:
    model = tiny("bert")
    with pytest.raises(AnisoscopeError, match="no forward pass"), Capture(model, find_layout(model).sites(), Nothing()):
        pass


def test_every_row_and_layer_of_gpt2_is_seen_though_its_layers_are_no_linears() -> None:
    model = tiny("gpt2")
    assert not any(isinstance(m, nn.Linear) for m in model.transformer.modules()), "Conv1D, the old trap"
    record = captured(model, padded(contexts(12, 7)), find_layout(model).sites())
    assert {str(rows.site) for rows in record.all} == {"0.embed", "1.resid", "2.resid", "3.resid", "3.final"}
    assert {len(rows.x) for rows in record.all} == {19}


class Nothing:
    def rows(self, rows: object) -> None: ...

    def scores(self, scores: object) -> None: ...
