"""Where the sites of a model are: block lists found by their configured length, parts found by their usual names.

Positions of an image model that are not patches (class, distillation, register and detection tokens) are given by the
family in `family.py`, or else counted by the parameters next to the patch projection; a pass then checks the count:
positions of the first block = patches + tokens, T = P + k.

`verify` checks every site found here numerically against the model's own outputs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.row import Contexts, Windows
from anisoscope.capture.sites import block as parts
from anisoscope.capture.sites.block import Place, Trunk, find_trunk
from anisoscope.capture.sites.family import OTHER, REFUSED, Family, family_of
from anisoscope.capture.sites.named_module import named_sites, shown_names
from anisoscope.capture.sites.site import ROTARY_KINDS, SELF_KINDS, Site, check_kinds, names_of
from anisoscope.errors import AnisoscopeError
from anisoscope.models.forward import CONTENT, attends, modality_of, original, unwrapped, without_wrappers

_NAMES = re.compile(
    r"^(cls|class|dist|distill|distillation|reg|register|registers|storage|det|detection)_?(tokens?|embeddings?|emb)$"
)
_LAST = re.compile(r"^det")  # detection tokens follow the patches
_PIXELS = 4  # maximum channels of an image
CUTTING = (nn.Conv2d, nn.Conv3d)
_LENGTHS = re.compile(r"^(n_layers?|num_layers|num_(hidden|encoder|decoder)_layers|(encoder|decoder)_layers)$")
_ATTENTION = (*SELF_KINDS, *ROTARY_KINDS)
_TABLES = {"embed_weight": "get_input_embeddings", "unembed": "get_output_embeddings"}
_STAGED = ("depths", "depth", "hidden_sizes", "embed_dims")  # one number for each stage in a configuration


@dataclass(frozen=True)
class SpecialPositions:
    """The numbers of positions before and after the patches; `names` are the parameters they were inferred from."""

    before: int = 0
    after: int = 0
    names: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """All of them."""
        return self.before + self.after


@dataclass(frozen=True)
class Stack:
    """One chain of blocks: `blocks` names the module applied at each layer, a shared one several times."""

    name: str
    owner: str  # path of the module whose forward takes ids and mask
    blocks: tuple[str, ...]
    places: dict[tuple[int, str], Place]
    final: Place
    has_norm: bool  # whether something lies between the last block and what the stack returns
    config: Any = field(repr=False, default=None)
    windows: Windows | None = field(repr=False, default=None)
    family: Family = field(repr=False, default=OTHER)
    missing: dict[str, str] = field(default_factory=dict)  # kind -> why it is unavailable
    fixed: dict[tuple[int, str], Place] = field(default_factory=dict)  # sites that exist at some layers only
    prefix: int = 0  # leading positions that are no part of the input: class, distillation and register tokens
    prefixed: frozenset[int] | None = None  # the layers that have them; None: all
    suffix: int = 0  # trailing positions that are no part of the input: detection tokens
    tokens: SpecialPositions | None = None  # both by parameter names, checked in a pass; None if the family states them
    before: int = 0  # blocks that other processes hold, which come before these
    total: int = 0  # blocks of all processes, if there are others
    held: range | None = None  # the layers whose sites are here; None: all

    @property
    def depth(self) -> int:
        """The number of blocks L, also of those that other processes hold."""
        return self.total or len(self.blocks)

    def block_at(self, layer: int) -> str:
        """Path of the block that gives a layer, of the first for the embedding."""
        return self.blocks[max(layer, 1) - 1 - self.before]

    @property
    def staged(self) -> bool:
        """Whether its blocks form stages, each with a feature map."""
        return any(kind == "stage" for _, kind in self.fixed)

    def labelled(self, note: str) -> str:
        """A note with the name of the stack, where a model has several."""
        return note if self.name == "single" else f"{self.name}: {note}"

    def prefix_at(self, layer: int) -> int:
        """Leading positions of a layer that are no part of the input."""
        return self.prefix if self.prefixed is None or layer in self.prefixed else 0

    def module_at(self, site: Site) -> str:
        """Path of the module at which a site is read, or of its block."""
        place = self.fixed.get((site.layer, site.kind)) or self.places.get((site.layer, site.kind))
        if place is None and site.kind == "final":
            place = self.final
        return place.path if place is not None else self.block_at(site.layer)

    @property
    def kinds(self) -> list[str]:
        """The kinds that can be captured here, in the order of the flow."""
        inner = [k for k in parts.KINDS_OF_BLOCK if any(kind == k for _, kind in self.places)]
        own = [kind for kind in ("stage", "stage_mean") if any(kind == k for _, k in self.fixed)]
        apart = ["cls"] if self.prefix else []
        return ["embed", "resid", *own, *apart, *(["final"] if self.has_norm else []), *inner]

    def sites(self, kinds: Iterable[str]) -> Iterator[Site]:
        """All sites of these kinds, layer by layer."""
        for layer in range(self.depth + 1) if self.held is None else self.held:
            for kind in kinds:
                at = {"embed": layer == 0, "resid": layer > 0, "final": layer == self.depth, "block_in": layer > 0}
                at["cls"] = self.prefix_at(layer) > 0
                if at.get(kind, (layer, kind) in self.places or (layer, kind) in self.fixed):
                    yield Site(layer, kind, self.name)


@dataclass(frozen=True)
class Layout:
    """The stacks of a model and what can be captured in each; or modules that a user named, in place of sites."""

    model: str
    stacks: tuple[Stack, ...]
    tables: tuple[str, ...] = ()  # weight tables that can be read as rows
    modules: tuple[Site, ...] = ()  # if any, they are the only sites

    @property
    def kinds(self) -> list[str]:
        """Every kind that at least one stack has, and the weight tables."""
        if self.modules:
            return ["module"]
        return [*dict.fromkeys(kind for stack in self.stacks for kind in stack.kinds), *self.tables]

    @property
    def depths(self) -> dict[str, int]:
        """The number of the last layer of each stack; named modules are numbered from 0."""
        if self.modules:
            return {"single": max(1, len(self.modules) - 1)}
        return {stack.name: stack.depth for stack in self.stacks}

    @property
    def apart(self) -> set[str]:
        """The stacks that have class or register tokens, whose rows are kept apart."""
        return set() if self.modules else {stack.name for stack in self.stacks if stack.prefix or stack.suffix}

    def stack(self, name: str) -> Stack:
        """The stack of that name."""
        for stack in self.stacks:
            if stack.name == name:
                return stack
        raise AnisoscopeError(f"{self.model} has no stack {name!r}; it has {', '.join(s.name for s in self.stacks)}.")

    def sites(self, kinds: list[str] | None = None, layers: Iterable[int] | None = None) -> list[Site]:
        """The sites of these kinds (default: embed, resid and final) at these layers (default: all)."""
        if self.modules:
            return list(self.modules)
        asked = check_kinds(list(kinds) if kinds is not None else ["embed", "resid", "final"])
        wanted = None if layers is None else set(layers)
        for kind in asked:
            if kind not in self.kinds and kind != "final":
                reason = next((f" ({stack.missing[kind]})" for stack in self.stacks if kind in stack.missing), "")
                raise AnisoscopeError(f"{self.model} has no site {kind!r}{reason}; it has {', '.join(self.kinds)}.")
        alone = asked == ["final"]  # with other kinds, `final` is dropped if it equals the last block
        found = [s for stack in self.stacks for s in stack.sites(asked) if stack.has_norm or alone or s.kind != "final"]
        last = self.stacks[-1]
        tables = {"embed_weight": Site(0, "embed_weight", last.name), "unembed": Site(last.depth, "unembed", last.name)}
        found += [tables[kind] for kind in asked if kind in self.tables]
        found = [site for site in found if wanted is None or site.layer in wanted]
        if not found:
            raise AnisoscopeError(
                f"no site of kind {', '.join(asked)} at layers {sorted(wanted or [])} in {self.model}; "
                f"its layers are 0 to {max(stack.depth for stack in self.stacks)}."
            )
        return found


def find_layout(model: nn.Module, modules: Sequence[str] | str | None = None) -> Layout:
    """The layout of a model; an error that suggests a remedy if it cannot be found.

    With `modules`, names or patterns, those are looked at in place of sites; any model has them.
    """
    model = original(model)
    with without_wrappers(model):
        return _find_layout(model) if modules is None else _named_layout(model, modules)


def _named_layout(model: nn.Module, modules: Sequence[str] | str) -> Layout:
    named = tuple(named_sites(model, names_of(modules) or []).values())
    if not named:
        raise AnisoscopeError(f"modules= names nothing; name some of {shown_names(model)}.")
    known: tuple[Stack, ...] = ()
    with contextlib.suppress(AnisoscopeError):  # of a known model, modules have the positions of their stack
        known = _find_layout(model).stacks
    return Layout(type(unwrapped(model)).__name__, known, modules=named)


def _find_layout(model: nn.Module) -> Layout:
    kind, called = getattr(_config(model), "model_type", ""), type(unwrapped(model)).__name__
    if kind in REFUSED:
        raise AnisoscopeError(f"{called} has no sites: {REFUSED[kind]}; name modules with modules=[…].")
    names = dict(model.named_modules())
    trunk = _trunk(model, names)
    lists = {"single": trunk.blocks} if trunk is not None else _block_lists(called, names)
    stacks = [make_stack(model, name, paths, trunk) for name, paths in lists.items()]
    return Layout(called, tuple(stacks), weight_tables(model))


def weight_tables(model: nn.Module) -> tuple[str, ...]:
    """The weight tables of a model that can be read as rows."""
    return tuple(kind for kind in _TABLES if _weight_table(model, kind) is not None)


def pool_fits(model: nn.Module, pool: str, layout: Layout | None = None) -> bool:
    """Whether a pooling is meaningful: always for text, with a class token for `cls`, else not for `cls` and `last`."""
    if pool not in ("cls", "last") or modality_of(model).is_text:
        return True
    return pool == "cls" and any(stack.prefix for stack in (layout or find_layout(model)).stacks)


def refuse_unhookable(model: nn.Module) -> None:
    """Raise an error for a model that no hook can look into: one without a forward."""
    if type(model).forward is nn.Module.forward and "forward" not in vars(model):
        raise AnisoscopeError(
            f"{type(model).__name__} has no forward, so nothing can be run through it; give one that has, such "
            "as the model that holds it."
        )


def _config(model: nn.Module) -> Any:
    return getattr(unwrapped(model), "config", None)


def _joined(prefix: str, path: str) -> str:
    return f"{prefix}.{path}" if prefix and path else prefix or path


def _block_lists(called: str, names: dict[str, nn.Module]) -> dict[str, list[str]]:
    """Paths of the blocks of every stack: as a family's row says, or the lists of the configured length."""
    for prefix, module in names.items():
        config = getattr(module, "config", None)
        family = family_of(config)
        if family.blocks is not None:
            with contextlib.suppress(AttributeError):  # a head around the model that has the blocks
                paths = family.blocks(module, config)
                if all(isinstance(module.get_submodule(path), nn.Module) for path in paths):
                    return {"single": [_joined(prefix, path) for path in paths]}
    lists = _candidates(names)
    found = {"single": lists[0]} if len(lists) == 1 else _encoder_and_decoder(lists)
    # the decoder of a masked autoencoder is a head, which is thrown away after training
    body = [path for path in lists if "decoder" not in path.split(".")]
    found = found or ({"single": body[0]} if len(body) == 1 else {})
    if found:
        return {side: [_joined(at, name) for name, _ in names[at].named_children()] for side, at in found.items()}
    raise AnisoscopeError(
        f"{called}: found {'several' if lists else 'no'} block lists of the configured length"
        f"{' (' + ', '.join(lists) + ')' if lists else ' and no stages'}; give one submodel, or name what to look at "
        f"with modules=[…] (--modules), of {shown_names(names[''])}."
    )


def _trunk(model: nn.Module, names: dict[str, nn.Module]) -> Trunk | None:
    """The stages of a model of a staged family, of a configuration with one depth per stage, or of a plain module."""
    rooted = {path: module.config for path, module in names.items() if hasattr(module, "config")}
    for path, config in rooted.items():
        if (family := family_of(config)).staged:
            found = find_trunk(names[path], path)
            return found.undivided() if found is not None and family.undivided else found
    config = _config(model)
    per_stage = [getattr(config, name, None) for name in _STAGED]
    staged = any(isinstance(value, (list, tuple)) and len(value) > 1 for value in per_stage)
    plain = not hasattr(config, "model_type")
    return find_trunk(model) if plain or (staged and family_of(config) is OTHER) else None


def _candidates(names: dict[str, nn.Module]) -> list[str]:
    """Outermost module lists of the configured length; if there are too many, those that contain attention.

    A dict of blocks is one, too, but what lies beside lists may hold anything.
    """
    lengths = {length for module in names.values() for length in _lengths(getattr(module, "config", None))}
    dicts = [path for path, module in names.items() if isinstance(module, nn.ModuleDict) and _compound(module)]
    lists = [path for path, module in names.items() if isinstance(module, (nn.ModuleList, nn.Sequential))] + dicts
    if lengths:
        lists = [path for path in lists if len(names[path]) in lengths]  # type: ignore[arg-type]
    else:  # a plain module: a list of at least two blocks of one class
        kinds = {path: [type(block) for block in names[path].children()] for path in lists}
        lists = [path for path in lists if len(kinds[path]) > 1 and len(set(kinds[path])) == 1]
        lists = [path for path in lists if next(names[path].parameters(), None) is not None]
    lists = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    if len(lists) == 1 or _encoder_and_decoder(lists):
        return lists
    attending = [path for path in lists if all(parts.attention_of(block) for block in names[path].children())]
    return attending or [path for path in lists if path not in dicts] or lists


def _compound(module: nn.Module) -> bool:
    """Whether all parts of a module have parts themselves, as blocks do."""
    return all(next(part.children(), None) is not None for part in module.children())


def _encoder_and_decoder(lists: list[str]) -> dict[str, str]:
    """The block lists of an encoder and its decoder; empty if they are not found."""
    sides = [next((part for part in path.split(".") if part in ("encoder", "decoder")), "") for path in lists]
    apart = sorted(sides) == ["decoder", "encoder"]
    return {side: lists[sides.index(side)] for side in ("encoder", "decoder")} if apart else {}


def _lengths(config: Any, depth: int = 2) -> set[int]:
    """Numbers of layers that a configuration, or one inside it, declares."""
    if config is None:
        return set()
    values = config.to_dict() if hasattr(config, "to_dict") else dict(getattr(config, "__dict__", {}))
    found = {v for k, v in values.items() if isinstance(v, int) and not isinstance(v, bool) and _LENGTHS.match(k)}
    mapped = getattr(config, "num_hidden_layers", None)
    found |= {mapped} if isinstance(mapped, int) else set()
    inner = [v for v in vars(config).values() if hasattr(v, "to_dict")] if depth and hasattr(config, "__dict__") else []
    return found.union(*(_lengths(v, depth - 1) for v in inner)) - {0}


def make_stack(model: nn.Module, name: str, blocks: list[str], trunk: Trunk | None = None) -> Stack:
    """The stack of some blocks; with a trunk, of all blocks over its stages, each of which ends in a feature map."""
    owner = _owner(model, blocks[0])
    config = getattr(model.get_submodule(owner), "config", None) or _config(model)
    family = family_of(config)
    places, missing = _places(model, blocks, family, scale=float(getattr(config, "residual_multiplier", None) or 1.0))
    without = dict(family.without)
    if "scores" not in missing:  # unless the softmax input is not scaled products plus a bias
        if getattr(config, "attn_logit_softcapping", None) is not None:
            without["scores"] = "its scores are capped before the softmax"
        elif any(name.endswith("sinks") for name, _ in model.get_submodule(blocks[0]).named_parameters()):
            without["scores"] = "its softmax has a sink besides the keys"
    if trunk is not None and not any(attends(model.get_submodule(path)) for path in blocks):
        missing |= dict.fromkeys(_ATTENTION, "its blocks have no attention")
    missing |= without
    places = {at: place for at, place in places.items() if at[1] not in without}
    final, has_norm = find_final(model, owner, block=trunk.stages[0].path if trunk else blocks[0], config=config)
    if trunk is not None and not hasattr(config, "model_type"):  # a plain module returns the output of its head
        final, has_norm = trunk.final or Place(trunk.stages[-1].path, "out"), trunk.final is not None
    else:
        stated = family.final(config) if callable(family.final) else family.final
        has_norm = has_norm if stated is None else stated
    if not has_norm:
        missing["final"] = "nothing follows the last stage" if trunk else "no norm follows the last block"
    windows = functools.partial(family.windows, config) if family.windows is not None else None
    stack = Stack(name, owner, tuple(blocks), places, final, has_norm, config, windows, family, missing)
    if trunk is not None:
        prefixed = family.prefixed(config) if family.prefixed is not None else None
        stack = replace(stack, fixed=trunk.fixed(), prefixed=prefixed)
    if family is not OTHER:
        return replace(stack, prefix=family.prefix(config) if callable(family.prefix) else family.prefix)
    tokens = named_tokens(model, owner)
    return replace(stack, prefix=tokens.before, suffix=tokens.after, tokens=tokens) if tokens is not None else stack


def find_final(model: nn.Module, owner: str, *, block: str, config: Any) -> tuple[Place, bool]:
    """Where the output of a stack is read, and whether something acts on it after the last block."""
    norms: list[str] = []
    path = block.rpartition(".")[0]
    while path not in (owner, ""):
        inner, path = path, path.rpartition(".")[0]
        passed = False
        for name, child in model.get_submodule(path).named_children():
            # LFM2 calls the norm behind its blocks embedding_norm; other norms of embeddings stand before the blocks
            before = re.search(r"^pre|input" if passed else r"emb(?!.*after)|^pre|input", name.lower())
            if name == "project_out" or ("norm" in type(child).__name__.lower() and not before):
                norms.append(_joined(path, name))
            passed = passed or name == inner.rpartition(".")[2]
    children = dict(model.get_submodule(owner).named_children())
    first = list(children).index(block[len(owner) + bool(owner) :].partition(".")[0])  # what stands before is no head
    vocabulary = getattr(config, "vocab_size", None)
    behind = list(children.values())[first + 1 :]
    headed = any(getattr(child, "out_features", None) == vocabulary is not None for child in behind)
    if norms and (headed or config is None):
        return Place(norms[-1], "out"), True  # the owner returns logits, or a plain module whatever it likes
    return Place(owner, "out"), bool(norms)


def _owner(model: nn.Module, block: str) -> str:
    """The nearest module above the blocks that is given the content itself (ids, embeddings, samples, pixels)."""
    above = [".".join(block.split(".")[:i]) for i in range(block.count("."), -1, -1)]
    takes = {path: set(inspect.signature(model.get_submodule(path).forward).parameters) for path in above}
    # An inner encoder may call its hidden states inputs_embeds, so that name alone counts last.
    for names in (set(CONTENT) - {"inputs_embeds"}, {"inputs_embeds"}):
        for path in above:
            if names & takes[path]:
                return path
    return ""


def _places(
    model: nn.Module, blocks: list[str], family: Family, *, scale: float
) -> tuple[dict[tuple[int, str], Place], dict[str, str]]:
    places: dict[tuple[int, str], Place] = {}
    missing: dict[str, str] = {}
    for layer, path in enumerate(blocks, start=1):
        for kind, place in parts.places_of(model.get_submodule(path), path, scale=scale).items():
            if family.attention and kind in _ATTENTION:
                missing[kind] = family.attention
            else:
                places[(layer, kind)] = place
    for kind in parts.KINDS_OF_BLOCK:
        if not any(found_kind == kind for _, found_kind in places):
            missing.setdefault(kind, parts.ABSENT.get(kind, "no part of its blocks has a name known for it"))
    return places, missing


def named_tokens(model: nn.Module, owner: str) -> SpecialPositions | None:
    """The tokens that an image model adds to its patches, by the parameters next to its patch projection.

    None if it reads no images. Tokens elsewhere, such as the query of attention pooling, are not positions of the
    blocks.
    """
    root = model.get_submodule(owner)
    takes, modules = inspect.signature(root.forward).parameters, dict(root.named_modules())
    pixels = "pixel_values" in takes
    if not pixels and not hasattr(root, "config"):  # a plain module
        pixels = any(isinstance(part, nn.Conv2d) for part in modules.values())
    if not pixels or "input_ids" in takes:
        return None
    cuts = (path for path, part in modules.items() if isinstance(part, CUTTING) and part.in_channels <= _PIXELS)
    first = next(cuts, None)  # the patch projection; None if the input is already cut into patches or unfolded
    sizes: dict[str, int] = {}
    for path, parameter in root.named_parameters():
        holder, _, name = path.rpartition(".")
        near = "embed" in holder if first is None else f"{first}.".startswith(f"{holder}.")
        if _NAMES.match(name) and (near or not holder):
            sizes[path] = int(parameter.shape[:-1].numel())
    names = tuple(path.rpartition(".")[2] for path in sizes)
    after = sum(size for name, size in zip(names, sizes.values(), strict=True) if _LAST.match(name))
    return SpecialPositions(sum(sizes.values()) - after, after, names)


def patch_counts(arguments: Mapping[str, Any], config: Any) -> list[int]:
    """Possible numbers of patches, from pixels that are already cut into patches, or from the configured patch size."""
    pixels, size = arguments.get("pixel_values"), getattr(config, "patch_size", None)
    if isinstance(pixels, Tensor) and pixels.dim() == 3:
        return [int(pixels.shape[1])]
    if isinstance(pixels, Tensor) and pixels.dim() == 4 and isinstance(size, int):
        return [(pixels.shape[2] // size) * (pixels.shape[3] // size)]
    return []


def settle(tokens: SpecialPositions, x: Tensor, patches: Sequence[int]) -> tuple[SpecialPositions, str]:
    """The tokens among the positions of the first block's input x [B, T, d], and a note if they cannot be identified.

    Tokens are the same for every image: if the last positions, and not the first, are equal in all images of a batch,
    they are the tokens.
    """
    positions, k, names = int(x.shape[1]), tokens.count, ", ".join(tokens.names)
    fitting = [count for count in patches if 0 < count <= positions]
    if not patches or positions - k in fitting:
        last = len(x) > 1 and tokens.before and not _same(x[:, : tokens.before]) and _same(x[:, -k:])
        return (SpecialPositions(0, k, tokens.names) if last else tokens), ""
    if not k and (positions in fitting or not fitting):
        return SpecialPositions(), ""  # every position is a patch, or patches were merged
    if positions in fitting:
        return SpecialPositions(), f"{names} is at no position of the first block: all positions are patches"
    what = f"which its {k} tokens ({names}) do not explain" if k else "and no parameter says what the others are"
    return SpecialPositions(), (
        f"the first block reads {positions} positions where the image has {(fitting or list(patches))[-1]} patches, "
        f"{what}: all positions are counted, and none as a class token"
    )


def _same(x: Tensor) -> bool:
    return bool((x == x[:1]).all())


class StackPass:
    """A forward pass through a stack: its contexts, the current layer, and which positions are patches."""

    def __init__(self, stack: Stack, notes: list[str]) -> None:
        self.stack, self.notes = stack, notes
        self.contexts: Contexts | None = None
        self.layer = 0
        self.layers = {path: i for i, path in enumerate(stack.blocks, start=stack.before + 1)}
        self.counted = False  # whether positions that may be class tokens were counted as patches
        self._patches: list[int] = []  # possible numbers of patches of an image
        self._tokens = stack.tokens  # by parameter names, then as seen in a pass
        self._among: SpecialPositions | None = None  # in the current pass
        self._positions = 0

    @property
    def apart(self) -> bool:
        """Whether every layer is a module of its own; else one module is applied at several layers."""
        return len(self.layers) == len(self.stack.blocks)

    def site(self, kind: str) -> Site:
        """The site of this kind at the current layer."""
        return Site(self.layer, kind, self.stack.name)

    def begin(self, contexts: Contexts, arguments: Mapping[str, Any]) -> None:
        """Start a pass over these contexts, given the arguments of the stack's forward."""
        self.contexts, self.layer, self._among = contexts, self.stack.before, None
        self._patches = patch_counts(arguments, self.stack.config)

    def end(self) -> None:
        self.contexts, self.layer = None, 0

    def cut(self, output: Tensor) -> None:
        """Record the output of a convolution before the blocks, which may be the patch embedding."""
        if self.contexts is not None and self.layer == 0:
            self._patches.append(output[:, 0].numel() // self.contexts.batch)  # its batch may be frames of videos

    def enter(self, path: str, x: Tensor) -> None:
        """Note that the block at a path is called with x.

        Unless a family states which positions are patches, that is decided here: at the first block, and when the
        number of positions grows.
        """
        assert self.contexts is not None
        self.layer = self.layers[path] if self.apart else self.layer + 1
        if self._tokens is not None and x.dim() == 3 and x.shape[0] == self.contexts.batch:
            if self._among is None:
                self._among, note = settle(self._tokens, x, self._patches)
                self._tokens, self._positions = (self._among if self._among.count else self._tokens), x.shape[1]
                self._note(note)
            elif x.shape[1] > self._positions and not self.stack.staged:
                more, self._positions, self._among = x.shape[1] - self._positions, x.shape[1], SpecialPositions()
                self._note(
                    f"from layer {self.layer} on the blocks read {more} positions more than before, and what they are "
                    "is not known: all positions are counted there, and none as a class token"
                )
        among = self._among or SpecialPositions(self.stack.prefix_at(self.layer), self.stack.suffix)
        self.contexts.prefix, self.contexts.suffix = among.before, among.after

    def _note(self, text: str) -> None:
        self.counted |= bool(text)
        note = self.stack.labelled(text)
        if text and note not in self.notes:
            self.notes.append(note)


def weight_rows(model: nn.Module, kind: str) -> Tensor:
    """Rows of `embed_weight` or `unembed` [V, d], one per token, in float32 or float64."""
    table = _weight_table(model, kind)
    if table is None:
        want = "an embedding table" if kind == "embed_weight" else "an output head (…ForCausalLM or …ForMaskedLM)"
        raise AnisoscopeError(f"{type(model).__name__} has no weight table {kind!r}; expected a model with {want}.")
    weight = table.detach()
    return weight if weight.dtype == torch.float64 else weight.float()


def _weight_table(model: nn.Module, kind: str) -> Tensor | None:
    if kind not in _TABLES:
        raise AnisoscopeError(f"{kind!r} is no weight table; expected {' or '.join(_TABLES)}.")
    reader = getattr(unwrapped(model), _TABLES[kind], None)
    try:
        module = reader() if reader is not None else None
    except (NotImplementedError, AttributeError):  # how transformers says that a model has no such table
        return None
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, Tensor) and weight.dim() == 2 else None
