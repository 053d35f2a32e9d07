"""A diffusion transformer of your own: noise and times are drawn in the loss, which the probe is given as a function.

pip install scikit-learn      # for its digits
python examples/monitor_diffusion.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from anisoscope import Monitor, log_spaced

STEPS, WIDTH, BLOCKS = 64, 64, 3


class DiTBlock(nn.Module):
    """A transformer block whose norms are scaled and shifted by the time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale_1, shift_1, gate_1, scale_2, shift_2, gate_2 = self.modulation(time)[:, None].chunk(6, -1)
        inner = self.norm_1(x) * (1 + scale_1) + shift_1
        x = x + gate_1 * self.attention(inner, inner, inner, need_weights=False)[0]
        out: Tensor = x + gate_2 * self.mlp(self.norm_2(x) * (1 + scale_2) + shift_2)
        return out


class DiT(nn.Module):
    """Predicts the noise in images of 8×8 pixels from patches of 2×2."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(1, WIDTH, 2, stride=2), nn.Parameter(0.02 * torch.randn(16, WIDTH))
        self.time = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU())
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(BLOCKS))
        self.out = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4))

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        x, when = self.patches(noisy).flatten(2).transpose(1, 2) + self.places, self.time(time[:, None])
        for block in self.blocks:
            x = block(x, when)
        return nn.functional.fold(self.out(x).transpose(1, 2), (8, 8), 2, stride=2)


def summed_loss(model: nn.Module, images: Tensor) -> Tensor:
    """The squared error of the predicted noise, summed over all images."""
    noise, time = torch.randn_like(images), torch.rand(len(images))
    angle = time[:, None, None, None] * torch.pi / 2
    return (model(angle.cos() * images + angle.sin() * noise, time) - noise).square().mean((1, 2, 3)).sum()


digits = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
train, held_out = digits[:-128], digits[-128:]

torch.manual_seed(0)
model = DiT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# loss= is called with the model and a part of the probe; its random numbers are the same at every step
options = {"when": log_spaced(STEPS), "metrics": "light", "probe": [held_out], "loss": summed_loss, "batch_size": 64}
with Monitor(model, modules=["patches", "blocks.*"], constant_loss=1.0, **options) as monitor:
    for step in range(STEPS):
        batch = train[torch.randint(len(train), (64,))]
        with monitor.step(step):
            loss = summed_loss(model, batch) / len(batch)
            loss.backward()
        monitor.log(step, loss=loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with monitor.step(STEPS):  # the state after the last update
        pass

found = monitor.table.where(metric="gradient_enrichment", proxy="pca", fit="refit", control=None, average=None)
print("how many times chance 16 directions of the activations hold of the gradients' energy")
print("          " + "  ".join(row["kind"] for row in found.where(step=0).records()))
for step in found.unique("step"):
    line = "  ".join(f"{row['value']:{len(row['kind'])}.2f}" for row in found.where(step=step).records())
    print(f"step {step:3d}: {line}   held-out loss {monitor.table.value(metric='probe_loss', step=step):.2f}")
