"""Memory of a run: what is kept of an array of rows, and whether the estimate is what a run takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anisoscope
from anisoscope.capture.sites.site import Site
from anisoscope.measurement import profile
from anisoscope.measurement.bank import Bank, Setup, make_plan
from anisoscope.measurement.evaluation import evaluate_bank, mean_spectrum
from anisoscope.measurement.inspection import record_count
from anisoscope.measurement.measure import feed_rows
from anisoscope.metrics.catalogue import parse_requests
from anisoscope.models.source import stored_rows
from anisoscope.results.folder import RunFolder
from anisoscope.stats.moments import Moments

_PEAK = "from anisoscope.measurement.profile import _highest; print(_highest())"
_RUN = f"import sys; from anisoscope.cli import main\ntry: main()\nexcept SystemExit: pass\n{_PEAK}"


def _fed(rows: Any, **sizes: Any) -> Bank:
    bank = Bank(make_plan(parse_requests(None), ["rows"], seed=0, **sizes))
    feed_rows(bank, Site(0, "rows"), rows)
    return bank


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_wide_rows_of_a_file_are_kept_once(dtype: Any, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(300, 700)).astype(dtype)
    np.save(tmp_path / "a.npy", rows)
    (stats,) = _fed(stored_rows(tmp_path / "a.npy")["a"]).sites.values()
    assert stats.sample is not None and len(stats.sample) == 300
    held = [part for kinds in stats.cells.values() for part in kinds[Moments].rows]
    assert sum(map(len, held)) == 300, "no d×d matrix was made"
    assert {part.source.data_ptr() for part in held} == {stats.sample.rows.data_ptr()}
    found = stats.sample.rows.numpy()[stats.sample.label("token").argsort().numpy()]
    assert np.array_equal(found, rows)


def test_rows_give_the_same_numbers_however_they_are_kept() -> None:
    rows = torch.randn(300, 120, generator=torch.Generator().manual_seed(0)).double() + 2.0
    requests = [r for r in parse_requests(None) if r.metric.name in ("svd_ratio", "drift", "average_cosine")]
    setup = Setup(None, [], [], ["rows"], {"single": 1})
    kept = [evaluate_bank(_fed(rows, sample_size=size), requests, setup) for size in (8192, 100)]
    for one, other in zip(*kept, strict=True):
        assert one["value"] == pytest.approx(other["value"], rel=1e-10)


def test_saving_few_wide_rows_makes_no_matrix_of_them() -> None:
    rows = torch.randn(30, 100, generator=torch.Generator().manual_seed(0))
    moments = Moments().update(rows)
    again = Moments.load(moments.state())
    assert moments.thin and again.thin and sum(x.numel() for x in moments.state().values()) <= rows.numel() + 1
    torch.testing.assert_close(again.scatter, Moments().update(rows).scatter)


def test_the_spectrum_of_the_metrics_is_the_one_that_is_saved() -> None:
    bank = _fed(torch.randn(90, 40, generator=torch.Generator().manual_seed(0)))
    (stats,) = bank.sites.values()
    before = mean_spectrum(stats)
    evaluate_bank(bank, parse_requests(None), Setup(None, [], [], ["rows"], {"single": 1}))
    assert stats.spectrum is not None and before is not None
    torch.testing.assert_close(stats.spectrum, before, rtol=1e-10, atol=0)
    feed_rows(bank, Site(0, "rows"), torch.ones(5, 40))
    assert stats.spectrum is None, "more rows, another spectrum"


def test_rows_of_the_table_are_counted_before_they_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def counted(*args: Any, **words: Any) -> Any:
        planned = plan(*args, **words)
        counts.append(record_count([s for group in planned.groups for s in group], planned.shapes, args[2]))
        return planned

    plan = profile.plan_passes
    monkeypatch.setattr(profile, "plan_passes", counted)
    config = {"random_init": True, "tokens": 256, "context": 32, "tokenizer": "bytes"}
    spec = "gpt2:n_layer=2,n_head=8,n_embd=16,vocab_size=259"
    table = anisoscope.profile(spec, out=tmp_path / "run", report=False, **config)
    plain = [row for row in table.records() if "first=out" not in row["variant"]]
    assert counts == [len(plain)]


def _peak(code: str, *words: object) -> int:
    found = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, check=True)
    return int(found.stdout.split()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_wide_array_takes_three_times_its_size_at_most(dtype: Any, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows = draw.standard_normal((3000, 20_000), dtype=np.float32).astype(dtype)
    np.save(tmp_path / "a.npy", rows)
    size, out = rows.nbytes, tmp_path / "run"
    del rows
    np.save(tmp_path / "small.npy", draw.standard_normal((300, 200)).astype(dtype))
    small = _peak(_RUN, "profile", tmp_path / "small.npy", "--out", tmp_path / "small")
    taken = _peak(_RUN, "profile", tmp_path / "a.npy", "--out", out) - small
    assert taken <= 3 * size, f"{taken / size:.2f} times the data"
    about = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert about["memory_estimate_mb"] == pytest.approx(about["peak_memory_mb"], rel=0.25)
    assert all(np.isfinite(row["value"]) for row in RunFolder(out).table().records())


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["n_layer=25,n_head=40,n_embd=80", "n_layer=1,n_head=1000,n_embd=2000"])
def test_memory_is_estimated_for_many_heads(shape: str, tmp_path: Path) -> None:
    words = ("--random-init", "--tokenizer", "bytes", "--tokens", 4096, "--context", 128, "--out", tmp_path / "run")
    _peak(_RUN, "profile", f"gpt2:{shape},vocab_size=259", *words)
    about = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert about["memory_estimate_mb"] == pytest.approx(about["peak_memory_mb"], rel=0.15)
