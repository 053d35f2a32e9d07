"""What is known of a model before it is measured: its description, verified sites, and the memory they will take."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from anisoscope.capture.capture import Capture
from anisoscope.capture.rows.row import Batch
from anisoscope.capture.sites.layout import Layout
from anisoscope.capture.sites.site import EVERY, Site
from anisoscope.capture.verification import verify
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement import memory
from anisoscope.measurement.bank import Bank, Plan
from anisoscope.measurement.feed import Feed, forward_failed, no_text
from anisoscope.measurement.site_plan import ATTENTION_KINDS, Setup
from anisoscope.models.forward import evaluating, forward, modalities_of
from anisoscope.models.load import Loaded
from anisoscope.models.processor import processor_fingerprint
from anisoscope.models.tokenizer import tokenizer_fingerprint
from anisoscope.results.modality import row_words

Shapes = dict[Site, memory.SiteShape]
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
        "row_count": 0,  # until a pass was finished
        "layers": setup.depth("single"),
        "width": _config_size(loaded, "hidden_size"),
        "stacks": stacks,
        "sites": setup.kinds,
        "device": str(loaded.device),
        "dtype": str(next(loaded.model.parameters()).dtype).removeprefix("torch."),
        "notes": [*loaded.notes, *setup.notes],
    }


def type_of(loaded: Loaded) -> str:
    """encoder-decoder, decoder or encoder."""
    return "encoder-decoder" if loaded.is_encoder_decoder else "decoder" if loaded.is_decoder else "encoder"


def modality_words(
    model: nn.Module, stacks: list[str], tokenizer: Any = None, *, layout: Layout | None = None
) -> dict[str, Any]:
    """The modality of each stack of a model and what a row of it is, as run.json says them."""
    modalities = modalities_of(model, stacks, tokenizer)
    return {"modality": modalities, "rows": row_words(modalities, () if layout is None else layout.apart)}


def reading_fingerprint(loaded: Loaded) -> str:
    """What tells how a model reads its data: its tokenizer, or its processor of sounds or pictures."""
    return tokenizer_fingerprint(loaded.tokenizer) if loaded.reads_text else processor_fingerprint(loaded.processor)


def other_reading(loaded: Loaded, first: str) -> str:
    """The flag of a checkpoint that reads the data in another way than the first of its series."""
    if loaded.reads_text:
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


def plan_passes(
    loaded: Loaded, setup: Setup, plan: Plan, *, feed: Feed, shapes: Shapes, reached: int = 0
) -> tuple[list[list[Site]], int]:
    """The sites of each pass, and the memory that a run will take at most; `reached` is what it took so far."""
    config, sites = feed.config, setup.captured
    length = feed.length if loaded.reads_text else None
    amount = memory.amount_of(sites, shapes, tokens=config.tokens, length=length)
    bank = memory.bank_bytes(sites, shapes, plan, amount=amount)
    batch = min(config.batch_size, amount.contexts)
    fused = getattr(getattr(loaded.model, "config", None), "_attn_implementation", None) not in (None, "eager")
    heads = 0 if fused else _config_size(loaded, "num_attention_heads")  # whose scores are held as whole matrices
    forward_pass = memory.activation_bytes(shapes, batch, longer=amount.longer, heads=heads)
    work = max(forward_pass, memory.evaluation_bytes(sites, shapes, plan, amount=amount))
    budget = config.memory_mb * memory.MIB if config.memory_mb else memory.available() // 2
    groups = memory.passes(sites, bank, budget) or [[]]
    return groups, memory.run_bytes(bank // len(groups), work, reached=reached)


def check_sites(loaded: Loaded, setup: Setup, feed: Feed, entry: Entry) -> Shapes:
    """Verify the sites numerically on a few rows before anything is measured; the shapes of what they will give."""

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
    """Notes of the verification without the one that only repeats why the setup has no `final`."""
    assert setup.layout is not None
    told = any(note.startswith("no final") for note in setup.notes)
    notes = verify(loaded.model, setup.layout, few, kinds=kinds)
    return [note for note in notes if not (told and "no final norm" in note)]


def _shapes(loaded: Loaded, setup: Setup, few: Batch, entry: Entry) -> Shapes:
    """The shapes of what the sites give, from one more pass over the few rows that they were verified on."""
    from anisoscope.capture.capture import Capture

    found = memory.ShapeReader()
    capture = Capture(loaded.model, setup.captured, found, layout=setup.layout)
    with evaluating(loaded.model), torch.inference_mode(), capture:
        forward(loaded.model, few.inputs)
    entry["rows"] |= row_words({stack: entry["modality"][stack] for stack in capture.counted})  # nothing was apart
    return found.shapes


def _after_refusal(error: AnisoscopeError, loaded: Loaded, setup: Setup, few: Batch, *, named: bool) -> list[str]:
    """Notes on what could not be verified where the rest can still be measured; else the refusal itself."""

    bad = _not_finite(loaded, setup, few)
    if bad:  # NaN equals nothing, so nothing can be verified; the rows are counted and left out
        return [f"activations are not finite at {', '.join(bad[:3])}{' …' if len(bad) > 3 else ''}: not verified"]
    kinds = [kind for kind in setup.kinds if kind not in ATTENTION_KINDS]
    if named or len(kinds) == len(setup.kinds) or not kinds:
        raise error
    notes = _verified(loaded, setup, few, kinds)  # the residual stream must still be right
    setup.kinds[:] = kinds
    setup.captured[:] = [site for site in setup.captured if site.kind in kinds]
    return [*notes, f"query, key and scores are left out: {error}"]


def _not_finite(loaded: Loaded, setup: Setup, few: Batch) -> list[str]:
    """Sites whose rows hold NaN or infinity already on the first tokens."""
    bank = Bank(Plan({}))
    sites = [site for site in setup.captured if site.kind not in ATTENTION_KINDS]
    if sites:
        with Capture(loaded.model, sites, bank, layout=setup.layout) as capture:
            capture.run(few)
    return [str(site) for site, stats in bank.sites.items() if stats.non_finite]
