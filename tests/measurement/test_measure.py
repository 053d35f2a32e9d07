"""Measuring a model: the same numbers as brute force over its own hidden states, whatever the batching."""

from __future__ import annotations

import gc
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from anisoscope import measure
from anisoscope.capture import Batch, Capture
from anisoscope.measurement.bank import Bank
from support import references
from support.measured import LENGTHS, MAIN, NEARLY_ALL, TEXT, batches, fed_bank, hidden, same_tables
from support.tiny_models import contexts, padded, tiny

STREAM = ["embed", "resid", "final"]


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_float64_model_is_measured_as_by_brute_force(name: str) -> None:
    model = tiny(name, dtype=torch.float64)
    table = measure(model, batches(), sites=STREAM, metrics=MAIN)
    states = hidden(model, batches())
    places = [(0, "embed"), *((layer, "resid") for layer in range(1, len(states) - 1))]
    places += [(len(states) - 1, "resid" if name == "bert" else "final")]
    for (layer, kind), x in zip(places, states, strict=True):
        assert len(x) == sum(LENGTHS)
        for metric in MAIN:
            (row,) = table.where(layer=layer, kind=kind, metric=metric, variant="").records()
            tolerance = 1e-6 if metric == "two_nn" else 1e-9
            assert row["value"] == pytest.approx(getattr(references, metric)(x), rel=tolerance), (layer, metric)
            assert row["contexts"] == len(LENGTHS)
            assert row["n"] + (row["dropped"] if metric == "two_nn" else 0) == len(x)
            assert row["low"] <= row["value"] <= row["high"]


def test_every_metric_is_measured_as_by_brute_force() -> None:
    model = tiny("bert", dtype=torch.float64)
    table = measure(
        model, batches(), sites=["resid"], layers=[2], metrics=["all", "max_explainable_variance:baseline=0"]
    )
    x = hidden(model, batches())[2]
    tokens = np.concatenate([row.numpy() for row in TEXT])
    context = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    plain = set(table.metrics) - {"self_similarity", "context_similarity", "max_explainable_variance",
                                    "partition_isotropy", "local_anisotropy", "singular_entropy"}  # fmt: skip
    assert len(plain) > 18
    for metric in plain:
        expected = getattr(references, metric)(x)
        assert table.value(metric=metric, variant="") == pytest.approx(expected, rel=1e-6), metric
    alike = references.self_similarity(x, tokens)
    assert table.value(metric="self_similarity", variant="") == pytest.approx(alike, rel=1e-9)
    within = references.context_similarity(x, context)
    assert table.value(metric="context_similarity", variant="") == pytest.approx(within, rel=1e-9)
    static = references.max_explainable_variance(x, tokens)
    assert table.value(metric="max_explainable_variance", variant="baseline=0") == pytest.approx(static, rel=1e-6)
    log_isotropy = math.log(table.value(metric="partition_isotropy", variant=""))
    assert log_isotropy == pytest.approx(math.log(references.partition_isotropy(x)), rel=1e-6)


def test_variants_are_named_after_their_options() -> None:
    model = tiny("bert", dtype=torch.float64)
    table = measure(model, batches(), sites=["resid"], layers=[1], metrics=["svd_ratio", "svd_ratio:centred=0"])
    assert sorted(row["variant"] for row in table.records()) == ["", "centred=0"]
    expected = references.svd_ratio(hidden(model, batches())[1], centred=False)
    assert table.value(variant="centred=0") == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_numbers_do_not_depend_on_batch_size_padding_side_or_order(name: str) -> None:
    model = tiny(name, dtype=torch.float64)
    options: dict[str, Any] = {"sites": ["embed", "resid", "attn_in"], "layers": [0, 2], "metrics": NEARLY_ALL}
    one = measure(model, batches(), **options)
    for other in (
        batches(size=1),
        batches(size=10),
        batches(size=3, side="left"),
        batches(size=4, text=TEXT[::-1]),
        batches(size=5, text=TEXT[5:] + TEXT[:5], side="left"),
    ):
        two = measure(model, other, **options)
        same_tables(one, two, rel=1e-9, names=("value",))
        same_tables(one, two, rel=1e-7, names=("low", "high"))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_attention_does_not_depend_on_batch_size_or_padding_side(name: str, attention: str) -> None:
    # in float64 an eager llama of transformers is NaN in rows that see only padding, and from there everywhere
    dtype = torch.float32 if (name, attention) == ("llama", "eager") else torch.float64
    model = tiny(name, attention=attention, dtype=dtype)
    metrics = ["attention_entropy", "attention_sharpness", "attention_entropy:first=0", "first_key_mass",
               "score_spread", "qk_cosine", "average_cosine"]  # fmt: skip
    sites = ["query", "key", "scores"]
    one = measure(model, batches(), sites=sites, metrics=metrics)
    for other in (batches(size=1), batches(size=3, side="left"), batches(size=4, text=TEXT[::-1])):
        same_tables(one, measure(model, other, sites=sites, metrics=metrics), rel=1e-4)


def test_repeated_contexts_count_each_time_in_one_batch_or_in_two() -> None:
    model = tiny("bert", dtype=torch.float64)
    text = [*TEXT, TEXT[0], TEXT[0]]
    tables = [measure(model, batches(size=size, text=text), sites=["resid"], metrics=NEARLY_ALL) for size in (1, 12)]
    same_tables(*tables, rel=1e-9, names=("value",))
    assert tables[0].records()[0]["contexts"] == 12


def test_samples_are_identical_for_any_batching() -> None:
    model = tiny("bert", dtype=torch.float64)
    banks = [fed_bank(model, made, sample_size=50) for made in (batches(), batches(size=1, text=TEXT[::-1]))]
    for site, stats in banks[0].sites.items():
        other = banks[1].sites[site]
        if stats.sample is None:  # per head, only directions are kept
            assert site.kind in ("query", "key", "scores")
            continue
        assert len(stats.sample) == 50
        for label in ("hash", "context", "position", "token"):
            assert torch.equal(stats.sample.label(label), other.sample.label(label))
        torch.testing.assert_close(stats.sample.rows, other.sample.rows, rtol=1e-9, atol=1e-12)


def test_float32_end_to_end_agrees_to_1e_4() -> None:
    model = tiny("bert")
    one, two = (measure(model, made, sites=STREAM, metrics=MAIN[:-1]) for made in (batches(size=1), batches(size=10)))
    same_tables(one, two, rel=1e-4)


def test_padding_would_change_the_numbers_if_it_were_counted() -> None:
    model = tiny("bert", dtype=torch.float64)
    honest = measure(model, batches(size=10), sites=["resid"], metrics=["average_cosine"])
    everything = [{**batch, "attention_mask": torch.ones_like(batch["attention_mask"])} for batch in batches(size=10)]
    padded_too = measure(model, everything, sites=["resid"], metrics=["average_cosine"], rows=lambda _, given: (
        torch.ones_like(given["input_ids"], dtype=torch.bool)))  # fmt: skip
    assert padded_too.where(layer=1).records()[0]["n"] == 200 > honest.where(layer=1).records()[0]["n"]
    assert abs(padded_too.value(layer=1) - honest.value(layer=1)) > 0.01


def flagged() -> list[Batch]:
    """Batches in which every token below 12 counts as special."""
    return [Batch(batch, special=batch["input_ids"] < 12) for batch in batches()]


@pytest.mark.parametrize("special", ["in", "out"])
@pytest.mark.parametrize("first", ["in", "out"])
def test_special_tokens_and_the_first_position_are_in_or_out(special: str, first: str) -> None:
    model = tiny("bert", dtype=torch.float64)
    table = measure(model, flagged(), sites=["resid"], layers=[2], metrics=MAIN, special=special, first=first)
    tokens = np.concatenate([row.numpy() for row in TEXT])
    position = np.concatenate([np.arange(length) for length in LENGTHS])
    keep = np.ones(len(tokens), dtype=bool)
    keep &= (tokens >= 12) | (special == "in")
    keep &= (position > 0) | (first == "in")
    x = hidden(model, batches())[2][keep]
    assert table.where(metric="svd_ratio").records()[0]["n"] == len(x)
    for metric in MAIN:
        assert table.value(metric=metric) == pytest.approx(getattr(references, metric)(x), rel=1e-6)


@pytest.mark.parametrize("pool", ["mean", "cls", "last"])
def test_pooled_rows_are_one_per_context(pool: str) -> None:
    model = tiny("gpt2", dtype=torch.float64)
    table = measure(model, batches(size=3, side="left"), sites=["resid"], layers=[1], metrics=MAIN[:-1], pool=pool)
    starts = np.cumsum([0, *LENGTHS])
    parts = [hidden(model, batches())[1][a:b] for a, b in pairwise(starts)]
    x = np.stack([{"mean": part.mean(0), "cls": part[0], "last": part[-1]}[pool] for part in parts])
    for metric in MAIN[:-1]:
        (row,) = table.where(metric=metric).records()
        assert row["value"] == pytest.approx(getattr(references, metric)(x), rel=1e-9)
        assert row["n"] == row["contexts"] == 10


def test_groups_are_measured_apart_and_together() -> None:
    model = tiny("bert", dtype=torch.float64)
    text = contexts(*[16] * 12, seed=5)
    names = ["prose", "code", "code", "verse"] * 3
    made = [Batch(padded(text[i : i + 5]), groups=tuple(names[i : i + 5])) for i in range(0, 12, 5)]
    table = measure(model, made, sites=["resid"], layers=[1], metrics=[*MAIN, "context_similarity"])
    x = hidden(model, [padded(text)])[1].reshape(12, 16, -1)
    assert {row["group"] for row in table.records()} == {"", "prose", "code", "verse"}
    for group in ("", "prose", "code", "verse"):
        chosen = np.array([name == group or not group for name in names])
        mine = x[chosen].reshape(-1, x.shape[-1])
        for metric in MAIN:
            (row,) = table.where(metric=metric, group=group).records()
            assert row["value"] == pytest.approx(getattr(references, metric)(mine), rel=1e-6)
            assert row["contexts"] == chosen.sum()
        within = references.context_similarity(mine, np.repeat(np.arange(chosen.sum()), 16))
        assert table.value(metric="context_similarity", group=group) == pytest.approx(within, rel=1e-9)


def test_weight_tables_belong_to_no_group() -> None:
    model = tiny("gpt2", dtype=torch.float64)
    made = [Batch(padded(TEXT[:4]), groups=("a", "b", "a", "b"))]
    table = measure(model, made, sites=["resid", "unembed"], metrics=["average_cosine"])
    assert {row["group"] for row in table.where(kind="resid").records()} == {"", "a", "b"}
    (row,) = table.where(kind="unembed").records()
    assert row["group"] == ""
    assert row["value"] == pytest.approx(references.average_cosine(model.lm_head.weight.detach().numpy()), rel=1e-9)


def test_an_outlying_first_position_is_reported_both_ways_and_an_ordinary_one_is_not() -> None:
    model = tiny("gpt2", dtype=torch.float64)
    metrics = [*MAIN, "context_similarity", "massive_activation"]
    plain = measure(model, batches(), sites=["embed", "resid"], metrics=metrics)
    assert {row["variant"] for row in plain.records()} == {""}
    with torch.no_grad():
        model.transformer.wpe.weight[0] += 300.0
    table = measure(model, batches(), sites=["embed", "resid"], metrics=metrics)
    assert {row["variant"] for row in table.records()} == {"", "first=out"}
    states = hidden(model, batches())
    rest = np.concatenate([np.arange(length) for length in LENGTHS]) > 0
    context = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    for layer, kind in ((0, "embed"), (1, "resid")):
        x = states[layer]
        for metric in MAIN:
            twin = getattr(references, metric)
            assert table.value(layer=layer, kind=kind, metric=metric, variant="") == pytest.approx(twin(x), rel=1e-6)
            out = table.value(layer=layer, kind=kind, metric=metric, variant="first=out")
            assert out == pytest.approx(twin(x[rest]), rel=1e-6), metric
        for variant, mask in (("", slice(None)), ("first=out", rest)):
            within = references.context_similarity(x[mask], context[mask])
            seen = table.value(layer=layer, kind=kind, metric="context_similarity", variant=variant)
            assert seen == pytest.approx(within, rel=1e-9), variant
    honest = table.value(layer=1, metric="svd_ratio_squared", variant="first=out")
    assert table.value(layer=1, metric="svd_ratio_squared", variant="") > 2 * honest


def test_first_out_leaves_nothing_to_report_both_ways() -> None:
    model = tiny("gpt2", dtype=torch.float64)
    with torch.no_grad():
        model.transformer.wpe.weight[0] += 300.0
    table = measure(model, batches(), sites=["resid"], metrics=["svd_ratio"], first="out")
    assert {row["variant"] for row in table.records()} == {""}


def test_what_was_captured_goes_with_its_last_user() -> None:
    """Without the collector: the rows of a large model fill a GPU, and the next measurement needs their room."""
    gc.collect()
    gc.disable()
    try:
        measure(tiny("llama"), batches())
        held = [thing for thing in gc.get_objects() if isinstance(thing, Bank | Capture)]
    finally:
        gc.enable()
    assert not held
