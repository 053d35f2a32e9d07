"""Language models with losses, and batches for them, that the tests of gradients share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.gradient_pass import IGNORED, GradientPass, LabelConvention, gradient_rows
from anisoscope.capture.sites.layout import find_layout
from anisoscope.capture.step_capture import LiveGradients, MicroBatch
from support.tiny_models import FAMILIES, _config, contexts, padded, tiny

MASK = 5
CAUSAL = ["gpt2", "llama", "gpt_neox"]


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    """Σ −log p(target), one target at a time."""
    logs = logits.log_softmax(-1)
    kept = (targets != IGNORED).nonzero()
    return -torch.stack([logs[b, t, targets[b, t]] for b, t in kept.tolist()]).sum()


def exact_loss(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """The mean cross-entropy of a causal model without the detour over float32 that transformers takes."""
    targets = LabelConvention(True).targets(labels)
    number = options.get("num_items_in_batch")
    count = (targets != IGNORED).sum() if number is None else number
    found = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return found / count


def language_model(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    import transformers

    if name == "modernbert-masked":
        config_class, options, _ = FAMILIES["modernbert"]
        torch.manual_seed(0)
        model: Any = transformers.ModernBertForMaskedLM(_config(config_class, **options))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model = model.to(dtype).eval()
    else:
        model = tiny(name, dtype=dtype)
    if name in CAUSAL and dtype == torch.float64:
        model.loss_function = exact_loss
    return model


def batch_of(name: str, *lengths: int, side: str = "right", seed: int = 0) -> dict[str, Tensor]:
    """A padded batch with the labels that the model's own training would have."""
    batch = padded(contexts(*lengths, seed=seed), side=side)
    ids, real = batch["input_ids"], batch["attention_mask"].bool()
    if name in CAUSAL:
        return {**batch, "labels": ids.masked_fill(~real, IGNORED)}
    hidden = real & (torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.4)
    hidden[:, :2] |= real[:, :2]
    return {**batch, "input_ids": ids.masked_fill(hidden, MASK), "labels": ids.masked_fill(~hidden, IGNORED)}


def captured(name: str, model: nn.Module, batch: dict[str, Tensor], **options: Any) -> GradientPass:
    layout = find_layout(model)
    return gradient_rows(
        model, batch, layout.sites(), layout=layout, reading=LabelConvention(name in CAUSAL), **options
    )


def by_name(found: GradientPass) -> dict[str, Tensor]:
    return {str(site): rows.g for site, rows in found.sites.items() if rows.g is not None}


def keyed(found: list[GradientPass], factors: list[float] | None = None) -> dict[str, dict[tuple[int, int], Tensor]]:
    """Gradients by site, context and position, whatever the order they came in."""
    out: dict[str, dict[tuple[int, int], Tensor]] = {}
    for i, part in enumerate(found):
        for site, rows in part.sites.items():
            assert rows.g is not None
            keys = zip(rows.index.context.tolist(), rows.index.position.tolist(), strict=True)
            factor = 1.0 if factors is None else factors[i]
            out.setdefault(str(site), {}).update(dict(zip(keys, rows.g * factor, strict=True)))
    return out


def assert_same(one: Any, two: Any, tolerance: float = 1e-9) -> None:
    assert one.keys() == two.keys()
    for site in one:
        assert one[site].keys() == two[site].keys()
        a = torch.stack([one[site][k] for k in sorted(one[site])]).double()
        b = torch.stack([two[site][k] for k in sorted(one[site])]).double()
        assert float((a - b).norm() / b.norm()) < tolerance, site


def live_batches(
    model: nn.Module,
    batches: list[dict[str, Tensor]],
    backward: Callable[[Any], None],
    *,
    compiled: Callable[[nn.Module], Any] = lambda m: m,
) -> list[MicroBatch]:
    layout = find_layout(model)
    with LiveGradients(model, layout.sites(), layout=layout) as live:
        called = compiled(model)
        live.begin()
        for batch in batches:
            backward(called(**batch))
        found = live.end()
    model.zero_grad()
    return found


def hooks_of(model: nn.Module) -> int:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, name)) for module in model.modules() for name in names)


def parts(batch: dict[str, Tensor], number: int) -> list[dict[str, Tensor]]:
    return [dict(zip(batch, values, strict=True)) for values in zip(*(v.chunk(number) for v in batch.values()))]


def in_place_loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
