"""The k nearest rows are exact, whatever the precision that found the candidates."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from anisoscope.numerics import neighbours as neighbors
from anisoscope.numerics import screening
from anisoscope.numerics.neighbours import search
from anisoscope.numerics.screening import PLACES, Rounded, block_side, centre, pair_error

K = 9
PRECISIONS = ("bfloat16", "float32", None)


def brute(x: Tensor, k: int = K) -> Tensor:
    """Distances by differences in float64, row by row."""
    wide = x.double()
    found = []
    for i, row in enumerate(wide):
        far = torch.linalg.vector_norm(wide - row, dim=1)
        far[i] = torch.inf
        found.append(far.topk(k, largest=False).values)
    return torch.stack(found)


@cache
def clouds() -> dict[str, Tensor]:
    torch.manual_seed(0)
    centres = 10 * torch.randn(10, 30)
    gauss = torch.randn(1500, 40)
    return {
        "gauss": gauss,
        "common mean of norm 3000": gauss + 3000 / 40**0.5,
        "few dimensions": torch.randn(1500, 6) @ torch.randn(6, 60) + 0.01 * torch.randn(1500, 60),
        "tight clusters": centres[torch.randint(0, 10, (1400,))] + 0.01 * torch.randn(1400, 30),
        "massive rows": torch.cat([gauss, 3000 + torch.randn(60, 40)]),
        "sorted by distance": gauss * torch.linspace(0.01, 3, 1500).unsqueeze(1),
        "two far apart": torch.cat([gauss[:600].double() + 1e8, gauss[600:1200].double() - 1e8]),
        "one column": torch.randn(1300, 1),
        "tiny numbers": gauss.double() * 1e-30,
        "huge numbers": gauss * 1e25,
        "half precision": gauss.bfloat16(),
        "one direction dominates": gauss * torch.tensor([1e4, *[1.0] * 39]),
        "an odd number of rows": gauss[:1033],
    }


@cache
def brute_of(name: str) -> Tensor:
    return brute(clouds()[name])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", list(clouds()))
def test_distances_equal_brute_force_in_float64(name: str, precision: str | None) -> None:
    x = clouds()[name]
    found = search(x, K, precision=precision)
    torch.testing.assert_close(found.distance, brute_of(name), rtol=1e-12, atol=0.0)
    true = torch.linalg.vector_norm(x.double().unsqueeze(1) - x.double()[found.index], dim=2)
    torch.testing.assert_close(true, found.distance, rtol=1e-12, atol=0.0)
    assert not bool((found.index == torch.arange(len(x)).unsqueeze(1)).any())


def test_many_equal_distances_are_all_right() -> None:
    x = torch.cartesian_prod(*[torch.arange(5.0)] * 4)
    found = search(x, K)
    torch.testing.assert_close(found.distance, brute(x), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("n", [2, 3, 5, 15, 16, 17, 33])
def test_clouds_smaller_than_the_list_need_no_proof(n: int) -> None:
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(n))
    found = search(x, K)
    assert found.redone == 0.0
    torch.testing.assert_close(found.distance, brute(x, min(K, n - 1)), rtol=1e-12, atol=0.0)


def rounded(x: Tensor, precision: str, **how: Any) -> Rounded:
    return screening.rounded(x, precision, **{"shift": centre(x), "pad": PLACES, **how})


def squared_range(low: Rounded, n: int) -> tuple[Tensor, Tensor]:
    """D of all pairs as the screening computes it, and the bound on its error."""
    squared = -2.0 * low.keys(slice(0, n), slice(0, n)).double()
    everyone = torch.arange(n)
    return squared, pair_error(low, squared, everyone.expand(n, -1), rows=everyone)


@pytest.mark.parametrize("precision", ["bfloat16", "tfloat32", "float32"])
@pytest.mark.parametrize("name", ["gauss", "few dimensions", "massive rows", "one direction dominates", "huge numbers"])
def test_every_key_lies_within_its_bound(name: str, precision: str) -> None:
    x = clouds()[name]
    low = rounded(x, precision)
    squared, error = squared_range(low, len(x))
    wide = x.double() * low.scale
    true = torch.cdist(wide, wide, compute_mode="donot_use_mm_for_euclid_dist").square()
    assert bool(((squared - true).abs() <= error).all())


def test_the_bound_is_not_idle() -> None:
    """A tenth of γ would be too little for some pair of rounded rows: the bound means something."""
    x = torch.full((64, 512), 1.0 + 2.0**-9)
    x[32:] = -x[32:]
    low = rounded(x, "bfloat16", shift=torch.zeros(512).double())
    squared, error = squared_range(low, len(x))
    true = torch.cdist(x.double(), x.double()).square() * low.scale**2
    assert bool(((squared - true).abs() > 0.1 * error).any())


def test_rows_that_low_precision_cannot_tell_apart_are_searched_again() -> None:
    found = clouds()
    assert search(found["tight clusters"], K, precision="bfloat16").redone == 1.0
    assert search(found["gauss"], K, precision="bfloat16").redone == 0.0
    assert 0.0 < search(found["massive rows"], K, precision="bfloat16").redone < 0.1


def test_float32_is_taken_where_most_rows_would_have_to_be_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbors, "quick_precision", lambda: "bfloat16")
    monkeypatch.setattr(neighbors, "_FEW", 1024)
    assert search(clouds()["tight clusters"], K).precision == "float32"
    assert search(clouds()["gauss"], K).precision == "bfloat16"


def test_a_proof_that_always_failed_would_change_nothing_but_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x = clouds()["gauss"]
    before = search(x, K)
    monkeypatch.setattr(screening.Candidates, "suffice", lambda self, kth: torch.zeros_like(kth, dtype=torch.bool))
    after = search(x, K)
    assert (before.redone, after.redone) == (0.0, 1.0)
    assert torch.equal(before.index, after.index)


def test_a_wrong_bound_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bound, candidates of coarse keys miss neighbours: the test above can fail."""
    x = clouds()["tight clusters"]
    real = screening.rounded
    monkeypatch.setattr(neighbors, "rounded", lambda *args, **more: replace(real(*args, **more), gamma=0.0, out=0.0))
    found = search(x, K, precision="bfloat16")
    assert not torch.allclose(found.distance, brute(x), rtol=1e-6)


@pytest.mark.parametrize("n", [40, 500, 1033, 3000, 9000, 12_345])
def test_blocks_hold_all_rows_with_little_padding(n: int) -> None:
    side = block_side(n, "cpu")
    assert not side % PLACES
    count = -(-n // side)
    assert count * side - n < count * PLACES


@pytest.mark.parametrize("span", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_several_spans_of_blocks_give_the_same_neighbours(
    span: int, precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = clouds()["gauss"]
    whole = search(x, K, precision=precision)
    monkeypatch.setattr(screening, "_SPAN", span)
    parts = search(x, K, precision=precision)
    assert torch.equal(parts.index, whole.index)
    assert parts.redone == whole.redone == 0.0


def test_neighbours_in_one_group_of_columns_are_all_found() -> None:
    """Rows that lie next to each other are at a distance of one group in memory: near copies at every such distance."""
    n = 2048
    x = torch.randn(n, 24, generator=torch.Generator().manual_seed(3))
    for step in {block_side(n, "cpu") // PLACES, 1, PLACES}:
        near = x.clone()
        for copy in range(1, 6):
            near[copy * step] = x[0] + 0.01 * copy * x[1]
        found = search(near, K, precision="float32")
        torch.testing.assert_close(found.distance, brute(near), rtol=1e-12, atol=0.0)
        assert found.redone < 0.01


def test_constant_columns_and_rows_that_agree_but_in_one_number() -> None:
    x = torch.zeros(1500, 20)
    x[:, 3] = torch.randn(1500, generator=torch.Generator().manual_seed(4)).sort().values
    torch.testing.assert_close(search(x, 3).distance, brute(x, 3), rtol=1e-12, atol=0.0)


def test_the_array_is_left_as_it_was() -> None:
    x = clouds()["tiny numbers"]
    before = x.clone()
    search(x, K)
    assert torch.equal(x, before)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@needs_cuda
@pytest.mark.parametrize("precision", [None, "bfloat16", "tfloat32"])
@pytest.mark.parametrize("name", list(clouds()))
def test_the_kernel_finds_what_brute_force_finds(
    name: str, precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbors, "_KERNEL_ROWS", 0)
    x = clouds()[name].cuda().repeat(4, 1)  # enough rows for its groups, three equal ones of each
    found = search(x, K, precision=precision)
    torch.testing.assert_close(found.distance.cpu(), brute(x.cpu()), rtol=1e-12, atol=0.0)


@needs_cuda
def test_a_gpu_without_kernels_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = clouds()["gauss"].cuda()
    monkeypatch.setattr(neighbors, "_KERNEL_ROWS", 0)
    monkeypatch.setattr(neighbors, "_has_kernels", lambda device: False)
    torch.testing.assert_close(search(x, K).distance.cpu(), brute(x.cpu()), rtol=1e-12, atol=0.0)


def test_padding_has_no_key() -> None:
    low = rounded(torch.randn(5, 3), "float32")
    assert low.rows.shape == (16, 5)
    assert bool(low.half[5:].isinf().all())
    assert bool((low.keys(slice(0, 16), slice(0, 16))[5:] < 0.9 * screening.LOWEST).all())


@pytest.mark.parametrize("size", [1e12, 1e18, 1e20, 1e25])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_enormous_row_hides_no_neighbour_of_the_others(size: float, precision: str | None) -> None:
    x = torch.randn(1100, 16, generator=torch.Generator().manual_seed(1))
    x[7] = size
    torch.testing.assert_close(search(x, 2, precision=precision).distance, brute(x, 2), rtol=1e-12, atol=0.0)


def test_more_neighbours_than_a_short_last_block_has_rows() -> None:
    x = torch.randn(1025, 4, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(search(x, 300).distance, brute(x, 300), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("threads", [1, 2])
def test_inference_mode_and_another_default_type_change_nothing(threads: int) -> None:
    x, before = clouds()["gauss"], torch.get_num_threads()
    plain = search(x, K)
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode():
            inside = search(x, K)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(before)
    assert torch.equal(inside.index, plain.index)
    assert torch.equal(search(x, K).index, plain.index)


@pytest.mark.parametrize("name", list(clouds()))
@pytest.mark.parametrize("threads", [1, 2])
def test_few_rows_without_lists_have_the_same_neighbours(name: str, threads: int) -> None:
    x, before = clouds()[name][:700], torch.get_num_threads()
    listed = search(x, K, precision="float32")
    torch.set_num_threads(threads)
    try:
        found = search(x, K)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found.distance, listed.distance, rtol=1e-12, atol=0.0)


def test_every_product_of_few_rows_lies_within_its_bound() -> None:
    for x in clouds().values():
        low = screening.rounded(x[:500], "float32", shift=centre(x), pad=1, fused=True)
        keys = neighbors._symmetric_products(low.rows) - low.half
        wide = (x[:500].double() - centre(x)) * low.scale
        true = torch.cdist(wide, wide, compute_mode="donot_use_mm_for_euclid_dist").square()
        off = ~torch.eye(len(wide), dtype=torch.bool)
        error = (low.norm.square().unsqueeze(1) - 2.0 * keys.double() - true).abs()
        bound = (low.gamma + 2.0**-23) * (low.norm.unsqueeze(1) + low.norm).square() + low.least
        assert bool((error <= bound)[off].all())


def hard_clouds() -> dict[str, Tensor]:
    """Few rows with ties, with equal rows and with both far from 0."""
    made = torch.Generator().manual_seed(5)
    gauss = torch.randn(1000, 48, generator=made)
    lattice = torch.cartesian_prod(*[torch.arange(6.0)] * 4)
    shared = torch.cat([gauss, gauss[:300], gauss[:40]])[torch.randperm(1340, generator=made)]
    far = 3000 / 48**0.5
    return {
        "lattice": lattice,
        "lattice far from 0": lattice + 1500.0,
        "equal rows": shared,
        "equal rows far from 0": shared + far,
        "nearly equal rows far from 0": torch.cat([gauss + far, gauss[:500] + far + 2.0**-12]),
        "all equal": torch.ones(1001, 5),
        "two values": torch.randint(0, 2, (1100, 10), generator=made).float(),
    }


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("name", list(hard_clouds()))
def test_few_rows_with_ties_and_equal_rows_are_exact(name: str, k: int, threads: int) -> None:
    """Strips of rows that several cores settle, and the rows whose first candidates were not proved."""
    x, before = hard_clouds()[name], torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = search(x, k)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found.distance, brute(x, k), rtol=1e-12, atol=0.0)
    true = torch.linalg.vector_norm(x.double().unsqueeze(1) - x.double()[found.index], dim=2)
    torch.testing.assert_close(true, found.distance, rtol=1e-12, atol=0.0)
    assert all(len(set(row)) == k and i not in row for i, row in enumerate(found.index.tolist()))


def test_few_rows_of_another_cloud_do_not_see_the_last_ones() -> None:
    """The memory of products and rows is used again: a smaller cloud after a larger one, and the first once more."""
    one, two = clouds()["gauss"], clouds()["few dimensions"][:333]
    first = search(one, K)
    torch.testing.assert_close(search(two, K).distance, brute(two), rtol=1e-12, atol=0.0)
    assert torch.equal(search(one, K).index, first.index)


class Largest(TorchDispatchMode):
    """The number of elements of the largest float64 tensor that was made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype is torch.float64:
            self.elements = max(self.elements, made.numel())
        return made


def test_wide_rows_searched_in_float64_are_never_all_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    x, everyone = torch.randn(300, 700, generator=torch.Generator().manual_seed(0)), torch.arange(300)
    wanted = neighbors._redone(x, everyone, k=K, shift=centre(x))
    monkeypatch.setattr(neighbors, "_WIDE_ELEMENTS", 64 * 700)
    monkeypatch.setattr(neighbors, "_DENSE_BYTES", 1 << 18)
    with Largest() as seen:
        found = neighbors._redone(x, everyone, k=K, shift=centre(x))
    assert 64 * 700 <= seen.elements <= screening._WIDENED < x.numel()
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
