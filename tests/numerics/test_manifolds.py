"""Manifolds know their tangent space and curvature: against finite differences, closed forms and quadrature."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError
from anisoscope.numerics.manifolds import (
    KINDS,
    MANIFOLDS,
    Manifold,
    chart_manifold,
    displace,
    ellipsoid,
    expected_variances,
    flat_space,
    largest_curvature,
    make_manifold,
    paraboloid,
    quadratic_patch,
    sphere,
    swiss_roll,
    torus,
    unit_sample,
)

NAMES = sorted(MANIFOLDS)


def mean_curvature(manifold: Manifold, chart: Tensor) -> Tensor:
    """The mean curvature vector tr(II)/m as a vector of R^D, [..., D]."""
    frames = manifold.frames(chart)
    trace = frames.form.diagonal(dim1=-2, dim2=-1).sum(-1) / manifold.dim
    return (frames.normal @ trace[..., None])[..., 0]


def sample_around(
    manifold: Manifold, point: Tensor, *, scale: float, n: int, kind: str = "gaussian", seed: int = 0
) -> Tensor:
    """n points [n, D] of the manifold around the point with these chart coordinates."""
    generator = torch.Generator().manual_seed(seed)
    u = scale * unit_sample(n, dim=manifold.dim, kind=kind, generator=generator)
    return displace(manifold, manifold.frames(point), u)


def differences(manifold: Manifold, point: Tensor, *, step: float = 1e-4) -> tuple[Tensor, Tensor]:
    """J and H of the embedding by central differences: knows nothing of the chart's derivatives."""
    basis = step * torch.eye(manifold.dim, dtype=torch.float64)
    ahead, back = manifold.embed(point + basis), manifold.embed(point - basis)
    J = ((ahead - back) / (2 * step)).T
    pairs = [manifold.embed(point + a * basis[:, None] + b * basis[None]) * a * b for a in (1, -1) for b in (1, -1)]
    H = sum(pairs[1:], pairs[0]) / (4 * step**2)
    return J, H.permute(2, 0, 1)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_finite_differences_give_the_tangent_and_the_second_form(name: str, dim: int) -> None:
    manifold = make_manifold(name, dim=dim, ambient=9, seed=dim)
    for point in (manifold.centre, *manifold.points(3, seed=5)):
        frames = manifold.frames(point)
        J, H = differences(manifold, point)
        off = J - frames.tangent @ (frames.tangent.T @ J)
        assert off.abs().max() < 1e-6 * J.abs().max()
        directions = torch.linalg.pinv(J) @ frames.tangent  # chart directions that move by unit lengths
        second = torch.einsum("Dij,ia,jb->Dab", H, directions, directions)
        seen = torch.einsum("Dc,Dab->cab", frames.normal, second)
        torch.testing.assert_close(seen, frames.form, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_bases_are_orthonormal_and_complete(name: str) -> None:
    manifold = make_manifold(name, dim=3, ambient=11)
    frames = manifold.frames(manifold.points(7))
    both = torch.cat([frames.tangent, frames.normal], -1)
    torch.testing.assert_close(both.mT @ both, torch.eye(11).double().expand(7, 11, 11), atol=1e-12, rtol=0)


def test_a_sphere_has_the_curvature_of_its_radius_in_every_direction() -> None:
    manifold = sphere(3, radius=2.0)
    for point in manifold.points(4):
        form = manifold.frames(point).form
        torch.testing.assert_close(form.abs(), torch.eye(3).double()[None] / 2, atol=1e-12, rtol=0)
        torch.testing.assert_close(mean_curvature(manifold, point), -manifold.embed(point) / 4)


def test_an_ellipsoid_has_the_known_curvatures_at_the_end_of_an_axis() -> None:
    manifold = ellipsoid(2, axes=torch.tensor([2.0, 3.0, 5.0]))
    curvatures = torch.linalg.eigvalsh(manifold.frames(torch.zeros(2)).form[0]).abs().sort().values
    torch.testing.assert_close(curvatures, torch.tensor([5 / 9, 5 / 4], dtype=torch.float64))


def test_closed_forms_of_the_other_manifolds() -> None:
    k = torch.tensor([1.5, -0.5], dtype=torch.float64)
    apex = paraboloid(2, curvatures=k).frames(torch.zeros(2))
    assert torch.allclose(apex.form[0].abs(), torch.diag(k.abs()))
    roll, angle = swiss_roll(2, pitch=0.3), 7.0
    bent = torch.linalg.eigvalsh(roll.frames(torch.tensor([angle, 0.2])).form[0]).abs().sort().values
    assert bent[0] < 1e-12
    assert bent[1] == pytest.approx((angle**2 + 2) / (0.3 * (angle**2 + 1) ** 1.5))
    radii = torch.tensor([1.0, 2.0, 4.0])
    form = torus(3, radii=radii).frames(torch.tensor([0.3, 1.0, 2.0])).form
    torch.testing.assert_close(form.square().sum(0), torch.diag(1 / radii.double() ** 2), atol=1e-12, rtol=0)
    assert float(flat_space(3).rotated(8).frames(torch.ones(3)).form.abs().max()) == 0
    assert quadratic_patch(3, codim=5, curvature=2.5).curvature(torch.zeros(3)) == pytest.approx(2.5)


@pytest.mark.parametrize("name", NAMES)
def test_turning_into_a_larger_space_keeps_every_length_and_curvature(name: str) -> None:
    own, turned = make_manifold(name, dim=2), make_manifold(name, dim=2, ambient=23, seed=4)
    points = own.points(6)
    torch.testing.assert_close(
        torch.cdist(own.embed(points), own.embed(points)), torch.cdist(*[turned.embed(points)] * 2)
    )
    one, two = own.frames(points).form, turned.frames(points).form
    assert two.shape == (6, 21, 2, 2)
    squares = [torch.einsum("ncab,ncde->nabde", form, form) for form in (one, two)]  # free of the normal basis
    torch.testing.assert_close(*squares, atol=1e-9, rtol=1e-9)
    norms = [mean_curvature(m, points).norm(dim=-1) for m in (own, turned)]
    torch.testing.assert_close(*norms, atol=1e-9, rtol=1e-9)


def test_kappa_is_the_largest_curvature_over_all_directions() -> None:
    generator = torch.Generator().manual_seed(3)
    form = torch.randn(20, 4, 2, 2, dtype=torch.float64, generator=generator)
    form = form + form.mT
    angles = torch.linspace(0, math.pi, 20_001, dtype=torch.float64)
    a = torch.stack([angles.cos(), angles.sin()], 1)
    grid = torch.einsum("ncab,sa,sb->nsc", form, a, a).norm(dim=-1).amax(1)
    torch.testing.assert_close(largest_curvature(form), grid, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("flat", "quadratic")])
def test_displacement_is_exact_to_second_order(name: str) -> None:
    manifold = make_manifold(name, dim=2, ambient=7)
    frames = manifold.frames(manifold.centre)
    u = unit_sample(50, dim=2, generator=torch.Generator().manual_seed(0))

    def rest(t: float) -> float:
        second = torch.einsum("cab,na,nb->nc", frames.form, t * u, t * u) / 2
        plane = frames.position + t * u @ frames.tangent.T + second @ frames.normal.T
        return float((displace(manifold, frames, t * u) - plane).norm(dim=1).max())

    assert 6 < rest(0.02) / rest(0.01) < 17  # 8 for a third order, 16 where symmetry leaves only the fourth


def test_samples_lie_on_the_manifold_and_repeat_with_their_seed() -> None:
    axes = torch.tensor([1.0, 2.0, 0.5])
    manifold = ellipsoid(2, axes=axes)
    x = sample_around(manifold, manifold.centre, scale=0.3, n=100, kind="ball", seed=1)
    torch.testing.assert_close((x / axes).square().sum(1), torch.ones(100).double())
    assert torch.equal(x, sample_around(manifold, manifold.centre, scale=0.3, n=100, kind="ball", seed=1))
    assert not torch.equal(x, sample_around(manifold, manifold.centre, scale=0.3, n=100, kind="ball", seed=2))


def nodes(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Points [n, 2] and weights of an exact quadrature for polynomials of degree 4 of each kind of sample."""
    if kind == "gaussian":
        x, w = np.polynomial.hermite_e.hermegauss(8)
        grid = np.stack(np.meshgrid(x, x), -1).reshape(-1, 2)
        return grid, np.outer(w, w).ravel() / np.outer(w, w).sum()
    angles = 2 * np.pi * np.arange(16) / 16
    ring = np.stack([np.cos(angles), np.sin(angles)], -1)
    if kind == "shell":
        return ring, np.full(16, 1 / 16)
    r, w = np.polynomial.legendre.leggauss(8)
    r, w = (r + 1) / 2, w * (r + 1) / 2  # density of the radius in a disc is proportional to it
    return (r[:, None, None] * ring).reshape(-1, 2), np.repeat(w / w.sum() / 16, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_the_variance_constants_are_exact_on_a_quadratic_patch(kind: str) -> None:
    manifold, scale = quadratic_patch(2, codim=4, seed=2).rotated(9), 0.7
    frames = manifold.frames(torch.zeros(2))
    u, weights = nodes(kind)
    x = displace(manifold, frames, scale * torch.from_numpy(u)).numpy()
    centred = x - weights @ x
    for basis, expected in zip(
        (frames.tangent, frames.normal), expected_variances(frames.form, scale=scale, kind=kind)
    ):
        seen = weights @ np.square(centred @ basis.numpy()).sum(1)
        assert seen == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_have_the_expected_variances(kind: str) -> None:
    manifold, n = quadratic_patch(3, codim=3, seed=1), 200_000
    frames = manifold.frames(manifold.centre)
    x = sample_around(manifold, manifold.centre, scale=0.2, n=n, kind=kind, seed=0)
    centred = x - x.mean(0)
    for basis, expected in zip((frames.tangent, frames.normal), expected_variances(frames.form, scale=0.2, kind=kind)):
        squares = (centred @ basis).square().sum(1)
        assert abs(float(squares.mean() - expected)) < 4 * float(squares.std()) / math.sqrt(n) + 1e-12


def test_a_shell_on_a_sphere_has_no_normal_variance_and_on_an_ellipsoid_it_has() -> None:
    normal = {}
    for manifold in (sphere(2), ellipsoid(2)):
        frames = manifold.frames(torch.zeros(2))
        x = sample_around(manifold, torch.zeros(2), scale=0.1, n=2000, kind="shell")
        normal[manifold.name] = float(((x - x.mean(0)) @ frames.normal).square().mean())
        expected = float(expected_variances(frames.form, scale=0.1, kind="shell")[1])
        assert normal[manifold.name] == pytest.approx(expected, rel=0.1, abs=1e-12)
    assert normal["sphere"] < 1e-12 < 1e-7 < normal["ellipsoid"]


def test_bad_manifolds_are_refused_in_a_sentence() -> None:
    with pytest.raises(AnisoscopeError, match="did you mean 'sphere'"):
        make_manifold("spere")
    with pytest.raises(AnisoscopeError, match="does not fit into 3 ambient dimensions"):
        make_manifold("flat", dim=4, ambient=3)
    with pytest.raises(AnisoscopeError, match="needs 6 ambient dimensions, but 5"):
        make_manifold("torus", dim=3, ambient=5)
    with pytest.raises(AnisoscopeError, match="at least 1"):
        make_manifold("sphere", dim=0)
    with pytest.raises(AnisoscopeError, match="unknown kind of sampling 'gausian'; did you mean 'gaussian'"):
        sample_around(sphere(2), torch.zeros(2), scale=1, n=3, kind="gausian")
    with pytest.raises(AnisoscopeError, match="do not name points of a sphere of dimension 2"):
        sphere(2).frames(torch.zeros(3))


@pytest.mark.parametrize(
    ("chart", "centre", "words"),
    [
        (lambda w: w[..., :1], [0.0, 0.0], r"a point of shape \(2,\) to one of shape \(1,\)"),
        (lambda w: w.sum(-1), [0.0, 0.0], r"to one of shape \(\)"),
        (lambda w: torch.cat([w**2, w**3, w**2], -1), [0.0], "0 independent directions at its point instead of 1"),
        (lambda w: torch.stack([w.sum(-1)] * 3, -1), [0.3, 0.1], "1 independent directions at its point instead of 2"),
    ],
)
def test_a_chart_without_a_tangent_space_is_refused(chart: Any, centre: list[float], words: str) -> None:
    with pytest.raises(AnisoscopeError, match=words):
        chart_manifold(chart, torch.tensor(centre))
