"""A model as a plan sees it: its shape without its weights, the passes over it counted, the rows of its sites sized."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.capture import Capture
from anisoscope.capture.sites.layout import Layout, find_layout
from anisoscope.capture.sites.site import Site
from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.measurement.bank import Setup
from anisoscope.measurement.feed import ShapeReader, SiteShape
from anisoscope.models.checkpoint import LoadOptions, classes, fresh_config, hub_options, read_config, with_own_loss
from anisoscope.models.forward import evaluating, modality_of
from anisoscope.models.load import max_context, quiet, readable_errors
from anisoscope.models.source import SHAPE, ModelSource, parse_model
from anisoscope.planning.trace import PassTrace, trace

# names of a shape, and what llama calls them
_SIZES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
}
_NEEDED = ("layers", "width", "heads")
_VOCABULARY = 32_000  # where a shape names none
_BUILT = 1 << 29  # parameters up to which a model of sounds or pictures is built to see the shape of its rows
_LONGEST = 1 << 17  # positions of a shape that names none
_SAMPLES = {"input_values": 16_000, "input_features": 100}  # of a second of sound


@dataclass(frozen=True)
class ModelShape:
    """A model to be planned for; `model` has no weights (it is on the meta device) unless it reads sounds or pictures.

    `files` are the bytes of its weights on disk, 0 where nothing is read.
    """

    name: str
    model: nn.Module
    longest: int  # positions of a context
    files: int = 0
    notes: list[str] = field(default_factory=list)

    @cached_property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @cached_property
    def layout(self) -> Layout:
        return find_layout(self.model)

    @property
    def config(self) -> Any:
        return getattr(self.model, "config", None)

    @cached_property
    def reads_text(self) -> bool:
        return modality_of(self.model).is_text

    def size(self, *names: str) -> int:
        """The first of these sizes that its configuration states; 0 if none."""
        parts = [self.config, *(getattr(self.config, n, None) for n in ("text_config", "vision_config"))]
        found = (getattr(part, name, None) for part in parts if part is not None for name in names)
        return next((value for value in found if isinstance(value, int) and value), 0)

    @property
    def width(self) -> int:
        return self.size("hidden_size", "d_model", "n_embd") or self.parameter_width

    @cached_property
    def parameter_width(self) -> int:
        """The usual last size of its matrices, for models whose configuration names no width."""
        sizes = [p.shape[-1] for p in self.model.parameters() if p.ndim > 1]
        return max(set(sizes), key=sizes.count) if sizes else 1

    def batch(self, contexts: int, length: int, *, seconds: float = 10.0) -> dict[str, Tensor]:
        """A batch of the right shape, full of zeros, on the device of the model."""
        device = next(self.model.parameters()).device
        name = getattr(self.model, "main_input_name", "input_ids")
        if name == "input_ids":
            ids = torch.zeros(contexts, length, dtype=torch.int64, device=device)
            twice = bool(getattr(self.config, "is_encoder_decoder", False))
            return {"input_ids": ids} | ({"decoder_input_ids": ids} if twice else {})
        if name == "pixel_values":
            side = self.config.image_size if hasattr(self.config, "image_size") else 224
            sides = tuple(side) if isinstance(side, list | tuple) else (side, side)
            return {name: torch.zeros(contexts, self.size("num_channels") or 3, *sides, device=device)}
        samples = int(_SAMPLES.get(name, 16_000) * seconds)
        if name == "input_features":
            frames = 2 * self.size("max_source_positions") or samples
            given = {name: torch.zeros(contexts, self.size("num_mel_bins") or 80, frames, device=device)}
            return given | {"decoder_input_ids": torch.zeros(contexts, 8, dtype=torch.int64, device=device)}
        return {name: torch.zeros(contexts, samples, device=device)}

    def passed(self, contexts: int, length: int) -> PassTrace:
        """One forward pass over a batch."""
        return self._passed(length).longer(contexts)

    def _passed(self, length: int) -> PassTrace:
        batch: dict[str, Any] = self.batch(1, length)
        accepted = inspect.signature(self.model.forward).parameters  # as `models.forward.forward` calls it
        batch |= {name: value for name, value in (("use_cache", False), ("logits_to_keep", 1)) if name in accepted}
        with evaluating(self.model), torch.no_grad():
            return trace(lambda: self.model(**batch))

    def updated(self, contexts: int, length: int) -> PassTrace:
        """One forward and backward pass over a batch."""
        batch = self.batch(1, length)

        def run() -> None:
            out = self.model(**batch)
            made = out.logits if hasattr(out, "logits") else out.last_hidden_state
            if "input_ids" in batch and made.shape[-1] == self.size("vocab_size"):
                loss = nn.functional.cross_entropy(made.flatten(0, -2).float(), batch["input_ids"].flatten())
            else:
                loss = made.float().square().mean()
            loss.backward()

        found = trace(run)
        self.model.zero_grad(set_to_none=True)
        return found.longer(contexts)

    def shapes(self, setup: Setup, length: int) -> Mapping[Site, SiteShape]:
        """The shape of the rows of one context at every site."""
        if not self.reads_text:
            reader = ShapeReader()
            capture = Capture(self.model, setup.captured, reader, layout=setup.layout)
            with evaluating(self.model), torch.inference_mode(), capture:
                self.model(**self.batch(1, length))
            return reader.shapes
        heads = self.size("num_attention_heads", "n_head", "num_heads") or 1
        keys = self.size("num_key_value_heads") or heads
        inner = self.size("head_dim", "d_kv") or self.width // heads
        by_kind = {"scores": (1, heads), "cross_scores": (1, heads)}
        by_kind |= dict.fromkeys(("query", "query_unrotated", "cross_query"), (inner, heads))
        by_kind |= dict.fromkeys(("key", "key_unrotated", "cross_key"), (inner, keys))
        positions = {"cls": 1, "stage_mean": 1}
        return {
            site: SiteShape(positions.get(site.kind, length), *by_kind.get(site.kind, (self.width, 1)))
            for site in setup.captured
        }


def subject_of(
    spec: str, *, random_init: bool = False, architecture: str | None = None, remote: bool = False
) -> ModelShape:
    """The model that is named as on the command line: a folder, a hub id, a file – or a shape, `shape:layers=80,…`."""
    if spec.startswith(SHAPE):
        return _of_shape(spec)
    source = parse_model(spec, random_init=random_init, state=architecture is not None)
    plan = parse_model(architecture, random_init=True) if architecture and source.kind == "state" else source
    if plan.kind == "rows":
        raise AnisoscopeError(f"{spec!r} is a file of rows, which is measured in about the time that it takes to read.")
    wanted = LoadOptions(torch.device("cpu"), trust_remote_code=remote, any_head=True)
    notes: list[str] = []
    with quiet(plan), readable_errors(plan):
        config = read_config(plan, options=hub_options(plan, wanted), notes=notes)
        model = _weightless(config, remote=remote)
    fresh = random_init or plan.kind == "config"
    return _subject(plan.name, model, files=0 if fresh else _stored(plan), notes=notes)


def _of_shape(spec: str) -> ModelShape:
    """A decoder of these sizes, with the parts that today's have: grouped queries, a gated feed-forward part."""
    given = dict(part.partition("=")[::2] for part in spec.removeprefix(SHAPE).split(",") if part)
    for name, value in given.items():
        if name not in _SIZES:
            raise unknown_name("size of a shape", name, _SIZES)
        if not value.isdecimal() or not int(value):
            raise AnisoscopeError(f"{name} of the shape is {value!r}; expected a whole number from 1 on.")
    if missing := [name for name in _NEEDED if name not in given]:
        raise AnisoscopeError(
            f"the shape {spec!r} does not say its {missing[0]}; expected at least layers, width and heads, such as "
            "shape:layers=80,width=8192,heads=64."
        )
    sizes = {name: int(value) for name, value in given.items()}
    sizes.setdefault("kv_heads", sizes["heads"])
    sizes.setdefault("ffn", 8 * ((sizes["width"] * 8 // 3 + 7) // 8))
    sizes.setdefault("vocab", _VOCABULARY)
    sizes.setdefault("context", _LONGEST)
    if sizes["width"] % sizes["heads"] or sizes["heads"] % sizes["kv_heads"]:
        raise AnisoscopeError(
            f"a width of {sizes['width']} with {sizes['heads']} heads and {sizes['kv_heads']} key heads is no shape; "
            "expected heads that divide the width, and key heads that divide the heads."
        )
    with quiet():
        model = _weightless(fresh_config("llama", {_SIZES[name]: value for name, value in sizes.items()}))
    found = _subject(spec, model)
    return replace(found, files=2 * found.parameters)  # as published models are stored


def _weightless(config: Any, *, remote: bool = False) -> nn.Module:
    """The model of a configuration on the meta device; one of sounds or pictures with random weights on the host."""
    auto = classes(config, with_head=True, any_head=True, remote=remote)[0]
    build = auto.from_config if hasattr(auto, "from_config") else auto._from_config
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model: nn.Module = build(config)
    if not modality_of(model).is_text and sum(p.numel() for p in model.parameters()) < _BUILT:
        with torch.random.fork_rng(devices=[]):
            model = build(config)
    return with_own_loss(model)


def of_model(name: str, model: nn.Module) -> ModelShape:
    """A model that was built for a plan."""
    return _subject(name, model)


def _subject(name: str, model: nn.Module, **more: Any) -> ModelShape:
    return ModelShape(name, model, max_context(model, model.config), **more)


def _stored(source: ModelSource) -> int:
    """Bytes of the weights in a folder; 0 where they are not here."""
    place = Path(source.place)
    if not place.is_dir():
        return 0
    return sum(f.stat().st_size for pattern in ("*.safetensors", "*.bin", "*.gguf") for f in place.glob(pattern))
