"""`anisoscope study performance`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from anisoscope.cli import _layers, _words
from anisoscope.cli_learning import Debug, Device, Out, Resume, Seed, _begin, _given, study
from anisoscope.errors import AnisoscopeError


@study.command("performance")
def performance(
    ctx: typer.Context,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL...]",
            help="Models, or folders of checkpoint-N folders (a run of `anisoscope train` too); without any a small "
            "decoder is trained first.",
        ),
    ] = None,
    preset: Annotated[str, typer.Option(help="tiny (2 cores, minutes) or small (one GPU).")] = "tiny",
    revisions: Annotated[str | None, typer.Option(help="Hub revisions of one model: step0,step1000,….")] = None,
    data: Annotated[
        str, typer.Option(help="Text; 'auto' is the held-out text of a training run of ours, else the embedded corpus.")
    ] = "auto",
    labels: Annotated[
        str | None, typer.Option(help="Labelled texts (.jsonl, .csv, .parquet) for the probes, in place of the tasks.")
    ] = None,
    text_field: Annotated[str, typer.Option(help="Field that holds the text.")] = "text",
    label_field: Annotated[str, typer.Option(help="Field of --labels: a class, or a list, one per word or token.")] = (
        "label"
    ),
    tasks: Annotated[
        str | None, typer.Option(help="space_next, token_class, place_in_word, article, order; default: all.")
    ] = None,
    pool: Annotated[str, typer.Option(help="One row of a context for its label: mean, cls or last.")] = "mean",
    tokens: Annotated[int | None, typer.Option(help="Tokens to look at; half to fit on, half to test on.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of a context.")] = None,
    rows: Annotated[int | None, typer.Option(help="Rows that a probe is fitted on, at most.")] = None,
    classes: Annotated[int, typer.Option(help="Tokens that the fresh readout tells apart, at most.")] = 512,
    articles: Annotated[int, typer.Option(help="Documents that the contexts come from, and task `article` asks.")] = 8,
    directions: Annotated[
        int | None, typer.Option(help="Directions that all-but-the-top removes; default: a hundredth of the width.")
    ] = None,
    shrinkage: Annotated[
        float | None, typer.Option(help="Of the covariance before whitening, 0 to 1; default: d/(n + d).")
    ] = None,
    penalties: Annotated[
        str | None, typer.Option(help="Penalties to choose from, relative to the variance; default: 1e-8 … 1.")
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Layers such as 0,3,5-8; default: all.")] = None,
    steps: Annotated[int | None, typer.Option(help="Updates of the model that is trained here.")] = None,
    batch_size: Annotated[int, typer.Option(help="Contexts in a batch.")] = 32,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or hub id of another tokenizer.")] = None,
    random_init: Annotated[bool, typer.Option("--random-init", help="Fresh random weights.")] = False,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, float64, bfloat16.")] = "auto",
    seed: Seed = 0,
    out: Out = None,
    resume: Resume = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code of the model.")] = False,
    debug: Debug = False,
) -> None:
    """Does the geometry matter? Loss and linear probes of raw and repaired rows, layer by layer."""
    command = _begin(debug)
    from anisoscope.view.performance_console import run_performance

    options: dict[str, Any] = _given(ctx) | {
        "models": tuple(models or ()),
        "revisions": _words(revisions, "--revisions"),
        "tasks": _words(tasks, "--tasks"),
        "layers": _layers(layers),
    }
    options.pop("penalties")
    if penalties is not None:
        options["penalties"] = _numbers(penalties)
    run_performance(options, out=out, resume=resume, command=command)


def _numbers(text: str) -> tuple[float, ...]:
    """`1e-4,0.01` as numbers."""
    try:
        return tuple(float(word) for word in _words(text, "--penalties"))
    except ValueError as error:
        raise AnisoscopeError(f"--penalties is {text!r}; expected numbers such as 1e-4,0.01,1.") from error
