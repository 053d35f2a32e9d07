"""`Monitor(modules=…)`: named modules of any model, in a user's own loop with a user's own loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import anisoscope
from anisoscope import evaluate_claims
from anisoscope.capture.sites.layout import find_layout
from anisoscope.capture.step_capture import LiveGradients
from anisoscope.commands.drawing import open_runs, page_of_runs
from anisoscope.errors import AnisoscopeError
from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import at, every
from anisoscope.results.query import Table
from anisoscope.tangent.plan import TangentPlan
from anisoscope.view.document import page_document
from support.gradient_models import hooks_of

PLAN = TangentPlan(draws=19, proxies=("pca",), frozen=False, balanced=False, standardised=False, permuted=False)
CONTEXTS, CLASSES = 24, 5


@dataclass
class Answer:
    """What a user's own module may return."""

    number: int
    hidden: Tensor


class Boxed(nn.Module):
    """Returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 20)

    def forward(self, x: Tensor) -> Answer:
        return Answer(3, self.inner(x))


class Plain(nn.Module):
    """An MLP with an activation in place, and outputs in boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.box = nn.Linear(12, 16), nn.ReLU(inplace=True), Boxed()
        self.head, self.never = nn.Linear(20, CLASSES), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.box(self.act(self.first(x))).hidden)
        return out


class Convolved(nn.Module):
    """Feature maps, with a batch norm and an activation in place behind a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(2, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        self.line, self.head = nn.Conv1d(16, 20, 3), nn.Linear(20, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.act(self.norm(self.conv(x)))
        out: Tensor = self.head(self.line(maps.flatten(2)).mean(-1))
        return out


class Recurrent(nn.Module):
    """Ids, a recurrent layer with time first, a packed one, and a cell that is called at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first = nn.Embedding(30, 16), nn.GRU(16, 20)
        self.packed, self.cell = nn.GRU(20, 24, batch_first=True), nn.GRUCell(24, 20)
        self.head = nn.Linear(20, CLASSES)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x, _ = self.first(self.embed(ids).transpose(0, 1))
        packed = pack_padded_sequence(x.transpose(0, 1), lengths, batch_first=True, enforce_sorted=False)
        found, _ = nn.utils.rnn.pad_packed_sequence(self.packed(packed)[0], batch_first=True)
        state = found.new_zeros(len(ids), 20)
        for t in range(3):
            state = self.cell(found[:, t], state)
        out: Tensor = self.head(state)
        return out


def _numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


LENGTHS = torch.arange(CONTEXTS) % 4 + 3
IDS = torch.randint(0, 30, (CONTEXTS, 6), generator=torch.Generator().manual_seed(2))
LABELS = torch.arange(CONTEXTS) % CLASSES


def _models() -> dict[str, tuple[nn.Module, tuple[Tensor, ...], list[str]]]:
    torch.manual_seed(0)
    return {
        "plain": (Plain(), (_numbers(CONTEXTS, 12),), ["first", "act", "box", "head"]),
        "convolved": (Convolved(), (_numbers(CONTEXTS, 2, 4, 4),), ["conv", "act", "line", "head"]),
        "recurrent": (Recurrent(), (IDS, LENGTHS), ["embed", "first", "packed", "cell", "head"]),
    }


def _tensor(value: Any) -> Any:
    """The first floating-point tensor of an output, found apart from the package."""
    if isinstance(value, Answer):
        return value.hidden
    return _tensor(value[0]) if isinstance(value, tuple) else value


def _by_hand(model: nn.Module, inputs: tuple[Tensor, ...], names: list[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """Outputs of the modules and the gradients of the summed loss in them: those of zeros that are added to them."""
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def add(name: str) -> Callable[..., Any]:
        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            x = _tensor(output)
            zero = torch.zeros_like(x, requires_grad=True)
            seen.setdefault(name, []).append((x.detach().clone(), zero))
            moved = x + zero
            if isinstance(output, Answer):
                return Answer(output.number, moved)
            if isinstance(output, tuple) and not hasattr(output, "batch_sizes"):
                first = output[0]._replace(data=moved) if hasattr(output[0], "batch_sizes") else moved
                return (first, *output[1:])
            return moved

        return hook

    handles = [model.get_submodule(name).register_forward_hook(add(name)) for name in names]
    nn.functional.cross_entropy(model(*inputs), LABELS, reduction="sum").backward()
    for handle in handles:
        handle.remove()
    found = {}
    for name, calls in seen.items():
        pairs = [(x, zero.grad) for x, zero in calls]
        found[name] = tuple(_laid_out(name, [pair[i] for pair in pairs]) for i in (0, 1))  # type: ignore[misc]
    return found  # type: ignore[return-value]


def _laid_out(name: str, calls: list[Any]) -> Tensor:
    """Rows in the order of contexts and positions."""
    x = calls[0]
    if name in ("conv", "act") and x.dim() == 4:
        return x.permute(0, 2, 3, 1).flatten(0, 2)
    if name == "line":
        return x.transpose(1, 2).flatten(0, 1)
    if name == "first" and x.dim() == 3:
        return x.transpose(0, 1).flatten(0, 1)
    if name == "packed":
        order = LENGTHS.sort(descending=True).indices  # as torch packs them
        sizes = [int((t < LENGTHS).sum()) for t in range(int(LENGTHS.max()))]
        places = [(int(order[i]), t) for t, size in enumerate(sizes) for i in range(size)]
        return x[torch.tensor(sorted(range(len(places)), key=lambda i: places[i]))]
    if name == "cell":
        return torch.stack(calls, 1).flatten(0, 1)
    return x.flatten(0, -2)


@pytest.mark.parametrize("kind", ["plain", "convolved", "recurrent"])
def test_rows_and_gradients_of_named_modules_are_those_found_by_hand(kind: str) -> None:
    model, inputs, names = _models()[kind]
    wanted = _by_hand(model, inputs, names)
    layout = find_layout(model, names)
    assert [site.name for site in layout.modules] == names, "in the order of the module tree"
    live = LiveGradients(model, layout.modules, layout=layout)
    with live:
        live.begin(geometry=True)
        nn.functional.cross_entropy(model(*inputs), LABELS, reduction="sum").backward()
        (batch,) = live.end()
    for site in layout.modules:
        x, g = wanted[site.name]
        rows = batch.rows[site]
        order = rows.index.keep.argsort()
        assert torch.equal(order, torch.arange(len(order))), "context by context"
        torch.testing.assert_close(rows.x, x)
        torch.testing.assert_close(batch.gradients[site], g, rtol=1e-4, atol=1e-6)
        assert rows.index.context.unique().numel() == CONTEXTS
        assert len({*zip(rows.index.context.tolist(), rows.index.position.tolist(), strict=True)}) == len(x)


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(*batch[:-1]), batch[-1], reduction="sum")


def _watched(kind: str, names: list[str] | str | None = None, **options: Any) -> Monitor:
    """One step of a model, its loss computed outside of it."""
    model, inputs, own = _models()[kind]
    asked: dict[str, Any] = {"metrics": "average_cosine,tangent", "plan": PLAN, "when": at([0]), "strict": True}
    monitor = Monitor(model, modules=own if names is None else names, **asked | options)
    with monitor, monitor.step(0):
        nn.functional.cross_entropy(model(*inputs), LABELS).backward()
    assert hooks_of(model) == 0
    return monitor


def _energies(monitor: Monitor) -> dict[str, float]:
    table = monitor.table.where(metric="gradient_energy", control=None, group="", average=None)
    return {row["kind"]: row["value"] for row in table.records()}


@pytest.mark.parametrize("kind", ["plain", "convolved", "recurrent"])
def test_a_probe_of_the_training_batch_sees_what_its_hooks_see(kind: str) -> None:
    """Also through the function of a user's own loss, whose batches are what it takes."""
    model, inputs, names = _models()[kind]
    model.eval()  # as a probe does: a batch norm would mix contexts
    names = [name for name in names if name != "head"]
    live = Monitor(model, modules=names, metrics="average_cosine,tangent", plan=PLAN, when=at([0]), strict=True)
    with live, live.step(0):
        nn.functional.cross_entropy(model(*inputs), LABELS).backward()
    words: dict[str, Any] = {"probe": [(*inputs, LABELS)], "loss": _loss}
    probed, read = _watched(kind, names, **words), _energies(live)
    for monitor in (live, probed):
        assert any("cell is called 3 times in a pass" in note for note in monitor.notes) == (kind == "recurrent")
    assert set(read) == set(names)
    assert _energies(probed) == pytest.approx(read, rel=1e-4)
    if kind != "recurrent":  # inputs and labels need no words
        assert _energies(_watched(kind, names, probe=(*inputs, LABELS))) == pytest.approx(read, rel=1e-4)
    place = {"metric": "average_cosine", "variant": "", "group": ""}
    for name in names:
        one, two = (monitor.table.where(**place, kind=name).records()[0] for monitor in (live, probed))
        assert one["value"] == pytest.approx(two["value"], abs=1e-6) and one["n"] == two["n"]
        assert one["contexts"] == CONTEXTS


def test_the_scale_of_a_single_batch_is_of_no_account_and_that_of_several_must_be_known() -> None:
    def energies(parts: list[slice], factor: float = 1.0, smoothing: float = 0.3, **said: Any) -> dict[str, float]:
        model, (x,), names = _models()["plain"]
        monitor = Monitor(model, modules=names[:3], metrics="tangent", plan=PLAN, when=at([0]), strict=True)
        with monitor, monitor.step(0, **said):
            for part in parts:
                loss = nn.functional.cross_entropy(model(x[part]), LABELS[part], label_smoothing=smoothing)
                (factor * loss).backward()
        return _energies(monitor)

    whole, uneven = [slice(None)], [slice(8), slice(8, None)]
    wanted = energies(whole)
    assert energies(whole, 512.0) == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(AnisoscopeError, match="how its micro-batches weigh is not known"):
        energies(uneven)
    assert energies(uneven, loss="mean") == pytest.approx(wanted, rel=1e-5), "a mean over its contexts"
    assert energies(uneven, loss="sum") != pytest.approx(wanted, rel=1e-2), "it matters"
    assert energies(uneven, smoothing=0.0) == pytest.approx(energies(whole, smoothing=0.0), rel=1e-5), "read"


def test_one_loss_over_several_passes_needs_no_words() -> None:
    """A siamese network calls its encoder twice; its gradients are those of both calls, from one backward pass."""

    def energies(model: nn.Module, compute: Callable[[nn.Module], Tensor], **said: Any) -> dict[str, float]:
        with Monitor(model, modules=["0"], when=at([0]), plan=PLAN) as monitor, monitor.step(0, **said):
            compute(model).backward()
        rows = monitor.table.where(metric="gradient_energy").records()
        return {row["variant"]: row["value"] for row in rows}

    torch.manual_seed(0)
    model, one, other = nn.Sequential(nn.Linear(12, 64), nn.ReLU()), torch.randn(64, 12), torch.randn(64, 12)

    def distance(model: nn.Module) -> Tensor:
        first, second = model(one), model(other)
        return (first - second).square().mean()

    found = energies(model, distance)
    assert found and found == pytest.approx(energies(model, distance, loss="sum"), rel=1e-9)
    assert energies(model, lambda model: 8 * distance(model)) == pytest.approx(found, rel=1e-6)


def test_modules_that_are_not_there_or_not_called_are_told_by_name() -> None:
    with pytest.raises(AnisoscopeError, match=r"no module of Plain matches 'frist'; did you mean 'first'"):
        _watched("plain", ["frist"])
    with pytest.raises(AnisoscopeError, match="layers does nothing with modules="):
        _watched("plain", ["first"], layers=[0])
    with pytest.raises(AnisoscopeError, match="nothing was seen at never: the modules were not called"):
        _watched("plain", ["first", "never"], probe=(_numbers(CONTEXTS, 12), LABELS))
    with pytest.raises(AnisoscopeError, match=r"none of the modules \(never\) was called in step 0"):
        _watched("plain", ["never"])
    seen = _watched("plain", ["first", "never"])
    assert "not called in step 0: never" in seen.notes and set(_energies(seen)) == {"first"}
    listed = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2)])})
    listed.forward = lambda x: x  # type: ignore[assignment]
    with pytest.raises(AnisoscopeError, match=r"'blocks' of ModuleDict is a list of modules.*say 'blocks.\*'"):
        find_layout(listed, ["blocks"])


def test_too_narrow_modules_do_not_take_the_rank_from_the_others() -> None:
    seen = _watched("plain", "*")  # ten lines of a user: all there is
    notes = " ".join(seen.notes)
    assert "too narrow for a tangent study" not in notes  # 5 of 20 is a rank of 1 beside 4 and more
    wide = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 2))
    monitor = Monitor(wide, modules=["0", "2"], metrics="tangent", plan=PLAN, when=at([0]), strict=True)
    with monitor, monitor.step(0):
        nn.functional.cross_entropy(wide(_numbers(CONTEXTS * 4, 12)), torch.arange(CONTEXTS * 4) % 2).backward()
    assert set(_energies(monitor)) == {"0"} and any("2 (2); name them apart" in note for note in monitor.notes)


def test_a_step_with_fewer_rows_than_the_rank_keeps_its_geometry_and_others_their_gradients() -> None:
    torch.manual_seed(0)
    net, inputs = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, CLASSES)), torch.randn(64, 12)
    few, enough = inputs[:12], inputs

    def watched(*batches: Tensor) -> Monitor:
        with Monitor(net, modules=["1"], when=at(range(3)), plan=PLAN) as monitor:
            for step, x in enumerate(batches):
                with monitor.step(step):
                    nn.functional.cross_entropy(net(x), torch.arange(len(x)) % CLASSES).backward()
        return monitor

    mixed = watched(few, enough, few)
    assert {row["step"] for row in mixed.table.where(metric="average_cosine").records()} == {0, 1, 2}
    assert {row["step"] for row in mixed.table.where(metric="gradient_energy").records()} == {1}
    (note,) = mixed.notes
    assert note.startswith("gradients of step 0, and of others like it, are left out: rank 16 is more than the ")
    alone = watched(enough).table.where(metric="gradient_energy").records()
    found = mixed.table.where(metric="gradient_energy").records()
    assert [(row["variant"], row["value"]) for row in found] == [(row["variant"], row["value"]) for row in alone]


def test_parts_without_gradients_are_measured_without_and_noted() -> None:
    class Frozen(Plain):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.first(x)
            out: Tensor = self.head(self.box(self.act(x)).hidden)
            return out

    model = Frozen()
    monitor = Monitor(model, modules=["first", "box"], metrics="average_cosine,tangent", plan=PLAN, when=at([0]))
    with monitor, monitor.step(0):
        nn.functional.cross_entropy(model(_numbers(CONTEXTS, 12)), LABELS).backward()
    assert any(note.startswith("no gradient reaches first:") for note in monitor.notes)
    assert set(_energies(monitor)) == {"box"}
    assert {row["kind"] for row in monitor.table.where(metric="average_cosine").records()} == {"first", "box"}


@pytest.mark.parametrize("halfway", [False, True])
def test_where_only_what_follows_all_sites_learns_their_geometry_is_measured(halfway: bool) -> None:
    """A probe head on a frozen network, also one that is frozen during its training."""
    model, x = Plain(), _numbers(CONTEXTS, 12)
    with Monitor(
        model, modules=["first", "act"], metrics="average_cosine,tangent", plan=PLAN, when=at([0, 1])
    ) as monitor:
        for step in range(2):
            if step or not halfway:
                model.requires_grad_(False).head.requires_grad_(True)
            with monitor.step(step):
                model(x)  # of which nothing is learned
                nn.functional.cross_entropy(model(x), LABELS).backward()
    reason = "no gradient reaches any site (what lies before is frozen, or the loss does not depend on it)"
    assert monitor.notes == [f"{reason}, so its gradients were left out"]
    energies = {row["step"] for row in monitor.table.records() if row["metric"] == "gradient_energy"}
    assert energies == ({0} if halfway else set())
    geometry = monitor.table.where(metric="average_cosine").records()
    assert [(row["kind"], row["step"], row["n"]) for row in geometry] == [
        (kind, step, CONTEXTS) for step in range(2) for kind in ("first", "act")
    ]


def test_a_study_of_gradients_alone_says_that_only_what_follows_learns() -> None:
    model, x = Plain().requires_grad_(False), _numbers(CONTEXTS, 12)
    model.head.requires_grad_(True)
    with Monitor(model, modules=["first"], metrics="tangent", plan=PLAN, when=at([0])) as monitor, monitor.step(0):
        nn.functional.cross_entropy(model(x), LABELS).backward()
    assert "no gradient of step 0 reaches any site: what lies before is frozen" in monitor.notes[0]


def test_a_batch_without_contexts_is_noted_and_the_next_step_measured() -> None:
    model = Plain()
    with Monitor(model, modules=["first"], metrics="tangent", plan=PLAN, when=at([0, 1])) as monitor:
        for step, size in enumerate((0, CONTEXTS)):
            with monitor.step(step):
                model(_numbers(size, 12)).square().sum().backward()
    assert "was given no contexts (x is (0, 12)); expected one or more" in monitor.notes[0]
    assert {row["step"] for row in monitor.table.where(metric="gradient_energy").records()} == {1}


def test_a_module_whose_rows_belong_to_no_context_is_named_with_what_to_do() -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.place, self.head = nn.Embedding(30, 16), nn.Embedding(6, 16), nn.Linear(16, 30)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.head(self.token(ids) + self.place(torch.arange(ids.shape[1])))
            return out

    with Monitor(model := Placed(), modules=["**"], plan=PLAN, when=at([0])) as monitor, monitor.step(0):
        nn.functional.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten()).backward()
    assert "module 'place' gave a tensor of shape (6, 16) for 24 contexts of 6 positions" in monitor.notes[0]
    assert "name modules without it" in monitor.notes[0]


def test_as_many_times_as_contexts_are_noted() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.GRU(6, 16)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.cells(x)[0]
            return found

    notes = []
    for times in (CONTEXTS, CONTEXTS - 1):
        model, x = Recurrent(), torch.randn(times, CONTEXTS, 6)
        named: Any = lambda args, _: {"inputs_embeds": args[0].transpose(0, 1)}  # noqa: E731
        rows: dict[str, Any] = {} if times == CONTEXTS else {"rows": named}
        with Monitor(model, modules=["cells"], when=at([0]), plan=PLAN, **rows) as monitor, monitor.step(0):
            model(x).square().sum().backward()
        notes.append([note for note in monitor.notes if "as many positions as contexts (24)" in note])
    assert [len(found) for found in notes] == [1, 0]


def test_odd_arguments_are_told_in_one_sentence() -> None:
    model, x = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, CLASSES)), torch.randn(CONTEXTS, 12)
    with pytest.raises(AnisoscopeError, match=r"modules is '\[0\]'; expected a list \(each a text\) or a text or None"):
        Monitor(model, modules=[0])  # type: ignore[list-item]
    with pytest.raises(AnisoscopeError, match="no batches to measure; give at least one"):
        anisoscope.measure(model, [], modules=["0"])
    for wrong in (CLASSES, -3):
        labels = torch.full((CONTEXTS,), wrong)
        with pytest.raises(AnisoscopeError, match=f"a label of the probe is {wrong}, and the model has 5 outputs"):
            Monitor(model, modules=["1"], probe=(x, labels))


def test_time_first_input_is_refused_unless_the_contexts_are_named() -> None:
    class Times(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(8, 20), nn.Linear(20, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.rnn(x)[0][-1])
            return out

    def measured(**options: Any) -> Monitor:
        model = Times()
        words: dict[str, Any] = {"modules": ["rnn"], "metrics": "tangent", "plan": PLAN, "when": at([0])}
        monitor = Monitor(model, strict=True, **words, **options)
        with monitor, monitor.step(0):
            nn.functional.cross_entropy(model(_numbers(7, CONTEXTS, 8)), LABELS).backward()
        return monitor

    with pytest.raises(AnisoscopeError, match=r"GRU is not batch_first.*7 contexts in its first dimension"):
        measured()
    assert set(_energies(measured(rows=lambda args, kwargs: {"inputs_embeds": args[0].transpose(0, 1)}))) == {"rnn"}


def _trained(
    out: Any, *, stop: int | None = None, resume: bool = False, watched: bool = True
) -> tuple[Any, list[float]]:
    """A short training that is killed after a step, and replayed from the start when it resumes."""
    torch.manual_seed(0)
    model, (x,), names = _models()["plain"]
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    words: dict[str, Any] = {"modules": names[:3], "metrics": "average_cosine,tangent", "plan": PLAN, "when": every(2)}
    monitor = Monitor(model, out=out, resume=resume, every_step=True, strict=True, **words) if watched else None
    with monitor if monitor is not None else torch.enable_grad():
        for step in range(5):
            with monitor.step(step) if monitor is not None else torch.enable_grad():
                loss = nn.functional.cross_entropy(model(x + step), LABELS)
                loss.backward()
            losses.append(float(loss.detach()))
            if step == stop:
                raise KeyboardInterrupt
            optimizer.step()
            optimizer.zero_grad()
    return monitor, losses


def test_a_resumed_run_of_named_modules_ends_as_an_undisturbed_one_and_training_is_the_same(tmp_path: Any) -> None:
    whole, losses = _trained(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        _trained(tmp_path / "cut", stop=3)
    again, _ = _trained(tmp_path / "cut", resume=True)
    columns = ("step", "layer", "kind", "metric", "variant", "group", "value")
    for read in (lambda m: m.table, lambda m: m.trace):
        one, two = ([tuple(map(row.get, columns)) for row in read(m).records()] for m in (whole, again))
        assert one == two and {row[2] for row in one} >= {"first", "act", "box"}
    assert _trained(None, watched=False)[1] == losses
    steps = {row["step"] for row in whole.trace.records()}
    assert steps == set(range(5)), "every step"


def test_callbacks_of_trainers_pass_modules_on(tmp_path: Any) -> None:
    lightning = pytest.importorskip("lightning")
    from anisoscope.integrations.lightning import MonitorCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _models()["plain"][0]

        def training_step(self, batch: Any, _: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    data = torch.utils.data.TensorDataset(_numbers(CONTEXTS, 12), LABELS)
    watch = MonitorCallback(modules=["first", "b*"], when=at([0]), metrics="tangent", plan=PLAN, strict=True)
    words: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    words |= {"enable_model_summary": False, "max_steps": 1, "accelerator": "cpu", "default_root_dir": tmp_path}
    lightning.Trainer(callbacks=[watch], **words).fit(Module(), torch.utils.data.DataLoader(data, batch_size=CONTEXTS))
    assert watch.monitor is not None and set(_energies(watch.monitor)) == {"first", "box"}


def test_the_page_of_named_modules_has_the_figures_of_a_training_and_no_claims_about_tables(tmp_path: Any) -> None:
    monitor, _ = _trained(tmp_path / "run")
    document = page_document(page_of_runs(open_runs([tmp_path / "run"])))
    for words in ("Where gradients go", "Gradients, steps by layers", "Over training", "3 modules"):
        assert words in document
    told = evaluate_claims(Table.read(tmp_path / "run"))
    assert {verdict.claim for verdict in told if not verdict.details.get("missing")} >= {"tangent_energy", "amplified"}
    absent = {verdict.claim for verdict in told if verdict.details.get("missing")}
    assert {"embedding_updates_aligned", "frequent_most_enriched"} <= absent
    assert set(_energies(monitor)) == {"first", "act", "box"}
