"""What a metric is: a declaration and a pure function of statistics.

Adding one is one decorated function (and a line in tests/support/known_answers.py); the command line, the
documentation, the report and the contract tests read the declaration.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.metrics.engine.estimate import Estimate
from anisoscope.stats.sample import Sample

_REGISTRY: dict[str, Metric] = {}
Remark = Callable[[float, int, dict[str, Any]], str]  # (value, rows of one batch, options) -> words
_INNER = frozenset({"attn_in", "attn_out", "mlp_in", "mlp_out"})
STREAM_KINDS = frozenset({"embed", "resid", "stage", "stage_mean", "cls", "final", "module", "rows"}) | _INNER
WEIGHT_KINDS = frozenset({"unembed", "embed_weight"})
HEAD_KINDS = frozenset({"query", "key", "query_unrotated", "key_unrotated", "cross_query", "cross_key"})


@dataclass(frozen=True)
class Metric:
    """A named function of statistics; call it on an n×d array to get an Estimate."""

    name: str
    function: Callable[..., float]
    needs: tuple[type, ...]
    title: str
    formula: str
    reference: str
    description: str
    convention: str
    invariant: frozenset[str]
    bounds: tuple[float | None, float | None]
    default: bool
    kinds: frozenset[str]  # where it is measured unless it is asked for by name
    options: dict[str, Any] = field(default_factory=dict)
    neighbours: int = 0  # how many nearest neighbours it reads
    remark: Remark | None = None  # what is to be said beside a value, such as its bias
    batch: Callable[..., Tensor] | None = None  # the same of statistics with leading dimensions, NaN where it has none

    def __call__(
        self,
        x: Any,
        *,
        contexts: Any = None,
        tokens: Any = None,
        seed: int = 0,
        interval: bool = True,
        **options: Any,
    ) -> Estimate:
        """The metric of the rows of an n×d NumPy or torch array, with an interval over contexts (default: each row).

        Without `interval` the value comes alone, which is quicker.
        """
        from anisoscope.metrics.engine.arrays import evaluate_array

        how: dict[str, Any] = {"contexts": contexts, "tokens": tokens, "seed": seed, "interval": interval}
        return evaluate_array(self, x, options=self.check(options), **how)

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


def metric(
    *needs: type,
    title: str,
    formula: str,
    reference: str,
    convention: str = "",
    invariant: Iterable[str] = (),
    bounds: tuple[float | None, float | None] = (None, None),
    default: bool = False,
    kinds: Iterable[str] = STREAM_KINDS | WEIGHT_KINDS,
    neighbours: int = 0,
    remark: Remark | None = None,
    batched: bool = False,
) -> Callable[[Callable[..., Any]], Metric]:
    """Declare a metric; its keyword-only arguments become its options, its docstring its description.

    A `batched` one is written for statistics with leading dimensions (folds left out, heads) and returns a tensor of
    that shape: one call gives them all.
    """

    def declare(function: Callable[..., Any]) -> Metric:
        signature = inspect.signature(function)
        options = {p.name: p.default for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
        declared = Metric(
            name=function.__name__,
            function=(lambda *stats, **chosen: float(function(*stats, **chosen))) if batched else function,
            needs=needs,
            title=title,
            formula=formula,
            reference=reference,
            description=inspect.getdoc(function) or "",
            convention=convention,
            invariant=frozenset(invariant),
            bounds=bounds,
            default=default,
            kinds=frozenset(kinds),
            options=options,
            neighbours=neighbours,
            remark=remark,
            batch=function if batched else None,
        )
        object.__setattr__(declared, "__doc__", declared.description)
        _REGISTRY[declared.name] = declared
        return declared

    return declare


def registry() -> dict[str, Metric]:
    """Every declared metric by name."""
    from anisoscope.metrics import anisotropy, attention, dimension, local, similarity, spectrum  # noqa: F401  (they register)

    return dict(_REGISTRY)


@dataclass(frozen=True)
class Request:
    """A metric with the options it is to be computed with; `named` when the user asked for it by name."""

    metric: Metric
    options: dict[str, Any] = field(default_factory=dict)
    named: bool = False


def parse_requests(names: Iterable[str] | str | None) -> list[Request]:
    """Metrics from words such as `two_nn`, `svd_ratio:centred=0`, `all` and `default` (also when there are none).

    One string may hold several, with commas between them, as on the command line.

    >>> [r.metric.name for r in parse_requests(["svd_ratio:centred=0"])]
    ['svd_ratio']
    >>> [r.metric.name for r in parse_requests("average_cosine, drift")]
    ['average_cosine', 'drift']
    """
    known = registry()
    words = [word.strip() for word in names.split(",")] if isinstance(names, str) else list(names or ["default"])
    requests: list[Request] = []
    for word in words:
        if word in ("default", "all"):
            requests += [Request(m) for m in known.values() if m.default or word == "all"]
            continue
        name, _, rest = word.partition(":")
        if name not in known:
            raise unknown_name("metric", name, known)
        pairs = dict(part.partition("=")[::2] for part in rest.split(":") if part)
        requests.append(Request(known[name], known[name].check(pairs), named=True))
    return requests


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
