"""A Trainer of transformers on several processes, started by torchrun: KIND OUT [CHECKPOINT].

KIND is one, ddp or fsdp2. accelerate shards parameters on GPUs only; that it would do the same here is told to it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from anisoscope.integrations.hf_trainer import MonitorCallback
from anisoscope.monitor.schedule import every
from anisoscope.tangent.plan import TangentPlan


def main(kind: str, out: str, *checkpoint: str) -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    generator = torch.Generator().manual_seed(0)
    walk = torch.randint(0, 4, (192, 16), generator=generator).cumsum(1) % 50
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=16, pad_token_id=None, **sizes))
    more: dict[str, Any] = {}
    if kind == "fsdp2":
        more = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    plan = TangentPlan(
        rank=4, proxies=("pca",), draws=19, permuted=False, balanced=False, standardised=False, frozen=False
    )
    watch = MonitorCallback(when=every(2), metrics="light", plan=plan, out=Path(out) / "monitor")
    arguments = TrainingArguments(
        output_dir=out, max_steps=6, per_device_train_batch_size=32 // world, learning_rate=5e-3, logging_steps=1,
        save_strategy="steps", save_steps=3, report_to="none", disable_tqdm=True, use_cpu=True, seed=3, **more,
    )  # fmt: skip
    if kind == "fsdp2":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": x, "labels": x} for x in walk], callbacks=[watch])
    trainer.train(resume_from_checkpoint=checkpoint[0] if checkpoint else None)
    if trainer.is_world_process_zero():
        rows = watch.table.where(metric=["gradient_energy", "average_cosine"]).records()
        names = ("step", "layer", "kind", "group", "metric", "variant")
        found = {"|".join(str(row[name]) for name in names): row["value"] for row in rows}
        Path(out, f"found{len(checkpoint)}.json").write_text(json.dumps([type(trainer.model).__name__, found]))


if __name__ == "__main__":
    main(*sys.argv[1:])
