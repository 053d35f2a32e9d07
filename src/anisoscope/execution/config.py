"""The options of an executor, and executors by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from anisoscope.errors import AnisoscopeError, check_known, unknown_name
from anisoscope.execution.job import Executor
from anisoscope.option import Option, check_least, check_most, listed, refuse_idle

EXECUTORS = {  # by name: module and class, imported when they are chosen
    "local": "anisoscope.execution.local:LocalProcesses",
    "ray": "anisoscope.integrations.ray_executor:RayCluster",
    "slurm": "anisoscope.integrations.slurm_executor:SlurmCluster",
}
WORKERS = {"local": 2, "ray": 2, "slurm": 8}
MINUTES = 240
_LEAST = {"workers": 1, "retries": 0, "job_cpus": 1, "job_gpus": 0, "job_memory": 0.1, "job_minutes": 1}


def _pairs(text: str, option: str = "--executor-option") -> tuple[str, ...]:
    """`key=value` pairs, comma-separated."""
    pairs = listed(text, option)
    for pair in pairs:
        if not pair.partition("=")[2] or not pair.partition("=")[0]:
            raise AnisoscopeError(f"{option} has {pair!r}; expected key=value, such as address=auto.")
    return pairs


@dataclass(frozen=True)
class Resources:
    """What one job takes."""

    cpus: int = 1
    gpus: float = 0
    memory_gb: float | None = None
    minutes: int = MINUTES
    partition: str | None = None


@dataclass(frozen=True)
class ExecutorConfig:
    """Where jobs run: one for each checkpoint, arm or model. Nothing here affects results."""

    executor: Annotated[
        str | None, Option("Where checkpoints, arms or models are measured: local (processes), ray or slurm.")
    ] = None
    workers: Annotated[int | None, Option("Jobs at the same time; default: 2, of slurm 8.")] = None
    retries: Annotated[int, Option("How often a job is tried again whose worker was killed or lost.")] = 2
    job_cpus: Annotated[int, Option("Cores of each job.")] = 1
    job_gpus: Annotated[float, Option("GPUs of each job; Ray takes fractions.")] = 0.0
    job_memory: Annotated[float | None, Option("GB of memory of each job.")] = None
    job_minutes: Annotated[int, Option("Minutes after which Slurm ends a job.")] = MINUTES
    partition: Annotated[str | None, Option("Partition of Slurm.")] = None
    executor_option: Annotated[
        tuple[str, ...],
        Option("Further options of the executor: key=value,key=value; see docs/cluster.md.", parse=_pairs),
    ] = ()

    def __post_init__(self) -> None:
        check_least(self, {name: bound for name, bound in _LEAST.items() if getattr(self, name) is not None})
        check_most(self, {"workers": 10_000, "retries": 100, "job_cpus": 10_000, "job_gpus": 1_000})
        if self.executor is None:
            rest = [name for name in self.__dataclass_fields__ if name != "executor"]
            refuse_idle(self, rest, "without --executor")
            return
        check_known("executor", self.executor, EXECUTORS)
        of_clusters = ["job_cpus", "job_gpus", "job_memory", "executor_option"] if self.executor == "local" else []
        refuse_idle(self, of_clusters, "with --executor local, whose processes share this machine")
        if self.executor != "slurm":
            refuse_idle(self, ("job_minutes", "partition"), f"with --executor {self.executor}; it is for slurm")

    def make(self) -> Executor | None:
        """The executor; None for the usual way, in this process."""
        if self.executor is None:
            return None
        words: dict[str, Any] = {"workers": self.workers or WORKERS[self.executor], "retries": self.retries}
        if self.executor != "local":
            need = self.job_cpus, self.job_gpus, self.job_memory, self.job_minutes, self.partition
            words |= {"resources": Resources(*need)}
            words |= {"options": dict(pair.split("=", 1) for pair in self.executor_option)}
        module, _, name = EXECUTORS[self.executor].partition(":")
        found: Executor = getattr(importlib.import_module(module), name)(**words)
        return found


def chosen(executor: str | Executor | None, **options: Any) -> Executor | None:
    """The executor of a Python call: by name, with its options, or an object."""
    if executor is None or isinstance(executor, str):
        return ExecutorConfig(executor, **options).make()
    if missing := [name for name in ("start", "submit", "close", "workers", "retries") if not hasattr(executor, name)]:
        raise AnisoscopeError(
            f"executor is a {type(executor).__name__} without {missing[0]}; expected local, ray, slurm, or an object "
            "with the methods of anisoscope.execution.job.Executor."
        )
    return executor


def parsed_options(given: Mapping[str, str], known: Mapping[str, str], executor: str) -> dict[str, str]:
    """The options of an executor; an error for one that it does not have."""
    for name in given:
        if name not in known:
            raise unknown_name(f"option of executor {executor}", name, known)
    return dict(given)
