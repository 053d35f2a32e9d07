"""What docs/cluster.md shows can be used as it stands: its script, its cluster file, its Python."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from anisoscope.execution.config import ExecutorConfig
from anisoscope.integrations import ray_executor, slurm_executor

PAGE = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_every_option_is_on_the_page() -> None:
    for name in ExecutorConfig.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in PAGE, name
    for name in (*ray_executor.OPTIONS, *slurm_executor.OPTIONS):
        assert f"`{name}=" in PAGE, name


def test_the_script_is_one_of_bash() -> None:
    script = next(block for block in blocks("sh") if "#SBATCH" in block)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_cluster_file_is_one_of_ray() -> None:
    pytest.importorskip("ray")
    yaml = pytest.importorskip("yaml")
    from ray.autoscaler._private.util import prepare_config, validate_config  # what `ray up` does first

    (text,) = blocks("yaml")
    validate_config(prepare_config(yaml.safe_load(text)))
    with pytest.raises(Exception, match="'cluster' was unexpected"):  # the counter-test
        validate_config(prepare_config(yaml.safe_load(text.replace("cluster_name", "cluster"))))


@pytest.mark.slow
def test_the_python_runs_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text("\n".join(blocks("python")), encoding="utf-8")
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "runs" / "by-jobs" / "table.parquet").is_file()
