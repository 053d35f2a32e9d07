"""Find the parts of blocks by name, and the stages that blocks form in convolutional and hierarchical models.

A stage is an element of a list (`stages`, `features`), or one of numbered siblings (`layer1` … `layer4`), that holds a
list of blocks. In a flat list of blocks one begins where a block changes the resolution or the number of channels.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from anisoscope.capture.sites.site import CALLED_KINDS, CROSS_KINDS, ROTARY_KINDS, SELF_KINDS

KINDS_OF_BLOCK = ("attn_in", "attn_out", "mlp_in", "mlp_out", *CALLED_KINDS)
ABSENT = {  # kinds of sites that most models do not have, and why
    **dict.fromkeys(ROTARY_KINDS, "its attention calls no rotary function"),
    **dict.fromkeys(CROSS_KINDS, "its blocks do not attend to another stack"),
}

_SELF = ("self_attn", "self_attention", "attn", "attention", "SelfAttention", "layer.0.SelfAttention")
_CROSS = ("encoder_attn", "crossattention", "cross_attn", "cross_attention", "layer.1.EncDecAttention")
_FEED = ("mlp", "feed_forward", "ffn", "ff", "feedforward", "block_sparse_moe", "moe", "layer.1.DenseReluDense")
_FEED_PAIRS = (("intermediate", "output.dense"), ("ffn", "ffn_output"), ("fc1", "fc2"), ("linear1", "linear2"))
_FEED_LAST = ("layer.2.DenseReluDense", *_FEED)
# Norms and scales that act on a sublayer's output before it is added. `post_attention_layernorm` is one only beside a
# norm after the feed-forward part; `post_mlp_layernorm` only beside a norm before the attention.
_AFTER_ATTENTION = ("layer_scale1", "post_self_attn_layernorm", "post_attention_layernorm", "post_attention_norm")
_AFTER_FEED = ("layer_scale2", "post_feedforward_layernorm", "post_ffw_layernorm", "post_feedforward_norm")
_NUMBERED = re.compile(r"^(layer|stage|block|level|group|res)_?(\d+)$")
_LISTS = (nn.ModuleList, nn.Sequential)
_POOLED = re.compile(r"pool|flatten", re.IGNORECASE)
_PIXELS = 4  # maximum channels of an image; a module that reads so few is a stem
_INNER = 2  # maximum depth of a stage's list of blocks below the stage

Item = tuple[str, nn.Module]


@dataclass(frozen=True)
class Place:
    """The input ("in") or output ("out") of a module, multiplied by the scale that the block applies to it."""

    path: str
    side: str
    scale: float = 1.0
    gain: str = ""  # path of a weight that also multiplies each channel


def child(module: nn.Module, paths: Iterable[str]) -> str:
    """The first of these paths that the module has, or ""."""
    for path in paths:
        try:
            if isinstance(module.get_submodule(path), nn.Module):
                return path
        except AttributeError:
            continue
    return ""


def attention_of(block: nn.Module) -> str:
    """Path of a block's self-attention, or ""."""
    return child(block, _SELF)


def places_of(block: nn.Module, prefix: str, *, scale: float = 1.0) -> dict[str, Place]:
    """The place of each kind in a block; kinds that are not found are left out."""
    found: dict[str, Place] = {}
    # weights of the block itself that scale what a sublayer adds (BEiT)
    names = ("lambda_1", "lambda_2")
    gains = {name: name if isinstance(getattr(block, name, None), nn.Parameter) else "" for name in names}
    attention = attention_of(block)
    norm_after_feed = child(block, _AFTER_FEED)
    if not norm_after_feed and child(block, ("input_layernorm",)):
        norm_after_feed = child(block, ("post_mlp_layernorm",))
    if attention:
        added = (child(block, _AFTER_ATTENTION) if norm_after_feed else "") or _added_by_attention(block, attention)
        found["attn_in"] = Place(attention, "in")
        found["attn_out"] = Place(added, "out", scale, gains["lambda_1"])
        kinds = (*SELF_KINDS, *ROTARY_KINDS) if rotates(block.get_submodule(attention)) else SELF_KINDS
        found |= {kind: Place(attention, "call") for kind in kinds}
    reads, adds = _feed_forward(block)
    if reads:
        found["mlp_in"] = Place(reads, "in")
        found["mlp_out"] = Place(norm_after_feed or adds, "out", scale, gains["lambda_2"])
    cross = child(block, _CROSS)
    if cross:
        found["cross_out"] = Place(_added_by_attention(block, cross), "out", scale)
        found |= {kind: Place(cross, "call") for kind in CROSS_KINDS}
    return {
        kind: replace(place, path=f"{prefix}.{place.path}", gain=place.gain and f"{prefix}.{place.gain}")
        for kind, place in found.items()
    }


def _added_by_attention(block: nn.Module, path: str) -> str:
    """The module whose output the attention adds, if the attention module's own output already contains the sum."""
    attention = block.get_submodule(path)
    inner = child(attention, ("output.dense",))
    if inner:
        return f"{path}.{inner}"
    normed = any("norm" in name.lower() for name, _ in attention.named_children())
    if normed and child(attention, ("LayerNorm",)):
        inner = child(attention, ("dense", "attn.o"))
    elif _takes_residual(attention):
        inner = child(attention, ("dense", "out_proj"))
    return f"{path}.{inner}" if inner else path


def _feed_forward(block: nn.Module) -> tuple[str, str]:
    """Paths of the module that reads and of the module whose output is added."""
    for reads, adds in _FEED_PAIRS:
        if child(block, (reads,)) and child(block, (adds,)):
            return reads, adds
    path = child(block, _FEED_LAST)
    if path and _takes_residual(block.get_submodule(path)):
        inner = child(block.get_submodule(path), ("dense_4h_to_h", "down_proj", "fc2"))
        return path, f"{path}.{inner}" if inner else path
    return path, path


def _takes_residual(module: nn.Module) -> bool:
    return "residual" in inspect.signature(module.forward).parameters


@dataclass(frozen=True)
class Stage:
    """Blocks in the order of their application, and the path of the module whose output is their final feature map."""

    path: str
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class Trunk:
    """The stages of a model, and the modules around them that are known by construction."""

    stages: tuple[Stage, ...]
    stem: str = ""  # module whose output is the embedding, if that is not the input of the first block
    final: Place | None = None  # a head of convolutions or norms between the last stage and the pooling

    @property
    def blocks(self) -> list[str]:
        """All blocks in order."""
        return [block for stage in self.stages for block in stage.blocks]

    def undivided(self) -> Trunk:
        """The same stages, each of them one block."""
        return replace(self, stages=tuple(Stage(stage.path, (stage.path,)) for stage in self.stages))

    def fixed(self) -> dict[tuple[int, str], Place]:
        """Where each stage is read, at the number of its last block."""
        found: dict[tuple[int, str], Place] = {(0, "embed"): Place(self.stem, "out")} if self.stem else {}
        layer = 0
        for stage in self.stages:
            layer += len(stage.blocks)
            found |= {(layer, kind): Place(stage.path, "out") for kind in ("stage", "stage_mean")}
        return found


def find_trunk(model: nn.Module, prefix: str = "") -> Trunk | None:
    """The stages of a model, with paths prefixed by `prefix`; None if most weights are in blocks without stages."""
    if not _convolves(model):
        return None
    found = list(_candidates(model, prefix))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _candidates(
    module: nn.Module, path: str, after: Sequence[Item] = ()
) -> Iterator[tuple[tuple[bool, int], Trunk | None]]:
    """Trunks of the outermost modules that have one, and None for lists of other blocks: blocks first, then by size."""
    children = _children(module, path)
    found = _numbered(children) or (_listed(children) if isinstance(module, _LISTS) else None)
    if found is not None:
        stages, stem = found
        last = next(i for i, (at, _) in enumerate(children) if f"{stages[-1].path}.".startswith(f"{at}."))
        following = [*children[last + 1 :], *(after if isinstance(module, _LISTS) else ())]
        blocks = any(_is_block(child) for _, child in children)
        yield (blocks, _size(module)), Trunk(tuple(stages), stem, _head(following))
        return
    if isinstance(module, _LISTS) and sum(_is_block(child) for _, child in children) > 1:
        yield (True, _size(module)), None
    for i, (at, child) in enumerate(children, start=1):
        yield from _candidates(child, at, children[i:])


def _numbered(children: Sequence[Item]) -> tuple[list[Stage], str] | None:
    """Children called `layer1`, `layer2` …: each is a stage."""
    groups: dict[str, list[Item]] = {}
    for path, child in children:
        if (match := _NUMBERED.match(path.rpartition(".")[2])) and _convolves(child):
            groups.setdefault(match[1], []).append((path, child))
    items = max(groups.values(), key=len, default=[])
    return ([_stage(child, at, _blocks(child, at) or [at]) for at, child in items], "") if len(items) > 1 else None


def _listed(items: Sequence[Item]) -> tuple[list[Stage], str] | None:
    """A list of stages, of blocks, or of single convolutions."""
    nested = _nested(items)
    modules = [child for at, child in items if at in nested] if len(nested) > 1 else []
    widths = {(_channels(module, "in"), _channels(module, "out"), _normed(module)) for module in modules}
    # blocks of a plain transformer are lists of sublayers, too: stages convolve, or differ in their widths
    if any(map(_convolves, modules)) or len(widths) > 1:
        return [_stage(child, at, nested[at]) for at, child in items if at in nested], ""
    blocks = [(at, child) for at, child in items if _is_block(child)]
    if len(blocks) > 1:
        return (_cut(items, blocks), "") if any(_convolves(child) for _, child in blocks) else None
    return _chain(items)


def _nested(items: Sequence[Item]) -> dict[str, list[str]]:
    """The blocks of each element that contains a list of blocks; elements of one class have it at the same path."""
    found = {at: blocks for at, child in items if (blocks := _blocks(child, at))}
    places = {type(child): found[at][0][len(at) + 1 :].rpartition(".")[0] for at, child in items if at in found}
    for at, child in items:
        place = places.get(type(child))
        if at not in found and place is not None and not isinstance(child, _LISTS):
            inner = _children(child.get_submodule(place), f"{at}.{place}" if place else at)
            found[at] = [path for path, part in inner if _is_block(part)] or [at]
    return found


def _stage(module: nn.Module, path: str, blocks: Sequence[str]) -> Stage:
    return Stage(blocks[-1] if isinstance(module, nn.ModuleList) else path, tuple(blocks))  # a list is never called


def _blocks(module: nn.Module, path: str, depth: int = _INNER) -> list[str]:
    """The blocks of a stage: the elements of its outermost list of blocks; [] where it has no such list.

    They are of one class; in a list that is never called itself, most of them.
    """
    if isinstance(module, _LISTS):
        weighted = [(at, child) for at, child in _children(module, path) if _weights(child)]
        found = [(at, child) for at, child in weighted if _is_block(child)]
        most = max(Counter(type(child) for _, child in found).values(), default=0)
        if 2 * most > len(weighted) and (most == len(found) or isinstance(module, nn.ModuleList)):
            return [at for at, _ in found]
    inner = [_blocks(child, at, depth - 1) for at, child in _children(module, path)] if depth else []
    return max(inner, key=len, default=[])


def _cut(items: Sequence[Item], blocks: Sequence[Item], *, chained: bool = False) -> list[Stage]:
    """A flat list cut where the resolution or the number of channels changes: each run is a stage.

    Convolutions in a chain may change the channels at will, and pool at their end.
    """
    inside = dict(blocks)
    runs: list[list[str]] = [[]]
    width, apart = 0, False
    for path, module in items:
        if path not in inside:
            apart = apart or bool(_weights(module)) or _pools(module)
            continue
        wider = not chained and width not in (0, _channels(module, "out"))
        strided = any(max(part.stride) > 1 for part in module.modules() if isinstance(part, nn.Conv2d))
        if runs[-1] and (apart or wider or strided):
            runs.append([])
        runs[-1].append(path)
        width, apart = _channels(module, "out"), chained and _pools(module)
    return [Stage(run[-1], tuple(run)) for run in runs]


def _chain(items: Sequence[Item]) -> tuple[list[Stage], str] | None:
    """Convolutions one after another with activations and pooling between: the last module of each is its block."""
    order: list[Item] = []  # path of what ends a unit and its convolution; pooling
    units: list[int] = []
    for path, module in items:
        if _convolves(module) or _pools(module) or isinstance(module, nn.Linear):
            units += [len(order)] if _convolves(module) else []
            order.append((path, module))
        elif units and units[-1] == len(order) - 1:
            order[-1] = (path, order[-1][1])
    found = [order[i] for i in units]
    stem = found[0][0] if found and _channels(found[0][1], "in") <= _PIXELS else ""
    if len(found) < 2:
        return None
    blocks = found[1:] if stem else found
    return _cut([item for item in order if item[0] != stem], blocks, chained=True), stem


def _head(following: Sequence[Item]) -> Place | None:
    """What follows the last stage before the pooling: norms and convolutions; None where there is nothing."""
    after: list[str] = []
    for path, module in following:
        if _pools(module) or isinstance(module, nn.Linear):
            if after and _pools(module):
                return Place(path, "in")
            break
        after += [path] if _convolves(module) or "norm" in type(module).__name__.lower() else []
    return Place(after[-1], "out") if after else None


def _children(module: nn.Module, path: str) -> list[Item]:
    return [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]


def _weights(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if isinstance(part, (nn.Conv2d, nn.Linear))]


def _is_block(module: nn.Module) -> bool:
    return len(_weights(module)) > 1


def _convolves(module: nn.Module) -> bool:
    return any(isinstance(part, nn.Conv2d) for part in module.modules())


def _pools(module: nn.Module) -> bool:
    return any(_POOLED.search(type(part).__name__) for part in module.modules())


def _channels(module: nn.Module, side: str) -> int:
    """The number of channels that a block takes ("in", by its first weight) or gives ("out", by its last)."""
    weight = _weights(module)[0 if side == "in" else -1]
    return int(getattr(weight, f"{side}_channels" if isinstance(weight, nn.Conv2d) else f"{side}_features"))


def _normed(module: nn.Module) -> frozenset[int]:
    """The widths of a module's layer norms, which are those of the residual stream."""
    return frozenset(part.normalized_shape[-1] for part in module.modules() if isinstance(part, nn.LayerNorm))


def _size(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def rotates(attention: nn.Module) -> bool:
    """Whether an attention module rotates its queries and keys, judged by the functions its code calls."""
    config = getattr(attention, "config", None)
    # some configurations have the code of a rotation but use another position encoding
    other = getattr(config, "alibi", None) or getattr(config, "rotary", True) is False
    return not other and bool(rotary_functions(attention))


def rotary_functions(attention: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """The rotary functions that the code of a module and of its parts calls: (global namespace, name) of each."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    orders = (type(part).__mro__ for part in attention.modules())
    classes = (base for order in orders for base in itertools.takewhile(lambda base: base is not nn.Module, order))
    for function in (_plain(value) for base in classes for value in vars(base).values()):
        if inspect.isfunction(function):
            space = function.__globals__
            called = [name for name in function.__code__.co_names if "rotary" in name]
            found |= {(id(space), name): space for name in called if inspect.isfunction(_plain(space.get(name)))}
    return [(space, name) for (_, name), space in found.items()]


def _plain(value: Any) -> Any:
    return inspect.unwrap(value) if inspect.isfunction(value) else value
