"""The two sides of an encoder–decoder where a batch of sound or images feeds one of them only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from anisoscope.capture.frames import SOUND
from anisoscope.capture.layout import Layout, unwrapped
from anisoscope.capture.sites import Site
from anisoscope.errors import AnisoscopeError

MEDIA = (*SOUND, "pixel_values")
_DECODED = ("decoder_input_ids", "decoder_inputs_embeds", "labels", "encoder_outputs")


def reader_of(
    model: nn.Module, layout: Layout | None, inputs: Mapping[str, Any], *, sites: Sequence[Site]
) -> tuple[nn.Module, str]:
    """The model and "", or its encoder alone and a note where a batch has nothing for the decoder to read."""
    sides = {stack.name: stack for stack in (layout.stacks if layout is not None else ())}
    media = any(name in inputs for name in MEDIA)
    if not media or set(sides) != {"encoder", "decoder"} or any(inputs.get(name) is not None for name in _DECODED):
        return model, ""
    what = f"the batch has no decoder_input_ids for the decoder of {type(unwrapped(model)).__name__}"
    if not any(site.stack == "encoder" for site in sites):
        raise AnisoscopeError(f"{what}; add them (the start token alone will do), or ask for sites of the encoder.")
    return model.get_submodule(sides["encoder"].owner), f"{what}: its encoder alone was measured"
