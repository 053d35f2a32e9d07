"""Rows of training batches (`batch=live`) read in the place of a probe's, where a model has no probe.

A monitor without a probe measures the training batch itself; its rows of the tangent study say so in their variant.
Claims and pages ask for the rows of a probe, so a model that has none is read by its training batches. A model that has
both keeps them apart: the probe's are read, those of training batches stand beside them as another reading.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from anisoscope.results.query import SCHEMA, Query, Table, with_options

_OWNER = ("source", "run", "model", "seed")


def by_training_batches(table: Table) -> Table:
    """The table with `batch=live` taken out of the variants of every model that was measured without a probe.

    >>> live = {"metric": "gradient_energy", "variant": "batch=live;proxy=pca", "model": "a"}
    >>> by_training_batches(Table.from_records([live])).records()[0]["variant"]
    'proxy=pca'
    """
    query = Query(table)
    owned = query.where(batch="live").groups(*_OWNER)
    chosen = [rows.positions for owner, rows in owned.items() if not _has_probe(query, owner)]
    if not chosen:
        return table
    at = np.concatenate(chosen)
    variants = np.array(query.column("variant"), dtype=object)
    variants[at] = [with_options(variant, batch=None) for variant in variants[at]]
    place = SCHEMA.get_field_index("variant")
    return Table(table.arrow.set_column(place, SCHEMA.field("variant"), pa.array(variants, pa.string())), table.about)


def _has_probe(query: Query, owner: tuple[Any, ...]) -> bool:
    """Whether there are energies of a probe; those of updates and gradients of tables (`of`) are of neither."""
    return bool(len(query.where(**dict(zip(_OWNER, owner, strict=True)), proxy=..., batch=None, of=None)))
