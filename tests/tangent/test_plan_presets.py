"""Metrics that follow a preset."""

from __future__ import annotations

import pytest

from anisoscope.errors import AnisoscopeError
from anisoscope.tangent.plan import GEOMETRY, PLANS, choose_plan


def chosen(metrics: str) -> tuple[bool, list[str], set[bool]]:
    plan, requests = choose_plan(metrics, None, rank=None, seed=0)
    return plan is not None, [request.metric.name for request in requests], {request.named for request in requests}


@pytest.mark.parametrize("preset", PLANS)
def test_metrics_after_a_preset_are_measured_with_it_at_its_sites(preset: str) -> None:
    assert chosen(f"{preset},two_nn,gride") == (
        True,
        list(dict.fromkeys([*GEOMETRY[preset], "two_nn", "gride"])),
        {False},
    )


def test_a_metric_that_the_preset_has_is_measured_once() -> None:
    assert chosen("standard,drift") == chosen("standard")


def test_a_preset_after_a_metric_is_no_metric() -> None:
    with pytest.raises(AnisoscopeError, match="unknown metric 'standard'"):
        chosen("two_nn,standard")
