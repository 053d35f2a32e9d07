"""What a user asks for in words, what is said of rows that are lost or zero, and the cosine about the mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import anisoscope
from anisoscope import measure
from anisoscope.errors import AnisoscopeError, TooFewRows
from anisoscope.integrations.follower import Follower
from anisoscope.metrics.anisotropy import Centred
from anisoscope.metrics.catalogue import parse_requests, registry
from anisoscope.monitor.schedule import as_schedule, every
from anisoscope.stats.sample import Sample
from support.measured import batches
from support.tiny_models import tiny

# -- words ------------------------------------------------------------------------------------------------------------


def test_one_string_with_commas_is_a_list_of_metrics_sites_and_modules() -> None:
    model = tiny("gpt2")
    one = measure(model, batches(), sites="embed, resid", metrics="average_cosine,drift")
    two = measure(model, batches(), sites=["embed", "resid"], metrics=["average_cosine", "drift"])
    assert [r["value"] for r in one.records()] == [r["value"] for r in two.records()]
    assert {(r["kind"], r["metric"]) for r in one.records()} == {
        (kind, metric) for kind in ("embed", "resid") for metric in ("average_cosine", "drift")
    }
    named = measure(model, batches(), modules="transformer.h.0,transformer.h.1", metrics="drift")
    assert {r["kind"] for r in named.records()} == {"transformer.h.0", "transformer.h.1"}
    with pytest.raises(AnisoscopeError, match="unknown metric ''"):
        measure(model, batches(), metrics="drift,")


def test_numbers_of_numpy_and_a_single_batch_are_taken() -> None:
    model, first = tiny("gpt2"), batches()[0]
    words: dict[str, Any] = {"metrics": "average_cosine,two_nn"}
    one = measure(model, first, seed=np.int64(2), sample_size=np.int64(128), layers=[np.int64(1)], **words)
    two = measure(model, [first], seed=2, sample_size=128, layers=[1], **words)
    assert one.arrow["value"].to_pylist() == two.arrow["value"].to_pylist()
    ids = torch.arange(40).reshape(4, 10)
    assert measure(model, ids, **words).arrow["value"].equals(measure(model, [ids], **words).arrow["value"])


def test_all_sites_are_those_that_the_model_has() -> None:
    model = tiny("gpt2")
    table = measure(model, batches(), sites="all", metrics="drift")
    kinds = {r["kind"] for r in table.records()}
    assert {"embed", "resid", "final", "attn_in", "attn_out", "mlp_in", "mlp_out", "query", "key"} <= kinds
    assert {"embed_weight", "unembed"} <= kinds, "weight tables, too"
    assert not kinds & {"scores", "cls", "stage"}, "no drift of scores, and none of what it has not"
    with pytest.raises(AnisoscopeError, match="unknown site 'al'"):
        measure(model, batches(), sites="al")


def test_layers_that_are_not_there_are_noted_and_refused_where_none_is() -> None:
    model = tiny("gpt2")
    depth = int(model.config.n_layer)
    table = measure(model, batches(), sites="resid", layers=range(1, 10), metrics="drift")
    (note,) = [n for n in table.about["models"][0]["notes"] if "not there" in n]
    assert note == f"layers {depth + 1} to 9 are not there: the last one is {depth}"
    whole = measure(model, batches(), sites="resid", layers=range(1, depth + 1), metrics="drift")
    assert not any("not there" in n for n in whole.about["models"][0]["notes"])
    with pytest.raises(AnisoscopeError, match=f"its layers are 0 to {depth}"):
        measure(model, batches(), sites="resid", layers=[9], metrics="drift")


def test_steps_are_a_schedule() -> None:
    for when in ([0, 4, 11], (11, 4, 0), {0, 4, 11}, np.array([0, 4, 11])):
        schedule = as_schedule(when)
        assert [step for step in range(20) if schedule(step)] == [0, 4, 11]
    assert as_schedule(every(3)) == every(3)
    for wrong in ("log", 3, [], [0.5], ["0"]):
        with pytest.raises(AnisoscopeError, match="names no steps"):
            as_schedule(wrong)
    with pytest.raises(AnisoscopeError, match=r"when='often' names no steps"):
        Follower({"when": "often"})  # at once, and not at the first step of a training
    assert str(Follower({"when": [0, 4]}).options["when"]) == "at([0, 4])"


def test_a_monitor_takes_steps() -> None:
    model: Any = tiny("gpt2")
    probe = batches()[0]
    with anisoscope.Monitor(model, when=[0, 2], metrics="drift", probe=[probe]) as monitor:
        for step in range(4):
            with monitor.step(step):
                pass
    assert monitor.done == {0, 2}


def test_a_decoder_without_anything_to_read_is_told_in_a_sentence() -> None:
    model = tiny("t5")
    ids = torch.randint(6, 60, (3, 12))
    with pytest.raises(AnisoscopeError, match=r"the decoder of T5\w+ was given nothing to read; put decoder_input_ids"):
        measure(model, [{"input_ids": ids}], metrics="drift")
    assert measure(model, [{"input_ids": ids, "decoder_input_ids": ids}], metrics="drift").records()


# -- rows that are lost, and rows of zeros ----------------------------------------------------------------------------


class Rows(nn.Module):
    """A module that gives what it is given, but for rows that it breaks."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.inner, self.fill = nn.Identity(), fill

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        broken = x.clone()
        broken[0, :2] = self.fill
        out: torch.Tensor = self.inner(broken)
        return out


def test_lost_rows_leave_a_note() -> None:
    x = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0))
    for fill, said in ((float("nan"), True), (float("inf"), True), (1.0, False)):
        table = measure(Rows(fill), [x], modules=["inner"], metrics="drift")
        notes = [note for note in table.about["models"][0]["notes"] if "not finite" in note]
        assert bool(notes) is said
        assert {row["n"] for row in table.records()} == {19 if said else 21}
        if said:
            assert notes[0].startswith("2 of 21 rows of 3 contexts were not finite (NaN or infinity, or beyond 1e±60)")


class Stages(nn.Module):
    """A small convolutional net whose later stages can be made to give nothing."""

    def __init__(self, dead: int) -> None:
        super().__init__()
        from transformers import ResNetConfig, ResNetModel

        sizes: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16, 16], "depths": [1, 1, 1]}
        self.net = ResNetModel(ResNetConfig(**sizes, layer_type="basic")).eval()
        for stage in list(self.net.encoder.stages)[dead:]:
            for name, parameter in stage.named_parameters():
                if "normalization" in name:
                    parameter.data.zero_()


def test_layers_of_zeros_are_named_and_more_rows_are_not_asked_for() -> None:
    x = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    table = measure(Stages(dead=1).net, [{"pixel_values": x}], metrics="average_cosine,explained_by_drift")
    notes = table.about["models"][0]["notes"]
    assert [note for note in notes if "zero" in note] == [
        "outputs are exactly zero from stage 2 of 3 on: nothing of the input gets past it"
    ]
    rows = table.where(kind="stage").records()
    lost = [row for row in rows if not np.isfinite(row["value"])]
    assert {row["layer"] for row in lost} == {2, 3}
    assert all(row["note"] == "every row is exactly zero, so none has a direction; look at the model" for row in lost)
    alive = measure(Stages(dead=3).net, [{"pixel_values": x}], metrics="average_cosine")
    assert not any("zero" in note for note in alive.about["models"][0]["notes"])


# -- the cosine about the mean ----------------------------------------------------------------------------------------


def pair_cosine(x: np.ndarray) -> float:
    """The slow twin: all pairs, in float64."""
    x = x[np.linalg.norm(x, axis=1) > 0]
    units = x / np.linalg.norm(x, axis=1, keepdims=True)
    pairs = units @ units.T
    return float((pairs.sum() - np.trace(pairs)) / (len(x) * (len(x) - 1)))


@pytest.mark.parametrize("shift", [0.0, 1.0, 1e4])
def test_every_fold_left_out_is_centred_about_its_own_mean(shift: float) -> None:
    x = np.random.default_rng(0).normal(size=(300, 12)) * np.arange(1, 13) + shift
    x[5] = 0.0
    contexts = torch.arange(300) // 10
    sample = Sample(300).update(torch.as_tensor(x), context=contexts)
    cloud = Centred.of(sample)
    rows, fold = sample.rows.numpy(), sample.fold
    for left in [-1, *sorted(set(fold.tolist()))]:
        mine = rows[(fold != left).numpy()]
        part = cloud.without(left)
        assert part.n == len(mine)
        assert part.average_cosine(centred=False) == pytest.approx(pair_cosine(mine), rel=1e-10)
        assert part.average_cosine(centred=True) == pytest.approx(pair_cosine(mine - mine.mean(0)), rel=1e-7, abs=1e-12)


def test_equal_rows_have_no_direction_about_their_mean() -> None:
    rows = torch.full((40, 6), 0.1)
    with pytest.raises(TooFewRows):
        Centred.of(Sample(40).update(rows, context=torch.arange(40))).average_cosine(centred=True)
    cloud = Centred.of(Sample(40).update(rows, context=torch.arange(40)))
    assert cloud.average_cosine(centred=False) == pytest.approx(1.0)


def test_a_default_profile_tells_how_much_drift_explains() -> None:
    """The claim that drift explains anisotropy needs it, and it needs no further statistic than TwoNN has."""
    assert registry()["explained_by_drift"].default
    assert "explained_by_drift" in {request.metric.name for request in parse_requests(None)}
    x = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    assert anisoscope.explained_by_drift(x + 3.0).value == pytest.approx(1.0, abs=0.02)
