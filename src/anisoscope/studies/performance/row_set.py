"""The contexts of the performance study, the rows a model computes from them, and scores of rows.

Shapes: B contexts of a batch, T positions, n rows, d width. The key of a context assigns it to the fit half or the test
half, and to a fold of the jackknife. Intervals cover the variation over test contexts; repairs and probes stay as
fitted, so the variation of their fit is not included.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anisoscope.capture.capture import Capture
from anisoscope.capture.gradient_pass import (
    IGNORED,
    Collector,
    LabelConvention,
    find_label_convention,
    output_part,
    unlabelled,
    untouched,
)
from anisoscope.capture.sites.layout import Layout
from anisoscope.capture.sites.site import Site
from anisoscope.claims import dynamics as claim
from anisoscope.claims.dynamics import FEWEST, MetricName, PerformanceResults, ScoreSeries
from anisoscope.data.tasks import NONE, Task, Unit
from anisoscope.data.tokens import batches
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.targets import labelled_batch
from anisoscope.metrics.engine.estimation import Estimate
from anisoscope.metrics.engine.metric import Metric
from anisoscope.models.forward import evaluating, forward, unwrapped
from anisoscope.models.load import quiet
from anisoscope.numerics.hashing import FOLDS, fold_of, half_of, row_hash
from anisoscope.results.quantity import as_equal_folds, jackknife
from anisoscope.results.query import variant_name
from anisoscope.studies.performance.shortcut import skipping

VALIDATION = 2  # folds of the fit half used to choose the penalty
FEWEST_CONTEXTS = 24
_LABELS = ("key", "unit", "position", "target", "special")


@dataclass(frozen=True, eq=False)
class TextPiece:
    """A batch of contexts as model inputs."""

    inputs: dict[str, Any]
    units: Tensor  # [B] indices of the contexts
    key: Tensor  # [B]

    def keep(self, chosen: Tensor) -> TextPiece:
        """Some of the contexts, by a mask."""
        whole = {k for k, v in self.inputs.items() if isinstance(v, Tensor) and v.dim() and len(v) == len(chosen)}
        inputs = {k: v[chosen] if k in whole else v for k, v in self.inputs.items()}
        return TextPiece(inputs, self.units[chosen], self.key[chosen])


@dataclass(frozen=True, eq=False)
class Material:
    """All inputs of a model: contexts for its loss, and contexts with labels for the probes."""

    units: list[Unit]
    tasks: dict[str, Task]
    pieces: list[TextPiece]  # all contexts, unmasked
    asked: list[TextPiece]  # the contexts of the loss with targets; masked for a masked language model
    length: int

    @property
    def key(self) -> Tensor:
        return torch.tensor([unit.key for unit in self.units], dtype=torch.int64)

    def labels(self, task: str, rows: RowSet) -> Tensor:
        """The class of every row, [n]: of its token, or of its whole context; NONE for unlabelled rows."""
        table = torch.full((len(self.units), self.length), NONE, dtype=torch.int64)
        for number, unit in enumerate(self.units):
            if (label := unit.labels.get(task)) is not None:
                table[number, : len(unit.context)] = torch.as_tensor(label)
        return table[rows.unit, rows.position]


@dataclass(frozen=True, eq=False)
class RowSet:
    """Rows of one site with their metadata; all on the host except `x`."""

    x: Tensor  # [n, d]
    key: Tensor
    unit: Tensor
    position: Tensor
    target: Tensor  # the class to predict; NONE where nothing is predicted
    special: Tensor  # bool

    @property
    def test(self) -> Tensor:
        return half_of(self.key).bool()

    def keep(self, chosen: Tensor) -> RowSet:
        """A subset of the rows, by mask or by indices."""
        at = chosen.nonzero().squeeze(1) if chosen.dtype == torch.bool else chosen
        return RowSet(self.x[at.to(self.x.device)], **{name: getattr(self, name)[at] for name in _LABELS})

    def asking(self, label: Tensor) -> RowSet:
        """The rows with a label, as their target."""
        return replace(self, target=label).keep(label != NONE)

    def at_most(self, count: int, *, seed: int = 0) -> RowSet:
        """At most `count` rows, shuffled by their hashes, so that the choice does not depend on batching."""
        if len(self.key) <= count:
            return self
        return self.keep(row_hash(self.key, self.position, seed=seed).argsort()[:count])

    def __len__(self) -> int:
        return len(self.key)


def make_material(loaded: Any, units: list[Unit], tasks: dict[str, Task], *, asked: list[Unit], **how: Any) -> Material:
    """Batches of contexts and labels for one model; `asked` are the contexts of the loss."""
    length = max(len(unit.context) for unit in (*units, *asked))
    pieces = list(_pieces(loaded, units, labelled=False, **how))
    losses = list(_pieces(loaded, asked, labelled=True, **how))
    for what, found in (("labelled contexts", units), ("contexts", asked)):
        refuse_few(torch.tensor([unit.key for unit in found]), what)
    return Material(units, tasks, pieces, losses, length)


def refuse_few(key: Tensor, what: str) -> None:
    """Raise if there are too few contexts for a fit half and an interval over folds of the test half."""
    distinct = key.unique()
    test = half_of(distinct).bool()
    if len(distinct) < FEWEST_CONTEXTS or not bool(test.any()) or bool(test.all()):
        raise AnisoscopeError(
            f"there are {len(distinct)} different {what}; half of them is fitted on and the other half is left out by "
            f"folds, so at least {FEWEST_CONTEXTS} are needed: give more --tokens, a shorter --context or more text."
        )


def _pieces(loaded: Any, units: Sequence[Unit], *, labelled: bool, batch_size: int, seed: int) -> Iterator[TextPiece]:
    settings = {"pad_id": loaded.pad_id, "decoder_start": loaded.decoder_start}
    key, start = torch.tensor([unit.key for unit in units], dtype=torch.int64), 0
    for batch in batches((unit.context for unit in units), batch_size=batch_size, **settings):
        inputs = dict(batch.inputs)
        if labelled:  # a causal model may be a masked language model, too
            fills = type(unwrapped(loaded.model)).__name__.endswith("ForMaskedLM")
            inputs = labelled_batch(loaded, batch, seed=seed, following=loaded.predicts_next and not fills)
        indices = torch.arange(start, start + len(inputs["input_ids"]))
        yield TextPiece(inputs, indices, key[indices])
        start += len(indices)


def label_convention(model: nn.Module, pieces: Sequence[TextPiece]) -> LabelConvention:
    """The label convention of the model, determined on its first contexts."""
    inputs = pieces[0].inputs
    with quiet(), untouched(model), evaluating(model), torch.no_grad():  # transformers logs which loss it fell back to
        return find_label_convention(model, forward(model, inputs), inputs["labels"])


def collect_rows(
    model: nn.Module,
    pieces: Iterable[TextPiece],
    sites: Sequence[Site],
    *,
    layout: Layout,
    special: Tensor,
    reading: LabelConvention | None = None,
) -> dict[Site, RowSet]:
    """The rows of some sites over all contexts, with flags for special tokens and, given a convention, targets.

    Rows with non-finite values are left out.
    """
    found: dict[Site, list[RowSet]] = {site: [] for site in sites}
    for piece in pieces:
        collector = Collector()
        with untouched(model), Capture(model, list(sites), collector, layout=layout) as capture:
            capture.run(unlabelled(model, piece.inputs))
        for site, rows in collector.kept.items():
            found[site].append(_row_set(rows, piece, reading, special))
    joined: dict[Site, RowSet] = {}
    for site, parts in found.items():
        labels: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in _LABELS}
        whole = RowSet(torch.cat([part.x for part in parts]), **labels)
        finite = whole.x.isfinite().all(1).cpu()
        if not bool(finite.any()):
            raise AnisoscopeError(f"no row at {site} is finite; look at the weights of the model.")
        joined[site] = whole if bool(finite.all()) else whole.keep(finite)
    return joined


def _row_set(rows: Any, piece: TextPiece, reading: LabelConvention | None, special: Tensor) -> RowSet:
    index = rows.index
    keep = index.keep.cpu()
    row = keep // index.length
    labels = piece.inputs.get("labels")
    target = torch.full_like(keep, NONE)
    if labels is not None and reading is not None and labels.shape == (index.batch, index.length):
        target = reading.targets(labels).flatten()[keep]
        target = torch.where(target == IGNORED, NONE, target)
    flags = torch.isin(index.token.cpu(), special)
    return RowSet(rows.x, piece.key[row], piece.units[row], index.position.cpu(), target, flags)


def known_rows(rows: RowSet, pieces: Sequence[TextPiece]) -> list[Tensor]:
    """The rows of each batch at its real positions, in order; none if some are missing."""
    order = (rows.unit * (1 << 32) + rows.position).argsort()
    unit, found = rows.unit[order], []
    for piece in pieces:
        found.append(rows.x[order[torch.isin(unit, piece.units)].to(rows.x.device)])
        mask = piece.inputs.get("decoder_attention_mask", piece.inputs["attention_mask"])
        if len(found[-1]) != int((mask != 0).sum()) or not bool((piece.units.diff() > 0).all()):
            return []
    return found


def pooled(rows: RowSet, how: str) -> RowSet:
    """One row per context: the mean (without special tokens), the first (cls) or the last row."""
    if how == "mean" and not bool(rows.special.all()):
        rows = rows.keep(~rows.special)
    order = (rows.unit * (1 << 32) + (-1 if how == "last" else 1) * rows.position).argsort(stable=True)
    unit = rows.unit[order]
    chosen = rows.keep(order[unit.diff(prepend=unit[:1] - 1) != 0])
    if how != "mean":
        return replace(chosen, x=chosen.x.double())
    number = rows.unit.unique(return_inverse=True)[1].to(rows.x.device)
    sums = torch.zeros(chosen.x.shape, dtype=torch.float64, device=rows.x.device)
    return replace(chosen, x=sums.index_add_(0, number, rows.x.double()) / torch.bincount(number)[:, None])


# -- the loss of a model that continues from replaced rows -------------------------------------------------------------

Change = Callable[[Tensor], Tensor]
"""Rows [n, d] to the rows that take their place [n, d]."""


@contextlib.contextmanager
def patching(
    model: nn.Module, layout: Layout, site: Site, change: Change, *, real: Tensor, known: Tensor | None = None
) -> Iterator[None]:
    """A context in which the rows of `site` at the positions in `real` [B, T] are replaced; padding is unchanged.

    Where the rows there are `known` [n, d], the blocks before are not run.
    """
    stack = layout.stack(site.stack)
    path = stack.final.path if site.kind == "final" else stack.blocks[max(0, site.layer - 1)]
    # a block with shared weights is called once per layer
    number = stack.blocks[: site.layer].count(path) if site.kind == "resid" else 1
    module = model.get_submodule(path)
    calls = itertools.count(1)

    def replace(x: Tensor) -> Tensor:
        if x.shape[:2] != real.shape or x.dim() != 3:
            raise AnisoscopeError(
                f"site {site} gave a tensor of shape {tuple(x.shape)} for contexts of shape {tuple(real.shape)}; "
                "expected [contexts, positions, width], so its rows cannot be replaced."
            )
        out, keep = x.clone(), real.to(x.device)
        out[keep] = change(x[keep] if known is None else known.to(x.device)).to(x.dtype)
        return out

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _changed_inputs(args, kwargs, replace) if next(calls) == number else None

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        return _changed(output, replace) if next(calls) == number else None

    if site.kind == "embed":
        handle = module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        handle = module.register_forward_hook(after)
    skipped = 0 if known is None or site.kind == "embed" else site.layer
    try:
        with skipping(model, stack, skipped):
            yield
    finally:
        handle.remove()
    if next(calls) <= number:
        raise AnisoscopeError(f"nothing was seen at {site}, so its rows could not be replaced.")


def _changed_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], replace: Change) -> tuple[Any, Any]:
    for i, value in enumerate(args):
        if isinstance(value, Tensor) and value.is_floating_point():
            return (*args[:i], replace(value), *args[i + 1 :]), kwargs
    for name in ("hidden_states", "x", "input", *kwargs):
        value = kwargs.get(name)
        if isinstance(value, Tensor) and value.is_floating_point():
            return args, {**kwargs, name: replace(value)}
    raise AnisoscopeError("a block was given no floating tensor whose rows could be replaced.")


def _changed(output: Any, replace: Change) -> Any:
    """The output of a module with its hidden states replaced."""
    if isinstance(output, Tensor):
        return replace(output)
    if isinstance(output, tuple):
        place = next(i for i, v in enumerate(output) if isinstance(v, Tensor) and v.is_floating_point())
        return (*output[:place], replace(output[place]), *output[place + 1 :])
    if isinstance(output, MutableMapping):
        name = "last_hidden_state" if output.get("last_hidden_state") is not None else next(iter(output))
        output[name] = replace(output[name])
        return output
    raise AnisoscopeError(f"a module returned a {type(output).__name__}; its rows cannot be replaced.")


def token_losses(
    model: nn.Module,
    pieces: Sequence[TextPiece],
    *,
    reading: LabelConvention,
    patch: Callable[..., contextlib.AbstractContextManager[None]] | None = None,
    known: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """The cross-entropy of every target token in nats, [n], and the key of its context, [n].

    `known` are the rows of each batch at the site of the patch, if there are any.
    """
    losses, keys = [], []
    for number, piece in enumerate(pieces):
        real = piece.inputs.get("decoder_attention_mask", piece.inputs["attention_mask"]) != 0
        given = {"known": known[number]} if known else {}
        around = contextlib.nullcontext() if patch is None else patch(real=real, **given)
        with untouched(model), torch.no_grad(), around:
            logits = output_part(forward(model, piece.inputs), "logits")
        targets = reading.targets(piece.inputs["labels"]).to(logits.device)
        counted = targets != IGNORED
        losses.append(nn.functional.cross_entropy(logits[counted].float(), targets[counted], reduction="none").double())
        keys.append(piece.key[counted.nonzero()[:, 0].cpu()])
    return torch.cat(losses).cpu(), torch.cat(keys)


# -- scores of test rows, with intervals over the folds of their contexts ----------------------------------------------

Bounds = tuple[float | None, float | None]
SHARE: Bounds = (0.0, 1.0)
LOSS: Bounds = (0.0, None)
FREE: Bounds = (None, None)


@dataclass(frozen=True, eq=False)
class ProbeScores:
    """One score per test row, and the key of its context."""

    value: Tensor  # [n] float64, on the host
    key: Tensor  # [n]

    def estimate(self, bounds: Bounds, *, note: str = "", dropped: int = 0) -> Estimate:
        """The mean over rows with leave-one-fold-out replicates in fold order; NaN for a fold without contexts.

        >>> ProbeScores(torch.ones(100), torch.arange(100)).estimate((0.0, 1.0)).value
        1.0
        """
        n, fold = len(self.value), fold_of(self.key)
        if not n:
            return Estimate(math.nan, note="no test row", dropped=dropped)
        sums = torch.zeros(FOLDS, dtype=torch.float64).index_add_(0, fold, self.value.double())
        counts = torch.bincount(fold, minlength=FOLDS).double()
        total, size = float(sums.sum()), float(counts.sum())
        pairs = zip(sums.tolist(), counts.tolist(), strict=True)
        left = [(total - s) / (size - c) if c and size > c else math.nan for s, c in pairs]
        contexts = self.key.unique()
        left = as_equal_folds(total / size, left, torch.bincount(fold_of(contexts), minlength=FOLDS).tolist())
        low, high = jackknife(total / size, left, bounds=bounds)
        counted = {"n": n, "contexts": len(contexts), "dropped": dropped}
        return Estimate(total / size, low, high, **counted, note=note, replicates=tuple(left))

    def minus(self, other: ProbeScores) -> ProbeScores:
        """The paired difference; both must score the same rows."""
        return ProbeScores(self.value - other.value, self.key)


def metric_estimate(metric: Metric, x: Tensor, key: Tensor, *, seed: int = 0) -> Estimate:
    """A geometry metric of rows with leave-one-fold-out replicates in fold order."""
    try:
        found = metric(x, contexts=key, seed=seed)
    except AnisoscopeError as error:  # such as too few distinct rows: no value, the reason as note
        return Estimate(math.nan, n=len(x), contexts=int(key.unique().numel()), note=str(error))
    present = sorted(set(fold_of(key).tolist()))
    by_fold = dict(zip(present, found.replicates, strict=True)) if len(present) == len(found.replicates) else {}
    return replace(found, replicates=tuple(by_fold.get(fold, math.nan) for fold in range(FOLDS)))


# -- records of the table: correlations of geometry with performance over layers and over checkpoints ------------------


ANISOTROPY = ("svd_ratio", "average_cosine", "two_nn", "iso_score")
ALL_SITES = {"step": None, "stack": "single", "layer": None, "kind": "study", "group": ""}
STILL = "one of the two is the same at all points"
Correlated = tuple[Callable[[list[MetricName]], ScoreSeries | None], dict[str, str], dict[str, Any]]


def correlations(results: PerformanceResults) -> Iterator[dict[str, Any]]:
    """Records of correlations: over layers at every checkpoint, and over checkpoints at every site."""
    for geometry, (performance, names) in itertools.product(ANISOTROPY, results.performances().items()):
        words = {"geometry": geometry, "performance": performance}
        for series, variant, place in _points(results, layers=performance != "loss"):  # one loss for all layers
            x, y = series([(geometry, {"repair": "raw"})]), series(names)
            if x is None or y is None:
                continue
            yield from _rows(x, y, words | variant, place)
            if "sites" in variant and len(results.steps) > FEWEST:
                yield from _rows(_changes(x), _changes(y), words | variant | {"of": "changes"}, place)


def _points(results: PerformanceResults, *, layers: bool) -> Iterator[Correlated]:
    """What is correlated over which points: layers of a checkpoint, checkpoints at a site or of the mean over sites.

    A function from metrics to their series, keys of the variant, and columns of the place.
    """
    sites, steps = results.sites, results.steps
    for step in steps if layers and len(sites) >= FEWEST else ():
        yield partial(results.series, places=[(step, site) for site in sites]), {"over": "layers"}, {"step": step}
    if len(steps) < FEWEST:
        return
    over = {"over": "checkpoints"}
    for site in sites:
        place = dict(zip(("stack", "layer", "kind"), site, strict=True))
        yield partial(results.series, places=[(step, site) for step in steps]), over, place
    yield partial(results.mean_over, steps=steps), {**over, "sites": "mean"}, {}


def _changes(series: ScoreSeries) -> ScoreSeries:
    """Differences between successive checkpoints, which remove a common trend over time."""
    return ScoreSeries(np.diff(series.value), np.diff(series.folds, axis=0))


def _rows(
    x: ScoreSeries, y: ScoreSeries, words: Mapping[str, str], place: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """One record per method and interval: over contexts, and over layers or checkpoints."""
    for method in ("spearman", "pearson"):
        p = claim.descriptive_p(x, y, method)
        note = "points of one run are not independent" + ("" if math.isnan(p) else f"; descriptive p = {p:.2g}")
        note += f"; {STILL}" if len(set(x.value)) == 1 or len(set(y.value)) == 1 else ""
        for interval, way in (("contexts", claim.over_contexts), (words["over"], claim.over_points)):
            found = way(x, y, method)
            variant = variant_name({**words, "method": method, "interval": interval})
            numbers = {"value": found.value, "low": found.low, "high": found.high, "n": len(x.value), "dropped": 0}
            row = {**ALL_SITES, **place, "metric": "performance_correlation", "variant": variant, **numbers}
            yield {**row, "note": note, "replicates": list(found.left)}
