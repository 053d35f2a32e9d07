"""Stages of a pipeline: each process holds some of the blocks, and adds the rows of its sites.

The last stage alone knows the loss: how labels are read, and the scale of gradients. The others see the same contexts,
so that what it knows of a row holds for the same row (context and position) at their sites.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

from anisoscope.capture.gradient_pass import RowTokens, SiteRows
from anisoscope.capture.row import Index
from anisoscope.errors import AnisoscopeError
from anisoscope.monitor.analysis.analysis import Seen


def join_stages(parts: Sequence[Seen], *, missing: bool) -> None:
    """Tell the rows of all stages their targets and the scale of their gradients; an error if contexts differ.

    With `missing` some stage gave nothing: rows whose scale only it knows are left out.
    """
    known = _Known()
    for part in parts:
        known.learn(part)
    seen = {part.stage: set[bytes]() for part in parts}
    for part in parts:
        seen[part.stage] |= known.keys_of(part)
    if not missing and len({frozenset(keys) for keys in seen.values()}) > 1:
        raise AnisoscopeError(
            "the stages of the pipeline saw different contexts; give each of them the same input_ids, attention_mask "
            "and labels, as arguments of its forward or with rows=."
        )
    for part in parts:
        known.tell(part, missing=missing)


class _Known:
    """What some stage knows of rows, by their contexts and positions."""

    def __init__(self) -> None:
        self._tokens: dict[bytes, RowTokens] = {}
        self._factors: dict[bytes, float] = {}
        self._keys: dict[int, bytes] = {}  # by id of an index, which the parts keep

    def key(self, index: Index) -> bytes:
        if id(index) not in self._keys:
            digest = hashlib.blake2b(index.context.numpy().tobytes(), digest_size=16)
            digest.update(index.position.numpy().tobytes())
            self._keys[id(index)] = digest.digest()
        return self._keys[id(index)]

    def keys_of(self, part: Seen) -> set[bytes]:
        tested = [rows for found in part.rows.test.values() for rows, _ in found]
        fitted = [rows for found in part.rows.fit.values() for rows in found]
        return {self.key(rows.index) for rows in [*fitted, *tested] if len(rows.x)}

    def learn(self, part: Seen) -> None:
        rows = part.rows
        passes = [(one, factor) for found, _, factor in rows.passes for one in found.sites.values()]
        fitted = [(one, math.nan) for found in rows.fit.values() for one in found]
        for one, factor in [*fitted, *passes, *(pair for found in rows.test.values() for pair in found)]:
            if bool((one.tokens.target >= 0).any()):
                self._tokens[self.key(one.index)] = one.tokens
            if not math.isnan(factor):
                self._factors[self.key(one.index)] = factor

    def tell(self, part: Seen, *, missing: bool) -> None:
        rows = part.rows
        rows.fit = {site: [self._told(one) for one in found] for site, found in rows.fit.items()}
        for site, found in list(rows.test.items()):
            told = [(self._told(one), self._factor(one, factor, missing=missing)) for one, factor in found]
            rows.test[site] = [(one, factor) for one, factor in told if not math.isnan(factor)]
        passes = []
        for each, contexts, factor in rows.passes:
            sites = {site: self._told(one) for site, one in each.sites.items()}
            factor = self._factor(next(iter(sites.values())), factor, missing=missing) if sites else 1.0
            passes += [] if math.isnan(factor) else [(replace(each, sites=sites), contexts, factor)]
        rows.passes = passes

    def _told(self, rows: SiteRows) -> SiteRows:
        tokens = self._tokens.get(self.key(rows.index))
        return rows if tokens is None else replace(rows, tokens=tokens)

    def _factor(self, rows: SiteRows, factor: float, *, missing: bool) -> float:
        if not math.isnan(factor) or not len(rows.x):
            return 1.0 if math.isnan(factor) else factor
        found = self._factors.get(self.key(rows.index), math.nan)
        if math.isnan(found) and not missing:
            raise AnisoscopeError(
                "no stage of the pipeline returned the loss from its forward, so the scale of gradients is not known; "
                'say monitor.step(i, loss="mean", tokens=n) or loss="sum" in every process.'
            )
        return found
