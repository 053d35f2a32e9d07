"""Subspaces of several sites tested and refitted together: the numbers of each alone, in far fewer operations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from anisoscope.capture.sites.site import Site
from anisoscope.numerics.hashing import FOLDS, even_folds
from anisoscope.results.quantity import jackknife
from anisoscope.stats.moments import GradientMoments
from anisoscope.tangent import refit
from anisoscope.tangent.energy import Asked, EnergyRows, Grouping, SubspaceTest, records_of
from anisoscope.tangent.proxy import Half, Label, fit_controls, fit_proxies, fit_standardised, fit_with_controls
from anisoscope.tangent.refit import FitRows, with_refits
from anisoscope.tangent.ties import Planes, opened, swings_of
from anisoscope.tangent.together import anisotropy_of

D, R, SITE = 16, 3, Site(1, "resid")


def test_anisotropy_of_folds_left_out_and_of_groups_is_that_of_their_moments() -> None:
    moments = []
    for seed in range(2):
        g, number = noise(90, D, seed=seed), torch.arange(90) // 3
        masks = {"a": torch.arange(90) < 30, "b": torch.arange(90) >= 60}
        moments.append(GradientMoments().update(g, context=number, fold=even_folds(number), groups=masks))
    found = anisotropy_of(moments, [0, 5], ["b"])
    for site, mine in enumerate(moments):
        lines = [mine.total, *(mine.total - mine.folds[fold] for fold in (0, 5)), mine.groups["b"]]
        for line, M in enumerate(lines):
            C = M / M.trace()
            torch.testing.assert_close(found.C[site, line], C)
            torch.testing.assert_close(found.whole[site, line], (C - torch.eye(D) / D).square().sum())
            torch.testing.assert_close(found.squares[site, line], C.square().sum())


class Operations(TorchDispatchMode):
    """Counts what is launched."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def half(seed: int, rows: int = 240) -> Half:
    context = torch.arange(rows // 10).repeat_interleave(10)
    nothing = torch.full_like(context, -1)
    x = noise(rows, D, seed=seed) * torch.linspace(3.0, 0.3, D).double()
    return Half(x, x.flip(1) + noise(rows, D, seed=seed + 1), context, torch.arange(rows), nothing, nothing, nothing)


def site_test(seed: int, rows: int = 240) -> tuple[SubspaceTest, list[Asked]]:
    test = half(seed, rows)
    assert test.g is not None
    label = torch.arange(rows) % 3 - 1
    groups = {"masked": label == 1, "frequency:1": label == 0}
    moments = GradientMoments().update(test.g, context=test.context, fold=test.fold, groups=groups)
    energies = EnergyRows(test, [Grouping(["frequency:1", "masked"], label)])
    proxies = with_refits(
        {SITE: FitRows.of_rows(test.x, test.fold)},
        fit_with_controls({SITE: test.x}, Label("pca", R), seed=0),
        seed=0,
    )
    asked = [
        Asked(found[SITE].basis, how, True, 0 if how.control else 9, found[SITE].left_out)
        for how, found in proxies.items()
    ]
    return SubspaceTest(moments, energies, draws=20, seed=0, groups=["masked"]), asked


def same(one: Any, two: Any) -> bool:
    if isinstance(one, float):
        return one == pytest.approx(two, rel=1e-5, abs=1e-9, nan_ok=True)
    return one == pytest.approx(two, rel=1e-5, abs=1e-9, nan_ok=True) if isinstance(one, list) else one == two


def test_sites_tested_together_have_the_records_of_each_alone() -> None:
    """Also where one of them has other rows, and so cannot be in the batch of the others."""
    sites = [site_test(seed, rows) for seed, rows in ((0, 240), (10, 240), (20, 160), (30, 240))]
    together = records_of([test for test, _ in sites], [asked for _, asked in sites])
    for found, (test, asked) in zip(together, sites, strict=True):
        alone = []
        for one in asked:
            how: dict[str, Any] = {"shares": one.shares, "controls": one.controls, "left_out": one.left_out}
            alone += test.records(one.Q, one.label, **how)
        assert [(r["metric"], r["variant"], r["group"]) for r in found] == [
            (r["metric"], r["variant"], r["group"]) for r in alone
        ]
        assert all(same(row[name], other[name]) for row, other in zip(found, alone, strict=True) for name in row)
        assert {"gradient_p", "gradient_share", "proxy_stability", "gradient_ratio"} <= {r["metric"] for r in found}


def test_more_sites_cost_hardly_more_operations() -> None:
    """What a device waits for is launches: eight sites of one shape take about as many as two."""

    def launched(count: int) -> int:
        tests, asked, like = [], [], None
        for _ in range(count):
            test, mine = site_test(0)
            assert test.rows is not None
            test.rows.member = like.member if like is not None else test.rows.member
            like = test.rows
            tests.append(test)
            asked.append(mine)
        with Operations() as seen:
            records_of(tests, asked)
        return seen.count

    two, eight = launched(2), launched(8)
    assert eight < 1.5 * two


def test_members_are_shared_by_sites_with_the_same_labels_alone() -> None:
    one, two, other = half(0), half(10), half(0)
    first = EnergyRows(one)
    assert EnergyRows(two, like=first).member is first.member
    moved = replace(other, context=other.context.flip(0))
    assert EnergyRows(moved, like=first).member is not first.member


def test_planes_are_those_of_the_singular_vectors() -> None:
    Q = torch.linalg.qr(noise(D, R, seed=1))[0]
    refits = torch.stack([torch.linalg.qr(Q + 0.2 * noise(D, R, seed=5 + j))[0] for j in range(FOLDS)])
    refits[3] = torch.nan
    found = Planes.of(Q[None], refits[None])
    live = [j for j in range(FOLDS) if j != 3]
    turns = [(q - Q @ (Q.T @ q)) @ (q.T @ Q) for q in refits[live]]
    errors, chosen = np.linalg.eigh(6 / 7 * sum((D_.T @ D_).numpy() for D_ in turns))
    assert found.errors[0].tolist() == pytest.approx(errors.tolist())
    for i, one in enumerate(chosen.T):
        paths = np.stack([D_.numpy() @ one for D_ in turns])
        v = np.linalg.svd(paths)[2][0]
        assert abs(float(found.directions[0, :, R + i] @ torch.from_numpy(v))) == pytest.approx(1.0)
        assert np.abs(found.turns[0, i, live].numpy()) == pytest.approx(np.abs(paths @ v))
        assert math.isnan(found.turns[0, i, 3])


def test_a_plane_in_which_a_tie_is_excluded_widens_nothing() -> None:
    values, turns = np.linspace(0.4, 0.6, FOLDS), np.linspace(-1, 1, FOLDS)[None]
    closed = opened(values, swings=np.array([0.5]), errors=np.array([1e-3]), turns=turns)
    assert closed.tolist() == values.tolist()
    wide = opened(values, swings=np.array([0.5]), errors=np.array([1.0]), turns=turns)
    before, after = (jackknife(0.5, list(x), bounds=(None, None)) for x in (values, wide))
    assert (after[1] - 0.5) ** 2 >= (before[1] - 0.5) ** 2 + 0.5**2 - 1e-9
    assert float(swings_of(np.array(0.5), np.array(0.5), np.array(0.2))) == pytest.approx(0.4)


@pytest.mark.parametrize("room", [0, 1 << 28])
def test_refits_of_several_sites_are_those_of_each_alone(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(refit._BYTES, "cpu", room)
    sites = {Site(i, "resid"): half(10 * i, 240 if i < 4 else 200) for i in range(1, 5)}
    fits = {site: FitRows.of_rows(one.x, even_folds(one.context)) for site, one in sites.items()}
    for label in (Label("semi_nmf", R), Label("pca", R)):
        rows = {site: one.x for site, one in fits.items()}
        found = {label: fit_proxies(rows, label, seed=0)}
        found |= fit_controls(rows, label, found[label], seed=0)
        together = with_refits(fits, found, seed=0)
        for site, mine in fits.items():
            alone = with_refits({site: mine}, {how: {site: p[site]} for how, p in found.items()}, seed=0)
            for how, proxies in together.items():
                one, two = proxies[site].left_out, alone[how][site].left_out
                assert (one is None) == (two is None) == (how.control == "permuted")
                if one is not None and two is not None:
                    overlap = (one.mT @ two).square().sum((-2, -1)) / R
                    assert float((1 - overlap).abs().max()) < 1e-9


@pytest.mark.parametrize("room", [0, 1 << 28])  # as on the host, and as on a device
def test_refits_of_several_sets_are_those_of_each_alone(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(refit._BYTES, "cpu", room)
    fits = {Site(i, "resid"): FitRows.of_rows(one.x, one.fold) for i, one in ((1, half(10)), (2, half(20)))}
    rows = {site: mine.x for site, mine in fits.items()}
    plain, scaled = ([Label(name, R, coordinates=at) for name in ("semi_nmf", "pca")] for at in ("", "standardised"))
    found = {label: fit_proxies(rows, label, seed=0) for label in plain}
    found |= fit_controls(rows, plain[0], found[plain[0]], seed=0)
    sets = [(fits, found), refit.standardised_set(fits, fit_standardised(rows, scaled, seed=0))]
    refits = refit.refits_of(sets, seed=0)
    monkeypatch.setitem(refit._BYTES, "cpu", 0)
    for (mine, proxies), together in zip(sets, refits, strict=True):
        alone = with_refits(mine, proxies, seed=0)
        assert list(together) == list(proxies) == list(alone)
        for label in (label for label in together if label.control != "permuted"):
            for site in rows:
                one, two = together[label][site].left_out, alone[label][site].left_out
                assert one is not None and two is not None
                overlap = (one.mT @ two).square().sum((-2, -1)) / R
                assert float((1 - overlap).abs().max()) < 1e-9
