"""Gradients of the summed loss for the same rows as the activations: autograd's own, in every way of running."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anisoscope.capture.capture import Capture
from anisoscope.capture.gradient_pass import IGNORED, Collector, LabelConvention
from anisoscope.capture.sites.layout import find_layout
from anisoscope.capture.step_capture import LiveGradients, MicroBatch, live_pass
from anisoscope.errors import AnisoscopeError
from support.gradient_models import (
    CAUSAL,
    assert_same,
    batch_of,
    by_name,
    captured,
    hooks_of,
    in_place_loss,
    keyed,
    language_model,
    live_batches,
    parts,
    summed,
)
from support.tiny_models import tiny

PRECISION = {"llama": 1e-6, "modernbert-masked": 1e-6}  # norms or softmax in float32, whatever the model is in
MASKED = ["bert-masked", "modernbert-masked"]


def expected(name: str, model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The summed loss, and its gradients for the hidden states that the model itself hands out, without padding."""
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True)
    targets = LabelConvention(name in CAUSAL).targets(batch["labels"])
    total = summed(output.logits, targets)
    states = output.hidden_states
    names = ["0.embed", *(f"{i}.resid" for i in range(1, len(states) - 1))]
    names.append(f"{len(states) - 1}.{'resid' if name.startswith('bert') else 'final'}")
    grads = torch.autograd.grad(total, states)
    real = batch["attention_mask"].bool()
    return float(total.detach()), {n: g[real] for n, g in zip(names, grads, strict=True)}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", [*CAUSAL, *MASKED])
def test_a_captured_gradient_is_autograds_row_for_row(name: str, side: str) -> None:
    model = language_model(name)
    batch = batch_of(name, 9, 5, 7, side=side)
    total, wanted = expected(name, model, batch)
    found = captured(name, model, batch)
    assert found.loss == pytest.approx(total, rel=1e-9)
    got = by_name(found)
    assert wanted.keys() <= got.keys() and not found.unreached
    for site, g in wanted.items():
        assert got[site].shape == (21, 32)
        torch.testing.assert_close(got[site], g, rtol=1e-9, atol=1e-12, msg=lambda m, s=site: f"{s}: {m}")


def test_activations_go_with_the_pass() -> None:
    """Without Python's collector: those of a probe would fill a GPU until it came by."""
    model, batch = language_model("gpt2"), batch_of("gpt2", 9, 5)
    gc.collect()
    gc.disable()
    try:
        found = captured("gpt2", model, batch)
        held = [thing for thing in gc.get_objects() if isinstance(thing, Collector | Capture)]
    finally:
        gc.enable()
    assert not held and found.sites


def test_the_gradient_before_the_final_norm_is_autograds_too() -> None:
    """Models hand out no hidden state between the last block and the final norm, so the graph is cut there by hand."""
    model: Any = language_model("gpt2")
    batch = batch_of("gpt2", 8, 6)
    kept: list[Tensor] = []
    handle = model.transformer.ln_f.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    handle.remove()
    total = summed(output.logits, LabelConvention(True).targets(batch["labels"]))
    g = torch.autograd.grad(total, kept)[0][batch["attention_mask"].bool()]
    torch.testing.assert_close(by_name(captured("gpt2", model, batch))["3.resid"], g, rtol=1e-9, atol=1e-12)


def test_with_the_models_own_float32_loss_it_is_still_the_same_gradient() -> None:
    model = tiny("gpt2")
    batch = batch_of("gpt2", 9, 5, 7)
    total, wanted = expected("gpt2", model, batch)
    found = captured("gpt2", model, batch)
    assert found.loss == pytest.approx(total, rel=1e-5) and found.tokens == 18
    for site, g in wanted.items():
        torch.testing.assert_close(by_name(found)[site], g, rtol=1e-3, atol=1e-5)


LENGTHS = (9, 5, 7, 8, 3, 6, 9, 4)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert-masked"])
def test_rebatching_changes_no_gradient(name: str) -> None:
    model = tiny(name, dtype=torch.float64)  # with the loss of its own, which goes through float32
    batch = batch_of(name, *LENGTHS)
    whole = keyed([captured(name, model, batch)])
    for number in (2, 4, 8):
        again = keyed([captured(name, model, part) for part in parts(batch, number)])
        assert_same(again, whole, PRECISION.get(name, 1e-9))
    other_side = batch_of(name, *LENGTHS, side="left")
    if name == "llama":  # positions are relative there, so the padding side changes nothing either
        assert_same(keyed([captured(name, model, other_side)]), whole, PRECISION[name])


def live_rows(model: nn.Module, found: list[MicroBatch]) -> dict[str, dict[tuple[int, int], Tensor]]:
    sites = find_layout(model).sites()
    everything = [live_pass(b, sites) for b in found]
    for batch in found:
        assert batch.seed is not None
    return keyed(everything, [b.tokens() / b.seed for b in found if b.seed is not None])


@pytest.mark.parametrize("name", ["gpt2", "bert-masked", "modernbert-masked"])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_accumulation_and_loss_scaling_are_undone(name: str, number: int) -> None:
    model: Any = language_model(name)
    if name not in CAUSAL:
        model.loss_function = in_place_loss
    batch = batch_of(name, *LENGTHS)
    wanted = keyed([captured(name, model, batch)])
    for scale in (1.0, 65536.0, 1000.0):
        found = live_batches(model, parts(batch, number), lambda out, s=scale: (out.loss / number * s).backward())
        assert len(found) == number
        assert_same(live_rows(model, found), wanted, PRECISION.get(name, 1e-9))


def test_a_loss_over_the_items_of_all_micro_batches_is_undone() -> None:
    """Trainers hand num_items_in_batch to the model: its mean is then over the whole step, not over its own batch."""
    model = language_model("gpt2")
    batch = batch_of("gpt2", *LENGTHS)
    wanted = keyed([captured("gpt2", model, batch)])
    items = int((batch["labels"][:, 1:] != IGNORED).sum())
    given = [{**part, "num_items_in_batch": torch.tensor(items)} for part in parts(batch, 4)]
    assert_same(live_rows(model, live_batches(model, given, lambda out: out.loss.backward())), wanted)


def test_a_model_that_ignores_the_number_of_items_is_not_believed_to_use_it() -> None:
    model: Any = language_model("bert-masked")
    model.loss_function = in_place_loss
    batch = batch_of("bert-masked", *LENGTHS)
    wanted = keyed([captured("bert-masked", model, batch)])
    items = int((batch["labels"] != IGNORED).sum())
    given = [{**part, "num_items_in_batch": items} for part in parts(batch, 4)]
    assert_same(live_rows(model, live_batches(model, given, lambda out: out.loss.backward())), wanted)


def test_live_gradients_are_those_before_clipping() -> None:
    model = language_model("gpt2")
    batch = batch_of("gpt2", *LENGTHS)

    def clipped(out: Any) -> None:
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    assert_same(live_rows(model, live_batches(model, [batch], clipped)), keyed([captured("gpt2", model, batch)]))


def test_autocast_to_bfloat16_gives_the_gradients_of_that_forward_pass() -> None:
    model = tiny("gpt2")
    batch = batch_of("gpt2", *LENGTHS)

    def run(number: int) -> Any:
        layout = find_layout(model)
        with LiveGradients(model, layout.sites(), layout=layout) as live:
            live.begin()
            for part in parts(batch, number):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(**part).loss
                (loss / number).backward()
            return live_rows(model, live.end())

    exact, whole, split = keyed([captured("gpt2", model, batch)]), run(1), run(4)
    assert all(g.dtype == torch.float32 for rows in whole.values() for g in rows.values())
    assert_same(whole, exact, 0.05)  # half precision, not another factor
    assert_same(split, whole, 0.05)
    with pytest.raises(AssertionError):
        assert_same({s: {k: 2 * g for k, g in rows.items()} for s, rows in whole.items()}, exact, 0.05)


def test_an_evaluation_inside_the_step_is_not_the_training_batch() -> None:
    model = language_model("gpt2")
    batch = batch_of("gpt2", *LENGTHS)

    def both(out: Any) -> None:
        with torch.no_grad():
            model(**batch_of("gpt2", 4, 4, seed=9))
        out.loss.backward()

    found = live_batches(model, [batch], both)
    assert len(found) == 1
    assert_same(live_rows(model, found), keyed([captured("gpt2", model, batch)]))


def test_nothing_is_kept_between_measured_steps() -> None:
    model = language_model("gpt2")
    layout = find_layout(model)
    with LiveGradients(model, layout.sites(), layout=layout) as live:
        model(**batch_of("gpt2", 5, 4)).loss.backward()
        assert not live.batches
        live.begin()
        model(**batch_of("gpt2", 5, 4)).loss.backward()
        assert len(live.end()) == 1 and not live.batches


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model: Any = language_model("llama")
    batch = batch_of("llama", *LENGTHS)
    wanted = keyed([captured("llama", model, batch)])
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()  # no dropout in this family
    found = live_batches(model, parts(batch, 2), lambda out: (out.loss / 2).backward())
    assert_same(live_rows(model, found), wanted, 1e-6)
    assert_same(keyed([captured("llama", model, batch)]), wanted, 1e-6)  # our own pass, too
    assert model.training


def test_re_entrant_checkpointing_is_refused_with_the_reason() -> None:
    model: Any = language_model("llama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.train()
    model.enable_input_require_grads()
    before = hooks_of(model)
    with pytest.raises(AnisoscopeError, match=r"re-entrant.*use_reentrant"):
        live_batches(model, [batch_of("llama", 5, 4)], lambda out: out.loss.backward())
    assert hooks_of(model) == before


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_compiled_after_the_hooks_gives_the_same_gradients(backend: str) -> None:
    model = language_model("gpt2")
    batch = batch_of("gpt2", 6, 5, 4, 6)
    wanted = keyed([captured("gpt2", model, batch)])
    torch._dynamo.reset()
    found = live_batches(
        model,
        parts(batch, 2),
        lambda out: (out.loss / 2).backward(),
        compiled=lambda m: torch.compile(m, backend=backend),
    )
    assert_same(live_rows(model, found), wanted)


def test_a_compiled_model_has_the_sites_of_the_model() -> None:
    plain = language_model("gpt2")
    compiled: Any = torch.compile(plain, backend="eager")
    assert find_layout(compiled).sites() == find_layout(plain).sites()
