"""The run folder: the files that a run writes; they are readable at any time during the run.

    run.json          what was run, with what, on what, and how it ended
    table.parquet     the long table
    arrays/*.safetensors   spectra, a few sampled rows (for CKA and comparisons), their keys
    rows/MODEL/*.safetensors   every row of every site, with --save-rows
    map.parquet       the same few rows at every measured step, on fixed axes; tangent/row_map.py makes it
    comparison.json   what the page compares within the run: drift with average cosine, CKA between layers
    report.html, figures/
    partial/          what an interrupted pass had gathered; gone when the run is complete
    lock.json         which process is writing, while one is (results/lock.py); reading needs no lock

Files are written beside their place and renamed into it, so a reader never sees half a file."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from anisoscope.errors import AnisoscopeError
from anisoscope.results.lock import LOCK, refuse_other_writer
from anisoscope.results.pieces import TABLE, in_order, logged_rows, piece_stamps, rows_since, with_arms
from anisoscope.results.privacy import marked, placeless, without_places
from anisoscope.results.query import SCHEMA, Table, current_names
from anisoscope.results.row import check_columns, unreadable
from anisoscope.results.state import run_state

_OURS = {"run.json", "table.parquet", "arrays", "rows", "report.html", "figures", "partial", "parts"}
_OURS |= {"state", "verdicts.json", "comparison.json", "concepts.json", "map.parquet", "every_step.parquet", LOCK}
_PREPARED = {"corpus", "sampling.npz"}  # the text as a training reads it: made before anything is measured
_AGAIN = dict.fromkeys(("stopped", "failed"), "let it finish (its command again, with --resume).")
_AGAIN["running"] = "wait for its first results."
_FULL = ("enforce fail", "unexpected pos", "No space left", "os error 28")


def _is_ours(name: str) -> bool:
    """Whether a run writes a file of this name, or left it half-written behind: `.run.json.4711`."""
    return name in _OURS or (name.startswith(".") and any(name[1:].startswith(f"{ours}.") for ours in _OURS))


@contextlib.contextmanager
def room_on_disk(path: Path) -> Iterator[None]:
    """Turn the errors of torch and safetensors for a full disk into OSError(ENOSPC)."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) or not any(text in str(error) for text in _FULL):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file under a temporary name, flush it to disk and rename it, so that `path` is never incomplete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with room_on_disk(path):
            write(beside)
        with beside.open("rb") as handle:
            os.fsync(handle.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


DATASET_MARK = "<!-- anisoscope dataset: begin -->"  # in the README of a dataset of runs
_NUMBER, _TEXT = (int, float), (str,)
_RECORD: dict[str, tuple[type, ...]] = {  # types of the entries of run.json that are read; any may be missing or null
    **dict.fromkeys(("kind", "study", "status", "error", "started", "anisoscope", "device"), _TEXT),
    **dict.fromkeys(("wall_seconds", "peak_memory_mb", "memory_estimate_mb", "seed", "schema"), _NUMBER),
    **dict.fromkeys(("config", "versions", "data", "code", "map"), (dict,)),
    **dict.fromkeys(("warnings", "command", "models", "checkpoints", "skipped"), (list,)),
}
_LISTED: dict[str, type | tuple[type, ...]] = {  # and of what such lists hold
    **dict.fromkeys(("warnings", "command"), str),
    "models": (dict, type(None)),
}
_ENTRY: dict[str, tuple[type, ...]] = {  # and of one of its models
    **dict.fromkeys(("name", "key", "revision", "architecture", "type", "device", "dtype", "fingerprint"), _TEXT),
    **dict.fromkeys(("parameters", "layers", "width", "row_count", "contexts"), _NUMBER),
    **dict.fromkeys(("notes", "stacks", "sites"), (list,)),
    **dict.fromkeys(("dropped", "data"), (dict,)),
}


def check_record(about: Mapping[str, Any], path: Path) -> None:
    """Raise an error that names the first entry of run.json with a type that no run writes."""
    found = [(name, about.get(name), types) for name, types in _RECORD.items()]
    wrong = next(((n, v, t) for n, v, t in found if v is not None and not isinstance(v, t)), None)
    for name, kind in _LISTED.items() if wrong is None else ():
        if not all(isinstance(one, kind) for one in about.get(name) or ()):
            wrong = (name, about[name], (list,))
    for number, entry in enumerate(about.get("models") or () if wrong is None else ()):
        at = [(name, (entry or {}).get(name), types) for name, types in _ENTRY.items()]
        wrong = next(
            ((f"models[{number}].{n}", v, t) for n, v, t in at if v is not None and not isinstance(v, t)), wrong
        )
    if wrong is not None:
        name, value, types = wrong
        words = {int: "a number", str: "a text", dict: "a mapping", list: "a list of such"}[types[0]]
        raise AnisoscopeError(
            f"{str(path)!r} has {name} = {str(value)[:40]!r}, where {words} is expected; restore it or run again."
        )


def _without_nulls(about: Mapping[str, Any]) -> dict[str, Any]:
    """A checked record without lists and mappings that are null, which mean the same as missing ones."""

    def kept(entry: Mapping[str, Any], types: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
        return {n: v for n, v in entry.items() if v is not None or types.get(n) not in ((list,), (dict,))}

    found = kept(about, _RECORD)
    models = {"models": [kept(entry or {}, _ENTRY) for entry in found["models"]]} if "models" in found else {}
    return {**found, **models}


@contextlib.contextmanager
def readable_runs(*paths: str | Path) -> Iterator[None]:
    """Around the reading of runs: what their files hold against all expectation becomes one sentence."""
    try:
        yield
    except (TypeError, AttributeError, KeyError, IndexError, ValueError) as error:
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise AnisoscopeError(
            f"what {', '.join(map(str, paths))!r} holds cannot be read as a run ({reason}); restore its files, or run "
            "again."
        ) from error


def slug(name: str) -> str:
    """A name as a file name.

    >>> slug("EleutherAI/pythia-160m@step1")
    'EleutherAI-pythia-160m-step1'
    """
    return re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.") or "model"


@dataclass(frozen=True)
class RunFolder:
    """One run on disk."""

    path: Path

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run folder; otherwise an error that names what the folder contains."""
        folder = Path(path)
        if not folder.exists():
            raise AnisoscopeError(f"run folder {str(path)!r} does not exist; give the folder of a run.")
        if not (folder / "run.json").is_file():
            found = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) if folder.is_dir() else "a file"
            raise AnisoscopeError(f"{str(path)!r} holds no run.json (found: {found or 'nothing'}); give a run folder.")
        return cls(folder)

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any], *, resume: bool) -> RunFolder:
        """A new run folder or, with `resume`, that of the same run; a folder with other content is an error."""
        folder = cls(Path(path))
        if folder.path.exists() and not folder.path.is_dir():
            raise AnisoscopeError(f"output {str(path)!r} is a file; give a folder with --out.")
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            there = {p.name for p in folder.path.iterdir()}
        except OSError as error:
            made = f"output folder {str(path)!r} cannot be made ({error.strerror or str(error)})"
            raise AnisoscopeError(f"{made}; give another --out.") from error
        refuse_other_writer(folder.path)
        if "run.json" in there:
            folder._check_same(config, resume=resume)
        elif foreign := {name for name in there - _PREPARED if not _is_ours(name)}:
            named = ", ".join(sorted(foreign)[:3])
            raise AnisoscopeError(f"output folder {str(path)!r} holds other files ({named}); give an empty one.")
        return folder

    def _check_same(self, config: Mapping[str, Any], *, resume: bool) -> None:
        old = self.about()
        files = [path.relative_to(self.path) for path in self.path.rglob("*") if path.is_file()]
        results = [p for p in files if p.name not in ("run.json", LOCK) and _PREPARED.isdisjoint(p.parts)]
        if old.get("status") in ("failed", "interrupted") and not results:
            (self.path / "run.json").unlink()  # the run failed without results (such as by a misspelt option)
            (self.path / "sampling.npz").unlink(missing_ok=True)  # depends on its options; the corpus records its own
            return
        if not resume:
            how = "add --resume to go on with it, or " if old.get("status") != "complete" else ""
            there = f"output folder {str(self.path)!r} holds a run ({old.get('status', 'unknown')})"
            raise AnisoscopeError(f"{there}; {how}give another --out.")
        old_config, new_config = old.get("config", {}), json.loads(json.dumps(dict(config)))
        named = marked(new_config)
        same = {k for k in new_config if old_config.get(k) in (new_config[k], named[k])}
        different = sorted({*old_config, *new_config} - same)
        if different:
            key = different[0]
            raise AnisoscopeError(
                f"--resume found a run with {key} = {old_config.get(key)!r}, not {new_config.get(key)!r}, in "
                f"{str(self.path)!r}; repeat its command, or give another --out."
            )

    def about(self) -> dict[str, Any]:
        path = self.path / "run.json"
        try:
            about = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise AnisoscopeError(f"{str(path)!r} is not readable JSON ({error}); restore it or run again.") from error
        if not isinstance(about, dict):
            raise AnisoscopeError(f"{str(path)!r} is no record of a run; restore it or run again.")
        check_record(about, path)
        return _without_nulls(about)

    def write_about(self, about: Mapping[str, Any]) -> None:
        text = json.dumps(without_places(dict(about)), indent=2, ensure_ascii=False, default=str)
        replace_file(self.path / "run.json", lambda p: p.write_text(text + "\n", encoding="utf-8"))

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file next to the table, such as verdicts or concepts."""
        text = json.dumps(placeless(value), ensure_ascii=False, allow_nan=False, default=str)
        replace_file(self.path / name, lambda p: p.write_text(text + "\n", encoding="utf-8"))

    def table(self) -> Table:
        """The table of the run: of one that is not done what it has written so far, and `reading` in its `about`."""
        about = self.about()
        if about.get("status") == "complete":
            return Table(self._whole_table(about).arrow, about)
        state = run_state(self.path)
        about = with_arms(self.path, about) | ({"reading": words} if (words := state.words()) else {})
        pieces = piece_stamps(self.path)
        if set(pieces) == {TABLE}:
            return Table(self._whole_table(about).arrow, about)
        try:
            found = rows_since(self.path).table if pieces else logged_rows(self.path, about)
        except (OSError, ValueError, TypeError) as error:
            raise AnisoscopeError(f"what {str(self.path)!r} holds is not readable ({error}); run again.") from error
        if not len(found):
            raise AnisoscopeError(
                f"run {str(self.path)!r} has no table yet, since it has measured nothing: {state.words()}; "
                f"{_AGAIN[state.state]}"
            )
        return Table((found if state.arms else in_order(found)).arrow, about)

    def batches(self, columns: Sequence[str] | None = None, *, size: int = 1 << 16) -> Iterator[pa.Table]:
        """The rows of the table in order, or some columns of them, at most `size` at a time, in bounded memory."""
        about = self.about()
        read = None if columns is None else list(dict.fromkeys([*columns, "metric", "variant"]))
        if about.get("status") != "complete" and set(piece_stamps(self.path)) != {TABLE}:
            arrow = self.table().arrow
            for start in range(0, len(arrow), size):
                yield arrow.slice(start, size).select(read or SCHEMA.names)
            return
        with self._readable_table(about) as path, pq.ParquetFile(path) as file:
            # metric and variant tell rows of former names
            for batch in file.iter_batches(size, columns=read):
                part = pa.Table.from_batches([batch]).select(read or SCHEMA.names)
                yield current_names(part.cast(pa.schema([SCHEMA.field(name) for name in part.column_names])))

    def _whole_table(self, about: Mapping[str, Any]) -> Table:
        with self._readable_table(about) as path:
            return Table.read(path)

    @contextlib.contextmanager
    def _readable_table(self, about: Mapping[str, Any]) -> Iterator[Path]:
        """Around reading the table: the path of its file; one that is absent or unreadable is told in a sentence."""
        path = self.path / TABLE
        if not path.is_file():
            unwatched = about.get("kind") == "training" and about.get("config", {}).get("monitor", "none") == "none"
            why = "has no table yet; let it finish (its command again, with --resume)."
            if unwatched:
                why = "is complete but measured nothing (--monitor none), so it has no table."
            raise AnisoscopeError(f"run {str(self.path)!r} {why}")
        try:
            check_columns(path, SCHEMA)
            yield path
        except (OSError, ValueError, TypeError, pa.ArrowException) as error:
            raise unreadable(path, error) from error

    def write_table(self, table: Table) -> None:
        replace_file(self.path / "table.parquet", table.write)

    def part_path(self, name: str) -> Path:
        return self.path / "parts" / f"{name}.parquet"

    def write_part(self, name: str, table: Table) -> None:
        """Write the table, with its metadata, of one model of the run or of one pass over it."""
        replace_file(self.part_path(name), lambda path: self.write_part_to(path, table))

    def write_part_to(self, path: Path, table: Table) -> None:
        pq.write_table(table.arrow.replace_schema_metadata({"about": json.dumps(placeless(table.about))}), path)

    def part(self, name: str) -> Table | None:
        path = self.part_path(name)
        if not path.is_file():
            return None
        about = (pq.read_schema(path).metadata or {}).get(b"about", b"{}")
        return Table(Table.read(path).arrow, json.loads(about))

    def write_arrays(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        from safetensors.numpy import save_file

        plain = {key: np.ascontiguousarray(value) for key, value in arrays.items()}
        replace_file(self.path / "arrays" / f"{name}.safetensors", lambda p: save_file(plain, p))

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        # a model measured in several passes has a file for each
        paths = sorted((self.path / "arrays").glob(f"{glob.escape(name)}*.safetensors"))
        matching = [p for p in paths if re.fullmatch(re.escape(name) + r"(\.\d+)?", p.stem)]
        try:
            return {key: value for path in matching for key, value in load_file(path).items()}
        except (SafetensorError, OSError, ValueError) as error:
            where = str(self.path / "arrays")
            raise AnisoscopeError(f"a file in {where!r} is damaged ({error}); restore it, or run again.") from error

    def row_map(self) -> list[MappedSite]:
        """The content of map.parquet; empty if the run has none."""
        path = self.path / MAP_FILE
        if not path.is_file():
            return []
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise AnisoscopeError(f"{str(path)!r} is not a readable map ({error}); delete it or run again.") from error
        missing = [name for name in MAPPED if name not in table.column_names]
        if missing:
            raise AnisoscopeError(f"{str(path)!r} has no column {missing[0]!r}; delete it or run again.")
        return mapped_sites(table, self.about().get("map"))

    def partial_path(self, name: str) -> Path:
        """The file with the statistics of an unfinished pass."""
        return self.path / "partial" / f"{name}.pt"

    def drop_partial(self, name: str) -> None:
        self.partial_path(name).unlink(missing_ok=True)

    def tidy(self) -> None:
        """Remove the files that only an unfinished run needs."""
        for folder in ("partial", "parts"):
            if (self.path / folder).exists():
                for path in (self.path / folder).iterdir():
                    path.unlink()
                (self.path / folder).rmdir()


def table_of(path: str | Path) -> Table:
    """The table of a run, or of all runs of a dataset that `anisoscope push` wrote, with their models and records."""
    inside = _dataset_runs(Path(path))
    if not inside:
        return RunFolder.open(path).table()
    tables = {run.path.name: run.table() for run in inside}
    models = [model for table in tables.values() for model in table.about.get("models") or ()]
    about = {"models": models, "runs": {name: table.about for name, table in tables.items()}}
    return Table.concat(tables.values(), None if len(tables) == 1 else about)


def _dataset_runs(path: Path) -> list[RunFolder]:
    """The runs of a dataset; none for a folder that is no dataset."""
    readme = path / "README.md"
    if (path / "run.json").is_file() or not readme.is_file():
        return []
    if DATASET_MARK not in readme.read_text(encoding="utf-8", errors="replace"):
        return []
    return [RunFolder(found.parent) for found in sorted(path.glob("*/run.json"))]


# -- the map of rows ---------------------------------------------------------------------------------------------------

MAP_FILE, _SHARES = "map.parquet", "shares"
MAP_SCHEMA = pa.schema(
    [
        ("model", pa.string()), ("seed", pa.int64()), ("step", pa.int64()), ("stack", pa.string()),
        ("layer", pa.int64()), ("kind", pa.string()), ("row", pa.int64()), ("x", pa.float32()), ("y", pa.float32()),
        ("z", pa.float32()), ("token", pa.string()), ("frequency", pa.int64()), ("position", pa.int64()),
        ("group", pa.string()),
    ]
)  # fmt: skip


def write_rows(folder: Path, table: pa.Table, shares: Mapping[str, Any]) -> None:
    """Write map.parquet with the variance shares of its axes as metadata, because training writes run.json itself."""
    with_shares = table.replace_schema_metadata({_SHARES: json.dumps(shares)})
    replace_file(folder / MAP_FILE, lambda path: pq.write_table(with_shares, path, compression="zstd"))


def shares_in(table: pa.Table) -> dict[str, Any]:
    """The share of variance of each axis, by model and site, from the metadata of a map."""
    text = (table.schema.metadata or {}).get(_SHARES.encode())
    return dict(json.loads(text)) if text else {}


MAPPED = ("model", "seed", "stack", "layer", "kind", "step", "row", "x", "y", "token", "frequency", "position", "group")


class MappedSite(NamedTuple):
    """The rows of a map at one site: their coordinates by step, what they are, and the axes' shares of variance."""

    model: str
    seed: int | None
    stack: str
    layer: int
    kind: str
    at: dict[int, list[list[float | None]]]  # by step: [all x, all y]
    token: list[str]
    frequency: list[int | None]
    position: list[int]
    group: list[str]
    shares: list[float]


def mapped_sites(table: pa.Table, recorded: Mapping[str, Any] | None = None) -> list[MappedSite]:
    """The sites of a map; `recorded`: shares of variance from run.json, for a map without them."""
    shares = shares_in(table) or recorded or {}
    by_site: dict[tuple[Any, ...], dict[int, dict[int, tuple[Any, ...]]]] = {}
    for values in zip(*(table[name].to_pylist() for name in MAPPED), strict=True):
        by_site.setdefault(values[:5], {}).setdefault(values[5], {})[values[6]] = values[7:]
    sites = []
    for (model, seed, stack, layer, kind), by_step in by_site.items():
        labels = {row: values[2:] for rows in by_step.values() for row, values in rows.items()}
        order = sorted(labels)
        at = {}
        for step, rows in sorted(by_step.items()):
            at[step] = [[rows[row][axis] if row in rows else None for row in order] for axis in (0, 1)]
        token, frequency, position, group = (list(column) for column in zip(*map(labels.get, order), strict=True))
        texts = [text or "" for text in token], frequency, position, [text or "" for text in group]
        name = f"{layer}.{kind}" if stack == "single" else f"{stack}.{layer}.{kind}"
        of_site = [(shares.get(owner) or {}).get(name) for owner in (map_name(model, seed), model)]
        sites.append(MappedSite(model, seed, stack, layer, kind, at, *texts, next(filter(None, of_site), [])))
    return sites


def map_name(model: str, seed: int | None) -> str:
    """The key of a model and seed in the shares of a map's axes.

    >>> map_name("causal-next-6x256", 1), map_name("gpt2", None)
    ('causal-next-6x256-seed1', 'gpt2')
    """
    return model if seed is None else f"{model}-seed{seed}"


def join_maps(folders: Sequence[Path]) -> tuple[pa.Table, dict[str, Any]]:
    """The maps of several runs in one table, and the shares of their axes; runs without a map are skipped."""
    paths = [Path(folder) / MAP_FILE for folder in folders]
    maps = [pq.read_table(path) for path in paths if path.is_file()]
    plain = [one.replace_schema_metadata(None).cast(MAP_SCHEMA) for one in maps]
    shares = {key: value for one in maps for key, value in shares_in(one).items()}
    return pa.concat_tables([MAP_SCHEMA.empty_table(), *plain]), shares


def write_joined(out: Path, folders: Sequence[Path]) -> dict[str, Any]:
    """Write the map of a study from those of its runs; returns the entry `map` of its run.json."""
    table, shares = join_maps(folders)
    if len(table):
        write_rows(Path(out), table, shares)
    return shares
