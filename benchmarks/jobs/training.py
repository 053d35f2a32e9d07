"""A step of `train` beside a bare loop of the same model: eager, and compiled with the fused AdamW.

Steps after a warm-up, until before the last checkpoint is written; tokens are drawn from a Zipf law, so that no corpus
is read. Compiling is not in the figures; it takes half a minute before the first step.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alone import Way
from bench import Bench, Entry, Table
from sources import Source
from torch import Tensor

WARM, STEPS = 12, 40
SHAPES = {  # layers, width, heads, contexts, tokens of each, vocabulary; bar of a compiled step in ms
    "12 × 512, 64 × 256 tokens": ((12, 512, 8, 64, 256, 8192), 20.0),
    "12 × 768, 16 × 1,024 tokens": ((12, 768, 12, 16, 1024, 50257), 50.0),
}
SMALL = {"2 × 32, 4 × 16 tokens": ((2, 32, 2, 4, 16, 64), None)}


def config_of(shape: tuple[int, ...], device: str, **more: Any) -> Any:
    from anisoscope.training.config import TrainConfig

    layers, width, heads, batch, context, _ = shape
    sizes = {"layers": layers, "width": width, "heads": heads, "batch_size": batch, "context": context}
    return TrainConfig(**sizes, steps=WARM + STEPS, checkpoints="none", device=device, **more)


@dataclass
class Clock:
    """Milliseconds a step, seen by a loop that calls `step` before each."""

    device: str
    began: float = 0.0
    ms: float = 0.0

    def step(self, number: int) -> contextlib.AbstractContextManager[None]:
        import torch

        if self.device == "cuda" and number in (WARM, WARM + STEPS - 1):
            torch.cuda.synchronize()
        if number == WARM:
            self.began = time.perf_counter()
        if number == WARM + STEPS - 1:  # before the last checkpoint is written
            self.ms = (time.perf_counter() - self.began) / (STEPS - 1) * 1e3
        return contextlib.nullcontext()

    def log(self, step: int, **numbers: float) -> None:
        """What a loop tells a monitor; not needed."""


def bare(x: Tensor, shape: tuple[int, ...], compiled: bool) -> float:
    """A loop that does nothing but train."""
    import torch

    from anisoscope.training.language_model import build_model
    from anisoscope.training.loop import precision

    config, vocabulary = config_of(shape, x.device.type), shape[-1]
    torch.manual_seed(0)
    model = build_model(config, vocab_size=vocabulary).to(x.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=x.device.type == "cuda")
    ids = torch.randint(5, vocabulary, (8, shape[3], shape[4]), device=x.device)
    forward: Callable[..., Any] = torch.compile(model) if compiled else model
    clock = Clock(x.device.type)
    for number in range(WARM + STEPS):
        clock.step(number)
        with precision(config, x.device):
            loss = forward(input_ids=ids[number % 8], labels=ids[number % 8]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return clock.ms


def ours(x: Tensor, shape: tuple[int, ...], compiled: bool) -> float:
    """The loop of `train`, with its data, schedule and records."""
    import numpy as np

    from anisoscope.training.corpus import Corpus, CorpusPart
    from anisoscope.training.language_model import WindowStream, build_model
    from anisoscope.training.loop import Recipe, train

    clock, vocabulary, draw = Clock(x.device.type), shape[-1], np.random.default_rng(0)

    def part(n: int) -> CorpusPart:
        tokens = (5 + np.minimum(draw.zipf(1.3, n), vocabulary - 6)).astype(np.int32)
        return CorpusPart(tokens, np.arange(4096, n + 1, 4097)[:-1])

    @contextlib.contextmanager
    def attach(*_: Any) -> Iterator[Clock]:
        yield clock

    class Windows(WindowStream):
        tokenizer = None  # type: ignore[assignment]

    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "tokenizer").mkdir()
        about = {"vocab_size": vocabulary, "fingerprint": "", "bytes": 1, "parts": {"train": {"tokens": 2_000_000}}}
        text = Corpus(Path(place), about, part(2_000_000), part(400_000))

        def stream(config: Any, *_: Any, **__: Any) -> Any:
            return Windows(text, config.context, batch_size=config.batch_size, seed=0, device=x.device)

        recipe = Recipe(stream, lambda config, _: build_model(config, vocab_size=vocabulary))
        config = config_of(shape, x.device.type, compile=compiled)
        train(config, Path(place) / "run", monitor=attach, recipe=recipe)  # type: ignore[arg-type]
    return clock.ms


WAYS = {"bare": Way(bare, "a bare loop"), "ours": Way(ours, "anisoscope train")}


def run(bench: Bench) -> Entry:
    entry = Entry("A step of training beside a bare loop", __doc__ or "")
    for name, (shape, bar) in (SHAPES if bench.scale == 1 else SMALL).items():
        table, found = Table(name, columns=("loop", "ms a step")), {}
        for way, compiled in (("bare", False), ("bare", True), ("ours", False), ("ours", True)):
            took = bench.time("training", way, Source(256, 8), once=True, shape=shape, compiled=compiled)
            words = f"{WAYS[way].title}, {'compiled' if compiled else 'eager'}"
            found[way, compiled] = took.value
            table.rows.append({"loop": words, "ms a step": took.value})
        entry.tables.append(table)
        entry.check(f"ms of a compiled step of train, {name}", found["ours", True], most=bar)
        entry.check(f"train over the bare compiled loop, {name}", found["ours", True] / found["bare", True], most=1.15)
    return entry
