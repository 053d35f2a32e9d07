"""Rows of activations without padding: which positions of a forward pass are data, and the sinks that take their rows.

Which positions are data is read from the arguments of the model's own forward.
Shapes: B contexts, T positions, n kept rows, d width, H heads. Indices are on the host; those that take rows from an
activation are moved to its device once per pass."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from anisoscope.capture.padding import (
    Packed,
    find_packed,
    read_pixels,
    special_ids,
    stated_mask,
    trusted,
    unpadded_cells,
    unpadded_ids,
    without_repeated_end,
)
from anisoscope.capture.sites.site import PER_HEAD, Site
from anisoscope.errors import AnisoscopeError
from anisoscope.models.forward import CONTENT, PIXEL_MASK, SOUND
from anisoscope.models.parallel import HeldPositions
from anisoscope.models.tokenizer import special_ids as special_tokens
from anisoscope.results.modality import TEXT_DATA

_BESIDE = re.compile(r"mask|edge|adj")  # arguments that say which positions, or which pairs of them, count

Rule = Callable[[tuple[Any, ...], dict[str, Any]], Tensor | Mapping[str, Any]]
"""(args, kwargs) of the model's forward -> bool [B, T], True where a position is data; or missing arguments."""
Arguments = dict[str, Any]
Ruled = tuple[Arguments, Tensor | None]


@dataclass(frozen=True)
class Batch:
    """Model inputs, with what the model itself does not take: special-token flags, groups and transcripts."""

    inputs: Mapping[str, Any]
    special: Tensor | None = None  # [B, T] bool, True at special tokens
    groups: tuple[str, ...] | None = None  # B names
    texts: tuple[str, ...] | None = None  # what is said in each of B sounds, "" where that is not known


@dataclass(frozen=True)
class Index:
    """Which of the B·T positions are data, and what they are; the same for every site of one stack and resolution.

    It is on the host, so that reading it needs no device–host synchronisation. `context` is a hash of the context's
    unpadded content, which is independent of batch, order and padding side; `position` counts real positions from 0.
    """

    batch: int
    length: int
    keep: Tensor  # [n] int64 into the flattened B·T positions, ascending
    context: Tensor  # [n] int64
    position: Tensor  # [n] int64
    token: Tensor  # [n] int64, -1 where there is no token
    group: tuple[str, ...] | None = None  # name per *context* of the batch (B of them)
    first: Tensor | None = None  # [n] bool, True at the first real position of a context; None for pooled rows and maps
    shards: int = 1  # processes that have the rows of these contexts: each those at some of their positions

    def among(self, wanted: Tensor) -> Tensor:
        """Which rows are of contexts that are `wanted` [B] bool, or [B, T] where a row of the batch holds several."""
        if wanted.dim() > 1 and wanted.shape[1] != self.length:  # at another resolution, that of its first position
            wanted = wanted[:, 0]
        found = wanted.flatten()[self.keep] if wanted.dim() > 1 else wanted[self.keep // max(1, self.length)]
        return found.nonzero().squeeze(1)

    def taken(self, at: Tensor) -> Self:
        """The index of some of the rows, in the order of `at` [m]."""
        names = ("keep", "context", "position", "token", "first")
        found = {name: x[at] for name in names if (x := getattr(self, name)) is not None}
        return replace(self, **found)


@dataclass(frozen=True)
class Rows:
    """Kept rows of one site: `x` is [n, d], or [n, H, d] for queries and keys; float32 or float64."""

    site: Site
    x: Tensor
    index: Index
    lasting: bool = False  # nobody will change x, so that it may be kept without a copy


@dataclass(frozen=True)
class Scores:
    """The arguments of one attention call, from which statistics of its scores are computed block by block.

    Scores of head h are `scaling * query[:, h] @ key[:, h // groups].T + bias`, masked where `allowed` is False.
    """

    site: Site
    query: Tensor  # [B, H, T, d]
    key: Tensor  # [B, H_kv, S, d]
    allowed: Tensor  # [B or 1, 1, T, S] bool
    bias: Tensor | None  # additive scores that are no mask (ALiBi, T5 relative bias), broadcastable to [B, H, T, S]
    scaling: float | Tensor  # a number, or one per head [H, 1, 1]
    index: Index  # of the query positions; keys are masked by `allowed`
    windows: int = 1  # windows per context; if more than one, B above counts windows, and `index` follows their order
    chunk: int = 0  # positions per chunk, if the call joins attention within chunks


class Sink(Protocol):
    """Receives rows and scores, once per site and forward pass, during the pass."""

    def rows(self, rows: Rows) -> None: ...

    def scores(self, scores: Scores) -> None: ...


class KeptRows:
    """A sink that keeps the rows (but those of heads) and scores of one pass by site."""

    def __init__(self) -> None:
        self.kept: dict[Site, Rows] = {}
        self.calls: dict[Site, Scores] = {}

    def rows(self, rows: Rows) -> None:
        if rows.x.ndim == 2:
            self.kept[rows.site] = rows

    def scores(self, scores: Scores) -> None:
        self.calls[scores.site] = scores


Windows = Callable[[int, int], "tuple[Tensor, Tensor]"]
"""(input length T, site length) -> first and one-past-last input position of each row; T is outside."""


@dataclass(frozen=True)
class PositionChoice:
    """Which of the real positions the user wants."""

    special: str = "in"
    first: str = "in"
    pool: str = "none"
    whole: bool = False  # a feature map, none of whose positions is a class token
    special_ids: tuple[int, ...] | None = None  # tokens to leave out where a batch has no flags; None: not known

    @classmethod
    def of(cls, model: nn.Module, tokenizer: Any = None, *, skip_first: bool, skip_special: bool) -> Self:
        """The positions that are left of batches without flags: special tokens are those of the tokenizer, or of the
        model's configuration. [MASK] stays: it stands for a token of the text.
        """
        words: dict[str, Any] = {"first": "out"} if skip_first else {}
        if skip_special:
            config = getattr(model, "config", None)
            roles = ("bos", "eos", "cls", "sep", "pad", "decoder_start")
            ids = set(special_tokens(tokenizer)) if tokenizer is not None else special_ids(config, *roles)
            ids -= {getattr(tokenizer, "mask_token_id", None)}
            if tokenizer is None and not ids:
                raise AnisoscopeError(
                    f"special tokens are to be left out, but the configuration of {type(model).__name__} names none; "
                    "give tokenizer=."
                )
            words |= {"special": "out", "special_ids": tuple(sorted(ids))}
        return cls(**words)

    def options(self) -> dict[str, Any]:
        """The same as options of `Capture`."""
        return {"special": self.special, "first": self.first, "special_ids": self.special_ids}

    def __post_init__(self) -> None:
        allowed = {"special": ("in", "out"), "first": ("in", "out"), "pool": ("none", "mean", "cls", "last")}
        for name, values in allowed.items():
            if (seen := getattr(self, name)) not in values:
                raise AnisoscopeError(f"{name}={seen!r} is not known; expected one of {', '.join(values)}.")


@dataclass(frozen=True)
class RowSelection:
    """How rows are taken from an activation [B·T, …]: gathered at `take` and, if pooled, averaged over `segment`."""

    take: Tensor  # [m] int64
    index: Index
    segment: Tensor | None = None  # [m] row of `index` that each taken position is averaged into
    count: Tensor | None = None  # [n] positions averaged into each row

    def to(self, device: torch.device) -> RowSelection:
        """The same with its indices on the device of the activations; `index` stays on the host."""
        segment, count = (None if x is None else x.to(device) for x in (self.segment, self.count))
        return RowSelection(self.take.to(device), self.index, segment, count)

    def within(self, piece: HeldPositions) -> RowSelection:
        """The same for an activation that has these positions alone; `index` is that of whole contexts."""
        if self.segment is not None:
            raise AnisoscopeError(
                "a site with one row per context has its positions split over processes; leave it out of the sites."
            )
        context, position = self.take // piece.length, self.take % piece.length
        mine = ((position >= piece.start) & (position < piece.stop)).nonzero().squeeze(1)
        take = context[mine] * (piece.stop - piece.start) + position[mine] - piece.start
        return RowSelection(take, replace(self.index.taken(mine.cpu()), shards=piece.of))

    def rows(self, x: Tensor) -> Tensor:
        """The kept rows of x [B, T, …] as a fresh float32 or float64 tensor [n, …]."""
        flat = x.detach().flatten(0, 1).index_select(0, self.take)
        flat = flat if flat.dtype == torch.float64 else flat.float()
        if self.segment is None or self.count is None:
            return flat
        total = self._summed(flat, self.segment, self.count)
        return total / self.count.view(-1, *[1] * (total.dim() - 1))

    def gradients(self, g: Tensor) -> Tensor:
        """The gradients [n, …] with respect to `rows(x)`, from those with respect to x [B, T, …].

        A pooled row m = (1/P) Σₚ hₚ moves by δ when every hₚ that it averages does, so its gradient is their sum
        Σₚ ∂L/∂hₚ; a loss that reads m alone has ∂L/∂hₚ = (1/P) ∂L/∂m, and the sum is ∂L/∂m.
        """
        if self.segment is None or self.count is None:
            return self.rows(g)
        return self._summed(replace(self, segment=None).rows(g), self.segment, self.count)

    @staticmethod
    def _summed(flat: Tensor, segment: Tensor, count: Tensor) -> Tensor:
        return flat.new_zeros((count.numel(), *flat.shape[1:])).index_add_(0, segment, flat)


@dataclass
class Contexts:
    """The contexts of one forward pass through one stack."""

    hashes: Tensor  # [B] int64
    real: Tensor | None  # [B, T] bool, True for data; None if there is no padding
    tokens: Tensor | None = None  # [B, T] int64
    special: Tensor | None = None  # [B, T] bool
    groups: tuple[str, ...] | None = None
    windows: Windows | None = None
    span: int | None = None  # number of audio samples, if no mask marks padding
    frames: Callable[[int, Tensor], Tensor] | None = None  # the model's own mask at a lower resolution
    plain: bool = False  # frames or patches: none of them is a special token
    prefix: int = 0  # leading positions that are no part of the input; read only as the class token
    suffix: int = 0  # trailing ones
    pixels: Tensor | None = None  # [B, H, W] bool where images were padded to one size
    channels_last: Callable[[Any, torch.Size], bool] | None = None  # whether a four-dimensional site has channels last
    packed: Packed | None = None  # the sequences of a row, each a context of its own, if it has several
    _cache: dict[tuple[int, int, int, PositionChoice, torch.device], RowSelection] = field(default_factory=dict)
    _pieces: dict[tuple[int, HeldPositions], tuple[RowSelection, RowSelection]] = field(default_factory=dict)

    @property
    def length(self) -> int | None:
        """The number of positions T, if the site's own must be as many; None where it is not known."""
        known = None if self.windows is not None else self.tokens if self.tokens is not None else self.real
        return None if known is None else known.shape[1]

    def select_piece(self, piece: HeldPositions, choice: PositionChoice, device: torch.device) -> RowSelection:
        """The selection for activations of which this process has some positions; cached per pass."""
        whole = self.select(piece.length, choice, device)
        key = (id(whole), piece)
        if key not in self._pieces:
            self._pieces[key] = whole, whole.within(piece)
        return self._pieces[key][1]

    @property
    def batch(self) -> int:
        """The number of contexts, empty ones included."""
        return self.hashes.numel()

    def select(self, length: int, choice: PositionChoice, device: torch.device) -> RowSelection:
        """The selection for activations of `length` positions on `device`; cached per pass."""
        prefix, suffix = (0, 0) if choice.whole or length <= self.prefix + self.suffix else (self.prefix, self.suffix)
        key = (length, prefix, suffix, choice, device)
        if key not in self._cache:
            host = torch.device("cpu")
            made = self._cache.get((*key[:4], host)) or self._selection(length, choice, prefix=prefix, suffix=suffix)
            self._cache[(*key[:4], host)] = made
            self._cache[key] = made if device == host else made.to(device)
        return self._cache[key]

    def _selection(self, length: int, choice: PositionChoice, *, prefix: int, suffix: int) -> RowSelection:
        real, place = self.real_at(length, prefix=prefix, suffix=suffix), torch.arange(length)
        if choice.pool != "cls":
            real = real & (place >= prefix) & (place < length - suffix)
        elif suffix and not prefix:  # the class token follows the patches
            real = real & (place >= length - suffix)
        take = self._kept(real, choice).flatten().nonzero().squeeze(1)
        packed = self._packed(length)
        context, hashes = packed.number.flatten()[take], self.hashes if packed.hashes is None else packed.hashes
        if choice.pool != "none":
            used, segment, count = torch.unique(context, return_inverse=True, return_counts=True)
            zero = torch.zeros_like(used)
            groups = self.groups and tuple(self.groups[row] for row in packed.rows)
            return RowSelection(take, Index(len(hashes), 1, used, hashes[used], zero, zero - 1, groups), segment, count)
        order = packed.order(real).flatten()[take]
        same = self.tokens is not None and self.tokens.shape[1] == length
        token = self.tokens.flatten()[take] if same and self.tokens is not None else torch.full_like(take, -1)
        first = None if choice.whole else order == 0  # a corner of a feature map is no beginning
        index = Index(self.batch, length, take, hashes[context], order, token, self.groups, first)
        return RowSelection(take, index)

    def _packed(self, length: int) -> Packed:
        """The context of each position of a site; at another resolution than the input a row is one context."""
        if self.packed is not None and self.packed.number.shape[1] == length:
            return self.packed
        return Packed.rows_of(self.batch, length)

    def _kept(self, real: Tensor, choice: PositionChoice) -> Tensor:
        packed = self._packed(real.shape[1])
        if choice.pool in ("cls", "last"):
            return real & (packed.order(real) == 0 if choice.pool == "cls" else packed.last(real))
        kept = real & (packed.order(real) > 0) if choice.first == "out" and not choice.whole else real.clone()
        special = self.special
        if special is None and choice.special_ids is not None and self.tokens is not None:
            special = torch.isin(self.tokens, torch.tensor(choice.special_ids, dtype=torch.long))
        if choice.special == "out" and special is not None:
            same = special.shape == real.shape
            kept &= ~special if same else self._covered(~special, real.shape[1])
        elif choice.special == "out" and not self.plain:
            raise AnisoscopeError(
                "special tokens are to be left out, but nothing says which positions they are; run a Batch with "
                "`special`, or give the model input_ids."
            )
        return kept

    def real_at(self, length: int, *, prefix: int = 0, suffix: int = 0) -> Tensor:
        """Which of `length` positions are data; at a lower resolution, those whose whole window is unpadded."""
        if self.pixels is not None:
            cells = unpadded_cells(self.pixels, max(length - prefix - suffix, 1))
            return nn.functional.pad(cells, (length - cells.shape[1] - suffix, suffix), value=True)
        if self.real is None and self.windows is not None and self.span is not None:
            return self._covered(torch.ones(self.batch, self.span, dtype=torch.bool), length)
        if self.real is None:
            return torch.ones(self.batch, length, dtype=torch.bool)
        if length == self.real.shape[1]:
            return self.real
        if length == 1:
            return self.real.any(1, keepdim=True)
        return self._covered(self.real, length)

    def _covered(self, flags: Tensor, length: int) -> Tensor:
        whole = bool(flags.all()) and length < flags.shape[1]
        if self.windows is not None:
            with contextlib.suppress(*([AnisoscopeError] if whole else [])):  # without padding they are not needed
                start, stop = self.windows(flags.shape[1], length)
                beyond = nn.functional.pad(flags.long(), (0, 1))  # an extra last position that is never data
                counts = nn.functional.pad(beyond.cumsum(1), (1, 0))
                return counts[:, stop] - counts[:, start] == stop - start
        if whole:
            return torch.ones(self.batch, length, dtype=torch.bool)
        if self.frames is not None:
            return trusted(self.frames(length, flags.long()).bool(), flags.bool())
        raise AnisoscopeError(
            f"a site has {length} positions where the padded input has {flags.shape[1]}, and how they correspond is "
            "not known; give contexts of equal length, or a mask at the site's resolution with rows=…."
        )


# names under which speech models have the number of frames that are left of so many samples or spectrogram columns
FRAME_RULES = ("_get_feat_extract_output_lengths", "_get_subsampling_output_length", "_get_output_lengths")


def frames_by_length(module: nn.Module) -> Callable[[int, Tensor], Tensor] | None:
    """The mask of frames of a stack that tells only how many frames are left of a length; None if it tells nothing."""
    rule = next((found for name in FRAME_RULES if (found := getattr(module, name, None)) is not None), None)
    if rule is None:
        return None
    return lambda length, flags: torch.arange(length) < rule(flags.sum(1)).long().cpu()[:, None]


def first_of(real: Tensor) -> Tensor:
    """True at the first True of each row.

    >>> first_of(torch.tensor([[False, True, True]])).tolist()
    [[False, True, False]]
    """
    return real & (real.long().cumsum(1) == 1)


def content_hash(values: Tensor, prefix: bytes = b"") -> int:
    """A signed 64-bit hash (blake2b) of the raw bytes of one context's unpadded content."""
    raw = values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(prefix + raw, digest_size=8).digest(), "little", signed=True)


def read_contexts(
    arguments: Mapping[str, Any], *, config: Any = None, real: Tensor | None = None, above: Contexts | None = None
) -> tuple[Contexts, list[str]]:
    """The contexts of a pass, from the arguments of a forward, and notes on decisions made.

    `real` overrides the mask; `above` are the encoder's contexts if these are of its decoder.
    """
    name, content = _content(arguments)
    if not len(content):
        raise AnisoscopeError(
            f"the forward pass was given no contexts ({name} is {tuple(content.shape)}); expected one or more along "
            "the first dimension."
        )
    pixels = None
    if name == "pixel_values" and (real is None or real.dim() == 3):
        pixels, real = read_pixels(arguments.get(PIXEL_MASK) if real is None else real, content), None
    ids = content.detach().cpu().long() if name == "input_ids" else None
    notes: list[str] = []
    if real is None and name != "pixel_values":
        real = stated_mask(arguments, content, notes, whole=name != "input_features")
        real = None if real is None else real.cpu()
        if real is None and name in SOUND:
            real = without_repeated_end(content, config=config, notes=notes)
    if real is None and ids is not None:
        real = unpadded_ids(ids, config)
        real = torch.ones_like(ids, dtype=torch.bool) if real is None else real
        if not bool(real.all()):
            notes.append(
                f"no attention_mask was given; leading and trailing tokens {config.pad_token_id} (pad_token_id) were "
                "taken as padding, though the model attended to them"
            )
    elif real is None and name == "inputs_embeds":
        real = torch.ones(content.shape[:2], dtype=torch.bool)
    hashes = _hashes(content if ids is None else ids, real, above, pixels)
    several = above is None and name in TEXT_DATA.inputs and real is not None and real.shape == content.shape[:2]
    packed = find_packed(arguments, real, notes) if several and real is not None else None
    if packed is not None and real is not None:
        whole = zip(packed.pieces(content.detach().cpu() if ids is None else ids), packed.pieces(real), strict=True)
        packed = replace(packed, hashes=torch.tensor([content_hash(part[seen]) for part, seen in whole]))
    tokens = ids if ids is not None and real is not None and ids.shape == real.shape else None
    span = content.shape[1] if name == "input_values" and content.dim() == 2 else None
    more: dict[str, Any] = {"pixels": pixels, "span": span, "packed": packed}
    return Contexts(hashes, real, tokens, plain=name == "pixel_values", **more), notes


def original_contexts(
    arguments: Mapping[str, Any], *, config: Any = None, real: Tensor | None = None, packed: bool = False
) -> Tensor:
    """Hashes [B] of the contexts before masking, so that a text masked in two ways has one hash.

    With `packed`, of rows that hold several contexts those of each position [B, T].
    """
    ids, labels = arguments.get("input_ids"), arguments.get("labels")
    whole = dict(arguments)
    if isinstance(ids, Tensor) and isinstance(labels, Tensor) and ids.shape == labels.shape:
        ids, labels = ids.detach().cpu(), labels.detach().cpu()
        if _hidden_tokens(ids, labels):
            whole["input_ids"] = torch.where(labels >= 0, labels, ids)
    found = read_contexts(whole, config=config, real=real)[0]
    several = found.packed if packed else None
    return found.hashes if several is None or several.hashes is None else several.hashes[several.number]


def _hidden_tokens(ids: Tensor, labels: Tensor) -> bool:
    """Whether labels are those of masked tokens: most labelled positions then have the same id, the mask token.

    Tags of a token classifier, or the target text of a translation, have the same shape but are not masked tokens.

    >>> _hidden_tokens(torch.tensor([[5, 3, 3, 8]]), torch.tensor([[-100, 6, 7, -100]]))
    True
    >>> _hidden_tokens(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 0]]))
    False
    """
    shown = ids[labels >= 0]
    differs = shown != labels[labels >= 0]
    if not bool(differs.any()):  # a causal model's labels are its ids
        return False
    return int(shown.unique(return_counts=True)[1].max()) > 0.5 * len(shown)


def _content(arguments: Mapping[str, Any]) -> tuple[str, Tensor]:
    for name in CONTENT:
        if isinstance(arguments.get(name), Tensor):
            return name, arguments[name]
    tensors = [(k, v) for k, v in arguments.items() if isinstance(v, Tensor) and v.dim() > 0 and not _BESIDE.search(k)]
    if not tensors:
        raise no_content(arguments)
    name, value = tensors[0]
    ids = value.dim() == 2 and not value.is_floating_point() and not value.is_complex()
    image = value.dim() == 4 and value.is_floating_point()
    return ("input_ids" if ids else "pixel_values" if image else name), value


def no_content(arguments: Mapping[str, Any]) -> AnisoscopeError:
    """The error for a forward whose arguments contain no known input."""
    return AnisoscopeError(
        f"the forward pass was given no tensor that says what its contexts are (seen: "
        f"{', '.join(arguments) or 'nothing'}); expected one of {', '.join(CONTENT)}, or any tensor with "
        "contexts first: rows=lambda args, kwargs: {'inputs_embeds': …} can name one [contexts, positions, width]."
    )


def _hashes(content: Tensor, real: Tensor | None, above: Contexts | None, pixels: Tensor | None) -> Tensor:
    content = content.detach().cpu()
    prefixes = [b""] * content.shape[0]
    if above is not None and above.batch == content.shape[0]:  # a decoder's rows depend on the encoder's input
        prefixes = [int(h).to_bytes(8, "little", signed=True) for h in above.hashes]
    parts: Iterable[Tensor] = content
    if pixels is not None:
        parts = [row[:, seen] for row, seen in zip(content, pixels, strict=True)]
    elif real is not None and real.shape == content.shape[:2]:
        parts = [row[seen] for row, seen in zip(content, real, strict=True)]
    values = [content_hash(part, prefix) for part, prefix in zip(parts, prefixes, strict=True)]
    return torch.tensor(values, dtype=torch.int64)


def with_masks(arguments: dict[str, Any], outer: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a stack, with the pixel mask or mask over frames of sound that its model was given (Whisper)."""
    pixels = [given[PIXEL_MASK] for given in (arguments, outer, batch) if isinstance(given.get(PIXEL_MASK), Tensor)]
    masks = {PIXEL_MASK: pixels[0]} if pixels else {}
    sound = next((arguments[name] for name in SOUND if isinstance(arguments.get(name), Tensor)), None)
    mask = outer.get("attention_mask")
    if sound is not None and isinstance(mask, Tensor) and not isinstance(arguments.get("attention_mask"), Tensor):
        fits = mask.dim() == 2 and mask.shape[0] == sound.shape[0] and mask.shape[1] in sound.shape[1:]
        masks |= {"attention_mask": mask} if fits else {}
    return arguments | masks


def with_ids(arguments: dict[str, Any], outer: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a stack, with the ids of the outer model if the stack was only given embeddings."""
    ids, embeds = outer.get("input_ids"), arguments.get("inputs_embeds")
    lacking = arguments.get("input_ids") is None and isinstance(embeds, Tensor) and isinstance(ids, Tensor)
    return {**arguments, "input_ids": ids} if lacking and ids.shape == embeds.shape[:2] else arguments  # type: ignore[union-attr]


def refuse_eight_bits(x: Tensor, site: Site) -> None:
    """Raise an error for an activation in 8-bit floats, which mean nothing without their scale."""
    if x.is_floating_point() and x.dtype.itemsize == 1:
        raise AnisoscopeError(
            f"site {site.name or site} holds 8-bit floats ({x.dtype}), whose scale is kept elsewhere; measure sites "
            "between its layers, where activations have 16 bits or more."
        )


def positioned(x: Tensor, contexts: Contexts, site: Site) -> Tensor:
    """An activation as [B, T, …], from flattened rows, a feature map, or one row per context."""
    batch, length = contexts.batch, None if contexts.real is None else contexts.real.shape[1]
    if x.shape[0] == batch and (x.dim() == 3 or site.kind in PER_HEAD):
        return x
    if x.dim() == 4 and x.shape[0] == batch:
        last = contexts.channels_last is not None and contexts.channels_last(site, x.shape)
        return x.flatten(1, 2) if last else x.flatten(2).transpose(1, 2)
    if x.dim() == 3 and x.shape[1] == batch and length in (None, x.shape[0]):
        return x.transpose(0, 1)
    if x.dim() == 2 and x.shape[0] % batch == 0:
        return x.unflatten(0, (batch, -1))
    what_next = "; name modules without it" if site.name else ""
    raise AnisoscopeError(
        f"{site.label} gave a tensor of shape {tuple(x.shape)} for {batch} contexts of {length} positions; expected "
        f"[contexts, positions, width]{what_next}."
    )


def channels_last(module: nn.Module, shape: torch.Size) -> bool:
    """Whether a feature map of this shape at a module is [B, H, W, C] rather than [B, C, H, W].

    The channel dimension is the one whose size is a width of the module's layers; if both or neither are, a module
    with convolutions has channels first.

    >>> channels_last(nn.Linear(6, 8), torch.Size([2, 5, 5, 8]))
    True
    """
    parts = list(module.modules())
    convolved = [part for part in parts if isinstance(part, (nn.Conv2d, nn.BatchNorm2d))]
    mapped = [part for part in parts if isinstance(part, (nn.Linear, nn.LayerNorm))]
    first, last = (side in set().union(*map(_widths, of)) for side, of in ((shape[1], convolved), (shape[3], mapped)))
    return last if first != last else bool(mapped) and not convolved


def _widths(part: nn.Module) -> set[int]:
    names = ("in_channels", "out_channels", "in_features", "out_features", "num_features")
    sizes = [getattr(part, name, None) for name in names]
    sizes += [getattr(part, "normalized_shape", (None,))[-1]]
    return {size for size in sizes if isinstance(size, int)}


def by_rule(rule: Rule | None, args: tuple[Any, ...], kwargs: Arguments) -> Ruled:
    """Apply a user's rule to a forward pass: returns additional arguments, and which positions are data (or None)."""
    found = rule(args, kwargs) if rule is not None else {}
    if isinstance(found, Mapping):
        return dict(found), None
    if isinstance(found, Tensor):
        return {}, found.bool()
    raise AnisoscopeError(
        f"rows= returned a {type(found).__name__}; expected a bool tensor [contexts, positions], True where a position "
        "is data, or a dict such as {'attention_mask': …, 'input_ids': …}."
    )


@contextlib.contextmanager
def for_sinks(device: torch.device) -> Iterator[None]:
    """Call a sink without inference mode, gradients and autocast, so that it can keep and modify its tensors."""
    half = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    full = torch.autocast(device.type, enabled=False) if half else contextlib.nullcontext()
    with torch.inference_mode(False), torch.no_grad(), full:
        yield
