"""Intrinsic dimension by TwoNN: exact nearest neighbours, beside other searches.

Limit on the host: the symmetric half of the float32 product, n²·d operations; on a GPU the whole TF32 product of the
same rows, measured in the same run. The relative error is that of the dimension by one formula; `worst distance` is
the largest relative error of any row's distance to its first and second neighbour. Under a common mean of norm 3000
float32 products lose the digits of the distances.
"""

from __future__ import annotations

from typing import Any

from alone import Way
from bench import COLUMNS, Bench, Entry, Found, Table, relative, size
from sources import Source
from torch import Tensor

TOLERANCE = 1e-6
_BLOCK = 2 << 30  # bytes of one block of distances on a GPU


def slope(distances: Any) -> float:
    """Facco et al. 2017: the slope through 0 of −log(1 − i/N) on log μ, over the first 90 %."""
    import numpy as np

    near = np.asarray(distances, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = near[:, 1] / near[:, 0]
    logs = np.log(np.sort(ratio[np.isfinite(ratio)]))
    keep = int(0.9 * len(logs))
    y = -np.log1p(-np.arange(1, keep + 1) / len(logs))
    return float((logs[:keep] @ y) / (logs[:keep] @ logs[:keep]))


def ours(x: Tensor) -> float:
    import anisoscope

    return anisoscope.two_nn(x).value


def alone(x: Tensor) -> float:
    import anisoscope

    return anisoscope.two_nn(x, interval=False).value


def neighbours(x: Tensor) -> dict[str, Any]:
    from anisoscope.numerics.neighbours import nearest

    distances, _ = nearest(x, 2)
    return {"distances": distances}


def redone(x: Tensor) -> float:
    """The share of rows whose candidates were not proved enough, so that they were searched exactly."""
    from anisoscope.numerics.neighbours import search

    return search(x, 2).redone


def scikit_dimension(x: Tensor) -> float:
    from skdim.id import TwoNN

    return float(TwoNN().fit(x.numpy()).dimension_)


def dadapy(x: Tensor) -> dict[str, Any]:
    import torch
    from dadapy import Data

    data = Data(coordinates=x.numpy(), maxk=2, n_jobs=torch.get_num_threads())
    data.compute_distances()
    return {"value": data.compute_id_2NN()[0], "distances": data.distances[:, 1:3]}


def scikit_learn(x: Tensor) -> dict[str, Any]:
    from sklearn.neighbors import NearestNeighbors

    rows = x.cpu().numpy()
    distances, _ = NearestNeighbors(n_neighbors=3, algorithm="brute").fit(rows).kneighbors(rows)
    return {"distances": distances[:, 1:]}


def faiss_flat(x: Tensor) -> dict[str, Any]:
    import faiss
    import numpy as np
    import torch

    faiss.omp_set_num_threads(torch.get_num_threads())
    index = faiss.IndexFlatL2(x.shape[1])
    index.add(x.numpy())
    squared, _ = index.search(x.numpy(), 3)
    return {"distances": np.sqrt(np.maximum(squared[:, 1:], 0.0))}


def cdist(x: Tensor) -> dict[str, Any]:
    """torch.cdist and topk, in blocks that fit."""
    import torch

    step = max(1, _BLOCK // (4 * len(x))) if x.is_cuda else 1024
    near = [torch.cdist(part, x).topk(3, dim=1, largest=False).values[:, 1:] for part in x.split(step)]
    return {"distances": torch.cat(near)}


def tf32_product(x: Tensor) -> float:
    """All n² products of rows in TF32, nothing else: what finding neighbours cannot do without."""
    import torch

    step = max(1, _BLOCK // (4 * len(x)))
    out = torch.empty(step, len(x), device=x.device)
    torch.backends.cuda.matmul.allow_tf32 = True
    for part in x.split(step):
        torch.mm(part, x.T, out=out[: len(part)])
    torch.backends.cuda.matmul.allow_tf32 = False
    return 0.0


def twin(x: Tensor, rows: int = 0) -> dict[str, Any]:
    """Distances to the first two others in float64: products of centred rows find 16, differences decide among them."""
    import torch

    wide = x.double()
    wide = wide - wide.mean(0)
    mine = torch.arange(len(x), device=x.device)
    mine = mine[:: max(1, len(x) // rows)] if rows else mine
    squares, near = wide.square().sum(1), []
    for some in mine.split(max(1, (256 << 20) // (8 * len(x)))):
        squared = torch.addmm(squares.unsqueeze(0), wide[some], wide.T, alpha=-2.0)
        squared[torch.arange(len(some), device=x.device), some] = torch.inf
        few = squared.topk(min(16, len(x) - 1), dim=1, largest=False).indices
        for one, others in zip(some.split(256), few.split(256), strict=True):
            gap = torch.linalg.vector_norm(wide[others] - wide[one].unsqueeze(1), dim=2)
            near.append(gap.sort(dim=1).values[:, :2])
    return {"distances": torch.cat(near), "rows": mine}


WAYS = {
    "anisoscope": Way(ours, "anisoscope.two_nn"),
    "alone": Way(alone, "anisoscope.two_nn, value alone"),
    "nearest": Way(neighbours, "anisoscope, neighbours alone"),
    "scikit_dimension": Way(scikit_dimension, "scikit-dimension TwoNN", "scikit-dimension"),
    "dadapy": Way(dadapy, "DADApy 2NN", "dadapy"),
    "scikit_learn": Way(scikit_learn, "scikit-learn brute force", "scikit-learn"),
    "faiss": Way(faiss_flat, "faiss IndexFlatL2", "faiss-cpu"),
    "cdist": Way(cdist, "torch.cdist and topk"),
    "tf32": Way(tf32_product, "TF32 product alone"),
    "redone": Way(redone, "anisoscope, share redone"),
    "twin": Way(twin, "float64 twin"),
}
HOST = ("anisoscope", "nearest", "alone", "scikit_dimension", "dadapy", "scikit_learn", "faiss", "cdist")
CUDA = ("anisoscope", "nearest", "alone", "cdist", "tf32")
SMALLER = ((1000, 768), (2000, 300), (2500, 1024), (3000, 1024), (12_000, 512), (30_000, 300))
USUAL, FAR = "Falling spectrum and a common mean", "The same under a common mean of norm 3000"


def errors(found: Found, truth: Found) -> tuple[float | None, float | None]:
    """The relative error of the dimension (where the twin has all rows), and the worst one of a distance."""
    import numpy as np

    true, at, near = truth.array("distances"), truth.array("rows"), found.array("distances")
    worst = None
    if near is not None:
        with np.errstate(invalid="ignore", divide="ignore"):
            worst = float(np.nan_to_num(np.abs(near[at] - true) / true, nan=np.inf).max())
    whole = len(true) == int(at[-1]) + 1
    value = found.value if near is None else slope(near)
    return (relative(value, slope(true)) if whole and value == value else None), worst


def compared(
    bench: Bench, sources: dict[str, Source], *, ways: tuple[str, ...], rows: int = 0
) -> tuple[list[Table], dict[str, list[Found]]]:
    """A table of these ways for each source; the twin looks at some rows only where `rows` says how many."""
    chosen = list(sources.values())
    truths = bench.sweep("two_nn", "twin", chosen, once=True, **({"rows": rows} if rows else {}))
    found = {name: bench.sweep("two_nn", name, chosen) for name in ways}
    tables = []
    for i, (title, source) in enumerate(sources.items()):
        table = Table(f"{title}, {size(source)}", columns=(*COLUMNS, "worst distance"))
        for name, runs in found.items():
            error, worst = errors(runs[i], truths[i]) if not runs[i].missing and name != "tf32" else (None, None)
            table.add(runs[i], ours=found["anisoscope"][i], error=error, **{"worst distance": worst})
        tables.append(table)
    return tables, found


def exactness(entry: Entry, table: Table) -> None:
    for row, what in zip(table.rows[:2], ("relative error", "worst distance"), strict=True):
        if row.get(what) is not None:
            entry.check(f"{what} of {row['tool']}: {table.title}", row[what], most=TOLERANCE)


def on_host(bench: Bench, entry: Entry) -> None:
    source = bench.cloud(20_000, 768)
    sources = {USUAL: source, FAR: bench.cloud(20_000, 768, mean=3000.0)}
    sources |= {"Rows of MiniLM": bench.real} if bench.real is not None else {}
    entry.tables, found = compared(bench, sources, ways=HOST)
    mine = found["anisoscope"][0]
    for name, bar in {"scikit_dimension": 8.0, "dadapy": 3.0, "scikit_learn": 3.0, "faiss": 1.0}.items():
        entry.check(f"times quicker than {found[name][0].title}", found[name][0].seconds / mine.seconds, least=bar)
    for table in entry.tables:
        exactness(entry, table)
    beside_small(bench, entry)
    limit = source.n**2 * source.d / (bench.limits["float32"] * 1e9)
    entry.check("time over the limit (n²·d at the float32 rate)", mine.seconds / limit)
    large = bench.cloud(100_000, 768)
    tables, found = compared(bench, {"Ours alone": large}, ways=("anisoscope", "nearest"), rows=1024)
    entry.tables += tables
    exactness(entry, tables[0])
    entry.check(f"peak MB at {size(large)}", found["anisoscope"][0].peak_mb)


def beside_small(bench: Bench, entry: Entry) -> None:
    """Smaller clouds, interval included, beside the peers that are quickest there."""
    sources = {f"Falling spectrum, {i}": bench.cloud(n, d) for i, (n, d) in enumerate(SMALLER)}
    tables, found = compared(bench, sources, ways=("anisoscope", "alone", "scikit_dimension", "scikit_learn", "faiss"))
    for i, (table, source) in enumerate(zip(tables, sources.values(), strict=True)):
        table.title = f"{USUAL}, {size(source)}"
        exactness(entry, table)
        mine = found["anisoscope"][i].seconds
        for name in ("scikit_dimension", "scikit_learn", "faiss"):
            if not found[name][i].missing:
                what = f"times quicker than {found[name][i].title}, {size(source)}, interval included"
                entry.check(what, found[name][i].seconds / mine, least=1)
    entry.tables += tables


def on_cuda(bench: Bench, entry: Entry) -> None:
    shapes = [(100_000, 768, 0.10), (200_000, 4096, 1.0)] + [(1_000_000, 4096, 30.0)] * bench.stretch
    for n, d, stretch in shapes:
        source = bench.cloud(n, d)
        sources = {USUAL: source} | ({FAR: bench.cloud(n, d, mean=3000.0)} if d < 1000 else {})
        ways = CUDA if n < 1_000_000 else ("anisoscope", "nearest", "tf32")
        tables, found = compared(bench, sources, ways=ways, rows=4096)
        entry.tables += tables
        for table in tables:
            exactness(entry, table)
        mine = found["nearest"][0].seconds
        entry.check(f"neighbours over the TF32 product, {size(source)}", mine / found["tf32"][0].seconds, most=2)
        entry.check(f"seconds of the neighbours, {size(source)} (stretch)", mine, most=stretch)
        if "cdist" in found:
            entry.check(f"times quicker than torch.cdist, {size(source)}", found["cdist"][0].seconds / mine, least=1)
        share = bench.time("two_nn", "redone", source, once=True)
        entry.check(f"share of rows redone, {size(source)}", share.value)


def run(bench: Bench) -> Entry:
    entry = Entry("Intrinsic dimension (TwoNN)", __doc__ or "")
    (on_cuda if bench.cuda else on_host)(bench, entry)
    return entry
