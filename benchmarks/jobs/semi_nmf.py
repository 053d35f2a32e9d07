"""Semi-NMF: ours beside overcomplete's default, on the same centred rows; and from the fit of a neighbouring step.

The error is ‖X − ZD‖² / ‖X‖² in float64 of what each tool returns; a time counts only at an error that is not higher.
Warm: the same rows a training step later (a small linear change and noise), from the earlier fit.
"""

from __future__ import annotations

import math
import sys
import types
from pathlib import Path
from typing import Any

from alone import Way
from bench import Bench, Entry, Found, Table, size
from sources import Source
from torch import Tensor

SHAPES = ((4096, 384, 8, 20.0), (20_000, 768, 32, 10.0))  # rows, width, rank, times quicker
COLUMNS = ("tool", "seconds", "× ours", "peak MB", "error of the fit", "iterations")
LAYERS = 12
UPDATES = 500
QUIET = tuple(
    (kind, noise, centred)
    for kind in ("sparse", "separable", "heavy")
    for noise in (0.01, 0.05, 0.2)
    for centred in (True, False)
)


def missed(source: Source, found: Found) -> float:
    """‖X − ZD‖² / ‖X‖² in float64, outside the timing; NaN where there is no fit."""
    import numpy as np

    codes, directions = found.array("codes"), found.array("directions")
    if codes is None or directions is None:
        return math.nan
    rows = np.load(source.path).astype(np.float64)
    gap = rows - codes.astype(np.float64) @ directions.astype(np.float64)
    return float((gap**2).sum() / (rows**2).sum())


def ours(x: Tensor, rank: int = 8) -> dict[str, Any]:
    from anisoscope import semi_nmf

    fit = semi_nmf(x, rank)
    return {"codes": fit.codes, "directions": fit.directions, "iterations": fit.iterations}


def overcomplete(x: Tensor, rank: int = 8) -> dict[str, Any]:
    import torch

    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):  # its binary does not fit a torch for the CPU, and only picture models need it
        stand_in: Any = types.ModuleType("torchvision")
        stand_in.transforms = types.ModuleType("torchvision.transforms")
        sys.modules |= {"torchvision": stand_in, "torchvision.transforms": stand_in.transforms}
    from overcomplete.optimization import SemiNMF

    torch.manual_seed(0)
    codes, directions = SemiNMF(rank, device=str(x.device)).fit(x)
    return {"codes": codes, "directions": directions}


def warm(x: Tensor, rank: int = 8) -> dict[str, float]:
    """Iterations on the rows of the next step: from the earlier fit, and from both cold starts."""
    from semi_nmf import trained_on

    from anisoscope import semi_nmf

    later = trained_on(x.cpu()).to(x.device)
    fits = {"warm": semi_nmf(x, rank), "cold": "svd", "random": "random"}
    found = {name: semi_nmf(later, rank, init=start) for name, start in fits.items()}
    iterations = {name: fit.iterations for name, fit in found.items()}
    return iterations | {f"{name}_error": fit.error for name, fit in found.items()}


def batched(x: Tensor, rank: int = 16) -> float:
    """The directions of all layers in one call."""
    from anisoscope.numerics.decompositions import fit_directions

    rows = len(x) // LAYERS
    return float(fit_directions(x[: LAYERS * rows].view(LAYERS, rows, -1), rank).sum())


def one_by_one(x: Tensor, rank: int = 16) -> float:
    from anisoscope.numerics.decompositions import fit_directions

    rows = len(x) // LAYERS
    return float(sum(fit_directions(part, rank).sum() for part in x[: LAYERS * rows].split(rows)))


def updates(x: Tensor, rank: int = 8) -> dict[str, float]:
    """The slow twin: 500 multiplicative updates from k-means."""
    from semi_nmf import multiplicative

    error, _ = multiplicative(x, rank, updates=UPDATES)
    return {"error": error}


WAYS = {
    "anisoscope": Way(ours, "anisoscope.semi_nmf"),
    "overcomplete": Way(overcomplete, "overcomplete SemiNMF, as it comes", "overcomplete"),
    "updates": Way(updates, f"{UPDATES} multiplicative updates"),
    "warm": Way(warm, "anisoscope, the next step"),
    "batched": Way(batched, f"anisoscope, {LAYERS} layers in one call"),
    "one_by_one": Way(one_by_one, f"anisoscope, {LAYERS} layers one by one"),
}


def saved_rows(bench: Bench, n: int, d: int) -> Source:
    """Centred rows of many kinds, in a file."""
    import numpy as np
    from semi_nmf import activations

    n = bench.rows(n)
    path = Path(bench.folder) / f"kinds-{n}x{d}.npy"
    if not path.exists():
        np.save(path, activations(n, d).numpy())
    return Source(n, d, path=str(path))


def fitted(bench: Bench, entry: Entry, n: int, d: int, *, rank: int, bar: float) -> None:
    source = saved_rows(bench, n, d)
    mine = bench.time("semi_nmf", "anisoscope", source, rank=rank)
    theirs = bench.time("semi_nmf", "overcomplete", source, rank=rank)
    table = Table(f"{size(source)}, rank {rank}", columns=COLUMNS)
    errors = [missed(source, one) for one in (mine, theirs)]
    for one, error in zip((mine, theirs), errors, strict=True):
        table.add(one, ours=mine, **{"error of the fit": error, "iterations": one.result.get("iterations")})
    entry.tables.append(table)
    entry.check(f"times quicker than overcomplete, rank {rank}", theirs.seconds / mine.seconds, least=bar)
    entry.check(f"error over overcomplete's, rank {rank}", errors[0] / errors[1], most=1.001)
    next_step = bench.time("semi_nmf", "warm", source, once=True, rank=rank).result
    share = max(1.0, next_step["warm"])
    entry.check(f"iterations from a random start over warm ones, rank {rank}", next_step["random"] / share, least=3)
    entry.check(f"iterations from our own cold start over warm ones, rank {rank}", next_step["cold"] / share, least=3)
    entry.check(f"error warm over cold, rank {rank}", next_step["warm_error"] / next_step["cold_error"], most=1.01)


def beside_updates(bench: Bench, entry: Entry) -> None:
    """Concepts with little noise, about the origin and away from it: error and time beside the updates of the paper."""
    import numpy as np
    from semi_nmf import planted

    worst, least = 0.0, math.inf
    for kind, noise, centred in QUIET:
        path = Path(bench.folder) / f"concepts-{kind}-{noise}-{centred}.npy"
        if not path.exists():
            np.save(path, planted(4096, 384, 8, kind=kind, noise=noise, centred=centred).numpy())
        source = Source(4096, 384, path=str(path))
        mine = bench.time("semi_nmf", "anisoscope", source, rank=8)
        slow = bench.time("semi_nmf", "updates", source, once=True, rank=8)
        worst = max(worst, missed(source, mine) / slow.result["error"] - 1.0)
        least = min(least, slow.seconds / mine.seconds)
    entry.check(f"error over {UPDATES} multiplicative updates, the worst of {len(QUIET)}", worst, most=1e-6)
    entry.check(f"times quicker than {UPDATES} multiplicative updates, the least of {len(QUIET)}", least, least=20)


def run(bench: Bench) -> Entry:
    entry = Entry("Semi-NMF", __doc__ or "")
    if not bench.cuda:
        beside_updates(bench, entry)
    for n, d, rank, bar in SHAPES:
        fitted(bench, entry, n, d, rank=rank, bar=bar)
    if bench.cuda:
        source = bench.cloud(LAYERS * 4096, 768)
        mine, apart = (bench.time("semi_nmf", name, source, rank=16) for name in ("batched", "one_by_one"))
        table = Table(f"{LAYERS} layers of {source.n // LAYERS:,} × {source.d}, rank 16", columns=COLUMNS)
        for one in (mine, apart):
            table.add(one, ours=mine)
        entry.tables.append(table)
        entry.check("times quicker in one call than one by one", apart.seconds / mine.seconds, least=1)
    return entry
