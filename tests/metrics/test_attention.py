"""Rows of attention: against an explicit softmax, and at their limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from anisoscope.metrics.attention import QUANTITIES, row_sharpness
from support import references


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


def masks(rows: int, keys: int) -> dict[str, torch.Tensor]:
    causal = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    left = causal.clone()
    left[:, :3] = False
    return {"full": torch.ones(rows, keys, dtype=torch.bool), "causal": causal, "left": left}


@pytest.mark.parametrize("kind", ["full", "causal", "left"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scale", [0.3, 30.0])
def test_attention_rows_equal_an_explicit_softmax(kind: str, biased: bool, scale: float) -> None:
    query, key, allowed = normal(4, 14, 6), normal(2, 14, 6, seed=1), masks(14, 14)[kind]
    bias = normal(4, 14, 14, seed=2) if biased else None
    first, added = 3 if kind == "left" else 0, None if bias is None else bias[None]
    seen = row_sharpness(query[None], key[None], allowed[None, None], bias=added, scaling=scale, first=first)[0]
    assert seen.shape == (4, 14, len(QUANTITIES))
    for head in range(4):
        plain = scale * query[head].double() @ key[head // 2].double().T
        scores = plain if bias is None else plain + bias[head].double()
        for row in range(14):
            expected = references.attention_row(
                scores[row].numpy(), allowed[row].numpy(), first, plain=plain[row].numpy()
            )
            np.testing.assert_allclose(seen[head, row].numpy(), expected, rtol=2e-4, atol=2e-5)


def test_what_a_forbidden_key_holds_does_not_matter() -> None:
    query, key, allowed = normal(2, 12, 6), normal(2, 12, 6, seed=1), masks(12, 12)["full"].clone()
    allowed[:, 9:] = False
    plain = row_sharpness(query[None], key[None], allowed[None, None], bias=None, scaling=1.0, first=0)[0]
    for value in (1e4, torch.inf, torch.nan):
        other = key.clone()
        other[:, 9:] = value
        seen = row_sharpness(query[None], other[None], allowed[None, None], bias=None, scaling=1.0, first=0)[0]
        torch.testing.assert_close(seen, plain, rtol=1e-5, atol=1e-6)


def test_rows_that_see_fewer_than_eight_keys_are_left_out_and_others_are_not() -> None:
    query, key = normal(1, 12, 4), normal(1, 12, 4, seed=1)
    seen = row_sharpness(query[None], key[None], masks(12, 12)["causal"][None, None], bias=None, scaling=1.0, first=0)[
        0
    ]
    entropy = seen[0, :, QUANTITIES.index("entropy")]
    assert entropy[:7].isnan().all()
    assert entropy[7:].isfinite().all()
    rest = seen[0, :, QUANTITIES.index("entropy_rest")]
    assert rest[:8].isnan().all()
    assert rest[8:].isfinite().all()


def test_extreme_scores_give_the_limits() -> None:
    key = torch.zeros(1, 20, 1)
    key[0, 4] = 1e4
    allowed = torch.ones(1, 1, 20, dtype=torch.bool)
    seen = row_sharpness(torch.ones(1, 1, 1, 1), key[None], allowed[None], bias=None, scaling=1.0, first=0)[0, 0, 0]
    assert seen[QUANTITIES.index("entropy")] == pytest.approx(0.0, abs=1e-6)
    assert seen[QUANTITIES.index("sharpness")] == pytest.approx(1.0)
    flat = row_sharpness(torch.ones(1, 1, 1, 1), 0 * key[None], allowed[None], bias=None, scaling=1.0, first=0)[0, 0, 0]
    assert flat[QUANTITIES.index("entropy")] == pytest.approx(1.0)
    assert flat[QUANTITIES.index("sharpness")] == pytest.approx(0.0, abs=1e-6)
    assert flat[QUANTITIES.index("first_mass")] == pytest.approx(1 / 20)
