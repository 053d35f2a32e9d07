"""Whether estimators of intrinsic dimension tell the same story, so that no claim hangs on one of them."""

from __future__ import annotations

import functools
import itertools
import math

from anisoscope.claims.engine.blocks import FEWEST_BLOCKS, BlockStack, at_step, curve_records, stacks
from anisoscope.claims.engine.claim import claim
from anisoscope.claims.engine.correlation import rank_correlation
from anisoscope.claims.engine.curve import Curve
from anisoscope.claims.engine.evidence import Missing, NotHere, last_step
from anisoscope.claims.engine.part import CORRELATION, Finding, Part, Parts, Status, outcome, span
from anisoscope.claims.shape.phases import ESTIMATORS
from anisoscope.results.quantity import combine

AGREEMENT_MARGIN = 0.5


@claim(
    "estimators_agree",
    of=stacks,
    statement="TwoNN, Levina–Bickel and GRIDE agree on which blocks have the higher intrinsic dimension.",
    source="not in the paper: a check of its estimator against others",
    metrics=tuple(ESTIMATORS),
    margin=AGREEMENT_MARGIN,
)
def estimators_agree(stack: BlockStack) -> Finding:
    """Spearman's correlation over blocks of the profiles of each two estimators, at the last measured step."""
    found = {name: stack.blocks(name) for name in ESTIMATORS}
    found = {name: readings for name, readings in found.items() if readings}
    if len(found) < 2:
        raise NotHere("two estimators of intrinsic dimension", "measure two_nn, levina_bickel and gride")
    step = last_step([cell for readings in found.values() for cell in readings])
    layers = sorted(set.intersection(*({c.layer for c in r if c.step == step} for r in found.values())))
    if len(layers) < FEWEST_BLOCKS:
        raise Missing(f"profile of {FEWEST_BLOCKS} blocks by two estimators", f"{len(layers)} have numbers of all")
    at = {n: {c.layer: row.quantity for c, row in rows.items() if c.step == step} for n, rows in found.items()}
    numbers = {name: [mine[layer] for layer in layers] for name, mine in at.items()}
    parts = []
    for one, two in itertools.combinations(numbers, 2):
        quantity = combine(
            [*numbers[one], *numbers[two]], lambda v: rank_correlation(v[: len(v) // 2], v[len(v) // 2 :])
        )
        parts.append(Part.of(f"{one} and {two}", quantity, margin=AGREEMENT_MARGIN, p=math.nan, bounds=CORRELATION))
    depths = [layer / max(layers) for layer in layers]
    details = {"step": step, "profiles": {n: curve_records(Curve.of(layers, depths, q)) for n, q in numbers.items()}}
    return Finding(tuple(parts), functools.partial(_sentence, blocks=len(layers), when=at_step(step)), details)


def _sentence(parts: Parts, status: Status, part: Part, *, blocks: int, when: str) -> str:
    told = [f"{span(p)} ({_named(name)})" for name, p in parts.items() if p.measured]
    text = f"over {blocks} blocks{when} the profiles of two estimators correlate in rank at {', '.join(told)}; the "
    return text + f"least sure is {_named(part.name)}, {outcome(status, part)}"


def _named(pair: str) -> str:
    return " and ".join(ESTIMATORS[name] for name in pair.split(" and "))
