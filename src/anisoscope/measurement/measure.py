"""`measure`: runs batches through a model, collects statistics of its activations, and returns a table of metrics."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.capture import Capture
from anisoscope.capture.row import Batch, Index, Rows, Rule, Scores, Sink
from anisoscope.capture.sites.layout import pool_fits, weight_rows
from anisoscope.capture.sites.site import EVERY, Site, flow_order, names_of
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.bank import ATTENTION_KINDS, Bank, Setup, make_plan, prepare
from anisoscope.measurement.evaluation import evaluate_pass
from anisoscope.measurement.workers.processes import Processes, in_all, signing
from anisoscope.metrics.catalogue import parse_requests
from anisoscope.metrics.engine.metric import Request
from anisoscope.models.forward import input_device, original, trained_module
from anisoscope.models.load import load_model
from anisoscope.models.parallel import class_name, shard_again
from anisoscope.models.source import StoredRows
from anisoscope.numerics.hashing import row_hash
from anisoscope.numerics.host import few_threads
from anisoscope.option import Progress, check_values, takes_plain
from anisoscope.results.query import Table

_CHUNK = 4096  # rows at a time
_READ = 1 << 21  # elements of a block of rows that is read
LOADING = ("random_init", "device", "dtype", "seed", "trust_remote_code", "tokenizer", "device_map")
PIPELINE = "anisoscope.commands.pipeline"  # which measures models by their names; it is above this room


@takes_plain
def measure(
    model: nn.Module | str | Path,
    batches: Iterable[Any] | str | Path | None = None,
    *,
    sites: Sequence[str] | str | None = None,
    layers: Iterable[int] | int | None = None,
    metrics: Sequence[str] | str | None = None,
    modules: Sequence[str] | str | None = None,
    rows: Rule | None = None,
    special: str = "in",
    first: str = "in",
    pool: str = "none",
    seed: int = 0,
    sample_size: int = 2 * 4096,
    attention_rows: int = 16,
    halves: bool = False,
    name: str = "",
    progress: Progress | None = None,
    alone: bool = False,
    **options: Any,
) -> Table:
    """The geometry of every layer of a model over some batches, as a table.

    A model may be named as on the command line – `measure("gpt2")`, a folder, `org/name@revision`, a .gguf file – and
    then reads text, sounds or pictures by name or path, `measure("gpt2", "corpus.jsonl", tokens=32_768)`, the embedded
    text by default; `options` are those of `anisoscope.profile`.

    `batches` are what the model takes (dicts with `input_ids` and `attention_mask`, or tensors of ids); padding is
    never counted. `sites` are kinds such as "resid" or "attn_out" ("all": every kind there is), `layers` the layers to
    look at, `metrics` names such as "two_nn" or "svd_ratio:centred=0"; several are a list, or one string with commas.
    Any `nn.Module` works by naming `modules` to look at instead. `rows` is a function of (args, kwargs) of the model's
    forward that gives which positions are data, bool [contexts, positions], where its arguments do not say it. With
    `halves` the intrinsic dimensions of the residual stream come also for two disjoint halves of the contexts (groups
    half:1 and half:2).

    Under torch.distributed all processes call it, each with its own batches, and each gets the table of all of them;
    tensor-parallel processes are given the same batches. `alone` measures in this process only.
    """
    if isinstance(model, str | Path):
        named: dict[str, Any] = {"sites": sites, "layers": layers, "metrics": metrics, "modules": modules}
        named |= {"special": special, "first": first, "pool": pool, "seed": seed, "sample_size": sample_size}
        named |= {"halves": halves, "attention_rows": attention_rows, "progress": progress, "alone": alone, **options}
        return _by_name(model, batches, named, rows=rows, name=name)
    check_values(measure, locals(), {"sample_size": 32, "attention_rows": 0, "seed": 0})
    if options or batches is None or isinstance(batches, str | Path):
        what = f"the option {next(iter(options))!r}" if options else "data by name"
        raise AnisoscopeError(
            f"{what} is for models given by name, and this is a {type(model).__name__}; give it batches as its forward "
            "takes them, such as dicts with input_ids and attention_mask."
        )
    model = original(model)
    if hasattr(batches, "keys") or (isinstance(batches, Tensor) and batches.dim() == 2):
        batches = [batches]
    peers = Processes.here(model, alone=alone)
    if peers is not None:
        model = trained_module(model)  # a data-parallel wrapper communicates in every pass
    requests = parse_requests(metrics)
    sites, modules = names_of(sites), names_of(modules)
    if modules and sites:
        raise AnisoscopeError("modules and sites were both given; modules are looked at in place of sites.")
    sizes: dict[str, Any] = {"sample_size": sample_size, "attention_rows": attention_rows, "halves": halves}
    columns = {"model": name or class_name(model), "seed": seed}

    def measured() -> Table:
        setup = prepare(model, requests, sites=sites, layers=layers, modules=modules)
        _refuse_pool(model, setup, pool)
        bank = Bank(make_plan(requests, setup.kinds, seed=seed, **sizes))
        if setup.captured or modules:
            how: dict[str, Any] = {"special": special, "first": first, "pool": pool, "rows": rows, "modules": modules}
            chosen = bool(modules or (sites and EVERY not in sites))
            _read(model, setup, bank, batches, peers=peers, progress=progress, chosen=chosen, **how)
        return _evaluated(model, setup, bank, requests, columns, peers=peers, progress=progress)

    return in_all(peers, measured)


def _refuse_pool(model: nn.Module, setup: Setup, pool: str) -> None:
    if setup.layout is not None and not pool_fits(model, pool, setup.layout):
        why = "it has no class token" if pool == "cls" else "no position is the last of a text"
        raise AnisoscopeError(f"pool={pool!r} means nothing for {type(model).__name__}: {why}; take 'mean' or 'none'.")


def _read(
    model: nn.Module,
    setup: Setup,
    bank: Bank,
    batches: Iterable[Any],
    *,
    peers: Processes | None,
    progress: Progress | None,
    chosen: bool,
    rows: Rule | None,
    **how: Any,
) -> None:
    """Fill the bank with the rows of the batches of this process; sites that were not `chosen` may be left out."""
    around, sink = partial(_failure_explained, model), Tee([bank])
    if peers is None:
        rest = iter(batches)
        opened = next(rest, None)
        if opened is None:
            raise AnisoscopeError(
                "there are no batches to measure; give at least one, as the model's forward takes it."
            )
        rest = chain([opened], rest)
    else:
        if len(peers.same) > 1:
            leave_split_out(setup, chosen=chosen)
        opened, rest = peers.first_batch(batches)
    if not chosen and opened is not None:  # keep the default sites that this model can capture
        with around(opened):
            leave_unseen_out(model, opened, setup, rows=rows)

    def after(number: int, _: Any) -> None:
        if peers is not None:
            peers.sign()
        if progress is not None:
            progress("forward", number, 0)

    run = rest if peers is None else _dealt(peers, rest, opened, sink=sink)
    if peers is None or opened is not None:
        capture_batches(model, setup, setup.captured, sink, run, around=around, after=after, rows=rows, **how)
        shard_again(model)


def leave_split_out(setup: Setup, *, chosen: bool = False) -> None:
    """Remove from the setup what tensor-parallel processes have parts of; an error if nothing else was asked for."""
    split = [site for site in setup.captured if site.kind in ATTENTION_KINDS]
    if not split:
        return
    kinds = ", ".join(dict.fromkeys(site.kind for site in sorted(split, key=flow_order)))
    if chosen or len(split) == len(setup.captured):
        raise AnisoscopeError(
            f"the model is tensor-parallel, so that a process may have some of the heads only, of which {kinds} would "
            "be measured; ask for metrics of the stream, or measure a checkpoint in one process."
        )
    setup.captured[:] = [site for site in setup.captured if site not in split]
    setup.notes.append(f"{kinds} are left out: a tensor-parallel process may have some of the heads only")


def _dealt(peers: Processes, batches: Iterator[Any], lent: Any, *, sink: Tee) -> Iterator[Any]:
    """The batches of the passes of this process; the sink is closed in those that do not count."""
    whole = sink.sinks
    for batch, counts in peers.passes(batches):
        sink.sinks = whole if counts and peers.counts else []
        yield lent if batch is None else batch


def _evaluated(
    model: nn.Module,
    setup: Setup,
    bank: Bank,
    requests: Sequence[Request],
    columns: dict[str, Any],
    *,
    peers: Processes | None,
    progress: Progress | None,
) -> Table:
    """The table of a bank; of several processes the first makes that of all banks, and each gets it."""
    feed_tables(bank, model, setup, peers=peers)
    if peers is not None:
        found = peers.merged(bank, setup.notes)
        if found is None:
            return peers.agree(Table.from_records([]))
        bank, setup.notes[:] = found
        if (setup.captured or not setup.layout) and not bank.sites:
            raise AnisoscopeError(f"none of {peers.size} processes was given a batch; give batches to one at least.")
    records, counts = evaluate_pass(bank, requests, setup, progress=signing(peers, progress))
    about = {"models": [{"name": columns["model"], "notes": [*setup.notes, *counts["notes"]]}], "seed": columns["seed"]}
    table = Table.from_records(({**columns, **record} for record in records), about)
    return table if peers is None else peers.agree(table)


def _by_name(model: str | Path, batches: Any, named: dict[str, Any], *, rows: Rule | None, name: str) -> Table:
    """Measure a model of this name: on data of a name as `profile` does, or on batches once it is loaded."""
    named = {key: value for key, value in named.items() if value is not None}
    if batches is None or isinstance(batches, str | Path):
        if rows is not None:
            raise AnisoscopeError("rows= is for batches; leave it out, since of a text every token is a row.")
        data = {} if batches is None else {"data": str(batches)}
        table: Table = importlib.import_module(PIPELINE).profile(str(model), **data, **named)
        return table.renamed(dict.fromkeys(table.models, name)) if name else table
    loading = {key: named.pop(key) for key in LOADING if key in named}
    loaded = load_model(str(model), **{"device": "cpu", **loading}, need_tokenizer=False)  # where batches usually are
    seed = {"seed": loading["seed"]} if "seed" in loading else {}
    return measure(loaded.model, batches, rows=rows, name=name or loaded.name, **seed, **named)


def capture_batches(
    model: nn.Module,
    setup: Setup,
    sites: Sequence[Site],
    sink: Sink,
    batches: Iterable[Any],
    *,
    around: Callable[[Any], AbstractContextManager[Any]] = contextlib.nullcontext,
    after: Callable[[int, Any], None] | None = None,
    **options: Any,
) -> None:
    """Run all batches through the model and send the rows of some sites to a sink, without gradients.

    Each forward pass runs inside `around(batch)`; `after` is called with its number, from 1 on, and the batch.
    `options` are those of `Capture`.
    """
    capture = Capture(model, sites, sink, layout=setup.layout, **options)
    with few_threads(input_device(model).type), capture:
        for number, batch in enumerate(batches, 1):
            with around(batch):
                capture.run(batch)
            if after is not None:
                after(number, batch)
    setup.notes += [note for note in capture.notes if note not in setup.notes]


@contextlib.contextmanager
def _failure_explained(model: nn.Module, batch: Any) -> Iterator[None]:
    """Around a forward pass: explain a failure, above all that of an encoder-decoder without decoder inputs."""
    try:
        yield
    except (ValueError, IndexError, TypeError, RuntimeError) as error:
        if "memory" in str(error).lower():
            raise
        inputs = batch.inputs if isinstance(batch, Batch) else batch
        given = set(inputs) if isinstance(inputs, Mapping) else set()
        encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        if not encoder_decoder or given & {"decoder_input_ids", "decoder_inputs_embeds", "labels"}:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200].replace("torch.", "")
            raise AnisoscopeError(
                f"{class_name(model)} fails on a batch ({reason}); check that its ids lie within the vocabulary, "
                "and that the batch holds what the model's forward takes."
            ) from error
        raise AnisoscopeError(
            f"the decoder of {type(model).__name__} was given nothing to read; put decoder_input_ids into the "
            "batches beside what its encoder reads, or measure model.get_encoder()."
        ) from error


class Tee:
    """A sink that passes everything on to several sinks, or to none; of rows only those of `sites`, if given."""

    def __init__(self, sinks: Sequence[Sink], sites: Container[Site] | None = None) -> None:
        self.sinks, self.sites = sinks, sites

    def rows(self, rows: Rows) -> None:
        for sink in self.sinks if self.sites is None or rows.site in self.sites else ():
            sink.rows(rows)

    def scores(self, scores: Scores) -> None:
        for sink in self.sinks:
            sink.scores(scores)


def joined_sinks(*sinks: Sink | None) -> Sink | None:
    """One sink for all that are not None; None if all are."""
    given = [sink for sink in sinks if sink is not None]
    return Tee(given) if len(given) > 1 else next(iter(given), None)


def leave_unseen_out(
    model: nn.Module,
    batch: Any,
    setup: Setup,
    *,
    rows: Rule | None = None,
    call: Callable[[], Any] | None = None,
) -> None:
    """Remove from the setup, with a note, attention sites that cannot be captured in a pass over one context.

    `call` runs the pass in place of the batch.
    """
    inputs = batch.inputs if isinstance(batch, Batch) else batch
    if rows is None and isinstance(inputs, Tensor):
        batch = inputs[:1]
    elif rows is None and isinstance(inputs, Mapping):
        size = next((len(v) for v in inputs.values() if isinstance(v, Tensor) and v.dim() > 1), 0)
        batch = {k: v[:1] if isinstance(v, Tensor) and v.dim() and len(v) == size else v for k, v in inputs.items()}
    wanted = [site for site in setup.captured if site.kind in ATTENTION_KINDS]
    while wanted:
        capture = Capture(model, wanted, Tee([]), layout=setup.layout, rows=rows)
        try:
            with capture, torch.no_grad():
                capture.run(batch) if call is None else call()
            return
        except AnisoscopeError as error:
            lost = set(capture.unseen) or set(wanted)
            setup.captured[:] = [site for site in setup.captured if site not in lost]
            wanted = [site for site in wanted if site not in lost]
            kinds = list(dict.fromkeys(site.kind for site in sorted(lost, key=flow_order)))
            listed = " and ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))
            setup.notes.append(f"{listed} are left out: {error}")


def feed_tables(bank: Bank, model: nn.Module, setup: Setup, *, peers: Processes | None = None) -> None:
    """Add the rows of the model's weight tables to the bank, of several processes to that of the first."""
    for kind in setup.tables:
        site = Site(0 if kind == "embed_weight" else setup.depth("single"), kind)
        if site not in bank.sites:  # a resumed bank has them already
            rows: Any = weight_rows(model, kind)
            if peers is not None and hasattr(rows, "full_tensor"):
                rows = rows.full_tensor()  # a collective: every process comes here
            if peers is None or peers.first:
                feed_rows(bank, site, rows)


def feed_rows(bank: Bank, site: Site, rows: Tensor | StoredRows) -> None:
    """Add the rows of an n×d array to the bank, each as a context of its own.

    Rows of which the sample misses none are brought into its order once, so that the bank keeps them without a copy.
    """
    every = len(rows) <= bank.plan.sample_size
    for start in range(0, len(rows), len(rows) if every else _CHUNK):
        number = torch.arange(start, len(rows) if every else min(start + _CHUNK, len(rows)))
        if every:
            number = number[row_hash(number, torch.zeros_like(number), seed=bank.plan.seed).argsort(stable=True)]
        x = _in_order(rows, number) if every else _floating(rows[start : start + _CHUNK])
        index = Index(len(x), 1, torch.arange(len(x)), context=number, position=torch.zeros_like(number), token=number)
        bank.rows(Rows(site, x, index, lasting=every))


def _in_order(rows: Tensor | StoredRows, number: Tensor) -> Tensor:
    """All rows in the order of these numbers, read a block at a time."""
    step = max(1, _READ // rows.shape[1])
    place = number.argsort()
    out = torch.empty(0)
    for start in range(0, len(rows), step):
        part = _floating(rows[start : start + step])
        out = part.new_empty(len(rows), part.shape[1]) if not start else out
        out[place[start : start + step].to(out.device)] = part
    return out


def _floating(rows: Tensor) -> Tensor:
    x = rows.detach()
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
