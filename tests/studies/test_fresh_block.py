"""Blocks of every family as their own models call them, and the weights they are given."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from anisoscope.errors import AnisoscopeError
from anisoscope.models.forward import first_tensor
from anisoscope.studies.untrained.fresh_block import (
    biased,
    block_config,
    build_block,
    direction,
    initialise,
)
from support.small_block import SMALL, small_block


def outputs_of(family: str) -> torch.Tensor:
    block = small_block(family)
    return block.run(block.rows(3, 24, seed=0))[0]


# -- families ----------------------------------------------------------------------------------------------------------

FAMILIES = ["bert", "prenorm", "gpt2", "llama", "gpt_neox", "falcon", "bloom", "modernbert", "t5", "albert", "gpt_neo",
            "mistral", "gptj", "vit", "wav2vec2", "whisper", "audio-spectrogram-transformer"]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_alone_gives_what_it_gives_inside_its_model(family: str) -> None:
    from anisoscope.models.checkpoint import LoadOptions, fresh_model
    from anisoscope.models.forward import forward
    from anisoscope.studies.untrained.fresh_block import _random_inputs

    shape = {"width": 32, "heads": 2, "length": 24}
    block = build_block(family, **shape, sequences=2, seed=3)
    wish = LoadOptions(torch.device("cpu"), seed=3, with_head=False)
    model = fresh_model(block_config(family, **shape), wish).eval()
    inside = next(m for m in model.modules() if type(m) is type(block.module))
    seen: list[Any] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"], first_tensor("block", output)))

    handle = inside.register_forward_hook(keep, with_kwargs=True)
    given = _random_inputs(model, sequences=2, length=24, seed=3)
    if family == "t5":
        given["decoder_input_ids"] = given["input_ids"][:, :2]
    with torch.inference_mode():
        try:
            forward(model, given)
        except (ValueError, TypeError):
            assert family == "whisper", "its decoder was given nothing, after the encoder was done"
    handle.remove()
    before, after = seen[0]
    out, call = block.run(before)
    torch.testing.assert_close(out, after, rtol=1e-5, atol=1e-5)
    assert call.query.shape[:2] == (len(before), 2)


def test_rows_of_another_bias_change_the_output_of_every_family() -> None:
    """The counter-test: a call that ignored its rows would pass the test above with its own."""
    block = small_block("gpt2")
    x, b = block.rows(3, 24, seed=0), direction(32, seed=0)
    one, two = (block.run(biased(x, b, bias=n, input_norm=True))[0] for n in (0.0, 50.0))
    assert float((one - two).abs().max()) > 1


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("mamba", "no part of its blocks"),
        ("deberta-v2", "a sum of content and position products"),
        ("longformer", "in bands"),
        ("gemma2", "capped before the softmax"),
        ("resnet", "no attention"),
        ("swin", "it attends within windows of 49 of its 3136 positions"),
        ("segformer", "it attends to 49 keys that stand for all 3136 positions"),
        ("cvt", "keys that stand for all"),
        ("moonshine", "the 40 positions of its own model only"),
        ("codegen", "it does not run with 2 heads and width 32"),
    ],
)
def test_a_family_without_such_a_block_is_refused_in_a_sentence_of_ours(family: str, why: str) -> None:
    with pytest.raises(AnisoscopeError, match="cannot be called alone") as told:
        outputs_of(family)
    assert str(told.value).count("\n") == 0 and f"the block of {family} " in str(told.value) and why in str(told.value)


def test_inputs_are_the_same_for_every_initialisation() -> None:
    one, two = (small_block("bert", init=init) for init in ("normal", "orthogonal"))
    assert torch.equal(one.rows(3, 24, seed=0), two.rows(3, 24, seed=0))
    assert not torch.equal(one.rows(3, 24, seed=0), one.rows(3, 24, seed=1))
    assert float(one.rows(3, 24, seed=0).std()) == pytest.approx(0.02, rel=0.05)


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_initialisations_have_the_scales_they_are_named_after(family: str) -> None:
    block = small_block(family, init="normal")
    weights = {name: p for name, p in block.module.named_parameters() if p.dim() == 2}
    assert all(float(p.detach().std()) == pytest.approx(0.02, rel=0.1) for p in weights.values())
    initialise(block, "orthogonal", seed=0)
    name = next(n for n in weights if n.endswith(("query.weight", "c_attn.weight")))
    square = weights[name].detach()[:, :32]  # the queries, also where queries, keys and values are one matrix
    torch.testing.assert_close(square @ square.T, torch.eye(32), rtol=0, atol=1e-5)
    initialise(block, "xavier", seed=0)
    assert float(weights[name].detach().abs().max()) == pytest.approx(math.sqrt(6 / 64), rel=0.01)
    flat = {n: p for n, p in block.module.named_parameters() if p.dim() == 1}
    assert all(not p.any() for n, p in flat.items() if n.endswith("bias"))
    assert all(bool((p == 1).all()) for n, p in flat.items() if n.endswith("weight"))


def test_own_weights_are_left_as_the_family_makes_them() -> None:
    block = build_block("gpt2", **SMALL, seed=0)
    before = {name: p.clone() for name, p in block.module.named_parameters()}
    initialise(block, "own", seed=0)
    assert all(torch.equal(p, before[name]) for name, p in block.module.named_parameters())
    initialise(block, "normal", seed=0)
    assert not all(torch.equal(p, before[name]) for name, p in block.module.named_parameters())
