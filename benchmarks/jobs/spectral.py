"""Spectral anisotropy σ₁/Σσ: the blocked Gram in float64, beside singular values of the rows themselves.

Limit: the symmetric float64 product, n·d² operations at the machine's float64 rate. Every tool is held against its own
formula (σ₁/Σσ, σ₁²/Σσ² or IsoScore) of the float64 singular values.
"""

from __future__ import annotations

from alone import Way
from bench import Bench, Entry, Found, Table, relative, size
from sources import Source
from torch import Tensor

TOLERANCE = 1e-7
SMALL = ((3000, 1024), (12_000, 512))  # sizes of one layer's sample, beside svdvals alone


def ours(x: Tensor) -> float:
    import anisoscope

    return anisoscope.svd_ratio(x).value


def alone(x: Tensor) -> float:
    import anisoscope

    return anisoscope.svd_ratio(x, interval=False).value


def torch_values(x: Tensor) -> float:
    import torch

    sigma = torch.linalg.svdvals(x - x.mean(0))
    return float(sigma[0] / sigma.sum())


def numpy_values(x: Tensor) -> float:
    import numpy as np

    rows = x.numpy()
    sigma = np.linalg.svd(rows - rows.mean(0), compute_uv=False)
    return float(sigma[0] / sigma.sum())


def microscope(x: Tensor) -> float:
    """σ₁²/Σσ² by a full SVD of the centred rows, the way that llm-microscope takes."""
    import torch

    _, sigma, _ = torch.svd(x - x.mean(0))
    return float(sigma[0].square() / sigma.square().sum())


def iso_score(x: Tensor) -> float:
    from IsoScore.IsoScore import IsoScore

    return float(IsoScore(x.cpu()))


def twin(x: Tensor) -> dict[str, float]:
    """All three from the float64 singular values of the centred rows."""
    import torch

    wide = x.double()
    sigma = torch.linalg.svdvals(wide - wide.mean(0))
    energy = sigma.square()
    ratio = float(energy.sum().square() / energy.square().sum())
    squared = float(energy[0] / energy.sum())
    return {"ratio": float(sigma[0] / sigma.sum()), "squared": squared, "iso": (ratio - 1.0) / (x.shape[1] - 1.0)}


WAYS = {
    "anisoscope": Way(ours, "anisoscope.svd_ratio"),
    "alone": Way(alone, "anisoscope.svd_ratio, value alone"),
    "svdvals": Way(torch_values, "torch.linalg.svdvals"),
    "numpy": Way(numpy_values, "numpy.linalg.svd"),
    "microscope": Way(microscope, "as in llm-microscope: full SVD"),
    "iso_score": Way(iso_score, "IsoScore", "IsoScore"),
    "twin": Way(twin, "float64 twin"),
}
TRUTH = {"microscope": "squared", "iso_score": "iso"}  # of the others: ratio


def compared(bench: Bench, sources: dict[str, Source]) -> tuple[list[Table], dict[str, list[Found]]]:
    """A table of all ways for each source."""
    names = [name for name in WAYS if name != "twin" and not (bench.cuda and name == "numpy")]
    chosen = list(sources.values())
    truths = bench.sweep("spectral", "twin", chosen, once=True)
    found = {name: bench.sweep("spectral", name, chosen) for name in names}
    tables = []
    for i, (title, source) in enumerate(sources.items()):
        table = Table(f"{title}, {size(source)}")
        for name, runs in found.items():
            truth = truths[i].result[TRUTH.get(name, "ratio")]
            table.add(runs[i], ours=found["anisoscope"][i], error=relative(runs[i].value, truth))
        tables.append(table)
    return tables, found


def run(bench: Bench) -> Entry:
    entry = Entry("Spectral anisotropy", __doc__ or "")
    source = bench.cloud(100_000, 768)
    sources = {"Falling spectrum and a common mean": source}
    sources |= {"A wider one": bench.cloud(60_000, 1_536)} if bench.cuda else {}
    sources |= {"Rows of MiniLM": bench.real} if bench.real is not None else {}
    entry.tables, found = compared(bench, sources)
    mine = found["anisoscope"][0]
    for name, bar in {"svdvals": 2.0 if bench.cuda else 2.5, "numpy": 4.0, "microscope": 4.0, "iso_score": 4.0}.items():
        for words, ours_ in (("with its interval", mine), ("value alone", found["alone"][0])):
            if name in found:
                one = found[name][0]
                entry.check(f"{words}: times quicker than {one.title}", one.seconds / ours_.seconds, least=bar)
    entry.check("relative error", entry.tables[0].rows[0]["relative error"], most=TOLERANCE)
    limit = source.n * source.d**2 / (bench.limits["float64"] * 1e9)
    entry.check("time over the limit (n·d² at the float64 rate)", mine.seconds / limit)
    half = bench.time("spectral", "anisoscope", bench.cloud(50_000, 768))
    entry.check("peak memory in MB more at n than at n/2", mine.peak_mb - half.peak_mb, most=30)
    if not bench.cuda:
        of_small(bench, entry)
    return entry


def of_small(bench: Bench, entry: Entry) -> None:
    """Small arrays, where the interval is most of the work."""
    sources = [bench.cloud(*shape) for shape in SMALL]
    names = ("anisoscope", "alone", "svdvals")
    found = {name: bench.sweep("spectral", name, sources) for name in names}
    for i, source in enumerate(sources):
        table = Table(f"A small array, {size(source)}")
        for name in names:
            table.add(found[name][i], ours=found["anisoscope"][i])
        entry.tables.append(table)
        ratio = found["svdvals"][i].seconds / found["anisoscope"][i].seconds
        entry.check(f"with its interval: times quicker than svdvals, {size(source)}", ratio, least=1.5)
