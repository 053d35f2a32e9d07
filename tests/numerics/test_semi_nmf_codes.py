"""Codes and odd input of semi-NMF."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from anisoscope.errors import AnisoscopeError
from anisoscope.numerics.decompositions import decompose, fit_directions
from anisoscope.numerics.factors import _one_by_one, nonnegative_codes
from anisoscope.numerics.linalg import leading_axes, principal_angles, subspace_overlap
from anisoscope.numerics.semi_nmf import semi_nmf
from support.factored import DTYPES, check, clustered, decaying, normal


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


def test_a_fit_shares_no_memory_with_its_rows_and_encoding_leaves_it_alone() -> None:
    x = clustered(50, 8)
    fit = semi_nmf(x, 2)
    codes, directions = fit.codes.clone(), fit.directions.clone()
    fit.encode(x)
    x.zero_()
    assert torch.equal(fit.codes, codes) and torch.equal(fit.directions, directions)
    assert bool(codes.any())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "d", "rank"), [(700, 300, 8), (300, 500, 4), (500, 40, 10)])
def test_leading_directions_are_the_singular_vectors(dtype: torch.dtype, n: int, d: int, rank: int) -> None:
    x = decaying(n, d, power=0.3).to(dtype)
    _, sigma, right = torch.linalg.svd(x.double(), full_matrices=False)
    found = leading_axes(x, rank)
    exact = 1e-4 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(found.energies, sigma[:rank].square(), rtol=exact, atol=0)
    assert subspace_overlap(found.directions.mT, right[:rank]) > 1 - exact
    torch.testing.assert_close(found.scores.double(), x.double() @ found.directions, rtol=1e-3, atol=1e-3)
    rough = leading_axes(x, rank, cycles=1)
    assert float(rough.energies.sum()) <= float(found.energies.sum()) * (1 + 1e-6)


def batches(x: torch.Tensor, *cuts: int) -> list[torch.Tensor]:
    return list(torch.tensor_split(x, list(cuts)))


ROWS = clustered(20, 6)
BAD: dict[str, tuple[str, Callable[[], Any]]] = {
    "rank over rows": ("larger than the 5 rows", lambda: semi_nmf(normal(5, 9), 6)),
    "rank over width": ("larger than the width 6", lambda: semi_nmf(ROWS, 7)),
    "rank 0": ("rank is 0", lambda: semi_nmf(ROWS, 0)),
    "rank 2.5": ("rank is 2.5", lambda: semi_nmf(ROWS, 2.5)),  # type: ignore[arg-type]
    "nan": ("1 of 20 rows are not finite", lambda: semi_nmf(ROWS.index_fill(0, torch.tensor([3]), torch.nan), 2)),
    "infinite": ("rows are not finite", lambda: semi_nmf(ROWS.index_fill(0, torch.tensor([3]), torch.inf), 2)),
    "one dimension": ("shape (6,)", lambda: semi_nmf(ROWS[0], 2)),
    "four dimensions": ("shape (1, 1, 20, 6)", lambda: semi_nmf(ROWS[None, None], 2)),
    "layers of different lengths": ("expected an n×d array", lambda: semi_nmf([normal(5, 6).tolist(), [[1.0]]], 2)),
    "a fit for each of too few layers": (
        "init has shape (1, 2, 6)",
        lambda: semi_nmf(torch.stack([ROWS, ROWS]), 2, init=[semi_nmf(ROWS, 2)]),
    ),
    "one of the other methods, in layers": (
        "shape (1, 20, 6)",
        lambda: decompose(ROWS.unsqueeze(0), 2, method="pca"),
    ),
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
