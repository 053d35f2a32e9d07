"""Instruments: everything that is measured at one step (geometry, tangent study, gradients of tables and weights).

A probe is a fixed held-out batch, one half of which is for fitting and one, with gradients, for testing. If only the
geometry is measured, there are no halves and no backward passes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture import gradient_pass
from anisoscope.capture.capture import Capture
from anisoscope.capture.gradient_pass import (
    IGNORED,
    ContextLosses,
    LabelConvention,
    LossRule,
    TargetWeights,
    unlabelled,
    untouched,
)
from anisoscope.capture.objective import (
    HIDES,
    Classes,
    ContextObjective,
    Objective,
    OwnLoss,
    PositionClasses,
    context_count,
    find_objective,
    hidden_positions,
    logits_of,
    refuse_labels,
)
from anisoscope.capture.padding import SEPARATED, separated
from anisoscope.capture.row import PositionChoice, Rule, Sink, by_rule, original_contexts, read_contexts
from anisoscope.capture.sites.layout import Layout
from anisoscope.capture.sites.site import Site
from anisoscope.capture.step_capture import LossScale, MicroBatch, live_pass
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.bank import ATTENTION_KINDS, Bank, Setup, make_plan
from anisoscope.measurement.measure import Tee, leave_unseen_out
from anisoscope.measurement.targets import with_own_targets
from anisoscope.metrics.engine.metric import Request
from anisoscope.models.forward import (
    as_given,
    evaluating,
    forward,
    is_plain,
    own_batch,
    takes,
    takes_labels,
)
from anisoscope.models.parallel import refuse_uncallable, sharded, without_gradients
from anisoscope.models.pass_size import contexts_at_once
from anisoscope.monitor.analysis.analysis import Analysis, Seen, TableSeen
from anisoscope.monitor.embedding_watch import EmbeddingWatch, weight_of
from anisoscope.monitor.held_out import (
    Constant,
    GivenLoss,
    batches_of,
    constant_columns,
    explained,
    labelled,
    loss_columns,
)
from anisoscope.numerics.hashing import even_folds, half_of
from anisoscope.option import Progress
from anisoscope.results.modality import TEXT_DATA
from anisoscope.tangent.energy import Record
from anisoscope.tangent.proxy import StepRows, take
from anisoscope.tangent.tables import weight_gradients
from anisoscope.tangent.tangent_study import DEFAULT_RANK, TangentStudy

OUTSIDE = (
    "the loss was computed outside the model: gradients are those of the loss that backward was called on, whatever "
    "its scale, which changes no share of their energy"
)
OWN_LOSS = (
    "the loss of the training is no cross-entropy of tokens with equal weights, so gradients are those of that loss as "
    "it is, not of a sum over tokens"
)


def stream_kinds(layout: Layout) -> list[str]:
    """Embedding, blocks and final norm; in a model without attention its stages in place of the blocks.

    Of modules that a user named: these.
    """
    if layout.modules:
        return ["module"]
    staged = "stage" in layout.kinds and not set(layout.kinds) & set(ATTENTION_KINDS)
    return [kind for kind in ("embed", "stage" if staged else "resid", "final") if kind in layout.kinds]


@dataclass
class Instruments:
    """The instruments of one model; `study` is None if only the geometry is measured."""

    model: nn.Module
    setup: Setup
    requests: Sequence[Request]
    study: TangentStudy | None
    watch: EmbeddingWatch | None = None
    seed: int = 0
    layers: Sequence[int] | None = None  # of the stream; None = all
    readers: dict[Site, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    halves: bool = False  # dimensions of the stream also on two disjoint halves of the contexts
    rows: Rule | None = None  # which rows are data, if the arguments of the model do not tell
    kept: PositionChoice | None = None  # which of them are measured; None = all
    targets: TargetWeights | None = None  # weights of the training loss by target token
    constants: list[Record] = field(default_factory=list)  # columns of the best constant's loss on the probe
    progress: Progress | None = None  # called after the metrics of each site

    def __post_init__(self) -> None:
        assert self.setup.layout is not None
        self.layout: Layout = self.setup.layout
        # a class token is what many classifiers read, so its gradients are those that patches lack after the last block
        kinds = stream_kinds(self.layout)
        kinds += ["cls"] if self.study is not None and "cls" in self.layout.kinds else []
        self.sites = self.layout.sites(kinds, self.layers)
        if self.watch is not None and self.watch.unknown and self.study is not None and self.study.plan.embedding:
            self.note("the parameters are flat pieces in each process, so those of the embedding table are left out")

    def bank(self) -> Bank | None:
        """A new bank for the geometry metrics of one step; None without such metrics."""
        if not self.requests:
            return None
        return Bank(make_plan(self.requests, self.setup.kinds, seed=self.seed, halves=self.halves))

    @property
    def output_weight(self) -> str | None:
        """The name of the output head's weight, None if the model has no trainable one."""
        weight = weight_of(self.model, "get_output_embeddings")
        return next((n for n, p in self.model.named_parameters() if p is weight and p.requires_grad), None)

    def analysis(self, studies: dict[str, TangentStudy] | None = None, *, tokenizer: Any = None) -> Analysis:
        """What analyses the steps of this model: with its study, or with these."""
        mine = {} if self.study is None else {"study": self.study}
        setup = replace(self.setup, layout=None)  # of the modules nothing is needed
        weights = None if self.targets is None else self.targets.weights
        more: dict[str, Any] = {"target_weights": weights, "tokenizer": tokenizer, "progress": self.progress}
        return Analysis(setup, self.requests, studies or mine, self.sites, self.seed, **more)

    def seen(self, rows: StepRows, bank: Bank | None, study: str = "study") -> Seen:
        """What the analysis reads of one step: rows and statistics, and what it needs of the model's own tensors."""
        found = Seen(rows, bank, study, self.constants)
        if self.study is None or study != "study":
            return found
        found.table = self._table()
        if self.readers and rows.weights:
            found.weights = weight_gradients(self.model, self.readers, rows)
            found.readers = self.readers
        rows.weights = {}  # of which no more is needed
        return found

    def _table(self) -> TableSeen | None:
        """The embedding table and its updates since the last measured step, if they are measured."""
        study, watch = self.study, self.watch
        if study is None or watch is None or not study.plan.embedding or (table := watch.table) is None:
            return None
        read = watch.closed if watch.sharded else None
        return TableSeen(len(table), table.shape[1], watch.step, list(watch.updates()), read)

    def live_rows(
        self, step: int, seen: Sequence[MicroBatch], bank: Bank | None, scale: LossScale, *, alone: bool = True
    ) -> StepRows:
        """The rows of a training step: into the bank, and, for a study, with gradients of the summed loss.

        The geometry alone needs a backward pass, but no known loss. A process that is not alone may have seen nothing.
        """
        rows, study = StepRows(step), self.study
        if alone and study is not None and seen and not any(batch.has_targets() for batch in seen):
            raise AnisoscopeError(
                f"every label of step {step} is ignored (-100), so there is no loss; expected labels somewhere: "
                "check the collator or the masking."
            )
        for note in dict.fromkeys(batch.read.note for batch in seen if batch.read is not None and batch.read.note):
            self.note(note)
        learned = [batch for batch in seen if (batch.learned_from() if study is None else batch.gradients)]
        factors, own = self._factors(learned, scale, step=step, alone=alone)
        if own:
            self.note(OWN_LOSS if scale.loss == "own" else OUTSIDE)
        for batch, factor in zip(learned, factors, strict=True):
            if bank is not None:
                batch.feed(bank)
            if study is not None:
                rows.add_fit(live_pass(batch, self.sites, half=0))
                rows.add_test(live_pass(batch, self.sites, half=1), factor=factor)
                if study.plan.splits:
                    contexts = original_contexts(batch.arguments, real=batch.real, packed=True)
                    rows.passes.append((live_pass(batch, self.sites), contexts, factor))
        silent = [] if learned or study is None else [batch for batch in seen if batch.learned_from()]
        for batch in silent:  # only what follows all sites learns: their geometry stands
            if bank is not None:
                batch.feed(bank)
        uncalled = [site for site in self.layout.modules if not any(site in batch.rows for batch in seen)]
        if uncalled and seen:
            names = ", ".join(site.name for site in uncalled)
            if len(uncalled) == len(self.layout.modules) and alone:
                raise AnisoscopeError(f"none of the modules ({names}) was called in step {step}; name others.")
            self.note(f"not called in step {step}: {names}")
        if study is not None and self.layout.modules:
            rows.unreached |= {site for site in rows.fit if site not in rows.test} if rows.test else set()
            self.leave_narrow(rows)
        if alone and silent and bank is None:
            raise AnisoscopeError(
                f"no gradient of step {step} reaches any site: what lies before is frozen, or the loss does not depend "
                "on it; name metrics of geometry, as metrics='shape', or sites behind what learns."
            )
        if alone and not silent and not (learned if study is None else rows.test):
            what = "no backward pass" if seen else "no forward pass"
            if self.layout.modules and seen:
                what = "no gradient of a module (are they frozen, run without gradients, or not used by the loss?)"
            raise AnisoscopeError(
                f"{what} was seen in step {step}, which was to be measured; run the model's forward and "
                "loss.backward() inside `with monitor.step(…)`, call the model itself and not its parts, and attach "
                "the monitor before torch.compile."
            )
        if not alone or study is not None or bank is None:
            return rows
        if absent := [str(s) for s in self.sites if s not in bank.sites]:  # some models skip whole layers in training
            self.note(f"step {step}: nothing came through {', '.join(absent)} (layers dropped in training?)")
        return rows

    def leave_narrow(self, rows: StepRows) -> None:
        """Take modules out of the tangent study, with a note, that would lower the rank of all to a fourth or less.

        All sites have one rank, at most a quarter of the narrowest; if it is given, those too narrow for it are left
        out.
        """
        assert self.study is not None
        widths = {site: parts[0][0].x.shape[1] for site, parts in rows.test.items()}
        rank = self.study.plan.rank or min(DEFAULT_RANK, max(widths.values(), default=0) // 4)
        least = 4 * rank if self.study.plan.rank else max(4, rank)
        narrow = [site for site, width in widths.items() if width < least]
        if not narrow or len(narrow) == len(widths):
            return
        for site in narrow:
            rows.drop(site)
        names = ", ".join(f"{site.name} ({widths[site]})" for site in narrow)
        self.note(f"too narrow for a tangent study of the rank of the other modules: {names}; name them apart")

    def _factors(
        self, learned: Sequence[MicroBatch], scale: LossScale, *, step: int, alone: bool
    ) -> tuple[list[float], bool]:
        """What turns gradients into those of the summed loss, and whether they are left as they are."""
        if self.study is None:
            return [1.0] * len(learned), False
        staged = any(stack.total for stack in self.layout.stacks)
        return scale.factors(learned, step=step, elsewhere=staged and not alone and scale.loss == "auto")

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


@dataclass(frozen=True)
class ProbePiece:
    """Some contexts of one half."""

    inputs: dict[str, Any]
    test: bool
    context: Tensor  # [B] hashes
    fold: int = -1  # of the jackknife, −1 for contexts of several


class Probe:
    """One batch or several, split into halves by a hash of their contexts, and the passes over them.

    `loss` is a function of (model, inputs) that gives the summed loss. Without a study there are no backward passes.
    `constant` is the best constant prediction, see `monitor.held_out`.
    """

    def __init__(
        self,
        instruments: Instruments,
        probe: Any,
        *,
        loss: LossRule | None = None,
        batch_size: int = 16,
        constant: Constant | None = None,
    ) -> None:
        self.instruments, self.batch_size, i = instruments, batch_size, instruments
        self.model, self.gradients = i.model, i.study is not None
        batches = batches_of(self.model, probe)
        if not batches:
            raise AnisoscopeError("the probe has no batches; give at least one batch of held-out contexts.")
        own = loss is not None and is_plain(self.model)
        given = [own_batch(batch) if own else labelled(self.model, batch) for batch in batches]
        given = given if own else [part for batch in given for part in self._unpacked(batch)]
        loss = GivenLoss(loss) if loss is not None and own else loss
        first, call = given[0] if own else batches[0], None
        if isinstance(loss, GivenLoss):
            call = partial(loss, self.model, take(given[0], torch.arange(1)))
        refuse_uncallable(self.model)
        with untouched(self.model), explained(self.model):
            leave_unseen_out(self.model, first, i.setup, rows=i.rows, call=call)
            if loss is None and self.gradients and not self._reads_tokens(given[0]):
                given = [with_own_targets(self.model, batch) for batch in given]
            self.loss = loss if loss is not None else self._objective(given[0])
            self.outputs = 0  # of one position, where no output head tells
            if isinstance(self.loss, Classes | PositionClasses):
                self.outputs = self._classes(given[0])
                for inputs in given:
                    refuse_labels(inputs["labels"], self.outputs)
        if isinstance(self.loss, OwnLoss) and self.loss.reduction == "alone":
            self.batch_size = 1
        if i.study is not None and i.study.plan.weights:
            inputs = unlabelled(self.model, take(given[0], torch.arange(1)))
            i.readers = gradient_pass.stream_readers(self.model, i.layout, inputs, rows=i.rows)
            if not i.readers:
                i.note("no linear was found that reads attn_in or mlp_in, so weight gradients are left out")
        self.extra = [site for site in i.setup.captured if site not in i.sites] if i.requests else []  # for geometry
        table = None if i.study is None or not i.study.plan.embedding or i.watch is None else i.watch.table
        embedding = table is not None
        weights = [name for found in i.readers.values() for name in found]  # parameters whose gradients are kept
        tied = embedding and table is weight_of(self.model, "get_output_embeddings")
        self.head: dict[str, Any] = {"output": i.output_weight, "tied": tied}
        weights += [name for name in (i.output_weight,) if embedding and name is not None]
        if sharded(self.model) and weights:
            i.readers, weights = {}, []
            i.note("the parameters are sharded over processes, so gradients of weights are left out")
        self.options: dict[str, Any] = {"loss": self.loss, "weights": list(dict.fromkeys(weights))}
        self.options |= {"embedding": embedding, "targets": i.targets}
        self.pieces = list(self._pieces(given))
        if i.layout.modules:
            self._try_modules()
        self.mine = [(piece, True) for piece in self.pieces]  # of this process, and whether they count
        if self.gradients and len({piece.test for piece in self.pieces}) < 2:
            contexts = sum(len(piece.context) for piece in self.pieces)
            raise AnisoscopeError(
                f"the probe has {contexts} different contexts, all in one half; contexts are split in two by a "
                "hash of their content to fit and to test: give at least eight."
            )
        self.convention = self._find_convention()
        self.constant = constant
        if constant is not None:
            i.constants = self._constants(constant)

    def _try_modules(self) -> None:
        """A pass over a few contexts, which raises an error if a named module is not called, or has no rows."""
        i, few = self.instruments, self.pieces[0]
        options: dict[str, Any] = {"layout": i.layout, "rows": i.rows, "call": self._call(few.inputs)}
        with explained(self.model):
            gradient_pass.forward_rows(self.model, few.inputs, i.sites, **options, notes=i.notes)

    def _call(self, inputs: Mapping[str, Any]) -> Callable[[], Any] | None:
        """How a pass is run over inputs that only the user's own loss can read; None if the model's forward can."""
        return partial(self.loss, self.model, inputs) if isinstance(self.loss, GivenLoss) else None

    def deal(self, rank: int, size: int) -> None:
        """Look at a part of the contexts only: other processes look at the rest.

        If a pass communicates (parameters are sharded), all processes run as many; what one repeats does not count.
        """
        halves = [[piece for piece in self.pieces if piece.test == test] for test in (False, True)]
        dealt = []
        for pieces in filter(None, halves):
            mine = [(piece, True) for piece in pieces[rank::size]]
            rounds = -(-len(pieces) // size) if sharded(self.model) else len(mine)
            dealt += mine + [(pieces[0], False)] * (rounds - len(mine))
        self.mine = dealt

    def _reads_tokens(self, inputs: Mapping[str, Any]) -> bool:
        decodes = getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        if is_plain(self.model) and not takes_labels(self.model):  # it returns no loss
            return False
        return bool(decodes) or any(isinstance(inputs.get(name), Tensor) for name in TEXT_DATA.inputs)

    def _objective(self, inputs: Mapping[str, Any]) -> LossRule | None:
        """The objective of a model that reads no tokens; None for one that does, whose labels are tokens as well."""
        if self._reads_tokens(inputs):
            return None
        few = take(dict(inputs), torch.arange(min(2, context_count(inputs))))
        try:
            with untouched(self.model), evaluating(self.model), torch.no_grad():
                return find_objective(self.model, few)
        except AnisoscopeError:
            if self.gradients:
                raise
            return None

    def _classes(self, inputs: Mapping[str, Any]) -> int:
        """The number of classes that the model tells apart."""
        with untouched(self.model), evaluating(self.model), torch.no_grad():
            logits = logits_of(forward(self.model, unlabelled(self.model, take(dict(inputs), torch.arange(1)))))
        assert logits is not None  # its objective has read them
        return int(logits.shape[-1])

    def _unpacked(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """A batch, of which each of several sequences in a row gets a row of its own, as halves are of contexts."""
        told, real = self._told(batch)
        context_count(told)  # refuses what holds no tensor, by the kinds of what it holds
        found = read_contexts(told, config=getattr(self.model, "config", None), real=real)[0]
        if found.packed is None or found.real is None:
            return [batch]
        self.instruments.note(SEPARATED)
        masked = takes(self.model, "attention_mask")
        return list(separated(batch, found.packed, found.real, ignored=IGNORED, masked=masked))

    def _told(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
        """The arguments of a forward pass, with those that `rows=` adds, and which positions are data by it."""
        placed = as_given(inputs)
        args = placed if isinstance(placed, tuple) else (placed,) if isinstance(placed, Tensor) else ()
        more, real = by_rule(self.instruments.rows, args, {} if args else inputs)
        return {**inputs, **more}, None if real is None else real.cpu()

    def _pieces(self, batches: list[dict[str, Any]]) -> Iterator[ProbePiece]:
        """The contexts of each batch, in chunks, split by half (and fold); duplicates are dropped."""
        chosen, contexts = [], []
        seen: set[int] = set()
        config = getattr(self.model, "config", None)
        for inputs in batches:
            told, real = self._told(inputs)
            hashes = original_contexts(told, config=config, real=real)
            fresh = {h: b for b, h in reversed([*enumerate(hashes.tolist())]) if h not in seen}
            seen |= fresh.keys()
            chosen.append(torch.tensor(sorted(fresh.values()), dtype=torch.int64))
            contexts.append(hashes)
        kept = torch.cat([hashes[mine] for hashes, mine in zip(contexts, chosen, strict=True)])
        halves = half_of(kept) if self.gradients else torch.zeros_like(kept)
        folds = torch.zeros_like(kept)  # contexts to fit on are not split by fold
        if self.instruments.readers:
            folds[halves == 1] = even_folds(kept[halves == 1])
        sizes = [len(mine) for mine in chosen]
        for inputs, mine, hashes, half, fold in zip(
            batches, chosen, contexts, halves.split(sizes), folds.split(sizes), strict=True
        ):
            known = bool(self.instruments.readers)
            most = contexts_at_once(self.model, inputs, self.batch_size, outputs=self.outputs)
            for test, f in [(0, 0), *((1, f) for f in range(int(fold.max()) + 1 if len(fold) else 0))]:
                some = mine[(half == test) & (fold == f)]
                for part in some.split(most) if len(some) else ():
                    yield ProbePiece(take(inputs, part), bool(test), hashes[part], f if known else -1)

    @property
    def objective(self) -> str:
        """The name of what is predicted: an objective's own, next or labelled tokens; empty if that is not known."""
        if self.convention is not None:
            return "next" if self.convention.shifted or self.convention.ahead else "labelled"
        return str(getattr(self.loss, "name", ""))

    @property
    def fingerprint(self) -> str:
        """A fingerprint of the contexts that does not depend on their order."""
        total = sum(int(h) for piece in self.pieces for h in piece.context)
        return f"{total % (1 << 64):016x}"

    def _constants(self, constant: Constant) -> list[Record]:
        """Columns of the constant's loss on the contexts that the loss is of, weighted too where training weights."""
        tested = [(piece.inputs, piece.context) for piece in self.pieces if piece.test or not self.gradients]
        targets = self.instruments.targets
        kinds = [None] if targets is None else [None, targets.weights]
        found = [constant_columns(constant, tested, self.convention, loss=self.loss, weights=w) for w in kinds]
        return [columns for columns in found if columns is not None]

    def _find_convention(self) -> LabelConvention | None:
        """The label convention of the model, found on a few contexts; None if unknown, or if an objective counts."""
        if hasattr(self.loss, "count"):
            return None
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
                return gradient_pass.find_label_convention(self.model, output, few["labels"], few.get("input_ids"))
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

    def _own_constants(self, loss: Objective) -> list[Record]:
        """The same where targets are the model's own: its best constant changes with them, step by step."""
        tested = [piece for piece in self.pieces if piece.test or not self.gradients]
        with untouched(self.model), evaluating(self.model):
            losses = loss.own_constant(self.model, [piece.inputs for piece in tested])
        if losses is None:
            return []
        counts = [gradient_pass.context_units(loss, piece.inputs, None) for piece in tested]
        parts = zip((piece.context for piece in tested), losses, counts, strict=True)
        total, units = sum(float(each.sum()) for each in losses), sum(int(each.sum()) for each in counts)
        return [{"variant": "", **loss_columns(total, units, parts)}] if units else []

    def run(self, step: int, *, others: Sink | None = None) -> StepRows:
        """All rows of one step; the sink `others` receives the rows of every context, for the geometry metrics."""
        if self.constant is None and isinstance(self.loss, Objective):
            self.instruments.constants = self._own_constants(self.loss)
        out, i = StepRows(step), self.instruments
        whole = others is not None and not isinstance(self.loss, GivenLoss)
        if self.gradients and others is not None:  # inputs of weights are fitted on: they see just half of the contexts
            others = Tee([others], frozenset([*i.sites, *self.extra]))
        with untouched(self.model):  # once for all pieces
            for piece, counts in self.mine:
                into, sink = (out, others) if counts else (StepRows(step), None)
                if whole and hidden_positions(piece.inputs) is not None:
                    self._whole(piece, sink)
                    sink = None
                if not self.gradients:
                    self._forward(piece, into, sink)
                elif piece.test:
                    self._tested(piece, into, sink)
                else:
                    self._fitted(piece, into, sink)
        if self.gradients and i.layout.modules:
            i.leave_narrow(out)
        return out

    def _words(self, others: Sink | None) -> dict[str, Any]:
        i = self.instruments
        found = {"layout": i.layout, "reading": self.convention, "others": others}
        return found | {"extra": self.extra, "rows": i.rows, "kept": i.kept}

    @property
    def _splits(self) -> bool:
        study = self.instruments.study
        return study is not None and bool(study.plan.splits)

    def _fitted(self, piece: ProbePiece, out: StepRows, others: Sink | None) -> None:
        """The rows of contexts that proxies are fitted on."""
        i = self.instruments
        sites = [*i.sites, *i.readers]
        words = {**self._words(others), "call": self._call(piece.inputs)}
        out.add_fit(gradient_pass.forward_rows(self.model, piece.inputs, sites, **words))
        if self._splits:  # contexts to fit on are tested in other splits
            words = {**self._words(None), "extra": (), "loss": self.loss, "targets": i.targets}
            again = gradient_pass.gradient_rows(self.model, piece.inputs, i.sites, **words)
            out.passes.append((again, piece.context, 1.0))

    def _tested(self, piece: ProbePiece, out: StepRows, others: Sink | None) -> None:
        """The rows of contexts that proxies are tested on, with gradients."""
        words = {**self.options, **self._words(others)}
        found = gradient_pass.gradient_rows(self.model, piece.inputs, self.instruments.sites, **words)
        out.add_test(found)
        out.passes += [(replace(found, weights={}, embedded=None), piece.context, 1.0)] if self._splits else []
        if found.by_context is not None:
            out.by_context.append((piece.context, *found.by_context))
        if found.embedded is not None:
            out.embedded.append(found.embedded)
        out.add_weights(piece.fold, found, **self.head)

    def _whole(self, piece: ProbePiece, others: Sink | None) -> None:
        """A forward pass in which nothing is hidden from the model, as in a profile; rows go to the sink `others`."""
        with self._read(others):
            forward(self.model, unlabelled(self.model, {n: v for n, v in piece.inputs.items() if n not in HIDES}))

    @contextlib.contextmanager
    def _read(self, others: Sink | None) -> Iterator[None]:
        """Around a forward pass without gradients: its rows go to the sink `others`, if there is one."""
        i = self.instruments
        with untouched(self.model), without_gradients(self.model), contextlib.ExitStack() as stack:
            if others is not None:
                words: dict[str, Any] = {"layout": i.layout, "rows": i.rows}
                words |= i.kept.options() if i.kept is not None else {}
                stack.enter_context(Capture(self.model, [*i.sites, *self.extra], others, **words))
            yield

    def _forward(self, piece: ProbePiece, out: StepRows, others: Sink | None) -> None:
        """A forward pass only: the loss, if there is one; rows go to the sink `others`."""
        with self._read(others):
            loss, tokens, weighted, by_context = self._loss(piece.inputs)
        out.add_loss(loss, tokens, weighted)
        if by_context is not None:
            out.by_context.append((piece.context, *by_context))

    def _loss(self, inputs: Mapping[str, Any]) -> tuple[float, int, float | None, ContextLosses | None]:
        """The summed loss of a forward pass, the tokens it is over, the weighted loss, the loss by context."""
        tokens = gradient_pass.units(self.loss, inputs, self.convention)
        if isinstance(self.loss, ContextObjective):
            each = self.loss.by_context(self.model, inputs).double().cpu()
            return float(each.sum()), tokens, None, (each, gradient_pass.context_units(self.loss, inputs, None))
        if self.loss is not None:
            return float(self.loss(self.model, inputs)), tokens, None, None
        if not tokens or self.convention is None:
            forward(self.model, unlabelled(self.model, inputs))
            return 0.0, 0, None, None
        output, targets = forward(self.model, inputs), self.instruments.targets
        logits, labels = gradient_pass.output_part(output, "logits"), inputs["labels"]
        weighted = None if targets is None else float(targets.loss(logits, labels, self.convention))
        by_context = self.convention.by_context(logits, labels)
        return float(gradient_pass.output_part(output, "loss")) * tokens, tokens, weighted, by_context
