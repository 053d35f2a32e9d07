"""Plain modules that read images: their stages are found by construction, or the module is refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anisoscope import measure
from anisoscope.capture import Capture, find_layout
from anisoscope.capture.row import channels_last
from anisoscope.capture.sites.block import Place
from anisoscope.capture.verification import verify
from anisoscope.errors import AnisoscopeError
from support.plain_images import Attending, Grouped, Mixed, Nested, Numbered, Scattered, Windowed, chain, inverted
from support.tiny_images import images
from support.tiny_models import Record


def _captured(model: nn.Module, batch: Any, kinds: list[str]) -> Record:
    record = Record()
    with Capture(model, find_layout(model).sites(kinds), record) as capture:
        capture.run(batch)
    return record


def _rows(state: Tensor) -> Tensor:
    """A map with channels first as rows."""
    return state.flatten(2).transpose(1, 2).flatten(0, 1)


def test_numbered_layers_are_stages_and_their_blocks_layers() -> None:
    model = Numbered().eval()
    stack = find_layout(model).stacks[0]
    assert stack.blocks == ("layer1.0", "layer1.1", "layer2.0", "layer3.0", "layer3.1", "layer4.0")
    assert {layer: place.path for (layer, kind), place in stack.fixed.items() if kind == "stage"} == {
        2: "layer1", 3: "layer2", 5: "layer3", 6: "layer4"}  # fmt: skip
    assert not stack.has_norm
    record, x = _captured(model, images(), ["embed", "stage"]), images()
    with torch.inference_mode():
        x = model.relu(model.conv1(x))
        torch.testing.assert_close(record.at("0.embed").x, _rows(x))
        for layer, part in ((2, model.layer1), (3, model.layer2), (5, model.layer3), (6, model.layer4)):
            x = part(x)
            torch.testing.assert_close(record.at(f"{layer}.stage").x, _rows(x))
    assert any("rest on their names" in note for note in verify(model, find_layout(model), {"": images()}))


def test_a_flat_list_of_blocks_is_cut_where_channels_or_resolution_change() -> None:
    stack = find_layout(inverted()).stacks[0]
    assert stack.blocks == tuple(f"features.{i}" for i in range(1, 6))
    assert sorted(layer for layer, kind in stack.fixed if kind == "stage") == [1, 3, 5]
    assert (stack.final, stack.has_norm) == (Place("features.6", "out"), True)


def test_a_chain_of_convolutions_is_cut_where_it_pools() -> None:
    model = chain().eval()
    stack = find_layout(model).stacks[0]
    assert stack.blocks == ("3", "7", "9", "12")  # what ends each convolution, its activation or norm
    assert sorted(layer for layer, kind in stack.fixed if kind == "stage") == [1, 3, 4]
    record = _captured(model, images(), ["embed", "stage"])
    for site, end in (("0.embed", 2), ("1.stage", 4), ("3.stage", 10), ("4.stage", 13)):
        torch.testing.assert_close(record.at(site).x, _rows(model[:end](images()).detach()))


@pytest.mark.parametrize("make", [Nested, Grouped])
def test_stages_in_lists_are_found(make: Any) -> None:
    model = make().eval()
    stack = find_layout(model).stacks[0]
    assert sorted(layer for layer, kind in stack.fixed if kind == "stage") == [2, 4, 6]
    record, maps = _captured(model, images(), ["stage"]), model.maps(images())
    for layer, theirs in zip((2, 4, 6), maps, strict=True):
        torch.testing.assert_close(record.at(f"{layer}.stage").x, _rows(theirs.detach()))


def test_a_head_of_convolutions_is_final_at_what_the_pooling_reads() -> None:
    model = Nested().eval()
    with torch.inference_mode():
        head = model.norm(model.maps(images())[-1]).relu()
    torch.testing.assert_close(_captured(model, images(), ["final"]).at("6.final").x, _rows(head))


def test_maps_with_channels_last_are_read_as_such() -> None:
    model = Windowed().eval()  # 8 channels on 8×8 positions, then 16 on 4×4
    record, maps = _captured(model, images(size=(32, 32)), ["stage"]), model.maps(images(size=(32, 32)))
    for rows, theirs in zip(record.all, maps, strict=True):
        torch.testing.assert_close(rows.x, theirs.detach().flatten(0, 2))
    square = nn.Conv2d(3, 8, 4, 4), nn.Linear(3, 8)
    assert [channels_last(part, torch.Size([2, 8, 8, 8])) for part in square] == [False, True]
    assert channels_last(nn.Sequential(nn.Conv2d(3, 6, 1), nn.LayerNorm(6)), torch.Size([2, 8, 8, 6]))
    named = Record()
    with Capture(model, [], named, modules=["stem", "stages.0"]) as capture:
        capture.run(images(size=(32, 32)))
    torch.testing.assert_close(named.at("1.stages.0").x, maps[0].detach().flatten(0, 2))
    torch.testing.assert_close(named.at("0.stem").x, _rows(model.stem(images(size=(32, 32))).detach()))


def test_blocks_of_attention_behind_a_convolution_are_no_stages() -> None:
    stack = find_layout(Attending()).stacks[0]
    assert stack.blocks == ("blocks.0", "blocks.1", "blocks.2")
    assert not stack.staged
    assert find_layout(Mixed()).stacks[0].staged  # the same beside more convolutions


def test_a_module_without_stages_is_refused_with_what_to_do() -> None:
    with pytest.raises(AnisoscopeError, match=r"no stages; .* name what to look at with modules=\[…\]"):
        find_layout(Scattered())
    with pytest.raises(AnisoscopeError, match=r"modules=\[…\]"):
        measure(Scattered(), [images()], metrics=["drift"])
    table = measure(Scattered(), [images()], metrics=["drift"], modules=["first", "second"])
    assert set(table.to_pandas()["kind"]) == {"first", "second"}
