"""Modules of no library: nested tensors, feature maps, and what has no forward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import anisoscope
from anisoscope.errors import AnisoscopeError


class Encoder(nn.Module):
    """An encoder of PyTorch's own parts, which turns a padded batch into nested tensors in evaluation mode."""

    def __init__(self, *, nested: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        out: Tensor = self.encoder(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        return out


def padded() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(4):
        ids = torch.randint(1, 50, (8, 12), generator=generator)
        mask = torch.ones_like(ids)
        mask[:4, 8:] = 0
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches


@pytest.mark.parametrize("modules", [None, ["encoder.layers.*"]])
def test_a_padded_encoder_of_nested_tensors_is_measured_as_the_same_one_without(modules: list[str] | None) -> None:
    found = []
    for nested in (True, False):
        model = Encoder(nested=nested).eval()
        table = anisoscope.measure(model, padded(), metrics="average_cosine", modules=modules)
        assert model.encoder.use_nested_tensor is nested, "restored after every pass"
        found.append([row["value"] for row in table.records()])
    assert found[0] and found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("model", [nn.Module(), nn.ModuleList([nn.Linear(3, 3)])])
@pytest.mark.parametrize("modules", [None, ["*"]])
def test_a_module_without_a_forward_is_refused_in_a_sentence(model: nn.Module, modules: list[str] | None) -> None:
    with pytest.raises(AnisoscopeError, match="has no forward, so nothing can be run through it"):
        anisoscope.measure(model, [torch.zeros(2, 3)], modules=modules)


def test_errors_tell_a_user_to_name_modules_not_to_edit_this_package() -> None:
    with pytest.raises(AnisoscopeError, match=r"modules=") as told:
        anisoscope.measure(nn.Sequential(nn.Linear(3, 3)), [torch.zeros(2, 3)])
    assert "family.py" not in str(told.value)


def test_positions_of_a_feature_map_have_no_first_among_them() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    pictures = torch.randn(16, 3, 6, 6)
    pictures[:, :, 0, 0] = 100.0  # a corner that would be an outlier
    table = anisoscope.measure(net, list(pictures.split(4)), modules=["2"], metrics="average_cosine,mean_norm")
    assert {row["variant"] for row in table.records()} == {""}
    assert not any("first" in row["note"] for row in table.records())
    assert not any("first" in note for note in table.about["models"][0]["notes"])
    left = anisoscope.measure(net, list(pictures.split(4)), modules=["2"], metrics="mean_norm", first="out")
    assert left.value(metric="mean_norm") == table.value(metric="mean_norm")
