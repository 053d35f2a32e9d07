"""Base classes of studies: `Study` writes run.json at start and end, `ArmsStudy` trains arms and evaluates claims.

Heavy libraries are imported only when a study runs, because the command line imports studies for their options.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from anisoscope.errors import AnisoscopeError
from anisoscope.option import Progress
from anisoscope.results.manifest import new_manifest, outcome
from anisoscope.studies.config import PAPER, ArmRun, StudyArm

if TYPE_CHECKING:
    from anisoscope.execution.job import Executor
    from anisoscope.results.folder import RunFolder
    from anisoscope.results.query import Table
    from anisoscope.studies.arms import ArmRunner

_SHARED = "tensorboard:"  # a folder is one run to TensorBoard, so every arm gets a folder inside
Measured = TypeVar("Measured", bound="Table | None")
REVISITING, SHAPE, INHERENT = "2604.08764", "2311.05928", "2401.12143"  # arXiv numbers


@dataclass
class Study(ABC):
    """One run of a study into a run folder; subclasses implement `measure`."""

    config: Any
    folder: RunFolder
    command: Sequence[str] = ()
    progress: Progress | None = None
    about: dict[str, Any] = field(default_factory=dict)
    name: ClassVar[str] = ""

    @abstractmethod
    def measure(self) -> None:
        """Measure everything, except what was finished before an interruption."""

    def run(self) -> Path:
        """Measure, conclude, and record the final status in run.json; a complete study is not run again."""
        old = self.folder.about()
        if old.get("status") == "complete" and not old.get("skipped"):  # skipped models are tried again
            return self.folder.path
        config, seed = asdict(self.config), self.config.seed
        self.about = new_manifest(config, command=self.command, seed=seed, old=old, kind="study", study=self.name)
        self.folder.write_about(self.about)
        started = time.monotonic()
        try:
            self.measure()
        except BaseException as error:
            self._end(started, error)
            raise
        self._end(started)
        return self.folder.path

    def conclude(self) -> None:
        """Process what was measured (tables, verdicts); also called after a failure or interruption."""
        return

    def part(self, name: str, measure: Callable[[], Measured]) -> Table | Measured:
        """The table that an interrupted run stored under this file name, else what is measured now, which is stored."""
        if (stored := self.folder.part(name)) is not None:
            return stored
        if (table := measure()) is not None:
            self.folder.write_part(name, table)
        return table

    def add_model(self, entry: Mapping[str, Any]) -> None:
        """Add the entry of a model to run.json, unless there is one of its name."""
        if not any(model["name"] == entry["name"] for model in self.about["models"]):
            self.about["models"].append(entry)

    def tell(self, what: str, done: int, total: int) -> None:
        """Report progress to the callback, if there is one."""
        if self.progress is not None:
            self.progress(what, done, total)

    def progress_of(self, name: str) -> Progress:
        """A progress callback for a part of the study, which prefixes its name."""
        return lambda what, done, total: self.tell(f"{name}: {what}", done, total)

    def _end(self, started: float, error: BaseException | None = None) -> None:
        self.about |= outcome(error)
        self.about["wall_seconds"] = round(self.about["wall_seconds"] + time.monotonic() - started, 1)
        if error is not None:  # record the failure first: `conclude` may fail too
            self.folder.write_about(self.about)
        self.conclude()
        self.folder.write_about(self.about)


@dataclass
class ArmsStudy(Study):
    """A study that trains arms, or measures published models.

    Each has its own run folder under arms/; the study joins their tables, also those of interrupted arms, and evaluates
    the claims. `jobs` arms are trained in parallel (None: as many as a GPU holds, without one the default of the
    preset), by jobs of `executor` if one is given.
    """

    jobs: int | None = None
    executor: Executor | None = None
    log_to: tuple[str, ...] = ()  # experiment trackers, in which every arm is a run of its own
    joined: list[RunFolder] = field(default_factory=list)  # of arms that were measured
    paper: ClassVar[str] = REVISITING  # arXiv number of the paper whose claims are always evaluated

    def measure(self) -> None:
        """Train the arms of the preset, or measure the published models of the paper."""
        self.about["skipped"] = []
        if self.config.preset == PAPER:
            if self.executor is not None:
                raise AnisoscopeError(
                    f"an executor runs the arms that a study trains, and preset {PAPER} trains none; leave it out, or "
                    "give the models to `anisoscope sweep` or `anisoscope profile` with --executor."
                )
            self.measure_published()
        else:
            self.train()

    def measure_published(self) -> None:
        """Measure the models of the paper."""
        raise AnisoscopeError(f"study {self.name} has no preset {PAPER}; choose one of those that --help lists.")

    def train(self) -> None:
        """Train every arm under its monitor."""
        self.warn_of_little_text()
        arms = [self.arm(run) for run in self.config.runs()]
        self.prepare(arms)
        self.refuse(self.run_arms(arms), len(arms))

    def warn_of_little_text(self) -> None:
        """A warning in run.json if a preset for much text has none but the embedded one."""
        if self.config.preset == "small" and self.config.data == "embedded":
            self.about["warnings"].append(
                "no --data was given, so the models are trained on the small embedded text; this preset is meant for "
                "enwik8: --data PATH"
            )

    def arm(self, run: ArmRun) -> StudyArm:
        """The training run of an arm with a seed."""
        path = self.folder.path / "arms" / f"{run.model}-seed{run.seed}"
        corpus = self.folder.path / "corpus"
        log_to = tuple(f"{word}/{path.name}" if word.startswith(_SHARED) else word for word in self.log_to)
        return StudyArm(run.model, path, run.training, self.config.watch, corpus, tuple(self.command), log_to)

    def prepare(self, arms: Sequence[StudyArm]) -> None:
        """Tokenise the text once, before parallel arms would each do so."""
        from anisoscope.training.corpus import prepare_corpus

        training = arms[0].training
        self.tell("corpus", 0, 1)
        prepare_corpus(training.data, arms[0].corpus, tokens=training.tokens, limit=training.limit)
        self.tell("corpus", 1, 1)

    def run_arms(self, arms: Sequence[StudyArm]) -> dict[str, str]:
        """Train the arms and join their tables; returns the reasons of failed arms by the names of their folders."""
        from anisoscope.studies.arms import train_arm

        runner = self._runner(arms)
        try:
            return runner.map(train_arm, arms, self.progress)
        finally:  # also join what failed or interrupted arms measured
            if retried := getattr(runner, "retried", None):
                self.about["executor"]["retried"] = retried
            for arm in arms:
                self.join(arm.path, name=arm.model, seed=arm.training.seed)

    def _runner(self, arms: Sequence[StudyArm]) -> ArmRunner:
        """What runs the arms: jobs of the executor if there is one, else processes of this machine."""
        from anisoscope.studies.arms import JobRunner, LocalExecutor
        from anisoscope.studies.side_by_side import jobs_that_fit

        if self.executor is None:
            return LocalExecutor(self.jobs or jobs_that_fit(arms) or self.config.size.jobs)
        self.about["executor"] = {"kind": type(self.executor).__name__, "workers": self.executor.workers}
        return JobRunner(self.executor, self.folder.path.absolute())

    def join(self, path: Path, **fields: Any) -> None:
        """Add the table, models and warnings of an arm; `fields` (name, seed) are set in its model entries."""
        from anisoscope.results.folder import RunFolder

        if not (path / "table.parquet").is_file():
            return
        arm = RunFolder.open(path)
        self.joined.append(arm)
        about = arm.about()
        made = {"seconds": about.get("wall_seconds"), "versions": about.get("versions")}  # it may have run elsewhere
        self.about["models"] += [{**model, **fields, **made, "key": ""} for model in about.get("models", [])]
        name = fields.get("name") or path.name
        self.about["warnings"] += [f"{name}: {text}" for text in [*about.get("warnings", []), *_unfinished(about)]]
        for part in ("device", "data"):
            self.about.setdefault(part, about.get(part))
        self.folder.write_about(self.about)

    def skip(self, model: str, reason: str) -> None:
        """Record a model that could not be measured in run.json."""
        self.about["skipped"].append({"model": model, "reason": reason})
        self.about["warnings"].append(f"{model} was skipped: {reason}")
        self.folder.write_about(self.about)

    def refuse(self, failed: Mapping[str, str], number: int) -> None:
        """Record the failed arms (of `number`) in run.json and raise an error about them; nothing if none failed."""
        self.about["failed"] = [{"arm": name, "reason": reason} for name, reason in failed.items()]
        if not failed:
            return
        self.about["warnings"] += [f"{name} failed: {reason}" for name, reason in failed.items()]
        name, reason = next(iter(failed.items()))
        rest = "the others were measured and judged" if self.joined else "nothing is left to judge"
        raise AnisoscopeError(
            f"{len(failed)} of {number} arms failed (the first, {name}: {reason.rstrip('.')}), and {rest}; mend that, "
            "and the same command with --resume goes on."
        )

    def conclude(self) -> None:
        """Write the joint table of the arms, evaluate the claims on it, and join the maps of rows of the arms."""
        from anisoscope.results.folder import MAP_FILE, write_joined
        from anisoscope.results.query import Table

        if not self.joined:
            return
        table = Table.concat((arm.table() for arm in self.joined), self.about)
        self.folder.write_table(table)
        self.tell("claims", 0, 1)
        judge(self.folder, table, paper=self.paper)
        self.tell("claims", 1, 1)
        paths = [arm.path for arm in self.joined]
        if any((path / MAP_FILE).is_file() for path in paths):
            self.about["map"] = write_joined(self.folder.path, paths)


def _unfinished(about: Mapping[str, Any]) -> list[str]:
    """The warning for an arm that did not finish its steps; empty for a complete one.

    >>> _unfinished({"status": "interrupted", "steps": 20, "config": {"steps": 40}})
    ['unfinished, after 20 of 40 updates; --resume goes on']
    """
    if about.get("status") == "complete":
        return []
    done, total = about.get("steps"), (about.get("config") or {}).get("steps")
    return [f"unfinished, after {done} of {total} updates; --resume goes on" if done and total else "unfinished"]


def judge(folder: RunFolder, table: Table, *, paper: str = REVISITING) -> None:
    """Write verdicts.json: all claims of one paper, and any other claim whose main metric is in the table."""
    from anisoscope.claims.catalogue import claims, evaluate_claims
    from anisoscope.claims.engine.claim import verdicts_to_dicts

    measured = table.metrics
    names = [name for name, each in claims().items() if paper in each.source or each.metrics[0] in measured]
    folder.write_json("verdicts.json", verdicts_to_dicts(evaluate_claims(table, names, robust=True)))
