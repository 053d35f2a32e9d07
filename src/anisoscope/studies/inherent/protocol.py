"""The study *Anisotropy Is Inherent to Self-Attention* (arXiv 2401.12143): small models of each modality over training.

A next-token and a masked model of tokens, a model of characters, one of speech, and for images one with attention and
three families of convolutions; each is measured from initialisation on. Further families are profiled with random
weights. The preset `paper` measures published models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch

from anisoscope.data.media_files import medium_of
from anisoscope.measurement.config import ProfileConfig
from anisoscope.measurement.feed import make_feed
from anisoscope.measurement.profile import Profiler
from anisoscope.models.load import load_model, quiet
from anisoscope.results.folder import RunFolder
from anisoscope.results.modality import Medium
from anisoscope.results.privacy import placeless
from anisoscope.studies import published
from anisoscope.studies.arms import error_line
from anisoscope.studies.config import ArmRun, StudyArm
from anisoscope.studies.inherent import EVERY_ARM, FAMILIES, InherentConfig, random_name, write_configuration
from anisoscope.studies.study_run import INHERENT, ArmsStudy
from anisoscope.tangent.plan import GEOMETRY
from anisoscope.training.classifier import MediaConfig, examples_of, fill_batch_norms
from anisoscope.training.config import TrainConfig
from anisoscope.training.corpus import Corpus, prepare_corpus

CONTEXTS = 64  # at most so many contexts fill the batch-norm statistics
NORMED = "batch norms have the statistics of one pass over the probe, in which nothing was learned"
# warnings about properties that are intended in this study
_DESIGN = ("random weights", "no processor found", "no tokenizer found", ": no final", ": no query", NORMED)


@dataclass
class Inherent(ArmsStudy):
    """One run of the study."""

    config: InherentConfig
    data_notes: list[str] = field(default_factory=list)  # notes on data that were left out, reported once for all arms
    name: ClassVar[str] = "inherent"
    paper: ClassVar[str] = INHERENT

    def measure(self) -> None:
        """Train the arms of the preset, or measure the published models of the paper."""
        read = {name: getattr(self.config, name) for name in ("text", "images", "audio")}
        self.about["data"] = {"name": ", ".join(f"{medium}: {name}" for medium, name in read.items()), **read}
        super().measure()

    def train(self) -> None:
        """Train the arms, and profile families with random weights."""
        self._warn()
        arms = [self.arm(run) for run in self.config.runs()]
        self.prepare(arms)
        failed = self.run_arms(arms)
        self._profile_random()
        self.refuse(failed, len(arms))

    def _warn(self) -> None:
        trained = sorted({EVERY_ARM[arm].medium for arm in self.config.arms})
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
        """The training run of an arm; arms that read the same data share a corpus folder."""
        return replace(super().arm(run), corpus=self.folder.path / "corpus" / corpus_name(run.training))

    def prepare(self, arms: Sequence[StudyArm]) -> None:
        """Prepare each kind of data once, before parallel arms would each do so."""
        different = {arm.corpus: arm.training for arm in arms}
        for number, (corpus, training) in enumerate(different.items()):
            self.tell("data", number, len(different))
            if isinstance(training, TrainConfig):
                prepare_corpus(training.data, corpus, tokens=training.tokens, limit=training.limit)
                continue
            notes = examples_of(training, corpus).notes  # on what was left out
            self.data_notes += placeless(notes)  # as the arms record them
            noun = training.kind.examples.medium.noun
            self.about["warnings"] += [f"{noun} that models are trained on: {note}" for note in notes]
        self.tell("data", len(different), len(different))

    def _profile_random(self) -> None:
        """Profile further families with random weights; families that fail are recorded as skipped."""
        wanted = [(family, seed) for seed in self.config.every_seed for family in self.config.every_family]
        for number, (family, seed) in enumerate(wanted):
            self.tell("random weights", number, len(wanted))
            path = self.folder.path / "arms" / f"{random_name(family)}-seed{seed}"
            try:
                self._profile(family, seed, path)
            except Exception as error:  # any failure of one family must not stop the others
                self.skip(random_name(family), error_line(error, path))
            self.join(path, seed=seed)
        if normed := [random_name(family) for family in self.config.every_family if FAMILIES[family].norms]:
            self.about["warnings"].append(f"{', '.join(normed)}: {NORMED}")
        if wanted:
            self.tell("random weights", len(wanted), len(wanted))

    def _profile(self, family: str, seed: int, path: Path) -> None:
        corpus: Corpus | None = None
        if FAMILIES[family].words:  # reads the text in the tokens of the trained models
            tokens = self.config.size.fields("text-decoder")["tokens"]
            place = self.folder.path / "corpus" / corpus_name(TrainConfig(tokens=tokens))
            corpus = prepare_corpus(self.config.text, place, tokens=tokens, limit=self.config.limit)
        sizes = {} if corpus is None else {"vocabulary": corpus.vocab_size}
        spec = write_configuration(family, self.folder.path / "corpus" / "configurations", **sizes)
        config = ProfileConfig(
            models=(str(spec),),
            data=self.probe_data(FAMILIES[family].data),
            tokens=self.config.size.rows,
            metrics=GEOMETRY.get(self.config.metrics, tuple(self.config.metrics.split(","))),
            random_init=True,
            tokenizer=None if corpus is None else str(corpus.path / "tokenizer"),
            device=self.config.device,
            seed=seed,
        )
        if FAMILIES[family].norms:
            config = with_statistics(config, self.folder.path / "corpus" / f"weights-seed{seed}")
        folder = RunFolder.create(path, asdict(config), resume=True)
        work = NormedProfiler if FAMILIES[family].norms else Profiler
        work(config, folder, command=self.command).run()

    def probe_data(self, medium: Medium) -> str:
        """The data of a profile: that of the study if it is of this medium, else the embedded data."""
        data: str = getattr(self.config, medium.name)
        kind = medium_of(data) if Path(data).is_dir() else None
        return data if not medium.suffixes or kind is medium else "embedded"  # text may be of any form

    def measure_published(self) -> None:
        """Measure the models of the paper, or those that were named; those not in transformers are listed as absent."""
        absent = published.ABSENT
        if not self.config.models:
            self.about["absent"] = [{"model": name, "reason": reason} for name, reason in absent.items()]
            self.about["warnings"] += [f"{name} is not measured: {reason}" for name, reason in absent.items()]
        published.measure_models(self, self.config.published(), self._measure)

    def _measure(self, model: published.PaperModel, path: Path) -> None:
        c = self.config
        if model.series:
            name = model.spec.rpartition("/")[2].partition("-step")[0]
            published.sweep_model(self, model, path, preset="attention", name=name, data=c.text, tokens=c.probe_tokens)
            return
        data, metrics = getattr(c, model.data.name), GEOMETRY["attention"]
        config = ProfileConfig(models=(model.spec,), data=data, tokens=c.probe_tokens, metrics=metrics, device=c.device)
        folder = RunFolder.create(path, asdict(config), resume=True)
        with published.downloaded(model, folder) if c.remove_downloads else contextlib.nullcontext():
            Profiler(config, folder, command=self.command, progress=self.progress_of(path.name)).run()

    def join(self, path: Path, **fields: Any) -> None:
        """As in the base class; model entries also record their data, since the arms read different data."""
        if (path / "table.parquet").is_file():
            fields["data"] = RunFolder.open(path).about().get("data")
        before = list(self.about["warnings"])
        super().join(path, **fields)
        model = path.name.rpartition("-seed")[0]
        new = [text.replace(f"{path.name}: {model}: ", f"{model}: ") for text in self.about["warnings"][len(before) :]]
        kept = [text for text in new if text.partition(": ")[2] not in self.data_notes]
        self.about["warnings"] = list(dict.fromkeys([*before, *kept]))  # seeds of one model give the same warnings
        if self.config.preset != "paper":  # published models note intended properties in their entries
            self.about["warnings"] = [text for text in self.about["warnings"] if not any(w in text for w in _DESIGN)]


def corpus_name(training: TrainConfig | MediaConfig) -> str:
    """The folder of the data that a training reads, shared by all that read the same.

    >>> corpus_name(TrainConfig(tokens="bpe:1024")), corpus_name(MediaConfig(arch="convnext"))
    ('bpe-1024', 'images')
    """
    return (
        training.tokens.replace(":", "-") if isinstance(training, TrainConfig) else training.kind.modality.medium.name
    )


# -- batch norms of models that never learned --------------------------------------------------------------------------
#
# A fresh batch norm has running mean 0 and variance 1, so before training it does not normalise: rows keep the offset
# that the norms should remove, and in deep models they shrink to exact zeros.


class NormedProfiler(Profiler):
    """A profiler of models with random weights whose batch-norm statistics were filled with one pass over the probe."""

    def _network(self, key: str, spec: str, requests: list[Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        records, entry = super()._network(key, spec, requests)
        entry["notes"] = [f"random weights (seed {self.config.seed})", NORMED, *entry.get("notes", [])]
        return records, entry


def with_statistics(config: ProfileConfig, folder: Path) -> ProfileConfig:
    """The profile configuration for a stored copy of the random model with batch-norm statistics from the probe."""
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
