"""`anisoscope study inherent`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from anisoscope.cli import _listed, _seeds
from anisoscope.cli_learning import (
    Contexts,
    Data,
    Debug,
    Device,
    Limit,
    Models,
    Out,
    RemoveDownloads,
    Resume,
    Updates,
    When,
    _begin,
    study,
)
from anisoscope.cli_shape import PAPER, refuse_idle

_TRAINED = ("arms", "families", "seeds", "steps", "limit", "examples", "when", "contexts", "jobs")


@study.command("inherent")
def inherent(
    ctx: typer.Context,
    preset: Annotated[str, typer.Option(help="tiny (2 cores, minutes), small (one GPU), paper (hub models).")] = "tiny",
    text: Data = "embedded",
    images: Annotated[
        str,
        typer.Option(
            help="A folder with a folder of pictures for each class, MNIST's idx files, an .npz with images and "
            "labels, 'digits' (scikit-learn's), or 'embedded'."
        ),
    ] = "embedded",
    audio: Annotated[
        str,
        typer.Option(
            help="A folder of recordings, each a class of its own, or with a folder of them for each class; or "
            "'embedded'."
        ),
    ] = "embedded",
    arms: Annotated[
        str | None,
        typer.Option(
            help="Trained models: text-decoder, text-encoder, characters, speech, vision, convolution; or none."
        ),
    ] = None,
    families: Annotated[
        str | None, typer.Option(help="Families measured with random weights, such as swin,resnet; or none.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds of every model, such as 0,1,2.")] = None,
    steps: Updates = None,
    limit: Limit = None,
    examples: Annotated[int | None, typer.Option(help="Pictures, and clips, to use at most.", min=4)] = None,
    when: When = None,
    contexts: Contexts = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Arms trained at the same time, each in a process of its own; default: 2 in tiny, else 1.", min=1
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens, frames or patches of each model's probe (paper).", min=64)] = (
        16_384
    ),
    models: Models = None,
    remove_downloads: RemoveDownloads = False,
    device: Device = "auto",
    out: Out = None,
    resume: Resume = False,
    debug: Debug = False,
) -> None:
    """Anisotropy Is Inherent to Self-Attention: tokens, characters, speech, pictures, and convolutions beside them."""
    command = _begin(debug)
    refuse_idle(ctx, _TRAINED if preset == "paper" else PAPER, paper=preset == "paper")
    from anisoscope.view.console_inherent import run_inherent

    options: dict[str, Any] = {"preset": preset, "text": text, "images": images, "audio": audio, "steps": steps}
    options |= {"limit": limit, "examples": examples, "when": when, "contexts": contexts, "device": device}
    options |= {"tokens": tokens, "remove_downloads": remove_downloads}
    named = {"arms": arms, "families": families, "models": models}
    options |= {name: _names(words, f"--{name}") for name, words in named.items() if words is not None}
    if seeds is not None:
        options["seeds"] = _seeds(seeds)
    run_inherent(options, jobs=jobs, out=out, resume=resume, command=command)


def _names(words: str, option: str) -> tuple[str, ...]:
    return () if words.strip() == "none" else _listed(words, option)
