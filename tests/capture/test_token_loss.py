"""A loss that was computed outside the model: its scale per token is read from gradients, or it is said not to be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from anisoscope.capture.token_loss import TokenWeight, shifted_log_probabilities, watch_tokens

IDS = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(1))
Z = torch.randn(4, 9, 50, generator=torch.Generator().manual_seed(0)) * 2
LABELS = torch.where(torch.arange(9) < 3, -100, IDS)


def told(loss: Any, *, dtype: torch.dtype = torch.float32, name: str = "logits") -> TokenWeight | None:
    found: list[TokenWeight | None] = []
    output = Z.detach().clone().to(dtype).requires_grad_() * 1
    values = output if name == "logits" else output[..., 0]
    watch_tokens({name: values}, found.append, shield=lambda act: act)
    loss(values).backward()
    (weight,) = found
    return weight


def cross_entropy(z: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(z[:, :-1].float().flatten(0, 1), LABELS[:, 1:].flatten(), **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 0.25, 4096.0])
def test_the_weight_of_a_token_is_read_at_the_logits(dtype: torch.dtype, factor: float) -> None:
    mean = told(lambda z: cross_entropy(z) * factor, dtype=dtype)
    assert mean is not None and mean.tokens == 4 * 6
    assert mean.each == pytest.approx(factor / 24, rel=2e-3)
    total = told(lambda z: cross_entropy(z, reduction="sum") * factor, dtype=dtype)
    assert total is not None and total.each == pytest.approx(factor, rel=2e-3)


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: cross_entropy(z, label_smoothing=0.1),
        lambda z: cross_entropy(z, weight=torch.linspace(0.5, 2, 50)),
        lambda z: cross_entropy(z / 2),
        lambda z: -cross_entropy(z),
        lambda z: z.square().mean(),
        lambda z: cross_entropy(z) * 0,
        lambda z: functional.cross_entropy(z[0, :1], IDS[0, :1]) + 2 * functional.cross_entropy(z[1, :1], IDS[1, :1]),
    ],
    ids=["smoothed", "weighted", "tempered", "negative", "squares", "nothing", "two weights"],
)
def test_a_loss_of_another_kind_is_not_taken_for_one(loss: Any) -> None:
    assert told(loss) is None


def test_smoothing_is_told_from_a_plain_loss_also_in_an_untrained_model() -> None:
    flat = (Z.detach() * 0.05).requires_grad_()
    for smoothing, known in ((0.1, False), (0.0, True)):
        found: list[Any] = []
        watch_tokens({"logits": (z := flat * 1)}, found.append, shield=lambda act: act)
        cross_entropy(z, label_smoothing=smoothing).backward()
        assert (found[0] is not None) == known


def test_a_token_that_is_predicted_already_counts_and_misleads_nothing() -> None:
    sure = Z.detach().clone()
    sure[0, 4] = torch.where(torch.arange(50) == IDS[0, 5], 60.0, 0.0)
    found: list[Any] = []
    watch_tokens({"logits": (z := sure.requires_grad_() * 1)}, found.append, shield=lambda act: act)
    cross_entropy(z).backward()
    assert found[0].each == pytest.approx(1 / 24, rel=1e-4)


@pytest.mark.parametrize("height", [10.0, 12.0, 14.0])
def test_the_weight_is_read_of_a_text_that_the_model_knows_by_heart(height: float) -> None:
    """At losses of 2e-3 to 4e-5 nats softmax(z) − e_y is a few hundred units in the last place of float32."""
    known = torch.randn(4, 9, 50, generator=torch.Generator().manual_seed(0)) * 0.1
    known[:, :-1].scatter_(2, IDS[:, 1:, None], height)
    for options, told_so in (({}, True), ({"label_smoothing": 0.1}, False)):
        found: list[Any] = []
        watch_tokens({"logits": (z := known.clone().requires_grad_() * 1)}, found.append, shield=lambda act: act)
        loss = cross_entropy(z, **options)
        loss.backward()
        assert told_so is False or 2e-5 < loss.item() < 3e-3
        assert (found[0] is not None) == told_so
        assert not told_so or found[0].each == pytest.approx(1 / 24, rel=2e-3)


def test_the_weight_of_a_token_is_read_at_log_probabilities() -> None:
    chosen = torch.arange(9) > 3
    weight = told(lambda logps: -(logps * chosen).sum() / 7, name="log_probs")
    assert weight is not None and weight.tokens == 20 and weight.each == pytest.approx(1 / 7)
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0])[:, None]
    assert told(lambda logps: -functional.logsigmoid((logps * signs).sum()), name="log_probs") is None


def test_log_probabilities_explain_the_loss_they_are_of() -> None:
    targets = LABELS[:, 1:]
    logps = -functional.cross_entropy(Z[:, :-1].flatten(0, 1), targets.flatten(), reduction="none").view(4, 8)
    loss = -logps.sum() / 24
    assert shifted_log_probabilities({"log_probs": logps, "loss": loss}, LABELS) is True
    assert shifted_log_probabilities({"log_probs": logps, "loss": loss * 1.1}, LABELS) is None
    assert shifted_log_probabilities({"log_probs": logps, "loss": loss}, LABELS[:, :5]) is None
    assert shifted_log_probabilities({"loss": loss}, LABELS) is None


class TwoOutputs(torch.autograd.Function):
    """As a compiled graph that returns logits and a loss: one node, two outputs."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> tuple[Tensor, Tensor]:
        return z * 1, z.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[1].expand(2, 3)


def test_logits_that_the_loss_was_not_computed_from_tell_nothing() -> None:
    found: list[TokenWeight | None] = []
    logits, loss = TwoOutputs.apply(torch.zeros(2, 3, requires_grad=True))
    watch_tokens({"logits": logits}, found.append, shield=lambda act: act)
    loss.backward()
    assert not found
