"""Gradients of weights and of the embedding table, and what each row is: its token, its target, its mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anisoscope.capture.gradient_pass import (
    IGNORED,
    GradientPass,
    LabelConvention,
    as_rows,
    find_label_convention,
    forward_rows,
    stream_readers,
)
from anisoscope.capture.sites.layout import find_layout
from anisoscope.capture.sites.site import Site
from anisoscope.errors import AnisoscopeError
from support.gradient_models import (
    CAUSAL,
    MASK,
    assert_same,
    batch_of,
    captured,
    exact_loss,
    hooks_of,
    keyed,
    language_model,
    summed,
)
from support.tiny_models import FAMILIES, VOCABULARY, _config, contexts, tiny


def full_gradients(name: str, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """`.grad` of every parameter under the summed loss."""
    model.zero_grad()
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    summed(output.logits, LabelConvention(name in CAUSAL).targets(batch["labels"])).backward()
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
    pushed = torch.autograd.grad(summed(logits, LabelConvention(name in CAUSAL).targets(batch["labels"])), logits)[0]
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


def test_in_a_masked_model_the_original_token_is_known_and_never_the_mask() -> None:
    model = language_model("bert-masked")
    batch = batch_of("bert-masked", 9, 5, 7)
    rows = captured("bert-masked", model, batch).sites[Site(1, "resid")]
    real = batch["attention_mask"].bool()
    hidden = (batch["labels"] != IGNORED)[real]
    original = torch.where(batch["labels"] != IGNORED, batch["labels"], batch["input_ids"])[real]
    assert rows.tokens.masked is not None
    assert rows.tokens.masked.tolist() == hidden.tolist()
    assert rows.tokens.original.tolist() == original.tolist()
    assert MASK in rows.index.token.tolist() and MASK not in rows.tokens.original.tolist()
    assert rows.tokens.target.tolist() == torch.where(hidden, original, -1).tolist()


@pytest.mark.parametrize("side", ["right", "left"])
def test_in_a_causal_model_the_target_is_the_next_token_of_the_same_context(side: str) -> None:
    model = language_model("gpt2")
    batch = batch_of("gpt2", 5, 3, side=side)
    words = captured("gpt2", model, batch).sites[Site(1, "resid")].tokens
    one, two = contexts(5, 3)
    assert words.original.tolist() == [*one.tolist(), *two.tolist()]
    assert words.target.tolist() == [*one[1:].tolist(), -1, *two[1:].tolist(), -1]
    assert words.masked is None


def test_how_labels_are_read_is_found_from_the_numbers() -> None:
    for name, shifted in (("gpt2", True), ("llama", True), ("bert-masked", False), ("modernbert-masked", False)):
        model = language_model(name, torch.float32)
        batch = batch_of(name, 9, 5, 7)
        assert find_label_convention(model, model(**batch), batch["labels"]) == LabelConvention(shifted)


def test_a_loss_that_is_not_the_mean_cross_entropy_is_refused() -> None:
    model: Any = tiny("gpt2")
    model.loss_function = lambda logits, labels, **_: 3 * exact_loss(logits, labels)
    batch = batch_of("gpt2", 9, 5)
    with pytest.raises(AnisoscopeError, match="not the mean cross-entropy"):
        find_label_convention(model, model(**batch), batch["labels"])


def test_a_loss_of_the_users_own_is_differentiated_as_it_is() -> None:
    model = language_model("gpt2")
    batch = batch_of("gpt2", 9, 5, 7)

    def rule(m: nn.Module, inputs: Any) -> Tensor:
        plain = {k: v for k, v in inputs.items() if k != "labels"}
        return summed(m(**plain).logits, LabelConvention(True).targets(inputs["labels"]))

    own = captured("gpt2", model, batch, loss=rule)
    assert_same(keyed([own]), keyed([captured("gpt2", model, batch)]))
    with pytest.raises(AnisoscopeError, match="summed loss as one number"):
        captured("gpt2", model, batch, loss=lambda m, i: m(**i).logits)
