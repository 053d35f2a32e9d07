"""What of a batch is data, and of which context: padding of tokens, sounds and images, and sequences packed into a row.

Shapes: B rows of a batch, T positions, C contexts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from anisoscope.errors import AnisoscopeError
from anisoscope.models.forward import MASKED

_RATE = 16_000  # samples per second of every speech model here; mel frames come every 10 ms
_LEAST = 0.1  # seconds of one exact value at the end of a context from which it counts as padding
REPEATED = (
    "no attention_mask was given; ends of contexts that repeat one exact value for 0.1 s or more were taken as "
    "padding, though the model heard them: give attention_mask, or contexts of equal length"
)

# arguments that say where the sequences of flattened rows begin, and which one a position belongs to
_CUMULATIVE, _NUMBERED = ("cu_seq_lens_q", "cu_seqlens_q", "cu_seqlens"), ("seq_idx",)
SEVERAL = "rows hold several sequences, whose positions begin anew: each of them is a context of its own"
ATTENDED = (
    "rows hold several sequences beside an attention_mask, by which the model may have attended from one to the next; "
    "each of them is a context of its own"
)


SEPARATED = "rows of the probe hold several sequences: each of them is read in a row of its own"
_OF_KERNELS = ("cu_seq", "max_length_", "max_seqlen", *_NUMBERED)  # what only packed rows need


@dataclass(frozen=True)
class Packed:
    """Which context each position belongs to; contexts are runs of positions, and end where a row ends."""

    number: Tensor  # [B, T] int64 below C, ascending
    starts: Tensor  # [C] int64, the first of the B·T positions of each context
    hashes: Tensor | None = None  # [C] int64, None where each row is one context

    @classmethod
    def rows_of(cls, batch: int, length: int) -> Self:
        """Each row is one context."""
        number = torch.arange(batch)
        return cls(number[:, None].expand(batch, length), number * length)

    @classmethod
    def beginning(cls, begins: Tensor) -> Self:
        """Contexts that begin where `begins` [B, T] is True, and where a row does."""
        begins = begins.clone()
        begins[:, :1] = True
        flat = begins.flatten()
        return cls((flat.long().cumsum(0) - 1).view_as(begins), flat.nonzero().squeeze(1))

    @property
    def rows(self) -> list[int]:
        """The row of each context."""
        found: list[int] = (self.starts // max(1, self.number.shape[1])).tolist()
        return found

    def pieces(self, x: Tensor) -> Sequence[Tensor]:
        """What each context has of x [B, T, …]."""
        return x.flatten(0, 1).tensor_split(self.starts[1:])

    def order(self, real: Tensor) -> Tensor:
        """How many positions that are data, `real` [B, T], each of these has before it in its context.

        >>> packed = Packed.beginning(torch.tensor([[True, False, False, True, False]]))
        >>> packed.order(torch.tensor([[True, True, True, False, True]]))[0, [0, 1, 2, 4]].tolist()
        [0, 1, 2, 0]
        """
        before = self._before(real)
        return (before[:-1] - before[self.starts][self.number.flatten()]).view_as(self.number)

    def last(self, real: Tensor) -> Tensor:
        """Where the last of the positions of a context is that are data, `real` [B, T]."""
        before = self._before(real)
        counts = before[torch.cat([self.starts[1:], self.starts.new_tensor([real.numel()])])] - before[self.starts]
        return real & (self.order(real) == counts[self.number] - 1)

    @staticmethod
    def _before(real: Tensor) -> Tensor:
        return nn.functional.pad(real.flatten().long().cumsum(0), (1, 0))


def find_packed(arguments: Mapping[str, Any], real: Tensor, notes: list[str]) -> Packed | None:
    """The sequences of rows of which `real` [B, T] is data, if they were packed; None if each row is one.

    Positions that begin anew tell them (position_ids), else their lengths or numbers, as kernels for such rows take.

    >>> places, real = torch.tensor([[0, 1, 2, 0, 1, 0]]), torch.ones(1, 6, dtype=torch.bool)
    >>> find_packed({"position_ids": places}, real, []).number.tolist()
    [[0, 0, 0, 1, 1, 2]]
    >>> find_packed({"position_ids": torch.tensor([[1, 1, 0, 1, 2, 3]])}, real & (torch.arange(6) > 1), []) is None
    True
    """
    later = real & (real.long().cumsum(1) > 1)  # the first position of a row begins nothing anew
    for begins in _beginnings(arguments, real):
        if bool((begins & later).any()):
            notes.append(ATTENDED if isinstance(arguments.get("attention_mask"), Tensor) else SEVERAL)
            return Packed.beginning(begins & later)
    return None


def separated(
    inputs: Mapping[str, Any], packed: Packed, real: Tensor, *, ignored: int, masked: bool
) -> Iterator[dict[str, Any]]:
    """Batches in which every sequence of packed rows has a row of its own.

    With `masked` there is one, of rows that are padded at their ends and have a mask; otherwise one for each length.

    >>> places = torch.tensor([[0, 1, 2, 0, 1]])
    >>> packed = find_packed({"position_ids": places}, real := places >= 0, [])
    >>> (batch,) = separated({"input_ids": places + 5, "labels": places}, packed, real, ignored=-100, masked=True)
    >>> [batch[name].tolist() for name in ("input_ids", "labels", "attention_mask")]
    [[[5, 6, 7], [5, 6, 0]], [[0, 1, 2], [0, 1, -100]], [[1, 1, 1], [1, 1, 0]]]
    """
    first, rows = packed.starts, torch.tensor(packed.rows)
    lengths = torch.tensor([int(found[-1]) + 1 if len(found := x.nonzero()) else 0 for x in packed.pieces(real)])
    kept = {name: x for name, x in inputs.items() if not name.startswith(_OF_KERNELS)}
    if isinstance(mask := kept.get("attention_mask"), Tensor) and mask.dim() != 2:  # between the sequences of a row
        del kept["attention_mask"]
    for length in [int(lengths.max())] if masked else lengths.unique().tolist():
        chosen = lengths > 0 if masked else (lengths == length) & (lengths > 0)
        place = first[chosen, None] + torch.arange(length)
        inside = torch.arange(length) < lengths[chosen, None]
        place = place.where(inside, first[chosen, None])
        cut = {
            name: _cut(x, place, inside, rows[chosen], real, ignored * (name == "labels")) for name, x in kept.items()
        }
        if masked and "attention_mask" not in cut:
            some = next(x for x in cut.values() if isinstance(x, Tensor))
            cut["attention_mask"] = (inside & real.flatten()[place]).long().to(some.device)
        if len(place):
            yield cut


def _cut(x: Any, place: Tensor, inside: Tensor, rows: Tensor, real: Tensor, filling: int) -> Any:
    """What sequences have of an argument of whole rows [B, …] or positions [B, T, …]; all of any other."""
    if not isinstance(x, Tensor) or x.dim() == 0:
        return x
    if x.dim() > 1 and x.shape[1] == real.shape[1] and x.shape[0] in (1, len(real)):
        found = x.expand(len(real), *x.shape[1:]).flatten(0, 1)[place.to(x.device)]
        outside = ~inside.to(x.device).view(*inside.shape, *[1] * (found.dim() - 2))
        return found.masked_fill(outside, filling)
    return x[rows.to(x.device)] if x.shape[0] == len(real) else x


def _beginnings(arguments: Mapping[str, Any], real: Tensor) -> Iterator[Tensor]:
    """Where sequences begin [B, T], by each argument that tells it."""
    for name in ("position_ids", *_NUMBERED):
        x = arguments.get(name)
        if not isinstance(x, Tensor) or x.is_floating_point() or x.dim() != 2 or x.shape[1] != real.shape[1]:
            continue
        if x.shape[0] not in (1, len(real)):
            continue
        x = x.detach().cpu().long().expand_as(real)
        if name in _NUMBERED:
            yield nn.functional.pad(x[:, 1:] != x[:, :-1], (1, 0))
        else:
            least = x.masked_fill(~real, torch.iinfo(torch.int64).max).amin(1, keepdim=True)
            yield nn.functional.pad(x[:, 1:] != x[:, :-1] + 1, (1, 0)) & (x == least)
    for name in _CUMULATIVE:
        x = arguments.get(name)
        if isinstance(x, Tensor) and not x.is_floating_point() and x.dim() == 1 and len(x) > 1:
            begins = torch.zeros(real.numel() + 1, dtype=torch.bool)
            begins[x.detach().cpu().long().clamp(0, real.numel())] = True
            yield begins[:-1].view_as(real)


def stated_mask(
    arguments: Mapping[str, Any], content: Tensor, notes: list[str], *, whole: bool = True
) -> Tensor | None:
    """Which positions [B, T] are data by the mask that a forward was given, on its device; None without a mask.

    With `whole`, cached positions are removed from `attention_mask`; in a mask of another name True means padding if
    the name says so. Needs no device–host synchronisation.
    """
    mask = arguments.get("attention_mask")
    if isinstance(mask, Mapping):
        mask = next((value for value in mask.values() if isinstance(value, Tensor)), None)
    if isinstance(mask, Tensor):
        mask = mask.detach()
        real = mask > MASKED if mask.dim() > 2 and mask.is_floating_point() else mask != 0
        if mask.dim() > 2:  # a position is real when some query may attend to it
            real = real.flatten(1, -2).any(1).expand(content.shape[0], -1)
        return real[:, -content.shape[1] :] if whole else real
    for name, value in arguments.items():
        if "mask" in name and isinstance(value, Tensor) and value.shape == content.shape[:2]:
            padding = "pad" in name
            notes.append(f"{name} was read as the mask: {'True is padding' if padding else 'nonzero is data'}")
            return value.detach() == 0 if padding else value.detach() != 0
    return None


def unpadded_ids(ids: Tensor, config: Any) -> Tensor | None:
    """Which positions [B, T] are data without a mask: all but clear runs of the pad token at the ends; None: all."""
    pad = padding_id(config)
    if pad is None:
        return None
    content = ids != pad
    if pad in special_ids(config, "decoder_start"):  # T5 starts its decoder with the pad token
        content[:, 0] = True
    inside = (content.long().cumsum(1) > 0) & (content.flip(1).long().cumsum(1).flip(1) > 0)
    meant = (inside & ~content).any() | ~content.any()  # pad tokens between others are ordinary tokens
    return content | meant


def padding_id(config: Any) -> int | None:
    """The id of the pad token; None where there is none, or where it is also another special token."""
    pad: int | None = getattr(config, "pad_token_id", None)
    return None if pad is None or pad in special_ids(config, "bos", "eos", "sep", "cls") else pad


def special_ids(config: Any, *names: str) -> set[int]:
    """The ids a configuration names as special, e.g. `special_ids(config, "bos", "eos")`."""
    values = (getattr(config, f"{name}_token_id", None) for name in names)
    lists = (value if isinstance(value, (list, tuple)) else (value,) for value in values)
    return {int(value) for listed in lists for value in listed if isinstance(value, int)}


def convolved(length: int, rows: int, layers: Sequence[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
    """First and one-past-last input position behind each of `rows` outputs of a chain of convolutions.

    `layers` are (kernel, stride, padding); the rows may be the outputs of any of them. Padding that a convolution adds
    itself at the ends of the input is not part of a window.

    >>> [x.tolist() for x in convolved(10, 5, [(3, 1, 1), (3, 2, 1)])]
    [[0, 0, 2, 4, 6], [3, 5, 7, 9, 10]]
    """
    begin, step, reach, out, found = 0, 1, 1, length, None
    for kernel, stride, padding in layers:
        out = (out + 2 * padding - kernel) // stride + 1
        begin, reach, step = begin - padding * step, reach + (kernel - 1) * step, step * stride
        found = (begin, step, reach) if out == rows else found
    if found is None:
        raise AnisoscopeError(
            f"a site has {rows} frames, which no convolution of the model makes of {length} input positions; give "
            "contexts of equal length, or a mask at the site's resolution with rows=…."
        )
    begin, step, reach = found
    start = torch.arange(rows) * step + begin
    return start.clamp(0, length), (start + reach).clamp(0, length)


def squeezed(length: int, rows: int, layers: Sequence[tuple[int, int, int]], *, factor: int) -> tuple[Tensor, Tensor]:
    """As `convolved`, for models that average every `factor` frames to one row, and later expand rows to frames again.

    Frames after the last complete group are filled with zeros and represent no input.

    >>> [x.tolist() for x in squeezed(10, 2, [(2, 2, 0)], factor=2)]
    [[0, 4], [4, 8]]
    >>> [x.tolist() for x in squeezed(10, 5, [(2, 2, 0)], factor=2)]
    [[0, 0, 4, 4, 10], [4, 4, 8, 8, 11]]
    """
    frames = length
    for kernel, stride, padding in layers:
        frames = (frames + 2 * padding - kernel) // stride + 1
    groups = frames // factor
    start, stop = convolved(length, groups, [*layers, (factor, factor, 0)])
    if rows == groups:
        return start, stop
    if rows not in (frames, groups * factor):
        convolved(length, rows, layers)  # raises the error
    start, stop = torch.cat([start, start.new_tensor([length])]), torch.cat([stop, stop.new_tensor([length + 1])])
    group = (torch.arange(rows) // factor).clamp(max=groups)
    return start[group], stop[group]


def trusted(frames: Tensor, real: Tensor) -> Tensor:
    """A model's own mask [B, T'] of its frames; an error if it keeps a larger share than that of data in [B, T].

    >>> trusted(torch.tensor([[True, False]]), torch.tensor([[True, True, False, False]])).tolist()
    [[True, False]]
    """
    most = real.sum(1) * frames.shape[1] / real.shape[1] + 1
    if bool((frames.sum(1) > most).any()):
        worst = int((frames.sum(1) - most).argmax())
        raise AnisoscopeError(
            f"the model's own mask keeps {int(frames[worst].sum())} of {frames.shape[1]} frames of a context of which "
            f"{int(real[worst].sum())} of {real.shape[1]} positions are data, so padding would be counted; give "
            "contexts of equal length, or a mask at the site's resolution with rows=…."
        )
    return frames


def without_repeated_end(content: Tensor, *, config: Any, notes: list[str]) -> Tensor | None:
    """Which samples are data [B, T] if ends of contexts repeat one exact value for 0.1 s or more; None if none does.

    Each context is judged by itself, so that a recording gives the same rows in any batch.

    >>> without_repeated_end(torch.arange(4000.0).clamp(max=2000)[None], config=None, notes=[]).sum().item()
    2000
    """
    mels = content.dim() == 3 and content.shape[1] == getattr(config, "num_mel_bins", None) != content.shape[2]
    x = (content.transpose(1, 2) if mels else content).detach().cpu()
    length, least = x.shape[1], round(_LEAST * (_RATE if x.dim() == 2 else 100))
    same = (x == x[:, -1:]).flatten(2).all(-1) if x.dim() == 3 else x == x[:, -1:]
    run = same.flip(1).long().cumprod(1).sum(1)
    run = torch.where((run >= least) & (run < length), run, torch.zeros_like(run))
    if not bool(run.any()):
        return None
    notes.append(REPEATED)
    return torch.arange(length) < (length - run)[:, None]


def unpadded_cells(pixels: Tensor, length: int) -> Tensor:
    """Which of the `length` positions of a feature map cover only data pixels [B, H, W]: bool [B, length].

    >>> mask = torch.ones(1, 4, 4, dtype=torch.bool)
    >>> mask[:, :, 3] = False
    >>> unpadded_cells(mask, 4).tolist()
    [[True, False, True, False]]
    """
    if bool(pixels.all()):
        return torch.ones(pixels.shape[0], length, dtype=torch.bool)
    size = (pixels.shape[1], pixels.shape[2])
    counts, strides = _grid(size, length)
    sums = nn.functional.pad(pixels.long().cumsum(1).cumsum(2), (1, 0, 1, 0))
    (top, bottom), (left, right) = (_cells(side, count, strides) for side, count in zip(size, counts, strict=True))
    inside = sums[:, bottom][:, :, right] - sums[:, top][:, :, right] - sums[:, bottom][:, :, left]
    inside = inside + sums[:, top][:, :, left]
    return (inside == torch.outer(bottom - top, right - left)).flatten(1)


def _grid(size: tuple[int, int], length: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Height and width of a map of `length` positions, and the smallest and largest stride that it may have.

    Both sides have the same stride; of several possible grids the one with the most similar aspect ratio is used.
    """
    found = []
    for counts in ((h, length // h) for h in range(1, length + 1) if length % h == 0):
        common = _strides(size[0], counts[0]) & _strides(size[1], counts[1])
        if common:
            ratio = size[0] * counts[1] / (size[1] * counts[0])
            exact = {s for s in common if size == (s * counts[0], s * counts[1])}
            meant = exact or {s for s in common if s & (s - 1) == 0} or common  # exact, a power of two, or any
            found.append((max(ratio, 1 / ratio), counts, (min(meant), max(meant))))
    if not found:
        raise AnisoscopeError(
            f"a site has {length} positions where the padded images have {size[0]}×{size[1]} pixels, and how they "
            "correspond is not known; give images of one size without padding."
        )
    return min(found)[1:]


def _strides(side: int, count: int) -> set[int]:
    """Strides that give `count` positions along a side, with a remainder either dropped or padded."""
    return {stride for stride in range(1, side + 1) if count in (side // stride, -(-side // stride))}


def _cells(side: int, count: int, strides: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """First and one-past-last pixel of each cell for any of the strides; a single cell covers the whole side."""
    number = torch.arange(count)
    stop = ((number + 1) * strides[1]).clamp(max=side)
    return (number * strides[0]).clamp(max=side), stop if count > 1 else stop.fill_(side)


def read_pixels(mask: Any, content: Tensor) -> Tensor | None:
    """A bool mask [B, H, W] from the pixel_mask of images [B, C, H, W]; None without one."""
    if not isinstance(mask, Tensor):
        return None
    expected = (content.shape[0], *content.shape[-2:])
    if tuple(mask.shape) != expected:
        raise AnisoscopeError(
            f"pixel_mask has shape {tuple(mask.shape)} beside images of shape {tuple(content.shape)}; expected "
            f"one value for each pixel, {expected}."
        )
    return mask.detach().cpu() != 0
