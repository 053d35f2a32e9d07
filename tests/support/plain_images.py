"""Plain modules that read images: stages under the names that people give them, and some that have none."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block; it may lower the resolution."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1)
        self.norm = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1)
        self.skip = nn.Conv2d(before, after, 1, stride) if (before, stride) != (after, 1) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return (self.conv2(self.norm(self.conv1(x)).relu()) + self.skip(x)).relu()


class Numbered(nn.Module):
    """layer1 … layer4 behind a stem, as in torchvision's residual networks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 2, 1)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Block(8, 8), Block(8, 8))
        self.layer2 = nn.Sequential(Block(8, 12, 2))
        self.layer3 = nn.Sequential(Block(12, 16, 2), Block(16, 16))
        self.layer4 = nn.Sequential(Block(16, 24, 2))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv1(x))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


class Nested(nn.Module):
    """A list of lists of blocks, which is never called itself, and a norm before the pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        widths = ((8, 8), (8, 12), (12, 16))
        self.levels = nn.ModuleList(
            nn.ModuleList([Block(a, b, 1 + (a != b)), Block(b, b)]) for a, b in widths
        )  # fmt: skip
        self.norm = nn.BatchNorm2d(16)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(16, 5)

    def maps(self, x: Tensor) -> list[Tensor]:
        x, found = self.stem(x), []
        for level in self.levels:
            for block in level:  # type: ignore[attr-defined]
                x = block(x)
            found.append(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.norm(self.maps(x)[-1]).relu()).flatten(1))


class Stage(nn.Module):
    """Blocks and, behind them, what lowers the resolution."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(before, before), Block(before, before))
        self.down = nn.Conv2d(before, after, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.blocks(x))


class Grouped(nn.Module):
    """A called list of stages that are modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.stages = nn.Sequential(Stage(8, 12), Stage(12, 16), Stage(16, 20))

    def maps(self, x: Tensor) -> list[Tensor]:
        x, found = self.patch(x), []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.stages(self.patch(x)).mean((2, 3))


class Last(nn.Module):
    """A block on maps with channels last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Windowed(nn.Module):
    """Stages on [B, H, W, C], where the first map has as many positions to a side as channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.stages = nn.ModuleList([nn.Sequential(Last(8), Last(8)), nn.Sequential(Last(16), Last(16))])
        self.merge = nn.Linear(32, 16)

    def maps(self, x: Tensor) -> list[Tensor]:
        first = self.stages[0](self.stem(x).permute(0, 2, 3, 1))
        parts = [first[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
        return [first, self.stages[1](self.merge(torch.cat(parts, -1)))]

    def forward(self, x: Tensor) -> Tensor:
        return self.maps(x)[-1].mean((1, 2))


class Attend(nn.Module):
    """A block that attends, without convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x, x, x)[0]
        return x + self.mlp(x)


class Attending(nn.Module):
    """A transformer over the patches that a chain of convolutions makes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.Conv2d(8, 8, 2, 2), nn.ReLU(), nn.Conv2d(8, 8, 1)
        )
        self.blocks = nn.ModuleList(Attend() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return x


class Mixed(Attending):
    """As above, with residual stages that hold most of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(Block(3, 32, 2), Block(32, 32), Block(32, 8, 2))


class Scattered(nn.Module):
    """Convolutions under names that say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, 2), nn.Conv2d(6, 6, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).mean((2, 3))


def inverted() -> nn.Module:
    """`features`: a stem, blocks and a head of one convolution each, as in torchvision's MobileNet."""
    blocks = [Block(8, 8), Block(8, 12, 2), Block(12, 12), Block(12, 16), Block(16, 16)]
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
    head = nn.Sequential(nn.Conv2d(16, 32, 1), nn.BatchNorm2d(32), nn.ReLU())
    model = nn.Module()
    model.features = nn.Sequential(stem, *blocks, head)
    model.classifier = nn.Linear(32, 5)
    return model


def chain() -> nn.Sequential:
    """Convolutions, activations and pooling one after another, as in VGG."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, 1, 1), nn.ReLU(), nn.BatchNorm2d(12), nn.Conv2d(12, 12, 3, 1, 1), nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 16, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip
