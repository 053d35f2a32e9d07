"""Gradients of the summed loss for the same rows as the activations: autograd's own, in every way of running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anisoscope.capture.gradients import GradientPass, forward_rows, gradient_rows
from anisoscope.capture.layout import find_layout
from anisoscope.capture.live import LiveGradients, MicroBatch, live_pass
from anisoscope.capture.losses import IGNORED, Reading, find_reading
from anisoscope.capture.readers import as_rows, stream_readers
from anisoscope.capture.sites import Site
from anisoscope.errors import AnisoscopeError
from tiny_models import FAMILIES, PAD, VOCABULARY, _config, contexts, padded, tiny

MASK = 5
PRECISION = {"llama": 1e-6, "modernbert-masked": 1e-6}  # norms or softmax in float32, whatever the model is in
CAUSAL = ["gpt2", "llama", "gpt_neox"]
MASKED = ["bert-masked", "modernbert-masked"]


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    """Σ −log p(target), one target at a time."""
    logs = logits.log_softmax(-1)
    kept = (targets != IGNORED).nonzero()
    return -torch.stack([logs[b, t, targets[b, t]] for b, t in kept.tolist()]).sum()


def exact_loss(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """The mean cross-entropy of a causal model without the detour over float32 that transformers takes."""
    targets = Reading(True).targets(labels)
    number = options.get("num_items_in_batch")
    count = (targets != IGNORED).sum() if number is None else number
    found = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return found / count


def language_model(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    import transformers

    if name == "modernbert-masked":
        config_class, options, _ = FAMILIES["modernbert"]
        torch.manual_seed(0)
        model: Any = transformers.ModernBertForMaskedLM(_config(config_class, **options))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model = model.to(dtype).eval()
    else:
        model = tiny(name, dtype=dtype)
    if name in CAUSAL and dtype == torch.float64:
        model.loss_function = exact_loss
    return model


def batch_of(name: str, *lengths: int, side: str = "right", seed: int = 0) -> dict[str, Tensor]:
    """A padded batch with the labels that the model's own training would have."""
    batch = padded(contexts(*lengths, seed=seed), side=side)
    ids, real = batch["input_ids"], batch["attention_mask"].bool()
    if name in CAUSAL:
        return {**batch, "labels": ids.masked_fill(~real, IGNORED)}
    hidden = real & (torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.4)
    hidden[:, :2] |= real[:, :2]
    return {**batch, "input_ids": ids.masked_fill(hidden, MASK), "labels": ids.masked_fill(~hidden, IGNORED)}


def expected(name: str, model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The summed loss, and its gradients for the hidden states that the model itself hands out, without padding."""
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True)
    targets = Reading(name in CAUSAL).targets(batch["labels"])
    total = summed(output.logits, targets)
    states = output.hidden_states
    names = ["0.embed", *(f"{i}.resid" for i in range(1, len(states) - 1))]
    names.append(f"{len(states) - 1}.{'resid' if name.startswith('bert') else 'final'}")
    grads = torch.autograd.grad(total, states)
    real = batch["attention_mask"].bool()
    return float(total.detach()), {n: g[real] for n, g in zip(names, grads, strict=True)}


def captured(name: str, model: nn.Module, batch: dict[str, Tensor], **options: Any) -> GradientPass:
    layout = find_layout(model)
    return gradient_rows(model, batch, layout.sites(), layout=layout, reading=Reading(name in CAUSAL), **options)


def by_name(found: GradientPass) -> dict[str, Tensor]:
    return {str(site): rows.g for site, rows in found.sites.items() if rows.g is not None}


# equal to autograd


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


def test_the_gradient_before_the_final_norm_is_autograds_too() -> None:
    """Models hand out no hidden state between the last block and the final norm, so the graph is cut there by hand."""
    model: Any = language_model("gpt2")
    batch = batch_of("gpt2", 8, 6)
    kept: list[Tensor] = []
    handle = model.transformer.ln_f.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    handle.remove()
    total = summed(output.logits, Reading(True).targets(batch["labels"]))
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


# rebatching


def keyed(found: list[GradientPass], factors: list[float] | None = None) -> dict[str, dict[tuple[int, int], Tensor]]:
    """Gradients by site, context and position, whatever the order they came in."""
    out: dict[str, dict[tuple[int, int], Tensor]] = {}
    for i, part in enumerate(found):
        for site, rows in part.sites.items():
            assert rows.g is not None
            keys = zip(rows.index.context.tolist(), rows.index.position.tolist(), strict=True)
            factor = 1.0 if factors is None else factors[i]
            out.setdefault(str(site), {}).update(dict(zip(keys, rows.g * factor, strict=True)))
    return out


def assert_same(one: Any, two: Any, tolerance: float = 1e-9) -> None:
    assert one.keys() == two.keys()
    for site in one:
        assert one[site].keys() == two[site].keys()
        a = torch.stack([one[site][k] for k in sorted(one[site])]).double()
        b = torch.stack([two[site][k] for k in sorted(one[site])]).double()
        assert float((a - b).norm() / b.norm()) < tolerance, site


LENGTHS = (9, 5, 7, 8, 3, 6, 9, 4)


def parts(batch: dict[str, Tensor], number: int) -> list[dict[str, Tensor]]:
    return [dict(zip(batch, values, strict=True)) for values in zip(*(v.chunk(number) for v in batch.values()))]


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


# live: somebody else's backward pass


def live_batches(
    model: nn.Module,
    batches: list[dict[str, Tensor]],
    backward: Callable[[Any], None],
    *,
    compiled: Callable[[nn.Module], Any] = lambda m: m,
) -> list[MicroBatch]:
    layout = find_layout(model)
    with LiveGradients(model, layout.sites(), layout=layout) as live:
        called = compiled(model)
        live.begin()
        for batch in batches:
            backward(called(**batch))
        found = live.end()
    model.zero_grad()
    return found


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


def in_place_loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


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


# checkpointing, compilation


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


def test_a_model_compiled_before_the_hooks_is_refused() -> None:
    model = torch.compile(language_model("gpt2"), backend="eager")
    with pytest.raises(AnisoscopeError, match="compiled"):
        find_layout(model)  # type: ignore[arg-type]
    plain = language_model("gpt2")
    layout = find_layout(plain)
    plain.compile(backend="eager")
    with pytest.raises(AnisoscopeError, match="compiled"):
        LiveGradients(plain, layout.sites(), layout=layout)


# weights and embeddings


def hooks_of(model: nn.Module) -> int:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, name)) for module in model.modules() for name in names)


def full_gradients(name: str, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """`.grad` of every parameter under the summed loss."""
    model.zero_grad()
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    summed(output.logits, Reading(name in CAUSAL).targets(batch["labels"])).backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox", "bert-masked"])
def test_weight_gradients_are_those_of_the_linears_that_read_the_stream(name: str) -> None:
    model = language_model(name)
    batch = batch_of(name, 9, 5, 7)
    plain = {k: v for k, v in batch.items() if k != "labels"}
    readers = stream_readers(model, find_layout(model), plain)
    names = [n for found in readers.values() for n in found]
    kinds = {site.kind for site in readers}
    assert kinds == {"attn_in", "mlp_in"} and len(readers) == 6 and len(set(names)) == len(names)
    found = captured(name, model, batch, weights=names)
    wanted = full_gradients(name, model, batch)
    for weight in names:
        torch.testing.assert_close(found.weights[weight], wanted[weight], rtol=1e-9, atol=1e-12)
        assert as_rows(model, weight, found.weights[weight]).shape[1] == 32


def test_the_readers_are_the_ones_everybody_knows() -> None:
    model = language_model("llama")
    batch = {k: v for k, v in batch_of("llama", 6, 5).items() if k != "labels"}
    readers = stream_readers(model, find_layout(model), batch)
    assert {n.rsplit(".", 2)[1] for n in readers[Site(2, "attn_in")]} == {"q_proj", "k_proj", "v_proj"}
    assert {n.rsplit(".", 2)[1] for n in readers[Site(2, "mlp_in")]} == {"gate_proj", "up_proj"}
    assert hooks_of(model) == 0


def test_rows_of_a_conv1d_gradient_lie_in_the_span_of_its_inputs() -> None:
    """dL/dW = Σ δ xᵀ: with fewer tokens than dimensions, its rows lie in their span; the columns do not."""
    model = language_model("gpt2")
    batch = batch_of("gpt2", 4, 5)
    layout = find_layout(model)
    site = Site(2, "mlp_in")
    x = forward_rows(model, batch, [site], layout=layout).sites[site].x
    name = "transformer.h.1.mlp.c_fc.weight"
    g = captured("gpt2", model, batch, weights=[name]).weights[name]
    basis = torch.linalg.qr(x.T)[0]
    rows = as_rows(model, name, g)
    assert float((rows - rows @ basis @ basis.T).norm() / rows.norm()) < 1e-9
    assert g.shape == rows.T.shape


def test_the_embedding_gradient_in_its_input_role_is_that_of_an_untied_table() -> None:
    model = language_model("llama")
    batch = batch_of("llama", 9, 5, 7)
    wanted = full_gradients("llama", model, batch)["model.embed_tokens.weight"]
    torch.testing.assert_close(
        scattered(captured("llama", model, batch, embedding=True)), wanted, rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize(("name", "table"), [("gpt2", "transformer.wte.weight"), ("bert-masked", "")])
def test_both_roles_of_a_tied_table_add_up_to_its_gradient(name: str, table: str) -> None:
    model: Any = language_model(name)
    weight = model.get_input_embeddings().weight
    table = table or next(n for n, p in model.named_parameters() if p is weight)
    assert model.get_output_embeddings().weight is weight
    batch = batch_of(name, 9, 5, 7)
    inside = scattered(captured(name, model, batch, embedding=True))
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True)
    logits = output.logits
    pushed = torch.autograd.grad(summed(logits, Reading(name in CAUSAL).targets(batch["labels"])), logits)[0]
    last = output.hidden_states[-1] if name == "gpt2" else model.cls.predictions.transform(output.hidden_states[-1])
    outside = pushed.flatten(0, 1).T @ last.detach().flatten(0, 1)
    wanted = full_gradients(name, model, batch)[table]
    torch.testing.assert_close(inside + outside, wanted, rtol=1e-8, atol=1e-10)
    assert float(outside.norm()) > 0.1 * float(inside.norm()) > 0


def test_a_table_that_is_scaled_on_its_way_out_is_split_as_well() -> None:
    import transformers

    options = {**FAMILIES["gemma2"][1], "tie_word_embeddings": True}
    torch.manual_seed(0)
    model: Any = transformers.Gemma3ForCausalLM(_config("Gemma3TextConfig", **options)).double().eval()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    batch = batch_of("llama", 9, 5, 7)
    inside = scattered(captured("llama", model, batch, embedding=True))
    whole = full_gradients("llama", model, batch)["model.embed_tokens.weight"]
    head: Any = model.lm_head
    model.lm_head = nn.Linear(32, VOCABULARY, bias=False, dtype=torch.float64)  # the same numbers, untied
    model.lm_head.weight.data.copy_(head.weight.data)
    untied = full_gradients("llama", model, batch)
    torch.testing.assert_close(inside, untied["model.embed_tokens.weight"], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(inside + untied["lm_head.weight"], whole, rtol=1e-5, atol=1e-8)


def scattered(found: GradientPass) -> Tensor:
    assert found.embedded is not None
    ids, grads = found.embedded
    out = torch.zeros(VOCABULARY, 32, dtype=torch.float64)
    for i, g in zip(ids.tolist(), grads, strict=True):
        out[i] += g
    return out


# words


def test_in_a_masked_model_the_original_token_is_known_and_never_the_mask() -> None:
    model = language_model("bert-masked")
    batch = batch_of("bert-masked", 9, 5, 7)
    rows = captured("bert-masked", model, batch).sites[Site(1, "resid")]
    real = batch["attention_mask"].bool()
    hidden = (batch["labels"] != IGNORED)[real]
    original = torch.where(batch["labels"] != IGNORED, batch["labels"], batch["input_ids"])[real]
    assert rows.words.masked is not None
    assert rows.words.masked.tolist() == hidden.tolist()
    assert rows.words.original.tolist() == original.tolist()
    assert MASK in rows.index.token.tolist() and MASK not in rows.words.original.tolist()
    assert rows.words.target.tolist() == torch.where(hidden, original, -1).tolist()


@pytest.mark.parametrize("side", ["right", "left"])
def test_in_a_causal_model_the_target_is_the_next_token_of_the_same_context(side: str) -> None:
    model = language_model("gpt2")
    batch = batch_of("gpt2", 5, 3, side=side)
    words = captured("gpt2", model, batch).sites[Site(1, "resid")].words
    one, two = contexts(5, 3)
    assert words.original.tolist() == [*one.tolist(), *two.tolist()]
    assert words.target.tolist() == [*one[1:].tolist(), -1, *two[1:].tolist(), -1]
    assert words.masked is None


def test_how_labels_are_read_is_found_from_the_numbers() -> None:
    for name, shifted in (("gpt2", True), ("llama", True), ("bert-masked", False), ("modernbert-masked", False)):
        model = language_model(name, torch.float32)
        batch = batch_of(name, 9, 5, 7)
        assert find_reading(model, model(**batch), batch["labels"]) == Reading(shifted)


def test_a_loss_that_is_not_the_mean_cross_entropy_is_refused() -> None:
    model: Any = tiny("gpt2")
    model.loss_function = lambda logits, labels, **_: 3 * exact_loss(logits, labels)
    batch = batch_of("gpt2", 9, 5)
    with pytest.raises(AnisoscopeError, match="not the mean cross-entropy"):
        find_reading(model, model(**batch), batch["labels"])


def test_a_loss_of_the_users_own_is_differentiated_as_it_is() -> None:
    model = language_model("gpt2")
    batch = batch_of("gpt2", 9, 5, 7)

    def rule(m: nn.Module, inputs: Any) -> Tensor:
        plain = {k: v for k, v in inputs.items() if k != "labels"}
        return summed(m(**plain).logits, Reading(True).targets(inputs["labels"]))

    own = captured("gpt2", model, batch, loss=rule)
    assert_same(keyed([own]), keyed([captured("gpt2", model, batch)]))
    with pytest.raises(AnisoscopeError, match="summed loss as one number"):
        captured("gpt2", model, batch, loss=lambda m, i: m(**i).logits)


# no trace


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


# bad input


def test_a_model_without_a_loss_is_refused_with_what_to_do() -> None:
    model = tiny("bert")
    batch = batch_of("bert-masked", 5, 4)
    with pytest.raises(AnisoscopeError, match=r"no loss and logits.*ForCausalLM"):
        find_reading(model, model(input_ids=batch["input_ids"]), batch["labels"])


def test_labels_that_are_all_ignored_are_refused() -> None:
    model = tiny("gpt2")
    batch = batch_of("gpt2", 5, 4)
    labels = torch.full_like(batch["labels"], IGNORED)
    with pytest.raises(AnisoscopeError, match="every label is -100"):
        find_reading(model, model(input_ids=batch["input_ids"], labels=labels), labels)


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
    assert PAD not in found.sites[Site(0, "embed")].words.original.tolist()
