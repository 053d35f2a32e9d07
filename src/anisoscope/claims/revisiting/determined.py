"""Whether the directions that a verdict rests on are determined by the contexts they were fitted on.

Intervals of energies contain the fit of the directions, by refits without each eighth of the contexts. Where
eigenvalues are nearly tied at the rank, or contexts are few for it, refits turn far and the energy of the fitted
directions lies systematically off that of the population: no interval around it is honest. `proxy_stability`, the mean
squared cosine between the proxy and its refits, tells: in simulations (docs/tangent.md) intervals cover as they promise
above STABLE and often do not below.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from anisoscope.claims.engine.claim import UNDETERMINED
from anisoscope.claims.engine.evidence import Cell, Run, figure

METRIC = "proxy_stability"
STABLE = 0.97


def undetermined(run: Run, cells: Iterable[Cell], **options: Any) -> dict[str, str]:
    """The reason, as an option of `Part.of`, why directions leave it open; {} where they do not, or it is not known."""
    rows = run.tangent(METRIC, **options)
    known = [rows[cell].value for cell in cells if cell in rows and math.isfinite(rows[cell].value)]
    if not known or fmean(known) >= STABLE:
        return {}
    what = "types" if "of" in options else "contexts"  # rows of an embedding table are resampled by type
    kept = f"refits without an eighth of the {what} keep {figure(fmean(known))} of it, and {STABLE:g} are needed"
    return {"reason": f"{UNDETERMINED} ({kept})"}
