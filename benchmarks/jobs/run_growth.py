"""How the cost of whole runs grows: with tokens, layers, width and heads of a profile, with checkpoints, with steps.

Processor seconds on one thread, without start and page; a model of random weights, all default metrics. An exponent is
the slope of log seconds on log size over the three largest sizes: 1 is linear, below 1 a part of the cost is fixed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import Bench, Entry, Table

from jobs.growth import exponent

_FIXED = {"tokens": 4096, "layers": 2, "width": 128, "heads": 4}
_LENGTH = 128
AXES: dict[str, tuple[tuple[int, ...], str, float]] = {  # sizes, what is fixed, bar of the exponent
    "tokens": ((2048, 4096, 8192, 16_384, 32_768), "profile, 2 layers of width 128", 1.15),
    "layers": ((2, 4, 8, 16), "profile, 4,096 tokens, width 128", 1.15),
    "width": ((64, 128, 256, 512, 768), "profile, 4,096 tokens, 2 layers", 3.1),
    "heads": ((2, 4, 8, 16, 32), "profile, 4,096 tokens, width 128", 1.15),
    "checkpoints": ((2, 4, 8, 16), "sweep --preset light, 1,024 tokens, width 32", 1.15),
    "steps": ((50, 100, 200, 400, 800), "train --monitor light, 2 layers of width 32", 1.15),
}


def _model(layers: int, width: int, heads: int) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": _LENGTH, "vocab_size": 256}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes, **special)).eval()


def profiled(**sizes: int) -> Callable[[], Any]:
    """A profile of these sizes, without start and page."""
    import torch

    from anisoscope import measure

    chosen = _FIXED | sizes
    model = _model(chosen["layers"], chosen["width"], chosen["heads"])
    ids = torch.randint(0, 256, (chosen["tokens"] // _LENGTH, _LENGTH)).split(8)
    return lambda: measure(model, [{"input_ids": part} for part in ids])


def swept(folder: Path, checkpoints: int) -> Callable[[], Any]:
    """A sweep over so many checkpoints."""
    from anisoscope import sweep

    place = folder / f"series-{checkpoints}"
    shutil.rmtree(place, ignore_errors=True)
    for number in range(checkpoints):
        model = _model(2, 32, 4)
        for parameter in model.parameters():
            parameter.data.mul_(1 + 0.01 * number)
        model.save_pretrained(place / f"checkpoint-{number}")
    words: dict[str, Any] = {"preset": "light", "tokens": 1024, "context": 64, "tokenizer": "bytes", "device": "cpu"}
    return lambda: sweep(place, **words)


def trained(folder: Path, steps: int) -> Callable[[], Any]:
    """A training of so many updates under its monitor."""
    from anisoscope import train
    from anisoscope.training.config import TrainConfig

    sizes: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4, "context": 32, "batch_size": 8}
    config = TrainConfig(steps=steps, checkpoints="none", device="cpu", **sizes)
    watch = {"contexts": 16}
    more: dict[str, Any] = {"monitor": "light", "watch": watch, "corpus": folder / "corpus", "report": False}
    place = folder / f"run-{steps}"
    shutil.rmtree(place, ignore_errors=True)
    return lambda: train(config, place, **more)


def made(axis: str, folder: Path, size: int) -> Callable[[], Any]:
    if axis == "checkpoints":
        return swept(folder, size)
    return trained(folder, size) if axis == "steps" else profiled(**{axis: size})


def seconds_of(axis: str, folder: Path, sizes: tuple[int, ...]) -> Iterator[float]:
    """Processor seconds at every size, the smallest once before."""
    made(axis, folder, sizes[0])()
    for size in sizes:
        act = made(axis, folder, size)
        start = time.process_time()
        act()
        yield time.process_time() - start


def run(bench: Bench) -> Entry:
    import torch

    entry = Entry("Growth of runs", __doc__ or "")
    columns = ("axis", "fixed", "seconds at the smallest", "seconds at the largest", "exponent")
    table = Table("Exponents", columns=columns)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for axis, (sizes, fixed, bar) in AXES.items():
            chosen = sizes if bench.scale == 1 else sizes[:3]
            seconds = list(seconds_of(axis, bench.folder, chosen))
            slope = exponent(chosen, seconds)
            words = {"job": "runs", "tool": "anisoscope", "axis": axis, "fixed": fixed}
            entry.series.append({**words, "at": list(map(float, chosen)), "seconds": seconds, "exponent": slope})
            cells = {"seconds at the smallest": seconds[0], "seconds at the largest": seconds[-1], "exponent": slope}
            table.rows.append({"axis": axis, "fixed": fixed, **cells})
            entry.check(f"exponent in {axis}", slope, most=bar)
            print(f"    {axis}: {slope:.2f}", flush=True)
    finally:
        torch.set_num_threads(threads)
    entry.tables.append(table)
    return entry
