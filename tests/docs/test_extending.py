"""A metric is one decorated function: the command line, the table and the report follow without more."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from anisoscope.metrics.catalogue import registry
from anisoscope.metrics.engine.metric import REGISTRY, Metric, measured, metric
from anisoscope.stats.moments import Moments

MODEL = "gpt2:n_layer=2,n_embd=32,n_head=2,vocab_size=300"
SMALL = ("--tokens", "400", "--context", "32")


@pytest.fixture
def declared() -> Iterator[Metric]:
    """A metric that exists for one test only."""
    before = registry()

    @metric(
        Moments,
        title="Longest axis",
        formula="√(λ₁ / n)",
        reference="declared in a test",
        convention="rows centred on their mean",
        invariant=("rotation", "shift"),
        bounds=(0.0, None),
    )
    def longest_axis(moments: Moments, *, scale: float = 1.0) -> float:
        """How far rows spread along the direction in which they spread most."""
        return scale * float((moments.eigenvalues()[0] / moments.n).sqrt())

    yield longest_axis
    del REGISTRY["longest_axis"]
    assert registry() == before


def command(*words: object) -> tuple[int, str, str]:
    from anisoscope import cli

    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["anisoscope", *map(str, words)])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
            cli.main()
    return int(end.value.code or 0), out.getvalue(), err.getvalue()


def profile(folder: Path, metrics: str) -> tuple[int, str, str]:
    return command("profile", "--random-init", MODEL, *SMALL, "--metrics", metrics, "--out", folder)


def test_without_the_declaration_the_name_is_unknown(tmp_path: Path) -> None:
    code, _, err = profile(tmp_path / "run", "longest_axis")
    assert code == 2
    assert "unknown metric 'longest_axis'" in err


def test_a_declared_metric_is_listed_with_its_words(declared: Metric) -> None:
    code, out, _ = command("list", "metrics")
    assert code == 0
    for words in ("longest_axis", declared.title, declared.formula, declared.reference, declared.description):
        assert words in out


def test_a_declared_metric_is_in_the_table_with_interval_and_variant(declared: Metric, tmp_path: Path) -> None:
    code, _, err = profile(tmp_path / "run", "longest_axis,longest_axis:scale=2,drift")
    assert code == 0, err
    rows = json.loads(command("show", tmp_path / "run", "--metric", "longest_axis", "--format", "json")[1])
    whole = [row for row in rows if row["head"] is None]
    once, twice = ({(r["layer"], r["kind"]): r for r in whole if r["variant"] == v} for v in ("", "scale=2.0"))
    assert once.keys() == twice.keys() >= {(0, "embed"), (1, "resid"), (2, "resid"), (2, "final")}
    for place, row in once.items():
        assert row["low"] < row["value"] < row["high"]
        assert twice[place]["value"] == pytest.approx(2 * row["value"])


def test_a_declared_metric_is_in_the_report(declared: Metric, tmp_path: Path) -> None:
    assert profile(tmp_path / "run", "longest_axis")[0] == 0
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert declared.title in page
    assert "longest_axis" in page
    assert profile(tmp_path / "other", "drift")[0] == 0
    assert declared.title not in (tmp_path / "other" / "report.html").read_text(encoding="utf-8")


def test_a_declared_metric_can_be_called_on_an_array(declared: Metric) -> None:
    rows = np.random.default_rng(0).normal(size=(2000, 3)) * [5.0, 1.0, 1.0]
    estimate = declared(rows)
    assert estimate.low < 5 < estimate.high
    assert declared(rows, scale=2.0).value == pytest.approx(2 * estimate.value)


def test_a_declared_metric_is_in_the_reference_page(declared: Metric) -> None:
    from reference_pages import metrics_page

    assert "## `longest_axis`" in metrics_page()


def test_a_misspelt_option_of_a_declared_metric_is_known(declared: Metric, tmp_path: Path) -> None:
    code, _, err = profile(tmp_path / "run", "longest_axis:scal=2")
    assert code == 2
    assert "did you mean 'scale'" in err


def test_a_number_of_a_command_is_listed_and_documented_and_a_profile_says_who_measures_it(tmp_path: Path) -> None:
    from reference_pages import metrics_page

    before = registry()

    @measured("train", title="Patience", formula="steps since the best loss", bounds=(0.0, None))
    def patience(losses: list[float]) -> int:
        """How long the loss has not fallen."""
        return len(losses) - 1 - losses.index(min(losses))

    try:
        assert patience([3.0, 1.0, 2.0]) == 1, "the function stays as it is"
        _, out, _ = command("list", "metrics")
        assert "patience" in out and "measured by: train" in out
        assert "## `patience`" in metrics_page()
        code, _, err = profile(tmp_path / "run", "patience")
        assert code == 2 and "patience is not a metric of rows; it is measured by `anisoscope train`" in err
    finally:
        del REGISTRY["patience"]
    assert registry() == before
