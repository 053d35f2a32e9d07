"""Whether the drift of the representations explains their anisotropy, in each model and over all of them.

Notation
    A      average cosine of a site; drift ‖mean(h)‖, unnormalised
    n      sites of a stack: the embedding and its blocks (what comes after the final norm is told apart)
    share  explained by drift, 1 − A(centred)/A, median over the sites
The drift in units of the mean norm, ‖mean(h)‖ / mean ‖h‖, is a near-identity of the average cosine: its square follows
A by construction, so it is shown and explains nothing. The share is near 1 by construction where the rows have much the
same norm; it tells the rows apart whose mean is made by a few long ones.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from anisoscope.claims.engine.blocks import BlockStack, at_step, stacks
from anisoscope.claims.engine.claim import claim, judged
from anisoscope.claims.engine.correlation import (
    DESCRIPTIVE,
    FEWEST_CLUSTERS,
    FEWEST_SITES,
    CorrelationUnit,
    correlated,
    models_interval,
    order_p,
    pearson,
    permutation_p,
    pooled_correlation,
    rank_correlation,
    ranks,
    sites_interval,
)
from anisoscope.claims.engine.evidence import Cell, Missing, NotHere, Readings, Study, studies
from anisoscope.claims.engine.part import (
    ALPHA,
    CORRELATION,
    SHARE,
    Finding,
    Part,
    Parts,
    Status,
    figure,
    judge,
    left_open,
    outcome,
    span,
    t_interval,
)
from anisoscope.claims.inherent.streams import (
    METRICS,
    MODALITIES,
    SOURCE,
    Stream,
    copies,
    listed,
    streams,
    trained_streams,
)
from anisoscope.claims.inherent.streams import uncounted_note as note_of
from anisoscope.results.quantity import Quantity, combine
from anisoscope.results.query import Row
from anisoscope.results.table import Table

CORRELATION_MARGIN = 0.3
SHARE_MARGIN = 0.5
FEWEST_LAYERS = 6  # for a verdict: five points reach p ≤ .05 only in perfect order
NEAR_IDENTITY = "a near-identity of the average cosine, which it follows by construction"
ALL = "all models"
_RANK, _SHARE, _LINEAR, _FIRST = (
    "rank correlation",
    "explained share",
    "linear correlation",
    "without the first position",
)
Pairs = Sequence[tuple[Row, Row]]
_HOW = "measure it with --metrics explained_by_drift"


# what the views read


def correlations(table: Table) -> list[dict[str, Any]]:
    """Drift against average cosine over the sites of every stack of every model, at its last step, for each seed."""
    return [_record(stream) for study in studies(table, METRICS) for stream in streams(study).values()]


def _record(stream: Stream) -> dict[str, Any]:
    pairs = list(stream.pairs().values())
    linear, ranked = (_correlation("", pairs, ranked=ranked) for ranked in (False, True))
    share = Part.of(_SHARE, explained_share(stream), bounds=SHARE)
    points = _points(stream)
    counted = [point for point in points if point["counted"]]
    squared = [point["relative_drift"] ** 2 for point in counted]
    return {
        "model": stream.model,
        "stack": stream.stack_name,
        "subject": stream.subject,
        "modality": stream.modality,
        "role": stream.role,
        "seed": stream.run.seed,
        "step": stream.step,
        "kind": stream.kind,
        "untrained": stream.untrained,
        "doubt": stream.doubt,
        "attends": stream.attends,
        "n": len(pairs),
        **_columns("pearson", linear),
        "pearson_p": linear.p,
        **_columns("spearman", ranked),
        "spearman_p": ranked.p,
        "p_note": DESCRIPTIVE,
        **_columns("explained", share),
        "status": _status(stream),
        "near_identity": pearson(squared, [point["cosine"] for point in counted]),
        "near_identity_note": NEAR_IDENTITY,
        "points": points,
        "note": _note(stream, pairs, linear),
    }


def _correlation(name: str, pairs: Pairs, *, ranked: bool, **more: Any) -> Part:
    """Drift with average cosine over sites, with the interval and the p that know how many sites there are."""
    one, two = ([pair[side].quantity for pair in pairs] for side in (0, 1))
    function = rank_correlation if ranked else pearson
    quantity = correlated(one, two, function) if len(pairs) >= FEWEST_SITES else Quantity(math.nan)
    low, high = sites_interval(quantity, len(pairs), ranked=ranked)
    values = [[number.value for number in side] for side in (one, two)]
    p = order_p(*([ranks(np.array(side)).tolist() for side in values] if ranked else values))
    return Part(name, quantity.value, low, high, p=p, bounds=CORRELATION, **more)


def _columns(name: str, part: Part) -> dict[str, float]:
    return {name: part.effect, f"{name}_low": part.low, f"{name}_high": part.high}


def _note(stream: Stream, pairs: Pairs, linear: Part) -> str:
    """Why a number is not there."""
    if not stream.counted("drift"):
        return "drift was not measured"
    if len(pairs) < FEWEST_SITES:
        return f"{len(pairs)} site{'s' if len(pairs) != 1 else ''} only: a correlation needs {FEWEST_SITES}"
    if not linear.measured:
        constant = "drift" if len({drift.value for drift, _ in pairs}) == 1 else "average cosine"
        return f"the {constant} is the same at every site, so there is no correlation"
    if not math.isfinite(linear.low):
        return "too few replicates over context folds: no interval"
    return ""


def _points(stream: Stream) -> list[dict[str, Any]]:
    """Every site with its numbers, the final norm too, which the correlation leaves out."""
    cosine, drift, norm, relative, share = (stream.sites(metric) for metric in METRICS)
    shown = [item for item in cosine.items() if item[0].kind in ("embed", stream.kind, "final")]
    points = []
    for cell, row in sorted(shown, key=lambda item: (item[0].layer, item[0].kind == "final")):
        low, high = row.quantity.interval()
        found = {"layer": cell.layer, "depth": row.depth, "kind": cell.kind, "counted": cell.kind != "final"}
        found |= {"cosine": row.value, "low": low, "high": high, "drift": _value(drift, cell)}
        length = _value(norm, cell)  # the drift is told in its unit, too
        found["relative_drift"] = found["drift"] / length if cell in drift and length > 0 else _value(relative, cell)
        points.append({**found, "explained": _value(share, cell)})
    return points


def _value(readings: Readings, cell: Cell) -> float:
    return readings[cell].value if cell in readings else math.nan


def explained_share(stream: Stream) -> Quantity:
    """The median over sites of the share that vanishes with the mean; NaN where it was not measured."""
    parts = [reading.quantity for reading in stream.counted("explained_by_drift").values()]
    if not parts:
        return Quantity(math.nan)
    if len({len(part.folds) for part in parts}) > 1 or not parts[0].folds:
        return Quantity(statistics.median(part.value for part in parts))
    return combine(parts, lambda values: statistics.median(values) if all(map(math.isfinite, values)) else math.nan)


def _status(stream: Stream) -> str:
    try:
        return judge(_parts(stream))[0]
    except Missing:
        return "undecided"


def pooled(table: Table, *, seed: int = 0) -> list[dict[str, Any]]:
    """The correlations over within-model ranks and values, of all trained models and of each modality.

    Spearman's takes the ranks within a stack, Pearson's the values in its own standard deviations. p from shuffling the
    sites within every stack (9,999 draws, or all orders where they are fewer), the interval over models with all their
    stacks and seeds, that of the claim; a model that is a copy of another is counted once.
    """
    units: dict[str, list[tuple[CorrelationUnit, CorrelationUnit]]] = {name: [] for name in ("", *MODALITIES)}
    for study in studies(table, METRICS):
        found = {name: stream for name, stream in streams(study).items() if not stream.doubt}
        for stream in (found[name] for name in found if name not in copies(found)):
            if (unit := _unit(stream)) is not None and (linear := _unit(stream, ranked=False)) is not None:
                for name in ("", stream.modality):
                    units.setdefault(name, []).append((unit, linear))
    return [_pooled_record(name or "all", mine, seed=seed) for name, mine in units.items() if mine]


def _unit(stream: Stream, *, ranked: bool = True) -> CorrelationUnit | None:
    """The ranks or values of a stack; none where there is nothing to rank."""
    pairs = [(drift.value, cosine.value) for drift, cosine in stream.pairs().values()]
    if len(pairs) < FEWEST_SITES or not math.isfinite(rank_correlation(*zip(*pairs, strict=True))):
        return None
    return CorrelationUnit.of(stream.model, *zip(*pairs, strict=True), ranked=ranked)


def _pooled_record(name: str, units: Sequence[tuple[CorrelationUnit, CorrelationUnit]], *, seed: int) -> dict[str, Any]:
    ranked, linear = ([pair[side] for pair in units] for side in (0, 1))
    low, high = models_interval(ranked)
    models = sorted({unit.cluster for unit in ranked})
    few = f"{len(models)} model{'s' if len(models) > 1 else ''}: an interval over models needs {FEWEST_CLUSTERS}"
    numbers = {"spearman": pooled_correlation(ranked), "low": low, "high": high, "p": permutation_p(ranked, seed=seed)}
    ends = dict(zip(("pearson_low", "pearson_high"), models_interval(linear), strict=True))
    numbers |= {"pearson": pooled_correlation(linear), **ends, "pearson_p": permutation_p(linear, seed=seed)}
    counts = {"models": models, "stacks": len(units), "n": sum(len(unit.one) for unit in ranked)}
    words = {"p_note": DESCRIPTIVE, "note": few if len(models) < FEWEST_CLUSTERS else ""}
    return {"modality": name, **numbers, **counts, **words}


# the claim


@claim(
    "drift_explains_anisotropy",
    statement="Where representations have drifted further from the origin they are more anisotropic, and removing the "
    "drift removes most of the anisotropy.",
    source=SOURCE,
    metrics=METRICS,
    margin=CORRELATION_MARGIN,
)
def drift_explains_anisotropy(study: Study) -> dict[str, Finding]:
    """Spearman's correlation of ‖mean(h)‖ with the average cosine over the embedding and the blocks, in each stack.

    It must lie beyond .3 with p ≤ .05, and the median over the sites of the share 1 − A(centred)/A beyond .5; both
    margins are ours. Taken at the last measured step; six sites at least, since five reach p ≤ .05 only in perfect
    order. Its interval is as wide as contexts (jackknife over folds) or the number of sites (Fisher's Z) make it; p
    tries every order of up to nine sites and is by t beyond. Pearson's correlation is told beside it, with the same.
    Two models or more are judged together too, over within-model ranks: the interval leaves out one model after another
    (Z, t of one degree less than models; three at least), and models that are not explained are named; p is then that
    of layers shuffled within models. Layers are no independent samples: every p describes. Models with untrained
    weights do not count among all, and copies with the same numbers count once.
    """
    found = {name: judged(_of_stack, stack, margin=CORRELATION_MARGIN) for name, stack in stacks(study).items()}
    if len(study) > 1:
        found[ALL] = judged(_of_all, study, margin=CORRELATION_MARGIN)
    return found


def _of_stack(stack: BlockStack) -> Finding:
    stream = Stream.of(stack.run.model, stack)
    parts = _parts(stream)
    rest = list(stream.pairs(first="out").values())
    if len(rest) >= FEWEST_LAYERS:
        parts.append(_correlation(_FIRST, rest, ranked=True, margin=CORRELATION_MARGIN, needed=False))
    parts.append(_correlation(_LINEAR, list(stream.pairs().values()), ranked=False, needed=False))
    aspects = {_FIRST: (_FIRST,)} if len(rest) >= FEWEST_LAYERS else {}
    details = {"step": stream.step, "modality": stream.modality, "points": _points(stream)}
    sentence = functools.partial(_stack_sentence, n=len(stream.pairs()), when=at_step(stream.step))
    settle = functools.partial(left_open, reason=_few(list(stream.pairs().values())))
    return Finding(tuple(parts), sentence, details, settle=settle, aspects=aspects)


def _parts(stream: Stream) -> list[Part]:
    """Both halves of the claim; the share stays open where it was not measured."""
    pairs = list(stream.pairs().values())
    if not stream.counted("drift"):
        raise NotHere("drift at blocks", "measure it with --metrics drift")
    if len(pairs) < FEWEST_SITES:
        raise Missing(f"profile of {FEWEST_LAYERS} sites with drift and average_cosine", f"{len(pairs)} have both")
    first = _correlation(_RANK, pairs, ranked=True, margin=CORRELATION_MARGIN)
    share = explained_share(stream)
    if math.isfinite(share.value):
        second = Part.of(_SHARE, share, margin=SHARE_MARGIN, p=math.nan, guard=True, bounds=SHARE)
    else:
        second = Part.absent(_SHARE, str(Missing("explained_by_drift at the same sites", _HOW)), margin=SHARE_MARGIN)
    return [replace(first, reason=_doubt(stream, pairs, first)), replace(second, reason=_few(pairs) or second.reason)]


def _few(pairs: Pairs) -> str:
    return f"{len(pairs)} sites are too few, {FEWEST_LAYERS} are needed" if len(pairs) < FEWEST_LAYERS else ""


def _doubt(stream: Stream, pairs: Pairs, part: Part) -> str:
    """Why a correlation decides nothing, whatever its interval is."""
    if not part.measured:
        return _note(stream, pairs, part)
    lucky = part.low > part.margin and not part.p <= ALPHA
    return _few(pairs) or (f"other orders of the sites do as well too often (p = {figure(part.p)})" if lucky else "")


def _stack_sentence(parts: Parts, status: Status, part: Part, *, n: int, when: str) -> str:
    text = f"over {n} sites{when} drift and average cosine"
    told = [f"{word} at {_tested(parts[name])}" for name, word in _WAYS.items() if parts[name].measured]
    share = parts[_SHARE]
    text += f" correlate {' and '.join(told)}" if told else " have no correlation"
    text += f", and the median share of the cosine that goes with the mean is {span(share)}" if share.measured else ""
    text += f"; what decides is the {part.name}, {outcome(status, part)}"
    first = parts.get(_FIRST)
    return text + (f" (without the first position {_tested(first)})" if first and first.measured else "")


_WAYS = {_RANK: "in rank", _LINEAR: "linearly"}


def _tested(part: Part) -> str:
    """A number with its interval and its p."""
    return f"{span(part)}, p {'< 0.0001' if part.p < 1e-4 else f'= {figure(part.p)}'}"


def _of_all(study: Study) -> Finding:
    """All trained models together."""
    found = trained_streams(study)
    units = {name: unit for name, stream in found.items() if (unit := _unit(stream)) is not None}
    if len({unit.cluster for unit in units.values()}) < 2:
        raise NotHere("second model with drift and average_cosine at three sites", "measure more models")
    mine = list(units.values())
    low, high = models_interval(mine)
    value, p = pooled_correlation(mine), permutation_p(mine)
    few = "" if math.isfinite(low) else f"an interval over models needs {FEWEST_CLUSTERS} of them"
    linear = [unit for stream in found.values() if (unit := _unit(stream, ranked=False)) is not None]
    within = models_interval(linear)
    parts = [Part(_RANK, value, low, high, margin=CORRELATION_MARGIN, p=p, reason=few, bounds=CORRELATION)]
    parts.append(_share_over_models(found))
    more = {"p": permutation_p(linear), "bounds": CORRELATION, "needed": False}
    parts.append(Part(_LINEAR, pooled_correlation(linear), *within, **more))  # type: ignore[arg-type]
    outcomes = {name: _status(stream) for name, stream in found.items()}
    ends = {name: stream.step for name, stream in found.items()}
    details = {"models": outcomes, "ends": ends, "sites": sum(len(unit.one) for unit in mine)}
    sentence = functools.partial(_all_sentence, outcomes=outcomes, stacks=len(mine))
    about: dict[str, Any] = {"several": _one_by_one, "scope": "for these models", "note": note_of(study)}
    return Finding(tuple(parts), sentence, details, **about)


def _one_by_one(findings: Sequence[Finding]) -> Any:
    """The sentence over several seeds: a stack holds or fails where it does so in each, else it is open."""
    every = [finding.details["models"] for finding in findings]
    found = {name: {outcomes.get(name, "undecided") for outcomes in every} for name in every[0]}
    outcomes = {name: told.pop() if len(told) == 1 else "undecided" for name, told in found.items()}
    return functools.partial(_all_sentence, outcomes=outcomes, stacks=len(outcomes))


def _share_over_models(found: dict[str, Stream]) -> Part:
    """The mean over models of the median share, with its t interval over models."""
    shares: dict[str, list[float]] = {}
    for stream in found.values():
        value = explained_share(stream).value
        if math.isfinite(value):
            shares.setdefault(stream.model, []).append(value)
    values = [sum(mine) / len(mine) for mine in shares.values()]
    if not values:
        return Part.absent(_SHARE, str(Missing("explained_by_drift", _HOW)), margin=SHARE_MARGIN)
    half = t_interval(values)[0] if len(values) >= FEWEST_CLUSTERS else math.nan
    centre = sum(values) / len(values)
    few = "" if math.isfinite(half) else f"an interval over models needs {FEWEST_CLUSTERS} of them"
    more = {"margin": SHARE_MARGIN, "guard": True, "reason": few, "bounds": SHARE}
    return Part(_SHARE, centre, centre - half, centre + half, **more)  # type: ignore[arg-type]


def _all_sentence(parts: Parts, status: Status, part: Part, *, outcomes: dict[str, str], stacks: int) -> str:
    text = f"over the sites of {stacks} stacks, each in its own ranks, drift and average cosine correlate at "
    text += f"{_tested(parts[_RANK])}, and linearly, each in its own standard deviations, at {_tested(parts[_LINEAR])}"
    share = parts[_SHARE]
    text += f", and the share of the cosine that goes with the mean is {span(share)}" if share.measured else ""
    text += f"; what decides is the {part.name}, {outcome(status, part)}; one by one it holds in "
    text += f"{sum(s == 'holds' for s in outcomes.values())} of {len(outcomes)}"
    for word, words in (("fails", "does not hold in"), ("undecided", "is open in")):
        names = [name for name, status in outcomes.items() if status == word]
        text += f", {words} {listed(names)}" if names else ""
    return text


def explained_word(record: dict[str, Any]) -> str:
    """Explained by drift or not, in a word for a table.

    >>> explained_word({"status": "fails"})
    'no'
    """
    return {"holds": "yes", "fails": "no"}.get(str(record["status"]), "open")
