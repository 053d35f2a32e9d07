"""A live monitor in trainings that are compiled on a GPU, CUDA graphs included: the table of the plain training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from support import home_made as home
from support.home_made import counted, followed, home_made
from support.monitored import compare

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WAYS = [home.whole, home.own_method, home.train_step, home.blocks_compiled, home.blocks_wrapped]
# one micro-batch: with two, gradients that CUDA graphs own are overwritten, with and without a monitor
HERE: dict[str, Any] = {"background": False, "steps": 4, "micro_batches": 1}


@pytest.fixture(autouse=True)
def graphs() -> Iterator[Any]:
    with counted() as count:
        yield count


@pytest.fixture(scope="module")
def plain() -> Any:
    return followed(home_made().cuda(), **HERE).table


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("how", WAYS)
def test_a_model_compiled_inside_the_monitor_gives_the_table_of_eager(how: Any, mode: Any, plain: Any) -> None:
    monitor = followed(home_made().cuda(), how, options={"backend": "inductor", "mode": mode}, **HERE)
    compare(monitor.table, plain, 1e-4, columns=("value",))  # float32 sums in another order
    assert not monitor.notes


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("how", [home.whole, home.train_step, home.blocks_compiled, home.blocks_wrapped])
def test_a_model_compiled_before_is_seen(how: Any, mode: Any, plain: Any) -> None:
    options = {"backend": "inductor", "mode": mode}
    compare(
        followed(home_made().cuda(), how, first=True, options=options, **HERE).table, plain, 1e-4, columns=("value",)
    )


def test_a_process_beside_the_training_gives_the_same_table(plain: Any) -> None:
    compare(followed(home_made().cuda(), **HERE | {"background": True}).table, plain, 1e-6)
