"""When a run is looked at: schedules name the steps they say, and nothing else is accepted; series of checkpoints."""

from __future__ import annotations

import pytest

from anisoscope.errors import AnisoscopeError
from anisoscope.monitor.schedule import Schedule, at, every, log_spaced, parse_schedule


def steps(schedule: Schedule, last: int) -> list[int]:
    return [step for step in range(last + 1) if schedule(step)]


def test_every_step_is_counted_from_the_initialisation() -> None:
    assert steps(every(4), 12) == [0, 4, 8, 12]
    assert steps(every(5, total=12), 12) == [0, 5, 10, 12]
    assert steps(every(1), 3) == [0, 1, 2, 3]


def test_powers_of_two_and_the_last_step() -> None:
    assert steps(log_spaced(100), 100) == [0, 1, 2, 4, 8, 16, 32, 64, 100]
    assert steps(log_spaced(64), 64) == [0, 1, 2, 4, 8, 16, 32, 64]
    assert steps(log_spaced(), 20) == [0, 1, 2, 4, 8, 16]


def test_a_count_spaces_steps_evenly_in_their_logarithm() -> None:
    assert steps(log_spaced(1000, count=4), 1000) == [0, 1, 10, 100, 1000]
    found = steps(log_spaced(4000, count=20), 4000)
    assert found[0] == 0 and found[-1] == 4000 and len(found) <= 21
    late = [b / a for a, b in zip(found[-8:], found[-7:], strict=False)]
    assert max(late) / min(late) < 1.05


def test_given_steps_are_exactly_those() -> None:
    assert steps(at([7, 0, 3, 3]), 10) == [0, 3, 7]
    assert at([3, 9]).total == 9


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: every(0),
        lambda: every(-3),
        lambda: at([]),
        lambda: at([-1, 4]),
        lambda: log_spaced(0),
        lambda: log_spaced(100, count=1),
        lambda: log_spaced(count=5),
        lambda: parse_schedule("sometimes", total=100),
        lambda: parse_schedule("every:often", total=100),
        lambda: parse_schedule("every:0", total=100),
        lambda: parse_schedule("every:", total=100),
        lambda: parse_schedule("", total=100),
        lambda: parse_schedule("0,5.5", total=100),
        lambda: parse_schedule("log:1", total=100),
    ],
)
def test_schedules_that_name_no_steps_are_refused_in_a_sentence(wrong: object) -> None:
    with pytest.raises(AnisoscopeError, match=r"expected|needs"):
        wrong()  # type: ignore[operator]


def test_words_say_the_same_as_functions() -> None:
    assert parse_schedule("log", total=100) == log_spaced(100)
    assert parse_schedule("log:5", total=100) == log_spaced(100, count=5)
    assert parse_schedule("every:7", total=100) == every(7, total=100)
    assert parse_schedule("0,10,100", total=100) == at([0, 10, 100])
