"""What a training loop may do to a model under a monitor: its weights are those without a monitor, bit for bit.

Everything in `HOSTILE` is done in the middle of a run, with and without a monitor. No error of ours reaches the loop,
the code after `with` runs, and afterwards the model carries no hook.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.monitor.guard import MonitorWarning
from anisoscope.monitor.monitor import Monitor
from anisoscope.results.folder import RunFolder
from anisoscope.tangent.plan import TangentPlan
from support.gradient_models import batch_of, hooks_of
from support.monitored import LENGTHS, probe_of
from support.tiny_models import tiny

STEPS, WHEN = 4, [0, 1, 3]
LAYERS = (0, 2)  # those of the embedding and of the block that is replaced or removed
PLAN = TangentPlan(rank=4, draws=19, proxies=("pca",), balanced=False, standardised=False)
MODES: dict[str, dict[str, Any]] = {"probe": {"probe": [probe_of("gpt2")], "every_step": True}, "live": {}}
Hostile = Callable[[SimpleNamespace], None]
pytestmark = pytest.mark.filterwarnings("ignore::anisoscope.monitor.guard.MonitorWarning")


def optimizer_of(model: Any, kind: Any = torch.optim.AdamW) -> Any:
    return kind(model.parameters(), lr=1e-2)


def to_double(run: SimpleNamespace) -> None:
    run.model.to(torch.float64)
    run.optimizer = optimizer_of(run.model)


def to_half(run: SimpleNamespace) -> None:
    run.model.to(torch.bfloat16)
    run.optimizer = optimizer_of(run.model)


def through_meta(run: SimpleNamespace) -> None:
    """Weights that are replaced by other tensors, as moving to a device does."""
    for p in run.model.parameters():
        p.data = p.data.clone()


def copy_takes_over(run: SimpleNamespace) -> None:
    run.model = copy.deepcopy(run.model)
    run.optimizer = optimizer_of(run.model)


def pickled_takes_over(run: SimpleNamespace) -> None:
    buffer = io.BytesIO()
    torch.save(run.model.state_dict(), buffer)
    buffer.seek(0)
    run.model.load_state_dict(torch.load(buffer))


def other_optimizer(run: SimpleNamespace) -> None:
    run.optimizer = optimizer_of(run.model, torch.optim.SGD)


def no_gradients(run: SimpleNamespace) -> None:
    run.learns = False


def cleared(run: SimpleNamespace) -> None:
    for module in run.model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        module._backward_hooks.clear()


def replaced(run: SimpleNamespace) -> None:
    run.model.transformer.h[1] = copy.deepcopy(run.model.transformer.h[1])
    run.optimizer = optimizer_of(run.model)


def removed(run: SimpleNamespace) -> None:
    del run.model.transformer.h[1]


def frozen(run: SimpleNamespace) -> None:
    run.model.transformer.h[0].requires_grad_(False)


def workers(run: SimpleNamespace) -> None:
    """Loader processes are forks of this one, with the hooks and the lock of the folder."""
    loader = torch.utils.data.DataLoader(list(range(4)), num_workers=2)  # type: ignore[var-annotated, arg-type]
    assert sum(int(x) for x in loader) == 6


HOSTILE: list[Hostile] = [
    *(to_double, to_half, through_meta, copy_takes_over, pickled_takes_over, other_optimizer, no_gradients),
    *(cleared, replaced, removed, frozen, workers),
]
SILENT = (
    to_double,
    to_half,
    through_meta,
    pickled_takes_over,
    other_optimizer,
    frozen,
    workers,
)  # everything is measured


def train(hostile: Hostile, **options: Any) -> tuple[Any, Monitor | None]:
    """A short training in which something happens before step 1 of four; the weights, and the monitor."""
    run = SimpleNamespace(model=tiny("gpt2").train(), learns=True)
    first, run.optimizer = run.model, optimizer_of(run.model)
    torch.manual_seed(1)
    words: dict[str, Any] = {"when": WHEN, "plan": PLAN, "metrics": "drift,tangent", "total_steps": STEPS}
    words["layers"] = LAYERS
    made = Monitor(first, optimizer=run.optimizer, **words | options) if options else None
    with made or nullcontext():
        for step in range(STEPS):
            if step == 1:
                hostile(run)
            with made.step(step) if made is not None else nullcontext(), torch.set_grad_enabled(run.learns):
                loss = run.model(**batch_of("gpt2", *LENGTHS, seed=step)).loss
                if run.learns:
                    loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
    assert made is None or hooks_of(first) == 0
    return run.model.state_dict(), made


def assert_same(one: Any, two: Any) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


@cache
def unwatched(hostile: Hostile) -> Any:
    """The weights of the same loop without a monitor."""
    return train(hostile)[0]


@pytest.mark.parametrize("mode", ["live", pytest.param("probe", marks=pytest.mark.slow)])
@pytest.mark.parametrize("hostile", HOSTILE, ids=[act.__name__ for act in HOSTILE])
def test_a_loop_may_do_anything(hostile: Hostile, mode: str, tmp_path: Path) -> None:
    plain = unwatched(hostile)
    weights, monitor = train(hostile, out=tmp_path / "run", **MODES[mode])
    assert_same(weights, plain)
    assert monitor is not None and 0 in monitor.done
    table = RunFolder.open(tmp_path / "run").table()
    if hostile in SILENT:
        assert set(table.where(metric="gradient_energy").arrow["step"].to_pylist()) == set(WHEN), monitor.notes
    elif mode == "live":
        assert any(note.startswith("step 1") or "step 1" in note for note in monitor.notes), monitor.notes
    assert RunFolder.open(tmp_path / "run").about()["status"] == "complete"


def looping(model: Any, optimizer: Any, **options: Any) -> Iterator[int]:
    with Monitor(model, when=WHEN, plan=PLAN, metrics="drift", **options) as monitor:
        for step in range(STEPS):
            with monitor.step(step):
                model(**batch_of("gpt2", *LENGTHS, seed=step)).loss.backward()
                yield step
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("mode", MODES)
def test_a_loop_that_is_a_generator_may_be_closed(mode: str, tmp_path: Path) -> None:
    model = tiny("gpt2").train()
    steps = looping(model, optimizer_of(model), out=tmp_path / "run", **MODES[mode])
    assert [next(steps), next(steps)] == [0, 1]
    steps.close()  # type: ignore[attr-defined]
    assert hooks_of(model) == 0
    assert RunFolder.open(tmp_path / "run").about()["status"] == "interrupted"


def test_two_monitors_on_one_model_measure_what_each_would_alone() -> None:
    plain, _ = train(lambda run: None)
    _, alone = train(lambda run: None, live=True)
    assert alone is not None
    model: Any = tiny("gpt2").train()
    optimizer = optimizer_of(model)
    torch.manual_seed(1)
    words: dict[str, Any] = {"when": WHEN, "plan": PLAN, "metrics": "drift,tangent", "total_steps": STEPS}
    words["layers"] = LAYERS
    with ExitStack() as stack:
        pair = [stack.enter_context(Monitor(model, optimizer=optimizer, **words)) for _ in range(2)]
        for step in range(STEPS):
            with pair[0].step(step), pair[1].step(step):
                model(**batch_of("gpt2", *LENGTHS, seed=step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model.state_dict(), plain)
    for monitor in pair:
        assert repr(monitor.table.arrow.to_pylist()) == repr(alone.table.arrow.to_pylist())


def test_a_monitor_that_is_never_left_harms_nobody(tmp_path: Path) -> None:
    plain, _ = train(lambda run: None)
    model: Any = tiny("gpt2").train()
    optimizer = optimizer_of(model)
    torch.manual_seed(1)
    monitor = Monitor(model, optimizer=optimizer, when=WHEN, plan=PLAN, metrics="drift", out=tmp_path / "run")
    monitor.__enter__()
    for step in range(STEPS):
        with monitor.step(step):
            model(**batch_of("gpt2", *LENGTHS, seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model.state_dict(), plain)
    del monitor
    gc.collect()
    model(**batch_of("gpt2", *LENGTHS)).loss.backward()
    parts = sorted(path.stem for path in (tmp_path / "run" / "parts").glob("step-*"))
    assert parts == [f"step-{step:09d}" for step in WHEN], "what was measured is on disk"


@pytest.mark.parametrize("mode", MODES)
def test_a_monitored_model_can_be_copied_and_pickled(mode: str, tmp_path: Path) -> None:
    model = tiny("gpt2").train()
    batch = batch_of("gpt2", *LENGTHS)
    with Monitor(model, when=WHEN, plan=PLAN, metrics="drift", out=tmp_path / "run", **MODES[mode]) as monitor:
        with monitor.step(0):
            model(**batch).loss.backward()
            twin = copy.deepcopy(model)
            again: Any = pickle.loads(pickle.dumps(model))
        for other in (twin, again):
            other(**batch).loss.backward()
        with monitor.step(1):
            model(**batch).loss.backward()
    assert_same(again.state_dict(), model.state_dict())
    assert monitor.done == {0, 1} and hooks_of(model) == 0
    for other in (twin, again):  # after the end, too
        other(**batch).loss.backward()


def test_one_warning_and_one_note_for_each_kind(tmp_path: Path) -> None:
    with pytest.warns(MonitorWarning) as seen:
        _, monitor = train(cleared, out=tmp_path / "run", live=True)
    assert monitor is not None
    ours = [str(w.message) for w in seen if isinstance(w.message, MonitorWarning)]
    assert len(ours) == 1 and "step 1" in ours[0] and "attached again" in ours[0]


# -- arguments of the loop ---------------------------------------------------------------------------------------------


def numbered(number: Callable[[int], Any], log: dict[str, Any] | None = None, **options: Any) -> Monitor:
    """A training of three steps that are numbered in some way, and log something."""
    model = tiny("gpt2").train()
    with Monitor(model, **{"when": [0, 2], "metrics": "drift", **options}) as monitor:
        for step in range(3):
            with monitor.step(number(step)):
                model(**batch_of("gpt2", *LENGTHS, seed=step)).loss.backward()
            monitor.log(number(step), **log or {})
    return monitor


@pytest.mark.parametrize("kind", [np.int64, torch.tensor, float])
def test_steps_may_be_numbers_of_any_library(kind: Any, tmp_path: Path) -> None:
    monitor = numbered(kind, {"loss": 1.0}, out=tmp_path / "run")
    assert monitor.done == {0, 2} and all(type(step) is int for step in monitor.done)
    assert not monitor.guard.notes
    assert RunFolder(tmp_path / "run").table().where(metric="loss").arrow["step"].to_pylist() == [0, 2]


@pytest.mark.parametrize("kind", [str, lambda step: None, lambda step: step - 5, lambda step: step + 0.5])
def test_a_step_that_is_no_number_is_noted_and_the_loop_goes_on(kind: Any) -> None:
    monitor = numbered(kind)
    assert any("expected a whole number from 0 on" in note for note in monitor.notes), monitor.notes
    with pytest.raises(AnisoscopeError, match="expected a whole number from 0 on"):
        numbered(kind, strict=True)


@pytest.mark.parametrize(
    "names", [["val/loss"], ["../../out"], ["val-loss"], ["x" * 300], [f"number_{i}" for i in range(60)]]
)
def test_numbers_of_any_name_are_kept_in_the_folder(names: list[str], tmp_path: Path) -> None:
    logged = dict.fromkeys(names, 1.0)
    monitor = numbered(int, logged, out=tmp_path / "a" / "run")
    assert not monitor.guard.notes
    assert [path.name for path in tmp_path.rglob("*.parquet") if path.parent.name not in ("parts", "run")] == []
    again = numbered(int, logged, out=tmp_path / "a" / "run", resume=True)
    for table in (monitor.table, again.table, RunFolder(tmp_path / "a" / "run").table()):
        assert set(names) | {"drift"} <= set(table.arrow["metric"].to_pylist())


def test_options_may_be_numbers_of_numpy(tmp_path: Path) -> None:
    eight = {"seed": np.int64(1), "batch_size": np.int32(4), "rank": np.int64(2), "split": np.int64(1)}
    options: dict[str, Any] = {"metrics": "drift,tangent", "probe": [probe_of("gpt2")], "when": [0], **eight}
    found = numbered(int, out=tmp_path / "run", **options)
    assert found.done == {0} and not found.guard.notes
    same = numbered(int, **{name: int(v) if isinstance(v, np.integer) else v for name, v in options.items()})
    assert found.table.arrow["value"].equals(same.table.arrow["value"])


@pytest.mark.parametrize("kind", [lambda x: x.numpy(), lambda x: x.tolist()])
def test_a_probe_without_tensors_is_refused_in_a_sentence(kind: Any) -> None:
    with pytest.raises(AnisoscopeError, match="holds no tensor"):
        numbered(int, probe={name: kind(value) for name, value in probe_of("gpt2").items()})


@pytest.mark.parametrize("out", ["", " ", "run\0"])
def test_what_is_no_folder_name_is_refused(out: str) -> None:
    with pytest.raises(AnisoscopeError, match="expected a folder"):
        numbered(int, out=out)
