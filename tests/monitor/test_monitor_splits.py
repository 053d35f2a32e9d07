"""Further splits: the same contexts in other halves give what a run whose only split is that one gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anisoscope.capture import step_capture
from anisoscope.capture.row import original_contexts
from anisoscope.errors import AnisoscopeError
from anisoscope.monitor import instruments
from anisoscope.numerics.hashing import fold_of, half_of
from anisoscope.results.query import Query, Table
from anisoscope.tangent.plan import TangentPlan
from support.monitored import MAIN, PLAN, build, measured, probe_of, trained

SPLIT = 3


def energies(table: Table, split: str | None) -> dict[tuple[Any, ...], float]:
    """Energies and shares of gradients; draws are float32, and a permuted control depends on the order of rows."""
    rows = Query(table).where(metric=["gradient_energy", "gradient_share"], split=split, proxy=..., of=None)
    rows = rows.where(coordinates=None, first=None, fit="refit", control=[None, "next"])
    fields = ("metric", "step", "layer", "kind", "group", "proxy", "control", "average")
    return dict(zip(zip(*map(rows.column, fields), strict=True), rows.column("value"), strict=True))


def test_halves_of_different_splits_are_independent_and_the_first_is_as_ever() -> None:
    contexts = torch.arange(4000)
    one, two = half_of(contexts), half_of(contexts, split=1)
    assert int(half_of(torch.tensor([123456789]))) == 1 and torch.equal(one, half_of(contexts, split=0))
    assert abs(float((one == two).double().mean()) - 0.5) < 0.04
    assert abs(float((two == (fold_of(contexts) < 4)).double().mean()) - 0.5) < 0.04


@pytest.mark.parametrize("name", ["gpt2", "bert-masked"])
def test_a_split_is_what_a_run_with_these_halves_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_split = measured(name, probe_of(name), split=(SPLIT,))
    plain = measured(name, probe_of(name))
    kept = [row for row in with_split.records() if "split=" not in row["variant"]]
    assert [row["value"] for row in kept] == pytest.approx([r["value"] for r in plain.records()], nan_ok=True, rel=0)
    monkeypatch.setattr(instruments, "half_of", lambda contexts: half_of(contexts, split=SPLIT))
    only = energies(measured(name, probe_of(name)), None)
    found = energies(with_split, str(SPLIT))
    assert found.keys() == only.keys() and len(found) > 10
    assert found == pytest.approx(only, rel=1e-9, abs=1e-12, nan_ok=True)
    assert found != pytest.approx(energies(plain, None), rel=1e-3, nan_ok=True), "other halves give other numbers"


def test_energy_of_a_split_by_hand() -> None:
    """A slow twin: autograd on each context, PCA of the one half, energy of the other."""
    from support.gradient_models import summed
    from support.tiny_models import tiny

    batch, model = probe_of("gpt2"), tiny("gpt2", dtype=torch.float64).eval()
    test = half_of(original_contexts(batch), split=SPLIT) == 1
    x, g = [], []
    for b in range(len(test)):
        ids = batch["input_ids"][b : b + 1, batch["attention_mask"][b].bool()]
        output = model(input_ids=ids, output_hidden_states=True)
        targets = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)
        hidden = output.hidden_states[2]
        (gradient,) = torch.autograd.grad(summed(output.logits, targets), hidden)
        x.append(hidden[0].detach())
        g.append(gradient[0])
    fit = torch.cat([rows for rows, tested in zip(x, test, strict=True) if not tested])
    basis = torch.linalg.svd(fit - fit.mean(0), full_matrices=False).Vh[:4].T
    G = torch.cat([rows for rows, tested in zip(g, test, strict=True) if tested])
    wanted = float((G @ basis).square().sum() / G.square().sum())
    table = measured("gpt2", probe_of("gpt2"), split=SPLIT)
    where = {"metric": "gradient_energy", "layer": 2, "kind": "resid", "group": ""}
    assert table.value(**where, variant=f"{MAIN};split={SPLIT}") == pytest.approx(wanted, rel=1e-6)


def test_training_batches_have_splits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"plan": PLAN, "metrics": "tangent", "live": True}
    _, _, both = trained("gpt2", {**options, "split": SPLIT}, steps=1)
    monkeypatch.setattr(step_capture, "half_of", lambda contexts: half_of(contexts, split=SPLIT))
    _, _, only = trained("gpt2", options, steps=1)
    found = energies(both.table, str(SPLIT))
    assert found and found == pytest.approx(energies(only.table, None), rel=1e-5, nan_ok=True)


def test_a_split_without_one_half_is_noted_and_left_out() -> None:
    halves = half_of(original_contexts(probe_of("gpt2"))).tolist()
    chosen = torch.tensor([halves.index(0), halves.index(1)])
    few = {name: value[chosen] for name, value in probe_of("gpt2").items()}
    hashes = original_contexts(few)
    lacking = next(s for s in range(1, 99) if len(half_of(hashes, split=s).unique()) < 2)
    monitor = build(probe=few, split=lacking)
    with monitor, monitor.step(0):
        pass
    assert not energies(monitor.table, str(lacking))
    assert any(f"of split {lacking}" in note for note in monitor.notes)


@pytest.mark.parametrize("given", [(0,), (-1,), (1, 1)])
def test_splits_that_are_none(given: tuple[int, ...]) -> None:
    with pytest.raises(AnisoscopeError, match="expected different whole numbers from 1 on"):
        TangentPlan(splits=given)
