"""A loss weighted by target frequency: by hand, nothing at all when neutral, and the same after an interruption."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from anisoscope.capture.gradient_pass import IGNORED, LabelConvention, TargetWeights, gradient_rows
from anisoscope.capture.sites.layout import find_layout
from anisoscope.data.tokens import SPECIALS
from anisoscope.results.folder import RunFolder
from anisoscope.studies.arms import training_monitor
from anisoscope.training.corpus import prepare_corpus
from anisoscope.training.language_model import WindowStream, build_model, make_stream
from anisoscope.training.loop import train
from support.tiny_runs import TINY, Seen, about, losses, tiny, weights

OBJECTIVES = ("decoder", "encoder")


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pieces") / "corpus"
    prepare_corpus("embedded", folder, limit=TINY["limit"], tokens="bpe:400")
    return folder


def stream_of(pieces: Path, out: Path, **more: Any) -> tuple[WindowStream, Any]:
    config = tiny(tokens="bpe:400", dtype="float64", **more)
    stream = make_stream(config, out, corpus=pieces)
    return stream, build_model(config, vocab_size=stream.corpus.vocab_size)


def weighted_by_hand(logits: Tensor, batch: dict[str, Tensor], weigh: np.ndarray, *, shifted: bool) -> float:
    """Σ w ℓ / n, one target at a time."""
    total, number = 0.0, 0
    for scores, labels in zip(logits.detach().double().numpy(), batch["labels"].numpy(), strict=True):
        for t in range(len(labels)):
            target = labels[t + 1] if shifted and t + 1 < len(labels) else IGNORED if shifted else labels[t]
            if target != IGNORED:
                total -= weigh[target] * (scores[t, target] - math.log(np.exp(scores[t]).sum()))
                number += 1
    return total / number


@pytest.mark.parametrize("arch", OBJECTIVES)
@pytest.mark.parametrize("weights_", ["flat", "power:1.5"])
def test_the_loss_by_hand(arch: str, weights_: str, pieces: Path, tmp_path: Path) -> None:
    stream, model = stream_of(pieces, tmp_path, arch=arch, target_weights=weights_)
    batch = stream.batch(3)
    exponent = 0.0 if weights_ == "flat" else 1.5
    raw, factor = np.maximum(stream.counts, 1) ** (exponent - 1.0), 1.0
    for _ in range(200):  # until the mean weight is 1 with none above 100
        factor /= (stream.counts * np.minimum(100.0, factor * raw)).sum() / stream.counts.sum()
    weigh = np.minimum(100.0, factor * raw)
    weigh[: len(SPECIALS)] = 1.0
    found = stream.loss(model, batch)
    logits = model(input_ids=batch["input_ids"]).logits
    assert float(found.detach()) == pytest.approx(
        weighted_by_hand(logits, batch, weigh, shifted=arch == "decoder"), rel=1e-9
    )
    assert float(found.detach()) != pytest.approx(float(model(**batch).loss.detach()), rel=1e-3), "it does something"


@pytest.mark.parametrize("arch", OBJECTIVES)
def test_neutral_weights_change_no_bit(arch: str, pieces: Path, tmp_path: Path) -> None:
    runs = {}
    for name in ("none", "power:1"):
        config = tiny(arch=arch, tokens="bpe:400", steps=4, target_weights=name)
        assert config.arm == arch, "a neutral arm is not another one"
        runs[name] = train(config, tmp_path / name.replace(":", ""), corpus=pieces)
    assert losses(runs["none"]) == losses(runs["power:1"])
    stream, model = stream_of(pieces, tmp_path, arch=arch, target_weights="power:1")
    assert stream.target_weights is None
    batch = stream.batch(1)
    assert torch.equal(stream.loss(model, batch), model(**batch).loss)
    assert "target_weights" not in about(runs["power:1"])


def test_weights_of_one_give_the_plain_loss(pieces: Path, tmp_path: Path) -> None:
    for arch in OBJECTIVES:
        stream, model = stream_of(pieces, tmp_path, arch=arch, target_weights="flat")
        object.__setattr__(stream, "target_weights", torch.ones(stream.corpus.vocab_size))
        batch = stream.batch(0)
        assert float(stream.loss(model, batch).detach()) == pytest.approx(float(model(**batch).loss.detach()), rel=1e-6)


class Killed(BaseException):
    """Stands for the end of the process."""


def test_a_weighted_run_that_was_killed_goes_on_as_if_nothing_had_happened(pieces: Path, tmp_path: Path) -> None:
    def trouble(step: int) -> None:
        if step == 7:
            raise Killed

    config = tiny(tokens="bpe:400", target_weights="flat")
    whole = train(config, tmp_path / "whole", corpus=pieces)
    with pytest.raises(Killed):
        train(config, tmp_path / "run", corpus=pieces, monitor=Seen(trouble))
    out = train(config, tmp_path / "run", corpus=pieces, resume=True)
    assert losses(out) == losses(whole)
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(out).items())
    report = about(out)["target_weights"]
    assert report["after"]["entropy_bits"] > report["before"]["entropy_bits"] and report["target_weights"] == "flat"
    assert losses(whole) != losses(train(tiny(tokens="bpe:400"), tmp_path / "plain", corpus=pieces))


@pytest.mark.parametrize("arch", OBJECTIVES)
def test_the_probe_measures_the_plain_loss_and_the_weighted_one_beside_it(
    arch: str, pieces: Path, tmp_path: Path
) -> None:
    config = tiny(arch=arch, tokens="bpe:400", target_weights="flat", steps=1)

    def attach(model: Any, stream: Any, optimizer: Any, training: Any, folder: Path) -> Any:
        return training_monitor(model, stream, optimizer, training, folder, monitor="light", when="0", contexts=16)

    out = train(config, tmp_path / "run", corpus=pieces, monitor=attach)
    table = RunFolder.open(out).table()
    stream = make_stream(config, out, corpus=pieces)
    model = build_model(config, vocab_size=stream.corpus.vocab_size).eval()
    assert stream.target_weights is not None
    weigh = stream.target_weights.numpy()
    n = table.where(metric="probe_loss").records()[0]["n"]
    shifted = arch == "decoder"
    # the probe's loss is that of its test half: find the contexts by their number of targets
    half = _test_half(stream, model)
    counts = [int((LabelConvention(shifted).targets(batch["labels"]) != IGNORED).sum()) for batch in half]
    assert sum(counts) == n
    for metric, by in (("probe_loss", np.ones_like(weigh)), ("weighted_probe_loss", weigh)):
        sums = [
            c * weighted_by_hand(model(input_ids=b["input_ids"]).logits, b, by, shifted=shifted)
            for b, c in zip(half, counts, strict=True)
        ]
        assert table.value(metric=metric, step=0) == pytest.approx(sum(sums) / n, rel=1e-5), metric
    share = stream.counts * weigh / (stream.counts * weigh).sum()
    share = share[share > 0]
    bits = table.where(metric="target_entropy", step=0).records()[0]["value"]
    assert bits == pytest.approx(-(share * np.log2(share)).sum(), rel=1e-9)
    assert bits > table.where(metric="unigram_entropy", step=0).records()[0]["value"] + 0.2


def _test_half(stream: WindowStream, model: Any) -> list[dict[str, Tensor]]:
    """The contexts of the probe that gradients are tested on, one at a time."""
    from anisoscope.capture.row import original_contexts
    from anisoscope.numerics.hashing import half_of

    found = []
    for batch in stream.probe_batches(16):
        half = half_of(original_contexts(batch, config=model.config))
        found += [{name: value[[i]] for name, value in batch.items()} for i in half.nonzero().flatten().tolist()]
    return found


@pytest.mark.parametrize("arch", OBJECTIVES)
def test_gradients_are_of_the_plain_loss_unless_asked_for(arch: str, pieces: Path, tmp_path: Path) -> None:
    stream, model = stream_of(pieces, tmp_path, arch=arch, target_weights="flat")
    model, layout = model.eval(), find_layout(model)
    site, batch = layout.sites(["resid"])[-1], stream.probe_batches(4, batch_size=4)[0]
    weigh = stream.target_weights
    assert weigh is not None
    found = {
        name: gradient_rows(model, batch, [site], layout=layout, targets=targets)
        for name, targets in (("none", None), ("plain", TargetWeights(weigh)), ("weighted", TargetWeights(weigh, True)))
    }
    rows = {name: each.sites[site].g for name, each in found.items()}
    assert torch.equal(rows["none"], rows["plain"]), "the same measurement for every arm"
    assert found["none"].weighted_loss is None and found["plain"].loss == found["weighted"].loss
    assert found["plain"].weighted_loss == found["weighted"].weighted_loss
    # the twin: autograd of the loss written out, with respect to the last block's output
    kept: list[Tensor] = []
    last = list(model.base_model.modules())
    block = next(m for m in last if hasattr(m, "__len__") and len(m) == TINY["layers"] and hasattr(m, "append"))[-1]
    hook = block.register_forward_hook(lambda _, __, out: kept.append(out[0] if isinstance(out, tuple) else out))
    logits = model(input_ids=batch["input_ids"]).logits
    hook.remove()
    targets = LabelConvention(arch == "decoder").targets(batch["labels"])
    loss = -(
        torch.log_softmax(logits, -1).gather(-1, targets.clamp_min(0)[..., None])[..., 0] * weigh[targets.clamp_min(0)]
    )
    (twin,) = torch.autograd.grad(loss[targets != IGNORED].sum(), kept[0])
    torch.testing.assert_close(rows["weighted"], twin.flatten(0, 1), rtol=1e-8, atol=1e-12)
    assert not torch.allclose(rows["weighted"], rows["plain"], rtol=1e-2)
