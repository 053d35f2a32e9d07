"""Gradients on manifolds: orders of Eq. 9, 10, 11 for any manifold and signal, the loop, pinning."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.curvature import pinning_distance, pinning_slope, tangent_variance_share
from anisoscope.numerics.manifolds import Manifold, chart_manifold, displace, flat_space, make_manifold, quadratic_patch
from anisoscope.studies.curvature.gradients import (
    ORDERS,
    SIGNALS,
    _gradients,
    gradient_ladders,
    gradient_orders,
    loop_courses,
    pinned_embeddings,
)

SCALES = tuple(np.geomspace(1e-3, 0.03, 6).tolist())
CURVED = ("sphere", "ellipsoid", "paraboloid", "swiss_roll", "torus")
SMALL = {"scales": SCALES, "samples": 512, "replicates": 6}


def parabola() -> Manifold:
    return chart_manifold(lambda w: torch.cat([w, w.square()], -1), torch.zeros(1), name="parabola")


def saddle() -> Manifold:
    return chart_manifold(lambda w: torch.cat([w, w[..., :1] * w[..., 1:]], -1), torch.zeros(2))


def helix() -> Manifold:
    """A curve in R³, which bends and turns out of its own plane: ‖II‖ = r / (r² + h²)."""
    return chart_manifold(lambda w: torch.cat([w.cos(), w.sin(), 0.5 * w], -1), torch.tensor([0.7]))


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize(
    "manifold",
    [
        *(make_manifold(name, dim=2, ambient=8) for name in CURVED),
        quadratic_patch(4, codim=11, seed=3).rotated(30),
        saddle().rotated(12),
        helix(),
    ],
    ids=lambda manifold: f"{manifold.name}-{manifold.dim}-{manifold.ambient}",
)
def test_row_by_row_the_orders_are_those_of_the_paper_for_every_signal(manifold: Manifold, signal: str) -> None:
    found = gradient_orders(manifold, signal, **SMALL)
    for of, order in ORDERS.items():
        slope = found[of, "rows"].slope
        assert slope.value == pytest.approx(order, abs=0.05) and slope.low < order + 0.05 and slope.high > order - 0.05


@pytest.mark.parametrize(
    "manifold", [make_manifold("quadratic", dim=3, ambient=9), make_manifold("sphere", dim=2, ambient=5), helix()]
)
def test_of_the_mean_gradient_signals_leave_different_orders(manifold: Manifold) -> None:
    found = {signal: gradient_orders(manifold, signal, **SMALL) for signal in SIGNALS}
    for signal in ("noise", "network"):
        for of, order in ORDERS.items():
            slope = found[signal][of, "mean"].slope
            assert slope.value == pytest.approx(order, abs=4 * slope.sd / math.sqrt(6) + 0.05), (signal, of)
    assert found["constant"]["tangent", "mean"].vanishes and not found["constant"]["normal", "mean"].vanishes
    assert found["linear"]["normal", "mean"].vanishes and not found["linear"]["tangent", "mean"].vanishes
    assert found["constant"]["ratio", "mean"].vanishes, "a ratio of which a part vanishes"
    words = [str(found["constant"][of, "mean"]) for of in ("tangent", "normal")]
    assert "vanishes" in words[0] and "grows as t^2.0" in words[1]
    assert {signal: found[signal]["normal", "mean"].sampled for signal in ("constant", "noise", "network")} == {
        "constant": False, "noise": True, "network": False
    }  # fmt: skip


def test_a_mean_that_is_sampling_error_is_called_so() -> None:
    """On a minimal surface E[II(u, u)] = 0: a constant signal leaves a normal part of order 1/√n only."""
    found = gradient_orders(saddle().rotated(6), "constant", **SMALL)["normal", "mean"]
    assert found.sampled and "sampling error" in str(found)
    assert found.tightness.value == pytest.approx(math.sqrt(2 / 512), rel=0.5), "256 independent pairs"
    bowl = chart_manifold(lambda w: torch.cat([w, w.square().sum(-1, keepdim=True)], -1), torch.zeros(2))
    assert not gradient_orders(bowl, "constant", **SMALL)["normal", "mean"].sampled


def test_a_signal_of_ones_own_is_measured_like_the_named_ones() -> None:
    def kink(u: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
        return u[:, 0].relu()  # neither even nor odd: nothing cancels

    def square(u: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
        return u.square()  # even: no tangent part is left

    found = gradient_orders(make_manifold("ellipsoid", dim=3, ambient=20), kink, **SMALL)
    assert {key: round(one.slope.value) for key, one in found.items()} == {
        (of, per): order for of, order in ORDERS.items() for per in ("mean", "rows")
    }
    assert gradient_orders(saddle(), square, **SMALL)["tangent", "mean"].vanishes


@pytest.mark.parametrize("kind", ["gaussian", "ball"])
@pytest.mark.parametrize("name", ["sphere", "swiss_roll", "quadratic"])
def test_no_mean_gradient_exceeds_its_bound_and_some_reach_it(name: str, kind: str) -> None:
    ladders = gradient_ladders(make_manifold(name, dim=2, ambient=7), SIGNALS, kind=kind, **SMALL)
    for ladder in ladders.values():
        for of in ("tangent", "normal"):
            assert ladder.highest(of).max() < 1.01
    one = gradient_orders(helix(), "linear", kind=kind, **SMALL)["tangent", "mean"].tightness
    assert one.value == pytest.approx(1, abs=1e-3), "g ∝ u in one dimension: Cauchy–Schwarz is an equality"
    noise = ladders["noise"].tightness("tangent") * math.sqrt(SMALL["samples"])  # type: ignore[call-overload]
    assert noise.mean() == pytest.approx(1, abs=0.3), "independent noise cancels down to 1/√n of the bound"


def test_the_parts_are_those_that_autograd_and_plain_sums_give() -> None:
    manifold = make_manifold("ellipsoid", dim=2, ambient=5)
    frames, generator = manifold.frames(manifold.centre), torch.Generator().manual_seed(0)
    seen: list[tuple[Tensor, Tensor]] = []

    def signal(u: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
        seen.append((y, torch.stack([u[:, 0].exp(), u[:, 1]], 1)))
        return seen[-1][1]

    ladder = gradient_ladders(manifold, {"own": signal}, scales=(0.1,), samples=64, replicates=1)["own"]
    y, g = seen[0]
    W = torch.zeros(2, 5, dtype=torch.float64, requires_grad=True)
    ((y @ W.T) * g).sum(1).mean().backward()  # dL/d(Wy) of every row is g over n
    assert W.grad is not None
    size = math.sqrt(sum(float(row @ row) for row in g) / 64)
    for of, basis in (("tangent", frames.tangent), ("normal", frames.normal)):
        by_hand = float((W.grad @ basis).square().sum()) ** 0.5 / size
        assert ladder.mean[of][0, 0] == pytest.approx(by_hand, rel=1e-12)
        squares = [float(a @ a) * float((b @ basis) @ (b @ basis)) for a, b in zip(g, y, strict=True)]
        assert ladder.rows[of][0, 0] == pytest.approx(math.sqrt(sum(squares) / 64) / size, rel=1e-12)
    u = torch.randn(8, 2, dtype=torch.float64, generator=generator)
    whole = displace(manifold, frames, 1e-4 * u)  # the counter-test: without centring both parts are of order 0
    raw = (whole.mean(0) @ frames.tangent).norm(), (whole.mean(0) @ frames.normal).norm()
    assert min(map(float, raw)) > 0.1


def test_on_the_parabola_the_mean_is_normal_and_the_rows_are_tangent() -> None:
    ladder = gradient_ladders(parabola(), {"constant": SIGNALS["constant"]}, **SMALL)["constant"]
    assert (ladder.mean["tangent"] <= ladder.floor).all(), "exactly 0 up to rounding"
    second = (ladder.scales / 2) ** 2  # t is in units of 1/κ = ½, x = (u, u²)
    np.testing.assert_allclose(ladder.mean["normal"].mean(0), second, rtol=0.1)
    share = ladder.rows["tangent"] ** 2 / (ladder.rows["tangent"] ** 2 + ladder.rows["normal"] ** 2)
    assert (share > 1 - 10 * ladder.scales**2).all()


def test_the_flat_space_has_no_normal_gradient() -> None:
    found = gradient_orders(flat_space(3).rotated(9), "network", **SMALL)
    assert found["normal", "mean"].vanishes and found["normal", "rows"].vanishes
    assert math.isnan(found["normal", "rows"].slope.value) and not found["tangent", "mean"].vanishes


def test_intervals_of_slopes_cover_the_truth() -> None:
    manifold, covered = saddle(), 0
    for seed in range(30):
        sizes = {"scales": SCALES, "samples": 64, "replicates": 6, "seed": seed}
        slope = gradient_orders(manifold, "noise", **sizes)["normal", "mean"].slope
        covered += slope.low <= 2 <= slope.high
    assert covered >= 25  # of 30 intervals at 95 %, fewer cover with probability 0.003


@pytest.mark.parametrize(
    ("signal", "words"),
    [
        ("constand", "did you mean 'constant'"),
        (3.0, "the signal is float; expected one of"),
        (lambda u, y, generator: u[:5], "expected one row for each of the 512 rows"),
        (lambda u, y, generator: 0 * u, "zero for every row"),
        (lambda u, y, generator: u / 0, "not finite"),
    ],
)
def test_wrong_signals_are_refused_in_a_sentence(signal: object, words: str) -> None:
    with pytest.raises(AnisoscopeError, match=words):
        gradient_orders(saddle(), signal, **SMALL)  # type: ignore[arg-type]
    for few in ({"samples": 2}, {"replicates": 1}, {"scales": ()}, {"scales": (0.0, 0.1, 0.2)}):
        with pytest.raises(AnisoscopeError, match="give no slope with an interval"):
            gradient_orders(parabola(), "linear", **(SMALL | few))
    with pytest.raises(AnisoscopeError, match="no direction is normal to it"):
        gradient_orders(flat_space(2), "noise", **SMALL)


# -- the loop ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2])
def test_training_on_tangent_labels_draws_the_activations_into_the_tangent(layers: int) -> None:
    manifold = make_manifold("quadratic", dim=2, ambient=8)

    def course(labels: str, update: str) -> np.ndarray:
        sizes = {"layers": layers, "steps": 300, "runs": 6, "seed": 1}
        return loop_courses(manifold, labels=labels, update=update, **sizes).shares  # type: ignore[arg-type]

    learned, control, noise = course("tangent", "all"), course("tangent", "random"), course("noise", "all")
    assert learned[:, -1].min() > 0.75 > learned[:, 0].max()
    assert learned[:, -1].mean() - control[:, -1].mean() > 0.2
    assert abs(noise[:, -1].mean() - noise[:, 0].mean()) < 0.2, "nothing to learn, nowhere to go"
    assert course("normal", "all")[:, -1].mean() < noise[:, 0].mean() - 0.1, "what the labels say is reinforced"
    np.testing.assert_array_equal(learned[:, 0], control[:, 0])


def test_the_updates_are_the_gradients_of_half_the_squared_error() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (5, 3), (3, 4), (7, 5), (7, 4)
    W, V, x, z = (torch.randn(2, *shape, dtype=torch.float64, generator=generator) for shape in shapes)
    (one,) = _gradients([W @ V], x, z)
    torch.testing.assert_close(one, x.mT @ (x @ W @ V - z) / 7)
    first, second = _gradients([W, V], x, z)
    hidden = torch.tanh(x @ W)
    error = (hidden @ V - z) / 7
    torch.testing.assert_close(second, hidden.mT @ error)
    torch.testing.assert_close(first, x.mT @ ((error @ V.mT) * (1 - hidden.square())))


def test_the_share_is_that_of_the_activations_of_both_halves_of_the_inputs() -> None:
    rows, weight = torch.tensor([[2.0, 1.0], [-2.0, -1.0]]).double() + 5, torch.tensor([[1.0], [3.0]]).double()
    tangent = torch.tensor([[1.0], [0.0]]).double()
    assert tangent_variance_share(weight, rows, tangent) == pytest.approx(4 / (4 + 9))


# -- pinning -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimiser", "sign"), [("adam", -1), ("sgd", 1)])
def test_whether_frequent_types_are_pinned_depends_on_the_optimiser(optimiser: str, sign: int) -> None:
    found = pinned_embeddings(48, zipf=1.0, optimiser=optimiser, steps=500, runs=3, seed=0)
    assert all(math.copysign(1, slope) == sign for slope in found.slopes("late"))
    assert found.drawn.sum(1).tolist() == [501 * 64] * 3 and set(found.distance) == {"all", "late"}


def test_the_distance_is_that_of_plain_sums_and_equal_frequencies_have_no_slope() -> None:
    tables = torch.randn(9, 2, 4, 3, generator=torch.Generator().manual_seed(0)).double().cumsum(0)
    by_hand = np.empty((2, 4))
    for i in range(2):
        for j in range(4):
            path = tables[:, i, j].numpy()
            by_hand[i, j] = math.sqrt(np.mean([((step - path.mean(0)) ** 2).sum() for step in path]))
    np.testing.assert_allclose(pinning_distance(tables).numpy(), by_hand, rtol=1e-12)
    assert math.isnan(pinning_slope(torch.ones(5), torch.full((5,), 0.2)))
