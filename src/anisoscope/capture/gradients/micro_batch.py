"""Activations and gradients of the user's own training step, read by hooks that change nothing.

Gradients are raw: tensor hooks fire during the backward pass, before clipping. The factor that scales them – loss
scaling, division by the number of micro-batches – is the gradient that arrives at the loss the model returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.capture import Capture, Rule, by_rule
from anisoscope.capture.gradients.gradient_pass import GradientPass, SiteRows, probing
from anisoscope.capture.gradients.loss import IGNORED, LabelConvention, Words, find_reading, output_part
from anisoscope.capture.rows.index import original_contexts
from anisoscope.capture.rows.row import Rows, Scores, Sink
from anisoscope.capture.sites.layout import Layout
from anisoscope.capture.sites.site import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.models.forward import by_name
from anisoscope.numerics.hashing import half_of


@dataclass
class MicroBatch:
    """One forward and backward pass of a training step."""

    arguments: dict[str, Any]
    rows: dict[Site, Rows] = field(default_factory=dict)
    gradients: dict[Site, Tensor] = field(default_factory=dict)
    seed: float | None = None  # the gradient that arrived at the model's own loss
    reading: LabelConvention | None = None
    loss: float = float("nan")  # as the model returned it
    unreached: list[Site] = field(default_factory=list)
    shown: list[Rows | Scores] = field(default_factory=list)  # for the geometry metrics
    real: Tensor | None = None  # which positions are data [B, T], where a rule says it
    shared: bool = True  # whether the loss is a part of the mean over num_items_in_batch, where that is given

    def feed(self, sink: Sink) -> None:
        """Send the recorded rows and scores to a sink; only gradients show that a pass was part of the training."""
        for item in self.shown:
            if isinstance(item, Rows):
                sink.rows(item)
            else:
                sink.scores(item)

    def learned_from(self) -> bool:
        """Whether a backward pass came through it."""
        return bool(self.gradients) or self.seed is not None

    def has_targets(self) -> bool:
        """Whether some label is not ignored; True without labels, where the user computes the loss."""
        labels = self.arguments.get("labels")
        return not isinstance(labels, Tensor) or bool((labels != IGNORED).any())

    def tokens(self) -> int:
        """What the mean of the loss was taken over."""
        given = self.arguments.get("num_items_in_batch")
        if given is not None and self.shared:
            return int(given)
        labels = self.arguments.get("labels")
        return self.reading.count(labels) if self.reading is not None and isinstance(labels, Tensor) else 0


class StepHooks:
    """Hooks that stay on a model for a whole training run and do nothing until a step is to be measured.

    They must be attached before torch.compile and are kept out of the compiled graph.
    """

    def __init__(self, model: nn.Module, capture: Capture) -> None:
        self.model, self.active, self._capture = model, False, capture
        self._handles: list[Any] = []

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._capture._stack.close()

    def _idle(self) -> bool:
        # an evaluation inside the step runs without gradients; neither it nor a probe is the training batch
        return not self.active or not torch.is_grad_enabled() or probing()


class LiveGradients(StepHooks):
    """Records the micro-batches of a training step with rows and gradients.

    Without `scaled` only the arrival of gradients matters, and the loss may be of any kind.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        *,
        layout: Layout,
        extra: Sequence[Site] = (),
        scaled: bool = True,
        rows: Rule | None = None,
    ) -> None:
        options: dict[str, Any] = {"layout": layout, "watch": self._watch, "idle": self._idle, "rows": rows}
        super().__init__(model, Capture(model, [*sites, *extra], self, **options))
        self.sites, self.scaled, self.rule, self.geometry = list(sites), scaled, rows, False
        self.batches: list[MicroBatch] = []
        self._reading: LabelConvention | None = None
        self._shared: bool | None = None

    def __enter__(self) -> LiveGradients:
        before = torch.compiler.disable(self._begin)
        after = torch.compiler.disable(self._end)
        self._handles.append(self.model.register_forward_pre_hook(before, with_kwargs=True))
        self._capture.__enter__()
        self._handles.append(self.model.register_forward_hook(after, with_kwargs=True))
        return self

    def begin(self, *, geometry: bool = False) -> None:
        """Record every pass from now on; with `geometry` keep what metrics of the activations need."""
        self.batches, self.active, self.geometry = [], True, geometry

    def end(self) -> list[MicroBatch]:
        """Stop recording and return the micro-batches."""
        self.active, self.geometry = False, False
        found, self.batches = self.batches, []
        return found

    def drop(self) -> None:
        """Forget the passes of a step that was interrupted."""
        self.end()

    # hooks

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._idle():
            more, real = by_rule(self.rule, args, kwargs)
            real = None if real is None else real.cpu()
            self.batches.append(MicroBatch(by_name(module, args, kwargs) | more, real=real))

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._idle() or not self.batches:
            return
        batch = self.batches[-1]
        loss, labels = output_part(output, "loss"), batch.arguments.get("labels")
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            return
        if self.scaled and isinstance(labels, Tensor) and bool((labels != IGNORED).any()):
            batch.reading, batch.shared = self._find(output, batch, labels)
        batch.loss = float(loss.detach())

        def arrived(g: Tensor) -> None:
            batch.seed = float(g)

        loss.register_hook(arrived)

    def _find(self, output: Any, batch: MicroBatch, labels: Tensor) -> tuple[LabelConvention, bool]:
        """How the labels are read, and whether the loss is over the items of all micro-batches.

        Some models take num_items_in_batch and ignore it (BERT does), so the loss itself has to say.
        """
        given = batch.arguments.get("num_items_in_batch")
        reading = self._reading = self._reading or self._read(output, given, labels)
        if given is None or int(given) == reading.count(labels):
            return reading, True  # the same number either way
        if self._shared is None:
            self._shared = self._over(output, given, labels, reading)
        return reading, self._shared

    def _read(self, output: Any, given: Any, labels: Tensor) -> LabelConvention:
        """The reading of a loss over its own items, or else over those given."""
        both = [] if given is None else [LabelConvention(True), LabelConvention(False)]
        shared = [reading for reading in both if self._over(output, given, labels, reading)]
        return shared[0] if shared else find_reading(self.model, output, labels)

    def _over(self, output: Any, given: Any, labels: Tensor, reading: LabelConvention) -> bool:
        """Whether the loss, read so, is the summed loss of this micro-batch over the items given."""
        own = output_part(output, "loss").detach() * (float(given) / max(1, reading.count(labels)))
        try:
            return find_reading(self.model, {"loss": own, "logits": output_part(output, "logits")}, labels) == reading
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

    def _watch(self, site: Site, activation: Tensor, rows_of: Callable[[Tensor], Tensor]) -> None:
        if site not in self.sites or not self.batches:
            return
        refuse_graphless(site)
        batch = self.batches[-1]
        if not activation.requires_grad:
            batch.unreached.append(site)
            return

        def arrived(g: Tensor) -> None:
            batch.gradients[site] = rows_of(g)

        activation.register_hook(arrived)


def refuse_graphless(site: Site) -> None:
    """Refuse a site without a graph in a pass that has one: it lies in a re-entrant checkpoint."""
    if not torch.is_grad_enabled():
        raise AnisoscopeError(
            f"site {site} is inside a re-entrant checkpoint, whose first forward pass keeps no graph, so its "
            "gradient cannot be seen; use the other kind: gradient_checkpointing_kwargs={'use_reentrant': False}."
        )


def live_pass(batch: MicroBatch, sites: Sequence[Site], *, half: int | None = None) -> GradientPass:
    """The rows of a micro-batch, or of the contexts of one half of it, with their unscaled gradients."""
    halves = half_of(original_contexts(batch.arguments, real=batch.real)) if half is not None else None
    out = GradientPass(tokens=batch.tokens(), unreached=list(batch.unreached))
    labels = batch.arguments.get("labels")
    labels = labels.detach().cpu() if isinstance(labels, Tensor) else None
    for site in sites:
        rows, g = batch.rows.get(site), batch.gradients.get(site)
        if rows is None:
            continue
        words = Words.of(rows.index, labels, batch.reading, stack=site.stack)
        chosen = torch.arange(len(rows.x))
        if halves is not None:
            chosen = chosen[halves[rows.index.keep.cpu() // max(1, rows.index.length)] == half]
        at = chosen.to(rows.x.device)
        masked = None if words.masked is None else words.masked[chosen]
        words = Words(words.original[chosen], words.target[chosen], masked)
        index = rows.index.taken(chosen.to(rows.index.keep.device))
        out.sites[site] = SiteRows(rows.x[at], None if g is None else g[at], index, words)
    return out
