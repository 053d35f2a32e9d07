"""What a stack returns, and whether a norm or a projection lies between it and the last block."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from anisoscope.capture.parts import Place


def find_final(model: nn.Module, owner: str, *, block: str, config: Any) -> tuple[Place, bool]:
    """Where the output of a stack is read, and whether something acts on it after the last block."""
    norms: list[str] = []
    path = block.rpartition(".")[0]
    while path not in (owner, ""):
        inner, path = path, path.rpartition(".")[0]
        norms += _after_blocks(model, path, blocks=inner.rpartition(".")[2])
    children = dict(model.get_submodule(owner).named_children())
    first = list(children).index(block[len(owner) + bool(owner) :].partition(".")[0])  # what stands before is no head
    vocabulary = getattr(config, "vocab_size", None)
    behind = list(children.values())[first + 1 :]
    heads = [child for child in behind if getattr(child, "out_features", None) == vocabulary is not None]
    if heads and norms:  # the owner returns logits
        return Place(norms[-1], "out"), True
    return Place(owner, "out"), bool(norms)


def _after_blocks(model: nn.Module, path: str, *, blocks: str) -> list[str]:
    """Children that may act after the blocks: norms, except those of the embeddings, and output projections."""
    found, passed = [], False
    for name, child in model.get_submodule(path).named_children():
        # LFM2 calls the norm behind its blocks embedding_norm; other norms of embeddings stand before the blocks
        before = re.search(r"^pre|input" if passed else r"emb(?!.*after)|^pre|input", name.lower())
        norm = "norm" in type(child).__name__.lower() and not before
        if norm or name == "project_out":
            found.append(f"{path}.{name}" if path else name)
        passed = passed or name == blocks
    return found
