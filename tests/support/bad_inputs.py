"""Bad inputs beside wrong values of options: files, folders, damaged runs, contradictions, calls of the library.

A line is a command; {s} is the shelf, {o} a place of its own that does not exist. A line that begins with ~ may also
end well: what is in the file can be measured, and what cannot is noted.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.bad_files import WRONG, wrong_config

GPT = "gpt2:n_layer=1,n_embd=16,n_head=2,vocab_size=300"
VIT = "vit:image_size=16,patch_size=8,hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"
WAV = (
    "wav2vec2:hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16,conv_dim=[8,8],"
    "conv_kernel=[10,3],conv_stride=[5,2],num_feat_extract_layers=2,num_conv_pos_embeddings=4,"
    "num_conv_pos_embedding_groups=2"
)
PROFILE = f"profile --random-init {GPT} --tokens 128 --context 16 --metrics drift --out {{o}}"
SEEING = f"profile --random-init {VIT} --tokens 64 --metrics drift --out {{o}}"
HEARING = f"profile --random-init {WAV} --tokens 64 --metrics drift --out {{o}}"
TRAIN = "train --steps 1 --layers 1 --width 8 --heads 2 --context 8 --monitor none --out {o}"

TEXTS = [
    "missing.txt",
    "empty.txt",
    "white.txt",
    "latin1.txt",
    "~utf16.txt",
    "surrogate.txt",
    "late.txt",
    "pipe",
    "pipe.txt",
    "pipe.jsonl",
    "loop",
    "loop.txt",
    "dangling.txt",
    "nothing",
    "hidden",
    "folder.txt",
    "folder.jsonl",
    "~cut.jsonl",
    "lists.jsonl",
    "numbers.jsonl",
    "nulls.jsonl",
    "objects.jsonl",
    "fieldless.jsonl",
    "nested.jsonl",
    "nan.jsonl",
    "plain.jsonl",
    "headless.csv",
    "empty.csv",
    "header.csv",
    "empty.jsonl",
    "empty.parquet",
    "plain.parquet",
    "ints.parquet",
    "lists.parquet",
    "nulls.parquet",
    "none.parquet",
    "bytes.parquet",
    "times.parquet",
    "fieldless.parquet",
    "cut.parquet",
    "flipped.parquet",
    "~bomb.txt.gz",
    "cut.txt.gz",
    "flipped.txt.gz",
    "plain.txt.gz",
    "bomb.jsonl.gz",
    "none.txt.gz",
    "bomb.zip",
    "nothing.zip",
    "binary.zip",
    "locked.zip",
    "cut.zip",
    "evil.pkl",
    "model",
    "run",
    "rows.npy",
    "pictures",
    "sounds",
    "mixed",
    "~one.txt",
    "~same.txt",
    "~nul.txt",
    "~binary.txt",
    "~newlines.txt",
    "~emoji.txt",
    "~line.txt",
    "~round",
    "~ragged.csv",
    "~wide.csv",
    "~nul.csv",
    "~quote.csv",
    "~zips.zip",
    "~above.zip",
    "~good.jsonl",
]
MODELS = [
    "missing",
    "nothing",
    "texts",
    "plain.txt",
    "pipe",
    "pipe.npy",
    "pipe.safetensors",
    "pipe.gguf",
    "loop",
    "dangling.txt",
    "folder.npy",
    "folder.gguf",
    "folder.safetensors",
    "garbage.gguf",
    "cut.gguf",
    "empty.gguf",
    "counts.gguf",
    "adapter-deep",
    "adapter-list",
    "adapter-baseless",
    "adapter-lost",
    "adapter-strange",
    "json-brace",
    "json-array",
    "json-string",
    "json-nothing",
    "json-deep",
    "json-null",
    "~json-nan",
    "json-binary",
    "tokenizer-brace",
    "tokenizer-deep",
    "tokenizer-array",
    "tokenizer-nothing",
    "tokenizer_config-brace",
    "tokenizer_config-deep",
    "tokenizer_config-array",
    "tokenizer_config-nothing",
    "weights-missing",
    "weights-few",
    "weights-shapes",
    "~weights-extra",
    "~weights-nan",
    "~weights-inf",
    "~weights-zero",
    "~weights-ints",
    "weights-foreign",
    "weights-vocabulary",
    "weights-none",
    "weights-cut",
    "weights-empty",
    "index-list",
    "index-deep",
    "index-gone",
    "index-outside",
    "index-number",
    "weights-evil",
    "tokenizer-large",
    "tokenizerless",
    "evil.pt",
    "evil.pkl",
    "evil.ckpt",
    "foreign.pt",
    "list.pt",
    "run",
]
ROWS = [
    "flat",
    "cube",
    "whole",
    "none",
    "narrow",
    "bool",
    "complex",
    "text",
    "scalar",
    "dated",
    "records",
    "objects",
    "short",
    "empty",
    "garbage",
    "head",
    "enormous",
    "code",
    "negative",
    "future",
    "~long",
    "~nan",
    "~inf",
    "~one",
    "~constant",
    "~zero",
    "~huge",
    "~tiny",
    "~column",
    "~two",
    "~same",
    "~holes",
    "~half",
]
TENSORS = ["none", "nothing", "ids", "lies", "odd", "deep", "list", "cut", "long", "empty", "garbage"]
PICTURES = [
    "giant.png",
    "thin.png",
    "zero.png",
    "short.png",
    "cut.png",
    "text.png",
    "empty.png",
    "text.jpg",
    "bad-pictures",
    "sounds",
    "plain.txt",
    "nothing",
    "still.wav",
    "pipe",
    "loop",
    "evil.pkl",
    "bomb.zip",
    "nothing.zip",
    "~one.png",
    "~mixed",
]
SOUNDS = [
    "cut.wav",
    "~lies.wav",
    "~still.wav",
    "nothing.wav",
    "rateless.wav",
    "mute.wav",
    "~odd.wav",  # 13 bits in two bytes, which libsndfile reads and SciPy does not
    "coded.wav",
    "text.wav",
    "empty.wav",
    "nan.wav",
    "text.flac",
    "text.mp3",
    "bad-sounds",
    "pictures",
    "plain.txt",
    "nothing",
    "pipe",
    "loop",
    "~fast.wav",
    "~slow.wav",
    "~brief.wav",
    "~mixed",
]

# lines of their own: {PROFILE} and the like are the texts above
_KNOWN = {"PROFILE": PROFILE, "GPT": GPT, "VIT": VIT, "WAV": WAV}
LINES = Path(__file__).with_name("bad_lines.txt").read_text().splitlines()


@dataclass(frozen=True)
class BadInput:
    """One thing to try: a command line, after something was prepared in a place of its own, or a call."""

    id: str
    line: str = ""
    legal: bool = False
    prepare: Callable[[Path, Path], None] | None = None  # (shelf, its own place)
    call: Callable[[Path, Path], Any] | None = None


def _files(kind: str, base: str, names: list[str]) -> Iterator[BadInput]:
    for name in names:
        plain = name.removeprefix("~")
        yield BadInput(f"{kind} {plain}", base.replace("{x}", f"{{s}}/{plain}"), name != plain)


def file_inputs() -> Iterator[BadInput]:
    yield from _files("text", f"{PROFILE} --data {{x}}", TEXTS)
    yield from _files("training text", f"{TRAIN} --data {{x}}", TEXTS[::3])
    few = "--tokens 64 --context 16 --metrics drift --out {o}"
    yield from _files("model", f"profile {{x}} {few}", MODELS)
    yield from _files("tangent of", "tangent {x} --tokens 64 --context 16 --draws 19 --out {o}", MODELS[::4])
    yield from _files("series of", f"sweep {{x}} {few}", MODELS[1::4])
    no_tokenizer = [name for name in MODELS[::5] if "-" not in name or name.startswith(("tokenizer", "adapter"))]
    yield from _files("tokenizer", f"profile {{s}}/model {few} --tokenizer {{x}}", no_tokenizer)
    wrong = [wrong_config(i) for i in range(len(WRONG))]
    free = ("bos_token", "is_decoder", "n_inner-x", "initializer", "dtype", "architectures-[", "auto_map", "quant")
    free = (*free, "model_type-None")  # which is found by the class
    marked = [f"~{name}" if any(part in name for part in (*free, "n_embd-32")) else name for name in wrong]
    yield from _files("configuration", f"profile {{x}} {few}", marked)
    with_weights = [name for name in marked if "initializer" not in name]
    yield from _files("fresh configuration", f"profile --random-init {{x}} {few}", with_weights[::3])
    yield from _files("rows", "profile {x} --out {o}", [f"{name}.npy" for name in ROWS])
    yield from _files("rows", "profile {x} --out {o}", [f"{name}.safetensors" for name in TENSORS])
    yield from _files("pictures", f"{SEEING} --data {{x}}", PICTURES)
    yield from _files("sounds", f"{HEARING} --data {{x}}", SOUNDS)
    for line in LINES:
        plain = line.removeprefix("~")
        for name, text in _KNOWN.items():
            plain = plain.replace(f"{{{name}}}", text)
        yield BadInput(plain, plain, line.startswith("~"))


# -- damaged runs ------------------------------------------------------------------------------------------------------

READERS = ("show {o}/run", "report {o}/run", "claims {o}/run", "compare {o}/run {o}/run", "claims --robust {o}/run")
_OTHER: dict[type, tuple[Any, ...]] = {
    str: (3, ["a"]),
    int: ("a", [1]),
    float: ("a", {}),
    dict: ([1], "a"),
    list: ("a", {"a": 1}, [[]], [None]),
}
ENTRIES = {"kind": str, "status": str, "error": str, "started": str, "device": str, "wall_seconds": float, "seed": int}
ENTRIES |= {"config": dict, "versions": dict, "data": dict, "code": dict, "warnings": list, "command": list}
ENTRIES |= {"models": list, "anisoscope": str, "schema": int, "peak_memory_mb": int}


def _recorded(**changes: Any) -> Callable[[Path, Path], None]:
    def prepare(shelf: Path, place: Path) -> None:
        shutil.copytree(shelf / "run", place / "run")
        path = place / "run" / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return prepare


def _replaced(name: str, data: bytes | None) -> Callable[[Path, Path], None]:
    def prepare(shelf: Path, place: Path) -> None:
        shutil.copytree(shelf / "run", place / "run")
        for path in [*(place / "run").glob(name)] or [place / "run" / name]:
            path.unlink(missing_ok=True)
            if data is not None:
                path.write_bytes(
                    data if data != b"half" else (shelf / "run" / path.relative_to(place / "run")).read_bytes()[:-50]
                )

    return prepare


def _retabled(change: Callable[[Any], Any]) -> Callable[[Path, Path], None]:
    def prepare(shelf: Path, place: Path) -> None:
        import pyarrow.parquet as pq

        shutil.copytree(shelf / "run", place / "run")
        path = place / "run" / "table.parquet"
        pq.write_table(change(pq.read_table(path)), path)

    return prepare


def _filled(name: str, value: Any) -> Callable[[Any], Any]:
    def change(table: Any) -> Any:
        import pyarrow as pa

        column = pa.array([value] * len(table), None if value is not None else table.schema.field(name).type)
        if value is not None and not isinstance(value, list):
            column = column.cast(table.schema.field(name).type)
        return table.set_column(table.schema.get_field_index(name), name, column)

    return change


def _dropped(name: str) -> Callable[[Any], Any]:
    return lambda table: table.drop_columns([name])


_COLUMNS = ("schema", "run", "model", "data", "step", "stack", "layer", "depth", "kind", "head", "group", "metric")
_COLUMNS += ("variant", "value", "low", "sd", "n", "contexts", "dropped", "seed", "note", "replicates")
FILLED: list[tuple[str, Any]] = [
    ("layer", 2**31 - 1),
    ("layer", -5),
    ("depth", float("nan")),
    ("depth", 1e300),
    ("value", float("nan")),
    ("value", float("inf")),
    ("value", 1e308),
    ("low", float("inf")),
    ("n", -3),
    ("step", 2**62),
    ("step", -9),
    ("head", 2**31 - 1),
    ("metric", "no_such_metric"),
    ("metric", ""),
    ("kind", "nowhere"),
    ("stack", "triple"),
    ("variant", "no equals"),
    ("variant", "=;="),
    ("variant", "a=1;a=2"),
    ("variant", "x" * 100_000),
    ("model", "a" * 100_000),
    ("model", ""),
    ("model", "<script>alert(1)</script>"),
    ("note", "\x1b[31m\x00"),
    ("schema", 99),
    ("group", "half:3"),
    ("group", "☃" * 500),
    ("replicates", [float("inf")] * 8),
    ("replicates", [1.0]),
    ("replicates", []),
]


def run_inputs() -> Iterator[BadInput]:
    turn = 0

    def one(
        what: str, prepare: Callable[[Path, Path], None], *, legal: bool = False, every: bool = False
    ) -> Iterator[BadInput]:
        nonlocal turn
        turn += 1
        for reader in READERS if every else (READERS[turn % len(READERS)],):
            yield BadInput(f"{reader} of {what}", reader, legal, prepare)

    for name, kind in ENTRIES.items():
        for value in _OTHER[kind]:
            missing = (name, value) == ("models", [None])  # a null entry is as a missing one
            yield from one(f"{name} = {value!r}", _recorded(**{name: value}), legal=missing or value in ([], {}))
    for name, kind in {
        "name": str,
        "layers": int,
        "width": int,
        "notes": list,
        "data": dict,
        "stacks": list,
        "dropped": dict,
    }.items():
        for value in _OTHER[kind][:2]:
            yield from one(f"models[0].{name} = {value!r}", _recorded(models=[{"name": "a", name: value}]), legal=True)
    texts = {"run.json": (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 200_000, b"half", None)}
    texts |= {"table.parquet": (b"", b"PAR1", b"half", None, b"PAR1" + bytes(99) + b"PAR1")}
    for name, datas in texts.items():
        for data in datas:
            what = f"{name} {(data or b'gone')[:8]!r}"
            yield from one(what, _replaced(name, data), every=data in (b"", b"half"))
    for name in ("arrays/*", "comparison.json", "verdicts.json"):
        for data in (b"", b"[" * 200_000, b"half" if "json" not in name else b'{"a": 1}', b"[3]"):
            for reader in ("report {o}/run", "compare {o}/run {o}/run"):
                yield BadInput(f"{reader} of {name} {data[:8]!r}", reader, True, _replaced(name, data))
    for name in _COLUMNS:
        yield from one(f"table without {name}", _retabled(_dropped(name)))
    for name, value in FILLED:
        yield from one(
            f"{name} = {str(value)[:20]!r}",
            _retabled(_filled(name, value)),
            legal=True,
            every=value in (2**31 - 1, 2**62, ""),
        )
    for name in ("metric", "kind", "layer", "model", "value", "variant", "group"):
        yield from one(f"{name} null", _retabled(_filled(name, None)), legal=True)
    yield from one("no rows", _retabled(lambda table: table.slice(0, 0)), legal=True, every=True)
    yield from one("every row twice", _retabled(_doubled), legal=True, every=True)


def _doubled(table: Any) -> Any:
    import pyarrow as pa

    return pa.concat_tables([table, table])


# -- calls of the library ----------------------------------------------------------------------------------------------


def python_inputs() -> Iterator[BadInput]:
    from support.bad_calls import CALLS

    for name, call in CALLS.items():
        plain = name.removeprefix("~")
        yield BadInput(f"python {plain}", "", plain != name, None, call)


def bad_inputs() -> list[BadInput]:
    return [*file_inputs(), *run_inputs(), *python_inputs()]
