"""Energies and alignment in standardised coordinates and without the first position, against plain numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from anisoscope.capture.gradient_pass import GradientPass, RowTokens, SiteRows
from anisoscope.capture.row import Index
from anisoscope.metrics.tangent import gradient_alignment, second_moment
from anisoscope.numerics.hashing import FOLDS, even_folds, half_of
from anisoscope.results.query import FIRST_OUTLIER, options_of
from anisoscope.tangent.plan import PLANS, TangentPlan
from anisoscope.tangent.proxy import StepRows
from anisoscope.tangent.tangent_study import TangentStudy
from support.gradients import noise
from support.planted_gradients import SITE, D, R, found, hashes

PLAN = TangentPlan(rank=R, draws=99, proxies=("pca", "semi_nmf"), frozen=False, balanced=False)
STD = "coordinates=standardised;fit=refit;proxy=pca;rank=4"
PER = 10


def made(
    scale: Tensor | None = None,
    *,
    massive: float = 1.0,
    drop_first: bool = False,
    constant: bool = False,
    step: int = 0,
) -> StepRows:
    """Rows of 80 contexts of ten positions, with gradients that follow them in some directions.

    In other coordinates x/scale and g·scale; first positions `massive` times as large, or dropped by hand.
    """
    owner, position = hashes(80).repeat_interleave(PER), torch.arange(80 * PER) % PER
    spread = torch.logspace(0, -1.5, D, dtype=torch.float64)
    turn = torch.linalg.qr(noise(D, D, seed=3))[0]
    x = noise(len(owner), D, seed=1 + step) * spread @ turn + 0.5
    g = 0.5 * (x - 0.5) @ torch.diag(torch.linspace(1, 0, D).double()) + 0.1 * noise(len(owner), D, seed=2 + step)
    x[position == 0] *= massive
    if constant:
        x[:, 5] = 7.0
    if scale is not None:
        x, g = x / scale, g * scale
    rows, kept = StepRows(step), position > 0 if drop_first else position >= 0
    for half in (0, 1):
        chosen = ((half_of(owner) == half) & kept).nonzero().squeeze(1)
        n, nothing = len(chosen), torch.full((len(chosen),), -1)
        index = Index(n, 1, torch.arange(n), owner[chosen], position[chosen], nothing)
        site = SiteRows(x[chosen], g[chosen] if half else None, index, RowTokens(nothing, nothing, None))
        (rows.add_test if half else rows.add_fit)(GradientPass({SITE: site}))
    return rows


def arrays(rows: StepRows) -> tuple[np.ndarray, np.ndarray, Any, Any]:
    """(rows to fit on, gradients, contexts of both) as plain numpy."""
    (fit,), ((test, _),) = rows.fit[SITE], rows.test[SITE]
    assert test.g is not None
    return fit.x.numpy(), test.g.numpy(), fit.index.context, test.index.context


def standardised_energy(x: np.ndarray, g: np.ndarray) -> float:
    s = x.std(0, ddof=1)
    scaled = (x - x.mean(0)) / s
    Q = np.linalg.svd(scaled)[2][:R].T
    return float((((g * s) @ Q) ** 2).sum() / ((g * s) ** 2).sum())


def alignment(x: np.ndarray, g: np.ndarray, *, standardised: bool) -> float:
    if standardised:
        s = x.std(0, ddof=1)
        x, g = x / s, g * s
    C, M = np.cov(x.T), g.T @ g / len(g)
    return float(x.shape[1] * np.trace(M @ C) / np.trace(M) / np.trace(C))


def test_standardised_energies_and_alignments_are_their_definitions() -> None:
    rows = made()
    records, (x, g, fit, test) = TangentStudy(PLAN).measure(rows), arrays(rows)
    assert found(records, "gradient_energy", variant=STD)["value"] == pytest.approx(standardised_energy(x, g), rel=1e-9)
    rich = found(records, "gradient_enrichment", variant=STD)["value"]
    assert rich == pytest.approx(standardised_energy(x, g) * D / R, rel=1e-9)
    for variant in ("", "coordinates=standardised"):
        row = found(records, "gradient_alignment", variant=variant)
        assert row["value"] == pytest.approx(alignment(x, g, standardised=bool(variant)), rel=1e-9)
        assert row["low"] < row["value"] < row["high"] and len(row["replicates"]) == FOLDS
        for fold, value in enumerate(row["replicates"]):
            part = x[even_folds(fit).numpy() != fold], g[even_folds(test).numpy() != fold]
            assert value == pytest.approx(alignment(*part, standardised=bool(variant)), rel=1e-9)


def test_principal_components_from_the_scaled_covariance_are_those_of_the_standardised_rows() -> None:
    for constant in (False, True):
        rows = made(constant=constant)
        records, (x, g, *_) = TangentStudy(replace(PLAN, proxies=("semi_nmf", "pca"))).measure(rows), arrays(rows)
        kept = x.std(0) > 0
        want = standardised_energy(x[:, kept], g[:, kept])
        assert found(records, "gradient_energy", variant=STD)["value"] == pytest.approx(want, rel=1e-9)


def test_standardised_numbers_do_not_depend_on_the_coordinates_and_plain_ones_do() -> None:
    scale = torch.exp(noise(D, 1, seed=9).squeeze(1))
    one, two = (TangentStudy(PLAN).measure(made(other)) for other in (None, scale))
    metrics = ("gradient_energy", "gradient_enrichment", "gradient_alignment")
    assert len(one) == len(two)
    checked, moved = 0, 0
    for a, b in zip(one, two, strict=True):
        options = options_of(a["variant"])
        if a["metric"] in metrics and options.get("control", "next") == "next":  # draws are in float32
            if options.get("coordinates"):
                assert a["value"] == pytest.approx(b["value"], rel=1e-9), a
                checked += 1
            else:
                moved += abs(a["value"] / b["value"] - 1) > 0.05
    assert checked >= 10 and moved >= 5


def test_standardised_energies_have_controls_of_their_own() -> None:
    records = TangentStudy(replace(PLAN, draws=999)).measure(made())
    e = found(records, "gradient_energy", variant=STD)["value"]
    normal = found(records, "gradient_energy", variant=f"control=normal;{STD}")
    assert normal["value"] == pytest.approx(R * (1 - e) / (D - R), rel=0.05)
    random = found(records, "gradient_energy", variant=f"control=random;{STD}")
    assert random["value"] == pytest.approx(R / D, rel=0.05) and random["low"] < R / D < random["high"]
    assert found(records, "gradient_energy", variant=f"control=next;{STD}")["value"] < e
    for metric in ("gradient_p", "gradient_p_holm", "gradient_ratio"):
        found(records, metric, variant=STD)


def shares_by_hand(x: np.ndarray, g: np.ndarray) -> tuple[float, float]:
    """Spectral share and IsoScore* gain in standardised coordinates, from every matrix written out."""
    s = x.std(0, ddof=1)
    Q, *_ = np.linalg.svd(((x - x.mean(0)) / s).T)
    Q, out, G = Q[:, :R], Q[:, R:], g * s
    C = G.T @ G / len(G)
    rest = C - np.trace(C) / D * np.eye(D)
    share = (np.linalg.norm(Q.T @ rest @ Q) / np.linalg.norm(rest)) ** 2

    def iso(C: np.ndarray) -> float:
        shrunk = 0.8 * C + 0.2 * np.trace(C) / len(C) * np.eye(len(C))
        values = np.linalg.eigvalsh(shrunk)
        return float((values.sum() ** 2 / (values**2).sum() - 1) / (len(C) - 1))

    return float(share), iso(out.T @ C @ out) - iso(C)


def test_both_anisotropy_shares_are_given_in_standardised_coordinates_with_controls() -> None:
    rows = made()
    records, (x, g, *_) = TangentStudy(replace(PLAN, draws=999)).measure(rows), arrays(rows)
    for metric, wanted in zip(("gradient_share", "gradient_isoscore_gain"), shares_by_hand(x, g), strict=True):
        row = found(records, metric, variant=STD)
        assert row["value"] == pytest.approx(wanted, rel=1e-9) and row["low"] < row["value"] < row["high"]
        for control in ("random", "normal", "next"):
            assert found(records, metric, variant=f"control={control};{STD}")["value"] != row["value"]
    random = found(records, "gradient_share", variant=f"control=random;{STD}")["value"]
    assert random == pytest.approx(R * (R + 1) / D**2, rel=0.3)
    moved = TangentStudy(PLAN).measure(made(torch.exp(noise(D, 1, seed=9).squeeze(1))))
    share = found(records, "gradient_share", variant=STD)["value"]
    assert found(moved, "gradient_share", variant=STD)["value"] == pytest.approx(share, rel=1e-9)
    plain = [found(each, "gradient_share")["value"] for each in (records, moved)]
    assert abs(plain[0] / plain[1] - 1) > 0.05


def test_alignment_is_one_when_unrelated_and_the_width_in_one_shared_direction() -> None:
    values = [
        float(
            gradient_alignment(second_moment(noise(200, D, seed=s) * spread), second_moment(noise(200, D, seed=-s - 1)))
        )
        for spread in (torch.logspace(0, -1, D).double(),)
        for s in range(60)
    ]
    assert np.mean(values) == pytest.approx(1.0, abs=0.01)
    u = noise(D, 1, seed=4)
    assert float(gradient_alignment(u @ u.T, u @ u.T)) == pytest.approx(D)


def test_a_constant_coordinate_is_left_out_of_standardised_coordinates() -> None:
    rows = made(constant=True)
    records, (x, g, *_) = TangentStudy(PLAN).measure(rows), arrays(rows)
    vary = np.arange(D) != 5
    wanted = standardised_energy(x[:, vary], g[:, vary])
    assert found(records, "gradient_energy", variant=STD)["value"] == pytest.approx(wanted, rel=1e-9)
    rich = found(records, "gradient_enrichment", variant=STD)["value"]
    assert rich == pytest.approx(wanted * (D - 1) / R, rel=1e-9)
    wanted = alignment(x[:, vary], g[:, vary], standardised=True)
    row = found(records, "gradient_alignment", variant="coordinates=standardised")
    assert row["value"] == pytest.approx(wanted, rel=1e-9)


def test_an_outlying_first_position_is_left_out_beside_and_equals_dropping_it_by_hand() -> None:
    both = TangentStudy(PLAN).measure(made(massive=20.0))
    rest = TangentStudy(PLAN).measure(made(massive=20.0, drop_first=True))
    out = {}
    for row in both:
        options = dict(options_of(row["variant"]))
        if options.pop("first", "") == "out":
            out[row["metric"], row["group"], tuple(sorted(options.items()))] = row
    compared = set()
    for row in rest:
        twin = out.get((row["metric"], row.get("group", ""), tuple(sorted(options_of(row["variant"]).items()))))
        if twin is not None:
            compared.add(row["metric"])
            drawn = (
                options_of(row["variant"]).get("control") in ("normal", "random") or row["metric"] == "gradient_ratio"
            )
            rel = 1e-5 if drawn else 1e-9  # draws are in float32
            for name in ("value", "low", "high") if "low" in row else ("value",):
                assert twin.get(name) == pytest.approx(row[name], rel=rel, nan_ok=True), row
    assert {"gradient_energy", "gradient_enrichment", "gradient_p", "gradient_alignment", "gradient_ratio"} <= compared
    named = {tuple(sorted(options_of(row["variant"]))) for row in both if "first" in options_of(row["variant"])}
    assert {("first",), ("coordinates", "first"), ("coordinates", "first", "fit", "proxy", "rank")} <= named
    assert FIRST_OUTLIER in found(both, "gradient_energy", variant="first=out;fit=refit;proxy=pca;rank=4")["note"]


def test_an_ordinary_first_position_has_no_rows_of_its_own() -> None:
    records = TangentStudy(PLAN).measure(made())
    assert not any("first" in options_of(row["variant"]) for row in records)


def test_light_has_the_alignment_but_no_standardised_energies() -> None:
    records = TangentStudy(replace(PLANS["light"], rank=R, draws=19)).measure(made())
    found(records, "gradient_alignment", variant="coordinates=standardised")
    energies = [row["variant"] for row in records if row["metric"] == "gradient_energy"]
    assert energies and not any("coordinates" in options_of(variant) for variant in energies)


def test_frozen_proxies_keep_the_coordinates_they_were_fitted_in() -> None:
    study = TangentStudy(replace(PLAN, frozen=True, window="steps:0.3"), total_steps=10)
    first, later = made(step=0), made(step=9)
    study.measure(first)
    records = study.measure(later)
    again = TangentStudy(replace(PLAN, frozen=True, window="steps:0.3"), total_steps=10)
    again.load(study.state(), {})
    (x, *_), (_, g, *_) = arrays(first), arrays(later)
    s = x.std(0, ddof=1)
    Q = np.linalg.svd((x - x.mean(0)) / s)[2][:R].T
    wanted = (((g * s) @ Q) ** 2).sum() / ((g * s) ** 2).sum()
    variant = STD.replace("refit", "frozen")
    at_end = [row for row in records if row["step"] == 9]
    assert found(at_end, "gradient_energy", variant=variant)["value"] == pytest.approx(float(wanted), rel=1e-9)
    found(at_end, "gradient_p_holm", variant=variant)
    assert found(at_end, "gradient_share", variant=variant)["value"] == pytest.approx(shares_by_hand(x, g)[0], rel=1e-6)
    twice = [{**row, "step": 0} for row in again.measure(made(step=9)) if row["step"] == 9]
    assert found(twice, "gradient_energy", variant=variant)["value"] == pytest.approx(float(wanted), rel=1e-9)
