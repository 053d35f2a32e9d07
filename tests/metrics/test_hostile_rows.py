"""Hostile rows, labels and options: one sentence, or a finite number that is counted right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import anisoscope
from anisoscope.errors import AnisoscopeError, TooFewRows
from anisoscope.metrics.catalogue import parse_requests, registry
from anisoscope.metrics.engine import folds
from anisoscope.metrics.engine.folds import Neighbours
from anisoscope.metrics.engine.metric import Metric, is_of_rows
from anisoscope.stats.moments import Moments
from support import references
from support.clouds import METRICS, ON_ROWS, cloud


def _holes(value: float) -> np.ndarray:
    x = cloud(n=120, d=6)
    x[::7] = value
    return x


def _lattice() -> np.ndarray:
    return np.stack(np.meshgrid(np.arange(10.0), np.arange(10.0)), -1).reshape(-1, 2)


SOUND = cloud(n=120, d=6)


HOSTILE: dict[str, Callable[[], Any]] = {
    "1-D": lambda: SOUND[:, 0],
    "3-D": lambda: SOUND[None],
    "a number": lambda: 3.0,
    "nothing": lambda: None,
    "no rows": lambda: np.zeros((0, 4)),
    "no columns": lambda: np.zeros((4, 0)),
    "one row": lambda: SOUND[:1],
    "two rows": lambda: SOUND[:2],
    "equal rows": lambda: np.full((120, 6), 0.1),
    "equal random rows": lambda: np.repeat(SOUND[:1], 120, axis=0),
    "zeros": lambda: np.zeros((120, 6)),
    "all NaN": lambda: np.full((9, 3), np.nan),
    "some NaN": lambda: _holes(np.nan),
    "some infinite": lambda: _holes(np.inf),
    "some zero rows": lambda: _holes(0.0),
    "complex": lambda: SOUND + 1j,
    "words": lambda: np.array([["a", "b"], ["c", "d"]]),
    "objects": lambda: SOUND.astype(object),
    "None inside": lambda: np.array([[None, 1.0]]),
    "ragged": lambda: [[1.0, 2.0], [3.0]],
    "a mapping": lambda: {"x": 1},
    "a generator": lambda: (row for row in SOUND),
    "dates": lambda: np.zeros((4, 4), dtype="M8[s]"),
    "sparse": lambda: torch.as_tensor(SOUND).to_sparse(),
    "without data": lambda: torch.zeros(40, 4, device="meta"),
    "one column": lambda: SOUND[:, :1],
    "fewer rows than columns": lambda: np.random.default_rng(0).normal(size=(40, 100)),
    "1e30": lambda: SOUND * 1e30,
    "1e30 in float32": lambda: (SOUND * 1e30).astype(np.float32),
    "1e-30": lambda: SOUND * 1e-30,
    "1e-40 in float32": lambda: (SOUND * 1e-40).astype(np.float32),
    "1e200": lambda: SOUND * 1e200,
    "1e-200": lambda: SOUND * 1e-200,
    "equal distances": lambda: np.eye(64),
    "a lattice": _lattice,
    "a line": lambda: np.outer(np.linspace(1, 2, 120), np.ones(6)),
    "a constant column": lambda: np.c_[SOUND, np.ones(120)],
    "two rows closer than rounding": lambda: np.vstack([SOUND * 1e6, SOUND[:1] * 1e6 + 1e-9]),
    "masked": lambda: np.ma.masked_invalid(_holes(np.nan)),
}


REFUSED = {"1-D", "3-D", "a number", "nothing", "no rows", "no columns", "all NaN", "complex", "words", "objects",
           "None inside", "ragged", "a mapping", "a generator", "dates", "sparse", "without data", "1e200",
           "1e-200"}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("name", ON_ROWS)
def test_hostile_input_gives_one_sentence_or_a_finite_number(name: str, what: str) -> None:
    x = HOSTILE[what]()
    n = len(x) if hasattr(x, "__len__") else 1
    sentence, seen = "", None
    try:
        seen = METRICS[name](x, contexts=np.arange(n) // 5, tokens=np.arange(n) % 6)
    except AnisoscopeError as error:
        sentence = str(error)
    if seen is None:
        assert len(sentence) > 20
        assert "\n" not in sentence
        return
    assert what not in REFUSED
    assert math.isfinite(seen.value)
    assert math.isnan(seen.low) or seen.low <= seen.value <= seen.high


@pytest.mark.parametrize("name", sorted(set(ON_ROWS) - {"partition_isotropy", "drift", "mean_norm"}))
@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_huge_and_tiny_rows_give_the_same_scale_free_number(name: str, scale: float) -> None:
    options = {"contexts": np.arange(120) // 5, "tokens": np.arange(120) % 6}
    expected = METRICS[name](SOUND, **options).value
    assert METRICS[name](SOUND * scale, **options).value == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ON_ROWS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_left_out_and_counted(name: str, value: float) -> None:
    x, keep = SOUND.copy(), np.ones(120, dtype=bool)
    x[[3, 77], 2] = value
    keep[[3, 77]] = False
    options = {"contexts": np.arange(120) // 5, "tokens": np.arange(120) % 6}
    # these two draw rows at random, by their place in the array
    more = {"max_explainable_variance": {"baseline": False}, "local_anisotropy": {"partition": "none"}}.get(name, {})
    seen = METRICS[name](x, **options, **more)
    clean = METRICS[name](SOUND[keep], **{k: v[keep] for k, v in options.items()}, **more)
    assert seen.value == pytest.approx(clean.value, rel=1e-9)
    assert seen.dropped == 2
    assert clean.dropped == 0


def test_zero_rows_have_no_direction_and_are_counted() -> None:
    x = _holes(0.0)
    seen = anisoscope.average_cosine(x)
    assert seen.value == pytest.approx(references.average_cosine(x), rel=1e-9)
    assert seen.dropped == 18
    tokens, contexts = np.arange(120) % 6, np.arange(120) // 5
    keep = np.linalg.norm(x, axis=1) > 0
    alike = references.self_similarity(x[keep], tokens[keep])
    assert anisoscope.self_similarity(x, tokens=tokens).value == pytest.approx(alike, rel=1e-9)
    within = references.context_similarity(x[keep], contexts[keep])
    assert anisoscope.context_similarity(x, contexts=contexts).value == pytest.approx(within, rel=1e-9)


@pytest.mark.parametrize("name", ["svd_ratio", "participation_ratio", "iso_score", "effective_rank", "stable_rank",
                                  "average_cosine_centred", "drift_alignment", "two_nn"])  # fmt: skip
def test_equal_rows_have_no_spectrum_and_no_dimension(name: str) -> None:
    for x in (np.full((120, 6), 0.1), np.repeat(SOUND[:1], 120, axis=0), np.zeros((120, 6))):
        with pytest.raises(TooFewRows):
            METRICS[name](x)


@pytest.mark.parametrize("labels", [np.arange(3), np.zeros((120, 2)), 5, [[1], [2, 3]], np.array([None, 1] * 60)])
@pytest.mark.parametrize("which", ["contexts", "tokens"])
def test_labels_that_do_not_fit_are_refused(labels: Any, which: str) -> None:
    with pytest.raises(AnisoscopeError, match=which):
        anisoscope.average_cosine(SOUND, **{which: labels})


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("svd_ratio", {"centered": False}, "centred"),
        ("svd_ratio", {"centred": "perhaps"}, "bool"),
        ("svd_ratio", {"centred": None}, "bool"),
        ("two_nn", {"keep": 0.0}, "keep"),
        ("two_nn", {"keep": math.nan}, "keep"),
        ("two_nn", {"keep": [1]}, "float"),
        ("two_nn", {"method": "slop"}, "slope"),
        ("two_nn", {"method": 3}, "str"),
        ("gride", {"scale": 0}, "scale"),
        ("gride", {"scale": 1.5}, "int"),
        ("levina_bickel", {"smallest": 1}, "smallest"),
        ("levina_bickel", {"smallest": 9, "largest": 4}, "smallest"),
        ("hubness", {"k": 0}, "k"),
        ("rogue_share", {"top": 0}, "top"),
        ("iso_score_star", {"zeta": 3.0}, "zeta"),
        ("rank_me", {"epsilon": -1.0}, "epsilon"),
        ("gride", {"scale": 500}, "distinct rows"),
    ],
)
def test_wrong_options_are_named(name: str, options: dict[str, Any], word: str) -> None:
    with pytest.raises(AnisoscopeError, match=word):
        METRICS[name](SOUND, **options)


def test_requests_are_read_from_words() -> None:
    (one,) = parse_requests(["two_nn:method=ml:keep=0.5"])
    assert one.options == {"method": "ml", "keep": 0.5}
    assert one.named
    assert {r.metric.name for r in parse_requests(["all"])} >= set(METRICS)
    assert all(r.metric.default for r in parse_requests(None))
    with pytest.raises(AnisoscopeError, match="did you mean 'two_nn'"):
        parse_requests(["twonn"])
    with pytest.raises(AnisoscopeError, match="did you mean 'keep'"):
        parse_requests(["two_nn:kep=1"])


@pytest.mark.parametrize("bad", [np.zeros((3, 2)), np.full((9, 2), np.nan), np.zeros(5), "x", np.ones((9, 2))])
def test_cka_of_what_cannot_be_compared_is_refused(bad: Any) -> None:
    with pytest.raises(AnisoscopeError):
        anisoscope.linear_cka(bad, np.random.default_rng(0).normal(size=(9, 2)))


def test_fewer_than_32_distinct_rows_have_no_dimension() -> None:
    x = np.repeat(cloud(n=31), 4, axis=0)
    with pytest.raises(TooFewRows, match="distinct"):
        anisoscope.two_nn(x)
    assert anisoscope.two_nn(np.repeat(cloud(n=40), 4, axis=0)).dropped == 120


def test_taking_rows_out_of_a_neighbour_graph_equals_searching_again() -> None:
    x = torch.as_tensor(cloud(n=200))
    graph, _ = Neighbours.of(x, 10)
    mask = torch.arange(200) % 8 != 3
    kept, again = graph.without(mask), Neighbours.of(x[mask], 10)[0]
    distance, index = kept.distance[mask], (mask.cumsum(0) - 1)[kept.index[mask]]
    found = distance.isfinite().all(1)
    assert found.float().mean() > 0.99
    torch.testing.assert_close(distance[found], again.distance[found, :10])
    assert torch.equal(index[found], again.index[found, :10])


def test_the_public_names_all_exist() -> None:
    for name in anisoscope.__all__:
        assert getattr(anisoscope, name) is not None
    with pytest.raises(AttributeError):
        _ = anisoscope.nothing_of_that_name


def test_a_metric_is_described_by_its_docstring() -> None:
    assert isinstance(anisoscope.two_nn, Metric)
    assert "Dimension" in str(anisoscope.two_nn.__doc__)


@pytest.mark.parametrize(("count", "mean"), [(200, 0.5), (500, 0.5), (200, 1e4)])
def test_few_wide_rows_are_measured_by_their_gram_matrix_as_by_their_scatter(
    count: int, mean: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = torch.linspace(0.1, 3.0, 600)
    rows = torch.randn(count, 600, generator=torch.Generator().manual_seed(0)).double() * scale + mean
    made: list[int] = []
    take = Moments._take
    monkeypatch.setattr(Moments, "_take", lambda self, x: made.append(len(x)) or take(self, x))
    names = [name for name in registry() if is_of_rows(registry()[name]) and Moments in registry()[name].needs]
    thin = anisoscope.measure_rows(rows, names)
    assert not made, "no d×d matrix was made"
    monkeypatch.setattr(folds, "_few_and_wide", lambda parts: False)
    plain = anisoscope.measure_rows(rows, names)
    assert made
    for name in names:
        for end in ("value", "low", "high"):
            one, other = (getattr(found[name], end) for found in (thin, plain))
            assert one == pytest.approx(other, rel=1e-6, nan_ok=True), (name, end)
