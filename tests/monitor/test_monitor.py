"""The monitor: training goes on as if it were not there, and what it writes is what autograd says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anisoscope.capture.gradient_pass import IGNORED, LabelConvention
from anisoscope.metrics.frequency import equal_mass_bins
from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import at, every
from anisoscope.numerics.hashing import half_of
from anisoscope.tangent.plan import TangentPlan
from support import references
from support.gradient_models import CAUSAL, MASK, batch_of, exact_loss, hooks_of, in_place_loss, parts, summed
from support.monitored import COUNTS, LENGTHS, MAIN, PLAN, SITE, build, compare, measured, probe_of, trained
from support.tiny_models import tiny


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("gpt2", "probe"),
        ("bert-masked", "live"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gpt2", "live"), ("bert-masked", "probe"))),
        *(pytest.param(name, "both", marks=pytest.mark.slow) for name in ("gpt2", "bert-masked")),
    ],
)
def test_a_monitored_training_is_bit_identical(name: str, way: str) -> None:
    options: dict[str, Any] = {
        "plan": TangentPlan(rank=4, draws=19),
        "counts": COUNTS,
        "when": every(1),
        "total_steps": 3,
    }
    options |= {"probe": [probe_of(name)]} if way != "live" else {}
    options |= {"live": True} if way == "both" else {}
    losses, weights, monitor = trained(name, options)
    wanted, same, _ = trained(name, None)
    assert losses == wanted
    assert all(torch.equal(weights[n], same[n]) for n in same)
    assert {r["step"] for r in monitor.table.records()} == {0, 1, 2}


def test_a_monitor_that_used_random_numbers_would_be_noticed() -> None:
    assert trained("gpt2", None, disturb=True)[0] != trained("gpt2", None)[0]


def test_modes_gradients_buffers_and_random_numbers_come_back_after_a_probe() -> None:
    model: Any = tiny("gpt2").train()
    model.transformer.h[1].eval()
    model(**batch_of("gpt2", 5, 4)).loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    modes, random = [m.training for m in model.modules()], torch.get_rng_state()
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    monitor = Monitor(model, probe=probe_of("gpt2"), when=at([0]), plan=PLAN, metrics="tangent")
    with monitor, monitor.step(0):
        pass
    assert [m.training for m in model.modules()] == modes and torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(p.grad, grads[n]) for n, p in model.named_parameters())
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())


@pytest.mark.parametrize("live", [False, True])
def test_hooks_are_off_after_an_exception(live: bool) -> None:
    model = tiny("gpt2")
    options: dict[str, Any] = {"live": True} if live else {"probe": probe_of("gpt2")}
    monitor = Monitor(model, when=at([0]), plan=PLAN, metrics="tangent", **options)

    def fail() -> None:
        with monitor, monitor.step(0):
            assert hooks_of(model) > 0
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert hooks_of(model) == 0
    assert not live or (monitor.live is not None and not monitor.live.active)


def by_hand(name: str, model: nn.Module, batch: dict[str, Tensor], layer: int) -> tuple[Tensor, Tensor]:
    """Test rows of the gradients and their contexts' halves, from hidden states and autograd alone."""
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True)
    total = summed(output.logits, LabelConvention(name in CAUSAL).targets(batch["labels"]))
    g = torch.autograd.grad(total, output.hidden_states[layer])[0]
    return g, batch["attention_mask"].bool()


def test_the_energy_in_the_table_is_the_one_computed_by_hand() -> None:
    from anisoscope.capture.row import read_contexts

    model = tiny("gpt2", dtype=torch.float64)
    batch = probe_of("gpt2")
    monitor = Monitor(model, probe=batch, when=at([0]), plan=PLAN, metrics="tangent")
    with monitor, monitor.step(0):
        pass
    g, real = by_hand("gpt2", model, batch, 2)
    test = half_of(read_contexts(batch)[0].hashes) == 1
    rows = g[test][real[test]]
    Q = monitor.basis(SITE, proxy="pca").numpy()
    place = {"layer": 2, "kind": "resid", "metric": "gradient_energy", "group": ""}
    value = monitor.table.value(variant=MAIN, **place)
    assert value == pytest.approx(references.gradient_energy(rows.numpy(), Q), rel=1e-9)
    by_row = monitor.table.value(variant=f"average=row;{MAIN}", **place)
    moving = rows[rows.norm(dim=1) > 0]
    assert by_row == pytest.approx(references.gradient_energy_by_row(moving.numpy(), Q), rel=1e-9)
    found = monitor.table.where(variant=MAIN, **place).records()[0]
    assert found["n"] == len(rows) and found["contexts"] == int(test.sum())
    hidden = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True)
    x = hidden.hidden_states[2][~test][real[~test]].detach()
    top = torch.linalg.svd(x - x.mean(0))[2][:4]
    assert float((top @ torch.from_numpy(Q)).square().sum()) == pytest.approx(4.0, abs=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "bert-masked"])
def test_rebatching_the_probe_changes_nothing(name: str) -> None:
    plan = TangentPlan(rank=4, draws=19, proxies=("pca", "svd"), weights=True, frozen=False)
    whole = measured(name, probe_of(name), metrics="average_cosine,tangent", plan=plan)
    again = measured(name, parts(probe_of(name), 6), metrics="average_cosine,tangent", plan=plan, batch_size=3)
    compare(again, whole, 1e-9, without=("control=normal", "control=random", "gradient_ratio"))
    compare(again, whole, 1e-4)  # draws are float32


def test_no_context_is_both_fitted_on_and_tested_on() -> None:
    monitor = build(probe=parts(probe_of("gpt2"), 4))
    assert monitor.probe is not None
    rows = monitor.probe.run(0)
    for _, fit, test in rows.halves():
        one, two = set(fit.context.tolist()), set(test.context.tolist())
        assert one and two and not one & two and len(one | two) == 24
        assert len(fit) + len(test) == sum(LENGTHS)


def test_both_stacks_of_an_encoder_decoder_are_probed() -> None:
    model = tiny("byt5")
    batch = probe_of("gpt2")
    monitor = build(model, probe={**batch, "labels": batch["labels"].roll(1, 1)})
    with monitor, monitor.step(0):
        pass
    found = {(r["stack"], r["kind"]) for r in monitor.table.where(metric="gradient_energy").records()}
    assert found == {(stack, kind) for stack in ("encoder", "decoder") for kind in ("embed", "resid", "final")}


def test_a_context_that_comes_twice_counts_once() -> None:
    batch = probe_of("gpt2")
    doubled = {k: torch.cat([v, v[:5]]) for k, v in batch.items()}
    compare(measured("gpt2", [doubled, batch]), measured("gpt2", batch))


@pytest.mark.parametrize("name", ["gpt2", "bert-masked"])
@pytest.mark.parametrize(("micro", "scale"), [(1, 1.0), pytest.param(2, 65536.0, marks=pytest.mark.slow), (4, 1000.0)])
def test_the_training_batch_gives_what_a_probe_of_the_same_contexts_gives(name: str, micro: int, scale: float) -> None:
    model: Any = tiny(name, dtype=torch.float64)
    model.loss_function = exact_loss if name in CAUSAL else in_place_loss
    batch = probe_of(name)
    monitor = Monitor(model, when=at([0]), plan=PLAN, metrics="tangent", counts=COUNTS)
    with monitor, monitor.step(0):
        for part in parts(batch, micro):
            (model(**part).loss / micro * scale).backward()
    probed = measured(name, batch)
    live = monitor.table
    assert {r["variant"].count("batch=live") for r in live.where(metric="gradient_energy").records()} == {1}
    for group in ("", *(("masked", "unmasked") if name not in CAUSAL else ()), "frequency:3"):
        for layer in (1, 2, 3):
            place = {"layer": layer, "kind": "resid", "metric": "gradient_energy", "group": group}
            wanted = probed.value(variant=MAIN, **place)
            assert live.value(variant=f"batch=live;{MAIN}", **place) == pytest.approx(wanted, rel=1e-9, nan_ok=True)
            assert not math.isnan(wanted) or (group, layer) == ("unmasked", 3)  # only masked rows have a loss there
    assert "probe_loss" not in live.metrics


def test_the_loss_of_the_probe_is_its_mean_over_test_tokens() -> None:
    from anisoscope.capture.row import original_contexts

    batch = probe_of("bert-masked")
    model = tiny("bert-masked", dtype=torch.float64)
    test = half_of(original_contexts(batch)) == 1
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.detach()
    wanted = float(summed(logits[test], batch["labels"][test])) / int((batch["labels"][test] != IGNORED).sum())
    assert measured("bert-masked", batch).value(metric="probe_loss") == pytest.approx(wanted, rel=1e-9)


def test_bins_of_a_masked_model_are_those_of_the_original_token() -> None:
    from anisoscope.capture.row import original_contexts

    batch = probe_of("bert-masked")
    counts = COUNTS.clone()
    counts[MASK] = 10**6  # were [MASK] counted as a type, it would be most of the corpus
    model = tiny("bert-masked", dtype=torch.float64)
    monitor = Monitor(model, probe=batch, when=at([0]), plan=PLAN, metrics="tangent", counts=counts)
    with monitor, monitor.step(0):
        pass
    test = half_of(original_contexts(batch)) == 1
    original = torch.where(batch["labels"] != IGNORED, batch["labels"], batch["input_ids"])[test]
    original = original[batch["attention_mask"][test].bool()]
    bins = equal_mass_bins(counts)[original]
    got = {
        int(r["group"].split(":")[1]) - 1: r["n"]
        for r in monitor.table.where(metric="gradient_energy", layer=2, variant=MAIN).records()
        if r["group"].startswith("frequency")
    }
    assert got == {b: int((bins == b).sum()) for b in range(5) if bool((bins == b).any())}


@pytest.mark.parametrize("live", [False, True])
def test_other_metrics_are_measured_wherever_they_can_be_had(live: bool) -> None:
    model = tiny("gpt2")
    plan = TangentPlan(rank=4, draws=19, proxies=("pca", "svd"), weights=True, frozen=False)
    given = {"probe": None if live else probe_of("gpt2"), "plan": plan}
    monitor = build(model, metrics="average_cosine,attention_entropy,tangent", **given)
    with monitor, monitor.step(0):
        model(**probe_of("gpt2")).loss.backward()
    cosines = monitor.table.where(metric="average_cosine").records()
    assert {r["kind"] for r in cosines} >= {"embed", "resid", "final"}
    assert all(math.isfinite(r["value"]) for r in cosines)  # what a fit alone reads is no site of a metric
    assert {r["kind"] for r in monitor.table.where(metric="attention_entropy").records()} == {"scores"}
    whole = [r for r in cosines if r["kind"] == "resid"]
    assert {r["n"] for r in whole} == {sum(LENGTHS)} and {r["contexts"] for r in whole} == {24}


def test_progress_is_told_of_every_site_of_a_measured_step() -> None:
    told: list[tuple[str, int, int]] = []
    trained("gpt2", {"when": [1], "metrics": ["average_cosine"], "progress": lambda *words: told.append(words)})
    assert told and {what for what, _, _ in told} == {"metrics"}
    assert [done for _, done, _ in told] == list(range(1, told[-1][2] + 1))
