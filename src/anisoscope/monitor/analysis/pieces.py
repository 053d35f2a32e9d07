"""Rows of contexts whose positions are split over processes: each gives those that it has, and here they are joined.

Statistics of whole contexts cannot be merged from parts of contexts, so processes give rows and not statistics where
a site is split (`Index.shards`). Joined rows are in the order in which one process would have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from anisoscope.capture.gradient_pass import GradientPass, RowTokens, SiteRows
from anisoscope.capture.row import Index, Rows
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.bank import Bank
from anisoscope.monitor.analysis.analysis import Seen
from anisoscope.tangent.proxy import StepRows


def only_pieces(seen: Seen) -> Seen:
    """What a process adds that is not the first of those that look at the same contexts: its positions of split sites.

    Everything else is the same in all of them.
    """
    rows, part = seen.rows, StepRows(seen.rows.step, embedded=seen.rows.embedded)
    part.fit = {site: found for site, found in rows.fit.items() if any(each.index.shards > 1 for each in found)}
    part.test = {site: found for site, found in rows.test.items() if any(each.index.shards > 1 for each, _ in found)}
    part.passes = [(_split_sites(found), contexts, factor) for found, contexts, factor in rows.passes]
    bank = None
    if seen.bank is not None and seen.bank.pieces:
        bank = Bank(seen.bank.plan)
        bank.pieces = seen.bank.pieces
    return replace(seen, rows=part, bank=bank, weights={}, shown=0)


def _split_sites(found: GradientPass) -> GradientPass:
    return GradientPass({site: rows for site, rows in found.sites.items() if rows.index.shards > 1})


def is_split(seen: Seen) -> bool:
    """Whether some of the rows lack positions that other processes have."""
    rows = seen.rows
    tested = [found for parts in rows.test.values() for found, _ in parts]
    fitted = [found for parts in rows.fit.values() for found in parts]
    return any(found.index.shards > 1 for found in [*fitted, *tested]) or bool(seen.bank and seen.bank.pieces)


def joined_pieces(parts: Sequence[Seen]) -> Seen:
    """What the processes that look at the same contexts saw, in their order, as if one had seen it."""
    first, known = parts[0], _Known()
    each = [part.rows for part in parts]
    rows = replace(first.rows, embedded=[pair for part in each for pair in part.embedded])
    rows.fit = {site: known.join_all([part.fit.get(site, []) for part in each]) for site in first.rows.fit}
    rows.test = {}
    for site, mine in first.rows.test.items():
        found = known.join_all([[one for one, _ in part.test.get(site, [])] for part in each])
        rows.test[site] = [(one, factor) for one, (_, factor) in zip(found, mine, strict=True)]
    rows.passes = []
    for number, (own_pass, contexts, factor) in enumerate(first.rows.passes):
        same = [part.passes[number][0].sites for part in each if number < len(part.passes)]
        sites = {site: known.join([own[site] for own in same if site in own]) for site in own_pass.sites}
        rows.passes.append((replace(own_pass, sites=sites), contexts, factor))
    if first.bank is not None:
        _feed(first.bank, [part.bank for part in parts if part.bank is not None], known)
    return replace(first, rows=rows)


def _feed(bank: Bank, banks: Sequence[Bank], known: _Known) -> None:
    """Add the joined rows of all processes to the statistics of the first."""
    pieces = [other.pieces for other in banks]
    bank.pieces = {}
    for site in pieces[0]:
        for same in zip_longest(*[found.get(site, []) for found in pieces]):
            index, order = known.index([rows.index for rows in same if rows is not None])
            bank.rows(Rows(site, torch.cat([rows.x for rows in same])[order.to(same[0].x.device)], index))


class _Known:
    """Joined indices, which are the same at most sites."""

    def __init__(self) -> None:
        self._indices: dict[tuple[int, ...], tuple[Index, Tensor]] = {}
        self._tokens: dict[tuple[int, ...], RowTokens] = {}

    def index(self, parts: Sequence[Index]) -> tuple[Index, Tensor]:
        """One index of the rows of all parts, in the order of positions, and which row of all comes where."""
        if len(parts) != parts[0].shards or len({(part.batch, part.length) for part in parts}) > 1:
            raise AnisoscopeError(
                f"{parts[0].shards} processes have the positions of the same contexts, but {len(parts)} of them gave "
                "matching rows; call the model equally often in all of them inside `with monitor.step(…)`."
            )
        key = tuple(map(id, parts))
        if key not in self._indices:
            keep = torch.cat([part.keep for part in parts])
            order = keep.argsort()
            names = ("context", "position", "token", *(("first",) if parts[0].first is not None else ()))
            columns: dict[str, Any] = {n: torch.cat([getattr(part, n) for part in parts])[order] for n in names}
            self._indices[key] = replace(parts[0], keep=keep[order], shards=1, **columns), order
        return self._indices[key]

    def join_all(self, lists: Sequence[Sequence[SiteRows]]) -> list[SiteRows]:
        """The passes of one site, each joined from all processes that have rows of it."""
        return [self.join([rows for rows in same if rows is not None]) for same in zip_longest(*lists)]

    def join(self, parts: Sequence[SiteRows]) -> SiteRows:
        first = parts[0]
        if first.index.shards == 1:
            return first
        index, order = self.index([part.index for part in parts])
        there = order.to(first.x.device)
        gradients = [part.g for part in parts if part.g is not None]
        g = torch.cat(gradients)[there] if len(gradients) == len(parts) else None
        key = tuple(id(part.tokens) for part in parts)
        if key not in self._tokens:
            self._tokens[key] = _joined_tokens([part.tokens for part in parts], order)
        return SiteRows(torch.cat([part.x for part in parts])[there], g, index, self._tokens[key])


def _joined_tokens(parts: Sequence[RowTokens], order: Tensor) -> RowTokens:
    original, target = (torch.cat([getattr(part, n) for part in parts])[order] for n in ("original", "target"))
    masked = [part.masked for part in parts if part.masked is not None]
    return RowTokens(original, target, torch.cat(masked)[order] if len(masked) == len(parts) else None)
