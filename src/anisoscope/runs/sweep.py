"""`anisoscope tangent` and `anisoscope sweep`: the same instruments on models that are given, not trained here."""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anisoscope.capture.layout import find_layout
from anisoscope.capture.rows import Batch
from anisoscope.data.masking import mask_batch
from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.metrics.metric import parse_requests
from anisoscope.metrics.tangent import check_rank
from anisoscope.runs.feed import Feed, context_length
from anisoscope.runs.instruments import Instruments, make_probe
from anisoscope.runs.measure import prepare
from anisoscope.runs.monitor import KINDS
from anisoscope.runs.monitor_store import MonitorStore
from anisoscope.runs.opening import opening
from anisoscope.runs.plan import GEOMETRY, PLANS, TangentPlan
from anisoscope.runs.series import (
    Checkpoint,
    find_series,
    flags,
    refuse_lossless,
    refuse_training_run,
    tokenizer_fingerprint,
)
from anisoscope.runs.store import RunFolder
from anisoscope.runs.table import Table
from anisoscope.runs.tables import EmbeddingWatch
from anisoscope.runs.tangent import TangentStudy

Progress = Callable[[str, int, int], None]
COUNTED = 2_000_000  # tokens of the data that frequencies are counted on
MISSING, LEFT_OUT = (
    "missing: ",
    " was left out: ",
)  # of a checkpoint that cannot be loaded: tried again when an interrupted sweep goes on
LOADING = ("random_init", "device", "dtype", "seed", "trust_remote_code", "tokenizer")


@dataclass(frozen=True)
class SweepConfig:
    """What to look at, and with what; a tangent study of one model is a sweep of one."""

    model: str
    revisions: tuple[str, ...] = ()
    series: bool = True
    data: str = "embedded"
    text_field: str = "text"
    tokens: int = 32_768
    context: int | None = None
    batch_size: int = 8
    preset: str = "standard"
    metrics: tuple[str, ...] = ()
    rank: int | None = None
    draws: int = 999
    layers: tuple[int, ...] = ()
    tokenizer: str | None = None
    random_init: bool = False
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    seed: int = 0
    # what the profile's feed also reads
    group_by: str | None = None

    def __post_init__(self) -> None:
        if self.preset not in PLANS:
            raise unknown_name("preset", self.preset, PLANS)
        for name, least in {"tokens": 64, "batch_size": 1, "draws": 19, "seed": 0}.items():
            if getattr(self, name) < least:
                raise AnisoscopeError(f"{name} is {getattr(self, name)}; expected at least {least}.")
        parse_requests(self.metrics)
        if not self.series:
            refuse_training_run(self.model)

    @property
    def plan(self) -> TangentPlan:
        return replace(PLANS[self.preset], rank=self.rank, draws=self.draws, seed=self.seed)


@dataclass
class Sweeper:
    """One run over a series of checkpoints."""

    config: SweepConfig
    folder: RunFolder
    command: Sequence[str] = ()
    progress: Progress | None = None
    resume: bool = False
    about: dict[str, Any] = field(default_factory=dict)
    study: TangentStudy | None = None
    counts: Tensor | None = None
    table_before: tuple[int, Tensor] | None = None
    tables: list[Table] = field(default_factory=list)
    cards: list[dict[str, Any]] = field(default_factory=list)  # of the checkpoint under way
    prints: dict[str, str] = field(default_factory=dict)  # fingerprint -> label
    words: tuple[str, str] | None = None  # fingerprint of the series' tokenizer, and the checkpoint it came with
    done: set[int] = field(default_factory=set)

    def run(self) -> Table:
        """Measure every checkpoint in order; what cannot be loaded is said and left out."""
        old = self.folder.about()
        if old.get("status") == "complete":
            return self.folder.table()
        series = self._series()
        self._begin(old, len(series))
        store = MonitorStore(self.folder.path, resume=True, about={})
        started = time.monotonic()
        self._restore(store)
        try:
            for number, checkpoint in enumerate(series):
                self._tell("checkpoints", number, len(series))
                if _key(checkpoint) not in self.done:
                    self._checkpoint(checkpoint, store, series)
            self._tell("checkpoints", len(series), len(series))
            self._refuse_nothing(len(series))
            self._last()
            store.drop_window()
        except BaseException as error:
            self._finish("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", started, error)
            raise
        self._finish("complete", started)
        return Table(Table.concat(self.tables).arrow, self.about)

    def _refuse_nothing(self, number: int) -> None:
        if self.tables:
            return
        reasons = [flag for entry in self.about["checkpoints"] for flag in entry["flags"]]
        raise AnisoscopeError(
            f"none of the {number} checkpoints of {self.config.model!r} could be loaded (the first: "
            f"{reasons[0].removeprefix(MISSING).rstrip('.')}); mend that, and the same command with --resume goes on."
        )

    def _series(self) -> list[Checkpoint]:
        c = self.config
        if not c.series:
            return [Checkpoint(c.model, None, c.model)]
        return find_series(c.model, c.revisions)

    def _begin(self, old: dict[str, Any], number: int) -> None:
        self.about = opening(
            asdict(self.config),
            command=self.command,
            seed=self.config.seed,
            old=old,
            kind="sweep" if self.config.series else "tangent",
            models=old.get("models", []),
            warnings=[text for text in old.get("warnings", []) if LEFT_OUT not in text],
            checkpoints=_there(old.get("checkpoints", [])),
        )
        self.folder.write_about(self.about)

    def _restore(self, store: MonitorStore) -> None:
        state = store.newest()
        if state is None:
            return
        self.about["checkpoints"] = _there(state["checkpoints"])
        self.prints = dict(state["prints"])
        self.counts, self.table_before = state["counts"], state["table_before"]
        self.words = state.get("words")
        study, frozen = self._study(None), state["study"]["frozen"]
        window = store.window(frozen["window"] if frozen else [])
        study.load(state["study"], {step: found["study"] for step, found in window.items()})
        self.done = set(state["done"])
        self.tables = store.tables(self.done)

    def _finish(self, status: str, started: float, error: BaseException | None = None) -> None:
        self.about["status"] = status
        if error is not None and str(error):
            self.about["error"] = str(error).splitlines()[0]
        self.about["wall_seconds"] = round(self.about["wall_seconds"] + time.monotonic() - started, 2)
        if self.tables:
            store = MonitorStore(self.folder.path, resume=True, about={})
            store.write_table(Table.concat(self.tables), done=self.done)
        self.folder.write_about(self.about)

    def _tell(self, what: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(what, done, total)

    # one checkpoint

    def _checkpoint(self, checkpoint: Checkpoint, store: MonitorStore, series: list[Checkpoint]) -> None:
        from anisoscope.capture.loading import load_model

        c = self.config
        entry: dict[str, Any] = {"label": checkpoint.label, "step": checkpoint.step}
        options = {name: getattr(c, name) for name in LOADING}
        try:
            loaded = load_model(checkpoint.spec, **options)
        except AnisoscopeError as error:
            if len(series) == 1:
                raise
            self.about["checkpoints"].append(entry | {"flags": [f"{MISSING}{error}"]})
            self.about["warnings"].append(f"{checkpoint.label}{LEFT_OUT}{error}")
            return
        refuse_lossless(loaded, checkpoint.spec)
        finite = all(bool(p.isfinite().all()) for p in loaded.model.parameters())
        asked = [c.step for c in map(_as_asked, self.config.revisions)] if self.config.revisions else []
        later = [s for s in asked[: asked.index(checkpoint.step)] if s is not None] if checkpoint.step in asked else []
        in_order = not later or checkpoint.step is None or max(later) < checkpoint.step
        wrong = flags(loaded.fingerprint, self.prints, finite=finite, asked_in_order=in_order)
        self.words = self.words or (tokenizer_fingerprint(loaded.tokenizer), checkpoint.label)
        readable = tokenizer_fingerprint(loaded.tokenizer) == self.words[0]
        if not readable:
            wrong.append(
                f"another tokenizer than {self.words[1]}, so its tokens are not the same and it was not measured; "
                "name one for the whole series with --tokenizer"
            )
        self.prints.setdefault(loaded.fingerprint, checkpoint.label)
        entry |= {"fingerprint": loaded.fingerprint, "flags": wrong}
        records = self._measure(loaded, checkpoint.step) if finite and readable else []
        flag = {"metric": "checkpoint", "variant": "", "group": "", "kind": "training", "stack": "single"}
        records.append({**flag, "value": float(not wrong), "note": "; ".join(wrong), "step": checkpoint.step})
        name = c.model.rstrip("/").split("/")[-1] if c.series else loaded.name
        columns = {"run": self.folder.path.name, "model": name, "revision": checkpoint.label, "data": c.data}
        table = Table.from_records({**columns, "seed": c.seed, **row} for row in records)
        self.tables.append(table)
        self._describe(loaded, entry, wrong, name)
        key, study = _key(checkpoint), self._study(None)
        self.done.add(key)
        state = {
            "step": key,
            "done": sorted(self.done),
            "checkpoints": self.about["checkpoints"],
            "prints": self.prints,
            "counts": self.counts,
            "table_before": self.table_before,
            "words": self.words,
            "study": study.state(),
        }
        store.write_concepts(key, [{"model": name, **card} for card in self.cards])
        self.cards = []  # a checkpoint that is not measured has none
        window = {"study": study.frozen.window_state(key)} if study.frozen is not None else None
        store.write_step(key, table, state, window)
        self.folder.write_about(self.about)

    def _describe(self, loaded: Any, entry: dict[str, Any], wrong: list[str], name: str) -> None:
        self.about["checkpoints"].append(entry)
        self.about["warnings"] += [f"{entry['label']}: {text}" for text in wrong]
        study = self._study(None)
        notes = [*loaded.notes, *study.notes]
        self.about["warnings"] += [n for n in notes if n not in self.about["warnings"]]
        self.about["device"] = str(loaded.device)
        if not self.about["models"]:
            kind = "decoder" if loaded.is_decoder else "encoder"
            described = {"name": name, "type": kind, "parameters": loaded.parameters, "notes": loaded.notes}
            self.about["models"] = [described | {"fingerprint": loaded.fingerprint, "revision": loaded.revision}]

    def _study(self, width: int | None) -> TangentStudy:
        if self.study is None:
            steps = [c.step for c in self._series()] if self.config.series else []
            last = max((s for s in steps if s is not None), default=None)
            self.study = TangentStudy(self.config.plan, self.counts, last, single=not self.config.series)
        return self.study

    def _measure(self, loaded: Any, step: int | None) -> list[dict[str, Any]]:
        c, model = self.config, loaded.model
        feed_config: Any = replace_feed(c)
        feed = Feed(loaded, feed_config, context_length(loaded, feed_config))
        self._count(loaded, feed)
        study = self._study(None)
        layout = find_layout(model)
        kinds = [kind for kind in KINDS if kind in layout.kinds]
        sites = layout.sites(kinds, c.layers or None)
        requests = list(parse_requests(list(c.metrics or GEOMETRY[c.preset])))
        setup = prepare(model, requests, sites=kinds if not c.metrics else None, layers=c.layers or None)
        watch = EmbeddingWatch(model)
        self._attach_before(watch)
        instruments = Instruments(model, layout, sites, setup, requests, study, watch, c.seed)
        if c.rank is not None:
            check_rank(c.rank, width=int(getattr(model.config, "hidden_size", 1 << 30)))
        self._tell("gradients", 0, 1)
        batches = [self._batch(loaded, batch) for batch in feed.batches()]
        probe = make_probe(instruments, batches, batch_size=c.batch_size)
        bank = instruments.bank()
        rows = probe.run(step if step is not None else 0, others=bank)
        records = instruments.measure(rows, bank)
        self.cards = [{**card, "step": step} for card in instruments.concepts(rows, loaded.tokenizer)]
        if watch.table is not None and step is not None:
            self.table_before = step, watch.table.detach().double().cpu()
        self.about["data"] = feed.about()
        study.notes += [n for n in instruments.notes if n not in study.notes]
        depths = {stack.name: stack.depth for stack in layout.stacks}
        self._tell("gradients", 1, 1)
        return [_deep({**row, "step": row["step"] if step is not None else None}, depths) for row in records]

    def _attach_before(self, watch: EmbeddingWatch) -> None:
        """The table of the checkpoint before, so that its change can be tested; every type of the data was seen."""
        table = watch.table
        if self.table_before is None or table is None or self.counts is None:
            return
        watch.step, before = self.table_before
        if before.shape == table.shape:
            watch.before = before.to(table.device)
            watch.closed = torch.zeros(len(table), dtype=torch.bool, device=table.device)
            watch.closed[: len(self.counts)] = (self.counts[: len(table)] > 0).to(table.device)

    def _count(self, loaded: Any, feed: Feed) -> None:
        """Token frequencies on the data, once for the whole series."""
        if self.counts is not None:
            return
        from anisoscope.data.text import read_documents
        from anisoscope.data.tokens import contexts

        size = len(loaded.tokenizer)
        total = torch.zeros(size, dtype=torch.int64)
        documents = read_documents(self.config.data, text_field=self.config.text_field)
        for piece in contexts(documents, loaded.tokenizer, length=feed.length, tokens=COUNTED):
            ids = torch.as_tensor(piece.ids[~piece.special])
            total += torch.bincount(ids, minlength=size)[:size]
        self.counts = total
        self.about["warnings"].append("token frequencies are those of --data, not of the text the model was trained on")

    def _batch(self, loaded: Any, batch: Batch) -> dict[str, Tensor]:
        """A batch with labels, as the model's own training would have it."""
        inputs = dict(batch.inputs)
        mask = inputs["attention_mask"]
        if loaded.is_encoder_decoder:
            ids = inputs["input_ids"]
            return {**inputs, "labels": ids.masked_fill(mask == 0, -100)}
        if loaded.is_decoder:
            return {**inputs, "labels": inputs["input_ids"].masked_fill(mask == 0, -100)}
        special = batch.special if batch.special is not None else torch.zeros_like(mask, dtype=torch.bool)
        found: dict[str, Tensor] = mask_batch(inputs, special, loaded.tokenizer, seed=self.config.seed)
        return found

    def _last(self) -> None:
        records = self.study.finish() if self.study is not None else []
        if records:
            columns = {"run": self.folder.path.name, "model": self.about["models"][0]["name"], "data": self.config.data}
            self.tables.append(Table.from_records({**columns, "seed": self.config.seed, **row} for row in records))


def _key(checkpoint: Checkpoint) -> int:
    """The number under which a checkpoint's results are kept."""
    return checkpoint.step if checkpoint.step is not None else 0


def _there(checkpoints: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that could be loaded."""
    return [entry for entry in checkpoints if not any(flag.startswith(MISSING) for flag in entry["flags"])]


def _as_asked(revision: str) -> Checkpoint:
    from anisoscope.runs.series import step_of

    return Checkpoint(revision, step_of(revision), revision)


def replace_feed(config: SweepConfig) -> Any:
    """What the feed of a profile reads, from here."""
    from anisoscope.runs.profile import ProfileConfig

    return ProfileConfig(
        models=(config.model,),
        data=config.data,
        tokens=config.tokens,
        context=config.context,
        batch_size=config.batch_size,
        text_field=config.text_field,
        seed=config.seed,
    )


def _deep(row: dict[str, Any], depths: dict[str, int]) -> dict[str, Any]:
    layer, depth = row.get("layer"), depths.get(row.get("stack", "single"), 0)
    return {"stack": "single", **row, "depth": layer / depth if layer is not None and depth else math.nan}


def sweep(
    model: str,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Table:
    """Measure a series of checkpoints and return the table; `out` keeps the run folder, `options` as in SweepConfig.

    >>> sweep("EleutherAI/pythia-160m", revisions=("step0", "step1000"), out="runs/pythia")  # doctest: +SKIP
    """
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    config = SweepConfig(model, **plain)
    with contextlib.ExitStack() as stack:
        place = out if out is not None else stack.enter_context(tempfile.TemporaryDirectory())
        folder = RunFolder.create(place, asdict(config), resume=resume)
        return Sweeper(config, folder, progress=progress, resume=resume).run()
