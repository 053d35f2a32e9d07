"""How much memory a run will take, said before it starts, and how much it took."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from anisoscope.capture.rows.row import Rows, Scores
from anisoscope.capture.sites.site import Site
from anisoscope.measurement.bank import Plan
from anisoscope.measurement.site_plan import COUNTED
from anisoscope.numerics.hashing import FOLDS
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample

MIB = 1 << 20
_WORKSPACE = 90 * MIB  # blocks of neighbours, spectra and scores for two cores, whatever the model
_CONVOLVED = ("stage", "stage_mean")


@dataclass(frozen=True)
class SiteShape:
    """What one context gives at a site."""

    positions: int
    width: int
    heads: int = 1


class ShapeReader:
    """A sink that keeps nothing but the shapes of what comes by: stages of a model differ in width and resolution."""

    def __init__(self) -> None:
        self.shapes: dict[Site, SiteShape] = {}

    def rows(self, rows: Rows) -> None:
        heads = rows.x.shape[1] if rows.x.dim() == 3 else 1
        self.shapes[rows.site] = SiteShape(rows.index.length, rows.x.shape[-1], heads)

    def scores(self, scores: Scores) -> None:
        self.shapes[scores.site] = SiteShape(scores.query.shape[2], 1)


@dataclass(frozen=True)
class Amount:
    """How much data a run will read: contexts, and how many times longer they are than those of the shapes."""

    contexts: int
    longer: float = 1.0

    def rows(self, shape: SiteShape) -> int:
        return round(self.contexts * (shape.positions * self.longer if shape.positions > 1 else 1))


def amount_of(sites: Sequence[Site], shapes: Mapping[Site, SiteShape], *, tokens: int, length: int | None) -> Amount:
    """The data of `tokens` rows; `length` are the positions of a context where the shapes come from a shorter one."""
    counted = [shapes[s].positions for s in sites if s in shapes and s.kind in COUNTED]
    counted = counted or [shapes[s].positions for s in sites if s in shapes] or [1]
    longer = length / max(counted) if length else 1.0
    return Amount(max(1, -(-tokens // max(1, length or min(counted)))), longer)


def site_bytes(kind: str, shape: SiteShape, plan: Plan, *, amount: Amount) -> int:
    """Bytes of the statistics of one site: fold moments, waiting rows (a cell is half full on average), sample."""
    wanted, width, rows = plan.stats.get(kind, frozenset()), shape.width, amount.rows(shape)
    folds, total = min(FOLDS, amount.contexts), 0
    if Moments in wanted:
        total += folds * shape.heads * width * width * 8
        total += min(rows, folds * width) // 2 * shape.heads * width * 4
    if Sample in wanted:
        total += int(1.2 * min(plan.sample_size, rows)) * width * shape.heads * 4
    return total + FOLDS * 2 * 8 * shape.heads * width * 8


def bank_bytes(sites: Sequence[Site], shapes: Mapping[Site, SiteShape], plan: Plan, *, amount: Amount) -> int:
    """Bytes of all statistics at once."""
    return sum(site_bytes(s.kind, shapes[s], plan, amount=amount) for s in sites if s in shapes)


def evaluation_bytes(sites: Sequence[Site], shapes: Mapping[Site, SiteShape], plan: Plan, *, amount: Amount) -> int:
    """What computing the metrics of the widest site takes beside the bank, as measured.

    24 d×d matrices in float64 (moments without each fold, their spectra) and 7 copies of the sampled rows.
    """

    def needed(site: Site, shape: SiteShape) -> int:
        wanted, rows = plan.stats.get(site.kind, frozenset()), min(plan.looked_at, amount.rows(shape))
        matrices = 24 * shape.width**2 * 8 if Moments in wanted else 0
        return matrices + (7 * rows * shape.width * 4 if Sample in wanted else 0)

    return _WORKSPACE + max((needed(s, shapes[s]) for s in sites if s in shapes), default=0)


def activation_bytes(
    shapes: Mapping[Site, SiteShape], batch: int, *, longer: float = 1.0, heads: int, item: int = 4
) -> int:
    """What one forward pass holds at a time, as measured: many of its widest rows, and scores that are written out.

    A block with a feed-forward part of four times the width holds some 32 rows of the width for every position, a
    convolution 8. `heads` are those whose scores T×T the model writes out: 0 with fused attention.
    """
    long = {site: shape.positions * longer for site, shape in shapes.items()}
    widest = max(
        ((8 if s.kind in _CONVOLVED else 32) * long[s] * shape.width * shape.heads for s, shape in shapes.items()),
        default=0.0,
    )
    attended = max((long[s] for s in shapes if s.kind not in _CONVOLVED), default=0.0)
    return int(batch * (widest + (2 * heads + 1) * attended**2) * item)


def run_bytes(bank: int, work: int, *, reached: int = 0) -> int:
    """What the process will hold at most: what it holds now (the model is loaded) and what is still to come.

    `reached` is the most that it held so far, while it read the weights and the first of the data.
    """
    return max(reached, int(psutil.Process().memory_info().rss) + bank + work)


def passes(sites: Sequence[Site], size: int, budget: int) -> list[list[Site]]:
    """The sites in as few groups as keep each group's statistics within the budget; whole layers stay together."""
    count = max(1, -(-size // max(1, budget)))
    layers = sorted({(s.stack, s.layer) for s in sites})
    step = max(1, -(-len(layers) // count))
    groups = [set(layers[i : i + step]) for i in range(0, len(layers), step)]
    return [[s for s in sites if (s.stack, s.layer) in group] for group in groups]


def available() -> int:
    return int(psutil.virtual_memory().available)


def _highest() -> int:
    """The most resident memory that the process ever held, as the system counts it; 0 where it does not."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)


class PeakMemory:
    """The process's resident memory at its highest since the start: the system's own count where it rose since then.

    What was held between two looks is in that count too; a higher one from before the start says nothing.
    """

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.start = self.peak = self.process.memory_info().rss
        self._before = _highest()

    def look(self) -> int:
        highest = _highest()
        self.peak = max(self.peak, self.process.memory_info().rss, highest if highest > self._before else 0)
        return self.peak
