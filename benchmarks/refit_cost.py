"""What refits of the proxies add to a measured step: CPU time of alternating steps with and without.

    OMP_NUM_THREADS=1 python benchmarks/refit_cost.py --width 256

CPU time, because it leaves out what other processes use, and one thread, because it counts threads that wait. Without
refits the intervals of energies would not contain the fit; there is no option for that, so the functions are replaced.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from monitor_overhead import Loop
from record import record

from anisoscope import Monitor

CLOSED = 3  # measured steps after which the window of the frozen proxy is closed and everything kept is built
ROOMS = ("frozen", "tables", "tangent_study")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"layers": 4, "width": 256, "context": 128, "contexts": 96, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.set_defaults(batch=1, steps=1000)
    return parser.parse_args()


@contextlib.contextmanager
def refitting(wanted: bool) -> Iterator[None]:
    """Proxies as usual, or as they are."""
    with contextlib.ExitStack() as stack:
        for room in () if wanted else ROOMS:
            for name in ("with_refits", "standardised_refits"):
                where = f"anisoscope.tangent.{room}.{name}"
                stack.enter_context(mock.patch(where, lambda fits, found, *, seed: dict(found)))
        yield


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
        monitors = {how: stack.enter_context(Monitor(loop.model, **settings)) for how in times}
        for _ in range(CLOSED + chosen.repeats):
            step = loop.done
            for how, monitor in monitors.items():
                loop.done, start = step, time.process_time()
                with refitting(how):
                    loop.step(monitor)
                times[how].append(time.process_time() - start)
    without, with_them = (statistics.median(times[how][CLOSED:]) for how in (False, True))
    record(
        f"Monitoring: refits of the proxies, width {chosen.width}",
        about=f"Decoder {chosen.layers} × {chosen.width}, probe of {chosen.contexts} contexts of {chosen.context} "
        "characters, preset standard: a measured step with refits of every proxy without each eighth of the contexts "
        "beside one without, CPU time with one thread, medians of steps in turns.",
        command="OMP_NUM_THREADS=1 python benchmarks/refit_cost.py " + " ".join(sys.argv[1:]),
        figures={"without_s": without, "with_s": with_them, "ratio": with_them / without},
        bars={},
    )


if __name__ == "__main__":
    main()
