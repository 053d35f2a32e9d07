"""What is wrong with the checkpoints of a series, told from their weights.

Notation: x_i a sketch of the weights of checkpoint i (a fixed sample of their entries), d_ij = ‖x_i − x_j‖, and
L = Σ d_{i,i+1} the length of the path through the series in its order. Weights in training move away from where they
were, so that exchanging two checkpoints that are in their right places makes the path longer, and exchanging two that
were swapped makes it shorter.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.models.checkpoint import HEADLESS

MISSING, UNREADABLE, LEFT_OUT = "missing: ", "unreadable: ", " was left out: "
NON_FINITE, REPEATED = "non-finite weights", "repeated: "
AGAIN = "copy it again"  # how the sentence about a damaged file ends
RESUME = ", and the same command with --resume goes on"
Entry = dict[str, Any]  # what is known of one checkpoint; those with a fingerprint were loaded and are done
SKETCH = 1 << 18  # numbers kept of each checkpoint
FEWEST = 3  # checkpoints that have an order
ALIKE = 0.5  # share of the larger sketch that two must have in common to be compared
MARGIN = 0.02  # of the most that an exchange can save: see docs/series.md for how it was chosen
SAME = 1e-6  # relative: two lengths that differ by less are one
TREMBLING = 3.0  # over √entries: twice what weights that only tremble have shown


def sketch(model: nn.Module, size: int = SKETCH) -> dict[str, Tensor]:
    """A fixed sample of the entries of a model's weights, by the name that they have within the body.

    Which entries depends on name and shape alone, so that all checkpoints of a series give the same ones.
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
    """d [n, n], and over how many entries: those that hardly move count as less than one."""

    d: Tensor
    entries: float

    @property
    def margin(self) -> float:
        """What an exchange must save to be more than chance."""
        return max(MARGIN, TREMBLING / math.sqrt(max(1.0, self.entries)))


def distances(sketches: Sequence[Mapping[str, Tensor]]) -> Distances | None:
    """Distances over the entries that all have; None where the models are too different to be compared."""
    if len(sketches) < FEWEST:
        return None
    sizes = [{name: len(value) for name, value in found.items()} for found in sketches]
    common = [name for name in sizes[0] if all(s.get(name) == sizes[0][name] for s in sizes)]
    kept = sum(sizes[0][name] for name in common)
    if kept < ALIKE * max(sum(s.values()) for s in sizes):
        return None
    rows = torch.stack([torch.cat([found[name] for name in common]) for found in sketches])
    d = torch.stack([(rows - row).double().norm(dim=1) for row in rows])
    spread = rows.var(0).double()
    entries = float(spread.sum() ** 2 / spread.square().sum()) if bool(spread.any()) else 0.0
    return Distances(d, entries)


@dataclass(frozen=True)
class Exchange:
    """Two places of a series whose checkpoints are in each other's; `saved` is the share of what could be saved."""

    first: int
    second: int
    saved: float


def saving(d: Tensor, order: Sequence[int], i: int, j: int) -> float:
    """How much shorter the path becomes when the i-th and the j-th exchange places: from −1 to 1.

    By the triangle inequality each edge that changes its end from one to the other changes by at most d_ij.

    >>> straight = torch.arange(4.0)[:, None]
    >>> d = (straight - straight.T).abs()
    >>> saving(d, [0, 1, 2, 3], 1, 2), saving(d, [0, 2, 1, 3], 1, 2)
    (-1.0, 1.0)
    """
    new = list(order)
    new[i], new[j] = new[j], new[i]
    edges = [k for k in sorted({i - 1, i, j - 1, j}) if 0 <= k < len(order) - 1]
    if j == i + 1:
        edges = [k for k in edges if k != i]  # the edge between the two stays
    before = math.fsum(float(d[order[k], order[k + 1]]) for k in edges)
    after = math.fsum(float(d[new[k], new[k + 1]]) for k in edges)
    most = len(edges) * float(d[order[i], order[j]])
    return (before - after) / most if most > 0 else 0.0


def exchanges(d: Tensor, margin: float = MARGIN) -> list[Exchange]:
    """The swapped pairs of a series, the clearest first: exchanging them saves more than `margin` of what it could.

    Of all pairs the one that shortens the path most is exchanged, and so on while one is clear. A path is as long
    backwards, so that of several exchanges that save the same the one of the nearest places is taken.
    """
    order = list(range(len(d)))
    found: list[Exchange] = []
    while len(found) < len(order) // 2:
        pairs = [(i, j) for i in range(len(order)) for j in range(i + 1, len(order))]
        gains = {(i, j): _gain(d, order, i, j) for i, j in pairs}
        best = max(gains.values(), default=0.0)
        if best <= 0:
            break
        i, j = min((p for p in pairs if gains[p] >= best * (1 - SAME)), key=lambda p: p[1] - p[0])
        saved = saving(d, order, i, j)
        if saved <= margin:
            break
        found.append(Exchange(i, j, saved))
        order[i], order[j] = order[j], order[i]
    return found


def _gain(d: Tensor, order: Sequence[int], i: int, j: int) -> float:
    """What the exchange saves of the path, in the units of d."""
    number = sum(0 <= k < len(order) - 1 for k in {i - 1, i, j - 1, j}) - (j == i + 1)
    return saving(d, order, i, j) * number * float(d[order[i], order[j]])


def is_lost(flag: str) -> bool:
    """Whether a flag says that the checkpoint could not be loaded: it is tried again when the sweep goes on."""
    return flag.startswith((MISSING, UNREADABLE))


def reason(flag: str) -> str:
    """Why a checkpoint could not be loaded, without the word for it."""
    return flag.removeprefix(MISSING).removeprefix(UNREADABLE)


def resumable(error: Exception) -> str:
    """What is wrong with a checkpoint; of a damaged file with the word that a sweep goes on once it is whole.

    >>> resumable(ValueError("'a.pt' is cut off or damaged; copy it again."))
    "'a.pt' is cut off or damaged; copy it again, and the same command with --resume goes on."
    """
    text = str(error).rstrip(".")
    return f"{text}{RESUME}." if text.endswith(AGAIN) else str(error)


def warnings_of(entries: Sequence[Entry], late: Mapping[int, Sequence[str]]) -> list[str]:
    """What the end of the command says of the checkpoints: their flags, then what was noticed on the way."""
    out: list[str] = []
    for entry in entries:
        flags = [*entry["flags"], *late.get(entry["key"], ())]
        lost = [f"{entry['label']}{LEFT_OUT}{reason(flag)}" for flag in flags if is_lost(flag)]
        out += lost or [f"{entry['label']}: {flag}" for flag in flags]
    loaded = [entry for entry in entries if "notes" in entry]
    headless = [entry["label"] for entry in loaded if HEADLESS in entry["notes"]]  # they are named unless all are
    named = HEADLESS if len(headless) == len(loaded) else f"{', '.join(headless)}: {HEADLESS}"
    notes = [named if note == HEADLESS else note for entry in loaded for note in entry["notes"]]
    return [*out, *(note for note in dict.fromkeys(notes) if note not in out)]
