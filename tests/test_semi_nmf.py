"""Semi-NMF: its bounds, its monotony, what it recovers, its streams, and exact codes, against slow twins."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment, nnls

import anisoscope.numerics.nnls as nnls_module
from anisoscope.errors import AnisoscopeError
from anisoscope.numerics.decompositions import decompose, fit_directions
from anisoscope.numerics.factors import Factors
from anisoscope.numerics.krylov import leading
from anisoscope.numerics.linalg import principal_angles, subspace_overlap
from anisoscope.numerics.nnls import _one_by_one, descend, nonnegative_codes
from anisoscope.numerics.semi_nmf import semi_nmf
from anisoscope.numerics.semi_nmf_stream import SemiNMFStream

DTYPES = [torch.float32, torch.float64]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def decaying(n: int, d: int, *, seed: int = 0, power: float = 0.7) -> torch.Tensor:
    """Centred rows with variances that fall as a power of the dimension."""
    x = normal(n, d, seed=seed) * torch.arange(1, d + 1).double() ** -power
    return x - x.mean(0)


def clustered(n: int, d: int, *, seed: int = 0) -> torch.Tensor:
    """Centred rows in ten clouds: skewed directions, as activations have them."""
    centres = 3.0 * normal(10, d, seed=seed + 100)
    sizes = torch.arange(1, 11).double()
    which = torch.multinomial(sizes, n, replacement=True, generator=torch.Generator().manual_seed(seed))
    x = centres[which] + normal(n, d, seed=seed)
    return x - x.mean(0)


def planted(n: int, d: int, k: int, *, noise: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows Z D + noise with sparse Z, and D; each concept has rows of its own."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.rand(n, k, generator=generator, dtype=torch.float64)
    codes *= torch.rand(n, k, generator=generator) < 0.4
    codes[: 10 * k] = torch.eye(k, dtype=torch.float64).repeat(10, 1)
    directions = normal(k, d, seed=seed + 1)
    return codes @ directions + noise * normal(n, d, seed=seed + 2), directions


def svd_error(x: torch.Tensor, rank: int) -> float:
    energies = torch.linalg.svdvals(x.double()).square()
    return float(energies[rank:].sum() / energies.sum())


def matched_cosines(first: torch.Tensor, second: torch.Tensor) -> np.ndarray:
    one, two = (rows.double() / rows.double().norm(dim=1, keepdim=True) for rows in (first, second))
    cosines = (one @ two.T).numpy()
    return cosines[linear_sum_assignment(-cosines)]


def multiplicative(x: np.ndarray, rank: int, *, iterations: int, seed: int) -> float:
    """The error of the updates of Ding, Li and Jordan (2010), written down as in the paper, run for long."""
    z = np.random.default_rng(seed).random((len(x), rank)) + 0.1

    def plus(a: np.ndarray) -> np.ndarray:
        return (np.abs(a) + a) / 2

    for _ in range(iterations):
        d = np.linalg.pinv(z.T @ z) @ (z.T @ x)
        a, g = x @ d.T, d @ d.T
        z = z * np.sqrt((plus(a) + z @ plus(-g)) / (plus(-a) + z @ plus(g) + 1e-300))
    d = np.linalg.pinv(z.T @ z) @ (z.T @ x)
    return float(((x - z @ d) ** 2).sum() / (x**2).sum())


def check(fit: Factors, x: torch.Tensor) -> None:
    """What holds for every fit."""
    assert bool((fit.codes >= 0).all())
    assert all(a >= b for a, b in pairwise(fit.history))
    assert fit.error == fit.history[-1]
    missed = (x.double() - fit.decode(fit.codes).double()).square().sum() / x.double().square().sum()
    assert abs(float(missed) - fit.error) <= 1e-6 * fit.error + 1e-12


# what every fit obeys


@given(
    n=st.integers(1, 40),
    d=st.integers(1, 20),
    rank=st.integers(1, 8),
    seed=st.integers(0, 999),
    init=st.sampled_from(["svd", "random", "kmeans"]),
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

    better = descend(gram, target, start, steps=20)
    assert bool((heights(better) <= heights(start)).all()) and not torch.equal(better, start)
    largest = nnls_module._largest_eigenvalue
    monkeypatch.setattr(nnls_module, "_largest_eigenvalue", lambda gram: 0.3 * largest(gram))
    assert bool((heights(descend(gram, target, start, steps=20)) <= heights(start) + 1e-12).all())
    monkeypatch.setattr(nnls_module, "_heights", lambda codes, gram, target: codes.new_zeros(len(codes)))
    unguarded = descend(gram, target, start, steps=20)
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


# what is recovered


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
            assert matched_cosines(semi_nmf(x.to(dtype), 6, seed=seed).directions, directions).min() > 0.99


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


# repeatability, precision, masks, batches


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


# warm starts


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


def test_a_warm_start_on_the_same_rows_ends_at_once() -> None:
    x = clustered(400, 30)
    fit = semi_nmf(x, 5, max_iter=500, tol=1e-7)
    again = semi_nmf(x, 5, init=fit.directions)
    assert again.iterations <= 4 and again.error <= fit.error * (1 + 1e-9)


# exact codes


@given(
    n=st.integers(1, 30),
    d=st.integers(1, 12),
    k=st.integers(1, 12),
    seed=st.integers(0, 999),
    kind=st.sampled_from(["round", "double", "zero", "narrow"]),
)
@settings(max_examples=60)
def test_codes_equal_those_of_lawson_and_hanson(n: int, d: int, k: int, seed: int, kind: str) -> None:
    directions, rows = normal(k, d, seed=seed), normal(n, d, seed=seed + 1)
    if kind == "double":
        directions[-1] = directions[0]
    if kind == "zero":
        directions[0] = 0.0
    if kind == "narrow":
        directions = directions[:1] + 0.05 * directions
    codes = nonnegative_codes(rows, directions)
    slow = np.stack([nnls(directions.T.numpy(), row.numpy())[0] for row in rows])
    missed, least = (np.square(rows.numpy() - z @ directions.numpy()).sum(1) for z in (codes.numpy(), slow))
    np.testing.assert_allclose(missed, least, rtol=1e-7, atol=1e-9)
    assert float(codes.min()) >= 0
    if kind == "round" and k <= d:  # otherwise the codes themselves are not determined
        np.testing.assert_allclose(codes, slow, rtol=1e-6, atol=1e-6)


def test_rows_that_pivoting_cannot_settle_are_solved_one_by_one() -> None:
    directions, rows = normal(4, 6), normal(9, 6, seed=1)
    unit = directions / directions.norm(dim=1, keepdim=True)
    gram = (unit @ unit.T).unsqueeze(0)
    codes = _one_by_one(gram, torch.zeros(9, dtype=torch.int64), rows @ unit.T)
    torch.testing.assert_close(codes, nonnegative_codes(rows, unit), rtol=1e-6, atol=1e-9)


def test_encoding_the_rows_gives_their_codes_and_decoding_gives_the_fit() -> None:
    x = clustered(300, 20)
    fit = semi_nmf(x, 5)
    torch.testing.assert_close(fit.encode(x), fit.codes, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(fit.encode(x.numpy()[:7]), fit.codes[:7], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(fit.decode(fit.codes), fit.codes @ fit.directions)
    other = clustered(50, 20, seed=5)
    slow = np.stack([nnls(fit.directions.T.numpy(), row.numpy())[0] for row in other])
    np.testing.assert_allclose(fit.encode(other), slow, rtol=1e-6, atol=1e-6)


def test_a_fit_cannot_be_changed() -> None:
    fit = semi_nmf(clustered(50, 8), 2)
    with pytest.raises(AttributeError):
        fit.error = 0.0  # type: ignore[misc]


# the leading directions that the start is made of


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "d", "rank"), [(700, 300, 8), (300, 500, 4), (500, 40, 10)])
def test_leading_directions_are_the_singular_vectors(dtype: torch.dtype, n: int, d: int, rank: int) -> None:
    x = decaying(n, d, power=0.3).to(dtype)
    _, sigma, right = torch.linalg.svd(x.double(), full_matrices=False)
    found = leading(x, rank)
    exact = 1e-4 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(found.energies, sigma[:rank].square(), rtol=exact, atol=0)
    assert subspace_overlap(found.directions.mT, right[:rank]) > 1 - exact
    torch.testing.assert_close(found.scores.double(), x.double() @ found.directions, rtol=1e-3, atol=1e-3)
    rough = leading(x, rank, cycles=1)
    assert float(rough.energies.sum()) <= float(found.energies.sum()) * (1 + 1e-6)


# streams


def batches(x: torch.Tensor, *cuts: int) -> list[torch.Tensor]:
    return list(torch.tensor_split(x, list(cuts)))


def test_a_stream_of_one_batch_is_the_fit_of_it() -> None:
    x = clustered(400, 20)
    stream, fit = SemiNMFStream(5).update(x), semi_nmf(x, 5)
    torch.testing.assert_close(stream.directions, fit.directions, rtol=1e-2, atol=1e-2)
    assert stream.error <= fit.error * (1 + 1e-6)
    assert abs(stream.factors(x).error / fit.error - 1) < 1e-3


@given(cuts=st.lists(st.integers(0, 120), max_size=5), seed=st.integers(0, 99))
def test_with_a_fixed_reference_sums_depend_neither_on_batches_nor_on_order(cuts: list[int], seed: int) -> None:
    x, reference = clustered(120, 12, seed=seed), normal(4, 12, seed=seed)
    new = SemiNMFStream(4, init=reference, refresh=False)
    whole = SemiNMFStream(4, init=reference, refresh=False).update(x)
    parts = [part for part in batches(x, *sorted(cuts)) if len(part)]
    streams = [SemiNMFStream(4, init=reference, refresh=False).update(part) for part in parts]
    one_by_one = SemiNMFStream(4, init=reference, refresh=False)
    for part in reversed(parts):
        one_by_one.update(part)
    left, right = new, new
    for stream in streams:
        left = left.merge(stream)
        right = stream.merge(right)
    for found in (one_by_one, left, right, whole.merge(new), new.merge(whole)):
        assert found.n == whole.n == 120
        torch.testing.assert_close(found.directions, whole.directions, rtol=1e-8, atol=1e-9)
        assert abs(found.error - whole.error) < 1e-10


def test_a_pass_and_a_refresh_is_one_exact_iteration() -> None:
    x = clustered(300, 15)
    stream = SemiNMFStream(4, init=normal(4, 15), refresh=False)
    errors = []
    for _ in range(6):
        for part in batches(x, 100, 150):
            stream.update(part)
        codes = nonnegative_codes(x, stream._reference)  # type: ignore[arg-type]
        best = torch.linalg.lstsq(codes, x).solution
        slow = float((x - codes @ best).square().sum() / x.square().sum())
        assert abs(stream.error - slow) < 1e-9
        errors.append(stream.error)
        stream = stream.refreshed()
    assert all(a >= b - 1e-12 for a, b in pairwise(errors))


def test_a_stream_that_refreshes_comes_close_to_the_whole_fit() -> None:
    x, directions = planted(2000, 30, 5, noise=0.05)
    x = x[torch.randperm(2000, generator=torch.Generator().manual_seed(0))]
    stream = SemiNMFStream(5)
    for part in x.split(100):
        stream.update(part)
    assert float(principal_angles(stream.directions, directions).max()) < 0.05
    assert stream.factors(x).error < semi_nmf(x, 5).error * 1.1
    other = SemiNMFStream(5)
    for part in planted(2000, 30, 5, noise=0.05)[0].split(500):
        other.update(part)
    merged = stream.merge(other)
    assert merged.n == 4000 and float(principal_angles(merged.directions, directions).max()) < 0.05


def test_what_is_forgotten_no_longer_counts() -> None:
    first, _ = planted(600, 20, 4, noise=0.02)
    second, directions = planted(600, 20, 4, noise=0.02, seed=50)
    spans = []
    for forgetting in (0.3, 1.0):
        stream = SemiNMFStream(4, forgetting=forgetting)
        for part in (*first.split(60), *second.split(60)):
            stream.update(part)
        spans.append(float(principal_angles(stream.directions, directions).max()))
    assert spans[0] < 0.1 < spans[1], "and the counter-test: what is kept does count"


def test_small_batches_wait_until_there_are_enough() -> None:
    x = clustered(60, 10)
    stream = SemiNMFStream(4)
    for part in x.split(3):
        stream.update(part)
    assert stream.n == 60 and stream.directions.shape == (4, 10)
    few, more = SemiNMFStream(4).update(x[:10]), SemiNMFStream(4).update(x[10:])
    for merged in (few.merge(more), more.merge(few)):
        assert merged.n == 60 and merged.directions.shape == (4, 10)


# bad input


ROWS = clustered(20, 6)
BAD: dict[str, tuple[str, Callable[[], Any]]] = {
    "rank over rows": ("larger than the 5 rows", lambda: semi_nmf(normal(5, 9), 6)),
    "rank over width": ("larger than the width 6", lambda: semi_nmf(ROWS, 7)),
    "rank 0": ("rank is 0", lambda: semi_nmf(ROWS, 0)),
    "rank 2.5": ("rank is 2.5", lambda: semi_nmf(ROWS, 2.5)),  # type: ignore[arg-type]
    "nan": ("1 of 20 rows are not finite", lambda: semi_nmf(ROWS.index_fill(0, torch.tensor([3]), torch.nan), 2)),
    "infinite": ("rows are not finite", lambda: semi_nmf(ROWS.index_fill(0, torch.tensor([3]), torch.inf), 2)),
    "one dimension": ("shape (6,)", lambda: semi_nmf(ROWS[0], 2)),
    "three dimensions": ("shape (1, 20, 6)", lambda: semi_nmf(ROWS.unsqueeze(0), 2)),
    "empty": ("shape (0, 6)", lambda: semi_nmf(ROWS[:0], 2)),
    "zero": ("all 20 rows are zero", lambda: semi_nmf(0 * ROWS, 2)),
    "complex": ("complex", lambda: semi_nmf(ROWS.to(torch.complex64), 2)),
    "words": ("expected an n×d array", lambda: semi_nmf([["a", "b"]], 2)),
    "mask too short": ("one bool for each of 20 rows", lambda: semi_nmf(ROWS, 2, mask=torch.ones(5).bool())),
    "mask of numbers": ("one bool for each of 20 rows", lambda: semi_nmf(ROWS, 2, mask=torch.ones(20))),
    "empty mask": ("none of the 20 rows", lambda: semi_nmf(ROWS, 2, mask=torch.zeros(20).bool())),
    "mask leaves too few": ("larger than the 2 rows", lambda: semi_nmf(ROWS, 3, mask=torch.arange(20) < 2)),
    "init word": ("did you mean 'kmeans'", lambda: semi_nmf(ROWS, 2, init="kmean")),
    "init shape": ("init has shape (3, 6)", lambda: semi_nmf(ROWS, 2, init=normal(3, 6))),
    "init nan": ("init holds directions", lambda: semi_nmf(ROWS, 2, init=torch.full((2, 6), torch.nan))),
    "encode width": ("9 columns; expected 6", lambda: semi_nmf(ROWS, 2).encode(normal(4, 9))),
    "decode width": ("3 columns; expected 2", lambda: semi_nmf(ROWS, 2).decode(normal(4, 3))),
    "stream empty": ("seen no rows", lambda: SemiNMFStream(2).directions),
    "stream ranks": ("rank 2 and 3", lambda: SemiNMFStream(2).merge(SemiNMFStream(3))),
    "stream nan": ("not finite", lambda: SemiNMFStream(2).update(ROWS * torch.nan)),
    "stream forgetting": ("forgetting is 0", lambda: SemiNMFStream(2, forgetting=0.0)),
    "stream init": ("3 directions; expected 2", lambda: SemiNMFStream(2, init=normal(3, 6))),
    "stream width": ("9 columns", lambda: SemiNMFStream(2, init=normal(2, 6)).update(normal(4, 9))),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_in_one_sentence(name: str) -> None:
    words, act = BAD[name]
    with pytest.raises(AnisoscopeError) as caught:
        act()
    assert words in str(caught.value)


def test_rows_that_are_odd_but_right_are_fitted() -> None:
    for x, rank in (
        (normal(1, 4), 1),
        (normal(6, 30), 6),
        (normal(9, 1), 1),
        (torch.ones(30, 7), 3),
        (normal(60, 2) @ normal(2, 20), 5),
        (torch.cat([normal(1, 8), torch.zeros(20, 8)]), 3),
        (1e-18 * clustered(50, 8).float(), 3),
        (1e17 * clustered(50, 8).float(), 3),
        (torch.randint(-3, 4, (50, 8)), 3),
    ):
        fit = semi_nmf(x, rank)
        check(fit, torch.as_tensor(x))
        assert bool(fit.directions.isfinite().all()) and bool(fit.codes.isfinite().all())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_finds_what_the_host_finds() -> None:
    x = torch.stack([clustered(600, 150, seed=seed) for seed in range(3)])
    host, device = fit_directions(x, 6), fit_directions(x.cuda(), 6)
    assert device.is_cuda
    for one, two in zip(host, device.cpu(), strict=True):
        assert float(principal_angles(one, two).max()) < 1e-3
    fit = semi_nmf(x[0].float().cuda(), 6)
    assert fit.codes.is_cuda and fit.encode(x[0].float().cuda()).is_cuda
    assert abs(fit.error / semi_nmf(x[0], 6).error - 1) < 1e-3
    again = semi_nmf(x[0].float().cuda(), 6)
    assert torch.equal(fit.directions, again.directions)
