"""A shelf of things that are not what they seem: texts, tables, pictures, sounds, arrays, models, adapters, links."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

NESTED = "[" * 200_000
SENTENCE = "The quick brown fox number {} jumps over the lazy dog and then sleeps in the sun for a while. "
TEXT = "".join(SENTENCE.format(i) for i in range(60))


class Evil:
    """Unpickled, it would leave a file behind."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def build_shelf(folder: Path) -> None:
    """Write everything into `folder`."""
    for make in (_texts, _records, _packed, _links, _arrays, _media, _models, _configs, _weights):
        make(folder)


def _texts(folder: Path) -> None:
    texts: dict[str, bytes] = {
        "plain.txt": TEXT.encode(),
        "empty.txt": b"",
        "white.txt": b" \n\t" * 50,
        "one.txt": b"a",
        "same.txt": b"a" * 20_000,
        "nul.txt": b"\0" * 20_000,
        "binary.txt": bytes(range(256)) * 100,
        "latin1.txt": "élève à Noël ".encode("latin-1") * 20,
        "utf16.txt": TEXT.encode("utf-16"),
        "surrogate.txt": b"\xed\xa0\x80 lone " * 200,
        "late.txt": TEXT.encode() * 300 + b"\xff\xfe",
        "newlines.txt": b"\n" * 100_000,
        "emoji.txt": "😀".encode() * 5_000,
    }
    for name, data in texts.items():
        (folder / name).write_bytes(data)
    with (folder / "line.txt").open("wb") as file:
        for _ in range(100):
            file.write(b"word " * 200_000)  # 100 MB without a newline
    for name in ("nothing", "texts", "hidden"):
        (folder / name).mkdir()
    (folder / "texts" / "a.txt").write_text(TEXT)
    (folder / "hidden" / ".a.txt").write_text(TEXT)


def _records(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    good = "".join(json.dumps({"text": SENTENCE.format(i), "id": i}) + "\n" for i in range(60))
    texts = {
        "good.jsonl": good,
        "cut.jsonl": good + '{"text": "unfin',
        "lists.jsonl": "[1, 2]\n" * 9,
        "numbers.jsonl": '{"text": 3}\n' * 9,
        "nulls.jsonl": '{"text": null}\n' * 9,
        "objects.jsonl": '{"text": {"a": 1}}\n' * 9,
        "fieldless.jsonl": '{"body": "x"}\n' * 9,
        "nested.jsonl": '{"text": ' + NESTED + "\n",
        "nan.jsonl": '{"text": NaN}\n' * 9,
        "plain.jsonl": TEXT,
        "headless.csv": "1,2,3\n" * 9,
        "ragged.csv": "text,id\na\nb,1,2,3\n",
        "wide.csv": "text\n" + "a" * 300_000 + "\n",
        "nul.csv": "text\na\0b\n" * 9,
        "quote.csv": 'text\n"never closed ' + TEXT,
        "empty.csv": "",
        "header.csv": "text\n",
        "empty.jsonl": "",
        "empty.parquet": "",
        "plain.parquet": TEXT,
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    columns: dict[str, Any] = {"ints": pa.array([1, 2]), "lists": pa.array([["a"], ["b"]])}
    columns |= {"nulls": pa.array([None, None], pa.string()), "none": pa.array([], pa.string())}
    columns |= {"bytes": pa.array([b"\xff\xfe", b"b"]), "times": pa.array([1, 2], pa.timestamp("s"))}
    for name, column in columns.items():
        pq.write_table(pa.table({"text": column}), folder / f"{name}.parquet")
    pq.write_table(pa.table({"body": ["a", "b"]}), folder / "fieldless.parquet")
    whole = (folder / "ints.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (folder / "flipped.parquet").write_bytes(whole[:-60] + bytes(52) + whole[-8:])


def _packed(folder: Path) -> None:
    packed = gzip.compress(TEXT.encode() * 50)
    files = {"bomb.txt.gz": gzip.compress(b"a" * (100 << 20), 9), "cut.txt.gz": packed[:-40]}
    files |= {"flipped.txt.gz": packed[:200] + b"\0\0\0\0" + packed[204:], "plain.txt.gz": TEXT.encode()}
    files |= {"bomb.jsonl.gz": gzip.compress(b'{"text": "' + b"a" * (100 << 20) + b'"}', 9), "none.txt.gz": b""}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    archives: dict[str, dict[str, bytes]] = {
        "bomb.zip": {"a.txt": b"a" * (100 << 20)},
        "nothing.zip": {},
        "binary.zip": {"a.bin": b"\0\1"},
        "zips.zip": {"a.zip": (lambda b: b)(packed)},
        "above.zip": {"../../outside.txt": TEXT.encode()},
    }
    for name, members in archives.items():
        with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
            for member, data in members.items():
                archive.writestr(member, data)
    with zipfile.ZipFile(folder / "locked.zip", "w") as archive:
        archive.writestr("a.txt", TEXT)
    locked = bytearray((folder / "locked.zip").read_bytes())
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        locked[locked.find(mark) + offset] |= 1  # says that it is encrypted
    (folder / "locked.zip").write_bytes(locked)
    (folder / "cut.zip").write_bytes((folder / "above.zip").read_bytes()[:-30])


def _links(folder: Path) -> None:
    for name in ("pipe", "pipe.txt", "pipe.npy", "pipe.safetensors", "pipe.jsonl", "pipe.gguf"):
        os.mkfifo(folder / name)
    (folder / "loop").symlink_to("loop")
    (folder / "loop.txt").symlink_to("loop.txt")
    (folder / "dangling.txt").symlink_to("nowhere.txt")
    (folder / "round").mkdir()
    (folder / "round" / "again").symlink_to(folder / "round")
    (folder / "round" / "a.txt").write_text(TEXT)
    for name in ("folder.npy", "folder.txt", "folder.safetensors", "folder.gguf", "folder.jsonl"):
        (folder / name).mkdir()
    os.mkfifo(folder / "nothing" / "pipe.txt")


def _npy(head: str, data: bytes = b"", *, version: bytes = b"\x01\x00") -> bytes:
    text = head.ljust(118) + "\n"
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text.encode() + data


def _arrays(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    random = np.random.default_rng(0)
    rows = random.normal(size=(300, 8))
    arrays: dict[str, Any] = {
        "rows": rows,
        "flat": np.zeros(10),
        "cube": np.zeros((2, 3, 4)),
        "whole": np.arange(20).reshape(4, 5),
        "none": np.zeros((0, 5)),
        "narrow": np.zeros((5, 0)),
        "nan": np.full((60, 5), np.nan),
        "bool": rows > 0,
        "inf": np.full((60, 5), np.inf),
        "complex": rows * 1j,
        "text": np.array([["a", "b"]]),
        "one": rows[:1],
        "constant": np.ones((50, 4)),
        "zero": np.zeros((50, 4)),
        "huge": rows * 1e300,
        "tiny": rows * 1e-300,
        "column": rows[:, :1],
        "two": rows[:2],
        "same": np.repeat(rows[:1], 50, 0),
        "holes": rows.copy(),
        "scalar": np.float64(3),
        "dated": np.array([["2020-01-01"]], "M8[D]"),
        "half": rows.astype("f2") * 1e4,
        "records": np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
    }
    arrays["holes"][::3] = np.nan
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    np.save(folder / "objects.npy", np.array([[Evil(folder / "evil-npy")]], dtype=object), allow_pickle=True)
    whole = (folder / "rows.npy").read_bytes()
    enormous = "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000, 8), }"
    raw = {"short": whole[:500], "empty": b"", "garbage": b"garbage" * 99, "head": whole[:8]}
    raw |= {"enormous": _npy(enormous), "code": _npy("__import__('os').mkdir('/tmp/never')")}
    raw |= {"negative": _npy("{'descr': '<f8', 'fortran_order': False, 'shape': (-3, 8), }", bytes(99))}
    raw |= {"future": _npy(enormous, version=b"\x09\x00"), "long": whole + b"more" * 99}
    for name, data in raw.items():
        (folder / f"{name}.npy").write_bytes(data)
    save_file({"a": torch.randn(200, 8)}, folder / "rows.safetensors")
    save_file({"a": torch.zeros(0, 8)}, folder / "none.safetensors")
    save_file({}, folder / "nothing.safetensors")
    save_file({"ids": torch.arange(4)}, folder / "ids.safetensors")
    kept = (folder / "rows.safetensors").read_bytes()
    lies = json.dumps({"a": {"dtype": "F64", "shape": [10**9, 10**6], "data_offsets": [0, 8 * 10**15]}}).encode()
    odd = json.dumps({"a": {"dtype": "F99", "shape": [1, 1], "data_offsets": [0, 8]}}).encode()
    heads = {"lies": lies, "odd": odd, "deep": NESTED.encode(), "list": b"[]"}
    files = {name: struct.pack("<Q", len(head)) + head + bytes(64) for name, head in heads.items()}
    files |= {"cut": kept[:-99], "long": struct.pack("<Q", 1 << 62) + b"{}", "empty": b"", "garbage": b"garbage" * 9}
    for name, data in files.items():
        (folder / f"{name}.safetensors").write_bytes(data)
    np.savez(folder / "rows.npz", rows=rows)
    (folder / "evil.pt").write_bytes(pickle.dumps(Evil(folder / "evil-pt")))
    (folder / "evil.pkl").write_bytes(pickle.dumps(Evil(folder / "evil-pkl")))
    torch.save({"x": Evil(folder / "evil-ckpt")}, folder / "evil.ckpt")
    torch.save([1, 2, 3], folder / "list.pt")
    torch.save({"a": torch.randn(3, 3)}, folder / "foreign.pt")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(width: int, height: int, data: bytes = b"") -> bytes:
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + _chunk(b"IDAT", zlib.compress(data)) + _chunk(b"IEND", b"")


def _wav(*, rate: int = 16_000, channels: int = 1, bits: int = 16, kind: int = 1, data: bytes, said: int = -1) -> bytes:
    size = len(data) if said < 0 else said
    step = channels * bits // 8
    head = struct.pack("<HHIIHH", kind, channels, rate, rate * step & 0xFFFFFFFF, step, bits)
    riff = b"RIFF" + struct.pack("<I", (36 + size) & 0xFFFFFFFF) + b"WAVEfmt " + struct.pack("<I", 16) + head
    return riff + b"data" + struct.pack("<I", size & 0xFFFFFFFF) + data


def _media(folder: Path) -> None:
    from PIL import Image

    for name in ("pictures", "sounds", "mixed", "bad-pictures", "bad-sounds"):
        (folder / name).mkdir()
    random = np.random.default_rng(0)
    for i in range(4):
        Image.fromarray(random.integers(0, 255, (20, 20, 3), np.uint8)).save(folder / "pictures" / f"{i}.png")
        noise = (random.normal(size=16_000) * 9000).astype("<i2").tobytes()
        (folder / "sounds" / f"{i}.wav").write_bytes(_wav(data=noise))
    whole = (folder / "pictures" / "0.png").read_bytes()
    files = {
        "giant.png": _png(60_000, 60_000),
        "thin.png": _png(100_000_000, 1),
        "zero.png": _png(0, 5),
        "short.png": _png(30, 30),
        "cut.png": whole[: len(whole) // 2],
        "text.png": TEXT.encode(),
        "empty.png": b"",
        "text.jpg": TEXT.encode(),
        "one.png": _png(1, 1, bytes(4)),
        "cut.wav": _wav(data=noise[:100], said=32_000),
        "lies.wav": _wav(data=noise[:100], said=0xFFFFFFF0),
        "still.wav": _wav(data=bytes(32_000)),
        "nothing.wav": _wav(data=b""),
        "rateless.wav": _wav(rate=0, data=noise),
        "mute.wav": _wav(channels=0, data=noise),
        "fast.wav": _wav(rate=0xFFFFFFFF, data=noise),
        "odd.wav": _wav(bits=13, data=noise),
        "coded.wav": _wav(kind=85, data=noise),
        "text.wav": TEXT.encode(),
        "empty.wav": b"",
        "brief.wav": _wav(data=noise[:20]),
        "slow.wav": _wav(rate=1, data=noise),
        "nan.wav": _wav(kind=3, bits=32, data=np.full(16_000, np.nan, "<f4").tobytes()),
        "text.flac": TEXT.encode(),
        "text.mp3": TEXT.encode(),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    shutil.copy(folder / "pictures" / "0.png", folder / "mixed")
    shutil.copy(folder / "sounds" / "0.wav", folder / "mixed")
    for name in ("cut.png", "text.png"):
        shutil.copy(folder / name, folder / "bad-pictures")
    for name in ("cut.wav", "text.wav"):
        shutil.copy(folder / name, folder / "bad-sounds")


CONFIG = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 32, "n_head": 2}
CONFIG |= {"vocab_size": 300, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}


def _models(folder: Path) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    from anisoscope.data.tokens import make_vocabulary, save_tokenizer

    logging.disable_progress_bar()
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**CONFIG)).save_pretrained(folder / "model")
    save_tokenizer(make_vocabulary("char", [bytes(range(256))]), folder / "model")
    (folder / "series").mkdir()
    for step in (1, 2):
        shutil.copytree(folder / "model", folder / "series" / f"checkpoint-{step}")
    for name, data in {"garbage": b"no such thing" * 9, "cut": b"GGUF\x03\0\0\0", "empty": b""}.items():
        (folder / f"{name}.gguf").write_bytes(data)
    (folder / "counts.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60))
    adapters: dict[str, Any] = {
        "deep": NESTED,
        "list": "[]",
        "baseless": "{}",
        "lost": '{"base_model_name_or_path": "./gone", "peft_type": "LORA"}',
    }
    adapters |= {"strange": '{"base_model_name_or_path": "BASE", "peft_type": "NOPE"}'}
    for name, text in adapters.items():
        (folder / f"adapter-{name}").mkdir()
        text = text.replace("BASE", str(folder / "model"))
        (folder / f"adapter-{name}" / "adapter_config.json").write_text(text)


# a field of config.json and a value that it cannot have
WRONG: list[tuple[str, Any]] = [
    ("model_type", 5),
    ("model_type", "nope"),
    ("model_type", None),
    ("model_type", ["gpt2"]),
    ("n_layer", 0),
    ("n_layer", -1),
    ("n_layer", 10**9),
    ("n_layer", "two"),
    ("n_layer", 1.5),
    ("n_layer", None),
    ("n_layer", [2]),
    ("n_head", 0),
    ("n_head", 3),
    ("n_head", "x"),
    ("n_head", -2),
    ("n_embd", 0),
    ("n_embd", 10**9),
    ("n_embd", "32"),
    ("n_embd", -32),
    ("vocab_size", 0),
    ("vocab_size", -5),
    ("vocab_size", 10**13),
    ("vocab_size", "many"),
    ("n_positions", 0),
    ("n_positions", -1),
    ("n_positions", 10**13),
    ("n_positions", 1),
    ("torch_dtype", "nonsense"),
    ("dtype", "float31"),
    ("architectures", ["Nope"]),
    ("architectures", 5),
    ("architectures", []),
    ("activation_function", "nope"),
    ("layer_norm_epsilon", "x"),
    ("initializer_range", "x"),
    ("resid_pdrop", 2.0),
    ("quantization_config", {"quant_method": "nope"}),
    ("quantization_config", 7),
    ("auto_map", {"AutoModel": "x.Y"}),
    ("auto_map", 3),
    ("bos_token_id", "x"),
    ("is_decoder", "perhaps"),
    ("n_inner", -4),
    ("n_inner", "x"),
]


def wrong_config(index: int) -> str:
    """The name of the folder with the wrong configuration of that number."""
    field, value = WRONG[index]
    return f"config-{index}-{field}-{str(value)[:12]}".replace(" ", "").replace("/", "")


def _configs(folder: Path) -> None:
    for index, (field, value) in enumerate(WRONG):
        place = folder / wrong_config(index)
        shutil.copytree(folder / "model", place)
        whole = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps(whole | {field: value}))
    texts = {
        "brace": "{",
        "array": "[]",
        "string": '"gpt2"',
        "nothing": "",
        "deep": NESTED,
        "null": "null",
        "nan": '{"n_layer": NaN}',
    }
    for name, text in texts.items():
        shutil.copytree(folder / "model", folder / f"json-{name}")
        (folder / f"json-{name}" / "config.json").write_text(text)
    shutil.copytree(folder / "model", folder / "json-binary")
    (folder / "json-binary" / "config.json").write_bytes(bytes(range(256)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        for kind, text in {"brace": "{", "deep": NESTED, "array": "[]", "nothing": ""}.items():
            place = folder / f"{name.removesuffix('.json')}-{kind}"
            shutil.copytree(folder / "model", place)
            (place / name).write_text(text)


def _weights(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    good = load_file(folder / "model" / "model.safetensors")
    first = next(iter(good))
    wide = next(key for key in good if good[key].dim() == 2)
    kinds: dict[str, dict[str, Any] | None] = {
        "missing": None,
        "few": {first: good[first]},
        "shapes": good | {wide: torch.zeros(7, 7)},
        "extra": good | {"nobody.knows": torch.zeros(3)},
        "nan": {key: torch.full_like(value, float("nan")) for key, value in good.items()},
        "inf": {key: torch.full_like(value, float("inf")) for key, value in good.items()},
        "zero": {key: torch.zeros_like(value) for key, value in good.items()},
        "ints": {key: value.to(torch.int64) for key, value in good.items()},
        "foreign": {"a": torch.zeros(3)},
        "vocabulary": {key: value[:40] if value.shape[:1] == (300,) else value for key, value in good.items()},
        "none": {},
    }
    for name, tensors in kinds.items():
        place = Path(shutil.copytree(folder / "model", folder / f"weights-{name}"))
        (place / "model.safetensors").unlink()
        if tensors is not None:
            clones = {key: value.clone().contiguous() for key, value in tensors.items()}
            save_file(clones, place / "model.safetensors", metadata={"format": "pt"})
    for name, data in {"cut": (folder / "model" / "model.safetensors").read_bytes()[:3000], "empty": b""}.items():
        place = Path(shutil.copytree(folder / "model", folder / f"weights-{name}"))
        (place / "model.safetensors").write_bytes(data)
    index = {
        "list": "[]",
        "deep": NESTED,
        "gone": '{"weight_map": {"a": "gone.safetensors"}, "metadata": {}}',
        "outside": '{"weight_map": {"a": "../../../etc/passwd"}, "metadata": {}}',
        "number": '{"weight_map": 3}',
    }
    for name, text in index.items():
        place = Path(shutil.copytree(folder / "model", folder / f"index-{name}"))
        (place / "model.safetensors").unlink()
        (place / "model.safetensors.index.json").write_text(text)
    place = Path(shutil.copytree(folder / "model", folder / "weights-evil"))
    (place / "model.safetensors").unlink()
    torch.save({"x": Evil(folder / "evil-bin")}, place / "pytorch_model.bin")
    place = Path(shutil.copytree(folder / "model", folder / "tokenizer-large"))
    whole = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(whole | {"vocab_size": 40}))
    small = {key: value[:40].clone() if value.shape[:1] == (300,) else value for key, value in good.items()}
    save_file(small, place / "model.safetensors", metadata={"format": "pt"})
    bare = Path(shutil.copytree(folder / "model", folder / "tokenizerless"))
    for path in bare.glob("token*"):
        path.unlink()
