"""Measuring a model: the same numbers as brute force over its own hidden states, whatever the batching."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import references
from anisoscope import measure
from anisoscope.capture import Batch, Capture, Site, find_layout
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.metric import parse_requests, registry
from anisoscope.runs.bank import Bank, chosen_rows
from anisoscope.runs.measure import Setup, evaluate_bank, make_plan
from anisoscope.runs.table import Table
from tiny_models import captured, contexts, padded, tiny

LENGTHS = (20, 11, 17, 9, 14, 20, 8, 12, 18, 10)
TEXT = contexts(*LENGTHS, seed=3)
MAIN = ["average_cosine", "svd_ratio", "svd_ratio_squared", "participation_ratio", "iso_score", "two_nn"]
STREAM = ["embed", "resid", "final"]
# all of them but the one whose clustering takes most of the time
NEARLY_ALL = [*(set(registry()) - {"local_anisotropy"}), "local_anisotropy:partition=none"]


def batches(*, size: int = 4, side: str = "right", text: list[Tensor] | None = None) -> list[dict[str, Tensor]]:
    """Padded batches with explicit positions, so that the padding side changes nothing in the model."""
    text = TEXT if text is None else text
    made = []
    for start in range(0, len(text), size):
        batch = padded(text[start : start + size], side=side)
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
        made.append(batch)
    return made


def hidden(model: nn.Module, made: list[dict[str, Tensor]]) -> list[np.ndarray]:
    """The model's own hidden states, layer by layer, without padding."""
    layers: list[list[Tensor]] = []
    with torch.inference_mode():
        for batch in made:
            states = model(**batch, output_hidden_states=True).hidden_states
            layers.append([state[batch["attention_mask"].bool()] for state in states])
    return [torch.cat([part[i] for part in layers]).double().numpy() for i in range(len(layers[0]))]


def rows_of(table: Table, **columns: Any) -> dict[tuple[Any, ...], dict[str, Any]]:
    names = ("stack", "layer", "kind", "head", "group", "metric", "variant")
    return {tuple(row[name] for name in names): row for row in table.where(**columns).records()}


def same_tables(one: Table, two: Table, *, rel: float, names: tuple[str, ...] = ("value", "low", "high")) -> None:
    mine, theirs = rows_of(one), rows_of(two)
    assert set(mine) == set(theirs)
    for key, row in mine.items():
        other = theirs[key]
        for name in names:
            assert other[name] == pytest.approx(row[name], rel=rel, abs=1e-10, nan_ok=True), (key, name)
        assert (other["n"], other["contexts"], other["dropped"]) == (row["n"], row["contexts"], row["dropped"]), key


# brute force


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
    plain = set(table.metrics()) - {"self_similarity", "context_similarity", "max_explainable_variance",
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


# batching


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


# what is a row


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


# attention


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


# what is not finite


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


# other places


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
    with pytest.raises(AnisoscopeError, match="no forward pass"):
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


# the table


def test_a_table_can_be_filtered_read_and_shown() -> None:
    table = measure(tiny("bert"), batches(), name="tiny")
    frame = table.to_pandas()
    assert len(frame) == len(table) == table.to_arrow().num_rows
    assert set(frame["model"]) == {"tiny"}
    some = table.where(metric=["svd_ratio", "two_nn"], kind="resid")
    assert set(some.metrics()) == {"svd_ratio", "two_nn"}
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


# banks


def fed_bank(model: nn.Module, made: list[Any], *, sample_size: int = 4096, bank: Bank | None = None) -> Bank:
    layout = find_layout(model)
    kinds = ["embed", "resid", "final", "query", "key", "scores"]
    sites = layout.sites([kind for kind in kinds if kind in layout.kinds], layers={0, 2})
    plan = make_plan(parse_requests(NEARLY_ALL), kinds, seed=0, sample_size=sample_size, attention_rows=8)
    bank = Bank(plan) if bank is None else bank
    with Capture(model, sites, bank, layout=layout) as capture:
        for batch in made:
            capture.run(batch)
    return bank


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
    tensors, labels = half.state()
    loaded = Bank.load(half.plan, {k: v.clone() for k, v in tensors.items()}, labels, half.groups)
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
