"""Attention variants: each does what its formula says, sees no later token, and is never lost on the way to disk."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anisoscope.capture.capture import Capture
from anisoscope.capture.row import Rows, Scores
from anisoscope.capture.sites.layout import find_layout
from anisoscope.capture.verification import probabilities
from anisoscope.errors import AnisoscopeError
from anisoscope.models import attention_variant as variants
from anisoscope.models.attention_variant import SHARP, VARIANTS
from anisoscope.models.load import load_model
from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import at
from anisoscope.training.config import TrainConfig
from anisoscope.training.language_model import build_model
from anisoscope.training.loop import train
from support.tiny_runs import Seen, losses, tiny, tokenised, weights  # noqa: F401

V, H, D, T = 40, 4, 8, 20
NAMES = tuple(VARIANTS)
SIZES: dict[str, Any] = {"family": "prenorm", "layers": 2, "width": H * D, "heads": H, "context": 32, "device": "cpu"}


def model(variant: str | None, *, loud: float = 6.0, **more: Any) -> nn.Module:
    """An untrained model whose attention weights are large enough to differ from uniform, and whose biases drift."""
    built = build_model(TrainConfig(**SIZES | {"attention": variant} | more), vocab_size=V).eval()
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if "query_key_value.weight" in name:
                parameter.mul_(loud)
            if "query_key_value.bias" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    return built


def texts(n: int = 3, length: int = T, seed: int = 0) -> Tensor:
    return torch.randint(5, V, (n, length), generator=torch.Generator().manual_seed(seed))


class Calls:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.calls: dict[int, Scores] = {}
        self.values: dict[tuple[int, str], Tensor] = {}

    def rows(self, rows: Rows) -> None:
        self.values[rows.site.layer, rows.site.kind] = rows.x

    def scores(self, scores: Scores) -> None:
        self.calls[scores.site.layer] = scores


def seen(built: nn.Module, ids: Tensor) -> Calls:
    calls = Calls()
    with Capture(built, find_layout(built).sites(["query", "key", "scores"]), calls) as capture:
        capture.run({"input_ids": ids})
    return calls


def projections(built: nn.Module) -> list[Any]:
    return [m.query_key_value for m in built.modules() if hasattr(m, "query_key_value")]


def given(built: nn.Module, ids: Tensor, layer: int = 0) -> Tensor:
    """What the projection of a layer reads."""
    kept: list[Tensor] = []
    handle = projections(built)[layer].register_forward_pre_hook(lambda _, args: kept.append(args[0].detach()))
    with torch.no_grad():
        built(input_ids=ids)
    handle.remove()
    return kept[0]


def rotated(x: Tensor) -> Tensor:
    """Slow twin of the rotary positions, [T, d] in float64: pairs (i, i + d/2) turned by t·10000^(−2i/d)."""
    out, half = x.clone(), x.shape[-1] // 2
    for t in range(len(x)):
        for i in range(half):
            angle = t * 10_000.0 ** (-2 * i / (2 * half))
            a, b = x[t, i], x[t, i + half]
            out[t, i] = a * math.cos(angle) - b * math.sin(angle)
            out[t, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def by_hand(variant: str, query: Tensor, key: Tensor) -> Tensor:
    """Probabilities [T, T] of one head by the formulas of the module, row by row."""
    length, width = query.shape
    if variant == "mean-removed":
        query, key = (torch.stack([x[t] - x[: t + 1].mean(0) for t in range(length)]) for x in (query, key))
    query, key = rotated(query), rotated(key)
    out = torch.zeros(length, length, dtype=query.dtype)
    for t in range(length):
        scores = torch.stack([query[t] @ key[s] for s in range(t + 1)]) / math.sqrt(width)
        if variant in ("qk-norm", "fixed-sharp"):
            cosines = torch.stack([torch.cosine_similarity(query[t], key[s], dim=0) for s in range(t + 1)])
            scores = math.sqrt(width) * (SHARP if variant == "fixed-sharp" else 1.0) * cosines
        out[t, : t + 1] = (scores * (variant != "uniform")).softmax(0)
    return out


# -- what each of them is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", NAMES)
def test_attention_is_what_its_formula_says(variant: str) -> None:
    built, ids = model(variant).double(), texts(1)
    x = given(built, ids)[0]
    fused = projections(built)[0]
    plain = nn.functional.linear(x, fused.weight, fused.bias).unflatten(-1, (H, 3, D)).detach()
    ours = probabilities(seen(built, ids).calls[1])
    for head in range(H):
        theirs = by_hand(variant, plain[:, head, 0], plain[:, head, 1])
        assert float((ours[0, head] - theirs).abs().max()) < 1e-5
    if variant != "softmax":
        other = by_hand("softmax", plain[:, 0, 0], plain[:, 0, 1])
        assert float((ours[0, 0] - other).abs().max()) > 0.05, "the counter-test: it is not ordinary attention"


@pytest.mark.parametrize("variant", NAMES)
def test_captured_queries_and_keys_give_the_models_own_probabilities(variant: str) -> None:
    built, ids = model(variant), texts()
    calls = seen(built, ids)
    built.set_attn_implementation("eager")  # type: ignore[operator]
    with torch.no_grad():
        theirs = built(input_ids=ids, output_attentions=True).attentions
    for layer, call in calls.calls.items():
        assert float((probabilities(call) - theirs[layer - 1]).abs().max()) < 1e-5, "whatever the implementation"
    ordinary = probabilities(seen(model("softmax"), ids).calls[1])
    assert (float((ordinary - theirs[0]).abs().max()) > 0.01) == (variant != "softmax")


def test_uniform_attention_is_the_mean_of_the_values() -> None:
    built, ids = model("uniform"), texts()
    x = given(built, ids)
    value = projections(built)[0](x).unflatten(-1, (H, 3, D))[..., 2, :]
    kept: list[Tensor] = []
    dense = next(m.dense for m in built.modules() if hasattr(m, "query_key_value"))
    dense.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    with torch.no_grad():
        built(input_ids=ids)
    for t in (0, 1, T - 1):
        assert torch.allclose(kept[0][:, t].unflatten(-1, (H, D)), value[:, : t + 1].mean(1), atol=1e-5)


@pytest.mark.parametrize(("variant", "times"), [("qk-norm", 1.0), ("fixed-sharp", SHARP)])
def test_normed_scores_are_bounded_by_the_temperature_whatever_the_weights(variant: str, times: float) -> None:
    def largest(name: str) -> float:
        calls = seen(model(name, loud=300.0), texts()).calls.values()
        return max(float((c.scaling * c.query @ c.key.transpose(-1, -2)).abs().max()) for c in calls)

    bound = times * math.sqrt(D)
    assert 0.9 * bound < largest(variant) <= bound * (1 + 1e-5)
    assert largest("softmax") > 10 * bound, "the counter-test"


def test_the_learned_temperature_is_the_largest_score_and_learns() -> None:
    built = model("qk-norm")
    with torch.no_grad():
        for fused in projections(built):
            fused.log_temperature.copy_(torch.tensor([0.0, 1.0, 2.0, 3.0]))
    call = seen(built, texts(1)).calls[1]
    found = (call.scaling * call.query @ call.query.transpose(-1, -2))[0].amax((-1, -2))  # a query meets itself
    assert torch.allclose(found, torch.tensor([0.0, 1.0, 2.0, 3.0]).exp(), rtol=1e-4)
    ids = texts()
    built(input_ids=ids, labels=ids).loss.backward()
    assert all(float(fused.log_temperature.grad.abs().min()) > 0 for fused in projections(built))


@pytest.mark.parametrize(("variant", "moves"), [("mean-removed", False), ("softmax", True)])
def test_a_vector_added_to_all_queries_and_keys_changes_nothing_without_means(variant: str, moves: bool) -> None:
    built, ids = model(variant).double(), texts()
    with torch.no_grad():
        before = built(input_ids=ids).logits
        for fused in projections(built):
            fused.bias.view(H, 3, D)[:, :2] += torch.randn(H, 2, D, dtype=torch.float64)
        after = built(input_ids=ids).logits
    assert (float((before - after).abs().max()) > 1e-6) == moves


@pytest.mark.parametrize("variant", [name for name in NAMES if name != "softmax"])
def test_gradients_are_those_of_the_function(variant: str) -> None:
    plain = nn.Linear(6, 3 * 2 * 4).double()
    kind = VARIANTS[variant]
    assert kind is not None
    fused = kind(plain, 2)
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    inputs = [x, *fused.parameters()]
    assert torch.autograd.gradcheck(lambda x, *_: fused(x), inputs)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("variant", NAMES)
def test_no_position_sees_a_later_one(variant: str, training: bool) -> None:
    assert later_tokens_seen(model(variant).train(training)) == 0.0


def later_tokens_seen(built: nn.Module) -> float:
    """How much outputs at the first ten positions change with the tokens after them."""
    one, two = texts(seed=0), texts(seed=0)
    two[:, 10:] = texts(seed=1)[:, 10:]
    with torch.no_grad():
        a, b = (built(input_ids=ids).logits for ids in (one, two))
    assert not torch.equal(a[:, 10:], b[:, 10:])
    return float((a[:, :10] - b[:, :10]).abs().max())


def test_a_mean_over_the_whole_context_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "_without_mean", lambda x: x - x.mean(1, keepdim=True))
    assert later_tokens_seen(model("mean-removed")) > 1e-4


# -- drift -------------------------------------------------------------------------------------------------------------


def drifts(variant: str, steps: int = 6) -> dict[tuple[int, str], float]:
    """Relative drift by step and kind of a short training, seen by the monitor."""
    built = model(variant, loud=1.0).train()
    optimizer = torch.optim.AdamW(built.parameters(), lr=3e-3)
    probe = {"input_ids": texts(24, 32, seed=9)}
    with Monitor(built, when=at([0, steps]), metrics="attention", probe=probe, total_steps=steps) as monitor:
        for step in range(steps + 1):
            ids = texts(8, 32, seed=step + 1)
            with monitor.step(step):
                built(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = [r for r in monitor.table.records() if r["head"] is None and r["kind"] in ("query", "key")]
    found = {(r["metric"], r["step"], r["kind"], r["layer"]): r["value"] for r in rows}
    places = {key[1:] for key in found}
    ratios = {place: found["drift", *place] / found["mean_norm", *place] for place in places}
    return {(step, kind): max(ratios[step, kind, n] for n in (1, 2)) for step, kind, _ in ratios}


def test_the_monitor_sees_drift_with_ordinary_attention_and_none_without_means() -> None:
    with_means, without = drifts("softmax"), drifts("mean-removed")
    assert min(with_means.values()) > 0.3
    assert max(without.values()) < 0.1


# -- on the way to disk ------------------------------------------------------------------------------------------------


def test_arms_have_the_same_weights_and_the_same_model_where_attention_is_ordinary() -> None:
    states = {name: build_model(TrainConfig(**SIZES, attention=name), vocab_size=V).state_dict() for name in NAMES}
    ordinary = build_model(TrainConfig(**SIZES), vocab_size=V)
    assert type(ordinary).__name__ == "GPTNeoXForCausalLM"
    for name, state in states.items():
        beyond = set(state) - set(ordinary.state_dict())
        assert all(torch.equal(value, state[key]) for key, value in ordinary.state_dict().items()), name
        assert {key.rpartition(".")[2] for key in beyond} == ({"log_temperature"} if name == "qk-norm" else set())


@pytest.mark.parametrize("variant", NAMES)
def test_a_checkpoint_is_loaded_with_its_attention(variant: str, tmp_path: Path) -> None:
    built, ids = model(variant), texts()
    with torch.no_grad():
        for fused in projections(built):
            if variant == "qk-norm":
                fused.log_temperature.copy_(torch.randn(H))
        expected = built(input_ids=ids).logits
    built.save_pretrained(tmp_path)  # type: ignore[operator]
    found = load_model(str(tmp_path), device="cpu", need_tokenizer=False).model
    with torch.no_grad():
        assert torch.equal(found(input_ids=ids).logits, expected)
    bare = load_model(str(tmp_path), device="cpu", with_head=False, need_tokenizer=False).model
    assert [type(p) for p in projections(bare)] == [type(p) for p in projections(built)]


def edited(folder: Path, **fields: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return str(folder)


def test_a_checkpoint_that_would_lose_its_attention_is_refused(tmp_path: Path) -> None:
    model("uniform").save_pretrained(tmp_path)  # type: ignore[operator]
    other = shutil.copytree(tmp_path, tmp_path.with_name("other"))
    with pytest.raises(AnisoscopeError, match="attention_variant 'uniform', which gpt_neox does not know"):
        load_model(edited(tmp_path, model_type="gpt_neox", architectures=["GPTNeoXForCausalLM"]), device="cpu")
    with pytest.raises(AnisoscopeError, match="unknown attention variant 'unifrom'; did you mean 'uniform'"):
        load_model(edited(other, attention_variant="unifrom"), device="cpu")
    with pytest.raises(AnisoscopeError, match=r"2 of .* not in the checkpoint"):  # temperatures would be made up
        load_model(edited(other, attention_variant="qk-norm"), device="cpu")


def test_contexts_in_parts_are_refused_where_positions_are_averaged() -> None:
    built, ids = model("mean-removed"), texts()
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    with torch.no_grad():
        padded = built(input_ids=ids, attention_mask=mask).logits
        assert torch.allclose(padded[0, :-4], built(input_ids=ids[:1, :-4]).logits[0], atol=1e-5), "on the right"
        with pytest.raises(AnisoscopeError, match="pad on the right"):
            built(input_ids=ids, attention_mask=mask.flip(1))
        with pytest.raises(AnisoscopeError, match="use_cache=False"):
            built(input_ids=ids, use_cache=True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"attention": "sparse"}, "unknown attention 'sparse'"),
        ({"attention": "qk-norm", "family": "gpt2"}, "gpt2 has ordinary attention only, not qk-norm; take --family"),
        ({"attention": "mean-removed", "arch": "encoder"}, "mean over positions so far"),
    ],
)
def test_attention_that_cannot_be_had_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(AnisoscopeError, match=sentence):
        TrainConfig(**SIZES | options)
    assert TrainConfig(family="gpt2", attention="softmax").arm == "decoder", "ordinary attention is everyone's"


@pytest.mark.parametrize("variant", ["qk-norm", "mean-removed"])
def test_an_interrupted_training_goes_on_bit_by_bit(variant: str, tokenised: Path, tmp_path: Path) -> None:  # noqa: F811
    config = tiny(family="prenorm", attention=variant)

    def trouble(step: int) -> None:
        if step == 7:
            raise KeyboardInterrupt

    whole = train(config, tmp_path / "whole", corpus=tokenised)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "parts", corpus=tokenised, monitor=Seen(trouble))
    parts = train(config, tmp_path / "parts", corpus=tokenised, monitor=Seen(), resume=True)
    one, two = weights(whole), weights(parts)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert losses(whole) == losses(parts)
    if variant == "qk-norm":
        start = 0.5 * math.log(8)
        learned = [value for name, value in one.items() if name.endswith("log_temperature")]
        assert learned and all(float((value - start).abs().max()) > 1e-4 for value in learned), "it was trained"
