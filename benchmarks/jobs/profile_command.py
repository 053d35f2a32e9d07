"""`anisoscope profile` of a GPT-2 small of random weights as a user starts it on a GPU: imports, page and all.

65,536 tokens, which are bytes, in contexts of 1,024, in bfloat16. Each run is a process of its own; Python keeps its
bytecode in a folder that is empty before the first. Beside it what nothing can be quicker than: a process that imports
torch and the class of the model, and uses the GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from bench import Bench, Entry, Table

CONTEXT, TOKENS = 1024, 65_536
WHOLE = 10.0  # seconds, bar of the whole command
FLOOR = "import torch; from transformers import GPT2LMHeadModel; torch.zeros(1, device='{device}')"


def seconds(words: list[str], env: dict[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, env=env, capture_output=True)
    return time.perf_counter() - began


def command(bench: Bench) -> list[str]:
    """The words of the command, whose model and text are written before."""
    place = Path(bench.folder) / "gpt2"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    letters = np.random.default_rng(0).integers(97, 123, bench.rows(TOKENS) + CONTEXT, dtype=np.uint8)
    (place / "text.txt").write_bytes(letters.tobytes())
    words = ["-m", "anisoscope", "profile", str(place), "--random-init", "--data", str(place / "text.txt")]
    words += ["--dtype", "bfloat16", "--tokens", str(bench.rows(TOKENS)), "--context", str(CONTEXT)]
    return [*words, "--device", bench.device]


def run(bench: Bench) -> Entry:
    entry = Entry("The command profile, from its start to its page", __doc__ or "")
    kept = {"PYTHONPYCACHEPREFIX": str(Path(bench.folder) / "bytecode")}
    env = {name: value for name, value in bench.environment().items() if name != "PYTHONDONTWRITEBYTECODE"} | kept
    words, table = command(bench), Table("65,536 tokens", columns=("what", "seconds"))
    for number, name in enumerate(("the first time", "the second time", "the third time")):
        took = seconds([*words, "--out", str(Path(bench.folder) / f"profile-{number}")], env)
        table.rows.append({"what": name, "seconds": took})
        entry.check(f"seconds of the command, {name}", took, most=WHOLE)
    floor = seconds(["-c", FLOOR.format(device=bench.device)], env)
    table.rows.append({"what": "torch, the class of the model and the device alone", "seconds": floor})
    entry.tables.append(table)
    return entry
