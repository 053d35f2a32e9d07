"""`anisoscope tangent`: a sweep of one model, with gradients."""

from __future__ import annotations

from typing import Any

from anisoscope.commands.signature import Debug, Out, Resume, configured
from anisoscope.commands.sweep import measure
from anisoscope.series import SweepConfig

_OPTIONS = ("model", "data", "tokens", "context", "batch_size", "preset", "rank", "draws", "layers", "text_field")
_LOADING = ("tokenizer", "random_init", "device", "dtype", "seed", "trust_remote_code")
_HELP = {
    "data": "Text file, folder, .gz, .zip, .jsonl, .csv, .parquet, a datasets name, or 'embedded'.",
    "tokens": "Tokens to look at; half to fit on, half to test on.",
    "context": "Tokens of a context; default: 512 or less.",
    "preset": "light, standard or full.",
    "text_field": "Field that holds the text.",
    "dtype": "auto, float32, float64, bfloat16.",
}


def _single(**options: Any) -> SweepConfig:
    return SweepConfig(**options, series=False)


@configured(SweepConfig, build=_single, only=(*_OPTIONS, *_LOADING), help=_HELP)
def tangent(config: SweepConfig, out: Out = None, resume: Resume = False, debug: Debug = False) -> None:
    """Do tangent directions of one given model hold its gradients? Its own loss gives them."""
    measure(config, out=out, resume=resume)
