"""Options come from configurations: declared once, shown by the help, parsed into the fields."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from anisoscope.cli import app, main
from anisoscope.commands.command import configured, declared_fields, progress_shown
from anisoscope.errors import AnisoscopeError
from anisoscope.option import Option, distinct, layer_numbers, listed, listed_or_none, numbers, seed_numbers
from anisoscope.studies.catalogue import STUDIES


@dataclass(frozen=True)
class Sized:
    names: Annotated[tuple[str, ...], Option("Names.", argument=True, metavar="NAME...")]
    rows: Annotated[int, Option("Rows.", least=1)] = 8
    layers: Annotated[tuple[int, ...], Option("Layers.", parse=layer_numbers)] = (7,)
    first: Annotated[str, Option("Skip.", name="--skip", parse=lambda on, _: "out" if on else "in", typed=bool)] = "in"
    inner: float = 0.5  # no option


def typed(*words: str, **how: Any) -> tuple[Any, ...]:
    """The configuration that a command gets, and its own option."""
    seen: list[Any] = []

    def act(config: Any, loud: Annotated[bool, typer.Option("--loud", help="Louder.")] = False) -> None:
        """Do it."""
        seen.extend((config, loud))

    one = typer.Typer()
    one.command()(configured(Sized, **how)(act))
    done = CliRunner().invoke(one, list(words), catch_exceptions=False)
    return (*seen, done.output) if seen else (None, None, done.output)


def test_fields_become_options_and_options_fields() -> None:
    config, loud, _ = typed("a", "b", "--rows", "3", "--layers", "1-2", "--skip", "--loud")
    assert config == Sized(("a", "b"), 3, (1, 2), "out") and loud
    assert typed("a")[0] == Sized(("a",)), "what is not given is as the configuration has it"


def test_the_help_says_what_the_fields_say_and_nothing_else() -> None:
    shown = typed("--help", help={"rows": "Lines."})[2]
    assert all(word in shown for word in ("NAME...", "Lines.", "--skip", "--loud", "Do it."))
    assert "--inner" not in shown and "Rows." not in shown


@pytest.mark.parametrize("words", [(), ("a", "--rows", "0"), ("a", "--inner", "1")])
def test_what_is_not_declared_is_not_taken(words: tuple[str, ...]) -> None:
    config, _, shown = typed(*words)
    assert config is None and "rror" in shown


def test_a_function_that_builds_the_configuration_may_take_more() -> None:
    def build(*, quick: Annotated[bool, Option("Less.")] = False, **options: Any) -> Sized:
        return Sized(("x",), rows=1 if quick else 2, **options)

    assert typed("--quick", build=build, without=("names", "rows"))[0] == Sized(("x",), 1)
    assert typed("--layers", "3", build=build, only=("layers",))[0] == Sized(("x",), 2, (3,))


@pytest.mark.parametrize(
    ("parse", "text", "found"),
    [
        (listed, "a, b,a", ("a", "b", "a")),
        (distinct, "a,b,a", ("a", "b")),
        (listed_or_none, " none ", ()),
        (layer_numbers, "3,0-1,0", (0, 1, 3)),
        (seed_numbers, "3,0-1,0", (3, 0, 1, 0)),
        (numbers(float, "1"), "1e-2,3", (0.01, 3.0)),
    ],
)
def test_lists_are_read(parse: Any, text: str, found: tuple[Any, ...]) -> None:
    assert parse(text, "--x") == found
    with pytest.raises(AnisoscopeError, match="--x is empty"):
        parse(" , ", "--x")


def test_every_study_of_the_catalogue_has_its_command_and_all_its_options() -> None:
    group: Any = typer.main.get_command(app).commands["study"]  # type: ignore[attr-defined]
    assert set(group.commands) == set(STUDIES)
    for name, entry in STUDIES.items():
        given = {word for parameter in group.commands[name].params for word in parameter.opts}
        fields = declared_fields(entry.config).values()
        wanted = {f.name if f.option.argument else f.flag.partition("/")[0] for f in fields}  # --this/--no-this
        assert wanted | {"--out", "--debug"} <= given
        assert ("--resume" in given) is entry.resumes and ("--jobs" in given) is bool(entry.jobs_help)


@pytest.mark.parametrize(("kind", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("swallowed", [False, True])
def test_a_signal_ends_a_command_with_its_code(
    kind: int, code: int, swallowed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where some library swallows the interruption: the next sign of progress, or the end, tells."""

    def interrupted(*, late: bool) -> None:
        with progress_shown() as tell, contextlib.ExitStack() as stack:
            if swallowed:
                stack.enter_context(contextlib.suppress(BaseException))
            os.kill(os.getpid(), kind)
            time.sleep(1)
        if not late:
            tell("work", 1, 2)
            pytest.fail("the interruption was forgotten")

    before = signal.getsignal(kind)
    for late in (False, True) if swallowed else (False,):
        with pytest.raises(SystemExit) as ended:
            main(lambda late=late, **_: interrupted(late=late))
        assert ended.value.code == code
        assert "interrupted" in capsys.readouterr().err
    assert signal.getsignal(kind) == before


def test_cleaning_up_after_an_interruption_may_report_progress(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []

    def command(**_: Any) -> None:
        with progress_shown() as tell:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)
            finally:
                tell("saving", 1, 1)
                told.append("saved")

    with pytest.raises(SystemExit) as ended:
        main(command)
    assert told == ["saved"] and ended.value.code == 143
