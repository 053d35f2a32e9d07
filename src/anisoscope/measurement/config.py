"""The options of a profile, validated before anything is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

from anisoscope.errors import AnisoscopeError, TooFewRows, check_known
from anisoscope.option import (
    BatchSize,
    Device,
    DeviceMap,
    Layers,
    Option,
    RandomInit,
    Seed,
    Sites,
    SkipFirst,
    SkipSpecial,
    Tokenizer,
    check_least,
    distinct,
    refuse_idle,
)

LEAST_SECONDS, MOST_SECONDS = 0.1, 86_400
_POOLS = ("none", "mean", "cls", "last")
_OF_DATA = (
    *("data", "tokens", "context", "seconds", "batch_size", "text_field", "group_by", "pool", "special", "first"),
    *("tokenizer", "halves", "attention_rows"),
)
_LEAST = {"tokens": 2, "context": 2, "batch_size": 1, "sample_size": 32, "attention_rows": 0, "memory_mb": 1, "seed": 0}


@dataclass(frozen=True)
class ProfileConfig:
    """All options that determine the numbers of a profile."""

    models: Annotated[
        tuple[str, ...],
        Option(
            "A folder, a hub id (org/name or org/name@revision), a .gguf file, a PEFT adapter, a .npy or "
            ".safetensors file of rows; with --random-init an architecture such as gpt2:n_layer=4,n_embd=128 or "
            "resnet:depths=[1,2],hidden_sizes=[16,32].",
            argument=True,
            metavar="MODEL...",
        ),
    ]
    data: Annotated[
        str,
        Option(
            "What the model reads: text (file, folder, .gz, .zip, .jsonl, .csv, .parquet), audio or images (file, "
            "folder, .zip), a datasets name, or 'embedded'."
        ),
    ] = "embedded"
    tokens: Annotated[
        int,
        Option(
            "Rows to look at, rounded up to whole contexts: tokens of text, frames of speech, patches or places of "
            "images."
        ),
    ] = 65_536
    context: Annotated[int | None, Option("Tokens of a context of text; default: 512, or what the model takes.")] = None
    seconds: Annotated[
        float | None, Option("Seconds of a context of speech; default: 10, or what the model takes.")
    ] = None
    batch_size: BatchSize = 8
    layers: Layers = ()
    sites: Sites = ()
    metrics: Annotated[
        tuple[str, ...],
        Option("Metrics, comma-separated, with options as two_nn:method=ml; 'all' for all.", parse=distinct),
    ] = ()
    modules: Annotated[
        tuple[str, ...], Option("Modules to look at by path or pattern, for any nn.Module.", parse=distinct)
    ] = ()
    text_field: Annotated[
        str, Option("Field or column that holds the text, audio or images in records and datasets.")
    ] = "text"
    group_by: Annotated[
        str | None, Option("Field whose values become groups; 'file', and 'folder' of audio and images.")
    ] = None
    pool: Annotated[str, Option("One row per token (none), or per context: mean, cls, last.")] = "none"
    special: SkipSpecial = "in"
    first: SkipFirst = "in"
    random_init: RandomInit = False
    tokenizer: Tokenizer = None
    save_rows: Annotated[bool, Option("Keep every row of every site on disk.")] = False
    device: Device = "auto"
    device_map: DeviceMap = None
    dtype: Annotated[str, Option("auto, float32, float64, bfloat16, float16.")] = "auto"
    attention_rows: Annotated[int, Option("Query rows per context whose attention is read; 0 = all.")] = 16
    sample_size: Annotated[int, Option("Rows kept for neighbours and other sampled metrics.")] = 2 * 4096
    halves: Annotated[bool, Option("Dimensions of the stream also on two disjoint halves of the contexts.")] = False
    memory_mb: Annotated[
        int | None, Option("MiB that statistics may take; default: half of what is free.", name="--memory")
    ] = None
    seed: Seed = 0
    trust_remote_code: Annotated[bool, Option("Run code that comes with a model.")] = False

    def __post_init__(self) -> None:
        from anisoscope.capture.sites.site import EVERY, check_kinds
        from anisoscope.metrics.catalogue import parse_requests
        from anisoscope.metrics.engine.metric import WEIGHT_KINDS
        from anisoscope.models.placement import choose_device, choose_dtype

        check_least(self, _LEAST)
        check_seconds(self.seconds)
        if self.seed >= 1 << 63:
            raise AnisoscopeError(f"seed is {self.seed}; expected less than 2**63.")
        check_known("pool", self.pool, _POOLS)
        if not self.models:
            raise AnisoscopeError("no model was given; name a folder, a hub id, a .gguf file or a file of rows.")
        check_kinds([kind for kind in self.sites if kind != EVERY])
        requests = parse_requests(self.metrics)
        check_options(requests)
        refuse_unread(self, requests)
        if self.sites and not self.modules and not set(self.sites) - WEIGHT_KINDS:
            refuse_idle(self, _OF_DATA, "for tables of weights alone, which read no data")
        if self.modules:
            refuse_idle(self, ("sites", "layers"), "beside --modules, which are looked at instead")
        choose_dtype(self.dtype, choose_device(self.device))


def refuse_unread(config: Any, requests: Sequence[Any]) -> None:
    """Raise an error for a size of something that none of the metrics reads."""
    from anisoscope.metrics.engine.folds import Neighbours, on_sample

    read = {need for request in requests for need in request.metric.reads(request.options)}
    asked = {field.name for field in fields(config)}
    if not any(Neighbours in request.metric.needs for request in requests):
        refuse_idle(config, asked & {"halves"}, "without an intrinsic dimension among the metrics, such as two_nn")
    if not any(map(on_sample, read)):
        refuse_idle(config, asked & {"sample_size"}, "without metrics of sampled rows, such as two_nn")
    if not any("scores" in request.metric.kinds for request in requests):
        refuse_idle(config, asked & {"attention_rows"}, "without metrics of attention, such as attention_entropy")


def check_seconds(seconds: float | None) -> None:
    """Raise an error for contexts of speech too short for a frame."""
    if seconds is not None and not seconds >= LEAST_SECONDS:
        raise AnisoscopeError(f"seconds is {seconds:g}; expected at least {LEAST_SECONDS:g}.")
    if seconds is not None and seconds > MOST_SECONDS:
        raise AnisoscopeError(f"seconds is {seconds:g}; expected at most {MOST_SECONDS:,}, a day.")


def check_options(requests: Sequence[Any]) -> None:
    """Try each metric's options on a few random rows, so that an invalid value fails before the data is read."""
    import torch

    from anisoscope.metrics.engine.metric import STREAM_KINDS

    rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    for request in requests:
        if request.options and request.metric.kinds & STREAM_KINDS:
            with contextlib.suppress(TooFewRows):
                request.metric(rows, tokens=torch.arange(64) // 8, contexts=torch.arange(64) // 4, **request.options)
