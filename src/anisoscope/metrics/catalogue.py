"""The registry of all metrics, the parser of metric requests, and `measure_rows` for several metrics of one array."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from anisoscope.errors import AnisoscopeError, TooFewRows, unknown_name
from anisoscope.metrics import (
    anisotropy,
    attention,
    curvature,
    dimension,
    frequency,
    performance,
    similarity,
    spectrum,
    tangent,
    training,
)
from anisoscope.metrics.engine.estimation import Estimate, View, evaluate, missing_estimate
from anisoscope.metrics.engine.metric import (
    REGISTRY,
    Metric,
    Request,
    array_view,
    finite_rows,
    is_of_rows,
    small_steps,
)
from anisoscope.numerics.host import single_steps

_OF_ROWS = (attention, anisotropy, dimension, similarity, spectrum)
_MODULES = (*_OF_ROWS, tangent, frequency, training, curvature, performance)


def registry() -> dict[str, Metric]:
    """Every declared metric by name, in the order of tables, which does not depend on the order of imports."""
    places = {module.__name__: place for place, module in enumerate(_MODULES)}
    modules = {name: (metric.batch or metric.function).__module__ for name, metric in REGISTRY.items()}
    return {name: REGISTRY[name] for name in sorted(REGISTRY, key=lambda name: places.get(modules[name], len(places)))}


def parse_requests(names: Iterable[str] | str | None) -> list[Request]:
    """Requests from names such as `two_nn`, `svd_ratio:centred=0`, `all` and `default`; no names mean `default`.

    A string may hold several names separated by commas, as on the command line.

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
            chosen = (m for m in known.values() if not m.measured_by and (m.default or word == "all"))
            for m in chosen:
                requests += [Request(m), *([Request(m, dict(m.beside), beside=True)] if m.beside else [])]
            continue
        name, _, rest = word.partition(":")
        if name not in known:
            raise unknown_name("metric", name, [m.name for m in known.values() if not m.measured_by])
        if known[name].measured_by:
            raise known[name].refusal()
        pairs = dict(part.partition("=")[::2] for part in rest.split(":") if part)
        requests.append(Request(known[name], known[name].check(pairs), named=True))
    return requests


@torch.inference_mode(False)
@torch.no_grad()
def measure_rows(
    x: Any,
    metrics: Iterable[str] | str | None = None,
    *,
    contexts: Any = None,
    tokens: Any = None,
    seed: int = 0,
    interval: bool = True,
) -> dict[str, Estimate]:
    """Several metrics (by default the default ones) of the rows of one n×d array, with shared statistics.

    The keys are the requested names; a metric that cannot be computed is NaN, and its note says why.
    `interval=False` skips the intervals, which is faster.

    >>> found = measure_rows(torch.eye(16), ["participation_ratio", "svd_ratio:centred=0"])
    >>> {name: round(estimate.value, 4) for name, estimate in found.items()}
    {'participation_ratio': 15.0, 'svd_ratio:centred=0': 0.0625}
    """
    given = parse_requests(metrics)
    requests = [r for r in given if r.named or (is_of_rows(r.metric) and (contexts is not None or not r.beside))]
    if not requests:
        raise AnisoscopeError(f"metrics is {metrics!r}; expected at least one name, or None for the default ones")
    wanted = [(request.metric, request.options) for request in requests]
    with single_steps():
        given_rows = finite_rows(x, "measure_rows", contexts, tokens)
        view = array_view(wanted, given_rows, seed=seed, interval=interval)
    with small_steps(given_rows[0]):
        return {_word(request): _evaluated(request, view) for request in requests}


def _word(request: Request) -> str:
    options = (f"{name}={int(v) if isinstance(v, bool) else v}" for name, v in request.options.items())
    return ":".join([request.metric.name, *options])


def _evaluated(request: Request, view: View) -> Estimate:
    """The estimate, or one without a value whose note says why."""
    try:
        return evaluate(request.metric, view, request.options)
    except TooFewRows as error:
        return missing_estimate(view, error)
