"""Sweeps over the checkpoints of a training: the options of a sweep, validated before it begins.

`discovery` finds the checkpoints, `sweep` runs over them, `measurer` measures each, `integrity` detects damaged,
repeated or misordered ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from anisoscope import option
from anisoscope.errors import AnisoscopeError, check_known
from anisoscope.measurement.config import check_options, check_seconds, refuse_unread
from anisoscope.option import Option, check_least, check_most, distinct, refuse_idle

_LEAST = {"tokens": 64, "batch_size": 1, "draws": 19, "seed": 0}


@dataclass(frozen=True)
class SweepConfig:
    """The options of a sweep; `anisoscope tangent` is a sweep of one model (`series` is false).

    Only `metrics` are measured, without gradients unless `tangent` is among them; without `metrics` the preset
    decides: light, standard and full need gradients, shape and attention do not.
    """

    model: Annotated[str, Option("A folder, a hub id (org/name@revision) or a .gguf file.", argument=True)]
    revisions: Annotated[
        tuple[str, ...],
        Option(
            "Hub revisions: step0,step1000,…; all that name a step; log or log:16: log-spaced ones.", parse=distinct
        ),
    ] = ()
    series: bool = True
    others: tuple[str, ...] = ()  # further models, in the order of training
    stage_checkpoints: Annotated[
        bool, Option("Of several models, such as base sft dpo: the checkpoint-N folders inside each, too.")
    ] = False
    architecture: Annotated[
        str | None, Option("Of .ckpt, .pt and other weight files: a folder with config.json, or bert:hidden_size=64.")
    ] = None
    data: Annotated[
        str, Option("Text, audio or images as in `anisoscope profile`, a datasets name, or 'embedded'.")
    ] = "embedded"
    tokens: Annotated[int, Option("Rows to look at: tokens, frames, patches or positions.")] = 32_768
    context: Annotated[int | None, Option("Tokens of a context of text; default: 512 or less.")] = None
    seconds: Annotated[float | None, Option("Seconds of a context of speech; default: 10 or less.")] = None
    batch_size: option.BatchSize = 8
    preset: Annotated[str, Option("light, standard or full (with gradients); shape or attention (geometry alone).")] = (
        "standard"
    )
    metrics: Annotated[
        tuple[str, ...],
        Option("Exactly these metrics instead, without gradients; 'tangent' adds the tangent study.", parse=distinct),
    ] = ()
    sites: option.Sites = ()
    layers: option.Layers = ()
    halves: Annotated[bool, Option("Intrinsic dimensions also on two halves of the contexts.")] = False
    rank: option.Rank = None
    standardised: Annotated[
        bool, Option("Energies also in standardised coordinates; light alone has them only if told.")
    ] = False
    special: option.SkipSpecial = "in"
    first: option.SkipFirst = "in"
    split: option.Split = ()
    draws: Annotated[int, Option("Control subspaces.")] = 999
    frozen_window: Annotated[
        str, Option("What the frozen proxy is fitted on: the first share of checkpoints:0.3, or steps:0.3.")
    ] = "checkpoints:0.3"
    text_field: Annotated[str, Option("Field or column that holds text, audio or images.")] = "text"
    tokenizer: option.Tokenizer = None
    name: Annotated[str | None, Option("What the series is called in the table.")] = None
    remove_downloads: Annotated[bool, Option("Delete what this run downloaded once it is measured.")] = False
    random_init: option.RandomInit = False
    device: option.Device = "auto"
    device_map: option.DeviceMap = None
    dtype: Annotated[str, Option("auto, float32, float64, bfloat16, float16.")] = "auto"
    seed: option.Seed = 0
    trust_remote_code: option.TrustRemoteCode = False

    def __post_init__(self) -> None:
        from anisoscope.capture.sites.site import EVERY, check_kinds
        from anisoscope.models.load import check_architecture
        from anisoscope.models.placement import choose_device, choose_dtype
        from anisoscope.series.discovery import refuse_training_run
        from anisoscope.tangent.plan import GEOMETRY

        check_known("preset", self.preset, GEOMETRY)
        check_least(self, _LEAST)
        check_most(self, {"draws": 100_000})
        check_seconds(self.seconds)
        choose_dtype(self.dtype, choose_device(self.device))
        check_kinds([kind for kind in self.sites if kind != EVERY])
        plan, requests = self.measured
        check_options(requests)
        if plan is None and not requests:
            raise AnisoscopeError("there is nothing to measure; name metrics, or a preset.")
        refuse_unread(self, requests)
        if self.metrics:
            refuse_idle(self, ("preset",), "beside --metrics, which are measured instead")
        if plan is None:
            refuse_idle(self, ("rank", "standardised", "split", "draws", "frozen_window"), "without gradients")
        elif not plan.frozen:
            refuse_idle(self, ("frozen_window",), "without a frozen proxy, which --preset light does not have")
        if plan is not None and (self.metrics or self.preset != "light"):
            refuse_idle(self, ("standardised",), "here: such energies are measured anyway, in all presets but light")
        if not requests or self.at_stream:
            refuse_idle(self, ("sites",), "without --metrics, whose sites they are")
        if self.architecture is not None:
            check_architecture(self.architecture, trust_remote_code=self.trust_remote_code)
        if self.remove_downloads and not self.revisions:
            raise AnisoscopeError("--remove-downloads is for the --revisions of a hub model; leave it out.")
        if not self.series:
            refuse_training_run(self.model)
        if not self.others:
            refuse_idle(self, ("stage_checkpoints",), "with one model, whose checkpoints are measured anyway")

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model, *self.others)

    @property
    def measured(self) -> tuple[Any, list[Any]]:
        """(plan of the tangent study or None, requests for geometry metrics)."""
        from anisoscope.tangent.plan import choose_plan

        sizes: dict[str, Any] = {"rank": self.rank, "seed": self.seed, "window": self.frozen_window}
        sizes |= {"standardised": self.standardised or None}
        plan, requests = choose_plan(self.metrics or self.preset, None, **sizes)
        return (None if plan is None else replace(plan, draws=self.draws, splits=self.split)), list(requests)

    @property
    def at_stream(self) -> bool:
        """Whether geometry is measured in the residual stream only, as in presets with gradients."""
        from anisoscope.tangent.plan import PLANS

        return not self.metrics and self.preset in PLANS
