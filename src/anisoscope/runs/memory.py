"""How much memory a run will take, said before it starts, and how much it took."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from anisoscope.capture.rows import Rows, Scores
from anisoscope.capture.sites import Site
from anisoscope.numerics.hashing import FOLDS
from anisoscope.runs.bank import Plan
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample

MIB = 1 << 20
_WORKSPACE = 160 * MIB  # blocks of neighbours, spectra and scores, whatever the model


@dataclass(frozen=True)
class Shape:
    """What one context gives at a site."""

    positions: int
    width: int
    heads: int = 1


class ShapeReader:
    """A sink that keeps nothing but the shapes of what comes by: stages of a model differ in width and resolution."""

    def __init__(self) -> None:
        self.shapes: dict[Site, Shape] = {}

    def rows(self, rows: Rows) -> None:
        heads = rows.x.shape[1] if rows.x.dim() == 3 else 1
        self.shapes[rows.site] = Shape(rows.index.length, rows.x.shape[-1], heads)

    def scores(self, scores: Scores) -> None:
        self.shapes[scores.site] = Shape(scores.query.shape[2], 1)


def site_bytes(kind: str, shape: Shape, plan: Plan, *, rows: int) -> int:
    """Bytes of the statistics of one site: fold moments, waiting rows, sample."""
    wanted, width = plan.stats.get(kind, frozenset()), shape.width
    total = 0
    if Moments in wanted:
        total += FOLDS * shape.heads * width * width * (8 + 4)
    if Sample in wanted:
        total += int(1.2 * min(plan.sample_size, rows)) * width * shape.heads * 4
    return total + FOLDS * 2 * 8 * shape.heads * width * 8


def bank_bytes(sites: Sequence[Site], shapes: Mapping[Site, Shape], plan: Plan, *, rows: int) -> int:
    """Bytes of all statistics at once; `rows` are those of the site that has fewest in a context."""
    fewest = min((shapes[s].positions for s in sites if s in shapes), default=1)
    known = [(s, shapes[s]) for s in sites if s in shapes]
    return sum(site_bytes(s.kind, shape, plan, rows=rows * shape.positions // max(fewest, 1)) for s, shape in known)


def activation_bytes(
    shapes: Iterable[Shape], batch: int, *, length: int | None = None, heads: int, item: int = 4
) -> int:
    """A rough bound of what one forward pass holds at a time: a few of its widest rows and one layer's scores.

    `length` are the positions of a context where the shapes come from a shorter one.
    """
    known = list(shapes)
    widest = max(((length or shape.positions) * shape.width * shape.heads for shape in known), default=0)
    attended = length or max((shape.positions for shape in known if shape.heads > 1), default=0)
    return batch * (widest * 24 + heads * attended**2) * item


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
