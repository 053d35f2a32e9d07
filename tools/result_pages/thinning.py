"""A run folder made small: what verdicts, page, README and gallery read of the table, and nothing else.

What is read is watched (`reading`), not declared, so that no rule must be kept in step with claims and figures. Rows
that nothing reads go, except those without a number, which say what failed; leave-one-fold-out values stay where an
interval is made of them. Numbers are rounded to some digits. The verdicts of the thinned table must be those of the
whole one, or nothing is written.
"""

from __future__ import annotations

import contextlib
import io
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from anisoscope.commands.drawing import page_of_runs
from anisoscope.errors import AnisoscopeError
from anisoscope.results.folder import MAPPED, RunFolder
from anisoscope.results.privacy import without_places
from anisoscope.results.query import SCHEMA, Query, Table
from anisoscope.view.document import page_document
from anisoscope.view.sections.findings import leading, measured
from anisoscope.view.words import number, plural
from result_pages.judging import is_robust, redraw, write_verdicts
from result_pages.reading import Reading, numbered, reading
from result_pages.readme import readme
from result_pages.result import Result, all_results, judged
from result_pages.summary import learned_sentences

DOCS = Path(__file__).parents[2] / "docs"
NUMBERS = ("value", "low", "high", "sd")
FLAT = "replicates.list.element"
FILES = {"table.parquet", "verdicts.json", "run.json", "report.html", "figures", "comparison.json", "map.parquet",
         "README.md", "limits.md", "finding.md"}  # fmt: skip
PAGE_FILES = ("map.parquet", "comparison.json")  # which only the page reads
MOST_DIGITS = 7  # of numbers
SEEN = 0.05  # of the half-width of an interval: less is not seen
MAP_GRID = 2000  # places on each axis of a map


@dataclass(frozen=True)
class Wish:
    """How far to thin.

    Only some steps; without what only the page reads, which is then drawn from the whole table: rows, the map of rows
    and the parts of verdicts on single seeds; without verdicts under other choices (`claims --robust`), which read
    twice as much; with so many digits of every number; without files of figures, which the page draws, too.
    """

    steps: tuple[int, ...] = ()
    claims_only: bool = False
    plain: bool = False
    digits: int = MOST_DIGITS
    figures: bool = True


def thin(folder: Path, wish: Wish = Wish()) -> None:  # noqa: B008  a frozen value
    """Thin a folder in its place; an error, and the folder as it was, if a verdict would become another."""
    result = Result(folder)
    robust = is_robust(result) and not wish.plain
    before = judged(result, robust=robust)
    whole = result.table if not wish.steps else _at_steps(result.table, wish.steps)
    small = thinned(whole, _watched(result, numbered(whole), wish=wish), digits=wish.digits)
    after = judged(result, Table(small, result.about), robust=robust)
    _check_same(before, after)
    if wish.claims_only:
        redraw(folder, figures=wish.figures)
    _write(result, small, wish=wish)
    if wish.claims_only:
        after = _deciding(after) if result.about.get("study") == "performance" else _leading_in_full(after)
    write_verdicts(folder, after)
    if not wish.claims_only:
        redraw(folder)


def _leading_in_full(verdicts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The verdicts, those on single seeds without their parts: what is a word or a number stays."""
    whole = {id(verdict) for verdict in leading(measured(verdicts))}
    return [verdict if id(verdict) in whole else {**verdict, "details": _flat(verdict)} for verdict in verdicts]


def _deciding(verdicts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The verdicts without parts that decide nothing: of the performance study those of single sites, in the table."""
    found = []
    for verdict in verdicts:
        details = dict(verdict.get("details") or {})
        details["parts"] = [part for part in details.get("parts") or [] if part.get("needed")]
        found.append({**verdict, "details": details})
    return found


def _flat(verdict: dict[str, Any]) -> dict[str, Any]:
    details = verdict.get("details") or {}
    return {name: value for name, value in details.items() if not isinstance(value, dict | list)}


def _at_steps(table: Table, steps: Sequence[int]) -> Table:
    """Rows of these steps and rows without one; those of the training loop at all steps, which are few."""
    rows = Query(table)
    kept = [rows.where(step=[None, *steps]).positions, rows.where(kind="training").positions]
    return table.take(np.unique(np.concatenate(kept)))


def _watched(result: Result, table: Table, *, wish: Wish) -> Reading:
    """What is read of a numbered table while everything is made that is shown of it."""
    quiet = contextlib.redirect_stderr(io.StringIO())  # words on what README leaves out are told when it is written
    with tempfile.TemporaryDirectory() as place, reading(len(table)) as seen, quiet:
        copy = _copy(result, Path(place) / result.name, table)
        judged(result, table, robust=not wish.plain)
        with _gallery_of(result.name, Query(table)):
            readme(copy)
        learned_sentences({**all_results(DOCS), result.name: copy})
        if not wish.claims_only:
            page_document(page_of_runs([RunFolder.open(copy.folder)]))
    return seen


def _copy(result: Result, place: Path, table: Table) -> Result:
    place.mkdir()
    for path in result.folder.iterdir():
        if path.name in FILES - {"table.parquet", "figures", "report.html"}:
            (shutil.copytree if path.is_dir() else shutil.copyfile)(path, place / path.name)
    table.write(place / "table.parquet")
    return Result(place)


@contextlib.contextmanager
def _gallery_of(name: str, rows: Query) -> Any:
    """Pictures of the gallery read this table; those of the result are drawn, to see what they read."""
    import gallery
    from drawing_style import draw_both

    read: Callable[[str], Query] = gallery.results
    gallery.results = lambda asked: rows if asked == name else read(asked)  # type: ignore[assignment]
    try:
        with tempfile.TemporaryDirectory() as place:
            for picture in (picture for picture in gallery.PICTURES if picture.result == name):
                with contextlib.suppress(LookupError, ValueError, StopIteration):  # it is of another table
                    draw_both(picture.draw, Path(place) / picture.name, picture.size)
        yield
    finally:
        gallery.results = read  # type: ignore[assignment]


def thinned(table: Table, seen: Reading, *, digits: int = MOST_DIGITS) -> pa.Table:
    """The rows that were read, and those without a number; folds where they were read; numbers rounded."""
    unknown = ~np.isfinite(np.asarray(pc.fill_null(table.arrow["value"], np.nan)))
    kept = np.flatnonzero(seen.rows | unknown)
    arrow = table.arrow.take(pa.array(kept))
    folds = pc.if_else(pa.array(seen.folds[kept]), arrow["replicates"].combine_chunks(), pa.scalar(None, _FOLDS))
    arrow = arrow.set_column(
        arrow.column_names.index("replicates"), SCHEMA.field("replicates"), _rounded_lists(folds, digits)
    )
    for name in NUMBERS:
        arrow = arrow.set_column(arrow.column_names.index(name), SCHEMA.field(name), _rounded(arrow[name], digits))
    return arrow


_FOLDS = SCHEMA.field("replicates").type


def _rounded(column: Any, digits: int) -> Any:
    """Numbers rounded to as many binary digits as these decimal ones need, which compresses the zeros behind them."""
    values = np.asarray(pc.fill_null(pc.cast(column, pa.float64()), np.nan))
    fraction, exponent = np.frexp(values)
    scale = 2.0 ** math.ceil(digits * math.log2(10))
    return pa.array(np.ldexp(np.round(fraction * scale) / scale, exponent), mask=np.asarray(pc.is_null(column)))


def _rounded_lists(folds: Any, digits: int) -> Any:
    whole = folds.combine_chunks() if isinstance(folds, pa.ChunkedArray) else folds
    numbers = _rounded(whole.flatten(), digits)
    lengths = np.asarray(pc.fill_null(pc.list_value_length(whole), 0))
    starts = pa.array(np.concatenate([[0], lengths.cumsum()]), pa.int32())
    return pa.ListArray.from_arrays(starts, numbers, mask=pc.is_null(whole)).cast(_FOLDS)


def write_small(arrow: pa.Table, path: Path) -> None:
    """Write a table as small as Parquet makes it: the bytes of numbers apart, words by number, zstd at its best."""
    floats = {FLAT: "BYTE_STREAM_SPLIT"} | dict.fromkeys((*NUMBERS, "depth"), "BYTE_STREAM_SPLIT")
    words = [name for name in arrow.column_names if name not in floats and name != "replicates"]
    options: dict[str, Any] = {"compression": "zstd", "compression_level": 19, "write_statistics": False}
    pq.write_table(arrow, path, use_dictionary=words, column_encoding=floats, **options)


def _check_same(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> None:
    """Raise an error if a verdict, over all seeds or of one, has another status than before, or another effect.

    Rounding makes ties, of which a rank correlation may become another by more than the digits that were left out.
    """
    one, two = ([(v["claim"], v["subject"], v["scope"], v["status"]) for v in each] for each in (before, after))
    changed = next(
        (a for a, b in zip(one, two, strict=False) if a != b), ("number of verdicts", len(one), len(two))
    ) if one != two else next(
        ((*a, v["effect"], w["effect"]) for a, v, w in zip(one, before, after, strict=True) if _moved(v, w)), None
    )  # fmt: skip
    if changed is not None:
        raise AnisoscopeError(
            f"thinned, a verdict would be another ({changed}); nothing was written: keep more, or more digits."
        )


def _moved(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether an effect moved by more than a share of its interval that could be seen."""
    one, two, ends = before.get("effect"), after.get("effect"), (before.get("low"), before.get("high"))
    if one is None or two is None:
        return (one is None) != (two is None)
    half = 0.0 if None in ends else (float(ends[1]) - float(ends[0])) / 2
    return abs(two - one) > max(SEEN * half, SEEN**2 * abs(one), SEEN**3)


def _told(whole: Table, small: pa.Table, wish: Wish) -> str:
    """How a table was thinned, in words for its README."""
    folds = [int(pc.sum(pc.is_valid(column)).as_py()) for column in (whole.arrow["replicates"], small["replicates"])]
    parts = [f"{len(small):,} of {plural(len(whole), 'row')} that verdicts, tables and figures read"]
    parts += [f"at {plural(len(wish.steps), 'step')}"] if wish.steps else []
    parts += [f"leave-one-fold-out values of {folds[1]:,} of {folds[0]:,} rows", f"numbers with {wish.digits} digits"]
    return f"The table is thinned for its size: {', '.join(parts)}. Verdicts are those of the whole table."


def _write(result: Result, small: pa.Table, *, wish: Wish) -> None:
    """Write table and record; of a folder that was thinned before, the words on the first time stay."""
    folder, about = result.folder, without_places(result.about, share=True)
    former = (about.get("thinned") or {}).get("words", "")
    told = {"words": f"{former} {_told(result.table, small, wish)}".strip()}
    told |= {"page": "`report.html` was drawn from the whole table."} if wish.claims_only else {}
    write_small(small, folder / "table.parquet")
    told |= {} if wish.figures else {"figures": "no files"}
    RunFolder(folder).write_about(about | {"thinned": told})
    for path in folder.iterdir():
        if path.name not in FILES or (wish.claims_only and path.name in PAGE_FILES):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if (folder / "map.parquet").is_file():
        _thin_map(folder / "map.parquet")


def _thin_map(path: Path) -> None:
    """Keep the two axes that pages draw, rounded at each site to a grid as fine as a figure shows."""
    table = pq.read_table(path)
    table = table.select([name for name in table.column_names if name in MAPPED])
    keys = [table[name].to_pylist() for name in ("model", "seed", "stack", "layer", "kind")]
    number_of = {key: place for place, key in enumerate(dict.fromkeys(zip(*keys, strict=True)))}
    sites = np.array([number_of[key] for key in zip(*keys, strict=True)])
    for name in ("x", "y"):
        values = np.nan_to_num(np.asarray(table[name], dtype=np.float64))
        largest = np.zeros(len(number_of))
        np.maximum.at(largest, sites, np.abs(values))
        step = np.where(largest > 0, largest, 1.0)[sites] / MAP_GRID
        rounded = pa.array((np.round(values / step) * step).astype(np.float32), mask=pc.is_null(table[name]).to_numpy())
        table = table.set_column(table.column_names.index(name), name, rounded)
    pq.write_table(table, path, compression="zstd", compression_level=19, write_statistics=False)


def size_words(folder: Path) -> str:
    """What a folder weighs."""
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{folder}: {number(total / 1e6)} MB"
