"""Seeds that end at different steps: a mean over them is taken at one step, the last that all of them have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anisoscope.claims.part import Finding


def at_one_step(findings: Sequence[Finding]) -> tuple[list[Finding], str]:
    """The findings of the seeds, all at the last step that they share; where there is none, why they cannot be pooled.

    A finding says its step in `details["step"]` and can be asked for again with `until`; those that say none are left
    alone. Step 0 does not count as shared where a seed went on: it is no result of training.
    """
    own = [_step(finding) for finding in findings]
    found = list(findings)
    while len(steps := {_step(finding) for finding in found}) > 1:
        known = [step for step in steps if step is not None]
        if len(known) < len(steps):
            return list(findings), _apart(own)
        nearest = min(known)
        found = [f if _step(f) == nearest or f.until is None else f.until(nearest) for f in found]
        if nearest == 0 or {_step(finding) for finding in found} == steps:
            return list(findings), _apart(own)
    return _noted(found, own), ""


def _step(finding: Finding) -> int | None:
    return finding.details.get("step")


def _noted(found: list[Finding], own: Sequence[int | None]) -> list[Finding]:
    """A finding at another step than the last says so, and so does one whose models ended apart."""
    moved = any(_step(finding) != step for finding, step in zip(found, own, strict=True))
    note = f"step {_step(found[0])} is the last that all {len(found)} seeds have" if moved else _mixed(found)
    return [replace(finding, note=note) for finding in found] if note else found


def _mixed(found: Sequence[Finding]) -> str:
    """Which models of a claim about several were judged at different steps (`details["ends"]`, by model)."""
    ends: list[dict[str, Any]] = [finding.details.get("ends", {}) for finding in found]
    shared = [name for name in ends[0] if all(name in one for one in ends)]
    apart = [name for name in shared if len({one[name] for one in ends}) > 1]
    told = [f"those of {name} at steps {_listed([one[name] for one in ends])}" for name in apart]
    return f"the seeds were judged at different steps, {' and '.join(told)}" if told else ""


def _apart(own: Sequence[int | None]) -> str:
    return f"the seeds end at different steps ({_listed(own)}) and share none after step 0 to be compared at"


def _listed(steps: Sequence[int | None]) -> str:
    """Steps one after another, as they are read in a sentence.

    >>> _listed([200, 100, 100])
    '200, 100 and 100'
    """
    *before, last = ["no step" if step is None else str(step) for step in steps]
    return f"{', '.join(before)} and {last}" if before else last
