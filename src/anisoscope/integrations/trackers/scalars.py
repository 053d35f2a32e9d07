"""Which numbers of a measured step a tracker is sent, and under which names; everything else stays in the table.

A name is `anisoscope/WHAT/PLACE`, such as `anisoscope/average_cosine/layer_06`; numbers of the training have no place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.catalogue import registry
from anisoscope.results.query import Query, Row, Table
from anisoscope.view.table_plot import STREAM, plainness
from anisoscope.view.words import OF_BLOCK, Catalogue, few

PREFIX = "anisoscope"
MOST_PLACES = 16  # of one number; of deeper models evenly chosen layers are sent, with the first and the last


@dataclass(frozen=True)
class Scalar:
    """A number to send: its name, the metrics it may be (the first that was measured), and keys of their variant.

    Of several variants that fit, the plainest is sent.
    """

    name: str
    metrics: tuple[str, ...]
    where: Mapping[str, Any] = field(default_factory=dict)


SCALARS = (  # what is sent where nothing was chosen
    Scalar("tangent_enrichment", ("gradient_enrichment",)),
    Scalar("average_cosine", ("average_cosine",)),
    Scalar("intrinsic_dimension", ("two_nn", "gride", "levina_bickel")),
    Scalar("drift", ("drift",)),
    Scalar("attention_sharpness", ("attention_sharpness",)),
    Scalar("loss", ("loss",)),
    Scalar("probe_loss", ("probe_loss",)),
)

Chosen = Sequence[str] | Mapping[str, str | Mapping[str, Any]]  # metrics, or names with a metric or fields of the table


def chosen_scalars(chosen: Chosen | None) -> tuple[Scalar, ...]:
    """What a user chose: metrics, or names and what they stand for; none if the usual ones are meant.

    >>> chosen_scalars(["drift"])[0].name
    'drift'
    >>> chosen_scalars({"pca": {"metric": "gradient_energy", "proxy": "pca"}})[0].where
    {'proxy': 'pca'}
    """
    if chosen is None:
        return ()
    if isinstance(chosen, str) or not isinstance(chosen, Iterable):
        raise AnisoscopeError(f"scalars is {str(chosen)[:80]!r}; expected a list of metrics, or names with metrics.")
    entries = chosen.items() if isinstance(chosen, Mapping) else [(name, name) for name in chosen]
    found = tuple(_scalar(name, what) for name, what in entries)
    if not found:
        raise AnisoscopeError("scalars is empty; name metrics, or leave it out for the usual ones.")
    return found


def _scalar(name: Any, what: Any) -> Scalar:
    fields = {"metric": what} if isinstance(what, str) else dict(what) if isinstance(what, Mapping) else {}
    metric = fields.pop("metric", None)
    if not isinstance(name, str) or not isinstance(metric, str):
        expected = "a metric, or fields of the table such as {'metric': 'gradient_energy', 'proxy': 'pca'}"
        raise AnisoscopeError(f"scalars has {str(name)[:80]!r}: {str(what)[:80]!r}; expected {expected}.")
    return Scalar(name, (metric,), fields)


def usual_scalars(rows: Table) -> tuple[Scalar, ...]:
    """The default; where a run measures none of its geometry or gradients, the main metrics of its rows instead."""
    measured = Query(rows).where(kind=lambda kind: kind != "training").values("metric")
    known = {metric for scalar in SCALARS for metric in scalar.metrics}
    if not measured or not known.isdisjoint(measured):
        return SCALARS
    main = Catalogue(registry()).main(measured)
    return (*(Scalar(metric, (metric,)) for metric in main), *SCALARS)


def rows_of(rows: Table, scalar: Scalar) -> Query:
    """The rows of a scalar: of one metric in one variant, in the residual stream if it is measured there."""
    every = Query(rows)
    for metric in scalar.metrics:
        found = every.where(metric=metric, **{"group": "", **scalar.where})
        stream = found.where(kind=STREAM)
        if not len(stream.where(head=None)) and len(found):
            stream = found
        variants = stream.values("variant")
        if variants:
            return stream.where(variant=min(variants, key=lambda variant: plainness(variant, stream)))
    return every.where(metric=())


def numbers_of(rows: Table, scalars: Sequence[Scalar]) -> dict[str, float]:
    """The numbers of these rows by name; those that are not finite are left out."""
    found: dict[str, float] = {}
    for scalar in scalars:
        named = {_name(scalar, row): row.value for row in rows_of(rows, scalar).where(head=None)}
        kept = [list(named)[i] for i in few(range(len(named)), MOST_PLACES)]
        found |= {name: named[name] for name in kept if math.isfinite(named[name])}
    return found


def heads_of(rows: Table, scalars: Sequence[Scalar]) -> dict[str, list[float]]:
    """The values of all heads of all layers, for a histogram, of those numbers that are measured by head."""
    found: dict[str, list[float]] = {}
    for scalar in scalars:
        values = rows_of(rows, scalar).where(head=...).known().numbers().tolist()
        found |= {f"{PREFIX}/{scalar.name}/heads": values} if values else {}
    return found


def _name(scalar: Scalar, row: Row) -> str:
    place = "" if row.kind == "training" or row.layer is None else place_name(row.layer, row.kind)
    stack = row.stack if place and row.stack not in (None, "", "single") else ""
    return "/".join(filter(None, (PREFIX, plain_name(scalar.name), stack, place)))


def place_name(layer: int, kind: str) -> str:
    """A site in the name of a number; names sort by depth.

    >>> [place_name(*site) for site in ((0, "embed"), (6, "resid"), (12, "final"), (6, "scores"), (0, "encoder.0"))]
    ['embedding', 'layer_06', 'final', 'layer_06_scores', 'encoder.0']
    """
    named = {"embed": "embedding", "resid": f"layer_{layer:02d}", "stage": f"stage_{layer:02d}", "final": "final"}
    return named.get(kind) or plain_name(f"layer_{layer:02d}_{kind}" if kind in OF_BLOCK else kind)


def plain_name(text: str) -> str:
    """A text with the letters that every tracker takes in a name.

    >>> plain_name("my loss (β)")
    'my_loss'
    """
    return re.sub(r"[^A-Za-z0-9_.\-/]+", "_", text).strip("_/") or "number"
