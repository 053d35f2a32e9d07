"""Progress: bars where a terminal can redraw them, lines where not."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from anisoscope.view.terminal import screen
from anisoscope.view.terminal.progress import EVERY, EVERY_LATER, LATER, ProgressBars, ProgressLines, _clock
from support.small_terminal import SmallTerminal, in_terminal


class Clock:
    """A clock that is set by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lines(clock: Clock) -> tuple[ProgressLines, list[str]]:
    written: list[str] = []
    return ProgressLines(written.append, clock), written


def run(shown: ProgressLines, clock: Clock, seconds: int, tell: Callable[[int], None] = lambda second: None) -> None:
    """Let seconds go by; what a thread would look at is looked at each second."""
    for second in range(1, seconds + 1):
        clock.now += 1
        tell(second)
        shown.look()


def test_a_line_every_ten_seconds_has_step_rate_and_time_left(
    lines: tuple[ProgressLines, list[str]], clock: Clock
) -> None:
    shown, written = lines
    shown.tell("decoder: train", 0, 400)
    run(shown, clock, 60, lambda second: shown.tell("decoder: train", 4 * second, 400))
    assert written[0] == "0:01  decoder: train 4 of 400"
    assert written[-1].endswith("of 400, 4/s, 0:40 left")
    assert len(written) == 1 + 60 // EVERY
    run(shown, clock, 40, lambda second: shown.tell("decoder: train", 240 + 4 * second, 400))
    assert written[-1] == "1:40  decoder: train 400 of 400, done in 1:40"


def test_a_line_comes_also_while_nothing_is_told(lines: tuple[ProgressLines, list[str]], clock: Clock) -> None:
    shown, written = lines
    shown.tell("claims", 0, 1)
    run(shown, clock, 35)
    assert len(written) == 4 and written[-1].endswith("testing the claims 0:30 so far")
    shown.tell("claims", 1, 1)
    assert written[-1].endswith("testing the claims done in 0:35")


def test_a_long_run_says_less(lines: tuple[ProgressLines, list[str]], clock: Clock) -> None:
    shown, written = lines
    shown.tell("train", 0, 10**6)
    run(shown, clock, 3600, lambda second: shown.tell("train", second, 10**6))
    assert len(written) <= LATER // EVERY + (3600 - LATER) // EVERY_LATER + 2
    assert max(map(len, written)) <= 80


def test_parts_of_the_whole_and_their_time_left(lines: tuple[ProgressLines, list[str]], clock: Clock) -> None:
    shown, written = lines
    for arm in range(3):
        shown.tell("arms", arm, 3)
        shown.tell(f"arm{arm}: corpus", 0, 1)
        shown.tell(f"arm{arm}: corpus", 1, 1)
        run(shown, clock, 100, lambda second, arm=arm: shown.tell(f"arm{arm}: train", second, 100))
    shown.tell("arms", 3, 3)
    assert not any("corpus" in line for line in written), "a stage that is over within a second needs no line"
    assert sum("done in" in line for line in written) == 3
    middle = next(line for line in written if "arm1: train" in line and "of 100, 1/s" in line and line >= "2:00")
    left = int(middle.partition("of 100")[0].split()[-1])
    assert middle.endswith("; arms 1/3, " + _clock(200 - left) + " left")


def test_single_stages_of_many_parts_are_not_announced(lines: tuple[ProgressLines, list[str]], clock: Clock) -> None:
    shown, written = lines
    for number in range(20):
        shown.tell("checkpoints", number, 20)
        for what in ("load", "forward", "metrics"):
            shown.tell(what, 0, 10)
            run(shown, clock, 2, lambda second, what=what: shown.tell(what, 5 * second, 10))
    assert len(written) <= 120 // EVERY + 3
    assert any("checkpoints" in line for line in written)


def test_long_names_give_way_to_numbers(lines: tuple[ProgressLines, list[str]], clock: Clock) -> None:
    shown, written = lines
    name = "bidirectional-masked-12x512-with-a-very-long-name-indeed-seed0: train"
    shown.tell("arms", 0, 3)
    shown.tell(name, 0, 10_000)
    run(shown, clock, 60, lambda second: shown.tell(name, second, 10_000))
    assert all(len(line) <= screen.width() for line in written)
    assert "left" in written[-1] and "bidir" in written[-1] and "…" in written[-1]


# -- programs of their own ---------------------------------------------------------------------------------------------

WORK = """
import sys, time
from anisoscope.view.terminal.progress import progress_bars
from anisoscope.view.terminal.screen import print_line, print_note, print_path
from anisoscope.cli import main

def work(**_):
    with progress_bars() as tell:
        for arm in range(3):
            tell("arms", arm, 3)
            for step in range(21):
                tell(f"a-decoder-with-quite-a-long-name-{arm}-seed0: train", step, 20)
                time.sleep(%s)
            print_note(f"a note after arm {arm}")
    print_line("found – “something” × 2 ± 1…")
    print_path("run/report.html")

main(work)
"""


@pytest.mark.parametrize("width", [60, 80, 200])
def test_bars_show_the_time_left_and_leave_nothing_behind(width: int) -> None:
    screens: list[list[str]] = []

    def watch(text: str, _: subprocess.Popen[bytes]) -> None:
        terminal = SmallTerminal(width)
        terminal.feed(text)
        screens.append(terminal.seen)

    text, code = in_terminal(["-c", WORK % 0.04], size=(width, 24), then=watch)
    terminal = SmallTerminal(width)
    terminal.feed(text)
    assert code == 0, text
    assert terminal.seen == [*(f"a note after arm {arm}" for arm in range(3)), "found – “something” × 2 ± 1…",
                             "run/report.html"]  # fmt: skip
    bars = [line for lines in screens for line in lines if "/20 " in line]
    assert bars and all(len(line) < width for line in bars)
    whole = [line for line in bars if line.endswith(("0:00:00", "0:00:01", "-:--:--", "0:00:02", "0:00:03"))]
    assert len(whole) > len(bars) / 2, "the time left is at the end of the line"
    assert any("arms" in line for lines in screens for line in lines)
    assert terminal.links and terminal.links[0].startswith("file:///") and terminal.links[0].endswith("run/report.html")


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"TERM": "linux"}, {"NO_COLOR": "1"}])
def test_terminals_that_can_less_get_less(environment: dict[str, str]) -> None:
    text, code = in_terminal(["-c", WORK % 0.001], environment=environment)
    assert code == 0 and "found" in text
    if environment.get("TERM") == "dumb":
        assert "\x1b" not in text
    if environment.get("TERM") == "linux":
        assert "\x1b]8" not in text
    if "NO_COLOR" in environment:
        assert not any(f"\x1b[{code}m" in text for code in itertools.chain(range(31, 38), range(91, 98)))


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_sentences_fit_any_terminal_and_paths_stay_whole(term: str) -> None:
    path = "/some/where/" + "deep/" * 20 + "report.html"
    work = f"from anisoscope.view.terminal.screen import print_line; print_line('word ' * 40 + {path!r} + ' word' * 20)"
    text, code = in_terminal(["-c", work], size=(60, 24), environment={"TERM": term})
    lines = [line.rstrip() for line in text.splitlines()]
    assert code == 0 and path in lines
    assert all(len(line) <= 60 for line in lines if line != path) and len(lines) == 1 + 4 + 2


def test_ctrl_c_leaves_a_clean_line() -> None:
    sent: list[int] = []

    def press(text: str, process: subprocess.Popen[bytes]) -> None:
        if "/20" in text and not sent:
            sent.append(process.pid)
            process.send_signal(signal.SIGINT)

    text, code = in_terminal(["-c", WORK % 0.1], then=press)
    terminal = SmallTerminal()
    terminal.feed(text)
    assert sent and code == 130, text
    assert len(terminal.seen) == 1 and terminal.seen[0].startswith("anisoscope: interrupted"), terminal.seen
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp1252", "cp437"])
def test_a_pipe_gets_plain_text_in_any_encoding(encoding: str) -> None:
    words = [sys.executable, "-c", WORK % 0.001]
    done = subprocess.run(
        words, capture_output=True, timeout=120, check=True, env={**os.environ, "PYTHONIOENCODING": encoding}
    )
    text = done.stdout.decode(encoding)
    assert "\x1b" not in text + done.stderr.decode(encoding)
    found, page = text.splitlines()
    assert page == "run/report.html" and len(found) == len("found – “something” × 2 ± 1…")
    assert found == ("found – “something” × 2 ± 1…" if encoding == "utf-8" else found)
    assert encoding != "ascii" or found == 'found - "something" x 2 ? 1~'


def test_bars_follow_a_window_that_is_resized() -> None:
    bars = ProgressBars(screen.errors, disable=True)
    bars.note("some-long-name-of-an-arm-seed0: train", 3, 100_000)
    widths = []
    for width in (200, 60, 80):
        screen.errors.width = width
        bars.make_tasks_table(bars.tasks)
        widths.append(bars.name.most + int(bars.bar.bar_width or 0))
    screen.errors._width = None
    assert widths[0] > widths[2] > widths[1]
