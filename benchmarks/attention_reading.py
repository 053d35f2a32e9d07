"""What reading attention costs: queries, keys and scores of a decoder, beside the pass that hands out whole matrices.

    python benchmarks/attention_reading.py

A GPT-2 of random weights (12 × 768), contexts of 1,024. The usual way is eager attention with `output_attentions`,
which holds all heads of all layers at once; entropy and largest weight are then taken of every row. Ours reads the same
rows (`attention_rows=0`) a head block at a time, and by default sixteen rows of each context. Each way runs in a
process of its own, on the same ids.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch
from profile_overhead import PeakMemory
from record import record

WAYS = ("bare", "matrices", "every_row", "default")
METRICS = ["attention_entropy", "attention_max", "attention_sharpness", "score_spread", "qk_cosine"]


def made(arguments: argparse.Namespace) -> tuple[Any, list[Any]]:
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", n_layer=arguments.layers, n_positions=arguments.context)
    way = "eager" if arguments.only == "matrices" else "sdpa"
    model = AutoModel.from_config(config, attn_implementation=way).eval().to(arguments.device)
    ids = torch.randint(0, 50_000, (arguments.contexts, 1, arguments.context))
    return model, [{"input_ids": one.to(arguments.device)} for one in ids]


def matrices(model: Any, batches: list[Any]) -> float:
    """Mean entropy of all heads, over log m, from whole matrices."""
    total = 0.0
    for batch in batches:
        for weights in model(**batch, output_attentions=True).attentions:
            rows = weights[..., 1:, :].float()  # the first row has one key
            length = torch.arange(2, rows.shape[-1] + 1, device=rows.device).log()
            total += float((torch.special.entr(rows).sum(-1) / length).mean() / len(batches) / model.config.n_layer)
            rows.amax(-1).mean()
    return total


def read(model: Any, batches: list[Any], rows: int) -> float:
    from anisoscope import measure

    table = measure(model, batches, sites="query,key,scores", metrics=METRICS, attention_rows=rows)
    found = table.where(metric="attention_entropy", kind="scores").to_pandas()
    return float(found[found["head"].notna() & (found["variant"] == "")].value.mean())


def run(way: str, model: Any, batches: list[Any]) -> float:
    if way == "bare":
        return float(sum(model(**batch).last_hidden_state.mean() for batch in batches))
    return matrices(model, batches) if way == "matrices" else read(model, batches, 0 if way == "every_row" else 16)


def alone(way: str) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--only", way]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--contexts", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=WAYS)
    arguments = parser.parse_args()
    if arguments.only:
        model, batches = made(arguments)
        with torch.inference_mode(), PeakMemory() as memory:
            run(arguments.only, model, batches[:1])  # warm-up
            start = time.perf_counter()
            value = run(arguments.only, model, batches)
            seconds = time.perf_counter() - start
        print(json.dumps({"s": seconds, "mb": memory.extra_mb, "entropy": value}))
        return
    found = {way: alone(way) for way in WAYS}
    figures = {f"{way}_over_bare": found[way]["s"] / found["bare"]["s"] for way in WAYS[1:]}
    figures |= {f"{way}_extra_mb": found[way]["mb"] for way in WAYS}
    figures |= {f"{way}_entropy": found[way]["entropy"] for way in WAYS[1:]}
    record(
        "Reading attention beside whole matrices",
        about=f"GPT-2 {arguments.layers} × 768, {arguments.contexts} contexts of {arguments.context:,}. matrices: "
        "eager attention with output_attentions, entropy and maximum of every row; every_row: queries, keys and the "
        "scores of every row here; default: sixteen rows of each context. Memory is the peak over the loaded model.",
        command=" ".join(["python benchmarks/attention_reading.py", *sys.argv[1:]]),
        figures=figures,
        bars={},
    )


if __name__ == "__main__":
    main()
