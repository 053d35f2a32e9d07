"""A pass of ours leaves no trace, and what has no gradient is refused or named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anisoscope.capture.gradient_pass import IGNORED, find_label_convention, forward_rows, stream_readers
from anisoscope.capture.sites.layout import find_layout
from anisoscope.capture.sites.site import Site
from anisoscope.capture.step_capture import LiveGradients
from anisoscope.errors import AnisoscopeError
from support.gradient_models import batch_of, by_name, captured, hooks_of, language_model, live_batches
from support.tiny_models import PAD, tiny


def test_our_own_pass_leaves_no_trace() -> None:
    model: Any = tiny("gpt2")
    model.train()
    model.transformer.h[1].eval()  # a mode of its own
    batch = batch_of("gpt2", 9, 5, 7)
    model(**batch).loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    modes = [m.training for m in model.modules()]
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    random, hooks = torch.get_rng_state(), hooks_of(model)
    names = [
        n
        for found in stream_readers(model, find_layout(model), {"input_ids": batch["input_ids"]}).values()
        for n in found
    ]
    captured("gpt2", model, batch, weights=names, embedding=True)
    forward_rows(model, batch, find_layout(model).sites(), layout=find_layout(model))
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random) and hooks_of(model) == hooks
    assert all(torch.equal(p.grad, grads[n]) for n, p in model.named_parameters())
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())


def test_all_is_put_back_after_an_error_inside_the_pass() -> None:
    model: Any = tiny("gpt2")
    model.train()
    random = torch.get_rng_state()

    def broken(m: nn.Module, inputs: Any) -> Tensor:
        torch.rand(3)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        captured("gpt2", model, batch_of("gpt2", 5, 4), loss=broken, embedding=True)
    assert model.training and hooks_of(model) == 0 and torch.equal(torch.get_rng_state(), random)


def test_hooks_are_off_after_an_error_in_somebody_elses_pass() -> None:
    model = tiny("gpt2")
    layout = find_layout(model)
    live = LiveGradients(model, layout.sites(), layout=layout)

    def fail() -> None:
        with live:
            assert hooks_of(model) > 0
            live.begin()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    assert hooks_of(model) == 0


def test_a_model_without_a_loss_is_refused_with_what_to_do() -> None:
    model = tiny("bert")
    batch = batch_of("bert-masked", 5, 4)
    with pytest.raises(AnisoscopeError, match=r"no loss and logits.*ForCausalLM"):
        find_label_convention(model, model(input_ids=batch["input_ids"]), batch["labels"])


def test_labels_that_are_all_ignored_are_refused() -> None:
    model = tiny("gpt2")
    batch = batch_of("gpt2", 5, 4)
    labels = torch.full_like(batch["labels"], IGNORED)
    with pytest.raises(AnisoscopeError, match="every label is -100"):
        find_label_convention(model, model(input_ids=batch["input_ids"], labels=labels), labels)


def test_a_batch_without_labels_is_refused() -> None:
    model = tiny("gpt2")
    batch = {k: v for k, v in batch_of("gpt2", 5, 4).items() if k != "labels"}
    with pytest.raises(AnisoscopeError, match="no labels"):
        captured("gpt2", model, batch)


def test_some_contexts_without_labels_have_zero_gradients_and_no_loss() -> None:
    model = language_model("bert-masked")
    batch = batch_of("bert-masked", 5, 4)
    batch["labels"] = torch.full_like(batch["labels"], IGNORED)
    found = captured("bert-masked", model, batch)
    assert found.tokens == 0 and found.loss == 0.0
    assert all(float(g.abs().max()) == 0.0 for g in by_name(found).values())


def test_a_model_with_every_parameter_frozen_is_refused() -> None:
    model = tiny("gpt2").requires_grad_(False)
    with pytest.raises(AnisoscopeError, match="every parameter is frozen"):
        captured("gpt2", model, batch_of("gpt2", 5, 4))


def test_sites_before_the_first_learning_parameter_are_named_and_left_out() -> None:
    model: Any = language_model("gpt2")
    model.transformer.wte.weight.requires_grad_(False)
    model.transformer.wpe.weight.requires_grad_(False)
    model.transformer.h[0].requires_grad_(False)
    batch = batch_of("gpt2", 9, 5)
    found = captured("gpt2", model, batch)
    assert sorted(map(str, found.unreached)) == ["0.embed", "1.resid"]
    assert sorted(by_name(found)) == ["2.resid", "3.final", "3.resid"]
    live = live_batches(model, [batch], lambda out: out.loss.backward())
    assert sorted(map(str, live[0].unreached)) == ["0.embed", "1.resid"]


def test_a_frozen_weight_has_no_gradient_and_hides_none() -> None:
    model: Any = language_model("gpt2")
    model.transformer.h[1].mlp.c_fc.weight.requires_grad_(False)
    names = ["transformer.h.1.mlp.c_fc.weight", "transformer.h.2.mlp.c_fc.weight"]
    found = captured("gpt2", model, batch_of("gpt2", 9, 5), weights=names)
    assert list(found.weights) == names[1:] and not found.unreached


def test_padding_is_no_row_and_has_no_gradient_of_its_own() -> None:
    model = language_model("gpt2")
    batch = batch_of("gpt2", 9, 3)
    found = captured("gpt2", model, batch)
    assert all(len(g) == 12 for g in by_name(found).values())
    assert PAD not in found.sites[Site(0, "embed")].tokens.original.tolist()
