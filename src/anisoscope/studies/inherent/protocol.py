"""Anisotropy Is Inherent to Self-Attention (arXiv 2401.12143): small models of every modality, over training.

One model of tokens that predicts the next, one that fills in masked ones, one of characters, one of speech, one of
pictures with attention and its twin with convolutions; each is looked at from its first random weights on. Beside them
further families with random weights. The preset `paper` measures published models.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from anisoscope.measurement.config import ProfileConfig
from anisoscope.measurement.profile import Profiler
from anisoscope.results.folder import RunFolder
from anisoscope.results.modality import IMAGES_DATA, MEDIA, SOUNDS_DATA, TEXT_DATA, Medium
from anisoscope.studies.arms import INHERENT, ArmsStudy, Progress, StudyArm, probed, schedule_of, train_arm
from anisoscope.studies.inherent.config import ARMS, FAMILIES, PRESETS, random_name, write_configuration
from anisoscope.studies.inherent.config import InherentConfig as InherentConfig
from anisoscope.studies.jobs import in_words, run_arms
from anisoscope.tangent.plan import GEOMETRY
from anisoscope.training.config import CommonTrainConfig, TrainConfig
from anisoscope.training.corpus import Corpus, prepare_corpus
from anisoscope.training.media import MediaConfig, train_media
from anisoscope.training.media_examples import prepare_examples
from anisoscope.training.models import hushed

# Batch norms of models that never learned: without statistics they would do nothing, and whole networks would fade.
#
# A fresh batch norm has mean 0 and variance 1 until training tells it otherwise, so a model looked at before that has
# no norms at all: rows keep the offset that the norms are there to remove, and in deep ones they shrink to exact
# zeros.


CONTEXTS = 64  # that the statistics are taken from, at most
NORMED = "batch norms have the statistics of one pass over the probe, in which nothing was learned"


class NormedProfiler(Profiler):
    """A profile of a model whose batch norms have seen its probe once; its weights are random all the same."""

    def _network(self, key: str, spec: str, requests: list[Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        records, entry = super()._network(key, spec, requests)
        entry["notes"] = [f"random weights (seed {self.config.seed})", NORMED, *entry.get("notes", [])]
        return records, entry


def with_statistics(config: ProfileConfig, folder: Path) -> ProfileConfig:
    """The same profile of the same random weights, stored with batch norms that have seen the probe once."""
    from anisoscope.measurement.feed import make_feed
    from anisoscope.models.load import load_model

    (spec,) = config.models
    place = folder / Path(spec).name
    if not (place / "config.json").is_file():
        loaded = load_model(spec, random_init=True, device="cpu", dtype="float32", seed=config.seed)
        batches = make_feed(loaded, config).batches()
        few = list(islice(batches, -(-CONTEXTS // config.batch_size)))
        show_once(loaded.model, {name: torch.cat([batch.inputs[name] for batch in few]) for name in few[0].inputs})
        with hushed():
            loaded.model.save_pretrained(str(place))  # type: ignore[operator]
    return replace(config, models=(str(place),), random_init=False)


def show_once(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Run the model once with its batch norms as in training, which then keep the mean and variance that they saw."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    with torch.no_grad():
        model(**inputs)
    model.eval()


_DESIGN = ("random weights", "no processor found", "no tokenizer found", ": no final", ": no query", NORMED)


@dataclass
class Inherent(ArmsStudy):
    """One run of the study; `jobs` arms are trained at the same time (None: as the preset has it)."""

    config: InherentConfig
    jobs: int | None = None
    data_notes: list[str] = field(default_factory=list)  # what was left out of the data: told once, not for every arm
    study: ClassVar[str] = "inherent"
    paper: ClassVar[str] = INHERENT

    def arms(self) -> None:
        """The models of the preset: trained here, or the paper's own."""
        read = {m.name: getattr(self.config, m.name) for m in (TEXT_DATA, IMAGES_DATA, SOUNDS_DATA)}
        self.about["data"] = {"name": ", ".join(f"{medium}: {name}" for medium, name in read.items()), **read}
        if self.config.preset == "paper":
            from anisoscope.studies.published import measure_published

            measure_published(self)
            return
        self._warn()
        trained = [self._arm(*run) for run in self.config.runs()]
        self._prepare(trained)
        failed = self._train(trained)
        self._random()
        self.refuse(failed, len(trained))

    def _warn(self) -> None:
        missing = [f"--{medium}" for medium in sorted({ARMS[arm] for arm in self.config.arms}) if self._made(medium)]
        if self.config.preset == "small" and missing:
            self.about["warnings"].append(
                f"without {', '.join(missing)} models are trained on the small embedded data; this preset is meant for "
                "real text, pictures and recordings"
            )
        for medium in sorted({FAMILIES[family].data for family in self.config.every_family}):
            if (data := getattr(self.config, medium.name)) != self.probe_data(medium):
                self.about["warnings"].append(
                    f"untrained families look at the embedded {medium.noun}: {data!r} is no folder of files"
                )

    def _made(self, medium: Medium) -> bool:
        return getattr(self.config, medium.name) == "embedded"

    # trained models

    def _arm(self, name: str, training: CommonTrainConfig, seed: int) -> StudyArm:
        folder = self.folder.path
        path, corpus = folder / "arms" / f"{name}-seed{seed}", folder / "corpus" / corpus_name(training)
        return StudyArm(name, path, training, self.config.watch, corpus, tuple(self.command))

    def _prepare(self, arms: list[StudyArm]) -> None:
        """Read every kind of data once, before arms that run at the same time would all do so."""
        different = {arm.corpus: arm.training for arm in arms}
        for number, (corpus, training) in enumerate(different.items()):
            if self.progress is not None:
                self.progress("data", number, len(different))
            notes = prepare_data(training, corpus)
            self.data_notes += notes
            self.about["warnings"] += [f"{_medium(training)} that models are trained on: {note}" for note in notes]
        if self.progress is not None:
            self.progress("data", len(different), len(different))

    def _train(self, arms: list[StudyArm]) -> dict[str, str]:
        jobs = PRESETS[self.config.preset].jobs if self.jobs is None else self.jobs
        try:
            return run_arms(arms, jobs=jobs, work=run_arm, progress=self.progress)
        finally:  # of arms that broke off, too: what they measured counts
            for arm in arms:
                self.join(arm.path, name=arm.model, seed=arm.training.seed)

    # random weights

    def _random(self) -> None:
        """Profiles of further families; one that cannot be had is skipped and said."""
        wanted = [(family, seed) for seed in self.config.every_seed for family in self.config.every_family]
        for number, (family, seed) in enumerate(wanted):
            if self.progress is not None:
                self.progress("random weights", number, len(wanted))
            path = self.folder.path / "arms" / f"{random_name(family)}-seed{seed}"
            try:
                self._profile(family, seed, path)
            except Exception as error:  # one family's failure, foreseen or not, is no reason to lose the others
                self.skip(random_name(family), in_words(error, StudyArm(family, path, None, {}, path)))
            self.join(path, seed=seed)
        if normed := [random_name(family) for family in self.config.every_family if FAMILIES[family].norms]:
            self.about["warnings"].append(f"{', '.join(normed)}: {NORMED}")
        if wanted and self.progress is not None:
            self.progress("random weights", len(wanted), len(wanted))

    def _profile(self, family: str, seed: int, path: Path) -> None:
        from anisoscope.measurement.config import ProfileConfig
        from anisoscope.measurement.profile import Profiler

        words = self._words() if FAMILIES[family].words else None
        sizes = {} if words is None else {"vocabulary": words.vocab_size}
        spec = write_configuration(family, self.folder.path / "corpus" / "configurations", **sizes)
        config = ProfileConfig(
            models=(str(spec),),
            data=self.probe_data(FAMILIES[family].data),
            tokens=PRESETS[self.config.preset].rows,
            metrics=GEOMETRY.get(self.config.metrics, tuple(self.config.metrics.split(","))),
            random_init=True,
            tokenizer=None if words is None else str(words.path / "tokenizer"),
            device=self.config.device,
            seed=seed,
        )
        if FAMILIES[family].norms:
            config = with_statistics(config, self.folder.path / "corpus" / f"weights-seed{seed}")
        folder = RunFolder.create(path, asdict(config), resume=True)
        work = NormedProfiler if FAMILIES[family].norms else Profiler
        work(config, folder, command=self.command).run()

    def _words(self) -> Corpus:
        """The text in the tokens of the trained models, which a family of token models reads as well."""
        training = PRESETS[self.config.preset].arms["text-decoder"]
        assert isinstance(training, TrainConfig)
        folder = self.folder.path / "corpus" / corpus_name(training)
        return prepare_corpus(self.config.text, folder, tokens=training.tokens, limit=self.config.limit)

    def probe_data(self, medium: Medium) -> str:
        """What a profile reads: the data of the study where it is text or a folder of such files, else what ships."""
        from anisoscope.data.media import medium_of

        data: str = getattr(self.config, medium.name)
        kind = medium_of(data) if Path(data).is_dir() else None
        return data if medium is TEXT_DATA or (kind is not None and kind is medium) else "embedded"

    def join(self, path: Path, **words: Any) -> None:
        """As the other studies do; every model says what it was looked at with, as the arms read different data."""
        if (path / "table.parquet").is_file():
            words["data"] = RunFolder.open(path).about().get("data")
        before = list(self.about["warnings"])
        super().join(path, **words)
        model = path.name.rpartition("-seed")[0]
        new = [text.replace(f"{path.name}: {model}: ", f"{model}: ") for text in self.about["warnings"][len(before) :]]
        told = [text for text in new if text.partition(": ")[2] not in self.data_notes]
        self.about["warnings"] = list(dict.fromkeys([*before, *told]))  # seeds of one model say the same
        if self.config.preset != "paper":  # its own models say in their entries what is so by design
            self.about["warnings"] = [text for text in self.about["warnings"] if not any(w in text for w in _DESIGN)]


def corpus_name(training: CommonTrainConfig) -> str:
    """The folder of the data that a training reads, shared by all that read the same.

    >>> corpus_name(TrainConfig(tokens="bpe:1024")), corpus_name(MediaConfig(arch="convnext"))
    ('bpe-1024', 'images')
    """
    if isinstance(training, TrainConfig):
        return training.tokens.replace(":", "-")
    assert isinstance(training, MediaConfig)
    return training.shape.medium


def prepare_data(training: CommonTrainConfig, corpus: Path) -> list[str]:
    """Read the data of a training into a folder; sentences on what was left out."""
    if isinstance(training, TrainConfig):
        prepare_corpus(training.data, corpus, tokens=training.tokens, limit=training.limit)
        return []
    assert isinstance(training, MediaConfig)
    found = prepare_examples(training.data, corpus, shape=training.shape, most=training.examples)
    return found.notes


def _medium(training: CommonTrainConfig) -> str:
    return MEDIA[training.shape.medium].noun if isinstance(training, MediaConfig) else TEXT_DATA.noun


def run_arm(arm: StudyArm, progress: Progress | None = None) -> None:
    """Train one arm under its monitor, whatever it reads; an arm that was interrupted goes on."""
    if isinstance(arm.training, TrainConfig):
        train_arm(arm, progress)
        return

    def attach(model: Any, stream: Any, optimizer: Any, training: MediaConfig, folder: Path) -> Any:
        return media_monitor(model, stream, training, folder, name=arm.model, **arm.watch)

    options: dict[str, Any] = {"progress": progress, "command": arm.command, "corpus": arm.corpus, "watch": arm.watch}
    train_media(arm.training, arm.path, monitor=attach, resume=True, **options)


def media_monitor(
    model: Any,
    stream: Any,
    training: MediaConfig,
    folder: Path,
    *,
    name: str = "",
    when: str = "log",
    monitor: str = "attention",
    contexts: int = 96,
    rank: int | None = None,
) -> Any:
    """The monitor of a model of pictures or sounds: a held-out probe, and its folder."""
    from anisoscope.monitor.monitor import Monitor

    return Monitor(
        model,
        probe=stream.probe_batches(contexts, batch_size=probed(stream)),
        when=schedule_of(when, training.steps),
        metrics=monitor,
        rank=rank,
        out=folder,
        total_steps=training.steps,
        name=name or training.arm,
        seed=training.seed,
        batch_size=probed(stream),
        resume=True,
    )
