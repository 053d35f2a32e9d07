"""The vocabulary of sites, which is the same for every model.

Layer 0 is the embedding, layer l is block l (1-based), `final` and `unembed` carry layer L (the number of blocks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anisoscope.errors import unknown_name

KINDS: dict[str, str] = {
    "embed": "input of the first block: token (and position) embeddings, after any embedding norm or dropout",
    "resid": "residual stream after each block",
    "stage": "feature map after each stage of a convolutional or hierarchical model, one row per position",
    "stage_mean": "global average of a stage's feature map, one row per context",
    "cls": "the class token after each block, one row per context, apart from the patches",
    "final": "after the last norm, apart from the last block; absent where a model has no final norm",
    "attn_in": "what the self-attention reads: after the norm in pre-norm models",
    "attn_out": "what the self-attention adds to the residual stream",
    "mlp_in": "what the feed-forward part reads: after the norm in pre-norm models",
    "mlp_out": "what the feed-forward part adds to the residual stream",
    "query": "queries per head, as they meet the keys (after rotation where the model rotates)",
    "key": "keys per head, as they meet the queries (after rotation where the model rotates)",
    "scores": "attention scores as fed to softmax, per head; never kept whole",
    "query_unrotated": "queries per head before rotation, in models that rotate",
    "key_unrotated": "keys per head before rotation, in models that rotate",
    "cross_query": "queries per head of the decoder's attention to the encoder",
    "cross_key": "keys per head that the encoder's rows give to the decoder; one row per position of the encoder",
    "cross_scores": "scores of the decoder's attention to the encoder, as fed to softmax, per head; never kept whole",
    "unembed": "rows of the output head's weight (one per token of the vocabulary)",
    "embed_weight": "rows of the input embedding table (one per token of the vocabulary)",
    "module": "the output of a module the user named",
    "rows": "rows of a file",
}

SELF_KINDS = ("query", "key", "scores")
ROTARY_KINDS = ("query_unrotated", "key_unrotated")
CROSS_KINDS = ("cross_query", "cross_key", "cross_scores")
CALLED_KINDS = (*SELF_KINDS, *ROTARY_KINDS, *CROSS_KINDS)  # read from attention calls, not from a module's output
PER_HEAD = frozenset(CALLED_KINDS) - {"scores", "cross_scores"}


@dataclass(frozen=True, order=True)
class Site:
    """One place in one stack of a model.

    >>> str(Site(3, "resid")), str(Site(0, "embed", stack="encoder"))
    ('3.resid', 'encoder.0.embed')
    """

    layer: int
    kind: str
    stack: str = "single"
    name: str = ""  # the module's own path, for kind == "module"

    def __str__(self) -> str:
        parts = [self.stack] if self.stack != "single" else []
        return ".".join([*parts, str(self.layer), self.name or self.kind])

    @property
    def label(self) -> str:
        """The site in a sentence: a module by its own path.

        >>> Site(3, "resid").label, Site(0, "module", name="encoder.2").label
        ('site 3.resid', "module 'encoder.2'")
        """
        return f"module {self.name!r}" if self.name else f"site {self}"


def flow_order(site: Site) -> tuple[str, int, int, str]:
    """A sort key: stack, layer, then the order in which kinds are listed above (the last block before `final`)."""
    return site.stack, site.layer, list(KINDS).index(site.kind), site.name


def check_kinds(kinds: list[str]) -> list[str]:
    """The same list, or an error that names the nearest known kind."""
    for kind in kinds:
        if kind not in KINDS:
            raise unknown_name("site", kind, KINDS)
    return kinds


EVERY = "all"  # instead of names of sites: all that a model has


def names_of(names: Sequence[str] | str | None) -> list[str] | None:
    """Names as a list; a string may hold several, separated by commas.

    >>> names_of("resid, cls"), names_of(("embed",)), names_of(None)
    (['resid', 'cls'], ['embed'], None)
    """
    if isinstance(names, str):
        return [name.strip() for name in names.split(",")]
    return None if names is None else list(names)


def too_deep(layers: set[int] | None, depth: int) -> list[str]:
    """A note if some of the requested layers do not exist; if none does, that is an error elsewhere.

    >>> too_deep({1, 2, 3, 4}, 2), too_deep({2}, 2)
    (['layers 3, 4 are not there: the last one is 2'], [])
    """
    beyond = sorted(layer for layer in layers or () if layer > depth)
    if not beyond:
        return []
    listed = ", ".join(map(str, beyond)) if len(beyond) < 4 else f"{beyond[0]} to {beyond[-1]}"
    verb = "layers {} are" if len(beyond) > 1 else "layer {} is"
    return [f"{verb.format(listed)} not there: the last one is {depth}"]
