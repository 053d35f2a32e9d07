"""A small part of a large table that still tells the story: what a page shows first while the whole is drawn."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from anisoscope.results.query import SCHEMA, Table, current_names

LARGE = 60_000  # rows of a table whose page is not drawn at once
_ROWS = 20_000
_STEPS, _FEWEST = 40, 10
_MAIN = (
    *("gradient_enrichment", "gradient_energy", "proxy_stability", "probe_loss", "constant_loss", "loss"),
    *("average_cosine", "svd_ratio", "two_nn", "participation_ratio", "drift", "attention_sharpness"),
)


def brief_table(table: Table, most: int = _ROWS) -> Table:
    """At most about `most` rows: whole sites rather than heads and groups, fewer steps, the main quantities."""
    arrow = table.arrow
    fewest = partial(_fewer_steps, most=_FEWEST)
    for narrower in (_whole_sites, _fewer_steps, _main_quantities, _plain_variants, fewest):
        if len(arrow) <= most:
            break
        found = narrower(arrow)
        arrow = found if len(found) else arrow
    return Table(arrow.slice(0, 2 * most), table.about)


def read_without(path: Path, column: str) -> pa.Table:
    """A table file with nulls in a column that need not be read: the values without each fold are half of a file."""
    kept = [name for name in SCHEMA.names if name != column]
    arrow = pq.read_table(path, columns=kept)
    nulls = pa.nulls(len(arrow), SCHEMA.field(column).type)
    return current_names(arrow.append_column(SCHEMA.field(column), nulls).select(SCHEMA.names).cast(SCHEMA))


def _whole_sites(arrow: pa.Table) -> pa.Table:
    whole = pc.fill_null(pc.equal(arrow["group"], ""), True)
    return arrow.filter(pc.and_(pc.is_null(arrow["head"]), whole))


def _fewer_steps(arrow: pa.Table, most: int = _STEPS) -> pa.Table:
    """Steps at even places among those that there are, the first and the last included."""
    steps = sorted(pc.unique(arrow["step"]).drop_null().to_pylist())
    if len(steps) <= most:
        return arrow
    kept = {steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)}
    there = pc.is_in(arrow["step"], value_set=pa.array(sorted(kept), arrow["step"].type))
    return arrow.filter(pc.or_(there, pc.is_null(arrow["step"])))


def _main_quantities(arrow: pa.Table) -> pa.Table:
    return arrow.filter(pc.is_in(arrow["metric"], value_set=pa.array(_MAIN, arrow["metric"].type)))


def _plain_variants(arrow: pa.Table) -> pa.Table:
    """Variants that many rows share: the proxies and controls of every step, not what was measured beside."""
    counts = sorted(pc.value_counts(arrow["variant"]).to_pylist(), key=lambda one: -one["counts"])
    kept = [one["values"] for one in counts[:12]]
    return arrow.filter(pc.is_in(arrow["variant"], value_set=pa.array(kept, arrow["variant"].type)))
