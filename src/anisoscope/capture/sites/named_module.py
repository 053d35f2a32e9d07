"""Modules that a user names: which modules of a model a pattern means, and how their outputs are laid out.

A name is the path of a module as `model.named_modules()` has it. In a pattern `*` stands for one part of a path or for
some of its letters, `**` for any number of parts. Modules are numbered in the order of the module tree, the order in
which the model's constructor made them.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from anisoscope.capture.row import Index
from anisoscope.capture.sites.site import Site
from anisoscope.errors import AnisoscopeError

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # hold modules and are never called
_CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_POOLS = (nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d)
_WIDTHS = ("in_features", "out_features", "hidden_size", "input_size", "embedding_dim", "embed_dim")
_CHANNELS = ("in_channels", "out_channels", "num_features", "num_channels")
_SHOWN = 12  # names in an error


def matches(path: str, pattern: str) -> bool:
    """Whether a module's path matches a pattern, part by part.

    >>> matches("h.3", "h.*"), matches("h.3.mlp", "h.*"), matches("h.3.mlp", "h.**"), matches("h.3.mlp", "**.mlp")
    (True, False, True, True)
    """
    return _fit(path.split("."), pattern.split("."))


def _fit(names: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not names
    if patterns[0] == "**":
        return any(_fit(names[i:], patterns[1:]) for i in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], patterns[0]) and _fit(names[1:], patterns[1:])


def named_sites(model: nn.Module, patterns: Sequence[str]) -> dict[str, Site]:
    """The modules that match, as sites numbered in the model's order; lists of modules are never called and no sites.

    >>> list(named_sites(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), ["*"]))
    ['0', '1']
    """
    modules = {path: module for path, module in model.named_modules() if path}
    found: set[str] = set()
    for pattern in patterns:
        hits = {path for path in modules if matches(path, pattern)}
        called = {path for path in hits if not isinstance(modules[path], _LISTS)}
        if not called:
            raise _unmatched(model, pattern, hits, list(modules))
        found |= called
    return {path: Site(i, "module", name=path) for i, path in enumerate(path for path in modules if path in found)}


def _unmatched(model: nn.Module, pattern: str, lists: set[str], paths: list[str]) -> AnisoscopeError:
    called = type(model).__name__
    if lists:
        name = min(lists)
        return AnisoscopeError(
            f"{name!r} of {called} is a list of modules, which is never called; say {name + '.*'!r}."
        )
    if not paths:
        return AnisoscopeError(f"no module of {called} matches {pattern!r}; it has no modules.")
    near = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.5) or difflib.get_close_matches(
        pattern, paths, n=1, cutoff=0.0
    )
    hint = " or ".join(map(repr, near))
    return AnisoscopeError(
        f"no module of {called} matches {pattern!r}; did you mean {hint}? Its modules are {shown_names(model)}."
    )


def shown_names(model: nn.Module) -> str:
    """The names of some modules, outer ones first, for an error.

    >>> shown_names(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU())))
    '0, 1, 1.0'
    """
    paths = [path for path, module in model.named_modules() if path and not isinstance(module, _LISTS)]
    paths.sort(key=lambda path: path.count("."))
    return ", ".join(paths[:_SHOWN]) + (f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else "")


def find_packed(value: Any) -> PackedSequence | None:
    """The packed sequence that a recurrent module returned, alone or first of a tuple; None if there is none."""
    if isinstance(value, PackedSequence):
        return value
    return find_packed(value[0]) if isinstance(value, (tuple, list)) and value else None


def unpacked(packed: PackedSequence, data: Tensor | None = None, *, length: int = 0) -> tuple[Tensor, Tensor]:
    """A packed sequence, or other data in its place, as [B, T, …], and which positions are data [B, T] on the host."""
    whole = packed if data is None else packed._replace(data=data)
    longest = len(packed.batch_sizes)
    x, lengths = pad_packed_sequence(whole, batch_first=True, total_length=max(length, longest))
    return x, torch.arange(x.shape[1]) < lengths[:, None]


def arranged(x: Tensor, module: nn.Module, batch: int, notes: list[str] | None = None) -> Tensor:
    """The output of a module with contexts first and, of three dimensions, channels last: [B, T, d].

    Convolutions in one dimension give [B, C, L]; recurrent and attention modules of PyTorch that are not `batch_first`
    give [T, B, d]. Where T is B it cannot be seen which of them the model's own input has first; that is noted.

    >>> tuple(arranged(torch.zeros(4, 8, 20), nn.Conv1d(3, 8, 5), 4).shape)
    (4, 20, 8)
    >>> tuple(arranged(torch.zeros(20, 4, 8), nn.GRU(3, 8), 4).shape)
    (4, 20, 8)
    """
    if x.dim() > 4 and x.shape[0] == batch:  # channels come first where a convolution has several dimensions
        return x.flatten(2).transpose(1, 2)
    if x.dim() != 3:
        return x
    if time_first(module):
        if x.shape[1] != batch:
            raise AnisoscopeError(
                f"{type(module).__name__} is not batch_first: it gave {tuple(x.shape)} as [positions, contexts, width] "
                f"where the model's input has {batch} contexts in its first dimension; give the model input with "
                "contexts first, or rows=lambda args, kwargs: {'inputs_embeds': args[0].transpose(0, 1)}."
            )
        doubt = (
            f"{type(module).__name__} is not batch_first and there are as many positions as contexts ({batch}): the "
            "model's input was taken as [contexts, positions]; if its positions come first, say it with rows="
        )
        if notes is not None and x.shape[0] == batch and doubt not in notes:
            notes.append(doubt)
        return x.transpose(0, 1)
    return x.transpose(1, 2) if x.shape[0] == batch and _channels_first(x, module) else x


def time_first(module: nn.Module) -> bool:
    """Whether a module of PyTorch itself has positions before contexts."""
    inner = getattr(module, "self_attn", module)
    known = isinstance(
        module, (nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    )
    return known and not getattr(inner, "batch_first", True)


def _channels_first(x: Tensor, module: nn.Module) -> bool:
    """Whether [B, C, L] are channels before positions: by the sizes of convolutions and of linear layers inside."""
    parts = list(module.modules())
    if isinstance(module, _POOLS) or (isinstance(module, _CHANNELS_FIRST) and x.dim() == 3):
        return True
    if not any(isinstance(part, nn.modules.conv._ConvNd) for part in parts):
        return False
    first, last = (_sizes(parts, names) for names in (_CHANNELS, (*_WIDTHS, "normalized_shape")))
    return x.shape[1] in first and x.shape[2] not in last


def _sizes(parts: Sequence[nn.Module], names: Sequence[str]) -> set[int]:
    values = [getattr(part, name, None) for part in parts for name in names]
    return {value[-1] if isinstance(value, tuple) and value else value for value in values if value is not None}


class ModuleCalls:
    """The rows of all calls of one module in one pass: a context's positions go on from call to call."""

    def __init__(self, name: str) -> None:
        self.name, self.notes = name, list[str]()
        self._parts: list[tuple[Tensor, Index]] = []
        self._order: Tensor | None = None  # of the joined rows

    def add(self, rows: Tensor, index: Index) -> int | None:
        """Add the rows of a call and return its number; None, with a note, if they have another shape than before."""
        if self._parts and self._parts[0][0].shape[1:] != rows.shape[1:]:
            self.notes.append(
                f"{self.name} is called several times in a pass, with outputs of different widths: rows of the width "
                f"of its first call ({self._parts[0][0].shape[1]}) are measured"
            )
            return None
        self._parts.append((rows, index))
        return len(self._parts) - 1

    def joined(self) -> tuple[Tensor, Index]:
        """The rows of all calls and what they are; of maps and of several calls none is at a first position, 0."""
        if len(self._parts) == 1:
            rows, index = self._parts[0]
            return rows, index if index.first is not None else replace(index, position=index.position + 1)
        self.notes.append(
            f"{self.name} is called {len(self._parts)} times in a pass: the rows of all its calls are measured together"
        )
        indices, starts = [index for _, index in self._parts], [0]
        for index in indices:
            starts.append(starts[-1] + index.length)
        length = starts.pop()
        keep = [
            i.keep // i.length * length + start + i.keep % i.length for i, start in zip(indices, starts, strict=True)
        ]
        position = [index.position + start + 1 for index, start in zip(indices, starts, strict=True)]
        joined: dict[str, Any] = {
            name: torch.cat([getattr(index, name) for index in indices]) for name in ("context", "token")
        }
        joined |= {"keep": torch.cat(keep), "position": torch.cat(position)}
        joined["first"] = None  # of several calls none is the beginning of a text
        valid = [getattr(index, "valid", None) for index in indices]
        if any(flags is not None for flags in valid):  # of rows that were sampled
            pairs = zip(indices, valid, strict=True)
            joined["valid"] = torch.cat(
                [torch.ones_like(i.keep, dtype=torch.bool) if v is None else v for i, v in pairs]
            )
        rows, index = torch.cat([rows for rows, _ in self._parts]), replace(indices[0], length=length, **joined)
        if len(index.context):  # rows of a context stand together
            self._order = index.keep.argsort()
            return rows[self._order.to(rows.device)], index.taken(self._order)
        return rows, index

    def spread(self, gradient: Tensor, number: int) -> Tensor:
        """The gradient of the rows of one call, with zeros for those of the others."""
        if len(self._parts) == 1:
            return gradient
        sizes = [len(rows) for rows, _ in self._parts]
        before = sum(sizes[:number])
        found = nn.functional.pad(gradient, (0, 0, before, sum(sizes) - before - sizes[number]))
        return found if self._order is None else found[self._order.to(found.device)]
