"""Watch a model learn in a training loop of your own: where do the true gradients go, relative to its activations?

python examples/monitor_any_loop.py
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from anisoscope.data.text import read_documents
from anisoscope.runs.monitor import Monitor
from anisoscope.runs.schedule import log_spaced

STEPS = 64

# characters of the corpus that ships with the package, cut into contexts; the last ones are never trained on
text = next(iter(read_documents(None))).text
while len(text) < 120_000:
    text += "".join(document.text for _, document in zip(range(40), read_documents(None), strict=False))
vocabulary = sorted(set(text))
ids = torch.tensor([vocabulary.index(character) for character in text[:120_000]])
contexts = ids[: len(ids) // 64 * 64].view(-1, 64)
train, held_out = contexts[:-64], contexts[-64:]

torch.manual_seed(0)
size = {"n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": len(vocabulary)}
model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

# `probe` is looked at in passes of the monitor's own; leave it out to read the training batches themselves
with Monitor(model, when=log_spaced(STEPS), metrics="light", probe=[held_out], optimizer=optimizer) as monitor:
    for step in range(STEPS):
        batch = train[torch.randint(len(train), (16,))]
        with monitor.step(step):  # before the update: step 0 is the initialisation
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
        monitor.log(step, loss=float(loss))
        optimizer.step()
        optimizer.zero_grad()
    with monitor.step(STEPS):  # the state after the last update, which no batch is run for
        pass

table = monitor.table.where(layer=2, kind="resid", group="", variant="fit=refit;proxy=semi_nmf;rank=16")
for row in table.where(metric="gradient_energy").records():
    ratio = table.value(step=row["step"], metric="gradient_enrichment")
    print(f"step {row['step']:3d}: {row['value']:.2f} of the gradient energy of layer 2 in its tangent proxy ({ratio:.1f}×)")
