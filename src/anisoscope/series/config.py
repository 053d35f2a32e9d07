"""Everything that decides the numbers of a sweep, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from anisoscope.capture.sites.site import EVERY, check_kinds
from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.measurement.config import check_options, check_seconds
from anisoscope.metrics.engine.metric import Request
from anisoscope.models.checkpoint import check_architecture
from anisoscope.models.placement import choose_device, choose_dtype
from anisoscope.series.discovery import refuse_training_run
from anisoscope.tangent.plan import GEOMETRY, PLANS, TangentPlan, choose_plan

_LEAST = {"tokens": 64, "batch_size": 1, "draws": 19, "seed": 0}


@dataclass(frozen=True)
class SweepConfig:
    """What to look at, and with what; a tangent study of one model is a sweep of one.

    `metrics` are exactly what is measured, without gradients unless `tangent` is among them; left out, the preset
    decides: light, standard and full take gradients, shape and attention do not.
    """

    model: str
    revisions: tuple[str, ...] = ()
    series: bool = True
    others: tuple[str, ...] = ()  # further models, in the order of training
    name: str | None = None  # of the series in the table
    architecture: str | None = None  # of checkpoints that are files of weights
    data: str = "embedded"
    text_field: str = "text"
    tokens: int = 32_768
    context: int | None = None
    seconds: float | None = None  # of a context of speech
    batch_size: int = 8
    preset: str = "standard"
    metrics: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    halves: bool = False
    rank: int | None = None
    draws: int = 999
    layers: tuple[int, ...] = ()
    tokenizer: str | None = None
    random_init: bool = False
    device: str = "auto"
    device_map: str | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False
    remove_downloads: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.preset not in GEOMETRY:
            raise unknown_name("preset", self.preset, GEOMETRY)
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise AnisoscopeError(f"{name} is {getattr(self, name)}; expected at least {least}.")
        check_seconds(self.seconds)
        choose_dtype(self.dtype, choose_device(self.device))
        check_kinds([kind for kind in self.sites if kind != EVERY])
        self._check_measured()
        if self.architecture is not None:
            check_architecture(self.architecture, trust_remote_code=self.trust_remote_code)
        if self.remove_downloads and not self.revisions:
            raise AnisoscopeError("--remove-downloads is for the --revisions of a hub model; leave it out.")
        if not self.series:
            refuse_training_run(self.model)

    def _check_measured(self) -> None:
        plan, requests = self.measured
        check_options(requests)
        if plan is None and not requests:
            raise AnisoscopeError("there is nothing to measure; name metrics, or a preset.")
        if self.sites and not requests:
            raise AnisoscopeError("--sites are those of the metrics; name some with --metrics.")

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model, *self.others)

    @property
    def measured(self) -> tuple[TangentPlan | None, list[Request]]:
        """The tangent study, where there is one, and the metrics of geometry."""
        wanted: Any = self.metrics or self.preset
        plan, requests = choose_plan(wanted, None, rank=self.rank, seed=self.seed)
        return (None if plan is None else replace(plan, draws=self.draws)), list(requests)

    @property
    def at_stream(self) -> bool:
        """Whether geometry is measured in the residual stream alone, as presets with gradients do."""
        return not self.metrics and self.preset in PLANS
