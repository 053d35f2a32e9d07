"""What a monitor says of embedding tables and weights: gradients by role, updates without weight decay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from anisoscope.capture.gradient_pass import LabelConvention
from anisoscope.capture.sites.site import Site
from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import at, every
from anisoscope.tangent.plan import TangentPlan
from support import references
from support.gradient_models import batch_of, summed
from support.monitored import COUNTS, PLAN, measured, probe_of, trained
from support.tiny_models import VOCABULARY, contexts, tiny


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
            total = summed(output.logits, LabelConvention(True).targets(piece.inputs["labels"]))
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
        assert {"coordinates=standardised" in r["variant"] for r in mine} == {False, True}
        aligned = monitor.table.where(metric="gradient_alignment").records()
        assert {r["step"] for r in aligned if f"of={of}" in r["variant"].split(";")} == {1, 2}
        assert all(f"since step {r['step'] - 1}" in r["note"] for r in mine)
