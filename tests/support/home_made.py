"""A transformer as people write them at home, with every way in which it may be trained and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import at
from support.monitored import PLAN

WORDS, WIDTH = 64, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.ln1, self.ln2 = Attention(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class HomeMade(nn.Module):
    """Blocks are recomputed in the backward pass with `recompute`: re-entrant or not."""

    def __init__(self, depth: int = 2, *, recompute: str | None = None) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embedding(input_ids) + self.places.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x) if self.recompute is None else self._again(block, x)
        logits = self.head(self.norm(x))
        found = {} if labels is None else {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten())}
        return {"logits": logits, **found}

    def _again(self, block: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")  # type: ignore[assignment]
        return found


def home_made(**options: Any) -> HomeMade:
    torch.manual_seed(0)
    return HomeMade(**options)


Call = Callable[..., Any]


def whole(model: nn.Module, **options: Any) -> Call:
    return torch.compile(model, **options)


def own_method(model: nn.Module, **options: Any) -> Call:
    model.compile(**options)
    return model


def blocks_compiled(model: Any, **options: Any) -> Call:
    for block in model.blocks:
        block.compile(**options)
    return model


def blocks_wrapped(model: Any, **options: Any) -> Call:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, **options)
    return model


def train_step(model: nn.Module, **options: Any) -> Call:
    def step(input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": model(input_ids=input_ids, labels=labels)["loss"]}

    return torch.compile(step, **options)


def as_it_is(model: nn.Module, **_: Any) -> Call:
    return model


def ids_of(seed: int, contexts: int = 24, length: int = 9) -> Tensor:
    return torch.randint(0, WORDS, (contexts, length), generator=torch.Generator().manual_seed(seed))


def followed(
    model: nn.Module,
    how: Callable[..., Call] = as_it_is,
    *,
    first: bool = False,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    backward: Callable[[Tensor], Any] = Tensor.backward,
    steps: int = 2,
    micro_batches: int = 2,
    lengths: tuple[int, ...] = (9,),
    options: dict[str, Any] | None = None,
    **words: Any,
) -> Monitor:
    """A monitored training; with `first` the model is compiled and run before."""
    compile_with = {"backend": "aot_eager", **(options or {})}
    called = how(model, **compile_with) if first else None
    device = next(model.parameters()).device
    if called is not None:
        called(input_ids=ids_of(0).to(device), labels=ids_of(0).to(device))["loss"].backward()
        model.zero_grad()  # gradients that CUDA graphs own must not be added to
    words = {"when": at([0, steps - 1]), "metrics": "tangent", "plan": PLAN, "strict": True, **words}
    given: Any = called if isinstance(called, nn.Module) else model
    with Monitor(given, **words) as monitor:
        if called is None:
            called = how(model, **compile_with)
        for step in range(steps):
            with monitor.step(step):
                for micro in range(micro_batches):
                    ids = ids_of(2 * step + micro, length=lengths[step % len(lengths)]).to(device)
                    with around():
                        loss = called(input_ids=ids, labels=ids)["loss"] / micro_batches
                    backward(loss)
            model.zero_grad()
    return monitor


@contextmanager
def counted() -> Iterator[Callable[[], tuple[int, int]]]:
    """Graphs that torch.compile makes, and how often one is broken."""
    import torch._dynamo as dynamo

    torch.compiler.reset()
    dynamo.utils.counters.clear()
    counters = dynamo.utils.counters
    yield lambda: (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
    torch.compiler.reset()
