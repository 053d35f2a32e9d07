"""Other readings of the rows that a verdict on gradients may depend on: standardised coordinates, no first position.

A claim gives the parts that decide it as a function of how its runs are read; `reading_parts` has it do so again for
every reading that the table offers, and `depends_on_readings` compares. Where a reading turns "holds" into "fails", or
the reverse, the claim is undecided and says on what it depends; a reading that is itself undecided turns nothing, and
what a reading lacks stays as it is. That rule is ours. Only one choice changes at a time: where the table has frozen
directions, but none in a reading, that reading is compared with directions refitted at every step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from anisoscope.claims.engine.alternative import AS_CHOSEN, Alternative, reading
from anisoscope.claims.engine.claim import Part, Parts, judge
from anisoscope.claims.engine.evidence import Missing, Run
from anisoscope.claims.revisiting.period import FIT_WORDS, REFIT, main_fit

READINGS = (reading("coordinates", "standardised"), reading("first", "out"))
REFITTED = FIT_WORDS[REFIT]
_MOOT = {"coordinates": ": permuted"}  # columns of variance 1, permuted, are one more random control
Read = Callable[[Run], Run]
Settle = Callable[[dict[str, Part]], dict[str, Part]]


def refitted(phrase: str) -> str:
    """The words of a reading that has no frozen directions."""
    return f"{phrase} (refitted)"


def moot(run: Run, name: str) -> bool:
    """Whether a part has no meaning in the reading of a run."""
    return any(name.endswith(_MOOT[key]) for key in run.alternative.options if key in _MOOT)


def reading_parts(
    needed_of: Callable[[Read], Sequence[Part]],
    runs: Sequence[Run],
    *,
    metric: str = "gradient_energy",
    fit: str | None = None,
    **options: Any,
) -> list[Part]:
    """The parts that decide a claim, in every reading that `metric` has rows of; they do not decide.

    `needed_of` gives the parts from the runs as they are read; `fit`: the claim knows this one only.
    """
    parts: list[Part] = []
    for other in READINGS:
        offered = [run for run in runs if len(run.of(metric).where(**other.options))]
        if not offered or any(key in run.alternative.options for run in runs for key in other.options):
            continue
        fits = [fit or main_fit(run, metric, **options) for run in runs]
        same = fits == [fit or main_fit(run.also(other), metric, **options) for run in runs]
        words = other.phrase if same else refitted(other.phrase)
        try:
            found = needed_of(_reader(runs, other, fit=None if same else REFIT))
            before = [] if same else needed_of(_reader(runs, AS_CHOSEN, fit=REFIT))
        except Missing:
            continue
        if any(part.measured for part in found):
            parts += _beside(words, found) + _beside(REFITTED, before)
    return parts


def _reader(runs: Sequence[Run], other: Alternative, *, fit: str | None) -> Read:
    made = {id(run): replace(run.also(other), fit=fit or run.fit) for run in runs}
    return lambda run: made[id(run)]


def _beside(words: str, parts: Sequence[Part]) -> list[Part]:
    return [replace(part, name=f"{words}, {part.name}", needed=False) for part in parts if part.measured]


def read_as(words: str, parts: Parts) -> dict[str, Part]:
    """The parts of one reading under their own names."""
    start = f"{words}, "
    found = {name.removeprefix(start): part for name, part in parts.items() if name.startswith(start)}
    return {name: replace(part, needed=True) for name, part in found.items()}


def depends_on_readings(settle: Settle = dict) -> Settle:
    """Settle parts, and leave those that decide open where another reading of the rows gives the opposite."""
    return functools.partial(_compared, settle=settle)


def _compared(parts: dict[str, Part], *, settle: Settle) -> dict[str, Part]:
    names = [words for other in READINGS for words in (other.phrase, refitted(other.phrase))] + [REFITTED]
    own = {name: part for name, part in parts.items() if not any(name.startswith(f"{words}, ") for words in names)}
    settled = settle(own)
    needed = {name: part for name, part in own.items() if part.needed}
    status, reasons = _status(needed, settle), []
    for other in READINGS:
        moot = [_MOOT[key] for key in other.options if key in _MOOT]
        for words in (other.phrase, refitted(other.phrase)):
            members = read_as(words, parts)
            before = needed if words == other.phrase else {**needed, **read_as(REFITTED, parts)}
            kept = {name: part for name, part in before.items() if not name.endswith(tuple(moot))}
            if not members or _status(before, settle) != status:
                continue
            turned = _status({**kept, **members}, settle)
            if {status, turned} == {"holds", "fails"}:
                reasons.append(f"it depends on {other.noun}: {words} it {turned}")
    reason, rest = "; ".join(reasons), {name: part for name, part in parts.items() if name not in own}
    if reason:
        settled = {name: replace(part, reason=reason) if part.needed else part for name, part in settled.items()}
    return {**settled, **rest}


def _status(parts: Mapping[str, Part], settle: Settle) -> str:
    needed = [part for part in settle(dict(parts)).values() if part.needed]
    return judge(needed)[0] if needed else ""
