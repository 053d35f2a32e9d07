"""A small ResNet of your own: positions of its feature maps are rows, and the training batches themselves are read.

pip install scikit-learn      # for its digits
python examples/monitor_resnet.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from anisoscope import Monitor, log_spaced

STEPS = 60


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv_1, self.norm_1 = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv_2, self.norm_2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        same = width == out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(width, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm_2(self.conv_2(self.relu(self.norm_1(self.conv_1(x)))))
        out: Tensor = self.relu(inner + self.shortcut(x))
        return out


class ResNet(nn.Module):
    """A stem, two stages of two blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 32, 3, padding=1)
        self.stage_1 = nn.Sequential(Block(32, 32, 1), Block(32, 32, 1))
        self.stage_2 = nn.Sequential(Block(32, 64, 2), Block(64, 64, 1))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.stage_2(self.stage_1(self.stem(images)))
        out: Tensor = self.head(maps.mean((2, 3)))
        return out


digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)

torch.manual_seed(0)
model = ResNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

# in a pattern * stands for one part of a name: here the stem and all four blocks
options = {"when": log_spaced(STEPS), "metrics": "light", "rank": 8}
with Monitor(model, modules=["stem", "stage_*.*"], **options) as monitor:
    for step in range(STEPS):
        batch = torch.randint(len(images), (64,))
        with monitor.step(step):
            loss = functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
        monitor.log(step, loss=loss.item())
        optimizer.step()
        optimizer.zero_grad()

energy = monitor.table.where(metric="gradient_energy", proxy="semi_nmf", fit="refit", average=None, group="")
last = max(energy.unique("step"))
print(f"share of the gradients' energy at step {last} in 8 directions of the activations, and in 8 random ones")
for row in energy.where(step=last, control=None).records():
    [random] = energy.where(step=last, layer=row["layer"], control="random").arrow["value"].to_pylist()
    print(
        f"{row['kind']:10s} {row['value']:.2f} [{row['low']:.2f}, {row['high']:.2f}]   {random:.2f}   {row['n']} rows"
    )
