"""Means and standard deviations of the estimators of intrinsic dimension on flat Gaussian clouds of known dimension.

    python benchmarks/calibrate_dimension.py --cache cells.json    # an hour on one core; goes on where it stopped

Writes src/anisoscope/metrics/calibration.json, from which two_nn is calibrated and its errors are stated.
Notation: d the true dimension, n the rows of the cloud, q ≤ n of its rows (queries) whose neighbours are looked at.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from anisoscope.metrics.dimension import DIMENSIONS, ESTIMATORS, SIZES, gride, levina_bickel, two_nn
from anisoscope.metrics.engine.folds import Neighbours

NEIGHBOURS = 20
MOST_QUERIES = 8192
ROWS = {256: 160_000, 1024: 160_000, 4096: 160_000, 16_384: 98_304, 65_536: 49_152}  # queries of a cell, all clouds
_SMALL = 8  # dimensions up to which a tree is quicker than products, and its distances need no repair
TABLE = Path(__file__).parents[1] / "src/anisoscope/metrics/calibration.json"


def distances(cloud: Tensor, queries: int) -> Tensor:
    """Distances of the first rows of a cloud to their nearest others [q, 20], in float64."""
    if cloud.shape[1] <= _SMALL:
        from scipy.spatial import cKDTree

        found, _ = cKDTree(cloud.numpy()).query(cloud[:queries].numpy(), NEIGHBOURS + 1)
        return torch.as_tensor(found[:, 1:])
    single, parts = cloud.float(), []
    squares = single.square().sum(1)
    for start in range(0, queries, 128):
        mine = torch.arange(start, min(start + 128, queries))
        squared = torch.addmm(squares.unsqueeze(0), single[mine], single.T, alpha=-2.0)
        squared[torch.arange(len(mine)), mine] = torch.inf
        near = squared.topk(NEIGHBOURS + 2, dim=1, largest=False).indices
        gap = torch.linalg.vector_norm(cloud[near] - cloud[mine].unsqueeze(1), dim=2)
        parts.append(gap.sort(dim=1).values[:, :NEIGHBOURS])
    return torch.cat(parts)


def estimates(near: Tensor) -> dict[str, float]:
    """Every estimator on the same distances."""
    graph = Neighbours(near, torch.zeros_like(near, dtype=torch.int64), NEIGHBOURS)
    found = {f"gride:scale={k}": gride.function(graph, scale=k) for k in (2, 4, 8)}
    ways = {"two_nn": "slope", "two_nn:method=ml": "ml"}
    found |= {name: two_nn.function(graph, method=method) for name, method in ways.items()}
    return {**found, "levina_bickel": levina_bickel.function(graph)}


def cell(dimension: int, n: int) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation (scaled to all n rows) of each estimator over independent clouds."""
    queries = min(n, MOST_QUERIES)
    runs = []
    for seed in range(max(2, ROWS[n] // queries)):
        generator = torch.Generator().manual_seed(1_000_003 * dimension + 1009 * n + seed)
        cloud = torch.randn(n, dimension, generator=generator, dtype=torch.float64)
        runs.append(estimates(distances(cloud, queries)))
    out = {}
    for name in ESTIMATORS:
        values = torch.tensor([run[name] for run in runs], dtype=torch.float64)
        out[name] = float(values.mean()), float(values.std()) * math.sqrt(queries / n)
    return out


def rows_of(cells: dict[str, dict[str, tuple[float, float]]], name: str, part: int) -> list[list[float]]:
    """One line of the table for each dimension, one column for each number of rows, to four digits."""
    return [[float(f"{cells[f'{d}/{n}'][name][part]:.4g}") for n in SIZES] for d in DIMENSIONS]


def write_table(cells: dict[str, dict[str, tuple[float, float]]], path: Path) -> None:
    """The table as JSON, a line of numbers on a line of the file."""
    lines = [' "made_by": "benchmarks/calibrate_dimension.py"']
    lines += [f' "dimensions": {json.dumps(DIMENSIONS)}', f' "sizes": {json.dumps(SIZES)}']
    for part, title in enumerate(("mean", "sd")):
        tables = []
        for name in ESTIMATORS:
            rows = ",\n".join(f"   {json.dumps(row)}" for row in rows_of(cells, name, part))
            tables.append(f"  {json.dumps(name)}: [\n{rows}\n  ]")
        lines.append(f' "{title}": {{\n' + ",\n".join(tables) + "\n }")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path("calibration-cells.json"))
    cache = parser.parse_args().cache
    cells = json.loads(cache.read_text()) if cache.is_file() else {}
    for n in SIZES:
        for dimension in DIMENSIONS:
            if f"{dimension}/{n}" not in cells:
                cells[f"{dimension}/{n}"] = cell(dimension, n)
                cache.write_text(json.dumps(cells))
                print(dimension, n, cells[f"{dimension}/{n}"]["two_nn"], flush=True)
    write_table(cells, TABLE)


if __name__ == "__main__":
    main()
