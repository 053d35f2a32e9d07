"""The commands that have to do with learning: train, tangent, sweep, study, claims."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from anisoscope.cli import _DEBUG, _layers, _listed, _seeds, _words, app

study = typer.Typer(
    name="study",
    help="The protocol of one paper, from data to verdicts.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(study)

Data = Annotated[
    str, typer.Option(help="Text file, folder, .gz, .zip, .jsonl, .csv, .parquet, a datasets name, or 'embedded'.")
]
Out = Annotated[Path | None, typer.Option(help="Run folder; default: a new one under runs/.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run in --out.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")]
Seed = Annotated[int, typer.Option(help="Seed of all randomness.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Rank = Annotated[int | None, typer.Option(help="Directions of the tangent proxy; default: 16, at most a quarter of d.")]
Metrics = Annotated[
    str, typer.Option(help="Preset by cost (light, standard, full), or metrics; 'tangent' is the tangent study.")
]
Updates = Annotated[int | None, typer.Option(help="Updates of each arm.", min=1)]
Limit = Annotated[float | None, typer.Option(help="Megabytes of text to use.")]
When = Annotated[str | None, typer.Option(help="When it is measured: log, log:COUNT, every:N, or steps.")]
Contexts = Annotated[int | None, typer.Option(help="Held-out contexts that are looked at.", min=8)]
Models = Annotated[str | None, typer.Option(help="Only these models of the paper, by hub id (paper).")]
RemoveDownloads = Annotated[
    bool, typer.Option("--remove-downloads", help="Delete what was downloaded for a model once it is measured.")
]

_WATCH = ("monitor", "when", "contexts", "rank", "every_step")  # the other options of `train` are fields of TrainConfig


def _begin(debug: bool) -> list[str]:
    _DEBUG["on"] = _DEBUG["on"] or debug
    return ["anisoscope", *sys.argv[1:]]


def _given(ctx: typer.Context) -> dict[str, Any]:
    """The options of a command as given, without those that every command has."""
    return {k: v for k, v in ctx.params.items() if k not in ("out", "resume", "debug")}


@app.command()
def train(
    ctx: typer.Context,
    arch: Annotated[str, typer.Option(help="decoder (causal attention) or encoder (both sides).")] = "decoder",
    family: Annotated[
        str | None,
        typer.Option(help="gpt2, gpt_neox, llama; bert, modernbert, eurobert; prenorm. Default: gpt2 or bert."),
    ] = None,
    objective: Annotated[
        str | None, typer.Option(help="next or masked tokens; default: next in a decoder, masked in an encoder.")
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(help="softmax, qk-norm, mean-removed, fixed-sharp, uniform; families prenorm and gpt_neox."),
    ] = None,
    data: Data = "embedded",
    steps: Annotated[int, typer.Option(help="Updates.")] = 1000,
    layers: Annotated[int, typer.Option(help="Blocks.")] = 4,
    width: Annotated[int, typer.Option(help="Width of the residual stream.")] = 128,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    context: Annotated[int, typer.Option(help="Tokens of a context.")] = 128,
    tokens: Annotated[str, typer.Option(help="char, enwik8 (its 205 bytes), or bpe:8192.")] = "char",
    batch_size: Annotated[int, typer.Option(help="Contexts of a micro-batch.")] = 16,
    accumulate: Annotated[int, typer.Option(help="Micro-batches of an update.")] = 1,
    lr: Annotated[float, typer.Option(help="Peak learning rate (warm-up, then cosine to a tenth).")] = 1e-3,
    weight_decay: Annotated[float, typer.Option(help="Decoupled weight decay.")] = 0.1,
    dropout: Annotated[float, typer.Option(help="Dropout.")] = 0.0,
    tied: Annotated[bool, typer.Option("--tied", help="One embedding table for input and output.")] = False,
    frequency: Annotated[
        str, typer.Option(help="natural, flat or zipf:S: resample the corpus towards that token distribution.")
    ] = "natural",
    limit: Annotated[float | None, typer.Option(help="Megabytes of text to use; default: all.")] = None,
    text_field: Annotated[str, typer.Option(help="Field that holds the text, in .jsonl, .csv and .parquet.")] = "text",
    monitor: Annotated[
        str, typer.Option(help="What is measured on the way: none, light, standard, full, or metrics.")
    ] = "standard",
    when: Annotated[str, typer.Option(help="When: log, log:COUNT, every:N, or steps such as 0,10,100.")] = "log",
    contexts: Annotated[int, typer.Option(help="Held-out contexts that are looked at.")] = 96,
    every_step: Annotated[
        bool, typer.Option("--every-step", help="Moments of activations and gradients at all steps, too.")
    ] = False,
    rank: Rank = None,
    checkpoints: Annotated[str, typer.Option(help="Kept weights: log, every:N, none, steps, comma-separated.")] = (
        "log,every:500"
    ),
    compile: Annotated[bool, typer.Option("--compile", help="torch.compile the training.")] = False,
    dtype: Annotated[str, typer.Option(help="auto (bfloat16 autocast on CUDA), float32, float64, bfloat16.")] = "auto",
    device: Device = "auto",
    seed: Seed = 0,
    out: Out = None,
    resume: Resume = False,
    debug: Debug = False,
) -> None:
    """Train a small encoder or decoder from scratch, measured while it learns; ends with a report."""
    command = _begin(debug)
    from anisoscope.view.console_learning import run_train

    options = {k: v for k, v in _given(ctx).items() if k not in _WATCH}
    watch: dict[str, Any] = {"monitor": monitor, "when": when, "contexts": contexts, "rank": rank}
    watch |= {"every_step": True} if every_step else {}  # a run without it goes on as it was begun
    run_train(options, watch, out=out, resume=resume, command=command)


@app.command()
def tangent(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="A folder, a hub id (org/name@revision) or a .gguf file.")],
    data: Data = "embedded",
    tokens: Annotated[int, typer.Option(help="Tokens to look at; half to fit on, half to test on.")] = 32_768,
    context: Annotated[int | None, typer.Option(help="Tokens of a context; default: 512 or less.")] = None,
    batch_size: Annotated[int, typer.Option(help="Contexts in a batch.")] = 8,
    preset: Annotated[str, typer.Option(help="light, standard or full.")] = "standard",
    rank: Rank = None,
    draws: Annotated[int, typer.Option(help="Control subspaces.")] = 999,
    layers: Annotated[str | None, typer.Option(help="Layers such as 0,3,5-8; default: all.")] = None,
    text_field: Annotated[str, typer.Option(help="Field that holds the text.")] = "text",
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
    """Do tangent directions of one given model hold its gradients? Its own loss gives them."""
    command = _begin(debug)
    from anisoscope.view.console_learning import run_sweep

    options = _given(ctx) | {"layers": _layers(layers), "series": False}
    run_sweep(options, out=out, resume=resume, command=command)


@app.command()
def sweep(
    ctx: typer.Context,
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="A folder of checkpoint-N folders or checkpoint files, a hub id with --revisions, or several models "
            "in the order of training.",
        ),
    ],
    revisions: Annotated[
        str | None,
        typer.Option(help="Hub revisions: step0,step1000,…; all that name a step; log: about 16 log-spaced ones."),
    ] = None,
    architecture: Annotated[
        str | None,
        typer.Option(help="Of .ckpt, .pt and other weight files: a folder with config.json, or bert:hidden_size=64."),
    ] = None,
    data: Annotated[
        str, typer.Option(help="Text, audio or images as in `anisoscope profile`, a datasets name, or 'embedded'.")
    ] = "embedded",
    tokens: Annotated[int, typer.Option(help="Rows to look at: tokens, frames, patches or positions.")] = 32_768,
    context: Annotated[int | None, typer.Option(help="Tokens of a context of text; default: 512 or less.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Seconds of a context of speech; default: 10 or less.")] = None,
    batch_size: Annotated[int, typer.Option(help="Contexts in a batch.")] = 8,
    preset: Annotated[
        str, typer.Option(help="light, standard or full (with gradients); shape or attention (geometry alone).")
    ] = "standard",
    metrics: Annotated[
        str | None,
        typer.Option(help="Exactly these metrics instead, without gradients; 'tangent' adds the tangent study."),
    ] = None,
    sites: Annotated[
        str | None, typer.Option(help="Places, comma-separated, or 'all'; see `anisoscope list sites`.")
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Layers such as 0,3,5-8; default: all.")] = None,
    halves: Annotated[
        bool, typer.Option("--halves", help="Intrinsic dimensions also on two halves of the contexts.")
    ] = False,
    rank: Rank = None,
    draws: Annotated[int, typer.Option(help="Control subspaces.")] = 999,
    text_field: Annotated[str, typer.Option(help="Field or column that holds text, audio or images.")] = "text",
    tokenizer: Annotated[str | None, typer.Option(help="Folder or hub id of another tokenizer.")] = None,
    name: Annotated[str | None, typer.Option(help="What the series is called in the table.")] = None,
    remove_downloads: Annotated[
        bool,
        typer.Option("--remove-downloads", help="Delete what this run downloaded once it is measured."),
    ] = False,
    device: Device = "auto",
    device_map: Annotated[
        str | None, typer.Option(help="Spread a large model, such as 'auto' (needs accelerate).")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, float64, bfloat16, float16.")] = "auto",
    seed: Seed = 0,
    out: Out = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on in --out: with what is not done, and what could not be loaded.")
    ] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code of the model.")] = False,
    debug: Debug = False,
) -> None:
    """A series of checkpoints in the order of training; repeated, missing, broken and swapped ones are flagged."""
    command = _begin(debug)
    from anisoscope.view.console_learning import run_sweep

    options = {k: v for k, v in _given(ctx).items() if k != "models"}
    options |= {"model": models[0], "others": tuple(models[1:]), "layers": _layers(layers)}
    options |= {"revisions": _words(revisions, "--revisions"), "metrics": _words(metrics, "--metrics")}
    run_sweep(options | {"sites": _words(sites, "--sites")}, out=out, resume=resume, command=command)


@app.command()
def claims(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders with a table.")],
    names: Annotated[str | None, typer.Option("--claims", help="Only these, comma-separated.")] = None,
    proxy: Annotated[str, typer.Option(help="semi_nmf, pca, …")] = "semi_nmf",
    fit: Annotated[str, typer.Option(help="refit or frozen.")] = "refit",
    format: Annotated[str, typer.Option(help="table or json.")] = "table",
) -> None:
    """Which claims of the literature hold in these runs: verdict, effect, interval, p, and why."""
    from anisoscope.view.console_learning import print_claims

    print_claims(runs, _words(names, "--claims") or None, proxy=proxy, fit=fit, form=format)


@study.command("revisiting")
def revisiting(
    preset: Annotated[str, typer.Option(help="tiny (2 cores, minutes), small (one GPU), paper (hub models).")] = "tiny",
    data: Data = "embedded",
    arms: Annotated[str | None, typer.Option(help="decoder, encoder, decoder-flat, decoder-zipf1.5, ….")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds such as 0,1,2; general claims need three.")] = None,
    steps: Annotated[int | None, typer.Option(help="Updates of each arm.")] = None,
    layers: Annotated[int | None, typer.Option(help="Blocks.")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the residual stream.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of a context.")] = None,
    metrics: Annotated[str | None, typer.Option(help="light, standard, full, or metrics.")] = None,
    when: Annotated[str | None, typer.Option(help="log, log:COUNT, every:N, or steps.")] = None,
    rank: Rank = None,
    limit: Limit = None,
    tokens: Annotated[int, typer.Option(help="Tokens of each model's probe (paper).")] = 32_768,
    device: Device = "auto",
    out: Out = None,
    resume: Resume = False,
    debug: Debug = False,
) -> None:
    """Revisiting Anisotropy: train a decoder and an encoder under the monitor, and test the claims."""
    command = _begin(debug)
    from anisoscope.view.console_learning import run_revisiting

    options: dict[str, Any] = {"preset": preset, "data": data, "steps": steps, "layers": layers, "width": width}
    options |= {"context": context, "metrics": metrics, "when": when, "rank": rank, "limit": limit, "device": device}
    options["tokens"] = tokens
    if arms is not None:
        options["arms"] = _listed(arms, "--arms")  # one named twice is refused
    if seeds is not None:
        options["seeds"] = _seeds(seeds)
    run_revisiting(options, out=out, resume=resume, command=command)


@study.command("curvature")
def curvature(
    seed: Seed = 0,
    beta: Annotated[
        float | None, typer.Option(help="Exponent of local scale over frequency; default: a ladder.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer samples: a look, not a result.")] = False,
    out: Out = None,
    debug: Debug = False,
) -> None:
    """The geometry behind it: does frequency-biased sampling hide curvature?"""
    command = _begin(debug)
    from anisoscope.view.console_learning import run_curvature_study

    run_curvature_study(seed=seed, beta=beta, quick=quick, out=out, command=command)
