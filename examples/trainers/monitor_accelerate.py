"""Watch a model learn in a loop of accelerate, with gradient accumulation; on one process or on several.

python examples/trainers/monitor_accelerate.py
accelerate launch --cpu --num_processes 2 examples/trainers/monitor_accelerate.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from anisoscope.integrations.accelerate import AcceleratorMonitor
from anisoscope.monitor.schedule import every

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
torch.manual_seed(0)
walk = torch.randint(0, 4, (1024, 32)).cumsum(1) % 50  # each token is one of four that may follow the one before
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=32, pad_token_id=None, **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
loader = DataLoader(walk, batch_size=16 // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

with AcceleratorMonitor(accelerator, model, optimizer=optimizer, when=every(8), metrics="light", rank=8) as watch:
    for batch in loader:
        with watch.accumulate():  # in place of accelerator.accumulate(model)
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            watch.log(loss=float(loss.detach()))

if accelerator.is_main_process:  # which has the results of all
    energy = watch.table.where(layer=1, kind="resid", metric="gradient_energy", group="")
    for row in energy.where(variant="batch=live;fit=refit;proxy=semi_nmf;rank=8").records():
        print(f"step {row['step']:2d}: tangent energy {row['value']:.2f}, chance {8 / 64:.2f}")
accelerator.end_training()
