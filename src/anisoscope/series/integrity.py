"""Detects damaged, repeated or misordered checkpoints of a series from their weights.

Notation: x_i a sketch of the weights of checkpoint i (a fixed sample of their entries), d_ij = ‖x_i − x_j‖, and
L = Σ d_{i,i+1} the length of the path through the series in its order. Weights drift away from their earlier values in
training, so that exchanging two checkpoints in the right places makes the path longer, and exchanging two that were
swapped makes it shorter.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.models.checkpoint import HEADLESS

MISSING, UNREADABLE, LEFT_OUT = "missing: ", "unreadable: ", " was left out: "
FAILED = "failed: "  # its job was lost, more often than it is tried again
NON_FINITE, REPEATED = "non-finite weights", "repeated: "
AGAIN = "copy it again"  # how the sentence about a damaged file ends
RESUME = ", and the same command with --resume goes on"
Entry = dict[str, Any]  # what is known of one checkpoint; entries with a fingerprint have been measured
HELD = 1 << 26  # entries of all sketches that are held at a time: 256 MB
COLUMNS = 1 << 13  # entries that are multiplied at a time
SKETCH = 1 << 18  # entries sampled of each checkpoint
FEWEST = 3  # checkpoints needed to judge their order
ALIKE = 0.5  # share of the larger sketch that two must have in common to be compared
MARGIN = 0.02  # least share of the possible saving for an exchange; see docs/series.md for how it was chosen
SAME = 1e-6  # relative difference below which two lengths are equal
TREMBLING = 3.0  # over √entries: twice the saving seen with weights that only fluctuate


def sketch(model: nn.Module, size: int = SKETCH) -> dict[str, Tensor]:
    """A fixed sample of the entries of a model's weights, by parameter name without the prefix of the base model.

    The choice depends on name and size alone, so that it is the same for all checkpoints of a series.
    """
    prefix = str(getattr(model, "base_model_prefix", "") or "")
    named = {name.removeprefix(f"{prefix}."): p for name, p in model.named_parameters() if not p.is_meta}
    total = sum(p.numel() for p in named.values())
    share = min(1.0, size / total) if total else 0.0
    out: dict[str, Tensor] = {}
    for name, p in sorted(named.items()):
        flat = p.detach().reshape(-1)
        few = len(flat) if share == 1.0 else int(len(flat) * share)
        if few < len(flat):
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name}|{len(flat)}".encode()))
            flat = flat[torch.randint(len(flat), (few,), generator=generator).to(flat.device)]
        if few:
            out[name] = flat.float().cpu()
    return out


def is_finite(model: nn.Module) -> bool:
    """Whether every weight is a number; offloaded weights are left out."""
    return all(bool(p.isfinite().all()) for p in model.parameters() if not p.is_meta)


@dataclass(frozen=True)
class Distances:
    """Distances d [n, n], and the effective number of entries: entries that hardly change count as less than one."""

    d: Tensor
    entries: float

    @property
    def margin(self) -> float:
        """The share that an exchange must save to be significant."""
        return max(MARGIN, TREMBLING / math.sqrt(max(1.0, self.entries)))


def distances(sketches: Sequence[Mapping[str, Tensor]]) -> Distances | None:
    """Distances over the common entries; None if the models have too few of them in common."""
    return distances_of(len(sketches), sketches.__getitem__)


def distances_of(count: int, read: Callable[[int], Mapping[str, Tensor]]) -> Distances | None:
    """As `distances`, of sketches that are read one at a time; of many, as many entries are kept as fit in memory."""
    if count < FEWEST:
        return None
    sizes: dict[str, int] | None = None
    largest = 0
    for i in range(count):
        of_one = {name: len(value) for name, value in read(i).items()}
        largest = max(largest, sum(of_one.values()))
        known = of_one if sizes is None else sizes
        sizes = {name: size for name, size in known.items() if of_one.get(name) == size}
    kept = sum((sizes or {}).values())
    if sizes is None or kept < ALIKE * largest:
        return None
    step = -(-kept * count // HELD)  # every step-th entry
    rows = torch.stack([torch.cat([read(i)[name] for name in sizes])[::step] for i in range(count)])
    gram, spread = torch.zeros(count, count, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for block in rows.split(COLUMNS, dim=1):
        centred = block.double() - block.double().mean(0)  # small numbers: their products lose little
        gram += centred @ centred.T
        variance = centred.square().sum(0) / max(1, count - 1)
        spread += torch.stack([variance.sum(), variance.square().sum()])
    squares = gram.diagonal()
    d = (squares[:, None] + squares - 2 * gram).clamp_min(0).sqrt() * math.sqrt(step)
    d.fill_diagonal_(0.0)
    entries = float(spread[0] ** 2 / spread[1]) if float(spread[1]) > 0 else 0.0
    return Distances(d, entries)


@dataclass(frozen=True)
class Exchange:
    """Two positions of a series whose checkpoints are swapped; `saved` is the share of the possible saving."""

    first: int
    second: int
    saved: float


def saving(d: Tensor, order: Sequence[int], i: int, j: int) -> float:
    """How much shorter the path becomes if the i-th and the j-th exchange places, relative to the most possible (±1).

    By the triangle inequality each affected edge changes by at most d_ij.

    >>> straight = torch.arange(4.0)[:, None]
    >>> d = (straight - straight.T).abs()
    >>> saving(d, [0, 1, 2, 3], 1, 2), saving(d, [0, 2, 1, 3], 1, 2)
    (-1.0, 1.0)
    """
    shorter, most = _shortening(d, order, i, j)
    return shorter / most if most > 0 else 0.0


def _shortening(d: Tensor, order: Sequence[int], i: int, j: int) -> tuple[float, float]:
    """(how much shorter the path becomes, the most that is possible), in the units of d."""
    new = list(order)
    new[i], new[j] = new[j], new[i]
    edges = [k for k in sorted({i - 1, i, j - 1, j}) if 0 <= k < len(order) - 1]
    if j == i + 1:
        edges = [k for k in edges if k != i]  # the edge between the two stays
    before = math.fsum(float(d[order[k], order[k + 1]]) for k in edges)
    after = math.fsum(float(d[new[k], new[k + 1]]) for k in edges)
    return before - after, len(edges) * float(d[order[i], order[j]])


def exchanges(d: Tensor, margin: float = MARGIN) -> list[Exchange]:
    """The swapped pairs of a series, clearest first: exchanging them saves more than the share `margin`.

    Greedily exchanges the pair that shortens the path most. A path is as long backwards, so that of exchanges with
    equal savings the one of the nearest positions is taken.
    """
    order = list(range(len(d)))
    found: list[Exchange] = []
    while len(found) < len(order) // 2:
        gains = _shortenings(d[order][:, order])
        best = float(gains.max())
        if best <= 0:
            break
        near = (gains >= best * (1 - SAME)).nonzero().tolist()
        i, j = min(near, key=lambda pair: pair[1] - pair[0])
        saved = saving(d, order, i, j)
        if saved <= margin:
            break
        found.append(Exchange(i, j, saved))
        order[i], order[j] = order[j], order[i]
    return found


def _shortenings(d: Tensor) -> Tensor:
    """[n, n]: how much shorter the path 0, 1, … becomes if i and j > i exchange places; −inf elsewhere."""
    n = len(d)
    before, after = torch.zeros_like(d), torch.zeros_like(d)  # [i, j]: from the neighbour of i to j
    before[1:], after[:-1] = d[:-1], d[1:]
    left, right = before.diagonal(), after.diagonal()
    gains = (left + right)[:, None] + left + right - (before + after) - (before + after).T
    first = torch.arange(n - 1)  # neighbours keep the edge between them
    gains[first, first + 1] = left[:-1] + right[1:] - before[first, first + 1] - after[first + 1, first]
    return gains.masked_fill(~torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)


def is_lost(flag: str) -> bool:
    """Whether a flag says that the checkpoint could not be loaded or its job failed; a resumed sweep tries it again."""
    return flag.startswith((MISSING, UNREADABLE, FAILED))


def reason(flag: str) -> str:
    """The reason in a flag of a checkpoint that could not be loaded, without its prefix."""
    return flag.removeprefix(MISSING).removeprefix(UNREADABLE).removeprefix(FAILED)


def resumable(error: Exception | str) -> str:
    """The message of a loading error; for a damaged file it adds that --resume continues the sweep.

    >>> resumable(ValueError("'a.pt' is cut off or damaged; copy it again."))
    "'a.pt' is cut off or damaged; copy it again, and the same command with --resume goes on."
    """
    text = str(error).rstrip(".")
    return f"{text}{RESUME}." if text.endswith(AGAIN) else str(error)


def warnings_of(entries: Sequence[Entry]) -> list[str]:
    """The warnings at the end of the command: flags of the checkpoints, then their notes."""
    warnings: list[str] = []
    for entry in entries:
        lost = [f"{entry['label']}{LEFT_OUT}{reason(flag)}" for flag in entry["flags"] if is_lost(flag)]
        warnings += lost or [f"{entry['label']}: {flag}" for flag in entry["flags"]]
    loaded = [entry for entry in entries if "notes" in entry]
    headless = [entry["label"] for entry in loaded if HEADLESS in entry["notes"]]  # listed unless all are
    headless_note = HEADLESS if len(headless) == len(loaded) else f"{', '.join(headless)}: {HEADLESS}"
    notes = [headless_note if note == HEADLESS else note for entry in loaded for note in entry["notes"]]
    return [*warnings, *(note for note in dict.fromkeys(notes) if note not in warnings)]
