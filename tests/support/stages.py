"""A home-made transformer cut into stages by hand: processes send activations on, and their gradients back."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import at
from support.ranks import COUNTS, LENGTH, PLAN, STEPS, shard
from support.tiny_models import VOCABULARY

WIDTH, BLOCKS, HEADS = 16, 4, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.proj(nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """Some blocks of a model, with the embedding before the first and norm, head and loss behind the last."""

    def __init__(self, first: int = 0, last: int = BLOCKS) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [Block() for _ in range(BLOCKS)]
        table, positions = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        norm, head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.first, self.last = first, last
        if first == 0:
            self.wte, self.wpe = table, positions
        self.blocks = nn.ModuleList(blocks[first:last])
        if last == BLOCKS:
            self.ln_f, self.head = norm, head

    def get_input_embeddings(self) -> nn.Module | None:
        return getattr(self, "wte", None)

    def forward(
        self, hidden: Tensor | None = None, input_ids: Tensor | None = None, labels: Tensor | None = None
    ) -> Any:
        x = self.wte(input_ids) + self.wpe if hidden is None else hidden
        for block in self.blocks:
            x = block(x)
        if self.last < BLOCKS:
            return x
        logits = self.head(self.ln_f(x))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def cuts(stages: int) -> list[tuple[int, int]]:
    """Stages of unequal sizes: the first has what is left."""
    each = BLOCKS // stages
    ends = [BLOCKS - each * (stages - 1 - i) for i in range(stages)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def train_stages(
    line: Sequence[int],
    numbers: Sequence[int],
    *,
    divided: int = 1,
    monitored: bool = True,
    told: Sequence[str] = ("input_ids", "labels"),
    step_words: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, dict[str, Tensor], list[str]]:
    """Train the stage of this process on some shards of each step; `line` are the processes of the stages in order.

    `told` are the arguments that later stages get beside what the stage before sends.
    """
    place = line.index(dist.get_rank()) if dist.is_initialized() else 0
    first, last = cuts(len(line))[place]
    model = Gpt(first, last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.pop("lr", 1e-3), foreach=False)
    words: dict[str, Any] = {"when": at(range(STEPS)), "plan": PLAN, "counts": COUNTS, "optimizer": optimizer}
    words |= {"total_steps": STEPS, "name": "m", **({"stage": (first, BLOCKS)} if len(line) > 1 else {}), **options}
    with contextlib.ExitStack() as stack:
        monitor = stack.enter_context(Monitor(model, **words)) if monitored else None
        for step in range(STEPS):
            with monitor.step(step, **step_words or {}) if monitor is not None else contextlib.nullcontext():
                _pass(model, [shard(step, number) for number in numbers], line, place, divided=divided, told=told)
            if dist.is_initialized() and dist.get_world_size() > len(line):  # replicas of the pipeline
                _average(model, len(line))
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return None if monitor is None else monitor.table, weights, [] if monitor is None else monitor.notes


def _pass(
    model: Gpt, batches: Sequence[Tensor], line: Sequence[int], place: int, *, divided: int, told: Sequence[str]
) -> None:
    """All micro-batches forward, then all backward."""
    held: list[tuple[Tensor | None, Tensor]] = []
    for ids in batches:
        hidden = None
        if place:
            dist.recv(hidden := torch.zeros(*ids.shape, WIDTH), line[place - 1])
            hidden.requires_grad_(True)
        output = model(hidden=hidden, **dict.fromkeys(told if place else ("input_ids", "labels"), ids))
        held.append((hidden, output["loss"] / divided if isinstance(output, dict) else output))
        if place + 1 < len(line):
            dist.send(output.detach(), line[place + 1])
    for hidden, output in held:
        gradient = None
        if place + 1 < len(line):
            dist.recv(gradient := torch.zeros_like(output), line[place + 1])
        output.backward(gradient)
        if hidden is not None:
            dist.send(hidden.grad, line[place - 1])


def _average(model: nn.Module, stages: int) -> None:
    place = dist.get_rank() % stages
    groups = [dist.new_group(list(range(start, dist.get_world_size(), stages))) for start in range(stages)]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(parameter.grad, group=groups[place])


class Headless(Gpt):
    """As `Gpt`, but what it returns is for a loss outside of it, and its input is its first argument."""

    def forward(self, x: Tensor, input_ids: Tensor | None = None) -> Tensor:  # type: ignore[override]
        x = self.wte(x) + self.wpe if self.first == 0 else x
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x)) if self.last == BLOCKS else x


def _next_token(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def train_pipeline(schedule: str | None, *, told: bool = True) -> tuple[Any, list[str]]:
    """Train with stages and a schedule of torch.distributed.pipelining, or in one process without."""
    from torch.distributed import pipelining

    place, count = (dist.get_rank(), 2) if schedule else (0, 1)
    first, last = cuts(count)[place]
    model = Headless(first, last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    words: dict[str, Any] = {"when": at(range(STEPS)), "plan": PLAN, "counts": COUNTS, "name": "m"}
    words |= {"stage": (first, BLOCKS)} if schedule else {}
    scale: dict[str, Any] = {"loss": "mean", "tokens": shard(0, 0)[::2, 1:].numel()} if told else {}
    if schedule:
        stage = pipelining.PipelineStage(model, place, count, torch.device("cpu"))
        runner = getattr(pipelining, schedule)(stage, n_microbatches=2, loss_fn=_next_token)
    with Monitor(model, optimizer=optimizer, total_steps=STEPS, **words) as monitor:
        for step in range(STEPS):
            ids = shard(step, 0)
            with monitor.step(step, **scale):
                if schedule:
                    runner.step(*([] if place else [ids]), input_ids=ids, **({"target": ids} if place else {}))
                for part in () if schedule else ids.chunk(2):
                    _next_token(model(part, part), part).backward()
            for parameter in () if schedule else model.parameters():
                parameter.grad /= 2  # as a schedule divides them
            optimizer.step()
            optimizer.zero_grad()
    return monitor.table, monitor.notes
