"""Models of a profile that are measured by jobs give the table of one process; what fails is told at the end."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import anisoscope
from anisoscope.errors import AnisoscopeError
from support.jobs import HereExecutor
from support.tiny_series import LOOK, gpt, same

profile = partial(anisoscope.profile, report=False, **LOOK)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("one", 0), ("two", 1)):
        gpt(seed).save_pretrained(folder / name / "model")
    return [str(folder / name / "model") for name in ("one", "two")]


def test_models_by_jobs_are_those_of_one_process(models: list[str], tmp_path: Path) -> None:
    one = profile(*models, out=tmp_path / "one" / "out")
    executor = HereExecutor()
    other = profile(*models, out=tmp_path / "out", executor=executor)
    same(one, other)
    assert len(executor.submitted) == 2, "the counter-test: there were jobs"
    files = [sorted(p.relative_to(out) for p in out.rglob("*")) for out in (tmp_path / "one" / "out", tmp_path / "out")]
    assert files[0] == files[1]


def test_a_model_that_fails_is_told_once_the_others_are_measured(models: list[str], tmp_path: Path) -> None:
    out, act = tmp_path / "out", partial(profile, *models, out=tmp_path / "out")

    class Losing(HereExecutor):
        def submit(self, job: Any) -> Any:
            if job.name.startswith("0-"):
                self.losing = {job.name: 1}
            return super().submit(job)

    with pytest.raises(AnisoscopeError, match=r"1 of 2 models failed .*its node was lost.*the others were measured"):
        act(executor=Losing(retries=0))
    assert json.loads((out / "run.json").read_text())["status"] != "complete"
    assert set(anisoscope.Table.read(out).arrow["model"].to_pylist()) == {"two/model"}
    executor = HereExecutor()
    again = act(executor=executor, resume=True)
    assert len(executor.submitted) == 1 and executor.submitted[0].startswith("0-"), "the other is not measured again"
    assert len(set(again.arrow["model"].to_pylist())) == 2
