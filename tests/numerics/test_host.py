"""Threads of the host that are kept from call to call."""

from __future__ import annotations

import os

import pytest
import torch

from anisoscope.numerics.host import together


def several_threads(wanted: int = 2) -> int:
    before = torch.get_num_threads()
    torch.set_num_threads(wanted)
    return before


def test_a_call_inside_a_call_does_not_wait_for_its_own_threads() -> None:
    before = several_threads()
    try:
        for _ in range(2):  # the second finds the threads of the first
            assert together(lambda i: sum(together(lambda j: i * j, [1, 2, 3])), [1, 2, 3, 4]) == [6, 12, 18, 24]
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_process_has_threads_of_its_own() -> None:
    before = several_threads()
    try:
        together(lambda i: i, [1, 2, 3])
        child = os.fork()
        if not child:
            os._exit(0 if together(lambda i: i + 1, [1, 2, 3]) == [2, 3, 4] else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(before)
