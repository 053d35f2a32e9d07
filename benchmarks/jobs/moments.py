"""Moments of 2,048 × 768 activations in float64, as taken at every site of a measured training step."""

from __future__ import annotations

from typing import Any

from alone import Way
from bench import Bench, Entry, Table, relative, size
from torch import Tensor


def ours(x: Tensor) -> dict[str, Any]:
    from anisoscope.stats.moments import Moments

    return {"trace": Moments().update(x).scatter.diagonal().sum()}


def bare(x: Tensor) -> dict[str, Any]:
    wide = x.double()
    wide = wide - wide.mean(0)
    return {"trace": (wide.mT @ wide).diagonal().sum()}


WAYS = {"anisoscope": Way(ours, "anisoscope Moments"), "bare": Way(bare, "float64 copy, mean and product, as they are")}


def run(bench: Bench) -> Entry:
    entry = Entry("Moments", __doc__ or "")
    source = bench.cloud(2048, 768)
    mine, plain = (bench.time("moments", name, source) for name in WAYS)
    table = Table(size(source))
    truth = float(plain.array("trace"))
    for one in (mine, plain):
        table.add(one, ours=mine, error=relative(float(one.array("trace")), truth))
    entry.tables.append(table)
    entry.check("milliseconds", 1e3 * mine.seconds)
    entry.check("time over the bare float64 steps", mine.seconds / plain.seconds, most=1.5)
    entry.check("thirteen sites, of a training step of 112 ms", 13 * mine.seconds / 0.112, most=0.05)
    return entry
