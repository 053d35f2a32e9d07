"""Pages of runs over HTTP, kept up to date while the runs go on: read-only, behind a token, for this machine.

    /                   the list of runs; `/?token=…` from the printed link exchanges the token for a cookie
    /runs               the same list as JSON
    /page?run=A&run=B   the page of one run, or of several in the same figures
    /data?run=A         what that page shows, as JSON (view/document.py)
    /version?run=A      a text that changes with the run, for browsers without event streams
    /events?run=A       server-sent events: a new version; without a run: the list has changed

A request names a run, never a path: names are looked up among the runs that are there. Requests under another host name
are refused, so that a page from elsewhere cannot reach the server by rebinding its own name to this machine.
"""

from __future__ import annotations

import asyncio
import functools
import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anisoscope.errors import AnisoscopeError
from anisoscope.serve.drawn import Drawn
from anisoscope.serve.shelf import Shelf

COOKIE = "anisoscope"
PAUSE = 1.0  # seconds between two looks at the files of a run
QUIET = 15.0  # seconds after which a silent stream says that it is alive
MOST_TOGETHER = 12  # runs on one page
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}
Listed = Callable[[], list[dict[str, Any]]]


class Guarded:
    """Around the application: the host name, the method and the token are checked before anything else."""

    def __init__(self, app: ASGIApp, *, token: str, hosts: Sequence[str]) -> None:
        self.app, self.token, self.hosts = app, token, {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                plain = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *plain]}
            await send(message)

        request = Request(scope)
        refused = self._refusal(request)
        await (refused or self.app)(scope, receive, told)

    def _refusal(self, request: Request) -> Response | None:
        """The answer to a request that may not be served; None for one that may."""
        if host_name(request.headers.get("host", "")) not in self.hosts:
            return PlainTextResponse("this server does not go by that name; use the link that was printed\n", 421)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("this server is only read\n", 405)
        given = request.query_params.get("token")
        if given is not None and secrets.compare_digest(given.encode(), self.token.encode()):
            rest = str(request.url.remove_query_params("token").replace(scheme="", netloc=""))
            answer = RedirectResponse(rest or "/", 303)  # the token leaves the address bar and the history
            answer.set_cookie(COOKIE, self.token, httponly=True, samesite="strict", path="/")
            return answer
        if not secrets.compare_digest(request.cookies.get(COOKIE, "").encode(), self.token.encode()):
            return PlainTextResponse(
                "the token is missing or wrong; open the link that `anisoscope serve` printed\n", 403
            )
        return None


def host_name(header: str) -> str:
    """The name in a Host header, without its port.

    >>> host_name("127.0.0.1:8642"), host_name("[::1]:8642"), host_name("LOCALHOST")
    ('127.0.0.1', '[::1]', 'localhost')
    """
    name = header.strip().lower()
    return name[: name.find("]") + 1] if name.startswith("[") else name.split(":")[0]


def application(
    shelf: Shelf, drawn: Drawn, *, listed: Listed, front: Callable[[], str], token: str, hosts: Sequence[str]
) -> ASGIApp:
    """The whole application; `listed` are the runs as records for the list, `front` is the page of the list."""

    def runs_of(request: Request) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(request.query_params.getlist("run")))
        if not names or len(names) > MOST_TOGETHER:
            raise AnisoscopeError(f"{len(names)} runs are asked for; give 1 to {MOST_TOGETHER}, as run=NAME.")
        for name in names:
            shelf.folder(name)
        return names

    async def home(_: Request) -> Response:
        return HTMLResponse(await run_in_threadpool(front))

    async def runs(_: Request) -> Response:
        return JSONResponse(await run_in_threadpool(listed))

    async def page(request: Request) -> Response:
        names = await run_in_threadpool(runs_of, request)
        return HTMLResponse(await run_in_threadpool(drawn.document, names))

    async def data(request: Request) -> Response:
        names = await run_in_threadpool(runs_of, request)
        return Response(await run_in_threadpool(drawn.data, names), media_type="application/json")

    async def version(request: Request) -> Response:
        names = await run_in_threadpool(runs_of, request)
        return JSONResponse({"version": await run_in_threadpool(drawn.version, names)})

    async def events(request: Request) -> Response:
        names = await run_in_threadpool(runs_of, request) if "run" in request.query_params else ()
        look = functools.partial(drawn.version, names) if names else functools.partial(_digest, listed)
        lines = stream(look, request.is_disconnected)
        return StreamingResponse(lines, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def explained(_: Request, error: Exception) -> Response:
        return PlainTextResponse(f"{error}\n", 404)

    routes = [
        ("/", home),
        ("/runs", runs),
        ("/page", page),
        ("/data", data),
        ("/version", version),
        ("/events", events),
    ]
    app = Starlette(
        routes=[Route(path, answer, methods=["GET"]) for path, answer in routes],
        exception_handlers={AnisoscopeError: explained},
    )
    return Guarded(GZipMiddleware(app, minimum_size=2048), token=token, hosts=hosts)


def _digest(listed: Listed) -> str:
    """A version of the list of runs; how long ago something was is left out, a browser counts that itself."""
    return str(hash(json.dumps([{k: v for k, v in run.items() if k != "ago"} for run in listed()], sort_keys=True)))


async def stream(look: Callable[[], str], gone: Callable[[], Any]) -> AsyncIterator[str]:
    """Server-sent events: the version at once, then whenever it changes; a comment when nothing did for a while."""
    yield "retry: 2000\n\n"
    last, silent = None, 0.0
    while not await gone():
        try:
            now = await run_in_threadpool(look)
        except AnisoscopeError as error:  # the run was deleted or renamed
            yield f"event: gone\ndata: {json.dumps(str(error))}\n\n"
            return
        if now != last:
            last, silent = now, 0.0
            yield f"event: version\ndata: {json.dumps(now)}\n\n"
        elif silent >= QUIET:
            silent = 0.0
            yield ": still here\n\n"
        await asyncio.sleep(PAUSE)
        silent += PAUSE
