"""Intrinsic dimension on clouds of known dimension: every estimator within the error that it states, and where not."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

import anisoscope
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.dimension import (
    DIMENSIONS,
    ESTIMATORS,
    SHAPE_ERROR,
    SIZES,
    calibrated_dimension,
    dimension_spread,
    expected_dimension,
    gride,
    in_table,
    levina_bickel,
    stated_error,
    two_nn,
    two_nn_bias,
)
from anisoscope.metrics.engine.folds import Neighbours

ROWS = 2048
TRUE = (2, 5, 10, 20, 50)
WAYS: dict[str, Callable[[Neighbours], float]] = {
    "two_nn": lambda graph: two_nn.function(graph),
    "two_nn:method=ml": lambda graph: two_nn.function(graph, method="ml"),
    "levina_bickel": lambda graph: levina_bickel.function(graph),
    **{f"gride:scale={k}": (lambda graph, k=k: gride.function(graph, scale=k)) for k in (1, 2, 4, 8)},  # type: ignore[misc]
}


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def embedded(rows: Tensor, width: int, *, seed: int = 0) -> Tensor:
    """The same cloud, turned into a space of more dimensions."""
    basis, _ = torch.linalg.qr(normal(width, rows.shape[1], seed=seed))
    return rows @ basis.T


def flat(d: int, seed: int) -> Tensor:
    return embedded(normal(ROWS, d, seed=seed), 100)


def sphere(d: int, seed: int) -> Tensor:
    rows = normal(ROWS, d + 1, seed=seed)
    return embedded(rows / rows.norm(dim=1, keepdim=True), 100)


def curved(d: int, seed: int) -> Tensor:
    """A flat cloud bent by sines of random directions."""
    rows = normal(ROWS, d, seed=seed)
    bent = 0.5 * torch.sin(rows @ normal(d, d, seed=7) / d**0.5)
    return embedded(torch.cat([rows, bent], 1), 200)


def noisy(d: int, seed: int) -> Tensor:
    return flat(d, seed) + 1e-5 * normal(ROWS, 100, seed=seed + 100)


def doubled(d: int, seed: int) -> Tensor:
    """Half as many rows again, all of them copies."""
    rows = flat(d, seed)
    return torch.cat([rows, rows[: ROWS // 2]])


def far(d: int, seed: int) -> Tensor:
    """float32 rows about a mean of norm 3000."""
    mean = normal(100, seed=9)
    return (flat(d, seed) + 3000.0 * mean / mean.norm()).float()


def graph_of(rows: Tensor) -> Neighbours:
    return Neighbours.of(rows, 20)[0]


@pytest.mark.parametrize("d", TRUE)
@pytest.mark.parametrize("shape", [flat, sphere, curved, noisy, doubled, far], ids=lambda shape: shape.__name__)
def test_every_estimator_stays_within_its_stated_error(shape: Callable[[int, int], Tensor], d: int) -> None:
    for seed in range(2):
        graph = graph_of(shape(d, seed))
        assert len(graph) == ROWS, "copies are left out"
        for name, way in WAYS.items():
            expected, error = expected_dimension(d, ROWS, estimator=name), stated_error(d, ROWS, estimator=name)
            assert way(graph) == pytest.approx(expected, abs=error), name


@pytest.mark.parametrize("d", TRUE)
def test_the_calibrated_two_nn_finds_the_true_dimension_where_the_plain_one_does_not(d: int) -> None:
    """Within 15 % for single clouds, and the mean over clouds within 5 %."""
    graphs = [graph_of(flat(d, seed)) for seed in range(4)]
    for method in ("slope", "ml"):
        found = [two_nn.function(graph, method=method, calibrated=True) for graph in graphs]
        assert found == pytest.approx([d] * 4, rel=0.15)
        assert sum(found) / 4 == pytest.approx(d, rel=0.05)
    plain = sum(two_nn.function(graph) for graph in graphs) / 4
    assert d < 20 or plain < 0.9 * d, "or there would be nothing to calibrate"


def test_copies_and_a_mean_in_half_precision_break_what_is_not_guarded() -> None:
    """Counter-test: with copies left in there is no dimension, and bf16 rounds a far cloud to a lattice."""
    rows = doubled(5, 0)
    near = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(torch.inf).sort(1).values
    naive = 1.0 / float((near[:, 1] / near[:, 0].clamp_min(1e-300)).log().mean())
    assert naive < 0.1, "of rows and their copies"
    coarse = graph_of(far(2, 0).bfloat16().float())
    assert abs(WAYS["two_nn"](coarse) - expected_dimension(2, ROWS)) > stated_error(2, ROWS)


@pytest.mark.parametrize("d", TRUE)
def test_half_precision_changes_nothing_where_neighbours_are_further_than_its_rounding(d: int) -> None:
    graph = graph_of(flat(d, 0).bfloat16().float())
    for name, way in WAYS.items():
        expected, error = expected_dimension(d, ROWS, estimator=name), stated_error(d, ROWS, estimator=name)
        assert way(graph) == pytest.approx(expected, abs=error), name


def test_noise_shows_in_gride_over_scales_and_a_clean_cloud_is_the_same_at_all() -> None:
    """A plane in noise has many dimensions at the scale of the noise and two beyond it."""
    plane = embedded(normal(4096, 2, seed=0), 50)
    loud = graph_of(plane + 0.01 * normal(4096, 50, seed=1))
    scales = [gride.function(loud, scale=k) for k in (1, 2, 4, 8)]
    assert all(wide < narrow for narrow, wide in pairwise(scales)), "it falls with the scale"
    assert scales[0] > 5.0 and scales[-1] < 0.7 * scales[0]
    assert two_nn.function(loud) > 4.0, "TwoNN sees the smallest scale alone"
    clean = [gride.function(graph_of(plane), scale=k) for k in (1, 2, 4, 8)]
    assert clean == pytest.approx([2.0] * 4, rel=0.06)


def test_hard_edges_cost_more_than_the_stated_share() -> None:
    """Counter-test: in a cube every row is near an edge, which lowers all estimators by more than 8 %, and under 16."""
    draws = [torch.rand(ROWS, 10, generator=torch.Generator().manual_seed(seed)).double() for seed in range(4)]
    graphs = [graph_of(embedded(cube, 100)) for cube in draws]
    for name, way in WAYS.items():
        mean = sum(map(way, graphs)) / len(graphs)
        assert 0.84 < mean / expected_dimension(10, ROWS, estimator=name) < 1 - SHAPE_ERROR, name


# the table


@pytest.mark.parametrize(("d", "n"), [(2, 256), (10, 256), (50, 256), (5, 1024), (20, 1024)])
def test_cells_of_the_table_are_what_fresh_clouds_give(d: int, n: int) -> None:
    graphs = [graph_of(normal(n, d, seed=10_000 + seed)) for seed in range(16_384 // n)]
    for name in ESTIMATORS:
        values = torch.tensor([WAYS[name](graph) for graph in graphs])
        allowed = 4.0 * dimension_spread(d, n, estimator=name) / math.sqrt(len(graphs))
        expected = expected_dimension(d, n, estimator=name)
        assert float(values.mean()) == pytest.approx(expected, abs=allowed + 0.005 * expected), name
        assert 0.6 < float(values.std()) / dimension_spread(d, n, estimator=name) < 1.5, name


def test_clouds_between_the_cells_are_as_the_interpolation_says() -> None:
    for d, n in ((14, 500), (45, 2000)):
        values = [WAYS["two_nn"](graph_of(normal(n, d, seed=seed))) for seed in range(12)]
        error = 4.0 * dimension_spread(d, n) / math.sqrt(len(values))
        assert sum(values) / len(values) == pytest.approx(expected_dimension(d, n), abs=error)
        assert sum(values) / len(values) - d == pytest.approx(two_nn_bias(d, n), abs=error)


def test_the_figures_of_the_methods_page_are_in_the_table() -> None:
    """True 20 gives 17.6 and true 50 gives 33.7 at 4096 rows, within what one cloud can tell."""
    assert expected_dimension(20, 4096) == pytest.approx(17.6, abs=2 * dimension_spread(20, 4096))
    assert expected_dimension(50, 4096) == pytest.approx(33.7, abs=2 * dimension_spread(50, 4096))
    assert two_nn_bias(50, 4096) == pytest.approx(-16.7, abs=0.05)  # what docs/dimension.md says
    assert two_nn_bias(50, 4096, method="ml") != pytest.approx(-16.7, abs=0.05)
    assert two_nn_bias(2, 65_536) == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize("method", ["slope", "ml"])
def test_calibration_undoes_the_expectation_everywhere_in_the_table(method: str) -> None:
    name = "two_nn" if method == "slope" else "two_nn:method=ml"
    for n in (*SIZES, 300, 5000, 50_000):
        for d in (*DIMENSIONS[:-1], 1.5, 17.0, 88.0):
            there = expected_dimension(d, n, estimator=name)
            assert calibrated_dimension(there, n, method=method) == pytest.approx(d, rel=1e-9)
        means = [expected_dimension(d, n, estimator=name) for d in DIMENSIONS]
        assert means == sorted(means), "more dimensions never look like fewer"


def test_beyond_the_table_the_edge_is_taken_and_said() -> None:
    assert not in_table(200.0, 4096) and not in_table(5.0, 100) and in_table(5.0, 4096)
    assert calibrated_dimension(1e6, 4096) == pytest.approx(DIMENSIONS[-1])
    assert calibrated_dimension(0.5, 4096) == pytest.approx(0.5, rel=0.02)
    wide = anisoscope.two_nn(np.random.default_rng(0).normal(size=(400, 3000)), calibrated=True)
    assert wide.value == pytest.approx(DIMENSIONS[-1]) and "outside the table" in wide.note
    inside = anisoscope.two_nn(np.random.default_rng(0).normal(size=(400, 5)), calibrated=True)
    assert "outside" not in inside.note
    assert "bias not known" in anisoscope.two_nn(np.random.default_rng(0).normal(size=(100, 5))).note


def test_what_cannot_be_calibrated_is_refused_in_one_sentence() -> None:
    with pytest.raises(AnisoscopeError, match="keep"):
        anisoscope.two_nn(np.random.default_rng(0).normal(size=(400, 5)), calibrated=True, keep=0.5)
    with pytest.raises(AnisoscopeError, match="at least 2 rows"):
        expected_dimension(-1.0, 10)
    with pytest.raises(AnisoscopeError, match="estimator"):
        expected_dimension(5, 1000, estimator="three_nn")


def test_two_nn_says_its_bias_beside_every_value() -> None:
    seen = anisoscope.two_nn(np.random.default_rng(0).normal(size=(2000, 30)))
    share = seen.value / calibrated_dimension(seen.value, 2000) - 1
    assert seen.note == f"bias about {round(100 * share):+d} % at this n"
    assert share < -0.1


# batches


def test_batches_give_the_mean_and_spread_over_shuffled_batches_of_4096() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(9000, 6)) * [3, 2, 1, 1, 1, 1]
    for metric in (anisoscope.svd_ratio, anisoscope.svd_ratio_squared):
        whole, seen = metric(x), metric(x, batches=True)
        assert seen.n == 8192 and whole.n == 9000
        assert seen.value == pytest.approx(whole.value, abs=4 * seen.sd) and seen.value != whole.value
        assert 0 < seen.sd < 0.02 and math.isnan(whole.sd)
        assert math.isnan(seen.low) and whole.low < whole.value < whole.high
    few = anisoscope.svd_ratio(x[:3000], batches=True)
    assert few.value == pytest.approx(anisoscope.svd_ratio(x[:3000]).value, rel=1e-12), "one batch is the whole"
    assert math.isnan(few.sd)


# published packages


def _cloud() -> np.ndarray:
    return curved(5, 0).numpy()[:800]


def test_levina_bickel_and_two_nn_equal_scikit_dimension() -> None:
    skdim = pytest.importorskip("skdim", reason="scikit-dimension is not installed")
    x = _cloud()
    published = [skdim.id.MLE(K=k).fit(x, comb="mle") for k in range(10, 21)]
    inverses = np.mean([found.dimension_ for found in published])
    assert anisoscope.levina_bickel(x).value == pytest.approx(inverses, rel=0.02), "it smooths over neighbours"
    two = float(skdim.id.TwoNN(discard_fraction=0.1).fit(x).dimension_)
    assert anisoscope.two_nn(x).value == pytest.approx(two, rel=1e-6)


@pytest.mark.parametrize("scale", [1, 2, 4, 8])
def test_gride_equals_dadapy(scale: int) -> None:
    dadapy = pytest.importorskip("dadapy", reason="DADApy is not installed")
    x = _cloud()
    data = dadapy.Data(x)
    data.compute_distances(maxk=40)
    found, _, _ = data.return_id_scaling_gride(range_max=2 * scale)
    assert anisoscope.gride(x, scale=scale).value == pytest.approx(float(found[-1]), rel=1e-3)


def test_near_copies_that_decide_two_nn_are_told() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2048, 18))
    copies = rows[:245] + 1e-4 * rng.normal(size=(245, 18))
    wrecked, robust = (
        anisoscope.two_nn(np.concatenate([rows, copies])),
        anisoscope.gride(np.concatenate([rows, copies])),
    )
    assert wrecked.value < 1 and robust.value > 12, "what the warning is for"
    assert f"gives {robust.value:.3g}" in wrecked.note
    assert "next scale" not in anisoscope.two_nn(rows).note
    assert "next scale" not in anisoscope.two_nn(rng.normal(size=(2048, 1)) @ np.ones((1, 3))).note, "one dimension"
