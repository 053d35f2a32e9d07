"""β measured in a model: how the rows of a token type spread around their centroid, against the type's frequency.

For every type with enough occurrences, the same number of rows of it is taken from different places of a text (never
the first position of a context or a special token), at every block of the model; β is minus the slope of the log RMS
distance to the type's centroid on the log frequency. The value that the study uses is the mean over blocks, which is
the slope of the mean log distance, so that one bootstrap over types gives its interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anisoscope.capture.capture import Capture
from anisoscope.capture.row import Batch, Rows, Scores
from anisoscope.capture.sites.layout import find_layout
from anisoscope.capture.sites.site import Site
from anisoscope.data.text import read_documents
from anisoscope.data.tokens import contexts
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.config import ProfileConfig
from anisoscope.measurement.feed import TextFeed
from anisoscope.measurement.targets import wrong_text
from anisoscope.metrics import frequency
from anisoscope.metrics.frequency import FEWEST_TYPES, OCCURRENCES, Correlation, TypeSpread
from anisoscope.models.load import Loaded, load_model
from anisoscope.option import Progress
from anisoscope.results.query import variant_name

COUNTED = 1 << 20  # tokens of the text over which frequencies are counted


class MeasuredExponent(NamedTuple):
    """β of one model: the mean over its blocks, records of the table for every block, and the model's entry."""

    used: Correlation
    records: list[dict[str, Any]]
    entry: dict[str, Any]


@dataclass
class _TypeRows:
    """A sink that keeps the chosen rows of every site, in the order in which they come."""

    chosen: list[Tensor]  # [B·T] bool of every batch
    batch: int = 0
    kept: dict[Site, list[Tensor]] = field(default_factory=dict)
    tokens: dict[Site, list[Tensor]] = field(default_factory=dict)

    def rows(self, rows: Rows) -> None:
        at = self.chosen[self.batch][rows.index.keep].nonzero().squeeze(1)
        self.kept.setdefault(rows.site, []).append(rows.x[at.to(rows.x.device)].float().cpu())
        self.tokens.setdefault(rows.site, []).append(rows.index.token[at])

    def scores(self, scores: Scores) -> None:
        return


def measure_exponent(
    spec: str,
    *,
    data: str,
    tokens: int,
    device: str,
    seed: int,
    tokenizer: str | None = None,
    progress: Progress | None = None,
) -> MeasuredExponent:
    """β of a model on a text, of which `tokens` tokens are read."""
    loaded = load_model(spec, device=device, tokenizer=tokenizer)
    feed = TextFeed.of(loaded, ProfileConfig(models=(spec,), data=data, tokens=tokens), tell=None)
    batches = list(feed.batches())
    counts = _counts(loaded, data, feed.length)
    sink = _TypeRows(_chosen(batches, counts, seed=seed))
    layout = find_layout(loaded.model)
    sites = [site for site in layout.sites(kinds=["resid"]) if site.stack == layout.stacks[0].name and site.layer > 0]
    with Capture(loaded.model, sites, sink, layout=layout) as capture:
        for number, batch in enumerate(batches):
            sink.batch = number
            capture.run(batch)
            if progress is not None:
                progress(f"β of {loaded.name}", number + 1, len(batches))
    found = {site: _spread(sink, site, counts) for site in sites}
    if min(len(one.frequency) for one in found.values()) < FEWEST_TYPES:
        raise AnisoscopeError(
            f"only {min(len(one.frequency) for one in found.values())} token types occur {OCCURRENCES} times in "
            f"{feed.tokens:,} tokens of {data!r}; β needs {FEWEST_TYPES} at least: give more text, or --beta."
        )
    records = [{**row, "stack": site.stack, "layer": site.layer, "kind": site.kind}
               for site, spread in found.items() for row in _records(spread, seed=seed)]  # fmt: skip
    used = frequency.frequency_beta(_mean_spread(list(found.values())), seed=seed)
    about = {"name": loaded.name, "revision": loaded.revision, "fingerprint": loaded.fingerprint, "blocks": len(sites)}
    about |= {"parameters": loaded.parameters, "types": used.types, "data": feed.about()}
    note = "token frequencies are those of --data, not of the text the model was trained on"
    return MeasuredExponent(used, records, about | {"notes": [*wrong_text(loaded, batches[0]), *loaded.notes, note]})


def _counts(loaded: Loaded, data: str, length: int) -> Tensor:
    """How often each token occurs in the text, [vocabulary]."""
    total = torch.zeros(len(loaded.tokenizer), dtype=torch.int64)
    for piece in contexts(read_documents(data), loaded.tokenizer, length=length, tokens=COUNTED):
        total += torch.bincount(torch.as_tensor(piece.ids[~piece.special]), minlength=len(total))[: len(total)]
    return total


def _chosen(batches: list[Batch], counts: Tensor, *, seed: int) -> list[Tensor]:
    """Masks [B·T] of the rows to keep: OCCURRENCES at random of every type that has as many."""
    ids, usable = [], []
    for batch in batches:
        mask = torch.as_tensor(batch.inputs["attention_mask"]).bool()
        first = mask & (mask.cumsum(1) == 1)
        special = torch.zeros_like(mask) if batch.special is None else torch.as_tensor(batch.special)
        ids.append(torch.as_tensor(batch.inputs["input_ids"]).flatten())
        usable.append((mask & ~first & ~special).flatten())
    token, fit = torch.cat(ids), torch.cat(usable)
    fit &= token < len(counts)
    order = torch.randperm(len(token), generator=torch.Generator().manual_seed(seed))
    order = order[fit[order]]
    order = order[token[order].argsort(stable=True)]  # by type, at random within a type
    _, number = torch.unique_consecutive(token[order], return_counts=True)
    place = torch.arange(len(order)) - (number.cumsum(0) - number).repeat_interleave(number)
    taken = order[(place < OCCURRENCES) & (number >= OCCURRENCES).repeat_interleave(number)]
    chosen = torch.zeros(len(token), dtype=torch.bool).index_fill_(0, taken, True)
    return list(chosen.split([len(one) for one in ids]))


def _spread(sink: _TypeRows, site: Site, counts: Tensor) -> TypeSpread:
    x, tokens = torch.cat(sink.kept[site]), torch.cat(sink.tokens[site])
    return frequency.contextual_spread(x, tokens, counts, order=torch.arange(len(x)))


def _mean_spread(spreads: list[TypeSpread]) -> TypeSpread:
    """The geometric mean of the distances over blocks."""
    log = torch.stack([one.distance.log() for one in spreads]).mean(0)
    return TypeSpread(spreads[0].frequency, log.exp(), torch.stack([one.norm for one in spreads]).mean(0))


def _records(spread: TypeSpread, *, seed: int) -> Iterator[dict[str, Any]]:
    """β of one block, of the distance and of the distance over the mean norm."""
    relative = TypeSpread(spread.frequency, spread.distance / spread.norm.clamp_min(1e-300), spread.norm)
    for options, one in (({}, spread), ({"normalised": 1}, relative)):
        beta = frequency.frequency_beta(one, seed=seed)
        ends = {"value": beta.value, "low": beta.low, "high": beta.high, "n": beta.types}
        yield {"metric": "frequency_beta", "variant": variant_name({"over": "context", **options}), **ends,
               "note": f"{beta.types} types" if math.isfinite(beta.value) else "too few types"}  # fmt: skip
