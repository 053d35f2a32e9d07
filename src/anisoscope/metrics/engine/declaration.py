"""What is declared of a metric, and the options it is asked with; calling one on an array is `engine.metric`."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.metrics.engine.neighbourhoods import Neighbours
from anisoscope.stats.sample import Sample

Remark = Callable[[float, int, dict[str, Any], list[Neighbours]], str]  # value, rows of one batch, options, graphs


@dataclass(frozen=True)
class Declaration:
    """A named function of statistics, or of what a command measures, with all that is said about it."""

    name: str
    function: Callable[..., Any]
    needs: tuple[type, ...]
    title: str
    formula: str
    reference: str
    description: str
    convention: str
    invariant: frozenset[str]
    bounds: tuple[float | None, float | None]
    default: bool = False
    kinds: frozenset[str] = frozenset()  # where it is measured unless it is asked for by name
    options: dict[str, Any] = field(default_factory=dict)
    neighbours: int = 0  # how many nearest neighbours it reads
    remark: Remark | None = None  # what is to be said beside a value, such as its bias
    batch: Callable[..., Tensor] | None = None  # the same of statistics with leading dimensions, NaN where it has none
    left_out: Callable[[Any, dict[str, Any]], Tensor] | None = None  # rows of its first statistic that it cannot use
    measured_by: tuple[str, ...] = ()  # commands that measure it, where it is no function of gathered statistics

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """The same options with values of the right type, or an error that names the nearest option."""
        checked = {}
        for key, value in options.items():
            if key not in self.options:
                raise unknown_name(f"option of {self.name}", key, self.options)
            checked[key] = _cast(value, self.options[key], f"{self.name}:{key}")
        return checked

    def reads(self, options: dict[str, Any]) -> tuple[type, ...]:
        """The statistics it needs with these options: batches are drawn from the sample."""
        return (*self.needs, Sample) if options.get("batches") and Sample not in self.needs else self.needs

    def variant(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options that differ from the defaults."""
        return {key: value for key, value in options.items() if value != self.options[key]}

    def refusal(self) -> AnisoscopeError:
        """Why it cannot be asked of rows or of a profile: which commands measure it."""
        commands = " or ".join(f"`anisoscope {command}`" for command in self.measured_by)
        return AnisoscopeError(f"{self.name} is not a metric of rows; it is measured by {commands}, use that.")


def _cast(value: Any, default: Any, what: str) -> Any:
    """A value in the type of the default; words come from the command line."""
    if not isinstance(value, str) or isinstance(default, str):
        kinds = (str if isinstance(default, str) else numbers.Real if isinstance(default, float) else numbers.Integral,)
        if not isinstance(value, kinds + ((np.bool_,) if isinstance(default, bool) else ())):
            raise AnisoscopeError(f"{what} is {value!r}; expected a {type(default).__name__} such as {default!r}.")
        return type(default)(value)
    try:
        if isinstance(default, bool):
            return {"1": True, "true": True, "0": False, "false": False}[value.lower()]
        return type(default)(value)
    except (KeyError, ValueError) as error:
        kind = type(default).__name__
        raise AnisoscopeError(f"{what} is {value!r}; expected a {kind} such as {default!r}.") from error
