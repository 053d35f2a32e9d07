"""Semi-NMF: its bounds, its monotony, what it recovers, its streams, and exact codes, against slow twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

import anisoscope.numerics.factors as nnls_module
import anisoscope.numerics.semi_nmf as fitting
from anisoscope.numerics.decompositions import decompose, fit_directions
from anisoscope.numerics.factors import descent, k_means, nonnegative_codes
from anisoscope.numerics.linalg import Leading, leading_axes, principal_angles, subspace_overlap
from anisoscope.numerics.semi_nmf import semi_nmf
from support.factored import DTYPES, check, clustered, decaying, normal, planted


def svd_error(x: torch.Tensor, rank: int) -> float:
    energies = torch.linalg.svdvals(x.double()).square()
    return float(energies[rank:].sum() / energies.sum())


def matched_cosines(first: torch.Tensor, second: torch.Tensor) -> np.ndarray:
    one, two = (rows.double() / rows.double().norm(dim=1, keepdim=True) for rows in (first, second))
    cosines = (one @ two.T).numpy()
    return cosines[linear_sum_assignment(-cosines)]


def multiplicative(x: np.ndarray, rank: int, *, iterations: int, seed: int, start: np.ndarray | None = None) -> float:
    """The error of the updates of Ding, Li and Jordan (2010), written down as in the paper, run for long."""
    z = np.random.default_rng(seed).random((len(x), rank)) + 0.1 if start is None else start

    def plus(a: np.ndarray) -> np.ndarray:
        return (np.abs(a) + a) / 2

    for _ in range(iterations):
        d = np.linalg.pinv(z.T @ z) @ (z.T @ x)
        a, g = x @ d.T, d @ d.T
        z = z * np.sqrt((plus(a) + z @ plus(-g)) / (plus(-a) + z @ plus(g) + 1e-300))
    d = np.linalg.pinv(z.T @ z) @ (z.T @ x)
    return float(((x - z @ d) ** 2).sum() / (x**2).sum())


@given(
    n=st.integers(1, 40),
    d=st.integers(1, 20),
    rank=st.integers(1, 8),
    seed=st.integers(0, 999),
    init=st.sampled_from(["svd", "corners", "random", "kmeans"]),
    centred=st.booleans(),
    double=st.booleans(),
)
def test_the_objective_never_increases_and_the_codes_are_never_negative(
    n: int, d: int, rank: int, seed: int, init: str, centred: bool, double: bool
) -> None:
    x = normal(n, d, seed=seed) + 0.5
    x = x - x.mean(0) if centred and n > 1 else x
    x = x.to(torch.float64 if double else torch.float32)
    fit = semi_nmf(x, min(rank, n, d), init=init, seed=seed, max_iter=30)
    check(fit, x)
    assert fit.error >= svd_error(x, min(rank, n, d)) - 1e-6


def test_a_row_that_a_step_would_make_worse_keeps_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    directions, rows = normal(5, 6, seed=3), normal(200, 6, seed=4)
    gram, target = directions @ directions.T, rows @ directions.T
    start = nonnegative_codes(rows, directions) + 0.01 * normal(200, 5, seed=5).abs()

    def heights(codes: torch.Tensor) -> torch.Tensor:
        return (rows - codes @ directions).square().sum(1)

    better = descent(gram, target, start, steps=20)[0]
    assert bool((heights(better) <= heights(start)).all()) and not torch.equal(better, start)
    largest = nnls_module._largest_eigenvalue
    monkeypatch.setattr(nnls_module, "_largest_eigenvalue", lambda gram: 0.3 * largest(gram))
    assert bool((heights(descent(gram, target, start, steps=20)[0]) <= heights(start) + 1e-12).all())
    monkeypatch.setattr(nnls_module, "_objective", lambda codes, gram, target: codes.new_zeros(len(codes)))
    unguarded = descent(gram, target, start, steps=20)[0]
    assert bool((heights(unguarded) > heights(start)).any()), "the counter-test: steps too long do make rows worse"


@pytest.mark.parametrize("make", [decaying, clustered])
@pytest.mark.parametrize(("n", "d", "rank"), [(300, 24, 4), (400, 30, 10), (900, 200, 8)])
def test_the_error_lies_between_the_svd_of_the_rank_and_of_one_less(
    make: Callable[..., torch.Tensor], n: int, d: int, rank: int
) -> None:
    for seed in range(3):
        x = make(n, d, seed=seed)
        fit = semi_nmf(x, rank, seed=seed)
        assert svd_error(x, rank) < fit.error < svd_error(x, rank - 1)
        assert fit.history[0] < svd_error(x, rank - 1), "the start is already below"


def test_rows_in_a_half_space_cost_nothing_to_factor() -> None:
    x = decaying(300, 20) + 2.0
    assert semi_nmf(x, 5).error < svd_error(x, 5) * 1.001
    centred = x - x.mean(0)
    assert semi_nmf(centred, 5).error > svd_error(centred, 5) * 1.005, "the counter-test: centred rows do cost"


@pytest.mark.parametrize("make", [decaying, clustered])
def test_no_worse_than_the_multiplicative_updates_run_for_long(make: Callable[..., torch.Tensor]) -> None:
    for seed in range(3):
        x = make(200, 20, seed=seed)
        slow = min(multiplicative(x.numpy(), 4, iterations=1200, seed=start) for start in range(2))
        assert semi_nmf(x, 4, seed=seed).error <= slow * (1 + 1e-3)


def test_a_plain_start_ends_near_the_good_one_but_takes_far_longer() -> None:
    x = decaying(600, 60)
    good, plain = semi_nmf(x, 6), semi_nmf(x, 6, init="random")
    assert good.error <= plain.error * 1.001
    assert good.iterations * 3 <= plain.iterations


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "d", "k"), [(600, 30, 5), (900, 150, 8)])
def test_a_planted_span_is_recovered(dtype: torch.dtype, n: int, d: int, k: int) -> None:
    for noise, angle in ((0.0, 1e-5), (0.02, 0.01), (0.1, 0.05)):
        x, directions = planted(n, d, k, noise=noise)
        fit = semi_nmf(x.to(dtype), k)
        assert float(principal_angles(fit.directions, directions).max()) < angle
        turned = fit.directions.double() + 0.2 * normal(k, d, seed=9)
        assert float(principal_angles(turned, directions).max()) > 0.1, "the counter-test"


@pytest.mark.parametrize("dtype", DTYPES)
def test_planted_factors_are_recovered_where_every_concept_has_rows_of_its_own(dtype: torch.dtype) -> None:
    for seed in range(3):
        for noise in (0.0, 0.02, 0.05):
            x, directions = planted(1000, 40, 6, noise=noise, seed=seed)
            init = "corners" if noise else "svd"
            fit = semi_nmf(x.to(dtype), 6, seed=seed, init=init)
            assert matched_cosines(fit.directions, directions).min() > 0.99
            assert semi_nmf(x.to(dtype), 6, seed=seed).error <= fit.error * (1 + 1e-6) + 1e-13


def concepts(n: int, d: int, rank: int, *, noise: float, seed: int, kind: str, centred: bool) -> torch.Tensor:
    """Rows of non-negative codes of several kinds, with noise."""
    generator = torch.Generator().manual_seed(seed)
    share, dense = torch.rand(2, n, rank, generator=generator)
    codes = {
        "sparse": dense * (share < 0.3) * torch.empty(n, 1).exponential_(generator=generator),
        "overlapping": 0.3 + dense,
        "separable": torch.eye(rank)[torch.randint(0, rank, (n,), generator=generator)] + 0.2 * dense * (share < 0.2),
        "heavy": torch.empty(n, rank).exponential_(generator=generator).pow(2.5),
    }[kind]
    x = codes @ torch.randn(rank, d, generator=generator)
    x = x + noise * x.std() * torch.randn(n, d, generator=generator)
    return x - x.mean(0) if centred else x


@pytest.mark.parametrize("kind", ["sparse", "overlapping", "separable", "heavy"])
@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2, 1.0])
@pytest.mark.parametrize("centred", [True, False])
def test_never_above_500_multiplicative_updates_from_k_means(kind: str, noise: float, centred: bool) -> None:
    for n, d, rank, seed in ((400, 24, 4, 0), (500, 40, 8, 1)):
        x = concepts(n, d, rank, noise=noise, seed=seed, kind=kind, centred=centred)
        start = k_means(x, rank, seed=0, max_iter=20).assigned.numpy() + 0.2
        slow = multiplicative(x.double().numpy(), rank, iterations=500, seed=0, start=start)
        assert semi_nmf(x, rank).error <= slow * (1 + 1e-6)


def test_one_pure_row_for_each_concept_is_enough_without_noise() -> None:
    codes = torch.rand(300, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    codes[:5] = torch.eye(5)
    directions = normal(5, 20)
    assert matched_cosines(semi_nmf(codes @ directions, 5).directions, directions).min() > 0.999


def test_without_pure_rows_the_span_is_recovered_and_the_factors_are_not() -> None:
    codes = 0.5 + torch.rand(500, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    directions = normal(5, 20)
    fit = semi_nmf(codes @ directions, 5)
    assert float(principal_angles(fit.directions, directions).max()) < 1e-4
    assert matched_cosines(fit.directions, directions).min() < 0.99


def test_the_span_is_close_to_that_of_the_pca() -> None:
    x = normal(800, 40) * torch.cat([torch.linspace(8.0, 5.0, 6), torch.ones(34)])
    x = x - x.mean(0)
    fit, pca = semi_nmf(x, 6), decompose(x, 6, method="pca")
    assert subspace_overlap(fit.directions, pca.directions) > 0.99
    other = decompose(x, 6, method="random")
    assert subspace_overlap(other.directions, pca.directions) < 0.5, "the counter-test"
    assert fit.basis().shape == (40, 6)


@pytest.mark.parametrize("init", ["svd", "random", "kmeans"])
def test_the_same_seed_gives_the_same_bits(init: str) -> None:
    x = clustered(300, 120).float()
    before = torch.get_rng_state()
    one, two, other = (semi_nmf(x, 6, seed=seed, init=init) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before), "the global generator is left alone"
    assert torch.equal(one.codes, two.codes) and torch.equal(one.directions, two.directions)
    assert one.history == two.history
    assert not torch.equal(one.directions, other.directions), "the counter-test: the seed does something"


def test_float32_and_float64_agree() -> None:
    x = clustered(800, 60)
    wide, narrow = semi_nmf(x, 6), semi_nmf(x.float(), 6)
    assert narrow.codes.dtype == torch.float32 and wide.codes.dtype == torch.float64
    assert abs(narrow.error / wide.error - 1) < 1e-4
    assert float(principal_angles(narrow.directions, wide.directions).max()) < 0.01
    far = clustered(800, 60, seed=1)
    assert float(principal_angles(semi_nmf(far, 6).directions, wide.directions).max()) > 0.1, "the counter-test"


def test_half_precision_and_numpy_are_promoted() -> None:
    x = clustered(200, 16)
    assert semi_nmf(x.bfloat16(), 3).directions.dtype == torch.float32
    np.testing.assert_array_equal(semi_nmf(x.numpy(), 3).codes, semi_nmf(x, 3).codes)


def test_a_mask_equals_dropping_the_rows() -> None:
    x = clustered(300, 20)
    mask = torch.arange(300) % 3 > 0
    padded = x.clone()
    padded[~mask] = torch.nan
    one, two = semi_nmf(padded, 4, mask=mask), semi_nmf(x[mask], 4)
    assert torch.equal(one.codes, two.codes) and one.error == two.error
    assert len(one.codes) == int(mask.sum())
    assert not torch.equal(semi_nmf(x, 4).directions, two.directions), "the counter-test"


@pytest.mark.parametrize(("n", "d"), [(200, 20), (400, 150)])
@pytest.mark.parametrize("init", ["svd", "warm"])
def test_many_fits_at_once_equal_one_at_a_time(n: int, d: int, init: str) -> None:
    x = torch.stack(
        [
            clustered(n, d),
            decaying(n, d, seed=1),
            planted(n, d, 4, noise=0.05)[0],
            decaying(n, d) + 1.0,
        ]
    )
    x = x.reshape(2, 2, n, d)
    start = normal(2, 2, 4, d, seed=8) if init == "warm" else None
    together = fit_directions(x, 4, init=start)
    assert together.shape == (2, 2, 4, d)
    for i in range(2):
        for j in range(2):
            alone = semi_nmf(x[i, j], 4, init="svd" if start is None else start[i, j])
            torch.testing.assert_close(together[i, j], alone.directions, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("init", ["svd", "random", "kmeans", "fits", "directions"])
def test_layers_fitted_in_one_call_are_those_fitted_alone(init: str) -> None:
    x = torch.stack([clustered(300, 20), decaying(300, 20, seed=1), planted(300, 20, 4, noise=0.05)[0]])
    earlier = [semi_nmf(layer, 4, seed=1) for layer in x]
    starts = {"fits": earlier, "directions": torch.stack([fit.directions for fit in earlier])}.get(init)
    y = x + 0.05 * normal(3, 300, 20, seed=5)
    mask = torch.arange(300) % 4 > 0
    together = semi_nmf(y, 4, init=init if starts is None else starts, mask=mask if starts is None else None)
    for i, fit in enumerate(together):
        rows = y[i][mask] if starts is None else y[i]
        alone = semi_nmf(rows, 4, init=init if starts is None else starts[i])
        check(fit, rows)
        torch.testing.assert_close(fit.directions, alone.directions, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(fit.codes, alone.codes, rtol=1e-6, atol=1e-6)
        assert fit.error == pytest.approx(alone.error, rel=1e-9) and fit.iterations == alone.iterations


def drifted(x: torch.Tensor, *, seed: int) -> torch.Tensor:
    """Rows after a little more training: a linear change of the space, and a change of each kind of row."""
    n, d = x.shape
    change = (normal(d, 6, seed=seed) @ normal(6, d, seed=seed + 1) / d).to(x)
    kinds = 0.1 * x.std() * normal(30, d, seed=seed + 2).to(x)
    x = x + 0.2 * x @ change + kinds[torch.arange(n) % 30]
    return x - x.mean(0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_warm_start_needs_a_third_of_the_iterations_and_keeps_the_concepts(dtype: torch.dtype) -> None:
    x = clustered(800, 60).to(dtype)
    fit = semi_nmf(x, 8)
    for step in range(3):
        x = drifted(x, seed=10 * step)
        cold, warm = semi_nmf(x, 8, init="random", seed=step), semi_nmf(x, 8, init=fit)
        check(warm, x)
        assert 3 * warm.iterations <= cold.iterations
        assert warm.error <= cold.error * 1.005 and warm.error < svd_error(x, 7)
        same = torch.cosine_similarity(warm.directions, fit.directions, dim=1)
        assert float(same.min()) > 0.9, "in the order in which they were"
        fit = warm


@pytest.mark.parametrize("make", [decaying, clustered])
def test_between_neighbouring_steps_a_warm_start_needs_one_iteration_and_loses_nothing(
    make: Callable[..., torch.Tensor],
) -> None:
    x = make(900, 200).float()
    fit = semi_nmf(x, 8)
    for step in range(3):
        x = drifted(x, seed=10 * step)
        cold, fit = semi_nmf(x, 8), semi_nmf(x, 8, init=fit)
        check(fit, x)
        assert 3 * fit.iterations <= cold.iterations
        assert fit.error <= cold.error * (1 + 1e-3)
    far = semi_nmf(make(900, 200, seed=77).float(), 8, init=fit)
    assert far.iterations > 1, "the counter-test: rows that have nothing to do with the start take longer"


def trained(steps: int) -> list[torch.Tensor]:
    """Hidden rows of a little network at consecutive steps of its training."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 160), torch.nn.Tanh(), torch.nn.Linear(160, 12))
    inputs = normal(1200, 24, seed=3, dtype=torch.float32)
    labels = (inputs @ normal(24, 12, seed=4, dtype=torch.float32)).argmax(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    rows = []
    for _ in range(steps):
        rows.append(model[1](model[0](inputs)).detach())
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return [x - x.mean(0) for x in rows]


def test_from_one_step_of_training_to_the_next_a_warm_start_needs_a_third_of_the_iterations() -> None:
    with torch.random.fork_rng():
        series = trained(24)
    for before, after in zip(series[4::6], series[5::6], strict=True):
        warm, cold = semi_nmf(after, 8, init=semi_nmf(before, 8)), semi_nmf(after, 8)
        assert 3 * warm.iterations <= cold.iterations and warm.error <= cold.error * (1 + 1e-3)


def clouds(seed: int) -> dict[str, torch.Tensor]:
    """Centred rows of which a fit starts in many ways: a nearly flat spectrum, a falling one, heavy tails, clusters."""
    falling = torch.arange(1, 129) ** -0.7
    return {
        "flat": normal(1000, 128, seed=seed),
        "falling": normal(1000, 128, seed=seed) * falling,
        "heavy": normal(1000, 128, seed=seed) * falling * normal(1000, 1, seed=seed + 1).exp(),
        "clusters": normal(30, 128, seed=seed)[torch.arange(1000) % 30] + 0.3 * normal(1000, 128, seed=seed + 1),
    }


@pytest.mark.parametrize(("dtype", "rounded", "moved"), [(torch.float32, 1e-7, 1e-4), (torch.float64, 1e-12, 1e-9)])
@pytest.mark.parametrize("kind", ["flat", "falling", "heavy", "clusters"])
def test_rounding_of_the_rows_moves_a_fit_by_no_more_than_rounding(
    kind: str, dtype: torch.dtype, rounded: float, moved: float
) -> None:
    """Rows come out of other processes, batches and compilers with other last digits; the proxy must not follow."""
    for seed in range(3):
        x = clouds(seed)[kind].to(dtype)
        x = x - x.mean(0)
        base = semi_nmf(x, 16).basis().double()
        for again in range(3):
            y = x * (1 + rounded * normal(*x.shape, seed=100 + again).to(dtype))
            other = semi_nmf(y - y.mean(0), 16).basis().double()
            assert (other - base @ (base.T @ other)).norm() < moved


@pytest.mark.parametrize("kind", ["flat", "falling", "heavy"])
def test_signs_of_the_leading_directions_do_not_choose_the_fit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eigenvectors have no sign of their own, and their last digits decide which one a library returns."""
    x = clouds(0)[kind].double()
    x = x - x.mean(0)
    expected = semi_nmf(x, 8).basis()

    def turned(*args: Any, **options: Any) -> Leading:
        found = leading_axes(*args, **options)
        signs = torch.where(torch.arange(found.energies.shape[-1]) % 3 == 0, -1.0, 1.0).double()
        return replace(found, directions=found.directions * signs, scores=found.scores * signs)

    monkeypatch.setattr(fitting, "leading_axes", turned)
    got = semi_nmf(x, 8).basis()
    assert (got - expected @ (expected.T @ got)).norm() < 1e-9


def test_quick_products_of_the_start_differ_by_rounding_alone() -> None:
    X = torch.stack([decaying(300, 24, seed=seed).double() for seed in (0, 1)])
    X = X - X.mean(1, keepdim=True)
    plain, quick = (fitting.fit(X, 4, seed=0, init="svd", quick=quick).directions for quick in (False, True))
    torch.testing.assert_close(quick, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("worse", [0.0, 0.05, 1e3])
def test_codes_are_shifted_by_the_first_shift_that_suffices(worse: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "_WORSE", worse)
    X = torch.stack([decaying(200, 12, seed=seed).double() for seed in range(3)])
    found = leading_axes(X - X.mean(1, keepdim=True), 4, keep=8, seed=0)
    w, free, error = fitting.positive_vector(found, 4)
    corners = fitting._corners(found.scores @ free, found.directions @ free, 4, seed=0)
    got = fitting._shifted(found, corners, w, error, 4)
    for i, theta in enumerate(found.energies):
        allowed = error[i] + worse * (theta[3:].sum() - error[i])
        for shift in fitting._SHIFTS:
            codes = corners[i] + torch.maximum(shift * w[i], -corners[i].amin(-1)).unsqueeze(-1)
            left = found.scores[i] - codes @ torch.linalg.lstsq(codes, found.scores[i]).solution
            if left.square().sum() <= allowed:
                break
        torch.testing.assert_close(got[i], codes.clamp_min(0.0))


def test_a_warm_start_on_the_same_rows_ends_at_once() -> None:
    x = clustered(400, 30)
    fit = semi_nmf(x, 5, max_iter=500, tol=1e-7)
    again = semi_nmf(x, 5, init=fit.directions)
    assert again.iterations <= 4 and again.error <= fit.error * (1 + 1e-9)
