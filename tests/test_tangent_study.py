"""The tangent study on planted rows: intervals, groups, frozen proxies, controls of matched rank, dropped rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import references
from anisoscope.capture.gradients import GradientPass, SiteRows
from anisoscope.capture.losses import Words
from anisoscope.capture.rows import Index
from anisoscope.capture.sites import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.frequency import equal_mass_bins
from anisoscope.metrics.tangent import energy
from anisoscope.numerics.hashing import FOLDS, fold_of, half_of, mix
from anisoscope.runs.energies import EnergyRows, Grouping
from anisoscope.runs.frozen import IN_SAMPLE, FrozenProxies, load_moments
from anisoscope.runs.plan import TangentPlan
from anisoscope.runs.proxies import Label, balanced_rows, fit_proxies, permute_columns, rows_to_fit
from anisoscope.runs.steprows import Half, StepRows
from anisoscope.runs.tangent import TangentStudy
from anisoscope.stats.gradients import GradientMoments
from test_tangent import noise, skewed, subspace

D, R = 24, 4
SITE, OTHER = Site(1, "resid"), Site(2, "resid")
PLAN = TangentPlan(rank=R, draws=99, proxies=("pca", "svd"), frozen=False)


def hashes(n: int, seed: int = 0) -> Tensor:
    return mix(torch.arange(n) + 1_000_003 * (seed + 1))


def half(g: Tensor, context: Tensor, x: Tensor | None = None, token: Tensor | None = None) -> Half:
    nothing = torch.full((len(g),), -1)
    x = g if x is None else x
    token = nothing if token is None else token
    return Half(x, g, context, torch.arange(len(g)), token, nothing, nothing)


def site_rows(x: Tensor, g: Tensor | None, context: Tensor, token: Tensor, masked: Tensor | None = None) -> SiteRows:
    n = len(x)
    index = Index(n, 1, torch.arange(n), context, torch.arange(n), token)
    return SiteRows(x, g, index, Words(token, torch.full((n,), -1), masked))


def planted(
    step: int,
    *,
    contexts: int = 80,
    per: int = 10,
    q: Tensor | None = None,
    share: float = 1.0,
    seed: int = 0,
    **more: Any,
) -> StepRows:
    """Rows whose activations live in span(q), and gradients with a given share of energy there; two sites."""
    q = subspace(D, R) if q is None else q
    rows = StepRows(step)
    owner = hashes(contexts).repeat_interleave(per)
    n = len(owner)
    token = torch.arange(n) % 12
    for site in (SITE, OTHER):
        x = noise(n, R, seed=seed + site.layer) @ q.T * 3 + 0.01 * noise(n, D, seed=seed + 5) + 1.0
        inside = noise(n, R, seed=seed + 10 + site.layer) @ q.T / math.sqrt(R)
        out = noise(n, D, seed=seed + 20 + site.layer)
        out = (out - out @ q @ q.T) / math.sqrt(D - R)
        g = math.sqrt(share) * inside + math.sqrt(1 - share) * out
        for name, value in more.items():
            if name == "spoiled":
                g[value] = math.nan
        fit, test = half_of(owner) == 0, half_of(owner) == 1
        masked = (torch.arange(n) % 2 == 0) if more.get("masked") else None
        rows.add_fit(GradientPass({site: site_rows(x[fit], None, owner[fit], token[fit])}))
        chosen = None if masked is None else masked[test]
        rows.add_test(GradientPass({site: site_rows(x[test], g[test], owner[test], token[test], chosen)}))
    return rows


def found(records: list[dict[str, Any]], metric: str, **columns: Any) -> dict[str, Any]:
    """The one record with this metric and these columns; its variant by its parts."""
    wanted = {"layer": 1, "group": "", "variant": "fit=refit;proxy=pca;rank=4", **columns}
    hits = [r for r in records if r["metric"] == metric and all(r.get(k, "") == v for k, v in wanted.items())]
    assert len(hits) == 1, (metric, wanted, [r["variant"] for r in records if r["metric"] == metric][:20])
    return hits[0]


def variant(**more: Any) -> str:
    from anisoscope.runs.table import variant_name

    return variant_name({"fit": "refit", "proxy": "pca", "rank": R, **more})


# planted cases, from rows to the table


def test_gradients_inside_the_span_of_the_activations_have_energy_one_everywhere() -> None:
    records = TangentStudy(PLAN).measure(planted(0))
    row = found(records, "gradient_energy")
    assert row["value"] == pytest.approx(1.0, abs=1e-3) and row["low"] > 0.99 and row["high"] <= 1.0 + 1e-9
    assert found(records, "gradient_energy", variant=variant(average="row"))["value"] == pytest.approx(1.0, abs=1e-3)
    assert found(records, "gradient_enrichment")["value"] == pytest.approx(D / R, rel=1e-3)
    assert found(records, "gradient_p")["value"] == 1 / 100
    assert found(records, "gradient_p_holm")["value"] == 2 / 100  # two layers
    assert found(records, "gradient_energy", variant=variant(control="normal"))["value"] < 0.01
    assert found(records, "gradient_ratio")["value"] > 100
    assert "above" in found(records, "gradient_share")["note"]
    assert found(records, "gradient_energy", variant=variant(control="next"))["value"] < 0.01
    permuted = found(records, "gradient_energy", variant=variant(control="permuted"))["value"]
    assert permuted < 0.9


def test_isotropic_gradients_have_enrichment_one_within_the_interval() -> None:
    inside = 0
    for seed in range(20):
        records = TangentStudy(replace(PLAN, draws=19)).measure(planted(0, share=R / D, seed=100 * seed))
        row = found(records, "gradient_enrichment")
        inside += row["low"] <= 1.0 <= row["high"]
        assert abs(row["value"] - 1.0) < 0.25
    assert inside >= 17


def test_the_two_controls_agree_with_what_is_known_of_them() -> None:
    records = TangentStudy(replace(PLAN, draws=999)).measure(planted(0, share=0.5))
    e = found(records, "gradient_energy")["value"]
    normal = found(records, "gradient_energy", variant=variant(control="normal"))
    assert normal["value"] == pytest.approx(R * (1 - e) / (D - R), rel=0.05)
    assert found(records, "gradient_ratio")["value"] == pytest.approx(e / normal["value"])
    random = found(records, "gradient_energy", variant=variant(control="random"))
    assert random["value"] == pytest.approx(R / D, rel=0.05) and random["low"] < random["value"] < random["high"]
    assert random["sd"] > 0


def test_every_row_of_the_table_has_its_own_name() -> None:
    counts = torch.arange(1, 13)
    study = TangentStudy(replace(PLAN, frozen=True, ranks=(2,)), counts, total_steps=10)
    records = study.measure(planted(0, masked=True)) + study.measure(planted(2, masked=True))
    records += study.measure(planted(5, masked=True)) + study.finish()
    keys = [
        (r["step"], r["stack"], r.get("layer"), r["kind"], r.get("group", ""), r["metric"], r["variant"])
        for r in records
    ]
    twice = {key for key in keys if keys.count(key) > 1} if len(set(keys)) < len(keys) else set()
    assert not twice


# intervals


def test_pooled_and_row_energies_are_their_definitions_in_every_group() -> None:
    G = skewed(300)
    G[:7] = 0.0
    Q = subspace(D, R)
    label = torch.arange(300) % 3 - 1
    rows = EnergyRows(
        half(G, hashes(30).repeat_interleave(10)),
        [Grouping([""], torch.zeros(300).long()), Grouping(["a", "b"], label)],
    )
    values = {(group, average): columns for group, average, columns in rows.of(Q)}
    masks = {"": label > -9, "a": label == 0, "b": label == 1}
    for group, mask in masks.items():
        mine = G[mask].numpy()
        assert values[group, ""]["value"] == pytest.approx(references.gradient_energy(mine, Q.numpy()), rel=1e-10)
        assert values[group, "row"]["value"] == pytest.approx(
            references.gradient_energy_by_row(mine, Q.numpy()), rel=1e-10
        )
        assert values[group, ""]["n"] == int(mask.sum())


def test_replicates_leave_out_one_fold_of_contexts() -> None:
    G, context = skewed(400), hashes(40).repeat_interleave(10)
    Q = subspace(D, R)
    columns = next(c for _, average, c in EnergyRows(half(G, context), [Grouping([""], torch.zeros(400).long())]).of(Q))
    fold = fold_of(context)
    wanted = [references.gradient_energy(G[fold != f].numpy(), Q.numpy()) for f in range(FOLDS)]
    assert columns["replicates"] == pytest.approx(wanted, rel=1e-10)


def test_intervals_over_contexts_cover_a_planted_energy() -> None:
    """Rows of one context share most of their direction: an interval over rows would cover far too rarely."""
    Q, truth, inside, naive = subspace(D, R), 0.5, 0, 0
    contexts, per, trials = 60, 10, 300
    groups = [Grouping([""], torch.zeros(contexts * per).long())]
    for trial in range(trials):
        a = noise(contexts, R, seed=3 * trial) @ Q.T / math.sqrt(R)
        b = noise(contexts, D, seed=3 * trial + 1)
        b = (b - b @ Q @ Q.T) / math.sqrt(D - R)
        G = (math.sqrt(truth) * a + math.sqrt(1 - truth) * b).repeat_interleave(per, 0)
        rows = EnergyRows(half(G, hashes(contexts, trial).repeat_interleave(per)), groups)
        columns = next(c for _, average, c in rows.of(Q) if not average)
        inside += columns["low"] <= truth <= columns["high"]
        ratio = ((G @ Q).square().sum(1) / G.square().sum(1)).numpy()
        naive += abs(ratio.mean() - truth) <= 1.96 * ratio.std() / math.sqrt(len(ratio))
    assert 0.91 <= inside / trials <= 0.985
    assert naive / trials < 0.75


# dropped rows


def test_rows_that_are_not_finite_are_dropped_and_counted() -> None:
    clean, spoiled = planted(0, share=0.5), planted(0, share=0.5, spoiled=slice(0, 40))
    study = TangentStudy(PLAN)
    rows = found(study.measure(spoiled), "gradient_energy")
    whole = found(TangentStudy(PLAN).measure(clean), "gradient_energy")
    lost = int((half_of(hashes(80).repeat_interleave(10)[:40]) == 1).sum())
    assert rows["dropped"] == lost > 0 and rows["n"] == whole["n"] - lost
    assert math.isfinite(rows["value"]) and rows["value"] != whole["value"]


def test_a_step_without_one_finite_gradient_says_so() -> None:
    rows = planted(0, spoiled=slice(None))
    assert "no gradient of step 0 is finite at 1.resid" in rows.lacking() and not planted(0).lacking()
    with pytest.raises(AnisoscopeError, match="not finite"):
        TangentStudy(PLAN).measure(rows)


# rank


def test_controls_have_the_rank_that_the_proxy_really_has() -> None:
    """Three types give centred activations of rank 2, and a proxy of that rank: controls of rank 4 would not match."""
    rows = planted(0, q=subspace(D, R), share=R / D)
    types = noise(3, D, seed=3)
    for site in (SITE, OTHER):
        kept = rows.fit[site][0]
        rows.fit[site] = [replace(kept, x=types[torch.arange(len(kept.x)) % 3])]
    study = TangentStudy(replace(PLAN, proxies=("svd", "pca"), frozen=True), total_steps=1)
    records = study.measure(rows) + study.finish()
    assert study.basis(SITE, proxy="svd").shape == (D, 2)
    for fit in ("refit", "frozen"):
        random = found(records, "gradient_energy", variant=variant(fit=fit, proxy="svd", control="random"))
        assert random["value"] == pytest.approx(2 / D, rel=0.2)


def test_ranks_that_cannot_be_had_are_refused() -> None:
    with pytest.raises(AnisoscopeError, match="quarter"):
        TangentStudy(replace(PLAN, rank=D // 4 + 1)).measure(planted(0))
    with pytest.raises(AnisoscopeError, match="rows to fit on"):
        TangentStudy(replace(PLAN, rank=6)).measure(planted(0, contexts=6, per=1))


def test_rows_that_are_all_equal_span_no_tangent() -> None:
    rows = planted(0)
    for site in (SITE, OTHER):
        rows.fit[site] = [replace(rows.fit[site][0], x=torch.ones_like(rows.fit[site][0].x))]
    with pytest.raises(AnisoscopeError, match="are equal"):
        TangentStudy(PLAN).measure(rows)


# proxies


def test_a_proxy_is_fitted_about_the_mean_and_repeats() -> None:
    x = skewed(300) + 50.0
    one = fit_proxies({SITE: x}, Label("pca", R), seed=0)[SITE]
    two = fit_proxies({SITE: x, OTHER: noise(300, D)}, Label("pca", R), seed=0)[SITE]
    top = np.linalg.svd((x - x.mean(0)).numpy(), full_matrices=False)[2][:R]
    assert np.linalg.norm(one.basis.numpy().T @ top.T) ** 2 == pytest.approx(R, abs=1e-6)
    assert float((one.basis @ one.basis.T - two.basis @ two.basis.T).abs().max()) < 1e-6
    torch.testing.assert_close(one.centre, x.mean(0))


def test_permuted_columns_keep_each_column_and_break_what_they_share() -> None:
    x = skewed(500)
    mixed = permute_columns(x, seed=3)
    torch.testing.assert_close(mixed.sort(0).values, x.sort(0).values)
    off = lambda c: float((c - torch.diag(c.diagonal())).abs().mean())  # noqa: E731
    assert off(torch.corrcoef(mixed.T)) < 0.4 * off(torch.corrcoef(x.T))
    assert torch.equal(mixed, permute_columns(x, seed=3)) and not torch.equal(mixed, permute_columns(x, seed=4))


def test_a_balanced_fit_has_as_many_rows_of_every_bin() -> None:
    token = torch.tensor([0] * 700 + [1] * 200 + [2] * 100)
    bins = equal_mass_bins(torch.tensor([50, 30, 20]), bins=3)
    x = token[:, None].double().expand(-1, D)
    rows = balanced_rows(half(noise(1000, D), hashes(100).repeat_interleave(10), x, token), bins, most=10_000)
    assert rows is not None and rows[:, 0].long().bincount().tolist() == [100, 100, 100]
    fewer = balanced_rows(half(noise(1000, D), hashes(100).repeat_interleave(10), x, token), bins, most=60)
    assert fewer is not None and fewer[:, 0].long().bincount().tolist() == [20, 20, 20]


def test_a_bin_without_rows_leaves_no_balanced_fit_but_a_note() -> None:
    study = TangentStudy(PLAN, torch.arange(1, 200))  # most types never occur in the rows
    records = study.measure(planted(0))
    assert not any("balanced" in r["variant"] for r in records)
    assert any("balanced" in note for note in study.notes)


def test_the_rows_to_fit_on_do_not_depend_on_their_order() -> None:
    g, context = noise(300, D), hashes(30).repeat_interleave(10)
    shuffle = torch.randperm(300)
    one = half(g, context)
    two = Half(g[shuffle], g[shuffle], context[shuffle], torch.arange(300)[shuffle], one.token, one.target, one.masked)
    a, b = rows_to_fit(one, most=50), rows_to_fit(two, most=50)
    assert torch.equal(a.sort(0).values, b.sort(0).values) and len(a) == 50


# groups


def test_masked_and_unmasked_rows_are_apart_and_beside_the_pool() -> None:
    records = TangentStudy(PLAN).measure(planted(0, share=0.5, masked=True))
    n = {group: found(records, "gradient_energy", group=group)["n"] for group in ("", "masked", "unmasked")}
    assert n["masked"] + n["unmasked"] == n[""] and n["masked"] > 0
    assert found(records, "gradient_p", group="masked")["value"] <= 0.05


def test_frequency_bins_are_those_of_the_original_token() -> None:
    counts = torch.arange(12, 0, -1) ** 2
    records = TangentStudy(PLAN, counts).measure(planted(0, share=0.5))
    bins = equal_mass_bins(counts)
    rows = planted(0, share=0.5)
    token = torch.cat([r.words.original for r, _ in rows.test[SITE]])
    for b in range(5):
        if (number := int((bins[token] == b).sum())) > 0:
            assert found(records, "gradient_energy", group=f"frequency:{b + 1}")["n"] == number
    assert not any(r.get("group", "").startswith("target:") for r in records)  # these rows have no targets


# frozen


def test_a_frozen_proxy_is_the_one_fitted_by_hand_on_its_window() -> None:
    steps = {0: 0.2, 2: 0.6, 3: 0.4, 8: 0.7}  # the window of 10 steps ends with step 3
    rows = {step: planted(step, share=share, seed=step) for step, share in steps.items()}
    study = TangentStudy(replace(PLAN, frozen=True), total_steps=10)
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


def test_a_run_that_ends_inside_its_window_still_gets_its_frozen_proxy() -> None:
    study = TangentStudy(replace(PLAN, frozen=True), total_steps=100)
    records = study.measure(planted(0)) + study.measure(planted(5))
    assert not any("frozen" in r["variant"] for r in records)
    assert {r["step"] for r in study.finish()} == {0, 5}
    assert study.finish() == []


def test_a_window_without_a_measured_step_stops_no_training() -> None:
    study = TangentStudy(replace(PLAN, frozen=True), total_steps=10)
    records = study.measure(planted(8)) + study.measure(planted(9)) + study.finish()
    assert found(records, "gradient_energy", step=8)["value"] > 0.9
    assert not any("frozen" in r["variant"] for r in records)
    assert any("window" in note for note in study.notes)


def test_a_study_that_was_saved_and_loaded_goes_on_as_if_nothing_had_happened(tmp_path: Any) -> None:
    plan = replace(PLAN, frozen=True)
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


# between steps


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
    study = TangentStudy(replace(PLAN, frozen=True), total_steps=10)
    with pytest.raises(AnisoscopeError, match="no step has been measured yet"):
        study.basis(SITE, proxy="pca")
    study.measure(planted(0))
    assert study.basis(SITE, proxy="pca").shape == (D, R)
    with pytest.raises(AnisoscopeError, match="window is still open"):
        study.basis(SITE, proxy="pca", fit="frozen")


def test_frozen_moments_survive_the_disk_to_float32() -> None:
    frozen = FrozenProxies(replace(PLAN, frozen=True), 100)
    G, context = skewed(200), hashes(20).repeat_interleave(10)
    moments = GradientMoments().update(G, context=context)
    frozen.offer(0, {SITE: half(G, context)}, {SITE: moments}, rank=R)
    again = FrozenProxies(replace(PLAN, frozen=True), 100)
    again.load(frozen.state(), {0: frozen.window_state(0)})
    Q = subspace(D, R)
    kept = load_moments(again.window[0], torch.device("cpu"))[SITE]
    assert float(energy(kept.total, Q)) == pytest.approx(float(energy(moments.total, Q)), rel=1e-6)
