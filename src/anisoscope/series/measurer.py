"""Measures each checkpoint of a series: its geometry, its loss, and its gradients if it has a loss."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
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
from anisoscope.measurement.inspection import modality_words, plan_passes
from anisoscope.measurement.measure import Tee, capture_batches, feed_tables, joined_sinks
from anisoscope.measurement.targets import MediaTargets, labelled_batch
from anisoscope.metrics.engine.metric import Request
from anisoscope.metrics.tangent import check_rank
from anisoscope.monitor.embedding_watch import EmbeddingWatch
from anisoscope.monitor.held_out import loss_records
from anisoscope.monitor.instruments import Instruments, Probe, stream_kinds
from anisoscope.option import Progress
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
class CheckpointMeasurer:
    """Measures checkpoints one after the other and carries the state from one to the next."""

    config: SweepConfig
    steps: list[int] | None  # of all checkpoints of the series
    study: TangentStudy | None = None
    counts: Tensor | None = None
    table_before: tuple[int, Tensor] | None = None
    sizes: list[int] | None = None  # of the first model
    row_map: RowMap | None = None  # the same few rows of every checkpoint

    def measure(self, loaded: Any, step: int | None, *, late: bool, tell: Progress) -> CheckpointResult:
        """Measure one model; a `late` one is measured after later steps and not compared with them."""
        config, notes = fitting(loaded, feed_config(self.config))
        result, feed = CheckpointResult(notes=notes), make_feed(loaded, config, tell=tell)
        plan, _ = self.config.measured
        if plan is not None and not loaded.reads_text:  # groups are classes, which labels are made of
            feed.config = replace(feed.config, group_by=CLASS)
        batches = self._labelled(loaded, feed, result) if plan is not None else None
        if batches is not None:
            with self._isolated(loaded, late=late):
                self._gradients(loaded, step, feed, result, batches=batches, tell=tell)
        else:
            if self.row_map is not None and loaded.reads_text:  # its rows are coloured by frequency
                self._count(loaded, feed, result)
            self._geometry(loaded, feed, result, tell=tell)
            result.records = [{**row, "step": step} for row in result.records]
            result.records += self._loss(loaded, step, feed, result)
        result.data = feed.about()
        result.notes += [note for note in feed.notes() if note not in result.notes]
        if self.row_map is not None:
            self.row_map.close(step or 0, tokenizer=loaded.tokenizer)
        return result

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
        found: CheckpointResult,
        *,
        batches: list[dict[str, Any]],
        tell: Progress,
    ) -> None:
        c, model = self.config, loaded.model
        plan, requests = c.measured
        if loaded.reads_text:
            self._count(loaded, feed, found)
        study = self.tangent(plan)
        watch, setup = self._watch(model), self._setup(loaded, requests)
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
        for row in analysis.measure(instruments.seen(rows, bank)):
            layer, last = row.get("layer"), setup.depths.get(row.get("stack", "single"), 0)
            place: dict[str, Any] = {"step": None} if step is None else {}
            place |= {"depth": layer / last if layer is not None and last else math.nan}
            found.records.append({"stack": "single", **row, **place})
        found.cards = [{**card, "step": step} for card in analysis.concepts(rows)]
        if watch.table is not None and step is not None:
            self.table_before = step, watch.table.detach().double().cpu()
        found.notes += [*instruments.notes, *analysis.notes, *study.notes, *setup.notes]
        tell("gradients", 1, 1)

    def tangent(self, plan: TangentPlan) -> TangentStudy:
        """The tangent study of the series, made at the first call."""
        if self.study is None:
            steps = self.steps if self.config.series else None
            known: dict[str, Any] = {"single": not self.config.series, "measured_steps": steps}
            self.study = TangentStudy(plan, self.counts, max(steps) if steps else None, **known)
        return self.study

    @contextlib.contextmanager
    def _isolated(self, loaded: Any, *, late: bool) -> Iterator[None]:
        """Around a late checkpoint or one of another size: hide the state of earlier ones and restore it afterwards."""
        sizes = [int(getattr(loaded.model.config, name, 0) or 0) for name in ("hidden_size", "num_hidden_layers")]
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

    def _watch(self, model: Any) -> EmbeddingWatch:
        """A watch with the table of the previous checkpoint, so that its change is tested on all types of the data."""
        watch = EmbeddingWatch(model)
        if (table := watch.table) is not None and self.table_before is not None and self.counts is not None:
            watch.step, before = self.table_before
            if before.shape == table.shape:
                watch.before = before.to(table.device)
                watch.closed = torch.zeros(len(table), dtype=torch.bool, device=table.device)
                watch.closed[: len(self.counts)] = (self.counts[: len(table)] > 0).to(table.device)
        return watch

    def _count(self, loaded: Any, feed: Feed, found: CheckpointResult) -> None:
        """Count token frequencies on the data, once for the whole series."""
        if self.counts is not None:
            return
        size = len(loaded.tokenizer)
        total = np.zeros(size, dtype=np.int64)
        documents = read_documents(self.config.data, text_field=self.config.text_field)
        pieces = contexts(documents, loaded.tokenizer, length=feed.length, tokens=COUNTED)
        while some := [piece.ids[~piece.special] for piece in islice(pieces, 1000)]:
            total += np.bincount(np.concatenate(some), minlength=size)[:size]
        self.counts = torch.from_numpy(total)
        found.notes.append("token frequencies are those of --data, not of the text the model was trained on")

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
