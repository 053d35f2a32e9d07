"""Every family: sites are what they are called, and capturing leaves the model as it was."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anisoscope.capture import Capture, Scores, Site, find_layout, list_families
from anisoscope.capture.sites import family as families
from anisoscope.capture.sites.layout import Layout
from anisoscope.capture.verification import verify
from anisoscope.errors import AnisoscopeError
from support.tiny_media import TYPES
from support.tiny_models import FAMILIES, Record, inputs, tiny

ALL = sorted(FAMILIES)
POST_NORM = {"bert", "bert-masked", "roberta", "xlm-roberta", "albert", "albert-groups", "distilbert", "electra",
             "mpnet", "deberta-v2", "opt-350m", "bart", "bloom-post", "canine"}  # fmt: skip
# Positions are relative, or counted from the mask: the same rows whichever side is padded.
SIDE_FREE = {"opt", "opt-350m", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "phi3", "starcoder2",
             "stablelm", "stablelm-parallel", "granite", "gpt_neox", "falcon-7b", "falcon-40b", "bloom", "olmo",
             "olmo2", "t5", "t5-encoder", "mt5", "umt5", "eurobert", "modernbert", "roberta"}  # fmt: skip
SIDE_FREE |= {"xlm-roberta", "gptj", "codegen", "byt5", "gpt_neox-sequential", "falcon-alibi", "mpt"}


def _everything(layout: Layout) -> list[Site]:
    return layout.sites([kind for kind in layout.kinds if kind not in ("unembed", "embed_weight")])


def _captured(model: nn.Module, batch: dict[str, Tensor], sites: list[Site] | None = None) -> Record:
    record = Record()
    with Capture(model, _everything(find_layout(model)) if sites is None else sites, record) as capture:
        capture.run(batch)
    return record


def _own(output: Any, stack: str, what: str) -> Any:
    return getattr(output, what if stack == "single" else f"{stack}_{what}")


def _kept(x: Tensor, index: Any) -> Tensor:
    return x.flatten(0, 1)[index.keep]


@pytest.mark.parametrize("name", ALL)
def test_the_stream_equals_the_models_own_hidden_states(name: str) -> None:
    model = tiny(name)
    batch, layout = inputs(model, 11, 7), find_layout(tiny(name))
    record = _captured(model, batch, layout.sites())
    with torch.inference_mode():
        output = model(**batch, output_hidden_states=True)
    for stack in layout.stacks:
        hidden = _own(output, stack.name, "hidden_states")
        prefix = "" if stack.name == "single" else f"{stack.name}."
        if name == "canine":  # its own list repeats the inputs of its three encoders
            hidden = [h for i, h in enumerate(hidden) if i not in (2, len(hidden) - 2)]
        assert len(hidden) == stack.depth + 1
        for layer, theirs in enumerate(hidden[:-1]):
            ours = record.at(f"{prefix}{layer}.{'resid' if layer else 'embed'}")
            torch.testing.assert_close(ours.x, _kept(theirs, ours.index), atol=1e-5, rtol=1e-5)
        last = record.at(f"{prefix}{stack.depth}.{'final' if stack.has_norm else 'resid'}")
        torch.testing.assert_close(last.x, _kept(hidden[-1], last.index), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_verify_accepts_what_was_found(name: str) -> None:
    model = tiny(name)
    notes = verify(model, find_layout(model), inputs(model, 9, 6))
    assert not any("not verified" in note or "rest on their names" in note for note in notes)


def test_verify_leaves_each_part_the_attention_that_it_had() -> None:
    model = tiny("t5")
    model.encoder.set_attn_implementation("eager")
    parts = (model, model.encoder, model.decoder)
    before = [part.config._attn_implementation for part in parts]
    assert before == ["sdpa", "eager", "sdpa"]
    verify(model, find_layout(model), inputs(model, 9, 6))
    assert [part.config._attn_implementation for part in parts] == before


@pytest.mark.parametrize("name", ALL)
def test_verify_refuses_a_wrong_place(name: str) -> None:
    model = tiny(name)
    layout, batch = find_layout(model), inputs(model, 9, 6)
    for kind, other in (("attn_out", "attn_in"), ("mlp_out", "attn_out")):
        with pytest.raises(AnisoscopeError, match=r"what its block adds"):
            verify(model, _with_place(layout, kind, other), batch)
    if len(set(layout.stacks[0].blocks)) == layout.stacks[0].depth:  # no block is applied twice
        with pytest.raises(AnisoscopeError):
            verify(model, _with_blocks_swapped(layout), batch)


def _with_place(layout: Layout, kind: str, other: str) -> Layout:
    """The layout with one kind read where another is."""
    stack = layout.stacks[-1]
    moved = {(layer, k): stack.places[(layer, other)] for layer, k in stack.places if k == kind}
    places = {**stack.places, **moved}
    return replace(layout, stacks=(*layout.stacks[:-1], replace(stack, places=places)))


def _with_blocks_swapped(layout: Layout) -> Layout:
    stack = layout.stacks[0]
    blocks = (stack.blocks[1], stack.blocks[0], *stack.blocks[2:])
    return replace(layout, stacks=(replace(stack, blocks=blocks), *layout.stacks[1:]))


@pytest.mark.parametrize("name", sorted(set(ALL) - POST_NORM))
def test_what_sublayers_add_sums_to_the_stream_in_prenorm_models(name: str) -> None:
    model = tiny(name)
    layout = find_layout(model)
    record = _captured(model, inputs(model, 11, 7))
    stack = layout.stacks[0]  # decoders after an encoder add cross-attention too; verify covers them
    prefix = "" if stack.name == "single" else f"{stack.name}."
    for layer in range(1, stack.depth + 1):
        before = record.at(f"{prefix}{layer - 1}.{'resid' if layer > 1 else 'embed'}").x
        added = record.at(f"{prefix}{layer}.attn_out").x + record.at(f"{prefix}{layer}.mlp_out").x
        torch.testing.assert_close(before + added, record.at(f"{prefix}{layer}.resid").x, atol=1e-4, rtol=1e-4)


def test_what_sublayers_add_is_normed_into_the_stream_in_bert() -> None:
    model: Any = tiny("bert")
    record = _captured(model, inputs(model, 11, 7))
    block = model.encoder.layer[1]
    with torch.inference_mode():
        middle = block.attention.output.LayerNorm(record.at("1.resid").x + record.at("2.attn_out").x)
        after = block.output.LayerNorm(middle + record.at("2.mlp_out").x)
    torch.testing.assert_close(middle, record.at("2.mlp_in").x, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after, record.at("2.resid").x, atol=1e-5, rtol=1e-5)


def _softmax(call: Scores) -> Tensor:
    """Attention probabilities written out: one head at a time, in float64."""
    groups = call.query.shape[1] // call.key.shape[1]
    shape = (call.query.shape[0], call.query.shape[1], call.query.shape[2], call.key.shape[2])
    bias = torch.zeros(shape, dtype=torch.float64) if call.bias is None else call.bias.double().expand(shape)
    heads = []
    for h in range(shape[1]):
        scores = call.scaling * call.query[:, h].double() @ call.key[:, h // groups].double().mT + bias[:, h]
        heads.append(scores.masked_fill(~call.allowed[:, 0], -torch.inf).softmax(-1))
    return torch.stack(heads, 1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", [name for name in ALL if name not in ("deberta-v2", "gemma2")])
def test_softmax_of_scores_is_the_models_attention(name: str, attention: str) -> None:
    try:
        model = tiny(name, attention=attention)
    except ValueError as refused:  # a family without this implementation says so itself
        pytest.skip(str(refused)[:80])
    if (name, attention) == ("falcon-alibi", "sdpa"):
        pytest.skip("transformers adds Falcon's ALiBi twice in its eager attention; its sdpa scores are checked below")
    batch, layout = inputs(model, 11, 7), find_layout(model)
    record = _captured(model, batch)
    reference = tiny(name, attention="eager")
    with torch.inference_mode():
        output = reference(**batch, output_attentions=True)
    assert len(record.calls) == sum(len(list(stack.sites(["scores", "cross_scores"]))) for stack in layout.stacks)
    for call in record.calls:
        crossed = call.site.kind == "cross_scores"
        own = output.cross_attentions if crossed else _own(output, call.site.stack, "attentions")
        theirs = own[call.site.layer - 1]
        ours = _softmax(call)
        rows = call.index.keep
        if theirs.shape != ours.shape:  # CANINE shows the first of its chunks
            ours = ours[:, :, : theirs.shape[2], : theirs.shape[3]]
            rows = torch.arange(theirs.shape[0] * theirs.shape[2])
        pair = [p.double().transpose(1, 2).flatten(0, 1)[rows] for p in (ours, theirs)]
        torch.testing.assert_close(*pair, atol=1e-5, rtol=1e-4)
        assert call.allowed.shape[1:] == (1, call.query.shape[2], call.key.shape[2])


def test_an_additive_bias_inside_the_mask_is_told_from_the_mask() -> None:
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    model = tiny("falcon-alibi", attention="sdpa")
    batch = inputs(model, 11, 7)
    alibi = build_alibi_tensor(batch["attention_mask"], 4, torch.float32).view(2, 4, 1, 11) / 8**0.5
    for call in _captured(model, batch).calls:
        assert call.bias is not None
        torch.testing.assert_close(call.bias, alibi.expand_as(call.bias).where(call.allowed, 0.0))
        assert torch.equal(call.allowed[0, 0], torch.ones(11, 11).tril().bool())
        assert not call.allowed[1, :, :, 7:].any()


@pytest.mark.parametrize("name", ["llama", "bloom", "t5", "albert", "falcon-7b"])
def test_query_and_key_rows_are_those_of_the_scores(name: str) -> None:
    model = tiny(name)
    record = _captured(model, inputs(model, 11, 7))
    for call in record.calls:
        for kind, whole in (("query", call.query), ("key", call.key)):
            rows = record.at(str(replace(call.site, kind=call.site.kind.replace("scores", kind))))
            torch.testing.assert_close(rows.x, whole.transpose(1, 2).flatten(0, 1)[rows.index.keep])


def test_capped_scores_and_disentangled_ones_are_refused_with_the_reason() -> None:
    with pytest.raises(AnisoscopeError, match="capped"):
        find_layout(tiny("gemma2")).sites(["scores"])
    with pytest.raises(AnisoscopeError, match="content and position"):
        find_layout(tiny("deberta-v2")).sites(["query"])
    assert find_layout(tiny("gemma2")).sites(["query"])


@pytest.mark.parametrize("name", ALL)
def test_padding_side_changes_no_key(name: str) -> None:
    model = tiny(name)
    sites = find_layout(model).sites(["embed", "resid"])
    if name == "canine":  # molecules begin at the first position, so that padding there shifts their windows
        sites = [site for site in sites if site.layer in (0, 1)]
    right, left = (_captured(model, inputs(model, 11, 7, side=side), sites) for side in ("right", "left"))
    for a, b in zip(right.all, left.all, strict=True):
        assert a.site == b.site
        for field in ("context", "position", "token", "first"):
            assert torch.equal(getattr(a.index, field), getattr(b.index, field))
        if name in SIDE_FREE:
            torch.testing.assert_close(a.x, b.x, atol=2e-4, rtol=2e-4)


def test_padding_side_changes_rows_where_positions_are_absolute() -> None:
    model = tiny("gpt2")  # so that the law above is not empty
    right, left = (_captured(model, inputs(model, 11, 7, side=side)) for side in ("right", "left"))
    assert not torch.allclose(right.at("1.resid").x, left.at("1.resid").x, atol=1e-3)


def _traces(model: nn.Module) -> list[Any]:
    from transformers.modeling_utils import AttentionInterface

    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_backward_hooks")
    parts = [(path, sorted(vars(m)), [len(vars(m)[h]) for h in hooks], m.training) for path, m in model.named_modules()]
    return [
        parts,
        copy.deepcopy(model.config.to_dict()),
        model.config._attn_implementation,
        AttentionInterface.get_interface,
    ]  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("name", ALL)
def test_capturing_changes_no_output_and_leaves_nothing_behind(name: str) -> None:
    model = tiny(name)
    batch = inputs(model, 9, 6)
    before = _traces(model)
    with torch.inference_mode():
        bare = model(**batch)[0]
    seen: list[Tensor] = []
    with Capture(model, _everything(find_layout(model)), Record()), torch.inference_mode():
        assert _traces(model) != before
        seen.append(model(**batch)[0])
    assert torch.equal(bare, seen[0])
    verify(model, find_layout(model), batch)
    assert _traces(model) == before


def test_a_shared_layer_gives_as_many_sites_as_applications() -> None:
    for name, depth in (("albert", 3), ("albert-groups", 8)):
        model = tiny(name)
        layout = find_layout(model)
        assert layout.stacks[0].depth == depth
        record = _captured(model, inputs(model, 6, 5), layout.sites(["resid"]))
        layers = [rows.site.layer for rows in record.all]
        assert layers == list(range(1, depth + 1))
        assert not torch.allclose(record.all[0].x, record.all[1].x)


def test_canine_molecules_count_only_without_padding_in_their_window() -> None:
    model = tiny("canine")
    batch = inputs(model, 21, 14)
    record = _captured(model, batch)
    mask = batch["attention_mask"].bool()
    rate, length = 4, mask.shape[1] // 4
    expected = [
        b * length + j
        for b in range(2)
        for j in range(length)
        if all(mask[b, i] for i in ([0] if j == 0 else range(rate * (j - 1), rate * j)))
    ]
    assert record.at("2.resid").index.keep.tolist() == expected
    assert record.at("2.resid").index.length == length
    assert set(record.at("2.resid").index.token.tolist()) == {-1}
    assert record.at("1.resid").x.shape[0] == record.at("5.resid").x.shape[0] == 35


def test_families_that_cannot_be_looked_into_are_refused_with_the_reason() -> None:
    import transformers

    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    squeeze = transformers.SqueezeBertConfig(**sizes, num_hidden_layers=2, embedding_size=32)
    funnel = transformers.FunnelConfig(vocab_size=60, block_sizes=[1, 2, 1], d_model=32, n_head=4, d_head=8, d_inner=48)
    with pytest.raises(AnisoscopeError, match=r"calls the forward of its blocks directly.*modules="):
        find_layout(transformers.SqueezeBertModel(squeeze))
    with pytest.raises(AnisoscopeError, match=r"several lists of blocks.*modules="):
        find_layout(transformers.FunnelModel(funnel))
    assert set(families.REFUSED).isdisjoint(row["name"] for row in list_families())


def test_a_norm_behind_the_blocks_is_final_whatever_its_name() -> None:
    import transformers

    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    layers = {"num_hidden_layers": 2, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}
    torch.manual_seed(0)
    model: Any = transformers.Lfm2Model(transformers.Lfm2Config(**sizes, **layers)).eval()
    with torch.no_grad():
        model.embedding_norm.weight.add_(torch.randn(32) * 0.1)
    batch = inputs(model, 11, 7)
    layout = find_layout(model)
    verify(model, layout, batch, kinds=["embed", "resid", "final"])
    record = _captured(model, batch, layout.sites(["resid", "final"]))
    with torch.inference_mode():
        normed = model.embedding_norm(record.at("2.resid").x)
    torch.testing.assert_close(record.at("2.final").x, normed, atol=1e-5, rtol=1e-5)
    assert not find_layout(tiny("bert")).stacks[0].has_norm  # a norm of embeddings before the blocks is none


def test_every_listed_family_is_tested_here() -> None:
    from transformers import AutoConfig

    tested = {str(tiny(name).config.model_type) for name in ALL}  # type: ignore[union-attr]
    elsewhere = {"deberta", "longformer", "mamba"} | TYPES  # test_rows.py, test_speech_vision.py
    elsewhere |= {name for name, family in families.FAMILIES.items() if family.staged}  # test_block.py
    listed = {row["name"] for row in list_families()}
    assert listed - elsewhere <= tested
    assert all(AutoConfig.for_model(name) for name in sorted(listed))
    assert all(row["about"] and row["verified"] for row in list_families())
