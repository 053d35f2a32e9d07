"""Finding the checkpoints of a training in order: folders, files, hub revisions, or several models as given."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from anisoscope.errors import AnisoscopeError
from anisoscope.models import source as sources
from anisoscope.models.checkpoint import step_of_file
from anisoscope.models.downloads import LOG_REVISIONS, log_spaced_steps, revisions_of
from anisoscope.models.source import STATE_SUFFIXES, TRAINER_FILES, is_checkpoint, parse_model
from anisoscope.option import refuse_typed

_STEP = re.compile(
    r"(?:checkpoint|ckpt|global[-_]?step|step|iter(?:ation)?|update)[-_=]?(\d+)([kKM](?![A-Za-z0-9]))?", re.IGNORECASE
)
_NUMBER = re.compile(r"(\d+)(?!.*\d)")
_THOUSANDS = {"k": 1_000, "m": 1_000_000}
_MODELS = re.compile(r"(pytorch_|adapter_)?model|.*-of-\d+")  # a model's own, without a step
_RECORDS = (("trainer_state.json", "global_step"), (os.path.join("training", "state.json"), "step"))
_CONFIGURATIONS = ("config.json", "adapter_config.json")
_WORD = re.compile(r"all|log(?::([1-9]\d*))?")


@dataclass(frozen=True)
class Checkpoint:
    """One model of a series."""

    spec: str  # what load_model takes
    step: int | None
    label: str
    revision: str = ""  # of a hub model
    late: bool = False  # whether it was named after a later one

    @property
    def key(self) -> int:
        """The number under which its results are stored."""
        return self.step or 0


@dataclass(frozen=True)
class CheckpointSeries:
    """Checkpoints sorted by step; `timed` is false if steps are only the order in which models were given."""

    name: str
    checkpoints: list[Checkpoint]
    notes: list[str] = field(default_factory=list)
    timed: bool = True

    @property
    def last(self) -> int | None:
        return max((c.step for c in self.checkpoints if c.step is not None), default=None)


def named_step(name: str) -> int | None:
    """The step after a word such as checkpoint, step or iter in a name, or None."""
    match = _STEP.search(name)
    return None if match is None else int(match[1]) * _THOUSANDS.get((match[2] or "").lower(), 1)


def step_of(name: str) -> int | None:
    """The training step in the name of a folder or revision, or None.

    >>> step_of("checkpoint-500"), step_of("step3000-tokens6B"), step_of("step-50K-105b"), step_of("main")
    (500, 3000, 50000, None)
    """
    step = named_step(name)
    match = _NUMBER.search(name) if step is None else None
    return int(match[1]) if match else step


def find_series(
    models: Sequence[str],
    revisions: Sequence[str] = (),
    *,
    architecture: str | None = None,
    name: str | None = None,
    known: Sequence[str] = (),
    inner: bool = False,
) -> CheckpointSeries:
    """The checkpoints of a folder, the revisions of a hub model, or several models, in the order of training.

    With `inner` also those inside each of several folders, which are then stages of a training.
    Of `revisions` the first may be `all` or `log` (`log:8`: about eight): those of the hub; further names are then what
    is taken where they cannot be listed. `known` are the revisions that such a word resolved to when the sweep began.
    """
    if len(models) > 1 and revisions:
        raise AnisoscopeError("--revisions are those of one hub model; name several models without it.")
    if len(models) > 1:
        found = _several(models, architecture, inner=inner)
    else:
        found = _revisions(models[0], revisions, known) if revisions else _folder(models[0], architecture)
    if architecture is not None and not any(Path(each.spec).expanduser().is_file() for each in found.checkpoints):
        refuse_typed(["architecture"], "for checkpoints that come with a configuration of their own")
    return found if name is None else replace(found, name=name)


def _revisions(model: str, wanted: Sequence[str], known: Sequence[str]) -> CheckpointSeries:
    if Path(model).expanduser().exists():
        raise AnisoscopeError(f"{model!r} is a folder, which has no revisions; leave --revisions out.")
    notes: list[str] = []
    word = _WORD.fullmatch(wanted[0])
    names = known or (_listed(model, word, wanted[1:], notes=notes) if word is not None else wanted)
    found = [Checkpoint(f"{model}@{each}", step_of(each), each, revision=each) for each in names]
    return CheckpointSeries(model.split("/")[-1], _ordered(found, model, given=True), notes)


def _listed(model: str, word: re.Match[str], instead: Sequence[str], *, notes: list[str]) -> list[str]:
    """Revisions whose names contain a step, one per step: all of them, or log-spaced ones; else those given `instead`.

    Online the ones that are there, offline those in the local cache; `notes` get a sentence on which they are.
    """
    online = sources.hub_reachable()
    try:
        there = revisions_of(model, online=online)
    except AnisoscopeError as error:
        if not instead:
            raise
        notes.append(f"revisions are the {len(instead)} of a fixed list: {str(error).partition(';')[0]}")
        return list(instead)
    by_step = {step: each for each in sorted(there, reverse=True) if (step := named_step(each)) is not None}
    if not by_step:
        return _none_listed(model, there, instead, online=online, notes=notes)
    if not online:
        notes.append(f"the hub cannot be reached: --revisions {word[0]} are those of the local cache")
    elif absent := [each for each in instead if each not in there]:
        notes.append(f"{', '.join(absent)} of {model} {'are' if len(absent) > 1 else 'is'} not on the hub")
    chosen = sorted(by_step) if word[0] == "all" else log_spaced_steps(list(by_step), int(word[1] or LOG_REVISIONS))
    if online and instead:
        notes.append(f"revisions are {len(chosen)} of the {len(by_step)} that the hub has of {model}")
    return [by_step[step] for step in chosen]


def _none_listed(
    model: str, there: Sequence[str], instead: Sequence[str], *, online: bool, notes: list[str]
) -> list[str]:
    """The revisions given instead, where no name of a revision has a step; without them an error."""
    where = f"of {model!r} names a step" if online else f"of {model!r} in the local cache names a step"
    what = f"no revision {where} (found: {', '.join(there[:4]) or 'none'})"
    reason = what if online else f"the hub cannot be reached, and {what}"
    if not instead:
        how = "name them with --revisions" if online else "go online, or name cached ones with --revisions"
        raise AnisoscopeError(f"{reason}; {how}.")
    notes.append(f"revisions are the {len(instead)} of a fixed list: {reason}")
    return list(instead)


def _folder(model: str, architecture: str | None) -> CheckpointSeries:
    path = Path(model).expanduser()
    if not path.is_dir():
        raise AnisoscopeError(
            f"{model!r} is no folder here; give a folder of checkpoint-N folders, several models, or a hub id with "
            "--revisions step0,step1000,…."
        )
    places = [sorted(place.iterdir()) if place.is_dir() else [] for place in (path, path / "checkpoints")]
    for inside in places:
        folders = [p for p in inside if p.is_dir() and is_checkpoint(p.name)]
        files = [p for p in inside if p.is_file() and _is_weights(p)] if not folders else []
        if files and architecture is None:
            raise AnisoscopeError(
                f"{model!r} holds checkpoint files ({files[0].name}), which do not say what model they are of; give "
                "--architecture, a folder with config.json or such as bert:num_hidden_layers=12,hidden_size=256."
            )
        if folders or files:
            return _local([*folders, *files], path, architecture)
    if nameless := [p.name for inside in places for p in inside if p.is_file() and _may_be_weights(p)]:
        raise _stepless(nameless)
    shown = ", ".join(p.name for p in places[0][:4]) or "nothing"
    raise AnisoscopeError(f"{model!r} holds no checkpoint-N folders (found: {shown}); give the folder that does.")


def _local(places: list[Path], path: Path, architecture: str | None) -> CheckpointSeries:
    named = [(place, _step_of_path(place)) for place in places]
    sure = {step for place, step in named if named_step(place.name) is not None}
    twins = [p for p, step in named if named_step(p.name) is None and step in sure]  # Lightning's last.ckpt
    notes = [f"{p.name} was left out: it is of a step that another checkpoint has" for p in twins]
    nameless = [p for p, step in named if step is None]
    if len(nameless) == len(named):
        raise _stepless([p.name for p in nameless])
    notes += [f"{p.name} was left out: it names no step and holds none that can be read" for p in nameless]
    if (path / "config.json").is_file() and any(map(is_checkpoint, (p.name for p in places))):
        notes.append("the model in the folder itself was left out: it does not say its step")
    found = [
        Checkpoint(str(_weights_in(p, architecture)), step, p.stem if p.is_file() else p.name)
        for p, step in named
        if p not in twins and p not in nameless
    ]
    name = path.resolve().name if path.name != "checkpoints" else path.resolve().parent.name
    return CheckpointSeries(name, _ordered(found, str(path)), notes)


def _is_weights(path: Path) -> bool:
    """Whether a file is the checkpoint of a step, not a file of the optimiser or of a model without a step."""
    return _may_be_weights(path) and (path.suffix == ".ckpt" or _step_of_path(path) is not None)


def _may_be_weights(path: Path) -> bool:
    """Whether a file holds weights by its name, whether or not it has a step."""
    if path.suffix not in STATE_SUFFIXES or path.name.startswith(".") or TRAINER_FILES.fullmatch(path.stem):
        return False
    return path.suffix == ".ckpt" or _MODELS.fullmatch(path.stem) is None


def _stepless(names: Sequence[str]) -> AnisoscopeError:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    one = len(names) == 1
    return AnisoscopeError(
        f"{shown} {'names no step and holds' if one else 'name no step and hold'} none inside; rename "
        f"{'it' if one else 'them'} (model_100.pt) or give them one by one in order."
    )


def _step_of_path(path: Path) -> int | None:
    """The step in the name, else the one recorded inside, else any number in the name (an epoch)."""
    name = path.stem if path.is_file() else path.name
    step = named_step(name)
    if step is None:
        step = recorded_step(str(path))
    return step if step is not None else step_of(name)


def _weights_in(path: Path, architecture: str | None) -> Path:
    """The folder itself, or the weight file inside it if it has no config.json and an architecture was given."""
    if architecture is None or path.is_file() or (path / "config.json").is_file():
        return path
    files = [p for p in sorted(path.iterdir()) if p.suffix in STATE_SUFFIXES]
    weights = [p for p in files if p.stem in ("model", "pytorch_model")] or [p for p in files if _is_weights(p)]
    return weights[0] if weights else path


def recorded_step(spec: str) -> int | None:
    """The step in the trainer's record inside a local checkpoint, or None."""
    path = Path(spec)
    if path.is_file():
        return step_of_file(path) if path.suffix in STATE_SUFFIXES else None
    for name, key in _RECORDS:
        try:
            value = json.loads((path / name).read_text(encoding="utf-8")).get(key)
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(value, int):
            return value
    return None


def is_there(spec: str) -> bool:
    """Whether a local checkpoint has a file of weights, readable or not."""
    path = Path(spec)
    if not path.is_dir():
        return path.is_file()
    return any(p.suffix in STATE_SUFFIXES and not TRAINER_FILES.fullmatch(p.stem) for p in path.iterdir())


def stamp(spec: str) -> str:
    """Names, sizes and times of the files of a local checkpoint, to detect that they have changed."""
    path = Path(spec)
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path] if path.is_file() else []
    return ", ".join(f"{p.name} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in files)


def _several(models: Sequence[str], architecture: str | None, *, inner: bool = False) -> CheckpointSeries:
    """Models in the order of training: checkpoints of one training, or of stages that follow each other."""
    given = [one for model in models for one in _staged(model, architecture, inner=inner)]
    labels = _labels(given)
    if len(set(labels)) < len(labels):
        raise AnisoscopeError(f"{next(m for m in labels if labels.count(m) > 1)!r} is named twice; name it once.")
    steps = [one.step for one in given]
    stages = list(dict.fromkeys(one.stage for one in given if one.stage is not None))
    notes: list[str] = []
    if len(stages) > 1:
        steps, note = _one_after_the_other(given, stages)
        notes += [note] if note else []
    timed = None not in steps and len(set(steps)) == len(steps)
    if not timed:
        notes = ["the models do not all name a step of their own: 0, 1, 2, … is the order they were given"]
    places: list[int | None] = steps if timed else list(range(len(given)))
    specs = [one.spec for one in given]
    found = [Checkpoint(*each) for each in zip(specs, places, labels, strict=True)]
    name = _common([stage.name for stage in stages] if len(stages) > 1 and timed else labels)
    return CheckpointSeries(name, _ordered(found, ", ".join(models), given=True), notes, timed)


@dataclass(frozen=True)
class _Given:
    """A model of a series that was named, or found in a folder that was."""

    spec: str
    name: str
    stage: Path | None = None  # the folder of its training, if it is a local one
    step: int | None = None  # of that training


def _staged(model: str, architecture: str | None, *, inner: bool) -> list[_Given]:
    """A model as it is given; of a folder that holds no model of its own, or with `inner`, the checkpoints inside."""
    path = Path(model).expanduser()
    folders = sorted((_step_of_path(p) or 0, p) for p in path.iterdir() if _is_stored(p)) if path.is_dir() else []
    if folders and (inner or not any((path / name).is_file() for name in _CONFIGURATIONS)):
        stage = path.resolve()
        return [_Given(str(p), f"{stage.name}/{p.name}", stage, step) for step, p in folders]
    source = parse_model(model, state=architecture is not None)
    step = named_step(model.rstrip("/").split("/")[-1])
    if not path.is_dir():
        return [_Given(model, source.name, step=step)]
    here = path.resolve()
    if step is not None:
        return [_Given(model, source.name, here.parent, step)]
    # a trained model is that of its last checkpoint, as far as can be known
    return [_Given(model, source.name, here, folders[-1][0] if folders else None)]


def _is_stored(path: Path) -> bool:
    """Whether it is a checkpoint-N folder with a model."""
    return path.is_dir() and is_checkpoint(path.name) and any((path / name).is_file() for name in _CONFIGURATIONS)


def _labels(given: Sequence[_Given]) -> list[str]:
    """What the models are called: stages by the names of their folders, if those tell them apart."""
    whole = [one.stage is not None and Path(one.spec).expanduser().resolve() == one.stage for one in given]
    short = [one.stage.name if all_ and one.stage else one.name for one, all_ in zip(given, whole, strict=True)]
    for labels in (short, [one.name for one in given]):
        if len(set(labels)) == len(labels):
            return labels
    return [one.spec for one in given]


def _one_after_the_other(given: Sequence[_Given], stages: Sequence[Path]) -> tuple[list[int | None], str]:
    """The steps of models of several stages, each of which goes on from the last one; None where one is not known."""
    begins, at = {}, 0
    for stage in stages:
        begins[stage] = at
        own = [one.step for one in given if one.stage == stage]
        if None in own and stage != stages[0]:
            return [None] * len(given), ""
        stored = [_step_of_path(p) or 0 for p in stage.iterdir() if _is_stored(p)]
        at += max([*(step or 0 for step in own), *stored], default=0)
    if any(one.stage is None for one in given):
        return [None] * len(given), ""
    steps: list[int | None] = [begins[one.stage] + (one.step or 0) for one in given if one.stage is not None]
    told = ", ".join(f"{stage.name} at {begins[stage]}" for stage in stages[1:])
    return steps, f"steps count through all stages, each of which begins where the one before ended: {told}"


def _common(labels: Sequence[str]) -> str:
    """A name for several models: their common prefix, else the first and the last name.

    >>> _common(["bert_pretrained", "bert_ft"]), _common(["a", "b", "c"])
    ('bert', 'a…c')
    """
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*labels, strict=False))
    shared = re.sub(r"[^A-Za-z0-9]+$", "", "".join(letters[0] for letters in alike))
    return shared if len(shared) > 2 else f"{labels[0]}…{labels[-1]}"


def _ordered(found: list[Checkpoint], model: str, *, given: bool = False) -> list[Checkpoint]:
    """Sorted by step; in an order that was `given`, those after a later one are marked as late."""
    if nameless := [c.label for c in found if c.step is None]:
        raise AnisoscopeError(
            f"{nameless[0]!r} of {model!r} names no training step; expected names such as step1000 or checkpoint-1000."
        )
    steps = [c.step for c in found]
    if twice := [step for step in steps if steps.count(step) > 1]:
        raise AnisoscopeError(f"step {twice[0]} is named twice in the series of {model!r}; name each checkpoint once.")
    marked = [replace(c, late=given and any(other.key > c.key for other in found[:k])) for k, c in enumerate(found)]
    return sorted(marked, key=lambda c: c.key)


def refuse_training_run(model: str) -> None:
    """Raise an error if the path is the folder of a training run and not a model."""
    path = Path(model).expanduser()
    if (path / "checkpoints").is_dir() and not (path / "config.json").is_file():
        raise AnisoscopeError(
            f"{model!r} is the folder of a training run, not a model; use `anisoscope sweep {model}` for all its "
            f"checkpoints, or give one: {path / 'checkpoints' / 'checkpoint-N'}."
        )


def has_loss(model: Any) -> bool:
    """Whether a model has a language-model head, and so a loss to take gradients of."""
    if "labels" in inspect.signature(model.forward).parameters:
        return True
    try:
        return model.get_output_embeddings() is not None
    except (AttributeError, NotImplementedError):
        return False


def refuse_lossless(loaded: Any, spec: str) -> None:
    """Raise an error for a model without a language-model head."""
    if not has_loss(loaded.model):
        raise AnisoscopeError(
            f"{spec!r} was loaded as {type(loaded.model).__name__}, without a language-model head, so it has no loss "
            "and no gradients; give a checkpoint that holds its head (…ForCausalLM or …ForMaskedLM)."
        )
