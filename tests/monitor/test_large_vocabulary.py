"""Memory of a probe whose model has many words: bounded in every pass and over all of them, with the same values."""

from __future__ import annotations

import gc
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from anisoscope.models import pass_size
from anisoscope.models.pass_size import contexts_at_once, vocabulary
from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import at
from anisoscope.tangent import tables, tangent_study, together
from anisoscope.tangent.plan import TangentPlan
from support.monitored import COUNTS, compare, probe_of
from support.planted_gradients import OTHER, SITE, D, planted
from support.tiny_models import tiny

WORDS, LENGTH, WIDTH = 60_000, 24, 16
TABLE = WORDS * WIDTH * 4  # bytes
LOGITS = WORDS * LENGTH * 4  # of one context
PLAN = TangentPlan(rank=2, draws=19, proxies=("pca", "svd"), frozen=False)


def many_words(*, tied: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "vocab_size": WORDS, "tie_word_embeddings": tied}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


def some_contexts(number: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(WORDS, (number, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def measured(model: Any, probe: dict[str, torch.Tensor], *, plan: TangentPlan = PLAN, **options: Any) -> Monitor:
    monitor = Monitor(model, probe=probe, when=at([0]), plan=plan, metrics="tangent", background=False, **options)
    with monitor, monitor.step(0):
        pass
    return monitor


def peak_of(model: Any, contexts: int) -> float:
    """The most bytes of tensors at a time while a step is measured, beside those that were there before."""
    probe = some_contexts(contexts)
    gc.collect()  # what is let go in between would count as less
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        measured(model, probe)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.parametrize("tied", [True, False])
def test_memory_grows_neither_with_contexts_nor_with_passes(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pass_size.LOGITS, "cpu", 2 * LOGITS)
    model = many_words(tied=tied)
    few, many = peak_of(model, 16), peak_of(model, 64)
    # a pass: logits, logarithms and gradients; beside it the gradient of the head, in float64 and that of the pass
    assert few <= 4 * 2 * LOGITS + 6 * TABLE
    assert many <= few + TABLE  # the gradient of the head was kept of every pass: 20 tables more


def test_a_pass_has_as_many_contexts_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, probe = many_words(tied=True), some_contexts(16)
    assert vocabulary(model) == WORDS and vocabulary(model.model) == 0
    monkeypatch.setitem(pass_size.LOGITS, "cpu", 3 * LOGITS + 1)
    assert contexts_at_once(model, probe, 16) == 3 and contexts_at_once(model, probe, 2) == 2
    assert contexts_at_once(model.double(), probe, 16) == 1
    monkeypatch.setitem(pass_size.LOGITS, "cpu", LOGITS - 1)
    assert contexts_at_once(model.float(), probe, 16) == 1  # a context is not divided
    assert contexts_at_once(model.model, probe, 16) == 16
    assert contexts_at_once(model.model, probe, 16, outputs=WORDS) == 1
    monitor = measured(model, probe)
    assert monitor.probe is not None and {len(piece.context) for piece in monitor.probe.pieces} == {1}


def test_wide_sites_are_tested_few_at_a_time() -> None:
    rows = planted(0)  # two sites of width D
    each = 6 * 8 * 8 * D**2  # six sets of second moments of eight folds in float64
    assert rows.site_groups(1 << 30, {"cpu": 2 * each, "cuda": 0}) == [[SITE, OTHER]]
    assert rows.site_groups(1 << 30, {"cpu": 2 * each - 1, "cuda": 0}) == [[SITE], [OTHER]]
    assert rows.site_groups(1, {"cpu": 2 * each, "cuda": 0}) == [[SITE], [OTHER]]


@pytest.mark.parametrize(("name", "splits"), [("gpt2", ()), ("llama", (1,))])  # a tied table, and one that is not
def test_values_are_those_of_one_pass(name: str, splits: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = TangentPlan(rank=4, draws=19, proxies=("pca", "svd"), frozen=False, weights=True, splits=splits)
    options: dict[str, Any] = {"plan": plan, "counts": COUNTS, "batch_size": 64}
    whole = measured(tiny(name), probe_of(name), **options)
    monkeypatch.setitem(pass_size.LOGITS, "cpu", 1)
    monkeypatch.setattr(tables, "_TYPES", 7)
    monkeypatch.setattr(together, "_ROWS", 11)
    monkeypatch.setitem(tangent_study._SQUARES, "cpu", 1)
    pieces = measured(tiny(name), probe_of(name), **options)
    assert pieces.probe is not None and whole.probe is not None
    assert len(pieces.probe.pieces) > len(whole.probe.pieces)
    compare(whole.table, pieces.table, tolerance=1e-6)
    roles = {row["variant"] for row in pieces.table.records() if "of=embedding_out" in row["variant"]}
    assert roles and any("of=weight" in row["variant"] for row in pieces.table.records())
