"""Two disjoint halves of the contexts, and a monitor that wants no gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anisoscope import Monitor, Table, measure
from anisoscope.capture.row import original_contexts
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.bank import Bank, make_plan
from anisoscope.measurement.evaluation import HALVES, selections
from anisoscope.measurement.measure import feed_rows
from anisoscope.metrics.catalogue import parse_requests
from anisoscope.numerics.hashing import fold_of
from anisoscope.tangent.plan import GEOMETRY, PLANS, SHAPE, choose_plan
from support.tiny_models import VOCABULARY, tiny

METRICS = ["two_nn", "two_nn:calibrated=1", "levina_bickel", "gride:scale=1", "gride:scale=8", "hubness"]
CONTEXTS, LENGTH = 48, 12


def ids() -> Tensor:
    return torch.randint(5, VOCABULARY, (CONTEXTS, LENGTH), generator=torch.Generator().manual_seed(0))


def model() -> nn.Module:
    return tiny("gpt2", dtype=torch.float64)


def batches(chosen: Tensor) -> list[dict[str, Tensor]]:
    return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in chosen.split(8)]


def folds() -> Tensor:
    return fold_of(original_contexts({"input_ids": ids()}))


def by_place(table: Table, **columns: Any) -> dict[tuple[Any, ...], dict[str, Any]]:
    rows = table.where(**columns).records()
    return {(r["layer"], r["kind"], r["head"], r["metric"], r["variant"]): r for r in rows}


@pytest.fixture(scope="module")
def halved() -> Table:
    return measure(model(), batches(ids()), metrics=METRICS, halves=True)


@pytest.mark.parametrize("half", HALVES)
def test_a_half_equals_measuring_its_contexts_alone(halved: Table, half: str) -> None:
    mine = torch.isin(folds(), torch.tensor(sorted(HALVES[half])))
    assert 8 < int(mine.sum()) < CONTEXTS - 8
    alone = by_place(measure(model(), batches(ids()[mine]), metrics=METRICS, sites=["embed", "resid", "final"]))
    found = by_place(halved, group=half)
    assert set(found) == set(alone) and len(found) > 3 * len(METRICS)
    for place, row in found.items():
        for column in ("value", "low", "high"):
            assert row[column] == pytest.approx(alone[place][column], rel=1e-6, nan_ok=True), (place, column)
        assert (row["n"], row["contexts"]) == (alone[place]["n"], alone[place]["contexts"])
        assert row["replicates"] == pytest.approx(alone[place]["replicates"], rel=1e-6, nan_ok=True)
        assert len(row["replicates"]) == 4, "a jackknife over the four folds of the half"


def test_the_other_half_is_another_number_and_both_make_the_whole(halved: Table) -> None:
    """Counter-test: the halves differ, and their rows add up."""
    one, two, whole = (by_place(halved, group=g) for g in ("half:1", "half:2", ""))
    same = [p for p in one if one[p]["value"] == pytest.approx(two[p]["value"], rel=1e-9)]
    assert not same
    for place in one:
        assert one[place]["contexts"] + two[place]["contexts"] == whole[place]["contexts"] == CONTEXTS
        read = [rows[place]["n"] + rows[place]["dropped"] for rows in (one, two, whole)]
        assert read[0] + read[1] == read[2] == CONTEXTS * LENGTH


def test_halves_change_nothing_of_the_whole_and_are_not_there_unasked(halved: Table) -> None:
    plain = by_place(measure(model(), batches(ids()), metrics=METRICS))
    found = by_place(halved, group="")
    assert set(plain) == set(found)
    for place, row in plain.items():
        assert row["value"] == pytest.approx(found[place]["value"], rel=1e-9, nan_ok=True)
        assert row["n"] == found[place]["n"]


def test_halves_are_for_the_dimensions_of_the_stream_alone() -> None:
    metrics = ["two_nn", "average_cosine", "svd_ratio:batches=1", "local_anisotropy", "attention_entropy"]
    records = measure(model(), batches(ids()), metrics=metrics, halves=True).records()
    halved = [row for row in records if row["group"]]
    assert {row["kind"] for row in halved} == {"embed", "resid", "final"} and {r["metric"] for r in halved} == {
        "two_nn"
    }
    assert {"query", "key", "scores"} <= {row["kind"] for row in records}
    assert len({row["metric"] for row in records}) == 5


def test_each_half_looks_at_as_many_sampled_rows_as_the_whole() -> None:
    """A sample that is cut in two would leave each half with half of the rows, and less than a batch."""
    requests = parse_requests(["two_nn"])
    sizes: dict[str, Any] = {"seed": 0, "sample_size": 128, "attention_rows": 1}
    rows = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0))
    from anisoscope.capture.sites.site import Site

    def samples(halves: bool) -> dict[str, int]:
        bank = Bank(make_plan(requests, ["rows"], **sizes, halves=halves))
        feed_rows(bank, Site(0, "rows"), rows)
        (stats,) = bank.sites.values()
        most = bank.plan.looked_at
        found = selections(stats, [], without_first=False, wanted=2, most=most, halves=halves)
        return {s.group: len(s.view.sample) for s in found if s.view.sample is not None}

    counts = samples(True)
    assert samples(False) == {"": 128} and counts[""] == 128
    assert all(100 < counts[name] <= 128 for name in HALVES)


# the shape preset and a monitor without gradients


def test_the_shape_preset_has_no_gradients_and_measures_where_its_metrics_are_declared() -> None:
    plan, requests = choose_plan("shape", None, rank=None, seed=0)
    assert plan is None and "shape" not in PLANS and GEOMETRY["shape"] == SHAPE
    assert len(requests) == len(SHAPE) and not any(request.named for request in requests)
    tangent, _ = choose_plan("standard", None, rank=None, seed=0)
    assert tangent is not None, "the others have"


class Counting:
    """Backward passes seen."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, *_: Any) -> None:
        self.n += 1


def watched(metrics: str | list[str], net: nn.Module | None = None, **options: Any) -> tuple[Table, int]:
    net = tiny("gpt2") if net is None else net
    count = Counting()
    net.get_input_embeddings().register_full_backward_hook(count)  # type: ignore[operator]
    probe = options.pop("probe", batches(ids()))
    with Monitor(net, metrics=metrics, probe=probe, when=lambda step: True, **options) as monitor, monitor.step(0):
        pass
    return monitor.table, count.n


def test_a_monitor_of_the_geometry_alone_runs_forward_only_over_every_context_and_tells_the_loss() -> None:
    table, backward = watched(["average_cosine", "two_nn", "attention_entropy"], halves=True)
    assert backward == 0
    whole = table.where(metric="average_cosine", kind="resid", group="").records()
    assert {row["contexts"] for row in whole} == {CONTEXTS} and {row["n"] for row in whole} == {CONTEXTS * LENGTH}
    assert {row["group"] for row in table.where(metric="two_nn", kind="resid").records()} == {"", *HALVES}
    (loss,) = table.where(metric="probe_loss").records()
    net = tiny("gpt2")
    with torch.no_grad():
        total = sum(float(net(**b, labels=b["input_ids"]).loss) * len(b["input_ids"]) for b in batches(ids()))
    assert (loss["kind"], loss["step"], loss["n"]) == ("training", 0, CONTEXTS * (LENGTH - 1))
    assert loss["value"] == pytest.approx(total / CONTEXTS, rel=1e-5)


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_a_tangent_study_runs_backward_over_one_half() -> None:
    """Counter-test: gradients are taken where they are wanted, and then the loss is that of the test half."""
    table, backward = watched(["tangent", "average_cosine"])
    assert backward > 0
    (loss,) = table.where(metric="probe_loss").records()
    assert loss["n"] < CONTEXTS * (LENGTH - 1)


def test_a_model_without_a_loss_can_be_watched_but_not_its_gradients() -> None:
    from transformers import GPT2Model

    bare = GPT2Model(tiny("gpt2").config)
    table, _ = watched(["average_cosine"], bare)
    assert len(table.where(metric="average_cosine", kind="resid")) > 0
    assert "probe_loss" not in table.metrics
    with pytest.raises(AnisoscopeError, match="no loss"):
        watched(["tangent"], bare)


def test_labels_that_are_all_ignored_give_geometry_without_a_loss() -> None:
    probe = [{**batch, "labels": torch.full_like(batch["input_ids"], -100)} for batch in batches(ids())]
    table, _ = watched(["average_cosine"], probe=probe)
    assert "probe_loss" not in table.metrics
    with pytest.raises(AnisoscopeError, match="ignored"):
        watched(["tangent"], probe=probe)


def test_one_context_is_enough_for_geometry_and_too_few_for_gradients() -> None:
    few = batches(ids()[:1])
    table, _ = watched(["average_cosine"], probe=few)
    (row,) = table.where(metric="average_cosine", kind="final").records()
    assert math.isfinite(row["value"])
    with pytest.raises(AnisoscopeError, match="one half"):
        watched(["tangent"], probe=few)


def test_a_loss_of_the_users_own_is_told_for_every_context() -> None:
    def summed(net: nn.Module, inputs: Any) -> Tensor:
        given = {name: value for name, value in inputs.items() if name != "labels"}
        return net(**given, labels=inputs["input_ids"]).loss * inputs["input_ids"].shape[0] * (LENGTH - 1)

    probe = [{**batch, "labels": batch["input_ids"]} for batch in batches(ids())]
    own, _ = watched(["average_cosine"], probe=probe, loss=summed)
    usual, _ = watched(["average_cosine"], probe=probe)
    assert own.where(metric="probe_loss").records()[0]["value"] == pytest.approx(
        usual.where(metric="probe_loss").records()[0]["value"], rel=1e-5
    )


def test_a_watched_step_leaves_training_as_it_was() -> None:
    net = tiny("gpt2").train()
    before = torch.get_rng_state()
    watched(["average_cosine", "attention_entropy"], net)
    assert net.training and torch.equal(before, torch.get_rng_state())
    assert all(p.grad is None for p in net.parameters())
