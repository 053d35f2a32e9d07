"""Models that the tests of loading save and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from anisoscope.models.load import load_model

GPT2 = "gpt2:n_layer=2,n_embd=32,n_head=2,vocab_size=300,n_positions=64"


BERT = "bert:num_hidden_layers=2,hidden_size=32,num_attention_heads=2,intermediate_size=64,vocab_size=300"


def load(spec: object, **options: Any) -> Any:
    """A model on the CPU; stored ones are loaded without a tokenizer, unless told."""
    known = options.get("random_init") or "tokenizer" in options
    return load_model(str(spec), **{"device": "cpu", "need_tokenizer": bool(known), **options})


def saved(folder: Path, spec: str = GPT2, **options: Any) -> Path:
    load(spec, random_init=True, **options).model.save_pretrained(folder)
    return folder


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
