"""Faults that once were there: each is kept out by the case that showed it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anisoscope
from anisoscope import profile
from anisoscope.data.text import Document
from anisoscope.data.tokens import DataFingerprint, contexts
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement import profile as profiles
from anisoscope.metrics.engine.folds import Neighbours
from anisoscope.models.tokenizer import ByteTokenizer
from anisoscope.results.folder import RunFolder
from support.tiny_models import tiny

SPEC = "gpt2:n_layer=2,n_embd=32,n_head=2,vocab_size=300"
DEEP = "gpt2:n_layer=4,n_embd=64,n_head=2,vocab_size=300"  # several passes in 1 MiB
SMALL: dict[str, Any] = {"random_init": True, "tokens": 600, "context": 64, "batch_size": 2, "report": False}


@pytest.mark.parametrize("name", ["codegen"])
def test_a_mask_that_a_model_writes_itself_is_seen_as_one(name: str) -> None:
    model = tiny(name)
    model.set_attn_implementation("eager")
    ids = torch.randint(5, 60, (2, 14), generator=torch.Generator().manual_seed(0))
    table = anisoscope.measure(model, [{"input_ids": ids}], sites=["scores"], attention_rows=0)
    with torch.no_grad():
        weights = model(input_ids=ids, output_attentions=True, use_cache=False).attentions[0].double()
    rows = weights[:, :, 7:]  # rows that see 8 keys or more
    seen = torch.arange(8, 15).double()
    entropy = (-(rows * rows.clamp_min(1e-300).log()).sum(-1) / seen.log()).mean()
    assert table.where(head=[0, 1]).value(layer=1, head=0, metric="attention_entropy") > 0
    mean = table.where(metric="attention_entropy", layer=1).records()
    assert next(r["value"] for r in mean if r["head"] is None) == pytest.approx(float(entropy), abs=1e-4)
    assert next(r["dropped"] for r in mean if r["head"] is None) == 14


def test_rows_that_differ_by_the_noise_of_a_forward_pass_are_duplicates_and_others_are_not() -> None:
    x = torch.randn(200, 8, generator=torch.Generator().manual_seed(0)) + 5
    noisy = torch.cat([x, x[:20] * (1 + 1e-7)])
    graph, stands = Neighbours.of(noisy, 2, tolerance=1e-6)
    assert graph.duplicates == 20
    assert stands.tolist() == [*range(200), *range(20)]
    assert Neighbours.of(noisy, 2)[0].duplicates < 20  # without a tolerance they would stay
    assert Neighbours.of(torch.cat([x, x[:20] * 1.001]), 2, tolerance=1e-6)[0].duplicates == 0


def test_the_data_fingerprint_does_not_depend_on_order_but_on_content() -> None:
    pieces = list(contexts([Document("abcdefghijkl")], ByteTokenizer(), length=4))

    def digest(chosen: list[Any]) -> str:
        out = DataFingerprint()
        for piece in chosen:
            out.update(piece)
        return out.hexdigest()

    assert digest(pieces) == digest(pieces[::-1])
    assert digest(pieces) != digest(pieces[:2])


class Padded(nn.Module):
    """A module whose mask has another name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        return self.layer(x)


def test_padding_is_not_counted_whatever_the_mask_is_called() -> None:
    x = torch.randn(4, 10, 6, generator=torch.Generator().manual_seed(0))
    pad = torch.zeros(4, 10, dtype=torch.bool)
    pad[:, 5:] = True
    table = anisoscope.measure(Padded(), [{"x": x, "padding_mask": pad}], modules=["layer"], metrics="mean_norm")
    assert table.records()[0]["n"] == 20
    assert any("padding_mask was read as the mask" in note for note in table.about["models"][0]["notes"])
    everything = anisoscope.measure(
        Padded(), [{"x": x, "padding_mask": ~pad & pad}], modules=["layer"], metrics="drift"
    )
    assert everything.records()[0]["n"] == 40


def test_finished_passes_survive_an_interrupt_and_are_not_done_again(tmp_path: Path) -> None:
    small = {**SMALL, "memory_mb": 1, "metrics": ("average_cosine", "svd_ratio", "two_nn")}
    swept: list[int] = []
    original = profiles.ModelPasses._capture

    def counted(self: Any, work: Any) -> None:
        if work.number == 2 and not (tmp_path / "go").exists():
            raise KeyboardInterrupt
        swept.append(work.number)
        original(self, work)

    whole = profile(DEEP, out=tmp_path / "whole", **small)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiles.ModelPasses, "_capture", counted)
        with pytest.raises(KeyboardInterrupt):
            profile(DEEP, out=tmp_path / "cut", **small)
        assert len(RunFolder.open(tmp_path / "cut").table())  # what was finished is readable
        (tmp_path / "go").touch()
        again = profile(DEEP, out=tmp_path / "cut", resume=True, **small)
    assert swept == sorted(set(swept))
    assert len(swept) > 3
    np.testing.assert_allclose(again.arrow["value"], whole.arrow["value"], rtol=1e-12)


def test_resuming_a_complete_run_changes_nothing(tmp_path: Path) -> None:
    profile(SPEC, out=tmp_path / "run", **SMALL)
    before = (tmp_path / "run" / "run.json").read_bytes()
    seen: list[str] = []
    profile(SPEC, out=tmp_path / "run", resume=True, progress=lambda what, *_: seen.append(what), **SMALL)
    assert (tmp_path / "run" / "run.json").read_bytes() == before
    assert not seen


def test_words_given_alone_are_taken_as_lists_and_misspelt_ones_are_told() -> None:
    model = tiny("bert")
    batch = {"input_ids": torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(0))}
    table = anisoscope.measure(model, [batch], sites="resid", metrics="drift", layers=1)
    assert {(r["layer"], r["kind"], r["metric"]) for r in table.records()} == {(1, "resid", "drift")}
    with pytest.raises(AnisoscopeError, match="did you mean 'resid'"):
        anisoscope.measure(model, [batch], sites=["residual"])
    with pytest.raises(AnisoscopeError, match="unknown column 'metrik'"):
        table.where(metrik="drift")
