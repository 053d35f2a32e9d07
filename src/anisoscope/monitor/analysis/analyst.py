"""Where steps are analysed: in the training process, or in one of its own while the training goes on.

On a GPU the analysis of a step is thousands of small operations, most of whose time the host spends; a second process
spends it beside the training, whose kernels leave gaps enough. The training then waits only until the rows are copied.
Results come in the order of the steps, some steps later. Nothing is analysed in two places: the studies, which compare
a step with those before it, live where the analysis runs.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import IO, Any

import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.models.placement import free_memory
from anisoscope.monitor.analysis import transport
from anisoscope.monitor.analysis.analysis import Analysis, Found, Seen
from anisoscope.monitor.analysis.transport import Parcel

_CORES = 4  # of the machine, from which on a second process is no burden
_ROOM = 4 << 30  # bytes of a GPU that must be free for it
_SHARE = 4  # of the host's free memory, one part in so many may hold steps that wait
_MOST = 64  # messages that wait: each is a file until the other process takes it
_PATIENCE = 5.0  # seconds between looks whether the process was stopped, and until one that does not end is killed
_KNOWN = {"anisoscope", "torch", "transformers", "tokenizers", "numpy", *sys.stdlib_module_names}  # can be imported
# where processes use a GPU at the same time (MPS) the training goes first, and most of the GPU is for it alone
_BEHIND = {"CUDA_MPS_CLIENT_PRIORITY": "1", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}
_START = """
import signal, sys
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
sys.path[:] = {path!r}
from anisoscope.monitor.analysis.worker import serve
serve({line})
"""


class HereAnalyst:
    """Analyses each step at once, in this process."""

    ended = False

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis

    def submit(self, seen: Seen) -> Future[Found]:
        """The results of a step."""
        future: Future[Found] = Future()
        future.set_result(self.analysis.run(seen))
        return future

    def ask(self, name: str, *args: Any, **options: Any) -> Any:
        """The result of a method of the analysis, after all steps submitted so far."""
        return getattr(self.analysis, name)(*args, **options)

    def end(self) -> None:
        """Nothing is submitted after this."""

    def close(self) -> None:
        """There is no process to end."""


class BackgroundAnalyst:
    """Analyses steps in a process of its own, one after the other."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis  # as it was at the start; at the end with the proxies that were fitted
        parcel = Parcel.of(replace(analysis, progress=None))  # which is for this process, and may not be pickled
        with contextlib.ExitStack() as opened:
            self._line, theirs = map(opened.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            self._errors = opened.enter_context(os.fdopen(os.memfd_create("anisoscope"), "w+b"))  # no disk is needed
            self._process = _started(theirs, self._errors)
            theirs.close()
            opened.pop_all()
        self._owner = os.getpid()
        self._waiting: collections.OrderedDict[int, tuple[Future[Any], int]] = collections.OrderedDict()
        self._number, self._lock = 0, threading.Lock()
        self._outgoing: queue.SimpleQueue[tuple[int, Parcel] | None] = queue.SimpleQueue()
        self._room = free_memory(torch.device("cpu")) // _SHARE
        self.ended = False
        acts = (self._listen, self._speak)
        self._threads = [threading.Thread(target=act, name="anisoscope-analysis", daemon=True) for act in acts]
        for thread in self._threads:
            thread.start()
        self._known = parcel.packages <= _KNOWN
        self._begun = self._post(parcel)

    @property
    def fault(self) -> str:
        """Why it analyses nothing more, or "".

        If the other process must load something of the user's own, this waits until it has, so that no step is given
        in vain.
        """
        if os.getpid() != self._owner:
            return "this process was forked from that of the monitor"
        if self._known and not self._begun.done():
            return ""
        if (error := self._begun.exception()) is not None:
            said = f"{type(error).__name__}: {error}".removeprefix("AnisoscopeError: ").splitlines()[0][:200]
            return f"the other one could not begin: {said}"
        return "the other one has ended" if self.ended else ""

    def submit(self, seen: Seen) -> Future[Found]:
        """The future results of a step; waits while the steps before it fill the memory set aside for them."""
        return self._post(Parcel.of(("run", (seen,), {})))

    def ask(self, name: str, *args: Any, **options: Any) -> Any:
        """The result of a method of the analysis, after all steps submitted so far."""
        return self._post(Parcel.of((name, args, options))).result()

    def end(self) -> None:
        """Wait for everything, bring the fitted proxies home and end the process."""
        try:
            if not self.fault:
                self.analysis.take_proxies(self.ask("proxies"))
        finally:
            self.close()

    def close(self) -> None:
        """End the process, whatever it does."""
        if os.getpid() != self._owner:  # of a fork of the training, to which nothing of this belongs
            return
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)  # to close it alone would not wake the thread that listens
        self._outgoing.put(None)
        self._exit_status()
        for thread in self._threads:
            thread.join(_PATIENCE)
        self._line.close()
        self._errors.close()

    def _exit_status(self) -> int:
        """That of the process, which has nothing more to do."""
        try:
            return self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()  # also where it is stopped
            return self._process.wait()

    def _post(self, parcel: Parcel) -> Future[Any]:
        self._make_room(parcel.size)
        future: Future[Any] = Future()
        with self._lock:
            self._number += 1
            self._waiting[self._number] = future, parcel.size
            self._outgoing.put((self._number, parcel))
            ended = self.ended
        if ended:
            self._fail()
        return future

    def _speak(self) -> None:
        """Copy and send what is posted, beside the training."""
        while (message := self._outgoing.get()) is not None:
            try:
                transport.send(self._line, *message)
            except Exception as error:  # no memory, or the other process has ended, which `_listen` sees
                self._settle(message[0], good=False, value=error)
            message = None  # not held while waiting for the next one

    def _settle(self, number: int, *, good: bool, value: Any) -> None:
        with self._lock:
            future, _ = self._waiting.pop(number, (None, 0))
        if future is not None:
            future.set_result(value) if good else future.set_exception(value)

    def _make_room(self, size: int) -> None:
        while True:
            with self._lock:
                waiting = list(self._waiting.values())
            if not waiting or (len(waiting) < _MOST and sum(held for _, held in waiting) + size <= self._room):
                return
            waiting[0][0].exception()  # waits

    def _listen(self) -> None:
        """Receive results until the process ends."""
        while True:
            try:
                self._wait_for_message()
                message = transport.receive(self._line)
            except OSError:
                message = None
            if message is None:
                return self._fail()
            number, file, size = message
            try:
                good, value = transport.unpack(file, size, copied=True)
            except Exception as error:  # such as an error that cannot be unpickled
                good, value = False, AnisoscopeError(f"its results could not be read ({error})")
            self._settle(number, good=good, value=value)

    def _wait_for_message(self) -> None:
        """Until there is one; a process that somebody stopped is woken, or we would wait forever."""
        line = select.poll()
        line.register(self._line, select.POLLIN)
        while not line.poll(_PATIENCE * 1000):
            if self._waiting:
                self._process.send_signal(signal.SIGCONT)

    def _fail(self) -> None:
        """The process has ended: nothing that waits for it will come."""
        with self._lock:
            self.ended, waiting = True, [future for future, _ in self._waiting.values()]
            self._waiting.clear()
        if not waiting:
            return
        code = self._exit_status()
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        words = f": {said[-1][:200]}" if said else ""
        error = AnisoscopeError(f"the process that analyses measured steps has ended ({how}{words})")
        for future in waiting:
            if not future.done():
                future.set_exception(error)


def _started(line: socket.socket, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """The process at the other end of this line."""
    try:
        path = [os.path.abspath(entry) for entry in sys.path]
    except FileNotFoundError:  # the current directory is gone, and with it whatever is relative to it
        path = [os.fspath(entry) for entry in sys.path if os.path.isabs(entry)]
    code = _START.format(path=path, line=line.fileno())
    files: dict[str, Any] = {"pass_fds": [line.fileno()], "stdin": subprocess.DEVNULL, "stderr": errors}
    files["env"] = _BEHIND | dict(os.environ)
    return subprocess.Popen([sys.executable, "-c", code], cwd=os.path.dirname(sys.executable) or None, **files)


Analyst = HereAnalyst | BackgroundAnalyst


def choose_analyst(analysis: Analysis, device: torch.device, *, background: bool | None) -> Analyst:
    """In the background if asked for; by default where the model is on a GPU and there is room for another process."""
    if background is None:
        background = device.type == "cuda" and _roomy(device)
        if not background:
            return HereAnalyst(analysis)
        try:
            return BackgroundAnalyst(analysis)
        except Exception:  # whatever the pickling of a metric or tokenizer of the user's own raises; no process or file
            return HereAnalyst(analysis)
    if not background:
        return HereAnalyst(analysis)
    if not hasattr(os, "memfd_create"):
        raise AnisoscopeError("background=True needs Linux; leave it out, and steps are analysed in this process.")
    try:
        return BackgroundAnalyst(analysis)
    except OSError as error:
        raise AnisoscopeError(
            f"background=True needs a second process, which could not be started ({error}); make room for it, or leave "
            "background out."
        ) from error
    except Exception as error:  # whatever pickling raises
        raise AnisoscopeError(
            f"background=True needs metrics and a tokenizer that can be pickled ({error}); define them in a module, or "
            "leave background out."
        ) from error


def _roomy(device: torch.device) -> bool:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    return cores >= _CORES and hasattr(os, "memfd_create") and torch.cuda.mem_get_info(device)[0] >= _ROOM
