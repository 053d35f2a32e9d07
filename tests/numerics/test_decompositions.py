"""Six ways to find directions, one interface: each against a slow twin, all against the same laws."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.numerics.decompositions import METHODS, decompose, fit_directions
from anisoscope.numerics.factors import k_means
from anisoscope.numerics.linalg import principal_angles, subspace_overlap

OTHERS = [method for method in METHODS if method != "semi_nmf"]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def skewed(n: int, d: int, k: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows mixed from independent, skewed sources of different strength, about a mean; and the mixing directions."""
    generator = torch.Generator().manual_seed(seed)
    sources = torch.empty(n, k, dtype=torch.float64).exponential_(generator=generator)
    mixing = normal(k, d, seed=seed + 1) * torch.linspace(2.0, 1.0, k).double().unsqueeze(1)
    return sources @ mixing + 0.01 * normal(n, d, seed=seed + 2) + 3.0, mixing


X, _ = skewed(500, 24, 4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_method_obeys_the_interface(method: str, dtype: torch.dtype) -> None:
    x = X.to(dtype)
    fit = decompose(x, 4, method=method, seed=2)
    assert fit.method == method and fit.seed == 2
    assert fit.codes.shape == (500, 4) and fit.directions.shape == (4, 24) and fit.mean.shape == (24,)
    assert fit.codes.dtype == fit.directions.dtype == dtype
    missed = (x - fit.decode(fit.codes)).double().square().sum() / x.double().square().sum()
    assert abs(float(missed) - fit.error) < 1e-6
    assert fit.history[-1] == fit.error and all(a >= b for a, b in pairwise(fit.history))
    torch.testing.assert_close(fit.encode(x[:50]), fit.codes[:50], rtol=1e-4, atol=1e-4)
    assert fit.basis().shape[0] == 24
    assert float(fit.shares.sum()) == pytest.approx(1.0)
    assert bool(fit.mean.any()) == (method in ("pca", "ica"))


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_bits_and_leaves_the_generator_alone(method: str) -> None:
    before = torch.get_rng_state()
    one, two = (decompose(X, 4, method=method, seed=5) for _ in range(2))
    assert torch.equal(one.directions, two.directions) and torch.equal(one.codes, two.codes)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("n", "d"), [(200, 24), (400, 150)])
def test_many_fits_at_once_equal_one_at_a_time(method: str, n: int, d: int) -> None:
    x = torch.stack([skewed(n, d, 4, seed=seed)[0] for seed in (0, 10, 20)])
    together = fit_directions(x, 4, method=method, seed=1)
    for i in range(3):
        alone = decompose(x[i], 4, method=method, seed=1).directions
        torch.testing.assert_close(together[i], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_a_mask_equals_dropping_the_rows(method: str) -> None:
    mask = np.arange(500) % 4 > 0
    padded = X.clone()
    padded[~torch.from_numpy(mask)] = torch.inf
    one, two = decompose(padded, 3, method=method, mask=mask), decompose(X[torch.from_numpy(mask)], 3, method=method)
    assert torch.equal(one.directions, two.directions) and torch.equal(one.codes, two.codes)


@pytest.mark.parametrize("d", [24, 200])
def test_pca_and_svd_are_those_of_numpy(d: int) -> None:
    x = skewed(400, d, 5)[0]
    for method, rows in (("pca", x - x.mean(0)), ("svd", x)):
        fit = decompose(x, 5, method=method)
        _, sigma, right = np.linalg.svd(rows.numpy(), full_matrices=False)
        np.testing.assert_allclose(np.abs((fit.directions.numpy() * right[:5]).sum(1)), 1.0, atol=1e-8)
        scores = fit.codes.square().sum(0).sqrt()
        np.testing.assert_allclose(scores, sigma[:5], rtol=1e-8)
        error = (sigma[5:] ** 2).sum() / float(x.square().sum())
        assert fit.error == pytest.approx(error, rel=1e-6)
        largest = fit.directions.gather(1, fit.directions.abs().argmax(1, keepdim=True))
        assert bool((largest > 0).all()), "the sign is fixed"
    assert subspace_overlap(decompose(x, 5, method="pca").directions, decompose(x, 5, method="svd").directions) < 0.999


def test_ica_finds_independent_sources_where_pca_does_not() -> None:
    cosines = {}
    x, mixing = skewed(4000, 24, 4)
    for method in ("ica", "pca"):
        found = decompose(x, 4, method=method).directions
        planted = mixing / mixing.norm(dim=1, keepdim=True)
        cosines[method] = float((found @ planted.T).max(0).values.min())
    assert cosines["ica"] > 0.98 > cosines["pca"]
    fit = decompose(X, 4, method="ica")
    assert bool((fit.codes.pow(3).mean(0) > 0).all()), "sources are turned towards their longer tail"
    span = decompose(X, 4, method="pca").directions
    assert float(principal_angles(fit.directions, span).max()) < 1e-6, "within the span of the PCA"


def test_ica_agrees_with_scikit_learn() -> None:
    sklearn = pytest.importorskip("sklearn.decomposition")
    theirs = sklearn.FastICA(4, whiten="unit-variance", fun="logcosh", tol=1e-8, max_iter=1000, random_state=0)
    theirs.fit(X.numpy())
    mixing = torch.from_numpy(theirs.mixing_.T)
    mixing = mixing / mixing.norm(dim=1, keepdim=True)
    ours = decompose(X, 4, method="ica").directions
    assert float((ours @ mixing.T).abs().max(1).values.min()) > 0.9999


def test_k_means_finds_separate_clusters_and_its_inertia_never_increases() -> None:
    centres = 20.0 * normal(5, 8)
    which = torch.arange(300) % 5
    x = centres[which] + normal(300, 8, seed=1)
    fit = decompose(x, 5, method="kmeans")
    assert bool(((fit.codes == 0) | (fit.codes == 1)).all()) and bool((fit.codes.sum(1) == 1).all())
    means = torch.stack([x[which == i].mean(0) for i in range(5)])
    nearest = torch.cdist(means, fit.directions).min(1).values
    assert float(nearest.max()) < 1e-6
    history = k_means(normal(300, 8), 6, seed=0, tol=0.0).history
    assert all(a >= b - 1e-9 for a, b in pairwise([float(h) for h in history])) and len(history) > 3


def test_k_means_is_as_good_as_scikit_learns() -> None:
    cluster = pytest.importorskip("sklearn.cluster")
    x = normal(400, 10)
    theirs = cluster.KMeans(6, n_init=10, random_state=0).fit(x.numpy()).inertia_
    ours = min(float(k_means(x, 6, seed=seed, tol=1e-8).history[-1]) for seed in range(10))
    assert ours < 1.02 * theirs


def test_an_empty_cluster_keeps_its_centroid() -> None:
    found = k_means(torch.ones(10, 3, dtype=torch.float64), 2, seed=0)
    assert bool(found.centroids.isfinite().all()) and float(found.assigned.sum()) == 10


def test_random_directions_are_orthonormal_and_know_nothing_of_the_rows() -> None:
    one, two = decompose(X, 4, method="random"), decompose(normal(50, 24), 4, method="random")
    torch.testing.assert_close(one.directions @ one.directions.T, torch.eye(4, dtype=torch.float64))
    assert torch.equal(one.directions, two.directions)
    torch.testing.assert_close(one.codes, X @ one.directions.T)
    other = decompose(X, 4, method="random", seed=1)
    assert not torch.equal(one.directions, other.directions), "the counter-test: the seed does something"


def test_on_centred_rows_pca_is_the_best_of_all() -> None:
    x = X - X.mean(0)
    errors = {method: decompose(x, 4, method=method).error for method in METHODS}
    assert min(errors, key=errors.__getitem__) in ("pca", "svd", "ica")
    assert errors["semi_nmf"] < errors["kmeans"] < errors["random"]


def test_autocast_and_gradients_around_a_fit_change_nothing() -> None:
    x = X.float()
    plain = fit_directions(x, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = fit_directions(x.clone().requires_grad_(), 4)
        assert (x @ x.T).dtype == torch.bfloat16, "the counter-test: autocast was on"
    assert torch.equal(plain, inside) and not inside.requires_grad


BAD = {
    "method": ("did you mean 'kmeans'", lambda: decompose(X, 2, method="kmean")),
    "method for many": ("unknown method", lambda: fit_directions(X, 2, method="nmf")),
    "init": ("init was given for pca", lambda: decompose(X, 2, method="pca", init="random")),
    "init for many": ("init was given for ica", lambda: fit_directions(X, 2, method="ica", init=normal(2, 24))),
    "init shape for many": ("expected directions of shape (2, 24)", lambda: fit_directions(X, 2, init=normal(3, 24))),
    "rank": ("larger than the width 24", lambda: decompose(X, 25, method="pca")),
    "rank for many": ("larger than the 3 rows", lambda: fit_directions(normal(2, 3, 9), 4, method="svd")),
    "one dimension": ("shape (24,)", lambda: fit_directions(X[0], 2)),
    "empty": ("shape (0, 5, 3)", lambda: fit_directions(normal(0, 5, 3), 2)),
    "nan in one of many": ("1 of 20 rows", lambda: fit_directions(_with_nan(), 2)),
    "one of many zero": ("all 10 rows are zero", lambda: fit_directions(torch.stack([X[:10], 0 * X[:10]]), 2)),
    "too flat for ica": ("span only 2 dimensions", lambda: decompose(normal(50, 2) @ normal(2, 9), 3, method="ica")),
}


def _with_nan() -> torch.Tensor:
    x = torch.stack([X[:10], X[10:20]])
    x[1, 4, 2] = torch.nan
    return x


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_in_one_sentence(name: str) -> None:
    words, act = BAD[name]
    with pytest.raises(AnisoscopeError) as caught:
        act()
    assert words in str(caught.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", OTHERS)
def test_a_device_finds_what_the_host_finds(method: str) -> None:
    x = torch.stack([skewed(400, 150, 4, seed=seed)[0] for seed in (0, 10)])
    host, device = fit_directions(x, 4, method=method), fit_directions(x.cuda(), 4, method=method)
    assert device.is_cuda
    torch.testing.assert_close(device.cpu(), host, rtol=1e-4, atol=1e-4)
