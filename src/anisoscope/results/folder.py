"""The run folder: the files that a run writes; they are readable at any time during the run.

    run.json          what was run, with what, on what, and how it ended
    table.parquet     the long table
    arrays/*.safetensors   spectra, a few sampled rows (for CKA and comparisons), their keys
    rows/MODEL/*.safetensors   every row of every site, with --save-rows
    map.parquet       the same few rows at every measured step, on fixed axes; tangent/row_map.py makes it
    comparison.json   what the page compares within the run: drift with average cosine, CKA between layers
    report.html, figures/
    partial/          what an interrupted pass had gathered; gone when the run is complete
    lock.json         which process is writing, while one is (`WriterLock`); reading needs no lock

Files are written beside their place and renamed into it, so a reader never sees half a file."""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import glob
import json
import os
import platform
import re
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from anisoscope.errors import AnisoscopeError
from anisoscope.results.privacy import marked, placeless, without_places
from anisoscope.results.query import SCHEMA, Table

LOCK = "lock.json"
_OURS = {"run.json", "table.parquet", "arrays", "rows", "report.html", "figures", "partial", "parts"}
_OURS |= {"state", "verdicts.json", "comparison.json", "concepts.json", "map.parquet", "every_step.parquet", LOCK}
_PREPARED = {"corpus", "sampling.npz"}  # the text as a training reads it: made before anything is measured
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


_NUMBER, _TEXT = (int, float), (str,)
_RECORD: dict[str, tuple[type, ...]] = {  # types of the entries of run.json that are read; any may be missing or null
    **dict.fromkeys(("kind", "study", "status", "error", "started", "anisoscope", "device"), _TEXT),
    **dict.fromkeys(("wall_seconds", "peak_memory_mb", "memory_estimate_mb", "seed", "schema"), _NUMBER),
    **dict.fromkeys(("config", "versions", "data", "code", "map"), (dict,)),
    **dict.fromkeys(("warnings", "command", "models", "checkpoints", "skipped"), (list,)),
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
    for number, entry in enumerate(about.get("models") or () if wrong is None else ()):
        of_model = entry if isinstance(entry, dict) else {}
        at = [("", entry, (dict,)), *((f".{name}", of_model.get(name), types) for name, types in _ENTRY.items())]
        wrong = next(
            ((f"models[{number}]{n}", v, t) for n, v, t in at if v is not None and not isinstance(v, t)), wrong
        )
    if wrong is None and not all(isinstance(word, str) for word in about.get("warnings") or ()):
        wrong = ("warnings", about["warnings"], (list,))
    if wrong is not None:
        name, value, types = wrong
        words = {int: "a number", str: "a text", dict: "a mapping", list: "a list of such"}[types[0]]
        raise AnisoscopeError(
            f"{str(path)!r} has {name} = {str(value)[:40]!r}, where {words} is expected; restore it or run again."
        )


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
        return about

    def write_about(self, about: Mapping[str, Any]) -> None:
        text = json.dumps(without_places(dict(about)), indent=2, ensure_ascii=False, default=str)
        replace_file(self.path / "run.json", lambda p: p.write_text(text + "\n", encoding="utf-8"))

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file next to the table, such as verdicts or concepts."""
        text = json.dumps(placeless(value), ensure_ascii=False, allow_nan=False, default=str)
        replace_file(self.path / name, lambda p: p.write_text(text + "\n", encoding="utf-8"))

    def table(self) -> Table:
        path, about = self.path / "table.parquet", self.about()
        if not path.is_file():
            unwatched = about.get("kind") == "training" and about.get("config", {}).get("monitor", "none") == "none"
            why = "has no table yet; let it finish (its command again, with --resume)."
            if about.get("status") == "complete" and unwatched:
                why = "is complete but measured nothing (--monitor none), so it has no table."
            raise AnisoscopeError(f"run {str(self.path)!r} {why}")
        try:
            foreign = set(pq.read_schema(path).names) ^ set(SCHEMA.names)
            if foreign:
                verb = "has no" if (name := min(foreign)) in SCHEMA.names else "has a foreign"
                raise ValueError(f"it {verb} column {name!r}")
            return Table(Table.read(path).arrow, about)
        except (OSError, ValueError, TypeError) as error:
            raise AnisoscopeError(f"{str(path)!r} is not a readable table ({error}); run again.") from error

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


# -- one writer at a time ----------------------------------------------------------------------------------------------

BEAT = 20.0  # seconds between signs of life of a writer
SILENT = 600.0  # seconds without one after which a writer on another machine counts as gone
_COMMAND = 120  # characters of a command that a sentence shows


class _Held:
    """The locks of this process: how many of its objects share each, by folder; and the thread that shows it alive."""

    counts: ClassVar[dict[Path, int]] = {}
    process: ClassVar[int] = 0  # a forked child holds none of its parent's
    change: ClassVar[threading.RLock] = threading.RLock()
    thread: ClassVar[threading.Thread | None] = None

    @classmethod
    def of_this_process(cls) -> dict[Path, int]:
        if cls.process != os.getpid():
            cls.process, cls.thread = os.getpid(), None
            cls.counts.clear()
        return cls.counts

    @classmethod
    def beat(cls) -> None:
        """Begin to touch every lock from time to time, in a thread of its own."""

        def live(pause: threading.Event) -> None:
            while not pause.wait(BEAT):
                for folder in tuple(cls.counts):
                    with contextlib.suppress(OSError):
                        os.utime(folder / LOCK)

        if cls.thread is None:
            cls.thread = threading.Thread(target=live, args=(threading.Event(),), name="anisoscope-lock", daemon=True)
            cls.thread.start()


class WriterLock:
    """The right of this process to write into a run folder, until `release` or the end of the process.

    Everything in one process shares it. Another process that writes is told of by an error; a lock whose process is
    gone – none of that number, or one that began at another time; on another machine, one without a sign of life for
    ten minutes – is taken over, which `note` tells.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.note = folder.resolve(), ""
        with _Held.change:
            held = _Held.of_this_process()
            if self.folder not in held:
                self.note = _claim(self.folder)
            held[self.folder] = held.get(self.folder, 0) + 1
            _Held.beat()
        self.release = weakref.finalize(self, _release, self.folder, os.getpid())

    def renew(self) -> bool:
        """Take the lock again if it was deleted, such as with its folder; whether that was so."""
        if _is_mine(_owner(self.folder)):
            return False
        _claim(self.folder)
        return True


def refuse_other_writer(folder: Path) -> None:
    """Raise an error if another process is writing into a folder."""
    owner = _owner(folder)
    if owner is not None and not _is_mine(owner) and not _gone(owner, folder):
        raise _occupied(owner, folder)


def _this_process() -> dict[str, Any]:
    return _identity(os.getpid())


@functools.cache
def _identity(pid: int) -> dict[str, Any]:
    """What tells this process from every other: its number alone may be given again, on this machine or another."""
    try:
        space = os.readlink("/proc/self/ns/pid")  # containers have numbers of their own
    except OSError:
        space = ""
    return {"pid": pid, "host": platform.node(), "space": space, "began": _began(pid)}


def _began(pid: int) -> float | None:
    """When a process began, in seconds; None if there is none, or it has ended and nobody asked for how."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time(), 2)
    except psutil.NoSuchProcess:
        return None


def _owner(folder: Path) -> dict[str, Any] | None:
    """Who wrote the lock of a folder; empty if that cannot be read, None if there is no lock."""
    return _read_owner(folder / LOCK)


def _read_owner(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):
        return {}


def _is_mine(owner: Mapping[str, Any] | None) -> bool:
    mine = _this_process()
    return owner is not None and all(owner.get(name) == mine[name] for name in mine)


def _gone(owner: Mapping[str, Any], folder: Path) -> str:
    """Why the writer that holds a lock counts as gone; empty if it is there."""
    mine = _this_process()
    if (owner.get("host"), owner.get("space")) == (mine["host"], mine["space"]) and isinstance(owner.get("pid"), int):
        began = _began(owner["pid"])
        same = began is not None and abs(began - float(owner.get("began") or 0)) < 2.0
        return "" if same else "its process is gone"
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as now:  # by the clock of the folder's disk
        silent = os.fstat(now.fileno()).st_mtime - (folder / LOCK).stat().st_mtime
        return "" if silent < SILENT else f"no sign of life for {silent / 60:.0f} minutes"
    return ""


def _occupied(owner: Mapping[str, Any], folder: Path) -> AnisoscopeError:
    return AnisoscopeError(
        f"run folder {str(folder)!r} is being written by {_words(owner)}; wait until it ends or stop it, or give "
        "another folder."
    )


def _words(owner: Mapping[str, Any]) -> str:
    """A writer in words.

    >>> _words({"pid": 7, "host": "here", "command": "anisoscope train", "since": "2026-01-01T10:00:00"})
    "process 7 on here ('anisoscope train') since 2026-01-01T10:00:00"
    """
    if not owner:
        return f"somebody else (its {LOCK} cannot be read)"
    told = f"process {owner.get('pid')} on {owner.get('host')} ({str(owner.get('command'))[:_COMMAND]!r})"
    return f"{told} since {owner.get('since')}"


def _claim(folder: Path) -> str:
    """Write the lock of a folder; returns a note where one that was left behind had to be taken over."""
    path, since = folder / LOCK, datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv else ""
    mine = json.dumps({**_this_process(), "command": command, "since": since})
    note = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for _ in range(8):
            if _created(path, mine):
                return note
            owner = _owner(folder)
            if owner is None:  # just released
                continue
            if not (why := _gone(owner, folder)):
                raise _occupied(owner, folder)
            if _put_aside(path, owner):
                note = f"the lock of {_words(owner)} was taken over: {why}"
    except OSError as error:
        why = error.strerror or str(error)
        raise AnisoscopeError(f"run folder {str(folder)!r} cannot be written ({why}); give another.") from error
    raise AnisoscopeError(f"several processes want to write into {str(folder)!r}; give each a folder of its own.")


def _put_aside(path: Path, owner: Mapping[str, Any]) -> bool:
    """Delete the lock of a writer that is gone; False if somebody else was quicker and it is theirs now."""
    aside = path.with_name(f".{LOCK}.{os.getpid()}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return False
    found = _read_owner(aside)
    if found != owner:
        aside.replace(path)
        return False
    aside.unlink()
    return True


def _created(path: Path, text: str) -> bool:
    """Make a file with its content in one step, unless it exists."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        beside.write_text(text, encoding="utf-8")
        try:
            os.link(beside, path)
        except FileExistsError:
            return False
        except (OSError, NotImplementedError):  # a file system without links
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        return True
    except FileExistsError:
        return False
    finally:
        beside.unlink(missing_ok=True)


def _release(folder: Path, process: int) -> None:
    """Give up one share of a lock; the last one removes it."""
    with _Held.change:
        held = _Held.of_this_process()
        if process != os.getpid() or folder not in held:
            return
        held[folder] -= 1
        if held[folder] <= 0:
            del held[folder]
            with contextlib.suppress(OSError):
                if _is_mine(_owner(folder)):
                    (folder / LOCK).unlink()


@contextlib.contextmanager
def writing(folder: Path, note: Callable[[str], None] | None = None) -> Iterator[None]:
    """Around everything that a command writes into a run folder; `note` is told what was taken over."""
    lock = WriterLock(folder)
    if lock.note and note is not None:
        note(lock.note)
    try:
        yield
    finally:
        lock.release()


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
