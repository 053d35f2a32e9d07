"""Repairs and probes: known answers, other people's implementations, and what a repair can and cannot change."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.numerics.linear_fits import (
    REPAIRS,
    choose_probe,
    directions_of,
    fit_centroids,
    fit_probe,
    fit_repair,
    fit_repairs,
)


def cloud(n: int = 600, d: int = 8, *, seed: int = 0, mean: float = 5.0) -> torch.Tensor:
    """Rows with a spectrum over two decades, turned away from the coordinates, and a mean."""
    generator = torch.Generator().manual_seed(seed)
    turn, _ = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
    rows = torch.randn(n, d, generator=generator, dtype=torch.float64) * torch.logspace(1, -1, d, dtype=torch.float64)
    return rows @ turn + mean


def covariance(x: torch.Tensor) -> torch.Tensor:
    return torch.cov(x.T, correction=0)


def classes_of(x: torch.Tensor, count: int = 3, *, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    white = fit_repair("whitened", x, shrinkage=0.0)(x)
    logits = white @ torch.randn(x.shape[1], count, generator=generator, dtype=torch.float64)
    return torch.multinomial(torch.softmax(logits, 1), 1, generator=generator).squeeze(1)


# -- repairs -----------------------------------------------------------------------------------------------------------


def test_raw_changes_nothing_and_mean_removal_only_the_mean() -> None:
    x = cloud()
    assert torch.equal(fit_repair("raw", x)(x), x)
    moved = fit_repair("mean", x)(x)
    assert torch.allclose(moved.mean(0), torch.zeros(8, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(covariance(moved), covariance(x), atol=1e-10)


def test_whitened_fit_rows_have_mean_zero_and_covariance_one() -> None:
    x = cloud()
    white = fit_repair("whitened", x, shrinkage=0.0)(x)
    assert torch.allclose(white.mean(0), torch.zeros(8, dtype=torch.float64), atol=1e-11)
    assert torch.allclose(covariance(white), torch.eye(8, dtype=torch.float64), atol=1e-9)
    other = fit_repair("whitened", x, shrinkage=0.0)(cloud(seed=3))
    assert not torch.allclose(covariance(other), torch.eye(8, dtype=torch.float64), atol=1e-2), (
        "of other rows it is not"
    )


def test_zca_turns_nothing_it_is_the_symmetric_whitening() -> None:
    repair = fit_repair("whitened", cloud(), shrinkage=0.0)
    assert repair.matrix is not None
    assert torch.allclose(repair.matrix, repair.matrix.T, atol=1e-12)
    assert float(torch.linalg.eigvalsh(repair.matrix).min()) > 0


def test_all_but_the_top_removes_exactly_the_top_directions() -> None:
    x = cloud()
    _, vectors = torch.linalg.eigh(covariance(x))
    kept = fit_repair("all_but_top", x, directions=2)(x)
    values = torch.linalg.eigvalsh(covariance(kept))
    assert torch.allclose(values[:2], torch.zeros(2, dtype=torch.float64), atol=1e-10)
    assert torch.allclose(values[2:], torch.linalg.eigvalsh(covariance(x))[:6], rtol=1e-9)
    assert torch.allclose(kept @ vectors[:, -2:], torch.zeros(len(x), 2, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(kept @ vectors[:, :-2], (x - x.mean(0)) @ vectors[:, :-2], atol=1e-9), "and nothing else"


def test_a_direction_without_variance_is_not_blown_up() -> None:
    x = cloud()
    flat = torch.cat([x, x[:, :1] * 0 + 3.0, x[:, :1] + x[:, 1:2]], dim=1)  # one constant column, one that repeats
    for shrinkage in (0.0, None):
        repair = fit_repair("whitened", flat, shrinkage=shrinkage)
        assert repair.removed == 2
        assert float(repair(flat).abs().max()) < 50
    values = torch.linalg.eigvalsh(covariance(fit_repair("whitened", flat, shrinkage=0.0)(flat)))
    assert torch.allclose(values[:2], torch.zeros(2, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(values[2:], torch.ones(8, dtype=torch.float64), atol=1e-8)


def test_rounding_of_float32_rows_is_no_direction() -> None:
    x = cloud().float()
    x -= x.mean(1, keepdim=True)  # as a layer norm leaves them: one direction empty but for rounding
    repair = fit_repair("whitened", x, shrinkage=0.0)
    assert repair.removed == 1
    assert fit_repair("whitened", cloud().float(), shrinkage=0.0).removed == 0, "a real small direction stays"


def test_more_directions_than_rows_is_survived_by_shrinkage() -> None:
    x = cloud(n=6)
    white = fit_repair("whitened", x)(x)
    assert bool(white.isfinite().all())
    assert int((torch.linalg.eigvalsh(covariance(white)) > 1e-9).sum()) == 5


def test_half_precision_rows_are_promoted() -> None:
    x = cloud().bfloat16()
    for name in REPAIRS:
        found, wanted = fit_repair(name, x)(x), fit_repair(name, x.double())(x.double())
        assert found.dtype == torch.float64
        if name != "whitened":  # in bfloat16 the small directions are rounding, and it says so
            assert torch.allclose(found, wanted, atol=1e-9)


@pytest.mark.parametrize("rows", [torch.ones(1, 4), torch.ones(4), torch.full((5, 4), float("nan"))])
def test_one_row_or_no_number_is_refused(rows: torch.Tensor) -> None:
    with pytest.raises(AnisoscopeError, match=r"expected at least two rows|not all finite"):
        fit_repair("mean", rows)


def test_words_and_numbers_that_make_no_repair_are_refused() -> None:
    with pytest.raises(AnisoscopeError, match="did you mean 'whitened'"):
        fit_repair("whiten", cloud())
    with pytest.raises(AnisoscopeError, match="fewer than the width"):
        fit_repair("all_but_top", cloud(), directions=8)
    with pytest.raises(AnisoscopeError, match="from 0 to 1"):
        fit_repair("whitened", cloud(), shrinkage=2.0)
    assert directions_of(768, None) == 7


def test_the_scale_gives_fit_rows_their_mean_norm_back() -> None:
    x = cloud()
    for repair in fit_repairs(x).values():
        norms = torch.linalg.vector_norm(repair(x, rescaled=True), dim=1).mean()
        assert float(norms) == pytest.approx(float(torch.linalg.vector_norm(x, dim=1).mean()), rel=1e-12)


def test_shrinkage_moves_eigenvalues_towards_their_median() -> None:
    x = cloud()
    values, vectors = torch.linalg.eigh(covariance(x))
    white = fit_repair("whitened", x, shrinkage=0.25)(x)
    shrunk = 0.75 * values + 0.25 * values.flip(0).median()
    assert torch.allclose(covariance(white @ vectors).diag(), values / shrunk, rtol=1e-9)
    assert fit_repair("whitened", x).shrinkage == pytest.approx(8 / 608)


def test_one_huge_direction_does_not_keep_the_others_from_being_whitened() -> None:
    x, _ = rogue(400, seed=0)
    small = covariance(fit_repair("whitened", x)(x))[1:, 1:]
    assert torch.allclose(small, torch.eye(19, dtype=torch.float64), atol=0.1)
    towards_mean = covariance(x).diag() * 0.95 + 0.05 * covariance(x).diag().mean()
    assert float((covariance(x).diag() / towards_mean)[1:].max()) < 1e-5, "as shrinking towards the mean would"


# -- probes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [1e-4, 1e-2, 1.0])
def test_the_probe_is_that_of_scikit_learn(penalty: float) -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    x = cloud(n=200)
    y = classes_of(x)
    mine = fit_probe(x, y, classes=3, penalty=penalty, tolerance=1e-16, steps=500)
    variance = float(covariance(x).trace()) / 8
    model = linear.LogisticRegression(C=1 / (penalty * variance * 200), tol=1e-10, max_iter=20_000)
    centred = (x - x.mean(0)).numpy()  # its intercept is free too, but a large mean slows it down
    theirs = model.fit(centred, y.numpy()).predict_proba(centred)
    assert np.abs(torch.softmax(mine.logits(x), 1).numpy() - theirs).max() < 2e-5
    assert mine.excess < 1e-12


def test_the_gradient_of_the_penalised_loss_vanishes_at_the_probe() -> None:
    x = cloud(n=300).requires_grad_(False)
    y = classes_of(x)
    probe = fit_probe(x, y, classes=3, penalty=1e-3, tolerance=1e-18, steps=500)
    weight, bias = probe.weight.clone().requires_grad_(), probe.bias.clone().requires_grad_()
    variance = float(covariance(x).trace()) / 8
    loss = torch.nn.functional.cross_entropy(x @ weight + bias, y) + 0.5e-3 * variance * weight.square().sum()
    loss.backward()
    assert float(weight.grad.abs().max()) < 1e-6  # type: ignore[union-attr]
    assert float(bias.grad.abs().max()) < 1e-7  # type: ignore[union-attr]


def test_without_a_penalty_no_invertible_repair_changes_a_linear_probe() -> None:
    x = cloud()
    y = classes_of(x)

    def probabilities(name: str, penalty: float) -> torch.Tensor:
        rows = fit_repair(name, x, shrinkage=0.0)(x)
        probe = fit_probe(rows, y, classes=3, penalty=penalty, tolerance=1e-16, steps=1000)
        return torch.softmax(probe.logits(rows), 1)

    free = {name: probabilities(name, 0.0) for name in REPAIRS}
    assert torch.allclose(free["raw"], free["mean"], atol=1e-6)
    assert torch.allclose(free["raw"], free["whitened"], atol=1e-5)
    assert not torch.allclose(free["raw"], free["all_but_top"], atol=1e-2), "what is removed cannot be read"
    held = {name: probabilities(name, 0.1) for name in ("raw", "mean", "whitened")}
    assert torch.allclose(held["raw"], held["mean"], atol=1e-6), "the intercept is free: a shift changes nothing"
    assert not torch.allclose(held["raw"], held["whitened"], atol=1e-2), "a penalty sees the difference"


def test_a_common_factor_changes_nothing() -> None:
    x = cloud()
    y = classes_of(x)
    one, two = (
        fit_probe(rows, y, classes=3, penalty=1e-2, tolerance=1e-16, steps=500).logits(rows) for rows in (x, 1000 * x)
    )
    assert torch.allclose(one, two, atol=1e-5)


def rogue(n: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels in small directions beside one huge one that knows nothing."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 20, generator=generator, dtype=torch.float64)
    y = (x[:, 1:4].sum(1) > 0).long()
    x[:, 0] *= 1e4
    return x, y


def test_a_rogue_dimension_hides_labels_from_a_penalised_probe_and_whitening_brings_them_back() -> None:
    (x, y), (other, wanted) = rogue(400, seed=0), rogue(2000, seed=1)
    repairs = fit_repairs(x, directions=1, shrinkage=0.0)

    def accuracy(name: str, penalty: float) -> float:
        probe = fit_probe(repairs[name](x), y, classes=2, penalty=penalty, steps=300)
        return float(probe.hits(repairs[name](other), wanted).mean())

    assert accuracy("raw", 0.01) < 0.65
    assert accuracy("whitened", 0.01) > 0.95
    assert accuracy("all_but_top", 0.01) > 0.95
    assert accuracy("raw", 1e-9) > 0.95, "it is the penalty: a weak enough one finds them in raw rows too"


def test_a_label_along_the_top_direction_is_lost_with_it() -> None:
    x, _ = rogue(400, seed=0)
    y = (x[:, 0] > 0).long()
    repairs = fit_repairs(x, directions=1)
    hits = {n: float(fit_probe(r(x), y, classes=2, penalty=1e-4).hits(r(x), y).mean()) for n, r in repairs.items()}
    assert hits["raw"] > 0.97
    assert hits["all_but_top"] < 0.7


def test_a_rogue_dimension_blinds_the_cosine_probe_and_its_removal_helps() -> None:
    (x, y), (other, wanted) = rogue(400, seed=0), rogue(2000, seed=1)
    repairs = fit_repairs(x, directions=1)
    hits = {n: float(fit_centroids(r(x), y, classes=2).hits(r(other), wanted).mean()) for n, r in repairs.items()}
    assert max(hits["raw"], hits["mean"]) < 0.6
    assert min(hits["all_but_top"], hits["whitened"]) > 0.9


def test_the_penalty_is_chosen_on_held_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 40, generator=generator, dtype=torch.float64)
    held = torch.arange(400) % 4 == 0
    noise = torch.randint(0, 2, (400,), generator=generator)
    assert choose_probe(x, noise, held, classes=2).penalty >= 0.1, "labels that are chance want a strong one"
    clear = (x[:, 0] + x[:, 1] > 0).long()
    assert choose_probe(x, clear, held, classes=2).penalty < 0.1


def test_a_probe_says_what_is_wrong_with_its_rows() -> None:
    x, y = cloud(n=10), torch.zeros(10, dtype=torch.int64)
    with pytest.raises(AnisoscopeError, match="expected 0 to 1"):
        fit_probe(x, y + 2, classes=2)
    with pytest.raises(AnisoscopeError, match="expected n×d and n"):
        fit_probe(x, y[:4], classes=2)
    with pytest.raises(AnisoscopeError, match="not all finite"):
        fit_probe(x * float("inf"), y, classes=2)
    with pytest.raises(AnisoscopeError, match="penalty"):
        fit_probe(x, y, classes=2, penalty=-1.0)
