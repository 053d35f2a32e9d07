"""The command line: words in, calls of the library out; nothing is computed here."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from anisoscope.errors import AnisoscopeError

app = typer.Typer(
    name="anisoscope",
    help="The geometry of a network's representations, layer by layer, with intervals and controls.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_DEBUG = {"on": False}
_INTERRUPTED = 130
_AGAIN = {  # what to do about a command that broke off, by whether it has --resume
    True: "what was finished is in the run folder, and the same command with --resume goes on.",
    False: "nothing was written: run the same command again.",
}
_UsageError: Any = typer.BadParameter.__bases__[0]  # of whichever click this typer carries


def _version(value: bool) -> None:
    if value:
        from anisoscope import __version__

        typer.echo(f"anisoscope {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    _DEBUG["on"] = _DEBUG["on"] or debug


def _listed(text: str | None, option: str = "") -> tuple[str, ...]:
    """`a,b,a` as words; an option that is given but empty is a slip, not a wish for everything."""
    words = tuple(filter(None, (word.strip() for word in (text or "").split(","))))
    if text is not None and not words:
        raise AnisoscopeError(f"{option or 'a list'} is empty; name something, or leave it out.")
    return words


def _words(text: str | None, option: str = "") -> tuple[str, ...]:
    """`a,b` as words, each once."""
    return tuple(dict.fromkeys(_listed(text, option)))


def _layers(text: str | None, option: str = "--layers") -> tuple[int, ...]:
    """`0,3,5-8` as numbers, each once, in their order."""
    return tuple(sorted({number for word in _words(text, option) for number in _span(word, option)}))


def _seeds(text: str, option: str = "--seeds") -> tuple[int, ...]:
    """`0,1,2` or `0-2` as numbers; one that is named twice stays twice, and is refused where the runs are known."""
    words = _listed(text, option)
    if below := [word for word in words if word.startswith("-")]:
        raise AnisoscopeError(f"{option} has {below[0]!r}; seeds are whole numbers from 0 on, such as 0,1,2.")
    return tuple(number for word in words for number in _span(word, option))


def _span(word: str, option: str) -> range:
    """`5-8` or `5` as numbers."""
    start, _, end = word.partition("-")
    try:
        numbers = range(int(start), int(end or start) + 1)
    except ValueError as error:
        raise AnisoscopeError(f"{option} has {word!r}; expected numbers such as 0,3,5-8.") from error
    if not numbers:
        raise AnisoscopeError(f"{option} has {word!r}, which runs backwards; expected {end}-{start}.")
    return numbers


@app.command()
def profile(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="A folder, a hub id (org/name or org/name@revision), a .gguf file, a PEFT adapter, a .npy or "
            ".safetensors file of rows; with --random-init an architecture such as gpt2:n_layer=4,n_embd=128 or "
            "resnet:depths=[1,2],hidden_sizes=[16,32].",
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            help="What the model reads: text (file, folder, .gz, .zip, .jsonl, .csv, .parquet), audio or images (file, "
            "folder, .zip), a datasets name, or 'embedded'."
        ),
    ] = "embedded",
    tokens: Annotated[
        int,
        typer.Option(
            help="Rows to look at, rounded up to whole contexts: tokens of text, frames of speech, patches or places "
            "of images."
        ),
    ] = 65_536,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a context of text; default: 512, or what the model takes.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Seconds of a context of speech; default: 10, or what the model takes.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Contexts in a batch.")] = 8,
    layers: Annotated[str | None, typer.Option(help="Layers such as 0,3,5-8; default: all.")] = None,
    sites: Annotated[
        str | None, typer.Option(help="Places, comma-separated, or 'all'; see `anisoscope list sites`.")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(help="Metrics, comma-separated, with options as two_nn:method=ml; 'all' for all.")
    ] = None,
    modules: Annotated[
        str | None, typer.Option(help="Modules to look at by path or pattern, for any nn.Module.")
    ] = None,
    text_field: Annotated[
        str, typer.Option(help="Field or column that holds the text, audio or images in records and datasets.")
    ] = "text",
    group_by: Annotated[
        str | None, typer.Option(help="Field whose values become groups; 'file', and 'folder' of audio and images.")
    ] = None,
    pool: Annotated[str, typer.Option(help="One row per token (none), or per context: mean, cls, last.")] = "none",
    skip_special: Annotated[bool, typer.Option("--skip-special", help="Leave special tokens out.")] = False,
    skip_first: Annotated[bool, typer.Option("--skip-first", help="Leave the first position out.")] = False,
    random_init: Annotated[bool, typer.Option("--random-init", help="Fresh random weights.")] = False,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or hub id of another tokenizer.")] = None,
    save_rows: Annotated[bool, typer.Option("--save-rows", help="Keep every row of every site on disk.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    device_map: Annotated[
        str | None, typer.Option(help="Spread a large model, such as 'auto' (needs accelerate).")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, float64, bfloat16, float16.")] = "auto",
    attention_rows: Annotated[int, typer.Option(help="Query rows per context whose attention is read; 0 = all.")] = 16,
    sample_size: Annotated[int, typer.Option(help="Rows kept for neighbours and other sampled metrics.")] = 8_192,
    halves: Annotated[
        bool, typer.Option("--halves", help="Dimensions of the stream also on two disjoint halves of the contexts.")
    ] = False,
    memory: Annotated[
        int | None, typer.Option(help="MiB that statistics may take; default: half of what is free.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all randomness.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Run folder; default: a new one under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run in --out.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with a model.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Measure the geometry of every layer of one or several models; ends with a report."""
    _DEBUG["on"] = _DEBUG["on"] or debug
    from anisoscope.measurement.profile import ProfileConfig
    from anisoscope.view.console import run_profile

    config = ProfileConfig(
        models=tuple(models),
        data=data,
        tokens=tokens,
        context=context,
        seconds=seconds,
        batch_size=batch_size,
        sites=_words(sites, "--sites"),
        layers=_layers(layers),
        metrics=_words(metrics, "--metrics"),
        modules=_words(modules, "--modules"),
        text_field=text_field,
        group_by=group_by,
        pool=pool,
        special="out" if skip_special else "in",
        first="out" if skip_first else "in",
        random_init=random_init,
        tokenizer=tokenizer,
        device=device,
        device_map=device_map,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        seed=seed,
        sample_size=sample_size,
        attention_rows=attention_rows,
        halves=halves,
        save_rows=save_rows,
        memory_mb=memory,
    )
    problem = run_profile(config, out=out, resume=resume, command=["anisoscope", *sys.argv[1:]])
    if problem:
        _fail(problem, 3)


@app.command("list")
def list_(what: Annotated[str, typer.Argument(metavar="metrics|models|sites|claims")]) -> None:
    """Explain the metrics, the model families, the sites or the claims."""
    from anisoscope.view.console import print_list

    print_list(what)


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    format: Annotated[str, typer.Option(help="table, csv or json.")] = "table",
    metric: Annotated[str | None, typer.Option(help="Only these metrics, comma-separated.")] = None,
    kind: Annotated[str | None, typer.Option(help="Only these sites, comma-separated.")] = None,
    heads: Annotated[bool, typer.Option("--heads", help="Rows of single heads, too (table).")] = False,
) -> None:
    """Print the long table of a run."""
    from anisoscope.view.console import print_run

    print_run(run, form=format, metrics=_words(metric, "--metric"), kinds=_words(kind, "--kind"), heads=heads)


@app.command()
def compare(
    first: Annotated[str, typer.Argument(help="A run folder, or RUN#MODEL.")],
    second: Annotated[str | None, typer.Argument(help="Another one; left out: the two models of the first.")] = None,
    format: Annotated[str, typer.Option(help="table, csv or json.")] = "table",
    metric: Annotated[str | None, typer.Option(help="Only these metrics, comma-separated.")] = None,
) -> None:
    """Differences of two models on the same tokens, with intervals, and CKA between their layers."""
    from anisoscope.view.console import print_comparison

    print_comparison(first, second, form=format, metrics=_words(metric, "--metric"))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    out: Annotated[
        Path | None, typer.Option(help="A folder or an .html file; default: the run, of several a folder beside them.")
    ] = None,
) -> None:
    """Make the report of one or several runs again."""
    from anisoscope.commands.report import report_runs

    typer.echo(str(report_runs(runs, out)))


@app.command()
def selftest(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the planted data.")] = 0,
) -> None:
    """Run planted and null controls on this machine; PASS or FAIL for each metric."""
    from anisoscope.view.console import print_selftest

    failed = print_selftest(device, seed)
    if failed:
        _fail(f"{failed} controls failed on this device; do not trust its numbers, and please report it.", 1)


def _fail(message: str, code: int) -> NoReturn:
    typer.secho(f"anisoscope: {message}", fg="red", err=True)
    raise SystemExit(code)


def main(run: Callable[..., Any] = app) -> None:
    """The entry point: an error is one sentence and a non-zero exit, a traceback only with --debug."""
    _DEBUG["on"] = "--debug" in sys.argv
    try:
        # standalone, the parser would swallow Ctrl-C and draw boxes around its errors
        code = run(standalone_mode=False, **_called())
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except _UsageError as error:
        _refuse(error)
    except AnisoscopeError as error:
        if _DEBUG["on"]:
            raise
        _fail(str(error), 2)
    except Exception as error:
        if _DEBUG["on"]:
            raise
        _fail(_explain(error), 1)
    if code == _INTERRUPTED:
        _fail(f"interrupted; {_AGAIN[_can_resume()]}", code)
    raise SystemExit(code if isinstance(code, int) else 0)


def _called() -> dict[str, str]:
    """The command's name in its help: that of the entry point, unless python was told to run the package."""
    return {} if Path(sys.argv[0]).name == "__main__.py" else {"prog_name": "anisoscope"}


def _can_resume() -> bool:
    """Whether the command that was typed has --resume; read from its words, as nothing else is left of it by then."""
    command: Any = typer.main.get_command(app)
    for word in sys.argv[1:]:
        command = getattr(command, "commands", {}).get(word, command)
    return any("--resume" in option.opts for option in command.params)


def _refuse(error: Any) -> NoReturn:
    """What is wrong with the words of a command; nothing to say where there were none and the help was printed."""
    message = str(error.format_message()).strip()
    if not message or "\n" in message:
        raise SystemExit(2)
    where = error.ctx.command_path if getattr(error, "ctx", None) is not None else "anisoscope"
    _fail(f"{message}{'' if message[-1] in '.?!' else '.'} See `{where} --help`.", 2)


def _explain(error: Exception) -> str:
    words = str(error).strip().splitlines()[0] if str(error).strip() else ""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
        return f"{words}; make room or rights: {_AGAIN[_can_resume()]}"
    if isinstance(error, MemoryError) or "out of memory" in words.lower() or "can't allocate memory" in words.lower():
        return f"out of memory ({words}); use a smaller --batch-size or --context, --dtype bfloat16, or fewer --layers."
    return f"{type(error).__name__}: {words}; run again with --debug for the traceback."


from anisoscope import cli_data as cli_data  # noqa: E402  (these register their commands on the app above)
from anisoscope import cli_inherent as cli_inherent  # noqa: E402
from anisoscope import cli_learning as cli_learning  # noqa: E402
from anisoscope import cli_performance as cli_performance  # noqa: E402
from anisoscope import cli_shape as cli_shape  # noqa: E402
from anisoscope import cli_sharpness as cli_sharpness  # noqa: E402
from anisoscope import cli_untrained as cli_untrained  # noqa: E402

if __name__ == "__main__":  # run as a file this module is not the one that the commands were added to
    from anisoscope.cli import main as _main

    _main()
