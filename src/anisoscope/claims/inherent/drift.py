"""Claim: the drift of representations explains their anisotropy, in each model and over all models.

Claims about modalities read the residual stream of each stack of each model at its last measured step. Blocks are the
rows of kind `stage` where a model has stages, and of kind `resid` otherwise; the embedding is a site but not a block,
and the output of the final norm is reported separately. The modality of a stack is read from run.json; default: text.

Notation
    A      average cosine of a site; drift ‖mean(h)‖, unnormalised
    n      sites of a stack: the embedding and its blocks, without the final norm
    share  explained by drift, 1 − A(centred)/A, median over the sites
The square of the relative drift, ‖mean(h)‖ / mean ‖h‖, nearly equals A by construction, so it is shown but explains
nothing. The share is near 1 by construction where all rows have similar norms; it is lower where a few long rows
dominate the mean.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from anisoscope.claims.engine import claim as engine
from anisoscope.claims.engine import correlation as over
from anisoscope.claims.engine import evidence
from anisoscope.claims.engine.claim import CORRELATION, Finding, Part, Parts, Sentence, claim, judge
from anisoscope.claims.engine.correlation import FEWEST_CLUSTERS, FEWEST_SITES, CorrelationUnit
from anisoscope.claims.engine.evidence import BlockStack, Cell, Missing, NotHere, Study, figure, listed, stacks
from anisoscope.claims.engine.learning import learned
from anisoscope.claims.engine.walk import Walk, rank_correlations
from anisoscope.results.manifest import WRONG_TEXT
from anisoscope.results.modality import MODALITIES, TEXT, attends, modality_name
from anisoscope.results.quantity import Quantity, combine_folds, correlate, mean, ranks, t_interval
from anisoscope.results.query import Row, Table

SOURCE = "Godey et al. 2024, Anisotropy Is Inherent to Self-Attention in Transformers, arXiv:2401.12143"
METRICS = ("average_cosine", "drift", "mean_norm", "relative_drift", "explained_by_drift")
UNTRAINED = "has untrained weights"
MOST_NAMED = 4  # models named in a sentence
_ATTENTION = ("query", "key", "scores")
_RECTIFIED = (  # prefixes of model classes whose stages end in a ReLU
    *("ResNet", "RegNet", "ResNeXt", "WideResNet", "DenseNet", "VGG", "AlexNet", "SqueezeNet", "ShuffleNet"),
    *("GoogLeNet", "Inception"),
)
_NOT_MEASURED = "measure it with --metrics average_cosine,drift,mean_norm,explained_by_drift"
CORRELATION_MARGIN = 0.3
SHARE_MARGIN = 0.5
FEWEST_LAYERS = 7  # needed for a verdict: of the walks over six sites one is 3 %, and 2 may do as well
_FEW_MODELS = f"an interval over models needs {FEWEST_CLUSTERS} of them"
NEAR_IDENTITY = "a near-identity of the average cosine, which it follows by construction"
ALL = "all models"
_RANK, _LINEAR, _SHARE = "rank correlation", "linear correlation", "explained share"
_FIRST = "without the first position"
Pairs = Sequence[tuple[Row, Row]]
_HOW = "measure it with --metrics explained_by_drift"


@dataclass(frozen=True)
class Stream(BlockStack):
    """One stack of one model at its last measured step, from the embedding to the final norm."""

    subject: str = ""  # its name in verdicts
    step: int | None = None

    @classmethod
    def of(cls, subject: str, stack: BlockStack) -> Stream:
        """The stream of a stack; raises `NotHere` where no block has an average cosine."""
        cells = [cell for cell in stack.sites("average_cosine") if cell.layer > 0]
        kinds = {cell.kind for cell in cells}
        kind = "stage" if "stage" in kinds else "resid"
        if kind not in kinds:
            raise NotHere("average_cosine at blocks", _NOT_MEASURED)
        step = evidence.last_step([cell for cell in cells if cell.kind == kind])
        return cls(stack.run, stack.name, kind, stack.until, subject, step)

    def sites(self, metric: str, group: str = "", *, heads: bool = False, **options: Any) -> evidence.Readings:
        """The rows of a metric at all sites of the stack, at the step of the stream; layer 0 is the embedding."""
        found = super().sites(metric, group, heads=heads, **options)
        return {cell: row for cell, row in found.items() if cell.step == self.step}

    def counted(self, metric: str, **options: Any) -> evidence.Readings:
        """The rows of a metric at the embedding and the blocks."""
        return {c: row for c, row in self.sites(metric, **options).items() if c.kind in ("embed", self.kind)}

    @property
    def model(self) -> str:
        return self.run.model

    @property
    def stack_name(self) -> str:
        """The name of the stack in the table."""
        return next(cell.stack for cell in self.sites("average_cosine") if cell.kind == self.kind)

    @property
    def modality(self) -> str:
        """The name of the modality from run.json."""
        return modality_name(self.run.entry, self.stack_name) or TEXT.name

    def noted(self, words: str) -> bool:
        """Whether a note on the model in run.json begins with these words."""
        return any(str(note).startswith(words) for note in self.run.entry.get("notes") or ())

    @property
    def untrained(self) -> bool:
        """Whether the weights are random."""
        return self.step == 0 or self.noted("random weights")

    @property
    def doubt(self) -> str:
        """Why the model does not count among trained models, as a phrase; empty if it does."""
        if self.untrained:
            return UNTRAINED
        if self.noted(WRONG_TEXT):
            return "was shown a text that it does not know"
        return "did not learn" if learned(self.run, self.step).status == "did not learn" else ""

    @property
    def attends(self) -> bool:
        """Whether the model has attention; some hybrids in the modality convolution have it."""
        if attends(self.modality):
            return True
        kinds = {str(kind) for kind in self.run.entry.get("sites") or ()}
        seen = {cell.kind for metric in METRICS for cell in self.run.rows(metric)}
        return bool((kinds | seen) & set(_ATTENTION)) or str(self.run.entry.get("architecture", "")).startswith("Cvt")

    @property
    def rectified(self) -> bool:
        """Whether the stages are known to end in a ReLU, which alone makes an average cosine high."""
        return str(self.run.entry.get("architecture", "")).startswith(_RECTIFIED)

    def mean(self) -> Quantity:
        """The average cosine, mean over blocks."""
        return mean([row.quantity for row in self.blocks("average_cosine").values()])

    def pairs(self, **options: Any) -> dict[Cell, tuple[Row, Row]]:
        """Drift and average cosine of every counted site that has both."""
        drift, cosine = self.counted("drift", **options), self.counted("average_cosine", **options)
        return {cell: (drift[cell], cosine[cell]) for cell in cosine if cell in drift}


def streams(study: Study) -> dict[str, Stream]:
    """Every stack whose blocks have an average cosine, by its name in verdicts."""
    found = {}
    for name, stack in stacks(study).items():
        try:
            found[name] = Stream.of(name, stack)
        except NotHere:
            continue
    return found


def table_streams(table: Table) -> list[Stream]:
    """The streams of a table, for every seed."""
    return [stream for study in evidence.studies_by_seed(table, METRICS) for stream in streams(study).values()]


def trained_streams(study: Study) -> tuple[dict[str, Stream], str]:
    """The streams of models that have learned, on data they know, without copies, and a note on the others.

    Streams with identical values and leave-one-fold-out values are one model under two names.
    """
    found = streams(study)
    doubts = {name: stream.doubt for name, stream in found.items() if stream.doubt}
    fresh = [name for name, doubt in doubts.items() if doubt == UNTRAINED]
    verb = "have untrained weights and do not count" if len(fresh) > 1 else f"{UNTRAINED} and does not count"
    names = listed(fresh) if len(fresh) <= MOST_NAMED else f"{len(fresh)} stacks"
    notes = [f"{names} {verb}"] if fresh else []
    notes += [f"{name} {doubt} and does not count" for name, doubt in doubts.items() if doubt != UNTRAINED]
    originals: dict[Any, str] = {}
    trained = {}
    for name, stream in found.items():
        rows = [(metric, c, row) for metric in METRICS for c, row in stream.counted(metric).items()]
        numbers = tuple((metric, c.layer, c.kind, row.value, row.quantity.folds) for metric, c, row in rows)
        if name not in doubts and (original := originals.setdefault(numbers, name)) == name:
            trained[name] = stream
        elif name not in doubts:
            notes.append(f"{name} has the same numbers as {original} and counts once")
    return trained, "; ".join(notes)


def needed_streams(study: Study) -> tuple[dict[str, Stream], str]:
    """As `trained_streams`, but raises `Missing` if there are none: random weights show nothing about learning."""
    trained, note = trained_streams(study)
    if not trained and any(stream.doubt != UNTRAINED for stream in streams(study).values()):
        raise Missing("model that has learned, on data it knows", note)
    if not trained:
        raise NotHere("average_cosine at the blocks of a trained model", _NOT_MEASURED)
    return trained, note


# -- correlations, also shown by `view.sections.drift` -----------------------------------------------------------------


def drift_correlations(table: Table) -> list[dict[str, Any]]:
    """One record per stack, model and seed: correlations of drift with average cosine over sites at the last step."""
    return list(map(stream_record, table_streams(table)))


def stream_record(stream: Stream) -> dict[str, Any]:
    """The record of one stack."""
    pairs, points = list(stream.pairs().values()), _points(stream)
    linear, ranked = (_correlation("", pairs, ranked=ranked) for ranked in (False, True))
    counted = [point for point in points if point["counted"]]
    squared = [point["relative_drift"] ** 2 for point in counted]
    shared = ("model", "subject", "modality", "role", "step", "kind", "untrained", "doubt", "attends")
    found = {name: getattr(stream, name) for name in shared}
    found |= {"stack": stream.stack_name, "seed": stream.run.seed, "loaded": stream.run.loaded, "n": len(pairs)}
    found |= {**_columns("pearson", linear), "pearson_p": linear.p}
    found |= {**_columns("spearman", ranked), "spearman_p": ranked.p, "p_note": over.DESCRIPTIVE}
    found |= _columns("explained", Part.of(_SHARE, explained_share(stream), bounds=engine.SHARE))
    found["near_identity"] = correlate(squared, [point["cosine"] for point in counted], "pearson")
    found |= {"near_identity_note": NEAR_IDENTITY, "points": points, "status": _status(stream)}
    return {**found, "note": _note(stream, pairs, linear)}


def _correlation(name: str, pairs: Pairs, *, ranked: bool, **more: Any) -> Part:
    """The correlation of drift with average cosine over sites; interval and p account for the number of sites."""
    one, two = ([pair[side].quantity for pair in pairs] for side in (0, 1))
    method = "spearman" if ranked else "pearson"
    quantity = over.correlated(one, two, method) if len(pairs) >= FEWEST_SITES else Quantity(math.nan)
    ends = over.sites_interval(quantity, len(pairs), ranked=ranked)
    values = [np.array([number.value for number in side]) for side in (one, two)]
    p = over.order_p(*(map(ranks, values) if ranked else values))
    return Part(name, quantity.value, *ends, p=p, bounds=CORRELATION, **more)


def _columns(name: str, part: Part) -> dict[str, float]:
    return {name: part.effect, f"{name}_low": part.low, f"{name}_high": part.high}


def _note(stream: Stream, pairs: Pairs, linear: Part) -> str:
    """Why a correlation or its interval is missing; empty if nothing is."""
    if not stream.counted("drift"):
        return "drift was not measured"
    if len(pairs) < FEWEST_SITES:
        return f"{evidence.counted(len(pairs), 'site')} only: a correlation needs {FEWEST_SITES}"
    if not linear.measured:
        constant = "drift" if len({drift.value for drift, _ in pairs}) == 1 else "average cosine"
        return f"the {constant} is the same at every site, so there is no correlation"
    if not math.isfinite(linear.low):
        return "too few replicates over context folds: no interval"
    return ""


def _points(stream: Stream) -> list[dict[str, Any]]:
    """One record per site, including the final norm, which the correlation leaves out."""
    cosine, drift, norm, relative, share = (stream.sites(metric) for metric in METRICS)
    shown = [item for item in cosine.items() if item[0].kind in ("embed", stream.kind, "final")]
    points = []
    for cell, row in sorted(shown, key=lambda item: (item[0].layer, item[0].kind == "final")):
        low, high = row.quantity.interval()
        values = [rows[cell].value if cell in rows else math.nan for rows in (norm, drift, relative, share)]
        length, moved, given, explained = values
        found = {"layer": cell.layer, "depth": row.depth, "kind": cell.kind, "counted": cell.kind != "final"}
        found |= {"cosine": row.value, "low": low, "high": high, "drift": moved}
        found["relative_drift"] = moved / length if cell in drift and length > 0 else given  # in units of the mean norm
        points.append({**found, "explained": explained})
    return points


def explained_share(stream: Stream) -> Quantity:
    """The median over sites of 1 − A(centred)/A; NaN where it was not measured."""
    parts = [reading.quantity for reading in stream.counted("explained_by_drift").values()]
    if not parts:
        return Quantity(math.nan)
    return combine_folds(parts, lambda values: statistics.median(values) if np.isfinite(values).all() else math.nan)


def _status(stream: Stream) -> str:
    try:
        return judge(_parts(stream))[0]
    except Missing:
        return "undecided"


def pooled_correlations(table: Table) -> list[dict[str, Any]]:
    """Records of the correlations pooled within stacks, for all trained models and for each modality.

    Spearman's uses ranks within a stack, Pearson's values in standard deviations of the stack. p is from shuffling the
    sites within every stack (9,999 draws, or all permutations where they are fewer); the interval is over models, with
    all their stacks and seeds, as in the claim; copies of a model count once.
    """
    units: dict[str, list[tuple[CorrelationUnit, CorrelationUnit]]] = {name: [] for name in ("", *MODALITIES)}
    for stream in (s for study in evidence.studies_by_seed(table, METRICS) for s in trained_streams(study)[0].values()):
        if (unit := _unit(stream)) is not None and (linear := _unit(stream, ranked=False)) is not None:
            for name in ("", stream.modality):
                units.setdefault(name, []).append((unit, linear))
    return [_pooled_record(name or "all", members) for name, members in units.items() if members]


def _unit(stream: Stream, *, ranked: bool = True) -> CorrelationUnit | None:
    """The standardised ranks or values of a stack; None with too few or constant values."""
    drift, cosine = ([pair[side].value for pair in stream.pairs().values()] for side in (0, 1))
    if len(drift) < FEWEST_SITES or not math.isfinite(correlate(drift, cosine, "spearman")):
        return None
    return CorrelationUnit.of(stream.model, drift, cosine, ranked=ranked)


def _pooled_part(units: Sequence[CorrelationUnit]) -> Part:
    """The part for the pooled correlation, with its interval over models and its permutation p."""
    value, ends = over.pooled_correlation(units), over.models_interval(units)
    return Part("", value, *ends, p=over.permutation_p(units), bounds=CORRELATION)


def _pooled_record(name: str, units: Sequence[tuple[CorrelationUnit, CorrelationUnit]]) -> dict[str, Any]:
    ranked, linear = (_pooled_part([pair[side] for pair in units]) for side in (0, 1))
    models = sorted({unit.cluster for unit, _ in units})
    few = f"{evidence.counted(len(models), 'model')}: an interval over models needs {FEWEST_CLUSTERS}"
    found: dict[str, Any] = {"modality": name, "spearman": ranked.effect, "low": ranked.low, "high": ranked.high}
    found |= {"p": ranked.p, **_columns("pearson", linear), "pearson_p": linear.p}
    found |= {"models": models, "stacks": len(units), "n": sum(len(unit.one) for unit, _ in units)}
    return {**found, "p_note": over.DESCRIPTIVE, "note": few if len(models) < FEWEST_CLUSTERS else ""}


# -- the claim ---------------------------------------------------------------------------------------------------------


def _stacks_and_all(study: Study) -> dict[str, BlockStack | Study]:
    """The subjects of the claim: every stack, and all models together where there are several."""
    return {**stacks(study), **({ALL: study} if len(study) > 1 else {})}


@claim(of=_stacks_and_all, source=SOURCE, metrics=METRICS, margin=CORRELATION_MARGIN, about="training")
def drift_explains_anisotropy(given: BlockStack | Study) -> Finding:
    """Where representations have drifted further from the origin they are more anisotropic, and removing the drift
    removes most of the anisotropy.

    Spearman's correlation of ‖mean(h)‖ with the average cosine over the embedding and the blocks, in each stack.

    It must lie beyond .3, and the median over the sites of the share 1 − A(centred)/A beyond .5; both margins are ours.
    Taken at the last measured step. The interval is as wide as contexts (jackknife over folds) or the number of sites
    (Fisher's Z) make it. Neighbouring layers are alike, so that two profiles that have nothing to do with each other
    correlate: undecided where profiles whose changes go up or down by chance do as well too often (p > .02 of all
    choices of their signs), which takes seven sites at least. Seeds of one model share its profiles, and so may models
    of one family: their profiles turn together in that test. Pearson's correlation is told beside it, with its p.
    Two models or more are judged together too, over within-model ranks: the interval leaves out one model after another
    (Z, t of one degree less than models; three at least), and models that are not explained are named; p is then that
    of layers shuffled within models. Layers are no independent samples: every p describes. Models with untrained
    weights do not count among all, and copies with the same numbers count once.
    """
    return _of_stack(given) if isinstance(given, BlockStack) else _of_all(given)


def _of_stack(stack: BlockStack) -> Finding:
    stream = Stream.of(stack.run.model, stack)
    parts = _parts(stream)
    rest, pairs = list(stream.pairs(first="out").values()), list(stream.pairs().values())
    if len(rest) >= FEWEST_LAYERS:
        parts.append(_correlation(_FIRST, rest, ranked=True, margin=CORRELATION_MARGIN, needed=False))
    parts.append(_correlation(_LINEAR, pairs, ranked=False, needed=False))
    aspects = {_FIRST: (_FIRST,)} if len(rest) >= FEWEST_LAYERS else {}
    details = {"step": stream.step, "modality": stream.modality, "points": _points(stream)}

    def sentence(parts: Parts, part: Part) -> str:
        text = f"over {len(pairs)} sites{evidence.at_step(stream.step)} drift and average cosine"
        ways = {_RANK: "in rank", _LINEAR: "linearly"}
        results = [f"{word} at {_tested(parts[name])}" for name, word in ways.items() if parts[name].measured]
        text += f" correlate {' and '.join(results)}" if results else " have no correlation"
        share, first = parts[_SHARE], parts.get(_FIRST)
        text += f", and the median share of the cosine that goes with the mean is {share}" if share.measured else ""
        text += f"; what decides is the {part.name}, {part.outcome}"
        return text + (f" (without the first position {_tested(first)})" if first and first.measured else "")

    return Finding(parts, sentence, details, left_open=_few(pairs), aspects=aspects)


def _parts(stream: Stream) -> list[Part]:
    """The parts of the claim: rank correlation and share; the share is undecided where it was not measured."""
    pairs = list(stream.pairs().values())
    if not stream.counted("drift"):
        raise NotHere("drift at blocks", "measure it with --metrics drift")
    if len(pairs) < FEWEST_SITES:
        raise Missing(f"profile of {FEWEST_LAYERS} sites with drift and average_cosine", f"{len(pairs)} have both")
    first = _correlation(_RANK, pairs, ranked=True, margin=CORRELATION_MARGIN)
    share = explained_share(stream)
    if math.isfinite(share.value):
        second = Part.of(_SHARE, share, margin=SHARE_MARGIN, guard=True, bounds=engine.SHARE)
    else:
        second = Part.absent(_SHARE, Missing("explained_by_drift at the same sites", _HOW), margin=SHARE_MARGIN)
    few = _few(pairs) if first.measured else _note(stream, pairs, first)
    return [replace(first, reason=few).against(_walk(pairs)), replace(second, reason=_few(pairs) or second.reason)]


def _walk(pairs: Pairs) -> Walk:
    """The average cosine over sites, whose rank correlation with drift may be that of unrelated profiles."""
    drift, cosine = (np.array([pair[side].value for pair in pairs]) for side in (0, 1))
    return Walk.of([cosine], functools.partial(rank_correlations, drift), "sites", shared=True)


def _few(pairs: Pairs) -> str:
    return f"{len(pairs)} sites are too few, {FEWEST_LAYERS} are needed" if len(pairs) < FEWEST_LAYERS else ""


def _tested(part: Part) -> str:
    """A correlation with its interval and its p as text."""
    return f"{part}, p {'< 0.0001' if part.p < 1e-4 else f'= {figure(part.p)}'}"


def _of_all(study: Study) -> Finding:
    """The finding over all trained models together."""
    found, note = needed_streams(study)
    units = [unit for stream in found.values() if (unit := _unit(stream)) is not None]
    if len({unit.cluster for unit in units}) < 2:
        raise NotHere("second model with drift and average_cosine at three sites", "measure more models")
    linear = [unit for stream in found.values() if (unit := _unit(stream, ranked=False)) is not None]
    ranked = _pooled_part(units)
    few = "" if math.isfinite(ranked.low) else _FEW_MODELS
    walk = Walk.joined(_walk(list(stream.pairs().values())) for stream in found.values() if _unit(stream) is not None)
    first = replace(ranked, name=_RANK, margin=CORRELATION_MARGIN, reason=few).against(walk)
    parts = [first, _share_over_models(found)]
    parts.append(replace(_pooled_part(linear), name=_LINEAR, needed=False))
    outcomes = {name: _status(stream) for name, stream in found.items()}
    ends = {name: stream.step for name, stream in found.items()}
    details = {"models": outcomes, "ends": ends, "sites": sum(len(unit.one) for unit in units)}
    sentence = functools.partial(_all_sentence, outcomes=outcomes, stacks=len(units))
    return Finding(parts, sentence, details, several=_one_by_one, scope="for these models", note=note)


def _one_by_one(findings: Sequence[Finding]) -> Sentence:
    """The sentence over several seeds: a stack holds or fails if it does so in every seed, else it is undecided."""
    every = [finding.details["models"] for finding in findings]
    found = {name: {outcomes.get(name, "undecided") for outcomes in every} for name in every[0]}
    outcomes = {name: statuses.pop() if len(statuses) == 1 else "undecided" for name, statuses in found.items()}
    return functools.partial(_all_sentence, outcomes=outcomes, stacks=len(outcomes))


def _share_over_models(found: dict[str, Stream]) -> Part:
    """The mean over models of the median share, with its t interval over models."""
    shares: dict[str, list[float]] = {}
    for stream in found.values():
        value = explained_share(stream).value
        if math.isfinite(value):
            shares.setdefault(stream.model, []).append(value)
    values = [sum(of_model) / len(of_model) for of_model in shares.values()]
    if not values:
        return Part.absent(_SHARE, Missing("explained_by_drift", _HOW), margin=SHARE_MARGIN)
    half = t_interval(values)[0] if len(values) >= FEWEST_CLUSTERS else math.nan
    centre = sum(values) / len(values)
    more: dict[str, Any] = {"margin": SHARE_MARGIN, "guard": True, "bounds": engine.SHARE}
    more["reason"] = "" if math.isfinite(half) else _FEW_MODELS
    return Part(_SHARE, centre, centre - half, centre + half, degrees=len(values) - 1.0, **more)


def _all_sentence(parts: Parts, part: Part, *, outcomes: dict[str, str], stacks: int) -> str:
    text = f"over the sites of {stacks} stacks, each in its own ranks, drift and average cosine correlate at "
    text += f"{_tested(parts[_RANK])}, and linearly, each in its own standard deviations, at {_tested(parts[_LINEAR])}"
    share = parts[_SHARE]
    text += f", and the share of the cosine that goes with the mean is {share}" if share.measured else ""
    text += f"; what decides is the {part.name}, {part.outcome}; one by one it holds in "
    text += f"{sum(s == 'holds' for s in outcomes.values())} of {len(outcomes)}"
    for word, words in (("fails", "does not hold in"), ("undecided", "is open in")):
        names = [name for name, status in outcomes.items() if status == word]
        text += f", {words} {listed(names)}" if names else ""
    return text
