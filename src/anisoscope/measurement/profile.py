"""`anisoscope profile`: models in, a run folder out; every finished piece is on disk before the next begins."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from anisoscope.capture.sites.site import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement import memory
from anisoscope.measurement.bank import Bank
from anisoscope.measurement.config import ProfileConfig as ProfileConfig
from anisoscope.measurement.evaluation import Progress, Records, evaluate_bank, row_counts, row_notes
from anisoscope.measurement.inspection import Entry
from anisoscope.measurement.measure import feed_rows
from anisoscope.measurement.passes import ModelPasses, save_arrays
from anisoscope.measurement.site_plan import Setup, applies, make_plan, prepare
from anisoscope.metrics.catalogue import parse_requests
from anisoscope.metrics.engine.metric import Request
from anisoscope.models.load import load_model
from anisoscope.models.source import load_rows, parse_model
from anisoscope.results.folder import RunFolder, slug
from anisoscope.results.manifest import new_manifest
from anisoscope.results.table import Table

LONGEST = 100  # letters of a model in the names of its files, which have a limit of their own
LOADING = ("random_init", "device", "dtype", "seed", "trust_remote_code", "tokenizer", "device_map")


@dataclass
class Profiler:
    """One run of `profile`."""

    config: ProfileConfig
    folder: RunFolder
    command: Sequence[str] = ()
    progress: Progress | None = None
    about: dict[str, Any] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    peak: memory.PeakMemory = field(default_factory=memory.PeakMemory)
    started: float = field(default_factory=time.monotonic)
    estimate: str = ""  # what the model under way will need, in words

    def run(self) -> Table:
        """Measure every model; what is finished survives whatever happens to the rest."""
        old = self.folder.about()
        if old.get("status") == "complete":  # resumed, but there is nothing left to do
            self.about, self.tables = old, [self.folder.table()]
            return self.tables[0]
        requests = parse_requests(self.config.metrics)
        for spec in self.config.models:  # a misspelt second model is known before the first is measured
            parse_model(spec, random_init=self.config.random_init)
        self._begin()
        try:
            for number, spec in enumerate(self.config.models):
                self._model(f"{number}-{slug(spec)[:LONGEST]}", spec, requests)
        except BaseException as error:
            self._finish("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", error)
            raise
        self._finish("complete")
        self.folder.tidy()
        return Table(Table.concat(self.tables).arrow, self.about)

    def _begin(self) -> None:
        old = self.folder.about()
        self.about = new_manifest(asdict(self.config), command=self.command, seed=self.config.seed, old=old)
        self.about["wall_seconds"] = 0.0
        self._before = float(old.get("wall_seconds", 0.0))
        self._known = {model["key"]: model for model in old.get("models", []) if "key" in model}
        self.folder.write_about(self.about)

    def _finish(self, status: str, error: BaseException | None = None) -> None:
        self.about["status"] = status
        if error is not None and str(error):
            self.about["error"] = str(error).splitlines()[0]
        self.about["wall_seconds"] = round(self._before + time.monotonic() - self.started, 2)
        self.about["peak_memory_mb"] = round(self.peak.look() / memory.MIB)
        if torch.cuda.is_available():
            self.about["peak_cuda_memory_mb"] = round(torch.cuda.max_memory_allocated() / memory.MIB)
        if self.tables:
            self.folder.write_table(Table.concat(self.tables))
        self.folder.write_about(self.about)

    def _model(self, key: str, spec: str, requests: list[Request]) -> None:
        done = self.folder.part(key)
        if done is not None and key in self._known:  # finished before an interruption
            self.tables.append(done)
            self._describe(self._known[key])
            return
        if parse_model(spec, random_init=self.config.random_init).kind == "rows":
            records, entry = self._rows_file(key, spec, requests)
        else:
            records, entry = self._network(key, spec, requests)
        self.folder.write_part(key, self._add(records, entry))
        self.folder.write_table(Table.concat(self.tables))
        self.folder.write_about(self.about)
        self.folder.drop_partial(key)

    def _add(self, records: Records, entry: Entry) -> Table:
        same = sum(entry["name"] == model.get("alike", model["name"]) for model in self.about["models"])
        if same:  # two models of one name must stay two models in the table
            entry["alike"], entry["name"] = entry["name"], f"{entry['name']} ({same + 1})"
        columns = {"run": self.folder.path.name, "model": entry["name"], "revision": entry.get("revision", "")}
        columns |= {"data": entry.get("data", {}).get("name", ""), "seed": self.config.seed}
        table = Table.from_records({**columns, **record} for record in records)
        self.tables.append(table)
        self._describe(entry)
        return table

    def _describe(self, entry: Entry) -> None:
        self.about["models"].append(entry)
        self.about["device"] = entry.get("device", "cpu")
        if entry.get("data"):
            self.about["data"] = entry["data"]
        self.about["warnings"] += [f"{entry['name']}: {note}" for note in entry.get("notes", [])]
        self.about["memory_estimate_mb"] = max(
            self.about.get("memory_estimate_mb", 0), entry.get("memory_estimate_mb", 0)
        )

    def _rows_file(self, key: str, spec: str, requests: list[Request]) -> tuple[Records, Entry]:
        arrays = load_rows(spec)
        if not any(applies(request, "rows") for request in requests):
            words = ", ".join(request.metric.name for request in requests)
            raise AnisoscopeError(f"none of the metrics asked for ({words}) is measured on rows of a file.")
        c = self.config
        plan = make_plan(requests, ["rows"], seed=c.seed, sample_size=c.sample_size, attention_rows=c.attention_rows)
        bank = Bank(plan)
        for number, (name, rows) in enumerate(arrays.items()):
            feed_rows(bank, Site(number, "rows", name=name), rows)
            self._tell("rows", number + 1, len(arrays))
        setup = Setup(None, [], [], ["rows"], {"single": max(1, len(arrays) - 1)})
        records = evaluate_bank(bank, requests, setup, progress=self.progress)
        save_arrays(self.folder, key, bank)
        width = next(iter(arrays.values())).shape[1]
        entry = {"key": key, "name": Path(spec).name, "type": "rows", "width": int(width), "layers": len(arrays)}
        return records, entry | row_counts(bank) | {"notes": row_notes(bank)}

    def _network(self, key: str, spec: str, requests: list[Request]) -> tuple[Records, Entry]:
        c = self.config
        self._tell("load", 0, 1)
        loaded = load_model(spec, **{name: getattr(c, name) for name in LOADING})
        self._tell("load", 1, 1)
        setup = prepare(
            loaded.model, requests, sites=c.sites or None, layers=c.layers or None, modules=c.modules or None
        )

        def keep(records: Records, entry: Entry) -> None:
            self._add(records, {**entry, "key": "", "partial": True})

        passes = ModelPasses(loaded, setup, requests, c, self.folder, key, self._tell, keep)
        return passes.run(announce=self._announce, reached=self.peak.look)

    def _announce(self, words: str) -> None:
        self.estimate = words

    def _tell(self, what: str, done: int, total: int) -> None:
        self.peak.look()
        if self.progress is not None:
            self.progress(what, done, total)
