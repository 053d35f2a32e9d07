"""Moments of every step: equal to a float64 twin, the same training, no word to the host between measured steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from anisoscope.capture.row import PositionChoice
from anisoscope.capture.sampled_rows import SampledContexts, mask_of, spread
from anisoscope.capture.sites.layout import find_layout
from anisoscope.errors import AnisoscopeError
from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import at
from anisoscope.results.query import Table
from anisoscope.stats.moments import Trace
from support.gradient_models import batch_of, hooks_of
from support.monitored import compare, trained
from support.tiny_models import tiny

CPU = torch.device("cpu")
LENGTHS = (6, 9, 13, 4, 11)


def follow(model: nn.Module, batches: list[dict[str, Tensor]], **options: Any) -> Monitor:
    """One step over micro-batches."""
    settings: dict[str, Any] = {"when": at([99]), "metrics": "drift", "every_step": True, **options}
    before = hooks_of(model)
    monitor = Monitor(model, **settings)
    with monitor, monitor.step(0):
        for batch in batches:
            model(**batch).loss.backward()
    assert hooks_of(model) == before
    return monitor


def values(table: Table, layer: int, kind: str) -> dict[tuple[str, bool], float]:
    rows = table.where(layer=layer, kind=kind).records()
    return {(row["metric"], "of=gradient" in row["variant"]): row["value"] for row in rows}


def twin(x: np.ndarray, g: np.ndarray) -> dict[tuple[str, bool], float]:
    """The same quantities from all rows, pair by pair and eigenvalue by eigenvalue, in float64."""
    found: dict[tuple[str, bool], float] = {}
    matrices = []
    for of, rows in enumerate((x.astype(np.float64), g.astype(np.float64))):
        norm = np.linalg.norm(rows, axis=1)
        u = rows[norm > 0] / norm[norm > 0, None]
        found["average_cosine", bool(of)] = float(np.mean((u @ u.T)[~np.eye(len(u), dtype=bool)]))
        found["drift", bool(of)] = float(np.linalg.norm(rows.mean(0)))
        found["mean_norm", bool(of)] = float(norm.mean())
        about = rows if of else rows - rows.mean(0)
        spectrum = np.linalg.svd(about, compute_uv=False) ** 2
        found["participation_ratio", bool(of)] = float(spectrum.sum() ** 2 / (spectrum**2).sum())
        matrices.append(about.T @ about)
    a, b = matrices
    found["gradient_cosine", False] = float(np.trace(a @ b) / np.linalg.norm(a) / np.linalg.norm(b))
    return found


def rows_by_hand(model: Any, batches: list[dict[str, Tensor]]) -> dict[tuple[int, str], tuple[np.ndarray, np.ndarray]]:
    """Rows and gradients of the sites that transformers itself shows, without padding."""
    found: dict[tuple[int, str], list[tuple[np.ndarray, np.ndarray]]] = {}
    for batch in batches:
        output = model(**batch, output_hidden_states=True)
        states = output.hidden_states
        for state in states:
            state.retain_grad()
        output.loss.backward()
        real = batch["attention_mask"].bool()
        for layer, state in enumerate(states):
            last = layer == len(states) - 1
            kind = "embed" if layer == 0 else "final" if last else "resid"
            pair = state.detach()[real].numpy(), state.grad[real].numpy()
            found.setdefault((layer, kind), []).append(pair)
    model.zero_grad()
    return {key: (np.concatenate([x for x, _ in p]), np.concatenate([g for _, g in p])) for key, p in found.items()}


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("side", ["left", "right"])
def test_every_quantity_equals_its_float64_twin(micro: int, side: str) -> None:
    model: Any = tiny("gpt2").eval()
    batches = [batch_of("gpt2", *LENGTHS[i:], 7, side=side, seed=i) for i in range(micro)]
    wanted = rows_by_hand(model, batches)
    table = follow(model, batches).trace
    assert set(table.arrow["n"].to_pylist()) == {len(wanted[0, "embed"][0])}
    for (layer, kind), (x, g) in wanted.items():
        found, slow = values(table, layer, kind), twin(x, g)
        assert found.keys() == slow.keys()
        for key, value in slow.items():
            assert found[key] == pytest.approx(value, rel=1e-10, abs=1e-12), (layer, kind, key)


def test_the_rows_of_a_large_batch_are_a_sample_of_it() -> None:
    model: Any = tiny("gpt2").eval()
    batch = batch_of("gpt2", *[30] * 40)
    (x, _), n = rows_by_hand(model, [batch])[2, "resid"], 512
    found = follow(model, [batch], every_step=n).trace.where(layer=2, kind="resid")
    assert set(found.arrow["n"].to_pylist()) == {n}
    spread_of_mean = float(np.linalg.norm(x, axis=1).std()) / n**0.5
    assert found.value(metric="mean_norm", variant="rows=batch") == pytest.approx(
        float(np.linalg.norm(x, axis=1).mean()), abs=4 * spread_of_mean
    )


@pytest.mark.parametrize("most", [1, 7, 40, 64])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
def test_padding_is_never_taken_and_no_row_twice(most: int, share: float) -> None:
    for seed in range(8):
        real = torch.rand(5, 8, generator=torch.Generator().manual_seed(seed)) < share
        chosen = SampledContexts(torch.zeros(5), real, most=most, turn=seed / 7).select(8, PositionChoice(), CPU)
        take = chosen.take[chosen.index.valid]  # type: ignore[attr-defined]
        assert len(take) == min(most, int(real.sum()))
        assert len(take.unique()) == len(take) and bool(real.flatten()[take].all())


def test_class_tokens_are_not_patches() -> None:
    contexts = SampledContexts(torch.zeros(3), None, most=50)
    contexts.prefix, contexts.suffix = 1, 2
    take = contexts.select(10, PositionChoice(), CPU).take
    assert sorted(take.tolist()) == [10 * context + place for context in range(3) for place in range(1, 8)]


def test_every_position_has_the_same_chance() -> None:
    counts = torch.zeros(96)
    for i in range(3000):
        counts[spread(96, 12, turn=i * 0.6180339887 % 1, device=CPU)[0]] += 1
    assert float(counts.min()) > 0.9 * 3000 / 8 and float(counts.max()) < 1.1 * 3000 / 8


@pytest.mark.parametrize("shape", ["none", "flat", "square", "additive", "padding"])
def test_a_mask_is_read_as_everywhere_else(shape: str) -> None:
    from anisoscope.capture.row import read_contexts

    ids = torch.tensor([[5, 6, 7, 1], [1, 8, 9, 1], [5, 1, 6, 7]])
    flat = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 0], [1, 1, 1, 1]])
    config = type("Config", (), {"pad_token_id": 1, "eos_token_id": 3})()
    square = flat[:, None, None, :].expand(3, 1, 4, 4).bool()
    given: dict[str, Any] = {"none": {}, "flat": {"attention_mask": flat}, "square": {"attention_mask": square}}
    given["additive"] = {"attention_mask": torch.where(square, 0.0, -1e9)}
    given["padding"] = {"key_padding_mask": flat == 0}
    arguments = {"input_ids": ids, **given[shape]}
    real = mask_of(arguments, ids, config)
    assert real is not None
    assert torch.equal(real, read_contexts(arguments, config=config)[0].real)


def test_sums_of_parts_merge_into_those_of_the_whole() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 90, 6) + 3000.0
    centred, valid = 1, torch.rand(2, 90) < 0.8
    whole = Trace.of(x, valid, centred=centred)
    parts = [Trace.of(a, v, centred=centred) for a, v in zip(x.split(40, 1), valid.split(40, 1), strict=True)]
    empty = Trace.of(x[:, :5], torch.zeros(2, 5, dtype=torch.bool), centred=centred)
    merged = empty.merge(parts[0]).merge(parts[1]).merge(parts[2]).merge(empty)
    assert merged.centred == whole.centred
    for name, value in [(name, value) for name, value in vars(whole).items() if isinstance(value, Tensor)]:
        torch.testing.assert_close(getattr(merged, name), value, rtol=1e-12, atol=1e-7 if name == "scatter" else 1e-12)


def test_rows_that_are_not_finite_are_counted_and_left_out() -> None:
    x = torch.randn(1, 20, 4)
    broken = x.clone()
    broken[0, 3, 1], broken[0, 7] = torch.inf, torch.nan
    kept = torch.ones(1, 20, dtype=torch.bool)
    wanted = kept.clone()
    wanted[0, [3, 7]] = False
    found, clean = (Trace.of(*pair, centred=1) for pair in ((broken, kept), (x, wanted)))
    assert float(found.counts[0, 2]) == 2 and float(found.n) == 18
    torch.testing.assert_close(found.quantities()[:, 2:], clean.quantities()[:, 2:])


@pytest.mark.parametrize("name", ["gpt2", "bert-masked"])
def test_the_training_is_bit_identical(name: str) -> None:
    losses, weights, monitor = trained(name, {"metrics": "drift", "when": at([1]), "every_step": 16})
    wanted, same, _ = trained(name, None)
    assert losses == wanted
    assert all(torch.equal(weights[n], same[n]) for n in same)
    assert sorted(set(monitor.trace.arrow["step"].to_pylist())) == [0, 1, 2]
    assert set(monitor.table.arrow["step"].to_pylist()) == {1}


class Waits(TorchDispatchMode):
    """Operations after which a host would have to wait for its device."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "item", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        indices = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
        flags = any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)
        if name in self.NAMES or flags:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def waits_of(step: int, *, monitored: bool, micro: int = 2) -> list[str]:
    """What a step waits for, with its optimizer."""
    model = tiny("gpt2").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options: dict[str, Any] = {"when": at([0]), "metrics": "drift", "every_step": True, "optimizer": optimizer}
    monitor = Monitor(model, **options) if monitored else None
    if monitor is None:
        return _waits(model, optimizer, [_nothing()], micro)[-1]
    with monitor:
        return _waits(model, optimizer, [monitor.step(i) for i in range(step + 1)], micro)[-1]


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


def _waits(model: Any, optimizer: Any, steps: list[Any], micro: int) -> list[list[str]]:
    found = []
    for step in steps:
        batches = [batch_of("gpt2", *LENGTHS, seed=i) for i in range(micro)]
        with Waits() as mode:
            with step:
                for batch in batches:
                    model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(mode.seen)
    return found


def test_an_unmeasured_step_waits_for_nothing_that_the_plain_one_does_not() -> None:
    plain = waits_of(0, monitored=False)
    assert waits_of(2, monitored=True) == plain
    assert len(waits_of(0, monitored=True)) > len(plain)  # a measured step does, and it would be noticed


def test_recomputed_passes_count_once() -> None:
    batches = [batch_of("llama", *LENGTHS)]
    wanted = follow(tiny("llama").train(), batches).trace  # no dropout in this family
    model: Any = tiny("llama").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls: list[int] = []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    found = follow(model, batches).trace
    assert len(calls) == 2  # it was recomputed
    compare(found, wanted, 1e-6)
    assert found.arrow["n"].to_pylist() == wanted.arrow["n"].to_pylist()


def test_re_entrant_checkpointing_is_refused_with_the_reason() -> None:
    model: Any = tiny("gpt2").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(AnisoscopeError, match="re-entrant"):
        follow(model, [batch_of("gpt2", *LENGTHS)], strict=True)


def test_where_no_gradient_comes_there_is_no_number() -> None:
    model: Any = tiny("gpt2")
    for part in (model.transformer.wte, model.transformer.wpe, model.transformer.h[0]):
        part.requires_grad_(False)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    table = follow(model, [batch_of("gpt2", *LENGTHS)]).trace
    for row in table.records():
        lacking = row["layer"] < 2 and "gradient" in row["metric"] + row["variant"]
        assert np.isnan(row["value"]) == lacking, row
        assert (row["note"] == "no gradient came here") == lacking


def test_only_what_is_learned_from_counts() -> None:
    model = tiny("gpt2")
    batch, other = batch_of("gpt2", *LENGTHS), batch_of("gpt2", 12, 12, seed=5)
    wanted = follow(tiny("gpt2"), [batch]).trace
    with Monitor(model, when=at([99]), metrics="drift", every_step=True) as monitor:
        with monitor.step(0):
            with torch.no_grad():
                model(**other)
            model(**other)
            loss = model(**batch).loss
            with torch.no_grad():
                model(**other)
            loss.backward()
        with monitor.step(1):
            pass
    rows = [{**row, "variant": f"{row['variant']};n={row['n']}"} for row in monitor.trace.records()]
    compare(Table.from_records(rows), Table.from_records([{**r, "variant": f"{r['variant']};n={r['n']}"}
                                                          for r in wanted.records()]))  # fmt: skip


def test_passes_may_wait_for_one_backward_pass() -> None:
    batches = [batch_of("gpt2", *LENGTHS, seed=i) for i in range(2)]
    wanted = follow(tiny("gpt2"), batches).trace
    model = tiny("gpt2")
    with Monitor(model, when=at([99]), metrics="drift", every_step=True) as monitor, monitor.step(0):
        sum(model(**batch).loss for batch in batches).backward()
    compare(monitor.trace, wanted, 1e-6)


def test_the_scale_that_the_loop_names_is_taken_out() -> None:
    batch = batch_of("gpt2", *LENGTHS)
    wanted = follow(tiny("gpt2"), [batch]).trace
    model = tiny("gpt2")
    with Monitor(model, when=at([99]), metrics="drift", every_step=True) as monitor, monitor.step(0, scale=1024.0):
        (model(**batch).loss * 1024.0).backward()
    compare(monitor.trace, wanted, 1e-5)


def test_autocast_rows_are_widened() -> None:
    model, batch = tiny("gpt2"), batch_of("gpt2", *LENGTHS)
    wanted = follow(tiny("gpt2"), [batch]).trace
    monitor = Monitor(model, when=at([99]), metrics="drift", every_step=True)
    with monitor, monitor.step(0), torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):  # the first is handed on inside the second
            model(**batch).loss.backward()
    compare(monitor.trace, wanted, 0.1)


def test_both_stacks_of_an_encoder_decoder_are_followed() -> None:
    model = tiny("byt5")
    with Monitor(model, when=at([99]), metrics="drift", every_step=True) as monitor, monitor.step(0):
        ids = batch_of("gpt2", *LENGTHS)["input_ids"]
        model(input_ids=ids, labels=ids[:, :5].contiguous()).loss.backward()
    kinds = {(row["stack"], row["layer"], row["kind"]) for row in monitor.trace.records()}
    assert kinds == {(site.stack, site.layer, site.kind) for site in find_layout(model).sites()}


def test_a_monitor_without_it_has_no_trace() -> None:
    with pytest.raises(AnisoscopeError, match="every_step=True"):
        _ = Monitor(tiny("gpt2"), when=at([0]), metrics="drift").trace


def killed(out: Path, *, stop: int | None = None, start: int = 0, resume: bool = False) -> Table:
    """A training whose every batch depends on its step; it is measured at 0 and 4, and may be killed or begun later."""
    model = tiny("gpt2")
    monitor = Monitor(model, when=at([0, 4]), metrics="drift", every_step=True, out=out, resume=resume)
    with monitor:
        for step in range(start, 7):
            with monitor.step(step):
                model(**batch_of("gpt2", *LENGTHS, seed=step)).loss.backward()
                if step == stop:
                    raise KeyboardInterrupt
            model.zero_grad()
    return monitor.trace


@pytest.mark.parametrize(("stop", "start"), [(3, 0), (5, 0), (6, 5), (3, 3)])
def test_a_run_that_was_killed_and_resumed_has_every_step_once(tmp_path: Path, stop: int, start: int) -> None:
    whole = killed(tmp_path / "whole")
    assert sorted(set(whole.arrow["step"].to_pylist())) == list(range(7))
    with pytest.raises(KeyboardInterrupt):
        killed(tmp_path / "killed", stop=stop)
    broken = Table.read(tmp_path / "killed" / "every_step.parquet")
    assert sorted(set(broken.arrow["step"].to_pylist())) == list(range(stop))  # the step that broke off is not there
    compare(killed(tmp_path / "killed", start=start, resume=True), whole, 1e-12)
    compare(Table.read(tmp_path / "killed" / "every_step.parquet"), whole, 1e-12)


def test_a_buffer_that_is_full_is_followed_by_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = killed(tmp_path / "one")
    monkeypatch.setattr("anisoscope.monitor.every_step._STEPS", 2)
    compare(killed(tmp_path / "two"), whole, 1e-12)
