"""Tokens among patches: found in image models that no row names, checked in a pass, and told where they are unknown."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anisoscope import measure
from anisoscope.capture import Batch, Capture, find_layout
from anisoscope.capture.sites.layout import SpecialPositions, named_tokens, settle
from anisoscope.capture.verification import verify
from anisoscope.errors import AnisoscopeError
from anisoscope.results.modality import APART, VISION, row_words
from support.tiny_media import IMAGES, PREFIX, UNNAMED, media, media_inputs
from support.tiny_models import Record, captured

PATCHES = 9  # of every tiny model
WITH = sorted(name for name, row in UNNAMED.items() if sum(row[3]))
WITHOUT = sorted(set(UNNAMED) - set(WITH))


def _brute(x: Tensor) -> dict[str, float]:
    """Average cosine and drift of rows in float64, pair by pair."""
    x = x.double()
    unit = x / x.norm(dim=1, keepdim=True)
    pairs = [float(unit[i] @ unit[j]) for i in range(len(x)) for j in range(i)]
    return {"average_cosine": sum(pairs) / len(pairs), "drift": float(x.mean(0).norm())}


def _hidden(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    with torch.inference_mode():
        return list(model(**batch, output_hidden_states=True).hidden_states)


# families without a row


@pytest.mark.parametrize("name", sorted(UNNAMED))
def test_only_patches_are_rows_and_the_class_token_is_apart(name: str) -> None:
    model, batch = media(name), media_inputs(name)
    layout, (before, after) = find_layout(model), UNNAMED[name][3]
    assert (layout.stacks[0].prefix, layout.stacks[0].suffix) == (before, after)
    kinds = ["embed", "resid", *(["cls"] if before else [])]
    record = captured(model, batch, layout.sites(kinds))
    for layer, whole in enumerate(_hidden(model, batch)[:-1]):
        assert whole.shape[1] == before + PATCHES + after
        rows = record.at(f"{layer}.{'resid' if layer else 'embed'}")
        torch.testing.assert_close(rows.x, whole[:, before : before + PATCHES].flatten(0, 1), atol=1e-5, rtol=1e-5)
        assert rows.index.position.max() == PATCHES - 1
        if before:
            torch.testing.assert_close(record.at(f"{layer}.cls").x, whole[:, 0], atol=1e-5, rtol=1e-5)
    verify(model, layout, batch)


@pytest.mark.parametrize("name", ["dinov3", "vit-msn", "yolos", "dpt"])
def test_statistics_are_those_of_the_patches_alone(name: str) -> None:
    model, batch = media(name), media_inputs(name)
    (before, _), whole = UNNAMED[name][3], _hidden(model, batch)[1]
    table = measure(model, [batch], metrics=["average_cosine", "drift"], sites=["resid"], layers=[1])
    values = {r["metric"]: (r["value"], r["n"]) for r in table.records()}
    expected = _brute(whole[:, before : before + PATCHES].flatten(0, 1))
    for metric, value in expected.items():
        assert values[metric] == (pytest.approx(value, abs=1e-5), 3 * PATCHES)
    everything = _brute(whole.flatten(0, 1))  # so that the law is not empty
    assert all(abs(everything[metric] - value) > 1e-3 * abs(value) for metric, value in expected.items())


@pytest.mark.parametrize("name", WITH)
def test_queries_of_tokens_are_left_out_and_their_keys_stay(name: str) -> None:
    model, (before, after) = media(name), UNNAMED[name][3]
    record = captured(model, media_inputs(name), find_layout(model).sites(["query", "scores"]))
    for call in record.calls:
        places = call.index.keep % call.index.length
        assert (int(places.min()), int(places.max())) == (before, before + PATCHES - 1)
        assert call.key.shape[2] == before + PATCHES + after
    assert len(record.at("1.query").x) == 3 * PATCHES


@pytest.mark.parametrize("name", IMAGES)
def test_the_rule_gives_what_the_table_says(name: str) -> None:
    model = media(name)
    found = named_tokens(model, find_layout(model).stacks[0].owner)
    assert found is not None
    assert (found.before, found.after) == (PREFIX[name], 0)


@pytest.mark.parametrize("name", ["bert", "wav2vec2"])
def test_models_that_read_no_images_have_no_such_tokens(name: str) -> None:
    from support.tiny_models import tiny

    model = tiny(name) if name == "bert" else media(name)
    assert named_tokens(model, "") is None
    assert find_layout(model).stacks[0].tokens is None


def test_the_query_of_a_pooling_is_no_position() -> None:
    model = media("aimv2")
    assert any(path.endswith("cls_token") for path, _ in model.named_parameters())  # of its head
    assert find_layout(model).stacks[0].tokens == SpecialPositions()


def test_padded_pixels_are_no_patches_beside_tokens_at_both_ends() -> None:
    model, batch = media("yolos"), media_inputs("yolos")
    mask = torch.ones(3, 24, 24)
    mask[1, :, 16:] = 0
    rows = captured(model, {**batch, "pixel_mask": mask}, find_layout(model).sites(["resid"])).at("1.resid")
    length, kept = 1 + PATCHES + 5, [i for i in range(PATCHES) if i % 3 < 2]
    expected = [*range(1, 10), *(length + 1 + i for i in kept), *range(2 * length + 1, 2 * length + 10)]
    assert rows.index.keep.tolist() == expected


# modules of one's own


class Seeing(nn.Module):
    """Patches, tokens before or after them, and blocks; each token under a name or none."""

    def __init__(self, *, before: dict[str, int] | None = None, after: dict[str, int] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.before, self.after = before or {}, after or {}
        for name, count in (self.before | self.after).items():
            self.register_parameter(name, nn.Parameter(torch.randn(1, count, 16)))
        layer = {"dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, **layer) for _ in range(2))

    def positions(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT
        tokens = [[getattr(self, name).expand(len(x), -1, -1) for name in side] for side in (self.before, self.after)]
        return torch.cat([*tokens[0], x, *tokens[1]], dim=1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.positions(images)
        for block in self.blocks:
            x = block(x)
        return x


def _pixels(count: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 24, 24, generator=torch.Generator().manual_seed(seed))


def _looked(model: nn.Module, *batches: Tensor) -> tuple[Record, Capture]:
    record, layout = Record(), find_layout(model)
    kinds = [kind for kind in ("embed", "resid", "cls") if kind in layout.kinds]
    with Capture(model, layout.sites(kinds), record) as capture:
        for batch in batches:
            capture.run(batch)
    return record, capture


def test_a_plain_module_with_named_tokens_has_them_apart() -> None:
    model = Seeing(before={"class_token": 1, "reg_token": 2}).eval()
    record, capture = _looked(model, _pixels())
    torch.testing.assert_close(record.at("0.embed").x, model.positions(_pixels())[:, 3:].flatten(0, 1).detach())
    torch.testing.assert_close(record.at("0.cls").x, model.class_token[0].expand(3, -1).detach())
    assert (capture.notes, capture.counted) == ([], set())


def test_a_class_token_after_the_patches_is_found_there() -> None:
    model = Seeing(after={"class_embedding": 1}).eval()
    record, capture = _looked(model, _pixels(), _pixels(1, seed=1))  # one image alone cannot show it
    whole = [model.positions(x).detach() for x in (_pixels(), _pixels(1, seed=1))]
    for rows, expected in zip([rows for rows in record.all if str(rows.site) == "0.embed"], whole, strict=True):
        torch.testing.assert_close(rows.x, expected[:, :PATCHES].flatten(0, 1))
    token = model.class_embedding[0].detach()
    assert all(torch.equal(rows.x, token.expand(len(rows.x), -1)) for rows in record.all if str(rows.site) == "0.cls")
    assert not capture.notes


def test_positions_that_nothing_explains_are_counted_and_told() -> None:
    model = Seeing(before={"prompts": 2}).eval()
    record, capture = _looked(model, _pixels(), _pixels(2))
    assert [len(rows.x) for rows in record.all if str(rows.site) == "1.resid"] == [3 * 11, 2 * 11]
    (note,) = capture.notes
    assert "reads 11 positions where the image has 9 patches, and no parameter says" in note
    assert capture.counted == {"single"}


def test_named_tokens_that_do_not_explain_the_positions_are_not_taken_apart() -> None:
    model = Seeing(before={"cls_token": 1, "prompts": 2}).eval()
    record, capture = _looked(model, _pixels())
    assert len(record.at("1.resid").x) == 3 * (PATCHES + 3)
    assert not any(rows.site.kind == "cls" for rows in record.all)
    (note,) = capture.notes
    assert "12 positions where the image has 9 patches, which its 1 tokens (cls_token) do not explain" in note
    assert capture.counted == {"single"}


def test_a_token_at_no_position_takes_no_patch_away() -> None:
    model = Seeing().eval()
    model.register_parameter("cls_token", nn.Parameter(torch.randn(1, 1, 16)))
    record, capture = _looked(model, _pixels())
    assert len(record.at("1.resid").x) == 3 * PATCHES
    assert capture.notes == ["cls_token is at no position of the first block: all positions are patches"]


def test_positions_that_come_in_later_are_told() -> None:
    class Asking(nn.TransformerEncoderLayer):
        def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(torch.cat([src.new_zeros(len(src), 2, 16), src], 1))

    model = Seeing(before={"cls_token": 1}).eval()
    model.blocks = nn.ModuleList(Asking(16, 2, 32, 0.0, batch_first=True).eval() for _ in range(2))
    record, capture = _looked(model, _pixels())
    assert any("from layer 2 on the blocks read 2 positions more than before" in note for note in capture.notes)
    assert len(record.at("0.embed").x) == 3 * PATCHES
    assert len(record.at("2.resid").x) == 3 * (PATCHES + 1 + 2 * 2)


def test_settling_knows_merged_patches_from_tokens() -> None:
    x = torch.randn(2, 4, 8)
    assert settle(SpecialPositions(), x, [16]) == (SpecialPositions(), "")  # fewer positions than patches: merged
    assert settle(SpecialPositions(1, 0, ("cls_token",)), x, [3]) == (SpecialPositions(1, 0, ("cls_token",)), "")
    assert settle(SpecialPositions(1, 0, ("cls_token",)), x, []) == (
        SpecialPositions(1, 0, ("cls_token",)),
        "",
    )  # nothing to check by
    assert settle(SpecialPositions(1, 0, ("cls_token",)), x, [16])[1]


# words


def test_rows_are_said_to_be_apart_only_where_tokens_are() -> None:
    assert row_words({"single": "vision"}, find_layout(media("dinov3")).apart) == {"single": VISION.row + APART}
    for name in WITHOUT:
        assert row_words({"single": "vision"}, find_layout(media(name)).apart) == {"single": "one patch of an image"}
    layout = find_layout(media("vit"))
    assert row_words({"single": "vision"}, layout.apart)["single"].endswith(APART)
    bare = replace(layout, stacks=(replace(layout.stacks[0], prefix=0),))
    assert row_words({"single": "vision"}, bare.apart) == row_words({"single": "vision"}) == {"single": VISION.row}


def test_a_run_does_not_say_apart_where_everything_was_counted() -> None:
    from anisoscope.measurement.inspection import _shapes

    said = {}
    for name, tokens in (("explained", {"cls_token": 1}), ("unexplained", {"cls_token": 1, "prompts": 2})):
        model = Seeing(before=tokens).eval()
        layout = find_layout(model)
        entry: dict[str, Any] = {
            "modality": {"single": "vision"},
            "rows": row_words({"single": "vision"}, layout.apart),
        }
        setup: Any = SimpleNamespace(layout=layout, captured=layout.sites(["resid"]))
        _shapes(SimpleNamespace(model=model), setup, Batch({"": _pixels()}), entry)  # type: ignore[arg-type]
        said[name] = entry["rows"]["single"]
    assert said == {"explained": VISION.row + APART, "unexplained": VISION.row}


class Blocks(nn.Module):
    """A transformer with its blocks in a list or, as torchtitan has them, in a dict, beside heads in a dict."""

    def __init__(self, *, named: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 16)
        blocks = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3)]
        self.layers = (
            nn.ModuleDict({str(i): block for i, block in enumerate(blocks)}) if named else nn.ModuleList(blocks)
        )
        self.heads = nn.ModuleDict({name: nn.Sequential(nn.Linear(16, 4), nn.Tanh()) for name in ("one", "other")})

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            x = block(x)
        return torch.cat([head(x) for head in self.heads.values()], dim=-1)


def test_blocks_in_a_dict_are_those_of_a_list() -> None:
    ids = torch.arange(60).view(6, 10) % 20
    (found, _), (expected, _) = (_looked(Blocks(named=named), ids) for named in (True, False))
    assert [str(rows.site) for rows in found.all] == [str(rows.site) for rows in expected.all] and len(found.all) == 4
    assert all(torch.equal(rows.x, other.x) for rows, other in zip(found.all, expected.all, strict=True))


def test_heads_in_a_dict_are_no_blocks() -> None:
    model = nn.Module()
    model.heads = nn.ModuleDict({"one": nn.Linear(4, 4), "other": nn.Linear(4, 4)})
    with pytest.raises(AnisoscopeError, match="no block lists"):
        find_layout(model)
