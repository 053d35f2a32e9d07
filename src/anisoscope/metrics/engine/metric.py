"""Declaring a metric: one decorated function.

`@metric` declares a pure function of statistics, which a profile evaluates and which can be called on arrays;
`@measured` declares a function of something else (a subspace and gradients, a training log) that a command computes.
Either takes one line in tests/support (known_answers.py, known_measured.py); the command line, the documentation, the
report and the contract tests read the declaration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from anisoscope.metrics.engine.arrays import evaluate_array
from anisoscope.metrics.engine.declaration import Declaration, Remark
from anisoscope.metrics.engine.estimate import Estimate

REGISTRY: dict[str, Metric] = {}
"""What has been declared so far; `metrics.catalogue.registry` holds everything."""
_INNER = frozenset({"attn_in", "attn_out", "mlp_in", "mlp_out"})
STREAM_KINDS = frozenset({"embed", "resid", "stage", "stage_mean", "cls", "final", "module", "rows"}) | _INNER
WEIGHT_KINDS = frozenset({"unembed", "embed_weight"})
HEAD_KINDS = frozenset({"query", "key", "query_unrotated", "key_unrotated", "cross_query", "cross_key"})
Bounds = tuple[float | None, float | None]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Metric(Declaration):
    """A declared metric; call it on an n×d array to get an Estimate."""

    def __call__(
        self, x: Any, *, contexts: Any = None, tokens: Any = None, seed: int = 0, interval: bool = True, **options: Any
    ) -> Estimate:
        """The metric of the rows of an n×d NumPy or torch array, with an interval over contexts (default: each row).

        Without `interval` the value comes alone, which is quicker.
        """
        how: dict[str, Any] = {"contexts": contexts, "tokens": tokens, "seed": seed, "interval": interval}
        return evaluate_array(self, x, options=self.check(options), **how)


@dataclass(frozen=True)
class Request:
    """A metric with the options it is to be computed with; `named` when the user asked for it by name."""

    metric: Metric
    options: dict[str, Any] = field(default_factory=dict)
    named: bool = False


def metric(
    *needs: type,
    title: str,
    formula: str,
    reference: str,
    convention: str = "",
    invariant: Iterable[str] = (),
    bounds: Bounds = (None, None),
    default: bool = False,
    kinds: Iterable[str] = STREAM_KINDS | WEIGHT_KINDS,
    neighbours: int = 0,
    remark: Remark | None = None,
    left_out: Callable[[Any, dict[str, Any]], Tensor] | None = None,
    batched: bool = False,
) -> Callable[[Callable[..., Any]], Metric]:
    """Declare a metric; its keyword-only arguments become its options, its docstring its description.

    A `batched` one is written for statistics with leading dimensions (folds left out, heads) and returns a tensor of
    that shape: one call gives them all.
    """

    def declare(function: Callable[..., Any]) -> Metric:
        parameters = inspect.signature(function).parameters.values()
        return _register(
            function,
            options={p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY},
            function=(lambda *stats, **chosen: float(function(*stats, **chosen))) if batched else function,
            needs=needs,
            title=title,
            formula=formula,
            reference=reference,
            convention=convention,
            invariant=frozenset(invariant),
            bounds=bounds,
            default=default,
            kinds=frozenset(kinds),
            neighbours=neighbours,
            remark=remark,
            batch=function if batched else None,
            left_out=left_out,
        )

    return declare


def measured(
    *commands: str,
    title: str,
    formula: str,
    reference: str = "",
    convention: str = "",
    invariant: Iterable[str] = (),
    bounds: Bounds = (None, None),
) -> Callable[[Function], Function]:
    """Declare a number that these commands measure; the function stays as it is, and the commands call it."""

    def declare(function: Function) -> Function:
        _register(
            function,
            function=function,
            needs=(),
            title=title,
            formula=formula,
            reference=reference,
            convention=convention,
            invariant=frozenset(invariant),
            bounds=bounds,
            measured_by=commands,
        )
        return function

    return declare


def _register(declared: Callable[..., Any], **fields: Any) -> Metric:
    """Add a metric under the name of its function, described by its docstring."""
    about = " ".join((inspect.getdoc(declared) or "").partition(">>>")[0].split())
    made = Metric(name=declared.__name__, description=about, **fields)
    object.__setattr__(made, "__doc__", made.description)
    REGISTRY[made.name] = made
    return made
