"""Watch a model learn in transformers' Trainer: one callback, and no change to the training.

python examples/monitor_hf_trainer.py
torchrun --nproc-per-node 2 examples/monitor_hf_trainer.py  # the same on two processes
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from anisoscope.integrations.hf_trainer import MonitorCallback
from anisoscope.monitor.schedule import every

torch.manual_seed(0)
walk = torch.randint(0, 4, (256, 32)).cumsum(1) % 50  # each token is one of four that may follow the one before
data = [{"input_ids": ids, "labels": ids} for ids in walk]
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=32, pad_token_id=None, **sizes))

with tempfile.TemporaryDirectory() as folder:
    out = Path(folder) / "monitor"
    # without a probe, the training batches themselves: all micro-batches of a step, as they were before clipping
    watch = MonitorCallback(when=every(8), metrics="light", rank=8, out=out)
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=33,
        per_device_train_batch_size=16 // int(os.environ.get("WORLD_SIZE", "1")),
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[watch])
    trainer.train()
    table = watch.table  # the same as in the folder; of several processes the first one has it

loss = {row["step"]: row["value"] for row in table.where(kind="training", metric="loss").records()}
energy = table.where(layer=1, kind="resid", metric="gradient_energy", group="")
for row in energy.where(variant="batch=live;fit=refit;proxy=semi_nmf;rank=8").records():  # nothing in other processes
    print(
        f"step {row['step']:2d}: loss {loss[row['step']]:.2f}, tangent energy {row['value']:.2f}, chance {8 / 64:.2f}"
    )
