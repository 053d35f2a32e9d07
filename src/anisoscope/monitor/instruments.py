"""Everything that is measured at one step: geometry, the tangent study, gradients of tables and weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.capture import Rule
from anisoscope.capture.gradients.gradient_pass import stream_readers, unlabelled, untouched
from anisoscope.capture.gradients.step_hooks import MicroBatch, live_pass
from anisoscope.capture.sites.layout import Layout
from anisoscope.capture.sites.site import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.bank import Bank
from anisoscope.measurement.evaluation import evaluate_bank, row_counts, row_notes
from anisoscope.measurement.measure import leave_unseen_out
from anisoscope.measurement.site_plan import Setup, make_plan
from anisoscope.metrics.engine.metric import Request
from anisoscope.metrics.frequency import unigram_entropy
from anisoscope.metrics.training import probe_loss
from anisoscope.models.forward import unwrapped
from anisoscope.monitor.probe import Probe, labelled
from anisoscope.tangent.concepts import card_sites, cards
from anisoscope.tangent.energy import Record, holm_records, placed
from anisoscope.tangent.parameters import (
    EmbeddingWatch,
    TableStudy,
    fit_on_types,
    input_role,
    unseen_types,
    weight_records,
)
from anisoscope.tangent.proxy import Label, Proxy
from anisoscope.tangent.step_rows import Half, StepRows, take
from anisoscope.tangent.study import TangentStudy


@dataclass
class Instruments:
    """What one model is measured with; `study` is missing where only its geometry is wanted."""

    model: nn.Module
    layout: Layout
    sites: list[Site]
    setup: Setup
    requests: Sequence[Request]
    study: TangentStudy | None
    watch: EmbeddingWatch | None = None
    seed: int = 0
    readers: dict[Site, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    earlier: dict[Site, tuple[int, Tensor]] = field(default_factory=dict)  # concepts of the step before
    row_count: int = 0  # of the site that saw most, at the last measured step
    halves: bool = False  # dimensions of the stream also on two disjoint halves of the contexts
    rows: Rule | None = None  # which rows are data, where the arguments of the model do not say it

    def bank(self) -> Bank | None:
        """A fresh bank for the geometry metrics of one step."""
        if not self.requests:
            return None
        return Bank(make_plan(self.requests, self.setup.kinds, seed=self.seed, halves=self.halves))

    @property
    def output_weight(self) -> str | None:
        """The name of the output head's weight, where the model has one of two dimensions."""
        reader = getattr(unwrapped(self.model), "get_output_embeddings", None)
        try:
            weight = getattr(reader() if reader is not None else None, "weight", None)
        except (NotImplementedError, AttributeError):
            return None
        return next((n for n, p in self.model.named_parameters() if p is weight and p.requires_grad), None)

    def probe_options(self) -> dict[str, Any]:
        """What a probe must gather for all this."""
        plan = self.study.plan if self.study is not None else None
        names = [name for found in self.readers.values() for name in found]
        table = plan is not None and plan.embedding and self.watch is not None and self.watch.table is not None
        if table and (name := self.output_weight) is not None:
            names.append(name)
        weights = list(dict.fromkeys(names))
        return {"weights": weights, "embedding": table, "fit_only": list(self.readers), "by_fold": bool(self.readers)}

    def measure(self, rows: StepRows, bank: Bank | None) -> list[Record]:
        """All rows of the table of one step."""
        records: list[Record] = []
        place = {"kind": "training", "step": rows.step, "variant": "", "group": ""}
        if bank is not None:
            self.row_count = row_counts(bank)["row_count"]
            for note in row_notes(bank):
                self.note(f"step {rows.step}: {note}")
            records += [{**row, "step": rows.step} for row in evaluate_bank(bank, self.requests, self.setup)]
        if rows.tokens and rows.losses and (self.study is None or not self.study.source):  # a training batch tells none
            records.append(
                {**place, "metric": "probe_loss", "value": probe_loss(rows.loss, rows.tokens), "n": rows.tokens}
            )
        if self.study is None or self.left_out(rows):
            return records
        if rows.unreached:
            self.note(f"no gradient reaches {', '.join(map(str, sorted(rows.unreached)))}: what lies before is frozen")
        records += self.study.measure(rows)
        if self.study.counts is not None:
            records.append(
                {**place, "metric": "unigram_entropy", "value": unigram_entropy(self.study.counts), "layer": 0}
            )
        beside = [*self._tables(rows), *self._weights(rows)]
        return [*records, *beside, *holm_records(beside)]

    def learned_rows(self, step: int, seen: list[MicroBatch], bank: Bank | None, scale: LossScale) -> StepRows:
        """The rows of all micro-batches that were learned from, with the scale of their gradients undone."""
        rows = StepRows(step)
        if seen and not any(batch.has_targets() for batch in seen):
            raise AnisoscopeError(
                f"every label of step {step} is ignored (-100), so there is no loss; expected labels somewhere: "
                "check the collator or the masking."
            )
        for batch in (batch for batch in seen if batch.gradients):
            factor = scale.factor(batch, step=step)
            if bank is not None:
                batch.feed(bank)
            rows.add_fit(live_pass(batch, self.sites, half=0))
            rows.add_test(live_pass(batch, self.sites, half=1), factor=factor)
        if not rows.test:
            raise _unseen(step, forward=bool(seen))
        return rows

    def measure_shown(self, step: int, seen: Sequence[MicroBatch], bank: Bank | None) -> list[Record]:
        """The geometry of a training batch alone: what its loss is does not matter, only that it was learned from."""
        rows, learned = StepRows(step), [batch for batch in seen if batch.learned_from()]
        if not learned:
            raise _unseen(step, forward=bool(seen))
        if bank is None:
            return []
        for batch in learned:
            batch.feed(bank)
        absent = [str(site) for site in self.sites if site not in bank.sites]
        if absent:  # some models leave out whole layers in training
            self.note(f"step {step}: nothing came through {', '.join(absent)} (layers dropped in training?)")
        return self.measure(rows, bank)

    def left_out(self, rows: StepRows) -> bool:
        """Whether a step has nothing to test, which is noted: a training run is not stopped for it."""
        reason = rows.lacking()
        if reason:
            self.note(f"{reason}, so its gradients were left out")
        return bool(reason)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def concepts(self, rows: StepRows, tokenizer: Any) -> list[dict[str, Any]]:
        """Cards of the concepts of a few sites: what they stand for, in tokens."""
        if self.study is None or self.study.plan.proxies[0] != "semi_nmf" or rows.lacking():
            return []
        proxies = self.study.fitted["semi_nmf"]
        sites = [site for site in card_sites(self.sites) if site in proxies]
        fits = {site: rows.fit_half(site) for site in sites}
        found = cards(fits, proxies, tokenizer, earlier=self.earlier)
        self.earlier = {site: (rows.step, proxies[site].directions.cpu()) for site in sites}
        return [{"step": rows.step, **card} for card in found]

    # tables

    def _tables(self, rows: StepRows) -> list[Record]:
        study, watch = self.study, self.watch
        if study is None or watch is None or not study.plan.embedding or (table := watch.table) is None:
            return []
        embed = next((s for s in self.sites if s.kind == "embed" and s in study.previous), None)
        if embed is None:  # not among the layers asked for, or frozen, which is noted
            return []
        if study.fitted[study.plan.proxies[0]][embed].basis.shape[0] != table.shape[1]:
            self.note("the embedding table has another width than the stream, so its gradients are left out")
            return []
        tests = TableStudy(study.plan.draws, self.seed, study.bins)
        records: list[Record] = []
        for of, site, found in self._roles(rows, embed, table):
            types = found.abs().sum(1).nonzero().squeeze(1)
            mine = {Label(p, study.main_rank): study.fitted[p][site] for p in study.plan.proxies[:2]}
            records += placed(site, rows.step, tests.records(found[types], types.cpu(), mine, of=of))
        return records + self._updates(rows, embed, tests)

    def _roles(self, rows: StepRows, embed: Site, table: Tensor) -> list[tuple[str, Site, Tensor]]:
        """The gradient of the table in its input role, and of the output head; a tied one is the rest of the whole."""
        found: list[tuple[str, Site, Tensor]] = []
        inside = input_role(rows.embedded, len(table)) if rows.embedded else None
        if inside is not None:
            found.append(("embedding_in", embed, inside))
        name = self.output_weight
        parts = [g[name].double() for _, g in rows.weights if name is not None and name in g]
        assert self.study is not None
        last = [s for s in self.study.previous if s.stack == embed.stack or s.stack == "decoder"]
        if not parts or not last:
            return found
        site = max(last, key=lambda s: (s.layer, s.kind == "final"))
        whole = torch.stack(parts).sum(0)
        tied = dict(self.model.named_parameters())[name or ""] is table
        if tied and inside is None:
            return found
        outside = whole - inside if tied and inside is not None else whole
        if outside.shape[1] == len(self.study.fitted[self.study.plan.proxies[0]][site].basis):
            found.append(("embedding_out", site, outside))
        return found

    def _updates(self, rows: StepRows, embed: Site, tests: TableStudy) -> list[Record]:
        """Updates since the last measured step, of types that the proxy has not seen."""
        study, watch = self.study, self.watch
        assert study is not None and watch is not None
        updates = list(watch.updates())
        if not updates:
            return []
        proxies: dict[Label, Proxy] = {}
        for name in study.plan.proxies[:2]:
            proxies |= fit_on_types(rows.fit_half(embed), Label(name, study.main_rank), site=embed, seed=self.seed)
        if not proxies:
            self.note("too few types in the probe to fit a proxy on half of them; updates are left out")
        records: list[Record] = []
        for of, types, change in updates if proxies else ():
            mine = unseen_types(int(types.max()) + 1)[types].nonzero().squeeze(1)
            note = f"since step {watch.step}"
            found = tests.records(change[mine.to(change.device)], types[mine], proxies, of=of)
            records += placed(embed, rows.step, [{**r, "note": note} for r in found])
        return records

    def _weights(self, rows: StepRows) -> list[Record]:
        study = self.study
        if study is None or not self.readers or not rows.weights:
            return []
        fits: dict[Site, Half] = {site: rows.fit_half(site) for site in self.readers if site in rows.fit}
        plan = study.plan
        words: dict[str, Any] = {"rank": study.main_rank, "draws": plan.draws, "most": plan.fit_rows, "seed": self.seed}
        proxies = plan.proxies[:2]
        return list(weight_records(self.model, self.readers, rows, fits=fits, proxies=proxies, **words))


def make_probe(instruments: Instruments, probe: Any, *, loss: Any = None, batch_size: int = 16) -> Probe:
    """The probe that feeds these instruments, of one batch or several."""
    one = isinstance(probe, Tensor) or hasattr(probe, "keys")
    batches, i = [probe] if one else list(probe), instruments
    if batches:
        with untouched(i.model):
            leave_unseen_out(i.model, batches[0], i.setup, rows=i.rows)
    if batches and i.study is not None and i.study.plan.weights:
        first = labelled(i.model, batches[0])
        inputs = unlabelled(i.model, take(first, torch.arange(1)))
        i.readers = stream_readers(i.model, i.layout, inputs, rows=i.rows)
        if not i.readers:
            i.note("no linear was found that reads attn_in or mlp_in, so weight gradients are left out")
    extra = [site for site in i.setup.captured if site not in i.sites] if i.requests else ()
    words: dict[str, Any] = {"layout": i.layout, "sites": i.sites, "extra": extra, "rows": i.rows, "loss": loss}
    gradients = i.study is not None
    return Probe(i.model, batches, batch_size=batch_size, gradients=gradients, **words, **i.probe_options())


@dataclass(frozen=True)
class LossScale:
    """What a training loop says of its loss: what it is of the tokens of a micro-batch, and a factor."""

    loss: str  # auto, mean or sum
    tokens: int | None
    scale: float

    def factor(self, batch: MicroBatch, *, step: int) -> float:
        """What turns the gradients that arrived into gradients of the summed loss."""
        if self.loss not in ("auto", "mean", "sum"):
            raise AnisoscopeError(f"loss={self.loss!r} is not known; expected auto, mean or sum.")
        if self.loss == "auto":
            if batch.seed is None or not batch.tokens():
                raise AnisoscopeError(
                    f"the loss that the model returned took no part in the backward pass of step {step}, so the scale "
                    'of its gradients is not known; say monitor.step(i, loss="mean", tokens=n) or loss="sum", or '
                    "give a held-out probe= instead."
                )
            return batch.tokens() / batch.seed if batch.seed else math.nan  # a loss times 0 has lost its gradients
        if self.loss == "mean" and not self.tokens:
            raise AnisoscopeError(
                'loss="mean" needs tokens=, the number of target tokens that the mean was taken over.'
            )
        return (self.tokens or 1) / self.scale if self.loss == "mean" else 1.0 / self.scale


def _unseen(step: int, *, forward: bool) -> AnisoscopeError:
    """A step that was to be measured and in which nothing was learned."""
    what = "no backward pass" if forward else "no forward pass"
    return AnisoscopeError(
        f"{what} was seen in step {step}, which was to be measured; run the model's forward and loss.backward() inside "
        "`with monitor.step(…)`, and attach the monitor before torch.compile."
    )
