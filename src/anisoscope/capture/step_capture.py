"""Activations and gradients of the user's own training step, read by hooks that change nothing.

Gradients are raw: tensor hooks fire during the backward pass, before clipping. The factor that scales them – loss
scaling, division by the number of micro-batches – is the gradient that arrives at the loss the model returned, or can
be read from those that arrive at its logits (token_loss.py).

`LiveGradients` keeps all rows of the steps that are to be measured; sampled_rows.py takes some rows of every step.

Shapes: B contexts, T positions."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from anisoscope.capture import gradient_pass, row
from anisoscope.capture.capture import Capture
from anisoscope.capture.gradient_pass import GradientPass, LabelConvention, output_part, site_rows
from anisoscope.capture.graph_hook import (
    GraphHook,
    mark_constant,
    on_gradient,
    prepare_compile,
    tell_apart,
    unbreakable,
)
from anisoscope.capture.objective import LossReading, context_count, logits_of, read_loss
from anisoscope.capture.row import PositionChoice, Rows, Rule, Scores, Sink, by_rule
from anisoscope.capture.sites.layout import Layout
from anisoscope.capture.sites.site import Site
from anisoscope.capture.token_loss import TokenWeight, shifted_log_probabilities, watch_tokens
from anisoscope.errors import AnisoscopeError
from anisoscope.models.forward import by_name, is_plain, original
from anisoscope.models.parallel import rehearsing
from anisoscope.numerics.hashing import half_of
from anisoscope.results.modality import TEXT_DATA

Report = Callable[[Exception], None]
_VERSIONS, _marks = 6, [0]  # of torch.compile's limit of 8 for one code; models since it was last reset


@dataclass
class StepPass:
    """One forward and backward pass of a training step, and the gradients that arrive at its rows."""

    gradients: dict[Site, Tensor] = field(default_factory=dict)
    awaited: set[Site] = field(default_factory=set)  # sites that will receive a gradient
    unreached: list[Site] = field(default_factory=list)  # and those that will not
    backward: set[int] = field(default_factory=set)  # the backward passes that brought gradients, by number

    def receive(self, site: Site, gradient: Tensor) -> None:
        """Take the gradient of some rows; those of several backward passes, or calls of a module, add up."""
        self.backward.add(torch._C._current_graph_task_id())
        earlier = self.gradients.get(site)
        self.gradients[site] = gradient if earlier is None else earlier + gradient


@dataclass
class MicroBatch(StepPass):
    """A pass with all of its rows and what is known of its loss."""

    arguments: dict[str, Any] = field(default_factory=dict)
    rows: dict[Site, Rows] = field(default_factory=dict)
    seed: float | None = None  # gradient of the total loss in the loss that the model returned
    reading: LabelConvention | None = None
    loss: float = float("nan")  # as the model returned it
    shown: list[Rows | Scores] = field(default_factory=list)  # for metrics of geometry
    real: Tensor | None = None  # which positions are data [B, T], if a rule states it
    shared: bool = True  # whether the loss is divided by num_items_in_batch, if that is given
    read: LossReading | None = None  # of a model that predicts no tokens, how its loss is reduced
    unread: AnisoscopeError | None = None  # why the scale of the model's own loss is not known
    weight: TokenWeight | None = None  # of each token in a loss that was computed outside the model, if that is known
    answered: bool = False  # a gradient came to what the model returned; only looked for where no site awaits one

    def feed(self, sink: Sink) -> None:
        """Send the recorded rows and scores to a sink; delayed until gradients show that the pass was training."""
        for item in self.shown:
            if isinstance(item, Rows):
                sink.rows(item)
            else:
                sink.scores(item)

    @property
    def labels(self) -> Tensor | None:
        labels = self.arguments.get("labels")
        return labels if isinstance(labels, Tensor) else None

    def answer(self, gradient: Tensor | None) -> None:
        """Take note of the gradient of what the model returned."""
        self.answered = gradient is not None

    def learned_from(self) -> bool:
        """Whether a backward pass went through it."""
        return bool(self.gradients) or self.seed is not None or self.answered

    def has_targets(self) -> bool:
        """Whether any label is not ignored; True without labels, since then the user computes the loss."""
        return self.labels is None or bool((self.labels != gradient_pass.IGNORED).any())

    def tokens(self) -> int:
        """The number of tokens, or other units, that the loss is over."""
        if self.read is not None:
            return self.read.units
        if self.seed is None and self.weight is not None:
            return self.weight.tokens
        given = self.arguments.get("num_items_in_batch")
        if given is not None and self.shared:
            return int(given)
        return self.reading.count(self.labels) if self.reading is not None and self.labels is not None else 0

    def examples(self) -> int:
        """The number of contexts that a mean loss is over; 0 if the model reads tokens, which are not one each."""
        texts = any(isinstance(self.arguments.get(name), Tensor) for name in TEXT_DATA.inputs)
        return 0 if texts else context_count(self.arguments)

    def reduced_by(self) -> float:
        """The number that the summed loss was divided by; rows are multiplied apart if it differs by context."""
        return self.tokens() if self.read is None else self.read.factor


@dataclass(frozen=True)
class LossScale:
    """How a training loop scales its loss: mean or sum over the tokens of a micro-batch, and a factor."""

    loss: str  # auto, mean, sum or own
    tokens: int | None
    scale: float

    def factors(self, batches: Sequence[MicroBatch], *, step: int, elsewhere: bool = False) -> tuple[list[float], bool]:
        """The factor of each micro-batch, and whether gradients are left as they are: those of the training's own loss.

        That is done for all of them or for none, since they are compared with each other. NaN if it is known
        `elsewhere`, in another stage of a pipeline.
        """
        if not elsewhere and self._as_they_are(batches):
            return [1.0 / self.scale] * len(batches), True
        unknown = [elsewhere and batch.seed is None for batch in batches]
        found = zip(batches, unknown, strict=True)
        return [math.nan if unknown else self.factor(batch, step=step) for batch, unknown in found], False

    def _as_they_are(self, batches: Sequence[MicroBatch]) -> bool:
        unreadable = [batch for batch in batches if batch.gradients and not self.readable(batch)]
        if self.loss == "own":
            return bool(unreadable)
        # a common factor changes no share: of a single batch, or of one loss over several passes (a siamese network);
        # several processes train on the mean of their losses
        single = len(batches) == 1 or len(set().union(*(batch.backward for batch in batches))) == 1
        known = all(batch.unread is None for batch in unreadable)
        return self.loss == "auto" and single and bool(unreadable) and known

    @staticmethod
    def readable(batch: MicroBatch) -> bool:
        """Whether it is known what the loss of each token was multiplied by; also if it has no target at all."""
        if batch.seed is None:
            return batch.weight is not None or not batch.has_targets()
        return batch.unread is None and bool(batch.tokens())

    def factor(self, batch: MicroBatch, *, step: int) -> float:
        """The factor that turns the gradients of a micro-batch into gradients of the summed loss."""
        if self.loss not in ("auto", "mean", "sum", "own"):
            raise AnisoscopeError(f"loss={self.loss!r} is not known; expected auto, mean, sum or own.")
        if self.loss in ("auto", "own"):
            if batch.seed is not None and batch.unread is not None:
                raise batch.unread
            if batch.seed is None and (batch.weight is not None or not batch.has_targets()):
                return 1.0 if batch.weight is None else 1.0 / batch.weight.each  # without a target all gradients are 0
            if batch.seed is None or not batch.tokens():
                raise AnisoscopeError(
                    f"no loss that the model returned took part in the backward pass of step {step}, and the "
                    "gradients at its logits are not those of a cross-entropy of tokens, so how its micro-batches "
                    'weigh is not known; say monitor.step(i, loss="mean", tokens=n), loss="sum", or loss="own" for a '
                    "loss of any other kind, or give a held-out probe= instead."
                )
            return batch.reduced_by() / batch.seed if batch.seed else math.nan  # a loss times 0 has no gradients
        tokens = self.tokens or batch.examples()
        if self.loss == "mean" and not tokens:
            raise AnisoscopeError(
                'loss="mean" needs tokens=, the number of target tokens that the mean was taken over.'
            )
        return tokens / self.scale if self.loss == "mean" else 1.0 / self.scale


def _checkpointed() -> bool:
    """Whether the code that runs now was called by torch.utils.checkpoint."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _loss_parts(output: Any) -> dict[str, Tensor]:
    """What is read of an output to know the scale of its loss, the loss first.

    Without one, it is computed outside of the model: that of which the gradient tells its scale (`watch_tokens`).
    """
    loss, mask = output_part(output, "loss"), output_part(output, "mask")
    if not isinstance(loss, Tensor):
        log_probs, logits = output_part(output, "log_probs"), logits_of(output)
        if isinstance(log_probs, Tensor):
            return {"log_probs": log_probs}
        return {} if logits is None else {"logits": logits}
    found, logits = {"loss": loss}, output_part(output, "logits")
    found |= {"logits": logits} if isinstance(logits, Tensor) else {}
    return found | ({"mask": mask} if isinstance(mask, Tensor) else {})


def _raised(error: Exception) -> None:
    raise error


@contextlib.contextmanager
def known_to_compile(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Make torch.compile tell these modules, which have hooks, from others of the same class without.

    Its cache is by the code of a class, and by default it does not look at hooks: what it compiled for another model
    of the class would be used for this one, and no hook would fire. It does look for a `forward` of the instance; so
    they get one, the same function, and nothing else has to be compiled again. It compiles few versions of one code;
    after `_VERSIONS` models it begins anew.
    """
    import torch._dynamo as dynamo  # takes seconds

    prepare_compile()
    given = list(modules)
    marked = [module for module in given if "forward" not in vars(module)]
    _marks[0] += 1
    if sum(dynamo.utils.counters["frames"].values()) and (not marked or _marks[0] >= _VERSIONS):
        _marks[0] = 0
        torch.compiler.reset()
    for module in marked:
        module.forward = module.forward
    tell_apart(given)
    try:
        # in the graph: all hooks; blocks that are compiled one by one have a version each, unless they are alike
        with dynamo.config.patch(wrap_top_frame=True, recompile_limit=dynamo.config.recompile_limit + len(given)):
            yield
    finally:
        for module in marked:
            vars(module).pop("forward", None)


def trace_top(model: nn.Module) -> None:
    """Have what torch.compile wrapped around a model trace the hooks of the model itself, not only of its parts."""
    if original(model) is not model and callable(begin := getattr(model, "_initialize", None)):
        import torch._dynamo as dynamo

        with dynamo.config.patch(wrap_top_frame=True):
            begin()


@contextlib.contextmanager
def kept_out(module: nn.Module, refuse: Callable[[], None]) -> Iterator[None]:
    """Keep a module, with its hooks, out of the graphs of torch.compile, which are broken there.

    Where that is an error (fullgraph=True) it stays in the graph, its hooks do nothing, and `refuse` is called once.
    """
    before, inside, outside = module._compiled_call_impl, module._call_impl, torch.compiler.disable(module._call_impl)
    refused = mark_constant(refuse)

    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and unbreakable():
            refused()
            return inside(*args, **kwargs)
        return outside(*args, **kwargs)

    module._compiled_call_impl = called  # copies of the module do not have it
    try:
        yield
    finally:
        module._compiled_call_impl = before


class StepCapture(Capture, ABC):
    """A capture that stays on a model for a whole training run and does nothing until a step is to be measured.

    Its hooks stand in the graphs of torch.compile and do not break them (`graph_hook`); it is its own sink. An error in
    a hook goes to `report` and gives the step up (`failed`), so that the forward and backward passes of the training go
    on; what `report` raises goes through them.
    """

    batches: list[Any]  # the passes of the current step

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        extra: Sequence[Site] = (),
        *,
        layout: Layout,
        rows: Rule | None,
        kept: PositionChoice | None,
        report: Report | None = None,
    ) -> None:
        self.report, self.failed = report or _raised, False
        self._waiting: list[Any] = []  # in a graph: for gradients of the current step
        both = [*sites, *extra]  # those in `extra` get no gradients
        words: dict[str, Any] = {"layout": layout, "watch": self._watch, "idle": self._idle, "rows": rows}
        super().__init__(model, both, self, **words, **(kept.options() if kept is not None else {}))
        self.learning, self.batches, self.active = set(sites), [], False

    def drop(self) -> None:
        """Stop recording and discard the passes, and whoever waits for their gradients."""
        self.batches, self.active = [], False
        self._waiting.clear()

    def detach(self) -> None:
        hooked = [module for _, module, _ in self._hooked]
        super().detach()
        tell_apart(hooked)  # of hooks of others

    def _shielded(self, act: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(act)
        def safe(*args: Any, **kwargs: Any) -> Any:
            try:
                return act(*args, **kwargs)
            except Exception as error:
                self._give_up()
                self.report(error)

        return safe

    def __exit__(self, *error: Any) -> None:
        self.drop()
        self.detach()

    def _refuse_graph(self) -> None:
        self.report(
            AnisoscopeError(
                "queries and keys of this model are read outside of graphs, and torch.compile was told to make one "
                "graph (fullgraph=True); leave fullgraph out, or name metrics and sites without them."
            )
        )

    def _give_up(self) -> None:
        self.failed = True
        self.drop()
        for running in self._passes.values():
            running.end()

    def _attach(self) -> None:
        super()._attach()
        read = {part: traced for reader in self._readers for part, traced in reader.read(self.model).items()}
        for part in (part for part, traced in read.items() if not traced):
            self._stack.enter_context(kept_out(part, lambda: self._refuse_graph()))
        self._stack.enter_context(known_to_compile({module for _, module, _ in self._hooked} | read.keys()))

    def _made(self, module: nn.Module, whole: Callable[..., None], act: Callable[..., None], **words: Any) -> Any:
        words |= {"waiting": self._waiting, "idle": lambda: not self.active}
        return GraphHook(module, whole, inner=self._shielded(act), **words)

    @abstractmethod
    def rows(self, rows: Rows) -> None: ...

    def scores(self, scores: Scores) -> None: ...

    def _idle(self) -> bool:
        # evaluations inside the step (without gradients) and probes are not the training batch
        if not self.active or not torch.is_grad_enabled() or gradient_pass.probing():
            return True
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise AnisoscopeError(
                "the passes of this step are recorded into a CUDA graph, whose replays call no hooks; give a held-out "
                "probe= instead, or measure steps that are not replayed."
            )
        return False

    def _watch(self, site: Site, activation: Tensor, rows_of: Callable[[Tensor], Tensor]) -> None:
        if site not in self.learning or not self.batches:
            return
        if not torch.is_grad_enabled() and not _checkpointed():  # the user's own no_grad
            self.batches[-1].unreached.append(site)
            return
        if not torch.is_grad_enabled():
            raise AnisoscopeError(
                f"{site.label} is inside a re-entrant checkpoint, whose first forward pass keeps no graph, so its "
                "gradient cannot be seen; use the other kind: checkpoint(…, use_reentrant=False), in transformers "
                "gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
        batch = self.batches[-1]

        def arrived(g: Tensor | None) -> None:
            if g is None:  # an output of a graph, which uses it itself as well
                raise AnisoscopeError(
                    f"site {site} is the output of a compiled graph, inside of which its gradient stays; compile the "
                    "whole model inside `with Monitor(…)`, or give the monitor what torch.compile returned."
                )
            batch.receive(site, rows_of(g))

        if on_gradient(activation, self._shielded(arrived)):
            batch.awaited.add(site)
        else:
            batch.unreached.append(site)


class LiveGradients(StepCapture):
    """Records the micro-batches of a training step with rows and gradients; `scaled=False` allows any kind of loss."""

    batches: list[MicroBatch]

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        *,
        layout: Layout,
        extra: Sequence[Site] = (),
        scaled: bool = True,
        rows: Rule | None = None,
        kept: PositionChoice | None = None,
        report: Report | None = None,
    ) -> None:
        super().__init__(model, sites, extra, layout=layout, rows=rows, kept=kept, report=report)
        self.scaled, self.geometry = scaled, False
        self._reading: LabelConvention | None = None
        self._shared: bool | None = None

    def begin(self, *, geometry: bool = False) -> None:
        """Record every pass from now on; with `geometry` also keep rows and scores for metrics of activations."""
        self.batches, self.active, self.geometry, self.failed = [], True, geometry, False

    def end(self) -> list[MicroBatch]:
        """Stop recording and return the micro-batches."""
        batches = self.batches
        self.drop()
        return batches

    # hooks

    def _idle(self) -> bool:
        return super()._idle() or rehearsing()

    def _made(self, module: nn.Module, whole: Callable[..., None], act: Callable[..., None], **words: Any) -> Any:
        words = {name: words[name] for name in ("pick", "before", "learns")} | {"keeps": True}
        if act == self._end:
            words |= {"output": _loss_parts, "learns": True}
        return super()._made(module, whole, act, **words)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._idle():
            more, real = by_rule(self.rule, args, kwargs)
            real = None if real is None else real.cpu()
            self.batches.append(MicroBatch(arguments=by_name(module, args, kwargs) | more, real=real))
        super()._begin(module, args, kwargs)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        super()._end(module, args, output)
        if self._idle() or not self.batches:
            return
        batch = self.batches[-1]
        if self.scaled:
            self._watch_tokens(output, batch)
        if not batch.awaited and (answer := logits_of(output)) is not None:  # all sites are frozen, as for a probe head
            on_gradient(answer, self._shielded(batch.answer))
        loss = output_part(output, "loss")

        def arrived(g: Tensor) -> None:
            batch.seed = float(g)

        if not isinstance(loss, Tensor) or not on_gradient(loss, self._shielded(arrived)):
            return
        if self.scaled and batch.labels is not None and batch.has_targets():
            try:
                batch.reading, batch.shared = self._find(output, batch, batch.labels)
            except AnisoscopeError as error:
                if self._tokenless(batch):
                    batch.read = read_loss(self.model, output, batch.arguments)
                elif (shifted := shifted_log_probabilities(output, batch.labels)) is not None:
                    batch.reading = LabelConvention(shifted)
                elif not is_plain(self.model):  # the scale of a user's own loss may stay unknown
                    batch.unread = error  # which matters only if this loss is the one that is learned from
        elif self.scaled and batch.labels is None and self._tokenless(batch):
            batch.read = read_loss(self.model, output, batch.arguments)
        batch.loss = float(loss.detach())

    def _watch_tokens(self, output: Any, batch: MicroBatch) -> None:
        def arrived(weight: TokenWeight | None) -> None:
            batch.weight = weight

        watch_tokens(output, arrived, shield=self._shielded)

    def _tokenless(self, batch: MicroBatch) -> bool:
        """Whether the model read sounds, pictures or other numbers, and no tokens."""
        decodes = getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        return not decodes and not any(isinstance(batch.arguments.get(name), Tensor) for name in TEXT_DATA.inputs)

    def _find(self, output: Any, batch: MicroBatch, labels: Tensor) -> tuple[LabelConvention, bool]:
        """The label convention, and whether the loss is divided by num_items_in_batch.

        Some models take that argument and ignore it (BERT does), so it is inferred from the value of the loss.
        """
        given = batch.arguments.get("num_items_in_batch")
        if self._reading is None:  # try a loss over num_items_in_batch, then one over its own items
            both = () if given is None else (LabelConvention(True), LabelConvention(False))
            over = next((reading for reading in both if self._over(output, given, labels, reading)), None)
            ids = batch.arguments.get("input_ids")
            self._reading = over or gradient_pass.find_label_convention(self.model, output, labels, ids)
        if given is None or int(given) == self._reading.count(labels):
            return self._reading, True  # both interpretations give the same number
        if self._shared is None:
            self._shared = self._over(output, given, labels, self._reading)
        return self._reading, self._shared

    def _over(self, output: Any, given: Any, labels: Tensor, reading: LabelConvention) -> bool:
        """Whether the loss is the summed loss of this micro-batch divided by the given number of items."""
        scale = float(given) / max(1, reading.count(labels))
        own = {"loss": output_part(output, "loss").detach() * scale, "logits": output_part(output, "logits")}
        try:
            return gradient_pass.find_label_convention(self.model, own, labels) == reading
        except AnisoscopeError:
            return False

    def rows(self, rows: Rows) -> None:
        if self.batches and rows.x.ndim == 2:
            self.batches[-1].rows[rows.site] = rows
        if self.batches and self.geometry:
            self.batches[-1].shown.append(rows)

    def scores(self, scores: Scores) -> None:
        if self.batches and self.geometry:
            self.batches[-1].shown.append(scores)


def live_pass(batch: MicroBatch, sites: Sequence[Site], *, half: int | None = None) -> GradientPass:
    """The rows of a micro-batch, or of the contexts of one half of it, with their unscaled gradients."""
    contexts = None if half is None else _halves(batch).eq(half)
    inputs = {**batch.arguments, "labels": batch.labels}
    found = site_rows(sites, batch.rows, batch.gradients, inputs=inputs, reading=batch.reading, contexts=contexts)
    if batch.read is not None and (weights := batch.read.by_context) is not None:
        for site, rows in found.items():
            if rows.g is not None:
                each = weights.to(rows.g)[rows.index.keep.to(rows.g.device) // max(1, rows.index.length)]
                found[site] = replace(rows, g=rows.g * each[:, None])
    unreached = [*batch.unreached, *sorted(batch.awaited - batch.gradients.keys())]
    return GradientPass(found, tokens=batch.tokens(), unreached=unreached)


def targets_of(batches: Sequence[MicroBatch], scale: LossScale) -> int | None:
    """The targets, or examples, that the losses of these passes are over; None if that is not known of one of them."""
    learned = [batch for batch in batches if batch.learned_from()]
    given = scale.tokens if scale.loss == "mean" else None
    counts = [given or batch.tokens() or batch.examples() for batch in learned]
    known = all(count or not batch.has_targets() for count, batch in zip(counts, learned, strict=True))
    return sum(counts) if known else None


def hash_sum(batches: Sequence[MicroBatch]) -> int:
    """The sum of the hashes of all contexts of some batches: a fingerprint that does not depend on their order."""
    total = 0
    for batch in batches:
        with contextlib.suppress(AnisoscopeError):  # arguments without contexts: nothing to tell
            total += sum(row.original_contexts(batch.arguments, real=batch.real).tolist())
    return total


def _halves(batch: MicroBatch) -> Tensor:
    """The half [B] of each context, or [B, T] of packed rows: that to fit on, or that to test on."""
    halves = half_of(row.original_contexts(batch.arguments, real=batch.real, packed=True))
    ids, labels, pairs = batch.arguments.get("input_ids"), batch.labels, len(halves) // 2
    if not isinstance(ids, Tensor) or labels is None or labels.shape != ids.shape or halves.shape != (2 * pairs,):
        return halves
    # preferred and rejected answers to the same prompts: rows of a prompt are those of both, and must be in one half
    asked = (labels == gradient_pass.IGNORED).long().cumprod(1).bool()
    prompts = ids.masked_fill(~asked, -1)
    if pairs and bool(asked[:, 0].all()) and torch.equal(prompts[:pairs], prompts[pairs:]):
        return halves[:pairs].repeat(2)
    return halves
