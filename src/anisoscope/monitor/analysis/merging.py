"""What several processes saw of one step, as if one had seen it.

Contexts decide by their content where rows belong, so that the merged step is that of one process with all contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from anisoscope.capture.sites.site import Site
from anisoscope.measurement.bank import Bank
from anisoscope.monitor.analysis.analysis import Seen, TableSeen
from anisoscope.monitor.analysis.pieces import is_split, joined_pieces, only_pieces
from anisoscope.monitor.analysis.stages import join_stages
from anisoscope.tangent.proxy import StepRows
from anisoscope.tangent.row_map import OpenRows

_NOTHING = object()
_SAME = 1e-4  # relative difference of parameters from which on they are of different models


def joined_parts(parts: Sequence[Seen], note: Callable[[str], None], *, missing: bool) -> Seen:
    """The step that these parts are of; `missing`: whether some process gave none. `note` is told what is left out."""
    whole = _whole_contexts(parts, note)
    if whole[0].stage is not None:
        join_stages(whole, missing=missing)
    return merged(whole)


def of_another_model(part: Seen, first: Seen) -> bool:
    """Whether a process trains a model of its own: of other shapes, or with other numbers."""
    mine, theirs = first.parameters, part.parameters
    if mine is None or theirs is None:
        return False
    if mine.shape != theirs.shape:
        return True
    mine, theirs = mine.double().cpu(), theirs.double().cpu()
    return float((mine - theirs).norm()) > _SAME * float(mine.norm())


def _whole_contexts(parts: Sequence[Seen], note: Callable[[str], None]) -> list[Seen]:
    """The parts, with those of processes that have positions of the same contexts joined; a note if one is gone."""
    groups: dict[Any, list[Seen]] = {}
    for number, part in enumerate(parts):
        groups.setdefault(part.together or number, []).append(part)
    found = []
    for key, group in groups.items():
        if not any(map(is_split, group)):
            found += group
        elif len(group) == len(group[0].together):
            found.append(replace(joined_pieces(group), mapped=_joined_map(group)))
        else:
            found.append(replace(only_pieces(group[0]), rows=StepRows(group[0].rows.step), bank=None))
            note(f"ranks {', '.join(map(str, key))} share contexts, so all of theirs are missing")
    return found


def merged(parts: Sequence[Seen]) -> Seen:
    """What several processes saw of one step, as if one had seen it; of the model's own tensors those of the first."""
    first = parts[0]
    rows = _joined_rows([part.rows for part in parts])
    banks = [part.bank for part in parts if part.bank is not None]
    bank = reduce(Bank.merge, banks) if banks else None
    weights: dict[Site, Tensor] = dict(first.weights)
    for part in parts[1:]:
        for site, found in part.weights.items():
            weights[site] = weights[site] + found.to(weights[site].device) if site in weights else found
    readers = next((part.readers for part in parts if part.readers), {})
    table = None if first.table is None else _joined_table(first.table, [p.table for p in parts[1:] if p.table])
    told: dict[str, Any] = {
        "mapped": _joined_map(parts),
        "described": first.described,
        "saved": first.saved,
        "shown": sum(p.shown for p in parts),
    }
    return Seen(rows, bank, first.study, first.constants, table, readers, weights, **told, stage=first.stage)


def _joined_map(parts: Sequence[Seen]) -> OpenRows | None:
    maps = [part.mapped for part in parts if part.mapped is not None]
    return reduce(OpenRows.merge, maps) if maps else None


def _joined_rows(parts: Sequence[StepRows]) -> StepRows:
    """The rows of several processes: batches take turns, as samplers deal them and as one process would read them."""
    out = StepRows(parts[0].step)
    for part in parts:
        out.add_loss(part.loss, part.tokens, part.weighted_loss)
        out.unreached |= part.unreached
    for site in dict.fromkeys(site for part in parts for site in part.fit):
        out.fit[site] = _in_turn([part.fit.get(site, []) for part in parts])
    for site in dict.fromkeys(site for part in parts for site in part.test):
        out.test[site] = _in_turn([part.test.get(site, []) for part in parts])
    for name in ("embedded", "by_context", "passes"):
        setattr(out, name, _in_turn([getattr(part, name) for part in parts]))
    heads = [part.output for part in parts if part.output is not None]  # not changed: files may hold them
    out.output = reduce(lambda one, other: one + other.to(one.device), heads) if heads else None
    return out


def _in_turn(lists: Sequence[list[Any]]) -> list[Any]:
    """The first of each list, then the second of each.

    >>> _in_turn([[1, 4], [2], [3, 5]])
    [1, 2, 3, 4, 5]
    """
    return [x for turn in zip_longest(*lists, fillvalue=_NOTHING) for x in turn if x is not _NOTHING]


def _joined_table(first: TableSeen, others: Sequence[TableSeen]) -> TableSeen:
    """The embedding table of the first process, with updates of the types that any of them has read."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, types, change in (update for table in (first, *others) for update in table.updates):
        found.setdefault(name, []).append((types, change))
    read = [table.read.cpu() for table in (first, *others) if table.read is not None]
    updates = []
    for name, parts in found.items():
        rows = torch.cat([change.to(parts[0][1].device) for _, change in parts])
        types, place = torch.cat([types for types, _ in parts]).unique(return_inverse=True)
        where = torch.empty_like(types).scatter_(0, place, torch.arange(len(place)))
        kept = torch.stack(read).any(0)[types] if read else torch.ones_like(types, dtype=torch.bool)
        if read and len(types) < first.size:  # a process that holds some of the rows gave none, as after a restart
            continue
        if bool(kept.any()):
            updates.append((name, types[kept], rows[where[kept].to(rows.device)]))
    return TableSeen(first.size, first.width, first.since, updates)
