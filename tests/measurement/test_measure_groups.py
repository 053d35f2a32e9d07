"""Sites whose spectra are sought together give what they give one by one."""

from __future__ import annotations

import pytest
import torch

from anisoscope.capture.sites.site import Site
from anisoscope.measurement import evaluation as module
from anisoscope.measurement.bank import Bank, Setup, make_plan
from anisoscope.measurement.evaluation import evaluate_bank
from anisoscope.measurement.measure import feed_rows
from anisoscope.metrics.catalogue import parse_requests
from anisoscope.metrics.engine import estimation as evaluate
from anisoscope.metrics.engine.metric import Request
from anisoscope.stats.sample import Sample

METRICS = ["svd_ratio", "svd_ratio:batches=1", "participation_ratio", "two_nn"]


def bank_of(sites: int, *, width: int) -> tuple[Bank, list[Request]]:
    requests = parse_requests(METRICS)
    bank = Bank(make_plan(requests, ["resid"], seed=0, sample_size=200, attention_rows=4))
    for layer in range(sites):
        rows = torch.randn(200, width, generator=torch.Generator().manual_seed(layer))
        feed_rows(bank, Site(layer, "resid"), rows)
    return bank, requests


def test_one_site_at_a_time_gives_the_same_table(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(None, [], [], ["resid"], {"single": 4})
    solved: list[int] = []
    together = evaluate.together
    monkeypatch.setattr(evaluate, "together", lambda act, items: solved.append(len(items)) or together(act, items))  # type: ignore[func-returns-value]
    tables, seen = [], []
    steps: list[tuple[int, int]] = []
    for room in (2**26, 0):
        monkeypatch.setattr(module, "_TOGETHER", room)
        bank, requests = bank_of(4, width=130)
        steps.clear()
        records = evaluate_bank(bank, requests, setup, progress=lambda _, done, of: steps.append((done, of)))
        tables.append([{k: repr(v) for k, v in record.items()} for record in records])
        seen.append([count for count in solved if count])
        solved.clear()
        assert steps == [(i, 4) for i in range(1, 5)]
    assert tables[0] == tables[1]
    assert seen == [[40], [10] * 4], "everything, eight folds left out and one batch, of four sites"


def test_consecutive_rows_of_a_sample_are_those_a_mask_selects() -> None:
    sample = Sample(50).update(torch.randn(80, 3), context=torch.arange(80), token=torch.arange(80) % 7)
    part, again = sample.part(10, 30), sample.select((torch.arange(50) >= 10) & (torch.arange(50) < 30))
    assert torch.equal(part.rows, again.rows) and torch.equal(part.fold, again.fold)
    for name in ("hash", "context", "token"):
        assert torch.equal(part.label(name), again.label(name))
    more = part.merge(sample.part(0, 10))
    assert torch.equal(more.rows, sample.rows[:30])
    assert len(sample.select(torch.zeros(50, dtype=torch.bool))) == 0
