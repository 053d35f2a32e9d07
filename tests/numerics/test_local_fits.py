"""Local PCA and local quadratic fits: against a slow twin, and against curvature that is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.numerics.manifolds import (
    displace,
    fewest_rows,
    fit_groups,
    form_error,
    make_manifold,
    tangent_angle,
    unit_sample,
)


def planted(
    name: str = "quadratic", *, sizes: list[int], scale: float, noise: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, object]:
    """Rows around points of a manifold, in shuffled order, their groups, and the truth."""
    manifold = make_manifold(name, dim=2, ambient=7)
    frames = manifold.frames(manifold.points(len(sizes), seed=3))
    generator = torch.Generator().manual_seed(0)
    group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    group = group[torch.randperm(len(group), generator=generator)]
    u = scale * unit_sample(len(group), 1, dim=2, generator=generator)
    rows = displace(manifold, frames.take(group), u)[:, 0]
    return rows + noise * torch.randn(rows.shape, dtype=rows.dtype, generator=generator), group, frames


def slow_fit(x: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tangent projector, eigenvalues, and the second form as an ambient map, of one group, by SVD and lstsq."""
    x = x - x.mean(0)
    _, sigma, right = np.linalg.svd(x, full_matrices=False)
    T = right[:dim].T
    v = x @ T
    pairs = [(i, j) for i in range(dim) for j in range(i, dim)]
    design = np.column_stack([np.ones(len(x)), v, *(v[:, i] * v[:, j] for i, j in pairs)])
    solved = np.linalg.lstsq(design, x, rcond=None)[0][1 + dim :]
    S = np.zeros((x.shape[1], dim, dim))
    for (i, j), row in zip(pairs, solved, strict=True):
        S[:, i, j] += row
        S[:, j, i] += row
    S = np.einsum("DE,Eab->Dab", np.eye(len(T)) - T @ T.T, S)
    return T @ T.T, sigma**2 / (len(x) - 1), np.einsum("Dab,Ea,Fb->DEF", S, T, T)


def test_all_groups_at_once_equal_one_after_the_other() -> None:
    rows, group, _ = planted(sizes=[40, 15, 200, 12], scale=0.2, noise=0.01)
    fits = fit_groups(rows, group, groups=4, dim=2)
    for g in range(4):
        projector, values, form = slow_fit(rows[group == g].numpy(), 2)
        T = fits.tangent[g].numpy()
        np.testing.assert_allclose(T @ T.T, projector, atol=1e-9)
        assert float(fits.tangent_variance[g]) == pytest.approx(values[:2].sum())
        assert float(fits.normal_variance[g]) == pytest.approx(values[2:].sum())
        np.testing.assert_allclose(np.einsum("Dab,Ea,Fb->DEF", fits.form[g].numpy(), T, T), form, atol=1e-7)


@pytest.mark.parametrize("name", ["sphere", "ellipsoid", "torus", "quadratic", "swiss_roll", "paraboloid"])
def test_tangent_and_curvature_are_recovered_as_the_scale_shrinks(name: str) -> None:
    errors, angles = [], []
    for scale in (0.2, 0.02):
        rows, group, frames = planted(name, sizes=[400] * 10, scale=scale)
        fits = fit_groups(rows, group, groups=10, dim=2)
        errors.append(float(form_error(fits, frames).max()))
        angles.append(float(tangent_angle(fits, frames).max()))
    assert errors[1] < 0.02 and errors[1] < errors[0] / 4
    assert angles[1] < 0.5 and angles[1] < angles[0] / 4


def test_noise_hides_the_curvature_before_the_tangent() -> None:
    rows, group, frames = planted("sphere", sizes=[100] * 20, scale=0.02, noise=0.002)
    fits = fit_groups(rows, group, groups=20, dim=2)
    assert float(tangent_angle(fits, frames).median()) < 5
    assert float(form_error(fits, frames).median()) > 1


def test_a_group_with_too_few_rows_has_no_numbers_and_an_empty_one_does_no_harm() -> None:
    rows, group, frames = planted(sizes=[60, fewest_rows(2) - 1, 0], scale=0.1)
    fits = fit_groups(rows, group, groups=3, dim=2)
    assert fits.usable.tolist() == [True, False, False]
    assert form_error(fits, frames).isnan().tolist() == [False, True, True]
    assert tangent_angle(fits, frames).isnan().tolist() == [False, True, True]
    assert fits.normal_variance.isnan().tolist() == [False, True, True]


def test_a_flat_manifold_has_no_relative_error() -> None:
    rows, group, frames = planted("flat", sizes=[50, 50], scale=0.1)
    fits = fit_groups(rows, group, groups=2, dim=2)
    assert form_error(fits, frames).isnan().all()
    assert float(fits.form.abs().max()) < 1e-9


def test_a_tangent_space_as_wide_as_the_rows_is_refused() -> None:
    with pytest.raises(AnisoscopeError, match="dimension 7 was requested for rows of width 7"):
        fit_groups(torch.randn(20, 7), torch.zeros(20, dtype=torch.long), groups=1, dim=7)
