"""Counting what a model does: the same with weights and without, and by hand where that is possible."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from anisoscope.planning.subject import of_model, subject_of
from anisoscope.planning.trace import trace


def test_products_and_bytes_of_one_linear_are_counted() -> None:
    layer, x = nn.Linear(8, 4, bias=False), torch.zeros(16, 8)
    with torch.no_grad():
        found = trace(lambda: layer(x))
    assert found.flops == 2 * 16 * 8 * 4
    assert found.bytes == 4 * (16 * 8 + 8 * 4 + 16 * 4)
    assert found.operations == 1  # the transposed view moves nothing


def test_what_autograd_keeps_is_counted_once_and_weights_are_not() -> None:
    layer = nn.Linear(8, 4, bias=False)
    x = torch.zeros(16, 8)
    found = trace(lambda: layer(x).square().sum().backward())
    assert found.kept == 4 * (16 * 8 + 16 * 4)  # the input of the product and that of the square
    second = nn.Linear(4, 3, bias=False)  # whose weight is kept, transposed, for the gradient of its input
    found = trace(lambda: second(layer(x)).sum().backward())
    assert found.kept == 4 * (16 * 8 + 16 * 4)  # the inputs of both products


GPT = "gpt2:n_layer=2,n_embd=32,n_head=2"
BERT = "bert:num_hidden_layers=2,hidden_size=32,num_attention_heads=2"


@pytest.mark.parametrize("family", [GPT, BERT])
def test_a_model_without_weights_does_what_one_with_weights_does(family: str) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    bare = subject_of(family, random_init=True)
    auto = AutoModelForCausalLM if family.startswith("gpt2") else AutoModelForMaskedLM
    real = of_model("", auto.from_config(bare.config))
    assert next(bare.model.parameters()).is_meta
    assert bare.parameters == real.parameters
    # attention may be one operation on a host and several without weights
    assert bare.passed(2, 16).flops == pytest.approx(real.passed(2, 16).flops, rel=0.3)
    assert bare.updated(2, 16).flops == pytest.approx(real.updated(2, 16).flops, rel=0.3)


def test_passes_grow_with_contexts_but_launch_no_more() -> None:
    subject = subject_of("gpt2:n_layer=2,n_embd=32,n_head=2", random_init=True)
    one, four = subject.passed(1, 16), subject.passed(4, 16)
    assert four.flops == 4 * one.flops and four.operations == one.operations
    assert subject.updated(1, 16).flops > 2 * one.flops
