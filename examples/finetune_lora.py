"""Fine-tuning with LoRA: the weights are frozen but for small adapters; do gradients still go where activations point?

pip install "anisoscope[peft]"
python examples/finetune_lora.py
"""

from __future__ import annotations

from itertools import islice

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from anisoscope import Monitor, log_spaced
from anisoscope.data.text import read_documents

STEPS, LENGTH = 32, 48

# characters of the corpus that ships with the package; fine-tuning is to write in capitals
text = "".join(document.text for document in islice(read_documents(None), 12))
alphabet = {character: i for i, character in enumerate(sorted(set(text + text.upper())))}


def contexts(text: str) -> torch.Tensor:
    ids = torch.tensor([alphabet[character] for character in text])
    return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)


def batch_of(rows: torch.Tensor) -> torch.Tensor:
    return rows[torch.randint(len(rows), (24,))]


torch.manual_seed(0)
size = {"n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": LENGTH, "vocab_size": len(alphabet)}
base = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False))
optimizer = torch.optim.AdamW(base.parameters(), lr=3e-3)
for _ in range(2 * STEPS):  # stands for a pretrained model
    batch = batch_of(contexts(text))
    base(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

capitals = contexts(text.upper())
train, held_out = capitals[:-64], capitals[-64:]
model = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

with Monitor(model, when=log_spaced(STEPS), metrics="light", probe=[held_out], rank=8) as monitor:
    for step in range(STEPS):
        batch = batch_of(train)
        with monitor.step(step):
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
        monitor.log(step, loss=loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with monitor.step(STEPS):  # the state after the last update
        pass

found = monitor.table.where(metric="gradient_enrichment", proxy="pca", fit="refit", control=None, group="")
print("how many times chance 8 directions of the activations hold of the gradients' energy, after each block")
for step in found.unique("step"):
    here = found.where(step=step, kind="resid", average=None).records()
    loss = monitor.table.value(metric="probe_loss", step=step)
    print(f"step {step:3d}: " + "  ".join(f"{row['value']:5.2f}" for row in here) + f"   held-out loss {loss:.2f}")
print("\n".join(monitor.notes))
