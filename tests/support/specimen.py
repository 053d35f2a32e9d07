"""What is planted for one claim: a table on which it must hold, tables without the effect, and the opposite of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from anisoscope.claims.catalogue import evaluate_claims
from anisoscope.claims.engine.claim import Verdict
from anisoscope.results.query import Table


class Specimen(NamedTuple):
    """The tables of one claim."""

    planted: Callable[[], Table]  # the claim must hold on every subject
    nulls: Mapping[str, Callable[[int], Table]]  # by the kind of nothing; of a seed: it must hold in 5 % at most
    opposite: Callable[[], Table] | None  # the claim must fail on some subject; None where nothing could contradict it


def leading(table: Table, claim: str) -> list[Verdict]:
    """The verdict on every subject: over all seeds where there are several."""
    found: dict[str, Verdict] = {}
    for verdict in evaluate_claims(table, [claim]):
        found.setdefault(verdict.subject, verdict)
    return list(found.values())


def held(claim: str, null: Callable[[int], Table], seeds: Iterable[int]) -> int:
    """On how many seeds of a null the claim holds, on the subject where it does so most often."""
    counts = Counter(v.subject for seed in seeds for v in leading(null(seed), claim) if v.status == "holds")
    return max(counts.values(), default=0)
