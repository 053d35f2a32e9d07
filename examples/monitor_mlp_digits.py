"""Any module, with a loss of your own: a multilayer perceptron learns handwritten digits.

pip install scikit-learn      # for its 1,797 digits of 8×8 pixels
python examples/monitor_mlp_digits.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from anisoscope import Monitor, log_spaced

STEPS = 200

digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, held_out = order[:-512], order[-512:]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

# modules= names what to look at, as in model.named_modules(); of a probe of inputs and labels the loss is known
probe = (images[held_out], labels[held_out])
often = torch.bincount(labels[train])  # a model that learned beats the best constant answer
options = {"when": log_spaced(STEPS), "metrics": "light", "probe": probe, "constant_loss": often}
with Monitor(model, modules=["1", "3"], **options) as monitor:
    for step in range(STEPS):
        batch = train[torch.randint(len(train), (64,))]
        with monitor.step(step):
            loss = functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
        monitor.log(step, loss=loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with monitor.step(STEPS):  # the state after the last update
        pass

found = monitor.table.where(metric="gradient_enrichment", proxy="pca", fit="refit", control=None, average=None)
print("how many times chance 16 directions of the activations hold of the gradients' energy, after each ReLU")
for step in found.unique("step"):
    print(f"step {step:3d}: " + "  ".join(f"{row['value']:5.2f}" for row in found.where(step=step).records()))
losses = {name: monitor.table.value(metric=name, step=STEPS) for name in ("probe_loss", "constant_loss")}
print(f"held-out loss {losses['probe_loss']:.2f}, of the best constant {losses['constant_loss']:.2f}")
