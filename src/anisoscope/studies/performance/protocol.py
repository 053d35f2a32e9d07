"""`anisoscope study performance`: does the geometry of representations matter for performance?

Per layer: the model's own loss when its rows are repaired (`patched`), the loss of a fresh linear readout, and the
accuracy of linear probes, each for raw, mean-removed, all-but-the-top and whitened rows; the geometry of the same rows;
and the correlation of both over layers and checkpoints. docs/performance-study.md has the definitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from anisoscope.capture.gradient_pass import LabelConvention
from anisoscope.capture.sites.layout import Layout, find_layout
from anisoscope.capture.sites.site import Site
from anisoscope.claims.dynamics import PerformanceResults, performance_verdicts
from anisoscope.claims.engine.claim import verdicts_to_dicts
from anisoscope.data.tasks import NONE, embedded_units, labelled_units, spread_contexts
from anisoscope.data.text import Document, read_documents
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.catalogue import registry
from anisoscope.metrics.engine.estimation import Estimate
from anisoscope.models.forward import unwrapped
from anisoscope.models.load import load_model
from anisoscope.models.tokenizer import special_ids, tokenizer_fingerprint
from anisoscope.numerics.hashing import FOLDS, fold_of, half_of
from anisoscope.numerics.linear_fits import LinearProbe, Repair, choose_probe, fit_centroids, fit_probe, fit_repairs
from anisoscope.option import Progress
from anisoscope.results.folder import slug
from anisoscope.results.manifest import wrong_loss
from anisoscope.results.query import Table, variant_name
from anisoscope.series.discovery import Checkpoint, find_series, refuse_lossless
from anisoscope.studies.performance import AUTO, PerformanceConfig, row_set
from anisoscope.studies.performance.row_set import FREE, LOSS, SHARE, Material, ProbeScores, RowSet, TextPiece
from anisoscope.studies.performance.shortcut import can_skip
from anisoscope.studies.study_run import Study
from anisoscope.training.corpus import Corpus
from anisoscope.training.loop import train

LOADING = ("random_init", "device", "dtype", "seed", "trust_remote_code", "tokenizer")
GEOMETRY = ("svd_ratio", "average_cosine", "two_nn", "iso_score", "participation_ratio")
MEMORY = 1 << 29  # bytes of rows held in memory at a time
AS_RAW = "the same fit as raw: the intercept is free, so a shift changes nothing"
Found = tuple[str, dict[str, Any], Estimate]  # metric, variant, estimate


@dataclass(frozen=True)
class PerformanceSubject:
    """One model, or one run with its checkpoints."""

    name: str
    spec: str
    checkpoints: tuple[Checkpoint, ...]
    corpus: Path | None = None  # of a run of `anisoscope train`, whose held-out part is read unless data is given


@dataclass
class Performance(Study):
    """One run of the study."""

    config: PerformanceConfig
    tables: list[Table] = field(default_factory=list)
    material: dict[tuple[str, str], Material] = field(default_factory=dict)
    name: ClassVar[str] = "performance"

    def measure(self) -> None:
        """Measure every checkpoint of every model except finished ones, then write correlations and verdicts."""
        subjects = [_subject(spec, self.config.revisions) for spec in self.config.models] or [self._trained()]
        names = [subject.name for subject in subjects]
        if twice := [name for name in names if names.count(name) > 1]:
            raise AnisoscopeError(
                f"two models are called {twice[0]!r}; rename a folder, so that the table tells them apart."
            )
        for subject in subjects:
            self._subject(subject if self.config.data == AUTO else replace(subject, corpus=None))
        measured, found, verdicts = Table.concat(self.tables), [], []
        for name in names:
            results = PerformanceResults(measured, name)
            columns = {"run": self.folder.path.name, "model": name, "seed": self.config.seed, "revision": ""}
            found += [{**columns, "data": self.config.data, **row} for row in row_set.correlations(results)]
            verdicts += performance_verdicts(results)
        self.tables += [Table.from_records(found)] if found else []
        self.folder.write_table(Table.concat(self.tables))
        self.folder.write_json("verdicts.json", verdicts_to_dicts(verdicts))

    def _trained(self) -> PerformanceSubject:
        """Train a small model and return it with its checkpoints."""
        training = self.config.training()
        path = self.folder.path / "arms" / training.arm
        train(training, path, resume=True, progress=self.progress_of(training.arm), command=self.command)
        return PerformanceSubject(training.arm, str(path), _series(str(path)), path / "corpus")

    def _subject(self, subject: PerformanceSubject) -> None:
        for number, checkpoint in enumerate(subject.checkpoints):
            part = f"{slug(subject.name)}-{number:03d}-{slug(checkpoint.label)}"
            table = self.part(part, partial(self._checkpoint, subject, checkpoint, number))
            if table is None:
                continue
            self.tables.append(table)
            self.about["warnings"] = list(dict.fromkeys([*self.about["warnings"], *table.about["warnings"]]))
            self.add_model(table.about["described"])
            self.about |= {"device": table.about["device"], "data": table.about["data"]}
            self.folder.write_table(Table.concat(self.tables))
            self.folder.write_about(self.about)
        if not any(table.about["model"] == subject.name for table in self.tables):
            raise AnisoscopeError(f"no checkpoint of {subject.spec!r} could be measured; see the warnings in run.json.")

    def _checkpoint(self, subject: PerformanceSubject, checkpoint: Checkpoint, number: int) -> Table | None:
        alone = len(subject.checkpoints) == 1
        try:
            loaded = load_model(checkpoint.spec, **{name: getattr(self.config, name) for name in LOADING})
            if loaded.main_input != "input_ids":
                raise AnisoscopeError(
                    f"{checkpoint.spec!r} reads {loaded.main_input}, not token ids; this study takes language models."
                )
            refuse_lossless(loaded, checkpoint.spec)
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
        columns: dict[str, Any] = {"run": self.folder.path.name, "model": subject.name, "data": self.config.data}
        columns |= {"revision": "" if alone else checkpoint.label, "step": None if alone else checkpoint.step}
        columns["seed"] = self.config.seed
        records = [{**columns, **record} for record in measurement.records()]
        kind = "decoder" if loaded.is_decoder else "encoder"
        described: dict[str, Any] = {"name": subject.name, "type": kind, "parameters": loaded.parameters}
        described |= {"fingerprint": loaded.fingerprint, "revision": loaded.revision, **measurement.described}
        about: dict[str, Any] = {"model": subject.name, "described": described, "device": str(loaded.device)}
        lowest = measurement.own.estimate((0.0, None)).low
        wrong = [] if self.config.random_init or checkpoint.step == 0 else wrong_loss(lowest, loaded.vocabulary)
        wrong = [f"{subject.name}: {words}" for words in wrong]
        about["warnings"] = [*wrong, *loaded.notes, *measurement.notes]
        name = "embedded" if self.config.data == AUTO else self.config.data
        name = name if subject.corpus is None else "held-out part of the training text"
        about["data"] = {"name": name, "contexts": len(material.key.unique()), "tasks": list(material.tasks)}
        described["data"] = about["data"]
        return Table.from_records(records, about)

    def _material(self, subject: PerformanceSubject, loaded: Any) -> Material:
        """Contexts and labels, cached for all checkpoints that share a tokenizer."""
        c, size = self.config, self.config.size
        known = (subject.name, tokenizer_fingerprint(loaded.tokenizer))
        if known in self.material:
            return self.material[known]
        if c.context is not None and c.context > loaded.max_context:
            raise AnisoscopeError(
                f"--context {c.context} is more than {loaded.name} takes ({loaded.max_context}); give less."
            )
        length = min(size["context"], loaded.max_context)
        if subject.corpus is not None:
            corpus = Corpus.open(subject.corpus)
            ends = zip(corpus.held_out.starts.tolist(), corpus.held_out.ends.tolist(), strict=True)
            texts = (corpus.tokenizer.decode(corpus.held_out.tokens[a:b].tolist()) for a, b in ends)
            documents: Iterable[Document] = [Document(text, source="held-out") for text in texts]
        else:
            field_ = "text" if c.labels else c.text_field
            documents = read_documents("embedded" if c.data == AUTO else c.data, text_field=field_)
        sizes = {"length": length, "tokens": size["tokens"], "articles": c.articles}
        pieces = spread_contexts(documents, loaded.tokenizer, **sizes)
        units, tasks = embedded_units(pieces, loaded.tokenizer, names=c.asked_tasks, articles=c.articles, seed=c.seed)
        natural = [unit for unit in units if unit.natural]
        if c.labels is not None:
            long = min(loaded.max_context, 512) if c.context is None else length
            words = {"text_field": c.text_field, "label_field": c.label_field}
            given, more = labelled_units(c.labels, loaded.tokenizer, length=long, **words)
            units, tasks = [*given, *(units if c.asked_tasks else [])], {**more, **tasks}
        shown = row_set.make_material(loaded, units, tasks, asked=natural, batch_size=c.batch_size, seed=c.seed)
        self.material = {known: shown}  # keep only one in memory
        return shown


def _subject(spec: str, revisions: Sequence[str]) -> PerformanceSubject:
    """The subject behind a model name: a run with checkpoints, a hub model with revisions, or a single model."""
    name = spec.rstrip("/").split("/")[-1].removesuffix(".gguf")
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


# -- one model: geometry and performance of raw and repaired rows at every site ----------------------------------------
#
# Repairs, readouts and probes are fitted on the fit half of the contexts; every value in the table is measured on the
# test half.


@dataclass
class Measurement:
    """The measurement of one model (one checkpoint)."""

    config: PerformanceConfig
    loaded: Any
    material: Material
    tell: Progress | None = None
    label: str = ""
    notes: list[str] = field(default_factory=list)

    @cached_property
    def layout(self) -> Layout:
        return find_layout(self.loaded.model)

    @property
    def described(self) -> dict[str, Any]:
        """The architecture of the model, in the fields that other runs have for it."""
        config = getattr(self.loaded.model, "config", None)
        width = getattr(config, "hidden_size", None)
        found = {"architecture": type(unwrapped(self.loaded.model)).__name__, "layers": self.layout.stacks[-1].depth}
        return found | ({"width": width} if isinstance(width, int) else {})

    @cached_property
    def sites(self) -> list[Site]:
        kinds: list[str] = [kind for kind in ("embed", "resid", "final") if kind in self.layout.kinds]
        found = self.layout.sites(kinds, self.config.layers or None)
        return [site for site in found if site.stack != "encoder"]  # rows of an encoder stack predict no tokens

    @cached_property
    def reading(self) -> LabelConvention:
        return row_set.label_convention(self.loaded.model, self.material.asked)

    @cached_property
    def tested(self) -> list[TextPiece]:
        """The contexts of the test half on which losses are measured."""
        pieces = [piece.keep(half_of(piece.key).bool()) for piece in self.material.asked]
        return [piece for piece in pieces if len(piece.key)]

    @cached_property
    def own(self) -> ProbeScores:
        """The model's own loss, without any repair."""
        return ProbeScores(*row_set.token_losses(self.loaded.model, self.tested, reading=self.reading))

    @cached_property
    def direct(self) -> set[str]:
        """The stacks that can begin after any of their blocks."""
        inputs = self.tested[0].inputs
        return {stack.name for stack in self.layout.stacks if can_skip(self.loaded.model, stack, inputs)}

    def records(self) -> Iterator[dict[str, Any]]:
        """Records of the table, site by site; rows are captured for as many sites at a time as fit into memory."""
        m, sites, depths = self.material, self.sites, {stack.name: stack.depth for stack in self.layout.stacks}
        rows = sum(int((piece.inputs["attention_mask"] != 0).sum()) for piece in (*m.asked, *m.pieces))
        width = int(getattr(getattr(self.loaded.model, "config", None), "hidden_size", 1024) or 1024)
        size = max(1, MEMORY // max(1, 4 * rows * width))
        special = torch.tensor(sorted(special_ids(self.loaded.tokenizer)), dtype=torch.int64)
        collect = partial(row_set.collect_rows, self.loaded.model, layout=self.layout, special=special)
        for start in range(0, len(sites), size):
            group = sites[start : start + size]
            predicting = collect(m.asked, group, reading=self.reading)
            shown = collect(m.pieces, group)
            for number, site in enumerate(group, start + 1):
                place = {"stack": site.stack, "layer": site.layer, "kind": site.kind, "group": ""}
                place |= {"depth": site.layer / depths[site.stack]}
                for metric, variant, found in self._site(site, predicting.pop(site), shown.pop(site)):
                    yield {**place, "metric": metric, "variant": variant_name(variant), **vars(found)}
                if self.tell is not None:
                    self.tell(self.label, number, len(sites))

    def _site(self, site: Site, predicting: RowSet, shown: RowSet) -> Iterator[Found]:
        c = self.config
        repair = partial(fit_repairs, directions=c.directions, shrinkage=c.shrinkage)
        fitted = repair(predicting.keep(~predicting.test).x)
        known = row_set.known_rows(predicting, self.tested) if site.stack in self.direct else []
        yield from self._patched(site, fitted, known)
        yield from self._readout(predicting, fitted)
        natural = shown.keep(torch.tensor([unit.natural for unit in self.material.units])[shown.unit])
        repairs = repair(natural.keep(~natural.test).x)
        yield from self._geometry(natural, repairs)
        for name, task in self.material.tasks.items():
            rows = natural if task.level == "token" else row_set.pooled(shown, self.config.pool)
            rows = rows.asking(self.material.labels(name, rows))
            fit = self._fit_rows(rows) if task.level == "token" else rows.keep(~rows.test)
            yield from self._task(name, fit, rows.keep(rows.test), repairs)

    def _geometry(self, rows: RowSet, repairs: dict[str, Repair]) -> Iterator[Found]:
        test = rows.keep(rows.test).at_most(self.config.size["rows"], seed=self.config.seed)
        raw: dict[str, Estimate] = {}
        for name, repair in repairs.items():
            x = repair(test.x) if name != "raw" else test.x
            for metric in GEOMETRY:
                if metric == "two_nn" and name == "mean":  # a shift does not change distances
                    found = raw[metric]
                else:
                    found = row_set.metric_estimate(registry()[metric], x, test.key, seed=self.config.seed)
                raw.setdefault(metric, found)
                yield metric, {"repair": name}, found

    def _patched(self, site: Site, repairs: dict[str, Repair], known: Sequence[Tensor]) -> Iterator[Found]:
        """The model's own loss with the rows of this site repaired and rescaled to their original mean norm."""
        model, scores = self.loaded.model, {"raw": self.own}
        for name, repair in repairs.items():
            if name != "raw":
                patch = partial(row_set.patching, model, self.layout, site, partial(repair, rescaled=True))
                losses = row_set.token_losses(model, self.tested, reading=self.reading, patch=patch, known=known)
                scores[name] = ProbeScores(*losses)
            yield from _with_gain("lm_loss", {"reading": "patched", "repair": name}, scores, LOSS)

    def _readout(self, rows: RowSet, repairs: dict[str, Repair]) -> Iterator[Found]:
        """The loss of a fresh softmax readout that predicts the model's targets from these rows."""
        rows = rows.keep(rows.target != NONE)
        target, kept = _frequent(rows.target, rows.test, most=self.config.classes)
        lost = int((rows.test & (target == NONE)).sum())
        rows = rows.asking(target)
        fit, test = self._fit_rows(rows), rows.keep(rows.test)
        note = f"{kept} classes" + (f"; {lost} test tokens are not among them" if lost else "")
        if kept < 2 or not len(test):
            self._note(f"no readout: {len(fit)} rows with {kept} classes to fit on, {len(test)} to test on")
            return
        shares = fit.target.bincount(minlength=kept).double().clamp_min(0.5) / len(fit)
        constant = ProbeScores(-shares.log()[test.target], test.key)
        yield "lm_loss", {"reading": "readout", "control": "constant"}, constant.estimate(LOSS, note=note, dropped=lost)
        scores: dict[str, ProbeScores] = {}
        for name, repair in repairs.items():
            if name == "mean":
                scores[name] = scores["raw"]
            else:
                probe = self._choose(repair(fit.x), fit.target, fit.key, classes=kept)
                scores[name] = ProbeScores(probe.losses(repair(test.x), test.target).cpu(), test.key)
            more = {"note": AS_RAW if name == "mean" else note, "dropped": lost}
            yield from _with_gain("lm_loss", {"reading": "readout", "repair": name}, scores, LOSS, **more)

    def _task(self, name: str, fit_on: RowSet, test_on: RowSet, repairs: dict[str, Repair]) -> Iterator[Found]:
        """Accuracy of the probes on one task, with the shuffled control and the most frequent class."""
        present, answers = fit_on.target.unique(return_inverse=True)
        label, key = test_on.target, test_on.key
        if len(present) < 2 or len(label) < 2:
            self._note(f"task {name} is left out: its contexts to fit on show {len(present)} classes")
            return
        wanted = torch.full_like(label, -2)  # a class not seen in the fit half never counts as correct
        for number, value in enumerate(present.tolist()):
            wanted[label == value] = number
        most = int(answers.bincount().argmax())
        chance = ProbeScores((wanted == most).double(), key)
        yield "probe_accuracy", {"task": name, "control": "majority"}, chance.estimate(SHARE)
        mixed, mixed_wanted = _mixed(answers, seed=self.config.seed), _mixed(wanted, seed=self.config.seed + 1)
        hits: dict[str, ProbeScores] = {}
        nearest: dict[str, ProbeScores] = {}
        for repair, change in repairs.items():
            fit, test = change(fit_on.x), change(test_on.x)
            if repair == "mean":
                hits[repair], note = hits["raw"], AS_RAW  # with the control of raw rows
            else:
                probe = self._choose(fit, answers, fit_on.key, classes=len(present))
                hits[repair], note = ProbeScores(probe.hits(test, wanted).cpu(), key), f"penalty {probe.penalty:g}"
                shuffled = fit_probe(fit, mixed, classes=len(present), penalty=probe.penalty)
                control = ProbeScores(shuffled.hits(test, mixed_wanted).cpu(), key)
            where = {"task": name, "repair": repair}
            yield from _with_gain("probe_accuracy", where, hits, SHARE, note=note)
            yield "probe_accuracy", {**where, "control": "shuffled"}, control.estimate(SHARE)
            yield "probe_selectivity", where, hits[repair].minus(control).estimate(FREE)
            centroids = fit_centroids(fit, answers, classes=len(present))
            nearest[repair] = ProbeScores(centroids.hits(test, wanted).cpu(), key)
            yield from _with_gain("probe_accuracy", {**where, "probe": "cosine"}, nearest, SHARE)

    def _fit_rows(self, rows: RowSet) -> RowSet:
        """The rows to fit on, at most the configured number."""
        return rows.keep(~rows.test).at_most(self.config.size["rows"], seed=self.config.seed)

    def _choose(self, x: Tensor, y: Tensor, key: Tensor, *, classes: int) -> LinearProbe:
        held = fold_of(key) >= FOLDS - row_set.VALIDATION
        return choose_probe(x, y, held, classes=classes, grid=self.config.penalties)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _with_gain(
    metric: str, variant: dict[str, Any], scores: dict[str, ProbeScores], bounds: row_set.Bounds, **more: Any
) -> Iterator[Found]:
    """The estimate of the scores of a repair, and of their paired difference from the scores of raw rows."""
    repaired = scores[variant["repair"]]
    yield metric, variant, repaired.estimate(bounds, **more)
    if variant["repair"] != "raw":
        yield metric, {**variant, "against": "raw"}, repaired.minus(scores["raw"]).estimate(FREE, **more)


def _frequent(target: Tensor, test: Tensor, *, most: int) -> tuple[Tensor, int]:
    """Targets as class indices (the most frequent of the fit half; others NONE), and the number of classes."""
    if not bool((~test).any()):
        raise AnisoscopeError("no token is predicted in the contexts to fit on; give more --tokens.")
    values, counts = target[~test].unique(return_counts=True)
    kept = values[(-counts).argsort(stable=True)[:most]]
    place = torch.full((int(max(target.max(), kept.max())) + 1,), NONE, dtype=torch.int64)
    place[kept] = torch.arange(len(kept))
    return place[target], len(kept)


def _mixed(label: Tensor, *, seed: int) -> Tensor:
    """The labels in random order."""
    return label[torch.randperm(len(label), generator=torch.Generator().manual_seed(seed))]
