"""The options of a profile, checked before anything is loaded."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anisoscope.capture.sites.site import EVERY, check_kinds
from anisoscope.errors import AnisoscopeError, TooFewRows, unknown_name
from anisoscope.metrics.catalogue import parse_requests
from anisoscope.metrics.engine.metric import STREAM_KINDS, Request
from anisoscope.models.placement import choose_device, choose_dtype

LEAST_SECONDS = 0.1
_POOLS = ("none", "mean", "cls", "last")
_LEAST = {"tokens": 2, "context": 2, "batch_size": 1, "sample_size": 32, "attention_rows": 0, "memory_mb": 1, "seed": 0}


@dataclass(frozen=True)
class ProfileConfig:
    """Everything that decides the numbers of a profile."""

    models: tuple[str, ...]
    data: str = "embedded"
    tokens: int = 65_536
    context: int | None = None
    seconds: float | None = None  # of a context of speech
    batch_size: int = 8
    sites: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    metrics: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    text_field: str = "text"
    group_by: str | None = None
    pool: str = "none"
    special: str = "in"
    first: str = "in"
    random_init: bool = False
    tokenizer: str | None = None
    device: str = "auto"
    device_map: str | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False
    seed: int = 0
    sample_size: int = 2 * 4096
    attention_rows: int = 16
    halves: bool = False  # two disjoint halves of the contexts beside the whole
    save_rows: bool = False
    memory_mb: int | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise AnisoscopeError(f"{name} is {value}; expected at least {least}.")
        check_seconds(self.seconds)
        if self.seed >= 1 << 63:
            raise AnisoscopeError(f"seed is {self.seed}; expected less than 2**63.")
        if self.pool not in _POOLS:
            raise unknown_name("pool", self.pool, _POOLS)
        if not self.models:
            raise AnisoscopeError("no model was given; name a folder, a hub id, a .gguf file or a file of rows.")
        check_kinds([kind for kind in self.sites if kind != EVERY])
        check_options(parse_requests(self.metrics))
        choose_dtype(self.dtype, choose_device(self.device))


def check_seconds(seconds: float | None) -> None:
    """Refuse contexts of speech that no frame fits into."""
    if seconds is not None and not LEAST_SECONDS <= seconds < math.inf:
        raise AnisoscopeError(f"seconds is {seconds:g}; expected at least {LEAST_SECONDS:g}.")


def check_options(requests: Sequence[Request]) -> None:
    """Try each metric's options on a few rows, so that a bad value is known before the pass and not after it."""
    rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    for request in requests:
        if request.options and request.metric.kinds & STREAM_KINDS:
            with contextlib.suppress(TooFewRows):
                request.metric(rows, tokens=torch.arange(64) // 8, contexts=torch.arange(64) // 4, **request.options)
