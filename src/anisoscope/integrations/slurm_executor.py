"""Jobs of a Slurm cluster, submitted with submitit; its local executor runs the same code without Slurm.

anisoscope sweep RUNS/checkpoints --executor slurm --workers 16 --job-gpus 1 --partition gpu --out shared/sweep
"""

from __future__ import annotations

import importlib.util
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anisoscope.errors import AnisoscopeError
from anisoscope.execution.config import Resources, parsed_options
from anisoscope.execution.job import LOST, Job, Outcome, error_words, perform

OPTIONS = {
    "cluster": "slurm, or local: processes of this machine, to try a script without Slurm",
    "account": "the account that jobs are charged to",
    "qos": "their quality of service",
    "constraint": "features that nodes must have",
    "nodelist": "nodes to use",
    "exclude": "nodes not to use",
    "setup": "a shell command that each job runs first, such as 'module load cuda'",
}
_SBATCH = ("account", "qos", "constraint", "nodelist", "exclude")
_LOOK = 5.0  # seconds between questions to Slurm's accounting
_SHORT = 0.1  # seconds between looks at local processes


@dataclass
class SlurmHandle:
    """A job of Slurm."""

    job: Any
    pause: float
    looked: float = 0.0

    def outcome(self) -> Outcome | None:
        """How it ended; None while it waits or runs."""
        now = time.monotonic()
        if now < self.looked + self.pause:
            return None
        self.looked = now
        if not self.job.done():
            return None
        try:
            found: Outcome = self.job.result()
        except Exception as error:  # killed, a lost node, out of time or memory: no result was written
            return Outcome(LOST, f"{self._words()}{error_words(error)}")
        return found

    def _words(self) -> str:
        state = str(self.job.state)
        return f"job {self.job.job_id}, {state}: " if state not in ("", "UNKNOWN") else f"job {self.job.job_id}: "

    def cancel(self) -> None:
        """Cancel the job."""
        self.job.cancel(check=False)


@dataclass
class SlurmCluster:
    """Runs every job as a job of Slurm, at most `workers` in the queue at a time."""

    workers: int = 8
    retries: int = 2
    resources: Resources = field(default_factory=Resources)
    options: dict[str, str] = field(default_factory=dict)
    _made: Any = None

    def __post_init__(self) -> None:
        self.options = parsed_options(self.options, OPTIONS, "slurm")
        if importlib.util.find_spec("submitit") is None:
            raise AnisoscopeError(
                "executor slurm needs the package submitit; install it with: pip install 'anisoscope[slurm]'."
            )
        if self.resources.gpus != int(self.resources.gpus):
            raise AnisoscopeError(
                f"job_gpus is {self.resources.gpus:g}; Slurm gives whole GPUs, so expected 0, 1, 2, …."
            )
        if self.cluster not in ("slurm", "local"):
            raise AnisoscopeError(f"cluster is {self.cluster!r}; expected slurm or local.")
        if self.cluster == "slurm" and shutil.which("sbatch") is None:
            raise AnisoscopeError(
                "there is no sbatch on this machine; run where Slurm is installed, such as a login node, or try with "
                "--executor-option cluster=local."
            )

    @property
    def cluster(self) -> str:
        return self.options.get("cluster", "slurm")

    def start(self, folder: Path) -> None:
        """Scripts, logs and results of jobs go into a folder beside their other files."""
        import submitit

        self._made = submitit.AutoExecutor(folder / "slurm", cluster=self.cluster)
        need, given = self.resources, self.options
        words: dict[str, Any] = {"cpus_per_task": need.cpus, "timeout_min": need.minutes}
        words |= {"gpus_per_node": int(need.gpus)} if need.gpus else {}
        words |= {} if need.memory_gb is None else {"mem_gb": need.memory_gb}
        words |= {f"slurm_{name}": given[name] for name in _SBATCH if name in given}
        words |= {"slurm_partition": need.partition} if need.partition else {}
        words |= {"slurm_setup": [given["setup"]]} if "setup" in given else {}
        self._made.update_parameters(**words)

    def submit(self, job: Job) -> SlurmHandle:
        """Hand out a job."""
        self._made.update_parameters(name=f"anisoscope-{job.name}"[:60])
        return SlurmHandle(self._made.submit(perform, job), _LOOK if self.cluster == "slurm" else _SHORT)

    def close(self) -> None:
        """Slurm keeps no connection."""
