"""Measure a machine: each stage of our runs at two to six small sizes, with the code of the runs themselves.

Stages are measured when a plan first needs them, and kept. On one thread of a host seconds are those of the processor,
so that a calibration is right on a machine that does other work as well; else they are those of the clock.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.bank import Bank, make_plan, prepare
from anisoscope.measurement.evaluation import evaluate_pass
from anisoscope.measurement.inspection import Amount
from anisoscope.measurement.measure import capture_batches
from anisoscope.metrics.catalogue import parse_requests
from anisoscope.models.load import quiet
from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import every
from anisoscope.option import Progress
from anisoscope.planning.calibration import Calibration, calibration_path, fitted, read_calibration, write_calibration
from anisoscope.planning.features import (
    Amounts,
    added,
    capture_features,
    evaluation_features,
    pass_features,
    tangent_features,
    update_features,
)
from anisoscope.planning.subject import ModelShape, of_model
from anisoscope.tangent.plan import PLANS
from anisoscope.training.config import TrainConfig
from anisoscope.training.loop import make_optimizer

_VOCABULARY, _STEPS = 256, 2
_MIB = 1 << 20
# layers, width, contexts, positions
_PASSED = ((1, 32, 1, 8), (4, 64, 8, 32), (4, 64, 8, 128), (2, 256, 8, 128), (1, 512, 8, 256))
_UPDATED = ((1, 32, 2, 8), (4, 64, 16, 32), (4, 64, 16, 128), (2, 256, 8, 128), (6, 32, 4, 32), (1, 512, 8, 64))


class Machine:
    """The device that is measured, and its clock."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.threads = device, torch.get_num_threads()
        self.processor = device.type == "cpu" and self.threads == 1

    @property
    def title(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{platform.machine()}, {self.threads} thread{'s' if self.threads > 1 else ''}"

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.process_time() if self.processor else time.perf_counter()

    def timed(self, act: Callable[[], Any], *, times: int = 1) -> float:
        """The least seconds of some calls."""
        least = float("inf")
        for _ in range(times):
            start = self.now()
            act()
            least = min(least, self.now() - start)
        return max(least, 1e-7)


# -- arithmetic --------------------------------------------------------------------------------------------------------


def rates(machine: Machine) -> dict[str, float]:
    """Products of each type and bytes copied, a second; bytes written to disk a second."""
    found: dict[str, float] = {}
    size = 512 if machine.device.type == "cpu" else 4096
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        try:
            x = torch.ones(size, size, dtype=dtype, device=machine.device)
            torch.mm(x, x)
            found[str(dtype).removeprefix("torch.")] = 2 * size**3 / machine.timed(lambda x=x: torch.mm(x, x), times=3)  # type: ignore[misc]
        except (RuntimeError, TypeError):  # a device without this type
            continue
    found.setdefault("float64", found["float32"] / 32)
    x = torch.ones((8 if machine.device.type == "cpu" else 256) * _MIB, device=machine.device)
    found["copy"] = 2 * x.nbytes / machine.timed(x.clone, times=3)
    with tempfile.TemporaryDirectory() as folder:
        data = os.urandom(16 * _MIB)
        start = time.perf_counter()
        with open(Path(folder) / "written", "wb") as file:
            file.write(data)
            os.fsync(file.fileno())
        found["disk"] = len(data) / max(1e-6, time.perf_counter() - start)
    return found


def eigen(machine: Machine) -> tuple[tuple[int, float], ...]:
    """Seconds of a float64 eigenvalue problem at several widths."""
    widths = (512, 1024, 2048) if machine.device.type == "cuda" else (128, 256, 512)
    device = torch.device("cpu") if machine.device.type == "mps" else machine.device  # where ours are solved
    found = []
    for width in widths:
        x = torch.randn(width, width, dtype=torch.float64, device=device)
        x = x @ x.T
        found.append((width, machine.timed(lambda x=x: torch.linalg.eigvalsh(x), times=2)))  # type: ignore[misc]
    return tuple(found)


def _process(machine: Machine, what: str) -> dict[str, dict[str, float]]:
    """Stages that are measured in a new process; its end, after the last of them, counts as a part of its start."""
    clock = "processor" if machine.processor else "clock"
    words = [sys.executable, "-m", "anisoscope.planning.ends", what, clock, repr(time.time())]
    limits = {"OMP_NUM_THREADS": str(machine.threads)}
    before = _of_children(), time.time()
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, **limits})
    took = _of_children() - before[0] if machine.processor else time.time() - before[1]
    try:
        found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise AnisoscopeError(f"the calibration of {what!r} failed ({last}); try `anisoscope selftest`.") from error
    rest = max(0.0, took - found.pop("spent")["seconds"])
    if "start" in found:
        found["start"]["runs"] += rest
    return found


def _of_children() -> float:
    """Processor seconds of all processes that were started here and have ended."""
    times = os.times()
    return times.children_user + times.children_system


# -- models ------------------------------------------------------------------------------------------------------------


def _small(machine: Machine, layers: int, width: int, *, heads: int, length: int) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": length}
    special: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model("gpt2", vocab_size=_VOCABULARY, **sizes, **special)
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model.to(machine.device)


def _ids(contexts: int, length: int) -> Tensor:
    """Tokens whose frequencies fall as those of a text do."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.rand(contexts, length, generator=generator) ** 3
    return (drawn * (_VOCABULARY - 1)).long()


def _forward(machine: Machine) -> dict[str, float]:
    rows, seconds = [], []
    for layers, width, contexts, length in _PASSED:
        model = _small(machine, layers, width, heads=4, length=length).eval()
        ids = _ids(contexts, length).to(machine.device)
        with torch.inference_mode():
            model(input_ids=ids)
            seconds.append(machine.timed(partial(model, input_ids=ids, logits_to_keep=1), times=3))
        rows.append(pass_features(of_model("", model.to("meta")).passed(contexts, length)))
    return fitted(rows, seconds)


def _update(machine: Machine) -> dict[str, float]:
    rows, seconds = [], []
    for layers, width, contexts, length in _UPDATED:
        model = _small(machine, layers, width, heads=4, length=length).train()
        optimizer = make_optimizer(model, TrainConfig(device="cpu"))
        parameters = [p for p in model.parameters() if p.requires_grad]
        ids = _ids(contexts, length).to(machine.device)

        def act(model: nn.Module = model, ids: Tensor = ids, optimizer: Any = optimizer, p: Any = parameters) -> None:
            model(input_ids=ids, labels=ids).loss.backward()
            nn.utils.clip_grad_norm_(p, 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        act()
        seconds.append(machine.timed(act, times=3))
        bare = ModelShape("", _meta(model), length)
        rows.append(update_features(bare.updated(contexts, length), bare.parameters, tensors=len(parameters)))
    return fitted(rows, seconds)


def _meta(model: nn.Module) -> nn.Module:
    model.zero_grad(set_to_none=True)
    return model.to("meta")


# -- geometry ----------------------------------------------------------------------------------------------------------


def _geometry(
    machine: Machine, kinds: Sequence[str], *, width: int, heads: int, contexts: int, length: int
) -> tuple[Amounts, Amounts, float]:
    """Features (of the stream, of heads) and seconds of measuring sites of some kinds, without the forward pass."""
    model = _small(machine, 1, width, heads=heads, length=length).eval()
    requests = parse_requests(None)
    setup = prepare(model, requests, sites=list(kinds))
    plan, batches = make_plan(requests, setup.kinds, seed=0), _ids(contexts, length).to(machine.device).split(8)

    def bare() -> None:
        with torch.inference_mode():
            for batch in batches:
                model(input_ids=batch, logits_to_keep=1)

    def measured() -> None:
        bank = Bank(plan)
        capture_batches(model, setup, setup.captured, bank, [{"input_ids": batch} for batch in batches])
        evaluate_pass(bank, requests, setup)

    bare()
    took = machine.timed(measured) - machine.timed(bare, times=2)
    subject = of_model("", model.to("meta"))
    shapes, amount = subject.shapes(setup, length), Amount(contexts)
    captures = capture_features(setup.captured, shapes, plan, amount=amount, batches=len(batches))
    evaluations = evaluation_features(setup.captured, shapes, plan, requests, amount=amount)
    return added(captures[0], evaluations[0]), added(captures[1], evaluations[1]), max(took, 1e-5)


_STREAM = ("embed", "resid", "final")
_SIZES = ((32, 16, 32), (64, 16, 64), (64, 64, 64), (64, 64, 16), (256, 16, 32), (256, 48, 64), (768, 16, 64))
_HEADED = ((32, 4, 8, 32), (64, 16, 8, 32), (64, 4, 32, 64), (128, 8, 16, 256))


def _stream(machine: Machine, known: Calibration) -> dict[str, dict[str, float]]:
    _geometry(machine, _STREAM, width=32, heads=4, contexts=16, length=32)  # what is slow once only
    found = [_geometry(machine, _STREAM, width=d, heads=4, contexts=c, length=t) for d, c, t in _SIZES]
    width, seconds = known.eigen[-1]
    likely = {"products": 1 / known.rates["float64"], "cubes": 4 * seconds / width**3}
    likely |= {"pairs": 1 / known.rates["float32"], "row_values": 30 / known.rates["copy"]}
    return {"measure": fitted([one[0] for one in found], [one[2] for one in found], likely=likely)}


def _headed(machine: Machine) -> dict[str, dict[str, float]]:
    kinds = ("query", "key", "scores")
    _geometry(machine, kinds, width=32, heads=4, contexts=8, length=32)
    found = [_geometry(machine, kinds, width=d, heads=h, contexts=c, length=t) for d, h, c, t in _HEADED]
    return {"measure:heads": fitted([one[1] for one in found], [one[2] for one in found])}


# -- measured steps ----------------------------------------------------------------------------------------------------

_WATCHED = ((1, 32, 16, 32), (3, 32, 16, 32), (1, 32, 16, 128), (1, 96, 16, 48))


def _tangent(machine: Machine, preset: str, known: Calibration) -> dict[str, Any]:
    """Seconds and table rows of a measured step of a preset, its own passes over the probe taken off."""
    rows, seconds, made = [], [], []
    for layers, width, contexts, length in _WATCHED:
        model, ids = _small(machine, layers, width, heads=4, length=length), _ids(contexts, length).to(machine.device)
        probe = [{"input_ids": part, "labels": part} for part in ids.split(32)]
        counts = torch.bincount(ids.flatten().cpu(), minlength=_VOCABULARY)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        words: dict[str, Any] = {"metrics": preset, "counts": counts, "optimizer": optimizer, "total_steps": _STEPS}
        took, batch = 0.0, ids[:4]
        with Monitor(model, when=every(1), probe=probe, background=False, **words) as monitor:
            for step in range(_STEPS):
                start = machine.now()
                with monitor.step(step):
                    model(input_ids=batch, labels=batch).loss.backward()
                took += machine.now() - start
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        took -= _STEPS * _probing(machine, model, ids)
        widths = [width] * (layers + 2)
        rows.append(tangent_features(widths, PLANS[preset], rows=contexts * length))
        seconds.append(max(took / _STEPS, 1e-4))
        made.append((layers + 2, len(monitor.table) / _STEPS))
    few, many = made[0], max(made)
    slope = (many[1] - few[1]) / max(1, many[0] - few[0])
    records = {"sites": slope, "steps": max(0.0, few[1] - slope * few[0])}
    width, took = known.eigen[-1]
    likely = {"cubes": 4 * took / width**3, "fits": 20 / known.rates["float32"]}
    return {f"tangent:{preset}": fitted(rows, seconds, likely=likely), f"records:{preset}": records}


def _probing(machine: Machine, model: nn.Module, ids: Tensor) -> float:
    """Seconds of the passes that a measured step makes itself: forward over one half, and back over the other."""
    half = ids[: max(1, len(ids) // 2)]

    def act() -> None:
        with torch.no_grad():
            model(input_ids=half)
        model(input_ids=half, labels=half).loss.backward()

    return machine.timed(act, times=2)


@contextmanager
def _silent() -> Iterator[None]:
    import warnings

    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _loading(machine: Machine) -> dict[str, Any]:
    """Seconds of loading a model by its parameters."""
    from anisoscope.models.load import load_model

    rows, seconds = [], []
    with tempfile.TemporaryDirectory() as place, _silent():
        for number, width in enumerate((32, 384)):
            model = _small(replace_device(machine), 2, width, heads=4, length=64)
            model.save_pretrained(str(Path(place) / str(number)))  # type: ignore[operator]
            parameters = float(sum(p.numel() for p in model.parameters()))
            act = partial(load_model, str(Path(place) / str(number)), device="cpu", need_tokenizer=False)
            rows.append({"runs": 1.0, "parameters": parameters})
            seconds.append(machine.timed(act, times=2))
    return {"load": fitted(rows, seconds)}


def replace_device(machine: Machine) -> Machine:
    """The same clock with models on the host."""
    found = Machine(torch.device("cpu"))
    found.processor = machine.processor
    return found


_PARTS: dict[str, tuple[Callable[[Machine, Calibration], Any], tuple[str, ...]]] = {
    "start": (lambda m, _: _process(m, "start"), ("start", "page:profile")),
    "forward": (lambda m, _: {"forward": _forward(m)}, ("forward",)),
    "load": (lambda m, _: _loading(m), ("load",)),
    "stream": (_stream, ("measure",)),
    "heads": (lambda m, _: _headed(m), ("measure:heads",)),
    "update": (lambda m, _: {"update": _update(m)}, ("update",)),
    "standard": (lambda m, c: _tangent(m, "standard", c), ("tangent:standard", "records:standard")),
    "light": (lambda m, c: _tangent(m, "light", c), ("tangent:light", "records:light")),
    "full": (lambda m, c: _tangent(m, "full", c), ("tangent:full", "records:full")),
    "ends": (lambda m, _: _process(m, "ends"), ("claims", "page", "corpus:char", "corpus:bpe")),
}
READING = ("start", "forward", "load", "stream", "heads")  # what a profile needs
ALWAYS = (*READING, "update", "standard", "light", "ends")


def stages_of(parts: Sequence[str]) -> list[str]:
    """The stages that parts of a calibration have."""
    return [stage for part in parts for stage in _PARTS[part][1]]


def calibrate(
    device: str = "cpu",
    *,
    parts: Sequence[str] = ALWAYS,
    start: Calibration | None = None,
    tell: Progress | None = None,
) -> Calibration:
    """Measure some parts of this machine, beside what is known of it."""
    machine = Machine(torch.device(device))
    found = start or _begun(machine)
    missing = [part for part in parts if any(stage not in found.stages for stage in _PARTS[part][1])]
    state = torch.random.get_rng_state()
    for number, part in enumerate(missing):
        if tell is not None:
            tell("calibration", number, len(missing))
        for stage, coefficients in _PARTS[part][0](machine, found).items():
            found = found.with_stage(stage, coefficients)
    torch.random.set_rng_state(state)
    if tell is not None and missing:
        tell("calibration", len(missing), len(missing))
    return replace(found, base=found.stages["start"]["bytes_held"] if "start" in found.stages else found.base)


def _begun(machine: Machine) -> Calibration:
    from anisoscope import __version__

    _small(machine, 1, 32, heads=4, length=8)(input_ids=_ids(1, 8).to(machine.device))  # what is slow once only
    cuda = machine.device.type == "cuda"
    memory = torch.cuda.mem_get_info(machine.device)[1] if cuda else psutil.virtual_memory().total
    versions = {"anisoscope": __version__, "torch": torch.__version__, "python": platform.python_version()}
    words: dict[str, Any] = {"rates": rates(machine), "eigen": eigen(machine), "memory": float(memory)}
    words["host"] = float(psutil.virtual_memory().total)
    return Calibration(machine.device.type, machine.title, machine.threads, **words, versions=versions)


def here(device: str, *, parts: Sequence[str] = ALWAYS, tell: Progress | None = None) -> Calibration:
    """The calibration of this machine: as it was kept, with what a plan needs measured now."""
    machine = Machine(torch.device(device))
    path, start = calibration_path(device, machine.title, machine.threads), None
    if path.is_file():
        try:
            start = read_calibration(path)
        except AnisoscopeError:
            start = None  # of an earlier version: measured again
    found = calibrate(device, parts=parts, start=start, tell=tell)
    if start is None or set(found.stages) != set(start.stages):
        with suppress(OSError):  # a cache that cannot be written costs the calibration again, nothing else
            write_calibration(found, path)
    return found
