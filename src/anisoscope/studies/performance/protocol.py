"""`anisoscope study performance`: does the geometry of representations matter for what can be done with them?

Per layer: the model's own loss when its rows are repaired (`patched`), the loss of a fresh linear readout, the accuracy
of linear probes, each for raw, mean-removed, all-but-the-top and whitened rows; the geometry of the same rows beside
it; and how both go together over layers and checkpoints. docs/performance-study.md has the definitions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from anisoscope.claims.dynamics.performance import PerformanceResults, performance_verdicts
from anisoscope.claims.engine.claim import verdicts_to_dicts
from anisoscope.data.tasks import embedded_units, labelled_units, spread_contexts
from anisoscope.data.text import Document, read_documents
from anisoscope.errors import AnisoscopeError
from anisoscope.models.load import load_model
from anisoscope.models.tokenizer import tokenizer_fingerprint
from anisoscope.results.folder import RunFolder, slug
from anisoscope.results.manifest import new_manifest
from anisoscope.results.table import Table
from anisoscope.series.discovery import Checkpoint, find_series, has_loss, lossless
from anisoscope.studies.performance.config import AUTO, PerformanceConfig
from anisoscope.studies.performance.correlation import correlations
from anisoscope.studies.performance.measurement import Measurement
from anisoscope.studies.performance.rows import Material, make_material
from anisoscope.training.corpus import Corpus
from anisoscope.training.loop import train

__all__ = ["Performance", "PerformanceConfig"]

Progress = Callable[[str, int, int], None]
LOADING = ("random_init", "device", "dtype", "seed", "trust_remote_code", "tokenizer")


@dataclass(frozen=True)
class PerformanceSubject:
    """One model, or one run with its checkpoints."""

    name: str
    spec: str
    checkpoints: tuple[Checkpoint, ...]
    corpus: Path | None = None  # of a training run of ours: its held-out part is what is read


@dataclass
class Performance:
    """One run of the study."""

    config: PerformanceConfig
    folder: RunFolder
    command: Sequence[str] = ()
    progress: Progress | None = None
    about: dict[str, Any] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    material: dict[tuple[str, str], Material] = field(default_factory=dict)

    def run(self) -> Path:
        """Every checkpoint of every model, then correlations and verdicts; a finished one is never measured again."""
        old = self.folder.about()
        if old.get("status") == "complete":
            return self.folder.path
        words = {"kind": "study", "study": "performance"}
        self.about = new_manifest(asdict(self.config), command=self.command, seed=self.config.seed, old=old, **words)
        self.folder.write_about(self.about)
        started = time.monotonic()
        try:
            subjects = self._subjects()
            for subject in subjects:
                self._subject(subject)
            self._conclude(subjects)
        except BaseException as error:
            self._end("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", started, error)
            raise
        self._end("complete", started)
        return self.folder.path

    def _end(self, status: str, started: float, error: BaseException | None = None) -> None:
        self.about["status"] = status
        if error is not None and str(error):
            self.about["error"] = str(error).splitlines()[0]
        self.about["wall_seconds"] = round(self.about["wall_seconds"] + time.monotonic() - started, 1)
        self.folder.write_about(self.about)

    # what is looked at

    def _subjects(self) -> list[PerformanceSubject]:
        if not self.config.models:
            return [self._trained()]
        found = [_subject(spec, self.config.revisions) for spec in self.config.models]
        names = [subject.name for subject in found]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise AnisoscopeError(
                f"two models are called {twice!r}; rename a folder, so that the table tells them apart."
            )
        return found

    def _trained(self) -> PerformanceSubject:
        """A small model that learns here and now, with its checkpoints."""
        training = self.config.training()
        path = self.folder.path / "arms" / training.arm
        tell = self.progress
        told = None if tell is None else lambda what, done, total: tell(f"{training.arm}: {what}", done, total)
        train(training, path, resume=True, progress=told, command=self.command)
        return PerformanceSubject(training.arm, str(path), _series(str(path)), path / "corpus")

    # one model

    def _subject(self, subject: PerformanceSubject) -> None:
        for number, checkpoint in enumerate(subject.checkpoints):
            part = f"{slug(subject.name)}-{number:03d}-{slug(checkpoint.label)}"
            table = self.folder.part(part)
            if table is None:
                table = self._checkpoint(subject, checkpoint, number)
                if table is None:
                    continue
                self.folder.write_part(part, table)
            self._remember(subject, checkpoint, table)
        if not any(table.about["model"] == subject.name for table in self.tables):
            raise AnisoscopeError(f"no checkpoint of {subject.spec!r} could be measured; see the warnings in run.json.")

    def _remember(self, subject: PerformanceSubject, checkpoint: Checkpoint, table: Table) -> None:
        self.tables.append(table)
        for warning in table.about["warnings"]:
            if warning not in self.about["warnings"]:
                self.about["warnings"].append(warning)
        if not any(model["name"] == subject.name for model in self.about["models"]):
            self.about["models"].append(table.about["described"])
        self.about |= {"device": table.about["device"], "data": table.about["data"]}
        self.folder.write_table(Table.concat(self.tables))
        self.folder.write_about(self.about)

    def _checkpoint(self, subject: PerformanceSubject, checkpoint: Checkpoint, number: int) -> Table | None:
        alone = len(subject.checkpoints) == 1
        try:
            loaded = load_model(checkpoint.spec, **{name: getattr(self.config, name) for name in LOADING})
            _refuse_useless(loaded, checkpoint.spec)
            if not all(bool(p.isfinite().all()) for p in loaded.model.parameters()):
                raise AnisoscopeError(f"{checkpoint.label} has weights that are not finite; it was not measured.")
            material = self._material(subject, loaded)
        except AnisoscopeError as error:
            if alone:
                raise
            self.about["warnings"].append(f"{checkpoint.label} was left out: {error}")
            return None
        label = subject.name if alone else f"{subject.name} {number + 1}/{len(subject.checkpoints)} (sites)"
        measurement = Measurement(self.config, loaded, material, self.progress, label)
        columns = {
            "run": self.folder.path.name,
            "model": subject.name,
            "revision": "" if alone else checkpoint.label,
            "step": None if alone else checkpoint.step,
            "seed": self.config.seed,
            "data": self.config.data,
        }
        records = [{**columns, **record} for record in measurement.records()]
        kind = "decoder" if loaded.is_decoder else "encoder"
        described = {"name": subject.name, "type": kind, "parameters": loaded.parameters}
        contexts = len(material.key.unique())
        about = {
            "model": subject.name,
            "described": {**described, "fingerprint": loaded.fingerprint, "revision": loaded.revision},
            "warnings": [*loaded.notes, *measurement.notes],
            "device": str(loaded.device),
            "data": {"name": self._data_name(subject), "contexts": contexts, "tasks": list(material.tasks)},
        }
        return Table.from_records(records, about)

    # what it is shown

    def _data_name(self, subject: PerformanceSubject) -> str:
        if self.config.data != AUTO:
            return self.config.data
        return "embedded" if subject.corpus is None else "held-out part of the training text"

    def _documents(self, subject: PerformanceSubject) -> Iterable[Document]:
        c = self.config
        if c.data == AUTO and subject.corpus is not None:
            return held_out_documents(subject.corpus)
        field_ = "text" if c.labels else c.text_field
        return read_documents("embedded" if c.data == AUTO else c.data, text_field=field_)

    def _material(self, subject: PerformanceSubject, loaded: Any) -> Material:
        """Contexts and labels, made once for all checkpoints that share a tokenizer."""
        key = (subject.name, tokenizer_fingerprint(loaded.tokenizer))
        if key not in self.material:
            self.material = {key: self._make_material(subject, loaded)}
        return self.material[key]

    def _make_material(self, subject: PerformanceSubject, loaded: Any) -> Material:
        c, size = self.config, self.config.size
        if c.context is not None and c.context > loaded.max_context:
            raise AnisoscopeError(
                f"--context {c.context} is more than {loaded.name} takes ({loaded.max_context}); give less."
            )
        length = min(size["context"], loaded.max_context)
        pieces = spread_contexts(
            self._documents(subject), loaded.tokenizer, length=length, tokens=size["tokens"], articles=c.articles
        )
        units, tasks = embedded_units(pieces, loaded.tokenizer, names=c.asked_tasks, articles=c.articles, seed=c.seed)
        natural = [unit for unit in units if unit.natural]
        if c.labels is not None:
            long = min(loaded.max_context, 512) if c.context is None else length
            words = {"text_field": c.text_field, "label_field": c.label_field}
            given, more = labelled_units(c.labels, loaded.tokenizer, length=long, **words)
            units, tasks = [*given, *(units if c.asked_tasks else [])], {**more, **tasks}
        return make_material(loaded, units, tasks, asked=natural, batch_size=c.batch_size, seed=c.seed)

    # what it comes to

    def _conclude(self, subjects: Sequence[PerformanceSubject]) -> None:
        measured = Table.concat(self.tables)
        found, verdicts = [], []
        for subject in subjects:
            results = PerformanceResults(measured, subject.name)
            columns = {"run": self.folder.path.name, "model": subject.name, "seed": self.config.seed, "revision": ""}
            found += [{**columns, "data": self.config.data, **row} for row in correlations(results)]
            verdicts += performance_verdicts(results)
        if found:
            self.tables.append(Table.from_records(found))
        self.folder.write_table(Table.concat(self.tables))
        self.folder.write_json("verdicts.json", verdicts_to_dicts(verdicts))


def _subject(spec: str, revisions: Sequence[str]) -> PerformanceSubject:
    """A run with checkpoints, a hub model with revisions, or a single model."""
    name = spec.rstrip("/").split("/")[-1]
    path = Path(spec).expanduser()
    if revisions:
        return PerformanceSubject(name, spec, _series(spec, revisions))
    if path.is_dir() and not (path / "config.json").is_file() and not (path / "adapter_config.json").is_file():
        corpus = path / "corpus"
        inside = corpus if (corpus / "corpus.json").is_file() else None
        return PerformanceSubject(path.resolve().name, spec, _series(spec), inside)
    return PerformanceSubject(name, spec, (Checkpoint(spec, None, name),))


def _series(spec: str, revisions: Sequence[str] = ()) -> tuple[Checkpoint, ...]:
    return tuple(find_series([spec], list(revisions)).checkpoints)


def _refuse_useless(loaded: Any, spec: str) -> None:
    """Models that read no text or predict no token."""
    if loaded.main_input != "input_ids":
        raise AnisoscopeError(f"{spec!r} reads {loaded.main_input}, not token ids; this study takes language models.")
    if not has_loss(loaded.model):
        raise lossless(loaded, spec)


def held_out_documents(corpus: Path) -> list[Document]:
    """The text of a training run that its model was not trained on."""
    found = Corpus.open(corpus)
    part = found.held_out
    pairs = zip(part.starts.tolist(), part.ends.tolist(), strict=True)
    return [Document(found.tokenizer.decode(part.tokens[a:b].tolist()), source="held-out") for a, b in pairs]
