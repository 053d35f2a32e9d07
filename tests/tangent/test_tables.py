"""Updates of an embedding table in every reading: coordinates as they are, standardised, and without a rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from anisoscope.numerics.hashing import half_of
from anisoscope.tangent.proxy import Half, Label
from anisoscope.tangent.tables import TypeFit
from support.gradients import noise
from support.planted_gradients import SITE, D, R, found

LABELS = [Label("pca", R), Label("semi_nmf", R)]
STD = "coordinates=standardised;fit=refit;of=update;proxy=pca;rank=4"
SIZES: dict[str, Any] = {"bins": None, "draws": 99, "seed": 0}


def updated(scale: Tensor | None = None) -> tuple[Half, Tensor, Tensor]:
    """Rows of 60 types, ten of each, and the update of every type; in other coordinates both are multiplied."""
    types = torch.arange(60)
    turn = torch.linalg.qr(noise(D, D, seed=3))[0]
    table = noise(60, D, seed=1) * torch.logspace(0, -1.5, D, dtype=torch.float64) @ turn + 0.5
    token = types.repeat_interleave(10)
    x = table[token] + 0.05 * noise(600, D, seed=2)
    change = 0.3 * (table - 0.5) @ torch.diag(torch.linspace(1, 0, D).double()) + 0.02 * noise(60, D, seed=4)
    if scale is not None:
        x, change = x * scale, change * scale
    nothing = torch.full_like(token, -1)
    return Half(x, None, token, torch.zeros_like(token), token, nothing, nothing), types, change


def records(scale: Tensor | None = None, **options: Any) -> list[dict[str, Any]]:
    fit, types, change = updated(scale)
    made = TypeFit.of(fit, LABELS, site=SITE, seed=0, **{"standardised": True, **options})
    assert made is not None
    return [{"layer": 1, **row} for row in made.records(change, types, of="update", **SIZES)]


def test_standardised_updates_are_divided_by_the_standard_deviations_of_the_rows_fitted_on() -> None:
    fit, types, change = updated()
    x = fit.x[half_of(fit.token) == 0].numpy()
    u = change[half_of(types) == 1].numpy()
    s = x.std(0, ddof=1)
    Q = np.linalg.svd((x - x.mean(0)) / s)[2][:R].T
    rows = records()
    wanted = (((u / s) @ Q) ** 2).sum() / ((u / s) ** 2).sum()
    row = found(rows, "gradient_energy", variant=STD)
    assert row["value"] == pytest.approx(float(wanted), rel=1e-9) and row["low"] < row["value"] < row["high"]
    for control in ("normal", "random", "next"):
        found(rows, "gradient_energy", variant=f"control={control};{STD}")
    found(rows, "gradient_p", variant=STD)
    for variant, (x_, u_) in {"of=update": (x, u), "coordinates=standardised;of=update": (x / s, u / s)}.items():
        C, M = np.cov(x_.T), u_.T @ u_
        wanted = D * np.trace(C @ M) / np.trace(C) / np.trace(M)
        row = found(rows, "gradient_alignment", variant=variant)
        assert row["value"] == pytest.approx(float(wanted), rel=1e-9) and row["low"] < row["value"] < row["high"]


def test_no_control_of_updates_depends_on_the_order_of_the_rows() -> None:
    fit, types, change = updated()
    fit = replace(fit, position=torch.arange(len(fit)))
    made = [
        TypeFit.of(half, LABELS, site=SITE, seed=0, standardised=True) for half in (fit, fit.at(shuffled(len(fit))))
    ]
    one, two = (
        [{"layer": 1, **row} for row in fits.records(change, types, of="update", **SIZES)] for fits in made if fits
    )
    assert any("control=permuted" in row["variant"] for row in one)
    for a, b in zip(one, two, strict=True):
        assert a["variant"] == b["variant"] and a["value"] == pytest.approx(b["value"], rel=1e-6), a["variant"]


def shuffled(n: int) -> torch.Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(0))


def test_standardised_numbers_of_updates_do_not_depend_on_the_coordinates_and_plain_ones_do() -> None:
    one, two = records(), records(torch.exp(noise(D, 1, seed=9).squeeze(1)))
    for metric, variant in (("gradient_energy", STD), ("gradient_alignment", "coordinates=standardised;of=update")):
        values = [found(rows, metric, variant=variant)["value"] for rows in (one, two)]
        assert values[0] == pytest.approx(values[1], rel=1e-9)
        plain = variant.replace("coordinates=standardised;", "")
        values = [found(rows, metric, variant=plain)["value"] for rows in (one, two)]
        assert abs(values[0] / values[1] - 1) > 0.05


def test_without_standardised_coordinates_there_is_the_alignment_alone() -> None:
    rows = records(standardised=False)
    assert {row["metric"] for row in rows if "coordinates" in row["variant"]} == {"gradient_alignment"}
