"""Queries, keys and scores: of another stack, as metrics read them, and over training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anisoscope import measure
from anisoscope.capture import Site, find_layout
from anisoscope.capture.sites.site import CROSS_KINDS, ROTARY_KINDS
from anisoscope.capture.verification import probabilities
from anisoscope.errors import AnisoscopeError
from anisoscope.tangent.plan import ATTENTION
from support.attending import CLOSE, attending, of_rows
from support.tiny_media import media, media_inputs
from support.tiny_models import captured, contexts, inputs, padded, tiny

# cross-attention


def equal_sides(model: nn.Module, *lengths: int) -> dict[str, Tensor]:
    """A batch whose encoder and decoder have the same number of positions, by chance."""
    batch = inputs(model, *lengths)
    target = padded(contexts(*reversed(lengths), seed=1), pad=int(model.config.pad_token_id))  # type: ignore[union-attr, arg-type]
    return batch | {f"decoder_{name}": value for name, value in target.items()}


@pytest.mark.parametrize("name", ["t5", "bart", "umt5"])
def test_self_and_cross_attention_are_told_apart_where_lengths_are_equal(name: str) -> None:
    model = tiny(name, attention="eager")
    batch = equal_sides(model, 11, 7)
    record, _ = attending(model, batch)
    with torch.inference_mode():
        output = model(**batch, output_attentions=True)
    own = {"scores": output.decoder_attentions, "cross_scores": output.cross_attentions}
    for call in (call for call in record.calls if call.site.stack == "decoder"):
        theirs = own[call.site.kind][call.site.layer - 1]
        torch.testing.assert_close(of_rows(probabilities(call), call), of_rows(theirs, call), **CLOSE)
    assert not torch.allclose(record.at("decoder.1.query").x, record.at("decoder.1.cross_query").x)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_rows_of_cross_queries_are_decoder_positions_and_of_cross_keys_encoder_positions(name: str) -> None:
    model = tiny(name)
    batch = inputs(model, 11, 7)  # decoder: 6 and 4
    record, _ = attending(model, batch)
    query, key = (record.at(f"decoder.2.{kind}") for kind in ("cross_query", "cross_key"))
    assert (len(query.x), len(key.x)) == (10, 18)
    assert query.index.position.tolist() == [*range(6), *range(4)]
    assert key.index.position.tolist() == [*range(11), *range(7)]
    assert set(query.index.context.tolist()) == set(key.index.context.tolist())  # one pair, one fold
    inner = "EncDecAttention.k" if name == "t5" else "encoder_attn.k_proj"
    project = next(m for path, m in model.named_modules() if path.startswith("decoder") and path.endswith(inner))
    layer = 1  # the first such module is that of layer 1
    with torch.inference_mode():
        read = model(**batch).encoder_last_hidden_state.flatten(0, 1)[key.index.keep]
        theirs = project(read).unflatten(-1, (4, -1))
    torch.testing.assert_close(record.at(f"decoder.{layer}.cross_key").x, theirs, **CLOSE)


def test_padded_keys_of_the_encoder_never_count() -> None:
    model = tiny("t5")
    tokens, target = contexts(11, 7), padded(contexts(6, 4, seed=1), pad=0)
    options: dict[str, Any] = {"sites": list(CROSS_KINDS), "attention_rows": 0}
    told = padded(tokens, pad=0) | {f"decoder_{k}": v for k, v in target.items()}
    alone = [
        {"input_ids": row[None], "decoder_input_ids": target["input_ids"][i : i + 1, :n]}
        for i, (row, n) in enumerate(zip(tokens, (6, 4), strict=True))
    ]
    metrics = ["drift", "average_cosine", "qk_cosine", "attention_max", "attention_entropy"]
    together, apart = (measure(model, b, metrics=metrics, **options) for b in ([told], alone))
    for row in together.where(layer=1).records():
        key = {name: row[name] for name in ("layer", "kind", "head", "metric")}
        (other,) = apart.where(**key).records()
        assert row["n"] == other["n"]
        assert row["value"] == pytest.approx(other["value"], rel=1e-4, abs=1e-6, nan_ok=True)
    # the counter-test: with the padding unmasked it does count
    unmasked = told | {"attention_mask": torch.ones_like(told["attention_mask"])}
    wrong = measure(model, [unmasked], metrics=metrics, **options)
    seen = {"layer": 1, "kind": "cross_key", "head": 0, "metric": "drift"}
    assert wrong.where(**seen).records()[0]["n"] == 22 > together.where(**seen).records()[0]["n"]
    assert wrong.value(**seen) != pytest.approx(together.value(**seen), rel=1e-3)


def test_a_model_that_attends_to_padding_says_so() -> None:
    _, notes = attending(media("whisper"), media_inputs("whisper"))
    assert "encoder: scores reach padded positions, as the model does: m counts them" in notes
    assert "decoder: cross_scores reach padded positions, as the model does: m counts them" in notes
    _, notes = attending(tiny("t5"), inputs(tiny("t5"), 11, 7))
    assert not notes


def test_models_without_another_stack_or_rotation_say_so_when_asked_and_not_otherwise() -> None:
    model = tiny("bert")
    with pytest.raises(AnisoscopeError, match="do not attend to another stack"):
        find_layout(model).sites(["cross_query"])
    with pytest.raises(AnisoscopeError, match="calls no rotary function"):
        find_layout(model).sites(["query_unrotated"])
    notes = measure(model, [inputs(model, 9, 6)]).about["models"][0]["notes"]
    assert not any("cross" in note or "rotat" in note for note in notes)


class Largest(torch.overrides.TorchFunctionMode):
    """The most elements of any floating tensor made while it is active."""

    most = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            self.most = max(self.most, result.numel())
        return result


def test_no_more_than_one_head_of_written_attention_is_held() -> None:
    from anisoscope.capture.attention_call import _written

    query, key = torch.randn(2, 8, 40, 4), torch.randn(2, 8, 40, 4)
    scores = 0.5 * query @ key.mT
    with Largest() as plain:
        call = _written(query, key, scores, 0.5)
    assert plain.most <= 2 * 40 * 40 and call.bias is None
    with Largest() as biased:  # the counter-test: what is left besides queries and keys has to be kept
        call = _written(query, key, scores + torch.randn(40, 40), 0.5)
    assert biased.most == scores.numel() and call.bias is not None


# metrics


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_the_largest_weight_is_the_mean_row_maximum_of_the_models_own_attention(name: str) -> None:
    model = tiny(name, attention="eager", dtype=torch.float64)
    batch = inputs(model, 20, 12, 9)
    table = measure(model, [batch], metrics=["attention_max"], attention_rows=0)
    with torch.inference_mode():
        output = model(**batch, output_attentions=True)
    stack = "decoder" if name == "t5" else "single"
    own = output.cross_attentions if name == "t5" else output.attentions
    kind = "cross_scores" if name == "t5" else "scores"
    mask = batch["decoder_attention_mask" if name == "t5" else "attention_mask"].bool()
    keys = batch["attention_mask"].bool()
    for layer, p in enumerate(own, start=1):
        for head in range(4):
            rows = []
            for b, i in mask.nonzero().tolist():
                allowed = keys[b] & ((torch.arange(keys.shape[1]) <= i) | (name != "llama"))
                if int(allowed.sum()) >= 8:
                    rows.append(float(max(p[b, head, i][allowed].tolist())))
            (row,) = table.where(stack=stack, layer=layer, kind=kind, head=head).records()
            assert row["value"] == pytest.approx(float(np.mean(rows)), rel=1e-5)
            assert row["n"] == len(rows)


@pytest.mark.parametrize(
    ("name", "pair"),
    [("llama", ("query_unrotated", "key_unrotated")), ("t5", ("cross_query", "cross_key")), ("t5", ("query", "key"))],
)
def test_mean_queries_are_compared_with_the_keys_that_belong_to_them(name: str, pair: tuple[str, str]) -> None:
    model = tiny(name, dtype=torch.float64)
    batch, stack = inputs(model, 20, 12, 9), "decoder" if name == "t5" else "single"
    table = measure(model, [batch], sites=[pair[0]], metrics=["qk_cosine", "drift"])
    sites = [Site(2, kind, stack) for kind in pair]
    record = captured(model, batch, sites)
    query, key = (record.at(str(site)).x.double().numpy() for site in sites)
    share = query.shape[1] // key.shape[1]
    for head in range(4):
        a, b = query[:, head].mean(0), key[:, head // share].mean(0)
        seen = table.where(stack=stack, layer=2, kind=pair[0], head=head)
        cosine = a @ b / (np.linalg.norm(a) * np.linalg.norm(b))
        assert seen.value(metric="qk_cosine") == pytest.approx(cosine, rel=1e-9)
        assert seen.value(metric="drift") == pytest.approx(np.linalg.norm(a), rel=1e-9)
    drifts = table.where(stack=stack, layer=2, kind=pair[1], metric="drift").records()
    assert len(drifts) == key.shape[1] + 1  # the keys of the pair are looked at, too


def test_cross_attention_is_looked_at_unless_told_and_unrotated_only_when_asked() -> None:
    t5, llama = tiny("t5"), tiny("llama")
    kinds = {row["kind"] for row in measure(t5, [inputs(t5, 9, 8)], metrics=list(ATTENTION)).records()}
    assert kinds == {"embed", "resid", "final", "query", "key", "scores", *CROSS_KINDS}
    kinds = {row["kind"] for row in measure(llama, [inputs(llama, 9, 8)], metrics=list(ATTENTION)).records()}
    assert kinds == {"embed", "resid", "final", "query", "key", "scores"}
    seen = measure(llama, [inputs(llama, 9, 8)], sites=["query_unrotated"], metrics="average_cosine")
    assert {row["kind"] for row in seen.records()} == {"query_unrotated"}


def test_sites_that_a_model_does_not_show_are_left_out_one_by_one() -> None:
    model: Any = tiny("llama")

    def unattended(hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return hidden_states, None

    model.model.layers[1].self_attn.forward = unattended
    table = measure(model, [inputs(model, 9, 8)], metrics=["drift", "attention_max"])
    assert {row["layer"] for row in table.where(kind="query").records()} == {1, 3}
    assert any("query, key and scores are left out: nothing was seen at 2.key, 2.query" in n for n in _notes(table))


def _notes(table: Any) -> list[str]:
    return list(table.about["models"][0]["notes"])


# over training


@pytest.mark.parametrize("live", [False, True])
def test_a_monitor_watches_queries_keys_and_scores_over_training(live: bool) -> None:
    from anisoscope.monitor.monitor import Monitor
    from anisoscope.monitor.schedule import at

    model = tiny("llama").train()
    batch = inputs(model, 12, 11, 10, 12)
    batch["labels"] = batch["input_ids"]
    probe = None if live else [{k: v for k, v in batch.items() if k != "labels"}]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Monitor(model, when=at([0, 2]), metrics="attention", probe=probe, total_steps=3) as monitor:
        for step in range(3):
            with monitor.step(step):
                model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    table = monitor.table
    assert {row["step"] for row in table.where(metric="attention_max").records()} == {0, 2}
    assert {row["metric"] for row in table.records()} >= set(ATTENTION)
    for kind in ("query", "key", *ROTARY_KINDS):
        first, last = (table.value(step=s, layer=2, kind=kind, head=0, metric="drift") for s in (0, 2))
        assert first != pytest.approx(last, rel=1e-4)
    for kind in ("query", "query_unrotated"):
        assert table.where(step=0, layer=1, kind=kind, head=1, metric="qk_cosine").finite()


@pytest.mark.parametrize("preset", ["attention"])
def test_a_sweep_watches_queries_keys_and_scores_over_checkpoints(preset: str, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from anisoscope import sweep

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=258, **sizes))
    for step in (0, 10):
        model.save_pretrained(tmp_path / f"checkpoint-{step}")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    text = str(Path(__file__).parents[2] / "LICENSE")
    table = sweep(str(tmp_path), preset=preset, data=text, tokens=320, context=16, device="cpu", tokenizer="bytes")
    assert {row["step"] for row in table.where(metric="attention_max").records()} == {0, 10}
    assert {row["kind"] for row in table.where(metric="drift").records()} >= {"query", "key", *ROTARY_KINDS, "resid"}
    assert {row["metric"] for row in table.records()} >= set(ATTENTION)
