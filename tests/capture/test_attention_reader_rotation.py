"""Queries and keys before rotation: what the model's own function was given, and that it comes back."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anisoscope.capture import Capture, find_layout
from support.attending import CLOSE, attending
from support.tiny_media import MEDIA, media, media_inputs
from support.tiny_models import FAMILIES, Interrupting, Record, captured, inputs, tiny

ROTARY = ["codegen", "eurobert", "falcon-40b", "falcon-7b", "gemma", "gemma2", "gpt_neox", "gpt_neox-sequential",
          "gptj", "granite", "llama", "mistral", "modernbert", "olmo", "olmo2", "phi", "phi3", "qwen2", "qwen3",
          "stablelm", "stablelm-parallel", "starcoder2"]  # fmt: skip


def test_models_that_rotate_are_recognised_by_what_their_attention_calls() -> None:
    assert [n for n in sorted(FAMILIES) if "query_unrotated" in find_layout(tiny(n)).kinds] == ROTARY


@contextlib.contextmanager
def own_rotations(model: nn.Module) -> Iterator[list[tuple[Any, Any, Any]]]:
    """(function, arguments, result) of every call of a model's own rotary function, noted without the program."""
    calls: list[tuple[Any, Any, Any]] = []
    module = sys.modules[type(model).__module__]
    function = module.apply_rotary_pos_emb  # type: ignore[attr-defined]

    def noted(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        calls.append((function, (args, kwargs), result))
        return result

    module.apply_rotary_pos_emb = noted  # type: ignore[attr-defined]
    try:
        yield calls
    finally:
        module.apply_rotary_pos_emb = function  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [*ROTARY, "moonshine"])
def test_rotating_the_unrotated_by_the_models_own_function_gives_the_rotated(name: str) -> None:
    model = media(name) if name in MEDIA else tiny(name)
    batch = {k: v[:1] for k, v in (media_inputs(name) if name in MEDIA else inputs(model, 9)).items()}
    batch = {k: v for k, v in batch.items() if "mask" not in k}
    with own_rotations(model) as calls, torch.inference_mode():
        model(**batch)
    record, notes = attending(model, batch)
    assert not any("no rotation" in note for note in notes)
    stack = find_layout(model).stacks[0]
    prefix = "" if stack.name == "single" else f"{stack.name}."
    pair = [record.at(f"{prefix}1.{kind}").x.transpose(0, 1)[None] for kind in ("query", "query_unrotated")]
    after, before = pair  # [1, H, T, d]
    function, (args, kwargs), result = calls[0]
    if isinstance(result, tuple):
        rotated = function(before[..., : args[0].shape[-1]], *args[1:], **kwargs)[0]
    else:  # GPT-J and CodeGen rotate keys first, one tensor at a time, positions before heads
        function, (args, kwargs), _ = calls[1]
        rotated = function(before[..., : args[0].shape[-1]].transpose(1, 2), *args[1:], **kwargs).transpose(1, 2)
    torch.testing.assert_close(rotated, after[..., : rotated.shape[-1]], **CLOSE)
    torch.testing.assert_close(before[..., rotated.shape[-1] :], after[..., rotated.shape[-1] :])
    assert not torch.allclose(before[..., 1:, :], after[..., 1:, :], atol=1e-2)


@pytest.mark.parametrize("name", ROTARY)
def test_rotation_leaves_norms_and_the_first_position(name: str) -> None:
    model = tiny(name)
    record, _ = attending(model, inputs(model, 9, 6))
    for one, two in (("query", "query_unrotated"), ("key", "key_unrotated")):
        after, before = record.at(f"2.{one}"), record.at(f"2.{two}")
        torch.testing.assert_close(after.x.norm(dim=-1), before.x.norm(dim=-1), **CLOSE)
        torch.testing.assert_close(after.x[after.index.position == 0], before.x[before.index.position == 0], **CLOSE)
        assert after.index is before.index


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma", "phi", "stablelm", "olmo2", "gptj"])
def test_unrotated_queries_are_what_the_model_projects_and_norms(name: str) -> None:
    model = tiny(name)
    seen: list[Tensor] = []
    attention = next(m for path, m in model.named_modules() if path.endswith((".0.self_attn", ".0.attn")))
    last = getattr(attention, "q_norm", attention.q_proj)
    handle = last.register_forward_hook(lambda *x: seen.append(x[-1].detach()))
    record, _ = attending(model, inputs(model, 9))
    handle.remove()
    rows = record.at("1.query_unrotated").x
    theirs = seen[0].reshape(9, *rows.shape[1:]) if seen[0].dim() < 4 else seen[0][0]
    theirs = theirs if theirs.shape == rows.shape else theirs.transpose(0, 1)
    torch.testing.assert_close(rows, theirs)


def _rotary_function(model: nn.Module) -> Any:
    return sys.modules[type(model).__module__].apply_rotary_pos_emb  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["llama", "gptj", "falcon-7b"])
def test_rotary_functions_come_back_whatever_happens(name: str, error: type[BaseException]) -> None:
    from anisoscope.capture import attention_call, attention_reader

    model = tiny(name)
    before, sites = _rotary_function(model), find_layout(model).sites(["query_unrotated"])
    with pytest.raises(error):
        captured(model, inputs(model, 4), sites, sink=Interrupting(error))
    assert _rotary_function(model) is before
    assert not attention_reader._active.rotations and not attention_call._replaced
    with Capture(model, sites, Record()) as one:  # the counter-test: while a capture runs it is another
        assert _rotary_function(model) is not before
        with Capture(model, sites, Record()) as two:
            two.run(inputs(model, 4))
        assert _rotary_function(model) is not before
        one.run(inputs(model, 4))
    assert _rotary_function(model) is before


def test_rotations_of_another_model_of_the_class_are_not_taken() -> None:
    one, other = tiny("llama"), tiny("llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    record = Record()
    with Capture(one, find_layout(one).sites(["query_unrotated"]), record) as capture:
        with torch.inference_mode():
            other(**inputs(other, 5))
        assert not record.all
        capture.run(inputs(one, 5))
    assert torch.equal(record.all[0].x, attending(one, inputs(one, 5))[0].at("1.query_unrotated").x)
