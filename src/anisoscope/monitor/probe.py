"""A fixed held-out batch that is measured at every scheduled step: one half to fit on, one with gradients to test on.

Where only the geometry is wanted there are no halves and no backward passes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.capture import Capture, Rule, by_rule
from anisoscope.capture.gradients.gradient_pass import (
    IGNORED,
    LabelConvention,
    LossRule,
    find_reading,
    forward_rows,
    gradient_rows,
    output_part,
    unlabelled,
    untouched,
)
from anisoscope.capture.rows.row import Batch, Rows, Scores, Sink, original_contexts
from anisoscope.capture.sites.layout import Layout
from anisoscope.capture.sites.site import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.models.forward import evaluating, forward, unwrapped
from anisoscope.numerics.hashing import fold_of, half_of
from anisoscope.tangent.step_rows import StepRows, take


@dataclass(frozen=True)
class ProbePiece:
    """Some contexts of one half."""

    inputs: dict[str, Any]
    test: bool
    context: Tensor  # [B] hashes

    @property
    def fold(self) -> Tensor:
        return fold_of(self.context)


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


class Probe:
    """The contexts of a probe, split in two by their content, and the passes over them."""

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        *,
        layout: Layout,
        sites: Sequence[Site],
        fit_only: Sequence[Site] = (),
        extra: Sequence[Site] = (),
        loss: LossRule | None = None,
        weights: Sequence[str] = (),
        embedding: bool = False,
        by_fold: bool = False,
        batch_size: int = 16,
        gradients: bool = True,
        rows: Rule | None = None,
    ) -> None:
        self.gradients, self.rows = gradients, rows
        self.model, self.layout, self.loss = model, layout, loss
        self.sites, self.fit_only, self.extra = list(sites), list(fit_only), list(extra)
        self.weights, self.embedding = list(weights), embedding
        given = [labelled(model, batch) for batch in batches]
        if not given:
            raise AnisoscopeError("the probe has no batches; give at least one batch of held-out contexts.")
        words: dict[str, Any] = {"batch_size": batch_size, "by_fold": by_fold, "split": gradients, "rows": rows}
        self.pieces = list(_pieces(given, model, **words))
        self.contexts = sum(len(piece.context) for piece in self.pieces)
        if gradients and len({piece.test for piece in self.pieces}) < 2:
            raise AnisoscopeError(
                f"the probe has {self.contexts} different contexts, all in one half; contexts are split in two by a "
                "hash of their content to fit and to test: give at least eight."
            )
        self.reading = self._reading()

    @property
    def fingerprint(self) -> str:
        """A number for the contexts, whatever their order."""
        total = sum(int(h) for piece in self.pieces for h in piece.context)
        return f"{total % (1 << 64):016x}"

    def _reading(self) -> LabelConvention | None:
        """How the model reads its labels, tried on a few contexts; unknown where the user gives the loss."""
        found = None
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
                return find_reading(self.model, output, few["labels"])
            except AnisoscopeError:
                if self.loss is None and self.gradients:
                    raise
                return None
        if self.loss is None and self.gradients:
            raise AnisoscopeError(
                f"every label of the probe is {IGNORED} (ignored) or missing, so there is no loss; give batches with "
                "labels at some positions."
            )
        return found

    def run(self, step: int, *, others: Sink | None = None) -> StepRows:
        """All rows of one step; `others` takes the rows of every context, for the geometry metrics."""
        if not self.gradients:
            return self._forward(step, others)
        out = StepRows(step)
        others = None if others is None else _Chosen(others, frozenset([*self.sites, *self.extra]))
        words: dict[str, Any] = {"layout": self.layout, "reading": self.reading, "others": others}
        words |= {"extra": self.extra, "rows": self.rows}
        for piece in self.pieces:
            if not piece.test:
                out.add_fit(forward_rows(self.model, piece.inputs, [*self.sites, *self.fit_only], **words))
                continue
            found = gradient_rows(
                self.model,
                piece.inputs,
                self.sites,
                loss=self.loss,
                weights=self.weights,
                embedding=self.embedding,
                **words,
            )
            out.add_test(found)
            folds = piece.fold
            if found.embedded is not None:
                ids, grads = found.embedded
                out.embedded.append((ids, grads, folds.repeat_interleave(len(ids) // len(folds))))
            out.losses.append((int(folds[0]) if len(folds.unique()) == 1 else -1, found.loss, found.tokens))
            if found.weights:
                out.weights.append((int(folds[0]) if len(folds.unique()) == 1 else -1, found.weights))
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
        return float(output_part(forward(self.model, inputs), "loss")) * tokens, tokens


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


def _pieces(
    batches: list[dict[str, Any]],
    model: nn.Module,
    *,
    batch_size: int,
    by_fold: bool,
    split: bool,
    rows: Rule | None = None,
) -> Iterator[ProbePiece]:
    """The contexts of each batch, in chunks, `split` by half (and fold); a context that occurs twice counts once."""
    seen: set[int] = set()
    config = getattr(model, "config", None)
    for inputs in batches:
        more, real = by_rule(rule=rows, args=(), kwargs=inputs)
        hashes = original_contexts({**inputs, **more}, config=config, real=None if real is None else real.cpu())
        fresh = [b for b, h in enumerate(hashes.tolist()) if not (h in seen or seen.add(h))]  # type: ignore[func-returns-value]
        chosen = torch.tensor(fresh, dtype=torch.int64)
        half = half_of(hashes[chosen]) if split else torch.zeros_like(chosen)
        fold = fold_of(hashes[chosen]) if by_fold else torch.zeros_like(chosen)
        fold = fold.where(half == 1, 0)  # contexts to fit on are not split by fold
        folds = range(int(fold.max()) + 1 if len(fold) else 0)
        for test, f in [(0, 0), *((1, f) for f in folds)]:
            mine = chosen[(half == test) & (fold == f)]
            for part in mine.split(batch_size) if len(mine) else ():
                yield ProbePiece(take(inputs, part), bool(test), hashes[part])
