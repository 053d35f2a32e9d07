"""Monitors of models that hear and see: gradients of a probe and of the training's own batches, energies by numpy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anisoscope.capture.gradient_pass import gradient_rows, untouched
from anisoscope.capture.objective import UNREAD, find_objective
from anisoscope.capture.row import original_contexts
from anisoscope.capture.sites.layout import find_layout
from anisoscope.capture.sites.site import Site
from anisoscope.capture.step_capture import LiveGradients, LossScale, live_pass
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.measure import measure
from anisoscope.measurement.targets import with_masks
from anisoscope.monitor.monitor import Monitor
from anisoscope.numerics.hashing import half_of
from anisoscope.results.folder import RunFolder
from anisoscope.tangent.plan import TangentPlan
from support.tiny_media import _COMMON, _speech, sound

PLAN = TangentPlan(rank=4, draws=19, permuted=False, balanced=False, frozen=False, embedding=False)
PLAIN: dict[str, Any] = {"proxy": "semi_nmf", **dict.fromkeys(("control", "average", "coordinates"))}
_IMAGE = {**_COMMON, "image_size": 16, "patch_size": 4, "num_labels": 5, "encoder_stride": 4}
_FRAMES = _speech(pad_token_id=0, num_codevectors_per_group=8, codevector_dim=16, proj_codevector_dim=16)
_MAPS = {"hidden_sizes": [16, 24], "depths": [1, 2], "num_labels": 5, "embedding_size": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViTForImageClassification": ("ViTConfig", _IMAGE),
    "ViTForMaskedImageModeling": ("ViTConfig", _IMAGE),
    "ResNetForImageClassification": ("ResNetConfig", _MAPS),
    "HubertForCTC": ("HubertConfig", _FRAMES),
    "WavLMForSequenceClassification": ("WavLMConfig", {**_FRAMES, "num_labels": 5}),
    "Wav2Vec2ForPreTraining": ("Wav2Vec2Config", _FRAMES),
}


def model_of(kind: str, **more: Any) -> Any:
    import transformers

    config, options = MODELS[kind]
    torch.manual_seed(3)
    model = getattr(transformers, kind)(getattr(transformers, config)(**options, **more))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.double().eval()


def batch_of(kind: str, number: int = 12) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    if "Image" in kind:
        inputs: dict[str, Any] = {"pixel_values": torch.randn(number, 3, 16, 16, generator=generator).double()}
    else:
        inputs = {"input_values": torch.stack([clip.double() for clip in sound(*[600] * number)])}
    if "Classification" in kind:
        inputs["labels"] = torch.arange(number) % 5
    if "CTC" in kind:
        inputs["labels"] = torch.stack([torch.tensor([1 + i % 7, 9, 3 if i % 2 else -100]) for i in range(number)])
    return inputs


@pytest.mark.parametrize("kind", MODELS)
def test_a_probe_of_any_modality_has_the_energies_of_its_gradients(kind: str, tmp_path: Path) -> None:
    model, inputs = model_of(kind), batch_of(kind)
    watched = Monitor(model, when=[0], metrics="drift", plan=PLAN, probe=inputs, out=tmp_path / "run")
    with watched as monitor, monitor.step(0):
        pass
    table = monitor.table.where(metric="gradient_energy", **PLAIN)
    assert len(RunFolder.open(tmp_path / "run").table().where(metric="gradient_energy"))
    layout = find_layout(model)
    (site,) = layout.sites(["stage" if "Res" in kind else "resid"], [1])
    given = with_masks(model, inputs) if "labels" not in inputs else inputs
    with untouched(model), torch.no_grad():
        objective = find_objective(model, given)
    rows = gradient_rows(model, given, [site], layout=layout, loss=objective).sites[site]
    assert rows.g is not None
    test = half_of(rows.index.context).eq(1).numpy()
    g, basis = rows.g.numpy()[test], monitor.basis(site).cpu().numpy()
    (found,) = [r for r in table.records() if (r["layer"], r["kind"]) == (1, site.kind) and not r["group"]]
    assert found["value"] == pytest.approx(np.square(g @ basis).sum() / np.square(g).sum(), rel=1e-6)
    assert found["n"] == len(g) and found["contexts"] == int(half_of(original_contexts(inputs)).sum())


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("kind", [kind for kind in MODELS if "PreTraining" not in kind])
def test_live_gradients_are_those_of_the_summed_loss(kind: str, reduction: str) -> None:
    if reduction == "sum" and "CTC" not in kind:
        pytest.skip("its loss is a mean")
    model = model_of(kind, **({"ctc_loss_reduction": reduction} if "CTC" in kind else {}))
    inputs, layout = with_masks(model, batch_of(kind, 6)), find_layout(model)
    sites = layout.sites(["stage"] if "Res" in kind else ["embed", "resid"])
    with untouched(model), torch.no_grad():
        objective = find_objective(model, inputs)
    wanted = gradient_rows(model, inputs, sites, layout=layout, loss=objective)
    with LiveGradients(model, sites, layout=layout) as live:
        live.begin()
        (model(**inputs).loss * 0.25).backward()
        (batch,) = live.end()
    factor = LossScale("auto", None, 1.0).factor(batch, step=0)
    found = live_pass(batch, sites)
    assert batch.tokens() == objective.count(inputs)
    for site in sites:
        g, ours = wanted.sites[site].g, found.sites[site].g
        assert g is not None and ours is not None
        size = float(g.abs().max())  # some losses are computed in float32
        torch.testing.assert_close(ours * factor, g, rtol=1e-4, atol=1e-5 * size)


class Net(nn.Module):
    """A user's net whose forward returns nothing but its output."""

    def __init__(self, *, own: bool = False) -> None:
        super().__init__()
        self.stem, self.own = nn.Conv2d(3, 16, 3, padding=1), own
        self.stages = nn.ModuleList([nn.Conv2d(16, 20, 3, stride=2), nn.Conv2d(20, 24, 3, stride=2)])

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x).relu()
        for stage in self.stages:
            x = stage(x).relu()
        return {"loss": x.square().mean()} if self.own else x.mean((2, 3))


def pictures(number: int = 12) -> Tensor:
    return torch.randn(number, 3, 16, 16, generator=torch.Generator().manual_seed(7)).double()


def test_a_users_module_is_measured_with_a_loss_of_the_user_and_with_its_own() -> None:
    torch.manual_seed(0)
    model, x = Net().double(), pictures()

    def loss(net: nn.Module, inputs: Any) -> Tensor:
        return net(inputs["pixel_values"]).exp().sum()

    for net, options in ((model, {"loss": loss}), (Net(own=True).double(), {})):
        watched = Monitor(net, when=[0], metrics="drift", plan=PLAN, probe={"pixel_values": x}, **options)
        with watched as monitor, monitor.step(0):
            pass
        rows = monitor.table.where(metric="gradient_energy", **PLAIN).records()
        assert {(row["layer"], row["kind"]) for row in rows} >= {(1, "stage"), (2, "stage")}
        assert all(0 <= row["value"] <= 1 for row in rows)


def test_a_live_loss_that_cannot_be_read_is_noted_and_does_not_stop_the_training() -> None:
    torch.manual_seed(0)
    model = Net(own=True).double()
    with Monitor(model, when=[0, 1], metrics="drift", plan=PLAN) as monitor:
        for step in range(2):
            with monitor.step(step):
                model(pictures())["loss"].backward()
    assert UNREAD in monitor.notes
    assert len(monitor.table.where(metric="gradient_energy", proxy="semi_nmf", step=1))


def test_a_probe_without_labels_is_refused_in_a_sentence() -> None:
    inputs = {"pixel_values": pictures()}
    with pytest.raises(AnisoscopeError, match="returned no loss for its batch; add what it predicts"):
        Monitor(model_of("ViTForImageClassification"), when=[0], metrics="drift", plan=PLAN, probe=inputs)


def test_class_tokens_are_tested_apart_from_patches() -> None:
    model, inputs = model_of("ViTForImageClassification"), batch_of("ViTForImageClassification", 40)
    with Monitor(model, when=[0], metrics="drift", plan=PLAN, probe=inputs) as monitor, monitor.step(0):
        pass
    rows = monitor.table.where(metric="gradient_energy", **PLAIN).records()
    found = {(row["layer"], row["kind"]): row for row in rows}
    contexts = int(half_of(original_contexts(inputs)).sum())
    assert found[3, "cls"]["n"] == contexts and found[2, "resid"]["n"] == 16 * contexts
    assert found[3, "cls"]["value"] > 0 and (0, "cls") not in found  # the token that enters is the same everywhere
    assert found[3, "resid"]["note"] == "no gradient reaches these rows"  # the head reads the class token alone
    assert monitor.basis(Site(3, "cls")).shape == (32, 4)


def test_rows_that_no_gradient_reaches_say_so_whatever_is_asked_of_them() -> None:
    model, inputs = model_of("ViTForImageClassification"), batch_of("ViTForImageClassification", 40)
    with Monitor(model, when=range(4), metrics="drift", plan=replace(PLAN, frozen=True), probe=inputs) as monitor:
        for step in range(4):
            with monitor.step(step):
                pass
    rows = monitor.table.where(layer=3, kind="resid", value=lambda value: value != value)
    for fit in ("refit", "frozen"):
        notes = [row["note"] for row in rows.where(fit=fit).records()]
        assert notes and all(notes), fit


@pytest.mark.parametrize("kind", ["Wav2Vec2ForPreTraining", "ViTForMaskedImageModeling"])
@pytest.mark.parametrize("gradients", [True, False])
def test_geometry_is_that_of_what_was_not_hidden(kind: str, gradients: bool) -> None:
    """As in a profile; the loss and its gradients are of inputs with masks."""
    model = model_of(kind)
    inputs = with_masks(model, batch_of(kind, 40))
    whole = {name: value for name, value in inputs.items() if name in ("pixel_values", "input_values")}
    options: dict[str, Any] = {"plan": PLAN} if gradients else {}
    options |= {"when": [0], "metrics": "average_cosine,svd_ratio", "probe": inputs}
    with Monitor(model, **options) as monitor, monitor.step(0):
        pass
    expected = measure(model, [whole], metrics=["average_cosine", "svd_ratio"])
    for metric in ("average_cosine", "svd_ratio"):
        tables = [each.where(metric=metric, variant="", group="") for each in (monitor.table, expected)]
        found, profiled = ({(r["layer"], r["kind"], r["head"]): r["value"] for r in t.records()} for t in tables)
        assert len(found) >= 5 and found == pytest.approx(
            {place: profiled[place] for place in found}, rel=1e-9, nan_ok=True
        )
    assert len(monitor.table.where(metric="probe_loss"))


@pytest.mark.parametrize("kind", ["Wav2Vec2ForPreTraining", "ViTForMaskedImageModeling"])
def test_hidden_and_seen_rows_have_energies_of_their_own(kind: str) -> None:
    model = model_of(kind)
    with Monitor(model, when=[0], metrics="drift", plan=PLAN, probe=batch_of(kind, 40)) as monitor, monitor.step(0):
        pass
    rows = monitor.table.where(metric="gradient_energy", layer=1, kind="resid", fit="refit", **PLAIN)
    by_group = {row["group"]: row for row in rows.records()}
    assert set(by_group) == {"", "masked", "unmasked"}
    low, high = sorted(by_group[name]["value"] for name in ("masked", "unmasked"))
    assert low < by_group[""]["value"] < high
    assert by_group[""]["n"] == by_group["masked"]["n"] + by_group["unmasked"]["n"]
