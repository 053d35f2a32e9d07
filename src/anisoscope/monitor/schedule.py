"""Schedules: which training steps are measured."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from anisoscope.errors import AnisoscopeError
from anisoscope.option import check_values


@dataclass(frozen=True)
class Schedule:
    """Whether a step is measured; `total` is the last step where it is known."""

    kind: str
    steps: frozenset[int] = frozenset()
    n: int = 0
    total: int | None = None

    def __call__(self, step: int) -> bool:
        if self.kind == "every":
            return step % self.n == 0 or step == self.total
        if self.kind == "log":
            return step == self.total or step == 0 or step & (step - 1) == 0
        return step in self.steps

    def known(self, total: int | None = None) -> list[int] | None:
        """All measured steps up to `total`, or to the schedule's own last one; None where there is no end.

        >>> log_spaced(20).known(), every(4).known(9), every(4).known()
        ([0, 1, 2, 4, 8, 16, 20], [0, 4, 8], None)
        """
        last = self.total if total is None else total
        if self.kind == "at":
            return sorted(step for step in self.steps if last is None or step <= last)
        return None if last is None else [step for step in range(last + 1) if self(step)]

    def __str__(self) -> str:
        if self.kind == "every":
            return f"every({self.n})"
        return "log_spaced()" if self.kind == "log" else f"at({sorted(self.steps)})"


def every(n: int, *, total: int | None = None) -> Schedule:
    """Every n-th step, from 0 on, and the last one where it is known.

    >>> [step for step in range(10) if every(4)(step)]
    [0, 4, 8]
    """
    check_values(every, locals())
    if n < 1:
        raise AnisoscopeError(f"every({n}) names no steps; expected at least 1.")
    return Schedule("every", n=n, total=total)


def at(steps: Iterable[int]) -> Schedule:
    """Exactly these steps.

    >>> [step for step in range(10) if at([0, 3])(step)]
    [0, 3]
    """
    check_values(at, locals())
    chosen = frozenset(steps)
    if not chosen or min(chosen) < 0:
        raise AnisoscopeError(f"at({sorted(chosen)}) names no steps to measure; expected numbers from 0 on.")
    return Schedule("at", steps=chosen, total=max(chosen))


def as_schedule(when: Any) -> Schedule | Callable[[int], bool]:
    """Convert an argument `when=` (a schedule, a function of the step, or a list of steps) to a schedule.

    >>> str(as_schedule([0, 4, 11]))
    'at([0, 4, 11])'
    """
    if isinstance(when, Schedule) or callable(when):
        chosen: Schedule | Callable[[int], bool] = when
        return chosen
    if isinstance(when, Iterable) and not isinstance(when, str):
        steps = list(when)
        if all(isinstance(step, numbers.Integral) for step in steps):
            return at(int(step) for step in steps)
    raise AnisoscopeError(
        f"when={when!r} names no steps; expected steps such as [0, 10, 100], log_spaced(), every(n), or a function."
    )


def log_spaced(total: int | None = None, *, count: int | None = None) -> Schedule:
    """0, 1, 2, 4, 8 … and the last step; with `count`, that many evenly spaced in the logarithm of the step.

    >>> [step for step in range(101) if log_spaced(100)(step)]
    [0, 1, 2, 4, 8, 16, 32, 64, 100]
    >>> sorted(log_spaced(1000, count=4).steps)
    [0, 1, 10, 100, 1000]
    """
    check_values(log_spaced, locals())
    if total is not None and total < 1:
        raise AnisoscopeError(f"log_spaced({total}) ends before it begins; expected at least 1 step.")
    if count is None:
        return Schedule("log", total=total)
    if total is None or count < 2:
        raise AnisoscopeError(f"log_spaced(count={count}) needs the number of training steps and at least 2 points.")
    points = {round(total ** (i / (count - 1))) for i in range(count)}
    return Schedule("at", steps=frozenset({0, *points}), total=total)


def parse_schedule(text: str, *, total: int) -> Schedule:
    """Parse a schedule: `log`, `log:20`, `every:100` or `0,10,100`.

    >>> str(parse_schedule("every:50", total=1000))
    'every(50)'
    """
    name, _, value = text.partition(":")
    try:
        if name == "log":
            return log_spaced(total, count=int(value) if value else None)
        if name == "every":
            return every(int(value), total=total)
        return at(int(word) for word in text.split(","))
    except ValueError as error:
        raise AnisoscopeError(
            f"schedule {text!r} is not known; expected log, log:COUNT, every:N or steps such as 0,10,100."
        ) from error
