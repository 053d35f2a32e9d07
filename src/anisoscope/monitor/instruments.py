"""Everything that is measured at one step: geometry, the tangent study, gradients of tables and weights.

A probe is a fixed held-out batch: one half to fit on, one with gradients to test on. Where only the geometry is wanted
there are no halves and no backward passes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture import gradient_pass
from anisoscope.capture.capture import Capture, Rule, by_rule
from anisoscope.capture.gradient_pass import IGNORED, LabelConvention, LossRule, unlabelled, untouched
from anisoscope.capture.row import Batch, Rows, Scores, Sink, original_contexts
from anisoscope.capture.sites.layout import Layout
from anisoscope.capture.sites.site import Site
from anisoscope.capture.step_hooks import MicroBatch, live_pass
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.bank import Bank, Setup, make_plan
from anisoscope.measurement.evaluation import Progress, evaluate_bank, row_counts, row_notes
from anisoscope.measurement.measure import leave_unseen_out
from anisoscope.metrics.engine.metric import Request
from anisoscope.metrics.frequency import unigram_entropy
from anisoscope.metrics.training import probe_loss
from anisoscope.models.forward import evaluating, forward, unwrapped
from anisoscope.numerics.hashing import fold_of, half_of
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
from anisoscope.tangent.proxy import Label, Proxy, StepRows, take
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
    progress: Progress | None = None  # told of every site whose metrics are done

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

    def measure(self, rows: StepRows, bank: Bank | None) -> list[Record]:
        """All rows of the table of one step."""
        records: list[Record] = []
        place: Record = {"kind": "training", "step": rows.step, "variant": "", "group": ""}
        if bank is not None:
            self.row_count = row_counts(bank)["row_count"]
            for note in row_notes(bank):
                self.note(f"step {rows.step}: {note}")
            measured = evaluate_bank(bank, self.requests, self.setup, progress=self.progress)
            records += [{**row, "step": rows.step} for row in measured]
        if rows.tokens and rows.losses and (self.study is None or not self.study.source):  # a training batch tells none
            mean = probe_loss(rows.loss, rows.tokens)
            records.append({**place, "metric": "probe_loss", "value": mean, "n": rows.tokens})
        if self.study is None or self.left_out(rows):
            return records
        if rows.unreached:
            self.note(f"no gradient reaches {', '.join(map(str, sorted(rows.unreached)))}: what lies before is frozen")
        records += self.study.measure(rows)
        if self.study.counts is not None:
            entropy = unigram_entropy(self.study.counts)
            records.append({**place, "metric": "unigram_entropy", "value": entropy, "layer": 0})
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
        for site, of, found in self._roles(study, rows, embed, table):
            types = found.abs().sum(1).nonzero().squeeze(1)
            mine = {Label(p, study.main_rank): study.fitted[p][site] for p in study.plan.proxies[:2]}
            records += placed(site, rows.step, tests.records(found[types], types.cpu(), mine, of=of))
        updates = list(watch.updates())  # since the last measured step
        proxies: dict[Label, Proxy] = {}
        for name in study.plan.proxies[:2] if updates else ():
            proxies |= fit_on_types(rows.fit_half(embed), Label(name, study.main_rank), site=embed, seed=self.seed)
        if updates and not proxies:
            self.note("too few types in the probe to fit a proxy on half of them; updates are left out")
        for of, types, change in updates if proxies else ():
            unseen = unseen_types(int(types.max()) + 1)[types].nonzero().squeeze(1)  # by the proxy
            tested = tests.records(change[unseen.to(change.device)], types[unseen], proxies, of=of)
            records += placed(embed, rows.step, [{**r, "note": f"since step {watch.step}"} for r in tested])
        return records

    def _roles(
        self, study: TangentStudy, rows: StepRows, embed: Site, table: Tensor
    ) -> Iterator[tuple[Site, str, Tensor]]:
        """The gradient of the table in its input role, and of the output head; a tied one is the rest of the whole."""
        inside = input_role(rows.embedded, len(table)) if rows.embedded else None
        if inside is not None:
            yield embed, "embedding_in", inside
        name = self.output_weight
        parts = [g[name].double() for _, g in rows.weights if name is not None and name in g]
        last = [s for s in study.previous if s.stack == embed.stack or s.stack == "decoder"]
        tied = name is not None and dict(self.model.named_parameters())[name] is table
        if not parts or not last or (tied and inside is None):
            return
        site = max(last, key=lambda s: (s.layer, s.kind == "final"))
        whole = torch.stack(parts).sum(0)
        outside = whole - inside if tied and inside is not None else whole
        if outside.shape[1] == len(study.fitted[study.plan.proxies[0]][site].basis):
            yield site, "embedding_out", outside

    def _weights(self, rows: StepRows) -> list[Record]:
        study = self.study
        if study is None or not self.readers or not rows.weights:
            return []
        plan = study.plan
        words: dict[str, Any] = {"rank": study.main_rank, "draws": plan.draws, "most": plan.fit_rows, "seed": self.seed}
        words["fits"] = {site: rows.fit_half(site) for site in self.readers if site in rows.fit}
        return list(weight_records(self.model, self.readers, rows, proxies=plan.proxies[:2], **words))


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
        i.readers = gradient_pass.stream_readers(i.model, i.layout, inputs, rows=i.rows)
        if not i.readers:
            i.note("no linear was found that reads attn_in or mlp_in, so weight gradients are left out")
    extra = [site for site in i.setup.captured if site not in i.sites] if i.requests else ()
    table = i.study is not None and i.study.plan.embedding and i.watch is not None and i.watch.table is not None
    weights = [name for found in i.readers.values() for name in found]
    weights += [name for name in (i.output_weight,) if table and name is not None]
    words: dict[str, Any] = {"layout": i.layout, "sites": i.sites, "extra": extra, "rows": i.rows, "loss": loss}
    words |= {"weights": list(dict.fromkeys(weights)), "embedding": table, "batch_size": batch_size}
    words |= {"fit_only": list(i.readers), "by_fold": bool(i.readers), "gradients": i.study is not None}
    return Probe(i.model, batches, **words)


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


@dataclass(frozen=True)
class ProbePiece:
    """Some contexts of one half."""

    inputs: dict[str, Any]
    test: bool
    context: Tensor  # [B] hashes


@dataclass(frozen=True)
class _Chosen:
    """A sink that takes the rows of some sites only: those that are fitted on and nothing else see half of the rows."""

    sink: Sink
    sites: frozenset[Site]

    def rows(self, rows: Rows) -> None:
        if rows.site in self.sites:
            self.sink.rows(rows)

    def scores(self, scores: Scores) -> None:
        self.sink.scores(scores)


@dataclass(eq=False)
class Probe:
    """The contexts of a probe, split in two by their content, and the passes over them."""

    model: nn.Module
    batches: InitVar[Iterable[Any]]
    _: KW_ONLY
    layout: Layout
    sites: Sequence[Site]
    fit_only: Sequence[Site] = ()  # sites that are fitted on, but have no gradients of their own
    extra: Sequence[Site] = ()  # sites for the geometry metrics alone
    loss: LossRule | None = None
    weights: Sequence[str] = ()  # parameters whose gradients are kept
    embedding: bool = False
    by_fold: bool = False
    batch_size: int = 16
    gradients: bool = True
    rows: Rule | None = None

    def __post_init__(self, batches: Iterable[Any]) -> None:
        given = [labelled(self.model, batch) for batch in batches]
        if not given:
            raise AnisoscopeError("the probe has no batches; give at least one batch of held-out contexts.")
        self.pieces = list(self._pieces(given))
        self.contexts = sum(len(piece.context) for piece in self.pieces)
        if self.gradients and len({piece.test for piece in self.pieces}) < 2:
            raise AnisoscopeError(
                f"the probe has {self.contexts} different contexts, all in one half; contexts are split in two by a "
                "hash of their content to fit and to test: give at least eight."
            )
        self.reading = self._reading()

    def _pieces(self, batches: list[dict[str, Any]]) -> Iterator[ProbePiece]:
        """The contexts of each batch, in chunks, split by half (and fold); a context that occurs twice counts once."""
        seen: set[int] = set()
        config = getattr(self.model, "config", None)
        for inputs in batches:
            more, real = by_rule(rule=self.rows, args=(), kwargs=inputs)
            hashes = original_contexts({**inputs, **more}, config=config, real=None if real is None else real.cpu())
            fresh = {h: b for b, h in reversed([*enumerate(hashes.tolist())]) if h not in seen}
            seen |= fresh.keys()
            chosen = torch.tensor(sorted(fresh.values()), dtype=torch.int64)
            half = half_of(hashes[chosen]) if self.gradients else torch.zeros_like(chosen)
            fold = fold_of(hashes[chosen]) if self.by_fold else torch.zeros_like(chosen)
            fold = fold.where(half == 1, 0)  # contexts to fit on are not split by fold
            folds = range(int(fold.max()) + 1 if len(fold) else 0)
            for test, f in [(0, 0), *((1, f) for f in folds)]:
                mine = chosen[(half == test) & (fold == f)]
                for part in mine.split(self.batch_size) if len(mine) else ():
                    yield ProbePiece(take(inputs, part), bool(test), hashes[part])

    @property
    def fingerprint(self) -> str:
        """A number for the contexts, whatever their order."""
        total = sum(int(h) for piece in self.pieces for h in piece.context)
        return f"{total % (1 << 64):016x}"

    def _reading(self) -> LabelConvention | None:
        """How the model reads its labels, tried on a few contexts; unknown where the user gives the loss."""
        for piece in self.pieces:
            labels = piece.inputs.get("labels")
            if not isinstance(labels, Tensor) or not bool((labels != IGNORED).any()):
                continue
            few = take(piece.inputs, torch.arange(min(4, len(piece.context))))
            if not bool((few["labels"] != IGNORED).any()):
                few = piece.inputs
            with untouched(self.model), evaluating(self.model), torch.no_grad():
                output = forward(self.model, few)
            try:
                return gradient_pass.find_reading(self.model, output, few["labels"])
            except AnisoscopeError:
                if self.loss is None and self.gradients:
                    raise
                return None
        if self.loss is None and self.gradients:
            raise AnisoscopeError(
                f"every label of the probe is {IGNORED} (ignored) or missing, so there is no loss; give batches with "
                "labels at some positions."
            )
        return None

    def run(self, step: int, *, others: Sink | None = None) -> StepRows:
        """All rows of one step; `others` takes the rows of every context, for the geometry metrics."""
        if not self.gradients:
            return self._forward(step, others)
        out = StepRows(step)
        others = None if others is None else _Chosen(others, frozenset([*self.sites, *self.extra]))
        words: dict[str, Any] = {"layout": self.layout, "reading": self.reading, "others": others}
        words |= {"extra": self.extra, "rows": self.rows}
        asked: dict[str, Any] = {"loss": self.loss, "weights": self.weights, "embedding": self.embedding}
        for piece in self.pieces:
            if not piece.test:
                sites = [*self.sites, *self.fit_only]
                out.add_fit(gradient_pass.forward_rows(self.model, piece.inputs, sites, **words))
                continue
            found = gradient_pass.gradient_rows(self.model, piece.inputs, self.sites, **asked, **words)
            out.add_test(found)
            folds = fold_of(piece.context)
            fold = int(folds[0]) if len(folds.unique()) == 1 else -1
            if found.embedded is not None:
                ids, grads = found.embedded
                out.embedded.append((ids, grads, folds.repeat_interleave(len(ids) // len(folds))))
            out.losses.append((fold, found.loss, found.tokens))
            if found.weights:
                out.weights.append((fold, found.weights))
        return out

    def _forward(self, step: int, others: Sink | None) -> StepRows:
        """The loss of every context, where there is one, and their rows for `others` alone: nothing is kept here."""
        out = StepRows(step)
        for piece in self.pieces:
            with contextlib.ExitStack() as stack:
                stack.enter_context(untouched(self.model))
                stack.enter_context(torch.inference_mode())
                if others is not None:
                    sites = [*self.sites, *self.extra]
                    stack.enter_context(Capture(self.model, sites, others, layout=self.layout, rows=self.rows))
                loss, tokens = self._loss(piece.inputs)
            out.loss, out.tokens = out.loss + loss, out.tokens + tokens
            if tokens:
                out.losses.append((-1, loss, tokens))
        return out

    def _loss(self, inputs: Mapping[str, Any]) -> tuple[float, int]:
        """The summed loss of a forward pass and the tokens it is over; (0, 0) where the model has none."""
        labels = inputs.get("labels")
        tokens = self.reading.count(labels) if self.reading is not None and isinstance(labels, Tensor) else 0
        if self.loss is not None:
            return float(self.loss(self.model, inputs)), tokens
        if not tokens:
            forward(self.model, unlabelled(self.model, inputs))
            return 0.0, 0
        return float(gradient_pass.output_part(forward(self.model, inputs), "loss")) * tokens, tokens


def labelled(model: nn.Module, batch: Any) -> dict[str, Any]:
    """A batch as a dict with labels: a causal model's are its own ids, without padding."""
    inputs = dict(batch.inputs) if isinstance(batch, Batch) else batch
    if isinstance(inputs, Tensor):
        inputs = {"input_ids": inputs}
    if not isinstance(inputs, Mapping):
        raise AnisoscopeError(f"a batch is a {type(batch).__name__}; expected a dict with input_ids and labels.")
    inputs = dict(inputs)
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    causal = type(unwrapped(model)).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    if "labels" not in inputs and isinstance(ids, Tensor) and causal:
        inputs["labels"] = ids if mask is None else ids.masked_fill(mask == 0, IGNORED)
    return inputs
