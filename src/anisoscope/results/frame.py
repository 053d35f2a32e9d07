"""A table for people and for other libraries: variants taken apart into columns, frames, and a preview of a few rows.

A variant is the string of a metric's options, `proxy=pca;rank=16`. It is taken apart in this module only.
"""

from __future__ import annotations

import html
import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.errors import AnisoscopeError

SHOWN = 5  # rows at either end of a preview
WIDEST = 32  # characters of a cell of a preview
PLACE = ("run", "model", "revision", "data", "seed", "step", "stack", "layer", "kind", "head", "group", "metric")
NAMED = ("model", "data", "kind", "metric", "variant")  # told in a preview although all rows share them
PLURAL = {"step": "steps", "layer": "layers", "metric": "metrics", "model": "models"}


@lru_cache(maxsize=65536)
def options_of(variant: str) -> Mapping[str, str]:
    """The options of a variant.

    >>> dict(options_of("fit=refit;rank=16"))
    {'fit': 'refit', 'rank': '16'}
    """
    return {key: value for key, _, value in (part.partition("=") for part in variant.split(";") if part)}


def variant_name(options: Mapping[str, Any]) -> str:
    """A canonical string of options.

    >>> variant_name({"first": "out", "centred": True})
    'centred=1;first=out'
    """
    plain = {k: int(v) if isinstance(v, bool) else v for k, v in options.items()}
    return ";".join(f"{key}={plain[key]}" for key in sorted(plain))


def with_options(variant: str, **changes: Any) -> str:
    """A variant with some keys set, or taken out where the value is None.

    >>> with_options("control=next;rank=4", control=None, fit="refit")
    'fit=refit;rank=4'
    """
    merged = {**options_of(variant), **changes}
    return variant_name({key: value for key, value in merged.items() if value is not None})


def variant_keys(variants: Iterable[str | None]) -> list[str]:
    """The keys of some variants, sorted.

    >>> variant_keys(["proxy=pca;rank=16", "first=out", None])
    ['first', 'proxy', 'rank']
    """
    return sorted({key for variant in variants for key in options_of(variant or "")})


def key_column(arrow: pa.Table, key: str) -> pa.Array:
    """A variant key as a column: numbers where all its values are, else text; null in rows without it."""
    encoded = arrow["variant"].combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    texts = [options_of(variant).get(key) for variant in encoded.dictionary.to_pylist()]
    kind = _kind([text for text in texts if text is not None])
    types = {int: pa.int64(), float: pa.float64(), str: pa.string()}
    values = pa.array([None if text is None else kind(text) for text in texts], types[kind])
    return values.take(encoded.indices)


def _kind(texts: Sequence[str]) -> Any:
    """The narrowest of int, float and str that all texts can be read as."""
    for kind in (int, float):
        try:
            [kind(text) for text in texts]
        except ValueError:
            continue
        return kind if texts else str
    return str


def wide(arrow: pa.Table) -> pa.Table:
    """The same rows with a column for every key of their variants, behind `variant`.

    >>> rows = pa.table({"metric": ["drift", "drift"], "variant": ["", "first=out"], "value": [1.0, 2.0]})
    >>> wide(rows).column_names, wide(rows)["first"].to_pylist()
    (['metric', 'variant', 'first', 'value'], [None, 'out'])
    """
    place = arrow.column_names.index("variant") + 1
    for number, key in enumerate(variant_keys(pc.unique(arrow["variant"]).to_pylist())):
        name = key if key not in arrow.column_names else f"variant_{key}"
        arrow = arrow.add_column(place + number, name, key_column(arrow, key))
    return arrow


def pandas_frame(arrow: pa.Table) -> Any:
    _library("pandas")
    return wide(arrow).to_pandas()


def polars_frame(arrow: pa.Table) -> Any:
    return _library("polars").from_arrow(wide(arrow))


def _library(name: str) -> Any:
    """An optional library, or an error that says how to have it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise AnisoscopeError(
            f"to_{name}() needs the package {name}, which is not installed here; `pip install {name}`, or take "
            "to_arrow(), which every data frame library reads."
        ) from error


# -- a preview ---------------------------------------------------------------------------------------------------------


def summary(arrow: pa.Table) -> str:
    """What a table holds, in one line.

    >>> summary(pa.table({"metric": ["drift", "drift"], "step": [0, 1000], "model": ["m", "m"]}))
    '2 rows · model m · steps 0 … 1,000 (2) · metric drift'
    """
    rows = len(arrow)
    parts = [f"{rows:,} {'row' if rows == 1 else 'rows'}"]
    for name in (*PLACE, "variant") if rows else ():
        values = _distinct(arrow, name)
        if len(values) == 1 and name in NAMED:
            parts.append(f"{name} {_cell(values[0])}")
        elif len(values) > 1 and name in PLURAL:
            parts.append(f"{PLURAL[name]} {_listed(values)}")
    return " · ".join(parts)


def _distinct(arrow: pa.Table, name: str) -> list[Any]:
    """The values of a column that are not missing, sorted; empty where there is no such column."""
    if name not in arrow.column_names:
        return []
    return sorted(value for value in pc.unique(arrow[name]).to_pylist() if value not in (None, ""))


def _listed(values: Sequence[Any]) -> str:
    if isinstance(values[0], int):
        return f"{values[0]:,} … {values[-1]:,} ({len(values):,})"
    return ", ".join(map(_cell, values)) if len(values) <= 3 else f"{_cell(values[0])}, … ({len(values):,})"


def preview(arrow: pa.Table) -> tuple[list[str], list[list[str]]]:
    """The heads and the cells of the first and last rows: what tells rows apart, then the value and its interval."""
    varying = [name for name in (*PLACE, "variant") if name in arrow.column_names and _differ(arrow, name)]
    owners = arrow.group_by(["run", "model"]).aggregate([]) if {"run", "model"} <= set(varying) else None
    if owners is not None and len(owners) == len(pc.unique(arrow["model"])):
        varying.remove("run")  # the model tells it
    rows = np.arange(len(arrow))
    cut = len(rows) > 2 * SHOWN
    shown = arrow.take(np.concatenate([rows[:SHOWN], rows[-SHOWN:]]) if cut else rows).to_pylist()
    cells = [[*(_cell(row[name]) for name in varying), _cell(row["value"]), _interval(row)] for row in shown]
    if cut:
        cells.insert(SHOWN, ["…"] * (len(varying) + 2))
    return [*varying, "value", "interval"], cells


def _differ(arrow: pa.Table, name: str) -> bool:
    return len(pc.unique(arrow[name])) > 1 or name == "metric"


def _interval(row: Mapping[str, Any]) -> str:
    ends = [row.get("low"), row.get("high")]
    return " … ".join(map(_cell, ends)) if all(e is not None and math.isfinite(e) for e in ends) else ""


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 1]}…"


def preview_text(arrow: pa.Table) -> str:
    """The preview in aligned columns; words are on the left, numbers on the right."""
    heads, rows = preview(arrow)
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    words = [name in ("run", "model", "revision", "data", "stack", "kind", "group", "metric", "variant")
             for name in heads]  # fmt: skip
    lines = []
    for cells in (heads, *rows):
        aligned = [c.ljust(w) if left else c.rjust(w) for c, w, left in zip(cells, widths, words, strict=True)]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def preview_html(arrow: pa.Table) -> str:
    """The rows of the preview as an HTML table without style; everything in it is escaped."""
    heads, rows = preview(arrow)
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>" for cells in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
