"""The passes of one model over its data: as few as fit into memory, saved on the way, resumable."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from anisoscope.capture.rows.row import Batch, Rows, Scores, Sink
from anisoscope.capture.sites.site import Site
from anisoscope.measurement import memory
from anisoscope.measurement.bank import Bank, Plan, load_bank, save_bank
from anisoscope.measurement.evaluation import evaluate_bank
from anisoscope.measurement.feed.feed import Feed, fitting, make_feed
from anisoscope.measurement.inspection import check_sites, describe, plan_passes
from anisoscope.measurement.measure import ATTENTION_KINDS, Setup, feed_tables, make_plan
from anisoscope.measurement.remarks import remarks, rows_read, rows_seen
from anisoscope.measurement.selection import mean_spectrum
from anisoscope.metrics.engine.metric import HEAD_KINDS, Request
from anisoscope.numerics.hashing import row_hash
from anisoscope.results.folder import RunFolder, replace_file
from anisoscope.results.table import Table

if TYPE_CHECKING:
    from anisoscope.measurement.profile import ProfileConfig
    from anisoscope.models.load import Loaded


# Every row of every site on disk, streamed: raw while the run goes on, safetensors when it is done.


_NAMES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}


@dataclass
class Tee:
    """Hands everything to several sinks."""

    sinks: list[Sink]

    def rows(self, rows: Rows) -> None:
        for sink in self.sinks:
            sink.rows(rows)

    def scores(self, scores: Scores) -> None:
        for sink in self.sinks:
            sink.scores(scores)


@dataclass
class RowWriter:
    """Appends rows and their keys to one pair of raw files per site; `finish` turns each into a safetensors file.

    Each file holds `rows` (n×d, or n×H×d) and `context`, `position`, `token`, `hash` (n).
    """

    folder: Path
    counts: dict[str, int] = field(default_factory=dict)  # rows written, by site
    shapes: dict[str, list[int]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    def rows(self, rows: Rows) -> None:
        name = str(rows.site)
        x = rows.x.detach().cpu()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.shapes[name], self.kinds[name] = list(x.shape[1:]), _NAMES[x.dtype]
        index = rows.index
        keys = torch.stack([index.context, index.position, index.token, row_hash(index.context, index.position)]).cpu()
        fresh = name not in self.counts  # what a run that died left behind must not come before the first rows
        self._append(self._raw(name, "rows"), x, fresh=fresh)
        self._append(self._raw(name, "keys"), keys.T.contiguous(), fresh=fresh)
        self.counts[name] = self.counts.get(name, 0) + len(x)

    def scores(self, scores: Scores) -> None:
        """Scores are never kept."""

    def state(self) -> dict[str, dict[str, object]]:
        return {"counts": dict(self.counts), "shapes": dict(self.shapes), "kinds": dict(self.kinds)}

    @classmethod
    def resume(cls, folder: Path, state: dict[str, dict]) -> RowWriter:
        """Go on after an interruption: rows written after the last save are cut off."""
        out = cls(folder, dict(state["counts"]), dict(state["shapes"]), dict(state["kinds"]))
        for name, count in out.counts.items():
            item = {"F32": 4, "F64": 8}[out.kinds[name]]
            for part, width in (("rows", item * int(np.prod(out.shapes[name]))), ("keys", 32)):
                with out._raw(name, part).open("r+b") as file:
                    file.truncate(count * width)
        return out

    def finish(self) -> None:
        for name in self.counts:
            replace_file(self.folder / f"{name}.safetensors", partial(self._write, name=name))
        for name in self.counts:
            for part in ("rows", "keys"):
                self._raw(name, part).unlink()

    def _raw(self, name: str, part: str) -> Path:
        return self.folder / f".{name}.{part}.raw"

    @staticmethod
    def _append(path: Path, tensor: Tensor, *, fresh: bool) -> None:
        with path.open("wb" if fresh else "ab") as file:
            file.write(tensor.contiguous().numpy().tobytes())

    def _write(self, path: Path, name: str) -> None:
        """One safetensors file: an 8-byte length, a JSON header, then the rows as they are and the four keys."""
        n = self.counts[name]
        size = self._raw(name, "rows").stat().st_size
        header = {"rows": {"dtype": self.kinds[name], "shape": [n, *self.shapes[name]], "data_offsets": [0, size]}}
        for number, key in enumerate(("context", "position", "token", "hash")):
            start = size + number * n * 8
            header[key] = {"dtype": "I64", "shape": [n], "data_offsets": [start, start + n * 8]}
        words = json.dumps(header).encode()
        words += b" " * (-len(words) % 8)
        keys = np.fromfile(self._raw(name, "keys"), dtype="<i8").reshape(n, 4)
        with path.open("wb") as out, self._raw(name, "rows").open("rb") as rows:
            out.write(struct.pack("<Q", len(words)) + words)
            shutil.copyfileobj(rows, out, 16 << 20)
            out.write(np.ascontiguousarray(keys.T).tobytes())


KEPT_ROWS = 1024  # sampled rows of each site that stay in the run folder, for CKA and comparisons
_SAVE_EVERY = 30.0  # seconds between saves of an unfinished pass, at least
_MANY_UNKNOWN = 0.1  # share of tokens without a word, above which the text is probably not the model's
_MOSTLY_UNKNOWN = 0.5  # above which the rows are mostly one token at different positions
Records = list[dict[str, Any]]
Tell = Callable[[str, int, int], None]


@dataclass
class _Pass:
    """One sweep over the data for some of the sites."""

    number: int
    sites: list[Site]
    done: int = 0  # batches
    clean: int = 0  # calls of the bank after the last whole batch: in between, some sites have seen more than others
    bank: Bank | None = None
    swept: bool = False  # all data was seen, metrics are being computed
    writer: RowWriter | None = None
    saved: float = field(default_factory=time.monotonic)
    cost: float = 0.0  # seconds that the last save took


def run_model(
    loaded: Loaded,
    setup: Setup,
    requests: Sequence[Request],
    *,
    config: ProfileConfig,
    folder: RunFolder,
    key: str,
    tell: Tell,
    announce: Callable[[str], None],
    keep: Callable[[Records, dict[str, Any]], Any],
    reached: Callable[[], int] = lambda: 0,
) -> tuple[Records, dict[str, Any]]:
    """Measure one model; `keep` is given what an interrupted pass had gathered, `reached` tells the memory so far."""
    config, idle = fitting(loaded, config)
    feed = make_feed(loaded, config, tell=tell)
    entry = describe(loaded, setup, key)
    entry["notes"] += idle
    plan, groups = _planned(loaded, setup, requests, feed=feed, entry=entry, announce=announce, reached=reached)
    run = _ModelRun(loaded, setup, requests, config, folder, key, feed, tell)
    records: Records = []
    for number, sites in enumerate(groups):
        done = folder.part(f"{key}.{number}")
        if done is not None:  # a pass that was finished before an interruption
            mine, found = [{k: v for k, v in row.items() if k != "schema"} for row in done.records()], done.about
        else:
            work = _Pass(number, sites)
            resume(work, folder, key, plan)
            try:
                mine, found = run.measure(work)
            except KeyboardInterrupt:
                records += _rescued(work, folder, key, requests, setup)
                if records:
                    keep(records, entry)
                raise
        records += mine
        entry |= _joined(entry, found)
    _conclude(entry, feed, setup)
    return records, entry


def _joined(entry: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """What a pass counted, together with what those before it did."""
    given = [n for n in (entry.get("given"), found.get("given")) if n is not None]
    together = {"row_count": max(entry["row_count"], found["row_count"]), "given": min(given, default=None)}
    return {**found, **together, "notes": [*entry["notes"], *found["notes"]]}


def _planned(
    loaded: Loaded,
    setup: Setup,
    requests: Sequence[Request],
    *,
    feed: Feed,
    entry: dict[str, Any],
    announce: Callable[[str], None],
    reached: Callable[[], int],
) -> tuple[Plan, list[list[Site]]]:
    """The statistics to gather and the sites of each pass, once the sites are proven."""
    c = feed.config
    sizes: dict[str, Any] = {"sample_size": c.sample_size, "attention_rows": c.attention_rows, "halves": c.halves}
    shapes = check_sites(loaded, setup, feed, entry)
    plan = make_plan(requests, setup.kinds, seed=c.seed, **sizes)
    groups, estimate = plan_passes(loaded, setup, plan, feed=feed, shapes=shapes, reached=reached())
    streams = [shape.width for site, shape in shapes.items() if shape.heads == 1 and site.kind not in ATTENTION_KINDS]
    entry["width"] = entry["width"] or max(streams, default=0)
    if heads := [shape.width for site, shape in shapes.items() if site.kind in HEAD_KINDS]:
        entry["head_width"] = max(heads)
    entry["memory_estimate_mb"] = round(estimate / memory.MIB)
    needed, free = entry["memory_estimate_mb"], memory.available() // memory.MIB
    announce(f"{loaded.name}: about {needed} MiB of memory in all, {free} MiB are free")
    if len(groups) > 1:
        entry["notes"].append(f"statistics of all sites would not fit into memory at once: {len(groups)} passes")
    return plan, groups


@dataclass(frozen=True)
class _ModelRun:
    """What every pass of one model shares."""

    loaded: Loaded
    setup: Setup
    requests: Sequence[Request]
    config: ProfileConfig
    folder: RunFolder
    key: str
    feed: Feed
    tell: Tell

    def measure(self, work: _Pass) -> tuple[Records, dict[str, Any]]:
        """The records of one pass and what it counted; on disk before they are returned."""
        _sweep(work, self)
        records = _evaluate(work, self.loaded, self.setup, self.requests, tell=self.tell)
        assert work.bank is not None
        number, key = work.number, f"{self.key}.{work.number}"
        save_arrays(self.folder, self.key if number == 0 else key, work.bank)
        if work.writer is not None:
            work.writer.finish()
        found = {**counts(work.bank), "given": rows_given(work.bank), "notes": remarks(work.bank)}
        self.folder.write_part(key, Table.from_records(records, found))
        self.folder.drop_partial(key)
        return records, found


def _conclude(entry: dict[str, Any], feed: Feed, setup: Setup) -> None:
    """What is known of the data once all of it was seen."""
    if not feed.fingerprint:  # every pass was finished before: the data is only counted
        for _ in feed.batches():
            pass
    given = entry.pop("given", None)
    if given is not None and feed.config.pool == "none":
        feed.recount(given)
    entry["data"] = feed.about()
    said = _unknown(feed)
    entry["dropped"] |= {"padding": feed.padding}
    if feed.config.special == "out":
        entry["dropped"] |= {"special": feed.special}
    entry["notes"] = list(dict.fromkeys([*said, *entry["notes"], *feed.notes(), *setup.notes]))


def _unknown(feed: Feed) -> list[str]:
    """What comes before all else where the text is not what the model reads."""
    share = feed.unknown / feed.tokens if feed.tokens else 0.0
    if share > _MOSTLY_UNKNOWN:
        return [
            f"WRONG TEXT: its tokenizer has no word for {share:.0%} of the tokens, so these numbers describe the "
            "unknown token and not a text; give what the model was made for with --data"
        ]
    if share > _MANY_UNKNOWN:
        return [f"the tokenizer has no word for {share:.0%} of the tokens: is this the right text?"]
    return []


def _evaluate(work: _Pass, loaded: Loaded, setup: Setup, requests: Sequence[Request], *, tell: Tell) -> Records:
    """The records of a pass that has seen all its data."""
    assert work.bank is not None
    if work.number == 0:
        feed_tables(work.bank, loaded.model, setup.tables, depth=setup.depth("single"))
    work.clean, work.swept = work.bank.calls, True
    return evaluate_bank(work.bank, requests, setup, progress=tell)


def _rescued(work: _Pass, folder: RunFolder, key: str, requests: Sequence[Request], setup: Setup) -> Records:
    """Save what an interrupted pass had gathered; and its records so far, unless they were just being computed."""
    if not work.done or work.bank is None or work.bank.calls != work.clean:
        return []
    _save(work, folder, key)
    if work.swept:
        return []
    note = f"interrupted after {work.done} batches"
    partial = evaluate_bank(work.bank, requests, setup)
    return [{**row, "note": f"{note}; {row['note']}".rstrip("; ")} for row in partial]


def resume(work: _Pass, folder: RunFolder, key: str, plan: Any) -> None:
    """Take up what an interrupted pass had gathered, if there is any."""
    found = load_bank(folder.partial_path(f"{key}.{work.number}"), plan)
    if found is None:
        work.bank = Bank(plan)
        return
    bank, progress = found
    if progress.get("writer"):
        try:
            work.writer = RowWriter.resume(folder.path / "rows" / key, progress["writer"])
        except FileNotFoundError:  # its rows are gone, so the pass begins again
            work.bank = Bank(plan)
            return
    work.bank, work.done = bank, progress["batches"]


def _sweep(work: _Pass, run: _ModelRun) -> None:
    from anisoscope.capture.capture import Capture

    config, setup = run.config, run.setup
    if not work.sites and not config.modules:
        return
    if config.save_rows and work.writer is None:
        work.writer = RowWriter(run.folder.path / "rows" / run.key)
    assert work.bank is not None
    sink = Tee([work.bank, work.writer]) if work.writer is not None else work.bank
    options: dict[str, Any] = {
        "special": config.special,
        "first": config.first,
        "pool": config.pool,
        "modules": config.modules or None,
    }
    rest = _remaining(run.feed, work)
    first = next(rest, None)
    if first is None:  # an interrupted pass may have seen everything already
        return
    with Capture(run.loaded.model, work.sites, sink, layout=setup.layout, **options) as capture:
        for seen, batch in chain([first], rest):
            with _whole(work):
                capture.run(batch)
            run.tell("forward", min(seen, config.tokens), config.tokens)
            _save_if_due(work, run.folder, run.key)
    setup.notes += [note for note in capture.notes if note not in setup.notes]
    run.tell("forward", config.tokens, config.tokens)


@contextlib.contextmanager
def _whole(work: _Pass) -> Iterator[None]:
    """One batch: a signal waits until every site has seen it (a second one does not)."""
    pressed: list[int] = []

    def wait(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    assert work.bank is not None
    held = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, wait) for number in held}
    work.clean = work.bank.calls
    try:
        yield
        work.done, work.clean = work.done + 1, work.bank.calls
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
    if pressed:
        signal.raise_signal(pressed[0])


def _remaining(feed: Feed, work: _Pass) -> Iterator[tuple[int, Batch]]:
    """Rows seen so far and the batch, for the batches that are still to do."""
    seen, done = 0, work.done
    for number, batch in enumerate(feed.batches()):
        seen += feed.seen(batch)
        if number >= done:
            yield seen, batch


def _save_if_due(work: _Pass, folder: RunFolder, key: str) -> None:
    """Save every half minute, but never spend more than a twentieth of the time on it."""
    if time.monotonic() - work.saved > max(_SAVE_EVERY, 20.0 * work.cost):
        _save(work, folder, key)


def _save(work: _Pass, folder: RunFolder, key: str) -> None:
    start = time.monotonic()
    assert work.bank is not None
    progress = {"batches": work.done, "writer": work.writer.state() if work.writer is not None else None}
    save_bank(folder.partial_path(f"{key}.{work.number}"), work.bank, progress)
    work.saved = time.monotonic()
    work.cost = work.saved - start


def save_arrays(folder: RunFolder, key: str, bank: Bank) -> None:
    """Spectra, and the sampled rows with the smallest hashes together with their keys."""
    arrays: dict[str, torch.Tensor] = {}
    for site, stats in bank.sites.items():
        spectrum = mean_spectrum(stats)
        if spectrum is not None:
            arrays[f"{site}/spectrum"] = spectrum
        if stats.sample is not None and len(stats.sample) and not stats.heads:
            arrays[f"{site}/rows"] = stats.sample.rows[:KEPT_ROWS].float()
            arrays[f"{site}/keys"] = stats.sample.label("hash")[:KEPT_ROWS]
    folder.write_arrays(key, {name: array.detach().cpu().numpy() for name, array in arrays.items()})


def counts(bank: Bank) -> dict[str, Any]:
    """How many contexts the sites saw, and what was dropped."""
    plain = [stats for stats in bank.sites.values() if not stats.heads] or list(bank.sites.values())
    dropped = {"non_finite": max((s.non_finite for s in plain), default=0)}
    contexts = max((sum(s.contexts.values()) for s in plain), default=0)
    return {"row_count": rows_read(bank), "contexts": contexts, "dropped": dropped}


def rows_given(bank: Bank) -> int | None:
    """Rows of the data where the first stack has the fewest, finite or not; None where no such site was looked at."""
    found = [stats for site, stats in bank.sites.items() if site.kind in memory.COUNTED and site.stack != "decoder"]
    return min((rows_seen(stats) + stats.non_finite for stats in found), default=None)
