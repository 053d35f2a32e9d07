"""The columns of the long table, and how the options of a metric are written into its column `variant`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

SCHEMA_VERSION = 1
FIRST_OUTLIER = "the first position is an outlier here"  # the note of a row with first=out where it is one
SCHEMA = pa.schema(
    [
        ("schema", pa.int32()),
        ("run", pa.string()),
        ("model", pa.string()),
        ("revision", pa.string()),
        ("data", pa.string()),
        ("step", pa.int64()),  # null outside a series
        ("stack", pa.string()),  # encoder | decoder | single
        ("layer", pa.int32()),  # 0 = embed, l = after block l, final and unembed = L
        ("depth", pa.float64()),  # layer / L
        ("kind", pa.string()),
        ("head", pa.int32()),  # null where there are no heads
        ("group", pa.string()),  # "" = all rows
        ("metric", pa.string()),
        ("variant", pa.string()),  # canonical "key=value;key=value", sorted; "" = the metric's default
        ("value", pa.float64()),  # NaN where it could not be computed; `note` says why
        ("low", pa.float64()),
        ("high", pa.float64()),
        ("sd", pa.float64()),
        ("n", pa.int64()),
        ("contexts", pa.int64()),
        ("dropped", pa.int64()),
        ("seed", pa.int64()),
        ("note", pa.string()),
        ("replicates", pa.list_(pa.float64())),  # leave-one-fold-out values, for paired differences
    ]
)


def variant_name(options: Mapping[str, Any]) -> str:
    """A canonical string of options.

    >>> variant_name({"first": "out", "centred": True})
    'centred=1;first=out'
    """
    plain = {k: int(v) if isinstance(v, bool) else v for k, v in options.items()}
    return ";".join(f"{key}={plain[key]}" for key in sorted(plain))
