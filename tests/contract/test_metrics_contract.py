"""Laws that every declared metric obeys; a new one inherits them from its declaration and its known answer."""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anisoscope.errors import AnisoscopeError, TooFewRows
from anisoscope.metrics.attention import row_sharpness
from anisoscope.metrics.catalogue import parse_requests, registry
from anisoscope.metrics.engine.estimation import View, evaluate
from anisoscope.metrics.engine.folds import Neighbours, on_sample, sample_graphs
from anisoscope.metrics.engine.metric import Metric
from anisoscope.numerics.hashing import FOLDS, fold_of
from anisoscope.stats.directions import Attention, Coherence, Directions, Keys
from anisoscope.stats.sample import Sample
from support.clouds import METRICS, ON_ROWS
from support.known_answers import KNOWN
from support.known_measured import KNOWN_MEASURED, planted

MEASURED = {name: m for name, m in registry().items() if m.measured_by}
ON_ATTENTION = sorted(set(METRICS) - set(ON_ROWS))
CHANGES = ("rotation", "scale", "shift")
# these draw rows at random, told apart by their place in an array: what must not depend on it is asked without the draw
PLAIN: dict[str, dict[str, Any]] = {"max_explainable_variance": {"baseline": False}}


def cloud(seed: int = 0, *, n: int = 240, d: int = 6) -> np.ndarray:
    """Correlated rows with a mean, in contexts of ten, a few of them long."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(d, d))
    common = np.repeat(rng.normal(size=(n // 10, d)), 10, axis=0)
    return (rng.normal(size=(n, d)) + 0.5 * common) @ mix * 0.3 + rng.normal(size=d) * 0.4


def labels(n: int = 240) -> dict[str, np.ndarray]:
    return {"contexts": np.repeat(np.arange(n // 10), 10), "tokens": np.arange(n) % 7}


def value(metric: Metric, x: Any, **changed: Any) -> float:
    return metric(x, **{**labels(len(x)), **changed}).value


def transform(x: np.ndarray, change: str) -> np.ndarray:
    rng = np.random.default_rng(5)
    if change == "rotation":
        return x @ np.linalg.qr(rng.normal(size=(x.shape[1], x.shape[1])))[0]
    return x * 2.5 if change == "scale" else x + rng.normal(size=x.shape[1])


def attention_value(metric: Metric, seed: int, change: str = "") -> float:
    """A metric of queries and keys; the change is made to the queries alone."""
    rng = np.random.default_rng(seed)
    query, key = rng.normal(size=(12, 4)) + 1.0, rng.normal(size=(12, 4)) + 0.5
    q, k = torch.as_tensor(transform(query, change) if change else query), torch.as_tensor(key)
    if Attention in metric.needs:
        allowed = torch.ones(1, 12, 12, dtype=torch.bool)
        values = row_sharpness(q[None, None], k[None, None], allowed[None], bias=None, scaling=0.5, first=0)[0]
        return metric.function(Attention().update(values.transpose(0, 1)).head(0))
    return metric.function(Directions().update(q), Keys().update(k))


def test_every_metric_has_a_known_answer_and_every_answer_a_metric() -> None:
    assert set(KNOWN) == set(METRICS)
    assert set(KNOWN_MEASURED) == set(MEASURED)
    for name, known in KNOWN_MEASURED.items():
        assert known.of_rows is not None or not MEASURED[name].invariant, f"say how {name} follows from rows"


def test_every_metric_says_what_it_is() -> None:
    for metric in registry().values():
        assert metric.title and metric.formula and metric.description, metric.name
        assert metric.invariant <= set(CHANGES), metric.name
        low, high = metric.bounds
        assert low is None or high is None or low < high, metric.name


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_known_answer(name: str) -> None:
    metric, known = METRICS[name], KNOWN[name]
    if known.rows is None:
        assert known.stats is not None
        seen = metric.function(*known.stats(), **known.options)
    else:
        seen = metric(known.rows(), **known.labels(), **known.options).value
    assert seen == pytest.approx(known.expected, abs=known.tolerance)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", sorted(METRICS))
def test_declared_invariances_hold_and_undeclared_ones_fail(name: str, change: str) -> None:
    metric = METRICS[name]
    gaps = []
    for seed in range(3):
        if name in ON_ATTENTION:
            before, after = attention_value(metric, seed), attention_value(metric, seed, change)
        else:
            before, after = value(metric, cloud(seed)), value(metric, transform(cloud(seed), change))
        gaps.append(abs(after - before) / max(abs(before), 1e-3))
    if change in metric.invariant:
        assert max(gaps) < 1e-6, f"{name} is declared invariant to {change}"
    else:
        assert max(gaps) > 1e-4, f"{name} could be declared invariant to {change}"


@pytest.mark.parametrize("name", ON_ROWS)
def test_the_order_of_rows_does_not_matter(name: str) -> None:
    x, known = cloud(), labels()
    order = np.random.default_rng(3).permutation(len(x))
    one = METRICS[name](x, **known, **PLAIN.get(name, {}))
    two = METRICS[name](x[order], **{k: v[order] for k, v in known.items()}, **PLAIN.get(name, {}))
    assert two.value == pytest.approx(one.value, rel=1e-9)
    assert (two.low, two.high) == pytest.approx((one.low, one.high), rel=1e-6)
    assert (two.n, two.contexts, two.dropped) == (one.n, one.contexts, one.dropped)


@pytest.mark.parametrize("name", ON_ROWS)
def test_an_estimate_lies_in_its_interval_and_says_what_it_was_made_from(name: str) -> None:
    seen = METRICS[name](cloud(), **labels())
    assert seen.low <= seen.value <= seen.high
    assert seen.contexts == 24
    assert seen.n == (24 if METRICS[name].needs[0] is Coherence else 240)
    assert seen.dropped == 0
    assert len(seen.replicates) >= 2
    low, high = METRICS[name].bounds
    assert low is None or seen.low >= low or seen.low == seen.value
    assert high is None or seen.high <= high or seen.high == seen.value
    assert float(seen) == seen.value
    assert "nan" not in repr(seen)


def _stats_in_batches(metric: Metric, x: np.ndarray, cuts: list[int]) -> View:
    """What an array call keeps, but filled by one update for each slice between the cuts."""
    rows, known = torch.as_tensor(x), {k: torch.as_tensor(v) for k, v in labels(len(x)).items()}
    fold = fold_of(known["contexts"])
    folds: list[dict[type, Any]] = [{} for _ in range(FOLDS)]
    sample = Sample(len(x))
    for part in torch.arange(len(x)).tensor_split(cuts):
        for j in range(FOLDS):
            for need in [need for need in metric.needs if not on_sample(need)]:
                mine = part[fold[part] == j]
                folds[j][need] = folds[j].get(need, need()).update(rows[mine])
        mine = {"context": known["contexts"][part], "token": known["tokens"][part]}
        sample.update(rows[part], position=part, **mine)
    folds = [{k: v for k, v in fold.items() if v.n} for fold in folds]
    sizes = Counter(fold_of(known["contexts"].unique()).tolist())
    graphs = partial(sample_graphs, sample, batch=None)
    return View(folds, sample, lambda wanted: graphs(wanted=wanted), contexts=24, sizes=sizes)


@pytest.mark.parametrize("name", [name for name in ON_ROWS if Coherence not in METRICS[name].needs])
def test_any_partition_into_updates_gives_the_same_number(name: str) -> None:
    metric, x = METRICS[name], cloud()
    whole = metric(x, **labels(), **PLAIN.get(name, {}))
    for cuts in ([1, 2, 3], [120], list(range(10, 240, 10)), [7, 7, 200]):
        seen = evaluate(metric, _stats_in_batches(metric, x, cuts), metric.check(PLAIN.get(name, {})))
        assert seen.value == pytest.approx(whole.value, rel=1e-9)
        assert (seen.low, seen.high) == pytest.approx((whole.low, whole.high), rel=1e-7)


@pytest.mark.parametrize("name", ON_ROWS)
def test_numpy_torch_lists_and_views_give_the_same_number(name: str) -> None:
    metric, x = METRICS[name], cloud()
    expected = value(metric, x)
    wide = np.zeros((len(x), 2 * x.shape[1]))
    wide[:, ::2] = x
    backwards = x[::-1].copy()[::-1]
    forms = [torch.as_tensor(x), torch.as_tensor(x, dtype=torch.float64).requires_grad_(), np.asfortranarray(x)]
    forms += [wide[:, ::2], torch.as_tensor(np.ascontiguousarray(x.T)).T, backwards, x.astype(">f8"), x.tolist()]
    for form in forms:
        assert value(metric, form) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ON_ROWS)
def test_half_precision_equals_its_own_promotion(name: str) -> None:
    metric, x = METRICS[name], torch.as_tensor(cloud())
    for dtype in (torch.bfloat16, torch.float16):
        half = x.to(dtype)
        assert value(metric, half) == value(metric, half.float())


@pytest.mark.parametrize("name", ON_ROWS)
def test_integers_and_booleans_are_numbers(name: str) -> None:
    x = np.random.default_rng(0).integers(-50, 50, size=(240, 6))
    for form in (x.astype(np.int16), x.astype(np.uint8), x > 0):
        if Neighbours in METRICS[name].needs and form.dtype == bool:
            continue  # at most 64 distinct rows on the corners of a cube
        assert value(METRICS[name], form) == pytest.approx(value(METRICS[name], form.astype(np.float64)), rel=1e-9)


@pytest.mark.parametrize("name", ON_ATTENTION)
def test_metrics_of_attention_refuse_plain_rows(name: str) -> None:
    with pytest.raises(AnisoscopeError, match="measure"):
        METRICS[name](cloud())


@pytest.mark.parametrize("name", ON_ROWS)
def test_every_metric_of_rows_is_public(name: str) -> None:
    import anisoscope

    assert getattr(anisoscope, name) is METRICS[name]


@given(n=st.integers(40, 60), d=st.integers(2, 7), seed=st.integers(0, 10**6), name=st.sampled_from(ON_ROWS))
def test_small_shapes_give_a_number_in_bounds_or_one_sentence(n: int, d: int, seed: int, name: str) -> None:
    metric = METRICS[name]
    x = np.random.default_rng(seed).normal(size=(n, d)) + 1.0
    try:
        seen = metric(x, contexts=np.arange(n) // 3, tokens=np.arange(n) % 4)
    except TooFewRows:
        assert name == "local_anisotropy", "the only one that needs more than 40 rows"
        return
    low, high = metric.bounds
    assert math.isfinite(seen.value)
    assert low is None or seen.value >= low - 1e-12
    assert high is None or seen.value <= high + 1e-12
    assert seen.low <= seen.value <= seen.high


# -- numbers that commands measure from something else than rows --


def within(value: float, bounds: tuple[float | None, float | None]) -> bool:
    low, high = bounds
    return (low is None or value >= low - 1e-9) and (high is None or value <= high + 1e-9)


@pytest.mark.parametrize("name", sorted(KNOWN_MEASURED))
def test_known_answer_of_a_measured_number(name: str) -> None:
    known = KNOWN_MEASURED[name]
    seen = known.number(known.function(*known.arguments()))
    assert seen == pytest.approx(known.expected, abs=1e-9)
    assert within(seen, MEASURED[name].bounds)
    if known.function.__module__.startswith("anisoscope."):
        assert known.function is MEASURED[name].function, "what the commands call is what is declared"


@pytest.mark.parametrize("change", ["rotation", "scale"])
@pytest.mark.parametrize("name", [name for name, known in KNOWN_MEASURED.items() if known.of_rows is not None])
def test_invariances_of_a_measured_number_hold_and_undeclared_ones_fail(name: str, change: str) -> None:
    """Activations and gradients are changed together."""
    metric, of_rows, gaps = MEASURED[name], KNOWN_MEASURED[name].of_rows, []
    assert of_rows is not None
    for seed in range(4):
        rows = planted(seed)
        changed = [torch.as_tensor(transform(part.numpy(), change)) for part in rows]
        before, after = of_rows(*rows), of_rows(*changed)
        assert within(before, metric.bounds), seed
        gaps.append(abs(after - before) / max(abs(before), 1e-3))
    assert (max(gaps) < 1e-5) == (change in metric.invariant), f"{name}, {change}: {gaps}"


@pytest.mark.parametrize("name", sorted(MEASURED))
def test_a_measured_number_is_refused_with_the_command_that_measures_it(name: str) -> None:
    for ask in (lambda: parse_requests([name]), lambda: MEASURED[name](cloud())):
        with pytest.raises(AnisoscopeError, match=f"{name} is .* measured by `anisoscope"):
            ask()
    assert name not in {request.metric.name for request in parse_requests("all")}


def test_commands_that_measure_exist() -> None:
    import typer

    from anisoscope.cli import app

    for words in {command for metric in MEASURED.values() for command in metric.measured_by}:
        found: Any = typer.main.get_command(app)
        for word in words.split():
            assert word in found.commands, words
            found = found.commands[word]


# -- the table holds declared numbers only --

ROOT = Path(__file__).parents[2]
TABLES = sorted((ROOT / "docs" / "results").rglob("table.parquet"))


def undeclared(names: Iterable[str]) -> set[str]:
    return set(names) - set(registry())


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.parent.name)
def test_committed_tables_hold_declared_numbers_within_their_bounds(path: Path) -> None:
    table = pq.read_table(path, columns=["metric", "variant", "value"])
    assert not undeclared(table["metric"].unique().to_pylist())
    for name, metric in registry().items():
        rows = table.filter(pc.and_(pc.equal(table["metric"], name), pc.is_finite(table["value"])))
        rows = rows.filter(pc.invert(pc.match_substring(rows["variant"], "against=")))  # differences
        for value in (pc.min(rows["value"]).as_py(), pc.max(rows["value"]).as_py()) if len(rows) else ():
            assert within(value, widened(metric.bounds)), (name, value)


def widened(bounds: tuple[float | None, float | None]) -> tuple[float | None, float | None]:
    """Tables hold float32."""
    low, high = bounds
    return (None if low is None else low - 1e-6, None if high is None else high * (1 + 1e-6))


def literals(path: Path) -> set[str]:
    """Names that a file writes as metrics: {"metric": name}, record(name, …), yield name, variant, found."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            found |= {v.value for k, v in pairs if isinstance(k, ast.Constant) and k.value == "metric"
                      and isinstance(v, ast.Constant)}  # fmt: skip
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            at = {"record": 0, "_with_gain": 0, "_add": 1}.get(name)
            if at is not None and len(node.args) > at and isinstance(node.args[at], ast.Constant):
                found.add(node.args[at].value)
        elif isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
            first, *rest = node.value.elts
            if isinstance(first, ast.Constant) and isinstance(rest[0], ast.Dict | ast.Name):
                found.add(first.value)
    return found


def test_every_name_that_the_source_writes_is_declared() -> None:
    rooms = ("measurement", "tangent", "monitor", "series", "training", "studies", "integrations")
    found = {path: literals(path) for room in rooms for path in (ROOT / "src" / "anisoscope" / room).rglob("*.py")}
    assert {"gradient_energy", "curvature_slope", "lm_loss"} <= set().union(*found.values())
    assert not {path.name: undeclared(names) for path, names in found.items() if undeclared(names)}


def test_an_undeclared_name_would_be_noticed(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text('row = {"metric": "no_such_number", "value": 1.0}\nrecord("nor_this", {})\n')
    assert undeclared(literals(tmp_path / "wrong.py")) == {"no_such_number", "nor_this"}
