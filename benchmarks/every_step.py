"""What following every step costs: GPT-2 with it and without, in turns.

python benchmarks/every_step.py                                                           # a small model on the CPU
python benchmarks/every_step.py --device cuda --layers 12 --width 768 --context 1024 --batch 16 --vocabulary 50257
    --compile: the same in a training under torch.compile
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
import warnings
from typing import Any

import torch
from record import record

from anisoscope import Monitor, at

BARS = {"every_step_over_plain": "at most 1.05", "synchronisations_added": "0", "graph_breaks": "0"}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"layers": 4, "width": 128, "context": 128, "batch": 8, "vocabulary": 5000, "accumulate": 1, "rows": 2048}
    for name, value in {**sizes, "steps": 5, "rounds": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto", help="bfloat16 (autocast; auto on CUDA) or float32")
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


class Loop:
    """A plain training loop of GPT-2 on random tokens, step by step."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        sizes = {"n_layer": chosen.layers, "n_embd": chosen.width, "n_head": max(1, chosen.width // 64)}
        config = GPT2Config(vocab_size=chosen.vocabulary, n_positions=chosen.context, use_cache=False, **sizes)
        self.device = torch.device(chosen.device)
        self.model = GPT2LMHeadModel(config).to(self.device).train()
        self.model.loss_type = "ForCausalLM"  # else a line is logged, at which a graph is broken
        self.called = torch.compile(self.model) if chosen.compile else self.model
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused)
        shape = (chosen.accumulate, chosen.batch, chosen.context)
        self.ids = torch.randint(chosen.vocabulary, shape, device=self.device)
        self.half = chosen.dtype == "bfloat16" or (chosen.dtype == "auto" and fused)
        self.done = 1  # step 0 is the one that a monitor measures

    def step(self, monitor: Any = None) -> None:
        with monitor.step(self.done) if monitor is not None else contextlib.nullcontext():
            for ids in self.ids:
                with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.half):
                    loss = self.called(input_ids=ids, labels=ids).loss / len(self.ids)
                loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1

    def seconds(self, steps: int, monitor: Any = None) -> float:
        """Of one of several steps in a row: nobody waits for the device in between, as in a real training."""
        self.step(monitor)  # what is made once
        self.wait()
        start = time.perf_counter()
        for _ in range(steps):
            self.step(monitor)
        self.wait()
        return (time.perf_counter() - start) / steps

    def operations(self, monitor: Any = None) -> int:
        """Calls of torch operations in one step; those inside others count, too."""
        self.step(monitor)
        self.wait()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
            self.step(monitor)
        return sum(event.count for event in found.key_averages() if event.key.startswith("aten::"))

    def waits(self, monitor: Any = None) -> int:
        """How often the host waits for the device in one step; 0 where there is none to wait for."""
        if self.device.type != "cuda":
            return 0
        self.step(monitor)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                self.step(monitor)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing" in str(warning.message) for warning in seen)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def peak(self, monitor: Any = None) -> float:
        """Gigabytes of the device that one step takes at most; 0 on the CPU."""
        if self.device.type != "cuda":
            return 0.0
        torch.cuda.reset_peak_memory_stats()
        self.step(monitor)
        return torch.cuda.max_memory_allocated() / 1e9


def main() -> None:
    chosen, plain, followed = options(), [], []
    loop, other = Loop(chosen), Loop(chosen)  # a model each: what was compiled for one would be compiled again
    with Monitor(
        other.model, when=at([0]), total_steps=100_000, metrics="drift", live=True, every_step=chosen.rows
    ) as watching:
        loop.seconds(2)
        other.seconds(2, watching)
        for _ in range(chosen.rounds):  # in turns, so that a drifting machine shows in both
            plain.append(loop.seconds(chosen.steps))
            followed.append(other.seconds(chosen.steps, watching))
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values()) if chosen.compile else 0
        added = other.operations(watching) - loop.operations()
        waits = other.waits(watching) - loop.waits()
        peak = other.peak(watching) - loop.peak()
    on_gpu = loop.device.type == "cuda"
    ratio = statistics.median(b / a for a, b in zip(plain, followed, strict=True))
    record(
        f"Following every step, {'GPU' if on_gpu else 'CPU'}{', compiled' * chosen.compile}",
        about=f"GPT-2 of {chosen.layers} × {chosen.width}, {chosen.accumulate} × {chosen.batch} contexts of "
        f"{chosen.context} tokens, {'bfloat16 autocast' if loop.half else 'float32'}, {chosen.rows} rows of each of "
        f"{chosen.layers + 2} sites and their gradients; steps that are not otherwise measured.",
        command="python benchmarks/every_step.py " + " ".join(sys.argv[1:]),
        figures={
            "plain_step_s": statistics.median(plain),
            "every_step_over_plain": ratio,
            "every_step_adds_ms": 1000 * statistics.median(b - a for a, b in zip(plain, followed, strict=True)),
            "operations_added": added,
            "synchronisations_added": waits,
            **({"peak_gb_added": peak} if on_gpu else {}),
            **({"graph_breaks": breaks} if chosen.compile else {}),
            "slowest_over_quickest_plain_step": max(plain) / min(plain),
        },
        bars=BARS if on_gpu else {},
    )


if __name__ == "__main__":
    main()
