"""Proxies frozen from a window of training: fitted once, kept on disk, tested on what came later."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from anisoscope.capture.gradient_pass import SiteRows
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.tangent import gradient_energy
from anisoscope.stats.moments import GradientMoments
from anisoscope.tangent.frozen import IN_SAMPLE, FrozenProxies
from anisoscope.tangent.plan import parse_window
from anisoscope.tangent.proxy import key
from anisoscope.tangent.tangent_study import TangentStudy
from support import references
from support.gradients import skewed, subspace
from support.planted_gradients import OTHER, PLAN, SITE, D, R, found, half, hashes, planted, variant

BY_STEPS = replace(PLAN, frozen=True, window="steps:0.3")
BY_CHECKPOINTS = replace(PLAN, frozen=True)


def test_the_window_is_the_first_three_tenths_of_the_measured_steps() -> None:
    log = [0, *(1 << k for k in range(12)), 4000]
    assert len(log) == 14 and FrozenProxies(BY_CHECKPOINTS, 4000, measured_steps=log).closes == 4
    assert FrozenProxies(BY_STEPS, 4000, measured_steps=log).closes == 1200, "nearly the whole series"
    few = FrozenProxies(BY_CHECKPOINTS, 9, measured_steps=[0, 9])
    assert few.closes == 0, "one step at least"


def _by_window(steps: dict[int, float], **known: Any) -> list[Any]:
    study = TangentStudy(BY_CHECKPOINTS, **known)
    records = [r for step, share in steps.items() for r in study.measure(planted(step, share=share, seed=step))]
    return [r for r in records + study.finish() if "fit=frozen" in r["variant"]]


def test_steps_that_are_not_known_in_advance_give_the_same_frozen_proxy_at_the_end() -> None:
    steps = {0: 0.2, 1: 0.6, 2: 0.4, 4: 0.7, 8: 0.5, 16: 0.5, 20: 0.3}  # 2 of 7 are in the window
    known, unknown = (_by_window(steps, measured_steps=given) for given in (list(steps), None))
    names = ("step", "metric", "variant", "layer", "note")
    by_place = [{tuple(r.get(n) for n in names): r["value"] for r in rows} for rows in (known, unknown)]
    assert by_place[0].keys() == by_place[1].keys() and len(by_place[0]) == len(known)
    for place, value in by_place[0].items():
        assert by_place[1][place] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), place
    assert {r["step"] for r in known if IN_SAMPLE in r["note"]} == {0, 1}


def test_too_many_unknown_steps_are_not_kept() -> None:
    study = TangentStudy(BY_CHECKPOINTS)
    assert study.frozen is not None
    study.frozen.window = {step: {} for step in range(64)}
    study.measure(planted(99))
    assert study.frozen is None and "give total_steps" in study.notes[0]


@pytest.mark.parametrize("text", ["0.3", "epochs:0.3", "steps:3", "checkpoints:0", "steps:x"])
def test_a_window_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(AnisoscopeError, match="expected a share of the measured steps"):
        parse_window(text)


def test_a_frozen_proxy_is_the_one_fitted_by_hand_on_its_window() -> None:
    steps = {0: 0.2, 2: 0.6, 3: 0.4, 8: 0.7}  # the window of 10 steps ends with step 3
    rows = {step: planted(step, share=share, seed=step) for step, share in steps.items()}
    study = TangentStudy(BY_STEPS, total_steps=10)
    records = [r for step in steps for r in study.measure(rows[step])]
    name = variant(fit="frozen")
    pool = torch.cat([rows[s].fit_half(SITE).x for s in (0, 2, 3)])
    top = torch.from_numpy(np.linalg.svd((pool - pool.mean(0)).numpy(), full_matrices=False)[2][:R].T.copy())
    for step in steps:
        g = next(test.g for site, _, test in rows[step].halves() if site == SITE)
        assert g is not None
        row = found(records, "gradient_energy", variant=name, step=step)
        assert row["value"] == pytest.approx(references.gradient_energy(g.numpy(), top.numpy()), rel=1e-6)
        assert (IN_SAMPLE in row["note"]) == (step <= 3)
        every = [
            r
            for r in records
            if "fit=frozen" in r["variant"] and r["step"] == step and r["metric"] != "gradient_p_holm"
        ]
        assert all((IN_SAMPLE in r["note"]) == (step <= 3) for r in every)
        row_average = found(records, "gradient_energy", variant=variant(fit="frozen", average="row"), step=step)
        assert row_average["value"] == pytest.approx(
            references.gradient_energy_by_row(g.numpy(), top.numpy()), rel=1e-6
        )
        assert found(records, "gradient_p", variant=name, step=step)["value"] == 1 / 100
    assert study.basis(SITE, proxy="pca", fit="frozen").shape == (D, R)


@pytest.mark.parametrize("saved", [False, True])
def test_masked_and_unmasked_rows_are_tested_on_frozen_directions_as_all_rows_are(saved: bool) -> None:
    rows = {step: planted(step, share=0.5, seed=step, masked=True) for step in (0, 2, 8)}
    study = TangentStudy(BY_STEPS, total_steps=10)
    records = [r for step in (0, 2) for r in study.measure(rows[step])]
    if saved:
        assert study.frozen is not None
        state, window = study.state(), {step: study.frozen.window_state(step) for step in (0, 2)}
        study = TangentStudy(BY_STEPS, total_steps=10)
        study.load(state, window)
    records += study.measure(rows[8])
    Q = study.basis(SITE, proxy="pca", fit="frozen").double().numpy()
    for step, (name, mask) in itertools.product(rows, {"masked": 1, "unmasked": 0}.items()):
        test = next(test for site, _, test in rows[step].halves() if site == SITE)
        assert test.g is not None
        g = test.g[test.masked == mask].numpy()
        where: dict[str, Any] = {"group": name, "step": step}
        row = found(records, "gradient_energy", variant=variant(fit="frozen"), **where)
        assert row["value"] == pytest.approx(references.gradient_energy(g, Q), rel=1e-5)
        assert row["low"] < row["value"] < row["high"] and row["n"] == len(g)
        assert (IN_SAMPLE in row["note"]) == (step < 8)
        for control in ("normal", "random", "next", "permuted"):
            found(records, "gradient_energy", variant=variant(fit="frozen", control=control), **where)
        for metric in ("gradient_p", "gradient_p_holm", "gradient_enrichment", "gradient_share"):
            found(records, metric, variant=variant(fit="frozen"), **where)


def test_a_run_that_ends_inside_its_window_still_gets_its_frozen_proxy() -> None:
    study = TangentStudy(BY_STEPS, total_steps=100)
    records = study.measure(planted(0)) + study.measure(planted(5))
    assert not any("frozen" in r["variant"] for r in records)
    assert {r["step"] for r in study.finish()} == {0, 5}
    assert study.finish() == []


def test_a_window_without_a_measured_step_stops_no_training() -> None:
    study = TangentStudy(BY_STEPS, total_steps=10)
    records = study.measure(planted(8)) + study.measure(planted(9)) + study.finish()
    assert found(records, "gradient_energy", step=8)["value"] > 0.9
    assert not any("frozen" in r["variant"] for r in records)
    assert any("window" in note for note in study.notes)


def test_a_study_that_was_saved_and_loaded_goes_on_as_if_nothing_had_happened(tmp_path: Any) -> None:
    plan = BY_STEPS
    one = TangentStudy(plan, total_steps=10)
    whole = [r for step in (0, 2, 8) for r in one.measure(planted(step, share=0.5, seed=step))]
    two = TangentStudy(plan, total_steps=10)
    parts = [r for step in (0, 2) for r in two.measure(planted(step, share=0.5, seed=step))]
    torch.save(two.state(), tmp_path / "s.pt")
    three = TangentStudy(plan, total_steps=10)
    assert two.frozen is not None
    window = {step: two.frozen.window_state(step) for step in (0, 2)}
    three.load(torch.load(tmp_path / "s.pt", weights_only=True), window)
    parts += three.measure(planted(8, share=0.5, seed=8))
    assert [(r["metric"], r["variant"], r["step"]) for r in parts] == [
        (r["metric"], r["variant"], r["step"]) for r in whole
    ]
    values = [[r["value"] for r in rows] for rows in (parts, whole)]
    assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-5, nan_ok=True)


def test_variance_that_training_adds_inside_the_earlier_proxy_is_amplification() -> None:
    q = subspace(D, R)
    study = TangentStudy(PLAN)
    first = planted(0, q=q)
    second = planted(1, q=q)
    for site in (SITE, OTHER):
        for place in (second.fit, second.test):
            place[site] = [
                replace(r, x=r.x * 1.5) if isinstance(r, SiteRows) else (replace(r[0], x=r[0].x * 1.5), r[1])
                for r in place[site]
            ]  # type: ignore[assignment,misc]
    assert not any(r["metric"] == "amplification" for r in study.measure(first))
    records = study.measure(second)
    row = found(records, "amplification", step=1)
    assert row["value"] > 0.99 and row["low"] > 0.95 and "since step 0" in row["note"]
    assert found(records, "amplification", variant=variant(control="random"), step=1)["value"] == pytest.approx(
        R / D, rel=0.3
    )
    assert found(records, "amplification", variant=variant(control="normal"), step=1)["value"] < 0.01


def test_a_model_that_did_not_move_has_amplified_nothing() -> None:
    study = TangentStudy(PLAN)
    study.measure(planted(0))
    assert not any(r["metric"] == "amplification" and r["value"] == r["value"] for r in study.measure(planted(1)))


def test_a_proxy_asked_for_before_any_fit_is_refused() -> None:
    study = TangentStudy(BY_STEPS, total_steps=10)
    with pytest.raises(AnisoscopeError, match="no step has been measured yet"):
        study.basis(SITE, proxy="pca")
    study.measure(planted(0))
    assert study.basis(SITE, proxy="pca").shape == (D, R)
    with pytest.raises(AnisoscopeError, match="window is still open"):
        study.basis(SITE, proxy="pca", fit="frozen")


def test_frozen_moments_survive_the_disk_to_float32() -> None:
    frozen = FrozenProxies(BY_STEPS, 100)
    G, context = skewed(200), hashes(20).repeat_interleave(10)
    moments = GradientMoments().update(G, context=context)
    frozen.offer(0, {SITE: frozen.rows_of(half(G, context))}, {SITE: moments}, rank=R)
    again = FrozenProxies(BY_STEPS, 100)
    again.load(frozen.state(), {0: frozen.window_state(0)})
    Q = subspace(D, R)
    kept = GradientMoments.load(again.window[0][key(SITE)])
    assert float(gradient_energy(kept.total, Q)) == pytest.approx(float(gradient_energy(moments.total, Q)), rel=1e-6)


def test_both_frozen_proxies_have_every_control_and_keep_them_when_saved(tmp_path: Any) -> None:
    study = TangentStudy(BY_STEPS, total_steps=10)
    study.measure(planted(0, share=0.5))
    records = study.measure(planted(8, share=0.5, seed=8))
    names = [(proxy, control) for proxy in BY_STEPS.proxies[:2] for control in ("normal", "random", "next", "permuted")]
    values = {}
    for proxy, control in names:
        name = variant(fit="frozen", proxy=proxy, control=control)
        values[proxy, control] = found(records, "gradient_energy", variant=name, step=8)["value"]
    torch.save(study.state(), tmp_path / "s.pt")
    again = TangentStudy(BY_STEPS, total_steps=10)
    again.load(torch.load(tmp_path / "s.pt", weights_only=True), {})
    later = again.measure(planted(8, share=0.5, seed=8))
    for (proxy, control), value in values.items():
        name = variant(fit="frozen", proxy=proxy, control=control)
        assert found(later, "gradient_energy", variant=name, step=8)["value"] == pytest.approx(value, rel=1e-5)
    assert study.frozen is not None
    for proxy in BY_STEPS.proxies[:2]:
        fitted = study.frozen.proxies
        Q, beyond = (fitted[study.frozen.label(proxy, control)][SITE].basis for control in ("", "next"))
        assert float((Q.T @ beyond).abs().max()) < 1e-5, "the next components are those after their own proxy"
