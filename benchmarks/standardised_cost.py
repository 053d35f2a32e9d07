"""What energies in standardised coordinates add to a measured step: CPU time of alternating steps with and without.

    OMP_NUM_THREADS=1 python benchmarks/standardised_cost.py --width 256

CPU time, because it leaves out what other processes use, and one thread, because it counts threads that wait. The
steps are after the window of the frozen proxy, so that frozen proxies are tested, too.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from monitor_overhead import Loop
from record import record

from anisoscope import Monitor

CLOSED = 3  # measured steps after which the window of the frozen proxy is closed and everything kept is built


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"layers": 4, "width": 256, "context": 128, "contexts": 96, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.set_defaults(batch=1, steps=1000)
    return parser.parse_args()


def main() -> None:
    chosen = options()
    times: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        loop = Loop(chosen, Path(folder))
        settings: dict[str, Any] = {
            "when": range(100),
            "probe": loop.stream.probe_batches(chosen.contexts, batch_size=16),
            "counts": torch.as_tensor(loop.stream.counts),
            "tokenizer": loop.stream.corpus.tokenizer,
            "total_steps": chosen.steps,
            "frozen_window": "steps:0.001",
        }
        monitors = {how: stack.enter_context(Monitor(loop.model, standardised=how, **settings)) for how in times}
        for _ in range(CLOSED + chosen.repeats):
            step = loop.done
            for how, monitor in monitors.items():
                loop.done, start = step, time.process_time()
                loop.step(monitor)
                times[how].append(time.process_time() - start)
    without, with_it = (statistics.median(times[how][CLOSED:]) for how in (False, True))
    record(
        f"Monitoring: standardised coordinates, width {chosen.width}",
        about=f"Decoder {chosen.layers} × {chosen.width}, probe of {chosen.contexts} contexts of {chosen.context} "
        "characters, preset standard: a measured step with energies in standardised coordinates beside one without, "
        "CPU time with one thread, medians of steps in turns.",
        command="OMP_NUM_THREADS=1 python benchmarks/standardised_cost.py " + " ".join(sys.argv[1:]),
        figures={"without_s": without, "with_s": with_it, "ratio": with_it / without},
        bars={"ratio": "at most 1.25"},
    )


if __name__ == "__main__":
    main()
