"""The process that analyses measured steps as a copy of this one, in which everything is imported."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from typing import IO

from anisoscope.monitor.analysis.analyst import _START


class Copied:
    """What `subprocess.Popen` gives of a process, of a forked one that runs the same code from its first line on."""

    def __init__(self, line: socket.socket, errors: IO[bytes]) -> None:
        self._status: int | None = None
        self._lock = threading.Lock()
        self.pid = os.fork()
        if not self.pid:
            _serve(line.fileno(), errors.fileno())

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (timeout or 0.0)
        while (status := self._ended()) is None:
            if timeout is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("a copy of this process", timeout)
            time.sleep(0.002)
        return status

    def _ended(self) -> int | None:
        with self._lock:  # two threads may wait for one process, which is told of once
            if self._status is None:
                done, status = os.waitpid(self.pid, os.WNOHANG)
                self._status = os.waitstatus_to_exitcode(status) if done else None
            return self._status

    def send_signal(self, number: int) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._status is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _serve(line: int, errors: int) -> None:
    """Run the code of the process with the files that it would have, and end."""
    code = 1
    try:
        os.dup2(errors, 2)
        for file in map(int, os.listdir("/proc/self/fd")):
            if file > 2 and file != line:
                with contextlib.suppress(OSError):  # that of the list itself
                    os.close(file)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        exec(_START.format(path=sys.path, line=line), {})
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
