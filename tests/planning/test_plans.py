"""Plans: what grows with what, large models on paper, every study, contexts of a wanted interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import anisoscope
from anisoscope.errors import AnisoscopeError
from anisoscope.planning.pilot import needs
from anisoscope.planning.study_plans import plan_study
from anisoscope.studies.catalogue import STUDIES

STORED = str(Path(__file__).parents[1] / "support" / "calibration.json")
SMALL = "shape:layers=4,width=128,heads=4,vocab=512"


def planned(command: str, *models: str, **options: Any) -> dict[str, Any]:
    return anisoscope.plan(command, *models, calibration=STORED, **options)


def test_time_and_memory_of_a_profile_grow_with_what_is_read() -> None:
    few, many = (planned("profile", SMALL, tokens=tokens) for tokens in (8192, 65_536))
    assert many["parts"]["forward passes"] == pytest.approx(8 * few["parts"]["forward passes"], rel=0.05)
    assert many["parts"]["start"] == few["parts"]["start"]
    deep = planned("profile", "shape:layers=8,width=128,heads=4,vocab=512", tokens=8192)
    assert deep["seconds"] > few["seconds"] and deep["host"] > few["host"] and deep["disk"] > few["disk"]


def test_one_metric_is_cheaper_than_all() -> None:
    assert planned("profile", SMALL, metrics="average_cosine")["seconds"] < planned("profile", SMALL)["seconds"]


def test_checkpoints_are_paid_one_by_one() -> None:
    few, many = (planned("sweep", SMALL, preset="shape", checkpoints=n) for n in (10, 1000))
    assert many["parts"]["forward passes"] == pytest.approx(100 * few["parts"]["forward passes"])
    assert many["host"] == few["host"]
    with pytest.raises(AnisoscopeError, match="say how many with --checkpoints"):
        planned("sweep", SMALL, preset="shape")


def test_steps_of_a_training_are_paid_one_by_one_and_measured_ones_by_their_schedule() -> None:
    short, long = (planned("train", steps=steps) for steps in (64, 128))
    assert long["parts"]["updates"] == pytest.approx(2 * short["parts"]["updates"])
    ratio = long["parts"]["measured steps"] / short["parts"]["measured steps"]
    assert ratio == pytest.approx(9 / 8)  # 0, 1, 2, 4, … up to the last
    bare = planned("train", steps=64, watch={"monitor": "none"})
    assert "measured steps" not in bare["parts"] and "page" not in bare["parts"]


def test_a_large_model_on_a_device_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from anisoscope.planning import stages
    from anisoscope.planning.calibration import read_calibration

    monkeypatch.setattr(stages, "here", lambda device, **_: read_calibration(STORED))
    shape = "shape:layers=80,width=8192,heads=64,kv_heads=8,ffn=28672,vocab=128256"
    found = anisoscope.plan("profile", shape, device="cuda", dtype="bfloat16", calibration="h100", tokens=65_536)
    assert 141e9 < found["device"] < 300e9
    assert any("spread it over" in note for note in found["notes"])
    assert found["calibration"]["published"]
    assert 65_536 * 2 * 70e9 / 990e12 < found["parts"]["forward passes"] < 200


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "inherent" else n for n in sorted(STUDIES)]
)
def test_every_study_has_a_plan(name: str) -> None:
    from anisoscope.planning.calibration import read_calibration

    entry = STUDIES[name]
    config = (entry.build or entry.config)()
    found = plan_study(name, config, lambda parts: read_calibration(STORED)).as_dict()
    assert 5 < found["seconds"] < 7200 and found["disk"] > 0 and found["host"] > 2e8


def test_an_arm_costs_the_same_with_every_seed_and_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from anisoscope.planning import study_plans
    from anisoscope.planning.calibration import read_calibration

    counted, one = [], study_plans.cost_of_training
    monkeypatch.setattr(study_plans, "cost_of_training", lambda *a: counted.append(a[0]) or one(*a))
    totals = []
    for seeds in ((0,), (0, 1, 2)):
        config = STUDIES["shape"].config(arms=("causal-next",), seeds=seeds)
        found = plan_study("shape", config, lambda parts: read_calibration(STORED), jobs=1)
        totals.append(dict(found.cost.parts)["updates"])
        assert len(counted) == len(totals)
    assert totals[1] == pytest.approx(3 * totals[0])


class _Row:
    head, variant, group = None, "", ""

    def __init__(self, metric: str, value: float, half: float) -> None:
        self.metric, self.value, self.low, self.high = metric, value, value - half, value + half


def test_contexts_of_a_wanted_interval_grow_with_its_square() -> None:
    rows = [_Row("drift", 1.0, 0.1), _Row("drift", 1.0, 0.2), _Row("drift", 1.0, 0.4), _Row("two_nn", 10.0, 0.5)]
    found = needs(rows, contexts=16, wanted=(0.05, True))
    assert [row["metric"] for row in found] == ["drift", "two_nn"]
    assert found[0]["contexts"] == 256 and found[0]["worst"] == 1024 and found[1]["contexts"] == 16
    assert needs(rows, contexts=16, wanted=(0.1, False))[0]["contexts"] == 400  # two_nn, in numbers
