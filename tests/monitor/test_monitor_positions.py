"""`Monitor(skip_first=…, skip_special=…)`: the rows are those that are left when others are dropped by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anisoscope.capture.row import PositionChoice, original_contexts
from anisoscope.capture.sampled_rows import SampledContexts
from anisoscope.errors import AnisoscopeError
from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import at
from anisoscope.numerics.hashing import half_of
from anisoscope.results.query import Table
from support.gradient_models import language_model
from support.monitored import PLAN, probe_of

RANK, SPECIAL = 4, (5, 7)
TOKENIZER = SimpleNamespace(all_special_ids=[*SPECIAL, 3], unk_token_id=None, mask_token_id=3)  # [MASK] is kept
SITE = {"layer": 1, "kind": "resid", "group": ""}
CASES = [{"skip_first": True}, {"skip_special": True}, {"skip_first": True, "skip_special": True}]


def _by_hand(model: nn.Module, batch: dict[str, Tensor], **skips: bool) -> dict[str, Any]:
    """Numbers of block 1 by plain autograd and numpy."""
    found = model(**batch, output_hidden_states=True)
    h = found.hidden_states[1]
    logits, labels = found.logits[:, :-1], batch["labels"][:, 1:]
    total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    (gradient,) = torch.autograd.grad(total, h)
    kept = batch["attention_mask"].bool().clone()
    if skips.get("skip_first"):
        kept[:, 0] = False  # padding is on the right
    if skips.get("skip_special"):
        kept &= ~torch.isin(batch["input_ids"], torch.tensor(SPECIAL))
    half = half_of(original_contexts(batch))[:, None].expand_as(kept)
    rows, x = h.detach()[kept].numpy(), h.detach()[kept & (half == 0)].numpy()
    g = gradient[kept & (half == 1)].numpy()
    s, unit = x.std(0, ddof=1), rows / np.linalg.norm(rows, axis=1, keepdims=True)
    n, answers = len(rows), {"n": len(rows), "tested": len(g)}
    answers["cosine"] = (float(np.square(unit.sum(0)).sum()) - n) / (n * (n - 1))
    for name, (a, b) in {"": (x, g), "standardised": (x / s, g * s)}.items():
        Q = np.linalg.svd(a - a.mean(0))[2][:RANK].T
        answers[f"energy{name}"] = float(np.square(b @ Q).sum() / np.square(b).sum())
        C, M = np.cov(a.T), b.T @ b
        answers[f"alignment{name}"] = float(len(C) * np.trace(C @ M) / np.trace(C) / np.trace(M))
    return answers


def _check(table: Table, wanted: dict[str, Any], *, live: str = "") -> None:
    energy = f"{live}fit=refit;proxy=pca;rank=4"
    variants = {"energy": energy, "energystandardised": f"{live}coordinates=standardised;fit=refit;proxy=pca;rank=4"}
    for name, variant in variants.items():
        (row,) = table.where(**SITE, metric="gradient_energy", variant=variant).records()
        assert row["value"] == pytest.approx(wanted[name], rel=1e-9) and row["n"] == wanted["tested"]
    for name, space in (("alignment", ""), ("alignmentstandardised", "coordinates=standardised")):
        value = table.value(**SITE, metric="gradient_alignment", variant=f"{live}{space}".strip(";"))
        assert value == pytest.approx(wanted[name], rel=1e-9)
    (row,) = table.where(**SITE, metric="average_cosine", variant="").records()
    assert row["value"] == pytest.approx(wanted["cosine"], rel=1e-9) and row["n"] == wanted["n"]


@pytest.mark.parametrize("skips", [{}, *CASES])
@pytest.mark.parametrize("live", [False, True])
def test_rows_left_out_are_left_out_of_everything(skips: dict[str, bool], live: bool) -> None:
    model, batch = language_model("gpt2"), probe_of("gpt2")
    given: dict[str, Any] = {"live": True} if live else {"probe": batch}
    words: dict[str, Any] = {
        "plan": replace(PLAN, standardised=True),
        "metrics": "tangent,average_cosine",
        "tokenizer": TOKENIZER,
    }
    monitor = Monitor(model, when=at([0]), **given, **words, **skips)
    with monitor, monitor.step(0):
        if live:
            model(**batch).loss.backward()
    _check(monitor.table, _by_hand(model, batch, **skips), live="batch=live;" if live else "")
    assert {name: monitor.options.get(name, False) for name in skips} == skips


def test_without_gradients_positions_are_left_out_too() -> None:
    model, batch = language_model("gpt2"), probe_of("gpt2")
    monitor = Monitor(model, when=at([0]), probe=batch, metrics="average_cosine", skip_first=True)
    with monitor, monitor.step(0):
        pass
    wanted = _by_hand(model, batch, skip_first=True)
    (row,) = monitor.table.where(**SITE, metric="average_cosine", variant="").records()
    assert row["value"] == pytest.approx(wanted["cosine"], rel=1e-9) and row["n"] == wanted["n"]


def test_light_measures_standardised_coordinates_if_told() -> None:
    plan = PLAN  # without standardised coordinates
    for wanted in (None, True):
        monitor = Monitor(
            language_model("gpt2"),
            when=at([0]),
            probe=probe_of("gpt2"),
            plan=plan,
            metrics="tangent",
            standardised=wanted,
        )
        with monitor, monitor.step(0):
            pass
        variants = monitor.table.where(**SITE, metric="gradient_energy").to_arrow()["variant"].to_pylist()
        assert any("standardised" in variant for variant in variants) == bool(wanted)


def test_sampled_rows_of_every_step_are_not_at_positions_that_are_left_out() -> None:
    ids = torch.arange(50).view(5, 10) % 8
    real = torch.arange(10) < torch.tensor([[10], [9], [8], [7], [2]])
    for mask in (None, real):
        contexts = SampledContexts(torch.zeros(5), mask, ids, most=100)
        choice = PositionChoice(first="out", special="out", special_ids=SPECIAL)
        found = contexts.select(10, choice, torch.device("cpu"))
        valid = found.index.valid  # type: ignore[attr-defined]
        take = found.take[valid] if valid is not None else found.take
        kept = (torch.ones(5, 10, dtype=torch.bool) if mask is None else mask) & ~torch.isin(ids, torch.tensor(SPECIAL))
        kept[:, 0] = False
        assert sorted(take.tolist()) == kept.flatten().nonzero().squeeze(1).tolist()


def test_special_tokens_that_nothing_names_are_refused() -> None:
    model = language_model("gpt2")
    for name in ("bos", "eos", "pad"):
        setattr(model.config, f"{name}_token_id", None)
    with pytest.raises(AnisoscopeError, match="names none; give tokenizer="):
        Monitor(model, when=at([0]), probe=probe_of("gpt2"), plan=PLAN, metrics="tangent", skip_special=True)
