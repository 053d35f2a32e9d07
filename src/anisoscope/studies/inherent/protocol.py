"""Anisotropy Is Inherent to Self-Attention (arXiv 2401.12143): small models of every modality, over training.

One model of tokens that predicts the next, one that fills in masked ones, one of characters, one of speech, one of
pictures with attention and its twin with convolutions; each is looked at from its first random weights on. Beside them
further families with random weights. The preset `paper` measures published models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from anisoscope.data.media import medium_of
from anisoscope.measurement.config import ProfileConfig
from anisoscope.measurement.feed import make_feed
from anisoscope.measurement.profile import Profiler
from anisoscope.models.load import load_model, quiet
from anisoscope.results.folder import RunFolder
from anisoscope.results.modality import IMAGES_DATA, MEDIA, SOUNDS_DATA, TEXT_DATA, Medium
from anisoscope.studies import published
from anisoscope.studies.arms import error_line
from anisoscope.studies.config import ArmRun, StudyArm
from anisoscope.studies.inherent import ARMS, FAMILIES, InherentConfig, random_name, write_configuration
from anisoscope.studies.study import INHERENT, ArmsStudy
from anisoscope.tangent.study import GEOMETRY
from anisoscope.training.config import TrainConfig
from anisoscope.training.corpus import Corpus, prepare_corpus
from anisoscope.training.media import MediaConfig
from anisoscope.training.media_examples import prepare_examples

CONTEXTS = 64  # that the statistics are taken from, at most
NORMED = "batch norms have the statistics of one pass over the probe, in which nothing was learned"
# warnings that are so by design: no warnings of the study
_DESIGN = ("random weights", "no processor found", "no tokenizer found", ": no final", ": no query", NORMED)


@dataclass
class Inherent(ArmsStudy):
    """One run of the study."""

    config: InherentConfig
    data_notes: list[str] = field(default_factory=list)  # what was left out of the data: told once, not for every arm
    name: ClassVar[str] = "inherent"
    paper: ClassVar[str] = INHERENT

    def measure(self) -> None:
        """The models of the preset: trained here, or the paper's own."""
        read = {m.name: getattr(self.config, m.name) for m in (TEXT_DATA, IMAGES_DATA, SOUNDS_DATA)}
        self.about["data"] = {"name": ", ".join(f"{medium}: {name}" for medium, name in read.items()), **read}
        super().measure()

    def train(self) -> None:
        """Train an arm of each kind of data, and profile families with random weights."""
        self._warn()
        arms = [self.arm(run) for run in self.config.runs()]
        self.prepare(arms)
        failed = self.run_arms(arms)
        self._profile_random()
        self.refuse(failed, len(arms))

    def _warn(self) -> None:
        trained = sorted({ARMS[arm] for arm in self.config.arms})
        missing = [f"--{medium}" for medium in trained if getattr(self.config, medium.name) == "embedded"]
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

    def arm(self, run: ArmRun) -> StudyArm:
        """The training run of an arm; arms that read the same share their data."""
        return replace(super().arm(run), corpus=self.folder.path / "corpus" / corpus_name(run.training))

    def prepare(self, arms: Sequence[StudyArm]) -> None:
        """Read every kind of data once, before arms that run at the same time would all do so."""
        different = {arm.corpus: arm.training for arm in arms}
        for number, (corpus, training) in enumerate(different.items()):
            self.tell("data", number, len(different))
            if isinstance(training, TrainConfig):
                prepare_corpus(training.data, corpus, tokens=training.tokens, limit=training.limit)
                continue
            shape, most = training.shape, training.examples
            notes = prepare_examples(training.data, corpus, shape=shape, most=most).notes  # on what was left out
            self.data_notes += notes
            noun = MEDIA[shape.medium].noun
            self.about["warnings"] += [f"{noun} that models are trained on: {note}" for note in notes]
        self.tell("data", len(different), len(different))

    def _profile_random(self) -> None:
        """Profiles of further families; one that cannot be had is skipped and said."""
        wanted = [(family, seed) for seed in self.config.every_seed for family in self.config.every_family]
        for number, (family, seed) in enumerate(wanted):
            self.tell("random weights", number, len(wanted))
            path = self.folder.path / "arms" / f"{random_name(family)}-seed{seed}"
            try:
                self._profile(family, seed, path)
            except Exception as error:  # one family's failure, foreseen or not, is no reason to lose the others
                self.skip(random_name(family), error_line(error, path))
            self.join(path, seed=seed)
        if normed := [random_name(family) for family in self.config.every_family if FAMILIES[family].norms]:
            self.about["warnings"].append(f"{', '.join(normed)}: {NORMED}")
        if wanted:
            self.tell("random weights", len(wanted), len(wanted))

    def _profile(self, family: str, seed: int, path: Path) -> None:
        words = self._words() if FAMILIES[family].words else None
        sizes = {} if words is None else {"vocabulary": words.vocab_size}
        spec = write_configuration(family, self.folder.path / "corpus" / "configurations", **sizes)
        config = ProfileConfig(
            models=(str(spec),),
            data=self.probe_data(FAMILIES[family].data),
            tokens=self.config.size.rows,
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
        tokens = self.config.size.fields("text-decoder")["tokens"]
        folder = self.folder.path / "corpus" / corpus_name(TrainConfig(tokens=tokens))
        return prepare_corpus(self.config.text, folder, tokens=tokens, limit=self.config.limit)

    def probe_data(self, medium: Medium) -> str:
        """What a profile reads: the data of the study where it is text or a folder of such files, else what ships."""
        data: str = getattr(self.config, medium.name)
        kind = medium_of(data) if Path(data).is_dir() else None
        return data if medium is TEXT_DATA or kind is medium else "embedded"

    def measure_published(self) -> None:
        """The paper's models, or those of them that were named; what is not in transformers is named as such."""
        absent = published.ABSENT
        if not self.config.models:
            self.about["absent"] = [{"model": name, "reason": reason} for name, reason in absent.items()]
            self.about["warnings"] += [f"{name} is not measured: {reason}" for name, reason in absent.items()]
        models = published.chosen_models(self.config.models, published.INHERENT_MODELS)
        published.measure_models(self, models, self._measure)

    def _measure(self, model: published.PaperModel, path: Path) -> None:
        c = self.config
        if model.series:
            name = model.spec.rpartition("/")[2].partition("-step")[0]
            published.sweep_model(self, model, path, preset="attention", name=name, data=c.text)
            return
        data, metrics = getattr(c, model.data.name), GEOMETRY["attention"]
        config = ProfileConfig(models=(model.spec,), data=data, tokens=c.tokens, metrics=metrics, device=c.device)
        folder = RunFolder.create(path, asdict(config), resume=True)
        with published.downloaded(model, folder) if c.remove_downloads else contextlib.nullcontext():
            Profiler(config, folder, command=self.command, progress=self.progress_of(path.name)).run()

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


def corpus_name(training: TrainConfig | MediaConfig) -> str:
    """The folder of the data that a training reads, shared by all that read the same.

    >>> corpus_name(TrainConfig(tokens="bpe:1024")), corpus_name(MediaConfig(arch="convnext"))
    ('bpe-1024', 'images')
    """
    return training.tokens.replace(":", "-") if isinstance(training, TrainConfig) else str(training.shape.medium)


# -- batch norms of models that never learned --------------------------------------------------------------------------
#
# A fresh batch norm has mean 0 and variance 1 until training tells it otherwise, so a model looked at before that has
# no norms at all: rows keep the offset that the norms are there to remove, and in deep ones they shrink to exact zeros.


class NormedProfiler(Profiler):
    """A profile of a model whose batch norms have seen its probe once; its weights are random all the same."""

    def _network(self, key: str, spec: str, requests: list[Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        records, entry = super()._network(key, spec, requests)
        entry["notes"] = [f"random weights (seed {self.config.seed})", NORMED, *entry.get("notes", [])]
        return records, entry


def with_statistics(config: ProfileConfig, folder: Path) -> ProfileConfig:
    """The same profile of the same random weights, stored with batch norms that have seen the probe once."""
    (spec,) = config.models
    place = folder / Path(spec).name
    if not (place / "config.json").is_file():
        loaded = load_model(spec, random_init=True, device="cpu", dtype="float32", seed=config.seed)
        batches = make_feed(loaded, config).batches()
        few = list(islice(batches, -(-CONTEXTS // config.batch_size)))
        inputs = {name: torch.cat([batch.inputs[name] for batch in few]) for name in few[0].inputs}
        fill_batch_norms(loaded.model, inputs)
        with quiet():
            loaded.model.save_pretrained(str(place))  # type: ignore[operator]
    return replace(config, models=(str(place),), random_init=False)


def fill_batch_norms(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Run the model once with its batch norms as in training, which then keep the mean and variance that they saw."""
    for norm in (module for module in model.modules() if isinstance(module, _BatchNorm)):
        norm.momentum = 1.0
        norm.train()
    with torch.no_grad():
        model(**inputs)
    model.eval()
