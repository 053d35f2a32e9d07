"""`anisoscope study untrained`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from anisoscope.cli import _listed, _seeds
from anisoscope.cli_learning import Debug, Device, Out, Resume, _begin, study
from anisoscope.errors import AnisoscopeError


@study.command("untrained")
def untrained(
    preset: Annotated[
        str, typer.Option(help="tiny (2 cores, a minute or two) or full (BERT-base size; half an hour of CPU).")
    ] = "tiny",
    families: Annotated[
        str | None,
        typer.Option(help="Families of blocks: bert, gpt2, llama, vit, …; prenorm is our own. Default: bert,prenorm."),
    ] = None,
    biases: Annotated[
        str | None, typer.Option(help="Sizes N of the bias; default: 0,0.2,0.5,1,2,5,10,20,50,100,200.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds such as 0-4; intervals are over them.")] = None,
    inits: Annotated[
        str | None, typer.Option(help="normal, xavier, orthogonal, own (as the family has it); default: the first 3.")
    ] = None,
    widths: Annotated[str | None, typer.Option(help="Widths such as 128,256,512,768.")] = None,
    heads: Annotated[int | None, typer.Option(help="Heads; default: one for every 64 of the width.")] = None,
    length: Annotated[int | None, typer.Option(help="Positions of a sequence.")] = None,
    sequences: Annotated[int | None, typer.Option(help="Sequences.")] = None,
    input_norm: Annotated[
        str, typer.Option(help="Embeddings through a LayerNorm before the bias: yes, no or both.")
    ] = "both",
    device: Device = "auto",
    out: Out = None,
    resume: Resume = False,
    debug: Debug = False,
) -> None:
    """A transformer block at initialisation with biased inputs: is it anisotropic, is its attention sharp?"""
    command = _begin(debug)
    from anisoscope.view.untrained_console import run_untrained

    options: dict[str, Any] = {"preset": preset, "heads": heads, "length": length, "sequences": sequences}
    options |= {"input_norm": input_norm, "device": device}
    for name, text in (("families", families), ("inits", inits)):
        if text is not None:
            options[name] = _listed(text, f"--{name}")
    if seeds is not None:
        options["seeds"] = _seeds(seeds)
    if widths is not None:
        options["widths"] = tuple(_number(word, "--widths", int) for word in _listed(widths, "--widths"))
    if biases is not None:
        options["biases"] = tuple(_number(word, "--biases", float) for word in _listed(biases, "--biases"))
    run_untrained(options, out=out, resume=resume, command=command)


def _number(word: str, option: str, kind: type) -> Any:
    try:
        return kind(word)
    except ValueError as error:
        whole = "whole numbers such as 128,768" if kind is int else "numbers such as 0,0.5,50"
        raise AnisoscopeError(f"{option} has {word!r}; expected {whole}.") from error
