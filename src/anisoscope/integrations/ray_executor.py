"""Jobs on a Ray cluster: the one that is named or running, else one that is begun on this machine.

anisoscope sweep RUNS/checkpoints --executor ray --workers 8 --job-gpus 1 --out shared/sweep
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anisoscope.errors import AnisoscopeError
from anisoscope.execution.config import Resources, parsed_options
from anisoscope.execution.job import LOST, Job, Outcome, error_words, perform

OPTIONS = {
    "address": "of a running cluster, such as auto or ray://host:10001; default: RAY_ADDRESS, else one on this machine",
    "autoscale": "yes if nodes are added when jobs wait: jobs may then ask for more than there is now",
    "resource": "a custom resource that each job takes one of",
}


_PATIENCE = 10.0  # seconds in which an interrupted task may save what it has


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray answers SIGTERM in its own way, without saving; ours is set again."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if main else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


@dataclass
class RayHandle:
    """A task of a Ray cluster."""

    reference: Any

    def outcome(self) -> Outcome | None:
        """How it ended; None while it waits or runs."""
        import ray

        ready, _ = ray.wait([self.reference], timeout=0)
        if not ready:
            return None
        try:
            found: Outcome = ray.get(self.reference)
        except Exception as error:  # a worker that was killed, a lost node, no memory: Ray has a class for each
            return Outcome(LOST, error_words(error))
        return found

    def cancel(self) -> None:
        """Interrupt the task."""
        import ray

        ray.cancel(self.reference, force=False)


@dataclass
class RayCluster:
    """Runs jobs as tasks of a Ray cluster, at most `workers` at a time."""

    workers: int = 2
    retries: int = 2
    resources: Resources = field(default_factory=Resources)
    options: dict[str, str] = field(default_factory=dict)
    _began: bool = False
    _task: Any = None
    _handles: list[RayHandle] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.options = parsed_options(self.options, OPTIONS, "ray")
        if importlib.util.find_spec("ray") is None:
            raise AnisoscopeError(
                "--executor ray needs the package ray; install it with: pip install 'anisoscope[ray]'."
            )

    def start(self, folder: Path) -> None:
        """Connect to the cluster, or begin one on this machine with a core for each worker or more."""
        import ray

        if not ray.is_initialized():
            how = self._how()
            try:
                with _signals_kept():
                    ray.init(**how)
            except Exception as error:  # which one depends on the address and on Ray's version
                raise AnisoscopeError(
                    f"no Ray cluster answers at {how['address']!r} ({error_words(error)}); give another with "
                    "--executor-option address=ray://HOST:10001 or RAY_ADDRESS, or none to begin one on this machine."
                ) from error
            self._began = True
        need: dict[str, Any] = {"num_cpus": self.resources.cpus, "num_gpus": self.resources.gpus, "max_retries": 0}
        if self.resources.memory_gb is not None:
            need["memory"] = int(self.resources.memory_gb * (1 << 30))
        if name := self.options.get("resource"):
            need["resources"] = {name: 1}
        if self.options.get("autoscale") != "yes":
            self._refuse_impossible(need)
        self._task = ray.remote(**need)(perform)

    def _how(self) -> dict[str, Any]:
        """How to begin: a cluster that is named by option or environment, else one of our own."""
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        address = self.options.get("address") or os.environ.get("RAY_ADDRESS")
        if address:
            return {"address": address, **quiet}
        own: dict[str, Any] = {"address": "local", "include_dashboard": False}
        own["num_cpus"] = max(os.cpu_count() or 1, self.workers * self.resources.cpus)
        return own | quiet

    def _refuse_impossible(self, need: dict[str, Any]) -> None:
        """An error if no node of the cluster could ever run a job, which would wait forever."""
        import ray

        wanted = {"CPU": need["num_cpus"], "GPU": need["num_gpus"], "memory": need.get("memory", 0)}
        wanted |= need.get("resources", {})
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if any(all(node.get(name, 0) >= amount for name, amount in wanted.items()) for node in nodes):
            return
        asked = ", ".join(f"{amount:g} {name}" for name, amount in wanted.items() if amount)
        most = ", ".join(
            f"{max((n.get(name, 0) for n in nodes), default=0):g} {name}" for name in wanted if wanted[name]
        )
        raise AnisoscopeError(
            f"a job asks for {asked}, and no node of the Ray cluster has that (at most {most}); ask for less, or, if "
            "nodes are added on demand, give --executor-option autoscale=yes."
        )

    def submit(self, job: Job) -> RayHandle:
        """Hand out a job."""
        handle = RayHandle(self._task.options(name=f"anisoscope {job.name}").remote(job))
        self._handles = [*(each for each in self._handles if each.outcome() is None), handle]
        return handle

    def close(self) -> None:
        """End a cluster that was begun here, or the connection to another."""
        import ray

        with contextlib.suppress(Exception):  # the cluster may be gone
            left = [handle.reference for handle in self._handles if handle.outcome() is None]
            _, rest = ray.wait(left, num_returns=len(left), timeout=_PATIENCE) if left else ([], [])
            for reference in rest:
                ray.cancel(reference, force=True)
        self._handles = []
        if self._began:
            with contextlib.suppress(Exception):  # the cluster may be gone
                ray.shutdown()
            self._began = False
