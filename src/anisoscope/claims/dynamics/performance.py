"""Verdicts of the performance study: an effect holds beyond its margin, fails short of it, else is undecided."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from anisoscope.claims.engine.claim import Verdict
from anisoscope.claims.engine.part import Part, figure, outcome, span
from anisoscope.metrics.engine.estimate import jackknife
from anisoscope.studies.performance.correlation import (
    FEWEST,
    PerformanceResults,
    ScoreSeries,
    descriptive_p,
    over_contexts,
    over_points,
)

ACCURACY = 0.01  # one point in a hundred
NATS = 0.01
CORRELATION = 0.3
FEW = 6  # checkpoints below which one of them decides
REPAIRED = {
    "mean": "Removing the mean",
    "all_but_top": "Removing the mean and the top directions",
    "whitened": "Whitening",
}
SAME = "a shift changes no probe with a free intercept, so this is exactly 0 by construction"


def judge(results: PerformanceResults) -> list[Verdict]:
    """Every finding about one model, at its last checkpoint and over its checkpoints."""
    found: list[Verdict] = []
    for repair, words in REPAIRED.items():
        found += [v for v in _repair(results, repair, words) if v is not None]
    found += list(_over_checkpoints(results))
    found += list(_over_layers(results))
    return found


def _repair(results: PerformanceResults, repair: str, words: str) -> Iterator[Verdict | None]:
    step = results.steps[-1]
    tasks = results.tasks()
    probes = [("probe_accuracy", f"against=raw;repair={repair};task={task}") for task in tasks]
    yield _gain(
        results,
        f"{repair}_improves_probe",
        f"{words} improves linear probes",
        probes,
        step=step,
        margin=ACCURACY,
        told="the accuracy changes by {} against raw rows",
        remark=SAME if repair == "mean" else "",
    )
    near = [("probe_accuracy", f"against=raw;probe=cosine;repair={repair};task={task}") for task in tasks]
    yield _gain(
        results,
        f"{repair}_improves_cosine",
        f"{words} improves the nearest class mean by cosine",
        near,
        step=step,
        margin=ACCURACY,
        told="the accuracy changes by {} against raw rows",
    )
    yield _gain(
        results,
        f"{repair}_improves_readout",
        f"{words} lowers the loss of a fresh readout",
        [("lm_loss", f"against=raw;reading=readout;repair={repair}")],
        step=step,
        margin=NATS,
        sign=-1,
        told="the gain is {} nats of loss against raw rows",
        remark=SAME if repair == "mean" else "",
    )
    yield _gain(
        results,
        f"{repair}_harms_model",
        f"{words} inside the network harms the model's own loss",
        [("lm_loss", f"against=raw;reading=patched;repair={repair}")],
        step=step,
        margin=NATS,
        told="the loss rises by {} nats against raw rows",
    )


def _gain(
    results: PerformanceResults,
    claim: str,
    statement: str,
    names: Sequence[tuple[str, str]],
    *,
    step: int | None,
    margin: float,
    told: str,
    sign: int = 1,
    remark: str = "",
) -> Verdict | None:
    """The mean of a paired difference over sites (and tasks), with its jackknife over context folds."""
    series = results.mean_over(names, [step]) if names else None
    if series is None:
        return None
    effect = sign * float(series.value[0]) + 0.0
    low, high = jackknife(effect, (sign * series.folds[0]).tolist(), bounds=(None, None))
    part = Part("mean over sites", effect, low, high, margin=margin)
    by_site = _by_site(results, names, step, sign=sign)
    best = max(by_site, key=lambda p: p.effect)
    why = f"{told.format(span(part))}, the mean over {len(by_site)} sites"
    why += f" and {len(names)} tasks" if len(names) > 1 else ""
    why += f", {outcome(part.status, part)}"
    if any(one.effect != best.effect for one in by_site):
        why += f"; highest {best.name} ({span(best)})"
    return _verdict(results, claim, statement, part, why + (f"; {remark}" if remark else ""), parts=[part, *by_site])


def _by_site(
    results: PerformanceResults, names: Sequence[tuple[str, str]], step: int | None, *, sign: int
) -> list[Part]:
    parts = []
    for site in results.sites:
        series = results.series(names, [(step, site)])
        if series is not None:
            effect = sign * float(series.value[0]) + 0.0
            low, high = jackknife(effect, (sign * series.folds[0]).tolist(), bounds=(None, None))
            parts.append(Part(_place(site), effect, low, high, needed=False))
    return parts


def _place(site: tuple[Any, ...]) -> str:
    return {"embed": "at the embedding", "final": "after the final norm"}.get(site[2], f"after block {site[1]}")


def _over_checkpoints(results: PerformanceResults) -> Iterator[Verdict]:
    for performance, sign, words in (("loss", 1, "a higher loss"), ("probe", -1, "worse linear probes")):
        of = results.performances().get(performance)
        if of is None:
            continue
        x = results.mean_over([("svd_ratio", "repair=raw")], results.steps)
        y = results.mean_over(of, results.steps)
        statement = f"Over checkpoints, more anisotropy (σ₁/Σσ) goes with {words}"
        claim = f"anisotropy_worse_{performance}_checkpoints"
        if x is None or y is None or len(results.steps) < FEWEST:
            if len(results.steps) > 1:
                few = f"{len(results.steps)} checkpoints were measured and a correlation needs {FEWEST}"
                yield _verdict(results, claim, statement, Part.absent("rank correlation", few, margin=CORRELATION), few)
            continue
        yield _correlation(results, claim, statement, x, y, sign=sign, points="checkpoints")


def _over_layers(results: PerformanceResults) -> Iterator[Verdict]:
    places = [(results.steps[-1], site) for site in results.sites]
    if len(places) < FEWEST:
        return
    for performance, sign, words in (("readout", 1, "a higher readout loss"), ("probe", -1, "worse linear probes")):
        of = results.performances().get(performance)
        x = results.series([("svd_ratio", "repair=raw")], places)
        y = results.series(of, places) if of else None
        if x is not None and y is not None:
            statement = f"Over layers, more anisotropy (σ₁/Σσ) goes with {words}"
            claim = f"anisotropy_worse_{performance}_layers"
            yield _correlation(results, claim, statement, x, y, sign=sign, points="layers")


def _correlation(
    results: PerformanceResults, claim: str, statement: str, x: ScoreSeries, y: ScoreSeries, *, sign: int, points: str
) -> Verdict:
    """Both intervals must lie beyond the margin: over contexts and over checkpoints (or layers)."""
    turned = ScoreSeries(sign * y.value, sign * y.folds)
    noise, hang = over_contexts(x, turned, "spearman"), over_points(x, turned, "spearman")
    ends = np.array([[noise.low, noise.high], [hang.low, hang.high]])
    low, high = (float(ends[:, 0].min()), float(ends[:, 1].max())) if np.isfinite(ends).all() else (math.nan, math.nan)
    few = len(x.value) < FEW
    reason = f"{len(x.value)} {points} are too few: any one of them can turn it" if few else ""
    part = Part("rank correlation", noise.value, low, high, margin=CORRELATION, reason=reason)
    parts = [
        part,
        Part("over contexts", noise.value, noise.low, noise.high, needed=False),
        Part(f"over {points}", hang.value, hang.low, hang.high, needed=False),
    ]
    why = (
        f"Spearman {span(part)} over {len(x.value)} {points} of one run, signed so that more is worse, "
        f"{outcome(part.status, part)}{_spans(parts[1:])}; they are not independent, so this describes"
    )
    p = descriptive_p(x, turned, "spearman")
    why += f"; undecided because {reason}" if reason else ""
    return _verdict(results, claim, statement, part, why, parts=parts, p=p)


def _spans(parts: Sequence[Part]) -> str:
    """`; leaving out contexts [low, high], …` of the intervals that there are; nothing where there is none."""
    known = [part for part in parts if math.isfinite(part.low) and math.isfinite(part.high)]
    words = (f"leaving out {p.name.removeprefix('over ')} [{figure(p.low)}, {figure(p.high)}]" for p in known)
    return f"; {', '.join(words)}" if known else ""


def _verdict(
    results: PerformanceResults,
    claim: str,
    statement: str,
    part: Part,
    why: str,
    *,
    parts: Sequence[Part] = (),
    p: float = math.nan,
) -> Verdict:
    return Verdict(
        claim=claim,
        statement=statement,
        status=part.status,
        effect=part.effect,
        low=part.low,
        high=part.high,
        p=p,
        margin=part.margin,
        why=why[0].upper() + why[1:].rstrip(".") + ".",
        subject=results.model,
        details={"parts": [one.record() for one in parts]},
    )
