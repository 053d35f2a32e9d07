"""Every statistic is a commutative monoid: identity, associativity, any partition and order, and it survives a save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anisoscope.stats.directions import Attention, Coherence, ContextPairs, Coordinates, Directions, Keys, Means
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample


@dataclass(frozen=True)
class Case:
    """How to make an empty statistic, and how rows (with their own numbers) get into it."""

    empty: Callable[[], Any]
    shape: tuple[int, ...]
    exact: bool = False

    def of(self, x: Tensor, number: Tensor) -> Any:
        return self.fill(self.empty(), x, number)

    def fill(self, stat: Any, x: Tensor, number: Tensor) -> Any:
        if isinstance(stat, Sample):
            return stat.update(x, context=number // 4, position=number % 4, token=number % 3, group=number % 2)
        return stat.update(x, number) if isinstance(stat, ContextPairs) else stat.update(x)


CASES = {
    "moments": Case(Moments, (5,)),
    "moments of heads": Case(Moments, (2, 3)),
    "directions": Case(Directions, (5,)),
    "directions of heads": Case(Directions, (2, 3)),
    "coordinates": Case(Coordinates, (5,)),
    "coordinates of heads": Case(Coordinates, (2, 3)),
    "pairs of contexts": Case(ContextPairs, (5,)),
    "pairs of contexts of heads": Case(ContextPairs, (2, 3)),
    "keys": Case(Keys, (2, 3)),
    "means": Case(Means, (3,)),
    "attention": Case(Attention, (2, 7)),
    "coherence": Case(Coherence, ()),
    "sample": Case(lambda: Sample(17), (5,), exact=True),
    "sample of heads": Case(lambda: Sample(17), (2, 3), exact=True),
}


def rows(case: Case, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, *case.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 2.0
    return x, torch.arange(n)


def held(stat: Any) -> dict[str, Any]:
    """What a statistic holds; that of moments is theirs, however many of their rows still wait to be added."""
    if isinstance(stat, Moments) and stat.n:
        return {"n": torch.as_tensor(stat.n), "mean": stat.mean, "scatter": stat.scatter}
    state: dict[str, Any] = stat.state()
    return state


def same(one: Any, two: Any, *, exact: bool = False) -> None:
    mine, theirs = held(one), held(two)
    assert set(mine) == set(theirs)
    for key, tensor in mine.items():
        if exact:
            assert torch.equal(tensor, theirs[key]), key
        else:
            torch.testing.assert_close(tensor, theirs[key], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_an_empty_statistic_is_the_identity(name: str) -> None:
    case = CASES[name]
    stat = case.of(*rows(case, 30))
    same(stat, stat.merge(case.empty()), exact=case.exact)
    same(stat, case.empty().merge(stat), exact=case.exact)
    empty = case.empty().merge(case.empty())
    same(empty, case.empty())


@pytest.mark.parametrize("name", CASES)
def test_merging_is_associative_and_commutative(name: str) -> None:
    case = CASES[name]
    x, number = rows(case, 90)
    a, b, c = (case.of(x[i::3], number[i::3]) for i in range(3))
    same(a.merge(b).merge(c), a.merge(b.merge(c)), exact=case.exact)
    same(a.merge(b), b.merge(a), exact=case.exact)
    same(a.merge(b).merge(c), case.of(x, number), exact=case.exact)


@pytest.mark.parametrize("name", CASES)
def test_merging_changes_neither_part(name: str) -> None:
    case = CASES[name]
    x, number = rows(case, 60)
    a, b = case.of(x[:40], number[:40]), case.of(x[40:], number[40:])
    merged = a.merge(b)
    case.fill(merged, *rows(case, 50, seed=1))
    same(a, case.of(x[:40], number[:40]), exact=case.exact)
    same(b, case.of(x[40:], number[40:]), exact=case.exact)


@pytest.mark.parametrize("name", CASES)
@given(cuts=st.lists(st.integers(0, 70), max_size=6), seed=st.integers(0, 1000))
def test_any_partition_and_order_give_the_same_state(name: str, cuts: list[int], seed: int) -> None:
    case = CASES[name]
    x, number = rows(case, 70)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(seed))
    stat = case.empty()
    for part in order.tensor_split(sorted(cuts)):
        case.fill(stat, x[part], number[part])
    same(stat, case.of(x, number), exact=case.exact)


@pytest.mark.parametrize("name", CASES)
def test_a_saved_statistic_goes_on_as_if_nothing_had_happened(name: str) -> None:
    case = CASES[name]
    x, number = rows(case, 80)
    half = case.of(x[:33], number[:33])
    loaded = type(half).load({k: v.clone() for k, v in half.state().items()})
    same(loaded, half, exact=case.exact)
    same(case.fill(loaded, x[33:], number[33:]), case.of(x, number), exact=case.exact)
    same(type(half).load(case.empty().state()), case.empty())


@pytest.mark.parametrize("name", CASES)
def test_reading_a_statistic_leaves_it_as_it_is(name: str) -> None:
    case = CASES[name]
    x, number = rows(case, 80)
    stat = case.of(x[:50], number[:50])
    stat.state()
    if isinstance(stat, Moments):
        stat.eigenvalues()
    same(case.fill(stat, x[50:], number[50:]), case.of(x, number), exact=case.exact)


@pytest.mark.parametrize("name", [name for name in CASES if "heads" in name or name == "keys"])
def test_a_head_is_the_statistic_of_that_heads_rows(name: str) -> None:
    case = CASES[name]
    x, number = rows(case, 50)
    whole = case.of(x, number)
    for head in range(2):
        one, two = held(whole.head(head)), held(case.of(x[:, head].contiguous(), number))
        for key in two:
            torch.testing.assert_close(one[key], two[key], rtol=1e-9, atol=1e-9)
