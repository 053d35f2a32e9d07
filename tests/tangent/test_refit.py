"""Refits without a fold of contexts: they are those of the rows that are left, and they are in every interval."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from anisoscope.capture.gradient_pass import GradientPass
from anisoscope.metrics.tangent import proxy_stability
from anisoscope.numerics.decompositions import fit_directions
from anisoscope.numerics.hashing import FOLDS, even_folds, half_of
from anisoscope.numerics.linalg import orthonormal_columns
from anisoscope.results.quantity import jackknife
from anisoscope.tangent.plan import TangentPlan
from anisoscope.tangent.proxy import Label, StepRows, fit_controls, fit_proxies
from anisoscope.tangent.refit import FitRows, with_refits
from anisoscope.tangent.tangent_study import TangentStudy
from support.gradients import noise
from support.planted_gradients import SITE, found, hashes, site_rows, variant

WIDTH, RANK = 64, 4
PLAN = TangentPlan(rank=RANK, draws=19, proxies=("pca", "semi_nmf"), balanced=False)


def skewed(n: int, context: Tensor, seed: int) -> Tensor:
    """Rows of one spectrum with long tails to one side, part of them common to a context."""
    alone, shared = noise(n, WIDTH, seed=seed), noise(int(context.max()) + 1, WIDTH, seed=seed + 1)[context]
    return (0.8 * alone.exp() + 0.6 * shared) * torch.arange(1, WIDTH + 1).double() ** -0.7


def rows_of(step: int = 0, contexts: int = 40, per: int = 12) -> StepRows:
    rows, number = StepRows(step), torch.arange(contexts).repeat_interleave(per)
    owner = hashes(contexts)[number]
    x = skewed(len(owner), number, 10 + step)
    g = 0.3 * x @ torch.linalg.qr(torch.eye(WIDTH) + 0.3 * noise(WIDTH, WIDTH, seed=3))[0]
    g = g + 0.3 * noise(len(x), WIDTH, seed=4)
    nothing = torch.full_like(owner, -1)
    fit, test = half_of(owner) == 0, half_of(owner) == 1
    rows.add_fit(GradientPass({SITE: site_rows(x[fit], None, owner[fit], nothing[fit])}))
    rows.add_test(GradientPass({SITE: site_rows(x[test], g[test], owner[test], nothing[test])}))
    return rows


def overlap(one: Tensor, two: Tensor) -> float:
    return float((one.double().mT @ two.double()).square().sum() / one.shape[-1])


@pytest.mark.parametrize("method", ["pca", "svd", "semi_nmf", "kmeans", "ica", "random"])
def test_a_refit_is_the_fit_of_the_rows_that_are_left(method: str) -> None:
    number = torch.arange(48).repeat_interleave(10)
    x, fold = skewed(480, number, 1), even_folds(number)
    label = Label(method, RANK)
    fits = {SITE: FitRows.of_rows(x, fold)}
    proxy = with_refits(fits, {label: fit_proxies({SITE: x}, label, seed=0)}, seed=0)[label][SITE]
    if method == "random":
        assert proxy.left_out is None, "directions that were not fitted cannot be refitted"
        return
    assert proxy.left_out is not None and proxy.left_out.shape == (FOLDS, *proxy.basis.shape)
    moved = []
    for j, basis in enumerate(proxy.left_out):
        rest = x[fold != j]
        wanted = orthonormal_columns(fit_directions(rest - rest.mean(0), RANK, method=method).mT)
        torch.testing.assert_close(basis.mT @ basis, torch.eye(basis.shape[1], dtype=torch.float64))
        moved.append(1 - overlap(proxy.basis, basis))
        if method != "kmeans":  # its random start may find other clusters
            assert 1 - overlap(wanted, basis) < 0.02 * (1 - overlap(proxy.basis, wanted)) + 1e-6
    assert max(moved) > 1e-3, "so that the law is not empty"
    assert proxy_stability(proxy.basis.double(), proxy.left_out) == pytest.approx(1 - sum(moved) / FOLDS)


def test_the_next_components_follow_their_refitted_proxy() -> None:
    number = torch.arange(48).repeat_interleave(10)
    x, fold, label = skewed(480, number, 1), even_folds(number), Label("pca", RANK)
    fits, proxies = {SITE: FitRows.of_rows(x, fold)}, fit_proxies({SITE: x}, label, seed=0)
    every = {label: proxies, **fit_controls({SITE: x}, label, proxies, seed=0)}
    made = with_refits(fits, every, seed=0)
    after = made[Label("pca", RANK, control="next")][SITE].left_out
    assert after is not None and made[Label("pca", RANK, control="permuted")][SITE].left_out is None
    for j, basis in enumerate(after):
        rest = x[fold != j].numpy()
        axes = np.linalg.svd(rest - rest.mean(0))[2]
        assert overlap(torch.from_numpy(axes[RANK : 2 * RANK].T.copy()), basis) > 0.99


def by_hand(rows: StepRows) -> tuple[float, list[float], list[float]]:
    """The energy of PCA, without each fold in both halves, and with the directions of all contexts."""
    ((_, fit, test),) = rows.halves()
    assert test.g is not None
    x, g, mine, other = fit.x.numpy(), test.g.numpy(), even_folds(fit.context).numpy(), even_folds(test.context).numpy()

    def axes(x: np.ndarray) -> np.ndarray:
        return np.linalg.svd(x - x.mean(0))[2][:RANK].T

    def energy(Q: np.ndarray, g: np.ndarray) -> float:
        return float(((g @ Q) ** 2).sum() / (g**2).sum())

    Q, left_out = axes(x), [axes(x[mine != j]) for j in range(FOLDS)]
    refitted = [energy(left_out[j], g[other != j]) for j in range(FOLDS)]
    return energy(Q, g), _opened(Q, left_out, g, refitted), [energy(Q, g[other != j]) for j in range(FOLDS)]


def _opened(Q: np.ndarray, left_out: list[np.ndarray], g: np.ndarray, values: list[float]) -> list[float]:
    """The values with the widest swing of a plane in which a tie is not excluded, by a search over its angles."""
    from scipy.stats import f, t

    turns = [q @ (q.T @ Q) - Q @ (Q.T @ q) @ (q.T @ Q) for q in left_out]
    errors, chosen = np.linalg.eigh(7 / 8 * sum(D.T @ D for D in turns))
    swing, pattern = 0.0, np.zeros(FOLDS)
    for error, one in zip(errors, chosen.T, strict=True):
        paths = np.stack([D @ one for D in turns])
        u, v = Q @ one, np.linalg.svd(paths)[2][0]
        angles = np.linspace(0, np.pi, 2000)[:, None]
        energies = ((np.cos(angles) * (g @ u) + np.sin(angles) * (g @ v)) ** 2).sum(1) / (g**2).sum()
        if 1 / (8 * error) < f.ppf(0.95, 2, FOLDS - 1) and np.ptp(energies) > swing:
            swing, pattern = float(np.ptp(energies)), paths @ v - (paths @ v).mean()
    assert swing > 0, "so that the law is not empty"
    pattern = pattern * np.sign(pattern @ np.array(values)) / np.sqrt(7 / 8 * (pattern**2).sum())
    return [*(np.array(values) + swing / t.ppf(0.975, FOLDS - 1) * pattern)]


@pytest.mark.parametrize("fit", ["refit", "frozen"])
def test_intervals_leave_out_a_fold_of_both_halves_and_refit(fit: str) -> None:
    rows = rows_of()
    study = TangentStudy(PLAN)
    records = [*study.measure(rows), *study.finish()]
    value, refitted, fixed = by_hand(rows)
    row = found(records, "gradient_energy", variant=variant(fit=fit))
    assert row["value"] == pytest.approx(value, rel=1e-5)
    assert row["replicates"] == pytest.approx(refitted, abs=5e-2 * float(np.std(refitted)))
    low, high = jackknife(value, refitted, bounds=(0.0, 1.0))
    assert (row["low"], row["high"]) == pytest.approx((low, high), rel=1e-2)
    narrow = jackknife(value, fixed, bounds=(0.0, 1.0))
    assert high - low > 1.1 * (narrow[1] - narrow[0]), "the fit is part of the interval"
    rich = found(records, "gradient_enrichment", variant=variant(fit=fit))
    assert rich["high"] == pytest.approx(row["high"] * WIDTH / RANK)


@pytest.mark.parametrize("fit", ["refit", "frozen"])
def test_shares_next_components_and_other_readings_are_refitted_too(fit: str) -> None:
    study = TangentStudy(PLAN)
    records = [*study.measure(rows_of()), *study.finish()]
    ((_, half, test),) = rows_of().halves()
    assert test.g is not None
    wanted = []
    for j in range(FOLDS):
        x, g = half.x[half.fold != j], test.g[test.fold != j]
        axes, C = torch.linalg.svd(x - x.mean(0))[2][:RANK].mT, g.mT @ g
        rest = C - C.trace() / WIDTH * torch.eye(WIDTH)
        wanted.append(float((axes.mT @ rest @ axes).square().sum() / rest.square().sum()))
    share = found(records, "gradient_share", variant=variant(fit=fit))
    assert share["replicates"] == pytest.approx(wanted, abs=5e-2 * float(np.std(wanted)))
    for name, options in {"gradient_energy": {"control": "next"}, "proxy_stability": {}}.items():
        for reading in ({}, {"coordinates": "standardised"}):
            row = found(records, name, variant=variant(fit=fit, **options, **reading))
            assert 0 < row["value"] < 1
    assert not any(r["metric"] == "proxy_stability" and "control" in r["variant"] for r in records)


def test_a_loaded_study_keeps_the_refits_of_its_frozen_proxies(tmp_path: Any) -> None:
    plan = TangentPlan(rank=RANK, draws=19, proxies=("pca", "semi_nmf"), balanced=False, window="steps:0.3")
    one = TangentStudy(plan, total_steps=10)
    one.measure(rows_of(0))
    window = {0: one.frozen.window_state(0)} if one.frozen is not None else {}
    torch.save(one.state(), tmp_path / "open.pt")
    two = TangentStudy(plan, total_steps=10)
    two.load(torch.load(tmp_path / "open.pt", weights_only=True), window)
    later = [study.measure(rows_of(8)) for study in (one, two)]
    torch.save(two.state(), tmp_path / "closed.pt")
    three = TangentStudy(plan, total_steps=10)
    three.load(torch.load(tmp_path / "closed.pt", weights_only=True), {})
    ends = [
        [found(records, "gradient_energy", variant=variant(fit="frozen"), step=step)[name] for name in ("low", "high")]
        for records, step in ((later[0], 8), (later[1], 8), (three.measure(rows_of(9)), 9))
    ]
    assert ends[1] == pytest.approx(ends[0], rel=1e-9)
    assert all(math.isfinite(end) for end in ends[2])


@pytest.mark.parametrize("contexts", [3, 6, 12])
def test_few_contexts_have_an_energy_and_no_error(contexts: int) -> None:
    records = TangentStudy(PLAN).measure(rows_of(contexts=contexts, per=40))
    row = found(records, "gradient_energy")
    assert math.isfinite(row["value"]) and len(row["replicates"]) == FOLDS


def test_folds_have_equal_size_and_do_not_depend_on_order() -> None:
    for n in (8, 16, 21, 256):
        context = hashes(n)
        fold = even_folds(context)
        sizes = fold.bincount(minlength=FOLDS)
        assert int(sizes.max() - sizes.min()) <= 1
        order = torch.randperm(n, generator=torch.Generator().manual_seed(n))
        assert torch.equal(even_folds(context[order]), fold[order])
        assert torch.equal(even_folds(context.repeat(3)), fold.repeat(3))
