"""Numerics: exact neighbours, spectra, subspaces and hashes, against slow twins."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anisoscope.errors import AnisoscopeError
from anisoscope.numerics import linalg
from anisoscope.numerics.hashing import FOLDS, fold_of, mix, row_hash
from anisoscope.numerics.linalg import (
    eigenvalues,
    leading_eigenvectors,
    orthonormal_basis,
    principal_angles,
    small_eigenvalues,
    small_eigh,
    solve_small,
    subspace_overlap,
)
from anisoscope.numerics.neighbours import first_equal, nearest


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# neighbours


def brute(x: torch.Tensor, k: int) -> np.ndarray:
    rows = x.double().numpy()
    full = np.sqrt(((rows[:, None] - rows[None]) ** 2).sum(-1))
    np.fill_diagonal(full, np.inf)
    return np.sort(full, axis=1)[:, :k]


CLOUDS = {
    "round": normal(300, 8),
    "common mean 3000": normal(300, 8) + 3000 / math.sqrt(8),
    "float64 and far": normal(200, 5, dtype=torch.float64) * 1e-3 + 1e6,
    "one huge row": torch.cat([normal(200, 6), torch.full((1, 6), 1e6)]),
    "two clusters": torch.cat([normal(150, 6) * 1e-4, normal(150, 6, seed=1) * 1e-4 + 100]),
    "wide": normal(120, 700),
    "one column": normal(100, 1),
    "three rows": normal(3, 4),
    "lattice": torch.cartesian_prod(*[torch.arange(5.0)] * 3),
}


@pytest.mark.parametrize("name", CLOUDS)
def test_neighbours_equal_brute_force(name: str) -> None:
    x = CLOUDS[name]
    distance, index = nearest(x, 12)
    k = min(12, len(x) - 1)
    assert distance.dtype == torch.float64
    assert distance.shape == index.shape == (len(x), k)
    np.testing.assert_allclose(distance.numpy(), brute(x, k), rtol=1e-9)
    again = torch.linalg.vector_norm(x.double()[index] - x.double().unsqueeze(1), dim=2)
    torch.testing.assert_close(again, distance, rtol=1e-9, atol=0)
    assert not bool((index == torch.arange(len(x)).unsqueeze(1)).any()), "a row is not its own neighbour"


@given(n=st.integers(2, 40), d=st.integers(1, 6), k=st.integers(1, 45), seed=st.integers(0, 999))
def test_neighbours_of_any_small_cloud_equal_brute_force(n: int, d: int, k: int, seed: int) -> None:
    x = normal(n, d, seed=seed).round(decimals=1) * 10 + 50
    np.testing.assert_allclose(nearest(x, k)[0].numpy(), brute(x, min(k, n - 1)), atol=1e-9)


def test_the_naive_product_in_float32_is_wrong_where_ours_is_right() -> None:
    x = CLOUDS["common mean 3000"]
    squares = x.square().sum(1)
    squared = squares[:, None] + squares[None] - 2 * x @ x.T
    squared.fill_diagonal_(torch.inf)
    naive = squared.clamp_min(0).sqrt().sort(1).values[:, 0].double().numpy()
    assert np.abs(naive / brute(x, 1)[:, 0] - 1).max() > 0.05


@given(n=st.integers(1, 30), values=st.integers(1, 3), seed=st.integers(0, 999))
def test_every_row_finds_the_first_that_equals_it(n: int, values: int, seed: int) -> None:
    x = torch.randint(0, values + 1, (n, 2), generator=torch.Generator().manual_seed(seed)).float()
    seen: dict[tuple[float, ...], int] = {}
    firsts = [seen.setdefault(tuple(row), i) for i, row in enumerate(x.tolist())]
    assert first_equal(x).tolist() == firsts


def test_rows_that_differ_in_the_last_bit_are_distinct() -> None:
    x = torch.ones(2, 3)
    x[1, 2] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert first_equal(x).tolist() == [0, 1]
    assert first_equal(torch.ones(2, 3)).tolist() == [0, 0], "the counter-test"


def test_minus_zero_equals_zero() -> None:
    assert first_equal(torch.tensor([[0.0, 1.0], [-0.0, 1.0]])).tolist() == [0, 0]


# spectra and subspaces


def test_eigenvalues_are_squared_singular_values_in_order() -> None:
    x = normal(50, 7, dtype=torch.float64)
    sigma = np.linalg.svd(x.numpy(), compute_uv=False)
    np.testing.assert_allclose(eigenvalues(x.T @ x).numpy(), sigma**2, rtol=1e-12)


def test_eigenvalues_are_never_negative() -> None:
    x = normal(3, 40, dtype=torch.float64)
    assert float(eigenvalues(x.T @ x).min()) >= 0.0


@pytest.mark.parametrize("angle", [0.0, 1e-12, 1e-6, 0.3, 0.8, 1.2, math.pi / 2])
def test_principal_angles_are_right_also_when_tiny(angle: float) -> None:
    first = torch.eye(5, dtype=torch.float64)[:2]
    second = torch.stack([first[0], math.cos(angle) * first[1] + math.sin(angle) * torch.eye(5).double()[3]])
    turn = torch.linalg.qr(normal(5, 5, dtype=torch.float64))[0]
    for a, b in ((first, second), (second, first), (first @ turn, 3.0 * second @ turn)):
        np.testing.assert_allclose(principal_angles(a, b).numpy(), [0.0, angle], atol=3e-15, rtol=1e-9)


def test_principal_angles_to_a_larger_subspace_that_contains_it_are_zero() -> None:
    x = normal(4, 9, dtype=torch.float64)
    for a, b in ((x, x[:2]), (x[:2], x)):
        assert float(principal_angles(a, b).abs().max()) < 1e-12
        assert subspace_overlap(a, b) == pytest.approx(1.0, abs=1e-12)


def test_principal_angles_agree_with_scipy() -> None:
    from scipy.linalg import subspace_angles

    a, b = normal(3, 12, dtype=torch.float64), normal(5, 12, seed=1, dtype=torch.float64)
    expected = np.sort(subspace_angles(a.T.numpy(), b.T.numpy()))
    np.testing.assert_allclose(principal_angles(a, b).numpy(), expected, rtol=1e-9)
    assert subspace_overlap(a, b) == pytest.approx(float((np.cos(expected) ** 2).mean()), rel=1e-9)


def test_a_basis_has_the_numerical_rank_and_spans_the_rows() -> None:
    x = normal(6, 2, dtype=torch.float64) @ normal(2, 10, seed=1, dtype=torch.float64)
    q = orthonormal_basis(x)
    assert q.shape == (10, 2)
    torch.testing.assert_close(q.T @ q, torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(x @ q @ q.T, x)


@pytest.mark.parametrize("bad", [torch.zeros(3, 4), torch.ones(4), torch.full((2, 3), math.nan), torch.zeros(0, 4)])
def test_a_matrix_without_a_subspace_is_refused_in_words(bad: torch.Tensor) -> None:
    for call in (principal_angles, subspace_overlap):
        with pytest.raises(AnisoscopeError, match="expected"):
            call(bad, torch.eye(4))
    with pytest.raises(AnisoscopeError, match="widths"):
        subspace_overlap(torch.eye(3), torch.eye(4))


# hashes


def test_mix_is_splitmix64() -> None:
    mask = (1 << 64) - 1

    def slow(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    numbers = torch.tensor([0, 1, -1, 123456789, -(1 << 63), (1 << 63) - 1])
    assert [int(v) & mask for v in mix(numbers)] == [slow(int(v) & mask) for v in numbers]


def test_row_hashes_depend_on_context_position_and_seed_and_do_not_collide() -> None:
    context, position = torch.arange(100).repeat_interleave(50), torch.arange(50).repeat(100)
    seen = row_hash(context, position)
    assert len(seen.unique()) == 5000
    assert not torch.equal(seen, row_hash(context, position, seed=1))
    assert torch.equal(seen.flip(0), row_hash(context.flip(0), position.flip(0)))


def test_hashes_and_folds_are_uniform_and_independent() -> None:
    context = torch.arange(20_000)
    fold = fold_of(context)
    assert fold.min() == 0
    assert fold.max() == FOLDS - 1
    expected = 20_000 / FOLDS
    assert float(((fold.bincount() - expected) ** 2 / expected).sum()) < 25  # χ² with 7 degrees, p ≈ 1e-3
    small = row_hash(context, torch.zeros_like(context)).argsort()[:4000]
    counts = fold[small].bincount(minlength=FOLDS).double()
    assert float(((counts - 500) ** 2 / 500).sum()) < 25


@pytest.mark.parametrize(("width", "count"), [(20, 3), (96, 1), (96, 16), (300, 16), (96, 90)])
def test_leading_eigenvectors_are_the_last_of_all_of_them(width: int, count: int) -> None:
    rows = normal(400, width, dtype=torch.float64) * torch.linspace(2.0, 0.1, width).double()
    matrix = rows.mT @ rows - 40.0 * torch.eye(width).double()  # some eigenvalues are negative
    found, wanted = leading_eigenvectors(matrix, count), torch.linalg.eigh(matrix)[1][:, -count:].flip(-1)
    assert (found * wanted).sum(0).abs().tolist() == pytest.approx([1.0] * count, abs=1e-9)


@pytest.mark.parametrize("shape", [(5, 5), (1, 3, 3), (2, 4, 8, 8), (70, 32, 32)])
def test_small_problems_of_another_device_are_solved_by_cores(shape: tuple[int, ...]) -> None:
    x = normal(*shape, dtype=torch.float64)
    scatter = x @ x.mT
    values, vectors = linalg._by_cores(torch.linalg.eigh, scatter)
    assert values.shape == shape[:-1] and vectors.shape == shape
    torch.testing.assert_close((values, vectors), tuple(torch.linalg.eigh(scatter)), rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("shape", [(5, 5), (2, 4, 8, 8), (3, 200, 200)])
def test_small_problems_of_a_gpu_give_what_a_cpu_finds(shape: tuple[int, ...]) -> None:
    x = normal(*shape, dtype=torch.float64)
    scatter = x @ x.mT
    values, vectors = small_eigh(scatter.cuda())
    torch.testing.assert_close(values.cpu(), torch.linalg.eigvalsh(scatter), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(small_eigenvalues(scatter.cuda()), values, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(vectors * values.unsqueeze(-2) @ vectors.mT, scatter.cuda(), rtol=1e-9, atol=1e-9)
    left, sizes, right = solve_small(torch.linalg.svd, scatter.cuda())
    torch.testing.assert_close(left * sizes.unsqueeze(-2) @ right, scatter.cuda(), rtol=1e-9, atol=1e-9)
