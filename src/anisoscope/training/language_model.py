"""Text models: the batches of a run, cut from its tokenised corpus, and a fresh language model for its vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from anisoscope.data.resampling import resample
from anisoscope.data.vocabulary import MASK, PAD, SEP, SPECIALS
from anisoscope.models.attention_variant import MODEL_TYPE, VARIANTS
from anisoscope.models.checkpoint import LoadOptions, fresh_config, fresh_model
from anisoscope.models.placement import choose_device
from anisoscope.results.folder import replace_file
from anisoscope.training.config import TrainConfig
from anisoscope.training.corpus import Corpus, prepare_corpus
from anisoscope.training.models import choose_family, hushed
from anisoscope.training.windows import WindowStream, training_windows

Progress = Callable[[str, int, int], None]  # what, done, of


def make_stream(
    config: TrainConfig, out: Path, *, corpus: str | Path | None = None, progress: Progress | None = None
) -> WindowStream:
    """The batches of a run; the text is tokenised and the windows are weighted once, and then read from the folder."""
    tell = progress or (lambda what, done, of: None)
    tell("corpus", 0, 1)
    folder = corpus if corpus is not None else out / "corpus"
    options: dict[str, Any] = {name: getattr(config, name) for name in ("tokens", "limit", "text_field")}
    text = prepare_corpus(config.data, folder, **options)
    tell("corpus", 1, 1)
    weights, report = None, None
    if config.frequency != "natural":
        weights, report = _window_weights(config, text, out / "sampling.npz")
    words: dict[str, Any] = {name: getattr(config, name) for name in ("batch_size", "mask_rate", "seed")}
    words |= {"device": choose_device(config.device), "weights": weights, "report": report}
    return WindowStream(text, config.context, objective=config.task, **words)


def _window_weights(config: TrainConfig, corpus: Corpus, path: Path) -> tuple[np.ndarray, dict[str, Any]]:
    if not path.is_file():
        words: dict[str, Any] = {"context": config.context, "frequency": config.frequency, "specials": len(SPECIALS)}
        starts = training_windows(corpus, config.context)
        found = resample(corpus.train.tokens, starts, vocab_size=corpus.vocab_size, **words)
        report = json.dumps(found.report)

        def write(beside: Path) -> None:
            with beside.open("wb") as file:
                np.savez(file, weights=found.weights, report=np.array(report))

        replace_file(path, write)
    with np.load(path) as stored:
        return stored["weights"], json.loads(str(stored["report"]))


def build_model(config: TrainConfig, *, vocab_size: int) -> nn.Module:
    """A fresh model with its head, whose forward returns a loss; the same weights for the same sizes and seed.

    In a family of both architectures that holds over mask and objective, too: arms differ in nothing else.
    The initial weights come from a generator of their own: the global one is left as it was.
    """
    with hushed():
        description = model_config(config, vocab_size=vocab_size)
        model = fresh_model(description, LoadOptions(torch.device("cpu"), seed=config.seed))
    return model.double() if config.dtype == "float64" else model


def model_config(config: TrainConfig, *, vocab_size: int) -> Any:
    """The transformers configuration of a run."""
    family = choose_family(config.arch, config.family)
    inner = int(-(-family.inner * config.width // 8) * 8)  # rounded up: tensor cores like multiples of eight
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "max_position_embeddings": config.context,
        family.inner_field: inner,
        "pad_token_id": PAD,
        "tie_word_embeddings": config.tied,
        **dict.fromkeys(family.dropout, config.dropout),
        **_fixed_fields(family.model_type),
        **family.options,
    }
    varied = config.attention is not None and VARIANTS[config.attention] is not None
    built = fresh_config(MODEL_TYPE if varied else family.model_type, fields)
    if varied:
        built.attention_variant = config.attention
    if len(family.archs) > 1:
        built.is_causal = config.arch == "decoder"  # transformers' own word for the mask
        built.objective = config.task  # ours, read by capture.checkpoints.with_own_loss wherever the model is loaded
    built._attn_implementation = "sdpa"
    return built


def _fixed_fields(model_type: str) -> dict[str, Any]:
    """Fields in which a published model differs from any that is trained here: special tokens, a generation cache."""
    from transformers import CONFIG_MAPPING

    known = CONFIG_MAPPING[model_type]().to_dict()
    absent = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id"))
    wanted = {**absent, "sep_token_id": SEP, "mask_token_id": MASK, "use_cache": False}
    return {name: value for name, value in wanted.items() if name in known}
