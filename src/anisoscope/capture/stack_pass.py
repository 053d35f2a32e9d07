"""The state of one stack of a model while a forward pass runs through it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from anisoscope.capture.rows.index import Contexts
from anisoscope.capture.sites.layout import Stack
from anisoscope.capture.sites.patch import CUTTING, SpecialPositions, patch_counts, settle


class StackPass:
    """The state of a stack during a forward pass: contexts, current layer, and which positions are patches."""

    def __init__(self, stack: Stack | None, notes: list[str]) -> None:
        self.stack, self.notes = stack, notes
        self.contexts: Contexts | None = None
        self.layer = 0
        self.layers = {path: i for i, path in enumerate(stack.blocks, start=1)} if stack else {}
        self.counted = False  # whether positions that may be tokens were counted as patches
        self._patches: list[int] = []  # numbers of patches that the image may be cut into
        self._tokens = stack.tokens if stack is not None else None  # as found by name, then as seen
        self._among: SpecialPositions | None = None  # of this pass
        self._positions = 0

    def begin(self, contexts: Contexts, arguments: Mapping[str, Any]) -> None:
        """Start a pass over these contexts, given the arguments of the stack's forward."""
        self.contexts, self.layer, self._among = contexts, 0, None
        if self.stack is not None:
            self._patches = patch_counts(arguments, self.stack.config)

    def end(self) -> None:
        self.contexts, self.layer = None, 0

    def cut(self, output: Any) -> None:
        """A convolution outside the blocks was called; before the first block it may be what cuts patches."""
        if self.contexts is not None and self.layer == 0 and isinstance(output, Tensor):
            self._patches.append(output[:, 0].numel() // self.contexts.batch)  # frames of a film may be contexts there

    def enter(self, path: str, x: Tensor) -> None:
        """The block at a path is called with x."""
        shared = self.stack is not None and self.stack.shared
        self.layer = self.layer + 1 if shared else self.layers[path]
        if self.contexts is None or self.stack is None:
            return
        if self._tokens is not None and x.dim() == 3 and x.shape[0] == self.contexts.batch:
            self._settle_patches(x)
        before, after = self.stack.prefix_at(self.layer), self.stack.suffix
        among = self._among or SpecialPositions(before, after)
        self.contexts.prefix, self.contexts.suffix = among.before, among.after

    def _settle_patches(self, x: Tensor) -> None:
        """Decide which positions are patches where no family says it: at the first block, and where more come in."""
        assert self.stack is not None and self._tokens is not None
        if self._among is None:
            self._among, note = settle(self._tokens, x, self._patches)
            self._tokens, self._positions = (self._among if self._among.count else self._tokens), x.shape[1]
            self._say(note)
        elif x.shape[1] > self._positions and not self.stack.staged:
            more, self._positions, self._among = x.shape[1] - self._positions, x.shape[1], SpecialPositions()
            words = f"from layer {self.layer} on the blocks read {more} positions more than before, and what they are"
            self._say(f"{words} is not known: all positions are counted there, and none as a class token")

    def _say(self, words: str) -> None:
        self.counted |= bool(words)
        note = words if self.stack is None else self.stack.labelled(words)
        if words and note not in self.notes:
            self.notes.append(note)


def patch_cutters(model: nn.Module, stack: Stack) -> list[nn.Module]:
    """Convolutions over images outside the blocks, one of which cuts the patches; none where a family says all."""
    if stack.tokens is None:
        return []
    inside = tuple(f"{path}." for path in stack.blocks)
    parts = model.get_submodule(stack.owner).named_modules(prefix=stack.owner)
    return [part for path, part in parts if isinstance(part, CUTTING) and not path.startswith(inside)]
