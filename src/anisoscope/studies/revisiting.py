"""Revisiting Anisotropy (arXiv 2604.08764): train a decoder and an encoder with the monitor on, and test the claims.

Each arm is a training run of its own under arms/, resumable; the study joins their tables and asks the claims.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from anisoscope.claims.claim import evaluate_claims, verdicts_to_dicts
from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.runs.opening import opening
from anisoscope.runs.schedule import Schedule, parse_schedule
from anisoscope.runs.store import RunFolder
from anisoscope.runs.table import Table
from anisoscope.training.loop import TrainConfig, train

Progress = Callable[[str, int, int], None]
_ARM = re.compile(r"(?:decoder|encoder)(?:-flat|-zipf\d+(?:\.\d+)?)?")
ARMS = ("decoder", "encoder", "decoder-flat")  # the last one is the intervention on token frequency
_TINY = TrainConfig(
    layers=4, width=96, heads=4, context=96, steps=300, batch_size=16, lr=2e-3, checkpoints="0,every:150"
)
_SMALL = TrainConfig(
    layers=12, width=512, heads=8, context=256, steps=4000, batch_size=64, lr=6e-4, checkpoints="log,every:1000"
)
# a post-norm BERT of this size does not leave the unigram plateau in so few steps, a pre-norm encoder does
FAMILIES = {"decoder": "gpt2", "encoder": "modernbert"}
# the models of the paper with published checkpoints; revisions as their authors name them
PAPER: dict[str, tuple[str, ...]] = {
    "EuroBERT/EuroBERT-210m": (),
    "EuroBERT/EuroBERT-610m": (),
    "almanach/moderncamembert-base": (),
    "allenai/OLMo-1B-hf": (
        "step1000-tokens4B",
        "step10000-tokens41B",
        "step100000-tokens419B",
        "step738020-tokens3095B",
    ),
    "EleutherAI/pythia-160m": ("step0", "step1", "step8", "step64", "step512", "step4000", "step32000", "step143000"),
    "EleutherAI/pythia-410m": ("step0", "step1", "step8", "step64", "step512", "step4000", "step32000", "step143000"),
    "EleutherAI/pythia-1b": ("step0", "step1", "step8", "step64", "step512", "step4000", "step32000", "step143000"),
    "almanach/Gaperon-1125-1B": (),
    "HuggingFaceTB/SmolLM2-360M-intermediate-checkpoints": ("step-160000", "step-1600000", "step-3200000"),
    "HuggingFaceTB/SmolLM2-1.7B-intermediate-checkpoints": ("step-125000", "step-2500000", "step-4875000"),
}


@dataclass(frozen=True)
class Preset:
    """How large a study is."""

    train: TrainConfig
    contexts: int  # of the probe
    metrics: str
    when: str


PRESETS = {
    "tiny": Preset(_TINY, contexts=96, metrics="standard", when="log"),
    "small": Preset(_SMALL, contexts=96, metrics="standard", when="log"),
}


@dataclass(frozen=True)
class RevisitingConfig:
    """What the study runs; what is None is as the preset has it."""

    preset: str = "tiny"
    data: str = "embedded"
    arms: tuple[str, ...] = ARMS
    seeds: tuple[int, ...] = (0,)
    steps: int | None = None
    layers: int | None = None
    width: int | None = None
    context: int | None = None
    metrics: str | None = None
    when: str | None = None
    rank: int | None = None
    limit: float | None = None
    device: str = "auto"
    tokens: int = 32_768  # paper: tokens of the probe of each model

    def __post_init__(self) -> None:
        if self.preset not in (*PRESETS, "paper"):
            raise unknown_name("preset", self.preset, [*PRESETS, "paper"])
        if not self.arms or not self.seeds:
            raise AnisoscopeError("a study needs at least one arm and one seed.")
        for arm in self.arms:
            if not _ARM.fullmatch(arm):
                raise AnisoscopeError(
                    f"arm {arm!r} is not known; expected decoder or encoder, with -flat or -zipf1.5 for a resampled "
                    "corpus."
                )
        if self.preset in PRESETS:
            self._check_runs()

    def _check_runs(self) -> None:
        """Every arm before the first one is trained; none twice, however it is written."""
        runs = [(self.training(arm, seed).arm, seed) for seed in self.seeds for arm in self.arms]
        twice = next((run for run in runs if runs.count(run) > 1), None)
        if twice is not None:
            raise AnisoscopeError(f"arm {twice[0]!r} of seed {twice[1]} is named twice; name every arm and seed once.")
        schedule_of(self.watch["when"], self.training(self.arms[0], self.seeds[0]).steps)

    @property
    def watch(self) -> dict[str, Any]:
        """The options of the monitor of every arm."""
        preset = PRESETS[self.preset]
        options: dict[str, Any] = {"monitor": self.metrics or preset.metrics, "when": self.when or preset.when}
        return {**options, "contexts": preset.contexts, "rank": self.rank}

    def training(self, arm: str, seed: int) -> TrainConfig:
        """The training run of one arm."""
        arch, _, frequency = arm.partition("-")
        changes: dict[str, Any] = {"arch": arch, "seed": seed, "data": self.data, "device": self.device}
        changes["family"] = FAMILIES[arch]
        changes["frequency"] = {"": "natural", "flat": "flat"}.get(frequency, f"zipf:{frequency.removeprefix('zipf')}")
        chosen = {name: getattr(self, name) for name in ("steps", "layers", "width", "context", "limit")}
        changes |= {name: value for name, value in chosen.items() if value is not None}
        return replace(PRESETS[self.preset].train, **changes)


@dataclass
class Revisiting:
    """One run of the study."""

    config: RevisitingConfig
    folder: RunFolder
    command: Sequence[str] = ()
    progress: Progress | None = None
    about: dict[str, Any] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)

    def run(self) -> Path:
        """Every arm, then the claims; a finished arm is never run again."""
        old = self.folder.about()
        if old.get("status") == "complete":
            return self.folder.path
        self._begin(old)
        started = time.monotonic()
        try:
            if self.config.preset == "paper":
                self._paper()
            else:
                self._train()
        except BaseException as error:
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            self._end(status, started, error)
            raise
        self._end("complete", started)
        return self.folder.path

    def _begin(self, old: dict[str, Any]) -> None:
        words = {"kind": "study", "study": "revisiting", "skipped": []}
        seed = self.config.seeds[0]
        self.about = opening(asdict(self.config), command=self.command, seed=seed, old=old, **words)
        self.folder.write_about(self.about)

    def _end(self, status: str, started: float, error: BaseException | None = None) -> None:
        self.about["status"] = status
        if error is not None and str(error):
            self.about["error"] = str(error).splitlines()[0]
        self.about["wall_seconds"] = round(self.about["wall_seconds"] + time.monotonic() - started, 1)
        if error is not None:  # it is known how it ended, whatever becomes of the verdicts
            self.folder.write_about(self.about)
        if self.tables:
            table = Table.concat(self.tables)
            self.folder.write_table(table)
            self.folder.write_json("verdicts.json", verdicts_to_dicts(evaluate_claims(table)))
        self.folder.write_about(self.about)

    # arms

    def _train(self) -> None:
        seeds = self.config.seeds
        for seed in seeds:
            for arm in self.config.arms:
                name = arm if len(seeds) == 1 else f"{arm}-seed{seed}"
                path = self.folder.path / "arms" / name
                try:
                    self._train_arm(path, self.config.training(arm, seed), arm=arm)
                finally:
                    if (path / "table.parquet").is_file():  # of an arm that broke off, too: what it measured counts
                        self._join(path, arm, seed)

    def _train_arm(self, path: Path, training: TrainConfig, *, arm: str) -> None:
        train(
            training,
            path,
            monitor=self._monitor(arm),
            resume=True,
            progress=self._told(path.name),
            command=self.command,
            corpus=self.folder.path / "corpus",
            watch=self.config.watch,
        )

    def _monitor(self, arm: str) -> Any:
        watch = self.config.watch

        def attach(model: Any, stream: Any, optimizer: Any, training: TrainConfig, folder: Path) -> Any:
            return training_monitor(model, stream, optimizer, training, folder, name=arm, **watch)

        return attach

    def _told(self, name: str) -> Progress | None:
        tell = self.progress
        return None if tell is None else lambda what, done, total: tell(f"{name}: {what}", done, total)

    def _join(self, path: Path, arm: str, seed: int) -> None:
        found = RunFolder.open(path)
        self.tables.append(found.table())
        about = found.about()
        for model in about.get("models", []):
            self.about["models"].append({**model, "name": arm, "seed": seed, "key": ""})
        self.about["warnings"] += [f"{arm}: {text}" for text in about.get("warnings", [])]
        for name in ("device", "data"):
            self.about.setdefault(name, about.get(name))
        self.folder.write_about(self.about)

    # the paper's own models

    def _paper(self) -> None:
        from anisoscope.runs.sweep import SweepConfig, Sweeper

        for number, (model, revisions) in enumerate(PAPER.items()):
            if self.progress is not None:
                self.progress("models", number, len(PAPER))
            path = self.folder.path / "arms" / model.replace("/", "-")
            options: dict[str, Any] = {"data": self.config.data, "device": self.config.device, "rank": self.config.rank}
            sweep = SweepConfig(model, revisions, series=bool(revisions), tokens=self.config.tokens, **options)
            try:
                Sweeper(sweep, RunFolder.create(path, asdict(sweep), resume=True), command=self.command).run()
            except AnisoscopeError as error:
                self.about["skipped"].append({"model": model, "reason": str(error)})
                self.about["warnings"].append(f"{model} was skipped: {error}")
                continue
            self._join(path, model.split("/")[-1], 0)
        if not self.tables:
            raise AnisoscopeError(
                f"none of the {len(PAPER)} models of the paper could be loaded (the first: "
                f"{self.about['skipped'][0]['reason'].rstrip('.')}); this preset needs their weights from the hub or "
                "its cache."
            )


def training_monitor(
    model: Any,
    stream: Any,
    optimizer: Any,
    training: TrainConfig,
    folder: Path,
    *,
    name: str = "",
    when: str = "log",
    monitor: str = "standard",
    rank: int | None = None,
    contexts: int = 96,
) -> Any:
    """The monitor of a training run of ours: a held-out probe, its frequencies, its optimizer, its folder.

    `monitor` is what it measures: a preset by cost, or metrics.
    """
    from anisoscope.runs.monitor import Monitor

    return Monitor(
        model,
        when=schedule_of(when, training.steps),
        metrics=monitor,
        out=folder,
        probe=stream.probe_batches(contexts, batch_size=32),
        counts=counts_of(stream),
        tokenizer=stream.corpus.tokenizer,
        optimizer=optimizer,
        total_steps=training.steps,
        rank=rank,
        name=name or training.arm,
        seed=training.seed,
        batch_size=32,
        resume=True,
    )


def schedule_of(when: str, steps: int) -> Schedule:
    """The steps that are measured, none of them after the last update.

    >>> str(schedule_of("0,10", 10))
    'at([0, 10])'
    """
    schedule = parse_schedule(when, total=steps)
    late = [step for step in sorted(schedule.steps) if step > steps]
    if late:
        raise AnisoscopeError(
            f"step {late[0]} is to be measured, but the training ends after {steps} updates; name steps up to {steps}, "
            "or train for more --steps."
        )
    return schedule


def counts_of(stream: Any) -> Any:
    """Token frequencies of the training corpus as it is sampled."""
    import torch

    return torch.as_tensor(stream.counts)


def judge_run(folder: Path) -> None:
    """Write verdicts.json of one finished run."""
    found = RunFolder.open(folder)
    found.write_json("verdicts.json", verdicts_to_dicts(evaluate_claims(found.table())))
