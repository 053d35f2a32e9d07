"""Before a model is measured: its entry in run.json, numerical verification of its sites, and a memory estimate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn

from anisoscope.capture.capture import Capture
from anisoscope.capture.row import Batch
from anisoscope.capture.sites.layout import Layout
from anisoscope.capture.sites.site import EVERY, Site
from anisoscope.capture.verification import verify
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.bank import ATTENTION_KINDS, COUNTED, Bank, Plan, Setup, applies, make_plan
from anisoscope.measurement.feed import Feed, ShapeReader, SiteShape, forward_failed, no_text
from anisoscope.measurement.workers.processes import local_size
from anisoscope.metrics.engine.estimation import NEIGHBOUR_BATCH
from anisoscope.metrics.engine.metric import Request
from anisoscope.models.forward import evaluating, forward, modalities_of
from anisoscope.models.load import Loaded
from anisoscope.models.placement import device_entry
from anisoscope.models.processor import processor_fingerprint
from anisoscope.models.source import StoredRows
from anisoscope.models.tokenizer import tokenizer_fingerprint
from anisoscope.numerics.hashing import FOLDS
from anisoscope.results.modality import row_words
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample

MIB = 1 << 20
WORKSPACE = 90 * MIB  # blocks of neighbours, spectra and scores for two cores, whatever the model
# a row of the table as a mapping with its replicates, and as columns, which are made for a pass and for the model
_RECORD, _COLUMNS = 1400, 1300
_CONVOLVED = ("stage", "stage_mean")
Shapes = Mapping[Site, SiteShape]
Entry = dict[str, Any]  # of a model in run.json


def describe(loaded: Loaded, setup: Setup, key: str) -> Entry:
    """The model's entry in run.json."""
    stacks = list(setup.depths) or ["single"]
    return {
        "key": key,
        "name": loaded.name,
        "revision": loaded.revision,
        "fingerprint": loaded.fingerprint,
        "parameters": loaded.parameters,
        "architecture": type(loaded.model).__name__,
        "type": type_of(loaded),
        **modality_words(loaded.model, stacks, loaded.tokenizer, layout=setup.layout),
        "row_count": 0,  # set after a pass
        "layers": setup.depth("single"),
        "width": _config_size(loaded, "hidden_size"),
        "stacks": stacks,
        "sites": setup.kinds,
        **device_entry(loaded.device),
        "dtype": str(next(loaded.model.parameters()).dtype).removeprefix("torch."),
        "notes": [*loaded.notes, *setup.notes],
    }


def type_of(loaded: Loaded) -> str:
    """encoder-decoder, decoder or encoder."""
    return "encoder-decoder" if loaded.is_encoder_decoder else "decoder" if loaded.is_decoder else "encoder"


def modality_words(
    model: nn.Module, stacks: list[str], tokenizer: Any = None, *, layout: Layout | None = None
) -> dict[str, Any]:
    """The entries `modality` (of each stack) and `rows` (what a row stands for) of run.json."""
    modalities = modalities_of(model, stacks, tokenizer)
    return {"modality": modalities, "rows": row_words(modalities, () if layout is None else layout.apart)}


def reading_fingerprint(loaded: Loaded) -> str:
    """Fingerprint of the model's tokenizer, or of its audio or image processor."""
    return tokenizer_fingerprint(loaded.tokenizer) if loaded.reads_text else processor_fingerprint(loaded.processor)


def other_reading(first: str, *, reads_text: bool) -> str:
    """The flag of a checkpoint whose tokenizer or processor differs from that of the first of its series."""
    if reads_text:
        return (
            f"another tokenizer than {first}, so its tokens are not the same and it was not measured; name one for the "
            "whole series with --tokenizer"
        )
    return (
        f"another processor than {first}, so its inputs are not the same and it was not measured; give all checkpoints "
        "the same preprocessor_config.json"
    )


def _config_size(loaded: Loaded, name: str) -> int:
    value = getattr(getattr(loaded.model, "config", None), name, None)
    return value if isinstance(value, int) else 0


def check_sites(loaded: Loaded, setup: Setup, feed: Feed, entry: Entry) -> Shapes:
    """Verify the sites numerically on a few rows; returns the shape of the rows of each site."""
    if not setup.captured:
        return {}
    try:
        batch = next(feed.batches(), None)
        if batch is None:
            raise no_text(loaded, feed.config.data)
        few = feed.few(batch)
        try:
            entry["notes"] += _verified(loaded, setup, few, setup.kinds)
        except AnisoscopeError as error:
            named = bool(feed.config.sites) and EVERY not in feed.config.sites
            entry["notes"] += _after_refusal(error, loaded, setup, few, named=named)
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        raise forward_failed(error, loaded) from error
    return _shapes(loaded, setup, few, entry)


def _verified(loaded: Loaded, setup: Setup, few: Batch, kinds: list[str]) -> list[str]:
    """Notes of the verification, without the one on a missing final norm if the setup has it already."""
    assert setup.layout is not None
    noted = any(note.startswith("no final") for note in setup.notes)
    notes = verify(loaded.model, setup.layout, few, kinds=kinds)
    return [note for note in notes if not (noted and "no final norm" in note)]


def _after_refusal(error: AnisoscopeError, loaded: Loaded, setup: Setup, few: Batch, *, named: bool) -> list[str]:
    """Handle a failed verification: notes if the remaining sites can still be measured, else raise the error."""
    bank, sites = Bank(Plan({})), [site for site in setup.captured if site.kind not in ATTENTION_KINDS]
    if sites:
        with Capture(loaded.model, sites, bank, layout=setup.layout) as capture:
            capture.run(few)
    bad = [str(site) for site, stats in bank.sites.items() if stats.non_finite]
    if bad:  # NaN compares unequal, so nothing can be verified; such rows are counted and dropped
        return [f"activations are not finite at {', '.join(bad[:3])}{' …' if len(bad) > 3 else ''}: not verified"]
    kinds = [kind for kind in setup.kinds if kind not in ATTENTION_KINDS]
    if named or len(kinds) == len(setup.kinds) or not kinds:
        raise error
    notes = _verified(loaded, setup, few, kinds)  # the residual stream must still be right
    setup.kinds[:] = kinds
    setup.captured[:] = [site for site in setup.captured if site.kind in kinds]
    return [*notes, f"query, key and scores are left out: {error}"]


def _shapes(loaded: Loaded, setup: Setup, few: Batch, entry: Entry) -> Shapes:
    """The shape of the rows of each site, from one more forward pass over the few rows of the verification."""
    reader = ShapeReader()
    capture = Capture(loaded.model, setup.captured, reader, layout=setup.layout)
    with evaluating(loaded.model), torch.inference_mode(), capture:
        forward(loaded.model, few.inputs)
    entry["rows"] |= row_words({stack: entry["modality"][stack] for stack in capture.counted})  # no class tokens apart
    return reader.shapes


class PassPlan(NamedTuple):
    """The statistics to collect, the sites of each pass, the shapes of their rows, and the estimated peak memory."""

    plan: Plan
    groups: list[list[Site]]
    shapes: Shapes
    peak: int  # bytes


def plan_passes(
    loaded: Loaded, setup: Setup, requests: Sequence[Request], *, feed: Feed, entry: Entry, reached: int = 0
) -> PassPlan:
    """Verify the sites and plan as few passes as keep the statistics within the budget.

    The peak is the current memory (the model is loaded) plus statistics and workspace, or `reached`, the peak so far.
    """
    config, shapes = feed.config, check_sites(loaded, setup, feed, entry)
    names = ("seed", "sample_size", "attention_rows", "halves")
    plan = make_plan(requests, setup.kinds, **{name: getattr(config, name) for name in names})
    sites, length = setup.captured, feed.length if loaded.reads_text else None
    amount = amount_of(sites, shapes, tokens=config.tokens, length=length)
    fused = getattr(getattr(loaded.model, "config", None), "_attn_implementation", None) not in (None, "eager")
    heads = 0 if fused else _config_size(loaded, "num_attention_heads")  # heads whose score matrices are materialised
    sizes: dict[str, Any] = {"amount": amount, "batch": config.batch_size, "heads": heads}
    bank, work, table = pass_memory(sites, shapes, plan, requests, **sizes)
    budget = config.memory_mb * MIB if config.memory_mb else available() // 2
    layers = sorted({(s.stack, s.layer) for s in sites})  # whole layers stay together
    step = max(1, -(-len(layers) // max(1, -(-bank // max(1, budget)))))
    chunks = [set(layers[i : i + step]) for i in range(0, len(layers), step)]
    groups = [[s for s in sites if (s.stack, s.layer) in chunk] for chunk in chunks] or [[]]
    measured = max(bank // len(groups) + work, table)  # of the model, and of its table
    peak = max(reached, int(psutil.Process().memory_info().rss) + measured)
    return PassPlan(plan, groups, shapes, peak)


def pass_memory(
    sites: Sequence[Site],
    shapes: Shapes,
    plan: Plan,
    requests: Sequence[Request],
    *,
    amount: Amount,
    batch: int,
    heads: int,
) -> tuple[int, int, int]:
    """Bytes of the statistics of all sites, of the work beside them, and of the table at the end."""
    forward_pass = activation_bytes(shapes, min(batch, amount.contexts), longer=amount.longer, heads=heads)
    records = record_count(sites, shapes, requests)
    evaluation = _evaluation_bytes(sites, shapes, plan, amount=amount)
    work = max(forward_pass, evaluation + records * _RECORD, records * (_RECORD + _COLUMNS))
    return bank_bytes(sites, shapes, plan, amount=amount), work, records * (_RECORD + 2 * _COLUMNS)


@dataclass(frozen=True)
class Amount:
    """How much data a run will read: contexts, and how many times longer they are than those of `Shapes`."""

    contexts: int
    longer: float = 1.0

    def rows(self, shape: SiteShape) -> int:
        return round(self.contexts * (shape.positions * self.longer if shape.positions > 1 else 1))


def amount_of(sites: Sequence[Site], shapes: Shapes, *, tokens: int, length: int | None) -> Amount:
    """The amount of data of `tokens` rows; `length`: positions of a context if `shapes` come from shorter ones."""
    counted = [shapes[s].positions for s in sites if s in shapes and s.kind in COUNTED]
    counted = counted or [shapes[s].positions for s in sites if s in shapes] or [1]
    longer = length / max(counted) if length else 1.0
    return Amount(max(1, -(-tokens // max(1, length or min(counted)))), longer)


def bank_bytes(sites: Sequence[Site], shapes: Shapes, plan: Plan, *, amount: Amount) -> int:
    """Bytes of all statistics: moments of each fold, buffered rows (half a buffer per cell on average), samples.

    A fold of fewer rows than columns is kept as rows until its site is evaluated.
    """
    folds, total = min(FOLDS, amount.contexts), 0
    for site in (s for s in sites if s in shapes):
        shape, wanted = shapes[site], plan.stats.get(site.kind, frozenset())
        width, rows = shape.width, amount.rows(shape)
        if Moments in wanted and rows < folds * width:
            total += rows * shape.heads * width * 4
        elif Moments in wanted:
            total += folds * shape.heads * width * width * 8
            total += min(rows, folds * width) // 2 * shape.heads * width * 4
        if Sample in wanted:
            total += int(1.2 * min(plan.sample_size, rows)) * width * shape.heads * 4
        total += FOLDS * 2 * 8 * shape.heads * width * 8
    return total


def _thin(shape: SiteShape, rows: int) -> bool:
    """Whether moments are kept as rows, of which there are no more than columns, and measured by their Gram matrix."""
    return shape.heads == 1 and rows <= shape.width


def record_count(sites: Sequence[Site], shapes: Shapes, requests: Sequence[Request]) -> int:
    """Rows of the table: for every metric at a site one, and at a site with heads one more for each head."""
    found = 0
    for site in (s for s in sites if s in shapes):
        heads = shapes[site].heads if site.kind in ATTENTION_KINDS else 0
        found += sum(applies(request, site.kind) for request in requests) * (1 + heads)
    return found


def _evaluation_bytes(sites: Sequence[Site], shapes: Shapes, plan: Plan, *, amount: Amount) -> int:
    """Bytes that evaluating the metrics of the widest site takes beside the bank; factors were measured.

    24 d×d matrices in float64 (moments without each fold, their spectra), or the Gram matrix of few rows, a part of it
    and the solver's copy; and 7 copies of the sampled rows.
    """
    most = 0
    for site in (s for s in sites if s in shapes):
        shape, wanted = shapes[site], plan.stats.get(site.kind, frozenset())
        rows = amount.rows(shape)
        matrices = 3 * rows**2 * 8 if _thin(shape, rows) else 24 * shape.width**2 * 8
        matrices = matrices if Moments in wanted else 0
        sampled = 7 * min(plan.looked_at, rows) * shape.width * 4 if Sample in wanted else 0
        most = max(most, matrices + sampled)
    return WORKSPACE + most


def rows_bytes(rows: StoredRows, *, sample_size: int) -> tuple[int, int]:
    """Bytes that the statistics of an n×d array hold, and that evaluating its metrics takes beside them.

    Held are its sampled rows once, and rows that wait or d×d moments of each fold, whichever are fewer. Evaluation
    takes the Gram matrix, one part of it and the copy of the solver (or 24 d×d matrices, as measured), or the Gram
    matrix and a float32 copy of the rows among which neighbours are searched.
    """
    (n, d), size = rows.shape, rows.dtype.itemsize
    sampled, thin = min(n, sample_size + sample_size // 4), n <= d
    waiting = 0 if n <= sample_size else n * d * size  # rows that the sample has whole are kept once
    held = sampled * d * size + (waiting if thin else FOLDS * d * d * 8)
    matrix, searched = 8 * min(n, d) ** 2, 4 * min(n, NEIGHBOUR_BATCH) * d
    return held, WORKSPACE + max((3 if thin else 24) * matrix, (1 if thin else FOLDS + 1) * matrix + searched)


def activation_bytes(shapes: Shapes, batch: int, *, longer: float = 1.0, heads: int) -> int:
    """Peak bytes of the activations of one forward pass; factors were measured.

    A transformer block with a feed-forward part of four times the width holds about 44 rows per position, with what the
    C library keeps of them between two blocks, a convolution 8. `heads` are those whose T×T scores are materialised: 0
    with fused attention.
    """
    widest = attended = 0.0
    for site, shape in shapes.items():
        convolved, long = site.kind in _CONVOLVED, shape.positions * longer
        widest = max(widest, (8 if convolved else 44) * long * shape.width * shape.heads)
        attended = attended if convolved else max(attended, long)
    return int(batch * (widest + (2 * heads + 1) * attended**2) * 4)


def available() -> int:
    """Free bytes of memory for this process."""
    return int(psutil.virtual_memory().available) // local_size()
