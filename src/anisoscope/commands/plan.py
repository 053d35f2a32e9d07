"""`--dry-run` of the commands that measure: what they would take, from a calibration; and `anisoscope.plan`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anisoscope.errors import AnisoscopeError
from anisoscope.option import refuse_typed, was_typed

if TYPE_CHECKING:
    from anisoscope.planning.calibration import Calibration
    from anisoscope.planning.plans import RunPlan

_CALIBRATION = "A file of `anisoscope calibrate --out`, made on the machine that will run it, or a device: {}."
DEVICES = "a100, h100, h200, b200, l4, rtx4090"
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say how long it takes, and how much memory and disk; stop.")]
CalibrationFile = Annotated[str | None, typer.Option(help=_CALIBRATION.format(DEVICES))]
Pilot = Annotated[int | None, typer.Option(help="With --dry-run: measure so many contexts for intervals.", min=8)]
WantedWidth = Annotated[
    str | None, typer.Option(help="With --pilot: half-width that intervals should have: 5% of the value, or 0.01.")
]
AsJson = Annotated[bool, typer.Option("--json", help="With --dry-run: print the plan as JSON.")]
Count = Annotated[int | None, typer.Option("--checkpoints", help="With --dry-run: how many there are.", min=1)]


@dataclass(frozen=True)
class DryOptions:
    """The options that go with --dry-run."""

    calibration: str | None = None
    pilot: int | None = None
    wanted_width: str | None = None
    json: bool = False
    checkpoints: int | None = None


def dry(dry_run: bool, **options: Any) -> DryOptions | None:
    """The options of a dry run; None, after a check that none of them was typed, where the run is meant."""
    if not dry_run:
        refuse_typed(filter(was_typed, options), "without --dry-run")  # other commands have options of these names
        return None
    if options.get("wanted_width") and not options.get("pilot"):
        raise AnisoscopeError("--wanted-width needs a pilot; add --pilot, such as --pilot 16.")
    return DryOptions(**options)


def calibration_for(device: str, given: str | None = None, tell: Any = None) -> Callable[[Sequence[str]], Calibration]:
    """A function that gives the calibration of a device with the parts that a plan needs.

    `given` is a file, or the name of a device of published rates. A GPU that is neither here nor described is taken to
    be a usual one.
    """
    import torch

    from anisoscope.planning import calibration, stages

    def find(parts: Sequence[str]) -> Calibration:
        wanted = torch.device(device).type if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        if given is not None and given.lower() not in calibration.KNOWN:
            if not Path(given).expanduser().exists() and "." not in given and "/" not in given:
                calibration.known_device(given)  # raises, with the names that are known
            found = calibration.read_calibration(given)
            if device != "auto" and found.device != wanted:
                raise AnisoscopeError(
                    f"{given!r} is of a {found.device}, and the plan of a {wanted}; leave --device out, or change it."
                )
            return found
        if given is None and (wanted == "cpu" or (wanted == "cuda" and torch.cuda.is_available())):
            return stages.here(wanted, parts=parts, tell=tell)
        known = calibration.known_device(given or calibration.USUAL)
        return stages.here("cpu", parts=parts, tell=tell).on(known)

    return find


def show_plan(make: Callable[[Any], RunPlan], options: DryOptions, *, device: str) -> None:
    """Make a plan and print it."""
    from anisoscope.commands.command import progress_shown
    from anisoscope.view.terminal.plan import print_plan
    from anisoscope.view.terminal.screen import print_json

    with progress_shown() as tell:
        found = make(calibration_for(device, options.calibration, tell))
    if options.json:
        print_json(found.as_dict())
    else:
        print_plan(found.as_dict())


def plan(command: str, *models: str | Path, calibration: str | Path | None = None, **options: Any) -> dict[str, Any]:
    """What a run would take, as `--dry-run` says it: seconds, bytes of host, device and disk, and their parts.

    `command` is profile, sweep, tangent or train; models and options are those of the command. A model may be a shape,
    `shape:layers=80,width=8192,heads=64,kv_heads=8,ffn=28672,vocab=128256`, and `calibration` the name of a device
    that is not here, or a file that `anisoscope calibrate --out` made there.

    >>> plan("profile", "shape:layers=80,width=8192,heads=64", device="cuda", calibration="h200")  # doctest: +SKIP
    """
    from anisoscope.errors import check_known
    from anisoscope.models.placement import elsewhere
    from anisoscope.option import python_options
    from anisoscope.planning import plans

    check_known("command", command, ("profile", "sweep", "tangent", "train"))
    given, named = None if calibration is None else str(calibration), tuple(map(str, models))
    checkpoints, watch = options.pop("checkpoints", None) if command == "sweep" else None, options.pop("watch", {})
    with elsewhere():
        if command == "train":
            from anisoscope.training.config import TrainConfig

            training = TrainConfig(**python_options(TrainConfig, options))
            watched = {"monitor": "standard", "when": "log", "contexts": 96, "rank": None, **watch}
            return plans.plan_train(training, watched, calibration_for(training.device, given)).as_dict()
        if not named:
            raise AnisoscopeError("no model was given; name a folder, a hub id, or a shape such as shape:layers=12,….")
        if command == "profile":
            from anisoscope.measurement.config import ProfileConfig

            profiled = ProfileConfig(models=named, **python_options(ProfileConfig, options))
            return plans.plan_profile(profiled, calibration_for(profiled.device, given)).as_dict()
        from anisoscope.series import SweepConfig

        words = python_options(SweepConfig, options)
        swept = SweepConfig(named[0], others=named[1:], series=command == "sweep", **words)
        return plans.plan_sweep(swept, calibration_for(swept.device, given), checkpoints=checkpoints).as_dict()


def calibrate(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Also write it to this file, for --calibration elsewhere.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Measure how quick this machine is at what runs do, for --dry-run; half a minute, kept in the user's cache."""
    from dataclasses import asdict

    from anisoscope.commands.command import progress_shown
    from anisoscope.models.placement import choose_device
    from anisoscope.planning import stages
    from anisoscope.planning.calibration import calibration_path, write_calibration
    from anisoscope.view.terminal.plan import print_calibration
    from anisoscope.view.terminal.screen import print_json, print_path

    chosen = choose_device(device).type
    with progress_shown() as tell:
        found = stages.calibrate(chosen, tell=tell)
    path = out if out is not None else calibration_path(chosen, found.title, found.threads)
    write_calibration(found, calibration_path(chosen, found.title, found.threads))
    if out is not None:
        write_calibration(found, out)
    if json:
        print_json(asdict(found))
        return
    print_calibration(asdict(found))
    print_path(path)
    sys.stdout.flush()
