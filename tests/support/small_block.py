"""A small untrained block with fresh weights."""

from __future__ import annotations

from anisoscope.studies.untrained.fresh_block import UntrainedBlock, build_block, initialise

SMALL = {"width": 32, "heads": 2, "length": 24, "sequences": 3}


def small_block(family: str, *, init: str = "normal", seed: int = 0) -> UntrainedBlock:
    block = build_block(family, **SMALL, seed=seed)
    initialise(block, init, seed=seed)
    return block
