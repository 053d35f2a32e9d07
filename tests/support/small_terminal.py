"""A terminal of a few rows that keeps what a person would see, and programs that run inside one."""

from __future__ import annotations

import os
import pty
import re
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_CODES = re.compile(
    r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\]8;[^;]*;([^\x1b\x07]*)(?:\x1b\\|\x07)|\r|\n|\x08|([^\x1b\r\n\x08])"
)


@dataclass
class SmallTerminal:
    """Understands what rich writes: moves of the cursor, erased lines, colours, links."""

    width: int = 80
    lines: list[list[str]] = field(default_factory=lambda: [[]])
    row: int = 0
    column: int = 0
    links: list[str] = field(default_factory=list)

    def feed(self, text: str) -> None:
        """Take in what a program wrote."""
        for found in _CODES.finditer(text):
            numbers, letter, link, shown = found.groups()
            if shown is not None:
                self._put(shown)
            elif link:
                self.links.append(link)
            elif found[0] == "\r":
                self.column = 0
            elif found[0] == "\n":
                self._down()
            elif letter:
                self._move(numbers, letter)

    def _put(self, letter: str) -> None:
        if self.column == self.width:  # a full line goes on below
            self._down()
            self.column = 0
        line = self.lines[self.row]
        line.extend(" " * (self.column + 1 - len(line)))
        line[self.column] = letter
        self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append([])

    def _move(self, numbers: str, letter: str) -> None:
        if letter == "A":
            self.row = max(0, self.row - int(numbers or 1))
        elif letter == "K":
            self.lines[self.row] = [] if numbers == "2" else self.lines[self.row][: self.column]

    @property
    def seen(self) -> list[str]:
        """The lines as they look now, without empty ones at the end."""
        text = ["".join(line).rstrip() for line in self.lines]
        while text and not text[-1]:
            text.pop()
        return text


def in_terminal(
    words: list[str],
    *,
    size: tuple[int, int] = (80, 40),
    environment: Mapping[str, str] | None = None,
    then: Callable[[str, subprocess.Popen[bytes]], None] = lambda text, process: None,
) -> tuple[str, int]:
    """Run a program with a terminal of its own: what it wrote, and its exit code; `then` is called as it writes."""
    import fcntl
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    environ = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")}
    environ |= {"TERM": "xterm-256color", **(environment or {})}
    pipes: Any = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = subprocess.Popen([sys.executable, *words], env=environ, start_new_session=True, **pipes)
    os.close(theirs)
    text, deadline = "", time.monotonic() + 120
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                text += os.read(ours, 65536).decode("utf-8", "replace")
            except OSError:  # the other end was closed
                break
            then(text, process)
    process.kill() if process.poll() is None and time.monotonic() >= deadline else None
    code = process.wait()
    os.close(ours)
    return text, code
