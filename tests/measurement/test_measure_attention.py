"""Attention, queries and keys as measure reads them, per head."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anisoscope import measure
from anisoscope.capture import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.cells import chosen_rows
from support import references
from support.measured import LENGTHS, TEXT, batches, rows_of
from support.tiny_models import captured, padded, tiny


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_attention_metrics_equal_those_of_the_models_own_probabilities(name: str) -> None:
    model = tiny(name, attention="eager", dtype=torch.float64)
    table = measure(model, batches(), sites=["scores"], attention_rows=0)
    expected = own_attention(model)
    layers, heads = len(expected), expected[0].shape[1]
    twins = {"attention_entropy": 0, "attention_sharpness": 1, "first_key_mass": 2}
    for layer in range(1, layers + 1):
        values = expected[layer - 1]  # rows × heads × quantities
        for metric, column in twins.items():
            seen = rows_of(table, layer=layer, metric=metric)
            by_head = {key[3]: row for key, row in seen.items()}
            assert set(by_head) == {None, *range(heads)}
            for head in range(heads):
                mean = np.nanmean(values[:, head, column])
                assert by_head[head]["value"] == pytest.approx(mean, rel=1e-4, abs=1e-6)
            assert by_head[None]["value"] == pytest.approx(np.nanmean(values[:, :, column], axis=0).mean(), rel=1e-4)
            few = np.isnan(values[:, 0, column]).sum()
            assert by_head[None]["n"] == sum(LENGTHS) - few
            assert by_head[None]["dropped"] == few == (0 if name == "bert" else 7 * len(LENGTHS))


def own_attention(model: nn.Module) -> list[np.ndarray]:
    """Entropy, sharpness and first mass of each row and head of each layer, from output_attentions."""
    out: list[list[Any]] = []
    causal = type(model).__name__ != "BertModel"
    for row in TEXT:
        with torch.inference_mode():
            attentions = model(input_ids=row[None], output_attentions=True).attentions
        for layer, p in enumerate(attentions):
            if len(out) <= layer:
                out.append([])
            for i in range(len(row)):
                allowed = np.arange(len(row)) <= (i if causal else len(row))
                seen = p[0, :, i].double().numpy()
                few = allowed.sum() < 8
                rows = [[references.row_entropy(q, allowed), references.row_sharpness(q, allowed), q[0]] for q in seen]
                out[layer].append([[math.nan] * 3] * len(seen) if few else rows)
    return [np.array(part) for part in out]


def test_fewer_attention_rows_are_a_sample_of_them() -> None:
    model = tiny("bert", dtype=torch.float64)
    table = measure(model, batches(), sites=["scores"], attention_rows=4)
    assert {row["n"] for row in table.records()} == {4 * len(LENGTHS)}
    whole = measure(model, batches(), sites=["scores"], attention_rows=0)
    near = table.value(layer=1, metric="attention_entropy", head=0)
    assert near == pytest.approx(whole.value(layer=1, metric="attention_entropy", head=0), rel=0.2)


def test_chosen_query_rows_do_not_depend_on_the_padding_side() -> None:
    model = tiny("llama")
    chosen = []
    for side in ("left", "right"):
        index = captured(model, padded(TEXT[:3], side=side)).at("1.resid").index
        shift = [20 - len(row) if side == "left" else 0 for row in TEXT[:3]]
        chosen.append([(positions - shift[n]).tolist() for n, positions, _ in chosen_rows(index, 5, seed=0)])
    assert chosen[0] == chosen[1]
    assert all(len(rows) == 5 for rows in chosen[0])


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_queries_and_keys_are_measured_per_head_and_grouped_heads_share_their_key(name: str) -> None:
    model = tiny(name, dtype=torch.float64)
    table = measure(model, batches(size=10), sites=["query", "key"], metrics=["average_cosine", "qk_cosine", "drift"])
    record = captured(model, batches(size=10)[0], [Site(2, "query"), Site(2, "key")])
    query, key = (record.at(f"2.{kind}").x.double().numpy() for kind in ("query", "key"))
    share = query.shape[1] // key.shape[1]
    assert share == (2 if name == "llama" else 1)
    for head in range(query.shape[1]):
        q, k = query[:, head], key[:, head // share]
        seen = table.where(layer=2, kind="query", head=head)
        assert seen.value(metric="average_cosine") == pytest.approx(references.average_cosine(q), rel=1e-9)
        assert seen.value(metric="drift") == pytest.approx(references.drift(q), rel=1e-9)
        a, b = q.mean(0), k.mean(0)
        cosine = a @ b / (np.linalg.norm(a) * np.linalg.norm(b))
        assert seen.value(metric="qk_cosine") == pytest.approx(cosine, rel=1e-9)
    for head in range(key.shape[1]):
        seen = table.value(layer=2, kind="key", head=head, metric="average_cosine")
        assert seen == pytest.approx(references.average_cosine(key[:, head]), rel=1e-9)
    (mean,) = table.where(layer=2, kind="query", head=None, metric="drift").records()
    heads = [table.value(layer=2, kind="query", head=h, metric="drift") for h in range(query.shape[1])]
    assert mean["value"] == pytest.approx(np.mean(heads), rel=1e-12)
    assert mean["sd"] == pytest.approx(np.std(heads, ddof=1), rel=1e-5)


def test_metrics_that_need_whole_contexts_or_neighbours_are_refused_per_head() -> None:
    for metric in ("context_similarity", "two_nn"):
        with pytest.raises(AnisoscopeError, match="query"):
            measure(tiny("bert"), batches(), sites=["query"], metrics=[metric])
    table = measure(tiny("bert"), batches(), sites=["query"], metrics=["self_similarity", "svd_ratio"])
    assert len(table.finite()) == 3 * 2 * 5
