"""The tangent study on planted rows: intervals, groups, frozen proxies, controls of matched rank, dropped rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from anisoscope.capture.gradient_pass import RowTokens, SiteRows
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.frequency import equal_mass_bins
from anisoscope.numerics.hashing import FOLDS, even_folds, half_of
from anisoscope.tangent.energy import EnergyRows, Grouping
from anisoscope.tangent.proxy import Half, Label, StepRows, balanced_rows, fit_proxies, permute_columns, rows_to_fit
from anisoscope.tangent.tangent_study import TangentStudy
from support import references
from support.gradients import noise, skewed, subspace
from support.planted_gradients import OTHER, PLAN, SITE, D, R, found, half, hashes, planted, variant


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


def test_sites_measured_one_by_one_give_what_they_give_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured() -> list[dict[str, Any]]:
        study = TangentStudy(replace(PLAN, frozen=True, standardised=True), torch.arange(1, 13), total_steps=4)
        return [row for step in (0, 2, 4) for row in study.measure(far(planted(step, masked=True)))] + study.finish()

    def far(rows: StepRows) -> StepRows:
        for part in (*rows.fit[SITE], *(part for part, _ in rows.test[SITE])):
            part.x[part.index.position == 0] *= 9.0  # an outlier at one site: both are read without the first position
        return rows

    together = measured()
    monkeypatch.setattr("anisoscope.tangent.tangent_study.TOGETHER", 1)
    assert len(planted(0).site_groups(1, {"cpu": 1 << 30, "cuda": 0})) == 2
    assert any("first=out" in row["variant"] for row in together)
    for one, other in zip(measured(), together, strict=True):
        numbers = [name for name in one if isinstance(one[name], float) or name == "replicates"]
        assert {k: v for k, v in one.items() if k not in numbers} == {k: other[k] for k in one if k not in numbers}
        assert all(one[name] == pytest.approx(other[name], rel=1e-9, nan_ok=True) for name in numbers)


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


def test_pooled_and_row_energies_are_their_definitions_in_every_group() -> None:
    G = skewed(300)
    G[:7] = 0.0
    Q = subspace(D, R)
    label = torch.arange(300) % 3 - 1
    rows = EnergyRows(half(G, hashes(30).repeat_interleave(10)), [Grouping(["a", "b"], label)])
    values = {(group, average): columns for group, average, columns in rows.of(Q)}
    masks = {"": label > -9, "a": label == 0, "b": label == 1}
    for group, mask in masks.items():
        mine = G[mask].numpy()
        assert values[group, ""]["value"] == pytest.approx(references.gradient_energy(mine, Q.numpy()), rel=1e-10)
        assert values[group, "row"]["value"] == pytest.approx(
            references.gradient_energy_by_row(mine, Q.numpy()), rel=1e-10
        )
        assert values[group, ""]["n"] == int(mask.sum())


def test_replicates_leave_out_one_even_folds_contexts() -> None:
    G, context = skewed(400), hashes(40).repeat_interleave(10)
    Q = subspace(D, R)
    columns = next(c for _, average, c in EnergyRows(half(G, context)).of(Q))
    fold = even_folds(context)
    wanted = [references.gradient_energy(G[fold != f].numpy(), Q.numpy()) for f in range(FOLDS)]
    assert columns["replicates"] == pytest.approx(wanted, rel=1e-10)


def test_intervals_over_contexts_cover_a_planted_energy() -> None:
    """Rows of one context share most of their direction: an interval over rows would cover far too rarely."""
    Q, truth, inside, naive = subspace(D, R), 0.5, 0, 0
    contexts, per, trials = 60, 10, 300
    for trial in range(trials):
        a = noise(contexts, R, seed=3 * trial) @ Q.T / math.sqrt(R)
        b = noise(contexts, D, seed=3 * trial + 1)
        b = (b - b @ Q @ Q.T) / math.sqrt(D - R)
        G = (math.sqrt(truth) * a + math.sqrt(1 - truth) * b).repeat_interleave(per, 0)
        rows = EnergyRows(half(G, hashes(contexts, trial).repeat_interleave(per)))
        columns = next(c for _, average, c in rows.of(Q) if not average)
        inside += columns["low"] <= truth <= columns["high"]
        ratio = ((G @ Q).square().sum(1) / G.square().sum(1)).numpy()
        naive += abs(ratio.mean() - truth) <= 1.96 * ratio.std() / math.sqrt(len(ratio))
    assert 0.91 <= inside / trials <= 0.985
    assert naive / trials < 0.75


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
    assert rows is not None and rows.x[:, 0].long().bincount().tolist() == [100, 100, 100]
    fewer = balanced_rows(half(noise(1000, D), hashes(100).repeat_interleave(10), x, token), bins, most=60)
    assert fewer is not None and fewer.x[:, 0].long().bincount().tolist() == [20, 20, 20]


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
    for most in (50, 1000):
        a, b = rows_to_fit(one, most=most), rows_to_fit(two, most=most)
        assert torch.equal(a, b) and len(a) == min(most, 300)


def test_no_number_depends_on_the_order_of_the_rows() -> None:
    plain, other = planted(0, share=0.5, masked=True), planted(0, share=0.5, masked=True)
    for site in other.fit:
        other.fit[site] = [each for rows in other.fit[site] for each in in_another_order(rows)]
        other.test[site] = [(each, factor) for rows, factor in other.test[site] for each in in_another_order(rows)]
    plan = replace(PLAN, proxies=("semi_nmf", "pca"), standardised=True)
    one, two = (values_by_row(TangentStudy(plan).measure(rows)) for rows in (plain, other))
    assert one.keys() == two.keys() and any("control=permuted" in key[-1] for key in one)
    assert two == pytest.approx(one, rel=1e-6, abs=1e-9, nan_ok=True)


def in_another_order(rows: SiteRows) -> list[SiteRows]:
    """The same rows shuffled, as two passes."""
    shuffle = torch.randperm(len(rows.x), generator=torch.Generator().manual_seed(5))
    parts = []
    for some in shuffle.split(len(shuffle) // 3 * 2):
        columns = {name: getattr(rows.index, name)[some] for name in ("keep", "context", "position", "token")}
        masked = None if rows.tokens.masked is None else rows.tokens.masked[some]
        tokens = RowTokens(rows.tokens.original[some], rows.tokens.target[some], masked)
        g = None if rows.g is None else rows.g[some]
        parts.append(SiteRows(rows.x[some], g, replace(rows.index, **columns), tokens))
    return parts


def values_by_row(records: list[dict[str, Any]]) -> dict[Any, float]:
    return {tuple(str(r.get(k, "")) for k in ("layer", "metric", "group", "variant")): r["value"] for r in records}


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
    token = torch.cat([r.tokens.original for r, _ in rows.test[SITE]])
    for b in range(5):
        if (number := int((bins[token] == b).sum())) > 0:
            assert found(records, "gradient_energy", group=f"frequency:{b + 1}")["n"] == number
    assert not any(r.get("group", "").startswith("target:") for r in records)  # these rows have no targets
