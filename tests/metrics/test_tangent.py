"""Energy of subspaces, its controls, p-values and shares: planted cases, and twins that build every subspace."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.tangent import (
    Anisotropy,
    Draws,
    check_rank,
    each_decomposed,
    gradient_energy,
    gradient_isoscore_gain,
    gradient_p,
    gradient_p_holm,
    gradient_share,
    growth,
    next_components,
    row_energies,
    second_moment,
)
from anisoscope.numerics.hashing import FOLDS, fold_of, half_of
from anisoscope.stats.moments import GradientMoments
from support import references
from support.gradients import noise, skewed, subspace

# energy


def test_gradients_inside_a_known_subspace_have_energy_one_and_the_smallest_p() -> None:
    Q = subspace(32, 4)
    M = second_moment(noise(200, 4, seed=2) @ Q.T)
    value = float(gradient_energy(M, Q))
    measured = Draws(32, 4, draws=99, seed=5).of(M)
    assert value == pytest.approx(1.0, abs=1e-12)
    assert gradient_p(value, measured.random().energy) == 1 / 100


def test_gradients_outside_the_subspace_have_energy_zero_and_the_largest_p() -> None:
    Q = subspace(32, 8)
    M = second_moment(noise(200, 4, seed=2) @ Q[:, 4:].T)
    value = float(gradient_energy(M, Q[:, :4]))
    assert value == pytest.approx(0.0, abs=1e-12)
    assert gradient_p(value, Draws(32, 4, draws=99, seed=5).of(M).random().energy) == 1.0


def test_energy_is_a_function_of_the_second_moment_alone() -> None:
    G, Q = skewed(), subspace(24, 5)
    twin = references.gradient_energy(G.numpy(), Q.numpy())
    assert float(gradient_energy(second_moment(G), Q)) == pytest.approx(twin, rel=1e-12)
    assert float(row_energies(G, Q).sum() / G.square().sum()) == pytest.approx(twin, rel=1e-12)
    turned = subspace(500, 500, seed=7) @ G  # other rows, the same second moment
    assert float(gradient_energy(second_moment(turned), Q)) == pytest.approx(twin, rel=1e-9)


def test_energy_does_not_depend_on_the_basis_of_the_subspace_nor_on_the_scale_of_the_loss() -> None:
    M, Q = second_moment(skewed()), subspace(24, 5)
    assert float(gradient_energy(1e6 * M, Q @ subspace(5, 5, seed=9))) == pytest.approx(
        float(gradient_energy(M, Q)), rel=1e-12
    )


def test_several_moments_are_asked_at_once() -> None:
    Q = subspace(24, 5)
    moments = torch.stack([second_moment(skewed(seed=s)) for s in range(3)])
    assert gradient_energy(moments, Q).tolist() == pytest.approx([float(gradient_energy(M, Q)) for M in moments])


def test_isotropic_gradients_have_enrichment_one() -> None:
    d, r = 24, 6
    M = second_moment(noise(40_000, d))
    assert float(gradient_energy(M, subspace(d, r, seed=3))) / (r / d) == pytest.approx(1.0, abs=0.03)


def test_the_parabola_mean_gradient_is_normal_while_the_energy_of_the_rows_is_tangent() -> None:
    """x = (u, u²), g = 1 for every row, dL/dW = Σ g xᵀ: the mean gradient says the opposite of the rows."""
    u = torch.linspace(-0.1, 0.1, 201, dtype=torch.float64)
    rows = torch.stack([u, u**2], dim=1)
    tangent = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    mean = rows.mean(0, keepdim=True)
    assert float(gradient_energy(second_moment(mean), tangent)) == pytest.approx(0.0, abs=1e-12)
    assert float(mean[0, 1]) > 1e-3
    assert float(gradient_energy(second_moment(rows), tangent)) > 0.99


# controls


@pytest.mark.parametrize("rank", [1, 5])
def test_random_and_normal_draws_are_those_of_explicit_bases(rank: int) -> None:
    C = second_moment(skewed())
    C = C / C.trace()
    Q = subspace(24, rank, seed=4)
    draws = Draws(24, rank, draws=20, seed=3)
    measured = draws.of(C)
    for control, without in ((measured.random(), None), (measured.normal(Q), Q.numpy())):
        bases = references.drawn_subspaces(draws.rows.T.numpy(), rank, without)
        assert control.share is not None and control.gain is not None
        energies = [float(np.trace(b.T @ C.numpy() @ b)) for b in bases]
        assert control.energy.tolist() == pytest.approx(energies, rel=2e-4)
        assert control.share.tolist() == pytest.approx(
            [references.spectral_share(C.numpy(), b) for b in bases], rel=1e-3, abs=1e-6
        )
        assert control.gain.tolist() == pytest.approx(
            [references.isoscore_gain(C.numpy(), b) for b in bases], rel=1e-3, abs=1e-5
        )


def test_draws_of_a_usual_width_agree_with_float64_to_a_few_parts_in_a_million() -> None:
    d, rank = 192, 16
    M = second_moment(noise(2000, d, seed=1) * torch.linspace(0.01, 1.0, d, dtype=torch.float64))
    C, Q = M / M.trace(), subspace(d, rank, seed=4)
    draws = Draws(d, rank, draws=60, seed=3)
    measured = draws.of(M, [Q])
    for control, without in ((measured.random(), None), (measured.normal(Q), Q.numpy())):
        bases = references.drawn_subspaces(draws.rows.double().T.numpy(), rank, without)
        assert control.share is not None and control.gain is not None
        energies = [float(np.trace(b.T @ C.numpy() @ b)) for b in bases]
        assert control.energy.tolist() == pytest.approx(energies, rel=1e-6)
        shares, gains = (
            [of(C.numpy(), b) for b in bases] for of in (references.spectral_share, references.isoscore_gain)
        )
        assert control.share.tolist() == pytest.approx(shares, rel=3e-6)
        assert control.gain.tolist() == pytest.approx(gains, rel=5e-6)


@pytest.mark.parametrize("shares", [True, False])
def test_complements_asked_for_in_advance_are_those_asked_for_later_at_several_sites(shares: bool) -> None:
    moments = torch.stack([second_moment(skewed(seed=s)) for s in range(3)])
    proxies = [torch.stack([subspace(24, 5, seed=3 * i + s) for s in range(3)]) for i in range(2)]
    draws = Draws(24, 5, draws=40, seed=3)
    ahead = draws.of(moments, proxies, shares=shares)
    for Q in proxies:
        for site in range(3):
            alone = Draws(24, 5, draws=40, seed=3).of(moments[site]).normal(Q[site], shares=shares)
            for name, values in ahead.normal(Q).by_metric().items():
                assert values[site].tolist() == pytest.approx(alone.by_metric()[name].tolist(), rel=1e-4, abs=1e-6)
            assert ahead.normal(Q).by_metric().keys() == alone.by_metric().keys()


def test_normal_draws_are_orthogonal_to_the_proxy_and_random_ones_are_not() -> None:
    Q = subspace(24, 4)
    inside = Q @ Q.T  # a second moment that lies wholly in the proxy
    measured = Draws(24, 4, draws=50).of(inside)
    assert float(measured.normal(Q).energy.abs().max()) < 1e-5
    assert float(measured.random().energy.mean()) == pytest.approx(4 / 24, abs=0.03)


def test_energy_of_the_normal_control_is_never_negative() -> None:
    Q = subspace(24, 4)
    assert float(Draws(24, 4, draws=200).of(Q @ Q.T).normal(Q).energy.min()) >= 0.0


def test_the_mean_of_the_normal_control_is_the_rest_of_the_energy_spread_evenly() -> None:
    d, r = 24, 5
    M, Q = second_moment(skewed()), subspace(24, 5, seed=8)
    Q = torch.linalg.qr(torch.cat([torch.linalg.eigh(M)[1][:, -2:], Q[:, :3]], dim=1))[0]
    e = float(gradient_energy(M, Q))
    draws = Draws(d, r, draws=4000, seed=1).of(M).normal(Q, shares=False).energy
    error = 4 * float(draws.std()) / math.sqrt(4000)
    assert float(draws.mean()) == pytest.approx(r * (1 - e) / (d - r), abs=error)


def test_the_mean_of_the_random_control_is_chance_whatever_the_gradients() -> None:
    draws = Draws(24, 5, draws=4000, seed=1).of(second_moment(skewed())).random().energy
    assert float(draws.mean()) == pytest.approx(5 / 24, abs=4 * float(draws.std()) / math.sqrt(4000))


def test_draws_repeat_with_their_seed_and_differ_without() -> None:
    M = second_moment(skewed())
    one, two, other = (Draws(24, 5, draws=20, seed=s).of(M).random().energy for s in (3, 3, 4))
    assert torch.equal(one, two) and not torch.equal(one, other)


def test_draws_touch_no_global_random_numbers() -> None:
    before = torch.get_rng_state()
    Draws(17, 3, draws=20, seed=123).of(second_moment(noise(50, 17))).random()
    assert torch.equal(before, torch.get_rng_state())


def test_p_is_uniform_when_the_proxy_is_a_random_subspace() -> None:
    from scipy.stats import kstest

    M = second_moment(skewed(200, 12))
    values = []
    for i in range(1000, 1500):
        drawn = Draws(12, 2, draws=99, seed=10_000 + i).of(M).random().energy
        values.append(gradient_p(float(gradient_energy(M, subspace(12, 2, seed=i))), drawn))
    assert kstest(np.array(values) - 0.005, "uniform").pvalue > 0.01
    assert abs(np.mean(np.array(values) <= 0.05) - 0.05) < 0.035


def test_p_against_the_normal_control_would_reject_too_often() -> None:
    """The counter-test: the normal control is not exchangeable with the proxy."""
    M = second_moment(skewed(200, 12))
    values = []
    for i in range(200):
        Q = subspace(12, 2, seed=i)
        drawn = Draws(12, 2, draws=99, seed=10_000 + i).of(M).normal(Q, shares=False).energy
        values.append(gradient_p(float(gradient_energy(M, Q)), drawn))
    assert np.mean(np.array(values) <= 0.1) > 0.13


def test_p_counts_ties_as_draws_at_least_as_large() -> None:
    draws = torch.tensor([0.2, 0.5, 0.5, 0.7], dtype=torch.float64)
    assert gradient_p(0.5, draws) == 4 / 5
    assert gradient_p(0.71, draws) == 1 / 5
    assert gradient_p(0.5 * (1 + 1e-7), draws) == 4 / 5  # draws are float32


def test_there_is_no_p_for_an_energy_that_is_not_known() -> None:
    assert math.isnan(gradient_p(math.nan, torch.zeros(99)))


def test_holm_is_its_definition() -> None:
    rng = np.random.default_rng(0)
    for m in (1, 2, 7, 13):
        p = [float(v) for v in rng.uniform(0, 0.2, m)]
        assert gradient_p_holm(p) == pytest.approx(references.holm(p))
    assert gradient_p_holm([0.04, 0.04]) == pytest.approx([0.08, 0.08])
    assert references.holm([0.04, 0.04]) == pytest.approx([0.08, 0.08])


def test_holm_leaves_nan_out_of_the_family() -> None:
    found = gradient_p_holm([0.01, math.nan, 0.04])
    assert found[0] == pytest.approx(0.02) and math.isnan(found[1]) and found[2] == pytest.approx(0.04)


def test_twenty_draws_can_never_pass_holm_over_thirteen_layers() -> None:
    assert min(gradient_p_holm([1 / 21] * 13)) > 0.05 > max(gradient_p_holm([1 / 1000] * 13))


# shares


def test_spectral_share_is_its_definition() -> None:
    C, Q = second_moment(skewed()), subspace(24, 5)
    share, level, _ = Anisotropy(C).held(Q)
    assert float(share) == float(gradient_share(C, Q))
    assert float(share) == pytest.approx(references.spectral_share(C.numpy(), Q.numpy()), rel=1e-10)
    assert float(level) == pytest.approx(float(gradient_energy(C, Q)) * 24 / 5, rel=1e-12)


def test_spectral_share_says_whether_the_proxy_lies_above_or_below_the_mean_level() -> None:
    C = torch.diag(torch.tensor([5.0, 5.0, 1.0, 1.0, 1.0, 1.0, 0.1, 0.1], dtype=torch.float64))
    eye = torch.eye(8, dtype=torch.float64)
    assert float(Anisotropy(C).held(eye[:, :2])[1]) > 1 > float(Anisotropy(C).held(eye[:, 6:])[1])


def test_spectral_share_of_random_subspaces_is_about_r_times_r_plus_one_over_d_squared() -> None:
    d, r = 64, 8
    share = Draws(d, r, draws=2000, seed=2).of(second_moment(skewed(500, d))).random().share
    assert share is not None
    assert float(share.mean()) == pytest.approx(r * (r + 1) / d**2, rel=0.1)


def test_an_isotropic_second_moment_has_no_anisotropy_to_share() -> None:
    eye, Q = 7.0 * torch.eye(16, dtype=torch.float64), subspace(16, 4)
    assert math.isnan(float(gradient_share(eye, Q)))
    assert float(gradient_isoscore_gain(eye, Q)) == pytest.approx(0.0, abs=1e-12)
    control = Draws(16, 4, draws=10).of(eye).random()
    assert control.share is not None and control.gain is not None
    assert bool(control.share.isnan().all())
    assert float(control.gain.abs().max()) < 1e-5


def test_isoscore_gain_is_its_definition() -> None:
    C, Q = second_moment(skewed()), subspace(24, 5)
    assert float(gradient_isoscore_gain(C, Q)) == pytest.approx(
        references.isoscore_gain(C.numpy(), Q.numpy()), rel=1e-9
    )
    assert float(gradient_isoscore_gain(1e4 * C, Q)) == pytest.approx(float(gradient_isoscore_gain(C, Q)), rel=1e-9)


def test_taking_the_strongest_directions_away_makes_gradients_more_isotropic() -> None:
    C = second_moment(skewed())
    vectors = torch.linalg.eigh(C)[1]
    strong, weak = float(gradient_isoscore_gain(C, vectors[:, -4:])), float(gradient_isoscore_gain(C, vectors[:, :4]))
    assert strong > 0.1 > weak


# next components, growth


def test_next_components_are_the_principal_ones_of_what_the_proxy_leaves() -> None:
    X = skewed()
    C = torch.cov(X.T)
    Q = subspace(24, 3)
    found = next_components(C, Q)
    P = np.eye(24) - (Q @ Q.T).numpy()
    top = np.linalg.svd((X - X.mean(0)).numpy() @ P)[2][:3].T
    assert found.shape == (24, 3)
    assert torch.allclose(found.T @ found, torch.eye(3, dtype=torch.float64), atol=1e-10)
    assert float((Q.T @ found).abs().max()) < 1e-10
    assert np.abs(top.T @ found.numpy()) == pytest.approx(np.eye(3), abs=1e-6)


def test_next_components_stay_orthogonal_to_the_proxy_where_nothing_is_left() -> None:
    X = noise(200, 3) @ subspace(24, 3, seed=2).T  # rank 3, all of it in the proxy
    C = torch.cov(X.T)
    Q = torch.linalg.eigh(C)[1][:, -3:]
    found = next_components(C, Q)
    assert float((Q.T @ found).abs().max()) < 1e-8


def test_growth_is_the_positive_part_of_the_difference() -> None:
    before, after = second_moment(skewed(seed=1)), second_moment(skewed(seed=4))
    grown, grew = growth(before, after)
    assert grown.numpy() == pytest.approx(references.growth(before.numpy(), after.numpy()), abs=1e-8)
    assert float((grown - grew @ (grew.T @ (after - before) @ grew) @ grew.T).abs().max()) < 1e-8
    grown, grew = growth(after, after - torch.eye(24, dtype=torch.float64))
    assert float(grown.abs().max()) == 0.0 and grew.shape == (24, 0)


def test_variance_added_inside_a_subspace_is_found_there() -> None:
    Q = subspace(24, 4)
    before = torch.cov(skewed().T)
    assert float(gradient_energy(growth(before, before + Q @ Q.T)[0], Q)) == pytest.approx(1.0, abs=1e-9)


# rank


@pytest.mark.parametrize(
    ("rank", "width", "rows", "words"),
    [(0, 64, None, "spans nothing"), (17, 64, None, "quarter"), (8, 64, 5, "rows to fit on")],
)
def test_impossible_ranks_are_refused_with_the_reason(rank: int, width: int, rows: int | None, words: str) -> None:
    with pytest.raises(AnisoscopeError, match=words):
        check_rank(rank, width=width, rows=rows)
    assert check_rank(16, width=64, rows=16) == 16


# halves, folds, moments


def test_halves_and_folds_are_independent_and_even() -> None:
    contexts = noise(4000).mul(2**40).long()
    half, fold = half_of(contexts), fold_of(contexts)
    table = torch.zeros(2, FOLDS).index_put_((half, fold), torch.ones(4000), accumulate=True)
    assert int(table.min()) > 180 and int(table.max()) < 320
    assert torch.equal(half, half_of(contexts.flip(0)).flip(0))


def test_moments_of_parts_add_up_to_those_of_the_whole() -> None:
    G, context = skewed(300), torch.arange(300) // 10
    groups = {"even": torch.arange(300) % 2 == 0}
    whole = GradientMoments().update(G, context=context, groups=groups)
    parts = [
        GradientMoments().update(G[i], context=context[i], groups={"even": groups["even"][i]})
        for i in (slice(0, 120), slice(120, 300))
    ]
    merged = parts[0].merge(parts[1])
    again = GradientMoments.load(merged.state())
    assert whole.folds is not None and whole.unit is not None and merged.folds is not None and merged.unit is not None
    torch.testing.assert_close(whole.total, G.T @ G)
    torch.testing.assert_close(whole.folds, merged.folds)
    torch.testing.assert_close(whole.unit, merged.unit)
    torch.testing.assert_close(whole.groups["even"], G[::2].T @ G[::2])
    assert (merged.n, merged.contexts, merged.counts) == (300, 30, {"even": 150})
    assert (again.n, again.contexts, again.counts) == (300, 30, {"even": 150})
    torch.testing.assert_close(again.total, whole.total, rtol=1e-6, atol=1e-6)


def test_unit_rows_count_alike_and_rows_without_gradient_not_at_all() -> None:
    G = skewed(60)
    G[:10] = 0.0
    G[10] *= 1e6  # dominates the pool
    Q = subspace(24, 5)
    moments = GradientMoments().update(G, context=torch.arange(60))
    assert moments.still == 10 and moments.unit is not None
    twin = references.gradient_energy_by_row(G.numpy(), Q.numpy())
    assert float(gradient_energy(moments.unit, Q)) == pytest.approx(twin, rel=1e-10)
    assert float(gradient_energy(moments.total, Q)) == pytest.approx(
        references.gradient_energy(G[10:11].numpy(), Q.numpy()), abs=1e-6
    )


def test_draws_that_serve_several_proxies_and_moments_equal_fresh_ones() -> None:
    one, two = (torch.linalg.qr(skewed(24, 24, seed=s)).Q[:, :4] for s in (1, 2))
    shared = Draws(24, 4, draws=50, seed=3)
    moments = [second_moment(skewed(200, 24, seed=s)) for s in (4, 5)]
    together = [shared.of(M) for M in moments]
    for Q in (one, two, one):
        for M, measured in zip(moments, together, strict=True):
            fresh = Draws(24, 4, draws=50, seed=3).of(M)
            assert torch.equal(measured.normal(Q).energy, fresh.normal(Q).energy)
    alone = shared.of(moments[0], shares=False).random()
    assert alone.share is None and torch.allclose(alone.energy, together[0].random().energy, rtol=1e-6)


def test_shares_of_several_subspaces_in_one_product_are_those_of_each() -> None:
    C = torch.stack([second_moment(skewed(seed=s)) for s in range(3)])
    subspaces = [torch.stack([subspace(24, 5, seed=s) for s in range(3)]), subspace(24, 2, seed=9)]
    spread = Anisotropy(C / C.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None])
    for Q, found in zip(subspaces, spread.held_each(subspaces), strict=True):
        for one, two in zip(found, spread.held(Q), strict=True):
            assert one.tolist() == pytest.approx(two.tolist(), rel=1e-12)


def test_eigenproblems_solved_side_by_side_equal_one_after_another() -> None:
    pairs = [(second_moment(skewed(200, 24, seed=s)), second_moment(skewed(200, 24, seed=s + 9))) for s in range(3)]
    for (grown, grew), pair in zip(each_decomposed(growth, pairs), pairs, strict=True):
        assert torch.allclose(grown, growth(*pair)[0]) and grew.shape == growth(*pair)[1].shape
    assert each_decomposed(growth, []) == []
