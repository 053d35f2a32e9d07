"""What is not finite, too few, of another kind or named wrongly; banks that are saved and merged."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from anisoscope import measure
from anisoscope.capture import Batch
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.bank import Bank, Setup
from anisoscope.measurement.evaluation import evaluate_bank
from anisoscope.metrics.catalogue import parse_requests
from anisoscope.results.query import Table
from support import references
from support.measured import LENGTHS, MAIN, NEARLY_ALL, TEXT, batches, fed_bank, hidden, rows_of, same_tables
from support.tiny_models import contexts, padded, tiny


def broken(where: str) -> tuple[nn.Module, np.ndarray]:
    """A model in which one token of the vocabulary (or every one) is NaN, and which rows that token is."""
    model = tiny("bert", dtype=torch.float64)
    bad = int(TEXT[0][3])
    with torch.no_grad():
        weight = model.embeddings.word_embeddings.weight
        weight[bad if where == "one token" else slice(None)] = math.nan
    tokens = np.concatenate([row.numpy() for row in TEXT])
    return model, (tokens == bad) if where == "one token" else np.ones(len(tokens), dtype=bool)


def test_rows_that_are_not_finite_are_counted_and_kept_out() -> None:
    model, bad = broken("one token")
    table = measure(model, batches(), sites=["embed"], metrics=MAIN)
    x = hidden(model, batches())[0]
    assert np.isnan(x).any(1).sum() == bad.sum() > 0
    for metric in MAIN:
        (row,) = table.where(metric=metric).records()
        assert row["value"] == pytest.approx(getattr(references, metric)(x[~bad]), rel=1e-6)
        assert row["dropped"] >= bad.sum()
    (row,) = table.where(metric="svd_ratio").records()
    assert (row["n"], row["dropped"]) == ((~bad).sum(), bad.sum())


def test_a_model_of_nan_gives_no_number_and_says_why() -> None:
    model, _ = broken("every token")
    table = measure(model, batches(), layers=[1, 2], metrics=["all"])
    assert len(table) > 50
    assert not len(table.finite())
    for row in table.records():
        assert row["note"], row["metric"]
    (row,) = table.where(layer=1, kind="resid", metric="svd_ratio").records()
    assert row["dropped"] == sum(LENGTHS)


def test_too_few_rows_give_a_note_instead_of_a_number() -> None:
    table = measure(tiny("bert"), [padded(TEXT[:1])], sites=["resid"], layers=[1])
    (row,) = table.where(metric="two_nn").records()
    assert math.isnan(row["value"])
    assert "32" in row["note"]
    assert math.isfinite(table.value(metric="average_cosine"))


def test_weight_tables_are_measured_as_rows() -> None:
    model = tiny("gpt2", dtype=torch.float64)
    table = measure(model, batches(), sites=["embed_weight", "unembed"], metrics=["default", "singular_entropy"])
    for kind, layer, weight in (
        ("embed_weight", 0, model.transformer.wte.weight),
        ("unembed", 3, model.lm_head.weight),
    ):
        x = weight.detach().numpy()
        for metric in ("average_cosine", "svd_ratio", "singular_entropy"):
            expected = getattr(references, metric)(x)
            assert table.value(kind=kind, layer=layer, metric=metric, head=None) == pytest.approx(expected, rel=1e-9)


def test_any_module_is_measured_by_name() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    x = torch.randn(50, 7, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    table = measure(net, [x[:20], x[20:]], modules=["1", "2"], metrics=MAIN)
    with torch.inference_mode():
        middle = net[:2](x).flatten(0, 1).numpy()
    for metric in MAIN:
        expected = getattr(references, metric)(middle)
        assert table.value(kind="1", metric=metric) == pytest.approx(expected, rel=1e-6)
    assert {row["kind"] for row in table.records()} == {"1", "2"}


def test_names_that_do_not_exist_suggest_the_nearest() -> None:
    model = tiny("bert")
    with pytest.raises(AnisoscopeError, match="two_nn"):
        measure(model, batches(), metrics=["two_n"])
    with pytest.raises(AnisoscopeError, match="resid"):
        measure(model, batches(), sites=["residual"])
    with pytest.raises(AnisoscopeError, match="first"):
        measure(model, batches(), first="maybe")
    with pytest.raises(AnisoscopeError, match="scores"):
        measure(model, batches(), sites=["scores"], metrics=["two_nn"])


def test_no_batches_raise_instead_of_giving_an_empty_table() -> None:
    with pytest.raises(AnisoscopeError, match="no batches to measure"):
        measure(tiny("bert"), [])


def test_measuring_twice_gives_the_same_table_and_leaves_the_model_alone() -> None:
    model = tiny("bert").train()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    one, two = measure(model, batches()), measure(model, batches())
    assert one.arrow.equals(two.arrow) or rows_of(one).keys() == rows_of(two).keys()
    same_tables(one, two, rel=0.0)
    assert model.training
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_table_can_be_filtered_read_and_shown() -> None:
    table = measure(tiny("bert"), batches(), name="tiny")
    frame = table.to_pandas()
    assert len(frame) == len(table) == table.to_arrow().num_rows
    assert set(frame["model"]) == {"tiny"}
    some = table.where(metric=["svd_ratio", "two_nn"], kind="resid")
    assert set(some.metrics) == {"svd_ratio", "two_nn"}
    assert len(some) == 6
    assert (
        some.value(metric="svd_ratio", layer=2)
        == frame.query("metric == 'svd_ratio' and layer == 2 and kind == 'resid'")["value"].item()
    )
    with pytest.raises(LookupError, match="rows match"):
        table.value(metric="svd_ratio")
    assert table.where() is table
    assert list(frame.query("kind == 'resid' and metric == 'svd_ratio'")["depth"]) == pytest.approx([1 / 3, 2 / 3, 1])
    assert "<table" in table._repr_html_()
    assert table.plot() is not None
    assert table.plot("svd_ratio").data


def bank_table(bank: Bank) -> Table:
    setup = Setup(None, [], [], [], {"single": 3})
    return Table.from_records(evaluate_bank(bank, parse_requests(NEARLY_ALL), setup))


def grouped() -> list[Batch]:
    names = ["a", "b", "c", "a", "b"] * 2
    return [Batch(batch, groups=tuple(names[i * 2 : i * 2 + 2])) for i, batch in enumerate(batches(size=2))]


@pytest.mark.parametrize("strata", [False, True])
def test_a_bank_saved_midway_ends_as_if_undisturbed(strata: bool) -> None:
    model = tiny("gpt2", dtype=torch.float64)
    made = grouped() if strata else batches(size=2)
    half = fed_bank(model, made[:2])
    loaded = Bank.load(half.plan, half.state())
    same_tables(bank_table(half), bank_table(loaded), rel=1e-12)
    whole = fed_bank(model, made)
    same_tables(bank_table(fed_bank(model, made[2:], bank=loaded)), bank_table(whole), rel=1e-9, names=("value",))


@pytest.mark.parametrize("strata", [False, True])
def test_merged_halves_equal_the_whole_in_any_order(strata: bool) -> None:
    model = tiny("gpt2", dtype=torch.float64)
    made = grouped() if strata else batches(size=2)
    one, two, whole = fed_bank(model, made[:2]), fed_bank(model, made[2:]), fed_bank(model, made)
    expected = bank_table(whole)
    same_tables(bank_table(one.merge(two)), expected, rel=1e-9, names=("value",))
    same_tables(bank_table(two.merge(one)), expected, rel=1e-9, names=("value",))
    empty = Bank(whole.plan)
    same_tables(bank_table(empty.merge(whole)), expected, rel=1e-12, names=("value",))
    same_tables(bank_table(whole.merge(empty)), expected, rel=1e-12, names=("value",))


def test_a_merged_bank_that_goes_on_does_not_change_its_parts() -> None:
    model = tiny("gpt2", dtype=torch.float64)
    one = fed_bank(model, batches(size=2)[:2])
    before = bank_table(one)
    merged = one.merge(Bank(one.plan))
    fed_bank(model, batches(size=2)[2:], bank=merged)
    same_tables(bank_table(one), before, rel=0.0, names=("value",))


def test_too_many_groups_are_refused() -> None:
    text = contexts(*[6] * 40, seed=1)
    made = [Batch(padded(text), groups=tuple(f"g{i}" for i in range(40)))]
    with pytest.raises(AnisoscopeError, match="groups"):
        measure(tiny("bert"), made)
