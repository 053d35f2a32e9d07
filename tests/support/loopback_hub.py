"""A hub of one dataset on this machine, which the real client talks to; it holds files in memory."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

REPO = "org/geometry"


class LoopbackHub:
    """The files of the dataset, once it is made, and every commit's message."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] | None = None
        self.messages: list[str] = []
        self.private: list[bool] = []  # as it was asked to be, by every call
        self.endpoint = ""

    @property
    def commit(self) -> str:
        return hashlib.sha1("".join(self.messages).encode()).hexdigest()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        path = path.partition("?")[0]
        if path == "/api/repos/create":
            self.files = self.files or {}
            asked = json.loads(body)
            self.private.append(asked.get("private") is True or asked.get("visibility") == "private")
            return _json({"url": f"{self.endpoint}/datasets/{REPO}", "name": REPO})
        if path.endswith("/validate-yaml"):
            return _json({"errors": [], "warnings": []})
        if self.files is None or REPO not in path:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if "/preupload/" in path:
            wanted = [file["path"] for file in json.loads(body)["files"]]
            return _json({"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in wanted]})
        if "/commit/" in path:
            return self._commit(body)
        if "/tree/" in path:
            return _json(
                [{"type": "file", "path": p, "size": len(c), "oid": _digest(c)} for p, c in self.files.items()]
            )
        if found := re.fullmatch(rf"/datasets/{REPO}/resolve/[^/]+/(.*)", path):
            return self._file(found[1])
        siblings = [{"rfilename": name} for name in self.files]
        return _json({"id": REPO, "sha": self.commit, "siblings": siblings, "tags": [], "downloads": 0, "likes": 0})

    def _commit(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        assert self.files is not None
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                self.files.pop(value["path"], None)
        return _json({"commitUrl": f"{self.endpoint}/datasets/{REPO}/commit/{self.commit}", "commitOid": self.commit})

    def _file(self, name: str) -> tuple[int, dict[str, str], bytes]:
        content = (self.files or {}).get(name)
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.commit}, b""
        return 200, {"X-Repo-Commit": self.commit, "ETag": f'"{_digest(content)}"'}, content


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _json(value: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


@contextlib.contextmanager
def loopback_hub() -> Iterator[LoopbackHub]:
    """A hub that answers at its `endpoint` until the end of the block."""
    hub = LoopbackHub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            code, headers, content = hub.answer(self.command, self.path, body)
            self.send_response(code)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_POST = do_HEAD = _answer  # noqa: N815  names that the server looks for

        def log_message(self, *_: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
