"""A whole profile beside the bare forward pass of the same model over the same batches.

On the host profile_overhead.py measures and records it on MiniLM; on a GPU a GPT-2 of random weights in bfloat16 takes
its place, 65,536 tokens in contexts of 1,024.
"""

from __future__ import annotations

from typing import Any

from alone import Way, timed
from bench import Bench, Entry, Table
from sources import Source
from torch import Tensor


def made(tokens: int, device: Any) -> tuple[Any, list[dict[str, Tensor]]]:
    import torch
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model("gpt2")).to(device, torch.bfloat16).eval()
    ids = torch.randint(0, 50_000, (max(8, tokens // 1024), 1024))
    mask = torch.ones(8, 1024, dtype=torch.int64)
    return model, [{"input_ids": part, "attention_mask": mask[: len(part)]} for part in ids.split(8)]


def gpt2(x: Tensor, tokens: int = 65_536) -> dict[str, float]:
    """Seconds of the bare pass and of the measured one, in turns, after a warm-up of both."""
    import torch

    from anisoscope import measure

    model, batches = made(tokens, x.device)

    def bare() -> None:
        with torch.inference_mode():
            for batch in batches:
                model(**{name: value.to(x.device) for name, value in batch.items()})

    measure(model, batches[:2])
    kind = x.device.type
    return {"bare": timed(bare, kind)[1], "measured": timed(lambda: measure(model, batches), kind)[1]}


WAYS = {"gpt2": Way(gpt2, "GPT-2 small, bfloat16")}


def run(bench: Bench) -> Entry | None:
    if not bench.cuda:
        few = ["--tokens", "1024", "--repeats", "1"] if bench.scale < 1 else ["--repeats", "2"]
        bench.script("profile_overhead.py", "--device", bench.device, *few)
        return None
    entry = Entry("Profile of GPT-2 beside its bare forward pass", __doc__ or "")
    found = bench.time("profile", "gpt2", Source(256, 8), once=True, tokens=bench.rows(65_536)).result
    table = Table("65,536 tokens", columns=("what", "seconds"))
    table.rows = [{"what": name, "seconds": found[name]} for name in ("bare", "measured")]
    entry.tables.append(table)
    entry.check("measured over bare", found["measured"] / found["bare"])
    return entry
