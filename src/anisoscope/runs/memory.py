"""How much memory a run will take, said before it starts, and how much it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psutil

from anisoscope.capture.sites import Site
from anisoscope.numerics.hashing import FOLDS
from anisoscope.runs.bank import Plan
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample

MIB = 1 << 20
_WORKSPACE = 160 * MIB  # blocks of neighbours, spectra and scores, whatever the model


def site_bytes(kind: str, width: int, plan: Plan, *, rows: int, heads: int = 1) -> int:
    """Bytes of the statistics of one site: fold moments, waiting rows, sample."""
    wanted = plan.stats.get(kind, frozenset())
    per_head = heads if kind in ("query", "key") else 1
    total = 0
    if Moments in wanted:
        total += FOLDS * per_head * width * width * (8 + 4)
    if Sample in wanted:
        total += int(1.2 * min(plan.sample_size, rows)) * width * per_head * 4
    return total + FOLDS * 2 * 8 * per_head * width * 8


def bank_bytes(sites: Sequence[Site], widths: Mapping[str, int], plan: Plan, *, rows: int, heads: int) -> int:
    """Bytes of all statistics at once."""
    return sum(site_bytes(s.kind, widths.get(s.kind, widths["resid"]), plan, rows=rows, heads=heads) for s in sites)


def activation_bytes(width: int, batch: int, context: int, *, heads: int, item: int = 4) -> int:
    """A rough bound of what one forward pass holds at a time: a few wide rows and one layer's scores."""
    return batch * context * (width * 24 + heads * context) * item


def run_bytes(bank: int, activations: int) -> int:
    """What the process will hold at most: what it holds now (the model is loaded), and all that is still to come."""
    return int(psutil.Process().memory_info().rss) + bank + activations + _WORKSPACE


def passes(sites: Sequence[Site], size: int, budget: int) -> list[list[Site]]:
    """The sites in as few groups as keep each group's statistics within the budget; whole layers stay together."""
    count = max(1, -(-size // max(1, budget)))
    layers = sorted({(s.stack, s.layer) for s in sites})
    step = max(1, -(-len(layers) // count))
    groups = [set(layers[i : i + step]) for i in range(0, len(layers), step)]
    return [[s for s in sites if (s.stack, s.layer) in group] for group in groups]


def available() -> int:
    return int(psutil.virtual_memory().available)


class PeakMemory:
    """The process's resident memory at its highest, over what it was at the start."""

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.start = self.peak = self.process.memory_info().rss

    def look(self) -> int:
        self.peak = max(self.peak, self.process.memory_info().rss)
        return self.peak
