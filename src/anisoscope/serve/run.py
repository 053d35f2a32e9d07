"""A server for run folders: what it lists and draws, and the process that answers."""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from anisoscope.errors import AnisoscopeError
from anisoscope.serve.brief import LARGE, brief_table
from anisoscope.serve.drawn import Drawn
from anisoscope.serve.server import application
from anisoscope.serve.shelf import Shelf

LOCAL = ("127.0.0.1", "localhost", "[::1]")


def serve_runs(
    runs: Sequence[Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8642,
    names: Sequence[str] = (),
    ready: Callable[[str, int], None] = lambda link, number: None,
) -> None:
    """Answer requests until the process is interrupted; `ready` is told the link and the number of runs."""
    import uvicorn

    shelf, token = Shelf(runs), secrets.token_urlsafe(24)
    hosts = [*LOCAL, host, *filter(None, (name.strip() for name in names))]
    listening = _listen(host, port)
    app = application(shelf, pages_of(shelf), listed=lambda: listed(shelf), front=lambda: front(shelf), token=token, hosts=hosts)
    shown = f"[{host}]" if ":" in host else host
    ready(f"http://{shown}:{listening.getsockname()[1]}/?token={token}", len(shelf.runs()))
    settings = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, server_header=False)
    uvicorn.Server(settings).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AnisoscopeError(f"port {port} is in use; give another with --port, or --port 0 for any.") from error
        raise AnisoscopeError(f"cannot listen on {host!r}, port {port} ({error.strerror or error}); give another --host.") from error
