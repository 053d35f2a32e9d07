"""What a monitor refuses before or during training, and what it only notes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anisoscope.capture.gradient_pass import IGNORED, LabelConvention
from anisoscope.errors import AnisoscopeError
from anisoscope.monitor.monitor import Monitor
from anisoscope.tangent.plan import TangentPlan
from support.gradient_models import MASK, batch_of, exact_loss, language_model, summed
from support.monitored import MAIN, SITE, build, compare, probe_of
from support.tiny_models import tiny


def test_a_rank_that_is_too_large_is_refused_before_training() -> None:
    with pytest.raises(AnisoscopeError, match="quarter of the width 32"):
        build(rank=9)


def test_a_model_without_a_loss_is_refused_before_training() -> None:
    batch = probe_of("bert-masked")
    with pytest.raises(AnisoscopeError, match=r"no loss|load it with a language-model head"):
        build(tiny("bert"), probe=batch)


def test_ignored_labels_are_refused_before_training() -> None:
    batch = probe_of("gpt2")
    with pytest.raises(AnisoscopeError, match="every label of the probe is -100"):
        build(probe={**batch, "labels": torch.full_like(batch["labels"], IGNORED)})


def test_frozen_models_are_refused_and_frozen_embeddings_left_out_with_a_note() -> None:
    with pytest.raises(AnisoscopeError, match=r"every parameter of GPT2LMHeadModel is frozen"):
        build(tiny("gpt2").requires_grad_(False))
    for live in (False, True):
        model: Any = tiny("gpt2")
        model.transformer.wte.weight.requires_grad_(False)
        model.transformer.wpe.weight.requires_grad_(False)
        plan = TangentPlan(rank=4, draws=19, proxies=("pca", "svd"), frozen=False)
        monitor = build(model, plan=plan, **({"probe": None} if live else {}))
        with monitor, monitor.step(0):
            model(**probe_of("gpt2")).loss.backward()
        rows = monitor.table.where(metric="gradient_energy").records()
        assert {r["kind"] for r in rows} == {"resid", "final"}
        assert any("0.embed" in note for note in monitor.notes)
        assert not any("another width" in note for note in monitor.notes)


def test_a_proxy_before_any_fit_is_refused() -> None:
    monitor = build()
    with pytest.raises(AnisoscopeError, match="no step has been measured yet"):
        monitor.basis(SITE)
    with pytest.raises(AnisoscopeError, match="no tangent study"):
        build(plan=None, metrics="average_cosine").basis(SITE)


def test_a_step_outside_the_monitor_is_refused() -> None:
    with pytest.raises(AnisoscopeError, match="enter the monitor first"), build().step(0):
        pass


def live_step(act: Any, **said: Any) -> Monitor:
    model = tiny("gpt2")
    monitor = build(model, probe=None, strict=True)
    with monitor, monitor.step(0, **said):
        act(model)
    return monitor


def test_a_live_step_without_passes_is_refused() -> None:
    with pytest.raises(AnisoscopeError, match="no forward pass was seen in step 0"):
        live_step(lambda model: None)
    with pytest.raises(AnisoscopeError, match="no backward pass was seen in step 0"):
        live_step(lambda model: model(**probe_of("gpt2")))


def outside(model: nn.Module) -> None:
    batch = probe_of("gpt2")
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    exact_loss(logits, batch["labels"]).backward()


def in_two(model: nn.Module, **options: Any) -> None:
    """A loss from outside the model, of two micro-batches that weigh differently."""
    batch = probe_of("gpt2")
    for part in ({k: v[:8] for k, v in batch.items()}, {k: v[8:] for k, v in batch.items()}):
        logits = model(input_ids=part["input_ids"], attention_mask=part["attention_mask"]).logits[:, :-1]
        targets = part["labels"][:, 1:].flatten()
        nn.functional.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORED, **options).backward()


def smoothed(model: nn.Module) -> None:
    in_two(model, label_smoothing=0.1)


PLACE = {"metric": "gradient_energy", "layer": 2, "group": "", "variant": f"batch=live;{MAIN}"}


def test_the_scale_of_a_cross_entropy_from_outside_the_model_is_read() -> None:
    wanted = live_step(lambda model: model(**probe_of("gpt2")).loss.backward())
    tokens = int((probe_of("gpt2")["labels"][:, 1:] != IGNORED).sum())
    for said in ({}, {"loss": "own"}, {"loss": "mean", "tokens": tokens}):
        found = live_step(outside, **said)
        assert found.table.value(**PLACE) == pytest.approx(wanted.table.value(**PLACE), rel=1e-4)
        assert not found.notes
    both = live_step(in_two)
    assert both.table.value(**PLACE) == pytest.approx(wanted.table.value(**PLACE), rel=1e-4)


def test_any_other_loss_from_outside_the_model_needs_to_be_explained_if_micro_batches_are_pooled() -> None:
    with pytest.raises(AnisoscopeError, match=r"how its micro-batches weigh is not known.*loss=\"mean\".*loss=\"own\""):
        live_step(smoothed)
    with pytest.raises(AnisoscopeError, match="needs tokens="):
        live_step(smoothed, loss="mean")
    with pytest.raises(AnisoscopeError, match="expected auto, mean, sum or own"):
        live_step(smoothed, loss="average")
    own, summed = (live_step(smoothed, loss=loss) for loss in ("own", "sum"))
    assert own.table.value(**PLACE) == summed.table.value(**PLACE)
    assert any("no cross-entropy of tokens" in note for note in own.notes) and not summed.notes


def test_of_a_single_batch_any_scale_gives_the_same_shares() -> None:
    def squared(model: nn.Module) -> None:
        batch = probe_of("gpt2")
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.square().mean().backward()

    found, summed = live_step(squared), live_step(squared, loss="sum")
    assert found.table.value(**PLACE) == pytest.approx(summed.table.value(**PLACE), rel=1e-9)
    assert any("outside the model" in note for note in found.notes)
    assert not any("outside the model" in note for note in summed.notes)


def test_a_probe_of_one_context_is_refused() -> None:
    with pytest.raises(AnisoscopeError, match="1 different contexts, all in one half"):
        build(probe={k: v[:1] for k, v in probe_of("gpt2").items()})
    with pytest.raises(AnisoscopeError, match="no batches"):
        build(probe=[])


def test_a_training_batch_in_one_half_stops_no_training_but_is_noted() -> None:
    monitor = live_step(lambda model: model(**batch_of("gpt2", 9)).loss.backward())
    assert "gradient_energy" not in monitor.table.metrics
    assert any("one half" in note for note in monitor.notes)


@pytest.mark.parametrize("scale", [math.inf, 0.0])
def test_an_overflow_that_a_loss_scaler_would_skip_stops_no_training(scale: float) -> None:
    monitor = live_step(lambda model: (model(**probe_of("gpt2")).loss * scale).backward())
    assert "gradient_energy" not in monitor.table.metrics
    assert monitor.notes


@pytest.mark.slow
def test_a_probe_works_on_a_compiled_model() -> None:
    model = tiny("gpt2")
    plain = build(model)
    with plain, plain.step(0):
        pass
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    monitor = build(compiled)  # type: ignore[arg-type]
    with monitor, monitor.step(0):
        compiled(**batch_of("gpt2", 5, 4)).loss.backward()
    compare(monitor.table, plain.table)


def test_unknown_metrics_and_sites_are_refused() -> None:
    with pytest.raises(AnisoscopeError, match="avrage_cosine"):
        build(metrics="avrage_cosine")
    with pytest.raises(AnisoscopeError, match="layers"):
        build(layers=[17])


def test_a_model_under_somebody_elses_names_needs_no_config() -> None:
    """Exact gradients do not depend on transformers: any callable loss over any model whose layout is known."""
    model = language_model("gpt2")

    def rule(m: nn.Module, inputs: Any) -> Tensor:
        plain = {k: v for k, v in inputs.items() if k != "labels"}
        return summed(m(**plain).logits, LabelConvention(True).targets(inputs["labels"]))

    own = build(model, loss=rule)
    usual = build(model)
    for monitor in (own, usual):
        with monitor, monitor.step(0):
            pass
    compare(own.table, usual.table, 1e-6, without=("probe_loss",))
    compare(own.table, usual.table, 1e-6, columns=("value",))  # of a sum the losses of single contexts are not known


def test_contexts_of_a_token_classifier_are_told_apart_by_their_text_not_by_their_tags() -> None:
    """Tags have the shape of the ids: were they taken for hidden tokens, all untagged texts would be one context."""
    from anisoscope.capture.row import original_contexts

    ids = torch.arange(32 * 16).view(32, 16) % 50
    tags = torch.zeros_like(ids)
    assert len(original_contexts({"input_ids": ids, "labels": tags}).unique()) == len(
        original_contexts({"input_ids": ids}).unique()
    )
    hidden = torch.rand(32, 16, generator=torch.Generator().manual_seed(0)) < 0.3
    labels = torch.where(hidden, ids, -100)
    masked = {"input_ids": ids.masked_fill(hidden, MASK), "labels": labels}
    assert torch.equal(original_contexts(masked), original_contexts({"input_ids": ids})), "the counter-test"


def test_the_optimizer_inside_a_wrapper_is_watched_and_anything_else_is_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    model: Any = tiny("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    prepared = accelerate.Accelerator(cpu=True).prepare(optimizer)
    monitor = build(model, optimizer=prepared)
    assert monitor.watch.optimizer is optimizer, "hooks of the wrapper are never called"
    with monitor, monitor.step(0):  # its hooks are added here
        model(**probe_of("gpt2")).loss.backward()
    with pytest.raises(AnisoscopeError, match=r"optimizer is 'adam'; expected an optimizer of torch, or a wrapper"):
        build(model, optimizer="adam")
