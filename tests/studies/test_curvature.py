"""The curvature study: slopes and constants, the floor, the null, what frequency hides, the parabola, the folder."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anisoscope.claims.engine.claim import judge, verdicts_from_dicts
from anisoscope.claims.revisiting.theory import EXPECTED_SLOPES, ZonePart, repetitions, theory_claims
from anisoscope.commands.drawing import write_study_report
from anisoscope.errors import AnisoscopeError
from anisoscope.numerics.manifolds import make_manifold
from anisoscope.results.folder import RunFolder
from anisoscope.results.quantity import t_interval
from anisoscope.results.query import SCHEMA, Query, Table
from anisoscope.studies.curvature import CurvatureConfig
from anisoscope.studies.curvature.gradients import over_replicates
from anisoscope.studies.curvature.protocol import (
    Curvature,
    Ladder,
    Population,
    parabola_gradient,
    sample_ladder,
    see_neighbourhoods,
    see_tokens,
    zipf_frequencies,
)
from support.pages import Page, figures_once

SCALES = tuple(np.geomspace(1e-3, 0.03, 8).tolist())


def run_curvature(config: CurvatureConfig, out: Path, **options: Any) -> Path:
    return Curvature(config, RunFolder.create(out, asdict(config), resume=False), **options).run()


def ladder_of(name: str, *, noise: float = 0.0, kind: str = "gaussian", seed: int = 0, **sizes: int) -> Ladder:
    manifold = make_manifold(name, dim=2, ambient=8)
    look = CurvatureConfig(scales=SCALES, floor=noise, kind=kind, **{"samples": 400, "replicates": 8} | sizes)
    return sample_ladder(manifold, look, seed=seed)


@pytest.mark.parametrize("kind", ["gaussian", "ball"])
@pytest.mark.parametrize("name", ["sphere", "ellipsoid", "paraboloid", "swiss_roll", "torus", "quadratic"])
def test_variances_grow_as_the_second_and_fourth_power_with_the_known_constants(name: str, kind: str) -> None:
    ladder = ladder_of(name, kind=kind, seed=1)
    for of, expected in EXPECTED_SLOPES.items():
        slopes, kept = ladder.slopes(of, limit=0.03)
        assert kept.all()
        assert slopes.mean() == pytest.approx(expected, abs=4 * slopes.std(ddof=1) / math.sqrt(8) + 0.005)
        ratio = (ladder.excess(of) / ladder.leading(of)).mean(1)
        assert ratio.mean() == pytest.approx(1, abs=4 * ratio.std(ddof=1) / math.sqrt(8) + 0.005)


def test_intervals_of_slopes_cover_the_truth_and_nothing_else() -> None:
    covered = dict.fromkeys(EXPECTED_SLOPES, 0)
    for seed in range(40):
        ladder = ladder_of("quadratic", seed=seed, samples=96, replicates=6)
        for of, expected in EXPECTED_SLOPES.items():
            found = over_replicates(ladder.slopes(of, limit=0.03)[0].tolist())
            covered[of] += found.low <= expected <= found.high
            assert found.high - found.low < 0.5
    # of 40 intervals at 95 %, fewer than 33 cover with probability 0.0007
    assert all(33 <= count <= 40 for count in covered.values())


def test_only_what_lies_above_the_noise_floor_is_fitted() -> None:
    ladder = ladder_of("sphere", noise=1e-5)
    slopes, kept = ladder.slopes("normal", limit=0.03)
    assert 3 <= kept.sum() < len(SCALES) and kept[-1] and not kept[0]
    assert slopes.mean() == pytest.approx(4, abs=0.1)
    x, y = np.log(SCALES), np.log(ladder.variance["normal"].mean(0))
    assert np.polyfit(x, y, 1)[0] < 3, "the counter-test: with the floor left in, the slope is wrong"


def test_the_flat_control_has_no_normal_slope() -> None:
    for noise in (0.0, 1e-6):  # rounding alone must not pass for curvature either
        slopes, kept = ladder_of("flat", noise=noise).slopes("normal", limit=0.03)
        assert not kept.any() and np.isnan(slopes).all()
        assert ladder_of("flat", noise=noise).slopes("tangent", limit=0.03)[0].mean() == pytest.approx(2, abs=0.05)


def attenuations(name: str, *, zipf: float, beta: float, draws: int = 6) -> np.ndarray:
    """Visibility by frequency over that of a uniform draw, with what is expected of each, [2, draws]."""
    manifold = make_manifold(name, dim=2, ambient=6)
    look = CurvatureConfig(tokens=4096, neighbourhoods=8, neighbours=24, noise=0.001)
    found = []
    for draw in range(draws):
        population = Population.draw(manifold, 64, seed=draw)
        frequency = zipf_frequencies(64, zipf)
        scales = population.scales(frequency, beta, base=0.02)
        generator = torch.Generator().manual_seed(draw)
        sides = [
            see_tokens(population, scales, weights, look=look, generator=generator)
            for weights in (frequency, torch.full_like(frequency, 1 / 64))
        ]
        keys = (("curvature_visibility", "estimate=true"), ("curvature_visibility_expected", ""))
        found.append([sides[0][key] / sides[1][key] for key in keys])
    return np.array(found).T


@pytest.mark.parametrize("name", ["sphere", "ellipsoid", "quadratic"])
@pytest.mark.parametrize("zipf", [0.5, 1.0, 2.0])
def test_with_beta_zero_frequency_changes_nothing(name: str, zipf: float) -> None:
    seen, expected = attenuations(name, zipf=zipf, beta=0.0)
    np.testing.assert_allclose(expected, 1, rtol=1e-9)
    assert seen.mean() == pytest.approx(1, abs=4 * seen.std(ddof=1) / math.sqrt(len(seen)) + 0.01)
    assert seen.std(ddof=1) < 0.3


@pytest.mark.parametrize(("beta", "sign"), [(0.25, -1), (-0.1, 1)])
def test_frequency_hides_curvature_where_frequent_types_are_narrow_and_shows_it_where_they_are_wide(
    beta: float, sign: int
) -> None:
    seen, expected = attenuations("sphere", zipf=1.0, beta=beta)
    assert (sign * (seen - 1) > 0.1).all()
    assert seen.mean() == pytest.approx(expected.mean(), rel=0.1)


def test_scales_follow_the_frequency_up_to_half_a_radius_of_curvature() -> None:
    population = Population.draw(make_manifold("sphere", dim=2, ambient=4), 100, seed=0)
    frequency = zipf_frequencies(100, 1.0)
    scales = population.scales(frequency, 0.5, base=0.1)
    torch.testing.assert_close(scales[:25], 0.1 * torch.arange(1, 26).double() ** 0.5)
    torch.testing.assert_close(scales[25:], torch.full((75,), 0.5).double())
    assert float(frequency.sum()) == pytest.approx(1)


def test_local_pca_recovers_the_curvature_in_a_uniform_draw_and_loses_it_by_frequency() -> None:
    population = Population.draw(make_manifold("sphere", dim=2, ambient=8), 128, seed=0)
    look = CurvatureConfig(tokens=1024, neighbourhoods=200, neighbours=96, noise=0.002)
    frequency, generator = zipf_frequencies(128, 1.0), torch.Generator().manual_seed(0)
    uniform = torch.full_like(frequency, 1 / 128)

    def share(weights: torch.Tensor, beta: float) -> tuple[float, float]:
        scales = population.scales(frequency, beta, base=0.02)
        seen = see_neighbourhoods(population, scales, weights, look=look, generator=generator)
        return seen["curvature_recovered", "count=equal"], seen["local_pca_angle", "count=equal"]

    assert share(uniform, 0.25)[0] > 0.7 > 0.45 > share(frequency, 0.25)[0]
    assert share(frequency, 0.25)[1] < 3, "the tangent is kept all the same"
    assert abs(share(uniform, 0.0)[0] - share(frequency, 0.0)[0]) < 0.05, "the null"


def test_the_parabola_is_tangent_row_by_row_and_normal_in_the_sum() -> None:
    for scale in (1e-4, 1e-2, 0.3):
        found = parabola_gradient(scale, n=1000, seed=3)
        assert found.mean_tangent == 0.0 and found.mean_share == 0.0
        assert found.mean_normal == pytest.approx(scale**2, rel=0.3)
        assert 1 - 10 * scale**2 < found.row_tangent < 1


def test_the_parabola_is_what_autograd_gives() -> None:
    half = 0.1 * torch.randn(500, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).abs()
    u = torch.stack([half, -half], 1).flatten()
    x = torch.stack([u, u**2], 1)
    W = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    (x @ W.T).sum().backward()  # dL/d(Wx) = 1 for every row
    found = parabola_gradient(0.1, n=1000, seed=3)
    assert W.grad is not None
    assert float(W.grad[0, 0]) == pytest.approx(0, abs=1e-12)
    assert float(W.grad[0, 1]) / 1000 == pytest.approx(found.mean_normal)
    assert float((x[:, 0] ** 2).sum() / (x**2).sum()) == pytest.approx(found.row_tangent)
    lopsided = torch.stack([half, half**2], 1).mean(0)  # the counter-test: without −u the gradient is tangent
    assert float(lopsided[0] ** 2 / lopsided.square().sum()) > 0.9


def test_zones_judge_intervals() -> None:
    wide, tight = np.array([1.0, 2.0, 3.0, 2.0]), np.array([2.0, 2.01, 1.99, 2.0])
    zone = (1.9, 2.1)
    parts = [ZonePart.over(name, tight + shift, zone) for name, shift in (("a", 0.0), ("b", 1.0), ("c", 2.0))]
    assert [part.status for part in parts] == ["holds", "fails", "fails"]
    assert judge(parts)[1].name == "c" and judge(parts[:1])[0] == "holds", "the verdict hangs on the furthest outside"
    assert ZonePart.over("a", wide, zone).status == "undecided"
    assert ZonePart.over("a", np.array([np.nan, 2.0]), zone).status == "undecided"
    below = t_interval((math.log(2.1) - np.log(tight)).tolist())[1]
    assert ZonePart.over("a", tight, (-math.inf, 2.1), log=True).p == pytest.approx(below)


@pytest.mark.parametrize("log", [False, True])
def test_repetitions_come_back_from_the_table(log: bool) -> None:
    values = np.array([1.0, 2.5, 3.0, 0.4])
    found = over_replicates(values.tolist(), log=log)
    row = Query(Table.from_records([{"value": found.value, "replicates": list(found.replicates)}])).one()
    assert repetitions(row, log=log) == pytest.approx(values)
    assert ZonePart.over("a", values, (0.0, 9.0), log=log).low == pytest.approx(found.low)


SMALL = {"manifolds": ("sphere", "quadratic", "flat"), "samples": 512, "tokens": 1024, "draws": 3}
SMALL |= {"loop_runs": 3, "loop_steps": 60, "pinned_runs": 3, "pinned_steps": 120, "pinned_types": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    told: list[tuple[str, int, int]] = []
    out = tmp_path_factory.mktemp("studies") / "curvature"
    made = run_curvature(CurvatureConfig.tiny(**SMALL), out, progress=lambda *a: told.append(a), command=["anisoscope"])
    assert told == [*(("manifolds", i, 3) for i in (1, 2, 3)), *(("pinning", i, 2) for i in (1, 2))]
    with figures_once():
        write_study_report(made, "curvature")
    return made


def test_the_folder_holds_the_record_the_table_and_the_verdicts(folder: Path) -> None:
    about = json.loads((folder / "run.json").read_text())
    assert about["status"] == "complete" and about["study"] == "curvature" and about["command"] == ["anisoscope"]
    assert about["config"]["samples"] == 512 and {"torch", "numpy"} <= set(about["versions"])
    table = Table.read(folder / "table.parquet")
    assert table.arrow.schema.names == SCHEMA.names
    assert {"curvature_slope", "curvature_attenuation", "local_pca_angle", "parabola_tangent"} <= set(table.metrics)
    keys = [(r["model"], r["metric"], r["variant"], r["step"]) for r in table.records()]
    assert len(keys) == len(set(keys))
    slope = table.where(model="sphere", metric="curvature_slope", variant="of=normal;sampling=gaussian").records()[0]
    assert slope["low"] < 4.1 and slope["high"] > 3.9 and slope["contexts"] == 6
    assert not list(folder.glob(".*")), "nothing half written is left"


def test_the_verdicts_are_those_of_the_contract(folder: Path) -> None:
    verdicts = verdicts_from_dicts(json.loads((folder / "verdicts.json").read_text()))
    status = {(v.claim, v.subject): v.status for v in verdicts}
    assert status["tangent_variance_t2", "all curved manifolds"] == "holds"
    assert status["normal_variance_t4", "flat control"] == "undecided"
    assert status["local_pca_recovers_curvature", "all curved manifolds"] == "holds"
    assert status["parabola", "parabola"] == "holds"
    assert list(dict.fromkeys(v.claim for v in verdicts)) == theory_claims()
    assert status["tangent_gradient_order", "row by row, every signal"] == "holds"
    assert status["tangent_gradient_order", "mean gradient, constant signal"] == "fails", "it vanishes"
    assert status["gradient_ratio_order", "mean gradient, network signal"] == "holds"
    assert status["gradient_within_bounds", "all curved manifolds"] == "holds"
    scopes = {v.claim: v.scope for v in verdicts}
    assert scopes["frequency_hides_curvature"] == "for s = 1 and β = 0.25 (assumed)"
    assert all(v.why.endswith(".") and v.scope for v in verdicts)


def test_the_page_is_complete_in_itself(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    figures = {p.name for p in (folder / "figures").iterdir()}
    names = ("scales", "slopes", "frequency", "every-manifold", "local-pca", "parabola")
    names += ("gradients", "orders", "loop", "pinning")
    stems = {"hero", *(f"curvature-{name}" for name in names)}
    assert figures == {f"{stem}.{form}" for stem in stems for form in ("pdf", "svg")}
    shown = Page(page)
    panels = 3 + 3 + 4 + 2 + 4 + 2 + 4 + 3 + 4 + 2
    assert len(shown.specs()) == 2 + panels, "the hero and panels of all figures; two curved manifolds"
    assert shown.fetched() == []
    ids = {attrs.get("id") for _, attrs in shown.elements}
    targets = {
        str(attrs["href"])[1:] for tag, attrs in shown.elements if tag == "a" and str(attrs["href"]).startswith("#")
    }
    assert targets <= ids
    assert "nan" not in shown.text.lower().split()


def test_the_same_seed_gives_the_same_numbers_and_another_does_not(folder: Path, tmp_path: Path) -> None:
    config = {**SMALL, "manifolds": ("sphere",)}
    again = run_curvature(CurvatureConfig.tiny(**config), tmp_path / "again")
    other = run_curvature(CurvatureConfig.tiny(**config, seed=1), tmp_path / "other")
    tables = [Table.read(path / "table.parquet").where(model="sphere") for path in (folder, again, other)]
    values = [np.array(t.arrow["value"].to_pylist()) for t in tables]
    np.testing.assert_array_equal(values[0], values[1])
    assert not np.array_equal(values[0], values[2])


def test_a_measured_beta_is_the_one_the_verdicts_are_about(tmp_path: Path) -> None:
    config = CurvatureConfig.tiny(**{**SMALL, "manifolds": ("sphere",)}, beta=-0.3)
    verdicts = json.loads((run_curvature(config, tmp_path / "run") / "verdicts.json").read_text())
    found = next(v for v in verdicts if v["claim"] == "frequency_hides_curvature")
    assert found["scope"] == "for s = 1 and β = -0.3 (as given)" and found["effect"] > 1
    assert found["status"] in ("fails", "undecided"), "wide frequent types show more curvature, not less"


@pytest.mark.slow
def test_a_study_of_the_flat_control_alone_has_a_page(tmp_path: Path) -> None:
    out = run_curvature(CurvatureConfig.tiny(**{**SMALL, "manifolds": ("flat",)}), tmp_path / "flat")
    assert "How much curvature" in write_study_report(out, "curvature").read_text(encoding="utf-8")
    found = json.loads((out / "verdicts.json").read_text())
    assert {v["claim"] for v in found if not v["details"]["missing"]} == {
        "normal_variance_t4", "self_reinforcing_loop", "frequent_types_pinned", "parabola"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"manifolds": ("spher",)}, "did you mean 'sphere'"),
        ({"manifolds": ()}, "no manifold was given"),
        ({"scales": (0.1, -0.2)}, "scales has -0.2; expected a number above 0"),
        ({"scales": ()}, "scales is empty"),
        ({"noise": -1.0}, "noise has -1.0"),
        ({"beta": math.nan}, "beta is 'nan'"),
        ({"zipf": (-1.0,)}, "zipf has -1.0"),
        ({"replicates": 2}, "replicates is 2; expected at least 3"),
        ({"dim": 9}, "does not fit into 8 ambient dimensions"),
        ({"dim": 0}, "at least 1"),
        ({"kind": "bal"}, "did you mean 'ball'"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(options: dict[str, object], words: str) -> None:
    with pytest.raises(AnisoscopeError, match=words):
        CurvatureConfig(**options)  # type: ignore[arg-type]


def test_a_folder_that_holds_something_else_is_left_alone(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(AnisoscopeError, match="holds a run"):
        run_curvature(CurvatureConfig.tiny(**SMALL), folder)
    (tmp_path / "run.json").write_text('{"status": "complete"}')
    with pytest.raises(AnisoscopeError, match="no finished curvature study"):
        write_study_report(tmp_path, "curvature")


def test_every_number_of_the_table_is_declared(folder: Path) -> None:
    from anisoscope.metrics.catalogue import registry

    declared = registry()
    names = set(Table.read(folder / "table.parquet").metrics)
    assert names <= set(declared)
    assert {name for name, metric in declared.items() if "study curvature" in metric.measured_by} <= names
