"""Transformers that a user wrote: no configuration, targets under any name, outputs in a tuple, a loss of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from anisoscope.errors import AnisoscopeError
from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import at
from anisoscope.tangent.plan import TangentPlan

WORDS, WIDTH, LENGTH, CONTEXTS = 20, 16, 7, 24
PLAN = TangentPlan(rank=3, draws=19, proxies=("pca",), frozen=False, balanced=False, standardised=False, permuted=False)
TEXTS = torch.randint(0, WORDS, (CONTEXTS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
X, Y = TEXTS[:, :-1], TEXTS[:, 1:]


class Block(nn.Module):
    """Causal attention without words of any library."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        out: Tensor = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return out


class Logits(nn.Module):
    """Returns logits and leaves the loss to its user."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, idx: Tensor) -> Any:
        x = self.words(idx)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _mean(logits: Tensor, targets: Tensor, **how: Any) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), **how)


class Both(Logits):
    """Returns logits and, with targets, their loss, in a tuple."""

    weight = 1.0

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        logits = super().forward(idx)
        return logits, None if targets is None else self.weight * _mean(logits, targets)


class Weighted(Both):
    """A loss that is no plain cross-entropy."""

    weight = 3.0


def _watched(model: nn.Module, parts: list[slice], *, scale: float = 1.0, **options: Any) -> Monitor:
    monitor = Monitor(model, metrics="tangent", plan=PLAN, when=at([0]), strict=True, **options)
    with monitor, monitor.step(0):
        for part in parts:
            if isinstance(model, Both):
                loss = model(X[part], Y[part])[1]
            else:
                loss = _mean(model(X[part]), Y[part])
            (loss * scale).backward()
    return monitor


def _energies(monitor: Monitor, group: str = "") -> dict[tuple[int, str], float]:
    table = monitor.table.where(metric="gradient_energy", control=None, group=group, average=None)
    return {(row["layer"], row["kind"]): row["value"] for row in table.records()}


WHOLE, UNEVEN = [slice(None)], [slice(5), slice(5, None)]


def test_blocks_and_loss_of_a_homemade_transformer_are_found_without_words() -> None:
    wanted = _energies(_watched(Logits(), WHOLE))
    assert set(wanted) == {(0, "embed"), (1, "resid"), (2, "resid")}
    assert _energies(_watched(Both(), WHOLE, scale=64.0)) == pytest.approx(wanted, rel=1e-5)
    accumulated = _watched(Both(), UNEVEN, scale=0.5)
    assert _energies(accumulated) == pytest.approx(wanted, rel=1e-5), "micro-batches weigh by their tokens"
    assert accumulated.notes == [], "nothing had to be assumed"
    outside = _watched(Logits(), UNEVEN)
    assert _energies(outside) == pytest.approx(wanted, rel=1e-5), "the weight of tokens is read from gradients"


def test_a_loss_that_is_no_cross_entropy_is_followed_where_its_scale_is_of_no_account() -> None:
    seen = _watched(Weighted(), WHOLE)
    assert set(_energies(seen)) == {(0, "embed"), (1, "resid"), (2, "resid")}
    with pytest.raises(AnisoscopeError, match="how its micro-batches weigh is not known"):
        _watched(Weighted(), UNEVEN)


def test_targets_that_are_the_next_tokens_are_not_masked_ones() -> None:
    """Labels read in place are those of masked tokens elsewhere; here the user moved them."""
    counts = torch.bincount(TEXTS.flatten(), minlength=WORDS)
    for model in (Logits(), Both()):
        options = {"probe": (X, Y)} if isinstance(model, Logits) else {}
        groups = set(_watched(model, WHOLE, counts=counts, **options).table.unique("group"))
        assert not any("masked" in group for group in groups)
        assert any(group.startswith("frequency:") for group in groups)


@pytest.mark.parametrize("kind", [Logits, Both])
def test_a_probe_of_inputs_and_targets_needs_no_other_words(kind: type[Logits]) -> None:
    wanted = _energies(_watched(kind(), WHOLE))
    counts = torch.bincount(TEXTS.flatten(), minlength=WORDS)
    probed = _watched(kind(), [], probe=[(X[:10], Y[:10]), [X[10:], Y[10:]]], counts=counts)
    assert _energies(probed) == pytest.approx(wanted, rel=1e-4)
    with torch.no_grad():
        output = kind()(X)
    logits = output[0] if isinstance(output, tuple) else output
    tested = probed.table.where(metric="probe_loss").records()[0]
    assert tested["n"] % LENGTH == 0 and abs(tested["value"] - float(_mean(logits, Y))) < 0.2
    assert probed.table.value(metric="constant_loss") < 3.0  # that of the frequencies
    assert probed.probe is not None and probed.probe.objective == "next"


def test_a_probe_without_targets_or_of_a_wrong_form_is_refused_with_what_it_may_be() -> None:
    with pytest.raises(AnisoscopeError, match="pairs of inputs and labels will do"):
        _watched(Logits(), [], probe=[X])
    with pytest.raises(AnisoscopeError, match=r"Logits fails on the probe.*pairs of inputs and labels"):
        _watched(Logits(), [], probe=[{"tokens": X, "labels": Y}])
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=60, bos_token_id=1, eos_token_id=2)
    with pytest.raises(AnisoscopeError, match=r"GPT2LMHeadModel fails on the probe \(You have to specify"):
        Monitor(GPT2LMHeadModel(config), when=[0], probe=[{"nope": X}])
    with pytest.raises(AnisoscopeError, match=r"expected the summed loss of its batch as one number"):
        _watched(
            Logits(), [], probe=[(X, Y)], loss=lambda model, batch: _mean(model(batch[0]), batch[1], reduction="none")
        )


def test_the_random_numbers_of_a_loss_are_the_same_at_every_step_and_not_those_of_the_training() -> None:
    drawn: list[Tensor] = []

    def noisy(model: nn.Module, batch: Any) -> Tensor:
        drawn.append(torch.rand(3))
        return _mean(model(batch[0]), batch[1], reduction="sum")

    model = Logits()
    monitor = Monitor(model, metrics="tangent", plan=PLAN, when=at([0, 1]), probe=[(X, Y)], loss=noisy, strict=True)
    torch.manual_seed(5)
    seen = []
    with monitor:
        for step in range(2):
            drawn.clear()
            with monitor.step(step):
                pass
            seen.append(torch.stack(drawn))
    assert torch.equal(*seen) and not torch.equal(seen[0][0], seen[0][1])
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))
