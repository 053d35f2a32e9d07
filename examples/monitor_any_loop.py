"""Watch a model learn in a training loop of your own: where do the true gradients go, relative to its activations?

python examples/monitor_any_loop.py
"""

from __future__ import annotations

from itertools import islice

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from anisoscope import Monitor
from anisoscope.data.text import read_documents
from anisoscope.monitor.schedule import log_spaced

STEPS, LENGTH = 32, 48

# characters of the corpus that ships with the package, cut into contexts; the last ones are never trained on
text = "".join(document.text for document in islice(read_documents(None), 12))
vocabulary = {character: i for i, character in enumerate(sorted(set(text)))}
ids = torch.tensor([vocabulary[character] for character in text])
contexts = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
train, held_out = contexts[:-32], contexts[-32:]

torch.manual_seed(0)
size = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": LENGTH, "vocab_size": len(vocabulary)}
model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

# the probe is looked at in passes of the monitor's own; leave it out to read the training batches themselves
with Monitor(model, when=log_spaced(STEPS), metrics="light", probe=[held_out], rank=8) as monitor:
    for step in range(STEPS):
        batch = train[torch.randint(len(train), (16,))]
        with monitor.step(step):  # before the update: step 0 is the initialisation
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
        monitor.log(step, loss=loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with monitor.step(STEPS):  # the state after the last update, which no batch is run for
        pass

table = monitor.table.where(layer=1, kind="resid", group="", metric="gradient_energy")
print("share of the gradient energy of layer 1 in 8 directions fitted on activations, and in 8 random ones")
for row in table.where(variant="fit=refit;proxy=semi_nmf;rank=8").records():
    random = table.value(step=row["step"], variant="control=random;fit=refit;proxy=semi_nmf;rank=8")
    print(f"step {row['step']:3d}: {row['value']:.2f} [{row['low']:.2f}, {row['high']:.2f}]   {random:.2f}")
