"""Trainings of one small model by several processes of this machine, each a fork of the test's own."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import at
from anisoscope.results.query import Table
from anisoscope.tangent.plan import TangentPlan
from support.tiny_models import VOCABULARY, tiny

STEPS, SHARDS, CONTEXTS, LENGTH = 3, 4, 6, 12
PLAN = TangentPlan(rank=4, draws=19, proxies=("pca", "semi_nmf"), balanced=False, standardised=False)
COUNTS = torch.arange(VOCABULARY, 0, -1)
_LIMIT = 240  # seconds by the clock: nothing may wait forever
Record = dict[str, Any]


def shard(step: int, number: int, contexts: int = CONTEXTS) -> Tensor:
    """The contexts that one process reads in a step."""
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randint(5, VOCABULARY, (contexts, LENGTH), generator=generator)


def whole_batch(step: int, number: int) -> dict[str, Tensor]:
    ids = shard(step, number)
    return {"input_ids": ids, "labels": ids}


def padded_batch(step: int, number: int) -> dict[str, Tensor]:
    """Contexts of different lengths, the longest of which has no more than half of the positions."""
    ids = shard(step, number)
    mask = (torch.arange(LENGTH) < torch.arange(1, CONTEXTS + 1)[:, None]).long()
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def probe() -> dict[str, Tensor]:
    ids = shard(99, 99, 40)
    return {"input_ids": ids, "labels": ids}


def plain(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fsdp(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model.transformer.h:  # type: ignore[union-attr]
        fully_shard(block)
    return fully_shard(model)


def first_fsdp(model: Any, *, original: bool = True, blocks: bool = True) -> nn.Module:
    """The first version of FSDP; its parameters are flat pieces, with `original` under their own names."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({type(model.transformer.h[0])}) if blocks else None
    words: dict[str, Any] = {"auto_wrap_policy": policy, "use_orig_params": original}
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **words)


_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")


def tensor_parallel(model: nn.Module, *, sharded: bool = False) -> nn.Module:
    """Pairs of processes compute a llama together; with `sharded` FSDP2 spreads it over the pairs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    plan: dict[str, Any] = {name: ColwiseParallel() for name in _COLUMNS} | {name: RowwiseParallel() for name in _ROWS}
    for block in model.model.layers:  # type: ignore[union-attr]
        parallelize_module(block, mesh["tp"], plan)
        if sharded:
            fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"]) if sharded else model


def sequence_parallel(model: Any, *, sharded: bool = False, local: bool = True, size: int = 2) -> nn.Module:
    """As `tensor_parallel`, and the stream is split by positions from the first block to the final norm.

    With `local` modules hand on plain tensors, which do not say that they are parts.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size() // size, size), mesh_dim_names=("dp", "tp"))
    here: dict[str, Any] = {"use_local_output": local}
    gathered: dict[str, Any] = {"desired_input_kwarg_layouts": {"hidden_states": Replicate()}}
    plan: dict[str, Any] = {name: ColwiseParallel() for name in _COLUMNS}
    plan |= {name: RowwiseParallel(output_layouts=Shard(1), **here) for name in _ROWS}
    plan |= {name: SequenceParallel(**here) for name in ("input_layernorm", "post_attention_layernorm")}
    plan["self_attn"] = PrepareModuleInput(input_kwarg_layouts={"hidden_states": Shard(1)}, **gathered)
    plan["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    ends: dict[str, Any] = {"model.norm": SequenceParallel(**here)}
    ends["lm_head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    ends["model.layers.0"] = PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=local
    )
    parallelize_module(model, mesh["tp"], ends)
    for block in model.model.layers:
        parallelize_module(block, mesh["tp"], plan)
        if sharded:
            fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"]) if sharded else model


def exact(model: Any, *, still: bool = False) -> nn.Module:
    """A llama whose norms and loss keep its precision, where transformers goes through float32.

    With `still` its blocks add nothing, so that rows have the same bits however they are split.
    """

    def norm(self: Any, x: Tensor) -> Any:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = norm.__get__(module)
    model.loss_function = loss
    with torch.no_grad():
        for name, parameter in model.named_parameters() if still else ():
            parameter.mul_(0.0 if any(part in name for part in _ROWS) else 1.0)
    return model  # type: ignore[no-any-return]


def split_width(model: Any) -> nn.Module:
    """As `tensor_parallel`, and what the final norm gives is split by coordinates."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    tensor_parallel(model)
    mesh = next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
    norm, head = model.model.norm.forward, model.lm_head.forward
    model.model.norm.forward = lambda x: DTensor.from_local(norm(x), mesh, [Replicate()]).redistribute(
        placements=[Shard(2)]
    )
    model.lm_head.forward = lambda x: head(x.full_tensor())
    return model


def train(
    mine: Callable[[int], list[int]],
    *,
    wrap: Callable[[nn.Module], nn.Module] = plain,
    monitored: bool = True,
    by_hand: bool = False,
    divided: int = 1,
    lr: float = 1e-3,
    architecture: str = "gpt2",
    leave: bool = False,
    paused: Path | None = None,
    dtype: torch.dtype = torch.float32,
    batch: Callable[[int, int], dict[str, Tensor]] = whole_batch,
    **options: Any,
) -> tuple[Table | None, list[Tensor], list[str]]:
    """Train on the shards `mine(step)`; gradients are averaged `by_hand`, by the wrapper, or not at all."""
    torch.manual_seed(0)
    model = tiny(architecture).to(dtype)
    wrapped = wrap(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=lr, foreach=False)  # parameters of several meshes
    words: dict[str, Any] = {"when": at(range(STEPS)), "plan": PLAN, "counts": COUNTS, "optimizer": optimizer}
    words |= {"total_steps": STEPS, "name": "m", **options}
    with contextlib.ExitStack() as stack:
        monitor = stack.enter_context(Monitor(wrapped, **words)) if monitored else None
        for step in range(STEPS):
            if paused is not None and step == 1 and monitor is not None:
                monitor.save(paused)
                stack.close()
                monitor = stack.enter_context(Monitor(wrapped, **words, resume=True))
                monitor.load(paused)
            with monitor.step(step) if monitor is not None else contextlib.nullcontext():
                for number in mine(step):
                    (wrapped(**batch(step, number)).loss / divided).backward()
            for parameter in wrapped.parameters() if by_hand else ():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
        if leave:
            dist.destroy_process_group()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in wrapped.parameters()]
    notes = [] if monitor is None else monitor.notes
    return None if monitor is None else monitor.table, [p.detach().clone() for p in whole], notes


def in_ranks(act: Callable[[int], Any], size: int, folder: Path) -> list[Any]:
    """`act(rank)` in as many processes; None of one that was killed, and an error for one that failed or hangs."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        place = f"tcp://127.0.0.1:{found.getsockname()[1]}"
    children = {}
    for rank in range(size):
        if not (child := os.fork()):
            _child(act, rank, size, place, folder)
        children[child] = rank
    results: list[Any] = [None] * size
    for rank in _ended(children):
        path = folder / f"result.{rank}"
        if path.exists():
            good, value = pickle.loads(path.read_bytes())
            if not good:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return results


def _ended(children: dict[int, int]) -> Iterator[int]:
    until = time.monotonic() + _LIMIT
    try:
        while children:
            child, _ = os.waitpid(-1, os.WNOHANG)
            if child in children:
                yield children.pop(child)
            elif time.monotonic() > until:
                raise AssertionError(f"ranks {sorted(children.values())} hang")
            else:
                time.sleep(0.01)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _child(act: Callable[[int], Any], rank: int, size: int, place: str, folder: Path) -> None:
    try:
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=size)
        result = True, act(rank)
    except BaseException:
        result = False, traceback.format_exc()
    (folder / f"result.{rank}").write_bytes(pickle.dumps(result))
    os._exit(0)


_KEYS = ("step", "stack", "layer", "kind", "head", "group", "metric", "variant")


def rows_of(table: Table) -> dict[tuple[str, ...], Record]:
    return {tuple(str(row.get(key)) for key in _KEYS): row for row in table.records()}


def assert_same(
    found: Table,
    expected: Table,
    *,
    tolerance: float = 1e-12,
    nothing: float = 1e-12,
    least: int = 50,
    fitted: float = 0.0,
) -> None:
    """The same rows, with the same values, intervals and counts.

    `fitted` is how far numbers of semi-NMF may be apart where rows are rounded otherwise: a fit to few rows that hold
    no concepts magnifies that some ten times.
    """
    ours, theirs = rows_of(found), rows_of(expected)
    assert ours.keys() == theirs.keys()
    assert len(ours) > least
    for key, row in theirs.items():
        for name in ("value", "low", "high", "n", "contexts", "dropped"):
            a, b = ours[key].get(name), row.get(name)
            if a is None or b is None or not math.isfinite(b):
                assert (a is None) == (b is None) and (a is None or not math.isfinite(a)), (key, name, a, b)
            else:
                most = max(nothing, fitted if "proxy=semi_nmf" in key[-1] else 0.0)
                assert math.isclose(a, b, rel_tol=tolerance, abs_tol=most), (key, name, a, b)
