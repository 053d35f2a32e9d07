"""What monitoring costs: a measured step beside a plain one, and a whole run at the default schedule.

python benchmarks/monitor_overhead.py                                            # two CPU cores
python benchmarks/monitor_overhead.py --device cuda --layers 12 --width 512 --context 256 --batch 64 --steps 4000
    --mps: with the service by which processes use a GPU at the same time, which `anisoscope train` starts
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
from record import record

from anisoscope import Monitor, at, log_spaced
from anisoscope.training.config import TrainConfig
from anisoscope.training.gpu_sharing import share_gpu
from anisoscope.training.language_model import build_model, make_stream
from anisoscope.training.loop import make_optimizer, precision

SHARES = {"live_share": "at most 0.03", "probe_share": "at most 0.03"}
BARS = {  # by whether it is a GPU
    True: {"live_over_plain": "at most 8", "probe_over_plain": "at most 8", **SHARES},
    False: {"live_over_plain": "at most 2.5", "probe_over_plain": "at most 2.5", **SHARES},
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"layers": 6, "width": 256, "context": 128, "batch": 32, "steps": 1000, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--preset", default="standard")
    parser.add_argument("--mps", action="store_true")
    return parser.parse_args()


class Loop:
    """A plain training loop, step by step."""

    def __init__(self, chosen: argparse.Namespace, folder: Path) -> None:
        self.config = TrainConfig(
            layers=chosen.layers,
            width=chosen.width,
            heads=chosen.width // 64,
            context=chosen.context,
            batch_size=chosen.batch,
            steps=chosen.steps,
            device=chosen.device,
        )
        self.stream = make_stream(self.config, folder)
        self.model = build_model(self.config, vocab_size=self.stream.corpus.vocab_size).to(chosen.device).train()
        self.optimizer = make_optimizer(self.model, self.config)
        self.done = 0

    def step(self, monitor: Any = None) -> float:
        """One update; its seconds, with everything finished."""
        self.wait()
        start = time.perf_counter()
        with monitor.step(self.done) if monitor is not None else contextlib.nullcontext():
            with precision(self.config, self.stream.device):
                loss = self.model(**self.stream.batch(self.done)).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.wait()
        self.done += 1
        return time.perf_counter() - start

    def wait(self) -> None:
        if self.stream.device.type == "cuda":
            torch.cuda.synchronize()


def measured_steps(loop: Loop, chosen: argparse.Namespace, *, live: bool) -> tuple[list[float], list[float]]:
    """Seconds that measured steps add: the training waits for, and in all, while they are analysed beside it.

    The training goes on until a step is analysed, and is slower while that happens; as many steps, half of them before
    and half afterwards, tell how long they take alone: clocks of a GPU drift by a percent, which counts in a hundred.
    """
    probe = None if live else loop.stream.probe_batches(chosen.batch, batch_size=chosen.batch)
    settings: dict[str, Any] = {"counts": torch.as_tensor(loop.stream.counts), "optimizer": loop.optimizer}
    settings |= {"tokenizer": loop.stream.corpus.tokenizer, "total_steps": chosen.steps}
    settings["frozen_window"] = f"steps:{(loop.done + 0.5) / chosen.steps}"  # the first measured step alone
    due: set[int] = set()
    with Monitor(
        loop.model, when=due.__contains__, metrics=chosen.preset, probe=probe, live=live, **settings
    ) as monitor:
        waited, added, half = [], [], 2
        for _ in range(chosen.repeats + 1):  # the first also builds what is kept
            alone = [loop.step(monitor) for _ in range(half)]
            due.add(loop.done)
            first, beside = loop.step(monitor), list[float]()
            while monitor.results.pending:
                beside.append(loop.step(monitor))
            alone += [loop.step(monitor) for _ in range(half)]
            half, plain = max(2, len(beside) // 2), statistics.fmean(alone)
            waited.append(first - plain)
            added.append(first + sum(beside) - (1 + len(beside)) * plain)
    return waited[1:], added[1:]


def main() -> None:
    chosen = options()
    if chosen.mps and not share_gpu(chosen.device):
        raise SystemExit("there is no GPU, or NVIDIA's service cannot be started")
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(chosen, Path(folder))
        for _ in range(2):
            loop.step()
        plain = [loop.step() for _ in range(chosen.repeats)]
        with Monitor(loop.model, when=at([10**9]), metrics=chosen.preset, live=True) as idle:
            watched = [loop.step(idle) for _ in range(chosen.repeats)]
        found = {name: measured_steps(loop, chosen, live=name == "live") for name in ("live", "probe")}
        plain += [loop.step() for _ in range(chosen.repeats)]  # before and after, so that a drifting machine shows
    base = statistics.median(plain)
    number = sum(log_spaced(chosen.steps)(step) for step in range(chosen.steps + 1))
    waits = {name: statistics.median(waited) for name, (waited, _) in found.items()}
    costs = {name: statistics.median(added) for name, (_, added) in found.items()}
    record(
        f"Monitoring beside plain training, {'GPU' if chosen.device != 'cpu' else 'CPU'}{' with MPS' * chosen.mps}",
        about=f"Decoder {chosen.layers} × {chosen.width}, {chosen.batch} contexts of {chosen.context} characters, "
        f"preset {chosen.preset}; live = the training batch, probe = a held-out probe of as many tokens. A measured "
        "step over a plain one is what the training waits for; its cost, in plain steps, is that and what the steps "
        "beside its analysis take longer, where that runs in the background (on a GPU). Shares are costs in a run of "
        f"{chosen.steps} steps at the default schedule ({number} measured steps), from the medians.",
        command="python benchmarks/monitor_overhead.py " + " ".join(sys.argv[1:]),
        figures={
            "plain_step_s": base,
            "unmeasured_over_plain": statistics.median(watched) / base,
            **{f"{name}_over_plain": 1 + wait / base for name, wait in waits.items()},
            **{f"{name}_cost_in_plain_steps": cost / base for name, cost in costs.items()},
            **{f"{name}_share": number * cost / (chosen.steps * base) for name, cost in costs.items()},
            "slowest_over_quickest_plain_step": max(plain) / min(plain),
        },
        bars=BARS[chosen.device != "cpu"],
    )


if __name__ == "__main__":
    main()
