"""What it gains that the sites of a measured step share the resamplings of token types: CPU time, together and apart.

    OMP_NUM_THREADS=1 python benchmarks/type_spread.py --types 4157 --sites 14

Five numbers of each site (four correlations and an exponent) have bootstrap intervals and permutations over the same
types; together means one call for all of them, apart one call for each, as it was before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from record import record

from anisoscope.metrics.frequency import Points, TypeSpread, beta_points, resampled, spread_points


def points_of(types: int, sites: int) -> list[Points]:
    """What the sites of one step are asked: every correlation, and the exponent."""
    generator = torch.Generator().manual_seed(0)
    frequency = torch.rand(types, generator=generator, dtype=torch.float64) * 8
    found = []
    for _ in range(sites):
        noise, norm = torch.randn(2, types, generator=generator, dtype=torch.float64)
        one = TypeSpread(frequency, (0.3 * noise - 0.1 * frequency).exp(), norm.abs() + 1)
        ways = [(method, normalised) for normalised in (False, True) for method in ("pearson", "spearman")]
        found += [*(spread_points(one, method=m, normalised=n) for m, n in ways), beta_points(one)]
    return found


def seconds(act: Callable[[], Any]) -> float:
    start = time.process_time()
    act()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"types": 4157, "sites": 14, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    chosen = parser.parse_args()
    points = points_of(chosen.types, chosen.sites)
    times: dict[str, list[float]] = {"together": [], "apart": []}
    for _ in range(chosen.repeats):
        times["together"].append(seconds(lambda: resampled(points)))
        times["apart"].append(seconds(lambda: [resampled([one]) for one in points]))
    together, apart = (statistics.median(times[how]) for how in ("together", "apart"))
    record(
        f"Monitoring: spread of {chosen.types:,} types at {chosen.sites} sites",
        about="Correlations of frequency and spread with bootstrap intervals and permutations, 999 draws: all numbers "
        "of all sites from one set of resamplings, beside a set for each number; CPU time with one thread, medians in "
        "turns.",
        command="OMP_NUM_THREADS=1 python benchmarks/type_spread.py " + " ".join(sys.argv[1:]),
        figures={"together_s": together, "apart_s": apart, "ratio": apart / together},
        bars={},
    )


if __name__ == "__main__":
    main()
