"""What one checkpoint of a series gives by itself: loaded and measured here, or by a job elsewhere.

A job writes it into a file that the sweep reads; what a checkpoint shares with others (flags of repeated ones, what is
compared with earlier steps) is found there, in the order of the series.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import anisoscope
from anisoscope.capture.sites.layout import find_layout
from anisoscope.capture.sites.site import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.inspection import modality_words, reading_fingerprint, type_of
from anisoscope.models.downloads import Downloads
from anisoscope.models.tokenizer import NoTokenizer
from anisoscope.monitor.analysis.analysis import GradientsAlone
from anisoscope.option import Progress
from anisoscope.results.folder import replace_file
from anisoscope.series import SweepConfig, discovery, integrity
from anisoscope.series.discovery import Checkpoint
from anisoscope.series.measurer import CheckpointAlone, CheckpointMeasurer, CheckpointResult
from anisoscope.stats.moments import FoldCovariance, GradientMoments
from anisoscope.tangent.change import Kept, SiteAlone, StepAlone
from anisoscope.tangent.proxy import Label, Proxy, Scale
from anisoscope.tangent.row_map import RowMap
from anisoscope.tangent.tables import TypeFit

LOADING = ("random_init", "device", "device_map", "dtype", "seed", "trust_remote_code", "tokenizer", "architecture")


@dataclass
class Examination:
    """One checkpoint: why it could not be loaded, or what is known of it and, if it was measured, `alone`."""

    error: str = ""  # why it could not be loaded
    lost: str = ""  # the flag of that: missing, or unreadable
    no_tokenizer: bool = False  # that is the reason
    refusal: str = ""  # why it could not be measured
    commit: str = ""  # of a hub model
    name: str = ""
    fingerprint: str = ""
    reading: str = ""  # fingerprint of its tokenizer or processor
    reads_text: bool = True
    finite: bool = True  # all of its weights
    vocabulary: int | None = None
    device: str = ""
    notes: list[str] = field(default_factory=list)
    described: dict[str, Any] = field(default_factory=dict)
    sketch: dict[str, Tensor] | None = None  # of its weights
    alone: CheckpointAlone | None = None
    stamp: Any = None  # of its files
    version: str = anisoscope.__version__


def open_checkpoint(
    config: SweepConfig, checkpoint: Checkpoint, downloads: Downloads | None, tell: Progress
) -> tuple[Examination, Any]:
    """Load a checkpoint; the model is None if that fails, and the reason is known."""
    from anisoscope.models import load

    spec, found = checkpoint.spec, Examination()
    try:
        if downloads is not None:
            tell(f"download {checkpoint.label}", 0, 1)
            place = downloads.ready(checkpoint.revision)
            found.commit = "" if place is None else place.name  # the name of a snapshot's folder
            spec = str(place or spec)
            tell(f"download {checkpoint.label}", 1, 1)
        options = {name: getattr(config, name) for name in LOADING}
        loaded = load.load_model(spec, **options, any_head=config.measured[0] is not None)
    except AnisoscopeError as error:
        found.error, found.no_tokenizer = str(error), isinstance(error, NoTokenizer)
        found.lost = integrity.UNREADABLE if discovery.is_there(spec) else integrity.MISSING
        return found, None
    if not config.series and loaded.reads_text:
        discovery.refuse_lossless(loaded, checkpoint.spec)
    found.name, found.fingerprint, found.notes = loaded.name, loaded.fingerprint, loaded.notes
    found.reading, found.reads_text = reading_fingerprint(loaded), loaded.reads_text
    found.finite, found.device = integrity.is_finite(loaded.model), str(loaded.device)
    found.vocabulary = loaded.vocabulary
    return found, loaded


def describe(found: Examination, loaded: Any, *, timed: bool) -> None:
    """Add what run.json says of a loaded checkpoint, and the sketch of its weights."""
    layout = find_layout(loaded.model)
    stacks = [stack.name for stack in layout.stacks]
    found.described = {"type": type_of(loaded), "parameters": loaded.parameters, "notes": loaded.notes}
    found.described |= {"architecture": type(loaded.model).__name__, "revision": loaded.revision or found.commit}
    found.described |= modality_words(loaded.model, stacks, loaded.tokenizer, layout=layout)
    found.commit = loaded.revision or found.commit
    if found.finite and timed:
        found.sketch = integrity.sketch(loaded.model)


# -- jobs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointTask:
    """The work of one job: which checkpoint, and what is known of its series."""

    config: SweepConfig
    checkpoint: Checkpoint
    steps: Sequence[int]  # of all checkpoints
    timed: bool
    types: bool  # whether its embedding table may be compared with an earlier one
    result: Path
    counts: Path | None = None  # token frequencies, if they are known


def examine(task: CheckpointTask, tell: Progress) -> None:
    """Load and measure one checkpoint, and write what it gives by itself."""
    found = _examined(task, tell)
    replace_file(task.result, lambda path: torch.save(found, path))
    gc.collect()  # the process may go on with another checkpoint
    torch.cuda.empty_cache()


def _examined(task: CheckpointTask, tell: Progress) -> Examination:
    config, checkpoint = task.config, task.checkpoint
    one = [checkpoint.revision]
    journal = task.result.with_suffix(".json")
    downloads = Downloads(config.model, one, journal, False, config.trust_remote_code) if one[0] else None
    stamp = discovery.stamp(checkpoint.spec)
    found, loaded = open_checkpoint(config, checkpoint, downloads, tell)
    found.stamp = stamp
    if loaded is not None:
        measurer = CheckpointMeasurer(config, list(task.steps), row_map=RowMap(), counted=task.result.parent)
        measurer.counts = None if task.counts is None else torch.load(task.counts, weights_only=True)
        try:
            if found.finite:
                found.alone = measurer.alone(loaded, checkpoint.step, types=task.types, tell=tell)
            describe(found, loaded, timed=task.timed)
        except AnisoscopeError as error:
            found.refusal = str(error)
    return found


_PARTS = (Examination, CheckpointAlone, CheckpointResult, GradientsAlone, StepAlone, SiteAlone, Kept, FoldCovariance)
_KNOWN: list[Any] = [*_PARTS, GradientMoments, TypeFit, Label, Proxy, Scale, Site]  # nothing else is read from a file


def read_examination(path: Path, device: torch.device) -> Examination | None:
    """What a job wrote; None if there is nothing, or what is there cannot be read or is of another version."""
    try:
        with torch.serialization.safe_globals(_KNOWN):
            found = torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError):
        return None
    same = isinstance(found, Examination) and found.version == anisoscope.__version__
    return found if same else None
