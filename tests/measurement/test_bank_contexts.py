"""Statistics of whole contexts in a bank: any batching, first positions or not, saved and merged."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from anisoscope.capture.row import Index, Rows
from anisoscope.capture.sites.site import Site
from anisoscope.measurement.bank import Bank, make_plan
from anisoscope.measurement.evaluation import row_counts, selections
from anisoscope.metrics.catalogue import parse_requests, registry
from anisoscope.metrics.engine.estimation import Estimate, evaluate, evaluate_heads
from support import references

SITE, LENGTHS, WIDTH = Site(1, "resid"), (5, 9, 3, 12, 7, 4, 8, 6, 9, 5), 4
CONTEXTS = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
X = (
    np.random.default_rng(0).normal(size=(len(CONTEXTS), WIDTH))
    + np.random.default_rng(1).normal(size=(10, 4))[CONTEXTS]
)
FIRST = np.concatenate([np.arange(length) == 0 for length in LENGTHS])
BETWEEN = {"pairs": "between"}


def filled(parts: list[list[int]], *, heads: int = 0) -> Bank:
    """A bank that was given these contexts, a batch for each list."""
    bank = Bank(make_plan(parse_requests(["average_cosine:pairs=between"]), ["resid"], seed=0))
    for contexts in parts:
        longest = max(LENGTHS[c] for c in contexts)
        place = [(row, c) for row, c in enumerate(contexts)]
        keep = torch.cat([row * longest + torch.arange(LENGTHS[c]) for row, c in place])
        position = torch.cat([torch.arange(LENGTHS[c]) for c in contexts])
        key = torch.tensor(contexts).repeat_interleave(torch.tensor([LENGTHS[c] for c in contexts]))
        group = tuple("ab"[c % 2] for c in contexts)
        index = Index(len(contexts), longest, keep, key, position, torch.zeros_like(key), group, position == 0)
        x = torch.cat([torch.as_tensor(X[c == CONTEXTS]) for c in contexts])
        bank.rows(Rows(SITE, torch.stack([x * (h + 1) - h for h in range(heads)], 1) if heads else x, index))
    return bank


def seen(bank: Bank, *, without_first: bool = False, group: str = "") -> Estimate:
    found = selections(bank.sites[SITE], bank.groups, without_first=True, wanted=0, most=64)
    chosen = next(s for s in found if s.group == group and bool(s.variant) == without_first)
    return evaluate(registry()["average_cosine"], chosen.view, BETWEEN)


@pytest.mark.parametrize("parts", [[list(range(10))], [[c] for c in range(10)], [[9, 0, 4], [1, 2, 3, 8], [7, 6, 5]]])
def test_pairs_of_different_contexts_are_those_of_all_rows_for_any_batching(parts: list[list[int]]) -> None:
    bank = filled(parts)
    bank = Bank.load(bank.plan, bank.state())
    for chosen, options in (
        (CONTEXTS >= 0, {}),
        (~FIRST, {"without_first": True}),
        (CONTEXTS % 2 == 1, {"group": "b"}),
    ):
        expected = references.average_cosine_between(X[chosen], CONTEXTS[chosen])
        found = seen(bank, **options)  # type: ignore[arg-type]
        assert found.value == pytest.approx(expected, rel=1e-12)
        assert found.n == chosen.sum() and found.contexts == len(set(CONTEXTS[chosen].tolist()))
    assert row_counts(bank)["row_count"] == len(X), "whole contexts are not counted twice"


def test_banks_merge() -> None:
    one, two, both = filled([[0, 1, 2, 3]]), filled([[4, 5, 6, 7, 8, 9]]), filled([list(range(10))])
    assert seen(one.merge(two)).value == pytest.approx(seen(both).value, rel=1e-12)
    assert seen(one.merge(two)).replicates == pytest.approx(seen(both).replicates, rel=1e-9)


def test_heads_have_theirs() -> None:
    bank = filled([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], heads=3)
    view = next(selections(bank.sites[SITE], bank.groups, without_first=False, wanted=0, most=64)).view
    found = evaluate_heads(registry()["average_cosine"], view, BETWEEN, heads=3)
    for head, estimate in enumerate(found):
        assert estimate.value == pytest.approx(references.average_cosine_between(X * (head + 1) - head, CONTEXTS))
