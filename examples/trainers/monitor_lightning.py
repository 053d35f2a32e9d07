"""Watch a model learn in Lightning's Trainer, with a loss of its own; on one process or on several.

python examples/trainers/monitor_lightning.py
python examples/trainers/monitor_lightning.py ddp      # two processes, each with a copy of the model
python examples/trainers/monitor_lightning.py sharded  # two processes that share the parameters (FSDP2)
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from anisoscope.integrations.lightning import MonitorCallback
from anisoscope.monitor.schedule import every


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        size = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 32, "vocab_size": 50}
        self.model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))

    def configure_model(self) -> None:
        if kind == "sharded":
            for block in self.model.transformer.h:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        logits = self.model(input_ids=batch).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())  # its scale is read from gradients

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


warnings.filterwarnings("ignore")
kind = sys.argv[1] if len(sys.argv) > 1 else "one"
how: dict[str, Any] = {"one": {"devices": 1}, "ddp": {"devices": 2, "strategy": "ddp"}}.get(kind, {"devices": 2})
if kind == "sharded":
    how["strategy"] = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
walk = torch.randint(0, 4, (512, 32), generator=torch.Generator().manual_seed(0)).cumsum(1) % 50
watch = MonitorCallback(when=every(8), metrics="light", rank=8)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = lightning.Trainer(max_steps=33, max_epochs=-1, accelerator="cpu", callbacks=[watch], **quiet, **how)
trainer.fit(Module(), DataLoader(walk, batch_size=32 // how["devices"]))

if trainer.is_global_zero:  # which has the results of all
    energy = watch.table.where(layer=1, kind="resid", metric="gradient_energy", group="")
    for row in energy.where(variant="batch=live;fit=refit;proxy=semi_nmf;rank=8").records():
        print(f"step {row['step']:2d}: tangent energy {row['value']:.2f}, chance {8 / 64:.2f}")
