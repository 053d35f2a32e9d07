"""What a bank costs beside its numbers: reads of a device, logits that nobody asked for, memory that was foretold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

from anisoscope.capture import Capture, find_layout
from anisoscope.capture.row import Batch, Rows
from anisoscope.measurement import bank as banks
from anisoscope.measurement.bank import Bank, make_plan
from anisoscope.metrics import attention
from anisoscope.metrics.catalogue import parse_requests
from anisoscope.stats.moments import Moments
from support.measured import batches, same_states
from support.tiny_models import tiny

READS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "equal", "masked_select"}


class Reads(TorchDispatchMode):
    """Counts the operations whose result the host must wait for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in READS
        return func(*args, **(kwargs or {}))


def _gpt2(layers: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, **sizes)).eval()


def _captured(model: torch.nn.Module, given: list[Any]) -> tuple[Bank, int]:
    layout = find_layout(model)
    kinds = [kind for kind in ("embed", "resid", "query", "key", "scores", "final") if kind in layout.kinds]
    bank = Bank(make_plan(parse_requests(None), kinds, seed=0, sample_size=64, attention_rows=4))
    with Capture(model, layout.sites(kinds), bank, layout=layout) as capture, Reads() as reads:
        for batch in given:
            capture.run(batch)
    return bank, reads.count


@pytest.fixture
def ids() -> list[dict[str, torch.Tensor]]:
    draw = torch.randint(2, 50, (12, 24), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in draw.split(4)]


def test_a_pass_on_a_device_waits_for_it_no_oftener_with_more_layers(
    ids: list[dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = [_captured(_gpt2(layers), ids)[1] for layers in (2, 6)]
    monkeypatch.setattr(banks, "_queue_limit", lambda device: 1 << 30)  # as on a device
    monkeypatch.setattr(attention, "_retaken", lambda *_: True)
    waiting = [_captured(_gpt2(layers), ids)[1] for layers in (2, 6)]
    assert waiting[0] == waiting[1]
    assert at_once[0] < at_once[1], "the counter sees reads of single sites where there are any"


def _by_cell(bank: Bank) -> dict[Any, Any]:
    """The state of a bank, whatever the order in which sites and cells came, with every sum given to its cell."""
    assert bank.sites
    sites = {site["site"]: site for site in bank.state()["sites"]}
    cells = {place: {(key, name): stat for key, name, stat in site.pop("cells")} for place, site in sites.items()}
    return {"sites": dict(sorted(sites.items())), "cells": cells, "groups": bank.groups}


def test_a_bank_saved_between_batches_comes_to_the_very_same_numbers() -> None:
    """What waits is saved as it waits: a resumed run ends with the table of an undisturbed one, in every digit."""
    model = _gpt2(2)
    layout = find_layout(model)
    kinds = ["embed", "resid", "query", "scores", "final"]
    plan = make_plan(parse_requests(None), kinds, seed=0, sample_size=64, attention_rows=4)
    whole, saved = Bank(plan), Bank(plan)
    for number in range(9):
        ids = torch.randint(2, 50, (3, 24), generator=torch.Generator().manual_seed(number))
        for bank in (whole, saved):
            with Capture(model, layout.sites(kinds), bank, layout=layout) as capture:
                capture.run({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        saved = Bank.load(plan, saved.state())
    same_states(_by_cell(whole), _by_cell(saved))


def test_rows_that_waited_give_the_statistics_of_rows_that_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = tiny("llama"), batches()
    plain, _ = _captured(model, given)
    monkeypatch.setattr(banks, "_queue_limit", lambda device: 40_000)  # some are queued, across batches too
    waited, _ = _captured(model, given)
    same_states(_by_cell(plain), _by_cell(waited), within=1e-12)


def test_rows_of_several_batches_that_waited_are_added_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of different lengths and groups, some rows of which are padding; a device is given few operations."""
    model, given = tiny("llama"), batches()
    assert len({batch["input_ids"].shape for batch in given}) > 1
    named = [Batch(b, groups=tuple("ab"[i % 2] for i in range(len(b["input_ids"])))) for b in given]
    plain, _ = _captured(model, named)
    monkeypatch.setattr(banks, "_queue_limit", lambda device: 1 << 30)
    added: list[Rows] = []
    add = Bank._add_rows
    monkeypatch.setattr(Bank, "_add_rows", lambda self, rows, total: (added.append(rows), add(self, rows, total)))
    waited, _ = _captured(model, named)
    same_states(_by_cell(plain), _by_cell(waited), within=1e-12)
    assert len(added) == len({rows.site for rows in added})
    assert len({id(rows.index) for rows in added}) == 1


def test_bad_rows_that_waited_are_counted_and_left_out(
    ids: list[dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _gpt2(2)
    with torch.no_grad():
        model.transformer.wte.weight[int(ids[1]["input_ids"][0, 5])] = torch.nan
    plain, _ = _captured(model, ids)
    monkeypatch.setattr(banks, "_queue_limit", lambda device: 1 << 30)
    waited, _ = _captured(model, ids)
    for site, stats in plain.sites.items():
        assert waited.sites[site].bad == stats.bad
        moments = [s[Moments] for s in waited.sites[site].cells.values() if Moments in s]
        assert all(bool(m.scatter.isfinite().all()) for m in moments)
    assert any(stats.non_finite for stats in plain.sites.values())


def _with_logits(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    import transformers

    ids = torch.arange(6, 26).view(2, 10)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name == "bert":
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=40, **sizes)).eval(), given
    config = transformers.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=40)
    model = transformers.T5ForConditionalGeneration(config).eval()
    return model, {**given, "decoder_input_ids": ids[:, :5]}


@pytest.mark.parametrize("name", ["t5", "bert"])
def test_logits_are_taken_of_one_position_alone(name: str) -> None:
    model, given = _with_logits(name)
    plan = make_plan([], ["resid"], seed=0, sample_size=64, attention_rows=4)
    seen: list[int] = []
    with Capture(model, find_layout(model).sites(["resid"]), Bank(plan)) as capture:
        model.get_output_embeddings().register_forward_hook(lambda _, args, output: seen.append(output.shape[1]))
        capture.run(given)
    model(**given)
    assert seen == [1, 5 if name == "t5" else 10], "outside a capture the model gives all its logits"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gpt2:n_layer=2,n_embd=256,n_head=4", {"context": 128, "tokens": 2048}),
        ("vit:num_hidden_layers=1,hidden_size=192,num_attention_heads=3,intermediate_size=768", {"tokens": 2048}),
    ],
)
def test_memory_is_foretold_within_a_quarter(model: str, options: dict[str, Any], tmp_path: Path) -> None:
    code = (
        "import sys, json, torch; torch.set_num_threads(1)\n"
        "from anisoscope import profile\n"
        "profile(sys.argv[1], out=sys.argv[2], random_init=True, device='cpu', report=False, **json.loads(sys.argv[3]))"
    )
    out = tmp_path / "run"
    subprocess.run([sys.executable, "-c", code, model, str(out), json.dumps(options)], check=True, capture_output=True)
    about = json.loads((out / "run.json").read_text())
    assert about["memory_estimate_mb"] == pytest.approx(about["peak_memory_mb"], rel=0.25)
