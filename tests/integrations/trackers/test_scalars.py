"""A tracker is sent few numbers, under names for people; what cannot be sent is refused or said."""

from __future__ import annotations

from typing import Any

import pytest

from anisoscope.errors import AnisoscopeError
from anisoscope.integrations.trackers.scalars import (
    MOST_PLACES,
    SCALARS,
    chosen_scalars,
    heads_of,
    numbers_of,
    usual_scalars,
)
from anisoscope.integrations.trackers.tracker import Tracker
from anisoscope.results.query import Table
from support.tracked import MANIFEST, NAMES, logged_at, rows_at, tell


class Kept(Tracker):
    """A tracker that keeps what it is sent."""

    def _open(self, manifest: Any) -> None:
        self.numbers: list[tuple[int, dict[str, float]]] = []
        self.values: list[tuple[str, list[float]]] = []
        self.pictures: dict[str, Any] = {}
        self.closed = ""

    def _log(self, numbers: dict[str, float], step: int) -> None:
        self.numbers.append((step, numbers))

    def _log_values(self, name: str, values: list[float], step: int) -> None:
        self.values.append((name, values))

    def _log_figure(self, name: str, image: Any, step: int) -> None:
        self.pictures[name] = image

    def _close(self, status: str) -> None:
        self.closed = status


def test_the_usual_numbers_are_the_plain_reading_of_each_at_every_site() -> None:
    numbers = numbers_of(rows_at(4), SCALARS) | numbers_of(logged_at(4), SCALARS)
    assert set(numbers) == NAMES  # and so no number that is not finite
    assert numbers["anisoscope/average_cosine/layer_02"] == pytest.approx(0.24)
    assert numbers["anisoscope/tangent_enrichment/layer_02"] == 4.0  # semi-NMF, not the control, not PCA
    assert numbers["anisoscope/attention_sharpness/layer_02_scores"] == pytest.approx(2.15)
    assert numbers["anisoscope/loss"] == pytest.approx(3.6)


def test_numbers_by_head_are_a_histogram_of_all_heads() -> None:
    found = heads_of(rows_at(0), SCALARS)
    assert list(found) == ["anisoscope/attention_sharpness/heads"]
    assert len(found["anisoscope/attention_sharpness/heads"]) == 12


def test_a_deep_model_sends_some_layers_with_the_first_and_the_last() -> None:
    place = {"metric": "average_cosine", "kind": "resid", "group": "", "variant": "", "stack": "single", "step": 0}
    table = Table.from_records([{**place, "layer": layer, "value": 0.5} for layer in range(1, 97)])
    names = list(numbers_of(table, SCALARS))
    assert len(names) == MOST_PLACES
    assert names[0].endswith("layer_01") and names[-1].endswith("layer_96")


def test_stacks_of_a_model_have_names_of_their_own() -> None:
    place = {"metric": "drift", "kind": "resid", "group": "", "variant": "", "layer": 1, "step": 0, "value": 1.0}
    table = Table.from_records([{**place, "stack": stack} for stack in ("encoder", "decoder")])
    assert set(numbers_of(table, SCALARS)) == {"anisoscope/drift/encoder/layer_01", "anisoscope/drift/decoder/layer_01"}


def test_a_run_that_measures_none_of_the_usual_numbers_sends_what_it_measures() -> None:
    place = {"kind": "resid", "group": "", "variant": "", "stack": "single", "step": 0, "layer": 1, "value": 0.5}
    table = Table.from_records([{**place, "metric": "isoscore"}])
    assert set(numbers_of(table, usual_scalars(table))) == {"anisoscope/isoscore/layer_01"}
    assert usual_scalars(rows_at(0)) == SCALARS, "the counter-test"


def test_numbers_can_be_chosen_and_named() -> None:
    chosen = chosen_scalars({"pca": {"metric": "gradient_enrichment", "proxy": "pca"}, "cos": "average_cosine"})
    numbers = numbers_of(rows_at(0), chosen)
    assert {name.split("/")[1] for name in numbers} == {"pca", "cos"}
    assert numbers["anisoscope/pca/layer_01"] == 7.0


@pytest.mark.parametrize("wrong", ["average_cosine", [], {"a": 3}, {"a": {"proxy": "pca"}}, 3])
def test_a_choice_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(AnisoscopeError, match="scalars"):
        chosen_scalars(wrong)


def test_a_run_ends_with_figures_and_is_closed() -> None:
    tracker = Kept()
    tell(tracker, [0, 4])
    assert [step for step, _ in tracker.numbers] == [0, 0, 4, 4]
    assert set(tracker.pictures) == {
        f"anisoscope/{name}" for name in ("average_cosine", "tangent_enrichment", "attention_sharpness")
    }
    picture = tracker.pictures["anisoscope/average_cosine"]
    assert picture.dtype == "uint8" and picture.ndim == 3 and picture.shape[2] == 3
    assert picture.min() == 0 and picture.max() == 255, "something is drawn on paper"
    assert tracker.closed == "complete"
    plain = Kept(figures=False)
    tell(plain, [0])
    assert plain.pictures == {}


def test_a_tracker_can_follow_a_second_run() -> None:
    tracker = Kept(figures=False)
    tell(tracker, [0, 4])
    tell(tracker, [8])
    assert [step for step, _ in tracker.numbers] == [8, 8]


def test_a_chosen_number_that_was_never_measured_is_told_at_the_end_and_the_run_is_closed() -> None:
    tracker = Kept(scalars=["average_cosine", "two_n"], figures=False)
    with pytest.raises(AnisoscopeError, match="nothing was measured for 'two_n'"):
        tell(tracker, [0])
    assert tracker.closed == "complete"


def test_a_figure_that_fails_leaves_no_run_open(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Kept()

    def fail(*_: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr(tracker, "_log_figure", fail)
    tracker.start(MANIFEST)
    tracker.write(rows_at(0), 0)
    with pytest.raises(OSError, match="no room"):
        tracker.finish({"status": "interrupted"})
    assert tracker.closed == "interrupted"
