"""Batch norms of models that never learned: without statistics they would do nothing, and whole networks would fade.

A fresh batch norm has mean 0 and variance 1 until training tells it otherwise, so a model looked at before that has no
norms at all: rows keep the offset that the norms are there to remove, and in deep ones they shrink to exact zeros.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from anisoscope.runs.profile import ProfileConfig, Profiler
from anisoscope.training.models import hushed

CONTEXTS = 64  # that the statistics are taken from, at most
NORMED = "batch norms have the statistics of one pass over the probe, in which nothing was learned"


class NormedProfiler(Profiler):
    """A profile of a model whose batch norms have seen its probe once; its weights are random all the same."""

    def _network(self, key: str, spec: str, requests: list[Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        records, entry = super()._network(key, spec, requests)
        entry["notes"] = [f"random weights (seed {self.config.seed})", NORMED, *entry.get("notes", [])]
        return records, entry


def with_statistics(config: ProfileConfig, folder: Path) -> ProfileConfig:
    """The same profile of the same random weights, stored with batch norms that have seen the probe once."""
    from anisoscope.capture.loading import load_model
    from anisoscope.runs.feed import make_feed

    (spec,) = config.models
    place = folder / Path(spec).name
    if not (place / "config.json").is_file():
        loaded = load_model(spec, random_init=True, device="cpu", dtype="float32", seed=config.seed)
        batches = make_feed(loaded, config).batches()
        few = list(islice(batches, -(-CONTEXTS // config.batch_size)))
        show_once(loaded.model, {name: torch.cat([batch.inputs[name] for batch in few]) for name in few[0].inputs})
        with hushed():
            loaded.model.save_pretrained(str(place))  # type: ignore[operator]
    return replace(config, models=(str(place),), random_init=False)


def show_once(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Run the model once with its batch norms as in training, which then keep the mean and variance that they saw."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    with torch.no_grad():
        model(**inputs)
    model.eval()
