"""Measure a model that you already hold in Python: a transformers model, then any nn.Module.

python examples/measure_model.py
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import anisoscope

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=500, bos_token_id=1, eos_token_id=2))
ids = torch.randint(0, 500, (16, 64))
mask = (torch.arange(64) < torch.randint(20, 65, (16, 1))).long()  # the rest is padding, and is never counted
batches = [{"input_ids": i, "attention_mask": m} for i, m in zip(ids.split(4), mask.split(4), strict=True)]

table = anisoscope.measure(model, batches, metrics=["average_cosine", "two_nn", "svd_ratio:centred=0"])
for row in table.where(kind=["embed", "resid"], metric="average_cosine").records():
    print(f"layer {row['layer']}: average cosine {row['value']:.4f} [{row['low']:.4f}, {row['high']:.4f}]")

# any module: name what to look at
net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
table = anisoscope.measure(net, [torch.randn(512, 32)], modules=["0", "2"], metrics=["participation_ratio"])
for row in table.records():
    print(f"module {row['kind']}: participation ratio {row['value']:.2f}")
