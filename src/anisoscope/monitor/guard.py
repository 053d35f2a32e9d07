"""What goes wrong inside a monitor stays inside: it is noted, and the training goes on.

Errors of ours – a full disk, no memory for a measurement, hooks that somebody removed – are caught where they arise,
each kind is noted once with its step, as a warning and in the record of the run, and what can still be measured is.
With `strict` they are raised. Errors of the user's own code and interruptions are none of ours and always pass. Before
the first step the same holds for a folder that cannot be used (`reaching`); misuse is raised there in any case.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from anisoscope.errors import AnisoscopeError, UnusableFolder

MOST_KINDS = 64  # after which kinds of faults are told apart by their type alone


class MonitorWarning(UserWarning):
    """A monitor could not do something; the training goes on."""


@dataclass
class Fault:
    """One kind of fault: where it was first and last seen, and how often."""

    text: str
    first: str
    last: str
    count: int = 1

    def note(self) -> str:
        """As a note.

        >>> Fault("could not write results (no space)", "step 4", "step 9", 3).note()
        'step 4: could not write results (no space); 2 times more, the last at step 9'
        """
        again = "once more" if self.count == 2 else f"{self.count - 1} times more, the last"
        return f"{self.first}: {self.text}" + (f"; {again} at {self.last}" if self.count > 1 else "")


@dataclass
class FaultGuard:
    """Catches the errors of one monitor; `place` is where it is, such as `step 4`."""

    strict: bool = False
    place: str = "before the first step"
    faults: dict[tuple[str, ...], Fault] = field(default_factory=dict)
    fresh: bool = False  # whether something was noted since the record of the run was written

    @property
    def notes(self) -> list[str]:
        return [fault.note() for fault in self.faults.values()]

    @contextlib.contextmanager
    def catching(self, what: str) -> Iterator[None]:
        """Around an action of the monitor, `what` it does in words: `write results`."""
        try:
            yield
        except Exception as error:
            self.caught(what, error)

    @contextlib.contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Around what belongs to another place than where the monitor is."""
        here, self.place = self.place, place
        try:
            yield
        finally:
            self.place = here

    @contextlib.contextmanager
    def reaching(self, what: str) -> Iterator[None]:
        """Around the use of a run folder before the training begins: a disk is noted, a wrong argument is raised."""
        try:
            yield
        except UnusableFolder as error:
            self.caught(what, error)
        except OSError as error:
            self.caught(what, UnusableFolder(f"the monitor could not {what} ({error}); make room or rights."))

    def call(self, what: str, act: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of an action, None if it failed."""
        with self.catching(what):
            return act(*args, **kwargs)

    def hook(self, what: str, act: Callable[..., Any]) -> Callable[..., Any]:
        """A function that somebody else calls, such as an optimizer, and that raises nothing into them."""

        @functools.wraps(act)
        def safe(*args: Any, **kwargs: Any) -> Any:
            return self.call(what, act, *args, **kwargs)

        return safe

    def caught(self, what: str, error: Exception) -> None:
        """Note an error, or raise it where that is wanted."""
        if self.strict:
            raise error
        said = str(error).strip().splitlines()
        name = "" if isinstance(error, AnisoscopeError) else f"{type(error).__name__}: "
        reason = f"{name}{said[0] if said else ''}".rstrip(": ")
        self.note(f"could not {what} ({reason.rstrip('.')})", type(error).__name__)

    def note(self, text: str, kind: str = "") -> None:
        """Note something once for each kind, with a warning; the same again is counted."""
        key = (kind, re.sub(r"\d+", "#", text))
        key = key if key in self.faults or len(self.faults) < MOST_KINDS else (kind, "")
        if (known := self.faults.get(key)) is not None:
            known.count, known.last = known.count + 1, self.place
            return
        self.faults[key] = Fault(text, self.place, self.place)
        self.fresh = True
        _warn(f"monitor, {self.place}: {text}" + ("; the training goes on" if self.place.startswith("step") else ""))


def _warn(text: str) -> None:
    try:
        warnings.warn(text, MonitorWarning, stacklevel=2)
    except MonitorWarning:  # warnings are errors in this process, but not in the middle of a training
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr)
