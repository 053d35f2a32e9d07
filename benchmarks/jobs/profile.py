"""A whole profile beside the bare forward pass of the same model over the same batches.

On the host profile_overhead.py measures and records it on MiniLM. On a GPU models of random weights in bfloat16 take
its place, 65,536 tokens in contexts of 1,024: a GPT-2 small, and Llamas of 24 × 2,048 and 32 × 4,096 (8 billion
parameters). Measured is what `anisoscope.measure` takes in a process that has measured before; the whole command is in
profile_command.py.
"""

from __future__ import annotations

from typing import Any

from alone import Way, timed
from bench import Bench, Entry, Table
from sources import Source
from torch import Tensor

CONTEXT, TOKENS = 1024, 65_536


def llama(layers: int, width: int) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 7 * width // 2}
    heads = {"num_attention_heads": width // 128, "num_key_value_heads": width // 512}
    return {"model_type": "llama", **sizes, **heads, "vocab_size": 32_000}


SHAPES: dict[str, tuple[dict[str, Any], float]] = {  # configuration; bar of the measured seconds
    "GPT-2 small": ({"model_type": "gpt2"}, 2.0),
    "24 × 2,048": (llama(24, 2048), 6.0),
    "32 × 4,096": (llama(32, 4096), 15.0),
}


def made(shape: dict[str, Any], tokens: int, device: Any) -> tuple[Any, list[dict[str, Tensor]]]:
    import torch
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    with torch.device(device):  # eight billion weights are drawn in a second there
        model = AutoModel.from_config(AutoConfig.for_model(**shape), dtype=torch.bfloat16).eval()
    ids = torch.randint(0, 30_000, (max(8, tokens // CONTEXT), CONTEXT))
    mask = torch.ones(8, CONTEXT, dtype=torch.int64)
    return model, [{"input_ids": part, "attention_mask": mask[: len(part)]} for part in ids.split(8)]


def measured(x: Tensor, shape: dict[str, Any], tokens: int = TOKENS) -> dict[str, float]:
    """Seconds of the bare pass and of the measured one, in turns, after a warm-up of both."""
    import torch

    from anisoscope import measure

    model, batches = made(shape, tokens, x.device)

    def bare() -> None:
        with torch.inference_mode():
            for batch in batches:
                model(**{name: value.to(x.device) for name, value in batch.items()})

    measure(model, batches[:2])
    kind = x.device.type
    return {"bare": timed(bare, kind)[1], "measured": timed(lambda: measure(model, batches), kind)[1]}


WAYS = {"measured": Way(measured, "anisoscope.measure")}


def run(bench: Bench) -> Entry | None:
    if not bench.cuda:
        few = ["--tokens", "1024", "--repeats", "1"] if bench.scale < 1 else ["--repeats", "5"]
        bench.script("profile_overhead.py", "--device", bench.device, *few)
        return None
    entry = Entry("Profile beside the bare forward pass of the same model", __doc__ or "")
    table = Table("65,536 tokens", columns=("model", "what", "seconds"))
    for name, (shape, bar) in SHAPES.items() if bench.scale == 1 else [("GPT-2 small", SHAPES["GPT-2 small"])]:
        source = Source(256, 8)
        found = bench.time("profile", "measured", source, once=True, shape=shape, tokens=bench.rows(TOKENS)).result
        table.rows += [{"model": name, "what": what, "seconds": found[what]} for what in ("bare", "measured")]
        entry.check(f"seconds of measuring {name}", found["measured"], most=bar)
    entry.tables.append(table)
    return entry
