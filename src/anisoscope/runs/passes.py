"""The passes of one model over its data: as few as fit into memory, saved on the way, resumable."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from anisoscope.capture.rows import Batch
from anisoscope.capture.sites import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.metric import Request
from anisoscope.runs import memory
from anisoscope.runs.bank import Bank, Plan, SiteStats
from anisoscope.runs.feed import Feed, context_length
from anisoscope.runs.measure import ATTENTION_KINDS, Setup, evaluate_bank, feed_tables, make_plan
from anisoscope.runs.rowfile import RowWriter, Tee
from anisoscope.runs.store import RunFolder
from anisoscope.runs.table import Table
from anisoscope.runs.views import mean_spectrum

if TYPE_CHECKING:
    from anisoscope.capture.loading import Loaded
    from anisoscope.runs.profile import ProfileConfig

KEPT_ROWS = 1024  # sampled rows of each site that stay in the run folder, for CKA and comparisons
_SAVE_EVERY = 30.0  # seconds between saves of an unfinished pass, at least
_MANY_UNKNOWN = 0.1  # share of tokens without a word, above which the text is probably not the model's
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
) -> tuple[Records, dict[str, Any]]:
    """Measure one model; `keep` is given what an interrupted pass had gathered."""
    feed = Feed(loaded, config, context_length(loaded, config))
    entry = describe(loaded, setup, key)
    plan = make_plan(
        requests,
        setup.kinds,
        seed=config.seed,
        sample_size=config.sample_size,
        attention_rows=config.attention_rows,
        halves=config.halves,
    )
    check_sites(loaded, setup, feed, entry)
    groups, estimate = plan_passes(loaded, setup, plan, config=config, length=feed.length)
    entry["memory_estimate_mb"] = round(estimate / memory.MIB)
    needed, free = entry["memory_estimate_mb"], memory.available() // memory.MIB
    announce(f"{loaded.name}: about {needed} MiB of memory in all, {free} MiB are free")
    if len(groups) > 1:
        entry["notes"].append(f"statistics of all sites would not fit into memory at once: {len(groups)} passes")
    records: Records = []
    for number, sites in enumerate(groups):
        done = folder.part(f"{key}.{number}")
        if done is not None:  # a pass that was finished before an interruption
            records += [{k: v for k, v in row.items() if k != "schema"} for row in done.records()]
            entry |= {name: value for name, value in done.about.items() if name != "notes"}
            entry["notes"] += done.about["notes"]
            continue
        work = _Pass(number, sites)
        resume(work, folder, key, plan)
        try:
            _sweep(work, feed, setup, loaded=loaded, config=config, folder=folder, key=key, tell=tell)
            mine = _evaluate(work, loaded, setup, requests, tell=tell)
        except KeyboardInterrupt:
            records += _rescued(work, folder, key, requests, setup)
            if records:
                keep(records, entry)
            raise
        assert work.bank is not None
        save_arrays(folder, key if number == 0 else f"{key}.{number}", work.bank)
        if work.writer is not None:
            work.writer.finish()
        found = {**counts(work.bank), "notes": left_out(work.bank)}
        folder.write_part(f"{key}.{number}", Table.from_records(mine, found))
        records += mine
        entry |= {**found, "notes": [*entry["notes"], *found["notes"]]}
        folder.drop_partial(f"{key}.{number}")
    if not feed.fingerprint:  # every pass was finished before: the data is only counted
        for _ in feed.batches():
            pass
    entry["data"] = feed.about()
    if feed.unknown > _MANY_UNKNOWN * feed.tokens:
        share = feed.unknown / feed.tokens
        entry["notes"].append(f"the tokenizer has no word for {share:.0%} of the tokens: is this the right text?")
    entry["dropped"] |= {"padding": feed.padding}
    if config.special == "out":
        entry["dropped"] |= {"special": feed.special}
    entry["notes"] = list(dict.fromkeys([*entry["notes"], *setup.notes]))
    return records, entry


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


def describe(loaded: Loaded, setup: Setup, key: str) -> dict[str, Any]:
    """The model's entry in run.json."""
    kind = "encoder-decoder" if loaded.is_encoder_decoder else "decoder" if loaded.is_decoder else "encoder"
    return {
        "key": key,
        "name": loaded.name,
        "revision": loaded.revision,
        "fingerprint": loaded.fingerprint,
        "parameters": loaded.parameters,
        "architecture": type(loaded.model).__name__,
        "type": kind,
        "layers": setup.depth("single"),
        "width": _size(loaded, "hidden_size", 0),
        "stacks": list(setup.depths) or ["single"],
        "sites": setup.kinds,
        "device": str(loaded.device),
        "dtype": str(next(loaded.model.parameters()).dtype).removeprefix("torch."),
        "notes": [*loaded.notes, *setup.notes],
    }


def _size(loaded: Loaded, name: str, default: int) -> int:
    value = getattr(getattr(loaded.model, "config", None), name, None)
    return value if isinstance(value, int) else default


def plan_passes(
    loaded: Loaded, setup: Setup, plan: Any, *, config: ProfileConfig, length: int
) -> tuple[list[list[Site]], int]:
    """The sites of each pass, and the memory that a run will take at most."""
    heads = _size(loaded, "num_attention_heads", 1)
    width = _size(loaded, "hidden_size", 1024)
    widths = {"resid": width, "query": width // heads, "key": width // heads, "scores": 1}
    bank = memory.bank_bytes(setup.captured, widths, plan, rows=config.tokens, heads=heads)
    activations = memory.activation_bytes(width, config.batch_size, length, heads=heads)
    budget = config.memory_mb * memory.MIB if config.memory_mb else memory.available() // 2
    groups = memory.passes(setup.captured, bank, budget) or [[]]
    return groups, memory.run_bytes(bank // len(groups), activations)


def check_sites(loaded: Loaded, setup: Setup, feed: Feed, entry: dict[str, Any]) -> None:
    """Verify the sites numerically on a few tokens before anything is measured."""
    from anisoscope.capture.verify import verify

    if not setup.captured:
        return
    batch = next(feed.batches(), None)
    if batch is None:
        raise AnisoscopeError(f"no context could be cut from {feed.config.data!r}; give more text.")
    few = Batch({name: value[:2, :32] for name, value in batch.inputs.items()})
    try:
        entry["notes"] += verify(loaded.model, setup.layout, few, kinds=setup.kinds)
    except AnisoscopeError as error:
        entry["notes"] += _after_refusal(error, loaded, setup, few, named=bool(feed.config.sites))
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        raise _forward_failed(error, loaded) from error


def _forward_failed(error: Exception, loaded: Loaded) -> Exception:
    """The sentence for a model that cannot read its first tokens; running out of memory has its own."""
    if "memory" in str(error).lower():
        return error
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return AnisoscopeError(
        f"{loaded.name} fails on its first tokens ({reason}); check that it takes plain token ids and that the sizes "
        "in its configuration fit together, such as num_key_value_heads and num_attention_heads."
    )


def _after_refusal(error: AnisoscopeError, loaded: Loaded, setup: Setup, few: Batch, *, named: bool) -> list[str]:
    """Notes on what could not be verified where the rest can still be measured; else the refusal itself."""
    from anisoscope.capture.verify import verify

    bad = _not_finite(loaded, setup, few)
    if bad:  # NaN equals nothing, so nothing can be verified; the rows are counted and left out
        return [f"activations are not finite at {', '.join(bad[:3])}{' …' if len(bad) > 3 else ''}: not verified"]
    kinds = [kind for kind in setup.kinds if kind not in ATTENTION_KINDS]
    if named or len(kinds) == len(setup.kinds) or not kinds:
        raise error
    notes = verify(loaded.model, setup.layout, few, kinds=kinds)  # the residual stream must still be right
    setup.kinds[:] = kinds
    setup.captured[:] = [site for site in setup.captured if site.kind in kinds]
    return [*notes, f"query, key and scores are left out: {error}"]


def _not_finite(loaded: Loaded, setup: Setup, few: Batch) -> list[str]:
    """Sites whose rows hold NaN or infinity already on the first tokens."""
    from anisoscope.capture.hooks import Capture

    bank = Bank(Plan({}))
    sites = [site for site in setup.captured if site.kind not in ATTENTION_KINDS]
    if sites:
        with Capture(loaded.model, sites, bank, layout=setup.layout) as capture:
            capture.run(few)
    return [str(site) for site, stats in bank.sites.items() if stats.non_finite]


def resume(work: _Pass, folder: RunFolder, key: str, plan: Any) -> None:
    """Take up what an interrupted pass had gathered, if there is any."""
    found = folder.partial(f"{key}.{work.number}", plan)
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


def _sweep(
    work: _Pass,
    feed: Feed,
    setup: Setup,
    *,
    loaded: Loaded,
    config: ProfileConfig,
    folder: RunFolder,
    key: str,
    tell: Tell,
) -> None:
    from anisoscope.capture.hooks import Capture

    if not work.sites and not config.modules:
        return
    if config.save_rows and work.writer is None:
        work.writer = RowWriter(folder.path / "rows" / key)
    assert work.bank is not None
    sink = Tee([work.bank, work.writer]) if work.writer is not None else work.bank
    options: dict[str, Any] = {
        "special": config.special,
        "first": config.first,
        "pool": config.pool,
        "modules": config.modules or None,
    }
    rest = _remaining(feed, work)
    first = next(rest, None)
    if first is None:  # an interrupted pass may have seen everything already
        return
    with Capture(loaded.model, work.sites, sink, layout=setup.layout, **options) as capture:
        for seen, batch in chain([first], rest):
            with _whole(work):
                capture.run(batch)
            tell("forward", min(seen, config.tokens), config.tokens)
            _save_if_due(work, folder, key)
    setup.notes += [note for note in capture.notes if note not in setup.notes]
    tell("forward", config.tokens, config.tokens)


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
    """Tokens seen so far and the batch, for the batches that are still to do."""
    seen, done = 0, work.done
    for number, batch in enumerate(feed.batches()):
        seen += int(batch.inputs["attention_mask"].sum())
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
    folder.write_partial(f"{key}.{work.number}", work.bank, progress)
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
    folder.write_arrays(key, arrays)


def left_out(bank: Bank) -> list[str]:
    """A note where rows with NaN or infinity were left out."""
    bad = {site: stats.non_finite for site, stats in bank.sites.items() if stats.non_finite}
    if not bad:
        return []
    worst = max(bad, key=lambda site: bad[site])
    return [f"rows with NaN or infinity were left out at {len(bad)} sites, most at {worst} ({bad[worst]})"]


def counts(bank: Bank) -> dict[str, Any]:
    """How many contexts the sites saw, and what was dropped."""
    plain = [stats for stats in bank.sites.values() if not stats.heads] or list(bank.sites.values())
    dropped = {"non_finite": max((s.non_finite for s in plain), default=0)}
    contexts = max((sum(s.contexts.values()) for s in plain), default=0)
    return {"rows": max(map(_rows, plain), default=0), "contexts": contexts, "dropped": dropped}


def _rows(stats: SiteStats) -> int:
    """Finite rows that a site saw."""
    return sum(max((stat.n for stat in kinds.values()), default=0) for kinds in stats.cells.values())
