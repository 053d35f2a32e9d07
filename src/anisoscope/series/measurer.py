"""Measures each checkpoint of a series: its geometry, its loss, and its gradients if it has a loss."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anisoscope.capture.row import Batch, PositionChoice
from anisoscope.capture.sites.layout import find_layout
from anisoscope.data.media_files import CLASS
from anisoscope.data.text import read_documents
from anisoscope.data.tokens import contexts
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.bank import Bank, Setup, prepare
from anisoscope.measurement.config import ProfileConfig
from anisoscope.measurement.evaluation import evaluate_pass
from anisoscope.measurement.feed import Feed, fitting, make_feed
from anisoscope.measurement.inspection import modality_words, plan_passes, reading_fingerprint
from anisoscope.measurement.measure import Tee, capture_batches, feed_tables, joined_sinks
from anisoscope.measurement.targets import MediaTargets, labelled_batch
from anisoscope.metrics.engine.metric import Request
from anisoscope.metrics.tangent import check_rank
from anisoscope.monitor.analysis.analysis import GradientsAlone, compared
from anisoscope.monitor.embedding_watch import EmbeddingWatch
from anisoscope.monitor.held_out import loss_records
from anisoscope.monitor.instruments import Instruments, Probe, stream_kinds
from anisoscope.option import Progress
from anisoscope.results.folder import replace_file
from anisoscope.series import SweepConfig
from anisoscope.series.discovery import has_loss
from anisoscope.tangent.plan import TangentPlan, more_sites
from anisoscope.tangent.row_map import RowMap
from anisoscope.tangent.tangent_study import TangentStudy

HEADLESS = "it has no language-model head, so no loss: its gradients were left out"
COUNTED = 2_000_000  # tokens of the data used for token frequencies
Records = list[dict[str, Any]]


@dataclass
class CheckpointResult:
    """The results of one checkpoint."""

    records: Records = field(default_factory=list)
    cards: Records = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    read: dict[str, Any] = field(default_factory=dict)  # entries `modality` and `rows` of run.json, once known


@dataclass
class CheckpointAlone:
    """What one checkpoint gives by itself, whatever was measured before it."""

    found: CheckpointResult
    sizes: list[int]
    counts: Tensor | None = None  # token frequencies that were used
    probed: bool = False  # whether gradients were looked at
    gradients: GradientsAlone | None = None  # None if there was nothing to test
    table: Tensor | None = None  # the input embedding, whose change is tested
    depths: dict[str, int] = field(default_factory=dict)  # of the stacks
    notes: list[list[str]] = field(default_factory=list)  # of the passes and the analysis; of sites; of the data
    map: dict[str, Any] | None = None  # rows for the map of rows


@dataclass
class CheckpointMeasurer:
    """Measures checkpoints one after the other and carries the state from one to the next.

    What a checkpoint gives by itself (`alone`) can be measured elsewhere; `conclude` compares it with earlier ones.
    """

    config: SweepConfig
    steps: list[int] | None  # of all checkpoints of the series
    study: TangentStudy | None = None
    counts: Tensor | None = None
    table_before: tuple[int, Tensor] | None = None
    sizes: list[int] | None = None  # of the first model
    row_map: RowMap | None = None  # the same few rows of every checkpoint
    counted: Path | None = None  # a folder for token frequencies, which several processes share

    def alone(self, loaded: Any, step: int | None, *, types: bool, tell: Progress) -> CheckpointAlone:
        """What one model gives by itself; `types`: with what is needed to test the change of its embedding table."""
        config, notes = fitting(loaded, feed_config(self.config))
        result, feed = CheckpointResult(notes=notes), make_feed(loaded, config, tell=tell)
        sizes = [int(getattr(loaded.model.config, name, 0) or 0) for name in ("hidden_size", "num_hidden_layers")]
        alone = CheckpointAlone(result, sizes)
        plan, _ = self.config.measured
        if plan is not None and not loaded.reads_text:  # groups are classes, which labels are made of
            feed.config = replace(feed.config, group_by=CLASS)
        batches = self._labelled(loaded, feed, result) if plan is not None else None
        if batches is not None:
            self._gradients(loaded, step, feed, alone, batches=batches, types=types, tell=tell)
        else:
            if self.row_map is not None and loaded.reads_text:  # its rows are coloured by frequency
                self._count(loaded, feed, result)
            self._geometry(loaded, feed, result, tell=tell)
            result.records = [{**row, "step": step} for row in result.records]
            result.records += self._loss(loaded, step, feed, result)
        result.data = feed.about()
        alone.notes.append([*feed.unknown_notes(), *feed.notes()])
        alone.counts = self.counts
        if self.row_map is not None:
            self.row_map.close(step or 0, tokenizer=loaded.tokenizer)
            alone.map = self.row_map.parts(step or 0)
        return alone

    def conclude(self, alone: CheckpointAlone, step: int | None, *, late: bool) -> CheckpointResult:
        """The results of a checkpoint, compared with those before it; the next is compared with this one."""
        result = alone.found
        if alone.probed:
            with self._isolated(alone.sizes, late=late):
                self._compared(alone, step)
        result.notes += [note for note in alone.notes[-1] if note not in result.notes]
        return result

    def adopt(self, alone: CheckpointAlone, step: int | None) -> None:
        """Take over what another process has measured by itself, before `conclude`."""
        self.counts = alone.counts if self.counts is None else self.counts
        if self.row_map is not None:
            self.row_map.adopt(step or 0, alone.map)

    def _compared(self, alone: CheckpointAlone, step: int | None) -> None:
        """Complete the records with comparisons, and remember what the next checkpoint is compared with."""
        plan, _ = self.config.measured
        study, found = self.tangent(plan), alone.found
        records: Records = []
        notes: list[str] = []
        if alone.gradients is not None:
            since, updates = self._updates(alone.table)
            records, notes = compared(study, alone.gradients, since=since, updates=updates, seed=self.config.seed)
        for row in [*found.records, *records]:
            layer, last = row.get("layer"), alone.depths.get(row.get("stack", "single"), 0)
            place: dict[str, Any] = {"step": None} if step is None else {}
            place |= {"depth": layer / last if layer is not None and last else math.nan}
            row |= {"stack": row.get("stack", "single"), **place}
        found.records += records
        if alone.table is not None and step is not None:
            self.table_before = step, alone.table.double().cpu()
        inside, of_sites, _ = alone.notes
        found.notes += [*inside, *notes, *study.notes, *of_sites]

    def _updates(self, table: Tensor | None) -> tuple[int | None, list[tuple[str, Tensor, Tensor]]]:
        """The step of the previous table and its change since then, tested on all types of the data."""
        if table is None or self.table_before is None or self.counts is None:
            return None, []
        since, before = self.table_before
        if before.shape != table.shape:
            return None, []
        read = torch.zeros(len(table), dtype=torch.bool)
        read[: len(self.counts)] = self.counts[: len(table)] > 0
        types = read.nonzero().squeeze(1)
        if not len(types):
            return None, []
        change = table.double() - before.to(table.device)
        return since, [("update_raw", types, change[types.to(change.device)])]

    def _labelled(self, loaded: Any, feed: Feed, found: CheckpointResult) -> list[dict[str, Any]] | None:
        """The batches with what the model is to predict; None, with a note, if it predicts nothing."""
        if loaded.reads_text:
            if not has_loss(loaded.model):
                found.notes.append(HEADLESS)
                return None
            return [labelled_batch(loaded, batch, seed=self.config.seed) for batch in feed.batches()]
        targets = MediaTargets(loaded, feed.class_names())
        try:
            batches = [targets.labelled(batch) for batch in feed.batches()]
        except AnisoscopeError as error:
            if not self.config.series:
                raise
            found.notes.append(f"its gradients were left out: {error}")
            return None
        found.notes += targets.notes
        found.read = {"targets": targets.source}
        return batches

    def _gradients(
        self,
        loaded: Any,
        step: int | None,
        feed: Feed,
        alone: CheckpointAlone,
        *,
        batches: list[dict[str, Any]],
        types: bool,
        tell: Progress,
    ) -> None:
        c, model, found = self.config, loaded.model, alone.found
        plan, requests = c.measured
        if loaded.reads_text:
            self._count(loaded, feed, found)
        study = self.tangent(plan)
        watch, setup = EmbeddingWatch(model), self._setup(loaded, requests)
        words: dict[str, Any] = {"layers": c.layers or None, "halves": c.halves}
        skips = {"skip_first": feed.config.first == "out", "skip_special": feed.config.special == "out"}
        if any(skips.values()):
            words["kept"] = PositionChoice.of(model, loaded.tokenizer, **skips)
        instruments = Instruments(model, setup, requests, study, watch, c.seed, **words)
        if c.rank is not None:
            check_rank(c.rank, width=int(getattr(model.config, "hidden_size", 1 << 30)))
        tell("gradients", 0, 1)
        probe = Probe(instruments, batches, batch_size=c.batch_size)
        found.read |= {"objective": probe.objective}
        bank = instruments.bank()
        if bank is not None:
            feed_tables(bank, model, setup)
        rows = probe.run(step if step is not None else 0, others=joined_sinks(bank, self.row_map))
        analysis = instruments.analysis(tokenizer=loaded.tokenizer)
        found.records, alone.gradients = analysis.alone(instruments.seen(rows, bank), types=types)
        found.cards = [{**card, "step": step} for card in analysis.concepts(rows)]
        if watch.table is not None and plan.embedding:
            alone.table = watch.table.detach()
        alone.probed, alone.depths = True, dict(setup.depths)
        alone.notes = [[*instruments.notes, *analysis.notes], list(setup.notes)]
        tell("gradients", 1, 1)

    def tangent(self, plan: TangentPlan) -> TangentStudy:
        """The tangent study of the series, made at the first call."""
        if self.study is None:
            steps = self.steps if self.config.series else None
            known: dict[str, Any] = {"single": not self.config.series, "measured_steps": steps}
            self.study = TangentStudy(plan, self.counts, max(steps) if steps else None, **known)
        return self.study

    @contextlib.contextmanager
    def _isolated(self, sizes: list[int], *, late: bool) -> Iterator[None]:
        """Around a late checkpoint or one of another size: hide the state of earlier ones and restore it afterwards."""
        self.sizes = self.sizes or sizes
        other_size, study, before = sizes != self.sizes, self.study, self.table_before
        if not (late or other_size):
            yield
            return
        self.table_before = None
        if study is None:
            yield
        else:
            previous, frozen = study.previous, study.frozen
            study.previous, study.frozen = {}, None if other_size else frozen
            yield
            study.previous, study.frozen = previous, frozen if other_size else study.frozen
        self.table_before = before

    def _count(self, loaded: Any, feed: Feed, found: CheckpointResult) -> None:
        """Count token frequencies on the data, once for the whole series."""
        if self.counts is not None:
            return
        name = f"counts-{reading_fingerprint(loaded)}-{feed.length}.pt"
        saved = None if self.counted is None else self.counted / name
        if saved is not None and saved.is_file():
            self.counts = torch.load(saved, weights_only=True)
        else:
            self.counts = self._frequencies(loaded, feed.length)
        if saved is not None and not saved.is_file():
            replace_file(saved, lambda path: torch.save(self.counts, path))
        found.notes.append("token frequencies are those of --data, not of the text the model was trained on")

    def _frequencies(self, loaded: Any, length: int) -> Tensor:
        size = len(loaded.tokenizer)
        total = np.zeros(size, dtype=np.int64)
        documents = read_documents(self.config.data, text_field=self.config.text_field)
        pieces = contexts(documents, loaded.tokenizer, length=length, tokens=COUNTED)
        while some := [piece.ids[~piece.special] for piece in islice(pieces, 1000)]:
            total += np.bincount(np.concatenate(some), minlength=size)[:size]
        return torch.from_numpy(total)

    def _setup(self, loaded: Any, requests: list[Request]) -> Setup:
        c = self.config
        sites = list(c.sites) or (stream_kinds(find_layout(loaded.model)) if c.at_stream else None)
        more = () if c.metrics or not requests else more_sites(c.preset)
        return prepare(loaded.model, requests, sites=sites if requests else None, layers=c.layers or None, more=more)

    def _geometry(self, loaded: Any, feed: Feed, found: CheckpointResult, *, tell: Progress) -> None:
        """Measure the metrics of every site in as few passes as memory allows, like `profile`."""
        model, (tangent, requests) = loaded.model, self.config.measured
        if not requests:
            return
        setup = self._setup(loaded, requests)
        entry: dict[str, Any] = {"notes": []}
        entry |= modality_words(model, list(setup.depths) or ["single"], loaded.tokenizer, layout=setup.layout)
        planned = plan_passes(loaded, setup, requests, feed=feed, entry=entry)
        given: list[int] = []
        for number, sites in enumerate(planned.groups):
            bank = Bank(planned.plan)
            if sites:
                batches = self._batches(loaded, feed, masked=tangent is not None, tell=tell)
                sink = bank if self.row_map is None else Tee([bank, self.row_map])
                positions: dict[str, Any] = {"special": feed.config.special, "first": feed.config.first}
                capture_batches(model, setup, sites, sink, batches, **positions)
            if number == 0:
                feed_tables(bank, model, setup)
            records, counts = evaluate_pass(bank, requests, setup, progress=tell)
            found.records += records
            found.notes += counts["notes"]
            given += [counts["given"]] if counts["given"] is not None else []
        if given:
            feed.recount(min(given))
        found.notes += [*entry["notes"], *setup.notes]
        found.read |= {name: entry[name] for name in ("modality", "rows")}

    def _batches(self, loaded: Any, feed: Feed, *, masked: bool, tell: Progress) -> Iterator[Batch]:
        """The batches; in studies with gradients, text is masked for masked language models as it is for gradients."""
        seen, mask = 0, masked and loaded.reads_text and not loaded.predicts_next
        mask = mask and getattr(loaded.tokenizer, "mask_token_id", None) is not None
        for batch in feed.batches():
            inputs = labelled_batch(loaded, batch, seed=self.config.seed) if mask else batch.inputs
            yield Batch({k: v for k, v in inputs.items() if not mask or k != "labels"}, batch.special)
            seen += feed.rows_of(batch.inputs)
            tell("forward", min(seen, self.config.tokens), self.config.tokens)

    def _loss(self, loaded: Any, step: int | None, feed: Feed, found: CheckpointResult) -> Records:
        """A record of the loss on the same text, if the model has a head for it."""
        if not loaded.reads_text or not has_loss(loaded.model):
            return []
        try:
            batches = [labelled_batch(loaded, batch, seed=self.config.seed) for batch in feed.batches()]
            nothing = Setup(find_layout(loaded.model), [], [], [], {})
            instruments = Instruments(loaded.model, nothing, [], None)
            rows = Probe(instruments, batches, batch_size=self.config.batch_size).run(step or 0)
        except AnisoscopeError as error:
            found.notes.append(f"its loss was left out: {error}")
            return []
        return [{**row, "step": step} for row in loss_records(rows)]

    def state(self) -> dict[str, Any]:
        """The state for saving, as plain values and tensors."""
        study = None if self.study is None else self.study.state()
        rows = None if self.row_map is None else self.row_map.state()
        kept = {"counts": self.counts, "table_before": self.table_before, "sizes": self.sizes}
        return {**kept, "study": study, "map": rows}

    def window(self, key: int) -> dict[str, Any] | None:
        """The moments of one step for an open window of the frozen proxy."""
        frozen = None if self.study is None else self.study.frozen
        return {"study": frozen.window_state(key)} if frozen is not None else None

    def load(self, state: dict[str, Any], window: Callable[[list[int]], dict[int, dict[str, Any]]]) -> None:
        """Restore what `state` returned; `window` loads the moments of an open window."""
        self.counts, self.table_before, self.sizes = state["counts"], state["table_before"], state["sizes"]
        if self.row_map is not None and state.get("map") is not None:
            self.row_map.load(state["map"])
        plan, _ = self.config.measured
        if state["study"] is None or plan is None:
            return
        frozen = state["study"]["frozen"]
        kept = window(frozen["window"] if frozen else [])
        study = self.tangent(plan)
        study.load(state["study"], {step: part["study"] for step, part in kept.items()})
        if frozen is None:  # the window had ended without a step
            study.frozen = None


def feed_config(config: SweepConfig) -> Any:
    """The options of a sweep as those of a profile, for the feed and the passes."""
    names = ("data", "tokens", "context", "seconds", "batch_size", "text_field", "seed", "sites", "halves")
    skips: dict[str, Any] = {"special": config.special, "first": config.first}
    return ProfileConfig(models=config.models, **skips, **{name: getattr(config, name) for name in names})
