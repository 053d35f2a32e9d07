"""How cost grows: with rows at a fixed width, with the width at fixed rows, with tokens and layers of a whole profile.

An exponent is the slope of log seconds on log size over the three largest sizes: 1 is linear, 2 quadratic. The last
table holds what `profile` said it would need against what it took, each in a process of its own.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

from alone import Way, timed
from bench import Bench, Entry, Table
from sources import Source
from torch import Tensor

# job, ways, rows at width 768, widths, rows at these widths, bar of the exponent in n
PLANS = (
    ("spectral", ("anisoscope", "svdvals", "microscope"), (12_500, 25_000, 50_000, 100_000), 25_000, 1.15),
    ("average_cosine", ("anisoscope", "read"), (12_500, 25_000, 50_000, 100_000), 25_000, 1.15),
    ("average_cosine", ("pairs",), (2500, 5000, 10_000), 5000, 2.1),
    ("two_nn", ("anisoscope", "scikit_dimension", "dadapy", "scikit_learn", "faiss"), (2500, 5000, 10_000, 20_000),
     5000, 2.1),
)  # fmt: skip
WIDTHS = (96, 192, 384, 768, 1536)
TOKENS, LAYERS = (8192, 16_384, 32_768), (2, 4, 8)
MODELS = (
    ("gpt2:n_layer=4,n_embd=256,n_head=4", 16_384),
    ("gpt2:n_layer=8,n_embd=512,n_head=8", 16_384),
    ("gpt2:n_layer=2,n_embd=2000,n_head=1000", 2048),
)


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The slope of log seconds on log size over the three largest sizes."""
    x, y = ([math.log(value) for value in values[-3:]] for values in (sizes, seconds))
    middle, height = sum(x) / len(x), sum(y) / len(y)
    below = sum((a - middle) ** 2 for a in x)
    return sum((a - middle) * (b - height) for a, b in zip(x, y, strict=True)) / below if below else math.nan


def profiled(x: Tensor, tokens: int = 8192, layers: int = 2) -> dict[str, float]:
    """Seconds of measuring a small GPT-2 of random weights with all default metrics, without its own forward pass."""
    import torch
    from transformers import AutoConfig, AutoModel

    from anisoscope import measure

    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", n_layer=layers, n_embd=256, n_head=4, n_positions=256)
    model = AutoModel.from_config(config).eval().to(x.device)
    ids = torch.randint(0, 50_000, (max(8, tokens // 256), 256)).split(8)
    measure(model, [{"input_ids": ids[0]}])
    return {"value": timed(lambda: measure(model, [{"input_ids": part} for part in ids]), x.device.type)[1]}


def remembered(x: Tensor, model: int = 0, tokens: int = 16_384) -> dict[str, float]:
    """What `profile` said it would need and what it took, in MB, both over what the process held before it."""
    import psutil

    from anisoscope import profile

    held = psutil.Process().memory_info().rss / (1 << 20)
    with tempfile.TemporaryDirectory() as folder:
        options = {"random_init": True, "tokens": tokens, "device": x.device.type, "report": False}
        profile(MODELS[model][0], out=Path(folder) / "run", **options)
        about = json.loads((Path(folder) / "run" / "run.json").read_text())
    return {"said": about["memory_estimate_mb"], "took": about["peak_memory_mb"], "held": held}


WAYS = {"profile": Way(profiled, "a whole profile"), "memory": Way(remembered, "memory of profile")}


def swept(bench: Bench, entry: Entry, table: Table) -> None:
    """Every plan against n and against d."""
    for job, ways, rows, fixed, bar in PLANS:
        axes = {"n": [bench.cloud(n, 768) for n in rows], "d": [bench.cloud(fixed, d) for d in WIDTHS]}
        for way in ways:
            for axis, sources in axes.items():
                found = bench.sweep(job, way, sources)
                if found[0].missing:
                    continue
                at, seconds = [float(getattr(s, axis)) for s in sources], [one.seconds for one in found]
                slope = exponent(at, seconds)
                other = f"d = {sources[0].d}" if axis == "n" else f"n = {sources[0].n:,}"
                words = {"job": job, "tool": found[0].title, "axis": axis, "fixed": other}
                entry.series.append({**words, "at": at, "seconds": seconds, "exponent": slope})
                table.rows.append({**words, "seconds at the largest": seconds[-1], "exponent": slope})
                if axis == "n" and way in ("anisoscope",):
                    entry.check(f"exponent in n of {found[0].title}", slope, most=bar)


def of_profiles(bench: Bench, entry: Entry, table: Table) -> None:
    tiny = Source(256, 8)
    for axis, values in (("tokens", TOKENS), ("layers", LAYERS)):
        sizes = [bench.rows(v) if axis == "tokens" else v for v in values]
        more = {} if axis == "tokens" else {"tokens": bench.rows(8192)}
        seconds = [bench.time("growth", "profile", tiny, once=True, **{axis: s}, **more).value for s in sizes]
        slope = exponent(sizes, seconds)
        words = {"job": "profile", "tool": "anisoscope.measure", "axis": axis, "fixed": "GPT-2, width 256"}
        table.rows.append({**words, "seconds at the largest": seconds[-1], "exponent": slope})
        entry.check(f"exponent in {axis} of a whole profile", slope, most=1.15)


def of_memory(bench: Bench, entry: Entry) -> None:
    table = Table("Memory of a profile, MB", columns=("model", "held before", "estimate", "peak", "estimate over peak"))
    for number, (name, tokens) in enumerate(MODELS):
        source = Source(256, 8)
        found = bench.time("growth", "memory", source, once=True, model=number, tokens=bench.rows(tokens)).result
        ratio = found["said"] / found["took"]
        cells = {"model": name, "held before": found["held"], "estimate": found["said"], "peak": found["took"]}
        table.rows.append(cells | {"estimate over peak": ratio})
        entry.check(f"memory estimate off by, {name}", abs(ratio - 1.0), most=0.15)
    entry.tables.append(table)


def run(bench: Bench) -> Entry:
    entry = Entry("Growth", __doc__ or "")
    table = Table("Exponents", columns=("job", "tool", "axis", "fixed", "seconds at the largest", "exponent"))
    entry.tables.append(table)
    swept(bench, entry, table)
    of_profiles(bench, entry, table)
    of_memory(bench, entry)
    return entry
