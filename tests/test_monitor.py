"""The monitor: training goes on as if it were not there, and what it writes is what autograd says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import references
from anisoscope.capture.losses import IGNORED, Reading
from anisoscope.capture.sites import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.frequency import equal_mass_bins
from anisoscope.numerics.hashing import half_of
from anisoscope.runs.monitor import Monitor
from anisoscope.runs.plan import TangentPlan
from anisoscope.runs.schedule import at, every, log_spaced
from anisoscope.runs.table import Table
from gradient_models import CAUSAL, MASK, batch_of, exact_loss, hooks_of, in_place_loss, language_model, parts, summed
from tiny_models import VOCABULARY, contexts, tiny

SITE = Site(2, "resid")
PLAN = TangentPlan(rank=4, draws=19, proxies=("pca", "svd"), frozen=False, balanced=False, embedding=False)
MAIN = "fit=refit;proxy=pca;rank=4"
LENGTHS = tuple(range(6, 14)) * 3  # 24 contexts
COUNTS = torch.arange(VOCABULARY, 0, -1)


def probe_of(name: str, seed: int = 100) -> dict[str, Tensor]:
    return batch_of(name, *LENGTHS, seed=seed)


def trained(
    name: str,
    monitor_options: dict[str, Any] | None,
    *,
    steps: int = 3,
    micro: int = 2,
    dtype: torch.dtype = torch.float32,
    disturb: bool = False,
    decay: float = 0.01,
) -> tuple[list[float], dict[str, Tensor], Any]:
    """Losses, final weights and table of a short training with dropout, with or without a monitor."""
    model = tiny(name, dtype=dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=decay)
    torch.manual_seed(1)
    losses: list[float] = []
    monitor = None if monitor_options is None else Monitor(model, optimizer=optimizer, **monitor_options)
    with monitor if monitor is not None else nothing():
        for step in range(steps):
            with monitor.step(step) if monitor is not None else nothing():
                for part in parts(batch_of(name, *LENGTHS, seed=step), micro):
                    loss = model(**part).loss / micro
                    loss.backward()
                    losses.append(float(loss.detach()))
            if disturb:
                torch.rand(1)
            if monitor is not None:
                monitor.log(step, loss=losses[-1], learning_rate=1e-2)
            optimizer.step()
            optimizer.zero_grad()
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert hooks_of(model) == 0
    return losses, weights, monitor


@contextmanager
def nothing() -> Iterator[None]:
    yield


# training is not changed


@pytest.mark.parametrize("name", ["gpt2", "bert-masked"])
@pytest.mark.parametrize("way", ["probe", "live", pytest.param("both", marks=pytest.mark.slow)])
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


# what is written


def by_hand(name: str, model: nn.Module, batch: dict[str, Tensor], layer: int) -> tuple[Tensor, Tensor]:
    """Test rows of the gradients and their contexts' halves, from hidden states and autograd alone."""
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True)
    total = summed(output.logits, Reading(name in CAUSAL).targets(batch["labels"]))
    g = torch.autograd.grad(total, output.hidden_states[layer])[0]
    return g, batch["attention_mask"].bool()


def test_the_energy_in_the_table_is_the_one_computed_by_hand() -> None:
    from anisoscope.capture.index import read_contexts

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


def compare(one: Table, two: Table, tolerance: float = 1e-9, without: tuple[str, ...] = ()) -> None:
    def values(table: Table) -> dict[tuple[Any, ...], float]:
        names = ("step", "stack", "layer", "kind", "head", "group", "metric", "variant")
        rows = [r for r in table.records() if not any(w in f"{r['metric']};{r['variant']}" for w in without)]
        found = {tuple(r[n] for n in names): r["value"] for r in rows}
        assert len(found) == len(rows)  # no row twice
        return found

    a, b = values(one), values(two)
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert value == pytest.approx(b[key], rel=tolerance, abs=tolerance, nan_ok=True), key


def measured(name: str, probe: Any, *, metrics: str = "tangent", plan: TangentPlan = PLAN, **options: Any) -> Table:
    model = tiny(name, dtype=torch.float64)
    monitor = Monitor(model, probe=probe, when=at([0]), plan=plan, metrics=metrics, counts=COUNTS, **options)
    with monitor, monitor.step(0):
        pass
    return monitor.table


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
    assert not live.where(metric="probe_loss").records()


def test_the_loss_of_the_probe_is_its_mean_over_test_tokens() -> None:
    from anisoscope.capture.index import original_contexts

    batch = probe_of("bert-masked")
    model = tiny("bert-masked", dtype=torch.float64)
    test = half_of(original_contexts(batch)) == 1
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.detach()
    wanted = float(summed(logits[test], batch["labels"][test])) / int((batch["labels"][test] != IGNORED).sum())
    assert measured("bert-masked", batch).value(metric="probe_loss") == pytest.approx(wanted, rel=1e-9)


def test_bins_of_a_masked_model_are_those_of_the_original_token() -> None:
    from anisoscope.capture.index import original_contexts

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


# embeddings and weights


def test_the_embedding_gradient_is_split_into_its_roles() -> None:
    name = "gpt2"
    plan = TangentPlan(rank=4, draws=19, proxies=("pca", "svd"), frozen=False)
    model: Any = tiny(name, dtype=torch.float64)
    batch = probe_of(name)
    monitor = Monitor(model, probe=batch, when=at([0]), plan=plan, metrics="tangent", counts=COUNTS)
    with monitor, monitor.step(0):
        pass
    assert monitor.probe is not None
    inside = torch.zeros(VOCABULARY, 32, dtype=torch.float64)
    whole = torch.zeros_like(inside)
    for piece in monitor.probe.pieces:
        if piece.test:
            output = model(
                input_ids=piece.inputs["input_ids"],
                attention_mask=piece.inputs["attention_mask"],
                output_hidden_states=True,
            )
            total = summed(output.logits, Reading(True).targets(piece.inputs["labels"]))
            h, w = torch.autograd.grad(total, [output.hidden_states[0], model.transformer.wte.weight])
            inside.index_add_(0, piece.inputs["input_ids"].flatten(), h.flatten(0, 1))
            whole += w
    for of, table, site in (
        ("embedding_in", inside, Site(0, "embed")),
        ("embedding_out", whole - inside, Site(3, "final")),
    ):
        Q = monitor.basis(site, proxy="pca").numpy()
        value = monitor.table.value(
            metric="gradient_energy",
            variant=f"fit=refit;of={of};proxy=pca;rank=4",
            group="",
            layer=site.layer,
            kind=site.kind,
        )
        assert value == pytest.approx(references.gradient_energy(table.numpy(), Q), rel=1e-9), of


def test_weight_gradients_are_tested_against_what_their_linear_reads() -> None:
    plan = TangentPlan(rank=4, draws=19, proxies=("pca", "svd"), frozen=False, weights=True, embedding=False)
    table = measured("llama", probe_of("llama"), plan=plan)
    rows = [r for r in table.records() if "of=weight" in r["variant"] and r["metric"] == "gradient_energy"]
    main = [r for r in rows if "proxy=pca" in r["variant"] and "control" not in r["variant"]]
    assert {(r["layer"], r["kind"]) for r in main} == {(i, k) for i in (1, 2, 3) for k in ("attn_in", "mlp_in")}
    assert all(0 < r["value"] <= 1 and r["low"] <= r["value"] <= r["high"] for r in main)
    assert all(("q_proj" in r["note"]) == (r["kind"] == "attn_in") for r in main)


def updated(gradient: float, weight_decay: float, *, used: bool = True) -> tuple[Any, Any, nn.Module]:
    """A step of AdamW on a model whose gradients are zero or not, and the updates that the watch sees."""
    model: Any = tiny("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=weight_decay)
    monitor = Monitor(model, when=at([0]), probe=probe_of("llama"), optimizer=optimizer, metrics="tangent", plan=PLAN)
    with monitor:
        for step in range(4):
            with monitor.step(step):
                model(**batch_of("llama", 9, 8, seed=step)).loss.backward()
                for p in model.parameters():
                    p.grad.mul_(gradient)
            if not used:
                model.get_input_embeddings().weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
        monitor.watch.close()
        found = {name: change.clone() for name, _, change in monitor.watch.updates()}
    return found, monitor, model


def test_weight_decay_is_taken_out_of_an_update_exactly() -> None:
    found, _, _ = updated(0.0, 0.1)
    assert float(found["update_raw"].abs().max()) > 1e-4
    assert float(found["update"].abs().max()) == 0.0


def test_what_the_gradients_did_stays_in_an_update() -> None:
    with_decay, _, _ = updated(1.0, 0.1)
    without, _, _ = updated(1.0, 0.0)
    torch.testing.assert_close(without["update"], without["update_raw"])
    assert float((with_decay["update"] - with_decay["update_raw"]).abs().max()) > 1e-4
    assert float(with_decay["update"].norm()) == pytest.approx(float(without["update"].norm()), rel=0.05)


def test_a_table_that_the_optimizer_skips_has_no_decay_to_take_out() -> None:
    found, _, _ = updated(1.0, 0.1, used=False)
    assert float(found["update_raw"].abs().max()) == float(found["update"].abs().max()) == 0.0


def test_the_settings_of_a_loaded_optimizer_are_the_ones_used() -> None:
    model = tiny("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.5)
    monitor = Monitor(model, when=at([0]), probe=probe_of("llama"), optimizer=optimizer, metrics="tangent", plan=PLAN)
    state = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1).state_dict()
    optimizer.load_state_dict(state)
    assert monitor.watch.group is not None and monitor.watch.group["lr"] == 1e-3


def test_only_types_of_training_batches_count_as_seen() -> None:
    _, monitor, _ = updated(1.0, 0.1)
    seen = set(monitor.watch.closed.nonzero().squeeze(1).tolist())
    wanted = {int(t) for step in range(4) for row in contexts(9, 8, seed=step) for t in row}
    assert seen - {1} == wanted  # 1 is the padding, which the model reads, too


def test_updates_of_adam_without_decoupled_decay_are_raw_only() -> None:
    model = tiny("llama")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1)
    monitor = Monitor(model, when=at([0]), probe=probe_of("llama"), optimizer=optimizer, metrics="tangent", plan=PLAN)
    assert monitor.watch.group is None


def test_updates_are_in_the_table() -> None:
    options = {"probe": [probe_of("gpt2")], "when": every(1), "total_steps": 3, "counts": COUNTS}
    plan = TangentPlan(rank=4, draws=19, proxies=("pca", "svd"), frozen=False)
    _, _, monitor = trained("gpt2", {**options, "plan": plan, "metrics": "tangent"})
    rows = monitor.table.where(metric="gradient_energy", group="").records()
    for of in ("update", "update_raw"):
        mine = [
            r
            for r in rows
            if f"of={of};" in r["variant"] and "control" not in r["variant"] and "average" not in r["variant"]
        ]
        assert {r["step"] for r in mine} == {1, 2}
        assert all(f"since step {r['step'] - 1}" in r["note"] for r in mine)


# resuming


def resumable(out: Path, *, stop: int | None = None, resume: bool = False, live: bool = False, steps: int = 5) -> Table:
    """A deterministic training that is killed after `stop` steps, and replayed from the start when it resumes."""
    model = tiny("gpt2").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    torch.manual_seed(3)
    plan = TangentPlan(rank=4, draws=19, proxies=("pca", "svd"))
    options: dict[str, Any] = {"live": True} if live else {"probe": [probe_of("gpt2")]}
    monitor = Monitor(
        model, when=log_spaced(steps), out=out, plan=plan, metrics="average_cosine,tangent", counts=COUNTS,
        optimizer=optimizer, total_steps=steps, resume=resume, **options,
    )  # fmt: skip
    with monitor:
        for step in range(steps + 1):
            with monitor.step(step):
                loss = model(**batch_of("gpt2", *LENGTHS, seed=step)).loss
                loss.backward()
            if step == stop:
                raise KeyboardInterrupt
            monitor.log(step, loss=float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
    return monitor.table


@pytest.mark.parametrize(("stop", "live"), [(2, False), pytest.param(3, True, marks=pytest.mark.slow)])
def test_a_run_that_was_killed_and_resumed_has_the_same_table(tmp_path: Path, stop: int, live: bool) -> None:
    whole = resumable(tmp_path / "whole", live=live)
    with pytest.raises(KeyboardInterrupt):
        resumable(tmp_path / "killed", stop=stop, live=live)
    again = resumable(tmp_path / "killed", resume=True, live=live)
    compare(again, whole, 1e-3)
    compare(Table.read(tmp_path / "killed" / "table.parquet"), whole, 1e-3)
    assert sorted({r["step"] for r in again.records()}) == [0, 1, 2, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "live"), [(0, False), (1, True), (3, False), (5, False)])
def test_a_run_can_be_killed_at_any_moment(tmp_path: Path, stop: int, live: bool) -> None:
    test_a_run_that_was_killed_and_resumed_has_the_same_table(tmp_path, stop, live)


@pytest.mark.slow
def test_a_step_whose_state_was_lost_is_measured_again_and_not_twice(tmp_path: Path) -> None:
    whole = resumable(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        resumable(tmp_path / "killed", stop=3)
    newest = max((tmp_path / "killed" / "state").glob("step-*.pt"))
    newest.unlink()  # killed between the table of a step and its state
    compare(resumable(tmp_path / "killed", resume=True), whole, 1e-3)


@pytest.mark.slow
def test_a_complete_run_can_be_opened_again(tmp_path: Path) -> None:
    whole = resumable(tmp_path / "run")
    compare(resumable(tmp_path / "run", resume=True), whole, 1e-3)


def test_a_run_that_ended_inside_its_window_can_be_opened_again(tmp_path: Path) -> None:
    def run(resume: bool) -> Table:
        model = tiny("gpt2")
        plan = TangentPlan(rank=4, draws=19, proxies=("pca", "svd"))
        monitor = Monitor(
            model, when=at([0, 1]), total_steps=100, out=tmp_path / "run", plan=plan, metrics="tangent",
            probe=probe_of("gpt2"), resume=resume,
        )  # fmt: skip
        with monitor:
            for step in range(2):
                with monitor.step(step):
                    pass
        return monitor.table

    first = run(False)
    assert any("fit=frozen" in r["variant"] for r in first.records())
    compare(run(True), first, 1e-3)


def test_a_folder_with_another_run_is_refused(tmp_path: Path) -> None:
    resumable(tmp_path / "run", steps=1)
    with pytest.raises(AnisoscopeError, match="resume=True"):
        resumable(tmp_path / "run", steps=1)


def test_numbers_of_the_training_are_kept_beside_the_measurements() -> None:
    _, _, monitor = trained(
        "gpt2", {"probe": [probe_of("gpt2")], "when": at([0, 2]), "plan": PLAN, "metrics": "tangent"}
    )
    rows = monitor.table.where(metric=["loss", "learning_rate"]).records()
    assert sorted((r["step"], r["metric"]) for r in rows) == [(s, m) for s in (0, 2) for m in ("learning_rate", "loss")]
    assert {r["kind"] for r in rows} == {"training"}


# bad input


def build(model: nn.Module | None = None, **options: Any) -> Monitor:
    options = {"when": at([0]), "plan": PLAN, "metrics": "tangent", "probe": probe_of("gpt2"), **options}
    return Monitor(tiny("gpt2") if model is None else model, **options)


def test_a_rank_that_is_too_large_is_refused_before_training() -> None:
    with pytest.raises(AnisoscopeError, match="quarter of the width 32"):
        build(rank=9)


def test_a_model_without_a_loss_is_refused_before_training() -> None:
    batch = probe_of("bert-masked")
    with pytest.raises(AnisoscopeError, match=r"no loss|load it with a language-model head"):
        build(tiny("bert"), probe=batch)


def test_ignored_labels_are_refused_before_training() -> None:
    batch = probe_of("gpt2")
    with pytest.raises(AnisoscopeError, match="every label of the probe is -100"):
        build(probe={**batch, "labels": torch.full_like(batch["labels"], IGNORED)})


def test_frozen_models_are_refused_and_frozen_embeddings_left_out_with_a_note() -> None:
    with pytest.raises(AnisoscopeError, match=r"every parameter of GPT2LMHeadModel is frozen"):
        build(tiny("gpt2").requires_grad_(False))
    for live in (False, True):
        model: Any = tiny("gpt2")
        model.transformer.wte.weight.requires_grad_(False)
        model.transformer.wpe.weight.requires_grad_(False)
        plan = TangentPlan(rank=4, draws=19, proxies=("pca", "svd"), frozen=False)
        monitor = build(model, plan=plan, **({"probe": None} if live else {}))
        with monitor, monitor.step(0):
            model(**probe_of("gpt2")).loss.backward()
        rows = monitor.table.where(metric="gradient_energy").records()
        assert {r["kind"] for r in rows} == {"resid", "final"}
        assert any("0.embed" in note for note in monitor.notes)
        assert not any("another width" in note for note in monitor.notes)


def test_a_proxy_before_any_fit_is_refused() -> None:
    monitor = build()
    with pytest.raises(AnisoscopeError, match="no step has been measured yet"):
        monitor.basis(SITE)
    with pytest.raises(AnisoscopeError, match="no tangent study"):
        build(plan=None, metrics="average_cosine").basis(SITE)


def test_a_step_outside_the_monitor_is_refused() -> None:
    with pytest.raises(AnisoscopeError, match="enter the monitor first"), build().step(0):
        pass


def live_step(act: Any, **said: Any) -> Monitor:
    model = tiny("gpt2")
    monitor = build(model, probe=None)
    with monitor, monitor.step(0, **said):
        act(model)
    return monitor


def test_a_live_step_without_passes_is_refused() -> None:
    with pytest.raises(AnisoscopeError, match="no forward pass was seen in step 0"):
        live_step(lambda model: None)
    with pytest.raises(AnisoscopeError, match="no backward pass was seen in step 0"):
        live_step(lambda model: model(**probe_of("gpt2")))


def outside(model: nn.Module) -> None:
    batch = probe_of("gpt2")
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    exact_loss(logits, batch["labels"]).backward()


def test_a_loss_from_outside_the_model_needs_to_be_explained() -> None:
    with pytest.raises(AnisoscopeError, match=r"took no part in the backward pass.*loss=\"mean\""):
        live_step(outside)
    with pytest.raises(AnisoscopeError, match="needs tokens="):
        live_step(outside, loss="mean")
    with pytest.raises(AnisoscopeError, match="expected auto, mean or sum"):
        live_step(outside, loss="average")
    tokens = int((probe_of("gpt2")["labels"][:, 1:] != IGNORED).sum())
    explained = live_step(outside, loss="mean", tokens=tokens).table
    wanted = live_step(lambda model: model(**probe_of("gpt2")).loss.backward()).table
    place = {"metric": "gradient_energy", "layer": 2, "group": "", "variant": f"batch=live;{MAIN}"}
    assert explained.value(**place) == pytest.approx(wanted.value(**place), rel=1e-4)


def test_a_probe_of_one_context_is_refused() -> None:
    with pytest.raises(AnisoscopeError, match="1 different contexts, all in one half"):
        build(probe={k: v[:1] for k, v in probe_of("gpt2").items()})
    with pytest.raises(AnisoscopeError, match="no batches"):
        build(probe=[])


def test_a_training_batch_in_one_half_stops_no_training_but_is_noted() -> None:
    monitor = live_step(lambda model: model(**batch_of("gpt2", 9)).loss.backward())
    assert not monitor.table.where(metric="gradient_energy").records()
    assert any("one half" in note for note in monitor.notes)


@pytest.mark.parametrize("scale", [math.inf, 0.0])
def test_an_overflow_that_a_loss_scaler_would_skip_stops_no_training(scale: float) -> None:
    monitor = live_step(lambda model: (model(**probe_of("gpt2")).loss * scale).backward())
    assert not monitor.table.where(metric="gradient_energy").records()
    assert monitor.notes


def test_a_compiled_model_is_refused_for_its_training_batch() -> None:
    compiled = torch.compile(tiny("gpt2"), backend="eager")
    with pytest.raises(AnisoscopeError, match="compiled"):
        build(compiled, probe=None)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_probe_works_on_a_compiled_model() -> None:
    model = tiny("gpt2")
    plain = build(model)
    with plain, plain.step(0):
        pass
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    monitor = build(compiled)  # type: ignore[arg-type]
    with monitor, monitor.step(0):
        compiled(**batch_of("gpt2", 5, 4)).loss.backward()
    compare(monitor.table, plain.table)


def test_unknown_metrics_and_sites_are_refused() -> None:
    with pytest.raises(AnisoscopeError, match="avrage_cosine"):
        build(metrics="avrage_cosine")
    with pytest.raises(AnisoscopeError, match="layers"):
        build(layers=[17])


def test_a_model_under_somebody_elses_names_needs_no_config() -> None:
    """Exact gradients do not depend on transformers: any callable loss over any model whose layout is known."""
    model = language_model("gpt2")

    def rule(m: nn.Module, inputs: Any) -> Tensor:
        plain = {k: v for k, v in inputs.items() if k != "labels"}
        return summed(m(**plain).logits, Reading(True).targets(inputs["labels"]))

    own = build(model, loss=rule)
    usual = build(model)
    for monitor in (own, usual):
        with monitor, monitor.step(0):
            pass
    compare(own.table, usual.table, 1e-6)


def test_contexts_of_a_token_classifier_are_told_apart_by_their_text_not_by_their_tags() -> None:
    """Tags have the shape of the ids: were they taken for hidden tokens, all untagged texts would be one context."""
    from anisoscope.capture.index import original_contexts

    ids = torch.arange(32 * 16).view(32, 16) % 50
    tags = torch.zeros_like(ids)
    assert len(original_contexts({"input_ids": ids, "labels": tags}).unique()) == len(
        original_contexts({"input_ids": ids}).unique()
    )
    hidden = torch.rand(32, 16, generator=torch.Generator().manual_seed(0)) < 0.3
    labels = torch.where(hidden, ids, -100)
    masked = {"input_ids": ids.masked_fill(hidden, MASK), "labels": labels}
    assert torch.equal(original_contexts(masked), original_contexts({"input_ids": ids})), "the counter-test"
