"""Watch a home-made loop with a device mesh: FSDP2, tensor parallel, compiled blocks, accumulation, its own loss.

python examples/trainers/monitor_device_mesh.py
torchrun --nproc-per-node 2 examples/trainers/monitor_device_mesh.py            # two shards of the data
torchrun --nproc-per-node 4 examples/trainers/monitor_device_mesh.py --tensor 2  # two shards, each of two processes
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from anisoscope import Monitor, every

ROWS, COLUMNS = ("self_attn.o_proj", "mlp.down_proj"), ("q_proj", "k_proj", "v_proj")
SPLIT: dict[str, Any] = {name: RowwiseParallel() for name in ROWS} | {
    name: ColwiseParallel() for name in ("mlp.gate_proj", "mlp.up_proj", *(f"self_attn.{part}" for part in COLUMNS))
}


def spread(model: Any, mesh: Any) -> None:
    """Split the weights of each block over `tensor`, then all of them over `data`."""
    for block in model.model.layers:
        if mesh["tensor"].size() > 1:
            parallelize_module(block, mesh["tensor"], SPLIT)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])


def compiled(model: Any, backend: str) -> None:
    """Compile the blocks one by one, after the monitor has put its hooks there."""
    for block in model.model.layers:
        block.compile(backend=backend)


parser = argparse.ArgumentParser()
parser.add_argument("--tensor", type=int, default=1, help="processes that split each weight")
parser.add_argument(
    "--compile", default="", metavar="BACKEND", help="such as inductor, or aot_eager without a compiler"
)
options = parser.parse_args()
if several := "RANK" in os.environ:
    dist.init_process_group("gloo")  # nccl on GPUs
world = dist.get_world_size() if several else 1
shape = (world // options.tensor, options.tensor)

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=32, pad_token_id=None, **sizes))
mine, shards = 0, shape[0]
if several:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    spread(model, mesh)
    mine = mesh["data"].get_local_rank()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, foreach=False)
walk = torch.randint(0, 4, (17, 4, 8, 32), generator=torch.Generator().manual_seed(0)).cumsum(3) % 50

with Monitor(model, when=every(8), metrics="light", rank=8, total_steps=17, optimizer=optimizer) as monitor:
    if options.compile:
        compiled(model, options.compile)
    for step, micro_batches in enumerate(walk):
        tokens = micro_batches[..., 1:].numel()  # of all processes
        with monitor.step(step):  # the scale of the loss is read from its gradients
            for batch in micro_batches[mine::shards]:
                logits = model(input_ids=batch).logits
                total = cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
                (total / tokens * shards).backward()  # FSDP averages over the shards
        optimizer.step()
        optimizer.zero_grad()

if not several or dist.get_rank() == 0:
    energy = monitor.table.where(layer=1, kind="resid", metric="gradient_energy", group="")
    for row in energy.where(variant="batch=live;fit=refit;proxy=pca;rank=8").records():
        print(f"step {row['step']:2d}: tangent energy {row['value']:.4f}, chance {8 / 64:.2f}")
if several:
    dist.destroy_process_group()
