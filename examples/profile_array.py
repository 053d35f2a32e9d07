"""The geometry of any n×d array: one call for each metric, each with an interval.

python examples/profile_array.py
"""

from __future__ import annotations

import numpy as np

import anisoscope

random = np.random.default_rng(0)
# 4,000 rows on a curved surface of dimension 2 inside 64 dimensions, all pushed in one direction:
# 500 contexts of 8 rows; rows of one context share an offset, so they are not independent
contexts = np.repeat(np.arange(500), 8)
angles = random.uniform(0, 1, size=(4000, 2)) + 0.3 * random.normal(size=(500, 2))[contexts]
surface = np.concatenate([np.sin(angles * k) for k in (1, 2, 3)] + [np.cos(angles * k) for k in (1, 2, 3)], axis=1)
rows = surface @ random.normal(size=(12, 64)) + 4 * random.normal(size=64)

for metric in (anisoscope.average_cosine, anisoscope.svd_ratio, anisoscope.participation_ratio, anisoscope.two_nn):
    naive, honest = metric(rows), metric(rows, contexts=contexts)
    print(f"{metric.title:<32} {honest.value:7.3f}  [{honest.low:.3f}, {honest.high:.3f}]", end="")
    print(f"   rows taken as independent: [{naive.low:.3f}, {naive.high:.3f}]")
