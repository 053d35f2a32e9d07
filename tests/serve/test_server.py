"""The server answers only who has its link, under its own names, and only about the runs that it lists."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import uvicorn

from anisoscope.errors import AnisoscopeError
from anisoscope.serve import server as module
from anisoscope.serve.drawn import BRIEF, Drawn
from anisoscope.serve.server import application
from anisoscope.serve.shelf import Shelf, version

TOKEN = "a-token-of-this-test"


@dataclass
class Drawing:
    """A page that says which files it was made of."""

    words: str

    def document(self, version: str) -> str:
        return f"<!doctype html><title>page</title><p>{self.words}</p>"

    def data(self) -> dict[str, Any]:
        return {"title": self.words, "blocks": [], "specs": {}, "arrays": {}}


def draw(folders: Sequence[Path], brief: bool) -> Drawing:
    return Drawing(" and ".join((folder / "run.json").read_text() for folder in folders) + (", brief" if brief else ""))


def make_run(folder: Path, words: str = "{}") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(words)
    return folder


@dataclass
class Client:
    port: int
    cookie: str = f"anisoscope={TOKEN}"

    def get(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        given = {"Host": f"127.0.0.1:{self.port}", "Cookie": self.cookie} | {k.title(): v for k, v in headers.items()}
        connection.request(method, path, headers={k: v for k, v in given.items() if v})
        answer = connection.getresponse()
        found = answer.status, answer.read().decode(), answer.headers
        connection.close()
        return found


@contextlib.contextmanager
def serving(root: Path, *, large: bool = False) -> Iterator[tuple[Client, Shelf]]:
    shelf = Shelf([root])
    drawn = Drawn(shelf, draw, is_large=lambda _: large)
    listed = lambda: [{"name": name, "ago": time.time()} for name in shelf.runs()]  # noqa: E731
    app = application(shelf, drawn, listed=listed, front=lambda: "list", token=TOKEN, hosts=["127.0.0.1", "localhost"])
    socket_ = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [socket_]}, daemon=True)
    thread.start()
    try:
        yield Client(socket_.getsockname()[1]), shelf
    finally:
        running.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Path]]:
    root = tmp_path_factory.mktemp("all") / "runs"
    for name in ("one", "two", "deep/three"):
        make_run(root / name, name)
    make_run(root.parent / "outside", "a secret")
    (root / "link").symlink_to(root.parent / "outside")
    (root.parent / "secret.txt").write_text("a secret")
    with serving(root) as (client, _):
        yield client, root


def test_a_link_with_the_token_gives_a_cookie_and_leaves_the_address(served: tuple[Client, Path]) -> None:
    client, _ = served
    status, _, headers = client.get(f"/page?run=one&token={TOKEN}", cookie="")
    assert (status, headers["location"]) == (303, "/page?run=one")
    cookie = headers["set-cookie"]
    assert TOKEN in cookie and "HttpOnly" in cookie and "samesite=strict" in cookie.lower()


@pytest.mark.parametrize("path", ["/", "/runs", "/page?run=one", "/data?run=one", "/events", "/version?run=one", "/no"])
@pytest.mark.parametrize("cookie", ["", "anisoscope=wrong", "other=a-token-of-this-test"])
def test_nothing_is_answered_without_the_token(served: tuple[Client, Path], path: str, cookie: str) -> None:
    client, _ = served
    status, words, _ = client.get(path, cookie=cookie)
    assert status == 403 and "token" in words and "secret" not in words


def test_a_wrong_token_in_the_link_is_refused(served: tuple[Client, Path]) -> None:
    client, _ = served
    for wrong in ("wrong", "", "ä" * 8, TOKEN + "x", TOKEN[:-1]):
        assert client.get(f"/?token={quote(wrong)}", cookie="")[0] == 403


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil:80", "", "[::2]:1"])
def test_another_host_name_is_refused_even_with_the_token(served: tuple[Client, Path], host: str) -> None:
    client, _ = served
    assert client.get("/runs", host=host or " ")[0] in (400, 421)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(served: tuple[Client, Path], method: str) -> None:
    assert served[0].get("/page?run=one", method=method)[0] == 405


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "..",
        ".",
        "/etc",
        "one/../../outside",
        "one/run.json",
        "link",
        "deep",
        "%2e%2e/outside",
        "one\0",
        "",
    ],
)
def test_only_listed_runs_are_shown(served: tuple[Client, Path], name: str) -> None:
    client, root = served
    for path in ("/page", "/data", "/version", "/events"):
        status, words, _ = client.get(f"{path}?run={quote(name, safe='')}")
        assert status == 404 and "secret" not in words and str(root) not in words


@pytest.mark.parametrize("path", ["/../secret.txt", "/%2e%2e/secret.txt", "/page/../../secret.txt", "/run.json"])
def test_no_path_leads_to_a_file(served: tuple[Client, Path], path: str) -> None:
    status, words, _ = served[0].get(path)
    assert status == 404 and "secret" not in words


def test_runs_are_listed_with_their_names_and_links_that_leave_are_not_followed(served: tuple[Client, Path]) -> None:
    names = [run["name"] for run in json.loads(served[0].get("/runs")[1])]
    assert names == ["deep/three", "one", "two"]


def test_pages_of_one_and_of_several_runs(served: tuple[Client, Path]) -> None:
    client, _ = served
    assert "<p>one</p>" in client.get("/page?run=one")[1]
    assert "<p>two and one</p>" in client.get("/page?run=two&run=one")[1]
    assert json.loads(client.get("/data?run=deep%2Fthree")[1])["title"] == "deep/three"
    assert client.get("/page?" + "&".join(["run=one"] * 99))[0] == 200  # one run, however often
    assert client.get("/page")[0] == 404


def test_answers_carry_headers_that_keep_the_page_to_itself(served: tuple[Client, Path]) -> None:
    headers = served[0].get("/page?run=one")[2]
    assert "default-src 'none'" in headers["content-security-policy"] and headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


def events(port: int, path: str) -> Iterator[tuple[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path, headers={"Host": "localhost", "Cookie": f"anisoscope={TOKEN}"})
    answer = connection.getresponse()
    assert answer.headers["content-type"].startswith("text/event-stream")
    kind = ""
    while line := answer.readline().decode():
        if line.startswith("event:"):
            kind = line.split(": ")[1].strip()
        elif line.startswith("data:"):
            yield kind, json.loads(line.split(": ", 1)[1])


def test_a_change_on_disk_is_an_event_and_new_data(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "mine", "before")
    with serving(tmp_path / "runs") as (client, _):
        stream = events(client.port, "/events?run=mine")
        kind, first = next(stream)
        assert (kind, json.loads(client.get("/data?run=mine")[1])["version"]) == ("version", first)
        (run / "parts").mkdir()
        (run / "parts" / "3.parquet").write_text("a step")
        (run / "run.json").write_text("after")
        kind, second = next(stream)
        while json.loads(client.get("/data?run=mine")[1])["title"] != "after":
            kind, second = next(stream)
        assert kind == "version" and second != first
        os.rename(run, tmp_path / "elsewhere")
        kind, _ = next(event for event in stream if event[0] != "version")
        assert kind == "gone"


def test_the_list_tells_of_a_new_run(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "one")
    with serving(tmp_path / "runs") as (client, _):
        stream = events(client.port, "/events")
        _, first = next(stream)
        make_run(tmp_path / "runs" / "two")
        assert next(stream)[1] != first


def test_a_large_run_is_shown_briefly_and_then_whole(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "mine", "words")
    ready = threading.Event()

    def slow(folders: Sequence[Path], brief: bool) -> Drawing:
        if not brief:
            assert ready.wait(10)
        return draw(folders, brief)

    shelf = Shelf([tmp_path / "runs"])
    drawn = Drawn(shelf, slow, is_large=lambda _: True)
    assert ", brief" in drawn.document(("mine",))
    assert drawn.version(("mine",)).endswith(BRIEF)
    ready.set()
    deadline = time.monotonic() + 10
    while drawn.version(("mine",)).endswith(BRIEF) and time.monotonic() < deadline:
        time.sleep(0.01)
    found = json.loads(drawn.data(("mine",)))
    assert found["title"] == "words" and found["version"] == drawn.version(("mine",))


def test_a_small_run_does_not_wait_for_the_whole_of_a_large_one(tmp_path: Path) -> None:
    for name in ("large", "small"):
        make_run(tmp_path / "runs" / name, name)
    ready = threading.Event()

    def slow(folders: Sequence[Path], brief: bool) -> Drawing:
        if not brief and folders[0].name == "large":
            ready.wait(60)
        return draw(folders, brief)

    drawn = Drawn(Shelf([tmp_path / "runs"]), slow, is_large=lambda folder: folder.name == "large")
    assert ", brief" in drawn.document(("large",))
    found: list[str] = []
    asked = threading.Thread(target=lambda: found.append(drawn.document(("small",))), daemon=True)
    asked.start()
    asked.join(20)
    ready.set()
    assert found and "<p>small</p>" in found[0]


def test_threads_that_draw_do_not_keep_a_server_from_ending(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "one")
    Drawn(Shelf([tmp_path / "runs"]), draw, is_large=lambda _: False).document(("one",))
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("anisoscope"))


def test_links_within_the_runs_list_no_run_twice(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "one")
    (tmp_path / "runs" / "circle").symlink_to(tmp_path / "runs")
    (tmp_path / "runs" / "latest").symlink_to(run)
    assert list(Shelf([tmp_path / "runs"]).runs()) == ["one"]


def test_the_version_ignores_signs_of_life_and_sees_the_arms_of_a_study(tmp_path: Path) -> None:
    run = make_run(tmp_path / "study")
    (run / "lock.json").write_text("{}")
    before = version(run, lock=True)
    os.utime(run / "lock.json", ns=(1, 1))
    assert version(run, lock=True) == before
    (run / "lock.json").unlink()
    assert version(run, lock=True) != before and version(run) == version(run)
    before = version(run)
    (run / "arms" / "a" / "parts").mkdir(parents=True)
    (run / "arms" / "a" / "parts" / "0.parquet").write_text("a step")
    assert version(run) != before


def test_fifty_runs_and_arms_are_no_runs(tmp_path: Path) -> None:
    for number in range(50):
        make_run(tmp_path / f"run-{number:02}")
    make_run(tmp_path / "run-00" / "arms" / "inner")
    names = list(Shelf([tmp_path]).runs())
    assert names == [f"run-{number:02}" for number in range(50)]


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(AnisoscopeError, match="there is no folder"):
        Shelf([tmp_path / "nothing"])


def test_names_of_two_roots_do_not_collide(tmp_path: Path) -> None:
    for root in ("a/runs", "b/runs"):
        make_run(tmp_path / root / "same")
    assert list(Shelf([tmp_path / "a/runs", tmp_path / "b/runs"]).runs()) == ["runs/same", "runs/same (2)"]
    assert list(Shelf([tmp_path / "a/runs/same"]).runs()) == ["same"]


def test_the_pause_between_looks_is_short_enough() -> None:
    assert module.PAUSE <= 1.0  # a measured step is on the page within two seconds


def test_every_line_of_a_log_counts_only_until_something_is_measured(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine")
    before = version(run)
    (run / "log.jsonl").write_text("{}\n")
    logged = version(run)
    assert logged != before
    (run / "parts").mkdir()
    (run / "parts" / "step-0.parquet").write_text("a step")
    measured = version(run)
    (run / "log.jsonl").write_text("{}\n{}\n")
    assert measured != logged and version(run) == measured
