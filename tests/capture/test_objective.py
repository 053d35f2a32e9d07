"""Gradients of sounds, pictures and feature maps: autograd's own of a loss written by hand, row for row, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anisoscope.capture.gradient_pass import GradientPass, gradient_rows, untouched
from anisoscope.capture.objective import (
    Classes,
    HiddenPatches,
    MaskedFrames,
    MaskedPatches,
    Objective,
    OwnLoss,
    PositionClasses,
    Transcripts,
    distractors,
    find_objective,
    read_loss,
)
from anisoscope.capture.row import original_contexts
from anisoscope.capture.sites.layout import find_layout
from anisoscope.capture.sites.site import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.targets import hidden_patches, hidden_spans, shuffling_noise, with_masks
from anisoscope.numerics.hashing import row_hash
from support.tiny_media import _COMMON, _patches, _speech, _whisper, mel_frames, padded_sound, sound, words

_IMAGE = {**_COMMON, "image_size": 32, "patch_size": 8, "num_labels": 5}
_CODES = {"num_codevectors_per_group": 8, "codevector_dim": 16, "proj_codevector_dim": 16, "num_negatives": 5}
_STAGES = {"hidden_sizes": [16, 24], "depths": [1, 2], "num_labels": 5}


def model_of(kind: str, config: str, **options: Any) -> Any:
    """A tiny model in float64 and evaluation mode, its parameters away from their initial values."""
    import transformers

    torch.manual_seed(sum(map(ord, kind)))
    model = getattr(transformers, kind)(getattr(transformers, config)(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.double().eval()


def pictures(number: int = 3, size: int = 32) -> dict[str, Tensor]:
    x = torch.randn(number, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return {"pixel_values": x}


def gradients(model: nn.Module, inputs: dict[str, Any], objective: Objective | None) -> GradientPass:
    layout = find_layout(model)
    wanted = ["embed", "stage" if "stage" in layout.kinds and "query" not in layout.kinds else "resid", "final", "cls"]
    sites = layout.sites([kind for kind in wanted if kind in layout.kinds])
    return gradient_rows(model, inputs, sites, layout=layout, loss=objective)


def objective_of(model: nn.Module, inputs: dict[str, Any]) -> Objective:
    with untouched(model), torch.no_grad():
        return find_objective(model, inputs)


def assert_rows(found: GradientPass, site: Site, wanted: Tensor) -> None:
    g = found.sites[site].g
    assert g is not None and g.shape == wanted.shape, (site, None if g is None else g.shape, wanted.shape)
    torch.testing.assert_close(g, wanted, rtol=1e-9, atol=1e-13, msg=lambda m: f"{site}: {m}")


def compare_states(found: GradientPass, states: Any, total: Tensor, *, real: Tensor, prefix: int = 0) -> None:
    """Rows at all blocks against the gradients of the hidden states that the model hands out."""
    states = list(states)
    grads = torch.autograd.grad(total, states, allow_unused=True)
    assert float(total.detach()) == pytest.approx(found.loss, rel=1e-9)
    seen = 0
    for layer, g in enumerate(grads):
        g = torch.zeros_like(states[layer]) if g is None else g
        rows = states[layer][:, prefix:][real]
        kinds = [kind for kind in ("embed", "resid", "final") if _is(found, Site(layer, kind), rows)]
        assert kinds, f"no site of layer {layer} has the model's own state"
        for kind in kinds:
            assert_rows(found, Site(layer, kind), g[:, prefix:][real])
        seen += 1
        if prefix and layer and "final" not in kinds:
            first = g[:, :prefix].flatten(0, 1) if found.sites[Site(layer, "cls")].x.shape[0] > len(g) else g[:, 0]
            assert_rows(found, Site(layer, "cls"), first)
    assert seen == len(states)


def _is(found: GradientPass, site: Site, rows: Tensor) -> bool:
    """Whether a site has these activations; some models hand out the last state after their final norm."""
    return site in found.sites and torch.allclose(found.sites[site].x, rows, rtol=1e-9, atol=1e-12)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Σ −log p(label), one at a time."""
    return -torch.stack([row.log_softmax(-1)[i] for row, i in zip(logits, labels.tolist(), strict=True)]).sum()


def ctc(logits: Tensor, symbols: list[int], blank: int) -> Tensor:
    """−log p(symbols) of one sound, by the forward recursion over symbols with blanks between them."""
    scores = logits.log_softmax(-1)
    path = [blank]
    for symbol in symbols:
        path += [symbol, blank]
    never = torch.full((), -1e300, dtype=logits.dtype)
    alpha = [scores[0, path[0]], scores[0, path[1]], *([never] * (len(path) - 2))]
    for row in scores[1:]:
        before, alpha = alpha, []
        for s, symbol in enumerate(path):
            ways = [before[s]] + ([before[s - 1]] if s else [])
            if s > 1 and symbol not in (blank, path[s - 2]):
                ways.append(before[s - 2])
            alpha.append(torch.stack(ways).logsumexp(0) + row[symbol])
    return -torch.stack(alpha[-2:]).logsumexp(0)


# -- speech

CTC = {
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", _speech(pad_token_id=0)),
    "hubert": ("HubertForCTC", "HubertConfig", _speech(pad_token_id=0, ctc_loss_reduction="mean")),
    "unispeech": ("UniSpeechForCTC", "UniSpeechConfig", _speech(pad_token_id=3, num_ctc_classes=20)),
    "data2vec": ("Data2VecAudioForCTC", "Data2VecAudioConfig", _speech(conv_pos_kernel_size=5, pad_token_id=1)),
}


@pytest.mark.parametrize("name", CTC)
def test_rows_of_frames_have_autograds_gradients_of_the_transcripts(name: str) -> None:
    kind, config, options = CTC[name]
    model = model_of(kind, config, **options)
    blank, transcripts = options["pad_token_id"], [[5, 7, 7, 2], [4, 9]]
    inputs: dict[str, Any] = padded_sound([clip.double() for clip in sound(400, 290)])
    inputs["labels"] = torch.tensor([[5, 7, 7, 2], [4, 9, -100, -100]])
    objective = objective_of(model, inputs)
    assert objective == Transcripts(blank) and objective.count(inputs) == 6
    found = gradients(model, inputs, objective)
    output = model(**{k: v for k, v in inputs.items() if k != "labels"}, output_hidden_states=True)
    frames = model._get_feat_extract_output_lengths(inputs["attention_mask"].sum(1)).tolist()
    total = sum(ctc(row[:n], s, blank) for row, n, s in zip(output.logits, frames, transcripts, strict=True))
    real = torch.arange(output.logits.shape[1]) < torch.tensor(frames)[:, None]
    compare_states(found, output.hidden_states, total, real=real)


def test_padded_frames_of_a_family_without_a_row_are_told_by_its_own_rule() -> None:
    sizes = {**_COMMON, "num_mel_bins": 16, "subsampling_conv_channels": 8, "conv_kernel_size": 3}
    sizes |= {"num_hidden_layers": 2, "max_position_embeddings": 64}
    model = model_of("ParakeetForCTC", "ParakeetCTCConfig", encoder_config=sizes, vocab_size=20, pad_token_id=0)
    x = torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = (torch.arange(64) < torch.tensor([64, 40])[:, None]).long()
    inputs: dict[str, Any] = {"input_features": x, "attention_mask": mask, "labels": torch.tensor([[5, 7], [4, -100]])}
    objective = objective_of(model, inputs)
    found = gradients(model, inputs, objective)
    output = model(input_features=x, attention_mask=mask, output_hidden_states=True)
    frames = [8, 5]  # three convolutions of stride 2
    total = ctc(output.logits[0, :8], [5, 7], 0) + ctc(output.logits[1, :5], [4], 0)
    real = torch.arange(8) < torch.tensor(frames)[:, None]
    compare_states(found, output.hidden_states, total, real=real)


def test_transcripts_may_be_filled_up_with_the_blank() -> None:
    """As Parakeet of transformers 5.17 wants it, which takes −100 for a symbol."""
    kind, config, options = CTC["hubert"]
    model = model_of(kind, config, **options)
    inputs: dict[str, Any] = {"input_values": torch.stack([clip.double() for clip in sound(400, 400)])}
    filled, ignored = (torch.tensor([[5, 7, 7, 2], [4, 9, fill, fill]]) for fill in (0, -100))
    with torch.no_grad():
        output = model(**inputs)
    wanted = [ctc(row, s, 0) for row, s in zip(output.logits, [[5, 7, 7, 2], [4, 9]], strict=True)]
    for labels in (filled, ignored):
        assert Transcripts(0).count({"labels": labels}) == 6
        found = Transcripts(0).losses(output.logits, {**inputs, "labels": labels}, model)
        torch.testing.assert_close(found, torch.stack(wanted))
    output.loss = (wanted[0] / 4 + wanted[1] / 2) / 2
    read = read_loss(model, output, {**inputs, "labels": filled})
    assert read.units == 6 and read.by_context is not None and read.by_context.tolist() == [8, 4]


def test_a_transcript_longer_than_its_frames_has_no_gradient_and_does_no_harm() -> None:
    kind, config, options = CTC["wav2vec2"]
    model = model_of(kind, config, **options)
    inputs: dict[str, Any] = {"input_values": torch.stack([clip.double() for clip in sound(200, 200)])}
    few = torch.tensor([[5, 7, *[-100] * 38], list(range(1, 20)) * 2 + [1, 2]])
    found = gradients(model, {**inputs, "labels": few}, Transcripts(0))
    rows = found.sites[Site(1, "resid")]
    assert rows.g is not None and bool(rows.g.isfinite().all())
    own = rows.index.context == rows.index.context[0]
    assert float(rows.g[own].abs().max()) > 0 and float(rows.g[~own].abs().max()) == 0


@pytest.mark.parametrize("name", ["Wav2Vec2", "Wav2Vec2Conformer"])
def test_masked_frames_have_autograds_gradients_of_the_contrast(name: str) -> None:
    options = _speech(**_CODES, position_embeddings_type="relative") if "Conf" in name else _speech(**_CODES)
    model = model_of(f"{name}ForPreTraining", f"{name}Config", **options)
    inputs = with_masks(model, padded_sound([clip.double() for clip in sound(1600, 1200)]))
    masked = inputs["mask_time_indices"]
    objective = objective_of(model, inputs)
    assert objective == MaskedFrames(5, 0.1) and objective.count(inputs) == int(masked.sum()) > 8
    found = gradients(model, inputs, objective)
    output = model(**inputs, output_hidden_states=True)
    codes, said = output.projected_quantized_states.flatten(0, 1), output.projected_states.flatten(0, 1)
    drawn = distractors(masked, original_contexts(inputs), number=5).flatten(0, 1)
    losses = []
    for place in masked.flatten().nonzero().squeeze(1).tolist():
        others = [i for i in drawn[place].tolist() if not torch.allclose(codes[i], codes[place])]
        options_ = codes[torch.tensor([place, *others])]
        cosines = [(said[place] @ code) / (said[place].norm() * code.norm()) for code in options_]
        losses.append(-(torch.stack(cosines) / 0.1).log_softmax(0)[0])
    total = torch.stack(losses).sum()
    own = model(**inputs, sampled_negative_indices=distractors(masked, original_contexts(inputs), number=5))
    assert float(own.contrastive_loss.detach()) == pytest.approx(float(total.detach()), rel=1e-5)
    real = model._get_feature_vector_attention_mask(masked.shape[1], inputs["attention_mask"]).bool()
    compare_states(found, output.hidden_states, total, real=real)


@pytest.mark.parametrize("name", ["Whisper", "Speech2Text"])
def test_a_decoder_and_its_encoder_have_autograds_gradients_of_the_text(name: str) -> None:
    options: dict[str, Any] = _whisper()
    if name == "Speech2Text":
        options = {**options, "input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 80}
        options |= {"num_conv_layers": 2, "conv_kernel_sizes": (5, 5)}
    model = model_of(f"{name}ForConditionalGeneration", f"{name}Config", **options)
    inputs: dict[str, Any] = {**mel_frames(80, 80), **words(2)}
    inputs["input_features"] = inputs["input_features"].double()
    if name == "Speech2Text":
        inputs["input_features"] = inputs["input_features"].transpose(1, 2)
    ids, mask = inputs["decoder_input_ids"], inputs["decoder_attention_mask"]
    inputs["labels"] = torch.cat([ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100), torch.full((2, 1), -100)], 1)
    found = gradients(model, inputs, None)
    output = model(**{k: v for k, v in inputs.items() if k != "labels"}, output_hidden_states=True)
    targets = inputs["labels"].flatten()
    kept = (targets >= 0).nonzero().squeeze(1)
    total = cross_entropy(output.logits.flatten(0, 1)[kept], targets[kept])
    assert found.tokens == len(kept) == 9 and found.loss == pytest.approx(float(total), rel=1e-6)
    stacks = {"encoder": output.encoder_hidden_states, "decoder": output.decoder_hidden_states}
    for stack, states in stacks.items():
        real = mask.bool() if stack == "decoder" else torch.ones(states[0].shape[:2], dtype=torch.bool)
        for layer, g in enumerate(torch.autograd.grad(total, states, retain_graph=True)):
            last = layer == len(states) - 1
            site = Site(layer, "embed" if layer == 0 else "final" if last else "resid", stack)
            assert_rows(found, site, g[real])


# -- pictures

CLASSIFIERS = {
    "vit": ("ViTForImageClassification", "ViTConfig", _IMAGE, 1),
    "beit": ("BeitForImageClassification", "BeitConfig", {**_IMAGE, "use_mean_pooling": True}, 1),
    "data2vec": ("Data2VecVisionForImageClassification", "Data2VecVisionConfig", _IMAGE, 1),
    "siglip": ("SiglipForImageClassification", "SiglipConfig", {"vision_config": _patches(), "num_labels": 5}, 0),
    "ijepa": ("IJepaForImageClassification", "IJepaConfig", _IMAGE, 0),
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_rows_of_patches_have_autograds_gradients_of_the_classes(name: str) -> None:
    kind, config, options, prefix = CLASSIFIERS[name]
    if name == "siglip":
        import transformers

        options = {**options, "vision_config": transformers.SiglipVisionConfig(**options["vision_config"]).to_dict()}
    model = model_of(kind, config, **options)
    inputs: dict[str, Any] = {**pictures(size=24 if name == "siglip" else 32), "labels": torch.tensor([3, 0, 4])}
    objective = objective_of(model, inputs)
    assert objective == Classes() and objective.count(inputs) == 3
    found = gradients(model, inputs, objective)
    output = model(pixel_values=inputs["pixel_values"], output_hidden_states=True)
    total = cross_entropy(output.logits, inputs["labels"])
    patches = output.hidden_states[0].shape[1] - prefix
    real = torch.ones(3, patches, dtype=torch.bool)
    compare_states(found, output.hidden_states, total, real=real, prefix=prefix)


def test_several_labels_and_numbers_have_their_own_losses() -> None:
    model = model_of("ViTForImageClassification", "ViTConfig", **_IMAGE)
    inputs: dict[str, Any] = {**pictures(), "labels": torch.rand(3, 5).round().double()}
    logits = model(pixel_values=inputs["pixel_values"]).logits
    each = nn.functional.logsigmoid(logits), nn.functional.logsigmoid(-logits)
    wanted = -(inputs["labels"] * each[0] + (1 - inputs["labels"]) * each[1]).sum()
    assert float(objective_of(model, inputs)(model, inputs)) == pytest.approx(float(wanted), rel=1e-12)
    single = model_of("ViTForImageClassification", "ViTConfig", **{**_IMAGE, "num_labels": 1})
    inputs["labels"] = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    off = single(pixel_values=inputs["pixel_values"]).logits[:, 0] - inputs["labels"]
    assert float(objective_of(single, inputs)(single, inputs)) == pytest.approx(float((off**2).sum()), rel=1e-12)


@pytest.mark.parametrize("name", ["ViT", "DeiT"])
def test_masked_patches_have_autograds_gradients_of_the_reconstruction(name: str) -> None:
    prefix, sizes = (1 if name == "ViT" else 2), {**_IMAGE, "encoder_stride": 8}
    model = model_of(f"{name}ForMaskedImageModeling", f"{name}Config", **sizes)
    inputs = with_masks(model, pictures())
    hidden = inputs["bool_masked_pos"]
    assert hidden.sum(1).tolist() == [8, 8, 8]
    objective = objective_of(model, inputs)
    assert objective == MaskedPatches("mean", "bool_masked_pos") and objective.count(inputs) == 24
    found = gradients(model, inputs, objective)
    output = model(**inputs, output_hidden_states=True)
    off = (output.reconstruction - inputs["pixel_values"]).abs()
    squares = off.unflatten(3, (4, 8)).unflatten(2, (4, 8)).sum((1, 3, 5)).flatten(1)  # of each patch
    total = squares[hidden].sum() / (64 * 3)
    real = torch.ones(3, 16, dtype=torch.bool)
    compare_states(found, output.hidden_states, total, real=real, prefix=prefix)


def test_a_masked_autoencoder_has_autograds_gradients_at_the_patches_it_sees() -> None:
    small = {f"decoder_{name}": value for name, value in _COMMON.items()} | {"decoder_num_hidden_layers": 2}
    model = model_of("ViTMAEForPreTraining", "ViTMAEConfig", **{**_IMAGE, **small})
    inputs = with_masks(model, pictures())
    objective = objective_of(model, inputs)
    assert objective == HiddenPatches("mean", share=0.75) and objective.count(inputs) == 36
    found = gradients(model, inputs, objective)
    output = model(**inputs, output_hidden_states=True)
    x = inputs["pixel_values"].unflatten(3, (4, 8)).unflatten(2, (4, 8)).permute(0, 2, 4, 3, 5, 1).flatten(3)
    off = (output.logits - x.flatten(1, 2)).square().mean(-1)
    total = off[output.mask.bool()].sum()
    assert int(output.mask.sum()) == 36
    compare_states(found, output.hidden_states, total, real=torch.ones(3, 4, dtype=torch.bool), prefix=1)


def test_codes_of_masked_patches_have_autograds_gradients() -> None:
    model = model_of("BeitForMaskedImageModeling", "BeitConfig", **{**_IMAGE, "vocab_size": 30, "use_mask_token": True})
    inputs = with_masks(model, pictures())
    codes = torch.randint(0, 30, (3, 16), generator=torch.Generator().manual_seed(2))
    hidden = inputs["bool_masked_pos"]
    inputs["labels"] = codes.where(hidden, -100)
    objective = objective_of(model, inputs)
    assert objective == PositionClasses() and objective.count(inputs) == 24
    found = gradients(model, inputs, objective)
    output = model(pixel_values=inputs["pixel_values"], bool_masked_pos=hidden, output_hidden_states=True)
    total = cross_entropy(output.logits[hidden], codes[hidden])
    compare_states(found, output.hidden_states, total, real=torch.ones(3, 16, dtype=torch.bool), prefix=1)


# -- feature maps

MAPS = {
    "resnet": ("ResNetForImageClassification", "ResNetConfig", {**_STAGES, "embedding_size": 16}),
    "convnextv2": ("ConvNextV2ForImageClassification", "ConvNextV2Config", {**_STAGES, "num_stages": 2}),
    "regnet": ("RegNetForImageClassification", "RegNetConfig", {**_STAGES, "embedding_size": 16, "groups_width": 8}),
    "poolformer": (
        "PoolFormerForImageClassification",
        "PoolFormerConfig",
        {**_STAGES, "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1]},
    ),
}


@pytest.mark.parametrize("name", MAPS)
def test_positions_of_stages_have_autograds_gradients_of_the_classes(name: str) -> None:
    kind, config, options = MAPS[name]
    model = model_of(kind, config, **options)
    inputs: dict[str, Any] = {**pictures(), "labels": torch.tensor([3, 0, 4])}
    objective = objective_of(model, inputs)
    found = gradients(model, inputs, objective)
    output = model(pixel_values=inputs["pixel_values"], output_hidden_states=True)
    total = cross_entropy(output.logits, inputs["labels"])
    assert found.loss == pytest.approx(float(total), rel=1e-12)
    stages = [site for site in found.sites if site.kind == "stage"]
    maps = output.hidden_states[-len(stages) :]
    assert len(stages) == 2
    for site, g in zip(stages, torch.autograd.grad(total, maps), strict=True):
        assert_rows(found, site, g.flatten(2).transpose(1, 2).flatten(0, 1))


_FOUR = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 2, 1, 2], "num_attention_heads": [1, 2, 2, 4], "num_labels": 5}
_SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
_NECK = {"image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 12, 16, 20, 24, 32]}
# name -> model, configuration, options, and the module whose output each site is, written down from transformers
HOOKED: dict[str, tuple[str, str, dict[str, Any], dict[Site, str]]] = {
    "pvt_v2": (
        "PvtV2ForImageClassification",
        "PvtV2Config",
        {**_FOUR, "mlp_ratios": [2, 2, 2, 2]},
        {Site(2, "resid"): "pvt_v2.encoder.layers.1.blocks.0", Site(6, "stage"): "pvt_v2.encoder.layers.3"},
    ),
    "segformer": (
        "SegformerForImageClassification",
        "SegformerConfig",
        _FOUR,
        {Site(2, "resid"): "segformer.stages.1.blocks.0", Site(6, "stage"): "segformer.stages.3"},
    ),
    "swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {**_SWIN, "num_labels": 5},
        {Site(1, "resid"): "swin.encoder.layers.0.blocks.0", Site(4, "final"): "swin.layernorm"},
    ),
    "mobilevit": (
        "MobileViTForImageClassification",
        "MobileViTConfig",
        {**_NECK, "num_labels": 5},
        {Site(3, "stage"): "mobilevit.encoder.layer.2", Site(5, "final"): "mobilevit.conv_1x1_exp"},
    ),
}


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("name", HOOKED)
def test_rows_at_hooked_modules_have_autograds_gradients(name: str, number: int) -> None:
    kind, config, options, places = HOOKED[name]
    model = model_of(kind, config, **options)
    size = 32 if name == "swin" else 64
    inputs: dict[str, Any] = {**pictures(number, size), "labels": torch.tensor([3, 0, 4][:number])}
    objective = objective_of(model, inputs)
    layout = find_layout(model)
    found = gradient_rows(model, inputs, list(places), layout=layout, loss=objective)
    kept: dict[Site, Tensor] = {}

    def keep(site: Site, output: Any) -> None:
        while not isinstance(output, Tensor):
            output = output[0]
        kept[site] = output

    handles = [
        model.get_submodule(path).register_forward_hook(lambda _, __, output, site=site: keep(site, output))
        for site, path in places.items()
    ]
    logits = model(pixel_values=inputs["pixel_values"]).logits
    for handle in handles:
        handle.remove()
    total = cross_entropy(logits, inputs["labels"])
    assert found.loss == pytest.approx(float(total.detach()), rel=1e-12)
    for site, g in zip(kept, torch.autograd.grad(total, list(kept.values())), strict=True):
        rows = g.flatten(2).transpose(1, 2) if g.dim() == 4 else g
        assert_rows(found, site, rows.flatten(0, 1))


class PlainNet(nn.Module):
    """A convolutional net of no library, whose activations are overwritten in place by what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stages = nn.ModuleList([self._stage(8, 16), self._stage(16, 24)])
        self.head = nn.Linear(24, 4)

    @staticmethod
    def _stage(narrow: int, wide: int) -> nn.Sequential:
        return nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(narrow, wide, 3, stride=2, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.relu().mean((2, 3)))


def test_a_plain_module_with_a_loss_of_the_user_has_autograds_gradients_of_values_before_they_are_overwritten() -> None:
    torch.manual_seed(0)
    model = PlainNet().double().eval()
    x = pictures(4, 16)["pixel_values"]

    def loss(net: nn.Module, inputs: Any) -> Tensor:
        return net(inputs["pixel_values"]).exp().sum()

    layout = find_layout(model)
    sites = layout.sites(["embed", "stage"])
    found = gradient_rows(model, {"pixel_values": x}, sites, layout=layout, loss=loss)
    kept = [model.stem(x)]
    for stage in model.stages:
        kept.append(stage[1](kept[-1].clamp(min=0)))
    total = model.head(kept[-1].clamp(min=0).mean((2, 3))).exp().sum()
    grads = torch.autograd.grad(total, kept)
    for site in sites:
        g = grads[site.layer]
        assert_rows(found, site, g.flatten(2).transpose(1, 2).flatten(0, 1))


def test_the_gradient_of_a_global_average_is_that_of_moving_all_its_positions_together() -> None:
    torch.manual_seed(0)
    model = PlainNet().double().eval()
    x = pictures(4, 16)["pixel_values"]
    layout = find_layout(model)
    sites = layout.sites(["stage_mean"])
    found = gradient_rows(
        model,
        {"pixel_values": x},
        sites,
        layout=layout,
        loss=lambda net, inputs: net(inputs["pixel_values"]).exp().sum(),
    )
    assert [site.layer for site in sites] == [1, 2]
    for site in sites:
        moved, h = [], model.stem(x)
        for number, stage in enumerate(model.stages, 1):
            h = stage[1](h.clamp(min=0))
            if number == site.layer:
                moved.append(torch.zeros(len(x), h.shape[1], 1, 1, dtype=torch.float64, requires_grad=True))
                h = h + moved[0]  # the average moves by as much, and the network goes on from the positions
        total = model.head(h.clamp(min=0).mean((2, 3))).exp().sum()
        (g,) = torch.autograd.grad(total, moved)
        assert_rows(found, site, g.flatten(1))


# -- sums do not depend on the batch

BATCHES = ["ViTForImageClassification", "ViTForMaskedImageModeling", "Wav2Vec2ForCTC", "Wav2Vec2ForPreTraining"]


@pytest.mark.parametrize("kind", BATCHES)
def test_gradients_do_not_depend_on_the_batch(kind: str) -> None:
    if "ViT" in kind:
        model = model_of(kind, "ViTConfig", **_IMAGE, encoder_stride=8)
        inputs: dict[str, Any] = pictures(4)
    else:
        model = model_of(kind, "Wav2Vec2Config", **_speech(**_CODES, pad_token_id=0))
        inputs = {"input_values": torch.stack([clip.double() for clip in sound(*[1600] * 4)])}
    inputs = with_masks(model, inputs)
    if "Image" in kind and "Class" in kind:
        inputs["labels"] = torch.tensor([0, 1, 2, 3])
    if "CTC" in kind:
        inputs["labels"] = torch.tensor([[1, 2, 3], [4, -100, -100], [5, 6, -100], [7, 8, 9]])
    objective = objective_of(model, inputs)
    whole = gradients(model, inputs, objective)
    parts = [
        gradients(model, part, objective)
        for part in ({name: value[at : at + 2] for name, value in inputs.items()} for at in (0, 2))
    ]
    assert whole.loss == pytest.approx(sum(part.loss for part in parts), rel=1e-9)
    assert whole.tokens == sum(part.tokens for part in parts) > 0
    for site, rows in whole.sites.items():
        joined = [part.sites[site].g for part in parts]
        assert rows.g is not None and None not in joined
        torch.testing.assert_close(rows.g, torch.cat(joined), rtol=1e-9, atol=1e-12)


def test_a_mask_is_a_function_of_the_content_alone() -> None:
    x = pictures(4)
    hidden, noise = hidden_patches(x, 16, share=0.25), shuffling_noise(x, 16)
    turned = {"pixel_values": x["pixel_values"].flip(0)}
    assert torch.equal(hidden_patches(turned, 16, share=0.25), hidden.flip(0)) and hidden.sum(1).tolist() == [4] * 4
    assert torch.equal(shuffling_noise(turned, 16), noise.flip(0)) and 0 <= float(noise.min()) < float(noise.max()) < 1
    assert not torch.equal(hidden[0], hidden[1])
    clips = padded_sound(sound(4000, 3000))
    real = torch.arange(40) < torch.tensor([40, 30])[:, None]
    spans = hidden_spans(clips, real, span=5)
    assert not bool((spans & ~real).any()) and 0.2 < float(spans.sum() / real.sum()) < 0.8
    alone = {"input_values": clips["input_values"][1:, :3000], "attention_mask": torch.ones(1, 3000)}
    assert torch.equal(hidden_spans(alone, real[1:, :30], span=5)[0], spans[1, :30])


# -- the loss that a model returns


class Returns(nn.Module):
    """A user's module that returns a loss by itself."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.conv, self.reduction = nn.Conv2d(3, 4, 3), reduction

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        each = self.conv(pixel_values).square().mean((1, 2, 3))
        loss = {"mean": each.mean(), "sum": each.sum(), "alone": each.logsumexp(0)}[self.reduction]
        return {"loss": loss}


@pytest.mark.parametrize("reduction", ["mean", "sum", "alone"])
def test_a_returned_loss_is_summed_over_contexts_however_it_is_reduced(reduction: str) -> None:
    torch.manual_seed(0)
    model, inputs = Returns(reduction).double(), pictures(4)
    objective = objective_of(model, inputs)
    assert objective == OwnLoss(reduction) and objective.count(inputs) == 4
    each = [float(model(x[None])["loss"]) for x in inputs["pixel_values"]]
    assert float(objective(model, inputs)) == pytest.approx(sum(each), rel=1e-9)


def test_a_model_without_loss_and_labels_is_refused_in_a_sentence() -> None:
    model = model_of("ViTModel", "ViTConfig", **_IMAGE)
    with pytest.raises(AnisoscopeError, match="ViTModel returned no loss for its batch; add what it predicts"):
        objective_of(model, pictures())


def test_padding_that_a_model_does_not_count_is_refused() -> None:
    logits = torch.zeros(2, 10, 5)
    with pytest.raises(AnisoscopeError, match="does not tell how many of its 10 frames"):
        Transcripts(0).losses(
            logits,
            {"labels": torch.ones(2, 2).long(), "attention_mask": torch.tensor([[1, 1], [1, 0]])},
            nn.Linear(1, 1),
        )


def distractors_one_by_one(masked: Tensor, contexts: Tensor, *, number: int) -> Tensor:
    """The slow twin of `distractors`: one masked frame after the other."""
    length = masked.shape[1]
    drawn = (torch.arange(len(masked)) * length)[:, None, None].repeat(1, length, number)
    for b, (hidden, key) in enumerate(zip(masked, contexts, strict=True)):
        places = hidden.nonzero().squeeze(1)
        for rank, place in enumerate(places.tolist() if len(places) > 1 else []):
            for n in range(number):
                hashed = int(row_hash(key, torch.tensor(rank * number + n), seed=1)) >> 2 & ((1 << 61) - 1)
                drawn[b, place, n] += places[(rank + 1 + hashed % (len(places) - 1)) % len(places)]
    return drawn


def test_distractors_of_a_batch_are_those_of_its_frames_one_by_one() -> None:
    draws = torch.Generator().manual_seed(0)
    for share in (0.03, 0.5, 1.0):  # some contexts have no masked frame, or a single one
        masked = torch.rand(9, 17, generator=draws) < share
        contexts = torch.randint(-(2**62), 2**62, (9,), generator=draws)
        found = distractors(masked, contexts, number=4)
        assert torch.equal(found, distractors_one_by_one(masked, contexts, number=4))
        for b, hidden in enumerate(masked):
            places = hidden.nonzero().squeeze(1)
            own = found[b, places] - 17 * b
            assert len(places) < 2 or bool(hidden[own].all() and (own != places[:, None]).all())
