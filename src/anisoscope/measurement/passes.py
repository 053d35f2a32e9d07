"""The passes of one model over its data: as few as fit into memory, saved on the way, resumable.

A pass streams the rows of some sites into a bank, batch by batch, and evaluates the metrics of the bank.
"""

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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anisoscope.capture.rows.row import Batch, Rows, Scores
from anisoscope.capture.sites.site import Site
from anisoscope.measurement import memory
from anisoscope.measurement.bank import Bank, Plan, load_bank, save_bank
from anisoscope.measurement.config import ProfileConfig
from anisoscope.measurement.evaluation import (
    Records,
    evaluate_bank,
    mean_spectrum,
    row_counts,
    row_notes,
    rows_given,
)
from anisoscope.measurement.feed import Feed, Tell, fitting, make_feed
from anisoscope.measurement.inspection import Entry, check_sites, describe, plan_passes
from anisoscope.measurement.measure import capture_batches, feed_tables, joined_sinks
from anisoscope.measurement.site_plan import ATTENTION_KINDS, Setup, make_plan
from anisoscope.metrics.engine.metric import HEAD_KINDS, Request
from anisoscope.models.load import Loaded
from anisoscope.numerics.hashing import row_hash
from anisoscope.results.folder import RunFolder, replace_file
from anisoscope.results.table import Table

# Every row of every site on disk (`--save-rows`): raw while the run goes on, safetensors when it is done.


_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}


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
        self.shapes[name], self.kinds[name] = list(x.shape[1:]), _DTYPES[x.dtype]
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


@dataclass
class _Pass:
    """One pass over the data for some of the sites."""

    number: int
    sites: list[Site]
    bank: Bank
    done: int = 0  # batches
    seen: int = 0  # rows of these
    clean: int = 0  # calls of the bank after the last whole batch: in between, some sites have seen more than others
    complete: bool = False  # all data was seen, metrics are being computed
    writer: RowWriter | None = None
    saved: float = field(default_factory=time.monotonic)
    cost: float = 0.0  # seconds that the last save took


@dataclass
class ModelPasses:
    """All passes of one model; `keep` is given what an interrupted pass had gathered."""

    loaded: Loaded
    setup: Setup
    requests: Sequence[Request]
    config: ProfileConfig
    folder: RunFolder
    key: str
    tell: Tell
    keep: Callable[[Records, Entry], Any]
    feed: Feed = field(init=False)
    entry: Entry = field(init=False)

    def run(self, *, announce: Callable[[str], None], reached: Callable[[], int]) -> tuple[Records, Entry]:
        """The records and the entry of the model; `reached` gives the most memory that was held so far."""
        self.config, idle = fitting(self.loaded, self.config)
        self.feed = make_feed(self.loaded, self.config, tell=self.tell)
        self.entry = describe(self.loaded, self.setup, self.key)
        self.entry["notes"] += idle
        plan, groups = self._plan(announce, reached)
        records: Records = []
        for number, sites in enumerate(groups):
            done = self.folder.part(f"{self.key}.{number}")
            if done is not None:  # a pass that was finished before an interruption
                mine, found = [{k: v for k, v in row.items() if k != "schema"} for row in done.records()], done.about
            else:
                mine, found = self._measure(self._resumed(number, sites, plan), records)
            records += mine
            self._join(found)
        self._conclude()
        return records, self.entry

    def _plan(self, announce: Callable[[str], None], reached: Callable[[], int]) -> tuple[Plan, list[list[Site]]]:
        """The statistics to gather and the sites of each pass, once the sites are verified."""
        c, entry = self.config, self.entry
        shapes = check_sites(self.loaded, self.setup, self.feed, entry)
        sizes: dict[str, Any] = {"sample_size": c.sample_size, "attention_rows": c.attention_rows, "halves": c.halves}
        plan = make_plan(self.requests, self.setup.kinds, seed=c.seed, **sizes)
        groups, estimate = plan_passes(self.loaded, self.setup, plan, feed=self.feed, shapes=shapes, reached=reached())
        streams = [s.width for site, s in shapes.items() if s.heads == 1 and site.kind not in ATTENTION_KINDS]
        entry["width"] = entry["width"] or max(streams, default=0)
        if heads := [shape.width for site, shape in shapes.items() if site.kind in HEAD_KINDS]:
            entry["head_width"] = max(heads)
        entry["memory_estimate_mb"] = round(estimate / memory.MIB)
        free = memory.available() // memory.MIB
        announce(f"{self.loaded.name}: about {entry['memory_estimate_mb']} MiB of memory in all, {free} MiB are free")
        if len(groups) > 1:
            entry["notes"].append(f"statistics of all sites would not fit into memory at once: {len(groups)} passes")
        return plan, groups

    def _join(self, found: dict[str, Any]) -> None:
        """What a pass counted, together with what those before it did."""
        entry = self.entry
        given = [n for n in (entry.get("given"), found.get("given")) if n is not None]
        together = {"row_count": max(entry["row_count"], found["row_count"]), "given": min(given, default=None)}
        entry |= {**found, **together, "notes": [*entry["notes"], *found["notes"]]}

    def _conclude(self) -> None:
        """What is known of the data once all of it was seen."""
        feed, entry = self.feed, self.entry
        if not feed.fingerprint:  # every pass was finished before: the data is only counted
            for _ in feed.batches():
                pass
        given = entry.pop("given", None)
        if given is not None and self.config.pool == "none":
            feed.recount(given)
        entry["data"] = feed.about()
        entry["dropped"] |= {"padding": feed.padding}
        if self.config.special == "out":
            entry["dropped"] |= {"special": feed.special}
        notes = [*_unknown_notes(feed), *entry["notes"], *feed.notes(), *self.setup.notes]
        entry["notes"] = list(dict.fromkeys(notes))

    # one pass

    def _measure(self, work: _Pass, before: Records) -> tuple[Records, dict[str, Any]]:
        """The records of one pass and what it counted, on disk; an interrupted one is saved, and kept so far."""
        try:
            self._capture(work)
            if work.number == 0:
                feed_tables(work.bank, self.loaded.model, self.setup.tables, depth=self.setup.depth("single"))
            work.clean, work.complete = work.bank.calls, True
            records = evaluate_bank(work.bank, self.requests, self.setup, progress=self.tell)
            return records, self._write(work, records)
        except KeyboardInterrupt:
            if found := [*before, *self._rescued(work)]:
                self.keep(found, self.entry)
            raise

    def _capture(self, work: _Pass) -> None:
        """Stream the rows of the pass into its bank, and to disk where all rows are to be saved."""
        c = self.config
        if not work.sites and not c.modules:
            return
        if c.save_rows and work.writer is None:
            work.writer = RowWriter(self.folder.path / "rows" / self.key)
        rest = self._remaining(work)
        first = next(rest, None)
        if first is None:  # an interrupted pass may have seen everything already
            return

        def after(*_: Any) -> None:
            self.tell("forward", min(work.seen, c.tokens), c.tokens)
            self._save_if_due(work)

        sink = joined_sinks(work.bank, work.writer)
        assert sink is not None
        options: dict[str, Any] = {"special": c.special, "first": c.first, "pool": c.pool, "modules": c.modules or None}
        options |= {"around": lambda _: _whole_batch(work), "after": after}
        capture_batches(self.loaded.model, self.setup, work.sites, sink, chain([first], rest), **options)
        self.tell("forward", c.tokens, c.tokens)

    def _remaining(self, work: _Pass) -> Iterator[Batch]:
        """The batches that are still to do."""
        done = work.done
        for number, batch in enumerate(self.feed.batches()):
            work.seen += self.feed.seen(batch)
            if number >= done:
                yield batch

    def _write(self, work: _Pass, records: Records) -> dict[str, Any]:
        key = f"{self.key}.{work.number}"
        save_arrays(self.folder, self.key if work.number == 0 else key, work.bank)
        if work.writer is not None:
            work.writer.finish()
        found = {**row_counts(work.bank), "given": rows_given(work.bank), "notes": row_notes(work.bank)}
        self.folder.write_part(key, Table.from_records(records, found))
        self.folder.drop_partial(key)
        return found

    # interruptions

    def _resumed(self, number: int, sites: list[Site], plan: Plan) -> _Pass:
        """A pass with what it had gathered before an interruption, if there is any."""
        found = load_bank(self._partial(number), plan)
        if found is None:
            return _Pass(number, sites, Bank(plan))
        bank, progress = found
        writer = None
        if progress.get("writer"):
            try:
                writer = RowWriter.resume(self.folder.path / "rows" / self.key, progress["writer"])
            except FileNotFoundError:  # its rows are gone, so the pass begins again
                return _Pass(number, sites, Bank(plan))
        return _Pass(number, sites, bank, done=progress["batches"], writer=writer)

    def _partial(self, number: int) -> Path:
        return self.folder.partial_path(f"{self.key}.{number}")

    def _rescued(self, work: _Pass) -> Records:
        """Save what an interrupted pass had gathered; its records so far, unless they were just being computed."""
        if not work.done or work.bank.calls != work.clean:
            return []
        self._save(work)
        if work.complete:
            return []
        note = f"interrupted after {work.done} batches"
        records = evaluate_bank(work.bank, self.requests, self.setup)
        return [{**row, "note": f"{note}; {row['note']}".rstrip("; ")} for row in records]

    def _save_if_due(self, work: _Pass) -> None:
        """Save every half minute, but never spend more than a twentieth of the time on it."""
        if time.monotonic() - work.saved > max(_SAVE_EVERY, 20.0 * work.cost):
            self._save(work)

    def _save(self, work: _Pass) -> None:
        start = time.monotonic()
        progress = {"batches": work.done, "writer": work.writer.state() if work.writer is not None else None}
        save_bank(self._partial(work.number), work.bank, progress)
        work.saved = time.monotonic()
        work.cost = work.saved - start


@contextlib.contextmanager
def _whole_batch(work: _Pass) -> Iterator[None]:
    """Around one batch: a signal waits until every site has seen it (a second one does not)."""
    pressed: list[int] = []

    def wait(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

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


def _unknown_notes(feed: Feed) -> list[str]:
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


def save_arrays(folder: RunFolder, key: str, bank: Bank) -> None:
    """Spectra, and the sampled rows with the smallest hashes together with their keys."""
    arrays: dict[str, Tensor] = {}
    for site, stats in bank.sites.items():
        spectrum = mean_spectrum(stats)
        if spectrum is not None:
            arrays[f"{site}/spectrum"] = spectrum
        if stats.sample is not None and len(stats.sample) and not stats.heads:
            arrays[f"{site}/rows"] = stats.sample.rows[:KEPT_ROWS].float()
            arrays[f"{site}/keys"] = stats.sample.label("hash")[:KEPT_ROWS]
    folder.write_arrays(key, {name: array.detach().cpu().numpy() for name, array in arrays.items()})
