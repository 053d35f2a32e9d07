"""What run.json says of a monitored run: its model, and the options that a resumed run must share with the first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import nn

from anisoscope.capture.sites.layout import Layout
from anisoscope.measurement.inspection import modality_words
from anisoscope.models.forward import is_plain, unwrapped
from anisoscope.monitor.instruments import Instruments, Probe
from anisoscope.tangent.plan import TangentPlan


def shared_options(
    options: Mapping[str, Any],
    plan: TangentPlan | None,
    *,
    probe: Probe | None,
    live: bool,
    skipped: Mapping[str, bool],
    halves: bool,
    rows_taken: int,
) -> dict[str, Any]:
    """The options under which results of a resumed run may join those of the first."""
    found = {**options, "probe": None if probe is None else probe.fingerprint}
    found |= {"plan": None if plan is None else asdict(plan), "live": live, **skipped}
    found |= {"halves": True} if halves else {}
    return found | ({"every_step": rows_taken} if rows_taken else {})


def model_entry(
    model: nn.Module, instruments: Instruments, *, name: str, layout: Layout, tokenizer: Any, probed: bool
) -> dict[str, Any]:
    """The model's entry in run.json."""
    depths = layout.depths
    entry: dict[str, Any] = {"name": name, "architecture": type(unwrapped(model)).__name__, "stacks": list(depths)}
    targets = instruments.targets
    entry |= {"gradients_of": "weighted loss"} if targets is not None and targets.gradients else {}
    entry |= modality_words(model, list(depths), tokenizer, layout=layout)
    entry |= {"modules": [site.name for site in layout.modules]} if layout.modules else {}
    if layout.modules and is_plain(model):
        entry |= {"modality": {}, "rows": dict.fromkeys(depths, "one context or position of a module's output")}
    entry["layers"] = max(depths.values())
    return entry | ({} if probed else {"measured_on": "the training batches"})


def data_entry(probe: Probe | None, shown: int) -> dict[str, Any]:
    """The entry on the data in run.json: what was looked at, by the content of the probe or of training batches."""
    if probe is not None:
        return {"data": {"fingerprint": str(probe.fingerprint)}}
    if not shown:
        return {}
    return {"data": {"fingerprint": f"{shown:016x}", "of": "training batches of the measured steps"}}
