"""What the decoder of a model that hears or sees is given to read: its own greedy text, or the text that is known."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from anisoscope.capture.arguments import evaluating, input_device

MOST = 64  # tokens that a decoder writes or is given
_PROMPT = 4  # tokens that a decoder may be started with: Whisper's start, language, task and no timestamps
_POSITIONS = ("max_target_positions", "max_position_embeddings", "n_positions")


def spoken(loaded: Any, text: str) -> list[int]:
    """Ids of a known text as a decoder reads them, after its start token and without an end; [] without a tokenizer."""
    if loaded.tokenizer is None:
        return []
    ids = [int(i) for i in loaded.tokenizer(text)["input_ids"]]
    return _from_start(loaded, ids)[: min(MOST + 1, _positions(loaded.model))]


def _positions(model: Any) -> int:
    """Tokens that the decoder of a model takes at most, where its configuration says it."""
    config = getattr(model, "config", None)
    places = (getattr(config, "decoder", None), config)
    found = (getattr(place, name, None) for place in places for name in _POSITIONS)
    return next((size for size in found if isinstance(size, int) and size > 0), MOST + _PROMPT)


def greedy(loaded: Any, inputs: dict[str, Tensor]) -> list[list[int]]:
    """The likeliest text of each context, token by token, at most 64; the start token alone where there is no head."""
    model, contexts = loaded.model, len(next(iter(inputs.values())))
    if not getattr(model, "can_generate", lambda: False)():
        return [[int(loaded.decoder_start or 0)] for _ in range(contexts)]
    device = input_device(model)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    moved = {k: v.to(device, dtype) if v.is_floating_point() else v.to(device) for k, v in inputs.items()}
    with _without_advice(), evaluating(model), torch.inference_mode(), torch.random.fork_rng(devices=[]):
        limit = max(1, min(MOST, _positions(model) - _PROMPT))
        written = model.generate(**moved, max_new_tokens=limit, do_sample=False, num_beams=1)
    return [_from_start(loaded, row) for row in written.cpu().tolist()]


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """What transformers says on standard error of how it is called; errors are raised all the same."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _from_start(loaded: Any, ids: list[int]) -> list[int]:
    """Ids from the start token on, up to the first end: what comes after an end is padding."""
    start = int(loaded.decoder_start or 0)
    ids = ids[1:] if ids and ids[0] == start else ids
    ends = _ends(loaded.model)
    stop = next((place for place, i in enumerate(ids) if i in ends), len(ids))
    return [start, *ids[:stop]]


def _ends(model: Any) -> set[int]:
    places = (getattr(model, "generation_config", None), getattr(model, "config", None))
    found = (getattr(place, "eos_token_id", None) for place in places)
    return {
        int(i) for value in found for i in (value if isinstance(value, (list, tuple)) else [value]) if i is not None
    }


def decoder_inputs(loaded: Any, texts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Ids and mask of a batch of texts, padded on the right."""
    width = max(map(len, texts))
    ids = torch.full((len(texts), width), loaded.pad_id, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
        mask[row, : len(text)] = 1
    return {"decoder_input_ids": ids, "decoder_attention_mask": mask}
