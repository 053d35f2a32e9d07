"""Run the performance study on real weights: one run folder for each model, which `results.py join` makes one result.

    python tools/real_performance.py runs/performance --archives downloads --enwik8 enwik8.gz [--only IgLM,RXNMapper]

Models are those of `real_models.py` that have the head of a language model; sizes were chosen by the time that a run
takes. English is asked the tasks of the study. Reactions have the type that chemists gave them, antibodies the germline
gene of their variable part: equally many texts of each class.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import real_inputs as inputs
from real_inputs import Places
from real_models import MODELS, _environment, _inside, done

EACH = 40  # labelled texts of a class
GENES = 8  # the most frequent ones
LONGEST = 160  # letters of a reaction, so that none is cut
TOLD = "[HEAVY][HUMAN]{}[SEP]"


@dataclass(frozen=True)
class Asked:
    """What a model is asked: the file of labels, or "" for the tasks of the study, and the words of the command."""

    labels: str
    words: str


CHOSEN = {
    "SmolLM2-135M": Asked("", "--tokens 6144 --context 128 --layers 0,6,12,18,24,30 --batch-size 8"),
    "IgLM": Asked("told-genes", "--tokens 16384 --context 160"),
    "IgLM-S": Asked("told-genes", "--tokens 16384 --context 160"),
    "RXNFP-1-pretrained": Asked("types", "--tokens 32768 --context 192"),
    "RXNMapper": Asked("types", "--tokens 32768 --context 192"),
    "AntiBERTy": Asked("genes", "--tokens 16384 --context 160"),
}
ROWS = "4096"


def balanced(pairs: Iterable[tuple[str, str]], classes: Iterable[str]) -> list[dict[str, str]]:
    """Equally many texts of each class, spread over the list."""
    found: dict[str, list[str]] = {name: [] for name in classes}
    for text, label in dict(pairs).items():
        if label in found:
            found[label].append(text)
    each = {label: texts[:: max(1, len(texts) // EACH)][:EACH] for label, texts in found.items()}
    return [{"text": text, "label": label} for label, texts in each.items() for text in texts]


def types(places: Places) -> list[dict[str, str]]:
    """Reactions of USPTO-50k with their type."""
    with places.archive("synrbl-1.0.6.tar.gz") as archive:
        member = archive.extractfile("synrbl-1.0.6/Data/Raw_data/USPTO/USPTO_50K.csv")
        rows = list(csv.DictReader(io.TextIOWrapper(member, encoding="utf-8")))  # type: ignore[arg-type]
    short = [(row["reactions"], row["class"]) for row in rows if len(row["reactions"]) <= LONGEST]
    return balanced(short, sorted({label for _, label in short}, key=int))


def genes(places: Places, form: str = "{}") -> list[dict[str, str]]:
    """Human heavy chains with the germline gene of their variable part."""
    import pyarrow.parquet as pq

    with places.archive("clonify_antibody-0.1.0.tar.gz") as archive:
        member = archive.extractfile("clonify_antibody-0.1.0/tests/test_data/lc_coherence_test-25k-heavies.parquet")
        table = pq.read_table(io.BytesIO(member.read()), columns=["sequence_aa", "v_gene"])  # type: ignore[union-attr]
    whole = [(a, gene) for a, gene in zip(*(c.to_pylist() for c in table.columns), strict=True) if a and a.isalpha()]
    chosen = [gene for gene, _ in Counter(gene for _, gene in whole).most_common(GENES)]
    return balanced(((form.format(text), gene) for text, gene in whole), chosen)


LABELS: dict[str, Any] = {"types": types, "genes": genes, "told-genes": lambda places: genes(places, TOLD)}


def command(name: str, places: Places) -> list[str]:
    """The words of the study of one model, whose inputs are made first."""
    model, asked = next(model for model in MODELS if model.name == name), CHOSEN[name]
    path, data, more = model.make(model, places)
    said = ["study", "performance", _inside(path, places), "--data", _inside(data, places), *more]
    if asked.labels:
        file = places.out / "data" / f"{asked.labels}.jsonl"
        lines = [json.dumps(record) for record in LABELS[asked.labels](places)]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        said += ["--labels", _inside(file, places)]
    return [*said, *asked.words.split(), "--rows", ROWS, "--device", "cpu", "--out", f"arms/{name}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--archives", type=Path)
    parser.add_argument("--enwik8", type=Path)
    parser.add_argument("--only", default=",".join(CHOSEN))
    given = parser.parse_args()
    archives, enwik8 = (path and path.absolute() for path in (given.archives, given.enwik8))
    places = Places(given.out.absolute(), archives, None)
    for folder in ("models", "data", "arms"):
        (places.out / folder).mkdir(parents=True, exist_ok=True)
    if enwik8 is not None:
        inputs.english(enwik8, places)
    for name in given.only.split(","):
        if not done(places.out / "arms" / name):
            words = command(name, places)
            words += ["--resume"] if (places.out / "arms" / name / "run.json").is_file() else []
            print("anisoscope", *words, flush=True)
            subprocess.run([sys.executable, "-m", "anisoscope", *words], cwd=places.out, env=_environment(), check=True)


if __name__ == "__main__":
    main()
