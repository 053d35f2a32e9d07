"""Text and tables that the tests of measure share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anisoscope.capture import Capture, find_layout
from anisoscope.measurement.bank import Bank, make_plan
from anisoscope.metrics.catalogue import parse_requests
from anisoscope.results.query import Table
from support.clouds import METRICS
from support.tiny_models import contexts, padded

LENGTHS = (20, 11, 17, 9, 14, 20, 8, 12, 18, 10)
TEXT = contexts(*LENGTHS, seed=3)
MAIN = ["average_cosine", "svd_ratio", "svd_ratio_squared", "participation_ratio", "iso_score", "two_nn"]
# all of them but the one whose clustering takes most of the time
NEARLY_ALL = [*(set(METRICS) - {"local_anisotropy"}), "local_anisotropy:partition=none"]


def batches(*, size: int = 4, side: str = "right", text: list[Tensor] | None = None) -> list[dict[str, Tensor]]:
    """Padded batches with explicit positions, so that the padding side changes nothing in the model."""
    text = TEXT if text is None else text
    made = []
    for start in range(0, len(text), size):
        batch = padded(text[start : start + size], side=side)
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
        made.append(batch)
    return made


def hidden(model: nn.Module, made: list[dict[str, Tensor]]) -> list[np.ndarray]:
    """The model's own hidden states, layer by layer, without padding."""
    layers: list[list[Tensor]] = []
    with torch.inference_mode():
        for batch in made:
            states = model(**batch, output_hidden_states=True).hidden_states
            layers.append([state[batch["attention_mask"].bool()] for state in states])
    return [torch.cat([part[i] for part in layers]).double().numpy() for i in range(len(layers[0]))]


def rows_of(table: Table, **columns: Any) -> dict[tuple[Any, ...], dict[str, Any]]:
    names = ("stack", "layer", "kind", "head", "group", "metric", "variant")
    return {tuple(row[name] for name in names): row for row in table.where(**columns).records()}


def same_tables(one: Table, two: Table, *, rel: float, names: tuple[str, ...] = ("value", "low", "high")) -> None:
    mine, theirs = rows_of(one), rows_of(two)
    assert set(mine) == set(theirs)
    for key, row in mine.items():
        other = theirs[key]
        for name in names:
            assert other[name] == pytest.approx(row[name], rel=rel, abs=1e-10, nan_ok=True), (key, name)
        assert (other["n"], other["contexts"], other["dropped"]) == (row["n"], row["contexts"], row["dropped"]), key


def fed_bank(model: nn.Module, made: list[Any], *, sample_size: int = 4096, bank: Bank | None = None) -> Bank:
    layout = find_layout(model)
    kinds = ["embed", "resid", "final", "query", "key", "scores"]
    sites = layout.sites([kind for kind in kinds if kind in layout.kinds], layers={0, 2})
    plan = make_plan(parse_requests(NEARLY_ALL), kinds, seed=0, sample_size=sample_size, attention_rows=8)
    bank = Bank(plan) if bank is None else bank
    with Capture(model, sites, bank, layout=layout) as capture:
        for batch in made:
            capture.run(batch)
    return bank


def same_states(one: Any, two: Any, *, within: float = 0.0) -> None:
    """Assert that two saved states are equal to the last bit, or their numbers within a relative distance."""
    if isinstance(one, torch.Tensor):
        same = torch.equal(one, two) if not within else torch.allclose(one, two, rtol=within, atol=within)
        assert same and one.dtype == two.dtype
    elif isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one:
            same_states(one[key], two[key], within=within)
    elif isinstance(one, list | tuple):
        assert len(one) == len(two)
        for mine, theirs in zip(one, two, strict=True):
            same_states(mine, theirs, within=within)
    else:
        assert one == two
