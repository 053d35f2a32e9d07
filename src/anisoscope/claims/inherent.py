"""The counter-claim: that anisotropy is not inherent to attention, by either of two routes on the same table.

Notation
    A      average cosine of a block; the largest over the blocks of a stack counts
    K      stacks with attention that are looked at; the best of them is chosen, and of the two routes the better: all
           intervals hold at once (Bonferroni: 1 − .05/2K for each stack, 1 − .05/2 for the second route)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from anisoscope.claims.claim import attempt, claim
from anisoscope.claims.evidence import NotHere, Study
from anisoscope.claims.learned import fall, learned
from anisoscope.claims.modalities import ANISOTROPIC, DIFFERENCE_MARGIN, MORE, RELU, difference, ends_of, turned
from anisoscope.claims.part import CORRELATION, Finding, Part, Parts, Status, span
from anisoscope.claims.quantity import combine
from anisoscope.claims.streams import Stream, listed, trained_streams, uncounted_note

FEWEST_WITH, FEWEST_WITHOUT = 3, 1  # trained models with attention and without any
_WITHOUT = "without attention"
_LARGEST = "largest cosine: "  # of the blocks of a stack


@claim(
    "not_inherent",
    statement="Anisotropy is not inherent to attention: a model with attention does without it, or models without "
    "attention are as anisotropic.",
    source="the counter-claim to Godey et al. 2024, arXiv:2401.12143; after Machina & Mercer 2024, who found large "
    "Pythia models nearly isotropic",
    metrics=("average_cosine",),
    margin=ANISOTROPIC,
)
def not_inherent(study: Study) -> dict[str, Finding]:
    """Two routes on the same table; it holds by either, and fails only where both fail.

    First, a stack with attention whose average cosine stays below .1 at every block (the largest of them counts).
    Second, models without any attention whose average cosine over blocks is not more than .1 below that of the models
    with it (interval over models, or over contexts where a side has one); a ReLU at the end of their stages can do that
    by itself. The best of many is chosen, so the intervals hold for all stacks and the second route at once
    (Bonferroni). So that it can fail as well as hold it needs three trained models with attention and one without any.
    Models with untrained weights do not count, nor do those whose loss (on the held-out probe where there is one) fell
    by less than a tenth since step 0: before training almost any is isotropic. Where the table has no loss, that is
    said.
    """
    return {"with and without attention": attempt(_not_inherent, study, margin=ANISOTROPIC)}


def _not_inherent(study: Study) -> Finding:
    found = trained_streams(study)
    attention = {name: s for name, s in found.items() if s.attends}
    without = {name: s for name, s in found.items() if not s.attends}
    if not attention:
        raise NotHere(f"{FEWEST_WITH} trained models with attention that have average_cosine at blocks", MORE)
    routes = 2 if without else 1
    parts = [_largest_part(name, stream, looks=routes * len(attention)) for name, stream in attention.items()]
    if without:
        sides = (without.values(), attention.values())
        parts.append(difference(_WITHOUT, *sides, margin=-DIFFERENCE_MARGIN, looks=routes))
    models = [len({stream.model for stream in side.values()}) for side in (attention, without)]
    names = {"attention": list(attention), "without attention": list(without)}
    details: dict[str, Any] = {"models": names, "ends": ends_of(found)}
    details |= {"missing": True} if sum(models) < 2 else {}
    note = "; ".join(filter(None, (_unknown(found), RELU if without else "", uncounted_note(study))))
    settle = functools.partial(_either, few=_too_few(*models))
    return Finding(tuple(parts), _either_sentence, details, settle=settle, scope="for these models", note=note)


def _too_few(attention: int, without: int) -> str:
    """Why the table cannot decide; empty where it can."""
    if attention >= FEWEST_WITH and without >= FEWEST_WITHOUT:
        return ""
    needed = f"it takes {FEWEST_WITH} trained models with attention and {FEWEST_WITHOUT} without any"
    return f"{needed}, and the table has {attention} and {without}"


# whether a model has learned


def _unknown(counted: Mapping[str, Stream]) -> str:
    """Names the models of which the table does not tell whether they learned anything."""
    names = [name for name, stream in counted.items() if not learned(fall(stream.run, stream.step))]
    why = "learned anything is not known, since the table has no loss of the first and the last step"
    return f"whether {listed(names)} {why}" if names else ""


# the two routes


def _largest_part(name: str, stream: Stream, *, looks: int) -> Part:
    """The largest average cosine of the blocks, which must lie below the margin."""
    largest = combine([reading.quantity for reading in stream.blocks().values()], _max)
    more: dict[str, Any] = {"margin": ANISOTROPIC, "p": math.nan, "looks": looks, "below": True, "bounds": CORRELATION}
    return Part.of(f"{_LARGEST}{name}", largest, **more)


def _max(values: Sequence[float]) -> float:
    return max(values) if all(map(math.isfinite, values)) else math.nan


def _either(parts: dict[str, Part], *, few: str) -> dict[str, Part]:
    """Only the better route decides; none does where the table has too few models."""
    decides = _best(list(parts.values()))
    told = {name: replace(part, needed=False) for name, part in parts.items()}
    return {**told, decides.name: replace(decides, needed=True, reason=few or decides.reason)}


def _best(parts: Sequence[Part]) -> Part:
    """The one that holds most surely, or fails least."""
    order = {"holds": 2, "undecided": 1, "fails": 0}
    return max(parts, key=lambda p: (order[p.status], p.lead if math.isfinite(p.lead) else -math.inf))


def _either_sentence(parts: Parts, status: Status, part: Part) -> str:
    stacks = [p for name, p in parts.items() if name.startswith(_LARGEST)]
    lowest = _best([replace(p, reason="") for p in stacks])
    text = f"of {len(stacks)} stack{'s' if len(stacks) > 1 else ''} with attention "
    text += f"{lowest.name.removeprefix(_LARGEST)} comes closest to isotropy, with an average cosine of "
    text += f"{span(lowest)} at its most anisotropic block, "
    text += _FIRST_ROUTE[lowest.status]
    second = parts.get(_WITHOUT)
    if second is None or not second.measured:
        return text
    words = f"{span(second)} higher" if second.effect >= 0 else f"{span(turned(second))} lower"
    text += f"; in models without attention the average cosine over blocks is {words} than in those with it, "
    return text + _SECOND_ROUTE[replace(second, reason="").status]


_FIRST_ROUTE: dict[Status, str] = {
    "holds": f"short of the {ANISOTROPIC} from which it counts as anisotropic",
    "fails": f"beyond the {ANISOTROPIC} from which it counts as anisotropic",
    "undecided": f"which may lie on either side of the {ANISOTROPIC} from which it counts as anisotropic",
}
_SECOND_ROUTE: dict[Status, str] = {
    "holds": f"so they are at least as anisotropic, to within {DIFFERENCE_MARGIN}",
    "fails": f"so they are less anisotropic by more than {DIFFERENCE_MARGIN}",
    "undecided": f"which may or may not be within {DIFFERENCE_MARGIN}",
}
