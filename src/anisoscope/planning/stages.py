"""Measure a machine: each stage of our runs at two to six small sizes, with the code of the runs themselves.

Stages are measured when a plan first needs them, and kept. On one thread of a host seconds are those of the processor,
so that a calibration is right on a machine that does other work as well; else they are those of the clock.
"""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from anisoscope.capture.sites.site import Site
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
    capture_features,
    evaluation_features,
    pass_features,
    tangent_features,
    update_features,
)
from anisoscope.planning.subject import Subject, of_model
from anisoscope.tangent.plan import PLANS
from anisoscope.training.config import TrainConfig
from anisoscope.training.loop import make_optimizer

PIPELINE, DRAWING = "anisoscope.commands.pipeline", "anisoscope.commands.drawing"  # above this room
_VOCABULARY, _STEPS = 256, 2
_MIB = 1 << 20


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
        except RuntimeError:  # a device without this type
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
    widths = (128, 256, 512) if machine.device.type == "cpu" else (512, 1024, 2048)
    found = []
    for width in widths:
        x = torch.randn(width, width, dtype=torch.float64, device=machine.device)
        x = x @ x.T
        found.append((width, machine.timed(lambda x=x: torch.linalg.eigvalsh(x), times=2)))  # type: ignore[misc]
    return tuple(found)


def _start(machine: Machine) -> dict[str, float]:
    """Seconds of a new process with everything imported that a run needs."""
    code = "import time; import anisoscope.commands.pipeline, transformers.models.auto.modeling_auto; print(%s)"
    clock = "time.process_time()" if machine.processor else "time.perf_counter()"
    before = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code % clock], capture_output=True, text=True, check=False)
    took = time.perf_counter() - before
    words = done.stdout.split()
    return {"runs": float(words[-1]) if machine.processor and words else took}


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
    for layers, width, contexts, length in ((1, 32, 1, 8), (4, 64, 8, 32), (4, 64, 8, 128), (2, 256, 8, 128), (1, 512, 8, 256)):
        model = _small(machine, layers, width, heads=4, length=length).eval()
        ids = _ids(contexts, length).to(machine.device)
        with torch.inference_mode():
            model(input_ids=ids)
            seconds.append(machine.timed(partial(model, input_ids=ids, logits_to_keep=1), times=3))
        rows.append(pass_features(of_model("", model.to("meta")).passed(contexts, length)))
    return fitted(rows, seconds)


def _update(machine: Machine) -> dict[str, float]:
    rows, seconds = [], []
    for layers, width, contexts, length in ((1, 32, 2, 8), (4, 64, 16, 32), (4, 64, 16, 128), (2, 256, 8, 128), (6, 32, 4, 32), (1, 512, 8, 64)):
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
        bare = Subject("", _meta(model), length)
        rows.append(update_features(bare.updated(contexts, length), bare.parameters, tensors=len(parameters)))
    return fitted(rows, seconds)


def _meta(model: nn.Module) -> nn.Module:
    model.zero_grad(set_to_none=True)
    return model.to("meta")


# -- geometry ----------------------------------------------------------------------------------------------------------

Timing = tuple[tuple[Amounts, Amounts], tuple[Amounts, Amounts], float, float]


def _geometry(machine: Machine, kinds: Sequence[str], *, width: int, heads: int, contexts: int, length: int) -> Timing:
    """Features and seconds of collecting and of evaluating at the sites of some kinds, the forward pass taken off."""
    model = _small(machine, 1, width, heads=heads, length=length).eval()
    requests = parse_requests(None)
    setup = prepare(model, requests, sites=list(kinds))
    plan, batches = make_plan(requests, setup.kinds, seed=0), _ids(contexts, length).to(machine.device).split(8)
    bank = Bank(plan)

    def bare() -> None:
        with torch.inference_mode():
            for batch in batches:
                model(input_ids=batch)

    bare()
    plain = machine.timed(bare, times=2)
    given = [{"input_ids": batch} for batch in batches]
    collected = machine.timed(lambda: capture_batches(model, setup, setup.captured, bank, given))
    evaluated = machine.timed(lambda: evaluate_pass(bank, requests, setup))
    subject = of_model("", model.to("meta"))
    shapes, amount = subject.shapes(setup, length), Amount(contexts)
    sizes: dict[str, Any] = {"amount": amount}
    captures = capture_features(setup.captured, shapes, plan, batches=len(batches), **sizes)
    evaluations = evaluation_features(setup.captured, shapes, plan, requests, **sizes)
    return captures, evaluations, max(collected - plain, 1e-5), evaluated


_STREAM = ("embed", "resid", "final")
_SIZES = ((32, 16, 32), (64, 16, 64), (64, 64, 64), (256, 16, 64), (256, 48, 64), (512, 48, 64))
_HEADED = ((32, 4, 8, 32), (64, 16, 8, 32), (64, 4, 32, 64), (128, 8, 16, 256))


def _stream(machine: Machine) -> dict[str, dict[str, float]]:
    _geometry(machine, _STREAM, width=32, heads=4, contexts=16, length=32)  # what is slow once only
    found = [_geometry(machine, _STREAM, width=d, heads=4, contexts=c, length=t) for d, c, t in _SIZES]
    return {
        "capture": fitted([one[0][0] for one in found], [one[2] for one in found]),
        "evaluate": fitted([one[1][0] for one in found], [one[3] for one in found]),
    }


def _headed(machine: Machine) -> dict[str, dict[str, float]]:
    kinds = ("query", "key", "scores")
    _geometry(machine, kinds, width=32, heads=4, contexts=8, length=32)
    found = [_geometry(machine, kinds, width=d, heads=h, contexts=c, length=t) for d, h, c, t in _HEADED]
    return {
        "capture:heads": fitted([one[0][1] for one in found], [one[2] for one in found]),
        "evaluate:heads": fitted([one[1][1] for one in found], [one[3] for one in found]),
    }


# -- measured steps ----------------------------------------------------------------------------------------------------

_WATCHED = ((2, 32, 16, 32), (4, 32, 16, 32), (2, 32, 16, 128), (2, 96, 16, 32), (2, 128, 32, 96))


def _tangent(machine: Machine, preset: str, sizes: Sequence[tuple[int, int, int, int]] = _WATCHED) -> dict[str, Any]:
    """Seconds and table rows of a measured step of a preset, its own passes over the probe left in."""
    rows, seconds, made = [], [], []
    for layers, width, contexts, length in sizes:
        model, ids = _small(machine, layers, width, heads=4, length=length), _ids(contexts, length).to(machine.device)
        probe = [{"input_ids": part, "labels": part} for part in ids.split(32)]
        counts = torch.bincount(ids.flatten().cpu(), minlength=_VOCABULARY)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        words: dict[str, Any] = {"metrics": preset, "counts": counts, "optimizer": optimizer, "total_steps": _STEPS}
        took, batch = 0.0, ids[:4]
        with Monitor(model, when=every(1), probe=probe, **words) as monitor:
            for step in range(_STEPS):
                start = machine.now()
                with monitor.step(step):
                    model(input_ids=batch, labels=batch).loss.backward()
                took += machine.now() - start
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        widths = [width] * (layers + 2)
        rows.append(tangent_features(widths, PLANS[preset], rows=contexts * length))
        seconds.append(took / _STEPS)
        made.append((layers + 2, len(monitor.table) / _STEPS))
    few, many = made[0], max(made)
    slope = (many[1] - few[1]) / max(1, many[0] - few[0])
    records = {"sites": slope, "steps": max(0.0, few[1] - slope * few[0])}
    return {f"tangent:{preset}": fitted(rows, seconds), f"records:{preset}": records}


def _standard(machine: Machine) -> dict[str, Any]:
    return _tangent(machine, "standard")


def _other(machine: Machine, preset: str) -> dict[str, Any]:
    """Another preset: its own coefficients from fewer sizes."""
    return _tangent(machine, preset, (_WATCHED[0], _WATCHED[2], _WATCHED[3]))


# -- ends of runs ------------------------------------------------------------------------------------------------------


def _ends(machine: Machine) -> dict[str, Any]:
    """Seconds of claims and pages by rows of the table, of preparing text, of loading, and the bytes of a run."""
    from anisoscope.claims.catalogue import evaluate_claims
    from anisoscope.results.folder import RunFolder
    from anisoscope.training.corpus import prepare_corpus

    pipeline, drawing = importlib.import_module(PIPELINE), importlib.import_module(DRAWING)
    with tempfile.TemporaryDirectory() as place, _silent():
        root = Path(place)
        corpus = machine.timed(lambda: prepare_corpus("embedded", root / "corpus", tokens="char"))
        pieces = machine.timed(lambda: prepare_corpus("embedded", root / "bpe", tokens="bpe:512"))
        config = TrainConfig(steps=8, layers=2, width=32, heads=4, context=32, checkpoints="none", device="cpu")
        watch = {"contexts": 16, "when": "0,2,4,8"}
        run = root / "run"
        pipeline.train(config, run, monitor="light", watch=watch, corpus=root / "corpus", report=False)
        folder, pages, judged, sizes = RunFolder(run), [], [], []
        whole = folder.table()
        steps = sorted(set(whole.to_arrow()["step"].to_pylist()) - {None})
        for kept in (steps, steps[:2]):
            part = whole.where(step=kept) if kept != steps else whole
            folder.write_table(part)
            judged.append(machine.timed(lambda part=part: evaluate_claims(part, robust=True)))  # type: ignore[misc]
            pages.append(machine.timed(lambda: drawing.report_runs([run])))
            sizes.append({"runs": 1.0, "records": float(len(part))})
        options: dict[str, Any] = {"random_init": True, "tokens": 1024, "device": "cpu", "report": False}
        first = machine.timed(
            lambda: pipeline.profile("gpt2:n_layer=1,n_embd=32,n_head=2,n_positions=64", out=root / "p", **options)
        )
        shown = machine.timed(lambda: drawing.report_runs([root / "p"]))
    found = {"claims": fitted(sizes, judged), "page": fitted(sizes, pages)}
    found |= {"page:profile": {"runs": shown}, "corpus:char": {"runs": corpus}, "corpus:bpe": {"runs": pieces}}
    return found | {"settle": {"runs": first}}


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


_PARTS: dict[str, tuple[Callable[[Machine], Any], tuple[str, ...]]] = {
    "start": (lambda m: {"start": _start(m)}, ("start",)),
    "forward": (lambda m: {"forward": _forward(m)}, ("forward",)),
    "update": (lambda m: {"update": _update(m)}, ("update",)),
    "stream": (_stream, ("capture", "evaluate")),
    "heads": (_headed, ("capture:heads", "evaluate:heads")),
    "load": (_loading, ("load",)),
    "standard": (_standard, ("tangent:standard", "records:standard")),
    "light": (lambda m: _other(m, "light"), ("tangent:light", "records:light")),
    "full": (lambda m: _other(m, "full"), ("tangent:full", "records:full")),
    "ends": (_ends, ("claims", "page", "page:profile", "corpus:char", "corpus:bpe", "settle")),
}
ALWAYS = ("start", "forward", "stream", "heads", "load", "ends", "update", "standard")


def stages_of(parts: Sequence[str]) -> list[str]:
    """The stages that parts of a calibration have."""
    return [stage for part in parts for stage in _PARTS[part][1]]


def calibrate(
    device: str = "cpu", *, parts: Sequence[str] = ALWAYS, start: Calibration | None = None, tell: Progress | None = None
) -> Calibration:
    """Measure some parts of this machine, beside what is known of it."""
    machine = Machine(torch.device(device))
    found = start or _begun(machine)
    missing = [part for part in parts if any(stage not in found.stages for stage in _PARTS[part][1])]
    state = torch.random.get_rng_state()
    for number, part in enumerate(missing):
        if tell is not None:
            tell("calibration", number, len(missing))
        for stage, coefficients in _PARTS[part][0](machine).items():
            found = found.with_stage(stage, coefficients)
    torch.random.set_rng_state(state)
    if tell is not None and missing:
        tell("calibration", len(missing), len(missing))
    return replace(found, base=max(found.base, float(psutil.Process().memory_info().rss)))


def _begun(machine: Machine) -> Calibration:
    from anisoscope import __version__

    _forward(machine)  # what is slow once only: lazy imports, first calls of libraries
    cuda = machine.device.type == "cuda"
    memory = torch.cuda.mem_get_info(machine.device)[1] if cuda else psutil.virtual_memory().total
    versions = {"anisoscope": __version__, "torch": torch.__version__, "python": platform.python_version()}
    words: dict[str, Any] = {"rates": rates(machine), "eigen": eigen(machine), "memory": float(memory)}
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
        try:
            write_calibration(found, path)
        except OSError:
            pass  # a cache that cannot be written costs the calibration again, nothing else
    return found
