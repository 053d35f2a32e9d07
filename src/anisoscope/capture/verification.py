"""Numerical verification of the sites of a layout on one forward pass.

Checked: embed, resid, stage and final against the model's own `hidden_states`; attn_out and mlp_out by the identity
`out = h + attn_out + mlp_out`, or `out = N₂(u + mlp_out)`, `u = N₁(h + attn_out)` where norms come after the sum;
scores by softmax against the model's own attention probabilities.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.capture import Capture
from anisoscope.capture.row import Batch, Index, KeptRows, Rows, Scores
from anisoscope.capture.sites.layout import Layout, Stack
from anisoscope.capture.sites.site import CALLED_KINDS, Site
from anisoscope.errors import AnisoscopeError
from anisoscope.models.forward import evaluating, forward, unwrapped

_STREAM = ("embed", "resid", "stage", "final")
_ADDED = ("attn_in", "attn_out", "mlp_in", "mlp_out")
_OWN = {"scores": "attentions", "cross_scores": "cross_attentions"}  # names in the model's output
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_CONTEXTS = 2  # contexts of the verification pass


def verify(
    model: nn.Module, layout: Layout, batch: Batch | Mapping[str, Any], *, kinds: Sequence[str] | None = None
) -> list[str]:
    """Check the layout on the first contexts of a batch; returns notes, or raises an error that names a wrong site.

    `kinds` limits the check to what will be captured; default: all kinds of the layout.
    """
    whole = batch.inputs if isinstance(batch, Batch) else batch
    inputs = {name: x[:_CONTEXTS] if isinstance(x, Tensor) and x.dim() else x for name, x in whole.items()}
    wanted = [kind for kind in (layout.kinds if kinds is None else kinds) if kind in (*_STREAM, *_ADDED, *CALLED_KINDS)]
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    check = _Check(model, layout, _TOLERANCE.get(dtype, 5e-2))
    with _untouched(model), evaluating(model), torch.inference_mode():
        check.stream(inputs, added=bool(set(wanted) & set(_ADDED)))
        if set(wanted) & set(CALLED_KINDS) and "scores" in layout.kinds:
            check.attention(inputs)
    return check.notes


class _Check:
    def __init__(self, model: nn.Module, layout: Layout, tolerance: float) -> None:
        self.model, self.layout, self.tolerance = model, layout, tolerance
        self.notes: list[str] = []
        self.kept: dict[Site, Rows] = {}

    def stream(self, inputs: Mapping[str, Any], *, added: bool) -> None:
        """Compare the residual stream with the model's hidden states and, with `added`, the parts added to it."""
        kinds = [*_STREAM, *([*_ADDED, "block_in", "cross_out"] if added else [])]
        sites = [site for stack in self.layout.stacks for site in stack.sites(kinds)]
        sink = KeptRows()
        with Capture(self.model, sites, sink, layout=self.layout):
            output = forward(self.model, inputs, **self._asked("output_hidden_states"))
        self.kept = sink.kept
        if not self.kept:
            raise AnisoscopeError("the sites cannot be verified: the batch has only padding; give one with tokens.")
        for stack in self.layout.stacks:
            self._hidden(stack, _named(output, stack, "hidden_states"))
            outer = "encoder_" if stack.name == "encoder" and len(self.layout.stacks) > 1 else ""
            self._last(stack, getattr(output, f"{outer}last_hidden_state", None))
            for layer in range(1, stack.depth + 1) if added else ():
                self._block(stack, layer)

    def _asked(self, flag: str) -> dict[str, Any]:
        known = hasattr(getattr(unwrapped(self.model), "config", None), flag)
        return {flag: True, "return_dict": True} if known else {}

    def _hidden(self, stack: Stack, hidden: Sequence[Tensor] | None) -> None:
        if not hidden:
            self.notes.append(stack.labelled("the model gives no hidden_states; its sites rest on their names"))
            return
        if stack.staged:
            self._maps(stack, hidden)
            return
        own = stack.family.hidden
        layers: list[int | None] = own(stack.depth) if own is not None else list(range(stack.depth + 1))
        if len(layers) != len(hidden):
            raise AnisoscopeError(
                f"{self.layout.model}: {stack.depth} blocks were found in {stack.name}, but the model gives "
                f"{len(hidden)} hidden states; name what to look at with modules=[…] (--modules)."
            )
        final = Site(stack.depth, "final", stack.name)
        for layer, theirs in zip(layers, hidden, strict=True):
            if layer is None or (layer == stack.depth and self._same(final, theirs)):
                continue  # no site, or the last entry, which has usually passed the final norm
            site = Site(layer, "resid" if layer else "embed", stack.name)
            if not self._same(site, theirs):
                raise self._other(site)

    def _maps(self, stack: Stack, hidden: Sequence[Tensor]) -> None:
        """Check that each stage equals one of the model's hidden states, later than that of the previous stage."""
        sites = [site for site in stack.sites(_STREAM) if site in self.kept]  # padded images may leave a map empty
        same = {site: [n for n, theirs in enumerate(hidden) if self._same(site, theirs)] for site in sites}
        last = -1
        for site in (site for site in sites if site.kind == "stage"):
            block = same.get(replace(site, kind="resid"), [])
            last = next((n for n in same[site] if n > last and n >= min(block, default=0)), -1)
            if last < 0:
                raise self._other(site)
        if extra := set(range(len(hidden))).difference(*same.values()):
            self.notes.append(f"{len(extra)} of the model's own {len(hidden)} hidden states are at none of its sites")

    def _last(self, stack: Stack, last: Tensor | None) -> None:
        block_kind, noun = ("stage", "stage") if stack.staged else ("resid", "block")
        final, block = (Site(stack.depth, kind, stack.name) for kind in ("final", block_kind))
        if final not in self.kept or block not in self.kept:
            return
        if last is not None and not self._same(final, last):
            raise self._other(final)
        if self._close(self.kept[final].x, self.kept[block].x):
            self.notes.append(stack.labelled(f"no final norm: final equals the last {noun}"))
        elif not stack.has_norm:
            self.notes.append(stack.labelled("something follows the last block; ask for final alone to see it"))

    def _same(self, site: Site, theirs: Tensor) -> bool:
        maps = [theirs.flatten(2).transpose(1, 2), theirs.flatten(1, 2)] if theirs.dim() == 4 else [theirs]
        rows = self.kept[site]  # channels of a map come first or last
        return any(self._close(rows.x, _rows_of(each, rows.index)) for each in maps)

    def _other(self, site: Site) -> AnisoscopeError:
        return AnisoscopeError(
            f"site {site} of {self.layout.model} is not what the model itself calls this hidden state; name "
            "what to look at with modules=[…] (--modules)."
        )

    def _close(self, ours: Tensor, theirs: Tensor) -> bool:
        return _distance(ours, theirs) <= self.tolerance

    def _block(self, stack: Stack, layer: int) -> None:
        kinds = ("attn_out", "mlp_out", "mlp_in", "attn_in", "block_in", "resid")
        parts = [rows.x for kind in kinds if (rows := self.kept.get(Site(layer, kind, stack.name))) is not None]
        if len(parts) < len(kinds):
            return
        attn, mlp, mlp_in, attn_in, before, after = parts
        cross = self.kept.get(Site(layer, "cross_out", stack.name))
        off, wrong = float("inf"), "attn_out"
        if before.shape == after.shape == attn.shape == mlp.shape:
            off = _distance(before + attn + mlp + (0 if cross is None else cross.x), after)
            if off <= self.tolerance:
                return
            norms = _norms(self.model.get_submodule(stack.blocks[layer - 1]), after.shape[-1])
            sums = [base + attn for base in (before, attn_in)]
            if cross is not None:
                sums = [norm(s) + cross.x for s in sums for norm in norms]
            if not any(self._close(norm(mlp_in + mlp), after) for norm in norms):
                wrong = "mlp_out"
            elif any(self._close(norm(s), mlp_in) for s in sums for norm in norms):
                return
        raise AnisoscopeError(
            f"site {Site(layer, wrong, stack.name)} of {self.layout.model} is not what its block adds to the residual "
            f"stream (off by {off:.2g} of the stream); leave attn_out and mlp_out out, or name modules=[…]."
        )

    def attention(self, inputs: Mapping[str, Any]) -> None:
        """Compare the softmax of the scores with the model's attention probabilities."""
        sites = [site for stack in self.layout.stacks for site in stack.sites(_OWN)]
        sink = KeptRows()
        with _eager(self.model), Capture(self.model, sites, sink, layout=self.layout):
            output = forward(self.model, inputs, **self._asked("output_attentions"))
            for stack in self.layout.stacks:
                for kind, name in _OWN.items():
                    called = sorted(site for site in sink.calls if (site.stack, site.kind) == (stack.name, kind))
                    theirs = _named(output, stack, name) if kind == "scores" else getattr(output, name, None)
                    self._attentions(stack, [sink.calls[site] for site in called], theirs)

    def _attentions(self, stack: Stack, calls: Sequence[Scores], theirs: Sequence[Tensor] | None) -> None:
        stages = sorted(layer for layer, kind in stack.fixed if kind == "stage")
        if theirs and len(theirs) == stack.depth:
            theirs = [theirs[call.site.layer - 1] for call in calls]
        elif theirs and len(theirs) == len(stages):  # those of the last block of every stage
            calls = [call for call in calls if call.site.layer in stages]
        if not calls:
            return
        if not theirs or len(theirs) != len(calls) or any(one is None for one in theirs):
            self.notes.append(stack.labelled("the model gives no attention probabilities; scores are not verified"))
            return
        for call, shown in zip(calls, theirs, strict=True):
            keep, ours = call.index.keep, probabilities(call)
            if 0 < call.chunk < ours.shape[2]:  # a model that attends within chunks shows the first of them
                ours = ours[:, :, : shown.shape[2], : shown.shape[3]]
                keep = torch.arange(ours.shape[0] * ours.shape[2])
            if shown.dim() == 4 and bool((shown == shown[:, :1]).all()):  # WavLM shows the mean over heads as each head
                ours, shown = ours.mean(1, keepdim=True), shown[:, :1]
            pair = (x.transpose(1, 2).flatten(0, 1)[keep].float() for x in (ours, shown))
            if not _distance(*pair) <= max(self.tolerance, 1e-5):  # models take the softmax in float32 at most
                raise AnisoscopeError(
                    f"softmax of {call.site} of {self.layout.model} is not the attention of the model; leave query, "
                    "key and scores out."
                )


def probabilities(call: Scores) -> Tensor:
    """Attention probabilities [B, H, T, S] of one call, recomputed in full."""
    groups = call.query.shape[1] // call.key.shape[1]
    key = call.key.repeat_interleave(groups, dim=1)
    scores = call.scaling * (call.query.float() @ key.float().transpose(-1, -2))
    scores = scores if call.bias is None else scores + call.bias
    return scores.masked_fill(~call.allowed, float("-inf")).softmax(-1)


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    if ours.shape != theirs.shape:
        return float("inf")
    scale = float(theirs.abs().max()) if theirs.numel() else 1.0
    return float((ours - theirs.to(ours.device, ours.dtype)).abs().max()) / max(scale, 1e-12) if ours.numel() else 0.0


def _rows_of(hidden: Tensor, index: Index) -> Tensor:
    """The rows of a hidden state at an index; empty if it lacks positions, such as those that the model added."""
    keep = index.keep.to(hidden.device)
    row, position = keep // index.length, keep % index.length
    if hidden.dim() != 3 or hidden.shape[0] != index.batch or int(position.max()) >= hidden.shape[1]:
        return hidden.new_empty(0)
    return hidden[row, position].to(torch.float64 if hidden.dtype == torch.float64 else torch.float32)


def _norms(block: nn.Module, width: int) -> list[Any]:
    """The norms of a block that fit its stream, as functions of promoted rows, and the identity."""
    found = [module for module in block.modules() if "norm" in type(module).__name__.lower()]
    found = [module for module in found if all(p.shape[-1] == width for p in module.parameters())]

    def applied(module: nn.Module) -> Any:
        dtype = next((p.dtype for p in module.parameters()), None)
        return lambda x: module(x if dtype is None else x.to(dtype)).to(x.dtype)

    return [lambda x: x, *map(applied, found)]


def _named(output: Any, stack: Stack, what: str) -> Sequence[Tensor] | None:
    found: Sequence[Tensor] | None = getattr(output, what if stack.name == "single" else f"{stack.name}_{what}", None)
    return getattr(output, f"decoder_{what}", None) if found is None and stack.name == "single" else found


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Remove the permanent hooks that transformers installs when hidden states are requested."""
    mark = "_output_capturing_hooks_installed"
    before = [(part, part._forward_hooks.copy(), mark in vars(part)) for part in model.modules()]
    try:
        yield
    finally:
        for module, hooks, marked in before:
            module._forward_hooks = hooks
            if not marked and mark in vars(module):
                delattr(module, mark)


@contextlib.contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    """Switch to eager attention, which returns probabilities; the implementations in use are restored afterwards.

    Every part with a configuration of its own is switched: transformers 5.17 leaves out those whose configuration is of
    the same class as that of the whole (the stacks of T5), and parts may use different implementations.
    """
    parts: dict[int, Any] = {}  # the whole before its parts, because it switches them, too
    for part in unwrapped(model).modules():
        if hasattr(part, "set_attn_implementation"):
            parts.setdefault(id(part.config), part)
    used = [(part, name) for part in parts.values() if (name := part.config._attn_implementation) is not None]
    try:
        for part, name in used:
            if name != "eager":
                part.set_attn_implementation("eager")
        yield
    finally:
        for part, name in used:
            if name != part.config._attn_implementation:
                part.set_attn_implementation(name)
