"""Average cosine over all pairs: the closed form in one blocked pass, beside all n² products.

Limit: one read pass over the same rows. The n² way is measured on fewer rows and scaled by n², unless `--full`.
"""

from __future__ import annotations

from dataclasses import replace

from alone import Way
from bench import Bench, Entry, Table, relative, size
from torch import Tensor

FEWER = 10_000  # rows on which the n² way is measured


def ours(x: Tensor) -> float:
    import anisoscope

    return anisoscope.average_cosine(x).value


def pairs(x: Tensor) -> float:
    """The mean of all n² cosines but the diagonal, in blocks of 512 rows."""
    import torch

    unit = torch.nn.functional.normalize(x, dim=1)
    total = sum((block @ unit.T).double().sum() for block in unit.split(512))
    return float((total - len(x)) / (len(x) * (len(x) - 1.0)))


def read(x: Tensor) -> float:
    return float(x.sum())


def twin(x: Tensor) -> float:
    """The closed form (‖Σu‖² − n)/(n(n−1)) with float64 throughout."""
    wide = x.double()
    total = (wide / wide.norm(dim=1, keepdim=True)).sum(0)
    return float((total.square().sum() - len(x)) / (len(x) * (len(x) - 1.0)))


WAYS = {
    "anisoscope": Way(ours, "anisoscope.average_cosine"),
    "pairs": Way(pairs, "all n² cosines, in blocks"),
    "read": Way(read, "one read pass, x.sum()"),
    "twin": Way(twin, "float64 twin"),
}


def run(bench: Bench) -> Entry:
    entry = Entry("Average cosine", __doc__ or "")
    source = bench.cloud(100_000, 768)
    truth = bench.time("average_cosine", "twin", source, once=True).value
    mine = bench.time("average_cosine", "anisoscope", source)
    fewer = source if bench.full or bench.cuda else bench.cloud(FEWER, 768)
    quadratic = bench.time("average_cosine", "pairs", fewer)
    if fewer.n < source.n:
        note = f"{quadratic.title} (measured on {fewer.n:,} rows, × {(source.n / fewer.n) ** 2:.0f})"
        quadratic = replace(quadratic, title=note, seconds=quadratic.seconds * (source.n / fewer.n) ** 2)
    once = bench.time("average_cosine", "read", source)
    table = Table(f"Falling spectrum and a common mean, {size(source)}")
    table.add(mine, ours=mine, error=relative(mine.value, truth))
    table.add(quadratic, ours=mine, error=relative(quadratic.value, truth) if fewer.n == source.n else None)
    table.add(once, ours=mine)
    entry.tables.append(table)
    entry.check("times quicker than all n² cosines", quadratic.seconds / mine.seconds, least=1000)
    entry.check("time over one read pass", mine.seconds / once.seconds, most=3)
    entry.check("relative error", relative(mine.value, truth), most=1e-12)
    return entry
